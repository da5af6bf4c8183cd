//! Calibration: how many lists a recall takes, by queries like those that will be asked.
//!
//! A publication calibrates its version; `sterling calibrate` does it again for one that is published, with other queries, and
//! keeps the result beside it.

mod confidence;
mod depth;
mod find;
mod findings;
mod measure;
mod measured;
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
    Calibration, INDEX_FILE, Manifest, Placement, QUERIES_FILE, RECALIBRATION_FILE, RECIPE_FILE, REQUESTS_FILE,
    Recalibration, Recipe, Snapshot, Store,
};
use sterling_storage::files::{self, Checksum, Tensors};

pub use measure::measure;
use measured::{Layout, Measured};
pub use queries::Queries;
pub(super) use queries::spread;
use queries::{drawn, most};
use strata::Strata;

/// What the queries of a calibration find in a shard, beside its files until the version is published.
pub(super) const FINDINGS_FILE: &str = "findings.safetensors";
/// The queries of a calibration that was made again, where they are none of the version's items.
const RECALIBRATION_QUERIES_FILE: &str = "recalibration_queries.safetensors";

/// The file of the queries that the version in `folder` was calibrated with last, where they are none of its items. The queries of an
/// earlier recalibration may still lie beside one that was made of items: they are not of this version's calibration any more.
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

/// Calibrates the version in `folder` with the queries of a file, else with perturbed items; not one whose index has a single list.
/// Returns the queries too.
///
/// # Errors
/// What is wrong with the queries, with the file and the line.
pub(super) fn version(
    folder: &Path,
    queries: Option<&Path>,
    recipe: &Recipe,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<Option<(Calibration, Queries)>> {
    measured(folder, recipe, progress, |index| match queries {
        Some(path) => Queries::read(path, &as_published(folder)?, (index, most(index.items()))),
        None => Ok(Strata::read(folder)?.beside(Queries::of_items(index, recipe.index.seed))),
    })
}

/// Queries of the newest version of a model, for one that comes without any.
pub(super) struct Inherited {
    /// The version that they were kept with.
    version: u64,
    /// The files of that version.
    files: BTreeMap<String, Checksum>,
    /// Its sample requests.
    requests: Option<Vec<u8>>,
    /// What its user tower made of them, or the vectors that came.
    vectors: Option<Vec<u8>>,
}

/// What calibrates a version that comes without queries.
pub(super) struct KeptQueries {
    /// Its file in the folder of the new version.
    pub(super) file: PathBuf,
    /// What it is called from now on.
    pub(super) source: String,
}

impl KeptQueries {
    /// What was measured with them, under their name.
    pub(super) fn rename(self, calibration: Calibration, queries: Queries) -> (Calibration, Queries) {
        let source = self.source;
        (Calibration { source: source.clone(), ..calibration }, Queries { source, ..queries })
    }
}

impl Inherited {
    /// The queries of the newest version of a model in a store; none where it has none, or there is no version.
    ///
    /// # Errors
    /// As [`Store::small_file`].
    pub(super) fn of(store: &Store, name: &str) -> Result<Option<Self>> {
        let newest = store.versions(name)?.into_iter().chain(store.cut_versions(name)?).max();
        let Some(version) = newest else { return Ok(None) };
        let files = match store.cut_versions(name)?.contains(&version) {
            true => store.shards(name, version)?.1.swap_remove(0).files,
            false => store.manifest(name, version)?.files,
        };
        let [requests, vectors] = [REQUESTS_FILE, QUERIES_FILE].map(|file| store.small_file(name, version, file));
        let inherited = Inherited { version, files, requests: requests?, vectors: vectors? };
        Ok((inherited.requests.is_some() || inherited.vectors.is_some()).then_some(inherited))
    }

    /// Puts them into the folder of a new version whose package has these `files`. Vectors of another user tower are of no use to it.
    ///
    /// # Errors
    /// `Io` with the path.
    pub(super) fn keep(
        &self,
        folder: &Path,
        package: Option<&Package>,
        files: &BTreeMap<String, Checksum>,
    ) -> Result<Option<KeptQueries>> {
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
        Ok(Some(KeptQueries { file, source: format!("{name} of version {}", self.version) }))
    }
}

/// The share of the best of a sample of the items that their rows find as they are kept, with the queries of a calibration: of an index
/// whose int8 rows are the widest, which measures nothing against the vectors that it was made of.
///
/// # Errors
/// `Io`
pub(super) fn kept_share(arranged: &Arranged, queries: &Queries) -> Result<f64> {
    const ITEMS: usize = 4096;
    const QUERIES: usize = 64;
    const BEST: usize = 10;
    let vectors = &arranged.embedded.vectors;
    let numbers: Vec<u32> = spread(vectors.rows(), ITEMS).map(|n| n as u32).collect();
    let (whole, kept) = (vectors.picked(&numbers)?, arranged.built.as_kept(vectors, &numbers)?.concat());
    let best = |rows: &[f32], query: &[f32]| {
        let product = |row: &[f32]| row.iter().zip(query).map(|(a, b)| a * b).sum::<f32>();
        let mut scored: Vec<(f32, usize)> = rows.chunks_exact(query.len()).map(product).zip(0..).collect();
        scored.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        scored.into_iter().take(BEST).map(|(_, row)| row).collect::<Vec<usize>>()
    };
    let (mut found, mut wanted) = (0, 0);
    for query in spread(queries.vectors.len(), QUERIES).map(|n| &queries.vectors[n]) {
        let (truth, some) = (best(&whole, query), best(&kept, query));
        found += truth.iter().filter(|row| some.contains(row)).count();
        wanted += truth.len();
    }
    Ok(found as f64 / wanted.max(1) as f64)
}

/// Keeps the sample requests of a file in the folder of a version, for later versions; nothing of a file of vectors.
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

/// The file that queries come from: one that is given, or else that of the package in `package`.
pub(super) fn source(queries: Option<&Path>, package: Option<&Path>) -> Option<PathBuf> {
    let own = || package.map(|package| package.join(REQUESTS_FILE)).filter(|path| path.exists());
    queries.map(Path::to_owned).or_else(own)
}

fn as_published(folder: &Path) -> Result<Package> {
    Package::open_placed(folder, &Decisions::default(), |_, tables| Ok(tables))
}

/// Searches the shard of a version whose files lie in `folder`, as the whole would be calibrated: with the queries of `source`, else with
/// perturbed items of the whole. What they find is written to `folder`; nothing where the index has a single list. `built` are the items of
/// the shard among those that were `arranged`.
///
/// # Errors
/// As [`version`].
pub(super) fn shard(
    folder: &Path,
    (built, arranged): (&ivf::Built, &Arranged),
    (source, version): (Option<&Path>, &write::Version<'_>),
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<Option<Checksum>> {
    let (index, whole) = (ivf::Index::open(&Tensors::open(&folder.join(INDEX_FILE))?)?, &arranged.built);
    if index.lists() < 2 {
        return Ok(None);
    }
    let (places, seed) = (built.places_in(whole), version.recipe.index.seed);
    let layout = Layout { offsets: &whole.list_offsets, lengths: &whole.list_lengths };
    let queries = match source {
        Some(path) => {
            // A user tower reads tables in the formats that they are published in.
            let published = files::temporary(&folder.join("package"));
            fs::create_dir(&published).map_err(|e| Error::io(published.display(), e))?;
            version.write_package(&published)?;
            let queries = Queries::read(path, &as_published(&published)?, (&index, most(whole.items())));
            fs::remove_dir_all(&published).map_err(|e| Error::io(published.display(), e))?;
            queries?
        }
        None => {
            let places = drawn(layout, seed);
            let rows: Vec<u32> = places.iter().map(|&place| whole.order[place as usize]).collect();
            let kept = whole.as_kept(&arranged.embedded.vectors, &rows)?;
            Queries::perturbed(kept, places, seed)
        }
    };
    let measured = Measured::shard(&index, layout, &places);
    findings::write(&folder.join(FINDINGS_FILE), &measured, &queries, seed, progress).map(Some)
}

/// The calibration of a version whose shards lie in these folders, and its queries; none where there was nothing to search.
///
/// # Errors
/// As [`ivf::Index::open`]; `Corrupt` with the folder whose findings are not those of the others.
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

/// What a merged version is measured with.
pub(super) struct OfMain<'a> {
    /// The folder of the version that is merged.
    pub(super) folder: &'a Path,
    pub(super) manifest: &'a Manifest,
    pub(super) package: &'a Package,
    pub(super) recipe: &'a Recipe,
}

/// Calibrates the version in `folder`, of which only the index is there yet, with queries that were kept, else with perturbed items. Then
/// those of new kinds, which lie in the `slots`, are a stratum beside those of earlier merges; the file of strata is written, too.
///
/// # Errors
/// As [`kept_queries`] and [`Strata::read`]; `Io`.
pub(super) fn merged(folder: &Path, main: &OfMain<'_>, slots: &[u32]) -> Result<Option<MergedCalibration>> {
    let (mut strata, seed) = (None, main.recipe.index.seed);
    let kept = kept_queries(main.folder, main.manifest)?;
    let measured = measured(folder, main.recipe, &|_, _| (), |index| match &kept {
        Some(path) => Queries::read(path, main.package, (index, most(index.items()))),
        None => {
            let mut all = Strata::read(main.folder)?;
            all.add(index, slots, seed);
            strata = all.write(folder)?;
            Ok(all.beside(Queries::of_items(index, seed)))
        }
    })?;
    Ok(measured.map(|(calibration, queries)| MergedCalibration { calibration, queries, strata }))
}

/// What a merge measured.
pub(super) struct MergedCalibration {
    pub(super) calibration: Calibration,
    pub(super) queries: Queries,
    /// The file of strata, where there are any.
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
    let Some((calibration, queries)) = self::version(folder, queries, &recipe, progress)? else {
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
