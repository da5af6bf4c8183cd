//! NEON with the dot product instructions: one `sdot` multiplies and adds 4 items × 4 dimensions. All else is [`super::neon`]'s.

use std::arch::aarch64::*;
use std::arch::asm;

use super::neon::{Sums, four, nearest4_by, scan_by, scan_lanes_by, signed};
pub(super) use super::neon::{dot_bf16, dot_f16, dot_f32, dots_bf16, dots_f16, dots_f32, keep, kth, retain};
use super::{Blocks, Int8Query, Lane, Staging};

/// Adds to each of four sums the products of its four codes. The intrinsic of this instruction is not stable yet.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn add_products(mut sums: int32x4_t, x: int8x16_t, q: int8x16_t) -> int32x4_t {
    // SAFETY: one instruction of a feature that this function asks for, on registers alone.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {x:v}.16b, {q:v}.16b",
            sums = inout(vreg) sums,
            x = in(vreg) x,
            q = in(vreg) q,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}

/// As [`super::neon::BlockSums`] says; four queries fill half of the registers.
///
/// # Safety
/// Needs NEON and the dot product instructions; each query must hold as many groups as `codes`.
#[target_feature(enable = "neon,dotprod")]
unsafe fn block_sums<const N: usize>(codes: &[u8], queries: [&[i8]; N]) -> [Sums; N] {
    let mut sums = [[vdupq_n_s32(0); 4]; N];
    for (g, group) in codes.as_chunks::<64>().0.iter().enumerate() {
        for quarter in 0..4 {
            let x = signed(group, quarter);
            for (query, sums) in queries.iter().zip(&mut sums) {
                // SAFETY: the query has as many groups as the codes.
                sums[quarter] = add_products(sums[quarter], x, unsafe { four(query, g) });
            }
        }
    }
    sums
}

/// # Safety
/// Needs NEON and the dot product instructions. Lengths are checked by the caller.
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn scan(
    blocks: &Blocks<'_>,
    query: &Int8Query<'_>,
    threshold: f32,
    from: usize,
    staging: &mut Staging<'_>,
) -> usize {
    // SAFETY: the caller's conditions.
    unsafe { scan_by(block_sums, blocks, query, threshold, from, staging) }
}

/// # Safety
/// Needs NEON and the dot product instructions. Lengths are checked by the caller.
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn scan_many(blocks: &Blocks<'_>, lanes: &mut [Lane<'_>]) {
    let (fours, rest) = lanes.as_chunks_mut::<4>();
    let (twos, rest) = rest.as_chunks_mut::<2>();
    // SAFETY: the caller checked the lengths of every lane.
    unsafe {
        fours.iter_mut().for_each(|four| scan_lanes_by(block_sums, blocks, four));
        twos.iter_mut().for_each(|two| scan_lanes_by(block_sums, blocks, two));
        rest.as_chunks_mut::<1>().0.iter_mut().for_each(|one| scan_lanes_by(block_sums, blocks, one));
    }
}

/// # Safety
/// Needs NEON and the dot product instructions. Lengths are checked by the caller.
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn nearest4(blocks: &Blocks<'_>, penalties: &[f32], queries: &[Int8Query<'_>; 4]) -> [u32; 4] {
    // SAFETY: the caller's conditions.
    unsafe { nearest4_by(block_sums, blocks, penalties, queries) }
}
