//! Models of lock-free state machines, which loom runs with every order of their steps: `scripts/test_loom.sh`.
//!
//! The source is that of the crate, included by path. With `--cfg loom` its atomics are those of loom; tokio is not built,
//! because it interprets that flag differently. Three others have no model. `serving::engine` shares only hints outside its lock,
//! each an independent number that a reader may see late; the rest is under one lock with timed waits, which loom does not
//! support. Readers of `embedding::tiers::places` write one byte per row, at most 3 regardless of concurrent writers, and
//! everything else there needs the lock alone. For `http::worst` a model passes even with the stores of its window in the wrong
//! order: loom compares a store only with the last access, which is one of the same thread.
#![cfg(loom)]

#[path = "../../crates/server/src/http/self_wakes.rs"]
mod self_wakes;

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::Pin;
    use std::task::{Context, Poll, Wake, Waker};

    use loom::future::AtomicWaker;
    use loom::sync::atomic::{AtomicUsize, Ordering};
    use loom::sync::{Arc, Notify};

    use super::self_wakes::SelfWaking;

    /// A runtime of one task: its waker unparks the polling thread.
    struct Runtime(Notify);

    impl Wake for Runtime {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.notify();
        }
    }

    /// Polls a task that ends once `wakers` other threads have woken it, each after its own event. A lost wake is a deadlock,
    /// which loom reports.
    fn every_wake_arrives(wakers: usize) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let events = Arc::new(AtomicUsize::new(0));
            let slots: Vec<Arc<AtomicWaker>> = (0..wakers).map(|_| Arc::new(AtomicWaker::new())).collect();
            let threads: Vec<_> = slots
                .iter()
                .map(|slot| {
                    let (slot, events) = (slot.clone(), events.clone());
                    loom::thread::spawn(move || {
                        events.fetch_add(1, Ordering::Release);
                        slot.wake();
                    })
                })
                .collect();
            let mut task = SelfWaking::new(poll_fn(|cx: &mut Context<'_>| {
                slots.iter().for_each(|slot| slot.register_by_ref(cx.waker()));
                if events.load(Ordering::Acquire) == wakers { Poll::Ready(()) } else { Poll::Pending }
            }));
            let runtime = std::sync::Arc::new(Runtime(Notify::new()));
            let waker = Waker::from(runtime.clone());
            while Pin::new(&mut task).poll(&mut Context::from_waker(&waker)).is_pending() {
                runtime.0.wait();
            }
            for thread in threads {
                assert!(thread.join().is_ok());
            }
        });
    }

    #[test]
    fn a_wake_from_another_thread_is_never_lost() {
        every_wake_arrives(1);
    }

    #[test]
    fn wakes_from_two_threads_are_never_lost() {
        every_wake_arrives(2);
    }
}
