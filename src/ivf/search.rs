//! Searching: probe and scan the best lists, or look at every item.
//!
//! Sketch for one query (D = 128, C = 4096): centroids are 0.5 MB of int8 and stay in the second-level cache; P lists of N/C
//! items are `P N/C D` bytes read once from memory (P = 32, N = 1M: 1 MB, 40 µs at 25 GB/s) and as many multiply-adds,
//! 64 an instruction. A filter costs `words / 8` bytes a plane and list before that, and saves the blocks without survivors.

use std::time::Instant;

use super::filtered::{Filtered, Words};
use super::probing::{Counters, Probing, Scratch};
use super::quantize::Quantized;
use super::view::{Index, WideRows};
use crate::device::cpu::kernels::{BLOCK, Blocks, Staging};
use crate::topk::{self, Selector, unkey};
use crate::units::{ListId, Slot};

/// Slots whose rows are scored together, so that the memory always has some to bring.
const ROWS_AT_ONCE: usize = 1024;

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

    /// Searches the best lists of `vector` `[D]` for the candidates of `selector`, whose K0 the caller has set.
    ///
    /// Without `words` exactly `probes` lists are scanned. With them and an ending, as many as it takes until the lists ahead
    /// are expected to hold too little of the best K0. With words alone, all lists are where few items pass; else the search
    /// probes on beyond `probes` until K0 survivors were found and further lists hardly bring better ones. `probes_max` ends
    /// either.
    pub fn search(
        &self,
        vector: &[f32],
        probing: Probing<'_>,
        words: Option<Words<'_>>,
        selector: &mut Selector,
        k0: usize,
        scratch: &mut Scratch,
    ) -> Counters {
        let probing = probing.within(self.lists());
        match words {
            None => self.search_best(vector, probing.probes, selector, scratch),
            Some(words) => {
                let filtered =
                    Filtered { index: self, vector, words, selector, scratch, counters: Counters::default(), k0 };
                filtered.run(probing)
            }
        }
    }

    /// Scans the best lists, all items of them.
    fn search_best(&self, vector: &[f32], probes: usize, selector: &mut Selector, scratch: &mut Scratch) -> Counters {
        let mut counters = Counters::default();
        if probes == self.lists() {
            self.quantize(vector, &mut scratch.query);
            for list in (0..self.lists() as u32).map(ListId) {
                self.scan_whole(list, None, &scratch.query, selector, &mut counters);
            }
            return counters;
        }
        let start = Instant::now();
        if self.penalties.is_empty() {
            self.quantize(vector, &mut scratch.query);
            scratch.coarse.reset(probes);
            scratch.coarse.scan(self.kernels, &self.centroids(), &scratch.query.view());
        } else {
            self.score_lists(vector, scratch);
            scratch.order(probes);
        }
        let Scratch { query, coarse, lists, .. } = scratch;
        let lists = if self.penalties.is_empty() { coarse.finish() } else { &lists[..probes] };
        counters.probe_time = start.elapsed();
        let list = |key: u64| ListId(unkey(key).1.0);
        for (n, &key) in lists.iter().enumerate() {
            let next = lists.get(n + 1).map(|&key| list(key));
            self.scan_whole(list(key), next, query, selector, &mut counters);
        }
        counters
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

    /// Scans all items of a list, before those of the `next` one.
    pub(super) fn scan_whole(
        &self,
        list: ListId,
        next: Option<ListId>,
        query: &Quantized,
        selector: &mut Selector,
        counters: &mut Counters,
    ) {
        selector.scan(self.kernels, &self.blocks_before(list, next), &query.view());
        self.count_whole(list, counters);
    }

    /// Counts a list all items of which were scored.
    pub(super) fn count_whole(&self, list: ListId, counters: &mut Counters) {
        let length = self.list_lengths[list.index()] as usize;
        counters.lists += 1;
        counters.items += length as u64;
        counters.survivors += length as u64;
        counters.bytes += length.div_ceil(BLOCK) as u64 * self.block_bytes();
    }

    /// Bytes of a block of 16 items: codes and scales.
    pub fn block_bytes(&self) -> u64 {
        (self.dimension.div_ceil(4) * 64 + BLOCK * 4) as u64
    }

    /// Offers the given slots, scored as [`Index::product`] does: the way of posting lists.
    pub fn search_slots(&self, vector: &[f32], slots: &[Slot], selector: &mut Selector) -> Counters {
        for slots in slots.chunks(ROWS_AT_ONCE) {
            let (mut numbers, mut products) = ([0u32; ROWS_AT_ONCE], [0f32; ROWS_AT_ONCE]);
            let (numbers, products) = (&mut numbers[..slots.len()], &mut products[..slots.len()]);
            numbers.iter_mut().zip(slots).for_each(|(number, slot)| *number = slot.0);
            self.products(vector, numbers, products);
            products.iter().zip(slots).for_each(|(&score, &slot)| selector.push(score, slot));
        }
        let (n, width) = (slots.len() as u64, self.row_bytes());
        Counters { items: n, survivors: n, bytes: n * width, ..Counters::default() }
    }

    /// Offers every item that `eligible` lets pass, scored as [`Index::product`] does: exact search.
    pub fn search_exact(
        &self,
        vector: &[f32],
        mut eligible: impl FnMut(Slot) -> bool,
        selector: &mut Selector,
    ) -> Counters {
        let mut counters = Counters { lists: self.lists() as u64, ..Counters::default() };
        for list in 0..self.lists() {
            let first = self.list_offsets[list];
            for slot in (first..first + self.list_lengths[list]).map(Slot) {
                counters.items += 1;
                if eligible(slot) {
                    counters.survivors += 1;
                    selector.push(self.product(vector, slot), slot);
                }
            }
        }
        counters.bytes = counters.survivors * self.row_bytes();
        counters
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
