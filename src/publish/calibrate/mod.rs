//! Calibration: how many lists a recall takes, by queries like those that will be asked.
//!
//! A publication calibrates its version; `sterling calibrate` does it again for one that is published, with other queries, and
//! keeps the result beside it.

mod confidence;
mod depth;
mod measure;
mod queries;
mod share;
mod tally;

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::files::Tensors;
use crate::ivf;
use crate::model::{Decisions, Package, WARMUP_FILE};
use crate::registry::Loaded;
use crate::snapshot::{
    Calibration, INDEX_FILE, Manifest, Placement, QUERIES_FILE, RECALIBRATION_FILE, RECIPE_FILE, Recalibration, Recipe,
    Snapshot, Store,
};
use crate::warmup;

pub use measure::measure;
pub use queries::Queries;
pub(super) use queries::spread;

/// Sample requests of a package, a `:retrieve` body a line.
pub(super) const REQUESTS_FILE: &str = "queries.jsonl";
/// The queries of a calibration that was made again, where they are none of the version's items.
const RECALIBRATION_QUERIES_FILE: &str = "recalibration_queries.safetensors";

/// The file of the queries that the version in `folder` was calibrated with last, where they are none of its items.
pub(super) fn kept_queries(folder: &Path) -> Option<PathBuf> {
    let last = match folder.join(RECALIBRATION_FILE).exists() {
        true => RECALIBRATION_QUERIES_FILE,
        false => QUERIES_FILE,
    };
    Some(folder.join(last)).filter(|path| path.exists())
}

/// Calibrates the version in `folder` with the queries of a file, else with those of the package in `package`, else with
/// perturbed items; not one whose index has a single list. Returns the queries too.
///
/// # Errors
/// What is wrong with the queries, with the file and the line.
pub(super) fn version(
    folder: &Path,
    queries: Option<&Path>,
    package: Option<&Path>,
    recipe: &Recipe,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<Option<(Calibration, Queries)>> {
    let own = package.map(|package| package.join(REQUESTS_FILE)).filter(|path| path.exists());
    measured(folder, recipe, progress, |index| match queries.or(own.as_deref()) {
        Some(path) => {
            Queries::read(path, &Package::open_placed(folder, &Decisions::default(), |_, tables| Ok(tables))?, index)
        }
        None => Ok(Queries::of_items(index, recipe.index.seed)),
    })
}

/// Calibrates the version in `folder`, of which only the index is there yet, with queries that were kept, else with perturbed
/// items.
pub(super) fn merged(
    folder: &Path,
    queries: Option<&Path>,
    package: &Package,
    recipe: &Recipe,
) -> Result<Option<(Calibration, Queries)>> {
    measured(folder, recipe, &|_, _| (), |index| match queries {
        Some(path) => Queries::read(path, package, index),
        None => Ok(Queries::of_items(index, recipe.index.seed)),
    })
}

fn measured(
    folder: &Path,
    recipe: &Recipe,
    progress: &(dyn Fn(usize, usize) + Sync),
    queries: impl FnOnce(&ivf::Index) -> Result<Queries>,
) -> Result<Option<(Calibration, Queries)>> {
    let index = ivf::Index::open(&Tensors::open(&folder.join(INDEX_FILE))?)?;
    if index.lists() < 2 {
        return Ok(None);
    }
    let queries = queries(&index)?;
    Ok(Some((measure(&index, &queries, recipe.index.seed, progress), queries)))
}

/// Calibrates a published version again, with the queries of a file or with perturbed items, and keeps the result beside it:
/// servers take it in when they look at the store next.
///
/// # Errors
/// `NotFound` where there is no such version, `Invalid` where its index has a single list, what is wrong with the queries, `Io`.
pub fn again(
    store: &Store,
    name: &str,
    version: u64,
    queries: Option<&Path>,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<Recalibration> {
    let held = store.bring(name, version)?;
    let folder = held.folder();
    let manifest = Manifest::read(folder)?;
    manifest.verify(folder)?;
    let recipe = Recipe::read(&folder.join(RECIPE_FILE))?;
    let Some((calibration, queries)) = self::version(folder, queries, None, &recipe, progress)? else {
        return Err(Error::invalid(format!("{}: one list, expected several to choose from", folder.display())));
    };
    let recalibration = Recalibration::of(&manifest, calibration)?;
    if manifest.files.contains_key(WARMUP_FILE) {
        let mut snapshot = Snapshot::load(folder, &Placement::default())?;
        snapshot.calibration = Some(recalibration.calibration.clone());
        warmup::check(&Loaded::new(snapshot)).map_err(|e| {
            e.within(format!(
                "{}: the calibration is not kept, answers of the warm-up would not come out",
                folder.display()
            ))
        })?;
    }
    store.add(name, version, &[RECALIBRATION_QUERIES_FILE, RECALIBRATION_FILE], |folder| {
        queries.write(&folder.join(RECALIBRATION_QUERIES_FILE))?;
        recalibration.write(folder).map(drop)
    })?;
    Ok(recalibration)
}
