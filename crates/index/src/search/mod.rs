//! Steps 4 to 8 of the pass: finds the best K0 eligible items of each query by retrieval score.
//!
//! 1. If the filter resolves to slots, or the search is exact, items are scored by their most precise rows.
//! 2. Queries without a filter probe their best lists, together and list by list if there are enough of them to share lists.
//! 3. Queries with a filter compute its bitmaps on the probed lists, and probe more lists while too few items pass. Queries with
//!    the same plan run one after the other and share its bitmaps.
//! 4. Candidates are verified: excluded items and false positives of Bloom planes are removed. If verification removes
//!    too many items, more items are examined.
//! 5. Candidates selected by int8 scores are scored again by their rescoring rows. Somewhat more than K0 are selected for that,
//!    so that rounding near the cutoff has no effect.
//!
//! Items added after the catalogue was built are in further segments: over the lists of the first segment, in a single
//! list, or in lists of their own. All segments are searched as one ([`ivf::Union`]): lists are selected once, and
//! candidates of all segments are selected, verified and rescored together. Deleted items have a tombstone.
//!
//! If the index has first-pass codes, a query may scan these in place of int8 rows; with a filter only the passing
//! items. More candidates are selected in that case; all else is the same. Delta segments have int8 rows only. Code
//! scores and int8 scores approximate the same product, so items of all segments are selected together and then
//! rescored by rows.

mod batch;
mod expected;
mod find;
mod rescore;
mod shard_bound;
mod tombstones;

use std::time::Duration;

use crate::filter::{self, Plan};
use crate::ivf::{self, Counters, Member};
use crate::topk::{Selector, unkey};
use sterling_core::units::Slot;
use sterling_kernels::buffer::Buffer;

pub use expected::Expected;
pub use shard_bound::likely;
pub use tombstones::Tombstones;

/// Segments to search.
#[derive(Clone, Copy, Debug)]
pub struct Catalogue<'a> {
    /// Segments in ascending order of their slots; the lists of the first segment are probed.
    pub segments: &'a [Segment<'a>],
    /// Maximum number of lists that a filtered query may probe.
    pub probes_max: usize,
}

/// Segment of a catalogue.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    /// Item index: over the lists of the first segment, in one list, or in lists that only this segment has.
    pub index: &'a ivf::Index,
    /// Planes and posting lists of the segment's items.
    pub filter: &'a filter::Index,
    /// Item id of each slot, `[S]`. Of items with equal scores, the lowest ids rank first; without ids, the lowest
    /// slots.
    pub ids: Option<&'a Buffer<i64>>,
    /// Deleted slots, if there are any.
    pub tombstones: Option<&'a Tombstones>,
    /// Index of the segment's slot 0 over all segments.
    pub first_slot: u32,
}

/// Search parameters of one query. A pass decides them once per request, and uses the same on every device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SearchPlan {
    /// Number of results, K: a query that finds fewer results probes more lists.
    pub k: usize,
    /// Number of candidates, K0.
    pub k0: usize,
    /// Number of items to select, score and return in place of K0, for a shard whose results the caller merges with
    /// others.
    pub selected: Option<usize>,
    /// Number of inverted lists to probe, nprobe.
    pub probes: usize,
    /// nprobe for a query that is out of distribution, without a filter.
    pub ood: Option<ivf::OodProbing>,
    /// Scans every item in f32 in place of probing.
    pub exact: bool,
    /// Number of items that first-pass codes select, R, if these are scanned in place of int8 rows.
    pub by_codes: Option<usize>,
    /// Minimum number of items that int8 scores select.
    pub by_int8: usize,
}

/// Query with its eligible items.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a> {
    /// Query vector, `[D]`.
    pub vector: &'a [f32],
    /// Search parameters.
    pub search: SearchPlan,
    /// Filter plan of the first segment.
    pub plan: &'a Plan,
    /// Filter plans of further segments.
    pub beside: &'a [Plan],
    /// Excluded slots, ascending.
    pub excluded: &'a [Slot],
    /// Termination criterion of a filtered search, if nprobe was calibrated.
    pub ending: Option<ivf::Ending<'a>>,
}

/// Result of a query.
#[derive(Debug)]
pub struct Found<'a> {
    /// Retrieval scores and slots, best first, at most K0.
    pub candidates: &'a mut Vec<(f32, Slot)>,
    /// The candidates with the scores that selected them, if the query sets `selected`; otherwise empty.
    pub selected: &'a [(f32, Slot)],
    /// Counters of the search.
    pub counters: Counters,
    /// Number of candidates that were rescored.
    pub rescored: u64,
    /// Times of the steps.
    pub times: Times,
}

/// Times of the steps of a search.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    /// Step 4: selection of the lists.
    pub probe: Duration,
    /// Step 5: filter bitmaps.
    pub words: Duration,
    /// Step 6: scan.
    pub scan: Duration,
    /// Step 7: verification.
    pub verify: Duration,
    /// Step 8: rescoring.
    pub rescore: Duration,
}

impl Times {
    /// Adds the times of other searches.
    pub fn add(&mut self, other: &Times) {
        let Times { probe, words, scan, verify, rescore } = other;
        self.probe += *probe;
        self.words += *words;
        self.scan += *scan;
        self.verify += *verify;
        self.rescore += *rescore;
    }

    /// Adds the time of a search; time outside of probing and bitmaps counts as scanning.
    fn add_search(&mut self, took: Duration, counters: &Counters) {
        self.probe += counters.probe_time;
        self.words += counters.words_time;
        self.scan += took.saturating_sub(counters.words_time + counters.probe_time);
    }
}

/// Receives the results of queries, in any order.
pub trait Sink {
    /// Returns false if query `n` no longer needs to be searched.
    fn is_wanted(&mut self, n: usize) -> bool;

    /// Receives the result of query `n`.
    fn found(&mut self, n: usize, found: Found<'_>);
}

/// Buffers of searches, reused between calls.
#[derive(Debug, Default)]
pub struct Scratch {
    selector: Selector,
    alone: ivf::Scratch,
    /// Selectors of queries that are searched together.
    selectors: Vec<Selector>,
    batch: ivf::BatchScratch,
    /// Filter buffers, one per segment.
    words: Vec<filter::Scratch>,
    candidates: Vec<(f32, Slot)>,
    /// Candidates that are already scored by their rows.
    scored: Vec<(f32, Slot)>,
    /// Candidates with the scores that selected them, for queries that request them.
    selected: Vec<(f32, Slot)>,
    slots: Vec<u32>,
    /// Slots of one segment, in its own numbering.
    own: Vec<u32>,
    products: Vec<f32>,
}

/// Result of a query that was searched together with others: the number of its selector, its counters and its share of the time.
struct BatchResult {
    selector: usize,
    counters: Counters,
    took: Duration,
}

impl<'a> Query<'a> {
    fn plan_of(&self, segment: usize) -> &'a Plan {
        segment.checked_sub(1).map_or(self.plan, |at| &self.beside[at])
    }

    /// Returns the number of candidates to select by int8 scores.
    fn room(&self, catalogue: &Catalogue<'_>) -> usize {
        self.search
            .selected
            .unwrap_or_else(|| catalogue.main().index.rows().selected(self.search.k0).max(self.search.by_int8))
    }

    /// Returns the number of candidates to select first: by first-pass codes, or otherwise by int8 scores.
    fn room_at_first(&self, catalogue: &Catalogue<'_>) -> usize {
        match (self.search.selected, self.search.by_codes) {
            (None, Some(selected)) => selected.max(self.search.k0),
            _ => self.room(catalogue),
        }
    }

    /// Returns the number of candidates to retain.
    fn kept(&self) -> usize {
        self.search.selected.unwrap_or(self.search.k0)
    }

    fn is_excluded(&self, slot: Slot) -> bool {
        self.excluded.binary_search(&slot).is_ok()
    }
}

impl<'a> Catalogue<'a> {
    /// Searches all queries and passes each result to `sink` as soon as it is complete.
    pub fn search(&self, queries: &[Query<'_>], scratch: &mut Scratch, sink: &mut dyn Sink) {
        let mut together: Vec<Option<BatchResult>> = self.search_together(queries, scratch);
        scratch.words.resize_with(self.segments.len().max(scratch.words.len()), Default::default);
        let mut order: Vec<usize> = (0..queries.len()).collect();
        let plan = |n: &usize| std::ptr::from_ref(queries[*n].plan);
        order.sort_by_key(plan);
        for of_plan in order.chunk_by(|a, b| plan(a) == plan(b)) {
            if of_plan.len() > 1 {
                let first = &queries[of_plan[0]];
                scratch
                    .words
                    .iter_mut()
                    .take(self.segments.len())
                    .enumerate()
                    .for_each(|(n, of)| of.keep(first.plan_of(n)));
            }
            for &n in of_plan {
                if sink.is_wanted(n) {
                    let (query, mut times) = (&queries[n], Times::default());
                    let counters = self.find(query, together[n].take(), scratch, &mut times, &mut || sink.is_wanted(n));
                    // Partial results of a cancelled search are no answer.
                    if query.search.exact && !sink.is_wanted(n) {
                        continue;
                    }
                    let rescored = self.rescore(query, scratch, &mut times);
                    let Scratch { candidates, selected, .. } = &mut *scratch;
                    sink.found(n, Found { candidates, selected, counters, rescored, times });
                }
            }
        }
    }

    /// Returns the segment whose lists are probed.
    fn main(&self) -> &'a Segment<'a> {
        &self.segments[0]
    }

    /// Returns the number of items, including deleted ones.
    fn items(&self) -> usize {
        self.segments.iter().map(|segment| segment.index.items()).sum()
    }

    /// Returns the segment of a slot, and the slot in its own numbering.
    fn segment_of(&self, slot: Slot) -> (usize, Slot) {
        let at = self.segments.partition_point(|segment| segment.first_slot <= slot.0).saturating_sub(1);
        (at, Slot(slot.0 - self.segments[at].first_slot))
    }

    /// Resets a selector to the `k` best, with ties by id.
    fn begin(&self, selector: &mut Selector, k: usize) {
        let ids = self.segments.iter().filter_map(|segment| Some((segment.first_slot, segment.ids?)));
        selector.reset_by_id(k, ids);
    }
}

impl<'a> Segment<'a> {
    fn is_deleted(&self, slot: Slot) -> bool {
        self.tombstones.is_some_and(|tombstones| tombstones.contains(slot))
    }

    fn member(&self) -> Member<'a> {
        Member { index: self.index, first_slot: self.first_slot }
    }

    /// Returns the `slots` (ascending) that belong to this segment, numbered within the segment.
    fn take(&self, slots: &[Slot]) -> Vec<Slot> {
        let from = slots.partition_point(|slot| slot.0 < self.first_slot);
        let end = u64::from(self.first_slot) + self.index.slots() as u64;
        let own = slots[from..].iter().take_while(|slot| u64::from(slot.0) < end);
        own.map(|slot| Slot(slot.0 - self.first_slot)).collect()
    }
}

/// Returns the selected items, best first.
fn taken(selector: &mut Selector) -> impl Iterator<Item = (f32, Slot)> {
    selector.finish().iter().map(|&key| unkey(key))
}

#[cfg(test)]
mod tests;
