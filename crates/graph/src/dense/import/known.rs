//! Known values of a graph during import, and access to a node's inputs and attributes.

use std::collections::{HashMap, HashSet};

use half::{bf16, f16};
use rten_onnx::onnx::{AttributeProto, DataLocation, DataType, GraphProto, NodeProto, TensorProto};

use super::types::ElementTypes;
use crate::dense::graph::Graph;
use crate::dense::ir::{GraphInput, Id, Op, Side};
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::dense::{Binary, Fold, Unary};

/// Size of a dimension of an input or an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// Constant size.
    Fixed(i64),
    /// Number of rows.
    Rows,
}

/// An input that the caller provides.
#[derive(Clone, Debug)]
pub struct DeclaredInput {
    /// Name in the file.
    pub name: String,
    /// True if the input has values per row.
    pub is_pair: bool,
    /// Dimensions.
    pub shape: Vec<Size>,
}

/// An output that the caller expects.
#[derive(Clone, Debug)]
pub struct DeclaredOutput {
    /// Name in the file.
    pub name: String,
    /// Dimensions.
    pub shape: Vec<Size>,
}

/// An integer that the importer evaluates: a dimension, an axis, an index. It may be a multiple of the number
/// of rows of a batch, which is unknown until the graph runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    Fixed(i64),
    /// This many times the number of rows.
    Rows(i64),
}

/// Integers and the shape of their tensor.
#[derive(Clone, Debug)]
pub(super) struct IntegerTensor {
    pub(super) extents: Vec<Extent>,
    pub(super) shape: Vec<usize>,
    /// True if the integers are booleans.
    pub(super) are_truths: bool,
}

impl IntegerTensor {
    pub(super) fn new(shape: Vec<usize>, extents: Vec<Extent>) -> Self {
        IntegerTensor { extents, shape, are_truths: false }
    }

    /// Returns integers along one axis.
    pub(super) fn vector(extents: Vec<Extent>) -> Self {
        IntegerTensor::new(vec![extents.len()], extents)
    }
}

/// Knowledge of the importer about a named value. Booleans are the numbers 1 and 0.
#[derive(Clone, Debug)]
pub(super) enum Known {
    Value(Id),
    Integers(IntegerTensor),
    RowNumbers(RowNumbers),
    /// Index tuples for `GatherND`, as columns along the last axis; the first column is the row's own index.
    Columns(Vec<Known>),
}

/// Index of a row times `times`, plus `plus`. With `times` = 0 only the shape is known, and the value cannot select
/// anything.
#[derive(Clone, Debug)]
pub(super) struct RowNumbers {
    pub(super) times: i64,
    /// Added value of the same shape; `None` adds 0.
    pub(super) plus: Option<Id>,
    pub(super) shape: Vec<usize>,
    /// Axis of the rows.
    pub(super) rows: usize,
}

/// Limit up to which f32 represents all integers exactly.
pub(super) const WHOLE_MAX: u64 = 1 << 24;

pub(super) fn refused(what: impl Into<String>) -> Error {
    Error::unsupported(what)
}

/// Resolves an axis or index; a negative one counts from the end.
pub(super) fn place(n: i64, of: usize) -> Result<usize> {
    let place = if n < 0 { n.saturating_add(of as i64) } else { n };
    usize::try_from(place)
        .ok()
        .filter(|&n| n < of)
        .ok_or_else(|| refused(format!("axis or index {n} is out of range, expected one below {of}")))
}

/// Attributes of a node; `finish` rejects attributes that were not read.
pub(super) struct Attributes<'a> {
    pub(super) all: Vec<&'a AttributeProto>,
}

impl<'a> Attributes<'a> {
    pub(super) fn take(&mut self, name: &str) -> Option<&'a AttributeProto> {
        let at = self.all.iter().position(|a| a.name.as_deref() == Some(name))?;
        Some(self.all.swap_remove(at))
    }

    pub(super) fn integer(&mut self, name: &str, default: i64) -> i64 {
        self.take(name).map_or(default, |a| a.i.unwrap_or(0))
    }

    pub(super) fn float(&mut self, name: &str, default: f32) -> f32 {
        self.take(name).map_or(default, |a| a.f.unwrap_or(0.0))
    }

    pub(super) fn text(&mut self, name: &str, default: &str) -> String {
        self.take(name).and_then(|a| a.s.clone()).unwrap_or_else(|| default.into())
    }

    pub(super) fn integers(&mut self, name: &str) -> Option<Vec<i64>> {
        self.take(name).map(|a| a.ints.clone())
    }

    pub(super) fn finish(&self) -> Result<()> {
        match self.all.first() {
            Some(left) => Err(refused(format!("attribute `{}` is not supported", left.name.as_deref().unwrap_or("")))),
            None => Ok(()),
        }
    }
}

/// State of an import.
pub(super) struct Importer {
    pub(super) graph: Graph,
    pub(super) known: HashMap<String, Known>,
    /// For values whose row axis is merged with other axes (`rows x heads`): product of the merged sizes that come before the
    /// rows.
    pub(super) outer: HashMap<Id, usize>,
    /// Per expanded value, the value before the expansion, which operations that broadcast use instead.
    pub(super) expanded: HashMap<Id, Id>,
    /// Names that a node reads or the graph returns.
    pub(super) read: HashSet<String>,
    /// Values that hold integers.
    pub(super) whole: HashSet<Id>,
    /// Values that are a transposed copy of another value: that value and the order of its axes. Convolutions compute
    /// channels last.
    pub(super) turned: HashMap<Id, (Id, Vec<usize>)>,
    /// Values that are a zero-padded copy of another value: that value and, per axis, how many zeros come before and
    /// after.
    pub(super) padded: HashMap<Id, (Id, Vec<[usize; 2]>)>,
    /// Integers that may exceed the exact range of f32, which only indices and clipping may read.
    pub(super) loose: HashSet<Id>,
    /// Per input, true if the input is a mask of another input, of 0 and 1.
    masks: Vec<bool>,
    /// Least and largest number of each value whose range was computed.
    ranges: Vec<(f64, f64)>,
    /// Element types of the file's values.
    pub(super) types: ElementTypes,
    pub(super) opset: i64,
}

impl Importer {
    pub(super) fn new(given: &[DeclaredInput], opset: i64) -> Self {
        let one = |size: &Size| if let Size::Fixed(n) = size { usize::try_from(*n).unwrap_or(0) } else { 1 };
        let input = |g: &DeclaredInput| GraphInput {
            side: if g.is_pair { Side::Pair } else { Side::User },
            shape: g.shape.iter().map(one).collect(),
            rows: g.shape.iter().position(|size| *size == Size::Rows),
        };
        let is_mask = |g: &DeclaredInput| {
            let of = g.name.strip_suffix("_mask");
            of.is_some_and(|of| given.iter().any(|other| other.name == of && other.shape.len() == g.shape.len() + 1))
        };
        Importer {
            graph: Graph::new(given.iter().map(input).collect()),
            known: HashMap::new(),
            outer: HashMap::new(),
            expanded: HashMap::new(),
            read: HashSet::new(),
            whole: HashSet::new(),
            turned: HashMap::new(),
            padded: HashMap::new(),
            loose: HashSet::new(),
            masks: given.iter().map(is_mask).collect(),
            ranges: Vec::new(),
            types: ElementTypes::default(),
            opset,
        }
    }

    pub(super) fn initial(&mut self, proto: &GraphProto, given: &[DeclaredInput]) -> Result<()> {
        let read =
            proto.node.iter().flat_map(|node| &node.input).chain(proto.output.iter().filter_map(|o| o.name.as_ref()));
        self.read = read.cloned().collect();
        for tensor in &proto.initializer {
            let name = tensor.name.clone().unwrap_or_default();
            if let Some(kind) = tensor.data_type {
                self.types.insert(&name, kind);
            }
            // A tensor of an unsupported type is rejected at the node that reads the tensor.
            if let Ok(known) = self.tensor(tensor) {
                self.known.insert(name, known);
            }
        }
        for (n, input) in given.iter().enumerate() {
            let id = self.graph.input(n)?;
            self.types.insert(&input.name, DataType::FLOAT);
            self.known.insert(input.name.clone(), Known::Value(id));
        }
        Ok(())
    }

    pub(super) fn tensor(&mut self, tensor: &TensorProto) -> Result<Known> {
        if tensor.data_location == Some(DataLocation::EXTERNAL) {
            return Err(refused("a tensor is in another file, expected it in the graph's file"));
        }
        let shape: Option<Vec<usize>> = tensor.dims.iter().map(|&d| usize::try_from(d).ok()).collect();
        let shape = shape
            .ok_or_else(|| refused(format!("a tensor has shape {:?}, expected no negative sizes", tensor.dims)))?;
        let raw = tensor.raw_data.as_ref().map(|raw| raw.borrow());
        let small = || tensor.int32_data.iter().map(|&n| (n as u16).to_le_bytes()).collect::<Vec<_>>();
        match tensor.data_type {
            Some(DataType::FLOAT) => {
                let numbers = match &raw {
                    Some(raw) => raw.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
                    None => tensor.float_data.clone(),
                };
                Ok(Known::Value(self.graph.number(shape, numbers)?))
            }
            Some(DataType::DOUBLE) => {
                let numbers: Vec<f64> = match &raw {
                    Some(raw) => raw.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
                    None => tensor.double_data.clone(),
                };
                if let Some(large) = numbers.iter().find(|x| x.is_finite() && !(**x as f32).is_finite()) {
                    return Err(refused(format!("got the number {large:e}, expected numbers in the range of f32")));
                }
                Ok(Known::Value(self.graph.number(shape, numbers.iter().map(|&x| x as f32).collect())?))
            }
            Some(kind @ (DataType::FLOAT16 | DataType::BFLOAT16)) => {
                let bits = raw.as_ref().map_or_else(small, |raw| raw.as_chunks::<2>().0.to_vec());
                let single = |bits: &[u8; 2]| match kind {
                    DataType::FLOAT16 => f16::from_le_bytes(*bits).to_f32(),
                    _ => bf16::from_le_bytes(*bits).to_f32(),
                };
                Ok(Known::Value(self.graph.number(shape, bits.iter().map(single).collect())?))
            }
            Some(DataType::BOOL) => {
                let truth = |holds: bool| f32::from(u8::from(holds));
                let truths = match &raw {
                    Some(raw) => raw.iter().map(|&b| truth(b != 0)).collect(),
                    None => tensor.int32_data.iter().map(|&n| truth(n != 0)).collect(),
                };
                Ok(Known::Value(self.graph.number(shape, truths)?))
            }
            Some(
                kind @ (DataType::INT64
                | DataType::INT32
                | DataType::INT16
                | DataType::UINT16
                | DataType::INT8
                | DataType::UINT8),
            ) => {
                let integers: Vec<i64> = match (&raw, kind) {
                    (Some(raw), DataType::INT64) => {
                        raw.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect()
                    }
                    (Some(raw), DataType::INT32) => {
                        raw.as_chunks::<4>().0.iter().map(|b| i64::from(i32::from_le_bytes(*b))).collect()
                    }
                    (Some(raw), DataType::INT16) => {
                        raw.as_chunks::<2>().0.iter().map(|b| i64::from(i16::from_le_bytes(*b))).collect()
                    }
                    (Some(raw), DataType::UINT16) => {
                        raw.as_chunks::<2>().0.iter().map(|b| i64::from(u16::from_le_bytes(*b))).collect()
                    }
                    (Some(raw), DataType::INT8) => raw.iter().map(|&b| i64::from(b as i8)).collect(),
                    (Some(raw), _) => raw.iter().map(|&b| i64::from(b)).collect(),
                    (None, DataType::INT64) => tensor.int64_data.clone(),
                    (None, _) => tensor.int32_data.iter().map(|&n| i64::from(n)).collect(),
                };
                if shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)) != Some(integers.len()) {
                    return Err(refused(format!("a tensor of shape {shape:?} has {} integers", integers.len())));
                }
                let extents = integers.into_iter().map(Extent::Fixed).collect();
                Ok(Known::Integers(IntegerTensor::new(shape, extents)))
            }
            other => Err(refused(format!("tensors of type {other:?} are not supported"))),
        }
    }

    pub(super) fn known(&self, node: &NodeProto, n: usize) -> Result<&Known> {
        let name = node.input.get(n).filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| refused(format!("input {n} is missing")))?;
        self.known
            .get(name)
            .ok_or_else(|| refused(format!("input `{name}` is computed by no earlier node, or has no known type")))
    }

    /// Returns an input of a node as a float tensor of the graph.
    pub(super) fn value(&self, node: &NodeProto, n: usize) -> Result<Id> {
        match self.known(node, n)? {
            Known::Value(id) => Ok(*id),
            Known::Integers(_) => {
                Err(refused(format!("input {n} has integers computed from shapes, expected a tensor of floats")))
            }
            Known::RowNumbers(_) | Known::Columns(_) => {
                Err(refused(format!("input {n} has row numbers, expected a tensor of floats")))
            }
        }
    }

    /// Returns an input of a node as a float tensor, converting integers computed from shapes.
    pub(super) fn number(&mut self, node: &NodeProto, n: usize) -> Result<Id> {
        let known = self.known(node, n)?.clone();
        self.number_of(&known)
    }

    /// Returns a float tensor; integers are converted.
    pub(super) fn number_of(&mut self, known: &Known) -> Result<Id> {
        let integers = match known {
            Known::Value(id) => return Ok(*id),
            Known::Integers(integers) => integers,
            Known::RowNumbers(_) | Known::Columns(_) => {
                return Err(refused("row numbers are not supported as operands"));
            }
        };
        let numbers = fixed(integers)?;
        if let Some(large) = numbers.iter().find(|n| n.unsigned_abs() > WHOLE_MAX) {
            return Err(refused(format!("got the integer {large}, expected a magnitude up to {WHOLE_MAX} for f32")));
        }
        let id = self.graph.number(integers.shape.clone(), numbers.iter().map(|&n| n as f32).collect())?;
        if !integers.are_truths {
            self.whole.insert(id);
        }
        Ok(id)
    }

    pub(super) fn extents(&self, node: &NodeProto, n: usize) -> Result<&IntegerTensor> {
        match self.known(node, n)? {
            Known::Integers(integers) => Ok(integers),
            _ => Err(refused(format!("input {n}: got floats, expected integers computed from shapes"))),
        }
    }

    pub(super) fn fixed(&self, node: &NodeProto, n: usize) -> Result<Vec<i64>> {
        fixed(self.extents(node, n)?)
    }

    pub(super) fn has(node: &NodeProto, n: usize) -> bool {
        node.input.get(n).is_some_and(|name| !name.is_empty())
    }

    /// Returns axes from the attribute `axes`, or from input `n`.
    pub(super) fn axes(&self, node: &NodeProto, attributes: &mut Attributes<'_>, n: usize) -> Result<Option<Vec<i64>>> {
        match attributes.integers("axes") {
            Some(axes) => Ok(Some(axes)),
            None if Importer::has(node, n) => self.fixed(node, n).map(Some),
            None => Ok(None),
        }
    }

    pub(super) fn rank(&self, id: Id) -> usize {
        self.graph.shape(id).len()
    }

    pub(super) fn axis(&self, a: Id, axis: i64) -> Result<usize> {
        place(axis, self.rank(a))
    }

    pub(super) fn rows(&self, id: Id) -> Option<usize> {
        self.graph.values[id].rows
    }

    /// Returns an upper bound of the magnitude of a value's numbers, for all possible inputs of the graph.
    pub(super) fn bound(&mut self, id: Id) -> f64 {
        let (least, most) = self.span(id);
        most.max(-least)
    }

    /// Returns the least and the largest number that a value can have.
    pub(super) fn span(&mut self, id: Id) -> (f64, f64) {
        while self.ranges.len() <= id {
            let range = self.range_of(self.ranges.len());
            self.ranges.push(range);
        }
        self.ranges[id]
    }

    /// Computes the range of a value from the ranges of the value's operands.
    fn range_of(&self, id: Id) -> (f64, f64) {
        let of = |id: Id| self.ranges[id];
        let product = |a: f64, b: f64| if a == 0.0 || b == 0.0 { 0.0 } else { a * b };
        let products = |(a, b): (f64, f64), (c, d): (f64, f64)| {
            let all = [product(a, c), product(a, d), product(b, c), product(b, d)];
            (all.into_iter().fold(f64::INFINITY, f64::min), all.into_iter().fold(f64::NEG_INFINITY, f64::max))
        };
        let joined = |(a, b): (f64, f64), (c, d): (f64, f64)| (a.min(c), b.max(d));
        let last = |id: Id| self.graph.shape(id).last().copied().unwrap_or(1) as f64;
        const UNKNOWN: (f64, f64) = (f64::NEG_INFINITY, f64::INFINITY);
        match &self.graph.values[id].op {
            Op::Constant(numbers) => {
                numbers.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |all, &x| joined(all, (x.into(), x.into())))
            }
            Op::Inputs(n) if self.masks[*n] => (0.0, 1.0),
            Op::Unary(Unary::Not | Unary::IsNan | Unary::Sigmoid, _) => (0.0, 1.0),
            Op::Unary(Unary::Tanh | Unary::Erf | Unary::Sin | Unary::Cos, _) => (-1.0, 1.0),
            Op::Unary(Unary::Trunc, a) => of(*a),
            Op::Unary(Unary::Neg, a) => (-of(*a).1, -of(*a).0),
            Op::Unary(Unary::Relu, a) => (of(*a).0.max(0.0), of(*a).1.max(0.0)),
            Op::Unary(Unary::Abs, a) => (0.0, of(*a).1.max(-of(*a).0)),
            Op::Binary(Binary::Equal | Binary::Less | Binary::LessOrEqual, ..) => (0.0, 1.0),
            Op::Binary(Binary::Add, a, b) => (of(*a).0 + of(*b).0, of(*a).1 + of(*b).1),
            Op::Binary(Binary::Sub, a, b) => (of(*a).0 - of(*b).1, of(*a).1 - of(*b).0),
            Op::Binary(Binary::Mul, a, b) => products(of(*a), of(*b)),
            Op::Binary(Binary::Div, a, b) if of(*b).0 >= 1.0 => (of(*a).0.min(0.0), of(*a).1.max(0.0)),
            Op::Binary(Binary::Max, a, b) => (of(*a).0.max(of(*b).0), of(*a).1.max(of(*b).1)),
            Op::Binary(Binary::Min, a, b) => (of(*a).0.min(of(*b).0), of(*a).1.min(of(*b).1)),
            Op::Binary(Binary::Keep | Binary::Drop, _, b) => joined(of(*b), (0.0, 0.0)),
            Op::MatMul(a, b) => products((last(*a), last(*a)), products(of(*a), of(*b))),
            Op::Fold(Fold::Sum, a) => products((last(*a), last(*a)), of(*a)),
            Op::Fold(_, a) | Op::Pick(a, _) | Op::Reshape(a) => of(*a),
            Op::Concat(_, parts) => parts.iter().map(|&part| of(part)).reduce(joined).unwrap_or(UNKNOWN),
            Op::Binary(Binary::Rem, _, b) => (-of(*b).1.max(-of(*b).0), of(*b).1.max(-of(*b).0)),
            Op::Inputs(_)
            | Op::Unary(..)
            | Op::Binary(Binary::Div | Binary::Pow, ..)
            | Op::Linear { .. }
            | Op::Spread(..)
            | Op::Recurrent(_) => UNKNOWN,
        }
    }

    pub(super) fn scalar(&mut self, x: f32) -> Result<Id> {
        self.graph.number(Vec::new(), vec![x])
    }
}

/// Returns integers as numbers; rejects those that depend on the number of rows, which is unknown until the graph runs.
pub(super) fn fixed(integers: &IntegerTensor) -> Result<Vec<i64>> {
    let fixed = |extent: &Extent| match extent {
        Extent::Fixed(n) => Ok(*n),
        Extent::Rows(_) => Err(refused("the number of candidates is not supported as an index")),
    };
    integers.extents.iter().map(fixed).collect()
}
