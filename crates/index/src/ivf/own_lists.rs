//! Own lists of a delta index: inverted lists for rows that do not fit the lists of its snapshot.
//!
//! The other lists of a delta index have the centroids of the snapshot's lists and are scanned with these. A search
//! scans an own list if its centroid scores at least as high as that of the last snapshot list that the search scans.
//! Own lists thus cost nothing for queries unlike their rows. If their rows are farther from the centroid than rows of
//! the snapshot are from theirs, some rows score higher than the centroid's score suggests. The score of the list is
//! then raised by the expected excess. If only few rows do not fit, they are in a single list that every search scans;
//! several lists are called *ranked*, because they are selected by score.

use super::kmeans::blocked;
use super::quantize::Quantized;
use sterling_core::units::ListId;
use sterling_kernels::cpu::Kernels;
use sterling_kernels::cpu::kernels::{BLOCK, Blocks, Staging};

/// Layout of a delta index with own lists.
#[derive(Clone, Debug, PartialEq)]
pub struct OwnLayout {
    /// Index of the delta's first own list; all lists before this index are those of the snapshot.
    pub first: usize,
    /// Increase of the score of each own list, for a query of length 1; `None` for a single list, which every search
    /// scans.
    pub raises: Option<Vec<f32>>,
}

/// Own lists of a delta index, after the lists that it shares with the snapshot.
#[derive(Clone, Debug)]
pub(super) struct OwnLists {
    /// Number of shared lists: all of the snapshot's, or none.
    pub(super) first: usize,
    /// Number of items in own lists.
    pub(super) items: usize,
    /// Centroids of several own lists; `None` for a single list, which every search scans.
    pub(super) ranked: Option<RankedLists>,
}

/// Centroids of the own lists of a delta index.
#[derive(Clone, Debug)]
pub(super) struct RankedLists {
    codes: Vec<u8>,
    scales: Vec<f32>,
    /// Increase of the score of each list, for a query of length 1.
    raises: Vec<f32>,
}

/// Buffers for scoring the own lists of delta indexes, reused between calls.
#[derive(Debug, Default)]
pub(super) struct OwnScratch {
    slots: Vec<u32>,
    /// Score of each own list of one delta index.
    pub(super) scores: Vec<f32>,
    /// Own lists of that delta index that a search scans.
    pub(super) chosen: Vec<ListId>,
}

/// Query in the form with which the centroids of own lists are scored.
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
    /// Encodes the centroids `[C, D]` of own lists.
    pub(super) fn new(centroids: &[f32], dimension: usize, raises: Vec<f32>) -> Self {
        let rows = centroids.chunks_exact(dimension).map(Some);
        let (codes, scales) = blocked(rows, dimension, raises.len());
        RankedLists { codes, scales, raises }
    }

    pub(super) fn count(&self) -> usize {
        self.raises.len()
    }

    /// Computes the scores of all lists, minus `penalties` if there are any.
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
    /// Selects the lists that score at least `threshold`, the score of the last snapshot list that is scanned. `first` is the
    /// number of the first own list.
    pub(super) fn choose(&mut self, first: usize, threshold: f32) {
        self.chosen.clear();
        let reaching = self.scores.iter().enumerate().filter(|(_, score)| **score >= threshold);
        self.chosen.extend(reaching.map(|(n, _)| ListId((first + n) as u32)));
    }
}
