//! Int8 products: selects the products, and quantizes their matrices.
//!
//! A product is computed in int8 if all its matrices are constant and finite, both its depth and its columns are at least
//! [`INT8_MIN`], and it has at least [`WEIGHTS_MIN`] weights. Products of two activations, such as those of attention, stay in f32, and so does a product that is an output
//! of the graph: it is small, and its error would be the error of the answer.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::graph::Graph;
use super::ir::{Id, Op};
use super::plan::Planner;
use super::steps::{BufferRange, Int8Factor, Work};
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::dense::{INT8_DEPTH_MAX, Int8Matrix, Unary};

/// Minimum columns and depth of an int8 product, and minimum number of weights; for smaller products, quantizing the rows costs
/// more than it saves.
const INT8_MIN: usize = 32;
const WEIGHTS_MIN: usize = 4096;

/// Products that are computed in int8.
#[derive(Debug, Default)]
pub(super) struct Quantized {
    products: HashSet<Id>,
    /// Activation functions that are applied to the results of products.
    maps: HashMap<Id, Unary>,
    /// Quantized matrices, by the values that were stacked.
    matrices: HashMap<Vec<Id>, Arc<Int8Matrix>>,
}

impl Quantized {
    pub(super) fn is_product(&self, id: Id) -> bool {
        self.products.contains(&id)
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
        let products = live(self).into_iter().filter(|&id| !outputs.contains(&id) && gains(self.graph, id));
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
