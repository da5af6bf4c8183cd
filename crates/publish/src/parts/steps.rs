//! Steps of a distributed publication that workers execute.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::Serialize;

use super::super::budget::Budget;
use super::super::embed::{Embedded, embed};
use super::super::plan::{Plan, Progress, Stage};
use super::kinds::{check_vectors, kinds};
use super::piece::{self, PieceInProgress, PieceNote};
use super::terms::{
    CENTROIDS, ITEMS, KEPT, LISTS, PartCentroids, PartFolders as _, PartItems, PartLists, PartTerms, TRAINED, VECTORS,
    VectorFile, assigning,
};
use sterling_batch::jobs::{self, JobFolder};
use sterling_core::error::{Error, Kind, Result};
use sterling_index::ivf::{self, RowSurvey, Sizes, Trained};
use sterling_snapshot::Recipe;
use sterling_snapshot::items::{FolderTypes, Items};
use sterling_snapshot::model::Package;
use sterling_storage::files::{self, Checksum};
use sterling_storage::npy;
use sterling_storage::rows::{RowStore, Spill};

/// Counts of a step's result for one unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PartCounts {
    /// Number of items of the unit.
    pub items: usize,
}

/// Worker that reads item files and embeds their items.
pub struct Embedding {
    job: JobFolder<PartTerms>,
    package: Option<Package>,
    spill: Spill,
}

impl Embedding {
    /// Begins the job of a publication in a folder, or resumes it.
    ///
    /// # Errors
    /// The error in the package; as [`JobFolder::open`].
    pub fn open(root: &Path, plan: &Plan) -> Result<Self> {
        if let Some(folder) = plan.source.package() {
            plan.trials.run(folder)?;
        }
        let package = plan.source.package().map(Package::open).transpose()?;
        let vectors = plan.source.vectors().map(VectorFile::now).transpose()?;
        let terms = PartTerms::of(plan, package.as_ref(), vectors)?;
        let items = vec![terms.items.clone()];
        let job = JobFolder::open(root, terms, items)?;
        Ok(Embedding { job, package, spill: Budget::of(plan.memory_bytes).spill(root) })
    }

    /// Returns the number of units.
    pub fn units(&self) -> usize {
        self.job.units().len()
    }

    /// Embeds a unit; `None` if the unit is embedded already.
    ///
    /// # Errors
    /// `Invalid` with the file and its error; `Conflict` if the item file has changed since the job was begun.
    pub fn embed(&self, unit: usize, progress: &Progress<'_>) -> Result<Option<PartCounts>> {
        let unit = jobs::checked(unit, self.units())?;
        let (path, of) = (self.job.part(unit), self.job.origin(unit)?);
        if piece::is_there::<PartItems>(&path, &of)? {
            return Ok(None);
        }
        let unchanged = self.job.check(unit)?;
        progress(Stage::Reading, 0, 1);
        let input = &self.job.units()[unit].input;
        let vectors = match &self.job.asked().vectors {
            Some(file) => Some((file.checked()?, self.first_row(unit)?)),
            None => None,
        };
        let types = FolderTypes::of(self.job.units().iter().map(|unit| unit.columns.as_slice()));
        let items = Items::read_one(&self.job.units()[unit].file(), &types, vectors, &self.spill)?;
        unchanged.check().map_err(|e| e.within(input.display()))?;
        if let Some((file, first)) = vectors.filter(|_| unit + 1 == self.units()) {
            let (rows, items) = (npy::open_f32(file)?.rows(), first + items.len());
            if rows != items {
                return Err(Error::invalid(format!(
                    "{}: {rows} vectors, expected one for each of the {items} items of {}",
                    file.display(),
                    self.job.asked().items.display()
                )));
            }
        }
        let counts = PartCounts { items: items.len() };
        let first_row = vectors.map(|(_, first)| first);
        let make =
            |folder: &Path| self.write(items, first_row, folder, progress).map_err(|e| e.within(input.display()));
        piece::write(&path, of, make)?;
        Ok(Some(counts))
    }

    /// Returns the row of the first item of a unit among all items, by the item counts of the units before it.
    fn first_row(&self, unit: usize) -> Result<usize> {
        self.job.units()[..unit].iter().map(|unit| Items::count(&unit.input)).sum()
    }

    fn write(
        &self,
        mut items: Items,
        first_row: Option<usize>,
        folder: &Path,
        progress: &Progress<'_>,
    ) -> Result<PieceInProgress<PartItems>> {
        let mut files = BTreeMap::new();
        items.write(&folder.join(ITEMS))?;
        files.insert(ITEMS.into(), Checksum::of_file(&folder.join(ITEMS))?);
        let (count, kinds) = (items.len(), kinds(&items));
        if count == 0 {
            return Ok((PartItems { items: 0, first_row, survey: None, kinds }, files));
        }
        let vectors_file = self.job.asked().vectors.as_ref().map(|file| file.checked()).transpose()?;
        let Embedded { vectors, kept } = embed(self.package.as_ref(), &mut items, vectors_file, &self.spill, progress)?;
        let survey = RowSurvey::of(&vectors)?;
        files.insert(VECTORS.into(), npy::write_f32(&folder.join(VECTORS), &vectors)?);
        if !kept.is_empty() {
            files.insert(KEPT.into(), files::write_atomic(&folder.join(KEPT), |out| out.write_all(&kept))?);
        }
        Ok((PartItems { items: count, first_row, survey: Some(survey), kinds }, files))
    }
}

/// Concatenates the vectors of parts; empty parts have no vectors.
pub(super) fn vectors(job: &JobFolder<PartTerms>, parts: &[PieceNote<PartItems>]) -> Result<RowStore<'static>> {
    let filled = (0..parts.len()).filter(|&unit| parts[unit].holds.items > 0);
    RowStore::joined(filled.map(|unit| npy::open_f32(&job.part(unit).join(VECTORS))).collect::<Result<_>>()?)
}

/// Combines the vector statistics of parts.
pub(super) fn surveyed(parts: &[PieceNote<PartItems>]) -> Result<RowSurvey> {
    RowSurvey::joined(parts.iter().filter_map(|part| part.holds.survey.clone()))
}

/// Trains the centroids of a job whose units are all embedded. Returns true if it trained them, false if trained centroids existed.
///
/// # Errors
/// `NotFound` with the units that are not embedded; `Corrupt` with the damaged file; `Invalid` for an unusable recipe.
pub fn train(root: &Path, progress: &Progress<'_>) -> Result<bool> {
    let job = JobFolder::<PartTerms>::begun(root)?;
    let of = job.training(&job.parts(false)?)?;
    if piece::is_there::<PartCentroids>(&job.trained(), &of)? {
        return Ok(false);
    }
    progress(Stage::Reading, 0, 1);
    let parts = job.parts(true)?;
    check_vectors(&job, &parts)?;
    let (rows, survey) = (vectors(&job, &parts)?, surveyed(&parts)?);
    let options = Recipe::parse(&job.asked().recipe)?.index;
    let sizes = Sizes::of(&survey, &options)?;
    progress(Stage::Sized(sizes), 0, 1);
    let (done, total) = (AtomicUsize::new(0), ivf::steps(&survey, &options)? - rows.rows());
    let reported = |n| progress(Stage::Clustering, done.fetch_add(n, Ordering::Relaxed) + n, total);
    let trained = Trained::train(&rows, &survey, &options, &reported)?;
    let centroids = RowStore::owned(trained.into_centroids(), rows.cols())?;
    piece::write(&job.trained(), of, |folder| {
        let sum = npy::write_f32(&folder.join(CENTROIDS), &centroids)?;
        Ok((PartCentroids { length: survey.length() }, BTreeMap::from([(CENTROIDS.into(), sum)])))
    })?;
    job.sweep(&[TRAINED]).map(|()| true)
}

/// Returns the trained centroids of a job, after checking that they were trained on the job's present item parts.
pub(super) fn centroids(
    job: &JobFolder<PartTerms>,
    parts: &[PieceNote<PartItems>],
) -> Result<(PieceNote<PartCentroids>, RowStore<'static>)> {
    let path = job.trained();
    let piece = PieceNote::open(&path, &job.training(parts)?).map_err(|e| match e.kind() {
        Kind::NotFound => Error::not_found(format!("{}: the centroids have not been trained yet", path.display())),
        _ => e,
    })?;
    let rows = npy::open_f32(&path.join(CENTROIDS))?;
    Ok((piece, rows))
}

/// Worker that assigns items to lists.
pub struct Assigning {
    job: JobFolder<PartTerms>,
    parts: Vec<PieceNote<PartItems>>,
    piece: PieceNote<PartCentroids>,
    trained: Trained,
}

impl Assigning {
    /// Creates a worker for a job whose centroids are trained.
    ///
    /// # Errors
    /// `NotFound` with the missing steps; `Corrupt` with the damaged file.
    pub fn open(root: &Path) -> Result<Self> {
        let job = JobFolder::begun(root)?;
        let parts = job.parts(false)?;
        let (piece, rows) = centroids(&job, &parts)?;
        let trained = Trained::of(rows.all()?, rows.cols(), piece.holds.length)?;
        Ok(Assigning { job, parts, piece, trained })
    }

    /// Returns the number of units.
    pub fn units(&self) -> usize {
        self.parts.len()
    }

    /// Assigns the items of a unit; `None` if the unit is assigned already.
    ///
    /// # Errors
    /// `Corrupt` with the damaged file; `Io` or `NoSpace`.
    pub fn assign(&self, unit: usize, progress: &Progress<'_>) -> Result<Option<PartCounts>> {
        let unit = jobs::checked(unit, self.units())?;
        let part = &self.parts[unit];
        let (path, of, items) = (self.job.lists(unit), assigning(part, &self.piece)?, part.holds.items);
        if piece::is_there::<PartLists>(&path, &of)? {
            return Ok(None);
        }
        PieceNote::<PartItems>::open(&self.job.part(unit), &self.job.origin(unit)?)?;
        let done = AtomicUsize::new(0);
        let reported = |n| progress(Stage::Clustering, done.fetch_add(n, Ordering::Relaxed) + n, items);
        let lists = match items {
            0 => Vec::new(),
            _ => self.trained.assign(&npy::open_f32(&self.job.part(unit).join(VECTORS))?, &reported)?,
        };
        piece::write(&path, of, |folder| {
            let sum = npy::write_u32(&folder.join(LISTS), &lists)?;
            Ok((PartLists { items }, BTreeMap::from([(LISTS.into(), sum)])))
        })?;
        Ok(Some(PartCounts { items }))
    }
}

/// Returns the lists of all parts; `is_whole` verifies the checksums of their files.
pub(super) fn assigned(
    job: &JobFolder<PartTerms>,
    parts: &[PieceNote<PartItems>],
    trained: &PieceNote<PartCentroids>,
    is_whole: bool,
) -> Result<Vec<PieceNote<PartLists>>> {
    let read = if is_whole { PieceNote::open } else { PieceNote::noted };
    job.all("assigned", |unit| read(&job.lists(unit), &assigning(&parts[unit], trained)?))
}

/// Returns the lists of all items.
pub(super) fn lists(
    job: &JobFolder<PartTerms>,
    parts: &[PieceNote<PartItems>],
    trained: &PieceNote<PartCentroids>,
) -> Result<Vec<u32>> {
    let pieces = assigned(job, parts, trained, true)?;
    let mut all = Vec::with_capacity(pieces.iter().map(|piece| piece.holds.items).sum());
    for (unit, part) in parts.iter().enumerate() {
        let path = job.lists(unit).join(LISTS);
        let (lists, ..) = npy::read_i64(&path)?;
        if lists.len() != part.holds.items {
            let (got, expected) = (lists.len(), part.holds.items);
            return Err(Error::corrupt(format!("{}: {got} lists, expected {expected}", path.display())));
        }
        // An invalid list number is rejected later, when the lists of all items are checked.
        all.extend(lists.into_iter().map(|list| u32::try_from(list).unwrap_or(u32::MAX)));
    }
    Ok(all)
}
