//! Rows that the lists of an index were not made for.
//!
//! The score of a centroid predicts what the rows of its list score, as long as they lie about as far from it as the rows that the
//! list was made of. A row that lies much farther away may score well for a query that scores the centroid badly: a number of probes
//! that was measured with other rows does not find it. So the residual of a new row (its squared distance to its centroid, as a share
//! of its squared length) is compared with those of the index's own rows of about its length. Strays, the rows whose residual is
//! larger than nearly all of these, get lists of their own.

use super::kmeans::{Sample, distance, means, train};
use super::options::Options;
use super::view::Index;
use sterling_core::error::Result;
use sterling_core::tensor::Matrix;
use sterling_kernels::cpu::Kernels;
use sterling_storage::rows::RowStore;

/// Rows of the index that are sampled.
const SAMPLED: usize = 16_384;
/// Sampled rows that are compared as being of about one length, at least.
const GROUP_MIN: usize = 512;
/// Groups of rows of about one length, at most.
const GROUPS_MAX: usize = 16;
/// Share of the index's own rows whose residuals are no larger than what a row that is no stray may have.
const FITTING: f64 = 0.98;
/// Residual up to which a row is the same as its centroid but for rounding.
const SAME: f32 = 1e-4;
/// Rounds of the k-means over strays, and rows a list that train it.
const ROUNDS: usize = 6;
const SAMPLE_PER_LIST: usize = 32;

/// Residuals of the rows of an index.
#[derive(Debug)]
pub(super) struct Residuals {
    /// Groups of sampled rows by rising length: the largest squared length of each, and the largest residual that fits.
    groups: Vec<(f32, f32)>,
    /// Root mean square of the distances to the centroids.
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

    /// Whether the residual of a row `[D]` is larger than those of nearly all rows of the index.
    pub(super) fn is_stray(&self, row: &[f32], centroid: &[f32]) -> bool {
        let square = square(row);
        let longer = self.groups.partition_point(|(longest, _)| *longest < square);
        let group = self.groups.get(longer).or(self.groups.last());
        group.is_some_and(|(_, fitting)| share(distance(row, centroid), square) > fitting + SAME)
    }
}

/// Rows in lists that were trained for them alone.
pub(super) struct Clustered {
    /// `[C, D]`
    pub(super) centroids: Vec<f32>,
    /// `[N]`: the list of each row.
    pub(super) of_rows: Vec<u32>,
    /// `[C]`: root mean square of the distances of each list's rows to its centroid.
    pub(super) distances: Vec<f32>,
}

impl Clustered {
    /// Clusters rows `[N, D]` into so many lists, none of them more than there are rows. Where an index has rows of one `length` the
    /// centroids are comparable with its own: as long as its own would be for rows of that length.
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
