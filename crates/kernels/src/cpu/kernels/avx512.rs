//! AVX-512 with VNNI: one `vpdpbusd` multiplies and adds 16 items × 4 dimensions.

use std::arch::x86_64::*;

use super::operands::{
    BLOCK, Blocks, HIGH, Int8Query, Lane, Pick, Staging, blocks_ahead, first_best, items_of, prefetch_address,
    rows_ahead,
};
use crate::memory::prefetch;

/// Converts sums of products with a row of a query to f32.
#[target_feature(enable = "avx512f,popcnt")]
fn products(sums: __m512i, query: &Int8Query<'_>, row: usize) -> __m512 {
    _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, _mm512_set1_epi32(query.corrections[row])))
}

/// Combines the sums of the high and the low row into scores.
#[target_feature(enable = "avx512f,popcnt")]
pub(super) fn scaled(high: __m512i, low: __m512i, query: &Int8Query<'_>, scales: __m512) -> __m512 {
    let dot = _mm512_fmadd_ps(products(high, query, 0), _mm512_set1_ps(HIGH), products(low, query, 1));
    _mm512_mul_ps(_mm512_mul_ps(dot, scales), _mm512_set1_ps(query.scale))
}

/// Returns the sums of one block for `R` rows of queries. Two accumulator chains per row hide the latency of the multiply-add.
/// For each cache line that is read, one line of a later block is prefetched, which spreads the prefetches evenly over the scan.
///
/// # Safety
/// Needs AVX-512 F, BW and VNNI, and POPCNT; `codes` must point to `groups * 64` bytes, each row to `groups * 4`.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,popcnt")]
unsafe fn block_sums<const R: usize>(
    codes: *const u8,
    ahead: *const u8,
    rows: [*const i8; R],
    groups: usize,
) -> [__m512i; R] {
    let mut sums = [[_mm512_setzero_si512(); R]; 2];
    // SAFETY: all addresses stay inside the ranges that the caller guarantees; a prefetch may name any address.
    unsafe {
        let add = |g: usize, sums: &mut [__m512i; R]| {
            _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(g * 64).cast());
            let line = _mm512_loadu_si512(codes.add(g * 64).cast());
            for n in 0..R {
                let four = _mm512_set1_epi32(rows[n].add(g * 4).cast::<i32>().read_unaligned());
                sums[n] = _mm512_dpbusd_epi32(sums[n], line, four);
            }
        };
        let mut g = 0;
        while g + 2 <= groups {
            add(g, &mut sums[0]);
            add(g + 1, &mut sums[1]);
            g += 2;
        }
        if g < groups {
            add(g, &mut sums[0]);
        }
    }
    std::array::from_fn(|n| _mm512_add_epi32(sums[0][n], sums[1][n]))
}

/// Writes the lanes of `mask` that reach the threshold. Compressing into a register and storing all of it is many times
/// faster than a compressing store on Zen 4.
///
/// # Safety
/// Needs AVX-512 F and POPCNT; the staging must have room for 16 entries.
#[target_feature(enable = "avx512f,popcnt")]
pub(super) unsafe fn stage(scores: __m512, mask: u16, first_slot: u32, threshold: __m512, staging: &mut Staging<'_>) {
    let retained = _mm512_mask_cmp_ps_mask::<_CMP_GE_OQ>(mask, scores, threshold);
    if retained != 0 {
        // SAFETY: the caller guarantees room for 16 entries.
        unsafe { put(scores, retained, first_slot, staging) };
    }
}

/// Writes only the lanes whose bit in `retained` is set.
///
/// # Safety
/// As [`stage`].
#[inline]
#[target_feature(enable = "avx512f,popcnt")]
pub(super) unsafe fn put(scores: __m512, retained: u16, first_slot: u32, staging: &mut Staging<'_>) {
    let lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    let slots = _mm512_add_epi32(_mm512_set1_epi32(first_slot as i32), lanes);
    // SAFETY: the caller left room for 16 entries behind `len`.
    unsafe {
        _mm512_storeu_ps(staging.scores.as_mut_ptr().add(staging.len), _mm512_maskz_compress_ps(retained, scores));
        _mm512_storeu_si512(
            staging.slots.as_mut_ptr().add(staging.len).cast(),
            _mm512_maskz_compress_epi32(retained, slots),
        );
    }
    staging.len += retained.count_ones() as usize;
}

/// # Safety
/// Needs AVX-512 F, BW and VNNI, and POPCNT. Lengths are checked by the caller.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,popcnt")]
pub(super) unsafe fn scan(
    blocks: &Blocks<'_>,
    query: &Int8Query<'_>,
    threshold: f32,
    from: usize,
    staging: &mut Staging<'_>,
) -> usize {
    let count = blocks.items.div_ceil(BLOCK);
    let bound = _mm512_set1_ps(threshold);
    let bytes = blocks.groups * 64;
    let rows = query.rows.map(<[i8]>::as_ptr);
    let distance = blocks_ahead(bytes);
    for block in from..count {
        if staging.len + BLOCK > staging.scores.len() {
            return block;
        }
        // SAFETY: `block < count`, and the caller checked that codes and scales hold `count` blocks; room was checked above.
        unsafe {
            let codes = blocks.codes.as_ptr().add(block * bytes);
            let scales = blocks.scales.as_ptr().add(block * BLOCK);
            let to_come = prefetch_address(blocks, block + distance);
            let [high, low] = block_sums(codes, to_come, rows, blocks.groups);
            let scores = scaled(high, low, query, _mm512_loadu_ps(scales));
            stage(scores, items_of(blocks, block), blocks.first_slot + (block * BLOCK) as u32, bound, staging);
        }
    }
    count
}

/// # Safety
/// Needs AVX-512 F, BW and VNNI, and POPCNT. The caller checks the lengths and the block numbers of the picks.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,popcnt")]
pub(super) unsafe fn scan_picks(
    blocks: &Blocks<'_>,
    picks: &[Pick],
    query: &Int8Query<'_>,
    threshold: f32,
    from: usize,
    staging: &mut Staging<'_>,
) -> usize {
    let bound = _mm512_set1_ps(threshold);
    let bytes = blocks.groups * 64;
    let rows = query.rows.map(<[i8]>::as_ptr);
    let distance = blocks_ahead(bytes);
    for (n, pick) in picks.iter().enumerate().skip(from) {
        if staging.len + BLOCK > staging.scores.len() {
            return n;
        }
        let block = pick.block as usize;
        let to_come = picks.get(n + distance).unwrap_or(pick).block as usize;
        // SAFETY: both blocks are blocks of `blocks`, whose lengths the caller checked; room was checked above.
        unsafe {
            _mm_prefetch::<_MM_HINT_T1>(blocks.scales.as_ptr().add(to_come * BLOCK).cast());
            let ahead = blocks.codes.as_ptr().add(to_come * bytes);
            let [high, low] = block_sums(blocks.codes.as_ptr().add(block * bytes), ahead, rows, blocks.groups);
            let scores = scaled(high, low, query, _mm512_loadu_ps(blocks.scales.as_ptr().add(block * BLOCK)));
            stage(
                scores,
                pick.mask & items_of(blocks, block),
                blocks.first_slot + (block * BLOCK) as u32,
                bound,
                staging,
            );
        }
    }
    picks.len()
}

/// Scans for `N` queries, which are `R = 2 N` rows.
///
/// # Safety
/// Needs AVX-512 F, BW and VNNI, and POPCNT. Lengths are checked by the caller.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,popcnt")]
unsafe fn scan_lanes<const N: usize, const R: usize>(blocks: &Blocks<'_>, lanes: &mut [Lane<'_>; N]) {
    const { assert!(R == 2 * N) };
    let count = blocks.items.div_ceil(BLOCK);
    let bytes = blocks.groups * 64;
    let rows: [*const i8; R] = std::array::from_fn(|n| lanes[n / 2].query.rows[n % 2].as_ptr());
    let distance = blocks_ahead(bytes);
    for block in 0..count {
        // SAFETY: `block < count`; codes and scales hold `count` blocks, queries `groups * 4` codes and each staging has room
        // for all blocks: the caller checked all of them.
        unsafe {
            let codes = blocks.codes.as_ptr().add(block * bytes);
            let to_come = prefetch_address(blocks, block + distance);
            let sums = block_sums(codes, to_come, rows, blocks.groups);
            let scales = _mm512_loadu_ps(blocks.scales.as_ptr().add(block * BLOCK));
            let (mask, first) = (items_of(blocks, block), blocks.first_slot + (block * BLOCK) as u32);
            for (sums, lane) in sums.chunks_exact(2).zip(&mut *lanes) {
                let scores = scaled(sums[0], sums[1], &lane.query, scales);
                stage(scores, mask, first, _mm512_set1_ps(lane.threshold), &mut lane.staging);
            }
        }
    }
}

/// # Safety
/// Needs AVX-512 F, BW and VNNI, and POPCNT. Lengths are checked by the caller.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,popcnt")]
pub(super) unsafe fn scan_many(blocks: &Blocks<'_>, lanes: &mut [Lane<'_>]) {
    let (fours, rest) = lanes.as_chunks_mut::<4>();
    // SAFETY: the caller checked the lengths of every lane.
    unsafe {
        fours.iter_mut().for_each(|four| scan_lanes::<4, 8>(blocks, four));
        let (twos, one) = rest.as_chunks_mut::<2>();
        twos.iter_mut().for_each(|two| scan_lanes::<2, 4>(blocks, two));
        one.iter_mut().for_each(|lane| {
            scan(blocks, &lane.query, lane.threshold, 0, &mut lane.staging);
        });
    }
}

/// # Safety
/// Needs AVX-512 F, BW and VNNI, and POPCNT. Lengths are checked by the caller.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,popcnt")]
pub(super) unsafe fn nearest4(blocks: &Blocks<'_>, penalties: &[f32], queries: &[Int8Query<'_>; 4]) -> [u32; 4] {
    let count = blocks.items.div_ceil(BLOCK);
    let bytes = blocks.groups * 64;
    let rows = queries.each_ref().map(|q| q.rows[0].as_ptr());
    let mut best = [_mm512_set1_ps(f32::NEG_INFINITY); 4];
    let mut at = [_mm512_setzero_si512(); 4];
    for block in 0..count {
        // SAFETY: `block < count`; codes, scales and penalties hold `count` blocks: the caller checked all of them.
        unsafe {
            let codes = blocks.codes.as_ptr().add(block * bytes);
            let sums = block_sums(codes, codes.wrapping_add(blocks_ahead(bytes) * bytes), rows, blocks.groups);
            let scales = _mm512_loadu_ps(blocks.scales.as_ptr().add(block * BLOCK));
            let penalty = _mm512_loadu_ps(penalties.as_ptr().add(block * BLOCK));
            let real = items_of(blocks, block);
            for n in 0..4 {
                let scaled_products = _mm512_set1_ps(queries[n].scale * HIGH);
                let score = _mm512_mul_ps(_mm512_mul_ps(products(sums[n], &queries[n], 0), scales), scaled_products);
                let score = _mm512_sub_ps(score, penalty);
                let better = _mm512_mask_cmp_ps_mask::<_CMP_GT_OQ>(real, score, best[n]);
                best[n] = _mm512_mask_mov_ps(best[n], better, score);
                at[n] = _mm512_mask_mov_epi32(at[n], better, _mm512_set1_epi32(block as i32));
            }
        }
    }
    std::array::from_fn(|n| {
        let (mut scores, mut blocks) = ([0f32; BLOCK], [0u32; BLOCK]);
        // SAFETY: 16 numbers are written to arrays of 16.
        unsafe {
            _mm512_storeu_ps(scores.as_mut_ptr(), best[n]);
            _mm512_storeu_si512(blocks.as_mut_ptr().cast(), at[n]);
        }
        first_best(&scores, &blocks)
    })
}

/// Number of remaining values at which pairwise comparison finds the k-th.
const COMPARED: usize = 48;

/// Quickselect by compression: samples a pivot from 16 values, counts the larger values, and packs the side with the k-th value
/// to the front, 16 values per step.
///
/// # Safety
/// Needs AVX-512 F and POPCNT. `1 <= k <= values.len()`, checked by the caller.
#[target_feature(enable = "avx512f,popcnt")]
pub(super) unsafe fn kth(values: &mut [f32], mut k: usize) -> f32 {
    let mut len = values.len();
    while len > COMPARED {
        let sample: [f32; 16] = std::array::from_fn(|n| values[(2 * n + 1) * len / 32]);
        let pivot = kth_compared(&sample, (k * 16 / (len + 1)).min(15) + 1);
        let bound = _mm512_set1_ps(pivot);
        let (mut larger, mut smaller) = (0, 0);
        // SAFETY: `n < len` for all loads, and `packed <= n` for all stores of the 16 lanes loaded before; masks bound the last
        // load and every store to `len`.
        unsafe {
            for n in (0..len).step_by(16) {
                let lanes = tail(len - n);
                let x = _mm512_maskz_loadu_ps(lanes, values.as_ptr().add(n));
                larger += _mm512_mask_cmp_ps_mask::<_CMP_GT_OQ>(lanes, x, bound).count_ones() as usize;
                smaller += _mm512_mask_cmp_ps_mask::<_CMP_LT_OQ>(lanes, x, bound).count_ones() as usize;
            }
            if k > larger && k <= len - smaller {
                return pivot;
            }
            let keep_larger = k <= larger;
            let mut packed = 0;
            for n in (0..len).step_by(16) {
                let lanes = tail(len - n);
                let x = _mm512_maskz_loadu_ps(lanes, values.as_ptr().add(n));
                let retained = if keep_larger {
                    _mm512_mask_cmp_ps_mask::<_CMP_GT_OQ>(lanes, x, bound)
                } else {
                    _mm512_mask_cmp_ps_mask::<_CMP_LT_OQ>(lanes, x, bound)
                };
                let count = retained.count_ones() as usize;
                _mm512_mask_storeu_ps(
                    values.as_mut_ptr().add(packed),
                    tail(count),
                    _mm512_maskz_compress_ps(retained, x),
                );
                packed += count;
            }
            if !keep_larger {
                k -= len - smaller;
            }
            len = packed;
        }
    }
    kth_compared(&values[..len], k)
}

/// Returns the k-th largest of at most [`COMPARED`] values: fewer than `k` values are larger, at most `len - k` are smaller.
#[target_feature(enable = "avx512f,popcnt")]
fn kth_compared(values: &[f32], k: usize) -> f32 {
    let mut registers = [(0u16, _mm512_setzero_ps()); COMPARED / 16];
    for (register, part) in registers.iter_mut().zip(values.chunks(16)) {
        let lanes = tail(part.len());
        // SAFETY: the mask bounds the load to `part`.
        *register = (lanes, unsafe { _mm512_maskz_loadu_ps(lanes, part.as_ptr()) });
    }
    for &value in values {
        let bound = _mm512_set1_ps(value);
        let (mut larger, mut smaller) = (0, 0);
        for (lanes, x) in registers {
            larger += _mm512_mask_cmp_ps_mask::<_CMP_GT_OQ>(lanes, x, bound).count_ones() as usize;
            smaller += _mm512_mask_cmp_ps_mask::<_CMP_LT_OQ>(lanes, x, bound).count_ones() as usize;
        }
        if larger < k && k <= values.len() - smaller {
            return value;
        }
    }
    // This line is reached only if a value is NaN; NaN scores are never retained.
    f32::NEG_INFINITY
}

/// Returns the mask of the first `count` lanes; all lanes from 16 on.
fn tail(count: usize) -> u16 {
    if count >= 16 { u16::MAX } else { (1 << count) - 1 }
}

/// # Safety
/// Needs AVX-512 F and POPCNT. Lengths are checked by the caller.
#[target_feature(enable = "avx512f,popcnt")]
pub(super) unsafe fn retain(scores: &mut [f32], slots: &mut [u32], threshold: f32) -> usize {
    let bound = _mm512_set1_ps(threshold);
    let (len, mut packed) = (scores.len(), 0);
    for n in (0..len).step_by(16) {
        let lanes = tail(len - n);
        // SAFETY: masks bound loads to `len`; stores write at most as many lanes as were loaded, at `packed <= n`.
        unsafe {
            let x = _mm512_maskz_loadu_ps(lanes, scores.as_ptr().add(n));
            let s = _mm512_maskz_loadu_epi32(lanes, slots.as_ptr().add(n).cast());
            let retained = _mm512_mask_cmp_ps_mask::<_CMP_GE_OQ>(lanes, x, bound);
            let count = retained.count_ones() as usize;
            _mm512_mask_storeu_ps(scores.as_mut_ptr().add(packed), tail(count), _mm512_maskz_compress_ps(retained, x));
            _mm512_mask_storeu_epi32(
                slots.as_mut_ptr().add(packed).cast(),
                tail(count),
                _mm512_maskz_compress_epi32(retained, s),
            );
            packed += count;
        }
    }
    packed
}

/// # Safety
/// Needs AVX-512 F and POPCNT. Lengths are checked by the caller.
#[target_feature(enable = "avx512f,popcnt")]
pub(super) unsafe fn keep(
    scores: &[f32],
    first_slot: u32,
    threshold: f32,
    from: usize,
    staging: &mut Staging<'_>,
) -> usize {
    let count = scores.len() / BLOCK;
    let bound = _mm512_set1_ps(threshold);
    for block in from..count {
        if staging.len + BLOCK > staging.scores.len() {
            return block;
        }
        // SAFETY: `block < count`, so 16 scores are readable; room was checked above.
        unsafe {
            let scores = _mm512_loadu_ps(scores.as_ptr().add(block * BLOCK));
            stage(scores, u16::MAX, first_slot + (block * BLOCK) as u32, bound, staging);
        }
    }
    count
}

/// Converts bfloat16 to f32.
#[target_feature(enable = "avx512f")]
fn bf16_to_f32(numbers: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(numbers)))
}

macro_rules! dot {
    ($name:ident, $many:ident, $element:ty, $load:expr, $load_some:expr) => {
        /// # Safety
        /// Needs AVX-512 F, BW and VL. The lengths are equal: checked by the caller.
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,popcnt")]
        pub(super) unsafe fn $name(a: &[f32], b: &[$element]) -> f32 {
            let len = a.len();
            let mut sums = [_mm512_setzero_ps(); 4];
            let mut i = 0;
            // SAFETY: `i + 64 <= len`, then `i + 16 <= len`: every load stays inside both slices, and masks bound the last ones.
            unsafe {
                while i + 64 <= len {
                    for (n, sum) in sums.iter_mut().enumerate() {
                        let at = i + n * 16;
                        *sum = _mm512_fmadd_ps(_mm512_loadu_ps(a.as_ptr().add(at)), $load(b.as_ptr().add(at)), *sum);
                    }
                    i += 64;
                }
                while i + 16 <= len {
                    sums[0] = _mm512_fmadd_ps(_mm512_loadu_ps(a.as_ptr().add(i)), $load(b.as_ptr().add(i)), sums[0]);
                    i += 16;
                }
                if i < len && len >= 16 {
                    // Loads the last 16 numbers again and masks the numbers that are already summed: a masked load past
                    // the row would wait for the next cache line.
                    let (at, mask) = (len - 16, u16::MAX << (16 - (len - i)));
                    let last = _mm512_loadu_ps(a.as_ptr().add(at));
                    sums[1] = _mm512_mask3_fmadd_ps(last, $load(b.as_ptr().add(at)), sums[1], mask);
                } else if i < len {
                    let mask = (1 << (len - i)) - 1;
                    let some = _mm512_maskz_loadu_ps(mask, a.as_ptr().add(i));
                    sums[1] = _mm512_fmadd_ps(some, $load_some(mask, b.as_ptr().add(i)), sums[1]);
                }
            }
            _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])))
        }

        /// # Safety
        /// Needs AVX-512 F, BW and VL.
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,popcnt")]
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

dot!(dot_f32, dots_f32, f32, |p: *const f32| _mm512_loadu_ps(p), |mask: u16, p: *const f32| _mm512_maskz_loadu_ps(
    mask, p
));
dot!(
    dot_bf16,
    dots_bf16,
    half::bf16,
    |p: *const half::bf16| bf16_to_f32(_mm256_loadu_si256(p.cast())),
    |mask: u16, p: *const half::bf16| bf16_to_f32(_mm256_maskz_loadu_epi16(mask, p.cast()))
);
dot!(
    dot_f16,
    dots_f16,
    half::f16,
    |p: *const half::f16| _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())),
    |mask: u16, p: *const half::f16| _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p.cast()))
);
