//! Jobs over input files that many workers process without a coordinator.
//!
//! 1. A *job* ([`JobFolder`]) is a folder with settings ([`Purpose`]) and a list of input files. The settings are written
//!    once, as `_job.json`; a run with other settings or inputs is rejected.
//! 2. Each input file is a *unit*, which determines the names of its outputs. Outputs are written under a temporary name, synced
//!    and renamed, so an output is either complete or absent. A killed run therefore resumes at its unfinished units, and two
//!    workers that process the same unit write the same bytes.
//! 3. A processing engine such as Spark sends unit numbers to a worker, one per line ([`serve`]); no rows pass through it.

mod folder;
mod lines;
mod orders;

pub use folder::{JobFolder, Purpose, Unit};
pub use lines::next_line;
pub use orders::{checked, serve};
