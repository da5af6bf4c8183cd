//! Layer normalization in AVX-512. The steps of one group wait for each other: those of 16 groups are interleaved, and
//! the lanes of their sums are reduced together.

use std::arch::x86_64::*;

use super::normalize::Norm;
use super::operands::{LANES, MapTarget, Operand};
use super::registers::{in_lanes, joined_each, lanes, stored};

/// Groups of numbers that are normalized together: where each is read and written.
struct Groups {
    from: [*const f32; LANES],
    to: [*mut f32; LANES],
    count: usize,
    width: usize,
}

/// Computes `normalize::norm`, bit for bit.
///
/// # Panics
/// If a slice is shorter than the shapes say.
///
/// # Safety
/// The CPU has AVX-512 F, BW and VL, and FMA.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
pub(super) unsafe fn norm(norm: &Norm<'_>, input: &Operand<'_>, target: &mut MapTarget<'_>) {
    let (width, all) = (norm.width, target.rows * target.outer);
    assert!(norm.scale.is_empty() || norm.scale.len() >= width, "fewer factors than numbers");
    let written = target.outer * width;
    assert!(target.rows <= 1 || target.stride >= written, "rows that overlap");
    assert!(norm.bias.is_empty() || norm.bias.len() >= width, "a bias shorter than the numbers");
    assert!(all == 0 || target.numbers.len() >= (target.rows - 1) * target.stride + written, "a short result");
    let to = target.numbers.as_mut_ptr();
    for first in (0..all).step_by(LANES) {
        let count = LANES.min(all - first);
        let mut groups = Groups { from: [std::ptr::null(); LANES], to: [std::ptr::null_mut(); LANES], count, width };
        for n in 0..count {
            let (row, outer) = ((first + n) / target.outer, (first + n) % target.outer);
            groups.from[n] = input.numbers[row * input.row + outer * input.outer..][..width].as_ptr();
            // SAFETY: the result has room for all groups, as asserted.
            groups.to[n] = unsafe { to.add(row * target.stride + outer * width) };
        }
        // SAFETY: all groups have `width` numbers, and those written do not overlap, as asserted.
        unsafe { groups.normalize(norm) };
    }
}

impl Groups {
    /// Normalizes all groups.
    ///
    /// # Safety
    /// Each of the groups has `width` numbers to read and to write.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
    #[inline]
    unsafe fn normalize(&mut self, norm: &Norm<'_>) {
        let (none, width) = (_mm512_setzero_ps(), self.width);
        let mut sums = [none; LANES];
        for (n, sums) in sums.iter_mut().enumerate().take(self.count) {
            // SAFETY: this function's condition.
            unsafe {
                *sums = match norm.centre {
                    [] => centred::<true>(self.from[n], self.to[n], width, 0.0),
                    _ => in_lanes(std::slice::from_raw_parts(self.from[n], width), none, |x, y| _mm512_add_ps(x, y)),
                };
            }
        }
        for (pass, &count) in norm.centre.iter().enumerate() {
            let total = joined_each(sums, |x, y| _mm512_add_ps(x, y));
            let means = stored(_mm512_div_ps(total, _mm512_set1_ps(count)));
            for (n, sums) in sums.iter_mut().enumerate().take(self.count) {
                let from = if pass == 0 { self.from[n] } else { self.to[n] };
                // SAFETY: this function's condition.
                unsafe {
                    *sums = match pass + 1 == norm.centre.len() {
                        true => centred::<true>(from, self.to[n], width, means[n]),
                        false => centred::<false>(from, self.to[n], width, means[n]),
                    };
                }
            }
        }
        let squares = joined_each(sums, |x, y| _mm512_add_ps(x, y));
        let mean = _mm512_add_ps(_mm512_div_ps(squares, _mm512_set1_ps(norm.count)), _mm512_set1_ps(norm.epsilon));
        let deviations = stored(_mm512_sqrt_ps(mean));
        for (&to, &deviation) in self.to.iter().zip(&deviations).take(self.count) {
            // SAFETY: this function's condition.
            unsafe { divided(norm, to, width, deviation) };
        }
    }
}

/// Subtracts `mean` from the numbers of a group, and returns the sums per lane of the results, or of their squares.
///
/// # Safety
/// There are `width` numbers to read and to write.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
#[inline]
unsafe fn centred<const SQUARES: bool>(from: *const f32, to: *mut f32, width: usize, mean: f32) -> __m512 {
    let (mut sums, mean) = (_mm512_setzero_ps(), _mm512_set1_ps(mean));
    for at in (0..width).step_by(LANES) {
        let mask = lanes(width - at);
        // SAFETY: masked loads and stores touch only the numbers of the group.
        unsafe {
            let x = _mm512_sub_ps(_mm512_maskz_loadu_ps(mask, from.add(at)), mean);
            _mm512_mask_storeu_ps(to.add(at), mask, x);
            sums = _mm512_mask_add_ps(sums, mask, sums, if SQUARES { _mm512_mul_ps(x, x) } else { x });
        }
    }
    sums
}

/// Divides the numbers of a group by their deviation, and applies factors, bias and `Relu`.
///
/// # Safety
/// There are `width` numbers to read and to write, and as many factors and biases, or none.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
#[inline]
unsafe fn divided(norm: &Norm<'_>, to: *mut f32, width: usize, deviation: f32) {
    let deviation = _mm512_set1_ps(deviation);
    for at in (0..width).step_by(LANES) {
        let mask = lanes(width - at);
        // SAFETY: masked loads and stores touch only the numbers of the group, its factors and biases.
        unsafe {
            let mut x = _mm512_div_ps(_mm512_maskz_loadu_ps(mask, to.add(at)), deviation);
            if !norm.scale.is_empty() {
                x = _mm512_mul_ps(x, _mm512_maskz_loadu_ps(mask, norm.scale.as_ptr().add(at)));
            }
            if !norm.bias.is_empty() {
                x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, norm.bias.as_ptr().add(at)));
            }
            if norm.relu {
                let none = _mm512_setzero_ps();
                x = _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, none), none);
            }
            _mm512_mask_storeu_ps(to.add(at), mask, x);
        }
    }
}
