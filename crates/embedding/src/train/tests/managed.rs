//! Managed ids in training, compared with TorchRec (`python/make_managed_golden.py`) and with a naive table of unbounded ids.

use std::collections::BTreeMap;

use serde_json::Value;

use super::super::{LearningTables, MasterTable, Rule, RuleKind};
use crate::managed::{Evict, FREE, ManagedSpec, initial_row};
use crate::place::Sharding;
use crate::shard::Cut;
use crate::{BagConfig, KeyedJaggedTensor, KeyedTensor, Pooling, RowFormat, SequenceConfig, Unseen};
use sterling_core::random::splitmix64;
use sterling_kernels::threads::Threads;

const WIDTH: usize = 4;

fn rule() -> Rule {
    Rule::new(RuleKind::Adam, 0.1)
}

fn table(rows: u64, unseen: Unseen, spec: ManagedSpec) -> MasterTable {
    // The row of unseen ids exists from the beginning; tables without such a row grow.
    let has = if unseen == Unseen::Zero { 1 } else { rows };
    let table = MasterTable::zeros("t", has, WIDTH, unseen, Some(rule())).unwrap();
    table.with_ids(Some(ManagedSpec { rows: Some(rows), ..spec }), &vec![FREE; has as usize]).unwrap()
}

fn learner(table: MasterTable, threads: usize) -> LearningTables {
    let bags = [BagConfig { feature: "f".into(), table: "t".into(), pooling: Pooling::Sum }];
    let sequences = [SequenceConfig { feature: "s".into(), table: "t".into() }];
    LearningTables::new(vec![table], &bags, &sequences, &Threads::new(threads).unwrap()).unwrap()
}

/// Trains on a bag of `ids` and a sequence of `more`; returns the rows that were reassigned to other ids.
fn step(learner: &mut LearningTables, ids: &[i64], more: &[i64]) -> Vec<(u32, i64)> {
    let all = [ids, more].concat();
    let lengths = [ids.len() as i64, more.len() as i64];
    let batch = learner.prepare(KeyedJaggedTensor::from_lengths(["f", "s"], all, &lengths, None).unwrap()).unwrap();
    learner.forward(&batch).unwrap();
    let gradient = |n: usize| 0.25 + n as f32;
    let pooled = KeyedTensor::new(vec!["f".into()], &[WIDTH], (0..WIDTH).map(gradient).collect()).unwrap();
    let sequence = (0..more.len() * WIDTH).map(|n| gradient(n % 7)).collect();
    let mut report = learner.backward(batch, &pooled, &[sequence]).unwrap();
    let update = report.tables.remove(0);
    assert!(update.assigned.iter().all(|(row, _)| update.rows.binary_search(row).is_ok()));
    update.assigned
}

fn ids_of(table: &MasterTable) -> Vec<i64> {
    let mut ids = table.id_state().unwrap().ids;
    ids.retain(|id| *id != FREE);
    ids.sort_unstable();
    ids
}

/// Id number `n` of a step of the golden stream.
fn occurrence(step: u64, n: u64) -> i64 {
    let draw = splitmix64(splitmix64(step) ^ n) >> 40;
    let number = (draw * draw / (1 << 24) * 600) / (1 << 24);
    splitmix64(number + step / 8) as i64
}

#[test]
fn torchrec_holds_the_same_ids_after_each_of_a_thousand_evictions() {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/train/managed.json");
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(golden).unwrap()).unwrap();
    let number = |name: &str| golden[name].as_u64().unwrap();
    for case in golden["cases"].as_array().unwrap() {
        let evict: Evict = serde_json::from_value(case["evict"].clone()).unwrap();
        let exponent = case["exponent"].as_f64().unwrap();
        let spec = ManagedSpec { evict, exponent, every: number("every"), ..ManagedSpec::default() };
        // TorchRec's last row serves all ids without a row.
        let mut learner = learner(table(number("rows"), Unseen::Row(number("rows") - 1), spec), 1);
        for (eviction, expected) in (1..).zip(case["held"].as_str().unwrap().as_bytes().chunks(8)) {
            for at in number("every") * (eviction - 1) + 1..=number("every") * eviction {
                let ids: Vec<i64> = (0..number("batch")).map(|n| occurrence(at, n)).collect();
                step(&mut learner, &ids, &[]);
            }
            let held = ids_of(&learner.tables()[0]);
            let digest = held.iter().fold(0, |digest, id| splitmix64(digest ^ *id as u64)) >> 32;
            assert_eq!(format!("{digest:08x}").as_bytes(), expected, "{case:.60}, eviction {eviction}");
        }
    }
}

/// Ids of a step: few of many.
fn draws(step: u64, count: u64) -> Vec<i64> {
    (0..count).map(|n| (splitmix64(step << 8 | n) % 40 * 1_000_003) as i64 - 7).collect()
}

#[test]
fn an_id_has_its_own_row_alone_and_begins_with_its_initial_value() {
    let spec = ManagedSpec { every: 3, ..ManagedSpec::default() };
    let mut learner = learner(table(16, Unseen::Zero, spec), 2);
    // Rows of all ids, as if each id had a table of its own.
    let mut naive: BTreeMap<i64, Vec<f32>> = BTreeMap::new();
    for at in 0..300 {
        let ids = draws(at, 9);
        let assigned = step(&mut learner, &ids, &draws(at + 1000, 4));
        let table = &learner.tables()[0];
        for (row, id) in &assigned {
            let mut expected = vec![0.0; WIDTH];
            initial_row(*id, 16, &mut expected);
            assert_eq!((table.row(*row as usize), table.state(*row as usize)), (&expected[..], &[0.0; 9][..]));
            naive.insert(*id, expected);
        }
        let state = table.id_state().unwrap();
        let served = table.served(RowFormat::F32).unwrap();
        for (row, id) in state.ids.iter().enumerate().filter(|(_, id)| **id != FREE) {
            // Without an occurrence, a row stays as it was.
            let occurred = ids.contains(id) || draws(at + 1000, 4).contains(id);
            assert!(occurred || naive[id] == table.row(row), "step {at}, id {id}");
            naive.insert(*id, table.row(row).to_vec());
            assert_eq!(served.resolve(*id), (Some(row as u64), false));
        }
        assert!(draws(at, 30).iter().all(|id| state.ids.contains(id) || served.resolve(*id) == (None, true)));
    }
    let totals = learner.tables()[0].id_totals().unwrap();
    assert_eq!((totals.occurrences, totals.admitted - totals.evicted), (300 * 13, 16));
    assert!(totals.evicted > 100 && totals.unseen > 1000, "{totals:?}");
}

#[test]
fn threads_partitions_and_restarts_change_no_bit() {
    let spec = ManagedSpec { every: 5, admit: 2, ttl_hours: Some(0.002), ..ManagedSpec::default() };
    let new = || table(16, Unseen::Row(3), spec);
    let train = |learner: &mut LearningTables, steps: std::ops::Range<u64>| {
        for at in steps {
            learner.set_clock(at);
            step(learner, &draws(at, 9), &draws(at + 1000, 4));
        }
    };
    let end = |learner: &LearningTables| {
        let table = &learner.tables()[0];
        (table.export(0..16).unwrap(), table.id_state().unwrap())
    };
    let mut complete = learner(new(), 1);
    train(&mut complete, 0..123);
    let expected = end(&complete);
    assert!(expected.1.totals.expired > 0 && expected.1.totals.evicted > 0, "{:?}", expected.1.totals);
    let cut = |rows, columns| Cut { rows, columns, copy: 0, device: "here".into() };
    let cuts = [cut(0..5, 0..WIDTH), cut(5..16, 0..WIDTH)];
    for table in [new(), new().cut(Sharding::RowWise, &cuts).unwrap()] {
        let mut other = learner(table, 3);
        train(&mut other, 0..123);
        assert!(end(&other) == expected);
    }
    for stop in [1, 4, 5, 62] {
        let mut first = learner(new(), 1);
        train(&mut first, 0..stop);
        let (rows, state) = end(&first);
        let mut table = new();
        table.import(&rows).unwrap();
        table.set_id_state(state).unwrap();
        let mut second = learner(table, 2);
        second.set_steps(stop);
        train(&mut second, stop..123);
        assert!(end(&second) == expected, "stopped after {stop}");
    }
}

#[test]
fn rare_ids_are_not_admitted_and_silent_ones_expire() {
    let spec = ManagedSpec { every: 4, admit: 3, ttl_hours: Some(1.0), ..ManagedSpec::default() };
    let mut learner = learner(table(8, Unseen::Zero, spec), 1);
    learner.set_clock(1000);
    // Id 7 occurs three times in the interval, id 8 twice and once in the next one.
    for ids in [[7, 8], [7, 9], [7, 8], [10, 11], [8, 12], [13, 14], [15, 16]] {
        step(&mut learner, &ids, &[FREE]);
    }
    assert!(step(&mut learner, &[17], &[]).is_empty());
    assert_eq!(ids_of(&learner.tables()[0]), [7]);
    for (at, expired) in [(1000 + 3600, false), (1000 + 3601, true)] {
        learner.set_clock(at);
        (0..3).for_each(|_| drop(step(&mut learner, &[], &[])));
        let assigned = step(&mut learner, &[], &[]);
        assert_eq!(assigned, if expired { vec![(0, FREE)] } else { vec![] });
    }
    assert_eq!(learner.tables()[0].export([0]).unwrap().values, [0.0; WIDTH]);
}

#[test]
fn forgotten_ids_leave_nothing_and_do_not_come_back() {
    let spec = ManagedSpec { every: 2, ..ManagedSpec::default() };
    let mut learner = learner(table(8, Unseen::Zero, spec), 1);
    for _ in 0..4 {
        step(&mut learner, &[5, 6], &[7]);
    }
    assert_eq!(ids_of(&learner.tables()[0]), [5, 6, 7]);
    step(&mut learner, &[99], &[]);
    let rows = learner.tables_mut()[0].forget(&[6, 99, 1234]).unwrap();
    assert_eq!(rows.len(), 1);
    let row = learner.tables()[0].export(rows).unwrap();
    assert!(row.values.iter().chain(&row.state).all(|x| x.to_bits() == 0));
    let state = learner.tables()[0].id_state().unwrap();
    assert!(!state.ids.contains(&6) && !state.new_ids.contains(&99));
    (0..8).for_each(|_| drop(step(&mut learner, &[6, 5], &[99])));
    assert_eq!(ids_of(&learner.tables()[0]), [5, 7]);
}

#[test]
fn batches_of_an_earlier_map_and_wrong_tables_are_rejected() {
    let spec = ManagedSpec { every: 1, ..ManagedSpec::default() };
    let mut tables = learner(table(8, Unseen::Zero, spec), 1);
    let ids = KeyedJaggedTensor::from_lengths(["f", "s"], vec![5], &[1, 0], None).unwrap();
    let early = tables.prepare(ids).unwrap();
    step(&mut tables, &[5], &[]);
    let reported = tables.forward(&early).unwrap_err().to_string();
    assert!(
        reported.contains("table `t`: rows were reassigned to other ids, expected a newly prepared batch"),
        "{reported}"
    );
    let frozen = MasterTable::zeros("t", 4, WIDTH, Unseen::Zero, None).unwrap();
    assert!(frozen.with_ids(Some(spec), &[FREE; 4]).unwrap_err().to_string().contains("got `frozen` and managed ids"));
    let plain = || MasterTable::zeros("t", 4, WIDTH, Unseen::Zero, Some(rule())).unwrap();
    let fewer = ManagedSpec { rows: Some(3), ..spec };
    let reported = plain().with_ids(Some(fewer), &[FREE; 4]).unwrap_err().to_string();
    assert!(reported.contains("managed.rows: got 3, expected at least the 4 rows of the package"), "{reported}");
    assert!(plain().with_ids(None, &[1, 1, 2, 3]).is_err() && plain().forget(&[1]).is_err());
    // Ids of a frozen table are resolved, and stay.
    let fixed = MasterTable::zeros("t", 4, WIDTH, Unseen::Zero, None).unwrap().with_ids(None, &[9, 8, FREE, 7]);
    let mut fixed = learner(fixed.unwrap(), 1);
    assert!((0..3).all(|_| step(&mut fixed, &[1, 2], &[7]).is_empty()));
    let table = &fixed.tables()[0];
    assert_eq!((table.id_state(), table.served(RowFormat::F32).unwrap().resolve(7)), (None, (Some(3), false)));
    let mut state = tables.tables()[0].id_state().unwrap();
    state.seen.pop();
    let reported = tables.tables_mut()[0].set_id_state(state).unwrap_err().to_string();
    assert!(reported.contains("managed ids: got 23 counts, expected 24"), "{reported}");
}
