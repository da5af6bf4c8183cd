//! Calls that may block their thread. A thread that drives tasks of a runtime must make none: a disk or a network that does not answer
//! would hold up all of its connections.

/// Is called by what may wait for a disk, a network, a process or another thread. In a build with debug assertions, as that of the
/// tests is, it ends the process where the thread drives tasks at this moment: a panic would become the answer of one request or
/// the end of one task, where no test may look.
#[track_caller]
pub fn may_block() {
    #[cfg(debug_assertions)]
    if drives_tasks() {
        ends(std::panic::Location::caller());
    }
}

/// Whether this thread drives tasks of a runtime, so that none of these goes on while it waits: not so in `spawn_blocking`, and not
/// in `block_in_place`, before which the runtime gives the tasks to another thread.
#[cfg(debug_assertions)]
fn drives_tasks() -> bool {
    // Tokio alone knows: what blocks on purpose panics there before it waits, and the answer of this one is there already.
    let (tell, told) = tokio::sync::oneshot::channel();
    let _ = tell.send(());
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| told.blocking_recv())).is_err()
}

#[cfg(debug_assertions)]
fn ends(caller: &std::panic::Location<'_>) -> ! {
    use std::io::Write as _;
    let trace = std::backtrace::Backtrace::force_capture();
    let _ = writeln!(
        std::io::stderr(),
        "{caller}: a call that may block, on a thread that drives tasks; expected `spawn_blocking` or a thread of its own\n{trace}"
    );
    std::process::abort()
}

#[cfg(all(test, debug_assertions))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::drives_tasks;
    use tokio::runtime::Builder;

    #[test]
    fn only_threads_that_drive_tasks_must_not_block() {
        assert!(!drives_tasks());
        let several = Builder::new_multi_thread().worker_threads(2).build().unwrap();
        let spawned = several.spawn(async { (drives_tasks(), tokio::task::block_in_place(drives_tasks)) });
        assert_eq!(several.block_on(spawned).unwrap(), (true, false));
        assert!(!several.block_on(several.spawn_blocking(drives_tasks)).unwrap());
        let one = Builder::new_current_thread().build().unwrap();
        assert!(one.block_on(async { drives_tasks() }) && !drives_tasks());
    }
}
