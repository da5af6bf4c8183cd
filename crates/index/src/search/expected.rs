//! What a search is thought to look at: what its price rests on, before anything of it is done.
//!
//! It is reckoned as the search goes, with shares of items where the search has items: lists until there are survivors enough,
//! which are all of them where a filter contradicts itself, and all of it again for more candidates where too few of those that
//! seem to pass will. What the search finds by distance, that further lists bring little, is not known before.

use super::find::{Round, Walked};
use super::{Catalogue, CataloguePart, Query};
use crate::filter::{Plan, Route};

/// Items of a block, which is read whole for one of them.
const ITEMS_A_BLOCK: f64 = 16.0;

/// To look again costs several times as much: it is expected where this share of what seems to hold would not do.
const HOLDING_DOUBT: f64 = 0.8;

/// What a search is thought to look at, over all its rounds and parts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Expected {
    /// Lists that are scored.
    pub lists: f64,
    /// Items of the lists that are looked into: their words are evaluated, or all of them are scored.
    pub items: f64,
    /// Items that are scored.
    pub survivors: f64,
    /// Bytes of blocks that are read for it.
    pub block_bytes: f64,
    /// Rows that are read for it one by one.
    pub rows: f64,
    /// Rows that are read one after the other.
    pub exact_rows: f64,
    /// Nanoseconds of one core for the filter.
    pub filter_ns: f64,
}

impl Expected {
    /// Adds what else is looked at.
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

/// A part whose lists are walked, and what is thought to pass of it.
struct Share<'a> {
    part: &'a CataloguePart<'a>,
    plan: &'a Plan,
    /// Of its items.
    passing: f64,
    /// Of its lists: those that hold such items.
    holding: f64,
    /// Whether any of its lists are probed, and not a single one scanned whole.
    is_probed: bool,
    /// Items of it that are scanned whatever is probed.
    scanned: usize,
}

impl Share<'_> {
    fn survivors(&self) -> f64 {
        self.part.index.items() as f64 * self.passing
    }

    /// What it takes to score those that pass in a share of the lists that are probed: their blocks, of int8 rows or of codes, or,
    /// where that is less, their rows.
    fn scanned(&self, probed: f64, by_codes: bool) -> Expected {
        let index = self.part.index;
        let items = (index.items() - self.scanned) as f64 * probed + self.scanned as f64;
        let survivors = items * self.passing;
        let touched = 1.0 - (1.0 - self.passing).powf(ITEMS_A_BLOCK);
        let of_block = if by_codes { index.first_pass_block_bytes() } else { index.block_bytes() };
        let block_bytes = items / ITEMS_A_BLOCK * touched * of_block as f64;
        let row_bytes = survivors * index.row_bytes() as f64;
        let by_rows = !by_codes && index.reads_rows(row_bytes as u64, block_bytes as u64);
        let (block_bytes, rows) = if by_rows { (0.0, survivors) } else { (block_bytes, 0.0) };
        Expected { items, survivors, block_bytes, rows, ..Expected::default() }
    }
}

impl<'a> Catalogue<'a> {
    /// What a search is thought to look at; its vector may be missing.
    pub fn expected(&self, query: &Query<'a>) -> Expected {
        let walked = Walked::of(self, query);
        let mut expected = self.expected_by_rows(query);
        if query.search.exact || walked.parts.is_empty() {
            return expected;
        }
        let lists = self.main().index.lists();
        let share = |(part, plan): (&&'a CataloguePart<'a>, &&'a Plan)| {
            let in_words = plan.passing(part.filter);
            let passing = in_words.items * part.live();
            let scanned = part.index.items_scanned(lists);
            Share { part, plan, passing, holding: in_words.lists, is_probed: scanned < part.index.items(), scanned }
        };
        let shares: Vec<Share<'_>> = walked.parts.iter().zip(&walked.plans).map(share).collect();
        if !walked.has_all() {
            expected.add(&self.expected_filtered(query, &walked, &shares));
            return expected;
        }
        let probed = query.search.probes.clamp(1, lists);
        let mut found = 0.0;
        for share in &shares {
            // Those that are gone are scored too.
            let whole =
                Share { passing: 1.0, ..*share }.scanned(probed as f64 / lists as f64, query.search.by_codes.is_some());
            found += whole.items * share.passing;
            expected.add(&whole);
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

    /// Items that are looked at by rows: all of an exact search, else those that posting lists tell.
    fn expected_by_rows(&self, query: &Query<'a>) -> Expected {
        let mut expected = Expected::default();
        for (n, part) in self.parts.iter().enumerate() {
            let (plan, items) = (query.plan_of(n), part.index.items() as f64);
            match plan.route() {
                Route::Slots(slots) => {
                    let rows = slots.len() as f64;
                    expected.add(&Expected { items: rows, survivors: rows, rows, ..Expected::default() });
                }
                Route::All | Route::Words if query.search.exact => expected.add(&Expected {
                    items,
                    survivors: items * plan.passing(part.filter).items * plan.holding() * part.live(),
                    exact_rows: items,
                    filter_ns: items * plan.passes_ns(),
                    ..Expected::default()
                }),
                Route::All | Route::Words | Route::Nothing => {}
            }
        }
        expected
    }

    /// The rounds of a search with words.
    fn expected_filtered(&self, query: &Query<'a>, walked: &Walked<'a>, shares: &[Share<'_>]) -> Expected {
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

impl CataloguePart<'_> {
    /// The share of its items that are not gone.
    fn live(&self) -> f64 {
        let gone = self.gone.map_or(0, |gone| gone.len());
        1.0 - (gone as f64 / self.index.items().max(1) as f64).min(1.0)
    }
}
