//! Random workloads from a seed, partitions of their tables, and sources that answer late.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::super::*;
use crate::place::Sharding;
use crate::report::Lookup;
use crate::shard::Cut;
use crate::tiers::{Fetched, Pending, RowSource, RowState};
use crate::{BagConfig, KeyedJaggedTensor, KeyedTensor, Pooling, SequenceConfig, Unseen};
use sterling_core::error::Result;
use sterling_kernels::threads::Threads;

/// Xorshift* random numbers.
struct Xorshift(u64);

impl Xorshift {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() >> 20) as usize % bound
    }

    fn signed(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }
}

pub(super) struct TablePlan {
    pub(super) name: String,
    pub(super) width: usize,
    pub(super) values: Vec<f32>,
    pub(super) unseen: Unseen,
    pub(super) rule: Option<Rule>,
}

pub(super) struct Step {
    pub(super) ids: KeyedJaggedTensor,
    pub(super) pooled: Vec<f32>,
    pub(super) sequences: Vec<Vec<f32>>,
}

/// Tables, features and batches, sampled from a seed.
pub(super) struct Workload {
    pub(super) tables: Vec<TablePlan>,
    pub(super) bags: Vec<BagConfig>,
    pub(super) sequences: Vec<SequenceConfig>,
    pub(super) steps: Vec<Step>,
}

impl Workload {
    pub(super) fn new(seed: u64, steps: usize) -> Self {
        let mut draws = Xorshift(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let tables: Vec<TablePlan> = (0..1 + draws.below(3)).map(|n| TablePlan::new(n, &mut draws)).collect();
        let name = |draws: &mut Xorshift| tables[draws.below(tables.len())].name.clone();
        let bags: Vec<BagConfig> = (0..draws.below(4))
            .map(|n| BagConfig {
                feature: format!("bag{n}"),
                table: name(&mut draws),
                pooling: [Pooling::Sum, Pooling::Mean][draws.below(2)],
            })
            .collect();
        let first = usize::from(bags.is_empty());
        let sequences: Vec<SequenceConfig> = (0..first + draws.below(2))
            .map(|n| SequenceConfig { feature: format!("sequence{n}"), table: name(&mut draws) })
            .collect();
        let mut workload = Workload { tables, bags, sequences, steps: Vec::new() };
        let is_weighted = draws.one_in(2);
        workload.steps = (0..steps).map(|_| workload.step(is_weighted, &mut draws)).collect();
        workload
    }

    pub(super) fn table(&self, name: &str) -> &TablePlan {
        self.tables.iter().find(|table| table.name == name).unwrap()
    }

    fn step(&self, is_weighted: bool, draws: &mut Xorshift) -> Step {
        let examples = 1 + draws.below(5);
        let features = self.bags.iter().map(|b| (&b.feature, &b.table));
        let features: Vec<(&String, &String)> =
            features.chain(self.sequences.iter().map(|s| (&s.feature, &s.table))).collect();
        let (mut values, mut lengths, mut counts) = (Vec::new(), Vec::new(), Vec::new());
        for (_, table) in &features {
            let rows = self.table(table).rows();
            let before = values.len();
            for _ in 0..examples {
                let longest = if draws.one_in(12) { 300 } else { 7 };
                let length = if draws.one_in(4) { 0 } else { draws.below(longest) };
                lengths.push(length as i64);
                values.extend((0..length).map(|_| match draws.below(10) {
                    0 => draws.next() as i64,
                    1 | 2 => 0,
                    _ => draws.below(rows) as i64,
                }));
            }
            counts.push(values.len() - before);
        }
        let weights = is_weighted.then(|| values.iter().map(|_| draws.signed()).collect());
        let keys: Vec<String> = features.iter().map(|(feature, _)| feature.to_string()).collect();
        let ids = KeyedJaggedTensor::from_lengths(keys, values, &lengths, weights).unwrap();
        let mut gradients = |count: usize| -> Vec<f32> {
            let mut numbers: Vec<f32> = (0..count).map(|_| draws.signed()).collect();
            if draws.one_in(15) && count > 0 {
                numbers[draws.below(count)] = [f32::NAN, f32::INFINITY, 1e30][draws.below(3)];
            }
            numbers
        };
        let width: usize = self.bags.iter().map(|bag| self.table(&bag.table).width).sum();
        let pooled = gradients(examples * width);
        let sequences = self.sequences.iter().zip(&counts[self.bags.len()..]);
        let sequences = sequences.map(|(s, count)| gradients(count * self.table(&s.table).width)).collect();
        Step { ids, pooled, sequences }
    }

    pub(super) fn masters(&self) -> Vec<MasterTable> {
        self.tables.iter().map(TablePlan::master).collect()
    }

    pub(super) fn learner(&self, masters: Vec<MasterTable>, threads: usize) -> LearningTables {
        LearningTables::new(masters, &self.bags, &self.sequences, &Threads::new(threads).unwrap()).unwrap()
    }

    pub(super) fn gradients(&self, step: &Step) -> KeyedTensor {
        let keys = self.bags.iter().map(|bag| bag.feature.clone()).collect();
        let widths: Vec<usize> = self.bags.iter().map(|bag| self.table(&bag.table).width).collect();
        KeyedTensor::new(keys, &widths, step.pooled.clone()).unwrap()
    }

    /// Runs all steps one after the other.
    pub(super) fn run(&self, learner: &mut LearningTables) -> Outcome {
        let mut outcome = Outcome::default();
        for step in &self.steps {
            let batch = learner.prepare(step.ids.clone()).unwrap();
            outcome.forward(learner, &batch);
            outcome.reports.push(learner.backward(batch, &self.gradients(step), &step.sequences).unwrap());
        }
        outcome.finish(learner)
    }

    /// Runs all steps with `ahead` batches prepared in advance on another thread.
    pub(super) fn run_ahead(&self, learner: &mut LearningTables, ahead: usize) -> Outcome {
        let mut outcome = Outcome::default();
        let preparer = learner.preparer();
        let (sender, batches) = crossbeam_channel::bounded(ahead);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for step in &self.steps {
                    sender.send(preparer.prepare(step.ids.clone()).unwrap()).unwrap();
                }
            });
            for (step, batch) in self.steps.iter().zip(batches) {
                outcome.forward(learner, &batch);
                outcome.reports.push(learner.backward(batch, &self.gradients(step), &step.sequences).unwrap());
            }
        });
        outcome.finish(learner)
    }
}

impl TablePlan {
    fn new(number: usize, draws: &mut Xorshift) -> Self {
        let width = [1, 3, 8, 16, 20, 33, 48][draws.below(7)];
        let rows = 1 + draws.below(60);
        let unseen = [Unseen::Zero, Unseen::Hash, Unseen::Row(draws.below(rows) as u64)][draws.below(3)];
        let rule = Rule {
            rate: 0.05,
            decay: [Decay::None, Decay::None, Decay::L2(0.1), Decay::Decoupled(0.1)][draws.below(4)],
            max_norm: draws.one_in(3).then_some(1.5),
            clip: draws.one_in(3).then_some(1.0),
            schedule: Schedule { warm_up: draws.below(20) as u64, decay: draws.below(40) as u64, floor: 0.1 },
            ..Rule::new(RuleKind::ALL[draws.below(5)], 0.05)
        };
        let values = (0..rows * width).map(|_| draws.signed()).collect();
        TablePlan { name: format!("t{number}"), width, values, unseen, rule: (!draws.one_in(8)).then_some(rule) }
    }

    pub(super) fn rows(&self) -> usize {
        self.values.len() / self.width
    }

    pub(super) fn master(&self) -> MasterTable {
        MasterTable::from_f32(&self.name, self.width, &self.values, self.unseen, self.rule).unwrap()
    }
}

/// Complete result of a run, as bits.
#[derive(Default, PartialEq)]
pub(super) struct Outcome {
    pub(super) pooled: Vec<Vec<u32>>,
    pub(super) reports: Vec<UpdateReport>,
    pub(super) rows: Vec<(Vec<u32>, Vec<u32>)>,
}

pub(super) fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}

impl Outcome {
    fn forward(&mut self, learner: &LearningTables, batch: &PreparedBatch) {
        let (pooled, sequences) = learner.forward(batch).unwrap();
        self.pooled.push(bits(pooled.values()));
        self.pooled.extend(sequences.iter().map(|(_, rows)| bits(rows.values())));
    }

    fn finish(mut self, learner: &LearningTables) -> Self {
        for table in learner.tables() {
            let rows = table.export(0..table.spec().rows as u32).unwrap();
            self.rows.push((bits(&rows.values), bits(&rows.state)));
        }
        self
    }
}

/// Stretches of a partition behind a source that reads them at the request and answers later.
#[derive(Debug)]
struct Late {
    row_bytes: usize,
    stretches: Arc<Mutex<Vec<u8>>>,
}

pub(super) struct Answer(pub(super) Fetched);

impl Pending for Answer {
    fn wait(self: Box<Self>) -> Result<Fetched> {
        std::thread::sleep(Duration::from_micros(300));
        Ok(self.0)
    }
}

impl RowSource for Late {
    fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    fn rows(&self) -> u64 {
        (self.stretches.lock().unwrap().len() / self.row_bytes) as u64
    }

    fn begin(&self, rows: Vec<u64>, _: &Lookup) -> Box<dyn Pending + '_> {
        assert!(!rows.is_empty() && rows.windows(2).all(|w| w[0] < w[1]), "rows come sorted and once: {rows:?}");
        let stretches = self.stretches.lock().unwrap();
        let bytes = rows.iter().flat_map(|row| &stretches[*row as usize * self.row_bytes..][..self.row_bytes]);
        Box::new(Answer(Fetched { bytes: bytes.copied().collect(), states: vec![RowState::Hit; rows.len()] }))
    }
}

impl MasterSource for Late {
    fn write(&self, rows: &[u64], from: &[u8]) -> Result<()> {
        for (row, from) in rows.iter().zip(from.chunks_exact(self.row_bytes)) {
            // Writes row by row, so that a concurrent reader may see only some of them.
            let mut stretches = self.stretches.lock().unwrap();
            stretches[*row as usize * self.row_bytes..][..self.row_bytes].copy_from_slice(from);
        }
        Ok(())
    }
}

/// Returns a late source with the stretches of one partition, whose values it copies from a table that is partitioned alike.
pub(super) fn late(table: &MasterTable, cut: &Cut) -> Arc<dyn MasterSource> {
    let rows = table.export(cut.rows.start as u32..cut.rows.end as u32).unwrap();
    let (width, state_width) = (table.spec().width, table.state_width());
    let (vectors, numbers) = table.rule().map_or((0, 0), |rule| (rule.kind.state_vectors(), rule.kind.state_numbers()));
    let mut stretches: Vec<f32> = Vec::new();
    for n in 0..rows.rows.len() {
        let state = &rows.state[n * state_width..][..state_width];
        stretches.extend(&rows.values[n * width..][cut.columns.clone()]);
        (0..vectors).for_each(|v| stretches.extend(&state[v * width..][cut.columns.clone()]));
        stretches.extend(&state[vectors * width..]);
    }
    let row_bytes = 4 * (cut.columns.len() * (1 + vectors) + numbers);
    let bytes = bytemuck::cast_slice(&stretches).to_vec();
    Arc::new(Late { row_bytes, stretches: Arc::new(Mutex::new(bytes)) })
}

/// Returns the partitions of a sharding type.
pub(super) fn cuts(table: &MasterTable, sharding: Sharding) -> Vec<Cut> {
    let (rows, width) = (table.spec().rows, table.spec().width);
    let (row_parts, column_step, copies) = match sharding {
        Sharding::TableWise => (1, width, 1),
        Sharding::DataParallel => (1, width, 3),
        Sharding::ColumnWise => (1, 16, 1),
        Sharding::RowWise => (3, width, 1),
        Sharding::TableRowWise => (2, width, 1),
        Sharding::Grid => (2, 16, 1),
    };
    let parts = row_parts.min(rows);
    let mut made = Vec::new();
    for copy in 0..copies {
        for first in (0..width).step_by(column_step) {
            for part in 0..parts {
                let device = format!("d{}", made.len());
                let rows = rows * part / parts..rows * (part + 1) / parts;
                made.push(Cut { rows, columns: first..(first + column_step).min(width), copy, device });
            }
        }
    }
    made
}

/// Partitions the masters; with `is_late`, every second partition is behind a late source.
pub(super) fn cut(workload: &Workload, sharding: Sharding, is_late: bool) -> Vec<MasterTable> {
    let masters = workload.masters().into_iter().zip(workload.masters());
    let cut = |(master, complete): (MasterTable, MasterTable)| {
        let cuts = cuts(&master, sharding);
        let elsewhere = |part: usize| (is_late && part.is_multiple_of(2)).then(|| late(&complete, &cuts[part]));
        master.partition_reusing(sharding, &cuts, elsewhere).unwrap()
    };
    masters.map(cut).collect()
}
