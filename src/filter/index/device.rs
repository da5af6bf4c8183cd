//! The eligibility index in the memory of a device.

use super::view::Index;
use crate::columns::{Columns, DeviceColumns};
use crate::device::cuda::ops::bags::place_rows;
use crate::device::cuda::ops::words::{FilterStep, NO_PLANE, Operation, Passing, PlaneIndex, WordProgram};
use crate::device::cuda::{Array, Device};
use crate::error::Result;
use crate::units::Slot;

/// Planes and filterable columns in the memory of a device.
#[derive(Debug)]
pub struct DevicePlanes {
    index: PlaneIndex,
    /// The first plane of numbers.
    number_planes: u32,
    columns: DeviceColumns,
}

impl DevicePlanes {
    /// Copies an index and the columns that it belongs to.
    ///
    /// # Errors
    /// `Overloaded` where the device has not enough memory.
    pub fn copy(device: &Device, index: &Index, columns: &Columns) -> Result<Self> {
        let firsts = index.list_firsts();
        let of_list = |list: usize| std::iter::repeat_n(list as u32, (firsts[list + 1] - firsts[list]) as usize);
        let word_lists: Vec<u32> = (0..index.lists()).flat_map(of_list).collect();
        let word_slots: Vec<u32> = index.word_slots.iter().map(|slot| slot.0).collect();
        let (bloom, bloom_starts, widths, hashes) = index.bloom_planes();
        let (planes, exact) = index.all_planes();
        let columns = DeviceColumns::copy(device, columns)?;
        Ok(DevicePlanes {
            index: PlaneIndex {
                planes: device.copy(planes)?,
                every: device.copy(&index.every)?,
                bloom: device.copy(bloom)?,
                bloom_starts: device.copy(bloom_starts)?,
                widths: device.copy(widths)?,
                firsts: device.copy(firsts)?,
                word_lists: device.copy(&word_lists)?,
                word_slots: device.copy(&word_slots)?,
                columns: device.copy(columns.places())?,
                hashes: hashes as usize,
            },
            number_planes: exact as u32,
            columns,
        })
    }

    /// The index as operations take it.
    pub fn index(&self) -> &PlaneIndex {
        &self.index
    }

    /// Bytes that it takes on the device.
    pub fn bytes(&self) -> usize {
        let index = &self.index;
        let words = index.planes.bytes() + index.every.bytes() + index.bloom.bytes();
        words + index.word_lists.bytes() + index.word_slots.bytes() + self.columns.bytes()
    }

    /// Evaluates a plan over all words; of items that are gone nothing passes, where it is told which are `live`.
    ///
    /// # Errors
    /// As [`PlaneIndex::evaluate`].
    pub fn evaluate(
        &self,
        device: &Device,
        mut program: WordProgram,
        live: Option<&DeviceLiveItems>,
    ) -> Result<Passing> {
        for plane in program.runs.iter_mut().filter(|plane| **plane != NO_PLANE) {
            *plane += self.number_planes;
        }
        let Some(live) = live else { return self.index.evaluate(device, &program) };
        // A plane that is added brings items back that are gone.
        program.steps.extend([Operation::Every, Operation::And].map(FilterStep::plain));
        program.depth = program.depth.max(2);
        self.index.evaluate_among(device, &program, &live.words)
    }
}

/// The items of an index that are not gone, a bit each, in the memory of a device.
#[derive(Debug)]
pub struct DeviceLiveItems {
    words: Array<u64>,
}

impl DeviceLiveItems {
    /// Those of an index, given the words of all its items or those `before`, from which the live ones differ at the slots of
    /// `changed`, ascending; `is_gone` tells which items are gone. Words that changed are uploaded, all others copied.
    ///
    /// # Errors
    /// `Overloaded` where the device has not enough memory; as [`place_rows`].
    pub fn after(
        device: &Device,
        (planes, index): (&DevicePlanes, &Index),
        before: Option<&DeviceLiveItems>,
        changed: &[Slot],
        is_gone: impl Fn(Slot) -> bool,
    ) -> Result<Self> {
        let words = device.room(index.every.len())?;
        words.copy_from(before.map_or(&planes.index.every, |before| &before.words))?;
        let mut places: Vec<u32> = changed.iter().map(|&slot| index.word_of(slot)).collect();
        places.dedup();
        let live = |&place: &u32| {
            let (all, first) = (index.every[place as usize], index.word_slots[place as usize].0);
            (0..64)
                .filter(|bit| all >> bit & 1 == 1 && !is_gone(Slot(first + bit)))
                .fold(0, |word, bit| word | 1 << bit)
        };
        let rows: Vec<u64> = places.iter().map(live).collect();
        if !rows.is_empty() {
            let taken: Vec<u32> = (0..rows.len() as u32).collect();
            let (rows, taken) = (device.copy(&rows)?, device.copy(&taken)?);
            place_rows(device, &rows, (&taken, &device.copy(&places)?), (&words, 1))?;
        }
        Ok(DeviceLiveItems { words })
    }

    /// A bit each, list after list.
    pub fn words(&self) -> &Array<u64> {
        &self.words
    }
}
