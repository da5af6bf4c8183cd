//! Vectors to an index: train and assign, or take lists that are there; order by list, quantise.

use bytemuck::Pod;
use half::{bf16, f16};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::first_pass::{self, Codebooks, FirstPass};
use super::kmeans;
use super::view::{EXPECTED, Index, unfit};
use crate::device::cpu::Kernels;
use crate::device::cpu::kernels::BLOCK;
use crate::error::{Error, Result};
use crate::files::TensorFile;
use crate::limits;
use crate::tensor::Matrix;
use crate::units::NO_ITEM;

/// Lists for the square root of the items: with more, queries lose on centroids what they save on items (`docs/INDEX.md`).
const LISTS_PER_ROOT: f64 = 4.0;

/// The rows that rescore candidates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rescore {
    /// None: candidates keep the int8 scores.
    None,
    /// bfloat16, 2 D bytes an item.
    Bf16,
    /// Half precision, 2 D bytes an item; f32 where an item's vector leaves the range of half precision.
    #[default]
    F16,
    /// f32, 4 D bytes an item.
    F32,
}

impl Rescore {
    /// The rows that hold these vectors: half precision ends at 65,504, and below its smallest normal number, 2^-14, it keeps
    /// few digits or none. An item all of whose numbers are that small would lose its order, so that f32 is taken instead.
    ///
    /// With them comes the first vector that half precision does not hold, and its largest number, where there is one.
    pub(super) fn fitting(self, rows: Matrix<'_>) -> (Rescore, Option<(usize, f32)>) {
        let most = |row: usize| rows.row(row).iter().fold(0f32, |most, x| most.max(x.abs()));
        let leaves = |row: &usize| {
            let most = most(*row);
            most != 0.0 && !(f16::MIN_POSITIVE.to_f32()..=f16::MAX.to_f32()).contains(&most)
        };
        match (self == Rescore::F16).then(|| (0..rows.rows()).into_par_iter().find_first(leaves)).flatten() {
            Some(row) => (Rescore::F32, Some((row, most(row)))),
            None => (self, None),
        }
    }

    /// The same, where others than those asked for with a warning.
    fn fitted(self, rows: Matrix<'_>) -> Rescore {
        let (rescore, unheld) = self.fitting(rows);
        if let Some((row, most)) = unheld {
            let item = row + 1;
            tracing::warn!(
                "index.rescore: f32 instead of f16, which does not hold item {item}, whose largest number is {most:e}"
            );
        }
        rescore
    }
}

/// How an index is built.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Lists, C; 0 takes about 4 √N, but no fewer than 1 and no list smaller than 16 items on average.
    pub lists: usize,
    /// Rows that train the centroids, as a multiple of the lists.
    pub sample_per_list: usize,
    /// Rounds of k-means.
    pub iterations: usize,
    /// The seed of everything random.
    pub seed: u64,
    /// The rows that rescore.
    pub rescore: Rescore,
    /// What is scanned in place of int8 rows, where that takes less time.
    #[serde(skip_serializing_if = "FirstPass::is_none")]
    pub first_pass: FirstPass,
}

impl Default for Options {
    fn default() -> Self {
        let first_pass = FirstPass::default();
        Options { lists: 0, sample_per_list: 64, iterations: 10, seed: 1, rescore: Rescore::F16, first_pass }
    }
}

impl Options {
    /// The number of lists for `items` items.
    ///
    /// # Errors
    /// `Invalid` with the option, its value and its range.
    pub fn lists_for(&self, items: usize) -> Result<usize> {
        if items == 0 {
            return Err(Error::invalid("index: no items, expected at least one"));
        }
        for (name, value, most) in
            [("sample_per_list", self.sample_per_list, 1 << 20), ("iterations", self.iterations, 1000)]
        {
            if value == 0 || value > most {
                return Err(Error::invalid(format!("index.{name}: got {value}, expected 1 to {most}")));
            }
        }
        match self.lists {
            0 => {
                let lists = (LISTS_PER_ROOT * (items as f64).sqrt()) as usize;
                Ok(lists.clamp(1, (items / BLOCK).max(1)).min(limits::LISTS_MAX))
            }
            lists if lists > items.min(limits::LISTS_MAX) => Err(Error::invalid(format!(
                "index.lists: got {lists} lists for {items} items, expected 1 to {}",
                items.min(limits::LISTS_MAX)
            ))),
            lists => Ok(lists),
        }
    }

    /// The subspaces of the first pass's codes of vectors of so many dimensions; none without codes.
    ///
    /// # Errors
    /// `Invalid` with the option, its value and its range; for codes without rows that score what they find.
    pub fn subspaces(&self, dimension: usize) -> Result<Option<usize>> {
        let subspaces = self.first_pass.subspaces_of(dimension)?;
        match self.rescore {
            Rescore::None if subspaces.is_some() => Err(Error::invalid(
                "index.first_pass.codes: pq4 with index.rescore = \"none\", expected rows that score what the codes find",
            )),
            _ => Ok(subspaces),
        }
    }

    /// Rows of `items` that train `lists` centroids.
    pub(super) fn sample(&self, items: usize, lists: usize) -> usize {
        lists.saturating_mul(self.sample_per_list).clamp(lists, items.max(lists)).min(items)
    }
}

/// An index in memory, on its way into a file.
#[derive(Debug)]
pub struct Built {
    /// `[S]`: the row of each slot, or [`NO_ITEM`].
    pub order: Vec<u32>,
    /// `[C + 1]`: the first slot of each list; multiples of 16.
    pub list_offsets: Vec<u32>,
    /// `[C]`: the items of each list.
    pub list_lengths: Vec<u32>,
    pub(super) centroids: Vec<f32>,
    /// `[C]`, or empty where lists are probed by inner products alone.
    penalties: Vec<f32>,
    dimension: usize,
    rescore: Rescore,
    /// The values of the first pass's codes, where it has any.
    codebooks: Option<Codebooks>,
}

/// Lists that vectors bring along.
#[derive(Clone, Debug)]
pub struct Lists {
    /// `[C, D]`: the centres.
    pub centroids: Vec<f32>,
    /// `[N]`: the list of each row.
    pub of_rows: Vec<u32>,
    /// True where a query is to probe the nearest centroids in L2, false where those with the largest inner products.
    pub nearest: bool,
}

/// Clusters `rows` `[N, D]`. `progress` is told of rows assigned; there will be [`steps`] of them.
///
/// # Errors
/// `Invalid` for numbers that are not finite and options that cannot be.
pub fn build(rows: Matrix<'_>, options: &Options, progress: &(dyn Fn(usize) + Sync)) -> Result<Built> {
    let lists = options.lists_for(rows.rows())?;
    check(rows)?;
    let kernels = Kernels::detect()?;
    let sample = lists.saturating_mul(options.sample_per_list);
    let centroids = kmeans::train(kernels, rows, lists, sample, options.iterations, options.seed, progress);
    let of_rows = centroids.assign_all(kernels, rows, None, progress);
    let lists = Lists { centroids: centroids.rows, of_rows, nearest: false };
    let mut built = arrange(rows.cols(), lists, options.rescore.fitted(rows));
    built.train_first_pass(rows, options)?;
    Ok(built)
}

/// Takes the lists that `rows` `[N, D]` came with as they are, without codes for a first pass.
///
/// # Errors
/// `Invalid` for numbers that are not finite, and for lists that do not fit the rows.
pub fn from_lists(rows: Matrix<'_>, lists: Lists, rescore: Rescore) -> Result<Built> {
    check(rows)?;
    let centroids = Matrix::new(&lists.centroids, rows.cols())?;
    let count = centroids.rows();
    if count == 0 || count > limits::LISTS_MAX || (0..count).any(|c| unfit(centroids.row(c)).is_some()) {
        let most = limits::LISTS_MAX;
        return Err(Error::invalid(format!("index: {count} centroids, expected 1 to {most} of {EXPECTED}")));
    }
    let of_rows = &lists.of_rows;
    if of_rows.is_empty() || of_rows.len() != rows.rows() || of_rows.iter().any(|&list| list as usize >= count) {
        return Err(Error::invalid(format!(
            "index: {} places in {count} lists, expected one for each of {} rows",
            of_rows.len(),
            rows.rows()
        )));
    }
    Ok(arrange(rows.cols(), lists, rescore.fitted(rows)))
}

fn check(rows: Matrix<'_>) -> Result<()> {
    if rows.cols() > limits::DIMENSION_MAX || rows.rows() > limits::ITEMS_MAX {
        return Err(Error::invalid(format!(
            "index: {} rows of {} numbers, expected at most {} of {}",
            rows.rows(),
            rows.cols(),
            limits::ITEMS_MAX,
            limits::DIMENSION_MAX
        )));
    }
    let unfit = |row: usize| unfit(rows.row(row)).map(|at| (row, at));
    match (0..rows.rows()).into_par_iter().find_map_first(unfit) {
        Some((row, at)) => Err(Error::invalid(format!(
            "index: item {}: number {} of its vector is {:e}, expected {EXPECTED}",
            row + 1,
            at + 1,
            rows.row(row)[at]
        ))),
        None => Ok(()),
    }
}

/// Half the squared length of a centroid: what the nearest one in L2 has the least of, beside the largest product.
fn penalty(centroid: &[f32]) -> f32 {
    centroid.iter().map(|x| x * x).sum::<f32>() / 2.0
}

/// Gives every row a slot in its list.
fn arrange(dimension: usize, lists: Lists, rescore: Rescore) -> Built {
    let Lists { centroids, of_rows, nearest } = lists;
    let mut list_lengths = vec![0u32; centroids.len() / dimension];
    of_rows.iter().for_each(|&l| list_lengths[l as usize] += 1);
    let mut list_offsets = vec![0u32];
    let mut end = 0u32;
    list_offsets.extend(list_lengths.iter().map(|n| {
        end += n.next_multiple_of(BLOCK as u32);
        end
    }));
    let mut order = vec![NO_ITEM; end as usize];
    let mut next = list_offsets.clone();
    for (row, &list) in of_rows.iter().enumerate() {
        order[next[list as usize] as usize] = row as u32;
        next[list as usize] += 1;
    }
    let penalties = if nearest { centroids.chunks_exact(dimension).map(penalty).collect() } else { Vec::new() };
    Built { order, list_offsets, list_lengths, centroids, penalties, dimension, rescore, codebooks: None }
}

/// Rows assigned by a build of `items` items, for a progress bar.
///
/// # Errors
/// As [`Options::lists_for`].
pub fn steps(items: usize, options: &Options) -> Result<usize> {
    let lists = options.lists_for(items)?;
    Ok(items + options.sample(items, lists) * options.iterations)
}

impl Built {
    /// Orders the items of each list by their keys, `keys` `[N]`; equal keys keep the order of the rows.
    ///
    /// # Panics
    /// Where a row has no key.
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

    /// The same lists with the rows that `keeps`, in the same order: a shard of the index.
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
            codebooks: self.codebooks.clone(),
            ..*self
        }
    }

    /// Trains the values of the first pass's codes on the same `rows` that it was built from, where the options ask for codes.
    ///
    /// # Errors
    /// As [`Options::subspaces`].
    pub fn train_first_pass(&mut self, rows: Matrix<'_>, options: &Options) -> Result<()> {
        let Some(subspaces) = options.subspaces(self.dimension)? else { return Ok(()) };
        let mut of_rows = vec![0u32; rows.rows()];
        for (list, bounds) in self.list_offsets.windows(2).enumerate() {
            let slots = &self.order[bounds[0] as usize..bounds[1] as usize];
            slots.iter().filter(|row| **row != NO_ITEM).for_each(|&row| of_rows[row as usize] = list as u32);
        }
        let centroid = |row: u32| self.centroid(of_rows[row as usize] as usize);
        self.codebooks = Some(Codebooks::train(rows, centroid, subspaces, options.seed));
        Ok(())
    }

    /// Takes over the values of the codes of another index, of which it holds more or fewer items.
    pub fn keep_first_pass(&mut self, index: &Index) {
        self.codebooks = index.first_pass.as_ref().map(|codes| codes.books.clone());
    }

    fn centroid(&self, list: usize) -> &[f32] {
        &self.centroids[list * self.dimension..][..self.dimension]
    }

    /// Items in all lists, N.
    pub fn items(&self) -> usize {
        self.list_lengths.iter().map(|&length| length as usize).sum()
    }

    /// Adds the tensors of the index over the same `rows` that it was built from.
    ///
    /// # Errors
    /// As [`TensorFile::add`].
    pub fn encode(&self, rows: Matrix<'_>, file: &mut TensorFile<'_>) -> Result<()> {
        let (dimension, slots) = (self.dimension, self.order.len());
        let row = |slot: usize| match self.order[slot] {
            NO_ITEM => None,
            row => Some(rows.row(row as usize)),
        };
        let (codes, scales) = kmeans::blocked((0..slots).map(row), dimension, slots);
        file.add_owned("codes", &[slots / BLOCK, dimension.div_ceil(4), BLOCK, 4], codes)?;
        file.add_owned("scales", &[slots], scales)?;
        file.add_owned("list_lengths", &[self.list_lengths.len()], self.list_lengths.clone())?;
        file.add_owned("centroids", &[self.list_lengths.len(), dimension], self.centroids.clone())?;
        if !self.penalties.is_empty() {
            file.add_owned("penalties", &[self.penalties.len()], self.penalties.clone())?;
        }
        if let Some(books) = &self.codebooks {
            let list_of = |slot: usize| self.list_offsets.partition_point(|&first| first as usize <= slot) - 1;
            let both = |slot: usize| row(slot).map(|row| (row, self.centroid(list_of(slot))));
            let subspaces = books.subspaces();
            let codes = first_pass::blocked(books, slots, both);
            file.add_owned("first_pass_codes", &[slots / BLOCK, subspaces / 8, BLOCK, 4], codes)?;
            file.add_owned("first_pass_values", &[dimension, books.numbers().len() / dimension], books.numbers())?;
        }
        let shape = [slots, dimension];
        match self.rescore {
            Rescore::None => Ok(()),
            Rescore::Bf16 => file.add_owned("rows", &shape, self.wide(rows, bf16::from_f32)),
            Rescore::F16 => file.add_owned("rows", &shape, self.wide(rows, f16::from_f32)),
            Rescore::F32 => file.add_owned("rows", &shape, self.wide(rows, |x| x)),
        }
    }

    fn wide<T: Pod>(&self, rows: Matrix<'_>, convert: impl Fn(f32) -> T) -> Vec<T> {
        let mut values = vec![T::zeroed(); self.order.len() * self.dimension];
        for (&row, to) in
            self.order.iter().zip(values.chunks_exact_mut(self.dimension)).filter(|(row, _)| **row != NO_ITEM)
        {
            to.iter_mut().zip(rows.row(row as usize)).for_each(|(to, &x)| *to = convert(x));
        }
        values
    }
}
