//! What lists that were not scanned may still hold: when a filtered search may end.
//!
//! An item scores above the product of its list's centroid by a margin that depends on the query's length and on chance. How
//! margins spread was measured with sample queries ([`Margins`]). So each list ahead tells, by its score, how many of its
//! survivors may be expected to beat the K0-th best so far ([`Ahead`]). The idea of ending a search by what is expected ahead
//! is that of Auncel (NSDI 2023) and Quake (OSDI 2025), which take it from geometry; here it is measured, and calibrated.

use serde::{Deserialize, Serialize};

use super::pace::Pace;

/// Score ranges that lists are counted in.
const BINS: usize = 128;
/// Lists just scanned that hold so many times the survivors of those ahead, on average, tell more of the next ones.
const NEIGHBOURS_MIN: f64 = 2.0;

/// How far items score above their list's centroid, for a query of length 1: a number for each halving of the share of items
/// that lie above it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Margins {
    /// Ascending: the n-th is exceeded by a share `2^-n` of the items.
    halvings: Vec<f32>,
}

impl Margins {
    /// The margins of a sample of items and queries.
    pub fn of(mut sample: Vec<f32>) -> Self {
        /// Fewer items above a number do not tell their share.
        const ABOVE_MIN: usize = 4;
        sample.sort_unstable_by(|a, b| b.total_cmp(a));
        let shares = (0..).map(|n| sample.len() >> n).take_while(|&above| above >= ABOVE_MIN);
        Margins { halvings: shares.map(|above| sample[above - 1]).collect() }
    }

    /// The numbers, rising.
    pub(super) fn halvings(&self) -> &[f32] {
        &self.halvings
    }

    /// What is wrong with margins that come from a file.
    ///
    /// # Errors
    /// What was expected.
    pub fn check(&self) -> Result<(), String> {
        let fit = self.halvings.len() <= 64 && self.halvings.iter().all(|m| m.is_finite()) && self.halvings.is_sorted();
        if fit { Ok(()) } else { Err("margins: expected at most 64 numbers, rising".into()) }
    }

    /// The share of items with a larger margin; beyond the measured ones their number falls on as it fell last.
    pub fn share_above(&self, margin: f32) -> f64 {
        let place = self.halvings.partition_point(|m| *m <= margin);
        let [.., before, last] = self.halvings[..] else { return 0.5 };
        let halvings = match place {
            0 => return 1.0,
            _ if place == self.halvings.len() => {
                (place - 1) as f32 + (margin - last) / (last - before).max(f32::MIN_POSITIVE)
            }
            _ => {
                let (from, to) = (self.halvings[place - 1], self.halvings[place]);
                (place - 1) as f32 + (margin - from) / (to - from).max(f32::MIN_POSITIVE)
            }
        };
        f64::from(-halvings).exp2()
    }
}

/// When a filtered search of measured probes ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ending<'a> {
    /// How far items score above their lists.
    pub margins: &'a Margins,
    /// Of the best K0, the share that may be expected ahead.
    pub left: f64,
}

/// The lists that a search has not scanned, by their scores.
#[derive(Clone, Debug, Default)]
pub struct Ahead {
    /// Items of the lists in each range of scores.
    bins: Vec<u64>,
    low: f32,
    step: f32,
    items: u64,
    /// The query's length.
    scale: f32,
}

/// What a search has seen of the items that pass.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Items that pass, scanned or not: an estimate.
    pub passing: f64,
    /// Those that were scanned.
    pub survivors: u64,
    /// The share of items that passed in the lists scanned last.
    pub lately: f64,
}

impl Ahead {
    /// All lists are ahead of a query `[D]`: those of the given scores and lengths.
    pub fn begin(&mut self, vector: &[f32], lists: impl Iterator<Item = (f32, u32)> + Clone) {
        let (low, high) =
            lists.clone().fold((f32::MAX, f32::MIN), |(low, high), (score, _)| (low.min(score), high.max(score)));
        self.low = low;
        self.step = ((high - low) / BINS as f32).max(f32::MIN_POSITIVE);
        self.scale = vector.iter().map(|x| x * x).sum::<f32>().sqrt().max(f32::MIN_POSITIVE);
        self.items = 0;
        self.bins.clear();
        self.bins.resize(BINS, 0);
        for (score, length) in lists {
            let bin = self.bin(score);
            self.bins[bin] += u64::from(length);
            self.items += u64::from(length);
        }
    }

    /// A list is scanned.
    pub fn take(&mut self, score: f32, length: u32) {
        let bin = self.bin(score);
        self.bins[bin] = self.bins[bin].saturating_sub(u64::from(length));
        self.items = self.items.saturating_sub(u64::from(length));
    }

    /// How many items that pass are expected ahead with a score above `threshold`.
    pub fn expected(&self, threshold: f32, seen: Seen, margins: &Margins) -> f64 {
        let density = (seen.passing - seen.survivors as f64).max(0.0) / self.items.max(1) as f64;
        // Where the filter keeps to a region and the search is in it, the next lists are as those before.
        let density = if seen.lately > NEIGHBOURS_MIN * density { seen.lately } else { density.min(1.0) };
        let bins = self.bins.iter().enumerate().filter(|(_, items)| **items > 0);
        let above = bins.map(|(n, items)| {
            let score = self.low + (n as f32 + 0.5) * self.step;
            *items as f64 * margins.share_above((threshold - score) / self.scale)
        });
        density * above.sum::<f64>()
    }

    fn bin(&self, score: f32) -> usize {
        (((score - self.low) / self.step) as usize).min(BINS - 1)
    }
}

/// After how many of all `lists` a search looks ahead next that did so after `done` of them: when its lists have grown by a
/// share, or by so many of all that one from afar does not go on for long where it could end.
pub fn next_look(done: usize, lists: usize, pace: Pace) -> usize {
    let (growth, looks) = match pace {
        Pace::Often => (1.25, 32),
        Pace::Rare => (2.0, 4),
    };
    ((done as f64 * growth) as usize).min(done + lists / looks).max(done + 1)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn margins_tell_the_shares_that_they_were_made_of() {
        let margins = Margins::of((0..1 << 16).map(|n| n as f32).collect());
        margins.check().unwrap();
        for (margin, share) in
            [(-1.0, 1.0), (32_768.0, 0.5), (49_152.0, 0.25), (57_344.0, 0.125), (65_024.0, 1.0 / 128.0)]
        {
            let found = margins.share_above(margin);
            assert!((found / share - 1.0).abs() < 0.01, "{margin}: {found}, expected {share}");
        }
        let shares: Vec<f64> = (0..200).map(|n| margins.share_above(n as f32 * 500.0)).collect();
        assert!(shares.is_sorted_by(|a, b| a >= b) && shares.iter().all(|s| (0.0..=1.0).contains(s)));
        // Nothing is known of no items: half of them may lie anywhere.
        assert_eq!(Margins::of(vec![1.0; 3]).share_above(7.0), 0.5);
        assert!(Margins { halvings: vec![1.0, 0.5] }.check().is_err());
        assert!(Margins { halvings: vec![f32::NAN] }.check().is_err());
    }

    #[test]
    fn what_is_ahead_falls_as_lists_are_scanned_and_rises_with_those_that_pass() {
        let lists: Vec<(f32, u32)> = (0..500).map(|n| (1.0 - n as f32 / 250.0, 10 + n % 7)).collect();
        let margins = Margins::of((0..4096).map(|n| n as f32 / 4096.0).collect());
        let mut ahead = Ahead::default();
        ahead.begin(&[0.6, 0.8], lists.iter().copied());
        let seen = Seen { passing: 1000.0, survivors: 0, lately: 0.0 };
        let mut last = ahead.expected(0.9, seen, &margins);
        assert!(last > 100.0 && last <= 1000.0, "{last}");
        assert!(ahead.expected(1.4, seen, &margins) < last);
        assert!(ahead.expected(0.9, Seen { survivors: 500, ..seen }, &margins) < last);
        assert!(ahead.expected(0.9, Seen { lately: 1.0, ..seen }, &margins) > last);
        // What is ahead is as dense as what was seen lately: then each list that is scanned leaves less.
        let seen = Seen { passing: 0.0, survivors: 0, lately: 0.3 };
        last = ahead.expected(0.9, seen, &margins);
        for (score, length) in lists {
            ahead.take(score, length);
            let now = ahead.expected(0.9, seen, &margins);
            assert!(now <= last);
            last = now;
        }
        assert_eq!(last, 0.0);
    }

    #[test]
    fn looks_are_rarer_the_longer_a_search_goes_on_but_never_rare() {
        let looks: Vec<usize> =
            std::iter::successors(Some(1), |n| Some(next_look(*n, 3200, Pace::Often))).take(60).collect();
        assert!(looks.is_sorted_by(|a, b| a < b) && looks[3] == 4 && looks[59] > 3200, "{looks:?}");
        assert!(looks.windows(2).all(|pair| pair[1] - pair[0] <= 100), "{looks:?}");
    }
}
