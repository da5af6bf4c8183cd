//! Times a training step of embedding tables and compares it with the memory bandwidth, as JSON lines.
//!
//! ```text
//! cargo bench --bench train_tables -- [--tables 4] [--rows 1000000] [--width 64] [--batch 512] [--pooling 20] [--ids zipf,uniform]
//!     [--rules rowwise_adagrad] [--threads 1] [--seconds 4] [--stream FOLDER]
//! ```
//!
//! Each table has one bag per example, pooled by sum; gradients are random. A line of `"what": "step"` has the nanoseconds per id
//! of the three calls of a step, as medians and first deciles over the steps:
//!
//! - `prepare`: ids are resolved and sorted;
//! - `forward`: bags are pooled;
//! - `update`: gradients are summed by row, and the rule is applied.
//!
//! A line of `"what": "floor"` has the memory time in nanoseconds per row, measured in between at uniformly sampled rows that are
//! prefetched. `read` reads rows of a contiguous array; `write` reads and writes rows and a line of state elsewhere. A step's
//! share of the floor is `u (read + write) / step`, where `u` is distinct rows per id. Memory traffic of a step is `u (4 D + 2 (4
//! D + 4 s))` bytes per id, in rows of D numbers with s numbers of state. In addition, 4 D bytes of gradients and about 40 bytes
//! of ids pass through the caches.
//!
//! `--stream` writes the ids to a folder as little-endian int64, for `python/bench_train.py`, which alternates FBGEMM and PyTorch
//! on them.

use std::hint::black_box;
use std::io::Write;
use std::time::{Duration, Instant};

use serde_json::json;
use sterling::embedding::train::{LearningTables, MasterTable, Rule, RuleKind};
use sterling::embedding::{BagConfig, KeyedJaggedTensor, KeyedTensor, Pooling, Unseen};
use sterling::error::{Error, Result};
use sterling::kernels::buffer::Owned;
use sterling::kernels::memory::prefetch;
use sterling::kernels::threads::Threads;

/// Batches that are generated before the first step and then repeated.
const BATCHES: usize = 40;
/// Warm-up steps, not timed.
const WARM_UP: usize = 5;
/// Rows that the floor reads, and its prefetch distance.
const FLOOR_ROWS: usize = 400_000;
const AHEAD: usize = 24;
const EXPONENT: f64 = 1.05;

struct Options {
    tables: usize,
    rows: usize,
    width: usize,
    batch: usize,
    pooling: usize,
    ids: Vec<String>,
    rules: Vec<RuleKind>,
    threads: Vec<usize>,
    seconds: f64,
    stream: Option<String>,
}

fn options() -> Result<Options> {
    let mut found = Options {
        tables: 4,
        rows: 1_000_000,
        width: 64,
        batch: 512,
        pooling: 20,
        ids: vec!["zipf".into(), "uniform".into()],
        rules: vec![RuleKind::RowwiseAdagrad],
        threads: vec![1],
        seconds: 4.0,
        stream: None,
    };
    let mut arguments = std::env::args().skip(1).filter(|a| a != "--bench");
    while let Some(name) = arguments.next() {
        let value = arguments.next().ok_or_else(|| Error::invalid(format!("{name} without a value")))?;
        let invalid = || Error::invalid(format!("{name} {value}"));
        let number = |text: &str| text.parse::<usize>().ok().filter(|n| *n > 0).ok_or_else(invalid);
        let rule = |text: &str| RuleKind::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(invalid);
        match name.as_str() {
            "--tables" => found.tables = number(&value)?,
            "--rows" => found.rows = number(&value)?,
            "--width" => found.width = number(&value)?,
            "--batch" => found.batch = number(&value)?,
            "--pooling" => found.pooling = number(&value)?,
            "--ids" => found.ids = value.split(',').map(str::to_owned).collect(),
            "--rules" => found.rules = value.split(',').map(rule).collect::<Result<_>>()?,
            "--threads" => found.threads = value.split(',').map(number).collect::<Result<_>>()?,
            "--seconds" => found.seconds = value.parse().map_err(|_| invalid())?,
            "--stream" => found.stream = Some(value),
            _ => return Err(invalid()),
        }
    }
    Ok(found)
}

fn main() -> Result<()> {
    let options = options()?;
    for ids in &options.ids {
        let stream = stream(&options, ids == "zipf");
        if let Some(folder) = &options.stream {
            let path = format!("{folder}/{ids}.i64");
            std::fs::write(&path, bytemuck::cast_slice::<i64, u8>(&stream)).map_err(|e| Error::io(path, e))?;
        }
        for &kind in &options.rules {
            for &threads in &options.threads {
                steps(&options, ids, &stream, kind, threads)?;
            }
        }
    }
    Ok(())
}

fn say(line: &serde_json::Value) {
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

/// Generates batches of `[tables, batch, pooling]` ids.
fn stream(options: &Options, is_zipf: bool) -> Vec<i64> {
    let (rows, count) = (options.rows, BATCHES * options.tables * options.batch * options.pooling);
    let mut draw = draws(1);
    if !is_zipf {
        return (0..count).map(|_| (draw() % rows as u64) as i64).collect();
    }
    let mut sums: Vec<f64> = Vec::with_capacity(rows);
    (1..=rows).for_each(|rank| sums.push(sums.last().unwrap_or(&0.0) + (rank as f64).powf(-EXPONENT)));
    let all = sums[rows - 1];
    let mut place: Vec<i64> = (0..rows as i64).collect();
    (1..rows).rev().for_each(|at| place.swap(at, (draw() % (at as u64 + 1)) as usize));
    let rank = |unit: f64| sums.partition_point(|sum| *sum < unit * all).min(rows - 1);
    (0..count).map(|_| place[rank((draw() >> 11) as f64 / (1u64 << 53) as f64)]).collect()
}

/// SplitMix64.
fn draws(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

fn steps(options: &Options, ids: &str, stream: &[i64], kind: RuleKind, threads: usize) -> Result<()> {
    let Options { tables, rows, width, batch, pooling, .. } = *options;
    let mut draw = draws(2);
    let mut unit = || (draw() >> 40) as f32 / (1 << 23) as f32 - 1.0;
    let mut masters = Vec::new();
    for table in 0..tables {
        let rule = Rule::new(kind, 0.01);
        let mut master = MasterTable::zeros(&format!("t{table}"), rows as u64, width, Unseen::Zero, Some(rule))?;
        let mut row = vec![0f32; width];
        for at in 0..rows {
            row.fill_with(|| 0.05 * unit());
            master.set_row(at, &row)?;
        }
        masters.push(master);
    }
    let names: Vec<String> = (0..tables).map(|table| format!("f{table}")).collect();
    let bag = |(table, feature): (usize, &String)| BagConfig {
        feature: feature.clone(),
        table: format!("t{table}"),
        pooling: Pooling::Sum,
    };
    let bags: Vec<BagConfig> = names.iter().enumerate().map(bag).collect();
    let mut learner = LearningTables::new(masters, &bags, &[], &Threads::new(threads)?)?;
    let lengths = vec![pooling as i64; tables * batch];
    let per_step = tables * batch * pooling;
    let batches: Vec<KeyedJaggedTensor> = stream
        .chunks_exact(per_step)
        .map(|ids| KeyedJaggedTensor::from_lengths(names.clone(), ids.to_vec(), &lengths, None))
        .collect::<Result<_>>()?;
    let gradients = (0..batch * tables * width).map(|_| 0.01 * unit()).collect();
    let gradients = KeyedTensor::new(names.clone(), &vec![width; tables], gradients)?;
    let mut floor = Floor::new(rows, width)?;
    let mut times: [Vec<f64>; 4] = Default::default();
    let mut distinct = 0;
    let end = Instant::now() + Duration::from_secs_f64(options.seconds);
    let mut step = 0;
    while Instant::now() < end || step < 2 * WARM_UP {
        let ids = batches[step % BATCHES].clone();
        let start = Instant::now();
        let prepared = learner.prepare(ids)?;
        let sorted = Instant::now();
        black_box(learner.forward(&prepared)?);
        let pooled = Instant::now();
        let report = learner.backward(prepared, &gradients, &[])?;
        let updated = Instant::now();
        if step >= WARM_UP {
            let spent = [sorted - start, pooled - sorted, updated - pooled, updated - start];
            times.iter_mut().zip(spent).for_each(|(all, one)| all.push(one.as_secs_f64() * 1e9 / per_step as f64));
            distinct += report.updated_rows();
        }
        step += 1;
        if threads == 1 && step % 40 == 0 {
            floor.measure();
        }
    }
    let u = distinct as f64 / ((step - WARM_UP) * per_step) as f64;
    let [prepare, forward, update, complete] = times.map(quantiles);
    let stretch = 4 * (width + kind.state_width(width));
    let mut line = json!({
        "what": "step", "rule": kind.name(), "ids": ids, "tables": tables, "rows": rows, "width": width, "batch": batch,
        "pooling": pooling, "threads": threads, "steps": step - WARM_UP, "distinct": u,
        "prepare_ns": prepare[1], "forward_ns": forward[1], "update_ns": update[1], "median_ns": complete[1], "p10_ns": complete[0],
        "bytes_per_id": u * (4 * width + 2 * stretch) as f64,
    });
    if threads == 1 {
        let [read, write] = [&floor.read, &floor.write].map(|times| quantiles(times.clone())[1]);
        say(
            &json!({"what": "floor", "ids": ids, "read_ns": read, "write_ns": write, "row_bytes": 4 * width, "stretch_bytes": stretch}),
        );
        line["floor_ns"] = json!(u * (read + write));
        line["share_of_floor"] = json!(u * (read + write) / complete[1]);
    }
    say(&line);
    Ok(())
}

/// First decile and median.
fn quantiles(mut times: Vec<f64>) -> [f64; 2] {
    times.sort_by(f64::total_cmp);
    [times[times.len() / 10], times[times.len() / 2]]
}

/// Buffers of the floor: rows in memory of their own, visited at random.
struct Floor {
    numbers: Owned<f32>,
    states: Owned<f32>,
    width: usize,
    picks: Vec<u32>,
    read: Vec<f64>,
    write: Vec<f64>,
}

impl Floor {
    fn new(rows: usize, width: usize) -> Result<Self> {
        let (mut numbers, mut states) = (Owned::zeros(rows * width)?, Owned::zeros(rows)?);
        numbers.fill(1.0);
        states.fill(1.0);
        let mut draw = draws(4);
        let picks = (0..FLOOR_ROWS).map(|_| (draw() % rows as u64) as u32).collect();
        Ok(Floor { numbers, states, width, picks, read: Vec::new(), write: Vec::new() })
    }

    /// Reads a tenth of the sampled rows, then reads and writes another tenth.
    fn measure(&mut self) {
        let part = self.read.len() % 10 * (FLOOR_ROWS / 10);
        let picks = &self.picks[part..part + FLOOR_ROWS / 10];
        let first = |pick: u32| pick as usize * self.width;
        let start = Instant::now();
        let mut sums = [0f32; 16];
        for (at, pick) in picks.iter().enumerate() {
            if let Some(next) = picks.get(at + AHEAD) {
                prefetch(&self.numbers[first(*next)..][..self.width]);
            }
            for block in self.numbers[first(*pick)..][..self.width].as_chunks::<16>().0 {
                (0..16).for_each(|lane| sums[lane] += block[lane]);
            }
        }
        black_box(sums);
        self.read.push(start.elapsed().as_secs_f64() * 1e9 / picks.len() as f64);
        let picks = &self.picks[(part + FLOOR_ROWS / 2) % FLOOR_ROWS..][..FLOOR_ROWS / 10];
        let start = Instant::now();
        for (at, pick) in picks.iter().enumerate() {
            if let Some(next) = picks.get(at + AHEAD) {
                prefetch(&self.numbers[first(*next)..][..self.width]);
                prefetch(&self.states[*next as usize..][..1]);
            }
            let m = &mut self.states[*pick as usize];
            *m += 1e-9;
            let factor = 1e-9 / (m.sqrt() + 1e-8);
            let row = &mut self.numbers[first(*pick)..][..self.width];
            for block in row.as_chunks_mut::<16>().0 {
                (0..16).for_each(|lane| block[lane] += factor);
            }
        }
        self.write.push(start.elapsed().as_secs_f64() * 1e9 / picks.len() as f64);
    }
}
