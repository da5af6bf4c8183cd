//! Eligibility index in GPU memory.

use std::borrow::Cow;
use std::ops::Range;

use super::view::Index;
use crate::columns::{Columns, DeviceColumns};
use sterling_core::error::Result;
use sterling_core::units::{ListId, Slot};
use sterling_cuda::ops::bags::scatter_rows;
use sterling_cuda::ops::words::{FilterStep, Filters, NO_PLANE, Operation, PlaneIndex, WordProgram};
use sterling_cuda::partition::ListCut;
use sterling_cuda::{Array, Device};

/// Bit planes and filterable columns in GPU memory.
#[derive(Debug)]
pub struct DevicePlanes {
    index: PlaneIndex,
    /// Index of the first plane of numeric buckets.
    number_planes: u32,
    columns: DeviceColumns,
}

impl DevicePlanes {
    /// Copies this GPU's partition of an index and of its columns.
    ///
    /// # Errors
    /// `Overloaded` if the device has not enough memory.
    pub fn copy(device: &Device, index: &Index, columns: &Columns, cut: &ListCut) -> Result<Self> {
        let of_list = |(list, words): (usize, &Range<u32>)| std::iter::repeat_n(list as u32, words.len());
        let word_lists: Vec<u32> = cut.words().iter().enumerate().flat_map(of_list).collect();
        let firsts = cut.word_firsts();
        let word_slots: Vec<u32> = cut.word_slots().collect();
        let (_, _, widths, hashes) = index.bloom_planes();
        let (planes, exact) = index.all_planes();
        let columns = DeviceColumns::copy(device, columns, cut)?;
        let bloom_starts = cut.words().iter().zip(widths).scan(0u64, |end, (words, &width)| {
            let start = *end;
            *end += words.len() as u64 * u64::from(width);
            Some(start)
        });
        let bloom_starts: Vec<u64> = bloom_starts.collect();
        let every = cut_plane(&index.every, index.list_firsts(), cut);
        let planes = planes.chunks_exact(index.every.len().max(1));
        let of_planes = device.room(planes.len() * every.len())?;
        for (n, plane) in planes.enumerate() {
            of_planes.write_at(n * every.len(), &cut_plane(plane, index.list_firsts(), cut))?;
        }
        Ok(DevicePlanes {
            index: PlaneIndex {
                planes: of_planes,
                every: device.copy(&every)?,
                bloom: device.copy(&cut_bloom(index, cut))?,
                bloom_starts: device.copy(&bloom_starts)?,
                widths: device.copy(widths)?,
                firsts: device.copy(&firsts)?,
                word_lists: device.copy(&word_lists)?,
                word_slots: device.copy(&word_slots)?,
                columns: device.copy(columns.places())?,
                hashes: hashes as usize,
            },
            number_planes: exact as u32,
            columns,
        })
    }

    /// Returns the index in the form that kernels take.
    pub fn index(&self) -> &PlaneIndex {
        &self.index
    }

    /// Returns the device memory in bytes.
    pub fn bytes(&self) -> usize {
        let index = &self.index;
        let words = index.planes.bytes() + index.every.bytes() + index.bloom.bytes();
        words + index.word_lists.bytes() + index.word_slots.bytes() + self.columns.bytes()
    }

    /// Creates filters from the programs of their plans. If `live` is given, deleted items never pass.
    ///
    /// # Errors
    /// As [`PlaneIndex::filters`].
    pub fn filters(
        &self,
        device: &Device,
        mut programs: Vec<WordProgram>,
        live: Option<&DeviceLiveItems>,
    ) -> Result<Filters> {
        for program in &mut programs {
            for plane in program.runs.iter_mut().filter(|plane| **plane != NO_PLANE) {
                *plane += self.number_planes;
            }
            if live.is_some() {
                // A step that ORs a plane would restore deleted items, so the live bitmap is ANDed at the end.
                program.steps.extend([Operation::Every, Operation::And].map(FilterStep::plain));
                program.depth = program.depth.max(2);
            }
        }
        self.index.filters(device, &programs, live.map_or(&self.index.every, |live| &live.words))
    }
}

/// Returns this GPU's partition of a plane over all lists, whose first words are `firsts`.
fn cut_plane<'a>(plane: &'a [u64], firsts: &[u32], cut: &ListCut) -> Cow<'a, [u64]> {
    if cut.is_whole() {
        return plane.into();
    }
    let of_list = |(&first, words): (&u32, &Range<u32>)| (first + words.start) as usize..(first + words.end) as usize;
    firsts.iter().zip(cut.words()).map(of_list).flat_map(|words| &plane[words]).copied().collect()
}

/// Returns this GPU's partition of the Bloom planes, list by list.
fn cut_bloom<'a>(index: &'a Index, cut: &ListCut) -> Cow<'a, [u64]> {
    let (bloom, starts, widths, _) = index.bloom_planes();
    if cut.is_whole() {
        return bloom.into();
    }
    let of_list = |(list, words): (usize, &Range<u32>)| {
        let (start, words_of_all) = (starts[list] as usize, index.words(ListId(list as u32)));
        let (from, to) = (words.start as usize, words.end as usize);
        (0..widths[list] as usize).flat_map(move |plane| {
            let first = start + plane * words_of_all;
            bloom[first + from..first + to].iter().copied()
        })
    };
    cut.words().iter().enumerate().flat_map(of_list).collect()
}

/// Bitmap of the live (not deleted) items of an index in GPU memory.
#[derive(Debug)]
pub struct DeviceLiveItems {
    words: Array<u64>,
}

impl DeviceLiveItems {
    /// Derives the live bitmap of this GPU's partition from the bitmap of all items, or from the bitmap `before`. The
    /// new bitmap differs from the old one at most at the slots of `changed` (ascending); `is_gone` returns true for
    /// deleted items. Only changed words are uploaded.
    ///
    /// # Errors
    /// `Overloaded` if the device has not enough memory; as [`scatter_rows`].
    pub fn after(
        device: &Device,
        (planes, index, cut): (&DevicePlanes, &Index, &ListCut),
        before: Option<&DeviceLiveItems>,
        changed: &[Slot],
        is_gone: impl Fn(Slot) -> bool,
    ) -> Result<Self> {
        let words = device.room(planes.index.every.len())?;
        words.copy_from(before.map_or(&planes.index.every, |before| &before.words))?;
        let mut places: Vec<(u32, u32)> = Vec::new();
        let firsts = cut.word_firsts();
        for word in changed.iter().map(|&slot| index.word_of(slot)) {
            let list = index.list_firsts().partition_point(|&first| first <= word) - 1;
            let of_list = word - index.list_firsts()[list];
            if cut.words()[list].contains(&of_list) && places.last().is_none_or(|(last, _)| *last != word) {
                places.push((word, firsts[list] + of_list - cut.words()[list].start));
            }
        }
        let live = |&(word, _): &(u32, u32)| {
            let (all, first) = (index.every[word as usize], index.word_slots[word as usize].0);
            (0..64)
                .filter(|bit| all >> bit & 1 == 1 && !is_gone(Slot(first + bit)))
                .fold(0, |word, bit| word | 1 << bit)
        };
        let rows: Vec<u64> = places.iter().map(live).collect();
        let places: Vec<u32> = places.iter().map(|(_, place)| *place).collect();
        if !rows.is_empty() {
            let taken: Vec<u32> = (0..rows.len() as u32).collect();
            let (rows, taken) = (device.copy(&rows)?, device.copy(&taken)?);
            scatter_rows(device, &rows, (&taken, &device.copy(&places)?), (&words, 1))?;
        }
        Ok(DeviceLiveItems { words })
    }

    /// Returns the bitmap, list by list.
    pub fn words(&self) -> &Array<u64> {
        &self.words
    }
}
