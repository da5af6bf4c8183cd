//! Assignment of further rows to the lists of an existing index, and delta indexes of such rows.

use super::build::{Built, Lists, from_lists};
use super::coded::CodedRow;
use super::kmeans::Centroids;
use super::options::Rescore;
use super::own_lists::OwnLayout;
use super::statistics::{RowSurvey, common_length};
use super::stray::{Clustered, Residuals};
use super::view::{Index, WideRows};
use sterling_core::error::Result;
use sterling_core::limits;
use sterling_core::tensor::Matrix;
use sterling_core::units::Slot;
use sterling_kernels::cpu::Kernels;

/// Number of sampled rows of an index in the test whether all rows have one length.
const SAMPLED: usize = 1000;
/// Tolerance of a centroid's length around 1 if lists were built for rows of one length.
const UNIT_TOLERANCE: f32 = 1e-3;

/// Minimum mean number of new rows per list for rows to use the lists of the index: with fewer, blocks would be mostly
/// padding.
const LISTED_MIN: usize = 2;
/// Minimum number of strays (rows unlike those the lists were trained on) that get several own lists instead of one:
/// scanning fewer strays takes less time than the rest of a request.
const RANKED_MIN: usize = 2048;
/// Number of lists for strays per square root of the number of strays, as in a snapshot, and minimum rows per list.
const OWN_PER_ROOT: f64 = 4.0;
const OWN_ROWS_MIN: usize = 32;
/// Factor for the increase of the score of a list of strays: its rows' distance to their centroid beyond that of
/// rows of the index, divided by √D, is multiplied by this factor. The factor exceeds 1 because the rows of a cluster
/// differ mostly in few dimensions, and in these by more than the mean over all dimensions.
const RAISE: f32 = 4.0;

/// Assigns rows to lists as the build of the index did.
pub struct Assigner {
    centroids: Centroids,
    kernels: Kernels,
    dimension: usize,
    nearest: bool,
    rescore: Rescore,
    /// Common length of the rows that the lists were built for, if there is one.
    length: Option<f32>,
    residuals: Residuals,
}

impl Assigner {
    /// Creates an assigner for the lists of an index.
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
            length,
            residuals: Residuals::of(index),
        }
    }

    /// Returns the number of lists, C.
    pub fn lists(&self) -> usize {
        self.centroids.rows.len() / self.dimension
    }

    /// Returns the list of each of `rows` `[N, D]`.
    pub fn assign(&self, rows: Matrix<'_>) -> Vec<u32> {
        self.centroids.assign_all(self.kernels, rows, None, &|_| ())
    }

    /// Returns true if a vector `[D]`, assigned to `list`, is a stray: unlike the rows that the lists were trained on, so that it
    /// belongs in a list that the snapshot does not have.
    pub fn is_stray(&self, vector: &[f32], list: u32) -> bool {
        let centroid = &self.centroids.rows[list as usize * self.dimension..][..self.dimension];
        self.lists() > 1 && self.residuals.is_stray(vector, centroid)
    }

    /// Builds an index of `rows` `[N, D]` in the given lists, with the search settings of this index.
    ///
    /// # Errors
    /// As [`RowSurvey::of`] and [`from_lists`].
    pub fn arrange(&self, rows: Matrix<'_>, of_rows: Vec<u32>) -> Result<Built> {
        let lists = Lists { centroids: self.centroids.rows.clone(), of_rows, nearest: self.nearest };
        from_lists(&RowSurvey::of(&rows.into())?, lists, self.rescore)
    }

    /// Encodes a vector `[D]` in the formats of the index.
    pub fn coded(&self, vector: &[f32]) -> CodedRow {
        CodedRow::of(vector, self.rescore)
    }

    /// Returns the encoded row of a slot of the index, or of a segment with the same row formats.
    pub fn taken(&self, index: &Index, slot: Slot) -> CodedRow {
        CodedRow::read(index, slot, self.rescore)
    }

    /// Builds an index of encoded rows: in the given lists, with the search settings of this index, or in a single list that
    /// every search scans.
    ///
    /// # Errors
    /// As [`from_lists`].
    pub fn arrange_coded(&self, rows: &[&CodedRow], of_rows: Option<Vec<u32>>) -> Result<Built> {
        self.arrange_in(
            rows,
            match of_rows {
                Some(of_rows) => Lists { centroids: self.centroids.rows.clone(), of_rows, nearest: self.nearest },
                None => Lists { centroids: vec![0.0; self.dimension], of_rows: vec![0; rows.len()], nearest: false },
            },
        )
    }

    fn arrange_in(&self, rows: &[&CodedRow], lists: Lists) -> Result<Built> {
        let alike = rows.iter().all(|row| row.rescore == self.rescore);
        let rescore = if alike { self.rescore } else { Rescore::F32 };
        from_lists(&RowSurvey::for_coded_rows(rows.len(), self.dimension), lists, rescore)
    }

    /// Builds the delta index of later rows from the list of each row and whether the row is a stray
    /// ([`Assigner::is_stray`]). Rows that fit use the snapshot's lists if there are enough such rows; strays get lists
    /// of their own. If too few rows fit, all rows get own lists. Returns the layout of own lists; `None` if there are
    /// none, or if a single list holds all rows.
    ///
    /// # Errors
    /// As [`from_lists`].
    pub fn arrange_delta(
        &self,
        rows: &[&CodedRow],
        lists: &[u32],
        is_stray: &[bool],
    ) -> Result<(Built, Option<OwnLayout>)> {
        let strays = is_stray.iter().filter(|is_stray| **is_stray).count();
        let has_room = self.lists() + rows.len() / OWN_ROWS_MIN < limits::LISTS_MAX;
        let is_shared = rows.len() - strays >= self.lists() * LISTED_MIN && has_room;
        if is_shared && strays == 0 {
            return Ok((self.arrange_coded(rows, Some(lists.to_vec()))?, None));
        }
        if !is_shared && strays < RANKED_MIN {
            return Ok((self.arrange_coded(rows, None)?, None));
        }
        let own: Vec<usize> = (0..rows.len()).filter(|&row| !is_shared || is_stray[row]).collect();
        let (mut centroids, first) =
            if is_shared { (self.centroids.rows.clone(), self.lists()) } else { (Vec::new(), 0) };
        let mut of_rows = lists.to_vec();
        let raises = if strays < RANKED_MIN {
            centroids.resize(centroids.len() + self.dimension, 0.0);
            own.iter().for_each(|&row| of_rows[row] = first as u32);
            None
        } else {
            let mut vectors = vec![0.0; own.len() * self.dimension];
            vectors.chunks_exact_mut(self.dimension).zip(&own).for_each(|(out, &row)| rows[row].numbers(out));
            let count = ((OWN_PER_ROOT * (own.len() as f64).sqrt()) as usize).clamp(1, own.len() / OWN_ROWS_MIN);
            let clustered = Clustered::of(Matrix::new(&vectors, self.dimension)?, count, self.length)?;
            centroids.extend(clustered.centroids);
            own.iter().zip(&clustered.of_rows).for_each(|(&row, list)| of_rows[row] = first as u32 + list);
            let farther = |distance: &f32| (distance - self.residuals.distance).max(0.0);
            let raise = |distance| RAISE * farther(distance) / (self.dimension as f32).sqrt();
            Some(clustered.distances.iter().map(raise).collect())
        };
        let built = self.arrange_in(rows, Lists { centroids, of_rows, nearest: self.nearest })?;
        Ok((built, Some(OwnLayout { first, raises })))
    }
}

/// Returns the common length of an index's rows if its lists were built for one.
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
