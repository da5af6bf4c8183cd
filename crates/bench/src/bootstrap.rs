//! Confidence intervals of a mean by resampling (Efron's percentile bootstrap), without an assumption on the distribution.
//!
//! For few values, any interval that uses only these values is too narrow, so fewer than [`VALUES_MIN`] values have no
//! interval.

use serde::Serialize;

use super::schedule::Random;

/// Number of resamples.
const DRAWS: usize = 10_000;
/// Smallest number of values for which an interval is computed.
const VALUES_MIN: usize = 5;
/// Fraction of the resamples whose means lie within the interval.
const CONFIDENCE: f64 = 0.95;

/// 95 % confidence interval of the mean of the distribution.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
}

/// Returns the confidence interval of the mean; `None` for fewer than five values.
pub(super) fn mean_interval(values: &[f64], seed: u64) -> Option<Interval> {
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
    fn confidence_intervals_have_their_stated_coverage() {
        let mut random = Random::new(1);
        let holds = |_: &usize| {
            let values: Vec<f64> = (0..40).map(|_| random.share()).collect();
            let Interval { low, high } = mean_interval(&values, random.next()).unwrap();
            assert!(low < high && high - low < 0.3, "{low} to {high}");
            low <= 0.5 && 0.5 <= high
        };
        let held = (0..200).filter(holds).count();
        // The expected number is 190, with a standard deviation of three.
        assert!((176..=199).contains(&held), "{held} of 200");
    }

    #[test]
    fn equal_values_give_an_empty_interval_and_few_values_none() {
        assert_eq!(mean_interval(&[2.0; 5], 1), Some(Interval { low: 2.0, high: 2.0 }));
        assert_eq!(mean_interval(&[1.0, 2.0, 3.0, 4.0], 1), None);
        assert_eq!(mean_interval(&[], 1), None);
    }
}
