//! The ids of a table's rows, and the map that is built from them.

use super::map::{FREE, IdMap};
use crate::spec::{TableSpec, Unseen};
use sterling_core::error::{Error, Result};
use sterling_kernels::buffer::Buffer;

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
}

impl ManagedIds {
    /// Builds the map of a table from the id of each row.
    ///
    /// # Errors
    /// `Invalid` if there are not as many ids as rows, two rows have the same id, or the row of unseen ids has an id;
    /// `Unsupported` for 2^32 rows or more; `Overloaded` if memory cannot be allocated.
    pub fn new(spec: &TableSpec, by_row: Buffer<i64>) -> Result<Self> {
        let map = map_of(spec, &by_row).map_err(|e| e.within(format!("table `{}`", spec.name)))?;
        Ok(ManagedIds { by_row, map })
    }

    /// Returns the id of each row, [`FREE`] for a free row.
    pub fn by_row(&self) -> &Buffer<i64> {
        &self.by_row
    }

    /// Counts the ids that have a row.
    pub fn held(&self) -> u64 {
        self.by_row.iter().filter(|id| **id != FREE).count() as u64
    }

    /// Returns the bytes of the map, without the bytes of the stored ids.
    pub fn bytes(&self) -> u64 {
        self.map.bytes()
    }

    /// Returns the row of an id.
    pub fn row(&self, id: i64) -> Option<u64> {
        self.map.row(id).map(u64::from)
    }

    /// Appends the rows of ids to `rows`, `-1` for an unseen id that gets no row from the table's policy. Returns the number of
    /// unseen ids.
    pub fn append_rows(&self, spec: &TableSpec, ids: &[i64], rows: &mut Vec<i64>) -> u64 {
        append_rows(&self.map, spec, ids, rows)
    }
}

/// Builds the map from the id of each row.
pub(super) fn map_of(spec: &TableSpec, by_row: &[i64]) -> Result<IdMap> {
    if u32::try_from(spec.rows).is_err() {
        return Err(Error::unsupported(format!("{} rows with managed ids, expected at most {}", spec.rows, u32::MAX)));
    }
    if by_row.len() as u64 != spec.rows {
        return Err(Error::invalid(format!(
            "got {} ids for {} rows, expected one id per row",
            by_row.len(),
            spec.rows
        )));
    }
    if let Unseen::Row(row) = spec.unseen
        && by_row[row as usize] != FREE
    {
        let id = by_row[row as usize];
        return Err(Error::invalid(format!("row {row} is reserved for unseen ids, expected no id, got {id}")));
    }
    let mut map = IdMap::new(spec.rows)?;
    for (row, &id) in by_row.iter().enumerate().filter(|(_, id)| **id != FREE) {
        if let Some(first) = map.insert(id, row as u32) {
            return Err(Error::invalid(format!("id {id} has rows {first} and {row}, expected one row per id")));
        }
    }
    Ok(map)
}

/// Appends the rows of ids; returns the number of ids that have no row.
pub(super) fn append_rows(map: &IdMap, spec: &TableSpec, ids: &[i64], rows: &mut Vec<i64>) -> u64 {
    let mut unseen = 0;
    rows.reserve(ids.len());
    map.rows_of(ids, |id, row| {
        unseen += u64::from(row.is_none());
        rows.push(row.map_or_else(|| spec.unseen_row(id).map_or(-1, |row| row as i64), i64::from));
    });
    unseen
}
