//! Exact selection of the K best of many scored items.

use bytemuck::{Pod, Zeroable};

use super::{Shape, address_of, launch, need, parts, times};
use crate::driver::Demand;
use crate::memory::{Array, Device};
use sterling_core::error::Result;

const DIGITS: usize = 1 << 11;
/// Words of shared memory for the digit search of the K-th largest key.
pub(super) const DESCENT_WORDS: usize = DIGITS + 36;
/// Maximum items per row for which one block selects; and maximum capacity of such a row if the count is unknown, since
/// score thresholds leave most of the capacity unused.
const ALONE_MAX: usize = 1 << 16;
const ALONE_ROOM_MAX: usize = 1 << 19;
/// Number of items per block if several blocks select from a row.
const SHARE: usize = 1 << 14;
/// Number of items that a block sorts in shared memory.
const RUN: usize = 1024;

/// Rounds a size up to a multiple of an eighth of a power of two, so that requests of similar size cause the same
/// launches.
pub fn bucket(count: usize) -> usize {
    count.next_multiple_of((count.next_power_of_two() / 8).max(8))
}

/// Scored items of several rows.
#[derive(Clone, Copy, Debug)]
pub struct Scored<'a> {
    /// Ordered keys, `[rows, stride]`.
    pub keys: &'a Array<u32>,
    /// Slots of the items; `None` if an item's index is its slot.
    pub slots: Option<&'a Array<u32>>,
    /// Number of items per row; `None` if all rows have `stride` items.
    pub counts: Option<&'a Array<u32>>,
    /// Maximum number of items per row.
    pub stride: usize,
}

/// Order of items with equal scores: lowest id first.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ties<'a> {
    /// Id of each slot; `None` if the slot is the id.
    pub ids: Option<&'a Array<i64>>,
    /// Mapping of slots of row `r` to slots in `ids`, `map[r, slot]`, and the row stride of the mapping.
    pub map: Option<(&'a Array<u32>, usize)>,
}

/// Best items of each row.
#[derive(Debug)]
pub struct Best {
    /// Ordered keys, `[rows, stride]`.
    pub keys: Array<u32>,
    /// Slots, `[rows, stride]`.
    pub slots: Array<u32>,
    /// Number of items, `[rows]`.
    pub counts: Array<u32>,
    /// Row stride, at least the largest number of items selected for any row.
    pub stride: usize,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct TopArgs {
    keys: u64,
    slots: u64,
    counts: u64,
    wanted: u64,
    ids: u64,
    map: u64,
    keys_out: u64,
    slots_out: u64,
    counts_out: u64,
    ties: u64,
    count: u32,
    stride: u32,
    stride_out: u32,
    map_stride: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct SortArgs {
    of: TopArgs,
    keys: u64,
    slots: u64,
    run: u32,
    unused: u32,
}

/// Selects the `wanted[r]` best items of each row `r`, at most `most`, in no particular order.
///
/// # Errors
/// `Internal` for arrays that are too short, or if a launch fails; `Overloaded` if memory is exhausted.
pub fn select(device: &Device, from: &Scored<'_>, ties: &Ties<'_>, wanted: &Array<u32>, most: usize) -> Result<Best> {
    let alone = if from.counts.is_some() { ALONE_ROOM_MAX } else { ALONE_MAX };
    let blocks = if from.stride <= alone { 1 } else { parts(device, from.stride, SHARE, wanted.len()) };
    select_by(device, blocks, from, ties, (wanted, most))
}

/// As [`select`], with a given number of blocks per row.
///
/// # Errors
/// As [`select`].
pub fn select_by(
    device: &Device,
    blocks: usize,
    from: &Scored<'_>,
    ties: &Ties<'_>,
    (wanted, most): (&Array<u32>, usize),
) -> Result<Best> {
    let (rows, most) = (wanted.len(), bucket(most));
    need("scores", from.keys, rows * from.stride)?;
    if let Some(slots) = from.slots {
        need("slots", slots, rows * from.stride)?;
    }
    if let Some(counts) = from.counts {
        need("counts", counts, rows)?;
    }
    let best = Best {
        keys: device.room(rows * most)?,
        slots: device.room(rows * most)?,
        counts: device.room(rows)?,
        stride: most,
    };
    let tied = device.room::<u32>(rows * from.stride)?;
    let arguments = TopArgs {
        keys: from.keys.address(),
        slots: address_of(from.slots),
        counts: address_of(from.counts),
        wanted: wanted.address(),
        ids: address_of(ties.ids),
        map: address_of(ties.map.map(|(map, _)| map)),
        keys_out: best.keys.address(),
        slots_out: best.slots.address(),
        counts_out: best.counts.address(),
        ties: tied.address(),
        count: from.stride as u32,
        stride: from.stride as u32,
        stride_out: most as u32,
        map_stride: ties.map.map_or(0, |(_, stride)| stride as u32),
    };
    if blocks == 1 {
        let shared_bytes = 4 * (DESCENT_WORDS + 2);
        // Three reads of the keys find the K-th largest one, and one read of keys and slots collects the items.
        let demand =
            Demand { again: times(&[rows, from.stride, 8]), ..Demand::of_bytes(rows * (from.stride * 12 + most * 8)) };
        let grid = [rows, 1, 1];
        launch(device, &Shape { kernel: "select_top", grid, threads: 1024, shared_bytes, demand }, &arguments)?;
    } else {
        select_together(device, arguments, rows, blocks)?;
    }
    Ok(best)
}

/// Selects with several blocks per row: one launch per digit of the K-th largest key, and one that collects all items
/// above this key.
fn select_together(device: &Device, of: TopArgs, rows: usize, blocks: usize) -> Result<()> {
    #[repr(C)]
    #[derive(Clone, Copy, Pod, Zeroable)]
    struct ManyArgs {
        of: TopArgs,
        descents: u64,
        shift: i32,
        unused: u32,
    }
    let descents = device.zeros::<u32>(rows * (DIGITS + 8))?;
    let shared_bytes = 4 * (DESCENT_WORDS + 1);
    for (kernel, shift) in [("narrow_keys", 21), ("narrow_keys", 10), ("narrow_keys", -1), ("take_best", 0)] {
        let arguments = ManyArgs { of, descents: descents.address(), shift, unused: 0 };
        let each = if kernel == "take_best" { 8 } else { 4 };
        let demand = Demand::of_bytes(rows * (of.stride as usize * each + 4 * DIGITS));
        launch(device, &Shape { kernel, grid: [blocks, rows, 1], threads: 512, shared_bytes, demand }, &arguments)?;
    }
    Ok(())
}

/// Sorts the items of each row, best first.
///
/// # Errors
/// As [`select`].
pub fn sort(device: &Device, best: Best, ties: &Ties<'_>) -> Result<Best> {
    let (rows, stride) = (best.counts.len(), best.stride);
    let mut from = best;
    let mut to =
        Best { keys: device.room(rows * stride)?, slots: device.room(rows * stride)?, counts: device.room(0)?, stride };
    let mut run = 0;
    // The first round sorts groups of [`RUN`] items; each further round merges pairs of sorted groups.
    while run < stride.max(1) {
        let of = TopArgs {
            ids: address_of(ties.ids),
            map: address_of(ties.map.map(|(map, _)| map)),
            keys_out: from.keys.address(),
            slots_out: from.slots.address(),
            counts_out: from.counts.address(),
            stride_out: stride as u32,
            map_stride: ties.map.map_or(0, |(_, stride)| stride as u32),
            ..TopArgs::zeroed()
        };
        let arguments = SortArgs { of, keys: to.keys.address(), slots: to.slots.address(), run: run as u32, unused: 0 };
        let demand = Demand::of_bytes(rows * stride * 16);
        let shape = match run {
            0 => Shape {
                kernel: "sort_runs",
                grid: [stride.div_ceil(RUN), rows, 1],
                threads: 1024,
                shared_bytes: 8 * RUN,
                demand,
            },
            _ => Shape {
                kernel: "merge_runs",
                grid: [parts(device, stride, 256, rows), rows, 1],
                threads: 256,
                shared_bytes: 0,
                demand,
            },
        };
        launch(device, &shape, &arguments)?;
        std::mem::swap(&mut from.keys, &mut to.keys);
        std::mem::swap(&mut from.slots, &mut to.slots);
        run = if run == 0 { RUN } else { run * 2 };
    }
    Ok(from)
}
