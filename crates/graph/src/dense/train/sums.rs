//! Sums over rows, from which the gradients of shared values are computed.

use super::run::Rows;
use sterling_kernels::cpu::Kernels;
use sterling_kernels::cpu::dense::Outer;

/// A sum over rows: of `leftᵀ right`, where each row contributes `runs` matrix rows of both, or of the matrix rows of
/// `right` alone.
#[derive(Clone, Debug)]
pub(super) struct Sum {
    /// Output of the row graph that is the left factor; `None` for a plain sum.
    pub(super) left: Option<usize>,
    pub(super) right: usize,
    pub(super) runs: usize,
    pub(super) depth: usize,
    pub(super) columns: usize,
}

impl Sum {
    /// Returns the count of numbers of the sum.
    pub(super) fn count(&self) -> usize {
        self.depth * self.columns
    }

    /// Adds the rows of a block, in their order.
    pub(super) fn add(&self, kernels: Kernels, rows: usize, left: Option<Rows<'_>>, right: Rows<'_>, out: &mut [f32]) {
        let Sum { runs, depth, columns, .. } = *self;
        let (right, right_stride) = right;
        // A plain sum is a product with 1.
        let is_sum = left.is_none();
        let (left, left_stride) = left.unwrap_or((&[1.0], 0));
        let lies_flat = right_stride == runs * columns && (is_sum || left_stride == runs * depth);
        let (times, together) = if runs == 1 || lies_flat { (1, rows * runs) } else { (rows, runs) };
        let stride_of = |stride: usize, width: usize| if runs == 1 { stride } else { width };
        for n in 0..times {
            let outer = Outer {
                rows: together,
                left: &left[n * left_stride..],
                left_stride: if is_sum { 0 } else { stride_of(left_stride, depth) },
                depth,
                right: &right[n * right_stride..],
                right_stride: stride_of(right_stride, columns),
                columns,
            };
            kernels.outer(&outer, out);
        }
    }
}
