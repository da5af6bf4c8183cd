//! Compares every sharding type with the unsharded table, for rows in memory and for fetched rows.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::place::Sharding;
use super::shard::Cut;
use super::shard::input::{Distinct, FeatureBags, distribute};
use super::tiers::{Fetched, Pending, RowSource, RowState, Source};
use super::*;
use sterling_core::error::{Kind, Result};

/// Simulated remote source over rows in memory. Checks that each row is requested once; some rows are missing, and some
/// arrive late.
#[derive(Debug)]
struct SlowSource {
    table: Table,
    unknown: BTreeSet<u64>,
    degraded: BTreeSet<u64>,
    requested: Mutex<Vec<u64>>,
}

struct Answer(Fetched);

impl Pending for Answer {
    fn wait(self: Box<Self>) -> Result<Fetched> {
        Ok(self.0)
    }
}

impl RowSource for SlowSource {
    fn row_bytes(&self) -> usize {
        self.table.spec().row_bytes().unwrap()
    }

    fn rows(&self) -> u64 {
        self.table.rows()
    }

    fn begin(&self, rows: Vec<u64>, _: &Lookup) -> Box<dyn Pending + '_> {
        assert!(rows.windows(2).all(|w| w[0] < w[1]), "rows come sorted and once: {rows:?}");
        self.requested.lock().unwrap().extend(&rows);
        let state = |row: &u64| match () {
            _ if self.unknown.contains(row) => RowState::Unknown,
            _ if self.degraded.contains(row) => RowState::Degraded,
            _ => RowState::Hit,
        };
        let states: Vec<RowState> = rows.iter().map(state).collect();
        let held = self.table.host_rows().unwrap();
        let bytes = rows.iter().flat_map(|row| held.row(*row as usize).to_vec()).collect();
        Box::new(Answer(Fetched { bytes, states }))
    }
}

fn away(table: &Table, unknown: &[u64], degraded: &[u64]) -> Arc<SlowSource> {
    let (unknown, degraded) = (unknown.iter().copied().collect(), degraded.iter().copied().collect());
    Arc::new(SlowSource { table: table.clone(), unknown, degraded, requested: Mutex::default() })
}

/// Turns a shard in memory into one whose rows are fetched.
fn fetched_shard(table: &Table, shard: Shard, degraded: &[u64]) -> Shard {
    let Source::Host(bytes) = shard.source else { panic!("expected rows in memory") };
    let (rows, width) = (shard.rows.end - shard.rows.start, shard.columns.len());
    let part = Table::host(TableSpec { rows, width, unseen: Unseen::Zero, ..table.spec().clone() }, bytes).unwrap();
    Shard { source: Source::Fetched(away(&part, &[], degraded)), ..shard }
}

fn fetched(source: &Arc<SlowSource>) -> Table {
    Table::fetched(source.table.spec().clone(), source.clone()).unwrap()
}

/// Returns ranges of `len` at edges that are multiples of `step`.
fn ranges(len: usize, parts: usize, step: usize) -> Vec<Range<usize>> {
    let parts = parts.clamp(1, len / step);
    let edge = |i: usize| if i == parts { len } else { len * i / parts / step * step };
    (0..parts).map(|i| edge(i)..edge(i + 1)).collect()
}

/// Returns the shards of a sharding type over `parts` devices.
fn cuts(spec: &TableSpec, sharding: Sharding, parts: usize) -> Vec<Cut> {
    let rows = |parts| ranges(spec.rows as usize, parts, 1);
    let columns = |parts| ranges(spec.width, parts, 4);
    let (rows, columns, copies) = match sharding {
        Sharding::TableWise => (rows(1), columns(1), 1),
        Sharding::DataParallel => (rows(1), columns(1), parts),
        Sharding::ColumnWise => (rows(1), columns(parts), 1),
        Sharding::RowWise | Sharding::TableRowWise => (rows(parts), columns(1), 1),
        Sharding::Grid => (rows(parts), columns(2), 1),
    };
    let mut made = Vec::new();
    for copy in 0..copies {
        for columns in &columns {
            for rows in &rows {
                let device = format!("d{}", made.len());
                let rows = rows.start as u64..rows.end as u64;
                made.push(Cut { rows, columns: columns.clone(), copy, device });
            }
        }
    }
    made
}

#[derive(Clone, Debug)]
struct Problem {
    format: RowFormat,
    unseen: Unseen,
    width: usize,
    values: Vec<f32>,
    lengths: Vec<i64>,
    ids: Vec<i64>,
    weights: Option<Vec<f32>>,
    poolings: [Pooling; 2],
}

fn problems() -> impl Strategy<Value = Problem> {
    let shape =
        (1usize..40, 1usize..20, 0usize..9, any::<bool>(), 0usize..RowFormat::ALL.len(), 0u8..3, any::<[bool; 2]>());
    shape.prop_flat_map(|(rows, quarters, examples, weighted, format, unseen, means)| {
        let width = quarters * 4;
        let lengths = prop::collection::vec(0i64..7, 2 * examples);
        let values = prop::collection::vec(-4.0f32..4.0, rows * width);
        (lengths, values).prop_flat_map(move |(lengths, values)| {
            let ids = lengths.iter().sum::<i64>() as usize;
            let weights = prop::collection::vec(-2.0f32..2.0, ids);
            let unseen = [Unseen::Zero, Unseen::Hash, Unseen::Row(rows as u64 / 2)][usize::from(unseen)];
            (prop::collection::vec(-3i64..rows as i64 + 3, ids), weights).prop_map(move |(ids, weights)| Problem {
                format: RowFormat::ALL[format],
                unseen,
                width,
                values: values.clone(),
                lengths: lengths.clone(),
                ids,
                weights: weighted.then_some(weights),
                poolings: means.map(|m| if m { Pooling::Mean } else { Pooling::Sum }),
            })
        })
    })
}

impl Problem {
    fn table(&self) -> Table {
        Table::from_f32("t", self.width, &self.values, self.format, self.unseen).unwrap()
    }

    fn ids(&self) -> KeyedJaggedTensor {
        KeyedJaggedTensor::from_lengths(["a", "b"], self.ids.clone(), &self.lengths, self.weights.clone()).unwrap()
    }

    /// Returns two features that share the table.
    fn bags(&self) -> [BagConfig; 2] {
        let bag = |feature: &str, pooling| BagConfig { feature: feature.into(), table: "t".into(), pooling };
        [bag("b", self.poolings[0]), bag("a", self.poolings[1])]
    }

    fn check(&self, got: &KeyedTensor, expected: &KeyedTensor) -> std::result::Result<(), TestCaseError> {
        prop_assert_eq!(got.keys(), expected.keys());
        prop_assert_eq!(got.examples(), expected.examples());
        prop_assert_eq!(got.values().len(), expected.values().len());
        for (got, expected) in got.values().iter().zip(expected.values()) {
            prop_assert_eq!(got.to_bits(), expected.to_bits(), "{} for {}", got, expected);
        }
        Ok(())
    }
}

proptest! {
    #[test]
    fn every_sharding_type_equals_the_unsharded_table(
        problem in problems(),
        sharding in prop::sample::select(Sharding::ALL.to_vec()),
        parts in 1usize..5,
        remote in prop::collection::vec(any::<bool>(), 8),
    ) {
        let table = problem.table();
        let ids = problem.ids();
        let complete = EmbeddingBagCollection::new(vec![Arc::new(table.clone())], &problem.bags()).unwrap();
        let (expected, expected_report) = complete.lookup(&ids, &Lookup::default()).unwrap();

        let cuts = cuts(table.spec(), sharding, parts);
        let shards = cuts.iter().zip(remote.iter().cycle()).map(|(cut, remote)| {
            let part = cut.take(&table).unwrap();
            if *remote { fetched_shard(&table, part, &[]) } else { part }
        });
        let sharded = Table::of_shards(table.spec().clone(), sharding, shards.collect()).unwrap();
        let sharded = Arc::new(sharded);
        let collection = EmbeddingBagCollection::new(vec![sharded.clone()], &problem.bags()).unwrap();
        let (got, report) = collection.lookup(&ids, &Lookup::default()).unwrap();
        problem.check(&got, &expected)?;
        prop_assert_eq!(&report, &expected_report);

        // An unsharded table that is fetched takes the same path.
        let source = fetched(&away(&table, &[], &[]));
        let complete = EmbeddingBagCollection::new(vec![Arc::new(source)], &problem.bags()).unwrap();
        let (got, report) = complete.lookup(&ids, &Lookup::default()).unwrap();
        problem.check(&got, &expected)?;
        prop_assert_eq!(&report, &expected_report);

        // Without pooling, each value comes from one shard unchanged, so nothing is summed or rounded.
        let sequence = [SequenceConfig { feature: "a".into(), table: "t".into() }];
        let complete = EmbeddingCollection::new(vec![Arc::new(table)], &sequence).unwrap();
        let sharded = EmbeddingCollection::new(vec![sharded], &sequence).unwrap();
        let terms = Lookup::default();
        prop_assert_eq!(sharded.lookup(&ids, &terms).unwrap(), complete.lookup(&ids, &terms).unwrap());
    }

    #[test]
    fn requests_to_shards_hold_the_rows_in_id_order_without_repetition(problem in problems(), copies in 1usize..4) {
        let table = problem.table();
        let cuts = cuts(table.spec(), Sharding::DataParallel, copies);
        // A copy that is fetched completely is distributed like any other.
        let shards = cuts.iter().map(|cut| fetched_shard(&table, cut.take(&table).unwrap(), &[]));
        let copied = Table::of_shards(table.spec().clone(), Sharding::DataParallel, shards.collect()).unwrap();
        let ids = problem.ids();
        let bags = ["b", "a"].map(|key| ids.get(key).unwrap()).map(|feature| FeatureBags {
            table: 0,
            ids: feature.values(),
            offsets: feature.offsets().into(),
            weights: feature.weights(),
            mean: false,
            examples: None,
        });
        let input = distribute(&[Arc::new(copied)], bags.into(), ids.stride(), &mut vec![TableCounts::default()]);
        let mut found: [Vec<i64>; 2] = Default::default();
        for question in &input.questions[0] {
            let Distinct { rows, places } = question.distinct();
            prop_assert!(rows.windows(2).all(|w| w[0] < w[1]));
            prop_assert_eq!(places.len(), question.rows.len());
            for (place, row) in places.iter().zip(&question.rows) {
                prop_assert_eq!(*row, usize::try_from(*place).map_or(-1, |place| rows[place] as i64));
            }
            for (reading, found) in question.readings.iter().zip(&mut found) {
                found.extend(&question.rows[reading.rows.clone()]);
            }
        }
        for (key, found) in ["b", "a"].into_iter().zip(found) {
            let feature = ids.get(key).unwrap();
            let row = |id: &i64| table.resolve(*id).0.map_or(-1, |row| row as i64);
            prop_assert_eq!(found, feature.values().iter().map(row).collect::<Vec<_>>());
        }
    }
}

fn numbered(rows: usize) -> Table {
    let values: Vec<f32> = (0..rows * 4).map(|i| (i / 4) as f32).collect();
    Table::from_f32("t", 4, &values, RowFormat::F32, Unseen::Zero).unwrap()
}

fn summed(table: Table, ids: &[i64], terms: &Lookup) -> Result<(f32, TableCounts)> {
    let bag = BagConfig { feature: "f".into(), table: "t".into(), pooling: Pooling::Sum };
    let collection = EmbeddingBagCollection::new(vec![Arc::new(table)], &[bag])?;
    let ids = KeyedJaggedTensor::from_lengths(["f"], ids.to_vec(), &[ids.len() as i64], None)?;
    let (out, report) = collection.lookup(&ids, terms)?;
    Ok((out.values()[0], report[0].clone()))
}

#[test]
fn rows_of_a_half_remote_table_are_requested_once_and_counted() {
    let table = numbered(10);
    let source = away(&table, &[6], &[7, 8]);
    let halves = [table.clone(), fetched(&source)];
    let shard = |part: usize| {
        let rows = part as u64 * 5..part as u64 * 5 + 5;
        let cut = Cut { rows, columns: 0..4, copy: 0, device: format!("d{part}") };
        cut.take(&halves[part]).unwrap()
    };
    let sharded = Table::of_shards(table.spec().clone(), Sharding::RowWise, vec![shard(0), shard(1)]).unwrap();
    let ids = [1, 9, 9, 6, 7, 7, 8, 2, 40, 9];
    let lenient = Lookup { on_degraded: OnDegraded::DefaultRows, ..Lookup::default() };
    let (sum, counts) = summed(sharded.clone(), &ids, &lenient).unwrap();
    assert_eq!(sum, (1 + 9 + 9 + 2 + 9) as f32);
    assert_eq!((counts.ids, counts.unseen, counts.unknown, counts.degraded), (10, 1, 1, 3));
    assert_eq!(counts.degraded_of, [3]);
    assert_eq!(*source.requested.lock().unwrap(), [6, 7, 8, 9], "each row once, none of the other shard");

    let strict = Lookup { on_degraded: OnDegraded::Fail, ..Lookup::default() };
    let error = summed(sharded.clone(), &ids, &strict).unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable);
    assert!(error.to_string().contains("table `t`, shard on `d1`: 2 of 4 rows"), "{error}");
    let late = Lookup { deadline: Some(Instant::now() - Duration::from_millis(1)), ..strict.clone() };
    assert_eq!(summed(sharded.clone(), &ids, &late).unwrap_err().kind(), Kind::DeadlineExceeded);
    assert_eq!(summed(sharded, &[1, 9, 6], &strict).unwrap().0, 10.0, "an unknown row is no failure");
}

#[test]
fn a_row_with_differing_column_partitions_counts_once() {
    let cut = |columns: Range<usize>| Cut { rows: 0..3, columns, copy: 0, device: "d".into() };
    let wide = Table::from_f32("t", 8, &[1.0; 24], RowFormat::F32, Unseen::Zero).unwrap();
    let shard =
        |columns: Range<usize>, degraded: &[u64]| fetched_shard(&wide, cut(columns).take(&wide).unwrap(), degraded);
    let shards = vec![shard(0..4, &[1]), shard(4..8, &[1, 2])];
    let sharded = Table::of_shards(wide.spec().clone(), Sharding::ColumnWise, shards).unwrap();
    let lenient = Lookup { on_degraded: OnDegraded::DefaultRows, ..Lookup::default() };
    let (_, counts) = summed(sharded.clone(), &[0, 1, 2, 2], &lenient).unwrap();
    assert_eq!(counts.degraded, 3);
    let bag = BagConfig { feature: "f".into(), table: "t".into(), pooling: Pooling::Sum };
    let collection = EmbeddingBagCollection::new(vec![Arc::new(sharded)], &[bag]).unwrap();
    let ids = KeyedJaggedTensor::from_lengths(["f"], vec![0, 1, 2, 2, 0], &[2, 0, 2, 1], None).unwrap();
    assert_eq!(collection.lookup(&ids, &lenient).unwrap().1[0].degraded_of, [1, 0, 2, 0], "each example its own");
}

#[test]
fn a_row_that_is_late_in_some_columns_is_missing_in_all() {
    let values: Vec<f32> = (0..24).map(|n| (n / 8 + 1) as f32).collect();
    let cut = |columns: Range<usize>, rows: Range<u64>| Cut { rows, columns, copy: 0, device: "d".into() };
    let ids = KeyedJaggedTensor::from_lengths(["f"], vec![0, 1, 2, 1], &[2, 2], None).unwrap();
    let lenient = Lookup { on_degraded: OnDegraded::DefaultRows, ..Lookup::default() };
    for format in [RowFormat::F32, RowFormat::Int8] {
        let wide = Table::from_f32("t", 8, &values, format, Unseen::Zero).unwrap();
        let here = |columns: Range<usize>| cut(columns, 0..3).take(&wide).unwrap();
        let away = |columns: Range<usize>, rows: Range<u64>, degraded: &[u64]| {
            fetched_shard(&wide, cut(columns, rows).take(&wide).unwrap(), degraded)
        };
        let complete = fetched_shard(&wide, here(0..8), &[1]);
        for pooling in [Pooling::Sum, Pooling::Mean] {
            let pooled = |sharding, shards: Vec<Shard>| {
                let table = Table::of_shards(wide.spec().clone(), sharding, shards).unwrap();
                let bag = BagConfig { feature: "f".into(), table: "t".into(), pooling };
                let collection = EmbeddingBagCollection::new(vec![Arc::new(table)], &[bag]).unwrap();
                let (pooled, counts) = collection.lookup(&ids, &lenient).unwrap();
                (pooled.values().to_vec(), counts[0].degraded)
            };
            let expected = pooled(Sharding::TableWise, vec![complete.clone()]);
            for (sharding, shards) in [
                (Sharding::ColumnWise, vec![away(0..4, 0..3, &[1]), away(4..8, 0..3, &[])]),
                (Sharding::ColumnWise, vec![here(0..4), away(4..8, 0..3, &[1])]),
                (
                    Sharding::Grid,
                    vec![away(0..4, 0..2, &[1]), away(4..8, 0..2, &[]), away(0..4, 2..3, &[]), away(4..8, 2..3, &[])],
                ),
            ] {
                assert_eq!(pooled(sharding, shards), expected, "{sharding:?} {pooling:?} {}", format.name());
            }
        }
    }
}

#[test]
fn columns_of_fetched_rows_are_those_of_the_table() {
    let values: Vec<f32> = (0..24).map(|i| (i * i % 37) as f32).collect();
    let ids = KeyedJaggedTensor::from_lengths(["f"], vec![2, 0, 2, 1], &[3, 1], None).unwrap();
    let bags = [BagConfig { feature: "f".into(), table: "t".into(), pooling: Pooling::Sum }];
    for format in RowFormat::ALL {
        let table = Table::from_f32("t", 8, &values, format, Unseen::Zero).unwrap();
        let there = fetched(&away(&table, &[], &[]));
        let cuts = [0..4, 4..8].map(|columns| Cut { rows: 0..3, columns, copy: 0, device: "d".into() });
        let sharded = Arc::new(there.cut(Sharding::ColumnWise, &cuts).unwrap());
        let complete = EmbeddingBagCollection::new(vec![Arc::new(table.clone())], &bags).unwrap();
        let parts = EmbeddingBagCollection::new(vec![sharded.clone()], &bags).unwrap();
        let lookup = Lookup::default();
        assert_eq!(parts.lookup(&ids, &lookup).unwrap().0.values(), complete.lookup(&ids, &lookup).unwrap().0.values());
        assert_eq!(cuts[0].take(&sharded).unwrap_err().kind(), Kind::Unsupported, "a table is cut once");
    }
}

#[test]
fn a_source_that_answers_other_rows_is_corrupt() {
    #[derive(Debug)]
    struct Short;
    impl RowSource for Short {
        fn row_bytes(&self) -> usize {
            16
        }
        fn rows(&self) -> u64 {
            3
        }
        fn begin(&self, _: Vec<u64>, _: &Lookup) -> Box<dyn Pending + '_> {
            Box::new(Answer(Fetched { bytes: vec![0; 16], states: vec![RowState::Hit] }))
        }
    }
    let table = Table::fetched(numbered(3).spec().clone(), Arc::new(Short)).unwrap();
    let error = summed(table, &[0, 1], &Lookup::default()).unwrap_err();
    assert_eq!(error.kind(), Kind::Corrupt);
    assert!(error.to_string().contains("the source returned 1 states and 16 bytes, expected 2 rows"), "{error}");
}

#[test]
fn shards_that_do_not_cover_their_table_are_rejected() {
    let table = Table::from_f32("t", 8, &[1.0; 80], RowFormat::Int4, Unseen::Zero).unwrap();
    let cut = |rows: Range<u64>, columns: Range<usize>| Cut { rows, columns, copy: 0, device: "d".into() };
    let error = |cuts: &[Cut]| table.cut(Sharding::Grid, cuts).unwrap_err().to_string();
    for (cuts, part) in [
        (vec![], "no shard holds row 0"),
        (vec![cut(0..9, 0..8)], "no shard holds row 9"),
        (vec![cut(1..10, 0..8)], "no shard holds row 0"),
        (vec![cut(0..6, 0..8), cut(5..10, 0..8)], "two shards hold row 5"),
        (vec![cut(0..10, 0..4)], "no shard holds column 4"),
        (vec![cut(0..10, 0..4), cut(0..10, 2..8)], "two shards hold column 2"),
        (vec![cut(0..11, 0..8)], "expected a range within 10 rows"),
        (vec![cut(3..3, 0..8)], "expected a range within 10 rows"),
        (vec![cut(0..10, 0..9)], "expected a range within 8 columns"),
        (vec![cut(0..10, 0..3), cut(0..10, 3..8)], "multiple of 2"),
        (vec![cut(0..10, 1..8)], "multiple of 2"),
        (vec![cut(0..10, 0..8), Cut { copy: 1, ..cut(0..5, 0..8) }], "no shard holds row 5"),
        (vec![Cut { copy: 1, ..cut(0..10, 0..8) }], "no shard holds row 0"),
    ] {
        let e = error(&cuts);
        assert!(e.contains(part) && e.contains("table `t`"), "{cuts:?}: {e}");
    }
    let source = cut(0..10, 0..8).take(&table).unwrap().source;
    let shard = Shard { rows: 0..5, columns: 0..8, copy: 0, device: "d".into(), source };
    let e = Table::of_shards(table.spec().clone(), Sharding::RowWise, vec![shard]).unwrap_err().to_string();
    assert!(e.contains("80 bytes, expected 40 (5 rows of 8 numbers in int4)"), "{e}");
    let with_values = table.with_vocabulary(Vocabulary::parse("a\nb").unwrap()).unwrap();
    assert!(with_values.cut(Sharding::TableWise, &[cut(0..10, 0..8)]).is_ok());
}

#[test]
fn configurations_with_unknown_names_are_rejected() {
    let complete = Arc::new(numbered(3));
    let bag = |table: &str| [BagConfig { feature: "f".into(), table: table.into(), pooling: Pooling::Sum }];
    assert!(EmbeddingBagCollection::new(vec![complete.clone()], &bag("u")).is_err());
    assert!(EmbeddingBagCollection::new(vec![complete.clone(), complete.clone()], &bag("t")).is_err());
    let collection = EmbeddingBagCollection::new(vec![complete], &bag("t")).unwrap();
    let ids = KeyedJaggedTensor::from_lengths(["g"], vec![1], &[1], None).unwrap();
    assert!(collection.lookup(&ids, &Lookup::default()).unwrap_err().to_string().contains("feature `f` is missing"));
}

#[test]
fn sequences_count_late_rows_by_example() {
    let source = away(&numbered(10), &[3], &[7, 8]);
    let sequence = [SequenceConfig { feature: "f".into(), table: "t".into() }];
    let collection = EmbeddingCollection::new(vec![Arc::new(fetched(&source))], &sequence).unwrap();
    let ids =
        KeyedJaggedTensor::from_lengths(["e", "f"], vec![1, 7, 7, 2, 7, 8, 3, 8], &[1, 0, 0, 1, 0, 6], None).unwrap();
    let lenient = Lookup { on_degraded: OnDegraded::DefaultRows, ..Lookup::default() };
    let (found, report) = collection.lookup(&ids, &lenient).unwrap();
    assert_eq!(report[0].degraded_of, [1, 0, 4]);
    assert_eq!((report[0].degraded_in(2), report[0].degraded_in(9), report[0].unknown), (4, 0, 1));
    let firsts: Vec<f32> = found[0].1.run(2).chunks(4).map(|row| row[0]).collect();
    assert_eq!(firsts, [0.0, 2.0, 0.0, 0.0, 0.0, 0.0]);
}

/// Returns two tables in memory, and the same with the second one sharded by rows, of which the upper half is remote.
fn near_and_mixed() -> ([EmbeddingBagCollection; 2], Arc<SlowSource>) {
    let first = Table::from_f32("s", 4, &[0.5; 40], RowFormat::F32, Unseen::Zero).unwrap();
    let second = numbered(10);
    let source = away(&second, &[], &[]);
    let cut = |rows: Range<u64>| Cut { rows, columns: 0..4, copy: 0, device: "d".into() };
    let shards = vec![cut(0..5).take(&second).unwrap(), cut(5..10).take(&fetched(&source)).unwrap()];
    let mixed = Table::of_shards(second.spec().clone(), Sharding::RowWise, shards).unwrap();
    let bag = |feature: &str, table: &str| BagConfig {
        feature: feature.into(),
        table: table.into(),
        pooling: if table == "s" { Pooling::Sum } else { Pooling::Mean },
    };
    let bags = [bag("a", "t"), bag("b", "s"), bag("b", "t")];
    let first = Arc::new(first);
    let collection = |second: Table| EmbeddingBagCollection::new(vec![first.clone(), Arc::new(second)], &bags).unwrap();
    ([collection(second), collection(mixed)], source)
}

#[test]
fn a_collection_mixes_complete_and_sharded_tables() {
    let ([near, mixed], source) = near_and_mixed();
    let ids = |a: &[i64], b: &[i64]| {
        let lengths = [a.len() as i64, 0, b.len() as i64, 1];
        KeyedJaggedTensor::from_lengths(["a", "b"], [a, b, &[2]].concat(), &lengths, None).unwrap()
    };
    let here = ids(&[0, 4, 40], &[1]);
    let away = ids(&[0, 9, 9], &[1, 6]);
    assert!(!near.needs_fetch(&away) && !mixed.needs_fetch(&here) && mixed.needs_fetch(&away));
    for batch in [here, away] {
        let started = mixed.begin(&batch, &Lookup::default()).unwrap();
        let requested = source.requested.lock().unwrap().clone();
        assert_eq!(requested.is_empty(), !mixed.needs_fetch(&batch), "remote rows are requested before `finish`");
        let (pooled, report) = started.finish().unwrap();
        assert_eq!((pooled.clone(), report), near.lookup(&batch, &Lookup::default()).unwrap());
    }
    assert_eq!(*source.requested.lock().unwrap(), [6, 9]);
}
