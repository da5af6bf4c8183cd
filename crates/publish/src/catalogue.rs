//! Items of a publication: reads them, embeds them, and assigns slots.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::budget::{self, Budget, CatalogueSizes};
use super::embed::{self, Embedded, embed};
use super::plan::{Plan, Progress, Source, Stage};
use sterling_core::error::{Error, Result};
use sterling_core::items::shard_of;
use sterling_core::units::ItemId;
use sterling_index::columns::{self, ItemColumn, ItemValues};
use sterling_index::filter;
use sterling_index::ivf;
use sterling_snapshot::items::Items;
use sterling_snapshot::model::{ColumnSpec, MODEL_FILE, ModelSpec, Package};
use sterling_snapshot::{PROGRAM, Provenance, Recipe, candidates};
use sterling_storage::rows::{RowStore, Spill};

/// Items with their vectors, in input order.
pub(super) struct Catalogue {
    pub(super) path: PathBuf,
    pub(super) items: Items,
    pub(super) embedded: Embedded,
    /// Inverted lists of the items, if the source defines them.
    pub(super) lists: Option<ivf::Lists>,
    pub(super) survey: ivf::RowSurvey,
    pub(super) budget: Budget,
    pub(super) spill: Spill,
}

/// Items with their vectors and slots.
pub(super) struct Arranged {
    pub(super) ids: Vec<i64>,
    pub(super) columns: Vec<ItemColumn>,
    pub(super) built: ivf::Built,
    pub(super) embedded: Embedded,
    /// Memory for sorting vectors on disk by slot, in bytes.
    pub(super) bucket_bytes: u64,
}

/// Parameters of [`Catalogue::arrange`].
pub(super) struct Arranging<'a> {
    pub(super) plan: &'a Plan,
    pub(super) package: Option<&'a Package>,
    pub(super) spec: &'a ModelSpec,
    /// Destination folder of the version or the shard.
    pub(super) folder: &'a Path,
    /// Number of shards of the version, if only one of its shards is written.
    pub(super) of_shards: Option<u32>,
}

/// Reads the items and embeds them; vectors beyond the memory budget go to a file in `folder`.
pub(super) fn read(
    plan: &Plan,
    package: Option<&Package>,
    budget: Budget,
    folder: &Path,
    progress: &Progress<'_>,
) -> Result<Catalogue> {
    let spill = budget.spill(folder);
    let path = plan.source.item_file()?;
    let (mut items, lists) = read_items(plan, &path, &spill)?;
    progress(Stage::Reading, 1, 1);
    embed::check_sources(package, |name| items.has(name))?;
    let embedded = embed(package, &mut items, plan.source.vectors(), &spill, progress)?;
    let survey = ivf::RowSurvey::of(&embedded.vectors)?;
    Ok(Catalogue { path, items, embedded, lists, survey, budget, spill })
}

/// Returns the provenance of the items and their vectors; the caller sets the duration.
pub(super) fn provenance(items: &Path, plan: &Plan) -> Provenance {
    let vectors = plan.source.vectors().filter(|file| *file != items);
    Provenance {
        program: PROGRAM.into(),
        items_file: file_name(items),
        vectors_file: vectors.map(file_name),
        seed: plan.recipe.index.seed,
        seconds: 0.0,
    }
}

impl Catalogue {
    /// Returns the width of an item's vector.
    pub(super) fn dimension(&self) -> usize {
        self.embedded.vectors.cols()
    }

    /// Assigns slots to the items, and retains the columns that the model declares.
    pub(super) fn arrange(mut self, arranging: &Arranging<'_>, progress: &Progress<'_>) -> Result<Arranged> {
        let &Arranging { plan, package, spec, folder, of_shards } = arranging;
        let Recipe { index: options, filter, .. } = &plan.recipe;
        let within = |e: Error| e.within(self.path.display());
        let columns = keep(spec, &mut self.items).map_err(within)?;
        // Vectors that only the item tower reads are no longer needed.
        self.items.dense.clear();
        if let Some(package) = package {
            let numeric = columns.iter().filter(|c| !matches!(c.values, ItemValues::Texts { .. }));
            package.value(&numeric.map(|c| c.name.as_str()).collect::<Vec<_>>())?;
            let kind = |name: &str| columns.iter().find(|c| c.name == name).map(|c| c.values.kind());
            candidates::check_features(&package.spec, &kind).map_err(within)?;
        }
        let Embedded { vectors, kept } = self.embedded;
        let survey = self.survey;
        let sizes = match &self.lists {
            Some(lists) => ivf::Sizes::of_lists(&survey, lists.centroids.len() / vectors.cols(), options)?,
            None => ivf::Sizes::of(&survey, options)?,
        };
        progress(Stage::Sized(sizes), 0, 1);
        let memory = self.budget.plan(package, held(&columns, &kept, filter), &sizes)?;
        progress(Stage::Planned(memory), 0, 1);
        let disk_bytes = match (of_shards, plan.output.count()) {
            (Some(shards), _) => memory.disk_bytes / u64::from(shards),
            // The complete version exists next to its shards until the shards are finished.
            (None, Some(_)) => memory.disk_bytes * 2,
            (None, None) => memory.disk_bytes,
        };
        budget::check_disk(folder, disk_bytes)?;
        let vectors = match (memory.bucket_bytes, of_shards) {
            (None, None) => vectors.fetched(&Spill::never()),
            // If a single shard is written, the other shards are not in memory.
            _ => vectors.spilled(&self.spill),
        }?;
        let alike = columns::likeness(&columns, &filter.together, self.items.len())
            .map_err(|e| e.within(self.path.display()))?;
        let mut built = match self.lists {
            Some(lists) => {
                let mut built = ivf::from_lists(&survey, lists, options.rescore)?;
                built.train_first_pass(&vectors, options)?;
                built
            }
            None => cluster(&vectors, &survey, options, progress)?,
        };
        built.sort_lists(&alike);
        let embedded = Embedded { vectors, kept };
        let bucket_bytes = memory.bucket_bytes.unwrap_or(u64::MAX);
        Ok(Arranged { ids: self.items.ids, columns, built, embedded, bucket_bytes })
    }
}

impl Arranged {
    /// Selects the items of one shard, in the lists of the complete version.
    ///
    /// # Errors
    /// `Invalid` if the shard has no items.
    pub(super) fn shard(&self, shard: u32, shards: u32) -> Result<ivf::Built> {
        let built = self.built.part(|row| shard_of(ItemId(self.ids[row as usize]), shards) == shard);
        match built.items() {
            0 => Err(Error::invalid(format!(
                "shards: shard {shard} of {shards} gets none of {} items, expected fewer shards",
                self.ids.len()
            ))),
            _ => Ok(built),
        }
    }
}

fn held(columns: &[ItemColumn], kept: &[u8], filter: &filter::Options) -> CatalogueSizes {
    let terms = columns.iter().filter(|column| column.filter).fold(Vec::new(), |mut terms: Vec<u32>, column| {
        if let ItemValues::Integers { offsets, .. } | ItemValues::Texts { offsets, .. } = &column.values {
            terms.resize(offsets.len() - 1, 0);
            terms.iter_mut().zip(offsets.windows(2)).for_each(|(terms, of_item)| *terms += of_item[1] - of_item[0]);
        }
        terms
    });
    let sum = |of: fn(&ItemValues) -> usize| columns.iter().map(|c| of(&c.values) as u64).sum();
    CatalogueSizes {
        columns: columns.len() as u64,
        values: sum(ItemValues::count),
        bloom_bits: u64::from(filter.bloom_bits(&mut { terms })),
        column_bytes: sum(ItemValues::bytes),
        kept_bytes: kept.len() as u64,
    }
}

/// Reads the items, and their lists if the source defines them.
fn read_items(plan: &Plan, path: &Path, spill: &Spill) -> Result<(Items, Option<ivf::Lists>)> {
    let Source::Faiss { index, items, .. } = &plan.source else {
        return Ok((Items::read_spilling(path, plan.source.vectors(), spill)?, None));
    };
    if plan.recipe.index.lists != 0 {
        return Err(Error::invalid(format!(
            "index.lists: got {}, expected none: the lists are those of {}",
            plan.recipe.index.lists,
            index.display()
        )));
    }
    let (items, lists) = Items::read_faiss(index, items.as_deref())?;
    Ok((items, Some(lists)))
}

/// Clusters the items and assigns slots.
fn cluster(
    rows: &RowStore<'_>,
    survey: &ivf::RowSurvey,
    options: &ivf::Options,
    progress: &Progress<'_>,
) -> Result<ivf::Built> {
    let total = ivf::steps(survey, options)?;
    let done = AtomicUsize::new(0);
    ivf::build(rows, survey, options, &|n| {
        progress(Stage::Clustering, done.fetch_add(n, Ordering::Relaxed) + n, total);
    })
}

/// Selects the item columns that the package declares, for the snapshot.
fn keep(spec: &ModelSpec, items: &mut Items) -> Result<Vec<ItemColumn>> {
    let columns = std::mem::take(&mut items.columns);
    if spec.item.columns.is_empty() {
        spec.check_columns(columns.iter().map(|c| c.name.as_str()))?;
        return Ok(columns);
    }
    let mut by_name: BTreeMap<String, ItemColumn> = columns.into_iter().map(|c| (c.name.clone(), c)).collect();
    let known = by_name.keys().cloned().collect::<Vec<_>>().join(", ");
    let take = |declared: &ColumnSpec| {
        let mut column = by_name.remove(&declared.name).ok_or_else(|| {
            Error::invalid(format!(
                "no column `{}`, which {MODEL_FILE} declares; the items have: {known}",
                declared.name
            ))
        })?;
        column.filter = declared.filter;
        Ok(column)
    };
    spec.item.columns.iter().map(take).collect()
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}
