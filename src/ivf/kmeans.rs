//! Spherical k-means over a sample, deterministic from a seed.
//!
//! 1. A sample of the rows is drawn; a hash of the seed and the row decides, so that the same rows come every time.
//! 2. The first centroids are sampled rows, distinct where that is possible.
//! 3. Each round assigns every sampled row to the centroid with the largest product (int8 codes on both sides: a round
//!    moves centroids by far more than the rounding), and takes the mean of each, in f32, normalised.
//! 4. A centroid without rows takes a row of the largest list, so that no list stays empty.
//!
//! Rows of unequal length are assigned by `x·c - |c|²/2`, the nearest centroid in L2; centroids keep their length then.

use rayon::prelude::*;

use super::quantize::{Quantized, write_row};
use crate::device::kernels::{BLOCK, Blocks, Kernels};
use crate::tensor::Matrix;

/// Rows that are assigned at a time: each line of the centroids that is loaded serves all of them.
const ROWS: usize = 4;

/// A random number for the pair of a seed and an index.
pub(super) fn mix(seed: u64, index: u64) -> u64 {
    let mut x = seed ^ index.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// Centroids `[C, D]` with their int8 form.
pub(super) struct Centroids {
    pub(super) rows: Vec<f32>,
    dimension: usize,
    codes: Vec<u8>,
    scales: Vec<f32>,
    /// Half the squared length of each, for rows of unequal length; zeros otherwise. Padded to whole blocks.
    penalties: Vec<f32>,
}

impl Centroids {
    fn new(rows: Vec<f32>, dimension: usize, spherical: bool) -> Self {
        let count = rows.len() / dimension;
        let (codes, scales) = blocked(rows.chunks_exact(dimension).map(Some), dimension, count);
        let half = |row: &[f32]| if spherical { 0.0 } else { row.iter().map(|x| x * x).sum::<f32>() / 2.0 };
        let mut penalties: Vec<f32> = rows.chunks_exact(dimension).map(half).collect();
        penalties.resize(count.next_multiple_of(BLOCK), 0.0);
        Centroids { rows, dimension, codes, scales, penalties }
    }

    fn count(&self) -> usize {
        self.rows.len() / self.dimension
    }

    /// The best centroid of each row of `rows`, at most [`ROWS`] of them.
    fn assign(&self, kernels: Kernels, rows: &[&[f32]], queries: &mut [Quantized; ROWS], out: &mut [u32]) {
        for (n, query) in queries.iter_mut().enumerate() {
            query.set(rows[n.min(rows.len() - 1)]);
        }
        let blocks = Blocks {
            codes: &self.codes,
            scales: &self.scales,
            groups: self.dimension.div_ceil(4),
            items: self.count(),
            words: None,
            first_slot: 0,
            next: &[],
        };
        let nearest = kernels.nearest4(&blocks, &self.penalties, &queries.each_ref().map(Quantized::view));
        out.copy_from_slice(&nearest[..out.len()]);
    }

    /// The best centroid of every row.
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
            }
            progress(out.len());
        });
        lists
    }
}

/// Rows (or none, for pads) as blocked int8 codes and scales.
pub(super) fn blocked<'a>(
    rows: impl Iterator<Item = Option<&'a [f32]>>,
    dimension: usize,
    count: usize,
) -> (Vec<u8>, Vec<f32>) {
    let (blocks, bytes) = (count.div_ceil(BLOCK), dimension.div_ceil(4) * 64);
    let (mut codes, mut scales) = (vec![128u8; blocks * bytes], vec![0f32; blocks * BLOCK]);
    for (slot, row) in rows.enumerate() {
        if let Some(row) = row {
            let block = slot / BLOCK;
            scales[slot] = write_row(row, slot % BLOCK, &mut codes[block * bytes..(block + 1) * bytes]);
        }
    }
    (codes, scales)
}

/// True where all rows are of one length, up to a thousandth.
pub(super) fn is_spherical(rows: Matrix<'_>) -> bool {
    let length = |r: usize| rows.row(r).iter().map(|x| x * x).sum::<f32>().sqrt();
    let first = length(0);
    first > 0.0 && (0..rows.rows()).into_par_iter().all(|r| (length(r) - first).abs() <= first * 1e-3)
}

/// Trains `lists` centroids on a sample of at most `sample` rows.
pub(super) fn train(
    kernels: Kernels,
    rows: Matrix<'_>,
    lists: usize,
    sample: usize,
    iterations: usize,
    seed: u64,
    progress: &(dyn Fn(usize) + Sync),
) -> Centroids {
    let spherical = is_spherical(rows);
    let mut picked: Vec<u32> = (0..rows.rows() as u32).collect();
    let wanted = sample.clamp(lists, rows.rows().max(lists)).min(rows.rows());
    if wanted < picked.len() {
        picked.select_nth_unstable_by_key(wanted, |&row| (mix(seed, u64::from(row)), row));
        picked.truncate(wanted);
    }
    picked.sort_unstable_by_key(|&row| (mix(seed, u64::from(row)), row));
    let first: Vec<f32> = picked[..lists].iter().flat_map(|&row| rows.row(row as usize)).copied().collect();
    // In the order of the rows memory is read forwards.
    picked.sort_unstable();
    let mut centroids = Centroids::new(first, rows.cols(), spherical);
    for _ in 0..iterations {
        let assigned = centroids.assign_all(kernels, rows, Some(&picked), progress);
        centroids = Centroids::new(means(rows, &picked, &assigned, lists, spherical), rows.cols(), spherical);
    }
    centroids
}

/// The mean row of each list; a list without rows takes every second row of the largest one.
fn means(rows: Matrix<'_>, picked: &[u32], assigned: &[u32], lists: usize, spherical: bool) -> Vec<f32> {
    let mut members: Vec<Vec<u32>> = vec![Vec::new(); lists];
    picked.iter().zip(assigned).for_each(|(&row, &list)| members[list as usize].push(row));
    let mut by_size: Vec<usize> = (0..lists).collect();
    by_size.sort_by_key(|&l| (std::cmp::Reverse(members[l].len()), l));
    let empty: Vec<usize> = (0..lists).filter(|&l| members[l].is_empty()).collect();
    for (empty, &full) in empty.into_iter().zip(&by_size) {
        if members[full].len() > 1 {
            let half = members[full].iter().skip(1).step_by(2).copied().collect();
            members[full] = members[full].iter().step_by(2).copied().collect();
            members[empty] = half;
        }
    }
    let mut means = vec![0f32; lists * rows.cols()];
    means.par_chunks_mut(rows.cols()).zip(&members).for_each(|(mean, members)| {
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
