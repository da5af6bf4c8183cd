//! From ONNX to a graph: each operator of the table in `models/README.md` becomes a few operations, and what is not in it is
//! refused by its name.
//!
//! Shapes are known but for the number of rows, which [`Size::Rows`] stands for. Integers (shapes, axes, indices) are
//! followed as they are made and never become values.

use std::collections::HashMap;

use rten_onnx::onnx::{AttributeProto, DataLocation, DataType, GraphProto, ModelProto, NodeProto, TensorProto};

use super::graph::Graph;
use super::ir::{GraphInput, Id, Side, positions, strides};
use crate::device::cpu::dense::{Binary, Fold, Unary};
use crate::error::{Error, Result};

/// Most nodes of a graph.
const NODES_MAX: usize = 20_000;

/// A dimension of an input, or an integer of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// So many.
    Fixed(i64),
    /// As many as there are rows.
    Rows,
}

/// An input as the caller will bring it.
#[derive(Clone, Debug)]
pub struct Given {
    /// The name in the file.
    pub name: String,
    /// Whether each row has its own.
    pub is_pair: bool,
    /// Its dimensions.
    pub shape: Vec<Size>,
}

/// An output as the caller expects it.
#[derive(Clone, Debug)]
pub struct Made {
    /// The name in the file.
    pub name: String,
    /// Its dimensions.
    pub shape: Vec<Size>,
}

/// What a name stands for.
#[derive(Clone, Debug)]
enum Known {
    Value(Id),
    /// Integers; a scalar where there is no axis.
    Integers(Vec<Size>, bool),
}

fn refused(what: impl Into<String>) -> Error {
    Error::unsupported(what)
}

/// Reads a graph whose inputs come as `given`.
///
/// # Errors
/// `Unsupported` with the operator, the attribute or the shape that is not in the table.
pub(super) fn import(bytes: &[u8], given: &[Given], outputs: &[Made]) -> Result<Graph> {
    let model = ModelProto::parse_buf(bytes).map_err(|e| refused(format!("no ONNX: {e}")))?;
    let standard = |domain: &Option<String>| domain.as_deref().is_none_or(|d| d.is_empty() || d == "ai.onnx");
    let opset = model.opset_import.iter().find(|o| standard(&o.domain)).and_then(|o| o.version).unwrap_or(1);
    let proto = model.graph.ok_or_else(|| refused("a file without a graph"))?;
    if proto.node.len() > NODES_MAX {
        return Err(refused(format!("{} nodes, expected at most {NODES_MAX}", proto.node.len())));
    }
    let mut importer = Importer { graph: Graph::new(inputs(given)), known: HashMap::new(), opset };
    importer.initial(&proto, given)?;
    for node in &proto.node {
        let operator = node.op_type.as_deref().unwrap_or("");
        if !standard(&node.domain) {
            return Err(refused(format!("operator `{operator}` of `{}`", node.domain.as_deref().unwrap_or(""))));
        }
        importer.node(operator, node).map_err(|e| {
            let node = node.name.as_deref().filter(|n| !n.is_empty()).map_or(String::new(), |n| format!(" `{n}`"));
            e.within(format!("operator `{operator}`{node}"))
        })?;
    }
    let id = |output: &Made| match importer.known.get(&output.name) {
        Some(Known::Value(id)) => Ok(*id),
        _ => Err(refused(format!("no output `{}` of numbers", output.name))),
    };
    importer.graph.outputs = outputs.iter().map(id).collect::<Result<_>>()?;
    Ok(importer.graph)
}

fn inputs(given: &[Given]) -> Vec<GraphInput> {
    let one = |size: &Size| if let Size::Fixed(n) = size { *n as usize } else { 1 };
    let input = |g: &Given| GraphInput {
        side: if g.is_pair { Side::Pair } else { Side::User },
        shape: g.shape.iter().map(one).collect(),
        rows: g.shape.iter().position(|size| *size == Size::Rows),
    };
    given.iter().map(input).collect()
}

struct Importer {
    graph: Graph,
    known: HashMap<String, Known>,
    opset: i64,
}

/// The attributes of a node; what is not asked for is refused at the end.
struct Attributes<'a> {
    all: Vec<&'a AttributeProto>,
}

impl<'a> Attributes<'a> {
    fn take(&mut self, name: &str) -> Option<&'a AttributeProto> {
        let at = self.all.iter().position(|a| a.name.as_deref() == Some(name))?;
        Some(self.all.swap_remove(at))
    }

    fn integer(&mut self, name: &str, default: i64) -> i64 {
        self.take(name).map_or(default, |a| a.i.unwrap_or(0))
    }

    fn float(&mut self, name: &str, default: f32) -> f32 {
        self.take(name).map_or(default, |a| a.f.unwrap_or(0.0))
    }

    fn integers(&mut self, name: &str) -> Option<Vec<i64>> {
        self.take(name).map(|a| a.ints.clone())
    }

    fn finish(&self) -> Result<()> {
        match self.all.first() {
            Some(left) => Err(refused(format!("attribute `{}`", left.name.as_deref().unwrap_or("")))),
            None => Ok(()),
        }
    }
}

impl Importer {
    fn initial(&mut self, proto: &GraphProto, given: &[Given]) -> Result<()> {
        for tensor in &proto.initializer {
            let name = tensor.name.clone().unwrap_or_default();
            // Tensors of other types are refused where a node reads them.
            if let Ok(known) = self.tensor(tensor) {
                self.known.insert(name, known);
            }
        }
        for (n, input) in given.iter().enumerate() {
            let id = self.graph.input(n)?;
            self.known.insert(input.name.clone(), Known::Value(id));
        }
        Ok(())
    }

    fn tensor(&mut self, tensor: &TensorProto) -> Result<Known> {
        if tensor.data_location == Some(DataLocation::EXTERNAL) {
            return Err(refused("a tensor in another file"));
        }
        let shape: Option<Vec<usize>> = tensor.dims.iter().map(|&d| usize::try_from(d).ok()).collect();
        let shape = shape.ok_or_else(|| refused(format!("a tensor of shape {:?}", tensor.dims)))?;
        let raw = tensor.raw_data.as_ref().map(|raw| raw.borrow());
        match tensor.data_type {
            Some(DataType::FLOAT) => {
                let numbers = match &raw {
                    Some(raw) => raw.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
                    None => tensor.float_data.clone(),
                };
                Ok(Known::Value(self.graph.number(shape, numbers)?))
            }
            Some(DataType::INT64) => {
                let integers: Vec<i64> = match &raw {
                    Some(raw) => raw.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
                    None => tensor.int64_data.clone(),
                };
                if shape.len() > 1 || integers.len() != shape.iter().product::<usize>() {
                    return Err(refused(format!("integers of shape {shape:?}")));
                }
                Ok(Known::Integers(integers.into_iter().map(Size::Fixed).collect(), shape.is_empty()))
            }
            other => Err(refused(format!("a tensor of type {other:?}"))),
        }
    }

    fn known(&self, node: &NodeProto, n: usize) -> Result<&Known> {
        let name = node.input.get(n).filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| refused(format!("without input {n}")))?;
        self.known.get(name).ok_or_else(|| refused(format!("input `{name}`, which is of no known type or made later")))
    }

    fn value(&self, node: &NodeProto, n: usize) -> Result<Id> {
        match self.known(node, n)? {
            Known::Value(id) => Ok(*id),
            Known::Integers(..) => Err(refused(format!("integers as input {n}"))),
        }
    }

    fn sizes(&self, node: &NodeProto, n: usize) -> Result<Vec<Size>> {
        match self.known(node, n)? {
            Known::Integers(sizes, _) => Ok(sizes.clone()),
            Known::Value(_) => Err(refused(format!("numbers as input {n}, expected integers"))),
        }
    }

    fn fixed(&self, node: &NodeProto, n: usize) -> Result<Vec<i64>> {
        let fixed = |size: Size| match size {
            Size::Fixed(n) => Ok(n),
            Size::Rows => Err(refused("the number of candidates as an index")),
        };
        self.sizes(node, n)?.into_iter().map(fixed).collect()
    }

    fn has(node: &NodeProto, n: usize) -> bool {
        node.input.get(n).is_some_and(|name| !name.is_empty())
    }

    /// Axes from an attribute, or from input `n`.
    fn axes(&self, node: &NodeProto, attributes: &mut Attributes<'_>, n: usize) -> Result<Option<Vec<i64>>> {
        match attributes.integers("axes") {
            Some(axes) => Ok(Some(axes)),
            None if Importer::has(node, n) => self.fixed(node, n).map(Some),
            None => Ok(None),
        }
    }

    fn rank(&self, id: Id) -> usize {
        self.graph.shape(id).len()
    }

    fn node(&mut self, operator: &str, node: &NodeProto) -> Result<()> {
        let attributes = &mut Attributes { all: node.attribute.iter().collect() };
        if node.output.iter().filter(|o| !o.is_empty()).count() != 1 {
            return Err(refused(format!("{} outputs, expected 1", node.output.len())));
        }
        let made = match self.integers(operator, node, attributes)? {
            Some(known) => known,
            None => Known::Value(self.numbers(operator, node, attributes)?),
        };
        attributes.finish()?;
        self.known.insert(node.output[0].clone(), made);
        Ok(())
    }

    /// The operators that make or move integers, constants among them.
    fn integers(&mut self, operator: &str, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Option<Known>> {
        if operator == "Constant" {
            let tensor = attributes.take("value").and_then(|a| a.t.as_ref());
            return self.tensor(tensor.ok_or_else(|| refused("without a `value`"))?).map(Some);
        }
        if operator == "Shape" {
            let id = self.value(node, 0)?;
            let (rows, rank) = (self.graph.values[id].rows, self.rank(id) as i64);
            let size =
                |(axis, &d): (usize, &usize)| if rows == Some(axis) { Size::Rows } else { Size::Fixed(d as i64) };
            let bound = |n: i64| if n < 0 { n.saturating_add(rank) } else { n }.clamp(0, rank) as usize;
            let (start, end) = (bound(attributes.integer("start", 0)), bound(attributes.integer("end", rank)));
            let sizes = self.graph.shape(id).iter().enumerate().map(size);
            return Ok(Some(Known::Integers(sizes.take(end).skip(start).collect(), false)));
        }
        if operator == "Identity" {
            return self.known(node, 0).cloned().map(Some);
        }
        let first = node.input.first().and_then(|name| self.known.get(name));
        let Some(Known::Integers(sizes, _)) = first.cloned() else { return Ok(None) };
        let at = |n: i64| {
            let place = if n < 0 { n + sizes.len() as i64 } else { n };
            sizes.get(place as usize).copied().ok_or_else(|| refused(format!("index {n} of {} integers", sizes.len())))
        };
        match operator {
            "Gather" => {
                attributes.integer("axis", 0);
                let is_scalar = matches!(self.known(node, 1)?, Known::Integers(_, true));
                let picked = self.fixed(node, 1)?.into_iter().map(at).collect::<Result<_>>()?;
                Ok(Some(Known::Integers(picked, is_scalar)))
            }
            "Concat" => {
                attributes.integer("axis", 0);
                let parts = (0..node.input.len()).map(|n| self.sizes(node, n)).collect::<Result<Vec<_>>>()?;
                Ok(Some(Known::Integers(parts.concat(), false)))
            }
            "Unsqueeze" | "Squeeze" => {
                self.axes(node, attributes, 1)?;
                Ok(Some(Known::Integers(sizes, operator == "Squeeze")))
            }
            _ => Err(refused("over integers")),
        }
    }

    fn numbers(&mut self, operator: &str, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Id> {
        let a = self.value(node, 0)?;
        let unary = match operator {
            "Relu" => Some(Unary::Relu),
            "Sigmoid" => Some(Unary::Sigmoid),
            "Tanh" => Some(Unary::Tanh),
            "Exp" => Some(Unary::Exp),
            "Log" => Some(Unary::Log),
            "Sqrt" => Some(Unary::Sqrt),
            "Abs" => Some(Unary::Abs),
            "Neg" => Some(Unary::Neg),
            "Reciprocal" => Some(Unary::Reciprocal),
            _ => None,
        };
        if let Some(f) = unary {
            return self.graph.unary(f, a);
        }
        let binary = match operator {
            "Add" | "Sum" => Some(Binary::Add),
            "Sub" => Some(Binary::Sub),
            "Mul" => Some(Binary::Mul),
            "Div" => Some(Binary::Div),
            "Max" => Some(Binary::Max),
            "Min" => Some(Binary::Min),
            _ => None,
        };
        if let Some(f) = binary {
            return (1..node.input.len()).try_fold(a, |a, n| self.graph.binary(f, a, self.value(node, n)?));
        }
        match operator {
            "MatMul" => self.graph.matmul(a, self.value(node, 1)?),
            "Gemm" => self.gemm(node, attributes),
            "Concat" => {
                let axis = self.axis(a, attributes.integer("axis", 0))?;
                let parts: Vec<Id> = (0..node.input.len()).map(|n| self.value(node, n)).collect::<Result<_>>()?;
                self.graph.concat(axis, &parts)
            }
            "ReduceSum" | "ReduceMean" | "ReduceMax" | "ReduceMin" | "ReduceL2" | "ReduceSumSquare" => {
                self.reduce(operator, node, attributes)
            }
            "Softmax" => {
                let axis = attributes.integer("axis", if self.opset < 13 { 1 } else { -1 });
                let axis = self.axis(a, axis)?;
                if self.opset < 13 && axis + 1 != self.rank(a) {
                    return Err(refused("axis other than the last one before opset 13"));
                }
                self.softmax(a, axis)
            }
            "LayerNormalization" => self.layer_norm(node, attributes),
            "Clip" => self.clip(node, attributes),
            "LeakyRelu" => {
                let slope = self.scalar(attributes.float("alpha", 0.01))?;
                self.leaky(a, slope)
            }
            "PRelu" => {
                let slope = self.value(node, 1)?;
                self.leaky(a, slope)
            }
            "Pow" => {
                let exponent = self.value(node, 1)?;
                match self.graph.constant(exponent) {
                    Some([2.0]) => self.graph.binary(Binary::Mul, a, a),
                    Some([0.5]) => self.graph.unary(Unary::Sqrt, a),
                    _ => Err(refused("exponent other than the constants 2 and 0.5")),
                }
            }
            _ => self.view(operator, node, attributes, a),
        }
    }

    /// The operators that move numbers.
    fn view(&mut self, operator: &str, node: &NodeProto, attributes: &mut Attributes<'_>, a: Id) -> Result<Id> {
        let (shape, rows) = (self.graph.shape(a).to_vec(), self.graph.values[a].rows);
        match operator {
            "Transpose" => {
                let reversed = || (0..shape.len() as i64).rev().collect();
                let order = attributes.integers("perm").unwrap_or_else(reversed);
                let mut axes: Vec<usize> = order.iter().map(|&axis| self.axis(a, axis)).collect::<Result<_>>()?;
                let order = axes.clone();
                axes.sort_unstable();
                if !axes.iter().copied().eq(0..shape.len()) {
                    return Err(refused(format!("perm {order:?} of {} axes", shape.len())));
                }
                self.graph.transpose(a, &order)
            }
            "Unsqueeze" => {
                let axes = self.axes(node, attributes, 1)?.ok_or_else(|| refused("without axes"))?;
                let rank = shape.len() + axes.len();
                let new: Vec<usize> = axes.iter().map(|&axis| place(axis, rank)).collect::<Result<_>>()?;
                let mut old = (0..shape.len()).collect::<Vec<_>>().into_iter();
                let of_axis = |axis: usize| if new.contains(&axis) { None } else { old.next() };
                let from: Vec<Option<usize>> = (0..rank).map(of_axis).collect();
                let to = from.iter().map(|axis| axis.map_or(1, |axis| shape[axis])).collect();
                let rows = rows.and_then(|r| from.iter().position(|axis| *axis == Some(r)));
                self.graph.reshape(a, to, rows)
            }
            "Squeeze" => {
                let axes = self.axes(node, attributes, 1)?.ok_or_else(|| refused("without axes"))?;
                let gone: Vec<usize> = axes.iter().map(|&axis| place(axis, shape.len())).collect::<Result<_>>()?;
                if gone.iter().any(|&axis| Some(axis) == rows || shape[axis] != 1) {
                    return Err(refused(format!("axes {axes:?} of shape {shape:?}")));
                }
                let kept: Vec<usize> = (0..shape.len()).filter(|axis| !gone.contains(axis)).collect();
                let rows = rows.and_then(|r| kept.iter().position(|&axis| axis == r));
                self.graph.reshape(a, kept.iter().map(|&axis| shape[axis]).collect(), rows)
            }
            "Flatten" => {
                let axis = place(attributes.integer("axis", 1), shape.len() + 1)?;
                let sizes = match rows {
                    Some(r) if r < axis && shape[..axis].iter().product::<usize>() == 1 => {
                        [Size::Rows, Size::Fixed(-1)]
                    }
                    None => [Size::Fixed(shape[..axis].iter().product::<usize>() as i64), Size::Fixed(-1)],
                    _ => return Err(refused("candidates flattened with other axes")),
                };
                self.reshape(a, &sizes)
            }
            "Reshape" => {
                let sizes = self.sizes(node, 1)?;
                // PyTorch always writes it; it says something of sizes of 0 alone.
                if attributes.integer("allowzero", 0) != 0 && sizes.contains(&Size::Fixed(0)) {
                    return Err(refused("`allowzero`"));
                }
                self.reshape(a, &sizes)
            }
            "Expand" => {
                let sizes = self.sizes(node, 1)?;
                self.expand(a, &sizes)
            }
            "Slice" => self.slice(node, a),
            "Gather" => {
                let axis = self.axis(a, attributes.integer("axis", 0))?;
                let is_scalar = matches!(self.known(node, 1)?, Known::Integers(_, true));
                let index = self.fixed(node, 1)?;
                let index: Vec<usize> = index.iter().map(|&n| place(n, shape[axis])).collect::<Result<_>>()?;
                let picked = self.along(a, axis, &index)?;
                if !is_scalar {
                    return Ok(picked);
                }
                let mut to = shape.clone();
                to.remove(axis);
                self.graph.reshape(picked, to, rows.map(|r| if r > axis { r - 1 } else { r }))
            }
            _ => Err(refused("is not in the table")),
        }
    }

    fn scalar(&mut self, x: f32) -> Result<Id> {
        self.graph.number(Vec::new(), vec![x])
    }

    fn axis(&self, a: Id, axis: i64) -> Result<usize> {
        place(axis, self.rank(a))
    }

    fn gemm(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Id> {
        let (mut a, mut b) = (self.value(node, 0)?, self.value(node, 1)?);
        let (alpha, beta) = (attributes.float("alpha", 1.0), attributes.float("beta", 1.0));
        if self.rank(a) != 2 || self.rank(b) != 2 {
            return Err(refused("inputs that are no matrices"));
        }
        if attributes.integer("transA", 0) != 0 {
            a = self.graph.transpose(a, &[1, 0])?;
        }
        if attributes.integer("transB", 0) != 0 {
            b = self.graph.transpose(b, &[1, 0])?;
        }
        let mut sum = self.graph.matmul(a, b)?;
        if alpha != 1.0 {
            let alpha = self.scalar(alpha)?;
            sum = self.graph.binary(Binary::Mul, sum, alpha)?;
        }
        if Importer::has(node, 2) {
            let mut bias = self.value(node, 2)?;
            if beta != 1.0 {
                let beta = self.scalar(beta)?;
                bias = self.graph.binary(Binary::Mul, bias, beta)?;
            }
            sum = self.graph.binary(Binary::Add, sum, bias)?;
        }
        Ok(sum)
    }

    fn reduce(&mut self, operator: &str, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Id> {
        let mut a = self.value(node, 0)?;
        let keep = attributes.integer("keepdims", 1) != 0;
        let is_no_op = attributes.integer("noop_with_empty_axes", 0) != 0;
        let axes = self.axes(node, attributes, 1)?.filter(|axes| !axes.is_empty());
        if axes.is_none() && is_no_op {
            return Err(refused("`noop_with_empty_axes` without axes"));
        }
        let shape = self.graph.shape(a).to_vec();
        let axes = match axes {
            Some(axes) => axes.iter().map(|&axis| self.axis(a, axis)).collect::<Result<Vec<_>>>()?,
            None => (0..shape.len()).collect(),
        };
        if ["ReduceL2", "ReduceSumSquare"].contains(&operator) {
            a = self.graph.binary(Binary::Mul, a, a)?;
        }
        let mut made = match operator {
            "ReduceMax" => self.graph.fold(Fold::Max, a, &axes)?,
            "ReduceMin" => self.graph.fold(Fold::Min, a, &axes)?,
            "ReduceMean" => self.mean(a, &axes)?,
            _ => self.graph.fold(Fold::Sum, a, &axes)?,
        };
        if operator == "ReduceL2" {
            made = self.graph.unary(Unary::Sqrt, made)?;
        }
        if keep {
            return Ok(made);
        }
        let kept: Vec<usize> = (0..shape.len()).filter(|axis| !axes.contains(axis)).collect();
        let rows = self.graph.values[made].rows.and_then(|r| kept.iter().position(|&axis| axis == r));
        self.graph.reshape(made, kept.iter().map(|&axis| shape[axis]).collect(), rows)
    }

    fn mean(&mut self, a: Id, axes: &[usize]) -> Result<Id> {
        let count: usize = axes.iter().map(|&axis| self.graph.shape(a)[axis]).product();
        let sum = self.graph.fold(Fold::Sum, a, axes)?;
        let share = self.scalar(1.0 / count as f32)?;
        self.graph.binary(Binary::Mul, sum, share)
    }

    fn softmax(&mut self, a: Id, axis: usize) -> Result<Id> {
        let most = self.graph.fold(Fold::Max, a, &[axis])?;
        let less = self.graph.binary(Binary::Sub, a, most)?;
        let each = self.graph.unary(Unary::Exp, less)?;
        let sum = self.graph.fold(Fold::Sum, each, &[axis])?;
        self.graph.binary(Binary::Div, each, sum)
    }

    fn layer_norm(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Id> {
        let (a, scale) = (self.value(node, 0)?, self.value(node, 1)?);
        let axis = self.axis(a, attributes.integer("axis", -1))?;
        let epsilon = self.scalar(attributes.float("epsilon", 1e-5))?;
        attributes.integer("stash_type", 1);
        let axes: Vec<usize> = (axis..self.rank(a)).collect();
        let mean = self.mean(a, &axes)?;
        let centred = self.graph.binary(Binary::Sub, a, mean)?;
        let squares = self.graph.binary(Binary::Mul, centred, centred)?;
        let variance = self.mean(squares, &axes)?;
        let shifted = self.graph.binary(Binary::Add, variance, epsilon)?;
        let deviation = self.graph.unary(Unary::Sqrt, shifted)?;
        let normal = self.graph.binary(Binary::Div, centred, deviation)?;
        let scaled = self.graph.binary(Binary::Mul, normal, scale)?;
        match Importer::has(node, 2) {
            true => self.graph.binary(Binary::Add, scaled, self.value(node, 2)?),
            false => Ok(scaled),
        }
    }

    fn clip(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Id> {
        let mut made = self.value(node, 0)?;
        for (n, name, f) in [(1, "min", Binary::Max), (2, "max", Binary::Min)] {
            let bound = match attributes.take(name) {
                Some(bound) => Some(self.scalar(bound.f.unwrap_or(0.0))?),
                None if Importer::has(node, n) => Some(self.value(node, n)?),
                None => None,
            };
            if let Some(bound) = bound {
                made = self.graph.binary(f, made, bound)?;
            }
        }
        Ok(made)
    }

    /// `max(a, 0) + slope * min(a, 0)`
    fn leaky(&mut self, a: Id, slope: Id) -> Result<Id> {
        let zero = self.scalar(0.0)?;
        let (above, below) = (self.graph.unary(Unary::Relu, a)?, self.graph.binary(Binary::Min, a, zero)?);
        let below = self.graph.binary(Binary::Mul, below, slope)?;
        self.graph.binary(Binary::Add, above, below)
    }

    fn reshape(&mut self, a: Id, sizes: &[Size]) -> Result<Id> {
        let (shape, rows) = (self.graph.shape(a).to_vec(), self.graph.values[a].rows);
        let count: usize = shape.iter().product();
        let mut to = Vec::with_capacity(sizes.len());
        let (mut open, mut counted) = (None, None);
        for (axis, size) in sizes.iter().enumerate() {
            let of_shape = || shape.get(axis).copied().ok_or_else(|| refused(format!("0 at axis {axis} of {shape:?}")));
            to.push(match size {
                Size::Fixed(-1) if open.is_some() => return Err(refused("two sizes of -1")),
                Size::Fixed(-1) => {
                    open = Some(axis);
                    1
                }
                Size::Fixed(0) => {
                    counted = counted.or(rows.filter(|&r| r == axis));
                    of_shape()?
                }
                Size::Fixed(n) => usize::try_from(*n).map_err(|_| refused(format!("size {n}")))?,
                Size::Rows => {
                    counted = Some(axis);
                    1
                }
            });
        }
        let known: usize = to.iter().product();
        let axis = match (rows, counted, open) {
            (None, None, _) => None,
            (Some(_), Some(axis), _) => Some(axis),
            (Some(_), None, Some(axis)) if known == count => Some(axis),
            _ => return Err(refused(format!("of {shape:?} fixes the number of candidates"))),
        };
        if let Some(open) = open.filter(|&open| Some(open) != axis) {
            to[open] = count.checked_div(known).unwrap_or(0);
        }
        let ahead = |shape: &[usize], axis: Option<usize>| axis.map(|axis| shape[..axis].iter().product::<usize>());
        if ahead(&shape, rows) != ahead(&to, axis) {
            return Err(refused("moves the axis of the candidates"));
        }
        self.graph.reshape(a, to, axis)
    }

    fn expand(&mut self, a: Id, sizes: &[Size]) -> Result<Id> {
        let (shape, rows) = (self.graph.shape(a).to_vec(), self.graph.values[a].rows);
        let one = |size: &Size| match size {
            Size::Rows => Ok(1),
            Size::Fixed(n) => usize::try_from(*n).map_err(|_| refused(format!("size {n}"))),
        };
        let wanted: Vec<usize> = sizes.iter().map(one).collect::<Result<_>>()?;
        let to = super::ir::broadcast(&shape, &wanted)?;
        let own = rows.map(|r| r + to.len() - shape.len());
        let counted = sizes.iter().position(|s| *s == Size::Rows).map(|axis| axis + to.len() - sizes.len());
        let axis = match (own, counted) {
            (Some(x), Some(y)) if x != y => return Err(refused("candidates along two axes")),
            (x, y) => x.or(y),
        };
        if axis.is_some_and(|axis| to[axis] != 1) {
            return Err(refused("fixes the number of candidates"));
        }
        let index = positions(&to, &super::ir::broadcast_strides(&shape, &to));
        self.graph.pick(a, index, to, axis)
    }

    fn along(&mut self, a: Id, axis: usize, index: &[usize]) -> Result<Id> {
        let (mut shape, rows) = (self.graph.shape(a).to_vec(), self.graph.values[a].rows);
        if rows == Some(axis) {
            return Err(refused("picks candidates"));
        }
        let strides = strides(&shape);
        shape[axis] = index.len();
        let mut at = vec![0u32];
        for (n, &size) in shape.iter().enumerate() {
            let steps: Vec<u32> =
                (0..size).map(|i| (if n == axis { index[i] } else { i } * strides[n]) as u32).collect();
            at = at.iter().flat_map(|&at| steps.iter().map(move |step| at + step)).collect();
        }
        self.graph.pick(a, at, shape, rows)
    }

    fn slice(&mut self, node: &NodeProto, a: Id) -> Result<Id> {
        if self.opset < 10 {
            return Err(refused("before opset 10"));
        }
        let (starts, ends) = (self.fixed(node, 1)?, self.fixed(node, 2)?);
        let axes = match Importer::has(node, 3) {
            true => self.fixed(node, 3)?,
            false => (0..starts.len() as i64).collect(),
        };
        let steps = if Importer::has(node, 4) { self.fixed(node, 4)? } else { vec![1; starts.len()] };
        if [ends.len(), axes.len(), steps.len()] != [starts.len(); 3] || steps.iter().any(|&step| step < 1) {
            return Err(refused(format!("starts {starts:?}, ends {ends:?}, steps {steps:?}")));
        }
        let mut made = a;
        for (((&start, &end), &axis), &step) in starts.iter().zip(&ends).zip(&axes).zip(&steps) {
            let axis = self.axis(made, axis)?;
            let size = self.graph.shape(made)[axis] as i64;
            let bound = |n: i64| if n < 0 { n.saturating_add(size).max(0) } else { n.min(size) };
            let index: Vec<usize> = (bound(start)..bound(end)).step_by(step as usize).map(|n| n as usize).collect();
            made = self.along(made, axis, &index)?;
        }
        Ok(made)
    }
}

/// An axis or index that may count from the end.
fn place(n: i64, of: usize) -> Result<usize> {
    let place = if n < 0 { n.saturating_add(of as i64) } else { n };
    usize::try_from(place).ok().filter(|&n| n < of).ok_or_else(|| refused(format!("axis or index {n} of {of}")))
}
