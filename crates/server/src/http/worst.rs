//! Keeps the worst events of the last minutes.
//!
//! The current and the previous window each keep the same number of events, so the list is never empty after a change of window,
//! and no event is older than two windows. An event that does not qualify costs two atomic reads.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sterling_core::locks::locked;

/// Maximum number of events per window.
const EVENTS_MAX: usize = 32;
/// Length of a window.
pub(super) const WINDOW: Duration = Duration::from_secs(300);

/// Worst events of two windows.
#[derive(Debug)]
pub(super) struct Worst<T> {
    start: Instant,
    /// Severity that an event must exceed to be listed.
    floor: AtomicU64,
    /// End of the current window, in microseconds after `start`.
    end: AtomicU64,
    windows: Mutex<Windows<T>>,
}

#[derive(Debug)]
struct Windows<T> {
    /// Events with their severity, worst first.
    now: Vec<(u64, T)>,
    before: Vec<(u64, T)>,
}

impl<T> Default for Worst<T> {
    fn default() -> Self {
        let end = AtomicU64::new(WINDOW.as_micros() as u64);
        let windows = Mutex::new(Windows { now: Vec::new(), before: Vec::new() });
        Worst { start: Instant::now(), floor: AtomicU64::new(0), end, windows }
    }
}

impl<T: Clone> Worst<T> {
    /// Records an event if it is among the worst; only then `tell` builds it.
    pub(super) fn note(&self, badness: u64, tell: impl FnOnce() -> T) {
        self.record_at(self.start.elapsed().as_micros() as u64, badness, tell);
    }

    fn record_at(&self, now: u64, badness: u64, tell: impl FnOnce() -> T) {
        // Read the end first: the end of a new window is published after its floor.
        if now < self.end.load(Ordering::Acquire) && badness <= self.floor.load(Ordering::Relaxed) {
            return;
        }
        let reported = tell();
        let mut windows = locked(&self.windows);
        self.turn(&mut windows, now);
        let place = windows.now.partition_point(|(retained, _)| *retained >= badness);
        windows.now.insert(place, (badness, reported));
        windows.now.truncate(EVENTS_MAX);
        if let Some((last, _)) = windows.now.get(EVENTS_MAX - 1) {
            self.floor.store(*last, Ordering::Relaxed);
        }
    }

    /// Starts a new window if the current one has ended.
    fn turn(&self, windows: &mut Windows<T>, now: u64) {
        let (end, length) = (self.end.load(Ordering::Relaxed), WINDOW.as_micros() as u64);
        if now < end {
            return;
        }
        let last = std::mem::take(&mut windows.now);
        windows.before = if now < end + length { last } else { Vec::new() };
        self.floor.store(0, Ordering::Relaxed);
        self.end.store(now + length, Ordering::Release);
    }

    /// Returns the events of both windows, worst first.
    pub(super) fn list(&self) -> Vec<T> {
        let mut windows = locked(&self.windows);
        self.turn(&mut windows, self.start.elapsed().as_micros() as u64);
        let mut all: Vec<&(u64, T)> = windows.now.iter().chain(&windows.before).collect();
        all.sort_by_key(|(badness, _)| std::cmp::Reverse(*badness));
        all.into_iter().map(|(_, reported)| reported.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_are_retained_in_any_order() {
        let worst = Worst::default();
        let mut requested = 0;
        for n in 0..1000_u64 {
            let badness = n * 7919 % 1000;
            worst.record_at(n, badness, || {
                requested += 1;
                badness
            });
        }
        let expected: Vec<u64> = (0..EVENTS_MAX as u64).map(|n| 999 - n).collect();
        assert_eq!(worst.list(), expected);
        assert!(requested < 500, "{requested} were reported, though few are retained");
    }

    #[test]
    fn windows_end() {
        let (worst, window) = (Worst::default(), WINDOW.as_micros() as u64);
        let note = |at, badness| worst.record_at(at, badness, || badness);
        (0..100).for_each(|n| note(0, 9000 + n));
        note(1, 10);
        assert_eq!(worst.list().len(), EVENTS_MAX);
        // A new window accepts mild events, and the previous window stays listed.
        note(window + 1, 10);
        assert_eq!(worst.list().len(), EVENTS_MAX + 1);
        note(2 * window + 2, 20);
        assert_eq!(worst.list(), [20, 10]);
        note(9 * window, 30);
        assert_eq!(worst.list(), [30]);
    }
}
