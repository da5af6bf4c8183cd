//! NEON with dot product instructions: one `sdot` multiplies and adds 4 items × 4 dimensions. Everything else is in
//! [`super::neon`].

use std::arch::aarch64::*;
use std::arch::asm;

use super::neon::{Sums, block_of, four, nearest4_by, scaled, scan_by, signed, stage};
pub(super) use super::neon::{dot_bf16, dot_f16, dot_f32, dots_bf16, dots_f16, dots_f32, keep, kth, retain};
use super::operands::{BLOCK, Blocks, Int8Query, Lane, Staging, items_of};

/// Adds to each of four sums the products of its four codes. The intrinsic of `sdot` is not stable yet.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn add_products(mut sums: int32x4_t, x: int8x16_t, q: int8x16_t) -> int32x4_t {
    // SAFETY: one instruction of a feature that this function enables, on registers alone.
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

/// Implements [`super::neon::BlockSums`]; four rows fill half of the registers.
///
/// # Safety
/// Needs NEON and the dot product instructions; each row must hold as many groups as `codes`.
#[target_feature(enable = "neon,dotprod")]
unsafe fn block_sums<const R: usize>(codes: &[u8], rows: [&[i8]; R]) -> [Sums; R] {
    let mut sums = [[vdupq_n_s32(0); 4]; R];
    for (g, group) in codes.as_chunks::<64>().0.iter().enumerate() {
        for quarter in 0..4 {
            let x = signed(group, quarter);
            for (row, sums) in rows.iter().zip(&mut sums) {
                // SAFETY: the row has as many groups as the codes.
                sums[quarter] = add_products(sums[quarter], x, unsafe { four(row, g) });
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
    // SAFETY: this function's `# Safety` conditions hold.
    unsafe { scan_by(block_sums, blocks, query, threshold, from, staging) }
}

/// Scans for two queries, which are four rows.
///
/// # Safety
/// Needs NEON and the dot product instructions. Lengths are checked by the caller.
#[target_feature(enable = "neon,dotprod")]
unsafe fn scan_two(blocks: &Blocks<'_>, lanes: &mut [Lane<'_>; 2]) {
    let rows: [&[i8]; 4] = std::array::from_fn(|n| lanes[n / 2].query.rows[n % 2]);
    for block in 0..blocks.items.div_ceil(BLOCK) {
        let (codes, scales) = block_of(blocks, block);
        // SAFETY: the rows are as long as the block's codes require, and each staging has room for all blocks: checked by the
        // caller.
        unsafe {
            let (mask, first) = (items_of(blocks, block), blocks.first_slot + (block * BLOCK) as u32);
            let [a, b, c, d] = block_sums(codes, rows);
            for (sums, lane) in [[a, b], [c, d]].into_iter().zip(&mut *lanes) {
                stage(scaled(sums, scales, lane.query.scale), mask, first, lane.threshold, &mut lane.staging);
            }
        }
    }
}

/// # Safety
/// Needs NEON and the dot product instructions. Lengths are checked by the caller.
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn scan_many(blocks: &Blocks<'_>, lanes: &mut [Lane<'_>]) {
    let (twos, one) = lanes.as_chunks_mut::<2>();
    // SAFETY: the caller checked the lengths of every lane.
    unsafe {
        twos.iter_mut().for_each(|two| scan_two(blocks, two));
        one.iter_mut().for_each(|lane| {
            scan(blocks, &lane.query, lane.threshold, 0, &mut lane.staging);
        });
    }
}

/// # Safety
/// Needs NEON and the dot product instructions. Lengths are checked by the caller.
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn nearest4(blocks: &Blocks<'_>, penalties: &[f32], queries: &[Int8Query<'_>; 4]) -> [u32; 4] {
    // SAFETY: this function's `# Safety` conditions hold.
    unsafe { nearest4_by(block_sums, blocks, penalties, queries) }
}
