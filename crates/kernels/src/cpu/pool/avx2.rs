//! Pooled lookups in AVX2: 8 columns per register, with the sums of up to 64 columns of a bag in registers at once.

use std::arch::x86_64::*;

use super::bags::{BagSums, Bags, ColumnRun, PREFETCH_ROWS, bag_factor, prefetch_first, prefetch_row};
use super::rows::Rows;
use super::rows::formats::*;

/// Number of columns per register.
const LANES: usize = 8;

/// Computes the sums of all columns, group by group.
///
/// # Safety
/// The CPU has AVX2, FMA and F16C; the conditions of [`super::pool`] hold.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn pool<const F: usize>(rows: &Rows<'_>, bags: &Bags<'_>, out: &mut BagSums<'_>) {
    let mut first = 0;
    while first < rows.width {
        let left = rows.width - first;
        let mut part = ColumnRun { first, columns: left };
        // SAFETY: this function's `# Safety` conditions hold, and `part` lies inside the row.
        unsafe {
            match left.div_ceil(LANES) {
                1 => group::<F, 1>(rows, bags, out, part),
                2 => group::<F, 2>(rows, bags, out, part),
                3 => group::<F, 3>(rows, bags, out, part),
                4 => group::<F, 4>(rows, bags, out, part),
                5..=7 => {
                    part.columns = 4 * LANES;
                    group::<F, 4>(rows, bags, out, part);
                }
                _ => {
                    part.columns = left.min(8 * LANES);
                    group::<F, 8>(rows, bags, out, part);
                }
            }
        }
        first += part.columns;
    }
}

/// Computes the sums of up to `8 V` columns; the last register may be partly filled.
///
/// # Safety
/// As [`pool`]; `part` lies inside the row and takes `V` registers.
#[target_feature(enable = "avx2,fma,f16c")]
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
        let mut sum = [_mm256_setzero_ps(); V];
        // The bias of a quantized row is the same for all columns, so biases are summed once and added at the end.
        let mut shift = _mm256_setzero_ps();
        for at in bags.range(bag) {
            prefetch_row(rows, bags.ids, at + PREFETCH_ROWS, &span);
            // SAFETY: offsets lie inside ids, and there is one weight per id (checked in `super::pool`).
            let (id, weight) = unsafe { (*bags.ids.get_unchecked(at), bags.weight_unchecked(at)) };
            if id < 0 {
                continue;
            }
            // SAFETY: ids are below the number of rows, so the row lies inside the bytes.
            let row = unsafe { base.add(id as usize * rows.row_bytes) };
            let mut weight = _mm256_set1_ps(weight);
            if F >= INT8 {
                // SAFETY: quantized rows start with four bytes of scale and bias.
                let (scale, bias) = unsafe { head(row) };
                shift = _mm256_fmadd_ps(weight, bias, shift);
                weight = _mm256_mul_ps(weight, scale);
            }
            for (v, sum) in sum.iter_mut().enumerate() {
                let lanes = if v + 1 == V { last } else { LANES };
                // SAFETY: the columns lie inside the row.
                let x = unsafe { load::<F>(row, part.first + v * LANES, lanes) };
                *sum = _mm256_fmadd_ps(weight, x, *sum);
            }
        }
        let factor = _mm256_set1_ps(bag_factor(bags, bag));
        let to = &mut out.data[bag * out.stride + out.column + part.first..][..part.columns];
        for (sum, to) in sum.iter().zip(to.chunks_mut(LANES)) {
            let mut complete = [0f32; LANES];
            // SAFETY: `complete` holds a register.
            unsafe { _mm256_storeu_ps(complete.as_mut_ptr(), _mm256_mul_ps(_mm256_add_ps(*sum, shift), factor)) };
            to.copy_from_slice(&complete[..to.len()]);
        }
    }
}

/// Reads scale and bias of a quantized row.
///
/// # Safety
/// As [`pool`]; four bytes can be read at `row`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn head(row: *const u8) -> (__m256, __m256) {
    // SAFETY: four bytes can be read.
    let both = _mm_cvtph_ps(_mm_cvtsi32_si128(unsafe { row.cast::<i32>().read_unaligned() }));
    (_mm256_broadcastss_ps(both), _mm256_broadcastss_ps(_mm_movehdup_ps(both)))
}

/// Loads `lanes` columns from `column` on; codes of quantized rows are not scaled yet. A partial register is copied to the stack
/// first, because AVX2 has no byte-wise masked load.
///
/// # Safety
/// As [`pool`]; the columns lie inside the row, and `column` is a multiple of 8.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load<const F: usize>(row: *const u8, column: usize, lanes: usize) -> __m256 {
    let (head, bits) = if F >= INT8 { (HEAD, BITS[F]) } else { (0, BITS[F]) };
    // SAFETY: the column lies inside the row.
    let from = unsafe { row.add(head + column * bits / 8) };
    if lanes == LANES {
        // SAFETY: eight columns can be read.
        return unsafe { load_whole::<F>(from) };
    }
    let mut complete = [0u8; 32];
    // SAFETY: `lanes` columns can be read, and they take at most 32 bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(from, complete.as_mut_ptr(), lanes * bits / 8);
        load_whole::<F>(complete.as_ptr())
    }
}

/// Loads eight columns at `from`.
///
/// # Safety
/// As [`pool`]; eight columns of the format can be read at `from`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load_whole<const F: usize>(from: *const u8) -> __m256 {
    // SAFETY: each arm reads exactly the bytes of eight columns: 32, 16, 16, 8, 4 and 2.
    unsafe {
        match F {
            F32 => _mm256_loadu_ps(from.cast()),
            F16 => _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
            BF16 => {
                let halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves))
            }
            INT8 => _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()))),
            INT4 => {
                let bytes = _mm256_set1_epi32(from.cast::<i32>().read_unaligned());
                let codes = _mm256_srlv_epi32(bytes, _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
                _mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32(15)))
            }
            _ => {
                let bytes = _mm256_set1_epi32(i32::from(from.cast::<u16>().read_unaligned()));
                let codes = _mm256_srlv_epi32(bytes, _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
                _mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32(3)))
            }
        }
    }
}
