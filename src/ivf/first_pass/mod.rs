//! Codes for a first pass: a quarter of the bytes of int8 rows, scanned in their place for the best R, which wide rows then
//! score.
//!
//! An item's code is of what it has beside its list's centroid: `q·x = q·c + q·r`, so that a list adds one number to the scores of
//! all its items and the query's tables hold for every list. The residual is cut into M subspaces of D / M neighbouring
//! dimensions, each with 16 values (`Codebooks`). Which of them an item gets is chosen so that an error along the item, which
//! moves the scores of just those queries that it is a good answer to, weighs more than one across it (`Encoder`).
//!
//! | tensor | holds |
//! |---|---|
//! | `first_pass_codes` u8 `[blocks, M / 8, 16, 4]` | two codes a byte, in blocks of 16 items (see [`crate::device::cpu::kernels::CodeBlocks`]); zeros where a slot holds no item |
//! | `first_pass_values` f32 `[D, 16]` | of each dimension the 16 values; subspace `j` has the dimensions from `j D / M` up to `(j + 1) D / M`, both rounded down |
//!
//! Sources: product quantisation (Jégou et al. 2011); the anisotropic loss of ScaNN (Guo et al., ICML 2020).

mod books;
mod encode;
mod items;
mod options;
mod tables;
#[cfg(test)]
mod tests;

pub(super) use books::Codebooks;
pub(super) use encode::blocked;
pub(super) use items::ItemCodes;
pub use options::{CodeKind, FirstPass};
pub(super) use tables::Tables;
