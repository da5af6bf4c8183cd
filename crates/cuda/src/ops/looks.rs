//! Whether filtered searches go on: a look at what each has found, after every so many of its lists.

use bytemuck::{Pod, Zeroable};

use super::scan::Kept;
use super::{Shape, launch, need};
use crate::driver::Demand;
use crate::memory::{Array, Device};
use sterling_core::error::{Error, Result};

/// Ranges of scores that lists ahead are counted in.
const RANGES: usize = 128;
/// Numbers of 8 bytes that are kept of a search between looks.
const SIGHTED_WORDS: usize = 2 * RANGES + 5;
/// Shared memory of a block that looks: a descent, three numbers of each range, and what its threads add up.
const SHARED_BYTES: usize = 4 * (super::top::DESCENT_WORDS + 5 * RANGES + 4);

/// What a search is judged by.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct Judged {
    /// Items that pass, scanned or not: an estimate.
    pub passing: f64,
    /// How many of the best may be expected ahead when it ends.
    pub left: f64,
    /// Survivors that must be found before it ends by what its last lists brought.
    pub enough: u32,
    /// Survivors that must be found before it ends by what is ahead; the score of the last of them is what others must beat.
    pub found: u32,
    /// 1 where it ends by what its last lists brought, for want of margins.
    pub is_gain: u32,
    /// Survivors that are enough after `suffices_at` lists, whatever is ahead.
    pub suffices: u32,
    /// See `suffices`; 0 for none.
    pub suffices_at: u32,
    /// Survivors below which it does not end by what is ahead.
    pub least: u32,
}

/// What is judged of one search, and when.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    /// By what.
    pub judged: Judged,
    /// After how many lists, rising; the last ones are the most that it scans.
    pub looks: Vec<u32>,
    /// What the lists before each look must bring, where `is_gain`.
    pub gains: Vec<f64>,
}

/// The lists of searches, best first, and how they score.
#[derive(Clone, Copy, Debug)]
pub struct Lookout<'a> {
    /// Ordered scores of all lists, `[queries, lists]`.
    pub keys: &'a Array<u32>,
    /// `[queries, stride]`
    pub order: &'a Array<u32>,
    /// Lists that are ordered of each query.
    pub stride: usize,
    /// Items of each list, `[lists]`.
    pub lengths: &'a Array<u32>,
    /// The queries, `[queries, D]`.
    pub vectors: &'a Array<f32>,
    /// How far items score above a share of their list's score, rising.
    pub margins: &'a Array<f32>,
    /// That share.
    pub slope: f32,
}

/// Searches under way.
#[derive(Debug)]
pub struct Looks {
    judged: Array<Judged>,
    sighted: Array<u64>,
    looks: Array<u32>,
    gains: Array<f64>,
    most: Vec<usize>,
    /// The lists that are scanned next, from and to; nothing where a search is over. `[queries]`
    pub begins: Array<u32>,
    /// See `begins`. At the end: how many lists were scanned.
    pub ends: Array<u32>,
    /// Items of the lists that were scanned, `[queries]`.
    pub items: Array<u64>,
}

impl Looks {
    /// Searches that have not begun.
    ///
    /// # Errors
    /// `Internal` for a search without looks, or whose looks do not rise; as [`Device::copy`].
    pub fn new(device: &Device, searches: &[Schedule]) -> Result<Self> {
        let wrong = |s: &&Schedule| s.looks.is_empty() || !s.looks.is_sorted() || s.gains.len() != s.looks.len();
        if let Some(wrong) = searches.iter().find(wrong) {
            return Err(Error::internal(format!("looks at {:?}, {} gains", wrong.looks, wrong.gains.len())));
        }
        let rounds = searches.iter().map(|s| s.looks.len()).max().unwrap_or(0);
        // Behind its last look a search stays where it is.
        let at = |s: &Schedule, round: usize| s.looks[round.min(s.looks.len() - 1)];
        let (mut looks, mut gains, mut most) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..=rounds {
            looks.extend(searches.iter().map(|s| at(s, round)));
            gains.extend(searches.iter().map(|s| s.gains.get(round).copied().unwrap_or(0.0)));
            let before = |s: &Schedule| round.checked_sub(1).map_or(0, |before| at(s, before));
            most.push(searches.iter().map(|s| (at(s, round) - before(s)) as usize).max().unwrap_or(0));
        }
        most.truncate(rounds);
        let judged: Vec<Judged> = searches.iter().map(|s| s.judged).collect();
        Ok(Looks {
            judged: device.copy(&judged)?,
            sighted: device.room(searches.len() * SIGHTED_WORDS)?,
            looks: device.copy(&looks)?,
            gains: device.copy(&gains)?,
            most,
            begins: device.zeros(searches.len())?,
            ends: device.copy(&looks[..searches.len()])?,
            items: device.zeros(searches.len())?,
        })
    }

    /// How many lists a query scans in each round at most.
    pub fn rounds(&self) -> &[usize] {
        &self.most
    }

    /// Looks at what the lists of a round brought.
    ///
    /// # Errors
    /// `Internal` for arrays that are too short, or where the launch fails.
    pub fn look(&self, device: &Device, round: usize, kept: &Kept<'_>, of: &Lookout<'_>) -> Result<()> {
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        struct LookArgs {
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
        need("scores of candidates", kept.keys, queries * kept.room)?;
        if kept.counts.len() != queries || kept.survivors.len() != queries || round >= self.most.len() {
            return Err(Error::internal(format!("round {round} of {}, {queries} searches", self.most.len())));
        }
        let arguments = LookArgs {
            judged: self.judged.address(),
            sighted: self.sighted.address(),
            looks: self.looks.address(),
            gains: self.gains.address(),
            list_keys: of.keys.address(),
            order: of.order.address(),
            lengths: of.lengths.address(),
            vectors: of.vectors.address(),
            margins: of.margins.address(),
            keys: kept.keys.address(),
            counts: kept.counts.address(),
            survivors: kept.survivors.address(),
            begins: self.begins.address(),
            ends: self.ends.address(),
            items: self.items.address(),
            round: round as u32,
            lists: of.lengths.len() as u32,
            stride: of.stride as u32,
            dimension: dimension as u32,
            margin_count: of.margins.len() as u32,
            room: kept.room as u32,
            slope: of.slope,
            unused: 0,
        };
        // The scores of candidates are read three times, for the digits of the last of them.
        let lists_bytes = queries * of.lengths.len() * 8;
        let demand = Demand { again: 2 * kept.bytes as u64, ..Demand::of_bytes(kept.bytes + lists_bytes) };
        let (grid, shared_bytes) = ([queries, 1, 1], SHARED_BYTES);
        launch(device, &Shape { kernel: "look_ahead", grid, threads: 1024, shared_bytes, demand }, &arguments)
    }
}
