//! The eligibility index: false-positive rate of Bloom planes, and cost of a filter leaf.
//!
//! `cargo bench --bench filter` prints the two tables of `docs/benchmarks/filters.md`. Times are medians of several runs on one
//! thread.

#![allow(clippy::unwrap_used)]

use std::io::Write as _;
use std::time::Instant;

use sterling::index::columns::{self, Columns, ItemColumn, ItemValues};
use sterling::index::filter::{Index, Options, Plan, Scratch, encode, parse};
use sterling::storage::files::{TensorFile, Tensors};
use sterling::units::{ListId, Slot};

const RUNS: usize = 15;

/// Pseudo-random numbers that are the same in every run (SplitMix64).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// Returns an integer column with `count` values for each of `items`.
fn integers(name: &str, items: usize, count: usize, mut value: impl FnMut() -> i64) -> ItemColumn {
    let offsets = (0..=items).map(|n| (n * count) as u32).collect();
    let values = (0..items * count).map(|_| value()).collect();
    ItemColumn { name: name.into(), filter: true, values: ItemValues::Integers { offsets, values } }
}

/// Builds columns and index over lists of `list` items each, through files as in a snapshot.
fn built(items: &[ItemColumn], count: usize, list: usize, options: &Options) -> (Columns, Index) {
    let folder = tempfile::tempdir().unwrap();
    let order: Vec<u32> = (0..count as u32).collect();
    let path = folder.path().join("columns.safetensors");
    let mut file = TensorFile::new();
    columns::encode(items, &order, &mut file).unwrap();
    file.write(&path).unwrap();
    let columns = Columns::open(&Tensors::open(&path).unwrap(), count).unwrap();
    let offsets: Vec<u32> = (0..=count / list).map(|n| (n * list) as u32).collect();
    let lengths = vec![list as u32; count / list];
    let path = folder.path().join("filter.safetensors");
    let mut file = TensorFile::new();
    encode(&columns, &offsets, &lengths, options, &mut file).unwrap();
    file.write(&path).unwrap();
    let index = Index::open(&Tensors::open(&path).unwrap(), &offsets, &lengths, columns.terms()).unwrap();
    (columns, index)
}

fn planned(filter: &str, columns: &Columns, index: &Index) -> Plan {
    Plan::new(&parse(filter).unwrap().canonical(), columns, index, 0).unwrap()
}

/// Evaluates the filter bitmaps of the lists and returns the number of set bits.
fn evaluate(
    plan: &Plan,
    index: &Index,
    lists: impl Iterator<Item = usize>,
    scratch: &mut Scratch,
    out: &mut [u64],
) -> u64 {
    let mut ones = 0;
    for list in lists {
        let list = ListId(list as u32);
        let words = index.words(list);
        plan.words(index, list, scratch, out);
        ones += out[..words].iter().map(|w| u64::from(w.count_ones())).sum::<u64>();
    }
    ones
}

fn false_positives(out: &mut impl std::io::Write) {
    const ITEMS: usize = 1 << 15;
    const TERMS: usize = 400;
    writeln!(out, "| bits an item | bytes | false positives | by theory | two terms with AND |\n|---|---|---|---|---|")
        .unwrap();
    let mut numbers = Numbers(1);
    let features: Vec<ItemColumn> =
        (0..6).map(|f| integers(&format!("f{f}"), ITEMS, 10, || numbers.below(20_000) as i64)).collect();
    for bits in [512u32, 768, 1024, 2048] {
        let options =
            Options { fixed_bits: Some(bits), exact_share_min: 1.0, posting_share_max: 0.0, ..Options::default() };
        let (columns, index) = built(&features, ITEMS, 256, &options);
        let mut words = vec![0; index.words_max()];
        let mut rate = |filters: &mut dyn FnMut() -> String| {
            let (mut maybe, mut no) = (0, 0);
            for _ in 0..TERMS {
                let plan = planned(&filters(), &columns, &index);
                let truth = (0..ITEMS as u32).filter(|&s| plan.passes(Slot(s))).count() as u64;
                maybe += evaluate(&plan, &index, 0..index.lists(), &mut Scratch::default(), &mut words) - truth;
                no += ITEMS as u64 - truth;
            }
            maybe as f64 / no as f64
        };
        let mut numbers = Numbers(2);
        let one = rate(&mut || format!("f{}:{}", numbers.below(6), numbers.below(20_000)));
        let two = rate(&mut || format!("f0:{} AND f1:{}", numbers.below(20_000), numbers.below(20_000)));
        let theory = (1.0 - (-5.0 * 60.0 / f64::from(bits)).exp()).powi(5);
        let percent = |x: f64| format!("{:.*} %", if x < 1e-4 { 4 } else { 3 }, 100.0 * x);
        let row = [percent(one), percent(theory), percent(two)].join(" | ");
        writeln!(out, "| {bits} | {} | {row} |", bits / 8).unwrap();
    }
}

/// Returns the bytes per nanosecond that one thread reads from memory.
fn bandwidth() -> f64 {
    let memory = vec![1u64; 1 << 25];
    let mut best = f64::MAX;
    for _ in 0..RUNS {
        let start = Instant::now();
        let sum = memory.iter().fold(0u64, |sum, x| sum.wrapping_add(*x));
        best = best.min(start.elapsed().as_secs_f64());
        assert_eq!(std::hint::black_box(sum), 1 << 25);
    }
    memory.len() as f64 * 8.0 / best / 1e9
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    times[times.len() / 2]
}

fn speed(out: &mut impl std::io::Write) {
    const ITEMS: usize = 1 << 20;
    const LIST: usize = 256;
    /// Number of lists per measurement.
    const TIMED: usize = 128;
    let bandwidth = bandwidth();
    writeln!(out, "{ITEMS} items in lists of {LIST}; one thread reads {bandwidth:.1} GB/s from memory.\n").unwrap();
    let mut numbers = Numbers(3);
    let columns = [
        integers("kind", ITEMS, 3, || numbers.below(40) as i64),
        integers("shelf", ITEMS, 1, {
            let mut numbers = Numbers(7);
            move || numbers.below(200) as i64
        }),
        integers("tag", ITEMS, 27, {
            let mut numbers = Numbers(4);
            move || numbers.below(100_000) as i64
        }),
        {
            let mut numbers = Numbers(5);
            let prices = (0..ITEMS).map(|_| numbers.below(1 << 40) as f64 / f64::from(1u32 << 20)).collect();
            ItemColumn { name: "price".into(), filter: true, values: ItemValues::Floats(prices) }
        },
    ];
    let built = |options: &Options| built(&columns, ITEMS, LIST, options);
    let complete = built(&Options::default());
    let unposted = built(&Options { posting_share_max: 0.0, ..Options::default() });
    let unbucketed = built(&Options { number_buckets: 0, ..Options::default() });
    writeln!(
        out,
        "| filter | leaves | words read a word and leaf | floor, ns | sweep, ns | probed lists, ns | sweep, µs |"
    )
    .unwrap();
    writeln!(out, "|---|---|---|---|---|---|---|").unwrap();
    let all = |n: usize, join: &str, numbers: &mut Numbers| {
        let first = numbers.below(40);
        (0..n as u64).map(|k| format!("kind:{}", (first + k * 3) % 40)).collect::<Vec<_>>().join(join)
    };
    let bound = |numbers: &mut Numbers| numbers.below(1 << 20);
    /// Words of posted slots, two in each, per bitmap word of 64 items.
    const POSTED: f64 = 64.0 * 0.005 / 2.0;
    let middle = |n: &mut Numbers| format!("shelf:{}", n.below(200));
    type Case<'a> = (&'a str, &'a dyn Fn(&mut Numbers) -> String, usize, f64, &'a (Columns, Index));
    let filters: [Case<'_>; 13] = [
        ("frequent term", &|n| all(1, "", n), 1, 1.0, &complete),
        ("NOT frequent term", &|n| format!("NOT {}", all(1, "", n)), 1, 1.0, &complete),
        ("8 frequent terms with AND", &|n| all(8, " AND ", n), 8, 1.0, &complete),
        ("8 frequent terms with OR", &|n| all(8, " OR ", n), 8, 1.0, &complete),
        ("term of 0.5 %, posted", &middle, 1, POSTED, &complete),
        ("NOT term of 0.5 %, posted", &|n| format!("NOT {}", middle(n)), 1, 1.0 + POSTED, &complete),
        (
            "frequent AND term of 0.5 %, posted",
            &|n| format!("{} AND {}", all(1, "", n), middle(n)),
            2,
            (1.0 + POSTED) / 2.0,
            &complete,
        ),
        ("term of 0.5 %, Bloom planes", &middle, 1, 5.0, &unposted),
        ("rare term, Bloom planes", &|n| format!("tag:{}", n.below(100_000)), 1, 5.0, &unposted),
        (
            "frequent AND rare term, Bloom planes",
            &|n| format!("{} AND tag:{}", all(1, "", n), n.below(100_000)),
            2,
            3.0,
            &unposted,
        ),
        ("comparison", &|n| format!("price < {}", bound(n)), 1, 3.0, &complete),
        ("frequent term AND comparison", &|n| format!("{} AND price < {}", all(1, "", n), bound(n)), 2, 2.0, &complete),
        ("comparison without buckets", &|n| format!("price < {}", bound(n)), 1, 64.0, &unbucketed),
    ];
    let mut words = vec![0; complete.1.words_max()];
    for (name, filter, leaves, words_read, (columns, index)) in filters {
        let (mut sweep, mut probed) = (Vec::new(), Vec::new());
        let mut numbers = Numbers(6);
        let mut scratch = Scratch::default();
        for _ in 0..RUNS {
            let plan = planned(&filter(&mut numbers), columns, index);
            let mut timed = |lists: &mut dyn Iterator<Item = usize>| {
                let start = Instant::now();
                std::hint::black_box(evaluate(&plan, index, lists, &mut scratch, &mut words));
                start.elapsed().as_secs_f64() * 1e9
            };
            for first in (0..index.lists()).step_by(TIMED) {
                sweep.push(timed(&mut (first..first + TIMED)));
                let lists: Vec<usize> = (0..TIMED).map(|_| numbers.below(index.lists() as u64) as usize).collect();
                probed.push(timed(&mut lists.into_iter()));
            }
        }
        let (sweep, probed) = (median(sweep), median(probed));
        let each = (TIMED * LIST / 64 * leaves) as f64;
        writeln!(
            out,
            "| {name} | {leaves} | {words_read} | {:.2} | {:.2} | {:.2} | {:.0} |",
            words_read * 8.0 / bandwidth,
            sweep / each,
            probed / each,
            sweep * (ITEMS / LIST / TIMED) as f64 / 1e3
        )
        .unwrap();
    }
}

fn main() {
    // `cargo test --all-targets` starts benchmarks too, without this flag.
    if !std::env::args().any(|a| a == "--bench") {
        return;
    }
    let mut out = std::io::stdout().lock();
    false_positives(&mut out);
    writeln!(out).unwrap();
    speed(&mut out);
}
