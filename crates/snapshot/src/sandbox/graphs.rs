//! Random graphs over all supported operators: compares compiled graphs with the reference evaluation of their files.
//!
//! Towers and rerankers of up to some dozen nodes: integers of different shapes, negative axes, large constants, masks, user
//! values combined with candidate values. Each row is compared alone and in batches. `maker` builds a graph from random `steps`.
//!
//! `STERLING_RANDOM_GRAPHS=FIRST:COUNT` selects other graphs than those of an ordinary test run. With `STERLING_GRAPHS_FOLDER`, the
//! files are kept in a folder, each with inputs and reference outputs, for `scripts/random_graphs.py` to compare with ONNX Runtime.

#![allow(clippy::unwrap_used)]

mod exported;
mod maker;
mod offsets;
mod onnx_file;
mod steps;

use std::path::Path;

use rten_onnx::onnx::NodeProto;

use super::compare::{self, Expected};
use super::oracle::{Array, Oracle};
use maker::{MASK, Maker, Random, Value};
use onnx_file::port;
pub(super) use onnx_file::{Builder, dense_layer, int, ints, node};
use sterling_core::error::Kind;
use sterling_graph::dense::{self, Block, DeclaredInput, DeclaredOutput, InputRows, RowProgram, Size};

/// Graphs per test run; `STERLING_RANDOM_GRAPHS` selects more.
const GRAPHS: u64 = 300;
/// Minimum scale of tolerances: ordinary inputs are between -1 and 1, and exact cancellation leaves no scale.
const SCALE: f64 = 1.0;
/// Seeds that once showed bugs: a sum that f32 can represent although it cannot represent the terms, and the logarithm
/// of a softmax of numbers around -10,000.
const ONCE_WRONG: [u64; 2] = [16_906, 19_529];
/// Version of the ONNX operators.
const OPSET: i64 = 25;
/// Number of rows per graph that are compared.
const ROWS: usize = 9;

struct Graph {
    builder: Builder,
    inputs: Vec<Value>,
    /// Row axis.
    axis: usize,
    output: Value,
}

impl Graph {
    /// Builds a graph of this number of random steps: a tower, or a reranker.
    fn random(seed: u64, steps: usize) -> Graph {
        let mut random = Random(seed);
        let is_reranker = random.below(2) == 0;
        let axis = usize::from(is_reranker);
        let (width, length) = (1 + random.below(8), 2 + random.below(4));
        let value = |name: &str, own: &[usize], is_pair: bool| Value {
            name: name.into(),
            shape: [&vec![1; axis + 1][..], own].concat(),
            is_pair,
        };
        let inputs = match is_reranker {
            false => {
                vec![value("x", &[width], true), value("seq", &[length, width], true), value(MASK, &[length], true)]
            }
            true => vec![
                Value { name: "query".into(), shape: vec![1, width], is_pair: false },
                Value { name: "now".into(), shape: vec![1, 1], is_pair: false },
                value("item", &[width], true),
                Value { name: "column".into(), shape: vec![1, 1], is_pair: true },
            ],
        };
        let mut maker = Maker { random, builder: Builder::default(), values: Vec::new(), axis };
        for input in &inputs {
            // Adds an axis for candidates to user values, and an axis for values to scalar columns of candidates.
            if is_reranker && input.shape.len() == 2 {
                let place = if input.is_pair { 2 } else { 1 };
                let axes = maker.builder.integers(&[1], vec![place]);
                let made = maker.builder.add("Unsqueeze", &[&input.name, &axes]);
                let mut shape = input.shape.clone();
                shape.insert(place as usize, 1);
                maker.values.push(Value { name: made, shape, is_pair: input.is_pair });
            } else {
                maker.values.push(input.clone());
            }
        }
        for _ in 0..steps {
            // Every third graph also has the operators of exporters.
            if seed.is_multiple_of(3) && maker.random.below(2) == 0 {
                maker.exported_step();
            } else {
                maker.step();
            }
        }
        // Every fourth graph, if it is a tower, has a recurrent layer over its last sequence.
        let sequence = maker.values.iter().rev().find(|value| value.is_pair && value.shape.len() == 3).cloned();
        if seed.is_multiple_of(4)
            && axis == 0
            && let Some(sequence) = sequence
        {
            maker.recur(&sequence);
            maker.step();
        }
        // Every fifth graph has a product of a sequence with itself.
        if seed.is_multiple_of(5) {
            maker.squared();
        }
        // Concatenates the last values that differ between rows.
        let retained: Vec<Value> = maker.values.iter().rev().filter(|value| value.is_pair).take(2).cloned().collect();
        let mut parts = Vec::new();
        let mut total = 0;
        for value in
            retained.iter().filter(|value| value.shape.len() > axis && value.shape[..=axis].iter().all(|d| *d == 1))
        {
            let inner: usize = value.shape[axis + 1..].iter().product();
            let mut sizes = vec![0i64; axis + 1];
            sizes.push(inner as i64);
            let sizes = maker.builder.integers(&[sizes.len()], sizes);
            parts.push(maker.builder.add("Reshape", &[&value.name, &sizes]));
            total += inner;
        }
        let names: Vec<&str> = parts.iter().map(String::as_str).collect();
        let name = maker.builder.add_node(|output| int(node("Concat", &names, output), "axis", -1));
        let output = Value { name, shape: [&vec![1; axis + 1][..], &[total]].concat(), is_pair: true };
        let mut builder = maker.builder;
        builder.inputs = inputs.iter().map(|input| port(&input.name, input.shape.len())).collect();
        builder.outputs = vec![port(&output.name, output.shape.len())];
        Graph { builder, inputs, axis, output }
    }

    fn sizes(&self, value: &Value) -> Vec<Size> {
        let size =
            |(n, &d): (usize, &usize)| if value.is_pair && n == self.axis { Size::Rows } else { Size::Fixed(d as i64) };
        value.shape.iter().enumerate().map(size).collect()
    }

    /// Returns random values of an input, including edge values; masks are ones followed by zeros.
    fn numbers(&self, input: usize, row: usize) -> Vec<f32> {
        const EDGES: [f32; 8] = [0.0, 1.0, -1.0, 0.5, 490_000.0, 2.5, -0.25, 489_999.0];
        let Value { name, shape, is_pair } = &self.inputs[input];
        let count: usize = shape.iter().product();
        let row = if *is_pair { row } else { 0 };
        let mut random = Random((input * 1000 + row) as u64);
        if name == MASK {
            return (0..count).map(|n| f32::from(u8::from(n < row % (count + 1)))).collect();
        }
        let is_single = name == "now" || name == "column";
        let number = |_| match (is_single, row % 4) {
            (true, _) => EDGES[random.below(8)],
            (false, 1) => EDGES[random.below(4)],
            (false, 2) => 0.0,
            _ => random.number(),
        };
        (0..count).map(number).collect()
    }

    /// Returns rows of all inputs in the shapes of the file.
    fn arrays(&self, rows: &[usize]) -> Vec<(String, Array)> {
        let array = |(n, input): (usize, &Value)| {
            let mut shape = input.shape.clone();
            let count = if input.is_pair { rows.len() } else { 1 };
            shape[self.axis] *= count;
            let numbers = rows.iter().take(count).flat_map(|&row| self.numbers(n, row)).map(f64::from).collect();
            (input.name.clone(), Array::real(shape, numbers))
        };
        self.inputs.iter().enumerate().map(array).collect()
    }

    fn run(&self, program: &RowProgram, rows: &[usize]) -> Vec<Vec<f32>> {
        let inputs = |is_pair: bool| (0..self.inputs.len()).filter(move |&n| self.inputs[n].is_pair == is_pair);
        let user: Vec<Vec<f32>> = inputs(false).map(|n| self.numbers(n, 0)).collect();
        let user: Vec<&[f32]> = user.iter().map(Vec::as_slice).collect();
        let fill = &mut |given: InputRows<'_>| {
            given.each(|n, row| {
                let numbers: Vec<f32> = inputs(true).flat_map(|input| self.numbers(input, rows[n])).collect();
                row.copy_from_slice(&numbers);
            });
        };
        let mut made = Vec::new();
        let done = &mut |_: usize, count: usize, block: Block<'_>| {
            made.extend((0..count).map(|n| block.output(0).row(n).to_vec()));
            Ok(())
        };
        program.run(rows.len(), &user, &mut dense::Scratch::default(), fill, done).unwrap();
        made
    }

    /// Writes the file with input rows and reference outputs.
    fn write(&self, folder: &Path, seed: u64) {
        let bytes = self.builder.bytes(OPSET);
        let inputs = self.arrays(&(0..ROWS).collect::<Vec<_>>());
        let width = *self.output.shape.last().unwrap();
        let expected = Expected::of(&Oracle::read(&bytes).unwrap(), &inputs, &[(&self.output.name, width)], ROWS);
        let Ok(expected) = expected else { return };
        let rows = |of: &dyn Fn(usize) -> Vec<f64>| (0..ROWS).map(of).map(texts).collect::<Vec<_>>();
        let json = serde_json::json!({
            "inputs": inputs.iter().map(|(name, array)| (name.clone(), (&array.shape, texts(array.reals().unwrap().to_vec()))))
                .collect::<std::collections::BTreeMap<_, _>>(),
            "rows": rows(&|n| expected[0].row(n).to_vec()),
            "tolerances": rows(&|n| expected[0].tolerances(n, SCALE, false)),
        });
        std::fs::write(folder.join(format!("{seed}.onnx")), bytes).unwrap();
        std::fs::write(folder.join(format!("{seed}.json")), json.to_string()).unwrap();
    }

    /// Compares the compiled graph with the reference; `Ok(false)` if the graph cannot be compiled.
    fn check(&self) -> Result<bool, String> {
        let bytes = self.builder.bytes(OPSET);
        let given: Vec<DeclaredInput> = self
            .inputs
            .iter()
            .map(|input| DeclaredInput { name: input.name.clone(), is_pair: input.is_pair, shape: self.sizes(input) })
            .collect();
        let output = DeclaredOutput { name: self.output.name.clone(), shape: self.sizes(&self.output) };
        let program = match RowProgram::lower(&bytes, &given, &[output]) {
            Ok(program) => program,
            Err(e) if e.kind() == Kind::Unsupported => return Ok(false),
            Err(e) => return Err(e.to_string()),
        };
        let oracle = Oracle::read(&bytes).map_err(|e| e.to_string())?;
        let width = *self.output.shape.last().unwrap();
        let all: Vec<usize> = (0..ROWS).collect();
        let mut batches: Vec<Vec<usize>> = all.iter().map(|&row| vec![row]).collect();
        batches.extend([7, 40].map(|count| (0..count).map(|n| n % ROWS).collect()));
        let made: Vec<Vec<Vec<f32>>> = batches.iter().map(|rows| self.run(&program, rows)).collect();
        for &row in &all {
            let expected = Expected::of(&oracle, &self.arrays(&[row]), &[(&self.output.name, width)], 1);
            let expected = expected.map_err(|e| e.to_string())?.remove(0);
            let tolerances = expected.tolerances(0, SCALE, false);
            for (rows, made) in batches.iter().zip(&made) {
                for (_, got) in rows.iter().zip(made).filter(|(own, _)| **own == row) {
                    if let Some(difference) = compare::difference(got, expected.row(0), &tolerances) {
                        return Err(format!("row {row} among {}: {difference:?}", rows.len()));
                    }
                }
            }
        }
        Ok(true)
    }
}

/// Formats numbers as text, because JSON has no NaN and infinities.
fn texts(numbers: Vec<f64>) -> Vec<String> {
    numbers.iter().map(|x| format!("{x:e}")).collect()
}

#[test]
fn random_graphs_compute_what_their_files_define() {
    let requested = std::env::var("STERLING_RANDOM_GRAPHS").ok();
    let (first, count) = match requested.as_deref().map(|text| text.split_once(':').unwrap_or(("0", text))) {
        Some((first, count)) => (first.parse().unwrap(), count.parse().unwrap()),
        None => (0, GRAPHS),
    };
    let (mut programs, mut invalid) = (0, Vec::new());
    for seed in ONCE_WRONG.into_iter().chain(first..first + count) {
        let steps = 3 + seed as usize % 22;
        if let Some(folder) = std::env::var_os("STERLING_GRAPHS_FOLDER") {
            Graph::random(seed, steps).write(Path::new(&folder), seed);
        }
        match Graph::random(seed, steps).check() {
            Ok(is_program) => programs += u64::from(is_program),
            Err(_) => {
                // Finds the smallest number of steps with which the graph fails.
                let (steps, why) =
                    (0..=steps).find_map(|n| Graph::random(seed, n).check().err().map(|why| (n, why))).unwrap();
                let nodes = Graph::random(seed, steps).builder.nodes;
                let text = |n: &NodeProto| format!("{} = {}{:?}", n.output[0], n.op_type.as_deref().unwrap(), n.input);
                invalid.push(format!(
                    "seed {seed}: {why}\n    {}",
                    nodes.iter().map(text).collect::<Vec<_>>().join("\n    ")
                ));
            }
        }
    }
    assert!(
        invalid.is_empty(),
        "{} of {count} graphs are wrong\n{}",
        invalid.len(),
        invalid[..invalid.len().min(5)].join("\n")
    );
    assert!(programs * 2 > count, "only {programs} of {count} random graphs are programs");
}
