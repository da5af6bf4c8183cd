//! AVX2. `vpmaddubsw` would saturate (255 × 127 × 2 exceeds 16 bits). So a mask and a shift widen even and odd bytes, which are
//! multiplied in 16 bits: dimensions 0 and 2 of each item, then 1 and 3.

use std::arch::x86_64::*;

use super::operands::{BLOCK, Blocks, HIGH, Int8Query, Lane, Staging, items_of, rows_ahead};
use super::portable;
use crate::memory::prefetch;

/// Returns the sums of one block with `R` rows of queries, in halves of 8 items.
///
/// # Safety
/// Needs AVX2; `codes` must hold as many groups of 64 bytes as each row has groups of four codes.
#[target_feature(enable = "avx2")]
unsafe fn block_sums<const R: usize>(codes: &[u8], rows: [&[i8]; R]) -> [[__m256i; 2]; R] {
    let bytes = _mm256_set1_epi16(0xff);
    let mut sums = [[_mm256_setzero_si256(); 2]; R];
    for (g, group) in codes.chunks_exact(64).enumerate() {
        let pair = |a: i8, b: i8| _mm256_set1_epi32(i32::from(a as i16 as u16) | (i32::from(b) << 16));
        for half in 0..2 {
            // SAFETY: a group has 64 bytes, two halves of 32.
            let x = unsafe { _mm256_loadu_si256(group.as_ptr().add(half * 32).cast()) };
            let (even, odd) = (_mm256_and_si256(x, bytes), _mm256_srli_epi16::<8>(x));
            for (row, sums) in rows.iter().zip(&mut sums) {
                let q = &row[g * 4..g * 4 + 4];
                let products = _mm256_add_epi32(
                    _mm256_madd_epi16(even, pair(q[0], q[2])),
                    _mm256_madd_epi16(odd, pair(q[1], q[3])),
                );
                sums[half] = _mm256_add_epi32(sums[half], products);
            }
        }
    }
    sums
}

/// # Safety
/// Needs AVX2; `block` is a block of `blocks`, whose lengths were checked.
#[target_feature(enable = "avx2")]
unsafe fn block_scores(blocks: &Blocks<'_>, block: usize, query: &Int8Query<'_>) -> [f32; BLOCK] {
    let bytes = blocks.groups * 64;
    let codes = &blocks.codes[block * bytes..(block + 1) * bytes];
    // SAFETY: `codes` holds as many groups as the query, checked by the caller.
    let [high, low] = unsafe { block_sums(codes, query.rows) };
    let mut scores = [0f32; BLOCK];
    for half in 0..2 {
        let product = |sum, correction| _mm256_cvtepi32_ps(_mm256_sub_epi32(sum, _mm256_set1_epi32(correction)));
        let [high, low] = [product(high[half], query.corrections[0]), product(low[half], query.corrections[1])];
        let dot = _mm256_add_ps(_mm256_mul_ps(high, _mm256_set1_ps(HIGH)), low);
        let at = half * 8;
        let scales = &blocks.scales[block * BLOCK + at..block * BLOCK + at + 8];
        // SAFETY: eight floats are read from a slice of eight and written to eight of sixteen.
        unsafe {
            let score =
                _mm256_mul_ps(_mm256_mul_ps(dot, _mm256_loadu_ps(scales.as_ptr())), _mm256_set1_ps(query.scale));
            _mm256_storeu_ps(scores.as_mut_ptr().add(at), score);
        }
    }
    scores
}

/// # Safety
/// Needs AVX2. Lengths are checked by the caller.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn scan(
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
        // SAFETY: `block < count`, and the caller checked the lengths.
        let scores = unsafe { block_scores(blocks, block, query) };
        portable::stage(
            &scores,
            items_of(blocks, block),
            blocks.first_slot + (block * BLOCK) as u32,
            threshold,
            staging,
        );
    }
    count
}

/// # Safety
/// Needs AVX2. Lengths are checked by the caller.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn scan_many(blocks: &Blocks<'_>, lanes: &mut [Lane<'_>]) {
    for lane in lanes {
        // SAFETY: the caller checked the lengths of every lane.
        unsafe { scan(blocks, &lane.query, lane.threshold, 0, &mut lane.staging) };
    }
}

/// # Safety
/// Needs AVX2. Lengths are checked by the caller.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn nearest4(blocks: &Blocks<'_>, penalties: &[f32], queries: &[Int8Query<'_>; 4]) -> [u32; 4] {
    let mut best = [(f32::NEG_INFINITY, 0); 4];
    let bytes = blocks.groups * 64;
    for block in 0..blocks.items.div_ceil(BLOCK) {
        let codes = &blocks.codes[block * bytes..(block + 1) * bytes];
        // SAFETY: `codes` holds as many groups as the queries, checked by the caller.
        let sums = unsafe { block_sums(codes, queries.each_ref().map(|q| q.rows[0])) };
        for ((query, best), sums) in queries.iter().zip(&mut best).zip(sums) {
            let mut products = [0i32; BLOCK];
            for (sum, to) in sums.iter().zip(products.chunks_exact_mut(8)) {
                // SAFETY: eight numbers are written to a slice of eight.
                unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), *sum) };
            }
            for (item, product) in (block * BLOCK..blocks.items).zip(products) {
                let product = (product - query.corrections[0]) as f32;
                let score = product * blocks.scales[item] * (query.scale * HIGH);
                if score - penalties[item] > best.0 {
                    *best = (score - penalties[item], item as u32);
                }
            }
        }
    }
    best.map(|(_, item)| item)
}

/// # Safety
/// Needs nothing beyond the portable kernel.
pub(super) unsafe fn kth(values: &mut [f32], k: usize) -> f32 {
    portable::kth(values, k)
}

/// # Safety
/// Needs nothing beyond the portable kernel.
pub(super) unsafe fn retain(scores: &mut [f32], slots: &mut [u32], threshold: f32) -> usize {
    portable::retain(scores, slots, threshold)
}

/// # Safety
/// Needs nothing beyond the portable kernel; compiled with AVX2 so that the compiler may use it.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn keep(
    scores: &[f32],
    first_slot: u32,
    threshold: f32,
    from: usize,
    staging: &mut Staging<'_>,
) -> usize {
    portable::keep(scores, first_slot, threshold, from, staging)
}

macro_rules! dot {
    ($name:ident, $many:ident, $element:ty, $load:expr, $scalar:expr) => {
        /// # Safety
        /// Needs AVX2, FMA and F16C. The lengths are equal: checked by the caller.
        #[target_feature(enable = "avx2,fma,f16c")]
        pub(super) unsafe fn $name(a: &[f32], b: &[$element]) -> f32 {
            let len = a.len();
            let mut sums = [_mm256_setzero_ps(); 4];
            let mut i = 0;
            // SAFETY: `i + 32 <= len`, then `i + 8 <= len`: every load stays inside both slices.
            unsafe {
                while i + 32 <= len {
                    for (n, sum) in sums.iter_mut().enumerate() {
                        let at = i + n * 8;
                        *sum = _mm256_fmadd_ps(_mm256_loadu_ps(a.as_ptr().add(at)), $load(b.as_ptr().add(at)), *sum);
                    }
                    i += 32;
                }
                while i + 8 <= len {
                    sums[0] = _mm256_fmadd_ps(_mm256_loadu_ps(a.as_ptr().add(i)), $load(b.as_ptr().add(i)), sums[0]);
                    i += 8;
                }
            }
            let sum = _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3]));
            let mut lanes = [0f32; 8];
            // SAFETY: eight floats are written to an array of eight.
            unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), sum) };
            lanes.iter().sum::<f32>() + (i..len).map(|i| a[i] * $scalar(b[i])).sum::<f32>()
        }

        /// # Safety
        /// Needs AVX2, FMA and F16C.
        #[target_feature(enable = "avx2,fma,f16c")]
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

dot!(dot_f32, dots_f32, f32, |p: *const f32| _mm256_loadu_ps(p), |x: f32| x);
dot!(
    dot_bf16,
    dots_bf16,
    half::bf16,
    |p: *const half::bf16| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(
        p.cast()
    )))),
    half::bf16::to_f32
);
dot!(dot_f16, dots_f16, half::f16, |p: *const half::f16| _mm256_cvtph_ps(_mm_loadu_si128(p.cast())), half::f16::to_f32);
