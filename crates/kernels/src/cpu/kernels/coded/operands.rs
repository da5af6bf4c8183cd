//! What scans of product codes take.

use crate::cpu::kernels::BLOCK;
use crate::cpu::kernels::operands::filled;

/// Bytes of a line: four of each item of a block.
pub const LINE: usize = 64;
/// Bytes of a query's tables for a line: 8 subspaces of 16 values.
pub const TABLE: usize = 128;

/// Product codes of one list.
#[derive(Clone, Copy, Debug)]
pub struct CodeBlocks<'a> {
    /// `[blocks, G, 16, 4]` bytes, two codes each.
    pub codes: &'a [u8],
    /// What the sums of items are multiplied by, one a slot, `[blocks * 16]`; empty where by nothing.
    pub factors: &'a [f32],
    /// Lines of a block, G.
    pub lines: usize,
    /// Items; the last block may hold fewer than 16.
    pub items: usize,
    /// The slot of item 0.
    pub first_slot: u32,
    /// One bit an item, set where it is to be scored; empty where all are.
    pub words: &'a [u64],
    /// Codes that are read after these, asked for ahead; or none.
    pub next: &'a [u8],
}

impl CodeBlocks<'_> {
    /// The factors of a block, or none.
    pub(super) fn factors_of(&self, block: usize) -> &[f32] {
        if self.factors.is_empty() { &[] } else { &self.factors[block * BLOCK..(block + 1) * BLOCK] }
    }

    /// The items of a block that are to be scored, one bit each.
    pub(super) fn asked(&self, block: usize) -> u16 {
        let asked = match self.words.is_empty() {
            true => u16::MAX,
            false => (self.words[block / 4] >> (block % 4 * BLOCK)) as u16,
        };
        filled(self.items, block) & asked
    }

    /// The first block from one on with items that are to be scored; the number of blocks where there is none.
    pub(super) fn next_asked(&self, from: usize) -> usize {
        let count = self.items.div_ceil(BLOCK);
        match self.words.is_empty() {
            true => from.min(count),
            false => (from..count).find(|&block| self.asked(block) != 0).unwrap_or(count),
        }
    }
}

/// What the values of every subspace are worth to a query: an item's score is `step Σ table[code] + bias`, or, where items have
/// factors, `(step Σ table[code] + base) factor + bias`.
#[derive(Clone, Copy, Debug)]
pub struct CodeQuery<'a> {
    /// `[G, 8, 16]`: for each line the tables of its low halves, then those of its high ones.
    pub tables: &'a [u8],
    /// What one is worth.
    pub step: f32,
    /// What an item's factor multiplies besides the sum.
    pub base: f32,
    /// What every item of the list scores in advance.
    pub bias: f32,
}

impl CodeQuery<'_> {
    /// The scores of the sums of a block, of which the items have these factors, or none.
    pub(super) fn scores(&self, sums: [u32; BLOCK], factors: &[f32]) -> [f32; BLOCK] {
        let mut scores = sums.map(|sum| sum as f32 * self.step);
        if !factors.is_empty() {
            scores.iter_mut().zip(factors).for_each(|(score, factor)| *score = (*score + self.base) * factor);
        }
        scores.map(|score| score + self.bias)
    }
}

/// # Panics
/// Where slices are shorter than their documented lengths.
pub(super) fn check(blocks: &CodeBlocks<'_>, query: &CodeQuery<'_>) {
    assert!(blocks.lines > 0 && query.tables.len() == blocks.lines * TABLE);
    assert!(blocks.codes.len() >= blocks.items.div_ceil(BLOCK) * blocks.lines * LINE);
    assert!(blocks.factors.is_empty() || blocks.factors.len() >= blocks.items.next_multiple_of(BLOCK));
    assert!(blocks.words.is_empty() || blocks.words.len() >= blocks.items.div_ceil(64));
}
