//! A tower on a device: bags pooled from tables in its memory, and the graph as a program.

use super::features::{Tower, gather_ids};
use super::row::{FeatureRow, FeatureValues};
use super::spec::{FeatureKind, FeatureSpec};
use crate::dense::{DeviceProgram, DeviceRows};
use crate::device::cuda::ops::bags::{IdBags, SumsTo, TableRows, pool};
use crate::device::cuda::ops::steps::{self, NumbersAt, Placing, RowsOf};
use crate::device::cuda::{Array, Device};
use crate::embedding::Pooling;
use crate::error::{Error, Result};

/// The tables and the program of a tower in the memory of a device.
#[derive(Debug)]
pub struct DeviceTower {
    program: DeviceProgram,
    /// By name, each once.
    tables: Vec<(String, TableRows)>,
}

impl DeviceTower {
    /// Copies a tower.
    ///
    /// # Errors
    /// `Unsupported` where its graph is no program of ours, or a table is not whole in the memory of this host; `Overloaded` where
    /// the device has not enough memory.
    pub fn copy(device: &Device, tower: &Tower) -> Result<Self> {
        if let Some(feature) = tower.features().iter().find(|f| f.is_sequence()) {
            return Err(Error::unsupported(format!("feature `{}` is a sequence", feature.name)));
        }
        let program = tower.program().ok_or_else(|| Error::unsupported("the tower's graph is no program of ours"))?;
        let mut tables: Vec<(String, TableRows)> = Vec::new();
        for table in tower.tables() {
            let rows = table
                .host_rows()
                .ok_or_else(|| Error::unsupported(format!("table `{}` is not whole in memory", table.name())))?;
            let bytes = device.copy(rows.bytes())?;
            tables.push((table.name().to_owned(), TableRows { bytes, format: rows.format(), width: rows.width() }));
        }
        Ok(DeviceTower { program: DeviceProgram::copy(device, program)?, tables })
    }

    /// Bytes that it takes on the device.
    pub fn bytes(&self) -> usize {
        self.program.bytes() + self.tables.iter().map(|(_, rows)| rows.bytes.bytes()).sum::<usize>()
    }

    /// The embeddings of rows of features that `tower`, which this is a copy of, has read: `[rows, stride]`.
    ///
    /// # Errors
    /// `Internal` where a launch fails; `Overloaded` where the device has not enough memory.
    pub fn run(&self, device: &Device, tower: &Tower, rows: &[&FeatureRow]) -> Result<DeviceRows> {
        let given = self.program.given(device, 1, rows.len())?;
        let layout = tower.layout();
        let bagged = tower.features().iter().enumerate().filter(|(_, spec)| spec.kind != FeatureKind::Dense);
        for (k, (n, spec)) in bagged.enumerate() {
            let to = SumsTo { data: &given.numbers, stride: given.stride, column: layout.columns(k).start };
            self.pool(device, tower, (n, spec), rows, &to)?;
        }
        let counts = device.copy(&[rows.len() as u32])?;
        let of = RowsOf { counts: &counts, most: rows.len() };
        let mut first = layout.width();
        for (n, spec) in tower.features().iter().enumerate().filter(|(_, spec)| spec.kind == FeatureKind::Dense) {
            let count = spec.width.unwrap_or(0);
            let mut numbers = Vec::with_capacity(rows.len() * count);
            for row in rows {
                if let FeatureValues::Dense(of_row) = &row.values[n] {
                    numbers.extend_from_slice(of_row);
                }
            }
            let numbers: Array<f32> = device.copy(&numbers)?;
            let placing = Placing { runs: 1, count, stride: 0, first };
            let out = NumbersAt::of(&given.numbers, 0, 0, given.stride);
            steps::pick(device, of, NumbersAt::of(&numbers, 0, 0, count), None, placing, out)?;
            first += count;
        }
        self.program.run(device, of, &[], given)
    }

    /// Pools the bags of feature `n` of all rows.
    fn pool(
        &self,
        device: &Device,
        tower: &Tower,
        (n, spec): (usize, &FeatureSpec),
        rows: &[&FeatureRow],
        to: &SumsTo<'_>,
    ) -> Result<()> {
        let missing = || Error::internal(format!("feature `{}` without its table", spec.name));
        let table = tower.table(spec).ok_or_else(missing)?;
        let copied = self.tables.iter().find(|(name, _)| name == table.name()).map(|(_, rows)| rows);
        let any_weights = rows.iter().flat_map(|r| &r.values).any(FeatureValues::has_weights);
        let bags = gather_ids(n, rows, any_weights)?;
        // The rows that ids take, -1 for none: nothing that is uploaded names a row beyond the table.
        let ids: Vec<i64> = bags.values().iter().map(|&id| table.resolve(id).0.map_or(-1, |row| row as i64)).collect();
        let offsets: Vec<u32> = bags.offsets().iter().map(|&o| o as u32).collect();
        let (ids, offsets) = (device.copy(&ids)?, device.copy(&offsets)?);
        let weights = bags.weights().map(|weights| device.copy(weights)).transpose()?;
        let is_mean = spec.pooling == Pooling::Mean;
        let bags = IdBags { ids: &ids, offsets: &offsets, weights: weights.as_ref(), is_mean };
        pool(device, copied.ok_or_else(missing)?, &bags, to)
    }
}
