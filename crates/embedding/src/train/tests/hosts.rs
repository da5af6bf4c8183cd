//! Steps that several hosts share, compared with those of one host, bit for bit.

use std::ops::Range;
use std::sync::Arc;

use super::super::*;
use super::workload::{Outcome, Step, Workload, bits};
use crate::{JaggedTensor, KeyedJaggedTensor, KeyedTensor};
use sterling_core::error::{Error, Result};

/// Other hosts, whose rows must not be read.
#[derive(Debug)]
struct Unread;

impl OtherHosts for Unread {
    fn read(&self, _: &str, rows: &[u32], _: usize) -> Result<Vec<f32>> {
        Err(Error::internal(format!("rows {rows:?} of other hosts were read")))
    }
}

fn examples(count: usize, hosts: usize, host: usize) -> Range<usize> {
    count * host / hosts..count * (host + 1) / hosts
}

/// The ids of some examples.
fn part(ids: &KeyedJaggedTensor, range: &Range<usize>) -> KeyedJaggedTensor {
    let cut = |key: &String| {
        let feature = ids.get(key).unwrap();
        let at = feature.offsets()[range.start] - feature.base()..feature.offsets()[range.end] - feature.base();
        let lengths: Vec<i64> = range.clone().map(|example| feature.bag(example).len() as i64).collect();
        let weights = feature.weights().map(|weights| weights[at.clone()].to_vec());
        (key.clone(), JaggedTensor::from_lengths(feature.values()[at].to_vec(), &lengths, weights).unwrap())
    };
    KeyedJaggedTensor::from_jagged(ids.keys().iter().map(cut)).unwrap()
}

/// Runs a step on all hosts; returns the pooled embeddings and the report of each host.
fn step(workload: &Workload, learners: &mut [LearningTables], step: &Step) -> Vec<(Vec<u32>, UpdateReport)> {
    let (hosts, count) = (learners.len(), step.ids.stride());
    let of = |_: &str, host: usize| examples(count, hosts, host);
    let batches: Vec<HostBatch> = (0..hosts)
        .map(|host| {
            let own = part(&step.ids, &examples(count, hosts, host));
            learners[host].preparer().prepare_on_hosts(own, step.ids.clone(), &of).unwrap()
        })
        .collect();
    let mut pooled = vec![Vec::new(); hosts];
    for to in 0..hosts {
        let rows = |from: usize| if from == to { Vec::new() } else { learners[from].rows_for(&batches[from], to) };
        let received: Vec<Vec<f32>> = (0..hosts).map(rows).collect();
        for from in (0..hosts).filter(|from| *from != to) {
            assert_eq!(received[from].len(), learners[to].rows_from(&batches[to], from));
        }
        let (bags, sequences) = learners[to].forward_on_hosts(&batches[to], &received).unwrap();
        pooled[to].extend(bits(bags.values()));
        sequences.iter().for_each(|(_, rows)| pooled[to].extend(bits(rows.values())));
    }
    let gradients = workload.gradients(step);
    let sent: Vec<Vec<Vec<f32>>> = (0..hosts)
        .map(|from| {
            let range = examples(count, hosts, from);
            let width = gradients.width();
            let own = gradients.values()[range.start * width..range.end * width].to_vec();
            let mut bags = KeyedTensor::zeros(learners[from].layout().clone(), range.len());
            bags.values_mut().copy_from_slice(&own);
            let sequence = |(of, all): (&crate::SequenceConfig, &Vec<f32>)| {
                let feature = step.ids.get(&of.feature).unwrap();
                let width = workload.table(&of.table).width;
                let at = |example: usize| (feature.offsets()[example] - feature.base()) * width;
                all[at(range.start)..at(range.end)].to_vec()
            };
            let sequences: Vec<Vec<f32>> = workload.sequences.iter().zip(&step.sequences).map(sequence).collect();
            let to = |to| learners[from].gradients_for(&batches[from], to, &bags, &sequences);
            (0..hosts).map(to).collect()
        })
        .collect();
    let update = |(to, learner): (usize, &mut LearningTables)| {
        let received: Vec<Vec<f32>> = sent.iter().map(|of_host| of_host[to].clone()).collect();
        if received.iter().any(|numbers| !numbers.is_empty()) {
            let mut short = received.clone();
            short.iter_mut().for_each(|numbers| numbers.truncate(numbers.len().saturating_sub(1)));
            assert!(learner.backward_on_hosts(&batches[to], &short).is_err());
        }
        learner.backward_on_hosts(&batches[to], &received).unwrap()
    };
    let reports: Vec<UpdateReport> = learners.iter_mut().enumerate().map(update).collect();
    pooled.into_iter().zip(reports).collect()
}

#[test]
fn several_hosts_end_with_the_bits_of_one() {
    for seed in 0..60 {
        let workload = Workload::new(seed, 12);
        let expected = workload.run(&mut workload.learner(workload.masters(), 1));
        for hosts in 1..=4 {
            let learner = |host: u32| {
                let share = HostShare { host, hosts };
                let masters = workload.masters().into_iter().map(|table| match table.rule() {
                    Some(_) => table.on_host(share, Arc::new(Unread)).unwrap(),
                    None => table,
                });
                workload.learner(masters.collect(), 1 + seed as usize % 3)
            };
            let mut learners: Vec<LearningTables> = (0..hosts).map(learner).collect();
            let mut got = Outcome::default();
            for one in &workload.steps {
                let mut merged = UpdateReport::default();
                for (_, report) in step(&workload, &mut learners, one) {
                    merged.tables.resize_with(report.tables.len(), TableUpdate::default);
                    for (all, of_host) in merged.tables.iter_mut().zip(report.tables) {
                        all.rows.extend(of_host.rows);
                        all.rejected_rows.extend(of_host.rejected_rows);
                        (all.table, all.skipped_ids) = (of_host.table, of_host.skipped_ids);
                    }
                }
                merged.tables.iter_mut().for_each(|table| table.rows.sort_unstable());
                merged.tables.iter_mut().for_each(|table| table.rejected_rows.sort_unstable());
                got.reports.push(merged);
            }
            assert!(got.reports == expected.reports, "workload {seed}, {hosts} hosts");
            for (number, table) in workload.masters().iter().enumerate() {
                let rows: Vec<u32> = (0..table.spec().rows as u32).collect();
                for row in rows {
                    let share = HostShare { host: 0, hosts };
                    let owner = if table.rule().is_some() { share.owner(row) } else { 0 };
                    let own = learners[owner].tables()[number].export([row]).unwrap();
                    let (values, state) = &expected.rows[number];
                    let of = |all: &Vec<u32>, width: usize| all[row as usize * width..][..width].to_vec();
                    assert_eq!(bits(&own.values), of(values, table.spec().width), "workload {seed}, {hosts} hosts");
                    assert_eq!(bits(&own.state), of(state, table.state_width()), "workload {seed}, {hosts} hosts");
                }
            }
        }
    }
}

#[test]
fn a_host_has_its_own_rows_only() {
    let rule = Some(Rule::new(RuleKind::Adagrad, 0.1));
    let table = || MasterTable::from_f32("t", 2, &[0.0; 14], crate::Unseen::Zero, rule).unwrap();
    let share = HostShare { host: 1, hosts: 3 };
    let shard = table().on_host(share, Arc::new(Unread)).unwrap();
    assert_eq!(shard.own_rows(&[1, 4]).unwrap().len(), 2 * (2 + shard.state_width()));
    let error = shard.own_rows(&[1, 3]).unwrap_err().to_string();
    assert!(error.contains("row 3 belongs to another host"), "{error}");
    assert!(shard.own_rows(&[7]).is_err() && shard.export([0, 1]).is_err());
    assert!(shard.on_host(share, Arc::new(Unread)).is_err());
    let frozen = MasterTable::from_f32("t", 2, &[0.0; 4], crate::Unseen::Zero, None).unwrap();
    assert!(frozen.on_host(share, Arc::new(Unread)).unwrap_err().to_string().contains("frozen"));
    let many = HostShare { host: 8, hosts: 9 };
    assert_eq!(table().on_host(many, Arc::new(Unread)).unwrap().bytes(), 0);
}
