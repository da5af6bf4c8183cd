//! Scores of inverted lists for quantized queries, and the number of probes for queries out of distribution.

use bytemuck::{Pod, Zeroable};

use super::super::{Shape, address_of, launch, need, parts, times};
use super::{Collection, QueryHead, THREADS};
use crate::driver::Demand;
use crate::memory::{Array, Device};
use sterling_core::error::Result;

/// Number of lists to probe for a query that is out of distribution, that is, whose best centroid scores less than
/// `reach` times the query's length.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Further {
    /// Number of lists.
    pub probes: u32,
    /// Limit on the best centroid score divided by the query length; below it, the query is out of distribution.
    pub reach: f32,
}

/// Centroids of an index as blocks, one list per slot.
#[derive(Debug)]
pub struct Centroids {
    /// Codes, `[ceil(lists / 16), G, 16, 4]`.
    pub codes: Array<u8>,
    /// Scale of each list, `[lists]`; up to 16 more may follow.
    pub scales: Array<f32>,
    /// Penalty that is subtracted from each list's score, `[lists]`.
    pub penalties: Option<Array<f32>>,
    /// Number of lists, C.
    pub lists: usize,
}

impl Centroids {
    /// Sets `probes[q]` to `further[q].probes` for each query that is out of distribution. `keys` are the ordered keys
    /// of all list scores, `[queries, lists]`.
    ///
    /// # Errors
    /// As [`Collection::quantize`].
    pub fn probe_further(
        &self,
        device: &Device,
        queries: &Collection,
        (keys, further): (&Array<u32>, &Array<Further>),
        probes: &Array<u32>,
    ) -> Result<()> {
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        struct FurtherArgs {
            keys: u64,
            rows: u64,
            heads: u64,
            further: u64,
            probes: u64,
            lists: u32,
            groups: u32,
        }
        let count = queries.queries;
        need("list scores", keys, count * self.lists)?;
        need("probe counts for queries out of distribution", further, count)?;
        need("list counts", probes, count)?;
        let arguments = FurtherArgs {
            keys: keys.address(),
            rows: queries.codes.address(),
            heads: queries.heads.address(),
            further: further.address(),
            probes: probes.address(),
            lists: self.lists as u32,
            groups: queries.groups as u32,
        };
        let demand = Demand::of_bytes(count * (4 * (self.lists + queries.groups) + size_of::<QueryHead>() + 16));
        let shape = Shape { kernel: "probe_further", grid: [count, 1, 1], threads: 128, shared_bytes: 0, demand };
        launch(device, &shape, &arguments)
    }

    /// Writes the ordered keys of all list scores for every query, `[queries, lists]`.
    ///
    /// # Errors
    /// As [`Collection::quantize`].
    pub fn score(&self, device: &Device, queries: &Collection, keys: &Array<u32>) -> Result<()> {
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        struct CentroidArgs {
            codes: u64,
            scales: u64,
            penalties: u64,
            rows: u64,
            heads: u64,
            keys: u64,
            lists: u32,
            groups: u32,
        }
        let (count, blocks) = (queries.queries, self.lists.div_ceil(16));
        need("list scores", keys, count * self.lists)?;
        need("centroid codes", &self.codes, blocks * queries.groups * 64)?;
        need("centroid scales", &self.scales, self.lists)?;
        if let Some(penalties) = &self.penalties {
            need("penalties", penalties, self.lists)?;
        }
        let arguments = CentroidArgs {
            codes: self.codes.address(),
            scales: self.scales.address(),
            penalties: address_of(self.penalties.as_ref()),
            rows: queries.codes.address(),
            heads: queries.heads.address(),
            keys: keys.address(),
            lists: self.lists as u32,
            groups: queries.groups as u32,
        };
        let grid = [parts(device, blocks, THREADS / 32, count), count, 1];
        let codes = blocks * queries.groups * 64;
        let demand = Demand {
            again: times(&[count.saturating_sub(1), codes]),
            dp4a: 2 * times(&[count, codes]),
            ..Demand::of_bytes(codes + 4 * self.lists * (1 + count))
        };
        let (threads, shared_bytes) = (THREADS as u32, 8 * queries.groups);
        launch(device, &Shape { kernel: "score_lists", grid, threads, shared_bytes, demand }, &arguments)
    }
}
