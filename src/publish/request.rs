//! What is asked of a publication, and what it tells while it runs.

use std::path::{Path, PathBuf};

use super::budget::MemoryPlan;
use super::remote::Remote;
use crate::error::{Error, Result};
use crate::ivf;
use crate::limits::SHARDS_MAX;
use crate::snapshot::Recipe;
use crate::trial::Trials;

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
    /// The position of the last update of the model that the items contain: those after it are applied when it is loaded.
    pub position: u64,
    /// Of a version that is cut, in its place: that of each shard, or none where the items contain no updates.
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
            Some(shards) if self.position > 0 || ![0, shards as usize].contains(&self.positions.len()) => {
                let got = if self.position > 0 { 1 } else { self.positions.len() };
                Err(Error::invalid(format!(
                    "position: got {got}, expected {shards}: each shard counts its own updates, as `items:position` of a router tells"
                )))
            }
            None if !self.positions.is_empty() => {
                Err(Error::invalid(format!("position: got {}, expected one", self.positions.len())))
            }
            _ => Ok(()),
        }
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
