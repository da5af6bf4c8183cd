//! Reference evaluation of a graph, not optimized for speed: the compiler folds constants with it, and tests compare
//! compiled graphs with it.

use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

use half::{bf16, f16};

use super::ir::{Id, Op, Recurrent, RecurrentSizes, Value, broadcast_strides, positions};
use sterling_kernels::cpu::dense::{Binary, Cell, Fold, Unary};

/// Number type of the evaluation: f32 as in compiled graphs, or f64 for checking gradients.
pub(super) trait Real:
    Copy
    + PartialOrd
    + From<f32>
    + Into<f64>
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + Sum
{
    /// Rounds to the nearest number of this type.
    fn nearest(x: f64) -> Self;
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    fn ln_1p(self) -> Self;
    fn sqrt(self) -> Self;
    fn tanh(self) -> Self;
    fn abs(self) -> Self;
    fn trunc(self) -> Self;
}

macro_rules! real {
    ($type:ty) => {
        impl Real for $type {
            fn nearest(x: f64) -> Self {
                x as $type
            }
            fn exp(self) -> Self {
                self.exp()
            }
            fn ln(self) -> Self {
                self.ln()
            }
            fn ln_1p(self) -> Self {
                self.ln_1p()
            }
            fn sqrt(self) -> Self {
                self.sqrt()
            }
            fn tanh(self) -> Self {
                self.tanh()
            }
            fn abs(self) -> Self {
                self.abs()
            }
            fn trunc(self) -> Self {
                self.trunc()
            }
        }
    };
}

real!(f32);
#[cfg(test)]
real!(f64);

/// Evaluates a value whose operands are all constants.
pub(super) fn value(values: &[Value], value: &Value) -> Vec<f32> {
    evaluate(value, values, &|id| match &values[id].op {
        Op::Constant(numbers) => numbers,
        _ => &[],
    })
}

/// Returns output number `output` of one row for the given inputs.
#[cfg(test)]
pub(super) fn row<T: Real>(values: &[Value], output: usize, inputs: &[&[T]]) -> Vec<T> {
    all(values, inputs).swap_remove(output)
}

/// Returns all values of one row for the given inputs.
#[cfg(test)]
pub(super) fn all<T: Real>(values: &[Value], inputs: &[&[T]]) -> Vec<Vec<T>> {
    let mut made: Vec<Vec<T>> = Vec::new();
    for value in values {
        let numbers = match &value.op {
            Op::Inputs(first) => inputs[*first..].concat()[..value.count()].to_vec(),
            Op::Constant(numbers) => numbers.iter().map(|&x| T::from(x)).collect(),
            _ => evaluate(value, values, &|id| &made[id]),
        };
        made.push(numbers);
    }
    made
}

fn evaluate<'a, T: Real + 'a>(value: &Value, values: &[Value], of: &dyn Fn(usize) -> &'a [T]) -> Vec<T> {
    let shape_of = |id: usize| &values[id].shape[..];
    let spread = |id: usize| {
        let strides = broadcast_strides(shape_of(id), &value.shape);
        positions(&value.shape, &strides).into_iter().map(move |n| of(id)[n as usize])
    };
    match &value.op {
        Op::Inputs(_) | Op::Constant(_) => Vec::new(),
        Op::Unary(f, a) => of(*a).iter().map(|&x| unary(*f, x)).collect(),
        Op::Binary(f, a, b) => spread(*a).zip(spread(*b)).map(|(x, y)| binary(*f, x, y)).collect(),
        Op::MatMul(a, b) => products(value, (shape_of(*a), of(*a)), (shape_of(*b), of(*b))),
        Op::Linear { parts, bias } => {
            let mut sums = bias.map_or(vec![T::from(0.0); value.count()], |bias| of(bias).to_vec());
            for (x, matrix) in parts {
                for (x, row) in of(*x).iter().zip(of(*matrix).chunks_exact(value.count().max(1))) {
                    sums.iter_mut().zip(row).for_each(|(sum, w)| *sum += *x * *w);
                }
            }
            sums
        }
        Op::Fold(f, a) => {
            let count = shape_of(*a).last().copied().unwrap_or(1);
            (0..value.count()).map(|n| fold(*f, &of(*a)[n * count..(n + 1) * count])).collect()
        }
        Op::Concat(axis, parts) => {
            let outer: usize = value.shape[..*axis].iter().product();
            let inner = |id: usize| shape_of(id)[*axis..].iter().product::<usize>();
            let runs = (0..outer).flat_map(|o| parts.iter().map(move |&id| (o, id)));
            runs.flat_map(|(o, id)| of(id)[o * inner(id)..(o + 1) * inner(id)].to_vec()).collect()
        }
        Op::Pick(a, index) => index.iter().map(|&n| of(*a)[n as usize]).collect(),
        Op::Spread(a, index) => {
            let mut sums = vec![T::from(0.0); value.count()];
            of(*a).iter().zip(index.iter()).for_each(|(x, &n)| sums[n as usize] += *x);
            sums
        }
        Op::Reshape(a) => of(*a).to_vec(),
        Op::Recurrent(layer) => recurrent(layer, values, of),
    }
}

fn products<T: Real>(value: &Value, (left, a): (&[usize], &[T]), (right, b): (&[usize], &[T])) -> Vec<T> {
    let axes = value.shape.len() - 2;
    let (m, n, k) = (value.shape[axes], value.shape[axes + 1], left[left.len() - 1]);
    let places = |shape: &[usize]| {
        let batch = &shape[..shape.len() - 2];
        positions(&value.shape[..axes], &broadcast_strides(batch, &value.shape[..axes]))
    };
    let mut out = Vec::with_capacity(value.count());
    for (at_a, at_b) in places(left).into_iter().zip(places(right)) {
        let (a, b) = (&a[at_a as usize * m * k..], &b[at_b as usize * k * n..]);
        for i in 0..m {
            out.extend((0..n).map(|j| (0..k).map(|l| a[i * k + l] * b[l * n + j]).sum::<T>()));
        }
    }
    out
}

/// Evaluates a recurrent layer by its equations, step by step.
fn recurrent<'a, T: Real + 'a>(layer: &Recurrent, values: &[Value], of: &dyn Fn(Id) -> &'a [T]) -> Vec<T> {
    let Ok(RecurrentSizes { runs, steps, depth, hidden }) = layer.sizes(values) else { return Vec::new() };
    let (zero, one) = (T::from(0.0), T::from(1.0));
    let width = layer.cell.gates() * hidden;
    let sigmoid = |x: T| one / (one + (-x).exp());
    let product = |x: &[T], matrix: &[T], first: T, columns: usize, column: usize| {
        x.iter().enumerate().fold(first, |sum, (k, &x)| sum + x * matrix[k * columns + column])
    };
    let mut out = Vec::new();
    for run in 0..runs {
        let state = |n: usize| {
            layer.initial[n].map_or(vec![zero; hidden], |id| of(id)[run * hidden..(run + 1) * hidden].to_vec())
        };
        let (mut h, mut c) = (state(0), state(1));
        let mut made = vec![zero; steps * hidden];
        for n in 0..steps {
            let t = if layer.is_reverse { steps - 1 - n } else { n };
            if layer.lengths.is_some_and(|id| T::from(t as f32) >= of(id)[run]) {
                continue;
            }
            let x = &of(layer.x)[(run * steps + t) * depth..][..depth];
            let input = |gate: usize, n: usize| {
                let column = gate * hidden + n;
                product(x, of(layer.weights), of(layer.biases[0])[column], width, column)
            };
            let from = |h: &[T], gate: usize, n: usize| {
                let (matrix, columns, column) = match layer.candidate {
                    Some(candidate) if gate == 2 => (of(candidate), hidden, n),
                    Some(_) => (of(layer.recurrence), 2 * hidden, gate * hidden + n),
                    None => (of(layer.recurrence), width, gate * hidden + n),
                };
                product(h, matrix, of(layer.biases[1])[gate * hidden + n], columns, column)
            };
            let both = |gate: usize, n: usize| input(gate, n) + from(&h, gate, n);
            let next: Vec<T> = match layer.cell {
                Cell::Rnn => (0..hidden).map(|n| both(0, n).tanh()).collect(),
                Cell::Lstm => {
                    let gates = |n: usize| (sigmoid(both(0, n)), sigmoid(both(1, n)), sigmoid(both(2, n)), both(3, n));
                    let all: Vec<_> = (0..hidden).map(gates).collect();
                    c = all.iter().zip(&c).map(|((i, _, f, new), c)| *f * *c + *i * new.tanh()).collect();
                    all.iter().zip(&c).map(|((_, o, ..), c)| *o * c.tanh()).collect()
                }
                Cell::Gru | Cell::GruResetFirst => {
                    let reset: Vec<T> = (0..hidden).map(|n| sigmoid(both(1, n))).collect();
                    let scaled: Vec<T> = reset.iter().zip(&h).map(|(r, h)| *r * *h).collect();
                    let gate = |n: usize| {
                        let new = match layer.candidate {
                            Some(_) => input(2, n) + from(&scaled, 2, n),
                            None => input(2, n) + reset[n] * from(&h, 2, n),
                        };
                        let z = sigmoid(both(0, n));
                        (one - z) * new.tanh() + z * h[n]
                    };
                    (0..hidden).map(gate).collect()
                }
            };
            h = next;
            made[t * hidden..(t + 1) * hidden].copy_from_slice(&h);
        }
        out.extend(made);
        out.extend(h);
        if layer.cell == Cell::Lstm {
            out.extend(c);
        }
    }
    out
}

fn truth<T: Real>(holds: bool) -> T {
    T::from(f32::from(u8::from(holds)))
}

fn is_nan<T: Real>(x: T) -> bool {
    x.into().is_nan()
}

fn unary<T: Real>(f: Unary, x: T) -> T {
    let (zero, one) = (T::from(0.0), T::from(1.0));
    match f {
        Unary::Relu if x < zero => zero,
        Unary::Relu => x,
        Unary::Sigmoid => one / (one + (-x).exp()),
        Unary::Tanh => x.tanh(),
        Unary::Exp => x.exp(),
        Unary::Log => x.ln(),
        Unary::Sqrt => x.sqrt(),
        Unary::Abs => x.abs(),
        Unary::Neg => -x,
        Unary::Reciprocal => one / x,
        Unary::Erf => T::nearest(erf(x.into())),
        Unary::Gelu => {
            let x: f64 = x.into();
            T::nearest(0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)))
        }
        Unary::Silu => x / (one + (-x).exp()),
        Unary::Softplus if is_nan(x) => x,
        Unary::Softplus => (if x > zero { x } else { zero }) + (-x.abs()).exp().ln_1p(),
        Unary::Trunc => x.trunc(),
        Unary::Not => truth(x == zero),
        Unary::IsNan => truth(is_nan(x)),
        Unary::Sin => T::nearest(x.into().sin()),
        Unary::Cos => T::nearest(x.into().cos()),
        Unary::Tan => T::nearest(x.into().tan()),
        Unary::Asin => T::nearest(x.into().asin()),
        Unary::Acos => T::nearest(x.into().acos()),
        Unary::Atan => T::nearest(x.into().atan()),
        Unary::Sinh => T::nearest(x.into().sinh()),
        Unary::Cosh => T::nearest(x.into().cosh()),
        Unary::Asinh => T::nearest(x.into().asinh()),
        Unary::Acosh => T::nearest(x.into().acosh()),
        Unary::Atanh => T::nearest(x.into().atanh()),
        Unary::RoundF16 => T::nearest(f16::from_f64(x.into()).to_f64()),
        Unary::RoundBf16 => T::nearest(bf16::from_f64(x.into()).to_f64()),
    }
}

fn binary<T: Real>(f: Binary, x: T, y: T) -> T {
    let zero = T::from(0.0);
    match f {
        Binary::Add => x + y,
        Binary::Sub => x - y,
        Binary::Mul => x * y,
        Binary::Div => x / y,
        Binary::Max if x > y || is_nan(x) => x,
        Binary::Min if x < y || is_nan(x) => x,
        Binary::Max | Binary::Min => y,
        Binary::Equal => truth(x == y),
        Binary::Less => truth(x < y),
        Binary::LessOrEqual => truth(x <= y),
        Binary::Keep => {
            if x == zero {
                zero
            } else {
                y
            }
        }
        Binary::Drop => {
            if x == zero {
                y
            } else {
                zero
            }
        }
        Binary::Pow => T::nearest(x.into().powf(y.into())),
        Binary::Rem => T::nearest(x.into() % y.into()),
    }
}

/// Computes the error function by a series whose terms are all positive.
fn erf(x: f64) -> f64 {
    if x.is_nan() || x.abs() > 6.0 {
        return if x.is_nan() { x } else { x.signum() };
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= 2.0 * x * x / f64::from(2 * n + 1);
        sum += term;
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

fn fold<T: Real>(f: Fold, numbers: &[T]) -> T {
    match f {
        Fold::Sum => numbers.iter().copied().sum(),
        Fold::Max => numbers.iter().fold(T::from(f32::NEG_INFINITY), |retained, &x| binary(Binary::Max, retained, x)),
        Fold::Min => numbers.iter().fold(T::from(f32::INFINITY), |retained, &x| binary(Binary::Min, retained, x)),
    }
}
