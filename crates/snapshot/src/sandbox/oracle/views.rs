//! Operators that move numbers, and operators that create numbers from sizes.

use super::arithmetic::Arithmetic;
use super::array::{self, Array, Element, broadcast, places, strides};
use super::call::{Call, place};
use super::stop::Stop;

/// Work of moving one number, in multiply-adds.
const MOVED_WORK: usize = 4;

pub(super) fn evaluate(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Option<Vec<Array>>, Stop> {
    let made = match call.operator() {
        "Constant" => constant(call)?,
        "ConstantOfShape" => {
            let shape = sizes(&call.integers(0)?)?;
            let value = call.tensor("value").map(array::of_tensor).transpose()?;
            let value = value.unwrap_or_else(|| Array::real(vec![1], vec![0.0]));
            arithmetic.room(&shape, MOVED_WORK)?;
            value.shaped(vec![])?.spread(&shape)?
        }
        "Shape" => {
            let shape = &call.input(0)?.shape;
            let rank = shape.len() as i64;
            let bound = |n: i64| (if n < 0 { n.saturating_add(rank) } else { n }).clamp(0, rank) as usize;
            let (start, end) = (bound(call.int("start", 0)), bound(call.int("end", rank)));
            Array::vector(shape.get(start..end).unwrap_or(&[]).iter().map(|&d| d as i64).collect())
        }
        "Size" => Array::whole(Element::Signed(64), vec![], vec![call.input(0)?.count() as i64]),
        "Range" => range(call, arithmetic)?,
        "Reshape" => reshaped(call)?,
        "Flatten" => {
            let a = call.input(0)?;
            let (axis, rank) = (call.int("axis", 1), a.shape.len() as i64);
            let axis = if axis < 0 { axis + rank } else { axis };
            if !(0..=rank).contains(&axis) {
                return Err(Stop::Invalid(format!("axis {axis} is out of range for {rank} axes")));
            }
            let (ahead, behind) = a.shape.split_at(axis as usize);
            a.shaped(vec![ahead.iter().product(), behind.iter().product()])?
        }
        "Squeeze" | "Unsqueeze" => change_unit_axes(call)?,
        "Transpose" => {
            let a = call.input(0)?;
            let reversed = || (0..a.shape.len() as i64).rev().collect();
            let order = call.ints("perm").unwrap_or_else(reversed);
            let order = order.iter().map(|&axis| place(axis, a.shape.len())).collect::<Result<Vec<_>, _>>()?;
            let (own, shape) = (strides(&a.shape), order.iter().map(|&axis| a.shape[axis]).collect::<Vec<_>>());
            let moved: Vec<usize> = order.iter().map(|&axis| own[axis]).collect();
            arithmetic.room(&shape, MOVED_WORK)?;
            a.picked(&places(&shape, &moved), shape)
        }
        "Expand" => {
            let a = call.input(0)?;
            let shape = broadcast(&a.shape, &sizes(&call.integers(1)?)?)?;
            arithmetic.room(&shape, MOVED_WORK)?;
            a.spread(&shape)?
        }
        "Tile" => {
            let (mut made, times) = (call.input(0)?.clone(), call.integers(1)?);
            for (axis, &n) in times.iter().enumerate() {
                let size = *made.shape.get(axis).ok_or_else(|| {
                    Stop::Invalid(format!("repeats {times:?} times, expected a number for each axis"))
                })?;
                let index: Vec<usize> = (0..n).flat_map(|_| 0..size).collect();
                made = along(&made, axis, &index, arithmetic)?;
            }
            made
        }
        "Concat" => {
            let parts = call.all()?;
            let first = parts.first().ok_or_else(|| Stop::Invalid("the node has no inputs".into()))?;
            let axis = place(call.int("axis", 0), first.shape.len())?;
            concatenated(&parts, axis, arithmetic)?
        }
        "Split" => return split(call, arithmetic).map(Some),
        "Slice" => sliced(call, arithmetic)?,
        "Gather" => {
            let (a, index) = (call.input(0)?, call.input(1)?);
            let axis = place(call.int("axis", 0), a.shape.len())?;
            let at = index.wholes()?.iter().map(|&n| place(n, a.shape[axis])).collect::<Result<Vec<_>, _>>()?;
            let mut shape = a.shape.clone();
            shape.splice(axis..=axis, index.shape.iter().copied());
            along(a, axis, &at, arithmetic)?.shaped(shape)?
        }
        "GatherElements" => {
            let (a, index) = (call.input(0)?, call.input(1)?);
            let axis = place(call.int("axis", 0), a.shape.len())?;
            let own = strides(&a.shape);
            let mut others = own.clone();
            *others.get_mut(axis).ok_or_else(|| Stop::Invalid("the node has no axes".into()))? = 0;
            arithmetic.room(&index.shape, MOVED_WORK)?;
            let ahead = places(&index.shape, &others).into_iter();
            let at = ahead.zip(index.wholes()?).map(|(at, &n)| Ok(at + place(n, a.shape[axis])? * own[axis]));
            a.picked(&at.collect::<Result<Vec<_>, _>>()?, index.shape.clone())
        }
        "Trilu" => triangle(call, arithmetic)?,
        "Pad" => padded(call, arithmetic)?,
        "TopK" => return top(call, arithmetic).map(Some),
        "OneHot" => one_hot(call, arithmetic)?,
        _ => return Ok(None),
    };
    Ok(Some(vec![made]))
}

fn sizes(all: &[i64]) -> Result<Vec<usize>, Stop> {
    let size =
        |&n: &i64| usize::try_from(n).map_err(|_| Stop::Invalid(format!("size {n} is negative, expected 0 or more")));
    all.iter().map(size).collect()
}

fn constant(call: &Call<'_>) -> Result<Array, Stop> {
    if let Some(n) = call.given_int("value_int") {
        return Ok(Array::whole(Element::Signed(64), vec![], vec![n]));
    }
    if let Some(all) = call.ints("value_ints") {
        return Ok(Array::vector(all));
    }
    if let Some(x) = call.given_float("value_float") {
        return Ok(Array::real(vec![], vec![x]));
    }
    if let Some(all) = call.floats("value_floats") {
        return Ok(Array::real(vec![all.len()], all.iter().map(|&x| f64::from(x)).collect()));
    }
    array::of_tensor(call.tensor("value").ok_or_else(|| Stop::Unknown("a constant that is no tensor".into()))?)
}

fn range(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let first = call.input(0)?;
    let [start, end, step] =
        [0, 1, 2].map(|n| call.input(n).map(|array| array.as_reals().first().copied().unwrap_or(0.0)));
    let (start, end, step) = (start?, end?, step?);
    let count = ((end - start) / step).ceil().max(0.0);
    if count.is_nan() || count > (1u64 << 26) as f64 {
        return Err(Stop::TooLarge);
    }
    let count = count as usize;
    arithmetic.room(&[count], MOVED_WORK)?;
    let all = (0..count).map(|n| start + n as f64 * step);
    Ok(match first.is_real() {
        true => Array::real(vec![count], all.map(|x| arithmetic.result(x)).collect()),
        false => Array::whole(first.element, vec![count], all.map(|x| x as i64).collect()),
    })
}

fn reshaped(call: &Call<'_>) -> Result<Array, Stop> {
    let (a, wanted) = (call.input(0)?, call.integers(1)?);
    let keeps_zero = call.is_set("allowzero", false);
    let mut shape = Vec::with_capacity(wanted.len());
    let mut open = None;
    for (axis, &n) in wanted.iter().enumerate() {
        shape.push(match n {
            -1 => {
                open = Some(axis);
                1
            }
            0 if !keeps_zero => *a
                .shape
                .get(axis)
                .ok_or_else(|| Stop::Invalid(format!("size 0 copies axis {axis}, which the input does not have")))?,
            n => usize::try_from(n).map_err(|_| Stop::Invalid(format!("size {n} is negative, expected 0 or more")))?,
        });
    }
    if let Some(open) = open {
        let known: usize = shape.iter().product();
        shape[open] = a.count().checked_div(known).unwrap_or(0);
    }
    a.shaped(shape)
}

fn change_unit_axes(call: &Call<'_>) -> Result<Array, Stop> {
    let a = call.input(0)?;
    let rank = a.shape.len();
    let axes = call.ints_or_input("axes", 1)?;
    if call.operator() == "Squeeze" {
        let removed = match axes {
            Some(axes) => axes.iter().map(|&axis| place(axis, rank)).collect::<Result<Vec<_>, _>>()?,
            None => (0..rank).filter(|&axis| a.shape[axis] == 1).collect(),
        };
        if removed.iter().any(|&axis| a.shape[axis] != 1) {
            return Err(Stop::Invalid(format!(
                "Squeeze of axes {removed:?} of shape {:?}, expected axes of size 1",
                a.shape
            )));
        }
        return a.shaped((0..rank).filter(|axis| !removed.contains(axis)).map(|axis| a.shape[axis]).collect());
    }
    let axes = axes.ok_or_else(|| Stop::Invalid("the node has no axes".into()))?;
    let rank = rank + axes.len();
    let new = axes.iter().map(|&axis| place(axis, rank)).collect::<Result<Vec<_>, _>>()?;
    let mut old = a.shape.iter().copied();
    let shape = (0..rank).map(|axis| if new.contains(&axis) { 1 } else { old.next().unwrap_or(1) }).collect();
    a.shaped(shape)
}

/// Gathers indices along an axis.
fn along(a: &Array, axis: usize, index: &[usize], arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let mut shape = a.shape.clone();
    shape[axis] = index.len();
    arithmetic.room(&shape, MOVED_WORK)?;
    let (outer, inner) = (a.shape[..axis].iter().product::<usize>(), a.shape[axis + 1..].iter().product::<usize>());
    let mut at = Vec::with_capacity(outer * index.len() * inner);
    for o in 0..outer {
        for &n in index {
            let first = (o * a.shape[axis] + n) * inner;
            at.extend(first..first + inner);
        }
    }
    Ok(a.picked(&at, shape))
}

fn concatenated(parts: &[&Array], axis: usize, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let mut shape = parts[0].shape.clone();
    shape[axis] = parts.iter().map(|part| part.shape.get(axis).copied().unwrap_or(0)).sum();
    for part in parts {
        let mut own = part.shape.clone();
        if own.len() == shape.len() {
            own[axis] = shape[axis];
        }
        if own != shape {
            return Err(Stop::Invalid(format!(
                "shapes {:?} and {:?}, expected equal sizes on all axes but the concatenated one",
                parts[0].shape, part.shape
            )));
        }
    }
    arithmetic.room(&shape, MOVED_WORK)?;
    let outer: usize = shape[..axis].iter().product();
    let mut firsts = Vec::with_capacity(parts.len());
    let mut next = 0;
    for part in parts {
        firsts.push(next);
        next += part.count();
    }
    let mut at = Vec::with_capacity(next);
    for o in 0..outer {
        for (part, first) in parts.iter().zip(&firsts) {
            let run: usize = part.shape[axis..].iter().product();
            at.extend(first + o * run..first + (o + 1) * run);
        }
    }
    Ok(Array::chained(parts)?.picked(&at, shape))
}

fn split(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Vec<Array>, Stop> {
    let a = call.input(0)?;
    let axis = place(call.int("axis", 0), a.shape.len())?;
    let (size, parts) = (a.shape[axis], call.node.output.len());
    let all = match call.ints_or_input("split", 1)? {
        Some(all) => sizes(&all)?,
        None => {
            let each = size.div_ceil(parts.max(1));
            (0..parts).map(|n| size.saturating_sub(n * each).min(each)).collect()
        }
    };
    if all.iter().sum::<usize>() != size || all.len() != parts {
        return Err(Stop::Invalid(format!(
            "an axis of {size} elements is split into {all:?}, expected sizes with that sum"
        )));
    }
    let mut first = 0;
    let mut made = Vec::with_capacity(parts);
    for size in all {
        made.push(along(a, axis, &(first..first + size).collect::<Vec<_>>(), arithmetic)?);
        first += size;
    }
    Ok(made)
}

fn sliced(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let mut made = call.input(0)?.clone();
    let missing = || Stop::Invalid("inputs for starts and ends are missing".into());
    let starts = call.ints_or_input("starts", 1)?.ok_or_else(missing)?;
    let ends = call.ints_or_input("ends", 2)?.ok_or_else(missing)?;
    let axes = call.ints_or_input("axes", 3)?.unwrap_or_else(|| (0..starts.len() as i64).collect());
    let steps = call.ints_or_input("steps", 4)?.unwrap_or_else(|| vec![1; starts.len()]);
    for (((&start, &end), &axis), &step) in starts.iter().zip(&ends).zip(&axes).zip(&steps) {
        let axis = place(axis, made.shape.len())?;
        let size = made.shape[axis] as i64;
        let from_end = |n: i64| if n < 0 { n.saturating_add(size) } else { n };
        let index: Vec<usize> = match step {
            0 => return Err(Stop::Invalid("a step of the slice is 0, expected another number".into())),
            1.. => {
                let (start, end) = (from_end(start).clamp(0, size), from_end(end).clamp(0, size));
                (start..end).step_by(step as usize).map(|n| n as usize).collect()
            }
            _ => {
                let (start, end) = (from_end(start).clamp(0, size - 1), from_end(end).clamp(-1, size - 1));
                (end + 1..=start).rev().step_by(step.unsigned_abs() as usize).map(|n| n as usize).collect()
            }
        };
        made = along(&made, axis, &index, arithmetic)?;
    }
    Ok(made)
}

fn triangle(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let a = call.input(0)?;
    let diagonal = if call.optional(1).is_some() { call.integers(1)?.first().copied().unwrap_or(0) } else { 0 };
    let is_upper = call.is_set("upper", true);
    let [.., m, n] = a.shape[..] else {
        return Err(Stop::Invalid(format!("the input has shape {:?}, expected at least two axes", a.shape)));
    };
    arithmetic.room(&a.shape, MOVED_WORK)?;
    // A zero is appended to the numbers, for positions outside of the triangle.
    let zero = if a.is_real() { Array::real(vec![1], vec![0.0]) } else { Array::whole(a.element, vec![1], vec![0]) };
    let both = Array::chained(&[a, &zero])?;
    let from = |at: usize| {
        let way = (at % n) as i64 - (at / n % m) as i64;
        let is_in = if is_upper { way >= diagonal } else { way <= diagonal };
        if is_in { at } else { a.count() }
    };
    Ok(both.picked(&(0..a.count()).map(from).collect::<Vec<_>>(), a.shape.clone()))
}

fn padded(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let a = call.input(0)?;
    let rank = a.shape.len();
    let mode = call.text("mode", "constant");
    let given = call.ints_or_input("pads", 1)?.ok_or_else(|| Stop::Invalid("`pads` is missing".into()))?;
    let axes = match call.optional(3) {
        Some(_) => call.integers(3)?.iter().map(|&axis| place(axis, rank)).collect::<Result<Vec<_>, _>>()?,
        None => (0..rank).collect(),
    };
    if given.len() != 2 * axes.len() || !["constant", "edge", "reflect", "wrap"].contains(&mode) {
        return Err(Stop::Unknown(format!(
            "padding by {given:?} in mode `{mode}`, rather than by two numbers per axis in a supported mode,"
        )));
    }
    let (mut before, mut shape) = (vec![0i64; rank], Vec::with_capacity(rank));
    let mut after = before.clone();
    for (n, &axis) in axes.iter().enumerate() {
        (before[axis], after[axis]) = (given[n], given[n + axes.len()]);
    }
    for axis in 0..rank {
        let size = (a.shape[axis] as i64).saturating_add(before[axis]).saturating_add(after[axis]);
        shape.push(
            usize::try_from(size).map_err(|_| Stop::Invalid(format!("size {size} is negative, expected 0 or more")))?,
        );
    }
    let value = match (call.optional(2), a.is_real()) {
        (Some(value), _) => value.shaped(vec![1])?,
        (None, true) => Array::real(vec![1], vec![call.float("value", 0.0)]),
        (None, false) => Array::whole(a.element, vec![1], vec![0]),
    };
    arithmetic.room(&shape, MOVED_WORK)?;
    let (own, wide) = (strides(&a.shape), strides(&shape));
    let from = |at: usize| {
        let mut place = 0;
        for axis in 0..rank {
            let size = a.shape[axis] as i64;
            let mut n = (at / wide[axis] % shape[axis]) as i64 - before[axis];
            if !(0..size).contains(&n) {
                match mode {
                    "constant" => return a.count(),
                    "edge" => n = if n < 0 { 0 } else { size - 1 },
                    "wrap" => n = n.rem_euclid(size),
                    // Mirrors the index at both ends of the axis until it is inside.
                    _ if size == 1 => n = 0,
                    _ => {
                        while !(0..size).contains(&n) {
                            n = if n < 0 { -n } else { 2 * (size - 1) - n };
                        }
                    }
                }
            }
            place += n as usize * own[axis];
        }
        place
    };
    let count: usize = shape.iter().product();
    Ok(Array::chained(&[a, &value])?.picked(&(0..count).map(from).collect::<Vec<_>>(), shape))
}

/// Returns the largest or smallest numbers along an axis and their indices; the first of equal numbers.
fn top(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Vec<Array>, Stop> {
    let a = call.input(0)?;
    let axis = place(call.int("axis", -1), a.shape.len())?;
    let k = call.given_int("k").map_or_else(|| call.integers(1).map(|k| k.first().copied().unwrap_or(0)), Ok)?;
    let size = a.shape[axis];
    let k = usize::try_from(k)
        .ok()
        .filter(|&k| k <= size)
        .ok_or_else(|| Stop::Invalid(format!("`k` is {k}, expected at most {size}")))?;
    let is_largest = call.is_set("largest", true);
    arithmetic.room(&a.shape, MOVED_WORK)?;
    let (numbers, inner) = (a.as_reals(), a.shape[axis + 1..].iter().product::<usize>());
    let mut shape = a.shape.clone();
    shape[axis] = k;
    let count: usize = shape.iter().product();
    let (mut from, mut index) = (vec![0; count], vec![0; count]);
    for line in 0..a.count() / size.max(1) {
        let (o, i) = (line / inner, line % inner);
        let at = |n: usize| (o * size + n) * inner + i;
        let mut order: Vec<usize> = (0..size).collect();
        order.sort_by(|&x, &y| {
            // Adding 0.0 makes zeros of both signs equal.
            let (x, y) = (numbers[at(x)] + 0.0, numbers[at(y)] + 0.0);
            if is_largest { y.total_cmp(&x) } else { x.total_cmp(&y) }
        });
        for (rank, &n) in order.iter().take(k).enumerate() {
            let to = (o * k + rank) * inner + i;
            (from[to], index[to]) = (at(n), n as i64);
        }
    }
    Ok(vec![a.picked(&from, shape.clone()), Array::whole(Element::Signed(64), shape, index)])
}

fn one_hot(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Array, Stop> {
    let (index, values) = (call.input(0)?, call.input(2)?);
    let depth = call.input(1)?.as_reals().first().copied().unwrap_or(0.0) as usize;
    let axis = place(call.int("axis", -1), index.shape.len() + 1)?;
    let mut shape = index.shape.clone();
    shape.insert(axis, depth);
    arithmetic.room(&shape, MOVED_WORK)?;
    let inner: usize = index.shape[axis..].iter().product();
    let at = index.as_reals();
    let count: usize = shape.iter().product();
    let from = |n: usize| {
        let (outer, class, i) = (n / (inner * depth), n / inner % depth, n % inner);
        let wanted = at[outer * inner + i] as i64;
        let wanted = if wanted < 0 { wanted + depth as i64 } else { wanted };
        usize::from(wanted == class as i64)
    };
    Ok(values.picked(&(0..count).map(from).collect::<Vec<_>>(), shape))
}
