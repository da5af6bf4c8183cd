//! Deviations of the fallback runtime (`rten`) from the ONNX specification.
//!
//! `rten` stores 64-bit integers in 32 bits, with saturation, stores booleans as integers, and computes in f32 instead
//! of half precision. Sample rows may not show a deviation, because it needs particular numbers. The ranges of all
//! values are therefore derived from the file: a node whose integers may exceed 32 bits is a deviation, unless
//! saturation does not change the node's result.

use std::collections::HashMap;

use rten_onnx::onnx::{DataType, GraphProto, NodeProto, TensorProto, ValueInfoProto};

use super::check::{constant, integers, sets_shape, shown};
use crate::dense::ElementTypes;

/// Maximum count of numbers that one operation sums; no value may have more numbers.
const SUMMED_MAX: f64 = (1u64 << 28) as f64;
const LEAST: f64 = i32::MIN as f64;
const MOST: f64 = i32::MAX as f64;

/// Range of the numbers of a value.
#[derive(Clone, Copy, Debug)]
struct Range {
    low: f64,
    high: f64,
    /// True if all numbers are integers.
    is_whole: bool,
    /// True if the numbers depend on the numbers of an input, not only on its shape. Validation with sample rows covers
    /// all other values.
    is_data: bool,
}

impl Range {
    const ANY: Range = Range { low: f64::NEG_INFINITY, high: f64::INFINITY, is_whole: false, is_data: true };

    fn of(low: f64, high: f64) -> Range {
        Range { low, high, ..Range::ANY }
    }

    fn whole(self) -> Range {
        Range { is_whole: true, ..self }
    }

    fn fits(&self) -> bool {
        self.low >= LEAST && self.high <= MOST
    }

    /// Returns whether the range excludes the two numbers that result from saturation.
    fn is_inside(&self) -> bool {
        self.low > LEAST && self.high < MOST
    }

    fn join(self, other: Range) -> Range {
        Range {
            low: self.low.min(other.low),
            high: self.high.max(other.high),
            is_whole: self.is_whole && other.is_whole,
            is_data: self.is_data || other.is_data,
        }
    }

    /// Applies a function that is monotone in each operand to the ends of two ranges.
    fn ends(self, other: Range, f: impl Fn(f64, f64) -> f64) -> Range {
        let all = [(self.low, other.low), (self.low, other.high), (self.high, other.low), (self.high, other.high)];
        let all = all.map(|(a, b)| f(a, b));
        let low = all.into_iter().fold(f64::INFINITY, f64::min);
        let high = all.into_iter().fold(f64::NEG_INFINITY, f64::max);
        Range { low, high, ..self.join(other) }
    }
}

/// Returns the first node that the runtime evaluates differently, and a description of the difference.
pub(super) fn misread(graph: &GraphProto) -> Option<String> {
    let mut reader = Reader::default();
    for tensor in &graph.initializer {
        reader.add_constant(tensor.name.as_deref().unwrap_or(""), tensor);
    }
    for input in &graph.input {
        reader.add_input(input, &graph.input);
    }
    let mut all = graph.node.iter().enumerate();
    all.find_map(|(place, node)| reader.add_node(node).map(|how| format!("{}: {how}", shown(node, place))))
}

#[derive(Default)]
struct Reader<'a> {
    types: ElementTypes,
    ranges: HashMap<&'a str, Range>,
}

impl<'a> Reader<'a> {
    fn add_constant(&mut self, name: &'a str, tensor: &TensorProto) {
        self.types.insert(name, tensor.data_type.unwrap_or(DataType(0)));
        self.ranges.insert(name, of_tensor(tensor));
    }

    fn add_input(&mut self, input: &'a ValueInfoProto, all: &[ValueInfoProto]) {
        let Some(name) = input.name.as_deref().filter(|name| !self.ranges.contains_key(name)) else { return };
        self.types.insert(name, DataType::FLOAT);
        let axes = |value: &ValueInfoProto| {
            let tensor = value.r#type.as_ref().and_then(|t| t.tensor_type.as_ref());
            tensor.and_then(|tensor| tensor.shape.as_ref()).map(|shape| shape.dim.len())
        };
        let is_values = |other: &ValueInfoProto| {
            other.name.as_deref() == name.strip_suffix("_mask") && axes(other) == axes(input).map(|axes| axes + 1)
        };
        let is_mask = name.ends_with("_mask") && all.iter().any(is_values);
        self.ranges.insert(name, if is_mask { Range::of(0.0, 1.0).whole() } else { Range::ANY });
    }

    /// Records the outputs of a node; returns a description if the runtime evaluates the node differently.
    fn add_node(&mut self, node: &'a NodeProto) -> Option<String> {
        self.types.add_node(node);
        let how = self.deviation(node);
        let first = self.range(node);
        let has_indices = matches!(node.op_type.as_deref(), Some("TopK" | "MaxPool"));
        for (n, name) in node.output.iter().enumerate().filter(|(_, name)| !name.is_empty()) {
            let kind = self.types.of(name);
            let range = match kind {
                // The second output of these operators holds indices.
                Some(DataType::INT64) if n > 0 && has_indices => Range { low: 0.0, high: SUMMED_MAX, ..first },
                _ => first,
            };
            let range = match kind {
                // Integers of 32 bits and less wrap around as in ONNX.
                Some(DataType::INT32) if !range.fits() => Range { low: LEAST, high: MOST, ..range },
                Some(DataType::BOOL) => Range { low: 0.0, high: 1.0, ..range },
                _ => range,
            };
            let is_whole = range.is_whole || kind.is_some_and(is_integer);
            self.ranges.insert(name, Range { is_whole, ..range });
        }
        how
    }

    fn input(&self, node: &NodeProto, n: usize) -> Option<Range> {
        let name = node.input.get(n).filter(|name| !name.is_empty())?;
        Some(self.ranges.get(name.as_str()).copied().unwrap_or(Range::ANY))
    }

    fn kind(&self, node: &NodeProto, n: usize) -> Option<DataType> {
        node.input.get(n).and_then(|name| self.types.of(name))
    }

    fn deviation(&self, node: &NodeProto) -> Option<String> {
        let operator = node.op_type.as_deref().unwrap_or("");
        match operator {
            "Sign" => return Some("Sign returns 1 for 0, expected 0".into()),
            "ArgMax" | "ArgMin" => {
                return Some("the runtime returns the index of the last of equal values, expected the first".into());
            }
            _ => {}
        }
        let made = node.output.first().and_then(|name| self.types.of(name));
        let is_half = |kind: Option<DataType>| matches!(kind, Some(DataType::FLOAT16 | DataType::BFLOAT16));
        if is_half(made) && !(moves(operator) && (node.input.is_empty() || is_half(self.kind(node, 0)))) {
            return Some("the runtime computes in f32, expected results rounded to half precision".into());
        }
        if ["Cast", "CastLike"].contains(&operator)
            && made == Some(DataType::BOOL)
            && self.input(node, 0).is_none_or(|of| !of.is_whole || of.low < 0.0 || of.high > 1.0)
        {
            return Some("the runtime keeps numbers other than 0 and 1, expected a boolean".into());
        }
        self.saturation(node, operator, made)
    }

    /// Describes a node's input or result with integers beyond 32 bits, if saturation changes the node's result.
    fn saturation(&self, node: &NodeProto, operator: &str, made: Option<DataType>) -> Option<String> {
        let beyond = |of: &Range, what: &str| {
            Some(format!("{what} from {:e} to {:e}, which the runtime stores in 32 bits", of.low, of.high))
        };
        let all: Vec<Range> = (0..node.input.len()).filter_map(|n| self.input(node, n)).collect();
        for n in 0..node.input.len() {
            let Some(range) = self.input(node, n).filter(|range| !range.fits()) else { continue };
            if self.kind(node, n) != Some(DataType::INT64) || keeps_saturated(operator, n) {
                continue;
            }
            let is_compared =
                ["Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"].contains(&operator) && all.len() == 2;
            if !(is_compared && all.iter().any(Range::is_inside)) {
                return beyond(&range, &format!("`{}` is an int64 tensor with integers", node.input[n]));
            }
        }
        let is_source = ["Cast", "CastLike", "Where", "OneHot"].contains(&operator);
        let range = self.range(node);
        if made == Some(DataType::INT64) && !is_source && !keeps_saturated(operator, 0) && !range.fits() {
            return beyond(&range, "the result is an int64 tensor with integers");
        }
        None
    }

    /// Returns the range of the node's first output.
    fn range(&self, node: &NodeProto) -> Range {
        let operator = node.op_type.as_deref().unwrap_or("");
        let input = |n: usize| self.input(node, n).unwrap_or(Range::ANY);
        let all = || (0..node.input.len()).filter_map(|n| self.input(node, n));
        let a = input(0);
        let is_data = all().any(|range| range.is_data) && !["Shape", "Size"].contains(&operator);
        let folded = |f: fn(Range, Range) -> Range| all().reduce(f).unwrap_or(Range::ANY);
        let counted = |of: Range| Range {
            low: (of.low * SUMMED_MAX).min(of.low),
            high: (of.high * SUMMED_MAX).max(of.high),
            ..of
        };
        let made = match operator {
            "Constant" => constant_range(node),
            "ConstantOfShape" => constant(node).map_or(Range::of(0.0, 0.0).whole(), of_tensor),
            "Shape" | "Size" | "NonZero" => Range::of(0.0, SUMMED_MAX).whole(),
            "Equal" | "Less" | "LessOrEqual" | "Greater" | "GreaterOrEqual" | "And" | "Or" | "Xor" | "Not"
            | "IsNaN" | "IsInf" => Range::of(0.0, 1.0).whole(),
            "Sigmoid" | "Softmax" | "HardSigmoid" => Range::of(0.0, 1.0),
            "Tanh" | "Erf" | "Sin" | "Cos" => Range::of(-1.0, 1.0),
            "Relu" => Range { low: a.low.max(0.0), high: a.high.max(0.0), ..a },
            "Abs" => Range { low: 0.0, high: a.high.max(-a.low), ..a },
            "Neg" => Range { low: -a.high, high: -a.low, ..a },
            "Floor" | "Ceil" | "Round" => Range { low: a.low.floor(), high: a.high.ceil(), ..a }.whole(),
            "Cast" | "CastLike" if node.output.first().and_then(|name| self.types.of(name)).is_some_and(is_integer) => {
                Range { low: a.low.trunc(), high: a.high.trunc(), ..a }.whole()
            }
            "TopK" => a,
            // The results go from the first input to the second input, in steps of the third one.
            "Range" => Range { is_whole: a.is_whole && input(2).is_whole, ..a.join(input(1)) },
            "Where" => input(1).join(input(2)),
            "OneHot" => input(2),
            "Add" | "Sum" => folded(|a, b| a.ends(b, |x, y| x + y)),
            "Sub" => folded(|a, b| a.ends(b, |x, y| x - y)),
            "Mul" => folded(|a, b| a.ends(b, |x, y| if x == 0.0 || y == 0.0 { 0.0 } else { x * y })),
            "Max" => folded(|a, b| Range { low: a.low.max(b.low), high: a.high.max(b.high), ..a.join(b) }),
            "Min" => folded(|a, b| Range { low: a.low.min(b.low), high: a.high.min(b.high), ..a.join(b) }),
            "Clip" => {
                let attribute = |name: &str| {
                    let own = node.attribute.iter().find(|a| a.name.as_deref() == Some(name));
                    own.and_then(|a| a.f).map(|x| Range { is_whole: x.fract() == 0.0, ..Range::of(x.into(), x.into()) })
                };
                let (least, most) =
                    (self.input(node, 1).or(attribute("min")), self.input(node, 2).or(attribute("max")));
                let is_whole = [Some(a), least, most].into_iter().flatten().all(|range| range.is_whole);
                let a = Range { is_whole, ..a };
                let low = least.map_or(a, |x| Range { low: a.low.max(x.low), high: a.high.max(x.high), ..a });
                most.map_or(low, |x| Range { low: low.low.min(x.low), high: low.high.min(x.high), ..low })
            }
            "Div" if a.is_whole && (input(1).low >= 1.0 || input(1).high <= -1.0) => {
                let most = a.high.max(-a.low);
                let low = if a.low >= 0.0 && input(1).low > 0.0 { 0.0 } else { -most };
                // Only a division of integers has integer results.
                Range { low, high: most, is_whole: false, ..a }
            }
            "Mod" => {
                let by = input(1);
                let most = by.high.max(-by.low);
                Range { low: if a.low >= 0.0 && by.low >= 0.0 { 0.0 } else { -most }, high: most, ..a.join(by) }
            }
            "ReduceSum" | "CumSum" => counted(a),
            "ReduceL1" | "ReduceSumSquare" if a.low >= 0.0 && a.high <= 1.0 => counted(a),
            "ReduceMax" | "ReduceMin" => a,
            "ReduceMean" => Range { is_whole: false, ..a },
            "MatMul" | "Gemm" | "Einsum" => {
                let mut factors = node.attribute.iter().filter_map(|attribute| attribute.f);
                let is_whole = all().all(|range| range.is_whole) && factors.all(|x| x.fract() == 0.0);
                Range { is_whole, ..Range::ANY }
            }
            // The results are numbers of the first input, of the updates, or padding.
            "Pad" | "ScatterElements" | "ScatterND" | "Scatter" | "GatherElements" | "Gather" | "GatherND" => {
                let others = if operator == "Pad" { Some(input(2)).filter(|_| node.input.len() > 2) } else { None };
                let updates = operator.starts_with("Scatter").then(|| input(2));
                let zero = (operator == "Pad").then(|| Range::of(0.0, 0.0).whole());
                [others, updates, zero].into_iter().flatten().fold(a, Range::join)
            }
            "Concat" => folded(Range::join),
            "Cast" | "CastLike" => a,
            _ if moves(operator) => a,
            _ => Range::ANY,
        };
        // Sizes, and values computed from sizes and constants, are the same for all rows, so sample rows reveal
        // deviations.
        let is_of_shapes = !is_data && !matches!(operator, "Constant" | "ConstantOfShape");
        let constants = all().all(|range| range.fits());
        match is_of_shapes && constants && !made.fits() {
            true => Range { low: LEAST, high: MOST, is_data, ..made },
            false => Range { is_data, ..made },
        }
    }
}

fn is_integer(kind: DataType) -> bool {
    !matches!(kind, DataType::FLOAT | DataType::DOUBLE | DataType::FLOAT16 | DataType::BFLOAT16)
}

/// Returns whether an operator's results are among the numbers of the first input.
fn moves(operator: &str) -> bool {
    matches!(
        operator,
        "Identity" | "Constant" | "ConstantOfShape" | "Reshape" | "Flatten" | "Squeeze" | "Unsqueeze" | "Transpose"
    ) || matches!(operator, "Slice" | "Split" | "Expand" | "Tile" | "Gather" | "GatherND" | "GatherElements" | "Concat")
        || matches!(operator, "Pad" | "ScatterElements" | "ScatterND" | "Trilu" | "ReverseSequence" | "Dropout")
}

/// Returns whether an operator with a saturated integer as input `n` returns that integer, or the correct result. Such
/// operators move numbers, select extremes, or index with the integer, which selects nothing in either case.
fn keeps_saturated(operator: &str, n: usize) -> bool {
    match operator {
        "Max" | "Min" | "Clip" | "ReduceMax" | "ReduceMin" | "Shape" | "Size" => true,
        "Where" => n > 0,
        "OneHot" => n == 0,
        _ => moves(operator) || (sets_shape(operator, n) && n > 0),
    }
}

fn of_tensor(tensor: &TensorProto) -> Range {
    let of = |low: f64, high: f64| Range { is_data: false, ..Range::of(low, high) };
    let unknown = Range { is_data: false, ..Range::ANY };
    let raw = tensor.raw_data.as_ref().map(|raw| raw.borrow());
    let joined = |all: &mut dyn Iterator<Item = f64>| {
        let (low, high, is_whole) = all.fold((f64::INFINITY, f64::NEG_INFINITY, true), |(low, high, is_whole), x| {
            (low.min(x), high.max(x), is_whole && x.fract() == 0.0)
        });
        match low <= high {
            true => Range { is_whole, ..of(low, high) },
            false => of(0.0, 0.0).whole(),
        }
    };
    match tensor.data_type {
        Some(DataType::INT64) => integers(tensor).map_or(unknown, |all| joined(&mut all.iter().map(|&n| n as f64))),
        Some(DataType::INT32) => of(LEAST, MOST).whole(),
        Some(DataType::BOOL) => of(0.0, 1.0).whole(),
        Some(DataType::FLOAT) => match raw {
            Some(raw) => joined(&mut raw.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b)))),
            None => joined(&mut tensor.float_data.iter().map(|&x| f64::from(x))),
        },
        Some(DataType::INT8 | DataType::UINT8) => of(-128.0, 255.0).whole(),
        _ => unknown,
    }
}

fn constant_range(node: &NodeProto) -> Range {
    if let Some(tensor) = constant(node) {
        return of_tensor(tensor);
    }
    let all: Vec<f64> = node
        .attribute
        .iter()
        .flat_map(|a| {
            let integers = a.i.iter().chain(&a.ints).map(|&n| n as f64);
            integers.chain(a.f.iter().chain(&a.floats).map(|&x| f64::from(x))).collect::<Vec<_>>()
        })
        .collect();
    let low = all.iter().copied().fold(f64::INFINITY, f64::min);
    let high = all.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    Range { is_data: false, is_whole: all.iter().all(|x| x.fract() == 0.0), ..Range::of(low, high) }
}

#[cfg(test)]
mod tests;
