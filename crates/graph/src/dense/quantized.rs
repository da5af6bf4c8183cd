//! Int8 products: selects the products, and quantizes their matrices.
//!
//! A product is computed in int8 if all its matrices are constant and finite, both its depth and its columns are at
//! least [`INT8_MIN`], and it has at least [`WEIGHTS_MIN`] weights. Products of two activations, such as those of
//! attention, stay in f32, and so does a product that is an output of the graph: it is small, and its error would be
//! the error of the answer.
//!
//! A product also stays in f32 if its rows contain numbers of inputs ([`Source`]), other than those of a single
//! sequence. A quantized row has one scale, and inputs may have any magnitude: beside a price of 2000, all numbers of
//! an embedding would get the same code.

use std::sync::Arc;

use super::graph::Graph;
use super::ir::{Id, Op, Value};
use super::plan::Planner;
use super::steps::{BufferRange, Int8Factor, Work};
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::dense::{Binary, INT8_DEPTH_MAX, Int8Matrix, Unary};

/// Minimum columns and depth of an int8 product, and minimum number of weights; for smaller products, quantizing the
/// rows costs more than it saves.
const INT8_MIN: usize = 32;
const WEIGHTS_MIN: usize = 4096;

/// Origin of the numbers along the last axis of a value. Products with matrices end it: their results are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Constant,
    Computed,
    /// One input with several steps per row, by its index.
    Sequence(usize),
    /// An input with one step per row, or numbers of an input beside other numbers.
    Mixed,
}

impl Source {
    /// Returns the source of numbers that lie side by side in one row.
    fn beside(self, other: Source) -> Source {
        match (self, other) {
            (Source::Constant, one) | (one, Source::Constant) => one,
            (one, other) if one == other => one,
            _ => Source::Mixed,
        }
    }

    /// Returns the source of numbers that are computed from one number of each operand, or lie in separate rows.
    fn with(self, other: Source) -> Source {
        match (self, other) {
            (Source::Mixed, _) | (_, Source::Mixed) => Source::Mixed,
            (Source::Constant | Source::Computed, one) if one != Source::Constant => one,
            (one, _) => one,
        }
    }
}

/// Returns the source of each value of the graph.
fn sources(graph: &Graph) -> Vec<Source> {
    let mut sources: Vec<Source> = Vec::with_capacity(graph.values.len());
    for value in &graph.values {
        let source = source_of(graph, value, &sources);
        sources.push(source);
    }
    sources
}

/// Returns the source of a value; `sources` has those of the values before.
fn source_of(graph: &Graph, value: &Value, sources: &[Source]) -> Source {
    let width_of = |shape: &[usize]| shape.last().copied().unwrap_or(1);
    match &value.op {
        Op::Inputs(first) => {
            let shape = &graph.inputs[*first].shape;
            let count = shape.iter().product::<usize>();
            if count == value.count() && count > width_of(shape) { Source::Sequence(*first) } else { Source::Mixed }
        }
        Op::Constant(_) => Source::Constant,
        Op::Linear { .. } | Op::MatMul(..) | Op::Recurrent(_) => Source::Computed,
        // A mask that is expanded to all numbers of a step.
        Op::Pick(_, index) if width_of(&value.shape) > 1 && is_expanded(index, width_of(&value.shape)) => {
            Source::Computed
        }
        Op::Unary(_, a) | Op::Fold(_, a) | Op::Pick(a, _) | Op::Spread(a, _) | Op::Reshape(a) => sources[*a],
        Op::Binary(Binary::Equal | Binary::Less | Binary::LessOrEqual, ..) => Source::Computed,
        Op::Binary(Binary::Keep | Binary::Drop, _, kept) => sources[*kept],
        Op::Binary(f, a, b) => {
            // A factor of a complete row, such as a mask, does not change the ratios of its numbers.
            let is_factor =
                |id: Id| matches!(f, Binary::Mul | Binary::Div) && width_of(graph.shape(id)) < width_of(&value.shape);
            match (is_factor(*a), is_factor(*b)) {
                (true, false) => sources[*b],
                (false, true) => sources[*a],
                _ => sources[*a].with(sources[*b]),
            }
        }
        Op::Concat(axis, parts) => {
            let is_of_rows = axis + 1 < value.shape.len();
            let join = if is_of_rows { Source::with } else { Source::beside };
            parts.iter().fold(Source::Constant, |joined, &part| join(joined, sources[part]))
        }
    }
}

/// Returns whether each row of `width` numbers repeats one number.
fn is_expanded(index: &[u32], width: usize) -> bool {
    index.chunks(width).all(|row| row.iter().all(|n| *n == row[0]))
}

/// Returns whether the rows of a product contain numbers that share a scale although their magnitudes may differ.
fn mixes(graph: &Graph, id: Id, sources: &[Source]) -> bool {
    match &graph.values[id].op {
        // Rows of several inputs may be contiguous, and are then one row of the product.
        Op::Linear { parts, .. } => {
            let of_inputs = parts.iter().map(|(x, _)| sources[*x]).filter(|source| *source != Source::Computed);
            of_inputs.fold(Source::Constant, Source::beside) == Source::Mixed
        }
        Op::MatMul(x, _) => sources[*x] == Source::Mixed,
        _ => false,
    }
}

/// Returns whether products in int8 gain from this product, whose matrices int8 represents.
fn gains(graph: &Graph, id: Id) -> bool {
    let is_finite = |matrix: &Id| graph.constant(*matrix).is_some_and(|numbers| numbers.iter().all(|w| w.is_finite()));
    let (matrices, columns): (Vec<Id>, usize) = match &graph.values[id].op {
        Op::Linear { parts, .. } => (parts.iter().map(|(_, matrix)| *matrix).collect(), graph.values[id].count()),
        Op::MatMul(_, matrix) => match graph.shape(*matrix) {
            [ahead @ .., _, columns] if ahead.iter().all(|size| *size == 1) => (vec![*matrix], *columns),
            _ => return false,
        },
        _ => return false,
    };
    let depth_of = |matrix: &Id| {
        let shape = graph.shape(*matrix);
        shape[shape.len() - 2]
    };
    let depth: usize = matrices.iter().map(depth_of).sum();
    (INT8_MIN..=INT8_DEPTH_MAX).contains(&depth)
        && columns >= INT8_MIN
        && depth * columns >= WEIGHTS_MIN
        && matrices.iter().all(is_finite)
}

impl Planner<'_> {
    /// Finds the products to compute in int8, and the activation functions that nothing but these products computes.
    pub(super) fn quantize(&mut self, needed: &[bool], readers: &mut [usize]) {
        let outputs = self.outputs();
        let live = |planner: &Self| -> Vec<Id> {
            (0..needed.len()).filter(|&id| needed[id] && planner.alias[id].is_none()).collect()
        };
        let sources = sources(self.graph);
        let is_int8 = |id: &Id| !outputs.contains(id) && gains(self.graph, *id) && !mixes(self.graph, *id, &sources);
        let products = live(self).into_iter().filter(is_int8);
        self.quantized.products = products.collect();
        for id in live(self) {
            let Op::Unary(f @ (Unary::Gelu | Unary::Silu | Unary::Sigmoid | Unary::Tanh), a) = self.graph.values[id].op
            else {
                continue;
            };
            let root = self.root(a);
            let is_alone = readers[root] == 1 && !self.is_rectified[root] && !self.quantized.maps.contains_key(&root);
            if self.quantized.is_product(root) && is_alone && !outputs.contains(&id) {
                self.quantized.maps.insert(root, f);
                self.alias[id] = Some(a);
                readers[root] = readers[id];
            }
        }
    }

    /// Compiles a product of `runs` rows with constant matrices of `columns` columns.
    pub(super) fn int8_product(
        &mut self,
        id: Id,
        parts: &[(Id, Id)],
        bias: Option<BufferRange>,
        [runs, columns]: [usize; 2],
    ) -> Result<Work> {
        let joined = self.joined(parts)?;
        let factor = |(rows, _, matrices): (BufferRange, usize, Vec<Id>)| {
            Ok(Int8Factor { rows, matrix: self.quantized_matrix(matrices, columns)? })
        };
        let parts = joined.into_iter().map(factor).collect::<Result<_>>()?;
        let rectified = self.is_rectified[id].then_some(Unary::Relu);
        Ok(Work::Int8Product { parts, bias, runs, columns, map: self.quantized.maps.get(&id).copied().or(rectified) })
    }

    fn quantized_matrix(&mut self, matrices: Vec<Id>, columns: usize) -> Result<Arc<Int8Matrix>> {
        if let Some(quantized) = self.quantized.matrices.get(&matrices) {
            return Ok(quantized.clone());
        }
        let stacked: Vec<f32> =
            matrices.iter().flat_map(|&matrix| self.graph.constant(matrix).unwrap_or_default()).copied().collect();
        let quantized = Int8Matrix::quantize(&stacked, stacked.len() / columns.max(1), columns)
            .ok_or_else(|| Error::internal("a matrix of an int8 product cannot be quantized"))?;
        let quantized = Arc::new(quantized);
        self.quantized.matrices.insert(matrices, quantized.clone());
        Ok(quantized)
    }
}
