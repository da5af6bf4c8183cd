//! Rows of candidates in the memory of a GPU.

use std::sync::Arc;

use super::{CandidateRows, Keys, LookedUp, Part, RowStorage};
use sterling_core::error::{Error, Result};
use sterling_cuda::Device;
use sterling_cuda::memory::Array;
use sterling_cuda::ops::bags::{SlotKeys, SumsTo, TableRows, pool_slots};
use sterling_cuda::ops::rows::{CandidateColumns, ItemRows, SlotRows};
use sterling_cuda::partition::ListCut;
use sterling_cuda::spare::{SlotLease, Spare};
use sterling_embedding::DeviceTables;
use sterling_embedding::device::{rows_of, whole};

/// Rows that a reranker on a GPU reads per candidate, concatenated.
#[derive(Debug)]
pub struct DeviceCandidates {
    parts: Vec<DevicePart>,
    /// Number of values per candidate.
    width: usize,
}

#[derive(Debug)]
struct DevicePart {
    /// Index of the input's first value within a candidate's values.
    column: usize,
    /// Table and keys; `None` for the input that is the item's row in the index.
    table: Option<(Arc<TableRows>, SlotKeys)>,
    /// Free space after the keys in device memory, for inputs with several keys per slot.
    spare_keys: Arc<Spare>,
}

/// Table rows of each slot's values, and the start of each slot's keys if slots may have several.
struct HostKeys {
    keys: Vec<u32>,
    offsets: Option<Vec<u32>>,
}

impl DeviceCandidates {
    /// Copies a GPU's partition of the inputs' rows to the GPU, except rows of the index. Reserves room for `spare` more slots,
    /// with as many keys per slot as the average. Tables that are already on the device are shared.
    ///
    /// # Errors
    /// `Unsupported` for sequences, and for a table with more rows than a 32-bit key can address; `Overloaded` if the device lacks
    /// memory.
    pub fn copy(
        device: &Device,
        rows: &CandidateRows,
        tables: &mut DeviceTables,
        (cut, spare): (&ListCut, usize),
    ) -> Result<Self> {
        let mut column = 0;
        let mut part = |part: &Part| -> Result<DevicePart> {
            let mut spare_keys = Spare::new(0..0);
            let table = match &part.lies {
                RowStorage::Index => None,
                RowStorage::Kept(table) => Some((Arc::new(rows_of(device, table, cut, spare)?), SlotKeys::default())),
                RowStorage::Pooled { looked_up: LookedUp { table, values }, mean } => {
                    let host = values.host()?;
                    let (keys, offsets) = match &host.offsets {
                        None => (cut.copy(device, &host.keys, 1, spare)?, None),
                        Some(offsets) => {
                            let more = spare * host.keys.len().div_ceil(offsets.len().saturating_sub(1).max(1)).max(1);
                            let (offsets, keys) = cut.gather_ragged(offsets, &host.keys);
                            let first = keys.len() as u32;
                            spare_keys = Spare::new(first..first.saturating_add(more as u32));
                            let offsets = device.copy_with_room(&offsets, spare)?;
                            (device.copy_with_room(&keys, more)?, Some(offsets))
                        }
                    };
                    Some((tables.copy(device, table)?, SlotKeys { keys: Some(keys), offsets, is_mean: *mean }))
                }
                RowStorage::Sequence(..) | RowStorage::Mask(_) => {
                    return Err(Error::unsupported("GPUs do not run a reranker that reads sequences of item values"));
                }
            };
            let placed = DevicePart { column, table, spare_keys };
            column += part.width;
            Ok(placed)
        };
        let parts = rows.parts.iter().map(&mut part).collect::<Result<_>>()?;
        Ok(DeviceCandidates { parts, width: column })
    }

    /// Writes this GPU's partition of the rows of a segment to spare slots from `first` on; the segment has one more
    /// slot than items. Keys are written to a range that stays reserved until the returned leases are dropped.
    ///
    /// # Errors
    /// `Overloaded` if there is no room; `Internal` if the inputs differ from those on the device; as [`DeviceCandidates::copy`].
    pub fn put(&self, (rows, cut): (&CandidateRows, &ListCut), first: u32) -> Result<Vec<SlotLease>> {
        let mut lent = Vec::new();
        if rows.parts.len() != self.parts.len() {
            let (parts, expected) = (rows.parts.len(), self.parts.len());
            return Err(Error::internal(format!("candidate rows have {parts} inputs, expected {expected}")));
        }
        let unlike = || Error::internal("candidate rows have another layout than those on the device");
        for (part, on_device) in rows.parts.iter().zip(&self.parts) {
            match (&part.lies, &on_device.table) {
                (RowStorage::Index, None) => {}
                (RowStorage::Kept(table), Some((to, _))) => {
                    // New rows have the precision in which they were computed, but on a device all rows of a table have the same
                    // format.
                    let converted =
                        (table.spec().format != to.format).then(|| table.converted(to.format)).transpose()?;
                    let rows = whole(converted.as_ref().unwrap_or(table))?;
                    if rows.width() != to.width {
                        return Err(unlike());
                    }
                    cut.write(&to.bytes, rows.bytes(), to.format.row_bytes(to.width)?, first as usize)?;
                }
                (
                    RowStorage::Pooled { looked_up: LookedUp { values, .. }, .. },
                    Some((_, SlotKeys { keys: Some(to), offsets, .. })),
                ) => match (values.host()?, offsets) {
                    (HostKeys { keys, offsets: None }, None) => cut.write(to, &keys, 1, first as usize)?,
                    (HostKeys { keys, offsets: Some(starts) }, Some(offsets)) => {
                        let (starts, keys) = cut.gather_ragged(&starts, &keys);
                        let full = || Error::overloaded(format!("the device has no memory for {} keys", keys.len()));
                        let place = on_device.spare_keys.lease(keys.len() as u32).ok_or_else(full)?;
                        let at = place.places().start;
                        to.write_at(at as usize, &keys)?;
                        let starts: Vec<u32> = starts.iter().map(|start| start + at).collect();
                        offsets.write_at(first as usize, &starts)?;
                        lent.push(place);
                    }
                    _ => return Err(unlike()),
                },
                _ => return Err(unlike()),
            }
        }
        Ok(lent)
    }

    /// Writes the rows of candidates followed by one number per column: `[queries, stride, out_stride]`. `addresses` are the device
    /// addresses of columns with one number per slot; address 0 stands for the retrieval score in `similarity`.
    ///
    /// # Errors
    /// `Internal` for arrays that are too short, or if the launch fails.
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
    /// Returns the keys of each slot in the device's format.
    fn host(&self) -> Result<HostKeys> {
        let key = |row: i64| match u32::try_from(row) {
            Ok(row) if row != SlotKeys::NONE => Ok(row),
            Err(_) if row < 0 => Ok(SlotKeys::NONE),
            _ => {
                Err(Error::unsupported(format!("table row {row} is too high for a GPU, expected a row below 2^32 - 1")))
            }
        };
        match self {
            Keys::Id(rows) => {
                let keys = rows.iter().map(|&row| key(row)).collect::<Result<_>>()?;
                Ok(HostKeys { keys, offsets: None })
            }
            Keys::Codes(column, rows) => {
                let of_code: Vec<u32> = rows.iter().map(|&row| key(row)).collect::<Result<_>>()?;
                let (offsets, codes) = column.all_codes();
                let keys = codes.iter().map(|&code| of_code[code as usize]).collect();
                Ok(HostKeys { keys, offsets: Some(offsets.to_vec()) })
            }
        }
    }
}
