//! Runs plans over the rows of a micro-batch.

use std::ops::Range;

use crate::dense::InputRows;
use crate::dense::exec::{self, Scratch};
use crate::dense::graph::Graph;
use crate::dense::steps::{Plan, Precision};
use crate::dense::{collapse, plan};
use sterling_core::error::Result;
use sterling_kernels::cpu::Kernels;

/// Number of rows whose gradients are summed before the sum is added to the sums of other micro-batches.
pub const MICRO_BATCH: usize = 64;

/// A graph compiled to run over complete micro-batches.
#[derive(Clone, Debug)]
pub(super) struct Pass {
    plan: Plan,
    kernels: Kernels,
}

/// Elements of an output for a block of rows, and the stride between rows.
pub(super) type Rows<'a> = (&'a [f32], usize);

/// Outputs of a pass for a block of rows.
#[derive(Clone, Copy)]
pub(super) struct Outputs<'a> {
    plan: &'a Plan,
    scratch: &'a Scratch,
}

impl<'a> Outputs<'a> {
    /// Returns output number `n` of the graph.
    pub(super) fn get(&self, n: usize) -> Rows<'a> {
        exec::output(self.plan, n, self.scratch)
    }
}

impl Pass {
    /// Compiles a graph that runs once per row.
    ///
    /// # Errors
    /// `Unsupported` if an output is the same for all rows.
    pub(super) fn of_rows(graph: &Graph, kernels: Kernels) -> Result<Self> {
        let mut plan = plan::plan(&collapse::collapse(graph, false)?, Precision::F32, false)?;
        // The block size must divide the micro-batch.
        plan.block_rows = 1 << plan.block_rows.min(MICRO_BATCH).ilog2();
        Ok(Pass { plan, kernels })
    }

    /// Compiles a graph that runs once per batch.
    ///
    /// # Errors
    /// As [`Pass::of_rows`].
    pub(super) fn of_one_row(graph: &Graph, kernels: Kernels) -> Result<Self> {
        Ok(Pass { plan: Plan { block_rows: 1, ..plan::plan(graph, Precision::F32, false)? }, kernels })
    }

    /// Sets the block size.
    #[cfg(test)]
    pub(super) fn set_block(&mut self, rows: usize) {
        self.plan.block_rows = rows;
    }

    /// Computes the values that all rows share; must be called before [`Pass::run`].
    pub(super) fn start(&self, shared: &[&[f32]], scratch: &mut Scratch) {
        exec::start(&self.plan, self.kernels, shared, scratch);
    }

    /// Runs over rows in blocks; `fill` writes the inputs of a block, and `done` receives the block's rows and outputs.
    pub(super) fn run(
        &self,
        rows: Range<usize>,
        scratch: &mut Scratch,
        fill: &dyn Fn(InputRows<'_>),
        done: &mut dyn FnMut(Range<usize>, Outputs<'_>),
    ) {
        for first in rows.clone().step_by(self.plan.block_rows) {
            let block = first..rows.end.min(first + self.plan.block_rows);
            let (numbers, stride) = exec::given(&self.plan, scratch);
            fill(InputRows { rows: block.clone(), numbers, stride, width: stride });
            exec::block(&self.plan, self.kernels, block.len(), scratch);
            done(block, Outputs { plan: &self.plan, scratch });
        }
    }
}
