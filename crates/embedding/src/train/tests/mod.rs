//! Steps compared with a naive implementation, partitioned tables with whole ones bit for bit, and rejected inputs.

#![allow(clippy::unwrap_used)]

mod golden;
mod hosts;
mod managed;
mod workload;

use std::sync::Arc;

use super::*;
use crate::place::Sharding;
use crate::report::Lookup;
use crate::shard::Cut;
use crate::tiers::{Fetched, Pending, RowSource, RowState};
use crate::{BagConfig, KeyedJaggedTensor, KeyedTensor, Pooling, RowFormat, SequenceConfig, Unseen};
use sterling_core::error::{Kind, Result};
use sterling_kernels::cpu::Kernels;
use sterling_kernels::threads::Threads;
use workload::{Answer, Step, Workload, cut, cuts, late};

fn plans_change_no_bit(workloads: u64) {
    for seed in 0..workloads {
        let workload = Workload::new(seed, 50);
        let expected = workload.run(&mut workload.learner(workload.masters(), 1));
        for threads in 2..=4 {
            let got = workload.run(&mut workload.learner(workload.masters(), threads));
            assert!(got == expected, "workload {seed}, {threads} threads");
        }
        let ahead = workload.run_ahead(&mut workload.learner(workload.masters(), 2), 2);
        assert!(ahead == expected, "workload {seed}, prepared ahead");
        for sharding in Sharding::ALL {
            let mut learner = workload.learner(cut(&workload, sharding, false), 1 + seed as usize % 4);
            assert!(workload.run(&mut learner) == expected, "workload {seed}, {}", sharding.name());
            let mut learner = workload.learner(cut(&workload, sharding, true), 1 + seed as usize % 2);
            let got = workload.run_ahead(&mut learner, 1 + seed as usize % 3);
            let name = sharding.name();
            assert!(got == expected, "workload {seed}, {name} from late sources, prepared ahead");
        }
    }
}

#[test]
fn results_of_twenty_workloads_do_not_depend_on_plans_threads_or_pipelining() {
    plans_change_no_bit(20);
}

#[test]
#[ignore = "long: 200 workloads of 50 steps under 16 plans take minutes"]
fn results_of_two_hundred_workloads_do_not_depend_on_plans_threads_or_pipelining() {
    plans_change_no_bit(200);
}

#[test]
fn kernels_change_no_bit_of_masters() {
    for seed in 0..10 {
        let mut workload = Workload::new(seed, 5);
        // Kernels differ in the last bits of pooled values, but not in the updates made from given gradients.
        workload.steps.truncate(5);
        let masters = |kernels| {
            let mut learner = workload.learner(workload.masters(), 1).with_kernels(kernels);
            workload.run(&mut learner).rows
        };
        let expected = masters(Kernels::named("portable").unwrap());
        Kernels::all().into_iter().for_each(|kernels| assert!(masters(kernels) == expected, "{}", kernels.name()));
    }
}

/// Change of each row by one step of SGD at rate 1, straight from the definition.
fn naive_changes(workload: &Workload, step: &Step) -> Vec<Vec<f64>> {
    let mut changes: Vec<Vec<f64>> = workload.tables.iter().map(|table| vec![0.0; table.values.len()]).collect();
    let total: usize = workload.bags.iter().map(|bag| workload.table(&bag.table).width).sum();
    let mut column = 0;
    let mut add = |table: &str, id: i64, gradient: &[f32], factor: f64| {
        let at = workload.tables.iter().position(|t| t.name == table).unwrap();
        let plan = &workload.tables[at];
        let Some(row) = plan.master().spec().resolve(id).0 else { return };
        let to = &mut changes[at][row as usize * plan.width..];
        to.iter_mut().zip(gradient).for_each(|(to, g)| *to += factor * f64::from(*g));
    };
    for bag in &workload.bags {
        let (feature, width) = (step.ids.get(&bag.feature).unwrap(), workload.table(&bag.table).width);
        for example in 0..step.ids.stride() {
            let ids = feature.bag(example);
            let first = feature.offsets()[example] - feature.base();
            for (at, id) in ids.iter().enumerate() {
                let weight = feature.weights().map_or(1.0, |w| f64::from(w[first + at]));
                let length = if bag.pooling == Pooling::Mean { ids.len() as f64 } else { 1.0 };
                let gradient = &step.pooled[example * total + column..][..width];
                add(&bag.table, *id, gradient, weight / length);
            }
        }
        column += width;
    }
    for (sequence, gradients) in workload.sequences.iter().zip(&step.sequences) {
        let width = workload.table(&sequence.table).width;
        let ids = step.ids.get(&sequence.feature).unwrap().values();
        ids.iter().zip(gradients.chunks_exact(width)).for_each(|(id, g)| add(&sequence.table, *id, g, 1.0));
    }
    changes
}

#[test]
fn a_training_step_equals_the_naive_one() {
    for seed in 100..160 {
        let mut workload = Workload::new(seed, 1);
        workload.tables.iter_mut().for_each(|table| table.rule = Some(Rule::new(RuleKind::Sgd, 1.0)));
        let numbers = |step: &mut Step| {
            let all = step.pooled.iter_mut().chain(step.sequences.iter_mut().flatten());
            all.filter(|x| x.is_nan() || x.abs() > 1.0).for_each(|x| *x = 0.5);
        };
        workload.steps.iter_mut().for_each(numbers);
        let mut learner = workload.learner(workload.masters(), 1);
        let changes = naive_changes(&workload, &workload.steps[0]);
        workload.run(&mut learner);
        for ((plan, table), changes) in workload.tables.iter().zip(learner.tables()).zip(&changes) {
            for ((got, before), change) in table.values().unwrap().iter().zip(&plan.values).zip(changes) {
                let expected = f64::from(*before) - change;
                let error = (f64::from(*got) - expected).abs();
                assert!(error < 1e-5 * (1.0 + change.abs()), "workload {seed}: {got} for {expected}");
            }
        }
    }
}

fn bag(feature: &str, table: &str, pooling: Pooling) -> BagConfig {
    BagConfig { feature: feature.into(), table: table.into(), pooling }
}

fn one_table(rule: Option<Rule>) -> (LearningTables, KeyedJaggedTensor) {
    let table = MasterTable::from_f32("t", 2, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], Unseen::Zero, rule).unwrap();
    let learner = LearningTables::new(vec![table], &[bag("f", "t", Pooling::Sum)], &[], &Threads::default()).unwrap();
    (learner, KeyedJaggedTensor::from_lengths(["f"], vec![2, 0, 77, -3, 2], &[2, 3], None).unwrap())
}

fn gradients(values: [f32; 4]) -> KeyedTensor {
    KeyedTensor::new(vec!["f".into()], &[2], values.to_vec()).unwrap()
}

#[test]
fn ids_without_a_row_train_nothing_and_are_counted() {
    let (mut learner, ids) = one_table(Some(Rule::new(RuleKind::Sgd, 1.0)));
    let batch = learner.prepare(ids).unwrap();
    assert_eq!(batch.rows(0), [0, 2]);
    let report = learner.backward(batch, &gradients([1.0, 1.0, 0.5, 0.5]), &[]).unwrap();
    assert_eq!(learner.tables()[0].values().unwrap(), [0.0, 1.0, 3.0, 4.0, 3.5, 4.5]);
    let expected = TableUpdate { table: "t".into(), rows: vec![0, 2], skipped_ids: 2, ..TableUpdate::default() };
    assert_eq!(report.tables, [expected]);
}

#[test]
fn updates_that_are_not_finite_are_reported_and_skipped() {
    for sharding in [None, Some(Sharding::RowWise), Some(Sharding::Grid)] {
        let table = MasterTable::from_f32("t", 2, &[1.0; 6], Unseen::Zero, Some(Rule::default())).unwrap();
        let table = match sharding {
            None => table,
            Some(sharding) => {
                let cuts = cuts(&table, sharding);
                table.cut(sharding, &cuts).unwrap()
            }
        };
        let mut learner =
            LearningTables::new(vec![table], &[bag("f", "t", Pooling::Sum)], &[], &Threads::new(2).unwrap()).unwrap();
        let ids = KeyedJaggedTensor::from_lengths(["f"], vec![1, 2], &[1, 1], None).unwrap();
        let batch = learner.prepare(ids).unwrap();
        let report = learner.backward(batch, &gradients([1.0, 1.0, f32::NAN, 0.0]), &[]).unwrap();
        assert_eq!(report.rejected_rows().collect::<Vec<_>>(), [("t", 2)]);
        assert_eq!((report.tables[0].rows.as_slice(), report.updated_rows()), (&[1][..], 1));
        let rows = learner.tables()[0].export([2]).unwrap();
        assert_eq!((rows.values.as_slice(), rows.state.as_slice()), (&[1.0, 1.0][..], &[0.0][..]));
    }
}

#[test]
fn frozen_tables_are_read_and_never_change() {
    let (mut learner, ids) = one_table(None);
    let batch = learner.prepare(ids).unwrap();
    let (pooled, _) = learner.forward(&batch).unwrap();
    assert_eq!(pooled.values(), [6.0, 8.0, 5.0, 6.0]);
    let report = learner.backward(batch, &gradients([1.0; 4]), &[]).unwrap();
    assert_eq!(report.updated_rows(), 0);
    assert_eq!(learner.tables()[0].values().unwrap(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
}

#[test]
fn schedules_count_steps() {
    let schedule = Schedule { warm_up: 2, ..Schedule::default() };
    let (mut learner, ids) = one_table(Some(Rule { schedule, ..Rule::new(RuleKind::Sgd, 1.0) }));
    let step = |learner: &mut LearningTables| {
        let before = learner.tables()[0].row(0)[0];
        let batch = learner.prepare(ids.clone()).unwrap();
        learner.backward(batch, &gradients([1.0; 4]), &[]).unwrap();
        before - learner.tables()[0].row(0)[0]
    };
    assert_eq!([step(&mut learner), step(&mut learner), step(&mut learner)], [0.5, 1.0, 1.0]);
    learner.set_steps(0);
    assert_eq!((step(&mut learner), learner.steps()), (0.5, 1));
}

#[test]
fn checkpoints_restore_rows_and_state() {
    let workload = Workload::new(7, 12);
    let mut learner = workload.learner(workload.masters(), 1);
    let complete = workload.run(&mut learner);
    let mut halves = Workload::new(7, 12);
    let rest = halves.steps.split_off(6);
    let mut first = halves.learner(halves.masters(), 1);
    halves.run(&mut first);
    let mut masters = halves.masters();
    for (master, learned) in masters.iter_mut().zip(first.tables()) {
        master.import(&learned.export(0..learned.spec().rows as u32).unwrap()).unwrap();
    }
    let mut second = halves.learner(masters, 1);
    second.set_steps(first.steps());
    halves.steps = rest;
    assert_eq!(halves.run(&mut second).rows, complete.rows);
}

#[test]
fn served_tables_are_made_of_masters() {
    let values: Vec<f32> = (0..40).map(|n| n as f32 / 8.0 - 2.0).collect();
    let master = MasterTable::from_f32("t", 8, &values, Unseen::Row(1), Some(Rule::default())).unwrap();
    assert_eq!((master.bytes(), master.state_width()), (5 * 9 * 4, 1));
    let cuts = cuts(&master, Sharding::RowWise);
    let cut = MasterTable::from_f32("t", 8, &values, Unseen::Row(1), Some(Rule::default())).unwrap();
    let cut = cut.cut(Sharding::RowWise, &cuts).unwrap();
    for format in RowFormat::ALL {
        let served = master.served(format).unwrap();
        let expected = crate::Table::from_f32("t", 8, &values, format, Unseen::Row(1)).unwrap();
        assert_eq!(served.spec(), expected.spec());
        assert_eq!(served.host_bytes().unwrap()[..], expected.host_bytes().unwrap()[..]);
        assert_eq!(cut.served(format).unwrap().host_bytes().unwrap()[..], expected.host_bytes().unwrap()[..]);
        let again = MasterTable::from_table(&served, None).unwrap();
        assert_eq!((again.spec().rows, again.spec().unseen), (5, Unseen::Row(1)));
    }
}

#[test]
fn invalid_input_is_rejected_and_changes_nothing() {
    let invalid = |result: Result<MasterTable>| assert_eq!(result.unwrap_err().kind(), Kind::Invalid);
    invalid(MasterTable::from_f32("t", 2, &[1.0; 3], Unseen::Zero, None));
    invalid(MasterTable::from_f32("t", 0, &[], Unseen::Zero, None));
    invalid(MasterTable::from_f32("t", 1, &[f32::NAN], Unseen::Zero, None));
    invalid(MasterTable::from_f32("t", 1, &[1.0], Unseen::Row(1), None));
    invalid(MasterTable::from_f32("t", 1, &[1.0], Unseen::Zero, Some(Rule { rate: f32::NAN, ..Rule::default() })));
    let many = MasterTable::zeros("t", 1 << 40, 1, Unseen::Zero, None);
    assert_eq!(many.unwrap_err().kind(), Kind::Unsupported);

    let (mut learner, ids) = one_table(Some(Rule::default()));
    let before = learner.tables()[0].values().unwrap();
    let table = &mut learner.tables_mut()[0];
    assert!(table.set_row(3, &[0.0; 2]).is_err() && table.set_row(0, &[0.0]).is_err());
    let rows = MasterRows { rows: vec![1], values: vec![0.0; 2], state: vec![0.0] };
    let wrong = [
        MasterRows { rows: vec![3], ..rows.clone() },
        MasterRows { rows: vec![1, 1], values: vec![0.0; 4], state: vec![0.0; 2] },
        MasterRows { values: vec![0.0], ..rows.clone() },
        MasterRows { state: vec![], ..rows.clone() },
        MasterRows { values: vec![0.0, f32::INFINITY], ..rows },
    ];
    wrong.iter().for_each(|rows| assert_eq!(table.import(rows).unwrap_err().kind(), Kind::Invalid));
    assert!(table.export([0, 0]).is_err() && table.export([3]).is_err());

    let prepare = |learner: &LearningTables| learner.prepare(ids.clone()).unwrap();
    let wrong = [
        KeyedTensor::new(vec!["g".into()], &[2], vec![0.0; 4]).unwrap(),
        KeyedTensor::new(vec!["f".into()], &[4], vec![0.0; 4]).unwrap(),
        KeyedTensor::new(vec!["f".into()], &[2], vec![0.0; 6]).unwrap(),
    ];
    for gradients in wrong {
        assert_eq!(learner.backward(prepare(&learner), &gradients, &[]).unwrap_err().kind(), Kind::Invalid);
    }
    assert!(learner.backward(prepare(&learner), &gradients([1.0; 4]), &[vec![1.0]]).is_err());
    let (other, _) = one_table(None);
    assert!(learner.backward(prepare(&other), &gradients([1.0; 4]), &[]).is_err());
    assert!(learner.forward(&prepare(&other)).is_err());
    let missing = KeyedJaggedTensor::from_lengths(["g"], vec![1], &[1], None).unwrap();
    assert!(learner.prepare(missing).unwrap_err().to_string().contains("feature `f` is missing"));
    assert_eq!((learner.tables()[0].values().unwrap(), learner.steps()), (before, 0));

    let table = || MasterTable::zeros("t", 4, 32, Unseen::Zero, Some(Rule::default())).unwrap();
    assert!(LearningTables::new(vec![table()], &[bag("f", "u", Pooling::Sum)], &[], &Threads::default()).is_err());
    assert!(LearningTables::new(vec![table()], &[bag("f", "t", Pooling::None)], &[], &Threads::default()).is_err());
    assert!(
        LearningTables::new(vec![table(), table()], &[bag("f", "t", Pooling::Sum)], &[], &Threads::default()).is_err()
    );
    let twice = SequenceConfig { feature: "f".into(), table: "t".into() };
    assert!(LearningTables::new(vec![table()], &[], &[twice.clone(), twice], &Threads::default()).is_err());
}

#[test]
fn partitions_that_do_not_cover_a_table_are_rejected() {
    let table = || MasterTable::zeros("t", 4, 32, Unseen::Zero, Some(Rule::default())).unwrap();
    let cut = |rows: std::ops::Range<u64>, columns: std::ops::Range<usize>, copy| Cut {
        rows,
        columns,
        copy,
        device: "d".into(),
    };
    let wrong = [
        vec![],
        vec![cut(0..3, 0..32, 0)],
        vec![cut(0..4, 0..16, 0)],
        vec![cut(0..4, 0..32, 0), cut(3..4, 0..32, 0)],
        vec![cut(0..4, 0..33, 0)],
        vec![cut(0..5, 0..32, 0)],
        vec![cut(0..4, 0..32, 1)],
        vec![cut(0..2, 0..32, 0), cut(1..4, 0..32, 0)],
    ];
    for cuts in wrong {
        assert_eq!(table().cut(Sharding::Grid, &cuts).unwrap_err().kind(), Kind::Invalid, "{cuts:?}");
    }
    let complete = [cut(0..4, 0..32, 0)];
    let again = table().cut(Sharding::TableWise, &complete).unwrap().cut(Sharding::TableWise, &complete);
    assert_eq!(again.unwrap_err().kind(), Kind::Unsupported);
    let other = MasterTable::zeros("t", 3, 32, Unseen::Zero, Some(Rule::default())).unwrap();
    let source = late(&other, &cut(0..3, 0..32, 0));
    let beside = table().partition_reusing(Sharding::TableWise, &complete, |_| Some(source.clone()));
    assert_eq!(beside.unwrap_err().kind(), Kind::Invalid);
}

/// A source that fails to read, or fails to write.
#[derive(Debug)]
struct Down {
    reads: bool,
}

impl RowSource for Down {
    fn row_bytes(&self) -> usize {
        12
    }

    fn rows(&self) -> u64 {
        3
    }

    fn begin(&self, rows: Vec<u64>, _: &Lookup) -> Box<dyn Pending + '_> {
        let state = if self.reads { RowState::Hit } else { RowState::Degraded };
        Box::new(Answer(Fetched { bytes: vec![0; rows.len() * 12], states: vec![state; rows.len()] }))
    }
}

impl MasterSource for Down {
    fn write(&self, _: &[u64], _: &[u8]) -> Result<()> {
        Err(sterling_core::error::Error::unavailable("no room"))
    }
}

#[test]
fn sources_that_fail_stop_the_step() {
    for reads in [false, true] {
        let table = MasterTable::from_f32("t", 2, &[1.0; 6], Unseen::Zero, Some(Rule::default())).unwrap();
        let cuts = cuts(&table, Sharding::TableWise);
        let source: Arc<dyn MasterSource> = Arc::new(Down { reads });
        let table = table.partition_reusing(Sharding::TableWise, &cuts, |_| Some(source.clone())).unwrap();
        let mut learner =
            LearningTables::new(vec![table], &[bag("f", "t", Pooling::Sum)], &[], &Threads::default()).unwrap();
        let ids = KeyedJaggedTensor::from_lengths(["f"], vec![1, 2], &[1, 1], None).unwrap();
        let batch = learner.prepare(ids).unwrap();
        // A second call fails like the first: the rows were requested once.
        (0..2).for_each(|_| assert_eq!(learner.forward(&batch).is_ok(), reads));
        let error = learner.backward(batch, &gradients([1.0; 4]), &[]).unwrap_err();
        assert_eq!(error.kind(), Kind::Unavailable);
        assert_eq!(learner.steps(), 0);
    }
}
