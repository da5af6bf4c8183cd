//! Which lists a search probes, in two steps: signs of the centroids leave out most of them, rows of the others choose.
//!
//! Sketch for C = 402 lists of D = 768: int8 centroids are 772 bytes each, 0.31 MB a query. Their signs are 100 bytes each, 40 KB, and
//! about three times as many lists as are probed remain, each a row of half precision: 1.5 KB, of which a probed list needs the product with the
//! query besides, for the scores of its items.
//!
//! Centroids are coded as items are (`signs`), by what they have beside their mean, the same for all lists and so of no account for their order.
//! By how much an estimate is off is known of each: over rotations its standard error is `|q| √((W f² - |r|²) / (W - 1))`. What remains is
//! every list that would be among the P best if its estimate were three standard errors too low; a list is lost where it is further off
//! than that, and then one that scores next to it takes its place. Which lists remain depends on the query and on the centroids alone,
//! so that shards, which share these, choose alike.
//!
//! All of it is made of the centroids when an index is opened.

use half::f16;

use super::coder::Coder;
use super::items::ItemCodes;
use super::rotation::Rotation;
use super::tables::Tables;
use crate::device::cpu::Kernels;
use crate::device::cpu::kernels::{BLOCK, CodeBlocks, LINE, Staging};
use crate::ivf::options::Rescore;
use crate::ivf::survey::fitting;
use crate::topk::key;
use crate::units::{ListId, Slot};

/// From so many dimensions on centroids have codes: of fewer the signs are off by too much to leave out enough lists.
const DIMENSION_MIN: usize = 256;
/// With fewer lists than these all are scored in less time than what comes before the rows takes.
const LISTS_MIN: usize = 64;
/// Standard errors that an estimate may be too low by.
const ERRORS: f32 = 3.0;
/// Lists for each one that is probed from which on signs are scanned: of fewer too many remain.
const LISTS_PER_PROBE_MIN: usize = 6;
/// Lists for each one that remains: a row is read in the time of about two int8 rows.
const LISTS_PER_ROW_MIN: usize = 2;
/// Draws the rotation where that of the items' codes does not serve.
const SEED: u64 = 0x1157;

/// Codes and rows of the centroids.
#[derive(Clone, Debug)]
pub(in crate::ivf) struct CentroidCodes {
    /// What makes a query's tables, where those of the items' codes do not serve.
    coder: Option<Coder>,
    /// `[blocks, W / 32, 16, 4]`, a list a slot.
    codes: Vec<u8>,
    /// `[blocks * 16]`
    factors: Vec<f32>,
    /// What estimates may be too low by for a query of length 1, `[C]`.
    pub(super) slack: Vec<f32>,
    /// `[C, D]`
    rows: Vec<f16>,
    /// Lines of a block.
    lines: usize,
}

/// What a choice of lists needs, kept between calls.
#[derive(Debug, Default)]
pub(in crate::ivf) struct ListRoom {
    tables: Tables,
    scores: Vec<f32>,
    spare: Vec<f32>,
    slots: Vec<u32>,
    /// The P best, best first as keys.
    keys: Vec<u64>,
}

impl ListRoom {
    /// The lists that were chosen last, best first as keys.
    pub(in crate::ivf) fn best(&self) -> &[u64] {
        &self.keys
    }
}

impl CentroidCodes {
    /// Those of `centroids` `[C, D]` beside items of such codes, where vectors are wide and half precision holds the centroids.
    pub(in crate::ivf) fn of(centroids: &[f32], dimension: usize, items: &ItemCodes) -> Option<Self> {
        let lists = centroids.len() / dimension;
        let beyond_half = |row: &[f32]| fitting(row, Rescore::F16) != Rescore::F16;
        if !are_many(lists, dimension) || centroids.chunks_exact(dimension).any(beyond_half) {
            return None;
        }
        let own = match &items.coder {
            Coder::Rabitq(_) => None,
            Coder::Pq4(_) => Some(Coder::Rabitq(Rotation::draw(dimension, SEED))),
        };
        let coder = own.as_ref().unwrap_or(&items.coder);
        let mean = mean(centroids, dimension);
        let row = |list: usize| &centroids[list * dimension..(list + 1) * dimension];
        let (codes, factors) =
            coder.coded(lists.next_multiple_of(BLOCK), |slot| (slot < lists).then(|| (row(slot), &mean[..])));
        let width = Rotation::width_of(dimension) as f64;
        let slack = |list: usize| {
            let length: f64 = row(list).iter().zip(&mean).map(|(x, m)| f64::from(x - m).powi(2)).sum();
            let variance = (width * f64::from(factors[list]).powi(2) - length) / (width - 1.0);
            ERRORS * variance.max(0.0).sqrt() as f32
        };
        Some(CentroidCodes {
            slack: (0..lists).map(slack).collect(),
            rows: centroids.iter().map(|&x| f16::from_f32(x)).collect(),
            lines: coder.block_bytes() / LINE,
            coder: own,
            codes,
            factors,
        })
    }

    /// Whether it may choose so many lists.
    pub(in crate::ivf) fn chooses(&self, probes: usize) -> bool {
        probes * LISTS_PER_PROBE_MIN <= self.lists()
    }

    /// Chooses the `probes` best lists of `vector`, given its tables for the items' codes; false where too many remain to be read one by one.
    pub(in crate::ivf) fn choose(
        &self,
        kernels: Kernels,
        (vector, tables): (&[f32], &Tables),
        probes: usize,
        room: &mut ListRoom,
    ) -> bool {
        let ListRoom { tables: own, scores, spare, slots, keys } = room;
        let tables = match &self.coder {
            None => tables,
            Some(coder) => {
                own.set(coder, vector);
                own
            }
        };
        self.estimate(kernels, tables, scores, slots);
        let lists = self.lists();
        spare.clear();
        spare.extend_from_slice(&scores[..lists]);
        let least = kernels.kth(spare, probes);
        let length = kernels.dot_f32(vector, vector).sqrt();
        let mut left = 0;
        for (list, (score, slack)) in scores.iter().zip(&self.slack).enumerate() {
            slots[left] = list as u32;
            left += usize::from(score + slack * length >= least);
        }
        debug_assert!(left >= probes);
        if left * LISTS_PER_ROW_MIN > lists {
            return false;
        }
        let (products, left) = (&mut scores[..left], &slots[..left]);
        kernels.dots_f16(vector, &self.rows, left, products);
        keys.clear();
        keys.extend(products.iter().zip(left).map(|(&score, &list)| key(score, Slot(list))));
        if probes < keys.len() {
            keys.select_nth_unstable_by(probes, |a, b| b.cmp(a));
            keys.truncate(probes);
        }
        keys.sort_unstable_by(|a, b| b.cmp(a));
        true
    }

    /// Estimates the product of a query, whose tables these are, with what each centroid has beside their mean.
    pub(super) fn estimate(&self, kernels: Kernels, tables: &Tables, scores: &mut Vec<f32>, slots: &mut Vec<u32>) {
        let room = self.factors.len() + BLOCK;
        scores.resize(room, 0.0);
        slots.resize(room, 0);
        let mut staging = Staging { scores, slots, len: 0 };
        kernels.scan_codes(&self.blocks(), &tables.of_list(0.0), f32::NEG_INFINITY, 0, &mut staging);
    }

    /// The row of a list's centroid.
    pub(in crate::ivf) fn row(&self, list: ListId) -> &[f16] {
        let dimension = self.rows.len() / self.lists();
        &self.rows[list.index() * dimension..][..dimension]
    }

    /// Bytes that so many centroids take which half precision holds.
    pub(in crate::ivf) fn bytes_of(lists: usize, dimension: usize) -> usize {
        let slot = Rotation::width_of(dimension) / 8 + size_of::<f32>();
        let list = size_of::<f32>() + dimension * size_of::<f16>();
        if are_many(lists, dimension) { lists.next_multiple_of(BLOCK) * slot + lists * list } else { 0 }
    }

    /// Bytes that it takes.
    pub(in crate::ivf) fn bytes(&self) -> usize {
        self.codes.len() + size_of_val(&self.factors[..]) + size_of_val(&self.slack[..]) + size_of_val(&self.rows[..])
    }

    fn lists(&self) -> usize {
        self.slack.len()
    }

    fn blocks(&self) -> CodeBlocks<'_> {
        CodeBlocks {
            codes: &self.codes,
            factors: &self.factors,
            lines: self.lines,
            items: self.lists(),
            first_slot: 0,
            words: &[],
            next: &[],
        }
    }
}

/// Whether so many centroids are chosen from in two steps.
fn are_many(lists: usize, dimension: usize) -> bool {
    dimension >= DIMENSION_MIN && lists >= LISTS_MIN
}

/// The mean of the rows of a matrix.
fn mean(rows: &[f32], dimension: usize) -> Vec<f32> {
    let mut sums = vec![0f64; dimension];
    for row in rows.chunks_exact(dimension) {
        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x));
    }
    let count = (rows.len() / dimension) as f64;
    sums.into_iter().map(|sum| (sum / count) as f32).collect()
}
