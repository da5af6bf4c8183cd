//! Parameters, counters and reusable buffers of searches.

use std::time::Duration;

use super::check_interval::CheckInterval;
use super::first_pass::Tables;
use super::ood::OodProbing;
use super::own_lists::OwnScratch;
use super::quantize::Quantized;
use super::termination::{Ending, UnscannedLists, next_check};
use crate::topk::Selector;
use sterling_core::units::ListId;
use sterling_kernels::cpu::kernels::Pick;

/// Below this pass rate every list is scanned: computing all filter bitmaps costs less than choosing the wrong lists.
pub(super) const SCAN_ALL_PASS_RATE: f64 = 0.03;

/// A search with calibrated probes first checks after `probes / FIRST_CHECK` lists: some queries need fewer lists than most.
const FIRST_CHECK: usize = 4;
/// Without calibration, each further step scans the number of lists of the first step, divided by this number.
const CHUNKS_PER_PROBES: usize = 2;
/// A search without calibration ends when a step yielded fewer new candidates than this share of K0.
const YIELD_SHARE_MIN: f64 = 0.005;

/// Factor of the cost estimate for a filtered search that scanned `probes` lists but continues until enough items
/// pass: the search scans this many times the passing items that it needs (measured with the random filters of the
/// tests of `search`).
const BEYOND_ENOUGH: f64 = 2.0;

/// Number of lists to probe, and when to stop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Probing<'a> {
    /// Number of lists, nprobe (P); a search without a filter scans exactly these.
    pub probes: usize,
    /// nprobe for a query that is out of distribution, `None` to use `probes`; with a termination criterion, the
    /// minimum number of lists for such a query.
    pub ood: Option<OodProbing>,
    /// Minimum number of lists of a filtered search with a termination criterion, because the criterion was calibrated
    /// with other queries.
    pub least_lists: usize,
    /// Maximum number of lists of a filtered search.
    pub probes_max: usize,
    /// Estimated share of items that pass the filter.
    pub pass_rate: f64,
    /// Termination criterion of a filtered search, if `probes` was calibrated; `probes` then counts lists with passing items.
    pub ending: Option<Ending<'a>>,
    /// Number of results that the request wants: a filtered search does not stop with fewer passing items while lists are left.
    pub least: usize,
    /// Scans first-pass codes in place of int8 rows, if the index has them.
    pub by_codes: bool,
    /// Scores the passing items of a list by their rows if few pass, which is faster. If false, all are scored by int8
    /// rows, so that the score of an item does not depend on how many other items pass.
    pub may_read_rows: bool,
}

impl Probing<'_> {
    /// Creates parameters without calibration: `probes` lists, and at most `probes_max` with a filter. The pass rate is 1.
    pub fn of(probes: usize, probes_max: usize) -> Self {
        Probing {
            probes,
            ood: None,
            least_lists: 0,
            probes_max,
            pass_rate: 1.0,
            ending: None,
            least: 0,
            by_codes: false,
            may_read_rows: true,
        }
    }

    /// Applies the setting for a query that is out of distribution, if all centroids score below its limit. The check ends
    /// at the first centroid that scores higher.
    pub(super) fn for_query(self, centroid_scores: &[f32], query: &Quantized) -> Self {
        let is_for = |ood: &OodProbing| {
            let limit = ood.limit(query);
            centroid_scores.iter().all(|&score| score < limit)
        };
        match self.ood.filter(is_for) {
            Some(ood) => Probing { least_lists: ood.probes.min(self.probes_max), ood: None, ..self },
            None => self,
        }
    }

    /// Clamps the numbers to an index of `lists` lists.
    pub(super) fn within(self, lists: usize) -> Self {
        let probes = self.probes.clamp(1, lists);
        Probing { probes, probes_max: self.probes_max.clamp(probes, lists), ..self }
    }

    /// Returns the maximum number of lists that a filtered search scans, in an index of `lists` lists.
    pub fn most(&self, lists: usize) -> usize {
        self.within(lists).probes_max
    }

    /// Estimates the number of lists that a filtered search scans of `lists`: all of them if they hold fewer than
    /// `enough` passing items. A list has `survivors_a_list` passing items on average, and the fraction `holding` of
    /// the lists has any.
    pub fn expected_lists(&self, lists: usize, survivors_a_list: f64, holding: f64, enough: usize) -> usize {
        let probing = self.within(lists);
        if probing.takes_all(lists) {
            return lists;
        }
        let Probing { probes, probes_max: most, ending, .. } = probing;
        // The first items that suffice in number are hardly the best of all, so the search scans more.
        let for_enough = BEYOND_ENOUGH * enough as f64 / survivors_a_list.max(f64::MIN_POSITIVE);
        let looked_at = match ending {
            // Lists without passing items do not count.
            Some(_) => probes as f64 / holding.max(f64::MIN_POSITIVE),
            // Without a termination criterion, the search ends after a step that yields little.
            None => {
                let first = probing.first(probes, most);
                (first + chunk(first)) as f64
            }
        };
        (looked_at.max(for_enough).ceil() as usize).clamp(1, most)
    }

    /// Returns true if all lists are scanned, in any order.
    pub(super) fn takes_all(&self, lists: usize) -> bool {
        let is_guess = self.ending.is_none() && self.pass_rate <= SCAN_ALL_PASS_RATE;
        self.probes_max == lists && (self.probes == lists || is_guess)
    }

    /// Returns the numbers of scanned lists at which a filtered search checks whether it may stop; an infinite sequence.
    pub(super) fn looks(&self, lists: usize, pace: CheckInterval) -> impl Iterator<Item = usize> + use<> {
        let first = self.first(self.probes, self.probes_max);
        let is_measured = self.ending.is_some();
        let begin = if is_measured { (self.probes / FIRST_CHECK).max(self.least_lists).max(1) } else { first };
        std::iter::successors(Some(begin), move |&done| {
            Some(match (is_measured, pace) {
                (true, _) => next_check(done, lists, pace),
                (false, CheckInterval::Often) => done + chunk(first),
                (false, CheckInterval::Rare) => done + chunk(first).max(done),
            })
        })
    }

    /// Returns the minimum number of new candidates from a step of `chunk` lists for a search without calibration to continue.
    pub(super) fn gain_min(&self, k0: usize, chunk: usize) -> f64 {
        YIELD_SHARE_MIN * k0 as f64 * chunk as f64 / self.probes as f64
    }

    /// Returns the lists before the first check: more than `probes` for low pass rates, by the inverse square root of the rate.
    pub(super) fn first(&self, probes: usize, most: usize) -> usize {
        ((probes as f64 / self.pass_rate.max(1e-6).sqrt()) as usize).clamp(probes, most)
    }
}

/// Returns the step of a search without calibration after the first lists.
fn chunk(first: usize) -> usize {
    (first / CHUNKS_PER_PROBES).max(1)
}

/// Counters of a search.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Lists scanned.
    pub lists: u64,
    /// Items of the scanned lists.
    pub items: u64,
    /// Items that passed the filter bitmap and were scored.
    pub survivors: u64,
    /// Bytes of codes, scales and bitmaps read.
    pub bytes: u64,
    /// Number of times that a filtered search restarted for more candidates.
    pub again: u64,
    /// Time to score and order the lists.
    pub probe_time: Duration,
    /// Time to compute the filter bitmaps.
    pub words_time: Duration,
}

impl Counters {
    /// Adds the counters of another search.
    pub fn add(&mut self, other: &Counters) {
        self.lists += other.lists;
        self.items += other.items;
        self.survivors += other.survivors;
        self.bytes += other.bytes;
        self.again += other.again;
        self.probe_time += other.probe_time;
        self.words_time += other.words_time;
    }
}

/// Passing items of one index that still have to be scored.
#[derive(Debug, Default)]
pub(super) struct RemainingItems {
    /// Slots to score by their rows.
    pub(super) pending: Vec<u32>,
    /// Blocks of items to score by int8 rows.
    pub(super) picks: Vec<Pick>,
}

/// Buffers of a search, reused between calls.
#[derive(Debug, Default)]
pub struct Scratch {
    pub(super) query: Quantized,
    /// Query tables of first-pass codes.
    pub(super) tables: Tables,
    /// All lists as sort keys; the first `ordered` are sorted, best first.
    pub(super) lists: Vec<u64>,
    pub(super) ordered: usize,
    pub(super) scores: Vec<f32>,
    pub(super) slots: Vec<u32>,
    pub(super) words: Vec<u64>,
    /// Queued lists, each with the number of its segment.
    pub(super) requested: Vec<(usize, ListId)>,
    /// Passing items to score, per segment.
    pub(super) left: Vec<RemainingItems>,
    pub(super) products: Vec<f32>,
    /// Slots whose rows are scored before a search stops.
    pub(super) row_slots: Vec<u32>,
    /// Unscanned lists.
    pub(super) ahead: UnscannedLists,
    /// Number of items of each list.
    pub(super) lengths: Vec<u32>,
    /// Selects the best lists if their number is known in advance.
    pub(super) coarse: Selector,
    /// Scores of the lists that a segment does not share with the snapshot.
    pub(super) own: OwnScratch,
}

impl Scratch {
    /// Sorts the first `count` lists.
    pub(super) fn order(&mut self, count: usize) {
        let count = count.min(self.lists.len());
        if count > self.ordered {
            let rest = &mut self.lists[self.ordered..];
            // At least doubles the sorted part: a search that continues needs further lists.
            let more = (count - self.ordered).max(self.ordered).min(rest.len());
            if more < rest.len() {
                rest.select_nth_unstable_by(more - 1, |a, b| b.cmp(a));
            }
            rest[..more].sort_unstable_by(|a, b| b.cmp(a));
            self.ordered += more;
        }
    }
}
