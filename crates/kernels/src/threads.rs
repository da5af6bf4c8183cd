//! Threads that divide the work of a training step.

use std::sync::Arc;

use rayon::prelude::*;

use crate::priority;
use sterling_core::error::{Error, Result};
use sterling_core::tasks;

/// Tasks per thread of evenly split work: a thread finishes at most one task later than the others.
const TASKS_PER_THREAD: usize = 4;

/// Threads of a training step, shared by its tables, graphs and losses; with one thread, which is the default,
/// the caller does all work.
///
/// ```
/// use sterling_kernels::threads::Threads;
///
/// let squares = Threads::new(2)?.run(vec![1, 2, 3], |n| n * n);
/// assert_eq!(squares, [1, 4, 9]);
/// # Ok::<(), sterling_core::error::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Threads {
    pool: Option<Arc<rayon::ThreadPool>>,
}

impl Threads {
    /// Starts `count` threads, or none for a count of 1.
    ///
    /// # Errors
    /// `Invalid` for 0 threads; `Overloaded` if threads cannot be started.
    pub fn new(count: usize) -> Result<Self> {
        if count == 0 {
            return Err(Error::invalid("field `threads`: got 0, expected at least 1"));
        }
        let pool = (count > 1).then(|| priority::pool(&tasks::LEARN, count).map(Arc::new)).transpose();
        Ok(Threads { pool: pool.map_err(|e| Error::overloaded(format!("cannot start {count} threads: {e}")))? })
    }

    /// Returns the number of threads.
    pub fn count(&self) -> usize {
        self.pool.as_ref().map_or(1, |pool| pool.current_num_threads())
    }

    /// Returns the number of tasks into which work of equal parts is divided: 1 for one thread.
    pub fn tasks(&self) -> usize {
        if self.count() == 1 { 1 } else { self.count() * TASKS_PER_THREAD }
    }

    /// Runs `work` on one of the threads, so that the tasks that it runs start without a thread switch. Several calls at a time must
    /// not wait for each other: a thread that waits for its tasks may take over another call.
    pub fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match &self.pool {
            None => work(),
            Some(pool) => pool.install(work),
        }
    }

    /// Runs all tasks; returns their results in order.
    pub fn run<T: Send, R: Send>(&self, tasks: Vec<T>, task: impl Fn(T) -> R + Sync + Send) -> Vec<R> {
        match &self.pool {
            None => tasks.into_iter().map(task).collect(),
            Some(pool) => pool.install(|| tasks.into_par_iter().with_max_len(1).map(task).collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn results_have_the_order_of_their_tasks() {
        assert!(Threads::new(0).is_err());
        for count in [1, 2, 5] {
            let threads = Threads::new(count).unwrap();
            assert_eq!(threads.count(), count);
            let expected: Vec<usize> = (0..100).map(|n| n * n).collect();
            assert_eq!(threads.run((0..100).collect(), |n: usize| n * n), expected);
        }
    }
}
