//! The slowest calls of the last minutes, each with what its steps did: what an operator looks at when a request was slow.
//!
//! Those of the present window and of the one before are kept, the same number of each, so that there is always something to look at and
//! nothing is older than two windows. What does not belong there costs two reads of a number.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::wire::{Served, SlowCall, SlowPass};
use crate::request::Explain;

/// Calls that are kept of a window.
const KEPT: usize = 32;
/// Longest filter that is kept, in bytes.
const FILTER_BYTES_MAX: usize = 2048;
/// How long a window is.
pub(super) const WINDOW: Duration = Duration::from_secs(300);

/// What a pass did for a call, on its way to those who note it.
#[derive(Clone)]
pub(super) struct Passed {
    pub(super) model: String,
    pub(super) version: u64,
    pub(super) requests: usize,
    /// From when the engine took it in to its answer.
    pub(super) engine: Duration,
    pub(super) explain: Option<Box<Explain>>,
}

impl Passed {
    /// That of one request, answered by this snapshot.
    pub(super) fn of(served: &Served) -> Self {
        let (model, version) = (served.model.clone(), served.version);
        Passed { model, version, requests: 1, engine: Duration::ZERO, explain: None }
    }
}

impl From<Passed> for SlowPass {
    fn from(passed: Passed) -> Self {
        let Passed { model, version, requests, engine, explain } = passed;
        let explain = explain.map(|explain| {
            let mut explain = super::wire::Explain::from(&*explain);
            explain.filter.truncate(explain.filter.floor_char_boundary(FILTER_BYTES_MAX));
            explain
        });
        SlowPass { model, version, requests, engine_ms: millis(engine), explain }
    }
}

/// A time in milliseconds, to the microsecond.
pub(super) fn millis(time: Duration) -> f64 {
    time.as_micros() as f64 / 1000.0
}

/// The slowest calls.
#[derive(Debug)]
pub(super) struct SlowCalls {
    start: Instant,
    /// What a call must take to be kept, in microseconds.
    floor: AtomicU64,
    /// When the present window ends, in microseconds after `start`.
    end: AtomicU64,
    windows: Mutex<Windows>,
}

#[derive(Debug, Default)]
struct Windows {
    /// Slowest first.
    now: Vec<SlowCall>,
    before: Vec<SlowCall>,
}

impl Default for SlowCalls {
    fn default() -> Self {
        let end = AtomicU64::new(WINDOW.as_micros() as u64);
        SlowCalls { start: Instant::now(), floor: AtomicU64::new(0), end, windows: Mutex::default() }
    }
}

impl SlowCalls {
    /// Keeps a call where it is among the slowest; `tell` is asked for it only then.
    pub(super) fn note(&self, took: Duration, tell: impl FnOnce() -> SlowCall) {
        self.note_at(self.start.elapsed().as_micros() as u64, took.as_micros() as u64, tell);
    }

    fn note_at(&self, now: u64, took: u64, tell: impl FnOnce() -> SlowCall) {
        if took <= self.floor.load(Ordering::Relaxed) && now < self.end.load(Ordering::Relaxed) {
            return;
        }
        let call = tell();
        let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        self.turn(&mut windows, now);
        let place = windows.now.partition_point(|kept| kept.ms >= call.ms);
        windows.now.insert(place, call);
        windows.now.truncate(KEPT);
        if let Some(last) = windows.now.get(KEPT - 1) {
            self.floor.store((last.ms * 1000.0) as u64, Ordering::Relaxed);
        }
    }

    /// Begins a new window where the present one has ended.
    fn turn(&self, windows: &mut Windows, now: u64) {
        let (end, length) = (self.end.load(Ordering::Relaxed), WINDOW.as_micros() as u64);
        if now < end {
            return;
        }
        let last = std::mem::take(&mut windows.now);
        windows.before = if now < end + length { last } else { Vec::new() };
        self.floor.store(0, Ordering::Relaxed);
        self.end.store(now + length, Ordering::Relaxed);
    }

    /// The slowest calls of both windows, slowest first.
    pub(super) fn list(&self) -> Vec<SlowCall> {
        let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        self.turn(&mut windows, self.start.elapsed().as_micros() as u64);
        let mut calls: Vec<SlowCall> = windows.now.iter().chain(&windows.before).cloned().collect();
        calls.sort_by(|a, b| b.ms.total_cmp(&a.ms));
        calls
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(ms: f64) -> SlowCall {
        SlowCall { ms, ..SlowCall::default() }
    }

    fn times(slow: &SlowCalls) -> Vec<f64> {
        slow.list().iter().map(|call| call.ms).collect()
    }

    #[test]
    fn the_slowest_are_kept_whatever_their_order() {
        let slow = SlowCalls::default();
        let mut asked = 0;
        for n in 0..1000_u64 {
            let ms = n * 7919 % 1000;
            slow.note_at(n, ms * 1000, || {
                asked += 1;
                call(ms as f64)
            });
        }
        let expected: Vec<f64> = (0..KEPT).map(|n| 999.0 - n as f64).collect();
        assert_eq!(times(&slow), expected);
        assert!(asked < 500, "{asked} were told, though few are kept");
    }

    #[test]
    fn windows_end() {
        let (slow, window) = (SlowCalls::default(), WINDOW.as_micros() as u64);
        for n in 0..100 {
            slow.note_at(0, 9_000_000, || call(9000.0 + f64::from(n)));
        }
        slow.note_at(1, 10, || call(0.01));
        assert_eq!(times(&slow).len(), KEPT);
        // A fast call is among the slowest of a new window, beside those of the one before.
        slow.note_at(window + 1, 10, || call(0.01));
        assert_eq!(times(&slow).len(), KEPT + 1);
        slow.note_at(2 * window + 2, 20, || call(0.02));
        assert_eq!(times(&slow), [0.02, 0.01]);
        slow.note_at(9 * window, 30, || call(0.03));
        assert_eq!(times(&slow), [0.03]);
    }
}
