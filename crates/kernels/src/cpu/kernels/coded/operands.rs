//! Operands of scans of product quantization codes.

use crate::cpu::kernels::BLOCK;
use crate::cpu::kernels::operands::filled;

/// Bytes of a line: four per item of a block.
pub const LINE: usize = 64;
/// Bytes of a query's tables per line: 8 subspaces of 16 values.
pub const TABLE: usize = 128;

/// Product quantization codes of one list.
#[derive(Clone, Copy, Debug)]
pub struct CodeBlocks<'a> {
    /// Codes, `[blocks, G, 16, 4]` bytes of two codes each.
    pub codes: &'a [u8],
    /// Factors of the items' sums, one per slot, `[blocks * 16]`; empty for none.
    pub factors: &'a [f32],
    /// Number of lines per block, G.
    pub lines: usize,
    /// Number of items; the last block may hold fewer than 16.
    pub items: usize,
    /// Slot of item 0.
    pub first_slot: u32,
    /// One bit per item, set if the item is to be scored; empty if all items are.
    pub words: &'a [u64],
    /// Codes to prefetch, which are read after `codes`; may be empty.
    pub next: &'a [u8],
}

impl CodeBlocks<'_> {
    /// Returns the factors of a block, or an empty slice.
    pub(super) fn factors_of(&self, block: usize) -> &[f32] {
        if self.factors.is_empty() { &[] } else { &self.factors[block * BLOCK..(block + 1) * BLOCK] }
    }

    /// Returns the items of a block that are to be scored, one bit each.
    pub(super) fn requested(&self, block: usize) -> u16 {
        let requested = match self.words.is_empty() {
            true => u16::MAX,
            false => (self.words[block / 4] >> (block % 4 * BLOCK)) as u16,
        };
        filled(self.items, block) & requested
    }

    /// Returns the first block from `from` on with items to score, or the number of blocks.
    pub(super) fn next_asked(&self, from: usize) -> usize {
        let count = self.items.div_ceil(BLOCK);
        match self.words.is_empty() {
            true => from.min(count),
            false => (from..count).find(|&block| self.requested(block) != 0).unwrap_or(count),
        }
    }
}

/// Lookup tables of a query. An item's score is `step Σ table[code] + bias`, or `(step Σ table[code] + base) factor + bias` if
/// items have factors.
#[derive(Clone, Copy, Debug)]
pub struct CodeQuery<'a> {
    /// `[G, 8, 16]`: per line, the tables of the low halves, then those of the high halves.
    pub tables: &'a [u8],
    /// Quantization step of the tables.
    pub step: f32,
    /// Added to the sum before the item's factor is applied.
    pub base: f32,
    /// Added to the score of every item of the list.
    pub bias: f32,
}

impl CodeQuery<'_> {
    /// Converts the sums of a block to scores; `factors` may be empty.
    pub(super) fn scores(&self, sums: [u32; BLOCK], factors: &[f32]) -> [f32; BLOCK] {
        let mut scores = sums.map(|sum| sum as f32 * self.step);
        if !factors.is_empty() {
            scores.iter_mut().zip(factors).for_each(|(score, factor)| *score = (*score + self.base) * factor);
        }
        scores.map(|score| score + self.bias)
    }
}

/// # Panics
/// If slices are shorter than documented.
pub(super) fn check(blocks: &CodeBlocks<'_>, query: &CodeQuery<'_>) {
    assert!(blocks.lines > 0 && query.tables.len() == blocks.lines * TABLE);
    assert!(blocks.codes.len() >= blocks.items.div_ceil(BLOCK) * blocks.lines * LINE);
    assert!(blocks.factors.is_empty() || blocks.factors.len() >= blocks.items.next_multiple_of(BLOCK));
    assert!(blocks.words.is_empty() || blocks.words.len() >= blocks.items.div_ceil(64));
}
