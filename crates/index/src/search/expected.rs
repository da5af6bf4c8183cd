//! Estimate of a search's work before it runs, for cost estimates.
//!
//! The estimate follows the steps of the search, with fractions of items in place of items. The estimate counts lists
//! until enough items pass; if no item can satisfy the filter, these are all lists. The estimate adds another round for
//! more candidates if too many are likely to fail verification. The estimate cannot predict early termination, when
//! further lists yield few better items.

use super::find::{ProbedSegments, Round};
use super::{Catalogue, Query, Segment};
use crate::filter::{Plan, Route};

/// Items per block; a block is read entirely even for one item.
const ITEMS_PER_BLOCK: f64 = 16.0;

/// Safety factor: another, several times more expensive round is expected if too few candidates remain at this share of
/// the valid ones.
const HOLDING_DOUBT: f64 = 0.8;

/// Estimated work of a search, over all rounds and segments.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Expected {
    /// Lists scored.
    pub lists: f64,
    /// Items of the scanned lists: their bitmaps are computed, or all of them are scored.
    pub items: f64,
    /// Items scored.
    pub survivors: f64,
    /// Bytes of blocks read.
    pub block_bytes: f64,
    /// Rows read one by one.
    pub rows: f64,
    /// Rows read sequentially.
    pub exact_rows: f64,
    /// Nanoseconds of one core for the filter.
    pub filter_ns: f64,
}

impl Expected {
    /// Adds the work of another search.
    pub fn add(&mut self, other: &Expected) {
        let Expected { lists, items, survivors, block_bytes, rows, exact_rows, filter_ns } = other;
        self.lists += lists;
        self.items += items;
        self.survivors += survivors;
        self.block_bytes += block_bytes;
        self.rows += rows;
        self.exact_rows += exact_rows;
        self.filter_ns += filter_ns;
    }
}

/// Segment whose lists are scanned, with its estimated passing shares.
struct Share<'a> {
    segment: &'a Segment<'a>,
    plan: &'a Plan,
    /// Share of the segment's items that pass the filter.
    passing: f64,
    /// Share of the segment's lists with passing items.
    holding: f64,
    /// True if lists of the segment are probed, false if it is scanned entirely.
    is_probed: bool,
    /// Number of items of the segment that every search scans.
    scanned: usize,
}

impl Share<'_> {
    fn survivors(&self) -> f64 {
        self.segment.index.items() as f64 * self.passing
    }

    /// Estimates the work to score the passing items in a share of the probed lists: by blocks, or by rows if that is cheaper.
    fn scanned(&self, probed: f64, by_codes: bool) -> Expected {
        let index = self.segment.index;
        let items = (index.items() - self.scanned) as f64 * probed + self.scanned as f64;
        let survivors = items * self.passing;
        let touched = 1.0 - (1.0 - self.passing).powf(ITEMS_PER_BLOCK);
        let of_block = if by_codes { index.first_pass_block_bytes() } else { index.block_bytes() };
        let block_bytes = items / ITEMS_PER_BLOCK * touched * of_block as f64;
        let row_bytes = survivors * index.row_bytes() as f64;
        let by_rows = !by_codes && index.reads_rows(row_bytes as u64, block_bytes as u64);
        let (block_bytes, rows) = if by_rows { (0.0, survivors) } else { (block_bytes, 0.0) };
        Expected { items, survivors, block_bytes, rows, ..Expected::default() }
    }
}

impl<'a> Catalogue<'a> {
    /// Estimates the work of a search; the vector of the query may be missing.
    pub fn expected(&self, query: &Query<'a>) -> Expected {
        let walked = ProbedSegments::of(self, query);
        let mut expected = self.expected_by_rows(query);
        if query.search.exact || walked.segments.is_empty() {
            return expected;
        }
        let lists = self.main().index.lists();
        let share = |(segment, plan): (&&'a Segment<'a>, &&'a Plan)| {
            let in_words = plan.passing(segment.filter);
            let passing = in_words.items * segment.live();
            let scanned = segment.index.items_scanned(lists);
            Share {
                segment,
                plan,
                passing,
                holding: in_words.lists,
                is_probed: scanned < segment.index.items(),
                scanned,
            }
        };
        let shares: Vec<Share<'_>> = walked.segments.iter().zip(&walked.plans).map(share).collect();
        if !walked.has_all() {
            expected.add(&self.expected_filtered(query, &walked, &shares));
            return expected;
        }
        let probed = query.search.probes.clamp(1, lists);
        let mut found = 0.0;
        for share in &shares {
            // Deleted items are scored too.
            let complete =
                Share { passing: 1.0, ..*share }.scanned(probed as f64 / lists as f64, query.search.by_codes.is_some());
            found += complete.items * share.passing;
            expected.add(&complete);
        }
        if query.search.by_codes.is_some() {
            expected.rows += (self.room_unfiltered(query) - query.search.k0) as f64;
        }
        expected.lists += lists as f64;
        if found.min(self.room_unfiltered(query) as f64) < query.search.k as f64 && probed < lists {
            expected.add(&self.expected_filtered(query, &walked, &shares));
        }
        expected
    }

    /// Estimates the items scored by rows: all items in an exact search, otherwise the items from posting lists.
    fn expected_by_rows(&self, query: &Query<'a>) -> Expected {
        let mut expected = Expected::default();
        for (n, segment) in self.segments.iter().enumerate() {
            let (plan, items) = (query.plan_of(n), segment.index.items() as f64);
            match plan.route() {
                Route::Slots(slots) => {
                    let rows = slots.len() as f64;
                    expected.add(&Expected { items: rows, survivors: rows, rows, ..Expected::default() });
                }
                Route::All | Route::Words if query.search.exact => expected.add(&Expected {
                    items,
                    survivors: items * plan.passing(segment.filter).items * plan.holding() * segment.live(),
                    exact_rows: items,
                    filter_ns: items * plan.passes_ns(),
                    ..Expected::default()
                }),
                Route::All | Route::Words | Route::Nothing => {}
            }
        }
        expected
    }

    /// Estimates the rounds of a filtered search.
    fn expected_filtered(&self, query: &Query<'a>, walked: &ProbedSegments<'a>, shares: &[Share<'_>]) -> Expected {
        let lists = self.main().index.lists();
        let probed = || shares.iter().filter(|share| share.is_probed);
        let survivors_a_list = probed().map(Share::survivors).sum::<f64>() / lists as f64;
        let holding = 1.0 - probed().map(|share| 1.0 - share.holding).product::<f64>();
        let survivors: f64 = shares.iter().map(Share::survivors).sum();
        let held: f64 = shares.iter().map(|share| share.survivors() * share.plan.holding()).sum();
        let probing = self.probing(query, walked);
        let (mut expected, mut next) = (Expected::default(), Round::first(self, query));
        loop {
            let Round { room, selected: most, is_checked } = next;
            let enough = walked.enough(query, &probing, room).max(query.search.k);
            let in_lists = match is_checked {
                true => probing.most(lists),
                false => probing.expected_lists(lists, survivors_a_list, holding, enough),
            };
            let looked_at = in_lists as f64 / lists as f64;
            let mut round = Expected { lists: lists as f64, ..Expected::default() };
            for share in shares {
                let of_part = share.scanned(looked_at, query.search.by_codes.is_some());
                round.filter_ns += of_part.items * share.plan.words_ns();
                round.add(&of_part);
            }
            let selected = round.survivors.min(most as f64);
            if !walked.is_exact() {
                let passes_ns = shares.iter().map(|share| share.plan.passes_ns()).fold(0.0, f64::max);
                let looked_up = if is_checked { round.survivors } else { selected };
                round.filter_ns += looked_up * passes_ns;
            }
            if query.search.by_codes.is_some() {
                round.rows += selected - selected.min(query.search.k0 as f64);
            }
            expected.add(&round);
            let hold = selected * held / survivors.max(f64::MIN_POSITIVE) * HOLDING_DOUBT;
            let all_seen = round.survivors <= most as f64 && in_lists >= probing.most(lists);
            if hold >= query.kept() as f64 || all_seen || walked.is_exact() || is_checked {
                return expected;
            }
            next = next.next(self, query);
        }
    }
}

impl Segment<'_> {
    /// Returns the share of the segment's items that are not deleted.
    fn live(&self) -> f64 {
        let tombstones = self.tombstones.map_or(0, |tombstones| tombstones.len());
        1.0 - (tombstones as f64 / self.index.items().max(1) as f64).min(1.0)
    }
}
