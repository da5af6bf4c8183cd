//! Runs plans over the rows of a batch, one micro-batch after another, on one or several threads.

use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::dense::InputRows;
use crate::dense::exec::{self, Scratch};
use crate::dense::graph::Graph;
use crate::dense::steps::{Plan, Precision};
use crate::dense::{collapse, plan};
use sterling_core::error::Result;
use sterling_core::tasks;
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

/// Order of the workers: `next` is the index of the task whose `then` may run; `None` after a worker panicked.
struct Turn<'a, T> {
    next: Option<usize>,
    then: &'a mut (dyn FnMut(&mut T) + Send),
}

/// Wakes all waiting workers if this worker panics.
struct EndsOnPanic<'a, 'b, T> {
    turn: &'a Mutex<Turn<'b, T>>,
    changed: &'a Condvar,
}

impl<T> Drop for EndsOnPanic<'_, '_, T> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            lock(self.turn).next = None;
            self.changed.notify_all();
        }
    }
}

fn lock<'a, 'b, T>(turn: &'a Mutex<Turn<'b, T>>) -> MutexGuard<'a, Turn<'b, T>> {
    turn.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `count` tasks on one thread per worker. `then` is called with each task's worker in task order, so that sums have the
/// same bits for any number of threads.
///
/// # Errors
/// `Io` if a thread cannot be started.
pub(super) fn in_order<T: Send>(
    workers: &mut [T],
    count: usize,
    work: &(dyn Fn(usize, &mut T) + Sync),
    then: &mut (dyn FnMut(&mut T) + Send),
) -> Result<()> {
    let threads = workers.len().min(count);
    if threads <= 1 {
        for worker in workers.iter_mut().take(1) {
            for n in 0..count {
                work(n, worker);
                then(worker);
            }
        }
        return Ok(());
    }
    let (turn, changed) = (Mutex::new(Turn { next: Some(0), then }), Condvar::new());
    let (turn, changed) = (&turn, &changed);
    std::thread::scope(|scope| {
        for (first, worker) in workers.iter_mut().take(threads).enumerate() {
            let started = tasks::LEARN_GRAPH.start_in(scope, move || {
                let _ends = EndsOnPanic { turn, changed };
                for n in (first..count).step_by(threads) {
                    work(n, worker);
                    let mut now = lock(turn);
                    while now.next.is_some_and(|next| next != n) {
                        now = changed.wait(now).unwrap_or_else(PoisonError::into_inner);
                    }
                    if now.next.is_none() {
                        return;
                    }
                    (now.then)(worker);
                    now.next = Some(n + 1);
                    changed.notify_all();
                }
            });
            if let Err(e) = started {
                lock(turn).next = None;
                changed.notify_all();
                return Err(e);
            }
        }
        Ok(())
    })
}
