//! Results of calibration queries in an index or in one shard: at each pass rate, the true best items by the most precise rows, and
//! the best items by int8 rows and by codes, which lose some true best ones. The entire calibration is derived from these results
//! and the lists.

use super::depth::{PASS_RATE_MIN, SELECTED_MAX};
use super::measured::Measured;
use super::share::{PASS_RATES, Share, of_query, random};
use sterling_core::units::{ListId, Slot};
use sterling_index::ivf::{self, Probing, WideRows, Words};
use sterling_index::topk::{Selector, key, unkey};
use sterling_kernels::priority::breathe;

/// Number of sampled items per query for the score residuals.
const MARGINS: usize = 4096;
/// Number of candidates of first-pass codes; one candidate may be the item from which the query was made.
pub(super) const CODED: usize = SELECTED_MAX + 1;

/// Number of queries that scan together: each list is read from memory once for all of them. Each query needs up to 2 MB for its
/// results.
pub(super) const TOGETHER: usize = 4;
/// Number of rows scored between checks whether other work needs the processor.
const YIELD_ROWS: usize = 65_536;

/// Returns the number of candidates that int8 rows select for the best `k`; one candidate may be the item from which
/// the query was made.
pub(super) fn selected(k: usize) -> usize {
    k + 1 + k / 4 + 64
}

/// Returns whether first-pass codes are measured at the pass rate with this index.
pub(super) fn is_coded(share: usize) -> bool {
    PASS_RATES[share] >= PASS_RATE_MIN
}

/// An item that a query found.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scored {
    /// Score by the most precise rows, by int8 rows or by codes.
    pub(super) score: f32,
    /// Slot of the item in the complete index.
    pub(super) place: u32,
}

impl Scored {
    /// Returns the sort key, best first.
    fn rank(&self) -> std::cmp::Reverse<u64> {
        std::cmp::Reverse(key(self.score, Slot(self.place)))
    }
}

/// Results of a query among the items sampled at one pass rate.
#[derive(Clone, Debug, Default)]
pub(super) struct FoundIn {
    /// Best by the most precise stored rows, best first.
    pub(super) best: Vec<Scored>,
    /// Best by int8 rows, best first; empty if int8 rows are the most precise rows.
    pub(super) int8: Vec<Scored>,
    /// Best by codes, best first; empty without codes or if few items pass.
    pub(super) coded: Vec<Scored>,
}

impl FoundIn {
    pub(super) fn clear(&mut self) {
        self.best.clear();
        self.int8.clear();
        self.coded.clear();
    }

    /// Reduces the combined results of several shards to the best `k` of the complete index.
    pub(super) fn retain_best(&mut self, k: usize) {
        for (found, most) in [(&mut self.best, k + 1), (&mut self.int8, selected(k)), (&mut self.coded, CODED)] {
            found.sort_unstable_by_key(Scored::rank);
            found.truncate(most);
        }
    }
}

/// Query in progress with its results so far.
#[derive(Default)]
struct Finding {
    int8: ivf::Int8Scores,
    /// Best items at each pass rate by the most precise stored rows.
    best: Vec<Selector>,
    /// Best items at each pass rate by int8 rows, unless int8 rows are the most precise.
    by_int8: Vec<Selector>,
}

/// Buffers of one thread that finds results.
#[derive(Default)]
pub(super) struct Finder {
    scratch: ivf::Scratch,
    by_codes: Selector,
    findings: Vec<Finding>,
    /// Slots of a list, and the scores of its items by rows.
    slots: Vec<u32>,
    scores: Vec<f32>,
}

impl Finder {
    /// Finds the best `k` items at each pass rate for up to [`TOGETHER`] queries, given by their indices `requested`.
    /// Each query has its own random item sets; pass rates with `k` 0 are skipped. An item is scored once per query,
    /// however many item sets contain it.
    pub(super) fn find(
        &mut self,
        measured: &Measured<'_>,
        queries: &[Vec<f32>],
        draws: &[Vec<Share>],
        k: &[usize],
        requested: &[usize],
        found: &mut [Vec<FoundIn>],
    ) {
        let queries: Vec<&[f32]> = requested.iter().map(|&n| queries[n].as_slice()).collect();
        let shares: Vec<Vec<&Share>> = requested.iter().map(|&n| of_query(draws, n)).collect();
        let index = measured.index;
        let has_rows = !matches!(index.rows(), WideRows::None);
        self.findings.resize_with(queries.len().max(self.findings.len()), Finding::default);
        for (finding, query) in self.findings.iter_mut().zip(&queries) {
            finding.int8.set(index, query);
            finding.best.resize_with(k.len(), Selector::new);
            finding.by_int8.resize_with(k.len(), Selector::new);
            let selectors = finding.best.iter_mut().zip(&mut finding.by_int8);
            for ((best, by_int8), &k) in selectors.zip(k).filter(|(_, k)| **k > 0) {
                best.reset(k + 1);
                by_int8.reset(if has_rows { selected(k) } else { 0 });
            }
        }
        self.scan(measured, &queries, &shares, k);
        for (n, (query, shares)) in queries.iter().zip(&shares).enumerate() {
            for (share, found) in found[n].iter_mut().enumerate() {
                found.clear();
                if k[share] == 0 {
                    continue;
                }
                take(measured, &mut self.findings[n].best[share], &mut found.best);
                take(measured, &mut self.findings[n].by_int8[share], &mut found.int8);
                breathe();
                if is_coded(share) && index.has_first_pass() {
                    self.search_codes(measured, query, shares[share], &mut found.coded);
                }
            }
        }
    }

    /// Scores the items list by list, and offers each score to the pass rates whose sample contains the item.
    fn scan(&mut self, measured: &Measured<'_>, queries: &[&[f32]], shares: &[Vec<&Share>], k: &[usize]) {
        let Finder { findings, slots, scores, .. } = self;
        let index = measured.index;
        let has_rows = !matches!(index.rows(), WideRows::None);
        let mut read = 0;
        for list in (0..index.lists()).map(|list| ListId(list as u32)) {
            let (first, length) = (index.list_offsets()[list.index()], index.list_lengths()[list.index()]);
            slots.clear();
            slots.extend(first..first + length);
            scores.resize(slots.len(), 0.0);
            for ((finding, query), shares) in findings.iter_mut().zip(queries).zip(shares) {
                let Finding { int8, best, by_int8 } = finding;
                let int8 = int8.of_list(index, list);
                let wanted = shares.iter().enumerate().filter(|(share, _)| k[*share] > 0);
                if has_rows {
                    index.products(query, slots, scores);
                    for (n, share) in wanted {
                        share.offer(list, scores, slots, &mut best[n]);
                        share.offer(list, int8, slots, &mut by_int8[n]);
                    }
                } else {
                    wanted.for_each(|(n, share)| share.offer(list, int8, slots, &mut best[n]));
                }
            }
            read += slots.len() * queries.len();
            if read >= YIELD_ROWS {
                read = 0;
                breathe();
            }
        }
    }

    /// Selects the best items of a random item set by codes.
    fn search_codes(&mut self, measured: &Measured<'_>, query: &[f32], share: &Share, found: &mut Vec<Scored>) {
        let Finder { scratch, by_codes, .. } = self;
        let lists = measured.index.lists();
        let probing = Probing { may_read_rows: false, by_codes: true, ..Probing::of(lists, lists) };
        by_codes.reset(CODED);
        let mut fill = |list: ListId, out: &mut [u64]| out.copy_from_slice(share.words_of(list));
        let words: Option<Words<'_>> = if share.words.is_empty() { None } else { Some(&mut fill) };
        measured.index.search(query, probing, words, by_codes, CODED, scratch);
        take(measured, by_codes, found);
    }
}

/// Moves the results of a selector to `found`, with slots of the complete index.
fn take(measured: &Measured<'_>, selector: &mut Selector, found: &mut Vec<Scored>) {
    let keys = selector.finish().iter().map(|&key| unkey(key));
    found.extend(keys.map(|(score, slot)| Scored { score, place: measured.place(slot.0) }));
}

/// Scores those sampled items of a query that this index holds; returns ascending slots of the complete index with scores.
pub(super) fn sample(measured: &Measured<'_>, drawn: &[u32], query: &[f32]) -> Vec<(u32, f32)> {
    let mut own = measured.own();
    let own = drawn.iter().filter_map(|&place| Some((place, own(place)?.0)));
    let (places, slots): (Vec<u32>, Vec<u32>) = own.unzip();
    let mut products = vec![0.0; slots.len()];
    measured.index.products(query, &slots, &mut products);
    breathe();
    places.into_iter().zip(products).collect()
}

/// Returns the slots of the items that are sampled for the `n`-th query, ascending.
pub(super) fn drawn(filled: &super::measured::Filled<'_>, seed: u64, n: usize) -> Vec<u32> {
    let draw = |m| (random(seed, n as u64 * MARGINS as u64 + m) as usize % filled.len()) as u32;
    let mut drawn: Vec<u32> = (0..MARGINS as u64).map(draw).collect();
    drawn.sort_unstable();
    drawn.into_iter().map(filled.nths()).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::measure::{DRAWS, shares};
    use super::*;
    use sterling_core::tensor::Matrix;
    use sterling_index::ivf::{Options, Rescore, RowSurvey};
    use sterling_storage::rows::RowStore;

    /// Returns the best `most` slots of a random item set by a score function.
    fn best(index: &ivf::Index, share: &Share, most: usize, score: impl Fn(u32) -> f32) -> Vec<u32> {
        let mut scored = Vec::new();
        for list in (0..index.lists() as u32).map(ListId) {
            let (first, length) = (index.list_offsets()[list.index()], index.list_lengths()[list.index()]);
            let passes =
                |n: &u32| share.words.is_empty() || share.words_of(list)[*n as usize / 64] >> (n % 64) & 1 == 1;
            scored.extend((0..length).filter(passes).map(|n| key(score(first + n), Slot(first + n))));
        }
        scored.sort_unstable_by(|a, b| b.cmp(a));
        scored.into_iter().take(most).map(|key| unkey(key).1.0).collect()
    }

    #[test]
    fn batched_queries_equal_a_plain_scan_of_each() {
        const WIDTH: usize = 12;
        let number = |n| random(3, n) as f32 / u64::MAX as f32 - 0.5;
        let rows: Vec<f32> = (0..2000 * WIDTH as u64).map(number).collect();
        let store = RowStore::from(Matrix::new(&rows, WIDTH).unwrap());
        for rescore in [Rescore::F16, Rescore::None] {
            let options = Options { lists: 25, iterations: 3, rescore, ..Options::default() };
            let built = ivf::build(&store, &RowSurvey::of(&store).unwrap(), &options, &|_| ()).unwrap();
            let index = ivf::Index::open(&built.in_memory(&store, "index").unwrap()).unwrap();
            let measured = Measured::whole(&index);
            let (draws, k) = (shares(&measured, 7), [100, 50, 10, 1, 0]);
            let vectors: Vec<Vec<f32>> = (0..TOGETHER as u64 * 2 + 1)
                .map(|q| (0..WIDTH as u64).map(|n| number(q << 32 | n)).collect())
                .collect();
            let numbers: Vec<usize> = (0..vectors.len()).collect();
            let mut finder = Finder::default();
            let mut found = vec![vec![FoundIn::default(); PASS_RATES.len()]; TOGETHER];
            for together in numbers.chunks(TOGETHER) {
                finder.find(&measured, &vectors, &draws, &k, together, &mut found);
                for (found, &n) in found.iter().zip(together) {
                    let (query, shares) = (&vectors[n], of_query(&draws, n));
                    let mut int8 = vec![0.0; index.slots()];
                    let mut scores = ivf::Int8Scores::default();
                    scores.set(&index, query);
                    for list in (0..index.lists() as u32).map(ListId) {
                        let of_list = scores.of_list(&index, list);
                        let first = index.list_offsets()[list.index()] as usize;
                        int8[first..first + of_list.len()].copy_from_slice(of_list);
                    }
                    let places = |found: &[Scored]| found.iter().map(|scored| scored.place).collect::<Vec<_>>();
                    for (n, (found, share)) in found.iter().zip(&shares).enumerate().filter(|(n, _)| k[*n] > 0) {
                        let by_int8 = |slot: u32| int8[slot as usize];
                        match rescore {
                            Rescore::None => {
                                assert_eq!(places(&found.best), best(&index, share, k[n] + 1, by_int8));
                                assert!(found.int8.is_empty());
                            }
                            _ => {
                                let by_rows = |slot: u32| index.product(query, Slot(slot));
                                assert_eq!(places(&found.best), best(&index, share, k[n] + 1, by_rows));
                                assert_eq!(places(&found.int8), best(&index, share, selected(k[n]), by_int8));
                            }
                        }
                    }
                    assert!(found[4].best.is_empty(), "nothing is wanted of the last share");
                }
            }
            assert_eq!(draws[0].len() as u64, DRAWS);
        }
    }
}
