//! Index in GPU memory: the stored blocks unchanged, because kernels read the same layout.

use std::sync::Arc;

use bytemuck::{Pod, cast_slice};

use super::check_interval::CheckInterval;
use super::ood::OodProbing;
use super::probing::Probing;
use super::termination::ResidualQuantiles;
use super::view::{Index, WideRows};
use sterling_core::error::{Error, Result};
use sterling_cuda::ops::rows::{ItemRows, RowKind};
use sterling_cuda::ops::scan::{BlockLists, Centroids, Collection, Eligible, Further, LiveItems, Order, SearchResults};
use sterling_cuda::ops::termination::{ProbedLists, RunningSearches, Schedule, TerminationCriteria};
use sterling_cuda::ops::top::{self, Best, Scored, Ties};
use sterling_cuda::partition::{ListCut, Share};
use sterling_cuda::{Array, Device};
use sterling_kernels::buffer::Buffer;
use sterling_kernels::cpu::kernels::BLOCK;

/// Codes, scales, centroids and rescoring rows in GPU memory.
#[derive(Debug)]
pub struct DeviceIndex {
    /// Inverted lists.
    pub lists: BlockLists,
    /// Centroids of the lists.
    pub centroids: Centroids,
    wide: Option<Array<u8>>,
    kind: RowKind,
    dimension: usize,
    norm_max: f32,
    /// Lengths of the lists over all GPUs, if this GPU holds only a partition of the items.
    all_lengths: Option<Array<u32>>,
    /// Prefix sums of the list lengths on this GPU, longest first, `[C + 1]`.
    longest: Vec<usize>,
    /// Prefix sums of the list lengths over all GPUs, shortest first, `[C + 1]`.
    shortest: Vec<usize>,
}

/// Returns the rescoring rows as bytes, with their format; `None` if int8 codes are the most precise.
fn wide_rows(index: &Index) -> (Option<&[u8]>, RowKind) {
    fn bytes<T: Pod>(rows: &Buffer<T>) -> Option<&[u8]> {
        Some(cast_slice(rows))
    }
    match index.rows() {
        WideRows::None => (None, RowKind::Codes),
        WideRows::Bf16(rows) => (bytes(rows), RowKind::Bf16),
        WideRows::F16(rows) => (bytes(rows), RowKind::F16),
        WideRows::F32(rows) => (bytes(rows), RowKind::F32),
    }
}

/// Returns the size of a row in bytes.
fn row_bytes(rows: &[u8], index: &Index) -> usize {
    rows.len() / index.slots().max(1)
}

fn sums(lengths: impl Iterator<Item = u32>) -> Vec<usize> {
    let sums = lengths.scan(0, |sum, n| {
        *sum += n as usize;
        Some(*sum)
    });
    std::iter::once(0).chain(sums).collect()
}

impl DeviceIndex {
    /// Copies this GPU's partition of an index, with room for `spare` more slots (a multiple of a block). Centroids are on
    /// every GPU.
    ///
    /// # Errors
    /// `Overloaded` if the device has not enough memory.
    pub fn copy(device: &Device, index: &Index, cut: &ListCut, spare: usize) -> Result<Self> {
        let (centroid_codes, centroid_scales) = index.centroid_blocks();
        let groups = index.dimension().div_ceil(4);
        let (rows, kind) = wide_rows(index);
        let wide = rows.map(|rows| cut.copy(device, rows, row_bytes(rows, index), spare)).transpose()?;
        let sorted = |lengths: &[u32]| {
            let mut lengths = lengths.to_vec();
            lengths.sort_unstable();
            lengths
        };
        let (here, all) = (sorted(cut.lengths()), sorted(index.list_lengths()));
        let is_whole = cut.lengths() == index.list_lengths();
        let penalties = index.penalties();
        let mut copied = DeviceIndex {
            lists: BlockLists {
                codes: Arc::new(cut.copy(device, index.codes(), groups * 4, spare)?),
                scales: Arc::new(cut.copy(device, index.scales(), 1, spare)?),
                slots: cut.slots(),
                offsets: device.copy(cut.offsets())?,
                lengths: device.copy(cut.lengths())?,
                groups,
                longest: here.last().map_or(0, |&n| n as usize),
            },
            centroids: Centroids {
                codes: device.copy(centroid_codes)?,
                scales: device.copy(centroid_scales)?,
                penalties: (!penalties.is_empty()).then(|| device.copy(penalties)).transpose()?,
                lists: index.lists(),
            },
            wide,
            kind,
            dimension: index.dimension(),
            norm_max: 0.0,
            all_lengths: (!is_whole).then(|| device.copy(index.list_lengths())).transpose()?,
            longest: sums(here.iter().rev().copied()),
            shortest: sums(all.iter().copied()),
        };
        copied.norm_max = copied.rows().largest_norm(device, &copied.lists.codes, cut.slots())?;
        Ok(copied)
    }

    /// Returns the most precise rows of the index.
    pub fn rows(&self) -> ItemRows<'_> {
        ItemRows {
            bytes: self.wide.as_ref().unwrap_or(&self.lists.codes),
            scales: &self.lists.scales,
            kind: self.kind,
            dimension: self.dimension,
        }
    }

    /// Returns true if rows wider than the codes are present.
    pub fn has_wide_rows(&self) -> bool {
        self.wide.is_some()
    }

    /// Returns the dimension of a vector, D.
    pub fn dimension(&self) -> usize {
        self.dimension
    }

    /// Returns the largest norm of an item, which the quantization of queries uses.
    pub fn norm_max(&self) -> f32 {
        self.norm_max
    }

    /// Sets the largest norm over all GPUs, if this GPU holds a partition of the items.
    pub fn set_norm_max(&mut self, norm_max: f32) {
        self.norm_max = norm_max;
    }

    /// Copies this GPU's partition of another index into the spare slots from `first` on, a multiple of a block.
    /// Returns the location of the copied items: in lists like those of this index, or in lists that only the other
    /// index has.
    ///
    /// # Errors
    /// `Internal` for an index with other row formats or without enough slots; `Unavailable` if the GPU does not answer.
    pub fn put(&self, device: &Device, (other, cut): (&Index, &ListCut), first: u32) -> Result<SegmentItems> {
        let (of, at, groups) = (&self.lists, first as usize, self.lists.groups);
        let (rows, kind) = wide_rows(other);
        if kind != self.kind || other.dimension() != self.dimension || !at.is_multiple_of(BLOCK) {
            let what = format!("{kind:?} rows of {} numbers at slot {first}", other.dimension());
            return Err(Error::internal(format!(
                "{what}, expected {:?} rows of {} numbers at the first slot of a block",
                self.kind, self.dimension
            )));
        }
        cut.write(&of.codes, other.codes(), groups * 4, at)?;
        cut.write(&of.scales, other.scales(), 1, at)?;
        if let (Some(wide), Some(rows)) = (&self.wide, rows) {
            cut.write(wide, rows, row_bytes(rows, other), at)?;
        }
        let offsets: Vec<u32> = cut.offsets().iter().map(|offset| offset + first).collect();
        let lengths = cut.lengths();
        let probed = if other.shared_lists() == of.lists() { of.lists() } else { 0 };
        let longest = lengths.iter().copied().max().unwrap_or(0) as usize;
        let scanned = lengths[probed..].iter().map(|&length| length as usize).sum();
        let mut sorted = lengths[..probed].to_vec();
        sorted.sort_unstable_by_key(|&length| std::cmp::Reverse(length));
        Ok(SegmentItems {
            lists: BlockLists {
                codes: of.codes.clone(),
                scales: of.scales.clone(),
                slots: cut.slots(),
                offsets: device.copy(&offsets)?,
                lengths: device.copy(lengths)?,
                groups,
                longest,
            },
            probed,
            longest: sums(sorted.into_iter()),
            scanned,
        })
    }

    /// Returns the maximum number of items of `lists` lists on this GPU.
    pub fn items_at_most(&self, lists: usize) -> usize {
        self.longest[lists.min(self.longest.len() - 1)]
    }

    /// Returns the minimum number of items of `lists` lists over all GPUs.
    pub fn items_at_least(&self, lists: usize) -> usize {
        self.shortest[lists.min(self.shortest.len() - 1)]
    }

    /// Selects the best lists of each query, `wanted[q]` of them, unsorted. Also returns the sortable scores of all lists.
    ///
    /// # Errors
    /// `Internal` if a kernel launch fails; `Overloaded` if the device has not enough memory.
    pub fn best_lists(&self, device: &Device, queries: &Collection, wanted: &[u32]) -> Result<(Best, Array<u32>)> {
        let keys = self.list_keys(device, queries)?;
        let most = wanted.iter().copied().max().unwrap_or(0) as usize;
        let best = self.select_lists(device, &keys, &device.copy(wanted)?, most)?;
        Ok((best, keys))
    }

    /// Selects the lists of unfiltered searches, unsorted: `probes[q]` of them, or as many as `ood[q]` says for a query
    /// that is out of distribution.
    ///
    /// # Errors
    /// As [`DeviceIndex::best_lists`].
    pub fn probed_lists(
        &self,
        device: &Device,
        queries: &Collection,
        probes: &[u32],
        ood: &[Option<OodProbing>],
    ) -> Result<Best> {
        let keys = self.list_keys(device, queries)?;
        let wanted = device.copy(probes)?;
        let lists = self.centroids.lists as u32;
        let further = |(&probes, ood): (&u32, &Option<OodProbing>)| match ood {
            Some(ood) => Further { probes: probes.max(ood.probes as u32).min(lists), reach: ood.reach },
            None => Further { probes, reach: 0.0 },
        };
        let further: Vec<Further> = probes.iter().zip(ood).map(further).collect();
        if ood.iter().any(Option::is_some) {
            self.centroids.probe_further(device, queries, (&keys, &device.copy(&further)?), &wanted)?;
        }
        let most = further.iter().map(|further| further.probes).max().unwrap_or(0) as usize;
        self.select_lists(device, &keys, &wanted, most)
    }

    /// Returns the sortable scores of all lists.
    fn list_keys(&self, device: &Device, queries: &Collection) -> Result<Array<u32>> {
        let keys = device.room(queries.queries() * self.centroids.lists)?;
        self.centroids.score(device, queries, &keys)?;
        Ok(keys)
    }

    fn select_lists(&self, device: &Device, keys: &Array<u32>, wanted: &Array<u32>, most: usize) -> Result<Best> {
        let scored = Scored { keys, slots: None, counts: None, stride: self.centroids.lists };
        top::select(device, &scored, &Ties::default(), wanted, most)
    }

    /// Scans the eligible items of the best lists of each query until the termination criterion of the CPU holds,
    /// checked at the device's intervals; then scans the lists that every query scans in addition. Returns the lists
    /// that each query scanned, and their items per segment.
    ///
    /// # Errors
    /// As [`DeviceIndex::best_lists`].
    pub fn scan_until(
        &self,
        device: &Device,
        to: &Collection,
        vectors: &Array<f32>,
        parts: &EligibleParts<'_>,
        (searches, pace): (&[FilteredSearch<'_>], CheckInterval),
    ) -> Result<(Array<u32>, Vec<Array<u64>>)> {
        let until = self.begin_until(device, to, (searches, pace))?;
        for round in 0..until.rounds() {
            self.scan_round(device, to, (&until, round), parts)?;
            self.look(device, (&until, round), vectors, &to.kept())?;
        }
        let beside = self.end_until(device, to, &until, parts)?;
        let RunningSearches { ends, items, .. } = until.looks;
        Ok((ends, std::iter::once(items).chain(beside).collect()))
    }

    /// Starts [`DeviceIndex::scan_until`]. GPUs that hold partitions of the items run this search together, round by
    /// round.
    ///
    /// # Errors
    /// As [`DeviceIndex::best_lists`].
    pub fn begin_until(
        &self,
        device: &Device,
        to: &Collection,
        (searches, pace): (&[FilteredSearch<'_>], CheckInterval),
    ) -> Result<FilteredSearches> {
        let lists = self.lists.lists();
        let items = self.shortest.last().copied().unwrap_or(0);
        let most: Vec<u32> = searches.iter().map(|s| s.probing.within(lists).probes_max as u32).collect();
        let (order, keys) = self.best_lists(device, to, &most)?;
        let order = top::sort(device, order, &Ties::default())?;
        let margins = searches.iter().find_map(|s| s.probing.ending).map(|ending| ending.margins);
        let slope = margins.map_or(1.0, ResidualQuantiles::slope);
        let margins = device.copy(margins.map_or(&[][..], ResidualQuantiles::halvings))?;
        let schedules: Vec<Schedule> = searches.iter().map(|s| s.schedule(lists, items, pace)).collect();
        Ok(FilteredSearches { order, keys, margins, slope, looks: RunningSearches::new(device, &schedules)? })
    }

    /// Scans this GPU's partition of the lists of a round.
    ///
    /// # Errors
    /// As [`DeviceIndex::best_lists`].
    pub fn scan_round(
        &self,
        device: &Device,
        to: &Collection,
        (until, round): (&FilteredSearches, usize),
        parts: &EligibleParts<'_>,
    ) -> Result<()> {
        let next = until.round(round);
        self.lists.scan(device, to, &next, Some(&parts.main))?;
        for (beside, eligible) in parts.beside.iter().filter(|(beside, _)| beside.probed > 0) {
            beside.lists.scan(device, to, &next, Some(eligible))?;
        }
        Ok(())
    }

    /// Runs the termination check of the searches on the results of all GPUs.
    ///
    /// # Errors
    /// As [`RunningSearches::look`].
    pub fn look(
        &self,
        device: &Device,
        (until, round): (&FilteredSearches, usize),
        vectors: &Array<f32>,
        kept: &SearchResults<'_>,
    ) -> Result<()> {
        let of = ProbedLists {
            keys: &until.keys,
            order: &until.order.slots,
            stride: until.order.stride,
            lengths: self.all_lengths.as_ref().unwrap_or(&self.lists.lengths),
            vectors,
            margins: &until.margins,
            slope: until.slope,
        };
        until.looks.look(device, round, kept, &of)
    }

    /// Scans the lists that every query scans. Returns the items of the scanned lists per query, for the segments of the delta.
    ///
    /// # Errors
    /// As [`DeviceIndex::best_lists`].
    pub fn end_until(
        &self,
        device: &Device,
        to: &Collection,
        until: &FilteredSearches,
        parts: &EligibleParts<'_>,
    ) -> Result<Vec<Array<u64>>> {
        let FilteredSearches { order, looks, .. } = until;
        let scanned = Order::first(&order.slots, &looks.ends, order.stride);
        let mut items = Vec::new();
        for (beside, eligible) in &parts.beside {
            if beside.probed > 0 {
                items.push(beside.lists.items(device, &scanned)?);
            }
            if beside.has_own_lists() {
                items.push(beside.scan_own(device, to, |lists, order| lists.scan(device, to, order, Some(eligible)))?);
            }
        }
        Ok(items)
    }

    /// Scans the best lists of each query (`order`) and the lists that every query scans. With `shared`, lists are
    /// scanned once for all queries if a thread block has enough shared memory. Returns the items of the lists per
    /// segment.
    ///
    /// # Errors
    /// As [`DeviceIndex::best_lists`].
    pub fn scan_best(
        &self,
        device: &Device,
        to: &Collection,
        order: &Order<'_>,
        (parts, shared): (&LiveParts<'_>, bool),
    ) -> Result<Vec<Array<u64>>> {
        let scan = |lists: &BlockLists, live: Option<&LiveItems<'_>>| {
            if shared && lists.can_scan_shared(device) {
                lists.scan_shared(device, to, order, live)?;
            } else {
                scan_live(device, lists, to, (order, live))?;
            }
            lists.items(device, order)
        };
        let mut items = vec![scan(&self.lists, parts.main.as_ref())?];
        for (beside, live) in &parts.beside {
            if beside.probed > 0 {
                items.push(scan(&beside.lists, live.as_ref())?);
            }
            if beside.has_own_lists() {
                let scan = |lists: &BlockLists, order: &Order<'_>| scan_live(device, lists, to, (order, live.as_ref()));
                items.push(beside.scan_own(device, to, scan)?);
            }
        }
        Ok(items)
    }

    /// Returns the device memory in bytes.
    pub fn bytes(&self) -> usize {
        let centroids = self.centroids.codes.bytes() + self.centroids.scales.bytes();
        let lists = self.lists.codes.bytes() + self.lists.scales.bytes() + self.lists.offsets.bytes();
        lists + self.lists.lengths.bytes() + centroids + self.wide.as_ref().map_or(0, Array::bytes)
    }
}

/// Scans the live items of the lists of each query separately.
fn scan_live(
    device: &Device,
    lists: &BlockLists,
    to: &Collection,
    (order, live): (&Order<'_>, Option<&LiveItems<'_>>),
) -> Result<()> {
    let Some(live) = live else { return lists.scan(device, to, order, None) };
    let words = device.copy(&vec![live.words.address(); to.queries()])?;
    lists.scan(device, to, order, Some(&Eligible { words: &words, firsts: live.firsts }))
}

/// Filtered searches in progress.
#[derive(Debug)]
pub struct FilteredSearches {
    order: Best,
    keys: Array<u32>,
    margins: Array<f32>,
    slope: f32,
    /// State of the termination checks, the same on all GPUs.
    pub looks: RunningSearches,
}

impl FilteredSearches {
    /// Returns the maximum number of rounds.
    pub fn rounds(&self) -> usize {
        self.looks.rounds().len()
    }

    /// Returns the maximum number of lists that a search scans.
    pub fn most_lists(&self) -> usize {
        self.order.stride
    }

    /// Returns the lists to scan in a round.
    pub fn round(&self, round: usize) -> Order<'_> {
        let FilteredSearches { order, looks, .. } = self;
        let (begins, most) = (Some(&looks.begins), looks.rounds()[round]);
        Order { order: &order.slots, begins, ends: &looks.ends, stride: order.stride, most }
    }
}

impl Index {
    /// Returns the partition of the lists that belongs to one GPU.
    pub fn cut(&self, share: Share) -> ListCut {
        ListCut::of(share, self.list_offsets(), self.list_lengths())
    }
}

/// Items of a delta segment, in slots after those of the index.
#[derive(Debug)]
pub struct SegmentItems {
    /// Inverted lists of the segment.
    pub lists: BlockLists,
    /// Number of leading lists that correspond to those of the index and are scanned with them: all of them or none. Every search
    /// scans the other lists, because selecting among them would take a GPU longer.
    probed: usize,
    /// Prefix sums of the lengths of probed lists, longest first.
    longest: Vec<usize>,
    /// Number of items in the lists that every search scans.
    scanned: usize,
}

impl SegmentItems {
    /// Returns the maximum number of items that a search of `lists` lists scans.
    pub fn items_at_most(&self, lists: usize) -> usize {
        self.longest[lists.min(self.longest.len() - 1)] + self.scanned
    }

    fn has_own_lists(&self) -> bool {
        self.probed < self.lists.lists()
    }

    /// Calls `scan` for the lists that every search scans. Returns the number of scanned delta items per query.
    fn scan_own(
        &self,
        device: &Device,
        to: &Collection,
        scan: impl FnOnce(&BlockLists, &Order<'_>) -> Result<()>,
    ) -> Result<Array<u64>> {
        let order: Vec<u32> = (self.probed as u32..self.lists.lists() as u32).collect();
        let (queries, lists) = (to.queries(), order.len());
        let (order, counts) = (device.copy(&order.repeat(queries))?, device.copy(&vec![lists as u32; queries])?);
        let order = Order::first(&order, &counts, lists);
        scan(&self.lists, &order)?;
        self.lists.items(device, &order)
    }
}

/// Eligible items of an index and its delta, per query.
#[derive(Debug)]
pub struct EligibleParts<'a> {
    /// Eligible items of the index itself.
    pub main: Eligible<'a>,
    /// Eligible items of each delta segment.
    pub beside: Vec<(&'a SegmentItems, Eligible<'a>)>,
}

/// Live items of an index and its delta, the same for every query; `None` if all are live.
#[derive(Debug)]
pub struct LiveParts<'a> {
    /// Live items of the index itself.
    pub main: Option<LiveItems<'a>>,
    /// Live items of each delta segment.
    pub beside: Vec<(&'a SegmentItems, Option<LiveItems<'a>>)>,
}

/// Filtered search on a GPU. All searches with a termination criterion share the same quantiles.
#[derive(Clone, Copy, Debug)]
pub struct FilteredSearch<'a> {
    /// Number of lists to probe, and when to stop.
    pub probing: Probing<'a>,
    /// Minimum number of passing items before the search may stop.
    pub enough: usize,
    /// A number of lists, and the number of passing items with which a search may stop after these lists, regardless
    /// of the estimate.
    pub suffices: Option<(usize, usize)>,
}

impl FilteredSearch<'_> {
    fn schedule(&self, lists: usize, items: usize, pace: CheckInterval) -> Schedule {
        let probing = self.probing.within(lists);
        let most = probing.probes_max;
        let mut looks: Vec<usize> = Vec::new();
        if probing.takes_all(lists) {
            looks.push(lists);
        } else {
            for look in probing.looks(lists, pace) {
                looks.push(look);
                if look >= most {
                    break;
                }
            }
        }
        let (suffices_at, suffices) = self.suffices.unwrap_or_default();
        if let Err(place) = looks.binary_search(&suffices_at)
            && (1..most).contains(&suffices_at)
        {
            looks.insert(place, suffices_at);
        }
        let chunk = |n: usize| looks[n] - n.checked_sub(1).map_or(0, |before| looks[before]);
        let gain = |n| match probing.ending {
            Some(ending) => ending.gain_max(self.enough) as f64,
            None => probing.gain_min(self.enough, chunk(n)),
        };
        let gains = (0..looks.len()).map(gain).collect();
        let judged = TerminationCriteria {
            passing: probing.pass_rate * items as f64,
            left: probing.ending.map_or(0.0, |ending| ending.left) * self.enough as f64,
            enough: self.enough as u32,
            found: probing.ending.map_or(self.enough, |ending| ending.found(self.enough)) as u32,
            is_gain: u32::from(probing.ending.is_none()),
            suffices: suffices as u32,
            suffices_at: suffices_at as u32,
            least: probing.least as u32,
        };
        Schedule { judged, looks: looks.iter().map(|&look| look.min(most) as u32).collect(), gains }
    }
}
