//! Times compiled graphs on one thread: `cargo bench -p sterling-graph --bench towers`, driven by `python/bench_models.py`.
//!
//! Each input line is `FILE ROWS INPUT=SHAPE... OUTPUT=SHAPE`, with sizes separated by dots and `R` for the rows, such as
//! `gru.onnx 32 history=R.50.64 query=R.64`. The answer is the microseconds of a run over the rows, the mean of a round.
//! `STERLING_KERNEL` selects the instruction set.

#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used)]

use std::collections::HashMap;
use std::hint::black_box;
use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

use sterling_graph::dense::{DeclaredInput, DeclaredOutput, InputRows, RowProgram, Scratch, Size};

const ROUND: Duration = Duration::from_millis(60);

fn number(n: usize) -> f32 {
    ((n * 37 + 11) % 127) as f32 / 256.0 - 0.25
}

fn shape(text: &str) -> Vec<Size> {
    text.split('.').map(|size| if size == "R" { Size::Rows } else { Size::Fixed(size.parse().unwrap()) }).collect()
}

struct Case {
    program: RowProgram,
    user: Vec<Vec<f32>>,
    scratch: Scratch,
}

impl Case {
    fn read(file: &str, shapes: &[&str]) -> Case {
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
        let program = RowProgram::lower(&std::fs::read(file).unwrap(), &given, &[made]).unwrap();
        let count =
            |shape: &[Size]| shape.iter().map(|d| if let Size::Fixed(n) = d { *n as usize } else { 1 }).product();
        let of_user = |given: &DeclaredInput| (0..count(&given.shape)).map(number).collect();
        let user = given.iter().filter(|given| !given.is_pair).map(of_user).collect();
        Case { program, user, scratch: Scratch::default() }
    }

    fn run(&mut self, rows: usize) {
        let user: Vec<&[f32]> = self.user.iter().map(Vec::as_slice).collect();
        let fill = &mut |rows: InputRows<'_>| {
            rows.each(|n, row| row.iter_mut().enumerate().for_each(|(at, x)| *x = number(n + at)));
        };
        let done = &mut |_, _, block: sterling_graph::dense::Block<'_>| {
            black_box(block.output(0).row(0)[0]);
            Ok(())
        };
        self.program.run(rows, &user, &mut self.scratch, fill, done).unwrap();
    }

    fn microseconds(&mut self, rows: usize) -> f64 {
        let (start, mut calls) = (Instant::now(), 0);
        while start.elapsed() < ROUND {
            self.run(rows);
            calls += 1;
        }
        start.elapsed().as_secs_f64() * 1e6 / f64::from(calls)
    }
}

fn main() {
    let mut cases = HashMap::new();
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [file, rows, shapes @ ..] = &words[..] else { continue };
        let case = cases.entry(line.clone()).or_insert_with(|| Case::read(file, shapes));
        println!("{:.3}", case.microseconds(rows.parse().unwrap()));
        std::io::stdout().flush().unwrap();
    }
}
