//! The threads and runtimes of the program. Each kind has one constant here, and nothing else starts threads, so that the table
//! in `docs/internals/architecture.md` is complete; `tests/tidy` compares the two. Priorities are set by
//! `sterling_kernels::priority`, which also builds the thread pools.

use std::io;
use std::ops::Deref;
use std::thread::{self, JoinHandle, Scope, ScopedJoinHandle};

use tokio::runtime::Builder;

use crate::error::{Error, Result};

/// Kind of thread. The name of a thread is at most 15 bytes long, which is what Linux shows in `top -H`.
///
/// ```
/// use sterling_core::tasks;
///
/// let answer = tasks::LOAD.start(|| 6 * 7)?;
/// assert_eq!(answer.join().ok(), Some(42));
/// # Ok::<(), sterling_core::error::Error>(())
/// ```
#[derive(Debug)]
pub struct Task {
    name: &'static str,
    stack_bytes: Option<usize>,
}

/// Declares the kinds of threads: constant, name, purpose.
macro_rules! tasks {
    ($($task:ident = $name:literal $(with $stack:literal bytes of stack)?, $doc:literal;)*) => {
        $(
            #[doc = $doc]
            pub const $task: Task = {
                assert!($name.len() <= 15);
                #[allow(unused_mut, unused_assignments)]
                let mut stack_bytes = None;
                $(stack_bytes = Some($stack);)?
                Task { name: $name, stack_bytes }
            };
        )*
    };
}

tasks! {
    SERVER = "sterling", "Server that a program embeds.";
    HTTP = "http", "Connections and handlers of a server or router; slow calls on the blocking threads of this runtime.";
    WRITERS = "writers", "Chunks of long answers.";
    KEYS = "keys", "Reload of keys and certificates.";
    TRACES = "traces", "Export of spans.";
    PEER_ROWS = "peer-rows", "Rows of other hosts.";
    PASS = "pass", "Forward pass.";
    FETCH = "fetch", "Remote rows of admitted requests.";
    WATCH = "watch", "Replacement of hanging workers of the engine.";
    DEVICE = "device", "Uploads to a GPU, and release of its memory.";
    STORE = "store", "Polls of the store.";
    STORE_CHECK = "store-check", "First request to a store at startup.";
    LOAD = "load", "Load and warm-up of a version.";
    UPDATES = "updates", "Updates of one version.";
    JOIN = "join", "Join of segments.";
    COMPACTOR = "compactor", "Decision when to merge.";
    MERGE = "merge", "Merge of a version with its updates.";
    JOURNAL = "journal", "Writes of a write-ahead log.";
    STREAM = "stream", "Streams of NATS JetStream.";
    BUCKET = "bucket", "Requests to a bucket.";
    LEASE = "lease", "Renewal of a publisher's lease.";
    REMOTE_ROWS = "remote-rows", "Rows of a Redis Cluster.";
    GRAPH = "graph" with 67_108_864 bytes of stack, "Parser of a graph, which recurses along it.";
    SANDBOX = "sandbox", "Output of a sandbox process.";
    READ = "read", "Rows of files that are scored.";
    SCORE = "score", "Offline scoring.";
    EVENTS = "events", "Events of a training run.";
    LEARN = "learn", "Tables, graphs and loss of a training step.";
    LEARN_FETCH = "learn-fetch", "Remote rows of a training step.";
    LEARN_SEND = "learn-send", "Messages to another host of a training run.";
    PLANNER = "planner", "Measured lookups of the planner.";
    PACE = "pace", "Send times of the load generator.";
    ANN_BENCH = "ann-bench", "Searches of `ann-bench`.";
    CALLS = "calls", "Calls of a command, on its own thread.";
}

impl Task {
    /// Returns the name of the threads.
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Starts a thread.
    ///
    /// # Errors
    /// `Io` if the system starts no more threads.
    pub fn start<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<JoinHandle<T>> {
        self.builder(self.name.into()).spawn(work).map_err(|e| self.denied(e))
    }

    /// Starts one of several threads of this kind; the thread's name ends with `number`.
    ///
    /// # Errors
    /// As [`Task::start`].
    pub fn start_one<T: Send + 'static>(
        &self,
        number: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<JoinHandle<T>> {
        self.builder(format!("{}-{number}", self.name)).spawn(work).map_err(|e| self.denied(e))
    }

    /// Starts a thread that ends within a scope.
    ///
    /// # Errors
    /// As [`Task::start`].
    pub fn start_in<'scope, T: Send + 'scope>(
        &self,
        scope: &'scope Scope<'scope, '_>,
        work: impl FnOnce() -> T + Send + 'scope,
    ) -> Result<ScopedJoinHandle<'scope, T>> {
        self.builder(self.name.into()).spawn_scoped(scope, work).map_err(|e| self.denied(e))
    }

    /// Starts a runtime of several threads, one per core unless `set` says otherwise.
    ///
    /// # Errors
    /// As [`Task::start`].
    pub fn runtime(&self, set: impl FnOnce(&mut Builder) -> &mut Builder) -> Result<Runtime> {
        self.build(&mut Builder::new_multi_thread(), set)
    }

    /// Makes a runtime that runs its tasks on the calling thread.
    ///
    /// # Errors
    /// `Io` if the system denies the resources of the runtime.
    pub fn runtime_here(&self, set: impl FnOnce(&mut Builder) -> &mut Builder) -> Result<Runtime> {
        self.build(&mut Builder::new_current_thread(), set)
    }

    fn build(&self, builder: &mut Builder, set: impl FnOnce(&mut Builder) -> &mut Builder) -> Result<Runtime> {
        let built = set(builder.thread_name(self.name)).build();
        built.map(|runtime| Runtime(Some(runtime))).map_err(|e| self.denied(e))
    }

    fn builder(&self, name: String) -> thread::Builder {
        let builder = thread::Builder::new().name(name);
        self.stack_bytes.into_iter().fold(builder, thread::Builder::stack_size)
    }

    fn denied(&self, error: io::Error) -> Error {
        Error::io(format!("cannot start a thread: {}", self.name), error)
    }
}

/// Runtime whose threads are not awaited when it is dropped: its last owner may be a task of another runtime, which must not
/// block.
#[derive(Debug)]
pub struct Runtime(Option<tokio::runtime::Runtime>);

impl Deref for Runtime {
    type Target = tokio::runtime::Runtime;

    fn deref(&self) -> &Self::Target {
        self.0.as_ref().expect("the runtime is only taken on drop")
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(tokio::runtime::Runtime::shutdown_background);
    }
}

/// Starts blocking work at once, on the blocking threads of the runtime that drives the caller. The work runs to its
/// end even if its result is no longer awaited.
///
/// # Errors
/// Errors of `work`; `Internal` if `work` panics.
pub fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> impl Future<Output = Result<T>> + Send + 'static {
    let done = tokio::task::spawn_blocking(work);
    async { done.await.unwrap_or_else(|e| Err(Error::internal(format!("a blocking call panicked: {e}")))) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn threads_have_the_name_of_their_task() {
        let name = || thread::current().name().map(str::to_owned);
        assert_eq!(LEASE.start(name).unwrap().join().unwrap().unwrap(), "lease");
        assert_eq!(PASS.start_one(3, name).unwrap().join().unwrap().unwrap(), "pass-3");
        let scoped = thread::scope(|scope| Ok::<_, Error>(GRAPH.start_in(scope, name)?.join().unwrap()));
        assert_eq!(scoped.unwrap().unwrap(), "graph");
        let runtime = BUCKET.runtime(|builder| builder.worker_threads(2)).unwrap();
        assert_eq!(runtime.metrics().num_workers(), 2);
        assert_eq!(runtime.block_on(runtime.spawn(async move { name() })).unwrap().unwrap(), "bucket");
        assert_eq!(runtime.block_on(async { blocking(move || Ok(name())).await }).unwrap().unwrap(), "bucket");
    }

    #[test]
    fn a_stack_of_its_size_holds_what_no_other_thread_could() {
        fn depth(left: usize) -> u8 {
            let room = std::hint::black_box([left as u8; 1 << 10]);
            if left == 0 { room[0] } else { depth(left - 1).wrapping_add(std::hint::black_box(room)[1 << 9]) }
        }
        // Uses at least 4 MB of stack; the default of a thread is 2 MB.
        GRAPH.start(|| depth(4 << 10)).unwrap().join().unwrap();
    }

    #[test]
    fn a_runtime_is_dropped_within_another_one_and_a_panic_is_an_error() {
        let outer = CALLS.runtime_here(|builder| builder).unwrap();
        outer.block_on(async {
            drop(STREAM.runtime(|builder| builder.worker_threads(1)).unwrap());
            let error = blocking(|| -> Result<()> { panic!("at the disk") }).await.unwrap_err();
            assert!(error.to_string().contains("panicked"), "{error}");
        });
    }
}
