//! Scans of product quantization codes as methods of [`Kernels`], which check their operands and select the instruction set.

#[cfg(target_arch = "x86_64")]
use super::avx2;
#[cfg(target_arch = "aarch64")]
use super::neon;
use super::operands::{CodeBlocks, CodeQuery, LINE, check};
use super::portable;
#[cfg(target_arch = "x86_64")]
use super::vbmi;
use crate::cpu::isa::{Isa, Kernels};
use crate::cpu::kernels::operands::{BLOCK, Staging, blocks_ahead};
use crate::cpu::kernels::portable::stage;
use crate::memory::prefetch;

impl Kernels {
    /// Scores the selected items of `blocks` from block `from` on and stages those that reach `threshold`, until all
    /// blocks are done or the staging has no room for another block. Returns the next block to scan. Blocks without selected
    /// items are not read.
    ///
    /// Scores are computed from the exact sums as [`CodeQuery`] says, rounded after each product and each sum, so they are
    /// bit-identical for all instruction sets.
    ///
    /// # Panics
    /// If slices are shorter than documented, or the staging has no room for a block.
    pub fn scan_codes(
        self,
        blocks: &CodeBlocks<'_>,
        query: &CodeQuery<'_>,
        threshold: f32,
        from: usize,
        staging: &mut Staging<'_>,
    ) -> usize {
        check(blocks, query);
        staging.check(BLOCK);
        #[cfg(target_arch = "x86_64")]
        if self.isa == Isa::Avx512 && self.has_vbmi {
            // SAFETY: `has_vbmi` is set only if all features that `vbmi::scan` needs were detected.
            return unsafe { vbmi::scan(blocks, query, threshold, from, staging) };
        }
        let (count, bytes) = (blocks.items.div_ceil(BLOCK), blocks.lines * LINE);
        let distance = blocks_ahead(bytes);
        let mut block = blocks.next_asked(from);
        while block < count {
            if staging.len + BLOCK > staging.scores.len() {
                return block;
            }
            let ahead = (block + distance) * bytes;
            blocks.codes.get(ahead..ahead + bytes).into_iter().for_each(prefetch);
            let sums = self.code_sums(&blocks.codes[block * bytes..(block + 1) * bytes], query.tables);
            let scores = query.scores(sums, blocks.factors_of(block));
            let first = blocks.first_slot + (block * BLOCK) as u32;
            stage(&scores, blocks.requested(block), first, threshold, staging);
            block = blocks.next_asked(block + 1);
        }
        count
    }

    /// Returns the sums of one block.
    fn code_sums(self, codes: &[u8], tables: &[u8]) -> [u32; BLOCK] {
        match self.isa {
            Isa::Portable => portable::block_sums(codes, tables),
            // SAFETY: `Kernels` exists only if the features of its instruction set were detected; the lengths were checked.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::Avx512 => unsafe { avx2::block_sums(codes, tables) },
            // SAFETY: `Kernels` exists only if the features of its instruction set were detected; the lengths were checked.
            #[cfg(target_arch = "aarch64")]
            Isa::Neon | Isa::Dotprod => unsafe { neon::block_sums(codes, tables) },
        }
    }
}
