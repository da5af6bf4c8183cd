//! Rate of one key: the generic cell rate algorithm (ITU-T I.371), in one atomic number that threads share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Least time between two log lines about a key that exceeds its rate.
const BETWEEN_LINES: u64 = 60 * 1_000_000_000;

/// Rate and burst of a key.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rate {
    /// Requests per second.
    pub(super) rate: f64,
    /// Number of requests that may arrive at once.
    pub(super) burst: f64,
}

/// Consumption of a key's rate.
#[derive(Debug)]
pub(super) struct Meter {
    rate: Rate,
    start: Instant,
    /// Theoretical arrival time: nanoseconds after `start` at which all requests so far were due.
    due: AtomicU64,
    /// Number of requests rejected since the last log line about rejections.
    rejected: AtomicU64,
    /// Nanoseconds after `start` from which the next log line may be written.
    next_line: AtomicU64,
}

impl Meter {
    pub(super) fn new(rate: Rate) -> Self {
        Meter {
            rate,
            start: Instant::now(),
            due: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
            next_line: AtomicU64::new(0),
        }
    }

    pub(super) fn rate(&self) -> Rate {
        self.rate
    }

    /// Counts one request.
    ///
    /// # Errors
    /// Returns the time to wait if the request exceeds the rate.
    pub(super) fn take(&self) -> Result<(), Duration> {
        self.take_at(self.start.elapsed().as_nanos() as u64)
    }

    /// Counts a rejected request. If a log line is due, returns the number of requests rejected since the last log line.
    pub(super) fn reject(&self) -> Option<u64> {
        self.reject_at(self.start.elapsed().as_nanos() as u64)
    }

    fn reject_at(&self, now: u64) -> Option<u64> {
        self.rejected.fetch_add(1, Ordering::Relaxed);
        let next = self.next_line.load(Ordering::Relaxed);
        let is_mine = now >= next
            && self.next_line.compare_exchange(next, now + BETWEEN_LINES, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        is_mine.then(|| self.rejected.swap(0, Ordering::Relaxed))
    }

    /// Counts further requests of an admitted call, so that later calls are admitted later.
    pub(super) fn charge(&self, count: u64) {
        self.charge_at(self.start.elapsed().as_nanos() as u64, count);
    }

    fn charge_at(&self, now: u64, count: u64) {
        let added = self.step().saturating_mul(count);
        let later = |due: u64| Some(due.max(now).saturating_add(added));
        // Cannot fail: the closure always returns a value.
        let _ = self.due.fetch_update(Ordering::Relaxed, Ordering::Relaxed, later);
    }

    fn step(&self) -> u64 {
        (1e9 / self.rate.rate) as u64
    }

    fn take_at(&self, now: u64) -> Result<(), Duration> {
        let step = self.step();
        let slack = (1e9 / self.rate.rate * (self.rate.burst - 1.0)) as u64;
        let mut due = self.due.load(Ordering::Relaxed);
        loop {
            let begins = due.max(now);
            if begins - now > slack {
                return Err(Duration::from_nanos(begins - now - slack));
            }
            match self.due.compare_exchange_weak(due, begins.saturating_add(step), Ordering::Relaxed, Ordering::Relaxed)
            {
                Ok(_) => return Ok(()),
                Err(other) => due = other,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn a_burst_and_then_the_rate() {
        let meter = Meter::new(Rate { rate: 10.0, burst: 5.0 });
        let taken = |from: u64, until: u64, every: u64| {
            (from..until).step_by(every as usize).filter(|&now| meter.take_at(now).is_ok()).count()
        };
        assert_eq!(taken(0, 100, 1), 5);
        assert_eq!(meter.take_at(100), Err(Duration::from_nanos(SECOND / 10 - 100)));
        assert_eq!(taken(SECOND / 10, 10 * SECOND, SECOND / 100), 99);
        // A line at the first rejection, then one a minute with the number of rejections since.
        let lines: Vec<_> = (0..130).filter_map(|second| meter.reject_at(second * SECOND)).collect();
        assert_eq!(lines, [1, 60, 60]);
        // Unused rate accumulates to one burst at most.
        assert_eq!(taken(60 * SECOND, 60 * SECOND + 100, 1), 5);
    }

    #[test]
    fn a_large_request_is_charged_to_the_next_one() {
        let meter = Meter::new(Rate { rate: 10.0, burst: 1.0 });
        assert_eq!(meter.take_at(0), Ok(()));
        meter.charge_at(0, 9);
        assert_eq!(meter.take_at(SECOND - 1), Err(Duration::from_nanos(1)));
        assert_eq!(meter.take_at(SECOND), Ok(()));
    }

    #[test]
    fn threads_together_stay_within_the_rate() {
        let meter = Meter::new(Rate { rate: 0.001, burst: 100.0 });
        let taken = || (0..1000).filter(|_| meter.take().is_ok()).count();
        let sum: usize = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..4).map(|_| scope.spawn(taken)).collect();
            workers.into_iter().map(|worker| worker.join().unwrap_or_default()).sum()
        });
        assert_eq!(sum, 100);
    }
}
