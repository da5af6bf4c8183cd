//! Operators that change the order or the shape of a value without computing numbers.

use rten_onnx::onnx::NodeProto;

use super::known::{Attributes, Extent, Importer, fixed, place, refused};
use crate::dense::ir::{Id, broadcast, broadcast_strides, positions, strides};
use sterling_core::error::Result;
use sterling_kernels::cpu::dense::Binary;

/// Returns the indices that a slice selects from an axis of `size`.
pub(super) fn slice_indices(start: i64, end: i64, step: i64, size: usize) -> Result<Vec<usize>> {
    let length = size as i64;
    let from_end = |n: i64| if n < 0 { n.saturating_add(length) } else { n };
    let by = usize::try_from(step.unsigned_abs()).unwrap_or(usize::MAX);
    match step {
        0 => Err(refused("a slice has step 0, expected another step")),
        _ if size == 0 => Ok(Vec::new()),
        1.. => {
            let (start, end) = (from_end(start).clamp(0, length), from_end(end).clamp(0, length));
            Ok((start as usize..end as usize).step_by(by).collect())
        }
        _ => {
            let (start, end) = (from_end(start).clamp(0, length - 1), from_end(end).clamp(-1, length - 1));
            Ok((end + 1..start + 1).rev().step_by(by).map(|n| n as usize).collect())
        }
    }
}

impl Importer {
    pub(super) fn view(
        &mut self,
        operator: &str,
        node: &NodeProto,
        attributes: &mut Attributes<'_>,
        a: Id,
    ) -> Result<Id> {
        let (shape, rows) = (self.graph.shape(a).to_vec(), self.rows(a));
        match operator {
            "Concat" => {
                let axis = self.axis(a, attributes.integer("axis", 0))?;
                let parts: Vec<Id> = (0..node.input.len()).map(|n| self.value(node, n)).collect::<Result<_>>()?;
                self.graph.concat(axis, &parts)
            }
            "Transpose" => {
                let reversed = || (0..shape.len() as i64).rev().collect();
                let order = attributes.integers("perm").unwrap_or_else(reversed);
                let mut axes: Vec<usize> = order.iter().map(|&axis| self.axis(a, axis)).collect::<Result<_>>()?;
                let order = axes.clone();
                axes.sort_unstable();
                if !axes.iter().copied().eq(0..shape.len()) {
                    return Err(refused(format!("`perm` {order:?} is not a permutation of {} axes", shape.len())));
                }
                self.turn(a, &order)
            }
            "Unsqueeze" => {
                let axes =
                    self.axes(node, attributes, 1)?.ok_or_else(|| refused("attribute or input `axes` is missing"))?;
                let rank = shape.len() + axes.len();
                let new: Vec<usize> = axes.iter().map(|&axis| place(axis, rank)).collect::<Result<_>>()?;
                let mut old = (0..shape.len()).collect::<Vec<_>>().into_iter();
                let of_axis = |axis: usize| if new.contains(&axis) { None } else { old.next() };
                let from: Vec<Option<usize>> = (0..rank).map(of_axis).collect();
                let to = from.iter().map(|axis| axis.map_or(1, |axis| shape[axis])).collect();
                let rows = rows.and_then(|r| from.iter().position(|axis| *axis == Some(r)));
                self.graph.reshape(a, to, rows)
            }
            "Squeeze" => {
                let removed: Vec<usize> = match self.axes(node, attributes, 1)? {
                    Some(axes) => axes.iter().map(|&axis| place(axis, shape.len())).collect::<Result<_>>()?,
                    None => (0..shape.len()).filter(|&axis| Some(axis) != rows && shape[axis] == 1).collect(),
                };
                if removed.iter().any(|&axis| Some(axis) == rows || shape[axis] != 1) {
                    return Err(refused(format!("cannot remove axes {removed:?} of shape {shape:?}")));
                }
                let retained: Vec<usize> = (0..shape.len()).filter(|axis| !removed.contains(axis)).collect();
                let rows = rows.and_then(|r| retained.iter().position(|&axis| axis == r));
                self.graph.reshape(a, retained.iter().map(|&axis| shape[axis]).collect(), rows)
            }
            "Flatten" => {
                // A negative axis counts from the end: -1 is the last axis, and `rank`, the position after it, has no
                // negative form.
                let axis = match attributes.integer("axis", 1) {
                    axis if axis < 0 => place(axis, shape.len())?,
                    axis => place(axis, shape.len() + 1)?,
                };
                let ahead = shape[..axis].iter().product::<usize>() as i64;
                let sizes = match rows {
                    Some(r) if r < axis => [Extent::Rows(ahead), Extent::Fixed(-1)],
                    Some(_) => [Extent::Fixed(ahead), Extent::Fixed(-1)],
                    None => [Extent::Fixed(ahead), Extent::Fixed(-1)],
                };
                self.reshape(a, &sizes)
            }
            "Reshape" => {
                let sizes = self.vector(node, 1)?;
                let allows_zero = attributes.integer("allowzero", 0) != 0;
                if allows_zero && sizes.contains(&Extent::Fixed(0)) {
                    return Err(refused("the new shape has a size 0, expected at least 1"));
                }
                self.reshape(a, &sizes)
            }
            "Expand" => {
                let sizes = self.vector(node, 1)?;
                self.expand(a, &sizes)
            }
            "Tile" => self.tile(node, a),
            "Slice" => self.slice(node, attributes, a),
            "Gather" => self.gather(node, attributes, a),
            "GatherElements" => self.gather_elements(node, attributes, a),
            "GatherND" => self.gather_nd(node, attributes, a),
            "ScatterElements" | "ScatterND" => self.scatter(operator, node, attributes, a),
            "Pad" => self.pad(node, attributes, a),
            "CumSum" => self.running_sum(node, attributes, a),
            "OneHot" => self.one_hot_of(node, attributes, a),
            "Trilu" => self.triangle(node, attributes, a),
            _ => Err(refused("the operator is not supported")),
        }
    }

    pub(super) fn reshape(&mut self, a: Id, sizes: &[Extent]) -> Result<Id> {
        let (shape, rows) = (self.graph.shape(a).to_vec(), self.rows(a));
        let count: usize = shape.iter().product();
        let mut to: Vec<usize> = Vec::with_capacity(sizes.len());
        let (mut open, mut counted) = (None, None);
        for (axis, size) in sizes.iter().enumerate() {
            let of_shape = || {
                shape.get(axis).copied().ok_or_else(|| {
                    refused(format!(
                        "size 0 at axis {axis} copies a size, but the input of shape {shape:?} has no such axis"
                    ))
                })
            };
            to.push(match size {
                Extent::Fixed(-1) if open.is_some() => {
                    return Err(refused("the new shape has two sizes of -1, expected at most one"));
                }
                Extent::Fixed(-1) => {
                    open = Some(axis);
                    1
                }
                Extent::Fixed(0) => {
                    counted = counted.or(rows.filter(|&r| r == axis));
                    of_shape()?
                }
                Extent::Fixed(n) => {
                    usize::try_from(*n).map_err(|_| refused(format!("size {n} is negative, expected 0 or more")))?
                }
                Extent::Rows(n) => {
                    counted = Some(axis);
                    usize::try_from(*n).map_err(|_| refused(format!("size {n} is negative, expected 0 or more")))?
                }
            });
        }
        let known = to.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).unwrap_or(0);
        let axis = match (rows, counted, open) {
            (None, None, _) => None,
            (Some(_), Some(axis), _) => Some(axis),
            // All other sizes are fixed, so the open size is the number of rows.
            (Some(_), None, Some(axis)) => Some(axis),
            _ => {
                return Err(refused(format!(
                    "the new shape fixes the number of candidates of an input of shape {shape:?}, expected any number"
                )));
            }
        };
        if let Some(open) = open {
            to[open] = count.checked_div(known).unwrap_or(0);
        }
        let Some((r, axis)) = rows.zip(axis) else {
            let made = self.graph.reshape(a, to, None)?;
            self.keep_integers(a, made);
            return Ok(made);
        };
        // The count of numbers before the row axis is unchanged, but some axes before it may now be merged into the row
        // axis.
        let ahead = shape[..r].iter().product::<usize>() * self.outer.get(&a).copied().unwrap_or(1);
        let before: usize = to[..axis].iter().product();
        let outer = ahead.checked_div(before).filter(|outer| outer * before == ahead);
        let outer = outer.filter(|&outer| outer > 0 && to[axis].is_multiple_of(outer));
        let outer = outer.ok_or_else(|| {
            refused(format!("the new shape merges the candidate axis of an input of shape {shape:?} with other axes"))
        })?;
        let made = self.graph.reshape(a, to, Some(axis))?;
        if self.graph.shape(made)[axis] > 1 {
            self.outer.insert(made, outer);
        }
        self.keep_integers(a, made);
        Ok(made)
    }

    /// Records that a reshaped value holds integers if the value before did.
    fn keep_integers(&mut self, a: Id, made: Id) {
        if self.whole.contains(&a) {
            self.whole.insert(made);
        }
        if self.loose.contains(&a) {
            self.loose.insert(made);
        }
    }

    pub(super) fn expand(&mut self, a: Id, sizes: &[Extent]) -> Result<Id> {
        let (shape, rows) = (self.graph.shape(a).to_vec(), self.rows(a));
        let one = |size: &Extent| match size {
            Extent::Rows(n) | Extent::Fixed(n) => {
                usize::try_from(*n).map_err(|_| refused(format!("size {n} is negative, expected 0 or more")))
            }
        };
        let wanted: Vec<usize> = sizes.iter().map(one).collect::<Result<_>>()?;
        let to = broadcast(&shape, &wanted)?;
        let own = rows.map(|r| r + to.len() - shape.len());
        let counted = sizes.iter().position(|s| matches!(s, Extent::Rows(_))).map(|axis| axis + to.len() - sizes.len());
        let axis = match (own, counted) {
            (Some(x), Some(y)) if x != y => return Err(refused("the candidates are on two axes, expected one")),
            (x, y) => x.or(y),
        };
        let size = own.map_or(1, |axis| shape[axis + shape.len() - to.len()]);
        if axis.is_some_and(|axis| to[axis] != size) {
            return Err(refused("the new shape fixes the number of candidates, expected any number"));
        }
        let count = to.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).unwrap_or(0);
        if u32::try_from(count).is_err() || count > crate::dense::graph::NUMBERS_MAX {
            return Err(refused(format!("the result of shape {to:?} is too large")));
        }
        let index = positions(&to, &broadcast_strides(&shape, &to));
        let made = self.graph.pick(a, index, to, axis)?;
        let of = self.expanded.get(&a).copied().unwrap_or(a);
        if made != a {
            self.expanded.insert(made, of);
        }
        Ok(made)
    }

    fn tile(&mut self, node: &NodeProto, a: Id) -> Result<Id> {
        let times: Vec<Extent> = self.vector(node, 1)?;
        let (shape, rows) = (self.graph.shape(a).to_vec(), self.rows(a));
        if times.len() != shape.len() {
            return Err(refused(format!(
                "`repeats` has {} numbers, expected one for each of {} axes",
                times.len(),
                shape.len()
            )));
        }
        let is_expansion =
            |(axis, n): (usize, &Extent)| shape[axis] == 1 && Some(axis) != rows || *n == Extent::Fixed(1);
        if times.iter().enumerate().all(is_expansion) {
            return self.expand(a, &times);
        }
        let times = fixed(&super::known::IntegerTensor::vector(times))?;
        let mut made = a;
        for (axis, &n) in times.iter().enumerate().filter(|(_, n)| **n != 1) {
            let size = self.graph.shape(made)[axis];
            let n = usize::try_from(n).ok().filter(|n| n.saturating_mul(size) <= crate::dense::graph::NUMBERS_MAX);
            let n = n.ok_or_else(|| refused(format!("`repeats` {times:?} gives too many elements")))?;
            let index: Vec<usize> = (0..n).flat_map(|_| 0..size).collect();
            made = self.along(made, axis, &index)?;
        }
        Ok(made)
    }

    /// Selects indices along an axis.
    pub(super) fn along(&mut self, a: Id, axis: usize, index: &[usize]) -> Result<Id> {
        let (mut shape, rows) = (self.graph.shape(a).to_vec(), self.rows(a));
        if rows == Some(axis) {
            return Err(refused("selecting along the candidate axis is not supported"));
        }
        let strides = strides(&shape);
        shape[axis] = index.len();
        let count = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        if count.is_none_or(|n| n > crate::dense::graph::NUMBERS_MAX) {
            return Err(refused(format!("the result of shape {shape:?} is too large")));
        }
        let mut at = vec![0u32];
        for (n, &size) in shape.iter().enumerate() {
            let steps: Vec<u32> =
                (0..size).map(|i| (if n == axis { index[i] } else { i } * strides[n]) as u32).collect();
            at = at.iter().flat_map(|&at| steps.iter().map(move |step| at + step)).collect();
        }
        self.graph.pick(a, at, shape, rows)
    }

    fn slice(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>, a: Id) -> Result<Id> {
        let (starts, ends, axes, steps) = if self.opset < 10 {
            let missing = |name: &str| refused(format!("`{name}` is missing"));
            let starts = attributes.integers("starts").ok_or_else(|| missing("starts"))?;
            let ends = attributes.integers("ends").ok_or_else(|| missing("ends"))?;
            let all = (0..starts.len() as i64).collect();
            let ends = ends.into_iter().map(Extent::Fixed).collect();
            (starts.clone(), ends, attributes.integers("axes").unwrap_or(all), vec![1; starts.len()])
        } else {
            let (starts, ends) = (self.fixed(node, 1)?, self.vector(node, 2)?);
            let axes = match Importer::has(node, 3) {
                true => self.fixed(node, 3)?,
                false => (0..starts.len() as i64).collect(),
            };
            let steps = if Importer::has(node, 4) { self.fixed(node, 4)? } else { vec![1; starts.len()] };
            (starts, ends, axes, steps)
        };
        if [ends.len(), axes.len(), steps.len()] != [starts.len(); 3] {
            return Err(refused(format!(
                "starts {starts:?}, ends {ends:?}, axes {axes:?}, steps {steps:?}, expected lists of equal length"
            )));
        }
        let mut made = a;
        for (((&start, &end), &axis), &step) in starts.iter().zip(&ends).zip(&axes).zip(&steps) {
            let axis = self.axis(made, axis)?;
            let size = self.graph.shape(made)[axis] as i64;
            let is_counted = self.rows(made) == Some(axis);
            // A slice of the complete axis, which may be the row axis, changes nothing.
            let is_whole = match end {
                Extent::Rows(n) => is_counted && n == size,
                Extent::Fixed(n) => n == i64::MAX || n == i64::from(i32::MAX),
            };
            if start == 0 && step == 1 && is_whole {
                continue;
            }
            let Extent::Fixed(end) = end else {
                return Err(refused("the end of the slice is the number of candidates, expected a constant"));
            };
            let index = slice_indices(start, end, step, size as usize)?;
            made = self.along(made, axis, &index)?;
        }
        Ok(made)
    }

    /// Returns the outputs of a `Split` node.
    pub(super) fn split(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Vec<Id>> {
        let a = self.value(node, 0)?;
        let axis = self.axis(a, attributes.integer("axis", 0))?;
        let (size, parts) = (self.graph.shape(a)[axis], node.output.len());
        if attributes.integer("num_outputs", parts as i64) != parts as i64 || parts == 0 {
            return Err(refused(format!("`num_outputs` differs from the {parts} outputs of the node")));
        }
        let sizes = match attributes.integers("split") {
            Some(sizes) => sizes,
            None if Importer::has(node, 1) => self.fixed(node, 1)?,
            None => {
                let each = size.div_ceil(parts);
                (0..parts).map(|n| size.saturating_sub(n * each).min(each) as i64).collect()
            }
        };
        let sizes: Option<Vec<usize>> = sizes.iter().map(|&n| usize::try_from(n).ok()).collect();
        let fits = |sizes: &Vec<usize>| {
            sizes.len() == parts && sizes.iter().try_fold(0usize, |sum, &n| sum.checked_add(n)) == Some(size)
        };
        let sizes = sizes
            .filter(fits)
            .ok_or_else(|| refused(format!("the sizes of the {parts} outputs do not sum to {size}")))?;
        let mut first = 0;
        let mut made = Vec::with_capacity(parts);
        for size in sizes {
            let index: Vec<usize> = (first..first + size).collect();
            made.push(self.along(a, axis, &index)?);
            first += size;
        }
        Ok(made)
    }

    /// Keeps the numbers on one side of a diagonal of the last two axes; the others become 0.
    fn triangle(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>, a: Id) -> Result<Id> {
        let is_upper = attributes.integer("upper", 1) != 0;
        let diagonal = if Importer::has(node, 1) { self.fixed(node, 1)? } else { vec![0] };
        let (shape, [diagonal]) = (self.graph.shape(a).to_vec(), &diagonal[..]) else {
            return Err(refused("`k` has no or several numbers, expected one"));
        };
        let [.., m, n] = shape[..] else {
            return Err(refused(format!("the input has shape {shape:?}, expected at least 2 axes")));
        };
        if self.rows(a).is_some_and(|r| r + 2 >= shape.len()) {
            return Err(refused("the operator does not support the candidate axis"));
        }
        let is_in = |i: usize, j: usize| {
            let way = (j as i64 - i as i64).saturating_sub(*diagonal);
            if is_upper { way >= 0 } else { way <= 0 }
        };
        let inside = (0..m).flat_map(|i| (0..n).map(move |j| f32::from(u8::from(is_in(i, j))))).collect();
        let inside = self.graph.number(vec![m, n], inside)?;
        self.graph.binary(Binary::Keep, inside, a)
    }
}
