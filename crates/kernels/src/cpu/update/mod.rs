//! The fused backward pass of an embedding table: sums the gradients of each row of a batch, and applies the optimizer to the row.
//!
//! No gradient of the table is ever made. The occurrences of a batch are sorted by row once ([`RowGroups`]); [`update`] then takes the
//! distinct rows in rising order, sums the gradients of a row's occurrences, computes the rule of [`Step`] and writes row and state, which
//! lie in one stretch. FBGEMM calls this a table-batched embedding with a fused optimizer
//! (<https://github.com/pytorch/FBGEMM>, `split_table_batched_embeddings_ops_training`).
//!
//! The order of all sums is a contract, so that every instruction set, thread count and sharding gives the same bits:
//!
//! - Occurrences are added in the order in which the batch names them, in runs of [`RUN`]; the sums of runs are added in order.
//! - A weight multiplies a gradient before it is added: no fused multiply-add, whose rounding differs.
//! - A square sum over a row is the sum, in order, of blocks of [`BLOCK`] columns; a block is added as a tree of fixed shape.
//!
//! The loops are written once, over blocks of 16 columns, and compiled for AVX-512, AVX2, NEON and, as arrays, for all else. Sums,
//! products, quotients and roots round alike in registers and alone.

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
