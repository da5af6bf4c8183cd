//! The eligibility index in the memory of a device.

use super::view::Index;
use crate::columns::{Columns, DeviceColumns};
use crate::device::cuda::Device;
use crate::device::cuda::ops::words::{NO_PLANE, Passing, PlaneIndex, WordProgram};
use crate::error::Result;

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

    /// Evaluates a plan over all words.
    ///
    /// # Errors
    /// As [`PlaneIndex::evaluate`].
    pub fn evaluate(&self, device: &Device, mut program: WordProgram) -> Result<Passing> {
        for plane in program.runs.iter_mut().filter(|plane| **plane != NO_PLANE) {
            *plane += self.number_planes;
        }
        self.index.evaluate(device, &program)
    }
}
