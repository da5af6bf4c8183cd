//! The threads that graphs run on.

use std::sync::Arc;

use rten::{RunOptions, ThreadPool};

/// The threads that the graphs of one caller run on.
#[derive(Clone, Debug)]
pub struct Threads {
    pool: Arc<ThreadPool>,
}

impl Threads {
    /// So many threads of their own.
    pub fn new(count: usize) -> Self {
        Threads { pool: Arc::new(ThreadPool::with_num_threads(count)) }
    }

    /// Runs `f` on one of the threads: graphs that it runs on them then start without a change of thread.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        self.pool.run(f)
    }

    pub(super) fn options(&self) -> RunOptions {
        RunOptions::default().with_thread_pool(Some(self.pool.clone()))
    }
}
