//! Search for the highest rate that a server sustains.

use super::interleaved::counted;
use super::report::Report;
use sterling_core::error::Result;

/// Without a latency bound, a rate is sustained if this fraction of its requests is answered in time.
const FOLLOWED: f64 = 0.99;
/// Factor from one rate to the next while the server sustains the rates.
const STEP: f64 = 1.5;
/// Number of bisections between the last sustained and the first failed rate.
const HALVINGS: usize = 4;
/// Maximum number of steps for a server that sustains every rate.
const STEPS_MAX: usize = 24;

/// Capacity of a server.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct Peak {
    /// Highest tested rate that the server sustained; 0 if it sustained no rate.
    pub rate: f64,
    /// Highest goodput at any rate.
    pub goodput: f64,
    /// Run at the highest sustained rate.
    #[serde(skip)]
    pub report: Option<Report>,
    /// Reason why the runs at the lowest rate above `rate` were void; the server may then sustain more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub void: Option<String>,
}

impl Peak {
    /// Adds a run at a rate; returns whether the server sustained it.
    fn follows(&mut self, rate: f64, report: Report) -> bool {
        if let Some(reason) = &report.void {
            self.void = Some(format!("at {rate:.1} requests per second {reason}"));
            return false;
        }
        let class = &report.classes[0];
        self.goodput = self.goodput.max(class.goodput);
        let follows = match &report.server {
            Some(server) => server.is_valid(),
            None => class.ok as f64 >= class.requests as f64 * FOLLOWED,
        };
        if !follows {
            // A failed rate is lower than all failed rates before it, whose reasons no longer matter.
            self.void = None;
        } else if rate > self.rate {
            (self.rate, self.report) = (rate, Some(report));
        }
        follows
    }
}

/// Searches the peak rate of the first class of requests, starting at `first`; `run` runs the load at a rate. With a
/// latency bound, a rate is sustained if its run is valid. A rate whose runs are repeatedly void counts as not
/// sustained; if such a rate bounds the peak, the peak contains the reason.
///
/// # Errors
/// Errors of `run`.
pub fn find_peak(first: f64, mut run: impl FnMut(f64) -> Result<Report>) -> Result<Peak> {
    let mut peak = Peak::default();
    let mut follows = |rate: f64| Ok::<_, sterling_core::error::Error>(peak.follows(rate, counted(|| run(rate))?));
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
    use crate::bound::Bound;
    use crate::client::End;
    use crate::report::{Generator, Sample, Tally};

    /// Returns the report of a server that answers `limit` requests per second in a millisecond and rejects the others.
    fn served(rate: f64, limit: f64, late_ms_p99: f64, bound: Option<Bound>) -> Report {
        let good = |n: usize| (n as f64) < limit * 10.0;
        let mut tally = Tally::new("main", 1, bound);
        for n in 0..(rate * 10.0) as usize {
            let end = End::Status(if good(n) { 200 } else { 503 });
            tally.record(&Sample { class: 0, end, latency: Duration::from_millis(1), in_time: true });
        }
        let generator = Generator { cores: None, late_ms_p99, closed_by_server: 0 };
        Report::new(String::new(), 10.0, vec![tally.report(10.0)], generator, bound)
    }

    #[test]
    fn the_peak_is_found_from_below_and_from_above() {
        for (first, limit) in [(10.0, 480.0), (100.0, 103.0), (500.0, 480.0), (4000.0, 480.0)] {
            let peak = find_peak(first, |rate| Ok(served(rate, limit, 0.1, None))).unwrap();
            assert!(peak.rate <= limit / FOLLOWED && peak.rate >= limit * 0.9 - first / 16.0, "{first}: {peak:?}");
            assert!(peak.goodput <= limit && peak.goodput >= limit * 0.9, "{first}: {peak:?}");
            assert_eq!(peak.report.unwrap().classes[0].rate, (peak.rate * 10.0).floor() / 10.0);
        }
    }

    #[test]
    fn the_search_follows_the_rate_within_a_latency_bound() {
        let bound = |latency_ms| Some(Bound { latency_ms, quantile: 0.9 });
        let of = |bound| find_peak(100.0, |rate| Ok(served(rate, 480.0, 0.1, bound))).unwrap();
        // A bound on the 90 % quantile permits the server to reject one request in ten, less a statistical margin.
        let peak = of(bound(2.0));
        assert!(peak.rate > 480.0 && peak.rate < 480.0 / 0.9, "{peak:?}");
        assert!(peak.report.unwrap().server.unwrap().is_valid());
        let none = of(bound(0.5));
        assert_eq!((none.rate, none.report), (0.0, None));
    }

    #[test]
    fn a_generator_that_falls_behind_ends_the_search() {
        let run = |rate: f64| Ok(served(rate, 1e9, if rate > 1000.0 { 50.0 } else { 0.1 }, None));
        let peak = find_peak(100.0, run).unwrap();
        assert!(peak.rate > 900.0 && peak.rate <= 1000.0, "{peak:?}");
        assert!(peak.void.unwrap().contains("requests per second the generator fell behind"));
        // The server's own limit is below the generator's.
        let run = |rate: f64| Ok(served(rate, 480.0, if rate > 1000.0 { 50.0 } else { 0.1 }, None));
        assert_eq!(find_peak(400.0, run).unwrap().void, None);
        let all = find_peak(100.0, |rate| Ok(served(rate, 480.0, 50.0, None))).unwrap();
        assert!(all.rate == 0.0 && all.void.is_some(), "{all:?}");
    }
}
