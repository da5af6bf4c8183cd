//! Polls a connection again in place when it wakes itself during its own poll.
//!
//! hyper wakes a connection's task for each body read on it; a task that queries several servers at once also wakes itself. tokio
//! treats a wake during a poll as work for another thread: it queues the task behind all others and wakes a worker, which takes
//! longer than a short answer. [`SelfWaking`] polls the task again at once.

use std::pin::Pin;
use std::sync::Arc;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, Wake, Waker};

#[cfg(not(loom))]
use futures_util::task::AtomicWaker;
#[cfg(loom)]
use loom::{
    future::AtomicWaker,
    sync::atomic::{AtomicU8, Ordering},
};

/// Idle: a wake notifies the runtime.
const WAITS: u8 = 0;
/// Being polled: a wake only marks the task for another poll.
const RUNS: u8 = 1;
/// Marked for another poll, by the current poll or the runtime.
const IS_WOKEN: u8 = 2;

/// Maximum number of polls in a row, before other tasks run.
const POLLS_MAX: usize = 4;

#[derive(Debug)]
struct Wakes {
    state: AtomicU8,
    runtime: AtomicWaker,
}

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.state.swap(IS_WOKEN, Ordering::AcqRel) == WAITS {
            self.runtime.wake();
        }
    }
}

/// Task that is polled again in place if it was woken during its poll.
pub(super) struct SelfWaking<F> {
    task: Pin<Box<F>>,
    wakes: Arc<Wakes>,
    waker: Waker,
}

impl<F: Future> SelfWaking<F> {
    pub(super) fn new(task: F) -> Self {
        let wakes = Arc::new(Wakes { state: AtomicU8::new(WAITS), runtime: AtomicWaker::new() });
        SelfWaking { task: Box::pin(task), waker: wakes.clone().into(), wakes }
    }
}

impl<F: Future> Future for SelfWaking<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = &mut *self;
        #[cfg(not(loom))]
        this.wakes.runtime.register(cx.waker());
        #[cfg(loom)]
        this.wakes.runtime.register_by_ref(cx.waker());
        for _ in 0..POLLS_MAX {
            // Acquires the writes of the threads that woke the task.
            this.wakes.state.swap(RUNS, Ordering::AcqRel);
            let polled = this.task.as_mut().poll(&mut Context::from_waker(&this.waker));
            let waits = || this.wakes.state.compare_exchange(RUNS, WAITS, Ordering::AcqRel, Ordering::Acquire).is_ok();
            if polled.is_ready() || waits() {
                return polled;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::future::poll_fn;
    use std::sync::atomic::AtomicUsize;
    use std::task::Poll::{Pending, Ready};

    use super::*;

    /// Counts notifications of the runtime.
    #[derive(Default)]
    struct CountingWaker(AtomicUsize);

    impl Wake for CountingWaker {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn polled<F: Future>(task: &mut SelfWaking<F>, reported: &Arc<CountingWaker>) -> (Poll<F::Output>, usize) {
        let polled = Pin::new(task).poll(&mut Context::from_waker(&reported.clone().into()));
        (polled, reported.0.swap(0, Ordering::Relaxed))
    }

    #[test]
    fn a_self_waking_task_is_polled_in_place() {
        let mut left = 3;
        let mut task = SelfWaking::new(poll_fn(move |cx| {
            left -= 1;
            cx.waker().wake_by_ref();
            if left == 0 { Ready(7) } else { Pending }
        }));
        assert_eq!(polled(&mut task, &Arc::default()), (Ready(7), 0));
    }

    #[test]
    fn an_endlessly_self_waking_task_yields() {
        let count = Arc::new(AtomicUsize::new(0));
        let polls = count.clone();
        let mut task = SelfWaking::new(poll_fn(move |cx| {
            polls.fetch_add(1, Ordering::Relaxed);
            cx.waker().wake_by_ref();
            Poll::<()>::Pending
        }));
        for turn in 1..=3 {
            assert_eq!(polled(&mut task, &Arc::default()), (Pending, 1));
            assert_eq!(count.load(Ordering::Relaxed), turn * POLLS_MAX);
        }
    }

    #[test]
    fn a_waiting_task_is_scheduled_once() {
        let (tell, reported) = std::sync::mpsc::channel();
        let mut task = SelfWaking::new(poll_fn(move |cx| {
            tell.send(cx.waker().clone()).unwrap();
            Poll::<()>::Pending
        }));
        let runtime = Arc::default();
        assert_eq!(polled(&mut task, &runtime), (Pending, 0));
        let waker = reported.recv().unwrap();
        waker.wake_by_ref();
        waker.wake_by_ref();
        assert_eq!(runtime.0.swap(0, Ordering::Relaxed), 1);
        // A waker may be used after the task is finished.
        assert_eq!(polled(&mut task, &runtime), (Pending, 0));
        waker.wake();
        assert_eq!(runtime.0.load(Ordering::Relaxed), 1);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_wake_is_lost_between_threads() {
        const ROUNDS: usize = 20_000;
        let (ask, requested) = std::sync::mpsc::channel::<tokio::sync::oneshot::Sender<usize>>();
        let answers = std::thread::spawn(move || {
            for (n, answer) in requested.into_iter().enumerate() {
                answer.send(n).unwrap();
            }
        });
        let rounds = SelfWaking::new(async move {
            for n in 0..ROUNDS {
                let (answer, answered) = tokio::sync::oneshot::channel();
                ask.send(answer).unwrap();
                assert_eq!(answered.await.unwrap(), n);
            }
        });
        tokio::time::timeout(std::time::Duration::from_secs(60), tokio::spawn(rounds)).await.unwrap().unwrap();
        answers.join().unwrap();
    }
}
