//! Element-wise operators: functions, arithmetic, comparisons, casts.

use rten_onnx::onnx::DataType;

use super::arithmetic::Arithmetic;
use super::array::{Array, Element, broadcast};
use super::call::Call;
use super::stop::Stop;

/// Work of a function, in multiply-adds.
const FUNCTION_WORK: usize = 16;

pub(super) fn evaluate(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Option<Vec<Array>>, Stop> {
    let operator = call.operator();
    if let Some(made) = function(call, arithmetic)? {
        return Ok(Some(vec![made]));
    }
    let made = match operator {
        "Add" | "Sub" | "Mul" | "Div" | "Pow" | "Mod" | "PRelu" => {
            two(call, call.input(0)?, call.input(1)?, arithmetic)?
        }
        "Max" | "Min" | "Sum" | "Mean" => variadic(call, arithmetic)?,
        "Equal" | "Less" | "LessOrEqual" | "Greater" | "GreaterOrEqual" => compared(call, arithmetic)?,
        "And" | "Or" | "Xor" => {
            let (a, b, shape) = spread(call.input(0)?, call.input(1)?, arithmetic)?;
            let both = a.wholes()?.iter().zip(b.wholes()?);
            let truth = |(&a, &b): (&i64, &i64)| match operator {
                "And" => a != 0 && b != 0,
                "Or" => a != 0 || b != 0,
                _ => (a != 0) != (b != 0),
            };
            Array::truths(shape, both.map(truth))
        }
        "Not" => {
            let a = call.input(0)?;
            Array::truths(a.shape.clone(), a.wholes()?.iter().map(|&n| n == 0))
        }
        "IsNaN" => {
            let a = call.input(0)?;
            Array::truths(a.shape.clone(), a.reals()?.iter().map(|x| x.is_nan()))
        }
        "IsInf" => {
            let (a, over, under) =
                (call.input(0)?, call.is_set("detect_positive", true), call.is_set("detect_negative", true));
            let is_infinite = |x: &f64| {
                // Numbers beyond the range of f32 count as infinite.
                let x = *x as f32;
                x.is_infinite() && if x > 0.0 { over } else { under }
            };
            Array::truths(a.shape.clone(), a.reals()?.iter().map(is_infinite))
        }
        "Where" => chosen(call, arithmetic)?,
        "Clip" => clipped(call)?,
        "Cast" => {
            let to = DataType(i32::try_from(call.int("to", 0)).unwrap_or(0));
            cast(call.input(0)?, Element::of(to)?, arithmetic)?
        }
        "CastLike" => cast(call.input(0)?, call.input(1)?.element, arithmetic)?,
        "Identity" => call.input(0)?.clone(),
        "Dropout" => {
            let is_training = call.optional(2).is_some_and(|array| array.wholes().is_ok_and(|truths| truths != [0]));
            if is_training {
                return Err(Stop::Unknown("`Dropout` while training".into()));
            }
            call.input(0)?.clone()
        }
        _ => return Ok(None),
    };
    Ok(Some(vec![made]))
}

/// Evaluates a function of one number.
fn function(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Option<Array>, Stop> {
    let operator = call.operator();
    let (alpha, beta, gamma) = match operator {
        "LeakyRelu" => (call.float("alpha", 0.01), 0.0, 0.0),
        "Elu" | "Celu" | "ThresholdedRelu" | "Swish" => (call.float("alpha", 1.0), 0.0, 0.0),
        "Shrink" => (call.float("lambd", 0.5), call.float("bias", 0.0), 0.0),
        "Selu" => (call.float("alpha", 1.673_263_2), 0.0, call.float("gamma", 1.050_701)),
        "HardSigmoid" => (call.float("alpha", 0.2), call.float("beta", 0.5), 0.0),
        "Gelu" => match call.text("approximate", "none") {
            "none" => (0.0, 0.0, 0.0),
            _ => (1.0, 0.0, 0.0),
        },
        _ => (0.0, 0.0, 0.0),
    };
    let f: &dyn Fn(f64) -> f64 = match operator {
        // This comparison keeps NaN, unlike a maximum with 0.
        "Relu" => &|x| if x < 0.0 { 0.0 } else { x },
        "LeakyRelu" => &|x| if x < 0.0 { alpha * x } else { x },
        "Elu" => &|x| if x < 0.0 { alpha * x.exp_m1() } else { x },
        "Celu" => &|x| if x < 0.0 { alpha * (x / alpha).exp_m1() } else { x },
        "Selu" => &|x| if x <= 0.0 { gamma * alpha * x.exp_m1() } else { gamma * x },
        "ThresholdedRelu" => &|x| if x > alpha { x } else { 0.0 },
        "Shrink" => &|x| {
            if x < -alpha {
                x + beta
            } else if x > alpha {
                x - beta
            } else {
                0.0
            }
        },
        "Swish" => &|x| x * sigmoid(alpha * x),
        "Sigmoid" => &sigmoid,
        "HardSigmoid" => &|x| (alpha * x + beta).clamp(0.0, 1.0),
        "HardSwish" => &|x| x * (x / 6.0 + 0.5).clamp(0.0, 1.0),
        "Softplus" => &softplus,
        "Softsign" => &|x| x / (1.0 + x.abs()),
        "Mish" => &|x| x * softplus(x).tanh(),
        "Gelu" if alpha == 0.0 => &|x| 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)),
        "Gelu" => &|x| {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        },
        "Exp" => &f64::exp,
        "Log" => &f64::ln,
        "Sqrt" => &f64::sqrt,
        "Reciprocal" => &f64::recip,
        "Erf" => &erf,
        "Tanh" => &f64::tanh,
        "Sin" => &f64::sin,
        "Cos" => &f64::cos,
        "Tan" => &f64::tan,
        "Asin" => &f64::asin,
        "Acos" => &f64::acos,
        "Atan" => &f64::atan,
        "Sinh" => &f64::sinh,
        "Cosh" => &f64::cosh,
        "Asinh" => &f64::asinh,
        "Acosh" => &f64::acosh,
        "Atanh" => &f64::atanh,
        "Floor" => &f64::floor,
        "Ceil" => &f64::ceil,
        "Round" => &f64::round_ties_even,
        "Abs" => &f64::abs,
        "Neg" => &|x| -x,
        "Sign" => &|x| {
            if x > 0.0 {
                1.0
            } else if x < 0.0 {
                -1.0
            } else {
                0.0
            }
        },
        _ => return Ok(None),
    };
    let a = call.input(0)?;
    arithmetic.spend(a.count() * FUNCTION_WORK)?;
    if a.is_real() {
        let made = a.reals()?.iter().map(|&x| arithmetic.result(f(x))).collect();
        return Ok(Some(Array::real(a.shape.clone(), made)));
    }
    let whole: fn(i64) -> i64 = match operator {
        "Abs" => i64::wrapping_abs,
        "Neg" => i64::wrapping_neg,
        "Sign" => i64::signum,
        "Relu" => |n| n.max(0),
        _ => return Err(Stop::Unknown(format!("operator `{operator}` with integer inputs"))),
    };
    let made = a.wholes()?.iter().map(|&n| whole(n)).collect();
    Ok(Some(Array::whole(a.element, a.shape.clone(), made)))
}

pub(super) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn softplus(x: f64) -> f64 {
    if x.is_nan() { x } else { x.max(0.0) + (-x.abs()).exp().ln_1p() }
}

/// Evaluates the error function by its series, whose terms are all positive; beyond 6 the function is 1 in f64.
pub(super) fn erf(x: f64) -> f64 {
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

fn spread(a: &Array, b: &Array, arithmetic: &mut Arithmetic) -> Result<(Array, Array, Vec<usize>), Stop> {
    let shape = broadcast(&a.shape, &b.shape)?;
    arithmetic.room(&shape, 4)?;
    Ok((a.spread(&shape)?, b.spread(&shape)?, shape))
}

fn two(call: &Call<'_>, a: &Array, b: &Array, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let operator = call.operator();
    let (a, b, shape) = spread(a, b, arithmetic)?;
    let is_fmod = call.is_set("fmod", false);
    if a.is_real() {
        let f: &dyn Fn(f64, f64) -> f64 = match operator {
            "Add" | "Sum" | "Mean" => &|x, y| x + y,
            "Sub" => &|x, y| x - y,
            "Mul" => &|x, y| x * y,
            "Div" => &|x, y| x / y,
            "Pow" => &f64::powf,
            "PRelu" => &|x, y| if x < 0.0 { x * y } else { x },
            "Mod" if is_fmod => &|x, y| x % y,
            "Mod" => return Err(Stop::Invalid("`Mod` of floats has `fmod` = 0, expected 1".into())),
            "Max" => &|x, y| if x.is_nan() || x > y { x } else { y },
            _ => &|x, y| if x.is_nan() || x < y { x } else { y },
        };
        let made = a.reals()?.iter().zip(b.as_reals()).map(|(&x, y)| arithmetic.result(f(x, y))).collect();
        return Ok(Array::real(shape, made));
    }
    if operator == "Pow" {
        // Integer powers are computed as floats and converted back.
        let made = a.as_reals().into_iter().zip(b.as_reals()).map(|(x, y)| integer_of(x.powf(y), a.element)).collect();
        return Ok(Array::whole(a.element, shape, made));
    }
    let mut made = Vec::with_capacity(a.count());
    for (&x, &y) in a.wholes()?.iter().zip(b.wholes()?) {
        if y == 0 && ["Div", "Mod"].contains(&operator) {
            return Err(Stop::Invalid("an integer is divided by 0".into()));
        }
        made.push(match operator {
            "Add" | "Sum" => x.wrapping_add(y),
            "Sub" => x.wrapping_sub(y),
            "Mul" => x.wrapping_mul(y),
            "Div" => x.wrapping_div(y),
            "Mod" if is_fmod => x.wrapping_rem(y),
            // The result of `Mod` has the sign of the divisor.
            "Mod" => x.wrapping_rem(y).wrapping_add(y).wrapping_rem(y),
            "Max" => x.max(y),
            "Min" => x.min(y),
            "PRelu" => {
                if x < 0 {
                    x.wrapping_mul(y)
                } else {
                    x
                }
            }
            _ => return Err(Stop::Unknown(format!("operator `{operator}` with integer inputs"))),
        });
    }
    Ok(Array::whole(a.element, shape, made))
}

fn variadic(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let all = call.all()?;
    let (first, rest) = all.split_first().ok_or_else(|| Stop::Invalid("the node has no inputs".into()))?;
    let mut made = (*first).clone();
    for next in rest {
        made = two(call, &made, next, arithmetic)?;
    }
    if call.operator() == "Mean" {
        let count = all.len() as f64;
        let shape = made.shape.clone();
        made = Array::real(shape, made.reals()?.iter().map(|&x| arithmetic.result(x / count)).collect());
    }
    Ok(made)
}

fn compared(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let operator = call.operator();
    let (a, b, shape) = spread(call.input(0)?, call.input(1)?, arithmetic)?;
    fn holds<T: PartialOrd>(operator: &str, a: &T, b: &T) -> bool {
        match operator {
            "Equal" => a == b,
            "Less" => a < b,
            "LessOrEqual" => a <= b,
            "Greater" => a > b,
            _ => a >= b,
        }
    }
    Ok(match a.is_real() {
        true => Array::truths(shape, a.reals()?.iter().zip(b.reals()?).map(|(a, b)| holds(operator, a, b))),
        false => Array::truths(shape, a.wholes()?.iter().zip(b.wholes()?).map(|(a, b)| holds(operator, a, b))),
    })
}

fn chosen(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let (condition, a, b) = (call.input(0)?, call.input(1)?, call.input(2)?);
    let shape = broadcast(&broadcast(&condition.shape, &a.shape)?, &b.shape)?;
    arithmetic.room(&shape, 4)?;
    let both = Array::chained(&[&a.spread(&shape)?, &b.spread(&shape)?])?;
    let (condition, count) = (condition.spread(&shape)?, both.count() / 2);
    let from: Vec<usize> =
        condition.wholes()?.iter().enumerate().map(|(n, &holds)| if holds != 0 { n } else { n + count }).collect();
    Ok(both.picked(&from, shape))
}

fn clipped(call: &Call<'_>) -> Result<Array, Stop> {
    let a = call.input(0)?;
    if a.is_real() {
        let bound = |name: &str, n: usize| match call.optional(n) {
            Some(bound) => bound.reals().map(|bound| bound.first().copied()),
            None => Ok(call.given_float(name)),
        };
        let (least, most) = (bound("min", 1)?, bound("max", 2)?);
        let clip = |x: f64| {
            let x = least.map_or(x, |least| if x < least { least } else { x });
            most.map_or(x, |most| if x > most { most } else { x })
        };
        return Ok(Array::real(a.shape.clone(), a.reals()?.iter().map(|&x| clip(x)).collect()));
    }
    let bound = |n: usize| call.optional(n).map(|bound| bound.wholes().map(|bound| bound.first().copied())).transpose();
    let (least, most) = (bound(1)?.flatten().unwrap_or(i64::MIN), bound(2)?.flatten().unwrap_or(i64::MAX));
    Ok(Array::whole(a.element, a.shape.clone(), a.wholes()?.iter().map(|&n| n.max(least).min(most)).collect()))
}

/// Converts a float to an integer type by truncation. A float out of range becomes the least integer, as on processors and in
/// ONNX Runtime.
fn integer_of(x: f64, element: Element) -> i64 {
    let (least, fits) = match element {
        Element::Signed(64) => (i64::MIN, x.abs() < 9.2e18),
        _ => (i64::from(i32::MIN), x.abs() < 2_147_483_648.0),
    };
    if fits { x.trunc() as i64 } else { least }
}

fn cast(a: &Array, to: Element, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let shape = a.shape.clone();
    Ok(match to {
        Element::Real | Element::Half | Element::Brain if a.is_real() => a.clone().typed(to),
        Element::Real | Element::Half | Element::Brain => {
            Array::real(shape, a.as_reals().into_iter().map(|x| arithmetic.result(x)).collect()).typed(to)
        }
        Element::Truth => Array::truths(shape, a.as_reals().into_iter().map(|x| x != 0.0)),
        to if a.is_real() => Array::whole(to, shape, a.reals()?.iter().map(|&x| integer_of(x, to)).collect()),
        to => Array::whole(to, shape, a.wholes()?.to_vec()),
    })
}
