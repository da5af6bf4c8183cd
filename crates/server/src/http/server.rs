//! Sockets: accepts connections, and shuts the server down.
//!
//! | signal | effect |
//! |---|---|
//! | first | `/readyz` returns 503; new requests are still answered for `drain_ms`, so that load balancers can go elsewhere |
//! | after that | the socket closes; half a second later idle connections close, the others after their answers |
//! | `stop_ms` later | remaining connections are cut: partial headers, unread replies, work that does not end |
//! | second | all of it at once |

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

use super::access::EntryPoint;
use super::answer::{Rejection, http1};
use super::app::{App, Host};
use super::bodies::Inbound;
use super::connections::{Connections, Open, Peer, TrackedBody};
use super::fair_scheduling::{ScheduledFuture, Threads};
use super::options::Options;
use super::routed::RouterApp;
use super::routes;
use super::self_wakes::SelfWaking;
use super::socket::Socket;
use super::streams::{Stream, StreamTasks, Streamed};
use super::tls::Tls;
use super::writers::ChunkThreads;
use sterling_core::error::{Error, Result};
use sterling_core::tasks;

/// Interval between checks of connections and the clock.
const SWEEP: Duration = Duration::from_millis(250);
/// Interval between checks of keys and certificates.
const RELOAD: Duration = Duration::from_millis(500);
/// Time for which idle connections stay open after the socket closes, because their first request may be on its way.
const FIRST_REQUEST: Duration = Duration::from_millis(500);
/// Pause after a failed `accept`.
const PAUSE: Duration = Duration::from_millis(50);
/// Maximum length of the accept queue, if the system allows it (`net.core.somaxconn`). Further clients get no reply, and their
/// systems retry after 1 s, then after 2 s more: by then most answers are too late.
const BACKLOG: u32 = 16_384;
/// Longest time that a starting router polls its servers before it listens.
const FIRST_POLL_MAX: Duration = Duration::from_secs(3);
/// Buffer size of a connection, in bytes: maximum header size, and replies that wait for the client.
const BUFFER_BYTES: usize = 64 << 10;
/// Start of the HTTP/2 connection preface.
const PREFACE: &[u8] = b"PRI * HTTP/2.0";
/// Maximum number of checks for the rest of a partial preface; after that the connection is not HTTP/2.
const PREFACE_CHECKS_MAX: usize = 20;
/// Maximum number of concurrent requests per HTTP/2 connection.
const STREAMS_MAX: u32 = 128;
/// Flow-control window of an HTTP/2 client, in bytes.
const WINDOW_BYTES: u32 = 256 << 10;
/// Maximum decompressed size of an HTTP/2 header, in bytes.
const HEADER_BYTES_MAX: u32 = 16 << 10;
/// Maximum number of early resets, and of protocol errors, per HTTP/2 connection.
const RESETS_MAX: usize = 20;

/// Kind of shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Stopped by an orchestrator: clients get time to move to other servers.
    Drain,
    /// Stopped by a person at the terminal: no new requests are accepted.
    Now,
}

/// Opens a listening socket. Requires a runtime.
///
/// # Errors
/// The system's error about the address.
pub fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    bind(address)?.listen(BACKLOG)
}

/// Binds an address. Requires a runtime. Connections are rejected until the socket listens.
fn bind(address: SocketAddr) -> std::io::Result<TcpSocket> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // Permits binding the address of a server that has just ended.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

/// Listening sockets.
pub struct Sockets {
    /// Socket for requests.
    pub main: TcpListener,
    /// Socket for all calls, if administrators' calls are not answered on the main one.
    pub admin: Option<TcpListener>,
    /// TLS in front of both sockets.
    pub tls: Option<Arc<Tls>>,
}

impl From<TcpListener> for Sockets {
    fn from(main: TcpListener) -> Self {
        Sockets { main, admin: None, tls: None }
    }
}

/// Serves until `stops` reports a signal, then finishes running requests within the limits of `options`. Returns whether all
/// requests were answered.
///
/// # Errors
/// `Unavailable` if a second signal arrived before all requests were answered; `Io` if a thread cannot be created.
pub async fn serve(
    sockets: Sockets,
    app: Arc<App>,
    options: &Options,
    stops: mpsc::UnboundedReceiver<Stop>,
) -> Result<bool> {
    let router = routes::router(app.clone());
    answer_all(sockets, (app, router), options, stops).await
}

/// Binds the socket of a router, polls its servers, and then listens. Before the first poll connections fail and clients go to
/// another router; an early listener would answer 503. If the servers do not answer in time, the router listens anyway.
///
/// # Errors
/// `Io` with the system's error about the address, which is bound before the poll.
pub async fn listen_after_first_poll(address: SocketAddr, app: &RouterApp) -> Result<TcpListener> {
    let error = |e| Error::io(format!("address {address}"), e);
    let socket = bind(address).map_err(error)?;
    // If the timeout aborts this poll, the router polls again later.
    let _ = timeout(FIRST_POLL_MAX, app.fleet().look()).await;
    socket.listen(BACKLOG).map_err(error)
}

/// Answers requests through shards until `stops` reports a signal, like [`serve`].
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

/// Serves a host and its routes, for servers and routers.
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
    let edge = ConnectionState { router, host: host.clone(), tls, handshake, connections, threads, writers, closing };
    let connections = &edge.connections;
    let at_admin = async {
        match &admin {
            Some(listener) => accept(listener, EntryPoint::Admin, &edge).await,
            None => std::future::pending().await,
        }
    };
    let end = async {
        let stop = stops.recv().await;
        host.entrance().draining.store(true, Ordering::Relaxed);
        let delay = if stop == Some(Stop::Drain) { options.drain_ms } else { 0 };
        match tokio::time::timeout(Duration::from_millis(delay), stops.recv()).await {
            Ok(Some(_)) => Err(second_signal_error()),
            _ => Ok(()),
        }
    };
    tokio::select! {
        never = accept(&main, EntryPoint::Main, &edge) => match never {},
        never = at_admin => match never {},
        never = keep(&edge, options) => match never {},
        ended = end => ended?,
    }
    close(main, EntryPoint::Main, &edge);
    admin.into_iter().for_each(|listener| close(listener, EntryPoint::Admin, &edge));
    let rest = async {
        let stop = Duration::from_millis(options.stop_ms);
        let end = tokio::time::Instant::now() + stop;
        let _ = tokio::time::timeout(FIRST_REQUEST.min(stop / 2), connections.ended()).await;
        edge.closing.send_replace(true);
        if tokio::time::timeout_at(end, connections.ended()).await.is_ok() {
            return true;
        }
        tracing::warn!(connections = connections.close_all(), "closed connections that did not end in time");
        let _ = tokio::time::timeout(PAUSE, connections.ended()).await;
        false
    };
    tokio::select! {
        never = keep(&edge, options) => match never {},
        all = rest => Ok(all),
        Some(_) = stops.recv() => Err(second_signal_error()),
    }
}

fn second_signal_error() -> Error {
    Error::unavailable("ended by a second signal before all requests were answered")
}

async fn keep(edge: &ConnectionState, options: &Options) -> Infallible {
    tokio::select! {
        never = sweep(edge, options) => never,
        never = edge.threads.pace() => never,
    }
}

async fn sweep(edge: &ConnectionState, options: &Options) -> Infallible {
    loop {
        edge.host.entrance().clock.look();
        tokio::time::sleep(SWEEP).await;
        edge.connections.sweep(options);
        metrics::gauge!("sterling_connections_waiting").set(edge.threads.waiting() as f64);
        edge.threads.sweep();
        sterling_telemetry::sort_in();
    }
}

/// Shared state of all connections.
#[derive(Clone)]
struct ConnectionState {
    host: Arc<dyn Host>,
    router: axum::Router,
    tls: Option<Arc<Tls>>,
    /// Timeout of a TLS handshake.
    handshake: Duration,
    connections: Arc<Connections>,
    threads: Arc<Threads>,
    writers: Arc<ChunkThreads>,
    /// True if connections must end after their answers.
    closing: watch::Sender<bool>,
}

async fn accept(listener: &TcpListener, door: EntryPoint, edge: &ConnectionState) -> Infallible {
    let connections = &edge.connections;
    loop {
        // At most one connection above the limit is held, until the evicted connection has closed.
        connections.wait_for_fewer_than(connections.most(door) + 1, door).await;
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

/// Spawns a task that serves a connection.
fn admit(stream: TcpStream, peer: Peer, edge: &ConnectionState) {
    // With Nagle's algorithm, chunked replies would wait for acknowledgements; a failure only costs speed.
    let _ = stream.set_nodelay(true);
    let open = edge.connections.add(peer);
    let caller = open.connection.caller.clone();
    let answering = SelfWaking::new(detect_protocol(stream, edge.clone(), open, edge.closing.subscribe()));
    tokio::spawn(ScheduledFuture::new(answering, &edge.threads, &caller));
}

/// Closes a socket. Serves already established connections in its queue first, since closing would reset them.
fn close(listener: TcpListener, door: EntryPoint, edge: &ConnectionState) {
    let Ok(listener) = listener.into_std() else { return };
    while !edge.connections.is_full(door)
        && let Ok((stream, address)) = listener.accept()
    {
        let stream = stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream));
        stream.into_iter().for_each(|stream| admit(stream, Peer { address, door }, edge));
    }
}

/// Reloads keys and certificates when they change, on a separate thread: their files may be on a slow disk.
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
    tasks::KEYS.start(watch).map(drop)
}

/// Rejects a connection above the limit with 503, if no handshake is needed. The write does not wait; bytes that do not fit are
/// lost.
fn refuse(stream: &TcpStream, is_secured: bool) {
    metrics::counter!("sterling_connections_refused_total").increment(1);
    if is_secured {
        return;
    }
    let mut answer = crowded("open connections").render();
    answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    let _ = stream.try_write(&http1(&answer));
}

/// Serves a connection: performs the TLS handshake if configured, and detects the protocol.
async fn detect_protocol(stream: TcpStream, edge: ConnectionState, open: Open, mut closing: watch::Receiver<bool>) {
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
            Err(error) => tracing::debug!(%error, "TLS handshake failed"),
        },
        () = open.connection.cut() => {}
        () = tokio::time::sleep(edge.handshake) => {}
    }
}

/// Returns whether a plaintext connection starts with the HTTP/2 preface. Peeks only, so that the gate receives a first HTTP/1.1 request
/// completely.
async fn begins_http2(stream: &TcpStream) -> bool {
    let mut first = [0; PREFACE.len()];
    for _ in 0..PREFACE_CHECKS_MAX {
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

/// Serves the requests of one connection until either side closes it.
async fn answer(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    is_http2: bool,
    edge: ConnectionState,
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
                Ok::<_, Infallible>(TrackedBody::of(writers.long(response), connection))
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
                return Ok(crowded("concurrent requests").into_response().map(Streamed::refused));
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

/// Returns the answer to a connection, or an HTTP/2 request, above the limit.
fn crowded(what: &str) -> Rejection {
    Error::overloaded(format!("the limit of {what} is reached, try again later")).into()
}

/// Drives a connection to its end, and shuts it down once when the server closes.
async fn until_end<S: Future>(served: S, shut: impl Fn(Pin<&mut S>), open: &Open, mut closing: watch::Receiver<bool>) {
    let mut served = std::pin::pin!(served);
    let mut reported = false;
    loop {
        tokio::select! {
            // Errors are the client's: hyper answers invalid HTTP, and a lost connection needs no answer.
            _ = served.as_mut() => return,
            () = open.connection.cut() => return,
            _ = closing.wait_for(|closing| *closing), if !reported => {
                reported = true;
                shut(served.as_mut());
            }
        }
    }
}

/// Raises the descriptor limit of the process as far as possible, and returns it.
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
