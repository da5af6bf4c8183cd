//! Quantization of f32 vectors: one symmetric scale per vector, so that the score is the product of codes times two scales. Items
//! use int8. A query uses 15 bits in two rows of int8, so that its rounding error is negligible compared with that of the items.

use sterling_kernels::cpu::kernels::{BLOCK, Int8Query};

/// Factor of the high row of a query, relative to the low row.
const LOW: i32 = 128;

/// Returns the scale that maps the largest magnitude of a vector to `most`.
fn scale(vector: &[f32], most: f32) -> f32 {
    // Independent accumulators let the compiler vectorize the maximum.
    let mut lanes = [0f32; BLOCK];
    let (blocks, rest) = vector.as_chunks::<BLOCK>();
    for block in blocks {
        lanes = std::array::from_fn(|n| if block[n].abs() > lanes[n] { block[n].abs() } else { lanes[n] });
    }
    rest.iter().chain(&lanes).fold(0f32, |most, x| most.max(x.abs())) / most
}

/// Returns the nearest integer of a number within 2^22 of zero. Adding this constant leaves the integer in the low bits of the
/// mantissa. Unlike `round`, which calls the math library, this vectorizes.
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

/// Quantized query, reused between calls to avoid allocations.
#[derive(Clone, Debug, Default)]
pub(crate) struct Quantized {
    high: Vec<i8>,
    low: Vec<i8>,
    scale: f32,
    corrections: [i32; 2],
}

impl Quantized {
    /// Quantizes `vector` `[D]`.
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

    /// Returns the length of the vector, with an error of about 1 % of its largest component. The length is computed
    /// from integers, so that all processors return the same number.
    pub(super) fn length(&self) -> f32 {
        let square: i32 = self.high.iter().map(|&code| i32::from(code) * i32::from(code)).sum();
        self.scale * LOW as f32 * (square as f32).sqrt()
    }

    pub(crate) fn view(&self) -> Int8Query<'_> {
        Int8Query { rows: [&self.high, &self.low], corrections: self.corrections, scale: self.scale }
    }
}

/// Quantizes the row of a slot into blocked codes and returns its scale. `block` holds 16 slots; `lane` (`0..16`) is the position
/// of the slot.
pub(super) fn write_row(vector: &[f32], lane: usize, block: &mut [u8]) -> f32 {
    let scale = scale(vector, 127.0);
    let inverse = inverse(scale);
    for (d, &x) in vector.iter().enumerate() {
        block[place(lane, d)] = (i16::from(code(x, inverse)) + 128) as u8;
    }
    if inverse == 0.0 { 0.0 } else { scale }
}

/// Returns the codes `[D]` of a slot from the blocked codes of all slots.
pub(super) fn read_row(codes: &[u8], dimension: usize, slot: usize) -> impl Iterator<Item = f32> {
    let bytes = dimension.div_ceil(4) * 4 * BLOCK;
    let block = &codes[slot / BLOCK * bytes..][..bytes];
    (0..dimension).map(move |d| f32::from(block[place(slot % BLOCK, d)]) - 128.0)
}

/// Copies the codes of one of the 16 slots out of a block, `[G, 4]`.
pub(super) fn read_lane(block: &[u8], lane: usize, to: &mut [u8]) {
    let groups = block.chunks_exact(4 * BLOCK);
    to.chunks_exact_mut(4).zip(groups).for_each(|(to, group)| to.copy_from_slice(&group[lane * 4..][..4]));
}

/// Copies codes from [`read_lane`] into a block.
pub(super) fn write_lane(codes: &[u8], lane: usize, block: &mut [u8]) {
    let groups = block.chunks_exact_mut(4 * BLOCK);
    codes.chunks_exact(4).zip(groups).for_each(|(codes, group)| group[lane * 4..][..4].copy_from_slice(codes));
}

/// Returns the index of dimension `d` of an item within its block.
fn place(lane: usize, d: usize) -> usize {
    d / 4 * 4 * BLOCK + lane * 4 + d % 4
}
