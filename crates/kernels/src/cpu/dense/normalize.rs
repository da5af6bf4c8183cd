//! Softmax and layer normalization of rows. Each number is computed by the same operations in the same order as by the separate
//! element-wise steps and reductions, so that results are equal bit for bit.

use super::maps::{exp, lanes, larger};
use super::operands::{Fold, LANES, MapTarget, Operand};

/// Layer normalization: subtracts the mean, and divides by the root of the mean square of the differences.
#[derive(Clone, Copy, Debug, Default)]
pub struct Norm<'a> {
    /// Numbers that are normalized together.
    pub width: usize,
    /// One divisor per pass that centres the numbers: a pass subtracts their sum divided by it, which is their mean. A
    /// second pass removes the rounding error of the first mean. A product with the rounded reciprocal would not be the
    /// mean of equal numbers.
    pub centre: &'a [f32],
    /// Divisor that turns the sum of squares into a mean.
    pub count: f32,
    /// Number added to the mean square.
    pub epsilon: f32,
    /// Factors of the results, `[width]`, or empty.
    pub scale: &'a [f32],
    /// Numbers added to the results, `[width]`, or empty.
    pub bias: &'a [f32],
    /// True if negative results become 0.
    pub relu: bool,
}

#[inline(always)]
fn max(run: &[f32]) -> f32 {
    lanes(run, Fold::Max.identity_element(), larger)
}

#[inline(always)]
fn sum(run: &[f32]) -> f32 {
    lanes(run, 0.0, |x, y| x + y)
}

#[inline(always)]
fn sum_of_squares(run: &[f32]) -> f32 {
    let mut sums = [0f32; LANES];
    let (complete, rest) = run.as_chunks::<LANES>();
    for chunk in complete {
        sums.iter_mut().zip(chunk).for_each(|(sum, x)| *sum += x * x);
    }
    sums.iter_mut().zip(rest).for_each(|(sum, x)| *sum += x * x);
    sum(&sums)
}

/// Replaces numbers in registers. The last register may overlap the one before; it is read before any number is replaced.
#[inline(always)]
fn each(run: &mut [f32], f: impl Fn(f32) -> f32) {
    let Some(&last) = run.last_chunk::<LANES>() else {
        return run.iter_mut().for_each(|x| *x = f(*x));
    };
    for chunk in run.as_chunks_mut::<LANES>().0 {
        chunk.iter_mut().for_each(|x| *x = f(*x));
    }
    if !run.len().is_multiple_of(LANES)
        && let Some(to) = run.last_chunk_mut::<LANES>()
    {
        to.iter_mut().zip(last).for_each(|(to, x)| *to = f(x));
    }
}

/// Number of groups whose softmax steps are interleaved, because each step of a group depends on the step before.
const RUNS: usize = 16;

#[inline(always)]
pub(super) fn softmax<const FMA: bool>(numbers: &mut [f32], width: usize) {
    let width = width.max(1);
    for runs in numbers.chunks_mut(RUNS * width) {
        let mut folded = [0.0; RUNS];
        for (most, run) in folded.iter_mut().zip(runs.chunks_exact(width)) {
            *most = max(run);
        }
        for (most, run) in folded.iter().zip(runs.chunks_exact_mut(width)) {
            each(run, |x| exp::<FMA>(x - most));
        }
        for (total, run) in folded.iter_mut().zip(runs.chunks_exact(width)) {
            *total = sum(run);
        }
        for (total, run) in folded.iter().zip(runs.chunks_exact_mut(width)) {
            each(run, |x| x / total);
        }
    }
}

#[inline(always)]
pub(super) fn norm(norm: &Norm<'_>, input: &Operand<'_>, target: &mut MapTarget<'_>) {
    let width = norm.width;
    for r in 0..target.rows {
        for o in 0..target.outer {
            let from = &input.numbers[r * input.row + o * input.outer..][..width];
            let out = &mut target.numbers[r * target.stride + o * width..][..width];
            out.copy_from_slice(from);
            for count in norm.centre {
                let mean = sum(out) / count;
                out.iter_mut().for_each(|x| *x -= mean);
            }
            let deviation = (sum_of_squares(out) / norm.count + norm.epsilon).sqrt();
            match (norm.scale.is_empty(), norm.bias.is_empty()) {
                (false, false) => {
                    let both = norm.scale[..width].iter().zip(&norm.bias[..width]);
                    out.iter_mut().zip(both).for_each(|(x, (scale, bias))| *x = *x / deviation * scale + bias);
                }
                (false, true) => {
                    out.iter_mut().zip(&norm.scale[..width]).for_each(|(x, scale)| *x = *x / deviation * scale);
                }
                (true, false) => {
                    out.iter_mut().zip(&norm.bias[..width]).for_each(|(x, bias)| *x = *x / deviation + bias);
                }
                (true, true) => out.iter_mut().for_each(|x| *x /= deviation),
            }
            if norm.relu {
                out.iter_mut().for_each(|x| *x = if *x < 0.0 { 0.0 } else { *x });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::operands::{Binary, Unary};
    use super::*;
    use crate::cpu::Kernels;
    use proptest::prelude::*;

    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|n| ((n * 37 + seed * 101 + 11) % 127) as f32 / 16.0 - 4.0).collect()
    }

    /// Separate steps over groups of one row; each step writes its result to a new buffer.
    struct Steps {
        kernels: Kernels,
        runs: usize,
        width: usize,
    }

    impl Steps {
        fn operand<'a>(&self, numbers: &'a [f32]) -> Operand<'a> {
            let (outer, inner) = match numbers.len() {
                1 => (0, 0),
                n if n == self.runs && n != self.runs * self.width => (1, 0),
                n if n == self.width && n != self.runs * self.width => (0, 1),
                _ => (self.width, 1),
            };
            Operand { numbers, row: 0, outer, inner }
        }

        fn two(&self, f: Binary, a: &[f32], b: &[f32]) -> Vec<f32> {
            let is_wide = a.len() > self.runs;
            let inner = if is_wide { self.width } else { 1 };
            let mut numbers = vec![0.0; self.runs * inner];
            let stride = numbers.len();
            let mut target = MapTarget { numbers: &mut numbers, stride, rows: 1, outer: self.runs, inner };
            let per_run = |x: &'_ [f32]| usize::from(x.len() > 1);
            let (a, b) = match is_wide {
                true => (self.operand(a), self.operand(b)),
                false => (
                    Operand { numbers: a, row: 0, outer: per_run(a), inner: 0 },
                    Operand { numbers: b, row: 0, outer: per_run(b), inner: 0 },
                ),
            };
            self.kernels.map2(f, &a, &b, &mut target);
            numbers
        }

        fn one(&self, f: Unary, a: &[f32]) -> Vec<f32> {
            let mut numbers = vec![0.0; a.len()];
            let (stride, inner) = (a.len(), a.len());
            let mut target = MapTarget { numbers: &mut numbers, stride, rows: 1, outer: 1, inner };
            self.kernels.map1(f, &Operand { numbers: a, row: 0, outer: 0, inner: 1 }, &mut target);
            numbers
        }

        fn fold(&self, f: Fold, a: &[f32]) -> Vec<f32> {
            let mut numbers = vec![0.0; self.runs];
            let mut target =
                MapTarget { numbers: &mut numbers, stride: self.runs, rows: 1, outer: self.runs, inner: 1 };
            let input = Operand { numbers: a, row: 0, outer: self.width, inner: 1 };
            self.kernels.fold(f, &input, self.width, &mut target);
            numbers
        }
    }

    proptest! {
        /// Bit for bit; widths above the number of runs distinguish the shapes of operands.
        #[test]
        fn fused_steps_equal_separate_ones(
            runs in 2usize..22, more in 1usize..90, gap in 0usize..4, seed in 0usize..1000, masked in any::<bool>(),
            passes in 0usize..3, has_scale in any::<bool>(), has_bias in any::<bool>(), relu in any::<bool>(),
        ) {
            let width = runs + more;
            let mut x = numbers(runs * width, seed);
            if masked {
                x.iter_mut().skip(1).step_by(3).for_each(|x| *x = f32::NEG_INFINITY);
            }
            for kernels in Kernels::tried() {
                let steps = Steps { kernels, runs, width };
                let less = steps.two(Binary::Sub, &x, &steps.fold(Fold::Max, &x));
                let each = steps.one(Unary::Exp, &less);
                let want = steps.two(Binary::Div, &each, &steps.fold(Fold::Sum, &each));
                let mut made = x.clone();
                kernels.softmax(&mut made, width);
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                prop_assert_eq!(bits(&made), bits(&want), "softmax by {}", kernels.name());

                let x = numbers(runs * width, seed);
                let count = width as f32;
                let centre = vec![count; passes];
                let mut y = x.clone();
                for count in &centre {
                    y = steps.two(Binary::Sub, &y, &steps.two(Binary::Div, &steps.fold(Fold::Sum, &y), &[*count]));
                }
                let square = steps.two(Binary::Div, &steps.fold(Fold::Sum, &steps.two(Binary::Mul, &y, &y)), &[count]);
                let deviation = steps.one(Unary::Sqrt, &steps.two(Binary::Add, &square, &[1e-5]));
                let mut want = steps.two(Binary::Div, &y, &deviation);
                let (scale, bias) = (numbers(width, 3), numbers(width, 5));
                if has_scale {
                    want = steps.two(Binary::Mul, &want, &scale);
                }
                if has_bias {
                    want = steps.two(Binary::Add, &want, &bias);
                }
                if relu {
                    want = steps.one(Unary::Relu, &want);
                }
                let norm = Norm {
                    width, centre: &centre, count, epsilon: 1e-5, relu,
                    scale: if has_scale { &scale } else { &[] },
                    bias: if has_bias { &bias } else { &[] },
                };
                let stride = runs * width + gap;
                let rows: Vec<f32> = [&x[..], &vec![9.0; gap], &x].concat();
                let mut made = vec![7.5; 2 * stride];
                let input = Operand { numbers: &rows, row: stride, outer: width, inner: 1 };
                kernels.norm(&norm, &input, &mut MapTarget { numbers: &mut made, stride, rows: 2, outer: runs, inner: width });
                for row in made.chunks(stride) {
                    prop_assert_eq!(bits(&row[..runs * width]), bits(&want), "norm by {}", kernels.name());
                    prop_assert!(row[runs * width..].iter().all(|&x| x == 7.5));
                }
            }
        }
    }
}
