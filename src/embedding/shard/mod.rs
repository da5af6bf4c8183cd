//! Tables cut into shards, looked up as if they were whole.
//!
//! A lookup in such a table takes TorchRec's three steps, the same for every sharding type and tier:
//!
//! 1. `input`: ids become rows of the whole table (the fate of unseen ids is decided here, once), and each row goes to the
//!    shards that hold it as a row of theirs (bucketise). Where rows travel, each is asked for once (deduplicate).
//! 2. `compute`: each shard pools its rows of each bag. Shards whose rows are fetched were asked first, and are pooled when the
//!    answers are there.
//! 3. `output`: columns are put side by side, parts of the same columns are added in the order of their rows, and means are
//!    divided by the length of the whole bag.
//!
//! A bag whose rows lie in one shard, or in shards of columns, gets the very numbers that the whole table gives; rows added
//! across shards differ from it by the rounding of f32 sums in another order.

pub(super) mod compute;
mod cut;
pub(super) mod input;
pub(super) mod output;

pub use cut::Cut;
