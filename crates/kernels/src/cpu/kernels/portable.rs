//! Plain loops: they define every kernel, and run if no faster set is available.

use super::operands::{BLOCK, Blocks, HIGH, Int8Query, Lane, Staging, items_of};

pub(super) fn block_sums(codes: &[u8], query: &[i8]) -> [i32; BLOCK] {
    let mut sums = [0i32; BLOCK];
    for (lane, q) in codes.chunks_exact(64).zip(query.chunks_exact(4)) {
        for (sum, x) in sums.iter_mut().zip(lane.chunks_exact(4)) {
            *sum += (0..4).map(|j| i32::from(x[j]) * i32::from(q[j])).sum::<i32>();
        }
    }
    sums
}

/// Returns the products of one block with one row of a query.
fn block_products(blocks: &Blocks<'_>, block: usize, query: &Int8Query<'_>, row: usize) -> [f32; BLOCK] {
    let bytes = blocks.groups * 64;
    let sums = block_sums(&blocks.codes[block * bytes..(block + 1) * bytes], query.rows[row]);
    sums.map(|sum| (sum - query.corrections[row]) as f32)
}

fn block_scores(blocks: &Blocks<'_>, block: usize, query: &Int8Query<'_>) -> [f32; BLOCK] {
    scaled(blocks, block, query, [0, 1].map(|row| block_products(blocks, block, query, row)))
}

/// Combines one block's products with both rows of a query into scores.
fn scaled(blocks: &Blocks<'_>, block: usize, query: &Int8Query<'_>, [high, low]: [[f32; BLOCK]; 2]) -> [f32; BLOCK] {
    std::array::from_fn(|i| (high[i] * HIGH + low[i]) * blocks.scales[block * BLOCK + i] * query.scale)
}

/// Stages the items of one block, from the sums of its codes with both rows of a lane's query.
#[cfg(all(any(test, feature = "testing"), target_arch = "x86_64"))]
pub(super) fn stage_sums(blocks: &Blocks<'_>, block: usize, sums: &[[i32; BLOCK]; 2], lane: &mut Lane<'_>) {
    let products = [0, 1].map(|row| sums[row].map(|sum| (sum - lane.query.corrections[row]) as f32));
    let scores = scaled(blocks, block, &lane.query, products);
    let first = blocks.first_slot + (block * BLOCK) as u32;
    stage(&scores, items_of(blocks, block), first, lane.threshold, &mut lane.staging);
}

#[inline]
pub(super) fn stage(scores: &[f32], mask: u16, first_slot: u32, threshold: f32, staging: &mut Staging<'_>) {
    for (i, &score) in scores.iter().enumerate() {
        if mask >> i & 1 == 1 && score >= threshold {
            staging.scores[staging.len] = score;
            staging.slots[staging.len] = first_slot + i as u32;
            staging.len += 1;
        }
    }
}

pub(super) fn scan(
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
        let scores = block_scores(blocks, block, query);
        stage(&scores, items_of(blocks, block), blocks.first_slot + (block * BLOCK) as u32, threshold, staging);
    }
    count
}

pub(super) fn scan_many(blocks: &Blocks<'_>, lanes: &mut [Lane<'_>]) {
    for lane in lanes {
        scan(blocks, &lane.query, lane.threshold, 0, &mut lane.staging);
    }
}

pub(super) fn nearest4(blocks: &Blocks<'_>, penalties: &[f32], queries: &[Int8Query<'_>; 4]) -> [u32; 4] {
    queries.each_ref().map(|query| {
        let mut best = (f32::NEG_INFINITY, 0);
        for block in 0..blocks.items.div_ceil(BLOCK) {
            let first = block * BLOCK;
            let products = block_products(blocks, block, query, 0);
            for (item, product) in (first..blocks.items).zip(products) {
                let score = product * blocks.scales[item] * (query.scale * HIGH);
                if score - penalties[item] > best.0 {
                    best = (score - penalties[item], item as u32);
                }
            }
        }
        best.1
    })
}

pub(super) fn kth(values: &mut [f32], k: usize) -> f32 {
    *values.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1
}

pub(super) fn retain(scores: &mut [f32], slots: &mut [u32], threshold: f32) -> usize {
    let mut retained = 0;
    for n in 0..scores.len() {
        (scores[retained], slots[retained]) = (scores[n], slots[n]);
        retained += usize::from(scores[n] >= threshold);
    }
    retained
}

pub(super) fn keep(scores: &[f32], first_slot: u32, threshold: f32, from: usize, staging: &mut Staging<'_>) -> usize {
    let count = scores.len() / BLOCK;
    for block in from..count {
        if staging.len + BLOCK > staging.scores.len() {
            return block;
        }
        let first = block * BLOCK;
        stage(&scores[first..first + BLOCK], u16::MAX, first_slot + first as u32, threshold, staging);
    }
    count
}

/// Sums products in 16 lanes, as wider kernels do in one register.
fn lanes(len: usize, product: impl Fn(usize) -> f32) -> f32 {
    let mut sums = [0f32; BLOCK];
    let whole = len / BLOCK * BLOCK;
    for first in (0..whole).step_by(BLOCK) {
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum += product(first + i);
        }
    }
    sums.iter().sum::<f32>() + (whole..len).map(product).sum::<f32>()
}

pub(super) fn dot_f32(a: &[f32], b: &[f32]) -> f32 {
    lanes(a.len(), |i| a[i] * b[i])
}

pub(super) fn dot_bf16(a: &[f32], b: &[half::bf16]) -> f32 {
    lanes(a.len(), |i| a[i] * b[i].to_f32())
}

pub(super) fn dot_f16(a: &[f32], b: &[half::f16]) -> f32 {
    lanes(a.len(), |i| a[i] * b[i].to_f32())
}

pub(super) fn dots_f32(a: &[f32], rows: &[f32], slots: &[u32], out: &mut [f32]) {
    let row = |slot: u32| &rows[slot as usize * a.len()..(slot as usize + 1) * a.len()];
    out.iter_mut().zip(slots).for_each(|(out, &slot)| *out = dot_f32(a, row(slot)));
}

pub(super) fn dots_bf16(a: &[f32], rows: &[half::bf16], slots: &[u32], out: &mut [f32]) {
    let row = |slot: u32| &rows[slot as usize * a.len()..(slot as usize + 1) * a.len()];
    out.iter_mut().zip(slots).for_each(|(out, &slot)| *out = dot_bf16(a, row(slot)));
}

pub(super) fn dots_f16(a: &[f32], rows: &[half::f16], slots: &[u32], out: &mut [f32]) {
    let row = |slot: u32| &rows[slot as usize * a.len()..(slot as usize + 1) * a.len()];
    out.iter_mut().zip(slots).for_each(|(out, &slot)| *out = dot_f16(a, row(slot)));
}
