//! Queries that are out of the distribution of the calibration queries.
//!
//! nprobe is calibrated for queries that point to where items lie. For a query that points elsewhere, many centroids score nearly
//! alike, and its best items are spread over more lists. The *reach* of a query distinguishes them: the score of its best
//! centroid divided by the length of the query. The reach is known before lists are scanned. A query whose reach is below that of
//! nearly all calibration queries takes another nprobe, which calibration measured with random queries. Adapting the number of
//! lists to the query follows SPANN (arXiv 2111.08566); out-of-distribution queries are those of OOD-DiskANN (arXiv 2211.12850).

use super::quantize::Quantized;

/// nprobe for queries that are out of the distribution of the calibration queries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OodProbing {
    /// Number of lists to probe.
    pub probes: usize,
    /// Reach (best centroid score divided by query length) below which a query is out of distribution.
    pub reach: f32,
}

impl OodProbing {
    /// Returns true if a query with this best centroid score is out of distribution.
    pub(super) fn is_for(self, best_score: f32, query: &Quantized) -> bool {
        best_score < self.limit(query)
    }

    /// Returns the score that a centroid has to reach for a query within the distribution.
    pub(super) fn limit(self, query: &Quantized) -> f32 {
        self.reach * query.length()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::ivf::tests::{build, from_lists, vectors};
    use crate::ivf::{
        BatchScratch, Counters, Ending, Index, Lists, Options, Probing, Rescore, ResidualQuantiles, Scratch, Search,
    };
    use crate::topk::Selector;
    use sterling_core::tensor::Matrix;
    use sterling_core::units::ListId;

    const WIDTH: usize = 24;
    const K: usize = 15;

    fn indexes() -> Vec<Index> {
        let values = vectors(1200, WIDTH, 3);
        let rows = Matrix::new(&values, WIDTH).unwrap();
        let options = Options { lists: 40, iterations: 3, ..Options::default() };
        let by_product = build(rows, &options, &|_| ()).unwrap();
        let centroids = vectors(40, WIDTH, 22);
        let lists = Lists { centroids, of_rows: (0..1200).map(|row| row % 40).collect(), nearest: true };
        let by_distance = from_lists(rows, lists, Rescore::None).unwrap();
        let opened = |built: crate::ivf::Built| Index::open(&built.in_memory(&rows.into(), "index").unwrap()).unwrap();
        vec![opened(by_product), opened(by_distance)]
    }

    fn searched(index: &Index, query: &[f32], probing: Probing<'_>) -> (Vec<u64>, Counters) {
        let mut selector = Selector::new();
        selector.reset(K);
        let counters = index.search(query, probing, None, &mut selector, K, &mut Scratch::default());
        (selector.finish().to_vec(), Counters { probe_time: Default::default(), ..counters })
    }

    #[test]
    fn queries_below_the_reach_probe_as_many_lists_as_are_named_for_them() {
        for index in indexes() {
            let queries: Vec<Vec<f32>> = vectors(120, WIDTH, 9).chunks(WIDTH).map(<[f32]>::to_vec).collect();
            let mut scratch = Scratch::default();
            let mut reaches: Vec<f32> = queries.iter().map(|query| index.reach(query, &mut scratch)).collect();
            // The reach does not depend on the length of the query.
            let longer: Vec<f32> = queries[0].iter().map(|x| x * 64.0).collect();
            let is_scaled = (index.reach(&longer, &mut scratch) / reaches[0] - 1.0).abs() < 1e-3;
            assert!(is_scaled || !index.penalties().is_empty());
            let of_queries = reaches.clone();
            reaches.sort_unstable_by(f32::total_cmp);
            let reach = (reaches[59] + reaches[60]) / 2.0;
            for (probes, further) in [(3, 9), (3, 40), (3, 1000), (9, 3), (40, 40), (1, 2)] {
                let probing =
                    Probing { ood: Some(OodProbing { probes: further, reach }), ..Probing::of(probes, probes) };
                let alone: Vec<(Vec<u64>, Counters)> =
                    queries.iter().map(|query| searched(&index, query, probing)).collect();
                for ((query, own), found) in queries.iter().zip(&of_queries).zip(&alone) {
                    let named = if *own < reach { probes.max(further.min(40)) } else { probes };
                    let expected = searched(&index, query, Probing::of(named, named));
                    assert_eq!(*found, expected, "{probes} lists or {further}, reach {own} of {reach}");
                }
                let mut selectors: Vec<Selector> = queries.iter().map(|_| Selector::new()).collect();
                let mut searches: Vec<Search<'_>> = queries
                    .iter()
                    .zip(&mut selectors)
                    .map(|(query, selector)| {
                        selector.reset(K);
                        Search { ood: probing.ood, ..Search::new(query, probes, selector) }
                    })
                    .collect();
                index.search_batch(&mut searches, &mut BatchScratch::default());
                for (search, (keys, counters)) in searches.iter_mut().zip(&alone) {
                    let together = Counters { probe_time: Default::default(), ..search.counters };
                    assert_eq!((search.selector.finish(), together), (keys.as_slice(), *counters));
                }
            }
        }
    }

    #[test]
    fn filtered_queries_below_the_reach_do_not_end_before_the_named_lists() {
        let margins = ResidualQuantiles::of(&[(0.0, -1.0); 64]);
        // Expects nothing in unscanned lists: the first check ends the search.
        let ending = Some(Ending { margins: &margins, recall: 0.5, left: 1.0 });
        for index in indexes() {
            let mut scratch = Scratch::default();
            for query in vectors(40, WIDTH, 9).chunks(WIDTH) {
                let reach = index.reach(query, &mut scratch);
                for (named, below) in [(4, true), (17, true), (40, true), (4, false), (40, false)] {
                    let limit = if below { reach + 0.01 } else { reach - 0.01 };
                    let ood = Some(OodProbing { probes: named, reach: limit });
                    let probing = Probing { ood, ending, ..Probing::of(3, 40) };
                    let mut selector = Selector::new();
                    selector.reset(K);
                    let words = &mut |list: ListId, out: &mut [u64]| {
                        for (n, word) in out.iter_mut().enumerate() {
                            let left = (index.list_lengths[list.index()] as usize).saturating_sub(64 * n).min(64);
                            *word = ((1u128 << left) - 1) as u64;
                        }
                    };
                    let counters = index.search(query, probing, Some(words), &mut selector, K, &mut scratch);
                    assert!(!below || counters.lists >= named as u64, "{counters:?}, expected {named} lists");
                    let alike = Probing { ood: None, ..probing };
                    selector.reset(K);
                    let without = index.search(query, alike, Some(words), &mut selector, K, &mut scratch);
                    assert_eq!(counters.lists == without.lists, !below || without.lists >= named as u64);
                }
            }
        }
    }
}
