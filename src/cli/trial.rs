//! `sterling trial`: the child process of `sterling_snapshot::sandbox`, for this program only; arguments for its limits.

use std::path::PathBuf;
use std::time::Duration;

use super::size::size;
use sterling_core::error::Result;
use sterling_snapshot::sandbox::{Bounds, ProcessSandbox, SandboxMode, answer, end_with_input};

/// Arguments of commands that validate graphs in a sandbox process.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct SandboxArgs {
    /// Memory limit for the validation of graphs, in addition to eight times their files
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "2GiB")]
    sandbox_memory: u64,
    /// CPU time limit for the validation of graphs, in seconds
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400), default_value_t = 60)]
    sandbox_seconds: u64,
}

impl SandboxArgs {
    /// Returns the validation of graphs within these limits.
    pub(super) fn trials(&self) -> Result<SandboxMode> {
        let bounds = Bounds { memory_bytes: self.sandbox_memory, ..Bounds::default() };
        let bounds = bounds.with_cpu(Duration::from_secs(self.sandbox_seconds));
        Ok(SandboxMode::ProcessSandbox(ProcessSandbox { bounds, ..ProcessSandbox::of_this_program()? }))
    }
}

/// Arguments of `sterling trial`.
#[derive(Debug, clap::Args)]
pub(super) struct Trial {
    /// Model package or version
    folder: PathBuf,
    /// Memory limit, in addition to the files
    #[arg(long)]
    memory_bytes: u64,
    /// CPU time limit
    #[arg(long)]
    cpu_seconds: u64,
    /// End when the standard input ends, as it does when the process that started the validation ends
    #[arg(long)]
    until_input_ends: bool,
}

impl Trial {
    pub(super) fn run(self) -> Result<()> {
        if self.until_input_ends {
            end_with_input()?;
        }
        let cpu = Duration::from_secs(self.cpu_seconds);
        let bounds = Bounds { memory_bytes: self.memory_bytes, cpu, ..Bounds::default() };
        answer(&self.folder, &bounds, &mut std::io::stdout().lock())
    }
}
