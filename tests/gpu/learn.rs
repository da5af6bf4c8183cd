//! Tables in training on a GPU, compared bit for bit with those of the CPU.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use sterling::cuda::emulated::Emulated;
use sterling::cuda::{Device, Driver as _};
use sterling::embedding::managed::{FREE, ManagedSpec};
use sterling::embedding::train::{Decay, LearningTables, MasterTable, Rule, RuleKind, Schedule, UpdateReport};
use sterling::embedding::{BagConfig, KeyedJaggedTensor, KeyedTensor, Pooling, SequenceConfig, Unseen};
use sterling::error::Kind;
use sterling::kernels::cpu::Kernels;
use sterling::kernels::threads::Threads;
use sterling_train::{TrainOptions, Trainer};

use crate::emulation::{Random, device, emulated, seeded};

/// Tables, features and batches from a seed.
struct Workload {
    tables: Vec<TablePlan>,
    bags: Vec<BagConfig>,
    sequences: Vec<SequenceConfig>,
    steps: Vec<Step>,
}

struct TablePlan {
    name: String,
    width: usize,
    values: Vec<f32>,
    unseen: Unseen,
    rule: Option<Rule>,
}

struct Step {
    ids: KeyedJaggedTensor,
    pooled: Vec<f32>,
    sequences: Vec<Vec<f32>>,
}

/// Sizes of a workload.
struct Sizes {
    steps: usize,
    examples: usize,
    /// Maximum length of most bags, and of one in twelve.
    usual: usize,
    long: usize,
    widths: &'static [usize],
}

const SMALL: Sizes =
    Sizes { steps: 50, examples: 5, usual: 7, long: 300, widths: &[1, 3, 8, 16, 20, 33, 48, 64, 100, 128, 200, 256] };

/// All bits of a run: pooled values and rows of sequences per step, reports, and rows and state at the end.
#[derive(Default, PartialEq)]
struct Outcome {
    outputs: Vec<Vec<u32>>,
    reports: Vec<UpdateReport>,
    rows: Vec<(Vec<u32>, Vec<u32>)>,
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}

impl TablePlan {
    fn new(number: usize, widths: &[usize], random: &mut Random) -> Self {
        let (width, rows) = (widths[random.below(widths.len())], 1 + random.below(60));
        let unseen = [Unseen::Zero, Unseen::Hash, Unseen::Row(random.below(rows) as u64)][random.below(3)];
        let rule = Rule {
            decay: [Decay::None, Decay::None, Decay::L2(0.1), Decay::Decoupled(0.1)][random.below(4)],
            max_norm: (random.below(3) == 0).then_some(1.5),
            clip: (random.below(3) == 0).then_some(1.0),
            schedule: Schedule { warm_up: random.below(20) as u64, decay: random.below(40) as u64, floor: 0.1 },
            ..Rule::new(RuleKind::ALL[random.below(5)], 0.05)
        };
        let rule = (random.below(8) > 0).then_some(rule);
        TablePlan { name: format!("t{number}"), width, values: random.numbers(rows * width), unseen, rule }
    }

    fn master(&self) -> MasterTable {
        MasterTable::from_f32(&self.name, self.width, &self.values, self.unseen, self.rule).unwrap()
    }
}

impl Workload {
    fn new(seed: u64, sizes: &Sizes) -> Self {
        let mut random = Random::new(seed);
        let tables = (0..1 + random.below(4)).map(|n| TablePlan::new(n, sizes.widths, &mut random)).collect();
        Workload::over(tables, sizes, &mut random)
    }

    fn over(tables: Vec<TablePlan>, sizes: &Sizes, random: &mut Random) -> Self {
        let name = |random: &mut Random| tables[random.below(tables.len())].name.clone();
        let bags: Vec<BagConfig> = (0..random.below(4))
            .map(|n| BagConfig {
                feature: format!("bag{n}"),
                table: name(random),
                pooling: [Pooling::Sum, Pooling::Mean][random.below(2)],
            })
            .collect();
        let first = usize::from(bags.is_empty());
        let sequences = (0..first + random.below(2))
            .map(|n| SequenceConfig { feature: format!("sequence{n}"), table: name(random) })
            .collect();
        let mut workload = Workload { tables, bags, sequences, steps: Vec::new() };
        let is_weighted = random.below(2) == 0;
        workload.steps = (0..sizes.steps).map(|_| workload.step(sizes, is_weighted, random)).collect();
        workload
    }

    fn table(&self, name: &str) -> &TablePlan {
        self.tables.iter().find(|table| table.name == name).unwrap()
    }

    fn step(&self, sizes: &Sizes, is_weighted: bool, random: &mut Random) -> Step {
        let examples = 1 + random.below(sizes.examples);
        let features = self.bags.iter().map(|b| (&b.feature, &b.table));
        let features: Vec<_> = features.chain(self.sequences.iter().map(|s| (&s.feature, &s.table))).collect();
        let (mut values, mut lengths, mut counts) = (Vec::new(), Vec::new(), Vec::new());
        for (_, table) in &features {
            let (plan, before) = (self.table(table), values.len());
            let rows = plan.values.len() / plan.width;
            for _ in 0..examples {
                let longest = if random.below(12) == 0 { sizes.long } else { sizes.usual };
                let length = if random.below(4) == 0 { 0 } else { random.below(longest) };
                lengths.push(length as i64);
                // A few rows occur often, and some ids have no row.
                values.extend((0..length).map(|_| match random.below(10) {
                    0 => random.next() as i64 - (1 << 60),
                    1 | 2 => 0,
                    _ => random.below(rows) as i64,
                }));
            }
            counts.push(values.len() - before);
        }
        let weights = is_weighted.then(|| random.numbers(values.len()));
        let keys: Vec<String> = features.iter().map(|(feature, _)| feature.to_string()).collect();
        let ids = KeyedJaggedTensor::from_lengths(keys, values, &lengths, weights).unwrap();
        let mut gradients = |count: usize| -> Vec<f32> {
            let mut numbers = random.numbers(count);
            if random.below(15) == 0 && count > 0 {
                numbers[random.below(count)] = [f32::NAN, f32::INFINITY, 1e30, -0.0][random.below(4)];
            }
            numbers
        };
        let width: usize = self.bags.iter().map(|bag| self.table(&bag.table).width).sum();
        let pooled = gradients(examples * width);
        let sequences = self.sequences.iter().zip(&counts[self.bags.len()..]);
        let sequences = sequences.map(|(s, count)| gradients(count * self.table(&s.table).width)).collect();
        Step { ids, pooled, sequences }
    }

    fn learner(&self) -> LearningTables {
        let masters = self.tables.iter().map(TablePlan::master).collect();
        LearningTables::new(masters, &self.bags, &self.sequences, &Threads::default()).unwrap()
    }

    fn gradients(&self, step: &Step) -> KeyedTensor {
        let keys = self.bags.iter().map(|bag| bag.feature.clone()).collect();
        let widths: Vec<usize> = self.bags.iter().map(|bag| self.table(&bag.table).width).collect();
        KeyedTensor::new(keys, &widths, step.pooled.clone()).unwrap()
    }

    fn run(&self, learner: &mut LearningTables) -> Outcome {
        let mut outcome = Outcome::default();
        for step in &self.steps {
            let batch = learner.prepare(step.ids.clone()).unwrap();
            let (pooled, sequences) = learner.forward(&batch).unwrap();
            outcome.outputs.push(bits(pooled.values()));
            outcome.outputs.extend(sequences.iter().map(|(_, rows)| bits(rows.values())));
            outcome.reports.push(learner.backward(batch, &self.gradients(step), &step.sequences).unwrap());
        }
        for table in learner.tables() {
            let rows = table.export(0..table.spec().rows as u32).unwrap();
            outcome.rows.push((bits(&rows.values), bits(&rows.state)));
        }
        outcome
    }

    /// Runs on the CPU and on a device, and compares all bits.
    fn is_equal_on(&self, device: &Device, what: &str) {
        let expected = self.run(&mut self.learner());
        let got = self.run(&mut self.learner().on_device(device).unwrap());
        // Without a fused multiply-add, weighted sums of the CPU are rounded twice.
        if Kernels::detect().unwrap().name() != "portable" {
            assert!(got.outputs == expected.outputs, "{what}: outputs");
        }
        assert_eq!(got.reports, expected.reports, "{what}");
        assert!(got.rows == expected.rows, "{what}: rows and state");
    }
}

#[test]
fn random_workloads_give_the_bits_of_the_cpu() {
    for seed in 0..8 {
        Workload::new(seed, &SMALL).is_equal_on(&device(), &format!("workload {seed}"));
    }
}

#[test]
#[ignore = "long: 200 workloads of 50 steps take minutes in emulation"]
fn two_hundred_random_workloads_give_the_bits_of_the_cpu() {
    for seed in 0..200 {
        Workload::new(seed, &SMALL).is_equal_on(&device(), &format!("workload {seed}"));
    }
}

/// Every rule, decay and limit at widths below, at and above those at which the kernels change their shape.
#[test]
fn every_rule_gives_the_bits_of_the_cpu_at_every_width() {
    let sizes = Sizes { steps: 2, examples: 6, usual: 30, long: 700, widths: &[] };
    let mut random = Random::new(9);
    for width in [1, 2, 4, 15, 16, 17, 20, 32, 33, 60, 64, 65, 100, 128, 129, 132, 200, 255, 256] {
        let tables = RuleKind::ALL.into_iter().enumerate().map(|(n, kind)| {
            let decay = [Decay::None, Decay::L2(0.1), Decay::Decoupled(0.1)][(n + width) % 3];
            let (max_norm, clip) = ((width % 2 == 0).then_some(1.5), (width % 3 == 0).then_some(1.0));
            let rule = Some(Rule { decay, max_norm, clip, ..Rule::new(kind, 0.1) });
            TablePlan { name: kind.name().into(), width, values: random.numbers(9 * width), unseen: Unseen::Zero, rule }
        });
        let mut workload =
            Workload { tables: tables.collect(), bags: Vec::new(), sequences: Vec::new(), steps: Vec::new() };
        let bag = |(n, table): (usize, &TablePlan)| BagConfig {
            feature: table.name.clone(),
            table: table.name.clone(),
            pooling: [Pooling::Sum, Pooling::Mean][n % 2],
        };
        workload.bags = workload.tables.iter().enumerate().map(bag).collect();
        workload.steps = (0..sizes.steps).map(|n| workload.step(&sizes, n % 2 == 0, &mut random)).collect();
        workload.is_equal_on(&device(), &format!("width {width}"));
    }
}

/// Rows with up to 10,000 occurrences: below, at and above multiples of a run, next to each other.
#[test]
fn sums_of_many_equal_ids_are_added_in_runs() {
    let counts = [1usize, 255, 256, 257, 0, 300, 511, 512, 513, 2, 258, 10_000, 260, 1, 769];
    let sizes = Sizes { steps: 0, examples: 1, usual: 1, long: 1, widths: &[] };
    for (width, is_weighted) in [(8, false), (20, true), (256, false)] {
        let mut random = Random::new(width as u64);
        let values = random.numbers(counts.len() * width);
        let rule = Some(Rule::new(RuleKind::Adam, 0.1));
        let table = TablePlan { name: "t".into(), width, values, unseen: Unseen::Zero, rule };
        // A narrow table beside it, with runs in the same buffer of sums, and a rule that reads all columns.
        let rule = Some(Rule::new(RuleKind::RowwiseAdagrad, 0.1));
        let other = TablePlan { name: "u".into(), width: 3, values: random.numbers(9), rule, ..table };
        let mut workload = Workload::over(vec![table, other], &sizes, &mut random);
        workload.bags = ["t", "u"]
            .map(|name| BagConfig { feature: name.into(), table: name.into(), pooling: Pooling::Mean })
            .into();
        workload.sequences = Vec::new();
        let mut ids: Vec<i64> = counts.iter().enumerate().flat_map(|(row, &n)| vec![row as i64; n]).collect();
        for at in (1..ids.len()).rev() {
            ids.swap(at, random.below(at + 1));
        }
        let lengths: Vec<i64> = vec![17, 0, 4000, 1, ids.len() as i64 - 4018, 0, 300, 1, 1000, 0];
        ids.extend((0..1301).map(|_| random.below(3) as i64));
        let weights = is_weighted.then(|| random.numbers(ids.len()));
        let step = || Step {
            ids: KeyedJaggedTensor::from_lengths(["t", "u"], ids.clone(), &lengths, weights.clone()).unwrap(),
            pooled: Random::new(3).numbers(5 * (width + 3)),
            sequences: Vec::new(),
        };
        workload.steps = vec![step(), step()];
        workload.is_equal_on(&device(), &format!("width {width}"));
    }
}

/// Keys of one to three digits, tiles that are not full, and more tiles than the block that sums them has threads.
#[test]
fn pairs_are_sorted_by_several_digits() {
    let tile = 2048;
    let sizes = [(1usize, 1usize), (255, tile - 1), (256, tile), (257, tile + 1), (70_000, 3 * tile), (1 << 17, 5000)];
    for (rows, count) in sizes.into_iter().chain([(100, 257 * tile + 5)]) {
        let mut random = Random::new(rows as u64);
        let rule = Some(Rule::new(RuleKind::RowwiseAdagrad, 0.1));
        let values = random.numbers(rows);
        let tables = vec![TablePlan { name: "t".into(), width: 1, values, unseen: Unseen::Zero, rule }];
        let bags = vec![BagConfig { feature: "f".into(), table: "t".into(), pooling: Pooling::Sum }];
        let ids = (0..count).map(|_| random.below(rows + rows / 9 + 1) as i64).collect();
        let lengths = [count as i64 / 2, 0, count as i64 - count as i64 / 2];
        let step = Step {
            ids: KeyedJaggedTensor::from_lengths(["f"], ids, &lengths, None).unwrap(),
            pooled: vec![0.5, 7.0, 0.25],
            sequences: Vec::new(),
        };
        let workload = Workload { tables, bags, sequences: Vec::new(), steps: vec![step] };
        workload.is_equal_on(&device(), &format!("{rows} rows, {count} ids"));
    }
}

#[test]
fn batches_prepared_ahead_see_all_earlier_updates() {
    let workload = Workload::new(3, &SMALL);
    let expected = workload.run(&mut workload.learner()).rows;
    let mut learner = workload.learner().on_device(&device()).unwrap();
    let mut batches: Vec<_> = workload.steps.iter().map(|step| learner.prepare(step.ids.clone()).unwrap()).collect();
    // Both forward passes run before the first backward pass.
    let (first, second) = (batches.remove(0), batches.remove(0));
    learner.forward(&first).unwrap();
    learner.forward(&second).unwrap();
    for (step, batch) in workload.steps.iter().zip([first, second].into_iter().chain(batches)) {
        learner.backward(batch, &workload.gradients(step), &step.sequences).unwrap();
    }
    for (table, expected) in learner.tables().iter().zip(&expected) {
        let rows = table.export(0..table.spec().rows as u32).unwrap();
        assert!((bits(&rows.values), bits(&rows.state)) == *expected);
    }
}

/// The vectors of all items are computed between the forward and the backward pass of a batch, in many lookups.
#[test]
fn lookups_before_a_backward_pass_reuse_the_memory_of_the_stream() {
    let (workload, device) = (Workload::new(3, &SMALL), device());
    let expected = workload.run(&mut workload.learner()).rows;
    let mut learner = workload.learner().on_device(&device).unwrap();
    for (n, step) in workload.steps.iter().enumerate() {
        let batch = learner.prepare(step.ids.clone()).unwrap();
        learner.forward(&batch).unwrap();
        let look_up = || {
            learner.forward(&learner.prepare(step.ids.clone()).unwrap()).unwrap();
            device.lanes().taken()
        };
        let taken: Vec<u64> = (0..6).map(|_| look_up()).collect();
        assert!(taken[1..].iter().all(|&taken_later| taken_later <= taken[0]), "step {n}: {taken:?} bytes");
        learner.backward(batch, &workload.gradients(step), &step.sequences).unwrap();
    }
    for (table, expected) in learner.tables().iter().zip(&expected) {
        let rows = table.export(0..table.spec().rows as u32).unwrap();
        assert!((bits(&rows.values), bits(&rows.state)) == *expected);
    }
}

/// Checkpoints, served tables and rows that are set are those of the CPU.
#[test]
fn rows_are_read_and_written_on_the_device() {
    let workload = Workload::new(7, &SMALL);
    let (mut on_cpu, mut on_gpu) = (workload.learner(), workload.learner().on_device(&device()).unwrap());
    workload.run(&mut on_cpu);
    for (from, to) in on_cpu.tables().iter().zip(on_gpu.tables_mut()) {
        to.import(&from.export(0..from.spec().rows as u32).unwrap()).unwrap();
        assert_eq!((to.bytes(), to.state_width()), (from.bytes(), from.state_width()));
        assert!(to.import(&from.export([0]).unwrap()).is_ok() && to.export([1, 0]).is_err());
    }
    on_gpu.set_steps(on_cpu.steps());
    let (after, expected) = (workload.run(&mut on_gpu), workload.run(&mut on_cpu));
    assert!(after.rows == expected.rows && after.reports == expected.reports);
    for (from, to) in on_cpu.tables().iter().zip(on_gpu.tables()) {
        let format = sterling::embedding::RowFormat::F16;
        let (served, expected) = (to.served(format).unwrap(), from.served(format).unwrap());
        assert_eq!(served.host_bytes().unwrap()[..], expected.host_bytes().unwrap()[..]);
    }
}

/// The number of updates, by which Adam corrects its bias, saturates at the largest number.
#[test]
fn counts_of_updates_saturate() {
    for kind in [RuleKind::Adam, RuleKind::RowwiseAdam] {
        let learner = || {
            let mut table = MasterTable::from_f32("t", 2, &[1.0; 8], Unseen::Zero, Some(Rule::new(kind, 0.1))).unwrap();
            let mut rows = table.export(0..4).unwrap();
            for (count, state) in
                [0, 1, u32::MAX - 1, u32::MAX].into_iter().zip(rows.state.chunks_exact_mut(table.state_width()))
            {
                *state.last_mut().unwrap() = f32::from_bits(count);
            }
            table.import(&rows).unwrap();
            let bags = [BagConfig { feature: "f".into(), table: "t".into(), pooling: Pooling::Sum }];
            LearningTables::new(vec![table], &bags, &[], &Threads::default()).unwrap()
        };
        let mut learners = [learner(), learner().on_device(&device()).unwrap()];
        let [on_cpu, on_gpu] = learners.each_mut().map(|learner| {
            let ids = KeyedJaggedTensor::from_lengths(["f"], vec![0, 1, 2, 3], &[4], None).unwrap();
            let batch = learner.prepare(ids).unwrap();
            let gradients = KeyedTensor::new(vec!["f".into()], &[2], vec![0.5, -0.25]).unwrap();
            let report = learner.backward(batch, &gradients, &[]).unwrap();
            let rows = learner.tables()[0].export(0..4).unwrap();
            (report, bits(&rows.values), bits(&rows.state))
        });
        assert_eq!(on_gpu, on_cpu, "{kind:?}");
    }
}

/// Rows of managed ids are reassigned on the device as on the CPU.
#[test]
fn managed_rows_are_reassigned_on_the_device() {
    let spec = ManagedSpec { rows: Some(20), every: 3, ..ManagedSpec::default() };
    let learner = || {
        let table = MasterTable::zeros("t", 20, 12, Unseen::Zero, Some(Rule::new(RuleKind::Adam, 0.1))).unwrap();
        let table = table.with_ids(Some(spec), &[FREE; 20]).unwrap();
        let bags = [BagConfig { feature: "f".into(), table: "t".into(), pooling: Pooling::Mean }];
        LearningTables::new(vec![table], &bags, &[], &Threads::default()).unwrap()
    };
    let mut learners = [learner(), learner().on_device(&device()).unwrap()];
    let mut random = Random::new(5);
    let mut changed = 0;
    for step in 0..12 {
        let ids: Vec<i64> = (0..30).map(|_| 1000 + random.below(15 + 5 * step) as i64).collect();
        let gradients = random.numbers(3 * 12);
        let [expected, got] = learners.each_mut().map(|learner| {
            let ids = KeyedJaggedTensor::from_lengths(["f"], ids.clone(), &[10, 10, 10], None).unwrap();
            let batch = learner.prepare(ids).unwrap();
            let (pooled, _) = learner.forward(&batch).unwrap();
            let gradients = KeyedTensor::new(vec!["f".into()], &[12], gradients.clone()).unwrap();
            let report = learner.backward(batch, &gradients, &[]).unwrap();
            (bits(pooled.values()), report, learner.tables()[0].export(0..20).unwrap())
        });
        changed += expected.1.tables[0].assigned.len();
        assert!(got == expected, "step {step}");
    }
    assert!(changed > 20, "{changed} rows changed hands");
    let [on_cpu, on_gpu] = learners.each_mut().map(|learner| {
        let held = learner.tables()[0].id_by_row().unwrap().iter().copied().find(|id| *id != FREE).unwrap();
        let forgotten = learner.tables_mut()[0].forget(&[held]).unwrap();
        (forgotten, learner.tables()[0].export(0..20).unwrap())
    });
    assert_eq!(on_gpu, on_cpu);
}

#[test]
fn what_a_device_cannot_train_is_rejected_by_name() {
    let learner = |width, rows| {
        let rule = Some(Rule::default());
        let master = MasterTable::zeros("products", rows, width, Unseen::Zero, rule).unwrap();
        let bags = [BagConfig { feature: "f".into(), table: "products".into(), pooling: Pooling::Sum }];
        LearningTables::new(vec![master], &bags, &[], &Threads::default()).unwrap()
    };
    let small = Device::over(Arc::new(seeded(1).like("small", 1 << 16)));
    let error = learner(64, 1000).on_device(&small).unwrap_err();
    let text = error.to_string();
    assert_eq!(error.kind(), Kind::Overloaded, "{text}");
    assert!(text.contains("`products` 320000") && text.contains("65536 free"), "{text}");
    let error = learner(257, 4).on_device(&small).unwrap_err();
    assert!(error.to_string().contains("table `products`: width 257"), "{error}");
    let with_preparer = learner(4, 4);
    let _preparer = with_preparer.preparer();
    assert_eq!(with_preparer.on_device(&small).unwrap_err().kind(), Kind::Invalid);
}

/// Streams that run as late as possible, and other orders of threads.
#[test]
fn orders_of_streams_and_threads_change_no_bit() {
    let sizes = Sizes { steps: 6, ..SMALL };
    for seed in 0..6 {
        let workload = Workload::new(20 + seed, &sizes);
        workload.is_equal_on(&Device::over(Arc::new(seeded(100 + seed).late())), &format!("seed {seed}, late"));
        workload.is_equal_on(&Device::over(Arc::new(seeded(200 + seed))), &format!("seed {seed}"));
    }
}

#[test]
fn a_lost_device_is_an_error_and_frees_its_memory() {
    let workload = Workload::new(1, &SMALL);
    let card: Arc<Emulated> = emulated();
    let (free, _) = card.memory().unwrap();
    for launches in [0, 1, 2, 5, 9] {
        let mut learner = workload.learner().on_device(&Device::over(card.clone())).unwrap();
        let step = &workload.steps[0];
        let batch = learner.prepare(step.ids.clone()).unwrap();
        card.lose_after(launches);
        let forward = learner.forward(&batch).map(|_| ());
        let result = forward.and_then(|()| learner.backward(batch, &workload.gradients(step), &step.sequences));
        assert_eq!(result.unwrap_err().kind(), Kind::Unavailable, "after {launches} launches");
        card.find_again();
        drop(learner);
    }
    assert_eq!(card.memory().unwrap().0, free);
}

/// `sterling train` with tables on a GPU writes the package that it writes with tables on the CPU.
#[test]
fn packages_trained_on_a_device_have_the_bits_of_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let (package, golden) =
        (folder.path().join("package"), Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tiny"));
    fs::create_dir(&package).unwrap();
    for name in ["item.onnx", "items.jsonl", "overarch.onnx", "sections.txt", "tables.safetensors", "user.onnx"] {
        fs::copy(golden.join(name), package.join(name)).unwrap();
    }
    let train = "\n[train]\nlabel = \"click\"\nbatch = 8\nuniform = 8\n";
    fs::write(package.join("model.toml"), fs::read_to_string(golden.join("model.toml")).unwrap() + train).unwrap();
    let lines = (0..60).fold(String::new(), |mut lines, n| {
        let (had, next) = (n * 7 % 11, n * 7 % 11 + 1);
        let user = format!("{{\"installed\": [{had}, 3], \"size\": [0.5, 0.25, 0.125], \"section\": \"games\"}}");
        writeln!(lines, "{{\"id\": {n}, \"time\": {n}, \"user\": {user}, \"item\": {next}, \"type\": \"click\"}}")
            .unwrap();
        lines
    });
    let events = folder.path().join("events.jsonl");
    fs::write(&events, lines).unwrap();
    let run = |device: Option<Device>, name: &str| -> BTreeMap<String, Vec<u8>> {
        let options = TrainOptions {
            device,
            checkpoint_steps: 2,
            ..TrainOptions::new(vec![events.clone()], folder.path().join(format!("{name}.work")))
        };
        let mut trainer = Trainer::open(&package, options).unwrap();
        assert_eq!(trainer.run(&|_| ()).unwrap().events, 60);
        let out = folder.path().join(name);
        trainer.write(&out).unwrap();
        let files = fs::read_dir(out).unwrap().map(|entry| entry.unwrap().path());
        files.map(|path| (path.file_name().unwrap().display().to_string(), fs::read(path).unwrap())).collect()
    };
    let expected = run(None, "on_cpu");
    let before = fs::read(package.join("tables.safetensors")).unwrap();
    assert!(expected["tables.safetensors"] != before, "nothing was learned");
    let got = run(Some(device()), "on_gpu");
    assert_eq!(got.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (name, bytes) in &expected {
        assert!(got[name] == *bytes, "{name}");
    }
}
