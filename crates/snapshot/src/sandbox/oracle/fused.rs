//! Operators of the domain `com.microsoft`.

use super::arithmetic::Arithmetic;
use super::array::Array;
use super::call::Call;
use super::numbers::{erf, sigmoid};
use super::products::{product, turned_last};
use super::stop::Stop;

/// Prefix of the operators' names.
pub(super) const MICROSOFT: &str = "com.microsoft.";
/// Work of a function, in multiply-adds.
const FUNCTION_WORK: usize = 24;

pub(super) fn evaluate(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Option<Vec<Array>>, Stop> {
    let Some(operator) = call.operator().strip_prefix(MICROSOFT) else { return Ok(None) };
    let a = call.input(0)?;
    arithmetic.spend(a.count() * FUNCTION_WORK)?;
    let by_erf = |x: f64| 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2));
    let by_tanh = |x: f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh());
    let made = match operator {
        "Gelu" => mapped(a, by_erf, arithmetic)?,
        "BiasGelu" => mapped(&sum(a, call.input(1)?, arithmetic)?, by_erf, arithmetic)?,
        "FastGelu" => match call.optional(1) {
            Some(bias) => mapped(&sum(a, bias, arithmetic)?, by_tanh, arithmetic)?,
            None => mapped(a, by_tanh, arithmetic)?,
        },
        "QuickGelu" => {
            let alpha = call.float("alpha", 1.702);
            mapped(a, |x| x * sigmoid(alpha * x), arithmetic)?
        }
        "FusedMatMul" => {
            if call.is_set("transBatchA", false) || call.is_set("transBatchB", false) {
                return Err(Stop::Unknown("`FusedMatMul` with transposed batches".into()));
            }
            let turn = |n: usize, name: &str| {
                let factor = call.input(n)?;
                if call.is_set(name, false) { turned_last(factor) } else { Ok(factor.clone()) }
            };
            let made = product(&turn(0, "transA")?, &turn(1, "transB")?, arithmetic)?;
            let alpha = call.float("alpha", 1.0);
            mapped(&made, |x| alpha * x, arithmetic)?
        }
        "SkipLayerNormalization" => return skip_norm(call, [3, 4], true, arithmetic).map(Some),
        "SkipSimplifiedLayerNormalization" => return skip_norm(call, [usize::MAX, 3], false, arithmetic).map(Some),
        _ => return Ok(None),
    };
    Ok(Some(vec![made]))
}

fn mapped(a: &Array, f: impl Fn(f64) -> f64, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    Ok(Array::real(a.shape.clone(), a.reals()?.iter().map(|&x| arithmetic.result(f(x))).collect()))
}

fn sum(a: &Array, b: &Array, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let b = b.spread(&a.shape)?;
    let both = a.reals()?.iter().zip(b.reals()?);
    Ok(Array::real(a.shape.clone(), both.map(|(x, y)| arithmetic.result(x + y)).collect()))
}

/// Normalizes the last axis of a sum. `shift` and `bias` are the indices of the inputs with these values.
fn skip_norm(
    call: &Call<'_>,
    [shift, bias]: [usize; 2],
    is_centred: bool,
    arithmetic: &mut Arithmetic,
) -> Result<Vec<Array>, Stop> {
    let mut a = sum(call.input(0)?, call.input(1)?, arithmetic)?;
    if let Some(bias) = call.optional(bias) {
        a = sum(&a, bias, arithmetic)?;
    }
    let scale = call.input(2)?.spread(&a.shape)?;
    let shift = call.optional(shift).map(|shift| shift.spread(&a.shape)).transpose()?;
    let shift = shift.as_ref().map(Array::reals).transpose()?;
    let epsilon = call.float("epsilon", 1e-12);
    let size = a.shape.last().copied().unwrap_or(1).max(1);
    let mut made = Vec::with_capacity(a.count());
    for numbers in a.reals()?.chunks_exact(size) {
        let total: f64 = numbers.iter().sum();
        let magnitude: f64 = numbers.iter().map(|x| x.abs()).sum();
        let mean = if is_centred { arithmetic.sum(total, magnitude) / size as f64 } else { 0.0 };
        let away: Vec<f64> = numbers.iter().map(|x| arithmetic.result(x - mean)).collect();
        let squares: f64 = away.iter().map(|x| x * x).sum();
        let variance = arithmetic.sum(squares, squares) / size as f64;
        let root = arithmetic.result((variance + epsilon).sqrt());
        made.extend(away.iter().map(|x| arithmetic.result(x / root)));
    }
    for (n, x) in made.iter_mut().enumerate() {
        *x = arithmetic.result(*x * scale.reals()?[n]);
        if let Some(shift) = shift {
            *x = arithmetic.result(*x + shift[n]);
        }
    }
    let nothing = Array::real(vec![0], Vec::new());
    Ok(vec![Array::real(a.shape.clone(), made), nothing.clone(), nothing, a])
}
