//! The dense part of the Debian model: its reranker and its user tower as programs and in rten, one thread, in turns.
//!
//! `cargo bench --bench dense` prints the table of docs/BENCHMARKS.md; `STERLING_KERNEL` chooses the instruction set;
//! `python python/bench_dense.py` measures ONNX Runtime beside it.
//!
//! The bound: multiply-adds. A candidate takes 46,176 of them as the graph is written down and 21,600 once it is collapsed; a
//! core of Zen 4 does 16 a cycle.

#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used)]

use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

use sterling::dense::{Given, Made, RowProgram, Scratch, Size};
use sterling::device::cpu::Kernels;
use sterling::device::cpu::dense::{PANEL, Part, Product, Weights, pack};
use sterling::tower::{Graph, Input, Threads};

const COLUMNS: [&str; 5] = ["log_popularity", "log_build", "log_depends", "log_recommends", "log_suggests"];
const FEATURES: [(&str, usize); 4] = [("installed", 64), ("installed_text", 32), ("section", 16), ("maintainer", 16)];
const ROUNDS: usize = 9;
const ROUND: Duration = Duration::from_millis(60);
/// Multiply-adds a candidate and a user, as the graphs are written down.
const RERANKER: usize = 46_176;
const TOWER: usize = 128 * 256 + 256 * 64;

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|n| (((n * 37 + 11) % 101) as f32 / 50.0 - 1.0) / 8.0).collect()
}

/// Microseconds of one call, over a round.
fn time(call: &mut dyn FnMut()) -> f64 {
    let (start, mut calls) = (Instant::now(), 0u32);
    while start.elapsed() < ROUND {
        call();
        calls += 1;
    }
    start.elapsed().as_secs_f64() * 1e6 / f64::from(calls)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// The medians of two that take turns.
fn turns(a: &mut dyn FnMut(), b: &mut dyn FnMut()) -> (f64, f64) {
    let rounds: Vec<(f64, f64)> = (0..ROUNDS).map(|_| (time(a), time(b))).collect();
    (median(rounds.iter().map(|r| r.0).collect()), median(rounds.iter().map(|r| r.1).collect()))
}

/// GFLOP/s of products whose numbers all stay in the first-level cache.
fn peak() -> f64 {
    let (rows, depth) = (14, 64);
    let (left, packed) = (numbers(rows * depth), pack(&numbers(depth * PANEL), depth, PANEL));
    let weights = Weights { numbers: packed.numbers(), row_stride: PANEL, panel_stride: depth * PANEL };
    let parts = [Part { rows: &left, stride: depth, depth, weights }];
    let product = Product { rows, columns: PANEL, parts: &parts, bias: &[], relu: false };
    let mut out = vec![0.0; rows * PANEL];
    let rounds = (0..ROUNDS).map(|_| time(&mut || Kernels::best().product(black_box(&product), &mut out, PANEL)));
    (2 * rows * depth * PANEL) as f64 / median(rounds.collect()) / 1e3
}

fn row(name: &str, rten: f64, ours: f64, work: usize, peak: f64) {
    let speed = 2.0 * work as f64 / ours / 1e3;
    println!("| {name} | {rten:.1} | {ours:.1} | {:.2} | {speed:.0} | {:.0} % |", rten / ours, 100.0 * speed / peak);
}

fn main() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/debian");
    let read = |file: &str| std::fs::read(folder.join(file)).unwrap();
    let threads = Threads::new(1);
    let mut scratch = Scratch::default();
    let peak = peak();
    println!("kernels {}, peak {peak:.0} GFLOP/s\n", Kernels::best().name());
    println!(
        "| | rten µs | program µs | ratio | GFLOP/s of the graph as written | of the peak |\n|---|---|---|---|---|---|"
    );

    let (one, fixed) = (Size::Fixed(1), |n: usize| Size::Fixed(n as i64));
    let given = |name: &str, is_pair, shape: &[Size]| Given { name: name.into(), is_pair, shape: shape.to_vec() };
    let mut inputs = vec![given("query", false, &[one, fixed(64)]), given("item", true, &[one, Size::Rows, fixed(64)])];
    inputs.extend(COLUMNS.map(|name| given(name, true, &[one, Size::Rows])));
    let program = RowProgram::lower(
        &read("overarch.onnx"),
        &inputs,
        &[Made { name: "logits".into(), shape: vec![one, Size::Rows, fixed(5)] }],
    )
    .unwrap();
    let graph = Graph::load("overarch", read("overarch.onnx")).unwrap();
    for count in [100, 1_000, 10_000] {
        let (query, items, column) = (numbers(64), numbers(count * 64), numbers(count));
        let (of_query, of_item, of_column) = ([1, 64], [1, count, 64], [1, count]);
        let mut named = vec![
            Input { name: "query", shape: &of_query, values: &query },
            Input { name: "item", shape: &of_item, values: &items },
        ];
        named.extend(COLUMNS.map(|name| Input { name, shape: &of_column, values: &column }));
        let mut by_rten = || drop(black_box(graph.run(&named, "logits", &threads).unwrap()));
        let mut ours = || {
            let mut fill = |n: usize, given: &mut [f32]| {
                given[..64].copy_from_slice(&items[n * 64..][..64]);
                given[64..].fill(column[n]);
            };
            let mut done = |_: usize, _: usize, block: sterling::dense::Block<'_>| {
                black_box(block.output(0).row(0));
                Ok(())
            };
            program.run(count, &[&query], &mut scratch, &mut fill, &mut done).unwrap();
        };
        let (rten, ours) = threads.run(|| turns(&mut by_rten, &mut ours));
        row(&format!("reranker, K0 = {count}"), rten, ours, RERANKER * count, peak);
    }

    let inputs = FEATURES.map(|(name, width)| given(name, true, &[Size::Rows, fixed(width)]));
    let program = RowProgram::lower(
        &read("user.onnx"),
        &inputs,
        &[Made { name: "query".into(), shape: vec![Size::Rows, fixed(64)] }],
    )
    .unwrap();
    let graph = Graph::load("user", read("user.onnx")).unwrap();
    for users in [1, 8, 32] {
        let values = FEATURES.map(|(_, width)| numbers(users * width));
        let shapes = FEATURES.map(|(_, width)| [users, width]);
        let named: Vec<Input<'_>> = FEATURES
            .iter()
            .zip(&values)
            .zip(&shapes)
            .map(|(((name, _), values), shape)| Input { name, shape, values })
            .collect();
        let mut by_rten = || drop(black_box(graph.run(&named, "query", &threads).unwrap()));
        let mut ours = || {
            let mut fill = |n: usize, given: &mut [f32]| {
                let mut first = 0;
                for ((_, width), values) in FEATURES.iter().zip(&values) {
                    given[first..first + width].copy_from_slice(&values[n * width..][..*width]);
                    first += width;
                }
            };
            let mut done = |_: usize, _: usize, block: sterling::dense::Block<'_>| {
                black_box(block.output(0).row(0));
                Ok(())
            };
            program.run(users, &[], &mut scratch, &mut fill, &mut done).unwrap();
        };
        let (rten, ours) = threads.run(|| turns(&mut by_rten, &mut ours));
        row(&format!("user tower, Q = {users}"), rten, ours, TOWER * users, peak);
    }
}
