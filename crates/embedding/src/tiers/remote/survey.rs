//! Statistics of a cluster: memory, for planning, and sets of rows, for cleanup.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::pipe;

use super::cluster::{Cluster, Shared};
use super::layout::RowSet;
use super::memory::{Memory, evicting};
use sterling_core::error::{Error, Result};

/// Number of measured round trips, of which the median counts.
const PINGS: usize = 21;
/// Number of keys per `SCAN` call.
const SCAN_COUNT: usize = 10_000;

/// Statistics that a cluster reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterStatistics {
    /// Nodes that hold rows, without replicas.
    pub primaries: u32,
    /// Memory limit of the smallest primary; without a `maxmemory`, the memory of the primary's machine.
    pub node_bytes: u64,
    /// Median round trip.
    pub round_trip: Duration,
}

impl Cluster {
    /// Returns the number of primaries, their memory and the round trip time.
    ///
    /// # Errors
    /// `Unavailable` if a primary does not answer.
    pub fn survey(&self) -> Result<ClusterStatistics> {
        let shared = self.shared.clone();
        self.run(async move { survey(&shared).await })?
    }

    /// Returns configuration problems of the cluster's nodes, one per line.
    ///
    /// # Errors
    /// `Internal` only: nodes that do not answer are skipped.
    pub fn misconfigured(&self) -> Result<Vec<String>> {
        let shared = self.shared.clone();
        self.run(async move { evicting(&shared.primaries()).await })
    }

    /// Returns every set of rows that the cluster has data of, in order.
    ///
    /// # Errors
    /// `Unavailable` if a primary does not answer.
    pub fn tables(&self) -> Result<Vec<RowSet>> {
        let shared = self.shared.clone();
        self.run(async move { tables(&shared).await })?
    }
}

async fn survey(shared: &Arc<Shared>) -> Result<ClusterStatistics> {
    let primaries = shared.primaries();
    let (mut node_bytes, mut round_trips) = (u64::MAX, Vec::with_capacity(PINGS));
    for (node, _) in &primaries {
        let memory = Memory::of(node).await?;
        node_bytes = node_bytes.min(if memory.max > 0 { memory.max } else { memory.system });
    }
    let mut ping = pipe();
    ping.cmd("PING");
    for (node, _) in primaries.iter().cycle().take(PINGS) {
        let start = Instant::now();
        node.answer(&ping).await?;
        round_trips.push(start.elapsed());
    }
    round_trips.sort_unstable();
    let round_trip = round_trips.get(PINGS / 2).copied().unwrap_or_default();
    Ok(ClusterStatistics { primaries: primaries.len() as u32, node_bytes, round_trip })
}

async fn tables(shared: &Arc<Shared>) -> Result<Vec<RowSet>> {
    let mut found = Vec::new();
    for (node, _) in shared.primaries() {
        let mut cursor = 0u64;
        loop {
            let mut question = pipe();
            let scan = question.cmd("SCAN").arg(cursor).arg("MATCH").arg("sterling:{*}:manifest");
            scan.arg("COUNT").arg(SCAN_COUNT);
            let reply = node.answer(&question).await?.pop().unwrap_or_default();
            let (next, keys): (u64, Vec<String>) = redis::from_redis_value(reply)
                .map_err(|e| Error::unavailable(format!("node {}: SCAN: {e}", node.address)))?;
            found.extend(keys.iter().filter_map(|key| RowSet::of_manifest_key(key)));
            cursor = next;
            if cursor == 0 {
                break;
            }
        }
    }
    found.sort_unstable();
    found.dedup();
    Ok(found)
}
