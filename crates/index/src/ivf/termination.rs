//! Termination of filtered searches: estimates how many good items the unscanned lists still hold.
//!
//! The score of an item is modelled as a fraction of the score of its list's centroid plus a residual. The fraction is
//! mostly below 1: centroids are normalized, and the items of a list are closer to the origin. The residual scales with the
//! length of the query. The fraction and the distribution of residuals are measured with sample queries
//! ([`ResidualQuantiles`]). From the score of each unscanned list follows how many of its passing items are expected to beat
//! the results so far ([`UnscannedLists`]). Auncel (NSDI 2023) and Quake (OSDI 2025) also stop a search by the expected
//! remainder, but derive it from geometry; here the expectation is measured and calibrated.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use super::check_interval::CheckInterval;

/// Number of score ranges (bins) that lists are counted in.
const BINS: usize = 128;
/// If passing items are denser in the lists scanned last than in the unscanned ones, the filter correlates with the scores.
/// Passing items are then assumed to score well more often by the same ratio, up to this factor.
const CORRELATION_MAX: f64 = 3.0;
/// Added to the found and the expected number of good items before their ratio is taken, so small counts matter little.
const FOUND_MIN: f64 = 10.0;
/// Valid range of a slope.
const SLOPES: RangeInclusive<f32> = 0.0..=2.0;

/// Score-residual quantiles: distribution of item scores given the score of the list's centroid, for a query of length 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "SerializedQuantiles")]
pub struct ResidualQuantiles {
    /// Regression slope of item score on centroid score: `E[item] = slope * centroid`.
    slope: f32,
    /// Upper quantiles of the residual, ascending: a share `2^-n` of the items exceeds entry `n`.
    halvings: Vec<f32>,
}

/// Serialized form. Files of the first releases have no slope, which means a slope of 1.
#[derive(Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum SerializedQuantiles {
    Whole(Vec<f32>),
    Share { slope: f32, halvings: Vec<f32> },
}

impl From<SerializedQuantiles> for ResidualQuantiles {
    fn from(reported: SerializedQuantiles) -> Self {
        match reported {
            SerializedQuantiles::Whole(halvings) => ResidualQuantiles { slope: 1.0, halvings },
            SerializedQuantiles::Share { slope, halvings } => ResidualQuantiles { slope, halvings },
        }
    }
}

impl ResidualQuantiles {
    /// Computes the quantiles of a sample of (centroid score, item score) pairs, for queries of length 1.
    pub fn of(sample: &[(f32, f32)]) -> Self {
        /// Minimum number of samples above a quantile.
        const ABOVE_MIN: usize = 4;
        let slope = slope(sample);
        let mut margins: Vec<f32> = sample.iter().map(|(list, item)| item - slope * list).collect();
        margins.sort_unstable_by(|a, b| b.total_cmp(a));
        let shares = (0..).map(|n| margins.len() >> n).take_while(|&above| above >= ABOVE_MIN);
        ResidualQuantiles { slope, halvings: shares.map(|above| margins[above - 1]).collect() }
    }

    /// Validates quantiles read from a file.
    ///
    /// # Errors
    /// The expected values, as a text.
    pub fn check(&self) -> Result<(), String> {
        let fit = self.halvings.len() <= 64 && self.halvings.iter().all(|m| m.is_finite()) && self.halvings.is_sorted();
        match SLOPES.contains(&self.slope) {
            true if fit => Ok(()),
            true => Err("score-residual quantiles: expected at most 64 ascending numbers".into()),
            false => Err(format!(
                "score-residual quantiles: slope {}, expected {} to {}",
                self.slope,
                SLOPES.start(),
                SLOPES.end()
            )),
        }
    }

    /// Returns a cursor over the shares of items that exceed falling residuals.
    fn shares(&self) -> Shares<'_> {
        Shares { halvings: &self.halvings, place: self.halvings.len() }
    }
}

/// Accessors for the copy to a GPU.
#[cfg(feature = "cuda")]
impl ResidualQuantiles {
    /// Returns the regression slope of item score on centroid score.
    pub(super) fn slope(&self) -> f32 {
        self.slope
    }

    /// Returns the upper quantiles of the residual, ascending.
    pub(super) fn halvings(&self) -> &[f32] {
        &self.halvings
    }
}

/// Share of items that exceed a residual, for a sequence of falling residuals.
struct Shares<'a> {
    halvings: &'a [f32],
    /// Number of quantiles that are at most the residual.
    place: usize,
}

impl Shares<'_> {
    /// Returns the share of items with a larger residual; beyond the largest quantile it extrapolates the last decrease.
    fn above(&mut self, margin: f32) -> f64 {
        while self.place > 0 && self.halvings[self.place - 1] > margin {
            self.place -= 1;
        }
        let place = self.place;
        let [.., before, last] = *self.halvings else { return 0.5 };
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
        // Linear interpolation between two powers of two, which is cheaper than `exp2`.
        let complete = halvings.min(1000.0) as u64;
        f64::from_bits((1023 - complete) << 52) * (1.0 - f64::from(halvings.min(1000.0) - complete as f32) / 2.0)
    }
}

/// Computes the least-squares slope of item score on centroid score.
fn slope(sample: &[(f32, f32)]) -> f32 {
    let count = sample.len().max(1) as f64;
    let mean = |of: fn(&(f32, f32)) -> f32| sample.iter().map(|pair| f64::from(of(pair))).sum::<f64>() / count;
    let (list, item) = (mean(|pair| pair.0), mean(|pair| pair.1));
    let away = |pair: &(f32, f32)| (f64::from(pair.0) - list, f64::from(pair.1) - item);
    let squares: f64 = sample.iter().map(|pair| away(pair).0.powi(2)).sum();
    let products: f64 = sample.iter().map(|pair| away(pair).0 * away(pair).1).sum();
    let slope = (products / squares) as f32;
    // The slope is undefined if all lists of the sample have the same score.
    if slope.is_finite() { slope.clamp(*SLOPES.start(), *SLOPES.end()) } else { 1.0 }
}

/// Termination criterion of a filtered search whose probes were calibrated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ending<'a> {
    /// Score-residual quantiles of the index.
    pub margins: &'a ResidualQuantiles,
    /// Recall target: share of the best K0 to find. Unscanned lists must beat the score at this share of K0.
    pub recall: f64,
    /// Expected share of the best K0 that may remain in unscanned lists.
    pub left: f64,
}

impl Ending<'_> {
    /// Returns the rank among the best `k0` so far whose score unscanned lists must beat. At exactly the recall target, this is
    /// the score of the true K0-th best item.
    pub(super) fn found(&self, k0: usize) -> usize {
        ((k0 as f64 * self.recall).ceil() as usize).max(1)
    }

    /// Returns the gain at which a search continues regardless of the estimate: the number of items that the recall target allows
    /// to miss. The estimate rests on similar queries, whereas the gain is measured on this query.
    pub(super) fn gain_max(&self, k0: usize) -> usize {
        k0.saturating_sub(self.found(k0)).max(1)
    }
}

/// Unscanned lists of a search, binned by their scores.
#[derive(Clone, Debug, Default)]
pub struct UnscannedLists {
    /// Bins by score, each with its unscanned items and the passing items scanned.
    bins: Vec<Bin>,
    low: f32,
    step: f32,
    items: u64,
    /// Length of the query.
    scale: f32,
}

/// Lists within a range of scores.
#[derive(Clone, Copy, Debug, Default)]
struct Bin {
    /// Number of items in unscanned lists, and in lists scanned since the last check.
    ahead: u64,
    fresh: u64,
    /// Estimated passing items of the scanned lists: the pass rate between two checks is taken as equal for all lists.
    survivors: f64,
}

/// Passing items seen by a search so far.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Estimated number of passing items, scanned or not.
    pub passing: f64,
    /// Passing items that were scanned.
    pub survivors: u64,
    /// Scanned passing items that score above the threshold.
    pub above: u64,
    /// Pass rate in the lists scanned last.
    pub lately: f64,
}

impl UnscannedLists {
    /// Starts a query `[D]` with all lists unscanned; `lists` holds their scores and lengths.
    pub fn begin(&mut self, vector: &[f32], lists: impl Iterator<Item = (f32, u32)> + Clone) {
        let (mut low, mut high) = (f32::MAX, f32::MIN);
        for (score, _) in lists.clone() {
            low = if score < low { score } else { low };
            high = if score > high { score } else { high };
        }
        self.low = low;
        self.step = ((high - low) / BINS as f32).max(f32::MIN_POSITIVE);
        self.scale = vector.iter().map(|x| x * x).sum::<f32>().sqrt().max(f32::MIN_POSITIVE);
        self.items = 0;
        self.bins.clear();
        self.bins.resize(BINS, Bin::default());
        for (score, length) in lists {
            let bin = self.bin(score);
            self.bins[bin].ahead += u64::from(length);
            self.items += u64::from(length);
        }
    }

    /// Marks a list as scanned.
    pub fn take(&mut self, score: f32, length: u32) {
        let bin = self.bin(score);
        let bin = &mut self.bins[bin];
        bin.ahead = bin.ahead.saturating_sub(u64::from(length));
        bin.fresh += u64::from(length);
        self.items = self.items.saturating_sub(u64::from(length));
    }

    /// Records the pass rate of the lists scanned since the last check.
    pub fn passed(&mut self, lately: f64) {
        for bin in &mut self.bins {
            bin.survivors += bin.fresh as f64 * lately;
            bin.fresh = 0;
        }
    }

    /// Returns the expected number of passing items in unscanned lists that score above `threshold`.
    pub fn expected(&self, threshold: f32, seen: Seen, margins: &ResidualQuantiles) -> f64 {
        let density = (seen.passing - seen.survivors as f64).max(0.0) / self.items.max(1) as f64;
        let density = density.min(1.0);
        // If the filter selects a region of vectors that the search is in, the next lists resemble the last ones, and
        // their passing items score better than average.
        let kinship = (seen.lately / density.max(f64::MIN_POSITIVE)).clamp(1.0, CORRELATION_MAX);
        let (mut ahead, mut scanned) = (0.0, 0.0);
        let mut shares = margins.shares();
        for (n, bin) in self.bins.iter().enumerate().filter(|(_, bin)| bin.ahead > 0 || bin.survivors > 0.0) {
            let score = self.low + (n as f32 + 0.5) * self.step;
            let share = shares.above((threshold - margins.slope * score) / self.scale);
            ahead += bin.ahead as f64 * share;
            scanned += bin.survivors * share;
        }
        // A query in a dense region, with more good items than expected so far, will find more of them.
        let surprise = ((seen.above as f64 + FOUND_MIN) / (scanned + FOUND_MIN)).max(1.0);
        density.max(seen.lately) * kinship * surprise * ahead
    }

    fn bin(&self, score: f32) -> usize {
        (((score - self.low) / self.step) as usize).min(BINS - 1)
    }
}

/// Returns the number of scanned lists at which a search checks next, after a check at `done` of all `lists`. The interval grows
/// geometrically, but is capped at a share of all lists, so that a long search does not overshoot far.
pub fn next_check(done: usize, lists: usize, pace: CheckInterval) -> usize {
    let (growth, looks) = match pace {
        CheckInterval::Often => (1.25, 16),
        CheckInterval::Rare => (2.0, 4),
    };
    ((done as f64 * growth) as usize).min(done + lists / looks).max(done + 1)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn residual_quantiles_reproduce_their_input_shares() {
        let margins = ResidualQuantiles::of(&(0..1 << 16).map(|n| (0.0, n as f32)).collect::<Vec<_>>());
        margins.check().unwrap();
        assert_eq!(margins.slope, 1.0);
        for (margin, share) in
            [(-1.0, 1.0), (32_768.0, 0.5), (49_152.0, 0.25), (57_344.0, 0.125), (65_024.0, 1.0 / 128.0)]
        {
            let found = margins.shares().above(margin);
            assert!((found / share - 1.0).abs() < 0.01, "{margin}: {found}, expected {share}");
        }
        let shares: Vec<f64> = (0..200).map(|n| margins.shares().above(n as f32 * 500.0)).collect();
        let mut falling = margins.shares();
        assert!((0..200).rev().all(|n| falling.above(n as f32 * 500.0) == shares[n]));
        assert!(shares.is_sorted_by(|a, b| a >= b) && shares.iter().all(|s| (0.0..=1.0).contains(s)));
        // Without items nothing is known: one half is assumed.
        assert_eq!(ResidualQuantiles::of(&[(0.0, 1.0); 3]).shares().above(7.0), 0.5);
        for (slope, halvings) in [(1.0, vec![1.0, 0.5]), (1.0, vec![f32::NAN]), (f32::NAN, vec![]), (-0.1, vec![])] {
            assert!(ResidualQuantiles { slope, halvings }.check().is_err());
        }
    }

    #[test]
    fn residual_quantiles_recover_the_slope_of_item_scores() {
        // Items score three quarters of their list's score, and one item in four scores an eighth more.
        let pairs = (0..4096).map(|n| (n as f32 / 1024.0, 0.75 * (n as f32 / 1024.0) + f32::from(n % 4 == 0) / 8.0));
        let margins = ResidualQuantiles::of(&pairs.collect::<Vec<_>>());
        assert!((margins.slope - 0.75).abs() < 1e-3, "{margins:?}");
        for list in [0.0, 1.0, 4.0] {
            let share = |above: f32| margins.shares().above(0.75 * list + above - margins.slope * list);
            assert!(share(-0.1) == 1.0 && (share(0.06) - 0.25).abs() < 0.15 && share(0.2) < 0.01, "{margins:?}");
        }
        // Files written before slopes existed keep their meaning.
        let old: ResidualQuantiles = serde_json::from_str("[0.5,1.5]").unwrap();
        assert_eq!(old, ResidualQuantiles { slope: 1.0, halvings: vec![0.5, 1.5] });
        let text = serde_json::to_string(&margins).unwrap();
        assert_eq!(serde_json::from_str::<ResidualQuantiles>(&text).unwrap(), margins);
    }

    #[test]
    fn expected_gains_fall_with_scanned_lists_and_rise_with_passing_items() {
        let lists: Vec<(f32, u32)> = (0..500).map(|n| (1.0 - n as f32 / 250.0, 10 + n % 7)).collect();
        let margins = ResidualQuantiles::of(&(0..4096).map(|n| (0.0, n as f32 / 4096.0)).collect::<Vec<_>>());
        let mut ahead = UnscannedLists::default();
        ahead.begin(&[0.6, 0.8], lists.iter().copied());
        let seen = Seen { passing: 1000.0, survivors: 0, above: 0, lately: 0.0 };
        let mut last = ahead.expected(0.9, seen, &margins);
        assert!(last > 100.0 && last <= 1000.0, "{last}");
        assert!(ahead.expected(1.4, seen, &margins) < last);
        assert!(ahead.expected(0.9, Seen { survivors: 500, ..seen }, &margins) < last);
        assert!(ahead.expected(0.9, Seen { lately: 1.0, ..seen }, &margins) > last);
        assert!(ahead.expected(0.9, Seen { above: 50, ..seen }, &margins) > last);
        // The unscanned lists are as dense as the last ones, so each scanned list reduces the expectation.
        let seen = Seen { passing: 0.0, survivors: 0, above: 0, lately: 0.3 };
        last = ahead.expected(0.9, seen, &margins);
        for (score, length) in lists {
            ahead.take(score, length);
            ahead.passed(0.0);
            let now = ahead.expected(0.9, seen, &margins);
            assert!(now <= last);
            last = now;
        }
        assert_eq!(last, 0.0);
    }

    #[test]
    fn the_gain_limit_is_the_number_of_results_that_may_be_missed() {
        let margins = ResidualQuantiles::of(&[]);
        let of = |recall, k0| Ending { margins: &margins, recall, left: 0.0 }.gain_max(k0);
        assert_eq!([of(0.98, 1000), of(0.98, 100), of(0.95, 100), of(0.5, 3)], [20, 2, 5, 1]);
        // If no item may be missed, or none is wanted, a gain of one is enough.
        assert_eq!([of(0.98, 10), of(1.0, 1000), of(0.98, 1), of(0.98, 0)], [1; 4]);
    }

    #[test]
    fn termination_checks_become_rarer_up_to_a_bound() {
        let looks: Vec<usize> =
            std::iter::successors(Some(1), |n| Some(next_check(*n, 3200, CheckInterval::Often))).take(60).collect();
        assert!(looks.is_sorted_by(|a, b| a < b) && looks[3] == 4 && looks[59] > 3200, "{looks:?}");
        assert!(looks.windows(2).all(|pair| pair[1] - pair[0] <= 200), "{looks:?}");
    }
}
