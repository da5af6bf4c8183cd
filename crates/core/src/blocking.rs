//! Guards against blocking calls on async worker threads: a blocked call there would stall every connection of the thread.

/// Marks a function that may wait for a disk, the network, a process or another thread. In builds with debug
/// assertions, such as tests, it aborts the process if the current thread is driving async tasks. A panic would not
/// suffice: it would become the error of one request or task, which perhaps no test checks.
#[track_caller]
pub fn may_block() {
    #[cfg(debug_assertions)]
    if drives_tasks() {
        ends(std::panic::Location::caller());
    }
}

/// Returns true if this thread drives tasks of an async runtime, so that blocking it would stall them. Returns false
/// inside `spawn_blocking` and `block_in_place`, which run their closure on a thread without tasks.
#[cfg(debug_assertions)]
fn drives_tasks() -> bool {
    // Only tokio knows whether a thread drives tasks: its blocking calls panic on such a thread before they wait. The
    // value was already sent, so this call does not wait.
    let (tell, reported) = tokio::sync::oneshot::channel();
    let _ = tell.send(());
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| reported.blocking_recv())).is_err()
}

#[cfg(debug_assertions)]
fn ends(caller: &std::panic::Location<'_>) -> ! {
    use std::io::Write as _;
    let trace = std::backtrace::Backtrace::force_capture();
    let _ = writeln!(
        std::io::stderr(),
        "{caller}: blocking call on an async worker thread; expected `spawn_blocking` or a dedicated thread\n{trace}"
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
