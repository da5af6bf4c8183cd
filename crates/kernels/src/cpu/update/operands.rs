//! Operands of an update.

use super::lanes::{BLOCK, Block};

/// Gradient of each slot, contiguous, padded with zeros to complete blocks.
#[derive(Clone, Copy, Debug)]
pub struct GradientRows<'a> {
    values: &'a [Block],
    /// Blocks per row.
    blocks: usize,
}

impl<'a> GradientRows<'a> {
    /// Wraps gradients of `width` numbers: `values` is `[slots, blocks, BLOCK]`.
    ///
    /// # Panics
    /// If `values` is not a multiple of the blocks per row.
    pub fn new(width: usize, values: &'a [[f32; BLOCK]]) -> Self {
        let blocks = width.div_ceil(BLOCK);
        assert!(blocks > 0 && values.len().is_multiple_of(blocks), "incomplete gradient rows");
        GradientRows { values, blocks }
    }

    pub(super) fn len(&self) -> usize {
        self.values.len() / self.blocks
    }

    /// Returns the blocks per row.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    #[inline(always)]
    pub(super) fn row(&self, slot: usize, blocks: usize) -> &'a [Block] {
        &self.values[slot * blocks..slot * blocks + blocks]
    }
}

/// Consecutive rows of a table in training, each followed by its optimizer state.
#[derive(Debug)]
pub struct Stretches<'a> {
    /// Rows with their state, `[rows, stride]`.
    pub data: &'a mut [f32],
    /// Number of the first row.
    pub first_row: u32,
    /// Numbers per row, D.
    pub width: usize,
    /// Distance between rows in numbers, optimizer state included.
    pub stride: usize,
}
