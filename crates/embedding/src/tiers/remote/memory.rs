//! Memory of the nodes, and their eviction policy.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use redis::pipe;
use tokio::time::timeout;

use super::node::ClusterNode;
use sterling_core::error::Result;

/// Timeout of a node's answer about its eviction policy.
const POLICY_TIMEOUT: Duration = Duration::from_millis(500);

/// Memory state that a node reports.
pub(super) struct Memory {
    pub(super) used: u64,
    /// Memory limit in bytes; 0 if not configured.
    pub(super) max: u64,
    /// Memory of the node's machine in bytes.
    pub(super) system: u64,
    /// `maxmemory-policy` of the node.
    policy: String,
}

impl Memory {
    pub(super) async fn of(node: &ClusterNode) -> Result<Self> {
        let mut question = pipe();
        question.cmd("INFO").arg("memory");
        let reply = node.answer(&question).await?.pop();
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

    /// Returns whether the node may evict rows. Rows have no expiration, so the `volatile` policies do not evict them.
    fn evicts(&self) -> bool {
        self.max > 0 && self.policy.starts_with("allkeys-")
    }
}

/// Returns a line per primary that evicts rows when its memory is full. `primaries` have the number of their replicas.
pub(super) async fn evicting(primaries: &[(Arc<ClusterNode>, usize)]) -> Vec<String> {
    let requested = primaries.iter().filter(|(node, _)| !node.breaker.is_open()).map(|(node, _)| async move {
        let memory = timeout(POLICY_TIMEOUT, Memory::of(node)).await.ok()?.ok()?;
        let Memory { policy, max, .. } = &memory;
        let line = || {
            format!(
                "remote tier: node {} removes rows once it uses {max} bytes: maxmemory-policy {policy}, expected noeviction",
                node.address
            )
        };
        memory.evicts().then(line)
    });
    join_all(requested).await.into_iter().flatten().collect()
}
