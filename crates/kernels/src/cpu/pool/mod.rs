//! Pooled lookups in rows of an embedding table: for each bag of ids, the weighted sum of its rows in f32.
//!
//! Rows are contiguous. The formats are those of FBGEMM's table-batched embeddings
//! (<https://github.com/pytorch/FBGEMM>, `split_table_batched_embeddings_ops_inference`), without padding between rows:
//!
//! | format | bytes per row | layout |
//! |---|---|---|
//! | `f32`, `f16`, `bf16` | 4 D, 2 D, 2 D | plain, little-endian |
//! | `int8`, `int4`, `int2` | 4 + D b / 8 | f16 scale, f16 bias, then D codes of b bits, low bits first |
//!
//! The value of a code is `scale * code + bias`, computed in f32. All bags share one array of ids, so the prefetch of the row
//! [`PREFETCH_ROWS`] ids ahead crosses from one bag to the next.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod bags;
mod dispatch;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
mod rows;
#[cfg(test)]
mod tests;

pub use bags::{BagSums, Bags, PREFETCH_ROWS};
pub use dispatch::pool;
pub use rows::{QUANTISED_HEAD_BYTES, RowFormat, Rows};
