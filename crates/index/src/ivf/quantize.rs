//! f32 vectors to codes: one scale a vector, symmetric, so that a product of codes times two scales is the score. Items take
//! int8; a query takes 15 bits in two rows of int8, so that it adds next to nothing to the items' rounding.

use sterling_kernels::cpu::kernels::{BLOCK, Int8Query};

/// Codes of a query that make one of its high row.
const LOW: i32 = 128;

/// The scale of a vector whose largest magnitude is worth `most` codes.
fn scale(vector: &[f32], most: f32) -> f32 {
    // In lanes, which run in vectors.
    let mut lanes = [0f32; BLOCK];
    let (blocks, rest) = vector.as_chunks::<BLOCK>();
    for block in blocks {
        lanes = std::array::from_fn(|n| if block[n].abs() > lanes[n] { block[n].abs() } else { lanes[n] });
    }
    rest.iter().chain(&lanes).fold(0f32, |most, x| most.max(x.abs())) / most
}

/// The nearest integer of a number within 2^22 of zero: adding this constant leaves it in the low bits of the mantissa.
/// Unlike `round`, which calls the mathematics library, this is arithmetic that runs in vectors.
fn nearest(x: f32) -> i32 {
    const SHIFT: f32 = 12_582_912.0;
    (x + SHIFT).to_bits() as i32 - SHIFT.to_bits() as i32
}

fn code(x: f32, inverse: f32) -> i8 {
    nearest((x * inverse).clamp(-127.0, 127.0)) as i8
}

fn inverse(scale: f32) -> f32 {
    if scale > 0.0 && scale.recip().is_finite() { scale.recip() } else { 0.0 }
}

/// A query in codes, kept between calls so that nothing is allocated.
#[derive(Clone, Debug, Default)]
pub(crate) struct Quantized {
    high: Vec<i8>,
    low: Vec<i8>,
    scale: f32,
    corrections: [i32; 2],
}

impl Quantized {
    /// Takes the codes of `vector` `[D]`.
    pub(crate) fn set(&mut self, vector: &[f32]) {
        let most = (127 * LOW) as f32;
        self.scale = scale(vector, most);
        let inverse = inverse(self.scale);
        let len = vector.len().next_multiple_of(4);
        self.high.clear();
        self.high.resize(len, 0);
        self.low.clear();
        self.low.resize(len, 0);
        for ((&x, high), low) in vector.iter().zip(&mut self.high).zip(&mut self.low) {
            let code = nearest((x * inverse).clamp(-most, most));
            *high = ((code + LOW / 2) >> LOW.ilog2()) as i8;
            *low = (code - LOW * i32::from(*high)) as i8;
        }
        self.corrections = [&self.high, &self.low].map(|row| 128 * row.iter().map(|&c| i32::from(c)).sum::<i32>());
    }

    /// The query as kernels take it.
    pub(crate) fn view(&self) -> Int8Query<'_> {
        Int8Query { rows: [&self.high, &self.low], corrections: self.corrections, scale: self.scale }
    }
}

/// Writes the row of a slot into blocked codes and returns its scale. `codes` holds the block of 16 slots that `lane`
/// (`0..16`) is in.
pub(super) fn write_row(vector: &[f32], lane: usize, block: &mut [u8]) -> f32 {
    let scale = scale(vector, 127.0);
    let inverse = inverse(scale);
    for (d, &x) in vector.iter().enumerate() {
        block[place(lane, d)] = (i16::from(code(x, inverse)) + 128) as u8;
    }
    if inverse == 0.0 { 0.0 } else { scale }
}

/// The codes `[D]` that [`write_row`] wrote for a slot, in the blocked codes of all slots.
pub(super) fn read_row(codes: &[u8], dimension: usize, slot: usize) -> impl Iterator<Item = f32> {
    let bytes = dimension.div_ceil(4) * 4 * BLOCK;
    let block = &codes[slot / BLOCK * bytes..][..bytes];
    (0..dimension).map(move |d| f32::from(block[place(slot % BLOCK, d)]) - 128.0)
}

/// The codes of one of the 16 slots of a block, `[G, 4]`.
pub(super) fn read_lane(block: &[u8], lane: usize, to: &mut [u8]) {
    let groups = block.chunks_exact(4 * BLOCK);
    to.chunks_exact_mut(4).zip(groups).for_each(|(to, group)| to.copy_from_slice(&group[lane * 4..][..4]));
}

/// Puts into a block what [`read_lane`] has read.
pub(super) fn write_lane(codes: &[u8], lane: usize, block: &mut [u8]) {
    let groups = block.chunks_exact_mut(4 * BLOCK);
    codes.chunks_exact(4).zip(groups).for_each(|(codes, group)| group[lane * 4..][..4].copy_from_slice(codes));
}

/// Where dimension `d` of an item of a block lies in it.
fn place(lane: usize, d: usize) -> usize {
    d / 4 * 4 * BLOCK + lane * 4 + d % 4
}
