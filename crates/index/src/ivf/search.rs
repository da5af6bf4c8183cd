//! Searching: probe and scan the best lists, or look at every item.
//!
//! Sketch for one query (D = 128, C = 4096): centroids are 0.5 MB of int8 and stay in the second-level cache; P lists of N/C
//! items are `P N/C D` bytes read once from memory (P = 32, N = 1M: 1 MB, 40 µs at 25 GB/s) and as many multiply-adds,
//! 64 an instruction. A filter costs `words / 8` bytes a plane and list before that, and saves the blocks without survivors.

use std::time::Instant;

use super::filtered::{Filtered, FilteredQuery, MemberWords, Words};
use super::first_pass::{ItemCodes, Rates, Tables};
use super::own::OwnQuery;
use super::probing::{Counters, Probing, Scratch};
use super::quantize::Quantized;
use super::union::{Forms, Member, Union};
use super::view::{Index, WideRows};
use crate::topk::{self, Selector, unkey};
use sterling_core::units::{ListId, Slot};
use sterling_kernels::cpu::kernels::{BLOCK, Blocks, Staging};

/// Nanoseconds for each of all lists that a search takes which looks at those that it must, with a filter that few items pass: it scores
/// and orders them, and fills and goes through the words of many.
const FILTERED_LIST_NS: f64 = 100.0;

impl Union<'_> {
    /// Searches the best lists of `vector` `[D]` for the candidates of `selector`, whose K0 the caller has set.
    ///
    /// Without `words` exactly `probes` lists are scanned. With them and an ending, as many as it takes until the lists ahead
    /// are expected to hold too little of the best K0, and at least until `least` survivors were found. With words alone, all lists are where few items pass; else the search
    /// probes on beyond `probes` until K0 survivors were found and further lists hardly bring better ones. `probes_max` ends
    /// either. Lists that every search scans are scanned besides, and without `words` those ranked ones of the members' own that score
    /// as high as the last list of the index.
    pub fn search(
        &self,
        vector: &[f32],
        probing: Probing<'_>,
        words: Option<MemberWords<'_>>,
        selector: &mut Selector,
        k0: usize,
        scratch: &mut Scratch,
    ) -> Counters {
        let probing = probing.within(self.lists.lists());
        match words {
            None => self.search_best(vector, probing, selector, scratch),
            Some(words) => {
                let mut tables = std::mem::take(&mut scratch.tables);
                let with_tables = probing.by_codes && self.lists.make_tables(vector, &mut tables);
                let may_read_rows = probing.may_read_rows;
                let query = FilteredQuery { vector, tables: with_tables.then_some(&tables), k0, may_read_rows };
                let counters = Filtered::of(*self, query, words, selector, scratch).run(probing);
                scratch.tables = tables;
                counters
            }
        }
    }

    /// Scans the best lists, all items of them.
    fn search_best(
        &self,
        vector: &[f32],
        Probing { probes, by_codes, .. }: Probing<'_>,
        selector: &mut Selector,
        scratch: &mut Scratch,
    ) -> Counters {
        let mut counters = Counters { lists: probes as u64, ..Counters::default() };
        let mut tables = std::mem::take(&mut scratch.tables);
        let with_tables = by_codes && self.lists.make_tables(vector, &mut tables);
        let forms = |int8| Forms { vector, int8, tables: with_tables.then_some(&tables) };
        if probes == self.lists.lists() {
            self.lists.quantize(vector, &mut scratch.query);
            for member in self.members {
                member.scan_whole(member.filled_lists(), forms(&scratch.query), selector, &mut counters);
            }
            scratch.tables = tables;
            return counters;
        }
        let start = Instant::now();
        let mut own_lists = std::mem::take(&mut scratch.own);
        let (int8, best) = self.lists.best_lists(vector, probes, scratch);
        let query = forms(int8);
        counters.probe_time = start.elapsed();
        let threshold = best.last().map_or(f32::NEG_INFINITY, |&key| unkey(key).0);
        let best = || best.iter().map(|&key| ListId(unkey(key).1.0));
        for member in self.members {
            if self.has_lists(member) {
                member.scan_whole(member.filled_of(best()), query, selector, &mut counters);
            }
            member.scan_whole(member.filled_of(self.whole_lists(member)), query, selector, &mut counters);
        }
        for (_, member, own, ranked) in self.ranked() {
            member.score_own(own, ranked, OwnQuery::of(vector, int8), &mut own_lists);
            own_lists.choose(own.first, threshold);
            let chosen = own_lists.chosen.iter().copied();
            member.scan_whole(member.filled_of(chosen), query, selector, &mut counters);
        }
        scratch.tables = tables;
        scratch.own = own_lists;
        counters
    }
}

impl Index {
    /// Scores every centroid. Afterwards `scratch` hands out lists, best first.
    pub(super) fn score_lists(&self, vector: &[f32], scratch: &mut Scratch) {
        self.quantize(vector, &mut scratch.query);
        let lists = self.lists();
        scratch.scores.resize(lists.next_multiple_of(BLOCK) + BLOCK, 0.0);
        scratch.slots.resize(lists.next_multiple_of(BLOCK) + BLOCK, 0);
        let mut staging = Staging { scores: &mut scratch.scores, slots: &mut scratch.slots, len: 0 };
        self.kernels.scan(&self.centroids(), &scratch.query.view(), f32::NEG_INFINITY, 0, &mut staging);
        let scores = &mut scratch.scores[..lists];
        scores.iter_mut().zip(&*self.penalties).for_each(|(score, penalty)| *score -= penalty);
        scratch.lists.clear();
        scratch.lists.extend(scores.iter().enumerate().map(|(list, &score)| topk::key(score, Slot(list as u32))));
        scratch.ordered = 0;
    }

    /// The P best lists of a vector, best first.
    pub fn probe<'a>(
        &self,
        vector: &[f32],
        probes: usize,
        scratch: &'a mut Scratch,
    ) -> impl Iterator<Item = (ListId, f32)> + 'a {
        self.score_lists(vector, scratch);
        scratch.order(probes);
        scratch.lists[..scratch.ordered].iter().map(|&key| {
            let (score, list) = unkey(key);
            (ListId(list.0), score)
        })
    }

    /// The P best lists of a vector, fewer than all, best first as keys, with the vector's int8 form.
    pub(super) fn best_lists<'a>(
        &self,
        vector: &[f32],
        probes: usize,
        scratch: &'a mut Scratch,
    ) -> (&'a Quantized, &'a [u64]) {
        if self.penalties.is_empty() {
            self.quantize(vector, &mut scratch.query);
            scratch.coarse.reset(probes);
            scratch.coarse.scan(self.kernels, &self.centroids(), &scratch.query.view());
            return (&scratch.query, scratch.coarse.finish());
        }
        self.score_lists(vector, scratch);
        scratch.order(probes);
        (&scratch.query, &scratch.lists[..probes])
    }

    /// As [`Union::search`], of this index alone.
    pub fn search(
        &self,
        vector: &[f32],
        probing: Probing<'_>,
        words: Option<Words<'_>>,
        selector: &mut Selector,
        k0: usize,
        scratch: &mut Scratch,
    ) -> Counters {
        let alone = [self.alone()];
        let union = Union { lists: self, members: &alone };
        match words {
            None => union.search(vector, probing, None, selector, k0, scratch),
            Some(words) => {
                let mut of_members = |_: usize, list: ListId, out: &mut [u64]| words(list, out);
                union.search(vector, probing, Some(&mut of_members), selector, k0, scratch)
            }
        }
    }

    /// The only member of a union.
    pub(super) fn alone(&self) -> Member<'_> {
        Member { index: self, first_slot: 0 }
    }

    /// The centroids as blocks that are scanned, a list a slot.
    pub(super) fn centroids(&self) -> Blocks<'_> {
        Blocks {
            codes: &self.centroid_codes,
            scales: &self.centroid_scales,
            groups: self.dimension.div_ceil(4),
            items: self.lists(),
            first_slot: 0,
            next: &[],
        }
    }

    /// Makes a query's tables for the first pass's codes; false where there are none.
    pub(super) fn make_tables(&self, vector: &[f32], tables: &mut Tables) -> bool {
        self.first_pass.as_ref().is_some_and(|codes| {
            tables.set(&codes.coder, vector);
            true
        })
    }

    /// Bytes of a block of 16 items: codes and scales.
    pub fn block_bytes(&self) -> u64 {
        (self.dimension.div_ceil(4) * 64 + BLOCK * 4) as u64
    }

    /// The same where a search scans the first pass's codes.
    pub fn first_pass_block_bytes(&self) -> u64 {
        self.first_pass.as_ref().map_or_else(|| self.block_bytes(), ItemCodes::block_bytes)
    }

    /// Of so many items that pass a filter all rows are read in the time that a search takes for the lists that it looks at, which are most
    /// where few items pass.
    pub fn slots_max(&self) -> usize {
        (self.lists() as f64 * FILTERED_LIST_NS / Rates::row_ns(self.row_bytes() as f64)) as usize
    }

    /// Bytes of the widest row that is kept of an item.
    pub fn row_bytes(&self) -> u64 {
        let width = match &self.rows {
            WideRows::None => 1,
            WideRows::Bf16(_) | WideRows::F16(_) => 2,
            WideRows::F32(_) => 4,
        };
        (self.dimension * width) as u64
    }
}
