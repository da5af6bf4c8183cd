//! Products of pairs of bf16 in AVX-512.

use std::arch::x86_64::*;

use super::operands::{Form, LANES, PANEL, Product};
use super::tiles::tiles;

/// The bits of 16 pairs.
#[target_feature(enable = "avx512f")]
#[inline]
fn bits(numbers: __m512) -> __m512bh {
    // SAFETY: both are 64 bytes of which every pattern is valid.
    unsafe { std::mem::transmute(numbers) }
}

#[target_feature(enable = "avx512f,avx512bf16")]
#[inline]
fn multiply_add(sum: __m512, x: __m512, weights: __m512) -> __m512 {
    _mm512_dpbf16_ps(sum, bits(x), bits(weights))
}

#[target_feature(enable = "avx512f,avx512bf16")]
#[inline]
fn pairs(first: __m512, second: __m512) -> __m512 {
    // SAFETY: both are 64 bytes of which every pattern is valid.
    unsafe { std::mem::transmute(_mm512_cvtne2ps_pbh(second, first)) }
}

tiles!("avx512f,avx512bw,avx512vl,avx512bf16", multiply_add, pairs);
