//! Codes for a first pass: a quarter of the bytes of int8 rows, or an eighth, scanned in their place for the best R, which wide rows
//! then score.
//!
//! An item's code is of what it has beside its list's centroid: `q·x = q·c + q·r`, so that a list adds one number to the scores of
//! all its items and the query's tables hold for every list. The residual is cut into M subspaces of D / M neighbouring
//! dimensions, each with 16 values (`Codebooks`). Which of them an item gets is chosen so that an error along the item, which
//! moves the scores of just those queries that it is a good answer to, weighs more than one across it (`ProductEncoder`).
//!
//! Wide vectors may have one bit a dimension instead, the signs of the rotated residual, and an item a factor (`signs`,
//! `rotation`): four signs make a code, so that all else is the same.
//!
//! | tensor | holds |
//! |---|---|
//! | `first_pass_codes` u8 `[blocks, M / 8, 16, 4]` | two codes a byte, in blocks of 16 items (see [`sterling_kernels::cpu::kernels::CodeBlocks`]); zeros where a slot holds no item |
//! | `first_pass_values` f32 `[D, 16]` | of each dimension the 16 values; subspace `j` has the dimensions from `j D / M` up to `(j + 1) D / M`, both rounded down |
//! | `first_pass_factors` f32 `[S]` | of signs: what the sum of a slot's code is multiplied by; 0 where a slot holds no item |
//! | `first_pass_signs` u64 `[4, W / 64]` | of signs, in place of values: the rotation (`rotation`); W is D rounded up to a multiple of 64, M is W / 4, and bit `n` of the code of subspace `j` is set where the rotated residual's number `4 j + n` is not negative |
//!
//! Sources: product quantisation (Jégou et al. 2011); the anisotropic loss of ScaNN (Guo et al., ICML 2020);
//! RaBitQ (Gao & Long, SIGMOD 2024).

mod books;
mod choice;
mod coder;
mod encode;
mod items;
mod options;
mod rotation;
mod signs;
mod tables;
#[cfg(test)]
mod tests;

pub use choice::{CodeChoice, IndexExtent, Rates};
pub(super) use coder::Coder;
pub(super) use items::ItemCodes;
pub use options::{CodeKind, CodeShape, FirstPass};
pub(super) use tables::Tables;
