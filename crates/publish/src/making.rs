//! Makes a version: turns items with their slots into a folder that is complete except for its manifest.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Instant;

use super::calibrate::{self, Inherited, Queries};
use super::catalogue::Arranged;
use super::plan::{Plan, Progress, Stage};
use super::{precision, serving, warm, write};
use sterling_core::error::{Error, Result};
use sterling_index::ivf;
use sterling_snapshot::model::{Decisions, Package};
use sterling_snapshot::{
    CALIBRATION_FILE, Calibration, FORMAT, GraphRecord, Manifest, Provenance, QUERIES_FILE, REQUESTS_FILE, Recipe,
};
use sterling_storage::files::Checksum;

/// Inputs of a version.
pub(super) struct VersionInputs<'a> {
    pub(super) plan: &'a Plan,
    pub(super) files: write::Version<'a>,
    pub(super) provenance: Provenance,
    /// Calibration queries of the previous version, if the new version comes without queries.
    pub(super) inherited: Option<Inherited>,
    pub(super) start: Instant,
    pub(super) progress: &'a Progress<'a>,
}

impl VersionInputs<'_> {
    /// Writes the version to `folder`, calibrates and tests it. Returns the manifest, which is the only file not yet written.
    pub(super) fn whole(&self, arranged: &Arranged, folder: &Path, version: u64) -> Result<Manifest> {
        let VersionInputs { plan, files: version_files, progress, .. } = self;
        let package = version_files.package;
        let mut files = version_files.write(arranged, folder, progress)?;
        let decisions = match package {
            Some(package) => serving::prepare(package, folder, &plan.recipe, &mut files)?,
            None => Decisions::default(),
        };
        keep(self.calibrate(arranged, folder, &mut files)?, folder, &mut files)?;
        let built = &arranged.built;
        let extent = Extent {
            dimension: arranged.embedded.vectors.cols(),
            items: arranged.ids.len(),
            slots: built.order.len(),
            lists: built.list_lengths.len(),
        };
        let mut manifest = self.manifest(version, extent, files, decisions)?;
        if let Some(package) = package {
            manifest.decisions.precision = precision::decide(package, folder, &manifest, !plan.recipe.is_coarse())?;
            manifest.graphs = Some(graphs(package, &manifest.decisions)?);
        }
        warm::answer(folder, &mut manifest, !plan.recipe.is_coarse())?;
        Ok(manifest)
    }

    /// Calibrates the version in `folder` with its own queries, otherwise with the queries of the previous version, otherwise with
    /// perturbed items.
    fn calibrate(
        &self,
        arranged: &Arranged,
        folder: &Path,
        files: &mut BTreeMap<String, Checksum>,
    ) -> Result<Option<(Calibration, Queries)>> {
        let VersionInputs { plan, files: version_files, inherited, progress, .. } = self;
        let reported = |done, total| progress(Stage::Calibrating, done, total);
        let calibrate = |queries: Option<&Path>| calibrate::version(folder, queries, &plan.recipe, &reported);
        let measured = match (calibrate::source(plan.queries.as_deref(), plan.source.package()), inherited) {
            (Some(source), _) => {
                let measured = calibrate(Some(&source))?;
                files.extend(calibrate::keep_requests(&source, folder)?.map(|sum| (REQUESTS_FILE.into(), sum)));
                measured
            }
            (None, Some(inherited)) => match inherited.keep(folder, version_files.package, files)? {
                Some(retained) => match calibrate(Some(&retained.file)) {
                    Ok(measured) => {
                        files.extend(
                            calibrate::keep_requests(&retained.file, folder)?.map(|sum| (REQUESTS_FILE.into(), sum)),
                        );
                        tracing::warn!(
                            queries = retained.source,
                            "no calibration queries were passed; using those of the last version"
                        );
                        measured.map(|(calibration, queries)| retained.rename(calibration, queries))
                    }
                    Err(error) => {
                        fs::remove_file(&retained.file).map_err(|e| Error::io(retained.file.display(), e))?;
                        tracing::warn!(queries = retained.source, %error, "queries of the last version do not suit the new version; ignoring the queries");
                        calibrate(None)?
                    }
                },
                None => calibrate(None)?,
            },
            (None, None) => calibrate(None)?,
        };
        if let Some((calibration, queries)) = &measured {
            warn(calibration, queries, (version_files.package, &plan.recipe));
            if plan.recipe.index.rescore == ivf::Rescore::None {
                let found = calibrate::kept_share(arranged, queries)?;
                if found < plan.recipe.serving.recall {
                    tracing::warn!(
                        found,
                        "no rescoring rows are stored (index.rescore = \"none\"), and int8 rows have a recall of {found:.3} on a sample: \
                         estimated recalls are relative to int8 rows, not to the vectors"
                    );
                }
            }
        }
        Ok(measured)
    }

    /// Creates the manifest of a version with these files.
    pub(super) fn manifest(
        &self,
        version: u64,
        Extent { dimension, items, slots, lists }: Extent,
        files: BTreeMap<String, Checksum>,
        decisions: Decisions,
    ) -> Result<Manifest> {
        let seconds = self.start.elapsed().as_secs_f64();
        let graphs = self.files.package.map(|package| graphs(package, &decisions)).transpose()?;
        Ok(Manifest {
            format: FORMAT,
            name: self.files.spec.name.clone(),
            version,
            dimension,
            items,
            slots,
            lists,
            position: self.plan.output.position(0),
            shard: None,
            merged: None,
            folded: None,
            provenance: Provenance { seconds, ..self.provenance.clone() },
            files,
            graphs: Some(graphs.unwrap_or_default()),
            decisions,
        })
    }
}

/// Numbers that describe the size of a version.
pub(super) struct Extent {
    pub(super) dimension: usize,
    pub(super) items: usize,
    pub(super) slots: usize,
    pub(super) lists: usize,
}

/// Writes a calibration to the folder of a version.
pub(super) fn keep(
    measured: Option<(Calibration, Queries)>,
    folder: &Path,
    files: &mut BTreeMap<String, Checksum>,
) -> Result<()> {
    if let Some((calibration, queries)) = measured {
        files.insert(CALIBRATION_FILE.into(), calibration.write(&folder.join(CALIBRATION_FILE))?);
        files.extend(queries.write(&folder.join(QUERIES_FILE))?.map(|sum| (QUERIES_FILE.into(), sum)));
    }
    Ok(())
}

/// Logs warnings about weaknesses of a version's calibration.
pub(super) fn warn(calibration: &Calibration, queries: &Queries, (package, recipe): (Option<&Package>, &Recipe)) {
    let has_tower = package.is_some_and(|package| package.user.is_some());
    if has_tower && queries.are_items() {
        tracing::warn!(
            "no queries: perturbed items calibrated a model with a user tower, whose queries may find less than the recall that they ask for; \
             expected {REQUESTS_FILE} in the package (`export(samples=...)` in Python), or --queries"
        );
    }
    let recall = recipe.serving.recall;
    for (k, found) in calibration.short_of(recall) {
        tracing::warn!(
            candidates = k,
            recall,
            found,
            "int8 rows lose too many of the best: a recall of {found:.3} is measured, {recall} is requested; \
             dimensions that are large and similar for all items leave little resolution for the others: use vectors without them, or first-pass codes"
        );
    }
}

/// Returns how each graph of a package is executed, under the decisions on the reranker's item-side part.
fn graphs(package: &Package, decisions: &Decisions) -> Result<BTreeMap<String, GraphRecord>> {
    let served = package.decided(decisions)?;
    Ok(served.graphs().map(|(file, runs)| (file.to_owned(), GraphRecord::from(runs))).collect())
}
