//! Dense loops in AVX2: tiles of up to 6 rows and 16 columns.

use std::arch::x86_64::*;

use super::maps;
use super::normalize::{self, Norm};
use super::operands::{Binary, EqualFold, Fold, Keys, LANES, MapTarget, Operand, PANEL, PairRows, Product, Unary};
use super::recurrent::{self, CellStep};

/// Maximum number of rows of a tile: 12 of 16 registers hold sums.
const ROWS_MAX: usize = 6;
/// Number of f32 per register.
const WIDTH: usize = 8;
/// Number of registers per row of a tile.
const WIDE: usize = LANES / WIDTH;

/// # Safety
/// The CPU has AVX2 and FMA; the slices are as long as `Kernels::product` checks.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn product(product: &Product<'_>, out: &mut [f32], stride: usize) {
    let tiles = product.rows.div_ceil(ROWS_MAX);
    let mut row = 0;
    for number in 0..tiles {
        let rows = (product.rows - row).div_ceil(tiles - number);
        for column in (0..product.columns).step_by(LANES) {
            // SAFETY: this function's `# Safety` conditions hold; the tile lies inside the result.
            unsafe {
                match rows {
                    1 => tile::<1>(product, out, stride, row, column),
                    2 => tile::<2>(product, out, stride, row, column),
                    3 => tile::<3>(product, out, stride, row, column),
                    4 => tile::<4>(product, out, stride, row, column),
                    5 => tile::<5>(product, out, stride, row, column),
                    _ => tile::<ROWS_MAX>(product, out, stride, row, column),
                }
            }
        }
        row += rows;
    }
}

/// Computes the sums of `M` rows and 16 columns.
///
/// # Safety
/// As [`product`]; the rows and the first column lie inside the result.
#[target_feature(enable = "avx2,fma")]
#[inline]
unsafe fn tile<const M: usize>(product: &Product<'_>, out: &mut [f32], stride: usize, row: usize, column: usize) {
    let mut sums = [[_mm256_setzero_ps(); WIDE]; M];
    if !product.bias.is_empty() {
        for v in 0..WIDE {
            // SAFETY: a bias holds complete registers for all columns.
            let bias = unsafe { _mm256_loadu_ps(product.bias.as_ptr().add(column + v * WIDTH)) };
            sums.iter_mut().for_each(|sum| sum[v] = bias);
        }
    }
    for part in product.parts {
        let start = column / PANEL * part.weights.panel_stride + column % PANEL;
        let columns = part.weights.numbers.as_ptr().wrapping_add(start);
        let rows = part.rows.as_ptr().wrapping_add(row * part.stride);
        for k in 0..part.depth {
            let mut weights = [_mm256_setzero_ps(); WIDE];
            for (v, weights) in weights.iter_mut().enumerate() {
                // SAFETY: weights reach to the last register of the last row (`super::operands::reach`).
                *weights = unsafe { _mm256_loadu_ps(columns.add(k * part.weights.row_stride + v * WIDTH)) };
            }
            for (m, sum) in sums.iter_mut().enumerate() {
                // SAFETY: all rows of a part hold `depth` numbers.
                let x = _mm256_set1_ps(unsafe { *rows.add(m * part.stride + k) });
                for v in 0..WIDE {
                    sum[v] = _mm256_fmadd_ps(x, weights[v], sum[v]);
                }
            }
        }
    }
    let width = LANES.min(product.columns - column);
    for (m, sum) in sums.iter().enumerate() {
        let mut complete = [0f32; LANES];
        for (v, &sum) in sum.iter().enumerate() {
            // `max` returns its second operand if one is NaN, so NaN sums stay NaN.
            let sum = if product.relu { _mm256_max_ps(_mm256_setzero_ps(), sum) } else { sum };
            // SAFETY: two registers fill the 16 numbers.
            unsafe { _mm256_storeu_ps(complete.as_mut_ptr().add(v * WIDTH), sum) };
        }
        let first = (row + m) * stride + column;
        match width {
            LANES => out[first..first + LANES].copy_from_slice(&complete),
            _ => out[first..first + width].copy_from_slice(&complete[..width]),
        }
    }
}

/// # Safety
/// The CPU has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn map1(f: Unary, input: &Operand<'_>, target: &mut MapTarget<'_>) {
    maps::map1::<true>(f, input, target);
}

/// # Safety
/// As [`map1`].
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn column(product: &Product<'_>, out: &mut [f32], stride: usize) {
    maps::column::<true>(product, out, stride);
}

/// # Safety
/// As [`map1`].
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn map2(f: Binary, a: &Operand<'_>, b: &Operand<'_>, target: &mut MapTarget<'_>) {
    maps::map2(f, a, b, target);
}

/// # Safety
/// As [`map1`].
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn fold(f: Fold, input: &Operand<'_>, count: usize, target: &mut MapTarget<'_>) {
    maps::fold(f, input, count, target);
}

/// # Safety
/// As [`map1`].
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn softmax(numbers: &mut [f32], width: usize) {
    normalize::softmax::<true>(numbers, width);
}

/// # Safety
/// As [`map1`].
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn norm(norm: &Norm<'_>, input: &Operand<'_>, target: &mut MapTarget<'_>) {
    normalize::norm(norm, input, target);
}

/// # Safety
/// As [`map1`].
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn fold_equal(keys: &Keys<'_>, folds: &[EqualFold<'_>], out: &mut [f32], stride: usize) {
    maps::fold_equal(keys, folds, out, stride);
}

/// # Safety
/// As [`map1`].
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn narrow(input: &Operand<'_>, count: usize, target: &mut MapTarget<'_>) {
    maps::narrow(input, count, target);
}

/// # Safety
/// As [`map1`].
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn pack_narrow(matrix: &[f32], depth: usize, columns: usize, rows: PairRows, out: &mut [f32]) {
    maps::pack_narrow(matrix, depth, columns, rows, out);
}

/// # Safety
/// As [`map1`].
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn reset(step: &CellStep<'_>, h: &[f32], to: &mut [f32]) {
    recurrent::reset::<true>(step, h, to);
}

/// # Safety
/// As [`map1`].
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn advance(step: &CellStep<'_>, is_active: &dyn Fn(usize) -> bool, h: &mut [f32], c: &mut [f32]) {
    recurrent::advance::<true>(step, is_active, h, c);
}
