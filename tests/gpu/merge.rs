//! Merge of the results of several queries of a request, compared with a simple reference implementation.

use std::collections::BTreeMap;

use sterling::cuda::ops::merge::{FoundBy, merge};
use sterling::cuda::ops::rows::SlotRows;
use sterling::cuda::ops::top::Best;
use sterling::cuda::partition::Share;
use sterling::index::ivf::{DeviceIndex, Rescore};
use sterling::index::topk::{key, unkey};
use sterling::units::Slot;

use crate::emulation::{Random, device};
use crate::scan::index;

fn ordered(score: f32) -> u32 {
    (key(score, Slot(0)) >> 32) as u32
}

fn number(key: u32) -> f32 {
    unkey(u64::from(key) << 32).0
}

struct Case {
    requests: usize,
    weights: Vec<f32>,
    stride: usize,
    /// Upper bound of slots: the lower, the more items are found by several queries.
    slots: usize,
}

/// Returns the items of each request with their scores, as bits.
fn plain(case: &Case, by: FoundBy, rows: &[Vec<(u32, f32)>]) -> Vec<BTreeMap<u32, u32>> {
    let of_request = |rows: &[Vec<(u32, f32)>]| {
        let mut found: BTreeMap<u32, Vec<f32>> = BTreeMap::new();
        for (row, weight) in rows.iter().zip(&case.weights) {
            for (slot, score) in row {
                found.entry(*slot).or_default().push((score * weight).clamp(f32::MIN, f32::MAX));
            }
        }
        let one = |scores: &Vec<f32>| match by {
            FoundBy::Any => scores.iter().copied().fold(f32::MIN, f32::max),
            FoundBy::All => scores.iter().sum::<f32>().clamp(f32::MIN, f32::MAX),
        };
        let stays = |scores: &Vec<f32>| by == FoundBy::Any || scores.len() == case.weights.len();
        found
            .iter()
            .filter(|(_, scores)| stays(scores))
            .map(|(slot, scores)| (*slot, (one(scores) + 0.0).to_bits()))
            .collect()
    };
    rows.chunks(case.weights.len()).map(of_request).collect()
}

fn check(case: &Case, seed: u64) {
    let (device, mut random) = (device(), Random::new(seed));
    let row = |random: &mut Random| -> Vec<(u32, f32)> {
        let mut slots: Vec<u32> = (0..case.slots as u32).collect();
        (1..slots.len()).rev().for_each(|n| slots.swap(n, random.below(n + 1)));
        slots.truncate(case.stride.min(case.slots) - random.below(case.stride.min(case.slots).min(5)));
        let score = |random: &mut Random| match random.below(40) {
            0 => 0.0,
            1 => f32::MAX / 4.0,
            2 => f32::MIN / 4.0,
            _ => random.number(),
        };
        slots.into_iter().map(|slot| (slot, score(random))).collect()
    };
    let rows: Vec<Vec<(u32, f32)>> = (0..case.requests * case.weights.len()).map(|_| row(&mut random)).collect();
    for by in [FoundBy::Any, FoundBy::All] {
        let (mut keys, mut slots) = (vec![0; rows.len() * case.stride], vec![0; rows.len() * case.stride]);
        for (n, row) in rows.iter().enumerate() {
            for (at, (slot, score)) in row.iter().enumerate() {
                (keys[n * case.stride + at], slots[n * case.stride + at]) = (ordered(*score), *slot);
            }
        }
        let counts: Vec<u32> = rows.iter().map(|row| row.len() as u32).collect();
        let found = Best {
            keys: device.copy(&keys).unwrap(),
            slots: device.copy(&slots).unwrap(),
            counts: device.copy(&counts).unwrap(),
            stride: case.stride,
        };
        let expected = plain(case, by, &rows);
        // Room for exactly the number of items.
        let most = expected.iter().map(BTreeMap::len).max().unwrap();
        let merged = merge(&device, found, by, &device.copy(&case.weights).unwrap(), most).unwrap();
        let counts = merged.counts.read(case.requests).unwrap();
        let (keys, slots) = (merged.keys.to_vec().unwrap(), merged.slots.to_vec().unwrap());
        for (n, expected) in expected.iter().enumerate() {
            let places = n * most..n * most + counts[n] as usize;
            assert_eq!(places.len(), expected.len(), "request {n} of seed {seed}, {by:?}");
            let got: BTreeMap<u32, u32> = places.map(|at| (slots[at], number(keys[at]).to_bits())).collect();
            assert_eq!(got, *expected, "request {n} of seed {seed}, {by:?}");
        }
    }
}

#[test]
fn results_of_queries_are_merged_as_in_the_reference() {
    check(&Case { requests: 1, weights: vec![1.0], stride: 1, slots: 1 }, 1);
    check(&Case { requests: 3, weights: vec![1.0, 1.5], stride: 40, slots: 60 }, 2);
    check(&Case { requests: 2, weights: vec![0.5, 4_294_967_296.0, 3.0], stride: 1, slots: 2 }, 3);
    check(&Case { requests: 2, weights: vec![1.0; 64], stride: 9, slots: 9 }, 4);
    // More than fits into one sorted run, and than the threads of all blocks.
    check(&Case { requests: 1, weights: vec![1.0, 2.0], stride: 2500, slots: 3000 }, 5);
    for seed in 6..14 {
        let mut random = Random::new(seed);
        let weights = (0..1 + random.below(4)).map(|_| random.number().abs() + 0.1).collect();
        let (stride, more) = (1 + random.below(300), 1 + random.below(300));
        check(&Case { requests: 1 + random.below(3), weights, stride, slots: stride.max(more) }, seed);
    }
}

#[test]
fn empty_results_merge_to_an_empty_result() {
    let device = device();
    let weights = device.copy(&[1f32, 2.0]).unwrap();
    let nothing = |rows: usize, stride: usize| Best {
        keys: device.room(rows * stride).unwrap(),
        slots: device.room(rows * stride).unwrap(),
        counts: device.zeros(rows).unwrap(),
        stride,
    };
    for stride in [0, 8] {
        let merged = merge(&device, nothing(4, stride), FoundBy::Any, &weights, 0).unwrap();
        assert_eq!(merged.counts.read(2).unwrap(), [0, 0]);
    }
    let error = merge(&device, nothing(3, 8), FoundBy::Any, &weights, 8).unwrap_err().to_string();
    assert!(error.contains("results of 3 queries, expected a multiple of 2"), "{error}");
}

/// Intermediate sums that overflow are clamped to the largest number only at the end.
#[test]
fn only_the_total_of_a_weighted_sum_is_made_finite() {
    let dimension = 8;
    let (index, values) = index(20, dimension, 1, Rescore::F32, true);
    let device = device();
    let copied = DeviceIndex::copy(&device, &index, &index.cut(Share::WHOLE), 0).unwrap();
    let slot = index.list_offsets()[0];
    let mut row = vec![0f32; dimension];
    index.row(Slot(slot), &mut row);
    assert!(values.chunks(dimension).any(|value| value == row));
    let length: f32 = row.iter().map(|x| x * x).sum();
    // Products of 1, 1 and -1 with the item.
    let queries: Vec<f32> =
        [1.0, 1.0, -1.0].iter().flat_map(|sign| row.iter().map(move |x| sign * x / length)).collect();
    let (vectors, weights) = (device.copy(&queries).unwrap(), device.copy(&[f32::MAX; 3]).unwrap());
    let (slots, counts, keys) = (device.copy(&[slot]).unwrap(), device.copy(&[1u32]).unwrap(), device.room(1).unwrap());
    let of = SlotRows { slots: &slots, counts: &counts, stride: 1 };
    copied.rows().products(&device, (&vectors, Some(&weights)), &of, &keys).unwrap();
    assert_eq!(number(keys.to_vec().unwrap()[0]), f32::MAX);
}

#[test]
fn products_with_several_queries_are_their_weighted_sum() {
    for (rescore, dimension) in [(Rescore::None, 30), (Rescore::F16, 33), (Rescore::F32, 128)] {
        let (index, _) = index(300, dimension, 7, rescore, true);
        let device = device();
        let copied = DeviceIndex::copy(&device, &index, &index.cut(Share::WHOLE), 0).unwrap();
        let mut random = Random::new(dimension as u64);
        let (weights, requests, stride) = ([0.5f32, 2.0, 1.25], 2, 300);
        let vectors = random.numbers(requests * weights.len() * dimension);
        let first = index.list_offsets()[0];
        let slots: Vec<u32> =
            (0..requests * stride).map(|_| first + random.below(index.list_lengths()[0] as usize) as u32).collect();
        let counts = [300u32, 13];
        let of = SlotRows { slots: &device.copy(&slots).unwrap(), counts: &device.copy(&counts).unwrap(), stride };
        let keys = device.room(requests * stride).unwrap();
        let (vectors_on, weights_on) = (device.copy(&vectors).unwrap(), device.copy(&weights).unwrap());
        copied.rows().products(&device, (&vectors_on, Some(&weights_on)), &of, &keys).unwrap();
        let keys = keys.to_vec().unwrap();
        for (n, vectors) in vectors.chunks(weights.len() * dimension).enumerate() {
            for at in n * stride..n * stride + counts[n] as usize {
                let product = |query: &[f32]| index.product(query, Slot(slots[at]));
                let want: f32 = vectors.chunks(dimension).zip(&weights).map(|(query, w)| w * product(query)).sum();
                let got = number(keys[at]);
                assert!((got - want).abs() <= 5e-5 * want.abs().max(1.0), "{rescore:?}: {got}, expected {want}");
            }
        }
    }
}
