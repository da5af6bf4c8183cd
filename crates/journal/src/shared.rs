//! State shared by a journal's writer and its followers, with a condition variable that notifies of changes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use sterling_core::blocking::may_block;
use sterling_core::locks::locked;

/// A state with the progress of a journal.
pub(super) trait Progress {
    /// Returns the last durable position.
    fn last(&self) -> u64;
}

/// Shared state and its condition variable.
#[derive(Debug)]
pub(super) struct Shared<S> {
    state: Mutex<S>,
    changed: Condvar,
    /// Copy of the last position for threads that must not wait for the lock; every answer reads the last position.
    last: AtomicU64,
}

impl<S: Progress> Shared<S> {
    pub(super) fn new(state: S) -> Self {
        Shared { last: AtomicU64::new(state.last()), state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Returns the last durable position.
    pub(super) fn last(&self) -> u64 {
        self.last.load(Ordering::Acquire)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, S> {
        // Critical sections do not panic.
        locked(&self.state)
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut S)) {
        let mut state = self.lock();
        change(&mut state);
        self.last.store(state.last(), Ordering::Release);
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until the state satisfies a condition and returns the locked state; `None` after the timeout.
    pub(super) fn wait(&self, is_there: impl Fn(&S) -> bool, most: Duration) -> Option<MutexGuard<'_, S>> {
        may_block();
        let until = Instant::now() + most;
        let mut state = self.lock();
        while !is_there(&state) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        Some(state)
    }
}
