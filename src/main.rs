//! The `sterling` program.

/// Allocator mimalloc: the C library's allocator would return the memory of each request to the system, and fault it in again page
/// by page for the next request.
#[global_allocator]
static HEAP: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    sterling::cli::run()
}
