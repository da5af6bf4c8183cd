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
