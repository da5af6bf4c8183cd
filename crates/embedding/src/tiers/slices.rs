//! Slices of tables that one server holds for other servers, and requests for slices that other servers hold.
//!
//! A [`Slice`] is named by its content, not by its holder: the table, the checksum of the file in which the table was published,
//! the slice's rows and columns. Slices of the same name have the same bytes, so rows of two versions never mix in one answer.
//! Servers whose versions have the same tables under other version numbers, as after merges or with shards, still find each
//! other's slices.

use std::collections::HashMap;
use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use super::RowSource;
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use sterling_kernels::buffer::Buffer;

/// Name of a slice of a table, by content.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SliceName {
    /// Name of the model.
    pub model: String,
    /// Name of the table.
    pub table: String,
    /// Checksum of the file that holds the complete table, from the manifest.
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
    /// Returns the number of rows.
    pub fn len(&self) -> u64 {
        self.rows[1].saturating_sub(self.rows[0])
    }

    /// Returns true if there are no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Rows of a slice in this process's memory, served to other servers for the lifetime of this value.
#[derive(Debug)]
pub struct Slice {
    bytes: Buffer<u8>,
    row_bytes: usize,
}

impl Slice {
    /// Returns the bytes per row.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Appends rows to `to`; row indices count from the slice's first row.
    ///
    /// # Errors
    /// `Invalid` for a row outside of the slice.
    pub fn copy(&self, rows: &[u64], to: &mut Vec<u8>) -> Result<()> {
        to.reserve(rows.len() * self.row_bytes);
        for row in rows {
            let start = usize::try_from(*row).ok().and_then(|row| row.checked_mul(self.row_bytes));
            let bytes = start.and_then(|start| self.bytes.get(start..start.checked_add(self.row_bytes)?));
            let held = self.bytes.len() / self.row_bytes;
            to.extend_from_slice(
                bytes.ok_or_else(|| Error::invalid(format!("got row {row}, expected less than {held}")))?,
            );
        }
        Ok(())
    }
}

/// Slices that a server holds.
#[derive(Debug, Default)]
pub struct Slices(Mutex<HashMap<SliceName, Vec<Weak<Slice>>>>);

impl Slices {
    /// Serves rows to other servers until the returned slice is dropped.
    ///
    /// # Errors
    /// `Invalid` if the number of bytes does not match the name.
    pub fn hold(&self, name: SliceName, bytes: Buffer<u8>) -> Result<Arc<Slice>> {
        let rows = usize::try_from(name.len()).unwrap_or(usize::MAX);
        let row_bytes = bytes.len().checked_div(rows).unwrap_or(0);
        if row_bytes == 0 || row_bytes.checked_mul(rows) != Some(bytes.len()) {
            return Err(Error::invalid(format!(
                "{name}: got {} bytes, expected a multiple of {rows}, the number of rows",
                bytes.len()
            )));
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

    /// Returns the slice with this name, if this server holds it.
    pub fn get(&self, name: &SliceName) -> Option<Arc<Slice>> {
        self.locked().get(name)?.iter().find_map(Weak::upgrade)
    }

    /// Returns the bytes of all held slices.
    pub fn bytes(&self) -> u64 {
        let held = self.locked();
        held.values().flatten().filter_map(Weak::upgrade).map(|slice| slice.bytes.len() as u64).sum()
    }

    fn locked(&self) -> MutexGuard<'_, HashMap<SliceName, Vec<Weak<Slice>>>> {
        locked(&self.0)
    }
}

/// Servers of one host of a placement plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerHost {
    /// Name of the host in the plan.
    pub name: String,
    /// Servers as `HOST:PORT`; several addresses are replicas.
    pub servers: Vec<String>,
}

/// A slice that a host's servers hold, and its request parameters.
#[derive(Clone, Debug)]
pub struct PeerSlice {
    /// Host that holds the slice.
    pub host: PeerHost,
    /// Name of the slice.
    pub name: SliceName,
    /// Bytes per row.
    pub row_bytes: usize,
    /// Identifier of the local version that reads the slice: requests for one version are batched.
    pub edition: Arc<str>,
    /// Maximum time that a lookup waits for rows.
    pub timeout: Duration,
}

/// The servers of other hosts.
pub trait Neighbours: Send + Sync + Debug {
    /// Returns the slices that this server holds for other hosts.
    fn slices(&self) -> &Slices;

    /// Returns a source of the rows of a slice that other servers hold, without sending a request.
    fn open(&self, slice: &PeerSlice) -> Arc<dyn RowSource>;

    /// Waits until the servers of each slice's host hold the slice.
    ///
    /// # Errors
    /// `NotReady` with the host, and the last message of its servers, after a timeout.
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
    fn slices_stay_loaded_while_used_and_return_their_own_rows() {
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
            let retained = slices.hold(name([5, 8]), bytes.clone()).unwrap();
            assert!(slices.get(&other).is_none(), "{other}");
            drop(retained);
        }
        for invalid in [name([5, 5]), name([8, 5]), name([0, 4]), name([0, u64::MAX])] {
            assert!(slices.hold(invalid, bytes.clone()).is_err());
        }
    }
}
