//! Sliding window over the measurements of two versions.

use std::collections::VecDeque;
use std::time::Duration;

use super::key_hash::GROUPS;

/// Number of slices of a window; old measurements expire one slice at a time.
const SLICES: u32 = 20;
/// Number of steps of the latency grid, eight per factor of two.
pub(super) const STEPS: usize = 192;
/// Lowest latency of the grid, in microseconds.
const FIRST_MICROS: f64 = 10.0;
const STEPS_TO_DOUBLE: f64 = 8.0;

/// Returns the latency at which a step of the grid begins.
pub(super) fn time_of(step: usize) -> Duration {
    Duration::from_secs_f64(FIRST_MICROS * 1e-6 * (step as f64 / STEPS_TO_DOUBLE).exp2())
}

/// Returns the last step that begins at or before a latency.
pub(super) fn step_of(time: Duration) -> usize {
    let octaves = (time.as_secs_f64() * 1e6 / FIRST_MICROS).log2();
    // Latencies outside of the grid count in its first or last step.
    ((octaves * STEPS_TO_DOUBLE).max(0.0) as usize).min(STEPS - 1)
}

/// Counters of requests.
#[derive(Clone, Debug)]
pub(super) struct Counts {
    /// Completed requests.
    pub(super) requests: u64,
    /// Failed requests.
    pub(super) errors: u64,
    /// Answers by latency step.
    pub(super) answered: [u32; STEPS],
    /// Number of answers that were compared with exact search.
    pub(super) audits: u64,
    /// Sum over audited answers of the fraction of exact results that the answer lacks.
    pub(super) lost: f64,
}

impl Default for Counts {
    fn default() -> Self {
        Counts { requests: 0, errors: 0, answered: [0; STEPS], audits: 0, lost: 0.0 }
    }
}

impl Counts {
    fn add(&mut self, other: &Counts) {
        self.requests += other.requests;
        self.errors += other.errors;
        self.answered.iter_mut().zip(&other.answered).for_each(|(sum, count)| *sum = sum.saturating_add(*count));
        self.audits += other.audits;
        self.lost += other.lost;
    }

    /// Sums counters.
    pub(super) fn sum<'a>(all: impl IntoIterator<Item = &'a Counts>) -> Counts {
        let mut sum = Counts::default();
        all.into_iter().for_each(|counts| sum.add(counts));
        sum
    }

    /// Returns for each step the number of answers that took at least the latency at which the step begins.
    pub(super) fn counts_by_latency(&self) -> [u64; STEPS] {
        let mut sums = [0; STEPS];
        let mut sum = 0;
        for (place, count) in self.answered.iter().enumerate().rev() {
            sum += u64::from(*count);
            sums[place] = sum;
        }
        sums
    }
}

/// Counters of both versions; the canary has counters per key group.
#[derive(Clone, Debug)]
pub(super) struct Both {
    pub(super) active: Counts,
    pub(super) canary: Vec<Counts>,
}

impl Default for Both {
    fn default() -> Self {
        Both { active: Counts::default(), canary: vec![Counts::default(); GROUPS] }
    }
}

/// Counters of a sliding window, in slices of equal length.
#[derive(Debug)]
pub(super) struct Window {
    slice: Duration,
    /// Slices with their numbers, ascending.
    slices: VecDeque<(u64, Both)>,
}

impl Window {
    pub(super) fn new(length: Duration) -> Self {
        Window { slice: length / SLICES, slices: VecDeque::new() }
    }

    /// Returns the counters of the slice at a time.
    pub(super) fn now(&mut self, now: Duration) -> &mut Both {
        let number = self.number(now);
        // The thread with the later time may enter the critical section before the thread with the earlier time.
        if self.slices.back().is_none_or(|(last, _)| *last < number) {
            while self.slices.front().is_some_and(|(first, _)| first + u64::from(SLICES) <= number) {
                self.slices.pop_front();
            }
            self.slices.push_back((number, Both::default()));
        }
        let end = self.slices.len() - 1;
        &mut self.slices[end].1
    }

    /// Sums the counters in the window at a time.
    pub(super) fn total(&self, now: Duration) -> Both {
        let number = self.number(now);
        let mut total = Both::default();
        for (_, slice) in self.slices.iter().filter(|(at, _)| at + u64::from(SLICES) > number) {
            total.active.add(&slice.active);
            total.canary.iter_mut().zip(&slice.canary).for_each(|(sum, group)| sum.add(group));
        }
        total
    }

    fn number(&self, now: Duration) -> u64 {
        (now.as_nanos() / self.slice.as_nanos().max(1)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_hold_the_times_that_begin_them() {
        for step in 0..STEPS {
            let time = time_of(step) + Duration::from_nanos(1 + time_of(step).as_nanos() as u64 / 1_000_000);
            assert_eq!(step_of(time), step, "{time:?}");
        }
        assert_eq!((step_of(Duration::ZERO), step_of(Duration::MAX)), (0, STEPS - 1));
        assert!(time_of(STEPS - 1) > Duration::from_secs(120));
    }

    #[test]
    fn entries_older_than_the_window_are_ignored() {
        let mut window = Window::new(Duration::from_secs(20));
        for second in 0..100_u64 {
            let now = Duration::from_secs(second);
            window.now(now).active.requests += 1;
            window.now(now).canary[second as usize % GROUPS].errors += 1;
            let total = window.total(now);
            assert_eq!(total.active.requests, (second + 1).min(20));
            assert_eq!(Counts::sum(&total.canary).errors, (second + 1).min(20));
            assert!(window.slices.len() <= SLICES as usize);
        }
        // A late measurement is counted; the window is empty once all measurements are old.
        window.now(Duration::from_secs(90)).active.requests += 1;
        assert_eq!(window.total(Duration::from_secs(99)).active.requests, 21);
        assert_eq!(window.total(Duration::from_secs(200)).active.requests, 0);
    }
}
