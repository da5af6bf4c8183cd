//! Sums and products over the segments of a value: one result per segment, and the sum of these results.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::ir::{Id, Side};
use super::{Origin, Segment, Separator};
use sterling_core::error::Result;
use sterling_kernels::cpu::dense::{Binary, Fold};

/// Numbers of a segment in the runs of a value; a run is a vector along the last axis.
enum Runs {
    /// All numbers of these runs.
    Complete(Vec<usize>),
    /// The numbers at the same positions of every run.
    Across(Vec<usize>),
}

impl Separator<'_> {
    /// Returns where the numbers of a segment lie in runs of `width` numbers, and the segment in the order of the runs.
    fn runs_of(&mut self, segment: &Segment, runs: usize, width: usize) -> Result<Option<(Id, Runs)>> {
        let mut order: Vec<u32> = (0..segment.at.len() as u32).collect();
        order.sort_by_key(|&n| segment.at[n as usize]);
        let mut of_runs: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for &n in &order {
            let at = segment.at[n as usize] as usize;
            of_runs.entry(at / width).or_default().push(at % width);
        }
        let Some(across) = of_runs.values().next().cloned() else { return Ok(None) };
        let found = match (of_runs.len() == runs, of_runs.values().all(|own| *own == across)) {
            (true, true) => Runs::Across(across),
            (_, true) if across.iter().copied().eq(0..width) => Runs::Complete(of_runs.into_keys().collect()),
            _ => return Ok(None),
        };
        // A single run keeps the order of the segment: the rows of its matrix are put into the same order.
        if let (Runs::Across(_), 1) = (&found, runs) {
            return Ok(Some((segment.value, Runs::Across(segment.at.iter().map(|&at| at as usize).collect()))));
        }
        Ok(Some((self.pick(segment.value, order)?, found)))
    }

    fn all_runs(&mut self, segments: &[Segment], runs: usize, width: usize) -> Result<Option<Vec<(Id, Runs)>>> {
        segments.iter().map(|segment| self.runs_of(segment, runs, width)).collect()
    }

    /// Reduces the runs of each segment by `f`, which returns `each` numbers per run, and adds the results of the same
    /// run.
    fn reduced(
        &mut self,
        id: Id,
        found: Vec<(Id, Runs)>,
        each: usize,
        mut f: impl FnMut(&mut Self, Id, usize, Option<&[usize]>) -> Result<Id>,
    ) -> Result<Option<Vec<Segment>>> {
        let (mut apart, mut sums): (Vec<Segment>, BTreeMap<Origin, Id>) = (Vec::new(), BTreeMap::new());
        let all = self.from.values[id].count() / each;
        self.is_any_apart |= found.iter().any(|(value, _)| self.origin(*value) == Origin::User);
        for (value, runs) in found {
            match runs {
                Runs::Complete(runs) => {
                    let made = f(self, value, runs.len(), None)?;
                    let at = runs.iter().flat_map(|run| (run * each..(run + 1) * each).map(|n| n as u32)).collect();
                    apart.push(Segment { value: self.flat(made)?, at });
                }
                Runs::Across(across) => {
                    let made = f(self, value, all, Some(&across))?;
                    let (made, origin) = (self.flat(made)?, self.origin(value));
                    let sum = match sums.remove(&origin) {
                        Some(before) => self.to.binary(Binary::Add, before, made)?,
                        None => made,
                    };
                    sums.insert(origin, sum);
                }
            }
        }
        let of_user = sums.remove(&Origin::User);
        let mut total: Option<Id> = None;
        for sum in sums.into_values().chain(of_user) {
            total = Some(match total {
                Some(total) => self.to.binary(Binary::Add, total, sum)?,
                None => sum,
            });
        }
        let count = self.from.values[id].count();
        let Some(total) = total else { return Ok(Some(apart)) };
        if self.to.values[total].side != Side::Pair {
            return Ok(Some(vec![Segment { value: total, at: (0..count as u32).collect() }]));
        }
        let (shape, rows) = (self.from.values[id].shape.clone(), self.from.values[id].rows);
        self.made[id] = Some(self.to.reshape(total, shape, rows)?);
        Ok(None)
    }

    pub(super) fn folded(&mut self, id: Id, f: Fold, a: Id) -> Result<Option<Vec<Segment>>> {
        let Some(segments) = self.segments[a].clone() else { return Ok(None) };
        let (runs, count) = (self.from.values[id].count(), self.from.values[a].count());
        let Some(found) = self.all_runs(&segments, runs, count / runs)? else { return Ok(None) };
        let is_across = found.iter().any(|(_, runs)| matches!(runs, Runs::Across(_)));
        let is_one = found.len() == 1;
        if is_across && !is_one && (f != Fold::Sum || found.iter().any(|(_, runs)| matches!(runs, Runs::Complete(_)))) {
            return Ok(None);
        }
        self.reduced(id, found, 1, |this, value, runs, _| {
            let table = this.table(value, runs)?;
            let axis = this.to.shape(table).len() - 1;
            this.to.fold(f, table, &[axis])
        })
    }

    pub(super) fn product(&mut self, id: Id, a: Id, b: Id) -> Result<Option<Vec<Segment>>> {
        let (left, right) = (self.from.shape(a).to_vec(), self.from.shape(b).to_vec());
        let [.., depth, columns] = right[..] else { return Ok(None) };
        if self.from.values[b].side == Side::Pair {
            return self.blocks(a, b);
        }
        let Some(segments) = self.segments[a].clone() else { return Ok(None) };
        let runs = left.iter().product::<usize>() / depth.max(1);
        if right.iter().product::<usize>() != depth * columns {
            return Ok(None);
        }
        let Some(found) = self.all_runs(&segments, runs, depth)? else { return Ok(None) };
        let across = found.iter().filter(|(_, runs)| matches!(runs, Runs::Across(_))).count();
        if across > 0 && across < found.len() {
            return Ok(None);
        }
        let made = self.make(b)?;
        let matrix = self.to.reshape(made, vec![depth, columns], None)?;
        self.reduced(id, found, columns, |this, value, runs, across| {
            let rows = match across {
                None => matrix,
                Some(across) => {
                    let row = |&k: &usize| (k * columns..(k + 1) * columns).map(|n| n as u32);
                    let index = across.iter().flat_map(row).collect();
                    this.to.pick(matrix, index, vec![across.len(), columns], None)?
                }
            };
            // A vector of the row stays a vector, so that chains of products can be collapsed.
            match (this.to.values[value].side, runs) {
                (Side::Pair, 1) => this.to.matmul(value, rows),
                _ => {
                    let table = this.table(value, runs)?;
                    this.to.matmul(table, rows)
                }
            }
        })
    }

    /// Returns the products of each segment of rows of `a` with each segment of columns of `b`; `a` and `b` are single
    /// matrices.
    fn blocks(&mut self, a: Id, b: Id) -> Result<Option<Vec<Segment>>> {
        let (left, right) = (self.from.shape(a).to_vec(), self.from.shape(b).to_vec());
        let ([.., m, k], [.., _, n]) = (&left[..], &right[..]) else { return Ok(None) };
        let (m, k, n) = (*m, *k, *n);
        let is_single = left.iter().product::<usize>() == m * k && right.iter().product::<usize>() == k * n;
        let (Some(of_a), Some(of_b)) = (self.segments[a].clone(), self.segments[b].clone()) else { return Ok(None) };
        if !is_single || m < 2 || n < 2 {
            return Ok(None);
        }
        let (Some(rows), Some(columns)) = (self.all_runs(&of_a, m, k)?, self.all_runs(&of_b, k, n)?) else {
            return Ok(None);
        };
        let mut made = Vec::new();
        for (x, of_rows) in &rows {
            for (y, of_columns) in &columns {
                let (of_rows, of_columns) = match (of_rows, of_columns) {
                    (Runs::Complete(rows), Runs::Across(columns)) => (rows, columns),
                    _ => return Ok(None),
                };
                let turned = |rows: usize, columns: usize| -> Vec<u32> {
                    (0..columns).flat_map(|c| (0..rows).map(move |r| (r * columns + c) as u32)).collect()
                };
                let (rows, columns) = (of_rows.len(), of_columns.len());
                let place = |row: usize, column: usize| (row * n + column) as u32;
                // The user's matrix must be the right operand, which all rows share.
                let is_turned = self.to.values[*x].side != Side::Pair && self.to.values[*y].side == Side::Pair;
                let (product, at) = if is_turned {
                    let (x, y) = (self.pick(*x, turned(rows, k))?, self.pick(*y, turned(k, columns))?);
                    let (x, y) = (self.table(x, k)?, self.table(y, columns)?);
                    let at = of_columns.iter().flat_map(|&column| of_rows.iter().map(move |&row| place(row, column)));
                    (self.to.matmul(y, x)?, at.collect())
                } else {
                    let (x, y) = (self.table(*x, rows)?, self.table(*y, k)?);
                    let at = of_rows.iter().flat_map(|&row| of_columns.iter().map(move |&column| place(row, column)));
                    (self.to.matmul(x, y)?, at.collect::<Arc<[u32]>>())
                };
                made.push(Segment { value: self.flat(product)?, at });
            }
        }
        self.is_any_apart |= rows.iter().chain(&columns).any(|(value, _)| self.origin(*value) == Origin::User);
        Ok(Some(made))
    }
}
