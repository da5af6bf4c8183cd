//! The engine: accepts or rejects requests, and owns the threads that answer them.

use std::cell::LazyCell;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::backend::{Backend, Job};
use super::caller_runs::InlineRequest;
use super::lane::QueuedRequest;
use super::options::Options;
use super::request_future::PendingAnswer;
use super::shared::{Hand, Shared, WorkerEpoch};
use super::ticket::Ticket;
use super::worker;
use sterling_core::error::Result;
use sterling_core::limits::TIMEOUT_MS_MAX;
use sterling_core::quota::Flow;
use sterling_core::request::{CallOptions, Priority};
use sterling_core::tasks::{self, Task};

/// Number of threads that fetch rows. Each fetcher waits for one answer of the cluster at a time.
pub(super) const FETCHERS: usize = 4;
/// Interval of the check for hanging workers, and the time after the last deadline of its batch at which a worker counts as lost.
/// rten cannot be interrupted by a deadline.
const WATCH: Duration = Duration::from_secs(1);
const LOST_AFTER: Duration = Duration::from_secs(30);
/// Maximum number of lost workers that are replaced: each may occupy a core and its memory forever.
const LOST_MAX: u64 = 16;
/// Minimum cost estimate of a request.
const COST_MIN: Duration = Duration::from_micros(1);
/// Maximum cost estimate: larger estimates are clamped, since such a request is rejected anyway.
const COST_MAX: Duration = Duration::from_secs(3600);
/// Maximum timeout of a request.
const TIMEOUT_MAX: Duration = Duration::from_millis(TIMEOUT_MS_MAX);

/// Queue with its worker threads. Dropping it answers the queued requests and ends the threads.
pub struct Engine<B: Backend> {
    pub(super) shared: Arc<Shared<B>>,
    timeout: Duration,
}

impl<B: Backend> Engine<B> {
    /// Starts the threads. Metrics go to the recorder that is installed at this moment.
    ///
    /// # Errors
    /// `Invalid` for unusable options, `Io` if a thread cannot be started.
    pub fn start(backend: B, options: &Options) -> Result<Self> {
        options.check()?;
        let shared = Arc::new(Shared::new(backend, options));
        let engine = Engine { shared, timeout: options.timeout() };
        for number in 0..engine.shared.slots() {
            start_worker(&engine.shared, WorkerEpoch { number, lost_before: 0 })?;
        }
        for number in 0..FETCHERS {
            start(&engine.shared, &tasks::FETCH, number, None, |shared| worker::fetch(shared))?;
        }
        start(&engine.shared, &tasks::WATCH, 0, None, |shared| {
            while !shared.wait_for_end(WATCH) {
                if let Some(since) = Instant::now().checked_sub(LOST_AFTER) {
                    replace_lost(shared, since);
                }
            }
        })?;
        Ok(engine)
    }

    /// Returns the backend that the workers run.
    pub fn backend(&self) -> &B {
        &self.shared.backend
    }

    /// Returns the number of workers, which is the number of cores that passes use. One more is reserved for short requests.
    pub fn workers(&self) -> usize {
        self.shared.slots() - 1
    }

    /// Returns the number of workers that can answer, one of them reserved: their threads are alive and do not hang in abandoned
    /// requests.
    pub fn available_workers(&self) -> usize {
        let since = Instant::now().checked_sub(LOST_AFTER);
        let threads = self.shared.threads();
        let is_alive = |number: usize| {
            let of_worker =
                |hand: &&Hand| hand.life.is_some_and(|life| life.number == number && self.shared.is_current(life));
            threads.iter().find(of_worker).is_some_and(|hand| !hand.thread.is_finished())
        };
        let alive: Vec<usize> = (0..self.shared.slots()).filter(|&number| is_alive(number)).collect();
        drop(threads);
        let queue = self.shared.lock();
        let able = alive.into_iter().filter(|&worker| since.is_none_or(|since| !queue.hangs(worker, since))).count();
        able.saturating_sub(1)
    }

    /// Returns the timeout of requests that name none.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Checks whether an interactive request of usual cost would be accepted now, before its body is read and parsed. Takes no
    /// lock, and computes the caller's flow only if some callers have queued requests. [`Engine::submit`] decides finally, from
    /// the cost of the request.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    pub fn admits(&self, flow: impl FnOnce() -> Flow, timeout: Option<Duration>) -> Result<()> {
        self.shared.admits(flow, timeout.unwrap_or(self.timeout)).map_err(|refused| self.shared.meters.refused(refused))
    }

    /// Same as [`Engine::admits`], for a request that may name its own timeout: `longest` bounds that timeout, from the default,
    /// and returns `None` if it finds no bound. The function is called only under overload.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    pub fn admits_within(
        &self,
        flow: impl FnOnce() -> Flow,
        longest: impl FnOnce(Duration) -> Option<Duration>,
    ) -> Result<()> {
        // Lazy, because the flow of a caller costs a digest of its key.
        let flow = LazyCell::new(flow);
        if self.shared.admits(|| *flow, self.timeout).is_ok() {
            return Ok(());
        }
        self.admits(|| *flow, Some(longest(self.timeout).unwrap_or(TIMEOUT_MAX).min(TIMEOUT_MAX)))
    }

    /// Returns how long the reader of requests should let them accumulate in the sockets: zero except under overload. Reading
    /// each request as it arrives takes a core from a worker and returns it, which costs more than the rejection itself.
    pub fn read_delay(&self) -> Duration {
        self.shared.read_delay(self.timeout)
    }

    /// Accepts or rejects a request immediately; the future waits for its answer. Dropping the future cancels the request.
    ///
    /// # Errors
    /// Errors of the backend; `Overloaded`, with the time to wait, if the deadline cannot be met or the queue or memory is full;
    /// `TooCostly` if the request needs more memory than the entire budget; `DeadlineExceeded` if work began but finished late;
    /// `NotReady` if the engine is shutting down.
    pub fn submit(&self, work: B::Work, terms: CallOptions) -> impl Future<Output = Result<B::Answer>> + Send + use<B> {
        let entered = self.enter(work, terms, false);
        async move { entered?.answer().await }
    }

    /// Same as [`Engine::submit`], but runs a short request on the calling thread if a worker is idle. Intended for callers that
    /// send one request at a time and do not cancel.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    pub async fn answer(&self, work: B::Work, terms: CallOptions) -> Result<B::Answer> {
        self.enter(work, terms, true)?.answer().await
    }

    fn enter(&self, work: B::Work, terms: CallOptions, may_be_lent: bool) -> Result<Entered<B>> {
        let shared = &self.shared;
        let arrived = Instant::now();
        let cost = shared.backend.cost(&work);
        let deadline = arrived + terms.timeout.unwrap_or(self.timeout).min(TIMEOUT_MAX);
        let ask = QueuedRequest {
            priority: terms.priority,
            flow: terms.flow,
            is_background: terms.is_background,
            group: shared.backend.group(&work),
            needs_fetch: shared.backend.needs_fetch(&work),
            cost_estimate: cost.time.clamp(COST_MIN, COST_MAX),
            arrived,
            deadline,
        };
        // Requests that may accumulate leave half of the memory to others.
        let may_pile_up = ask.needs_fetch || ask.priority == Priority::Batch;
        let may_be_lent = may_be_lent && shared.backend.runs_anywhere(&work);
        let held = shared.ledger.hold(terms.flow, cost.memory_bytes, may_pile_up);
        let held = held.map_err(|error| shared.meters.memory(error))?;
        let mut queue = shared.lock();
        if queue.must_preempt_background(&ask, arrived) {
            shared.overtaken.fetch_add(1, Ordering::Relaxed);
            shared.call(&mut queue, 1);
        }
        let latest_start = match queue.admit(&ask, arrived) {
            Ok(latest_start) => latest_start,
            Err(refused) => {
                shared.publish_for(&queue, &ask, arrived);
                drop(queue);
                return Err(shared.meters.refused(refused));
            }
        };
        let (ticket, answer) = Ticket::new(held, arrived, deadline);
        let ticket = if ask.is_background { ticket.until_preempted(&shared.overtaken) } else { ticket };
        if may_be_lent && let Some(lent) = shared.assign_idle_worker(&mut queue, &ask, arrived) {
            let is_brief = queue.is_brief(&ask);
            shared.publish(&queue);
            drop(queue);
            let job = Job { work, ticket };
            return Ok(Entered::Runs(InlineRequest {
                shared: shared.clone(),
                lent,
                cost_estimate: ask.cost_estimate,
                is_brief,
                job,
                answer,
            }));
        }
        let id = queue.push(Job { work, ticket }, ask, latest_start, arrived);
        shared.publish(&queue);
        shared.publish_for(&queue, &ask, arrived);
        match ask.needs_fetch {
            true => shared.fetch.notify_one(),
            false => shared.call(&mut queue, 1),
        }
        drop(queue);
        let place =
            PendingAnswer { shared: shared.clone(), id, ask, answer, latest_start, timer: None, is_settled: false };
        Ok(Entered::Waits(place))
    }

    /// Stops accepting requests and blocks until all are answered. After `bound`, queued requests are rejected and running
    /// requests are cancelled.
    pub fn drain(&self, bound: Duration) {
        self.shared.drain(bound);
    }
}

impl<B: Backend> Drop for Engine<B> {
    fn drop(&mut self) {
        self.shared.drain(Duration::ZERO);
        self.shared.end();
        loop {
            let hand = self.shared.threads().pop();
            let Some(Hand { life, thread }) = hand else { break };
            // A lost worker may never return, so it is not joined.
            if life.is_none_or(|life| self.shared.is_current(life)) {
                let _ = thread.join();
            }
        }
        // Answers requests whose fetch completed after the last worker ended.
        self.shared.drain(Duration::ZERO);
    }
}

/// Accepted request.
enum Entered<B: Backend> {
    Waits(PendingAnswer<B>),
    Runs(InlineRequest<B>),
}

impl<B: Backend> Entered<B> {
    async fn answer(self) -> Result<B::Answer> {
        match self {
            Entered::Waits(place) => place.await,
            Entered::Runs(own) => own.run(),
        }
    }
}

/// Starts a thread of the engine.
fn start<B: Backend>(
    shared: &Arc<Shared<B>>,
    task: &Task,
    number: usize,
    life: Option<WorkerEpoch>,
    run: impl FnOnce(&Arc<Shared<B>>) + Send + 'static,
) -> Result<()> {
    let its_own = shared.clone();
    let thread = task.start_one(number, move || run(&its_own))?;
    shared.threads().push(Hand { life, thread });
    Ok(())
}

/// Starts a worker.
fn start_worker<B: Backend>(shared: &Arc<Shared<B>>, life: WorkerEpoch) -> Result<()> {
    start(shared, &tasks::PASS, life.number, Some(life), move |shared| {
        shared.backend.host(&|| worker::work(shared, life))
    })
}

/// Replaces workers that have been running abandoned requests since `since`: a hanging graph or device costs a thread, but not a
/// worker.
pub(super) fn replace_lost<B: Backend>(shared: &Arc<Shared<B>>, since: Instant) {
    for life in shared.lose(since, LOST_MAX) {
        shared.meters.lost();
        tracing::error!(worker = life.number, "worker hangs in an abandoned request; a new worker replaces it");
        if let Err(error) = start_worker(shared, life) {
            tracing::error!(worker = life.number, %error, "cannot start a thread for a replacement worker");
        }
    }
}
