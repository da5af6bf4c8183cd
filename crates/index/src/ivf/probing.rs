//! What a search is told, what it counts, and the memory that it keeps.

use std::time::Duration;

use super::ahead::{Ahead, Ending, next_look};
use super::first_pass::Tables;
use super::own::OwnScratch;
use super::pace::Pace;
use super::quantize::Quantized;
use crate::topk::Selector;
use sterling_core::units::ListId;
use sterling_kernels::cpu::kernels::Pick;

/// Below this share of passing items every list is scanned: their words cost less than a wrong guess of the lists.
pub(super) const SCAN_ALL_PASS_RATE: f64 = 0.03;

/// A search of measured probes looks ahead for the first time after these, over this: some queries need fewer than most.
const FIRST_LOOK: usize = 4;
/// Without a measurement, after the first lists as many again are probed at a time, over this.
const CHUNKS_PER_PROBES: usize = 2;
/// Probing on ends when a chunk of lists brought fewer new candidates than this share of K0.
const YIELD_SHARE_MIN: f64 = 0.005;

/// Survivors that a search with words looks at, over those that it needs, where these are what keeps it going: about so many
/// times (the random filters of the tests of `search`).
const BEYOND_ENOUGH: f64 = 2.0;

/// How many lists a search looks at.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Probing<'a> {
    /// Lists, P; without a filter exactly these.
    pub probes: usize,
    /// Most lists that a filtered search may go on to.
    pub probes_max: usize,
    /// Estimated share of items that pass the filter.
    pub pass_rate: f64,
    /// When a filtered search ends, where `probes` were measured: those are then lists that hold survivors.
    pub ending: Option<Ending<'a>>,
    /// Number of results that the request wants: no filtered search ends with fewer survivors while lists are left.
    pub least: usize,
    /// Whether the first pass's codes are scanned, where there are any, in place of int8 rows.
    pub by_codes: bool,
    /// Whether few survivors of a list may be scored by their rows, which is faster; else all are by int8 rows, so that what an item
    /// scores does not depend on those that lie beside it.
    pub may_read_rows: bool,
}

impl Probing<'_> {
    /// So many lists, of which nothing was measured, and at most these with a filter that lets all pass.
    pub fn of(probes: usize, probes_max: usize) -> Self {
        Probing { probes, probes_max, pass_rate: 1.0, ending: None, least: 0, by_codes: false, may_read_rows: true }
    }

    /// The same with numbers that an index of so many lists has.
    pub(super) fn within(self, lists: usize) -> Self {
        let probes = self.probes.clamp(1, lists);
        Probing { probes, probes_max: self.probes_max.clamp(probes, lists), ..self }
    }

    /// Number of lists that a filtered search looks into at most, of an index with `lists` lists.
    pub fn most(&self, lists: usize) -> usize {
        self.within(lists).probes_max
    }

    /// About how many of so many lists a search with words looks at: all of them, where these do not hold `enough` survivors,
    /// of which a list has so many on average; a share `holding` of the lists has any.
    pub fn expected_lists(&self, lists: usize, survivors_a_list: f64, holding: f64, enough: usize) -> usize {
        let probing = self.within(lists);
        if probing.takes_all(lists) {
            return lists;
        }
        let Probing { probes, probes_max: most, ending, .. } = probing;
        // The best so far are hardly the best where there are just enough.
        let for_enough = BEYOND_ENOUGH * enough as f64 / survivors_a_list.max(f64::MIN_POSITIVE);
        let looked_at = match ending {
            // Lists without survivors count for nothing.
            Some(_) => probes as f64 / holding.max(f64::MIN_POSITIVE),
            // It ends after a chunk that brought little.
            None => {
                let first = probing.first(probes, most);
                (first + chunk(first)) as f64
            }
        };
        (looked_at.max(for_enough).ceil() as usize).clamp(1, most)
    }

    /// Whether every one of so many lists is scanned, in any order.
    pub(super) fn takes_all(&self, lists: usize) -> bool {
        let is_guess = self.ending.is_none() && self.pass_rate <= SCAN_ALL_PASS_RATE;
        self.probes_max == lists && (self.probes == lists || is_guess)
    }

    /// After how many of all `lists` a search with words asks itself whether it may end, without an end.
    pub(super) fn looks(&self, lists: usize, pace: Pace) -> impl Iterator<Item = usize> + use<> {
        let first = self.first(self.probes, self.probes_max);
        let is_measured = self.ending.is_some();
        let begin = if is_measured { (self.probes / FIRST_LOOK).max(1) } else { first };
        std::iter::successors(Some(begin), move |&done| {
            Some(match (is_measured, pace) {
                (true, _) => next_look(done, lists, pace),
                (false, Pace::Often) => done + chunk(first),
                (false, Pace::Rare) => done + chunk(first).max(done),
            })
        })
    }

    /// New candidates that a chunk of so many lists must bring for a search to go on of which nothing was measured.
    pub(super) fn gain_min(&self, k0: usize, chunk: usize) -> f64 {
        YIELD_SHARE_MIN * k0 as f64 * chunk as f64 / self.probes as f64
    }

    /// As many lists as would hold the survivors of `probes` whole ones is where probing on begins to be judged.
    pub(super) fn first(&self, probes: usize, most: usize) -> usize {
        ((probes as f64 / self.pass_rate.max(1e-6).sqrt()) as usize).clamp(probes, most)
    }
}

/// How many lists more a search looks at at a time, after the first ones and without a measurement.
fn chunk(first: usize) -> usize {
    (first / CHUNKS_PER_PROBES).max(1)
}

/// What a search did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Lists that were looked at.
    pub lists: u64,
    /// Items of these lists.
    pub items: u64,
    /// Items that passed the filter words and were scored.
    pub survivors: u64,
    /// Bytes of codes, scales and words that were read.
    pub bytes: u64,
    /// Times that a search with a filter began again, for more candidates.
    pub again: u64,
    /// Time that scoring and ordering the lists took.
    pub probe_time: Duration,
    /// Time that filling the words of lists took.
    pub words_time: Duration,
}

impl Counters {
    /// Adds what another search did.
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

/// Survivors of one index that are to be scored.
#[derive(Debug, Default)]
pub(super) struct Left {
    /// Those whose rows are.
    pub(super) pending: Vec<u32>,
    /// The blocks of all others.
    pub(super) picks: Vec<Pick>,
}

/// Memory of a search, kept between calls.
#[derive(Debug, Default)]
pub struct Scratch {
    pub(super) query: Quantized,
    /// Of a search by the first pass's codes.
    pub(super) tables: Tables,
    /// All lists, best first as far as they were asked for.
    pub(super) lists: Vec<u64>,
    pub(super) ordered: usize,
    pub(super) scores: Vec<f32>,
    pub(super) slots: Vec<u32>,
    pub(super) words: Vec<u64>,
    /// The lists whose words are asked for, each of the member of a number.
    pub(super) asked: Vec<(usize, ListId)>,
    /// Survivors that are to be scored, of each index that is searched.
    pub(super) left: Vec<Left>,
    pub(super) products: Vec<f32>,
    /// Slots whose rows are scored before a search ends.
    pub(super) row_slots: Vec<u32>,
    /// The lists that were not scanned yet.
    pub(super) ahead: Ahead,
    /// The items of each list.
    pub(super) lengths: Vec<u32>,
    /// Selects the lists of searches that know how many they want.
    pub(super) coarse: Selector,
    /// Of members that have own lists.
    pub(super) own: OwnScratch,
}

impl Scratch {
    /// Brings the first `count` lists into their order.
    pub(super) fn order(&mut self, count: usize) {
        let count = count.min(self.lists.len());
        if count > self.ordered {
            let rest = &mut self.lists[self.ordered..];
            // As many again as there are: a search that probes on comes back for more.
            let more = (count - self.ordered).max(self.ordered).min(rest.len());
            if more < rest.len() {
                rest.select_nth_unstable_by(more - 1, |a, b| b.cmp(a));
            }
            rest[..more].sort_unstable_by(|a, b| b.cmp(a));
            self.ordered += more;
        }
    }
}
