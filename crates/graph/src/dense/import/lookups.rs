//! Indexing: constant indices select numbers directly. Indices that differ between rows are compared with all
//! positions, and the number at the equal position is selected exactly, even next to NaN and infinities.
//!
//! An index outside its axis, which ONNX does not define, yields 0.

use rten_onnx::onnx::NodeProto;

use super::known::{Attributes, Extent, Importer, Known, RowNumbers, place, refused};
use crate::dense::graph::NUMBERS_MAX;
use crate::dense::ir::{Id, broadcast, broadcast_strides, positions, strides};
use sterling_core::error::Result;
use sterling_kernels::cpu::dense::{Binary, Fold};

/// Maximum count of numbers that one node with indices that differ between rows compares, or selects and sums.
const COMPARED_MAX: usize = 1 << 22;

/// Constant indices, with the shape of one row's indices.
pub(super) struct Indices {
    pub(super) numbers: Vec<i64>,
    pub(super) shape: Vec<usize>,
    /// Axis of the rows, if the same indices are repeated for every row.
    rows: Option<usize>,
}

impl Indices {
    /// Returns, for each index along `axis`, the position of the selected number in a value of `shape`.
    fn elements(&self, shape: &[usize], axis: usize) -> Result<Vec<u32>> {
        let mut others = strides(shape);
        let own = std::mem::replace(&mut others[axis], 0);
        let ahead = positions(&self.shape, &others).into_iter().zip(&self.numbers);
        ahead.map(|(at, &n)| Ok(at + (place(n, shape[axis])? * own) as u32)).collect()
    }

    /// Returns the positions of the numbers that tuples of `columns` indices, into the first axes of a value of
    /// `shape`, select.
    fn tuples(&self, shape: &[usize], columns: usize) -> Result<Vec<u32>> {
        let own = strides(shape);
        let inner: usize = shape[columns..].iter().product();
        let mut at = Vec::with_capacity(self.numbers.len() / columns * inner);
        for tuple in self.numbers.chunks_exact(columns) {
            let places = tuple.iter().zip(shape).zip(&own);
            let first = places.map(|((&n, &size), stride)| Ok(place(n, size)? * stride)).sum::<Result<usize>>()?;
            at.extend((first..first + inner).map(|n| n as u32));
        }
        Ok(at)
    }
}

impl Importer {
    /// Returns the indices of an input if they are constant; `None` if they depend on inputs of the graph.
    pub(super) fn indices(&self, node: &NodeProto, n: usize) -> Result<Option<Indices>> {
        let id = match self.known(node, n)? {
            Known::Integers(of) => {
                return Ok(Some(Indices { numbers: self.fixed(node, n)?, shape: of.shape.clone(), rows: None }));
            }
            Known::Value(id) => *id,
            Known::RowNumbers(_) | Known::Columns(_) => return Ok(None),
        };
        let complete = |numbers: &[f32]| numbers.iter().map(|&x| x as i64).collect::<Vec<_>>();
        let shape = self.graph.shape(id).to_vec();
        if self.graph.values[id].count() > COMPARED_MAX {
            return Err(refused(format!("got indices of shape {shape:?}, expected at most {COMPARED_MAX}")));
        }
        if let Some(numbers) = self.graph.constant(id) {
            return Ok(Some(Indices { numbers: complete(numbers), shape, rows: None }));
        }
        let Some(&of) = self.expanded.get(&id) else { return Ok(None) };
        let Some(numbers) = self.graph.constant(of) else { return Ok(None) };
        let at = positions(&shape, &broadcast_strides(self.graph.shape(of), &shape));
        let numbers = at.iter().map(|&n| numbers[n as usize] as i64).collect();
        Ok(Some(Indices { numbers, shape, rows: self.rows(id) }))
    }

    /// Adds a row axis to a value that all rows share; a value that differs between rows must already have this axis.
    pub(super) fn per_row(&mut self, a: Id, rows: Option<usize>) -> Result<Id> {
        let Some(axis) = rows.filter(|_| self.rows(a) != rows) else { return Ok(a) };
        if self.rows(a).is_some() {
            return Err(refused("two inputs have different candidate axes or different numbers of candidates"));
        }
        let size = |(n, &d): (usize, &usize)| if n == axis { Extent::Rows(1) } else { Extent::Fixed(d as i64) };
        let sizes: Vec<Extent> = self.graph.shape(a).iter().enumerate().map(size).collect();
        self.expand(a, &sizes)
    }

    pub(super) fn gather(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>, a: Id) -> Result<Id> {
        let axis = self.axis(a, attributes.integer("axis", 0))?;
        if let Known::RowNumbers(numbers) = self.known(node, 1)? {
            let numbers = numbers.clone();
            return self.gather_own_row(a, axis, &numbers);
        }
        match self.indices(node, 1)? {
            Some(index) => self.picked(a, axis, &index),
            None => self.looked_up_along(a, axis, self.value(node, 1)?),
        }
    }

    fn picked(&mut self, a: Id, axis: usize, index: &Indices) -> Result<Id> {
        let (shape, rows) = (self.graph.shape(a).to_vec(), self.rows(a));
        let at: Vec<usize> = index.numbers.iter().map(|&n| place(n, shape[axis])).collect::<Result<_>>()?;
        let picked = self.along(a, axis, &at)?;
        let mut to = shape.clone();
        to.splice(axis..=axis, index.shape.iter().copied());
        let rows = rows.map(|r| if r > axis { r + index.shape.len() - 1 } else { r });
        let made = self.graph.reshape(picked, to, rows)?;
        self.per_row(made, index.rows.map(|r| r + axis))
    }

    /// Gathers along an axis with indices that differ between rows.
    fn looked_up_along(&mut self, a: Id, axis: usize, index: Id) -> Result<Id> {
        let (shape, of_index) = (self.graph.shape(a).to_vec(), self.graph.shape(index).to_vec());
        let (rows, own) = (self.rows(a), self.rows(index));
        if rows == Some(axis) || (rows.is_some() && own.is_some()) {
            return Err(refused("per-candidate indices into per-candidate values are not supported"));
        }
        let others: Vec<usize> = (0..shape.len()).filter(|&n| n != axis).collect();
        let flat = self.axis_first(a, axis)?;
        let count = of_index.iter().product();
        let index = self.flat(index, vec![1, count])?;
        let made = self.looked_up(flat, index)?;
        let of_others = rows.and_then(|r| others.iter().position(|&n| n == r)).map(|n| n + of_index.len());
        let to = of_index.iter().copied().chain(others.iter().map(|&n| shape[n])).collect();
        let made = self.graph.reshape(made, to, own.or(of_others))?;
        let (axes, all) = (of_index.len(), of_index.len() + others.len());
        let order: Vec<usize> = (axes..axes + axis).chain(0..axes).chain(axes + axis..all).collect();
        self.graph.transpose(made, &order)
    }

    /// Returns a value as `[1, size, others]`, in which `axis` comes before all other axes.
    fn axis_first(&mut self, a: Id, axis: usize) -> Result<Id> {
        let shape = self.graph.shape(a).to_vec();
        let order: Vec<usize> = std::iter::once(axis).chain((0..shape.len()).filter(|&n| n != axis)).collect();
        let turned = self.graph.transpose(a, &order)?;
        let others = shape.iter().product::<usize>() / shape[axis].max(1);
        self.flat(turned, vec![1, shape[axis], others])
    }

    /// Reshapes the values of one row, with the row axis first.
    fn flat(&mut self, a: Id, shape: Vec<usize>) -> Result<Id> {
        if self.rows(a).is_some_and(|r| self.graph.shape(a)[r] != 1) {
            return Err(refused("cannot index values whose candidate axis is merged with another one"));
        }
        let rows = self.rows(a).map(|_| 0);
        self.graph.reshape(a, shape, rows)
    }

    /// Selects from values `[1, size, numbers]` by indices `[1, indices]`; returns `[1, indices, numbers]`.
    fn looked_up(&mut self, values: Id, index: Id) -> Result<Id> {
        let (&[_, size, numbers], &[_, count]) = (self.graph.shape(values), self.graph.shape(index)) else {
            return Err(refused(format!("lookups need values with 3 axes, got shape {:?}", self.graph.shape(values))));
        };
        let hot = self.one_hot(index, size)?;
        // Products may round to bf16, which represents integers up to 256 exactly.
        let is_safe = |x: &f32| x.is_finite() && (x.fract() != 0.0 || x.abs() <= 256.0);
        if self.graph.constant(values).is_some_and(|all| all.iter().all(is_safe)) {
            let matrix = self.graph.reshape(values, vec![size, numbers], None)?;
            return self.graph.matmul(hot, matrix);
        }
        limit(&[count, size, numbers])?;
        let hot = self.flat(hot, vec![1, count, size, 1])?;
        let values = self.flat(values, vec![1, 1, size, numbers])?;
        let retained = self.graph.binary(Binary::Keep, hot, values)?;
        let ones = self.graph.number(vec![1, size], vec![1.0; size])?;
        let made = self.graph.matmul(ones, retained)?;
        self.flat(made, vec![1, count, numbers])
    }

    /// Returns one-hot vectors: for each index a new last axis that is 1 at the index and 0 elsewhere.
    pub(super) fn one_hot(&mut self, index: Id, size: usize) -> Result<Id> {
        let mut shape = self.graph.shape(index).to_vec();
        limit(&[&shape[..], &[size]].concat())?;
        shape.push(1);
        let index = self.resolved(index, size)?;
        let rows = self.rows(index);
        let index = self.graph.reshape(index, shape, rows)?;
        let all = self.graph.number(vec![size], (0..size).map(|n| n as f32).collect())?;
        self.graph.binary(Binary::Equal, index, all)
    }

    /// Adds `size` to negative indices, which count from the end.
    fn resolved(&mut self, index: Id, size: usize) -> Result<Id> {
        if self.span(index).0 >= 0.0 {
            return Ok(index);
        }
        let (zero, size) = (self.scalar(0.0)?, self.scalar(size as f32)?);
        let is_below = self.graph.binary(Binary::Less, index, zero)?;
        let more = self.graph.binary(Binary::Keep, is_below, size)?;
        self.graph.binary(Binary::Add, index, more)
    }

    pub(super) fn gather_elements(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>, a: Id) -> Result<Id> {
        let axis = self.axis(a, attributes.integer("axis", 0))?;
        let (shape, rows) = (self.graph.shape(a).to_vec(), self.rows(a));
        if let Some(index) = self.indices(node, 1)? {
            self.check_aligned(&shape, rows, &index.shape, index.rows, axis)?;
            let made = self.graph.pick(a, index.elements(&shape, axis)?, index.shape.clone(), rows)?;
            return self.per_row(made, index.rows);
        }
        let index = self.value(node, 1)?;
        let (wanted, of_index) = (self.graph.shape(index).to_vec(), self.rows(index));
        self.check_aligned(&shape, rows, &wanted, of_index, axis)?;
        let mut a = a;
        for n in (0..shape.len()).filter(|&n| n != axis && wanted[n] < shape[n]) {
            a = self.along(a, n, &(0..wanted[n]).collect::<Vec<_>>())?;
        }
        let count = wanted[axis];
        let order: Vec<usize> = (0..shape.len()).filter(|&n| n != axis).chain([axis]).collect();
        let back: Vec<usize> = (0..shape.len()).map(|n| order.iter().position(|&x| x == n).unwrap_or(n)).collect();
        let turned: Vec<usize> = order.iter().map(|&n| wanted[n]).collect();
        let rows = rows.or(of_index).and_then(|r| order.iter().position(|&n| n == r));
        // The same indices may apply to all positions of the other axes.
        let few = self.expanded.get(&index).copied().filter(|&of| self.graph.values[of].count() == count);
        let made = match few {
            Some(few) if self.graph.shape(few).get(axis) == Some(&count) && self.rank(few) == shape.len() => {
                let (values, few) = (self.axis_first(a, axis)?, self.flat(few, vec![1, count])?);
                let made = self.looked_up(values, few)?;
                // The result is `[1, indices, others]`; the index axis moves to the end, as in the other branch.
                let made = self.graph.transpose(made, &[0, 2, 1])?;
                self.graph.reshape(made, turned, rows)?
            }
            _ => {
                let (values, index) = (self.graph.transpose(a, &order)?, self.graph.transpose(index, &order)?);
                let others: usize = turned[..turned.len() - 1].iter().product();
                let (values, index) =
                    (self.flat(values, vec![1, others, 1, shape[axis]])?, self.flat(index, vec![1, others, count])?);
                let hot = self.one_hot(index, shape[axis])?;
                let retained = self.graph.binary(Binary::Keep, hot, values)?;
                let made = self.graph.fold(Fold::Sum, retained, &[3])?;
                self.graph.reshape(made, turned, rows)?
            }
        };
        self.graph.transpose(made, &back)
    }

    /// Checks that indices fit into a value along all axes but `axis`.
    fn check_aligned(
        &self,
        shape: &[usize],
        rows: Option<usize>,
        of_index: &[usize],
        own: Option<usize>,
        axis: usize,
    ) -> Result<()> {
        let fits = |(n, (&d, &i)): (usize, (&usize, &usize))| n == axis || i <= d;
        if of_index.len() != shape.len() || !shape.iter().zip(of_index).enumerate().all(fits) {
            return Err(refused(format!("indices of shape {of_index:?} do not fit values of shape {shape:?}")));
        }
        match (rows, own) {
            (Some(r), _) if r == axis => Err(refused("selecting along the candidate axis is not supported")),
            (Some(r), Some(own)) if r != own => {
                Err(refused("two inputs have different candidate axes or different numbers of candidates"))
            }
            (Some(_), None) | (None, Some(_)) => Err(refused("got a fixed number of candidates, expected any number")),
            _ => Ok(()),
        }
    }

    pub(super) fn gather_nd(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>, a: Id) -> Result<Id> {
        let batch = attributes.integer("batch_dims", 0);
        let (shape, rows) = (self.graph.shape(a).to_vec(), self.rows(a));
        if let Known::Columns(columns) = self.known(node, 1)? {
            let columns = columns.clone();
            return self.gather_nd_own_row(a, batch, &columns);
        }
        let index = match self.indices(node, 1)? {
            Some(index) if batch == 0 => return self.picked_nd(a, &index),
            _ => self.number(node, 1)?,
        };
        let mut of_index = self.graph.shape(index).to_vec();
        let columns = of_index.pop().ok_or_else(|| refused("indices are a scalar, expected at least one axis"))?;
        let own = self.rows(index);
        if own == Some(of_index.len()) {
            return Err(refused("the last axis of the indices is the candidate axis, which is not supported"));
        }
        match (batch, columns) {
            (0, 1) => {
                let index = self.graph.reshape(index, of_index, own)?;
                self.looked_up_along(a, 0, index)
            }
            (1, 1..) if rows == Some(0) && own == Some(0) && columns < shape.len() => {
                let parts =
                    (0..columns).map(|n| self.along(index, of_index.len(), &[n])).collect::<Result<Vec<_>>>()?;
                self.within_rows(a, &parts, of_index)
            }
            _ => Err(refused(format!(
                "`batch_dims` {batch} with {columns} indices does not fit values of shape {shape:?}"
            ))),
        }
    }

    fn picked_nd(&mut self, a: Id, index: &Indices) -> Result<Id> {
        let (shape, rows) = (self.graph.shape(a).to_vec(), self.rows(a));
        let Some((&columns, ahead)) = index.shape.split_last() else {
            return Err(refused("indices are a scalar, expected at least one axis"));
        };
        if columns == 0 || columns > shape.len() || rows.is_some_and(|r| r < columns) || index.rows == Some(ahead.len())
        {
            return Err(refused(format!("tuples of {columns} indices do not fit values of shape {shape:?}")));
        }
        let inner: usize = shape[columns..].iter().product();
        let to: Vec<usize> = ahead.iter().chain(&shape[columns..]).copied().collect();
        if index.numbers.len().saturating_mul(inner) > NUMBERS_MAX {
            return Err(refused(format!("the result of shape {to:?} is too large")));
        }
        let at = index.tuples(&shape, columns)?;
        let made = self.graph.pick(a, at, to, rows.map(|r| r - columns + ahead.len()))?;
        self.per_row(made, index.rows)
    }

    /// Selects within each row, where rows are the first axis of `a`: `columns` are the indices, of shape `of_index`,
    /// along the axes behind the row axis.
    fn within_rows(&mut self, a: Id, columns: &[Id], of_index: Vec<usize>) -> Result<Id> {
        let shape = self.graph.shape(a).to_vec();
        let sizes = &shape[1..=columns.len()];
        let mut index = None;
        for (&column, &size) in columns.iter().zip(sizes) {
            let column = self.resolved(column, size)?;
            index = Some(match index {
                None => column,
                Some(ahead) => {
                    let size = self.scalar(size as f32)?;
                    let ahead = self.graph.binary(Binary::Mul, ahead, size)?;
                    self.graph.binary(Binary::Add, ahead, column)?
                }
            });
        }
        let index = index.ok_or_else(|| refused("got no indices, expected at least one"))?;
        let index = self.flat(index, vec![1, of_index.iter().product()])?;
        let inner = &shape[columns.len() + 1..];
        let values = self.flat(a, vec![1, sizes.iter().product(), inner.iter().product()])?;
        let made = self.looked_up(values, index)?;
        let to = [&of_index[..], inner].concat();
        self.graph.reshape(made, to, Some(0))
    }

    /// Gathers along an axis into which the row axis was flattened: at the row's index times the row length, plus an
    /// index.
    fn gather_own_row(&mut self, a: Id, axis: usize, index: &RowNumbers) -> Result<Id> {
        let shape = self.graph.shape(a).to_vec();
        let outer = self.outer.get(&a).copied().unwrap_or(1);
        if axis != 0 || self.rows(a) != Some(0) || outer != 1 || index.times != shape[0] as i64 || index.rows != 0 {
            return Err(refused(format!("row numbers times {} do not index values of shape {shape:?}", index.times)));
        }
        let to = [&index.shape[..], &shape[1..]].concat();
        let Some(plus) = index.plus else {
            if index.shape.iter().product::<usize>() != 1 || shape[0] != 1 {
                return Err(refused(format!("row numbers of shape {:?} are not supported as indices", index.shape)));
            }
            return self.graph.reshape(a, to, Some(0));
        };
        let split = self.graph.reshape(a, [&[1], &shape[..]].concat(), Some(0))?;
        self.within_rows(split, &[plus], index.shape.clone())
    }

    /// Gathers by the row's own index and further indices, which are columns of the index tensor of `GatherND`.
    fn gather_nd_own_row(&mut self, a: Id, batch: i64, columns: &[Known]) -> Result<Id> {
        let (shape, rows) = (self.graph.shape(a).to_vec(), self.rows(a));
        let own =
            |known: &Known| matches!(known, Known::RowNumbers(n) if n.times == 1 && n.plus.is_none() && n.rows == 0);
        let Some((first, others)) = columns.split_first().filter(|(first, _)| own(first)) else {
            return Err(refused("the first column of the indices is not the number of their row"));
        };
        if batch != 0 || rows != Some(0) || shape[0] != 1 || others.len() >= shape.len() || others.is_empty() {
            return Err(refused(format!("row numbers do not index values of shape {shape:?}")));
        }
        let mut of_index = match first {
            Known::RowNumbers(numbers) => numbers.shape.clone(),
            _ => Vec::new(),
        };
        let mut parts = Vec::with_capacity(others.len());
        for known in others {
            let part = self.number_of(known)?;
            of_index = broadcast(&of_index, self.graph.shape(part))?;
            parts.push(part);
        }
        of_index.pop();
        let zero = self.graph.number([&of_index[..], &[1]].concat(), vec![0.0; of_index.iter().product()])?;
        for part in &mut parts {
            if self.graph.shape(*part)[..] != self.graph.shape(zero)[..] {
                *part = self.graph.binary(Binary::Add, *part, zero)?;
            }
        }
        self.within_rows(a, &parts, of_index)
    }

    /// Replaces numbers at constant indices: each number of the result comes from `a` or from the updates.
    pub(super) fn scatter(
        &mut self,
        operator: &str,
        node: &NodeProto,
        attributes: &mut Attributes<'_>,
        a: Id,
    ) -> Result<Id> {
        let reduction = attributes.text("reduction", "none");
        if reduction != "none" {
            return Err(refused(format!("`reduction` {reduction} is not supported")));
        }
        let axis = self.axis(a, attributes.integer("axis", 0))?;
        let index = self.indices(node, 1)?.ok_or_else(|| refused("got computed indices, expected constant ones"))?;
        let updates = self.number(node, 2)?;
        let (shape, of_updates) = (self.graph.shape(a).to_vec(), self.graph.shape(updates).to_vec());
        let rows = self.rows(a);
        let places: Vec<u32> = if operator == "ScatterElements" {
            if index.shape != of_updates
                || shape.len() != of_updates.len()
                || (0..shape.len()).any(|n| n != axis && of_updates[n] > shape[n])
            {
                return Err(refused(format!(
                    "indices of shape {:?} do not fit values of shape {shape:?}",
                    index.shape
                )));
            }
            let of_updates = self.rows(updates);
            let all = [rows, index.rows, of_updates];
            let lines_up =
                rows.or(of_updates).is_none_or(|r| r != axis && all.iter().all(|x| x.is_none_or(|x| x == r)));
            if !lines_up || index.rows != rows.or(of_updates) {
                return Err(refused("the node fixes the number of candidates, expected any number"));
            }
            index.elements(&shape, axis)?
        } else {
            let Some((&columns, ahead)) = index.shape.split_last() else {
                return Err(refused("indices are a scalar, expected at least one axis"));
            };
            let inner = shape.get(columns..).filter(|_| columns > 0).unwrap_or(&[]);
            let is_inner =
                columns > 0 && columns <= shape.len() && index.rows.is_none() && rows.is_none_or(|r| r >= columns);
            if !is_inner || [ahead, inner].concat() != of_updates {
                return Err(refused(format!(
                    "indices of shape {:?} do not fit values of shape {shape:?}",
                    index.shape
                )));
            }
            let of_update = self.rows(updates).map(|r| r.checked_sub(ahead.len()).map(|n| n + columns));
            if of_update.is_some_and(|r| r.is_none() || (rows.is_some() && r != rows)) {
                return Err(refused("two inputs have different candidate axes or different numbers of candidates"));
            }
            index.tuples(&shape, columns)?
        };
        let rows = rows.or_else(|| self.rows(updates).map(|r| r + shape.len() - of_updates.len()));
        let count = shape.iter().product::<usize>();
        let mut index: Vec<u32> = (0..count as u32).collect();
        places.iter().enumerate().for_each(|(n, &at)| index[at as usize] = (count + n) as u32);
        let parts = [(a, count), (updates, places.len())].map(|(part, count)| {
            let flat = self.flat(part, vec![1, count])?;
            self.per_row(flat, rows.map(|_| 0))
        });
        let [a, updates] = parts;
        let both = self.graph.concat(1, &[a?, updates?])?;
        self.graph.pick(both, index, shape, rows)
    }
}

/// Rejects a node that would compare too many numbers.
fn limit(shape: &[usize]) -> Result<()> {
    match shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).filter(|&n| n <= COMPARED_MAX) {
        Some(_) => Ok(()),
        None => Err(refused(format!(
            "indices that depend on numbers, compared with shape {shape:?}, expected at most {COMPARED_MAX} numbers"
        ))),
    }
}
