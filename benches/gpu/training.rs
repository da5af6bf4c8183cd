//! A training step of embedding tables compared with the memory bound.
//!
//! Sketch for 4 tables of 1M rows of 64 numbers, a batch of 8,192 and 20 ids per bag: N = 655,360 ids, of which a share u are
//! distinct rows. All in device memory; row-wise Adagrad, s = 1 number of state per row.
//!
//! | part | bytes | at 4.3 TB/s |
//! |---|---|---|
//! | forward: rows, outputs, ids | u N 256 + 8.4 MB + 4 N | 40 us for u = 1, 17 for u = 0.35 |
//! | update: rows and state, read and written | u N 520 | 79 us, 28 |
//! | update: gradients, once from memory | 8.4 MB | 2 us |
//! | gradients again per id | 256 N, from the L2 cache | 25 us at about 7 TB/s, beside the above |
//! | sort: three passes of 8 bits, 20 bytes per pair and pass | 60 N, from the L2 cache | 6 us |
//! | launches: 18 in one graph | | 20 to 35 us |
//!
//! The first three are the floor that is printed. Operations do not matter: 2 D additions and multiplications per id are
//! 0.1 TFLOP/s of 60. A distinct row costs a chain of about five dependent loads (its number, start, key, stretch and slot); with
//! 24 warps of two rows per multiprocessor, 132 of these have 6,300 rows in flight, 3.6 TB/s at 1,000 ns per row.

use sterling::cuda::ops::learn::{
    FeatureRows, FeatureShape, LearningBatch, LearningLayout, Master, MasterShape, look_up, update,
};
use sterling::cuda::{Array, Device};
use sterling::kernels::cpu::update::{Decay, RuleKind, Step};

use crate::Bench;
use crate::emulation::Random;

/// Sizes of a step.
struct Case {
    tables: usize,
    rows: usize,
    width: usize,
    batch: usize,
    pooling: usize,
}

const EXPONENT: f64 = 1.05;
/// Batches that alternate, so that caches hold the rows of none.
const BATCHES: usize = 4;

/// Tables and batches on the device.
struct Training {
    layout: LearningLayout,
    stretches: Vec<Array<f32>>,
    batches: Vec<LearningBatch>,
    values: Array<f32>,
    /// Distinct rows of all batches, of `BATCHES * ids` ids.
    distinct: usize,
}

impl Case {
    fn ids(&self) -> usize {
        self.tables * self.batch * self.pooling
    }

    /// Returns ids of one table: ranks of a Zipf distribution at places that spread over the table, or uniform ids.
    fn draw(&self, sums: &[f64], random: &mut Random) -> i64 {
        let rank = match sums.last() {
            Some(all) => {
                let unit = random.below(1 << 30) as f64 / f64::from(1 << 30);
                sums.partition_point(|sum| *sum < unit * all).min(self.rows - 1)
            }
            None => random.below(self.rows),
        };
        // An odd factor permutes the numbers below a power of two; others are close enough to a permutation.
        (rank as u64 * 0x9E37_79B1 % self.rows as u64) as i64
    }

    fn on(&self, device: &Device, kind: RuleKind, is_zipf: bool) -> Training {
        let stride = self.width + kind.state_width(self.width);
        let shape = MasterShape { rows: self.rows as u64, width: self.width, stride, learns: true };
        let feature = |table| FeatureShape { table, column: Some(table * self.width), is_mean: false };
        let features: Vec<FeatureShape> = (0..self.tables).map(feature).collect();
        let layout = LearningLayout::new(&vec![shape; self.tables], &features, self.tables * self.width).unwrap();
        let stretches = (0..self.tables).map(|_| device.zeros(self.rows * stride).unwrap()).collect();
        let mut sums: Vec<f64> = Vec::new();
        if is_zipf {
            (1..=self.rows).for_each(|rank| sums.push(sums.last().unwrap_or(&0.0) + (rank as f64).powf(-EXPONENT)));
        }
        let mut random = Random::new(1);
        let offsets: Vec<usize> = (0..=self.batch).map(|bag| bag * self.pooling).collect();
        let mut distinct = 0;
        let batches = (0..BATCHES).map(|_| {
            let ids: Vec<Vec<i64>> = (0..self.tables)
                .map(|_| (0..self.batch * self.pooling).map(|_| self.draw(&sums, &mut random)).collect())
                .collect();
            for ids in &ids {
                let mut sorted = ids.clone();
                sorted.sort_unstable();
                sorted.dedup();
                distinct += sorted.len();
            }
            let rows: Vec<FeatureRows<'_>> =
                ids.iter().map(|rows| FeatureRows { rows, offsets: &offsets, weights: None }).collect();
            layout.copy(device, self.batch, &rows).unwrap()
        });
        let batches: Vec<LearningBatch> = batches.collect();
        let values = device.copy(&random.numbers(batches[0].values())).unwrap();
        device.settle().unwrap();
        Training { layout, stretches, batches, values, distinct }
    }
}

impl Training {
    /// Returns the microseconds of forward passes, and of complete steps with given gradients.
    fn times(&self, bench: &Bench, kind: RuleKind) -> [f64; 2] {
        let step = Step {
            kind,
            rate: 0.01,
            epsilon: 1e-8,
            beta1: 0.9,
            beta2: 0.999,
            decay: Decay::None,
            max_norm: None,
            clip: None,
        };
        [false, true].map(|is_complete| {
            // Four batches in one graph, so that the time of the launch around them counts a fourth.
            let all = bench.median(|lane| {
                let masters: Vec<Master<'_>> =
                    self.stretches.iter().map(|stretches| Master { stretches, step: Some(step) }).collect();
                let outputs = lane.room(self.values.len())?;
                for batch in &self.batches {
                    look_up(lane, &self.layout, &masters, batch, &outputs)?;
                    if is_complete {
                        update(lane, &self.layout, &masters, batch, &self.values)?;
                    }
                }
                Ok(vec![outputs.later(1)?])
            });
            all / BATCHES as f64
        })
    }
}

/// Prints lines of the table of floors for forward passes and complete steps.
pub fn training(bench: &Bench, is_tiny: bool) {
    let case = match is_tiny {
        true => Case { tables: 2, rows: 200, width: 16, batch: 8, pooling: 5 },
        false => Case { tables: 4, rows: 1_000_000, width: 64, batch: 8192, pooling: 20 },
    };
    for kind in [RuleKind::RowwiseAdagrad, RuleKind::Sgd, RuleKind::Adam] {
        for is_zipf in [true, false] {
            let training = case.on(&bench.device, kind, is_zipf);
            let [forward, complete] = training.times(bench, kind);
            let u = training.distinct as f64 / (BATCHES * case.ids()) as f64;
            let (row, stretch) = (4 * case.width, 4 * (case.width + kind.state_width(case.width)));
            let outputs = (4 * case.batch * case.tables * case.width) as f64;
            let read = case.ids() as f64 * (4.0 + u * row as f64) + outputs;
            let written = case.ids() as f64 * u * (2 * stretch) as f64 + outputs;
            let ids = if is_zipf { "Zipf 1.05" } else { "uniform" };
            let what = format!("{} tables of {} x {}, batch {}", case.tables, case.rows, case.width, case.batch);
            bench.line(&format!("lookups in training, {what}, {ids}, u = {u:.2}"), read, forward);
            bench.line(&format!("forward, backward, {}, {what}, {ids}", kind.name()), read + written, complete);
        }
    }
}
