//! Whether something that is asked again and again answers, and when it is asked next.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;

/// How long after a failure the next question waits, and at most: each failure doubles it.
const WAIT: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// What became of the last questions.
#[derive(Debug, Default)]
pub struct Health(Mutex<Option<Failing>>);

/// A row of failures.
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

    /// Asks, unless the last failure is too short ago.
    ///
    /// # Errors
    /// What the question ended with; what the last one did where it is too early for another.
    pub fn ask<T>(&self, question: impl FnOnce() -> Result<T>) -> Result<T> {
        if let Some(failing) = self.state().as_ref().filter(|failing| Instant::now() < failing.next) {
            return Err(failing.last.again());
        }
        self.told(question())
    }

    /// Takes note of how a question ended that did not wait.
    ///
    /// # Errors
    /// What it ended with.
    pub fn told<T>(&self, answer: Result<T>) -> Result<T> {
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

    /// Since when all questions failed, and how the last one did.
    pub fn trouble(&self) -> Option<(Duration, String)> {
        self.state().as_ref().map(|failing| (failing.since.elapsed(), failing.last.to_string()))
    }
}

/// How long to wait after so many failures, one or more: from the first bound twice as long each time, up to the second one,
/// and up to a fifth less by chance, so that servers of one store do not all come back at once.
pub fn back_off((first, most): (Duration, Duration), failures: u32) -> Duration {
    let doubled = first.saturating_mul(1 << failures.saturating_sub(1).min(20)).min(most);
    doubled.mul_f64(1.0 - RandomState::new().hash_one(failures) as f64 / u64::MAX as f64 / 5.0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_fails_is_left_alone_and_what_answers_is_not() {
        let health = Health::default();
        assert_eq!(health.ask(|| Ok(1)).unwrap(), 1);
        assert!(health.trouble().is_none());
        assert!(health.ask(|| Err::<(), _>(Error::unavailable("away"))).is_err());
        let asked = health.ask(|| -> Result<()> { panic!("too early") });
        assert_eq!(asked.unwrap_err().to_string(), "away");
        assert_eq!(health.trouble().unwrap().1, "away");
        health.told(Ok(())).unwrap();
        assert_eq!(health.ask(|| Ok(2)).unwrap(), 2);
    }
}
