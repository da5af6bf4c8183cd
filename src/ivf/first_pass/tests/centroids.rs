//! Lists that are chosen in two steps against those of all centroids.

use super::super::CentroidCodes;
use super::*;

const DIMENSION: usize = 256;
const LISTS: usize = 96;

/// Vectors that lie near a plane of a few dimensions, as those of texts do: their products differ more than signs are off.
fn flat(count: usize, seed: u64) -> Vec<f32> {
    const ACROSS: usize = 12;
    let (axes, places) = (vectors(ACROSS, DIMENSION, 5), vectors(count, ACROSS, seed));
    let mut values = vec![0.05; count * DIMENSION];
    for (row, place) in values.chunks_exact_mut(DIMENSION).zip(places.chunks_exact(ACROSS)) {
        for (along, axis) in place.iter().zip(axes.chunks_exact(DIMENSION)) {
            row.iter_mut().zip(axis).for_each(|(x, a)| *x += along * a);
        }
    }
    values
}

/// The lists that a search by codes takes, and whether it chose them in two steps.
fn lists_of(index: &Index, query: &[f32], probes: usize) -> (Vec<ListId>, bool) {
    let (mut tables, mut scratch) = (Default::default(), Scratch::default());
    assert!(index.make_tables(query, &mut tables));
    let of = |keys: &[u64]| keys.iter().map(|&key| ListId(unkey(key).1.0)).collect::<Vec<_>>();
    let lists = of(index.best_lists(query, Some(&tables), probes, &mut scratch).1);
    let is_short = lists == of(scratch.small.best());
    (lists, is_short)
}

fn all_lists(index: &Index, query: &[f32], probes: usize) -> Vec<ListId> {
    index.probe(query, probes, &mut Scratch::default()).take(probes).map(|(list, _)| list).collect()
}

#[test]
fn two_steps_choose_nearly_the_lists_that_one_does() {
    let values = flat(4000, 41);
    for first_pass in [PQ4, RABITQ] {
        let (_, index) = coded_by(first_pass, &values, DIMENSION, LISTS);
        let (mut same, mut short, mut all) = (0, 0, 0);
        for query in flat(60, 42).chunks_exact(DIMENSION) {
            for probes in [1, 4, 12] {
                let (lists, is_short) = lists_of(&index, query, probes);
                let expected = all_lists(&index, query, probes);
                assert_eq!(lists.len(), probes);
                same += expected.iter().filter(|list| lists.contains(list)).count();
                short += usize::from(is_short);
                all += probes;
            }
            // Of so many lists too many would remain.
            let (lists, is_short) = lists_of(&index, query, LISTS / 2);
            assert!(!is_short && lists == all_lists(&index, query, LISTS / 2));
        }
        // Centroids of int8 and of half precision order a list in some hundred otherwise.
        assert!(same * 100 >= all * 98, "{same} of {all}");
        assert!(short >= 120, "{short} of 180 in two steps");
    }
}

/// What is left out is known to score less, but for one in some thousand.
#[test]
fn estimates_are_too_low_by_more_than_their_slack_for_few_lists() {
    let values = flat(4000, 43);
    let (_, index) = coded_by(RABITQ, &values, DIMENSION, LISTS);
    let small = index.small_centroids.as_ref().unwrap();
    let (mut beyond, mut all) = (0, 0);
    for query in flat(60, 44).chunks_exact(DIMENSION) {
        let (mut tables, mut estimates) = (Default::default(), Vec::new());
        index.make_tables(query, &mut tables);
        small.estimate(index.kernels, &tables, &mut estimates, &mut Vec::new());
        let length = query.iter().map(|x| x * x).sum::<f32>().sqrt();
        let products: Vec<f32> = (0..LISTS as u32).map(|list| index.centroid_product(query, ListId(list))).collect();
        let of_mean = products.iter().sum::<f32>() / LISTS as f32;
        for ((estimate, product), slack) in estimates.iter().zip(&products).zip(&small.slack) {
            beyond += usize::from(estimate + slack * length < product - of_mean);
            all += 1;
        }
    }
    assert!(beyond * 200 < all, "{beyond} of {all}");
}

#[test]
fn queries_of_a_batch_choose_their_lists_as_they_do_alone() {
    let values = flat(4000, 45);
    for first_pass in [PQ4, RABITQ] {
        let (_, index) = coded_by(first_pass, &values, DIMENSION, LISTS);
        let queries = flat(16, 46);
        for (probes, is_coded) in [(6, 1), (12, 1), (12, 2), (16, 3)] {
            let mut selectors: Vec<Selector> = (0..16).map(|_| Selector::new()).collect();
            let mut searches: Vec<Search<'_>> = queries
                .chunks_exact(DIMENSION)
                .zip(&mut selectors)
                .enumerate()
                .map(|(n, (query, selector))| {
                    selector.reset(50);
                    Search { by_codes: n.is_multiple_of(is_coded), ..Search::new(query, probes, selector) }
                })
                .collect();
            index.search_batch(&mut searches, &mut BatchScratch::default());
            for (n, (query, selector)) in queries.chunks_exact(DIMENSION).zip(&mut selectors).enumerate() {
                let found: Vec<(f32, Slot)> = selector.finish().iter().map(|&key| unkey(key)).collect();
                assert_eq!(found, searched(&index, query, probes, 50, n.is_multiple_of(is_coded)).0, "query {n}");
            }
        }
    }
}

#[test]
fn shards_choose_the_lists_of_the_whole() {
    let values = flat(4000, 47);
    let rows = Matrix::new(&values, DIMENSION).unwrap();
    for first_pass in [PQ4, RABITQ] {
        let (built, whole) = coded_by(first_pass, &values, DIMENSION, LISTS);
        let parts: Vec<(Built, Index)> = (0..3)
            .map(|part| {
                let part = built.part(|row| row % 3 == part);
                let index = Index::open(&tensors(&part, rows)).unwrap();
                (part, index)
            })
            .collect();
        for query in flat(20, 48).chunks_exact(DIMENSION) {
            for probes in [3, 12, 40] {
                let of = |(built, index): &(Built, Index)| {
                    let found = searched(index, query, probes, 4000, true).0;
                    found
                        .into_iter()
                        .map(|(score, slot)| (score.to_bits(), built.order[slot.index()]))
                        .collect::<Vec<_>>()
                };
                let mut expected: Vec<(u32, u32)> = searched(&whole, query, probes, 4000, true)
                    .0
                    .into_iter()
                    .map(|(score, slot)| (score.to_bits(), built.order[slot.index()]))
                    .collect();
                let mut found: Vec<(u32, u32)> = parts.iter().flat_map(of).collect();
                expected.sort_unstable();
                found.sort_unstable();
                assert_eq!(found, expected, "{probes} probes");
            }
        }
    }
}

#[test]
fn centroids_that_cannot_have_codes_are_all_scored() {
    let open = |dimension: usize, lists: usize, scale: f32| {
        let values: Vec<f32> = vectors(1500, dimension, 49).iter().map(|x| x * scale).collect();
        (coded_by(RABITQ, &values, dimension, lists).1, values)
    };
    for (dimension, lists, scale) in [(DIMENSION, 64, 1e7), (DIMENSION, 64, 1e-9), (DIMENSION, 63, 1.0), (255, 64, 1.0)]
    {
        let (index, values) = open(dimension, lists, scale);
        assert!(index.small_centroids.is_none());
        for query in values.chunks_exact(dimension).step_by(50) {
            assert_eq!(lists_of(&index, query, 3), (all_lists(&index, query, 3), false));
        }
    }
    let (index, _) = open(DIMENSION, 64, 1.0);
    // Four blocks of 8 lines and their factors, and of each list its slack and its row.
    let bytes = index.small_centroids.as_ref().map(CentroidCodes::bytes);
    assert_eq!(bytes, Some(4 * 8 * 64 + 64 * 4 + 64 * (4 + 2 * DIMENSION)));
    assert_eq!(bytes, Some(CentroidCodes::bytes_of(64, DIMENSION)));
}
