//! Intervals of a mean by drawing again (Efron's percentile bootstrap): no shape of the values is assumed.
//!
//! With few values an interval is too narrow, as any of them is that knows nothing but these values: below [`VALUES_MIN`] there is
//! none.

use serde::Serialize;

use super::schedule::Random;

/// How often the values are drawn again.
const DRAWS: usize = 10_000;
/// Values from which on there is an interval.
const VALUES_MIN: usize = 5;
/// The share of all draws that lies in an interval.
const CONFIDENCE: f64 = 0.95;

/// Where the mean of what the values come from lies, with a confidence of 95 %.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// The lower end.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

/// The interval of the mean; nothing for fewer than five values.
pub(super) fn of_mean(values: &[f64], seed: u64) -> Option<Interval> {
    if values.len() < VALUES_MIN {
        return None;
    }
    let mut random = Random::new(seed);
    let mut mean = || (0..values.len()).map(|_| values[random.below(values.len())]).sum::<f64>() / values.len() as f64;
    let mut means: Vec<f64> = (0..DRAWS).map(|_| mean()).collect();
    means.sort_unstable_by(f64::total_cmp);
    let tail = ((1.0 - CONFIDENCE) / 2.0 * DRAWS as f64) as usize;
    Some(Interval { low: means[tail], high: means[DRAWS - 1 - tail] })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn an_interval_holds_the_mean_about_as_often_as_it_says() {
        let mut random = Random::new(1);
        let holds = |_: &usize| {
            let values: Vec<f64> = (0..40).map(|_| random.share()).collect();
            let Interval { low, high } = of_mean(&values, random.next()).unwrap();
            assert!(low < high && high - low < 0.3, "{low} to {high}");
            low <= 0.5 && 0.5 <= high
        };
        let held = (0..200).filter(holds).count();
        // 190 are expected, give or take three.
        assert!((176..=199).contains(&held), "{held} of 200");
    }

    #[test]
    fn equal_values_leave_no_doubt_and_few_values_say_nothing() {
        assert_eq!(of_mean(&[2.0; 5], 1), Some(Interval { low: 2.0, high: 2.0 }));
        assert_eq!(of_mean(&[1.0, 2.0, 3.0, 4.0], 1), None);
        assert_eq!(of_mean(&[], 1), None);
    }
}
