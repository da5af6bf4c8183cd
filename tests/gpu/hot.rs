//! Tables that are cached partly on the GPU: pooled values equal those that the CPU computes from the complete table, in any
//! order of batches, after failures, and whether the GPU or the host reads the missing rows.

use std::sync::Arc;

use sterling::cuda::Device;
use sterling::cuda::ops::bags::{SumsTo, fetch_rows};
use sterling::embedding::place::CardShare;
use sterling::embedding::{HostBags, HotCounters, HotTables, HotTurn, Table, TableSpec, Unseen};
use sterling::kernels::buffer::Buffer;
use sterling::kernels::cpu::Kernels;
use sterling::kernels::cpu::pool::{self, BagSums, Bags, RowFormat};

use crate::bags::rows_of;
use crate::emulation::{Random, device, emulated, seeded};

const ROWS: usize = 500;

fn table_of(format: RowFormat, width: usize, random: &mut Random) -> Table {
    let spec = TableSpec { name: "items".into(), rows: ROWS as u64, width, format, unseen: Unseen::default() };
    Table::host(spec, Buffer::copied(&rows_of(format, width, ROWS, random)).unwrap()).unwrap()
}

/// Returns a share of `bytes` bytes of a GPU, with three quarters of all reads expected to hit.
fn share(bytes: u64) -> CardShare {
    CardShare { bytes, hit_share: 0.75 }
}

/// Returns bags of ids, of which few are frequent and some have no row.
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
    table: &'a Table,
    number: usize,
}

impl Case<'_> {
    /// Pools some bags in a turn and compares the result with that of the CPU.
    fn pool(&self, lane: &Device, turn: &mut HotTurn<'_>, random: &mut Random, what: &str) -> usize {
        let (ids, offsets) = bags_of(random, 21);
        let weights = random.numbers(ids.len());
        let (weighted, is_mean) = (random.below(2) == 0, random.below(3) == 0);
        let (stride, column) = (self.table.width() + 3, 2);
        let ends: Vec<usize> = offsets.iter().map(|&o| o as usize).collect();
        let requested = Bags { ids: &ids, offsets: &ends, weights: weighted.then_some(&weights), mean: is_mean };
        let mut want = vec![7f32; 21 * stride];
        let mut sums = BagSums { data: &mut want, stride, column };
        pool::pool(Kernels::named("portable").unwrap(), &self.table.host_rows().unwrap(), &requested, &mut sums);

        let data = lane.copy(&vec![7f32; want.len()]).unwrap();
        let bags = HostBags { ids: ids.clone(), offsets: &offsets, weights: weighted.then_some(&weights[..]), is_mean };
        turn.pool(lane, self.number, bags, &SumsTo { data: &data, stride, column }).unwrap();
        for (at, (got, want)) in data.to_vec().unwrap().iter().zip(&want).enumerate() {
            let near = (got - want).abs() <= 3e-5 * want.abs().max(1.0);
            assert!(near, "{what}, bag {}, column {}: {got}, expected {want}", at / stride, at % stride);
        }
        ids.iter().filter(|id| **id >= 0).count()
    }
}

/// Pools from tables of every share of a GPU, with two interleaved streams.
fn pool_from(device: &Device, formats: &[(RowFormat, usize)], what: &str) {
    let mut random = Random::new(11);
    for &(format, width) in formats {
        let table = table_of(format, width, &mut random);
        let row_bytes = format.row_bytes(width).unwrap() as u64;
        for (places, least) in [(0, 0.0), (1, 0.0), (5, 0.0), (60, 0.5), (10_000, 0.5)] {
            let mut hot = HotTables::default();
            assert!(hot.is_empty());
            let number = hot.add(device, &table, share(places * row_bytes)).unwrap();
            assert_eq!(hot.add(device, &table, share(row_bytes)).unwrap(), number, "it has its places");
            // Streams read it concurrently.
            device.settle().unwrap();
            let case = Case { table: &table, number };
            let lanes = [device.lane().unwrap(), device.lane().unwrap()];
            let mut requested = 0;
            for turn_number in 0..12 {
                let lane = &lanes[turn_number % 2];
                lane.begin().unwrap();
                let mut turn = hot.turn();
                for part in 0..2 {
                    let what =
                        format!("{what}, {format:?} x {width}, {places} places, turn {turn_number}, part {part}");
                    requested += case.pool(lane, &mut turn, &mut random, &what);
                }
                turn.end();
            }
            let HotCounters { table: name, cache: counters, planned } = hot.counters().swap_remove(0);
            assert_eq!(planned, 0.75, "as the plan had it");
            assert_eq!((name.as_str(), counters.hits + counters.misses), ("items", requested as u64));
            assert_eq!(counters.entries_max, places.min(ROWS as u64));
            assert!(
                counters.entries <= counters.entries_max && counters.inserted - counters.evicted == counters.entries
            );
            // Twelve rows are five eighths of the reads; a row that a partition reads again is already cached.
            assert!(counters.hit_rate() > least, "{places} places: {}", counters.hit_rate());
        }
    }
}

const FORMATS: [(RowFormat, usize); 4] =
    [(RowFormat::F32, 20), (RowFormat::Int8, 12), (RowFormat::Int8, 7), (RowFormat::Int4, 16)];

#[test]
fn frequent_rows_are_pooled_as_all_rows_are() {
    pool_from(&device(), &FORMATS, "fetched");
    // Rows wider than the part of a row that a warp copies at a time.
    pool_from(&device(), &[(RowFormat::F32, 300), (RowFormat::Int8, 301)], "fetched");
}

#[test]
fn the_host_gathers_unregistered_rows() {
    let card = emulated();
    card.lock_nothing();
    pool_from(&Device::over(card.clone()), &FORMATS[..2], "gathered");
    assert_eq!((card.registered_bytes(), card.demand()[0].host), (0, 0));
}

/// Each missing row is transferred once, however often a batch reads it; cached rows are not transferred.
#[test]
fn missing_rows_are_copied_once() {
    let (card, mut random) = (emulated(), Random::new(13));
    let device = Device::over(card.clone());
    let table = table_of(RowFormat::Int8, 12, &mut random);
    let mut hot = HotTables::default();
    let number = hot.add(&device, &table, share(1 << 20)).unwrap();
    assert_eq!(card.registered_bytes(), 16 * ROWS as u64);
    device.settle().unwrap();
    let lane = device.lane().unwrap();
    for (ids, fetched) in [(vec![7i64, 9, 7, -1, 7], 2), (vec![9, 7, 3], 1), (vec![3, 7], 0)] {
        lane.begin().unwrap();
        let before = card.demand()[0].host;
        let data = lane.zeros(12).unwrap();
        let offsets = [0, ids.len() as u32];
        let bags = HostBags { ids, offsets: &offsets, weights: None, is_mean: false };
        let mut turn = hot.turn();
        turn.pool(&lane, number, bags, &SumsTo { data: &data, stride: 12, column: 0 }).unwrap();
        data.to_vec().unwrap();
        turn.end();
        assert_eq!(card.demand()[0].host - before, 16 * fetched);
    }
    drop(hot);
    assert_eq!(card.registered_bytes(), 0);
}

/// Misuses that fault on a GPU, or return wrong data silently, are errors in the emulation.
#[test]
fn memory_of_the_host_is_read_while_it_is_registered() {
    let [card, other] = [1, 2].map(|seed| Arc::new(seeded(seed).late()));
    let device = Device::over(card.clone());
    let bytes = Buffer::copied(&(0..80u8).collect::<Vec<u8>>()).unwrap();
    let registered = device.register(bytes.clone()).unwrap();
    let again = device.register(bytes.slice(8..16).unwrap()).unwrap_err().to_string();
    assert!(again.contains("8 bytes cannot be registered"), "{again}");
    let rows = fetch_rows(&device, &registered, &[3, 0, 3], 20).unwrap().to_vec().unwrap();
    assert!(rows.iter().map(|&byte| usize::from(byte)).eq((60..80).chain(0..20).chain(60..80)));
    let beyond = [4, -1].map(|row| fetch_rows(&device, &registered, &[row], 20).unwrap_err().to_string());
    assert!(beyond[0].contains("row 4 is outside of a table of 4") && beyond[1].contains("row -1"), "{beyond:?}");

    // Memory that is registered with another GPU.
    let elsewhere = Device::over(other.clone()).register(Buffer::copied(&[0; 20]).unwrap()).unwrap();
    let refused = fetch_rows(&device, &elsewhere, &[0], 20).unwrap_err().to_string();
    assert!(refused.contains("memory of the host that is not registered"), "{refused}");

    // Work that outlives the memory it reads.
    let lane = device.lane().unwrap();
    lane.begin().unwrap();
    let late = fetch_rows(&lane, &registered, &[1], 20).unwrap().later(20).unwrap();
    lane.flush().unwrap();
    card.keep_faults();
    drop(registered);
    let faults = card.faults();
    assert!(faults.len() == 1 && faults[0].contains("is unregistered while `fetch_rows`"), "{faults:?}");
    let refused = late.get().unwrap_err().to_string();
    assert!(refused.contains("memory of the host that is not registered"), "{refused}");
}

/// Uploads of a failed turn may never have run, so its slots are invalid.
#[test]
fn cache_slots_of_a_failed_batch_are_not_reused() {
    let (device, mut random) = (device(), Random::new(12));
    let table = table_of(RowFormat::Int8, 12, &mut random);
    let mut hot = HotTables::default();
    let number = hot.add(&device, &table, share(16 * 50)).unwrap();
    device.settle().unwrap();
    let case = Case { table: &table, number };
    for round in 0..6 {
        // Recorded work that is never submitted.
        let removed = device.lane().unwrap();
        removed.begin().unwrap();
        let (ids, offsets) = bags_of(&mut random, 30);
        let data = removed.zeros(30 * 12).unwrap();
        let mut turn = hot.turn();
        let bags = HostBags { ids, offsets: &offsets, weights: None, is_mean: false };
        turn.pool(&removed, number, bags, &SumsTo { data: &data, stride: 12, column: 0 }).unwrap();
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
    assert!(turn.pool(&device, number + 1, bags, &SumsTo { data: &data, stride: 12, column: 0 }).is_err());
}
