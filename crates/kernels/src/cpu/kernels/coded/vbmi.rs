//! AVX-512 VBMI: one permutation looks up 64 bytes in 64 values, the tables of four subspaces.

use std::arch::x86_64::*;

use super::operands::{CodeBlocks, CodeQuery, LINE, TABLE};
use crate::cpu::kernels::avx512::put;
use crate::cpu::kernels::operands::{BLOCK, Staging, blocks_ahead};

/// Returns the sums of `N` blocks. Lines of later blocks are prefetched while lines of these blocks are used.
///
/// # Safety
/// Needs AVX-512 F, BW, VBMI and VNNI; each of `codes` must point to `lines * 64` bytes, `tables` to `lines * 128`.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vnni")]
unsafe fn block_sums<const N: usize>(
    codes: [*const u8; N],
    ahead: [*const u8; N],
    tables: *const u8,
    lines: usize,
) -> [__m512i; N] {
    let (half, ones) = (_mm512_set1_epi8(0x0f), _mm512_set1_epi8(1));
    // Offsets of the four tables of 16 values: byte `p` of an item indexes table `p`.
    let place = _mm512_set1_epi32(0x3020_1000);
    let mut sums = [[_mm512_setzero_si512(); 2]; N];
    for g in 0..lines {
        // SAFETY: `g < lines`, the number of lines and tables that the caller guarantees; a prefetch may name any address.
        unsafe {
            let low = _mm512_loadu_si512(tables.add(g * TABLE).cast());
            let high = _mm512_loadu_si512(tables.add(g * TABLE + TABLE / 2).cast());
            for n in 0..N {
                _mm_prefetch::<_MM_HINT_T0>(ahead[n].wrapping_add(g * LINE).cast());
                let line = _mm512_loadu_si512(codes[n].add(g * LINE).cast());
                // Computes `(line & half) | place`.
                let of_low = _mm512_ternarylogic_epi32::<0xEA>(line, half, place);
                let of_high = _mm512_ternarylogic_epi32::<0xEA>(_mm512_srli_epi16::<4>(line), half, place);
                sums[n][0] = _mm512_dpbusd_epi32(sums[n][0], _mm512_permutexvar_epi8(of_low, low), ones);
                sums[n][1] = _mm512_dpbusd_epi32(sums[n][1], _mm512_permutexvar_epi8(of_high, high), ones);
            }
        }
    }
    sums.map(|[low, high]| _mm512_add_epi32(low, high))
}

/// Converts the sums of a block to scores.
#[inline]
#[target_feature(enable = "avx512f")]
fn scores(sums: __m512i, query: &CodeQuery<'_>, factors: &[f32]) -> __m512 {
    // A product and a sum instead of a fused multiply-add: every kernel rounds after each.
    let mut scaled_products = _mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(query.step));
    if !factors.is_empty() {
        // SAFETY: a block that has factors has 16.
        let factors = unsafe { _mm512_loadu_ps(factors.as_ptr()) };
        scaled_products = _mm512_mul_ps(_mm512_add_ps(scaled_products, _mm512_set1_ps(query.base)), factors);
    }
    _mm512_add_ps(scaled_products, _mm512_set1_ps(query.bias))
}

/// # Safety
/// Needs AVX-512 F, BW, VBMI and VNNI, and POPCNT. Lengths are checked by the caller.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vnni,popcnt")]
pub(super) unsafe fn scan(
    blocks: &CodeBlocks<'_>,
    query: &CodeQuery<'_>,
    threshold: f32,
    from: usize,
    staging: &mut Staging<'_>,
) -> usize {
    let count = blocks.items.div_ceil(BLOCK);
    let distance = blocks_ahead(blocks.lines * LINE);
    let mut block = blocks.next_asked(from);
    while block < count {
        let room = (staging.scores.len() - staging.len) / BLOCK;
        if room == 0 {
            return block;
        }
        let second = blocks.next_asked(block + 1);
        let third = blocks.next_asked(second + 1);
        let fourth = blocks.next_asked(third + 1);
        // SAFETY: these blocks are below `count`, and there is room for each of them.
        block = unsafe {
            if room >= 4 && fourth < count {
                scan_some(blocks, query, threshold, [block, second, third, fourth], distance, staging);
                blocks.next_asked(fourth + 1)
            } else if room >= 2 && second < count {
                scan_some(blocks, query, threshold, [block, second], distance, staging);
                third
            } else {
                scan_some(blocks, query, threshold, [block], distance, staging);
                second
            }
        };
    }
    count
}

/// Stages the items of several blocks that reach the threshold. The blocks share the loads of the tables and the branch on
/// whether any item reaches the threshold, which is unpredictable for a single block. Prefetches the blocks `distance` ahead.
///
/// # Safety
/// Needs AVX-512 F, BW, VBMI and VNNI, and POPCNT. Lengths are checked by the caller; `some` are blocks with room in the staging
/// for each.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vnni,popcnt")]
unsafe fn scan_some<const N: usize>(
    blocks: &CodeBlocks<'_>,
    query: &CodeQuery<'_>,
    threshold: f32,
    some: [usize; N],
    distance: usize,
    staging: &mut Staging<'_>,
) {
    let (count, bytes) = (blocks.items.div_ceil(BLOCK), blocks.lines * LINE);
    let codes = |block: usize| blocks.codes.as_ptr().wrapping_add(block * bytes);
    let to_come = |block: usize| match (block + distance).checked_sub(count) {
        None => codes(block + distance),
        Some(past) => {
            let next = if blocks.next.is_empty() { blocks.codes } else { blocks.next };
            next.as_ptr().wrapping_add(past * bytes)
        }
    };
    // SAFETY: the blocks lie in the codes, as the caller checked with the tables.
    let sums = unsafe { block_sums(some.map(codes), some.map(to_come), query.tables.as_ptr(), blocks.lines) };
    let scored: [__m512; N] = std::array::from_fn(|n| scores(sums[n], query, blocks.factors_of(some[n])));
    let bound = _mm512_set1_ps(threshold);
    let retained: [u16; N] =
        std::array::from_fn(|n| _mm512_mask_cmp_ps_mask::<_CMP_GE_OQ>(blocks.requested(some[n]), scored[n], bound));
    if retained.iter().all(|retained| *retained == 0) {
        return;
    }
    for n in 0..N {
        // SAFETY: the caller left room for each block.
        unsafe { put(scored[n], retained[n], blocks.first_slot + (some[n] * BLOCK) as u32, staging) };
    }
}
