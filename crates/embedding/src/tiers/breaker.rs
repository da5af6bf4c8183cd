//! Circuit breaker of a node: after several consecutive failures the node gets no requests until a probe succeeds.
//!
//! The closed breaker counts consecutive failures. At the threshold the breaker opens, and the caller that opened it starts the
//! probes. While the breaker is open, requests skip the node at no cost. A successful probe closes the breaker. So the half-open
//! state consists of the probe alone, and no user request is risked.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Breaker state of one node.
#[derive(Debug, Default)]
pub struct Breaker {
    failures: AtomicU32,
    open: AtomicBool,
    openings: AtomicU64,
}

impl Breaker {
    /// Returns true if requests must skip the node.
    pub fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    /// Returns how often the breaker has opened.
    pub fn openings(&self) -> u64 {
        self.openings.load(Ordering::Relaxed)
    }

    /// Records an answered request.
    pub fn success(&self) {
        // Writes only if needed: a write per answer would move the cache line between cores.
        if self.failures.load(Ordering::Relaxed) != 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
    }

    /// Records a request without an answer. Returns true if this failure opened the breaker: the caller then starts the probes.
    pub fn failure(&self, threshold: u32) -> bool {
        let failures = self.failures.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        let opened = failures >= threshold && !self.open.swap(true, Ordering::AcqRel);
        if opened {
            self.openings.fetch_add(1, Ordering::Relaxed);
        }
        opened
    }

    /// Records an answered probe.
    pub fn close(&self) {
        self.failures.store(0, Ordering::Relaxed);
        self.open.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_at_the_threshold_and_closes_after_a_probe() {
        let breaker = Breaker::default();
        for _ in 0..100 {
            assert!(!breaker.failure(3) && !breaker.failure(3));
            breaker.success();
        }
        assert!(!breaker.is_open());
        assert!(!breaker.failure(3) && !breaker.failure(3));
        assert!(breaker.failure(3), "the third failure in a row opens it");
        assert!(!breaker.failure(3), "reports the opening to one caller only");
        breaker.success();
        assert!(breaker.is_open(), "an answer to an earlier request does not close it");
        breaker.close();
        assert!(!breaker.is_open() && breaker.openings() == 1);
        assert!(!breaker.failure(3), "counting starts again");
    }
}
