//! What is asked of a publication, and what it tells while it runs.

use std::path::{Path, PathBuf};

use super::budget::MemoryPlan;
use super::remote::Remote;
use sterling_core::error::{Error, Result};
use sterling_core::limits::SHARDS_MAX;
use sterling_index::ivf;
use sterling_snapshot::Recipe;
use sterling_snapshot::sandbox::Trials;

/// What is published.
#[derive(Clone, Debug, Default)]
pub struct Publish {
    /// The model package; without one the model is embedding-only and called `name`.
    pub package: Option<PathBuf>,
    /// The name of an embedding-only model.
    pub name: Option<String>,
    /// The item file; a package's own `items.parquet` or `items.jsonl` where it is not given. Not needed with [`Vectors::Faiss`].
    pub items: Option<PathBuf>,
    /// Where the items were embedded and assigned in parts ([`super::parts`]); [`super::parts::publication`] tells all that is asked of
    /// them.
    pub parts: Option<PathBuf>,
    /// Vectors beside the item file.
    pub vectors: Option<Vectors>,
    /// Queries to calibrate with, `.npy` or a `:retrieve` body a line; a package's own `queries.jsonl` where it is not given,
    /// else perturbed items.
    pub queries: Option<PathBuf>,
    /// The position of the last update of the model that the items contain, of a version that is cut that of each shard: updates
    /// after it are applied when it is loaded. None where the items contain no updates.
    pub positions: Vec<u64>,
    /// How the index is built.
    pub recipe: Recipe,
    /// Cuts the version into so many document shards.
    pub shards: Option<u32>,
    /// The cluster that gets rows of the tables too.
    pub remote: Option<Remote>,
    /// Where graphs are tried.
    pub trials: Trials,
    /// Bytes of memory that the publication may take; most of what is free where it is not given.
    pub memory_bytes: Option<u64>,
}

impl Publish {
    /// Refuses what goes not together.
    pub(super) fn check(&self) -> Result<()> {
        match self.shards {
            Some(shards) if shards == 0 || shards > SHARDS_MAX => {
                Err(Error::invalid(format!("shards: got {shards}, expected 1 to {SHARDS_MAX}")))
            }
            Some(_) if self.remote.is_some() => Err(Error::unsupported(
                "shards: the rows on a cluster are those of one version, expected no `remote` beside shards",
            )),
            Some(shards) if ![0, shards as usize].contains(&self.positions.len()) => Err(Error::invalid(format!(
                "position: got {}, expected {shards}: each shard counts its own updates, as `items:position` of a router tells",
                self.positions.len()
            ))),
            None if self.positions.len() > 1 => {
                Err(Error::invalid(format!("position: got {}, expected one", self.positions.len())))
            }
            _ => Ok(()),
        }
    }

    /// The position of a shard, or, as that of shard 0, of a version that is not cut.
    pub(super) fn position_of(&self, shard: u32) -> u64 {
        self.positions.get(shard as usize).copied().unwrap_or(0)
    }
}

/// A file of vectors.
#[derive(Clone, Debug)]
pub enum Vectors {
    /// A `.npy` matrix, one row an item, in the order of the item file.
    Npy(PathBuf),
    /// An IVF index that Faiss wrote: its vectors stay in their lists, and an item file adds attributes by id.
    Faiss(PathBuf),
}

impl Vectors {
    pub(super) fn path(&self) -> &Path {
        match self {
            Vectors::Npy(path) | Vectors::Faiss(path) => path,
        }
    }
}

/// A part of a publication, for a progress bar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Stage {
    Trying,
    Reading,
    Embedding,
    /// What the index will be, before it is built.
    Sized(ivf::Sizes),
    /// What it will take of memory and disk.
    Planned(MemoryPlan),
    Clustering,
    Writing,
    Calibrating,
    Loading,
}

/// Is told the stage, how much of it is done, and its size.
pub type Progress<'a> = dyn Fn(Stage, usize, usize) + Sync + 'a;
