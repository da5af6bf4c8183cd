//! NEON. A deinterleaving load puts every fourth byte into one of four registers, each with one byte of all 16 items, so that
//! a register needs one table.

use std::arch::aarch64::*;

use super::operands::{LINE, TABLE};
use crate::cpu::kernels::BLOCK;

/// Number of lines whose sums fit 16 bits: each adds eight bytes.
const LINES_PER_SUM: usize = 32;

/// Returns the sums of one block.
///
/// # Safety
/// Needs NEON; `tables` must hold the tables of as many lines as `codes` has.
#[target_feature(enable = "neon")]
pub(super) unsafe fn block_sums(codes: &[u8], tables: &[u8]) -> [u32; BLOCK] {
    debug_assert_eq!(codes.len() / LINE, tables.len() / TABLE);
    let mut of_items = [0u32; BLOCK];
    for (codes, tables) in codes.chunks(LINE * LINES_PER_SUM).zip(tables.chunks(TABLE * LINES_PER_SUM)) {
        let mut sums = [vdupq_n_u16(0); 2];
        for (line, tables) in codes.chunks_exact(LINE).zip(tables.chunks_exact(TABLE)) {
            // SAFETY: a line has 64 bytes.
            let parted = unsafe { vld4q_u8(line.as_ptr()) };
            for (p, bytes) in [parted.0, parted.1, parted.2, parted.3].into_iter().enumerate() {
                // SAFETY: 16 of the 128 bytes of a line's tables are read, `n < 8`.
                let table = |n: usize| unsafe { vld1q_u8(tables.as_ptr().add(n * 16)) };
                let low = vqtbl1q_u8(table(p), vandq_u8(bytes, vdupq_n_u8(15)));
                let high = vqtbl1q_u8(table(4 + p), vshrq_n_u8::<4>(bytes));
                sums[0] = vaddw_u8(vaddw_u8(sums[0], vget_low_u8(low)), vget_low_u8(high));
                sums[1] = vaddw_high_u8(vaddw_high_u8(sums[1], low), high);
            }
        }
        for (sums, of_items) in sums.into_iter().zip(of_items.chunks_exact_mut(8)) {
            let mut eight = [0u16; 8];
            // SAFETY: eight numbers are written to an array of eight.
            unsafe { vst1q_u16(eight.as_mut_ptr(), sums) };
            of_items.iter_mut().zip(eight).for_each(|(sum, more)| *sum += u32::from(more));
        }
    }
    of_items
}
