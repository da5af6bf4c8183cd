//! What a cluster has: memory, for those who plan, and sets of rows, for those who keep house.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use redis::{Pipeline, Value, pipe};

use super::cluster::{Cluster, Shared};
use super::layout::RowSet;
use super::node::ClusterNode;
use crate::error::{Error, Result};

/// How long a node may take to say what it has.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a node may take to say how it makes room.
const EVICTION_PATIENCE: Duration = Duration::from_millis(500);
/// Round trips of which the median is taken.
const PINGS: usize = 21;
/// Keys that a node looks through for one answer.
const SCAN_COUNT: usize = 10_000;

/// What a cluster says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Survey {
    /// Nodes that hold rows; replicas do not count.
    pub primaries: u32,
    /// Memory that the smallest primary may fill; where it has no `maxmemory`, that of its machine.
    pub node_bytes: u64,
    /// The median round trip.
    pub round_trip: Duration,
}

/// What a node says of its memory.
pub(super) struct Memory {
    /// Bytes in use.
    pub(super) used: u64,
    /// Bytes that it may use; 0 where nobody has said.
    pub(super) max: u64,
    /// Bytes of its machine.
    system: u64,
    /// Its `maxmemory-policy`.
    policy: String,
}

impl Memory {
    pub(super) async fn of(node: &ClusterNode) -> Result<Self> {
        let mut question = pipe();
        question.cmd("INFO").arg("memory");
        let reply = ask(node, &question).await?.pop();
        let text: String = reply.and_then(|r| redis::from_redis_value(r).ok()).unwrap_or_default();
        let field =
            |name: &str| text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':')).unwrap_or("").trim();
        let number = |name: &str| field(name).parse().unwrap_or(0);
        Ok(Memory {
            used: number("used_memory"),
            max: number("maxmemory"),
            system: number("total_system_memory"),
            policy: field("maxmemory_policy").to_owned(),
        })
    }

    /// Whether the node removes rows to make room: they never expire, so that the `volatile` policies leave them alone.
    fn evicts(&self) -> bool {
        self.max > 0 && self.policy.starts_with("allkeys-")
    }
}

impl Cluster {
    /// Its primaries, their memory and how far away they are.
    ///
    /// # Errors
    /// `Unavailable` where a primary does not answer.
    pub fn survey(&self) -> Result<Survey> {
        let shared = self.shared.clone();
        self.run(async move { survey(&shared).await })?
    }

    /// What is wrong with how its nodes are set up, a line each.
    ///
    /// # Errors
    /// `Internal` alone: nodes that do not answer are none of these.
    pub fn misconfigured(&self) -> Result<Vec<String>> {
        let shared = self.shared.clone();
        self.run(async move { evicting(&shared).await })
    }

    /// Every set of rows that the cluster has something of, in order.
    ///
    /// # Errors
    /// `Unavailable` where a primary does not answer.
    pub fn tables(&self) -> Result<Vec<RowSet>> {
        let shared = self.shared.clone();
        self.run(async move { tables(&shared).await })?
    }
}

/// The primaries that remove rows when their memory is full, a line each.
pub(super) async fn evicting(shared: &Shared) -> Vec<String> {
    let primaries = shared.primaries();
    let asked = primaries.iter().filter(|(node, _)| !node.breaker.is_open()).map(|(node, _)| async move {
        let memory = tokio::time::timeout(EVICTION_PATIENCE, Memory::of(node)).await.ok()?.ok()?;
        let Memory { policy, max, .. } = &memory;
        let line = || {
            format!(
                "remote tier: node {} removes rows once it uses {max} bytes: maxmemory-policy {policy}, expected noeviction",
                node.address
            )
        };
        memory.evicts().then(line)
    });
    join_all(asked).await.into_iter().flatten().collect()
}

async fn ask(node: &ClusterNode, question: &Pipeline) -> Result<Vec<Value>> {
    match tokio::time::timeout(PATIENCE, node.ask(question)).await {
        Ok(Ok(replies)) => Ok(replies),
        Ok(Err(e)) => Err(Error::unavailable(format!("node {}: {e}", node.address))),
        Err(_) => Err(Error::unavailable(format!("node {} does not answer", node.address))),
    }
}

async fn survey(shared: &Arc<Shared>) -> Result<Survey> {
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
        ask(node, &ping).await?;
        round_trips.push(start.elapsed());
    }
    round_trips.sort_unstable();
    let round_trip = round_trips.get(PINGS / 2).copied().unwrap_or_default();
    Ok(Survey { primaries: primaries.len() as u32, node_bytes, round_trip })
}

async fn tables(shared: &Arc<Shared>) -> Result<Vec<RowSet>> {
    let mut found = Vec::new();
    for (node, _) in shared.primaries() {
        let mut cursor = 0u64;
        loop {
            let mut question = pipe();
            let scan = question.cmd("SCAN").arg(cursor).arg("MATCH").arg("sterling:{*}:manifest");
            scan.arg("COUNT").arg(SCAN_COUNT);
            let reply = ask(&node, &question).await?.pop().unwrap_or_default();
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
