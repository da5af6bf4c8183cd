//! Padding, running sums, and the largest or smallest numbers along an axis.

use rten_onnx::onnx::NodeProto;

use super::known::{Attributes, Importer, Known, place, refused};
use crate::dense::graph::NUMBERS_MAX;
use crate::dense::ir::{Id, strides};
use sterling_core::error::Result;
use sterling_kernels::cpu::dense::{Binary, Fold, Unary};

/// Maximum size of an axis that TopK ranks: ranking compares all pairs of numbers.
const RANKED_MAX: usize = 512;
/// Maximum count of elements of a padded value.
const PADDED_MAX: usize = 1 << 22;

impl Importer {
    pub(super) fn pad(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>, a: Id) -> Result<Id> {
        let (shape, rows) = (self.graph.shape(a).to_vec(), self.rows(a));
        let mode = attributes.text("mode", "constant");
        let pads = match attributes.integers("pads") {
            Some(pads) => pads,
            None => self.fixed(node, 1)?,
        };
        let axes = match Importer::has(node, 3) {
            true => self.fixed(node, 3)?.iter().map(|&axis| self.axis(a, axis)).collect::<Result<Vec<_>>>()?,
            false => (0..shape.len()).collect(),
        };
        if pads.len() != 2 * axes.len() {
            return Err(refused(format!("`pads` {pads:?} do not fit {} axes", axes.len())));
        }
        let value = match attributes.take("value") {
            Some(value) => self.scalar(value.f.unwrap_or(0.0))?,
            None if Importer::has(node, 2) => self.number(node, 2)?,
            None => self.scalar(0.0)?,
        };
        // For each position of the result along an axis, the index in the input; `None` for the padding value.
        let mut sources: Vec<Vec<Option<usize>>> = shape.iter().map(|&d| (0..d).map(Some).collect()).collect();
        for (n, &axis) in axes.iter().enumerate() {
            let size = shape[axis] as i64;
            let (before, after) = (pads[n], pads[n + axes.len()]);
            if rows == Some(axis) && (before, after) != (0, 0) {
                return Err(refused("the operator does not support the candidate axis"));
            }
            let count = before.checked_add(after).and_then(|more| more.checked_add(size));
            let count = count.filter(|n| (1..=PADDED_MAX as i64).contains(n) && before.abs() <= PADDED_MAX as i64);
            let count = count.ok_or_else(|| refused(format!("`pads` {pads:?} do not fit shape {shape:?}")))?;
            let source = |n: i64| {
                let n = n - before;
                Ok(match mode.as_str() {
                    _ if (0..size).contains(&n) => Some(n as usize),
                    "constant" => None,
                    "edge" => Some(n.clamp(0, size - 1) as usize),
                    "wrap" => Some(n.rem_euclid(size) as usize),
                    "reflect" => {
                        let n = n.rem_euclid((2 * size - 2).max(1));
                        Some(n.min(2 * size - 2 - n).max(0) as usize)
                    }
                    other => return Err(refused(format!("`mode` {other}, expected constant, edge, reflect or wrap"))),
                })
            };
            sources[axis] = (0..count).map(source).collect::<Result<_>>()?;
        }
        let to: Vec<usize> = sources.iter().map(Vec::len).collect();
        if to.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).is_none_or(|n| n > PADDED_MAX) {
            return Err(refused(format!("the result of shape {to:?} is too large")));
        }
        let count = shape.iter().product::<usize>();
        let mut at = vec![Some(0usize)];
        for (sources, stride) in sources.iter().zip(strides(&shape)) {
            let next = |at: &Option<usize>| {
                let at = *at;
                sources.iter().map(move |source| Some(at? + (*source)? * stride))
            };
            at = at.iter().flat_map(next).collect();
        }
        let is_padded = at.contains(&None);
        let at = at.into_iter().map(|at| at.unwrap_or(count) as u32).collect();
        if !is_padded {
            return self.graph.pick(a, at, to, rows);
        }
        if self.graph.values[value].count() != 1 {
            return Err(refused("the padding value has several elements, expected one"));
        }
        let parts = [(a, count), (value, 1)].map(|(part, count)| {
            let own = self.rows(part).map(|_| 0);
            let flat = self.graph.reshape(part, vec![1, count], own)?;
            self.per_row(flat, rows.map(|_| 0))
        });
        let [flat, padding] = parts;
        let (flat, padding) = (flat?, padding?);
        let is_zero = self.graph.constant(value) == Some(&[0.0]) && mode == "constant";
        let both = self.graph.concat(1, &[flat, padding])?;
        let made = self.graph.pick(both, at, to, rows)?;
        if is_zero && pads.iter().all(|n| *n >= 0) {
            let mut around = vec![[0, 0]; shape.len()];
            for (n, &axis) in axes.iter().enumerate() {
                around[axis] = [pads[n] as usize, pads[n + axes.len()] as usize];
            }
            self.padded.insert(made, (a, around));
        }
        Ok(made)
    }

    /// Computes running sums by doubling: after step `n`, each number is the sum of up to `2^n` numbers.
    pub(super) fn running_sum(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>, a: Id) -> Result<Id> {
        let axis = match self.fixed(node, 1)?[..] {
            [axis] => self.axis(a, axis)?,
            _ => return Err(refused("got several axes, expected one")),
        };
        let is_exclusive = attributes.integer("exclusive", 0) != 0;
        let is_reverse = attributes.integer("reverse", 0) != 0;
        let size = self.graph.shape(a)[axis];
        if self.rows(a) == Some(axis) {
            return Err(refused("the operator does not support the candidate axis"));
        }
        let backwards: Vec<usize> = (0..size).rev().collect();
        let mut made = if is_reverse { self.along(a, axis, &backwards)? } else { a };
        if is_exclusive {
            let zero = self.scalar(0.0)?;
            let first = self.along(made, axis, &[0])?;
            // `Keep` with 0 ignores the first number, so NaN and infinities of it do not reach the result.
            let nothing = self.graph.binary(Binary::Keep, zero, first)?;
            made = match size {
                1 => nothing,
                _ => {
                    let others = self.along(made, axis, &(0..size - 1).collect::<Vec<_>>())?;
                    self.graph.concat(axis, &[nothing, others])?
                }
            };
        }
        let mut step = 1;
        while step < size {
            let first = self.along(made, axis, &(0..step).collect::<Vec<_>>())?;
            let rest = self.along(made, axis, &(step..size).collect::<Vec<_>>())?;
            let before = self.along(made, axis, &(0..size - step).collect::<Vec<_>>())?;
            let sum = self.graph.binary(Binary::Add, before, rest)?;
            made = self.graph.concat(axis, &[first, sum])?;
            step *= 2;
        }
        if is_reverse { self.along(made, axis, &backwards) } else { Ok(made) }
    }

    pub(super) fn one_hot_of(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>, a: Id) -> Result<Id> {
        let depth = match self.known(node, 1)? {
            Known::Value(id) => self.graph.constant(*id).unwrap_or(&[]).iter().map(|&x| x as i64).collect(),
            _ => self.fixed(node, 1)?,
        };
        let depth = match depth[..] {
            [depth] => usize::try_from(depth).ok().filter(|&n| n > 0 && n <= NUMBERS_MAX),
            _ => None,
        };
        let depth = depth.ok_or_else(|| refused("`depth` is not a constant of at least 1"))?;
        let values = self.number(node, 2)?;
        if self.graph.shape(values)[..] != [2] {
            return Err(refused(format!("values of shape {:?}, expected [2]", self.graph.shape(values))));
        }
        let rank = self.rank(a) + 1;
        let axis = place(attributes.integer("axis", -1), rank)?;
        let whole = self.graph.unary(Unary::Trunc, a)?;
        let hot = self.one_hot(whole, depth)?;
        let (off, on) = (self.along(values, 0, &[0])?, self.along(values, 0, &[1])?);
        let (on, off) = (self.graph.binary(Binary::Keep, hot, on)?, self.graph.binary(Binary::Drop, hot, off)?);
        let made = self.graph.binary(Binary::Add, on, off)?;
        if self.whole.contains(&values) {
            self.whole.insert(made);
        }
        let mut order: Vec<usize> = (0..rank - 1).collect();
        order.insert(axis, rank - 1);
        self.graph.transpose(made, &order)
    }

    /// Returns the `k` largest or smallest numbers along an axis, in order, and their indices. A number's rank is the
    /// count of better numbers plus the count of equal numbers with a smaller index.
    pub(super) fn top(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Vec<Id>> {
        let a = self.number(node, 0)?;
        let (shape, rows) = (self.graph.shape(a).to_vec(), self.rows(a));
        let axis = self.axis(a, attributes.integer("axis", -1))?;
        let is_largest = attributes.integer("largest", 1) != 0;
        attributes.integer("sorted", 1);
        let size = shape[axis];
        let count = match attributes.take("k").and_then(|k| k.i).map_or_else(|| self.fixed(node, 1), |k| Ok(vec![k]))?[..]
        {
            [k] => usize::try_from(k).ok().filter(|&k| (1..=size).contains(&k)),
            _ => None,
        };
        let count = count.ok_or_else(|| refused(format!("`k` is not a constant from 1 to {size}")))?;
        if rows == Some(axis) || size > RANKED_MAX {
            return Err(refused(format!("TopK of an axis of {size} elements, expected at most {RANKED_MAX}")));
        }
        let order: Vec<usize> = (0..shape.len()).filter(|&n| n != axis).chain([axis]).collect();
        let back: Vec<usize> = (0..shape.len()).map(|n| order.iter().position(|&x| x == n).unwrap_or(n)).collect();
        let last = self.graph.transpose(a, &order)?;
        let rows = rows.and_then(|r| order.iter().position(|&n| n == r));
        let others = order[..order.len() - 1].iter().map(|&n| shape[n]).collect::<Vec<_>>();
        let with = |more: &[usize]| [&others[..], more].concat();
        let column = self.graph.reshape(last, with(&[size, 1]), rows)?;
        let row = self.graph.reshape(last, with(&[1, size]), rows)?;
        let (worse, better) = if is_largest { (column, row) } else { (row, column) };
        let is_before = self.graph.binary(Binary::Less, worse, better)?;
        let earlier = (0..size * size).map(|n| f32::from(u8::from(n % size < n / size))).collect();
        let earlier = self.graph.number(vec![size, size], earlier)?;
        let is_equal = self.graph.binary(Binary::Equal, column, row)?;
        let is_equal_before = self.graph.binary(Binary::Keep, earlier, is_equal)?;
        let is_before = self.graph.binary(Binary::Max, is_before, is_equal_before)?;
        let rank = self.graph.fold(Fold::Sum, is_before, &[others.len() + 1])?;
        // Ranks move from `[.., size, 1]` to `[.., 1, size]`, to be compared with the wanted ranks.
        let rank = self.graph.reshape(rank, with(&[1, size]), rows)?;
        let wanted = self.graph.number(vec![count, 1], (0..count).map(|n| n as f32).collect())?;
        let is_it = self.graph.binary(Binary::Equal, rank, wanted)?;
        let places = self.graph.number(vec![1, size], (0..size).map(|n| n as f32).collect())?;
        let mut made = Vec::with_capacity(2);
        for numbers in [row, places] {
            let retained = self.graph.binary(Binary::Keep, is_it, numbers)?;
            let sum = self.graph.fold(Fold::Sum, retained, &[others.len() + 1])?;
            let sum = self.graph.reshape(sum, with(&[count]), rows)?;
            made.push(self.graph.transpose(sum, &back)?);
        }
        self.whole.insert(made[1]);
        Ok(made)
    }
}
