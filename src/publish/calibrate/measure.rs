//! Measuring how many lists a recall takes, and when a filtered search may end.
//!
//! For each query and pass rate every list is scanned once (`find`): where the true best lie in the order of the query's lists tells
//! the recall of every number of probes at the same time, and what a filtered search would have expected ahead of it whenever
//! it had looked (`tally`). The truth is what a search of all lists finds, rescored, so that what is measured is the probing.
//! Items of a pass rate are drawn by a hash of their slots.

use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use super::depth::{Depths, SELECTED_MAX, ScanTimes};
use super::find::{Finder, FoundIn, Scored, drawn, is_coded, sample, selected};
use super::measured::{Layout, Measured};
use super::queries::Queries;
use super::share::{PASS_RATES, Passing, Share, random};
use super::tally::{Choices, Tally, Walk, curves, tallies};
use crate::device::priority::breathe;
use crate::ivf::{self, Ahead, Margins, WideRows};
use crate::snapshot::{Calibration, TARGETS};
use crate::units::ListId;

/// So many draws of the items of a share take turns, so that none of them alone decides.
pub(super) const DRAWS: u64 = 8;

/// Measures an index, on all cores. `progress` is told how many of how many queries are done.
pub fn measure(
    index: &ivf::Index,
    queries: &Queries,
    seed: u64,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Calibration {
    let measured = Measured::whole(index);
    let shares = shares(&measured, seed);
    let passing: Vec<Vec<Passing>> =
        shares.iter().map(|draws| draws.iter().map(|share| share.passing.clone()).collect()).collect();
    let samples = samples(&measured, &queries.vectors, seed);
    let counting = Counting::of(index, measured.whole, passing, &queries.vectors, &samples);
    let finder = || {
        let mut finder = Finder::default();
        let (shares, measured, k) = (&shares, &measured, &counting.k);
        move |n: usize, found: &mut [FoundIn]| {
            finder.find(measured, &queries.vectors[n], (&of_query(shares, n), k), found);
        }
    };
    counting.calibration(queries, finder, progress)
}

/// The draws of each pass rate.
pub(super) fn shares(measured: &Measured<'_>, seed: u64) -> Vec<Vec<Share>> {
    let draw = |pass_rate| {
        (0..DRAWS).into_par_iter().map(move |n| Share::draw(measured, pass_rate, random(seed, n))).collect()
    };
    PASS_RATES.into_iter().map(draw).collect()
}

/// Of the draws of each pass rate the one that the `n`-th query gets.
pub(super) fn of_query<T>(draws: &[Vec<T>], n: usize) -> Vec<&T> {
    draws.iter().map(|draws| &draws[n % draws.len()]).collect()
}

/// Items that tell how far they score above their lists, of each query.
pub(super) fn samples(measured: &Measured<'_>, queries: &[Vec<f32>], seed: u64) -> Vec<Vec<(u32, f32)>> {
    let filled = measured.whole.filled();
    let of_query = |(n, query): (usize, &Vec<f32>)| sample(measured, &drawn(&filled, seed, n), query);
    queries.par_iter().enumerate().map(of_query).collect()
}

/// How far items score above their lists, by a sample of them for each query.
fn margins(index: &ivf::Index, layout: Layout<'_>, queries: &[Vec<f32>], samples: &[Vec<(u32, f32)>]) -> Margins {
    let of_query = |(query, sample): (&Vec<f32>, &Vec<(u32, f32)>)| {
        let (mut scratch, mut scores) = (ivf::Scratch::default(), vec![0.0; index.lists()]);
        index.probe(query, index.lists(), &mut scratch).for_each(|(list, score)| scores[list.index()] = score);
        let length = query.iter().map(|x| x * x).sum::<f32>().sqrt().max(f32::MIN_POSITIVE);
        let pair = |&(place, product): &(u32, f32)| (scores[layout.list_of(place).index()] / length, product / length);
        sample.iter().map(pair).collect::<Vec<_>>()
    };
    Margins::of(&queries.par_iter().zip(samples).flat_map_iter(of_query).collect::<Vec<_>>())
}

/// What is counted of everything that queries find.
pub(super) struct Counting<'a> {
    /// The centroids, and what rows are like: an index, or any shard of it.
    index: &'a ivf::Index,
    layout: Layout<'a>,
    passing: Vec<Vec<Passing>>,
    margins: Margins,
    /// The most candidates that are measured of each share; 0 of those that are not.
    pub(super) k: Vec<usize>,
}

impl<'a> Counting<'a> {
    /// Nothing was counted yet.
    pub(super) fn of(
        index: &'a ivf::Index,
        layout: Layout<'a>,
        passing: Vec<Vec<Passing>>,
        queries: &[Vec<f32>],
        samples: &[Vec<(u32, f32)>],
    ) -> Self {
        let margins = margins(index, layout, queries, samples);
        let tallies = tallies(layout.lists(), &passing);
        let most = |n| tallies.iter().filter(|tally| tally.share == n).map(|tally| tally.k).max().unwrap_or(0);
        let k = (0..PASS_RATES.len()).map(most).collect();
        Counting { index, layout, passing, margins, k }
    }

    /// Counts what all queries find, each thread by a finder of its own, which is told the number of a query.
    pub(super) fn calibration<F: FnMut(usize, &mut [FoundIn])>(
        &self,
        queries: &Queries,
        finder: impl Fn() -> F + Sync,
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Calibration {
        let total = queries.vectors.len();
        progress(0, total);
        let done = AtomicUsize::new(0);
        let asked: Vec<usize> = (0..total).collect();
        let part = |asked: &[usize]| {
            let (mut find, mut found) = (finder(), vec![FoundIn::default(); PASS_RATES.len()]);
            let mut tallies = tallies(self.layout.lists(), &self.passing);
            let (mut counter, mut depths) = (Counter::default(), self.depths(&tallies));
            for &n in asked {
                find(n, &mut found);
                let made_of = queries.made_of[n];
                counter.add(self, (n, &queries.vectors[n], made_of), &found, &mut tallies, &mut depths);
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
        let slots = self.layout.slots();
        let times: Vec<ScanTimes> =
            PASS_RATES.iter().map(|&pass_rate| ScanTimes::of(self.index, slots, pass_rate)).collect();
        let choices = Choices { depths: &depths, times: &times, rows: self.index.rows() };
        let curves = curves(&tallies, total, &choices);
        let margins = self.margins.clone();
        Calibration { source: queries.source.clone(), queries: total, targets: TARGETS.to_vec(), margins, curves }
    }

    /// An empty measurement of what codes select for each number of candidates of large shares, where there are codes.
    fn depths(&self, tallies: &[Tally]) -> Vec<Depths> {
        let coded = tallies.iter().filter(|tally| is_coded(tally.share) && self.index.has_first_pass());
        coded.map(|tally| Depths::of(tally.share, tally.k)).collect()
    }
}

/// The memory of one thread.
#[derive(Default)]
struct Counter {
    scratch: ivf::Scratch,
    /// All lists and their scores, best first.
    order: Vec<(ListId, f32)>,
    best: Vec<Scored>,
    /// Slots with their places in the order by codes.
    placed: Vec<(u32, u32)>,
    /// The places of the best in that order.
    places: Vec<Option<u32>>,
    /// Of the best, those in each list, `[C]`.
    hits: Vec<u32>,
    ahead: Ahead,
}

impl Counter {
    /// Counts what the `n`-th query found, which was made of an item or of none.
    fn add(
        &mut self,
        counting: &Counting<'_>,
        (n, query, made_of): (usize, &[f32], Option<u32>),
        found: &[FoundIn],
        tallies: &mut [Tally],
        depths: &mut [Depths],
    ) {
        let Counting { index, layout, .. } = *counting;
        self.order.clear();
        self.order.extend(index.probe(query, index.lists(), &mut self.scratch));
        let passing = of_query(&counting.passing, n);
        for (share, passing) in passing.into_iter().enumerate().filter(|(share, _)| counting.k[*share] > 0) {
            self.rank(&found[share].best, made_of, (index.rows(), counting.k[share]));
            let mut measured = depths.iter_mut().filter(|depths| depths.share == share).peekable();
            if measured.peek().is_some() {
                self.place(&found[share].coded, made_of);
                measured.for_each(|depths| depths.place(&self.places));
            }
            for tally in tallies.iter_mut().filter(|tally| tally.share == share) {
                self.hits.clear();
                self.hits.resize(layout.lists(), 0);
                let lists = self.best.iter().take(tally.k).map(|scored| layout.list_of(scored.place));
                lists.for_each(|list| self.hits[list.index()] += 1);
                let lengths = layout.lengths;
                self.ahead.begin(query, self.order.iter().map(|(list, score)| (*score, lengths[list.index()])));
                let threshold = self.best.get(tally.k - 1).map_or(f32::MIN, |scored| scored.row);
                let margins = &counting.margins;
                let walk = Walk { order: &self.order, lengths, hits: &self.hits, margins, threshold };
                tally.walk(&walk, passing, &mut self.ahead);
                breathe();
            }
        }
    }

    /// The best of what was found by their rows, where there are any.
    fn rank(&mut self, found: &[Scored], made_of: Option<u32>, (rows, k): (&WideRows, usize)) {
        debug_assert!(found.len() <= selected(k));
        self.best.clear();
        self.best.extend(found.iter().filter(|scored| Some(scored.place) != made_of));
        if !matches!(rows, WideRows::None) {
            self.best.sort_unstable_by(|a, b| b.row.total_cmp(&a.row).then(a.place.cmp(&b.place)));
        }
        self.best.truncate(k);
    }

    /// Where the true best of a share lie in its order by codes.
    fn place(&mut self, coded: &[Scored], made_of: Option<u32>) {
        let by_codes = coded.iter().map(|scored| scored.place).filter(|place| Some(*place) != made_of);
        self.placed.clear();
        self.placed.extend((0..).zip(by_codes).map(|(rank, place)| (place, rank)));
        self.placed.sort_unstable();
        let rank = |place: u32| {
            let at = self.placed.binary_search_by_key(&place, |(place, _)| *place).ok()?;
            Some(self.placed[at].1)
        };
        self.places.clear();
        self.places.extend(self.best.iter().take(SELECTED_MAX).map(|scored| rank(scored.place)));
    }
}
