//! A graph that is extended by the gradients of its values, from the last value to the first.

use crate::dense::graph::Graph;
use crate::dense::ir::{Id, Side, Value};
use sterling_core::error::Result;
use sterling_kernels::cpu::dense::{Binary, Fold};

/// A sum over rows (`adjoint::Sum`), and the shared value to whose gradient it contributes.
pub(super) struct SumOf {
    pub(super) value: Id,
    pub(super) left: Option<Id>,
    pub(super) right: Id,
    pub(super) runs: usize,
    pub(super) depth: usize,
    pub(super) columns: usize,
}

/// A graph with the gradients that were added so far.
pub(super) struct Reverse {
    pub(super) graph: Graph,
    active: Vec<bool>,
    /// Gradient of each row value, in the shape of the value.
    pub(super) gradients: Vec<Option<Id>>,
    /// Contributions to the gradients of shared values.
    pub(super) sums: Vec<SumOf>,
}

impl Reverse {
    pub(super) fn new(graph: Graph, active: Vec<bool>) -> Self {
        Reverse { gradients: vec![None; active.len()], graph, active, sums: Vec::new() }
    }

    /// Returns whether a value is the same for all rows.
    pub(super) fn is_shared(&self, id: Id) -> bool {
        self.graph.values[id].side != Side::Pair
    }

    pub(super) fn is_active(&self, id: Id) -> bool {
        self.active[id]
    }

    /// Adds `gradient` to the gradient of a value. If the value was broadcast to the shape of `gradient`, sums over the
    /// broadcast axes.
    pub(super) fn give(&mut self, to: Id, gradient: Id) -> Result<()> {
        if !self.active[to] {
            return Ok(());
        }
        let Value { shape, rows, .. } = self.graph.values[to].clone();
        let is_shared = self.is_shared(to);
        let from = self.graph.shape(gradient).to_vec();
        let ahead = from.len() - shape.len();
        let is_repeated = |axis: usize| axis < ahead || (shape[axis - ahead] == 1 && from[axis] != 1);
        let repeated: Vec<usize> = (0..from.len()).filter(|&axis| is_repeated(axis) && from[axis] != 1).collect();
        let mut given = gradient;
        if is_shared {
            // The sum is over all rows, so the row axis need not be tracked any more.
            given = self.graph.reshape(given, from.clone(), None)?;
            let leading = repeated.last().map_or(0, |&axis| axis + 1);
            let runs: usize = from[..leading].iter().product();
            if from[leading..].iter().product::<usize>() == shape.iter().product::<usize>() {
                let columns = from[leading..].iter().product();
                self.sums.push(SumOf { value: to, left: None, right: given, runs, depth: 1, columns });
                return Ok(());
            }
        }
        if !repeated.is_empty() {
            given = self.graph.fold(Fold::Sum, given, &repeated)?;
        }
        given = self.graph.reshape(given, shape, rows)?;
        if is_shared {
            let columns = self.graph.values[to].count();
            self.sums.push(SumOf { value: to, left: None, right: given, runs: 1, depth: 1, columns });
            return Ok(());
        }
        self.gradients[to] = Some(match self.gradients[to] {
            Some(before) => self.graph.binary(Binary::Add, before, given)?,
            None => given,
        });
        Ok(())
    }

    /// Adds `leftᵀ right` to the gradient of a shared matrix.
    pub(super) fn give_outer(&mut self, to: Id, left: Id, right: Id) {
        let last = |id: Id| self.graph.shape(id).last().copied().unwrap_or(1);
        let (depth, columns) = (last(left), last(right));
        let runs = self.graph.values[left].count() / depth;
        self.sums.push(SumOf { value: to, left: Some(left), right, runs, depth, columns });
    }
}
