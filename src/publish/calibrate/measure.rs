//! Measuring how many lists a recall takes, and when a filtered search may end.
//!
//! For each query and pass rate every list is scanned once: where the true best lie in the order of the query's lists tells
//! the recall of every number of probes at the same time, and what a filtered search would have expected ahead of it whenever
//! it had looked (`tally`). The truth is what a search of all lists finds, rescored, so that what is measured is the probing.
//! Items of a pass rate are drawn by a hash of their slots.

use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use super::depth::{Depths, PASS_RATE_MIN, SELECTED_MAX, ScanTimes};
use super::queries::Queries;
use super::share::{PASS_RATES, Share, random};
use super::tally::{Choices, Tally, Walk, curves, tallies};
use crate::device::priority::breathe;
use crate::ivf::{self, Ahead, Margins, Probing, WideRows, Words};
use crate::snapshot::{Calibration, TARGETS};
use crate::topk::{Selector, unkey};
use crate::units::{ListId, Slot};

/// So many draws of the items of a share take turns, so that none of them alone decides.
const DRAWS: u64 = 8;
/// Items of which a query tells how far they score above their lists.
const MARGINS: usize = 4096;

/// A query, and the item that it was made of.
type Asked<'a> = (&'a Vec<f32>, Option<Slot>);

/// Measures an index, on all cores. `progress` is told how many of how many queries are done.
pub fn measure(
    index: &ivf::Index,
    queries: &Queries,
    seed: u64,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Calibration {
    let draw = |pass_rate| (0..DRAWS).into_par_iter().map(move |n| Share::draw(index, pass_rate, random(seed, n)));
    let shares: Vec<Vec<Share>> = PASS_RATES.iter().map(|&pass_rate| draw(pass_rate).collect()).collect();
    let asked: Vec<_> = queries.vectors.iter().zip(queries.made_of.iter().copied()).enumerate().collect();
    let total = asked.len();
    progress(0, total);
    let margins = margins(index, &queries.vectors, seed);
    let done = AtomicUsize::new(0);
    let part = |asked: &[(usize, Asked<'_>)]| {
        let (mut tallies, mut searcher) = (tallies(index.lists(), &shares), Searcher::default());
        let mut depths = depths(index, &tallies);
        for (n, (query, made_of)) in asked {
            let shares: Vec<&Share> = shares.iter().map(|draws| &draws[n % draws.len()]).collect();
            let asked = Searched { index, query, made_of: *made_of, margins: &margins };
            searcher.add(&asked, &shares, &mut tallies, &mut depths);
            progress(done.fetch_add(1, Ordering::Relaxed) + 1, total);
        }
        (tallies, depths)
    };
    let each = total.div_ceil(rayon::current_num_threads()).max(1);
    let parts: Vec<(Vec<Tally>, Vec<Depths>)> = asked.par_chunks(each).map(part).collect();
    let sum = |mut sum: (Vec<Tally>, Vec<Depths>), part: (Vec<Tally>, Vec<Depths>)| {
        sum.0.iter_mut().zip(part.0).for_each(|(sum, part)| sum.add(part));
        sum.1.iter_mut().zip(&part.1).for_each(|(sum, part)| sum.add(part));
        sum
    };
    let (tallies, depths) = parts.into_iter().reduce(sum).unwrap_or_default();
    let times: Vec<ScanTimes> = PASS_RATES.iter().map(|&pass_rate| ScanTimes::of(index, pass_rate)).collect();
    let choices = Choices { depths: &depths, times: &times, rows: index.rows() };
    let curves = curves(&tallies, total, &choices);
    Calibration { source: queries.source.clone(), queries: total, targets: TARGETS.to_vec(), margins, curves }
}

/// An empty measurement of what codes select for each number of candidates of large shares, where there are codes.
fn depths(index: &ivf::Index, tallies: &[Tally]) -> Vec<Depths> {
    let coded = tallies.iter().filter(|tally| PASS_RATES[tally.share] >= PASS_RATE_MIN && index.has_first_pass());
    coded.map(|tally| Depths::of(tally.share, tally.k)).collect()
}

/// How far items score above their lists, by a sample of them for each query.
fn margins(index: &ivf::Index, queries: &[Vec<f32>], seed: u64) -> Margins {
    let slots: Vec<Slot> = index.filled_slots().collect();
    let of_query = |(n, query): (usize, &Vec<f32>)| {
        let (mut scratch, mut scores) = (ivf::Scratch::default(), vec![0.0; index.lists()]);
        index.probe(query, index.lists(), &mut scratch).for_each(|(list, score)| scores[list.index()] = score);
        let length = query.iter().map(|x| x * x).sum::<f32>().sqrt().max(f32::MIN_POSITIVE);
        let mut drawn: Vec<u32> = (0..MARGINS as u64)
            .map(|m| slots[random(seed, n as u64 * MARGINS as u64 + m) as usize % slots.len()].0)
            .collect();
        drawn.sort_unstable();
        let mut products = vec![0.0; drawn.len()];
        index.products(query, &drawn, &mut products);
        breathe();
        let pair =
            |(slot, product): (&u32, &f32)| (scores[index.list_of(Slot(*slot)).index()] / length, product / length);
        drawn.iter().zip(&products).map(pair).collect::<Vec<_>>()
    };
    Margins::of(&queries.par_iter().enumerate().flat_map_iter(of_query).collect::<Vec<_>>())
}

/// A query that is measured.
struct Searched<'a> {
    index: &'a ivf::Index,
    query: &'a [f32],
    made_of: Option<Slot>,
    margins: &'a Margins,
}

/// The memory of one thread.
#[derive(Default)]
struct Searcher {
    scratch: ivf::Scratch,
    selector: Selector,
    /// All lists and their scores, best first.
    order: Vec<(ListId, f32)>,
    slots: Vec<u32>,
    products: Vec<f32>,
    best: Vec<(f32, u32)>,
    /// Slots with their places in the order by codes.
    placed: Vec<(u32, u32)>,
    /// The places of the best in that order.
    places: Vec<Option<u32>>,
    /// Of the best, those in each list, `[C]`.
    hits: Vec<u32>,
    ahead: Ahead,
}

impl Searcher {
    fn add(&mut self, asked: &Searched<'_>, shares: &[&Share], tallies: &mut [Tally], depths: &mut [Depths]) {
        let Searched { index, query, .. } = *asked;
        self.order.clear();
        self.order.extend(index.probe(query, index.lists(), &mut self.scratch));
        for (n, share) in shares.iter().enumerate() {
            let of_share = |tally: &&mut Tally| tally.share == n;
            let Some(most) = tallies.iter_mut().filter(of_share).map(|t| t.k).max() else { continue };
            self.find(asked, share, most);
            breathe();
            let mut measured = depths.iter_mut().filter(|depths| depths.share == n).peekable();
            if measured.peek().is_some() {
                self.place(asked, share);
                measured.for_each(|depths| depths.place(&self.places));
            }
            for tally in tallies.iter_mut().filter(of_share) {
                self.hits.clear();
                self.hits.resize(index.lists(), 0);
                self.best.iter().take(tally.k).for_each(|(_, slot)| self.hits[index.list_of(Slot(*slot)).index()] += 1);
                let lengths = index.list_lengths();
                self.ahead.begin(query, self.order.iter().map(|(list, score)| (*score, lengths[list.index()])));
                let threshold = self.best.get(tally.k - 1).map_or(f32::MIN, |(score, _)| *score);
                let walk = Walk { order: &self.order, lengths, hits: &self.hits, margins: asked.margins, threshold };
                tally.walk(&walk, share, &mut self.ahead);
                breathe();
            }
        }
    }

    /// Where the true best of a share lie in its order by codes.
    fn place(&mut self, asked: &Searched<'_>, share: &Share) {
        let Searched { index, query, made_of, .. } = *asked;
        self.selector.reset(SELECTED_MAX + 1);
        let probing = Probing { by_codes: true, ..Probing::of(index.lists(), index.lists()) };
        let mut fill = |list: ListId, out: &mut [u64]| out.copy_from_slice(share.words_of(list));
        let words: Option<Words<'_>> = if share.words.is_empty() { None } else { Some(&mut fill) };
        index.search(query, probing, words, &mut self.selector, SELECTED_MAX, &mut self.scratch);
        let by_codes = self.selector.finish().iter().map(|&key| unkey(key).1).filter(|slot| Some(*slot) != made_of);
        self.placed.clear();
        self.placed.extend((0..).zip(by_codes).map(|(place, slot)| (slot.0, place)));
        self.placed.sort_unstable();
        let place = |slot: u32| {
            let at = self.placed.binary_search_by_key(&slot, |(slot, _)| *slot).ok()?;
            Some(self.placed[at].1)
        };
        self.places.clear();
        self.places.extend(self.best.iter().take(SELECTED_MAX).map(|(_, slot)| place(*slot)));
    }

    /// The best `k` items of the share, best first.
    fn find(&mut self, asked: &Searched<'_>, share: &Share, k: usize) {
        let Searched { index, query, made_of, .. } = *asked;
        let room = k + 1 + k / 4 + 64;
        self.selector.reset(room);
        let probing = Probing::of(index.lists(), index.lists());
        let mut fill = |list: ListId, out: &mut [u64]| out.copy_from_slice(share.words_of(list));
        let words: Option<Words<'_>> = if share.words.is_empty() { None } else { Some(&mut fill) };
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
}
