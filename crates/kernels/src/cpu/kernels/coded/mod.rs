//! Scans of 4-bit product codes: what a first pass reads in place of int8 rows.
//!
//! A vector is cut into M subspaces, each of which has 16 values; an item's code names one of them for every subspace. A query
//! makes a table of bytes, what each value is worth to it, and an item's score is the sum of M bytes of that table, times what
//! one is worth, plus what its list has in advance; or a factor of its own multiplies the sum first. The sums are exact integers
//! and what follows are products and sums of f32, so that every kernel says the same to the last bit.
//!
//! **Layout.** As that of int8 rows: a block holds 16 items, 64 bytes of it hold 4 bytes of each, item after item. Such a line has 8
//! subspaces: byte `p` of an item in line `g` holds the code of subspace `8 g + p` in its low half and that of `8 g + 4 + p` in
//! its high one. `G = M / 8` lines make a block. So one shuffle of a whole line looks up 64 codes in a table of four subspaces,
//! and one dot product with ones adds each item's four: 7 instructions for 128 codes with AVX-512 VBMI.
//!
//! Source: product quantisation (Jégou et al. 2011), scanned by shuffles as in Quick ADC (André et al. 2017).

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "aarch64")]
mod neon;
mod operands;
mod portable;
mod scan;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod vbmi;

pub use operands::{CodeBlocks, CodeQuery, LINE, TABLE};
