//! Loops over codes, rows and scores, one file per instruction set. All sets return equal integers, and floats that
//! differ by rounding only.
//!
//! **Int8 blocks.** A block holds 16 items; a group of 64 bytes in it holds 4 dimensions of each item, item after
//! item, so that one load feeds 16 accumulators and no horizontal sums are needed. `G = ceil(D / 4)` groups make a
//! block. Items are stored with 128 added (unsigned), queries are signed: `Σ (x + 128) q = Σ x q + 128 Σ q`, one
//! constant per query.
//!
//! **15-bit queries.** A query is two int8 rows, `q = 128 high + low`, so that scores lose only the precision of the items'
//! codes. A scan is bound by memory, so the second multiply-add per cache line is free. `Kernels::nearest4`, which runs
//! from the cache, uses the high row alone.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod coded;
mod dispatch;
#[cfg(target_arch = "aarch64")]
mod dotprod;
#[cfg(target_arch = "aarch64")]
mod neon;
mod operands;
mod portable;
#[cfg(test)]
mod tests;

pub use coded::{CodeBlocks, CodeQuery, LINE, TABLE};
pub use operands::{BLOCK, Blocks, Int8Query, Lane, Pick, Staging};
