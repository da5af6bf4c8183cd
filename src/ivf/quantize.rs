//! f32 vectors to int8 codes: one scale a vector, symmetric, so that a product of codes times two scales is the score.

use crate::device::kernels::{BLOCK, Int8Query};

/// The scale of a vector: its largest magnitude is worth 127 codes.
fn scale(vector: &[f32]) -> f32 {
    vector.iter().fold(0f32, |m, x| m.max(x.abs())) / 127.0
}

fn code(x: f32, inverse: f32) -> i8 {
    (x * inverse).round().clamp(-127.0, 127.0) as i8
}

fn inverse(scale: f32) -> f32 {
    if scale > 0.0 && scale.recip().is_finite() { scale.recip() } else { 0.0 }
}

/// A query in int8, kept between calls so that nothing is allocated.
#[derive(Clone, Debug, Default)]
pub struct Quantized {
    codes: Vec<i8>,
    scale: f32,
    correction: i32,
}

impl Quantized {
    /// Takes the codes of `vector` `[D]`.
    pub fn set(&mut self, vector: &[f32]) {
        self.scale = scale(vector);
        let inverse = inverse(self.scale);
        self.codes.clear();
        self.codes.extend(vector.iter().map(|&x| code(x, inverse)));
        self.codes.resize(vector.len().next_multiple_of(4), 0);
        self.correction = 128 * self.codes.iter().map(|&c| i32::from(c)).sum::<i32>();
    }

    /// The query as kernels take it.
    pub fn view(&self) -> Int8Query<'_> {
        Int8Query { codes: &self.codes, correction: self.correction, scale: self.scale }
    }
}

/// Writes the row of a slot into blocked codes and returns its scale. `codes` holds the block of 16 slots that `lane`
/// (`0..16`) is in.
pub(super) fn write_row(vector: &[f32], lane: usize, block: &mut [u8]) -> f32 {
    let scale = scale(vector);
    let inverse = inverse(scale);
    for (d, &x) in vector.iter().enumerate() {
        block[d / 4 * 4 * BLOCK + lane * 4 + d % 4] = (i16::from(code(x, inverse)) + 128) as u8;
    }
    if inverse == 0.0 { 0.0 } else { scale }
}
