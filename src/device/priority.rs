//! Whose turn it is where threads want more cores than there are.

/// Lowers the priority of this thread, and of those that it starts, to a niceness of up to 19. Where that cannot be, nothing changes.
pub fn lower(niceness: i32) {
    // Linux knows priorities of threads; elsewhere this would be the whole process's.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::setpriority_process(None, niceness);
    #[cfg(not(target_os = "linux"))]
    let _ = niceness;
}
