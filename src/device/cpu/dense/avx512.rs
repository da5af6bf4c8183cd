//! Dense loops in AVX-512: tiles of up to 14 rows and 32 columns, or of up to 3 rows and 128 columns.

use std::arch::x86_64::*;

use super::maps;
use super::operands::{Binary, Fold, LANES, MapTarget, Operand, PANEL, Product, Unary};

/// Rows of a tile: 28 of 32 registers hold sums.
const ROWS_MAX: usize = 14;
/// Up to so many rows are multiplied with [`WIDE`] registers of columns at once, for want of other independent sums.
const ROWS_FEW: usize = 3;
const WIDE: usize = 8;

/// A tile: so many rows from `row` on, columns from register `register` on.
#[derive(Clone, Copy)]
struct Place {
    row: usize,
    register: usize,
    stride: usize,
}

/// # Safety
/// The CPU has AVX-512 F, BW and VL; the slices are as long as `Kernels::product` checks.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn product(product: &Product<'_>, out: &mut [f32], stride: usize) {
    let registers = product.columns.div_ceil(LANES);
    let tiles = product.rows.div_ceil(ROWS_MAX);
    let mut row = 0;
    for tile in 0..tiles {
        // Tiles of nearly equal height: none of them is left with a row or two.
        let rows = (product.rows - row).div_ceil(tiles - tile);
        let mut register = 0;
        while register < registers {
            let place = Place { row, register, stride };
            let left = registers - register;
            // SAFETY: this function's conditions; the tile lies inside the result.
            register += unsafe {
                match left {
                    WIDE.. if rows <= ROWS_FEW => wide(product, out.as_mut_ptr(), place, rows),
                    2.. => panel::<2>(product, out.as_mut_ptr(), place, rows),
                    _ => panel::<1>(product, out.as_mut_ptr(), place, rows),
                }
            };
        }
        row += rows;
    }
}

/// # Safety
/// As [`tile`], for a tile of `rows` rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn wide(product: &Product<'_>, out: *mut f32, place: Place, rows: usize) -> usize {
    // SAFETY: this function's conditions.
    unsafe {
        match rows {
            1 => tile::<1, WIDE>(product, out, place),
            2 => tile::<2, WIDE>(product, out, place),
            _ => tile::<3, WIDE>(product, out, place),
        }
    }
    WIDE
}

/// # Safety
/// As [`tile`], for a tile of `rows` rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn panel<const V: usize>(product: &Product<'_>, out: *mut f32, place: Place, rows: usize) -> usize {
    // SAFETY: this function's conditions.
    unsafe {
        match rows {
            1 => tile::<1, V>(product, out, place),
            2 => tile::<2, V>(product, out, place),
            3 => tile::<3, V>(product, out, place),
            4 => tile::<4, V>(product, out, place),
            5 => tile::<5, V>(product, out, place),
            6 => tile::<6, V>(product, out, place),
            7 => tile::<7, V>(product, out, place),
            8 => tile::<8, V>(product, out, place),
            9 => tile::<9, V>(product, out, place),
            10 => tile::<10, V>(product, out, place),
            11 => tile::<11, V>(product, out, place),
            12 => tile::<12, V>(product, out, place),
            13 => tile::<13, V>(product, out, place),
            _ => tile::<14, V>(product, out, place),
        }
    }
    V
}

/// Sums of `M` rows and `V` registers of columns.
///
/// # Safety
/// As [`product`]; the rows and the first column of every register lie inside the result.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
unsafe fn tile<const M: usize, const V: usize>(product: &Product<'_>, out: *mut f32, place: Place) {
    let Place { row, register, stride } = place;
    let mut sums = [[_mm512_setzero_ps(); V]; M];
    if !product.bias.is_empty() {
        for v in 0..V {
            // SAFETY: a bias holds whole registers for all columns.
            let bias = unsafe { _mm512_loadu_ps(product.bias.as_ptr().add((register + v) * LANES)) };
            sums.iter_mut().for_each(|sum| sum[v] = bias);
        }
    }
    for part in product.parts {
        let mut columns = [std::ptr::null::<f32>(); V];
        for (v, column) in columns.iter_mut().enumerate() {
            let first = (register + v) * LANES;
            let start = first / PANEL * part.weights.panel_stride + first % PANEL;
            *column = part.weights.numbers.as_ptr().wrapping_add(start);
        }
        let rows = part.rows.as_ptr().wrapping_add(row * part.stride);
        for k in 0..part.depth {
            let mut weights = [_mm512_setzero_ps(); V];
            for v in 0..V {
                // SAFETY: weights reach to the last register of the last row (`super::operands::reach`).
                weights[v] = unsafe { _mm512_loadu_ps(columns[v].add(k * part.weights.row_stride)) };
            }
            for (m, sum) in sums.iter_mut().enumerate() {
                // SAFETY: all rows of a part hold `depth` numbers.
                let x = _mm512_set1_ps(unsafe { *rows.add(m * part.stride + k) });
                for v in 0..V {
                    sum[v] = _mm512_fmadd_ps(x, weights[v], sum[v]);
                }
            }
        }
    }
    for (m, sum) in sums.iter().enumerate() {
        for (v, &sum) in sum.iter().enumerate() {
            let first = (register + v) * LANES;
            // With the number second, NaN stays NaN.
            let sum = if product.relu { _mm512_max_ps(_mm512_setzero_ps(), sum) } else { sum };
            let left = (product.columns - first).min(LANES);
            let mask = (u32::MAX >> (32 - left)) as u16;
            // SAFETY: the masked numbers lie inside the result.
            unsafe { _mm512_mask_storeu_ps(out.add((row + m) * stride + first), mask, sum) };
        }
    }
}

/// # Safety
/// The CPU has AVX-512 F, BW and VL, and FMA.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
pub(super) unsafe fn map1(f: Unary, input: &Operand<'_>, target: &mut MapTarget<'_>) {
    maps::map1::<true>(f, input, target);
}

/// # Safety
/// As [`map1`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
pub(super) unsafe fn map2(f: Binary, a: &Operand<'_>, b: &Operand<'_>, target: &mut MapTarget<'_>) {
    maps::map2(f, a, b, target);
}

/// # Safety
/// As [`map1`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
pub(super) unsafe fn fold(f: Fold, input: &Operand<'_>, count: usize, target: &mut MapTarget<'_>) {
    maps::fold(f, input, count, target);
}

/// # Safety
/// As [`map1`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
pub(super) unsafe fn narrow(input: &Operand<'_>, count: usize, target: &mut MapTarget<'_>) {
    maps::narrow(input, count, target);
}

/// # Safety
/// As [`map1`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
pub(super) unsafe fn pack_narrow(matrix: &[f32], depth: usize, columns: usize, out: &mut [f32]) {
    maps::pack_narrow(matrix, depth, columns, out);
}
