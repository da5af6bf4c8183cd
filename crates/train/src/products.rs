//! Products of small matrices, by the kernels of compiled graphs.

use sterling_kernels::cpu::Kernels;
use sterling_kernels::cpu::dense::{Lines, PANEL, Part, Product, Weights, pack, packed_stride};

/// A matrix `[depth, columns]`, packed for products.
#[derive(Debug)]
pub(crate) struct Packed {
    numbers: Lines,
    depth: usize,
    columns: usize,
}

impl Packed {
    /// Packs a row-major matrix.
    pub(crate) fn of(matrix: &[f32], depth: usize, columns: usize) -> Self {
        Packed { numbers: pack(matrix, depth, columns), depth, columns }
    }

    /// Creates a matrix of zeros.
    pub(crate) fn zeros(depth: usize, columns: usize) -> Self {
        Packed { numbers: Lines::new(depth * columns.next_multiple_of(packed_stride(columns))), depth, columns }
    }

    /// Packs a column-major matrix: `[columns, depth]` transposed.
    pub(crate) fn transposed(matrix: &[f32], depth: usize, columns: usize) -> Self {
        let mut packed = Packed::zeros(depth, columns);
        matrix.chunks_exact(depth).enumerate().for_each(|(column, values)| packed.set_column(column, values));
        packed
    }

    /// Replaces a column.
    pub(crate) fn set_column(&mut self, column: usize, values: &[f32]) {
        let (panel, column, stride) = (column / PANEL, column % PANEL, packed_stride(self.columns));
        let out = &mut self.numbers.numbers_mut()[panel * stride * self.depth..][..stride * self.depth];
        out.chunks_exact_mut(stride).zip(values).for_each(|(out, value)| out[column] = *value);
    }

    /// Returns the elements of a column.
    pub(crate) fn column(&self, column: usize) -> impl Iterator<Item = f32> {
        let (panel, column, stride) = (column / PANEL, column % PANEL, packed_stride(self.columns));
        let numbers = &self.numbers.numbers()[panel * stride * self.depth..][..stride * self.depth];
        numbers.iter().skip(column).step_by(stride).copied()
    }

    /// Returns the number of columns.
    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// Computes `out = rows x matrix`; each of the rows has `depth` numbers, each row of `out` has `columns`.
    pub(crate) fn times(&self, kernels: Kernels, rows: &[f32], out: &mut [f32]) {
        let row_stride = packed_stride(self.columns);
        let weights = Weights { numbers: self.numbers.numbers(), row_stride, panel_stride: row_stride * self.depth };
        let parts = [Part { rows, stride: self.depth, depth: self.depth, weights }];
        let rows = rows.len() / self.depth.max(1);
        let product = Product { rows, columns: self.columns, parts: &parts, ..Product::default() };
        kernels.product(&product, out, self.columns);
    }
}
