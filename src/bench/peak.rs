//! The highest rate that a server follows.

use super::report::Report;
use crate::error::Result;

/// A rate is followed where this share of its requests is answered in time.
const FOLLOWED: f64 = 0.99;
/// The step between two rates as long as the server follows ...
const STEP: f64 = 1.5;
/// ... and how often the gap between the last that it followed and the first that it did not is halved.
const HALVINGS: usize = 4;
/// Runs at a rate until one counts.
const TRIES: usize = 3;
/// Steps after which a server that follows everything is left alone.
const STEPS_MAX: usize = 24;

/// What a server can do.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Peak {
    /// The highest rate, of those tried, that it followed; 0 where it followed none.
    pub rate: f64,
    /// The highest goodput at any rate.
    pub goodput: f64,
}

/// Looks for the peak of the first class from a rate on; `run` runs a load at a rate. A rate whose runs are void again and
/// again counts as not followed.
///
/// # Errors
/// Those of `run`.
pub fn find_peak(first: f64, mut run: impl FnMut(f64) -> Result<Report>) -> Result<Peak> {
    let mut peak = Peak { rate: 0.0, goodput: 0.0 };
    let mut follows = |rate: f64| -> Result<bool> {
        let mut report = run(rate)?;
        for _ in 1..TRIES {
            if report.void.is_some() {
                report = run(rate)?;
            }
        }
        if report.void.is_some() {
            return Ok(false);
        }
        let class = &report.classes[0];
        peak.goodput = peak.goodput.max(class.goodput);
        let follows = class.ok as f64 >= class.requests as f64 * FOLLOWED;
        if follows {
            peak.rate = peak.rate.max(rate);
        }
        Ok(follows)
    };
    let (mut followed, mut rate) = (0.0, first);
    let mut steps = 0;
    while steps < STEPS_MAX && follows(rate)? {
        followed = rate;
        rate *= STEP;
        steps += 1;
    }
    if steps < STEPS_MAX {
        let mut lost = rate;
        for _ in 0..HALVINGS {
            let middle = (followed + lost) / 2.0;
            if follows(middle)? {
                followed = middle;
            } else {
                lost = middle;
            }
        }
    }
    Ok(peak)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use super::*;
    use crate::bench::report::{ClassReport, End, Generator, Sample};

    /// A run against a server that answers `limit` requests a second and refuses the others.
    fn served(rate: f64, limit: f64, late_ms_p99: f64) -> Report {
        let good = |n: usize| (n as f64) < limit * 10.0;
        let sample = |n: usize| Sample {
            class: 0,
            end: End::Status(if good(n) { 200 } else { 503 }),
            latency: Duration::from_millis(1),
            in_time: true,
        };
        let samples: Vec<Sample> = (0..(rate * 10.0) as usize).map(sample).collect();
        let generator = Generator { cores: None, late_ms_p99, closed_by_server: 0 };
        Report::new(String::new(), 10.0, vec![ClassReport::of(0, "main", 10.0, &samples)], generator)
    }

    #[test]
    fn the_peak_is_found_from_below_and_from_above() {
        for (first, limit) in [(10.0, 480.0), (100.0, 103.0), (500.0, 480.0), (4000.0, 480.0)] {
            let peak = find_peak(first, |rate| Ok(served(rate, limit, 0.1))).unwrap();
            assert!(peak.rate <= limit / FOLLOWED && peak.rate >= limit * 0.9 - first / 16.0, "{first}: {peak:?}");
            assert!(peak.goodput <= limit && peak.goodput >= limit * 0.9, "{first}: {peak:?}");
        }
    }

    #[test]
    fn a_generator_that_falls_behind_ends_the_search() {
        let run = |rate: f64| Ok(served(rate, 1e9, if rate > 1000.0 { 50.0 } else { 0.1 }));
        let peak = find_peak(100.0, run).unwrap();
        assert!(peak.rate > 900.0 && peak.rate <= 1000.0, "{peak:?}");
    }
}
