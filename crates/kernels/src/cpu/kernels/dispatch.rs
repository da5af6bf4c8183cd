//! The kernels as methods of [`Kernels`], which check their operands and select the instruction set.

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
            // SAFETY: `Kernels` exists only if the features of its instruction set were detected.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { avx2::$function($($argument),*) },
            // SAFETY: `Kernels` exists only if the features of its instruction set were detected.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { avx512::$function($($argument),*) },
            // SAFETY: `Kernels` exists only if the features of its instruction set were detected.
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => unsafe { neon::$function($($argument),*) },
            // SAFETY: `Kernels` exists only if the features of its instruction set were detected.
            #[cfg(target_arch = "aarch64")]
            Isa::Dotprod => unsafe { dotprod::$function($($argument),*) },
        }
    };
}

impl Kernels {
    /// Scores the items of `blocks` from block `from` on and stages those that reach `threshold`, until all blocks are
    /// done or the staging has no room for another block. Returns the next block to scan.
    ///
    /// A score is `(128 Σ x high + Σ x low) * item scale * query scale`, in f32 after the two exact sums. Scores below
    /// `threshold` and NaN are left out.
    ///
    /// # Panics
    /// If slices are shorter than documented.
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

    /// Scans like [`Kernels::scan`], but only the blocks of `picks`, from pick `from` on, in any order; later blocks are
    /// prefetched. Returns the next pick to scan.
    ///
    /// # Panics
    /// As [`Kernels::scan`], and if a pick is not a block of `blocks`.
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
        assert!(picks.iter().all(|pick| (pick.block as usize) < count), "a pick exceeds the number of blocks");
        #[cfg(target_arch = "x86_64")]
        if self.isa == Isa::Avx512 {
            // SAFETY: `Kernels` exists only if the features of its instruction set were detected.
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
            let mut complete = Staging { scores: &mut scores, slots: &mut items, len: 0 };
            dispatch!(self, scan(&one, query, threshold, 0, &mut complete));
            let len = complete.len;
            for (&score, &of_block) in scores[..len].iter().zip(&items).filter(|(_, i)| pick.mask >> **i & 1 == 1) {
                staging.scores[staging.len] = score;
                staging.slots[staging.len] = blocks.first_slot + item as u32 + of_block;
                staging.len += 1;
            }
        }
        picks.len()
    }

    /// Runs [`Kernels::scan`] for several queries at once, so that each loaded cache line serves up to four queries.
    ///
    /// # Panics
    /// As [`Kernels::scan`], and if a staging has no room for all blocks.
    pub fn scan_many(self, blocks: &Blocks<'_>, lanes: &mut [Lane<'_>]) {
        let most = blocks.items.next_multiple_of(BLOCK);
        for Lane { query, staging, .. } in lanes.iter() {
            check(blocks, query);
            staging.check(most);
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(source) = self.tiles {
            return match source {
                // SAFETY: the features were detected; tiles are released before a scan ends.
                Source::Instructions => unsafe { amx::scan_many(blocks, lanes) },
                #[cfg(any(test, feature = "testing"))]
                Source::Emulated { wrong } => amx::scan_many_emulated(&mut Emulated::new(wrong), blocks, lanes),
            };
        }
        dispatch!(self, scan_many(blocks, lanes));
    }

    /// Returns, for each of four queries, the item with the largest score less `penalties` `[blocks * 16]`; ties go to the first
    /// item. Only the high rows of the queries are used.
    ///
    /// # Panics
    /// As [`Kernels::scan`], and without items.
    #[inline]
    pub fn nearest4(self, blocks: &Blocks<'_>, penalties: &[f32], queries: &[Int8Query<'_>; 4]) -> [u32; 4] {
        queries.iter().for_each(|q| check(blocks, q));
        assert!(blocks.items > 0 && penalties.len() >= blocks.items.next_multiple_of(BLOCK));
        dispatch!(self, nearest4(blocks, penalties, queries))
    }

    /// Returns the `k`-th largest of `values` and reorders them. No value may be NaN.
    ///
    /// # Panics
    /// If `k` is 0 or larger than the number of values.
    #[inline]
    pub fn kth(self, values: &mut [f32], k: usize) -> f32 {
        assert!((1..=values.len()).contains(&k));
        dispatch!(self, kth(values, k))
    }

    /// Moves the scores that are at least `threshold`, and their slots, to the front in order, and returns their number.
    ///
    /// # Panics
    /// If the lengths differ.
    #[inline]
    pub fn retain(self, scores: &mut [f32], slots: &mut [u32], threshold: f32) -> usize {
        assert_eq!(scores.len(), slots.len());
        dispatch!(self, retain(scores, slots, threshold))
    }

    /// Stages those of `scores` `[n]` that are at least `threshold`, as [`Kernels::scan`] does for the scores that it computes.
    /// The first score belongs to slot `first_slot`.
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

    /// Returns the inner product of two f32 vectors of equal length.
    ///
    /// # Panics
    /// If the lengths differ.
    #[inline]
    pub fn dot_f32(self, a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len());
        dispatch!(self, dot_f32(a, b))
    }

    /// Returns the inner product of an f32 vector and a bfloat16 row.
    ///
    /// # Panics
    /// If the lengths differ.
    #[inline]
    pub fn dot_bf16(self, a: &[f32], b: &[half::bf16]) -> f32 {
        assert_eq!(a.len(), b.len());
        dispatch!(self, dot_bf16(a, b))
    }

    /// Returns the inner product of an f32 vector and a half-precision row.
    ///
    /// # Panics
    /// If the lengths differ.
    #[inline]
    pub fn dot_f16(self, a: &[f32], b: &[half::f16]) -> f32 {
        assert_eq!(a.len(), b.len());
        dispatch!(self, dot_f16(a, b))
    }

    /// Computes the inner products of an f32 vector `[D]` and the rows of `slots` in an f32 matrix `[S, D]`; later rows are
    /// prefetched.
    ///
    /// # Panics
    /// If `out` and `slots` differ in length, or a slot has no row.
    #[inline]
    pub fn dots_f32(self, a: &[f32], rows: &[f32], slots: &[u32], out: &mut [f32]) {
        assert_eq!(slots.len(), out.len());
        dispatch!(self, dots_f32(a, rows, slots, out))
    }

    /// Computes the inner products of an f32 vector `[D]` and the rows of `slots` in a bfloat16 matrix `[S, D]`; later rows are
    /// prefetched.
    ///
    /// # Panics
    /// If `out` and `slots` differ in length, or a slot has no row.
    #[inline]
    pub fn dots_bf16(self, a: &[f32], rows: &[half::bf16], slots: &[u32], out: &mut [f32]) {
        assert_eq!(slots.len(), out.len());
        dispatch!(self, dots_bf16(a, rows, slots, out))
    }

    /// Computes the inner products of an f32 vector `[D]` and the rows of `slots` in a half-precision matrix `[S, D]`; later rows
    /// are prefetched.
    ///
    /// # Panics
    /// If `out` and `slots` differ in length, or a slot has no row.
    #[inline]
    pub fn dots_f16(self, a: &[f32], rows: &[half::f16], slots: &[u32], out: &mut [f32]) {
        assert_eq!(slots.len(), out.len());
        dispatch!(self, dots_f16(a, rows, slots, out))
    }
}
