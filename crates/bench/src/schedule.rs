//! Schedule of requests, fixed before the run: the same seed gives the same load.

use std::sync::Arc;
use std::time::Duration;

use sterling_core::random::{GAMMA, splitmix64};

/// Distribution of request arrivals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Arrivals {
    /// Independent arrivals, as of many users.
    Poisson,
    /// Equal intervals.
    Constant,
}

/// Times at which the requests of a class are sent.
#[derive(Clone, Debug, PartialEq)]
pub enum SendTimes {
    /// Rate in requests per second.
    Rate(f64),
    /// Time from the start of the run at which each body is sent, ascending.
    Recorded(Arc<[Duration]>),
}

impl SendTimes {
    /// Returns the length of a recording in seconds; `None` for a rate.
    pub fn seconds(&self) -> Option<f64> {
        match self {
            SendTimes::Rate(_) => None,
            SendTimes::Recorded(times) => times.last().map(Duration::as_secs_f64),
        }
    }
}

/// Seeded random numbers (splitmix64).
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Random(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        let number = splitmix64(self.0);
        self.0 = self.0.wrapping_add(GAMMA);
        number
    }

    /// Returns a number of at least 0 and below 1.
    pub(super) fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns a number below `count`, which is at least 1.
    pub(super) fn below(&mut self, count: usize) -> usize {
        (self.next() % count as u64) as usize
    }
}

/// Returns the times of all requests from the start of the run, ascending.
pub(super) fn times(arrivals: Arrivals, rate: f64, seconds: f64, seed: u64) -> impl Iterator<Item = Duration> + Send {
    let mut random = Random::new(seed);
    let (mut at, mut count) = (0.0, 0u64);
    std::iter::from_fn(move || {
        let time = (at < seconds).then(|| Duration::from_secs_f64(at))?;
        count += 1;
        at = match arrivals {
            // Computed from the count, because rounding errors of a sum would accumulate.
            Arrivals::Constant => count as f64 / rate,
            Arrivals::Poisson => at - (1.0 - random.share()).ln() / rate,
        };
        Some(time)
    })
}

/// Returns the index of each request's body: all `count` bodies in a random order, repeatedly.
pub(super) fn order(count: usize, seed: u64) -> impl Iterator<Item = usize> {
    let mut random = Random::new(!seed);
    let mut order: Vec<usize> = (0..count).collect();
    for last in (1..count).rev() {
        order.swap(last, random.below(last + 1));
    }
    order.into_iter().cycle()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constant_arrivals_have_equal_distances_and_end_in_time() {
        for (rate, seconds) in [(10.0, 2.0), (3.0, 10.0), (7000.0, 1.0), (0.5, 6.0)] {
            let times: Vec<Duration> = times(Arrivals::Constant, rate, seconds, 1).collect();
            assert_eq!(times.len(), (rate * seconds) as usize);
            for (n, time) in times.iter().enumerate() {
                assert!((time.as_secs_f64() - n as f64 / rate).abs() < 1e-8, "{rate}: request {n} at {time:?}");
            }
        }
    }

    #[test]
    fn poisson_arrivals_have_the_rate_and_the_spread_of_independent_ones() {
        let (rate, seconds) = (2000.0, 20.0);
        for seed in 0..5 {
            let times: Vec<Duration> = times(Arrivals::Poisson, rate, seconds, seed).collect();
            assert!(times.is_sorted() && times.iter().all(|t| t.as_secs_f64() < seconds));
            // The standard deviation of the count is its square root: 200 of 40,000; the test allows four of them.
            assert!((times.len() as f64 - rate * seconds).abs() < 800.0, "seed {seed}: {} requests", times.len());
            let gaps: Vec<f64> = times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64() * rate).collect();
            let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
            let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
            assert!((variance - 1.0).abs() < 0.1, "seed {seed}: variance {variance} of gaps with mean {mean}");
        }
    }

    #[test]
    fn a_seed_gives_one_schedule_and_one_order() {
        let of = |seed| times(Arrivals::Poisson, 100.0, 3.0, seed).collect::<Vec<_>>();
        assert_eq!(of(7), of(7));
        assert_ne!(of(7), of(8));
        let orders = |seed| order(50, seed).take(120).collect::<Vec<_>>();
        assert_eq!(orders(7), orders(7));
        assert_ne!(orders(7), orders(8));
    }

    #[test]
    fn every_body_is_sent_before_one_is_sent_again() {
        for count in [1, 2, 3, 100] {
            let mut first: Vec<usize> = order(count, 3).take(count).collect();
            let second: Vec<usize> = order(count, 3).skip(count).take(count).collect();
            assert_eq!(first, second);
            first.sort_unstable();
            assert_eq!(first, (0..count).collect::<Vec<_>>());
        }
    }
}
