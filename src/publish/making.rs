//! A version on its way, from what was arranged to a folder that is whole but for its manifest.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use super::request::{Progress, Publish, Stage};
use super::{calibrate, precision, serving, warm, write};
use crate::error::Result;
use crate::model::{Decisions, Package};
use crate::snapshot::{CALIBRATION_FILE, FORMAT, GraphRecord, Manifest, Provenance, QUERIES_FILE, Recipe};

/// What becomes a version.
pub(super) struct Making<'a> {
    pub(super) what: &'a Publish,
    pub(super) files: write::Version<'a>,
    pub(super) provenance: Provenance,
    pub(super) start: Instant,
    pub(super) progress: &'a Progress<'a>,
}

impl Making<'_> {
    /// Writes the version into `folder`, calibrates and tries it; it is whole but for its manifest, which is returned.
    pub(super) fn whole(&self, folder: &Path, version: u64) -> Result<Manifest> {
        let Making { what, files: version_files, progress, .. } = self;
        let write::Version { package, spec, arranged, .. } = version_files;
        let mut files = version_files.write(folder, progress)?;
        let decisions = match package {
            Some(package) => serving::prepare(package, folder, &what.recipe, &mut files)?,
            None => Decisions::default(),
        };
        let told = |done, total| progress(Stage::Calibrating, done, total);
        let (queries, own) = (what.queries.as_deref(), what.package.as_deref());
        if let Some((calibration, queries)) = calibrate::version(folder, queries, own, &what.recipe, &told)? {
            files.insert(CALIBRATION_FILE.into(), calibration.write(&folder.join(CALIBRATION_FILE))?);
            files.extend(queries.write(&folder.join(QUERIES_FILE))?.map(|sum| (QUERIES_FILE.into(), sum)));
        }
        let seconds = self.start.elapsed().as_secs_f64();
        let mut manifest = Manifest {
            format: FORMAT,
            name: spec.name.clone(),
            version,
            dimension: arranged.embedded.vectors.cols(),
            items: arranged.ids.len(),
            slots: arranged.built.order.len(),
            lists: arranged.built.list_lengths.len(),
            position: what.position,
            shard: None,
            merged: None,
            folded: None,
            provenance: Provenance { seconds, ..self.provenance.clone() },
            files,
            graphs: Some(BTreeMap::new()),
            decisions,
        };
        settle(*package, folder, &mut manifest, &what.recipe)?;
        Ok(manifest)
    }
}

/// Decides what the model of the version in `folder`, whole but for its manifest, leaves open, notes what runs its graphs, and
/// lets it answer the requests that are kept with it.
fn settle(package: Option<&Package>, folder: &Path, manifest: &mut Manifest, recipe: &Recipe) -> Result<()> {
    if let Some(package) = package {
        manifest.decisions.precision = precision::decide(package, folder, manifest, !recipe.is_coarse())?;
        let served = package.decided(&manifest.decisions)?;
        let record = |(file, runs): (&str, _)| (file.to_owned(), GraphRecord::from(runs));
        manifest.graphs = Some(served.graphs().map(record).collect());
    }
    warm::answer(folder, manifest, !recipe.is_coarse())
}
