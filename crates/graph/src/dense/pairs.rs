//! bf16 products: selects the products, and converts their factors to bf16 pairs. Products with the same factor share
//! the pairs.

use super::ir::{Id, Op, Side};
use super::plan::Planner;
use super::steps::{BufferRange, Factor, Memory, Work};
use sterling_core::error::Result;
use sterling_kernels::cpu::dense::{Form, Lines, PANEL, PairRows, STEP, pair_rows};

/// Minimum columns and depth of a bf16 product; for smaller products, rounding the factors costs more than it saves.
const NARROW_MIN: usize = 32;

impl Planner<'_> {
    /// Finds the products to compute in bf16, and among them those whose results are only read by such products.
    pub(super) fn narrow(&mut self, needed: &[bool]) {
        let outputs = self.outputs();
        let live = || (0..needed.len()).filter(|&id| needed[id] && self.alias[id].is_none());
        for id in live().collect::<Vec<_>>() {
            if let Op::MatMul(a, b) = self.graph.values[id].op {
                self.is_narrow[id] = self.is_wide_for_user(id, a, b);
                continue;
            }
            let Op::Linear { parts, .. } = &self.graph.values[id].op else { continue };
            let is_wide = self.graph.values[id].count() >= NARROW_MIN;
            let is_deep = parts.iter().any(|(_, m)| self.graph.shape(*m)[0] >= NARROW_MIN);
            self.is_narrow[id] = is_wide && is_deep && !outputs.contains(&id);
        }
        let live = || (0..needed.len()).filter(|&id| needed[id] && self.alias[id].is_none());
        let is_linear = |id: Id| matches!(self.graph.values[id].op, Op::Linear { .. });
        let mut is_read_alone: Vec<bool> = (0..needed.len()).map(|id| self.is_narrow[id] && is_linear(id)).collect();
        for reader in live() {
            let (rows, others): (Vec<Id>, Vec<Id>) = match &self.graph.values[reader].op {
                Op::Linear { parts, bias } => {
                    (parts.iter().map(|(x, _)| *x).collect(), parts.iter().map(|(_, m)| *m).chain(*bias).collect())
                }
                _ => (Vec::new(), self.operands(reader)),
            };
            let rows = rows.into_iter().filter(|_| !self.is_narrow[reader]);
            rows.chain(others).for_each(|id| is_read_alone[self.root(id)] = false);
        }
        self.is_paired = is_read_alone;
    }

    /// Returns true for a product of many user rows with a constant matrix whose depth is a multiple of `STEP`. The
    /// result of such a product becomes a matrix of row products, whose factors are rounded anyway.
    fn is_wide_for_user(&self, id: Id, a: Id, b: Id) -> bool {
        let (left, right) = (self.graph.shape(a), self.graph.shape(b));
        let [.., k, n] = right else { return false };
        let runs = left.iter().product::<usize>() / (*k).max(1);
        self.graph.values[id].side == Side::User
            && self.graph.constant(b).is_some()
            && right.iter().product::<usize>() == k * n
            && k.is_multiple_of(2 * STEP)
            && runs.min(*n) >= NARROW_MIN
    }

    /// Returns the factors of a product as pairs. Rows that are not pairs yet are concatenated to reduce zero padding,
    /// separately for constant matrices and for matrices of the user.
    pub(super) fn narrow_factors(&mut self, parts: &[(Id, Id)]) -> Result<Vec<Factor>> {
        let (paired, single): (Vec<_>, Vec<_>) = parts.iter().partition(|(x, _)| self.is_paired[self.root(*x)]);
        let (constant, of_user): (Vec<_>, Vec<_>) =
            single.into_iter().partition(|(_, matrix)| self.graph.constant(*matrix).is_some());
        let together = [constant, of_user].into_iter().filter(|parts| !parts.is_empty());
        let groups: Vec<Vec<(Id, Id)>> = paired.into_iter().map(|part| vec![part]).chain(together).collect();
        groups.iter().map(|parts| self.narrow_factor(parts)).collect()
    }

    /// Concatenates the factors' rows and stacks their matrices in the format of pairs, converting rows if needed.
    fn narrow_factor(&mut self, parts: &[(Id, Id)]) -> Result<Factor> {
        let room = |planner: &Self, matrix: Id| Form::Pairs.room(planner.graph.shape(matrix)[0]);
        let depth: usize = parts.iter().map(|(_, matrix)| room(self, *matrix)).sum();
        let all = depth.next_multiple_of(STEP);
        let roots: Vec<Id> = parts.iter().map(|(x, _)| self.root(*x)).collect();
        let rows = match self.pairs.get(&roots) {
            _ if self.is_paired[roots[0]] => self.place(parts[0].0)?,
            Some(&rows) => rows,
            None => {
                let rows = self.buffer(Side::Pair, all);
                let mut first = 0;
                for &(x, matrix) in parts {
                    let (a, count) = (self.place(x)?, self.graph.shape(matrix)[0]);
                    self.step(rows, Work::Narrow { a, count, first });
                    first += room(self, matrix);
                }
                self.pairs.insert(roots, rows);
                rows
            }
        };
        let matrices: Vec<Id> = parts.iter().map(|(_, matrix)| *matrix).collect();
        let matrix = match self.pairs.get(&matrices) {
            Some(&packed) => packed,
            None => {
                let packed = self.pack_pairs(&matrices, all)?;
                self.pairs.insert(matrices, packed);
                packed
            }
        };
        Ok(Factor { rows, depth, matrix, row_stride: PANEL, panel_stride: all * PANEL })
    }

    /// Returns the factor with the rows `[runs, k]` of a user value and a constant matrix `[k, n]`, both as pairs.
    pub(super) fn narrow_rows(&mut self, a: Id, matrix: Id, [runs, k, n]: [usize; 3]) -> Result<Factor> {
        let (depth, from) = (Form::Pairs.room(k), self.place(a)?);
        let rows = self.buffer(Side::User, runs * depth);
        self.step(rows, Work::Narrow { a: from, count: runs * k, first: 0 });
        let mut packed = Lines::new(depth * n.next_multiple_of(PANEL));
        if let Some(numbers) = self.graph.constant(matrix) {
            pair_rows(numbers, k, n, PairRows { all: depth, first: 0 }, packed.numbers_mut());
        }
        let matrix = BufferRange { memory: Memory::Constant(self.constant(packed)), offset: 0 };
        Ok(Factor { rows, depth, matrix, row_stride: PANEL, panel_stride: depth * PANEL })
    }

    /// Stacks matrices in panels of `all` pairs. The matrices are all constant, or all computed once per request.
    fn pack_pairs(&mut self, matrices: &[Id], all: usize) -> Result<BufferRange> {
        let columns = self.graph.shape(matrices[0])[1];
        let count = all * columns.next_multiple_of(PANEL);
        let (mut constants, mut place, mut first) = (Lines::new(count), None, 0);
        for &matrix in matrices {
            let (depth, rows) = (self.graph.shape(matrix)[0], PairRows { all, first });
            match self.graph.constant(matrix) {
                Some(numbers) => pair_rows(numbers, depth, columns, rows, constants.numbers_mut()),
                None => {
                    let a = self.place(matrix)?;
                    let packed = *place.get_or_insert_with(|| self.buffer(Side::User, count));
                    self.step(packed, Work::PackNarrow { a, depth, columns, rows });
                }
            }
            first += Form::Pairs.room(depth);
        }
        let constant =
            |planner: &mut Self| BufferRange { memory: Memory::Constant(planner.constant(constants)), offset: 0 };
        Ok(place.unwrap_or_else(|| constant(self)))
    }
}
