//! Calibration: measures the number of probed lists (nprobe) per recall, with queries like those of
//! production.
//!
//! A publication calibrates its version; `sterling calibrate` calibrates a published version again with other queries, and stores
//! the result next to it.

mod confidence;
mod depth;
mod find;
mod findings;
mod measure;
mod measured;
mod ood;
mod queries;
mod share;
mod strata;
mod tally;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::catalogue::Arranged;
use super::write;
use crate::warmup;
use sterling_core::error::{Error, Result};
use sterling_index::ivf;
use sterling_serving::registry::Loaded;
use sterling_snapshot::model::{Decisions, Package, WARMUP_FILE};
use sterling_snapshot::{
    COLUMNS_FILE, Calibration, INDEX_FILE, Ids, Manifest, Placement, QUERIES_FILE, RECALIBRATION_FILE, RECIPE_FILE,
    REQUESTS_FILE, Recalibration, Recipe, Snapshot, Store,
};
use sterling_storage::files::{self, Checksum, Tensors};

pub use measure::measure;
use measured::{Layout, Measured};
pub use queries::Queries;
pub(super) use queries::spread;
use queries::{drawn, most};
use strata::Strata;

/// File of a shard's calibration results, stored with the shard's files until the version is published.
pub(super) const FINDINGS_FILE: &str = "findings.safetensors";
/// File of a recalibration's queries, unless these are items of the version.
const RECALIBRATION_QUERIES_FILE: &str = "recalibration_queries.safetensors";

/// Returns the file of the queries that the version in `folder` was last calibrated with, unless the queries are its items. If the
/// last recalibration used items, a query file of an earlier recalibration may still exist, but is not returned.
///
/// # Errors
/// As [`Recalibration::read`].
fn kept_queries(folder: &Path, manifest: &Manifest) -> Result<Option<PathBuf>> {
    let file = match Recalibration::read(folder, manifest)? {
        Some(again) if again.source == queries::OF_ITEMS => return Ok(None),
        Some(_) => RECALIBRATION_QUERIES_FILE,
        None => QUERIES_FILE,
    };
    Ok(Some(folder.join(file)).filter(|path| path.exists()))
}

/// Calibrates the version in `folder` with the queries of a file, otherwise with perturbed items; skips an index with a single
/// list. Returns the calibration and its queries.
///
/// # Errors
/// The invalid query, with the file and the line.
pub(super) fn version(
    folder: &Path,
    queries: Option<&Path>,
    recipe: &Recipe,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<Option<(Calibration, Queries)>> {
    measured(folder, recipe, progress, |index| match queries {
        Some(path) => {
            let mut queries = Queries::read(path, &as_published(folder)?, (index, most(index.items())))?;
            let tensors = Tensors::read(&folder.join(COLUMNS_FILE))?;
            let ids = Ids::open(&tensors, index.slots(), index.items())?;
            queries.resolve(index.filled_slots().map(|slot| (slot.0, ids.item(slot).0)));
            Ok(queries)
        }
        None => Ok(Strata::read(folder)?.beside(Queries::of_items(index, recipe.index.seed))),
    })
}

/// Queries of the newest version of a model, for a new version that comes without queries.
pub(super) struct Inherited {
    /// Version with which the queries are stored.
    version: u64,
    /// Files of the version with the queries.
    files: BTreeMap<String, Checksum>,
    /// Sample requests of the package, one per line.
    requests: Option<Vec<u8>>,
    /// Outputs of the version's user tower for the queries, or the vectors from the caller.
    vectors: Option<Vec<u8>>,
}

/// Queries inherited from an earlier version, for the calibration.
pub(super) struct InheritedQueries {
    /// File of the queries in the folder of the new version.
    pub(super) file: PathBuf,
    /// New description of the queries' source.
    pub(super) source: String,
}

impl InheritedQueries {
    /// Sets the source of a calibration and its queries.
    pub(super) fn rename(self, calibration: Calibration, queries: Queries) -> (Calibration, Queries) {
        let source = self.source;
        (Calibration { source: source.clone(), ..calibration }, Queries { source, ..queries })
    }
}

impl Inherited {
    /// Returns the queries of the newest version of a model in a store; `None` without a version or queries.
    ///
    /// # Errors
    /// As [`Store::small_file`].
    pub(super) fn of(store: &Store, name: &str) -> Result<Option<Self>> {
        let newest = store.versions(name)?.into_iter().chain(store.sharded_versions(name)?).max();
        let Some(version) = newest else { return Ok(None) };
        let files = match store.sharded_versions(name)?.contains(&version) {
            true => store.shards(name, version)?.1.swap_remove(0).files,
            false => store.manifest(name, version)?.files,
        };
        let [requests, vectors] = [REQUESTS_FILE, QUERIES_FILE].map(|file| store.small_file(name, version, file));
        let inherited = Inherited { version, files, requests: requests?, vectors: vectors? };
        Ok((inherited.requests.is_some() || inherited.vectors.is_some()).then_some(inherited))
    }

    /// Copies the queries to the folder of a new version whose package has these `files`. Vectors of another user tower are
    /// unusable and skipped.
    ///
    /// # Errors
    /// `Io` with the path.
    pub(super) fn keep(
        &self,
        folder: &Path,
        package: Option<&Package>,
        files: &BTreeMap<String, Checksum>,
    ) -> Result<Option<InheritedQueries>> {
        let has_tower = package.is_some_and(|package| package.user.is_some());
        let of_package = || package.into_iter().flat_map(Package::files).filter(|file| file != WARMUP_FILE);
        let is_same_tower = !has_tower || of_package().all(|file| files.get(&file) == self.files.get(&file));
        let (name, bytes) = match (&self.requests, &self.vectors) {
            (Some(requests), _) => (REQUESTS_FILE, requests),
            (None, Some(vectors)) if is_same_tower => (QUERIES_FILE, vectors),
            _ => return Ok(None),
        };
        let file = folder.join(name);
        files::write_atomic(&file, |out| out.write_all(bytes))?;
        Ok(Some(InheritedQueries { file, source: format!("{name} of version {}", self.version) }))
    }
}

/// Measures the recall of stored rows against the original vectors, on a sample of the items with the calibration queries. Needed
/// for an index whose int8 rows are the most precise, because its calibration compares them only with themselves.
///
/// # Errors
/// `Io`
pub(super) fn kept_share(arranged: &Arranged, queries: &Queries) -> Result<f64> {
    const ITEMS: usize = 4096;
    const QUERIES: usize = 64;
    const BEST: usize = 10;
    let vectors = &arranged.embedded.vectors;
    let numbers: Vec<u32> = spread(vectors.rows(), ITEMS).map(|n| n as u32).collect();
    let (complete, retained) = (vectors.picked(&numbers)?, arranged.built.as_kept(vectors, &numbers)?.concat());
    let best = |rows: &[f32], query: &[f32]| {
        let product = |row: &[f32]| row.iter().zip(query).map(|(a, b)| a * b).sum::<f32>();
        let mut scored: Vec<(f32, usize)> = rows.chunks_exact(query.len()).map(product).zip(0..).collect();
        scored.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        scored.into_iter().take(BEST).map(|(_, row)| row).collect::<Vec<usize>>()
    };
    let (mut found, mut wanted) = (0, 0);
    for query in spread(queries.vectors.len(), QUERIES).map(|n| &queries.vectors[n]) {
        let (truth, some) = (best(&complete, query), best(&retained, query));
        found += truth.iter().filter(|row| some.contains(row)).count();
        wanted += truth.len();
    }
    Ok(found as f64 / wanted.max(1) as f64)
}

/// Stores the sample requests of a file in the folder of a version, for later versions; skips files of vectors.
///
/// # Errors
/// `Io` with the path.
pub(super) fn keep_requests(source: &Path, folder: &Path) -> Result<Option<Checksum>> {
    let is_vectors = source.extension().is_some_and(|extension| extension == "npy" || extension == "safetensors");
    if is_vectors {
        return Ok(None);
    }
    let lines = queries::sampled_lines(source)?;
    files::write_atomic(&folder.join(REQUESTS_FILE), |out| out.write_all(lines.as_bytes())).map(Some)
}

/// Returns the file of queries: the given file, otherwise the package's file.
pub(super) fn source(queries: Option<&Path>, package: Option<&Path>) -> Option<PathBuf> {
    let own = || package.map(|package| package.join(REQUESTS_FILE)).filter(|path| path.exists());
    queries.map(Path::to_owned).or_else(own)
}

fn as_published(folder: &Path) -> Result<Package> {
    Package::open_placed(folder, &Decisions::default(), |_, tables| Ok(tables))
}

/// Searches the shard of a version whose files are in `folder`, as the calibration of the complete version would do,
/// with the queries of `source`, otherwise with vectors of the complete version's items with added noise. Writes the
/// results to `folder`; skips an index with a single list. `built` is the index of the shard, and `arranged` has all
/// items of the complete version.
///
/// # Errors
/// As [`version`].
pub(super) fn shard(
    folder: &Path,
    (built, arranged): (&ivf::Built, &Arranged),
    (source, version): (Option<&Path>, &write::Version<'_>),
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<Option<Checksum>> {
    let (index, complete) = (ivf::Index::open(&Tensors::open(&folder.join(INDEX_FILE))?)?, &arranged.built);
    if index.lists() < 2 {
        return Ok(None);
    }
    let (places, seed) = (built.places_in(complete), version.recipe.index.seed);
    let layout = Layout { offsets: &complete.list_offsets, lengths: &complete.list_lengths };
    let queries = match source {
        Some(path) => {
            // The user tower reads tables in the formats in which they are published.
            let published = files::temporary(&folder.join("package"));
            fs::create_dir(&published).map_err(|e| Error::io(published.display(), e))?;
            version.write_package(&published)?;
            let queries = Queries::read(path, &as_published(&published)?, (&index, most(complete.items())));
            fs::remove_dir_all(&published).map_err(|e| Error::io(published.display(), e))?;
            queries?
        }
        None => {
            let places = drawn(layout, seed);
            let rows: Vec<u32> = places.iter().map(|&place| complete.order[place as usize]).collect();
            let retained = complete.as_kept(&arranged.embedded.vectors, &rows)?;
            Queries::perturbed(retained, places, seed)
        }
    };
    let measured = Measured::shard(&index, layout, &places);
    let queries = queries.with_ood_queries(&index, seed);
    findings::write(&folder.join(FINDINGS_FILE), &measured, &queries, seed, progress).map(Some)
}

/// Returns the calibration of a version with shards in these folders, and its queries; `None` if no shard was searched.
///
/// # Errors
/// As [`ivf::Index::open`]; `Corrupt` with the folder whose results belong to other queries or lists.
pub(super) fn of_shards(
    folders: &[&Path],
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<Option<(Calibration, Queries)>> {
    let files: Vec<PathBuf> = folders.iter().map(|folder| folder.join(FINDINGS_FILE)).collect();
    match files.first().filter(|file| file.exists()) {
        Some(_) => {
            let index = ivf::Index::open(&Tensors::open(&folders[0].join(INDEX_FILE))?)?;
            findings::counted(&index, &files, progress).map(Some)
        }
        None => Ok(None),
    }
}

/// Version that is merged, whose queries and strata are used for the calibration of the result.
pub(super) struct MainCalibration<'a> {
    /// Folder of the version that is merged into the next one.
    pub(super) folder: &'a Path,
    pub(super) manifest: &'a Manifest,
    pub(super) package: &'a Package,
    pub(super) recipe: &'a Recipe,
}

/// Calibrates the merged version in `folder`, of which only the index exists so far, with the stored queries of the
/// version before the merge. Without stored queries, vectors of items with added noise are the queries. In that case,
/// recall near the items in `slots`, which are unlike the older items, is measured separately, as for such items of
/// earlier merges ([`Strata`]), and the queries near all these items are written to `folder` too. `items` pairs every
/// slot with the id of its item.
///
/// # Errors
/// As [`kept_queries`] and [`Strata::read`]; `Io`.
pub(super) fn merged(
    folder: &Path,
    main: &MainCalibration<'_>,
    slots: &[u32],
    items: impl Iterator<Item = (u32, i64)>,
) -> Result<Option<MergedCalibration>> {
    let (mut strata, seed) = (None, main.recipe.index.seed);
    let retained = kept_queries(main.folder, main.manifest)?;
    let measured = measured(folder, main.recipe, &|_, _| (), |index| match &retained {
        Some(path) => {
            let mut queries = Queries::read(path, main.package, (index, most(index.items())))?;
            queries.resolve(items);
            Ok(queries)
        }
        None => {
            let mut all = Strata::read(main.folder)?;
            all.add(index, slots, seed);
            strata = all.write(folder)?;
            Ok(all.beside(Queries::of_items(index, seed)))
        }
    })?;
    Ok(measured.map(|(calibration, queries)| MergedCalibration { calibration, queries, strata }))
}

/// Calibration of a merged version, with its queries.
pub(super) struct MergedCalibration {
    pub(super) calibration: Calibration,
    pub(super) queries: Queries,
    /// Checksum of the strata file, if it was written.
    pub(super) strata: Option<Checksum>,
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

/// Calibrates a published version again, with the queries of a file or with perturbed items, and stores the result in the version's
/// folder. Servers load it the next time they poll the store.
///
/// # Errors
/// `NotFound` if there is no such version, `Invalid` if its index has a single list or with the invalid query, `Io`.
pub fn again(
    store: &Store,
    name: &str,
    version: u64,
    queries: Option<&Path>,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<Recalibration> {
    let held = store.ensure_local(name, version)?;
    let folder = held.folder();
    let manifest = Manifest::read(folder)?;
    manifest.verify(folder)?;
    let recipe = Recipe::read(&folder.join(RECIPE_FILE))?;
    let Some((calibration, queries)) = self::version(folder, queries, &recipe, progress)? else {
        return Err(Error::invalid(format!(
            "{}: the index has one list, expected several: there is nothing to calibrate",
            folder.display()
        )));
    };
    let recalibration = Recalibration::of(&manifest, calibration)?;
    if manifest.files.contains_key(WARMUP_FILE) {
        let mut snapshot = Snapshot::load(folder, &Placement::default())?;
        snapshot.calibration = Some(recalibration.calibration.clone());
        warmup::check(&Loaded::new(snapshot)).map_err(|e| {
            e.within(format!(
                "{}: the calibration is not stored, because golden answers of the warm-up would differ",
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
