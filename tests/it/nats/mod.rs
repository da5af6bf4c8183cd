//! Updates in streams of a real NATS server: killed brokers, network partitions, several concurrent writers. All servers see the
//! acknowledged updates once, in order.

pub mod faults;
mod journals;
mod rolling;
mod routed;
mod servers;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use base64::Engine as _;
use serde_json::Value;

use crate::network::Wire;

/// A NATS server with streams in a temporary folder, killed when the value is dropped.
pub struct Broker {
    child: Child,
    pub port: u16,
    monitor: u16,
    folder: tempfile::TempDir,
    /// Configuration file, if there is one.
    configuration: Option<tempfile::NamedTempFile>,
}

impl Broker {
    pub fn start() -> Self {
        let [port, monitor] = [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port());
        let folder = tempfile::tempdir().unwrap();
        let child = Broker::spawn((port, monitor), folder.path(), None);
        Broker { child, port, monitor, folder, configuration: None }
    }

    /// Starts a broker with its own configuration, such as permissions.
    pub fn configured(text: &str) -> Self {
        let [port, monitor] = [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port());
        let (folder, mut file) = (tempfile::tempdir().unwrap(), tempfile::NamedTempFile::new().unwrap());
        file.write_all(text.as_bytes()).unwrap();
        let child = Broker::spawn((port, monitor), folder.path(), Some(file.path()));
        Broker { child, port, monitor, folder, configuration: Some(file) }
    }

    /// Restarts with another configuration: in version 2.9 a reload of users removes the streams of the account.
    pub fn reconfigure(&mut self, text: &str) {
        self.kill();
        std::fs::write(self.configuration.as_ref().unwrap().path(), text).unwrap();
        self.restart();
    }

    fn spawn((port, monitor): (u16, u16), folder: &Path, configuration: Option<&Path>) -> Child {
        let mut command = Command::new(std::env::var("NATS_SERVER").as_deref().unwrap_or("nats-server"));
        command
            .args(["-a", "127.0.0.1", "-js", "-p", &port.to_string(), "-m", &monitor.to_string(), "-sd"])
            .arg(folder);
        if let Some(file) = configuration {
            command.arg("-c").arg(file);
        }
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("nats-server is installed");
        let start = Instant::now();
        // A broker with authentication does not answer these requests: it is up once it sends its greeting.
        let is_there = || match configuration {
            None => ask(port, "$JS.API.INFO", "").is_some(),
            Some(_) => greets(port),
        };
        while !is_there() {
            assert!(start.elapsed() < Duration::from_secs(20), "the broker does not answer");
            sleep(Duration::from_millis(20));
        }
        child
    }

    /// Copies its current data.
    pub fn backup(&mut self) -> tempfile::TempDir {
        self.kill();
        let copy = tempfile::tempdir().unwrap();
        copied(self.folder.path(), copy.path());
        self.restart();
        copy
    }

    /// Restarts with the data of a copy.
    pub fn restore(&mut self, copy: &tempfile::TempDir) {
        self.kill();
        self.folder = tempfile::tempdir().unwrap();
        copied(copy.path(), self.folder.path());
        self.restart();
    }

    /// Stops its process, or continues it.
    pub fn hang(&self, is_hanging: bool) {
        let signal = if is_hanging { "-STOP" } else { "-CONT" };
        assert!(Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap().success());
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn restart(&mut self) {
        let configuration = self.configuration.as_ref().map(|file| file.path());
        self.child = Broker::spawn((self.port, self.monitor), self.folder.path(), configuration);
    }

    /// Deletes its data: the worst case of a power loss for a broker that acknowledges before it syncs.
    pub fn lose_all(&mut self) {
        self.kill();
        self.folder = tempfile::tempdir().unwrap();
        self.restart();
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Returns a network connection to it that can be cut.
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

/// Copies the content of a folder.
fn copied(from: &Path, to: &Path) {
    let copy = Command::new("cp").arg("-a").arg(from.join(".")).arg(to).status().unwrap();
    assert!(copy.success());
}

/// Returns whether a broker listens at the port and sends its greeting.
fn greets(port: u16) -> bool {
    let Ok(stream) = TcpStream::connect(("127.0.0.1", port)) else { return false };
    stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).is_ok() && line.starts_with("INFO")
}

/// Returns the answer of the broker to a request, in the text protocol; None without an answer.
pub fn ask(port: u16, subject: &str, body: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
    let request =
        format!("CONNECT {{\"verbose\":false}}\r\nSUB reply 1\r\nPUB {subject} reply {}\r\n{body}\r\n", body.len());
    stream.write_all(request.as_bytes()).ok()?;
    let (mut text, mut some) = (String::new(), [0; 4096]);
    loop {
        let read = stream.read(&mut some).ok()?;
        text.push_str(&String::from_utf8_lossy(&some[..read]));
        if read == 0 {
            return None;
        }
        if let Some((_, message)) = text.split_once("MSG reply 1 ")
            && message.trim_end().ends_with('}')
        {
            return Some(message.to_owned());
        }
    }
}

/// Publishes bytes, and waits until the broker has them.
pub fn send(port: u16, subject: &str, bytes: &[u8]) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let head = format!("CONNECT {{\"verbose\":false}}\r\nPUB {subject} {}\r\n", bytes.len());
    stream.write_all(&[head.as_bytes(), bytes, b"\r\nPING\r\n"].concat()).unwrap();
    let mut lines = BufReader::new(stream).lines();
    assert!(lines.any(|line| line.unwrap().starts_with("PONG")));
}

/// Returns the bytes of a message of a stream.
pub fn message(port: u16, stream: &str, sequence: u64) -> Vec<u8> {
    let call = format!("$JS.API.STREAM.MSG.GET.{stream}");
    let reported = ask(port, &call, &format!("{{\"seq\": {sequence}}}")).unwrap();
    let reported: Value = serde_json::from_str(reported.split_once('\n').unwrap().1.trim()).unwrap();
    base64::engine::general_purpose::STANDARD.decode(reported["message"]["data"].as_str().unwrap()).unwrap()
}

/// Stops the writers, also if a test ends early.
pub struct Stop<'a>(pub &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
