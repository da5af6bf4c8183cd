//! Tables of which only the rows that are asked for often are on the card: what is pooled is what the CPU pools of the whole table,
//! whoever asks, and whatever became of those before.

use sterling::device::cpu::Kernels;
use sterling::device::cpu::pool::{self, BagSums, Bags, RowFormat, Rows};
use sterling::device::cuda::Device;
use sterling::device::cuda::ops::bags::SumsTo;
use sterling::embedding::place::CardShare;
use sterling::embedding::{HostBags, HotCounters, HotTables, HotTurn};

use crate::bags::rows_of;
use crate::emulation::{Random, device};

const ROWS: usize = 500;

/// So many bytes of a card, which answer three quarters of all reads by some plan.
fn share(bytes: u64) -> CardShare {
    CardShare { bytes, hit_share: 0.75 }
}

/// Bags of ids of which few are asked for often, some of no row.
fn bags_of(random: &mut Random, bags: usize) -> (Vec<i64>, Vec<u32>) {
    let mut offsets = vec![0u32];
    for _ in 0..bags {
        offsets.push(offsets[offsets.len() - 1] + random.below(9) as u32);
    }
    let id = |random: &mut Random| match random.below(8) {
        0 => -1,
        1..6 => random.below(12) as i64 * 17,
        _ => random.below(ROWS) as i64,
    };
    ((0..offsets[bags]).map(|_| id(random)).collect(), offsets)
}

struct Case<'a> {
    rows: Rows<'a>,
    table: usize,
    width: usize,
}

impl Case<'_> {
    /// Pools some bags in a turn; what comes out is what the CPU makes of them.
    fn pool(&self, lane: &Device, turn: &mut HotTurn<'_>, random: &mut Random, what: &str) -> usize {
        let (ids, offsets) = bags_of(random, 21);
        let weights = random.numbers(ids.len());
        let (weighted, is_mean) = (random.below(2) == 0, random.below(3) == 0);
        let (stride, column) = (self.width + 3, 2);
        let ends: Vec<usize> = offsets.iter().map(|&o| o as usize).collect();
        let asked = Bags { ids: &ids, offsets: &ends, weights: weighted.then_some(&weights), mean: is_mean };
        let mut want = vec![7f32; 21 * stride];
        let mut sums = BagSums { data: &mut want, stride, column };
        pool::pool(Kernels::named("portable").unwrap(), &self.rows, &asked, &mut sums);

        let data = lane.copy(&vec![7f32; want.len()]).unwrap();
        let bags = HostBags { ids: ids.clone(), offsets: &offsets, weights: weighted.then_some(&weights[..]), is_mean };
        turn.pool(lane, (self.table, &self.rows), bags, &SumsTo { data: &data, stride, column }).unwrap();
        for (at, (got, want)) in data.to_vec().unwrap().iter().zip(&want).enumerate() {
            let near = (got - want).abs() <= 3e-5 * want.abs().max(1.0);
            assert!(near, "{what}, bag {}, column {}: {got}, expected {want}", at / stride, at % stride);
        }
        ids.iter().filter(|id| **id >= 0).count()
    }
}

#[test]
fn rows_that_are_asked_for_often_are_pooled_as_all_rows_are() {
    let (device, mut random) = (device(), Random::new(11));
    for (format, width) in [(RowFormat::F32, 20), (RowFormat::Int8, 12), (RowFormat::Int8, 7), (RowFormat::Int4, 16)] {
        let bytes = rows_of(format, width, ROWS, &mut random);
        let row_bytes = format.row_bytes(width).unwrap() as u64;
        for places in [1, 5, 60, 10_000] {
            let rows = Rows::new(format, width, &bytes).unwrap();
            let mut hot = HotTables::default();
            assert!(hot.is_empty());
            let table = hot.add(&device, "items", &rows, share(places * row_bytes)).unwrap();
            assert_eq!(hot.add(&device, "items", &rows, share(1)).unwrap(), table, "it has its places");
            let case = Case { rows, table, width };
            let lanes = [device.lane().unwrap(), device.lane().unwrap()];
            let mut asked = 0;
            for turn_number in 0..12 {
                let lane = &lanes[turn_number % 2];
                lane.begin().unwrap();
                let mut turn = hot.turn();
                for part in 0..2 {
                    let what = format!("{format:?} x {width}, {places} places, turn {turn_number}, part {part}");
                    asked += case.pool(lane, &mut turn, &mut random, &what);
                }
                turn.end();
            }
            let HotCounters { table: name, cache: counters, planned } = hot.counters().swap_remove(0);
            assert_eq!(planned, 0.75, "as the plan had it");
            assert_eq!((name.as_str(), counters.hits + counters.misses), ("items", asked as u64));
            assert_eq!(counters.entries_max, places.min(ROWS as u64));
            assert!(
                counters.entries <= counters.entries_max && counters.inserted - counters.evicted == counters.entries
            );
            // Twelve rows are five eighths of what is asked for.
            let least = [0.0, 0.0, 0.5, 0.5][[1, 5, 60, 10_000].iter().position(|n| *n == places).unwrap()];
            assert!(counters.hit_rate() > least, "{places} places: {}", counters.hit_rate());
        }
    }
}

/// What a turn that came to no end has asked for may never have been done.
#[test]
fn places_of_a_turn_that_failed_are_not_trusted() {
    let (device, mut random) = (device(), Random::new(12));
    let bytes = rows_of(RowFormat::Int8, 12, ROWS, &mut random);
    let rows = Rows::new(RowFormat::Int8, 12, &bytes).unwrap();
    let mut hot = HotTables::default();
    let table = hot.add(&device, "items", &rows, share(16 * 50)).unwrap();
    let case = Case { rows, table, width: 12 };
    for round in 0..6 {
        // Work that is written down and never sent off.
        let gone = device.lane().unwrap();
        gone.begin().unwrap();
        let (ids, offsets) = bags_of(&mut random, 30);
        let data = gone.zeros(30 * 12).unwrap();
        let mut turn = hot.turn();
        let bags = HostBags { ids, offsets: &offsets, weights: None, is_mean: false };
        turn.pool(&gone, (table, &rows), bags, &SumsTo { data: &data, stride: 12, column: 0 }).unwrap();
        drop(turn);
        let lane = device.lane().unwrap();
        lane.begin().unwrap();
        let mut turn = hot.turn();
        case.pool(&lane, &mut turn, &mut random, &format!("round {round}"));
        turn.end();
    }
    let mut turn = hot.turn();
    let bags = HostBags { ids: vec![0], offsets: &[0, 1], weights: None, is_mean: false };
    let data = device.zeros(12).unwrap();
    assert!(turn.pool(&device, (table + 1, &rows), bags, &SumsTo { data: &data, stride: 12, column: 0 }).is_err());
}
