//! Pooled lookups of one thread compared with the memory bound, as JSON lines.
//!
//! ```text
//! cargo bench --bench pool -- [--rows 10000000] [--width 64] [--formats f32,int8] [--pooling 20,100] [--ids FOLDER]
//! ```
//!
//! Ids are uniform, or Zipf with exponent 1.05 and the ranks scattered over the table; calls take 512 bags each. A line has the
//! best and the median pass over the same stream of ids, in nanoseconds per id and bytes of rows per second:
//!
//! - `read`: the upper bound: rows at uniform ids are prefetched, read and combined by exclusive or, at the best of several
//!   prefetch distances;
//! - `pool`: the kernel alone; with uniform ids every row comes from memory, as for `read`; with Zipf ids the caches hold the
//!   hot rows;
//! - `lookup`: the complete `EmbeddingBagCollection::lookup`, from ids to the keyed tensor.
//!
//! Times are CPU time of the thread if Linux reports it, so that other processes on the machine only affect them through
//! caches and memory. `--ids` writes the Zipf ids to a folder as little-endian int64, for `python/bench_pool.py`,
//! which runs PyTorch and FBGEMM on them, interleaved with this program.

use std::hint::black_box;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};
use sterling::embedding::format::encode_row;
use sterling::embedding::{
    BagConfig, EmbeddingBagCollection, KeyedJaggedTensor, Lookup, Pooling, Table, TableSpec, Unseen,
};
use sterling::error::{Error, Result};
use sterling::kernels::buffer::Buffer;
use sterling::kernels::cpu::Kernels;
use sterling::kernels::cpu::pool::{BagSums, Bags, RowFormat, Rows, pool};
use sterling::kernels::memory::fold_rows;

const BAGS: usize = 512;
/// Number of ids of a stream: 200 calls at pooling 20, 40 at 100.
const STREAM_IDS: usize = 2_048_000;
/// Timed passes over a stream, after a warm-up pass.
const PASSES: usize = 5;
/// Prefetch distances, of which the best gives the upper bound.
const AHEAD: [usize; 4] = [8, 16, 32, 64];
const EXPONENT: f64 = 1.05;

struct Options {
    rows: u64,
    width: usize,
    formats: Vec<RowFormat>,
    pooling: Vec<usize>,
    ids: Option<String>,
}

fn options() -> Result<Options> {
    let mut found = Options {
        rows: 10_000_000,
        width: 64,
        formats: vec![RowFormat::F32, RowFormat::Int8],
        pooling: vec![20, 100],
        ids: None,
    };
    let mut arguments = std::env::args().skip(1).filter(|a| a != "--bench");
    while let Some(name) = arguments.next() {
        let value = arguments.next().ok_or_else(|| Error::invalid(format!("{name} without a value")))?;
        let number = |text: &str| text.parse().map_err(|_| Error::invalid(format!("{name} {text}, expected a number")));
        match name.as_str() {
            "--rows" => found.rows = number(&value)? as u64,
            "--width" => found.width = number(&value)?,
            "--formats" => found.formats = value.split(',').map(RowFormat::named).collect::<Result<_>>()?,
            "--pooling" => found.pooling = value.split(',').map(number).collect::<Result<_>>()?,
            "--ids" => found.ids = Some(value),
            _ => {
                return Err(Error::invalid(format!("{name}, expected --rows, --width, --formats, --pooling or --ids")));
            }
        }
    }
    Ok(found)
}

fn main() -> Result<()> {
    let options = options()?;
    let (zipf, uniform) = (zipf_ids(options.rows), uniform_ids(options.rows));
    if let Some(folder) = &options.ids {
        let path = format!("{folder}/zipf.i64");
        std::fs::write(&path, bytemuck::cast_slice::<i64, u8>(&zipf)).map_err(|e| Error::io(path, e))?;
    }
    for &format in &options.formats {
        let table = table(&options, format)?;
        let rows = table.host_rows().expect("a table in memory");
        let best = AHEAD.map(|ahead| read(&rows, &uniform, ahead)).into_iter().min_by(|a, b| a.1.total_cmp(&b.1));
        say("read", &rows, best.expect("several look-aheads"), json!({"ids": "uniform"}));
        for &pooling in &options.pooling {
            kernel(&rows, &uniform, pooling, "uniform")?;
            kernel(&rows, &zipf, pooling, "zipf")?;
            lookup(&table, &zipf, pooling)?;
        }
    }
    Ok(())
}

/// Returns the best and the median nanoseconds per id over the passes of `run`.
fn timed(mut run: impl FnMut()) -> (f64, f64) {
    run();
    let mut passes: Vec<f64> = (0..PASSES)
        .map(|_| {
            let start = (Instant::now(), processor_ns());
            run();
            let wall_ns = start.0.elapsed().as_nanos() as f64;
            start.1.zip(processor_ns()).map_or(wall_ns, |(from, to)| to - from) / STREAM_IDS as f64
        })
        .collect();
    passes.sort_by(f64::total_cmp);
    (passes[0], passes[PASSES / 2])
}

/// Returns the CPU time of this thread so far.
fn processor_ns() -> Option<f64> {
    // A call of the scheduler makes the kernel update the time.
    std::thread::yield_now();
    let figures = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    figures.split(' ').next()?.parse().ok()
}

fn say(what: &str, rows: &Rows<'_>, (best, median): (f64, f64), more: Value) {
    let row_bytes = rows.row(0).len();
    let mut line = json!({
        "what": what, "format": rows.format().name(), "rows": rows.len(), "width": rows.width(), "row_bytes": row_bytes,
        "best_ns": best, "median_ns": median, "best_gb_s": row_bytes as f64 / best,
    });
    if let (Some(line), Value::Object(more)) = (line.as_object_mut(), more) {
        line.extend(more);
    }
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

fn read(rows: &Rows<'_>, ids: &[i64], ahead: usize) -> (f64, f64) {
    let row_bytes = rows.row(0).len();
    timed(|| {
        black_box(fold_rows(rows.bytes(), row_bytes, ids, ahead));
    })
}

fn kernel(rows: &Rows<'_>, ids: &[i64], pooling: usize, name: &str) -> Result<()> {
    let kernels = Kernels::detect()?;
    let offsets: Vec<usize> = (0..=BAGS).map(|bag| bag * pooling).collect();
    let mut out = vec![0f32; BAGS * rows.width()];
    let times = timed(|| {
        for ids in ids.chunks_exact(BAGS * pooling) {
            let bags = Bags { ids, offsets: &offsets, weights: None, mean: false };
            pool(kernels, rows, &bags, &mut BagSums { data: &mut out, stride: rows.width(), column: 0 });
            black_box(&mut out);
        }
    });
    say("pool", rows, times, json!({"ids": name, "pooling": pooling, "kernel": kernels.name()}));
    Ok(())
}

fn lookup(table: &Arc<Table>, ids: &[i64], pooling: usize) -> Result<()> {
    let bags = [BagConfig { feature: "seen".into(), table: table.name().into(), pooling: Pooling::Sum }];
    let collection = EmbeddingBagCollection::new(vec![table.clone()], &bags)?;
    let lengths = vec![pooling as i64; BAGS];
    let calls: Vec<KeyedJaggedTensor> = ids
        .chunks_exact(BAGS * pooling)
        .map(|ids| KeyedJaggedTensor::from_lengths(["seen"], ids.to_vec(), &lengths, None))
        .collect::<Result<_>>()?;
    let times = timed(|| {
        for call in &calls {
            black_box(collection.lookup(call, &Lookup::default()).expect("ids of the table"));
        }
    });
    let rows = table.host_rows().expect("a table in memory");
    say("lookup", &rows, times, json!({"ids": "zipf", "pooling": pooling, "kernel": Kernels::detect()?.name()}));
    Ok(())
}

/// Returns a table of random rows in owned memory, in huge pages if available.
fn table(options: &Options, format: RowFormat) -> Result<Arc<Table>> {
    let spec =
        TableSpec { name: "items".into(), rows: options.rows, width: options.width, format, unseen: Unseen::Zero };
    let row_bytes = spec.row_bytes()?;
    let mut draw = draws(1);
    let mut row = vec![0f32; options.width];
    let bytes = Buffer::filled(options.rows as usize * row_bytes, |bytes: &mut [u8]| {
        for to in bytes.chunks_exact_mut(row_bytes) {
            row.fill_with(|| (draw() >> 40) as f32 / (1 << 23) as f32 - 1.0);
            encode_row(format, &row, to).expect("finite numbers below 1");
        }
    })?;
    Ok(Arc::new(Table::host(spec, bytes)?))
}

/// Returns a SplitMix64 generator.
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

fn uniform_ids(rows: u64) -> Vec<i64> {
    let mut draw = draws(2);
    (0..STREAM_IDS).map(|_| (draw() % rows) as i64).collect()
}

/// Returns Zipf ranks by rejection-inversion (Hörmann and Derflinger, 1996), each rank mapped to its own row.
fn zipf_ids(rows: u64) -> Vec<i64> {
    let integral = |x: f64| (x.powf(1.0 - EXPONENT) - 1.0) / (1.0 - EXPONENT);
    let inverse = |y: f64| (1.0 + y * (1.0 - EXPONENT)).powf(1.0 / (1.0 - EXPONENT));
    let (low, high) = (integral(1.5) - 1.0, integral(rows as f64 + 0.5));
    let mut draw = draws(3);
    let mut rank = || loop {
        let y = low + (draw() >> 11) as f64 / (1u64 << 53) as f64 * (high - low);
        let k = inverse(y).round().clamp(1.0, rows as f64);
        if y >= integral(k + 0.5) - k.powf(-EXPONENT) {
            return k as u64 - 1;
        }
    };
    // A step near the golden section keeps neighbouring ranks apart. Being coprime to the number of rows, it visits each row
    // once.
    let step = ((rows as f64 * 0.618_033_988_75) as u64..)
        .find(|&step| coprime(step, rows))
        .expect("one of every few numbers is");
    (0..STREAM_IDS).map(|_| (u128::from(rank()) * u128::from(step) % u128::from(rows)) as i64).collect()
}

fn coprime(mut a: u64, mut b: u64) -> bool {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a == 1
}
