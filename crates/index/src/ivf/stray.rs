//! Detection of strays: rows that the lists of an index were not trained on.
//!
//! The score of a centroid predicts the scores of its rows if these are about as far from it as the rows that the list was
//! trained on. A row that is much farther away may score well for a query whose product with the centroid is low. A search with
//! an nprobe that was calibrated on other rows does not find such a row. Therefore the relative residual of a new row (its
//! squared distance to its centroid, divided by its squared length) is compared with the residuals of indexed rows of
//! similar length. Strays are the rows whose residual exceeds nearly all residuals of indexed rows; they get lists of
//! their own.

use super::kmeans::{Sample, distance, means, train};
use super::options::Options;
use super::view::Index;
use sterling_core::error::Result;
use sterling_core::tensor::Matrix;
use sterling_kernels::cpu::Kernels;
use sterling_storage::rows::RowStore;

/// Number of sampled rows of the index.
const SAMPLED: usize = 16_384;
/// Minimum number of sampled rows per group of similar length.
const GROUP_MIN: usize = 512;
/// Maximum number of groups of similar length.
const GROUPS_MAX: usize = 16;
/// Quantile of the indexed rows' residuals up to which a row fits.
const FITTING: f64 = 0.98;
/// Residual up to which a row is considered equal to its centroid, except for rounding.
const SAME: f32 = 1e-4;
/// Rounds of the k-means on strays, and its training rows per list.
const ROUNDS: usize = 6;
const SAMPLE_PER_LIST: usize = 32;

/// Residuals of the rows of an index.
#[derive(Debug)]
pub(super) struct Residuals {
    /// Groups of sampled rows by ascending length: the largest squared length of each, and the largest residual that fits.
    groups: Vec<(f32, f32)>,
    /// Root mean square distance of rows to their centroids.
    pub(super) distance: f32,
}

impl Residuals {
    pub(super) fn of(index: &Index) -> Self {
        let mut row = vec![0.0; index.dimension()];
        let slots = index.filled_slots().step_by((index.items() / SAMPLED).max(1));
        let mut sample: Vec<(f32, f32)> = slots
            .map(|slot| {
                index.row(slot, &mut row);
                (square(&row), distance(&row, index.centroid(index.list_of(slot))))
            })
            .collect();
        sample.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        let groups = (sample.len() / GROUP_MIN).clamp(1, GROUPS_MAX);
        let group = |group: &[(f32, f32)]| {
            let mut shares: Vec<f32> = group.iter().map(|(square, distance)| share(*distance, *square)).collect();
            let place = ((shares.len() as f64 * FITTING) as usize).min(shares.len() - 1);
            let fitting = *shares.select_nth_unstable_by(place, f32::total_cmp).1;
            (group.last().map_or(0.0, |last| last.0), fitting)
        };
        Residuals {
            distance: root_mean(sample.iter().map(|(_, distance)| *distance)),
            groups: sample.chunks(sample.len().div_ceil(groups).max(1)).map(group).collect(),
        }
    }

    /// Returns true if the residual of a row `[D]` exceeds those of nearly all rows of the index.
    pub(super) fn is_stray(&self, row: &[f32], centroid: &[f32]) -> bool {
        let square = square(row);
        let longer = self.groups.partition_point(|(longest, _)| *longest < square);
        let group = self.groups.get(longer).or(self.groups.last());
        group.is_some_and(|(_, fitting)| share(distance(row, centroid), square) > fitting + SAME)
    }
}

/// Rows in lists that were trained on them alone.
pub(super) struct Clustered {
    /// Centroids, `[C, D]`.
    pub(super) centroids: Vec<f32>,
    /// List of each row, `[N]`.
    pub(super) of_rows: Vec<u32>,
    /// Root mean square distance of each list's rows to its centroid, `[C]`.
    pub(super) distances: Vec<f32>,
}

impl Clustered {
    /// Clusters rows `[N, D]` into `lists` lists, at most one per row. If the rows of the index have a common `length`, the
    /// centroids are scaled to be comparable with those of the index.
    ///
    /// # Errors
    /// As [`Kernels::detect`].
    pub(super) fn of(rows: Matrix<'_>, lists: usize, length: Option<f32>) -> Result<Self> {
        let kernels = Kernels::detect()?;
        let options = Options { iterations: ROUNDS, sample_per_list: SAMPLE_PER_LIST, ..Options::default() };
        let sample = Sample::draw(&RowStore::from(rows), options.sample(rows.rows(), lists), options.seed)?;
        let of_rows =
            train(kernels, &sample, lists, &options, length, &|_| ()).assign_all(kernels, rows, None, &|_| ());
        let mut members = vec![Vec::new(); lists];
        (0u32..).zip(&of_rows).for_each(|(row, &list)| members[list as usize].push(row));
        let mut centroids = means(rows, &members, length.is_some());
        let row = |row: &u32| rows.row(*row as usize);
        let mut distances = Vec::with_capacity(lists);
        for (centroid, members) in centroids.chunks_exact_mut(rows.cols()).zip(&members) {
            if let Some(length) = length {
                let longer = root_mean(members.iter().map(|one| square(row(one)))) / length;
                centroid.iter_mut().for_each(|x| *x *= longer);
            }
            distances.push(root_mean(members.iter().map(|one| distance(row(one), centroid))));
        }
        Ok(Clustered { centroids, of_rows, distances })
    }
}

fn square(row: &[f32]) -> f32 {
    row.iter().map(|x| x * x).sum()
}

fn share(distance: f32, square: f32) -> f32 {
    distance / square.max(f32::MIN_POSITIVE)
}

fn root_mean(squares: impl ExactSizeIterator<Item = f32>) -> f32 {
    let count = squares.len().max(1) as f64;
    (squares.map(f64::from).sum::<f64>() / count).sqrt() as f32
}
