//! Whose turn it is where threads want more cores than there are.

/// The lowest niceness that there is.
const LAST: i32 = 19;

/// Lowers the priority of this thread, and of those that it starts, to a niceness of up to 19. Where that cannot be, nothing changes.
pub fn lower(niceness: i32) {
    // Linux knows priorities of threads; elsewhere this would be the whole process's.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::setpriority_process(None, niceness);
    #[cfg(not(target_os = "linux"))]
    let _ = niceness;
}

/// Has this thread, and those that it starts, run where a core would be idle. To the scheduler of Linux a core with nothing else
/// on it is an idle one, to which it brings a thread that wakes up; beside a thread that is only nice that one waits for a core.
pub fn idle() {
    lower(LAST);
    #[cfg(target_os = "linux")]
    {
        let none = libc::sched_param { sched_priority: 0 };
        // SAFETY: the thread is this one, and the parameters live through the call.
        let _ = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &none) };
    }
}
