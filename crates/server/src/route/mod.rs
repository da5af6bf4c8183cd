//! Tracks which servers have which shards of which versions, and sends requests to them.
//!
//! A router's only state is what servers report. [`Fleet`] polls servers (`GET /v1/parts`): a version answers once every shard of
//! it has enough servers with exactly its bytes (`editions`). Each request is sent to one version, which
//! [`PassCall`](protocol::PassCall) names. A [`PassReply`](protocol::PassReply) of another version is discarded, so an answer
//! never mixes versions.
//!
//! [`gather`](crate::gather) merges the shards' answers. This module sends the calls to one shard: it selects a replica
//! ([`choice`]), queries a second one if the first is late or fails (hedged requests, `inquiry`), keeps connections open
//! (`client`) and forwards updates of items (`updates`). `split` divides unpinned requests between active version, canary and
//! shadow, and `canaries` rolls back a canary that is worse. `health` reports which models answer, and problems of servers.
//! Servers whose tables are spread over several hosts request rows from each other in the same way ([`Peers`], `rows`).

mod canaries;
pub mod choice;
mod client;
mod editions;
mod fleet;
mod health;
mod inquiry;
mod names;
mod offering;
mod options;
mod peer;
mod peers;
mod probe;
pub mod protocol;
pub(crate) mod rows;
mod shard_query;
mod split;
mod tls;
mod updates;

pub use canaries::UnpinnedShardedVersion;
pub use fleet::{Fleet, FleetRequest, Listed};
pub use offering::ShardedVersion;
pub use options::Options;
pub use peers::{PeerOptions, Peers};
pub use probe::Probe;
pub use shard_query::{Conditions, Extra};
pub use tls::ServersTls;
pub use updates::{ShardCall, ShardFailure, ShardServers};
