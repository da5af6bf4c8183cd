//! Publishing: package, recipe and items become a version in the store, whole or not at all.
//!
//! 1. The package is opened and checked; the items are read.
//! 2. Items become vectors: their own column, or the item tower over their features.
//! 3. The vectors are clustered, or keep the lists that they came in, which puts the items into slots.
//! 4. Columns, ids, planes and rows are written in slot order, tables in their formats; the package's other files are copied.
//! 5. Rows that are to lie on a cluster are brought there.
//! 6. The manifest is written last, and the folder gets its name.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use super::manifest::{FORMAT, Manifest, Provenance, Store};
use super::recipe::Recipe;
use super::tables::{self, Remote};
use super::{COLUMNS_FILE, FILTER_FILE, INDEX_FILE, RECIPE_FILE, ids};
use crate::columns::{self, Columns, ItemColumn, ItemValues};
use crate::error::{Error, Result};
use crate::files::{self, Checksum, TensorFile, Tensors};
use crate::items::{EMBEDDING, ID, Items};
use crate::model::{FeatureValues, Features, MODEL_FILE, ModelSpec, Package};
use crate::sparse::Lookup;
use crate::tensor::Matrix;
use crate::{bloom, ivf};

/// Items that the item tower takes at a time.
const TOWER_BATCH: usize = 512;

/// What is published.
#[derive(Clone, Debug, Default)]
pub struct Publish {
    /// The model package; without one the model is embedding-only and called `name`.
    pub package: Option<PathBuf>,
    /// The name of an embedding-only model.
    pub name: Option<String>,
    /// The item file; a package's own `items.parquet` where it is not given. Not needed with [`Vectors::Faiss`].
    pub items: Option<PathBuf>,
    /// Vectors beside the item file.
    pub vectors: Option<Vectors>,
    /// How the index is built.
    pub recipe: Recipe,
    /// The cluster that gets rows of the tables too.
    pub remote: Option<Remote>,
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
    fn path(&self) -> &Path {
        match self {
            Vectors::Npy(path) | Vectors::Faiss(path) => path,
        }
    }
}

/// A part of a publication, for a progress bar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Stage {
    Reading,
    Embedding,
    Clustering,
    Writing,
    Loading,
}

/// Publishes a version and returns the model's name and the version's number. `progress` is told the stage, how much of it is done, and its size.
///
/// # Errors
/// What is wrong with the package, the recipe or the items, with the place. The store is then as it was.
pub fn publish(
    store: &Store,
    what: &Publish,
    progress: &(dyn Fn(Stage, usize, usize) + Sync),
) -> Result<(String, u64)> {
    let start = Instant::now();
    progress(Stage::Reading, 0, 1);
    let package = what.package.as_deref().map(Package::open).transpose()?;
    let path = match (&what.items, &package, &what.vectors) {
        (Some(path), _, _) | (None, None, Some(Vectors::Faiss(path))) => path.clone(),
        (None, Some(package), _) => package.folder().join("items.parquet"),
        (None, None, _) => {
            return Err(Error::invalid(
                "items: expected an item file or an index of Faiss for an embedding-only model",
            ));
        }
    };
    let (mut items, lists) = read(what, &path)?;
    progress(Stage::Reading, 1, 1);
    let vectors = embed(package.as_ref(), &mut items, progress)?;
    let rows = Matrix::new(&vectors, vectors.len() / items.len())?;
    let (spec, tables) = match (&package, &what.name) {
        (Some(package), _) => tables::converted(package, &what.recipe.tables)?,
        (None, Some(name)) => (ModelSpec::embedding_only(name, rows.cols()), Vec::new()),
        (None, None) => return Err(Error::invalid("name: expected one for an embedding-only model")),
    };
    let kept = keep(&spec, &mut items).map_err(|e| e.within(path.display()))?;
    let names: Vec<&str> =
        kept.iter().filter(|c| !matches!(c.values, ItemValues::Texts { .. })).map(|c| c.name.as_str()).collect();
    if let Some(package) = &package {
        package.value(&names)?;
    }
    let alike =
        columns::likeness(&kept, &what.recipe.filter.together, items.len()).map_err(|e| e.within(path.display()))?;
    let mut built = arrange(rows, lists, &what.recipe.index, progress)?;
    built.sort_lists(&alike);
    let mut loaded = Vec::new();
    let published = store.publish(&spec.name, |folder, version| {
        let mut files = BTreeMap::new();
        write(folder, &mut files, &items, rows, &kept, &built, &what.recipe, progress)?;
        for (package, name) in package.iter().flat_map(|p| p.files().into_iter().map(move |name| (p, name))) {
            let (from, to) = (package.folder().join(&name), folder.join(&name));
            let sum = match tables::is_converted(&name, package, &tables) {
                true => tables::write(&to, &name, package, &tables)?,
                false => put(&to, &fs::read(&from).map_err(|e| Error::io(from.display(), e))?)?,
            };
            files.insert(name, sum);
        }
        if package.as_ref().is_none_or(|p| p.spec != spec) {
            files.insert(MODEL_FILE.into(), put(&folder.join(MODEL_FILE), spec.to_toml()?.as_bytes())?);
        }
        files.insert(RECIPE_FILE.into(), put(&folder.join(RECIPE_FILE), what.recipe.to_toml()?.as_bytes())?);
        let provenance = Provenance {
            program: format!("sterling {}", env!("CARGO_PKG_VERSION")),
            items_file: file_name(&path),
            vectors_file: what.vectors.as_ref().map(Vectors::path).filter(|file| *file != path).map(file_name),
            seed: what.recipe.index.seed,
            seconds: start.elapsed().as_secs_f64(),
        };
        let manifest = Manifest {
            format: FORMAT,
            name: spec.name.clone(),
            version,
            dimension: rows.cols(),
            items: items.len(),
            slots: built.order.len(),
            lists: built.list_lengths.len(),
            provenance,
            files,
        };
        if let Some(remote) = &what.remote {
            let told = |done, total| progress(Stage::Loading, done, total);
            loaded = tables::load(remote, &spec, version, &tables, &told)?;
        }
        manifest.write(folder)
    });
    if let (Err(_), Some(remote)) = (&published, &what.remote) {
        tables::unload(remote, &loaded);
    }
    Ok((spec.name.clone(), published?))
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

/// The items, and the lists that they lie in where they came with some.
fn read(what: &Publish, path: &Path) -> Result<(Items, Option<ivf::Lists>)> {
    let Some(Vectors::Faiss(index)) = &what.vectors else {
        return Ok((Items::read(path, what.vectors.as_ref().map(Vectors::path))?, None));
    };
    if what.package.is_some() {
        let index = index.display();
        return Err(Error::invalid(format!("{index}: an index of Faiss makes an embedding-only model, got a package")));
    }
    if what.recipe.index.lists != 0 {
        return Err(Error::invalid(format!(
            "index.lists: got {}, expected none: the lists are those of {}",
            what.recipe.index.lists,
            index.display()
        )));
    }
    let (items, lists) = Items::read_faiss(index, what.items.as_deref())?;
    Ok((items, Some(lists)))
}

/// The items' slots: in the lists that they came with, or in clusters.
fn arrange(
    rows: Matrix<'_>,
    lists: Option<ivf::Lists>,
    options: &ivf::Options,
    progress: &(dyn Fn(Stage, usize, usize) + Sync),
) -> Result<ivf::Built> {
    if let Some(lists) = lists {
        return ivf::from_lists(rows, lists, options.rescore);
    }
    let total = ivf::steps(rows.rows(), options)?;
    let done = AtomicUsize::new(0);
    ivf::build(rows, options, &|n| {
        progress(Stage::Clustering, done.fetch_add(n, Ordering::Relaxed) + n, total);
    })
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

fn put(path: &Path, bytes: &[u8]) -> Result<Checksum> {
    files::write_atomic(path, |out| out.write_all(bytes))
}

#[allow(clippy::too_many_arguments)] // The parts of one snapshot, each used once.
fn write(
    folder: &Path,
    sums: &mut BTreeMap<String, Checksum>,
    items: &Items,
    rows: Matrix<'_>,
    kept: &[ItemColumn],
    built: &ivf::Built,
    recipe: &Recipe,
    progress: &(dyn Fn(Stage, usize, usize) + Sync),
) -> Result<()> {
    progress(Stage::Writing, 0, 3);
    let mut file = TensorFile::new();
    built.encode(rows, &mut file)?;
    sums.insert(INDEX_FILE.into(), file.write(&folder.join(INDEX_FILE))?);
    progress(Stage::Writing, 1, 3);
    let mut file = TensorFile::new();
    columns::encode(kept, &built.order, &mut file)?;
    ids::encode(&items.ids, &built.order, &mut file)?;
    sums.insert(COLUMNS_FILE.into(), file.write(&folder.join(COLUMNS_FILE))?);
    progress(Stage::Writing, 2, 3);
    let written = Columns::open(&Tensors::open(&folder.join(COLUMNS_FILE))?, built.order.len())?;
    let mut file = TensorFile::new();
    bloom::encode(&written, &built.list_offsets, &built.list_lengths, &recipe.filter, &mut file)?;
    sums.insert(FILTER_FILE.into(), file.write(&folder.join(FILTER_FILE))?);
    progress(Stage::Writing, 3, 3);
    Ok(())
}

/// The vectors of all items, row after row.
fn embed(
    package: Option<&Package>,
    items: &mut Items,
    progress: &(dyn Fn(Stage, usize, usize) + Sync),
) -> Result<Vec<f32>> {
    let Some(tower) = package.and_then(|p| p.item.as_ref()) else {
        let dense = items.dense.remove(EMBEDDING).ok_or_else(|| {
            Error::invalid(format!(
                "items: no column `{EMBEDDING}` and no vectors beside the file, expected a vector an item"
            ))
        })?;
        if let Some(want) = package.map(|p| p.spec.dimension).filter(|want| *want != dense.width) {
            return Err(Error::invalid(format!(
                "items: vectors of {} numbers, expected {want} as {MODEL_FILE} says",
                dense.width
            )));
        }
        return Ok(dense.values);
    };
    let mut vectors = Vec::new();
    for first in (0..items.len()).step_by(TOWER_BATCH) {
        let batch = first..(first + TOWER_BATCH).min(items.len());
        let features = batch.clone().map(|row| features(tower.features(), items, row)).collect::<Result<Vec<_>>>()?;
        let place = |e: Error| e.within(format!("items {} to {}", batch.start + 1, batch.end));
        let (pooled, _) = tower.lookup(&features, &Lookup::default()).map_err(place)?;
        vectors.extend_from_slice(tower.run(&pooled).map_err(place)?.data());
        progress(Stage::Embedding, batch.end, items.len());
    }
    Ok(vectors)
}

/// The features of one item, read from its columns.
fn features(specs: &[crate::model::FeatureSpec], items: &Items, row: usize) -> Result<Features> {
    let mut features = Features::new();
    for source in specs.iter().map(|s| s.source()) {
        if source == ID {
            features.insert(source.into(), FeatureValues::Ids { values: vec![items.ids[row]], weights: None });
        } else if let Some(dense) = items.dense.get(source) {
            let numbers = dense.values[row * dense.width..(row + 1) * dense.width].to_vec();
            features.insert(source.into(), FeatureValues::Dense(numbers));
        } else if let Some(column) = items.columns.iter().find(|c| c.name == source) {
            let kinds = || specs.iter().filter(|s| s.source() == source).map(|s| s.kind);
            let range = |offsets: &[u32]| offsets[row] as usize..offsets[row + 1] as usize;
            let values = match &column.values {
                ItemValues::Texts { offsets, values } => FeatureValues::Categories(values[range(offsets)].to_vec()),
                ItemValues::Integers { offsets, values } if kinds().any(|k| k == crate::model::FeatureKind::Ids) => {
                    FeatureValues::Ids { values: values[range(offsets)].to_vec(), weights: None }
                }
                ItemValues::Integers { offsets, values } => {
                    FeatureValues::Categories(values[range(offsets)].iter().map(i64::to_string).collect())
                }
                ItemValues::Floats(values) => {
                    FeatureValues::Dense(vec![if values[row].is_nan() { 0.0 } else { values[row] as f32 }])
                }
            };
            features.insert(source.into(), values);
        } else {
            return Err(Error::invalid(format!("items: no column `{source}`, which the item tower reads")));
        }
    }
    Ok(features)
}

/// The columns that the snapshot keeps, as the package declares them.
fn keep(spec: &ModelSpec, items: &mut Items) -> Result<Vec<ItemColumn>> {
    let columns = std::mem::take(&mut items.columns);
    if spec.item.columns.is_empty() {
        let read = |name: &str| name == EMBEDDING || spec.item.features.iter().any(|f| f.source() == name);
        if let Some((name, dense)) = items.dense.iter().find(|(name, _)| !read(name)) {
            return Err(Error::invalid(format!(
                "column `{name}`: got vectors of {} numbers, which no item tower reads, expected texts, integers or single \
                 numbers; leave it out, or name the columns to keep in {MODEL_FILE}",
                dense.width
            )));
        }
        spec.check_columns(columns.iter().map(|c| c.name.as_str()))?;
        return Ok(columns);
    }
    let mut by_name: BTreeMap<String, ItemColumn> = columns.into_iter().map(|c| (c.name.clone(), c)).collect();
    let known = by_name.keys().cloned().collect::<Vec<_>>().join(", ");
    let take = |declared: &crate::model::ColumnSpec| {
        let mut column = by_name.remove(&declared.name).ok_or_else(|| {
            Error::invalid(format!("no column `{}`, which {MODEL_FILE} declares; there are: {known}", declared.name))
        })?;
        column.filter = declared.filter;
        Ok(column)
    };
    spec.item.columns.iter().map(take).collect()
}
