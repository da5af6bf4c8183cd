//! Tracks open connections and their state, and closes those that must end. One task checks all connections a few times per
//! second, so that connections need no timers of their own.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::{Request, Response};
use hyper::body::{Frame, SizeHint};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use super::access::EntryPoint;
use super::framing::{NOT_BEGUN, Progress, UNKNOWN};
use super::last_caller::LastCaller;
use super::options::Options;
use super::streams::Streams;

use sterling_core::locks::locked;

/// Stage of a connection: no request has started.
const IDLE: u8 = 0;
/// Stage of a connection: a request header is partly received.
const HEADER: u8 = 1;
/// Stage of a connection: a request is being read, processed or answered.
const BUSY: u8 = 2;
/// Stage of a connection: everything is answered; data that the client still sends is read and dropped.
const LINGER: u8 = 3;

/// Longest time for which a client may keep sending after the last answer, in milliseconds.
const LINGER_MS: u64 = 5000;

/// Maximum number of bytes of an answer per poll of its body.
const POLL_BYTES: usize = 128 << 10;

/// Client address and listening socket of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peer {
    pub(super) address: SocketAddr,
    pub(super) door: EntryPoint,
}

/// Open connection.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) peer: Peer,
    opened: Instant,
    stage: AtomicU8,
    /// Start of the current stage, in milliseconds after `opened`.
    since: AtomicU64,
    /// Time at which the client stopped reading, in milliseconds after `opened`, plus 1; 0 while it reads.
    blocked: AtomicU64,
    /// True if an answer may not be completely written to the socket.
    is_sending: AtomicBool,
    /// Body length of the latest request, in bytes, as in [`Progress`].
    body: AtomicU64,
    /// True if bytes of the next request have arrived: buffered before hyper, or already passed to it.
    is_ahead: AtomicBool,
    is_early: AtomicBool,
    /// True if part of a body stays unread, so that no further request can follow.
    is_unread: AtomicBool,
    /// Requests of an HTTP/2 connection, which may have several.
    streams: OnceLock<Arc<Streams>>,
    /// Caller of the connection's last request.
    pub(super) caller: Arc<LastCaller>,
    cut: Notify,
}

impl Connection {
    pub(super) fn new(peer: Peer) -> Self {
        Connection {
            peer,
            opened: Instant::now(),
            stage: AtomicU8::new(IDLE),
            since: AtomicU64::new(0),
            blocked: AtomicU64::new(0),
            is_sending: AtomicBool::new(false),
            body: AtomicU64::new(NOT_BEGUN),
            is_ahead: AtomicBool::new(false),
            is_early: AtomicBool::new(false),
            is_unread: AtomicBool::new(false),
            streams: OnceLock::new(),
            caller: Arc::new(LastCaller::at(peer.address.ip())),
            cut: Notify::new(),
        }
    }

    /// Marks the connection as HTTP/2. Returns the table of the connection's streams.
    pub(super) fn multiplex(&self) -> Arc<Streams> {
        self.streams.get_or_init(|| Arc::new(Streams::new(self.opened))).clone()
    }

    fn age(&self) -> u64 {
        self.opened.elapsed().as_millis() as u64
    }

    pub(super) fn is_http2(&self) -> bool {
        self.streams.get().is_some()
    }

    fn enter(&self, stage: u8) {
        self.since.store(self.age(), Ordering::Relaxed);
        self.stage.store(stage, Ordering::Relaxed);
    }

    /// Returns whether no request has started, and all answers are written to the socket.
    pub(super) fn is_idle_connection(&self) -> bool {
        self.stage.load(Ordering::Relaxed) == IDLE && !self.is_sending.load(Ordering::Relaxed)
    }

    /// Records received bytes.
    pub(super) fn received(&self) {
        if self.stage.load(Ordering::Relaxed) == IDLE {
            self.enter(HEADER);
        }
    }

    /// Records that a request was answered before hyper received it.
    pub(super) fn answered(&self) {
        self.enter(IDLE);
    }

    /// Records whether an HTTP/2 header is partly received.
    pub(super) fn is_in_header(&self, is_open: bool) {
        match (self.stage.load(Ordering::Relaxed), is_open) {
            (IDLE, true) => self.enter(HEADER),
            (HEADER, false) => self.enter(IDLE),
            _ => {}
        }
    }

    /// Returns the state of the service, for the framing of the connection's bytes.
    pub(super) fn progress(&self) -> Progress {
        let is_busy = self.stage.load(Ordering::Relaxed) == BUSY;
        Progress { body: self.body.load(Ordering::Relaxed), is_busy }
    }

    /// Records that a complete header was passed on to hyper.
    pub(super) fn header_passed(&self) {
        self.body.store(NOT_BEGUN, Ordering::Relaxed);
    }

    /// Records whether bytes are buffered before hyper, and whether hyper received bytes of the next request.
    pub(super) fn ahead(&self, is_ahead: bool, is_early: bool) {
        self.is_ahead.store(is_ahead, Ordering::Relaxed);
        self.is_early.store(is_early, Ordering::Relaxed);
    }

    /// Records that part of a body stays unread.
    pub(super) fn leave_unread(&self) {
        self.is_unread.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_unread(&self) -> bool {
        self.is_unread.load(Ordering::Relaxed)
    }

    /// Records that everything is answered. Returns whether the client may still be sending; closing at once would then reset the
    /// connection and discard the answer.
    pub(super) fn must_linger(&self) -> bool {
        let lingers = self.is_unread() || self.stage.load(Ordering::Relaxed) == HEADER;
        if lingers {
            self.enter(LINGER);
        }
        lingers
    }

    /// Records that bytes were written, or that the client does not read.
    pub(super) fn sent(&self, flows: bool) {
        if flows {
            self.blocked.store(0, Ordering::Relaxed);
        } else if self.blocked.load(Ordering::Relaxed) == 0 {
            self.blocked.store(self.age() + 1, Ordering::Relaxed);
        }
    }

    /// Records that an answer is completely written to the socket.
    pub(super) fn flushed(&self) {
        self.is_sending.store(false, Ordering::Relaxed);
    }

    /// Records a complete header; the request ends when the answer's body is dropped.
    pub(super) fn begin<B: HttpBody>(&self, request: Request<B>) -> Request<B> {
        self.body.store(request.body().size_hint().exact().unwrap_or(UNKNOWN), Ordering::Relaxed);
        self.is_early.store(false, Ordering::Relaxed);
        self.enter(BUSY);
        self.marked(request)
    }

    /// Adds the connection's client address and socket to a request.
    pub(super) fn marked<B>(&self, mut request: Request<B>) -> Request<B> {
        request.extensions_mut().insert(self.peer);
        request
    }

    /// Waits until the connection must close.
    pub(super) async fn cut(&self) {
        self.cut.notified().await;
    }

    /// Returns the reason why the connection must close, if there is one.
    fn overdue(&self, options: &Options) -> Option<&'static str> {
        let now = self.age();
        let stage_ms = now.saturating_sub(self.since.load(Ordering::Relaxed));
        let blocked = self.blocked.load(Ordering::Relaxed);
        let stage = self.stage.load(Ordering::Relaxed);
        if let Some(streams) = self.streams.get().filter(|_| blocked == 0 && stage == IDLE) {
            return streams.overdue(options);
        }
        match (blocked, stage) {
            (_, LINGER) => (stage_ms > LINGER_MS).then_some("unread"),
            (0, IDLE) => (stage_ms > options.idle_ms).then_some("idle"),
            (0, HEADER) => (stage_ms > options.header_ms).then_some("header"),
            (0, _) => None,
            (blocked, _) => ((now + 1).saturating_sub(blocked) > options.stall_ms).then_some("stalled"),
        }
    }

    /// Returns the stage and the start of the wait for the client's next request; `None` while a request is in progress.
    fn waits(&self) -> Option<(u8, Instant)> {
        let stage = self.stage.load(Ordering::Relaxed);
        let flows = self.blocked.load(Ordering::Relaxed) == 0;
        if let Some(streams) = self.streams.get() {
            let rested = streams.idle_since().filter(|_| flows);
            return rested.map(|age| (IDLE, self.opened + std::time::Duration::from_millis(age)));
        }
        let since = std::time::Duration::from_millis(self.since.load(Ordering::Relaxed));
        (flows && stage != BUSY).then(|| (stage, self.opened + since))
    }

    /// Closes the connection.
    pub(super) fn go(&self, reason: &'static str) {
        metrics::counter!("sterling_connections_cut_total", "reason" => reason).increment(1);
        self.cut.notify_one();
    }
}

/// Maximum number of connections to the administrators' socket, from the reserved descriptors.
const ADMIN_CONNECTIONS: usize = 16;

/// Connections by number.
type ByNumber = BTreeMap<u64, Arc<Connection>>;

/// All open connections. Each socket has its own limit, so that load on one socket does not lock out clients of the other.
#[derive(Debug)]
pub(super) struct Connections {
    /// Open connections per socket.
    open: Mutex<[ByNumber; 2]>,
    /// Total number of connections.
    count: AtomicU64,
    closed: Notify,
    most: [usize; 2],
    /// Slots for HTTP/2 requests: as many as the limit of HTTP/1.1 connections.
    turns: [Arc<Semaphore>; 2],
}

fn all(open: &[ByNumber; 2]) -> impl Iterator<Item = &Arc<Connection>> {
    open.iter().flat_map(BTreeMap::values)
}

fn count_connections(open: &[ByNumber; 2]) {
    metrics::gauge!("sterling_connections").set(open.iter().map(BTreeMap::len).sum::<usize>() as f64);
}

impl Connections {
    pub(super) fn new(most: usize) -> Arc<Self> {
        let most = [most, ADMIN_CONNECTIONS.min(most)];
        let turns = most.map(|most| Arc::new(Semaphore::new(most)));
        Arc::new(Connections { open: Mutex::default(), count: AtomicU64::new(0), closed: Notify::new(), most, turns })
    }

    fn open(&self) -> MutexGuard<'_, [ByNumber; 2]> {
        locked(&self.open)
    }

    /// Adds a connection.
    pub(super) fn add(self: &Arc<Self>, peer: Peer) -> Open {
        let connection = Arc::new(Connection::new(peer));
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        let mut open = self.open();
        open[peer.door as usize].insert(number, connection.clone());
        count_connections(&open);
        drop(open);
        Open { connection, number, all: self.clone() }
    }

    pub(super) fn most(&self, door: EntryPoint) -> usize {
        self.most[door as usize]
    }

    pub(super) fn is_full(&self, door: EntryPoint) -> bool {
        self.open()[door as usize].len() >= self.most(door)
    }

    /// Frees capacity at a socket: closes the connections that have waited longest for their client, idle ones before those with
    /// a partial header. If many connections are open, several are closed at once, because the search visits all of them.
    /// Returns false if no connection waits for its client.
    pub(super) fn make_room(&self, door: EntryPoint) -> bool {
        let open = self.open();
        let mut waiting: Vec<_> = open[door as usize].values().filter_map(|c| Some((c.waits()?, c))).collect();
        waiting.sort_by_key(|(since, _)| *since);
        let count = (self.most(door) / 64).max(1);
        waiting.iter().take(count).for_each(|(_, connection)| connection.go("crowded"));
        !waiting.is_empty()
    }

    /// Closes connections that exceed a time limit.
    pub(super) fn sweep(&self, options: &Options) {
        for connection in all(&self.open()) {
            let ended = connection.streams.get().is_none_or(|streams| streams.end_stalled(options));
            if let Some(reason) = connection.overdue(options).or((!ended).then_some("stalled")) {
                connection.go(reason);
            }
        }
    }

    /// Closes all connections.
    pub(super) fn close_all(&self) -> usize {
        let open = self.open();
        all(&open).for_each(|connection| connection.go("stopping"));
        all(&open).count()
    }

    /// Waits until fewer than `count` connections are open at a socket.
    pub(super) async fn wait_for_fewer_than(&self, count: usize, door: EntryPoint) {
        loop {
            // Subscribe before checking, so that a close in between is not missed.
            let closed = self.closed.notified();
            if self.open()[door as usize].len() < count {
                return;
            }
            closed.await;
        }
    }

    /// Waits until all connections have ended, after the sockets have stopped accepting.
    pub(super) async fn ended(&self) {
        self.wait_for_fewer_than(1, EntryPoint::Main).await;
        self.wait_for_fewer_than(1, EntryPoint::Admin).await;
    }
}

/// Guard of an open connection.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) connection: Arc<Connection>,
    number: u64,
    all: Arc<Connections>,
}

impl Open {
    /// Returns a slot for an HTTP/2 request; `None` if the limit is reached.
    pub(super) fn turn(&self) -> Option<OwnedSemaphorePermit> {
        self.all.turns[self.connection.peer.door as usize].clone().try_acquire_owned().ok()
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut open = self.all.open();
        open[self.connection.peer.door as usize].remove(&self.number);
        count_connections(&open);
        drop(open);
        self.all.closed.notify_waiters();
    }
}

/// Body of an answer; its end is the end of the request. A client that reads fast could keep a thread in one poll of its connection
/// until the answer is written, so the body is pending after [`POLL_BYTES`].
#[derive(Debug)]
pub(super) struct TrackedBody {
    body: Body,
    /// Rest of the last frame.
    rest: Bytes,
    /// Bytes since the body was last pending.
    bytes: usize,
    connection: Arc<Connection>,
}

impl TrackedBody {
    pub(super) fn of(response: Response<Body>, connection: Arc<Connection>) -> Response<Self> {
        response.map(|body| TrackedBody { body, rest: Bytes::new(), bytes: 0, connection })
    }
}

impl HttpBody for TrackedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        if this.bytes >= POLL_BYTES {
            this.bytes = 0;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if this.rest.is_empty() {
            let frame = match Pin::new(&mut this.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => frame,
                other => {
                    this.bytes = 0;
                    return other;
                }
            };
            match frame.into_data() {
                Ok(data) => this.rest = data,
                Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
            }
        }
        let some = this.rest.split_to(this.rest.len().min(POLL_BYTES - this.bytes));
        this.bytes += some.len();
        Poll::Ready(Some(Ok(Frame::data(some))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (hint, rest) = (self.body.size_hint(), self.rest.len() as u64);
        let mut with_rest = SizeHint::new();
        with_rest.set_lower(hint.lower() + rest);
        hint.upper().into_iter().for_each(|upper| with_rest.set_upper(upper + rest));
        with_rest
    }
}

impl Drop for TrackedBody {
    fn drop(&mut self) {
        let connection = &self.connection;
        connection.is_sending.store(true, Ordering::Relaxed);
        // A partly received next request is subject to the time limit of headers from here on.
        let is_next = connection.is_ahead.load(Ordering::Relaxed) || connection.is_early.load(Ordering::Relaxed);
        connection.enter(if is_next { HEADER } else { IDLE });
    }
}

#[cfg(test)]
mod tests;
