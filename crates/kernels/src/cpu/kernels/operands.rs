//! What the kernels take: blocks of codes, queries, and where scored items are staged.

/// Items of a block.
pub const BLOCK: usize = 16;

/// Blocked int8 rows of one list, with what scoring them needs.
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a> {
    /// `[blocks, G, 16, 4]` bytes.
    pub codes: &'a [u8],
    /// One a slot, `[blocks * 16]`.
    pub scales: &'a [f32],
    /// Groups of 4 dimensions, G.
    pub groups: usize,
    /// Items; the last block may hold fewer than 16.
    pub items: usize,
    /// The slot of item 0.
    pub first_slot: u32,
    /// Codes that are read after these, asked for ahead; or none.
    pub next: &'a [u8],
}

impl<'a> Blocks<'a> {
    /// The same blocks in runs of at most `blocks`.
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

/// A block with the items of it that are to be scored, one bit each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pick {
    /// Its number among the blocks.
    pub block: u32,
    /// Bit `i` is set where item `i` of the block is to be scored.
    pub mask: u16,
}

/// A query in two rows of int8: a number is `scale (128 high + low)`.
#[derive(Clone, Copy, Debug)]
pub struct Int8Query<'a> {
    /// The high and the low row, each `[4 G]`, zeros beyond D.
    pub rows: [&'a [i8]; 2],
    /// 128 times the sum of each row.
    pub corrections: [i32; 2],
    /// What one is worth in the low row.
    pub scale: f32,
}

/// What one is worth in the high row of a query, in those of the low row.
pub(super) const HIGH: f32 = 128.0;

/// Scored items on their way into a selection. `len` of them are filled; a kernel writes whole vectors, so that
/// both slices hold [`BLOCK`] entries more than are used.
#[derive(Debug)]
pub struct Staging<'a> {
    /// Scores.
    pub scores: &'a mut [f32],
    /// Their slots.
    pub slots: &'a mut [u32],
    /// How many are filled.
    pub len: usize,
}

impl Staging<'_> {
    /// # Panics
    /// Where there is no room for `items` more, or less of it for slots than for scores.
    pub(super) fn check(&self, items: usize) {
        assert!(self.scores.len() == self.slots.len() && self.len + items <= self.scores.len());
    }
}

/// One query of several that scan together.
#[derive(Debug)]
pub struct Lane<'a> {
    /// The query.
    pub query: Int8Query<'a>,
    /// The score that an item must reach.
    pub threshold: f32,
    /// Where its items go.
    pub staging: Staging<'a>,
}

pub(super) fn check(blocks: &Blocks<'_>, query: &Int8Query<'_>) {
    let count = blocks.items.div_ceil(BLOCK);
    assert!(query.rows.iter().all(|row| row.len() == blocks.groups * 4));
    assert!(blocks.codes.len() >= count * blocks.groups * 64 && blocks.scales.len() >= count * BLOCK);
}

/// The items that a block holds, one bit each.
pub(super) fn items_of(blocks: &Blocks<'_>, block: usize) -> u16 {
    filled(blocks.items, block)
}

/// The same of a list of so many items.
pub(super) fn filled(items: usize, block: usize) -> u16 {
    match items - block * BLOCK {
        left @ 0..BLOCK => (1 << left) - 1,
        _ => u16::MAX,
    }
}

/// Bytes of blocks that are asked for ahead of the one in work.
pub(super) const BYTES_AHEAD: usize = 12 << 10;

/// The same in blocks of so many bytes.
pub(super) fn blocks_ahead(bytes: usize) -> usize {
    (BYTES_AHEAD / bytes).clamp(2, 16)
}

/// Scattered rows, of so many bytes each, that are asked for ahead of the one in work: 32 of 256 bytes, and of wider ones as many bytes,
/// so that those of a search that scores few are asked for, too.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) fn rows_ahead(bytes: usize) -> usize {
    const BYTES: usize = 8 << 10;
    (BYTES / bytes.max(1)).clamp(4, 32)
}

/// Where the codes of a block that is to be asked for lie: past the last one in the list that is next, or anywhere.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(super) fn to_come(blocks: &Blocks<'_>, block: usize) -> *const u8 {
    let (bytes, count) = (blocks.groups * 64, blocks.items.div_ceil(BLOCK));
    let (codes, block) = match block.checked_sub(count) {
        Some(past) if !blocks.next.is_empty() => (blocks.next, past),
        Some(past) => (blocks.codes, past),
        None => (blocks.codes, block),
    };
    codes.as_ptr().wrapping_add(block * bytes)
}

/// The item of the largest score, the first of equal ones, where lane `l` of 16 saw its largest in block `blocks[l]` first.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) fn first_best(scores: &[f32; BLOCK], blocks: &[u32; BLOCK]) -> u32 {
    let item = |lane: usize| blocks[lane] * BLOCK as u32 + lane as u32;
    let better = |a: usize, b: usize| scores[a] > scores[b] || (scores[a] == scores[b] && item(a) < item(b));
    item((1..BLOCK).fold(0, |kept, lane| if better(lane, kept) { lane } else { kept }))
}
