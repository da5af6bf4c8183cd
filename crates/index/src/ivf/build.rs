//! Index build: trains centroids on a sample, assigns rows in chunks (or uses existing lists), and orders rows by list.

use rayon::prelude::*;

use super::first_pass::{Coder, IndexExtent};
use super::kmeans;
use super::options::{Options, Rescore};
use super::statistics::RowSurvey;
use super::trained::Trained;
use super::view::{EXPECTED, Index, first_invalid};
use sterling_core::error::{Error, Result};
use sterling_core::limits;
use sterling_core::tensor::Matrix;
use sterling_core::units::{NO_ITEM, Slot};
use sterling_kernels::cpu::kernels::BLOCK;
use sterling_storage::rows::RowStore;

/// Index in memory before it is written to a file.
#[derive(Debug)]
pub struct Built {
    /// Row of each slot, `[S]`, or [`NO_ITEM`].
    pub order: Vec<u32>,
    /// First slot of each list, `[C + 1]`; multiples of 16.
    pub list_offsets: Vec<u32>,
    /// Number of items of each list, `[C]`.
    pub list_lengths: Vec<u32>,
    pub(super) centroids: Vec<f32>,
    /// L2 penalties, `[C]`; empty if lists are probed by inner products only.
    pub(super) penalties: Vec<f32>,
    pub(super) dimension: usize,
    pub(super) rescore: Rescore,
    /// Encoder of the first-pass codes, if the index has them.
    pub(super) coder: Option<Coder>,
}

/// Existing lists of the vectors.
#[derive(Clone, Debug)]
pub struct Lists {
    /// Centroids, `[C, D]`.
    pub centroids: Vec<f32>,
    /// List of each row, `[N]`.
    pub of_rows: Vec<u32>,
    /// True if queries probe the nearest centroids in L2, false if they probe the centroids with the largest inner products.
    pub nearest: bool,
}

/// Clusters `rows` `[N, D]`, with one chunk and the training sample in memory. `progress` receives numbers of assigned rows
/// ([`steps`]).
///
/// # Errors
/// `Invalid` for invalid options; as [`RowStore::read`].
pub fn build(
    rows: &RowStore<'_>,
    survey: &RowSurvey,
    options: &Options,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<Built> {
    let trained = Trained::train(rows, survey, options, progress)?;
    let of_rows = trained.assign(rows, progress)?;
    let lists = Lists { centroids: trained.into_centroids(), of_rows, nearest: false };
    let mut built = arrange(rows.cols(), lists, survey.fitted(options.rescore));
    built.train_first_pass(rows, options)?;
    Ok(built)
}

/// Builds an index from existing lists, without first-pass codes.
///
/// # Errors
/// `Invalid` if the lists do not match the rows.
pub fn from_lists(survey: &RowSurvey, lists: Lists, rescore: Rescore) -> Result<Built> {
    let centroids = Matrix::new(&lists.centroids, survey.cols)?;
    let count = centroids.rows();
    if count == 0 || count > limits::LISTS_MAX || (0..count).any(|c| first_invalid(centroids.row(c)).is_some()) {
        let most = limits::LISTS_MAX;
        return Err(Error::invalid(format!("index: {count} centroids, expected 1 to {most} of {EXPECTED}")));
    }
    let of_rows = &lists.of_rows;
    if of_rows.is_empty() || of_rows.len() != survey.rows || of_rows.iter().any(|&list| list as usize >= count) {
        return Err(Error::invalid(format!(
            "index: {} list numbers for {count} lists, expected one for each of {} rows",
            of_rows.len(),
            survey.rows
        )));
    }
    Ok(arrange(survey.cols, lists, survey.fitted(rescore)))
}

/// Returns half the squared length of a centroid. The inner product minus this penalty is largest for the nearest centroid in L2.
fn penalty(centroid: &[f32]) -> f32 {
    centroid.iter().map(|x| x * x).sum::<f32>() / 2.0
}

/// Returns the first slot of each list with these lengths, and the total at the end: multiples of 16.
pub fn list_offsets(lengths: &[u32]) -> Vec<u32> {
    let offset = lengths.iter().scan(0, |end, length| {
        *end += length.next_multiple_of(BLOCK as u32);
        Some(*end)
    });
    [0].into_iter().chain(offset).collect()
}

/// Assigns every row to a slot of the row's list.
fn arrange(dimension: usize, lists: Lists, rescore: Rescore) -> Built {
    let Lists { centroids, of_rows, nearest } = lists;
    let mut list_lengths = vec![0u32; centroids.len() / dimension];
    of_rows.iter().for_each(|&l| list_lengths[l as usize] += 1);
    let list_offsets = list_offsets(&list_lengths);
    let mut order = vec![NO_ITEM; list_offsets[list_lengths.len()] as usize];
    let mut next = list_offsets.clone();
    for (row, &list) in of_rows.iter().enumerate() {
        order[next[list as usize] as usize] = row as u32;
        next[list as usize] += 1;
    }
    let penalties = if nearest { centroids.chunks_exact(dimension).map(penalty).collect() } else { Vec::new() };
    Built { order, list_offsets, list_lengths, centroids, penalties, dimension, rescore, coder: None }
}

/// Returns the total of rows that a build assigns, for a progress bar.
///
/// # Errors
/// As [`Options::shape_of`].
pub fn steps(survey: &RowSurvey, options: &Options) -> Result<usize> {
    let lists = options.shape_of(&survey.extent(options.rescore))?.lists;
    Ok(survey.rows + options.sample(survey.rows, lists) * options.iterations)
}

impl Built {
    /// Returns the size of the index.
    pub fn extent(&self) -> IndexExtent {
        let items = self.list_lengths.iter().map(|&length| length as usize).sum();
        IndexExtent { items, dimension: self.dimension, row_bytes: self.rescore.width() * self.dimension }
    }

    /// Sorts the items of each list by `keys` `[N]`; ties keep the order of the rows.
    ///
    /// # Panics
    /// If a row has no key.
    pub fn sort_lists(&mut self, keys: &[u64]) {
        let mut left = self.order.as_mut_slice();
        let mut lists = Vec::with_capacity(self.list_lengths.len());
        for (bounds, &length) in self.list_offsets.windows(2).zip(&self.list_lengths) {
            let (list, rest) = left.split_at_mut((bounds[1] - bounds[0]) as usize);
            lists.push(&mut list[..length as usize]);
            left = rest;
        }
        lists.into_par_iter().for_each(|list| list.sort_unstable_by_key(|&row| (keys[row as usize], row)));
    }

    /// Returns an index of the same lists with only the rows for which `keeps` is true, in the same order: a shard.
    #[must_use]
    pub fn part(&self, keeps: impl Fn(u32) -> bool) -> Built {
        let mut of_rows = Vec::with_capacity(self.list_lengths.len());
        for (bounds, &length) in self.list_offsets.windows(2).zip(&self.list_lengths) {
            let list = &self.order[bounds[0] as usize..][..length as usize];
            of_rows.push(list.iter().copied().filter(|&row| keeps(row)).collect::<Vec<u32>>());
        }
        let (mut order, mut list_offsets) = (Vec::new(), vec![0]);
        for list in &of_rows {
            order.extend_from_slice(list);
            order.resize(order.len().next_multiple_of(BLOCK), NO_ITEM);
            list_offsets.push(order.len() as u32);
        }
        Built {
            order,
            list_offsets,
            list_lengths: of_rows.iter().map(|list| list.len() as u32).collect(),
            centroids: self.centroids.clone(),
            penalties: self.penalties.clone(),
            coder: self.coder.clone(),
            ..*self
        }
    }

    /// Returns for each slot of this index the slot of its item in `whole`, `[S]`. This index is a [`Built::part`] of
    /// `whole`; entries of slots without an item are meaningless.
    ///
    /// # Panics
    /// If this index is not a part of `whole`.
    #[must_use]
    pub fn places_in(&self, whole: &Built) -> Vec<u32> {
        let mut places = vec![NO_ITEM; self.order.len()];
        for (list, &length) in self.list_lengths.iter().enumerate() {
            let own = self.list_offsets[list] as usize..self.list_offsets[list] as usize + length as usize;
            let mut slots = whole.list_offsets[list]..whole.list_offsets[list + 1];
            for (place, row) in places[own.clone()].iter_mut().zip(&self.order[own]) {
                let found = slots.find(|&slot| whole.order[slot as usize] == *row);
                *place = found.expect("a part keeps the order of the items of `whole`");
            }
        }
        places
    }

    /// Returns some of the `rows` that the index was built from, rounded as the index stores them.
    ///
    /// # Errors
    /// As [`RowStore::read`].
    pub fn as_kept(&self, rows: &RowStore<'_>, numbers: &[u32]) -> Result<Vec<Vec<f32>>> {
        let mut rising = numbers.to_vec();
        rising.sort_unstable();
        rising.dedup();
        let picked = RowStore::owned(rows.picked(&rising)?, self.dimension)?;
        let alone = Lists { centroids: vec![0.0; self.dimension], of_rows: vec![0; rising.len()], nearest: false };
        let index = Index::open(&arrange(self.dimension, alone, self.rescore).in_memory(&picked, "rows")?)?;
        let retained = |number: &u32| {
            let mut row = vec![0.0; self.dimension];
            index.row(Slot(rising.partition_point(|other| other < number) as u32), &mut row);
            row
        };
        Ok(numbers.iter().map(retained).collect())
    }

    /// Trains the encoder of the first-pass codes on the `rows` that the index was built from, if the options request codes.
    ///
    /// # Errors
    /// As [`Options::shape_of`] and [`RowStore::read`].
    pub fn train_first_pass(&mut self, rows: &RowStore<'_>, options: &Options) -> Result<()> {
        let Some(shape) = options.shape_of(&self.extent())?.codes else { return Ok(()) };
        let residuals = match Coder::sample(shape) {
            0 => Vec::new(),
            wanted => self.residuals(rows, wanted, options.seed)?,
        };
        self.coder = Some(Coder::train(&residuals, self.dimension, shape, options.seed));
        Ok(())
    }

    /// Returns the residuals of a sample of `rows`.
    fn residuals(&self, rows: &RowStore<'_>, wanted: usize, seed: u64) -> Result<Vec<f32>> {
        let mut of_rows = vec![0u32; rows.rows()];
        for (list, bounds) in self.list_offsets.windows(2).enumerate() {
            let slots = &self.order[bounds[0] as usize..bounds[1] as usize];
            slots.iter().filter(|row| **row != NO_ITEM).for_each(|&row| of_rows[row as usize] = list as u32);
        }
        let sample = kmeans::drawn(rows.rows(), wanted, seed);
        let mut residuals = rows.picked(&sample)?;
        for (residual, row) in residuals.chunks_exact_mut(self.dimension).zip(sample) {
            let centroid = self.centroid(of_rows[row as usize] as usize);
            residual.iter_mut().zip(centroid).for_each(|(x, c)| *x -= c);
        }
        Ok(residuals)
    }

    /// Reuses the first-pass encoder of another index with more or fewer items.
    pub fn keep_first_pass(&mut self, index: &Index) {
        self.coder = index.first_pass.as_ref().map(|codes| codes.coder.clone());
    }

    pub(super) fn centroid(&self, list: usize) -> &[f32] {
        &self.centroids[list * self.dimension..][..self.dimension]
    }

    /// Returns the number of items in all lists, N.
    pub fn items(&self) -> usize {
        self.list_lengths.iter().map(|&length| length as usize).sum()
    }
}
