//! Updates in streams of a real NATS server: brokers that are killed, networks that are cut, several servers that write at once.
//! What was acknowledged is there once, in order, for everybody.

mod journals;
mod routed;
mod servers;

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

/// A NATS server with streams in a temporary folder, killed when the value is dropped.
pub struct Broker {
    child: Child,
    pub port: u16,
    monitor: u16,
    folder: tempfile::TempDir,
}

impl Broker {
    pub fn start() -> Self {
        let [port, monitor] = [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port());
        let folder = tempfile::tempdir().unwrap();
        let child = Broker::spawn((port, monitor), folder.path());
        Broker { child, port, monitor, folder }
    }

    fn spawn((port, monitor): (u16, u16), folder: &Path) -> Child {
        let mut command = Command::new(std::env::var("NATS_SERVER").as_deref().unwrap_or("nats-server"));
        command
            .args(["-a", "127.0.0.1", "-js", "-p", &port.to_string(), "-m", &monitor.to_string(), "-sd"])
            .arg(folder);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("nats-server is installed");
        let start = Instant::now();
        while ask(port, "$JS.API.INFO", "").is_none() {
            assert!(start.elapsed() < Duration::from_secs(20), "the broker does not answer");
            sleep(Duration::from_millis(20));
        }
        child
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn restart(&mut self) {
        self.child = Broker::spawn((self.port, self.monitor), self.folder.path());
    }

    /// What a broker that acknowledges before it syncs may do when the power goes, at its worst.
    pub fn lose_all(&mut self) {
        self.kill();
        self.folder = tempfile::tempdir().unwrap();
        self.restart();
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    pub fn monitor(&self) -> String {
        format!("http://127.0.0.1:{}", self.monitor)
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.kill();
    }
}

/// What the broker answers to a request, in the protocol's own words; nothing where it does not.
pub fn ask(port: u16, subject: &str, body: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
    let request =
        format!("CONNECT {{\"verbose\":false}}\r\nSUB told 1\r\nPUB {subject} told {}\r\n{body}\r\n", body.len());
    stream.write_all(request.as_bytes()).ok()?;
    let (mut text, mut some) = (String::new(), [0; 4096]);
    loop {
        let read = stream.read(&mut some).ok()?;
        text.push_str(&String::from_utf8_lossy(&some[..read]));
        if read == 0 {
            return None;
        }
        if let Some((_, message)) = text.split_once("MSG told 1 ")
            && message.trim_end().ends_with('}')
        {
            return Some(message.to_owned());
        }
    }
}

/// A way to the broker that can be cut, or swallow what is sent.
pub struct Wire {
    port: u16,
    open: Arc<Mutex<Option<Vec<TcpStream>>>>,
    swallows: Arc<AtomicBool>,
    /// Milliseconds that it takes longer.
    delay: Arc<AtomicU64>,
}

impl Wire {
    pub fn to(broker: &Broker) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let open = Arc::new(Mutex::new(Some(Vec::new())));
        let (swallows, delay) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let wire = Wire { port, open: open.clone(), swallows: swallows.clone(), delay: delay.clone() };
        let there = broker.port;
        spawn(move || {
            for here in listener.incoming().map_while(std::result::Result::ok) {
                let mut open = open.lock().unwrap();
                // While it is cut no connection stays.
                let Some(open) = &mut *open else { continue };
                let Ok(there) = TcpStream::connect(("127.0.0.1", there)) else { continue };
                for (from, to) in [(&here, &there), (&there, &here)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let (swallows, delay) = (swallows.clone(), delay.clone());
                    spawn(move || {
                        let mut some = [0; 1 << 16];
                        while let Ok(read @ 1..) = from.read(&mut some) {
                            sleep(Duration::from_millis(delay.load(Ordering::Relaxed)));
                            // It comes when the network is whole again, as TCP sends it again.
                            while swallows.load(Ordering::Relaxed) {
                                sleep(Duration::from_millis(2));
                            }
                            if to.write_all(&some[..read]).is_err() {
                                break;
                            }
                        }
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
                open.extend([here, there]);
            }
        });
        wire
    }

    pub fn cut(&self) {
        let open = self.open.lock().unwrap().take();
        open.iter().flatten().for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
    }

    /// Everything takes longer, in both directions.
    pub fn delay(&self, by: Duration) {
        self.delay.store(by.as_millis() as u64, Ordering::Relaxed);
    }

    /// Nothing comes through, and nobody is told.
    pub fn swallow(&self) {
        self.swallows.store(true, Ordering::Relaxed);
    }

    pub fn mend(&self) {
        self.swallows.store(false, Ordering::Relaxed);
        *self.open.lock().unwrap() = Some(Vec::new());
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }
}

/// Tells writers to stop, also where a test ends before.
pub struct Stop<'a>(pub &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
