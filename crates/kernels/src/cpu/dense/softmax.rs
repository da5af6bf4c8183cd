//! Softmax in AVX-512. The compiler's version of `normalize::softmax` computes the last numbers of a run one by one.

use std::arch::x86_64::*;

use super::operands::{Fold, LANES};
use super::registers::{in_lanes, joined, joined_each, lanes, larger, stored};

/// Maximum width of runs whose sums are reduced together.
const NARROW: usize = 2 * LANES;

/// Computes `normalize::softmax`, bit for bit. Runs are divided by their sums while the exponentials of later runs are
/// computed, because the divider works beside the other units. The sums of 16 narrow runs are reduced together, and the
/// runs are divided beside the next 16. A wide run is divided beside the next run.
///
/// # Safety
/// The CPU has AVX-512 F, BW and VL, and FMA.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
pub(super) unsafe fn softmax(numbers: &mut [f32], width: usize) {
    let width = width.max(1);
    let mut before = Exponentials { runs: &mut [], sums: [1.0; LANES] };
    for runs in numbers.chunks_mut(LANES * width) {
        let least = _mm512_set1_ps(Fold::Max.identity_element());
        let mut maxima = [least; LANES];
        for (maxima, run) in maxima.iter_mut().zip(runs.chunks_exact(width)) {
            *maxima = in_lanes(run, least, |x, y| larger(x, y));
        }
        let maxima = stored(joined_each(maxima, |x, y| larger(x, y)));
        if width > NARROW {
            for (run, most) in runs.chunks_exact_mut(width).zip(maxima) {
                let sum = joined(exponentials(run, most, &mut before, 0), |x, y| _mm512_add_ps(x, y));
                before = Exponentials { runs: run, sums: [sum; LANES] };
            }
        } else {
            let mut sums = [_mm512_setzero_ps(); LANES];
            for (n, run) in runs.chunks_exact_mut(width).enumerate() {
                sums[n] = exponentials(run, maxima[n], &mut before, n);
            }
            before.divide_from(runs.len() / width, width);
            before = Exponentials { runs, sums: stored(joined_each(sums, |x, y| _mm512_add_ps(x, y))) };
        }
    }
    before.divide_from(0, width);
}

/// Runs of exponentials that follow each other, and their sums.
struct Exponentials<'a> {
    runs: &'a mut [f32],
    sums: [f32; LANES],
}

impl Exponentials<'_> {
    /// Divides the runs from number `first` on by their sums.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
    #[inline]
    fn divide_from(&mut self, first: usize, width: usize) {
        for (run, sum) in self.runs.chunks_exact_mut(width).zip(self.sums).skip(first) {
            for at in (0..width).step_by(LANES) {
                // SAFETY: the numbers of the mask are those of the run.
                unsafe { divide(run.as_mut_ptr().add(at), lanes(width - at), _mm512_set1_ps(sum)) };
            }
        }
    }
}

/// Replaces the numbers of a run by the exponentials of their differences to the maximum, and returns their sums per
/// lane. Divides run number `n` of `before`, if it exists, by its sum.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
#[inline]
fn exponentials(run: &mut [f32], most: f32, before: &mut Exponentials<'_>, n: usize) -> __m512 {
    let width = run.len();
    match before.runs.get_mut(n * width..(n + 1) * width) {
        Some(divided) => exponentials_beside::<true>(run, most, divided, before.sums[n]),
        None => exponentials_beside::<false>(run, most, &mut [], 1.0),
    }
}

/// Computes [`exponentials`]; if `DIVIDES`, divides another run of the same width by its sum.
///
/// # Panics
/// If the runs differ in width.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
#[inline]
fn exponentials_beside<const DIVIDES: bool>(run: &mut [f32], most: f32, divided: &mut [f32], sum: f32) -> __m512 {
    assert!(!DIVIDES || divided.len() == run.len(), "runs of different widths");
    let (most, total) = (_mm512_set1_ps(most), _mm512_set1_ps(sum));
    let mut sums = _mm512_setzero_ps();
    for first in (0..run.len()).step_by(LANES) {
        let mask = lanes(run.len() - first);
        // SAFETY: masked loads and stores touch only the numbers of the runs.
        unsafe {
            let at = run.as_mut_ptr().add(first);
            let made = exp(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask, at), most));
            _mm512_mask_storeu_ps(at, mask, made);
            sums = _mm512_mask_add_ps(sums, mask, sums, made);
            if DIVIDES {
                divide(divided.as_mut_ptr().add(first), mask, total);
            }
        }
    }
    sums
}

/// Divides the numbers at `at` by `total`.
///
/// # Safety
/// There are numbers at `at` for all lanes of the mask.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
#[inline]
unsafe fn divide(at: *mut f32, mask: __mmask16, total: __m512) {
    // SAFETY: this function's `# Safety` condition holds.
    unsafe { _mm512_mask_storeu_ps(at, mask, _mm512_div_ps(_mm512_maskz_loadu_ps(mask, at), total)) };
}

/// Computes `maps::exp` of numbers that are at most 0 or NaN, bit for bit.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
#[inline]
fn exp(x: __m512) -> __m512 {
    let number = |x: f32| _mm512_set1_ps(x);
    let (low, shift) = (number(-87.3), number(12_582_912.0));
    // The instruction returns its second operand if that is NaN.
    let inside = _mm512_max_ps(low, x);
    let shifted = _mm512_fmadd_ps(inside, number(std::f32::consts::LOG2_E), shift);
    let n = _mm512_sub_ps(shifted, shift);
    let r = _mm512_fmadd_ps(n, number(-0.693_145_75), inside);
    let r = _mm512_fmadd_ps(n, number(-1.428_606_8e-6), r);
    let mut p = number(1.987_569_1e-4);
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = _mm512_fmadd_ps(p, r, number(c));
    }
    let e = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, number(1.0)));
    let power = _mm512_slli_epi32::<23>(_mm512_castps_si512(shifted));
    let power = _mm512_add_epi32(power, _mm512_set1_epi32(0x3f80_0000));
    let scaled = _mm512_mul_ps(e, _mm512_castsi512_ps(power));
    _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, low), scaled)
}

#[cfg(test)]
mod tests {
    use crate::cpu::Kernels;
    use crate::cpu::dense::normalize;
    use proptest::prelude::*;

    proptest! {
        /// Bit for bit, with infinite numbers, NaN, and differences beyond the range of exponentials.
        #[test]
        fn softmax_equals_that_of_separate_steps(
            runs in 1usize..40, width in 1usize..130, size in -3i32..4, kind in 0u8..8, seed in 0usize..1000,
        ) {
            let mut numbers: Vec<f32> = (0..runs * width)
                .map(|n| (((n + seed) * 37 % 127) as f32 / 64.0 - 1.0) * 10f32.powi(size))
                .collect();
            let at = seed % numbers.len();
            match kind {
                0 => numbers[at] = f32::NAN,
                1 => numbers[at] = f32::INFINITY,
                2 => numbers[at] = f32::NEG_INFINITY,
                3 => numbers[..width].fill(f32::NEG_INFINITY),
                4 => numbers[at] = -1e9,
                _ => {}
            }
            let mut expected = numbers.clone();
            normalize::softmax::<true>(&mut expected, width);
            for kernels in Kernels::all().into_iter().filter(|kernels| kernels.name().starts_with("avx512")) {
                let mut made = numbers.clone();
                kernels.softmax(&mut made, width);
                let bits = |x: &[f32]| x.iter().map(|x| if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() }).collect::<Vec<_>>();
                prop_assert_eq!(bits(&made), bits(&expected));
            }
        }
    }
}
