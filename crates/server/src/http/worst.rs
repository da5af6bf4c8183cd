//! The worst of what happened in the last minutes, whatever it is that happens.
//!
//! Those of the present window and of the one before are kept, the same number of each, so that there is always something to look at and
//! nothing is older than two windows. What does not belong there costs two reads of a number.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sterling_core::locks::locked;

/// How much is kept of a window.
const KEPT: usize = 32;
/// How long a window is.
pub(super) const WINDOW: Duration = Duration::from_secs(300);

/// The worst of two windows.
#[derive(Debug)]
pub(super) struct Worst<T> {
    start: Instant,
    /// How bad it must be to be kept.
    floor: AtomicU64,
    /// When the present window ends, in microseconds after `start`.
    end: AtomicU64,
    windows: Mutex<Windows<T>>,
}

#[derive(Debug)]
struct Windows<T> {
    /// Worst first, each with how bad it is.
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
    /// Keeps what is among the worst; `tell` is asked for it only then.
    pub(super) fn note(&self, badness: u64, tell: impl FnOnce() -> T) {
        self.note_at(self.start.elapsed().as_micros() as u64, badness, tell);
    }

    fn note_at(&self, now: u64, badness: u64, tell: impl FnOnce() -> T) {
        // The end first: with that of a new window comes its floor, not that of the one before.
        if now < self.end.load(Ordering::Acquire) && badness <= self.floor.load(Ordering::Relaxed) {
            return;
        }
        let told = tell();
        let mut windows = locked(&self.windows);
        self.turn(&mut windows, now);
        let place = windows.now.partition_point(|(kept, _)| *kept >= badness);
        windows.now.insert(place, (badness, told));
        windows.now.truncate(KEPT);
        if let Some((last, _)) = windows.now.get(KEPT - 1) {
            self.floor.store(*last, Ordering::Relaxed);
        }
    }

    /// Begins a new window where the present one has ended.
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

    /// What is kept of both windows, worst first.
    pub(super) fn list(&self) -> Vec<T> {
        let mut windows = locked(&self.windows);
        self.turn(&mut windows, self.start.elapsed().as_micros() as u64);
        let mut all: Vec<&(u64, T)> = windows.now.iter().chain(&windows.before).collect();
        all.sort_by_key(|(badness, _)| std::cmp::Reverse(*badness));
        all.into_iter().map(|(_, told)| told.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_are_kept_whatever_their_order() {
        let worst = Worst::default();
        let mut asked = 0;
        for n in 0..1000_u64 {
            let badness = n * 7919 % 1000;
            worst.note_at(n, badness, || {
                asked += 1;
                badness
            });
        }
        let expected: Vec<u64> = (0..KEPT as u64).map(|n| 999 - n).collect();
        assert_eq!(worst.list(), expected);
        assert!(asked < 500, "{asked} were told, though few are kept");
    }

    #[test]
    fn windows_end() {
        let (worst, window) = (Worst::default(), WINDOW.as_micros() as u64);
        let note = |at, badness| worst.note_at(at, badness, || badness);
        (0..100).for_each(|n| note(0, 9000 + n));
        note(1, 10);
        assert_eq!(worst.list().len(), KEPT);
        // What is not bad is among the worst of a new window, beside those of the one before.
        note(window + 1, 10);
        assert_eq!(worst.list().len(), KEPT + 1);
        note(2 * window + 2, 20);
        assert_eq!(worst.list(), [20, 10]);
        note(9 * window, 30);
        assert_eq!(worst.list(), [30]);
    }
}
