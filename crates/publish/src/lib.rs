//! Publishing: turns a package, a recipe and items into a version in the store, atomically.
//!
//! 1. The package's graphs are validated in a sandbox (`sterling_snapshot::sandbox`); the package is opened and checked; the
//!    items are read (`catalogue`).
//! 2. Items are embedded: vectors come from an item column, or from the item tower over their features (`embed`).
//! 3. The vectors are clustered, or keep the lists of their source. The lists determine the slots of the items.
//! 4. Columns, ids, filter index and rows are written in slot order, tables in their formats; the package's other files are
//!    copied (`write`).
//! 5. The item-side part of the reranker is precomputed and stored, if that pays off, and the reranker scores the items
//!    (`serving`).
//! 6. Sample queries search the written index, to measure the number of probed lists that each recall needs (`calibrate`).
//! 7. If the model leaves its precision open, answers in bf16 are compared with those in f32 (`precision`).
//! 8. The version answers the requests that are stored with the package (`crate::warmup`).
//! 9. Table rows for a Redis Cluster are loaded into the cluster (`remote`).
//! 10. The manifest is written last, and the folder is renamed to its final name.
//!
//! Several machines may share steps 2 and 3, each for some of the item files, and then the later steps, each for some shards
//! (`parts`).
//!
//! Vectors need not fit in memory (`budget`); the published bytes are the same either way.
//!
//! A version in shards is first made as a complete version, and then partitioned (`shards`).
//!
//! [`merge`] (compaction) makes a version from a served version and its updates, by the later ones of these steps; for a shard, a
//! merge makes a checkpoint of the same version (`fold`).
//!
//! ```
//! use sterling_publish::{Plan, publish};
//! use sterling_snapshot::Store;
//!
//! let folder = tempfile::tempdir()?;
//! let items = folder.path().join("items.jsonl");
//! std::fs::write(&items, "{\"id\": 1, \"embedding\": [1, 0]}\n{\"id\": 2, \"embedding\": [0, 1]}\n")?;
//! let store = Store::new(folder.path().join("store"));
//! let (model, version) = publish(&store, &Plan::of_vectors("pair", items), &|_stage, _done, _total| {})?;
//! assert_eq!((model.as_str(), version, store.manifest("pair", 1)?.items), ("pair", 1, 2));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![cfg_attr(not(test), deny(unreachable_pub))]

mod budget;
pub mod calibrate;
mod catalogue;
pub mod compact;
mod embed;
mod fold;
mod gathered;
mod making;
mod merge;
pub mod parts;
mod plan;
mod precision;
mod remote;
mod serving;
mod shards;
mod tables;
mod warm;
pub mod warmup;
mod write;

use std::path::Path;
use std::time::Instant;

use budget::Budget;
use catalogue::Arranging;
use parts::CutShards;

use sterling_core::error::Result;
use sterling_snapshot::Store;
use sterling_snapshot::model::Package;

pub use budget::MemoryPlan;
pub use gathered::MergedVersion;
pub use merge::{MERGE_STEPS, merge};
pub use plan::{Output, Plan, Progress, Source, Stage};
pub use remote::{Remote, load_published, prune};

/// Publishes a version and returns the model's name and the version number.
///
/// # Errors
/// The error in the package, the recipe or the items, with its location. After an error the store is unchanged.
pub fn publish(store: &Store, plan: &Plan, progress: &Progress<'_>) -> Result<(String, u64)> {
    publish_within(store, plan, Budget::of(plan.memory_bytes), progress)
}

fn publish_within(store: &Store, plan: &Plan, budget: Budget, progress: &Progress<'_>) -> Result<(String, u64)> {
    let start = Instant::now();
    plan.output.check()?;
    if let Some(folder) = plan.source.package() {
        progress(Stage::Trying, 0, 1);
        plan.trials.run(folder)?;
    }
    progress(Stage::Reading, 0, 1);
    let package = plan.source.package().map(Package::open).transpose()?;
    let catalogue = match (&plan.source, plan.output.count()) {
        (Source::Parts { folder, .. }, shards) => {
            if let Some(cut) =
                shards.map(|n| parts::finished_shards(folder, plan, package.as_ref(), n)).transpose()?.flatten()
            {
                return assembled(store, plan, package.as_ref(), &cut, start, progress);
            }
            parts::gather(folder, plan, package.as_ref(), budget, store.root(), progress)?
        }
        _ => catalogue::read(plan, package.as_ref(), budget, store.root(), progress)?,
    };
    let (spec, tables) = tables::described(plan, package.as_ref(), catalogue.dimension())?;
    let provenance = catalogue::provenance(&catalogue.path, plan);
    let arranging = Arranging { plan, package: package.as_ref(), spec: &spec, folder: store.root(), of_shards: None };
    let arranged = catalogue.arrange(&arranging, progress)?;
    let files =
        write::Version { package: package.as_ref(), spec: &spec, tables: &tables, recipe: &plan.recipe, version: None };
    let inherited = inherited(store, plan, &spec.name);
    let making = making::VersionInputs { plan, files, provenance, inherited, start, progress };
    let mut loaded = Vec::new();
    let published = store.publish(&spec.name, |folder, version| {
        if let Some(shards) = plan.output.count() {
            return shards::cut(&making, &arranged, folder, version, shards);
        }
        let mut manifest = making.whole(&arranged, folder, version)?;
        if let Some(remote) = plan.output.remote() {
            let report = |done, total| progress(Stage::Loading, done, total);
            loaded = remote::load(remote, &spec, &manifest, &tables, &report)?;
            manifest.provenance.seconds = start.elapsed().as_secs_f64();
        }
        manifest.write(folder)
    });
    if let (Err(_), Some(remote)) = (&published, plan.output.remote()) {
        remote::unload(remote, &loaded);
    }
    Ok((spec.name.clone(), published?))
}

/// Returns the queries of the model's last version, for a plan without queries. An unreadable last version does not prevent
/// publication.
fn inherited(store: &Store, plan: &Plan, model: &str) -> Option<calibrate::Inherited> {
    if calibrate::source(plan.queries.as_deref(), plan.source.package()).is_some() {
        return None;
    }
    calibrate::Inherited::of(store, model).unwrap_or_else(|error| {
        tracing::warn!(%error, "the calibration queries of the last version cannot be read");
        None
    })
}

/// Publishes a version from shards that workers have made.
fn assembled(
    store: &Store,
    plan: &Plan,
    package: Option<&Package>,
    cut: &CutShards,
    start: Instant,
    progress: &Progress<'_>,
) -> Result<(String, u64)> {
    let (spec, tables) = tables::described(plan, package, cut.dimension)?;
    let files = write::Version { package, spec: &spec, tables: &tables, recipe: &plan.recipe, version: None };
    let provenance = catalogue::provenance(&cut.items_file, plan);
    let making = making::VersionInputs { plan, files, provenance, inherited: None, start, progress };
    let version = store.publish(&spec.name, |folder, version| shards::assemble(&making, cut, folder, version))?;
    Ok((spec.name.clone(), version))
}

/// Returns the name and newest version of a package's model, if that version was published from the same files.
///
/// # Errors
/// The error in the package, or `Io`.
pub fn published(store: &Store, package: &Path) -> Result<Option<(String, u64)>> {
    let package = Package::open(package)?;
    let name = &package.spec.name;
    let Some(version) = store.versions(name)?.pop() else { return Ok(None) };
    let Ok(manifest) = store.manifest(name, version) else { return Ok(None) };
    for file in package.files() {
        if manifest.files.get(&file) != Some(&package.checksum(&file)?) {
            return Ok(None);
        }
    }
    Ok(Some((name.clone(), version)))
}

#[cfg(test)]
mod tests;
