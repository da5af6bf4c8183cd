//! Latencies in an HdrHistogram: three significant digits each, in constant memory.

use std::fmt;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

/// Resolution of the histogram's lower end in nanoseconds, shorter than any request.
const MIN_NANOS: u64 = 64;
/// Upper end in nanoseconds, longer than any timeout; longer latencies are recorded as this one.
const MAX_NANOS: u64 = 3_600_000_000_000;
/// Significant digits of a latency.
const DIGITS: u8 = 3;
/// Number of points of a percentile curve each time the remaining fraction halves.
const CURVE_STEPS: u32 = 4;

/// A collection of latencies.
#[derive(Clone, Debug, PartialEq)]
pub struct Latencies {
    histogram: Histogram<u32>,
    longest: Duration,
}

impl Default for Latencies {
    fn default() -> Self {
        let histogram = Histogram::new_with_bounds(MIN_NANOS, MAX_NANOS, DIGITS);
        Latencies {
            histogram: histogram.expect("the bounds are far apart and the digits few"),
            longest: Duration::ZERO,
        }
    }
}

impl Latencies {
    pub(super) fn record(&mut self, latency: Duration) {
        self.histogram.saturating_record(u64::try_from(latency.as_nanos()).unwrap_or(MAX_NANOS));
        self.longest = self.longest.max(latency);
    }

    /// Adds the latencies of another collection.
    pub(super) fn add(&mut self, others: &Latencies) {
        self.histogram.add(&others.histogram).expect("all histograms have the same bounds");
        self.longest = self.longest.max(others.longest);
    }

    /// Returns the latency in milliseconds that a fraction `share` of all latencies does not exceed.
    pub(super) fn at(&self, share: f64) -> f64 {
        // A bucket is reported by its upper end, which may exceed all latencies in the bucket.
        let nanos = self.histogram.value_at_quantile(share) as f64;
        nanos.min(self.longest.as_nanos() as f64) / 1e6
    }

    /// Returns the percentiles; `None` if no latency was recorded.
    pub(super) fn percentiles(&self) -> Option<Latency> {
        (!self.histogram.is_empty()).then(|| Latency {
            mean: self.histogram.mean() / 1e6,
            p50: self.at(0.5),
            p90: self.at(0.9),
            p95: self.at(0.95),
            p99: self.at(0.99),
            p999: self.at(0.999),
            max: self.longest.as_nanos() as f64 / 1e6,
        })
    }

    /// Returns fractions of the answers that approach 1, each with the latency in milliseconds that these answers do
    /// not exceed.
    pub(super) fn curve(&self) -> Vec<(f64, f64)> {
        let points = self.histogram.iter_quantiles(CURVE_STEPS);
        points.map(|point| (point.quantile_iterated_to(), self.at(point.quantile_iterated_to()))).collect()
    }
}

/// Latency percentiles in milliseconds, measured from the scheduled time of each request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Latency {
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 95th percentile.
    pub p95: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
    /// Maximum.
    pub max: f64,
}

impl fmt::Display for Latency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Latency { p50, p90, p99, p999, max, .. } = self;
        write!(f, "p50 {p50:.2}  p90 {p90:.2}  p99 {p99:.2}  p99.9 {p999:.2}  max {max:.2} ms")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn of(latencies: impl Iterator<Item = Duration>) -> Latencies {
        let mut all = Latencies::default();
        latencies.for_each(|latency| all.record(latency));
        all
    }

    #[test]
    fn percentiles_are_those_of_the_sorted_values_to_three_digits() {
        assert_eq!(Latencies::default().percentiles(), None);
        let Latency { mean, p50, p99, max, .. } = of([Duration::from_millis(7)].into_iter()).percentiles().unwrap();
        assert!((mean - 7.0).abs() < 0.007);
        assert_eq!([p50, p99, max], [7.0; 3]);
        // Compares with the definition, for sizes with rounding risks, from 50 microseconds to a minute.
        for (count, step) in (1..200u64).map(|count| (count, 50)).chain([(1000, 3), (1000, 700), (1000, 60_000)]) {
            let found = of((1..=count).rev().map(|n| Duration::from_micros(n * step))).percentiles().unwrap();
            for (share, ms) in
                [(500, found.p50), (900, found.p90), (950, found.p95), (990, found.p99), (999, found.p999)]
            {
                let least = (1..=count).find(|n| *n * 1000 >= count * share).unwrap();
                let expected = (least * step) as f64 / 1000.0;
                assert!((ms - expected).abs() <= expected * 0.0021, "{count} values of {step} µs: {share}: {ms}");
            }
            assert_eq!(found.max, (count * step) as f64 / 1000.0);
        }
    }

    #[test]
    fn merged_histograms_equal_one_histogram() {
        let [all, even, odd] = [(0, 1), (0, 2), (1, 2)]
            .map(|(first, step)| of((first..1000).step_by(step).map(|n: u64| Duration::from_micros(n * n))));
        let mut sum = even;
        sum.add(&odd);
        assert_eq!(sum, all);
        let curve = sum.curve();
        assert!(curve.is_sorted_by(|a, b| a.0 <= b.0 && a.1 <= b.1), "{curve:?}");
        assert_eq!(curve.last().copied(), Some((1.0, 998.001)));
        assert!(curve.len() < 100, "{} points", curve.len());
    }

    #[test]
    fn no_latency_is_too_long_or_too_short() {
        let found = of([Duration::ZERO, Duration::from_nanos(1), Duration::from_secs(1 << 40)].into_iter());
        let Latency { p50, max, .. } = found.percentiles().unwrap();
        assert!(p50 < 0.001 && max == (1u64 << 40) as f64 * 1e3, "{p50} {max}");
    }
}
