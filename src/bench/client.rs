//! Connections to one server: those that ask, kept alive; those that say nothing; those that read too slowly.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep};

use super::report::End;
use super::requests::{Body, Target};
use crate::error::{Error, Result};

/// The receive buffer of a slow reader: what the server writes beyond it stays with the server.
const SLOW_BUFFER_BYTES: u32 = 4096;
/// What a slow reader takes in a second.
const SLOW_BYTES_PER_SECOND: usize = 1024;
/// How long a connection that was closed, or a reader that has all of its answer, waits before the next one.
const PAUSE: Duration = Duration::from_secs(1);

type Connection = SendRequest<Full<Bytes>>;

/// Connections to one server, for one thread.
pub(super) struct Client {
    target: Target,
    /// The one that was used last is used first, so that no more are open than are needed.
    free: RefCell<Vec<Connection>>,
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

    /// Sends a body that was due at `due` and reads the whole answer.
    pub(super) async fn post(&self, path: &str, body: &Body, due: Instant) -> End {
        let deadline = due + body.timeout;
        let Ok(Ok(_permit)) = tokio::time::timeout_at(deadline, self.permits.acquire()).await else {
            return End::Unsent;
        };
        // A server that answers at the deadline is heard; one that never answers does not hold the run for ever.
        let give_up = deadline + body.timeout + PAUSE;
        match tokio::time::timeout_at(give_up, self.ask(Method::POST, path, body.bytes.clone())).await {
            Ok(Ok((status, _))) => End::Status(status),
            Ok(Err(_)) => End::Error,
            Err(_) => End::NoAnswer,
        }
    }

    /// Asks for a JSON document.
    pub(super) async fn document(&self, method: Method, path: &str) -> Result<serde_json::Value> {
        let failed = |why: String| Error::unavailable(format!("http://{}{path}: {why}", self.target.authority));
        let (status, body) =
            self.ask(method, path, Bytes::new()).await.map_err(|e| failed(format!("{e}")).caused_by(e))?;
        serde_json::from_slice(&body).ok().filter(|_| status == 200).ok_or_else(|| {
            failed(format!("answered {status}: {}", String::from_utf8_lossy(&body[..body.len().min(200)])))
        })
    }

    async fn ask(&self, method: Method, path: &str, body: Bytes) -> std::io::Result<(u16, Bytes)> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = path.parse().map_err(std::io::Error::other)?;
        let host = self.target.authority.parse().map_err(std::io::Error::other)?;
        request.headers_mut().insert(HOST, host);
        request.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static("application/json"));
        loop {
            let (mut connection, is_new) = self.connection().await?;
            match connection.try_send_request(request).await {
                Ok(response) => return self.read(response, connection).await,
                // The server had closed it while it was free, and the request has not gone out.
                Err(mut e) => match e.take_message().filter(|_| !is_new) {
                    Some(unsent) => request = unsent,
                    None => return Err(std::io::Error::other(e.into_error())),
                },
            }
        }
    }

    async fn read(&self, response: Response<Incoming>, connection: Connection) -> std::io::Result<(u16, Bytes)> {
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.map_err(std::io::Error::other)?.to_bytes();
        self.free.borrow_mut().push(connection);
        Ok((status, body))
    }

    /// A connection that is ready, and whether it is new.
    async fn connection(&self) -> std::io::Result<(Connection, bool)> {
        loop {
            let free = self.free.borrow_mut().pop();
            let Some(mut connection) = free else { break };
            if connection.ready().await.is_ok() {
                return Ok((connection, false));
            }
        }
        let stream = TcpStream::connect(self.target.address).await?;
        stream.set_nodelay(true)?;
        let (connection, driver) = handshake(TokioIo::new(stream)).await.map_err(std::io::Error::other)?;
        tokio::task::spawn_local(driver);
        Ok((connection, true))
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
        loop {
            if self.one_slow_answer(&path, &body).await.is_err() {
                self.closed.set(self.closed.get() + 1);
            }
            sleep(PAUSE).await;
        }
    }

    async fn one_slow_answer(&self, path: &str, body: &[u8]) -> std::io::Result<()> {
        let socket = match self.target.address.is_ipv4() {
            true => TcpSocket::new_v4(),
            false => TcpSocket::new_v6(),
        }?;
        socket.set_recv_buffer_size(SLOW_BUFFER_BYTES)?;
        let mut stream = socket.connect(self.target.address).await?;
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            self.target.authority,
            body.len()
        );
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(body).await?;
        let mut part = [0; SLOW_BYTES_PER_SECOND];
        while stream.read(&mut part).await? > 0 {
            sleep(Duration::from_secs(1)).await;
        }
        Ok(())
    }
}
