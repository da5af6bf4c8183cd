//! The sockets: who is let in, and how it all ends.
//!
//! | signal | what happens |
//! |---|---|
//! | the first | `/readyz` says 503; new requests are still answered for `drain_ms`, so that load balancers can look elsewhere |
//! | after that | the socket closes; half a second later idle connections close, each other one after its answer |
//! | `stop_ms` later | what is still open is cut: half a header, a reply that nobody reads, work that does not end |
//! | a second signal | all of it at once |

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::http::HeaderValue;
use axum::http::header::CONNECTION;
use axum::response::IntoResponse as _;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tower::ServiceExt as _;

use super::access::Door;
use super::answer::{Refusal, http1};
use super::app::{App, Host};
use super::bodies::Inbound;
use super::connections::{Answered, Connections, Open, Peer};
use super::in_turn::{InTurn, Threads};
use super::options::Options;
use super::routed::RouterApp;
use super::routes;
use super::self_wakes::SelfWaking;
use super::socket::Socket;
use super::streams::{Stream, StreamTasks, Streamed};
use super::tls::Tls;
use super::writers::Writers;
use sterling_core::error::{Error, Result};

/// How often connections and the clock are looked at.
const SWEEP: Duration = Duration::from_millis(250);
/// How often keys and certificates are looked at.
const RELOAD: Duration = Duration::from_millis(500);
/// How long the first request of a connection may be under way when the socket closes, and idle connections stay open for it.
const FIRST_REQUEST: Duration = Duration::from_millis(500);
/// How long nothing is accepted after the system refused to.
const PAUSE: Duration = Duration::from_millis(50);
/// Connections that may wait to be accepted, where the system allows so many (`net.core.somaxconn`). The client of one more
/// hears nothing, and its system asks again a second later, then after two more: by then most answers are too late.
const BACKLOG: u32 = 16_384;
/// How long a router that starts may look at its servers before it listens.
const FIRST_LOOK_MAX: Duration = Duration::from_secs(3);
/// Bytes of a connection's buffers: of a header at most, and of replies that wait for their reader.
const BUFFER_BYTES: usize = 64 << 10;
/// How a connection of HTTP/2 begins.
const PREFACE: &[u8] = b"PRI * HTTP/2.0";
/// How often it is looked whether the rest of that has come; what sends a part of it and no more is no HTTP/2.
const PREFACE_LOOKS: usize = 20;
/// Requests that may be under way on one connection of HTTP/2.
const STREAMS_MAX: u32 = 128;
/// Bytes of bodies that a client of HTTP/2 may send ahead of their readers.
const WINDOW_BYTES: u32 = 256 << 10;
/// Bytes of one header of HTTP/2, decompressed.
const HEADER_BYTES_MAX: u32 = 16 << 10;
/// Requests of a connection of HTTP/2 that may be taken back before they are looked at, and that may be wrong.
const RESETS_MAX: usize = 20;

/// What asks the server to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// An orchestrator: those that send requests are given time to look elsewhere.
    Drain,
    /// A person at the terminal: nothing new is taken.
    Now,
}

/// Opens a socket, in a runtime.
///
/// # Errors
/// What the system says of the address.
pub fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    bind(address)?.listen(BACKLOG)
}

/// Takes an address, in a runtime; connections to it are refused until the socket listens.
fn bind(address: SocketAddr) -> std::io::Result<TcpSocket> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // The address of a server that has just ended can be had at once.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

/// The sockets to answer on.
pub struct Sockets {
    /// That for requests.
    pub main: TcpListener,
    /// That for all calls, where those of administrators are not answered on the other.
    pub admin: Option<TcpListener>,
    /// TLS in front of both.
    pub tls: Option<Arc<Tls>>,
}

impl From<TcpListener> for Sockets {
    fn from(main: TcpListener) -> Self {
        Sockets { main, admin: None, tls: None }
    }
}

/// Serves until `stops` says so, then answers what has begun, within the bounds of `options`. `true` where all of it was
/// answered.
///
/// # Errors
/// `Unavailable` where a second stop came before all had been answered; `Io` where the system gives no thread.
pub async fn serve(
    sockets: Sockets,
    app: Arc<App>,
    options: &Options,
    stops: mpsc::UnboundedReceiver<Stop>,
) -> Result<bool> {
    let router = routes::router(app.clone());
    answer_all(sockets, (app, router), options, stops).await
}

/// Opens the socket of a router once it has looked at its servers, in a runtime. Clients that go by refused connections ask another router
/// meanwhile; a router that listened before would answer them 503. If the servers do not answer in time, it listens all the same.
///
/// # Errors
/// `Io` with what the system says of the address, which is taken before the look.
pub async fn listen_once_looked(address: SocketAddr, app: &RouterApp) -> Result<TcpListener> {
    let error = |e| Error::io(format!("address {address}"), e);
    let socket = bind(address).map_err(error)?;
    // A look that is cut short here is one that the router makes again.
    let _ = timeout(FIRST_LOOK_MAX, app.fleet().look()).await;
    socket.listen(BACKLOG).map_err(error)
}

/// Answers requests by asking shards until `stops` says so, as [`serve`] does.
///
/// # Errors
/// As [`serve`].
pub async fn route(
    sockets: Sockets,
    app: Arc<RouterApp>,
    options: &Options,
    stops: mpsc::UnboundedReceiver<Stop>,
) -> Result<bool> {
    let (fleet, router) = (app.fleet().clone(), routes::of_router(app.clone()));
    tokio::select! {
        ended = answer_all(sockets, (app, router), options, stops) => ended,
        never = fleet.watch() => match never {},
        never = fleet.judge() => match never {},
    }
}

/// The same over whatever stands behind the routes.
async fn answer_all(
    sockets: Sockets,
    (host, router): (Arc<dyn Host>, axum::Router),
    options: &Options,
    mut stops: mpsc::UnboundedReceiver<Stop>,
) -> Result<bool> {
    let connections = Connections::new(options.connections_of(descriptors()));
    let (closing, _) = watch::channel(false);
    let Sockets { main, admin, tls } = sockets;
    watch_files(&host, tls.as_ref())?;
    let handshake = Duration::from_millis(options.header_ms);
    let writers = host.writers().clone();
    let threads = Threads::new(Handle::current().metrics().num_workers());
    let edge = Edge { router, host: host.clone(), tls, handshake, connections, threads, writers, closing };
    let connections = &edge.connections;
    let at_admin = async {
        match &admin {
            Some(listener) => accept(listener, Door::Admin, &edge).await,
            None => std::future::pending().await,
        }
    };
    let end = async {
        let stop = stops.recv().await;
        host.entrance().draining.store(true, Ordering::Relaxed);
        let delay = if stop == Some(Stop::Drain) { options.drain_ms } else { 0 };
        match tokio::time::timeout(Duration::from_millis(delay), stops.recv()).await {
            Ok(Some(_)) => Err(at_once()),
            _ => Ok(()),
        }
    };
    tokio::select! {
        never = accept(&main, Door::Main, &edge) => match never {},
        never = at_admin => match never {},
        never = keep(&edge, options) => match never {},
        ended = end => ended?,
    }
    close(main, Door::Main, &edge);
    admin.into_iter().for_each(|listener| close(listener, Door::Admin, &edge));
    let rest = async {
        let stop = Duration::from_millis(options.stop_ms);
        let end = tokio::time::Instant::now() + stop;
        let _ = tokio::time::timeout(FIRST_REQUEST.min(stop / 2), connections.ended()).await;
        edge.closing.send_replace(true);
        if tokio::time::timeout_at(end, connections.ended()).await.is_ok() {
            return true;
        }
        tracing::warn!(connections = connections.cut_all(), "cut: they did not end in time");
        let _ = tokio::time::timeout(PAUSE, connections.ended()).await;
        false
    };
    tokio::select! {
        never = keep(&edge, options) => match never {},
        all = rest => Ok(all),
        Some(_) = stops.recv() => Err(at_once()),
    }
}

fn at_once() -> Error {
    Error::unavailable("ended by a second signal before all was answered")
}

async fn keep(edge: &Edge, options: &Options) -> Infallible {
    tokio::select! {
        never = sweep(edge, options) => never,
        never = edge.threads.pace() => never,
    }
}

async fn sweep(edge: &Edge, options: &Options) -> Infallible {
    loop {
        edge.host.entrance().clock.look();
        tokio::time::sleep(SWEEP).await;
        edge.connections.sweep(options);
        metrics::gauge!("sterling_connections_waiting").set(edge.threads.waiting() as f64);
        edge.threads.sweep();
        sterling_telemetry::sort_in();
    }
}

/// What answers connections.
#[derive(Clone)]
struct Edge {
    host: Arc<dyn Host>,
    router: axum::Router,
    tls: Option<Arc<Tls>>,
    /// How long a handshake may take.
    handshake: Duration,
    connections: Arc<Connections>,
    threads: Arc<Threads>,
    writers: Arc<Writers>,
    /// True once connections are to end after their answers.
    closing: watch::Sender<bool>,
}

async fn accept(listener: &TcpListener, door: Door, edge: &Edge) -> Infallible {
    let connections = &edge.connections;
    loop {
        // One over the limit is held at most, until the one that made room for it has gone.
        connections.fewer_than(connections.most(door) + 1, door).await;
        match listener.accept().await {
            Ok((stream, _)) if connections.is_full(door) && !connections.make_room(door) => {
                refuse(&stream, edge.tls.is_some());
            }
            Ok((stream, address)) => admit(stream, Peer { address, door }, edge),
            Err(error) => {
                tracing::warn!(%error, "no connection can be accepted");
                connections.make_room(door);
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Answers a connection in a task of its own.
fn admit(stream: TcpStream, peer: Peer, edge: &Edge) {
    // Without it a reply in pieces waits for acknowledgements; where it cannot be set, it is slow.
    let _ = stream.set_nodelay(true);
    let open = edge.connections.add(peer);
    let caller = open.connection.caller.clone();
    let answering = SelfWaking::new(greet(stream, edge.clone(), open, edge.closing.subscribe()));
    tokio::spawn(InTurn::new(answering, &edge.threads, &caller));
}

/// Closes a socket. Connections that the system has made already are answered: with the socket it would reset them.
fn close(listener: TcpListener, door: Door, edge: &Edge) {
    let Ok(listener) = listener.into_std() else { return };
    while !edge.connections.is_full(door)
        && let Ok((stream, address)) = listener.accept()
    {
        let stream = stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream));
        stream.into_iter().for_each(|stream| admit(stream, Peer { address, door }, edge));
    }
}

/// Reads keys and certificates again when they change, on a thread that answers nobody: their files may lie on a slow disk.
fn watch_files(host: &Arc<dyn Host>, tls: Option<&Arc<Tls>>) -> Result<()> {
    if !host.entrance().access.is_guarded() && tls.is_none() {
        return Ok(());
    }
    let (host, tls) = (Arc::downgrade(host), tls.cloned());
    let watch = move || {
        while let Some(host) = host.upgrade() {
            host.entrance().access.reload();
            if let Some(tls) = &tls {
                tls.reload();
                host.entrance().show_certificate(tls.validity());
            }
            drop(host);
            std::thread::sleep(RELOAD);
        }
    };
    std::thread::Builder::new().name("keys".into()).spawn(watch).map_err(|e| Error::io("the thread of keys", e))?;
    Ok(())
}

/// Tells one connection too many to come again, where that can be told without a handshake. Nothing is waited for: what does not go
/// out at once is lost.
fn refuse(stream: &TcpStream, is_secured: bool) {
    metrics::counter!("sterling_connections_refused_total").increment(1);
    if is_secured {
        return;
    }
    let mut answer = crowded("connections are open").render();
    answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    let _ = stream.try_write(&http1(&answer));
}

/// Answers a connection, behind a handshake where there is TLS, in the protocol that the client speaks.
async fn greet(stream: TcpStream, edge: Edge, open: Open, mut closing: watch::Receiver<bool>) {
    let Some(tls) = edge.tls.clone() else {
        let is_http2 = tokio::select! {
            is_http2 = begins_http2(&stream) => is_http2,
            () = open.connection.cut() => return,
            _ = closing.wait_for(|closing| *closing) => return,
        };
        return answer(stream, is_http2, edge, open, closing).await;
    };
    tokio::select! {
        shaken = tls.accept(stream) => match shaken {
            Ok((stream, is_http2)) => answer(stream, is_http2, edge, open, closing).await,
            Err(error) => tracing::debug!(%error, "no handshake"),
        },
        () = open.connection.cut() => {}
        () = tokio::time::sleep(edge.handshake) => {}
    }
}

/// Whether a connection without TLS begins as one of HTTP/2. Its bytes stay where they are, so that the first request of HTTP/1.1 comes to the
/// gate whole.
async fn begins_http2(stream: &TcpStream) -> bool {
    let mut first = [0; PREFACE.len()];
    for _ in 0..PREFACE_LOOKS {
        match stream.peek(&mut first).await {
            Ok(count) if count > 0 && PREFACE.starts_with(&first[..count]) => {
                if count == PREFACE.len() {
                    return true;
                }
                tokio::time::sleep(PAUSE).await;
            }
            _ => return false,
        }
    }
    false
}

/// Answers the requests of one connection until either side has had enough.
async fn answer(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    is_http2: bool,
    edge: Edge,
    open: Open,
    closing: watch::Receiver<bool>,
) {
    let connection = open.connection.clone();
    let socket = |stream| TokioIo::new(Socket::new(stream, connection.clone(), edge.host.clone()));
    if !is_http2 {
        let socket = socket(stream);
        let service = service_fn(|request: axum::http::Request<hyper::body::Incoming>| {
            let request = Inbound::of(connection.begin(request), Some(connection.clone()));
            let (router, connection, writers) = (edge.router.clone(), connection.clone(), edge.writers.clone());
            async move {
                let mut response = router.oneshot(request).await.unwrap_or_else(|never| match never {});
                connection.caller.answers(&response);
                if connection.is_unread() {
                    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                }
                Ok::<_, Infallible>(Answered::of(writers.long(response), connection))
            }
        });
        let served = http1::Builder::new().max_buf_size(BUFFER_BYTES).serve_connection(socket, service);
        return until_end(served, |served| served.graceful_shutdown(), &open, closing).await;
    }
    let streams = connection.multiplex();
    let socket = socket(stream);
    let tasks = StreamTasks { streams: streams.clone(), caller: connection.caller.clone(), threads: edge.threads };
    let mut builder = http2::Builder::new(tasks);
    let (all, router, writers) = (Arc::new(open), edge.router, edge.writers);
    let open = all.clone();
    let service = service_fn(move |request: axum::http::Request<hyper::body::Incoming>| {
        let (turn, request) = (all.turn(), all.connection.marked(request));
        let (router, writers) = (router.clone(), writers.clone());
        let stream = turn.map(|turn| Stream::begin(streams.clone(), turn));
        let connection = all.connection.clone();
        async move {
            let Some(stream) = stream else {
                return Ok(crowded("requests are under way").into_response().map(Streamed::refused));
            };
            let response = router.oneshot(Inbound::of(request, None)).await.unwrap_or_else(|never| match never {});
            connection.caller.answers(&response);
            Ok::<_, Infallible>(Streamed::of(writers.long(response), stream))
        }
    });
    builder
        .max_concurrent_streams(STREAMS_MAX)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .max_send_buf_size(BUFFER_BYTES)
        .max_header_list_size(HEADER_BYTES_MAX)
        .max_pending_accept_reset_streams(RESETS_MAX)
        .max_local_error_reset_streams(RESETS_MAX);
    let served = builder.serve_connection(socket, service);
    until_end(served, |served| served.graceful_shutdown(), &open, closing).await;
}

/// What one connection, or one request of HTTP/2, too many is answered.
fn crowded(what: &str) -> Refusal {
    Error::overloaded(format!("as many {what} as there may be, try again later")).into()
}

/// Runs a connection to its end. When the server closes, the connection is told once.
async fn until_end<S: Future>(served: S, shut: impl Fn(Pin<&mut S>), open: &Open, mut closing: watch::Receiver<bool>) {
    let mut served = std::pin::pin!(served);
    let mut told = false;
    loop {
        tokio::select! {
            // An error is the client's: broken HTTP is answered by hyper, and what is gone needs no answer.
            _ = served.as_mut() => return,
            () = open.connection.cut() => return,
            _ = closing.wait_for(|closing| *closing), if !told => {
                told = true;
                shut(served.as_mut());
            }
        }
    }
}

/// How many descriptors the process may have, after it has asked for as many as it can get.
fn descriptors() -> u64 {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let raised = rustix::process::Rlimit { current: limit.maximum, ..limit };
        if setrlimit(Resource::Nofile, raised).is_ok() {
            limit = raised;
        }
    }
    limit.current.unwrap_or(u64::MAX)
}
