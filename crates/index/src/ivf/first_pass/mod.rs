//! First-pass codes: quantized vectors of a quarter or an eighth of the size of int8 rows. The codes are scanned in place of int8
//! rows to select the best R items, which rescoring rows then score again.
//!
//! A code represents the residual of an item. Since `q·x = q·c + q·r`, a list adds one number to the scores of all its
//! items, and the query's tables are the same for all lists. The residual is split into M subspaces of D / M
//! consecutive dimensions, each with 16 values (`Codebooks`). An error parallel to the item's vector weighs more than
//! an orthogonal error, because the parallel error changes the scores for just those queries for which the item is a
//! good answer (`ProductEncoder`).
//!
//! Wide vectors may use one bit per dimension instead: the signs of the rotated residual, with one factor per item (`signs`,
//! `rotation`). Four signs form a code, so tables and scans are those of product codes.
//!
//! | tensor | holds |
//! |---|---|
//! | `first_pass_codes` u8 `[blocks, M / 8, 16, 4]` | two codes per byte, in blocks of 16 items (see [`sterling_kernels::cpu::kernels::CodeBlocks`]); zeros for slots without an item |
//! | `first_pass_values` f32 `[D, 16]` | the 16 values per dimension; subspace `j` has the dimensions from `j D / M` up to `(j + 1) D / M`, both rounded down |
//! | `first_pass_factors` f32 `[S]` | sign codes only: factor of the sum of a slot's codes; 0 for slots without an item |
//! | `first_pass_signs` u64 `[4, W / 64]` | sign codes only, in place of values: the rotation (`rotation`); W is D rounded up to a multiple of 64, M is W / 4, and bit `n` of the code of subspace `j` is set if the rotated residual's number `4 j + n` is not negative |
//!
//! Sources: product quantization (Jégou et al., 2011); the anisotropic loss of ScaNN (Guo et al., ICML 2020); RaBitQ
//! (Gao & Long, SIGMOD 2024).

mod choice;
mod codebook;
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
