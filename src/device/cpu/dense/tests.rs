//! Products and element-wise work of every instruction set against sums in f64.

#![allow(clippy::unwrap_used)]

use super::*;
use proptest::prelude::*;

fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|n| ((n * 37 + seed * 101 + 11) % 127) as f32 / 64.0 - 1.0).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn products_are_sums_of_products(
        rows in 1usize..40, columns in 1usize..150, depths in prop::collection::vec(1usize..70, 1..4),
        packed in any::<bool>(), relu in any::<bool>(), gap in 0usize..5, seed in 0usize..1000,
    ) {
        let matrices: Vec<Vec<f32>> =
            depths.iter().enumerate().map(|(n, depth)| numbers(depth * columns, seed + n)).collect();
        let inputs: Vec<Vec<f32>> =
            depths.iter().enumerate().map(|(n, depth)| numbers(rows * (depth + gap), seed + 7 * n)).collect();
        let lines: Vec<Lines> = depths.iter().zip(&matrices)
            .map(|(depth, m)| if packed { pack(m, *depth, columns) } else { Lines::of(m) }).collect();
        let parts: Vec<Part<'_>> = (0..depths.len()).map(|n| Part {
            rows: &inputs[n], stride: depths[n] + gap, depth: depths[n],
            weights: Weights {
                numbers: lines[n].numbers(),
                row_stride: if packed { PANEL } else { columns },
                panel_stride: if packed { PANEL * depths[n] } else { PANEL },
            },
        }).collect();
        let bias = Lines::of(&numbers(columns, seed + 3));
        let product = Product { rows, columns, parts: &parts, bias: bias.numbers(), relu };
        for kernels in Kernels::all() {
            let stride = columns + gap;
            let mut out = vec![7.5; rows * stride];
            kernels.product(&product, &mut out, stride);
            for row in 0..rows {
                for column in 0..columns {
                    let term = |n: usize, k: usize| {
                        f64::from(inputs[n][row * (depths[n] + gap) + k]) * f64::from(matrices[n][k * columns + column])
                    };
                    let sum: f64 = (0..depths.len()).flat_map(|n| (0..depths[n]).map(move |k| term(n, k))).sum();
                    let want = sum + f64::from(bias.numbers()[column]);
                    let want = if relu { want.max(0.0) } else { want };
                    let got = f64::from(out[row * stride + column]);
                    prop_assert!((got - want).abs() < 1e-4, "{}: [{row}, {column}] {got} is not {want}", kernels.name());
                }
                prop_assert!(out[row * stride + columns..(row + 1) * stride].iter().all(|&x| x == 7.5));
                // The same row alone, bit for bit.
                let alone: Vec<Part<'_>> =
                    parts.iter().map(|p| Part { rows: &p.rows[row * p.stride..], ..*p }).collect();
                let mut one = vec![0.0; columns];
                kernels.product(&Product { rows: 1, parts: &alone, ..product }, &mut one, columns);
                prop_assert_eq!(&out[row * stride..row * stride + columns], &one[..]);
            }
        }
    }
}

#[test]
fn functions_are_those_of_the_library() {
    let mut inputs: Vec<f32> = (-2000..2000).map(|n| n as f32 / 20.0).collect();
    inputs.extend([f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 1e-30]);
    type Function = fn(f64) -> f64;
    let functions: [(Unary, Function); 9] = [
        (Unary::Relu, |x| if x < 0.0 { 0.0 } else { x }),
        (Unary::Sigmoid, |x| 1.0 / (1.0 + (-x).exp())),
        (Unary::Tanh, f64::tanh),
        (Unary::Exp, f64::exp),
        (Unary::Log, f64::ln),
        (Unary::Sqrt, f64::sqrt),
        (Unary::Abs, f64::abs),
        (Unary::Neg, |x| -x),
        (Unary::Reciprocal, |x| 1.0 / x),
    ];
    for kernels in Kernels::all() {
        for (f, want) in functions {
            let mut out = vec![0.0; inputs.len()];
            let input = Operand { numbers: &inputs, row: 0, outer: 0, inner: 1 };
            let (stride, inner) = (inputs.len(), inputs.len());
            let mut target = MapTarget { numbers: &mut out, stride, rows: 1, outer: 1, inner };
            kernels.map1(f, &input, &mut target);
            for (&x, &got) in inputs.iter().zip(&out) {
                let want = want(f64::from(x));
                let near = f64::from(got) == want || (f64::from(got) - want).abs() <= 1e-6 * want.abs() + 1e-37;
                // Beyond 88.37 the exponential is infinite already.
                let beyond = f == Unary::Exp && x > 88.37 && got == f32::INFINITY;
                let below = f == Unary::Sigmoid && x < -88.0 && got.abs() < 1e-37;
                assert!(near || beyond || below || (got.is_nan() && want.is_nan()), "{f:?}({x}): {got} is not {want}");
            }
        }
    }
}

#[test]
#[should_panic(expected = "weights too short")]
fn weights_that_end_early_are_refused() {
    let numbers = [1.0; 64];
    let weights = Weights { numbers: &numbers, row_stride: 16, panel_stride: 32 };
    let parts = [Part { rows: &numbers, stride: 5, depth: 5, weights }];
    let product = Product { rows: 1, columns: 16, parts: &parts, bias: &[], relu: false };
    Kernels::best().product(&product, &mut [0.0; 16], 16);
}
