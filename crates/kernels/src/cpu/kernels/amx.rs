//! Scans for four queries at once by AMX tiles: each step multiplies their eight rows (two per query) by the 16 items
//! of a block, 16 groups of 4 dimensions deep.
//!
//! AVX-512 serves the first four queries of a list, because its sequential reads wait less for memory. Tiles are faster if the
//! list is still cached after that (at most `NEAR_BYTES`), so they serve the further groups of four queries of such lists.
//!
//! The groups of a block are already stored in the layout of a right factor. If the number of groups is no multiple of 16, the
//! last step starts earlier, with zeros in the queries for groups that are already added, so that all steps have the same depth.
//! Sums are exact in any order.

use std::arch::x86_64::*;

use super::avx512;
use super::operands::{BLOCK, Blocks, Lane, items_of};
#[cfg(any(test, feature = "testing"))]
use super::portable;
use crate::cpu::amx::{Instructions, ROW_BYTES, Shape, TILES, Tiles};

/// Queries per tile. Tiles of 8 rows take little more than half the time of 16 rows for the same items.
const QUERIES: usize = 4;
const ROWS: usize = 2 * QUERIES;
/// Maximum number of groups per step.
const STEP: usize = ROW_BYTES / 4;
/// Number of steps whose query rows stay in tiles.
const KEPT: usize = 4;
/// Bytes of a list that are still cached at the second read: half of the L2 cache of processors with tiles.
const NEAR_BYTES: usize = 1 << 20;

/// Sums of a block, one row for each row of the queries.
type Sums = [[i32; BLOCK]; ROWS];

/// Sums of up to two blocks in progress.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Pair([Sums; 2]);

thread_local! {
    /// Query rows in the order of the steps, `[steps, ROWS, 64]` bytes, per thread.
    static QUERY_ROWS: std::cell::RefCell<Vec<u8>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// # Safety
/// Needs AMX with permission, AVX-512 F, BW and VNNI, and POPCNT; the thread uses no tiles. Lengths are checked by the caller.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,popcnt")]
pub(super) unsafe fn scan_many(blocks: &Blocks<'_>, lanes: &mut [Lane<'_>]) {
    let far = if blocks.codes.len() <= NEAR_BYTES { QUERIES.min(lanes.len()) } else { lanes.len() };
    let (first, lanes) = lanes.split_at_mut(far);
    // SAFETY: this function's `# Safety` conditions hold.
    unsafe { avx512::scan_many(blocks, first) };
    let (fours, rest) = lanes.as_chunks_mut::<QUERIES>();
    if !fours.is_empty() {
        // SAFETY: this function's `# Safety` conditions hold.
        let mut tiles = unsafe { Instructions::new() };
        scan_fours(&mut tiles, blocks, fours, |block, sums, lanes| {
            // SAFETY: this function's `# Safety` conditions hold; scales cover complete blocks, and each staging has room for
            // all blocks.
            unsafe {
                let scales = _mm512_loadu_ps(blocks.scales.as_ptr().add(block * BLOCK));
                let (mask, first) = (items_of(blocks, block), blocks.first_slot + (block * BLOCK) as u32);
                for (sums, lane) in sums.as_chunks::<2>().0.iter().zip(lanes) {
                    let [high, low] = [0, 1].map(|row| _mm512_loadu_si512(sums[row].as_ptr().cast()));
                    let scores = avx512::scaled(high, low, &lane.query, scales);
                    avx512::stage(scores, mask, first, _mm512_set1_ps(lane.threshold), &mut lane.staging);
                }
            }
        });
    }
    // SAFETY: this function's `# Safety` conditions hold.
    unsafe { avx512::scan_many(blocks, rest) };
}

/// Runs [`scan_many`] on emulated tiles.
#[cfg(any(test, feature = "testing"))]
pub(super) fn scan_many_emulated<T: Tiles>(tiles: &mut T, blocks: &Blocks<'_>, lanes: &mut [Lane<'_>]) {
    let (fours, rest) = lanes.as_chunks_mut::<QUERIES>();
    if !fours.is_empty() {
        scan_fours(tiles, blocks, fours, |block, sums, lanes| {
            let rows = sums.as_chunks::<2>().0.iter();
            rows.zip(lanes).for_each(|(sums, lane)| portable::stage_sums(blocks, block, sums, lane));
        });
    }
    portable::scan_many(blocks, rest);
}

/// Calls `done` with the sums of each block for each group of four queries.
#[inline(always)]
fn scan_fours<'a, T: Tiles>(
    tiles: &mut T,
    blocks: &Blocks<'_>,
    fours: &mut [[Lane<'a>; QUERIES]],
    done: impl Fn(usize, &Sums, &mut [Lane<'a>; QUERIES]),
) {
    let depth = blocks.groups.min(STEP);
    let sums = Shape { rows: ROWS, row_bytes: ROW_BYTES };
    let items = Shape { rows: depth, row_bytes: ROW_BYTES };
    let queries = Shape { rows: ROWS, row_bytes: depth * 4 };
    let shapes: [Shape; TILES] = [sums, sums, items, items, queries, queries, queries, queries];
    tiles.configure(&shapes);
    // The buffer is taken, not borrowed in a closure: a closure would be compiled without the target features of its caller.
    let mut rows = QUERY_ROWS.take();
    for four in fours {
        copy_queries(four, blocks.groups, &mut rows);
        scan_four(tiles, blocks, &rows, |block, sums| done(block, sums, four));
    }
    QUERY_ROWS.set(rows);
}

/// Returns the first group of dimensions of a step; the last step overlaps the one before.
#[inline(always)]
fn first_group(step: usize, groups: usize) -> usize {
    (step * STEP).min(groups.saturating_sub(STEP))
}

/// Copies the rows of the queries in the order of the steps.
#[inline(always)]
fn copy_queries(lanes: &[Lane<'_>; QUERIES], groups: usize, to: &mut Vec<u8>) {
    to.clear();
    to.resize(groups.div_ceil(STEP) * ROWS * ROW_BYTES, 0);
    for (step, to) in to.chunks_exact_mut(ROWS * ROW_BYTES).enumerate() {
        let (fresh, first) = (step * STEP * 4, first_group(step, groups) * 4);
        let end = groups.min((step + 1) * STEP) * 4;
        for (n, to) in to.chunks_exact_mut(ROW_BYTES).enumerate() {
            let row = &lanes[n / 2].query.rows[n % 2][fresh..end];
            to[fresh - first..end - first].copy_from_slice(bytemuck::cast_slice(row));
        }
    }
}

/// Calls `done` with the sums of each block for the queries whose rows are `queries`.
#[inline(always)]
fn scan_four<T: Tiles>(tiles: &mut T, blocks: &Blocks<'_>, queries: &[u8], mut done: impl FnMut(usize, &Sums)) {
    let count = blocks.items.div_ceil(BLOCK);
    let steps = blocks.groups.div_ceil(STEP);
    for step in 0..steps.min(KEPT) {
        load_query(tiles, queries, step);
    }
    let mut pairs = [Pair([[[0; BLOCK]; ROWS]; 2]); 2];
    for block in (0..count).step_by(2) {
        let [sums, before] = &mut pairs;
        let is_pair = block + 1 < count;
        add_blocks(tiles, blocks, queries, (block, is_pair));
        tiles.store::<0>(bytemuck::cast_slice_mut(&mut sums.0[0]), ROW_BYTES);
        if is_pair {
            tiles.store::<1>(bytemuck::cast_slice_mut(&mut sums.0[1]), ROW_BYTES);
        }
        // The sums of the two earlier blocks arrive while the sums of these two blocks are computed.
        if block > 0 {
            done(block - 2, &before.0[0]);
            done(block - 1, &before.0[1]);
        }
        pairs.swap(0, 1);
    }
    let last = count.saturating_sub(1) / 2 * 2;
    (last..count).for_each(|block| done(block, &pairs[1].0[block - last]));
}

#[inline(always)]
fn load_query<T: Tiles>(tiles: &mut T, queries: &[u8], step: usize) {
    let from = &queries[step * ROWS * ROW_BYTES..];
    match step {
        0 => tiles.load::<4>(from, ROW_BYTES),
        1 => tiles.load::<5>(from, ROW_BYTES),
        2 => tiles.load::<6>(from, ROW_BYTES),
        _ => tiles.load::<7>(from, ROW_BYTES),
    }
}

/// Computes the sums of one or two blocks in tiles 0 and 1.
#[inline(always)]
fn add_blocks<T: Tiles>(tiles: &mut T, blocks: &Blocks<'_>, queries: &[u8], (block, is_pair): (usize, bool)) {
    let bytes = blocks.groups * 64;
    let (first, second) = blocks.codes[block * bytes..].split_at(bytes);
    let steps = blocks.groups.div_ceil(STEP);
    tiles.zero::<0>();
    tiles.zero::<1>();
    for step in 0..steps {
        let from = first_group(step, blocks.groups) * 64;
        if steps > KEPT && step + 1 >= KEPT {
            load_query(tiles, queries, step);
        }
        tiles.load::<2>(&first[from..], 64);
        match step {
            0 => tiles.add_bytes::<0, 4, 2>(),
            1 => tiles.add_bytes::<0, 5, 2>(),
            2 => tiles.add_bytes::<0, 6, 2>(),
            _ => tiles.add_bytes::<0, 7, 2>(),
        }
        if is_pair {
            tiles.load::<3>(&second[from..], 64);
            match step {
                0 => tiles.add_bytes::<1, 4, 3>(),
                1 => tiles.add_bytes::<1, 5, 3>(),
                2 => tiles.add_bytes::<1, 6, 3>(),
                _ => tiles.add_bytes::<1, 7, 3>(),
            }
        }
    }
}
