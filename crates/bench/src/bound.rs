//! Bound on a latency quantile, and the test whether a run proves it: the rule of MLPerf's Server scenario.
//!
//! If 99 % of the observed queries were in time, fewer of all queries may be. MLPerf's LoadGen
//! (`loadgen/early_stopping.cc`; Reddi et al., MLPerf Inference Benchmark, arXiv 1911.02549, section VI) requires more:
//! if exactly a fraction `q` of all queries were in time, at most one of a hundred runs may have this few late queries
//! by chance. The number of late queries among `n` is then binomial with probability `1 - q`. A p99 needs 459 queries
//! if no query is late, and 662 if one is.

use std::fmt;

use serde::Serialize;

/// Confidence with which a run must prove the bound.
pub(super) const CONFIDENCE: f64 = 0.99;

/// A bound on a latency quantile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// Latency bound in milliseconds; only answers with status 200 within it are in time.
    pub latency_ms: f64,
    /// Share of all requests that must be in time, above 0 and below 1.
    pub quantile: f64,
}

impl Bound {
    /// Returns the maximum number of queries over the bound that still proves the bound in a run of `queries`; `None`
    /// if the run is too short for a proof.
    pub fn over_max(&self, queries: u64) -> Option<u64> {
        let (late, n) = (1.0 - self.quantile, queries as f64);
        // Computed in logarithms, because the probability that none of a million queries is late underflows f64.
        let mut chance = n * self.quantile.ln();
        let mut sum = chance.exp();
        let mut over_max = None;
        for over in 0..=queries {
            if sum > 1.0 - CONFIDENCE {
                break;
            }
            over_max = Some(over);
            let k = over as f64;
            chance += ((n - k) / (k + 1.0) * late / self.quantile).ln();
            sum += chance.exp();
        }
        over_max
    }

    /// Returns the smallest number of queries that can prove the bound.
    pub fn queries_min(&self) -> u64 {
        ((1.0 - CONFIDENCE).ln() / self.quantile.ln()).ceil() as u64
    }

    /// Evaluates a run; `void` is the reason why the run is invalid, if it is.
    pub(super) fn judge(&self, seen: &Seen, void: Option<&str>) -> ServerResult {
        let queries = seen.queries;
        let over = queries.saturating_sub(seen.within);
        let over_max = self.over_max(queries);
        let mut reasons: Vec<String> = void.map(str::to_owned).into_iter().collect();
        match over_max {
            None => reasons.push(format!("{queries} queries in the run, expected at least {}", self.queries_min())),
            Some(most) if over > most => {
                reasons.push(format!("{over} of {queries} queries over the bound, expected at most {most}"));
            }
            Some(_) => {}
        }
        ServerResult {
            scenario: "Server",
            result: if reasons.is_empty() { "VALID" } else { "INVALID" },
            scheduled_samples_per_second: seen.scheduled_per_second,
            completed_samples_per_second: seen.completed_per_second,
            target_latency_ms: self.latency_ms,
            target_latency_percentile: self.quantile * 100.0,
            queries,
            overlatency_queries: over,
            overlatency_queries_max: over_max,
            early_stopping_confidence: CONFIDENCE,
            reasons,
        }
    }
}

/// Measurements of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    /// Scheduled queries.
    pub(super) queries: u64,
    /// Queries answered with status 200 within the bound.
    pub(super) within: u64,
    /// Scheduled samples per second.
    pub(super) scheduled_per_second: f64,
    /// Samples answered with status 200 per second.
    pub(super) completed_per_second: f64,
}

/// Result of a run in the terms of MLPerf's Server scenario. Queries are calls, samples are users: a call with a list of users is
/// one query of several samples.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ServerResult {
    /// `Server`.
    pub scenario: &'static str,
    /// `VALID` or `INVALID`.
    pub result: &'static str,
    /// Scheduled samples per second.
    pub scheduled_samples_per_second: f64,
    /// Samples answered with status 200 per second, at any latency.
    pub completed_samples_per_second: f64,
    /// Latency bound in milliseconds.
    pub target_latency_ms: f64,
    /// Percentile to which the bound applies.
    pub target_latency_percentile: f64,
    /// Number of queries sent.
    pub queries: u64,
    /// Queries not answered with status 200 within the bound.
    pub overlatency_queries: u64,
    /// Maximum of `overlatency_queries` under the rule; absent if there are too few queries.
    pub overlatency_queries_max: Option<u64>,
    /// Confidence of the rule.
    pub early_stopping_confidence: f64,
    /// Reasons why the result is invalid.
    pub reasons: Vec<String>,
}

impl ServerResult {
    /// Returns whether the run proves the bound.
    pub fn is_valid(&self) -> bool {
        self.reasons.is_empty()
    }
}

impl fmt::Display for ServerResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ServerResult { scenario, result, scheduled_samples_per_second: scheduled, queries, .. } = self;
        let (percentile, latency_ms) = (self.target_latency_percentile, self.target_latency_ms);
        let (completed, over) = (self.completed_samples_per_second, self.overlatency_queries);
        write!(
            f,
            "{scenario}: {result}  scheduled {scheduled:.1}/s, completed {completed:.1}/s, p{percentile} at most {latency_ms} ms: \
             {over} of {queries} queries over it"
        )?;
        if let Some(most) = self.overlatency_queries_max {
            write!(f, ", expected at most {most}")?;
        }
        self.reasons.iter().try_for_each(|reason| write!(f, "\n  {reason}"))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn bound(quantile: f64) -> Bound {
        Bound { latency_ms: 10.0, quantile }
    }

    /// Returns the probability of at most `over` events in `queries` trials, by repeated convolution.
    fn tail(queries: u64, over: u64, each: f64) -> f64 {
        let mut chances = vec![0.0; queries as usize + 1];
        chances[0] = 1.0;
        for _ in 0..queries {
            for k in (0..chances.len()).rev() {
                chances[k] = chances[k] * (1.0 - each) + if k > 0 { chances[k - 1] * each } else { 0.0 };
            }
        }
        chances.iter().take(over as usize + 1).sum()
    }

    #[test]
    fn the_fewest_queries_are_those_of_loadgen() {
        // LoadGen's tables have 459 and 662 for a p99, and 44 and 64 for a p90.
        for (quantile, none, one) in [(0.99, 459, 662), (0.9, 44, 64)] {
            let bound = bound(quantile);
            assert_eq!(bound.queries_min(), none);
            assert_eq!((bound.over_max(none - 1), bound.over_max(none)), (None, Some(0)));
            assert_eq!((bound.over_max(one - 1), bound.over_max(one)), (Some(0), Some(1)));
        }
    }

    #[test]
    fn bounds_pass_at_the_stated_confidence() {
        for quantile in [0.5, 0.9, 0.97] {
            for queries in [bound(quantile).queries_min(), 200, 333, 700] {
                let Some(most) = bound(quantile).over_max(queries) else { continue };
                assert!(tail(queries, most, 1.0 - quantile) <= 0.01 + 1e-9, "{quantile} {queries}: {most}");
                assert!(tail(queries, most + 1, 1.0 - quantile) > 0.01 - 1e-9, "{quantile} {queries}: {most}");
            }
        }
        // For very many queries, almost the permitted share (1 %) may be over the bound: 1 % less 2.33 standard
        // deviations.
        let most = bound(0.99).over_max(100_000_000).unwrap() as f64;
        assert!((most - (1e6 - 2.326 * 9.95e5f64.sqrt())).abs() < 30.0, "{most}");
    }

    #[test]
    fn runs_are_valid_if_long_enough_in_time_and_not_void() {
        for (queries, within, void, reason) in [
            (662, 661, None, None),
            (662, 660, None, Some("2 of 662 queries over the bound, expected at most 1")),
            (458, 458, None, Some("458 queries in the run, expected at least 459")),
            (0, 0, None, Some("0 queries")),
            (662, 662, Some("late"), Some("late")),
        ] {
            let found = bound(0.99).judge(&Seen { queries, within, ..Seen::default() }, void);
            assert_eq!((found.is_valid(), found.result == "VALID"), (reason.is_none(), reason.is_none()), "{found:?}");
            assert!(reason.is_none_or(|reason| found.reasons[0].contains(reason)), "{found:?}");
        }
    }
}
