//! Publishing: package, recipe and items become a version in the store, whole or not at all.
//!
//! 1. The package's graphs are tried (`crate::trial`); it is opened and checked; the items are read (`catalogue`).
//! 2. Items become vectors: their own column, or the item tower over their features (`embed`).
//! 3. The vectors are clustered, or keep the lists that they came in, which puts the items into slots.
//! 4. Columns, ids, planes and rows are written in slot order, tables in their formats; the package's other files are copied
//!    (`write`).
//! 5. What the files hold is searched with sample queries: how many lists a recall takes (`calibrate`).
//! 6. The reranker scores the items, and the version answers the requests that are kept with the package (`crate::warmup`).
//! 7. Rows that are to lie on a cluster are brought there (`remote`).
//! 8. The manifest is written last, and the folder gets its name.
//!
//! [`merge`] makes a version of one that is served and its updates, by the last three quarters of these steps.

pub mod calibrate;
mod catalogue;
mod embed;
mod merge;
mod remote;
mod request;
mod tables;
mod warm;
mod write;

use std::fs;
use std::path::Path;
use std::time::Instant;

use crate::columns::Columns;
use crate::error::{Error, Result};
use crate::files::{Checksum, Tensors};
use crate::ivf;
use crate::model::{ModelSpec, Package};
use crate::snapshot::{
    CALIBRATION_FILE, COLUMNS_FILE, CandidateRows, FORMAT, INDEX_FILE, Ids, Manifest, Provenance, QUERIES_FILE, Store,
    VECTORS_FILE,
};
use crate::trial;

pub use merge::{Merge, merge};
pub use remote::Remote;
pub use request::{Progress, Publish, Stage, Vectors};

/// Publishes a version and returns the model's name and the version's number.
///
/// # Errors
/// What is wrong with the package, the recipe or the items, with the place. The store is then as it was.
pub fn publish(store: &Store, what: &Publish, progress: &Progress<'_>) -> Result<(String, u64)> {
    let start = Instant::now();
    if let Some(folder) = &what.package {
        progress(Stage::Trying, 0, 1);
        what.trials.run(folder)?;
    }
    progress(Stage::Reading, 0, 1);
    let package = what.package.as_deref().map(Package::open).transpose()?;
    let catalogue = catalogue::read(what, package.as_ref(), progress)?;
    let (spec, tables) = match (&package, &what.name) {
        (Some(package), _) => tables::converted(package, &what.recipe.tables)?,
        (None, Some(name)) => (ModelSpec::embedding_only(name, catalogue.rows()?.cols()), Vec::new()),
        (None, None) => return Err(Error::invalid("name: expected one for an embedding-only model")),
    };
    let provenance = catalogue.provenance(what);
    let arranged = catalogue.arrange(package.as_ref(), &spec, &what.recipe, progress)?;
    let version_files = write::Version {
        package: package.as_ref(),
        spec: &spec,
        tables: &tables,
        arranged: &arranged,
        recipe: &what.recipe,
        version: None,
    };
    let mut loaded = Vec::new();
    let published = store.publish(&spec.name, |folder, version| {
        let mut files = version_files.write(folder, progress)?;
        let told = |done, total| progress(Stage::Calibrating, done, total);
        let (queries, own) = (what.queries.as_deref(), what.package.as_deref());
        if let Some((calibration, queries)) = calibrate::version(folder, queries, own, &what.recipe, &told)? {
            files.insert(CALIBRATION_FILE.into(), calibration.write(&folder.join(CALIBRATION_FILE))?);
            files.extend(queries.write(&folder.join(QUERIES_FILE))?.map(|sum| (QUERIES_FILE.into(), sum)));
        }
        let graphs =
            package.iter().flat_map(Package::graphs).map(|(file, runs)| (file.to_owned(), runs.into())).collect();
        let mut manifest = Manifest {
            format: FORMAT,
            name: spec.name.clone(),
            version,
            dimension: arranged.rows()?.cols(),
            items: arranged.ids.len(),
            slots: arranged.built.order.len(),
            lists: arranged.built.list_lengths.len(),
            position: what.position,
            merged: None,
            provenance: Provenance { seconds: start.elapsed().as_secs_f64(), ..provenance },
            files,
            graphs: Some(graphs),
        };
        package.iter().try_for_each(|package| score_items(package, folder))?;
        warm::answer(folder, &mut manifest, !what.recipe.is_coarse())?;
        if let Some(remote) = &what.remote {
            let told = |done, total| progress(Stage::Loading, done, total);
            loaded = remote::load(remote, &spec, &manifest, &tables, &told)?;
            manifest.provenance.seconds = start.elapsed().as_secs_f64();
        }
        manifest.write(folder)
    });
    if let (Err(_), Some(remote)) = (&published, &what.remote) {
        remote::unload(remote, &loaded);
    }
    Ok((spec.name.clone(), published?))
}

/// Lets the reranker score the items of the version in `folder`.
fn score_items(package: &Package, folder: &Path) -> Result<()> {
    let index = ivf::Index::open(&Tensors::open(&folder.join(INDEX_FILE))?)?;
    let tensors = Tensors::open(&folder.join(COLUMNS_FILE))?;
    let columns = Columns::open(&tensors, index.slots())?;
    let ids = Ids::open(&tensors, index.slots(), index.items())?;
    let has_vectors = !package.spec.item.vectors.is_empty();
    let vectors = has_vectors.then(|| Tensors::open(&folder.join(VECTORS_FILE))).transpose()?;
    let candidates = CandidateRows::open(package, &columns, &ids, vectors.as_ref())?;
    trial::score_items(package, &index, &columns, &|slot, row| candidates.write(&index, slot, row))
}

/// The name and newest version of a package's model, where that version was published from the same files.
///
/// # Errors
/// What is wrong with the package, or `Io`.
pub fn published(store: &Store, package: &Path) -> Result<Option<(String, u64)>> {
    let package = Package::open(package)?;
    let name = &package.spec.name;
    let Some(version) = store.versions(name)?.pop() else { return Ok(None) };
    let Ok(manifest) = Manifest::read(&store.folder(name, version)) else { return Ok(None) };
    for file in package.files() {
        let path = package.folder().join(&file);
        let bytes = fs::read(&path).map_err(|e| Error::io(path.display(), e))?;
        if manifest.files.get(&file) != Some(&Checksum::of(&bytes)) {
            return Ok(None);
        }
    }
    Ok(Some((name.clone(), version)))
}
