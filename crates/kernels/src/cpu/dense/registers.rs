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

/// Reduces contiguous numbers in the lanes of a register.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
#[inline]
pub(super) fn in_lanes(run: &[f32], none: __m512, f: impl Fn(__m512, __m512) -> __m512 + Copy) -> __m512 {
    let (mut retained, (complete, rest)) = (none, run.as_chunks::<LANES>());
    for chunk in complete {
        // SAFETY: a chunk fills a register.
        retained = f(retained, unsafe { _mm512_loadu_ps(chunk.as_ptr()) });
    }
    if !rest.is_empty() {
        let (mask, rest) = first(rest);
        retained = _mm512_mask_mov_ps(retained, mask, f(retained, rest));
    }
    retained
}

/// Reduces contiguous numbers in the lanes of a register, and then the lanes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
#[inline]
pub(super) fn reduced(run: &[f32], none: f32, f: impl Fn(__m512, __m512) -> __m512 + Copy) -> f32 {
    joined(in_lanes(run, _mm512_set1_ps(none), f), f)
}

/// Reduces the lanes of each register as [`joined`] does; lane `n` is the result of register `n`. Each step halves two
/// registers at once, so that there are a third as many operations as in 16 calls of `joined`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
#[inline]
pub(super) fn joined_each(all: [__m512; LANES], f: impl Fn(__m512, __m512) -> __m512) -> __m512 {
    let none = _mm512_setzero_ps();
    let (mut eight, mut four, mut two) = ([none; LANES / 2], [none; LANES / 4], [none; LANES / 8]);
    for (n, eight) in eight.iter_mut().enumerate() {
        let (a, b) = (all[2 * n], all[2 * n + 1]);
        let low = _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b);
        *eight = f(low, _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b));
    }
    for (n, four) in four.iter_mut().enumerate() {
        let (a, b) = (eight[2 * n], eight[2 * n + 1]);
        let low = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
        *four = f(low, _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b));
    }
    for (n, two) in two.iter_mut().enumerate() {
        let (a, b) = (_mm512_castps_pd(four[2 * n]), _mm512_castps_pd(four[2 * n + 1]));
        let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
        *two = f(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    }
    let low = _mm512_shuffle_ps::<0b10_00_10_00>(two[0], two[1]);
    let one = f(low, _mm512_shuffle_ps::<0b11_01_11_01>(two[0], two[1]));
    // Lane 4 j + k holds the result of register 4 k + j.
    _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), one)
}

/// Returns the lanes of a register.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn stored(register: __m512) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    // SAFETY: there is room for a register.
    unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), register) };
    lanes
}
