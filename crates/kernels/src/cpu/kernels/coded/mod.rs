//! Scans of 4-bit product quantization codes, which the first pass reads in place of int8 rows.
//!
//! A vector is split into M subspaces with 16 codewords each; an item's code names one codeword per subspace. A query is a
//! lookup table of bytes: the product with each codeword. An item's score is the sum of M bytes of the table, times the
//! quantization step, plus a bias of the list; optionally the sum is first multiplied by a factor per item. The sums are exact
//! integers, followed by separate f32 products and sums, so all kernels return the same scores to the last bit.
//!
//! **Layout.** As for int8 rows, a block holds 16 items, and a line of 64 bytes holds 4 bytes of each, item after item. A line
//! covers 8 subspaces: byte `p` of an item in line `g` holds the code of subspace `8 g + p` in its low half and that of
//! `8 g + 4 + p` in its high half. `G = M / 8` lines make a block. So one shuffle of a line looks up 64 codes in the tables of
//! four subspaces, and one dot product with ones adds the four values of each item: 7 instructions per 128 codes with AVX-512 VBMI.
//!
//! Source: product quantization (Jégou et al., 2011), scanned by shuffles as in Quick ADC (André et al., 2017).

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
