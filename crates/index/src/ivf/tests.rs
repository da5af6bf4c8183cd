//! Tests the index against a naive computation of inner products.

#![allow(clippy::unwrap_used)]

use super::random::mix;
use super::*;
use crate::topk::{Selector, unkey};
use sterling_core::error::{Kind, Result};
use sterling_core::limits;
use sterling_core::tensor::Matrix;
use sterling_core::units::{ListId, NO_ITEM, Slot};
use sterling_kernels::buffer::Buffer;
use sterling_kernels::cpu::Kernels;
use sterling_storage::files::{TensorFile, Tensors};
use sterling_storage::rows::{RowStore, Spill};

/// Clustered unit vectors from a seed.
pub(super) fn vectors(count: usize, dimension: usize, seed: u64) -> Vec<f32> {
    let random = |n: u64| (mix(seed, n) >> 40) as f32 / (1u64 << 24) as f32 * 2.0 - 1.0;
    let mut values = Vec::with_capacity(count * dimension);
    for row in 0..count {
        let centre = mix(seed, row as u64) % 20;
        let row: Vec<f32> = (0..dimension)
            .map(|d| random(1 << 40 | centre << 20 | d as u64) + 0.7 * random((row * dimension + d) as u64))
            .collect();
        let length = row.iter().map(|x| x * x).sum::<f32>().sqrt();
        values.extend(row.iter().map(|x| x / length));
    }
    values
}

pub(super) fn build(rows: Matrix<'_>, options: &Options, progress: &(dyn Fn(usize) + Sync)) -> Result<Built> {
    let rows = RowStore::from(rows);
    super::build(&rows, &RowSurvey::of(&rows)?, options, progress)
}

pub(super) fn from_lists(rows: Matrix<'_>, lists: Lists, rescore: Rescore) -> Result<Built> {
    super::from_lists(&RowSurvey::of(&rows.into())?, lists, rescore)
}

fn opened(rows: Matrix<'_>, options: &Options) -> (Built, Index) {
    let built = build(rows, options, &|_| ()).unwrap();
    let index = written(&built, rows);
    (built, index)
}

fn written(built: &Built, rows: Matrix<'_>) -> Index {
    Index::open(&built.in_memory(&rows.into(), "index").unwrap()).unwrap()
}

/// Index over given lists: centroids of unequal length, each row in the list nearest to it.
fn given(rows: Matrix<'_>, centroids: &[f32], nearest: bool, rescore: Rescore) -> Index {
    let of_rows = (0..rows.rows()).map(|r| by_distance(rows.row(r), centroids)[0]).collect();
    written(&from_lists(rows, Lists { centroids: centroids.to_vec(), of_rows, nearest }, rescore).unwrap(), rows)
}

/// Centroids by descending `x·c - |c|²/2`: the nearest first.
fn by_distance(row: &[f32], centroids: &[f32]) -> Vec<u32> {
    let square = |c: &[f32]| row.iter().zip(c).map(|(x, c)| f64::from(x - c).powi(2)).sum::<f64>();
    let distances: Vec<f64> = centroids.chunks_exact(row.len()).map(square).collect();
    let mut order: Vec<u32> = (0..distances.len() as u32).collect();
    order.sort_by(|&a, &b| distances[a as usize].total_cmp(&distances[b as usize]));
    order
}

fn found(selector: &mut Selector) -> Vec<Slot> {
    selector.finish().iter().map(|&k| unkey(k).1).collect()
}

#[test]
fn every_item_has_one_slot_in_the_list_of_a_good_centroid() {
    let values = vectors(1000, 24, 3);
    let rows = Matrix::new(&values, 24).unwrap();
    let (built, index) = opened(rows, &Options { lists: 20, ..Options::default() });
    let mut seen: Vec<u32> = built.order.iter().copied().filter(|&r| r != NO_ITEM).collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..1000).collect::<Vec<_>>());
    assert!(built.list_lengths.iter().all(|&n| n > 0), "a list stayed empty: {:?}", built.list_lengths);
    assert!(built.list_offsets.iter().all(|o| o % 16 == 0));
    assert_eq!((index.items(), index.slots(), index.lists()), (1000, built.order.len(), 20));
    // The best list for an item's own vector is usually the list of the item.
    let mut scratch = Scratch::default();
    let at_home = (0..index.slots()).filter(|&s| built.order[s] != NO_ITEM).filter(|&s| {
        let list = index.probe(rows.row(built.order[s] as usize), 1, &mut scratch).next().unwrap().0;
        built.list_offsets[list.index()] <= s as u32 && (s as u32) < built.list_offsets[list.index() + 1]
    });
    assert!(at_home.count() > 950);
}

#[test]
fn all_lists_with_rescoring_are_exact_search() {
    for (dimension, rescore) in [(1, Rescore::F32), (24, Rescore::F16), (37, Rescore::Bf16), (64, Rescore::F32)] {
        let values = vectors(1500, dimension, 5);
        let rows = Matrix::new(&values, dimension).unwrap();
        let (_, index) = opened(rows, &Options { rescore, ..Options::default() });
        let queries = vectors(20, dimension, 6);
        for kernels in Kernels::all() {
            let index = index.clone().with_kernels(kernels);
            for query in queries.chunks_exact(dimension) {
                let (mut wide, mut exact, mut scratch) = (Selector::new(), Selector::new(), Scratch::default());
                wide.reset(300);
                let probing = Probing::of(index.lists(), index.lists());
                let counters = index.search(query, probing, None, &mut wide, 300, &mut scratch);
                assert_eq!((counters.items, counters.survivors), (1500, 1500));
                let candidates = found(&mut wide);
                exact.reset(100);
                index.alone().search_slots(query, &candidates, &mut exact);
                let rescored = found(&mut exact);
                exact.reset(100);
                index.alone().search_exact(query, |_| true, &mut exact);
                if dimension > 1 {
                    assert_eq!(rescored, found(&mut exact), "{} D={dimension}", kernels.name());
                }
            }
        }
    }
}

#[test]
fn exact_search_equals_brute_force() {
    let values = vectors(300, 9, 7);
    let rows = Matrix::new(&values, 9).unwrap();
    let (built, index) = opened(rows, &Options { rescore: Rescore::F32, ..Options::default() });
    let query = &vectors(1, 9, 8)[..];
    let mut selector = Selector::new();
    selector.reset(300);
    index.alone().search_exact(query, |slot| slot.0 % 3 > 0, &mut selector);
    let naive = |slot: u32| {
        rows.row(built.order[slot as usize] as usize).iter().zip(query).map(|(a, b)| f64::from(a * b)).sum::<f64>()
    };
    let slots: Vec<u32> =
        (0..index.slots() as u32).filter(|&s| built.order[s as usize] != NO_ITEM && s % 3 > 0).collect();
    let got = found(&mut selector);
    assert_eq!(got.len(), slots.len());
    assert!(got.windows(2).all(|w| naive(w[0].0) >= naive(w[1].0) - 1e-6));
}

#[test]
fn filters_never_cost_recall() {
    [Rescore::None, Rescore::Bf16, Rescore::F16, Rescore::F32].into_iter().for_each(filters_cost_no_recall_with);
}

fn filters_cost_no_recall_with(rescore: Rescore) {
    let values = vectors(20_000, 16, 9);
    let rows = Matrix::new(&values, 16).unwrap();
    let (_, index) = opened(rows, &Options { lists: 200, rescore, ..Options::default() });
    let queries = vectors(20, 16, 10);
    for pass in [2u64, 10, 40, 200, 4000] {
        let eligible = |slot: u32| mix(77, u64::from(slot)).is_multiple_of(pass);
        let (mut hits, mut total) = (0, 0);
        for query in queries.chunks_exact(16) {
            let (mut exact, mut filtered, mut scratch) = (Selector::new(), Selector::new(), Scratch::default());
            exact.reset(50);
            index.alone().search_exact(query, |s| eligible(s.0), &mut exact);
            let truth = found(&mut exact);
            filtered.reset(50);
            let mut words = |list: sterling_core::units::ListId, out: &mut [u64]| {
                out.fill(0);
                for bit in 0..index.list_lengths()[list.index()] {
                    let passes = eligible(index.list_offsets()[list.index()] + bit);
                    out[bit as usize / 64] |= u64::from(passes) << (bit % 64);
                }
            };
            let probing = Probing { pass_rate: 1.0 / pass as f64, ..Probing::of(10, 200) };
            index.search(query, probing, Some(&mut words), &mut filtered, 50, &mut scratch);
            let got = found(&mut filtered);
            assert!(got.iter().all(|s| eligible(s.0)), "an item that does not pass was returned");
            assert_eq!(got.len(), truth.len(), "a selective filter emptied the result");
            hits += truth.iter().filter(|s| got.contains(s)).count();
            total += truth.len();
        }
        assert!(hits as f64 >= 0.95 * total as f64, "one of {pass} passes: recall {hits} of {total}");
    }
}

/// Builds 40 lists of 20 items with ever lower centroid scores and item scores `score(list)`. Returns how many lists a search
/// scans that may leave half of the best items behind.
fn lists_scanned(score: impl Fn(usize) -> f32) -> u64 {
    let unit = |x: f32| [x, (1.0 - x * x).sqrt(), 0.0, 0.0];
    let values: Vec<f32> = (0..800).flat_map(|row| unit(score(row / 20) + (row % 20) as f32 * 1e-4)).collect();
    let centroids: Vec<f32> = (0..40).flat_map(|list| unit(0.99 - list as f32 * 0.02)).collect();
    let lists = Lists { centroids, of_rows: (0..800).map(|row| row / 20).collect(), nearest: false };
    let rows = Matrix::new(&values, 4).unwrap();
    let index = written(&from_lists(rows, lists, Rescore::F32).unwrap(), rows);
    // Without a measurement, half of the unscanned items are assumed to be better.
    let margins = ResidualQuantiles::of(&[]);
    let ending = Some(Ending { margins: &margins, recall: 0.5, left: 20.0 });
    let mut all = |list: ListId, out: &mut [u64]| {
        out.fill(0);
        (0..index.list_lengths()[list.index()] as usize).for_each(|n| out[n / 64] |= 1 << (n % 64));
    };
    let mut selector = Selector::new();
    selector.reset(10);
    let probing = Probing { ending, ..Probing::of(8, 40) };
    index.search(&[1.0, 0.0, 0.0, 0.0], probing, Some(&mut all), &mut selector, 10, &mut Scratch::default()).lists
}

#[test]
fn filtered_searches_continue_while_lists_yield_many_results() {
    let (falling, rising) = (lists_scanned(|n| 0.9 - n as f32 * 0.02), lists_scanned(|n| 0.1 + n as f32 * 0.02));
    assert!((20..=24).contains(&falling), "{falling} lists, of which half had to be ahead");
    assert_eq!(rising, 40, "every list had the best so far");
}

#[test]
fn a_batch_finds_the_results_of_each_query_alone() {
    let values = vectors(6000, 24, 13);
    let rows = Matrix::new(&values, 24).unwrap();
    let (_, index) = opened(rows, &Options { lists: 280, rescore: Rescore::None, ..Options::default() });
    batch_finds(&index);
    let loose: Vec<f32> =
        vectors(280, 24, 15).iter().enumerate().map(|(n, x)| x * (1.0 + (n / 24) as f32 / 280.0)).collect();
    batch_finds(&given(rows, &loose, true, Rescore::None));
}

fn batch_finds(index: &Index) {
    let mut batch = BatchScratch::default();
    for (count, probes, k) in
        [(1, 1, 10), (3, 5, 1), (37, 9, 300), (64, 280, 6000), (5, 1000, 50), (1, 270, 300), (2, 400, 7000)]
    {
        let values = vectors(count, 24, 14);
        let queries = Matrix::new(&values, 24).unwrap();
        for kernels in Kernels::all() {
            let index = index.clone().with_kernels(kernels);
            let mut selectors: Vec<Selector> = (0..count).map(|_| Selector::new()).collect();
            selectors.iter_mut().for_each(|s| s.reset(k));
            let mut searches: Vec<Search<'_>> = selectors
                .iter_mut()
                .enumerate()
                .map(|(n, selector)| Search::new(queries.row(n), probes, selector))
                .collect();
            index.search_batch(&mut searches, &mut batch);
            let together: Vec<Counters> = searches.iter().map(|s| s.counters).collect();
            for (n, selector) in selectors.iter_mut().enumerate() {
                let (mut one, mut scratch) = (Selector::new(), Scratch::default());
                one.reset(k);
                let probing = Probing::of(probes, probes);
                let alone = index.search(queries.row(n), probing, None, &mut one, k, &mut scratch);
                assert_eq!(selector.finish(), one.finish(), "{} {n} of {count}, {probes} probes", kernels.name());
                let of = |c: &Counters| (c.lists, c.items, c.survivors, c.bytes);
                assert_eq!(of(&together[n]), of(&alone));
            }
        }
    }
}

/// Index of some rows with consecutive numbers from `first` on, and the number of the row in each slot.
fn numbered(rows: &[f32], lists: &Lists, first: usize) -> (Index, Buffer<i64>) {
    let rows = Matrix::new(rows, 24).unwrap();
    let of_rows = (0..rows.rows()).map(|r| by_distance(rows.row(r), &lists.centroids)[0]).collect();
    let built = from_lists(rows, Lists { of_rows, ..lists.clone() }, Rescore::None).unwrap();
    let number = |row: &u32| if *row == NO_ITEM { -1 } else { i64::from(*row) + first as i64 };
    let numbers: Vec<i64> = built.order.iter().map(number).collect();
    (written(&built, rows), Buffer::copied(&numbers).unwrap())
}

#[test]
fn multi_segment_search_equals_one_index_of_all_items() {
    let values = vectors(900, 24, 21);
    // Some rows occur twice: ties rank by number, regardless of the segment.
    let values: Vec<f32> = [&values[..], &values[..200 * 24]].concat();
    for nearest in [false, true] {
        let lists = Lists { centroids: vectors(40, 24, 22), of_rows: Vec::new(), nearest };
        let single = Lists { centroids: vec![0.0; 24], ..lists.clone() };
        let (complete, numbers) = numbered(&values, &lists, 0);
        let cuts = [(0, 700, &lists), (700, 1000, &lists), (1000, 1060, &single), (1060, 1100, &lists)];
        let parts: Vec<(Index, Buffer<i64>)> =
            cuts.iter().map(|&(from, to, lists)| numbered(&values[from * 24..to * 24], lists, from)).collect();
        let mut first_slot = 0;
        let members: Vec<Member<'_>> = parts
            .iter()
            .map(|(index, _)| {
                first_slot += index.slots() as u32;
                Member { index, first_slot: first_slot - index.slots() as u32 }
            })
            .collect();
        let ids = || members.iter().zip(&parts).map(|(member, (_, numbers))| (member.first_slot, numbers));
        let number = |slot: Slot| {
            let at = members.partition_point(|member| member.first_slot <= slot.0) - 1;
            parts[at].1[(slot.0 - members[at].first_slot) as usize]
        };
        let union = Union { lists: &parts[0].0, members: &members };
        let (mut one, mut all, mut scratch) = (Selector::new(), Selector::new(), Scratch::default());
        let queries = vectors(12, 24, 23);
        for (n, query) in queries.chunks_exact(24).enumerate() {
            all.reset_by_id(1100, std::iter::once((0, &numbers)));
            complete.search(query, Probing::of(40, 40), None, &mut all, 1100, &mut scratch);
            let ranked: Vec<(f32, i64, Slot)> = all
                .finish()
                .iter()
                .map(|&key| unkey(key))
                .map(|(score, slot)| (score, numbers[slot.index()], slot))
                .collect();
            for (probes, k, one_of) in
                [(1, 30, 1), (6, 5, 1), (6, 2000, 1), (40, 300, 1), (4, 60, 3), (40, 60, 3), (40, 50, 90)]
            {
                let probed: Vec<ListId> = complete.probe(query, probes, &mut scratch).map(|(list, _)| list).collect();
                let passes = |number: i64| mix(5, number as u64).is_multiple_of(one_of);
                let is_looked_at = |number: i64, slot: Slot| {
                    (1000..1060).contains(&number) || probed.contains(&complete.list_of(slot))
                };
                let expected: Vec<(f32, i64)> = ranked
                    .iter()
                    .filter(|(_, number, slot)| is_looked_at(*number, *slot) && passes(*number))
                    .map(|(score, number, _)| (*score, *number))
                    .take(k)
                    .collect();
                let mut words = |member: usize, list: ListId, out: &mut [u64]| {
                    let (index, numbers) = &parts[member];
                    out.fill(0);
                    for bit in 0..index.list_lengths()[list.index()] {
                        let slot = index.list_offsets()[list.index()] + bit;
                        out[bit as usize / 64] |= u64::from(passes(numbers[slot as usize])) << (bit % 64);
                    }
                };
                let words: Option<MemberWords<'_>> = if one_of > 1 { Some(&mut words) } else { None };
                one.reset_by_id(k, ids());
                let pass_rate = 1.0 / one_of as f64;
                let probing = Probing { pass_rate, ..Probing::of(probes, probes) };
                let counters = union.search(query, probing, words, &mut one, k, &mut scratch);
                let got: Vec<(f32, i64)> =
                    one.finish().iter().map(|&key| unkey(key)).map(|(score, slot)| (score, number(slot))).collect();
                assert_eq!(got, expected, "query {n}, {probes} lists, one of {one_of}");
                let survivors =
                    ranked.iter().filter(|(_, number, slot)| is_looked_at(*number, *slot) && passes(*number)).count();
                assert_eq!((counters.lists, counters.survivors), (probes as u64, survivors as u64));
            }
        }
        // All queries together, list by list.
        let mut selectors: Vec<Selector> = (0..12).map(|_| Selector::new()).collect();
        selectors.iter_mut().for_each(|selector| selector.reset_by_id(70, ids()));
        let searches = queries.chunks_exact(24).zip(&mut selectors);
        let mut searches: Vec<Search<'_>> = searches.map(|(query, selector)| Search::new(query, 6, selector)).collect();
        union.search_batch(&mut searches, &mut BatchScratch::default());
        let together: Vec<Counters> = searches.iter().map(|search| search.counters).collect();
        for ((query, selector), counters) in queries.chunks_exact(24).zip(&mut selectors).zip(together) {
            one.reset_by_id(70, ids());
            let alone = union.search(query, Probing::of(6, 6), None, &mut one, 70, &mut scratch);
            assert_eq!(selector.finish(), one.finish());
            let of = |c: &Counters| (c.lists, c.items, c.survivors, c.bytes);
            assert_eq!(of(&counters), of(&alone));
        }
    }
}

#[test]
fn existing_lists_are_retained_and_probed_by_their_metric() {
    let values = vectors(900, 24, 16);
    let rows = Matrix::new(&values, 24).unwrap();
    let centroids: Vec<f32> =
        vectors(30, 24, 17).iter().enumerate().map(|(n, x)| x * (0.2 + (n / 24) as f32 / 10.0)).collect();
    let product = |q: &[f32], list: u32| {
        q.iter().zip(&centroids[list as usize * 24..]).map(|(q, c)| f64::from(q * c)).sum::<f64>()
    };
    for (nearest, query) in [true, false].into_iter().flat_map(|n| (0..40).map(move |q| (n, q))) {
        let index = given(rows, &centroids, nearest, Rescore::None);
        assert_eq!((index.lists(), index.items()), (30, 900));
        let mut expected = by_distance(rows.row(query), &centroids);
        if !nearest {
            expected.sort_by(|&a, &b| product(rows.row(query), b).total_cmp(&product(rows.row(query), a)));
        }
        let mut scratch = Scratch::default();
        let found: Vec<u32> = index.probe(rows.row(query), 30, &mut scratch).map(|(list, _)| list.0).collect();
        // Centroids have lengths up to three: rounding them to int8 changes no product by more than this.
        let score = |list: u32| {
            let half = index.penalties.get(list as usize).map_or(0.0, |p| f64::from(*p));
            product(rows.row(query), list) - half
        };
        assert!(found.iter().zip(&expected).all(|(&a, &b)| (score(a) - score(b)).abs() < 0.07), "{nearest} {query}");
        let (mut few, probing) = (Selector::new(), Probing::of(3, 3));
        few.reset(900);
        let counters = index.search(rows.row(query), probing, None, &mut few, 900, &mut scratch);
        let items = found[..3].iter().map(|&l| u64::from(index.list_lengths()[l as usize])).sum::<u64>();
        assert_eq!((counters.lists, counters.items), (3, items));
    }
}

#[test]
fn lists_that_do_not_match_their_rows_are_rejected() {
    let values = vectors(5, 4, 1);
    let rows = Matrix::new(&values, 4).unwrap();
    for (centroids, of_rows, expected) in [
        (vec![], vec![0; 5], "0 centroids"),
        (vec![0.0; 7], vec![0; 5], "7 numbers do not make rows of 4"),
        (vec![f32::NAN; 4], vec![0; 5], "of finite numbers"),
        (vec![1e30; 4], vec![0; 5], "of finite numbers"),
        (vec![0.0; 8], vec![0; 4], "4 list numbers for 2 lists, expected one for each of 5 rows"),
        (vec![0.0; 8], vec![0, 1, 2, 0, 0], "5 list numbers for 2 lists"),
    ] {
        let error = from_lists(rows, Lists { centroids, of_rows, nearest: true }, Rescore::None).unwrap_err();
        assert!(error.kind() == Kind::Invalid && error.to_string().contains(expected), "{error}");
    }
}

/// Rows around `sizes.len()` random unit vectors, `sizes[n]` around each, at most `spread` away per dimension.
fn clumps(sizes: &[usize], spread: f32, dimension: usize) -> Vec<f32> {
    let number = |n: u64| (mix(5, n) >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
    let mut values = Vec::new();
    for (clump, &size) in sizes.iter().enumerate() {
        for row in 0..size {
            let at = |d: usize| {
                number((clump << 20 | d) as u64) + spread * number((1 << 40 | clump << 30 | row << 8 | d) as u64)
            };
            let row: Vec<f32> = (0..dimension).map(at).collect();
            let length = row.iter().map(|x| x * x).sum::<f32>().sqrt();
            values.extend(row.iter().map(|x| x / length));
        }
    }
    values
}

#[test]
fn rare_clumps_get_lists_of_their_own() {
    // With uniform random initial centroids, most of the 31 clumps of 40 rows would be missed because of the one of 9000.
    let sizes: Vec<usize> = std::iter::once(9000).chain(std::iter::repeat_n(40, 31)).collect();
    let values = clumps(&sizes, 0.05, 16);
    let rows = Matrix::new(&values, 16).unwrap();
    let built = build(rows, &Options { lists: 64, sample_per_list: 1000, ..Options::default() }, &|_| ()).unwrap();
    let clump_of = |row: u32| (row as usize).saturating_sub(9000 - 40) / 40;
    let clumps_of = |bounds: &[u32]| -> std::collections::BTreeSet<usize> {
        let rows = &built.order[bounds[0] as usize..bounds[1] as usize];
        rows.iter().filter(|&&row| row != NO_ITEM).map(|&row| clump_of(row)).collect()
    };
    let lists: Vec<_> = built.list_offsets.windows(2).map(clumps_of).filter(|clumps| clumps.len() > 1).collect();
    assert!(lists.iter().map(|clumps| clumps.len()).sum::<usize>() <= 4, "lists that hold several clumps: {lists:?}");
}

#[test]
fn a_dominant_cluster_is_split_over_lists() {
    let sizes: Vec<usize> = std::iter::once(9000).chain(std::iter::repeat_n(10, 100)).collect();
    let values = clumps(&sizes, 0.06, 16);
    let rows = Matrix::new(&values, 16).unwrap();
    let built = build(rows, &Options { lists: 100, sample_per_list: 1000, ..Options::default() }, &|_| ()).unwrap();
    let longest = *built.list_lengths.iter().max().unwrap();
    assert!(longest <= 300, "the mean is 100: {:?}", built.list_lengths);
}

#[test]
fn rows_that_are_all_alike_are_built() {
    let values = [0.6f32, 0.8].repeat(500);
    let rows = Matrix::new(&values, 2).unwrap();
    let (built, index) = opened(rows, &Options { lists: 20, ..Options::default() });
    assert_eq!((built.list_lengths.iter().sum::<u32>(), index.items()), (500, 500));
}

#[test]
fn searches_allocate_nothing_once_they_are_warm() {
    let values = vectors(20_000, 32, 21);
    let rows = Matrix::new(&values, 32).unwrap();
    let queries = vectors(40, 32, 22);
    let queries = Matrix::new(&queries, 32).unwrap();
    for rescore in [Rescore::None, Rescore::F16] {
        let (_, index) = opened(rows, &Options { lists: 200, rescore, ..Options::default() });
        let (mut scratch, mut batch) = (Scratch::default(), BatchScratch::default());
        let mut selectors: [Selector; 40] = std::array::from_fn(|_| Selector::new());
        let slots: Vec<Slot> = (0..3000).map(Slot).collect();
        let mut pass = || {
            for probes in [1, 20, 200] {
                for (n, selector) in selectors.iter_mut().enumerate() {
                    let query = queries.row(n);
                    selector.reset(300);
                    let probing = Probing::of(probes, 200);
                    index.search(query, probing, None, selector, 300, &mut scratch);
                    selector.finish();
                    for halvings in [1, 5, 9] {
                        let mut words = |list: sterling_core::units::ListId, out: &mut [u64]| {
                            let bits = |n: u64, w: usize| mix(n, (list.index() << 20 | w) as u64);
                            let word = |w: usize| (0..halvings).fold(u64::MAX, |word, n| word & bits(n, w));
                            out.iter_mut().enumerate().for_each(|(w, o)| *o = word(w));
                        };
                        selector.reset(300);
                        let probing = Probing { pass_rate: 0.5f64.powi(halvings as i32), ..probing };
                        index.search(query, probing, Some(&mut words), selector, 300, &mut scratch);
                        selector.finish();
                    }
                    selector.reset(300);
                    index.alone().search_slots(query, &slots, selector);
                    selector.finish();
                }
                let mut number = 0..;
                let mut searches = selectors.each_mut().map(|selector| {
                    selector.reset(300);
                    Search::new(queries.row(number.next().unwrap()), probes, selector)
                });
                index.search_batch(&mut searches, &mut batch);
            }
        };
        pass();
        let counted = allocation_counter::measure(pass);
        assert_eq!(counted.count_total, 0, "{counted:?}");
    }
}

#[test]
fn builds_repeat_from_the_seed() {
    let values = vectors(3000, 12, 11);
    let rows = Matrix::new(&values, 12).unwrap();
    let options = Options { lists: 40, sample_per_list: 20, ..Options::default() };
    let (a, b) = (build(rows, &options, &|_| ()).unwrap(), build(rows, &options, &|_| ()).unwrap());
    assert_eq!((a.order, a.centroids), (b.order, b.centroids));
    let other = build(rows, &Options { seed: 2, ..options }, &|_| ()).unwrap();
    assert_ne!(a.list_lengths, other.list_lengths);
}

#[test]
fn progress_adds_up_to_the_steps() {
    let values = vectors(700, 4, 12);
    let rows = Matrix::new(&values, 4).unwrap();
    let options = Options { lists: 10, iterations: 3, ..Options::default() };
    let done = std::sync::atomic::AtomicUsize::new(0);
    build(rows, &options, &|n| {
        done.fetch_add(n, std::sync::atomic::Ordering::Relaxed);
    })
    .unwrap();
    let survey = RowSurvey::of(&rows.into()).unwrap();
    assert_eq!(done.into_inner(), steps(&survey, &options).unwrap());
}

#[test]
fn indexes_of_coded_rows_equal_those_of_their_vectors() {
    for rescore in [Rescore::None, Rescore::Bf16, Rescore::F16, Rescore::F32] {
        // A dimension that is not a multiple of four, and lists with empty slots.
        let (items, dimension) = (1500, 30);
        let rows = vectors(items, dimension, 5);
        let matrix = Matrix::new(&rows, dimension).unwrap();
        let (_, main) = opened(matrix, &Options { lists: 13, rescore, ..Options::default() });
        let assigner = Assigner::new(&main);
        let of_rows = assigner.assign(matrix);
        let plain = assigner.arrange(matrix, of_rows.clone()).unwrap();
        let plain = plain.in_memory(&matrix.into(), "plain").unwrap();

        let coded: Vec<CodedRow> = (0..items).map(|row| assigner.coded(matrix.row(row))).collect();
        let all: Vec<&CodedRow> = coded.iter().collect();
        let built = assigner.arrange_coded(&all, Some(of_rows.clone())).unwrap();
        let made = built.coded_in_memory(&all, "coded").unwrap();
        assert!(made.bytes() == plain.bytes(), "{rescore:?}: as if their vectors had been arranged");

        // Into a single list and back into the lists, in another order.
        let single = assigner.arrange_coded(&all, None).unwrap();
        let single = (Index::open(&single.coded_in_memory(&all, "single").unwrap()).unwrap(), single.order);
        assert_eq!(single.0.lists(), 1);
        let slot = |row: u32| Slot(single.1.iter().position(|&one| one == row).unwrap() as u32);
        let taken: Vec<CodedRow> = (0..items as u32).map(|row| assigner.taken(&single.0, slot(row))).collect();
        assert!(taken == coded, "{rescore:?}: a row that was taken out is the one that was put in");
    }
}

#[test]
fn one_row_beyond_half_precision_leaves_the_others_unchanged() {
    let (items, dimension) = (40, 6);
    let mut rows = vectors(items, dimension, 6);
    let (_, main) = opened(Matrix::new(&rows, dimension).unwrap(), &Options { lists: 2, ..Options::default() });
    let assigner = Assigner::new(&main);
    rows[7 * dimension] = 1e6;
    let coded: Vec<CodedRow> = rows.chunks(dimension).map(|row| assigner.coded(row)).collect();
    let opened = |rows: &[&CodedRow]| {
        Index::open(&assigner.arrange_coded(rows, None).unwrap().coded_in_memory(rows, "mixed").unwrap()).unwrap()
    };
    let mixed = opened(&coded.iter().collect::<Vec<_>>());
    assert!(matches!(mixed.rows(), WideRows::F32(_)));
    let (mut row, mut rounded) = (vec![0.0; dimension], vec![0.0; dimension]);
    for slot in (0..items as u32).map(Slot) {
        mixed.row(slot, &mut row);
        if slot == Slot(7) {
            assert_eq!(row, rows[7 * dimension..8 * dimension]);
        } else {
            halved(&rows[slot.index() * dimension..][..dimension], &mut rounded);
            assert_eq!(row, rounded);
        }
    }
    let back: Vec<CodedRow> = (0..items as u32).map(|slot| assigner.taken(&mixed, Slot(slot))).collect();
    assert_eq!(back, coded);
    let others: Vec<&CodedRow> = back.iter().enumerate().filter(|(n, _)| *n != 7).map(|(_, row)| row).collect();
    assert!(matches!(opened(&others).rows(), WideRows::F16(_)));
}

#[test]
fn strays_lie_in_lists_of_their_own_and_are_found_alone_and_together() {
    let (dimension, lists, probes, k) = (16, 40, 6, 20);
    let old = vectors(2600, dimension, 31);
    let (old, alike) = old.split_at(2000 * dimension);
    let (_, main) = opened(Matrix::new(old, dimension).unwrap(), &Options { lists, ..Options::default() });
    let assigner = Assigner::new(&main);
    let new = vectors(2500, dimension, 77);
    for (fitting, strays, expected) in [
        (200, 0, None),
        (200, 30, Some((lists, false))),
        (10, 30, None),
        (600, 2500, Some((lists, true))),
        (10, 2500, Some((0, true))),
    ] {
        let values = [&alike[..fitting * dimension], &new[..strays * dimension]].concat();
        let rows = Matrix::new(&values, dimension).unwrap();
        let of_rows = assigner.assign(rows);
        let is_stray: Vec<bool> = (0..rows.rows()).map(|row| assigner.is_stray(rows.row(row), of_rows[row])).collect();
        let reported = |range: std::ops::Range<usize>| is_stray[range].iter().filter(|is_stray| **is_stray).count();
        assert!(reported(0..fitting) <= fitting / 8, "{} of {fitting} rows like the old ones", reported(0..fitting));
        assert!(reported(fitting..rows.rows()) >= strays * 9 / 10, "{} of {strays}", reported(fitting..rows.rows()));
        // Strays are given, so that the test does not depend on a few misclassified rows.
        let is_stray: Vec<bool> = (0..rows.rows()).map(|row| row >= fitting).collect();
        let coded: Vec<CodedRow> = (0..rows.rows()).map(|row| assigner.coded(rows.row(row))).collect();
        let coded: Vec<&CodedRow> = coded.iter().collect();
        let (built, own) = assigner.arrange_delta(&coded, &of_rows, &is_stray).unwrap();
        assert_eq!(own.as_ref().map(|own| (own.first, own.raises.is_some())), expected);
        let delta = Index::open(&built.coded_in_memory(&coded, "delta").unwrap()).unwrap();
        let delta = if let Some(own) = own { delta.with_own_lists(own) } else { delta };
        assert_eq!(delta.items(), fitting + strays);
        let first_slot = main.slots() as u32;
        let members = [Member { index: &main, first_slot: 0 }, Member { index: &delta, first_slot }];
        let union = Union { lists: &main, members: &members };
        let queries: Vec<f32> = [vectors(2512, dimension, 77), vectors(2612, dimension, 31)]
            .iter()
            .flat_map(|drawn| drawn[drawn.len() - 12 * dimension..].to_vec())
            .collect();
        let exact = |query: &[f32]| {
            let mut selector = Selector::new();
            selector.reset(k);
            members.iter().for_each(|member| {
                member.search_exact(query, |_| true, &mut selector);
            });
            found(&mut selector)
        };
        let mut scratch = Scratch::default();
        let (mut alone, mut hits, mut by_words) = (Vec::new(), 0, 0);
        for query in queries.chunks_exact(dimension) {
            let best = exact(query);
            for is_filtered in [false, true] {
                let mut selector = Selector::new();
                selector.reset(k);
                let mut words = |member: usize, list: ListId, out: &mut [u64]| {
                    out.fill(0);
                    for bit in 0..members[member].index.list_lengths()[list.index()] {
                        out[bit as usize / 64] |= 1 << (bit % 64);
                    }
                };
                let words: Option<MemberWords<'_>> = if is_filtered { Some(&mut words) } else { None };
                let most = if is_filtered { lists } else { probes };
                union.search(query, Probing::of(probes, most), words, &mut selector, k, &mut scratch);
                let got = found(&mut selector);
                let count = got.iter().filter(|slot| best.contains(slot)).count();
                if is_filtered {
                    by_words += count;
                } else {
                    hits += count;
                    alone.push(got);
                }
            }
        }
        let wanted = queries.len() / dimension * k;
        let is_high = |found: usize| found * 100 >= wanted * 85;
        assert!(is_high(hits) && is_high(by_words), "{expected:?}: {hits}, {by_words} of {wanted}");
        let mut selectors: Vec<Selector> = alone.iter().map(|_| Selector::new()).collect();
        selectors.iter_mut().for_each(|selector| selector.reset(k));
        let searches = queries.chunks_exact(dimension).zip(&mut selectors);
        let mut searches: Vec<Search<'_>> =
            searches.map(|(query, selector)| Search::new(query, probes, selector)).collect();
        union.search_batch(&mut searches, &mut BatchScratch::default());
        let together: Vec<Vec<Slot>> = selectors.iter_mut().map(found).collect();
        assert!(together == alone, "{expected:?}");
    }
}

/// Rounds a vector to half precision.
fn halved(row: &[f32], out: &mut [f32]) {
    out.iter_mut().zip(row).for_each(|(out, x)| *out = half::f16::from_f32(*x).to_f32());
}

#[test]
fn degenerate_catalogues_are_built() {
    for (values, dimension) in
        [(vec![0.0; 12], 3), (vec![1.0; 80], 2), (vec![5.0], 1), (vec![1e-30, 2e-30, -7e16, 7e16], 1)]
    {
        let rows = Matrix::new(&values, dimension).unwrap();
        let (_, index) = opened(rows, &Options::default());
        let mut selector = Selector::new();
        selector.reset(1000);
        let query = vec![1.0; dimension];
        let probing = Probing::of(1000, 1000);
        index.search(&query, probing, None, &mut selector, 1000, &mut Scratch::default());
        assert_eq!(selector.finish().len(), rows.rows(), "k beyond the items returns them all");
    }
}

#[test]
fn scores_are_finite_for_all_accepted_input() {
    let most = limits::COMPONENT_MAX;
    let dimension = 8192;
    let mut values = vec![most; 3 * dimension];
    values[dimension..2 * dimension].iter_mut().for_each(|x| *x = -most);
    values[2 * dimension..].iter_mut().enumerate().for_each(|(n, x)| *x = if n % 2 == 0 { most } else { 1e-44 });
    let rows = Matrix::new(&values, dimension).unwrap();
    for rescore in [Rescore::None, Rescore::Bf16, Rescore::F16, Rescore::F32] {
        let (_, index) = opened(rows, &Options { rescore, ..Options::default() });
        for query in [vec![most; dimension], vec![-most; dimension], vec![1e-44; dimension], vec![0.0; dimension]] {
            index.check_query(&query).unwrap();
            let mut selector = Selector::new();
            selector.reset(3);
            let probing = Probing::of(1, 1);
            index.search(&query, probing, None, &mut selector, 3, &mut Scratch::default());
            let found: Vec<_> = selector.finish().iter().map(|&key| unkey(key)).collect();
            assert_eq!(found.len(), 3, "{rescore:?}");
            for (score, slot) in found {
                assert!(score.is_finite() && index.product(&query, slot).is_finite(), "{rescore:?}: {score}");
            }
        }
        for invalid in [f32::NAN, f32::INFINITY, -3e38, most * 1.001] {
            let mut query = vec![0.0; dimension];
            query[7] = invalid;
            let error = index.check_query(&query).unwrap_err().to_string();
            assert!(error.contains("number 8: got ") && error.contains("finite"), "{error}");
        }
        assert!(index.check_query(&[1.0]).unwrap_err().to_string().contains("got 1 numbers, expected 8192"));
    }
    values[dimension + 1] = most * 1.001;
    let error = build(Matrix::new(&values, dimension).unwrap(), &Options::default(), &|_| ()).unwrap_err().to_string();
    assert!(error.contains("item 2: number 2 of its vector is 7.2"), "{error}");
}

#[test]
fn vectors_beyond_half_precision_keep_their_order() {
    for (values, fits) in [
        (vec![1.0, 0.0, 65504.0, 1e-9], true),
        (vec![0.0, 0.0, 1.0, 2.0], true),
        (vec![65536.0, 0.0, 1e6, 1.0], false),
        (vec![3e-8, 0.0, 1e-8, 2e-8], false),
        (vec![1.0, 1.0, 1.5e-7, 1.6e-7], false),
    ] {
        let rows = Matrix::new(&values, 2).unwrap();
        for rescore in [Rescore::F16, Rescore::F32, Rescore::Bf16] {
            let (_, index) = opened(rows, &Options { rescore, ..Options::default() });
            let expected = match (rescore, index.rows()) {
                (Rescore::F16, WideRows::F16(_)) => fits,
                (Rescore::F16, WideRows::F32(_)) => !fits,
                (Rescore::F32, WideRows::F32(_)) | (Rescore::Bf16, WideRows::Bf16(_)) => true,
                _ => false,
            };
            assert!(expected, "{values:?} {rescore:?}");
        }
    }
}

#[test]
fn impossible_recipes_and_rows_are_rejected() {
    let values = vectors(50, 4, 1);
    let rows = Matrix::new(&values, 4).unwrap();
    for (options, expected) in [
        (Options { lists: 51, ..Options::default() }, "got 51 lists for 50 items"),
        (Options { iterations: 0, ..Options::default() }, "index.iterations: got 0"),
        (Options { sample_per_list: 0, ..Options::default() }, "index.sample_per_list: got 0"),
    ] {
        let error = build(rows, &options, &|_| ()).unwrap_err();
        assert!(error.kind() == Kind::Invalid && error.to_string().contains(expected), "{error}");
    }
    let error = build(Matrix::new(&[], 4).unwrap(), &Options::default(), &|_| ()).unwrap_err();
    assert!(error.to_string().contains("no items"));
    let mut broken = values.clone();
    broken[21] = f32::NAN;
    let error = build(Matrix::new(&broken, 4).unwrap(), &Options::default(), &|_| ()).unwrap_err();
    assert!(error.to_string().contains("item 6: number 2 of its vector is NaN"), "{error}");
}

#[test]
fn malformed_tensors_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("index.safetensors");
    let write = |centroids: [usize; 2], lengths: Vec<u32>, blocks: [usize; 4], scales: Vec<f32>| {
        let mut file = TensorFile::new();
        file.add_owned("centroids", &centroids, vec![0f32; centroids.iter().product()]).unwrap();
        file.add_owned("list_lengths", &[lengths.len()], lengths).unwrap();
        file.add_owned("codes", &blocks, vec![0u8; blocks.iter().product()]).unwrap();
        file.add_owned("scales", &[scales.len()], scales).unwrap();
        file.write(&path).unwrap();
        Index::open(&Tensors::open(&path).unwrap())
    };
    assert!(write([1, 4], vec![3], [1, 1, 16, 4], vec![0.0; 16]).is_ok());
    assert!(write([0, 4], vec![], [0, 1, 16, 4], vec![]).is_err());
    assert!(write([1, 4], vec![17], [1, 1, 16, 4], vec![0.0; 16]).is_err());
    assert!(write([2, 4], vec![u32::MAX, 5], [1, 1, 16, 4], vec![0.0; 16]).is_err());
    assert!(write([1, 4], vec![3], [1, 1, 4, 16], vec![0.0; 16]).is_err());
    assert!(write([1, 4], vec![3], [1, 1, 16, 4], vec![f32::NAN; 16]).is_err());
    assert!(write([1, 4], vec![3], [1, 1, 16, 4], vec![0.0; 32]).is_err());
    for (penalties, expected) in [(vec![0.5, 0.5], true), (vec![0.5], false), (vec![0.5, f32::NAN], false)] {
        let mut file = TensorFile::new();
        file.add_owned("centroids", &[2, 4], vec![0f32; 8]).unwrap();
        file.add_owned("penalties", &[penalties.len()], penalties).unwrap();
        file.add_owned("list_lengths", &[2], vec![0u32; 2]).unwrap();
        file.add_owned("codes", &[0, 1, 16, 4], Vec::<u8>::new()).unwrap();
        file.add_owned("scales", &[0], Vec::<f32>::new()).unwrap();
        file.write(&path).unwrap();
        assert_eq!(Index::open(&Tensors::open(&path).unwrap()).is_ok(), expected);
    }
}

#[test]
fn lists_sorted_by_keys_keep_their_items() {
    let values = vectors(700, 8, 3);
    let rows = Matrix::new(&values, 8).unwrap();
    let before = build(rows, &Options { lists: 9, ..Options::default() }, &|_| ()).unwrap();
    let mut after = build(rows, &Options { lists: 9, ..Options::default() }, &|_| ()).unwrap();
    let keys: Vec<u64> = (0..700).map(|row| mix(5, row) % 4).collect();
    after.sort_lists(&keys);
    for list in 0..9 {
        let range = before.list_offsets[list] as usize..before.list_offsets[list + 1] as usize;
        let (mut expected, sorted) = (before.order[range.clone()].to_vec(), &after.order[range]);
        let length = before.list_lengths[list] as usize;
        expected[..length].sort_by_key(|&row| (keys[row as usize], row));
        assert_eq!(sorted, expected, "list {list}: pads stay at its end");
    }
}

#[test]
fn rows_in_a_file_make_the_same_index_in_any_number_of_passes() {
    let folder = tempfile::tempdir().unwrap();
    let spill = Spill::new(0, folder.path());
    let path = folder.path().join("index.safetensors");
    for (items, dimension, lists, rescore, scale) in [
        (1, 1, 1, Rescore::F16, 1.0),
        (17, 3, 2, Rescore::None, 1.0),
        (3000, 24, 0, Rescore::F16, 1.0),
        (3000, 7, 50, Rescore::Bf16, 3.0),
        (2500, 10, 9, Rescore::F16, 1e6),
        (2000, 16, 300, Rescore::F32, 1.0),
    ] {
        let values: Vec<f32> = vectors(items, dimension, 3).iter().map(|x| x * scale).collect();
        let rows = RowStore::owned(values, dimension).unwrap();
        let options = Options { lists, rescore, sample_per_list: 20, iterations: 3, ..Options::default() };
        let survey = RowSurvey::of(&rows).unwrap();
        let built = super::build(&rows, &survey, &options, &|_| ()).unwrap();
        let expected = built.in_memory(&rows, "index").unwrap();
        let sum = built.write(&rows, &path, 0).unwrap();
        assert_eq!(sum, sterling_storage::files::Checksum::of(expected.bytes()));
        let filed = RowStore::owned(rows.all().unwrap(), dimension).unwrap().spilled(&spill).unwrap();
        assert!(filed.in_memory().is_none() && std::fs::read_dir(folder.path()).unwrap().count() == 1);
        let survey = RowSurvey::of(&filed).unwrap();
        let again = super::build(&filed, &survey, &options, &|_| ()).unwrap();
        assert_eq!((&again.order, &again.centroids), (&built.order, &built.centroids));
        let (blocks, block_bytes) = (again.order.len().div_ceil(16), dimension as u64 * 64);
        for passes in 1..=7 {
            let bytes = blocks.div_ceil(passes) as u64 * block_bytes;
            let buckets = again.order.len().div_ceil(again.bucket_slots(bytes));
            assert!(blocks < 100 || buckets == passes, "{passes}: {buckets}");
            assert_eq!(again.write(&filed, &path, bytes).unwrap(), sum, "{items} rows in {passes} passes");
        }
        assert_eq!((again.bucket_slots(u64::MAX), again.bucket_slots(0)), (again.order.len(), 16));
        assert_eq!(again.write(&filed, &path, u64::MAX).unwrap(), sum, "{items} rows");
    }
}

#[test]
fn a_sample_is_the_rows_that_the_hash_puts_first() {
    for (count, wanted, seed) in [(1, 1, 1), (1000, 1, 2), (1000, 999, 3), (5000, 64, 4), (5000, 4000, 5), (7, 7, 6)] {
        let mut expected: Vec<u32> = (0..count).collect();
        expected.sort_by_key(|&row| (mix(seed, u64::from(row)), row));
        expected.truncate(wanted);
        expected.sort_unstable();
        assert_eq!(kmeans::drawn(count as usize, wanted, seed), expected, "{wanted} of {count}");
    }
}
