//! Lists that a delta index has of its own, for rows that the lists of its snapshot do not fit.
//!
//! A search scans one of them wherever its score is as high as that of the last snapshot list that is scanned, so that it costs
//! nothing where queries are not like its rows. Where its rows lie farther from their centroid than rows of the snapshot do, the
//! centroid predicts less, and the score is raised by what they may be expected to score beyond that. Few rows lie in a single list,
//! which every search scans.

use super::kmeans::blocked;
use super::quantize::Quantized;
use sterling_core::units::ListId;
use sterling_kernels::cpu::Kernels;
use sterling_kernels::cpu::kernels::{BLOCK, Blocks, Staging};

/// Which lists of a delta index are its own.
#[derive(Clone, Debug, PartialEq)]
pub struct OwnLayout {
    /// The first of them; all before it are the snapshot's.
    pub first: usize,
    /// What the score of each is raised by for a query of length 1; none where there is a single one, which every search scans.
    pub raises: Option<Vec<f32>>,
}

/// Own lists of a delta index, behind those that it shares with the snapshot.
#[derive(Clone, Debug)]
pub(super) struct OwnLists {
    /// Number of lists that are the snapshot's: all of its, or none.
    pub(super) first: usize,
    /// Items in the own lists.
    pub(super) items: usize,
    /// None where there is a single one, which every search scans.
    pub(super) ranked: Option<RankedLists>,
}

/// Centroids of own lists.
#[derive(Clone, Debug)]
pub(super) struct RankedLists {
    codes: Vec<u8>,
    scales: Vec<f32>,
    /// What is added to the score of each list, for a query of length 1.
    raises: Vec<f32>,
}

/// Memory of scoring own lists, kept between calls.
#[derive(Debug, Default)]
pub(super) struct OwnScratch {
    slots: Vec<u32>,
    /// The score of each own list of one index.
    pub(super) scores: Vec<f32>,
    /// The lists that a search scans.
    pub(super) chosen: Vec<ListId>,
}

/// A query as own lists are scored for it.
#[derive(Clone, Copy)]
pub(super) struct OwnQuery<'a> {
    pub(super) int8: &'a Quantized,
    pub(super) length: f32,
}

impl<'a> OwnQuery<'a> {
    pub(super) fn of(vector: &[f32], int8: &'a Quantized) -> Self {
        OwnQuery { int8, length: vector.iter().map(|x| x * x).sum::<f32>().sqrt() }
    }
}

impl RankedLists {
    /// Those of centroids `[C, D]`.
    pub(super) fn new(centroids: &[f32], dimension: usize, raises: Vec<f32>) -> Self {
        let rows = centroids.chunks_exact(dimension).map(Some);
        let (codes, scales) = blocked(rows, dimension, raises.len());
        RankedLists { codes, scales, raises }
    }

    pub(super) fn count(&self) -> usize {
        self.raises.len()
    }

    /// Fills the scores of all lists, less `penalties` where there are any.
    pub(super) fn score(&self, kernels: Kernels, query: OwnQuery<'_>, penalties: &[f32], scratch: &mut OwnScratch) {
        let (lists, padded) = (self.count(), self.count().next_multiple_of(BLOCK) + BLOCK);
        let OwnScratch { slots, scores, .. } = scratch;
        slots.resize(padded, 0);
        scores.resize(padded, 0.0);
        let groups = self.codes.len() / (lists.div_ceil(BLOCK) * 4 * BLOCK);
        let blocks =
            Blocks { codes: &self.codes, scales: &self.scales, groups, items: lists, first_slot: 0, next: &[] };
        let mut staging = Staging { scores, slots, len: 0 };
        kernels.scan(&blocks, &query.int8.view(), f32::NEG_INFINITY, 0, &mut staging);
        scores.truncate(lists);
        scores.iter_mut().zip(&self.raises).for_each(|(score, raise)| *score += raise * query.length);
        scores.iter_mut().zip(penalties).for_each(|(score, penalty)| *score -= penalty);
    }
}

impl OwnScratch {
    /// Chooses the lists, of which `first` is the first, that score at least as high as `threshold`, the score of the last snapshot
    /// list that is scanned.
    pub(super) fn choose(&mut self, first: usize, threshold: f32) {
        self.chosen.clear();
        let reaching = self.scores.iter().enumerate().filter(|(_, score)| **score >= threshold);
        self.chosen.extend(reaching.map(|(n, _)| ListId((first + n) as u32)));
    }
}
