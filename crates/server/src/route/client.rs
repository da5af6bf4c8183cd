//! Persistent connections to one server, each for one call at a time. Dropping a call closes its connection, which the server
//! treats as a disconnected client.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Poll;
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, RETRY_AFTER};
use axum::http::response::Parts;
use axum::http::{HeaderValue, Method, Request, Response, StatusCode};
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};

use super::protocol::{CALL_HEADER, MEDIA_TYPE, REQUEST_ID, TIMEOUT_HEADER, TRACEPARENT, UNAPPLIED_HEADER, problem};
use super::tls::Connector;
use sterling_core::error::{Error, Kind, Result};
use sterling_core::locks::locked;
use sterling_core::quota::Memory;
use sterling_core::request::Origin;

/// Maximum size of an answer, in bytes.
const ANSWER_BYTES_MAX: usize = 256 << 20;
/// Number of simultaneous copies of an answer: received and decoded.
const ANSWER_COPIES: u64 = 2;
/// Maximum number of idle connections.
const IDLE_MAX: usize = 256;
/// Header of a call that is executed once, even if it is sent repeatedly.
const KEY_HEADER: &str = "idempotency-key";
/// Number of the next call; servers return it with their answers.
static CALLS: AtomicU64 = AtomicU64::new(1);
/// Timeout for connecting.
const CONNECT: Duration = Duration::from_secs(1);

/// Persistent connection. The connection is polled only while a call is in progress.
struct PersistentConnection {
    sender: SendRequest<Body>,
    wire: Wire,
}

type Connection = http1::Connection<TokioIo<Box<dyn Stream>>, Body>;

/// Connection, with or without TLS.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// Protocol driver of a connection; `None` once the connection is closed. Dropping the driver fails the calls that wait for an
/// answer.
struct Wire(Option<Pin<Box<Connection>>>);

impl Wire {
    /// Drives the connection on the caller's task while `what` runs, so that no other task must be woken.
    async fn with<T>(&mut self, what: impl Future<Output = T>) -> T {
        let mut what = pin!(what);
        poll_fn(|cx| {
            // The connection sends the request that the first poll of `what` wrote. If the answer arrives meanwhile,
            // the second poll returns it.
            if let Poll::Ready(done) = what.as_mut().poll(cx) {
                return Poll::Ready(done);
            }
            if self.0.as_mut().is_some_and(|connection| connection.as_mut().poll(cx).is_ready()) {
                self.0 = None;
            }
            what.as_mut().poll(cx)
        })
        .await
    }

    /// Returns whether the server has not closed the connection, as far as this is known without a call.
    async fn is_open(&mut self) -> bool {
        poll_fn(|cx| {
            if self.0.as_mut().is_some_and(|connection| connection.as_mut().poll(cx).is_ready()) {
                self.0 = None;
            }
            Poll::Ready(self.0.is_some())
        })
        .await
    }
}

/// Call that may be sent repeatedly.
#[derive(Clone, Debug)]
pub(super) struct Outgoing {
    pub(super) path: String,
    /// Body; `None` for a `GET`.
    pub(super) body: Option<Bytes>,
    pub(super) form: Form,
    /// Headers with the updates that the answer must include, or with the mark of background work.
    pub(super) headers: Vec<(&'static str, HeaderValue)>,
    /// Memory reservation for the answer, if it may be large.
    pub(super) memory: Option<Arc<Memory>>,
    pub(super) origin: Origin,
}

/// Format of a call and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// Protocol between routers and servers. A call without updates changes nothing, so it may be repeated.
    Pass,
    /// Public API: content type of the body, and an optional idempotency key. The call may change something, so it is sent once.
    Plain(&'static str, Option<HeaderValue>),
}

impl Outgoing {
    /// Creates a call of the protocol.
    pub(super) fn pass(path: String, body: Option<Bytes>) -> Self {
        Outgoing { path, body, form: Form::Pass, headers: Vec::new(), memory: None, origin: Origin::default() }
    }

    /// Creates a call of the public API.
    pub(super) fn plain(
        path: String,
        (body, media_type): (Option<Bytes>, &'static str),
        key: Option<HeaderValue>,
    ) -> Self {
        let form = Form::Plain(media_type, key);
        Outgoing { path, body, form, headers: Vec::new(), memory: None, origin: Origin::default() }
    }

    fn media_type(&self) -> &'static str {
        match self.form {
            Form::Pass => MEDIA_TYPE,
            Form::Plain(media_type, _) => media_type,
        }
    }

    fn answer_type(&self) -> &'static str {
        if self.form == Form::Pass { MEDIA_TYPE } else { "application/json" }
    }
}

/// Failure of a call.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) error: Error,
    /// True if the server may have received and executed the call.
    pub(super) may_be_applied: bool,
}

/// Client of one server.
pub(super) struct Client {
    address: SocketAddr,
    host: HeaderValue,
    /// Host name that the server's certificate must be valid for, and the TLS connector that verifies the certificate.
    name: String,
    connector: Option<Arc<Connector>>,
    /// `Authorization`, if the server requires a key.
    authorization: Option<HeaderValue>,
    /// Idle connections, most recently used first, so that no more stay open than needed.
    idle: Mutex<VecDeque<PersistentConnection>>,
}

impl Client {
    pub(super) fn new(address: SocketAddr, name: &str, key: &str, connector: Option<Arc<Connector>>) -> Self {
        // An address is visible ASCII.
        let host = HeaderValue::from_str(&address.to_string()).unwrap_or(HeaderValue::from_static("server"));
        let authorization = HeaderValue::from_str(&format!("Bearer {key}")).ok().filter(|_| !key.is_empty());
        Client { address, host, name: name.into(), connector, authorization, idle: Mutex::default() }
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    fn idle(&self) -> MutexGuard<'_, VecDeque<PersistentConnection>> {
        locked(&self.idle)
    }

    /// Closes idle connections.
    pub(super) fn forget(&self) {
        self.idle().clear();
    }

    /// Sends a call and reads the complete answer.
    ///
    /// # Errors
    /// Errors of the server; `Unavailable` if the connection fails or breaks; `DeadlineExceeded`.
    pub(super) async fn call(&self, call: &Outgoing, deadline: Instant) -> Result<Bytes> {
        self.try_call(call, deadline).await.map_err(|failed| failed.error)
    }

    /// Like [`Client::call`], but a failure reports whether the server may have received the call.
    pub(super) async fn try_call(&self, call: &Outgoing, deadline: Instant) -> std::result::Result<Bytes, Failed> {
        // Nothing is sent while a connection is being made.
        let is_sent = AtomicBool::new(false);
        let done = timeout_at(deadline, self.send(call, deadline, &is_sent)).await.unwrap_or_else(|_| Err(self.late()));
        let judged = done.and_then(|(head, body)| self.judge((head, body), call, &is_sent));
        judged.map_err(|error| Failed { may_be_applied: is_sent.load(Ordering::Relaxed), error })
    }

    /// Requests a path, and returns any status with its body.
    ///
    /// # Errors
    /// `Unavailable` if the connection fails or breaks; `DeadlineExceeded`.
    pub(super) async fn look(&self, path: &str, deadline: Instant) -> Result<(u16, Bytes)> {
        let call = Outgoing::pass(path.into(), None);
        let done = timeout_at(deadline, self.send(&call, deadline, &AtomicBool::new(false))).await;
        let (head, body) = done.unwrap_or_else(|_| Err(self.late()))?;
        Ok((head.status.as_u16(), body))
    }

    fn late(&self) -> Error {
        Error::deadline(format!("server {}: no answer in time", self.address))
    }

    async fn send(&self, call: &Outgoing, deadline: Instant, is_sent: &AtomicBool) -> Result<(Parts, Bytes)> {
        loop {
            let retained = self.idle().pop_back();
            let is_new = retained.is_none();
            let mut retained = match retained {
                Some(retained) => retained,
                None => self.connect().await?,
            };
            // The server may have closed the connection while it was idle.
            if !is_new && call.form != Form::Pass && !retained.wire.is_open().await {
                continue;
            }
            let PersistentConnection { sender, wire } = &mut retained;
            let number = CALLS.fetch_add(1, Ordering::Relaxed);
            let request = self.request(call, number, deadline)?;
            let sent = async {
                if let Err(error) = sender.ready().await {
                    return Err((error, false));
                }
                is_sent.store(true, Ordering::Relaxed);
                sender.try_send_request(request).await.map_err(|mut failed| {
                    let is_back = failed.take_message().is_some();
                    (failed.into_error(), !is_back)
                })
            };
            match wire.with(sent).await {
                Ok(response) => return self.receive(retained, response, call, number).await,
                // The server had closed the idle connection. A call without changes may be sent again.
                Err((_, went)) if !is_new && (call.form == Form::Pass || !went) => {
                    is_sent.store(false, Ordering::Relaxed)
                }
                Err((e, went)) => {
                    is_sent.store(went, Ordering::Relaxed);
                    return Err(self.broken(e));
                }
            }
        }
    }

    async fn connect(&self) -> Result<PersistentConnection> {
        let made = timeout(CONNECT, self.stream()).await;
        let stream = made.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())).map_err(|e| self.broken(e))?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|e| self.broken(e))?;
        Ok(PersistentConnection { sender, wire: Wire(Some(Box::pin(connection))) })
    }

    async fn stream(&self) -> std::io::Result<Box<dyn Stream>> {
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        Ok(match &self.connector {
            None => Box::new(stream),
            Some(connector) => Box::new(connector.secure(&self.name, stream).await?),
        })
    }

    fn request(&self, call: &Outgoing, number: u64, deadline: Instant) -> Result<Request<Body>> {
        let left = deadline.saturating_duration_since(Instant::now()).as_micros() as u64;
        let method = if call.body.is_some() { Method::POST } else { Method::GET };
        let request = Request::builder().method(method).uri(&call.path).header(HOST, &self.host);
        let mut request = request.header(CONTENT_TYPE, call.media_type()).header(TIMEOUT_HEADER, left.max(1));
        request = request.header(CALL_HEADER, number);
        let Origin { id, trace } = &call.origin;
        let named = [(REQUEST_ID, id), (TRACEPARENT, trace)];
        for (name, value) in named.into_iter().filter_map(|(name, value)| Some((name, value.as_deref()?))) {
            request = request.header(name, value);
        }
        for (name, value) in &call.headers {
            request = request.header(*name, value);
        }
        if let Form::Plain(_, Some(key)) = &call.form {
            request = request.header(KEY_HEADER, key);
        }
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        let body = call.body.clone().map_or_else(Body::empty, Body::from);
        request.body(body).map_err(|e| Error::internal(format!("cannot encode a call to `{}`: {e}", call.path)))
    }

    /// Reads the answer to the call with this number, and keeps the connection for the next call.
    async fn receive(
        &self,
        mut retained: PersistentConnection,
        response: Response<Incoming>,
        call: &Outgoing,
        number: u64,
    ) -> Result<(Parts, Bytes)> {
        let (head, body) = response.into_parts();
        // The gate and the connection limit of a server reject calls without returning their number.
        let echoed =
            head.headers.get(CALL_HEADER).map(|echoed| echoed.to_str().ok().and_then(|text| text.parse().ok()));
        if echoed.map_or(head.status.is_success(), |echoed| echoed != Some(number)) {
            return Err(Error::unavailable(format!(
                "server {}: got the answer to another call: `{CALL_HEADER}` is {echoed:?}, expected {number}; does a \
                 proxy mix up answers, or is the server of another release?",
                self.address
            )));
        }
        let body = match &call.memory {
            Some(memory) => retained.wire.with(self.collect(body, memory)).await?,
            None => {
                let read = retained.wire.with(to_bytes(Body::new(body), ANSWER_BYTES_MAX)).await;
                read.map_err(|e| self.broken(e))?
            }
        };
        let mut idle = self.idle();
        if retained.wire.0.is_some() && idle.len() < IDLE_MAX {
            idle.push_back(retained);
        }
        drop(idle);
        Ok((head, body))
    }

    /// Returns the body of an answer, or its error.
    fn judge(&self, (head, body): (Parts, Bytes), call: &Outgoing, is_sent: &AtomicBool) -> Result<Bytes> {
        if head.status.is_success() && head.headers.get(CONTENT_TYPE).is_some_and(|kind| kind == call.answer_type()) {
            return Ok(body);
        }
        let seconds = head.headers.get(RETRY_AFTER).and_then(|seconds| seconds.to_str().ok()?.parse().ok());
        let error = match head.status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                let reported = problem(head.status.as_u16(), None, &body);
                Error::unsupported(format!(
                    "the key of this router (`route.key`; of a server that queries others, `peers.key`) does not permit \
                     the call: {reported}"
                ))
            }
            status => problem(status.as_u16(), seconds.map(Duration::from_secs), &body),
        };
        let is_unapplied = head.headers.contains_key(UNAPPLIED_HEADER);
        is_sent.store(!is_unapplied && may_have_executed(error.kind()), Ordering::Relaxed);
        let error = if is_unapplied { error.unapplied() } else { error };
        // Errors of the request are passed on unchanged, errors of a server with its address.
        Err(if error.kind().is_retryable() { error.within(format_args!("server {}", self.address)) } else { error })
    }

    /// Reads an answer and charges its memory: at once if its length is known, as from servers, else per chunk.
    async fn collect(&self, mut body: Incoming, memory: &Memory) -> Result<Bytes> {
        let known = body.size_hint().exact();
        memory.add(known.unwrap_or(0).saturating_mul(ANSWER_COPIES))?;
        let mut all = Vec::with_capacity(known.unwrap_or(0).min(ANSWER_BYTES_MAX as u64) as usize);
        while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
            let Ok(data) = frame.map_err(|e| self.broken(e))?.into_data() else { continue };
            if all.len() + data.len() > ANSWER_BYTES_MAX {
                let address = self.address;
                return Err(Error::too_costly(format!(
                    "server {address}: the answer takes more than {ANSWER_BYTES_MAX} bytes"
                )));
            }
            if known.is_none() {
                memory.add(data.len() as u64 * ANSWER_COPIES)?;
            }
            all.extend_from_slice(&data);
        }
        Ok(all.into())
    }

    fn broken(&self, e: impl std::error::Error + Send + Sync + 'static) -> Error {
        Error::unavailable(format!("server {}: {e}", self.address)).caused_by(e)
    }
}

/// Returns whether a server that answers with this error may have executed the call.
fn may_have_executed(kind: Kind) -> bool {
    matches!(kind, Kind::Unavailable | Kind::DeadlineExceeded | Kind::Internal | Kind::Io | Kind::Corrupt)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream as Plain};
    use std::sync::mpsc::channel;
    use std::thread::spawn;

    use super::*;
    use sterling_core::quota::{Flow, Quota};

    const CALL: &str = "/v1/models/m/versions/1:pass";

    fn listener() -> (TcpListener, Client) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = Client::new(listener.local_addr().unwrap(), "127.0.0.1", "stk_1", None);
        (listener, client)
    }

    fn call(client: &Client, wait_ms: u64) -> Result<Bytes> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let call = Outgoing::pass(CALL.into(), Some(Bytes::from_static(b"question")));
        runtime.block_on(client.call(&call, Instant::now() + Duration::from_millis(wait_ms)))
    }

    /// Reads one request, which arrives in one piece.
    fn request(stream: &mut Plain) -> String {
        let mut text = vec![0; 4096];
        let mut read = 0;
        while !text[..read].ends_with(b"question") {
            read += stream.read(&mut text[read..]).unwrap();
        }
        String::from_utf8_lossy(&text[..read]).to_ascii_lowercase()
    }

    /// Returns the number of a call, which the server returns.
    fn number(requested: &str) -> u64 {
        let value = requested.lines().find_map(|line| line.strip_prefix("sterling-call: ")).unwrap();
        value.trim().parse().unwrap()
    }

    fn answer(stream: &mut Plain, number: u64, (status, kind, body): (&str, &str, &str)) {
        let length = body.len();
        let text = format!(
            "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\nretry-after: 3\r\nsterling-call: {number}\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        stream.write_all(text.as_bytes()).unwrap();
    }

    #[tokio::test]
    async fn connections_are_reused_and_reopened_after_a_close() {
        let (listener, client) = listener();
        let ((tell, reported), (closed, is_closed)) = (channel(), channel());
        let served = spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            for _ in 0..3 {
                let requested = request(&mut stream);
                assert!(requested.starts_with("post /v1/models/m/versions/1:pass http/1.1\r\n"), "{requested}");
                assert!(
                    requested.contains("\r\nauthorization: bearer stk_1\r\n")
                        && requested.contains("sterling-timeout-us: ")
                        && requested.contains(MEDIA_TYPE),
                    "{requested}"
                );
                answer(&mut stream, number(&requested), ("200 OK", MEDIA_TYPE, "yes"));
            }
            // The server closes the connection only after it became idle.
            reported.recv().unwrap();
            drop(stream);
            closed.send(()).unwrap();
            let (mut stream, _) = listener.accept().unwrap();
            let requested = request(&mut stream);
            answer(&mut stream, number(&requested), ("200 OK", MEDIA_TYPE, "again"));
        });
        let call = Outgoing::pass(CALL.into(), Some(Bytes::from_static(b"question")));
        let deadline = Instant::now() + Duration::from_secs(20);
        for _ in 0..3 {
            assert_eq!(&client.call(&call, deadline).await.unwrap()[..], b"yes");
        }
        assert_eq!(client.idle().len(), 1);
        tell.send(()).unwrap();
        is_closed.recv().unwrap();
        assert_eq!(&client.call(&call, deadline).await.unwrap()[..], b"again");
        served.join().unwrap();
        client.forget();
        assert_eq!(client.call(&call, deadline).await.unwrap_err().kind(), Kind::Unavailable, "the receiver is closed");
    }

    #[test]
    fn dropping_a_call_closes_its_connection() {
        let (listener, client) = listener();
        let (tell, reported) = channel();
        let served = spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            request(&mut stream);
            tell.send(()).unwrap();
            // The client has closed its side of the connection.
            assert_eq!(stream.read(&mut [0; 16]).unwrap(), 0);
        });
        let error = call(&client, 200).unwrap_err();
        assert_eq!(error.kind(), Kind::DeadlineExceeded);
        reported.recv().unwrap();
        served.join().unwrap();
        assert!(client.idle().is_empty());
    }

    #[test]
    fn an_answer_counts_as_memory_however_it_comes() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let quota = Quota::new("answer", 100);
        for (framing, body, bytes) in [
            ("content-length: 40", "x".repeat(40), Ok(80)),
            ("transfer-encoding: chunked", format!("28\r\n{}\r\n0\r\n\r\n", "x".repeat(40)), Ok(80)),
            ("content-length: 51", "x".repeat(51), Err(Kind::TooCostly)),
            ("content-length: 5000000000", String::new(), Err(Kind::TooCostly)),
            ("transfer-encoding: chunked", format!("33\r\n{}\r\n0\r\n\r\n", "x".repeat(51)), Err(Kind::TooCostly)),
        ] {
            let (listener, client) = listener();
            let served = spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let number = number(&request(&mut stream));
                let head = format!(
                    "HTTP/1.1 200 OK\r\ncontent-type: {MEDIA_TYPE}\r\nsterling-call: {number}\r\n{framing}\r\n\r\n{body}"
                );
                stream.write_all(head.as_bytes()).unwrap();
                // Until the client disconnects.
                let _ = stream.read(&mut [0]);
            });
            let memory = Arc::new(quota.hold(Flow::default(), 0).unwrap());
            let call = Outgoing {
                memory: Some(memory.clone()),
                ..Outgoing::pass(CALL.into(), Some(Bytes::from_static(b"question")))
            };
            let answer = runtime.block_on(client.call(&call, Instant::now() + Duration::from_secs(20)));
            match bytes {
                Ok(bytes) => assert_eq!((answer.unwrap().len(), memory.bytes()), (40, bytes), "{framing}"),
                Err(kind) => assert_eq!(answer.unwrap_err().kind(), kind, "{framing}"),
            }
            client.forget();
            served.join().unwrap();
        }
    }

    #[test]
    fn an_answer_to_another_call_is_rejected() {
        type Mixed = fn(u64) -> Option<u64>;
        // A proxy swaps the answers of two callers; a server of another release returns no number; a server's gate rejects
        // without one.
        let cases: [(&str, Mixed, Kind); 5] = [
            ("200 OK", |number| Some(number + 1), Kind::Unavailable),
            ("200 OK", |_| None, Kind::Unavailable),
            ("400 Bad Request", |number| Some(number - 1), Kind::Unavailable),
            ("400 Bad Request", Some, Kind::Invalid),
            ("503 Service Unavailable", |_| None, Kind::Overloaded),
        ];
        for (status, named, kind) in cases {
            let (listener, client) = listener();
            let served = spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let number = named(number(&request(&mut stream)));
                let named = number.map(|number| format!("sterling-call: {number}\r\n")).unwrap_or_default();
                let (kind, body) = match status {
                    "200 OK" => (MEDIA_TYPE, "yes"),
                    "400 Bad Request" => ("application/problem+json", r#"{"code": "invalid", "detail": "no"}"#),
                    _ => ("application/problem+json", r#"{"code": "overloaded", "detail": "full"}"#),
                };
                let length = body.len();
                let head =
                    format!("HTTP/1.1 {status}\r\ncontent-type: {kind}\r\n{named}content-length: {length}\r\n\r\n");
                stream.write_all([head, body.to_owned()].concat().as_bytes()).unwrap();
            });
            let error = call(&client, 20_000).unwrap_err();
            served.join().unwrap();
            assert_eq!(error.kind(), kind, "{status}: {error}");
            assert!(kind != Kind::Unavailable || client.idle().is_empty(), "a mixed-up connection is not reused");
        }
    }

    #[test]
    fn a_failed_call_that_changed_nothing_is_known_as_such() {
        let body = r#"{"code": "unavailable", "detail": "journal: no broker; it was not written"}"#;
        for (header, may_be_applied) in [("", true), ("sterling-unapplied: 1\r\n", false)] {
            let (listener, client) = listener();
            let served = spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let (number, length) = (number(&request(&mut stream)), body.len());
                let head = format!(
                    "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/problem+json\r\n\
                     sterling-call: {number}\r\n{header}content-length: {length}\r\n\r\n{body}"
                );
                stream.write_all(head.as_bytes()).unwrap();
            });
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let update =
                Outgoing::plain(CALL.into(), (Some(Bytes::from_static(b"question")), "application/json"), None);
            let failed =
                runtime.block_on(client.try_call(&update, Instant::now() + Duration::from_secs(20))).unwrap_err();
            served.join().unwrap();
            assert_eq!((failed.may_be_applied, failed.error.is_unapplied()), (may_be_applied, !may_be_applied));
        }
    }

    #[test]
    fn malformed_answers_are_errors() {
        let overloaded = r#"{"code": "overloaded", "detail": "full"}"#;
        let cases = [
            ("503 Service Unavailable", "application/problem+json", overloaded, Kind::Overloaded),
            (
                "400 Bad Request",
                "application/problem+json",
                r#"{"code": "invalid", "detail": "field `k`"}"#,
                Kind::Invalid,
            ),
            ("200 OK", "text/html", "<html>", Kind::Unavailable),
            ("200 OK", "", "", Kind::Unavailable),
        ];
        for (status, media, body, kind) in cases {
            let (listener, client) = listener();
            let served = spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let requested = request(&mut stream);
                answer(&mut stream, number(&requested), (status, media, body));
            });
            let error = call(&client, 20_000).unwrap_err();
            served.join().unwrap();
            assert_eq!(error.kind(), kind, "{status} {media}: {error}");
            assert_eq!(error.retry_wait(), Some(Duration::from_secs(3)));
            assert_eq!(error.to_string().contains("server 127.0.0.1:"), kind != Kind::Invalid, "{error}");
        }
        for garbage in ["SSH-2.0-OpenSSH\r\n", "HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nshort", ""] {
            let (listener, client) = listener();
            let served = spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                request(&mut stream);
                stream.write_all(garbage.as_bytes()).unwrap();
            });
            assert_eq!(call(&client, 20_000).unwrap_err().kind(), Kind::Unavailable, "{garbage}");
            served.join().unwrap();
        }
    }
}
