//! Queries that are searched together, and the candidates that their scans collect.

use bytemuck::{Pod, Zeroable};

use super::super::{Shape, launch, need};
use crate::driver::Demand;
use crate::memory::{Array, Device};
use sterling_core::error::{Error, Result};

/// Number of score bins that determine the running threshold.
const BINS: usize = 2048;

/// Scale and corrections of a query, in the kernels' layout.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct QueryHead {
    /// Value of one unit of the query's low-order int8 row.
    pub scale: f32,
    /// 128 times the sum of the high-order codes, and of the low-order codes.
    pub corrections: [i32; 2],
    bins_per_score: f32,
}

/// Queries that are searched together, and the candidates that they collect.
#[derive(Debug)]
pub struct Collection {
    pub(super) queries: usize,
    room: usize,
    pub(super) groups: usize,
    raise_every: u32,
    /// Codes of the queries, `[queries, 2, G]` words.
    pub codes: Array<u32>,
    /// Scale and corrections of each query, `[queries]`.
    pub heads: Array<QueryHead>,
    /// Ordered keys of candidates, `[queries, room]`.
    pub keys: Array<u32>,
    /// Slots of the candidates, `[queries, room]`.
    pub slots: Array<u32>,
    /// Number of candidates, `[queries]`.
    pub counts: Array<u32>,
    /// Number of candidates to select, `[queries]`.
    pub wanted: Array<u32>,
    /// Number of scored items, `[queries]`.
    pub survivors: Array<u32>,
    histogram: Array<u32>,
    bars: Array<u32>,
    excluded: Array<u32>,
    excluded_starts: Array<u32>,
}

/// Candidates of searches so far: all collected ones, including the best, and the number of scored items.
#[derive(Clone, Copy, Debug)]
pub struct SearchResults<'a> {
    /// Ordered keys of candidates, `[queries, room]`, in the order in which they were collected.
    pub keys: &'a Array<u32>,
    /// Number of candidates, `[queries]`.
    pub counts: &'a Array<u32>,
    /// Number of scored items, `[queries]`.
    pub survivors: &'a Array<u32>,
    /// Maximum number of candidates per query.
    pub room: usize,
    /// Estimated maximum bytes of all ordered keys.
    pub bytes: usize,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(in crate::ops) struct CandidatesArgs {
    rows: u64,
    heads: u64,
    keys: u64,
    slots: u64,
    counts: u64,
    histogram: u64,
    bars: u64,
    wanted: u64,
    excluded: u64,
    excluded_starts: u64,
    survivors: u64,
    room: u32,
    groups: u32,
    raise_every: u32,
    unused: u32,
}

impl Collection {
    /// Allocates room for `room` candidates per query, of which `wanted[q]` will be selected. `excluded[q]` are the
    /// ascending slots that never become candidates of query `q`.
    ///
    /// # Errors
    /// As [`Device::copy`].
    pub fn new(
        device: &Device,
        dimension: usize,
        room: usize,
        wanted: &[u32],
        excluded: &[&[u32]],
    ) -> Result<Collection> {
        let (queries, groups) = (wanted.len(), dimension.div_ceil(4));
        if excluded.len() != queries || room > u32::MAX as usize {
            return Err(Error::internal(format!(
                "got {} lists of excluded slots for {queries} queries, and room for {room} candidates; expected one \
                 list per query, and room for fewer than 2^32 candidates",
                excluded.len()
            )));
        }
        let mut starts = vec![0u32];
        starts.extend(excluded.iter().scan(0, |end, slots| {
            *end += slots.len() as u32;
            Some(*end)
        }));
        // If few candidates are wanted, a threshold soon pays off; raising it costs about as much as storing a hundred
        // candidates.
        let raise_every = wanted.iter().copied().max().unwrap_or(0).max(512);
        Ok(Collection {
            queries,
            room,
            groups,
            raise_every,
            codes: device.room(queries * 2 * groups)?,
            heads: device.room(queries)?,
            keys: device.room(queries * room)?,
            slots: device.room(queries * room)?,
            counts: device.zeros(queries)?,
            wanted: device.copy(wanted)?,
            survivors: device.zeros(queries)?,
            histogram: device.zeros(queries * BINS)?,
            bars: device.zeros(queries)?,
            excluded: device.copy(&excluded.concat())?,
            excluded_starts: device.copy(&starts)?,
        })
    }

    /// Returns the number of queries.
    pub fn queries(&self) -> usize {
        self.queries
    }

    /// Returns the maximum number of candidates per query.
    pub fn room(&self) -> usize {
        self.room
    }

    /// Estimates the bytes of candidates that are written if each query scans `items` items in random order: the n-th
    /// item is stored with the probability that it is among the best `wanted` of the first n items.
    pub(super) fn kept_bytes(&self, items: usize) -> usize {
        let (items, wanted) = (items.max(1) as f64, self.raise_every as f64);
        let kept = if items > wanted { wanted * (1.0 + (items / wanted).ln()) } else { items };
        8 * self.queries * kept as usize
    }

    /// Returns the candidates so far, for a termination check.
    pub fn kept(&self) -> SearchResults<'_> {
        let Collection { keys, counts, survivors, room, .. } = self;
        SearchResults { keys, counts, survivors, room: *room, bytes: self.kept_bytes(*room) / 2 }
    }

    /// Returns the bytes per query of a collection, excluding candidates.
    pub fn bytes_per_query(dimension: usize) -> usize {
        BINS * 4 + dimension.div_ceil(4) * 8 + 64
    }

    pub(in crate::ops) fn arguments(&self) -> CandidatesArgs {
        CandidatesArgs {
            rows: self.codes.address(),
            heads: self.heads.address(),
            keys: self.keys.address(),
            slots: self.slots.address(),
            counts: self.counts.address(),
            histogram: self.histogram.address(),
            bars: self.bars.address(),
            wanted: self.wanted.address(),
            excluded: self.excluded.address(),
            excluded_starts: self.excluded_starts.address(),
            survivors: self.survivors.address(),
            room: self.room as u32,
            groups: self.groups as u32,
            raise_every: self.raise_every,
            unused: 0,
        }
    }

    /// Quantizes the queries, `[queries, dimension]`. `norm_max` is the largest norm of an item.
    ///
    /// # Errors
    /// `Internal` for arrays that are too short, or if the launch fails.
    pub fn quantize(&self, device: &Device, vectors: &Array<f32>, dimension: usize, norm_max: f32) -> Result<()> {
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        struct QuantizeArgs {
            vectors: u64,
            rows: u64,
            heads: u64,
            dimension: u32,
            groups: u32,
            norm_max: f32,
            unused: u32,
        }
        need("vectors", vectors, self.queries * dimension)?;
        need("codes of queries", &self.codes, self.queries * 2 * dimension.div_ceil(4))?;
        let arguments = QuantizeArgs {
            vectors: vectors.address(),
            rows: self.codes.address(),
            heads: self.heads.address(),
            dimension: dimension as u32,
            groups: self.groups as u32,
            norm_max,
            unused: 0,
        };
        let demand = Demand::of_bytes(self.queries * (4 * dimension + 8 * self.groups + size_of::<QueryHead>()));
        let grid = [self.queries, 1, 1];
        let shape = Shape { kernel: "quantize_queries", grid, threads: 128, shared_bytes: 0, demand };
        launch(device, &shape, &arguments)
    }
}
