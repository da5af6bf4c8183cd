//! Products of a plan: factors with packed matrices, matrices that differ per row, and products that skip zeros.

use std::sync::Arc;

use super::ir::{Id, Side, broadcast_strides, positions};
use super::plan::Planner;
use super::steps::{BufferRange, Factor, Memory, Work};
use sterling_core::error::Result;
use sterling_kernels::cpu::dense::{Form, PANEL, pack, packed_stride};

/// Minimum number of columns of a product from which skipping zeros of its rows pays off.
const SKIPPING_COLUMNS_MIN: usize = 96;
/// Maximum depth of such a product.
const SKIPPING_DEPTH_MAX: usize = 2048;

impl Planner<'_> {
    pub(super) fn matmul(&mut self, id: Id, a: Id, b: Id) -> Result<Work> {
        let (value, left, right) = (&self.graph.values[id], self.graph.shape(a), self.graph.shape(b));
        let axes = value.shape.len() - 2;
        let (m, n, k) = (value.shape[axes], value.shape[axes + 1], left[left.len() - 1]);
        let is_shared = self.graph.values[b].side != Side::Pair && right.iter().product::<usize>() == k * n;
        if is_shared && k > 0 && n > 0 {
            let runs = left.iter().product::<usize>() / k;
            if self.quantized.is_product(id) {
                let bias = self.bias.get(&id).copied().map(|bias| self.place(bias)).transpose()?;
                return self.int8_product(id, &[(a, b)], bias, [runs, n]);
            }
            let (factors, result) = (if self.is_narrow[id] { Form::Pairs } else { Form::Single }, Form::Single);
            let part = match factors {
                Form::Single => {
                    let rows = self.place(a)?;
                    self.factor(rows, k, vec![b])?
                }
                Form::Pairs => self.narrow_rows(a, b, [runs, k, n])?,
            };
            let bias = self.bias.get(&id).copied().map(|bias| self.place(bias)).transpose()?;
            let relu = self.is_rectified[id];
            let skips_zeros = factors == Form::Single && self.skips_zeros(&[(a, b)], n);
            return Ok(Work::Product { parts: vec![part], bias, runs, columns: n, relu, skips_zeros, factors, result });
        }
        let places = |shape: &[usize], size: usize| -> Arc<[u32]> {
            let strides = broadcast_strides(&shape[..shape.len() - 2], &value.shape[..axes]);
            positions(&value.shape[..axes], &strides).into_iter().map(|n| n * size as u32).collect()
        };
        let (left, right) = (places(left, m * k), places(right, k * n));
        self.indexed += left.len() + right.len();
        Ok(Work::Matrices { a: self.place(a)?, b: self.place(b)?, left, right, shape: [m, k, n] })
    }

    /// Returns whether a product may skip zeros of its rows: half of their numbers may be zeros, and all weights are finite,
    /// because a zero times another weight is NaN.
    pub(super) fn skips_zeros(&self, parts: &[(Id, Id)], columns: usize) -> bool {
        let is_finite = |id: Id| self.graph.constant(id).is_some_and(|numbers| numbers.iter().all(|x| x.is_finite()));
        let depth = |(x, _): &(Id, Id)| self.graph.shape(*x).last().copied().unwrap_or_default();
        let (total, with_zeros) =
            (parts.iter().map(depth), parts.iter().filter(|(x, _)| self.has_zeros[*x]).map(depth));
        let total: usize = total.sum();
        columns >= SKIPPING_COLUMNS_MIN
            && total <= SKIPPING_DEPTH_MAX
            && 2 * with_zeros.sum::<usize>() >= total
            && parts.iter().all(|(_, matrix)| is_finite(*matrix))
    }

    /// Returns the factors of a product.
    pub(super) fn factors(&mut self, parts: &[(Id, Id)]) -> Result<Vec<Factor>> {
        let joined = self.joined(parts)?;
        joined.into_iter().map(|(rows, depth, matrices)| self.factor(rows, depth, matrices)).collect()
    }

    /// Merges parts with contiguous rows and constant matrices: returns the rows, their depth, and the matrices to
    /// stack.
    pub(super) fn joined(&mut self, parts: &[(Id, Id)]) -> Result<Vec<(BufferRange, usize, Vec<Id>)>> {
        let mut joined: Vec<(BufferRange, usize, Vec<Id>)> = Vec::new();
        for &(x, matrix) in parts {
            let (place, depth) = (self.place(x)?, self.graph.shape(matrix)[0]);
            let is_constant = |id: &Id| self.graph.constant(*id).is_some();
            match joined.last_mut() {
                Some((first, all, matrices))
                    if place == BufferRange { offset: first.offset + *all, ..*first }
                        && matrices.iter().chain([&matrix]).all(is_constant) =>
                {
                    *all += depth;
                    matrices.push(matrix);
                }
                _ => joined.push((place, depth, vec![matrix])),
            }
        }
        Ok(joined)
    }

    /// Returns the factor of rows of `depth` numbers and stacked matrices; a matrix that is not constant must be the
    /// only one.
    pub(super) fn factor(&mut self, rows: BufferRange, depth: usize, matrices: Vec<Id>) -> Result<Factor> {
        let columns = self.graph.shape(matrices[0]).last().copied().unwrap_or(1);
        let constants: Option<Vec<&[f32]>> = matrices.iter().map(|&matrix| self.graph.constant(matrix)).collect();
        let Some(constants) = constants else {
            let matrix = self.place(matrices[0])?;
            return Ok(Factor { rows, depth, matrix, row_stride: columns, panel_stride: PANEL });
        };
        let packed = match self.packed.get(&matrices) {
            Some(&packed) => packed,
            None => {
                let packed = self.constant(pack(&constants.concat(), depth, columns));
                self.packed.insert(matrices, packed);
                packed
            }
        };
        let matrix = BufferRange { memory: Memory::Constant(packed), offset: 0 };
        let row_stride = packed_stride(columns);
        Ok(Factor { rows, depth, matrix, row_stride, panel_stride: depth * row_stride })
    }
}
