//! What a search is thought to look at: what its price rests on, before anything of it is done.
//!
//! It is reckoned as the search goes, with shares of items where the search has items: lists until there are survivors enough,
//! which are all of them where a filter contradicts itself, and all of it again for more candidates where too few of those that
//! seem to pass will. What the search finds by distance, that further lists bring little, is not known before.

use super::{Catalogue, Query, ROOM_GROWTH};
use crate::filter::Route;

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
    /// Adds what another search looks at.
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

impl Catalogue<'_> {
    /// What a search is thought to look at; its vector may be missing.
    pub fn expected(&self, query: &Query<'_>) -> Expected {
        let mut expected = self.expected_here(query);
        for (part, plan) in self.beside.iter().zip(query.beside) {
            expected.add(&part.catalogue.expected_here(&Query { plan, beside: &[], ending: None, ..*query }));
        }
        expected
    }

    fn expected_here(&self, query: &Query<'_>) -> Expected {
        let (items, plan) = (self.index.items() as f64, query.plan);
        match plan.route() {
            Route::Nothing => Expected::default(),
            Route::Slots(slots) => {
                let rows = slots.len() as f64;
                Expected { items: rows, survivors: rows, rows, ..Expected::default() }
            }
            _ if query.exact => Expected {
                items,
                survivors: items * plan.passing(self.filter).items * self.live(),
                exact_rows: items,
                filter_ns: items * plan.passes_ns(),
                ..Expected::default()
            },
            Route::All => {
                let probed = query.probes.clamp(1, self.index.lists().max(1));
                let mut expected = Expected { lists: self.index.lists() as f64, ..self.scanned(probed, 1.0) };
                let found = (expected.items * self.live()).min(query.room_unfiltered(self) as f64);
                if found < query.k as f64 && probed < self.index.lists() {
                    expected.add(&self.expected_filtered(query));
                }
                expected
            }
            Route::Words => self.expected_filtered(query),
        }
    }

    /// The rounds of a search with words.
    fn expected_filtered(&self, query: &Query<'_>) -> Expected {
        let (index, plan) = (self.index, query.plan);
        let in_words = plan.passing(self.filter);
        let passing = in_words.items * self.live();
        let survivors_a_list = passing * index.items() as f64 / index.lists().max(1) as f64;
        let mut room = query.room(index);
        let mut expected = Expected::default();
        loop {
            let enough = query.enough(room);
            let probing = self.probing(query);
            let probed = probing.expected_lists(index.lists(), survivors_a_list, in_words.lists, enough);
            let round = self.scanned(probed, passing);
            let selected = round.survivors.min(room as f64);
            let checked = if plan.is_exact() { 0.0 } else { selected * plan.passes_ns() };
            expected.add(&Expected {
                lists: index.lists() as f64,
                filter_ns: round.items * plan.words_ns() + checked,
                ..round
            });
            let is_enough =
                selected * plan.holding() * HOLDING_DOUBT >= query.kept() as f64 || round.survivors <= room as f64;
            if is_enough || plan.is_exact() || room >= index.items() {
                return expected;
            }
            room = (room * ROOM_GROWTH).min(index.items());
        }
    }

    /// What it takes to score a share of the items of so many lists: their blocks or, where that is less, their rows.
    fn scanned(&self, probed: usize, passing: f64) -> Expected {
        let index = self.index;
        let items = index.items() as f64 * probed as f64 / index.lists().max(1) as f64;
        let survivors = items * passing;
        let touched = 1.0 - (1.0 - passing).powf(ITEMS_A_BLOCK);
        let block_bytes = items / ITEMS_A_BLOCK * touched * index.block_bytes() as f64;
        let row_bytes = survivors * index.row_bytes() as f64;
        let by_rows = index.reads_rows(row_bytes as u64, block_bytes as u64);
        let (block_bytes, rows) = if by_rows { (0.0, survivors) } else { (block_bytes, 0.0) };
        Expected { items, survivors, block_bytes, rows, ..Expected::default() }
    }

    /// The share of items that are not gone.
    fn live(&self) -> f64 {
        let gone = self.gone.map_or(0, |gone| gone.len());
        1.0 - (gone as f64 / self.index.items().max(1) as f64).min(1.0)
    }
}
