//! Thread pool that runs graphs.

use std::sync::Arc;

use rten::{RunOptions, ThreadPool};

/// Threads that run the graphs of one caller.
#[derive(Clone, Debug)]
pub struct Threads {
    pool: Arc<ThreadPool>,
}

impl Threads {
    /// Creates a pool of `count` threads.
    pub fn new(count: usize) -> Self {
        Threads { pool: Arc::new(ThreadPool::with_num_threads(count)) }
    }

    /// Runs `f` on one of the threads, so that the graphs that `f` runs start without a thread switch.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        self.pool.run(f)
    }

    pub(super) fn options(&self) -> RunOptions {
        RunOptions::default().with_thread_pool(Some(self.pool.clone()))
    }
}
