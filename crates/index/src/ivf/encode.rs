//! Writes an index as tensors: codes, scales and rescoring rows, in slot order.
//!
//! Rows in memory are read in place. Rows in a file are read sequentially once per *bucket*, a range of slots whose rows fit
//! the memory budget: each reading keeps the rows of its bucket and skips all others. B buckets read the file B times, but
//! no temporary files are written.

use std::ops::Range;
use std::path::Path;

use bytemuck::cast_slice_mut;
use half::{bf16, f16};

use super::build::Built;
use super::coded::CodedRow;
use super::kmeans::blocked;
use super::options::Rescore;
use super::quantize::write_lane;
use sterling_core::error::Result;
use sterling_core::units::NO_ITEM;
use sterling_kernels::cpu::kernels::BLOCK;
use sterling_storage::files::{Checksum, Element, TensorFile, TensorWriter, Tensors};
use sterling_storage::rows::RowStore;

/// Numbers that are encoded at a time; during encoding, their codes and rows are in memory twice.
const RUN_NUMBERS: usize = 1 << 22;
/// Slots of encoded rows that are assembled at a time, so that they stay in a core's cache.
const CODED_SLOTS: usize = 64 * BLOCK;
/// Default memory of a bucket.
const BUCKET_BYTES: u64 = 1 << 30;

impl Built {
    /// Builds the tensors in memory from the `rows` that the index was built from; errors call the file `name`.
    ///
    /// # Errors
    /// As [`RowStore::read`] and [`TensorFile::in_memory`].
    pub fn in_memory(&self, rows: &RowStore<'_>, name: &str) -> Result<Tensors> {
        self.declared()?.in_memory_filled(name, |places| self.fill(rows, BUCKET_BYTES, places))
    }

    /// Builds the tensors in memory from rows that are already encoded.
    ///
    /// # Errors
    /// As [`TensorFile::in_memory`].
    pub fn coded_in_memory(&self, rows: &[&CodedRow], name: &str) -> Result<Tensors> {
        self.declared()?.in_memory_filled(name, |places| match self.rescore {
            Rescore::None => self.write_coded_rows::<u8>(rows, places),
            Rescore::Bf16 => self.write_coded_rows::<bf16>(rows, places),
            Rescore::F16 => self.write_coded_rows::<f16>(rows, places),
            Rescore::F32 => self.write_coded_rows::<f32>(rows, places),
        })
    }

    fn write_coded_rows<T: Element>(&self, rows: &[&CodedRow], places: &mut TensorWriter<'_>) -> Result<()> {
        let block_bytes = self.dimension.div_ceil(4) * 4 * BLOCK;
        let numbers = if self.rescore == Rescore::None { 0 } else { self.dimension };
        for (run, order) in self.order.chunks(CODED_SLOTS).enumerate() {
            let first = run * CODED_SLOTS;
            let (mut codes, mut scales) = (vec![128; order.len() / BLOCK * block_bytes], vec![0f32; order.len()]);
            let mut wide = vec![T::zeroed(); order.len() * numbers];
            let row_bytes = numbers * size_of::<T>();
            for (slot, &row) in order.iter().enumerate().filter(|(_, row)| **row != NO_ITEM) {
                let row = rows[row as usize];
                scales[slot] = row.scale;
                write_lane(&row.codes, slot % BLOCK, &mut codes[slot / BLOCK * block_bytes..][..block_bytes]);
                row.write_wide(self.rescore, &mut cast_slice_mut(&mut wide)[slot * row_bytes..][..row_bytes]);
            }
            places.put("codes", first / BLOCK * block_bytes, &codes)?;
            places.put("scales", first, &scales)?;
            if numbers > 0 {
                places.put("rows", first * numbers, &wide)?;
            }
        }
        Ok(())
    }

    /// Writes the index file from the `rows` that the index was built from, with about `bucket_bytes` of memory for rows of a
    /// file.
    ///
    /// # Errors
    /// As [`RowStore::read`] and [`TensorFile::write_filled`].
    pub fn write(&self, rows: &RowStore<'_>, path: &Path, bucket_bytes: u64) -> Result<Checksum> {
        self.declared()?.write_filled(path, |places| self.fill(rows, bucket_bytes, places))
    }

    /// Returns the number of slots of a bucket whose rows take about `bytes` of memory.
    pub(super) fn bucket_slots(&self, bytes: u64) -> usize {
        let slots = usize::try_from(bytes / (self.dimension * size_of::<f32>()) as u64).unwrap_or(usize::MAX);
        (slots / BLOCK * BLOCK).clamp(BLOCK, self.order.len().max(BLOCK))
    }

    fn declared(&self) -> Result<TensorFile<'_>> {
        let (slots, lists, dimension) = (self.order.len(), self.list_lengths.len(), self.dimension);
        let mut file = TensorFile::new();
        file.reserve::<u8>("codes", &[slots / BLOCK, dimension.div_ceil(4), BLOCK, 4])?;
        file.reserve::<f32>("scales", &[slots])?;
        file.add("list_lengths", &[lists], &self.list_lengths)?;
        file.add("centroids", &[lists, dimension], &self.centroids)?;
        if !self.penalties.is_empty() {
            file.add("penalties", &[lists], &self.penalties)?;
        }
        if let Some(coder) = &self.coder {
            coder.declare(slots, &mut file)?;
        }
        match self.rescore {
            Rescore::None => Ok(()),
            Rescore::Bf16 => file.reserve::<bf16>("rows", &[slots, dimension]),
            Rescore::F16 => file.reserve::<f16>("rows", &[slots, dimension]),
            Rescore::F32 => file.reserve::<f32>("rows", &[slots, dimension]),
        }?;
        Ok(file)
    }

    fn fill(&self, rows: &RowStore<'_>, bucket_bytes: u64, places: &mut TensorWriter<'_>) -> Result<()> {
        let slots = self.order.len();
        if let Some(rows) = rows.in_memory() {
            let row = |slot: usize| match self.order[slot] {
                NO_ITEM => None,
                row => Some(rows.row(row as usize)),
            };
            return self.put(0..slots, row, places);
        }
        let mut slot_of = vec![NO_ITEM; rows.rows()];
        (0u32..).zip(&self.order).filter(|(_, row)| **row != NO_ITEM).for_each(|(s, row)| slot_of[*row as usize] = s);
        let (each, width) = (self.bucket_slots(bucket_bytes), self.dimension);
        let mut bucket = vec![0f32; each * width];
        for first in (0..slots).step_by(each) {
            let here = first..(first + each).min(slots);
            rows.each(|first_row, chunk| {
                for row in 0..chunk.rows() {
                    let slot = slot_of[first_row + row] as usize;
                    if here.contains(&slot) {
                        bucket[(slot - first) * width..][..width].copy_from_slice(chunk.row(row));
                    }
                }
                Ok(())
            })?;
            let row = |slot: usize| (self.order[slot] != NO_ITEM).then(|| &bucket[(slot - first) * width..][..width]);
            self.put(here, row, places)?;
        }
        Ok(())
    }

    /// Writes the tensors of these slots; `row` returns the row of a slot that has one.
    fn put<'r>(
        &self,
        slots: Range<usize>,
        row: impl Fn(usize) -> Option<&'r [f32]> + Sync,
        places: &mut TensorWriter<'_>,
    ) -> Result<()> {
        let block_bytes = self.dimension.div_ceil(4) * 4 * BLOCK;
        let each = (RUN_NUMBERS / self.dimension / BLOCK).max(1) * BLOCK;
        for first in slots.clone().step_by(each) {
            let run = first..(first + each).min(slots.end);
            let (codes, scales) = blocked(run.clone().map(&row), self.dimension, run.len());
            places.put("codes", first / BLOCK * block_bytes, &codes)?;
            places.put("scales", first, &scales)?;
            if let Some(coder) = &self.coder {
                let list_of = |slot: usize| self.list_offsets.partition_point(|&first| first as usize <= slot) - 1;
                let both = |n: usize| Some((row(first + n)?, self.centroid(list_of(first + n))));
                let (codes, factors) = coder.coded(run.len(), both);
                places.put("first_pass_codes", first / BLOCK * coder.block_bytes(), &codes)?;
                if !factors.is_empty() {
                    places.put("first_pass_factors", first, &factors)?;
                }
            }
            match self.rescore {
                Rescore::None => Ok(()),
                Rescore::Bf16 => self.put_rows(run, &row, bf16::from_f32, places),
                Rescore::F16 => self.put_rows(run, &row, f16::from_f32, places),
                Rescore::F32 => self.put_rows(run, &row, |x| x, places),
            }?;
        }
        Ok(())
    }

    fn put_rows<'r, T: Element>(
        &self,
        slots: Range<usize>,
        row: impl Fn(usize) -> Option<&'r [f32]>,
        convert: impl Fn(f32) -> T,
        places: &mut TensorWriter<'_>,
    ) -> Result<()> {
        let first = slots.start * self.dimension;
        let mut values = vec![T::zeroed(); slots.len() * self.dimension];
        for (slot, to) in slots.zip(values.chunks_exact_mut(self.dimension)) {
            to.iter_mut().zip(row(slot).unwrap_or_default()).for_each(|(to, &x)| *to = convert(x));
        }
        places.put("rows", first, &values)
    }
}
