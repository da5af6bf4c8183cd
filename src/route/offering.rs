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

    /// Items, of all shards, when it was published.
    pub fn items(&self) -> usize {
        self.edition.items.iter().sum()
    }
}
