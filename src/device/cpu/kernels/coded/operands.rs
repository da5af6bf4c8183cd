//! What scans of product codes take.

use crate::device::cpu::kernels::BLOCK;

/// Bytes of a line: four of each item of a block.
pub const LINE: usize = 64;
/// Bytes of a query's tables for a line: 8 subspaces of 16 values.
pub const TABLE: usize = 128;

/// Product codes of one list.
#[derive(Clone, Copy, Debug)]
pub struct CodeBlocks<'a> {
    /// `[blocks, G, 16, 4]` bytes, two codes each.
    pub codes: &'a [u8],
    /// Lines of a block, G.
    pub lines: usize,
    /// Items; the last block may hold fewer than 16.
    pub items: usize,
    /// The slot of item 0.
    pub first_slot: u32,
    /// Codes that are read after these, asked for ahead; or none.
    pub next: &'a [u8],
}

/// What the values of every subspace are worth to a query: an item's score is `step Σ table[code] + bias`.
#[derive(Clone, Copy, Debug)]
pub struct CodeQuery<'a> {
    /// `[G, 8, 16]`: for each line the tables of its low halves, then those of its high ones.
    pub tables: &'a [u8],
    /// What one is worth.
    pub step: f32,
    /// What every item of the list scores in advance.
    pub bias: f32,
}

impl CodeQuery<'_> {
    /// The score of a sum.
    pub(super) fn score(&self, sum: u32) -> f32 {
        sum as f32 * self.step + self.bias
    }
}

/// # Panics
/// Where slices are shorter than their documented lengths.
pub(super) fn check(blocks: &CodeBlocks<'_>, query: &CodeQuery<'_>) {
    assert!(blocks.lines > 0 && query.tables.len() == blocks.lines * TABLE);
    assert!(blocks.codes.len() >= blocks.items.div_ceil(BLOCK) * blocks.lines * LINE);
}
