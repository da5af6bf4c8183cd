//! Compares each kernel of the item index with the limits of the machine.
//!
//! `cargo bench --bench kernels` prints, for every instruction set that runs here: the time of a call, its bytes and
//! multiply-adds, their rates, and the share of the read bandwidth that a plain sum over the same memory reaches on
//! one thread. Times are medians of several runs. Rows that stay in a cache may exceed the memory bandwidth.

#![allow(clippy::unwrap_used)]

use std::hint::black_box;
use std::io::Write as _;
use std::time::Instant;

use sterling::kernels::cpu::Kernels;
use sterling::kernels::cpu::kernels::{BLOCK, Blocks, Int8Query, Lane, Pick, Staging};

const RUNS: usize = 15;
const DIMENSION: usize = 128;
/// Items of the scans: 64 MB of codes, more than an L3 cache holds.
const ITEMS: usize = 512 << 10;
/// Items whose codes stay in the L2 cache.
const ITEMS_NEAR: usize = 4 << 10;

/// Returns the median time of a call, in seconds.
fn median(mut call: impl FnMut()) -> f64 {
    call();
    let mut seconds: Vec<f64> = (0..RUNS)
        .map(|_| {
            let start = Instant::now();
            call();
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    seconds[RUNS / 2]
}

struct Row<'a> {
    kernels: Kernels,
    name: &'a str,
    bytes: usize,
    /// Multiply-adds, or numbers read.
    operations: usize,
}

impl Row<'_> {
    fn print(&self, seconds: f64, ceiling: f64) {
        let rate = self.bytes as f64 / seconds;
        let mut out = std::io::stdout().lock();
        writeln!(
            out,
            "| {} | {} | {:.1} | {:.2} | {:.1} | {:.1} | {:.0} % |",
            self.kernels.name(),
            self.name,
            seconds * 1e6,
            self.bytes as f64 / 1e6,
            rate / 1e9,
            self.operations as f64 / seconds / 1e9,
            100.0 * rate / ceiling,
        )
        .unwrap();
    }
}

fn codes(count: usize) -> Vec<u8> {
    (0..count).map(|n| (n as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect()
}

fn scans(kernels: Kernels, ceiling: f64) {
    let groups = DIMENSION / 4;
    let all = codes(ITEMS * DIMENSION);
    let scales = vec![0.01f32; ITEMS];
    let query: Vec<i8> = codes(DIMENSION).iter().map(|&c| c as i8).collect();
    let correction = 128 * query.iter().map(|&q| i32::from(q)).sum::<i32>();
    let query = Int8Query { rows: [&query, &query], corrections: [correction; 2], scale: 0.01 };
    for (name, items) in [("scan, from memory", ITEMS), ("scan, from the cache", ITEMS_NEAR)] {
        let blocks = Blocks {
            codes: &all[..items * DIMENSION],
            scales: &scales[..items],
            groups,
            items,
            first_slot: 0,
            next: &[],
        };
        let row = Row { kernels, name, bytes: items * (DIMENSION + 4), operations: items * DIMENSION };
        let (mut scores, mut slots) = (vec![0f32; items + BLOCK], vec![0u32; items + BLOCK]);
        let seconds = median(|| {
            let mut staging = Staging { scores: &mut scores, slots: &mut slots, len: 0 };
            black_box(kernels.scan(&blocks, &query, f32::INFINITY, 0, &mut staging));
        });
        row.print(seconds, ceiling);
        if items == ITEMS {
            let picks: Vec<Pick> =
                (0..items / BLOCK).step_by(4).map(|n| Pick { block: n as u32, mask: u16::MAX }).collect();
            let seconds = median(|| {
                let mut staging = Staging { scores: &mut scores, slots: &mut slots, len: 0 };
                black_box(kernels.scan_picks(&blocks, &picks, &query, f32::INFINITY, 0, &mut staging));
            });
            let (bytes, operations) = (row.bytes / 4, row.operations / 4);
            Row { kernels, name: "scan of picks, one block in four", bytes, operations }.print(seconds, ceiling);
        }
        let mut rooms = vec![(vec![0f32; items + BLOCK], vec![0u32; items + BLOCK]); 4];
        let seconds = median(|| {
            let mut lanes: Vec<Lane<'_>> = rooms
                .iter_mut()
                .map(|(scores, slots)| Lane {
                    query,
                    threshold: f32::INFINITY,
                    staging: Staging { scores, slots, len: 0 },
                })
                .collect();
            kernels.scan_many(&blocks, &mut lanes);
        });
        let name = format!("{name}, four queries");
        Row { name: &name, operations: 4 * row.operations, ..row }.print(seconds, ceiling);
    }
}

fn products(kernels: Kernels, ceiling: f64) {
    let query = vec![0.5f32; DIMENSION];
    let rows = vec![half::f16::from_f32(0.25); ITEMS * DIMENSION];
    // About every tenth row, in order.
    let slots: Vec<u32> = (0..ITEMS as u32).filter(|s| s.wrapping_mul(2_654_435_761) < u32::MAX / 10).collect();
    let mut out = vec![0f32; slots.len()];
    let seconds = median(|| kernels.dots_f16(&query, &rows, black_box(&slots), &mut out));
    let (bytes, operations) = (slots.len() * DIMENSION * 2, slots.len() * DIMENSION);
    Row { kernels, name: "products of every tenth f16 row", bytes, operations }.print(seconds, ceiling);
}

fn selection(kernels: Kernels, ceiling: f64) {
    let scores: Vec<f32> = codes(1 << 17).as_chunks::<4>().0.iter().map(|&c| u32::from_le_bytes(c) as f32).collect();
    let mut values = scores.clone();
    let seconds = median(|| {
        values.copy_from_slice(&scores);
        black_box(kernels.kth(&mut values, scores.len() / 2));
    });
    Row { kernels, name: "k-th of 32,768", bytes: scores.len() * 4, operations: scores.len() }.print(seconds, ceiling);
}

fn main() {
    // `cargo test --benches` only checks that it builds.
    if std::env::args().any(|a| a == "--test") {
        return;
    }
    let memory = vec![1u64; ITEMS * DIMENSION / 8];
    let seconds = median(|| {
        black_box(memory.iter().fold(0u64, |sum, &x| sum ^ x));
    });
    let ceiling = (memory.len() * 8) as f64 / seconds;
    let mut out = std::io::stdout();
    writeln!(out, "read bandwidth of one thread: {:.1} GB/s\n", ceiling / 1e9).unwrap();
    writeln!(out, "| kernels | work | µs | MB | GB/s | G multiply-adds/s | of the bandwidth |").unwrap();
    writeln!(out, "|---|---|---|---|---|---|---|").unwrap();
    for kernels in Kernels::all() {
        scans(kernels, ceiling);
        products(kernels, ceiling);
        selection(kernels, ceiling);
    }
}
