//! Graph construction value by value: each operation checks its shapes, and constants are evaluated immediately.

use super::interpret;
use super::ir::{GraphInput, Id, Op, Side, Value, broadcast, positions, strides};
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::dense::{Binary, Fold, Unary};

/// Maximum count of numbers of a value for one row, and of all constants and indices of a graph.
pub(super) const NUMBERS_MAX: usize = 1 << 26;
/// Maximum count of numbers in all values of a graph, for one row. Most of them never lie in memory at the same time:
/// buffers are reused ([`super::plan`] limits them), and attention computes tiles.
pub(super) const COMPUTED_MAX: usize = 1 << 30;
/// Maximum multiply-adds of one matrix product of a graph.
const FOLDED_MAX: usize = 1 << 30;

/// Values in topological order.
#[derive(Clone, Debug, Default)]
pub(super) struct Graph {
    pub(super) inputs: Vec<GraphInput>,
    pub(super) values: Vec<Value>,
    pub(super) outputs: Vec<Id>,
    /// Values that cancel out, so that they need no gradient: the maximum that a softmax subtracts.
    pub(super) still: Vec<Id>,
    /// Count of numbers in all values.
    computed: usize,
    /// Count of numbers in constants and indices.
    stored: usize,
}

fn refused(what: impl Into<String>) -> Error {
    Error::unsupported(what)
}

impl Graph {
    /// Creates a graph without values.
    pub(super) fn new(inputs: Vec<GraphInput>) -> Self {
        Graph { inputs, ..Graph::default() }
    }

    /// Adds a value; the caller guarantees that the shapes of the operation fit.
    pub(super) fn add(&mut self, op: Op, shape: Vec<usize>, rows: Option<usize>) -> Result<Id> {
        let count = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        let count = count
            .filter(|n| (1..=NUMBERS_MAX).contains(n))
            .ok_or_else(|| refused(format!("a value of shape {shape:?}, expected 1 to {NUMBERS_MAX} numbers")))?;
        if !self.fits(&op, &shape) {
            let of: Vec<&[usize]> = op.reads().into_iter().map(|read| self.shape(read)).collect();
            return Err(Error::internal(format!("operands of shapes {of:?} do not fit a result of shape {shape:?}")));
        }
        let side = match &op {
            Op::Inputs(first) => self.inputs[*first].side,
            op => op.reads().iter().map(|&id| self.values[id].side).max().unwrap_or(Side::Constant),
        };
        let side = if rows.is_some() { Side::Pair } else { side };
        let value = Value { op, shape, side, rows };
        let stored = match &value.op {
            _ if side == Side::Constant => count,
            Op::Pick(_, index) | Op::Spread(_, index) => index.len(),
            _ => 0,
        };
        let (computed, stored) = (self.computed + count, self.stored + stored);
        if computed > COMPUTED_MAX || stored > NUMBERS_MAX {
            return Err(refused(format!(
                "{computed} numbers in all values of a graph, {stored} of them in constants and indices, expected at \
                 most {COMPUTED_MAX} and {NUMBERS_MAX}"
            )));
        }
        (self.computed, self.stored) = (computed, stored);
        let is_foldable = side == Side::Constant && !matches!(value.op, Op::Constant(_));
        let op = match is_foldable {
            true => Op::Constant(interpret::value(&self.values, &value).into()),
            false => value.op,
        };
        self.values.push(Value { op, ..value });
        Ok(self.values.len() - 1)
    }

    /// Returns whether the shapes of the operands are those that a result of this shape needs.
    fn fits(&self, op: &Op, shape: &[usize]) -> bool {
        let spreads = |of: &[usize], shape: &[usize]| {
            of.len() <= shape.len()
                && of.iter().rev().zip(shape.iter().rev()).all(|(&own, &all)| own == all || own == 1)
        };
        let count = |shape: &[usize]| shape.iter().product::<usize>();
        match op {
            Op::Unary(_, a) => self.shape(*a) == shape,
            Op::Binary(_, a, b) => spreads(self.shape(*a), shape) && spreads(self.shape(*b), shape),
            Op::MatMul(a, b) => match (self.shape(*a), self.shape(*b), shape) {
                ([of_a @ .., m, k], [of_b @ .., depth, n], [outer @ .., rows, columns]) => {
                    k == depth && m == rows && n == columns && spreads(of_a, outer) && spreads(of_b, outer)
                }
                _ => false,
            },
            Op::Fold(_, a) => match (self.shape(*a), shape) {
                ([outer @ .., _], [own @ .., 1]) => outer == own,
                _ => false,
            },
            Op::Pick(_, index) => index.len() == count(shape),
            Op::Reshape(a) => count(self.shape(*a)) == count(shape),
            _ => true,
        }
    }

    /// Returns for each value whether the values `of` depend on it, except through values of `stops`.
    pub(super) fn needed(&self, of: &[Id], stops: &[Id]) -> Vec<bool> {
        self.needed_by(of, |id| if stops.contains(&id) { Vec::new() } else { self.values[id].op.reads() })
    }

    /// Returns for each value whether the values `of` depend on it; `reads` returns the operands of a value.
    pub(super) fn needed_by(&self, of: &[Id], reads: impl Fn(Id) -> Vec<Id>) -> Vec<bool> {
        let mut needed = vec![false; self.values.len()];
        of.iter().for_each(|&id| needed[id] = true);
        for id in (0..self.values.len()).rev() {
            if needed[id] {
                reads(id).into_iter().for_each(|read| needed[read] = true);
            }
        }
        needed
    }

    /// Returns the elements of a value if it is a constant.
    pub(super) fn constant(&self, id: Id) -> Option<&[f32]> {
        if let Op::Constant(numbers) = &self.values[id].op { Some(numbers) } else { None }
    }

    pub(super) fn shape(&self, id: Id) -> &[usize] {
        &self.values[id].shape
    }

    /// Adds input number `n`.
    pub(super) fn input(&mut self, n: usize) -> Result<Id> {
        let GraphInput { shape, rows, .. } = self.inputs[n].clone();
        self.add(Op::Inputs(n), shape, rows)
    }

    /// Adds consecutive row inputs, concatenated to one row.
    pub(super) fn inputs(&mut self, first: usize, count: usize) -> Result<Id> {
        let width = self.inputs[first..first + count].iter().map(|i| i.shape.iter().product::<usize>()).sum();
        self.add(Op::Inputs(first), vec![1, width], Some(0))
    }

    /// Adds a constant.
    pub(super) fn number(&mut self, shape: Vec<usize>, numbers: Vec<f32>) -> Result<Id> {
        if shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)) != Some(numbers.len()) {
            return Err(refused(format!("got {} elements for a constant of shape {shape:?}", numbers.len())));
        }
        self.add(Op::Constant(numbers.into()), shape, None)
    }

    pub(super) fn unary(&mut self, f: Unary, a: Id) -> Result<Id> {
        let Value { shape, rows, .. } = self.values[a].clone();
        self.add(Op::Unary(f, a), shape, rows)
    }

    pub(super) fn binary(&mut self, f: Binary, a: Id, b: Id) -> Result<Id> {
        let shape = broadcast(self.shape(a), self.shape(b))?;
        let rows = self.common_rows(a, b, shape.len(), 0)?;
        self.add(Op::Binary(f, a, b), shape, rows)
    }

    /// Returns the row axis of a result with `axes` axes, whose two operands are aligned at their last axis. The last
    /// `last` axes cannot be the row axis of both.
    fn common_rows(&self, a: Id, b: Id, axes: usize, last: usize) -> Result<Option<usize>> {
        let from_end = |id: Id| self.values[id].rows.map(|axis| self.shape(id).len() - axis);
        let size = |id: Id| self.values[id].rows.map(|axis| self.shape(id)[axis]);
        let (of_a, of_b) = (from_end(a), from_end(b));
        if of_a.is_some() && of_b.is_some() && (of_a != of_b || size(a) != size(b)) {
            return Err(refused("two inputs have different candidate axes or different numbers of candidates"));
        }
        let Some(end) = of_a.or(of_b) else { return Ok(None) };
        for id in [a, b] {
            let shape = self.shape(id);
            if end > last && self.values[id].rows.is_none() && shape.len() >= end && shape[shape.len() - end] != 1 {
                return Err(refused(format!("shape {shape:?} fixes the number of candidates, expected any number")));
            }
        }
        Ok(Some(axes - end))
    }

    pub(super) fn matmul(&mut self, a: Id, b: Id) -> Result<Id> {
        let (left, right) = (self.shape(a).to_vec(), self.shape(b).to_vec());
        let (Some((&k, _)), true, true) = (left.split_last(), left.len() >= 2, right.len() >= 2) else {
            return Err(refused(format!("shapes {left:?} and {right:?} do not fit a matrix product")));
        };
        let (m, n) = (left[left.len() - 2], right[right.len() - 1]);
        if right[right.len() - 2] != k {
            return Err(refused(format!("shapes {left:?} and {right:?} do not fit a matrix product")));
        }
        let mut shape = broadcast(&left[..left.len() - 2], &right[..right.len() - 2])?;
        shape.extend([m, n]);
        let from_end = |id: Id| self.values[id].rows.map(|axis| self.shape(id).len() - axis);
        let rows = match (from_end(a), from_end(b)) {
            (None, None) => None,
            (Some(1), _) | (_, Some(1 | 2)) => {
                return Err(refused("the matrix product sums over candidates, which is not supported"));
            }
            // The rows of the product are the candidates: all candidates share the right operand.
            (Some(2), None) => Some(shape.len() - 2),
            (Some(2), Some(_)) => {
                return Err(refused("both operands of the matrix product have candidates, which is not supported"));
            }
            _ => self.common_rows(a, b, shape.len(), 2)?,
        };
        let work = shape.iter().try_fold(k, |n, &d| n.checked_mul(d));
        if work.is_none_or(|n| n > FOLDED_MAX) {
            return Err(refused(format!("the matrix product of shapes {left:?} and {right:?} is too large")));
        }
        self.add(Op::MatMul(a, b), shape, rows)
    }

    /// Adds the sum of products of rows with matrices, plus a bias.
    pub(super) fn linear(&mut self, parts: Vec<(Id, Id)>, bias: Option<Id>) -> Result<Id> {
        let columns = parts.first().map_or(0, |(_, matrix)| self.shape(*matrix)[1]);
        self.add(Op::Linear { parts, bias }, vec![1, columns], Some(0))
    }

    /// Reduces a value along axes, which get size 1.
    pub(super) fn fold(&mut self, f: Fold, a: Id, axes: &[usize]) -> Result<Id> {
        let Value { shape, rows, .. } = self.values[a].clone();
        if rows.is_some_and(|r| axes.contains(&r)) {
            return Err(refused("the reduction sums over candidates, which is not supported"));
        }
        if (1..axes.len()).any(|n| axes[..n].contains(&axes[n])) {
            return Err(refused(format!("got axes {axes:?}, expected each axis once")));
        }
        let retained: Vec<usize> = (0..shape.len()).filter(|axis| !axes.contains(axis)).collect();
        let order: Vec<usize> = retained.iter().chain(axes).copied().collect();
        let last = self.transpose(a, &order)?;
        let count = axes.iter().map(|&axis| shape[axis]).product();
        let mut flat: Vec<usize> = retained.iter().map(|&axis| shape[axis]).collect();
        let flat_rows = rows.and_then(|r| retained.iter().position(|&axis| axis == r));
        flat.push(count);
        let flat_value = self.reshape(last, flat.clone(), flat_rows)?;
        *flat.last_mut().unwrap_or(&mut 1) = 1;
        let folded = self.add(Op::Fold(f, flat_value), flat, flat_rows)?;
        let shape = shape.iter().enumerate().map(|(axis, &d)| if axes.contains(&axis) { 1 } else { d }).collect();
        self.reshape(folded, shape, rows)
    }

    pub(super) fn concat(&mut self, axis: usize, parts: &[Id]) -> Result<Id> {
        let first = self.values[*parts.first().ok_or_else(|| refused("Concat has no inputs"))?].clone();
        let mut shape = first.shape.clone();
        shape[axis] = 0;
        for &part in parts {
            let value = &self.values[part];
            let others = |s: &[usize]| s.iter().enumerate().filter(|(n, _)| *n != axis).map(|(_, d)| *d).collect();
            let (here, want): (Vec<usize>, Vec<usize>) = (others(&value.shape), others(&shape));
            if value.shape.len() != shape.len() || here != want {
                return Err(refused(format!(
                    "Concat along axis {axis} of shapes {:?} and {:?}, expected equal sizes of all other axes",
                    first.shape, value.shape
                )));
            }
            if value.rows != first.rows || value.rows == Some(axis) {
                return Err(refused("Concat joins per-candidate values with shared ones"));
            }
            shape[axis] += value.shape[axis];
        }
        self.add(Op::Concat(axis, parts.to_vec()), shape, first.rows)
    }

    /// Selects numbers of `a` by index and gives them another shape, with the row axis `rows`.
    pub(super) fn pick(&mut self, a: Id, index: Vec<u32>, shape: Vec<usize>, rows: Option<usize>) -> Result<Id> {
        let (a, index) = self.picked_at_once(a, index);
        match self.runs_of_parts(a, &index) {
            Some(runs) => self.pick_from_parts(runs, shape, rows),
            None => self.pick_from(a, index, shape, rows),
        }
    }

    /// Composes a selection with earlier selections that it reads, such as a transposition and its inverse around a
    /// convolution, if the composed indices have no more contiguous groups.
    fn picked_at_once(&self, a: Id, index: Vec<u32>) -> (Id, Vec<u32>) {
        let mut at = a;
        while let Op::Reshape(of) = self.values[at].op {
            at = of;
        }
        let Op::Pick(of, inner) = &self.values[at].op else { return (a, index) };
        let composed: Vec<u32> = index.iter().map(|&n| inner[n as usize]).collect();
        let runs = |index: &[u32]| index.windows(2).filter(|two| two[0] + 1 != two[1]).count();
        match runs(&composed) <= runs(&index) {
            true => self.picked_at_once(*of, composed),
            false => (a, index),
        }
    }

    fn pick_from(&mut self, a: Id, index: Vec<u32>, shape: Vec<usize>, rows: Option<usize>) -> Result<Id> {
        if index.iter().map(|&n| n as usize).eq(0..self.values[a].count()) && rows == self.values[a].rows {
            return self.reshape(a, shape, rows);
        }
        self.add(Op::Pick(a, index.into()), shape, rows)
    }

    /// Splits the indices selected from a concatenation into groups per part; parts that are not selected need not be
    /// computed. `None` if parts are not contiguous, the selection is as long as the concatenation, or groups outnumber
    /// parts.
    fn runs_of_parts(&self, a: Id, index: &[u32]) -> Option<Vec<(Id, Vec<u32>)>> {
        let mut at = a;
        while let Op::Reshape(of) = self.values[at].op {
            at = of;
        }
        let Value { op: Op::Concat(axis, parts), shape, .. } = &self.values[at] else { return None };
        if shape[..*axis].iter().any(|&size| size != 1) || index.len() >= self.values[at].count() {
            return None;
        }
        let firsts: Vec<usize> = parts
            .iter()
            .scan(0, |next, &part| Some(std::mem::replace(next, *next + self.values[part].count())))
            .collect();
        let mut runs: Vec<(Id, Vec<u32>)> = Vec::new();
        for &n in index {
            let at = firsts.partition_point(|&first| first <= n as usize) - 1;
            let own = n - firsts[at] as u32;
            match runs.last_mut().filter(|(last, _)| *last == parts[at]) {
                Some((_, index)) => index.push(own),
                None => runs.push((parts[at], vec![own])),
            }
        }
        (runs.len() <= parts.len()).then_some(runs)
    }

    fn pick_from_parts(&mut self, runs: Vec<(Id, Vec<u32>)>, shape: Vec<usize>, rows: Option<usize>) -> Result<Id> {
        let flat = rows.map(|_| 0);
        let pick = |(part, index): (Id, Vec<u32>)| {
            let shape = vec![1, index.len()];
            self.pick_from(part, index, shape, flat)
        };
        let picked = runs.into_iter().map(pick).collect::<Result<Vec<_>>>()?;
        let together = match picked[..] {
            [one] => one,
            _ => self.concat(1, &picked)?,
        };
        self.reshape(together, shape, rows)
    }

    pub(super) fn transpose(&mut self, a: Id, order: &[usize]) -> Result<Id> {
        let Value { shape, rows, .. } = self.values[a].clone();
        let to: Vec<usize> = order.iter().map(|&axis| shape[axis]).collect();
        let strides = strides(&shape);
        let moved: Vec<usize> = order.iter().map(|&axis| strides[axis]).collect();
        let rows = rows.and_then(|r| order.iter().position(|&axis| axis == r));
        self.pick(a, positions(&to, &moved), to, rows)
    }

    /// Gives a value another shape with the same count of numbers.
    pub(super) fn reshape(&mut self, a: Id, shape: Vec<usize>, rows: Option<usize>) -> Result<Id> {
        if shape.iter().product::<usize>() != self.values[a].count() {
            return Err(refused(format!("cannot reshape {:?} to {shape:?}: different sizes", self.shape(a))));
        }
        if shape == self.shape(a) && rows == self.values[a].rows {
            return Ok(a);
        }
        self.add(Op::Reshape(a), shape, rows)
    }
}
