//! Sorting compared with a stable sort, every kernel with the portable one bit for bit, and the rules with their formulas in f64.

use proptest::prelude::*;

use super::*;
use crate::cpu::Kernels;
use crate::cpu::isa::Isa;

/// Widths below, at and above multiples of a block.
const WIDTHS: [usize; 14] = [1, 3, 4, 8, 12, 16, 20, 32, 48, 64, 100, 128, 256, 300];

fn draws(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }
}

/// A number between -1 and 1.
fn signed(bits: u64) -> f32 {
    (bits >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// Rows of a table with their state, and the gradients of one batch.
struct Problem {
    width: usize,
    rows: usize,
    step: Step,
    /// Row, slot, weight.
    occurrences: Vec<(u32, u32, Option<f32>)>,
    gradients: Vec<[f32; BLOCK]>,
    stretches: Vec<f32>,
}

impl Problem {
    /// Adds `repeats` occurrences of row 5 and one or two of other rows.
    fn new(width: usize, step: Step, repeats: usize, is_weighted: bool, seed: u64) -> Self {
        let (rows, slots) = (97usize, 40usize);
        let mut next = draws(seed);
        let mut named: Vec<u32> = vec![5; repeats];
        named.extend((0..60).map(|_| (next() % rows as u64) as u32));
        for at in (1..named.len()).rev() {
            named.swap(at, (next() % (at as u64 + 1)) as usize);
        }
        let occurrences = named.into_iter().map(|row| {
            let slot = (next() % slots as u64) as u32;
            (row, slot, (is_weighted && !next().is_multiple_of(4)).then(|| signed(next())))
        });
        let occurrences = occurrences.collect();
        let blocks = width.div_ceil(BLOCK);
        let mut gradients = vec![[0f32; BLOCK]; slots * blocks];
        for row in gradients.as_flattened_mut().chunks_exact_mut(blocks * BLOCK) {
            row[..width].fill_with(|| signed(next()));
        }
        let stride = width + step.kind.state_width(width);
        let mut stretches = vec![0f32; rows * stride];
        stretches.chunks_exact_mut(stride).for_each(|stretch| stretch[..width].fill_with(|| signed(next())));
        Problem { width, rows, step, occurrences, gradients, stretches }
    }

    fn groups(&self) -> RowGroups {
        let mut occurrences = Occurrences::with_capacity(self.occurrences.len());
        for (row, slot, weight) in &self.occurrences {
            match weight {
                None => occurrences.push(*row, *slot),
                Some(weight) => occurrences.push_weighted(*row, *slot, *weight),
            }
        }
        occurrences.sort()
    }

    /// Runs three steps with the given kernels, the rows split into `parts`.
    fn run(&self, kernels: Kernels, parts: usize) -> Vec<f32> {
        let mut data = self.stretches.clone();
        let (groups, stride) = (self.groups(), data.len() / self.rows);
        let gradients = GradientRows::new(self.width, &self.gradients);
        for _ in 0..3 {
            for part in groups.whole().split(parts) {
                let mut masters = Stretches { data: &mut data, first_row: 0, width: self.width, stride };
                assert!(update(kernels, &self.step, &part, &gradients, &mut masters).is_empty());
            }
        }
        data
    }

    /// Computes the rows in f64, straight from the formulas.
    fn formulas(&self) -> Vec<f64> {
        let (width, stride) = (self.width, self.stretches.len() / self.rows);
        let blocks = width.div_ceil(BLOCK);
        let Step { kind, max_norm, clip, .. } = self.step;
        let [rate, epsilon, beta1, beta2] =
            [self.step.rate, self.step.epsilon, self.step.beta1, self.step.beta2].map(f64::from);
        let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        let mut values: Vec<f64> = Vec::new();
        for row in 0..self.rows {
            let mut w: Vec<f64> = self.stretches[row * stride..][..width].iter().map(|x| f64::from(*x)).collect();
            let mut sum = vec![0f64; width];
            let of_row = || self.occurrences.iter().filter(|(r, ..)| *r as usize == row);
            for (_, slot, weight) in of_row() {
                let gradient = &self.gradients.as_flattened()[*slot as usize * blocks * BLOCK..];
                let weight = f64::from(weight.unwrap_or(1.0));
                sum.iter_mut().zip(gradient).for_each(|(s, g)| *s += weight * f64::from(*g));
            }
            let (mut m, mut v, mut row_v) = (vec![0f64; width], vec![0f64; width], 0f64);
            for t in 1..=3 * i32::from(of_row().next().is_some()) {
                let mut g = sum.clone();
                let length = norm(&g);
                if let Some(clip) = clip.map(f64::from).filter(|clip| length > *clip) {
                    g.iter_mut().for_each(|g| *g *= clip / length);
                }
                let mut keep = 1.0;
                match self.step.decay {
                    Decay::None => {}
                    Decay::L2(lambda) => g.iter_mut().zip(&w).for_each(|(g, w)| *g += f64::from(lambda) * w),
                    Decay::Decoupled(lambda) => keep = 1.0 - rate * f64::from(lambda),
                }
                let mean = g.iter().map(|g| g * g).sum::<f64>() / width as f64;
                match kind {
                    RuleKind::RowwiseAdagrad => row_v += mean,
                    RuleKind::RowwiseAdam => row_v = beta2 * row_v + (1.0 - beta2) * mean,
                    _ => {}
                }
                for at in 0..width {
                    let corrected = |x: f64, beta: f64| x / (1.0 - beta.powi(t));
                    let change = match kind {
                        RuleKind::Sgd => g[at],
                        RuleKind::RowwiseAdagrad => g[at] / (row_v.sqrt() + epsilon),
                        RuleKind::Adagrad => {
                            v[at] += g[at] * g[at];
                            g[at] / (v[at].sqrt() + epsilon)
                        }
                        RuleKind::Adam | RuleKind::RowwiseAdam => {
                            m[at] = beta1 * m[at] + (1.0 - beta1) * g[at];
                            v[at] = beta2 * v[at] + (1.0 - beta2) * g[at] * g[at];
                            let second = if kind == RuleKind::Adam { v[at] } else { row_v };
                            corrected(m[at], beta1) / (corrected(second, beta2).sqrt() + epsilon)
                        }
                    };
                    w[at] = keep * w[at] - rate * change;
                }
                let length = norm(&w);
                if let Some(max) = max_norm.map(f64::from).filter(|max| length > *max) {
                    w.iter_mut().for_each(|w| *w *= max / length);
                }
            }
            values.extend(w);
        }
        values
    }
}

fn step(kind: RuleKind) -> Step {
    Step { kind, rate: 0.05, epsilon: 1e-3, beta1: 0.9, beta2: 0.99, decay: Decay::None, max_norm: None, clip: None }
}

/// Returns steps of a rule that cover all options.
fn steps(kind: RuleKind) -> Vec<Step> {
    let plain = step(kind);
    vec![
        plain,
        Step { decay: Decay::L2(0.3), ..plain },
        Step { decay: Decay::Decoupled(0.3), ..plain },
        Step { max_norm: Some(0.9), ..plain },
        Step { clip: Some(0.5), ..plain },
        Step { decay: Decay::L2(0.1), max_norm: Some(1.1), clip: Some(2.0), ..plain },
    ]
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn every_kernel_gives_the_bits_of_the_portable_one() {
    for kind in RuleKind::ALL {
        for (number, step) in steps(kind).into_iter().enumerate() {
            for (at, width) in WIDTHS.into_iter().enumerate() {
                // Below a run, exactly one run, one more, and several runs.
                let repeats = [0, 3, RUN, RUN + 1, 2 * RUN + 44][(at + number) % 5];
                let problem = Problem::new(width, step, repeats, number % 2 == 1, width as u64 * 7 + number as u64);
                let expected = problem.run(Kernels::of(Isa::Portable), 1);
                for kernels in Kernels::all() {
                    for parts in [1, 3, 64] {
                        let got = problem.run(kernels, parts);
                        assert_eq!(bits(&got), bits(&expected), "{} {step:?} width {width}", kernels.name());
                    }
                }
            }
        }
    }
}

#[test]
fn ten_thousand_equal_ids_give_the_same_bits() {
    for width in [1, 20, 64] {
        let problem = Problem::new(width, step(RuleKind::RowwiseAdagrad), 10_000, true, 3);
        let expected = problem.run(Kernels::of(Isa::Portable), 1);
        Kernels::all().into_iter().for_each(|kernels| assert_eq!(bits(&problem.run(kernels, 4)), bits(&expected)));
    }
}

#[test]
fn rules_follow_their_formulas() {
    for kind in RuleKind::ALL {
        for (number, step) in steps(kind).into_iter().enumerate() {
            for width in [1, 4, 20, 64, 100] {
                let problem = Problem::new(width, step, 7, number % 2 == 0, 11 + number as u64);
                let (got, expected) = (problem.run(Kernels::best(), 2), problem.formulas());
                let stride = width + kind.state_width(width);
                for (row, expected) in expected.chunks_exact(width).enumerate() {
                    for (got, expected) in got[row * stride..].iter().zip(expected) {
                        let error = (f64::from(*got) - expected).abs();
                        // A sum of gradients that nearly cancel loses digits, and so does its root.
                        assert!(error < 1e-5 * expected.abs().max(0.5), "{step:?} width {width}: {got} for {expected}");
                    }
                }
            }
        }
    }
}

#[test]
fn sums_of_a_row_are_added_in_runs() {
    // Each gradient has one number, so that the order of additions shows in the last bits.
    let count = 2 * RUN + 9;
    let mut next = draws(9);
    let gradients: Vec<[f32; BLOCK]> = (0..count)
        .map(|_| {
            let mut block = [0f32; BLOCK];
            block[0] = signed(next()) * 1e3;
            block
        })
        .collect();
    let mut occurrences = Occurrences::default();
    (0..count as u32).for_each(|slot| occurrences.push(0, slot));
    let groups = occurrences.sort();
    let mut data = [0f32];
    let step = Step { rate: 1.0, ..step(RuleKind::Sgd) };
    let mut masters = Stretches { data: &mut data, first_row: 0, width: 1, stride: 1 };
    update(Kernels::best(), &step, &groups.whole(), &GradientRows::new(1, &gradients), &mut masters);
    let sums = gradients.chunks(RUN).map(|run| run.iter().fold(0f32, |sum, g| sum + g[0]));
    let expected = sums.reduce(|sum, run| sum + run).expect("three runs");
    assert_eq!(data[0], 0.0 - expected);
}

#[test]
fn square_sums_do_not_depend_on_block_boundaries() {
    // Sums of squares of 48 columns: of the first 16 and of the last 32, as shards would exchange them.
    let mut next = draws(21);
    let gradients: Vec<[f32; BLOCK]> = (0..3).map(|_| std::array::from_fn(|_| signed(next()))).collect();
    let state = |blocks: &[[f32; BLOCK]]| {
        let width = blocks.len() * BLOCK;
        let mut occurrences = Occurrences::default();
        occurrences.push(0, 0);
        let groups = occurrences.sort();
        let mut data = vec![0f32; width + 1];
        let mut masters = Stretches { data: &mut data, first_row: 0, width, stride: width + 1 };
        let step = step(RuleKind::RowwiseAdagrad);
        update(Kernels::best(), &step, &groups.whole(), &GradientRows::new(width, blocks), &mut masters);
        data[width] * width as f32
    };
    let by_block: f32 = gradients.iter().map(|block| state(std::slice::from_ref(block))).sum();
    assert!((by_block - state(&gradients)).abs() <= f32::EPSILON * by_block);
}

#[test]
fn updates_that_are_not_finite_are_not_written() {
    let kinds = RuleKind::ALL.into_iter();
    for (kind, wrong) in kinds.flat_map(|k| [f32::NAN, f32::INFINITY, 1e25, f32::MAX].map(|wrong| (k, wrong))) {
        for width in [3, 16, 40] {
            let mut problem = Problem::new(width, Step { rate: 1.0, ..step(kind) }, 0, false, 5);
            problem.occurrences = vec![(7, 0, None), (9, 1, None), (9, 1, None), (96, 2, None)];
            problem.gradients.as_flattened_mut()[width.div_ceil(BLOCK) * BLOCK + width - 1] = wrong;
            let stride = width + kind.state_width(width);
            for kernels in Kernels::all() {
                let mut data = problem.stretches.clone();
                let mut masters = Stretches { data: &mut data, first_row: 0, width, stride };
                let (groups, gradients) = (problem.groups(), GradientRows::new(width, &problem.gradients));
                let rejected = update(kernels, &problem.step, &groups.whole(), &gradients, &mut masters);
                assert_eq!(rejected, [9], "{} {kind:?} {wrong}", kernels.name());
                let row = |data: &[f32], row: usize| bits(&data[row * stride..][..stride]);
                assert_eq!(row(&data, 9), row(&problem.stretches, 9));
                assert!([7, 96].iter().all(|n| row(&data, *n) != row(&problem.stretches, *n)));
            }
        }
    }
}

#[test]
#[should_panic(expected = "a row outside of `masters`")]
fn a_row_outside_the_stretches_panics() {
    let mut occurrences = Occurrences::default();
    occurrences.push(2, 0);
    let mut masters = Stretches { data: &mut [0.0; 2], first_row: 0, width: 1, stride: 1 };
    let gradients = GradientRows::new(1, &[[0.0; BLOCK]]);
    update(Kernels::best(), &step(RuleKind::Sgd), &occurrences.sort().whole(), &gradients, &mut masters);
}

#[test]
#[should_panic(expected = "a slot beyond the gradients")]
fn a_slot_beyond_the_gradients_panics() {
    let mut occurrences = Occurrences::default();
    occurrences.push(0, 1);
    let mut masters = Stretches { data: &mut [0.0; 2], first_row: 0, width: 1, stride: 1 };
    let gradients = GradientRows::new(1, &[[0.0; BLOCK]]);
    update(Kernels::best(), &step(RuleKind::Sgd), &occurrences.sort().whole(), &gradients, &mut masters);
}

proptest! {
    /// Groups equal those of a stable sort by row, for few and many occurrences, low and high rows, with and without weights.
    #[test]
    fn groups_equal_those_of_a_stable_sort(
        count in prop::sample::select(vec![0usize, 1, 2, 100, 255, 256, 257, 3000]),
        largest in prop::sample::select(vec![0u32, 1, 200, 2047, 2048, 1 << 20, u32::MAX]),
        weighted_from in 0usize..400,
        seed: u64,
    ) {
        let mut next = draws(seed);
        let named: Vec<(u32, u32, f32)> = (0..count)
            .map(|at| {
                let row = (next() % (u64::from(largest) + 1)) as u32;
                (row, (next() % 50) as u32, if at >= weighted_from { signed(next()) } else { 1.0 })
            })
            .collect();
        let mut occurrences = Occurrences::default();
        for (at, (row, slot, weight)) in named.iter().enumerate() {
            match at >= weighted_from {
                true => occurrences.push_weighted(*row, *slot, *weight),
                false => occurrences.push(*row, *slot),
            }
        }
        // The remaining occurrences form one bag, with ids that have no row.
        let bag: Vec<i64> = (0..count / 3).map(|_| (next() % (u64::from(largest) + 2)) as i64 - 1).collect();
        occurrences.push_bag(&bag, 50);
        let groups = occurrences.sort();
        let mut expected = named;
        expected.extend(bag.iter().filter_map(|row| Some((u32::try_from(*row).ok()?, 50, 1.0))));
        expected.sort_by_key(|(row, ..)| *row);
        let whole = groups.whole();
        let mut got = Vec::new();
        for (row, ends) in whole.rows().iter().zip(whole.starts().windows(2)) {
            for at in ends[0] as usize..ends[1] as usize {
                got.push((*row, whole.slots()[at], whole.weights().map_or(1.0, |w| w[at])));
            }
        }
        prop_assert_eq!(got, expected);
        prop_assert!(groups.rows().is_sorted() && groups.rows().windows(2).all(|w| w[0] != w[1]));
        for parts in [1, 2, 7, 5000] {
            let split = whole.split(parts);
            let rows: Vec<u32> = split.iter().flat_map(|part| part.rows().to_vec()).collect();
            prop_assert_eq!(&rows[..], groups.rows());
        }
    }
}
