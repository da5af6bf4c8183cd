//! Int8 products in AVX-512 VNNI: tiles of up to 14 rows and 32 columns, or up to 3 rows and 128 columns.

use std::arch::x86_64::*;

use super::super::operands::LANES;
use super::super::registers::lanes;
use super::operands::{QUAD, QUAD_BYTES, ROWS_MAX, RowScale, Rows, TILE_COLUMNS, Tile};

/// Maximum number of rows of a tile: 28 of 32 registers hold sums.
const TILE_ROWS: usize = 14;
/// Up to this number of rows, [`WIDE`] registers of columns are multiplied at once: fewer would be too few independent
/// sums.
const ROWS_FEW: usize = 3;
const WIDE: usize = TILE_COLUMNS / LANES;
/// Maximum number of registers that hold sums.
const ROOM: usize = 2 * TILE_ROWS;

/// Computes `portable::quantize`, bit for bit. Each step is done for all rows, because the steps of one row wait for
/// each other.
///
/// # Safety
/// The CPU has AVX-512 F, BW and VL.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn quantize(rows: &Rows<'_>, codes: &mut [u8], apart: usize, scales: &mut [RowScale; ROWS_MAX]) {
    let Rows { numbers, stride, depth, count } = *rows;
    assert!((1..=ROWS_MAX).contains(&count) && numbers.len() >= (count - 1) * stride + depth);
    assert!(apart >= depth.next_multiple_of(LANES) && codes.len() >= count * apart, "too little memory for the codes");
    for (row, scale) in scales[..count].iter_mut().enumerate() {
        let [mut min, mut max] = [_mm512_setzero_ps(); 2];
        let mut unordered = 0;
        for first in (0..depth).step_by(LANES) {
            // SAFETY: masked loads touch only the numbers of the row.
            let x = unsafe { _mm512_maskz_loadu_ps(lanes(depth - first), numbers.as_ptr().add(row * stride + first)) };
            // The instructions return their second operand if one is NaN.
            min = _mm512_min_ps(x, min);
            max = _mm512_max_ps(x, max);
            unordered |= _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
        }
        let (min, max) = (_mm512_reduce_min_ps(min), _mm512_reduce_max_ps(max));
        *scale = RowScale::of(min, max, unordered == 0 && min > f32::NEG_INFINITY && max < f32::INFINITY);
    }
    for (row, of_row) in scales[..count].iter().enumerate() {
        let (inverse, zero) = (_mm512_set1_ps(of_row.inverse), _mm512_set1_epi32(of_row.zero));
        for first in (0..depth).step_by(LANES) {
            // SAFETY: masked loads touch only the numbers of the row; its codes have room for complete registers.
            unsafe {
                let x = _mm512_maskz_loadu_ps(lanes(depth - first), numbers.as_ptr().add(row * stride + first));
                // No code is negative: a row's least number has the code 0 or more, and rounding keeps the order.
                let code = _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(x, inverse)), zero);
                let to = codes.as_mut_ptr().add(row * apart + first);
                _mm_storeu_si128(to.cast(), _mm512_cvtusepi32_epi8(code));
            }
        }
    }
}

/// # Safety
/// The CPU has AVX-512 F, BW, VL and VNNI; the slices are as long as `Kernels::product_int8` checks.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) unsafe fn tile(tile: &Tile<'_>, out: &mut [f32], stride: usize) {
    assert!((1..=ROWS_MAX).contains(&tile.rows) && out.len() >= (tile.rows - 1) * stride + tile.count);
    let registers = tile.count.div_ceil(LANES);
    let out = out.as_mut_ptr();
    let room = &mut [_mm512_setzero_si512(); ROOM];
    // SAFETY: this function's `# Safety` conditions hold; the registers lie inside the tile.
    unsafe {
        if tile.rows <= ROWS_FEW && registers == WIDE {
            return match tile.rows {
                1 => block::<1, WIDE>(tile, out, Place { row: 0, register: 0, stride }, room),
                2 => block::<2, WIDE>(tile, out, Place { row: 0, register: 0, stride }, room),
                _ => block::<ROWS_FEW, WIDE>(tile, out, Place { row: 0, register: 0, stride }, room),
            };
        }
        let tiles = tile.rows.div_ceil(TILE_ROWS);
        for register in (0..registers).step_by(2) {
            let mut row = 0;
            for n in 0..tiles {
                let count = (tile.rows - row).div_ceil(tiles - n);
                let place = Place { row, register, stride };
                match registers - register {
                    1 => rows_of::<1>(tile, count, out, place, room),
                    _ => rows_of::<2>(tile, count, out, place, room),
                }
                row += count;
            }
        }
    }
}

/// First row and register of a tile, and distance between rows of the output.
#[derive(Clone, Copy)]
struct Place {
    row: usize,
    register: usize,
    stride: usize,
}

/// Computes a tile of `count` rows.
///
/// # Safety
/// As [`block`], with `count` for `M`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn rows_of<const V: usize>(
    tile: &Tile<'_>,
    count: usize,
    out: *mut f32,
    place: Place,
    room: &mut [__m512i; ROOM],
) {
    // SAFETY: this function's `# Safety` conditions hold.
    unsafe {
        match count {
            1 => block::<1, V>(tile, out, place, room),
            2 => block::<2, V>(tile, out, place, room),
            3 => block::<3, V>(tile, out, place, room),
            4 => block::<4, V>(tile, out, place, room),
            5 => block::<5, V>(tile, out, place, room),
            6 => block::<6, V>(tile, out, place, room),
            7 => block::<7, V>(tile, out, place, room),
            8 => block::<8, V>(tile, out, place, room),
            9 => block::<9, V>(tile, out, place, room),
            10 => block::<10, V>(tile, out, place, room),
            11 => block::<11, V>(tile, out, place, room),
            12 => block::<12, V>(tile, out, place, room),
            13 => block::<13, V>(tile, out, place, room),
            _ => block::<TILE_ROWS, V>(tile, out, place, room),
        }
    }
}

/// Computes `M` rows and `V` registers of columns, from `place` on.
///
/// # Safety
/// As [`tile`]; the tile has `M` rows from the first one on, and columns in each of the registers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
unsafe fn block<const M: usize, const V: usize>(
    tile: &Tile<'_>,
    out: *mut f32,
    place: Place,
    room: &mut [__m512i; ROOM],
) {
    let Place { row, register, stride } = place;
    let mut sums = [[_mm512_setzero_si512(); V]; M];
    let first = tile.first / LANES + register;
    let mut columns = [std::ptr::null::<i8>(); V];
    for (v, column) in columns.iter_mut().enumerate() {
        *column = tile.matrix.codes().as_ptr().wrapping_add(tile.matrix.register(first + v));
    }
    let codes = tile.codes.as_ptr().wrapping_add(row * tile.stride);
    for k in 0..tile.matrix.quads() {
        let mut weights = [_mm512_setzero_si512(); V];
        for v in 0..V {
            // SAFETY: each quad of the matrix has complete panels of columns.
            weights[v] = unsafe { _mm512_loadu_si512(columns[v].add(k * QUAD_BYTES).cast()) };
        }
        for (m, sum) in sums.iter_mut().enumerate() {
            // SAFETY: a row has complete quads of codes.
            let quad = unsafe { codes.add(m * tile.stride + k * QUAD).cast::<i32>().read_unaligned() };
            let x = _mm512_set1_epi32(quad);
            for v in 0..V {
                sum[v] = _mm512_dpbusd_epi32(sum[v], x, weights[v]);
            }
        }
    }
    // The sums leave the registers in loops that the compiler unrolls. It would not unroll the loops below, and would
    // keep their operand in memory during the products, too.
    let (done, _) = room.split_at_mut(M * V);
    for (m, sum) in sums.iter().enumerate() {
        for (v, &sum) in sum.iter().enumerate() {
            done[m * V + v] = sum;
        }
    }
    let mut of_columns = [(_mm512_setzero_si512(), _mm512_setzero_ps(), _mm512_setzero_ps()); V];
    for (v, of_column) in of_columns.iter_mut().enumerate() {
        let column = (first + v) * LANES;
        // SAFETY: scales and sums of a matrix are padded to complete panels, a bias to a complete register.
        *of_column = unsafe {
            let bias = match tile.bias.is_empty() {
                true => _mm512_setzero_ps(),
                false => _mm512_loadu_ps(tile.bias.as_ptr().add(column)),
            };
            let scales = _mm512_loadu_ps(tile.matrix.scales.as_ptr().add(column));
            (_mm512_loadu_si512(tile.matrix.sums.as_ptr().add(column).cast()), scales, bias)
        };
    }
    for (m, (sums, of_row)) in done.chunks_exact(V).zip(&tile.scales[row..]).enumerate() {
        let (scale, zero) = (_mm512_set1_ps(of_row.scale), _mm512_set1_epi32(of_row.zero));
        for (v, (&sum, &(of_column, scales, bias))) in sums.iter().zip(&of_columns).enumerate() {
            let mask = lanes(tile.count - (register + v) * LANES);
            let sum = _mm512_sub_epi32(sum, _mm512_mullo_epi32(zero, of_column));
            let product = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), scales), scale);
            // SAFETY: the masked numbers lie inside the result.
            unsafe {
                let to = out.add((row + m) * stride + (register + v) * LANES);
                let base = if tile.adds { _mm512_maskz_loadu_ps(mask, to) } else { bias };
                let made = _mm512_add_ps(product, base);
                if mask == u16::MAX { _mm512_storeu_ps(to, made) } else { _mm512_mask_storeu_ps(to, mask, made) }
            }
        }
    }
}
