//! Locks of what a panic does not leave half done.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Takes a lock, also where somebody panicked under it: only for what is whole between any two of its changes.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
