//! Cumulative results of queries per number of lists, and the recall curves computed from them.

use super::confidence::bounded;
use super::depth::{AllDepths, Depths, ScanTimes};
use super::share::{PASS_RATES, Passing};
use sterling_core::units::ListId;
use sterling_index::ivf::{CheckInterval, Rates, ResidualQuantiles, Seen, UnscannedLists, WideRows, next_check};
use sterling_snapshot::{CodedCurve, ExcludingCurve, RecallCurve, TARGETS};

/// Numbers of candidates (K) for which recall is measured.
pub(super) const CANDIDATES: [usize; 4] = [10, 100, 1000, 10_000];
/// A search is complete once it expects less than this fraction of K0 in unscanned lists.
const LEFT_MIN: f64 = 1e-5;
/// Loss of true best items by int8 rows, as a fraction, below which searches need not compensate.
const LOST_MIN: f64 = 5e-4;
/// Tolerated difference of a stratum's mean recall to the target.
const STRATUM_BELOW: f64 = 0.01;
/// Minimum number of queries with excluded items for which a separate curve is computed.
const EXCLUDING_MIN: usize = 30;
/// Number of bisection steps for the expected remainder at which searches may end.
const HALVINGS: usize = 24;

/// Summed results of the queries of a curve, independent of their order.
pub(super) struct Tally {
    /// Index of the pass rate.
    pub(super) share: usize,
    pub(super) k: usize,
    /// Number of true best items in the first n lists, for each n, `[C]`; the next field has the sums of squares.
    hits: Vec<u64>,
    squares: Vec<u64>,
    /// Hits and number of queries of each stratum; `hits` does not include these queries.
    strata: Vec<(Vec<u64>, usize)>,
    /// Hits of queries that are out of distribution, and sums of squares; not included in `hits`.
    ood: [Vec<u64>; 2],
    /// Hits among the items that a request does not exclude, and sums of squares; not included in `hits`.
    excluding: [Vec<u64>; 2],
    /// Number of excluded items of each query with exclusions.
    excluded: Vec<usize>,
    /// States of each query at its termination checks.
    looks: Vec<Vec<CheckState>>,
}

/// State of a query at a termination check.
#[derive(Clone, Copy)]
struct CheckState {
    /// Number of best items expected in unscanned lists, as a fraction of K.
    left: f32,
    /// Number of true best items that the query has found.
    hits: u32,
}

/// Order in which one query scans all lists, with its hits.
pub(super) struct QueryPath<'a> {
    /// Lists with their scores, best first, `[C]`.
    pub(super) order: &'a [(ListId, f32)],
    /// Number of items per list, `[C]`; the next field is the number of true best items per list.
    pub(super) lengths: &'a [u32],
    pub(super) hits: &'a [u32],
    pub(super) margins: &'a ResidualQuantiles,
    /// Score of the K-th best item.
    pub(super) threshold: f32,
}

impl QueryPath<'_> {
    /// Returns the number of true best items in the first n lists, for n from 1; an infinite sequence.
    fn found(&self, share: &Passing, number: usize) -> impl Iterator<Item = u64> {
        let counts = move |list: &ListId| share.of_lists[list.index()] > 0 || PASS_RATES[number] == 1.0;
        let lists = self.order.iter().map(|(list, _)| *list).filter(counts);
        let hits = lists.map(|list| u64::from(self.hits[list.index()])).chain(std::iter::repeat(0));
        hits.scan(0, |found, hits| {
            *found += hits;
            Some(*found)
        })
    }
}

/// Adds the hits of a query after each number of lists, and the squares of the hits.
fn add_found([hits, squares]: &mut [Vec<u64>; 2], found: impl Iterator<Item = u64>) {
    for ((hits, squares), found) in hits.iter_mut().zip(squares).zip(found) {
        *hits += found;
        *squares += found * found;
    }
}

/// Creates an empty tally per curve; skips curves whose K is at least the number of passing items.
pub(super) fn tallies(lists: usize, shares: &[Vec<Passing>], strata: &[usize]) -> Vec<Tally> {
    let empty = move || vec![0; lists];
    let of_strata = move || strata.iter().map(|&queries| (empty(), queries)).collect();
    let tally = |k| {
        let enough = shares.iter().enumerate().filter(move |(_, draws)| draws.iter().all(|passing| passing.items > k));
        enough.map(move |(share, _)| Tally {
            share,
            k,
            hits: empty(),
            squares: empty(),
            strata: of_strata(),
            ood: [empty(), empty()],
            excluding: [empty(), empty()],
            excluded: Vec::new(),
            looks: Vec::new(),
        })
    };
    CANDIDATES.into_iter().flat_map(tally).collect()
}

impl Tally {
    /// Adds the results of a query among the items that pass, list by list. Lists without passing items are not counted, unless all
    /// items pass: a search without filter probes empty lists too.
    pub(super) fn walk(&mut self, walk: &QueryPath<'_>, share: &Passing, ahead: &mut UnscannedLists) {
        let (mut held, mut found, mut items, mut survivors) = (0, 0u64, 0u64, 0u64);
        let (mut look, mut before, mut looks) = (1, (0, 0), Vec::new());
        let mut is_open = true;
        for (done, &(list, score)) in (1..).zip(walk.order) {
            let (length, passing) = (walk.lengths[list.index()], share.of_lists[list.index()]);
            ahead.take(score, length);
            items += u64::from(length);
            if passing > 0 || PASS_RATES[self.share] == 1.0 {
                survivors += u64::from(passing);
                found += u64::from(walk.hits[list.index()]);
                self.hits[held] += found;
                self.squares[held] += found * found;
                held += 1;
            }
            if is_open && done == look {
                let lately = (survivors - before.0) as f64 / (items - before.1).max(1) as f64;
                ahead.passed(lately);
                if survivors >= self.k as u64 {
                    let seen = Seen { passing: share.items as f64, survivors, above: found, lately };
                    let left = ahead.expected(walk.threshold, seen, walk.margins) / self.k as f64;
                    looks.push(CheckState { left: left as f32, hits: found as u32 });
                    is_open = left > LEFT_MIN;
                }
                before = (survivors, items);
                look = next_check(look, walk.order.len(), CheckInterval::Often);
            }
        }
        for place in held..self.hits.len() {
            self.hits[place] += found;
            self.squares[place] += found * found;
        }
        looks.push(CheckState { left: 0.0, hits: found as u32 });
        self.looks.push(looks);
    }

    /// Adds the results of a query of a stratum, list by list.
    pub(super) fn walk_stratum(&mut self, stratum: usize, walk: &QueryPath<'_>, share: &Passing) {
        let found = walk.found(share, self.share);
        let (hits, _) = &mut self.strata[stratum];
        hits.iter_mut().zip(found).for_each(|(hits, found)| *hits += found);
    }

    /// Adds the results of a query that is out of distribution, list by list.
    pub(super) fn walk_ood(&mut self, walk: &QueryPath<'_>, share: &Passing) {
        let found = walk.found(share, self.share);
        add_found(&mut self.ood, found);
    }

    /// Adds the results of a query other than the items that its request excludes, list by list.
    pub(super) fn walk_excluding(&mut self, walk: &QueryPath<'_>, share: &Passing, excluded: usize) {
        let found = walk.found(share, self.share);
        add_found(&mut self.excluding, found);
        self.excluded.push(excluded);
    }

    pub(super) fn add(&mut self, other: Tally) {
        let sum = |sums: &mut [u64], more: &[u64]| sums.iter_mut().zip(more).for_each(|(sum, n)| *sum += n);
        sum(&mut self.hits, &other.hits);
        sum(&mut self.squares, &other.squares);
        self.strata.iter_mut().zip(&other.strata).for_each(|((hits, _), (more, _))| sum(hits, more));
        self.ood.iter_mut().zip(&other.ood).for_each(|(hits, more)| sum(hits, more));
        self.excluding.iter_mut().zip(&other.excluding).for_each(|(hits, more)| sum(hits, more));
        self.excluded.extend(other.excluded);
        self.looks.extend(other.looks);
    }

    /// Returns the mean recall after a number of lists, and the mean's lower bound with 95 % confidence.
    fn recall(&self, probes: usize, queries: usize) -> (f64, f64) {
        bounded(self.hits[probes - 1], self.squares[probes - 1], queries, self.k)
    }

    /// Returns the smallest number of lists, at least `least`, whose recall is above a target with 95 % confidence and in no
    /// stratum clearly below the target.
    fn probes_for(&self, queries: usize, target: f64, least: usize) -> Option<usize> {
        let reaches = |(hits, queries): &(Vec<u64>, usize), probes: usize| {
            hits[probes - 1] as f64 >= (target - STRATUM_BELOW) * (queries * self.k) as f64
        };
        let holds = |probes: usize| self.strata.iter().all(|stratum| reaches(stratum, probes));
        (least..=self.hits.len()).find(|&probes| self.recall(probes, queries).1 >= target && holds(probes))
    }

    /// Returns the smallest number of lists, at least `least`, whose recall for the `queries` that are out of distribution is above
    /// a target with 95 % confidence; all lists if no number suffices.
    fn ood_probes_for(&self, queries: usize, target: f64, least: usize) -> usize {
        let [hits, squares] = &self.ood;
        let reaches = |n: &usize| bounded(hits[n - 1], squares[n - 1], queries, self.k).1 >= target;
        (least..=hits.len()).find(reaches).unwrap_or(hits.len())
    }

    /// Returns the settings for requests that exclude items: for each target the smallest number of lists, at least the number in
    /// `points` and in `before`, the curve of fewer candidates, whose recall is above the target with 95 % confidence. `None`
    /// unless enough queries were measured.
    fn excluding_curve(&self, points: &[Point], before: Option<&ExcludingCurve>) -> Option<ExcludingCurve> {
        let queries = self.excluded.len();
        if queries < EXCLUDING_MIN {
            return None;
        }
        let [hits, squares] = &self.excluding;
        let bounded = |probes: usize| bounded(hits[probes - 1], squares[probes - 1], queries, self.k);
        let (mut probes, mut recall) = (Vec::new(), Vec::new());
        for (n, (target, point)) in TARGETS.iter().zip(points).enumerate() {
            let lower = probes.last().map_or(point.probes, |last| point.probes.max(*last));
            let least = before.map_or(lower, |curve| lower.max(curve.probes[n]));
            let own = (least..=hits.len()).find(|&n| bounded(n).1 >= target + point.lost).unwrap_or(hits.len());
            recall.push(((bounded(own).0 - point.lost).max(0.0) * 1e5).floor() / 1e5);
            probes.push(own);
        }
        let excluded = self.excluded.iter().copied().max().unwrap_or(0);
        Some(ExcludingCurve { excluded, probes, recall })
    }

    /// Returns the largest expected remainder in unscanned lists, as a fraction of K, at which searches may end and still reach a
    /// recall with 95 % confidence.
    fn termination_share_for(&self, target: f64) -> f64 {
        let reaches = |left: f64| {
            let ends = self.looks.iter().map(|looks| {
                let end = looks.iter().find(|look| f64::from(look.left) <= left);
                end.map_or(0, |look| u64::from(look.hits))
            });
            let (sum, squares) = ends.fold((0, 0), |(sum, squares), hits| (sum + hits, squares + hits * hits));
            bounded(sum, squares, self.looks.len(), self.k).1 >= target
        };
        let (mut low, mut high) = (LEFT_MIN.ln(), 0.0f64);
        if !reaches(LEFT_MIN) {
            return 0.0;
        }
        for _ in 0..HALVINGS {
            let middle = (low + high) / 2.0;
            if reaches(middle.exp()) { low = middle } else { high = middle }
        }
        low.exp()
    }
}

/// Settings to choose besides the number of lists: how many candidates are selected by codes or int8 rows.
pub(super) struct Choices<'a> {
    /// Loss per number of candidates.
    pub(super) depths: &'a AllDepths,
    /// Estimated search times per pass rate.
    pub(super) times: &'a [ScanTimes],
    pub(super) rows: &'a WideRows,
}

/// Point of a recall curve for one target.
#[derive(Clone, Copy, Default)]
struct Point {
    probes: usize,
    recall: f64,
    low: f64,
    left: f64,
    /// Upper bound of the loss by candidate selection, with 95 % confidence.
    lost: f64,
    /// Number of candidates to select by int8 rows if these lose some of the best items; otherwise 0.
    selected: usize,
    /// True if the point reaches its recall target.
    reaches: bool,
}

/// Returns the measured selection depths for the pass rate and K of a tally.
fn of<'a>(depths: &'a [Depths], tally: &Tally) -> Option<&'a Depths> {
    depths.iter().find(|depths| (depths.share, depths.k) == (tally.share, tally.k))
}

impl Choices<'_> {
    /// Returns the cheapest point with int8 rows that reaches a target, with at least `least` lists. If no point does, returns the
    /// point with the smallest loss, with as many lists as would reach the target without that loss.
    fn by_rows(&self, tally: &Tally, queries: usize, target: f64, least: usize) -> Point {
        let (times, all) = (&self.times[tally.share], tally.hits.len());
        let usual = (self.rows.selected(tally.k), 0.0, 0.0);
        let counts = |(selected, lost, most): (usize, f64, f64)| match most < LOST_MIN {
            true => (selected, 0.0, 0.0),
            false => (selected, lost, most),
        };
        let lost: Vec<(usize, f64, f64)> =
            of(&self.depths.int8, tally).map_or_else(|| vec![usual], |int8| int8.lost(queries).map(counts).collect());
        let point = |probes: usize, (selected, lost, lost_most): (usize, f64, f64)| {
            let (recall, low) = tally.recall(probes, queries);
            Point {
                probes,
                recall: (recall - lost).max(0.0),
                low: (low - lost_most).max(0.0),
                left: tally.termination_share_for(target + lost_most),
                lost: lost_most,
                selected: if lost_most > 0.0 { selected } else { 0 },
                reaches: true,
            }
        };
        let mut best: Option<(f64, usize, (usize, f64, f64))> = None;
        for of_number in lost.iter().copied() {
            let (selected, _, lost_most) = of_number;
            if let Some(probes) = tally.probes_for(queries, target + lost_most, least) {
                let time = times.by_rows(probes, selected);
                if best.is_none_or(|(least, ..)| time < least) {
                    best = Some((time, probes, of_number));
                }
            }
            if lost_most == 0.0 {
                break;
            }
        }
        match (best, lost.last()) {
            (Some((_, probes, of_number)), _) => point(probes, of_number),
            (None, last) => {
                let probes = tally.probes_for(queries, target, least).unwrap_or(all);
                let of_number = last.copied().unwrap_or(usual);
                Point { left: tally.termination_share_for(target), reaches: false, ..point(probes, of_number) }
            }
        }
    }

    /// Returns the number of candidates to select by codes, and the resulting point, if codes are clearly faster than `rows`.
    fn by_codes(&self, tally: &Tally, queries: usize, target: f64, rows: &Point) -> Option<(usize, Point)> {
        let times = &self.times[tally.share];
        let by_rows = times.by_rows(rows.probes, rows.selected.max(self.rows.selected(tally.k)));
        // If int8 rows do not reach the target, codes are accepted regardless of their search time.
        let mut time = if rows.reaches { Rates::TIME_SHARE_MAX * by_rows } else { f64::INFINITY };
        let mut best = None;
        for (selected, lost, lost_most) in of(&self.depths.coded, tally)?.lost(queries) {
            let Some(probes) = tally.probes_for(queries, target + lost_most, rows.probes) else { continue };
            let takes = times.by_codes(probes, selected);
            if takes < time {
                let (recall, low) = tally.recall(probes, queries);
                time = takes;
                best = Some((
                    selected,
                    lost_most,
                    Point {
                        probes,
                        recall: (recall - lost).max(0.0),
                        low: (low - lost_most).max(0.0),
                        ..Point::default()
                    },
                ));
            }
        }
        best.map(|(selected, lost, point)| {
            (selected, Point { left: tally.termination_share_for(target + lost), ..point })
        })
    }
}

/// Computes the recall curves from tallies. The curves are monotonic: no curve takes fewer lists than a curve for fewer candidates
/// or for a higher pass rate, with the same kind of score. The curves of int8 rows do not depend on codes.
pub(super) fn curves(tallies: &[Tally], (queries, ood): (usize, usize), choices: &Choices<'_>) -> Vec<RecallCurve> {
    let mut curves: Vec<RecallCurve> = Vec::new();
    for tally in tallies {
        let pass_rate = PASS_RATES[tally.share];
        let below = |c: &&RecallCurve| c.k <= tally.k && c.pass_rate >= pass_rate;
        let mut points: Vec<Point> = Vec::new();
        for (n, target) in TARGETS.iter().enumerate() {
            // A lower recall target never takes more lists than a higher one.
            let lower = points.last().map_or(1, |point| point.probes);
            let least = curves.iter().filter(below).map(|c| c.probes[n]).fold(lower, usize::max);
            points.push(choices.by_rows(tally, queries, *target, least));
        }
        let mut ood_probes: Vec<usize> = Vec::new();
        if ood > 0 && pass_rate == 1.0 {
            for (n, (target, point)) in TARGETS.iter().zip(&points).enumerate() {
                let lower = ood_probes.last().map_or(point.probes, |probes| point.probes.max(*probes));
                let least = curves.iter().filter_map(|c| c.ood_probes.get(n).copied()).fold(lower, usize::max);
                ood_probes.push(tally.ood_probes_for(ood, target + point.lost, least));
            }
        }
        let codes = of(&choices.depths.coded, tally).map(|_| {
            let by_codes = |(target, point): (&f64, &Point)| choices.by_codes(tally, queries, *target, point);
            let points = TARGETS.iter().zip(&points).map(by_codes).map(Option::unwrap_or_default);
            let (selected, points): (Vec<usize>, Vec<Point>) = points.unzip();
            let (probes, [recall, low, left]) = columns(&points);
            CodedCurve { selected, probes, recall, low, left }
        });
        let (probes, [recall, low, left]) = columns(&points);
        let selected = points.iter().map(|point| point.selected);
        let selected = if selected.clone().all(|n| n == 0) { Vec::new() } else { selected.collect() };
        let k = tally.k;
        let before = curves.iter().rev().find_map(|curve| curve.excluding.as_ref());
        let excluding = if pass_rate == 1.0 { tally.excluding_curve(&points, before) } else { None };
        curves.push(RecallCurve { k, pass_rate, probes, recall, low, left, selected, ood_probes, excluding, codes });
    }
    curves
}

/// Converts points to the columns of a curve: the numbers of lists; then recall, lower bound and unscanned remainder, to five
/// digits.
fn columns(points: &[Point]) -> (Vec<usize>, [Vec<f64>; 3]) {
    let digits = |of: fn(&Point) -> f64| points.iter().map(|point| (of(point) * 1e5).floor() / 1e5).collect();
    let probes = points.iter().map(|point| point.probes).collect();
    (probes, [digits(|point| point.recall), digits(|point| point.low), digits(|point| point.left)])
}
