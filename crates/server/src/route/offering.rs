//! A version over all of its shards, as it is asked.

use std::sync::Arc;

use super::client::Client;
use super::editions::Edition;
use super::inquiry::Home;

/// A version over all of its shards, with the servers of each.
pub struct Offering {
    pub(super) edition: Edition<Arc<Client>>,
    pub(super) homes: Vec<Home>,
}

impl Offering {
    /// The version.
    pub fn version(&self) -> u64 {
        self.edition.version
    }

    /// One name for its bytes.
    pub fn digest(&self) -> &str {
        &self.edition.digest
    }

    /// True for the same bytes, at whichever servers.
    pub fn is_same(&self, other: &Offering) -> bool {
        (self.version(), self.digest()) == (other.version(), other.digest())
    }

    /// How many shards it was cut into; 1 where it was not.
    pub fn shards(&self) -> usize {
        self.homes.len()
    }

    /// Of each shard its items when it was published, and how many servers have it.
    pub fn held(&self) -> impl Iterator<Item = (usize, usize)> {
        self.edition.items.iter().zip(&self.edition.replicas).map(|(items, servers)| (*items, servers.len()))
    }

    /// Whether each shard has a server, or had one so lately that it may be on its way back.
    pub(super) fn may_answer(&self) -> bool {
        self.homes.iter().all(Home::may_answer)
    }

    /// The shards that have no server, and are not expected back.
    pub(super) fn lost(&self) -> impl Iterator<Item = usize> {
        (0..).zip(&self.homes).filter(|(_, home)| !home.may_answer()).map(|(shard, _)| shard)
    }

    /// The share of the items that lies in the other shards.
    pub fn coverage(&self) -> f64 {
        let lost: usize = self.lost().map(|shard| self.edition.items[shard]).sum();
        let items = self.items().max(1);
        (items - lost.min(items)) as f64 / items as f64
    }

    /// Items, of all shards, when it was published.
    pub fn items(&self) -> usize {
        self.edition.items.iter().sum()
    }
}
