//! Chains of element-wise steps, run over all rows of a block at a time, so that intermediate results stay in the L1 cache.

use super::operands::{Chain, ChainLink, LANES, Lines, MapTarget, Operand};
use crate::cpu::Kernels;

impl Kernels {
    /// Runs a chain over rows. `registers` is scratch memory that grows as needed.
    ///
    /// # Panics
    /// If a slice is shorter than the rows, or a step reads a register that is not filled yet.
    pub fn chain(self, chain: &Chain<'_>, rows: usize, registers: &mut Lines, out: &mut [f32], stride: usize) {
        let room = rows.next_multiple_of(LANES);
        let (read, all) = (chain.reads.len(), chain.reads.len() + chain.links.len());
        if registers.numbers().len() < all * room {
            *registers = Lines::new(all * room);
        }
        let registers = registers.numbers_mut();
        for (register, &(numbers, apart)) in registers.chunks_exact_mut(room.max(1)).zip(chain.reads) {
            // Inputs that all rows share, and contiguous inputs, are read in place.
            if apart > 1 && rows > 0 {
                assert!(numbers.len() > (rows - 1) * apart, "fewer input numbers than rows");
                register[..rows].iter_mut().zip(numbers.iter().step_by(apart)).for_each(|(to, x)| *to = *x);
            }
        }
        for (n, link) in chain.links.iter().enumerate() {
            let (filled, rest) = registers.split_at_mut((read + n) * room);
            let operand = |register: usize| match chain.reads.get(register) {
                Some(&(numbers, apart @ (0 | 1))) => Operand { numbers, row: 0, outer: 0, inner: apart },
                _ => Operand { numbers: &filled[register * room..], row: 0, outer: 0, inner: 1 },
            };
            let mut target = MapTarget { numbers: rest, stride: room, rows: 1, outer: 1, inner: rows };
            match *link {
                ChainLink::One(f, a) => self.map1(f, &operand(a), &mut target),
                ChainLink::Two(f, [a, b]) => self.map2(f, &operand(a), &operand(b), &mut target),
            }
        }
        for (n, &register) in chain.kept.iter().enumerate() {
            let kept = &registers[register * room..][..rows];
            out[n..].iter_mut().step_by(stride.max(1)).zip(kept).for_each(|(to, x)| *to = *x);
        }
    }
}
