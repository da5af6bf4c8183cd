//! The best K compared with a full sort, with many ties, ids of both signs and K from 1 to all.

use sterling::cuda::ops::top::{self, Scored, Ties};

use crate::emulation::{Random, device};

struct Case {
    rows: usize,
    stride: usize,
    levels: usize,
    wanted: Vec<u32>,
}

/// Returns the best of a row as pairs of ordered score and slot, best first.
fn sorted(keys: &[u32], slots: &[u32], ids: &[i64], wanted: usize) -> Vec<(u32, u32)> {
    let mut all: Vec<(u32, u32)> = keys.iter().copied().zip(slots.iter().copied()).collect();
    all.sort_by_key(|&(key, slot)| (std::cmp::Reverse(key), ids[slot as usize]));
    all.truncate(wanted);
    all
}

fn check(case: &Case, seed: u64) {
    check_by(0, case, seed);
    check_by(1 + seed as usize % 5, case, seed);
}

/// Uses this number of blocks per row; 0 selects it automatically.
fn check_by(blocks: usize, case: &Case, seed: u64) {
    let Case { rows, stride, levels, ref wanted } = *case;
    let (device, mut random) = (device(), Random::new(seed));
    let keys: Vec<u32> = (0..rows * stride).map(|_| (random.below(levels) as u32).wrapping_mul(0x9E37_79B9)).collect();
    let slot_count = stride + 7;
    // Slots of a row in no order, each once; ids in no order of the slots.
    let mut slots = Vec::new();
    for _ in 0..rows {
        let mut of_row: Vec<u32> = (0..slot_count as u32).collect();
        (1..slot_count).rev().for_each(|n| of_row.swap(n, random.below(n + 1)));
        slots.extend(&of_row[..stride]);
    }
    let mut ids: Vec<i64> = (0..slot_count as i64).map(|n| (n - slot_count as i64 / 2) * 0x0123_4567_89AB).collect();
    (1..slot_count).rev().for_each(|n| ids.swap(n, random.below(n + 1)));
    (ids[0], ids[1]) = (i64::MAX, i64::MIN);
    let counts: Vec<u32> = (0..rows).map(|_| (stride - random.below(stride.min(4))) as u32).collect();
    let on_device = (
        device.copy(&keys).unwrap(),
        device.copy(&slots).unwrap(),
        device.copy(&counts).unwrap(),
        device.copy(wanted).unwrap(),
        device.copy(&ids).unwrap(),
    );
    let from = Scored { keys: &on_device.0, slots: Some(&on_device.1), counts: Some(&on_device.2), stride };
    let ties = Ties { ids: Some(&on_device.4), map: None };
    let most = wanted.iter().copied().max().unwrap() as usize;
    let best = match blocks {
        0 => top::select(&device, &from, &ties, &on_device.3, most).unwrap(),
        _ => top::select_by(&device, blocks, &from, &ties, (&on_device.3, most)).unwrap(),
    };
    let stride_out = best.stride;
    let (found_keys, found_slots) = (best.keys.to_vec().unwrap(), best.slots.to_vec().unwrap());
    let found_counts = best.counts.to_vec().unwrap();
    let best = top::sort(&device, best, &ties).unwrap();
    let (sorted_keys, sorted_slots) = (best.keys.to_vec().unwrap(), best.slots.to_vec().unwrap());
    for row in 0..rows {
        let count = counts[row] as usize;
        let (keys, slots) = (&keys[row * stride..][..count], &slots[row * stride..][..count]);
        let want = sorted(keys, slots, &ids, wanted[row] as usize);
        assert_eq!(found_counts[row] as usize, want.len());
        let pairs = |keys: &[u32], slots: &[u32]| -> Vec<(u32, u32)> {
            let range = row * stride_out..row * stride_out + want.len();
            keys[range.clone()].iter().copied().zip(slots[range].iter().copied()).collect()
        };
        let (keys, slots): (Vec<u32>, Vec<u32>) = pairs(&found_keys, &found_slots).into_iter().unzip();
        assert_eq!(sorted(&keys, &slots, &ids, want.len()), want, "row {row} of seed {seed}: selected");
        assert_eq!(pairs(&sorted_keys, &sorted_slots), want, "row {row} of seed {seed}: sorted");
    }
}

#[test]
fn the_best_k_equal_a_sort_for_any_k() {
    check(&Case { rows: 3, stride: 700, levels: 5, wanted: vec![1, 100, 700] }, 1);
    check(&Case { rows: 2, stride: 2500, levels: 4_000_000, wanted: vec![1500, 2499] }, 2);
    check(&Case { rows: 4, stride: 1, levels: 1, wanted: vec![0, 1, 2, 5] }, 3);
    check(&Case { rows: 2, stride: 1300, levels: 1, wanted: vec![1299, 650] }, 4);
    for seed in 5..12 {
        let mut random = Random::new(seed);
        let (stride, levels) = (1 + random.below(400), 1 + random.below(60));
        let wanted = (0..2).map(|_| random.below(stride + 3) as u32).collect();
        check(&Case { rows: 2, stride, levels, wanted }, seed);
    }
}

#[test]
fn two_hundred_thousand_are_selected_and_sorted() {
    check_by(0, &Case { rows: 1, stride: 200_100, levels: 3000, wanted: vec![200_000] }, 20);
}

#[test]
fn ties_rank_by_a_map() {
    let device = device();
    // Indexes 0..4 stand for slots 3, 0, 2, 1, with descending ids.
    let keys = device.copy(&[7u32, 7, 7, 9]).unwrap();
    let (map, ids) = (device.copy(&[3u32, 0, 2, 1]).unwrap(), device.copy(&[-1i64, -2, -3, -4]).unwrap());
    let wanted = device.copy(&[3u32]).unwrap();
    let ties = Ties { ids: Some(&ids), map: Some((&map, 4)) };
    let scored = Scored { keys: &keys, slots: None, counts: None, stride: 4 };
    let best = top::select(&device, &scored, &ties, &wanted, 3).unwrap();
    let best = top::sort(&device, best, &ties).unwrap();
    assert_eq!(best.slots.read(3).unwrap(), [3, 0, 2]);
}
