//! Which servers have which shards of which versions, and what they answer together.
//!
//! A router has no state but what servers tell it. [`Fleet`] looks at them again and again (`GET /v1/parts`): a version answers once
//! every shard of it has enough servers with exactly its bytes (`editions`). Each request is asked of one version; a
//! [`PassCall`](protocol::PassCall) names it, and a [`PassReply`](protocol::PassReply) that names another one is thrown away, so that
//! an answer never mixes two. How shards answer as one is in [`gather`](crate::gather); here is how one shard is asked: which replica
//! ([`choice`]), a second one where the first is late or fails (`asking`), over connections that are kept (`client`), and how each is told of
//! the updates of its items (`updates`). What unpinned requests are divided into beside the version that answers is in `split`, and what becomes of a
//! canary that is behind in `canaries`; which models answer, and what is wrong with servers, says `health`. Servers whose tables lie over several hosts ask each other in the same way for rows ([`Peers`], `rows`).

mod asking;
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
mod split;
mod tls;
mod updates;

pub use asking::{Beside, Conditions};
pub use canaries::UnpinnedOffering;
pub use fleet::{Errand, Fleet, Listed};
pub use offering::Offering;
pub use options::Options;
pub use peers::{PeerOptions, Peers};
pub use probe::Probe;
pub use tls::ServersTls;
pub use updates::{ShardCall, ShardFailure, ShardServers};
