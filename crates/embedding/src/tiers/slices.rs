//! Parts of tables that one server holds for others, and how those of others are asked for.
//!
//! A [`Slice`] is named by what it is, not by who has it: the table, the checksum of the file that it was published in, its rows and
//! columns. Whoever holds a slice of that name holds those very bytes, so that rows of two versions can never meet in one answer,
//! and servers whose versions have the same tables under other numbers, as shards and merges have, still find each other's.

use std::collections::HashMap;
use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use super::RowSource;
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use sterling_kernels::buffer::Buffer;

/// A part of a table, by what its rows are.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SliceName {
    /// The model.
    pub model: String,
    /// The table.
    pub table: String,
    /// The checksum of the file that holds the whole table, as the manifest has it.
    pub content: String,
    /// First row, and the row after the last.
    pub rows: [u64; 2],
    /// First column, and the column after the last.
    pub columns: [u32; 2],
}

impl fmt::Display for SliceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SliceName { model, table, content, rows, columns } = self;
        write!(f, "{model}/{table}-{content}, rows {rows:?}, columns {columns:?}")
    }
}

impl SliceName {
    /// Number of rows.
    pub fn len(&self) -> u64 {
        self.rows[1].saturating_sub(self.rows[0])
    }

    /// True without rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Rows of a part of a table in this process's memory, held for others as long as this value lives.
#[derive(Debug)]
pub struct Slice {
    bytes: Buffer<u8>,
    row_bytes: usize,
}

impl Slice {
    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Adds rows, counted from the slice's first, to `to`.
    ///
    /// # Errors
    /// `Invalid` for a row that the slice does not have.
    pub fn copy(&self, rows: &[u64], to: &mut Vec<u8>) -> Result<()> {
        to.reserve(rows.len() * self.row_bytes);
        for row in rows {
            let start = usize::try_from(*row).ok().and_then(|row| row.checked_mul(self.row_bytes));
            let bytes = start.and_then(|start| self.bytes.get(start..start.checked_add(self.row_bytes)?));
            let held = self.bytes.len() / self.row_bytes;
            to.extend_from_slice(bytes.ok_or_else(|| Error::invalid(format!("row {row}, expected one below {held}")))?);
        }
        Ok(())
    }
}

/// The slices that a server holds.
#[derive(Debug, Default)]
pub struct Slices(Mutex<HashMap<SliceName, Vec<Weak<Slice>>>>);

impl Slices {
    /// Holds rows for others until the slice is dropped.
    ///
    /// # Errors
    /// `Invalid` where the bytes are not as many rows as the name says.
    pub fn hold(&self, name: SliceName, bytes: Buffer<u8>) -> Result<Arc<Slice>> {
        let rows = usize::try_from(name.len()).unwrap_or(usize::MAX);
        let row_bytes = bytes.len().checked_div(rows).unwrap_or(0);
        if row_bytes == 0 || row_bytes.checked_mul(rows) != Some(bytes.len()) {
            return Err(Error::invalid(format!("{name}: {} bytes, expected those of {rows} rows", bytes.len())));
        }
        let slice = Arc::new(Slice { bytes, row_bytes });
        let mut held = self.locked();
        held.retain(|_, copies| {
            copies.retain(|copy| copy.strong_count() > 0);
            !copies.is_empty()
        });
        held.entry(name).or_default().push(Arc::downgrade(&slice));
        Ok(slice)
    }

    /// The slice of that name, where it is held.
    pub fn get(&self, name: &SliceName) -> Option<Arc<Slice>> {
        self.locked().get(name)?.iter().find_map(Weak::upgrade)
    }

    /// Bytes of all slices that are held.
    pub fn bytes(&self) -> u64 {
        let held = self.locked();
        held.values().flatten().filter_map(Weak::upgrade).map(|slice| slice.bytes.len() as u64).sum()
    }

    fn locked(&self) -> MutexGuard<'_, HashMap<SliceName, Vec<Weak<Slice>>>> {
        locked(&self.0)
    }
}

/// The servers of a host of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerHost {
    /// The host's name in the plan.
    pub name: String,
    /// Its servers, each as `HOST:PORT`; those that stand for several addresses stand for replicas.
    pub servers: Vec<String>,
}

/// A slice that a host's servers hold, and how it is asked for.
#[derive(Clone, Debug)]
pub struct PeerSlice {
    /// Who holds it.
    pub host: PeerHost,
    /// What it is.
    pub name: SliceName,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// One name for the version here that reads it: questions for one version go together.
    pub edition: Arc<str>,
    /// The longest that a lookup waits for rows.
    pub timeout: Duration,
}

/// The servers of other hosts.
pub trait Neighbours: Send + Sync + Debug {
    /// What this server holds for them.
    fn slices(&self) -> &Slices;

    /// The rows of a slice that others hold; nothing is asked yet.
    fn open(&self, slice: &PeerSlice) -> Arc<dyn RowSource>;

    /// Waits until all these slices are held where they should be.
    ///
    /// # Errors
    /// `NotReady` with the host, and what its servers said last, where that takes too long.
    fn wait_for(&self, slices: &[PeerSlice]) -> Result<()>;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn name(rows: [u64; 2]) -> SliceName {
        SliceName { model: "m".into(), table: "t".into(), content: "c".into(), rows, columns: [0, 4] }
    }

    #[test]
    fn a_slice_is_held_as_long_as_somebody_needs_it_and_gives_its_own_rows() {
        let slices = Slices::default();
        let bytes = Buffer::copied(&[1u8, 1, 2, 2, 3, 3]).unwrap();
        let first = slices.hold(name([5, 8]), bytes.clone()).unwrap();
        let again = slices.hold(name([5, 8]), bytes.clone()).unwrap();
        assert_eq!(slices.bytes(), 12);
        drop(again);
        let mut rows = Vec::new();
        let found = slices.get(&name([5, 8])).unwrap();
        found.copy(&[2, 0], &mut rows).unwrap();
        assert_eq!((rows, found.row_bytes()), (vec![3, 3, 1, 1], 2));
        for row in [3, u64::MAX, u64::MAX / 2 + 1] {
            assert!(found.copy(&[row], &mut Vec::new()).is_err(), "{row}");
        }
        drop((first, found));
        assert!(slices.get(&name([5, 8])).is_none() && slices.bytes() == 0);
        for other in [
            name([5, 9]),
            SliceName { content: "d".into(), ..name([5, 8]) },
            SliceName { columns: [0, 8], ..name([5, 8]) },
        ] {
            let kept = slices.hold(name([5, 8]), bytes.clone()).unwrap();
            assert!(slices.get(&other).is_none(), "{other}");
            drop(kept);
        }
        for wrong in [name([5, 5]), name([8, 5]), name([0, 4]), name([0, u64::MAX])] {
            assert!(slices.hold(wrong, bytes.clone()).is_err());
        }
    }
}
