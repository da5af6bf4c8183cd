//! `sterling trial`: the child process of `sterling_snapshot::sandbox`, for this program only.

use std::path::PathBuf;
use std::time::Duration;

use sterling_core::error::Result;
use sterling_snapshot::sandbox::{Bounds, answer};

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
}

impl Trial {
    pub(super) fn run(self) -> Result<()> {
        let cpu = Duration::from_secs(self.cpu_seconds);
        let bounds = Bounds { memory_bytes: self.memory_bytes, cpu, ..Bounds::default() };
        answer(&self.folder, &bounds, &mut std::io::stdout().lock())
    }
}
