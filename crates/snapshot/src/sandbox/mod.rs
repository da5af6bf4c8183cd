//! Sandbox validation: runs every graph of a model with several batch sizes before the version may serve.
//!
//! A graph that passes all static checks may still fail for some batch sizes, exceed memory, run for minutes or crash the process.
//! Each graph is therefore run once before publication, through the code that serves (`rows`):
//!
//! 1. In a child process ([`SandboxMode::ProcessSandbox`]) whose memory and time the operating system limits. Any failure rejects
//!    the graph, with its name and the batch size. Outputs are compared with an independent reference evaluation of the file
//!    (`oracle`) on varied rows (`samples`), including edge cases and rows without features, alone and in batches. A graph whose
//!    result differs from the reference is rejected (`compare`). Graphs in int8 are compared in f32, and then with themselves in
//!    f32 (`quantized`).
//! 2. Over the items to be published ([`score_items`]), for failures that only real numbers cause. Items that are added later are
//!    checked one by one ([`ColumnCheck`]).
//!
//! The validation holds for all requests because of two rules of `sterling_graph::tower`: tensor sizes depend on the number of rows
//! alone, and the fallback runtime never gets more rows than were validated. A version published by an older program without this
//! validation is validated when it is loaded.

mod child;
mod columns;
mod compare;
#[cfg(test)]
mod graphs;
mod items;
mod locate;
mod oracle;
mod quantized;
mod rows;
mod samples;
mod validate;

use std::path::Path;

use sterling_core::error::Result;

pub use child::{Bounds, ProcessSandbox, answer, end_with_input};
pub use columns::{ColumnCheck, InvalidNumber};
pub use items::score_items;

/// Process in which graphs are validated.
#[derive(Clone, Debug, Default)]
pub enum SandboxMode {
    /// Validates in this process, which a graph may crash; for trusted packages.
    #[default]
    Here,
    /// Validates in a child process with resource limits.
    ProcessSandbox(ProcessSandbox),
}

impl SandboxMode {
    /// Validates the graphs of the package or version in `folder`.
    ///
    /// # Errors
    /// `Invalid` with the graph and the failed step; as `crate::model::Package::open`; `Io` if no process can be started.
    pub fn run(&self, folder: &Path) -> Result<()> {
        match self {
            SandboxMode::Here => validate::run(folder, &|reported| match reported {
                rows::ValidationProgress::NotCompared(what) => tracing::warn!("{what}"),
                rows::ValidationProgress::Measured(what) => tracing::info!("{what}"),
                rows::ValidationProgress::Next(_) => {}
            }),
            SandboxMode::ProcessSandbox(apart) => apart.run(folder),
        }
    }
}
