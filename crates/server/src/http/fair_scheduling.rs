//! Fair scheduling of connections between callers.
//!
//! The runtime polls ready tasks in the order in which they were woken. Of a caller with a thousand busy connections, about a
//! thousand are always ready, and even rejecting their requests delays the next request of every other caller. So the runtime
//! gets only a few connections per thread at a time. Other connections wait here for a poll permit, and callers alternate. A
//! caller takes a permit only while it has fewer than are free (Choudhury and Hahne's dynamic threshold with factor 1): a single
//! caller has at most half, and the first connection of another caller always finds one.
//!
//! The caller is known once a request was read ([`LastCaller`]): a connection counts towards the caller of its last request, and
//! a new one towards its address.
//!
//! Rejecting a request costs a large part of reading it, on threads with a higher priority than workers. So while other callers
//! send requests, a caller with a rejected request pauses for several times the duration of the poll that rejected it: its
//! rejections take at most a fraction of a core.
//!
//! A permit is for one poll. A poll reads a request, runs a handler up to its first await that is pending, or writes an answer.
//! Time in which a request waits is not part of a poll.

use std::collections::HashMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use futures_util::task::AtomicWaker;
use tokio::sync::Notify;
use tokio::time::sleep_until;

use super::caller_rotation::WaitingJobs;
use super::last_caller::LastCaller;
use sterling_core::locks::locked;
use sterling_core::quota::Flow;

/// Poll permits per thread of the runtime. Half of them, which a single caller may have, let no thread become idle between two
/// polls.
const TURNS_PER_THREAD: usize = 4;
/// Pause of a caller after a rejected request, as a multiple of the time of the poll that rejected it.
const PAUSE_FACTOR: u32 = 8;
/// Maximum pause.
const PAUSE_MAX: Duration = Duration::from_millis(100);
/// A caller pauses only if a connection of another caller was polled within this time.
const ACTIVE_WINDOW: Duration = Duration::from_secs(1);
/// Resolution of the runtime's timer.
const TICK: Duration = Duration::from_millis(1);

/// Idle: not woken since its last poll.
const IS_IDLE: u8 = 0;
/// Woken, and waits in the queue for a permit.
const WAITS: u8 = 1;
/// Has a permit; the runtime was woken to poll the connection.
const HAS_TURN: u8 = 2;
/// Being polled.
const RUNS: u8 = 3;
/// Being polled, and was woken meanwhile.
const IS_REWOKEN: u8 = 4;
/// Completed or dropped: never polled again.
const HAS_ENDED: u8 = 5;

/// Poll permits for the threads of a runtime.
#[derive(Debug)]
pub(super) struct Threads {
    most: usize,
    queue: Mutex<Queue>,
    /// Notified if a connection waits while a caller pauses.
    rests: Notify,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: WaitingJobs<Arc<Task>>,
    /// Number of sweeps.
    period: u64,
    /// Polls in progress that began in the current period and in the one before, indexed by the parity of the period. Older polls
    /// are no longer counted: a poll that never returns costs the other callers one thread, not all of them.
    taken: [usize; 2],
    /// The same per caller with polls in progress.
    taken_by: HashMap<Flow, [usize; 2]>,
    /// The caller of the last poll and the last different caller, with the times of their polls.
    callers: [Option<(Flow, Instant)>; 2],
    /// End of the pause, per caller with a rejected request.
    resting: HashMap<Flow, Instant>,
}

impl Queue {
    /// Returns whether a caller may take a permit: it does not pause, and has fewer permits than are free.
    fn may_take(&self, caller: Flow, most: usize) -> bool {
        let free = most.saturating_sub(self.taken.iter().sum());
        let own = self.taken_by.get(&caller).map_or(0, |taken| taken.iter().sum());
        own < free && self.resting.get(&caller).is_none_or(|until| Instant::now() >= *until)
    }

    /// Takes a free permit.
    fn take(&mut self, task: &Task) {
        let (caller, place) = (task.caller.flow(), (self.period % 2) as usize);
        self.taken[place] += 1;
        self.taken_by.entry(caller).or_default()[place] += 1;
        task.period.store(self.period, Ordering::Relaxed);
        task.taken_by.store(caller.0, Ordering::Relaxed);
    }

    /// Records the caller of a poll.
    fn received(&mut self, caller: Flow, now: Instant) {
        if self.callers[0].is_some_and(|(last, _)| last != caller) {
            self.callers[1] = self.callers[0];
        }
        self.callers[0] = Some((caller, now));
    }

    /// Pauses a caller for a request that was rejected in the time `took`, if other callers are active.
    fn rest(&mut self, caller: Flow, took: Duration, now: Instant) {
        let is_other =
            |(other, at): (Flow, Instant)| other != caller && now.saturating_duration_since(at) < ACTIVE_WINDOW;
        if self.callers.iter().flatten().copied().any(is_other) {
            let until = self.resting.entry(caller).or_insert(now);
            *until = (now.max(*until) + took * PAUSE_FACTOR).min(now + PAUSE_MAX);
        }
    }

    /// Releases a permit, unless it is too old to be counted.
    fn give_back(&mut self, task: &Task) {
        let period = task.period.load(Ordering::Relaxed);
        if period + 1 < self.period {
            return;
        }
        let place = (period % 2) as usize;
        self.taken[place] -= 1;
        let caller = Flow(task.taken_by.load(Ordering::Relaxed));
        if let Some(taken) = self.taken_by.get_mut(&caller) {
            taken[place] -= 1;
            if *taken == [0, 0] {
                self.taken_by.remove(&caller);
            }
        }
    }

    /// Begins a period: the permits of the period before the last are no longer counted.
    fn begin_period(&mut self) {
        self.period += 1;
        let place = (self.period % 2) as usize;
        self.taken[place] = 0;
        self.taken_by.retain(|_, taken| {
            taken[place] = 0;
            *taken != [0, 0]
        });
    }

    /// Gives free permits to waiting tasks. Returns the tasks, whose runtimes must be woken.
    fn hand_out(&mut self, most: usize) -> Vec<Arc<Task>> {
        let mut tasks = Vec::new();
        if self.waiting.is_empty() {
            return tasks;
        }
        let mut waiting = std::mem::take(&mut self.waiting);
        while let Some(task) = waiting.pop_where(|caller| self.may_take(caller, most)) {
            if task.stage() == WAITS {
                self.take(&task);
                task.enter(HAS_TURN);
                tasks.push(task);
            }
        }
        self.waiting = waiting;
        tasks
    }
}

impl Threads {
    /// Creates the permits for `threads` threads.
    pub(super) fn new(threads: usize) -> Arc<Self> {
        Arc::new(Threads { most: threads.max(1) * TURNS_PER_THREAD, queue: Mutex::default(), rests: Notify::new() })
    }

    /// Returns the number of woken connections that wait for a permit.
    pub(super) fn waiting(&self) -> usize {
        locked(&self.queue).waiting.len()
    }

    /// Stops counting polls that began before the previous sweep, and forgets pauses that are over.
    pub(super) fn sweep(&self) {
        let mut queue = locked(&self.queue);
        queue.begin_period();
        let now = Instant::now();
        queue.resting.retain(|_, until| now < *until);
        drop(queue);
        self.hand_out();
    }

    /// Gives all free permits to waiting tasks.
    fn hand_out(&self) {
        let mut queue = locked(&self.queue);
        let tasks = queue.hand_out(self.most);
        drop(queue);
        tasks.iter().for_each(|task| task.runtime.wake());
    }

    /// Gives permits to callers as soon as their pause is over; runs forever.
    pub(super) async fn pace(&self) -> Infallible {
        loop {
            match self.end_of_pause() {
                Some(until) => sleep_until(until.max(Instant::now() + TICK).into()).await,
                None => self.rests.notified().await,
            }
            self.hand_out();
        }
    }

    /// Returns the earliest end of a pause, if any task waits. Pauses that are over stay in the map until the next sweep.
    fn end_of_pause(&self) -> Option<Instant> {
        let queue = locked(&self.queue);
        queue.resting.values().min().copied().filter(|_| !queue.waiting.is_empty())
    }
}

/// Scheduling state of a connection, or of an HTTP/2 request, which its wakers share.
#[derive(Debug)]
struct Task {
    threads: Arc<Threads>,
    caller: Arc<LastCaller>,
    /// Written only under the queue's lock, as the following fields are.
    stage: AtomicU8,
    /// Period and caller of the poll in progress.
    period: AtomicU64,
    taken_by: AtomicU64,
    runtime: AtomicWaker,
}

impl Task {
    fn stage(&self) -> u8 {
        self.stage.load(Ordering::Relaxed)
    }

    fn enter(&self, stage: u8) {
        self.stage.store(stage, Ordering::Relaxed);
    }

    /// Takes a free permit, or enters the queue. Returns whether the task has a permit.
    fn ask(self: &Arc<Self>, queue: &mut Queue, with_turn: u8) -> bool {
        let has_turn = queue.may_take(self.caller.flow(), self.threads.most);
        if has_turn {
            queue.take(self);
            self.enter(with_turn);
        } else {
            self.wait(queue);
        }
        has_turn
    }

    fn wait(self: &Arc<Self>, queue: &mut Queue) {
        self.enter(WAITS);
        queue.waiting.push(self.caller.flow(), self.clone());
        if !queue.resting.is_empty() {
            self.threads.rests.notify_one();
        }
    }

    /// Begins the poll, if the task has a permit or can take one. Returns whether the task may be polled.
    fn begin(self: &Arc<Self>) -> bool {
        let mut queue = locked(&self.threads.queue);
        match self.stage() {
            HAS_TURN => {
                self.enter(RUNS);
                true
            }
            IS_IDLE => self.ask(&mut queue, RUNS),
            _ => false,
        }
    }

    /// Releases the permit, and wakes the next waiting tasks. `began` is the start of the poll, if there was a poll.
    fn end(self: &Arc<Self>, stage: u8, began: Option<Instant>) {
        let mut queue = locked(&self.threads.queue);
        let before = self.stage();
        self.enter(stage);
        if [HAS_TURN, RUNS, IS_REWOKEN].contains(&before) {
            queue.give_back(self);
        }
        if let Some(began) = began {
            let (caller, now) = (self.caller.flow(), Instant::now());
            queue.received(caller, now);
            if self.caller.was_rejected() {
                queue.rest(caller, now.saturating_duration_since(began), now);
            }
        }
        if before == IS_REWOKEN && stage == IS_IDLE {
            self.wait(&mut queue);
        } else if !queue.resting.is_empty() && !queue.waiting.is_empty() {
            self.threads.rests.notify_one();
        }
        let next = queue.hand_out(self.threads.most);
        drop(queue);
        next.iter().for_each(|task| task.runtime.wake());
    }
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let mut queue = locked(&self.threads.queue);
        let has_turn = match self.stage() {
            IS_IDLE => self.ask(&mut queue, HAS_TURN),
            RUNS => {
                self.enter(IS_REWOKEN);
                false
            }
            _ => false,
        };
        drop(queue);
        if has_turn {
            self.runtime.wake();
        }
    }
}

/// Future that is polled only when it has a permit.
pub(super) struct ScheduledFuture<F> {
    future: Pin<Box<F>>,
    task: Arc<Task>,
    waker: Waker,
}

impl<F: Future> ScheduledFuture<F> {
    /// Wraps the future of a connection of `caller`.
    pub(super) fn new(future: F, threads: &Arc<Threads>, caller: &Arc<LastCaller>) -> Self {
        let task = Arc::new(Task {
            threads: threads.clone(),
            caller: caller.clone(),
            stage: AtomicU8::new(IS_IDLE),
            period: AtomicU64::new(0),
            taken_by: AtomicU64::new(0),
            runtime: AtomicWaker::new(),
        });
        ScheduledFuture { future: Box::pin(future), waker: task.clone().into(), task }
    }
}

impl<F: Future> Future for ScheduledFuture<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = &mut *self;
        // The waker is registered first: from `begin` on, another thread may give the task a permit and wake it.
        this.task.runtime.register(cx.waker());
        if !this.task.begin() {
            return Poll::Pending;
        }
        let began = Instant::now();
        let polled = this.future.as_mut().poll(&mut Context::from_waker(&this.waker));
        this.task.end(if polled.is_ready() { HAS_ENDED } else { IS_IDLE }, Some(began));
        polled
    }
}

impl<F> Drop for ScheduledFuture<F> {
    /// Releases the permit of a future that panicked, or that was dropped after it got a permit and before it was polled.
    fn drop(&mut self) {
        if self.task.stage() != HAS_ENDED {
            self.task.end(HAS_ENDED, None);
        }
    }
}

#[cfg(test)]
mod tests;
