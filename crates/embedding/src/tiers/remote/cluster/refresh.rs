//! Slot map of a cluster: requests and refreshes it, checks which cluster answers, and probes nodes whose breaker is open.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use redis::{Value, cmd, pipe};
use tokio::time::{sleep, timeout};

use super::super::layout::slot_of;
use super::super::manifest::{TableManifest, TableState};
use super::super::memory::evicting;
use super::super::node::{ClusterNode, words};
use super::super::open::OpenSet;
use super::super::slots::{NodeGroup, SlotMap};
use super::{Shared, View};
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;

const REFRESH_PAUSE: Duration = Duration::from_millis(50);
const PROBE_INTERVAL_MAX: Duration = Duration::from_secs(2);

impl Shared {
    /// Requests the slot map from a node.
    async fn slots_of(&self, node: &ClusterNode) -> Result<SlotMap, String> {
        let mut question = pipe();
        question.add_command(cmd("CLUSTER").arg("SLOTS").to_owned());
        let answer = timeout(self.options.connect_timeout, node.ask(&question)).await;
        let slots = match answer {
            Ok(Ok(replies)) => match replies.first() {
                Some(Value::ServerError(e)) => Err(words(e)),
                reply => SlotMap::parse(reply.unwrap_or(&Value::Nil), &node.address).map_err(|e| e.to_string()),
            },
            Ok(Err(e)) => Err(e.to_string()),
            Err(_) => Err(format!("no answer in {} ms", self.options.connect_timeout.as_millis())),
        };
        match slots {
            Ok(slots) if slots.shards.is_empty() => Err(format!("{}: no node owns a slot", node.address)),
            Ok(slots) => Ok(slots),
            Err(e) => Err(format!("{}: {e}", node.address)),
        }
    }

    /// Requests the slot map from all seeds, and accepts the cluster that most seeds report.
    pub(super) async fn begin(&self) -> Result<()> {
        let seeds = self.seeds.iter().map(|seed| self.node(seed)).collect::<Result<Vec<_>>>()?;
        let mut maps = Vec::new();
        let mut last = String::new();
        for answer in join_all(seeds.iter().map(|node| self.slots_of(node))).await {
            match answer {
                Ok(slots) => maps.push(slots),
                Err(why) => last = why,
            }
        }
        let votes = |map: &SlotMap| maps.iter().filter(|other| map.is_of(other)).count();
        // Of clusters with equal votes, the one that the earliest seed reports is accepted.
        match maps.iter().rev().max_by_key(|map| votes(map)) {
            Some(slots) => self.apply_slot_map(slots.clone()),
            None => Err(unknown_owners(&last)),
        }
    }

    /// Requests the slot map from one node after another, healthy nodes first, until a node of this cluster answers. A different
    /// cluster is accepted as a rebuilt one only if it has the rows of all open tables. Without open tables, the seeds decide.
    pub(super) async fn refresh(self: &Arc<Self>) -> Result<()> {
        let open: Vec<Arc<OpenSet>> = locked(&self.open).iter().filter_map(Weak::upgrade).collect();
        if open.is_empty() && self.begin().await.is_ok() {
            return Ok(());
        }
        let view = self.view.load_full();
        let mut known: Vec<Arc<ClusterNode>> = view.shards.iter().flatten().cloned().collect();
        known.sort_by_key(|n| n.breaker.is_open());
        for seed in &self.seeds {
            known.push(self.node(seed)?);
        }
        let mut last = String::new();
        let mut others = Vec::new();
        for node in known {
            match self.slots_of(&node).await {
                Ok(slots) if slots.is_of(&view.slots) => return self.apply_slot_map(slots),
                Ok(slots) => {
                    last = format!("{}: a node of another cluster", node.address);
                    others.push(slots);
                }
                Err(why) => last = why,
            }
        }
        for slots in others.into_iter().filter(|_| !open.is_empty()) {
            if self.has_all(&slots, &open).await {
                tracing::warn!("remote tier: switched to a rebuilt cluster that has the rows of all open tables");
                return self.apply_slot_map(slots);
            }
        }
        Err(unknown_owners(&last))
    }

    /// Returns whether a cluster has the rows of all open sets.
    async fn has_all(&self, slots: &SlotMap, open: &[Arc<OpenSet>]) -> bool {
        for set in open {
            let key = set.named.manifest_key();
            let owner = slots.owner(slot_of(&key)).and_then(|shard| slots.shards[shard].nodes.first());
            let Some(Ok(node)) = owner.map(|address| self.new_node(address)) else { return false };
            let mut question = pipe();
            question.cmd("GET").arg(&key);
            let answer = timeout(self.options.connect_timeout, node.ask(&question)).await;
            let Ok(Ok(replies)) = answer else { return false };
            let Some(Value::BulkString(bytes)) = replies.first() else { return false };
            let manifest = TableManifest::parse(&set.named, bytes);
            if !manifest.is_ok_and(|found| found.state == TableState::Complete && set.has_rows_of(&found)) {
                return false;
            }
        }
        true
    }

    /// Checks for seeds that belong to another cluster, and for nodes that evict rows. Seeds in the slot map are nodes of this
    /// cluster and are not checked.
    async fn check_setup(&self) {
        let view = self.view.load_full();
        let mut troubles = evicting(&self.primaries()).await;
        for seed in self.seeds.iter().filter(|seed| view.slots.nodes().all(|node| node != *seed)) {
            let Ok(node) = self.node(seed) else { continue };
            if self.slots_of(&node).await.is_ok_and(|slots| !slots.is_of(&view.slots)) {
                troubles.push(format!("remote tier: {seed} is a node of another cluster"));
            }
        }
        self.setup.store(Arc::new(troubles));
    }

    fn apply_slot_map(&self, slots: SlotMap) -> Result<()> {
        self.counters.refreshes.fetch_add(1, Ordering::Relaxed);
        if self.view.load().slots == slots {
            return Ok(());
        }
        let nodes_of = |shard: &NodeGroup| shard.nodes.iter().map(|a| self.node(a)).collect::<Result<_>>();
        let shards = slots.shards.iter().map(nodes_of).collect::<Result<Vec<Vec<_>>>>()?;
        let mut nodes = self.nodes.write().unwrap_or_else(PoisonError::into_inner);
        nodes.retain(|address, _| self.seeds.contains(address) || slots.nodes().any(|n| n == address));
        drop(nodes);
        let (count, nodes) = (shards.len(), slots.nodes().count());
        if self.view.load().shards.is_empty() {
            tracing::debug!(shards = count, nodes, "remote tier: received the slot map");
        } else {
            tracing::info!(shards = count, nodes, "remote tier: the slot map has changed");
        }
        self.view.store(Arc::new(View { slots, shards }));
        Ok(())
    }

    /// Returns the number of nodes that do not answer, and updates the metric.
    fn count_silent(&self) -> usize {
        let view = self.view.load();
        let nodes = || view.shards.iter().flatten();
        let silent = nodes().filter(|node| node.breaker.is_open()).count();
        for (state, count) in [("ready", nodes().count() - silent), ("silent", silent)] {
            metrics::gauge!("sterling_remote_nodes", "state" => state).set(count as f64);
        }
        silent
    }

    pub(super) async fn keep_fresh(self: Arc<Self>) {
        loop {
            let unwell = self.count_silent() > 0;
            let period = if unwell { self.options.probe_interval } else { self.options.refresh_interval };
            let is_asked = tokio::select! {
                () = self.refresh.notified() => true,
                () = sleep(period) => false,
            };
            let trouble = self.refresh().await.err().map(|error| Arc::new(error.to_string()));
            match (&trouble, &*self.trouble.load()) {
                (Some(why), None) => {
                    tracing::warn!(%why, "remote tier: slot map refresh failed; the old slot map stays in use")
                }
                (None, Some(_)) => tracing::info!("remote tier: slot map refresh succeeds again"),
                _ => {}
            }
            self.trouble.store(trouble);
            if !is_asked && !unwell {
                self.check_setup().await;
            }
            sleep(REFRESH_PAUSE).await;
        }
    }

    /// Pings a node until the node answers, then closes its breaker. Ends if the node has left the cluster.
    pub(super) async fn probe(self: Arc<Self>, node: Arc<ClusterNode>) {
        let mut ping = pipe();
        ping.cmd("PING");
        let mut pause = self.options.probe_interval;
        loop {
            sleep(pause).await;
            let known = self.nodes.read().unwrap_or_else(PoisonError::into_inner).get(&node.address).cloned();
            if !known.is_some_and(|n| Arc::ptr_eq(&n, &node)) {
                return;
            }
            let answer = timeout(self.options.connect_timeout, node.ask(&ping)).await;
            if let Ok(Ok(replies)) = answer
                && !matches!(replies.first(), None | Some(Value::ServerError(_)))
            {
                tracing::info!(node = %node.address, "remote tier: the node answers again");
                node.trouble.store(None);
                node.breaker.close();
                self.refresh.notify_one();
                return;
            }
            node.disconnect();
            pause = (pause * 2).min(PROBE_INTERVAL_MAX);
        }
    }
}

fn unknown_owners(last: &str) -> Error {
    Error::unavailable(format!("no node of the cluster returned the slot map; the last error was {last}"))
}
