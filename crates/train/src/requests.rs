//! A sample of the requests that events belong to: `publish` calibrates the trained model with them.
//!
//! The requests of the first events fill a reservoir. The request of the `n`-th event replaces a random entry with probability
//! `REQUESTS_MAX / n`, as in a uniform sample, but never less than `REQUESTS_MAX / RECENT_EVENTS`. So entries are on average
//! `RECENT_EVENTS` events old at most, however long the input is (biased reservoir sampling, Aggarwal 2006).

use std::collections::BTreeMap;

use serde::Serialize;

use crate::step_random::StepRandom;
use sterling_api::WrittenValues;
use sterling_core::error::{Error, Result};
use sterling_core::request::{Features, Values};
use sterling_graph::tower::FeatureSpec;

/// Number of sampled requests: the maximum that `publish` uses for calibration.
const REQUESTS_MAX: usize = 256;
/// Number of events over which the sample is uniform; beyond it is biased to recent ones.
const RECENT_EVENTS: u64 = 10_000;

/// A sample of requests.
#[derive(Debug)]
pub(crate) struct RequestSample {
    draws: StepRandom,
    /// Number of events offered.
    offered: u64,
    lines: Vec<String>,
    /// Pairs of a feature and an id that the feature of a sampled request must not contain.
    forgotten: Vec<(String, i64)>,
}

/// A `:retrieve` body.
#[derive(Serialize)]
struct Body<'a> {
    features: BTreeMap<&'a str, WrittenValues<'a>>,
    #[serde(skip_serializing_if = "<[i64]>::is_empty")]
    exclude: &'a [i64],
}

impl RequestSample {
    /// Creates an empty sample. Requests with a `forgotten` id of a table in one of the `features` that look it up are left out.
    pub(crate) fn new(seed: u64, forgotten: &[(String, i64)], features: &[FeatureSpec]) -> Self {
        let of_table = |(table, id): &(String, i64)| {
            let readers = features.iter().filter(|feature| feature.table.as_ref() == Some(table));
            readers.map(|feature| (feature.source().to_owned(), *id)).collect::<Vec<_>>()
        };
        RequestSample {
            // This seed differs from those of the steps, of shuffling and of sampled negatives.
            draws: StepRandom::new(seed.rotate_left(16), 0),
            offered: 0,
            lines: Vec::new(),
            forgotten: forgotten.iter().flat_map(of_table).collect(),
        }
    }

    /// Returns the request of the next event and its entry, if it is sampled. The event counts once it is [added](Self::add).
    pub(crate) fn draw(&self, features: &Features, exclude: &[i64]) -> Result<Option<(usize, String)>> {
        let number = self.offered;
        let entry = if self.lines.len() < REQUESTS_MAX {
            self.lines.len()
        } else {
            self.draws.below(number, (number + 1).min(RECENT_EVENTS)) as usize
        };
        let holds = |(feature, id): &(String, i64)| match features.get(feature) {
            Some(Values::Integers(ids) | Values::Weighted { ids, .. }) => ids.contains(id),
            _ => false,
        };
        if entry >= REQUESTS_MAX || self.forgotten.iter().any(holds) {
            return Ok(None);
        }
        let features = features.iter().map(|(name, values)| (name.as_str(), values.into())).collect();
        let line = serde_json::to_string(&Body { features, exclude });
        line.map(|line| Some((entry, line))).map_err(|e| Error::internal(format!("sample request: {e}")))
    }

    /// Counts an event, and adds its request if it was sampled.
    pub(crate) fn add(&mut self, drawn: Option<(usize, String)>) {
        self.offered += 1;
        match drawn {
            Some((entry, line)) if entry < self.lines.len() => self.lines[entry] = line,
            Some((_, line)) => self.lines.push(line),
            None => {}
        }
    }

    /// Returns the text of a file of requests: the sample, filled up with lines of an `earlier` file. If ids are
    /// forgotten, earlier lines are left out, because they may contain these ids.
    pub(crate) fn text(&self, earlier: &str) -> String {
        let earlier = earlier.lines().filter(|_| self.forgotten.is_empty());
        let lines = self.lines.iter().map(String::as_str).chain(earlier).take(REQUESTS_MAX);
        lines.flat_map(|line| [line, "\n"]).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn ids(id: u64) -> Features {
        Features::from([("ids".to_owned(), Values::Integers(vec![id as i64]))])
    }

    /// Returns the ids of a sample of `count` events.
    fn sampled(seed: u64, count: u64) -> Vec<u64> {
        let mut sample = RequestSample::new(seed, &[], &[]);
        for id in 0..count {
            let drawn = sample.draw(&ids(id), &[]).unwrap();
            sample.add(drawn);
        }
        let id = |line: &String| line.trim_matches(|c: char| !c.is_ascii_digit()).parse().unwrap();
        sample.lines.iter().map(id).collect()
    }

    #[test]
    fn a_sample_is_bounded_recent_and_repeatable() {
        assert_eq!(sampled(1, 100), (0..100).collect::<Vec<u64>>());
        for count in [256, 5_000, 100_000] {
            let ids = sampled(7, count);
            assert_eq!(ids.len(), REQUESTS_MAX);
            let distinct: std::collections::BTreeSet<u64> = ids.iter().copied().collect();
            assert_eq!(distinct.len(), REQUESTS_MAX, "an event is sampled once");
            // The standard deviation of the mean is a sixteenth of that of one age, which is at most RECENT_EVENTS.
            let age = ids.iter().map(|id| (count - id) as f64).sum::<f64>() / REQUESTS_MAX as f64;
            let expected = (count as f64 / 2.0).min(RECENT_EVENTS as f64);
            assert!((age - expected).abs() < 0.25 * RECENT_EVENTS as f64, "{count} events: mean age {age}");
            assert_eq!(ids, sampled(7, count));
            assert!(count == 256 || ids != sampled(8, count));
        }
    }

    #[test]
    fn bodies_are_read_back_as_the_same_request() {
        let features = Features::from([
            ("ids".to_owned(), Values::Integers(vec![i64::MIN, 7])),
            ("dense".to_owned(), Values::Numbers(vec![1.0, 0.1, -3e-9])),
            ("text".to_owned(), Values::Texts(vec!["a \"b\"\n".to_owned()])),
            ("bag".to_owned(), Values::Weighted { ids: vec![3], weights: vec![0.25] }),
        ]);
        let sample = RequestSample::new(1, &[], &[]);
        for exclude in [vec![], vec![4, -5]] {
            let (_, line) = sample.draw(&features, &exclude).unwrap().unwrap();
            assert!(!line.contains('\n'), "{line}");
            let sterling_api::Retrievals::One(read, ..) = sterling_api::retrievals(line.as_bytes()).unwrap() else {
                panic!("{line}")
            };
            assert_eq!(read.user, sterling_core::request::User::Features(features.clone()));
            assert_eq!(read.exclude.iter().map(|id| id.0).collect::<Vec<i64>>(), exclude);
        }
    }

    #[test]
    fn earlier_requests_fill_a_short_sample_up() {
        let mut sample = RequestSample::new(1, &[], &[]);
        let drawn = sample.draw(&ids(5), &[]).unwrap();
        sample.add(drawn);
        let own = "{\"features\":{\"ids\":[5]}}\n".to_owned();
        assert_eq!(sample.text(""), own);
        assert_eq!(sample.text("{\"vector\": [1]}"), own.clone() + "{\"vector\": [1]}\n");
        assert_eq!(sample.text(&"old\n".repeat(300)).lines().count(), REQUESTS_MAX);
        sample.forgotten.push(("ids".into(), 6));
        assert_eq!(sample.text("old\n"), own, "earlier lines may hold a forgotten id");
        sample.forgotten[0].1 = 5;
        assert_eq!(sample.draw(&ids(5), &[]).unwrap(), None);
    }
}
