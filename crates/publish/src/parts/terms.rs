//! Parameters of a distributed publication, and the folders of its results.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::super::plan::{Plan, Source};
use super::piece::PieceNote;
use sterling_batch::jobs::{JobFolder, Purpose};
use sterling_core::error::{Error, Kind, Result};
use sterling_index::ivf::RowSurvey;
use sterling_snapshot::PROGRAM;
use sterling_snapshot::model::{Decisions, Package};
use sterling_storage::files::Checksum;

/// All inputs of a publication except the item files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PartTerms {
    program: String,
    pub(super) package: Option<PathBuf>,
    /// Checksum of the package's files.
    package_files: String,
    pub(super) name: Option<String>,
    /// Path of the items as the caller passed it: a file, or a folder of files.
    pub(super) items: PathBuf,
    pub(super) vectors: Option<VectorFile>,
    pub(super) recipe: String,
}

/// File of vectors next to the items, identified by size and time, because it is too large for every worker to hash.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct VectorFile {
    pub(super) path: PathBuf,
    bytes: u64,
    modified_ns: u128,
}

impl VectorFile {
    /// Reads the present size and modification time of the file.
    pub(super) fn now(path: &Path) -> Result<Self> {
        let read = fs::metadata(path).and_then(|about| Ok((about.len(), about.modified()?)));
        let (bytes, modified) = read.map_err(|e| Error::io(path.display(), e))?;
        let modified_ns = modified.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        Ok(VectorFile { path: path.into(), bytes, modified_ns })
    }

    /// Returns the path of the vector file, or an error if the file has changed.
    pub(super) fn checked(&self) -> Result<&Path> {
        match VectorFile::now(&self.path)? == *self {
            true => Ok(&self.path),
            false => Err(Error::conflict(format!(
                "{}: the vector file has changed since the job began",
                self.path.display()
            ))),
        }
    }
}

impl PartTerms {
    /// Returns the parameters of a publication, with an unchanged vector file.
    pub(super) fn of(plan: &Plan, package: Option<&Package>, vectors: Option<VectorFile>) -> Result<Self> {
        if let Source::Faiss { index, .. } = &plan.source {
            let index = index.display();
            return Err(Error::unsupported(format!("{index}: a Faiss index has lists already, expected item files")));
        }
        let files = package.iter().flat_map(|package| package.files().into_iter().map(move |name| (package, name)));
        let files = files.map(|(package, name)| Ok((package.checksum(&name)?, name)));
        let files = files.collect::<Result<Vec<_>>>()?;
        let reported: String = files.iter().map(|(sum, name)| format!("{name} {} {}\n", sum.bytes, sum.xxh3)).collect();
        Ok(PartTerms {
            program: PROGRAM.into(),
            package: plan.source.package().map(Path::to_owned),
            package_files: Checksum::of(reported.as_bytes()).xxh3,
            name: plan.source.name().map(str::to_owned),
            items: plan.source.item_file()?,
            vectors,
            recipe: plan.recipe.to_toml()?,
        })
    }
}

impl Purpose for PartTerms {
    fn difference(&self, others: &Self) -> Option<(&'static str, String, String)> {
        let reported = |terms: &PartTerms| {
            [
                ("program", terms.program.clone()),
                ("package", format!("{:?}", terms.package)),
                ("package, by the checksum of its files,", terms.package_files.clone()),
                ("name", format!("{:?}", terms.name)),
                ("item file", terms.items.display().to_string()),
                ("file of vectors", format!("{:?}", terms.vectors)),
                ("recipe", format!("{:?}", terms.recipe)),
            ]
        };
        let mut both = reported(self).into_iter().zip(reported(others));
        both.find(|(here, there)| here != there).map(|((what, here), (_, there))| (what, here, there))
    }
}

/// Properties of the items of a part.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PartItems {
    pub(super) items: usize,
    /// Row of the part's first item in the separate vector file, if there is one.
    pub(super) first_row: Option<usize>,
    /// Statistics of the part's vectors, if the part has items.
    pub(super) survey: Option<RowSurvey>,
    /// Kind of each column that has a value, including vector columns.
    pub(super) kinds: BTreeMap<String, String>,
}

/// Properties of the list file of a part.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PartLists {
    pub(super) items: usize,
}

/// Trained centroids.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PartCentroids {
    /// Common norm of all vectors of the catalogue, if they have one.
    pub(super) length: Option<f32>,
}

/// Properties of a shard.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PartShard {
    pub(crate) items: usize,
    pub(crate) slots: usize,
    pub(crate) dimension: usize,
    pub(crate) lists: usize,
    /// Item-side reranker outputs that are stored.
    pub(crate) decisions: Decisions,
}

pub(super) const TRAINED: &str = "trained";
pub(super) const ITEMS: &str = "items.parquet";
pub(super) const VECTORS: &str = "vectors.npy";
pub(super) const KEPT: &str = "kept.bin";
pub(super) const CENTROIDS: &str = "centroids.npy";
pub(super) const LISTS: &str = "lists.npy";

/// Paths of the files of a publication that is computed in parts (units), each by its own process.
pub(super) trait PartFolders {
    /// Returns the folder of a unit's items.
    fn part(&self, unit: usize) -> PathBuf;

    /// Returns the folder of a unit's lists.
    fn lists(&self, unit: usize) -> PathBuf;

    /// Returns the folder of the centroids.
    fn trained(&self) -> PathBuf;

    /// Returns the parts of all units; `is_whole` verifies the checksums of their files.
    fn parts(&self, is_whole: bool) -> Result<Vec<PieceNote<PartItems>>>;

    /// Reads the results of every unit.
    ///
    /// # Errors
    /// `NotFound` with the units that have no result; other errors of `read`.
    fn all<P: Send>(&self, what: &str, read: impl Fn(usize) -> Result<P> + Sync) -> Result<Vec<P>>;

    /// Describes the inputs of the centroids: the parameters and every part.
    fn training(&self, parts: &[PieceNote<PartItems>]) -> Result<String>;
}

impl PartFolders for JobFolder<PartTerms> {
    fn part(&self, unit: usize) -> PathBuf {
        self.root().join(self.name(unit))
    }

    fn lists(&self, unit: usize) -> PathBuf {
        self.root().join(format!("{}-lists", self.name(unit)))
    }

    fn trained(&self) -> PathBuf {
        self.root().join(TRAINED)
    }

    fn parts(&self, is_whole: bool) -> Result<Vec<PieceNote<PartItems>>> {
        let read = if is_whole { PieceNote::open } else { PieceNote::noted };
        self.all("embedded", |unit| read(&self.part(unit), &self.origin(unit)?))
    }

    fn all<P: Send>(&self, what: &str, read: impl Fn(usize) -> Result<P> + Sync) -> Result<Vec<P>> {
        const NAMED: usize = 8;
        let units = self.units();
        let found: Vec<Result<P>> = (0..units.len()).into_par_iter().map(&read).collect();
        let is_missing = |found: &Result<P>| matches!(found, Err(e) if e.kind() == Kind::NotFound);
        let missing: Vec<usize> = (0..units.len()).filter(|&unit| is_missing(&found[unit])).collect();
        if missing.is_empty() {
            return found.into_iter().collect();
        }
        let named = missing.iter().take(NAMED).map(|&unit| format!("{unit} ({})", units[unit].input.display()));
        let named: Vec<String> = named.collect();
        let more = if missing.len() > NAMED { ", ..." } else { "" };
        Err(Error::not_found(format!(
            "{}: {} of {} units are not {what}: {}{more}",
            self.root().display(),
            missing.len(),
            units.len(),
            named.join(", ")
        )))
    }

    fn training(&self, parts: &[PieceNote<PartItems>]) -> Result<String> {
        let digests = parts.iter().map(PieceNote::digest).collect::<Result<Vec<_>>>()?;
        canonical_json(&(self.asked(), digests))
    }
}

/// Describes the inputs of lists: the part, and the centroids.
pub(super) fn assigning(part: &PieceNote<PartItems>, trained: &PieceNote<PartCentroids>) -> Result<String> {
    canonical_json(&[part.digest()?, trained.digest()?])
}

fn canonical_json(what: &impl Serialize) -> Result<String> {
    serde_json::to_string(what).map_err(|e| Error::internal(format!("job: {e}")))
}
