//! Further rows for an index that is there: which of its lists each belongs to, and an index of them over the same lists.

use super::build::{Built, Lists, from_lists};
use super::coded::CodedRow;
use super::kmeans::Centroids;
use super::options::Rescore;
use super::survey::{RowSurvey, common_length};
use super::view::{Index, WideRows};
use crate::device::cpu::Kernels;
use crate::error::Result;
use crate::tensor::Matrix;
use crate::units::Slot;

/// Rows of an index that tell whether all have one length.
const SAMPLED: usize = 1000;
/// How far the length of a centroid is from 1 where lists were built for rows of one length.
const UNIT_TOLERANCE: f32 = 1e-3;

/// Finds the lists of rows as the build of an index did.
pub struct Assigner {
    centroids: Centroids,
    kernels: Kernels,
    dimension: usize,
    nearest: bool,
    rescore: Rescore,
}

impl Assigner {
    /// The lists of an index.
    pub fn new(index: &Index) -> Self {
        let dimension = index.dimension();
        let length = if index.penalties.is_empty() { length_of_rows(index) } else { None };
        let rescore = match index.rows() {
            WideRows::None => Rescore::None,
            WideRows::Bf16(_) => Rescore::Bf16,
            WideRows::F16(_) => Rescore::F16,
            WideRows::F32(_) => Rescore::F32,
        };
        Assigner {
            centroids: Centroids::new(index.centroids.to_vec(), dimension, length),
            kernels: index.kernels,
            dimension,
            nearest: !index.penalties.is_empty(),
            rescore,
        }
    }

    /// Number of lists, C.
    pub fn lists(&self) -> usize {
        self.centroids.rows.len() / self.dimension
    }

    /// The list of each of `rows` `[N, D]`.
    pub fn assign(&self, rows: Matrix<'_>) -> Vec<u32> {
        self.centroids.assign_all(self.kernels, rows, None, &|_| ())
    }

    /// An index of `rows` `[N, D]` in given lists, searched as the index is whose lists these are.
    ///
    /// # Errors
    /// As [`RowSurvey::of`] and [`from_lists`].
    pub fn arrange(&self, rows: Matrix<'_>, of_rows: Vec<u32>) -> Result<Built> {
        let lists = Lists { centroids: self.centroids.rows.clone(), of_rows, nearest: self.nearest };
        from_lists(&RowSurvey::of(&rows.into())?, lists, self.rescore)
    }

    /// A vector `[D]` as the index keeps it.
    pub fn coded(&self, vector: &[f32]) -> CodedRow {
        CodedRow::of(vector, self.rescore)
    }

    /// The row of a slot as it lies in the index, or in one of such rows.
    pub fn taken(&self, index: &Index, slot: Slot) -> CodedRow {
        CodedRow::read(index, slot, self.rescore)
    }

    /// An index of rows that are coded: in given lists, searched as the index is whose lists these are, or in a single one, all of which
    /// every search looks at.
    ///
    /// # Errors
    /// As [`from_lists`].
    pub fn arrange_coded(&self, rows: &[&CodedRow], of_rows: Option<Vec<u32>>) -> Result<Built> {
        let alike = rows.iter().all(|row| row.rescore == self.rescore);
        let rescore = if alike { self.rescore } else { Rescore::F32 };
        let survey = RowSurvey::of_coded(rows.len(), self.dimension);
        let lists = match of_rows {
            Some(of_rows) => Lists { centroids: self.centroids.rows.clone(), of_rows, nearest: self.nearest },
            None => Lists { centroids: vec![0.0; self.dimension], of_rows: vec![0; rows.len()], nearest: false },
        };
        from_lists(&survey, lists, rescore)
    }
}

/// The one length of an index's rows, where its lists were built for such.
fn length_of_rows(index: &Index) -> Option<f32> {
    let dimension = index.dimension();
    let is_unit = |row: &[f32]| (row.iter().map(|x| x * x).sum::<f32>().sqrt() - 1.0).abs() <= UNIT_TOLERANCE;
    if !index.centroids.chunks_exact(dimension).all(|row| is_unit(row) || row.iter().all(|&x| x == 0.0)) {
        return None;
    }
    let step = (index.items() / SAMPLED).max(1);
    let sampled: Vec<Slot> = index.filled_slots().step_by(step).collect();
    let mut rows = vec![0.0; sampled.len() * dimension];
    rows.chunks_exact_mut(dimension).zip(sampled).for_each(|(row, slot)| index.row(slot, row));
    common_length(Matrix::new(&rows, dimension).ok().filter(|rows| rows.rows() > 0)?)
}
