//! Loads a published version for serving, or rejects it with the reason.

use std::path::Path;

use super::calibration::{Calibration, Recalibration};
use super::candidates::{CandidateRows, RowSources};
use super::ids::Ids;
use super::manifest::{GraphRecord, Manifest};
use super::part;
use super::placement::Placement;
use super::recipe::Recipe;
use super::shards::Shards;
use super::vectors;
use super::{CALIBRATION_FILE, COLUMNS_FILE, FILTER_FILE, INDEX_FILE, PARTS_FILE, RECIPE_FILE, VECTORS_FILE};
use crate::model::{MODEL_FILE, ModelSpec, Package, SIMILARITY};
use crate::sandbox::ColumnCheck;
use sterling_core::error::{Error, Result};
use sterling_embedding::Table;
use sterling_graph::tower::OverArch;
use sterling_index::columns::{ColumnKind, Columns};
use sterling_index::filter;
use sterling_index::ivf;
use sterling_index::value::Program;
use sterling_storage::files::Tensors;

/// A loaded snapshot, immutable.
#[derive(Debug)]
pub struct Snapshot {
    /// Sizes, provenance and checksums of the version.
    pub manifest: Manifest,
    /// Towers, tables, reranker and value model.
    pub package: Package,
    /// The item index.
    pub index: ivf::Index,
    /// Bloom planes and posting lists.
    pub filter: filter::Index,
    /// Item columns.
    pub columns: Columns,
    /// Map between slots and item ids.
    pub ids: Ids,
    /// Compiled value model.
    pub value: Program,
    /// Build options of the index, and serving defaults.
    pub recipe: Recipe,
    /// Number of probes by recall, if it was measured.
    pub calibration: Option<Calibration>,
    /// Numeric columns that the reranker and the value model read, one f32 per slot.
    pub numbers: Vec<(String, Vec<f32>)>,
    /// Tensors of `[[item.vectors]]`, each a table with one row per slot.
    pub vectors: Vec<Table>,
    /// Rows that the reranker reads per candidate.
    pub candidates: CandidateRows,
    /// All shards of the version, if it is partitioned.
    pub shards: Option<Shards>,
    /// Check of the item columns that the reranker reads, for items that are added later.
    pub column_check: Option<ColumnCheck>,
    digest: String,
}

impl Snapshot {
    /// Loads the snapshot in `folder`: reads the manifest, verifies all checksums, opens the files and checks that their sizes
    /// agree. `placement` decides where tables are stored. Data that requests read is copied to private memory in huge pages, so
    /// that a write to a file or its truncation neither changes an answer nor ends the process.
    ///
    /// # Errors
    /// `NotFound` without a manifest, or for a shard without the file that lists all shards; `Corrupt` or `Unsupported` with the
    /// file and the reason; and errors of the table placement.
    pub fn load(folder: &Path, placement: &Placement) -> Result<Self> {
        let manifest = Manifest::read(folder)?;
        let shards = manifest.shard.map(|_| Shards::read(folder.parent().unwrap_or(folder))).transpose()?;
        if let Some(shards) = &shards {
            shards.check(&manifest).map_err(|e| e.within(folder.display()))?;
        }
        manifest.verify(folder)?;
        let package =
            Package::open_placed(folder, &manifest.decisions, |spec, tables| placement.place(spec, &manifest, tables))?;
        let snapshot = Snapshot::assemble(folder, manifest, package).map_err(|e| e.within(folder.display()))?;
        Ok(Snapshot { shards, ..snapshot })
    }

    fn assemble(folder: &Path, manifest: Manifest, package: Package) -> Result<Self> {
        check_files(&manifest, &package)?;
        let recipe = Recipe::read(&folder.join(RECIPE_FILE))?;
        let index = ivf::Index::open(&Tensors::read(&folder.join(INDEX_FILE))?)?;
        let calibration = calibration(folder, &manifest, &index)?;
        let tensors = Tensors::read(&folder.join(COLUMNS_FILE))?;
        let columns = Columns::open(&tensors, index.slots())?;
        let ids = Ids::open(&tensors, index.slots(), index.items())?;
        let tensors = Tensors::read(&folder.join(FILTER_FILE))?;
        let filter = filter::Index::open(&tensors, index.list_offsets(), index.list_lengths(), columns.terms())?;
        check_sizes(&manifest, &package, &index)?;
        let numeric: Vec<&str> = columns.list().filter(|c| c.kind() != ColumnKind::Texts).map(|c| c.name()).collect();
        let value = package.value(&numeric)?;
        let vectors = match &package.spec.item.vectors[..] {
            [] => Vec::new(),
            specs => vectors::open(specs, &Tensors::read(&folder.join(VECTORS_FILE))?, index.slots())?,
        };
        let part = match (package.overarch.as_ref().and_then(OverArch::part), &manifest.decisions.item_part) {
            (Some(part), Some(decided)) => {
                let tensors = Tensors::read(&folder.join(PARTS_FILE))?;
                Some(part::open(&tensors, part, decided.format, index.slots()).map_err(|e| e.within(PARTS_FILE))?)
            }
            _ => None,
        };
        let from = RowSources { package: &package, columns: &columns, ids: &ids, vectors: &vectors };
        let candidates = CandidateRows::open(&from, part)?;
        let numbers = numbers(&package, &value, &columns);
        log_other_graphs(&manifest, &package);
        let column_check = ColumnCheck::of(&package)?;
        let digest = manifest.published_digest();
        Ok(Snapshot {
            manifest,
            package,
            index,
            filter,
            columns,
            ids,
            value,
            recipe,
            calibration,
            numbers,
            vectors,
            candidates,
            shards: None,
            column_check,
            digest,
        })
    }

    /// Estimates from the manifest the memory of a snapshot before it is loaded. Counts its tensor files, its columns twice (the
    /// reranker and the value model read f32 copies), four times the size of graphs and other parsed files, and tables as placed.
    ///
    /// # Errors
    /// Errors of `model.toml`.
    pub fn memory_bytes(folder: &Path, manifest: &Manifest, placement: &Placement) -> Result<u64> {
        let spec = spec(folder)?;
        let bytes = |file: &str| manifest.files.get(file).map_or(0, |sum| sum.bytes);
        let others = manifest.files.keys().filter(|file| spec.tables.iter().all(|t| t.file != **file));
        let times = |file: &str| match file {
            COLUMNS_FILE => 2,
            _ if file.ends_with(".safetensors") => 1,
            _ => 4,
        };
        let others: u64 = others.map(|file| bytes(file).saturating_mul(times(file))).sum();
        Ok(others.saturating_add(placement.memory_bytes(&spec, bytes)))
    }

    /// Checks that a load of the version in `folder` would find the rows that the placement expects on a cluster.
    ///
    /// # Errors
    /// `Invalid` if no cluster is configured; `NotReady` if the cluster lacks the rows; `Unavailable` if it does not answer.
    pub fn check_cluster(folder: &Path, manifest: &Manifest, placement: &Placement) -> Result<()> {
        placement.check_cluster(&spec(folder)?, manifest)
    }

    /// Returns the default number of candidates for a request for `k` items, K0; equal to `k` if no reranker or value model
    /// changes the order.
    pub fn candidates(&self, k: usize) -> usize {
        let is_plain = self.package.overarch.is_none() && self.package.spec.value.expression.trim() == SIMILARITY;
        if is_plain { k } else { self.recipe.serving.candidates.max(k) }
    }

    /// Returns the digest of the published files.
    pub fn digest(&self) -> &str {
        &self.digest
    }
}

/// Returns the specification of the model in a folder.
fn spec(folder: &Path) -> Result<ModelSpec> {
    let path = folder.join(MODEL_FILE);
    let text = std::fs::read_to_string(&path).map_err(|e| Error::io(path.display(), e))?;
    ModelSpec::parse(&text).map_err(|e| e.within(path.display()))
}

/// Rejects a manifest that lacks a required file.
fn check_files(manifest: &Manifest, package: &Package) -> Result<()> {
    let vectors = (!package.spec.item.vectors.is_empty()).then_some(VECTORS_FILE);
    let parts = manifest.decisions.item_part.as_ref().map(|_| PARTS_FILE);
    let needed = [INDEX_FILE, FILTER_FILE, COLUMNS_FILE, RECIPE_FILE, MODEL_FILE];
    if let Some(file) = needed.into_iter().chain(vectors).chain(parts).find(|&f| !manifest.files.contains_key(f)) {
        return Err(Error::corrupt(format!("the manifest names no `{file}`")));
    }
    match package.files().into_iter().find(|f| !manifest.files.contains_key(f)) {
        Some(file) => Err(Error::corrupt(format!("the manifest names no `{file}`, which the model needs"))),
        None => Ok(()),
    }
}

/// Rejects a manifest whose sizes differ from the files.
fn check_sizes(manifest: &Manifest, package: &Package, index: &ivf::Index) -> Result<()> {
    let items = if manifest.is_emptied() { 1 } else { manifest.items };
    let says = (manifest.dimension, items, manifest.slots, manifest.lists);
    let holds = (index.dimension(), index.items(), index.slots(), index.lists());
    if says != holds || package.spec.dimension != manifest.dimension || package.spec.name != manifest.name {
        return Err(Error::corrupt(format!(
            "the manifest says {} with (dimension, items, slots, lists) = {says:?}, the files hold {} with {holds:?}",
            manifest.name, package.spec.name
        )));
    }
    Ok(())
}

/// Reads the calibration in effect: a recalibration takes precedence over the published calibration.
fn calibration(folder: &Path, manifest: &Manifest, index: &ivf::Index) -> Result<Option<Calibration>> {
    let calibration = match Recalibration::read(folder, manifest)? {
        Some(later) => Some(later),
        None if manifest.files.contains_key(CALIBRATION_FILE) => {
            Some(Calibration::read(&folder.join(CALIBRATION_FILE), index.lists())?)
        }
        None => None,
    };
    if calibration.as_ref().is_some_and(Calibration::uses_codes) && !index.has_first_pass() {
        return Err(Error::corrupt("the calibration selects by first-pass codes, which the index does not have"));
    }
    Ok(calibration)
}

/// Returns the numeric columns that the reranker and the value model read, each column once, as one f32 per slot.
fn numbers(package: &Package, value: &Program, columns: &Columns) -> Vec<(String, Vec<f32>)> {
    let used = package.overarch.iter().flat_map(|o| o.numbers());
    let used = used.chain(value.inputs().iter().map(String::as_str));
    let mut numbers: Vec<(String, Vec<f32>)> = Vec::new();
    for name in used {
        if numbers.iter().all(|(n, _)| n != name) {
            let column = columns.list().find(|c| c.name() == name);
            numbers.extend(column.and_then(|c| c.numbers()).map(|values| (name.to_owned(), values)));
        }
    }
    numbers
}

/// Logs graphs that run differently from when the version was published.
fn log_other_graphs(manifest: &Manifest, package: &Package) {
    for (file, runs) in package.graphs() {
        let recorded = manifest.graphs.as_ref().and_then(|graphs| graphs.get(file));
        if let Some(recorded) = recorded.filter(|recorded| **recorded != GraphRecord::from(runs)) {
            tracing::info!(graph = file, ?recorded, "the graph runs differently from when it was published");
        }
    }
}
