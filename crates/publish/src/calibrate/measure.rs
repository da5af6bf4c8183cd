//! Measures the number of lists per recall, and the condition under which a filtered search may end.
//!
//! For each query and pass rate every list is scanned once (`find`). The lists that hold the true best items, in the query's order
//! of lists, give the recall for every number of probes at once, and the expected number of best items in unscanned lists at every
//! possible check (`tally`). The ground truth is the best items by the most precise stored rows; the loss by selecting with int8
//! rows and codes is measured separately (`depth`). The items of a pass rate are sampled by a hash of their slots.

use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use super::depth::{AllDepths, Depths, ScanTimes};
use super::find::{Finder, FoundIn, Scored, TOGETHER, drawn, is_coded, sample, selected};
use super::measured::{Layout, Measured};
use super::queries::{Group, Queries};
use super::share::{PASS_RATES, Passing, Share, of_query, random};
use super::tally::{Choices, QueryPath, Tally, curves, tallies};
use sterling_core::units::ListId;
use sterling_index::ivf::{self, ResidualQuantiles, UnscannedLists, WideRows};
use sterling_kernels::priority::breathe;
use sterling_snapshot::{Calibration, TARGETS};

/// Number of random item sets per pass rate, used in rotation so that no single set dominates.
pub(super) const DRAWS: u64 = 8;

/// Measures an index on all cores. `progress` receives the number of finished queries and the number of all queries.
pub fn measure(
    index: &ivf::Index,
    queries: &Queries,
    seed: u64,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Calibration {
    let measured = Measured::whole(index);
    let queries = &queries.with_ood_queries(index, seed);
    let shares = shares(&measured, seed);
    let passing: Vec<Vec<Passing>> =
        shares.iter().map(|draws| draws.iter().map(|share| share.passing.clone()).collect()).collect();
    let ordinary = &queries.vectors[..queries.ordinary()];
    let samples = samples(&measured, ordinary, seed);
    let counting = Counting::of(index, measured.whole, passing, ordinary, &samples);
    let finder = || {
        let mut finder = Finder::default();
        let (shares, measured) = (&shares, &measured);
        // Queries that are out of distribution are measured only without a filter.
        let of_all: Vec<usize> = (0..).zip(&counting.k).map(|(share, &k)| if share == 0 { k } else { 0 }).collect();
        let are_ood = |requested: &[usize]| requested.iter().all(|&n| queries.group(n) == Group::Ood);
        let k = &counting.k;
        move |requested: &[usize], found: &mut [Vec<FoundIn>]| {
            let k = if are_ood(requested) { &of_all } else { k };
            finder.find(measured, &queries.vectors, shares, k, requested, found);
        }
    };
    counting.calibration(queries, finder, progress)
}

/// Samples the item sets of each pass rate.
pub(super) fn shares(measured: &Measured<'_>, seed: u64) -> Vec<Vec<Share>> {
    let draw = |pass_rate| {
        (0..DRAWS).into_par_iter().map(move |n| Share::draw(measured, pass_rate, random(seed, n))).collect()
    };
    PASS_RATES.into_iter().map(draw).collect()
}

/// Returns, for each query, the sampled items from which score residuals are computed.
pub(super) fn samples(measured: &Measured<'_>, queries: &[Vec<f32>], seed: u64) -> Vec<Vec<(u32, f32)>> {
    let filled = measured.whole.filled();
    let of_query = |(n, query): (usize, &Vec<f32>)| sample(measured, &drawn(&filled, seed, n), query);
    queries.par_iter().enumerate().map(of_query).collect()
}

/// Computes the score-residual quantiles from a sample of items per query.
fn margins(
    index: &ivf::Index,
    layout: Layout<'_>,
    queries: &[Vec<f32>],
    samples: &[Vec<(u32, f32)>],
) -> ResidualQuantiles {
    let of_query = |(query, sample): (&Vec<f32>, &Vec<(u32, f32)>)| {
        let (mut scratch, mut scores) = (ivf::Scratch::default(), vec![0.0; index.lists()]);
        index.probe(query, index.lists(), &mut scratch).for_each(|(list, score)| scores[list.index()] = score);
        let length = query.iter().map(|x| x * x).sum::<f32>().sqrt().max(f32::MIN_POSITIVE);
        let mut list_of = layout.lists_of();
        let pair = |&(place, product): &(u32, f32)| (scores[list_of(place).index()] / length, product / length);
        sample.iter().map(pair).collect::<Vec<_>>()
    };
    ResidualQuantiles::of(&queries.par_iter().zip(samples).flat_map_iter(of_query).collect::<Vec<_>>())
}

/// Evaluation of the results of all queries.
pub(super) struct Counting<'a> {
    /// Index or any shard of it, for centroids and row formats.
    index: &'a ivf::Index,
    layout: Layout<'a>,
    passing: Vec<Vec<Passing>>,
    margins: ResidualQuantiles,
    /// Maximum number of measured candidates per pass rate; 0 for a pass rate that is not measured.
    pub(super) k: Vec<usize>,
}

impl<'a> Counting<'a> {
    /// Starts an evaluation of query results.
    pub(super) fn of(
        index: &'a ivf::Index,
        layout: Layout<'a>,
        passing: Vec<Vec<Passing>>,
        queries: &[Vec<f32>],
        samples: &[Vec<(u32, f32)>],
    ) -> Self {
        let margins = margins(index, layout, queries, samples);
        let tallies = tallies(layout.lists(), &passing, &[]);
        let most = |n| tallies.iter().filter(|tally| tally.share == n).map(|tally| tally.k).max().unwrap_or(0);
        let k = (0..PASS_RATES.len()).map(most).collect();
        Counting { index, layout, passing, margins, k }
    }

    /// Evaluates the results of all queries. Each thread uses its own finder, which receives the numbers of up to [`TOGETHER`]
    /// queries.
    pub(super) fn calibration<F: FnMut(&[usize], &mut [Vec<FoundIn>])>(
        &self,
        queries: &Queries,
        finder: impl Fn() -> F + Sync,
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Calibration {
        let total = queries.vectors.len();
        progress(0, total);
        let done = AtomicUsize::new(0);
        let requested: Vec<usize> = (0..total).collect();
        let part = |requested: &[usize]| {
            let mut find = finder();
            let mut found = vec![vec![FoundIn::default(); PASS_RATES.len()]; TOGETHER];
            let mut tallies = tallies(self.layout.lists(), &self.passing, &queries.strata);
            let (mut counter, mut depths) = (Counter::default(), self.depths(&tallies));
            for together in requested.chunks(TOGETHER) {
                find(together, &mut found);
                for (&n, found) in together.iter().zip(&found) {
                    let (query, made_of, group) = (&queries.vectors[n], queries.made_of[n], queries.group(n));
                    let requested = EvaluatedQuery { n, query, made_of, excluded: queries.excluded(n), group };
                    counter.add(self, &requested, found, &mut tallies, &mut depths);
                    progress(done.fetch_add(1, Ordering::Relaxed) + 1, total);
                }
            }
            (tallies, depths)
        };
        let each = total.div_ceil(rayon::current_num_threads()).max(1);
        let parts: Vec<(Vec<Tally>, AllDepths)> = requested.par_chunks(each).map(part).collect();
        let sum = |mut sum: (Vec<Tally>, AllDepths), part: (Vec<Tally>, AllDepths)| {
            sum.0.iter_mut().zip(part.0).for_each(|(sum, part)| sum.add(part));
            sum.1.add(&part.1);
            sum
        };
        let (tallies, depths) = parts.into_iter().reduce(sum).unwrap_or_default();
        let slots = self.layout.slots();
        let times: Vec<ScanTimes> =
            PASS_RATES.iter().map(|&pass_rate| ScanTimes::of(self.index, slots, pass_rate)).collect();
        let choices = Choices { depths: &depths, times: &times, rows: self.index.rows() };
        let ordinary = queries.ordinary();
        let curves = curves(&tallies, (ordinary, queries.ood), &choices);
        Calibration {
            source: queries.source.clone(),
            queries: ordinary,
            targets: TARGETS.to_vec(),
            margins: self.margins.clone(),
            ood_reach: (queries.ood > 0).then_some(queries.ood_reach),
            curves,
        }
    }

    /// Starts the measurement of selection depths (numbers of candidates to select).
    fn depths(&self, tallies: &[Tally]) -> AllDepths {
        let rows = self.index.rows();
        // One of the selected candidates may be the item from which the query was made.
        let by_int8 = |t: &Tally| Depths::by_int8(t.share, t.k, (rows.selected(t.k), selected(self.k[t.share]) - 1));
        let coded = tallies.iter().filter(|tally| is_coded(tally.share) && self.index.has_first_pass());
        AllDepths {
            int8: if matches!(rows, WideRows::None) { Vec::new() } else { tallies.iter().map(by_int8).collect() },
            coded: coded.map(|tally| Depths::by_codes(tally.share, tally.k)).collect(),
        }
    }
}

/// Query whose results are evaluated.
struct EvaluatedQuery<'a> {
    n: usize,
    query: &'a [f32],
    /// Slot of the item from which the query was made, if it was.
    made_of: Option<u32>,
    /// Slots of the items that the query's request excludes, ascending.
    excluded: &'a [u32],
    group: Group,
}

/// Buffers of one thread that evaluates results.
#[derive(Default)]
struct Counter {
    scratch: ivf::Scratch,
    /// All lists with their scores, best first.
    order: Vec<(ListId, f32)>,
    best: Vec<Scored>,
    /// Slots with their ranks by approximate score (int8 rows or first-pass codes), sorted by slot.
    placed: Vec<(u32, u32)>,
    /// Rank of each true best item by approximate score; `None` if it is not ranked.
    places: Vec<Option<u32>>,
    /// Number of true best items in each list, `[C]`.
    hits: Vec<u32>,
    ahead: UnscannedLists,
}

impl Counter {
    /// Evaluates the results of a query. Only queries that are in distribution and in no stratum count for candidate selection.
    fn add(
        &mut self,
        counting: &Counting<'_>,
        requested: &EvaluatedQuery<'_>,
        found: &[FoundIn],
        tallies: &mut [Tally],
        depths: &mut AllDepths,
    ) {
        let Counting { index, layout, .. } = *counting;
        let &EvaluatedQuery { n, query, made_of, group, .. } = requested;
        self.order.clear();
        self.order.extend(index.probe(query, index.lists(), &mut self.scratch));
        let passing = of_query(&counting.passing, n);
        let is_measured = |share: usize| counting.k[share] > 0 && (group != Group::Ood || share == 0);
        for (share, passing) in passing.into_iter().enumerate().filter(|(share, _)| is_measured(*share)) {
            let FoundIn { best, int8, coded } = &found[share];
            self.best.clear();
            self.best.extend(best.iter().filter(|scored| Some(scored.place) != made_of).take(counting.k[share]));
            for (depths, order) in [(&mut depths.int8, int8), (&mut depths.coded, coded)] {
                let of_share = |depths: &&mut Depths| group == Group::Ordinary && depths.share == share;
                let mut measured = depths.iter_mut().filter(of_share).peekable();
                if measured.peek().is_some() {
                    self.place(order, made_of);
                    measured.for_each(|depths| depths.place(&self.places));
                }
            }
            for tally in tallies.iter_mut().filter(|tally| tally.share == share) {
                count_by_list(layout, self.best.iter().take(tally.k), &mut self.hits);
                let lengths = layout.lengths;
                self.ahead.begin(query, self.order.iter().map(|(list, score)| (*score, lengths[list.index()])));
                let threshold = self.best.get(tally.k - 1).map_or(f32::MIN, |scored| scored.score);
                let margins = &counting.margins;
                let walk = QueryPath { order: &self.order, lengths, hits: &self.hits, margins, threshold };
                match group {
                    Group::Ordinary => tally.walk(&walk, passing, &mut self.ahead),
                    Group::Stratum(stratum) => tally.walk_stratum(stratum, &walk, passing),
                    Group::Ood => tally.walk_ood(&walk, passing),
                }
                breathe();
            }
            if share == 0 && group == Group::Ordinary {
                self.add_excluding(counting, requested, &best[..], (tallies, passing));
            }
        }
    }

    /// Evaluates the results of a query without the items that its request excludes; without a filter.
    fn add_excluding(
        &mut self,
        counting: &Counting<'_>,
        requested: &EvaluatedQuery<'_>,
        best: &[Scored],
        (tallies, passing): (&mut [Tally], &Passing),
    ) {
        let &EvaluatedQuery { excluded, made_of, .. } = requested;
        if excluded.is_empty() {
            return;
        }
        let layout = counting.layout;
        let is_left =
            |scored: &&Scored| Some(scored.place) != made_of && excluded.binary_search(&scored.place).is_err();
        for tally in tallies.iter_mut().filter(|tally| tally.share == 0) {
            let left = best.iter().filter(is_left).take(tally.k);
            let count = count_by_list(layout, left, &mut self.hits);
            // Skips the query if exclusions leave fewer than K of its measured best items.
            if count == tally.k {
                let (lengths, margins) = (layout.lengths, &counting.margins);
                let walk = QueryPath { order: &self.order, lengths, hits: &self.hits, margins, threshold: f32::MIN };
                tally.walk_excluding(&walk, passing, excluded.len());
            }
        }
    }

    /// Finds the ranks of the true best items in `order`, the items by approximate score.
    fn place(&mut self, order: &[Scored], made_of: Option<u32>) {
        let ordered = order.iter().map(|scored| scored.place).filter(|place| Some(*place) != made_of);
        self.placed.clear();
        self.placed.extend((0..).zip(ordered).map(|(rank, place)| (place, rank)));
        self.placed.sort_unstable();
        let rank = |place: u32| {
            let at = self.placed.binary_search_by_key(&place, |(place, _)| *place).ok()?;
            Some(self.placed[at].1)
        };
        self.places.clear();
        self.places.extend(self.best.iter().map(|scored| rank(scored.place)));
    }
}

/// Counts scored items by their list in `hits`; returns the number of items.
fn count_by_list<'s>(layout: Layout<'_>, scored: impl Iterator<Item = &'s Scored>, hits: &mut Vec<u32>) -> usize {
    hits.clear();
    hits.resize(layout.lists(), 0);
    let mut count = 0;
    for scored in scored {
        hits[layout.list_of(scored.place).index()] += 1;
        count += 1;
    }
    count
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use sterling_core::tensor::Matrix;
    use sterling_index::ivf::{Probing, Rescore};
    use sterling_index::topk::Selector;
    use sterling_snapshot::SearchGoal;
    use sterling_storage::rows::RowStore;

    const WIDTH: usize = 16;

    fn numbers(count: usize, seed: u64) -> Vec<f32> {
        let number = |n| (0..4).map(|m| random(seed, n * 4 + m) as f32 / u64::MAX as f32).sum::<f32>() * 1.7 - 3.4;
        (0..count as u64).map(number).collect()
    }

    /// Returns the recall of the best `k` by rows, for a search with given numbers of lists and candidates.
    fn found(index: &ivf::Index, queries: &[Vec<f32>], k: usize, (probes, selected): (usize, usize)) -> f64 {
        found_by(index, queries, k, (Probing::of(probes, index.lists()), selected))
    }

    fn found_by(index: &ivf::Index, queries: &[Vec<f32>], k: usize, (probing, selected): (Probing<'_>, usize)) -> f64 {
        let (mut selector, mut scratch, mut hits) = (Selector::new(), ivf::Scratch::default(), 0);
        let all: Vec<u32> = index.filled_slots().map(|slot| slot.0).collect();
        for query in queries {
            let best = |slots: &[u32]| {
                let mut products = vec![0.0; slots.len()];
                index.products(query, slots, &mut products);
                let mut scored: Vec<(f32, u32)> = products.into_iter().zip(slots.iter().copied()).collect();
                scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
                scored.into_iter().take(k).map(|(_, slot)| slot).collect::<Vec<_>>()
            };
            selector.reset(selected);
            index.search(query, probing, None, &mut selector, selected, &mut scratch);
            let candidates: Vec<u32> =
                selector.finish().iter().map(|&key| sterling_index::topk::unkey(key).1.0).collect();
            let (truth, some) = (best(&all), best(&candidates));
            hits += truth.iter().filter(|slot| some.contains(slot)).count();
        }
        hits as f64 / (queries.len() * k) as f64
    }

    /// A large dimension with similar values in all items leaves little resolution of int8 rows for the others.
    #[test]
    fn the_loss_of_int8_rows_is_measured_and_compensated_or_reported() {
        const ITEMS: usize = 3000;
        for constant in [0.0f32, 30.0, 300.0, 1000.0] {
            let with = |mut numbers: Vec<f32>, last: f32| {
                numbers.chunks_exact_mut(WIDTH).for_each(|row| row[WIDTH - 1] = last);
                numbers
            };
            let rows = with(numbers(ITEMS * WIDTH, 1), constant);
            let requested = with(numbers(200 * WIDTH, 2), 1.0);
            let requested: Vec<Vec<f32>> = requested.chunks_exact(WIDTH).map(<[f32]>::to_vec).collect();
            let (requested, measured_with) = requested.split_at(60);
            let store = RowStore::from(Matrix::new(&rows, WIDTH).unwrap());
            let options = ivf::Options { lists: 40, iterations: 4, rescore: Rescore::F32, ..ivf::Options::default() };
            let built = ivf::build(&store, &ivf::RowSurvey::of(&store).unwrap(), &options, &|_| ()).unwrap();
            let index = ivf::Index::open(&built.in_memory(&store, "index").unwrap()).unwrap();
            let queries = Queries {
                source: "test".into(),
                vectors: measured_with.to_vec(),
                made_of: vec![None; measured_with.len()],
                ..Queries::default()
            };
            let calibration = measure(&index, &queries, 1, &|_, _| ());
            for k in [10, 20, 100] {
                for recall in [0.9, 0.98] {
                    let chosen =
                        calibration.choose(SearchGoal { candidates: k, pass_rate: 1.0, recall }, ITEMS, index.lists());
                    let selected = index.rows().selected(k).max(chosen.by_int8);
                    let found = found(&index, requested, k, (chosen.probes, selected));
                    let what = format!("constant {constant}, k {k}, target {recall}, {chosen:?}, {found} found");
                    assert!(found > chosen.recall - 0.05, "{what}");
                    assert!(constant > 100.0 || found > recall - 0.03, "{what}");
                    assert!(constant > 0.0 || chosen.by_int8 == 0, "{what}");
                }
            }
            assert_eq!(calibration.short_of(0.98).is_empty(), constant < 100.0, "constant {constant}");
        }
    }

    /// Requests exclude some of their best items and many others.
    #[test]
    fn requests_that_exclude_items_find_the_requested_recall_without_many_more_lists() {
        const ITEMS: usize = 4000;
        const EXCLUDED: usize = 120;
        let rows = numbers(ITEMS * WIDTH, 1);
        let store = RowStore::from(Matrix::new(&rows, WIDTH).unwrap());
        let options = ivf::Options { lists: 100, iterations: 4, rescore: Rescore::F32, ..ivf::Options::default() };
        let built = ivf::build(&store, &ivf::RowSurvey::of(&store).unwrap(), &options, &|_| ()).unwrap();
        let index = ivf::Index::open(&built.in_memory(&store, "index").unwrap()).unwrap();
        let all: Vec<u32> = index.filled_slots().map(|slot| slot.0).collect();
        let ranked = |query: &[f32], slots: &[u32]| {
            let mut products = vec![0.0; slots.len()];
            index.products(query, slots, &mut products);
            let mut scored: Vec<(f32, u32)> = products.into_iter().zip(slots.iter().copied()).collect();
            scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            scored.into_iter().map(|(_, slot)| slot).collect::<Vec<u32>>()
        };
        // Every other one of the best ten, and random ones.
        let excluded = |n: usize, query: &[f32]| {
            let some = (0..EXCLUDED - 5).map(|m| all[random(n as u64, m as u64) as usize % ITEMS]);
            let mut slots: Vec<u32> = ranked(query, &all).into_iter().take(10).step_by(2).chain(some).collect();
            slots.sort_unstable();
            slots.dedup();
            slots
        };
        let vectors: Vec<Vec<f32>> = numbers(400 * WIDTH, 2).chunks_exact(WIDTH).map(<[f32]>::to_vec).collect();
        let (calibrating, asking) = vectors.split_at(200);
        let queries = Queries {
            source: "test".into(),
            vectors: calibrating.to_vec(),
            made_of: vec![None; 200],
            excluded: calibrating.iter().enumerate().map(|(n, query)| excluded(n, query)).collect(),
            ..Queries::default()
        };
        let calibration = measure(&index, &queries, 1, &|_, _| ());
        let without = measure(&index, &Queries { excluded: Vec::new(), ..queries }, 1, &|_, _| ());
        let unlike = |curve: &sterling_snapshot::RecallCurve| sterling_snapshot::RecallCurve {
            excluding: None,
            ..curve.clone()
        };
        assert_eq!(
            calibration.curves.iter().map(unlike).collect::<Vec<_>>(),
            without.curves,
            "the others are the same"
        );
        for (k, recall) in [(10, 0.9), (10, 0.98), (100, 0.9)] {
            let wanted = SearchGoal { candidates: k, pass_rate: 1.0, recall };
            let chosen = calibration.choose_beyond(EXCLUDED, wanted, ITEMS, index.lists());
            let deep = without.choose_beyond(EXCLUDED, wanted, ITEMS, index.lists());
            let (mut selector, mut scratch, mut hits) = (Selector::new(), ivf::Scratch::default(), 0);
            for (n, query) in asking.iter().enumerate() {
                let excluded = excluded(1000 + n, query);
                let left = |slots: Vec<u32>| -> Vec<u32> {
                    slots.into_iter().filter(|slot| excluded.binary_search(slot).is_err()).take(k).collect()
                };
                let room = index.rows().selected(k) + EXCLUDED;
                selector.reset(room);
                let probing = Probing::of(chosen.probes, index.lists());
                index.search(query, probing, None, &mut selector, room, &mut scratch);
                let found: Vec<u32> =
                    selector.finish().iter().map(|&key| sterling_index::topk::unkey(key).1.0).collect();
                let (truth, found) = (left(ranked(query, &all)), left(ranked(query, &found)));
                hits += truth.iter().filter(|slot| found.contains(slot)).count();
            }
            let found = hits as f64 / (asking.len() * k) as f64;
            let what = format!("k {k}, requested {recall}, found {found}: {chosen:?}, else {deep:?}");
            assert!(found > recall - 0.015 && (found - chosen.recall).abs() < 0.03, "{what}");
            assert!(chosen.probes < deep.probes, "{what}");
        }
    }

    /// Items in half of the dimensions, and a new kind of queries in the other half, where the items differ little.
    #[test]
    fn queries_out_of_distribution_find_the_requested_recall() {
        const ITEMS: usize = 6000;
        const WIDTH: usize = 24;
        for is_unit in [false, true] {
            let kind = |count: usize, seed: u64, is_new: bool| -> Vec<Vec<f32>> {
                let (centers, first, small) = if is_new { (10, 6, 0..WIDTH / 2) } else { (100, 5, WIDTH / 2..WIDTH) };
                let places = numbers(centers * WIDTH, first);
                let noise = numbers(count * WIDTH, seed);
                let row = |n: usize| {
                    let center = &places[random(seed, n as u64) as usize % centers * WIDTH..][..WIDTH];
                    let mut row: Vec<f32> =
                        center.iter().zip(&noise[n * WIDTH..]).map(|(center, x)| center + 0.3 * x).collect();
                    row[small.clone()].iter_mut().for_each(|x| *x *= 0.1);
                    let length = row.iter().map(|x| x * x).sum::<f32>().sqrt();
                    row.iter_mut().for_each(|x| *x /= if is_unit { length } else { 1.0 });
                    row
                };
                (0..count).map(row).collect()
            };
            let rows = kind(ITEMS, 1, false).concat();
            let store = RowStore::from(Matrix::new(&rows, WIDTH).unwrap());
            let options = ivf::Options { lists: 300, iterations: 4, rescore: Rescore::F32, ..ivf::Options::default() };
            let built = ivf::build(&store, &ivf::RowSurvey::of(&store).unwrap(), &options, &|_| ()).unwrap();
            let index = ivf::Index::open(&built.in_memory(&store, "index").unwrap()).unwrap();
            let calibration = measure(&index, &Queries::of_items(&index, 3), 3, &|_, _| ());
            let (ordinary, new) = (kind(150, 7, false), kind(150, 8, true));
            let isotropic: Vec<Vec<f32>> = numbers(150 * WIDTH, 9).chunks_exact(WIDTH).map(<[f32]>::to_vec).collect();
            let k = 10;
            let chosen = calibration.choose(SearchGoal { candidates: k, pass_rate: 1.0, recall: 0.98 }, ITEMS, 300);
            let ood = calibration.ood(chosen);
            let rate = |queries: &[Vec<f32>], ood| {
                let probing = Probing { ood, ..Probing::of(chosen.probes, 300) };
                found_by(&index, queries, k, (probing, index.rows().selected(k)))
            };
            let what = format!("{chosen:?} {ood:?}, unit {is_unit}");
            let found = [&ordinary, &new, &isotropic].map(|queries| rate(queries, ood));
            let alike = rate(&new, None);
            assert!(found.iter().all(|found| *found >= 0.96) && alike < 0.96, "{what}: {found:?}, {alike}");
            let mut scratch = ivf::Scratch::default();
            let reach = calibration.ood_reach.unwrap();
            let strange = ordinary.iter().filter(|query| index.reach(query, &mut scratch) < reach).count();
            assert!(strange <= 7, "{what}: {strange} of 150");
        }
    }
}
