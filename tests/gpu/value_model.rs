//! The value model on a GPU compared with that of the CPU, and the columns of the best.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use sterling::cuda::ops::rows::SlotRows;
use sterling::cuda::ops::value_model::{Rated, ValueInput, ValueProgram, Valued, gather_columns};
use sterling::cuda::{Array, Device};
use sterling::index::topk::{key, unkey};
use sterling::index::value::{Program, Scratch};

use crate::emulation::{Random, device};

const EXPRESSIONS: [&str; 8] = [
    "click",
    "click * 2 - buy / (price + 1)",
    "if(price > 0.5, w * click, pow(buy, 2)) + v",
    "min(click, max(buy, 0.3)) + abs(price) + sqrt(price)",
    "log(price) + exp(-click) * sigmoid(buy - w)",
    "(click >= buy) + 2 * (price == price) + 4 * (click != buy) + 8 * (click <= buy) + 16 * (click < buy) + 32 * (click > buy)",
    "1 / (click - click)",
    "similarity * w + clamp(price, -0.2, 0.2) + (0 / (buy - buy))",
];

const NAMES: [&str; 4] = ["click", "buy", "price", "similarity"];
const STRIDE: usize = 300;
const COUNTS: [u32; 2] = [300, 7];
const TASKS: usize = 2;
/// Number of logits per candidate, one more than there are tasks.
const LOGITS: usize = 3;
/// Constants `v` and `w` of each query.
const CONSTANTS: [[f32; 2]; 2] = [[-0.25, 0.5], [1.5, 4.0]];

fn score(key: u32) -> f32 {
    unkey(u64::from(key) << 32).0
}

fn ordered(score: f32) -> u32 {
    (key(score, Default::default()) >> 32) as u32
}

fn compiled(text: &str) -> Program {
    let constants = BTreeMap::from([("v".to_owned(), -0.25), ("w".to_owned(), 0.5)]);
    Program::compile(text, &NAMES, &constants).unwrap_or_else(|e| panic!("{text}: {e}"))
}

/// Candidates of two queries, on the host and on the device.
struct Candidates {
    logits: Vec<f32>,
    price: Vec<f32>,
    slots: Vec<u32>,
    similarity: Vec<f32>,
    on: OnDevice,
}

struct OnDevice {
    device: Device,
    logits: Array<f32>,
    price: Array<f32>,
    slots: Array<u32>,
    similarity: Array<u32>,
    counts: Array<u32>,
    constants: Array<f32>,
}

impl Candidates {
    fn new(device: Device, mut random: Random) -> Self {
        let places = COUNTS.len() * STRIDE;
        let mut logits = random.numbers(places * LOGITS);
        // Every fifth candidate has equal logits for both tasks.
        logits.chunks_exact_mut(LOGITS).step_by(5).for_each(|l| l[1] = l[0]);
        let mut price = random.numbers(500);
        price[..6].copy_from_slice(&[0.0, -0.0, 1e30, -1e-30, 2.0, -3.0]);
        let slots: Vec<u32> =
            (0..places).map(|n| (if n % 9 == 0 { n % 6 } else { random.below(500) }) as u32).collect();
        let similarity = random.numbers(places);
        let keys: Vec<u32> = similarity.iter().map(|&s| ordered(s)).collect();
        let on = OnDevice {
            logits: device.copy(&logits).unwrap(),
            price: device.copy(&price).unwrap(),
            slots: device.copy(&slots).unwrap(),
            similarity: device.copy(&keys).unwrap(),
            counts: device.copy(&COUNTS).unwrap(),
            constants: device.copy(&CONSTANTS.concat()).unwrap(),
            device,
        };
        Candidates { logits, price, slots, similarity, on }
    }

    fn rated(&self) -> Rated<'_> {
        let of = SlotRows { slots: &self.on.slots, counts: &self.on.counts, stride: STRIDE };
        Rated { of, similarity: &self.on.similarity, logits: Some((&self.on.logits, LOGITS)) }
    }

    fn evaluate(&self, program: &Program) -> Valued {
        let input = |name: &String| match name.as_str() {
            "click" => ValueInput::task(0),
            "buy" => ValueInput::task(1),
            "price" => ValueInput::column(&self.on.price),
            _ => ValueInput::similarity(),
        };
        let inputs: Vec<ValueInput> = program.inputs().iter().map(input).collect();
        let copied = ValueProgram {
            steps: self.on.device.copy(&program.lower()).unwrap(),
            inputs: self.on.device.copy(&inputs).unwrap(),
            constants: CONSTANTS[0].len(),
            tasks: TASKS,
            depth: program.depth(),
        };
        copied.evaluate(&self.on.device, &self.rated(), &self.on.constants).unwrap()
    }

    /// Returns the indexes of a query's candidates.
    fn places(&self, query: usize) -> std::ops::Range<usize> {
        query * STRIDE..query * STRIDE + COUNTS[query] as usize
    }

    /// Returns the values that the CPU computes for the candidates of a query with given task scores, `[places, TASKS]`.
    fn on_the_cpu(&self, program: &Program, query: usize, task_scores: &[f32]) -> Vec<f32> {
        let places = self.places(query);
        let column = |name: &String| -> Vec<f32> {
            let of = |place: usize| match name.as_str() {
                "click" => task_scores[place * TASKS],
                "buy" => task_scores[place * TASKS + 1],
                "price" => self.price[self.slots[place] as usize],
                _ => self.similarity[place],
            };
            places.clone().map(of).collect()
        };
        let columns: Vec<Vec<f32>> = program.inputs().iter().map(column).collect();
        let columns: Vec<&[f32]> = columns.iter().map(Vec::as_slice).collect();
        let mut values = vec![0f32; places.len()];
        program.evaluate(&columns, &CONSTANTS[query], &mut Scratch::default(), &mut values);
        values
    }
}

#[test]
fn values_are_those_of_the_cpu_and_the_best_are_returned() {
    let candidates = Candidates::new(device(), Random::new(4));
    let device = &candidates.on.device;
    let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
    let of_tasks = candidates.logits.chunks_exact(LOGITS).flat_map(|l| [sigmoid(l[0]), sigmoid(l[1])]);
    let of_tasks: Vec<f32> = of_tasks.collect();
    for text in EXPRESSIONS {
        let program = compiled(text);
        let valued = candidates.evaluate(&program);
        let (keys, task_scores) = (valued.keys.to_vec().unwrap(), valued.tasks.to_vec().unwrap());
        assert_eq!(valued.bad.to_vec().unwrap(), [0, 0]);
        for q in 0..COUNTS.len() {
            let values = candidates.on_the_cpu(&program, q, &of_tasks);
            for (place, want) in candidates.places(q).zip(values) {
                let got = score(keys[place]);
                assert!((got - want).abs() <= 3e-5 * want.abs().max(1.0), "{text}: {got}, expected {want}");
                let near = |n: usize| (task_scores[place * TASKS + n] - of_tasks[place * TASKS + n]).abs() < 1e-6;
                assert!(near(0) && near(1));
            }
        }
        let places = device.copy(&[5u32, 299, 0, 1, 6, 0]).unwrap();
        let told_counts = device.copy(&[3u32, 2]).unwrap();
        let best = SlotRows { slots: &places, counts: &told_counts, stride: 3 };
        let reported = gather_columns(device, best, &candidates.rated(), (&valued.tasks, TASKS)).unwrap();
        let (slots, slot_of) = (reported.slots.to_vec().unwrap(), &candidates.slots);
        assert_eq!([slots[0], slots[1], slots[4]], [slot_of[5], slot_of[299], slot_of[STRIDE + 6]]);
        assert_eq!(reported.similarity.to_vec().unwrap()[3], ordered(candidates.similarity[STRIDE + 1]));
        assert_eq!(reported.tasks.to_vec().unwrap()[2..4], task_scores[299 * TASKS..300 * TASKS]);
    }
    // A task score that is NaN is counted, for its request only, and ranks last even if the expression ignores it.
    let mut broken = candidates.logits.clone();
    broken[STRIDE * LOGITS] = f32::NAN;
    candidates.on.logits.write(&broken).unwrap();
    for text in ["click", "max(click, 5)"] {
        let valued = candidates.evaluate(&compiled(text));
        assert_eq!(valued.bad.to_vec().unwrap(), [0, 1]);
        assert_eq!(score(valued.keys.to_vec().unwrap()[STRIDE]), f32::MIN);
    }
}

/// More results than the threads of a grid, with few blocks and with many: each launch gets the other number.
#[test]
fn more_results_than_threads_are_returned() {
    let candidates = Candidates::new(device(), Random::new(6));
    let device = &candidates.on.device;
    let valued = candidates.evaluate(&compiled("click"));
    let task_scores = valued.tasks.to_vec().unwrap();
    let (stride, told_counts) = (600, [600u32, 7]);
    let place = |n: usize| (n % stride % COUNTS[n / stride] as usize) as u32;
    let places: Vec<u32> = (0..2 * stride).map(place).collect();
    let on = (device.copy(&places).unwrap(), device.copy(&told_counts).unwrap());
    for _ in 0..2 {
        let best = SlotRows { slots: &on.0, counts: &on.1, stride };
        let reported = gather_columns(device, best, &candidates.rated(), (&valued.tasks, TASKS)).unwrap();
        let (slots, similarity) = (reported.slots.to_vec().unwrap(), reported.similarity.to_vec().unwrap());
        let of_tasks = reported.tasks.to_vec().unwrap();
        for n in (0..2 * stride).filter(|n| n % stride < told_counts[n / stride] as usize) {
            let from = n / stride * STRIDE + places[n] as usize;
            assert_eq!((slots[n], similarity[n]), (candidates.slots[from], ordered(candidates.similarity[from])));
            assert_eq!(of_tasks[n * TASKS..(n + 1) * TASKS], task_scores[from * TASKS..(from + 1) * TASKS], "{n}");
        }
    }
}

/// Returns expressions of the complete language.
fn expression() -> impl Strategy<Value = String> {
    let name = select(vec!["click", "buy", "price", "similarity", "v", "w", "1e30"]).prop_map(String::from);
    let leaf = prop_oneof![3 => name, 1 => (-8i8..9).prop_map(|x| (f32::from(x) / 4.0).to_string())];
    let one = select(vec!["-", "log", "exp", "sqrt", "sigmoid", "abs"]);
    let two = select(vec!["+", "-", "*", "/", "<", "<=", ">", ">=", "==", "!="]);
    let called = |name: &str, of: &[String]| format!("{name}({})", of.join(", "));
    leaf.prop_recursive(7, 60, 3, move |inner| {
        prop_oneof![
            2 => (one.clone(), inner.clone()).prop_map(|(f, a)| format!("{f}({a})")),
            4 => (two.clone(), inner.clone(), inner.clone()).prop_map(|(f, a, b)| format!("({a}) {f} ({b})")),
            1 => vec(inner.clone(), 2).prop_map(move |of| called("pow", &of)),
            1 => (select(vec!["min", "max"]), vec(inner.clone(), 2..5)).prop_map(move |(f, of)| called(f, &of)),
            1 => (select(vec!["if", "clamp"]), vec(inner, 3)).prop_map(move |(f, of)| called(f, &of)),
        ]
    })
}

/// The compiler must not reorder the expression: for equal task scores, values equal those of the CPU bit for bit, except for
/// functions that a GPU rounds differently.
fn check_bits(text: &str) {
    let candidates = Candidates::new(device(), Random::new(text.len() as u64));
    let is_card = candidates.on.device.kind() != "emulated";
    if is_card && ["log", "exp", "sigmoid", "pow"].iter().any(|function| text.contains(function)) {
        return;
    }
    let program = compiled(text);
    let valued = candidates.evaluate(&program);
    let (keys, task_scores) = (valued.keys.to_vec().unwrap(), valued.tasks.to_vec().unwrap());
    for q in 0..COUNTS.len() {
        for (place, want) in candidates.places(q).zip(candidates.on_the_cpu(&program, q, &task_scores)) {
            assert_eq!(keys[place], ordered(want), "{text}: {}, expected {want}", score(keys[place]));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn expressions_have_the_values_of_the_cpu_to_the_bit(text in expression()) {
        check_bits(&text);
    }
}

/// As deep as the language allows: more than 128 threads have room for in the shared memory of some GPUs.
#[test]
fn the_deepest_expression_has_the_values_of_the_cpu() {
    let nested = |inner: String, _| format!("if(w, v + click, price < w + buy * {inner})");
    let text = (0..sterling::limits::VALUE_DEPTH_MAX).fold("similarity".to_owned(), nested);
    assert!(compiled(&text).depth() > 250, "{}", compiled(&text).depth());
    check_bits(&text);
}
