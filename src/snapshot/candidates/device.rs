//! The rows of candidates in the memory of a device.

use std::sync::Arc;

use super::{CandidateRows, Keys, Lies, Part};
use crate::device::cuda::Device;
use crate::device::cuda::memory::Array;
use crate::device::cuda::ops::bags::{SlotKeys, SumsTo, TableRows, pool_slots};
use crate::device::cuda::ops::rows::{CandidateColumns, ItemRows, SlotRows};
use crate::embedding::DeviceTables;
use crate::embedding::device::rows_of;
use crate::error::{Error, Result};

/// What a reranker on a device reads of candidates as rows, side by side.
#[derive(Debug)]
pub struct DeviceCandidates {
    parts: Vec<DevicePart>,
    /// Numbers of all rows of a candidate.
    width: usize,
}

#[derive(Debug)]
struct DevicePart {
    /// The first of its numbers.
    column: usize,
    /// None for the row of the index.
    table: Option<(Arc<TableRows>, SlotKeys)>,
}

impl DeviceCandidates {
    /// Copies what rows of candidates are made of, but for the index; tables that others have copied stay where they are.
    ///
    /// # Errors
    /// `Unsupported` for a table of more rows than a key tells apart; `Overloaded` where the device has not enough memory.
    pub fn copy(device: &Device, rows: &CandidateRows, tables: &mut DeviceTables) -> Result<Self> {
        let mut column = 0;
        let mut part = |part: &Part| -> Result<DevicePart> {
            let table = match &part.lies {
                Lies::Index => None,
                Lies::Kept(table) => Some((Arc::new(rows_of(device, table)?), SlotKeys::default())),
                Lies::LookedUp { table, values, mean } => {
                    Some((tables.copy(device, table)?, SlotKeys { is_mean: *mean, ..values.copy(device)? }))
                }
            };
            let placed = DevicePart { column, table };
            column += part.width;
            Ok(placed)
        };
        let parts = rows.parts.iter().map(&mut part).collect::<Result<_>>()?;
        Ok(DeviceCandidates { parts, width: column })
    }

    /// Writes the rows of candidates and, after them, the numbers at `columns`: `[queries, stride, out_stride]`. `addresses` are those of
    /// columns of one number a slot, 0 for the retrieval score, which `similarity` has.
    ///
    /// # Errors
    /// `Internal` for arrays that are too short or where a launch fails.
    pub fn gather(
        &self,
        device: &Device,
        index: ItemRows<'_>,
        of: &SlotRows<'_>,
        (addresses, similarity): (&Array<u64>, &Array<u32>),
        (out, stride): (&Array<f32>, usize),
    ) -> Result<()> {
        let row_at = self.parts.iter().find(|part| part.table.is_none()).map(|part| part.column);
        if row_at.is_some() || !addresses.is_empty() {
            let columns = CandidateColumns { addresses, similarity, at: self.width };
            index.gather(device, of, row_at, &columns, (out, stride))?;
        }
        for part in &self.parts {
            if let Some((rows, keys)) = &part.table {
                pool_slots(device, rows, keys, of, &SumsTo { data: out, stride, column: part.column })?;
            }
        }
        Ok(())
    }
}

impl Keys {
    /// The rows of each slot's values.
    fn copy(&self, device: &Device) -> Result<SlotKeys> {
        let key = |row: i64| match u32::try_from(row) {
            Ok(row) if row != SlotKeys::NONE => Ok(row),
            Err(_) if row < 0 => Ok(SlotKeys::NONE),
            _ => Err(Error::unsupported(format!("row {row} of a table, expected one below 2^32 - 1"))),
        };
        match self {
            Keys::Id(rows) => {
                let keys: Vec<u32> = rows.iter().map(|&row| key(row)).collect::<Result<_>>()?;
                Ok(SlotKeys { keys: Some(device.copy(&keys)?), ..SlotKeys::default() })
            }
            Keys::Codes(column, rows) => {
                let of_code: Vec<u32> = rows.iter().map(|&row| key(row)).collect::<Result<_>>()?;
                let (offsets, codes) = column.all_codes();
                let keys: Vec<u32> = codes.iter().map(|&code| of_code[code as usize]).collect();
                let (keys, offsets) = (device.copy(&keys)?, device.copy(offsets)?);
                Ok(SlotKeys { keys: Some(keys), offsets: Some(offsets), ..SlotKeys::default() })
            }
        }
    }
}
