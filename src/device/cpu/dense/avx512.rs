//! Dense loops in AVX-512.

use std::arch::x86_64::*;

use super::maps;
use super::operands::{Binary, Fold, Form, LANES, MapTarget, Operand, PANEL, Product, Unary};
use super::tiles::tiles;

#[target_feature(enable = "avx512f")]
#[inline]
fn multiply_add(sum: __m512, x: __m512, weights: __m512) -> __m512 {
    _mm512_fmadd_ps(x, weights, sum)
}

/// Factors that are single numbers make no pairs (`Kernels::product`).
#[target_feature(enable = "avx512f")]
#[inline]
fn no_pairs(first: __m512, _: __m512) -> __m512 {
    first
}

tiles!("avx512f,avx512bw,avx512vl", multiply_add, no_pairs);

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

/// The larger numbers; NaN where one of the two is.
#[target_feature(enable = "avx512f")]
#[inline]
fn larger(x: __m512, y: __m512) -> __m512 {
    let takes_x = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(x, y) | _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
    _mm512_mask_blend_ps(takes_x, y, x)
}

/// The smaller numbers; NaN where one of the two is.
#[target_feature(enable = "avx512f")]
#[inline]
fn smaller(x: __m512, y: __m512) -> __m512 {
    let takes_x = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, y) | _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
    _mm512_mask_blend_ps(takes_x, y, x)
}

/// Folds the lanes of a register, each half onto the other.
#[target_feature(enable = "avx512f")]
#[inline]
fn joined(lanes: __m512, f: impl Fn(__m512, __m512) -> __m512) -> f32 {
    let eight = f(lanes, _mm512_shuffle_f32x4::<0b01_00_11_10>(lanes, lanes));
    let four = f(eight, _mm512_shuffle_f32x4::<0b10_11_00_01>(eight, eight));
    let two = f(four, _mm512_permute_ps::<0b01_00_11_10>(four));
    _mm512_cvtss_f32(f(two, _mm512_permute_ps::<0b10_11_00_01>(two)))
}

/// The first numbers of a register, zeros behind them.
///
/// # Panics
/// Where there are more than 16.
#[target_feature(enable = "avx512f")]
#[inline]
fn first(numbers: &[f32]) -> (__mmask16, __m512) {
    assert!(numbers.len() <= LANES);
    let mask = ((1u32 << numbers.len()) - 1) as u16;
    // SAFETY: masked loads touch only the numbers.
    (mask, unsafe { _mm512_maskz_loadu_ps(mask, numbers.as_ptr()) })
}

#[target_feature(enable = "avx512f")]
#[inline]
fn folded(
    input: &Operand<'_>,
    count: usize,
    target: &mut MapTarget<'_>,
    none: f32,
    f: impl Fn(__m512, __m512) -> __m512,
) {
    for r in 0..target.rows {
        for o in 0..target.outer {
            let run = &input.numbers[r * input.row + o * input.outer..][..count];
            let (mut kept, (whole, rest)) = (_mm512_set1_ps(none), run.as_chunks::<LANES>());
            for chunk in whole {
                // SAFETY: a chunk is a register.
                kept = f(kept, unsafe { _mm512_loadu_ps(chunk.as_ptr()) });
            }
            if !rest.is_empty() {
                let (mask, rest) = first(rest);
                kept = _mm512_mask_mov_ps(kept, mask, f(kept, rest));
            }
            target.numbers[r * target.stride + o] = joined(kept, &f);
        }
    }
}

/// `maps::fold`, whose bits it gives: left to the compiler, the lanes of a register become one by way of memory.
///
/// # Safety
/// As [`map1`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
pub(super) unsafe fn fold(f: Fold, input: &Operand<'_>, count: usize, target: &mut MapTarget<'_>) {
    match f {
        Fold::Sum => folded(input, count, target, 0.0, |x, y| _mm512_add_ps(x, y)),
        Fold::Max => folded(input, count, target, f32::NEG_INFINITY, |x, y| larger(x, y)),
        Fold::Min => folded(input, count, target, f32::INFINITY, |x, y| smaller(x, y)),
    }
}

/// `maps::column` in registers, for the same reason.
///
/// # Safety
/// As [`map1`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
pub(super) unsafe fn column(product: &Product<'_>, out: &mut [f32], stride: usize) {
    let bias = product.bias.first().copied().unwrap_or(0.0);
    for (row, out) in (0..product.rows).zip(out.iter_mut().step_by(stride.max(1))) {
        let mut sums = _mm512_setzero_ps();
        for part in product.parts {
            let (rows, rest) = part.rows[row * part.stride..][..part.depth].as_chunks::<LANES>();
            let (weights, others) = part.weights.numbers[..part.depth].as_chunks::<LANES>();
            for (row, weights) in rows.iter().zip(weights) {
                // SAFETY: chunks are registers.
                let (x, w) = unsafe { (_mm512_loadu_ps(row.as_ptr()), _mm512_loadu_ps(weights.as_ptr())) };
                sums = _mm512_fmadd_ps(x, w, sums);
            }
            if !rest.is_empty() {
                let ((mask, x), (_, w)) = (first(rest), first(others));
                sums = _mm512_mask3_fmadd_ps(x, w, sums, mask);
            }
        }
        let sum = bias + joined(sums, |x, y| _mm512_add_ps(x, y));
        *out = if product.relu && sum < 0.0 { 0.0 } else { sum };
    }
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
