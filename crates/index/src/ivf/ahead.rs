//! What lists that were not scanned may still hold: when a filtered search may end.
//!
//! An item scores about as its list's centroid does: a share of that score, for a list's items lie closer to the middle than its
//! centroid of full length, and a margin that depends on the query's length and on chance. The share and how margins spread were
//! measured with sample queries ([`Margins`]). So each list ahead tells, by its score, how many of its survivors may be expected
//! to beat what was found ([`Ahead`]). The idea of ending a search by what is expected ahead
//! is that of Auncel (NSDI 2023) and Quake (OSDI 2025), which take it from geometry; here it is measured, and calibrated.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use super::pace::Pace;

/// Score ranges that lists are counted in.
const BINS: usize = 128;
/// Lists just scanned that hold more survivors than those ahead, on average, tell of a filter that goes with the scores: its
/// survivors are then as many times likelier to score well, at most these.
const KINSHIP_MAX: f64 = 3.0;
/// Survivors that were found to score well beyond those expected count from so many on.
const FOUND_MIN: f64 = 10.0;
/// What a slope may be.
const SLOPES: RangeInclusive<f32> = 0.0..=2.0;

/// How items score where their list's centroid is known, for a query of length 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "Told")]
pub struct Margins {
    /// What of the centroid's score an item may be expected to have.
    slope: f32,
    /// How far items score above that, ascending: the n-th is exceeded by a share `2^-n` of the items.
    halvings: Vec<f32>,
}

/// Margins as files hold them: those written first were of the whole score of a centroid.
#[derive(Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum Told {
    Whole(Vec<f32>),
    Share { slope: f32, halvings: Vec<f32> },
}

impl From<Told> for Margins {
    fn from(told: Told) -> Self {
        match told {
            Told::Whole(halvings) => Margins { slope: 1.0, halvings },
            Told::Share { slope, halvings } => Margins { slope, halvings },
        }
    }
}

impl Margins {
    /// The margins of a sample of items and queries: the score of each item's list and its own, for queries of length 1.
    pub fn of(sample: &[(f32, f32)]) -> Self {
        /// Fewer items above a number do not tell their share.
        const ABOVE_MIN: usize = 4;
        let slope = slope(sample);
        let mut margins: Vec<f32> = sample.iter().map(|(list, item)| item - slope * list).collect();
        margins.sort_unstable_by(|a, b| b.total_cmp(a));
        let shares = (0..).map(|n| margins.len() >> n).take_while(|&above| above >= ABOVE_MIN);
        Margins { slope, halvings: shares.map(|above| margins[above - 1]).collect() }
    }

    /// What is wrong with margins that come from a file.
    ///
    /// # Errors
    /// What was expected.
    pub fn check(&self) -> Result<(), String> {
        let fit = self.halvings.len() <= 64 && self.halvings.iter().all(|m| m.is_finite()) && self.halvings.is_sorted();
        match SLOPES.contains(&self.slope) {
            true if fit => Ok(()),
            true => Err("margins: expected at most 64 numbers, rising".into()),
            false => Err(format!("margins: slope {}, expected {} to {}", self.slope, SLOPES.start(), SLOPES.end())),
        }
    }

    /// The shares of items with larger margins, of margins that fall.
    fn shares(&self) -> Shares<'_> {
        Shares { halvings: &self.halvings, place: self.halvings.len() }
    }
}

/// What a GPU reads of them.
#[cfg(feature = "cuda")]
impl Margins {
    /// What of the centroid's score an item may be expected to have.
    pub(super) fn slope(&self) -> f32 {
        self.slope
    }

    /// How far items score above that, rising.
    pub(super) fn halvings(&self) -> &[f32] {
        &self.halvings
    }
}

/// Shares of items with larger margins, of one margin after another, each smaller than the one before.
struct Shares<'a> {
    halvings: &'a [f32],
    /// So many halvings are no larger than the margin.
    place: usize,
}

impl Shares<'_> {
    /// The share of items with a larger margin; beyond the measured ones their number falls on as it fell last.
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
        // Between two halvings along a line, which searches need not raise numbers to powers for.
        let whole = halvings.min(1000.0) as u64;
        f64::from_bits((1023 - whole) << 52) * (1.0 - f64::from(halvings.min(1000.0) - whole as f32) / 2.0)
    }
}

/// The line through a sample that errs least, by its squares: how much of a list's score its items have.
fn slope(sample: &[(f32, f32)]) -> f32 {
    let count = sample.len().max(1) as f64;
    let mean = |of: fn(&(f32, f32)) -> f32| sample.iter().map(|pair| f64::from(of(pair))).sum::<f64>() / count;
    let (list, item) = (mean(|pair| pair.0), mean(|pair| pair.1));
    let away = |pair: &(f32, f32)| (f64::from(pair.0) - list, f64::from(pair.1) - item);
    let squares: f64 = sample.iter().map(|pair| away(pair).0.powi(2)).sum();
    let products: f64 = sample.iter().map(|pair| away(pair).0 * away(pair).1).sum();
    let slope = (products / squares) as f32;
    // Lists that all score alike tell nothing.
    if slope.is_finite() { slope.clamp(*SLOPES.start(), *SLOPES.end()) } else { 1.0 }
}

/// When a filtered search of measured probes ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ending<'a> {
    /// How far items score above their lists.
    pub margins: &'a Margins,
    /// Of the best K0, the share that is to be found: so many of those found so far tell what lists ahead must beat.
    pub recall: f64,
    /// Of the best K0, the share that may be expected ahead.
    pub left: f64,
}

impl Ending<'_> {
    /// The place among the best `k0` so far whose score lists ahead must beat: where the recall is just reached, that of the
    /// true K0-th best.
    pub(super) fn found(&self, k0: usize) -> usize {
        ((k0 as f64 * self.recall).ceil() as usize).max(1)
    }

    /// A search goes on whose lists since the last look brought so many that beat what was found before, whatever is expected ahead:
    /// as many as may be missed. What is expected rests on queries like this one, what was brought on this one alone.
    pub(super) fn gain_max(&self, k0: usize) -> usize {
        k0.saturating_sub(self.found(k0)).max(1)
    }
}

/// The lists that a search has not scanned, by their scores.
#[derive(Clone, Debug, Default)]
pub struct Ahead {
    /// Of the lists in each range of scores, the items ahead and the survivors that were scanned.
    bins: Vec<Bin>,
    low: f32,
    step: f32,
    items: u64,
    /// The query's length.
    scale: f32,
}

/// The lists of a range of scores.
#[derive(Clone, Copy, Debug, Default)]
struct Bin {
    /// Items of those that were not scanned, and of those that were since the last look.
    ahead: u64,
    fresh: u64,
    /// Items that passed of all that were, as many in each list as in others between two looks.
    survivors: f64,
}

/// What a search has seen of the items that pass.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Items that pass, scanned or not: an estimate.
    pub passing: f64,
    /// Those that were scanned.
    pub survivors: u64,
    /// Those of them that score above the threshold.
    pub above: u64,
    /// The share of items that passed in the lists scanned last.
    pub lately: f64,
}

impl Ahead {
    /// All lists are ahead of a query `[D]`: those of the given scores and lengths.
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

    /// A list is scanned.
    pub fn take(&mut self, score: f32, length: u32) {
        let bin = self.bin(score);
        let bin = &mut self.bins[bin];
        bin.ahead = bin.ahead.saturating_sub(u64::from(length));
        bin.fresh += u64::from(length);
        self.items = self.items.saturating_sub(u64::from(length));
    }

    /// A share of the items passed in the lists that were scanned since this was told last: at each look.
    pub fn passed(&mut self, lately: f64) {
        for bin in &mut self.bins {
            bin.survivors += bin.fresh as f64 * lately;
            bin.fresh = 0;
        }
    }

    /// How many items that pass are expected ahead with a score above `threshold`.
    pub fn expected(&self, threshold: f32, seen: Seen, margins: &Margins) -> f64 {
        let density = (seen.passing - seen.survivors as f64).max(0.0) / self.items.max(1) as f64;
        let density = density.min(1.0);
        // Where the filter keeps to a region and the search is in it, the next lists are as those before, and what passes
        // there scores better than what does not.
        let kinship = (seen.lately / density.max(f64::MIN_POSITIVE)).clamp(1.0, KINSHIP_MAX);
        let (mut ahead, mut scanned) = (0.0, 0.0);
        let mut shares = margins.shares();
        for (n, bin) in self.bins.iter().enumerate().filter(|(_, bin)| bin.ahead > 0 || bin.survivors > 0.0) {
            let score = self.low + (n as f32 + 0.5) * self.step;
            let share = shares.above((threshold - margins.slope * score) / self.scale);
            ahead += bin.ahead as f64 * share;
            scanned += bin.survivors * share;
        }
        // A query around which more lies than around most may expect more of the same.
        let surprise = ((seen.above as f64 + FOUND_MIN) / (scanned + FOUND_MIN)).max(1.0);
        density.max(seen.lately) * kinship * surprise * ahead
    }

    fn bin(&self, score: f32) -> usize {
        (((score - self.low) / self.step) as usize).min(BINS - 1)
    }
}

/// After how many of all `lists` a search looks ahead next that did so after `done` of them: when its lists have grown by a
/// share, or by so many of all that one from afar does not go on for long where it could end.
pub fn next_look(done: usize, lists: usize, pace: Pace) -> usize {
    let (growth, looks) = match pace {
        Pace::Often => (1.25, 16),
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
        let margins = Margins::of(&(0..1 << 16).map(|n| (0.0, n as f32)).collect::<Vec<_>>());
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
        // Nothing is known of no items: half of them may lie anywhere.
        assert_eq!(Margins::of(&[(0.0, 1.0); 3]).shares().above(7.0), 0.5);
        for (slope, halvings) in [(1.0, vec![1.0, 0.5]), (1.0, vec![f32::NAN]), (f32::NAN, vec![]), (-0.1, vec![])] {
            assert!(Margins { slope, halvings }.check().is_err());
        }
    }

    #[test]
    fn a_share_of_a_list_score_is_what_its_items_have_of_it() {
        // Items score three quarters of their list's score, and one in four an eighth more.
        let pairs = (0..4096).map(|n| (n as f32 / 1024.0, 0.75 * (n as f32 / 1024.0) + f32::from(n % 4 == 0) / 8.0));
        let margins = Margins::of(&pairs.collect::<Vec<_>>());
        assert!((margins.slope - 0.75).abs() < 1e-3, "{margins:?}");
        for list in [0.0, 1.0, 4.0] {
            let share = |above: f32| margins.shares().above(0.75 * list + above - margins.slope * list);
            assert!(share(-0.1) == 1.0 && (share(0.06) - 0.25).abs() < 0.15 && share(0.2) < 0.01, "{margins:?}");
        }
        // What was written before there were slopes is read as it was meant.
        let old: Margins = serde_json::from_str("[0.5,1.5]").unwrap();
        assert_eq!(old, Margins { slope: 1.0, halvings: vec![0.5, 1.5] });
        let text = serde_json::to_string(&margins).unwrap();
        assert_eq!(serde_json::from_str::<Margins>(&text).unwrap(), margins);
    }

    #[test]
    fn what_is_ahead_falls_as_lists_are_scanned_and_rises_with_those_that_pass() {
        let lists: Vec<(f32, u32)> = (0..500).map(|n| (1.0 - n as f32 / 250.0, 10 + n % 7)).collect();
        let margins = Margins::of(&(0..4096).map(|n| (0.0, n as f32 / 4096.0)).collect::<Vec<_>>());
        let mut ahead = Ahead::default();
        ahead.begin(&[0.6, 0.8], lists.iter().copied());
        let seen = Seen { passing: 1000.0, survivors: 0, above: 0, lately: 0.0 };
        let mut last = ahead.expected(0.9, seen, &margins);
        assert!(last > 100.0 && last <= 1000.0, "{last}");
        assert!(ahead.expected(1.4, seen, &margins) < last);
        assert!(ahead.expected(0.9, Seen { survivors: 500, ..seen }, &margins) < last);
        assert!(ahead.expected(0.9, Seen { lately: 1.0, ..seen }, &margins) > last);
        assert!(ahead.expected(0.9, Seen { above: 50, ..seen }, &margins) > last);
        // What is ahead is as dense as what was seen lately: then each list that is scanned leaves less.
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
    fn lists_bring_much_where_they_bring_as_many_as_may_be_missed() {
        let margins = Margins::of(&[]);
        let of = |recall, k0| Ending { margins: &margins, recall, left: 0.0 }.gain_max(k0);
        assert_eq!([of(0.98, 1000), of(0.98, 100), of(0.95, 100), of(0.5, 3)], [20, 2, 5, 1]);
        // Where none may be missed, and where nothing is asked for, one is much.
        assert_eq!([of(0.98, 10), of(1.0, 1000), of(0.98, 1), of(0.98, 0)], [1; 4]);
    }

    #[test]
    fn looks_are_rarer_the_longer_a_search_goes_on_but_never_rare() {
        let looks: Vec<usize> =
            std::iter::successors(Some(1), |n| Some(next_look(*n, 3200, Pace::Often))).take(60).collect();
        assert!(looks.is_sorted_by(|a, b| a < b) && looks[3] == 4 && looks[59] > 3200, "{looks:?}");
        assert!(looks.windows(2).all(|pair| pair[1] - pair[0] <= 200), "{looks:?}");
    }
}
