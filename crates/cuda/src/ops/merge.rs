//! Merges the candidates of a request's queries into one list.

use bytemuck::{Pod, Zeroable};

use super::top::{self, Best, Ties};
use super::{Shape, launch, need, parts, times};
use crate::driver::Demand;
use crate::memory::{Array, Device};
use sterling_core::error::{Error, Result};

/// Rule that selects the retained items and their scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundBy {
    /// Items of any query, with the largest weighted score.
    Any,
    /// Items of every query, with the sum of the weighted scores.
    All,
}

/// Returns the distinct items of the queries of each request, unsorted. Each row of `found` belongs to a query and has
/// distinct items; a request has as many queries as there are weights. `most` is the size of the result per request, at
/// least the number of distinct items.
///
/// # Errors
/// `Internal` for arrays that are too short, or if a launch fails; `Overloaded` if memory is exhausted.
pub fn merge(device: &Device, found: Best, by: FoundBy, weights: &Array<f32>, most: usize) -> Result<Best> {
    #[repr(C)]
    #[derive(Clone, Copy, Pod, Zeroable)]
    struct MergeArgs {
        slots: u64,
        keys: u64,
        counts: u64,
        weights: u64,
        slots_out: u64,
        keys_out: u64,
        counts_out: u64,
        queries: u32,
        stride: u32,
        stride_out: u32,
        needs_all: u32,
    }
    let (rows, queries, stride) = (found.counts.len(), weights.len(), found.stride);
    if queries == 0 || !rows.is_multiple_of(queries) {
        return Err(Error::internal(format!("got results of {rows} queries, expected a multiple of {queries}")));
    }
    need("slots", &found.slots, rows * stride)?;
    need("scores", &found.keys, rows * stride)?;
    // Sorts by slot for the lookup: slots are passed as scores, and the scores as slots, so that the sort moves both.
    let by_slot = Best { keys: found.slots, slots: found.keys, counts: found.counts, stride };
    let by_slot = top::sort(device, by_slot, &Ties::default())?;
    let requests = rows / queries;
    let merged = Best {
        keys: device.room(requests * most)?,
        slots: device.room(requests * most)?,
        counts: device.zeros(requests)?,
        stride: most,
    };
    let arguments = MergeArgs {
        slots: by_slot.keys.address(),
        keys: by_slot.slots.address(),
        counts: by_slot.counts.address(),
        weights: weights.address(),
        slots_out: merged.slots.address(),
        keys_out: merged.keys.address(),
        counts_out: merged.counts.address(),
        queries: queries as u32,
        stride: stride as u32,
        stride_out: most as u32,
        needs_all: u32::from(by == FoundBy::All),
    };
    let grid = [if stride == 0 { 0 } else { parts(device, stride, 256, rows) }, rows, 1];
    // Bytes that one binary search per other query reads; the rows are in the cache.
    let steps = stride.max(1).ilog2() as usize + 1;
    let again = times(&[rows, stride, queries - 1, steps, 4]);
    let demand = Demand { again, ..Demand::of_bytes(rows * stride * 8 + requests * most * 8) };
    launch(device, &Shape { kernel: "merge_queries", grid, threads: 256, shared_bytes: 0, demand }, &arguments)?;
    Ok(merged)
}
