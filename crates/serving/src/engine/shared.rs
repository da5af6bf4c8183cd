//! State shared by callers, workers and fetchers: the queue behind its lock, and estimates that are published without it.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::backend::{Backend, JobOf};
use super::lane::{Entry, QueuedRequest};
use super::meters::Meters;
use super::options::Options;
use super::queue::{self, Bounds, Queue, RejectionReason};
use super::ticket::{Ledger, closing};
use sterling_core::locks::locked;
use sterling_core::quota::Flow;
use sterling_core::request::Priority;

/// Idle time after which a worker releases memory.
const RELEASE_AFTER: Duration = Duration::from_secs(1);

/// Time for which sockets are left unread under overload, and its maximum share of a request's timeout.
const READ_DELAY: Duration = Duration::from_millis(1);
const READ_DELAY_SHARE: f64 = 0.01;

/// Maximum share of a request's timeout that is reserved for other requests that the sockets deliver at the same time.
const ROOM_SHARE: f64 = 0.02;

/// Number of entries in [`Shared::free_for`], and the bits of an entry that hold the time.
const PUBLISHED_FLOWS: usize = 1024;
const FREE_AT_US: u64 = (1 << 48) - 1;

/// Maximum time for which earlier predictions of callers' waits stay in use after a new prediction is published.
const CROWDED_MAX: Duration = Duration::from_secs(1);

/// Returns the index of a flow in [`Shared::free_for`], and the tag bits that distinguish it there.
fn published(flow: Flow) -> (usize, u64) {
    ((flow.0 % PUBLISHED_FLOWS as u64) as usize, flow.0 & !FREE_AT_US)
}

/// State shared by callers, workers and fetchers.
pub(super) struct Shared<B: Backend> {
    pub(super) backend: B,
    queue: Mutex<Queue<JobOf<B>>>,
    /// State of each worker while the worker is idle.
    kept: Vec<Mutex<Option<B::Worker>>>,
    /// Condition variable on which each worker sleeps.
    work: Vec<Condvar>,
    pub(super) fetch: Condvar,
    idle: Condvar,
    pub(super) ledger: Arc<Ledger>,
    /// Number of times that callers preempted background work.
    pub(super) overtaken: Arc<AtomicU64>,
    pub(super) meters: Meters,
    started: Instant,
    /// Time at which a cheap interactive request would get a worker, in nanoseconds since `started`.
    free_at_ns: AtomicU64,
    /// The same time for callers with queued requests, indexed by flow: 16 tag bits of the flow, and microseconds since
    /// `started`.
    free_for: Box<[AtomicU64]>,
    /// The latest time in `free_for`.
    crowded_until_us: AtomicU64,
    /// Run time of a usual interactive request, in nanoseconds.
    usual_ns: AtomicU64,
    waiting: AtomicUsize,
    waiting_max: usize,
    is_closed: AtomicBool,
    is_ending: AtomicBool,
    ended: Condvar,
    /// Number of times that each worker was lost; changed under the queue's lock.
    lives: Vec<AtomicU64>,
    threads: Mutex<Vec<Hand>>,
}

/// A worker's thread: its number, and the number of lost predecessors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WorkerEpoch {
    pub(super) number: usize,
    pub(super) lost_before: u64,
}

/// Slot of a worker with its state, held by the thread that runs with it.
pub(super) struct HeldSlot<W> {
    pub(super) life: WorkerEpoch,
    pub(super) kept: Option<W>,
}

/// Thread of the engine.
#[derive(Debug)]
pub(super) struct Hand {
    /// Set for worker threads.
    pub(super) life: Option<WorkerEpoch>,
    pub(super) thread: JoinHandle<()>,
}

impl<B: Backend> Shared<B> {
    pub(super) fn new(backend: B, options: &Options) -> Self {
        let started = Instant::now();
        let expensive = Duration::from_millis(options.expensive_request_ms);
        let bounds = Bounds { waiting: options.queue, batch: options.batch, cores: options.worker_count(), expensive };
        let slots = bounds.slots();
        Shared {
            backend,
            queue: Mutex::new(Queue::new(bounds, started)),
            kept: (0..slots).map(|_| Mutex::default()).collect(),
            work: (0..slots).map(|_| Condvar::new()).collect(),
            fetch: Condvar::new(),
            idle: Condvar::new(),
            ledger: Ledger::new(options.memory_mb << 20),
            overtaken: Arc::default(),
            meters: Meters::new(),
            started,
            free_at_ns: AtomicU64::new(0),
            free_for: (0..PUBLISHED_FLOWS).map(|_| AtomicU64::new(0)).collect(),
            crowded_until_us: AtomicU64::new(0),
            usual_ns: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            waiting_max: options.queue,
            is_closed: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
            ended: Condvar::new(),
            lives: (0..slots).map(|_| AtomicU64::new(0)).collect(),
            threads: Mutex::new(Vec::new()),
        }
    }

    /// Returns the number of workers, the one that is reserved for short requests included.
    pub(super) fn slots(&self) -> usize {
        self.work.len()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Queue<JobOf<B>>> {
        // No backend code runs under the lock, so no panic leaves the queue inconsistent.
        locked(&self.queue)
    }

    /// Waits for work, at most [`RELEASE_AFTER`]; returns whether the wait timed out.
    pub(super) fn wait_for_work<'a>(
        &self,
        mut queue: MutexGuard<'a, Queue<JobOf<B>>>,
        life: WorkerEpoch,
    ) -> (MutexGuard<'a, Queue<JobOf<B>>>, bool) {
        queue.sleeps(life.number, true);
        let woken = self.work[life.number].wait_timeout(queue, RELEASE_AFTER);
        let (mut queue, waited) = woken.unwrap_or_else(PoisonError::into_inner);
        if self.is_current(life) {
            queue.sleeps(life.number, false);
        }
        (queue, waited.timed_out())
    }

    /// Wakes at most `most` workers for queued requests.
    pub(super) fn call(&self, queue: &mut Queue<JobOf<B>>, most: usize) {
        for worker in std::iter::from_fn(|| queue.call()).take(most) {
            self.work[worker].notify_all();
        }
    }

    /// Locks the state of a worker.
    pub(super) fn kept(&self, number: usize) -> MutexGuard<'_, Option<B::Worker>> {
        locked(&self.kept[number])
    }

    /// Takes the slot and state of an idle worker for a caller that runs its request itself.
    pub(super) fn assign_idle_worker(
        &self,
        queue: &mut Queue<JobOf<B>>,
        ask: &QueuedRequest,
        now: Instant,
    ) -> Option<HeldSlot<B::Worker>> {
        let number = queue.assign_idle_worker(ask, |worker| self.kept(worker).is_some(), now)?;
        let life = WorkerEpoch { number, lost_before: self.lives[number].load(Ordering::Relaxed) };
        Some(HeldSlot { life, kept: self.kept(number).take() })
    }

    pub(super) fn wait_for_fetch<'a>(&self, queue: MutexGuard<'a, Queue<JobOf<B>>>) -> MutexGuard<'a, Queue<JobOf<B>>> {
        self.fetch.wait(queue).unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Acquire)
    }

    /// Publishes the predicted wait for readers without the lock.
    pub(super) fn publish(&self, queue: &Queue<JobOf<B>>) {
        let now = Instant::now();
        let free_at = now.duration_since(self.started) + queue.wait(Priority::Interactive, false, None, now);
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.free_at_ns.store(nanos(free_at), Ordering::Relaxed);
        self.usual_ns.store(nanos(queue.usual()), Ordering::Relaxed);
        self.waiting.store(queue.waiting_before(Priority::Interactive), Ordering::Relaxed);
        if queue.waiting() <= 1 && !queue.is_caller_limited() {
            // The queue is empty again, so predictions of long waits no longer hold.
            self.crowded_until_us.store(0, Ordering::Relaxed);
        }
        self.meters.state(queue, &self.ledger);
        // The waiting thread has already closed the engine, so no new work arrives.
        if self.is_closed.load(Ordering::Relaxed) && queue.is_idle() {
            self.idle.notify_all();
        }
    }

    /// Publishes the predicted wait of a caller that just sent a request.
    pub(super) fn publish_for(&self, queue: &Queue<JobOf<B>>, ask: &QueuedRequest, now: Instant) {
        if ask.priority != Priority::Interactive || queue.waiting() <= 1 && !queue.is_caller_limited() {
            return;
        }
        let free_at = now.duration_since(self.started) + queue.wait_of(ask.flow, now);
        let free_at_us = (free_at.as_micros() as u64).min(FREE_AT_US);
        let (entry, tag) = published(ask.flow);
        self.free_for[entry].store(tag | free_at_us, Ordering::Relaxed);
        // Bounds how long a prediction from a bad moment is used.
        let most = (now.duration_since(self.started) + CROWDED_MAX).as_micros() as u64;
        let later = |until: u64| Some(until.min(most).max(free_at_us));
        // Cannot fail, because the closure always returns a value.
        let _ = self.crowded_until_us.fetch_update(Ordering::Relaxed, Ordering::Relaxed, later);
    }

    /// Returns the published wait of a caller's next request behind its own queued ones; zero if nothing is published.
    fn wait_for(&self, flow: impl FnOnce() -> Flow) -> Duration {
        let now_us = self.started.elapsed().as_micros() as u64;
        if self.crowded_until_us.load(Ordering::Relaxed) <= now_us {
            return Duration::ZERO;
        }
        let (entry, tag) = published(flow());
        let found = self.free_for[entry].load(Ordering::Relaxed);
        let free_at_us = if found & !FREE_AT_US == tag { found & FREE_AT_US } else { 0 };
        Duration::from_micros(free_at_us.saturating_sub(now_us))
    }

    /// Returns the published wait of a cheap interactive request for a worker.
    fn wait(&self) -> Duration {
        let free_at = Duration::from_nanos(self.free_at_ns.load(Ordering::Relaxed));
        free_at.saturating_sub(self.started.elapsed())
    }

    pub(super) fn admits(&self, flow: impl FnOnce() -> Flow, timeout: Duration) -> Result<(), RejectionReason> {
        if self.is_closed.load(Ordering::Relaxed) {
            return Err(RejectionReason::Closed);
        }
        let waiting = self.waiting.load(Ordering::Relaxed);
        if waiting >= self.waiting_max {
            return Err(RejectionReason::Full(waiting));
        }
        let wait = self.wait().max(self.wait_for(flow));
        let own = Duration::from_nanos(self.usual_ns.load(Ordering::Relaxed));
        // Under overload the wait stays close to the rejection threshold. Without this reserve most requests would pass here, be
        // read and prepared, and be rejected then.
        let room = own.mul_f64(1.0 + queue::WAIT_SHARE).min(timeout.mul_f64(ROOM_SHARE));
        let allowed = timeout.mul_f64(queue::WAIT_SHARE).saturating_sub(room);
        if wait > allowed { Err(RejectionReason::Late { wait, allowed, own }) } else { Ok(()) }
    }

    /// Returns the time for which requests may stay in their sockets, to be read together: zero unless the queue is so
    /// long that arriving requests are rejected or served last.
    pub(super) fn read_delay(&self, timeout: Duration) -> Duration {
        let crowded_until = Duration::from_micros(self.crowded_until_us.load(Ordering::Relaxed));
        let wait = self.wait().max(crowded_until.saturating_sub(self.started.elapsed()));
        let is_crowded = wait > timeout.mul_f64(queue::WAIT_SHARE / 2.0);
        if is_crowded { READ_DELAY.min(timeout.mul_f64(READ_DELAY_SHARE)) } else { Duration::ZERO }
    }

    /// Waits at most `most` for the end of the engine; returns whether it has come.
    pub(super) fn wait_for_end(&self, most: Duration) -> bool {
        drop(self.ended.wait_timeout_while(self.lock(), most, |_| !self.is_ending()));
        self.is_ending()
    }

    /// Returns whether this thread still owns its worker slot.
    pub(super) fn is_current(&self, life: WorkerEpoch) -> bool {
        self.lives[life.number].load(Ordering::Relaxed) == life.lost_before
    }

    /// Replaces workers that have been running abandoned requests since `since`, and returns the successors. At most `most` are
    /// replaced in total.
    pub(super) fn lose(&self, since: Instant, most: u64) -> Vec<WorkerEpoch> {
        let mut queue = self.lock();
        if self.lives.iter().map(|lost| lost.load(Ordering::Relaxed)).sum::<u64>() >= most {
            return Vec::new();
        }
        let lost = queue.lose(since);
        let next =
            |number: usize| WorkerEpoch { number, lost_before: self.lives[number].fetch_add(1, Ordering::Relaxed) + 1 };
        let next: Vec<WorkerEpoch> = lost.into_iter().map(next).collect();
        self.publish(&queue);
        // If a caller hangs in the slot, the worker's own thread must give it up too.
        next.iter().for_each(|life| self.work[life.number].notify_all());
        // Requests that had to leave an idle worker may take it now.
        self.call(&mut queue, next.len());
        next
    }

    pub(super) fn threads(&self) -> MutexGuard<'_, Vec<Hand>> {
        locked(&self.threads)
    }

    /// Returns a worker's slot and its state.
    pub(super) fn finish(&self, lent: HeldSlot<B::Worker>, done: Duration, ran: Option<Duration>) {
        let HeldSlot { life, kept } = lent;
        let mut queue = self.lock();
        if !self.is_current(life) {
            return;
        }
        *self.kept(life.number) = kept;
        queue.finish(life.number, done, ran, Instant::now());
        self.publish(&queue);
        // A worker takes the next batch itself.
        if ran.is_some() {
            self.call(&mut queue, 1);
        }
    }

    pub(super) fn fetched(&self, ready: Vec<Entry<JobOf<B>>>, removed: usize) {
        let mut queue = self.lock();
        let count = ready.len();
        queue.fetched(ready, removed, Instant::now());
        self.publish(&queue);
        self.call(&mut queue, count);
    }

    pub(super) fn withdraw(&self, id: u64, ask: &QueuedRequest) -> Option<Entry<JobOf<B>>> {
        let mut queue = self.lock();
        let entry = queue.withdraw(id, ask);
        if entry.is_some() {
            self.publish(&queue);
            self.publish_for(&queue, ask, Instant::now());
            // The next request of its caller may be allowed to start.
            self.call(&mut queue, 1);
        }
        entry
    }

    pub(super) fn drain(&self, bound: Duration) {
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

    pub(super) fn end(&self) {
        // Takes the lock so that no thread is between its check and its wait.
        let queue = self.lock();
        self.is_ending.store(true, Ordering::Release);
        drop(queue);
        self.work.iter().chain([&self.fetch, &self.ended]).for_each(Condvar::notify_all);
    }
}
