//! Tests searches by codes against the definition of the format, and against searches by int8 rows.

#![allow(clippy::unwrap_used)]

use crate::ivf::tests::{build, from_lists, vectors};
use crate::ivf::{
    BatchScratch, Built, CodeKind, Counters, Ending, FirstPass, Index, Lists, Options, Probing, Rescore,
    ResidualQuantiles, Scratch, Search,
};
use crate::topk::{Selector, unkey};
use sterling_core::error::Kind;
use sterling_core::tensor::Matrix;
use sterling_core::units::{ListId, NO_ITEM, Slot};
use sterling_kernels::cpu::Kernels;
use sterling_storage::files::{TensorFile, Tensors};

mod rabitq;

const PQ4: FirstPass = FirstPass { codes: CodeKind::Pq4, subspaces: 0 };
const RABITQ: FirstPass = FirstPass { codes: CodeKind::Rabitq, subspaces: 0 };

fn tensors(built: &Built, rows: Matrix<'_>) -> Tensors {
    built.in_memory(&rows.into(), "index").unwrap()
}

fn coded(values: &[f32], dimension: usize, lists: usize) -> (Built, Index) {
    coded_by(PQ4, values, dimension, lists)
}

fn coded_by(first_pass: FirstPass, values: &[f32], dimension: usize, lists: usize) -> (Built, Index) {
    let rows = Matrix::new(values, dimension).unwrap();
    let options = Options { lists, first_pass, ..Options::default() };
    let built = build(rows, &options, &|_| ()).unwrap();
    let index = Index::open(&tensors(&built, rows)).unwrap();
    assert!(index.has_first_pass());
    (built, index)
}

fn searched(index: &Index, query: &[f32], probes: usize, k: usize, by_codes: bool) -> (Vec<(f32, Slot)>, Counters) {
    let mut selector = Selector::new();
    selector.reset(k);
    let probing = Probing { by_codes, ..Probing::of(probes, probes) };
    let counters = index.search(query, probing, None, &mut selector, k, &mut Scratch::default());
    (selector.finish().iter().map(|&key| unkey(key)).collect(), counters)
}

/// Returns the slots of the best `k` selected items by row score.
fn rescored(index: &Index, query: &[f32], selected: &[(f32, Slot)], k: usize) -> Vec<(f32, Slot)> {
    let mut scored: Vec<(f32, Slot)> = selected.iter().map(|(_, slot)| (index.product(query, *slot), *slot)).collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.0.cmp(&b.1.0)));
    scored.truncate(k);
    scored
}

#[test]
fn scores_follow_the_format() {
    for (dimension, lists) in [(3, 4), (16, 9), (50, 7)] {
        let values = vectors(700, dimension, 5);
        let rows = Matrix::new(&values, dimension).unwrap();
        let (built, index) = coded(&values, dimension, lists);
        let file = tensors(&built, rows);
        let (codes, shape) = file.get::<u8>("first_pass_codes", 4).unwrap();
        let (values_of, _) = file.get::<f32>("first_pass_values", 2).unwrap();
        let (centroids, _) = file.get::<f32>("centroids", 2).unwrap();
        let (lines, subspaces) = (shape[1], shape[1] * 8);
        let code = |slot: usize, subspace: usize| {
            let byte = codes[((slot / 16 * lines + subspace / 8) * 16 + slot % 16) * 4 + subspace % 4];
            usize::from(if subspace % 8 < 4 { byte & 15 } else { byte >> 4 })
        };
        let value = |slot: usize, d: usize| {
            let subspace =
                (0..subspaces).find(|j| (j * dimension / subspaces..(j + 1) * dimension / subspaces).contains(&d));
            values_of[d * 16 + code(slot, subspace.unwrap())]
        };
        // Vector of a slot, reconstructed from its centroid and codes.
        let coded = |slot: usize, d: usize| {
            let list = index.list_of(Slot(slot as u32)).index();
            centroids[list * dimension + d] + value(slot, d)
        };
        let mut off = 0f64;
        for query in vectors(5, dimension, 6).chunks_exact(dimension) {
            // Scores are rounded only by the bytes of the tables.
            let range = |j: usize| {
                let bounds = j * dimension / subspaces..(j + 1) * dimension / subspaces;
                let product = |n: usize| bounds.clone().map(|d| query[d] * values_of[d * 16 + n]).sum::<f32>();
                let (low, high) = (0..16).map(product).fold((f32::MAX, f32::MIN), |(l, h), x| (l.min(x), h.max(x)));
                high - low
            };
            let step = (0..subspaces).map(range).fold(0f32, f32::max) / 255.0;
            let (found, counters) = searched(&index, query, lists, 700, true);
            assert_eq!((found.len(), counters.items), (700, 700));
            let blocks = built.list_lengths.iter().map(|n| u64::from(n.div_ceil(16))).sum::<u64>();
            assert_eq!(counters.bytes, blocks * (lines * 64) as u64);
            for (score, slot) in found {
                let product = (0..dimension).map(|d| query[d] * coded(slot.index(), d)).sum::<f32>();
                assert!((score - product).abs() <= step * subspaces as f32 / 2.0 + 1e-4, "{score}, {product}");
                off += f64::from(index.product(query, slot) - product).abs();
            }
        }
        let off = off / 3500.0;
        assert!(off < 0.06, "codes of {dimension} dimensions are off by {off}");
    }
}

#[test]
fn selecting_all_candidates_gives_the_answers_of_int8_rows() {
    for first_pass in [PQ4, RABITQ] {
        let (values, dimension) = (vectors(3000, 24, 7), 24);
        let (_, index) = coded_by(first_pass, &values, dimension, 30);
        for kernels in Kernels::all() {
            let index = index.clone().with_kernels(kernels);
            for query in vectors(10, dimension, 8).chunks_exact(dimension) {
                for probes in [1, 5, 29, 30] {
                    let of =
                        |by_codes| rescored(&index, query, &searched(&index, query, probes, 3000, by_codes).0, 200);
                    assert_eq!(of(true), of(false), "{} {probes}", kernels.name());
                }
            }
        }
    }
}

/// Returns the share of the best 20 items among `selected` items selected by codes.
fn recall_of(index: &Index, queries: &[f32], selected: usize) -> f64 {
    let (mut hits, mut wanted) = (0, 0);
    for query in queries.chunks_exact(index.dimension()) {
        let of = |by_codes, selected| {
            let found = rescored(index, query, &searched(index, query, index.lists(), selected, by_codes).0, 20);
            found.into_iter().map(|(_, slot)| slot).collect::<Vec<Slot>>()
        };
        let (by_codes, exact) = (of(true, selected), of(false, index.items()));
        hits += exact.iter().filter(|slot| by_codes.contains(slot)).count();
        wanted += exact.len();
    }
    hits as f64 / wanted as f64
}

#[test]
fn slightly_more_than_k_candidates_hold_nearly_all_of_the_best() {
    let (_, index) = coded(&vectors(6000, 32, 9), 32, 40);
    let recall = recall_of(&index, &vectors(40, 32, 10), 120);
    assert!(recall >= 0.97, "{recall}");
}

#[test]
fn every_kernel_selects_the_same() {
    for first_pass in [PQ4, RABITQ] {
        let (values, dimension) = (vectors(2000, 21, 11), 21);
        let (_, index) = coded_by(first_pass, &values, dimension, 16);
        for query in vectors(6, dimension, 12).chunks_exact(dimension) {
            // All lists are probed, so only the scores of the codes decide.
            let of = |kernels| searched(&index.clone().with_kernels(kernels), query, 16, 150, true).0;
            let expected = of(Kernels::all()[0]);
            for kernels in Kernels::all() {
                let near = |(a, b): (&(f32, Slot), &(f32, Slot))| (a.0 - b.0).abs() < 1e-5;
                // Kernels sum the products with centroids in different orders; the sums of codes are exact.
                assert!(of(kernels).iter().zip(&expected).all(near), "{}", kernels.name());
            }
        }
    }
}

#[test]
fn queries_of_a_batch_equal_single_queries() {
    for first_pass in [PQ4, RABITQ] {
        let (values, dimension) = (vectors(4000, 16, 13), 16);
        let (_, index) = coded_by(first_pass, &values, dimension, 50);
        let queries = vectors(13, dimension, 14);
        let mut batch = BatchScratch::default();
        // Batches that share lists and batches that do not; by codes, by rows and mixed.
        for (probes, way) in [(2, 0), (25, 0), (25, 1), (25, 2), (50, 2)] {
            let by_codes = |n: usize| way == 0 || way == 2 && !n.is_multiple_of(3);
            let k = |n: usize| 30 + n * 10;
            let mut selectors: Vec<Selector> = (0..13).map(|_| Selector::new()).collect();
            let mut searches: Vec<Search<'_>> = queries
                .chunks_exact(dimension)
                .zip(&mut selectors)
                .enumerate()
                .map(|(n, (query, selector))| {
                    selector.reset(k(n));
                    Search { by_codes: by_codes(n), ..Search::new(query, probes, selector) }
                })
                .collect();
            index.search_batch(&mut searches, &mut batch);
            let counters: Vec<Counters> = searches.iter().map(|search| search.counters).collect();
            for (n, (query, selector)) in queries.chunks_exact(dimension).zip(&mut selectors).enumerate() {
                let found: Vec<(f32, Slot)> = selector.finish().iter().map(|&key| unkey(key)).collect();
                let (alone, counted) = searched(&index, query, probes, k(n), by_codes(n));
                assert_eq!(found, alone, "query {n} of {probes} probes, way {way}");
                let of = |c: &Counters| (c.lists, c.items, c.survivors, c.bytes);
                assert_eq!(of(&counters[n]), of(&counted), "query {n} of {probes} probes, way {way}");
            }
        }
    }
}

#[test]
fn filter_bitmaps_restrict_the_candidates_of_codes() {
    for first_pass in [PQ4, RABITQ] {
        let (values, dimension) = (vectors(2000, 16, 15), 16);
        let (_, index) = coded_by(first_pass, &values, dimension, 20);
        let margins = ResidualQuantiles::of(&(0..64).map(|n| (0.0, n as f32 / 64.0)).collect::<Vec<_>>());
        let passes: [fn(u32) -> bool; 5] =
            [|_| true, |_| false, |slot| slot % 3 == 0, |slot| slot == 77, |slot| slot < 900];
        for (passes, kernels) in passes.into_iter().zip(Kernels::all().into_iter().cycle()) {
            let index = index.clone().with_kernels(kernels);
            for query in vectors(4, dimension, 16).chunks_exact(dimension) {
                let mut scratch = Scratch::default();
                let mut of = |probes: usize, k: usize, ending| {
                    let mut words = |list: ListId, out: &mut [u64]| {
                        let first = index.list_offsets()[list.index()];
                        out.fill(0);
                        let own = (0..index.list_lengths()[list.index()]).filter(|n| passes(first + n));
                        own.for_each(|n| out[n as usize / 64] |= 1 << (n % 64));
                    };
                    let mut selector = Selector::new();
                    selector.reset(k);
                    let probing = Probing { by_codes: true, ending, pass_rate: 0.3, ..Probing::of(probes, probes) };
                    index.search(query, probing, Some(&mut words), &mut selector, k, &mut scratch);
                    selector.finish().iter().map(|&key| unkey(key)).collect::<Vec<_>>()
                };
                for (probes, k) in [(20, 2000), (20, 30), (5, 2000), (5, 30)] {
                    let mut expected = searched(&index, query, probes, 2000, true).0;
                    expected.retain(|(_, slot)| passes(slot.0));
                    expected.truncate(k);
                    assert_eq!(of(probes, k, None), expected, "{} {probes} {k}", kernels.name());
                    // A search that may leave nothing behind probes as many lists as it may.
                    let ending = Ending { margins: &margins, recall: 0.9, left: 0.0 };
                    assert_eq!(of(probes, k, Some(ending)), expected, "{} {probes} {k}", kernels.name());
                }
            }
        }
    }
}

/// A filtered search that stops early uses the row scores of its results.
#[test]
fn early_termination_keeps_the_requested_recall() {
    for first_pass in [PQ4, RABITQ] {
        let (values, dimension) = (vectors(6000, 24, 21), 24);
        let (_, index) = coded_by(first_pass, &values, dimension, 60);
        let queries = vectors(60, dimension, 22);
        let pairs: Vec<(f32, f32)> = queries
            .chunks_exact(dimension)
            .flat_map(|query| {
                let mut of_lists = vec![0.0; 60];
                index
                    .probe(query, 60, &mut Scratch::default())
                    .for_each(|(list, score)| of_lists[list.index()] = score);
                let length = query.iter().map(|x| x * x).sum::<f32>().sqrt();
                let pair = |slot| (of_lists[index.list_of(slot).index()] / length, index.product(query, slot) / length);
                index.filled_slots().step_by(7).map(pair).collect::<Vec<_>>()
            })
            .collect();
        let margins = ResidualQuantiles::of(&pairs);
        let (mut scratch, mut hits, mut lists) = (Scratch::default(), 0, 0);
        let mut halves = |list: ListId, out: &mut [u64]| {
            out.fill(0x5555_5555_5555_5555);
            let length = index.list_lengths()[list.index()] as usize;
            out.iter_mut().enumerate().for_each(|(n, word)| {
                *word &= if length >= (n + 1) * 64 { u64::MAX } else { (1u64 << (length.saturating_sub(n * 64))) - 1 };
            });
        };
        for query in queries.chunks_exact(dimension) {
            let mut of = |by_codes, left, k| {
                let mut selector = Selector::new();
                selector.reset(k);
                let ending = Some(Ending { margins: &margins, recall: 0.95, left });
                let probing = Probing { by_codes, ending, pass_rate: 0.5, ..Probing::of(8, 60) };
                let counters = index.search(query, probing, Some(&mut halves), &mut selector, 20, &mut scratch);
                let found: Vec<_> = selector.finish().iter().map(|&key| unkey(key)).collect();
                let best = rescored(&index, query, &found, 20);
                (best.into_iter().map(|(_, slot)| slot).collect::<Vec<_>>(), counters.lists)
            };
            let selected = if first_pass == PQ4 { 200 } else { 400 };
            let (found, probed) = of(true, 0.02, selected);
            let (best, _) = of(false, 0.0, selected);
            hits += best.iter().filter(|slot| found.contains(slot)).count();
            lists += probed;
        }
        assert!(hits >= 1140, "{hits} of 1200");
        assert!(lists < 60 * 60, "none ended early");
    }
}

#[test]
fn codes_do_not_change_by_appending_to_lists_or_splitting_them() {
    for first_pass in [PQ4, RABITQ] {
        let (values, dimension) = (vectors(900, 12, 17), 12);
        let rows = Matrix::new(&values, dimension).unwrap();
        let (built, index) = coded_by(first_pass, &values, dimension, 6);
        let numbers = |tensors: &Tensors| match first_pass {
            PQ4 => tensors.get::<f32>("first_pass_values", 2).unwrap().0.to_vec(),
            _ => tensors.get::<u64>("first_pass_signs", 2).unwrap().0.iter().map(|word| *word as f32).collect(),
        };
        let expected = numbers(&tensors(&built, rows));
        let part = built.part(|row| row % 3 == 1);
        assert_eq!(numbers(&tensors(&part, rows)), expected);
        // The code of an item does not depend on its position.
        let of_part = Index::open(&tensors(&part, rows)).unwrap();
        let query = &vectors(1, dimension, 18)[..];
        let scores = |index: &Index, order: &[u32]| {
            let mut scores: Vec<(u32, f32)> = searched(index, query, 6, 900, true)
                .0
                .iter()
                .map(|(score, slot)| (order[slot.index()], *score))
                .collect();
            scores.retain(|(row, _)| row % 3 == 1);
            scores.sort_unstable_by_key(|(row, _)| *row);
            scores
        };
        assert_eq!(scores(&index, &built.order), scores(&of_part, &part.order));
        // Other rows in lists of their own, with the same codebooks.
        let more = vectors(400, dimension, 19);
        let more = Matrix::new(&more, dimension).unwrap();
        let lists =
            Lists { centroids: vec![0.0; 2 * dimension], of_rows: (0..400).map(|n| n % 2).collect(), nearest: false };
        let mut merged = from_lists(more, lists, Rescore::F16).unwrap();
        assert!(!Index::open(&tensors(&merged, more)).unwrap().has_first_pass());
        merged.keep_first_pass(&index);
        assert_eq!(numbers(&tensors(&merged, more)), expected);
        assert_eq!(merged.order.iter().filter(|row| **row != NO_ITEM).count(), 400);
    }
}

#[test]
fn tiny_catalogues_have_codes() {
    for first_pass in [PQ4, RABITQ] {
        for (values, dimension) in
            [(vec![0.0; 12], 3), (vec![1.0; 80], 2), (vec![5.0], 1), (vec![1e-30, -7e16, 7e16], 1)]
        {
            let (_, index) = coded_by(first_pass, &values, dimension, 1);
            for query in [0.0, 1.0, -7e16] {
                let (found, _) = searched(&index, &vec![query; dimension], 1, 100, true);
                assert_eq!(found.len(), values.len() / dimension);
                assert!(found.iter().all(|(score, _)| score.is_finite()), "{values:?} {query}: {found:?}");
            }
        }
    }
}

/// Hand-written tensors of a list with three items: files of this format must stay readable.
#[test]
fn the_golden_file_of_the_format_is_read_exactly() {
    let (mut first_pass_codes, mut values) = (vec![0u8; 64], vec![0f32; 2 * 16]);
    // Of 8 subspaces the fourth has dimension 0 and the last one dimension 1; values are 0, 1, 2, ... and 0, -1, -2, ...
    (0..16).for_each(|n| (values[n], values[16 + n]) = (n as f32, -(n as f32)));
    for (item, code) in [(0, [3u8, 0]), (1, [0, 5]), (2, [15, 15])] {
        first_pass_codes[item * 4 + 3] = code[0] | code[1] << 4;
    }
    let open = |first_pass_codes: &[u8], values: &[f32]| {
        let mut file = TensorFile::new();
        file.add_owned("centroids", &[1, 2], vec![10f32, 20.0]).unwrap();
        file.add_owned("list_lengths", &[1], vec![3u32]).unwrap();
        file.add_owned("codes", &[1, 1, 16, 4], vec![128u8; 64]).unwrap();
        file.add_owned("scales", &[16], vec![0f32; 16]).unwrap();
        file.add_owned("rows", &[16, 2], vec![0f32; 32]).unwrap();
        file.add_owned("first_pass_codes", &[1, 1, 16, 4], first_pass_codes.to_vec()).unwrap();
        file.add_owned("first_pass_values", &[2, 16], values.to_vec()).unwrap();
        Index::open(&file.in_memory("index").unwrap())
    };
    let index = open(&first_pass_codes, &values).unwrap();
    let (found, _) = searched(&index, &[17.0, 17.0], 1, 3, true);
    // 17 (10 + 20), plus 17 per value: the quantization step is 1, so nothing is rounded.
    assert_eq!(found, [(561.0, Slot(0)), (510.0, Slot(2)), (425.0, Slot(1))]);
    for invalid in [f32::NAN, f32::NEG_INFINITY, 1e30] {
        values[9] = invalid;
        let error = open(&first_pass_codes, &values).unwrap_err();
        assert!(error.kind() == Kind::Corrupt && error.to_string().contains("first_pass_values"), "{error}");
    }
}

#[test]
fn tensors_of_other_sizes_are_rejected() {
    let open = |codes: Option<[usize; 4]>, values: Option<[usize; 2]>, has_rows: bool| {
        let mut file = TensorFile::new();
        file.add_owned("centroids", &[2, 10], vec![0f32; 20]).unwrap();
        file.add_owned("list_lengths", &[2], vec![3u32, 17]).unwrap();
        file.add_owned("codes", &[3, 3, 16, 4], vec![128u8; 3 * 3 * 64]).unwrap();
        file.add_owned("scales", &[48], vec![0f32; 48]).unwrap();
        if has_rows {
            file.add_owned("rows", &[48, 10], vec![0f32; 480]).unwrap();
        }
        if let Some(shape) = codes {
            file.add_owned("first_pass_codes", &shape, vec![0u8; shape.iter().product()]).unwrap();
        }
        if let Some(shape) = values {
            file.add_owned("first_pass_values", &shape, vec![0f32; shape.iter().product()]).unwrap();
        }
        Index::open(&file.in_memory("index").unwrap())
    };
    let (codes, values) = (Some([3, 2, 16, 4]), Some([10, 16]));
    assert!(open(codes, values, true).unwrap().has_first_pass());
    assert!(!open(None, None, true).unwrap().has_first_pass());
    for (codes, values, has_rows, expected) in [
        (codes, values, false, "no `rows` to rescore"),
        (codes, None, true, "first_pass_values"),
        (None, values, true, "first_pass_codes"),
        (Some([3, 0, 16, 4]), values, true, "does not fit 48 slots"),
        (Some([3, 3, 16, 4]), values, true, "does not fit 48 slots of 10 dimensions"),
        (Some([2, 2, 16, 4]), values, true, "does not fit 48 slots"),
        (Some([3, 2, 4, 16]), values, true, "does not fit 48 slots"),
        (codes, Some([16, 10]), true, "expected [10, 16]"),
        (codes, Some([9, 16]), true, "expected [10, 16]"),
    ] {
        let error = open(codes, values, has_rows).unwrap_err();
        assert!(error.kind() == Kind::Corrupt && error.to_string().contains(expected), "{expected}: {error}");
    }
}

#[test]
fn codes_without_rows_are_rejected_before_building() {
    let values = vectors(50, 4, 1);
    let rows = Matrix::new(&values, 4).unwrap();
    for (first_pass, rescore, expected) in [
        (PQ4, Rescore::None, "index.first_pass.codes: pq4 with index.rescore"),
        (RABITQ, Rescore::None, "index.first_pass.codes: rabitq with index.rescore"),
        (FirstPass { subspaces: 8, ..RABITQ }, Rescore::F16, "got 8, expected none"),
        (FirstPass { subspaces: 16, ..PQ4 }, Rescore::F16, "got 16 for 4 dimensions, expected a multiple of 8 up to 8"),
    ] {
        let error = build(rows, &Options { first_pass, rescore, ..Options::default() }, &|_| ()).unwrap_err();
        assert!(error.kind() == Kind::Invalid && error.to_string().contains(expected), "{error}");
    }
}
