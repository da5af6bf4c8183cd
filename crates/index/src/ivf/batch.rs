//! Batch search, list by list: each loaded block serves every query that probes its list.
//!
//! 1. The centroids are scored for all queries, four at a time, and the best P lists of each query are selected.
//! 2. The (list, query) pairs are sorted by list, so that memory is read once and sequentially. Lists that hold the first K0
//!    items of a query come before all others: later items then face a threshold that rejects most of them.
//! 3. Each list is scanned for all of its queries together.
//!
//! If queries would rarely share a list, each query scans its lists separately instead, best first.

use std::borrow::{Borrow, BorrowMut};
use std::time::Instant;

use super::first_pass::Tables;
use super::ood::OodProbing;
use super::own_lists::{OwnQuery, OwnScratch};
use super::probing::{Counters, Probing, Scratch};
use super::quantize::Quantized;
use super::union::{Member, Union};
use super::view::Index;
use crate::topk::{Selector, unkey};
use sterling_core::units::{ListId, Slot};
use sterling_kernels::cpu::kernels::Blocks;

/// Blocks that are scanned for all of their queries before the next blocks, so that they stay in the L2 cache.
const BLOCKS: usize = 64;
/// Minimum number of probes of all queries per list of the index for queries to share lists often enough.
const PROBES_PER_LIST_MIN: f64 = 0.5;

/// Query of a batch, without a filter.
#[derive(Debug)]
pub struct Search<'a> {
    /// Query vector, `[D]`.
    pub vector: &'a [f32],
    /// Number of probed lists, nprobe (P).
    pub probes: usize,
    /// nprobe for a query that is out of distribution, as [`Probing::ood`].
    pub ood: Option<OodProbing>,
    /// Scans first-pass codes in place of int8 rows, as [`Probing::by_codes`].
    pub by_codes: bool,
    /// Collects the candidates, up to a K0 that the caller has set.
    pub selector: &'a mut Selector,
    /// Counters of the search.
    pub counters: Counters,
}

impl<'a> Search<'a> {
    /// Creates a search of the best `probes` lists for `vector` `[D]` by int8 rows.
    pub fn new(vector: &'a [f32], probes: usize, selector: &'a mut Selector) -> Self {
        Search { vector, probes, ood: None, by_codes: false, selector, counters: Counters::default() }
    }
}

/// Buffers of batch searches, reused between calls.
#[derive(Debug, Default)]
pub struct BatchScratch {
    queries: Vec<Quantized>,
    /// Tables of the queries that use first-pass codes.
    tables: Vec<Tables>,
    coarse: Vec<Selector>,
    /// Buffers of queries that are searched individually, and of lists with penalties.
    search: Scratch,
    /// (Phase, list, query) of each pair, packed into one sortable number.
    pairs: Vec<u64>,
    of_list: Vec<usize>,
    /// Score of the last list that each query scans; negative infinity if the query scans all lists.
    thresholds: Vec<f32>,
    own: OwnScratch,
}

impl BatchScratch {
    /// Makes room for `count` queries.
    fn make_room(&mut self, count: usize) {
        if self.queries.len() < count {
            self.queries.resize_with(count, Quantized::default);
            self.tables.resize_with(count, Tables::default);
            self.coarse.resize_with(count, Selector::new);
        }
    }
}

impl Union<'_> {
    /// Searches the best lists of each query. The results equal those of [`Union::search`] without a filter.
    pub fn search_batch(&self, searches: &mut [Search<'_>], batch: &mut BatchScratch) {
        let lists = self.lists.lists();
        let probes: usize = searches.iter().map(|s| s.probes.clamp(1, lists)).sum();
        if searches.len() > 1 && self.lists.shares_lists(probes) {
            return self.search_by_lists(searches, batch);
        }
        for Search { vector, probes, ood, by_codes, selector, counters } in searches {
            let probing = Probing { by_codes: *by_codes, ood: *ood, ..Probing::of(*probes, *probes) };
            let k0 = selector.k();
            *counters = self.search(vector, probing, None, selector, k0, &mut batch.search);
        }
    }

    fn search_by_lists(&self, searches: &mut [Search<'_>], batch: &mut BatchScratch) {
        let start = Instant::now();
        batch.make_room(searches.len());
        self.lists.choose(searches, batch);
        let BatchScratch { queries, tables, pairs, of_list, thresholds, own: scratch, .. } = batch;
        let queries = Queries { int8: queries, tables };
        let probe_time = start.elapsed();
        searches.iter_mut().for_each(|search| search.counters.probe_time = probe_time);
        let list = |pair: u64| ListId((pair >> 32) as u32 & (u32::MAX >> 1));
        let mut left = pairs.as_slice();
        while let Some(&pair) = left.first() {
            let (here, rest) = left.split_at(left.iter().take_while(|&&p| p >> 32 == pair >> 32).count());
            left = rest;
            let next = rest.first().map(|&pair| list(pair));
            of_list.clear();
            of_list.extend(here.iter().map(|&pair| pair as u32 as usize));
            of_list.sort_unstable_by_key(|&n| (!searches[n].by_codes, n));
            for member in self.members.iter().filter(|member| self.has_lists(member)) {
                queries.scan(member, (list(pair), next), searches, of_list);
            }
        }
        of_list.clear();
        of_list.extend(0..searches.len());
        for member in self.members {
            for list in member.filled_of(self.always_scanned_lists(member)) {
                queries.scan(member, (list, None), searches, of_list);
            }
        }
        for (_, member, own, ranked) in self.ranked() {
            pairs.clear();
            for (n, search) in searches.iter().enumerate() {
                member.score_own(own, ranked, OwnQuery::of(search.vector, &queries.int8[n]), scratch);
                scratch.choose(own.first, thresholds[n]);
                let chosen = member.filled_of(scratch.chosen.iter().copied());
                pairs.extend(chosen.map(|list| u64::from(list.0) << 32 | n as u64));
            }
            pairs.sort_unstable();
            for here in pairs.chunk_by(|a, b| a >> 32 == b >> 32) {
                of_list.clear();
                of_list.extend(here.iter().map(|&pair| pair as u32 as usize));
                queries.scan(member, (list(here[0]), None), searches, of_list);
            }
        }
    }
}

/// Queries of a batch: quantized to int8, and as lookup tables for first-pass codes.
#[derive(Clone, Copy)]
struct Queries<'a> {
    int8: &'a [Quantized],
    tables: &'a [Tables],
}

impl Queries<'_> {
    /// Scans a list of a segment for the queries in `which`. Queries that use codes come first if the segment has codes.
    fn scan(
        &self,
        member: &Member<'_>,
        (list, next): (ListId, Option<ListId>),
        searches: &mut [Search<'_>],
        which: &[usize],
    ) {
        let by_codes = match member.index.first_pass {
            Some(_) => which.partition_point(|&n| searches[n].by_codes),
            None => 0,
        };
        let (by_codes, by_rows) = which.split_at(by_codes);
        for &n in by_codes {
            if let Some((codes, tables)) = member.codes_for(Some(&self.tables[n])) {
                member.scan_codes((codes, &[]), (list, next), (searches[n].vector, tables), searches[n].selector);
                member.count_codes(codes, list, &mut searches[n].counters);
            }
        }
        if !by_rows.is_empty() {
            let scan = |blocks: Blocks<'_>| member.index.scan_together(&blocks, self.int8, searches, by_rows);
            member.blocks_before(list, next).parts(BLOCKS).for_each(scan);
            by_rows.iter().for_each(|&n| member.count_whole(list, &mut searches[n].counters));
        }
    }
}

impl Index {
    /// Returns true if queries with this total number of probes share lists often enough to search list by list.
    pub fn shares_lists(&self, probes: usize) -> bool {
        probes as f64 >= PROBES_PER_LIST_MIN * self.lists() as f64
    }

    /// Searches the best lists of each query. The results equal those of [`Index::search`] without a filter.
    pub fn search_batch(&self, searches: &mut [Search<'_>], batch: &mut BatchScratch) {
        Union { lists: self, members: &[self.alone()] }.search_batch(searches, batch);
    }

    /// Selects the best lists of each query and fills `batch` with the pairs in scan order.
    fn choose(&self, searches: &mut [Search<'_>], batch: &mut BatchScratch) {
        let BatchScratch { queries, tables, coarse, search, pairs, of_list, thresholds, .. } = batch;
        for ((one, query), coarse) in searches.iter().zip(&mut *queries).zip(&mut *coarse) {
            self.quantize(one.vector, query);
            coarse.reset(one.probes.clamp(1, self.lists()));
        }
        for (one, tables) in searches.iter().zip(tables).filter(|(one, _)| one.by_codes) {
            self.make_tables(one.vector, tables);
        }
        if self.penalties.is_empty() {
            of_list.clear();
            of_list.extend(0..searches.len());
            for blocks in self.centroids().parts(BLOCKS) {
                self.scan_together(&blocks, queries, coarse, of_list);
            }
        } else {
            for (one, coarse) in searches.iter().zip(&mut *coarse) {
                let lists = self.probe(one.vector, coarse.k(), search);
                lists.for_each(|(list, score)| coarse.push(score, Slot(list.0)));
            }
        }
        pairs.clear();
        thresholds.clear();
        for (n, (one, coarse)) in searches.iter_mut().zip(&mut *coarse).enumerate() {
            let mut items = 0;
            let best = coarse.finish();
            let best = match one.ood.filter(|ood| ood.probes > best.len() && ood.is_for(unkey(best[0]).0, &queries[n]))
            {
                Some(ood) => self.best_lists(one.vector, (ood.probes.min(self.lists()), None), search).1,
                None => best,
            };
            one.counters = Counters { lists: best.len() as u64, ..Counters::default() };
            let last = best.last().filter(|_| best.len() < self.lists());
            thresholds.push(last.map_or(f32::NEG_INFINITY, |&key| unkey(key).0));
            pairs.extend(best.iter().map(|&key| {
                let list = unkey(key).1.0;
                let later = u64::from(items >= one.selector.k());
                items += self.list_lengths()[list as usize] as usize;
                later << 63 | u64::from(list) << 32 | n as u64
            }));
        }
        pairs.sort_unstable();
    }

    /// Scans blocks for the queries with the given numbers, which must be distinct.
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
        let held = {
            let some = selectors.get_disjoint_mut(which).expect("query numbers are distinct");
            let mut number = which.iter();
            let mut lanes =
                some.map(|s| s.borrow_mut().lane(queries[*number.next().expect("N of them")].view(), blocks.items));
            self.kernels.scan_many(blocks, &mut lanes);
            lanes.map(|lane| lane.staging.len)
        };
        which.iter().zip(held).for_each(|(&n, held)| selectors[n].borrow_mut().take(held));
    }
}

impl BorrowMut<Selector> for Search<'_> {
    fn borrow_mut(&mut self) -> &mut Selector {
        self.selector
    }
}

impl Borrow<Selector> for Search<'_> {
    fn borrow(&self) -> &Selector {
        self.selector
    }
}
