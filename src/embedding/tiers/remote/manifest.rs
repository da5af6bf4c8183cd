//! What a table version in the cluster says of itself: one JSON value beside its chunks.
//!
//! A loader writes it first as `loading`, so that an interrupted load can be taken up and a reader is told; as `complete` last,
//! after every chunk was seen to be there; and as `deleting` before the chunks go.

use redis::{Value, pipe};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

use super::cluster::{Cluster, Shared};
use super::layout::{ChunkLayout, ROW_BYTES_MAX, TableShape, TableVersion, slot_of};
use crate::error::{Error, Result};

const LAYOUT: u32 = 1;
const CHUNK_BYTES_MAX: usize = 1 << 20;
const PARTITIONS_MAX: usize = 4096;
/// How long questions about a table, which no request waits for, may take while the cluster rearranges itself.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// What may be done with a table version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TableState {
    /// A load has begun and not ended.
    Loading,
    /// Every row is there.
    Complete,
    /// Its rows are being removed.
    Deleting,
}

/// The description of a table version in the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableManifest {
    pub(super) layout: u32,
    /// What may be done with it.
    pub state: TableState,
    /// Rows.
    pub rows: u64,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// Name of the row format.
    pub format: String,
    pub(super) rows_per_chunk: usize,
    pub(super) partitions: usize,
    /// Random number of the load, which seeds all checks.
    pub(super) load: u64,
    /// XXH3 of all rows in order; 0 until complete.
    pub checksum: u64,
}

impl TableManifest {
    /// The manifest that begins a load.
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
        })
    }

    pub(super) fn shape(&self) -> TableShape {
        TableShape { rows: self.rows, row_bytes: self.row_bytes, format: self.format.clone() }
    }

    pub(super) fn layout(&self, named: &TableVersion) -> ChunkLayout {
        ChunkLayout::new(named, &self.shape(), self.rows_per_chunk, self.partitions)
    }

    /// Refuses another shape than the expected one, naming what differs.
    pub(super) fn expect(&self, named: &TableVersion, expected: &TableShape) -> Result<()> {
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

    fn parse(named: &TableVersion, bytes: &[u8]) -> Result<Self> {
        let wrong = |why: String| Error::corrupt(format!("{named}: its manifest is wrong: {why}"));
        let manifest: TableManifest = serde_json::from_slice(bytes).map_err(|e| wrong(e.to_string()))?;
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
            return Err(wrong(format!(
                "{rows} rows of {row_bytes} bytes, {rows_per_chunk} a chunk, {partitions} partitions"
            )));
        }
        Ok(manifest)
    }
}

/// The manifest of a version, where there is one.
///
/// # Errors
/// Where the cluster does not answer or the manifest is broken.
pub fn find(cluster: &Cluster, named: &TableVersion) -> Result<Option<TableManifest>> {
    let (shared, named) = (cluster.shared.clone(), named.clone());
    cluster.run(async move { find_async(&shared, &named).await })?
}

pub(super) async fn find_async(shared: &Arc<Shared>, named: &TableVersion) -> Result<Option<TableManifest>> {
    let key = named.manifest_key();
    let mut question = pipe();
    question.cmd("GET").arg(&key);
    let reply = shared.on_primary(slot_of(&key), &question, PATIENCE).await.map_err(|e| e.within(named))?.pop();
    match reply {
        Some(Value::Nil) => Ok(None),
        Some(Value::BulkString(bytes)) => TableManifest::parse(named, &bytes).map(Some),
        Some(Value::ServerError(e)) => Err(Error::unavailable(format!("{named}: {e}"))),
        other => Err(Error::corrupt(format!("{named}: its manifest is no string but {other:?}"))),
    }
}

/// Version numbers of the table that the cluster has something of, in rising order.
///
/// # Errors
/// Where the cluster does not answer.
pub fn versions(cluster: &Cluster, named: &TableVersion) -> Result<Vec<u64>> {
    let (shared, key, named) = (cluster.shared.clone(), named.versions_key(), named.clone());
    let mut question = pipe();
    question.cmd("SMEMBERS").arg(&key);
    let reply = cluster.run(async move { shared.on_primary(slot_of(&key), &question, PATIENCE).await })??.pop();
    let reply = reply.unwrap_or_default();
    let members = match reply {
        Value::Array(members) | Value::Set(members) => members,
        other => return Err(Error::corrupt(format!("{named}: its list of versions is no set but {other:?}"))),
    };
    let number = |member: &Value| redis::from_redis_value_ref::<u64>(member).ok();
    let mut versions: Vec<u64> = members.iter().filter_map(number).collect();
    versions.sort_unstable();
    Ok(versions)
}

/// The complete manifest of the version a reader wants.
pub(super) fn open(cluster: &Cluster, named: &TableVersion, expected: &TableShape) -> Result<TableManifest> {
    let Some(manifest) = find(cluster, named)? else {
        let others = versions(cluster, named)?;
        let others = if others.is_empty() { "none".to_owned() } else { format!("{others:?}") };
        return Err(Error::not_found(format!("{named}: not in the cluster; versions there: {others}")));
    };
    match manifest.state {
        TableState::Complete => manifest.expect(named, expected)?,
        TableState::Loading => return Err(Error::not_ready(format!("{named}: its load has not ended"))),
        TableState::Deleting => return Err(Error::not_found(format!("{named}: is being deleted"))),
    }
    Ok(manifest)
}
