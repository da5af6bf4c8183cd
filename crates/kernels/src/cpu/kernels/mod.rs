//! The loops over codes, rows and scores, one file an instruction set. All of them give equal integers, and floats that differ by
//! rounding alone.
//!
//! **Blocked int8 rows.** A block holds 16 items; 64 bytes of it hold 4 dimensions of each, item after item, so that one
//! load feeds 16 accumulators and no horizontal sums are needed. `G = ceil(D / 4)` such groups make a block. Items are
//! stored with 128 added (unsigned), queries are signed: `Σ (x + 128) q = Σ x q + 128 Σ q`, one constant a query.
//!
//! **Queries of 15 bits.** A query is two rows of int8, `q = 128 high + low`: what rounding to int8 would lose is kept, and
//! scores are as good as the items' codes. A scan waits for memory, so that the second multiply-add of a line costs nothing
//! there; `Kernels::nearest4`, which works out of the cache, takes the high row alone.

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
