//! An index in the memory of a device: the stored blocks as they are, which is the layout that its kernels read.

use std::sync::Arc;

use bytemuck::{Pod, cast_slice};

use super::ahead::Margins;
use super::pace::Pace;
use super::probing::Probing;
use super::view::{Index, WideRows};
use sterling_core::error::{Error, Result};
use sterling_cuda::cut::{ListCut, Share};
use sterling_cuda::ops::looks::{Judged, Lookout, Looks, Schedule};
use sterling_cuda::ops::rows::{ItemRows, RowKind};
use sterling_cuda::ops::scan::{BlockLists, Centroids, Collection, Eligible, Kept, LiveItems, Order};
use sterling_cuda::ops::top::{self, Best, Scored, Ties};
use sterling_cuda::{Array, Device};
use sterling_kernels::buffer::Buffer;
use sterling_kernels::cpu::kernels::BLOCK;

/// Codes, scales, centroids and wide rows in the memory of a device.
#[derive(Debug)]
pub struct DeviceIndex {
    /// The lists.
    pub lists: BlockLists,
    /// Their centroids.
    pub centroids: Centroids,
    wide: Option<Array<u8>>,
    kind: RowKind,
    dimension: usize,
    norm_max: f32,
    /// The items of each list on all cards, where this one has a part of them alone.
    all_lengths: Option<Array<u32>>,
    /// Items here of the so many lists that have most of them, `[C + 1]`.
    longest: Vec<usize>,
    /// Items on all cards of the so many shortest lists, `[C + 1]`.
    shortest: Vec<usize>,
}

/// The rows as bytes, with their kind; none where codes are the widest.
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

/// Bytes of a row.
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
    /// Copies what a card has of an index, with room for `spare` slots more, whole blocks, behind it. Centroids are on every card.
    ///
    /// # Errors
    /// `Overloaded` where the device has not enough memory.
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

    /// The widest rows that are kept.
    pub fn rows(&self) -> ItemRows<'_> {
        ItemRows {
            bytes: self.wide.as_ref().unwrap_or(&self.lists.codes),
            scales: &self.lists.scales,
            kind: self.kind,
            dimension: self.dimension,
        }
    }

    /// Whether rows wider than the codes are kept.
    pub fn has_wide_rows(&self) -> bool {
        self.wide.is_some()
    }

    /// Width of a vector, D.
    pub fn dimension(&self) -> usize {
        self.dimension
    }

    /// The largest norm of an item, by which the codes of queries are made.
    pub fn norm_max(&self) -> f32 {
        self.norm_max
    }

    /// The same on all cards, where this one has a part of the items.
    pub fn set_norm_max(&mut self, norm_max: f32) {
        self.norm_max = norm_max;
    }

    /// Puts what a card has of another index in the place of spare slots from `first` on, a multiple of a block, and tells where that
    /// lies: in lists like those of this one, or in lists of its own.
    ///
    /// # Errors
    /// `Internal` for an index of other rows, or where the slots are not there; `Unavailable` where the card does not answer.
    pub fn put(&self, device: &Device, (other, cut): (&Index, &ListCut), first: u32) -> Result<BesideLists> {
        let (of, at, groups) = (&self.lists, first as usize, self.lists.groups);
        let (rows, kind) = wide_rows(other);
        if kind != self.kind || other.dimension() != self.dimension || !at.is_multiple_of(BLOCK) {
            let what = format!("{kind:?} rows of {} numbers at slot {first}", other.dimension());
            return Err(Error::internal(format!("{what}, expected {:?} of {} at a block", self.kind, self.dimension)));
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
        Ok(BesideLists {
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

    /// Items here that so many lists hold at most.
    pub fn items_at_most(&self, lists: usize) -> usize {
        self.longest[lists.min(self.longest.len() - 1)]
    }

    /// Items on all cards that so many lists hold at least.
    pub fn items_at_least(&self, lists: usize) -> usize {
        self.shortest[lists.min(self.shortest.len() - 1)]
    }

    /// The lists of each query by their scores: `wanted[q]` of them, in no order, and the ordered scores of all.
    ///
    /// # Errors
    /// `Internal` where a launch fails; `Overloaded` where the device has not enough memory.
    pub fn best_lists(&self, device: &Device, queries: &Collection, wanted: &[u32]) -> Result<(Best, Array<u32>)> {
        let lists = self.centroids.lists;
        let keys = device.room(queries.queries() * lists)?;
        self.centroids.score(device, queries, &keys)?;
        let most = wanted.iter().copied().max().unwrap_or(0) as usize;
        let scored = Scored { keys: &keys, slots: None, counts: None, stride: lists };
        let best = top::select(device, &scored, &Ties::default(), &device.copy(wanted)?, most)?;
        Ok((best, keys))
    }

    /// Scans the eligible items of the best lists of each query, until its search ends by the rule of the CPU's: as far as a
    /// device asks as often; then those of lists that are not probed. Returns how many lists each query scanned, and the items of
    /// these in each part.
    ///
    /// # Errors
    /// As [`DeviceIndex::best_lists`].
    pub fn scan_until(
        &self,
        device: &Device,
        to: &Collection,
        vectors: &Array<f32>,
        parts: &EligibleParts<'_>,
        (searches, pace): (&[FilteredSearch<'_>], Pace),
    ) -> Result<(Array<u32>, Vec<Array<u64>>)> {
        let until = self.begin_until(device, to, (searches, pace))?;
        for round in 0..until.rounds() {
            self.scan_round(device, to, (&until, round), parts)?;
            self.look(device, (&until, round), vectors, &to.kept())?;
        }
        let beside = self.end_until(device, to, &until, parts)?;
        let Looks { ends, items, .. } = until.looks;
        Ok((ends, std::iter::once(items).chain(beside).collect()))
    }

    /// The beginning of [`DeviceIndex::scan_until`], which cards that have a part of the items each go through a round at a time.
    ///
    /// # Errors
    /// As [`DeviceIndex::best_lists`].
    pub fn begin_until(
        &self,
        device: &Device,
        to: &Collection,
        (searches, pace): (&[FilteredSearch<'_>], Pace),
    ) -> Result<Until> {
        let lists = self.lists.lists();
        let items = self.shortest.last().copied().unwrap_or(0);
        let most: Vec<u32> = searches.iter().map(|s| s.probing.within(lists).probes_max as u32).collect();
        let (order, keys) = self.best_lists(device, to, &most)?;
        let order = top::sort(device, order, &Ties::default())?;
        let margins = searches.iter().find_map(|s| s.probing.ending).map(|ending| ending.margins);
        let slope = margins.map_or(1.0, Margins::slope);
        let margins = device.copy(margins.map_or(&[][..], Margins::halvings))?;
        let schedules: Vec<Schedule> = searches.iter().map(|s| s.schedule(lists, items, pace)).collect();
        Ok(Until { order, keys, margins, slope, looks: Looks::new(device, &schedules)? })
    }

    /// Scans what the card has of the lists of a round.
    ///
    /// # Errors
    /// As [`DeviceIndex::best_lists`].
    pub fn scan_round(
        &self,
        device: &Device,
        to: &Collection,
        (until, round): (&Until, usize),
        parts: &EligibleParts<'_>,
    ) -> Result<()> {
        let next = until.round(round);
        self.lists.scan(device, to, &next, Some(&parts.main))?;
        for (beside, eligible) in parts.beside.iter().filter(|(beside, _)| beside.probed > 0) {
            beside.lists.scan(device, to, &next, Some(eligible))?;
        }
        Ok(())
    }

    /// Looks whether searches go on, given what all cards have found.
    ///
    /// # Errors
    /// As [`Looks::look`].
    pub fn look(
        &self,
        device: &Device,
        (until, round): (&Until, usize),
        vectors: &Array<f32>,
        kept: &Kept<'_>,
    ) -> Result<()> {
        let of = Lookout {
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

    /// Scans the lists that are not probed. Returns the items of the lists that each query scanned, of the parts beside the index.
    ///
    /// # Errors
    /// As [`DeviceIndex::best_lists`].
    pub fn end_until(
        &self,
        device: &Device,
        to: &Collection,
        until: &Until,
        parts: &EligibleParts<'_>,
    ) -> Result<Vec<Array<u64>>> {
        let Until { order, looks, .. } = until;
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

    /// Scans the best lists of each query, `order`, and all of those that are not probed: list by list for all queries where they
    /// are to be `shared` and a block of the device has the memory for it. Returns the items of these in the parts.
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

    /// Bytes that it takes on the device.
    pub fn bytes(&self) -> usize {
        let centroids = self.centroids.codes.bytes() + self.centroids.scales.bytes();
        let lists = self.lists.codes.bytes() + self.lists.scales.bytes() + self.lists.offsets.bytes();
        lists + self.lists.lengths.bytes() + centroids + self.wide.as_ref().map_or(0, Array::bytes)
    }
}

/// Scans the lists of each query by itself, those items of them that are there.
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

/// Searches with words under way.
#[derive(Debug)]
pub struct Until {
    order: Best,
    keys: Array<u32>,
    margins: Array<f32>,
    slope: f32,
    /// How far they have come, the same on all cards.
    pub looks: Looks,
}

impl Until {
    /// How many rounds they take at most.
    pub fn rounds(&self) -> usize {
        self.looks.rounds().len()
    }

    /// Lists that a search scans at most.
    pub fn most_lists(&self) -> usize {
        self.order.stride
    }

    /// The lists that are scanned in a round.
    pub fn round(&self, round: usize) -> Order<'_> {
        let Until { order, looks, .. } = self;
        let (begins, most) = (Some(&looks.begins), looks.rounds()[round]);
        Order { order: &order.slots, begins, ends: &looks.ends, stride: order.stride, most }
    }
}

impl Index {
    /// A card's share of the lists.
    pub fn cut(&self, share: Share) -> ListCut {
        ListCut::of(share, self.list_offsets(), self.list_lengths())
    }
}

/// Items beside those of an index, in slots behind its own.
#[derive(Debug)]
pub struct BesideLists {
    /// Where they lie.
    pub lists: BlockLists,
    /// The first so many are like those of the index, and are scanned where these are: all of its, or none. Every search scans the
    /// others: to choose between them would take a device longer.
    probed: usize,
    /// Items of the so many longest lists that are probed.
    longest: Vec<usize>,
    /// Items of the lists that every search scans.
    scanned: usize,
}

impl BesideLists {
    /// Items that are scanned at most where so many lists are.
    pub fn items_at_most(&self, lists: usize) -> usize {
        self.longest[lists.min(self.longest.len() - 1)] + self.scanned
    }

    fn has_own_lists(&self) -> bool {
        self.probed < self.lists.lists()
    }

    /// Has the lists that are not probed scanned for every query, by `scan`. Returns their items, of each query.
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

/// What of an index and of what lies beside it is eligible for each query.
#[derive(Debug)]
pub struct EligibleParts<'a> {
    /// Of the index itself.
    pub main: Eligible<'a>,
    /// Of each part beside it.
    pub beside: Vec<(&'a BesideLists, Eligible<'a>)>,
}

/// What of an index and of what lies beside it is there for every query; none where all is.
#[derive(Debug)]
pub struct LiveParts<'a> {
    /// Of the index itself.
    pub main: Option<LiveItems<'a>>,
    /// Of each part beside it.
    pub beside: Vec<(&'a BesideLists, Option<LiveItems<'a>>)>,
}

/// A search with words, as a device runs it. All that have an ending have the same margins.
#[derive(Clone, Copy, Debug)]
pub struct FilteredSearch<'a> {
    /// How many lists it looks at.
    pub probing: Probing<'a>,
    /// Survivors that must be found before it ends.
    pub enough: usize,
    /// Lists after which so many survivors do, whatever is ahead.
    pub suffices: Option<(usize, usize)>,
}

impl FilteredSearch<'_> {
    fn schedule(&self, lists: usize, items: usize, pace: Pace) -> Schedule {
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
        let judged = Judged {
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
