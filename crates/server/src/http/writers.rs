//! Threads that compute, write and compress long answers, apart from the threads that drive connections.
//!
//! A chunk of a long answer takes a hundred microseconds to several milliseconds. On the threads that poll connections, the
//! chunks of a few callers would delay the small requests of all others. So a few threads of lower priority compute long
//! answers, one chunk of each caller in turn. An answer has at most one chunk in progress, computed when its connection polls
//! for it, so that answers are not buffered. The first chunks are computed in place, because handing a chunk over and back
//! takes as long as computing it: answers of some hundred kilobytes would take 1.6 times as long.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, HttpBody};
use axum::http::Response;
use hyper::body::{Frame, SizeHint};
use tokio::sync::oneshot;

use super::caller_rotation::WaitingJobs;
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use sterling_core::quota::{Flow, Memory};
use sterling_core::tasks::{self, Runtime};
use sterling_kernels::{heap, priority};

/// Niceness of the threads: they get about a tenth of a contended core.
const NICENESS: i32 = 10;
/// Time for which chunks of an answer are computed in place.
const IN_PLACE: Duration = Duration::from_millis(1);
/// Frames of an answer are combined up to this size, in bytes: compression emits a frame per 4 kB of input.
const PIECE_BYTES: usize = 64 << 10;
/// Time for which frames of an answer are combined.
const PIECE_TIME: Duration = Duration::from_millis(1);

/// Threads that compute chunks of long answers.
pub(super) struct ChunkThreads {
    turns: Arc<Mutex<WaitingJobs<Job>>>,
    runtime: Runtime,
}

impl ChunkThreads {
    /// Starts one thread per core.
    ///
    /// # Errors
    /// `Io` if a thread cannot be created.
    pub(super) fn start() -> Result<Arc<Self>> {
        let runtime = tasks::WRITERS
            .runtime(|builder| builder.on_thread_start(|| priority::lower(NICENESS)).on_thread_park(heap::give_back))?;
        Ok(Arc::new(ChunkThreads { turns: Arc::default(), runtime }))
    }

    /// Lets these threads compute a body of unknown length; only long answers have such bodies.
    pub(super) fn long(self: &Arc<Self>, response: Response<Body>) -> Response<Body> {
        if response.body().size_hint().exact().is_some() {
            return response;
        }
        let flow = response.extensions().get().copied().unwrap_or_default();
        let writers = self.clone();
        response.map(|body| Body::new(Long::new(writers, flow, body)))
    }

    /// Runs `step` until it returns an outcome; each step must take far less than a millisecond. The first millisecond runs in
    /// place, later steps on the threads for long answers, a chunk of steps at a time. If the caller drops the future, later
    /// steps are skipped. `share` is the reservation of the memory that the steps have and may grow; it lives as long as they do.
    ///
    /// # Errors
    /// The error of a step; `Internal` if a step panics.
    pub(super) async fn work<T: Send + 'static>(
        &self,
        flow: Flow,
        share: &Arc<Memory>,
        mut step: impl FnMut(&Arc<Memory>) -> Result<Option<T>> + Send + 'static,
    ) -> Result<T> {
        let share = share.clone();
        let mut step = move || step(&share);
        let mut done = steps(&mut step, IN_PLACE);
        loop {
            if let Some(done) = done.transpose() {
                return done;
            }
            let next = self.make(flow, async move { (steps(&mut step, PIECE_TIME), step) });
            (done, step) = next.await.map_err(|_| Error::internal("the thread that computes an answer ended early"))?;
        }
    }

    /// Queues a chunk behind earlier chunks of its caller. The chunk is skipped if the receiver was dropped meanwhile.
    fn make<T: Send + 'static>(
        &self,
        flow: Flow,
        piece: impl Future<Output = T> + Send + 'static,
    ) -> oneshot::Receiver<T> {
        let (to, made) = oneshot::channel();
        let job = async move {
            if !to.is_closed() {
                let _ = to.send(piece.await);
            }
        };
        locked(&self.turns).push(flow, Box::pin(job));
        let turns = self.turns.clone();
        // Spawns one task per job. A task runs the next job in rotation, which need not be the job queued above.
        let next = async move {
            let job = locked(&turns).pop();
            if let Some(job) = job {
                job.await;
            }
        };
        self.runtime.spawn(next);
        made
    }
}

/// Runs steps until one returns an outcome, or until the time `most` has passed.
fn steps<T>(step: &mut impl FnMut() -> Result<Option<T>>, most: Duration) -> Result<Option<T>> {
    let started = Instant::now();
    loop {
        let done = step()?;
        if done.is_some() || started.elapsed() >= most {
            return Ok(done);
        }
    }
}

/// Queued chunk.
type Job = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Computed frames of a body, and the remaining body unless these were the last ones.
#[derive(Debug, Default)]
struct ComputedFrames {
    frames: VecDeque<std::result::Result<Frame<Bytes>, axum::Error>>,
    rest: Option<Body>,
}

/// Computes the next frames of a body.
async fn next_frames(mut body: Body) -> ComputedFrames {
    let (mut frames, mut bytes, started) = (VecDeque::new(), 0, Instant::now());
    let is_done = std::future::poll_fn(|cx| {
        while bytes < PIECE_BYTES && started.elapsed() < PIECE_TIME {
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
    // Dropping the body frees the columns of the answer on this thread.
    let rest = if is_done {
        drop(body);
        None
    } else {
        Some(body)
    };
    ComputedFrames { frames, rest }
}

/// Body of a long answer.
struct Long {
    writers: Arc<ChunkThreads>,
    flow: Flow,
    /// Total time of chunks computed in place.
    in_place: Duration,
    /// Remaining body, between two chunks.
    rest: Option<Body>,
    made: VecDeque<std::result::Result<Frame<Bytes>, axum::Error>>,
    making: Option<oneshot::Receiver<ComputedFrames>>,
}

impl Long {
    fn new(writers: Arc<ChunkThreads>, flow: Flow, body: Body) -> Self {
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
                let broken = || axum::Error::new(Error::internal("the thread that writes the answer ended early"));
                let failed = |_| ComputedFrames { frames: [Err(broken())].into(), rest: None };
                let made = ready!(Pin::new(making).poll(cx)).unwrap_or_else(failed);
                (self.made, self.rest, self.making) = (made.frames, made.rest, None);
                continue;
            }
            let Some(mut body) = self.rest.take() else { return Poll::Ready(None) };
            if self.in_place < IN_PLACE {
                let started = Instant::now();
                let polled = Pin::new(&mut body).poll_frame(cx);
                self.in_place += started.elapsed();
                if !matches!(polled, Poll::Ready(None | Some(Err(_)))) {
                    self.rest = Some(body);
                }
                return polled;
            }
            self.making = Some(self.writers.make(self.flow, next_frames(body)));
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

    use futures_util::future::join_all;
    use futures_util::{StreamExt as _, stream};

    use super::*;
    use sterling_core::quota::Quota;

    /// Chunks of the given lengths, each filled with its index, and the threads that computed them. The first uses up the time in
    /// place.
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
    async fn chunks_of_long_answers_are_computed_in_order_on_other_threads() {
        let writers = ChunkThreads::start().unwrap();
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
    async fn chunks_are_computed_one_at_a_time_and_only_for_a_reader() {
        let writers = ChunkThreads::start().unwrap();
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

    fn reservation() -> Arc<Memory> {
        Arc::new(Quota::new("answers", 1).hold(Flow(1), 1).unwrap())
    }

    /// Returns work of `steps` steps, which records its caller at each.
    fn noting(
        steps: usize,
        caller: u64,
        noted: &Arc<Mutex<Vec<u64>>>,
    ) -> impl FnMut(&Arc<Memory>) -> Result<Option<usize>> + use<> {
        let (noted, mut left) = (noted.clone(), steps);
        move |_| {
            locked(&noted).push(caller);
            left -= 1;
            std::thread::sleep(PIECE_TIME);
            Ok((left == 0).then_some(steps))
        }
    }

    #[tokio::test]
    async fn work_alternates_between_callers_step_by_step() {
        let writers = ChunkThreads::start().unwrap();
        let share = reservation();
        let noted = Arc::<Mutex<Vec<u64>>>::default();
        let runtime = writers.runtime.metrics().num_workers();
        // More concurrent calls than threads, so that they compete.
        let many = (0..4 * runtime).map(|_| writers.work(Flow(1), &share, noting(20, 1, &noted)));
        let (all, one) = tokio::join!(join_all(many), writers.work(Flow(2), &share, noting(20, 2, &noted)));
        assert_eq!(one.unwrap(), 20);
        assert!(all.into_iter().all(|done| done.is_ok_and(|steps| steps == 20)));
        let noted = std::mem::take(&mut *locked(&noted));
        assert_eq!(noted.len(), 20 * (4 * runtime + 1));
        let last = noted.iter().rposition(|&caller| caller == 2).unwrap();
        let before = noted[..last].iter().filter(|&&caller| caller == 1).count();
        // The first step of every call runs in place. Then each step of caller 2 waits for one of caller 1 and for those in
        // progress.
        assert!(before <= 4 * runtime + 20 * (1 + 2 * runtime), "{before} steps of the other caller came first");
    }

    #[tokio::test]
    async fn work_in_steps_ends_with_its_outcome_an_error_or_a_panic_and_is_left_by_its_caller() {
        let writers = ChunkThreads::start().unwrap();
        let share = reservation();
        let noted = Arc::<Mutex<Vec<u64>>>::default();
        assert_eq!(writers.work(Flow(1), &share, |_| Ok(Some(7))).await.unwrap(), 7);
        let invalid = writers.work(Flow(1), &share, |_| Err::<Option<()>, _>(Error::overloaded("for the test"))).await;
        assert_eq!(invalid.unwrap_err().to_string(), "for the test");
        let mut broken = noting(2, 1, &noted);
        let broken = move |share: &Arc<Memory>| broken(share).inspect(|done| assert!(done.is_none(), "for the test"));
        assert_eq!(
            writers.work(Flow(1), &share, broken).await.unwrap_err().kind(),
            sterling_core::error::Kind::Internal
        );
        let endless = writers.work(Flow(1), &share, noting(usize::MAX, 1, &noted));
        assert!(tokio::time::timeout(Duration::from_millis(20), endless).await.is_err());
        while Arc::strong_count(&noted) > 1 || Arc::strong_count(&share) > 1 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_panic_ends_one_answer_and_the_threads_go_on() {
        let writers = ChunkThreads::start().unwrap();
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
