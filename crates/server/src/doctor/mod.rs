//! What is wrong with servers, routers and stores that belong together, in plain sentences.
//!
//! [`ask`] asks each of them what it has; [`judge`] is a pure function of what they said. Nothing is changed.

mod ask;
mod judge;

use std::collections::BTreeMap;

use serde::Serialize;

pub use ask::{Asking, ask, host_and_port};
pub use judge::judge;

/// What all that was asked has said.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Observed {
    /// The servers.
    pub servers: Vec<ServerSeen>,
    /// The routers.
    pub routers: Vec<RouterSeen>,
    /// The stores.
    pub stores: Vec<StoreSeen>,
}

/// What a server has said.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ServerSeen {
    /// Its address, and the name that stands for it where that is another.
    pub name: String,
    /// True where it takes requests.
    pub is_ready: bool,
    /// Why it does not.
    pub why: Option<String>,
    /// What it warns of though it does.
    pub warnings: Vec<String>,
    /// What it has in memory.
    pub parts: Vec<PartSeen>,
    /// Versions that it refused, each with the model, the version and the reason.
    pub refused: Vec<(String, u64, String)>,
}

/// A version in the memory of a server, or a shard of one.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PartSeen {
    /// The model's name.
    pub model: String,
    /// The version.
    pub version: u64,
    /// One name for its bytes, of all of its shards.
    pub digest: String,
    /// Which shard it is; 0 of 1 where it was not cut.
    pub shard: u32,
    /// How many there are.
    pub shards: u32,
    /// True where it answers unpinned requests.
    pub is_active: bool,
    /// The labels that point to it.
    pub labels: Vec<String>,
    /// The position of updates that it shows, where it is active and takes any.
    pub position: Option<u64>,
    /// Durable updates at its server that it does not show yet.
    pub lag: Option<u64>,
}

/// What a router has said.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RouterSeen {
    /// Its address, and the name that stands for it where that is another.
    pub name: String,
    /// True where it takes requests.
    pub is_ready: bool,
    /// Why it does not.
    pub why: Option<String>,
    /// What it warns of though it does.
    pub warnings: Vec<String>,
    /// The version of each model that answers unpinned requests, and its digest.
    pub active: BTreeMap<String, (u64, String)>,
}

/// What lies in a store.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StoreSeen {
    /// Its folder or URL.
    pub name: String,
    /// Why it cannot be read.
    pub why: Option<String>,
    /// Its models.
    pub models: BTreeMap<String, ModelSeen>,
}

/// What a store has of a model.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ModelSeen {
    /// The newest versions and those that are wished, each with its digest.
    pub versions: BTreeMap<u64, String>,
    /// The version that is wished to answer; the newest where none is.
    pub wished: Option<u64>,
    /// The newest version that stands for the wished one: that one, or one that was merged from it.
    pub stands: Option<u64>,
    /// Where labels are wished to point.
    pub labels: BTreeMap<String, u64>,
    /// The canary and the shadow that are wished, in words.
    pub traffic: Vec<String>,
}
