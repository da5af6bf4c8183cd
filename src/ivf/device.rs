//! An index in the memory of a device: the stored blocks as they are, which is the layout that its kernels read.

use bytemuck::{Pod, cast_slice};

use super::ahead::Margins;
use super::pace::Pace;
use super::probing::Probing;
use super::view::{Index, WideRows};
use crate::device::buffer::Buffer;
use crate::device::cuda::ops::looks::{Judged, Lookout, Looks, Schedule};
use crate::device::cuda::ops::rows::{ItemRows, RowKind};
use crate::device::cuda::ops::scan::{BlockLists, Centroids, Collection, Eligible, Order};
use crate::device::cuda::ops::top::{self, Best, Scored, Ties};
use crate::device::cuda::{Array, Device};
use crate::error::Result;

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
    /// Items of the so many longest lists, and of the so many shortest ones, `[C + 1]`.
    longest: Vec<usize>,
    shortest: Vec<usize>,
}

fn bytes_of<T: Pod>(device: &Device, rows: &Buffer<T>) -> Result<Option<Array<u8>>> {
    device.copy(cast_slice::<T, u8>(rows)).map(Some)
}

fn sums(lengths: impl Iterator<Item = u32>) -> Vec<usize> {
    let sums = lengths.scan(0, |sum, n| {
        *sum += n as usize;
        Some(*sum)
    });
    std::iter::once(0).chain(sums).collect()
}

impl DeviceIndex {
    /// Copies an index.
    ///
    /// # Errors
    /// `Overloaded` where the device has not enough memory.
    pub fn copy(device: &Device, index: &Index) -> Result<Self> {
        let (centroid_codes, centroid_scales) = index.centroid_blocks();
        let (wide, kind) = match index.rows() {
            WideRows::None => (None, RowKind::Codes),
            WideRows::Bf16(rows) => (bytes_of(device, rows)?, RowKind::Bf16),
            WideRows::F16(rows) => (bytes_of(device, rows)?, RowKind::F16),
            WideRows::F32(rows) => (bytes_of(device, rows)?, RowKind::F32),
        };
        let mut lengths = index.list_lengths().to_vec();
        lengths.sort_unstable();
        let penalties = index.penalties();
        let mut copied = DeviceIndex {
            lists: BlockLists {
                codes: device.copy(index.codes())?,
                scales: device.copy(index.scales())?,
                offsets: device.copy(index.list_offsets())?,
                lengths: device.copy(index.list_lengths())?,
                groups: index.dimension().div_ceil(4),
                longest: lengths.last().map_or(0, |&n| n as usize),
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
            longest: sums(lengths.iter().rev().copied()),
            shortest: sums(lengths.iter().copied()),
        };
        copied.norm_max = copied.rows().largest_norm(device, &copied.lists.codes)?;
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

    /// The largest norm of an item.
    pub fn norm_max(&self) -> f32 {
        self.norm_max
    }

    /// Items that so many lists hold at most.
    pub fn items_at_most(&self, lists: usize) -> usize {
        self.longest[lists.min(self.longest.len() - 1)]
    }

    /// Items that so many lists hold at least.
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
    /// device asks as often. Returns how many lists each query scanned, and the items of these.
    ///
    /// # Errors
    /// As [`DeviceIndex::best_lists`].
    pub fn scan_until(
        &self,
        device: &Device,
        to: &Collection,
        vectors: &Array<f32>,
        eligible: &Eligible<'_>,
        (searches, pace): (&[FilteredSearch<'_>], Pace),
    ) -> Result<(Array<u32>, Array<u64>)> {
        let lists = self.lists.lists();
        let items = self.longest.last().copied().unwrap_or(0);
        let most: Vec<u32> = searches.iter().map(|s| s.probing.within(lists).probes_max as u32).collect();
        let (order, keys) = self.best_lists(device, to, &most)?;
        let order = top::sort(device, order, &Ties::default())?;
        let margins = searches.iter().find_map(|s| s.probing.ending).map(|ending| ending.margins);
        let slope = margins.map_or(1.0, Margins::slope);
        let margins = device.copy(margins.map_or(&[][..], Margins::halvings))?;
        let schedules: Vec<Schedule> = searches.iter().map(|s| s.schedule(lists, items, pace)).collect();
        let looks = Looks::new(device, &schedules)?;
        let of = Lookout {
            keys: &keys,
            order: &order.slots,
            stride: order.stride,
            lengths: &self.lists.lengths,
            vectors,
            margins: &margins,
            slope,
        };
        for (round, &most) in looks.rounds().iter().enumerate() {
            let begins = Some(&looks.begins);
            let next = Order { order: &order.slots, begins, ends: &looks.ends, stride: order.stride, most };
            self.lists.scan(device, to, &next, Some(eligible))?;
            looks.look(device, round, to, &of)?;
        }
        Ok((looks.ends, looks.items))
    }

    /// Bytes that it takes on the device.
    pub fn bytes(&self) -> usize {
        let centroids = self.centroids.codes.bytes() + self.centroids.scales.bytes();
        let lists = self.lists.codes.bytes() + self.lists.scales.bytes() + self.lists.offsets.bytes();
        lists + self.lists.lengths.bytes() + centroids + self.wide.as_ref().map_or(0, Array::bytes)
    }
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
        let gains = (0..looks.len()).map(|n| probing.gain_min(self.enough, chunk(n))).collect();
        let judged = Judged {
            passing: probing.pass_rate * items as f64,
            left: probing.ending.map_or(0.0, |ending| ending.left) * self.enough as f64,
            enough: self.enough as u32,
            found: probing.ending.map_or(self.enough, |ending| ending.found(self.enough)) as u32,
            is_gain: u32::from(probing.ending.is_none()),
            suffices: suffices as u32,
            suffices_at: suffices_at as u32,
            unused: 0,
        };
        Schedule { judged, looks: looks.iter().map(|&look| look.min(most) as u32).collect(), gains }
    }
}
