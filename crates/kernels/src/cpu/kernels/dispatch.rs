//! The kernels as methods of [`Kernels`], which checks what they are given and picks the instruction set.

use super::operands::{BLOCK, Blocks, Int8Query, Lane, Pick, Staging, blocks_ahead, check};
use super::portable;
#[cfg(target_arch = "x86_64")]
use super::{amx, avx2, avx512};
#[cfg(target_arch = "aarch64")]
use super::{dotprod, neon};
#[cfg(all(any(test, feature = "testing"), target_arch = "x86_64"))]
use crate::cpu::amx::Emulated;
#[cfg(target_arch = "x86_64")]
use crate::cpu::amx::Source;
use crate::cpu::isa::{Isa, Kernels};
use crate::memory::prefetch;

macro_rules! dispatch {
    ($self:ident, $function:ident ( $($argument:expr),* )) => {
        match $self.isa {
            Isa::Portable => portable::$function($($argument),*),
            // SAFETY: `Kernels` is made only after the features that these functions need were found.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { avx2::$function($($argument),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { avx512::$function($($argument),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => unsafe { neon::$function($($argument),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Isa::Dotprod => unsafe { dotprod::$function($($argument),*) },
        }
    };
}

impl Kernels {
    /// Scores the items of `blocks` from block `from` on and stages those that reach `threshold`, until all blocks are
    /// done or the staging has no room for a whole block. Returns the next block to scan.
    ///
    /// A score is `(128 Σ x high + Σ x low) * item scale * query scale` in f32 from the two exact sums on; scores that are not at least `threshold` (also NaN) are left out.
    ///
    /// # Panics
    /// Where slices are shorter than their documented lengths.
    pub fn scan(
        self,
        blocks: &Blocks<'_>,
        query: &Int8Query<'_>,
        threshold: f32,
        from: usize,
        staging: &mut Staging<'_>,
    ) -> usize {
        check(blocks, query);
        staging.check(BLOCK);
        dispatch!(self, scan(blocks, query, threshold, from, staging))
    }

    /// As [`Kernels::scan`] over `picks` from number `from` on, wherever they lie among `blocks`: those to come are asked for
    /// ahead. Returns the next pick to scan.
    ///
    /// # Panics
    /// As [`Kernels::scan`], and where a pick is no block.
    pub fn scan_picks(
        self,
        blocks: &Blocks<'_>,
        picks: &[Pick],
        query: &Int8Query<'_>,
        threshold: f32,
        from: usize,
        staging: &mut Staging<'_>,
    ) -> usize {
        check(blocks, query);
        staging.check(BLOCK);
        let count = blocks.items.div_ceil(BLOCK);
        assert!(picks.iter().all(|pick| (pick.block as usize) < count), "a pick beyond the blocks");
        #[cfg(target_arch = "x86_64")]
        if self.isa == Isa::Avx512 {
            // SAFETY: `Kernels` is made only after the features that this function needs were found.
            return unsafe { avx512::scan_picks(blocks, picks, query, threshold, from, staging) };
        }
        let bytes = blocks.groups * 64;
        let place = |pick: &Pick| (pick.block as usize * bytes, pick.block as usize * BLOCK);
        for (n, pick) in picks.iter().enumerate().skip(from) {
            if staging.len + BLOCK > staging.scores.len() {
                return n;
            }
            if let Some((code, item)) = picks.get(n + blocks_ahead(bytes)).map(place) {
                prefetch(&blocks.codes[code..code + bytes]);
                prefetch(&blocks.scales[item..item + BLOCK]);
            }
            let (code, item) = place(pick);
            let one = Blocks {
                codes: &blocks.codes[code..code + bytes],
                scales: &blocks.scales[item..item + BLOCK],
                items: (blocks.items - item).min(BLOCK),
                first_slot: 0,
                ..*blocks
            };
            let (mut scores, mut items) = ([0f32; BLOCK], [0u32; BLOCK]);
            let mut whole = Staging { scores: &mut scores, slots: &mut items, len: 0 };
            dispatch!(self, scan(&one, query, threshold, 0, &mut whole));
            let len = whole.len;
            for (&score, &of_block) in scores[..len].iter().zip(&items).filter(|(_, i)| pick.mask >> **i & 1 == 1) {
                staging.scores[staging.len] = score;
                staging.slots[staging.len] = blocks.first_slot + item as u32 + of_block;
                staging.len += 1;
            }
        }
        picks.len()
    }

    /// As [`Kernels::scan`] for several queries at once, so that each loaded line is used by up to four of them.
    ///
    /// # Panics
    /// As [`Kernels::scan`], and where a staging has no room for all blocks.
    pub fn scan_many(self, blocks: &Blocks<'_>, lanes: &mut [Lane<'_>]) {
        let most = blocks.items.next_multiple_of(BLOCK);
        for Lane { query, staging, .. } in lanes.iter() {
            check(blocks, query);
            staging.check(most);
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(source) = self.tiles {
            return match source {
                // SAFETY: the features were found; tiles are given back before a scan ends.
                Source::Instructions => unsafe { amx::scan_many(blocks, lanes) },
                #[cfg(any(test, feature = "testing"))]
                Source::Emulated { wrong } => amx::scan_many_emulated(&mut Emulated::new(wrong), blocks, lanes),
            };
        }
        dispatch!(self, scan_many(blocks, lanes));
    }

    /// The item with the largest score less `penalties` `[blocks * 16]` for each of four queries, of which the high rows count;
    /// the first of equal ones.
    ///
    /// # Panics
    /// As [`Kernels::scan`], and without items.
    #[inline]
    pub fn nearest4(self, blocks: &Blocks<'_>, penalties: &[f32], queries: &[Int8Query<'_>; 4]) -> [u32; 4] {
        queries.iter().for_each(|q| check(blocks, q));
        assert!(blocks.items > 0 && penalties.len() >= blocks.items.next_multiple_of(BLOCK));
        dispatch!(self, nearest4(blocks, penalties, queries))
    }

    /// The `k`-th largest of `values`, which are left in another order; none of them is NaN.
    ///
    /// # Panics
    /// Where there are fewer than `k` or `k` is 0.
    #[inline]
    pub fn kth(self, values: &mut [f32], k: usize) -> f32 {
        assert!((1..=values.len()).contains(&k));
        dispatch!(self, kth(values, k))
    }

    /// Moves the scores at least `threshold` and their slots to the front, in their order, and returns how many they are.
    ///
    /// # Panics
    /// Where the lengths differ.
    #[inline]
    pub fn retain(self, scores: &mut [f32], slots: &mut [u32], threshold: f32) -> usize {
        assert_eq!(scores.len(), slots.len());
        dispatch!(self, retain(scores, slots, threshold))
    }

    /// Stages the scores of `slots` `[n]` at least `threshold`, as [`Kernels::scan`] does for the scores that it makes.
    /// The first score is slot `first_slot`'s.
    ///
    /// # Panics
    /// As [`Kernels::scan`].
    pub fn keep(
        self,
        scores: &[f32],
        first_slot: u32,
        threshold: f32,
        from: usize,
        staging: &mut Staging<'_>,
    ) -> usize {
        staging.check(BLOCK);
        assert!(scores.len().is_multiple_of(BLOCK));
        dispatch!(self, keep(scores, first_slot, threshold, from, staging))
    }

    /// The inner product of two f32 vectors of equal length.
    ///
    /// # Panics
    /// Where the lengths differ.
    #[inline]
    pub fn dot_f32(self, a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len());
        dispatch!(self, dot_f32(a, b))
    }

    /// The inner product of an f32 vector and a row of bfloat16.
    ///
    /// # Panics
    /// Where the lengths differ.
    #[inline]
    pub fn dot_bf16(self, a: &[f32], b: &[half::bf16]) -> f32 {
        assert_eq!(a.len(), b.len());
        dispatch!(self, dot_bf16(a, b))
    }

    /// The inner product of an f32 vector and a row of half precision.
    ///
    /// # Panics
    /// Where the lengths differ.
    #[inline]
    pub fn dot_f16(self, a: &[f32], b: &[half::f16]) -> f32 {
        assert_eq!(a.len(), b.len());
        dispatch!(self, dot_f16(a, b))
    }

    /// The inner products of an f32 vector `[D]` and the rows of `slots` in a matrix of f32 `[S, D]`; rows to come are
    /// asked for ahead.
    ///
    /// # Panics
    /// Where `out` is not as long as `slots`, and where a slot has no row.
    #[inline]
    pub fn dots_f32(self, a: &[f32], rows: &[f32], slots: &[u32], out: &mut [f32]) {
        assert_eq!(slots.len(), out.len());
        dispatch!(self, dots_f32(a, rows, slots, out))
    }

    /// The inner products of an f32 vector `[D]` and the rows of `slots` in a matrix of bfloat16 `[S, D]`; rows to come are
    /// asked for ahead.
    ///
    /// # Panics
    /// Where `out` is not as long as `slots`, and where a slot has no row.
    #[inline]
    pub fn dots_bf16(self, a: &[f32], rows: &[half::bf16], slots: &[u32], out: &mut [f32]) {
        assert_eq!(slots.len(), out.len());
        dispatch!(self, dots_bf16(a, rows, slots, out))
    }

    /// The inner products of an f32 vector `[D]` and the rows of `slots` in a matrix of half precision `[S, D]`; rows to come are
    /// asked for ahead.
    ///
    /// # Panics
    /// Where `out` is not as long as `slots`, and where a slot has no row.
    #[inline]
    pub fn dots_f16(self, a: &[f32], rows: &[half::f16], slots: &[u32], out: &mut [f32]) {
        assert_eq!(slots.len(), out.len());
        dispatch!(self, dots_f16(a, rows, slots, out))
    }
}
