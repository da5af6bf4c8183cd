//! AVX2. A shuffle looks up 16 bytes in 16 values. The tables of an item's four bytes differ, so each byte has its own shuffle,
//! which zeroes the other three.

use std::arch::x86_64::*;

use super::operands::{LINE, TABLE};
use crate::cpu::kernels::BLOCK;

/// Returns the sums of one block.
///
/// # Safety
/// Needs AVX2; `tables` must hold the tables of as many lines as `codes` has.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn block_sums(codes: &[u8], tables: &[u8]) -> [u32; BLOCK] {
    debug_assert_eq!(codes.len() / LINE, tables.len() / TABLE);
    let (low_half, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi8(1));
    let words = _mm256_set1_epi16(1);
    // A shuffle writes zero if the highest bit of the index is set; `others[p]` sets this bit in all bytes of an item
    // but byte `p`.
    let others: [__m256i; 4] = std::array::from_fn(|p| _mm256_set1_epi32(!(0xff << (8 * p)) & 0x8080_8080u32 as i32));
    let mut sums = [_mm256_setzero_si256(); 2];
    for (line, tables) in codes.chunks_exact(LINE).zip(tables.chunks_exact(TABLE)) {
        let table = |n: usize| {
            // SAFETY: 16 of the 128 bytes of a line's tables are read, `n < 8`.
            let table = unsafe { _mm_loadu_si128(tables.as_ptr().add(n * 16).cast()) };
            _mm256_broadcastsi128_si256(table)
        };
        for (half, sum) in sums.iter_mut().enumerate() {
            // SAFETY: a line has 64 bytes, two halves of 32.
            let bytes = unsafe { _mm256_loadu_si256(line.as_ptr().add(half * 32).cast()) };
            let places = [_mm256_and_si256(bytes, low_half), _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low_half)];
            for (first, places) in [0, 4].into_iter().zip(places) {
                let scaled_products = (0..4).fold(_mm256_setzero_si256(), |scaled_products, p| {
                    let of_byte = _mm256_shuffle_epi8(table(first + p), _mm256_or_si256(places, others[p]));
                    _mm256_or_si256(scaled_products, of_byte)
                });
                // The sum of two bytes is at most 510 and fits 16 bits.
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(_mm256_maddubs_epi16(scaled_products, ones), words));
            }
        }
    }
    let mut of_items = [0u32; BLOCK];
    for (sum, to) in sums.iter().zip(of_items.chunks_exact_mut(8)) {
        // SAFETY: eight numbers are written to a slice of eight.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), *sum) };
    }
    of_items
}
