//! Version over all of its shards, ready to be queried.

use std::sync::Arc;

use super::client::Client;
use super::editions::Edition;
use super::inquiry::ReplicaGroup;

/// Version over all of its shards, with the servers of each.
pub struct ShardedVersion {
    pub(super) edition: Edition<Arc<Client>>,
    pub(super) homes: Vec<ReplicaGroup>,
}

impl ShardedVersion {
    /// Returns the number of the version.
    pub fn version(&self) -> u64 {
        self.edition.version
    }

    /// Returns the hash of the version's bytes.
    pub fn digest(&self) -> &str {
        &self.edition.digest
    }

    /// Returns whether `other` is the same version with the same bytes, regardless of its servers.
    pub fn is_same(&self, other: &ShardedVersion) -> bool {
        (self.version(), self.digest()) == (other.version(), other.digest())
    }

    /// Returns the number of shards; 1 for an unsharded version.
    pub fn shards(&self) -> usize {
        self.homes.len()
    }

    /// Returns the number of items at publication, and number of servers, per shard.
    pub fn held(&self) -> impl Iterator<Item = (usize, usize)> {
        self.edition.items.iter().zip(&self.edition.replicas).map(|(items, servers)| (*items, servers.len()))
    }

    /// Returns whether each shard has a server, or had one recently.
    pub(super) fn may_answer(&self) -> bool {
        self.homes.iter().all(ReplicaGroup::may_answer)
    }

    /// Shards that have no server and had none recently.
    pub(super) fn lost(&self) -> impl Iterator<Item = usize> {
        (0..).zip(&self.homes).filter(|(_, home)| !home.may_answer()).map(|(shard, _)| shard)
    }

    /// Returns the share of the items in shards that are not lost.
    pub fn coverage(&self) -> f64 {
        let lost: usize = self.lost().map(|shard| self.edition.items[shard]).sum();
        let items = self.items().max(1);
        (items - lost.min(items)) as f64 / items as f64
    }

    /// Returns the number of items of all shards at publication.
    pub fn items(&self) -> usize {
        self.edition.items.iter().sum()
    }
}
