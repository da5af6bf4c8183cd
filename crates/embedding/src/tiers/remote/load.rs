//! Loads a set of rows into the cluster, and deletes it.
//!
//! 1. The manifest is written as `loading` with a new random load id, or an interrupted load is resumed.
//! 2. Group by group, the rows are read once from the source and divided into chunks. A chunk whose digest the cluster already
//!    holds is skipped; every other chunk is written and read back in one round trip, and compared byte for byte.
//! 3. The digests of all chunks are requested again: this detects a node with an eviction policy, or a node that failed over
//!    without a chunk, before requests do.
//! 4. After replicas have caught up, the manifest is written as `complete` with the checksum of all rows.
//!
//! A complete set is immutable: loading the same rows again repairs lost chunks; other rows are rejected before anything is
//! written. Deletion writes `deleting`, removes the chunks, then the manifest. A full node rejects writes; deletion then skips
//! the `deleting` state.

use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use redis::{Pipeline, Value, pipe};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use xxhash_rust::xxh3::Xxh3Default;

use super::cluster::{Cluster, Shared};
use super::layout::{ChunkLayout, DIGEST_BYTES, RowSet, TableShape, slot_of};
use super::manifest::{TableManifest, TableState};
use super::memory::{Memory, evicting};
use super::sets::{QUERY_TIMEOUT, find, stored};
use sterling_core::clock::unix_time;
use sterling_core::error::{Error, Kind, Result};

/// Maximum number of chunks that are written concurrently.
const CHUNKS_IN_FLIGHT: usize = 32;
/// Timeout per chunk, including a failover.
const CHUNK_TIMEOUT: Duration = Duration::from_secs(30);
const REPLICA_WAIT: Duration = Duration::from_secs(10);

/// Progress of a load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadProgress {
    /// Number of rows that are in the cluster.
    pub rows_done: u64,
    /// Number of rows of the table.
    pub rows_total: u64,
    /// Bytes written by this load, checksums included.
    pub bytes_written: u64,
    /// Number of chunks that existed already.
    pub chunks_kept: u64,
}

/// Result of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadReport {
    /// Progress at the end of the load.
    pub progress: LoadProgress,
    /// XXH3 of all rows in order.
    pub checksum: u64,
    /// Number of chunks of the table.
    pub chunks: u64,
    /// True if every shard has a replica, and one replica per shard has acknowledged every write.
    pub is_replicated: bool,
}

/// Loads a set of rows. `source` writes the rows of a range, `[rows, row_bytes]`, into its buffer; ranges are ascending, and
/// a complete set that is loaded again is read twice. After an interruption, the same call resumes the load.
///
/// # Errors
/// If the shape cannot be stored, the source fails, the set exists with other rows or another shape, a node is full
/// ([`Kind::Overloaded`](sterling_core::error::Kind::Overloaded), with the node and its memory use), or the cluster does not
/// answer for long.
pub fn load(
    cluster: &Arc<Cluster>,
    named: &RowSet,
    shape: &TableShape,
    mut source: impl FnMut(Range<u64>, &mut [u8]) -> Result<()>,
    mut progress: impl FnMut(LoadProgress),
) -> Result<LoadReport> {
    let (named, manifest) = begin(cluster, named, shape)?;
    let named = &named;
    let shared = cluster.shared.clone();
    for line in cluster.run(async move { evicting(&shared.primaries()).await })? {
        tracing::warn!("{line}");
    }
    let layout = Arc::new(manifest.layout(named));
    if manifest.state == TableState::Complete {
        let checksum = checksum_of(&layout, &mut source)?;
        if checksum != manifest.checksum {
            return Err(Error::conflict(format!(
                "{named}: exists with other rows (checksum {:016x}, the source has {checksum:016x}); \
                 publish other content, or delete this set first",
                manifest.checksum
            )));
        }
    }
    let mut done = LoadProgress { rows_total: shape.rows, ..LoadProgress::default() };
    let mut checksum = Xxh3Default::new();
    let mut digests = Vec::new();
    for group in 0..layout.groups() {
        let rows = group * layout.group_rows()..((group + 1) * layout.group_rows()).min(shape.rows);
        let mut bytes = vec![0; (rows.end - rows.start) as usize * shape.row_bytes];
        source(rows.clone(), &mut bytes).map_err(|e| e.within(named))?;
        checksum.update(&bytes);
        let job = GroupJob { shared: cluster.shared.clone(), layout: layout.clone(), load: manifest.load, group };
        let wrote = cluster.run(job.write(bytes))?.map_err(|e| e.within(named))?;
        done.rows_done = rows.end;
        done.bytes_written += wrote.bytes_written;
        done.chunks_kept += wrote.chunks_kept;
        digests.push(wrote.digests);
        progress(done);
    }
    let chunks = digests.iter().map(|d| d.len() as u64).sum();
    let job = (cluster.shared.clone(), layout.clone());
    cluster.run(async move { verify_all_chunks(&job.0, &job.1, digests).await })?.map_err(|e| e.within(named))?;
    let shared = cluster.shared.clone();
    let is_replicated = cluster.run(async move { replicated(&shared).await })?;
    let checksum = checksum.digest();
    store(
        cluster,
        named,
        &TableManifest { state: TableState::Complete, checksum, loaded: unix_time().as_secs(), ..manifest },
    )?;
    Ok(LoadReport { progress: done, checksum, chunks, is_replicated })
}

/// Deletes a set of rows; returns true if the set existed. Readers that have the set open see its rows as degraded
/// ([`RowState::Degraded`](crate::tiers::RowState::Degraded)) after the deletion.
///
/// # Errors
/// If the cluster does not answer for long; the same call resumes the deletion.
pub fn delete(cluster: &Arc<Cluster>, named: &RowSet) -> Result<bool> {
    let Some(manifest) = find(cluster, named)? else { return Ok(false) };
    let layout = manifest.layout(named);
    match store(cluster, named, &TableManifest { state: TableState::Deleting, ..manifest }) {
        // A full node rejects this write, but not `UNLINK`, `SREM` and `DEL` below, which free memory.
        Err(e) if e.kind() == Kind::Overloaded => {
            tracing::warn!(error = %e, "node is full; deleting rows regardless of their state")
        }
        marked => marked?,
    }
    let shared = cluster.shared.clone();
    let name = named.clone();
    let removed = cluster.run(async move {
        for partition in 0..layout.partitions() {
            let mut pipeline = Pipeline::new();
            (0..layout.groups()).for_each(|group| {
                pipeline.cmd("UNLINK").arg(layout.key(group, partition));
            });
            run_commands(&shared, layout.slot(partition), &pipeline, CHUNK_TIMEOUT).await?;
        }
        let key = name.sets_key();
        let mut pipeline = pipe();
        pipeline.cmd("SREM").arg(&key).arg(name.tag());
        run_commands(&shared, slot_of(&key), &pipeline, QUERY_TIMEOUT).await?;
        // The manifest is deleted last, because an interrupted deletion needs it to find the remaining chunks.
        let key = name.manifest_key();
        let mut pipeline = pipe();
        pipeline.cmd("DEL").arg(&key);
        run_commands(&shared, slot_of(&key), &pipeline, QUERY_TIMEOUT).await
    })?;
    removed.map(|()| true).map_err(|e| e.within(named))
}

/// Sends commands to the primary of their slot, and returns the first error reply as an error.
async fn run_commands(shared: &Arc<Shared>, slot: u16, pipeline: &Pipeline, patience: Duration) -> Result<()> {
    let replies = shared.on_primary(slot, pipeline, patience).await?;
    reject_errors(shared, slot, &replies).await
}

/// Returns the existing set with this content and shape, or a new set, with its manifest.
fn begin(cluster: &Arc<Cluster>, named: &RowSet, shape: &TableShape) -> Result<(RowSet, TableManifest)> {
    let Some((named, manifest)) = stored(cluster, named)? else {
        let manifest = TableManifest::begin(shape, RandomState::new().hash_one(named)).map_err(|e| e.within(named))?;
        store(cluster, named, &manifest)?;
        return Ok((named.clone(), manifest));
    };
    if manifest.state == TableState::Deleting {
        return Err(Error::conflict(format!("{named}: is being deleted; repeat the deletion to finish it")));
    }
    if let Err(differs) = manifest.expect(&named, shape) {
        return Err(Error::conflict(format!("{differs}; delete it first, or publish other content")));
    }
    // The new load time keeps cleanup from treating rows that are being loaded as old rows.
    let manifest = TableManifest { loaded: unix_time().as_secs(), ..manifest };
    store(cluster, &named, &manifest)?;
    Ok((named, manifest))
}

fn store(cluster: &Cluster, named: &RowSet, manifest: &TableManifest) -> Result<()> {
    let text = serde_json::to_string(manifest).map_err(|e| Error::internal(format!("{named}: manifest: {e}")))?;
    let shared = cluster.shared.clone();
    let name = named.clone();
    cluster
        .run(async move {
            let key = name.sets_key();
            let mut pipeline = pipe();
            pipeline.cmd("SADD").arg(&key).arg(name.tag());
            run_commands(&shared, slot_of(&key), &pipeline, QUERY_TIMEOUT).await?;
            let key = name.manifest_key();
            let mut pipeline = pipe();
            pipeline.cmd("SET").arg(&key).arg(text);
            run_commands(&shared, slot_of(&key), &pipeline, QUERY_TIMEOUT).await
        })?
        .map_err(|e| e.within(named))
}

fn checksum_of(layout: &ChunkLayout, source: &mut impl FnMut(Range<u64>, &mut [u8]) -> Result<()>) -> Result<u64> {
    let mut checksum = Xxh3Default::new();
    for group in 0..layout.groups() {
        let rows = group * layout.group_rows()..((group + 1) * layout.group_rows()).min(layout.rows);
        let mut bytes = vec![0; (rows.end - rows.start) as usize * layout.row_bytes];
        source(rows, &mut bytes)?;
        checksum.update(&bytes);
    }
    Ok(checksum.digest())
}

/// Result of the chunks of a group.
#[derive(Default)]
struct ChunkOutcome {
    bytes_written: u64,
    chunks_kept: u64,
    /// Length of the chunk in bytes and its digest, per partition.
    digests: Vec<(usize, [u8; DIGEST_BYTES])>,
}

#[derive(Clone)]
struct GroupJob {
    shared: Arc<Shared>,
    layout: Arc<ChunkLayout>,
    load: u64,
    group: u64,
}

impl GroupJob {
    async fn write(self, group_bytes: Vec<u8>) -> Result<ChunkOutcome> {
        let group_bytes = Arc::new(group_bytes);
        let permits = Arc::new(Semaphore::new(CHUNKS_IN_FLIGHT));
        let mut tasks = JoinSet::new();
        for partition in 0..self.layout.partitions() {
            let (job, group_bytes, permits) = (self.clone(), group_bytes.clone(), permits.clone());
            tasks.spawn(async move {
                let _permit = permits.acquire().await;
                job.write_chunk(partition, &group_bytes)
                    .await
                    .map(|(wrote, size, digest)| (partition, wrote, size, digest))
            });
        }
        let mut sum =
            ChunkOutcome { digests: vec![(0, [0; DIGEST_BYTES]); self.layout.partitions()], ..ChunkOutcome::default() };
        while let Some(chunk) = tasks.join_next().await {
            let (partition, wrote, size, digest) =
                chunk.map_err(|e| Error::internal(format!("a task of the load ended unexpectedly: {e}")))??;
            sum.bytes_written += if wrote { size as u64 } else { 0 };
            sum.chunks_kept += u64::from(!wrote);
            sum.digests[partition] = (size, digest);
        }
        Ok(sum)
    }

    /// Writes a chunk and reads it back, unless it exists. Returns whether it was written, its length in bytes and its digest.
    async fn write_chunk(&self, partition: usize, group_bytes: &[u8]) -> Result<(bool, usize, [u8; DIGEST_BYTES])> {
        let chunk = self.layout.encode(self.load, self.group, partition, group_bytes);
        let (rows, digest) = chunk.split_last_chunk::<DIGEST_BYTES>().expect("a chunk ends with its digest");
        let (key, slot) = (self.layout.key(self.group, partition), self.layout.slot(partition));
        let replies = self.shared.on_primary(slot, &digest_question(&key, rows.len()), CHUNK_TIMEOUT).await?;
        if holds(&replies, digest) {
            return Ok((false, chunk.len(), *digest));
        }
        let mut pipeline = pipe();
        pipeline.cmd("SET").arg(&key).arg(&chunk[..]);
        pipeline.cmd("GET").arg(&key);
        let replies = self.shared.on_primary(slot, &pipeline, CHUNK_TIMEOUT).await?;
        reject_errors(&self.shared, slot, &replies).await?;
        match replies.last() {
            Some(Value::BulkString(came)) if *came == chunk => Ok((true, chunk.len(), *digest)),
            _ => Err(Error::corrupt(format!("chunk {key}: the bytes read back differ from the written bytes"))),
        }
    }
}

/// Requests the bytes of a chunk from `offset` to its end. For a chunk of another length, these bytes differ in value
/// or number.
fn digest_question(key: &str, offset: usize) -> Pipeline {
    let mut pipeline = pipe();
    pipeline.cmd("GETRANGE").arg(key).arg(offset).arg(-1);
    pipeline
}

fn holds(replies: &[Value], digest: &[u8]) -> bool {
    matches!(replies, [Value::BulkString(came)] if came == digest)
}

async fn verify_all_chunks(
    shared: &Arc<Shared>,
    layout: &ChunkLayout,
    digests: Vec<Vec<(usize, [u8; DIGEST_BYTES])>>,
) -> Result<()> {
    for partition in 0..layout.partitions() {
        let mut pipeline = Pipeline::with_capacity(digests.len());
        for (group, chunks) in digests.iter().enumerate() {
            let (size, _) = chunks[partition];
            pipeline.cmd("GETRANGE").arg(layout.key(group as u64, partition)).arg(size - DIGEST_BYTES).arg(-1);
        }
        let replies = shared.on_primary(layout.slot(partition), &pipeline, CHUNK_TIMEOUT).await?;
        for (group, (reply, chunks)) in replies.iter().zip(&digests).enumerate() {
            if !matches!(reply, Value::BulkString(came) if *came == chunks[partition].1) {
                let key = layout.key(group as u64, partition);
                return Err(Error::unavailable(format!(
                    "chunk {key} was written and is missing now: is the nodes' maxmemory-policy `noeviction`? Loading \
                     again writes missing chunks"
                )));
            }
        }
    }
    Ok(())
}

/// Waits until a replica of each shard has the writes of its primary. Returns false if a shard has no replica or none has them.
async fn replicated(shared: &Arc<Shared>) -> bool {
    let mut all = true;
    for (primary, replicas) in shared.primaries() {
        if replicas == 0 {
            all = false;
            continue;
        }
        let mut pipeline = pipe();
        pipeline.cmd("WAIT").arg(1).arg(REPLICA_WAIT.as_millis() as u64);
        let waited = tokio::time::timeout(REPLICA_WAIT * 2, primary.ask(&pipeline)).await;
        let acknowledged = matches!(&waited, Ok(Ok(replies)) if matches!(replies[..], [Value::Int(n)] if n > 0));
        if !acknowledged {
            tracing::warn!(node = %primary.address, "remote tier: no replica has acknowledged the load");
        }
        all &= acknowledged;
    }
    all
}

/// Returns the first error reply as an error. For a full node, the error states the node's memory use.
async fn reject_errors(shared: &Arc<Shared>, slot: u16, replies: &[Value]) -> Result<()> {
    let Some(error) = replies.iter().find_map(|r| if let Value::ServerError(e) = r { Some(e) } else { None }) else {
        return Ok(());
    };
    let node = shared.primary_of(slot);
    let address = node.as_ref().map(|n| n.address.to_string()).unwrap_or_default();
    if error.code() != "OOM" {
        return Err(Error::unavailable(format!("node {address} rejected a write: {error}")));
    }
    let memory = match node {
        Some(node) => Memory::of(&node).await.ok(),
        None => None,
    };
    let uses = memory.map_or(String::new(), |m| format!(" uses {} of its maxmemory of {} bytes", m.used, m.max));
    Err(Error::overloaded(format!(
        "the cluster is full: node {address}{uses}; remove old rows (`sterling remote --prune STORE`) or add nodes, then load again to resume"
    )))
}
