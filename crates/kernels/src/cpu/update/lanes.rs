//! The 16 columns of a block in registers: the same operations on every instruction set, with the rounding of scalar operations.

/// Columns of a block.
pub const BLOCK: usize = 16;

/// Elements of a block.
pub(super) type Block = [f32; BLOCK];

/// A block in registers. A type is used only in code that is compiled for its instruction set.
pub(super) trait Lanes: Copy {
    fn load(from: &Block) -> Self;
    fn store(self, to: &mut Block);
    fn splat(x: f32) -> Self;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    fn sqrt(self) -> Self;
    /// Returns the sum of the columns: the upper half is added to the lower one until one number is left.
    fn sum(self) -> f32;
    /// Returns true if no number is NaN or exceeds `limit` in magnitude.
    fn is_within(self, limit: f32) -> bool;
}

/// Fallback without vector instructions.
#[derive(Clone, Copy)]
pub(super) struct Portable(Block);

impl Portable {
    #[inline(always)]
    fn with(self, other: Self, each: impl Fn(f32, f32) -> f32) -> Self {
        Portable(std::array::from_fn(|lane| each(self.0[lane], other.0[lane])))
    }
}

impl Lanes for Portable {
    #[inline(always)]
    fn load(from: &Block) -> Self {
        Portable(*from)
    }

    #[inline(always)]
    fn store(self, to: &mut Block) {
        *to = self.0;
    }

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Portable([x; BLOCK])
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.with(other, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.with(other, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.with(other, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.with(other, |a, b| a / b)
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        Portable(self.0.map(f32::sqrt))
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        let eight: [f32; 8] = std::array::from_fn(|lane| self.0[lane] + self.0[lane + 8]);
        let four: [f32; 4] = std::array::from_fn(|lane| eight[lane] + eight[lane + 4]);
        (four[0] + four[2]) + (four[1] + four[3])
    }

    #[inline(always)]
    fn is_within(self, limit: f32) -> bool {
        self.0.iter().fold(true, |all, x| all & (x.abs() <= limit))
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use std::arch::x86_64::*;

    use super::{BLOCK, Block, Lanes};

    /// One register of AVX-512.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx512(__m512);

    /// Two registers of AVX2.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx2([__m256; 2]);

    impl Lanes for Avx512 {
        #[inline(always)]
        fn load(from: &Block) -> Self {
            // SAFETY: AVX-512 F is available wherever this type is used; a block has 16 numbers.
            Avx512(unsafe { _mm512_loadu_ps(from.as_ptr()) })
        }

        #[inline(always)]
        fn store(self, to: &mut Block) {
            // SAFETY: AVX-512 F is available wherever this type is used; a block has 16 numbers.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), self.0) }
        }

        #[inline(always)]
        fn splat(x: f32) -> Self {
            // SAFETY: AVX-512 F is available wherever this type is used.
            Avx512(unsafe { _mm512_set1_ps(x) })
        }

        #[inline(always)]
        fn add(self, other: Self) -> Self {
            // SAFETY: AVX-512 F is available wherever this type is used.
            Avx512(unsafe { _mm512_add_ps(self.0, other.0) })
        }

        #[inline(always)]
        fn sub(self, other: Self) -> Self {
            // SAFETY: AVX-512 F is available wherever this type is used.
            Avx512(unsafe { _mm512_sub_ps(self.0, other.0) })
        }

        #[inline(always)]
        fn mul(self, other: Self) -> Self {
            // SAFETY: AVX-512 F is available wherever this type is used.
            Avx512(unsafe { _mm512_mul_ps(self.0, other.0) })
        }

        #[inline(always)]
        fn div(self, other: Self) -> Self {
            // SAFETY: AVX-512 F is available wherever this type is used.
            Avx512(unsafe { _mm512_div_ps(self.0, other.0) })
        }

        #[inline(always)]
        fn sqrt(self) -> Self {
            // SAFETY: AVX-512 F is available wherever this type is used.
            Avx512(unsafe { _mm512_sqrt_ps(self.0) })
        }

        #[inline(always)]
        fn sum(self) -> f32 {
            // SAFETY: AVX-512 F is available wherever this type is used; AVX-512 F includes AVX.
            unsafe {
                let low = _mm512_castps512_ps256(self.0);
                let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(self.0)));
                sum_of_eight(_mm256_add_ps(low, high))
            }
        }

        #[inline(always)]
        fn is_within(self, limit: f32) -> bool {
            // SAFETY: AVX-512 F is available wherever this type is used.
            unsafe { _mm512_cmp_ps_mask::<_CMP_NLE_UQ>(_mm512_abs_ps(self.0), _mm512_set1_ps(limit)) == 0 }
        }
    }

    impl Avx2 {
        #[inline(always)]
        fn with(self, other: Self, each: impl Fn(__m256, __m256) -> __m256) -> Self {
            Avx2([each(self.0[0], other.0[0]), each(self.0[1], other.0[1])])
        }
    }

    impl Lanes for Avx2 {
        #[inline(always)]
        fn load(from: &Block) -> Self {
            // SAFETY: AVX2 is available wherever this type is used; a block has 16 numbers.
            Avx2(unsafe { [_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(BLOCK / 2))] })
        }

        #[inline(always)]
        fn store(self, to: &mut Block) {
            // SAFETY: AVX2 is available wherever this type is used; a block has 16 numbers.
            unsafe {
                _mm256_storeu_ps(to.as_mut_ptr(), self.0[0]);
                _mm256_storeu_ps(to.as_mut_ptr().add(BLOCK / 2), self.0[1]);
            }
        }

        #[inline(always)]
        fn splat(x: f32) -> Self {
            // SAFETY: AVX2 is available wherever this type is used.
            Avx2([unsafe { _mm256_set1_ps(x) }; 2])
        }

        #[inline(always)]
        fn add(self, other: Self) -> Self {
            // SAFETY: AVX2 is available wherever this type is used.
            self.with(other, |a, b| unsafe { _mm256_add_ps(a, b) })
        }

        #[inline(always)]
        fn sub(self, other: Self) -> Self {
            // SAFETY: AVX2 is available wherever this type is used.
            self.with(other, |a, b| unsafe { _mm256_sub_ps(a, b) })
        }

        #[inline(always)]
        fn mul(self, other: Self) -> Self {
            // SAFETY: AVX2 is available wherever this type is used.
            self.with(other, |a, b| unsafe { _mm256_mul_ps(a, b) })
        }

        #[inline(always)]
        fn div(self, other: Self) -> Self {
            // SAFETY: AVX2 is available wherever this type is used.
            self.with(other, |a, b| unsafe { _mm256_div_ps(a, b) })
        }

        #[inline(always)]
        fn sqrt(self) -> Self {
            // SAFETY: AVX2 is available wherever this type is used.
            self.with(self, |a, _| unsafe { _mm256_sqrt_ps(a) })
        }

        #[inline(always)]
        fn sum(self) -> f32 {
            // SAFETY: AVX2 is available wherever this type is used.
            unsafe { sum_of_eight(_mm256_add_ps(self.0[0], self.0[1])) }
        }

        #[inline(always)]
        fn is_within(self, limit: f32) -> bool {
            // SAFETY: AVX2 is available wherever this type is used.
            unsafe {
                let (sign, limit) = (_mm256_set1_ps(-0.0), _mm256_set1_ps(limit));
                let beyond = |x| _mm256_cmp_ps::<_CMP_NLE_UQ>(_mm256_andnot_ps(sign, x), limit);
                _mm256_movemask_ps(_mm256_or_ps(beyond(self.0[0]), beyond(self.0[1]))) == 0
            }
        }
    }

    /// # Safety
    /// The CPU has AVX.
    #[inline(always)]
    unsafe fn sum_of_eight(eight: __m256) -> f32 {
        // SAFETY: this function's `# Safety` conditions hold.
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }
}

#[cfg(target_arch = "aarch64")]
pub(super) mod aarch64 {
    use std::arch::aarch64::*;

    use super::{BLOCK, Block, Lanes};

    /// Four registers of NEON.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Neon([float32x4_t; 4]);

    impl Neon {
        #[inline(always)]
        fn with(self, other: Self, each: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> Self {
            Neon(std::array::from_fn(|four| each(self.0[four], other.0[four])))
        }
    }

    impl Lanes for Neon {
        #[inline(always)]
        fn load(from: &Block) -> Self {
            // SAFETY: NEON is available wherever this type is used; a block has four times four numbers.
            Neon(std::array::from_fn(|four| unsafe { vld1q_f32(from.as_ptr().add(4 * four)) }))
        }

        #[inline(always)]
        fn store(self, to: &mut Block) {
            for four in 0..BLOCK / 4 {
                // SAFETY: NEON is available wherever this type is used; a block has four times four numbers.
                unsafe { vst1q_f32(to.as_mut_ptr().add(4 * four), self.0[four]) };
            }
        }

        #[inline(always)]
        fn splat(x: f32) -> Self {
            // SAFETY: NEON is available wherever this type is used.
            Neon([unsafe { vdupq_n_f32(x) }; 4])
        }

        #[inline(always)]
        fn add(self, other: Self) -> Self {
            // SAFETY: NEON is available wherever this type is used.
            self.with(other, |a, b| unsafe { vaddq_f32(a, b) })
        }

        #[inline(always)]
        fn sub(self, other: Self) -> Self {
            // SAFETY: NEON is available wherever this type is used.
            self.with(other, |a, b| unsafe { vsubq_f32(a, b) })
        }

        #[inline(always)]
        fn mul(self, other: Self) -> Self {
            // SAFETY: NEON is available wherever this type is used.
            self.with(other, |a, b| unsafe { vmulq_f32(a, b) })
        }

        #[inline(always)]
        fn div(self, other: Self) -> Self {
            // SAFETY: NEON is available wherever this type is used.
            self.with(other, |a, b| unsafe { vdivq_f32(a, b) })
        }

        #[inline(always)]
        fn sqrt(self) -> Self {
            // SAFETY: NEON is available wherever this type is used.
            self.with(self, |a, _| unsafe { vsqrtq_f32(a) })
        }

        #[inline(always)]
        fn sum(self) -> f32 {
            let [a, b, c, d] = self.0;
            // SAFETY: NEON is available wherever this type is used.
            unsafe {
                let four = vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d));
                let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
                vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
            }
        }

        #[inline(always)]
        fn is_within(self, limit: f32) -> bool {
            // A comparison with NaN is false, so that its lane is not all ones.
            // SAFETY: NEON is available wherever this type is used.
            let least = |x| unsafe { vminvq_u32(vcaleq_f32(x, vdupq_n_f32(limit))) };
            self.0.into_iter().all(|four| least(four) != 0)
        }
    }
}
