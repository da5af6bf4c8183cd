//! Shards of a version, each made separately.
//!
//! A worker writes the files that depend on a shard's items, and the results of the calibration queries in it. The publication then
//! only evaluates the results, writes the files that all shards share, and names the shards (`super::super::shards`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::super::budget::Budget;
use super::super::catalogue::{Arranged, Arranging};
use super::super::plan::{Output, Plan, Progress, Stage};
use super::super::{calibrate, serving, tables, write};
use super::gather::{gather, publication};
use super::piece::{self, PieceInProgress, PieceNote};
use super::steps::{PartCounts, assigned, centroids};
use super::terms::{PartFolders as _, PartShard, PartTerms};
use sterling_batch::jobs::JobFolder;
use sterling_core::error::{Error, Kind, Result};
use sterling_snapshot::INDEX_FILE;
use sterling_snapshot::model::{AskedPrecision, Decisions, Package, WARMUP_FILE};
use sterling_storage::files::{self, Checksum};

/// Job of making shards, with its inputs.
struct Cut {
    job: JobFolder<PartTerms>,
    shards: u32,
    /// Checksum of all parts, centroids, lists and queries.
    of: String,
}

impl Cut {
    /// Returns the shard job of a publication whose items are all assigned to lists.
    fn of(root: &Path, plan: &Plan, package: Option<&Package>, shards: u32) -> Result<Self> {
        let job = JobFolder::<PartTerms>::begun(root)?;
        job.check_terms(&PartTerms::of(plan, package, job.asked().vectors.clone())?)?;
        let parts = job.parts(false)?;
        let (trained, _) = centroids(&job, &parts)?;
        let lists = assigned(&job, &parts, &trained, false)?;
        let lists = lists.iter().map(PieceNote::digest).collect::<Result<Vec<_>>>()?;
        let queries = calibrate::source(plan.queries.as_deref(), plan.source.package());
        let queries = queries.map(|file| Checksum::of_file(&file)).transpose()?;
        let of = serde_json::to_string(&(trained.digest()?, lists, queries, shards));
        Ok(Cut { job, shards, of: of.map_err(|e| Error::internal(format!("job: {e}")))? })
    }

    fn folder(&self, shard: u32) -> PathBuf {
        self.job.root().join(shard_name(shard, self.shards))
    }

    /// Describes the inputs of a shard.
    fn origin(&self, shard: u32) -> String {
        format!("shard {shard} of {}", self.of)
    }
}

fn shard_name(shard: u32, shards: u32) -> String {
    format!("shard-{shard}-of-{shards}")
}

/// Worker that makes shards.
pub struct Cutting {
    cut: Cut,
    plan: Plan,
    package: Option<Package>,
}

impl Cutting {
    /// Creates a worker that makes some of `shards` shards, for a job whose items are all assigned to lists. `queries` is as in
    /// [`Plan`].
    ///
    /// # Errors
    /// `NotFound` with the missing steps; `Unsupported` for a package that must answer requests before it is published; `Corrupt`
    /// with the damaged file.
    pub fn open(root: &Path, shards: u32, queries: Option<PathBuf>, memory_bytes: Option<u64>) -> Result<Self> {
        let plan = Plan { output: Output::shards(shards), queries, memory_bytes, ..publication(root)? };
        plan.output.check()?;
        let package = plan.source.package().map(Package::open).transpose()?;
        reject_answering_package(package.as_ref())?;
        Ok(Cutting { cut: Cut::of(root, &plan, package.as_ref(), shards)?, plan, package })
    }

    /// Returns the number of units, one per shard.
    pub fn units(&self) -> usize {
        self.cut.shards as usize
    }

    /// Makes a shard; `None` if the shard exists already.
    ///
    /// # Errors
    /// Errors of a publication; `Invalid` if the shard would be empty.
    pub fn cut(&self, unit: usize, progress: &Progress<'_>) -> Result<Option<PartCounts>> {
        if unit >= self.units() {
            return Err(Error::invalid(format!(
                "unit {unit}: expected the number of a shard, 0 to {}",
                self.units() - 1
            )));
        }
        let shard = unit as u32;
        let (path, of) = (self.cut.folder(shard), self.cut.origin(shard));
        if piece::is_there::<PartShard>(&path, &of)? {
            return Ok(None);
        }
        let Cutting { cut, plan, package } = self;
        let (root, package) = (cut.job.root(), package.as_ref());
        progress(Stage::Reading, 0, 1);
        let catalogue = gather(root, plan, package, Budget::of(plan.memory_bytes), root, progress)?;
        let (spec, tables) = tables::described(plan, package, catalogue.dimension())?;
        let of_shards = Some(cut.shards);
        let arranging = Arranging { plan, package, spec: &spec, folder: root, of_shards };
        let arranged = catalogue.arrange(&arranging, progress)?;
        let files = write::Version { package, spec: &spec, tables: &tables, recipe: &plan.recipe, version: None };
        let mut items = 0;
        let make = |folder: &Path| {
            let made = self.write((&files, &arranged), shard, folder, progress)?;
            items = made.0.items;
            Ok(made)
        };
        piece::write(&path, of, make)?;
        Ok(Some(PartCounts { items }))
    }

    fn write(
        &self,
        (version, arranged): (&write::Version<'_>, &Arranged),
        shard: u32,
        folder: &Path,
        progress: &Progress<'_>,
    ) -> Result<PieceInProgress<PartShard>> {
        let built = arranged.shard(shard, self.cut.shards)?;
        progress(Stage::Writing, 0, 2);
        let mut files = version.write_items(arranged, folder, &built)?;
        progress(Stage::Writing, 1, 2);
        files.insert(INDEX_FILE.into(), arranged.write_index(folder, &built)?);
        progress(Stage::Writing, 2, 2);
        let decisions = match version.package {
            Some(package) => serving::prepare(package, folder, &self.plan.recipe, &mut files)?,
            None => Decisions::default(),
        };
        let reported = |done, total| progress(Stage::Calibrating, done, total);
        let source = calibrate::source(self.plan.queries.as_deref(), self.plan.source.package());
        let found = calibrate::shard(folder, (&built, arranged), (source.as_deref(), version), &reported)?;
        files.extend(found.map(|sum| (calibrate::FINDINGS_FILE.to_owned(), sum)));
        files::sync_folder(folder).map_err(|e| Error::io(folder.display(), e))?;
        let (items, slots) = (built.items(), built.order.len());
        let (dimension, lists) = (arranged.embedded.vectors.cols(), built.list_lengths.len());
        Ok((PartShard { items, slots, dimension, lists, decisions }, files))
    }
}

/// Rejects a package whose version must answer requests before it is published, because such answers need all items.
fn reject_answering_package(package: Option<&Package>) -> Result<()> {
    let Some(package) = package else { return Ok(()) };
    let what = match package.spec.precision {
        AskedPrecision::Auto => "leaves its precision to a measurement",
        _ if package.folder().join(WARMUP_FILE).exists() => "has golden answers",
        _ => return Ok(()),
    };
    Err(Error::unsupported(format!(
        "{}: the package {what}, which takes all items at once: expected `publish --parts --shards` without existing shards",
        package.folder().display()
    )))
}

/// Completed shards of a version.
pub(crate) struct CutShards {
    /// Item file of the publication, or the folder of item files.
    pub(crate) items_file: PathBuf,
    pub(crate) dimension: usize,
    /// Shards in the order of their numbers.
    pub(crate) shards: Vec<CutShard>,
}

/// Completed shard.
pub(crate) struct CutShard {
    pub(crate) folder: PathBuf,
    pub(crate) holds: PartShard,
    pub(crate) files: BTreeMap<String, Checksum>,
}

/// Returns the shards that workers have made for a publication; `None` if no shard was begun.
///
/// # Errors
/// `NotFound` with the missing shards; `Corrupt` with a shard that was made from other inputs, or has changed files.
pub(crate) fn finished_shards(
    root: &Path,
    plan: &Plan,
    package: Option<&Package>,
    shards: u32,
) -> Result<Option<CutShards>> {
    if !(0..shards).any(|shard| root.join(shard_name(shard, shards)).exists()) {
        return Ok(None);
    }
    let cut = Cut::of(root, plan, package, shards)?;
    let (mut found, mut missing) = (Vec::with_capacity(shards as usize), Vec::new());
    for shard in 0..shards {
        let folder = cut.folder(shard);
        match PieceNote::<PartShard>::sized(&folder, &cut.origin(shard)) {
            Ok(piece) => {
                piece.check(&folder, |file| file == calibrate::FINDINGS_FILE)?;
                let (holds, files) = piece.into_parts();
                found.push(CutShard { folder, holds, files });
            }
            Err(e) if e.kind() == Kind::NotFound => missing.push(shard.to_string()),
            Err(e) => return Err(e),
        }
    }
    if !missing.is_empty() {
        return Err(Error::not_found(format!(
            "{}: {} of {shards} shards do not exist yet: {}; create them too, or remove the folders of the others",
            root.display(),
            missing.len(),
            missing.join(", ")
        )));
    }
    let left: Vec<String> = (0..shards).map(|shard| shard_name(shard, shards)).collect();
    cut.job.sweep(&left.iter().map(String::as_str).collect::<Vec<_>>())?;
    let (items_file, dimension) = (cut.job.asked().items.clone(), found[0].holds.dimension);
    Ok(Some(CutShards { items_file, dimension, shards: found }))
}
