//! Spherical k-means on a sample, deterministic for a seed.
//!
//! 1. A sample of the rows is drawn by a hash of the seed and the row, so the sample is always the same. Only the sample is
//!    in memory.
//! 2. Initial centroids are sampled rows, each chosen with probability proportional to its squared distance from the previous
//!    ones, as in k-means++ (Arthur and Vassilvitskii 2007). Many rows are chosen per round, as in k-means|| (Bahmani
//!    et al., 2012).
//! 3. Each round assigns every sampled row to the centroid with the largest product of int8 codes, corrected for the rounding of
//!    the centroid along its direction. Centroids then become the normalized f32 means.
//! 4. Lists are balanced during the rounds: lists far below the mean size are dissolved, and lists far above it are split in two
//!    to replace them. Balancing moves centroids, never a row away from its best centroid.
//!
//! Rows of unequal length are assigned by `x·c - |c|²/2`, the nearest centroid in L2; centroids then keep their length.

use rayon::prelude::*;

use super::options::Options;
use super::quantize::{Quantized, read_row, write_row};
use super::random::mix;
use sterling_core::error::Result;
use sterling_core::tensor::Matrix;
use sterling_kernels::cpu::Kernels;
use sterling_kernels::cpu::kernels::{BLOCK, Blocks};
use sterling_kernels::priority::breathe;
use sterling_storage::rows::RowStore;

/// Number of rounds that choose the initial centroids.
const SEED_ROUNDS: usize = 8;
/// One in `SEED_SHARE` rows of the sample may become an initial centroid.
const SEED_SHARE: usize = 4;
/// A list below this share of the mean size is dissolved.
const SMALL: f64 = 0.25;
/// A list above this multiple of the mean size is halved; one half replaces a dissolved list.
const LARGE: f64 = 3.0;
/// Number of final rounds that replace only empty lists, so that moved centroids converge.
const ROUNDS_SETTLING: usize = 2;
/// Rows that are assigned at a time: each loaded line of the centroids serves all these rows.
const ROWS: usize = 4;

/// Centroids `[C, D]` with their int8 codes.
pub(super) struct Centroids {
    pub(super) rows: Vec<f32>,
    dimension: usize,
    codes: Vec<u8>,
    scales: Vec<f32>,
    /// Penalties subtracted from the products. Penalties correct the bias from rounding a centroid for rows in its
    /// direction; without this correction, one of several close centroids would attract the rows of all. For rows of unequal
    /// length, penalties include half the squared length. The array is padded to a multiple of a block.
    penalties: Vec<f32>,
}

impl Centroids {
    pub(super) fn new(rows: Vec<f32>, dimension: usize, length: Option<f32>) -> Self {
        let count = rows.len() / dimension;
        let (codes, scales) = blocked(rows.chunks_exact(dimension).map(Some), dimension, count);
        let penalty = |(n, row): (usize, &[f32])| {
            let square = row.iter().map(|x| x * x).sum::<f32>();
            let rounded = row.iter().zip(read_row(&codes, dimension, n)).map(|(x, code)| x * code).sum::<f32>();
            let rounding = rounded * scales[n] - square;
            match length {
                Some(length) if square > 0.0 => rounding * length / square.sqrt(),
                Some(_) => 0.0,
                None => rounding + square / 2.0,
            }
        };
        let mut penalties: Vec<f32> = rows.chunks_exact(dimension).enumerate().map(penalty).collect();
        penalties.resize(count.next_multiple_of(BLOCK), 0.0);
        Centroids { rows, dimension, codes, scales, penalties }
    }

    fn of_rows(rows: Matrix<'_>, which: &[u32], length: Option<f32>) -> Self {
        let values = which.iter().flat_map(|&row| rows.row(row as usize)).copied().collect();
        Centroids::new(values, rows.cols(), length)
    }

    fn count(&self) -> usize {
        self.rows.len() / self.dimension
    }

    /// Returns the best centroid of each of up to [`ROWS`] rows.
    fn assign(&self, kernels: Kernels, rows: &[&[f32]], queries: &mut [Quantized; ROWS], out: &mut [u32]) {
        for (n, query) in queries.iter_mut().enumerate() {
            query.set(rows[n.min(rows.len() - 1)]);
        }
        let blocks = Blocks {
            codes: &self.codes,
            scales: &self.scales,
            groups: self.dimension.div_ceil(4),
            items: self.count(),
            first_slot: 0,
            next: &[],
        };
        let nearest = kernels.nearest4(&blocks, &self.penalties, &queries.each_ref().map(Quantized::view));
        out.copy_from_slice(&nearest[..out.len()]);
    }

    /// Returns the best centroid of every row.
    pub(super) fn assign_all(
        &self,
        kernels: Kernels,
        rows: Matrix<'_>,
        which: Option<&[u32]>,
        progress: &(dyn Fn(usize) + Sync),
    ) -> Vec<u32> {
        let count = which.map_or(rows.rows(), <[u32]>::len);
        let mut lists = vec![0u32; count];
        lists.par_chunks_mut(1024).enumerate().for_each(|(chunk, out)| {
            let mut queries: [Quantized; ROWS] = Default::default();
            let row = |n: usize| rows.row(which.map_or(n, |w| w[n] as usize));
            for (part, out) in out.chunks_mut(ROWS).enumerate() {
                let first = chunk * 1024 + part * ROWS;
                let of_part: Vec<&[f32]> = (first..first + out.len()).map(row).collect();
                self.assign(kernels, &of_part, &mut queries, out);
                breathe();
            }
            progress(out.len());
        });
        lists
    }
}

/// Encodes rows as blocked int8 codes and scales; `None` rows are padding.
pub(super) fn blocked<'a>(
    rows: impl Iterator<Item = Option<&'a [f32]>>,
    dimension: usize,
    count: usize,
) -> (Vec<u8>, Vec<f32>) {
    let (blocks, bytes) = (count.div_ceil(BLOCK), dimension.div_ceil(4) * 64);
    let (mut codes, mut scales) = (vec![128u8; blocks * bytes], vec![0f32; blocks * BLOCK]);
    for (slot, row) in rows.enumerate() {
        breathe();
        if let Some(row) = row {
            let block = slot / BLOCK;
            scales[slot] = write_row(row, slot % BLOCK, &mut codes[block * bytes..(block + 1) * bytes]);
        }
    }
    (codes, scales)
}

/// Training rows, in row order.
pub(super) struct Sample {
    values: Vec<f32>,
    cols: usize,
    /// Indexes of the rows among all rows.
    numbers: Vec<u32>,
    /// The rows of the sample in random order.
    shuffled: Vec<u32>,
}

impl Sample {
    /// Samples `wanted` of all rows.
    ///
    /// # Errors
    /// As [`RowStore::read`].
    pub(super) fn draw(rows: &RowStore<'_>, wanted: usize, seed: u64) -> Result<Self> {
        let numbers = drawn(rows.rows(), wanted, seed);
        let values = rows.picked(&numbers)?;
        let mut shuffled: Vec<u32> = (0..numbers.len() as u32).collect();
        shuffled.sort_unstable_by_key(|&n| {
            let row = numbers[n as usize];
            (mix(seed, u64::from(row)), row)
        });
        Ok(Sample { values, cols: rows.cols(), numbers, shuffled })
    }

    fn rows(&self) -> Matrix<'_> {
        Matrix::new(&self.values, self.cols).expect("the row width divides the number of values")
    }

    fn row(&self, n: u32) -> &[f32] {
        &self.values[n as usize * self.cols..][..self.cols]
    }
}

/// Returns the `wanted` of `count` rows with the smallest hashes, ascending. A bound on the uniform hash keeps only slightly more
/// than `wanted` rows in memory.
pub(super) fn drawn(count: usize, wanted: usize, seed: u64) -> Vec<u32> {
    if wanted >= count {
        return (0..count as u32).collect();
    }
    let mut share = (wanted as f64 + 6.0 * (wanted as f64).sqrt() + 16.0) / count as f64;
    let mut keys: Vec<(u64, u32)> = loop {
        let bound = (share.min(1.0) * u64::MAX as f64) as u64;
        let below = (0..count as u32).into_par_iter().map(|row| (mix(seed, u64::from(row)), row));
        let keys: Vec<(u64, u32)> = below.filter(|(key, _)| *key <= bound).collect();
        if keys.len() >= wanted {
            break keys;
        }
        share *= 2.0;
    };
    if wanted < keys.len() {
        keys.select_nth_unstable(wanted);
        keys.truncate(wanted);
    }
    let mut rows: Vec<u32> = keys.into_iter().map(|(_, row)| row).collect();
    rows.sort_unstable();
    rows
}

/// Trains `lists` centroids on a sample of at least as many rows; `length` is the common length of all rows, if there is one.
pub(super) fn train(
    kernels: Kernels,
    sample: &Sample,
    lists: usize,
    options: &Options,
    length: Option<f32>,
    progress: &(dyn Fn(usize) + Sync),
) -> Centroids {
    let rows = sample.rows();
    let first = seeds(kernels, sample, lists, options.seed, length);
    let mut centroids = Centroids::of_rows(rows, &first, length);
    for round in 0..options.iterations {
        let assigned = centroids.assign_all(kernels, rows, None, progress);
        let mut members: Vec<Vec<u32>> = vec![Vec::new(); lists];
        (0..).zip(&assigned).for_each(|(row, &list)| members[list as usize].push(row));
        balance(rows, &mut members, round + ROUNDS_SETTLING >= options.iterations);
        centroids = Centroids::new(means(rows, &members, length.is_some()), rows.cols(), length);
    }
    centroids
}

/// Chooses `count` initial centroids among a part of the sample.
fn seeds(kernels: Kernels, sample: &Sample, count: usize, seed: u64, length: Option<f32>) -> Vec<u32> {
    let rows = sample.rows();
    let picked = &sample.shuffled[..(sample.shuffled.len() / SEED_SHARE).max(count)];
    let a_round = count.div_ceil(SEED_ROUNDS);
    let mut drawn = picked[..a_round].to_vec();
    let mut fresh = 0..a_round;
    let mut nearest = vec![f32::INFINITY; picked.len()];
    let mut taken: Vec<bool> = (0..picked.len()).map(|n| n < a_round).collect();
    while drawn.len() < count {
        let centroids = Centroids::of_rows(rows, &drawn[fresh.clone()], length);
        let assigned = centroids.assign_all(kernels, rows, Some(picked), &|_| ());
        nearest.par_iter_mut().zip(picked).zip(&assigned).for_each(|((nearest, &row), &c)| {
            *nearest = nearest.min(distance(sample.row(row), sample.row(drawn[fresh.start + c as usize])));
        });
        // Weighted sampling without replacement (Efraimidis and Spirakis 2006): each row has a random event time at a
        // rate equal to its squared distance, and the rows with the earliest events are chosen. Rows that were chosen
        // before come last, even after duplicates of them.
        let round_seed = mix(seed, drawn.len() as u64);
        let time = |n: usize| {
            let random = ((mix(round_seed, u64::from(sample.numbers[picked[n] as usize])) >> 12) as f64 + 0.5)
                / (1u64 << 52) as f64;
            (if taken[n] { f64::INFINITY } else { -random.ln() / f64::from(nearest[n]) }, taken[n], n)
        };
        let mut times: Vec<(f64, bool, usize)> = (0..picked.len()).map(time).collect();
        let more = a_round.min(count - drawn.len());
        times.select_nth_unstable_by(more - 1, |a, b| a.0.total_cmp(&b.0).then((a.1, a.2).cmp(&(b.1, b.2))));
        fresh = drawn.len()..drawn.len() + more;
        for &(_, _, n) in &times[..more] {
            taken[n] = true;
            drawn.push(picked[n]);
        }
    }
    drawn
}

pub(super) fn distance(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(x, y)| (x - y) * (x - y)).sum()
}

/// Replaces lists that are too small (or only empty ones) by halves of the largest lists.
fn balance(rows: Matrix<'_>, members: &mut [Vec<u32>], empty_only: bool) {
    let mean = members.iter().map(Vec::len).sum::<usize>() as f64 / members.len() as f64;
    let mut by_size: Vec<usize> = (0..members.len()).collect();
    by_size.sort_by_key(|&l| (std::cmp::Reverse(members[l].len()), l));
    let small = |list: &[u32]| list.is_empty() || (!empty_only && (list.len() as f64) < SMALL * mean);
    let large = |list: &[u32]| list.len() as f64 > LARGE * mean;
    for (&from, &to) in by_size.iter().zip(by_size.iter().rev()) {
        let worth = if members[to].is_empty() { members[from].len() > 1 } else { large(&members[from]) };
        if !small(&members[to]) || !worth {
            break;
        }
        (members[from], members[to]) = halves(rows, &members[from]);
    }
}

/// Splits a list into two non-empty parts: around its first row and around the row farthest from it.
pub(super) fn halves(rows: Matrix<'_>, list: &[u32]) -> (Vec<u32>, Vec<u32>) {
    let row = |n: u32| rows.row(n as usize);
    let one = row(list[0]);
    let far = |n: &&u32| distance(row(**n), one);
    let other = list.iter().max_by(|a, b| far(a).total_cmp(&far(b))).map_or(one, |&n| row(n));
    let (mut near, mut rest): (Vec<u32>, Vec<u32>) =
        list.iter().partition(|&&n| distance(row(n), one) <= distance(row(n), other));
    if rest.is_empty() {
        rest = near.split_off(near.len() / 2);
    }
    (near, rest)
}

/// Returns the mean row of each list.
pub(super) fn means(rows: Matrix<'_>, members: &[Vec<u32>], spherical: bool) -> Vec<f32> {
    let mut means = vec![0f32; members.len() * rows.cols()];
    means.par_chunks_mut(rows.cols()).zip(members).for_each(|(mean, members)| {
        for &row in members {
            mean.iter_mut().zip(rows.row(row as usize)).for_each(|(m, x)| *m += x);
        }
        let length = mean.iter().map(|x| x * x).sum::<f32>().sqrt();
        let divisor = if spherical { length } else { members.len() as f32 };
        if divisor > 0.0 {
            mean.iter_mut().for_each(|m| *m /= divisor);
        }
    });
    means
}
