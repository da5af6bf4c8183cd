//! Graphs that add a large constant and subtract it again: the compiler must not multiply the constant first, because
//! the products do not cancel exactly.

use super::Graph;
use super::maker::Value;
use super::onnx_file::{Builder, int, node, port};

/// Widths of the input, most of them without an exact reciprocal.
const WIDTHS: [usize; 9] = [1, 2, 3, 5, 6, 7, 10, 12, 49];

/// Input of a graph under construction, with its row axis.
struct Row<'a> {
    builder: &'a mut Builder,
    x: &'a str,
    width: usize,
}

impl Row<'_> {
    fn add(&mut self, operator: &str, inputs: &[&str]) -> String {
        self.builder.add(operator, inputs)
    }

    fn number(&mut self, x: f32) -> String {
        self.builder.floats(&[], vec![x])
    }

    /// Reduces along the last axis.
    fn reduced(&mut self, operator: &str, of: &str) -> String {
        let axes = self.builder.integers(&[1], vec![-1]);
        self.builder.add_node(|output| int(node(operator, &[of, &axes], output), "keepdims", 1))
    }

    fn weights(&mut self, depth: usize, columns: usize) -> String {
        let weight = |n: usize| ((n * 37 + 11) % 101) as f32 / 50.0 - 0.9;
        let weights = (0..depth * columns).map(|n| weight(n) / (depth as f32).sqrt()).collect();
        self.builder.floats(&[depth, columns], weights)
    }

    fn layer(&mut self, of: &str, depth: usize, columns: usize) -> String {
        let weights = self.weights(depth, columns);
        self.add("MatMul", &[of, &weights])
    }

    /// Returns `x` plus a constant.
    fn shifted(&mut self, by: f32) -> String {
        let by = self.number(by);
        let x = self.x.to_owned();
        self.add("Add", &[&x, &by])
    }

    fn centred(&mut self, of: &str) -> String {
        let mean = self.reduced("ReduceMean", of);
        self.add("Sub", &[of, &mean])
    }
}

type Case = (&'static str, fn(&mut Row<'_>) -> String);

const CASES: [Case; 18] = [
    ("centred", |row| {
        let shifted = row.shifted(1000.0);
        row.centred(&shifted)
    }),
    ("centred by less", |row| {
        let shifted = row.shifted(300.0);
        row.centred(&shifted)
    }),
    ("centred by more", |row| {
        let shifted = row.shifted(5000.0);
        row.centred(&shifted)
    }),
    ("mean minus value", |row| {
        let shifted = row.shifted(1000.0);
        let mean = row.reduced("ReduceMean", &shifted);
        row.add("Sub", &[&mean, &shifted])
    }),
    ("plus negative mean", |row| {
        let shifted = row.shifted(1000.0);
        let mean = row.reduced("ReduceMean", &shifted);
        let mean = row.add("Neg", &[&mean]);
        row.add("Add", &[&shifted, &mean])
    }),
    ("sum divided", |row| {
        let shifted = row.shifted(1000.0);
        let sum = row.reduced("ReduceSum", &shifted);
        let count = row.number(row.width as f32);
        let mean = row.add("Div", &[&sum, &count]);
        row.add("Sub", &[&shifted, &mean])
    }),
    ("scaled", |row| {
        let far = row.number(1000.0);
        let x = row.x.to_owned();
        let scaled = row.add("Mul", &[&x, &far]);
        row.centred(&scaled)
    }),
    ("scaled back", |row| {
        let far = row.number(1000.0);
        let x = row.x.to_owned();
        let scaled = row.add("Mul", &[&x, &far]);
        let centred = row.centred(&scaled);
        let near = row.number(0.001);
        row.add("Mul", &[&centred, &near])
    }),
    ("minus the maximum", |row| {
        let shifted = row.shifted(1000.0);
        let most = row.reduced("ReduceMax", &shifted);
        row.add("Sub", &[&shifted, &most])
    }),
    ("minus the first", |row| {
        let shifted = row.shifted(1000.0);
        let [start, end, axis] = [0, 1, -1].map(|n| row.builder.integers(&[1], vec![n]));
        let first = row.add("Slice", &[&shifted, &start, &end, &axis]);
        row.add("Sub", &[&shifted, &first])
    }),
    ("after a layer", |row| {
        let x = row.x.to_owned();
        let width = row.width;
        let layer = row.layer(&x, width, width);
        let far = row.number(1000.0);
        let shifted = row.add("Add", &[&layer, &far]);
        row.centred(&shifted)
    }),
    ("by a matrix", |row| {
        let shifted = row.shifted(1000.0);
        let width = row.width;
        let mean = row.builder.floats(&[width, width], vec![1.0 / width as f32; width * width]);
        let mean = row.add("MatMul", &[&shifted, &mean]);
        row.add("Sub", &[&shifted, &mean])
    }),
    ("layer normalization", |row| {
        let shifted = row.shifted(1000.0);
        let width = row.width;
        let scale = row.builder.floats(&[width], vec![1.25; width]);
        row.builder.add_node(|output| node("LayerNormalization", &[&shifted, &scale], output))
    }),
    ("written layer normalization", |row| {
        let shifted = row.shifted(1000.0);
        let centred = row.centred(&shifted);
        let squares = row.add("Mul", &[&centred, &centred]);
        let variance = row.reduced("ReduceMean", &squares);
        let epsilon = row.number(1e-5);
        let variance = row.add("Add", &[&variance, &epsilon]);
        let deviation = row.add("Sqrt", &[&variance]);
        row.add("Div", &[&centred, &deviation])
    }),
    ("batch normalization", |row| {
        let shifted = row.shifted(1000.0);
        let width = row.width;
        let flat = row.builder.integers(&[2], vec![-1, width as i64]);
        let shifted = row.add("Reshape", &[&shifted, &flat]);
        let [scale, bias, mean, variance] =
            [1.5, 0.25, 1000.0, 0.7].map(|x| row.builder.floats(&[width], vec![x; width]));
        row.builder.add_node(|output| node("BatchNormalization", &[&shifted, &scale, &bias, &mean, &variance], output))
    }),
    ("two means", |row| {
        let shifted = row.shifted(1000.0);
        let doubled = row.add("Add", &[&shifted, &shifted]);
        let mean = row.reduced("ReduceMean", &doubled);
        row.add("Sub", &[&doubled, &mean])
    }),
    ("quotient", |row| {
        let shifted = row.shifted(1000.0);
        let by = row.number(3.0);
        let quotient = row.add("Div", &[&shifted, &by]);
        row.centred(&quotient)
    }),
    ("mean added", |row| {
        let shifted = row.shifted(1000.0);
        let mean = row.reduced("ReduceMean", &shifted);
        let far = row.number(-1000.0);
        let mean = row.add("Add", &[&mean, &far]);
        let x = row.x.to_owned();
        row.add("Add", &[&x, &mean])
    }),
];

/// Returns whether a case is compared. Left out are results with the rounding error of the offset itself, which the
/// three rounded evaluations may miss in one number, and batch normalizations of candidates, which are not compiled.
fn is_compared(name: &str, width: usize, columns: usize, axis: usize) -> bool {
    match name {
        "by a matrix" | "quotient" => columns > 0,
        "mean added" => width < 12,
        "batch normalization" => axis == 0,
        _ => true,
    }
}

/// Returns a tower or reranker over one input: a case, a layer over its result, or both.
fn graph(make: fn(&mut Row<'_>) -> String, width: usize, axis: usize, columns: usize) -> Graph {
    let mut builder = Builder::default();
    let input = Value { name: "x".into(), shape: [&vec![1; axis + 1][..], &[width]].concat(), is_pair: true };
    let mut row = Row { builder: &mut builder, x: "x", width };
    let made = make(&mut row);
    let name = if columns == 0 { made } else { row.layer(&made, width, columns) };
    let columns = if columns == 0 { width } else { columns };
    let output = Value { name, shape: [&vec![1; axis + 1][..], &[columns]].concat(), is_pair: true };
    builder.inputs = vec![port("x", axis + 2)];
    builder.outputs = vec![port(&output.name, axis + 2)];
    Graph { builder, inputs: vec![input], axis, output }
}

#[test]
fn offsets_cancel_before_they_are_multiplied() {
    let mut wrong = Vec::new();
    for (name, make) in CASES {
        for width in WIDTHS {
            for columns in [0, 1, 8, 40] {
                for axis in (0..2).filter(|&axis| is_compared(name, width, columns, axis)) {
                    match graph(make, width, axis, columns).check() {
                        Ok(true) => (),
                        Ok(false) => wrong.push(format!("{name}, {width} to {columns}, axis {axis}: not compiled")),
                        Err(why) => wrong.push(format!("{name}, {width} to {columns}, axis {axis}: {why}")),
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} graphs are wrong:\n{}", wrong.len(), wrong.join("\n"));
}
