//! Operators that read or replace numbers at indices.

use super::arithmetic::Arithmetic;
use super::array::{Array, Element, places, strides};
use super::call::{Call, place};
use super::stop::Stop;

/// Work of moving one number, in multiply-adds.
const MOVED_WORK: usize = 4;

pub(super) fn evaluate(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Option<Vec<Array>>, Stop> {
    let made = match call.operator() {
        "GatherND" => gathered(call, arithmetic)?,
        "ScatterND" | "ScatterElements" => scattered(call, arithmetic)?,
        "NonZero" => {
            let a = call.input(0)?;
            let numbers = a.as_reals();
            let at: Vec<usize> = (0..a.count()).filter(|&n| numbers[n] != 0.0).collect();
            let along = |axis: usize| {
                let stride = strides(&a.shape)[axis];
                at.iter().map(|n| (n / stride % a.shape[axis]) as i64).collect::<Vec<_>>()
            };
            let all = (0..a.shape.len()).flat_map(along).collect();
            Array::whole(Element::Signed(64), vec![a.shape.len(), at.len()], all)
        }
        _ => return Ok(None),
    };
    Ok(Some(vec![made]))
}

/// Returns the position of the first number of each tuple of indices into axes of `shape`.
fn firsts(index: &[i64], columns: usize, shape: &[usize]) -> Result<Vec<usize>, Stop> {
    let own = strides(shape);
    let first = |tuple: &[i64]| {
        let mut at = 0;
        for (axis, &n) in tuple.iter().enumerate() {
            at += place(n, shape[axis])? * own[axis];
        }
        Ok(at)
    };
    index.chunks_exact(columns.max(1)).map(first).collect()
}

fn columns_of(a: &Array, index: &Array, batch: usize) -> Result<usize, Stop> {
    let columns = index.shape.last().copied().unwrap_or(0);
    match batch < index.shape.len() && columns > 0 && batch + columns <= a.shape.len() {
        true => Ok(columns),
        false => Err(Stop::Invalid(format!(
            "indices of shape {:?} for values of shape {:?}, expected at most one index per axis after `batch_dims`",
            index.shape, a.shape
        ))),
    }
}

fn gathered(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let (a, index) = (call.input(0)?, call.input(1)?);
    let batch = usize::try_from(call.int("batch_dims", 0))
        .map_err(|_| Stop::Invalid("`batch_dims` is negative, expected 0 or more".into()))?;
    let columns = columns_of(a, index, batch)?;
    if a.shape[..batch] != index.shape[..batch] {
        return Err(Stop::Invalid(format!(
            "values of shape {:?} and indices of shape {:?}, expected equal batch axes",
            a.shape, index.shape
        )));
    }
    let inner: usize = a.shape[batch + columns..].iter().product();
    let shape = [&index.shape[..index.shape.len() - 1], &a.shape[batch + columns..]].concat();
    arithmetic.room(&shape, MOVED_WORK)?;
    let batches: usize = a.shape[..batch].iter().product();
    let (of_values, of_indices) = (a.count() / batches.max(1), index.count() / batches.max(1));
    let mut from = Vec::with_capacity(shape.iter().product());
    for n in 0..batches {
        let own = &index.wholes()?[n * of_indices..(n + 1) * of_indices];
        for first in firsts(own, columns, &a.shape[batch..])? {
            from.extend((first..first + inner).map(|at| n * of_values + at));
        }
    }
    Ok(a.picked(&from, shape))
}

fn scattered(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let (a, index, updates) = (call.input(0)?, call.input(1)?, call.input(2)?);
    if call.text("reduction", "none") != "none" {
        return Err(Stop::Unknown("a scatter with a reduction".into()));
    }
    arithmetic.room(&a.shape, MOVED_WORK)?;
    let own = strides(&a.shape);
    let to: Vec<usize> = if call.operator() == "ScatterND" {
        let columns = columns_of(a, index, 0)?;
        let inner: usize = a.shape[columns..].iter().product();
        let firsts = firsts(index.wholes()?, columns, &a.shape)?;
        firsts.into_iter().flat_map(|first| first..first + inner).collect()
    } else {
        let axis = place(call.int("axis", 0), a.shape.len())?;
        if index.shape.len() != a.shape.len() {
            return Err(Stop::Invalid(format!(
                "indices of shape {:?} for values of shape {:?}, expected as many axes",
                index.shape, a.shape
            )));
        }
        let mut others = own.clone();
        others[axis] = 0;
        let ahead = places(&index.shape, &others).into_iter().zip(index.wholes()?);
        ahead.map(|(at, &n)| Ok(at + place(n, a.shape[axis])? * own[axis])).collect::<Result<_, Stop>>()?
    };
    if to.len() != updates.count() {
        return Err(Stop::Invalid(format!(
            "updates of shape {:?}, expected one update for each of {} indices",
            updates.shape,
            to.len()
        )));
    }
    let mut from: Vec<usize> = (0..a.count()).collect();
    to.iter().enumerate().for_each(|(n, &to)| from[to] = a.count() + n);
    Ok(Array::chained(&[a, updates])?.picked(&from, a.shape.clone()))
}
