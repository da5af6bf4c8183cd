//! Int8 scans of lists: those of each query alone, and those that queries share on tensor cores.

mod centroids;
mod collection;

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::{Shape, address_of, launch, need, parts, times};
use crate::driver::{BLOCKS_PER_PROCESSOR, Demand};
use crate::memory::{Array, Device};
use sterling_core::error::{Error, Result};

pub use centroids::{Centroids, Further};
pub(super) use collection::CandidatesArgs;
pub use collection::{Collection, QueryHead, SearchResults};

/// Threads per block of the scans, and warps per block.
const THREADS: usize = 256;
const WARPS: usize = THREADS / 32;
/// Concurrent scan blocks per multiprocessor.
const AT_ONCE: usize = 3;
/// Number of lists that a block looks up together, and number of their words that a warp processes together.
const SPANS: usize = 256;
const WORDS_TOGETHER: usize = 32;
/// Number of candidates that a warp buffers before it writes them.
const FOUND_MAX: usize = 64;
/// Number of queries that tensor cores score together.
const TILE_QUERIES: usize = 16;

/// Blocked int8 rows of all lists.
#[derive(Debug)]
pub struct BlockLists {
    /// Codes, `[blocks, G, 16, 4]`; other lists may use the same array.
    pub codes: Arc<Array<u8>>,
    /// One scale per slot of these blocks.
    pub scales: Arc<Array<f32>>,
    /// Number of slots in these lists.
    pub slots: usize,
    /// First slot per list, `[lists + 1]`.
    pub offsets: Array<u32>,
    /// Number of items per list, `[lists]`.
    pub lengths: Array<u32>,
    /// Groups of 4 dimensions, G.
    pub groups: usize,
    /// Number of items in the longest list.
    pub longest: usize,
}

/// Lists that each query scans: query `q` scans `order[q, begins[q]..ends[q]]`.
#[derive(Clone, Copy, Debug)]
pub struct Order<'a> {
    /// Lists, best first, `[queries, stride]`.
    pub order: &'a Array<u32>,
    /// Index of the first list to scan, `[queries]`; `None` for 0.
    pub begins: Option<&'a Array<u32>>,
    /// Index after the last list to scan, `[queries]`.
    pub ends: &'a Array<u32>,
    /// Number of sorted lists per query.
    pub stride: usize,
    /// Maximum number of lists that a query scans.
    pub most: usize,
}

impl<'a> Order<'a> {
    /// Selects the first `counts[q]` lists of each query.
    pub fn first(order: &'a Array<u32>, counts: &'a Array<u32>, stride: usize) -> Self {
        Order { order, begins: None, ends: counts, stride, most: stride }
    }
}

/// Eligible items of each query.
#[derive(Debug)]
pub struct Eligible<'a> {
    /// Address of each query's filter bitmap, `[queries]`.
    pub words: &'a Array<u64>,
    /// First word of each list, `[lists + 1]`.
    pub firsts: &'a Array<u32>,
}

/// Live items, the same for every query.
#[derive(Clone, Copy, Debug)]
pub struct LiveItems<'a> {
    /// Live bitmap, one bit per item, list after list.
    pub words: &'a Array<u64>,
    /// First word of each list, `[lists + 1]`.
    pub firsts: &'a Array<u32>,
}

/// Returns the number of blocks per query, at most `most`, with which all blocks finish earliest.
fn even_parts(device: &Device, most: usize, queries: usize) -> usize {
    let at_once = (device.driver().blocks() / BLOCKS_PER_PROCESSOR).max(1) * AT_ONCE;
    let last = most.clamp(1, (at_once / queries.max(1)).max(4));
    let turns_by = |parts: &usize| (queries * parts).div_ceil(at_once);
    // The duration is proportional to rounds divided by blocks; cross-multiplication avoids the division.
    (1..=last).min_by(|a, b| (turns_by(a) * b).cmp(&(turns_by(b) * a))).unwrap_or(1)
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ListsArgs {
    codes: u64,
    scales: u64,
    offsets: u64,
    lengths: u64,
}

impl BlockLists {
    fn arguments(&self) -> ListsArgs {
        ListsArgs {
            codes: self.codes.address(),
            scales: self.scales.address(),
            offsets: self.offsets.address(),
            lengths: self.lengths.address(),
        }
    }

    /// Returns the number of lists, C.
    pub fn lists(&self) -> usize {
        self.lengths.len()
    }

    fn check(&self, to: &Collection) -> Result<()> {
        need("list offsets", &self.offsets, self.lists() + 1)?;
        need("codes", &self.codes, self.scales.len() / 16 * self.groups * 64)?;
        if to.groups != self.groups {
            return Err(Error::internal(format!(
                "queries have {} groups of dimensions, items have {}",
                to.groups, self.groups
            )));
        }
        Ok(())
    }

    /// Scans the lists of each query separately; with filter bitmaps, only the eligible items of these lists.
    ///
    /// # Errors
    /// As [`Collection::quantize`].
    pub fn scan(
        &self,
        device: &Device,
        to: &Collection,
        order: &Order<'_>,
        eligible: Option<&Eligible<'_>>,
    ) -> Result<()> {
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        struct ScanArgs {
            lists: ListsArgs,
            to: CandidatesArgs,
            order: u64,
            begins: u64,
            ends: u64,
            words: u64,
            firsts: u64,
            stride: u32,
            unused: u32,
        }
        self.check(to)?;
        need("lists of queries", order.order, to.queries * order.stride)?;
        need("list counts", order.ends, to.queries)?;
        if let Some(begins) = order.begins {
            need("first lists", begins, to.queries)?;
        }
        if let Some(eligible) = eligible {
            need("filter bitmaps of queries", eligible.words, to.queries)?;
            need("first bitmap words of lists", eligible.firsts, self.lists() + 1)?;
        }
        let words = order.most * self.mean_items().div_ceil(64);
        let grid = [even_parts(device, words.div_ceil(WARPS), to.queries), to.queries, 1];
        let arguments = ScanArgs {
            lists: self.arguments(),
            to: to.arguments(),
            order: order.order.address(),
            begins: address_of(order.begins),
            ends: order.ends.address(),
            words: eligible.map_or(0, |e| e.words.address()),
            firsts: eligible.map_or(0, |e| e.firsts.address()),
            stride: order.stride as u32,
            unused: 0,
        };
        let of_warp = 8 * 4 * WORDS_TOGETHER + 4 * (2 * FOUND_MAX + 1);
        let shared_bytes = 16 * (SPANS + 1) + WARPS * of_warp + 8 * self.groups;
        let items = to.queries * order.most * self.mean_items();
        let words = if eligible.is_some() { 8 * items.div_ceil(64) } else { 0 };
        let demand = Demand {
            dp4a: 2 * times(&[items, 4 * self.groups]),
            ..Demand::of_bytes(items * (4 * self.groups + 4) + words + to.kept_bytes(order.most * self.mean_items()))
        };
        launch(device, &Shape { kernel: "scan_lists", grid, threads: THREADS as u32, shared_bytes, demand }, &arguments)
    }

    /// Returns the number of items in the first lists of each query, `[queries]`.
    ///
    /// # Errors
    /// As [`Collection::quantize`].
    pub fn items(&self, device: &Device, order: &Order<'_>) -> Result<Array<u64>> {
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        struct SumArgs {
            order: u64,
            counts: u64,
            lengths: u64,
            items: u64,
            stride: u32,
            unused: u32,
        }
        let queries = order.ends.len();
        need("lists of queries", order.order, queries * order.stride)?;
        let items = device.room(queries)?;
        let arguments = SumArgs {
            order: order.order.address(),
            counts: order.ends.address(),
            lengths: self.lengths.address(),
            items: items.address(),
            stride: order.stride as u32,
            unused: 0,
        };
        let (grid, demand) = ([queries, 1, 1], Demand::of_bytes(queries * (8 * order.most + 8)));
        launch(device, &Shape { kernel: "sum_lengths", grid, threads: 256, shared_bytes: 8, demand }, &arguments)?;
        Ok(items)
    }

    /// Scans the first lists of each query on tensor cores, each list once for all queries that probe it; with a live
    /// bitmap, only the live items.
    ///
    /// # Errors
    /// As [`Collection::quantize`].
    pub fn scan_shared(
        &self,
        device: &Device,
        to: &Collection,
        order: &Order<'_>,
        live: Option<&LiveItems<'_>>,
    ) -> Result<()> {
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        struct SharedScanArgs {
            lists: ListsArgs,
            to: CandidatesArgs,
            starts: u64,
            askers: u64,
            words: u64,
            firsts: u64,
            list_count: u32,
            unused: u32,
        }
        self.check(to)?;
        if let Some(live) = live {
            need("first bitmap words of lists", live.firsts, self.lists() + 1)?;
        }
        let (starts, askers) = self.invert(device, to, order)?;
        let arguments = SharedScanArgs {
            lists: self.arguments(),
            to: to.arguments(),
            starts: starts.address(),
            askers: askers.address(),
            words: live.map_or(0, |live| live.words.address()),
            firsts: live.map_or(0, |live| live.firsts.address()),
            list_count: self.lists() as u32,
            unused: 0,
        };
        let shape = Shape {
            kernel: "scan_shared",
            grid: [parts(device, self.lists(), 1, 1), 1, 1],
            threads: THREADS as u32,
            shared_bytes: self.shared_scan_bytes(),
            demand: self.shared_demand(to, order),
        };
        launch(device, &shape, &arguments)
    }

    /// Returns the shared memory per block of [`BlockLists::scan_shared`], which holds the codes of a tile of queries.
    fn shared_scan_bytes(&self) -> usize {
        let row_words = self.groups.next_multiple_of(8) + 4;
        4 * TILE_QUERIES * 2 * row_words
    }

    /// Returns whether a block of the device has enough shared memory for [`BlockLists::scan_shared`]; if not,
    /// [`BlockLists::scan`] gives the same results.
    pub fn can_scan_shared(&self, device: &Device) -> bool {
        self.shared_scan_bytes() <= device.driver().shared_bytes_max()
    }

    /// Returns the mean number of slots per list, including padding.
    fn mean_items(&self) -> usize {
        self.slots.div_ceil(self.lists().max(1))
    }

    /// Estimates the demand of a shared scan, assuming evenly probed lists.
    fn shared_demand(&self, to: &Collection, order: &Order<'_>) -> Demand {
        let probes = to.queries * order.most;
        let lists = probes.min(self.lists());
        // Total number of query tiles of all probed lists.
        let tiles = lists * probes.div_ceil(lists.max(1)).div_ceil(TILE_QUERIES);
        let list_bytes = self.mean_items() * (4 * self.groups + 4);
        Demand {
            again: times(&[tiles - lists, list_bytes]),
            tensor_int8: 2 * times(&[tiles, TILE_QUERIES, self.mean_items(), 4 * self.groups.next_multiple_of(8)]),
            ..Demand::of_bytes(lists * list_bytes + to.kept_bytes(order.most * self.mean_items()))
        }
    }

    /// Inverts the order of lists: returns the offsets of each list's queries, and the queries.
    fn invert(&self, device: &Device, to: &Collection, order: &Order<'_>) -> Result<(Array<u32>, Array<u32>)> {
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        struct InvertArgs {
            order: u64,
            counts: u64,
            starts: u64,
            filled: u64,
            askers: u64,
            queries: u32,
            stride: u32,
            lists: u32,
            unused: u32,
        }
        need("lists of queries", order.order, to.queries * order.stride)?;
        need("list counts", order.ends, to.queries)?;
        let starts = device.zeros(self.lists() + 1)?;
        let filled = device.zeros::<u32>(self.lists())?;
        let askers = device.room(to.queries * order.stride)?;
        let arguments = InvertArgs {
            order: order.order.address(),
            counts: order.ends.address(),
            starts: starts.address(),
            filled: filled.address(),
            askers: askers.address(),
            queries: to.queries as u32,
            stride: order.stride as u32,
            lists: self.lists() as u32,
            unused: 0,
        };
        let demand = Demand::of_bytes(4 * (2 * to.queries * order.most + 2 * self.lists()));
        let shape = |kernel, blocks, threads, shared_bytes| {
            let grid = [blocks, 1, 1];
            Shape { kernel, grid, threads, shared_bytes, demand }
        };
        launch(device, &shape("count_askers", to.queries, 256, 0), &arguments)?;
        launch(device, &shape("start_askers", 1, 1024, 4 * 32), &arguments)?;
        launch(device, &shape("place_askers", to.queries, 256, 0), &arguments)?;
        Ok((starts, askers))
    }
}
