//! Operators that reduce along axes: sums, extremes, softmax, normalisation.

use super::arithmetic::Arithmetic;
use super::array::{Array, Element, places, strides};
use super::call::{Call, place};
use super::stop::Stop;

pub(super) fn evaluate(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Option<Vec<Array>>, Stop> {
    let operator = call.operator();
    let made = match operator {
        "ReduceSum" | "ReduceMean" | "ReduceMax" | "ReduceMin" | "ReduceL1" | "ReduceL2" | "ReduceSumSquare"
        | "ReduceLogSumExp" | "ReduceLogSum" | "ReduceProd" => reduced(call, arithmetic)?,
        "ArgMax" | "ArgMin" => index_of_extreme(call, arithmetic)?,
        "Softmax" | "LogSoftmax" => softmax(call, arithmetic)?,
        "LayerNormalization" | "RMSNormalization" | "SimplifiedLayerNormalization" => normalised(call, arithmetic)?,
        "Hardmax" => hard_max(call, arithmetic)?,
        "BatchNormalization" => batch_normalised(call, arithmetic)?,
        "LpNormalization" => by_length(call, arithmetic)?,
        "CumSum" => running(call, arithmetic)?,
        _ => return Ok(None),
    };
    Ok(Some(vec![made]))
}

/// Returns for each number of a shape the index of its result, and the shape of the results, with size 1 along the reduced
/// `axes`.
fn groups(shape: &[usize], axes: &[usize]) -> (Vec<usize>, Vec<usize>) {
    let retained: Vec<usize> = shape.iter().enumerate().map(|(n, &d)| if axes.contains(&n) { 1 } else { d }).collect();
    let own = strides(&retained);
    let moved: Vec<usize> = (0..shape.len()).map(|n| if axes.contains(&n) { 0 } else { own[n] }).collect();
    (places(shape, &moved), retained)
}

/// Numbers of each group that is reduced, group of each number, and shape of the results.
type Members = (Vec<Vec<f64>>, Vec<usize>, Vec<usize>);

/// Returns the numbers of each group.
fn members(a: &Array, axes: &[usize]) -> Result<Members, Stop> {
    let (group, retained) = groups(&a.shape, axes);
    let mut all = vec![Vec::new(); retained.iter().product()];
    group.iter().zip(a.as_reals()).for_each(|(&group, x)| all[group].push(x));
    Ok((all, group, retained))
}

fn sum(numbers: impl Iterator<Item = f64> + Clone, arithmetic: &mut Arithmetic) -> f64 {
    let magnitude = numbers.clone().map(f64::abs).sum();
    arithmetic.sum(numbers.sum(), magnitude)
}

fn largest(numbers: &[f64]) -> f64 {
    numbers.iter().fold(f64::NEG_INFINITY, |most, &x| if x.is_nan() || x > most { x } else { most })
}

fn log_sum_exp(numbers: &[f64], arithmetic: &mut Arithmetic) -> f64 {
    let most = largest(numbers);
    if most.is_infinite() {
        return most;
    }
    let less: Vec<f64> = numbers.iter().map(|x| arithmetic.result(x - most)).collect();
    let each: Vec<f64> = less.iter().map(|x| arithmetic.result(x.exp())).collect();
    let sum = sum(each.iter().copied(), arithmetic);
    let log = arithmetic.result(sum.ln());
    arithmetic.result(log + most)
}

fn reduced(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let (operator, a) = (call.operator(), call.input(0)?);
    let axes = call.ints_or_input("axes", 1)?.filter(|axes| !axes.is_empty());
    if axes.is_none() && call.is_set("noop_with_empty_axes", false) {
        return Err(Stop::Unknown("`noop_with_empty_axes` without axes".into()));
    }
    let axes = match axes {
        Some(axes) => axes.iter().map(|&axis| place(axis, a.shape.len())).collect::<Result<Vec<_>, _>>()?,
        None => (0..a.shape.len()).collect(),
    };
    arithmetic.spend(a.count() * 4)?;
    let (group, mut shape) = groups(&a.shape, &axes);
    if !call.is_set("keepdims", true) {
        shape = (0..a.shape.len()).filter(|axis| !axes.contains(axis)).map(|axis| a.shape[axis]).collect();
    }
    if a.is_real() {
        let (all, ..) = members(a, &axes)?;
        let one = |numbers: Vec<f64>| {
            let count = numbers.len() as f64;
            let squares = || numbers.iter().map(|x| x * x);
            match operator {
                "ReduceSum" => sum(numbers.iter().copied(), arithmetic),
                "ReduceMean" => {
                    let sum = sum(numbers.iter().copied(), arithmetic);
                    arithmetic.result(sum / count)
                }
                "ReduceMax" => largest(&numbers),
                "ReduceMin" => -largest(&numbers.iter().map(|x| -x).collect::<Vec<_>>()),
                "ReduceL1" => sum(numbers.iter().map(|x| x.abs()), arithmetic),
                "ReduceL2" => {
                    let sum = sum(squares(), arithmetic);
                    arithmetic.result(sum.sqrt())
                }
                "ReduceSumSquare" => sum(squares(), arithmetic),
                "ReduceLogSum" => {
                    let sum = sum(numbers.iter().copied(), arithmetic);
                    arithmetic.result(sum.ln())
                }
                "ReduceProd" => numbers.iter().fold(1.0, |product, x| arithmetic.result(product * x)),
                _ => log_sum_exp(&numbers, arithmetic),
            }
        };
        return Ok(Array::real(shape, all.into_iter().map(one).collect()));
    }
    let mut all: Vec<Vec<i64>> = vec![Vec::new(); shape.iter().product()];
    group.iter().zip(a.wholes()?).for_each(|(&group, &n)| all[group].push(n));
    let total = |numbers: &[i64]| numbers.iter().fold(0i64, |sum, &n| sum.wrapping_add(a.element.wrap(n)));
    let mut made = Vec::with_capacity(all.len());
    for numbers in all {
        made.push(match operator {
            "ReduceSum" => total(&numbers),
            "ReduceMean" => total(&numbers) / (numbers.len().max(1) as i64),
            "ReduceMax" => numbers.iter().copied().max().unwrap_or(i64::MIN),
            "ReduceMin" => numbers.iter().copied().min().unwrap_or(i64::MAX),
            "ReduceL1" => numbers.iter().fold(0, |sum: i64, n| sum.wrapping_add(n.wrapping_abs())),
            "ReduceSumSquare" => numbers.iter().fold(0, |sum: i64, n| sum.wrapping_add(n.wrapping_mul(*n))),
            "ReduceProd" => numbers.iter().fold(1, |product: i64, n| product.wrapping_mul(*n)),
            _ => return Err(Stop::Unknown(format!("operator `{operator}` with integer inputs"))),
        });
    }
    Ok(Array::whole(a.element, shape, made))
}

fn index_of_extreme(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let a = call.input(0)?;
    let axis = place(call.int("axis", 0), a.shape.len())?;
    let is_last = call.is_set("select_last_index", false);
    let is_max = call.operator() == "ArgMax";
    arithmetic.spend(a.count() * 4)?;
    let (all, _, mut shape) = members(a, &[axis])?;
    if !call.is_set("keepdims", true) {
        shape.remove(axis);
    }
    let one = |numbers: &Vec<f64>| {
        let mut best = 0;
        for (n, &x) in numbers.iter().enumerate().skip(1) {
            let is_better = if is_max { x > numbers[best] } else { x < numbers[best] };
            if is_better || (is_last && x == numbers[best]) {
                best = n;
            }
        }
        best as i64
    };
    Ok(Array::whole(Element::Signed(64), shape, all.iter().map(one).collect()))
}

/// Returns 1 for the first of the largest numbers of each group, and 0 for the others.
fn hard_max(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let a = call.input(0)?;
    let axis = place(call.int("axis", if call.opset < 13 { 1 } else { -1 }), a.shape.len())?;
    let axes: Vec<usize> = if call.opset < 13 { (axis..a.shape.len()).collect() } else { vec![axis] };
    arithmetic.spend(a.count() * 4)?;
    let (all, group, _) = members(a, &axes)?;
    let mut is_found = vec![false; all.len()];
    let is_first = |(&group, x): (&usize, f64)| {
        let is_it = !is_found[group] && x == largest(&all[group]);
        is_found[group] |= is_it;
        f64::from(u8::from(is_it))
    };
    Ok(Array::real(a.shape.clone(), group.iter().zip(a.as_reals()).map(is_first).collect()))
}

fn softmax(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let a = call.input(0)?;
    let rank = a.shape.len();
    let axis = place(call.int("axis", if call.opset < 13 { 1 } else { -1 }), rank)?;
    // Before opset 13, the softmax is over `axis` and all later axes together.
    let axes: Vec<usize> = if call.opset < 13 { (axis..rank).collect() } else { vec![axis] };
    arithmetic.spend(a.count() * 24)?;
    let (all, group, retained) = members(a, &axes)?;
    let mut made: Vec<std::vec::IntoIter<f64>> = Vec::with_capacity(retained.iter().product());
    for numbers in all {
        let most = largest(&numbers);
        let each: Vec<f64> = numbers.iter().map(|x| arithmetic.result(x - most)).collect();
        let exponentials: Vec<f64> = each.iter().map(|x| arithmetic.result(x.exp())).collect();
        let sum = sum(exponentials.iter().copied(), arithmetic);
        let results: Vec<f64> = match call.operator() {
            "Softmax" => exponentials.iter().map(|x| arithmetic.result(x / sum)).collect(),
            _ => {
                let log = arithmetic.result(sum.ln());
                each.iter().map(|x| arithmetic.result(x - log)).collect()
            }
        };
        made.push(results.into_iter());
    }
    // Each group lists its elements in input order.
    let numbers = group.iter().map(|&group| made[group].next().unwrap_or(f64::NAN)).collect();
    Ok(Array::real(a.shape.clone(), numbers))
}

fn normalised(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let (a, scale) = (call.input(0)?, call.input(1)?);
    let axis = place(call.int("axis", -1), a.shape.len())?;
    let epsilon = call.float("epsilon", 1e-5);
    arithmetic.spend(a.count() * 24)?;
    let scale = scale.spread(&a.shape)?;
    let shift = call.optional(2).map(|shift| shift.spread(&a.shape)).transpose()?;
    let (scale, shift) = (scale.reals()?, shift.as_ref().map(Array::reals).transpose()?);
    let size: usize = a.shape[axis..].iter().product();
    let mut made = Vec::with_capacity(a.count());
    for numbers in a.reals()?.chunks_exact(size.max(1)) {
        let count = numbers.len() as f64;
        let mean = match call.operator() {
            "LayerNormalization" => {
                let sum = sum(numbers.iter().copied(), arithmetic);
                arithmetic.result(sum / count)
            }
            _ => 0.0,
        };
        let centred: Vec<f64> = numbers.iter().map(|x| arithmetic.result(x - mean)).collect();
        let variance = sum(centred.iter().map(|x| x * x), arithmetic) / count;
        let root = arithmetic.result((variance + epsilon).sqrt());
        made.extend(centred.iter().map(|x| arithmetic.result(x / root)));
    }
    for (n, x) in made.iter_mut().enumerate() {
        *x = arithmetic.result(*x * scale[n]);
        if let Some(shift) = shift {
            *x = arithmetic.result(*x + shift[n]);
        }
    }
    Ok(Array::real(a.shape.clone(), made))
}

fn batch_normalised(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    if call.is_set("training_mode", false) {
        return Err(Stop::Unknown("`BatchNormalization` while training".into()));
    }
    let a = call.input(0)?;
    let epsilon = call.float("epsilon", 1e-5);
    let [scale, bias, mean, variance] = [1, 2, 3, 4].map(|n| call.input(n).and_then(Array::reals));
    let (scale, bias, mean, variance) = (scale?, bias?, mean?, variance?);
    let channels = a.shape.get(1).copied().unwrap_or(1);
    if [scale, bias, mean, variance].iter().any(|all| all.len() != channels) {
        return Err(Stop::Invalid(format!(
            "got scale, bias, mean and variance of other lengths, expected {channels}, one per channel"
        )));
    }
    arithmetic.spend(a.count() * 16)?;
    let inner: usize = a.shape.iter().skip(2).product();
    let one = |(n, &x): (usize, &f64)| {
        let channel = n / inner.max(1) % channels;
        let root = arithmetic.result((variance[channel] + epsilon).sqrt());
        let centred = arithmetic.result(x - mean[channel]);
        let scaled = arithmetic.result(centred / root * scale[channel]);
        // A compiler may precompute a factor and a summand from these constants, with rounding errors of their own.
        let magnitude = scaled.abs() + (mean[channel] / root * scale[channel]).abs() + bias[channel].abs();
        arithmetic.sum(scaled + bias[channel], magnitude)
    };
    Ok(Array::real(a.shape.clone(), a.reals()?.iter().enumerate().map(one).collect()))
}

fn by_length(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let a = call.input(0)?;
    let axis = place(call.int("axis", -1), a.shape.len())?;
    let is_l1 = call.int("p", 2) == 1;
    arithmetic.spend(a.count() * 16)?;
    let (all, group, _) = members(a, &[axis])?;
    let mut lengths = Vec::with_capacity(all.len());
    for numbers in all {
        lengths.push(match is_l1 {
            true => sum(numbers.iter().map(|x| x.abs()), arithmetic),
            false => {
                let squares = sum(numbers.iter().map(|x| x * x), arithmetic);
                arithmetic.result(squares.sqrt())
            }
        });
    }
    // Groups whose norm is 0 stay 0.
    let one = |(x, &group): (&f64, &usize)| match lengths[group] {
        0.0 => 0.0,
        length => arithmetic.result(x / length),
    };
    let made = a.reals()?.iter().zip(&group).map(one).collect();
    Ok(Array::real(a.shape.clone(), made))
}

fn running(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let a = call.input(0)?;
    let axis = call.integers(1)?.first().copied().unwrap_or(0);
    let axis = place(axis, a.shape.len())?;
    let (is_exclusive, is_reverse) = (call.is_set("exclusive", false), call.is_set("reverse", false));
    arithmetic.spend(a.count() * 4)?;
    let (size, stride) = (a.shape[axis], a.shape[axis + 1..].iter().product::<usize>());
    let (mut reals, mut wholes) = (vec![0.0; a.count()], vec![0i64; a.count()]);
    for first in (0..a.count()).filter(|n| (n / stride).is_multiple_of(size)) {
        let at = |n: usize| first + stride * if is_reverse { size - 1 - n } else { n };
        let (mut sum, mut magnitude, mut total) = (0.0, 0.0f64, 0i64);
        for n in 0..size {
            // An exclusive sum ends before its own number.
            if is_exclusive {
                (reals[at(n)], wholes[at(n)]) = (arithmetic.sum(sum, magnitude), total);
            }
            match a.is_real() {
                true => {
                    let x = a.reals()?[at(n)];
                    (sum, magnitude) = (sum + x, magnitude + x.abs());
                }
                false => total = total.wrapping_add(a.wholes()?[at(n)]),
            }
            if !is_exclusive {
                (reals[at(n)], wholes[at(n)]) = (arithmetic.sum(sum, magnitude), total);
            }
        }
    }
    Ok(match a.is_real() {
        true => Array::real(a.shape.clone(), reals),
        false => Array::whole(a.element, a.shape.clone(), wholes),
    })
}
