//! A circuit breaker: after some failures in a row nobody asks a node any more, until a probe finds it well.
//!
//! Closed, the breaker counts failures without a success between them. At the threshold it opens, once, and whoever opened it
//! starts the probes; requests pass the node by at no cost while it is open. A probe that is answered closes it. So the
//! half-open state is the probe itself, and no request of a user is spent on finding out.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// The state of one node's breaker.
#[derive(Debug, Default)]
pub struct Breaker {
    failures: AtomicU32,
    open: AtomicBool,
    openings: AtomicU64,
}

impl Breaker {
    /// True where requests must pass the node by.
    pub fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    /// How often it has opened.
    pub fn openings(&self) -> u64 {
        self.openings.load(Ordering::Relaxed)
    }

    /// A request was answered.
    pub fn success(&self) {
        // A write on every answer would bounce the line between threads.
        if self.failures.load(Ordering::Relaxed) != 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
    }

    /// A request was not answered; true where this failure opened the breaker, so that the caller starts the probes.
    pub fn failure(&self, threshold: u32) -> bool {
        let failures = self.failures.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        let opened = failures >= threshold && !self.open.swap(true, Ordering::AcqRel);
        if opened {
            self.openings.fetch_add(1, Ordering::Relaxed);
        }
        opened
    }

    /// A probe was answered.
    pub fn close(&self) {
        self.failures.store(0, Ordering::Relaxed);
        self.open.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_opens_once_at_the_threshold_and_closes_by_a_probe() {
        let breaker = Breaker::default();
        for _ in 0..100 {
            assert!(!breaker.failure(3) && !breaker.failure(3));
            breaker.success();
        }
        assert!(!breaker.is_open());
        assert!(!breaker.failure(3) && !breaker.failure(3));
        assert!(breaker.failure(3), "the third failure in a row opens it");
        assert!(!breaker.failure(3), "and only one caller is told");
        breaker.success();
        assert!(breaker.is_open(), "an answer that was under way does not close it");
        breaker.close();
        assert!(!breaker.is_open() && breaker.openings() == 1);
        assert!(!breaker.failure(3), "counting starts anew");
    }
}
