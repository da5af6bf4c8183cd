//! Updates in streams of a real NATS server: brokers that are killed, networks that are cut, several servers that write at once.
//! What was acknowledged is there once, in order, for everybody.

mod journals;
mod routed;
mod servers;

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::network::Wire;

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

    /// A way to it that can be cut.
    pub fn behind_a_wire(&self) -> Wire {
        Wire::to(self.port)
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

/// Tells writers to stop, also where a test ends before.
pub struct Stop<'a>(pub &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
