//! What was seen of two versions, for as long as is looked back.

use std::collections::VecDeque;
use std::time::Duration;

use super::place::GROUPS;

/// Slices of a window: what is older than the window goes a slice at a time.
const SLICES: u32 = 20;
/// Steps of the grid of times, eight to a factor of two ...
pub(super) const STEPS: usize = 192;
/// ... from this one on, in microseconds.
const FIRST_MICROS: f64 = 10.0;
const STEPS_TO_DOUBLE: f64 = 8.0;

/// The time at which a step of the grid begins.
pub(super) fn time_of(step: usize) -> Duration {
    Duration::from_secs_f64(FIRST_MICROS * 1e-6 * (step as f64 / STEPS_TO_DOUBLE).exp2())
}

/// The last step that begins at a time or before.
pub(super) fn step_of(time: Duration) -> usize {
    let octaves = (time.as_secs_f64() * 1e6 / FIRST_MICROS).log2();
    // What is shorter than the first is of it, what is longer than the last of that.
    ((octaves * STEPS_TO_DOUBLE).max(0.0) as usize).min(STEPS - 1)
}

/// What was seen of requests.
#[derive(Clone, Debug)]
pub(super) struct Counts {
    /// That ended.
    pub(super) requests: u64,
    /// That failed.
    pub(super) errors: u64,
    /// That were answered, by the time that it took.
    pub(super) answered: [u32; STEPS],
    /// Whose answers were held against exact ones.
    pub(super) audits: u64,
    /// The shares of exact items that were not served, added up.
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

    /// All of several.
    pub(super) fn sum<'a>(all: impl IntoIterator<Item = &'a Counts>) -> Counts {
        let mut sum = Counts::default();
        all.into_iter().for_each(|counts| sum.add(counts));
        sum
    }

    /// For each step how many took as long as its begin or longer.
    pub(super) fn as_long(&self) -> [u64; STEPS] {
        let mut sums = [0; STEPS];
        let mut sum = 0;
        for (place, count) in self.answered.iter().enumerate().rev() {
            sum += u64::from(*count);
            sums[place] = sum;
        }
        sums
    }
}

/// What was seen of both versions, of the canary by the group of the key.
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

/// What was seen lately.
#[derive(Debug)]
pub(super) struct Window {
    slice: Duration,
    /// Each with its number, ascending.
    slices: VecDeque<(u64, Both)>,
}

impl Window {
    pub(super) fn new(length: Duration) -> Self {
        Window { slice: length / SLICES, slices: VecDeque::new() }
    }

    /// Where something is counted that is seen at a time.
    pub(super) fn now(&mut self, now: Duration) -> &mut Both {
        let number = self.number(now);
        // Of two threads the one that was later may come first.
        if self.slices.back().is_none_or(|(last, _)| *last < number) {
            while self.slices.front().is_some_and(|(first, _)| first + u64::from(SLICES) <= number) {
                self.slices.pop_front();
            }
            self.slices.push_back((number, Both::default()));
        }
        let end = self.slices.len() - 1;
        &mut self.slices[end].1
    }

    /// All that is in the window at a time.
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
    fn what_is_older_than_the_window_is_not_seen() {
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
        // One that comes late is counted, and nothing is seen once all of it is old.
        window.now(Duration::from_secs(90)).active.requests += 1;
        assert_eq!(window.total(Duration::from_secs(99)).active.requests, 21);
        assert_eq!(window.total(Duration::from_secs(200)).active.requests, 0);
    }
}
