//! Termination check of filtered searches: decides after each round of lists whether a search continues.

use bytemuck::{Pod, Zeroable};

use super::scan::SearchResults;
use super::{Shape, launch, need};
use crate::driver::Demand;
use crate::memory::{Array, Device};
use sterling_core::error::{Error, Result};

/// Number of score ranges in which unscanned lists are counted.
const RANGES: usize = 128;
/// Words of 8 bytes that the kernel stores per search between checks.
const CHECK_STATE_WORDS: usize = 2 * RANGES + 5;
/// Shared memory per block of the check: a digit search, three numbers per range, and the partial sums of the threads.
const SHARED_BYTES: usize = 4 * (super::top::DESCENT_WORDS + 5 * RANGES + 4);

/// Termination criteria of a search.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct TerminationCriteria {
    /// Estimated number of items that pass the filter, scanned or not.
    pub passing: f64,
    /// The search ends if unscanned lists are expected to contain at most this number of best items.
    pub left: f64,
    /// Number of survivors to find before the search may end because the lists scanned last yielded few.
    pub enough: u32,
    /// Number of survivors to find before the search may end by the estimate for unscanned lists; the score of the last
    /// of these survivors is the threshold for other items.
    pub found: u32,
    /// 1 if the search ends when the lists scanned last yield little, because there are no score-residual quantiles.
    pub is_gain: u32,
    /// Number of survivors that is enough after `suffices_at` lists, regardless of unscanned lists.
    pub suffices: u32,
    /// Number of lists after which `suffices` applies; 0 if it never applies.
    pub suffices_at: u32,
    /// Number of survivors below which the search does not end by the estimate for unscanned lists.
    pub least: u32,
}

/// Termination criteria of one search, and the times of its checks.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    /// Termination criteria.
    pub judged: TerminationCriteria,
    /// Ascending numbers of scanned lists after which checks happen; the last number is the maximum to scan.
    pub looks: Vec<u32>,
    /// If `is_gain`: yield that the lists before each check must reach for the search to continue.
    pub gains: Vec<f64>,
}

/// Lists of searches, best first, and the scores of the lists.
#[derive(Clone, Copy, Debug)]
pub struct ProbedLists<'a> {
    /// Ordered keys of all list scores, `[queries, lists]`.
    pub keys: &'a Array<u32>,
    /// Lists, best first, `[queries, stride]`.
    pub order: &'a Array<u32>,
    /// Number of sorted lists per query.
    pub stride: usize,
    /// Number of items per list, `[lists]`.
    pub lengths: &'a Array<u32>,
    /// Query embeddings, `[queries, D]`.
    pub vectors: &'a Array<f32>,
    /// Score-residual quantiles, ascending: how far items score above `slope` times the score of their list.
    pub margins: &'a Array<f32>,
    /// Regression slope of item score on list score.
    pub slope: f32,
}

/// Searches on the device that run round by round.
#[derive(Debug)]
pub struct RunningSearches {
    judged: Array<TerminationCriteria>,
    sighted: Array<u64>,
    looks: Array<u32>,
    gains: Array<f64>,
    most: Vec<usize>,
    /// First list of the next round, `[queries]`; equal to `ends` if the search is over.
    pub begins: Array<u32>,
    /// Index after the last list of the next round, `[queries]`. After the search: the number of scanned lists.
    pub ends: Array<u32>,
    /// Number of items in all scanned lists, `[queries]`.
    pub items: Array<u64>,
}

impl RunningSearches {
    /// Creates searches that have not begun.
    ///
    /// # Errors
    /// `Internal` for a search without checks, or with checks that do not ascend; as [`Device::copy`].
    pub fn new(device: &Device, searches: &[Schedule]) -> Result<Self> {
        let invalid = |s: &&Schedule| s.looks.is_empty() || !s.looks.is_sorted() || s.gains.len() != s.looks.len();
        if let Some(invalid) = searches.iter().find(invalid) {
            return Err(Error::internal(format!(
                "termination checks at {:?} have {} gains, expected ascending checks with one gain each",
                invalid.looks,
                invalid.gains.len()
            )));
        }
        let rounds = searches.iter().map(|s| s.looks.len()).max().unwrap_or(0);
        // In rounds after its last check a search does not advance.
        let at = |s: &Schedule, round: usize| s.looks[round.min(s.looks.len() - 1)];
        let (mut looks, mut gains, mut most) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..=rounds {
            looks.extend(searches.iter().map(|s| at(s, round)));
            gains.extend(searches.iter().map(|s| s.gains.get(round).copied().unwrap_or(0.0)));
            let before = |s: &Schedule| round.checked_sub(1).map_or(0, |before| at(s, before));
            most.push(searches.iter().map(|s| (at(s, round) - before(s)) as usize).max().unwrap_or(0));
        }
        most.truncate(rounds);
        let judged: Vec<TerminationCriteria> = searches.iter().map(|s| s.judged).collect();
        Ok(RunningSearches {
            judged: device.copy(&judged)?,
            sighted: device.room(searches.len() * CHECK_STATE_WORDS)?,
            looks: device.copy(&looks)?,
            gains: device.copy(&gains)?,
            most,
            begins: device.zeros(searches.len())?,
            ends: device.copy(&looks[..searches.len()])?,
            items: device.zeros(searches.len())?,
        })
    }

    /// Returns the maximum number of lists per query in each round.
    pub fn rounds(&self) -> &[usize] {
        &self.most
    }

    /// Checks after a round whether each search continues.
    ///
    /// # Errors
    /// `Internal` for arrays that are too short, or if the launch fails.
    pub fn look(
        &self,
        device: &Device,
        round: usize,
        retained: &SearchResults<'_>,
        of: &ProbedLists<'_>,
    ) -> Result<()> {
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        struct TerminationArgs {
            judged: u64,
            sighted: u64,
            looks: u64,
            gains: u64,
            list_keys: u64,
            order: u64,
            lengths: u64,
            vectors: u64,
            margins: u64,
            keys: u64,
            counts: u64,
            survivors: u64,
            begins: u64,
            ends: u64,
            items: u64,
            round: u32,
            lists: u32,
            stride: u32,
            dimension: u32,
            margin_count: u32,
            room: u32,
            slope: f32,
            unused: u32,
        }
        let queries = self.judged.len();
        let dimension = of.vectors.len() / queries.max(1);
        need("list scores", of.keys, queries * of.lengths.len())?;
        need("ordered lists", of.order, queries * of.stride)?;
        need("scores of candidates", retained.keys, queries * retained.room)?;
        if retained.counts.len() != queries || retained.survivors.len() != queries || round >= self.most.len() {
            return Err(Error::internal(format!(
                "round {round} of {} does not fit {queries} searches",
                self.most.len()
            )));
        }
        let arguments = TerminationArgs {
            judged: self.judged.address(),
            sighted: self.sighted.address(),
            looks: self.looks.address(),
            gains: self.gains.address(),
            list_keys: of.keys.address(),
            order: of.order.address(),
            lengths: of.lengths.address(),
            vectors: of.vectors.address(),
            margins: of.margins.address(),
            keys: retained.keys.address(),
            counts: retained.counts.address(),
            survivors: retained.survivors.address(),
            begins: self.begins.address(),
            ends: self.ends.address(),
            items: self.items.address(),
            round: round as u32,
            lists: of.lengths.len() as u32,
            stride: of.stride as u32,
            dimension: dimension as u32,
            margin_count: of.margins.len() as u32,
            room: retained.room as u32,
            slope: of.slope,
            unused: 0,
        };
        // The kernel reads the scores of candidates three times, for the digits of the threshold.
        let lists_bytes = queries * of.lengths.len() * 8;
        let demand = Demand { again: 2 * retained.bytes as u64, ..Demand::of_bytes(retained.bytes + lists_bytes) };
        let (grid, shared_bytes) = ([queries, 1, 1], SHARED_BYTES);
        launch(device, &Shape { kernel: "look_ahead", grid, threads: 1024, shared_bytes, demand }, &arguments)
    }
}
