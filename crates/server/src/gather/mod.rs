//! Merges the answers of several shards into one (scatter-gather).
//!
//! A retrieval over shards takes two rounds. In the first, each shard selects and scores candidates, which [`candidates`] merges.
//! In the second round, each shard reranks its chosen candidates and returns the best. The merges of both rounds ([`best`]) are
//! exact. A merge names the shards that must answer again because their answers do not prove completeness:
//!
//! - Each shard returns as many items as it almost certainly has among the best K
//!   ([`likely`](sterling_index::search::likely)): by the hash of their ids, items are distributed over shards like balls
//!   over urns.
//! - Items that a shard does not return rank below its last returned item, which is the *certificate*. If the last returned item
//!   ranks no better than the K-th of all, or if the shard returned all its items, no item was missed.
//!
//! Most first-round items also count in the second round. If the cost is low, a shard therefore reranks its selection at once and
//! sends the best along ([`RankedAhead`](sterling_core::request::RankedAhead)). [`counting`] ignores early results that are not
//! among the merged candidates, and the second round only queries shards whose early results do not prove completeness.
//!
//! [`retrieve`], [`rank`] and [`embed`] drive the rounds over any [`Sharded`]: processes on a network or, in tests, views of this
//! process. This module does not depend on the network.

mod drive;
mod merge;

pub use drive::{Gathered, Results, RoundData, ShardAnswer, Sharded, embed, is_absence, rank, retrieve};
pub use merge::{Chosen, Next, ShardResults, best, candidates, counting};
