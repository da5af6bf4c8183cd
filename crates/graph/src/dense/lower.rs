//! Lowering of values to steps: one step per operator that no other step computes, and the estimated cost of each step.

use std::sync::Arc;

use super::chains::ChainOf;
use super::equal::EqualGroup;
use super::ir::{Id, Op, Side, broadcast_strides, positions};
use super::plan::{Planner, follows};
use super::steps::{BufferRange, KeyedFold, Memory, Operand, Step, Work};
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::dense::{Binary, ChainLink, Form, Order, PANEL};

/// Returns the first index of each group and the group length, if the indices consist of groups of equal length with
/// consecutive indices.
fn runs(index: &Arc<[u32]>) -> (Arc<[u32]>, usize) {
    let ends = index.windows(2).position(|two| two[0] + 1 != two[1]).map_or(index.len(), |n| n + 1);
    match ends > 1 && index.len().is_multiple_of(ends) && index.chunks(ends).all(follows) {
        true => (index.iter().step_by(ends).copied().collect(), ends),
        false => (index.clone(), 1),
    }
}

/// Maximum length of groups of numbers that are copied in registers rather than by `memcpy`.
const RUN_MAX: usize = 32;

/// Returns an order in which single numbers, or short groups that start at these indices, are copied faster; `None` if
/// there is none.
fn order(index: &[u32], run: usize) -> Option<Order> {
    match run {
        1 => Order::of(index),
        2..=RUN_MAX => Some(Order::Runs(index.iter().map(|&first| (first, run as u32)).collect())),
        _ => None,
    }
}

impl Planner<'_> {
    pub(super) fn value(&mut self, id: Id) -> Result<()> {
        if self.places[id].is_some() {
            return Ok(());
        }
        let value = &self.graph.values[id];
        let (side, count) = (value.side, value.count());
        if let Some(group) = self.equal.group(id).cloned() {
            return self.fold_equal(&group);
        }
        if let Some(chain) = self.chains.chain(id).cloned() {
            // The first operator of a chain compiles the whole chain; values inside the chain may have no buffer range.
            return if chain.links[0] == id { self.chain(&chain) } else { Ok(()) };
        }
        let place = match &value.op {
            Op::Constant(_) => return Ok(()),
            Op::Inputs(first) if side == Side::Pair => {
                BufferRange { memory: Memory::Given, offset: self.given[*first] }
            }
            Op::Inputs(first) => {
                let place = self.buffer(side, count);
                if let Memory::User(buffer) = place.memory {
                    let before = self.graph.inputs[..*first].iter().filter(|i| i.side == Side::User).count();
                    self.plan.user_inputs.push((before, buffer));
                }
                place
            }
            Op::Pick(a, index) if self.home[id] != id => {
                let place = self.place(*a)?;
                BufferRange { offset: place.offset + index[0] as usize, ..place }
            }
            Op::Concat(axis, parts) if let Some(place) = self.adjacent_inputs(id, *axis, parts)? => place,
            _ => {
                let work = self.work(id)?;
                // The result as pairs is stored in complete panels.
                let room = if self.is_paired[id] { count.next_multiple_of(PANEL) / 2 } else { count };
                let place = self.buffer(side, room);
                self.step(place, work);
                place
            }
        };
        self.places[id] = Some(place);
        Ok(())
    }

    fn work(&mut self, id: Id) -> Result<Work> {
        if let Some(attention) = self.attend(id)? {
            return Ok(attention);
        }
        if let Some(group) = self.normal.group(id).cloned() {
            return group.compile(self.graph, |id| self.place(id));
        }
        let value = &self.graph.values[id];
        Ok(match &value.op {
            Op::Unary(f, a) => Work::Map1 { f: *f, a: self.place(*a)?, count: value.count() },
            Op::Binary(f, a, b) => self.binary(id, *f, *a, *b)?,
            Op::Fold(f, a) => {
                let count = self.graph.shape(*a).last().copied().unwrap_or(1);
                Work::Fold { f: *f, a: self.place(*a)?, runs: value.count(), count }
            }
            Op::Concat(axis, parts) => {
                let inner = |id: Id| self.graph.shape(id)[*axis..].iter().product();
                let parts = parts.iter().map(|&part| Ok((self.place(part)?, inner(part)))).collect::<Result<_>>()?;
                Work::Concat { runs: value.shape[..*axis].iter().product(), parts }
            }
            Op::Pick(a, index) => {
                let (index, run) = runs(index);
                Work::Pick { a: self.place(*a)?, order: order(&index, run), index, run }
            }
            Op::Spread(a, index) => {
                let (index, run) = runs(index);
                Work::Spread { a: self.place(*a)?, index, run, count: value.count() }
            }
            Op::Linear { parts, bias } if self.quantized.is_product(id) => {
                let bias = bias.map(|bias| self.place(bias)).transpose()?;
                self.int8_product(id, parts, bias, [1, value.count()])?
            }
            Op::Linear { parts, bias } => {
                let columns = value.count();
                let form = |is_pairs: bool| if is_pairs { Form::Pairs } else { Form::Single };
                let (factors, result) = (form(self.is_narrow[id]), form(self.is_paired[id]));
                let skips_zeros = factors == Form::Single && self.skips_zeros(parts, columns);
                let parts = match factors {
                    Form::Single => self.factors(parts)?,
                    Form::Pairs => self.narrow_factors(parts)?,
                };
                let bias = bias.map(|bias| self.place(bias)).transpose()?;
                let relu = self.is_rectified[id];
                Work::Product { parts, bias, runs: 1, columns, relu, skips_zeros, factors, result }
            }
            Op::MatMul(a, b) => self.matmul(id, *a, *b)?,
            Op::Recurrent(layer) => self.recurrent(layer)?,
            Op::Inputs(_) | Op::Constant(_) | Op::Reshape(_) => {
                return Err(Error::internal("an input, a constant or a reshape is planned as a step"));
            }
        })
    }

    pub(super) fn step(&mut self, place: BufferRange, work: Work) {
        let cost = match &work {
            Work::Product { parts, runs, columns, skips_zeros, .. } => {
                let cost = parts.iter().map(|p| p.depth * columns).sum::<usize>() * runs;
                // If half of the numbers are zeros.
                if *skips_zeros { cost * 5 / 8 } else { cost }
            }
            // A step of the depth covers four codes, after the rows were quantized.
            Work::Int8Product { parts, runs, columns, .. } => {
                parts.iter().map(|part| part.matrix.depth() * (columns / 4 + 1)).sum::<usize>() * runs
            }
            Work::Narrow { count, .. } => *count,
            Work::PackNarrow { depth, columns, .. } => depth * columns,
            Work::Matrices { left, shape: [m, k, n], .. } => left.len() * m * k * n,
            // Memory-bound steps cost about four multiply-adds per number.
            Work::Map1 { count, .. } => 4 * count,
            Work::Map2 { outer, inner, .. } => 4 * outer * inner,
            Work::Fold { runs, count, .. } => 4 * runs * count,
            Work::FoldEqual { count, .. } => *count,
            Work::Chain { reads, links, kept } => reads.len() + links.len() + kept.len(),
            Work::Concat { runs, parts } => 4 * runs * parts.iter().map(|(_, n)| n).sum::<usize>(),
            Work::Pick { index, run, .. } => 16 * index.len() + run,
            Work::Spread { index, run, count, .. } => 16 * index.len() * run + count,
            Work::Softmax { runs, width, .. } => 8 * runs * width,
            Work::Normalize(work) => 8 * work.runs * work.width,
            Work::Attention(work) => work.work()[0] + 4 * work.work()[1],
            Work::Recurrent(work) => work.cost(),
        };
        match place.memory {
            Memory::Rows(out) => {
                self.plan.row_work += cost;
                self.plan.rows.push(Step { out, work });
            }
            Memory::User(out) => {
                self.plan.user_work += cost;
                self.plan.user.push(Step { out, work });
            }
            Memory::Constant(_) | Memory::Given => {}
        }
    }

    /// Compiles reductions with the same keys to one step.
    fn fold_equal(&mut self, group: &EqualGroup) -> Result<()> {
        let out = self.side_by_side(&group.folds.iter().map(|(.., id)| *id).collect::<Vec<_>>());
        let beside = |&(f, values, _): &(_, Id, Id)| Ok(KeyedFold { f, values: self.place(values)? });
        let folds = group.folds.iter().map(beside).collect::<Result<_>>()?;
        let (key, keys, count) =
            (self.place(group.key)?, self.place(group.keys)?, self.graph.values[group.keys].count());
        self.step(out, Work::FoldEqual { key, keys, count, folds });
        Ok(())
    }

    fn chain(&mut self, chain: &ChainOf) -> Result<()> {
        let missing = || Error::internal("a single element is read before it is computed");
        let registers = [&chain.reads[..], &chain.links].concat();
        let register = |id: Id| registers.iter().position(|&other| other == self.root(id)).ok_or_else(missing);
        let link = |&id: &Id| match self.graph.values[id].op {
            Op::Unary(f, a) => Ok(ChainLink::One(f, register(a)?)),
            Op::Binary(f, a, b) => Ok(ChainLink::Two(f, [register(a)?, register(b)?])),
            _ => Err(Error::internal("a chain of single elements reads a wider value")),
        };
        let links = chain.links.iter().map(link).collect::<Result<_>>()?;
        let kept = chain.kept.iter().map(|&id| register(id)).collect::<Result<_>>()?;
        let reads = chain.reads.iter().map(|&id| self.place(id)).collect::<Result<_>>()?;
        let out = self.side_by_side(&chain.kept);
        self.step(out, Work::Chain { reads, links, kept });
        Ok(())
    }

    /// Compiles an element-wise step with two loops; an operand with another broadcast pattern is expanded first.
    fn binary(&mut self, id: Id, f: Binary, a: Id, b: Id) -> Result<Work> {
        let shape = &self.graph.values[id].shape;
        let strides = [a, b].map(|operand| broadcast_strides(self.graph.shape(operand), shape));
        // Drops axes of size 1, and merges adjacent axes that are contiguous in both operands.
        let mut axes: Vec<(usize, [usize; 2])> = Vec::new();
        for (n, &size) in shape.iter().enumerate().filter(|(_, size)| **size != 1) {
            let here = [strides[0][n], strides[1][n]];
            match axes.last_mut() {
                Some((before, at)) if (0..2).all(|o| at[o] == here[o] * size) => {
                    *before *= size;
                    *at = here;
                }
                _ => axes.push((size, here)),
            }
        }
        let (outer, inner) = match axes[..] {
            [] => ((1, [0, 0]), (1, [0, 0])),
            [inner] => ((1, [0, 0]), inner),
            [outer, inner] => (outer, inner),
            _ => {
                let count = shape.iter().product();
                let [a, b] = [(a, 0), (b, 1)].map(|(operand, n)| self.spread(operand, shape, &strides[n]));
                return Ok(Work::Map2 { f, a: a?, b: b?, outer: 1, inner: count });
            }
        };
        let mut operand = |id: Id, n: usize| -> Result<Operand> {
            Ok(Operand { place: self.place(id)?, outer: outer.1[n], inner: inner.1[n] })
        };
        Ok(Work::Map2 { f, a: operand(a, 0)?, b: operand(b, 1)?, outer: outer.0, inner: inner.0 })
    }

    fn spread(&mut self, id: Id, shape: &[usize], strides: &[usize]) -> Result<Operand> {
        let a = self.place(id)?;
        let index: Arc<[u32]> = positions(shape, strides).into();
        self.indexed += index.len();
        let place = self.buffer(self.graph.values[id].side.max(Side::User), index.len());
        self.step(place, Work::Pick { a, order: order(&index, 1), index, run: 1 });
        Ok(Operand { place, outer: 0, inner: 1 })
    }
}
