//! What several shards answer, as one answer.
//!
//! A retrieval over shards takes two rounds. In the first each shard selects and scores candidates ([`candidates`] merges them),
//! in the second it reranks those of its own that count, and tells its best. Both merges ([`best`]) are exact, and say which shards
//! must be asked again where what they sent does not prove it:
//!
//! - A shard is asked for as many as it is nearly certain to have among the best K ([`likely`](sterling_index::search::likely)): by the hash of their ids items
//!   fall into shards as balls into urns.
//! - What it does not send is worse than the last that it sends, which is the *certificate*. Where that last one ranks no better
//!   than the K-th of all, or the shard sent all it has, nothing was missed.
//!
//! Most of what a shard is asked for in the first round counts in the second. So where that costs little more it reranks at once what
//! it selects, and sends the best of it along ([`RankedAhead`](sterling_core::request::RankedAhead)). Those that are no candidates after all are passed
//! over ([`counting`]), and a second round asks only shards whose results do not prove enough.
//!
//! The rounds are driven by [`retrieve`], [`rank`] and [`embed`] over anything that can be asked as [`Sharded`]: processes behind a
//! network, or, in tests, views in this one. Nothing here knows of machines.

mod drive;
mod merge;

pub use drive::{Gathered, Results, Said, Sharded, Told, embed, is_absence, rank, retrieve};
pub use merge::{Chosen, Next, OfShard, best, candidates, counting};
