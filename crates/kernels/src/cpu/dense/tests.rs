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
        rows in 1usize..40, columns in prop_oneof![3 => 1usize..18, 7 => 1usize..150], depths in prop::collection::vec(1usize..70, 1..=PARTS_MAX),
        packed in any::<bool>(), relu in any::<bool>(), gap in 0usize..5, seed in 0usize..1000, backwards in any::<bool>(),
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
                row_stride: if packed { packed_stride(columns) } else { columns },
                panel_stride: if packed { packed_stride(columns) * depths[n] } else { PANEL },
            },
        }).collect();
        let bias = Lines::of(&numbers(columns, seed + 3));
        let product = Product { rows, columns, parts: &parts, bias: bias.numbers(), relu, backwards, ..Product::default() };
        for kernels in Kernels::tried() {
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn skipped_zeros_change_no_result(
        rows in 1usize..150, columns in 40usize..330, depths in prop::collection::vec(0usize..80, 1..4), zeros in 0usize..=100,
        relu in any::<bool>(), has_bias in any::<bool>(), gap in 0usize..5, seed in 0usize..1000,
    ) {
        let packed: Vec<Lines> =
            depths.iter().map(|&depth| pack(&numbers(depth * columns, seed + depth), depth, columns)).collect();
        let inputs: Vec<Vec<f32>> = depths.iter().map(|depth| {
            let mut inputs = numbers(rows * (depth + gap), seed + 7 * depth);
            inputs.iter_mut().enumerate().filter(|(n, _)| (n * 7919 + seed) % 101 < zeros).for_each(|(_, x)| *x = 0.0);
            // Numbers that are not finite are not skipped.
            inputs.iter_mut().skip(seed).step_by(997).for_each(|x| *x = f32::NAN);
            inputs
        }).collect();
        let parts: Vec<Part<'_>> = (0..depths.len()).map(|n| Part {
            rows: &inputs[n], stride: depths[n] + gap, depth: depths[n],
            weights: Weights { numbers: packed[n].numbers(), row_stride: PANEL, panel_stride: PANEL * depths[n] },
        }).collect();
        let bias = Lines::of(&numbers(columns, seed + 3));
        let bias = if has_bias { bias.numbers() } else { &[] };
        let product = Product { rows, columns, parts: &parts, bias, relu, ..Product::default() };
        for kernels in Kernels::tried() {
            let stride = columns + gap;
            let [mut made, mut want] = [vec![7.5; rows * stride], vec![7.5; rows * stride]];
            kernels.product(&Product { skips_zeros: true, ..product }, &mut made, stride);
            kernels.product(&product, &mut want, stride);
            // Adding 0 removes the sign of zeros.
            let bits = |numbers: &[f32]| numbers.iter().map(|x| (x + 0.0).to_bits()).collect::<Vec<u32>>();
            prop_assert_eq!(bits(&made), bits(&want), "{}", kernels.name());
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn zeros_are_skipped_if_there_are_many() {
    let packed = pack(&numbers(64 * 96, 3), 64, 96);
    let weights = Weights { numbers: packed.numbers(), row_stride: PANEL, panel_stride: 64 * PANEL };
    for _ in Kernels::tried().into_iter().filter(|kernels| kernels.isa == Isa::Avx512) {
        for (zeros, skips) in [(0, false), (10, false), (20, true), (64, true)] {
            let inputs: Vec<f32> = (0..8 * 64).map(|n| if n % 64 < zeros { 0.0 } else { 0.5 }).collect();
            let part = Part { rows: &inputs, stride: 64, depth: 64, weights };
            let product = Product { rows: 8, columns: 96, parts: &[part], ..Product::default() };
            // SAFETY: the CPU has AVX-512, and the slices are complete.
            assert_eq!(unsafe { sparse::product(&product, &mut [0.0; 8 * 96], 96) }, skips, "{zeros} zeros of 64");
        }
    }
}

/// Rows whose distance is a large power of two are copied to another distance, which does not change the result.
#[test]
fn products_of_rows_far_apart_are_those_of_adjacent_rows() {
    for (rows, depth, stride, columns) in
        [(8, 512, 512, 33), (29, 70, 512, 64), (50, 1024, 1024, 40), (13, 100, 1536, 256)]
    {
        let (apart, matrix) = (numbers(rows * stride, 3), numbers(depth * columns, 5));
        let adjacent: Vec<f32> = apart.chunks(stride).flat_map(|row| row[..depth].to_vec()).chain([0.0]).collect();
        let (packed, bias) = (pack(&matrix, depth, columns), Lines::of(&numbers(columns, 7)));
        let weights = Weights { numbers: packed.numbers(), row_stride: PANEL, panel_stride: depth * PANEL };
        for kernels in Kernels::tried() {
            let [mut made, mut want] = [vec![7.5; rows * (columns + 2)], vec![7.5; rows * (columns + 2)]];
            for (out, numbers, stride, is_apart) in
                [(&mut made, &apart, stride, true), (&mut want, &adjacent, depth, false)]
            {
                // A second part without numbers prevents the copy of the rows.
                let nothing = Part { rows: numbers, ..Part::default() };
                let part = Part { rows: numbers, stride, depth, weights };
                let parts = if is_apart { vec![part] } else { vec![part, nothing] };
                let product = Product { rows, columns, parts: &parts, bias: bias.numbers(), ..Product::default() };
                kernels.product(&product, out, columns + 2);
            }
            assert_eq!(made, want, "{}", kernels.name());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn outer_products_are_summed_in_the_order_of_rows(
        rows in 0usize..40, cut in 0usize..40, depth in 1usize..40, columns in prop_oneof![1 => 1usize..3, 3 => 1usize..150],
        gap in 0usize..5, is_shared in any::<bool>(), seed in 0usize..1000,
    ) {
        let (left_stride, right_stride) = (if is_shared { 0 } else { depth + gap }, columns + 2 * gap);
        let (left, right) = (numbers((rows + 1) * (depth + gap), seed), numbers((rows + 1) * right_stride, seed + 5));
        let before = numbers(depth * columns, seed + 9);
        for kernels in Kernels::tried() {
            let add = |first: usize, rows: usize, out: &mut [f32]| {
                let (left, right) = (&left[first * left_stride..], &right[first * right_stride..]);
                kernels.outer(&Outer { rows, left, left_stride, depth, right, right_stride, columns }, out);
            };
            let mut out = before.clone();
            out.extend([7.5; 3]);
            add(0, rows, &mut out);
            prop_assert_eq!(&out[depth * columns..], &[7.5; 3]);
            for (n, &got) in out[..depth * columns].iter().enumerate() {
                let term = |row: usize| {
                    f64::from(left[row * left_stride + n / columns]) * f64::from(right[row * right_stride + n % columns])
                };
                let want = f64::from(before[n]) + (0..rows).map(term).sum::<f64>();
                prop_assert!((f64::from(got) - want).abs() < 1e-4, "{}: number {n}: {got} is not {want}", kernels.name());
            }
            // Cut into two blocks, bit for bit.
            let cut = cut.min(rows);
            let mut parts = before.clone();
            add(0, cut, &mut parts);
            add(cut, rows - cut, &mut parts);
            prop_assert_eq!(&parts[..], &out[..depth * columns]);
        }
    }
}

fn rounded(x: f32) -> f32 {
    half::bf16::from_f32(x).to_f32()
}

/// Returns the length in f32 of a row of `count` numbers in pairs.
fn room(count: usize) -> usize {
    Form::Pairs.room(count).next_multiple_of(STEP)
}

/// Rows as pairs, `stride` pairs apart.
fn pairs_of(kernels: Kernels, rows: &[f32], depth: usize, stride: usize) -> Vec<f32> {
    if depth == 0 {
        return Vec::new();
    }
    let count = rows.len() / depth;
    let mut out = vec![0.0; count * stride];
    let input = Operand { numbers: rows, row: depth, outer: 0, inner: 1 };
    let mut target = MapTarget { numbers: &mut out, stride, rows: count, outer: 1, inner: stride };
    kernels.narrow(&input, depth, &mut target);
    out
}

/// The numbers that pairs hold.
fn halves(pairs: &[f32]) -> Vec<f32> {
    pairs.iter().flat_map(|x| [x.to_bits() << 16, x.to_bits() & 0xffff_0000].map(f32::from_bits)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn products_of_pairs_are_sums_of_products_of_rounded_numbers(
        rows in 1usize..40, columns in 1usize..150, depths in prop::collection::vec(prop_oneof![1 => Just(0), 9 => 1usize..70], 1..4),
        relu in any::<bool>(), into_pairs in any::<bool>(), seed in 0usize..1000, backwards in any::<bool>(),
    ) {
        let inputs: Vec<Vec<f32>> = depths.iter().enumerate().map(|(n, d)| numbers(rows * d, seed + 7 * n)).collect();
        let matrices: Vec<Vec<f32>> = depths.iter().enumerate().map(|(n, d)| numbers(d * columns, seed + n)).collect();
        let bias = Lines::of(&numbers(columns, seed + 3));
        let result = if into_pairs { Form::Pairs } else { Form::Single };
        let stride = columns.next_multiple_of(PANEL);
        for kernels in Kernels::tried() {
            let packed: Vec<Lines> = depths.iter().zip(&matrices).map(|(&depth, matrix)| {
                let all = room(depth);
                let mut own = Lines::new(all * stride);
                if depth > 0 {
                    kernels.pack_narrow(matrix, depth, columns, PairRows { all, first: 0 }, own.numbers_mut());
                    assert_eq!(own.numbers(), pack_pairs(matrix, depth, columns).numbers());
                }
                own
            }).collect();
            let pairs: Vec<Vec<f32>> =
                depths.iter().zip(&inputs).map(|(&d, x)| pairs_of(kernels, x, d, room(d))).collect();
            let parts: Vec<Part<'_>> = (0..depths.len()).map(|n| {
                let (depth, stride) = (Form::Pairs.room(depths[n]), room(depths[n]));
                let weights = Weights { numbers: packed[n].numbers(), row_stride: PANEL, panel_stride: stride * PANEL };
                Part { rows: &pairs[n], stride, depth, weights }
            }).collect();
            let product =
                Product { rows, columns, parts: &parts, bias: bias.numbers(), relu, factors: Form::Pairs, result, backwards, ..Product::default() };
            let mut out = vec![7.5; rows * stride];
            kernels.product(&product, &mut out, stride);
            for row in 0..rows {
                let made = &out[row * stride..(row + 1) * stride];
                let made = if into_pairs { halves(made) } else { made.to_vec() };
                for column in 0..columns {
                    let term = |n: usize, k: usize| {
                        f64::from(rounded(inputs[n][row * depths[n] + k]))
                            * f64::from(rounded(matrices[n][k * columns + column]))
                    };
                    let sum: f64 = (0..depths.len()).flat_map(|n| (0..depths[n]).map(move |k| term(n, k))).sum();
                    let want = sum + f64::from(bias.numbers()[column]);
                    let want = if relu { want.max(0.0) } else { want };
                    let tolerance = if into_pairs { 1e-4 + want.abs() / 256.0 } else { 1e-4 };
                    let got = f64::from(made[column]);
                    prop_assert!((got - want).abs() < tolerance, "{}: [{row}, {column}] {got} is not {want}", kernels.name());
                }
                if into_pairs {
                    let end = columns.next_multiple_of(2);
                    prop_assert!(made[columns..end].iter().all(|&x| x == 0.0));
                }
                let alone: Vec<Part<'_>> =
                    parts.iter().map(|p| Part { rows: &p.rows[row * p.stride..], ..*p }).collect();
                let mut one = vec![7.5; stride];
                kernels.product(&Product { rows: 1, parts: &alone, ..product }, &mut one, stride);
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                prop_assert_eq!(bits(&out[row * stride..(row + 1) * stride]), bits(&one));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn concatenated_pairs_equal_pairs_of_the_concatenation(
        rows in 1usize..5, columns in 1usize..80, depths in prop::collection::vec(1usize..40, 1..5), seed in 0usize..1000,
    ) {
        let depths: Vec<usize> = depths.iter().map(|depth| 2 * depth).collect();
        let depth = depths.iter().sum();
        let (values, matrix) = (numbers(rows * depth, seed), numbers(depth * columns, seed + 1));
        let all = room(depth);
        for kernels in Kernels::tried() {
            let mut packed = Lines::new(all * columns.next_multiple_of(PANEL));
            packed.numbers_mut().fill(7.5);
            let mut pairs = vec![7.5; rows * all];
            let mut before = 0;
            for &own in &depths {
                let first = before / 2;
                let of_matrix = &matrix[before * columns..][..own * columns];
                kernels.pack_narrow(of_matrix, own, columns, PairRows { all, first }, packed.numbers_mut());
                let input = Operand { numbers: &values[before..], row: depth, outer: 0, inner: 1 };
                let inner = (first + own / 2).next_multiple_of(STEP) - first;
                let mut target = MapTarget { numbers: &mut pairs[first..], stride: all, rows, outer: 1, inner };
                kernels.narrow(&input, own, &mut target);
                before += own;
            }
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            let count = all * columns.next_multiple_of(PANEL);
            prop_assert_eq!(bits(&packed.numbers()[..count]), bits(&pack_pairs(&matrix, depth, columns).numbers()[..count]));
            prop_assert_eq!(bits(&pairs), bits(&pairs_of(kernels, &values, depth, all)));
        }
    }
}

#[test]
fn narrowing_rounds_to_nearest() {
    let mut inputs = vec![0.0, -0.0, 1.0, f32::MAX, f32::INFINITY, f32::NEG_INFINITY, 1.003_906_3, 1.011_718_8, -3e-39];
    inputs.extend((0..1000).map(|n| f32::from_bits(0x3f80_0000 + n * 4093)));
    for kernels in Kernels::tried() {
        let made = halves(&pairs_of(kernels, &inputs, inputs.len(), inputs.len().div_ceil(2)));
        for (x, got) in inputs.iter().zip(&made) {
            // Products of pairs flush subnormal numbers to 0.
            let is_zero = x.is_subnormal() && *got == 0.0 && kernels.has_bf16();
            assert!(is_zero || got.to_bits() == rounded(*x).to_bits(), "{}: {x} is {got}", kernels.name());
        }
        let nan = halves(&pairs_of(kernels, &[f32::NAN, f32::from_bits(0x7f80_0001)], 2, 1));
        assert!(nan.iter().all(|x| x.is_nan()));
    }
}

#[test]
fn vector_functions_match_the_math_library() {
    let mut inputs: Vec<f32> = (-2000..2000).map(|n| n as f32 / 20.0).collect();
    inputs.extend([f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 1e-30, 88.722_83, 88.722_84]);
    type Function = fn(f64) -> f64;
    let functions: [(Unary, Function); 27] = [
        (Unary::Relu, |x| if x < 0.0 { 0.0 } else { x }),
        (Unary::Sigmoid, |x| 1.0 / (1.0 + (-x).exp())),
        (Unary::Tanh, f64::tanh),
        (Unary::Exp, f64::exp),
        (Unary::Log, f64::ln),
        (Unary::Sqrt, f64::sqrt),
        (Unary::Abs, f64::abs),
        (Unary::Neg, |x| -x),
        (Unary::Reciprocal, |x| 1.0 / x),
        (Unary::Softplus, |x| x.max(0.0) + (-x.abs()).exp().ln_1p() + if x.is_nan() { x } else { 0.0 }),
        (Unary::Silu, |x| if x == f64::NEG_INFINITY { f64::NAN } else { x / (1.0 + (-x).exp()) }),
        (Unary::Trunc, f64::trunc),
        (Unary::Not, |x| f64::from(u8::from(x == 0.0))),
        (Unary::IsNan, |x| f64::from(u8::from(x.is_nan()))),
        (Unary::Sin, f64::sin),
        (Unary::Cos, f64::cos),
        (Unary::Tan, f64::tan),
        (Unary::Asin, f64::asin),
        (Unary::Acos, f64::acos),
        (Unary::Atan, f64::atan),
        (Unary::Sinh, f64::sinh),
        (Unary::Cosh, f64::cosh),
        (Unary::Asinh, f64::asinh),
        (Unary::Acosh, f64::acosh),
        (Unary::Atanh, f64::atanh),
        (Unary::RoundF16, |x| half::f16::from_f64(x).to_f64()),
        (Unary::RoundBf16, |x| half::bf16::from_f64(x).to_f64()),
    ];
    for kernels in Kernels::tried() {
        for (f, want) in functions {
            let mut out = vec![0.0; inputs.len()];
            let input = Operand { numbers: &inputs, row: 0, outer: 0, inner: 1 };
            let (stride, inner) = (inputs.len(), inputs.len());
            let mut target = MapTarget { numbers: &mut out, stride, rows: 1, outer: 1, inner };
            kernels.map1(f, &input, &mut target);
            for (&x, &got) in inputs.iter().zip(&out) {
                let want = want(f64::from(x));
                let near = got == want as f32 || (f64::from(got) - want).abs() <= 1e-6 * want.abs() + 1e-37;
                let below =
                    [Unary::Sigmoid, Unary::Silu, Unary::Softplus].contains(&f) && x < -87.0 && got.abs() < 1e-35;
                assert!(near || below || (got.is_nan() && want.is_nan()), "{f:?}({x}): {got} is not {want}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn reductions_equal_plain_loops_bit_for_bit(
        rows in 1usize..20, outer in 1usize..4, count in 0usize..70, gap in 0usize..3, f in prop::sample::select(vec![Fold::Sum, Fold::Max, Fold::Min]),
        special in prop::option::of((0usize..500, prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0]))), seed in 0usize..1000,
    ) {
        let row = outer * count + gap;
        let mut values = numbers(rows * row, seed);
        if let (Some((at, value)), false) = (special, values.is_empty()) {
            let at = at % values.len();
            values[at] = value;
        }
        let fold = |kernels: Kernels| {
            let mut out = vec![7.5; rows * (outer + gap)];
            let input = Operand { numbers: &values, row, outer: count, inner: 1 };
            kernels.fold(f, &input, count, &mut MapTarget { numbers: &mut out, stride: outer + gap, rows, outer, inner: 1 });
            out.into_iter().map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() }).collect::<Vec<_>>()
        };
        let portable = Kernels::tried().into_iter().find(|kernels| kernels.isa == Isa::Portable).unwrap();
        let plain = fold(portable);
        for kernels in Kernels::tried() {
            prop_assert_eq!(fold(kernels), plain.clone(), "{}", kernels.name());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Results are the same bits on all instruction sets, and equal those of separate comparison, product and reduction.
    #[test]
    fn reductions_over_equal_keys_equal_single_steps(
        rows in 1usize..20, count in 1usize..70, gap in 0usize..3, kinds in 1usize..40, seed in 0usize..1000,
        special in prop::option::of((0usize..500, prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0]), any::<bool>())),
    ) {
        let named = |n: usize| (n * 7919 + seed) % kinds;
        let mut of_rows: Vec<f32> = (0..rows * (gap + 1)).map(|n| named(n) as f32).collect();
        let mut shared: Vec<f32> = (0..count).map(|n| named(3 * n + 1) as f32).collect();
        let mut values = [numbers(count, seed), numbers(count, seed + 1)];
        if let Some((at, value, is_key)) = special {
            if is_key {
                shared[at % count] = value;
                of_rows[at % rows * (gap + 1)] = value;
            } else {
                values[1][at % count] = value;
            }
        }
        let folds = [(Fold::Sum, 0), (Fold::Max, 1), (Fold::Min, 0), (Fold::Sum, 1)];
        let fold = |kernels: Kernels| {
            let stride = folds.len() + gap;
            let mut out = vec![7.5f32; rows * stride];
            let beside = folds.map(|(f, n)| EqualFold { f, values: &values[n] });
            let keys = Keys { of_rows: &of_rows, stride: gap + 1, rows, shared: &shared };
            kernels.fold_equal(&keys, &beside, &mut out, stride);
            let of_fold = |n: usize| out.iter().skip(n).step_by(stride).copied().collect::<Vec<f32>>();
            assert!((folds.len()..stride).all(|n| of_fold(n).iter().all(|x| *x == 7.5)), "beside its numbers");
            (0..folds.len()).map(of_fold).collect::<Vec<_>>()
        };
        let bits = |out: &[Vec<f32>]| -> Vec<u32> {
            out.iter().flatten().map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() }).collect()
        };
        let portable = Kernels::tried().into_iter().find(|kernels| kernels.isa == Isa::Portable).unwrap();
        let plain = fold(portable);
        for kernels in Kernels::tried() {
            prop_assert_eq!(bits(&fold(kernels)), bits(&plain), "{}", kernels.name());
        }
        let all_rows = |numbers| Operand { numbers, row: 0, outer: 0, inner: 1 };
        for (got, (f, n)) in plain.iter().zip(folds) {
            let [mut equal, mut product] = [vec![0.0; rows * count], vec![0.0; rows * count]];
            let key = Operand { numbers: &of_rows, row: gap + 1, outer: 0, inner: 0 };
            fn target(numbers: &mut [f32], rows: usize, inner: usize) -> MapTarget<'_> {
                MapTarget { numbers, stride: inner, rows, outer: 1, inner }
            }
            portable.map2(Binary::Equal, &key, &all_rows(&shared), &mut target(&mut equal, rows, count));
            let equal = Operand { numbers: &equal, row: count, outer: 0, inner: 1 };
            portable.map2(Binary::Mul, &equal, &all_rows(&values[n]), &mut target(&mut product, rows, count));
            let mut want = vec![0.0; rows];
            let product = Operand { numbers: &product, row: count, outer: count, inner: 1 };
            portable.fold(f, &product, count, &mut target(&mut want, rows, 1));
            for (got, want) in got.iter().zip(&want) {
                prop_assert!(got == want || (got.is_nan() && want.is_nan()), "{f:?}: {got}, expected {want}");
            }
        }
    }
}

proptest! {
    /// A chain makes, bit for bit, what its links make one after the other, wherever the numbers that it reads lie.
    #[test]
    fn a_chain_equals_its_links_in_sequence(rows in 1usize..140, apart in prop::collection::vec(0usize..4, 1..6), seed in 0u64..1 << 32) {
        let mut state = seed;
        let mut next = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        let unary = [Unary::Relu, Unary::Sqrt, Unary::Abs, Unary::Exp, Unary::Log, Unary::Sigmoid, Unary::Not, Unary::IsNan];
        let binary = [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div, Binary::Max, Binary::Less, Binary::Keep];
        let from: Vec<Vec<f32>> = apart.iter().enumerate().map(|(n, apart)| numbers((rows - 1) * apart + 1, seed as usize + n)).collect();
        let links: Vec<ChainLink> = (0..1 + next(CHAIN_MAX))
            .map(|n| match next(2) {
                0 => ChainLink::One(unary[next(unary.len())], next(apart.len() + n)),
                _ => ChainLink::Two(binary[next(binary.len())], [next(apart.len() + n), next(apart.len() + n)]),
            })
            .collect();
        let kept: Vec<usize> = (0..links.len()).filter(|n| n % 3 == 0).map(|n| apart.len() + n).rev().collect();
        let reads: Vec<(&[f32], usize)> = from.iter().map(Vec::as_slice).zip(apart.iter().copied()).collect();
        let bits = |x: f32| if x.is_nan() { u32::MAX } else { x.to_bits() };
        for kernels in Kernels::tried() {
            let mut registers: Vec<Vec<f32>> =
                reads.iter().map(|(numbers, apart)| (0..rows).map(|row| numbers[row * apart]).collect()).collect();
            for link in &links {
                let mut made = vec![0.0; rows];
                let mut target = MapTarget { numbers: &mut made, stride: rows, rows: 1, outer: 1, inner: rows };
                let operand = |n: usize| Operand { numbers: &registers[n], row: 0, outer: 0, inner: 1 };
                match *link {
                    ChainLink::One(f, a) => kernels.map1(f, &operand(a), &mut target),
                    ChainLink::Two(f, [a, b]) => kernels.map2(f, &operand(a), &operand(b), &mut target),
                }
                registers.push(made);
            }
            let stride = kept.len() + 2;
            let (mut out, mut memory) = (vec![7.5; rows * stride], Lines::default());
            let chain = Chain { reads: &reads, links: &links, kept: &kept };
            kernels.chain(&chain, rows, &mut memory, &mut out, stride);
            for (row, out) in out.chunks(stride).enumerate() {
                let want: Vec<u32> = kept.iter().map(|&n| bits(registers[n][row])).collect();
                let got: Vec<u32> = out[..kept.len()].iter().map(|x| bits(*x)).collect();
                prop_assert_eq!(got, want, "{} row {}", kernels.name(), row);
                prop_assert_eq!(&out[kept.len()..], &[7.5, 7.5]);
            }
        }
    }
}

#[test]
#[should_panic(expected = "weights too short")]
fn truncated_weights_are_rejected() {
    let numbers = [1.0; 64];
    let weights = Weights { numbers: &numbers, row_stride: 16, panel_stride: 32 };
    let parts = [Part { rows: &numbers, stride: 5, depth: 5, weights }];
    let product = Product { rows: 1, columns: 16, parts: &parts, ..Product::default() };
    Kernels::best().product(&product, &mut [0.0; 16], 16);
}

#[test]
fn the_error_function_is_that_of_its_tables() {
    let known = [
        (0.0, 0.0),
        (1e-4, 1.128_379_163_3e-4),
        (0.1, 0.112_462_916_0),
        (0.5, 0.520_499_877_8),
        (0.999, 0.842_284_865_6),
        (1.0, 0.842_700_792_9),
        (1.5, 0.966_105_146_5),
        (2.0, 0.995_322_265_0),
        (3.0, 0.999_977_909_5),
        (9.0, 1.0),
    ];
    for kernels in Kernels::tried() {
        for (x, want) in known.into_iter().chain(known.map(|(x, want)| (-x, -want))) {
            let apply = |f: Unary, x: f32| {
                let (mut out, inputs) = ([0.0], [x]);
                let input = Operand { numbers: &inputs, row: 0, outer: 0, inner: 1 };
                kernels.map1(f, &input, &mut MapTarget { numbers: &mut out, stride: 1, rows: 1, outer: 1, inner: 1 });
                f64::from(out[0])
            };
            let got = apply(Unary::Erf, x as f32);
            assert!((got - want).abs() <= 1e-6 * want.abs(), "{}: erf({x}) {got} is not {want}", kernels.name());
            let (wide, got) = (x * std::f64::consts::SQRT_2, apply(Unary::Gelu, (x * std::f64::consts::SQRT_2) as f32));
            let want = 0.5 * wide * (1.0 + want);
            assert!((got - want).abs() <= 1e-6 * wide.abs(), "{}: gelu({wide}) {got} is not {want}", kernels.name());
        }
    }
}

#[test]
fn matrices_without_columns_are_packed() {
    assert!(packed_stride(0) > 0);
    assert_eq!(pack(&[], 3, 0).numbers().iter().filter(|x| **x != 0.0).count(), 0);
}
