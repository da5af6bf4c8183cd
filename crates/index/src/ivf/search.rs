//! Search of an index: probes and scans the best lists, or all lists.
//!
//! Cost sketch for one query (D = 128, C = 4096): centroids are 0.5 MB of int8 and stay in the L2 cache. P lists of N/C items are
//! `P N/C D` bytes read once from memory (P = 32, N = 1M: 1 MB, 40 µs at 25 GB/s), with as many multiply-adds, 64 per
//! instruction. A filter first reads one bit per item and plane of a list, and saves the blocks without passing items.

use std::time::Instant;

use super::filtered::{Filtered, FilteredQuery, MemberWords, Words};
use super::first_pass::{ItemCodes, Rates, Tables};
use super::ood::OodProbing;
use super::own_lists::OwnQuery;
use super::probing::{Counters, Probing, Scratch};
use super::quantize::Quantized;
use super::union::{Forms, Member, Union};
use super::view::{Index, WideRows};
use crate::topk::{self, Selector, unkey};
use sterling_core::units::{ListId, Slot};
use sterling_kernels::cpu::kernels::{BLOCK, Blocks, Staging};

/// Cost in nanoseconds per list of the index for a filtered search with a low pass rate: it scores and orders all lists, and
/// computes and traverses the bitmaps of many.
const FILTERED_LIST_NS: f64 = 100.0;

impl Union<'_> {
    /// Searches the best lists of `vector` `[D]` for the candidates of `selector`, whose K0 the caller has set.
    ///
    /// Without `words` (a filter), exactly `probes` lists are scanned, or those of `ood` if the query is out of
    /// distribution. With a filter and a termination criterion, lists are scanned until the unscanned ones are expected
    /// to hold too little of the best K0 and at least `least` items passed. With a filter and no termination criterion,
    /// all lists are scanned if the pass rate is low; if it is not low, the search continues beyond `probes` until K0
    /// items passed and further lists yield hardly any better ones. The number `probes_max` limits both kinds of
    /// filtered search. Lists that every search scans are scanned in addition. Without a filter, the other lists that
    /// only one segment has (`own_lists`) are scanned if they score at least as high as the last list of the index.
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

    /// Scans all items of the best lists.
    fn search_best(
        &self,
        vector: &[f32],
        Probing { probes, ood, by_codes, .. }: Probing<'_>,
        selector: &mut Selector,
        scratch: &mut Scratch,
    ) -> Counters {
        let lists = self.lists.lists();
        let mut counters = Counters { lists: probes as u64, ..Counters::default() };
        let mut tables = std::mem::take(&mut scratch.tables);
        let with_tables = by_codes && self.lists.make_tables(vector, &mut tables);
        let forms = |int8| Forms { vector, int8, tables: with_tables.then_some(&tables) };
        if probes == lists {
            self.lists.quantize(vector, &mut scratch.query);
            for member in self.members {
                member.scan_whole(member.filled_lists(), forms(&scratch.query), selector, &mut counters);
            }
            scratch.tables = tables;
            return counters;
        }
        let start = Instant::now();
        let mut own_lists = std::mem::take(&mut scratch.own);
        let (int8, best) = self.lists.best_lists(vector, (probes, ood), scratch);
        let query = forms(int8);
        counters.probe_time = start.elapsed();
        counters.lists = best.len() as u64;
        let last = best.last().filter(|_| best.len() < lists);
        let threshold = last.map_or(f32::NEG_INFINITY, |&key| unkey(key).0);
        let best = || best.iter().map(|&key| ListId(unkey(key).1.0));
        for member in self.members {
            if self.has_lists(member) {
                member.scan_whole(member.filled_of(best()), query, selector, &mut counters);
            }
            member.scan_whole(member.filled_of(self.always_scanned_lists(member)), query, selector, &mut counters);
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
    /// Scores every centroid. Afterwards `scratch` holds the lists, to be sorted on demand.
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

    /// Returns the P best lists of a vector, best first.
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

    /// Returns the reach of a query `[D]`: the score of its best centroid, divided by its length.
    pub fn reach(&self, query: &[f32], scratch: &mut Scratch) -> f32 {
        let (int8, best) = self.best_lists(query, (1, None), scratch);
        let best = best.first().map_or(0.0, |&key| unkey(key).0);
        best / int8.length().max(f32::MIN_POSITIVE)
    }

    /// Returns the P best lists of a vector as keys, best first, with the quantized vector. P is `probes`, which must
    /// be below the number of lists, or another number for a query that is out of distribution.
    pub(super) fn best_lists<'a>(
        &self,
        vector: &[f32],
        (probes, ood): (usize, Option<OodProbing>),
        scratch: &'a mut Scratch,
    ) -> (&'a Quantized, &'a [u64]) {
        let more = |best: u64, query: &Quantized| {
            let ood = ood.filter(|ood| ood.probes > probes && ood.is_for(unkey(best).0, query));
            ood.map(|ood| ood.probes.min(self.lists()))
        };
        if self.penalties.is_empty() {
            self.quantize(vector, &mut scratch.query);
            scratch.coarse.reset(probes);
            scratch.coarse.scan(self.kernels, &self.centroids(), &scratch.query.view());
            let best = scratch.coarse.finish()[0];
            if let Some(probes) = more(best, &scratch.query) {
                scratch.coarse.reset(probes);
                scratch.coarse.scan(self.kernels, &self.centroids(), &scratch.query.view());
                scratch.coarse.finish();
            }
            return (&scratch.query, scratch.coarse.finished());
        }
        self.score_lists(vector, scratch);
        scratch.order(probes);
        let probes = more(scratch.lists[0], &scratch.query).unwrap_or(probes);
        scratch.order(probes);
        (&scratch.query, &scratch.lists[..probes])
    }

    /// Searches this index alone, as [`Union::search`].
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

    /// Returns the index as the only segment of a union.
    pub(super) fn alone(&self) -> Member<'_> {
        Member { index: self, first_slot: 0 }
    }

    /// Returns the centroids as blocks to scan, one list per slot.
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

    /// Computes the query tables for first-pass codes; returns false if the index has none.
    pub(super) fn make_tables(&self, vector: &[f32], tables: &mut Tables) -> bool {
        self.first_pass.as_ref().is_some_and(|codes| {
            tables.set(&codes.coder, vector);
            true
        })
    }

    /// Returns the size of a block of 16 items in bytes: codes and scales.
    pub fn block_bytes(&self) -> u64 {
        (self.dimension.div_ceil(4) * 64 + BLOCK * 4) as u64
    }

    /// Returns the size of a block of 16 items in bytes that a search with first-pass codes scans.
    pub fn first_pass_block_bytes(&self) -> u64 {
        self.first_pass.as_ref().map_or_else(|| self.block_bytes(), ItemCodes::block_bytes)
    }

    /// Returns the number of items whose rows can be read one by one in the time that a filtered search spends on lists.
    pub fn slots_max(&self) -> usize {
        (self.lists() as f64 * FILTERED_LIST_NS / Rates::row_ns(self.row_bytes() as f64)) as usize
    }

    /// Returns the size of an item's most precise row in bytes.
    pub fn row_bytes(&self) -> u64 {
        let width = match &self.rows {
            WideRows::None => 1,
            WideRows::Bf16(_) | WideRows::F16(_) => 2,
            WideRows::F32(_) => 4,
        };
        (self.dimension * width) as u64
    }
}
