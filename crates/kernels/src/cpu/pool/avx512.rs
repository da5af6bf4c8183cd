//! Pooled lookups in AVX-512: 16 columns per register, with the sums of up to 256 columns of a bag in registers at once.

use std::arch::x86_64::*;

use super::bags::{BagSums, Bags, ColumnRun, PREFETCH_ROWS, bag_factor, prefetch_first, prefetch_row};
use super::rows::Rows;
use super::rows::formats::*;

/// Number of columns per register.
const LANES: usize = 16;

/// Computes the sums of all columns, group by group.
///
/// # Safety
/// The CPU has AVX-512 F, BW and VL, and F16C; the conditions of [`super::pool`] hold.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
pub(super) unsafe fn pool<const F: usize>(rows: &Rows<'_>, bags: &Bags<'_>, out: &mut BagSums<'_>) {
    let mut first = 0;
    while first < rows.width {
        // A last partial register starts earlier and overlaps columns that are already summed.
        first = first.min(rows.width.saturating_sub(LANES));
        let part = ColumnRun { first, columns: (rows.width - first).min(16 * LANES) };
        // SAFETY: this function's `# Safety` conditions hold, and `part` lies inside the row.
        unsafe {
            match part.columns.div_ceil(LANES) {
                1 => group::<F, 1>(rows, bags, out, part),
                2 => group::<F, 2>(rows, bags, out, part),
                3 => group::<F, 3>(rows, bags, out, part),
                4 => group::<F, 4>(rows, bags, out, part),
                5..=6 => group::<F, 6>(rows, bags, out, part),
                7..=8 => group::<F, 8>(rows, bags, out, part),
                9..=12 => group::<F, 12>(rows, bags, out, part),
                _ => group::<F, 16>(rows, bags, out, part),
            }
        }
        first += part.columns;
    }
}

/// Computes the sums of up to `16 V` columns. The last register ends at the last column: it overlaps other columns or,
/// if the row is narrower than a register, is masked. A load past the end of the row would wait for an unrelated cache
/// line, even if masked.
///
/// # Safety
/// As [`pool`]; `part` lies inside the row and takes at most `V` registers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
unsafe fn group<const F: usize, const V: usize>(
    rows: &Rows<'_>,
    bags: &Bags<'_>,
    out: &mut BagSums<'_>,
    part: ColumnRun,
) {
    let base = rows.bytes.as_ptr();
    let end = part.first + part.columns;
    // With more than one register, all columns of each are in use, which the compiler cannot infer.
    let lanes = if V > 1 { LANES } else { part.columns.min(LANES) };
    let column = |v: usize| (part.first + v * LANES).min(end - lanes);
    let span = part.span(rows.format);
    prefetch_first(rows, bags, &span);
    for bag in 0..bags.offsets.len().saturating_sub(1) {
        let mut sum = [_mm512_setzero_ps(); V];
        // The bias of a quantized row is the same for all columns, so biases are summed once and added at the end.
        let mut shift = _mm512_setzero_ps();
        for at in bags.range(bag) {
            prefetch_row(rows, bags.ids, at + PREFETCH_ROWS, &span);
            // SAFETY: offsets lie inside ids, and there is one weight per id (checked in `super::pool`).
            let (id, weight) = unsafe { (*bags.ids.get_unchecked(at), bags.weight_unchecked(at)) };
            if id < 0 {
                continue;
            }
            // SAFETY: ids are below the number of rows, so the row lies inside the bytes.
            let row = unsafe { base.add(id as usize * rows.row_bytes) };
            let mut weight = _mm512_set1_ps(weight);
            if F >= INT8 {
                // SAFETY: quantized rows start with four bytes of scale and bias.
                let (scale, bias) = unsafe { head(row) };
                shift = _mm512_fmadd_ps(weight, bias, shift);
                weight = _mm512_mul_ps(weight, scale);
            }
            for (v, sum) in sum.iter_mut().enumerate() {
                // SAFETY: the columns lie inside the row.
                let x = unsafe { load::<F>(row, column(v), lanes) };
                *sum = _mm512_fmadd_ps(weight, x, *sum);
            }
        }
        let factor = _mm512_set1_ps(bag_factor(bags, bag));
        let to = out.data[bag * out.stride + out.column..][..end].as_mut_ptr();
        for (v, sum) in sum.iter().enumerate() {
            let sum = _mm512_mul_ps(_mm512_add_ps(*sum, shift), factor);
            // SAFETY: `to` has `end` numbers, and the mask excludes lanes beyond them.
            unsafe { _mm512_mask_storeu_ps(to.add(column(v)), mask(lanes) as u16, sum) };
        }
    }
}

fn mask(lanes: usize) -> u32 {
    (1u32 << lanes) - 1
}

/// Reads scale and bias of a quantized row.
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

/// Loads `lanes` columns from `column` on; codes of quantized rows are not scaled yet.
///
/// # Safety
/// As [`pool`]; the columns lie inside the row, and the first starts at a byte.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
unsafe fn load<const F: usize>(row: *const u8, column: usize, lanes: usize) -> __m512 {
    let head = if F >= INT8 { HEAD } else { 0 };
    // SAFETY: the columns lie inside the row, and no load reads more bytes than they take.
    unsafe {
        let from = row.add(head + column * BITS[F] / 8);
        match F {
            F32 if lanes == LANES => _mm512_loadu_ps(from.cast()),
            F32 => _mm512_maskz_loadu_ps(mask(lanes) as u16, from.cast()),
            F16 => _mm512_cvtph_ps(halves(from, lanes)),
            BF16 => _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves(from, lanes)))),
            INT8 => _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes(from, lanes))),
            INT4 => {
                let bytes = bytes(from, lanes / 2);
                let low = _mm_and_si128(bytes, _mm_set1_epi8(15));
                let high = _mm_and_si128(_mm_srli_epi16::<4>(bytes), _mm_set1_epi8(15));
                _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(low, high)))
            }
            _ => {
                let shifts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
                let codes = _mm512_srlv_epi32(_mm512_broadcastd_epi32(bytes(from, lanes / 4)), shifts);
                _mm512_cvtepi32_ps(_mm512_and_si512(codes, _mm512_set1_epi32(3)))
            }
        }
    }
}

/// Loads `count` numbers of 16 bits, at most 16.
///
/// # Safety
/// As [`pool`]; `count` numbers can be read at `from`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
unsafe fn halves(from: *const u8, count: usize) -> __m256i {
    // SAFETY: only `count` numbers are read, which the caller guarantees to be readable.
    unsafe {
        match count {
            LANES => _mm256_loadu_si256(from.cast()),
            _ => _mm256_maskz_loadu_epi16(mask(count) as u16, from.cast()),
        }
    }
}

/// Loads `count` bytes, at most 16.
///
/// # Safety
/// As [`pool`]; `count` bytes can be read at `from`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
unsafe fn bytes(from: *const u8, count: usize) -> __m128i {
    // SAFETY: only `count` bytes are read, which the caller guarantees to be readable.
    unsafe {
        match count {
            16 => _mm_loadu_si128(from.cast()),
            8 => _mm_loadl_epi64(from.cast()),
            4 => _mm_cvtsi32_si128(from.cast::<i32>().read_unaligned()),
            _ => _mm_maskz_loadu_epi8(mask(count) as u16, from.cast()),
        }
    }
}
