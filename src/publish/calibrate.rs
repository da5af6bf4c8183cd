//! Measuring how many lists a recall takes.
//!
//! For each query and pass rate every list is scanned once: where the true best lie in the order of the query's lists tells
//! the recall of every number of probes at the same time. The truth is what a search of all lists finds, rescored, so that
//! what is measured is the probing. Items of a pass rate are drawn by a hash of their slots.

use std::ops::Range;

use rayon::prelude::*;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::request::{Progress, Stage};
use crate::ivf::{Index, Probing, Scratch, WideRows};
use crate::snapshot::{Calibration, Curve, TARGETS};
use crate::topk::{Selector, unkey};
use crate::units::{ListId, Slot};

/// Numbers of candidates that are measured.
const CANDIDATES: [usize; 4] = [10, 100, 1000, 10_000];
/// Shares of the items.
const PASS_RATES: [f64; 5] = [1.0, 0.5, 0.1, 0.01, 0.001];
/// So many draws of the items of a share take turns, so that none of them alone decides.
const DRAWS: u64 = 8;
/// Most queries, and the fewest that items are so many that scans are dear.
const QUERIES: Range<usize> = 64..256;
/// Multiplications that all scans together may take, unless that leaves too few queries: some seconds of one core.
const PRODUCTS_MAX: usize = 1 << 37;
/// Length of what is added to an item that becomes a query, as a share of the item's.
const PERTURBED_BY: f32 = 0.1;
/// The normal deviation that 95 % lie below.
const ONE_SIDED: f64 = 1.645;

/// Queries to measure with.
pub(super) struct Queries {
    /// Where they came from.
    pub(super) source: String,
    /// `[Q, D]`
    pub(super) vectors: Vec<Vec<f32>>,
    /// The item that each was made of, which is no answer to it, or none.
    pub(super) made_of: Vec<Option<Slot>>,
}

/// A query, and the item that it was made of.
type Asked<'a> = (&'a Vec<f32>, Option<Slot>);

/// Items of a pass rate.
struct Share {
    /// Bits of the items, list after list; empty where all pass.
    words: Vec<u64>,
    /// `[C + 1]`: where the words of each list begin.
    offsets: Vec<usize>,
    /// Lists that hold some of them, `[C]`.
    holds: Vec<bool>,
    items: usize,
}

/// What the queries of a curve found, summed so that no order of them changes it.
struct Tally {
    share: usize,
    k: usize,
    /// `[C]`: of the true best, those in the first so many lists; and the squares.
    hits: Vec<u64>,
    squares: Vec<u64>,
}

/// Most queries that are worth their time for such an index.
pub(super) fn queries_for(index: &Index) -> usize {
    let scans = index.slots() * index.dimension() * PASS_RATES.len();
    (PRODUCTS_MAX / scans.max(1)).clamp(QUERIES.start, QUERIES.end).min(index.items())
}

/// Items that become queries by something random that is added to them.
pub(super) fn perturbed_items(index: &Index, seed: u64) -> Queries {
    let slots: Vec<Slot> = occupied(index);
    let drawn = (0..queries_for(index) as u64).map(|n| slots[random(seed, n) as usize % slots.len()]);
    let mut queries = Queries { source: "perturbed items".into(), vectors: Vec::new(), made_of: Vec::new() };
    for slot in drawn {
        let mut row = vec![0.0; index.dimension()];
        index.row(slot, &mut row);
        let noise: Vec<f32> = (0..row.len() as u64).map(|n| bell(random(seed ^ u64::from(slot.0) << 24, n))).collect();
        let length = |x: &[f32]| x.iter().map(|x| x * x).sum::<f32>().sqrt();
        let scale = PERTURBED_BY * length(&row) / length(&noise).max(f32::MIN_POSITIVE);
        let scale = if scale.is_finite() { scale } else { 0.0 };
        row.iter_mut().zip(&noise).for_each(|(x, noise)| *x += noise * scale);
        queries.vectors.push(row);
        queries.made_of.push(Some(slot));
    }
    queries
}

/// Measures an index, on all cores.
pub(super) fn measure(index: &Index, queries: Queries, seed: u64, progress: &Progress<'_>) -> Calibration {
    let draw = |pass_rate| (0..DRAWS).into_par_iter().map(move |n| Share::draw(index, pass_rate, random(seed, n)));
    let shares: Vec<Vec<Share>> = PASS_RATES.iter().map(|&pass_rate| draw(pass_rate).collect()).collect();
    let asked: Vec<_> = queries.vectors.iter().zip(queries.made_of).enumerate().collect();
    let total = asked.len();
    progress(Stage::Calibrating, 0, total);
    let done = std::sync::atomic::AtomicUsize::new(0);
    let part = |asked: &[(usize, Asked<'_>)]| {
        let (mut tallies, mut searcher) = (tallies(index, &shares), Searcher::default());
        for (n, (query, made_of)) in asked {
            let shares: Vec<&Share> = shares.iter().map(|draws| &draws[n % draws.len()]).collect();
            searcher.add(index, query, *made_of, &shares, &mut tallies);
            progress(Stage::Calibrating, done.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1, total);
        }
        tallies
    };
    let each = total.div_ceil(rayon::current_num_threads()).max(1);
    let parts: Vec<Vec<Tally>> = asked.par_chunks(each).map(part).collect();
    let sum = |mut sum: Vec<Tally>, part: Vec<Tally>| {
        sum.iter_mut().zip(part).for_each(|(sum, part)| sum.add(&part));
        sum
    };
    let tallies = parts.into_iter().reduce(sum).unwrap_or_default();
    let curves = curves(&tallies, total);
    Calibration { source: queries.source, queries: total, targets: TARGETS.to_vec(), curves }
}

fn occupied(index: &Index) -> Vec<Slot> {
    let first = index.list_offsets().iter().zip(index.list_lengths());
    first.flat_map(|(&first, &length)| (first..first + length).map(Slot)).collect()
}

fn random(seed: u64, n: u64) -> u64 {
    xxh3_64_with_seed(&n.to_le_bytes(), seed)
}

/// About normal, from the four quarters of a random number.
fn bell(random: u64) -> f32 {
    (0..4).map(|n| (random >> (n * 16) & 0xffff) as f32 / 65_536.0).sum::<f32>() - 2.0
}

impl Share {
    fn draw(index: &Index, pass_rate: f64, seed: u64) -> Self {
        let lists = index.lists();
        let mut share = Share { words: Vec::new(), offsets: vec![0], holds: vec![true; lists], items: index.items() };
        if pass_rate >= 1.0 {
            return share;
        }
        share.items = 0;
        for list in 0..lists {
            let (first, end) = (index.list_offsets()[list], index.list_offsets()[list + 1]);
            let at = share.words.len();
            share.words.resize(at + ((end - first) as usize).div_ceil(64), 0);
            let before = share.items;
            for n in 0..index.list_lengths()[list] {
                if (random(seed, u64::from(first + n)) as f64) < pass_rate * u64::MAX as f64 {
                    share.words[at + n as usize / 64] |= 1 << (n % 64);
                    share.items += 1;
                }
            }
            share.holds[list] = share.items > before;
            share.offsets.push(share.words.len());
        }
        share
    }
}

/// An empty tally of each curve: where no more items pass than are wanted there is nothing to choose.
fn tallies(index: &Index, shares: &[Vec<Share>]) -> Vec<Tally> {
    let empty = || vec![0; index.lists()];
    let tally = |k| {
        let enough = shares.iter().enumerate().filter(move |(_, draws)| draws.iter().all(|share| share.items > k));
        enough.map(move |(share, _)| Tally { share, k, hits: empty(), squares: empty() })
    };
    CANDIDATES.into_iter().flat_map(tally).collect()
}

impl Tally {
    fn add(&mut self, other: &Tally) {
        self.hits.iter_mut().zip(&other.hits).for_each(|(sum, n)| *sum += n);
        self.squares.iter_mut().zip(&other.squares).for_each(|(sum, n)| *sum += n);
    }

    /// The mean recall after so many lists, and what it is above with 95 % confidence.
    fn recall(&self, probes: usize, queries: usize) -> (f64, f64) {
        let (queries, k) = (queries as f64, self.k as f64);
        let mean = self.hits[probes - 1] as f64 / (queries * k);
        let variance = (self.squares[probes - 1] as f64 / (queries * k * k) - mean * mean).max(0.0);
        (mean, (mean - ONE_SIDED * (variance / (queries - 1.0).max(1.0)).sqrt()).max(0.0))
    }
}

/// The curves of tallies, none of which takes fewer lists than one of fewer candidates or more survivors.
fn curves(tallies: &[Tally], queries: usize) -> Vec<Curve> {
    let mut curves: Vec<Curve> = Vec::new();
    for tally in tallies {
        let pass_rate = PASS_RATES[tally.share];
        let below = |c: &&Curve| c.k <= tally.k && c.pass_rate >= pass_rate;
        let points = TARGETS.iter().enumerate().map(|(n, target)| {
            let least = curves.iter().filter(below).map(|c| c.probes[n]).max().unwrap_or(1);
            let reaches = |probes: &usize| tally.recall(*probes, queries).1 >= *target;
            let probes = (least..=tally.hits.len()).find(reaches).unwrap_or(tally.hits.len());
            (probes, tally.recall(probes, queries))
        });
        let points: Vec<_> = points.collect();
        let digits = |x: f64| (x * 1e5).floor() / 1e5;
        curves.push(Curve {
            k: tally.k,
            pass_rate,
            probes: points.iter().map(|(probes, _)| *probes).collect(),
            recall: points.iter().map(|(_, (recall, _))| digits(*recall)).collect(),
            low: points.iter().map(|(_, (_, low))| digits(*low)).collect(),
        });
    }
    curves
}

/// The memory of one thread.
#[derive(Default)]
struct Searcher {
    scratch: Scratch,
    selector: Selector,
    /// The place of each list in the order of the query's, counted among those that hold something.
    places: Vec<u32>,
    order: Vec<u32>,
    slots: Vec<u32>,
    products: Vec<f32>,
    best: Vec<(f32, u32)>,
    counts: Vec<u64>,
}

impl Searcher {
    fn add(&mut self, index: &Index, query: &[f32], made_of: Option<Slot>, shares: &[&Share], tallies: &mut [Tally]) {
        let order = index.probe(query, index.lists(), &mut self.scratch).map(|(list, _)| list.0);
        self.order.clear();
        self.order.extend(order);
        for (n, share) in shares.iter().enumerate() {
            let of_share = |tally: &&mut Tally| tally.share == n;
            let Some(most) = tallies.iter_mut().filter(of_share).map(|t| t.k).max() else { continue };
            self.find(index, query, made_of, share, most);
            self.place(share);
            for tally in tallies.iter_mut().filter(of_share) {
                self.count(index, tally);
            }
        }
    }

    /// The best `k` items of the share, best first.
    fn find(&mut self, index: &Index, query: &[f32], made_of: Option<Slot>, share: &Share, k: usize) {
        let room = k + 1 + k / 4 + 64;
        self.selector.reset(room);
        let probing = Probing::of(index.lists(), index.lists());
        let mut fill = |list: ListId, out: &mut [u64]| {
            out.copy_from_slice(&share.words[share.offsets[list.index()]..share.offsets[list.index() + 1]]);
        };
        let words: Option<crate::ivf::Words<'_>> = if share.words.is_empty() { None } else { Some(&mut fill) };
        index.search(query, probing, words, &mut self.selector, room, &mut self.scratch);
        self.best.clear();
        self.best.extend(self.selector.finish().iter().map(|&key| unkey(key)).map(|(score, slot)| (score, slot.0)));
        self.best.retain(|(_, slot)| Some(Slot(*slot)) != made_of);
        if !matches!(index.rows(), WideRows::None) {
            self.slots.clear();
            self.slots.extend(self.best.iter().map(|(_, slot)| *slot));
            self.products.resize(self.slots.len(), 0.0);
            index.products(query, &self.slots, &mut self.products);
            self.best.iter_mut().zip(&self.products).for_each(|((score, _), product)| *score = *product);
            self.best.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        }
        self.best.truncate(k);
    }

    fn place(&mut self, share: &Share) {
        self.places.resize(self.order.len(), 0);
        let mut place = 0;
        for &list in &self.order {
            self.places[list as usize] = place;
            place += u32::from(share.holds[list as usize]);
        }
    }

    fn count(&mut self, index: &Index, tally: &mut Tally) {
        self.counts.clear();
        self.counts.resize(self.order.len(), 0);
        for (_, slot) in self.best.iter().take(tally.k) {
            let list = index.list_offsets().partition_point(|first| first <= slot) - 1;
            self.counts[self.places[list] as usize] += 1;
        }
        let mut found = 0;
        let sums = tally.hits.iter_mut().zip(&mut tally.squares);
        for (count, (hits, squares)) in self.counts.iter().zip(sums) {
            found += count;
            *hits += found;
            *squares += found * found;
        }
    }
}
