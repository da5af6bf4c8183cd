//! Who is answered next, by whom, and what is refused.
//!
//! 1. [`Engine::submit`] asks the [`Backend`] what a request costs, sets its memory aside and refuses at once what would
//!    most likely come late (`queue`, `pace`).
//! 2. A request that needs rows of a cluster goes to a thread that fetches them, together with all others that wait for
//!    the same; only then does it wait for a worker.
//! 3. An idle worker takes a batch: of one group and priority, its share of what waits, a few milliseconds long.
//! 4. [`Backend::run`] answers each [`Ticket`] as soon as its answer is made. It may look at [`Ticket::is_wanted`] at any
//!    time, and stop.
//! 5. A caller who leaves drops the future: what waits then goes without costing a worker anything.
//!
//! The engine knows nothing of passes; tests run it with fakes.

mod meters;
mod options;
mod pace;
mod passes;
mod queue;
#[cfg(test)]
mod tests;
mod ticket;
mod worker;

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::time::Sleep;

pub use options::Options;
pub use passes::Passes;
pub use ticket::Ticket;

use crate::error::{Error, Result};
use crate::limits::TIMEOUT_MS_MAX;
use crate::request::Priority;
use meters::Meters;
use queue::{Ask, Bounds, Entry, Queue, Refused};
use ticket::{Ledger, closing, late};

/// Threads that fetch rows. Each waits for one answer of the cluster at a time.
const FETCHERS: usize = 4;
/// Least price of a request: nothing is free.
const PRICE_MIN: Duration = Duration::from_micros(1);
/// What costs more is refused all the same, whatever it says.
const PRICE_MAX: Duration = Duration::from_secs(3600);
/// Longest time-out of a request.
const TIMEOUT_MAX: Duration = Duration::from_millis(TIMEOUT_MS_MAX);

/// What the workers run.
///
/// All of it is called on threads of the engine but [`cost`](Backend::cost), [`group`](Backend::group) and
/// [`needs_fetch`](Backend::needs_fetch), which are called once a request where it is submitted, and must be quick.
/// A panic in [`run`](Backend::run) or [`fetch`](Backend::fetch) fails the request that brings it about and no other:
/// the others of its batch that have no answer yet are run again, each alone.
pub trait Backend: Send + Sync + 'static {
    /// A request that was checked, priced and bound to the version that answers it.
    type Work: Send + 'static;
    /// What it is answered with.
    type Answer: Send + 'static;
    /// What a worker thread keeps from batch to batch.
    type Worker;

    /// What a worker thread keeps; called on the thread itself, and again after a panic.
    fn worker(&self) -> Self::Worker;

    /// What a request will cost.
    fn cost(&self, work: &Self::Work) -> Cost;

    /// Requests of one group may be run together; those of one version of a model, say.
    fn group(&self, work: &Self::Work) -> usize;

    /// Whether rows must be fetched before a worker can run it.
    fn needs_fetch(&self, work: &Self::Work) -> bool;

    /// Fetches what requests of one group need, and keeps it in them. May block until the last of their deadlines. A job
    /// that is answered here takes no worker.
    fn fetch(&self, jobs: &mut [Job<Self::Work, Self::Answer>]);

    /// Answers requests of one group, in any order, each as soon as it is done. One that is not wanted any more may be
    /// left without an answer.
    fn run(&self, worker: &mut Self::Worker, jobs: &mut [Job<Self::Work, Self::Answer>]);
}

/// A request and the way back to its caller.
#[derive(Debug)]
pub struct Job<W, A> {
    /// The request.
    pub work: W,
    /// The way back.
    pub ticket: Ticket<A>,
}

type JobOf<B> = Job<<B as Backend>::Work, <B as Backend>::Answer>;

/// What a request will cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// How long one worker is thought to run. Only the proportions must be right: the engine measures by which factor
    /// work takes longer here.
    pub time: Duration,
    /// Memory that the request holds from here on until it is answered, its answer included.
    pub memory_bytes: u64,
}

/// Under which terms a request is submitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// How long the answer is worth waiting for; the engine's default where it is not given.
    pub timeout: Option<Duration>,
    /// Who goes first where requests wait.
    pub priority: Priority,
}

/// Workers behind a queue. Dropping it answers what waits and ends the threads.
pub struct Engine<B: Backend> {
    shared: Arc<Shared<B>>,
    threads: Vec<JoinHandle<()>>,
    workers: usize,
    timeout: Duration,
}

impl<B: Backend> Engine<B> {
    /// Starts the threads. Metrics go to the recorder that is set by then.
    ///
    /// # Errors
    /// `Invalid` for options that cannot work, `Io` where no thread can be had.
    pub fn start(backend: B, options: &Options) -> Result<Self> {
        options.check()?;
        let workers = options.worker_count();
        let shared = Arc::new(Shared::new(backend, options, workers));
        let mut engine = Engine { shared, threads: Vec::new(), workers, timeout: options.timeout() };
        for number in 0..workers {
            engine.thread(format!("pass-{number}"), move |shared| worker::work(shared, number))?;
        }
        for number in 0..FETCHERS {
            engine.thread(format!("fetch-{number}"), worker::fetch)?;
        }
        Ok(engine)
    }

    fn thread(&mut self, name: String, run: impl FnOnce(&Shared<B>) + Send + 'static) -> Result<()> {
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new().name(name).spawn(move || run(&shared));
        self.threads.push(thread.map_err(|e| Error::io("a worker thread", e))?);
        Ok(())
    }

    /// What the workers run.
    pub fn backend(&self) -> &B {
        &self.shared.backend
    }

    /// Workers, and so the most cores that passes use at once.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// Whether a cheap interactive request would be taken in now: the question to ask before a body is read and parsed.
    /// Takes no lock. [`Engine::submit`] decides for good, by what the request costs.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    pub fn admits(&self, timeout: Option<Duration>) -> Result<()> {
        self.shared.admits(timeout.unwrap_or(self.timeout)).map_err(|refused| self.shared.meters.refused(refused))
    }

    /// Takes a request in, or refuses it, at once; the future waits for its answer. Dropping the future is leaving.
    ///
    /// # Errors
    /// What the backend answers; `Overloaded`, with the time to wait, where it cannot be done by its deadline, or where
    /// too much waits or is held; `TooCostly` where it needs more memory than all requests may hold; `DeadlineExceeded`
    /// where work had begun and came late; `NotReady` where the engine ends.
    pub fn submit(&self, work: B::Work, terms: Terms) -> impl Future<Output = Result<B::Answer>> + Send + use<B> {
        let place = self.enter(work, terms);
        async move { place?.await }
    }

    fn enter(&self, work: B::Work, terms: Terms) -> Result<Place<B>> {
        let shared = &self.shared;
        let arrived = Instant::now();
        let cost = shared.backend.cost(&work);
        let deadline = arrived + terms.timeout.unwrap_or(self.timeout).min(TIMEOUT_MAX);
        let ask = Ask {
            priority: terms.priority,
            group: shared.backend.group(&work),
            needs_fetch: shared.backend.needs_fetch(&work),
            price: cost.time.clamp(PRICE_MIN, PRICE_MAX),
            arrived,
            deadline,
        };
        // What may pile up leaves half of the memory to others.
        let may_pile_up = ask.needs_fetch || ask.priority == Priority::Batch;
        let held = shared.ledger.hold(cost.memory_bytes, may_pile_up).map_err(|error| shared.meters.memory(error))?;
        let mut queue = shared.lock();
        let latest_start = match queue.admit(&ask, arrived) {
            Ok(latest_start) => latest_start,
            Err(refused) => {
                drop(queue);
                return Err(shared.meters.refused(refused));
            }
        };
        let (ticket, answer) = Ticket::new(held, arrived, deadline);
        let id = queue.push(Job { work, ticket }, ask, latest_start, arrived);
        shared.publish(&queue);
        drop(queue);
        if ask.needs_fetch { &shared.fetch } else { &shared.work }.notify_one();
        Ok(Place { shared: shared.clone(), id, ask, answer, latest_start, timer: None, is_settled: false })
    }

    /// Takes nothing in any more and waits until all is answered; what then still waits after `bound` is refused, and
    /// what runs is not wanted any more. Blocks.
    pub fn drain(&self, bound: Duration) {
        self.shared.drain(bound);
    }
}

impl<B: Backend> Drop for Engine<B> {
    fn drop(&mut self) {
        self.shared.drain(Duration::ZERO);
        self.shared.end();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        // What a fetch brought back when no worker was there any more.
        self.shared.drain(Duration::ZERO);
    }
}

/// What callers, workers and fetchers share.
struct Shared<B: Backend> {
    backend: B,
    queue: Mutex<Queue<JobOf<B>>>,
    work: Condvar,
    fetch: Condvar,
    idle: Condvar,
    ledger: Arc<Ledger>,
    meters: Meters,
    started: Instant,
    /// When a cheap interactive request would get a worker, in nanoseconds since `started`.
    free_at_ns: AtomicU64,
    waiting: AtomicUsize,
    waiting_max: usize,
    is_closed: AtomicBool,
    is_ending: AtomicBool,
}

impl<B: Backend> Shared<B> {
    fn new(backend: B, options: &Options, workers: usize) -> Self {
        let started = Instant::now();
        let dear = Duration::from_millis(options.dear_ms);
        let bounds = Bounds { waiting: options.queue, batch: options.batch, workers, dear };
        Shared {
            backend,
            queue: Mutex::new(Queue::new(bounds, started)),
            work: Condvar::new(),
            fetch: Condvar::new(),
            idle: Condvar::new(),
            ledger: Ledger::new(options.memory_mb << 20),
            meters: Meters::new(),
            started,
            free_at_ns: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            waiting_max: options.queue,
            is_closed: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue<JobOf<B>>> {
        // No code of a backend runs under the lock, so that no panic of one leaves the queue half changed.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_for_work<'a>(&self, queue: MutexGuard<'a, Queue<JobOf<B>>>) -> MutexGuard<'a, Queue<JobOf<B>>> {
        self.work.wait(queue).unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_for_fetch<'a>(&self, queue: MutexGuard<'a, Queue<JobOf<B>>>) -> MutexGuard<'a, Queue<JobOf<B>>> {
        self.fetch.wait(queue).unwrap_or_else(PoisonError::into_inner)
    }

    fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Acquire)
    }

    /// Tells those who ask without the lock how things stand.
    fn publish(&self, queue: &Queue<JobOf<B>>) {
        let now = Instant::now();
        let free_at = now.duration_since(self.started) + queue.wait(Priority::Interactive, false, now);
        self.free_at_ns.store(u64::try_from(free_at.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
        self.waiting.store(queue.waiting_before(Priority::Interactive), Ordering::Relaxed);
        self.meters.state(queue, &self.ledger);
        if queue.is_idle() {
            self.idle.notify_all();
        }
    }

    fn admits(&self, timeout: Duration) -> Result<(), Refused> {
        if self.is_closed.load(Ordering::Relaxed) {
            return Err(Refused::Closed);
        }
        let waiting = self.waiting.load(Ordering::Relaxed);
        if waiting >= self.waiting_max {
            return Err(Refused::Full(waiting));
        }
        let free_at = Duration::from_nanos(self.free_at_ns.load(Ordering::Relaxed));
        let wait = free_at.saturating_sub(self.started.elapsed());
        let allowed = timeout.mul_f64(queue::WAIT_SHARE);
        if wait > allowed { Err(Refused::Late { wait, allowed, own: Duration::ZERO }) } else { Ok(()) }
    }

    fn finish(&self, worker: usize, done: Duration) {
        let mut queue = self.lock();
        queue.finish(worker, done, Instant::now());
        self.publish(&queue);
        if queue.waiting() > 0 {
            // A dear one may go now, which an idle worker had to leave, and this worker may take another.
            self.work.notify_one();
        }
    }

    fn fetched(&self, ready: Vec<Entry<JobOf<B>>>, gone: usize) {
        let mut queue = self.lock();
        queue.fetched(ready, gone, Instant::now());
        self.publish(&queue);
        drop(queue);
        self.work.notify_all();
    }

    fn withdraw(&self, id: u64) -> Option<Entry<JobOf<B>>> {
        let mut queue = self.lock();
        let entry = queue.withdraw(id);
        if entry.is_some() {
            self.publish(&queue);
        }
        entry
    }

    fn drain(&self, bound: Duration) {
        self.is_closed.store(true, Ordering::Relaxed);
        let mut queue = self.lock();
        queue.close();
        let waited = self.idle.wait_timeout_while(queue, bound, |queue| !queue.is_idle());
        let (mut queue, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let left = queue.clear();
        self.publish(&queue);
        drop(queue);
        self.ledger.close();
        for entry in left {
            entry.job.ticket.answer(Err(closing()));
        }
    }

    fn end(&self) {
        // Under the lock, so that no thread is between looking and waiting.
        let queue = self.lock();
        self.is_ending.store(true, Ordering::Release);
        drop(queue);
        self.work.notify_all();
        self.fetch.notify_all();
    }
}

/// A request that was taken in, as its caller holds it.
struct Place<B: Backend> {
    shared: Arc<Shared<B>>,
    id: u64,
    ask: Ask,
    answer: oneshot::Receiver<Result<B::Answer>>,
    latest_start: Instant,
    timer: Option<Pin<Box<Sleep>>>,
    is_settled: bool,
}

impl<B: Backend> Place<B> {
    /// The answer where there is one, and the wait for it.
    fn poll_answer(&mut self, context: &mut Context<'_>) -> Poll<Result<B::Answer>> {
        if let Poll::Ready(answer) = Pin::new(&mut self.answer).poll(context) {
            return Poll::Ready(answer.unwrap_or_else(|_| Err(Error::internal("the worker ended without an answer"))));
        }
        let latest_start = self.latest_start;
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(latest_start.into())));
        while timer.as_mut().poll(context).is_ready() {
            // Too late for a worker to begin; where one has begun, it has until the deadline.
            if let Some(entry) = self.shared.withdraw(self.id) {
                return Poll::Ready(Err(self.shared.meters.expired(&entry.ask)));
            }
            if timer.deadline() >= self.ask.deadline.into() {
                return Poll::Ready(Err(late(self.ask.deadline.duration_since(self.ask.arrived))));
            }
            timer.as_mut().reset(self.ask.deadline.into());
        }
        Poll::Pending
    }
}

impl<B: Backend> Future for Place<B> {
    type Output = Result<B::Answer>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let polled = self.poll_answer(context);
        self.is_settled = polled.is_ready();
        polled
    }
}

impl<B: Backend> Drop for Place<B> {
    fn drop(&mut self) {
        if !self.is_settled {
            self.shared.meters.left();
            drop(self.shared.withdraw(self.id));
        }
    }
}
