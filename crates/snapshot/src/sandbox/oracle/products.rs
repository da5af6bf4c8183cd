//! Matrix products.

use super::arithmetic::Arithmetic;
use super::array::{Array, broadcast, places, strides};
use super::call::Call;
use super::stop::Stop;

/// Maximum number of terms of an `Einsum`: all terms are in memory together.
const TERMS_MAX: usize = 1 << 22;

pub(super) fn evaluate(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Option<Vec<Array>>, Stop> {
    let made = match call.operator() {
        "MatMul" => product(call.input(0)?, call.input(1)?, arithmetic)?,
        "Gemm" => gemm(call, arithmetic)?,
        "Einsum" => einsum(call, arithmetic)?,
        _ => return Ok(None),
    };
    Ok(Some(vec![made]))
}

pub(super) fn product(a: &Array, b: &Array, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let invalid = || {
        Stop::Invalid(format!(
            "shapes {:?} and {:?}, expected equal inner sizes and batches that broadcast for a matrix product",
            a.shape, b.shape
        ))
    };
    // A vector is a matrix with one row, or one column.
    let (mut left, mut right) = (a.shape.clone(), b.shape.clone());
    if left.len() == 1 {
        left.insert(0, 1);
    }
    if right.len() == 1 {
        right.push(1);
    }
    let (Some((&k, ahead)), Some((&n, behind))) = (left.split_last(), right.split_last()) else {
        return Err(invalid());
    };
    let (Some((&m, ahead)), Some((&depth, behind))) = (ahead.split_last(), behind.split_last()) else {
        return Err(invalid());
    };
    if depth != k {
        return Err(invalid());
    }
    let batch = broadcast(ahead, behind)?;
    let count: usize = batch.iter().product();
    arithmetic.spend(count.saturating_mul(m).saturating_mul(n).saturating_mul(k.max(1)))?;
    arithmetic.room(&[&batch[..], &[m, n]].concat(), 1)?;
    let mut shape = batch.clone();
    if a.shape.len() > 1 {
        shape.push(m);
    }
    if b.shape.len() > 1 {
        shape.push(n);
    }
    // One matrix for all batches is not copied.
    let is_one = behind.iter().all(|&d| d == 1);
    let right = if is_one {
        b.shaped(vec![k, n])?
    } else {
        b.shaped(right.clone())?.spread(&[&batch[..], &[k, n]].concat())?
    };
    let left = a.shaped(left.clone())?.spread(&[&batch[..], &[m, k]].concat())?;
    let matrix_of = |batch: usize| if is_one { 0 } else { batch };
    if !a.is_real() {
        let (x, y) = (left.wholes()?, right.wholes()?);
        let cell = |at: usize| {
            let (of, i, j) = (at / (m * n), at / n % m, at % n);
            let terms = (0..k).map(|l| x[(of * m + i) * k + l].wrapping_mul(y[(matrix_of(of) * k + l) * n + j]));
            terms.fold(0i64, i64::wrapping_add)
        };
        return Ok(Array::whole(a.element, shape, (0..count * m * n).map(cell).collect()));
    }
    let (x, y) = (left.reals()?, right.reals()?);
    let mut made = Vec::with_capacity(count * m * n);
    let (mut sums, mut magnitudes) = (vec![0.0; n], vec![0.0; n]);
    for (row, numbers) in x.chunks_exact(k.max(1)).enumerate().take(count * m) {
        sums.fill(0.0);
        magnitudes.fill(0.0);
        let matrix = &y[matrix_of(row / m) * k * n..][..k * n];
        for (&x, weights) in numbers.iter().zip(matrix.chunks_exact(n.max(1))) {
            for ((sum, magnitude), weight) in sums.iter_mut().zip(&mut magnitudes).zip(weights) {
                let term = x * weight;
                *sum += term;
                *magnitude += term.abs();
            }
        }
        made.extend(sums.iter().zip(&magnitudes).map(|(&sum, &magnitude)| arithmetic.sum(sum, magnitude)));
    }
    Ok(Array::real(shape, made))
}

/// Transposes the last two axes.
pub(super) fn turned_last(a: &Array) -> Result<Array, Stop> {
    let Some((batch, &[m, n])) = a.shape.split_last_chunk::<2>() else { return Ok(a.clone()) };
    let count: usize = batch.iter().product();
    let from = (0..count).flat_map(|b| (0..n).flat_map(move |j| (0..m).map(move |i| (b * m + i) * n + j)));
    Ok(a.picked(&from.collect::<Vec<_>>(), [batch, &[n, m]].concat()))
}

fn turned(a: &Array) -> Result<Array, Stop> {
    let [m, n] = a.shape[..] else {
        return Err(Stop::Invalid(format!("the input has shape {:?}, expected at least two axes", a.shape)));
    };
    Ok(a.picked(&places(&[n, m], &[1, n]), vec![n, m]))
}

fn gemm(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let (mut a, mut b) = (call.input(0)?.clone(), call.input(1)?.clone());
    if call.is_set("transA", false) {
        a = turned(&a)?;
    }
    if call.is_set("transB", false) {
        b = turned(&b)?;
    }
    let made = product(&a, &b, arithmetic)?;
    let (alpha, beta) = (call.float("alpha", 1.0), call.float("beta", 1.0));
    let bias = call.optional(2).map(|bias| bias.spread(&made.shape)).transpose()?;
    let bias = bias.as_ref().map(Array::reals).transpose()?;
    let one = |(n, &x): (usize, &f64)| {
        let scaled = arithmetic.result(alpha * x);
        bias.map_or(scaled, |bias| arithmetic.sum(scaled + beta * bias[n], scaled.abs() + (beta * bias[n]).abs()))
    };
    let numbers = made.reals()?.iter().enumerate().map(one).collect();
    Ok(Array::real(made.shape.clone(), numbers))
}

/// Replaces an ellipsis by one digit for each of its axes.
fn opened(letters: &str, axes: usize) -> Vec<char> {
    let digits: String = (0..axes).rev().map(|n| char::from(b'0' + n as u8)).collect();
    letters.replace("...", &digits).chars().collect()
}

/// Evaluates an `Einsum` of any number of operands, as a sum over all letters.
fn einsum(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let equation: String = call.text("equation", "").split_whitespace().collect();
    let unknown = || Stop::Unknown(format!("the equation `{equation}`"));
    let (operands, result) = match equation.split_once("->") {
        Some((operands, result)) => (operands, Some(result)),
        None => (&equation[..], None),
    };
    let arrays = call.all()?;
    let named = |letters: &str| letters.replace("...", "").chars().count();
    let operands: Vec<&str> = operands.split(',').collect();
    if arrays.len() != operands.len() {
        return Err(unknown());
    }
    // Digits stand for the axes of an ellipsis, 0 for the last one.
    let mut most = 0;
    let mut full = Vec::with_capacity(operands.len());
    for (letters, array) in operands.iter().zip(&arrays) {
        let open = match letters.contains("...") {
            true => array.shape.len().checked_sub(named(letters)).filter(|&n| n < 10).ok_or_else(unknown)?,
            false => 0,
        };
        most = most.max(open);
        full.push(opened(letters, open));
    }
    let operands = full;
    let result = match result {
        Some(result) => opened(result, most),
        None => {
            let all: Vec<char> = operands.concat();
            let mut once: Vec<char> = all.iter().filter(|c| c.is_alphabetic()).copied().collect();
            once.retain(|c| all.iter().filter(|other| *other == c).count() == 1);
            once.sort_unstable();
            [opened("...", most), once].concat()
        }
    };
    if operands.iter().flatten().chain(&result).any(|c| !c.is_ascii_alphanumeric()) {
        return Err(unknown());
    }
    // Letters of the result come first, so that the terms of each sum are adjacent.
    let mut letters = result.clone();
    let mut sizes: Vec<usize> = vec![1; letters.len()];
    for (array, own) in arrays.iter().zip(&operands) {
        if array.shape.len() != own.len() {
            return Err(Stop::Invalid(format!(
                "shape {:?} does not match the equation's operand `{}`",
                array.shape,
                own.iter().collect::<String>()
            )));
        }
        for (letter, &size) in own.iter().zip(&array.shape) {
            match letters.iter().position(|other| other == letter) {
                Some(n) => sizes[n] = sizes[n].max(size),
                None => {
                    letters.push(*letter);
                    sizes.push(size);
                }
            }
        }
    }
    let count = sizes.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).filter(|&n| n <= TERMS_MAX);
    let count = count.ok_or(Stop::TooLarge)?;
    arithmetic.spend(count.saturating_mul(8))?;
    let place = |array: &Array, own: &[char]| {
        let of = strides(&array.shape);
        let stride = |letter: &char| {
            let axes = own.iter().zip(of.iter().zip(&array.shape)).filter(|(other, _)| *other == letter);
            axes.map(|(_, (stride, size))| if *size == 1 { 0 } else { *stride }).sum::<usize>()
        };
        let along: Vec<usize> = letters.iter().map(stride).collect();
        places(&sizes, &along)
    };
    let mut terms = vec![1.0; count];
    for (array, own) in arrays.iter().zip(&operands) {
        let numbers = array.reals()?;
        terms.iter_mut().zip(place(array, own)).for_each(|(term, n)| *term *= numbers[n]);
    }
    let shape: Vec<usize> = sizes[..result.len()].to_vec();
    let summed: usize = sizes[result.len()..].iter().product();
    let one = |terms: &[f64]| arithmetic.sum(terms.iter().sum(), terms.iter().map(|x| x.abs()).sum());
    Ok(Array::real(shape, terms.chunks_exact(summed.max(1)).map(one).collect()))
}
