//! Backoff and failure state of a service that is polled repeatedly.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;

/// Backoff after a failure: first delay and maximum. Each failure doubles the delay.
const WAIT: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// Outcome of the last calls to a service.
#[derive(Debug, Default)]
pub struct Health(Mutex<Option<Failing>>);

/// Consecutive failures.
#[derive(Debug)]
struct Failing {
    since: Instant,
    times: u32,
    next: Instant,
    last: Error,
}

impl Health {
    fn state(&self) -> MutexGuard<'_, Option<Failing>> {
        locked(&self.0)
    }

    /// Runs the call, if the backoff after the last failure has elapsed.
    ///
    /// # Errors
    /// The error of the call; during the backoff, the error of the last call.
    pub fn ask<T>(&self, question: impl FnOnce() -> Result<T>) -> Result<T> {
        if let Some(failing) = self.state().as_ref().filter(|failing| Instant::now() < failing.next) {
            return Err(failing.last.again());
        }
        self.reported(question())
    }

    /// Records the outcome of a call that did not wait for the backoff.
    ///
    /// # Errors
    /// The error of the call.
    pub fn reported<T>(&self, answer: Result<T>) -> Result<T> {
        let mut state = self.state();
        match &answer {
            Ok(_) => *state = None,
            Err(error) => {
                let now = Instant::now();
                let (since, times) = state.as_ref().map_or((now, 0), |before| (before.since, before.times));
                let (times, last) = (times.saturating_add(1), error.again());
                *state = Some(Failing { since, times, next: now + back_off(WAIT, times), last });
            }
        }
        answer
    }

    /// Returns the time since the first of the consecutive failures, and the last error.
    pub fn trouble(&self) -> Option<(Duration, String)> {
        self.state().as_ref().map(|failing| (failing.since.elapsed(), failing.last.to_string()))
    }
}

/// Returns the delay after one or more failures: exponential backoff between both bounds. Jitter shortens the delay by
/// up to a fifth, so that the servers of one store do not all retry at the same time.
pub fn back_off((first, most): (Duration, Duration), failures: u32) -> Duration {
    let doubled = first.saturating_mul(1 << failures.saturating_sub(1).min(20)).min(most);
    doubled.mul_f64(1.0 - RandomState::new().hash_one(failures) as f64 / u64::MAX as f64 / 5.0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn failing_stores_back_off_and_answering_ones_do_not() {
        let health = Health::default();
        assert_eq!(health.ask(|| Ok(1)).unwrap(), 1);
        assert!(health.trouble().is_none());
        assert!(health.ask(|| Err::<(), _>(Error::unavailable("away"))).is_err());
        let requested = health.ask(|| -> Result<()> { panic!("too early") });
        assert_eq!(requested.unwrap_err().to_string(), "away");
        assert_eq!(health.trouble().unwrap().1, "away");
        health.reported(Ok(())).unwrap();
        assert_eq!(health.ask(|| Ok(2)).unwrap(), 2);
    }
}
