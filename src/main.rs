//! The `sterling` program.

fn main() -> std::process::ExitCode {
    sterling::cli::run()
}
