//! Manifest of a set of rows in the cluster: one JSON value besides its chunks.
//!
//! A loader first writes the manifest as `loading`, so that an interrupted load can be resumed and readers are informed; as
//! `complete` last, after every chunk was verified; and as `deleting` before the chunks are deleted.

use serde::{Deserialize, Serialize};

use super::layout::{ChunkLayout, ROW_BYTES_MAX, RowSet, TableShape};
use sterling_core::clock::unix_time;
use sterling_core::error::{Error, Result};

const LAYOUT: u32 = 1;
const CHUNK_BYTES_MAX: usize = 1 << 20;
const PARTITIONS_MAX: usize = 4096;

/// State of a set of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TableState {
    /// A load has begun and not ended.
    Loading,
    /// Every row is present.
    Complete,
    /// The rows are being deleted.
    Deleting,
}

impl TableState {
    /// Returns the name for operators.
    pub fn name(self) -> &'static str {
        match self {
            TableState::Loading => "loading",
            TableState::Complete => "complete",
            TableState::Deleting => "deleting",
        }
    }
}

/// Description of a set of rows in the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableManifest {
    pub(super) layout: u32,
    /// State of the set.
    pub state: TableState,
    /// Number of rows.
    pub rows: u64,
    /// Bytes per row.
    pub row_bytes: usize,
    /// Name of the row format.
    pub format: String,
    pub(super) rows_per_chunk: usize,
    pub(super) partitions: usize,
    /// Random number of the load, which seeds all checksums.
    pub(super) load: u64,
    /// XXH3 of all rows in order; 0 until complete.
    pub checksum: u64,
    /// Unix time in seconds at which the last load of the set began or ended; 0 if an earlier release loaded the set.
    #[serde(default)]
    pub loaded: u64,
}

impl TableManifest {
    /// Creates the manifest for the start of a load.
    pub(super) fn begin(shape: &TableShape, load: u64) -> Result<Self> {
        let (rows_per_chunk, partitions) = ChunkLayout::cut(shape)?;
        Ok(TableManifest {
            layout: LAYOUT,
            state: TableState::Loading,
            rows: shape.rows,
            row_bytes: shape.row_bytes,
            format: shape.format.clone(),
            rows_per_chunk,
            partitions,
            load,
            checksum: 0,
            loaded: unix_time().as_secs(),
        })
    }

    pub(super) fn shape(&self) -> TableShape {
        TableShape { rows: self.rows, row_bytes: self.row_bytes, format: self.format.clone() }
    }

    pub(super) fn layout(&self, named: &RowSet) -> ChunkLayout {
        ChunkLayout::new(named, &self.shape(), self.rows_per_chunk, self.partitions)
    }

    /// Rejects a shape other than `expected`; the error names the differences.
    pub(super) fn expect(&self, named: &RowSet, expected: &TableShape) -> Result<()> {
        let mut differs = Vec::new();
        if self.rows != expected.rows {
            differs.push(format!("{} rows, expected {}", self.rows, expected.rows));
        }
        if self.row_bytes != expected.row_bytes {
            differs.push(format!("rows of {} bytes, expected {}", self.row_bytes, expected.row_bytes));
        }
        if self.format != expected.format {
            differs.push(format!("format `{}`, expected `{}`", self.format, expected.format));
        }
        if differs.is_empty() { Ok(()) } else { Err(Error::corrupt(format!("{named}: has {}", differs.join("; ")))) }
    }

    pub(super) fn parse(named: &RowSet, bytes: &[u8]) -> Result<Self> {
        let invalid = |why: String| Error::corrupt(format!("{named}: the manifest is invalid: {why}"));
        let manifest: TableManifest = serde_json::from_slice(bytes).map_err(|e| invalid(e.to_string()))?;
        let TableManifest { layout, rows, row_bytes, rows_per_chunk, partitions, .. } = manifest;
        if layout != LAYOUT {
            return Err(Error::unsupported(format!("{named}: layout {layout}, expected {LAYOUT}")));
        }
        let plausible = rows > 0
            && (1..=ROW_BYTES_MAX).contains(&row_bytes)
            && partitions.is_power_of_two()
            && partitions <= PARTITIONS_MAX
            && (1..=CHUNK_BYTES_MAX / row_bytes).contains(&rows_per_chunk);
        if !plausible {
            return Err(invalid(format!(
                "layout is invalid: {rows} rows of {row_bytes} bytes, {rows_per_chunk} per chunk, {partitions} partitions"
            )));
        }
        Ok(manifest)
    }
}
