//! Connections to one server: keep-alive connections for requests, idle connections, and slow readers.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use hyper::Method;
use hyper::body::Bytes;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::LocalSet;
use tokio::time::{Instant, sleep, timeout_at};

use super::answer::RawAnswer;
use super::requests::Target;
use sterling_core::error::{Error, Result};
use sterling_core::tasks;

/// Size of the receive buffer of a slow reader; further bytes stay buffered in the server.
const SLOW_BUFFER_BYTES: u32 = 4096;
/// Bytes per second that a slow reader reads.
const SLOW_BYTES_PER_SECOND: usize = 1024;
/// Pause after a connection was closed, or after a slow reader received a complete answer.
const PAUSE: Duration = Duration::from_secs(1);

/// Outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// HTTP status of a complete answer.
    Status(u16),
    Error,
    /// No answer until long after the deadline.
    NoAnswer,
    /// The server had not accepted the connection long after the deadline.
    NoConnection,
    /// All connections were busy until the deadline of the request.
    Unsent,
}

/// Runs `work` on a single-threaded runtime, because connections are not shared. The thread waits for `gather` before
/// it polls its connections again.
pub(super) fn local<T>(gather: Duration, work: impl Future<Output = T>) -> Result<T> {
    let runtime =
        tasks::CALLS.runtime_here(|builder| builder.enable_all().on_thread_park(move || std::thread::sleep(gather)))?;
    Ok(LocalSet::new().block_on(&runtime, work))
}

/// Requests a JSON document with GET.
///
/// # Errors
/// `Unavailable` if the server does not answer with a JSON document.
pub fn get(target: &Target, path: &str) -> Result<Value> {
    local(Duration::ZERO, Client::new(target.clone(), 1).document(&Method::GET, path, b""))?
}

/// Requests a JSON document with POST, without a timeout.
///
/// # Errors
/// As [`get`].
pub fn post(target: &Target, path: &str) -> Result<Value> {
    local(Duration::ZERO, Client::new(target.clone(), 1).document(&Method::POST, path, b""))?
}

/// A keep-alive connection.
struct PersistentConnection {
    stream: TcpStream,
    answer: RawAnswer,
}

/// Connections of one thread to one server.
pub(super) struct Client {
    target: Target,
    /// Stack of unused connections: the last used connection is reused first, so that few connections are open.
    free: RefCell<Vec<PersistentConnection>>,
    permits: Semaphore,
    closed: Cell<usize>,
}

impl Client {
    pub(super) fn new(target: Target, connections: usize) -> Rc<Self> {
        let permits = Semaphore::new(connections);
        Rc::new(Client { target, free: RefCell::default(), permits, closed: Cell::new(0) })
    }

    /// Returns the number of idle connections and slow readers that the server closed.
    pub(super) fn closed(&self) -> usize {
        self.closed.get()
    }

    /// Returns the bytes of a request on a keep-alive connection.
    pub(super) fn request(&self, method: &str, path: &str, body: &[u8]) -> Vec<u8> {
        self.request_and(method, path, body, "keep-alive")
    }

    fn request_and(&self, method: &str, path: &str, body: &[u8], then: &str) -> Vec<u8> {
        let (host, length) = (&self.target.authority, body.len());
        let key = self.target.key.as_ref().map(|key| format!("authorization: Bearer {key}\r\n")).unwrap_or_default();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: {then}\r\ncontent-type: application/json\r\n\
             {key}content-length: {length}\r\n\r\n"
        );
        [head.as_bytes(), body].concat()
    }

    /// Sends a request that was due at `due`, and reads the complete answer, with which `received` is called.
    pub(super) async fn post(
        &self,
        request: &[u8],
        timeout: Duration,
        due: Instant,
        received: impl FnOnce(&RawAnswer),
    ) -> End {
        let deadline = due + timeout;
        let _permit = match self.permits.try_acquire() {
            Ok(permit) => permit,
            Err(_) => match timeout_at(deadline, self.permits.acquire()).await {
                Ok(Ok(permit)) => permit,
                _ => return End::Unsent,
            },
        };
        // Waits beyond the deadline for a late answer, but not forever.
        let is_connected = Cell::new(false);
        match timeout_at(deadline + timeout + PAUSE, self.ask(request, &is_connected)).await {
            Ok(Ok(connection)) => {
                let status = connection.answer.status();
                received(&connection.answer);
                self.keep(connection);
                End::Status(status)
            }
            Ok(Err(_)) => End::Error,
            Err(_) if is_connected.get() => End::NoAnswer,
            Err(_) => End::NoConnection,
        }
    }

    /// Requests a JSON document.
    pub(super) async fn document(&self, method: &Method, path: &str, body: &[u8]) -> Result<Value> {
        let (status, answer) = self.answer(method, path, body).await?;
        serde_json::from_slice(&answer).ok().filter(|_| status == 200).ok_or_else(|| {
            let begins = String::from_utf8_lossy(&answer[..answer.len().min(200)]);
            self.failed(path, format!("answered {status}: {begins}"))
        })
    }

    /// Sends a request, and returns the status and the body of any answer.
    pub(super) async fn answer(&self, method: &Method, path: &str, body: &[u8]) -> Result<(u16, Vec<u8>)> {
        let requested = self.ask(&self.request(method.as_str(), path, body), &Cell::default()).await;
        let connection = requested.map_err(|e| self.failed(path, e.to_string()).caused_by(e))?;
        let answer = (connection.answer.status(), connection.answer.body());
        self.keep(connection);
        Ok(answer)
    }

    fn failed(&self, path: &str, why: String) -> Error {
        Error::unavailable(format!("http://{}{path}: {why}", self.target.authority))
    }

    /// Sends a request on a free or new connection, and reads the complete answer into `answer` of the returned
    /// connection. `is_connected` records whether a connection was established.
    async fn ask(&self, request: &[u8], is_connected: &Cell<bool>) -> std::io::Result<PersistentConnection> {
        loop {
            is_connected.set(false);
            let free = self.free.borrow_mut().pop();
            let is_new = free.is_none();
            let mut connection = match free {
                Some(connection) => connection,
                None => self.connect().await?,
            };
            is_connected.set(true);
            match exchange(&mut connection, request).await {
                Ok(()) => return Ok(connection),
                // The server had closed the connection while it was free.
                Err(_) if !is_new && connection.answer.is_empty() => {}
                Err(e) => return Err(e),
            }
        }
    }

    async fn connect(&self) -> std::io::Result<PersistentConnection> {
        let stream = TcpStream::connect(self.target.address).await?;
        stream.set_nodelay(true)?;
        Ok(PersistentConnection { stream, answer: RawAnswer::default() })
    }

    fn keep(&self, connection: PersistentConnection) {
        if connection.answer.keeps_open() {
            self.free.borrow_mut().push(connection);
        }
    }

    /// Keeps a connection without requests open, and reopens it if the server closes it.
    pub(super) async fn idle(self: Rc<Self>) {
        loop {
            if let Ok(mut stream) = TcpStream::connect(self.target.address).await {
                // Without a request, the only possible event of the connection is that the server closes it.
                let _ = stream.read(&mut [0]).await;
                self.closed.set(self.closed.get() + 1);
            }
            sleep(PAUSE).await;
        }
    }

    /// Sends a request, and reads the answer so slowly that a large one fills the server's send buffer.
    pub(super) async fn read_slowly(self: Rc<Self>, path: String, body: Bytes) {
        // With `connection: close`, the answer ends when the server closes the connection.
        let request = self.request_and("POST", &path, &body, "close");
        loop {
            if self.one_slow_answer(&request).await.is_err() {
                self.closed.set(self.closed.get() + 1);
            }
            sleep(PAUSE).await;
        }
    }

    async fn one_slow_answer(&self, request: &[u8]) -> std::io::Result<()> {
        let socket = match self.target.address.is_ipv4() {
            true => TcpSocket::new_v4(),
            false => TcpSocket::new_v6(),
        }?;
        socket.set_recv_buffer_size(SLOW_BUFFER_BYTES)?;
        let mut stream = socket.connect(self.target.address).await?;
        stream.write_all(request).await?;
        let mut part = [0; SLOW_BYTES_PER_SECOND];
        while stream.read(&mut part).await? > 0 {
            sleep(Duration::from_secs(1)).await;
        }
        Ok(())
    }
}

/// Sends a request over a connection and reads the complete answer.
async fn exchange(connection: &mut PersistentConnection, request: &[u8]) -> std::io::Result<()> {
    let PersistentConnection { stream, answer } = connection;
    answer.clear();
    stream.write_all(request).await?;
    while !answer.is_whole()? {
        if stream.read_buf(answer.buffer()).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(())
}
