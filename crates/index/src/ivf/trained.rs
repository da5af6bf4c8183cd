//! Centroids trained on a sample, and the assignment of rows to them, which is independent per row.

use super::kmeans::{self, Centroids, Sample};
use super::options::Options;
use super::statistics::RowSurvey;
use sterling_core::error::Result;
use sterling_kernels::cpu::Kernels;
use sterling_storage::rows::RowStore;

/// Trained centroids.
pub struct Trained {
    centroids: Centroids,
    kernels: Kernels,
}

impl Trained {
    /// Trains on a sample of `rows` `[N, D]`; only the sample is in memory. `progress` receives numbers of assigned rows.
    ///
    /// # Errors
    /// `Invalid` for invalid options; as [`RowStore::read`].
    pub fn train(
        rows: &RowStore<'_>,
        survey: &RowSurvey,
        options: &Options,
        progress: &(dyn Fn(usize) + Sync),
    ) -> Result<Self> {
        let lists = options.shape_of(&survey.extent(options.rescore))?.lists;
        let kernels = Kernels::detect()?;
        let sample = Sample::draw(rows, options.sample(rows.rows(), lists), options.seed)?;
        Ok(Trained { centroids: kmeans::train(kernels, &sample, lists, options, survey.length(), progress), kernels })
    }

    /// Restores trained centroids `[C, D]`; `length` is the common length of the training rows, if they had one.
    ///
    /// # Errors
    /// As [`Kernels::detect`].
    pub fn of(centroids: Vec<f32>, dimension: usize, length: Option<f32>) -> Result<Self> {
        Ok(Trained { centroids: Centroids::new(centroids, dimension, length), kernels: Kernels::detect()? })
    }

    /// Returns the list of each of `rows` `[N, D]`, with one chunk in memory. `progress` receives numbers of assigned rows.
    ///
    /// # Errors
    /// As [`RowStore::read`].
    pub fn assign(&self, rows: &RowStore<'_>, progress: &(dyn Fn(usize) + Sync)) -> Result<Vec<u32>> {
        let mut of_rows = Vec::with_capacity(rows.rows());
        rows.each(|_, chunk| {
            of_rows.extend(self.centroids.assign_all(self.kernels, chunk, None, progress));
            Ok(())
        })?;
        Ok(of_rows)
    }

    /// Returns the centroids `[C, D]`.
    pub fn into_centroids(self) -> Vec<f32> {
        self.centroids.rows
    }
}
