//! An index in the memory of a device: the stored blocks as they are, which is the layout that its kernels read.

use bytemuck::{Pod, cast_slice};

use super::view::{Index, WideRows};
use crate::device::buffer::Buffer;
use crate::device::cuda::ops::rows::{ItemRows, RowKind};
use crate::device::cuda::ops::scan::{BlockLists, Centroids};
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

    /// Bytes that it takes on the device.
    pub fn bytes(&self) -> usize {
        let centroids = self.centroids.codes.bytes() + self.centroids.scales.bytes();
        let lists = self.lists.codes.bytes() + self.lists.scales.bytes() + self.lists.offsets.bytes();
        lists + self.lists.lengths.bytes() + centroids + self.wide.as_ref().map_or(0, Array::bytes)
    }
}
