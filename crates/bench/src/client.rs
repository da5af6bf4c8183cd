//! Connections to one server: those that ask, kept alive; those that say nothing; those that read too slowly.

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

/// The receive buffer of a slow reader: what the server writes beyond it stays with the server.
const SLOW_BUFFER_BYTES: u32 = 4096;
/// What a slow reader takes in a second.
const SLOW_BYTES_PER_SECOND: usize = 1024;
/// How long a connection that was closed, or a reader that has all of its answer, waits before the next one.
const PAUSE: Duration = Duration::from_secs(1);

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The status of a whole answer.
    Status(u16),
    /// The connection failed.
    Error,
    /// Nothing came long after the deadline.
    NoAnswer,
    /// The server had not taken the connection in by then.
    NoConnection,
    /// All connections were busy to its deadline.
    Unsent,
}

/// Runs what needs a thread of its own: connections that are not shared. It looks at them once in `gather` at most.
pub(super) fn local<T>(gather: Duration, work: impl Future<Output = T>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .on_thread_park(move || std::thread::sleep(gather))
        .build()
        .map_err(|e| Error::io("the generator's thread", e))?;
    Ok(LocalSet::new().block_on(&runtime, work))
}

/// What a server says at a path.
///
/// # Errors
/// `Unavailable` where it does not answer with a JSON document.
pub fn get(target: &Target, path: &str) -> Result<Value> {
    local(Duration::ZERO, Client::new(target.clone(), 1).document(&Method::GET, path, b""))?
}

/// What a server says when it is told to do what a path names, however long that takes.
///
/// # Errors
/// As [`get`].
pub fn post(target: &Target, path: &str) -> Result<Value> {
    local(Duration::ZERO, Client::new(target.clone(), 1).document(&Method::POST, path, b""))?
}

/// A connection that is kept alive.
struct KeptAlive {
    stream: TcpStream,
    answer: RawAnswer,
}

/// Connections to one server, for one thread.
pub(super) struct Client {
    target: Target,
    /// The one that was used last is used first, so that no more are open than are needed.
    free: RefCell<Vec<KeptAlive>>,
    permits: Semaphore,
    closed: Cell<usize>,
}

impl Client {
    pub(super) fn new(target: Target, connections: usize) -> Rc<Self> {
        let permits = Semaphore::new(connections);
        Rc::new(Client { target, free: RefCell::default(), permits, closed: Cell::new(0) })
    }

    /// Idle connections and slow readers that the server closed.
    pub(super) fn closed(&self) -> usize {
        self.closed.get()
    }

    /// A request as it goes over a connection, which stays open after it.
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

    /// Sends a request that was due at `due` and is worth `timeout`, and reads the whole answer, which `heard` may look at.
    pub(super) async fn post(
        &self,
        request: &[u8],
        timeout: Duration,
        due: Instant,
        heard: impl FnOnce(&RawAnswer),
    ) -> End {
        let deadline = due + timeout;
        let _permit = match self.permits.try_acquire() {
            Ok(permit) => permit,
            Err(_) => match timeout_at(deadline, self.permits.acquire()).await {
                Ok(Ok(permit)) => permit,
                _ => return End::Unsent,
            },
        };
        // A server that answers at the deadline is heard; one that never answers does not hold the run for ever.
        let is_connected = Cell::new(false);
        match timeout_at(deadline + timeout + PAUSE, self.ask(request, &is_connected)).await {
            Ok(Ok(connection)) => {
                let status = connection.answer.status();
                heard(&connection.answer);
                self.keep(connection);
                End::Status(status)
            }
            Ok(Err(_)) => End::Error,
            Err(_) if is_connected.get() => End::NoAnswer,
            Err(_) => End::NoConnection,
        }
    }

    /// Asks for a JSON document.
    pub(super) async fn document(&self, method: &Method, path: &str, body: &[u8]) -> Result<Value> {
        let (status, answer) = self.answer(method, path, body).await?;
        serde_json::from_slice(&answer).ok().filter(|_| status == 200).ok_or_else(|| {
            let begins = String::from_utf8_lossy(&answer[..answer.len().min(200)]);
            self.failed(path, format!("answered {status}: {begins}"))
        })
    }

    /// Asks, and gives back the status and the body of the answer, whatever it is.
    pub(super) async fn answer(&self, method: &Method, path: &str, body: &[u8]) -> Result<(u16, Vec<u8>)> {
        let asked = self.ask(&self.request(method.as_str(), path, body), &Cell::default()).await;
        let connection = asked.map_err(|e| self.failed(path, e.to_string()).caused_by(e))?;
        let answer = (connection.answer.status(), connection.answer.body());
        self.keep(connection);
        Ok(answer)
    }

    fn failed(&self, path: &str, why: String) -> Error {
        Error::unavailable(format!("http://{}{path}: {why}", self.target.authority))
    }

    /// Sends a request and reads the whole answer, which the connection holds; tells whether it has one.
    async fn ask(&self, request: &[u8], is_connected: &Cell<bool>) -> std::io::Result<KeptAlive> {
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
                // The server had closed it while it was free.
                Err(_) if !is_new && connection.answer.is_empty() => {}
                Err(e) => return Err(e),
            }
        }
    }

    async fn connect(&self) -> std::io::Result<KeptAlive> {
        let stream = TcpStream::connect(self.target.address).await?;
        stream.set_nodelay(true)?;
        Ok(KeptAlive { stream, answer: RawAnswer::default() })
    }

    fn keep(&self, connection: KeptAlive) {
        if connection.answer.keeps_open() {
            self.free.borrow_mut().push(connection);
        }
    }

    /// Holds a connection that asks for nothing, and opens it again where the server closes it.
    pub(super) async fn idle(self: Rc<Self>) {
        loop {
            if let Ok(mut stream) = TcpStream::connect(self.target.address).await {
                // Nothing was asked, so that only an end can come.
                let _ = stream.read(&mut [0]).await;
                self.closed.set(self.closed.get() + 1);
            }
            sleep(PAUSE).await;
        }
    }

    /// Asks, and reads the answer so slowly that the server cannot get rid of a large one.
    pub(super) async fn read_slowly(self: Rc<Self>, path: String, body: Bytes) {
        // The end of an answer is the end of its connection.
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

/// Sends a request over a connection and reads the whole answer to it.
async fn exchange(connection: &mut KeptAlive, request: &[u8]) -> std::io::Result<()> {
    let KeptAlive { stream, answer } = connection;
    answer.clear();
    stream.write_all(request).await?;
    while !answer.is_whole()? {
        if stream.read_buf(answer.buffer()).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(())
}
