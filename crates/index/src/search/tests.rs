//! Tests the estimates of a search's work against its counters.

#![allow(clippy::unwrap_used)]

use super::find::CHECK_EVERY;
use super::*;
use crate::columns::{self, Columns, ItemColumn, ItemValues};
use crate::ivf::{Assigner, CodeKind, Ending, FirstPass, ResidualQuantiles};
use sterling_core::tensor::Matrix;
use sterling_storage::files::TensorFile;
use sterling_storage::rows::RowStore;

const DIMENSION: usize = 16;
const ITEMS: usize = 12_000;
const CENTRES: usize = 40;
/// Tolerated factors by which an estimate may be too low or too high, in addition to `SLACK`, a share of the items. The nearest
/// lists differ from the average list, and a further round may depend on a single candidate.
const LOW_MAX: f64 = 3.0;
const HIGH_MAX: f64 = 4.0;
const SLACK: f64 = 0.02;

/// Pseudorandom numbers of a seed.
struct Dice(u64);

impl Dice {
    /// Returns a number in `0..sides`.
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % sides
    }

    /// Returns an approximately normally distributed number.
    fn gauss(&mut self) -> f32 {
        (0..6).map(|_| self.roll(1 << 20) as f32 / (1 << 20) as f32).sum::<f32>() - 3.0
    }
}

/// Items around some centres, with the columns that the filters use.
struct Shop {
    index: ivf::Index,
    filter: filter::Index,
    columns: Columns,
    queries: Vec<f32>,
}

/// Text column with values per item.
fn texts(name: &str, items: usize, of: impl Fn(&mut Dice, usize) -> Vec<String>) -> ItemColumn {
    let mut dice = Dice(name.len() as u64);
    let (mut offsets, mut values) = (vec![0u32], Vec::new());
    for row in 0..items {
        values.extend(of(&mut dice, row));
        offsets.push(values.len() as u32);
    }
    ItemColumn { name: name.into(), filter: true, values: ItemValues::Texts { offsets, values } }
}

impl Shop {
    /// `exact_share_min` decides which terms have only Bloom planes: those of a smaller share of the items.
    fn new(rescore: ivf::Rescore, exact_share_min: f64) -> Self {
        let mut dice = Dice(7);
        let centres: Vec<f32> = (0..CENTRES * DIMENSION).map(|_| dice.gauss()).collect();
        let mut around = |row: usize| -> Vec<f32> {
            let centre = &centres[row % CENTRES * DIMENSION..][..DIMENSION];
            centre.iter().map(|x| x + 0.4 * dice.gauss()).collect()
        };
        let rows: Vec<f32> = (0..ITEMS).flat_map(&mut around).collect();
        let queries = (0..8).flat_map(|n| around(n * 5)).collect();
        let matrix = Matrix::new(&rows, DIMENSION).unwrap();
        let codes = if rescore == ivf::Rescore::None { CodeKind::None } else { CodeKind::Pq4 };
        let first_pass = FirstPass { codes, subspaces: 0 };
        let options = ivf::Options { lists: 160, iterations: 4, rescore, first_pass, ..ivf::Options::default() };
        let store = RowStore::from(matrix);
        let built = ivf::build(&store, &ivf::RowSurvey::of(&store).unwrap(), &options, &|_| ()).unwrap();
        Shop::of(&built, matrix, queries, exact_share_min)
    }

    fn of(built: &ivf::Built, rows: Matrix<'_>, queries: Vec<f32>, exact_share_min: f64) -> Self {
        let items = rows.rows();
        let index = ivf::Index::open(&built.in_memory(&rows.into(), "index").unwrap()).unwrap();

        // Independent columns with one of 2, 5 or 30 values per item, the region of the item, and many tags.
        let one_of = |sides: usize| move |dice: &mut Dice, _: usize| vec![dice.roll(sides).to_string()];
        let mut file = TensorFile::new();
        let columns = [
            texts("half", items, one_of(2)),
            texts("fifth", items, one_of(5)),
            texts("maker", items, one_of(30)),
            texts("region", items, |_, row| vec![(row % CENTRES / 4).to_string()]),
            texts("tag", items, |dice, _| (0..6).map(|_| dice.roll(80).to_string()).collect()),
            ItemColumn {
                name: "price".into(),
                filter: true,
                values: ItemValues::Floats((0..items).map(|row| (row * 7919 % 1000) as f64).collect()),
            },
        ];
        columns::encode(&columns, &built.order, &mut file).unwrap();
        let columns = Columns::open(&file.in_memory("columns").unwrap(), index.slots()).unwrap();
        let mut file = TensorFile::new();
        let (offsets, lengths) = (index.list_offsets(), index.list_lengths());
        let options = filter::Options { exact_share_min, ..filter::Options::default() };
        filter::encode(&columns, offsets, lengths, &options, &mut file).unwrap();
        let filter =
            filter::Index::open(&file.in_memory("filter").unwrap(), offsets, lengths, columns.terms()).unwrap();
        Shop { index, filter, columns, queries }
    }

    /// Rebuilds the planes of the filter.
    fn plane(&mut self, options: &filter::Options) {
        let (mut file, index) = (TensorFile::new(), &self.index);
        let (offsets, lengths) = (index.list_offsets(), index.list_lengths());
        filter::encode(&self.columns, offsets, lengths, options, &mut file).unwrap();
        let planes = file.in_memory("filter").unwrap();
        self.filter = filter::Index::open(&planes, offsets, lengths, self.columns.terms()).unwrap();
    }

    fn plan(&self, filter: &str) -> Plan {
        Plan::new(&filter::parse(filter).unwrap().canonical(), &self.columns, &self.filter, self.index.slots_max())
            .unwrap()
    }

    fn segment(&self) -> Segment<'_> {
        Segment { index: &self.index, filter: &self.filter, ids: None, tombstones: None, first_slot: 0 }
    }
}

/// Mean counters of searches with all vectors.
struct Mean(Vec<Counters>);

impl Sink for Mean {
    fn is_wanted(&mut self, _: usize) -> bool {
        true
    }

    fn found(&mut self, _: usize, found: Found<'_>) {
        self.0.push(found.counters);
    }
}

impl Mean {
    fn of(&self, count: impl FnMut(&Counters) -> u64) -> f64 {
        let total: u64 = self.0.iter().map(count).sum();
        total as f64 / self.0.len() as f64
    }

    /// Number of rounds of a search; earlier rounds scanned at most as many lists as the last one.
    fn rounds(&self) -> f64 {
        1.0 + self.of(|counters| counters.again)
    }
}

/// Filters of every kind: satisfiable, contradictory, and correlated with the embedding.
fn filters(dice: &mut Dice) -> String {
    let mut leaf = || match dice.roll(7) {
        0 => format!("half:{}", dice.roll(2)),
        1 => format!("fifth:{}", dice.roll(5)),
        2 => format!("maker:{}", dice.roll(30)),
        3 => format!("region:{}", dice.roll(10)),
        4 => format!("tag:{}", dice.roll(80)),
        5 => format!("price < {}", dice.roll(1000)),
        _ => format!("price > {}", dice.roll(1000)),
    };
    let leaves: Vec<String> = (0..4).map(|_| leaf()).collect();
    match dice.roll(6) {
        0 => leaves[0].clone(),
        1 => format!("{} AND {}", leaves[0], leaves[1]),
        2 => format!("NOT {} AND NOT {}", leaves[0], leaves[1]),
        3 => format!("({} OR {}) AND {}", leaves[0], leaves[1], leaves[2]),
        4 => format!("{} AND NOT ({} OR {})", leaves[0], leaves[1], leaves[2]),
        _ => leaves.join(" AND "),
    }
}

#[test]
fn expected_gains_match_the_scanned_lists() {
    let mut dice = Dice(9);
    // An item scores about as its list does.
    let mut pair = || {
        let list = dice.gauss();
        (list, list + 0.4 * dice.gauss())
    };
    let sample: Vec<(f32, f32)> = (0..4096).map(|_| pair()).collect();
    let margins = ResidualQuantiles::of(&sample);
    let (mut scratch, mut missed) = (Scratch::default(), Vec::new());
    for (rescore, exact_share_min) in [(ivf::Rescore::F16, 0.01), (ivf::Rescore::None, 0.01), (ivf::Rescore::F16, 1.0)]
    {
        let shop = Shop::new(rescore, exact_share_min);
        let segments = [shop.segment()];
        let catalogue = Catalogue { segments: &segments, probes_max: shop.index.lists() };
        let contradictions = [
            "half:0 AND half:1",
            "fifth:1 AND fifth:2 AND half:0",
            "price < 300 AND price > 500",
            "maker:1 AND maker:2",
        ];
        let texts = contradictions.map(String::from).into_iter().chain((0..80).map(|_| filters(&mut dice)));
        for (number, text) in texts.enumerate() {
            let plan = shop.plan(&text);
            let k0 = [10, 100, 700][number % 3];
            let ending = (number % 2 == 0).then_some(Ending { margins: &margins, recall: 0.98, left: 0.02 });
            let probes = [4, 12][number / 3 % 2];
            let query = |vector| Query {
                vector,
                search: SearchPlan {
                    k: k0,
                    k0,
                    by_codes: None,
                    probes,
                    exact: number % 17 == 16,
                    ..SearchPlan::default()
                },
                plan: &plan,
                beside: &[],
                excluded: &[],
                ending,
            };
            let queries: Vec<Query<'_>> = shop.queries.chunks_exact(DIMENSION).map(query).collect();
            let mut mean = Mean(Vec::new());
            catalogue.search(&queries, &mut scratch, &mut mean);
            let expected = catalogue.expected(&query(&[]));
            let rounds = mean.rounds();
            for (what, expected, counted) in [
                ("items", expected.items, mean.of(|counters| counters.items)),
                ("survivors", expected.survivors, mean.of(|counters| counters.survivors)),
            ] {
                let reported =
                    format!("`{text}`, {number}: {what} {expected:.0}, counted {counted:.0} in {rounds:.1} rounds");
                let slack = SLACK * ITEMS as f64;
                if expected * LOW_MAX + slack < counted || expected > counted * rounds * HIGH_MAX + slack {
                    missed.push(reported);
                }
            }
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

/// Results of each query.
#[derive(Default)]
struct All(Vec<(usize, Vec<(f32, Slot)>)>);

impl Sink for All {
    fn is_wanted(&mut self, _: usize) -> bool {
        true
    }

    fn found(&mut self, n: usize, found: Found<'_>) {
        self.0.push((n, found.candidates.clone()));
    }
}

/// Sink that cancels a query after a number of termination checks.
struct CancelAfter {
    looks: usize,
    most: usize,
    found: usize,
}

impl Sink for CancelAfter {
    fn is_wanted(&mut self, _: usize) -> bool {
        self.looks += 1;
        self.looks <= self.most
    }

    fn found(&mut self, _: usize, _: Found<'_>) {
        self.found += 1;
    }
}

#[test]
fn cancelled_exact_searches_end_without_results() {
    let shop = Shop::new(ivf::Rescore::F16, 0.01);
    let segments = [shop.segment()];
    let catalogue = Catalogue { segments: &segments, probes_max: shop.index.lists() };
    let plan = shop.plan("price < 900");
    let search = SearchPlan { k: 10, k0: 10, exact: true, ..SearchPlan::default() };
    let vector = &shop.queries[..DIMENSION];
    let query = Query { vector, search, plan: &plan, beside: &[], excluded: &[], ending: None };
    let run = |most| {
        let mut left = CancelAfter { looks: 0, most, found: 0 };
        catalogue.search(&[query], &mut Scratch::default(), &mut left);
        (left.looks, left.found)
    };
    // Once before, once every few hundred of all items, once behind.
    let (looks, found) = run(usize::MAX);
    assert_eq!((looks, found), (ITEMS / CHECK_EVERY + 2, 1));
    for most in [0, 1, 5, looks - 1] {
        let (looked, found) = run(most);
        assert_eq!(found, 0);
        assert!(looked <= most + 2, "{looked} looks of {most}");
    }
}

fn tombstones(shop: &Shop, are: impl Fn(u32) -> bool) -> Tombstones {
    let mut tombstones = Tombstones::default();
    shop.index.filled_slots().filter(|slot| are(slot.0)).for_each(|slot| {
        tombstones.insert(slot);
    });
    tombstones
}

#[test]
fn codes_that_select_all_give_the_answers_of_int8_rows() {
    let shop = Shop::new(ivf::Rescore::F16, 0.01);
    // Later items, in the lists of the first ones and in a single list, both without codes.
    let mut dice = Dice(11);
    let (later, assigner) =
        ((0..600 * DIMENSION).map(|_| dice.gauss()).collect::<Vec<f32>>(), Assigner::new(&shop.index));
    let later = Matrix::new(&later, DIMENSION).unwrap();
    let listed = Shop::of(&assigner.arrange(later, assigner.assign(later)).unwrap(), later, Vec::new(), 0.01);
    let one = ivf::Lists { centroids: vec![0.0; DIMENSION], of_rows: vec![0; 600], nearest: false };
    let survey = ivf::RowSurvey::of(&later.into()).unwrap();
    let single = ivf::from_lists(&survey, one, ivf::Rescore::F16).unwrap();
    let single = Shop::of(&single, later, Vec::new(), 0.01);
    let tombstones = tombstones(&shop, |slot| slot % 9 == 0);
    let mut scratch = Scratch::default();
    for (beside, tombstones) in
        [(None, None), (None, Some(&tombstones)), (Some(&listed), None), (Some(&single), Some(&tombstones))]
    {
        let first = Segment { tombstones, ..shop.segment() };
        let segments: Vec<Segment<'_>> = std::iter::once(first)
            .chain(beside.map(|of| Segment { first_slot: shop.index.slots() as u32, ..of.segment() }))
            .collect();
        let catalogue = Catalogue { segments: &segments, probes_max: shop.index.lists() };
        for filter in ["", "fifth:2", "NOT half:0 AND price < 500"] {
            let plan = shop.plan(filter);
            let plans: Vec<Plan> = beside.iter().map(|of| of.plan(filter)).collect();
            let excluded: Vec<Slot> = (0..40).map(|n| Slot(n * 37)).collect();
            for (probes, excluded) in [(3, &[][..]), (90, &excluded[..])] {
                let query = |vector, k0: usize, by_codes| Query {
                    vector,
                    search: SearchPlan { k: 10, k0, by_codes, probes, ..SearchPlan::default() },
                    plan: &plan,
                    beside: &plans,
                    excluded,
                    ending: None,
                };
                let vectors: Vec<&[f32]> = shop.queries.chunks_exact(DIMENSION).collect();
                let mut ask = |k0, by_codes: &dyn Fn(usize) -> Option<usize>, together: usize| {
                    let queries: Vec<Query<'_>> =
                        vectors.iter().enumerate().map(|(n, vector)| query(vector, k0, by_codes(n))).collect();
                    let mut all = Vec::new();
                    for queries in queries.chunks(together) {
                        let mut found = All::default();
                        catalogue.search(queries, &mut scratch, &mut found);
                        found.0.sort_by_key(|(n, _)| *n);
                        all.extend(found.0.into_iter().map(|(_, found)| found));
                    }
                    all
                };
                // Enough are selected that int8 scores omit none.
                let most = ITEMS + 600;
                let mut expected = ask(most, &|_| None, 1);
                expected.iter_mut().for_each(|found| found.truncate(10));
                for together in [1, 8] {
                    let reported = format!("`{filter}` {probes} {together}");
                    let by_codes = Some(most);
                    assert_eq!(ask(10, &|_| by_codes, together), expected, "{reported}");
                    // Some queries by codes and some by rows.
                    let either = ask(10, &|n| by_codes.filter(|_| n.is_multiple_of(2)), together);
                    let of_codes = |all: &[Vec<(f32, Slot)>]| all.iter().step_by(2).cloned().collect::<Vec<_>>();
                    assert_eq!(of_codes(&either), of_codes(&expected), "{reported}");
                }
            }
        }
    }
}

#[test]
fn few_selected_by_codes_are_near_and_eligible() {
    let shop = Shop::new(ivf::Rescore::F16, 0.01);
    let tombstones = tombstones(&shop, |slot| slot % 4 == 1);
    let segments = [Segment { tombstones: Some(&tombstones), ..shop.segment() }];
    let catalogue = Catalogue { segments: &segments, probes_max: shop.index.lists() };
    let (plan, mut scratch) = (shop.plan(""), Scratch::default());
    let excluded: Vec<Slot> = (0..500).map(|n| Slot(n * 2)).collect();
    let query = |vector, by_codes, exact| Query {
        vector,
        search: SearchPlan { k: 20, k0: 20, by_codes, probes: 160, exact, ..SearchPlan::default() },
        plan: &plan,
        beside: &[],
        excluded: &excluded,
        ending: None,
    };
    let (mut hits, mut wanted) = (0, 0);
    for vector in shop.queries.chunks_exact(DIMENSION) {
        let (mut found, mut exact) = (All::default(), All::default());
        catalogue.search(&[query(vector, Some(100), false)], &mut scratch, &mut found);
        catalogue.search(&[query(vector, None, true)], &mut scratch, &mut exact);
        let (found, exact) = (&found.0[0].1, &exact.0[0].1);
        assert_eq!(found.len(), 20);
        assert!(found.iter().all(|(_, slot)| !tombstones.contains(*slot) && excluded.binary_search(slot).is_err()));
        hits += found.iter().filter(|of| exact.contains(of)).count();
        wanted += exact.len();
    }
    assert!(hits * 20 >= wanted * 19, "{hits} of {wanted}");
}

/// Number of random searches of [`a_search_returns_k_results_or_all_eligible_items`].
const SEARCHES: usize = 10_000;

#[test]
fn a_search_returns_k_results_or_all_eligible_items() {
    let mut dice = Dice(9);
    let mut pair = || {
        let list = dice.gauss();
        (list, list + 0.4 * dice.gauss())
    };
    let margins = ResidualQuantiles::of(&(0..4096).map(|_| pair()).collect::<Vec<_>>());
    let weak = filter::Options {
        exact_share_min: 1.0,
        posting_share_max: 0.0,
        hashes: 1,
        bits_per_term: 2,
        ..filter::Options::default()
    };
    let usual = filter::Options { exact_share_min: 1.0, posting_share_max: 0.0, ..filter::Options::default() };
    let (mut scratch, mut short) = (Scratch::default(), Vec::new());
    // Bitmaps with many false positives, with few, and with none.
    for options in [weak, usual, filter::Options::default()] {
        let mut shop = Shop::new(ivf::Rescore::F16, 1.0);
        shop.plane(&options);
        // Later items in the lists of the first ones.
        let (later, assigner) =
            ((0..600 * DIMENSION).map(|_| dice.gauss()).collect::<Vec<f32>>(), Assigner::new(&shop.index));
        let later = Matrix::new(&later, DIMENSION).unwrap();
        let later = Shop::of(&assigner.arrange(later, assigner.assign(later)).unwrap(), later, Vec::new(), 0.01);
        let mut done = 0;
        while done < SEARCHES / 3 {
            let text = if dice.roll(8) == 0 { String::new() } else { filters(&mut dice) };
            let (plan, beside) = (shop.plan(&text), [later.plan(&text)]);
            let tombstones = tombstones(&shop, |slot| slot % 7 == 1);
            let tombstones = (dice.roll(2) == 0).then_some(&tombstones);
            let first = Segment { tombstones, ..shop.segment() };
            let second = Segment { first_slot: shop.index.slots() as u32, ..later.segment() };
            let segments = [first, second];
            let segments = &segments[..1 + dice.roll(2)];
            let catalogue = Catalogue { segments, probes_max: shop.index.lists() };
            let beside = &beside[..segments.len() - 1];
            let excluded: Vec<Slot> = (0..dice.roll(3) as u32 * 200).map(|n| Slot(n * 11)).collect();
            let holds = |segment: &Segment<'_>, plan: &Plan| {
                let is_there = |slot: &Slot| {
                    let name = segment.member().name(*slot);
                    !segment.is_deleted(*slot) && plan.passes(*slot) && excluded.binary_search(&name).is_err()
                };
                segment.index.filled_slots().filter(is_there).count()
            };
            let plans = std::iter::once(&plan).chain(beside);
            let eligible: usize = segments.iter().zip(plans).map(|(segment, plan)| holds(segment, plan)).sum();
            let k = [1, 10, 50, 100, 700, 3000][dice.roll(6)];
            let k0 = k * [1, 1, 4][dice.roll(3)];
            let recall = [None, Some(0.5), Some(0.9), Some(0.98)][dice.roll(4)];
            let ending = recall.map(|recall| Ending { margins: &margins, recall, left: 1.0 - recall });
            let by_codes = [None, Some(2 * k0), Some(10 * k0)][dice.roll(3)];
            let probes = [1, 4, 12, 40][dice.roll(4)];
            let query = |vector| Query {
                vector,
                search: SearchPlan { k, k0, by_codes, probes, ..SearchPlan::default() },
                plan: &plan,
                beside,
                excluded: &excluded,
                ending,
            };
            let queries: Vec<Query<'_>> = shop.queries.chunks_exact(DIMENSION).map(query).collect();
            let mut found = All::default();
            catalogue.search(&queries, &mut scratch, &mut found);
            done += queries.len();
            let least = found.0.iter().map(|(_, found)| found.len()).min().unwrap();
            if least < k.min(eligible) {
                short.push(format!(
                    "`{text}`, exact {}: {least} of {k} found, {eligible} eligible; K0 {k0}, {probes} lists, \
                     recall {recall:?}, codes select {by_codes:?}, {} segments",
                    plan.is_exact(),
                    segments.len()
                ));
            }
        }
    }
    assert!(short.is_empty(), "{} searches:\n{}", short.len(), short.join("\n"));
}
