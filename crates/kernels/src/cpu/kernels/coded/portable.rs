//! Plain loops, which define the sums of product quantization codes.

use super::operands::{LINE, TABLE};
use crate::cpu::kernels::BLOCK;

/// Returns the sums of one block.
pub(super) fn block_sums(codes: &[u8], tables: &[u8]) -> [u32; BLOCK] {
    let mut sums = [0u32; BLOCK];
    for (line, tables) in codes.chunks_exact(LINE).zip(tables.chunks_exact(TABLE)) {
        let (low, high) = tables.split_at(TABLE / 2);
        for (sum, bytes) in sums.iter_mut().zip(line.chunks_exact(4)) {
            for (p, &byte) in bytes.iter().enumerate() {
                *sum +=
                    u32::from(low[p * 16 + usize::from(byte & 15)]) + u32::from(high[p * 16 + usize::from(byte >> 4)]);
            }
        }
    }
    sums
}
