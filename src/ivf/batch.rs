//! Searching a batch, list by list: each block that is loaded serves every query that probes its list.
//!
//! 1. The centroids are scored for all queries, four at a time, and each query's best P lists are selected.
//! 2. The (list, query) pairs are sorted by list, so that memory is read once and forwards. The lists that hold a query's
//!    first K0 items come before all others: what follows then meets a threshold and is mostly not kept.
//! 3. Each list is scanned for its queries together.
//!
//! Each thread takes a part of the queries through all three steps: nothing is shared, so that answers do not depend on
//! the number of threads.

use std::borrow::BorrowMut;

use rayon::prelude::*;

use super::quantize::Quantized;
use super::search::{Counters, Scratch};
use super::view::Index;
use crate::device::kernels::Blocks;
use crate::tensor::Matrix;
use crate::topk::{Selector, unkey};
use crate::units::{ListId, Slot};

/// Blocks that are scanned for all their queries before the next ones: they stay in the second-level cache meanwhile.
const BLOCKS: usize = 64;
/// Fewest queries that are worth a thread.
const PART_MIN: usize = 8;

/// Memory of batch searches, kept between calls.
#[derive(Debug, Default)]
pub struct Batch {
    parts: Vec<Part>,
}

#[derive(Debug, Default)]
struct Part {
    queries: Vec<Quantized>,
    coarse: Vec<Selector>,
    /// Scores the lists that have penalties.
    search: Scratch,
    /// Turn, list and query of each pair, as one number that sorts so.
    pairs: Vec<u64>,
    of_list: Vec<usize>,
}

impl Index {
    /// Searches the best `probes` lists of each row of `queries` `[Q, D]` for the candidates of its selector, whose K0 the
    /// caller has set. What each query finds is what [`Index::search`] finds without words.
    ///
    /// # Panics
    /// Where there is not one selector for each query.
    pub fn search_batch(
        &self,
        queries: Matrix<'_>,
        probes: usize,
        selectors: &mut [&mut Selector],
        batch: &mut Batch,
    ) -> Counters {
        assert_eq!(queries.rows(), selectors.len());
        let size = selectors.len().div_ceil(rayon::current_num_threads()).max(PART_MIN);
        let parts = selectors.len().div_ceil(size);
        batch.parts.resize_with(parts.max(batch.parts.len()), Part::default);
        let run = |(n, (selectors, part)): (usize, (&mut [&mut Selector], &mut Part))| {
            self.search_part(queries, n * size, probes, selectors, part)
        };
        let each = selectors.chunks_mut(size).zip(&mut batch.parts).enumerate();
        let mut counters = Counters::default();
        if parts == 1 {
            each.map(run).for_each(|c| counters.add(&c));
        } else {
            let all: Vec<Counters> = each.collect::<Vec<_>>().into_par_iter().map(run).collect();
            all.iter().for_each(|c| counters.add(c));
        }
        counters
    }

    fn search_part(
        &self,
        queries: Matrix<'_>,
        first: usize,
        probes: usize,
        selectors: &mut [&mut Selector],
        part: &mut Part,
    ) -> Counters {
        let count = selectors.len();
        if part.queries.len() < count {
            part.queries.resize_with(count, Quantized::default);
            part.coarse.resize_with(count, Selector::new);
        }
        for (n, coarse) in part.coarse[..count].iter_mut().enumerate() {
            self.quantize(queries.row(first + n), &mut part.queries[n]);
            coarse.reset(probes.clamp(1, self.lists()));
        }
        if self.penalties.is_empty() {
            let each: Vec<usize> = (0..count).collect();
            for blocks in self.centroids().parts(BLOCKS) {
                self.scan_together(&blocks, &part.queries, &mut part.coarse, &each);
            }
        } else {
            for (n, coarse) in part.coarse[..count].iter_mut().enumerate() {
                let lists = self.probe(queries.row(first + n), coarse.k(), &mut part.search);
                lists.for_each(|(list, score)| coarse.push(score, Slot(list.0)));
            }
        }
        part.pairs.clear();
        for (n, (coarse, selector)) in part.coarse[..count].iter_mut().zip(&*selectors).enumerate() {
            let mut items = 0;
            part.pairs.extend(coarse.finish().iter().map(|&key| {
                let list = unkey(key).1.0;
                let later = u64::from(items >= selector.k());
                items += self.list_lengths()[list as usize] as usize;
                later << 63 | u64::from(list) << 32 | n as u64
            }));
        }
        part.pairs.sort_unstable();
        let list = |pair: u64| ListId((pair >> 32) as u32 & (u32::MAX >> 1));
        let mut counters = Counters::default();
        let mut left = part.pairs.as_slice();
        while let Some(&pair) = left.first() {
            let (of_list, rest) = left.split_at(left.iter().take_while(|&&p| p >> 32 == pair >> 32).count());
            left = rest;
            let next = rest.first().map(|&pair| list(pair));
            part.of_list.clear();
            part.of_list.extend(of_list.iter().map(|&pair| pair as u32 as usize));
            for blocks in self.blocks_before(list(pair), next).parts(BLOCKS) {
                self.scan_together(&blocks, &part.queries, selectors, &part.of_list);
            }
            of_list.iter().for_each(|_| self.count_whole(list(pair), &mut counters));
        }
        counters
    }

    /// Scans blocks for the queries at the given places, each place once.
    fn scan_together<S: BorrowMut<Selector>>(
        &self,
        blocks: &Blocks<'_>,
        queries: &[Quantized],
        selectors: &mut [S],
        which: &[usize],
    ) {
        let (fours, rest) = which.as_chunks::<4>();
        fours.iter().for_each(|&four| self.scan_lanes(blocks, queries, selectors, four));
        let (twos, ones) = rest.as_chunks::<2>();
        twos.iter().for_each(|&two| self.scan_lanes(blocks, queries, selectors, two));
        ones.iter().for_each(|&one| self.scan_lanes(blocks, queries, selectors, [one]));
    }

    fn scan_lanes<S: BorrowMut<Selector>, const N: usize>(
        &self,
        blocks: &Blocks<'_>,
        queries: &[Quantized],
        selectors: &mut [S],
        which: [usize; N],
    ) {
        which.iter().for_each(|&n| selectors[n].borrow_mut().make_room(blocks.items));
        let held = {
            let some = selectors.get_disjoint_mut(which).expect("each place is named once");
            let mut number = which.iter();
            let mut lanes = some.map(|s| s.borrow_mut().lane(queries[*number.next().expect("N of them")].view()));
            self.kernels.scan_many(blocks, &mut lanes);
            lanes.map(|lane| lane.staging.len)
        };
        which.iter().zip(held).for_each(|(&n, held)| selectors[n].borrow_mut().take(held));
    }
}
