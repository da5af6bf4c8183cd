//! A state that a journal's writer and its followers share, and a bell that rings when it changes.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::locks::locked;

/// The state, and the bell.
#[derive(Debug, Default)]
pub(super) struct Shared<S> {
    state: Mutex<S>,
    changed: Condvar,
}

impl<S> Shared<S> {
    pub(super) fn new(state: S) -> Self {
        Shared { state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, S> {
        // What is done under the lock does not panic.
        locked(&self.state)
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut S)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Waits until the state is as asked for, and hands it out; `None` where it was not in time.
    pub(super) fn wait(&self, is_there: impl Fn(&S) -> bool, most: Duration) -> Option<MutexGuard<'_, S>> {
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
