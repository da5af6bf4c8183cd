//! Combines parts into one catalogue, as if one machine had read, embedded and assigned all items.

use std::fs;
use std::path::{Path, PathBuf};

use super::super::budget::Budget;
use super::super::catalogue::Catalogue;
use super::super::embed::Embedded;
use super::super::plan::{Plan, Progress, Source, Stage};
use super::kinds::check_sources;
use super::steps::{centroids, lists, surveyed, vectors};
use super::terms::{ITEMS, KEPT, PartFolders as _, PartTerms, TRAINED};
use sterling_batch::jobs::JobFolder;
use sterling_core::error::{Error, Result};
use sterling_index::ivf;
use sterling_snapshot::Recipe;
use sterling_snapshot::items::Items;
use sterling_snapshot::model::Package;

/// Returns the plan of the publication whose parts are in a folder.
///
/// # Errors
/// `NotFound` if no publication was begun there; `Corrupt` or `Io`.
pub fn publication(root: &Path) -> Result<Plan> {
    let job = JobFolder::<PartTerms>::begun(root)?;
    let PartTerms { package, name, items, vectors, recipe, .. } = job.asked().clone();
    let of = Source::of(package, name, Some(items), vectors.map(|file| file.path))?;
    let source = Source::Parts { folder: root.into(), of: Box::new(of) };
    Ok(Plan { recipe: Recipe::parse(&recipe)?, ..Plan::new(source) })
}

/// Returns the catalogue of all parts in a folder. Data beyond the memory budget stays in that folder.
pub(crate) fn gather(
    root: &Path,
    plan: &Plan,
    package: Option<&Package>,
    budget: Budget,
    folder: &Path,
    progress: &Progress<'_>,
) -> Result<Catalogue> {
    let job = JobFolder::<PartTerms>::begun(root)?;
    job.check_terms(&PartTerms::of(plan, package, job.asked().vectors.clone())?)?;
    let parts = job.parts(true)?;
    let (trained, rows) = centroids(&job, &parts)?;
    let of_rows = lists(&job, &parts, &trained)?;
    let spill = budget.spill(folder);
    let files: Vec<PathBuf> = (0..parts.len()).map(|unit| job.part(unit).join(ITEMS)).collect();
    let named = |unit: usize| job.units()[unit].input.display().to_string();
    let items = Items::read_parts(&files, named, &spill)?;
    check_sources(&job, &parts, package, &items)?;
    let mut kept = Vec::new();
    for unit in (0..parts.len()).filter(|&unit| parts[unit].has(KEPT)) {
        let path = job.part(unit).join(KEPT);
        kept.extend(fs::read(&path).map_err(|e| Error::io(path.display(), e))?);
    }
    let embedded = Embedded { vectors: vectors(&job, &parts)?, kept };
    let lists = Some(ivf::Lists { centroids: rows.all()?, of_rows, nearest: false });
    job.sweep(&[TRAINED])?;
    progress(Stage::Reading, 1, 1);
    let path = job.asked().items.clone();
    Ok(Catalogue { path, items, embedded, lists, survey: surveyed(&parts)?, budget, spill })
}
