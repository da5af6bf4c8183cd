//! Derivative rules: compute the gradients of an operation's inputs from the gradient of the result.
//!
//! At points without a derivative, PyTorch's choice applies. `relu` and `abs` have gradient 0 at 0. Equal numbers share
//! the gradient of their maximum or minimum (`amax`, `maximum`), but if the other operand is a bound without a
//! gradient, a number equal to the bound gets the full gradient (`clamp`). The root of 0 has gradient 0, so that a
//! vector of zeros has a length of 0 and gradients of 0 (`norm`), not NaN. Comparisons, truncations and logical
//! operations have no gradient.

use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

use super::reverse::Reverse;
use crate::dense::graph::Graph;
use crate::dense::ir::{Id, Op, Side, Value};
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::dense::{Binary, Fold, Unary};

/// Returns the inputs with respect to which an operation has a derivative.
pub(super) fn differentiable(op: &Op) -> Vec<Id> {
    match op {
        Op::Unary(Unary::Trunc | Unary::Not | Unary::IsNan, _) => Vec::new(),
        Op::Binary(Binary::Equal | Binary::Less | Binary::LessOrEqual, ..) => Vec::new(),
        Op::Binary(Binary::Keep | Binary::Drop, _, b) => vec![*b],
        op => op.reads(),
    }
}

/// Propagates the gradients of the first `count` values back to the inputs, from the last value to the first.
///
/// # Errors
/// `Unsupported` if gradients are too large.
pub(super) fn follow_all(reverse: &mut Reverse, count: usize) -> Result<()> {
    for id in (0..count).rev() {
        if let Some(gradient) = reverse.gradients[id] {
            follow(reverse, id, gradient)?;
        }
    }
    Ok(())
}

/// Propagates the gradient of a value to the inputs of its operation.
fn follow(reverse: &mut Reverse, id: Id, gradient: Id) -> Result<()> {
    let Value { op, shape, .. } = reverse.graph.values[id].clone();
    match op {
        Op::Inputs(_) | Op::Constant(_) => Ok(()),
        Op::Unary(f, a) => {
            let slope = unary(&mut reverse.graph, f, a, id, gradient)?;
            reverse.give(a, slope)
        }
        Op::Binary(f, a, b) => binary(reverse, f, [a, b], id, gradient),
        Op::MatMul(a, b) => product(reverse, a, b, gradient),
        Op::Fold(Fold::Sum, a) => {
            let count = reverse.graph.shape(a).last().copied().unwrap_or(1);
            let ones = reverse.graph.number(vec![count], vec![1.0; count])?;
            let each = reverse.graph.binary(Binary::Mul, gradient, ones)?;
            reverse.give(a, each)
        }
        Op::Fold(Fold::Max | Fold::Min, a) => {
            let graph = &mut reverse.graph;
            let is_extreme = graph.binary(Binary::Equal, a, id)?;
            let last = shape.len() - 1;
            let sharing = graph.fold(Fold::Sum, is_extreme, &[last])?;
            let share = graph.binary(Binary::Div, gradient, sharing)?;
            let each = graph.binary(Binary::Mul, is_extreme, share)?;
            reverse.give(a, each)
        }
        Op::Concat(axis, parts) => {
            let outer: usize = shape[..axis].iter().product();
            let width: usize = shape[axis..].iter().product();
            let mut first = 0;
            for part in parts {
                let Value { shape, rows, .. } = reverse.graph.values[part].clone();
                let own: usize = shape[axis..].iter().product();
                if reverse.is_active(part) {
                    let index = (0..outer).flat_map(|o| (o * width + first..o * width + first + own).map(|n| n as u32));
                    let picked = reverse.graph.pick(gradient, index.collect(), shape, rows)?;
                    reverse.give(part, picked)?;
                }
                first += own;
            }
            Ok(())
        }
        Op::Pick(a, index) => {
            let spread = spread(&mut reverse.graph, gradient, &index, a)?;
            reverse.give(a, spread)
        }
        Op::Spread(a, index) => {
            let Value { shape, rows, .. } = reverse.graph.values[a].clone();
            let picked = reverse.graph.pick(gradient, index.to_vec(), shape, rows)?;
            reverse.give(a, picked)
        }
        Op::Reshape(a) => {
            let Value { shape, rows, .. } = reverse.graph.values[a].clone();
            let complete = reverse.graph.reshape(gradient, shape, rows)?;
            reverse.give(a, complete)
        }
        Op::Recurrent(layer) => Err(Error::unsupported(format!(
            "training through recurrent layers of kind `{:?}` is not supported",
            layer.cell
        ))),
        Op::Linear { .. } => Err(Error::internal("gradients need a graph without merged products")),
    }
}

/// Returns the gradient of `a`, where `made = f(a)` and `gradient` is the gradient of `made`.
fn unary(graph: &mut Graph, f: Unary, a: Id, made: Id, gradient: Id) -> Result<Id> {
    let number = |graph: &mut Graph, x: f32| graph.number(Vec::new(), vec![x]);
    match f {
        // The output is nonzero exactly if the input is positive.
        Unary::Relu => graph.binary(Binary::Keep, made, gradient),
        Unary::Sigmoid => {
            let one = number(graph, 1.0)?;
            let rest = graph.binary(Binary::Sub, one, made)?;
            let slope = graph.binary(Binary::Mul, made, rest)?;
            graph.binary(Binary::Mul, gradient, slope)
        }
        Unary::Tanh => {
            let one = number(graph, 1.0)?;
            let square = graph.binary(Binary::Mul, made, made)?;
            let slope = graph.binary(Binary::Sub, one, square)?;
            graph.binary(Binary::Mul, gradient, slope)
        }
        Unary::Exp => graph.binary(Binary::Mul, gradient, made),
        Unary::Log => graph.binary(Binary::Div, gradient, a),
        Unary::Sqrt => {
            let half = number(graph, 0.5)?;
            let halved = graph.binary(Binary::Mul, gradient, half)?;
            let slope = graph.binary(Binary::Div, halved, made)?;
            graph.binary(Binary::Keep, made, slope)
        }
        Unary::Abs => {
            let zero = number(graph, 0.0)?;
            let (above, below) = (graph.binary(Binary::Less, zero, a)?, graph.binary(Binary::Less, a, zero)?);
            let sign = graph.binary(Binary::Sub, above, below)?;
            graph.binary(Binary::Mul, gradient, sign)
        }
        Unary::Neg => graph.unary(Unary::Neg, gradient),
        Unary::Reciprocal => {
            let square = graph.binary(Binary::Mul, made, made)?;
            let slope = graph.binary(Binary::Mul, gradient, square)?;
            graph.unary(Unary::Neg, slope)
        }
        Unary::Erf => {
            let factor = number(graph, FRAC_2_SQRT_PI)?;
            let bell = bell(graph, a, -1.0)?;
            let slope = graph.binary(Binary::Mul, bell, factor)?;
            graph.binary(Binary::Mul, gradient, slope)
        }
        // The derivative is Φ(x) + x φ(x).
        Unary::Gelu => {
            let (root, half, one) = (number(graph, FRAC_1_SQRT_2)?, number(graph, 0.5)?, number(graph, 1.0)?);
            let density = number(graph, 0.5 * FRAC_1_SQRT_2 * FRAC_2_SQRT_PI)?;
            let scaled = graph.binary(Binary::Mul, a, root)?;
            let erf = graph.unary(Unary::Erf, scaled)?;
            let above = graph.binary(Binary::Add, erf, one)?;
            let share = graph.binary(Binary::Mul, above, half)?;
            let bell = bell(graph, a, -0.5)?;
            let bell = graph.binary(Binary::Mul, bell, density)?;
            let rise = graph.binary(Binary::Mul, a, bell)?;
            let slope = graph.binary(Binary::Add, share, rise)?;
            graph.binary(Binary::Mul, gradient, slope)
        }
        // The derivative is s + y (1 - s), where s is the sigmoid and y the output.
        Unary::Silu => {
            let one = number(graph, 1.0)?;
            let gate = graph.unary(Unary::Sigmoid, a)?;
            let rest = graph.binary(Binary::Sub, one, gate)?;
            let rise = graph.binary(Binary::Mul, made, rest)?;
            let slope = graph.binary(Binary::Add, gate, rise)?;
            graph.binary(Binary::Mul, gradient, slope)
        }
        Unary::Softplus => {
            let slope = graph.unary(Unary::Sigmoid, a)?;
            graph.binary(Binary::Mul, gradient, slope)
        }
        Unary::Sin => scaled(graph, Unary::Cos, a, 1.0, gradient),
        Unary::Cos => scaled(graph, Unary::Sin, a, -1.0, gradient),
        Unary::Sinh => scaled(graph, Unary::Cosh, a, 1.0, gradient),
        Unary::Cosh => scaled(graph, Unary::Sinh, a, 1.0, gradient),
        Unary::Tan => {
            let slope = square_plus(graph, made, 1.0, 1.0)?;
            graph.binary(Binary::Mul, gradient, slope)
        }
        Unary::Atan | Unary::Atanh => {
            let below = square_plus(graph, a, if f == Unary::Atan { 1.0 } else { -1.0 }, 1.0)?;
            graph.binary(Binary::Div, gradient, below)
        }
        Unary::Asin | Unary::Acos | Unary::Asinh | Unary::Acosh => {
            let (factor, plus) = match f {
                Unary::Asinh => (1.0, 1.0),
                Unary::Acosh => (1.0, -1.0),
                _ => (-1.0, 1.0),
            };
            let below = square_plus(graph, a, factor, plus)?;
            let below = graph.unary(Unary::Sqrt, below)?;
            let slope = graph.binary(Binary::Div, gradient, below)?;
            if f == Unary::Acos { graph.unary(Unary::Neg, slope) } else { Ok(slope) }
        }
        // Rounding is a step function; its gradient is replaced by that of the unrounded number (straight-through
        // estimator).
        Unary::RoundF16 | Unary::RoundBf16 => Ok(gradient),
        Unary::Trunc | Unary::Not | Unary::IsNan => Err(Error::internal("an operation has no gradient")),
    }
}

/// Multiplies a gradient by `factor f(a)`, the derivative of an operation.
fn scaled(graph: &mut Graph, f: Unary, a: Id, factor: f32, gradient: Id) -> Result<Id> {
    let slope = graph.unary(f, a)?;
    let factor = graph.number(Vec::new(), vec![factor])?;
    let slope = graph.binary(Binary::Mul, slope, factor)?;
    graph.binary(Binary::Mul, gradient, slope)
}

/// Returns `factor x² + plus`.
fn square_plus(graph: &mut Graph, x: Id, factor: f32, plus: f32) -> Result<Id> {
    let [factor, plus] = [factor, plus].map(|x| graph.number(Vec::new(), vec![x]));
    let square = graph.binary(Binary::Mul, x, x)?;
    let scaled = graph.binary(Binary::Mul, square, factor?)?;
    graph.binary(Binary::Add, scaled, plus?)
}

/// Returns `exp(factor x²)`.
fn bell(graph: &mut Graph, x: Id, factor: f32) -> Result<Id> {
    let factor = graph.number(Vec::new(), vec![factor])?;
    let square = graph.binary(Binary::Mul, x, x)?;
    let scaled = graph.binary(Binary::Mul, square, factor)?;
    graph.unary(Unary::Exp, scaled)
}

fn binary(reverse: &mut Reverse, f: Binary, [a, b]: [Id; 2], made: Id, gradient: Id) -> Result<()> {
    let (by_a, by_b) = (reverse.is_active(a), reverse.is_active(b));
    match f {
        Binary::Add => {
            reverse.give(a, gradient)?;
            reverse.give(b, gradient)
        }
        Binary::Sub => {
            reverse.give(a, gradient)?;
            if by_b {
                let minus = reverse.graph.unary(Unary::Neg, gradient)?;
                reverse.give(b, minus)?;
            }
            Ok(())
        }
        Binary::Mul if a == b => {
            let slope = reverse.graph.binary(Binary::Mul, gradient, a)?;
            reverse.give(a, slope)?;
            reverse.give(a, slope)
        }
        Binary::Mul => {
            for (to, other) in [(a, b), (b, a)] {
                if reverse.is_active(to) {
                    let slope = reverse.graph.binary(Binary::Mul, gradient, other)?;
                    reverse.give(to, slope)?;
                }
            }
            Ok(())
        }
        Binary::Div => {
            let share = reverse.graph.binary(Binary::Div, gradient, b)?;
            reverse.give(a, share)?;
            if by_b {
                let slope = reverse.graph.binary(Binary::Mul, share, made)?;
                let minus = reverse.graph.unary(Unary::Neg, slope)?;
                reverse.give(b, minus)?;
            }
            Ok(())
        }
        // d(xʸ) = y xʸ⁻¹ dx + xʸ log(x) dy
        Binary::Pow => {
            let graph = &mut reverse.graph;
            let one = graph.number(Vec::new(), vec![1.0])?;
            let less = graph.binary(Binary::Sub, b, one)?;
            let power = graph.binary(Binary::Pow, a, less)?;
            let slope = graph.binary(Binary::Mul, b, power)?;
            let slope = graph.binary(Binary::Mul, gradient, slope)?;
            reverse.give(a, slope)?;
            if by_b {
                let log = reverse.graph.unary(Unary::Log, a)?;
                let slope = reverse.graph.binary(Binary::Mul, made, log)?;
                let slope = reverse.graph.binary(Binary::Mul, gradient, slope)?;
                reverse.give(b, slope)?;
            }
            Ok(())
        }
        Binary::Rem => {
            reverse.give(a, gradient)?;
            if by_b {
                let quotient = reverse.graph.binary(Binary::Div, a, b)?;
                let complete = reverse.graph.unary(Unary::Trunc, quotient)?;
                let slope = reverse.graph.binary(Binary::Mul, gradient, complete)?;
                let minus = reverse.graph.unary(Unary::Neg, slope)?;
                reverse.give(b, minus)?;
            }
            Ok(())
        }
        Binary::Max | Binary::Min => {
            for (to, other) in [(a, b), (b, a)] {
                if !reverse.is_active(to) {
                    continue;
                }
                let graph = &mut reverse.graph;
                let (small, large) = if f == Binary::Max { (other, to) } else { (to, other) };
                let slope = if by_a && by_b {
                    let half = graph.number(Vec::new(), vec![0.5])?;
                    let (wins, ties) =
                        (graph.binary(Binary::Less, small, large)?, graph.binary(Binary::Equal, small, large)?);
                    let shared = graph.binary(Binary::Mul, ties, half)?;
                    let share = graph.binary(Binary::Add, wins, shared)?;
                    graph.binary(Binary::Mul, gradient, share)?
                } else {
                    let wins = graph.binary(Binary::LessOrEqual, small, large)?;
                    graph.binary(Binary::Keep, wins, gradient)?
                };
                reverse.give(to, slope)?;
            }
            Ok(())
        }
        Binary::Keep | Binary::Drop => {
            let slope = reverse.graph.binary(f, a, gradient)?;
            reverse.give(b, slope)
        }
        Binary::Equal | Binary::Less | Binary::LessOrEqual => Err(Error::internal("a comparison has no gradient")),
    }
}

/// Propagates the gradient of `C = A B`: `dA = dC Bᵀ`, `dB = Aᵀ dC`.
fn product(reverse: &mut Reverse, a: Id, b: Id, gradient: Id) -> Result<()> {
    if reverse.is_active(a) {
        let turned = turned(&mut reverse.graph, b)?;
        let slope = reverse.graph.matmul(gradient, turned)?;
        reverse.give(a, slope)?;
    }
    if !reverse.is_active(b) {
        return Ok(());
    }
    let Value { shape, .. } = &reverse.graph.values[b];
    let [.., k, n] = shape[..] else { return Err(Error::internal("the second operand of a product is not a matrix")) };
    if reverse.is_shared(b) && shape.iter().product::<usize>() == k * n && !reverse.is_shared(a) {
        reverse.give_outer(b, a, gradient);
        return Ok(());
    }
    let is_of_rows = reverse.graph.values[b].rows.is_some();
    let graph = &mut reverse.graph;
    let (mut left, mut right) = (a, gradient);
    if !is_of_rows {
        // The product may sum over the row axis, so this axis loses its role.
        (left, right) = (of_one_row(graph, left)?, of_one_row(graph, right)?);
    }
    let turned = turned(graph, left)?;
    let slope = graph.matmul(turned, right)?;
    reverse.give(b, slope)
}

/// Returns the same value in which no axis counts rows.
fn of_one_row(graph: &mut Graph, id: Id) -> Result<Id> {
    let shape = graph.shape(id).to_vec();
    graph.reshape(id, shape, None)
}

/// Returns the value with its last two axes swapped; if the value is itself such a swap, returns the value before it.
fn turned(graph: &mut Graph, id: Id) -> Result<Id> {
    let axes = graph.shape(id).len();
    let mut order: Vec<usize> = (0..axes).collect();
    order.swap(axes - 2, axes - 1);
    let turned = graph.transpose(id, &order)?;
    let Value { op: Op::Pick(of, second), shape, rows, .. } = graph.values[turned].clone() else { return Ok(turned) };
    let Op::Pick(first_of, first) = &graph.values[of].op else { return Ok(turned) };
    let (first_of, index) = (*first_of, second.iter().map(|&n| first[n as usize]).collect());
    if graph.values[first_of].side == Side::Pair {
        return Ok(turned);
    }
    graph.pick(first_of, index, shape, rows)
}

/// Returns the gradient of a value from which `index` selects numbers.
fn spread(graph: &mut Graph, gradient: Id, index: &[u32], of: Id) -> Result<Id> {
    let Value { shape, rows, side, .. } = graph.values[of].clone();
    let count = shape.iter().product();
    let rows = if side == Side::Pair { rows } else { None };
    let mut inverse = vec![u32::MAX; count];
    index.iter().zip(0..).for_each(|(&n, from)| inverse[n as usize] = from);
    if index.len() == count && !inverse.contains(&u32::MAX) {
        return graph.pick(gradient, inverse, shape, rows);
    }
    graph.add(Op::Spread(gradient, index.into()), shape, rows)
}
