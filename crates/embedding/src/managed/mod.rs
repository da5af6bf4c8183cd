//! Managed ids: unbounded 64-bit ids in a table of fixed size.
//!
//! A managed table assigns rows to the ids that deserve one; other ids are unseen. [`ManagedIds`] is that assignment: the id of
//! each row, as snapshots store it (`ids.TABLE`, i64 `[rows]`, [`FREE`] for a free row), and the map from ids to rows that is
//! built from it (`map`). Rows and ids of a table come in one file, so no reader sees an id with the row of another one.
//!
//! In training, `learner` counts occurrences and lets rows change hands every n steps, by the scores of `policy`. The row and its
//! optimizer state then become the initial value of the new id. `crate::train::TableUpdate::assigned` lists these changes.
//!
//! The semantics are those of TorchRec's managed collisions (<https://github.com/meta-pytorch/torchrec>,
//! `torchrec/modules/mc_modules.py`), without their shared row for all other ids: the table's `unseen` policy says what these get.

mod learner;
mod map;
mod policy;
mod sketch;
#[cfg(test)]
mod tests;

pub(crate) use learner::{IdLearner, SharedIds, initial_row};
pub use learner::{IdState, IdTotals};
use map::IdMap;
pub use policy::{Evict, ManagedSpec};
use sterling_core::error::{Error, Result};
use sterling_kernels::buffer::Buffer;

use crate::spec::{TableSpec, Unseen};

/// Id of a free row. It has no row, wherever it is looked up.
pub const FREE: i64 = i64::MIN;

/// Returns the name of the tensor with the ids of a table's rows.
pub fn tensor_name(table: &str) -> String {
    format!("ids.{table}")
}

/// Ids of a table's rows.
#[derive(Debug)]
pub struct ManagedIds {
    /// Id of each row, or [`FREE`].
    by_row: Buffer<i64>,
    map: IdMap,
    held: u64,
}

impl ManagedIds {
    /// Builds the map of a table from the id of each row.
    ///
    /// # Errors
    /// `Invalid` if there are not as many ids as rows, two rows have the same id, or the row of unseen ids has one; `Unsupported`
    /// for 2^32 rows or more; `Overloaded` if memory cannot be allocated.
    pub fn new(spec: &TableSpec, by_row: Buffer<i64>) -> Result<Self> {
        let map = map_of(spec, &by_row).map_err(|e| e.within(format!("table `{}`", spec.name)))?;
        let held = by_row.iter().filter(|id| **id != FREE).count() as u64;
        Ok(ManagedIds { by_row, map, held })
    }

    /// Returns the id of each row, [`FREE`] for a free one.
    pub fn by_row(&self) -> &Buffer<i64> {
        &self.by_row
    }

    /// Returns the number of ids that have a row.
    pub fn held(&self) -> u64 {
        self.held
    }

    /// Returns the bytes of the map, without those of the stored ids.
    pub fn bytes(&self) -> u64 {
        self.map.bytes()
    }

    /// Returns the row of an id.
    pub fn row(&self, id: i64) -> Option<u64> {
        self.map.row(id).map(u64::from)
    }

    /// Appends the rows of ids to `rows`, `-1` for an id that gets none from the table's policy. Returns the number of ids that are
    /// not held.
    pub fn append_rows(&self, spec: &TableSpec, ids: &[i64], rows: &mut Vec<i64>) -> u64 {
        append_rows(&self.map, spec, ids, rows)
    }
}

/// Builds the map from the id of each row.
fn map_of(spec: &TableSpec, by_row: &[i64]) -> Result<IdMap> {
    if u32::try_from(spec.rows).is_err() {
        return Err(Error::unsupported(format!("{} rows with managed ids, expected at most {}", spec.rows, u32::MAX)));
    }
    if by_row.len() as u64 != spec.rows {
        return Err(Error::invalid(format!("{} ids of {} rows, expected one per row", by_row.len(), spec.rows)));
    }
    if let Unseen::Row(row) = spec.unseen
        && by_row[row as usize] != FREE
    {
        let id = by_row[row as usize];
        return Err(Error::invalid(format!("row {row} is that of unseen ids, expected it free, got id {id}")));
    }
    let mut map = IdMap::new(spec.rows)?;
    for (row, &id) in by_row.iter().enumerate().filter(|(_, id)| **id != FREE) {
        if let Some(first) = map.insert(id, row as u32) {
            return Err(Error::invalid(format!("id {id} has rows {first} and {row}, expected one")));
        }
    }
    Ok(map)
}

fn append_rows(map: &IdMap, spec: &TableSpec, ids: &[i64], rows: &mut Vec<i64>) -> u64 {
    let mut unseen = 0;
    rows.reserve(ids.len());
    map.rows_of(ids, |id, row| {
        unseen += u64::from(row.is_none());
        rows.push(row.map_or_else(|| spec.unseen_row(id).map_or(-1, |row| row as i64), i64::from));
    });
    unseen
}
