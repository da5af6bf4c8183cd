//! A plan of a publication, and the progress that the publication reports.

use std::path::{Path, PathBuf};

use super::budget::MemoryPlan;
use super::remote::Remote;
use sterling_core::error::{Error, Result};
use sterling_core::limits::SHARDS_MAX;
use sterling_index::ivf;
use sterling_snapshot::Recipe;
use sterling_snapshot::items;
use sterling_snapshot::sandbox::SandboxMode;

/// Plan of a publication: the sources of the model and its items, the recipe of the index, and the output.
///
/// ```
/// use sterling_publish::{Output, Plan, Source};
///
/// let source = Source::Vectors { name: "pair".into(), items: "items.parquet".into(), vectors: None };
/// let plan = Plan { output: Output::shards(4), ..Plan::new(source) };
/// assert_eq!(plan.source.package(), None);
/// ```
#[derive(Clone, Debug)]
pub struct Plan {
    /// Source of the model and its items.
    pub source: Source,
    /// Queries for the calibration, `.npy` or a `:retrieve` body per line; by default the package's own `queries.jsonl`, else those of the
    /// previous version, else perturbed items.
    pub queries: Option<PathBuf>,
    /// How the index is built.
    pub recipe: Recipe,
    /// Output of the publication: a complete version or shards.
    pub output: Output,
    /// Sandbox in which the package's graphs run first.
    pub trials: SandboxMode,
    /// Bytes of memory that the publication may take; by default most of the free memory.
    pub memory_bytes: Option<u64>,
}

/// Source of a model and its items.
#[derive(Clone, Debug)]
pub enum Source {
    /// A model package.
    Package {
        /// The folder of the package's `model.toml`.
        folder: PathBuf,
        /// The item file; by default the package's `items.parquet` or `items.jsonl`.
        items: Option<PathBuf>,
        /// A `.npy` matrix of the items' vectors, one row per item, in the order of the item file.
        vectors: Option<PathBuf>,
    },
    /// An embedding-only model: a catalogue of vectors.
    Vectors {
        /// The name of the model.
        name: String,
        /// The item file.
        items: PathBuf,
        /// A `.npy` matrix of the items' vectors; by default they are in the item file.
        vectors: Option<PathBuf>,
    },
    /// An embedding-only model from an IVF index that Faiss wrote. The vectors of a Faiss index keep their lists.
    Faiss {
        /// The name of the model.
        name: String,
        /// The file of the Faiss index.
        index: PathBuf,
        /// An item file that adds attributes by id.
        items: Option<PathBuf>,
    },
    /// Items that were embedded and assigned in parts ([`super::parts`]).
    Parts {
        /// The folder of the parts.
        folder: PathBuf,
        /// The source that the parts were made of.
        of: Box<Source>,
    },
}

impl Source {
    /// Returns the source for a package if one is given, otherwise for an embedding-only model.
    ///
    /// # Errors
    /// `Invalid` for an embedding-only model without a name or an item file.
    pub fn of(
        package: Option<PathBuf>,
        name: Option<String>,
        items: Option<PathBuf>,
        vectors: Option<PathBuf>,
    ) -> Result<Self> {
        match (package, name, items) {
            (Some(folder), _, items) => Ok(Source::Package { folder, items, vectors }),
            (None, Some(name), Some(items)) => Ok(Source::Vectors { name, items, vectors }),
            (None, None, _) => Err(Error::invalid("name: missing, expected a name for an embedding-only model")),
            (None, Some(_), None) => {
                Err(Error::invalid("items: expected an item file or an index of Faiss for an embedding-only model"))
            }
        }
    }

    /// Returns the folder of the package.
    pub fn package(&self) -> Option<&Path> {
        match self {
            Source::Package { folder, .. } => Some(folder),
            Source::Vectors { .. } | Source::Faiss { .. } => None,
            Source::Parts { of, .. } => of.package(),
        }
    }

    /// Returns the name of an embedding-only model; the name of a package is in its `model.toml`.
    pub(super) fn name(&self) -> Option<&str> {
        match self {
            Source::Package { .. } => None,
            Source::Vectors { name, .. } | Source::Faiss { name, .. } => Some(name),
            Source::Parts { of, .. } => of.name(),
        }
    }

    /// Returns the separate vector file.
    pub(super) fn vectors(&self) -> Option<&Path> {
        match self {
            Source::Package { vectors, .. } | Source::Vectors { vectors, .. } => vectors.as_deref(),
            Source::Faiss { index, .. } => Some(index),
            Source::Parts { of, .. } => of.vectors(),
        }
    }

    /// Returns the item file; for a Faiss index without an item file, the index itself.
    ///
    /// # Errors
    /// `NotFound` if the plan names no item file and the package has none.
    pub fn item_file(&self) -> Result<PathBuf> {
        match self {
            Source::Package { items: Some(items), .. }
            | Source::Vectors { items, .. }
            | Source::Faiss { items: Some(items), .. } => Ok(items.clone()),
            Source::Faiss { index, items: None, .. } => Ok(index.clone()),
            Source::Parts { of, .. } => of.item_file(),
            Source::Package { folder, items: None, .. } => items::file_of(folder),
        }
    }
}

/// The version that a publication writes.
#[derive(Clone, Debug)]
pub enum Output {
    /// A version of all items.
    Whole {
        /// Position of the last update of the model that the items contain: servers apply later updates. 0 if they contain none.
        position: u64,
        /// Redis Cluster to which rows of the tables are loaded too.
        remote: Option<Remote>,
    },
    /// A version in document shards by the ids of its items.
    Shards {
        /// Number of shards.
        count: u32,
        /// Position of the last update that each shard contains; empty if the items contain no updates.
        positions: Vec<u64>,
    },
}

impl Default for Output {
    fn default() -> Self {
        Output::at(0)
    }
}

impl Output {
    /// Returns the output of a version of all items, which contain the updates up to a position.
    pub fn at(position: u64) -> Self {
        Output::Whole { position, remote: None }
    }

    /// Returns the output of a version in document shards, whose items contain no updates.
    pub fn shards(count: u32) -> Self {
        Output::Shards { count, positions: Vec::new() }
    }

    /// Returns the number of shards; `None` for a version of all items.
    pub(super) fn count(&self) -> Option<u32> {
        match self {
            Output::Whole { .. } => None,
            Output::Shards { count, .. } => Some(*count),
        }
    }

    /// Returns the cluster that receives rows of the tables.
    pub(super) fn remote(&self) -> Option<&Remote> {
        match self {
            Output::Whole { remote, .. } => remote.as_ref(),
            Output::Shards { .. } => None,
        }
    }

    /// Returns the position of the last update that a shard contains; a version of all items counts as shard 0.
    pub(super) fn position(&self, shard: u32) -> u64 {
        match self {
            Output::Whole { position, .. } => *position,
            Output::Shards { positions, .. } => positions.get(shard as usize).copied().unwrap_or(0),
        }
    }

    /// # Errors
    /// `Invalid` for a number of shards or positions out of range.
    pub(super) fn check(&self) -> Result<()> {
        let Output::Shards { count, positions } = self else { return Ok(()) };
        if !(1..=SHARDS_MAX).contains(count) {
            return Err(Error::invalid(format!("shards: got {count}, expected 1 to {SHARDS_MAX}")));
        }
        if ![0, *count as usize].contains(&positions.len()) {
            return Err(Error::invalid(format!(
                "position: got {}, expected {count}: each shard counts its own updates, as `items:position` of a \
                 router reports",
                positions.len()
            )));
        }
        Ok(())
    }
}

impl Plan {
    /// Creates a plan with the default recipe that writes a version of all items. The package's graphs are validated in this
    /// process.
    pub fn new(source: Source) -> Self {
        Plan {
            source,
            queries: None,
            recipe: Recipe::default(),
            output: Output::default(),
            trials: SandboxMode::default(),
            memory_bytes: None,
        }
    }

    /// Creates a plan for a package folder.
    pub fn of_package(folder: impl Into<PathBuf>) -> Self {
        Plan::new(Source::Package { folder: folder.into(), items: None, vectors: None })
    }

    /// Creates a plan for an embedding-only model whose item file contains the vectors.
    pub fn of_vectors(name: impl Into<String>, items: impl Into<PathBuf>) -> Self {
        Plan::new(Source::Vectors { name: name.into(), items: items.into(), vectors: None })
    }
}

/// A stage of a publication, for a progress bar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Stage {
    Trying,
    Reading,
    Embedding,
    /// The sizes of the index, before it is built.
    Sized(ivf::Sizes),
    /// The memory and disk space that the publication will take.
    Planned(MemoryPlan),
    Clustering,
    Writing,
    Calibrating,
    Loading,
}

/// Callback that receives a stage, the finished units of the stage, and its total units.
pub type Progress<'a> = dyn Fn(Stage, usize, usize) + Sync + 'a;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use sterling_core::error::Kind;

    #[test]
    fn a_package_has_its_items_under_either_name() {
        let folder = tempfile::tempdir().unwrap();
        let source = Plan::of_package(folder.path()).source;
        let refused = source.item_file().unwrap_err();
        assert_eq!(refused.kind(), Kind::NotFound);
        assert!(["items.parquet", "items.jsonl"].iter().all(|name| refused.to_string().contains(name)), "{refused}");
        // Created one after the other: `items.parquet`, the last one, takes precedence if both exist.
        for name in ["items.jsonl", "items.parquet"] {
            std::fs::write(folder.path().join(name), "").unwrap();
            assert_eq!(source.item_file().unwrap(), folder.path().join(name));
        }
        let other = Source::of(Some(folder.path().into()), None, Some("other.jsonl".into()), None).unwrap();
        assert_eq!(other.item_file().unwrap(), PathBuf::from("other.jsonl"));
    }

    #[test]
    fn a_source_without_a_package_needs_a_name_and_items() {
        let of = |name: Option<&str>, items: Option<&str>| {
            Source::of(None, name.map(Into::into), items.map(Into::into), None)
        };
        assert!(of(Some("m"), Some("items.jsonl")).is_ok());
        assert!(of(None, Some("items.jsonl")).unwrap_err().to_string().contains("name: missing"));
        assert!(of(Some("m"), None).unwrap_err().to_string().contains("items: expected"));
    }

    #[test]
    fn each_shard_has_a_position_or_none_has() {
        let of = |count, positions: &[u64]| Output::Shards { count, positions: positions.into() }.check();
        assert!(of(3, &[]).is_ok() && of(3, &[4, 5, 6]).is_ok());
        for (count, positions) in [(0, &[][..]), (SHARDS_MAX + 1, &[]), (3, &[1]), (3, &[1, 2, 3, 4])] {
            assert_eq!(of(count, positions).unwrap_err().kind(), Kind::Invalid);
        }
        let two = Output::Shards { count: 2, positions: vec![7, 8] };
        assert_eq!([two.position(0), two.position(1), Output::at(9).position(0)], [7, 8, 9]);
    }
}
