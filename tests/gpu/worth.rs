//! The value model of a device against that of the CPU, and the columns of the best.

use std::collections::BTreeMap;

use sterling::device::cuda::ops::rows::SlotRows;
use sterling::device::cuda::ops::worth::{Rated, ValueInput, ValueProgram, tell};
use sterling::topk::unkey;
use sterling::value::{Program, Scratch};

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

fn score(key: u32) -> f32 {
    unkey(u64::from(key) << 32).0
}

#[test]
fn values_are_those_of_the_cpu_and_the_best_are_told() {
    let (device, mut random) = (device(), Random::new(4));
    let (queries, stride, slots, tasks) = (2usize, 300usize, 500usize, 2usize);
    let counts = [300u32, 7];
    let mut logits = random.numbers(queries * stride * 3);
    // Every fifth candidate is worth as much to both tasks.
    logits.chunks_exact_mut(3).step_by(5).for_each(|l| l[1] = l[0]);
    let price = random.numbers(slots);
    let slot_of: Vec<u32> = (0..queries * stride).map(|_| random.below(slots) as u32).collect();
    let similarity: Vec<f32> = random.numbers(queries * stride);
    let similarity_keys: Vec<u32> =
        similarity.iter().map(|&s| (sterling::topk::key(s, Default::default()) >> 32) as u32).collect();
    let constants = BTreeMap::from([("v".to_owned(), -0.25), ("w".to_owned(), 0.5)]);
    let of_queries = [[-0.25f32, 0.5], [1.5, 4.0]];
    let on = (
        device.copy(&logits).unwrap(),
        device.copy(&price).unwrap(),
        device.copy(&slot_of).unwrap(),
        device.copy(&similarity_keys).unwrap(),
        device.copy(&counts).unwrap(),
        device.copy(&of_queries.concat()).unwrap(),
    );
    let of = SlotRows { slots: &on.2, counts: &on.4, stride };
    let rated = Rated { of, similarity: &on.3, logits: Some((&on.0, 3)) };
    for text in EXPRESSIONS {
        let program = Program::compile(text, &["click", "buy", "price", "similarity"], &constants).unwrap();
        let input = |name: &String| match name.as_str() {
            "click" => ValueInput::task(0),
            "buy" => ValueInput::task(1),
            "price" => ValueInput::column(&on.1),
            _ => ValueInput::similarity(),
        };
        let inputs: Vec<ValueInput> = program.inputs().iter().map(input).collect();
        let copied = ValueProgram {
            steps: device.copy(&program.lower()).unwrap(),
            inputs: device.copy(&inputs).unwrap(),
            constants: 2,
            tasks,
            depth: program.depth(),
        };
        let valued = copied.evaluate(&device, &rated, &on.5).unwrap();
        let (keys, task_scores) = (valued.keys.to_vec().unwrap(), valued.tasks.to_vec().unwrap());
        assert_eq!(valued.bad.to_vec().unwrap(), [0, 0]);
        for q in 0..queries {
            let places = q * stride..q * stride + counts[q] as usize;
            let of_task = |task: usize| -> Vec<f32> {
                places.clone().map(|n| 1.0 / (1.0 + (-logits[n * 3 + task]).exp())).collect()
            };
            let (click, buy) = (of_task(0), of_task(1));
            let prices: Vec<f32> = places.clone().map(|n| price[slot_of[n] as usize]).collect();
            let column = |name: &String| match name.as_str() {
                "click" => &click[..],
                "buy" => &buy[..],
                "price" => &prices[..],
                _ => &similarity[places.clone()],
            };
            let columns: Vec<&[f32]> = program.inputs().iter().map(column).collect();
            let mut want = vec![0f32; places.len()];
            program.evaluate(&columns, &of_queries[q], &mut Scratch::default(), &mut want);
            for (n, place) in places.clone().enumerate() {
                let (got, want) = (score(keys[place]), want[n]);
                assert!((got - want).abs() <= 3e-5 * want.abs().max(1.0), "{text}: {got}, expected {want}");
                assert!((task_scores[place * tasks] - click[n]).abs() < 1e-6);
            }
        }
        let places = device.copy(&[5u32, 299, 0, 1, 6, 0]).unwrap();
        let told_counts = device.copy(&[3u32, 2]).unwrap();
        let best = SlotRows { slots: &places, counts: &told_counts, stride: 3 };
        let told = tell(&device, best, &rated, (&valued.tasks, tasks)).unwrap();
        let slots = told.slots.to_vec().unwrap();
        assert_eq!([slots[0], slots[1], slots[4]], [slot_of[5], slot_of[299], slot_of[stride + 6]]);
        assert_eq!(told.similarity.to_vec().unwrap()[3], similarity_keys[stride + 1]);
        assert_eq!(told.tasks.to_vec().unwrap()[2..4], task_scores[299 * tasks..300 * tasks]);
    }
    // A task that is not a number is told, and its request alone.
    let mut broken = logits.clone();
    broken[stride * 3] = f32::NAN;
    on.0.write(&broken).unwrap();
    let program = Program::compile("click", &["click"], &BTreeMap::new()).unwrap();
    let copied = ValueProgram {
        steps: device.copy(&program.lower()).unwrap(),
        inputs: device.copy(&[ValueInput::task(0)]).unwrap(),
        constants: 0,
        tasks,
        depth: program.depth(),
    };
    let valued = copied.evaluate(&device, &rated, &on.5).unwrap();
    assert_eq!(valued.bad.to_vec().unwrap(), [0, 1]);
    assert_eq!(score(valued.keys.to_vec().unwrap()[stride]), f32::MIN);
}
