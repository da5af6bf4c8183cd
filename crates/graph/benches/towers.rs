//! Times compiled graphs on one thread: `cargo bench -p sterling-graph --bench towers`, driven by `python/bench_models.py`.
//!
//! Each input line is `FILE ROWS [PRECISION] INPUT=SHAPE... OUTPUT=SHAPE`, with sizes separated by dots and `R` for the
//! number of rows, such as `gru.onnx 32 history=R.50.64 query=R.64`; the precision is `f32`, `bf16` or `int8`. The output
//! line is the time of a run over the rows in microseconds: the mean over a round of runs, then the minimum. A graph with
//! user inputs is a reranker: values that depend on the item alone are computed beforehand if that reduces the cost.
//! `STERLING_KERNEL` selects the instruction set.

#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used)]

use std::collections::HashMap;
use std::hint::black_box;
use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

use sterling_graph::dense::{
    DeclaredInput, DeclaredOutput, InputRows, Precision, ReadGraph, RowProgram, Scratch, Size,
};

const ROUND: Duration = Duration::from_millis(60);
/// Period of [`number`].
const PERIOD: usize = 127;
/// Maximum numbers stored per item.
const PART_MAX: usize = 1024;

fn number(n: usize) -> f32 {
    ((n * 37 + 11) % PERIOD) as f32 / 256.0 - 0.25
}

fn shape(text: &str) -> Vec<Size> {
    text.split('.').map(|size| if size == "R" { Size::Rows } else { Size::Fixed(size.parse().unwrap()) }).collect()
}

struct Case {
    program: RowProgram,
    user: Vec<Vec<f32>>,
    /// Numbers of a row; row `n` starts at `n % PERIOD`.
    row: Vec<f32>,
    scratch: Scratch,
}

impl Case {
    fn read(file: &str, precision: Precision, shapes: &[&str]) -> Case {
        let named: Vec<(&str, Vec<Size>)> =
            shapes.iter().map(|named| named.split_once('=').unwrap()).map(|(name, text)| (name, shape(text))).collect();
        let ((output, of_output), inputs) = named.split_last().unwrap();
        let given = |(name, shape): &(&str, Vec<Size>)| DeclaredInput {
            name: (*name).into(),
            is_pair: shape.contains(&Size::Rows),
            shape: shape.clone(),
        };
        let given: Vec<DeclaredInput> = inputs.iter().map(given).collect();
        let made = DeclaredOutput { name: (*output).into(), shape: of_output.clone() };
        let graph = ReadGraph::read(&std::fs::read(file).unwrap(), &given, &[made]).unwrap();
        let count = |shape: &[Size]| -> usize {
            shape.iter().map(|d| if let Size::Fixed(n) = d { *n as usize } else { 1 }).product()
        };
        let is_reranker = given.iter().any(|given| !given.is_pair);
        let is_item: Vec<bool> = given.iter().map(|given| is_reranker && given.is_pair).collect();
        let work = |given: &DeclaredInput| {
            if given.is_pair { ReadGraph::work_of_row(count(&given.shape)) } else { 0 }
        };
        let work: Vec<usize> = given.iter().map(work).collect();
        let cut = if is_reranker { graph.best_cut(&is_item, &work).unwrap() } else { None };
        let program = match cut {
            Some(cut) => graph.halves(&is_item, &cut, precision).unwrap().candidates,
            None => graph.program(precision).unwrap(),
        };
        let of_user = |given: &DeclaredInput| (0..count(&given.shape)).map(number).collect();
        let user = given.iter().filter(|given| !given.is_pair).map(of_user).collect();
        let width: usize = given.iter().filter(|given| given.is_pair).map(|given| count(&given.shape)).sum();
        let row = (0..PERIOD + PART_MAX + width).map(number).collect();
        Case { program, user, row, scratch: Scratch::default() }
    }

    fn run(&mut self, rows: usize) {
        let user: Vec<&[f32]> = self.user.iter().map(Vec::as_slice).collect();
        let fill = &mut |rows: InputRows<'_>| {
            rows.each(|n, to| to.copy_from_slice(&self.row[n % PERIOD..][..to.len()]));
        };
        let done = &mut |_, _, block: sterling_graph::dense::Block<'_>| {
            black_box(block.output(0).row(0)[0]);
            Ok(())
        };
        self.program.run(rows, &user, &mut self.scratch, fill, done).unwrap();
    }

    fn microseconds(&mut self, rows: usize) -> [f64; 2] {
        let (start, mut calls, mut least) = (Instant::now(), 0, f64::INFINITY);
        while start.elapsed() < ROUND || calls < 3 {
            let before = Instant::now();
            self.run(rows);
            least = least.min(before.elapsed().as_secs_f64() * 1e6);
            calls += 1;
        }
        [start.elapsed().as_secs_f64() * 1e6 / f64::from(calls), least]
    }
}

fn main() {
    let mut cases = HashMap::new();
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [file, rows, shapes @ ..] = &words[..] else { continue };
        let (precision, shapes) = match shapes {
            ["bf16", shapes @ ..] => (Precision::Bf16, shapes),
            ["int8", shapes @ ..] => (Precision::Int8, shapes),
            ["f32", shapes @ ..] | shapes => (Precision::F32, shapes),
        };
        let case = cases.entry(line.clone()).or_insert_with(|| Case::read(file, precision, shapes));
        let [mean, least] = case.microseconds(rows.parse().unwrap());
        println!("{mean:.3} {least:.3}");
        std::io::stdout().flush().unwrap();
    }
}
