//! Diagnosis of servers, routers and stores that belong together, in plain sentences.
//!
//! [`ask`] requests their state; [`judge`] derives findings from it as a pure function. The diagnosis changes nothing.

mod ask;
mod judge;

use std::collections::BTreeMap;

use serde::Serialize;

pub use ask::{Targets, ask, host_and_port};
pub use judge::judge;

/// State of everything that was examined.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Observed {
    /// Observed servers.
    pub servers: Vec<ServerSeen>,
    /// Observed routers.
    pub routers: Vec<RouterSeen>,
    /// Observed stores.
    pub stores: Vec<StoreSeen>,
}

/// Observed state of a server.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ServerSeen {
    /// Address, with the name that resolved to it if the name differs.
    pub name: String,
    /// True if the server is ready for requests.
    pub is_ready: bool,
    /// Reason why the server is not ready.
    pub why: Option<String>,
    /// Warnings that the server reports although it is ready.
    pub warnings: Vec<String>,
    /// Loaded versions.
    pub parts: Vec<PartSeen>,
    /// Rejected versions, each with model, version and reason.
    pub refused: Vec<(String, u64, String)>,
}

/// Loaded version of a server, or a shard of one.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PartSeen {
    /// Name of the model.
    pub model: String,
    /// Number of the version.
    pub version: u64,
    /// Hash of the version's bytes, equal for all of its shards.
    pub digest: String,
    /// Index of the shard; 0 of 1 if the version is unsharded.
    pub shard: u32,
    /// Number of shards.
    pub shards: u32,
    /// True if the version answers unpinned requests.
    pub is_active: bool,
    /// Labels that point to the version.
    pub labels: Vec<String>,
    /// Position up to which updates are visible, if the version is active and accepts updates.
    pub position: Option<u64>,
    /// Number of durable updates of the server that are not yet visible.
    pub lag: Option<u64>,
}

/// Observed state of a router.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RouterSeen {
    /// Address, with the name that resolved to it if the name differs.
    pub name: String,
    /// True if the router is ready for requests.
    pub is_ready: bool,
    /// Reason why the router is not ready.
    pub why: Option<String>,
    /// Warnings that the router reports although it is ready.
    pub warnings: Vec<String>,
    /// Active version per model with its digest.
    pub active: BTreeMap<String, (u64, String)>,
}

/// Observed content of a store.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StoreSeen {
    /// Folder or URL of the store.
    pub name: String,
    /// Reason why the store cannot be read.
    pub why: Option<String>,
    /// Models of the store by name.
    pub models: BTreeMap<String, ModelSeen>,
}

/// Observed versions of a model in a store.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ModelSeen {
    /// Newest and desired versions, each with its digest.
    pub versions: BTreeMap<u64, String>,
    /// Desired version; `None` selects the newest.
    pub wished: Option<u64>,
    /// Newest version that satisfies the desired state: the desired version, or one that was merged from it.
    pub stands: Option<u64>,
    /// Desired version per label.
    pub labels: BTreeMap<String, u64>,
    /// Desired canary and shadow, as text.
    pub traffic: Vec<String>,
}
