//! Occurrences of rows in a batch, sorted by row.

use bytemuck::{Pod, Zeroable};

use super::layout::{LearningBatch, LearningLayout, THREADS};
use super::masters::MasterArgs;
use crate::driver::Demand;
use crate::memory::{Array, Device};
use crate::ops::{Shape, address_of, launch, parts};
use sterling_core::error::Result;

/// Number of pairs that a block sorts, and the block's shared memory: counts per warp and digit, and a number per warp.
const TILE: usize = 2048;
const TILE_WARPS: usize = 8;
const DIGIT_BITS: u32 = 8;
const SORT_BYTES: usize = 4 * (TILE_WARPS * (1 << DIGIT_BITS) + TILE_WARPS);

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct SlotAt {
    values: u64,
    factor: f32,
    unused: u32,
}

/// Occurrences of a batch, sorted by row.
pub(super) struct Pairs {
    pub(super) keys: Array<u32>,
    pub(super) values: Array<u32>,
    pub(super) slot_of: Option<Array<u32>>,
    pub(super) slots: Array<SlotAt>,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct SortArgs {
    keys: u64,
    values: u64,
    keys_out: u64,
    values_out: u64,
    counts: u64,
    totals: u64,
    count: u32,
    tiles: u32,
    shift: u32,
    bits: u32,
}

impl Pairs {
    pub(super) fn new(
        device: &Device,
        layout: &LearningLayout,
        masters: &Array<MasterArgs>,
        batch: &LearningBatch,
    ) -> Result<Self> {
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        struct PairArgs {
            features: u64,
            masters: u64,
            rows: u64,
            offsets: u64,
            keys: u64,
            values: u64,
            slot_of: u64,
            slots: u64,
            feature_count: u32,
            slot_count: u32,
            count: u32,
            no_key: u32,
        }
        let (count, slots) = (batch.learning_ids, batch.learning_slots);
        let mut pairs = Pairs {
            keys: device.room(count)?,
            values: device.room(count)?,
            slot_of: batch.weights.as_ref().map(|_| device.room(count)).transpose()?,
            slots: device.room(slots)?,
        };
        let arguments = PairArgs {
            features: batch.features.address(),
            masters: masters.address(),
            rows: batch.rows.address(),
            offsets: batch.offsets.address(),
            keys: pairs.keys.address(),
            values: pairs.values.address(),
            slot_of: address_of(pairs.slot_of.as_ref()),
            slots: pairs.slots.address(),
            feature_count: batch.learning_features as u32,
            slot_count: slots as u32,
            count: count as u32,
            no_key: layout.rows(),
        };
        let run = |kernel, things: usize, bytes| {
            let blocks = if things == 0 { 0 } else { parts(device, things, THREADS, 1) };
            let (grid, demand) = ([blocks, 1, 1], Demand::of_bytes(things * bytes));
            launch(device, &Shape { kernel, grid, threads: THREADS as u32, shared_bytes: 0, demand }, &arguments)
        };
        run("describe_slots", slots, 20)?;
        run("make_pairs", count, 12)?;
        pairs.sort(device, u32::BITS - layout.rows().leading_zeros())?;
        Ok(pairs)
    }

    /// Sorts by the lowest `bits` bits of the keys, digit by digit, with a stable sort per digit.
    fn sort(&mut self, device: &Device, bits: u32) -> Result<()> {
        let (count, tiles, passes) = (self.keys.len(), self.keys.len().div_ceil(TILE), bits.div_ceil(DIGIT_BITS));
        // All digits have equally many bits.
        let digit_bits = bits.div_ceil(passes.max(1));
        let digits = 1usize << digit_bits;
        let (mut keys_out, mut values_out): (Array<u32>, Array<u32>) = (device.room(count)?, device.room(count)?);
        let (counts, totals): (Array<u32>, Array<u32>) = (device.room(digits * tiles)?, device.room(digits)?);
        for pass in 0..passes {
            let arguments = SortArgs {
                keys: self.keys.address(),
                values: self.values.address(),
                keys_out: keys_out.address(),
                values_out: values_out.address(),
                counts: counts.address(),
                totals: totals.address(),
                count: count as u32,
                tiles: tiles as u32,
                shift: pass * digit_bits,
                bits: digit_bits,
            };
            let counters = 4 * digits * tiles;
            run_tiles(device, "count_tile", tiles, Demand::of_bytes(4 * count + counters), &arguments)?;
            sum_tiles(device, if tiles == 0 { 0 } else { digits }, tiles, &arguments)?;
            run_tiles(device, "sort_tile", tiles, Demand::of_bytes(16 * count + counters), &arguments)?;
            std::mem::swap(&mut self.keys, &mut keys_out);
            std::mem::swap(&mut self.values, &mut values_out);
        }
        Ok(())
    }
}

/// Launches a kernel with one block per tile.
fn run_tiles<A: Pod>(device: &Device, kernel: &'static str, tiles: usize, demand: Demand, arguments: &A) -> Result<()> {
    let (grid, threads) = ([tiles, 1, 1], THREADS as u32);
    launch(device, &Shape { kernel, grid, threads, shared_bytes: SORT_BYTES, demand }, arguments)
}

/// Converts the counts of tiles into prefix sums per digit, and computes the total per digit.
fn sum_tiles(device: &Device, digits: usize, tiles: usize, arguments: &SortArgs) -> Result<()> {
    let (grid, demand) = ([digits, 1, 1], Demand::of_bytes(8 * digits * tiles));
    let shared_bytes = 4 * TILE_WARPS;
    launch(device, &Shape { kernel: "sum_tiles", grid, threads: THREADS as u32, shared_bytes, demand }, arguments)
}

/// First occurrences of the distinct rows, and the number of distinct rows.
pub(super) struct Heads {
    pub(super) starts: Array<u32>,
    pub(super) total: Array<u32>,
}

impl Heads {
    pub(super) fn new(device: &Device, pairs: &Pairs, no_key: u32) -> Result<Self> {
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        struct HeadArgs {
            keys: u64,
            counts: u64,
            total: u64,
            starts: u64,
            count: u32,
            no_key: u32,
        }
        let count = pairs.keys.len();
        let tiles = count.div_ceil(TILE);
        let heads = Heads { starts: device.room(count + 1)?, total: device.zeros(1)? };
        let counts: Array<u32> = device.room(tiles)?;
        let arguments = HeadArgs {
            keys: pairs.keys.address(),
            counts: counts.address(),
            total: heads.total.address(),
            starts: heads.starts.address(),
            count: count as u32,
            no_key,
        };
        run_tiles(device, "count_heads", tiles, Demand::of_bytes(4 * count), &arguments)?;
        let of_tiles = SortArgs {
            counts: counts.address(),
            totals: heads.total.address(),
            tiles: tiles as u32,
            ..SortArgs::zeroed()
        };
        sum_tiles(device, tiles.min(1), tiles, &of_tiles)?;
        run_tiles(device, "place_heads", tiles, Demand::of_bytes(8 * count), &arguments)?;
        Ok(heads)
    }
}
