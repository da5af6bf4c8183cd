//! NEON, which every aarch64 has. Bytes are multiplied to 16 bits and neighbours added to 32, because two products of -128 by
//! -128 would overflow 16 bits. Stored bytes are signed codes with the highest bit flipped; flipping it back needs no correction.

use std::arch::aarch64::*;

use super::operands::{BLOCK, Blocks, HIGH, Int8Query, Lane, Staging, first_best, items_of, rows_ahead};
use super::portable;
use crate::memory::prefetch;

/// One number per item of a block: four registers of four lanes.
pub(super) type Sums = [int32x4_t; 4];

/// Sums the products of one block's codes `[G, 16, 4]` and `R` rows of queries `[4 G]`.
///
/// # Safety
/// Needs the features of the instruction set in use; the rows must be as long as the codes require.
pub(super) type BlockSums<const R: usize> = unsafe fn(&[u8], [&[i8]; R]) -> [Sums; R];

/// Returns the signed codes of the four items from `quarter * 4` on.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn signed(group: &[u8; 64], quarter: usize) -> int8x16_t {
    let codes: &[u8] = &group[quarter * 16..quarter * 16 + 16];
    // SAFETY: 16 bytes are read from a slice of 16.
    let biased = unsafe { vld1q_u8(codes.as_ptr()) };
    vreinterpretq_s8_u8(veorq_u8(biased, vdupq_n_u8(0x80)))
}

/// Returns the four codes of group `g`, repeated for each of four items.
///
/// # Safety
/// Needs NEON; `query` must hold more than `g` groups.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn four(query: &[i8], g: usize) -> int8x16_t {
    // SAFETY: four codes from `4 g` on lie inside the query.
    vreinterpretq_s8_s32(vdupq_n_s32(unsafe { query.as_ptr().add(g * 4).cast::<i32>().read_unaligned() }))
}

/// Implements [`BlockSums`]. Eight registers per row hold halves of the sums of two items each; more than two rows at once would
/// not fit the registers.
///
/// # Safety
/// Needs NEON; each row must hold as many groups as `codes`.
#[target_feature(enable = "neon")]
unsafe fn block_sums<const R: usize>(codes: &[u8], rows: [&[i8]; R]) -> [Sums; R] {
    let mut halves = [[vdupq_n_s32(0); 8]; R];
    for (g, group) in codes.as_chunks::<64>().0.iter().enumerate() {
        for quarter in 0..4 {
            let x = signed(group, quarter);
            for (row, halves) in rows.iter().zip(&mut halves) {
                // SAFETY: the row has as many groups as the codes.
                let q = unsafe { four(row, g) };
                let low = vmull_s8(vget_low_s8(x), vget_low_s8(q));
                halves[quarter * 2] = vpadalq_s16(halves[quarter * 2], low);
                halves[quarter * 2 + 1] = vpadalq_s16(halves[quarter * 2 + 1], vmull_high_s8(x, q));
            }
        }
    }
    halves.map(|h| std::array::from_fn(|quarter| vpaddq_s32(h[quarter * 2], h[quarter * 2 + 1])))
}

/// # Safety
/// As [`block_sums`].
#[target_feature(enable = "neon")]
unsafe fn block_sums4(codes: &[u8], [a, b, c, d]: [&[i8]; 4]) -> [Sums; 4] {
    // SAFETY: the caller upholds the safety contracts of both calls.
    let ([a, b], [c, d]) = unsafe { (block_sums(codes, [a, b]), block_sums(codes, [c, d])) };
    [a, b, c, d]
}

/// Scales products by the items' and the query's scales.
#[target_feature(enable = "neon")]
fn scaled_products(products: [float32x4_t; 4], scales: &[f32; BLOCK], scale: f32) -> [float32x4_t; 4] {
    std::array::from_fn(|quarter| {
        // SAFETY: the quarters of 16 floats hold four each.
        let scales = unsafe { vld1q_f32(scales.as_ptr().add(quarter * 4)) };
        vmulq_n_f32(vmulq_f32(products[quarter], scales), scale)
    })
}

/// Combines the sums of the high and the low row into scores.
#[target_feature(enable = "neon")]
pub(super) fn scaled([high, low]: [Sums; 2], scales: &[f32; BLOCK], scale: f32) -> [float32x4_t; 4] {
    let both = |quarter: usize| vaddq_f32(vmulq_n_f32(vcvtq_f32_s32(high[quarter]), HIGH), vcvtq_f32_s32(low[quarter]));
    scaled_products(std::array::from_fn(both), scales, scale)
}

/// Codes and scales of a block.
pub(super) fn block_of<'a>(blocks: &Blocks<'a>, block: usize) -> (&'a [u8], &'a [f32; BLOCK]) {
    let bytes = blocks.groups * 64;
    (&blocks.codes[block * bytes..(block + 1) * bytes], &blocks.scales.as_chunks().0[block])
}

/// Byte shuffles that move each set of lanes to the front.
const TO_FRONT: [[u8; 16]; 16] = {
    let mut table = [[0; 16]; 16];
    let mut set = 0;
    while set < 16 {
        let (mut lane, mut retained) = (0, 0);
        while lane < 4 {
            if set >> lane & 1 == 1 {
                let mut byte = 0;
                while byte < 4 {
                    table[set][retained * 4 + byte] = (lane * 4 + byte) as u8;
                    byte += 1;
                }
                retained += 1;
            }
            lane += 1;
        }
        set += 1;
    }
    table
};

/// Returns one bit per lane, for lanes that are all ones or all zeros.
#[inline]
#[target_feature(enable = "neon")]
fn set_of(lanes: uint32x4_t) -> usize {
    // SAFETY: four numbers are read from an array of four.
    let bits = unsafe { vld1q_u32([1, 2, 4, 8].as_ptr()) };
    vaddvq_u32(vandq_u32(lanes, bits)) as usize
}

/// Writes the lanes whose bit in `set` is 1 to the front of both outputs; undefined filler follows, up to four numbers.
///
/// # Safety
/// Needs NEON; both outputs must have room for four numbers.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn pack(set: usize, scores: float32x4_t, slots: uint32x4_t, to: (*mut f32, *mut u32)) {
    // SAFETY: the table's rows hold 16 bytes; the caller left room for four numbers in both outputs.
    unsafe {
        let order = vld1q_u8(TO_FRONT[set].as_ptr());
        vst1q_f32(to.0, vreinterpretq_f32_u8(vqtbl1q_u8(vreinterpretq_u8_f32(scores), order)));
        vst1q_u32(to.1, vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(slots), order)));
    }
}

/// Writes the lanes of `mask` that reach the threshold.
///
/// # Safety
/// Needs NEON; the staging must have room for 16 entries.
#[target_feature(enable = "neon")]
pub(super) unsafe fn stage(
    scores: [float32x4_t; 4],
    mask: u16,
    first_slot: u32,
    threshold: f32,
    staging: &mut Staging<'_>,
) {
    let bound = vdupq_n_f32(threshold);
    let [a, b, c, d] = scores.map(|scores| vcgeq_f32(scores, bound));
    if vmaxvq_u32(vorrq_u32(vorrq_u32(a, b), vorrq_u32(c, d))) == 0 {
        return;
    }
    // SAFETY: four numbers are read from an array of four.
    let lanes = unsafe { vld1q_u32([0, 1, 2, 3].as_ptr()) };
    for (quarter, reached) in [a, b, c, d].into_iter().enumerate() {
        let set = set_of(reached) & usize::from(mask >> (quarter * 4));
        let slots = vaddq_u32(vdupq_n_u32(first_slot + quarter as u32 * 4), lanes);
        // SAFETY: each earlier quarter added at most four entries, so at least four of 16 are left.
        unsafe {
            let to = (staging.scores.as_mut_ptr().add(staging.len), staging.slots.as_mut_ptr().add(staging.len));
            pack(set, scores[quarter], slots, to);
        }
        staging.len += set.count_ones() as usize;
    }
}

/// Scans with the sums of `block_sums`.
///
/// # Safety
/// Needs NEON and what `block_sums` needs. Lengths are checked by the caller.
#[target_feature(enable = "neon")]
pub(super) unsafe fn scan_by(
    block_sums: BlockSums<2>,
    blocks: &Blocks<'_>,
    query: &Int8Query<'_>,
    threshold: f32,
    from: usize,
    staging: &mut Staging<'_>,
) -> usize {
    let count = blocks.items.div_ceil(BLOCK);
    for block in from..count {
        if staging.len + BLOCK > staging.scores.len() {
            return block;
        }
        let (codes, scales) = block_of(blocks, block);
        // SAFETY: the query is as long as the block's codes require, checked by the caller; room was checked above.
        unsafe {
            let sums = block_sums(codes, query.rows);
            let first = blocks.first_slot + (block * BLOCK) as u32;
            stage(scaled(sums, scales, query.scale), items_of(blocks, block), first, threshold, staging);
        }
    }
    count
}

/// Finds the nearest items by the sums of `block_sums`.
///
/// # Safety
/// Needs NEON and what `block_sums` needs. Lengths are checked by the caller.
#[target_feature(enable = "neon")]
pub(super) unsafe fn nearest4_by(
    block_sums: BlockSums<4>,
    blocks: &Blocks<'_>,
    penalties: &[f32],
    queries: &[Int8Query<'_>; 4],
) -> [u32; 4] {
    let mut best = [[vdupq_n_f32(f32::NEG_INFINITY); 4]; 4];
    let mut at = [[vdupq_n_u32(0); 4]; 4];
    let rows = queries.each_ref().map(|query| query.rows[0]);
    for (block, penalties) in (0..blocks.items.div_ceil(BLOCK)).zip(penalties.as_chunks::<BLOCK>().0) {
        let (codes, scales) = block_of(blocks, block);
        let left = vdupq_n_u32((blocks.items - block * BLOCK).min(BLOCK) as u32);
        // SAFETY: the queries are as long as the block's codes require, checked by the caller.
        let sums = unsafe { block_sums(codes, rows) };
        for (n, sums) in sums.into_iter().enumerate() {
            let scores = scaled_products(sums.map(|s| vcvtq_f32_s32(s)), scales, queries[n].scale * HIGH);
            for quarter in 0..4 {
                let lanes: [u32; 4] = std::array::from_fn(|lane| (quarter * 4 + lane) as u32);
                // SAFETY: four numbers are read from an array of four and from a quarter of 16.
                let (lanes, penalty) =
                    unsafe { (vld1q_u32(lanes.as_ptr()), vld1q_f32(penalties.as_ptr().add(quarter * 4))) };
                let score = vsubq_f32(scores[quarter], penalty);
                let better = vandq_u32(vcgtq_f32(score, best[n][quarter]), vcltq_u32(lanes, left));
                best[n][quarter] = vbslq_f32(better, score, best[n][quarter]);
                at[n][quarter] = vbslq_u32(better, vdupq_n_u32(block as u32), at[n][quarter]);
            }
        }
    }
    std::array::from_fn(|n| {
        let (mut scores, mut blocks) = ([0f32; BLOCK], [0u32; BLOCK]);
        for quarter in 0..4 {
            // SAFETY: four numbers are written to a quarter of 16.
            unsafe {
                vst1q_f32(scores.as_mut_ptr().add(quarter * 4), best[n][quarter]);
                vst1q_u32(blocks.as_mut_ptr().add(quarter * 4), at[n][quarter]);
            }
        }
        first_best(&scores, &blocks)
    })
}

/// # Safety
/// Needs NEON. Lengths are checked by the caller.
#[target_feature(enable = "neon")]
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

/// # Safety
/// Needs NEON. Lengths are checked by the caller.
#[target_feature(enable = "neon")]
pub(super) unsafe fn scan_many(blocks: &Blocks<'_>, lanes: &mut [Lane<'_>]) {
    for lane in lanes {
        // SAFETY: the caller checked the lengths of every lane.
        unsafe { scan(blocks, &lane.query, lane.threshold, 0, &mut lane.staging) };
    }
}

/// # Safety
/// Needs NEON. Lengths are checked by the caller.
#[target_feature(enable = "neon")]
pub(super) unsafe fn nearest4(blocks: &Blocks<'_>, penalties: &[f32], queries: &[Int8Query<'_>; 4]) -> [u32; 4] {
    // SAFETY: this function's `# Safety` conditions hold.
    unsafe { nearest4_by(block_sums4, blocks, penalties, queries) }
}

/// # Safety
/// Needs nothing beyond the portable kernel.
pub(super) unsafe fn kth(values: &mut [f32], k: usize) -> f32 {
    portable::kth(values, k)
}

/// # Safety
/// Needs NEON. Lengths are checked by the caller.
#[target_feature(enable = "neon")]
pub(super) unsafe fn retain(scores: &mut [f32], slots: &mut [u32], threshold: f32) -> usize {
    let bound = vdupq_n_f32(threshold);
    let (len, mut packed) = (scores.len(), 0);
    let whole = len / 4 * 4;
    for n in (0..whole).step_by(4) {
        // SAFETY: `n + 4 <= len`; stores at `packed <= n` cover only numbers that were read before.
        unsafe {
            let (x, s) = (vld1q_f32(scores.as_ptr().add(n)), vld1q_u32(slots.as_ptr().add(n)));
            let set = set_of(vcgeq_f32(x, bound));
            pack(set, x, s, (scores.as_mut_ptr().add(packed), slots.as_mut_ptr().add(packed)));
            packed += set.count_ones() as usize;
        }
    }
    for n in whole..len {
        (scores[packed], slots[packed]) = (scores[n], slots[n]);
        packed += usize::from(scores[n] >= threshold);
    }
    packed
}

/// # Safety
/// Needs NEON. Lengths are checked by the caller.
#[target_feature(enable = "neon")]
pub(super) unsafe fn keep(
    scores: &[f32],
    first_slot: u32,
    threshold: f32,
    from: usize,
    staging: &mut Staging<'_>,
) -> usize {
    let count = scores.len() / BLOCK;
    for block in from..count {
        if staging.len + BLOCK > staging.scores.len() {
            return block;
        }
        // SAFETY: `block < count`, so 16 scores are readable; room was checked above.
        unsafe {
            let quarters = std::array::from_fn(|n| vld1q_f32(scores.as_ptr().add(block * BLOCK + n * 4)));
            stage(quarters, u16::MAX, first_slot + (block * BLOCK) as u32, threshold, staging);
        }
    }
    count
}

macro_rules! dot {
    ($name:ident, $many:ident, $element:ty, $load:expr, $scalar:expr) => {
        /// # Safety
        /// Needs NEON. The lengths are equal: checked by the caller.
        #[target_feature(enable = "neon")]
        pub(super) unsafe fn $name(a: &[f32], b: &[$element]) -> f32 {
            let len = a.len();
            let mut sums = [vdupq_n_f32(0.0); 4];
            let mut i = 0;
            // SAFETY: `i + 16 <= len`, then `i + 4 <= len`: every load stays inside both slices.
            unsafe {
                while i + 16 <= len {
                    for (n, sum) in sums.iter_mut().enumerate() {
                        let at = i + n * 4;
                        *sum = vfmaq_f32(*sum, vld1q_f32(a.as_ptr().add(at)), $load(b.as_ptr().add(at)));
                    }
                    i += 16;
                }
                while i + 4 <= len {
                    sums[0] = vfmaq_f32(sums[0], vld1q_f32(a.as_ptr().add(i)), $load(b.as_ptr().add(i)));
                    i += 4;
                }
            }
            let sum = vaddq_f32(vaddq_f32(sums[0], sums[1]), vaddq_f32(sums[2], sums[3]));
            vaddvq_f32(sum) + (i..len).map(|i| a[i] * $scalar(b[i])).sum::<f32>()
        }

        /// # Safety
        /// Needs NEON.
        #[target_feature(enable = "neon")]
        pub(super) unsafe fn $many(a: &[f32], rows: &[$element], slots: &[u32], out: &mut [f32]) {
            let row = |slot: u32| &rows[slot as usize * a.len()..(slot as usize + 1) * a.len()];
            let ahead = rows_ahead(a.len() * size_of::<$element>());
            slots.iter().take(ahead).for_each(|&slot| prefetch(row(slot)));
            for (n, (&slot, out)) in slots.iter().zip(out).enumerate() {
                if let Some(&next) = slots.get(n + ahead) {
                    prefetch(row(next));
                }
                // SAFETY: `row` is as long as `a`, and the CPU has the features that this function enables.
                *out = unsafe { $name(a, row(slot)) };
            }
        }
    };
}

dot!(dot_f32, dots_f32, f32, |p: *const f32| vld1q_f32(p), |x: f32| x);
dot!(
    dot_bf16,
    dots_bf16,
    half::bf16,
    |p: *const half::bf16| vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(vld1_u16(p.cast())))),
    half::bf16::to_f32
);
dot!(
    dot_f16,
    dots_f16,
    half::f16,
    |p: *const half::f16| vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p.cast()))),
    half::f16::to_f32
);
