//! Products of bf16 pairs in AVX-512.

use std::arch::x86_64::*;

use super::operands::{Form, LANES, MapTarget, Operand, PANEL, PairRows, Product, STEP};
use super::registers::lanes;
use super::tiles::tiles;

/// Reinterprets a register as 16 pairs.
#[target_feature(enable = "avx512f")]
#[inline]
fn bits(numbers: __m512) -> __m512bh {
    // SAFETY: both types have 64 bytes, and every bit pattern is valid.
    unsafe { std::mem::transmute(numbers) }
}

#[target_feature(enable = "avx512f,avx512bf16")]
#[inline]
fn multiply_add(sum: __m512, x: __m512, weights: __m512) -> __m512 {
    _mm512_dpbf16_ps(sum, bits(x), bits(weights))
}

/// Converts 32 numbers to pairs, in the order of their registers. Subnormal numbers become 0.
#[target_feature(enable = "avx512f,avx512bf16")]
#[inline]
pub(super) fn pairs(first: __m512, second: __m512) -> __m512 {
    // SAFETY: both types have 64 bytes, and every bit pattern is valid.
    unsafe { std::mem::transmute(_mm512_cvtne2ps_pbh(second, first)) }
}

tiles!("avx512f,avx512bw,avx512vl,avx512bf16", multiply_add, pairs);

/// Computes `maps::narrow`, but flushes subnormal numbers to 0, as products of bf16 pairs do.
///
/// # Safety
/// The CPU has AVX-512 F and BF16.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) unsafe fn narrow(input: &Operand<'_>, count: usize, target: &mut MapTarget<'_>) {
    for r in 0..target.rows {
        let out = &mut target.numbers[r * target.stride..][..target.inner];
        let (numbers, rest) = input.numbers[r * input.row..][..count].as_chunks::<PANEL>();
        let (out, behind) = out.split_at_mut(numbers.len() * LANES);
        for (numbers, to) in numbers.iter().zip(out.as_chunks_mut::<LANES>().0) {
            // SAFETY: two registers of numbers become one of pairs.
            unsafe {
                let (first, second) = (_mm512_loadu_ps(numbers.as_ptr()), _mm512_loadu_ps(numbers.as_ptr().add(LANES)));
                _mm512_storeu_ps(to.as_mut_ptr(), pairs(first, second));
            }
        }
        let mut rest = rest;
        for to in behind.chunks_mut(LANES) {
            let (first, second) = rest.split_at(rest.len().min(LANES));
            // SAFETY: masked loads and stores touch only the numbers of their slices.
            unsafe {
                let first = _mm512_maskz_loadu_ps(lanes(first.len()), first.as_ptr());
                let second = _mm512_maskz_loadu_ps(lanes(second.len()), second.as_ptr());
                _mm512_mask_storeu_ps(to.as_mut_ptr(), lanes(to.len()), pairs(first, second));
            }
            rest = &[];
        }
    }
}

/// Computes `maps::pack_narrow`, but flushes subnormal numbers to 0, as products of bf16 pairs do.
///
/// # Safety
/// The CPU has AVX-512 F, BW and BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn pack_narrow(matrix: &[f32], depth: usize, columns: usize, rows: PairRows, out: &mut [f32]) {
    // Interleaves the numbers of two registers: words 0 to 15 are the first register's, 16 to 31 the second's.
    let mut turns = [0u16; PANEL];
    turns.iter_mut().enumerate().for_each(|(n, turn)| *turn = (n / 2 + n % 2 * LANES) as u16);
    // SAFETY: 32 words fill a register.
    let turns = unsafe { _mm512_loadu_si512(turns.as_ptr().cast()) };
    let (panels, lines) = (columns.div_ceil(PANEL), out.as_chunks_mut::<PANEL>().0);
    let matrix = &matrix[..depth * columns];
    for pair in 0..(rows.first + Form::Pairs.room(depth)).next_multiple_of(STEP) - rows.first {
        let read = |row: usize| if row < depth { &matrix[row * columns..][..columns] } else { &[] };
        let (mut first, mut second) = (read(2 * pair), read(2 * pair + 1));
        for panel in 0..panels {
            let line = &mut lines[panel * rows.all + rows.first + pair];
            for half in line.as_chunks_mut::<LANES>().0 {
                let (x, y);
                (x, first) = next(first);
                (y, second) = next(second);
                // SAFETY: every pattern of 64 bytes is valid; one register is written.
                unsafe {
                    let both = std::mem::transmute::<__m512, __m512i>(pairs(x, y));
                    _mm512_storeu_si512(half.as_mut_ptr().cast(), _mm512_permutexvar_epi16(turns, both));
                }
            }
        }
    }
}

/// Returns the first 16 numbers, padded with zeros, and the remaining slice.
#[target_feature(enable = "avx512f")]
#[inline]
fn next(numbers: &[f32]) -> (__m512, &[f32]) {
    match numbers.split_first_chunk::<LANES>() {
        // SAFETY: a chunk fills a register.
        Some((here, rest)) => (unsafe { _mm512_loadu_ps(here.as_ptr()) }, rest),
        // SAFETY: masked loads touch only the numbers.
        None => (unsafe { _mm512_maskz_loadu_ps(lanes(numbers.len()), numbers.as_ptr()) }, &[]),
    }
}
