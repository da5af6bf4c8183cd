//! Random graphs over all supported operators: compares compiled graphs with the reference evaluation of their files.
//!
//! Towers and rerankers of up to some dozen nodes: integers of different shapes, negative axes, large constants, masks, user
//! values combined with candidate values. Each row is compared alone and in batches.
//!
//! `STERLING_RANDOM_GRAPHS=FIRST:COUNT` selects other graphs than those of an ordinary test run. With `STERLING_GRAPHS_FOLDER`, the
//! files are kept in a folder, each with inputs and reference outputs, for `scripts/random_graphs.py` to compare with ONNX Runtime.

#![allow(clippy::unwrap_used)]

use rten_onnx::onnx::{
    AttributeProto, AttributeType, DataType, Dimension, GraphProto, ModelProto, NodeProto, OperatorSetIdProto,
    TensorProto, TensorShapeProto, TypeProto, TypeProtoTensor, ValueInfoProto,
};

mod exported;
mod offsets;

use std::path::Path;

use super::compare::{self, Expected};
use super::oracle::{Array, Oracle};
use sterling_core::error::Kind;
use sterling_core::random::{GAMMA, splitmix64};
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

/// Builder of an ONNX file.
#[derive(Default)]
pub(super) struct Builder {
    nodes: Vec<NodeProto>,
    constants: Vec<TensorProto>,
    inputs: Vec<ValueInfoProto>,
    outputs: Vec<ValueInfoProto>,
}

/// Returns a float value with this number of axes.
fn port(name: &str, axes: usize) -> ValueInfoProto {
    let dim = (0..axes).map(|n| Dimension { dim_value: None, dim_param: Some(format!("{name}_{n}")) }).collect();
    let shape = Some(TensorShapeProto { dim });
    let tensor_type = Some(TypeProtoTensor { elem_type: Some(DataType::FLOAT), shape });
    ValueInfoProto { name: Some(name.into()), r#type: Some(TypeProto { tensor_type, sequence: None }) }
}

/// Returns the file of a linear layer from `x` to `query`; all weights are multiples of `weight`.
pub(super) fn dense_layer(width: usize, columns: usize, weight: f32) -> Vec<u8> {
    let mut builder = Builder::default();
    let weights = (0..width * columns).map(|n| weight * (n as f32 / 8.0 - 0.5)).collect();
    let weights = builder.floats(&[width, columns], weights);
    builder.nodes.push(node("MatMul", &["x", &weights], "query"));
    builder.inputs = vec![port("x", 2)];
    builder.outputs = vec![port("query", 2)];
    builder.bytes(17)
}

pub(super) fn node(operator: &str, inputs: &[&str], output: &str) -> NodeProto {
    NodeProto {
        name: Some(format!("make_{output}")),
        op_type: Some(operator.into()),
        input: inputs.iter().map(|name| (*name).to_owned()).collect(),
        output: vec![output.into()],
        ..NodeProto::default()
    }
}

pub(super) fn int(mut node: NodeProto, name: &str, i: i64) -> NodeProto {
    let attribute =
        AttributeProto { name: Some(name.into()), i: Some(i), r#type: Some(AttributeType::INT), ..Default::default() };
    node.attribute.push(attribute);
    node
}

pub(super) fn ints(mut node: NodeProto, name: &str, all: &[i64]) -> NodeProto {
    let attribute = AttributeProto {
        name: Some(name.into()),
        ints: all.to_vec(),
        r#type: Some(AttributeType::INTS),
        ..Default::default()
    };
    node.attribute.push(attribute);
    node
}

fn float(mut node: NodeProto, name: &str, f: f32) -> NodeProto {
    let attribute = AttributeProto {
        name: Some(name.into()),
        f: Some(f),
        r#type: Some(AttributeType::FLOAT),
        ..Default::default()
    };
    node.attribute.push(attribute);
    node
}

fn text(mut node: NodeProto, name: &str, s: &str) -> NodeProto {
    let attribute = AttributeProto {
        name: Some(name.into()),
        s: Some(s.into()),
        r#type: Some(AttributeType::STRING),
        ..Default::default()
    };
    node.attribute.push(attribute);
    node
}

impl Builder {
    /// Returns a builder of a file with this node alone.
    pub(super) fn of(node: NodeProto) -> Self {
        Builder { nodes: vec![node], ..Builder::default() }
    }

    pub(super) fn bytes(&self, opset: i64) -> Vec<u8> {
        let graph = GraphProto {
            node: self.nodes.clone(),
            initializer: self.constants.clone(),
            input: self.inputs.clone(),
            output: self.outputs.clone(),
            ..GraphProto::default()
        };
        let of = |domain: Option<&str>, version| OperatorSetIdProto {
            domain: domain.map(Into::into),
            version: Some(version),
        };
        let opset_import = vec![of(None, opset), of(Some("com.microsoft"), 1)];
        ModelProto { ir_version: Some(8), graph: Some(graph), opset_import, ..ModelProto::default() }
            .write_buf()
            .unwrap()
    }

    fn floats(&mut self, shape: &[usize], numbers: Vec<f32>) -> String {
        let name = format!("c{}", self.constants.len());
        self.constants.push(TensorProto {
            name: Some(name.clone()),
            dims: shape.iter().map(|&d| d as i64).collect(),
            data_type: Some(DataType::FLOAT),
            float_data: numbers,
            ..TensorProto::default()
        });
        name
    }

    fn integers(&mut self, shape: &[usize], numbers: Vec<i64>) -> String {
        let name = format!("c{}", self.constants.len());
        self.constants.push(TensorProto {
            name: Some(name.clone()),
            dims: shape.iter().map(|&d| d as i64).collect(),
            data_type: Some(DataType::INT64),
            int64_data: numbers,
            ..TensorProto::default()
        });
        name
    }

    fn add(&mut self, operator: &str, inputs: &[&str]) -> String {
        self.add_node(|output| node(operator, inputs, output))
    }

    fn add_node(&mut self, make: impl FnOnce(&str) -> NodeProto) -> String {
        let output = format!("v{}", self.nodes.len());
        self.nodes.push(make(&output));
        output
    }
}

/// Random numbers by SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        let number = splitmix64(self.0);
        self.0 = self.0.wrapping_add(GAMMA);
        number
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn number(&mut self) -> f32 {
        self.below(2001) as f32 / 1000.0 - 1.0
    }

    fn numbers(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.number() * scale).collect()
    }
}

/// A value of the graph: its name, its shape, and whether it differs between rows.
#[derive(Clone, Debug)]
struct Value {
    name: String,
    /// Shape; the row axis has size 1.
    shape: Vec<usize>,
    is_pair: bool,
}

struct Graph {
    builder: Builder,
    inputs: Vec<Value>,
    /// Row axis.
    axis: usize,
    output: Value,
}

struct Maker {
    random: Random,
    builder: Builder,
    values: Vec<Value>,
    axis: usize,
}

const MASK: &str = "mask";

impl Maker {
    fn pick(&mut self) -> Value {
        // Prefers late values, so that graphs grow deep.
        let count = self.values.len();
        let place = self.random.below(count).max(self.random.below(count));
        self.values[place].clone()
    }

    fn keep(&mut self, name: String, shape: Vec<usize>, is_pair: bool) {
        if shape.iter().product::<usize>() <= 200 && shape.len() <= 5 {
            self.values.push(Value { name, shape, is_pair });
        }
    }

    /// Picks an axis after the row axis, counted from the front or from the end.
    fn inner_axis(&mut self, a: &Value) -> (usize, i64) {
        let first = self.axis + 1;
        let axis = first + self.random.below(a.shape.len() - first);
        (axis, if self.random.below(2) == 0 { axis as i64 } else { axis as i64 - a.shape.len() as i64 })
    }

    /// Adds a constant that broadcasts with a value, sometimes with more axes.
    fn beside(&mut self, a: &Value, scale: f32) -> String {
        let mut shape = vec![1; a.shape.len()];
        for (size, &of_value) in shape.iter_mut().zip(&a.shape).skip(self.axis + 1) {
            if self.random.below(2) == 0 {
                *size = of_value;
            }
        }
        let dropped = self.random.below(shape.len() + 1);
        let ahead = shape.iter().take_while(|size| **size == 1).count();
        shape.drain(..dropped.min(ahead));
        let numbers = self.random.numbers(shape.iter().product(), scale);
        self.builder.floats(&shape, numbers)
    }

    fn step(&mut self) {
        let a = self.pick();
        let kind = self.random.below(29);
        match kind {
            0 | 1 => {
                const FUNCTIONS: [&str; 17] = [
                    "Relu",
                    "Sigmoid",
                    "Tanh",
                    "Neg",
                    "Abs",
                    "Erf",
                    "Softplus",
                    "Elu",
                    "HardSigmoid",
                    "HardSwish",
                    "Mish",
                    "LeakyRelu",
                    "Sign",
                    "Identity",
                    "Softplus",
                    "Tanh",
                    "Sigmoid",
                ];
                let f = FUNCTIONS[self.random.below(FUNCTIONS.len())];
                let made = self.builder.add(f, &[&a.name]);
                self.keep(made, a.shape, a.is_pair);
            }
            2 | 3 => {
                // An operator on two values that broadcast.
                let b = self.pick();
                let Some(shape) = together(&a, &b) else { return };
                let f = ["Add", "Sub", "Mul", "Max", "Min", "Sub"][self.random.below(6)];
                let made = self.builder.add(f, &[&a.name, &b.name]);
                self.keep(made, shape, a.is_pair || b.is_pair);
            }
            4 => {
                let b = self.pick();
                let Some(shape) = together(&a, &b) else { return };
                let size = self.builder.add("Abs", &[&b.name]);
                let half = self.builder.floats(&[], vec![0.5]);
                let divisor = self.builder.add("Add", &[&size, &half]);
                let made = self.builder.add("Div", &[&a.name, &divisor]);
                self.keep(made, shape, a.is_pair || b.is_pair);
            }
            5 | 6 => {
                let constant = self.beside(&a, 2.0);
                let f = ["Add", "Mul", "Sub", "Max"][self.random.below(4)];
                let made = self.builder.add(f, &[&a.name, &constant]);
                let rank = self.rank_with(&a, &constant);
                self.keep(made, rank, a.is_pair);
            }
            7..=9 => {
                let depth = *a.shape.last().unwrap();
                if a.shape.len() < self.axis + 2 || a.shape.len() < 2 {
                    return;
                }
                let width = 1 + self.random.below(9);
                let scale = 1.0 / (depth as f32).sqrt();
                let numbers = self.random.numbers(depth * width, scale);
                let matrix = self.builder.floats(&[depth, width], numbers);
                let made = self.builder.add("MatMul", &[&a.name, &matrix]);
                let mut shape = a.shape.clone();
                *shape.last_mut().unwrap() = width;
                self.keep(made, shape, a.is_pair);
            }
            10 | 11 if a.shape.len() > self.axis + 1 => {
                let (axis, written) = self.inner_axis(&a);
                const REDUCED: [&str; 8] = [
                    "ReduceSum",
                    "ReduceMean",
                    "ReduceMax",
                    "ReduceMin",
                    "ReduceL1",
                    "ReduceL2",
                    "ReduceSumSquare",
                    "ReduceLogSumExp",
                ];
                let f = REDUCED[self.random.below(REDUCED.len())];
                let keep = self.random.below(2);
                let axes = self.builder.integers(&[1], vec![written]);
                let made =
                    self.builder.add_node(|output| int(node(f, &[&a.name, &axes], output), "keepdims", keep as i64));
                let mut shape = a.shape.clone();
                if keep == 1 {
                    shape[axis] = 1;
                } else {
                    shape.remove(axis);
                }
                self.keep(made, shape, a.is_pair);
            }
            12 if a.shape.len() > self.axis + 1 => {
                let (_, written) = self.inner_axis(&a);
                let f = ["Softmax", "LogSoftmax"][self.random.below(2)];
                let made = self.builder.add_node(|output| int(node(f, &[&a.name], output), "axis", written));
                self.keep(made, a.shape, a.is_pair);
            }
            13 if a.shape.len() > self.axis + 1 => {
                let width = *a.shape.last().unwrap();
                let numbers = self.random.numbers(width, 1.0);
                let scale = self.builder.floats(&[width], numbers);
                let made = self.builder.add("LayerNormalization", &[&a.name, &scale]);
                self.keep(made, a.shape, a.is_pair);
            }
            14 if a.shape.len() > self.axis + 1 => {
                // Reshapes the axes after the row axis.
                let inner: usize = a.shape[self.axis + 1..].iter().product();
                let parts = (1..=inner).filter(|n| inner.is_multiple_of(*n)).collect::<Vec<_>>();
                let part = parts[self.random.below(parts.len())];
                let mut sizes = vec![0i64; self.axis + 1];
                sizes.extend([part as i64, -1]);
                let sizes = self.builder.integers(&[sizes.len()], sizes);
                let made = self.builder.add("Reshape", &[&a.name, &sizes]);
                let mut shape = a.shape[..=self.axis].to_vec();
                shape.extend([part, inner / part]);
                self.keep(made, shape, a.is_pair);
            }
            15 if a.shape.len() > self.axis + 2 => {
                let mut order: Vec<usize> = (0..a.shape.len()).collect();
                let n = a.shape.len();
                order.swap(n - 1, n - 2);
                let perm: Vec<i64> = order.iter().map(|&axis| axis as i64).collect();
                let made = self.builder.add_node(|output| ints(node("Transpose", &[&a.name], output), "perm", &perm));
                let shape = order.iter().map(|&axis| a.shape[axis]).collect();
                self.keep(made, shape, a.is_pair);
            }
            16 if a.shape.len() > self.axis + 1 => {
                let (axis, written) = self.inner_axis(&a);
                let all: Vec<Value> = self.values.clone();
                let fits = |b: &&Value| {
                    b.is_pair == a.is_pair
                        && b.shape.len() == a.shape.len()
                        && (0..a.shape.len()).all(|n| n == axis || a.shape[n] == b.shape[n])
                };
                let fitting: Vec<&Value> = all.iter().filter(fits).collect();
                let b = fitting[self.random.below(fitting.len())];
                let made =
                    self.builder.add_node(|output| int(node("Concat", &[&a.name, &b.name], output), "axis", written));
                let mut shape = a.shape.clone();
                shape[axis] += b.shape[axis];
                self.keep(made, shape, a.is_pair);
            }
            17 if a.shape.len() > self.axis + 1 => {
                let (axis, written) = self.inner_axis(&a);
                let size = a.shape[axis];
                let first = self.random.below(size);
                let end = first + 1 + self.random.below(size - first);
                let step = 1 + self.random.below(2);
                let (start, stop) = match self.random.below(2) {
                    0 => (first as i64, end as i64),
                    _ => (first as i64 - size as i64, if end == size { i64::MAX } else { end as i64 - size as i64 }),
                };
                let all = [vec![start], vec![stop], vec![written], vec![step as i64]];
                let names = all.map(|numbers| self.builder.integers(&[1], numbers));
                let [starts, ends, axes, steps] = &names;
                let made = self.builder.add("Slice", &[&a.name, starts, ends, axes, steps]);
                let mut shape = a.shape.clone();
                shape[axis] = (end - first).div_ceil(step);
                self.keep(made, shape, a.is_pair);
            }
            18 if a.shape.len() > self.axis + 1 => {
                let (axis, written) = self.inner_axis(&a);
                let size = a.shape[axis];
                let count = 1 + self.random.below(3);
                let index = (0..count).map(|_| self.random.below(2 * size) as i64 - size as i64).collect();
                let index = self.builder.integers(&[count], index);
                let made =
                    self.builder.add_node(|output| int(node("Gather", &[&a.name, &index], output), "axis", written));
                let mut shape = a.shape.clone();
                shape[axis] = count;
                self.keep(made, shape, a.is_pair);
            }
            19 => {
                // A boolean that is cast to a number, or that selects between two values.
                let constant = self.beside(&a, 1.0);
                let f = ["Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Equal"][self.random.below(5)];
                let truth = self.builder.add(f, &[&a.name, &constant]);
                let shape = self.rank_with(&a, &constant);
                let made = match self.random.below(2) {
                    0 => self.builder.add_node(|output| int(node("Cast", &[&truth], output), "to", 1)),
                    _ => {
                        let other = self.builder.floats(&[], vec![-1e4]);
                        self.builder.add("Where", &[&truth, &a.name, &other])
                    }
                };
                self.keep(made, shape, a.is_pair);
            }
            20 => self.relative(&a),
            21 => {
                // A cast to integers and back.
                let three = self.builder.floats(&[], vec![3.0]);
                let wide = self.builder.add("Mul", &[&a.name, &three]);
                let complete = self.builder.add_node(|output| int(node("Cast", &[&wide], output), "to", 7));
                let two = self.builder.integers(&[1], vec![2]);
                let f = ["Add", "Mul", "Max", "Min", "Sub"][self.random.below(5)];
                let more = self.builder.add(f, &[&complete, &two]);
                let made = self.builder.add_node(|output| int(node("Cast", &[&more], output), "to", 1));
                let shape = if a.shape.is_empty() { vec![1] } else { a.shape };
                self.keep(made, shape, a.is_pair);
            }
            22 if a.shape.len() > self.axis + 1 => {
                let (axis, written) = self.inner_axis(&a);
                let f = ["ArgMax", "ArgMin"][self.random.below(2)];
                let last = self.random.below(2) as i64;
                let place = self.builder.add_node(|output| {
                    int(int(node(f, &[&a.name], output), "axis", written), "select_last_index", last)
                });
                let made = self.builder.add_node(|output| int(node("Cast", &[&place], output), "to", 1));
                let mut shape = a.shape.clone();
                shape[axis] = 1;
                self.keep(made, shape, a.is_pair);
            }
            23 => {
                // A large factor over a difference, as in masks and timestamps.
                let b = self.pick();
                let Some(shape) = together(&a, &b) else { return };
                let less = self.builder.add("Sub", &[&a.name, &b.name]);
                let large = [1e4, -1e9, 5e5, 2048.0][self.random.below(4)];
                let large = self.builder.floats(&[], vec![large]);
                let far = self.builder.add("Mul", &[&less, &large]);
                let made = self.builder.add("Tanh", &[&far]);
                self.keep(made, shape, a.is_pair || b.is_pair);
            }
            24 => {
                let exponent = [2.0, 3.0, 1.0][self.random.below(3)];
                let shape = vec![1; self.random.below(a.shape.len() + 2)];
                let exponent = self.builder.floats(&shape, vec![exponent]);
                let made = self.builder.add("Pow", &[&a.name, &exponent]);
                let shape = self.rank_with(&a, &exponent);
                self.keep(made, shape, a.is_pair);
            }
            25 if self.axis == 0 && a.shape.len() == 3 => {
                // Flattens rows and inner axes into one axis, and back.
                let written = [-1, 2][self.random.below(2)];
                let flat = self.builder.add_node(|output| int(node("Flatten", &[&a.name], output), "axis", written));
                let inner = a.shape[1] * a.shape[2];
                let sizes = self.builder.integers(&[2], vec![-1, inner as i64]);
                let made = self.builder.add("Reshape", &[&flat, &sizes]);
                self.keep(made, vec![1, inner], a.is_pair);
            }
            26 => {
                // GELU as exporters write it, sometimes with a constant of more axes.
                let [root, half] = [std::f32::consts::FRAC_1_SQRT_2, 0.5].map(|x| self.builder.floats(&[], vec![x]));
                let shape = vec![1; self.random.below(a.shape.len() + 2)];
                let one = self.builder.floats(&shape, vec![1.0]);
                let scaled = self.builder.add("Mul", &[&a.name, &root]);
                let erf = self.builder.add("Erf", &[&scaled]);
                let sum = self.builder.add("Add", &[&erf, &one]);
                let gate = self.builder.add("Mul", &[&sum, &half]);
                let made = self.builder.add("Mul", &[&a.name, &gate]);
                let shape = self.rank_with(&a, &one);
                self.keep(made, shape, a.is_pair);
            }
            27 if a.shape.len() > self.axis + 1 => {
                // A sum over the entries that a mask keeps, possibly none.
                let (axis, written) = self.inner_axis(&a);
                let [zero, never] = [0.0, f32::NEG_INFINITY].map(|x| self.builder.floats(&[], vec![x]));
                let truth = self.builder.add("Greater", &[&a.name, &zero]);
                let masked = self.builder.add("Where", &[&truth, &a.name, &never]);
                let axes = self.builder.integers(&[1], vec![written]);
                let sum = self.builder.add("ReduceLogSumExp", &[&masked, &axes]);
                let made = self.builder.add("Exp", &[&sum]);
                let mut shape = a.shape.clone();
                shape[axis] = 1;
                self.keep(made, shape, a.is_pair);
            }
            _ if a.shape.len() > self.axis + 1 => {
                // Adds an axis of size 1, and removes it again.
                let rank = a.shape.len() + 1;
                let axis = self.axis + 1 + self.random.below(rank - self.axis - 1);
                let written = if self.random.below(2) == 0 { axis as i64 } else { axis as i64 - rank as i64 };
                let axes = self.builder.integers(&[1], vec![written]);
                let made = self.builder.add("Unsqueeze", &[&a.name, &axes]);
                let mut shape = a.shape.clone();
                shape.insert(axis, 1);
                self.keep(made, shape, a.is_pair);
            }
            _ => {}
        }
    }

    /// Adds a recurrent layer over a sequence `[1, steps, width]` of a tower, and a value of its outputs.
    fn recur(&mut self, a: &Value) {
        let &[1, steps, width] = &a.shape[..] else { return };
        let hidden = 1 + self.random.below(7);
        let (f, gates) = [("GRU", 3), ("LSTM", 4), ("RNN", 1)][self.random.below(3)];
        let direction = ["forward", "reverse", "bidirectional"][self.random.below(3)];
        let directions = if direction == "bidirectional" { 2 } else { 1 };
        let rows = gates * hidden;
        let mut constant = |shape: &[usize], scale: f32| {
            let numbers = self.random.numbers(shape.iter().product(), scale);
            self.builder.floats(shape, numbers)
        };
        let weights = constant(&[directions, rows, width], 1.0);
        let recurrence = constant(&[directions, rows, hidden], 0.7);
        let bias = constant(&[directions, 2 * rows], 0.5);
        let turned = self.builder.add_node(|output| ints(node("Transpose", &[&a.name], output), "perm", &[1, 0, 2]));
        let mut inputs = vec![turned, weights, recurrence];
        if self.random.below(3) > 0 {
            inputs.push(bias);
            if self.random.below(2) == 0 {
                let axes = self.builder.integers(&[1], vec![1]);
                let count =
                    self.builder.add_node(|output| int(node("ReduceSum", &[MASK, &axes], output), "keepdims", 0));
                // Every length of the test inputs fits: the mask may be shorter or longer than the sequence.
                let most = self.builder.floats(&[], vec![steps as f32]);
                let count = self.builder.add("Min", &[&count, &most]);
                inputs.push(self.builder.add_node(|output| int(node("Cast", &[&count], output), "to", 6)));
            }
        }
        let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
        let (is_scaled, is_last) = (self.random.below(2), self.random.below(2) == 0);
        let made = self.builder.add_node(|output| {
            let outputs = if is_last { ["", output] } else { [output, ""] };
            let mut layer = int(node(f, &inputs, output), "hidden_size", hidden as i64);
            layer.output = outputs.iter().map(|&name| name.to_owned()).collect();
            if f == "GRU" {
                layer = int(layer, "linear_before_reset", is_scaled as i64);
            }
            text(layer, "direction", direction)
        });
        // Batch first: `[1, directions, hidden]`, or `[1, steps, directions, hidden]`.
        let (perm, shape) = match is_last {
            true => (vec![1, 0, 2], vec![1, directions, hidden]),
            false => (vec![2, 0, 1, 3], vec![1, steps, directions, hidden]),
        };
        let made = self.builder.add_node(|output| ints(node("Transpose", &[&made], output), "perm", &perm));
        self.keep(made, shape, true);
    }

    /// Returns the shape of a value combined with a constant.
    fn rank_with(&self, a: &Value, constant: &str) -> Vec<usize> {
        let tensor = self.builder.constants.iter().find(|tensor| tensor.name.as_deref() == Some(constant)).unwrap();
        let more = tensor.dims.len().saturating_sub(a.shape.len());
        [&vec![1; more][..], &a.shape].concat()
    }

    /// Multiplies by a matrix made from the difference, equality or minimum of row and column numbers, as in relative position
    /// biases and masks.
    fn relative(&mut self, a: &Value) {
        let Some(&size) = a.shape.last() else { return };
        if a.shape.len() < self.axis + 2 || size > 12 {
            return;
        }
        let [zero, one, end] = [0, 1, size as i64].map(|n| self.builder.integers(&[], vec![n]));
        let range = self.builder.add("Range", &[&zero, &end, &one]);
        let [first, second] = [0, 1].map(|n| self.builder.integers(&[1], vec![n]));
        let (column, row) =
            (self.builder.add("Unsqueeze", &[&range, &second]), self.builder.add("Unsqueeze", &[&range, &first]));
        let matrix = match self.random.below(3) {
            0 => {
                let away = self.builder.add("Sub", &[&column, &row]);
                let most = self.builder.integers(&[], vec![size as i64 - 1]);
                let index = self.builder.add("Add", &[&away, &most]);
                let numbers = self.random.numbers(2 * size - 1, 1.0);
                let bias = self.builder.floats(&[2 * size - 1], numbers);
                self.builder.add("Gather", &[&bias, &index])
            }
            1 => {
                let same = self.builder.add("Equal", &[&column, &row]);
                self.builder.add_node(|output| int(node("Cast", &[&same], output), "to", 1))
            }
            _ => {
                let least = self.builder.add("Min", &[&column, &row]);
                self.builder.add_node(|output| int(node("Cast", &[&least], output), "to", 1))
            }
        };
        let made = self.builder.add("MatMul", &[&a.name, &matrix]);
        self.keep(made, a.shape.clone(), a.is_pair);
    }
}

/// Returns the broadcast shape of two values, including the row axis.
fn together(a: &Value, b: &Value) -> Option<Vec<usize>> {
    if a.shape.len() != b.shape.len() {
        return None;
    }
    a.shape
        .iter()
        .zip(&b.shape)
        .map(|(&x, &y)| if x == y || y == 1 { Some(x) } else { (x == 1).then_some(y) })
        .collect()
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
