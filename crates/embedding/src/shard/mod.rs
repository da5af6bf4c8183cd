//! Sharded tables, with lookups that return the same results as lookups in unsharded tables.
//!
//! A lookup takes TorchRec's three steps, the same for every sharding type and tier:
//!
//! 1. `input`: resolves ids to rows of the complete table, and applies the policy for unseen ids, once.
//! 2. `gather`: requests each remote row once from the shard that holds it. With row-wise sharding, the rows of the
//!    batch are gathered.
//! 3. `output`: pools bags with the kernels for unsharded tables, in the order of their ids, and concatenates columns.
//!
//! In TorchRec, row shards return partial sums, and a last step adds the sums. Sums in another order round differently. Here, rows
//! are transferred instead of sums, so that a bag is bit-identical for every sharding.

mod cut;
pub(super) mod gather;
pub(super) mod input;
pub(super) mod output;

pub use cut::Cut;
