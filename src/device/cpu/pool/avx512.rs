//! Pooled lookups in AVX-512: 16 columns a register, up to 256 columns of a bag's sum kept in registers at once.

use std::arch::x86_64::*;

use super::bags::{BagSums, Bags, ColumnRun, PREFETCH_ROWS, bag_factor, prefetch_first, prefetch_row};
use super::rows::Rows;
use super::rows::formats::*;

/// Columns of a register.
const LANES: usize = 16;

/// Sums of all columns, group by group.
///
/// # Safety
/// The CPU has AVX-512 F, BW and VL, and F16C; the conditions of [`super::pool`] hold.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
pub(super) unsafe fn pool<const F: usize>(rows: &Rows<'_>, bags: &Bags<'_>, out: &mut BagSums<'_>) {
    let mut first = 0;
    while first < rows.width {
        let left = rows.width - first;
        let mut part = ColumnRun { first, columns: left };
        // SAFETY: this function's conditions, and `part` lies inside the row.
        unsafe {
            match left.div_ceil(LANES) {
                1 => group::<F, 1>(rows, bags, out, part),
                2 => group::<F, 2>(rows, bags, out, part),
                3 => group::<F, 3>(rows, bags, out, part),
                4 => group::<F, 4>(rows, bags, out, part),
                5 | 7 => {
                    part.columns = 4 * LANES;
                    group::<F, 4>(rows, bags, out, part);
                }
                6 => group::<F, 6>(rows, bags, out, part),
                8 => group::<F, 8>(rows, bags, out, part),
                9..=11 | 13..=15 => {
                    part.columns = 8 * LANES;
                    group::<F, 8>(rows, bags, out, part);
                }
                12 => group::<F, 12>(rows, bags, out, part),
                _ => {
                    part.columns = left.min(16 * LANES);
                    group::<F, 16>(rows, bags, out, part);
                }
            }
        }
        first += part.columns;
    }
}

/// Sums of up to `16 V` columns, the last register perhaps partly.
///
/// # Safety
/// As [`pool`]; `part` lies inside the row and takes `V` registers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
unsafe fn group<const F: usize, const V: usize>(
    rows: &Rows<'_>,
    bags: &Bags<'_>,
    out: &mut BagSums<'_>,
    part: ColumnRun,
) {
    let base = rows.bytes.as_ptr();
    let last = part.columns - (V - 1) * LANES;
    let span = part.span(rows.format);
    prefetch_first(rows, bags, &span);
    for bag in 0..bags.offsets.len().saturating_sub(1) {
        let mut sum = [_mm512_setzero_ps(); V];
        // The biases of quantised rows are the same for all columns and are added once, at the end.
        let mut shift = _mm512_setzero_ps();
        for at in bags.range(bag) {
            prefetch_row(rows, bags.ids, at + PREFETCH_ROWS, &span);
            // SAFETY: offsets lie inside ids and weights are one an id (checked in `super::pool`).
            let (id, weight) = unsafe { (*bags.ids.get_unchecked(at), bags.weight_unchecked(at)) };
            if id < 0 {
                continue;
            }
            // SAFETY: ids are below the number of rows, so that the row lies inside the bytes.
            let row = unsafe { base.add(id as usize * rows.row_bytes) };
            let mut weight = _mm512_set1_ps(weight);
            if F >= INT8 {
                // SAFETY: quantised rows start with four bytes of scale and bias.
                let (scale, bias) = unsafe { head(row) };
                shift = _mm512_fmadd_ps(weight, bias, shift);
                weight = _mm512_mul_ps(weight, scale);
            }
            for (v, sum) in sum.iter_mut().enumerate() {
                let lanes = if v + 1 == V { last } else { LANES };
                // SAFETY: the columns lie inside the row.
                let x = unsafe { load::<F>(row, part.first + v * LANES, lanes) };
                *sum = _mm512_fmadd_ps(weight, x, *sum);
            }
        }
        let factor = _mm512_set1_ps(bag_factor(bags, bag));
        let to = out.data[bag * out.stride + out.column + part.first..][..part.columns].as_mut_ptr();
        for (v, sum) in sum.iter().enumerate() {
            let lanes = if v + 1 == V { last } else { LANES };
            // SAFETY: `to` has `part.columns` numbers and the mask leaves out what lies behind them.
            unsafe {
                _mm512_mask_storeu_ps(
                    to.add(v * LANES),
                    mask(lanes) as u16,
                    _mm512_mul_ps(_mm512_add_ps(*sum, shift), factor),
                )
            };
        }
    }
}

fn mask(lanes: usize) -> u32 {
    (1u32 << lanes) - 1
}

/// Scale and bias of a quantised row.
///
/// # Safety
/// As [`pool`]; four bytes can be read at `row`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
unsafe fn head(row: *const u8) -> (__m512, __m512) {
    // SAFETY: four bytes can be read.
    let both = _mm_cvtph_ps(_mm_cvtsi32_si128(unsafe { row.cast::<i32>().read_unaligned() }));
    (_mm512_broadcastss_ps(both), _mm512_broadcastss_ps(_mm_movehdup_ps(both)))
}

/// `lanes` columns from `column` on; codes of quantised rows are not yet scaled.
///
/// # Safety
/// As [`pool`]; the columns lie inside the row, and `column` is a multiple of 16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
unsafe fn load<const F: usize>(row: *const u8, column: usize, lanes: usize) -> __m512 {
    let mask = mask(lanes);
    // SAFETY: masked loads touch only the bytes of the row's own columns.
    unsafe {
        match F {
            F32 => _mm512_maskz_loadu_ps(mask as u16, row.cast::<f32>().add(column)),
            F16 => _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask as u16, row.cast::<i16>().add(column))),
            BF16 => {
                let halves = _mm256_maskz_loadu_epi16(mask as u16, row.cast::<i16>().add(column));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
            }
            INT8 => {
                let codes = _mm_maskz_loadu_epi8(mask as u16, row.add(HEAD + column).cast());
                _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes))
            }
            INT4 => {
                let bytes = _mm_maskz_loadu_epi8((1u16 << (lanes / 2)) - 1, row.add(HEAD + column / 2).cast());
                let low = _mm_and_si128(bytes, _mm_set1_epi8(15));
                let high = _mm_and_si128(_mm_srli_epi16::<4>(bytes), _mm_set1_epi8(15));
                _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(low, high)))
            }
            _ => {
                let bytes = _mm_maskz_loadu_epi8((1u16 << (lanes / 4)) - 1, row.add(HEAD + column / 4).cast());
                let shifts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
                let codes = _mm512_srlv_epi32(_mm512_broadcastd_epi32(bytes), shifts);
                _mm512_cvtepi32_ps(_mm512_and_si512(codes, _mm512_set1_epi32(3)))
            }
        }
    }
}
