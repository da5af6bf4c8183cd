//! Long answers, written and compressed beside the threads that drive connections.
//!
//! A piece of a long answer takes a hundred microseconds to several milliseconds. Made where connections are polled, the pieces of a few callers
//! would hold up the small requests of all others. Here a few threads of a lower priority make them, one piece of each caller in turn. An answer
//! has one piece at a time under way, made when its connection asks for it: memory stays what it is without these threads. The first pieces are
//! made in place, for to hand a piece over and back takes as long as to make one: answers of some hundred kilobytes would take 1.6 times as long.

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, HttpBody};
use axum::http::Response;
use hyper::body::{Frame, SizeHint};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use sterling_kernels::{heap, priority};
use sterling_serving::quota::Flow;

/// Niceness of the threads: they get about a tenth of a contended core.
const NICENESS: i32 = 10;
/// Time for which chunks of an answer are computed in place.
const IN_PLACE: Duration = Duration::from_millis(1);
/// Frames of an answer are combined up to this size, in bytes: compression emits a frame per 4 kB of input ...
const PIECE_BYTES: usize = 64 << 10;
/// ... and up to this time.
const PIECE_TIME: Duration = Duration::from_millis(1);

/// The threads that make pieces of long answers.
#[derive(Debug)]
pub(super) struct Writers {
    turns: Arc<Mutex<Turns<Job>>>,
    /// Taken when it is dropped.
    runtime: Option<Runtime>,
}

impl Writers {
    /// Starts one thread per core.
    ///
    /// # Errors
    /// `Io` if a thread cannot be created.
    pub(super) fn start() -> Result<Arc<Self>> {
        let runtime = Builder::new_multi_thread()
            .thread_name("writers")
            .on_thread_start(|| priority::lower(NICENESS))
            .on_thread_park(heap::give_back)
            .build()
            .map_err(|e| Error::io("threads that write long answers", e))?;
        Ok(Arc::new(Writers { turns: Arc::default(), runtime: Some(runtime) }))
    }

    /// Moves the body to these threads if its length is unknown, which only applies to long answers.
    pub(super) fn long(self: &Arc<Self>, response: Response<Body>) -> Response<Body> {
        if response.body().size_hint().exact().is_some() {
            return response;
        }
        let flow = response.extensions().get().copied().unwrap_or_default();
        let writers = self.clone();
        response.map(|body| Body::new(Long::new(writers, flow, body)))
    }

    fn make(&self, flow: Flow, body: Body) -> oneshot::Receiver<Made> {
        let (to, made) = oneshot::channel();
        locked(&self.turns).push(flow, Job { body, to });
        let turns = self.turns.clone();
        // There is a task for each job, which runs the one whose turn it is.
        let next = async move {
            let job = locked(&turns).pop();
            if let Some(job) = job {
                job.run().await;
            }
        };
        if let Some(runtime) = &self.runtime {
            runtime.spawn(next);
        }
        made
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        // The last owner is a task of another runtime, which must not block on these threads.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// A body whose next frames are to be made.
#[derive(Debug)]
struct Job {
    body: Body,
    to: oneshot::Sender<Made>,
}

/// Frames of a body, and the body unless these were its last ones.
#[derive(Debug, Default)]
struct Made {
    frames: VecDeque<std::result::Result<Frame<Bytes>, axum::Error>>,
    rest: Option<Body>,
}

impl Job {
    async fn run(self) {
        let Job { mut body, to } = self;
        // A reader that has left needs no more.
        if to.is_closed() {
            return;
        }
        let (mut frames, mut bytes, begun) = (VecDeque::new(), 0, Instant::now());
        let is_done = std::future::poll_fn(|cx| {
            while bytes < PIECE_BYTES && begun.elapsed() < PIECE_TIME {
                match Pin::new(&mut body).poll_frame(cx) {
                    Poll::Ready(Some(Ok(frame))) => {
                        bytes += frame.data_ref().map_or(0, Bytes::len);
                        frames.push_back(Ok(frame));
                    }
                    Poll::Ready(end) => {
                        frames.extend(end);
                        return Poll::Ready(true);
                    }
                    Poll::Pending if frames.is_empty() => return Poll::Pending,
                    Poll::Pending => break,
                }
            }
            Poll::Ready(false)
        });
        let is_done = is_done.await;
        // The columns of an answer are freed here too.
        let rest = if is_done {
            drop(body);
            None
        } else {
            Some(body)
        };
        let _ = to.send(Made { frames, rest });
    }
}

/// Jobs of several callers.
#[derive(Debug)]
struct Turns<J> {
    waiting: HashMap<Flow, VecDeque<J>>,
    /// Callers with jobs, in the order of their turns.
    order: VecDeque<Flow>,
}

impl<J> Default for Turns<J> {
    fn default() -> Self {
        Turns { waiting: HashMap::new(), order: VecDeque::new() }
    }
}

impl<J> Turns<J> {
    fn push(&mut self, flow: Flow, job: J) {
        let jobs = self.waiting.entry(flow).or_default();
        if jobs.is_empty() {
            self.order.push_back(flow);
        }
        jobs.push_back(job);
    }

    /// The oldest job of the caller whose turn it is.
    fn pop(&mut self) -> Option<J> {
        let flow = self.order.pop_front()?;
        let jobs = self.waiting.get_mut(&flow)?;
        let job = jobs.pop_front();
        if jobs.is_empty() {
            self.waiting.remove(&flow);
        } else {
            self.order.push_back(flow);
        }
        job
    }
}

/// The body of a long answer.
struct Long {
    writers: Arc<Writers>,
    flow: Flow,
    /// Total time of chunks computed in place.
    in_place: Duration,
    /// Remaining body, between two chunks.
    rest: Option<Body>,
    made: VecDeque<std::result::Result<Frame<Bytes>, axum::Error>>,
    making: Option<oneshot::Receiver<Made>>,
}

impl Long {
    fn new(writers: Arc<Writers>, flow: Flow, body: Body) -> Self {
        Long { writers, flow, in_place: Duration::ZERO, rest: Some(body), made: VecDeque::new(), making: None }
    }
}

impl HttpBody for Long {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, axum::Error>>> {
        loop {
            if let Some(frame) = self.made.pop_front() {
                return Poll::Ready(Some(frame));
            }
            if let Some(making) = &mut self.making {
                // The sender is dropped if computing the chunk panics.
                let broken = || axum::Error::new(Error::internal("what writes the answer ended before it"));
                let failed = |_| Made { frames: [Err(broken())].into(), rest: None };
                let made = ready!(Pin::new(making).poll(cx)).unwrap_or_else(failed);
                (self.made, self.rest, self.making) = (made.frames, made.rest, None);
                continue;
            }
            let Some(mut body) = self.rest.take() else { return Poll::Ready(None) };
            if self.in_place < IN_PLACE {
                let begun = Instant::now();
                let polled = Pin::new(&mut body).poll_frame(cx);
                self.in_place += begun.elapsed();
                if !matches!(polled, Poll::Ready(None | Some(Err(_)))) {
                    self.rest = Some(body);
                }
                return polled;
            }
            self.making = Some(self.writers.make(self.flow, body));
        }
    }

    fn is_end_stream(&self) -> bool {
        self.made.is_empty() && self.making.is_none() && self.rest.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::convert::Infallible;
    use std::thread::ThreadId;

    use futures_util::{StreamExt as _, stream};

    use super::*;

    #[test]
    fn callers_take_turns_and_none_waits_behind_all_jobs_of_another() {
        let mut turns = Turns::default();
        for job in 0..4 {
            turns.push(Flow(1), job);
        }
        turns.push(Flow(2), 10);
        assert_eq!([turns.pop(), turns.pop(), turns.pop()], [Some(0), Some(10), Some(1)]);
        turns.push(Flow(2), 11);
        assert_eq!([turns.pop(), turns.pop(), turns.pop(), turns.pop()], [Some(2), Some(11), Some(3), None]);
        assert!(turns.waiting.is_empty() && turns.order.is_empty(), "callers that left take no memory");
    }

    /// Pieces of the given lengths, each filled with the number of its place, and the threads that make them. The first takes as long as may be in place.
    fn pieces(lengths: &'static [usize]) -> (Body, Arc<Mutex<Vec<ThreadId>>>) {
        let threads = Arc::new(Mutex::new(Vec::new()));
        let noted = threads.clone();
        let pieces = lengths.iter().enumerate().map(move |(n, &length)| {
            locked(&noted).push(std::thread::current().id());
            std::thread::sleep(if n == 0 { IN_PLACE } else { Duration::ZERO });
            Ok::<_, Infallible>(Bytes::from(vec![n as u8; length]))
        });
        (Body::from_stream(stream::iter(pieces)), threads)
    }

    #[tokio::test]
    async fn pieces_of_long_answers_are_made_in_order_and_all_but_the_first_elsewhere() {
        let writers = Writers::start().unwrap();
        let lengths = &[1, PIECE_BYTES, 10, 3 * PIECE_BYTES, 0, 5];
        let (body, threads) = pieces(lengths);
        let response = writers.long(Response::new(body));
        let read = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
        let expected: Vec<u8> = lengths.iter().enumerate().flat_map(|(n, &length)| vec![n as u8; length]).collect();
        assert!(read == expected);
        let here = std::thread::current().id();
        let are_here: Vec<bool> = locked(&threads).iter().map(|&thread| thread == here).collect();
        assert_eq!(are_here, [true, false, false, false, false, false]);
        let short = writers.long(Response::new(Body::from("short")));
        assert_eq!(short.body().size_hint().exact(), Some(5), "a short answer is sent as it is");
    }

    #[tokio::test]
    async fn one_piece_is_made_at_a_time_and_none_for_a_reader_that_left() {
        let writers = Writers::start().unwrap();
        let (body, threads) = pieces(&[PIECE_BYTES; 8]);
        let mut body = writers.long(Response::new(body)).into_body();
        for made in 1..4 {
            let piece = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await.unwrap().unwrap();
            assert_eq!(piece.data_ref().unwrap().len(), PIECE_BYTES);
            assert_eq!(locked(&threads).len(), made, "nothing is made ahead of its reader");
        }
        drop(body);
        assert_eq!(Arc::strong_count(&threads), 1, "the rest is freed");
    }

    #[tokio::test]
    async fn a_panic_ends_one_answer_and_the_threads_go_on() {
        let writers = Writers::start().unwrap();
        let broken = stream::iter([0, 1]).map(|n| {
            assert!(n == 0, "for the test");
            std::thread::sleep(IN_PLACE);
            Ok::<_, Infallible>(Bytes::from(vec![0; PIECE_BYTES]))
        });
        let response = writers.long(Response::new(Body::from_stream(broken)));
        assert!(axum::body::to_bytes(response.into_body(), usize::MAX).await.is_err());
        for _ in 0..20 {
            let response = writers.long(Response::new(pieces(&[1, 2]).0));
            assert_eq!(axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap().len(), 3);
        }
    }
}
