//! The items of a publication: read, given vectors, and put into slots.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::embed::{Embedded, embed};
use super::request::{Progress, Publish, Stage, Vectors};
use crate::columns::{self, ItemColumn, ItemValues};
use crate::error::{Error, Result};
use crate::items::{EMBEDDING, Items};
use crate::ivf;
use crate::model::{ColumnSpec, MODEL_FILE, ModelSpec, Package};
use crate::rows::{RowStore, Spill};
use crate::snapshot::{PROGRAM, Provenance, Recipe, candidates};

/// Items with their vectors, in the order that they came in.
pub(super) struct Catalogue {
    path: PathBuf,
    items: Items,
    embedded: Embedded,
    lists: Option<ivf::Lists>,
}

/// Items with their vectors, and the slots that they get.
pub(super) struct Arranged {
    pub(super) ids: Vec<i64>,
    pub(super) columns: Vec<ItemColumn>,
    pub(super) built: ivf::Built,
    pub(super) embedded: Embedded,
}

/// Reads what is published and gives each item its vector.
pub(super) fn read(
    what: &Publish,
    package: Option<&Package>,
    spill: &Spill,
    progress: &Progress<'_>,
) -> Result<Catalogue> {
    let path = match (&what.items, package, &what.vectors) {
        (Some(path), _, _) | (None, None, Some(Vectors::Faiss(path))) => path.clone(),
        (None, Some(package), _) => package.folder().join("items.parquet"),
        (None, None, _) => {
            return Err(Error::invalid(
                "items: expected an item file or an index of Faiss for an embedding-only model",
            ));
        }
    };
    let (mut items, lists) = read_items(what, &path, spill)?;
    progress(Stage::Reading, 1, 1);
    let embedded = embed(package, &mut items, spill, progress)?;
    Ok(Catalogue { path, items, embedded, lists })
}

impl Catalogue {
    /// Width of an item's vector.
    pub(super) fn dimension(&self) -> usize {
        self.embedded.vectors.cols()
    }

    /// Where the items and vectors came from, with how long it took left open.
    pub(super) fn provenance(&self, what: &Publish) -> Provenance {
        let vectors = what.vectors.as_ref().map(Vectors::path).filter(|file| *file != self.path);
        Provenance {
            program: PROGRAM.into(),
            items_file: file_name(&self.path),
            vectors_file: vectors.map(file_name),
            seed: what.recipe.index.seed,
            seconds: 0.0,
        }
    }

    /// Puts the items into slots, and keeps the columns that the model declares.
    pub(super) fn arrange(
        mut self,
        package: Option<&Package>,
        spec: &ModelSpec,
        recipe: &Recipe,
        progress: &Progress<'_>,
    ) -> Result<Arranged> {
        let within = |e: Error| e.within(self.path.display());
        let columns = keep(spec, &mut self.items).map_err(within)?;
        if let Some(package) = package {
            let numeric = columns.iter().filter(|c| !matches!(c.values, ItemValues::Texts { .. }));
            package.value(&numeric.map(|c| c.name.as_str()).collect::<Vec<_>>())?;
            let kind = |name: &str| columns.iter().find(|c| c.name == name).map(|c| c.values.kind());
            candidates::check_features(&package.spec, &kind).map_err(within)?;
        }
        let alike = columns::likeness(&columns, &recipe.filter.together, self.items.len()).map_err(within)?;
        let lists = self.lists.take();
        let mut built = arrange(&self.embedded.vectors, lists, &recipe.index, progress)?;
        built.sort_lists(&alike);
        Ok(Arranged { ids: self.items.ids, columns, built, embedded: self.embedded })
    }
}

/// The items, and the lists that they lie in where they came with some.
fn read_items(what: &Publish, path: &Path, spill: &Spill) -> Result<(Items, Option<ivf::Lists>)> {
    let Some(Vectors::Faiss(index)) = &what.vectors else {
        return Ok((Items::read_spilling(path, what.vectors.as_ref().map(Vectors::path), spill)?, None));
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
    rows: &RowStore<'_>,
    lists: Option<ivf::Lists>,
    options: &ivf::Options,
    progress: &Progress<'_>,
) -> Result<ivf::Built> {
    let survey = ivf::Survey::of(rows)?;
    if let Some(lists) = lists {
        let sizes = ivf::Sizes::of_lists(&survey, lists.centroids.len() / rows.cols(), options.rescore);
        progress(Stage::Sized(sizes), 0, 1);
        return ivf::from_lists(&survey, lists, options.rescore);
    }
    progress(Stage::Sized(ivf::Sizes::of(&survey, options)?), 0, 1);
    let total = ivf::steps(rows.rows(), options)?;
    let done = AtomicUsize::new(0);
    ivf::build(rows, &survey, options, &|n| {
        progress(Stage::Clustering, done.fetch_add(n, Ordering::Relaxed) + n, total);
    })
}

/// The columns that the snapshot keeps, as the package declares them.
fn keep(spec: &ModelSpec, items: &mut Items) -> Result<Vec<ItemColumn>> {
    let columns = std::mem::take(&mut items.columns);
    if spec.item.columns.is_empty() {
        let kept = |name: &str| spec.item.vectors.iter().any(|v| v.column.as_deref() == Some(name));
        let of_tower = |name: &str| spec.item.features.iter().any(|f| f.source() == name);
        let read = |name: &str| name == EMBEDDING || kept(name) || of_tower(name);
        if let Some((name, dense)) = items.dense.iter().find(|(name, _)| !read(name)) {
            return Err(Error::invalid(format!(
                "column `{name}`: got vectors of {} numbers, which no item tower reads, expected texts, integers or single \
                 numbers; leave it out, or name the columns to keep in {MODEL_FILE}",
                dense.cols()
            )));
        }
        spec.check_columns(columns.iter().map(|c| c.name.as_str()))?;
        return Ok(columns);
    }
    let mut by_name: BTreeMap<String, ItemColumn> = columns.into_iter().map(|c| (c.name.clone(), c)).collect();
    let known = by_name.keys().cloned().collect::<Vec<_>>().join(", ");
    let take = |declared: &ColumnSpec| {
        let mut column = by_name.remove(&declared.name).ok_or_else(|| {
            Error::invalid(format!("no column `{}`, which {MODEL_FILE} declares; there are: {known}", declared.name))
        })?;
        column.filter = declared.filter;
        Ok(column)
    };
    spec.item.columns.iter().map(take).collect()
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}
