//! Times the dense part of a training step of a two-tower model on one thread: forward pass of both towers, in-batch
//! softmax, backward pass of both towers, Adam. Also times each of these alone, and outer products compared with the
//! products of the forward pass.
//!
//! `cargo bench -p sterling-graph --bench train_dense` prints a table. `python python/bench_train_dense.py` alternates
//! this benchmark with PyTorch and prints the table of docs/internals/learning.md. With `--turns`, each input line
//! names a case, and the output is the mean microseconds of the case in one round. `STERLING_KERNEL` selects the
//! instruction set.
//!
//! Multiply-adds bound the speed. A step of 512 rows needs 4 times 33.6 million (the backward pass recomputes the
//! forward pass) and 50.3 million for the softmax; a Zen 4 core does 16 per cycle.

#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used)]

use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

use sterling_graph::dense::train::{
    Batch, DenseOptimizer, Gradients, OptimizerKind, OptimizerSpec, TrainableGraph, Workspace,
};
use sterling_graph::dense::{DeclaredInput, DeclaredOutput, InputRows, Size};
use sterling_kernels::cpu::Kernels;
use sterling_kernels::cpu::dense::{
    Fold, Lines, MapTarget, Operand, Outer, PANEL, Part, Product, Unary, Weights, pack,
};
use sterling_kernels::threads::Threads;

const TOWER: &str = "../../benches/graphs/tower.onnx";
const WIDTH: usize = 64;
const HIDDEN: usize = 256;
const ROWS: usize = 512;
const TEMPERATURE: f32 = 0.1;
/// Rows whose logits are computed together.
const BLOCK: usize = 64;
const ROUNDS: usize = 9;
const ROUND: Duration = Duration::from_millis(40);

fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|n| ((n * 37 + seed * 101 + 11) % 127) as f32 / 64.0 - 1.0).collect()
}

/// Mean microseconds per call in a round.
fn time(call: &mut dyn FnMut()) -> f64 {
    let start = Instant::now();
    let mut calls = 0;
    while start.elapsed() < ROUND {
        call();
        calls += 1;
    }
    start.elapsed().as_secs_f64() / f64::from(calls) * 1e6
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// A tower in training.
struct Tower {
    graph: TrainableGraph,
    parameters: Vec<f32>,
    optimizer: DenseOptimizer,
    features: Vec<f32>,
    workspace: Workspace,
    outputs: Vec<Vec<f32>>,
    gradients: Gradients,
    /// Gradients of the loss with respect to the outputs.
    slopes: Vec<f32>,
}

impl Tower {
    fn new(seed: usize) -> Tower {
        let onnx = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(TOWER)).unwrap();
        let shape = vec![Size::Rows, Size::Fixed(WIDTH as i64)];
        let given = DeclaredInput { name: "features".into(), is_pair: true, shape: shape.clone() };
        let graph =
            TrainableGraph::read(&onnx, &[given], &[DeclaredOutput { name: "out".into(), shape }], &["val_3", "val_8"])
                .unwrap();
        let parameters = graph.initial().to_vec();
        Tower {
            optimizer: DenseOptimizer::new(OptimizerSpec::new(OptimizerKind::Adam, 1e-3), parameters.len()).unwrap(),
            parameters,
            graph,
            features: numbers(ROWS * WIDTH, seed),
            workspace: Workspace::new(&Threads::default()),
            outputs: Vec::new(),
            gradients: Gradients::default(),
            slopes: vec![0.0; ROWS * WIDTH],
        }
    }

    fn forward(&mut self) {
        let fill = rows_of(&self.features);
        let batch = Batch { rows: ROWS, shared: &[], fill: &fill };
        self.graph.forward(&self.parameters, &batch, &mut self.workspace, &mut self.outputs).unwrap();
    }

    fn backward(&mut self) {
        let fill = rows_of(&self.features);
        let batch = Batch { rows: ROWS, shared: &[], fill: &fill };
        let Tower { graph, parameters, slopes, workspace, gradients, .. } = self;
        graph.backward(parameters, &batch, &[slopes], workspace, gradients).unwrap();
    }

    fn step(&mut self) {
        self.optimizer.step(&mut self.parameters, &self.gradients.parameters).unwrap();
    }
}

fn rows_of(features: &[f32]) -> impl Fn(InputRows<'_>) + Sync {
    |given: InputRows<'_>| given.each(|n, row| row.copy_from_slice(&features[n * WIDTH..(n + 1) * WIDTH]))
}

/// Computes the mean cross-entropy of each query's own item among all items (in-batch softmax), and the gradients of
/// queries and items.
fn softmax(queries: &[f32], items: &[f32], of_queries: &mut [f32], of_items: &mut [f32]) -> f64 {
    let kernels = Kernels::best();
    let mut turned = vec![0.0; WIDTH * ROWS];
    for (n, item) in items.chunks_exact(WIDTH).enumerate() {
        item.iter().enumerate().for_each(|(d, x)| turned[d * ROWS + n] = x / TEMPERATURE);
    }
    let (turned, complete) = (pack(&turned, WIDTH, ROWS), Lines::of(items));
    let of_items_first = Weights { numbers: turned.numbers(), row_stride: PANEL, panel_stride: WIDTH * PANEL };
    let of_rows = Weights { numbers: complete.numbers(), row_stride: WIDTH, panel_stride: PANEL };
    let (mut logits, mut shares) = (vec![0.0; BLOCK * ROWS], vec![0.0; BLOCK * ROWS]);
    let mut folded = vec![0.0; BLOCK];
    let mut loss = 0.0;
    of_items.fill(0.0);
    let share = 1.0 / (TEMPERATURE * ROWS as f32);
    for first in (0..ROWS).step_by(BLOCK) {
        let queries = &queries[first * WIDTH..(first + BLOCK) * WIDTH];
        let parts = [Part { rows: queries, stride: WIDTH, depth: WIDTH, weights: of_items_first }];
        kernels.product(
            &Product { rows: BLOCK, columns: ROWS, parts: &parts, ..Product::default() },
            &mut logits,
            ROWS,
        );
        fold(kernels, Fold::Max, &logits, &mut folded);
        for (n, row) in logits.chunks_exact_mut(ROWS).enumerate() {
            loss += f64::from(folded[n] - row[first + n]);
            row.iter_mut().for_each(|x| *x -= folded[n]);
        }
        let input = Operand { numbers: &logits, row: ROWS, outer: 0, inner: 1 };
        let mut target = MapTarget { numbers: &mut shares, stride: ROWS, rows: BLOCK, outer: 1, inner: ROWS };
        kernels.map1(Unary::Exp, &input, &mut target);
        fold(kernels, Fold::Sum, &shares, &mut folded);
        for (n, row) in shares.chunks_exact_mut(ROWS).enumerate() {
            loss += f64::from(folded[n].ln());
            let scale = share / folded[n];
            row.iter_mut().for_each(|x| *x *= scale);
            row[first + n] -= share;
        }
        let parts = [Part { rows: &shares, stride: ROWS, depth: ROWS, weights: of_rows }];
        let out = &mut of_queries[first * WIDTH..(first + BLOCK) * WIDTH];
        kernels.product(&Product { rows: BLOCK, columns: WIDTH, parts: &parts, ..Product::default() }, out, WIDTH);
        let outer = Outer {
            rows: BLOCK,
            left: &shares,
            left_stride: ROWS,
            depth: ROWS,
            right: queries,
            right_stride: WIDTH,
            columns: WIDTH,
        };
        kernels.outer(&outer, of_items);
    }
    loss / ROWS as f64
}

fn fold(kernels: Kernels, f: Fold, rows: &[f32], out: &mut [f32]) {
    let input = Operand { numbers: rows, row: ROWS, outer: 0, inner: 1 };
    let mut target = MapTarget { numbers: out, stride: 1, rows: BLOCK, outer: 1, inner: 1 };
    kernels.fold(f, &input, ROWS, &mut target);
}

/// Runs a training step of both towers; returns the loss.
fn step(user: &mut Tower, item: &mut Tower) -> f64 {
    user.forward();
    item.forward();
    let loss = softmax(&user.outputs[0], &item.outputs[0], &mut user.slopes, &mut item.slopes);
    for tower in [user, item] {
        tower.backward();
        tower.step();
    }
    loss
}

/// Returns the floating-point operations of a layer over a micro-batch, and a call that computes either the outer
/// products of the backward pass (`is_outer`) or the row products of the forward pass.
fn layer(is_outer: bool) -> (f64, Box<dyn FnMut()>) {
    let (left, right, matrix) =
        (numbers(BLOCK * HIDDEN, 1), numbers(BLOCK * WIDTH, 2), pack(&numbers(HIDDEN * WIDTH, 3), HIDDEN, WIDTH));
    let mut out = vec![0.0; HIDDEN * WIDTH];
    let call: Box<dyn FnMut()> = Box::new(move || {
        if is_outer {
            let outer = Outer {
                rows: BLOCK,
                left: &left,
                left_stride: HIDDEN,
                depth: HIDDEN,
                right: &right,
                right_stride: WIDTH,
                columns: WIDTH,
            };
            Kernels::best().outer(black_box(&outer), &mut out);
            return;
        }
        let weights = Weights { numbers: matrix.numbers(), row_stride: PANEL, panel_stride: HIDDEN * PANEL };
        let parts = [Part { rows: &left, stride: HIDDEN, depth: HIDDEN, weights }];
        let product = Product { rows: BLOCK, columns: WIDTH, parts: &parts, ..Product::default() };
        Kernels::best().product(black_box(&product), &mut out, WIDTH);
    });
    (2.0 * (BLOCK * HIDDEN * WIDTH) as f64, call)
}

fn main() {
    let (mut user, mut item) = (Tower::new(1), Tower::new(2));
    let losses: Vec<f64> = (0..30).map(|_| step(&mut user, &mut item)).collect();
    assert!(losses[29] < losses[0], "{losses:?}");
    let (flops, mut outer) = layer(true);
    let (_, mut product) = layer(false);
    let mut run = |case: &str| match case {
        "step" => time(&mut || {
            black_box(step(&mut user, &mut item));
        }),
        "forward" => time(&mut || user.forward()),
        "backward" => time(&mut || user.backward()),
        "softmax" => time(&mut || {
            black_box(softmax(&user.outputs[0], &item.outputs[0], &mut user.slopes, &mut item.slopes));
        }),
        "adam" => time(&mut || user.step()),
        "outer" => time(&mut *outer),
        "product" => time(&mut *product),
        other => panic!("no case `{other}`"),
    };
    if std::env::args().any(|argument| argument == "--turns") {
        println!("{} {flops}", Kernels::best().name());
        for line in std::io::stdin().lines().map_while(Result::ok) {
            println!("{:.3}", run(&line));
        }
        return;
    }
    println!("kernels {}\n\n| case | median µs | GFLOP/s |\n|---|---|---|", Kernels::best().name());
    for case in ["step", "forward", "backward", "softmax", "adam", "outer", "product"] {
        let micros = median((0..ROUNDS).map(|_| run(case)).collect());
        let speed =
            if matches!(case, "outer" | "product") { format!("{:.1}", flops / micros / 1e3) } else { String::new() };
        println!("| {case} | {micros:.1} | {speed} |");
    }
}
