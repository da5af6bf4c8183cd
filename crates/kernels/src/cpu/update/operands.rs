//! What an update reads and writes.

use super::lanes::{BLOCK, Block};

/// Gradients of slots, one after the other, each padded with zeros to whole blocks.
#[derive(Clone, Copy, Debug)]
pub struct GradientRows<'a> {
    values: &'a [Block],
    /// Blocks of a row.
    blocks: usize,
}

impl<'a> GradientRows<'a> {
    /// Rows of `width` numbers: `values` is `[slots, blocks, BLOCK]`.
    ///
    /// # Panics
    /// Where `values` are no whole rows.
    pub fn new(width: usize, values: &'a [[f32; BLOCK]]) -> Self {
        let blocks = width.div_ceil(BLOCK);
        assert!(blocks > 0 && values.len().is_multiple_of(blocks), "no whole gradient rows");
        GradientRows { values, blocks }
    }

    pub(super) fn len(&self) -> usize {
        self.values.len() / self.blocks
    }

    /// Blocks of a row.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    #[inline(always)]
    pub(super) fn row(&self, slot: usize, blocks: usize) -> &'a [Block] {
        &self.values[slot * blocks..slot * blocks + blocks]
    }
}

/// Consecutive stretches of a table that learns: each a row with its optimizer's state behind it.
#[derive(Debug)]
pub struct Stretches<'a> {
    /// `[rows, stride]`.
    pub data: &'a mut [f32],
    /// The row of the first stretch.
    pub first_row: u32,
    /// Numbers of a row, D.
    pub width: usize,
    /// Numbers from one stretch to the next.
    pub stride: usize,
}
