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
//! Items that came after the catalogue was built lie in parts beside it, each a catalogue of its own over the same lists or over
//! one; they are searched alike, one after the other, and the best of all are taken. Items that are gone have a tombstone.

mod expected;
mod tombstones;

use std::time::{Duration, Instant};

use crate::device::buffer::Buffer;
use crate::filter::{self, Plan, Route};
use crate::ivf::{self, Counters, Probing, Search};
use crate::topk::{Selector, unkey};
use crate::units::{ItemId, Slot};

pub use expected::Expected;
pub use tombstones::Tombstones;

/// Most candidates of all searches that run together; a selector takes about 34 bytes for each and keeps them.
const TOGETHER_MAX: usize = 1 << 18;
/// So many times the candidates are selected where too few of those that seemed to pass did.
const ROOM_GROWTH: usize = 4;
/// Candidates more that are selected where some may be gone.
const GONE_ROOM: usize = 64;

/// What is searched.
#[derive(Clone, Copy, Debug)]
pub struct Catalogue<'a> {
    /// The item index.
    pub index: &'a ivf::Index,
    /// Planes and posting lists of its items.
    pub filter: &'a filter::Index,
    /// The item of each slot, `[S]`: of equal scores the lowest ids are found. Without it those of the lowest slots.
    pub ids: Option<&'a Buffer<i64>>,
    /// Most lists that a filtered query may probe.
    pub probes_max: usize,
    /// Slots whose items are gone, where there are any.
    pub gone: Option<&'a Tombstones>,
    /// Further items, in the order of their slots.
    pub beside: &'a [Annex<'a>],
}

/// Items beside a catalogue.
#[derive(Clone, Copy, Debug)]
pub struct Annex<'a> {
    /// The items; nothing lies beside them again.
    pub catalogue: Catalogue<'a>,
    /// Their slot 0, counted from that of the catalogue that they lie beside.
    pub first_slot: u32,
}

/// What one query asks.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a> {
    /// `[D]`
    pub vector: &'a [f32],
    /// Which items are eligible.
    pub plan: &'a Plan,
    /// The same for each part beside the catalogue.
    pub beside: &'a [Plan],
    /// Slots that are not, ascending.
    pub excluded: &'a [Slot],
    /// Results, K: an unfiltered query that finds fewer probes on.
    pub k: usize,
    /// Candidates, K0.
    pub k0: usize,
    /// How many are selected, all of which are scored and kept, where another number than K0 takes: whoever asks merges them with
    /// what others found.
    pub selected: Option<usize>,
    /// Lists, P.
    pub probes: usize,
    /// When a search with a filter ends, where its probes were measured.
    pub ending: Option<ivf::Ending<'a>>,
    /// Looks at every item in f32 in place of probing.
    pub exact: bool,
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
    fn add_search(&mut self, took: Duration, words: Duration, counters: &Counters) {
        self.probe += counters.probe_time;
        self.words += words;
        self.scan += took.saturating_sub(words + counters.probe_time);
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
    words: filter::Scratch,
    candidates: Vec<(f32, Slot)>,
    /// Candidates with the scores that they were selected by, of queries that ask for them.
    selected: Vec<(f32, Slot)>,
    slots: Vec<u32>,
    products: Vec<f32>,
    /// Candidates of all parts.
    merged: Vec<(f32, Slot)>,
}

/// What a query found together with others: in which of the scratch's selectors, and its share of what they took.
struct Together {
    selector: usize,
    counters: Counters,
    took: Duration,
}

impl Query<'_> {
    /// Candidates that are selected by int8 scores.
    fn room(&self, index: &ivf::Index) -> usize {
        self.selected.unwrap_or_else(|| index.rows().selected(self.k0))
    }

    /// Candidates that are kept.
    fn kept(&self) -> usize {
        self.selected.unwrap_or(self.k0)
    }

    /// Survivors that a filtered search does with, which selects `room` of them.
    fn enough(&self, room: usize) -> usize {
        // Of survivors that are no "maybes" none drops out again.
        if self.ending.is_some() && self.plan.is_exact() { self.k0 } else { room }
    }

    /// The same without words: some of them may be excluded or gone.
    fn room_unfiltered(&self, catalogue: &Catalogue<'_>) -> usize {
        let room = self.room(catalogue.index) + self.excluded.len();
        match catalogue.gone {
            // About as many as there are among so many, and half as many again.
            Some(gone) => {
                let share = gone.len() as f64 / catalogue.index.items().max(1) as f64;
                room + (room as f64 * share * 1.5) as usize + GONE_ROOM
            }
            None => room,
        }
    }

    fn is_excluded(&self, slot: Slot) -> bool {
        self.excluded.binary_search(&slot).is_ok()
    }
}

impl Catalogue<'_> {
    /// Searches all queries and hands `sink` what each found as soon as it is found.
    pub fn search(&self, queries: &[Query<'_>], scratch: &mut Scratch, sink: &mut dyn Sink) {
        let mut together: Vec<Option<Together>> = self.search_together(queries, scratch);
        let mut order: Vec<usize> = (0..queries.len()).collect();
        let plan = |n: &usize| std::ptr::from_ref(queries[*n].plan);
        order.sort_by_key(plan);
        for of_plan in order.chunk_by(|a, b| plan(a) == plan(b)) {
            if of_plan.len() > 1 {
                scratch.words.keep(queries[of_plan[0]].plan);
            }
            for &n in of_plan {
                if sink.is_wanted(n) {
                    let (query, mut times) = (&queries[n], Times::default());
                    scratch.selected.clear();
                    let mut counters = self.find(query, together[n].take(), scratch, &mut times);
                    let mut rescored = self.settle(query, 0, scratch, &mut times);
                    if !self.beside.is_empty() {
                        rescored += self.search_beside(query, scratch, &mut counters, &mut times);
                    }
                    let Scratch { candidates, selected, .. } = &mut *scratch;
                    sink.found(n, Found { candidates, selected, counters, rescored, times });
                }
            }
        }
    }

    /// Searches the parts beside, and leaves the best K0 of all in `scratch.candidates`. Returns how many rows were scored again.
    fn search_beside(
        &self,
        query: &Query<'_>,
        scratch: &mut Scratch,
        counters: &mut Counters,
        times: &mut Times,
    ) -> u64 {
        let mut merged = std::mem::take(&mut scratch.merged);
        merged.clone_from(&scratch.candidates);
        let (mut rescored, mut excluded) = (0, Vec::new());
        for (part, plan) in self.beside.iter().zip(query.beside) {
            part.take(query.excluded, &mut excluded);
            // Lists that hold too few are made up for by those of the parts that follow, and by the last one's further lists.
            let k = query.k.saturating_sub(merged.len());
            // What was measured of ends is of the catalogue's own lists: here a search ends where further lists bring little.
            let of_part = Query { plan, beside: &[], excluded: &excluded, k, ending: None, ..*query };
            counters.add(&part.catalogue.find(&of_part, None, scratch, times));
            rescored += part.catalogue.settle(&of_part, part.first_slot, scratch, times);
            merged.extend(scratch.candidates.iter().map(|(score, slot)| (*score, Slot(slot.0 + part.first_slot))));
        }
        match query.selected {
            // Which of them are kept, their selection decides.
            Some(most) => {
                let mut selected = std::mem::take(&mut scratch.selected);
                self.keep_best(most, &mut selected);
                scratch.selected = selected;
                self.keep_best(merged.len(), &mut merged);
            }
            None => self.keep_best(query.k0, &mut merged),
        }
        std::mem::swap(&mut scratch.candidates, &mut merged);
        scratch.merged = merged;
        rescored
    }

    /// Keeps the best `k` of candidates of all parts, best first; of equal scores those of the lowest ids.
    fn keep_best(&self, k: usize, candidates: &mut Vec<(f32, Slot)>) {
        let better = |a: &(f32, Slot), b: &(f32, Slot)| {
            // Sums with +0 make one zero of two.
            (b.0 + 0.0).total_cmp(&(a.0 + 0.0)).then_with(|| self.rank(a.1).cmp(&self.rank(b.1)))
        };
        if k < candidates.len() {
            candidates.select_nth_unstable_by(k, better);
            candidates.truncate(k);
        }
        candidates.sort_unstable_by(better);
    }

    /// What equal scores are ordered by: the item in a slot of any part, or the slot where no items are known.
    fn rank(&self, slot: Slot) -> (ItemId, Slot) {
        let at = self.beside.partition_point(|part| part.first_slot <= slot.0);
        let (ids, local) = match at.checked_sub(1).map(|at| &self.beside[at]) {
            Some(part) => (part.catalogue.ids, Slot(slot.0 - part.first_slot)),
            None => (self.ids, slot),
        };
        (ids.map_or(ItemId(0), |ids| ItemId(ids[local.index()])), slot)
    }

    fn is_gone(&self, slot: Slot) -> bool {
        self.gone.is_some_and(|gone| gone.contains(slot))
    }

    /// Steps 4 and 6 for all queries without a filter, list by list, where they are so many that they share lists.
    fn search_together(&self, queries: &[Query<'_>], scratch: &mut Scratch) -> Vec<Option<Together>> {
        let mut found: Vec<Option<Together>> = queries.iter().map(|_| None).collect();
        let mut left = TOGETHER_MAX;
        let mut taken: Vec<(usize, usize)> = Vec::new();
        for (n, query) in queries.iter().enumerate() {
            let room = query.room_unfiltered(self);
            if !query.exact && matches!(query.plan.route(), Route::All) && room <= left {
                left -= room;
                taken.push((n, room));
            }
        }
        let probes = taken.iter().map(|(n, _)| queries[*n].probes).sum();
        if taken.len() < 2 || !self.index.shares_lists(probes) {
            return found;
        }
        // The largest first: then the first selectors alone grow large, and stay so.
        taken.sort_by_key(|(_, room)| std::cmp::Reverse(*room));
        let Scratch { selectors, batch, .. } = scratch;
        selectors.resize_with(taken.len().max(selectors.len()), Selector::new);
        let start = Instant::now();
        let each = taken.iter().zip(&mut *selectors);
        let mut searches: Vec<Search<'_>> = each
            .map(|((n, room), selector)| {
                self.begin(selector, *room);
                Search::new(queries[*n].vector, queries[*n].probes, selector)
            })
            .collect();
        self.index.search_batch(&mut searches, batch);
        let share = u32::try_from(taken.len()).unwrap_or(u32::MAX);
        let took = start.elapsed() / share;
        for (selector, ((n, _), search)) in taken.iter().zip(&searches).enumerate() {
            let counters = Counters { probe_time: search.counters.probe_time / share, ..search.counters };
            found[*n] = Some(Together { selector, counters, took });
        }
        found
    }

    /// Fills `scratch.candidates` with verified slots and the scores that chose them, best first.
    fn find(
        &self,
        query: &Query<'_>,
        together: Option<Together>,
        scratch: &mut Scratch,
        times: &mut Times,
    ) -> Counters {
        scratch.candidates.clear();
        match query.plan.route() {
            Route::Nothing => Counters::default(),
            Route::Slots(slots) => self.find_slots(query, slots, scratch, times),
            _ if query.exact => self.find_exact(query, scratch, times),
            Route::All => {
                let counters = self.find_unfiltered(query, together, scratch, times);
                // Without a filter the first P lists do, unless they hold too few: then the pass probes on, as with one.
                let enough = scratch.candidates.len() >= query.k || counters.lists == self.index.lists() as u64;
                // Where more of the selected were gone than there was room for, words keep them from being selected.
                let crowded_out = self.gone.is_some()
                    && counters.survivors > query.room_unfiltered(self) as u64
                    && scratch.candidates.len() < query.room(self.index);
                if enough && !crowded_out { counters } else { self.find_filtered(query, scratch, times) }
            }
            Route::Words => self.find_filtered(query, scratch, times),
        }
    }

    fn find_slots(&self, query: &Query<'_>, slots: &[Slot], scratch: &mut Scratch, times: &mut Times) -> Counters {
        let start = Instant::now();
        let eligible: Vec<Slot> =
            slots.iter().copied().filter(|&slot| !query.is_excluded(slot) && !self.is_gone(slot)).collect();
        self.begin(&mut scratch.selector, query.kept());
        let counters = self.index.search_slots(query.vector, &eligible, &mut scratch.selector);
        scratch.candidates.extend(scratch.selector.finish().iter().map(|&key| unkey(key)));
        times.scan += start.elapsed();
        counters
    }

    fn find_exact(&self, query: &Query<'_>, scratch: &mut Scratch, times: &mut Times) -> Counters {
        let start = Instant::now();
        self.begin(&mut scratch.selector, query.kept());
        let eligible = |slot| !self.is_gone(slot) && query.plan.passes(slot) && !query.is_excluded(slot);
        let counters = self.index.search_exact(query.vector, eligible, &mut scratch.selector);
        scratch.candidates.extend(scratch.selector.finish().iter().map(|&key| unkey(key)));
        times.scan += start.elapsed();
        counters
    }

    fn find_unfiltered(
        &self,
        query: &Query<'_>,
        together: Option<Together>,
        scratch: &mut Scratch,
        times: &mut Times,
    ) -> Counters {
        let Scratch { selector, selectors, alone, candidates, .. } = scratch;
        let (selector, counters, took) = match together {
            Some(found) => (&mut selectors[found.selector], found.counters, found.took),
            None => {
                let (start, room) = (Instant::now(), query.room_unfiltered(self));
                self.begin(selector, room);
                let counters = self.index.search(query.vector, self.probing(query), None, selector, room, alone);
                (&mut *selector, counters, start.elapsed())
            }
        };
        times.add_search(took, Duration::ZERO, &counters);
        self.verify(query, selector, candidates, times);
        counters
    }

    fn find_filtered(&self, query: &Query<'_>, scratch: &mut Scratch, times: &mut Times) -> Counters {
        let Scratch { selector, alone, words, candidates, .. } = scratch;
        let (mut room, mut again) = (query.room(self.index), 0);
        loop {
            self.begin(selector, room);
            let start = Instant::now();
            let mut words_time = Duration::ZERO;
            let mut fill = |list, out: &mut [u64]| {
                let start = Instant::now();
                query.plan.words(self.filter, list, words, out);
                self.filter.exclude(list, query.excluded, out);
                if let Some(gone) = self.gone {
                    gone.clear(self.filter.first_slot(list), &mut out[..self.filter.words(list)]);
                }
                words_time += start.elapsed();
            };
            let enough = query.enough(room);
            let probing = self.probing(query);
            let counters = self.index.search(query.vector, probing, Some(&mut fill), selector, enough, alone);
            let counters = Counters { again, ..counters };
            times.add_search(start.elapsed(), words_time, &counters);
            self.verify(query, selector, candidates, times);
            // Where "maybe" bits filled the selection and too few of them held, more of the survivors are looked at.
            let all_seen = counters.survivors <= room as u64;
            if candidates.len() >= query.kept() || all_seen || query.plan.is_exact() {
                return counters;
            }
            room = (room * ROOM_GROWTH).min(self.index.items());
            again += 1;
        }
    }

    /// Selects the `k` best of what follows.
    fn begin(&self, selector: &mut Selector, k: usize) {
        match self.ids {
            Some(ids) => selector.reset_by_id(k, ids),
            None => selector.reset(k),
        }
    }

    fn probing<'a>(&self, query: &Query<'a>) -> Probing<'a> {
        Probing {
            probes: query.probes,
            probes_max: self.probes_max,
            pass_rate: query.plan.pass_rate(),
            ending: query.ending,
        }
    }

    /// Scores candidates of int8 products by their wide rows, and keeps the best K0. Returns how many were scored. `first_slot` is
    /// the slot 0 of this part, where that is told what they were selected by.
    fn settle(&self, query: &Query<'_>, first_slot: u32, scratch: &mut Scratch, times: &mut Times) -> u64 {
        if query.selected.is_some() {
            let Scratch { candidates, selected, .. } = &mut *scratch;
            selected.extend(candidates.iter().map(|(score, slot)| (*score, Slot(slot.0 + first_slot))));
        }
        let has_best_scores = query.exact || matches!(query.plan.route(), Route::Slots(_));
        if has_best_scores || matches!(self.index.rows(), ivf::WideRows::None) {
            scratch.candidates.truncate(query.kept());
            return 0;
        }
        let start = Instant::now();
        let rescored = self.rescore(query.vector, query.kept(), scratch);
        times.rescore += start.elapsed();
        rescored
    }

    /// Scores ascending `slots`, of any part, by their widest rows: best first in the candidates of what is found.
    pub fn score(&self, vector: &[f32], slots: &[Slot], scratch: &mut Scratch, sink: &mut dyn FnMut(Found<'_>)) {
        let start = Instant::now();
        let of_main = self.beside.first().map_or(slots.len(), |part| slots.partition_point(|s| s.0 < part.first_slot));
        let mut rescored = self.score_own(vector, &slots[..of_main], scratch);
        if of_main < slots.len() {
            let mut merged = std::mem::take(&mut scratch.merged);
            merged.clone_from(&scratch.candidates);
            let mut own = Vec::new();
            for part in self.beside {
                part.take(slots, &mut own);
                rescored += part.catalogue.score_own(vector, &own, scratch);
                merged.extend(scratch.candidates.iter().map(|(score, slot)| (*score, Slot(slot.0 + part.first_slot))));
            }
            self.keep_best(slots.len(), &mut merged);
            std::mem::swap(&mut scratch.candidates, &mut merged);
            scratch.merged = merged;
        }
        let times = Times { rescore: start.elapsed(), ..Times::default() };
        let candidates = &mut scratch.candidates;
        sink(Found { candidates, selected: &[], counters: Counters::default(), rescored, times });
    }

    /// The same for slots of its own.
    fn score_own(&self, vector: &[f32], slots: &[Slot], scratch: &mut Scratch) -> u64 {
        scratch.candidates.clear();
        scratch.candidates.extend(slots.iter().map(|&slot| (0.0, slot)));
        self.rescore(vector, slots.len(), scratch)
    }

    /// Scores the candidates with the widest rows, read in their order, and keeps the best K0, best first.
    fn rescore(&self, vector: &[f32], k0: usize, scratch: &mut Scratch) -> u64 {
        let Scratch { candidates, selector, slots, products, .. } = scratch;
        slots.clear();
        slots.extend(candidates.iter().map(|(_, slot)| slot.0));
        slots.sort_unstable();
        products.resize(slots.len(), 0.0);
        self.index.products(vector, slots, products);
        self.begin(selector, k0);
        slots.iter().zip(&*products).for_each(|(&slot, &score)| selector.push(score, Slot(slot)));
        candidates.clear();
        candidates.extend(selector.finish().iter().map(|&key| unkey(key)));
        slots.len() as u64
    }

    /// Step 7: what is selected, less what is excluded or gone or only seemed to pass.
    fn verify(&self, query: &Query<'_>, selected: &mut Selector, candidates: &mut Vec<(f32, Slot)>, times: &mut Times) {
        let start = Instant::now();
        let checked = !query.plan.is_exact();
        let holds = |slot| !query.is_excluded(slot) && !self.is_gone(slot) && (!checked || query.plan.passes(slot));
        candidates.clear();
        candidates.extend(selected.finish().iter().map(|&key| unkey(key)).filter(|(_, slot)| holds(*slot)));
        times.verify += start.elapsed();
    }
}

impl Annex<'_> {
    /// Those of ascending slots of all parts that are this one's, counted from its own first.
    fn take(&self, slots: &[Slot], own: &mut Vec<Slot>) {
        let from = slots.partition_point(|slot| slot.0 < self.first_slot);
        let end = u64::from(self.first_slot) + self.catalogue.index.slots() as u64;
        own.clear();
        own.extend(
            slots[from..].iter().take_while(|slot| u64::from(slot.0) < end).map(|slot| Slot(slot.0 - self.first_slot)),
        );
    }
}

#[cfg(test)]
mod tests;
