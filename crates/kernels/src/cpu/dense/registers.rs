//! Registers of AVX-512: masks of lanes, the last numbers of a run, and reductions.

use std::arch::x86_64::*;

use super::operands::LANES;

/// Returns the mask of the first `count` lanes, or of all lanes if there are fewer.
#[inline(always)]
pub(super) fn lanes(count: usize) -> __mmask16 {
    ((1u32 << count.min(LANES)) - 1) as u16
}

/// Returns the larger numbers; NaN if either is NaN.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
#[inline]
pub(super) fn larger(x: __m512, y: __m512) -> __m512 {
    // The instruction returns `y` unless `x` is larger.
    _mm512_mask_mov_ps(_mm512_max_ps(x, y), _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x), x)
}

/// Returns the smaller numbers; NaN if either is NaN.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
#[inline]
pub(super) fn smaller(x: __m512, y: __m512) -> __m512 {
    let takes_x = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, y) | _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
    _mm512_mask_blend_ps(takes_x, y, x)
}

/// Reduces the lanes of a register by halving. The compiler inlines a closure only if it is passed by value to a
/// function that enables all target features of the function that creates the closure.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
#[inline]
pub(super) fn joined(lanes: __m512, f: impl Fn(__m512, __m512) -> __m512) -> f32 {
    let eight = f(lanes, _mm512_shuffle_f32x4::<0b01_00_11_10>(lanes, lanes));
    let four = f(eight, _mm512_shuffle_f32x4::<0b10_11_00_01>(eight, eight));
    let two = f(four, _mm512_permute_ps::<0b01_00_11_10>(four));
    _mm512_cvtss_f32(f(two, _mm512_permute_ps::<0b10_11_00_01>(two)))
}

/// Loads the first numbers of a register and pads them with zeros.
///
/// # Panics
/// If there are more than 16 numbers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
#[inline]
pub(super) fn first(numbers: &[f32]) -> (__mmask16, __m512) {
    assert!(numbers.len() <= LANES);
    let mask = lanes(numbers.len());
    // SAFETY: masked loads touch only the numbers.
    (mask, unsafe { _mm512_maskz_loadu_ps(mask, numbers.as_ptr()) })
}

/// Reduces contiguous numbers in the lanes of a register, and then the lanes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
#[inline]
pub(super) fn reduced(run: &[f32], none: f32, f: impl Fn(__m512, __m512) -> __m512 + Copy) -> f32 {
    let (mut retained, (complete, rest)) = (_mm512_set1_ps(none), run.as_chunks::<LANES>());
    for chunk in complete {
        // SAFETY: a chunk fills a register.
        retained = f(retained, unsafe { _mm512_loadu_ps(chunk.as_ptr()) });
    }
    if !rest.is_empty() {
        let (mask, rest) = first(rest);
        retained = _mm512_mask_mov_ps(retained, mask, f(retained, rest));
    }
    joined(retained, f)
}
