//! Every sharding type against the whole table, on memory and on rows that are fetched.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::embedding::lookup::{EmbeddingBagCollection, EmbeddingCollection, OnDegraded};
use crate::embedding::table::Unseen;
use crate::embedding::tiers::{Fetched, Pending, RowSource, RowState};
use crate::embedding::{RowFormat, Vocabulary};
use crate::error::Kind;

/// Rows of a table in memory, given out as a remote source does: each asked for once, some missing, some late.
#[derive(Debug)]
struct Away {
    table: Table,
    unknown: BTreeSet<u64>,
    degraded: BTreeSet<u64>,
    asked: Mutex<Vec<u64>>,
}

struct Answer(Fetched);

impl Pending for Answer {
    fn wait(self: Box<Self>) -> Result<Fetched> {
        Ok(self.0)
    }
}

impl RowSource for Away {
    fn row_bytes(&self) -> usize {
        self.table.spec().row_bytes().unwrap()
    }

    fn rows(&self) -> u64 {
        self.table.rows()
    }

    fn begin(&self, rows: Vec<u64>, _deadline: Option<Instant>) -> Box<dyn Pending + '_> {
        assert!(rows.windows(2).all(|w| w[0] < w[1]), "rows come sorted and once: {rows:?}");
        self.asked.lock().unwrap().extend(&rows);
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

fn away(table: &Table, unknown: &[u64], degraded: &[u64]) -> Arc<Away> {
    let (unknown, degraded) = (unknown.iter().copied().collect(), degraded.iter().copied().collect());
    Arc::new(Away { table: table.clone(), unknown, degraded, asked: Mutex::default() })
}

fn fetched(source: &Arc<Away>) -> Table {
    Table::fetched(source.table.spec().clone(), source.clone()).unwrap()
}

/// Ranges of `len` at edges that are multiples of `step`.
fn ranges(len: usize, parts: usize, step: usize) -> Vec<Range<usize>> {
    let parts = parts.clamp(1, len / step);
    let edge = |i: usize| if i == parts { len } else { len * i / parts / step * step };
    (0..parts).map(|i| edge(i)..edge(i + 1)).collect()
}

/// The cuts that a sharding type makes over `parts` devices.
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

    /// Two features that share the table.
    fn bags(&self) -> [BagConfig; 2] {
        let bag = |feature: &str, pooling| BagConfig { feature: feature.into(), table: "t".into(), pooling };
        [bag("b", self.poolings[0]), bag("a", self.poolings[1])]
    }

    fn check(&self, got: &KeyedTensor, expected: &KeyedTensor, exact: bool) -> std::result::Result<(), TestCaseError> {
        prop_assert_eq!(got.keys(), expected.keys());
        prop_assert_eq!(got.examples(), expected.examples());
        // Seven rows of at most 4 with weights of at most 2, and a few roundings of that sum.
        let bound = if exact { 0.0 } else { 64.0 * 8.0 * f32::EPSILON };
        for (got, expected) in got.values().iter().zip(expected.values()) {
            prop_assert!((got - expected).abs() <= bound, "{got} for {expected}");
        }
        Ok(())
    }
}

proptest! {
    #[test]
    fn every_sharding_type_answers_as_the_whole_table(
        problem in problems(),
        sharding in prop::sample::select(Sharding::ALL.to_vec()),
        parts in 1usize..5,
        remote in prop::collection::vec(any::<bool>(), 8),
    ) {
        let table = problem.table();
        let ids = problem.ids();
        let whole = EmbeddingBagCollection::new(vec![Arc::new(table.clone())], &problem.bags()).unwrap();
        let (expected, expected_report) = whole.lookup(&ids, &Lookup::default()).unwrap();

        let cuts = cuts(table.spec(), sharding, parts);
        let by_rows = cuts.iter().any(|c| c.rows.start > 0);
        let shards = cuts.iter().zip(remote.iter().cycle()).map(|(cut, remote)| {
            let part = cut.take(&table).unwrap();
            let part = if *remote { fetched(&away(&part, &[], &[])) } else { part };
            let Cut { rows, columns, copy, device } = cut.clone();
            Shard { rows, columns, copy, device, table: part }
        });
        let sharded = ShardedTable::new(table.spec().clone(), sharding, shards.collect()).unwrap();
        let sharded = Arc::new(sharded);
        let collection = ShardedEmbeddingBagCollection::new(vec![sharded.clone()], &problem.bags()).unwrap();
        let (got, report) = collection.lookup(&ids, &Lookup::default()).unwrap();
        problem.check(&got, &expected, !by_rows)?;
        prop_assert_eq!(&report, &expected_report);

        // A table in one piece that is fetched takes the same way.
        let source = fetched(&away(&table, &[], &[]));
        let whole = EmbeddingBagCollection::new(vec![Arc::new(source)], &problem.bags()).unwrap();
        let (got, report) = whole.lookup(&ids, &Lookup::default()).unwrap();
        problem.check(&got, &expected, true)?;
        prop_assert_eq!(&report, &expected_report);

        // Rows kept apart lie in one shard each: no sum, no rounding.
        let sequence = [SequenceConfig { feature: "a".into(), table: "t".into() }];
        let whole = EmbeddingCollection::new(vec![Arc::new(table)], &sequence).unwrap();
        let sharded = ShardedEmbeddingCollection::new(vec![sharded], &sequence).unwrap();
        let terms = Lookup::default();
        prop_assert_eq!(sharded.lookup(&ids, &terms).unwrap(), whole.lookup(&ids, &terms).unwrap());
    }

    #[test]
    fn questions_hold_each_id_once_where_its_row_is(problem in problems(), parts in 1usize..5) {
        let table = problem.table();
        let cuts = cuts(table.spec(), Sharding::RowWise, parts);
        let sharded = Arc::new(ShardedTable::cut(&table, Sharding::RowWise, &cuts).unwrap());
        let collection = ShardedEmbeddingBagCollection::new(vec![sharded], &problem.bags()).unwrap();
        let ids = problem.ids();
        let input = collection.input_dist(&ids).unwrap();
        let mut bags: Vec<Vec<u64>> = vec![Vec::new(); 2 * ids.stride()];
        for (question, cut) in input.questions(0).iter().zip(&cuts) {
            let Distinct { rows, places } = question.distinct();
            prop_assert!(rows.windows(2).all(|w| w[0] < w[1]));
            prop_assert!(places.iter().zip(question.rows()).all(|(p, r)| rows[*p as usize] == *r as u64));
            prop_assert!(rows.iter().all(|r| *r < cut.rows.end - cut.rows.start));
            for (bag, range) in question.offsets().windows(2).enumerate() {
                bags[bag].extend(question.rows()[range[0]..range[1]].iter().map(|r| *r as u64 + cut.rows.start));
            }
        }
        let features = ["b", "a"].map(|key| ids.get(key).unwrap());
        for (bag, mut got) in bags.into_iter().enumerate() {
            let feature = &features[bag / ids.stride()];
            let at = bag % ids.stride();
            let range = feature.offsets()[at] - feature.base()..feature.offsets()[at + 1] - feature.base();
            let mut expected: Vec<u64> = feature.values()[range].iter().filter_map(|id| table.resolve(*id).0).collect();
            got.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(got, expected);
        }
    }
}

fn numbered(rows: usize) -> Table {
    let values: Vec<f32> = (0..rows * 4).map(|i| (i / 4) as f32).collect();
    Table::from_f32("t", 4, &values, RowFormat::F32, Unseen::Zero).unwrap()
}

fn summed(table: ShardedTable, ids: &[i64], terms: &Lookup) -> Result<(f32, TableCounts)> {
    let bag = BagConfig { feature: "f".into(), table: "t".into(), pooling: Pooling::Sum };
    let collection = ShardedEmbeddingBagCollection::new(vec![Arc::new(table)], &[bag])?;
    let ids = KeyedJaggedTensor::from_lengths(["f"], ids.to_vec(), &[ids.len() as i64], None)?;
    let (out, report) = collection.lookup(&ids, terms)?;
    Ok((out.values()[0], report[0].clone()))
}

#[test]
fn half_of_a_table_away_is_asked_for_once_and_counted() {
    let table = numbered(10);
    let source = away(&table, &[6], &[7, 8]);
    let halves = [table.clone(), fetched(&source)];
    let shard = |part: usize| {
        let rows = part as u64 * 5..part as u64 * 5 + 5;
        let cut = Cut { rows: rows.clone(), columns: 0..4, copy: 0, device: format!("d{part}") };
        Shard { rows, columns: 0..4, copy: 0, device: cut.device.clone(), table: cut.take(&halves[part]).unwrap() }
    };
    let sharded = ShardedTable::new(table.spec().clone(), Sharding::RowWise, vec![shard(0), shard(1)]).unwrap();
    let ids = [1, 9, 9, 6, 7, 7, 8, 2, 40, 9];
    let lenient = Lookup { on_degraded: OnDegraded::DefaultRows, deadline: None };
    let (sum, counts) = summed(sharded.clone(), &ids, &lenient).unwrap();
    assert_eq!(sum, (1 + 9 + 9 + 2 + 9) as f32);
    assert_eq!((counts.ids, counts.unseen, counts.unknown, counts.degraded), (10, 1, 1, 3));
    assert_eq!(counts.degraded_of, [3]);
    assert_eq!(*source.asked.lock().unwrap(), [6, 7, 8, 9], "each row once, none of the other shard");

    let strict = Lookup { on_degraded: OnDegraded::Fail, deadline: None };
    let error = summed(sharded.clone(), &ids, &strict).unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable);
    assert!(error.to_string().contains("table `t`, shard on `d1`: 2 of 4 rows"), "{error}");
    let late = Lookup { deadline: Some(Instant::now() - Duration::from_millis(1)), ..strict };
    assert_eq!(summed(sharded.clone(), &ids, &late).unwrap_err().kind(), Kind::DeadlineExceeded);
    assert_eq!(summed(sharded, &[1, 9, 6], &strict).unwrap().0, 10.0, "an unknown row is no failure");
}

#[test]
fn columns_of_one_row_that_differ_in_fate_count_once() {
    let cut = |columns: Range<usize>| Cut { rows: 0..3, columns, copy: 0, device: "d".into() };
    let wide = Table::from_f32("t", 8, &[1.0; 24], RowFormat::F32, Unseen::Zero).unwrap();
    let shard = |columns: Range<usize>, degraded: &[u64]| {
        let part = cut(columns.clone()).take(&wide).unwrap();
        let table = fetched(&away(&part, &[], degraded));
        Shard { rows: 0..3, columns, copy: 0, device: "d".into(), table }
    };
    let shards = vec![shard(0..4, &[1]), shard(4..8, &[1, 2])];
    let sharded = ShardedTable::new(wide.spec().clone(), Sharding::ColumnWise, shards).unwrap();
    let lenient = Lookup { on_degraded: OnDegraded::DefaultRows, deadline: None };
    let (_, counts) = summed(sharded.clone(), &[0, 1, 2, 2], &lenient).unwrap();
    assert_eq!(counts.degraded, 3);
    let bag = BagConfig { feature: "f".into(), table: "t".into(), pooling: Pooling::Sum };
    let collection = ShardedEmbeddingBagCollection::new(vec![Arc::new(sharded)], &[bag]).unwrap();
    let ids = KeyedJaggedTensor::from_lengths(["f"], vec![0, 1, 2, 2, 0], &[2, 0, 2, 1], None).unwrap();
    assert_eq!(collection.lookup(&ids, &lenient).unwrap().1[0].degraded_of, [1, 0, 2, 0], "each example its own");
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
        let sharded = Arc::new(ShardedTable::cut(&there, Sharding::ColumnWise, &cuts).unwrap());
        let whole = EmbeddingBagCollection::new(vec![Arc::new(table.clone())], &bags).unwrap();
        let parts = ShardedEmbeddingBagCollection::new(vec![sharded.clone()], &bags).unwrap();
        let lookup = Lookup::default();
        assert_eq!(parts.lookup(&ids, &lookup).unwrap().0.values(), whole.lookup(&ids, &lookup).unwrap().0.values());
        let twice = table.in_shards(ShardedTable::cut(&there, Sharding::ColumnWise, &cuts).unwrap()).unwrap();
        assert_eq!(cuts[0].take(&twice).unwrap_err().kind(), Kind::Unsupported, "a table is cut once");
        let by_name = EmbeddingBagCollection::new(vec![Arc::new(twice)], &bags).unwrap();
        assert_eq!(by_name.lookup(&ids, &lookup).unwrap().0.values(), whole.lookup(&ids, &lookup).unwrap().0.values());
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
        fn begin(&self, _: Vec<u64>, _: Option<Instant>) -> Box<dyn Pending + '_> {
            Box::new(Answer(Fetched { bytes: vec![0; 16], states: vec![RowState::Hit] }))
        }
    }
    let table = Table::fetched(numbered(3).spec().clone(), Arc::new(Short)).unwrap();
    let error = summed(ShardedTable::whole(&table), &[0, 1], &Lookup::default()).unwrap_err();
    assert_eq!(error.kind(), Kind::Corrupt);
    assert!(error.to_string().contains("1 states and 16 bytes came for 2 rows"), "{error}");
}

#[test]
fn shards_that_do_not_cover_their_table_are_refused() {
    let table = Table::from_f32("t", 8, &[1.0; 80], RowFormat::Int4, Unseen::Zero).unwrap();
    let cut = |rows: Range<u64>, columns: Range<usize>| Cut { rows, columns, copy: 0, device: "d".into() };
    let error = |cuts: &[Cut]| ShardedTable::cut(&table, Sharding::Grid, cuts).unwrap_err().to_string();
    for (cuts, part) in [
        (vec![], "no shard holds row 0"),
        (vec![cut(0..9, 0..8)], "no shard holds row 9"),
        (vec![cut(1..10, 0..8)], "no shard holds row 0"),
        (vec![cut(0..6, 0..8), cut(5..10, 0..8)], "two shards hold row 5"),
        (vec![cut(0..10, 0..4)], "no shard holds column 4"),
        (vec![cut(0..10, 0..4), cut(0..10, 2..8)], "two shards hold column 2"),
        (vec![cut(0..11, 0..8)], "expected rows of 10"),
        (vec![cut(3..3, 0..8)], "expected rows of 10"),
        (vec![cut(0..10, 0..9)], "expected columns of 8"),
        (vec![cut(0..10, 0..3), cut(0..10, 3..8)], "multiple of 2"),
        (vec![cut(0..10, 1..8)], "multiple of 2"),
        (vec![cut(0..10, 0..8), Cut { copy: 1, ..cut(0..5, 0..8) }], "no shard holds row 5"),
        (vec![Cut { copy: 1, ..cut(0..10, 0..8) }], "no shard holds row 0"),
    ] {
        let e = error(&cuts);
        assert!(e.contains(part) && e.contains("table `t`"), "{cuts:?}: {e}");
    }
    let shard = Shard { rows: 0..5, columns: 0..8, copy: 0, device: "d".into(), table: table.clone() };
    let e = ShardedTable::new(table.spec().clone(), Sharding::RowWise, vec![shard]).unwrap_err().to_string();
    assert!(e.contains("it holds 10 rows of 8 in int4, expected 5 of 8 in int4"), "{e}");
    let with_values = table.with_vocabulary(Vocabulary::parse("a\nb").unwrap()).unwrap();
    assert!(ShardedTable::cut(&with_values, Sharding::TableWise, &[cut(0..10, 0..8)]).is_ok());
}

#[test]
fn configurations_that_name_nothing_are_refused() {
    let whole = Arc::new(ShardedTable::whole(&numbered(3)));
    let bag = |table: &str| [BagConfig { feature: "f".into(), table: table.into(), pooling: Pooling::Sum }];
    assert!(ShardedEmbeddingBagCollection::new(vec![whole.clone()], &bag("u")).is_err());
    assert!(ShardedEmbeddingBagCollection::new(vec![whole.clone(), whole.clone()], &bag("t")).is_err());
    let collection = ShardedEmbeddingBagCollection::new(vec![whole], &bag("t")).unwrap();
    let ids = KeyedJaggedTensor::from_lengths(["g"], vec![1], &[1], None).unwrap();
    assert!(collection.lookup(&ids, &Lookup::default()).unwrap_err().to_string().contains("feature `f` is missing"));
}
