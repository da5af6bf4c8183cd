//! The `sterling` program.

/// The C library gives the memory of a request back to the system after each, and takes it again for the next, page by page.
#[global_allocator]
static HEAP: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    sterling::cli::run()
}
