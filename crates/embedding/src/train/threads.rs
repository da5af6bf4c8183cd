//! Threads that divide the work of a step.

use rayon::prelude::*;

use sterling_core::error::{Error, Result};
use sterling_core::tasks;
use sterling_kernels::priority;

/// Threads of a training step; with one thread, the caller does all work.
#[derive(Debug)]
pub(super) struct Threads {
    pool: Option<rayon::ThreadPool>,
}

impl Threads {
    pub(super) fn new(count: usize) -> Result<Self> {
        if count == 0 {
            return Err(Error::invalid("field `threads`: got 0, expected at least 1"));
        }
        let pool = (count > 1).then(|| priority::pool(&tasks::LEARN, count)).transpose();
        Ok(Threads { pool: pool.map_err(|e| Error::overloaded(format!("cannot start {count} threads: {e}")))? })
    }

    pub(super) fn count(&self) -> usize {
        self.pool.as_ref().map_or(1, rayon::ThreadPool::current_num_threads)
    }

    /// Runs all tasks; returns their results in order.
    pub(super) fn run<T: Send, R: Send>(&self, tasks: Vec<T>, task: impl Fn(T) -> R + Sync + Send) -> Vec<R> {
        match &self.pool {
            None => tasks.into_iter().map(task).collect(),
            Some(pool) => pool.install(|| tasks.into_par_iter().with_max_len(1).map(task).collect()),
        }
    }
}
