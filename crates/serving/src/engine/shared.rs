//! What callers, workers and fetchers share: the queue behind its lock, and what is told without it.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::backend::{Backend, JobOf};
use super::lane::{Ask, Entry};
use super::meters::Meters;
use super::options::Options;
use super::queue::{self, Bounds, Queue, Refused};
use super::ticket::{Ledger, closing};
use crate::quota::Flow;
use sterling_core::locks::locked;
use sterling_core::request::Priority;

/// A worker that has nothing to do for so long is told to rest.
const REST_AFTER: Duration = Duration::from_secs(1);

/// How long the sockets are left alone under overload, and the share of a request's time that this may take at most.
const SWARM_TIME: Duration = Duration::from_millis(1);
const SWARM_SHARE: f64 = 0.01;

/// The share of a request's time that is kept free for others that are read with it, at most.
const ROOM_SHARE: f64 = 0.02;

/// Callers of whom it is told, at most, and the bits of [`Shared::free_for`] that tell when.
const PUBLISHED_FLOWS: usize = 1024;
const FREE_AT_US: u64 = (1 << 48) - 1;

/// How long it is believed that a caller waits for its own requests.
const CROWDED_MAX: Duration = Duration::from_secs(1);

/// The place of a flow in [`Shared::free_for`], and the bits there that tell it from others.
fn published(flow: Flow) -> (usize, u64) {
    ((flow.0 % PUBLISHED_FLOWS as u64) as usize, flow.0 & !FREE_AT_US)
}

/// What callers, workers and fetchers share.
pub(super) struct Shared<B: Backend> {
    pub(super) backend: B,
    queue: Mutex<Queue<JobOf<B>>>,
    /// What each worker keeps, while nothing runs with it.
    kept: Vec<Mutex<Option<B::Worker>>>,
    /// What the thread of each worker sleeps at.
    work: Vec<Condvar>,
    pub(super) fetch: Condvar,
    idle: Condvar,
    pub(super) ledger: Arc<Ledger>,
    /// How often callers have overtaken what nobody waits for.
    pub(super) overtaken: Arc<AtomicU64>,
    pub(super) meters: Meters,
    started: Instant,
    /// When a cheap interactive request would get a worker, in nanoseconds since `started`.
    free_at_ns: AtomicU64,
    /// When the next one of a caller would that has others waiting, by the remainder of its flow: 16 other bits of the flow, and
    /// microseconds since `started`.
    free_for: Box<[AtomicU64]>,
    /// The latest of these.
    crowded_until_us: AtomicU64,
    /// How long such a one runs, in nanoseconds.
    usual_ns: AtomicU64,
    waiting: AtomicUsize,
    waiting_max: usize,
    is_closed: AtomicBool,
    is_ending: AtomicBool,
    ended: Condvar,
    /// How often each worker was lost; changed under the queue's lock.
    lives: Vec<AtomicU64>,
    threads: Mutex<Vec<Hand>>,
}

/// A worker's thread: its number, and how many it took the place of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Life {
    pub(super) number: usize,
    pub(super) lost_before: u64,
}

/// A worker's place with what it keeps, in the hands of who runs with it.
pub(super) struct Lent<W> {
    pub(super) life: Life,
    pub(super) kept: Option<W>,
}

/// A thread of the engine.
#[derive(Debug)]
pub(super) struct Hand {
    /// Of a worker.
    pub(super) life: Option<Life>,
    pub(super) thread: JoinHandle<()>,
}

impl<B: Backend> Shared<B> {
    pub(super) fn new(backend: B, options: &Options, workers: usize) -> Self {
        let started = Instant::now();
        let dear = Duration::from_millis(options.expensive_request_ms);
        let bounds = Bounds { waiting: options.queue, batch: options.batch, workers, dear };
        Shared {
            backend,
            queue: Mutex::new(Queue::new(bounds, started)),
            kept: (0..workers).map(|_| Mutex::default()).collect(),
            work: (0..workers).map(|_| Condvar::new()).collect(),
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
            lives: (0..workers).map(|_| AtomicU64::new(0)).collect(),
            threads: Mutex::new(Vec::new()),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Queue<JobOf<B>>> {
        // No code of a backend runs under the lock, so that no panic of one leaves the queue half changed.
        locked(&self.queue)
    }

    /// Waits for work, for [`REST_AFTER`] at most; true where nobody woke the worker by then.
    pub(super) fn wait_for_rest<'a>(
        &self,
        mut queue: MutexGuard<'a, Queue<JobOf<B>>>,
        life: Life,
    ) -> (MutexGuard<'a, Queue<JobOf<B>>>, bool) {
        queue.sleeps(life.number, true);
        let woken = self.work[life.number].wait_timeout(queue, REST_AFTER);
        let (mut queue, waited) = woken.unwrap_or_else(PoisonError::into_inner);
        if self.is_current(life) {
            queue.sleeps(life.number, false);
        }
        (queue, waited.timed_out())
    }

    /// Wakes a worker for what waits, or for each of so much.
    pub(super) fn call(&self, queue: &mut Queue<JobOf<B>>, most: usize) {
        for worker in std::iter::from_fn(|| queue.call()).take(most) {
            self.work[worker].notify_all();
        }
    }

    /// What a worker keeps.
    pub(super) fn kept(&self, number: usize) -> MutexGuard<'_, Option<B::Worker>> {
        locked(&self.kept[number])
    }

    /// The place of an idle worker with what it keeps, for a caller who runs its request at once.
    pub(super) fn lend(&self, queue: &mut Queue<JobOf<B>>, ask: &Ask, now: Instant) -> Option<Lent<B::Worker>> {
        let number = queue.lend(ask, |worker| self.kept(worker).is_some(), now)?;
        let life = Life { number, lost_before: self.lives[number].load(Ordering::Relaxed) };
        Some(Lent { life, kept: self.kept(number).take() })
    }

    pub(super) fn wait_for_fetch<'a>(&self, queue: MutexGuard<'a, Queue<JobOf<B>>>) -> MutexGuard<'a, Queue<JobOf<B>>> {
        self.fetch.wait(queue).unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Acquire)
    }

    /// Tells those who ask without the lock how things stand.
    pub(super) fn publish(&self, queue: &Queue<JobOf<B>>) {
        let now = Instant::now();
        let free_at = now.duration_since(self.started) + queue.wait(Priority::Interactive, false, None, now);
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.free_at_ns.store(nanos(free_at), Ordering::Relaxed);
        self.usual_ns.store(nanos(queue.usual()), Ordering::Relaxed);
        self.waiting.store(queue.waiting_before(Priority::Interactive), Ordering::Relaxed);
        if queue.waiting() <= 1 {
            // What was predicted for callers was of requests that have left since.
            self.crowded_until_us.store(0, Ordering::Relaxed);
        }
        self.meters.state(queue, &self.ledger);
        // Who waits for that has closed it before.
        if self.is_closed.load(Ordering::Relaxed) && queue.is_idle() {
            self.idle.notify_all();
        }
    }

    /// Tells those who ask without the lock how things stand for a caller whose request came now.
    pub(super) fn publish_for(&self, queue: &Queue<JobOf<B>>, ask: &Ask, now: Instant) {
        if ask.priority != Priority::Interactive || queue.waiting() <= 1 {
            return;
        }
        let free_at = now.duration_since(self.started) + queue.wait(Priority::Interactive, false, Some(ask.flow), now);
        let free_at_us = (free_at.as_micros() as u64).min(FREE_AT_US);
        let (entry, tag) = published(ask.flow);
        self.free_for[entry].store(tag | free_at_us, Ordering::Relaxed);
        // What was predicted in a bad moment is not believed for long.
        let most = (now.duration_since(self.started) + CROWDED_MAX).as_micros() as u64;
        let later = |until: u64| Some(until.min(most).max(free_at_us));
        // Never refused: what it is changed to is always something.
        let _ = self.crowded_until_us.fetch_update(Ordering::Relaxed, Ordering::Relaxed, later);
    }

    /// How long the next request of a caller waits for a worker because of its others, by what was last published; none where it was not.
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

    /// How long a cheap interactive request that comes now waits for a worker, by what was last published.
    fn wait(&self) -> Duration {
        let free_at = Duration::from_nanos(self.free_at_ns.load(Ordering::Relaxed));
        free_at.saturating_sub(self.started.elapsed())
    }

    pub(super) fn admits(&self, flow: impl FnOnce() -> Flow, timeout: Duration) -> Result<(), Refused> {
        if self.is_closed.load(Ordering::Relaxed) {
            return Err(Refused::Closed);
        }
        let waiting = self.waiting.load(Ordering::Relaxed);
        if waiting >= self.waiting_max {
            return Err(Refused::Full(waiting));
        }
        let wait = self.wait().max(self.wait_for(flow));
        let own = Duration::from_nanos(self.usual_ns.load(Ordering::Relaxed));
        // Under overload the wait stays about where requests are refused. Without room for one of those that are read
        // meanwhile, most would pass here, be read and prepared, and be refused then.
        let room = own.mul_f64(1.0 + queue::WAIT_SHARE).min(timeout.mul_f64(ROOM_SHARE));
        let allowed = timeout.mul_f64(queue::WAIT_SHARE).saturating_sub(room);
        if wait > allowed { Err(Refused::Late { wait, allowed, own }) } else { Ok(()) }
    }

    /// How long requests may be left in their sockets, so that they are read together: zero, unless so much waits that
    /// those that come now are refused, or go last.
    pub(super) fn swarm(&self, timeout: Duration) -> Duration {
        let crowded_until = Duration::from_micros(self.crowded_until_us.load(Ordering::Relaxed));
        let wait = self.wait().max(crowded_until.saturating_sub(self.started.elapsed()));
        let is_crowded = wait > timeout.mul_f64(queue::WAIT_SHARE / 2.0);
        if is_crowded { SWARM_TIME.min(timeout.mul_f64(SWARM_SHARE)) } else { Duration::ZERO }
    }

    /// Waits for the end of the engine, for so long at most; true where it has come.
    pub(super) fn wait_for_end(&self, most: Duration) -> bool {
        drop(self.ended.wait_timeout_while(self.lock(), most, |_| !self.is_ending()));
        self.is_ending()
    }

    /// False for a worker that was given up.
    pub(super) fn is_current(&self, life: Life) -> bool {
        self.lives[life.number].load(Ordering::Relaxed) == life.lost_before
    }

    /// Gives workers up that run what nobody has waited for since `since`, and names those that take their places. No more
    /// than `most` are given up in all.
    pub(super) fn lose(&self, since: Instant, most: u64) -> Vec<Life> {
        let mut queue = self.lock();
        if self.lives.iter().map(|lost| lost.load(Ordering::Relaxed)).sum::<u64>() >= most {
            return Vec::new();
        }
        let lost = queue.lose(since);
        let next = |number: usize| Life { number, lost_before: self.lives[number].fetch_add(1, Ordering::Relaxed) + 1 };
        let next: Vec<Life> = lost.into_iter().map(next).collect();
        self.publish(&queue);
        // Where it was a caller that hangs, the worker's own thread leaves its place to the next.
        next.iter().for_each(|life| self.work[life.number].notify_all());
        next
    }

    pub(super) fn threads(&self) -> MutexGuard<'_, Vec<Hand>> {
        locked(&self.threads)
    }

    /// Takes back a worker's place, and what it keeps.
    pub(super) fn finish(&self, lent: Lent<B::Worker>, done: Duration, ran: Option<Duration>) {
        let Lent { life, kept } = lent;
        let mut queue = self.lock();
        if !self.is_current(life) {
            return;
        }
        *self.kept(life.number) = kept;
        queue.finish(life.number, done, ran, Instant::now());
        self.publish(&queue);
        if queue.waiting() > 0 {
            // A dear one may go now, which an idle worker had to leave, and this worker may take another.
            self.call(&mut queue, 1);
        }
    }

    pub(super) fn fetched(&self, ready: Vec<Entry<JobOf<B>>>, gone: usize) {
        let mut queue = self.lock();
        let count = ready.len();
        queue.fetched(ready, gone, Instant::now());
        self.publish(&queue);
        self.call(&mut queue, count);
    }

    pub(super) fn withdraw(&self, id: u64, ask: &Ask) -> Option<Entry<JobOf<B>>> {
        let mut queue = self.lock();
        let entry = queue.withdraw(id, ask);
        if entry.is_some() {
            self.publish(&queue);
            self.publish_for(&queue, ask, Instant::now());
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
        // Under the lock, so that no thread is between looking and waiting.
        let queue = self.lock();
        self.is_ending.store(true, Ordering::Release);
        drop(queue);
        self.work.iter().chain([&self.fetch, &self.ended]).for_each(Condvar::notify_all);
    }
}
