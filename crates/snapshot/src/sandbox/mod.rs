//! Trials: every graph of a model runs, at several sizes, before anybody is promised an answer.
//!
//! A graph that passes all checks of its file may still fail for some numbers of rows, need more memory than there is, run for
//! minutes or end the process. So it runs once before it is published, through the code that serves (`rows`):
//!
//! 1. In a process apart ([`Trials::Apart`]), whose memory and time are bounded by the system: whatever happens there is a
//!    refusal with the graph and the number of rows it was at.
//!    What comes out is compared with an independent evaluation of the file (`oracle`) on rows that differ (`samples`), edges and
//!    rows that bring nothing among them, alone and in batches: a graph that is answered otherwise is refused (`compare`).
//! 2. Over items as they are published ([`score_items`]), for what only real numbers show.
//!
//! That a trial speaks for all requests is due to `sterling_graph::tower`: sizes follow from the number of rows alone, and no run of the
//! runtime takes more rows than were tried. A version that says no such trial, for an older program published it, has it
//! when it is loaded.

mod apart;
mod compare;
#[cfg(test)]
mod graphs;
mod locate;
mod oracle;
mod rows;
mod samples;

use std::path::Path;

use sterling_core::error::Result;

pub use apart::{Apart, Bounds, answer};
pub use rows::score_items;

/// Where graphs are tried.
#[derive(Clone, Debug, Default)]
pub enum Trials {
    /// In this process, which a graph may end: for packages of one's own.
    #[default]
    Here,
    /// In a process apart.
    Apart(Apart),
}

impl Trials {
    /// Runs the graphs of the package or version in `folder`.
    ///
    /// # Errors
    /// `Invalid` with the graph and what it was at; as `crate::model::Package::open`; `Io` where no process can be had.
    pub fn run(&self, folder: &Path) -> Result<()> {
        match self {
            Trials::Here => rows::run(folder, &|told| {
                if let rows::Told::NotCompared(what) = told {
                    tracing::warn!("{what}");
                }
            }),
            Trials::Apart(apart) => apart.run(folder),
        }
    }
}
