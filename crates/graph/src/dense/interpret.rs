//! The meaning of a graph, without any thought of speed: it folds constants, and the tests hold programs against it.

use super::ir::{Op, Value, broadcast_strides, positions};
use sterling_kernels::cpu::dense::{Binary, Fold, Unary};

/// The numbers of a value that reads constants alone.
pub(super) fn value(values: &[Value], value: &Value) -> Vec<f32> {
    evaluate(value, values, &|id| match &values[id].op {
        Op::Constant(numbers) => numbers,
        _ => &[],
    })
}

/// The output of one row, of the numbers of each input.
#[cfg(test)]
pub(super) fn row(values: &[Value], output: usize, inputs: &[&[f32]]) -> Vec<f32> {
    let mut made: Vec<Vec<f32>> = Vec::new();
    for value in values {
        let numbers = match &value.op {
            Op::Inputs(first) => inputs[*first..].concat()[..value.count()].to_vec(),
            Op::Constant(numbers) => numbers.to_vec(),
            _ => evaluate(value, values, &|id| &made[id]),
        };
        made.push(numbers);
    }
    made.swap_remove(output)
}

fn evaluate<'a>(value: &Value, values: &[Value], of: &dyn Fn(usize) -> &'a [f32]) -> Vec<f32> {
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
            let mut sums = bias.map_or(vec![0.0; value.count()], |bias| of(bias).to_vec());
            for (x, matrix) in parts {
                for (x, row) in of(*x).iter().zip(of(*matrix).chunks_exact(value.count().max(1))) {
                    sums.iter_mut().zip(row).for_each(|(sum, w)| *sum += x * w);
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
        Op::Reshape(a) => of(*a).to_vec(),
    }
}

fn products(value: &Value, (left, a): (&[usize], &[f32]), (right, b): (&[usize], &[f32])) -> Vec<f32> {
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
            out.extend((0..n).map(|j| (0..k).map(|l| a[i * k + l] * b[l * n + j]).sum::<f32>()));
        }
    }
    out
}

fn unary(f: Unary, x: f32) -> f32 {
    match f {
        Unary::Relu if x < 0.0 => 0.0,
        Unary::Relu => x,
        Unary::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Unary::Tanh => x.tanh(),
        Unary::Exp => x.exp(),
        Unary::Log => x.ln(),
        Unary::Sqrt => x.sqrt(),
        Unary::Abs => x.abs(),
        Unary::Neg => -x,
        Unary::Reciprocal => 1.0 / x,
        Unary::Erf => erf(f64::from(x)) as f32,
        Unary::Gelu => (0.5 * f64::from(x) * (1.0 + erf(f64::from(x) * std::f64::consts::FRAC_1_SQRT_2))) as f32,
        Unary::Silu => x / (1.0 + (-x).exp()),
        Unary::Softplus if x.is_nan() => x,
        Unary::Softplus => x.max(0.0) + (-x.abs()).exp().ln_1p(),
        Unary::Trunc => x.trunc(),
        Unary::Not => f32::from(u8::from(x == 0.0)),
        Unary::IsNan => f32::from(u8::from(x.is_nan())),
    }
}

fn binary(f: Binary, x: f32, y: f32) -> f32 {
    match f {
        Binary::Add => x + y,
        Binary::Sub => x - y,
        Binary::Mul => x * y,
        Binary::Div => x / y,
        Binary::Max if x > y || x.is_nan() => x,
        Binary::Min if x < y || x.is_nan() => x,
        Binary::Max | Binary::Min => y,
        Binary::Equal => f32::from(u8::from(x == y)),
        Binary::Less => f32::from(u8::from(x < y)),
        Binary::LessOrEqual => f32::from(u8::from(x <= y)),
        Binary::Keep => {
            if x == 0.0 {
                0.0
            } else {
                y
            }
        }
        Binary::Drop => {
            if x == 0.0 {
                y
            } else {
                0.0
            }
        }
    }
}

/// The error function, by its series: all terms are positive.
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

fn fold(f: Fold, numbers: &[f32]) -> f32 {
    match f {
        Fold::Sum => numbers.iter().sum(),
        Fold::Max => numbers.iter().fold(f32::NEG_INFINITY, |kept, &x| binary(Binary::Max, kept, x)),
        Fold::Min => numbers.iter().fold(f32::INFINITY, |kept, &x| binary(Binary::Min, kept, x)),
    }
}
