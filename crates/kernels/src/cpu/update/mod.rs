//! The fused backward pass of an embedding table: sums the gradients of each row of a batch, and applies the optimizer to the row.
//!
//! The gradient of the table is never materialized. The occurrences of a batch are sorted by row once ([`RowGroups`]). Then
//! [`update`] visits the distinct rows in ascending order, sums the gradients of a row's occurrences, applies the rule of
//! [`Step`] and writes row and state, which are contiguous ([`Stretches`]). FBGEMM calls this a table-batched embedding with a
//! fused optimizer (<https://github.com/pytorch/FBGEMM>, `split_table_batched_embeddings_ops_training`).
//!
//! The order of all sums is fixed, so that every instruction set, thread count and sharding gives the same bits:
//!
//! - Occurrences are added in the order of the batch, in groups of [`RUN`]; the sums of groups are added in order.
//! - A gradient is multiplied by its weight before it is added, without a fused multiply-add, whose rounding differs.
//! - The sum of squares of a row is the sum, in order, of blocks of [`BLOCK`] columns; a block is added as a tree of fixed shape.
//!
//! The loops are written once, over blocks of 16 columns, and compiled for AVX-512, AVX2, NEON, and as plain arrays for all other
//! CPUs. Sums, products, quotients and roots are rounded the same in vector and scalar operations.

mod dispatch;
mod groups;
mod lanes;
mod loops;
mod operands;
mod rules;
#[cfg(test)]
mod tests;

pub use dispatch::update;
pub use groups::{GroupsPart, Occurrences, RowGroups};
pub use lanes::BLOCK;
pub use loops::RUN;
pub use operands::{GradientRows, Stretches};
pub use rules::{Decay, RuleKind, Step};
