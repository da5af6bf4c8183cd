//! Steps 4 to 8 of the pass: the best K0 eligible items of each query, by their retrieval score.
//!
//! 1. A filter whose survivors are known slots, and an exact search, score those items by their widest rows.
//! 2. Queries without a filter probe their best lists: together, list by list, where they are so many that they share lists.
//! 3. Queries with a filter evaluate its words on the lists they probe, and probe on while too few items survive. Queries with
//!    an equal plan come after one another and share its words.
//! 4. Candidates are verified: excluded items drop out, and those that only a Bloom bit let through. Where these were too many,
//!    more of the survivors are looked at.
//! 5. Candidates of int8 products are scored again by their wide rows. The int8 scores choose who is scored again: some more
//!    than K0, so that rounding at the edge costs nothing.
//!
//! Items that came after the catalogue was built lie in further parts of it, over the lists of the first one, over a single
//! list, or over lists of their own. All parts are searched as one ([`ivf::Union`]): lists are chosen once, and the best of all are selected, verified and
//! scored again together. Items that are gone have a tombstone.
//!
//! Where the index has smaller codes for a first pass, a query may have these scanned in place of int8 rows, with a filter those of the
//! items that pass its words. More are selected then; all else is the same. Parts beside it have int8 rows alone: either score is about the product of the two
//! vectors, so that they are selected together, and the rows of the selected decide.

mod expected;
mod find;
mod likely;
mod settle;
mod together;
mod tombstones;

use std::time::Duration;

use crate::filter::{self, Plan};
use crate::ivf::{self, Counters, Member};
use crate::topk::{Selector, unkey};
use sterling_core::units::Slot;
use sterling_kernels::buffer::Buffer;

pub use expected::Expected;
pub use likely::likely;
pub use tombstones::Tombstones;

/// What is searched.
#[derive(Clone, Copy, Debug)]
pub struct Catalogue<'a> {
    /// Its items, in ascending order of their slots; the first part is the one whose lists are probed.
    pub parts: &'a [CataloguePart<'a>],
    /// Most lists that a filtered query may probe.
    pub probes_max: usize,
}

/// Some of the items that are searched.
#[derive(Clone, Copy, Debug)]
pub struct CataloguePart<'a> {
    /// The item index: over the lists of the first part, over one list, or over lists of its own.
    pub index: &'a ivf::Index,
    /// Planes and posting lists of its items.
    pub filter: &'a filter::Index,
    /// The item of each slot, `[S]`: of equal scores the lowest ids are found. Without it those of the lowest slots.
    pub ids: Option<&'a Buffer<i64>>,
    /// Slots whose items are gone, where there are any.
    pub gone: Option<&'a Tombstones>,
    /// Its slot 0, counted over all parts.
    pub first_slot: u32,
}

/// How one query is searched. The pass decides it once per request; every device reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SearchPlan {
    /// Number of results, K: a query that finds fewer probes on.
    pub k: usize,
    /// Number of candidates, K0.
    pub k0: usize,
    /// Number of items to select, all of which are scored and returned, in place of K0: a shard selects for a caller that merges.
    pub selected: Option<usize>,
    /// Number of inverted lists to probe, nprobe.
    pub probes: usize,
    /// Scans every item in f32 in place of probing.
    pub exact: bool,
    /// Number of items that first-pass codes select, R, if these are scanned in place of int8 rows.
    pub by_codes: Option<usize>,
    /// Least number of items that int8 scores select.
    pub by_int8: usize,
}

/// One query with the items that are eligible for it.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a> {
    /// `[D]`
    pub vector: &'a [f32],
    /// How it is searched.
    pub search: SearchPlan,
    /// Which items of the first part are eligible.
    pub plan: &'a Plan,
    /// The same for each further part.
    pub beside: &'a [Plan],
    /// Slots that are not, ascending.
    pub excluded: &'a [Slot],
    /// When a search with a filter ends, where its probes were measured.
    pub ending: Option<ivf::Ending<'a>>,
}

/// What a query found.
#[derive(Debug)]
pub struct Found<'a> {
    /// Retrieval score and slot, best first, at most K0.
    pub candidates: &'a mut Vec<(f32, Slot)>,
    /// The same with the scores that they were selected by, where the query says how many are selected; else empty.
    pub selected: &'a [(f32, Slot)],
    /// What the search looked at.
    pub counters: Counters,
    /// Candidates whose rows were scored again.
    pub rescored: u64,
    /// What its steps took.
    pub times: Times,
}

/// What the steps of a search took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    /// Step 4.
    pub probe: Duration,
    /// Step 5.
    pub words: Duration,
    /// Step 6.
    pub scan: Duration,
    /// Step 7.
    pub verify: Duration,
    /// Step 8.
    pub rescore: Duration,
}

impl Times {
    /// Adds what other searches took.
    pub fn add(&mut self, other: &Times) {
        let Times { probe, words, scan, verify, rescore } = other;
        self.probe += *probe;
        self.words += *words;
        self.scan += *scan;
        self.verify += *verify;
        self.rescore += *rescore;
    }

    /// Adds what a search took; what it did not take to probe and for words it scanned.
    fn add_search(&mut self, took: Duration, counters: &Counters) {
        self.probe += counters.probe_time;
        self.words += counters.words_time;
        self.scan += took.saturating_sub(counters.words_time + counters.probe_time);
    }
}

/// Takes what queries find, in any order.
pub trait Sink {
    /// False where query `n` need not be searched any more.
    fn is_wanted(&mut self, n: usize) -> bool;

    /// Takes what query `n` found.
    fn found(&mut self, n: usize, found: Found<'_>);
}

/// Memory of searches, kept between calls.
#[derive(Debug, Default)]
pub struct Scratch {
    selector: Selector,
    alone: ivf::Scratch,
    /// Of queries that are searched together.
    selectors: Vec<Selector>,
    batch: ivf::BatchScratch,
    /// One for each part.
    words: Vec<filter::Scratch>,
    candidates: Vec<(f32, Slot)>,
    /// Candidates that are not selected by int8 scores, with those of their rows.
    scored: Vec<(f32, Slot)>,
    /// Candidates with the scores that they were selected by, of queries that ask for them.
    selected: Vec<(f32, Slot)>,
    slots: Vec<u32>,
    /// Those of one part, as that counts them.
    own: Vec<u32>,
    products: Vec<f32>,
}

/// What a query found together with others: in which of the scratch's selectors, and its share of what they took.
struct Together {
    selector: usize,
    counters: Counters,
    took: Duration,
}

impl<'a> Query<'a> {
    /// Which items of a part are eligible.
    fn plan_of(&self, part: usize) -> &'a Plan {
        part.checked_sub(1).map_or(self.plan, |at| &self.beside[at])
    }

    /// Candidates that are selected by int8 scores.
    fn room(&self, catalogue: &Catalogue<'_>) -> usize {
        self.search
            .selected
            .unwrap_or_else(|| catalogue.main().index.rows().selected(self.search.k0).max(self.search.by_int8))
    }

    /// Candidates that are selected at first: by the first pass's codes, or else by int8 scores.
    fn room_at_first(&self, catalogue: &Catalogue<'_>) -> usize {
        match (self.search.selected, self.search.by_codes) {
            (None, Some(selected)) => selected.max(self.search.k0),
            _ => self.room(catalogue),
        }
    }

    /// Candidates that are kept.
    fn kept(&self) -> usize {
        self.search.selected.unwrap_or(self.search.k0)
    }

    fn is_excluded(&self, slot: Slot) -> bool {
        self.excluded.binary_search(&slot).is_ok()
    }
}

impl<'a> Catalogue<'a> {
    /// Searches all queries and hands `sink` what each found as soon as it is found.
    pub fn search(&self, queries: &[Query<'_>], scratch: &mut Scratch, sink: &mut dyn Sink) {
        let mut together: Vec<Option<Together>> = self.search_together(queries, scratch);
        scratch.words.resize_with(self.parts.len().max(scratch.words.len()), Default::default);
        let mut order: Vec<usize> = (0..queries.len()).collect();
        let plan = |n: &usize| std::ptr::from_ref(queries[*n].plan);
        order.sort_by_key(plan);
        for of_plan in order.chunk_by(|a, b| plan(a) == plan(b)) {
            if of_plan.len() > 1 {
                let first = &queries[of_plan[0]];
                scratch
                    .words
                    .iter_mut()
                    .take(self.parts.len())
                    .enumerate()
                    .for_each(|(n, of)| of.keep(first.plan_of(n)));
            }
            for &n in of_plan {
                if sink.is_wanted(n) {
                    let (query, mut times) = (&queries[n], Times::default());
                    let counters = self.find(query, together[n].take(), scratch, &mut times, &mut || sink.is_wanted(n));
                    // What a search that was broken off has found is no answer.
                    if query.search.exact && !sink.is_wanted(n) {
                        continue;
                    }
                    let rescored = self.settle(query, scratch, &mut times);
                    let Scratch { candidates, selected, .. } = &mut *scratch;
                    sink.found(n, Found { candidates, selected, counters, rescored, times });
                }
            }
        }
    }

    /// The part whose lists are probed.
    fn main(&self) -> &'a CataloguePart<'a> {
        &self.parts[0]
    }

    /// Items, those that are gone with them.
    fn items(&self) -> usize {
        self.parts.iter().map(|part| part.index.items()).sum()
    }

    /// The part that holds a slot, and its slot there.
    fn part_of(&self, slot: Slot) -> (usize, Slot) {
        let at = self.parts.partition_point(|part| part.first_slot <= slot.0).saturating_sub(1);
        (at, Slot(slot.0 - self.parts[at].first_slot))
    }

    /// Selects the `k` best of what follows.
    fn begin(&self, selector: &mut Selector, k: usize) {
        let ids = self.parts.iter().filter_map(|part| Some((part.first_slot, part.ids?)));
        selector.reset_by_id(k, ids);
    }
}

impl<'a> CataloguePart<'a> {
    fn is_gone(&self, slot: Slot) -> bool {
        self.gone.is_some_and(|gone| gone.contains(slot))
    }

    /// The part as it is searched with others.
    fn member(&self) -> Member<'a> {
        Member { index: self.index, first_slot: self.first_slot }
    }

    /// Those of ascending slots of all parts that are this one's, counted from its own first.
    fn take(&self, slots: &[Slot]) -> Vec<Slot> {
        let from = slots.partition_point(|slot| slot.0 < self.first_slot);
        let end = u64::from(self.first_slot) + self.index.slots() as u64;
        let own = slots[from..].iter().take_while(|slot| u64::from(slot.0) < end);
        own.map(|slot| Slot(slot.0 - self.first_slot)).collect()
    }
}

/// Takes what a selector has selected, best first.
fn taken(selector: &mut Selector) -> impl Iterator<Item = (f32, Slot)> {
    selector.finish().iter().map(|&key| unkey(key))
}

#[cfg(test)]
mod tests;
