//! Int8 products in AVX2: codes are widened to 16 bits, because the products of two pairs of bytes may exceed 16 bits.

use std::arch::x86_64::*;

use super::super::operands::LANES;
use super::operands::{QUAD, QUAD_BYTES, ROWS_MAX, RowScale, Rows, Tile};
use super::portable;

/// Maximum number of rows of a tile: 12 of 16 registers hold sums.
const TILE_ROWS: usize = 3;
/// Columns per register: each has two lanes of partial sums.
const WIDTH: usize = 4;
/// Number of registers per row of a tile.
const WIDE: usize = LANES / WIDTH;

/// # Safety
/// The CPU has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn quantize(rows: &Rows<'_>, codes: &mut [u8], apart: usize, scales: &mut [RowScale; ROWS_MAX]) {
    portable::quantize(rows, codes, apart, scales);
}

/// # Safety
/// The CPU has AVX2 and FMA; the slices are as long as `Kernels::product_int8` checks.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn tile(tile: &Tile<'_>, out: &mut [f32], stride: usize) {
    for row in (0..tile.rows).step_by(TILE_ROWS) {
        for column in (0..tile.count).step_by(LANES) {
            // SAFETY: this function's `# Safety` conditions hold; the rows and the column lie inside the tile.
            unsafe {
                match tile.rows - row {
                    1 => block::<1>(tile, out, stride, row, column),
                    2 => block::<2>(tile, out, stride, row, column),
                    _ => block::<TILE_ROWS>(tile, out, stride, row, column),
                }
            }
        }
    }
}

/// Computes `M` rows and 16 columns.
///
/// # Safety
/// As [`tile`]; the rows and the first column lie inside the tile.
// Loops by index: iterators would move the sums through memory.
#[allow(clippy::needless_range_loop)]
#[target_feature(enable = "avx2,fma")]
#[inline]
unsafe fn block<const M: usize>(tile: &Tile<'_>, out: &mut [f32], stride: usize, row: usize, column: usize) {
    let mut sums = [[_mm256_setzero_si256(); WIDE]; M];
    let first = tile.matrix.register((tile.first + column) / LANES);
    let (weights, codes) = (&tile.matrix.codes()[first..], &tile.codes[row * tile.stride..]);
    for k in 0..tile.matrix.quads() {
        let mut x = [_mm256_setzero_si256(); M];
        for (m, x) in x.iter_mut().enumerate() {
            // SAFETY: a row has complete quads of codes.
            let quad = unsafe { codes.as_ptr().add(m * tile.stride + k * QUAD).cast::<i32>().read_unaligned() };
            *x = _mm256_broadcastq_epi64(_mm_cvtepu8_epi16(_mm_cvtsi32_si128(quad)));
        }
        for v in 0..WIDE {
            // SAFETY: each quad of the matrix has complete panels of columns.
            let w = unsafe { _mm_loadu_si128(weights.as_ptr().add(k * QUAD_BYTES + v * WIDTH * QUAD).cast()) };
            let w = _mm256_cvtepi8_epi16(w);
            for m in 0..M {
                sums[m][v] = _mm256_add_epi32(sums[m][v], _mm256_madd_epi16(x[m], w));
            }
        }
    }
    for (m, sums) in sums.iter().enumerate() {
        let mut all = [0i32; LANES];
        for (pair, to) in sums.as_chunks::<2>().0.iter().zip(all.as_chunks_mut::<8>().0) {
            // The sums of both halves alternate in groups of two columns.
            let joined = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_hadd_epi32(pair[0], pair[1]));
            // SAFETY: eight sums fill a register.
            unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), joined) };
        }
        let width = LANES.min(tile.count - column);
        portable::finish(tile, row + m, column, &all, &mut out[(row + m) * stride + column..][..width]);
    }
}
