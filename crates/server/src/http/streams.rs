//! Concurrent requests on one HTTP/2 connection, with the same limits as HTTP/1.1 requests.
//!
//! An HTTP/1.1 connection has one request, whose state follows from the socket. In HTTP/2 each request has a [`Stream`], from its
//! header until the last byte of its answer is written. The number of streams over all connections is limited like the number of
//! connections. An answer that its client does not read is detected even if the connection works, and only its stream ends:
//! behind a proxy, the other streams may belong to other clients.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::Response;
use futures_util::task::AtomicWaker;
use hyper::body::{Frame, SizeHint};
use hyper::rt::Executor;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::AbortHandle;

use super::fair_scheduling::{ScheduledFuture, Threads};
use super::last_caller::LastCaller;
use super::options::Options;

use sterling_core::locks::locked;

/// Number of answers that share a connection without delaying each other for long.
const CONCURRENT_ANSWERS: u64 = 16;
/// Answers of at most this size (bytes) end with their last chunk: few flow-control windows are smaller.
const SMALL_ANSWER_BYTES: u64 = 16 << 10;
/// Number of requests that a client may reset beyond those whose answers it read.
const RESET_REQUESTS_MAX: u64 = 100;

/// Requests of a connection.
#[derive(Debug)]
pub(super) struct Streams {
    /// Time at which the connection was opened.
    opened: Instant,
    under: Mutex<Under>,
}

#[derive(Debug, Default)]
struct Under {
    count: u64,
    open: BTreeMap<u64, Open>,
    /// Number of the latest request, until the task that answers the request is known.
    begun: Option<u64>,
    /// Age of the connection at the end of the last request.
    rested: u64,
    answered: u64,
    taken_back: u64,
}

/// Request in progress.
#[derive(Debug, Default)]
struct Open {
    /// Age of the connection, in milliseconds, when the answer last progressed; `None` before the answer and while a chunk is
    /// computed.
    moved: Option<u64>,
    /// Task that answers the request, until the task is aborted.
    task: Option<AbortHandle>,
}

impl Streams {
    /// Creates the state of a connection that was opened at `opened`.
    pub(super) fn new(opened: Instant) -> Self {
        Streams { opened, under: Mutex::default() }
    }

    fn under(&self) -> MutexGuard<'_, Under> {
        locked(&self.under)
    }

    fn age(&self) -> u64 {
        self.opened.elapsed().as_millis() as u64
    }

    /// Returns the age of the connection at the end of the last request; `None` while one is in progress.
    pub(super) fn idle_since(&self) -> Option<u64> {
        let under = self.under();
        under.open.is_empty().then_some(under.rested)
    }

    /// Returns the reason why the connection must close, if there is one.
    pub(super) fn overdue(&self, options: &Options) -> Option<&'static str> {
        let (age, under) = (self.age(), self.under());
        // A client that sends and resets requests causes work without reading answers.
        if under.taken_back > under.answered + RESET_REQUESTS_MAX {
            return Some("resets");
        }
        (under.open.is_empty() && age.saturating_sub(under.rested) > options.idle_ms).then_some("idle")
    }

    /// Aborts each request whose answer is not read. Returns `false` if a request cannot be aborted without its connection.
    pub(super) fn end_stalled(&self, options: &Options) -> bool {
        let (age, mut under) = (self.age(), self.under());
        let count = under.open.values().filter(|open| open.moved.is_some()).count() as u64;
        // The limit grows with the number of answers that share the connection.
        let bound = options.stall_ms * (1 + count / CONCURRENT_ANSWERS);
        let is_stalled = |open: &&mut Open| open.moved.is_some_and(|moved| age.saturating_sub(moved) > bound);
        under.open.values_mut().filter(is_stalled).all(|open| {
            // A request that is still open after its abort has no task at the next check.
            let Some(task) = open.task.take().filter(|task| !task.is_finished()) else { return false };
            open.moved = Some(age);
            metrics::counter!("sterling_streams_cut_total").increment(1);
            task.abort();
            true
        })
    }

    /// Records the task of the latest request.
    fn answers(&self, task: AbortHandle) {
        let mut under = self.under();
        if let Some(open) = under.begun.take().and_then(|number| under.open.get_mut(&number)) {
            open.task = Some(task);
        }
    }
}

/// Executor for the requests of a connection: spawns tasks that [`Streams::end_stalled`] may abort; dropping a task resets its
/// stream.
#[derive(Clone, Debug)]
pub(super) struct StreamTasks {
    pub(super) streams: Arc<Streams>,
    pub(super) caller: Arc<LastCaller>,
    pub(super) threads: Arc<Threads>,
}

impl<F: Future<Output: Send> + Send + 'static> Executor<F> for StreamTasks {
    // hyper calls this right after the service, which has registered the request.
    fn execute(&self, task: F) {
        self.streams.answers(tokio::spawn(ScheduledFuture::new(task, &self.threads, &self.caller)).abort_handle());
    }
}

/// Request, until its answer is completely written.
#[derive(Debug)]
pub(super) struct Stream {
    all: Arc<Streams>,
    number: u64,
    is_answered: AtomicBool,
    unsent: UnwrittenChunks,
    _turn: OwnedSemaphorePermit,
}

impl Stream {
    /// Registers a request with a complete header and a slot.
    pub(super) fn begin(all: Arc<Streams>, turn: OwnedSemaphorePermit) -> Arc<Self> {
        let mut under = all.under();
        under.count += 1;
        let number = under.count;
        under.open.insert(number, Open::default());
        under.begun = Some(number);
        drop(under);
        Arc::new(Stream {
            all,
            number,
            is_answered: AtomicBool::new(false),
            unsent: UnwrittenChunks::default(),
            _turn: turn,
        })
    }

    /// Records that the answer has started, or that a chunk is written.
    fn moved(&self) {
        self.is_answered.store(true, Ordering::Relaxed);
        self.moved_at(Some(self.all.age()));
    }

    /// Records that the next chunk is being computed, so the client is not stalling.
    fn waits(&self) {
        self.moved_at(None);
    }

    fn moved_at(&self, age: Option<u64>) {
        if let Some(open) = self.all.under().open.get_mut(&self.number) {
            open.moved = age;
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let age = self.all.age();
        let mut under = self.all.under();
        under.open.remove(&self.number);
        if self.is_answered.load(Ordering::Relaxed) {
            under.answered += 1;
        } else {
            under.taken_back += 1;
        }
        under.rested = age;
    }
}

/// Chunks of an answer that are not written yet.
#[derive(Debug, Default)]
struct UnwrittenChunks {
    count: AtomicUsize,
    answer: AtomicWaker,
}

impl UnwrittenChunks {
    fn poll_none(&self, cx: &mut Context<'_>) -> Poll<()> {
        // Register before checking, so that a chunk written in between is not missed.
        self.answer.register(cx.waker());
        if self.count.load(Ordering::Acquire) == 0 { Poll::Ready(()) } else { Poll::Pending }
    }
}

/// Body of an answer; dropping it ends its request.
#[derive(Debug)]
pub(super) struct Streamed {
    body: Body,
    /// Stream of the request; `None` if the request got no slot.
    stream: Option<Arc<Stream>>,
    /// True if the end waits for all chunks: otherwise h2 would hold chunks that exceed the client's window, and the request
    /// could not be aborted without its connection.
    is_large: bool,
}

impl Streamed {
    pub(super) fn refused(body: Body) -> Self {
        Streamed { body, stream: None, is_large: false }
    }

    pub(super) fn of(response: Response<Body>, stream: Arc<Stream>) -> Response<Self> {
        stream.moved();
        response.map(|body| {
            let is_large = body.size_hint().exact().is_none_or(|bytes| bytes > SMALL_ANSWER_BYTES);
            Streamed { body, stream: Some(stream), is_large }
        })
    }
}

/// Chunk of an answer, dropped after it is written to the socket.
struct AnswerChunk {
    bytes: Bytes,
    stream: Arc<Stream>,
}

impl AsRef<[u8]> for AnswerChunk {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for AnswerChunk {
    fn drop(&mut self) {
        let unsent = &self.stream.unsent;
        if unsent.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            unsent.answer.wake();
        }
    }
}

impl HttpBody for Streamed {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        let frame = match polled {
            Poll::Ready(Some(Ok(frame))) => frame,
            Poll::Ready(None) => {
                return match self.stream.as_ref().filter(|_| self.is_large) {
                    Some(stream) => stream.unsent.poll_none(cx).map(|()| None),
                    None => Poll::Ready(None),
                };
            }
            Poll::Pending => {
                self.stream.iter().for_each(|stream| stream.waits());
                return Poll::Pending;
            }
            Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(error))),
        };
        let Some(stream) = self.stream.clone() else { return Poll::Ready(Some(Ok(frame))) };
        stream.moved();
        Poll::Ready(Some(Ok(frame.map_data(|bytes| {
            stream.unsent.count.fetch_add(1, Ordering::AcqRel);
            Bytes::from_owner(AnswerChunk { bytes, stream })
        }))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream() && !self.is_large
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use tokio::sync::Semaphore;

    use super::*;

    fn options() -> Options {
        Options { idle_ms: 1000, stall_ms: 100, ..Options::default() }
    }

    /// Requests of a connection that was opened `ms` ago.
    fn aged(ms: u64) -> Arc<Streams> {
        Arc::new(Streams::new(Instant::now() - Duration::from_millis(ms)))
    }

    fn begin(all: &Arc<Streams>) -> Arc<Stream> {
        Stream::begin(all.clone(), Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap())
    }

    #[test]
    fn a_connection_is_idle_between_requests() {
        let all = aged(5000);
        assert_eq!((all.idle_since(), all.overdue(&options())), (Some(0), Some("idle")));
        let (first, second) = (begin(&all), begin(&all));
        assert_eq!((all.idle_since(), all.overdue(&options())), (None, None), "work may take its time");
        drop(first);
        assert!(all.idle_since().is_none());
        drop(second);
        assert!(all.idle_since().unwrap() >= 5000 && all.overdue(&options()).is_none());
    }

    #[tokio::test]
    async fn stalled_answers_end_alone_and_later_if_many_stall() {
        let all = aged(5000);
        let caller = Arc::new(LastCaller::at(std::net::Ipv4Addr::LOCALHOST.into()));
        let tasks = StreamTasks { streams: all.clone(), caller, threads: Threads::new(1) };
        let run = |_| {
            let stream = begin(&all);
            let retained = stream.clone();
            tasks.execute(async move {
                let _stream = retained;
                std::future::pending::<()>().await;
            });
            stream
        };
        let mut unread: Vec<_> = (0..40).map(run).collect();
        let moved = |number: u64, age| all.under().open.get_mut(&number).unwrap().moved = Some(age);
        unread[1..].iter().for_each(|stream| stream.moved());
        moved(1, 4850);
        assert!(all.end_stalled(&options()));
        assert!(all.under().open[&1].task.is_some(), "forty share the connection");
        moved(1, 4000);
        assert!(all.end_stalled(&options()));
        unread.remove(0);
        while all.under().open.contains_key(&1) {
            tokio::task::yield_now().await;
        }
        assert_eq!(all.under().open.len(), 39, "its neighbours go on");
        // A chunk that is still computed is not the client's fault.
        moved(3, 4000);
        unread[1].waits();
        assert!(all.end_stalled(&options()));
        assert!(all.under().open[&3].task.is_some());
        unread[1].moved();
        // Its task has ended, but the request stays: only the connection can close.
        moved(2, 4000);
        all.under().open.get_mut(&2).unwrap().task = None;
        assert!(!all.end_stalled(&options()));
        unread[0].moved();
        assert!(all.end_stalled(&options()));
        unread.clear();
    }

    #[test]
    fn a_large_answer_ends_once_its_chunks_are_written() {
        let mut cx = Context::from_waker(std::task::Waker::noop());
        for (bytes, waits) in [(100, false), (100_000, true)] {
            let all = aged(0);
            let answer = Streamed::of(Response::new(Body::from(vec![7; bytes])), begin(&all));
            let mut body = answer.into_body();
            let Poll::Ready(Some(Ok(piece))) = Pin::new(&mut body).poll_frame(&mut cx) else { panic!("no piece") };
            assert_eq!(body.is_end_stream(), !waits);
            assert_eq!(Pin::new(&mut body).poll_frame(&mut cx).is_pending(), waits);
            drop(piece);
            assert!(matches!(Pin::new(&mut body).poll_frame(&mut cx), Poll::Ready(None)));
            assert_eq!(all.under().open.len(), 1);
            drop(body);
            assert!(all.under().open.is_empty());
        }
    }

    #[test]
    fn cancelled_requests_are_compared_with_answered_ones() {
        let all = aged(0);
        for _ in 0..50 {
            begin(&all).moved();
        }
        for taken_back in 1..=50 + RESET_REQUESTS_MAX {
            drop(begin(&all));
            assert_eq!(all.overdue(&options()), None, "{taken_back}");
        }
        drop(begin(&all));
        assert_eq!(all.overdue(&options()), Some("resets"));
    }
}
