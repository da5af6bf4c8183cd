//! Signals whose default action hides an error.

/// Makes a write beyond the file size limit fail with an error, as any other write does. By default, such a write
/// raises a signal that ends the process without a message.
pub fn ignore_file_size_signal() {
    // SAFETY: no handler is installed, and ignoring a signal is sound in every thread.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}
