//! Int8 products for any instruction set.

use super::super::operands::LANES;
use super::operands::{QUAD, QUAD_BYTES, ROWS_MAX, RowScale, Rows, Tile};

/// Quantizes rows to codes `apart` bytes apart, and pads them to complete quads.
#[inline(always)]
pub(super) fn quantize(rows: &Rows<'_>, codes: &mut [u8], apart: usize, scales: &mut [RowScale; ROWS_MAX]) {
    for (row, (scale, codes)) in scales.iter_mut().zip(codes.chunks_exact_mut(apart)).enumerate().take(rows.count) {
        *scale = quantize_row(&rows.numbers[row * rows.stride..][..rows.depth], codes);
    }
}

#[inline(always)]
fn quantize_row(row: &[f32], codes: &mut [u8]) -> RowScale {
    let (mut min, mut max, mut bits) = ([0f32; LANES], [0f32; LANES], [0u32; LANES]);
    let (complete, rest) = row.as_chunks::<LANES>();
    let mut add = |numbers: &[f32]| {
        for (n, &x) in numbers.iter().enumerate() {
            min[n] = if x < min[n] { x } else { min[n] };
            max[n] = if x > max[n] { x } else { max[n] };
            bits[n] = bits[n].max(x.to_bits() & 0x7fff_ffff);
        }
    };
    complete.iter().for_each(|numbers| add(numbers));
    add(rest);
    let is_finite = bits.iter().all(|bits| *bits < f32::INFINITY.to_bits());
    let of_row = RowScale::of(min.into_iter().fold(0.0, f32::min), max.into_iter().fold(0.0, f32::max), is_finite);
    let (codes, behind) = codes.split_at_mut(row.len());
    for (code, x) in codes.iter_mut().zip(row) {
        *code = ((x * of_row.inverse).round_ties_even() as i32 + of_row.zero).min(255) as u8;
    }
    behind[..row.len().next_multiple_of(QUAD) - row.len()].fill(0);
    of_row
}

pub(super) fn tile(tile: &Tile<'_>, out: &mut [f32], stride: usize) {
    for row in 0..tile.rows {
        for column in (0..tile.count).step_by(LANES) {
            let first = tile.matrix.register((tile.first + column) / LANES);
            let mut sums = [0i32; LANES];
            let codes = tile.codes[row * tile.stride..].as_chunks::<QUAD>().0;
            for (k, x) in codes.iter().enumerate().take(tile.matrix.quads()) {
                let weights = tile.matrix.codes()[first + k * QUAD_BYTES..][..LANES * QUAD].as_chunks::<QUAD>().0;
                for (sum, w) in sums.iter_mut().zip(weights) {
                    *sum += (0..QUAD).map(|n| i32::from(x[n]) * i32::from(w[n])).sum::<i32>();
                }
            }
            let width = LANES.min(tile.count - column);
            finish(tile, row, column, &sums, &mut out[row * stride + column..][..width]);
        }
    }
}

/// Converts sums of codes to results.
#[inline(always)]
pub(super) fn finish(tile: &Tile<'_>, row: usize, column: usize, sums: &[i32; LANES], out: &mut [f32]) {
    let RowScale { scale, zero, .. } = tile.scales[row];
    let first = tile.first + column;
    for (n, out) in out.iter_mut().enumerate() {
        let sum = sums[n].wrapping_sub(zero.wrapping_mul(tile.matrix.sums[first + n]));
        let base = if tile.adds { *out } else { tile.bias.get(first + n).copied().unwrap_or(0.0) };
        // The scale of the row comes last: a product of both scales, or of the sum and a large row's scale, may
        // overflow.
        *out = (sum as f32 * tile.matrix.scales[first + n]) * scale + base;
    }
}
