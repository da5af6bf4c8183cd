//! Pseudorandom rotation in O(D log D): alternates sign flips, Hadamard transforms, and sums and differences of halves.
//!
//! The width W is a multiple of 64; vectors are padded with zeros. Each of four rounds has three steps. First, numbers
//! flip their signs according to the round's bits. Second, a Hadamard transform is applied to the first (in every
//! second round the last) 2^n numbers, the largest power of two up to W. Third, if W is not a power of two, each number
//! of the first half and the number W / 2 after it become their sum and their difference over √2. Each step preserves
//! lengths and angles.
//!
//! Source: Hadamard transforms with random signs (Ailon & Chazelle 2006), with a step of Kac's walk for other widths, as in
//! RaBitQ.

use std::array;
use std::f32::consts::FRAC_1_SQRT_2;

use crate::ivf::random::mix;

/// Number of rounds, each with its own signs.
const ROUNDS: usize = 4;
/// Divisor of the width: sign flips are stored in words of 64 bits.
const WORD: usize = 64;

/// Rotation of vectors of a fixed dimension.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::ivf) struct Rotation {
    dimension: usize,
    /// Sign flips per round, one bit per number, `[4, W / 64]`.
    signs: Vec<u64>,
    /// Sign flips as sign-bit masks of f32, `[4, W]`.
    flips: Vec<u32>,
}

impl Rotation {
    /// Returns the width of the output, W.
    pub(super) fn width_of(dimension: usize) -> usize {
        dimension.next_multiple_of(WORD)
    }

    /// Creates the pseudorandom rotation that a seed determines.
    pub(super) fn draw(dimension: usize, seed: u64) -> Self {
        let words = ROUNDS * Rotation::width_of(dimension) / WORD;
        Rotation::of((0..words as u64).map(|n| mix(seed, n)).collect(), dimension)
    }

    /// Creates the rotation from sign flips that were read from a file.
    pub(super) fn of_signs(dimension: usize, signs: &[u64]) -> Self {
        Rotation::of(signs.to_vec(), dimension)
    }

    fn of(signs: Vec<u64>, dimension: usize) -> Self {
        let flips = signs.iter().flat_map(|word| (0..WORD).map(move |n| ((word >> n) as u32 & 1) << 31)).collect();
        Rotation { dimension, signs, flips }
    }

    /// Returns the shape of the sign flips in a file, `[4, W / 64]`.
    pub(super) fn shape(dimension: usize) -> [usize; 2] {
        [ROUNDS, Rotation::width_of(dimension) / WORD]
    }

    pub(super) fn signs(&self) -> &[u64] {
        &self.signs
    }

    pub(super) fn width(&self) -> usize {
        Rotation::width_of(self.dimension)
    }

    /// Rotates `numbers` (`[D]`) into `to` (`[W]`).
    pub(super) fn rotate(&self, numbers: impl Iterator<Item = f32>, to: &mut Vec<f32>) {
        let width = self.width();
        to.clear();
        to.extend(numbers);
        debug_assert_eq!(to.len(), self.dimension);
        to.resize(width, 0.0);
        let complete = 1 << width.ilog2();
        for (round, flips) in self.flips.chunks_exact(width).enumerate() {
            to.iter_mut().zip(flips).for_each(|(x, flip)| *x = f32::from_bits(x.to_bits() ^ flip));
            let first = if round % 2 == 0 { 0 } else { width - complete };
            hadamard(&mut to[first..first + complete]);
            if complete < width {
                let (low, high) = to.split_at_mut(width / 2);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = ((*a + *b) * FRAC_1_SQRT_2, (*a - *b) * FRAC_1_SQRT_2);
                }
            }
        }
    }
}

/// Orthonormal Hadamard transform of 2^n numbers, at least 16.
fn hadamard(numbers: &mut [f32]) {
    numbers.as_chunks_mut().0.iter_mut().for_each(butterfly_sixteen);
    let mut half = 16;
    while half < numbers.len() {
        for pair in numbers.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
    let scale = (numbers.len() as f32).sqrt().recip();
    numbers.iter_mut().for_each(|x| *x *= scale);
}

/// Steps of the transform within 16 numbers. Transposing the 4 x 4 matrix makes the steps between neighbours vectorizable.
fn butterfly_sixteen(numbers: &mut [f32; 16]) {
    let transposed = |rows: [[f32; 4]; 4]| array::from_fn(|c| array::from_fn(|r| rows[r][c]));
    let rows = array::from_fn(|r| array::from_fn(|c| numbers[4 * r + c]));
    let rows = butterfly_four(transposed(butterfly_four(transposed(rows))));
    numbers.copy_from_slice(rows.as_flattened());
}

/// Butterflies of adjacent rows, then of rows two apart.
fn butterfly_four([a, b, c, d]: [[f32; 4]; 4]) -> [[f32; 4]; 4] {
    let sum = |a: [f32; 4], b: [f32; 4]| array::from_fn(|n| a[n] + b[n]);
    let difference = |a: [f32; 4], b: [f32; 4]| array::from_fn(|n| a[n] - b[n]);
    let (a, b, c, d): ([f32; 4], _, _, _) = (sum(a, b), difference(a, b), sum(c, d), difference(c, d));
    [sum(a, c), sum(b, d), difference(a, c), difference(b, d)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ivf::tests::vectors;

    #[test]
    fn lengths_and_angles_stay() {
        for dimension in [1, 50, 64, 65, 200, 256, 384, 700, 768, 1024] {
            let rotation = Rotation::draw(dimension, 3);
            let values = vectors(2, dimension, dimension as u64);
            let (a, b) = values.split_at(dimension);
            let rotated = |of: &[f32]| {
                let mut to = Vec::new();
                rotation.rotate(of.iter().copied(), &mut to);
                assert_eq!(to.len(), dimension.next_multiple_of(64));
                to
            };
            let product = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| f64::from(x * y)).sum::<f64>();
            for (x, y) in [(a, a), (a, b), (b, b)] {
                let (before, after) = (product(x, y), product(&rotated(x), &rotated(y)));
                let slack = 1e-5 * (product(x, x) * product(y, y)).sqrt();
                assert!((before - after).abs() <= slack, "{dimension}: {before} {after}");
            }
        }
    }

    #[test]
    fn the_fast_transform_equals_its_matrix() {
        for count in [16, 64, 512] {
            let values = vectors(1, count, 9);
            let mut numbers = values.clone();
            hadamard(&mut numbers);
            for (row, found) in numbers.iter().enumerate() {
                let signed = |(n, x): (usize, &f32)| if (row & n).count_ones() % 2 == 0 { *x } else { -x };
                let sum: f64 = values.iter().enumerate().map(|of| f64::from(signed(of))).sum();
                let expected = sum / (count as f64).sqrt();
                assert!((f64::from(*found) - expected).abs() < 1e-5, "{count} {row}: {found} {expected}");
            }
        }
    }

    #[test]
    fn rotation_spreads_one_dimension_over_all() {
        for dimension in [256, 384, 768] {
            let rotation = Rotation::draw(dimension, 5);
            for at in [0, 1, dimension / 2, dimension - 1] {
                let mut to = Vec::new();
                rotation.rotate((0..dimension).map(|d| f32::from(u8::from(d == at))), &mut to);
                let largest = to.iter().fold(0f32, |most, x| most.max(x.abs()));
                assert!(largest < 6.0 / (dimension as f32).sqrt(), "{dimension} {at}: {largest}");
            }
        }
    }
}
