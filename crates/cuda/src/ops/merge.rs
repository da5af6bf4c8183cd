//! What several queries of a request found, as one list.

use bytemuck::{Pod, Zeroable};

use super::top::{self, Best, Ties};
use super::{Shape, launch, need, parts, times};
use crate::driver::Demand;
use crate::memory::{Array, Device};
use sterling_core::error::{Error, Result};

/// Which items stay of those that queries found, and what their score is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundBy {
    /// Any query, with the largest weighted score.
    Any,
    /// Every query, with the sum of the weighted scores.
    All,
}

/// Each item once that the queries of a request found, in no order. Rows of `found` are those of queries, as many a request as there are
/// weights, each item at most once in a row; `most` is what is kept of a request, at least as many as there are.
///
/// # Errors
/// `Internal` for arrays that are too short, or where a launch fails; `Overloaded` where there is no more memory.
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
        return Err(Error::internal(format!("what {rows} queries found, expected a multiple of {queries}")));
    }
    need("slots", &found.slots, rows * stride)?;
    need("scores", &found.keys, rows * stride)?;
    // By slots, to look them up: they stand where scores do, and bring their scores along.
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
    // A search in the row of each other query, which comes from the caches.
    let steps = stride.max(1).ilog2() as usize + 1;
    let again = times(&[rows, stride, queries - 1, steps, 4]);
    let demand = Demand { again, ..Demand::of_bytes(rows * stride * 8 + requests * most * 8) };
    launch(device, &Shape { kernel: "merge_queries", grid, threads: 256, shared_bytes: 0, demand }, &arguments)?;
    Ok(merged)
}
