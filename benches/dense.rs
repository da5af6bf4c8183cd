//! Graphs as compiled programs in f32 and bf16 and in rten, on one thread, interleaved: a reranker without a history (the Debian
//! model's earlier one), the Debian model's user tower, and rerankers of other kinds (`benches/graphs`, written by
//! `python/make_bench_graphs.py`). `kept` is a program in f32 with item-side precomputation.
//!
//! `cargo bench --bench dense` prints a table. `python python/bench_dense.py` interleaves it with ONNX Runtime and prints the
//! table of docs/benchmarks/pass.md: with `--turns`, each line of input names a case, and the output is the microseconds of a
//! round. `STERLING_KERNEL` selects the instruction set.
//!
//! The lower bound is the number of multiply-adds. A candidate takes 46,176 as the graph is written and 21,600 after linear
//! chains are fused, a request 672,000 for the matrices of its user; a core of Zen 4 does 16 per cycle in f32 and 32 in bf16.

#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used)]

use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

use sterling::graph::dense::{
    DeclaredInput, DeclaredOutput, InputRows, Precision, ReadGraph, RowProgram, Scratch, Size,
};
use sterling::graph::tower::{Graph, Input, Threads};
use sterling::kernels::cpu::Kernels;
use sterling::kernels::cpu::dense::{Form, PANEL, Part, Product, Weights, pack, pack_pairs};

const RERANKER: &str = "tests/golden/reranker.onnx";
const TOWER: &str = "models/debian/user.onnx";
const COLUMNS: [&str; 5] = ["log_popularity", "log_build", "log_depends", "log_recommends", "log_suggests"];
const FEATURES: [(&str, usize); 4] = [("installed", 64), ("installed_text", 32), ("section", 16), ("maintainer", 16)];
const ROUNDS: usize = 9;
const ROUND: Duration = Duration::from_millis(40);
/// Bytes read before each call of a cold case: more than the L2 cache holds.
const OTHER_BYTES: usize = 8 << 20;
/// Ways to run a graph.
const WAYS: [&str; 3] = ["rten", "f32", "bf16"];

/// A reranker of another kind: its file, the number of candidates, its inputs (whether each candidate has its own, and the
/// dimensions after those of users and candidates), and the numbers of its output.
struct Kind {
    name: &'static str,
    count: usize,
    inputs: &'static [(&'static str, bool, &'static [usize])],
    made: usize,
}

const KINDS: [Kind; 3] = [
    Kind {
        name: "mol",
        count: 10_000,
        inputs: &[
            ("query", false, &[64]),
            ("user_parts", false, &[8, 32]),
            ("item", true, &[64]),
            ("parts", true, &[256]),
        ],
        made: 1,
    },
    Kind {
        name: "target",
        count: 1_000,
        inputs: &[("item", true, &[64]), ("history", false, &[200, 64]), ("mask", false, &[200])],
        made: 64,
    },
    Kind {
        name: "din",
        count: 1_000,
        inputs: &[
            ("query", false, &[64]),
            ("item", true, &[64]),
            ("history", false, &[200, 64]),
            ("mask", false, &[200]),
        ],
        made: 2,
    },
];

impl Kind {
    fn bytes(&self) -> Vec<u8> {
        read(&format!("benches/graphs/{}.onnx", self.name))
    }

    fn shape(&self, n: usize) -> Vec<usize> {
        let (_, is_pair, shape) = self.inputs[n];
        let ahead = [1, self.count];
        [&ahead[..1 + usize::from(is_pair)], shape].concat()
    }

    fn network(&self) -> ReadGraph {
        let given = self.inputs.iter().map(|(name, is_pair, shape)| {
            let ahead = if *is_pair { &[Size::Fixed(1), Size::Rows][..] } else { &[Size::Fixed(1)] };
            let shape: Vec<Size> = ahead.iter().copied().chain(shape.iter().map(|&n| fixed(n))).collect();
            given(name, *is_pair, &shape)
        });
        let out = [DeclaredOutput { name: "out".into(), shape: vec![Size::Fixed(1), Size::Rows, fixed(self.made)] }];
        ReadGraph::read(&self.bytes(), &given.collect::<Vec<_>>(), &out).unwrap()
    }

    fn call(&self, way: &str) -> Option<Call> {
        let count = |n: &usize| self.inputs[*n].2.iter().product::<usize>();
        let all: Vec<usize> = (0..self.inputs.len()).collect();
        let user = || all.iter().filter(|n| !self.inputs[**n].1).map(|n| vec![0.1; count(n)]).collect();
        let rows = |inputs: &[usize]| inputs.iter().filter(|n| self.inputs[**n].1).map(count).sum::<usize>();
        if way == "rten" {
            let (graph, threads) = (Graph::load(self.name, self.bytes()).unwrap(), Threads::new(1));
            let shapes: Vec<Vec<usize>> = all.iter().map(|&n| self.shape(n)).collect();
            let values: Vec<Vec<f32>> = shapes.iter().map(|shape| numbers(shape.iter().product())).collect();
            let inputs = self.inputs;
            return Some(Box::new(move || {
                let input = |n: usize| Input { name: inputs[n].0, shape: &shapes[n], values: &values[n] };
                drop(black_box(
                    graph.run(&all.iter().map(|&n| input(n)).collect::<Vec<_>>(), "out", &threads).unwrap(),
                ));
            }));
        }
        let network = self.network();
        let (lowered, width) = match way {
            "kept" => {
                let is_item: Vec<bool> = self.inputs.iter().map(|(_, is_pair, _)| *is_pair).collect();
                let work = |(name, is_pair, shape): &(&str, bool, &[usize])| match (*is_pair, *name) {
                    (false, _) => 0,
                    (true, "item") => 4 * shape[0],
                    (true, _) => ReadGraph::work_of_row(shape[0]),
                };
                let work: Vec<usize> = self.inputs.iter().map(work).collect();
                let cut = network.best_cut(&is_item, &work).unwrap()?;
                let halves = network.halves(&is_item, &cut, Precision::F32).unwrap();
                let width = halves.width + rows(&halves.candidate_inputs);
                (halves.candidates, width)
            }
            way => (network.program(precision(way)).unwrap(), rows(&all)),
        };
        Some(program(lowered, numbers(self.count * width), width, user()))
    }
}

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|n| (((n * 37 + 11) % 101) as f32 / 50.0 - 1.0) / 8.0).collect()
}

/// Returns the microseconds per call, over a round.
fn time(call: &mut dyn FnMut()) -> f64 {
    let (start, mut calls) = (Instant::now(), 0u32);
    while start.elapsed() < ROUND {
        call();
        calls += 1;
    }
    start.elapsed().as_secs_f64() * 1e6 / f64::from(calls)
}

/// Returns the median microseconds of a call after [`OTHER_BYTES`] of other memory were read, which evicts its data from the
/// caches.
fn time_cold(call: &mut dyn FnMut()) -> f64 {
    let other = vec![1u8; OTHER_BYTES];
    let (start, mut times) = (Instant::now(), Vec::new());
    while start.elapsed() < ROUND {
        black_box(other.iter().step_by(64).fold(0u8, |sum, x| sum.wrapping_add(*x)));
        let start = Instant::now();
        call();
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    median(times)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Returns the GFLOP/s of products whose data stays in the L1 cache.
fn peak(factors: Form) -> f64 {
    let (rows, depth) = (if factors == Form::Pairs { 32 } else { 28 }, 128);
    let left = numbers(rows * depth);
    let packed = match factors {
        Form::Single => pack(&numbers(depth * PANEL), depth, PANEL),
        Form::Pairs => pack_pairs(&numbers(2 * depth * PANEL), 2 * depth, PANEL),
    };
    let weights = Weights { numbers: packed.numbers(), row_stride: PANEL, panel_stride: depth * PANEL };
    let parts = [Part { rows: &left, stride: depth, depth, weights }];
    let product = Product { rows, columns: PANEL, parts: &parts, factors, ..Product::default() };
    let mut out = vec![0.0; rows * PANEL];
    let rounds = (0..ROUNDS).map(|_| time(&mut || Kernels::best().product(black_box(&product), &mut out, PANEL)));
    let work = 2 * rows * depth * PANEL * if factors == Form::Pairs { 2 } else { 1 };
    work as f64 / median(rounds.collect()) / 1e3
}

type Call = Box<dyn FnMut() + Send>;

fn given(name: &str, is_pair: bool, shape: &[Size]) -> DeclaredInput {
    DeclaredInput { name: name.into(), is_pair, shape: shape.to_vec() }
}

fn fixed(n: usize) -> Size {
    Size::Fixed(n as i64)
}

fn read(file: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap()
}

/// Runs a program over rows of `width` numbers each, read from `rows`.
fn program(program: RowProgram, rows: Vec<f32>, width: usize, user: Vec<Vec<f32>>) -> Call {
    let mut scratch = Scratch::default();
    Box::new(move || {
        let user: Vec<&[f32]> = user.iter().map(Vec::as_slice).collect();
        let mut fill = |given: InputRows<'_>| given.each(|n, row| row.copy_from_slice(&rows[n * width..][..width]));
        let mut done = |_: usize, _: usize, block: sterling::graph::dense::Block<'_>| {
            black_box(block.output(0).row(0));
            Ok(())
        };
        program.run(rows.len() / width, &user, &mut scratch, &mut fill, &mut done).unwrap();
    })
}

fn lowered_reranker(way: &str) -> RowProgram {
    let one = Size::Fixed(1);
    let mut inputs = vec![given("query", false, &[one, fixed(64)]), given("item", true, &[one, Size::Rows, fixed(64)])];
    inputs.extend(COLUMNS.map(|name| given(name, true, &[one, Size::Rows])));
    let logits = [DeclaredOutput { name: "logits".into(), shape: vec![one, Size::Rows, fixed(5)] }];
    RowProgram::lower_in(precision(way), &read(RERANKER), &inputs, &logits).unwrap()
}

fn reranker(way: &str, count: usize) -> Call {
    let query = numbers(64);
    if way == "rten" {
        let (graph, threads) = (Graph::load("overarch", read(RERANKER)).unwrap(), Threads::new(1));
        let (items, column) = (numbers(count * 64), numbers(count));
        return Box::new(move || {
            let (of_query, of_item, of_column) = ([1, 64], [1, count, 64], [1, count]);
            let mut named = vec![
                Input { name: "query", shape: &of_query, values: &query },
                Input { name: "item", shape: &of_item, values: &items },
            ];
            named.extend(COLUMNS.map(|name| Input { name, shape: &of_column, values: &column }));
            drop(black_box(graph.run(&named, "logits", &threads).unwrap()));
        });
    }
    program(lowered_reranker(way), numbers(count * 69), 69, vec![query])
}

fn tower(way: &str, users: usize) -> Call {
    if way == "rten" {
        let (graph, threads) = (Graph::load("user", read(TOWER)).unwrap(), Threads::new(1));
        let values = FEATURES.map(|(_, width)| numbers(users * width));
        return Box::new(move || {
            let shapes = FEATURES.map(|(_, width)| [users, width]);
            let input = |n: usize| Input { name: FEATURES[n].0, shape: &shapes[n], values: &values[n] };
            let named: Vec<Input<'_>> = (0..FEATURES.len()).map(input).collect();
            drop(black_box(graph.run(&named, "query", &threads).unwrap()));
        });
    }
    let inputs = FEATURES.map(|(name, width)| given(name, true, &[Size::Rows, fixed(width)]));
    let query = [DeclaredOutput { name: "query".into(), shape: vec![Size::Rows, fixed(64)] }];
    let lowered = RowProgram::lower_in(precision(way), &read(TOWER), &inputs, &query).unwrap();
    program(lowered, numbers(users * 128), 128, Vec::new())
}

fn precision(way: &str) -> Precision {
    if way == "bf16" { Precision::Bf16 } else { Precision::F32 }
}

struct Case {
    name: String,
    call: Call,
    time: fn(&mut dyn FnMut()) -> f64,
}

impl Case {
    fn time(&mut self) -> f64 {
        (self.time)(&mut self.call)
    }
}

fn cases() -> Vec<Case> {
    let hot = |(name, call)| Case { name, call, time };
    let mut all = Vec::new();
    for way in WAYS {
        all.extend([100, 1_000, 10_000].map(|count| hot((format!("reranker {count} {way}"), reranker(way, count)))));
        all.extend([1, 8, 32].map(|users| hot((format!("tower {users} {way}"), tower(way, users)))));
        all.push(Case { name: format!("tower cold {way}"), call: tower(way, 1), time: time_cold });
    }
    for kind in &KINDS {
        let ways = WAYS.iter().chain(&["kept"]);
        let cases = ways.filter_map(|way| Some((format!("{} {} {way}", kind.name, kind.count), kind.call(way)?)));
        all.extend(cases.map(hot));
    }
    all
}

fn main() {
    let (mut cases, threads) = (cases(), Threads::new(1));
    if std::env::args().any(|argument| argument == "--turns") {
        println!("{} {:.0} {:.0}", Kernels::best().name(), peak(Form::Single), peak(Form::Pairs));
        for line in std::io::stdin().lines().map_while(Result::ok) {
            let found = cases.iter_mut().find(|case| case.name == line);
            println!("{:.3}", found.unwrap_or_else(|| panic!("no case `{line}`")).time());
        }
        return;
    }
    let (single, pairs) = (peak(Form::Single), peak(Form::Pairs));
    println!("kernels {}, peak {single:.0} GFLOP/s in f32, {pairs:.0} in bf16\n", Kernels::best().name());
    println!("| case | median µs |\n|---|---|");
    let mut times = vec![Vec::new(); cases.len()];
    for _ in 0..ROUNDS {
        for (case, times) in cases.iter_mut().zip(&mut times) {
            times.push(threads.run(|| case.time()));
        }
    }
    for (Case { name, .. }, times) in cases.iter().zip(times) {
        println!("| {name} | {:.1} |", median(times));
    }
}
