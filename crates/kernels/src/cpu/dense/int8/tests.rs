//! Int8 products of every instruction set against sums of codes in wide integers.

#![allow(clippy::unwrap_used)]

use super::*;
use proptest::prelude::*;

fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|n| ((n * 37 + seed * 101 + 11) % 127) as f32 / 64.0 - 1.0).collect()
}

/// Quantized number: `scale * (code - zero)`.
struct Oracle {
    scale: f32,
    zero: i64,
    codes: Vec<i64>,
}

fn row_oracle(row: &[f32]) -> Oracle {
    if row.iter().any(|x| !x.is_finite()) {
        return Oracle { scale: f32::NAN, zero: 0, codes: vec![0; row.len()] };
    }
    let (min, max) = row.iter().fold((0f32, 0f32), |(min, max), &x| (min.min(x), max.max(x)));
    let scale = max / 255.0 - min / 255.0;
    if scale < f32::MIN_POSITIVE {
        return Oracle { scale: 0.0, zero: 0, codes: vec![0; row.len()] };
    }
    let inverse = 1.0 / scale;
    let zero = (-min * inverse).round_ties_even() as i64;
    let code = |x: &f32| ((x * inverse).round_ties_even() as i64 + zero).min(255);
    let codes: Vec<i64> = row.iter().map(code).collect();
    assert!(codes.iter().all(|code| (0..=255).contains(code)));
    Oracle { scale, zero, codes }
}

fn column_oracle(column: &[f32]) -> Oracle {
    let largest = column.iter().fold(0f32, |largest, w| largest.max(w.abs()));
    let scale = largest / 127.0;
    let is_none = scale < f32::MIN_POSITIVE;
    let inverse = if is_none { 0.0 } else { 1.0 / scale };
    let code = |w: &f32| (w * inverse).round_ties_even().clamp(-127.0, 127.0) as i64;
    Oracle { scale: if is_none { 0.0 } else { scale }, zero: 0, codes: column.iter().map(code).collect() }
}

fn number_oracle(x: &Oracle, w: &Oracle) -> f32 {
    let sum: i64 = x.codes.iter().zip(&w.codes).map(|(code, w)| (code - x.zero) * w).sum();
    (sum as f32 * w.scale) * x.scale
}

/// A product of several parts whose rows are `gap` further apart than their depth.
struct Case {
    rows: usize,
    columns: usize,
    depths: Vec<usize>,
    gap: usize,
    inputs: Vec<Vec<f32>>,
    matrices: Vec<Vec<f32>>,
    bias: Option<Lines>,
}

impl Case {
    fn of(rows: usize, columns: usize, depths: &[usize], gap: usize, seed: usize) -> Case {
        let part = |n: usize, count: usize| numbers(count, seed + 7 * n);
        let each = || depths.iter().copied().enumerate();
        Case {
            rows,
            columns,
            depths: depths.to_vec(),
            gap,
            inputs: each().map(|(n, depth)| part(n, rows * (depth + gap))).collect(),
            matrices: each().map(|(n, depth)| part(n + 1, depth * columns)).collect(),
            bias: (!seed.is_multiple_of(3)).then(|| Lines::of(&numbers(columns, seed + 3))),
        }
    }

    fn row(&self, part: usize, row: usize) -> &[f32] {
        &self.inputs[part][row * (self.depths[part] + self.gap)..][..self.depths[part]]
    }

    fn run(&self, kernels: Kernels, rows: std::ops::Range<usize>, map: Option<Unary>) -> Vec<f32> {
        let quantized = self.matrices.iter().zip(&self.depths);
        let matrices: Vec<Int8Matrix> =
            quantized.map(|(matrix, depth)| Int8Matrix::quantize(matrix, *depth, self.columns).unwrap()).collect();
        let parts = matrices.iter().enumerate().map(|(n, matrix)| {
            let stride = self.depths[n] + self.gap;
            Int8Part { rows: &self.inputs[n][rows.start * stride..], stride, matrix }
        });
        let parts: Vec<Int8Part<'_>> = parts.collect();
        let bias = self.bias.as_ref().map_or(&[][..], Lines::numbers);
        let stride = self.columns + self.gap;
        let mut out = vec![7.5; rows.len() * stride];
        kernels.product_int8(&Int8Product { rows: rows.len(), parts: &parts, bias, map }, &mut out, stride);
        for behind in out.chunks_exact(stride) {
            assert!(behind[self.columns..].iter().all(|x| *x == 7.5));
        }
        out.chunks_exact(stride).flat_map(|row| row[..self.columns].to_vec()).collect()
    }

    fn expected(&self) -> Vec<f32> {
        let column = |n: usize, column: usize| -> Vec<f32> {
            self.matrices[n].iter().skip(column).step_by(self.columns).copied().take(self.depths[n]).collect()
        };
        let columns: Vec<Vec<Oracle>> = (0..self.depths.len())
            .map(|n| (0..self.columns).map(|at| column_oracle(&column(n, at))).collect())
            .collect();
        let mut expected = Vec::new();
        for row in 0..self.rows {
            let rows: Vec<Oracle> = (0..self.depths.len()).map(|n| row_oracle(self.row(n, row))).collect();
            for at in 0..self.columns {
                let first = self.bias.as_ref().map_or(0.0, |bias| bias.numbers()[at]);
                expected.push(rows.iter().zip(&columns).fold(first, |sum, (x, w)| number_oracle(x, &w[at]) + sum));
            }
        }
        expected
    }
}

/// All NaN are equal.
fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Bit for bit, on every instruction set; and so are the rows of any part of a batch.
    #[test]
    fn int8_products_are_exact_sums_of_codes(
        rows in 0usize..40, columns in prop_oneof![3 => 1usize..18, 7 => 1usize..300],
        depths in prop_oneof![
            6 => prop::collection::vec(1usize..70, 1..2),
            3 => prop::collection::vec(0usize..40, 1..4),
            1 => prop::collection::vec(500usize..700, 1..2),
        ],
        gap in 0usize..5, seed in 0usize..1000, cut in 0usize..40,
    ) {
        let case = Case::of(rows, columns, &depths, gap, seed);
        let expected = case.expected();
        for kernels in Kernels::tried() {
            let made = case.run(kernels, 0..rows, None);
            prop_assert_eq!(bits(&made), bits(&expected), "{}", kernels.name());
            let cut = cut.min(rows);
            let parts = [case.run(kernels, 0..cut, None), case.run(kernels, cut..rows, None)].concat();
            prop_assert_eq!(bits(&parts), bits(&expected), "{} in two batches", kernels.name());
        }
    }

    /// Rows of any magnitude and sign, with zeros, subnormal, infinite numbers and NaN.
    #[test]
    fn rows_of_any_magnitude_are_quantized_alike(
        rows in prop::collection::vec((-40i32..39, 0u8..7, 0usize..1000), 1..20), depth in 1usize..90, columns in 1usize..40,
    ) {
        let mut case = Case::of(rows.len(), columns, &[depth], 0, 0);
        for (n, &(power, kind, seed)) in rows.iter().enumerate() {
            let row = &mut case.inputs[0][n * depth..][..depth];
            let size = 10f32.powi(power);
            row.iter_mut().zip(numbers(depth, seed)).for_each(|(x, number)| {
                *x = match kind {
                    0 => 0.0,
                    1 => number.abs() * size,
                    2 => -number.abs() * size,
                    _ => number * size,
                };
            });
            let at = seed % depth;
            match kind {
                4 => row[at] = f32::NAN,
                5 => row[at] = f32::INFINITY,
                6 => row[at] = f32::MAX,
                _ => {}
            }
        }
        let expected = case.expected();
        for kernels in Kernels::tried() {
            prop_assert_eq!(bits(&case.run(kernels, 0..rows.len(), None)), bits(&expected), "{}", kernels.name());
        }
        for (row, &(_, kind, _)) in rows.iter().enumerate() {
            let row = &expected[row * columns..][..columns];
            prop_assert!(row.iter().all(|x| x.is_nan() == (kind == 4 || kind == 5)));
        }
    }

    /// The stated error: half a step of the row for each weight, half a step of the column for each number.
    #[test]
    fn the_error_is_at_most_half_a_step_per_factor(
        rows in 1usize..10, columns in 1usize..40, depth in 1usize..200, seed in 0usize..1000,
    ) {
        let mut case = Case::of(rows, columns, &[depth], 0, seed);
        case.bias = None;
        let made = case.run(Kernels::best(), 0..rows, None);
        for row in 0..rows {
            let x = case.row(0, row);
            let (min, max) = x.iter().fold((0f32, 0f32), |(min, max), &x| (min.min(x), max.max(x)));
            let step = f64::from(max - min) / 255.0;
            for column in 0..columns {
                let weights = (0..depth).map(|k| f64::from(case.matrices[0][k * columns + column]));
                let weights: Vec<f64> = weights.collect();
                let step_of_column = weights.iter().fold(0f64, |most, w| most.max(w.abs())) / 127.0;
                let exact: f64 = x.iter().zip(&weights).map(|(x, w)| f64::from(*x) * w).sum();
                let bound: f64 = x.iter().zip(&weights)
                    .map(|(x, w)| (step * w.abs() + step_of_column * f64::from(x.abs()) + step * step_of_column / 2.0) / 2.0)
                    .sum();
                let got = f64::from(made[row * columns + column]);
                prop_assert!((got - exact).abs() <= bound * 1.0001 + 1e-5, "{got} is not {exact} within {bound}");
            }
        }
    }
}

#[test]
fn functions_are_applied_to_the_sums_of_all_parts() {
    for (rows, columns, depths) in [(1, 300, &[40][..]), (17, 131, &[40, 9]), (30, 5, &[3]), (29, 256, &[64])] {
        let case = Case::of(rows, columns, depths, 2, 1);
        for kernels in Kernels::tried() {
            let sums = case.run(kernels, 0..rows, None);
            for f in [Unary::Relu, Unary::Gelu, Unary::Silu] {
                let mut expected = vec![0.0; sums.len()];
                let input = Operand { numbers: &sums, row: 0, outer: 0, inner: 1 };
                let count = sums.len();
                let mut target = MapTarget { numbers: &mut expected, stride: count, rows: 1, outer: 1, inner: count };
                kernels.map1(f, &input, &mut target);
                assert_eq!(bits(&case.run(kernels, 0..rows, Some(f))), bits(&expected), "{} {f:?}", kernels.name());
            }
        }
    }
}

#[test]
fn sums_of_the_largest_depth_are_exact() {
    let (depth, columns) = (INT8_DEPTH_MAX, 3);
    let matrix = vec![1.0; depth * columns];
    let quantized = Int8Matrix::quantize(&matrix, depth, columns).unwrap();
    for kernels in Kernels::tried() {
        for x in [1.0, -1.0] {
            let rows = vec![x; depth];
            let parts = [Int8Part { rows: &rows, stride: depth, matrix: &quantized }];
            let mut out = [0.0; 3];
            let product = Int8Product { rows: 1, parts: &parts, bias: &[], map: None };
            kernels.product_int8(&product, &mut out, columns);
            assert!(out.iter().all(|got| (got / (x * depth as f32) - 1.0).abs() < 1e-6), "{}: {out:?}", kernels.name());
        }
    }
}

/// Factors whose scales have a product beyond f32, and a large row whose sum of codes times its scale is beyond f32.
#[test]
fn results_are_finite_if_those_of_f32_are() {
    for (row, column, expected) in [([1e38, 0.0], [0.0, 1e6], 0.0), ([1e38, 1e38], [1e-6, 1e-6], 2e32)] {
        let quantized = Int8Matrix::quantize(&column, 2, 1).unwrap();
        for kernels in Kernels::tried() {
            let parts = [Int8Part { rows: &row, stride: 2, matrix: &quantized }];
            let mut out = [7.5];
            kernels.product_int8(&Int8Product { rows: 1, parts: &parts, bias: &[], map: None }, &mut out, 1);
            assert!((out[0] - expected).abs() <= 1e-5 * expected, "{}: {out:?} is not {expected}", kernels.name());
            let exact = number_oracle(&row_oracle(&row), &column_oracle(&column));
            assert_eq!(bits(&out), bits(&[exact]), "{}", kernels.name());
        }
    }
}

#[test]
fn matrices_that_int8_cannot_represent_are_rejected() {
    assert!(Int8Matrix::quantize(&[1.0, f32::NAN], 2, 1).is_none());
    assert!(Int8Matrix::quantize(&[f32::INFINITY], 1, 1).is_none());
    assert!(Int8Matrix::quantize(&vec![1.0; INT8_DEPTH_MAX + 1], INT8_DEPTH_MAX + 1, 1).is_none());
    assert!(Int8Matrix::quantize(&[], 0, 0).is_none());
    let matrix = Int8Matrix::quantize(&[f32::MAX, 1e-45, 0.0, -1.0], 2, 2).unwrap();
    assert_eq!((matrix.depth(), matrix.columns(), matrix.scales[1]), (2, 2, 1.0 / 127.0));
}
