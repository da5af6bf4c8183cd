//! Merges a served version and its updates into the next version.
//!
//! 1. The items of a view are gathered: the live items of its main snapshot, and the items of segments, each in its list.
//! 2. The lists are retained and adjusted ([`ivf::rebalance`]), with further lists for items of a new kind, and measured with the
//!    queries that the version was calibrated with. The lists are retrained if a recall needs clearly more lists than after
//!    training, or if the size of the catalogue has changed too much.
//! 3. All other steps are as in any publication, except that the package files are hard links to the files of the merged version.
//!
//! The manifest contains the position of the last merged update. A server that loads the version continues from there, so no
//! update is lost or applied twice. The version becomes visible atomically: an interrupted merge leaves no trace.

use std::path::Path;
use std::time::Instant;

use super::calibrate::{self, MainCalibration, MergedCalibration};
use super::catalogue::Arranged;
use super::fold::fold;
use super::gathered::{MergedVersion, ViewItems};
use super::serving;
use super::warm;
use super::write::Version;
use sterling_core::error::{Error, Result};
use sterling_index::ivf;
use sterling_kernels::memory;
use sterling_serving::view::View;
use sterling_snapshot::model::Package;
use sterling_snapshot::{
    CALIBRATION_FILE, Calibration, FORMAT, INDEX_FILE, Manifest, MergedFrom, PROGRAM, Provenance, QUERIES_FILE, Recipe,
    STRATA_FILE, SearchGoal, Store,
};
use sterling_storage::files::Checksum;

/// Lists are retrained if a recall needs this multiple of the fraction of lists that it needed after training.
const DRIFT: f64 = 1.25;
/// Codebooks of the first pass are retrained if this fraction of the items is of a kind that the codebooks were not trained on.
const STRAYS_OF_CODES: f64 = 0.01;
/// A stratum is measured if more than this fraction of the added items are strays (unlike the items that the lists were trained
/// on); among items similar to the existing ones, 2 % are strays.
const STRAYS_OF_A_KIND: f64 = 0.04;
/// Number of steps of a merge: gather items into lists, write the index, measure its recall, write everything else.
pub const MERGE_STEPS: usize = 4;
/// Number of candidates (K) at which a merge compares recall with that after training.
const WATCHED: usize = 100;
/// Bytes of memory that a merge takes per vector component: one f32, and two encoded copies.
const BYTES_PER_NUMBER: u64 = 12;

/// Publishes a view as the next version of its model, on the threads of the current pool. For a shard, makes a checkpoint of the
/// same version, for this server alone (`fold`). `progress` receives the number of finished steps out of [`MERGE_STEPS`].
///
/// # Errors
/// `Conflict` if another version was published meanwhile and takes over; `NoSpace` if memory or disk space is insufficient; `Io`.
/// After an error the store is unchanged.
pub fn merge(store: &Store, view: &View, progress: &(dyn Fn(usize) + Sync)) -> Result<MergedVersion> {
    let start = Instant::now();
    let main = view.main();
    let numbers = view.items() as u64 * view.dimension() as u64;
    let free = memory::available_bytes().unwrap_or(u64::MAX);
    if numbers.saturating_mul(BYTES_PER_NUMBER) > free {
        let need = numbers.saturating_mul(BYTES_PER_NUMBER) >> 20;
        return Err(Error::no_space(format!("a merge takes {need} MB of memory, {} are free", free >> 20)));
    }
    if let Some(shards) = &main.shards {
        return fold(store, view, shards);
    }
    let mut made = MergedVersion {
        version: 0,
        position: view.position(),
        items: view.items(),
        lists: 0,
        is_trained: false,
        seconds: 0.0,
    };
    made.version = store.publish_unrivalled(&main.manifest.name, |folder, version| {
        let mut merging = Merging::of(view, progress)?;
        progress(1);
        let (index, watched) = merging.arrange(folder)?;
        progress(3);
        made.lists = merging.arranged.built.list_lengths.len();
        made.is_trained = merging.is_trained;
        let files = merging.version();
        let mut sums = files.write_package(folder)?;
        sums.extend(files.write_items(&merging.arranged, folder, &merging.arranged.built)?);
        sums.insert(INDEX_FILE.into(), index);
        let decisions = serving::keep(&main.package, &main.manifest.decisions, folder, &mut sums)?;
        if let Some(MergedCalibration { calibration, queries, strata }) = watched {
            sums.extend(strata.map(|sum| (STRATA_FILE.into(), sum)));
            sums.insert(CALIBRATION_FILE.into(), calibration.write(&folder.join(CALIBRATION_FILE))?);
            sums.extend(queries.write(&folder.join(QUERIES_FILE))?.map(|sum| (QUERIES_FILE.into(), sum)));
        }
        let graphs = main.package.graphs().map(|(file, runs)| (file.to_owned(), runs.into())).collect();
        let mut manifest = Manifest {
            format: FORMAT,
            name: main.manifest.name.clone(),
            version,
            dimension: view.dimension(),
            items: made.items,
            slots: merging.arranged.built.order.len(),
            lists: made.lists,
            position: made.position,
            shard: None,
            folded: None,
            merged: Some(MergedFrom { origin: main.manifest.origin(), trained_share: merging.trained_share }),
            provenance: Provenance { program: PROGRAM.into(), ..main.manifest.provenance.clone() },
            files: sums,
            graphs: Some(graphs),
            decisions,
        };
        // The golden answers of the model were those of other items, so they are replaced by answers of the merged version.
        warm::answer(folder, &mut manifest, false)?;
        manifest.provenance.seconds = start.elapsed().as_secs_f64();
        manifest.write(folder)?;
        progress(MERGE_STEPS);
        Ok(())
    })?;
    made.seconds = start.elapsed().as_secs_f64();
    Ok(made)
}

/// Items of a view, being merged into a version.
struct Merging<'a> {
    view: &'a View,
    arranged: Arranged,
    /// Sort keys that place similar items together within a list.
    alike: Vec<u64>,
    /// Rows of items of a new kind, ascending; empty if there are no more such items than expected.
    strays: Vec<u32>,
    trained_share: Option<f64>,
    is_trained: bool,
    progress: &'a (dyn Fn(usize) + Sync),
}

impl<'a> Merging<'a> {
    /// Gathers the items of a view, in the retained lists.
    fn of(view: &'a View, progress: &'a (dyn Fn(usize) + Sync)) -> Result<Self> {
        let main = view.main();
        let items = ViewItems::of(view)?;
        let is_nearest = !main.index.penalties().is_empty();
        let rows = items.rows()?;
        let mut built = ivf::rebalance(rows, &items.lists, &items.strays, is_nearest, main.recipe.index.rescore)?;
        built.keep_first_pass(&main.index);
        if main.index.has_first_pass() && items.strays.len() as f64 >= STRAYS_OF_CODES * items.lists.len() as f64 {
            built.train_first_pass(&rows.into(), &main.recipe.index)?;
        }
        let is_kind = items.strays.len() as f64 > STRAYS_OF_A_KIND * items.brought as f64;
        let strays = if is_kind { items.strays.clone() } else { Vec::new() };
        let (arranged, alike) = items.arranged(built)?;
        let of_main = main.calibration.as_ref();
        let of_main = of_main.map(|c| share(c, &main.recipe, main.index.items(), main.index.lists()));
        let trained_share = main.manifest.merged.as_ref().map_or(of_main, |from| from.trained_share);
        Ok(Merging { view, arranged, alike, strays, trained_share, is_trained: false, progress })
    }

    /// Writes the index, with retained or retrained lists. Returns the checksum of the index, and its calibration.
    fn arrange(&mut self, folder: &Path) -> Result<(Checksum, Option<MergedCalibration>)> {
        let recipe = &self.view.main().recipe;
        // Lists that another program made, and that came with the items, must not be retrained.
        let may_train = self.view.main().index.penalties().is_empty();
        if may_train && !self.fits(recipe) {
            return self.train(folder);
        }
        let (sum, measured) = self.write_index(folder)?;
        let now = measured.as_ref().map(|measured| self.share(&measured.calibration));
        let has_drifted = |(now, then): (f64, f64)| now > DRIFT * then + 1.0 / self.lists() as f64;
        match may_train && now.zip(self.trained_share).is_some_and(has_drifted) {
            true => self.train(folder),
            false => {
                self.trained_share = self.trained_share.or(now);
                Ok((sum, measured))
            }
        }
    }

    /// Returns whether the number of lists suits the size of the catalogue.
    fn fits(&self, recipe: &Recipe) -> bool {
        let is_coded = self.view.main().index.has_first_pass();
        let wanted = recipe.index.lists_of(self.arranged.ids.len(), is_coded).unwrap_or(1);
        let is_ours = recipe.index.lists == 0;
        // Earlier releases used twice as many lists for versions with codes; such versions are accepted.
        let most = if is_coded { wanted * 4 } else { wanted * 2 };
        !is_ours || (wanted.div_ceil(2)..=most).contains(&self.lists())
    }

    fn train(&mut self, folder: &Path) -> Result<(Checksum, Option<MergedCalibration>)> {
        let items = self.arranged.ids.len();
        let options = &self.view.main().recipe.index;
        let options = ivf::Options { lists: options.lists.min(items), ..options.clone() };
        let rows = &self.arranged.embedded.vectors;
        self.arranged.built = ivf::build(rows, &ivf::RowSurvey::of(rows)?, &options, &|_| ())?;
        self.is_trained = true;
        let (sum, measured) = self.write_index(folder)?;
        self.trained_share = measured.as_ref().map(|measured| self.share(&measured.calibration));
        Ok((sum, measured))
    }

    fn write_index(&mut self, folder: &Path) -> Result<(Checksum, Option<MergedCalibration>)> {
        self.arranged.built.sort_lists(&self.alike);
        let sum = self.arranged.write_index(folder, &self.arranged.built)?;
        (self.progress)(2);
        let main = self.view.main();
        let of_main = MainCalibration {
            folder: main.package.folder(),
            manifest: &main.manifest,
            package: &main.package,
            recipe: &main.recipe,
        };
        let order = (0..).zip(&self.arranged.built.order);
        let items = order.filter_map(|(slot, row)| Some((slot, *self.arranged.ids.get(*row as usize)?)));
        Ok((sum, calibrate::merged(folder, &of_main, &self.stray_slots(), items)?))
    }

    /// Returns the slots of the items of a new kind.
    fn stray_slots(&self) -> Vec<u32> {
        let is_stray = |row: &u32| self.strays.binary_search(row).is_ok();
        let slots = (0..).zip(&self.arranged.built.order);
        slots.filter(|(_, row)| is_stray(row)).map(|(slot, _)| slot).collect()
    }

    fn share(&self, calibration: &Calibration) -> f64 {
        share(calibration, &self.view.main().recipe, self.arranged.ids.len(), self.lists())
    }

    fn lists(&self) -> usize {
        self.arranged.built.list_lengths.len()
    }

    fn version(&self) -> Version<'_> {
        let main = self.view.main();
        let package: &Package = &main.package;
        Version {
            package: Some(package),
            spec: &package.spec,
            tables: &package.tables,
            recipe: &main.recipe,
            version: Some(&main.manifest),
        }
    }
}

/// Returns the fraction of the lists that the recall of a recipe needs.
fn share(calibration: &Calibration, recipe: &Recipe, items: usize, lists: usize) -> f64 {
    let wanted = SearchGoal { candidates: WATCHED.min(items), pass_rate: 1.0, recall: recipe.serving.recall };
    calibration.choose(wanted, items, lists).probes as f64 / lists.max(1) as f64
}
