//! Health checks of the rows of open tables, so that lost rows are reported before a request needs them.
//!
//! A check reads one row of one chunk per partition, so that every node that holds rows is read, and one row of each chunk that
//! was damaged before. A check reads like requests do, with replicas and redirections, so it reports the problems of requests.
//! Checks run every [`refresh_interval`](super::ClusterOptions::refresh_interval), and up to once per second after a request did
//! not get a row and while rows are unreadable.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio::time::sleep;

use super::cluster::{Cluster, Shared};
use super::layout::RowSet;
use super::manifest::TableState;
use super::open::{Cause, ChunkPlace, OpenSet};
use super::read::{Reader, read};
use super::sets::{complete, find_async};
use super::slots::Address;
use sterling_core::error::Result;
use sterling_core::locks::locked;

/// Interval of checks while rows are unreadable.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Timeout of a check.
const CHECK_TIMEOUT: Duration = Duration::from_millis(500);
/// Percentage of requested rows that may be degraded between two checks before a problem is reported.
const DEGRADED_PERCENT_MAX: u64 = 1;
/// Log interval of a lasting problem.
const LOG_EVERY: Duration = Duration::from_secs(60);
/// Number of rows that [`verify`] requests at a time, and the timeout of such a request.
const VERIFIED_TOGETHER: usize = 4096;
const VERIFY_PATIENCE: Duration = Duration::from_secs(3);

/// Readability of a set's rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Number of rows of the checked chunks; one row per chunk was read.
    pub rows: u64,
    /// Number of rows of chunks whose read row was unreadable, by cause: `missing`, `corrupt`, `refused`, `late`, `down`.
    pub unreadable: BTreeMap<&'static str, u64>,
    /// Messages of nodes that did not serve a row.
    pub faults: BTreeMap<Address, String>,
}

impl Verified {
    /// Returns the number of unreadable rows.
    pub fn unreadable_rows(&self) -> u64 {
        self.unreadable.values().sum()
    }

    /// Returns a description of the problem; `None` if all rows are readable.
    pub fn trouble(&self) -> Option<String> {
        let rows = self.unreadable_rows();
        if rows == 0 {
            return None;
        }
        let causes: Vec<String> = self.unreadable.iter().map(|(cause, rows)| format!("{rows} {cause}")).collect();
        let faults: String = self.faults.iter().map(|(address, why)| format!("; node {address}: {why}")).collect();
        let lost = [Cause::Missing, Cause::Corrupt].iter().any(|cause| self.unreadable.contains_key(cause.name()));
        let help = if lost { "; `sterling remote --load` restores lost rows" } else { "" };
        Some(format!("{rows} of {} sampled rows cannot be read ({}){faults}{help}", self.rows, causes.join(", ")))
    }

    fn add(&mut self, other: Verified) {
        self.rows += other.rows;
        other.unreadable.into_iter().for_each(|(cause, rows)| *self.unreadable.entry(cause).or_default() += rows);
        self.faults.extend(other.faults);
    }
}

/// Reads a row of every chunk of a complete set, and counts the rows of unreadable chunks.
///
/// # Errors
/// `NotReady` if the set does not exist or is incomplete, `Unavailable` if its manifest is unreadable.
pub fn verify(cluster: &Cluster, named: &RowSet) -> Result<Verified> {
    verify_groups(cluster, named, u64::MAX)
}

/// Reads a row of the first chunk of each partition of a complete set, and counts the rows of unreadable chunks.
///
/// # Errors
/// As [`verify`].
pub fn sample(cluster: &Cluster, named: &RowSet) -> Result<Verified> {
    verify_groups(cluster, named, 1)
}

fn verify_groups(cluster: &Cluster, named: &RowSet, groups: u64) -> Result<Verified> {
    let (named, manifest) = complete(cluster, named)?;
    let set = Arc::new(OpenSet::new(named, &manifest));
    let layout = &set.layout;
    let chunks: Vec<ChunkPlace> = (0..layout.groups().min(groups))
        .flat_map(|group| (0..layout.partitions()).map(move |partition| (group, partition)))
        .filter(|(group, partition)| layout.chunk_rows(*group, *partition) > 0)
        .map(|(group, partition)| (group, partition as u32))
        .collect();
    let mut sum = Verified::default();
    for chunks in chunks.chunks(VERIFIED_TOGETHER) {
        let (shared, set, chunks) = (cluster.shared.clone(), set.clone(), chunks.to_vec());
        let (found, _) = cluster.run(async move { read_chunks(&shared, &set, &chunks, VERIFY_PATIENCE).await })?;
        sum.add(found);
    }
    Ok(sum)
}

/// Reads a row of each chunk; also returns the damaged chunks.
async fn read_chunks(
    shared: &Arc<Shared>,
    set: &OpenSet,
    chunks: &[ChunkPlace],
    patience: Duration,
) -> (Verified, BTreeSet<ChunkPlace>) {
    let layout = &set.layout;
    let rows: Vec<u64> = chunks
        .iter()
        .map(|&(group, partition)| {
            let partition = partition as usize;
            layout.row_of(group, partition, layout.chunk_rows(group, partition) / 2)
        })
        .collect();
    let places: Vec<_> = rows.iter().map(|&row| layout.place(row)).collect();
    let came = read(shared, layout, &places, Instant::now() + patience, Reader::Watch).await;
    let mut found = Verified { faults: came.faults, ..Verified::default() };
    let mut damaged = BTreeSet::new();
    for ((&chunk, &row), answer) in chunks.iter().zip(&rows).zip(&came.answers) {
        let of_chunk = layout.chunk_rows(chunk.0, chunk.1 as usize) as u64;
        found.rows += of_chunk;
        if let Err(cause) = set.accept(row, answer) {
            *found.unreadable.entry(cause.name()).or_default() += of_chunk;
            damaged.extend(cause.is_lost().then_some(chunk));
        }
    }
    (found, damaged)
}

/// Checks a set once and records the result in the set. Returns the result, and the number of rows that requests did not get
/// since the last check.
///
/// Each load of rows into the cluster has a random number. If the manifest was lost and the rows were loaded again, the set
/// of rows reads those of the new load.
pub(super) async fn look(shared: &Arc<Shared>, set: &OpenSet, turn: u64) -> (Verified, u64) {
    let chunks = set.due(turn);
    let (mut found, mut damaged) = read_chunks(shared, set, &chunks, CHECK_TIMEOUT).await;
    let mut troubles = Vec::new();
    if !damaged.is_empty() {
        // Another node may own the slots of the damaged chunks by now.
        shared.request_owners();
        match find_async(shared, &set.named, CHECK_TIMEOUT).await {
            Ok(Some(manifest)) if manifest.state != TableState::Complete => {
                troubles.push(format!("{}: the state of the rows is {}", set.named, manifest.state.name()));
            }
            Ok(Some(manifest)) if set.has_rows_of(&manifest) => {
                if manifest.load != set.load() {
                    set.follow(&manifest);
                    (found, damaged) = read_chunks(shared, set, &chunks, CHECK_TIMEOUT).await;
                }
            }
            Ok(Some(_)) => {
                troubles.push(format!("{}: the cluster has rows with another checksum under this name", set.named))
            }
            Ok(None) => troubles.push(format!("{}: not in the cluster any more", set.named)),
            // The check of the rows reports the problem.
            Err(error) => tracing::debug!(%error, "remote tier: a manifest cannot be read"),
        }
    }
    set.looked(&chunks, &damaged, found.unreadable_rows() as f64 / found.rows.max(1) as f64);
    let (requested, degraded) = set.take_served();
    match found.trouble() {
        Some(why) => troubles.push(format!("{}: {why}", set.named)),
        None if degraded * 100 > requested * DEGRADED_PERCENT_MAX => {
            troubles
                .push(format!("{}: {degraded} of the last {requested} requested rows were late or missing", set.named));
        }
        None => {}
    }
    set.troubles.store(Arc::new(troubles));
    export(shared, &set.named.label());
    (found, degraded)
}

/// Exports the unreadable fraction of a table's rows: the highest fraction of its open sets.
fn export(shared: &Shared, label: &str) {
    let open = locked(&shared.open);
    let of_table = open.iter().filter_map(Weak::upgrade).filter(|set| set.named.label() == label);
    let worst = of_table.map(|set| set.unreadable()).fold(0.0, f64::max);
    drop(open);
    metrics::gauge!("sterling_remote_unreadable_ratio", "remote_table" => label.to_owned()).set(worst);
}

/// Checks a set periodically as long as it is open.
pub(super) async fn watch(shared: Arc<Shared>, set: Weak<OpenSet>, wake: Arc<Notify>, label: String) {
    let mut log = TroubleLog::default();
    let mut turn = 0;
    while let Some(is_well) = set.upgrade().map(|set| log.log_changes(&set)) {
        if is_well {
            tokio::select! {
                () = wake.notified() => {}
                () = sleep(shared.options.refresh_interval) => {}
            }
        }
        turn += 1;
        let Some(open) = set.upgrade() else { break };
        log.degraded += look(&shared, &open, turn).await.1;
        log.log_changes(&open);
        drop(open);
        sleep(CHECK_INTERVAL).await;
    }
    locked(&shared.open).retain(|set| set.strong_count() > 0);
    export(&shared, &label);
}

/// Logs the start, continuation and end of a problem: one line for all requests affected since the last line.
#[derive(Default)]
struct TroubleLog {
    /// Rows that requests did not get since the last log line.
    degraded: u64,
    /// Time of the last log line, while the problem lasts.
    logged: Option<Instant>,
}

impl TroubleLog {
    /// Logs if needed, and returns whether the set is healthy.
    fn log_changes(&mut self, set: &OpenSet) -> bool {
        let troubles = set.troubles.load();
        let (table, rows_degraded) = (&set.named, self.degraded);
        if troubles.is_empty() {
            if self.logged.take().is_some() {
                tracing::info!(%table, rows_degraded, "remote tier: all rows are readable again");
                self.degraded = 0;
            }
        } else if self.logged.is_none_or(|at| at.elapsed() >= LOG_EVERY) {
            tracing::warn!(%table, rows_degraded, troubles = troubles.join(" | "), "remote tier: rows are unreadable or degraded");
            *self = TroubleLog { degraded: 0, logged: Some(Instant::now()) };
        }
        troubles.is_empty()
    }
}

impl Cluster {
    /// Returns conditions that need an operator's attention although requests are answered, one per line.
    pub fn troubles(&self) -> Vec<String> {
        let shared = &self.shared;
        let mut troubles = BTreeSet::new();
        troubles.extend(shared.trouble.load().iter().map(|why| format!("remote tier: {why}")));
        troubles.extend(shared.setup.load().iter().cloned());
        for node in shared.view.load().shards.iter().flatten().filter(|node| node.breaker.is_open()) {
            let why = node.trouble.load();
            let why = why.as_ref().map_or("no answer", |why| why.as_str());
            troubles.insert(format!("remote tier: node {} does not answer: {why}", node.address));
        }
        let open: Vec<Arc<OpenSet>> = locked(&shared.open).iter().filter_map(Weak::upgrade).collect();
        troubles.extend(open.iter().flat_map(|set| set.troubles.load().iter().cloned().collect::<Vec<_>>()));
        troubles.into_iter().collect()
    }
}
