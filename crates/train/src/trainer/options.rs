//! Options of a run.

use std::path::{Path, PathBuf};

use crate::hosts::Hosts;
use crate::lock::Lock;
use sterling_batch::ProblemLimit;
use sterling_core::error::{Error, Result};
use sterling_cuda::Device;

/// Options of a run.
#[derive(Clone, Debug)]
pub struct TrainOptions {
    /// Event files, folders of such files, or `-` for standard input.
    pub events: Vec<PathBuf>,
    /// Items file; none means the items file of the package.
    pub items: Option<PathBuf>,
    /// Working folder for checkpoints and rejected events.
    pub work: PathBuf,
    /// Number of passes over the events.
    pub epochs: u64,
    /// Size of the shuffle buffer in events; 0 keeps the order.
    pub shuffle: usize,
    /// Seed of the sampled negatives and of the shuffled order.
    pub seed: u64,
    /// Threads of a training step.
    pub threads: usize,
    /// GPU that holds the tables, looks them up and updates them; none means the CPU. Graphs run on the CPU.
    pub device: Option<Device>,
    /// Steps between checkpoints.
    pub checkpoint_steps: u64,
    /// Progressive validation of every n-th batch; 0 turns it off.
    pub judge: u64,
    /// Limit of rejected events.
    pub max_refused: ProblemLimit,
    /// Pairs of a table and an id that is removed from the table and gets no row during the run. Repeat them to resume the run.
    pub forget: Vec<(String, i64)>,
    /// Hosts that train together; none if this host trains alone.
    pub hosts: Option<Hosts>,
}

impl TrainOptions {
    /// Returns the default working folder of a run that writes or trains a package: `NAME.train` in the same folder.
    pub fn work_folder_for(package: &Path) -> PathBuf {
        let name = package.file_name().unwrap_or_default().to_string_lossy();
        package.with_file_name(format!("{name}.train"))
    }

    /// Checks that a run with these options may write a package to `out`: the path does not exist, or a run in the same working
    /// folder was killed after it had written `out`.
    ///
    /// # Errors
    /// `Conflict` with the path.
    pub fn check_out(&self, out: &Path) -> Result<()> {
        if !out.exists() || Lock::has_recorded(&self.work, out) {
            return Ok(());
        }
        Err(Error::conflict(format!("{}: it exists, expected a path that does not exist", out.display())))
    }

    /// Creates options with default values.
    pub fn new(events: Vec<PathBuf>, work: impl Into<PathBuf>) -> Self {
        TrainOptions {
            events,
            items: None,
            work: work.into(),
            epochs: 1,
            shuffle: 0,
            seed: 1,
            threads: 1,
            device: None,
            checkpoint_steps: 1000,
            judge: 1,
            max_refused: ProblemLimit::Percent(10.0),
            forget: Vec::new(),
            hosts: None,
        }
    }
}
