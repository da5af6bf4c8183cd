//! Connections that are polled in turns of their callers.
//!
//! The runtime polls what is ready in the order in which it became so. A caller with a thousand connections that ask on and on has as many ready at
//! any time, and what they cost, were it only their refusal, lies before the next request of every other caller. So at most a few connections for
//! each thread are handed to the runtime at a time. The others wait here, and callers take turns: a connection waits for those few, for one
//! connection of each other caller, and for the older ones of its own caller.
//!
//! Who calls is known once a request was read ([`LastCaller`]): a connection counts as its last caller's, a new one as its address'.
//!
//! To turn requests away costs the same threads a good part of what it takes to read them, and those have a higher priority than workers. So while other
//! callers ask, one whose request was turned away waits for its next turn several times as long as that took: its refusals take a part of a core at most.
//!
//! A turn is one poll. It reads a request, runs a handler up to its first wait, or writes an answer; what a request waits for is no part of it.

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

use super::last_caller::LastCaller;
use super::turns::Turns;
use sterling_core::locks::locked;
use sterling_serving::quota::Flow;

/// Turns at a time for each thread of the runtime: enough that none runs out of work between two of them.
const TURNS_PER_THREAD: usize = 4;
/// A caller rests for so many times as long as it took to turn its request away ...
const REST: u32 = 8;
/// ... and no longer than this.
const REST_MAX: Duration = Duration::from_millis(100);
/// ... where another caller has had a turn within this time.
const LATELY: Duration = Duration::from_secs(1);
/// The clock of the runtime counts in these.
const TICK: Duration = Duration::from_millis(1);

/// Nothing wakes it.
const RESTS: u8 = 0;
/// Is ready, and waits for its turn.
const WAITS: u8 = 1;
/// Has a turn, as the runtime knows.
const HAS_TURN: u8 = 2;
/// Is polled.
const RUNS: u8 = 3;
/// Is polled, and was woken meanwhile.
const RUNS_AGAIN: u8 = 4;
/// Is never polled again.
const HAS_ENDED: u8 = 5;

/// The turns at the threads of a runtime.
#[derive(Debug)]
pub(super) struct Threads {
    most: usize,
    queue: Mutex<Queue>,
    /// Tells that a caller rests and has something that waits.
    rests: Notify,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: Turns<Arc<Task>>,
    /// Counts the sweeps.
    period: u64,
    /// Turns under way that began in this period and in the one before, by whether its number is odd. One that lasts for longer counts no more: a
    /// request that is run in its turn and never ends takes a thread from the others, not the turns of all.
    taken: [usize; 2],
    /// The caller that had the last turn, and the last one that was another, each with when.
    callers: [Option<(Flow, Instant)>; 2],
    /// Until when callers have no turn, whose requests were turned away.
    resting: HashMap<Flow, Instant>,
}

impl Queue {
    fn has_free(&self, most: usize) -> bool {
        self.taken.iter().sum::<usize>() < most
    }

    /// Takes a free turn.
    fn take(&mut self, task: &Task) {
        self.taken[(self.period % 2) as usize] += 1;
        task.period.store(self.period, Ordering::Relaxed);
    }

    fn does_rest(&self, caller: Flow) -> bool {
        !self.resting.is_empty() && self.resting.get(&caller).is_some_and(|until| Instant::now() < *until)
    }

    /// Takes note of whose turn it is.
    fn heard(&mut self, caller: Flow, now: Instant) {
        if self.callers[0].is_some_and(|(last, _)| last != caller) {
            self.callers[1] = self.callers[0];
        }
        self.callers[0] = Some((caller, now));
    }

    /// Has a caller rest for a request that was turned away in this time, if there are others.
    fn rest(&mut self, caller: Flow, took: Duration, now: Instant) {
        let is_other = |(other, at): (Flow, Instant)| other != caller && now.saturating_duration_since(at) < LATELY;
        if self.callers.iter().flatten().copied().any(is_other) {
            let until = self.resting.entry(caller).or_insert(now);
            *until = (now.max(*until) + took * REST).min(now + REST_MAX);
        }
    }

    /// Gives a turn back.
    fn give_back(&mut self, task: &Task) {
        let period = task.period.load(Ordering::Relaxed);
        if period + 1 >= self.period {
            let taken = &mut self.taken[(period % 2) as usize];
            *taken = taken.saturating_sub(1);
        }
    }

    /// Gives a free turn to one of those that wait. Returns whom to tell.
    fn hand_out(&mut self, most: usize) -> Option<Arc<Task>> {
        while self.has_free(most) {
            let now = if self.resting.is_empty() { None } else { Some(Instant::now()) };
            let resting = &self.resting;
            let may = |caller| resting.get(&caller).is_none_or(|until| now.is_none_or(|now| now >= *until));
            let task = self.waiting.pop_of(may)?;
            if task.stage() == WAITS {
                self.take(&task);
                task.enter(HAS_TURN);
                return Some(task);
            }
        }
        None
    }
}

impl Threads {
    /// Turns at so many threads.
    pub(super) fn new(threads: usize) -> Arc<Self> {
        Arc::new(Threads { most: threads.max(1) * TURNS_PER_THREAD, queue: Mutex::default(), rests: Notify::new() })
    }

    /// Connections that are ready and wait for their turn.
    pub(super) fn waiting(&self) -> usize {
        locked(&self.queue).waiting.len()
    }

    /// Stops counting turns that have lasted since before the last sweep.
    pub(super) fn sweep(&self) {
        let mut queue = locked(&self.queue);
        queue.period += 1;
        let now = (queue.period % 2) as usize;
        queue.taken[now] = 0;
        let now = Instant::now();
        queue.resting.retain(|_, until| now < *until);
        drop(queue);
        self.hand_out();
    }

    /// Gives all free turns to those that wait.
    fn hand_out(&self) {
        let mut queue = locked(&self.queue);
        let told: Vec<_> = std::iter::from_fn(|| queue.hand_out(self.most)).collect();
        drop(queue);
        told.iter().for_each(|task| task.runtime.wake());
    }

    /// Gives turns to callers that have rested.
    pub(super) async fn pace(&self) -> Infallible {
        loop {
            match self.end_of_rest() {
                Some(until) => sleep_until(until.max(Instant::now() + TICK).into()).await,
                None => self.rests.notified().await,
            }
            self.hand_out();
        }
    }

    /// When the next caller has rested, if anything waits. One that has rested by now is forgotten with the next sweep.
    fn end_of_rest(&self) -> Option<Instant> {
        let queue = locked(&self.queue);
        queue.resting.values().min().copied().filter(|_| !queue.waiting.is_empty())
    }
}

/// A connection, or a request of HTTP/2, as its wakers know it.
#[derive(Debug)]
struct Task {
    threads: Arc<Threads>,
    caller: Arc<LastCaller>,
    /// Changes under the lock of the queue alone, as `period` does.
    stage: AtomicU8,
    /// That in which its turn began.
    period: AtomicU64,
    runtime: AtomicWaker,
}

impl Task {
    fn stage(&self) -> u8 {
        self.stage.load(Ordering::Relaxed)
    }

    fn enter(&self, stage: u8) {
        self.stage.store(stage, Ordering::Relaxed);
    }

    /// Takes a turn or a place in the queue. Returns whether it has a turn.
    fn ask(self: &Arc<Self>, queue: &mut Queue, with_turn: u8) -> bool {
        let has_turn = queue.has_free(self.threads.most) && !queue.does_rest(self.caller.flow());
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

    /// Begins the poll of its turn. Returns whether it has one.
    fn begin(self: &Arc<Self>) -> bool {
        let mut queue = locked(&self.threads.queue);
        match self.stage() {
            HAS_TURN => {
                self.enter(RUNS);
                true
            }
            RESTS => self.ask(&mut queue, RUNS),
            _ => false,
        }
    }

    /// Ends its turn, which began then if it was polled, and tells the next.
    fn end(self: &Arc<Self>, stage: u8, began: Option<Instant>) {
        let mut queue = locked(&self.threads.queue);
        let before = self.stage();
        self.enter(stage);
        if [HAS_TURN, RUNS, RUNS_AGAIN].contains(&before) {
            queue.give_back(self);
        }
        if let Some(began) = began {
            let (caller, now) = (self.caller.flow(), Instant::now());
            queue.heard(caller, now);
            if self.caller.was_turned_away() {
                queue.rest(caller, now.saturating_duration_since(began), now);
            }
        }
        if before == RUNS_AGAIN && stage == RESTS {
            self.wait(&mut queue);
        } else if !queue.resting.is_empty() && !queue.waiting.is_empty() {
            self.threads.rests.notify_one();
        }
        let next = queue.hand_out(self.threads.most);
        drop(queue);
        if let Some(next) = next {
            next.runtime.wake();
        }
    }
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let mut queue = locked(&self.threads.queue);
        let has_turn = match self.stage() {
            RESTS => self.ask(&mut queue, HAS_TURN),
            RUNS => {
                self.enter(RUNS_AGAIN);
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

/// A future that is polled in turns.
pub(super) struct InTurn<F> {
    future: Pin<Box<F>>,
    task: Arc<Task>,
    waker: Waker,
}

impl<F: Future> InTurn<F> {
    /// Work for a connection of this caller.
    pub(super) fn new(future: F, threads: &Arc<Threads>, caller: &Arc<LastCaller>) -> Self {
        let task = Arc::new(Task {
            threads: threads.clone(),
            caller: caller.clone(),
            stage: AtomicU8::new(RESTS),
            period: AtomicU64::new(0),
            runtime: AtomicWaker::new(),
        });
        InTurn { future: Box::pin(future), waker: task.clone().into(), task }
    }
}

impl<F: Future> Future for InTurn<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = &mut *self;
        // Before it may be told of its turn.
        this.task.runtime.register(cx.waker());
        if !this.task.begin() {
            return Poll::Pending;
        }
        let began = Instant::now();
        let polled = this.future.as_mut().poll(&mut Context::from_waker(&this.waker));
        this.task.end(if polled.is_ready() { HAS_ENDED } else { RESTS }, Some(began));
        polled
    }
}

impl<F> Drop for InTurn<F> {
    /// Gives back the turn of what panicked, or was ended before its turn.
    fn drop(&mut self) {
        if self.task.stage() != HAS_ENDED {
            self.task.end(HAS_ENDED, None);
        }
    }
}

#[cfg(test)]
mod tests;
