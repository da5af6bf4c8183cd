//! Element-wise steps in plain Rust, inlined into a function per instruction set, where the compiler vectorizes them.

use half::{bf16, f16};

use super::operands::{
    Binary, EqualFold, Fold, Form, Keys, LANES, MapTarget, Operand, PairRows, Product, Unary, pair, pair_rows,
};

/// Computes `a * b + c`, fused if the instruction set has FMA.
#[inline(always)]
fn multiply_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Exponential function with a relative error below 2e-7: 0 below -87.3, infinite above 88.72283; NaN stays NaN.
#[inline(always)]
pub(super) fn exp<const FMA: bool>(x: f32) -> f32 {
    const LOW: f32 = -87.3;
    // The largest input whose exponential is finite.
    const HIGH: f32 = 88.722_83;
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
    const SHIFT: f32 = 12_582_912.0;
    let inside = if x < LOW { LOW } else { x };
    let inside = if inside > HIGH { HIGH } else { inside };
    let shifted = multiply_add::<FMA>(inside, std::f32::consts::LOG2_E, SHIFT);
    let n = shifted - SHIFT;
    let r = multiply_add::<FMA>(n, -0.693_145_75, inside);
    let r = multiply_add::<FMA>(n, -1.428_606_8e-6, r);
    let mut p = 1.987_569_1e-4;
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = multiply_add::<FMA>(p, r, c);
    }
    let e = multiply_add::<FMA>(p * r, r, r + 1.0);
    // `power` is 2^n. 2^128 would be infinite even if its product with `e` is finite, so for n = 128 the
    // result is `e + e` times 2^127.
    let power = (shifted.to_bits() << 23).wrapping_add(0x3f80_0000);
    let is_last = power == 0x7f80_0000;
    let scaled = if is_last { e + e } else { e } * f32::from_bits(if is_last { 0x7f00_0000 } else { power });
    let scaled = if x < LOW { 0.0 } else { scaled };
    if x > HIGH { f32::INFINITY } else { scaled }
}

/// Evaluates the polynomial `c[0] + c[1] x + c[2] x² ..`.
#[inline(always)]
fn polynomial<const FMA: bool, const N: usize>(x: f32, c: [f32; N]) -> f32 {
    let mut sum = c[N - 1];
    for c in c[..N - 1].iter().rev() {
        sum = multiply_add::<FMA>(sum, x, *c);
    }
    sum
}

/// Computes the sigmoid, `1 / (1 + exp(-x))`.
#[inline(always)]
pub(super) fn sigmoid<const FMA: bool>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<FMA>(-x))
}

/// Hyperbolic tangent with a relative error below 1e-6: a series up to 0.4, and beyond 0.4 the exponential function,
/// whose result near 1 is as exact as f32 allows. A rational function would take half of the time, but near 1 it would
/// be wrong by a few units in the last place, which would change truncated results.
#[inline(always)]
pub(super) fn tanh<const FMA: bool>(x: f32) -> f32 {
    const SERIES: [f32; 6] = [1.0, -1.0 / 3.0, 2.0 / 15.0, -17.0 / 315.0, 62.0 / 2835.0, -1382.0 / 155_925.0];
    let size = x.abs();
    let near = size * polynomial::<FMA, 6>(size * size, SERIES);
    let far = 1.0 - 2.0 / (exp::<FMA>(2.0 * size) + 1.0);
    (if size < 0.4 { near } else { far }).copysign(x)
}

/// Error function with a relative error below 1e-6: a rational function, whose coefficients minimize the largest relative error
/// up to 3.84.
#[inline(always)]
fn erf<const FMA: bool>(x: f32) -> f32 {
    const P: [f32; 6] =
        [std::f32::consts::FRAC_2_SQRT_PI, 0.187_558_41, 5.244_437_4e-2, 3.661_717e-3, 2.858_243_1e-4, 2.116_760_7e-6];
    const Q: [f32; 6] = [1.0, 0.499_552_2, 0.112_997_34, 1.476_043_4e-2, 1.143_304e-3, 3.882_673_8e-5];
    let size = x.abs();
    let square = size * size;
    let inside = size * polynomial::<FMA, 6>(square, P) / polynomial::<FMA, 6>(square, Q);
    (if size > 3.84 || inside > 1.0 { 1.0 } else { inside }).copysign(x)
}

#[inline(always)]
fn truth(holds: bool) -> f32 {
    if holds { 1.0 } else { 0.0 }
}

#[inline(always)]
fn each(input: &Operand<'_>, target: &mut MapTarget<'_>, f: impl Fn(f32) -> f32) {
    for r in 0..target.rows {
        for o in 0..target.outer {
            let from = r * input.row + o * input.outer;
            let out = &mut target.numbers[r * target.stride + o * target.inner..][..target.inner];
            match input.inner {
                0 => out.fill(f(input.numbers[from])),
                _ => {
                    let run = &input.numbers[from..][..out.len()];
                    out.iter_mut().zip(run).for_each(|(out, &x)| *out = f(x));
                }
            }
        }
    }
}

#[inline(always)]
fn pairs(a: &Operand<'_>, b: &Operand<'_>, target: &mut MapTarget<'_>, f: impl Fn(f32, f32) -> f32) {
    for r in 0..target.rows {
        for o in 0..target.outer {
            let (from_a, from_b) = (r * a.row + o * a.outer, r * b.row + o * b.outer);
            let out = &mut target.numbers[r * target.stride + o * target.inner..][..target.inner];
            match (a.inner, b.inner) {
                (0, 0) => out.fill(f(a.numbers[from_a], b.numbers[from_b])),
                (0, _) => {
                    let (x, run) = (a.numbers[from_a], &b.numbers[from_b..][..out.len()]);
                    out.iter_mut().zip(run).for_each(|(out, &y)| *out = f(x, y));
                }
                (_, 0) => {
                    let (run, y) = (&a.numbers[from_a..][..out.len()], b.numbers[from_b]);
                    out.iter_mut().zip(run).for_each(|(out, &x)| *out = f(x, y));
                }
                _ => {
                    let (left, right) = (&a.numbers[from_a..][..out.len()], &b.numbers[from_b..][..out.len()]);
                    out.iter_mut().zip(left).zip(right).for_each(|((out, &x), &y)| *out = f(x, y));
                }
            }
        }
    }
}

/// Returns the larger number; NaN if either is NaN.
#[inline(always)]
pub(super) fn larger(x: f32, y: f32) -> f32 {
    if x > y || x.is_nan() { x } else { y }
}

/// Returns the smaller number; NaN if either is NaN.
#[inline(always)]
fn smaller(x: f32, y: f32) -> f32 {
    if x < y || x.is_nan() { x } else { y }
}

#[inline(always)]
pub(super) fn map1<const FMA: bool>(f: Unary, input: &Operand<'_>, target: &mut MapTarget<'_>) {
    match f {
        Unary::Relu => each(input, target, |x| if x < 0.0 { 0.0 } else { x }),
        Unary::Sigmoid => each(input, target, sigmoid::<FMA>),
        Unary::Tanh => each(input, target, tanh::<FMA>),
        Unary::Erf => each(input, target, erf::<FMA>),
        Unary::Gelu => {
            each(input, target, |x| 0.5 * x * (1.0 + erf::<FMA>(x * std::f32::consts::FRAC_1_SQRT_2)));
        }
        Unary::Silu => each(input, target, |x| x / (1.0 + exp::<FMA>(-x))),
        Unary::Softplus => each(input, target, |x| larger(x, 0.0) + exp::<FMA>(-x.abs()).ln_1p()),
        Unary::Trunc => each(input, target, f32::trunc),
        Unary::Not => each(input, target, |x| truth(x == 0.0)),
        Unary::IsNan => each(input, target, |x| truth(x.is_nan())),
        Unary::Exp => each(input, target, exp::<FMA>),
        Unary::Log => each(input, target, f32::ln),
        Unary::Sqrt => each(input, target, f32::sqrt),
        Unary::Abs => each(input, target, f32::abs),
        Unary::Neg => each(input, target, |x| -x),
        Unary::Reciprocal => each(input, target, |x| 1.0 / x),
        Unary::Sin => each(input, target, f32::sin),
        Unary::Cos => each(input, target, f32::cos),
        Unary::Tan => each(input, target, f32::tan),
        Unary::Asin => each(input, target, f32::asin),
        Unary::Acos => each(input, target, f32::acos),
        Unary::Atan => each(input, target, f32::atan),
        Unary::Sinh => each(input, target, f32::sinh),
        Unary::Cosh => each(input, target, f32::cosh),
        Unary::Asinh => each(input, target, f32::asinh),
        Unary::Acosh => each(input, target, f32::acosh),
        Unary::Atanh => each(input, target, f32::atanh),
        Unary::RoundF16 => each(input, target, |x| f16::from_f32(x).to_f32()),
        Unary::RoundBf16 => each(input, target, |x| bf16::from_f32(x).to_f32()),
    }
}

#[inline(always)]
pub(super) fn map2(f: Binary, a: &Operand<'_>, b: &Operand<'_>, target: &mut MapTarget<'_>) {
    match f {
        Binary::Add => pairs(a, b, target, |x, y| x + y),
        Binary::Sub => pairs(a, b, target, |x, y| x - y),
        Binary::Mul => pairs(a, b, target, |x, y| x * y),
        Binary::Div => pairs(a, b, target, |x, y| x / y),
        Binary::Max => pairs(a, b, target, larger),
        Binary::Min => pairs(a, b, target, smaller),
        Binary::Equal => pairs(a, b, target, |x, y| truth(x == y)),
        Binary::Less => pairs(a, b, target, |x, y| truth(x < y)),
        Binary::LessOrEqual => pairs(a, b, target, |x, y| truth(x <= y)),
        Binary::Keep => pairs(a, b, target, |x, y| if x == 0.0 { 0.0 } else { y }),
        Binary::Drop => pairs(a, b, target, |x, y| if x == 0.0 { y } else { 0.0 }),
        Binary::Pow => pairs(a, b, target, f32::powf),
        Binary::Rem => pairs(a, b, target, |x, y| x % y),
    }
}

/// Reduces contiguous numbers in as many lanes as a register has, and then the lanes.
#[inline(always)]
pub(super) fn lanes(run: &[f32], first: f32, f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut retained = [first; LANES];
    let (complete, rest) = run.as_chunks::<LANES>();
    for chunk in complete {
        retained.iter_mut().zip(chunk).for_each(|(retained, &x)| *retained = f(*retained, x));
    }
    retained.iter_mut().zip(rest).for_each(|(retained, &x)| *retained = f(*retained, x));
    joined(retained, f)
}

/// Reduces the lanes of a register by halving.
#[inline(always)]
fn joined(lanes: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let eight: [f32; 8] = std::array::from_fn(|n| f(lanes[n], lanes[n + 8]));
    let four: [f32; 4] = std::array::from_fn(|n| f(eight[n], eight[n + 4]));
    let two: [f32; 2] = std::array::from_fn(|n| f(four[n], four[n + 2]));
    f(two[0], two[1])
}

/// Product with one column of contiguous weights: sixteen chains along the depth of all parts, and then their sum.
#[inline(always)]
pub(super) fn column<const FMA: bool>(product: &Product<'_>, out: &mut [f32], stride: usize) {
    let bias = product.bias.first().copied().unwrap_or(0.0);
    for (row, out) in (0..product.rows).zip(out.iter_mut().step_by(stride.max(1))) {
        let mut sums = [0.0; LANES];
        for part in product.parts {
            let (rows, rest) = part.rows[row * part.stride..][..part.depth].as_chunks::<LANES>();
            let (weights, others) = part.weights.numbers[..part.depth].as_chunks::<LANES>();
            for (row, weights) in rows.iter().zip(weights) {
                for (sum, (x, w)) in sums.iter_mut().zip(row.iter().zip(weights)) {
                    *sum = multiply_add::<FMA>(*x, *w, *sum);
                }
            }
            for (sum, (x, w)) in sums.iter_mut().zip(rest.iter().zip(others)) {
                *sum = multiply_add::<FMA>(*x, *w, *sum);
            }
        }
        let sum = bias + joined(sums, |x, y| x + y);
        *out = if product.relu && sum < 0.0 { 0.0 } else { sum };
    }
}

#[inline(always)]
fn folded(input: &Operand<'_>, count: usize, target: &mut MapTarget<'_>, first: f32, f: impl Fn(f32, f32) -> f32) {
    for r in 0..target.rows {
        for o in 0..target.outer {
            let run = &input.numbers[r * input.row + o * input.outer..][..count];
            target.numbers[r * target.stride + o] = lanes(run, first, &f);
        }
    }
}

#[inline(always)]
pub(super) fn fold(f: Fold, input: &Operand<'_>, count: usize, target: &mut MapTarget<'_>) {
    match f {
        Fold::Sum => folded(input, count, target, f.identity_element(), |x, y| x + y),
        Fold::Max => folded(input, count, target, f.identity_element(), larger),
        Fold::Min => folded(input, count, target, f.identity_element(), smaller),
    }
}

/// Returns whether one of the keys is `key`.
#[inline(always)]
fn is_among(key: f32, keys: &[f32]) -> bool {
    let mut found = [0; LANES];
    let (complete, rest) = keys.as_chunks::<LANES>();
    for chunk in complete {
        found.iter_mut().zip(chunk).for_each(|(found, &x)| *found |= u32::from(x == key));
    }
    found.iter_mut().zip(rest).for_each(|(found, &x)| *found |= u32::from(x == key));
    found.iter().any(|&found| found != 0)
}

/// Reduces numbers in lanes, each multiplied by 1 if its key is `key` and by 0 otherwise. If `may_skip`, registers without that
/// key are skipped, and their zeros are reduced last.
#[inline(always)]
fn beside_equal(
    key: f32,
    (keys, values): (&[f32], &[f32]),
    may_skip: bool,
    first: f32,
    f: impl Fn(f32, f32) -> f32,
) -> f32 {
    let (mut retained, mut has_skipped) = ([first; LANES], false);
    for (keys, values) in keys.chunks(LANES).zip(values.chunks(LANES)) {
        if may_skip && !is_among(key, keys) {
            has_skipped = true;
            continue;
        }
        let both = keys.iter().zip(values);
        retained
            .iter_mut()
            .zip(both)
            .for_each(|(retained, (&x, value))| *retained = f(*retained, truth(x == key) * value));
    }
    if has_skipped {
        retained.iter_mut().for_each(|retained| *retained = f(*retained, 0.0));
    }
    joined(retained, f)
}

/// Returns whether all values are finite, so that skipped values reduce to 0: 0 times an infinite value is NaN.
#[inline(always)]
pub(super) fn are_finite(folds: &[EqualFold<'_>]) -> bool {
    folds.iter().all(|fold| fold.values.iter().fold(true, |all, value| all & value.is_finite()))
}

#[inline(always)]
pub(super) fn fold_equal(keys: &Keys<'_>, folds: &[EqualFold<'_>], out: &mut [f32], stride: usize) {
    let are_finite = are_finite(folds);
    for row in 0..keys.rows {
        let key = keys.of_rows[row * keys.stride];
        let is_none = are_finite && !is_among(key, keys.shared);
        for (n, EqualFold { f, values }) in folds.iter().enumerate() {
            let (both, first) = ((keys.shared, *values), f.identity_element());
            out[row * stride + n] = match f {
                _ if is_none => 0.0,
                Fold::Sum => beside_equal(key, both, are_finite, first, |x, y| x + y),
                Fold::Max => beside_equal(key, both, are_finite, first, larger),
                Fold::Min => beside_equal(key, both, are_finite, first, smaller),
            };
        }
    }
}

/// Converts the numbers of each row to bf16 pairs, padded with zeros.
#[inline(always)]
pub(super) fn narrow(input: &Operand<'_>, count: usize, target: &mut MapTarget<'_>) {
    for r in 0..target.rows {
        let out = &mut target.numbers[r * target.stride..][..target.inner];
        let (out, behind) = out.split_at_mut(Form::Pairs.room(count));
        let (pairs, rest) = input.numbers[r * input.row..][..count].as_chunks::<2>();
        out.iter_mut().zip(pairs).for_each(|(to, [x, y])| *to = pair(*x, *y));
        if let (Some(to), [x]) = (out.last_mut(), rest) {
            *to = pair(*x, 0.0);
        }
        behind.fill(0.0);
    }
}

/// Packs a matrix `[depth, columns]` in pairs of rows.
#[inline(always)]
pub(super) fn pack_narrow(matrix: &[f32], depth: usize, columns: usize, rows: PairRows, out: &mut [f32]) {
    pair_rows(matrix, depth, columns, rows, out);
}
