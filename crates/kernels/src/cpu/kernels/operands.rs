//! Operands of the kernels: blocks of codes, queries, and staging buffers for scored items.

/// Number of items per block.
pub const BLOCK: usize = 16;

/// Blocked int8 rows of one list, and their scales.
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a> {
    /// Codes, `[blocks, G, 16, 4]` bytes.
    pub codes: &'a [u8],
    /// One scale per slot, `[blocks * 16]`.
    pub scales: &'a [f32],
    /// Number of groups of 4 dimensions, G.
    pub groups: usize,
    /// Number of items; the last block may hold fewer than 16.
    pub items: usize,
    /// Slot of item 0.
    pub first_slot: u32,
    /// Codes to prefetch, which are read after `codes`; may be empty.
    pub next: &'a [u8],
}

impl<'a> Blocks<'a> {
    /// Splits the blocks into ranges of at most `blocks` blocks.
    pub fn parts(self, blocks: usize) -> impl Iterator<Item = Blocks<'a>> {
        let bytes = self.groups * 64;
        (0..self.items).step_by(blocks * BLOCK).map(move |first| Blocks {
            codes: &self.codes[first / BLOCK * bytes..],
            scales: &self.scales[first..],
            items: (self.items - first).min(blocks * BLOCK),
            first_slot: self.first_slot + first as u32,
            next: self.codes.get((first / BLOCK + blocks) * bytes..).filter(|c| !c.is_empty()).unwrap_or(self.next),
            ..self
        })
    }
}

/// A block, and which of its items are to be scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pick {
    /// Index of the block.
    pub block: u32,
    /// Bit `i` is set if item `i` of the block is to be scored.
    pub mask: u16,
}

/// A query in two int8 rows: a number is `scale (128 high + low)`.
#[derive(Clone, Copy, Debug)]
pub struct Int8Query<'a> {
    /// The high and the low row, each `[4 G]`, zeros beyond D.
    pub rows: [&'a [i8]; 2],
    /// 128 times the sum of each row, to subtract because item codes are stored with 128 added.
    pub corrections: [i32; 2],
    /// Factor of the numbers of the low row: a component is `scale (128 high + low)`.
    pub scale: f32,
}

/// Factor of the high row of a query, relative to the low row.
pub(super) const HIGH: f32 = 128.0;

/// Buffer for scored items before selection. `len` entries are filled. A kernel writes complete registers, so both slices need
/// [`BLOCK`] entries more than are used.
#[derive(Debug)]
pub struct Staging<'a> {
    /// Scores.
    pub scores: &'a mut [f32],
    /// Slots of the scores.
    pub slots: &'a mut [u32],
    /// Number of filled entries.
    pub len: usize,
}

impl Staging<'_> {
    /// # Panics
    /// If there is no room for `items` more entries, or `slots` is shorter than `scores`.
    pub(super) fn check(&self, items: usize) {
        assert!(self.scores.len() == self.slots.len() && self.len + items <= self.scores.len());
    }
}

/// One of several queries that share a scan.
#[derive(Debug)]
pub struct Lane<'a> {
    /// The query.
    pub query: Int8Query<'a>,
    /// Minimum score of an item.
    pub threshold: f32,
    /// Output of this query.
    pub staging: Staging<'a>,
}

pub(super) fn check(blocks: &Blocks<'_>, query: &Int8Query<'_>) {
    let count = blocks.items.div_ceil(BLOCK);
    assert!(query.rows.iter().all(|row| row.len() == blocks.groups * 4));
    assert!(blocks.codes.len() >= count * blocks.groups * 64 && blocks.scales.len() >= count * BLOCK);
}

/// Returns the items that a block holds, one bit each.
pub(super) fn items_of(blocks: &Blocks<'_>, block: usize) -> u16 {
    filled(blocks.items, block)
}

/// Returns the items that a block holds of a list of `items` items, one bit each.
pub(super) fn filled(items: usize, block: usize) -> u16 {
    match items - block * BLOCK {
        left @ 0..BLOCK => (1 << left) - 1,
        _ => u16::MAX,
    }
}

/// Prefetch distance in bytes of blocks.
pub(super) const BYTES_AHEAD: usize = 12 << 10;

/// Returns the prefetch distance in blocks of `bytes` bytes each.
pub(super) fn blocks_ahead(bytes: usize) -> usize {
    (BYTES_AHEAD / bytes).clamp(2, 16)
}

/// Returns the prefetch distance in scattered rows of `bytes` bytes each: 8 KiB, but 4 to 32 rows. The prefetch
/// distance is short, so that searches that score few rows benefit too.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) fn rows_ahead(bytes: usize) -> usize {
    const BYTES: usize = 8 << 10;
    (BYTES / bytes.max(1)).clamp(4, 32)
}

/// Returns the address to prefetch for block `block`. After the last block, the prefetched address is in the next list;
/// any address is valid for a prefetch.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(super) fn prefetch_address(blocks: &Blocks<'_>, block: usize) -> *const u8 {
    let (bytes, count) = (blocks.groups * 64, blocks.items.div_ceil(BLOCK));
    let (codes, block) = match block.checked_sub(count) {
        Some(past) if !blocks.next.is_empty() => (blocks.next, past),
        Some(past) => (blocks.codes, past),
        None => (blocks.codes, block),
    };
    codes.as_ptr().wrapping_add(block * bytes)
}

/// Returns the item with the largest score; ties go to the first item. Lane `l` of 16 saw its largest score in block `blocks[l]`
/// first.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) fn first_best(scores: &[f32; BLOCK], blocks: &[u32; BLOCK]) -> u32 {
    let item = |lane: usize| blocks[lane] * BLOCK as u32 + lane as u32;
    let better = |a: usize, b: usize| scores[a] > scores[b] || (scores[a] == scores[b] && item(a) < item(b));
    item((1..BLOCK).fold(0, |retained, lane| if better(lane, retained) { lane } else { retained }))
}
