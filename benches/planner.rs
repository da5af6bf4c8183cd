//! The planner on a large problem, and its estimates compared with measurements on this machine.
//!
//! `cargo bench --bench planner`. The first part plans 500 tables of 1.2 TB in total over 16 devices. The second calibrates this
//! machine, then looks up batches in tables of several widths, formats and poolings on all cores, and prints estimate and
//! measurement for each. The third looks up the same batches in an unsharded table and with every sharding type, on one core.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterling::embedding::place::Sharding;
use sterling::embedding::planner::{Topology, Workload, calibrate, plan};
use sterling::embedding::shard::Cut;
use sterling::embedding::{
    BagConfig, EmbeddingBagCollection, KeyedJaggedTensor, Lookup, Pooling, RowFormat, Table, Unseen,
};

type Done = Result<(), Box<dyn std::error::Error>>;

/// Number of requests per batch.
const BATCH: usize = 64;
/// Approximate bytes of a measured table.
const TABLE_BYTES: usize = 512 << 20;
/// Number of batches that one core looks up per measurement.
const BATCHES: usize = 64;
/// Number of measurements; the fastest counts.
const ROUNDS: usize = 5;

fn main() -> Done {
    let mut out = std::io::stdout().lock();
    large(&mut out)?;
    estimates(&mut out)?;
    shards(&mut out)
}

/// Returns the next number of a fixed pseudo-random sequence.
fn random(state: &mut u64, bound: u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state >> 11) % bound
}

fn large(out: &mut impl std::io::Write) -> Done {
    let mut state = 0xb16;
    let mut rows: Vec<u64> = Vec::new();
    for _ in 0..500 {
        let size = 10 + random(&mut state, 19);
        rows.push(1_000 + random(&mut state, 1 << size));
    }
    let bytes: u64 = rows.iter().map(|r| r * 128 * 4).sum();
    let mut text = String::from("batch = 512\nrequests_per_s = 200000\n");
    for (table, rows) in rows.iter().enumerate() {
        let rows = (*rows as f64 * 1.2e12 / bytes as f64) as u64 + 1;
        let pooling = [1, 4, 20, 80][random(&mut state, 4) as usize];
        let skew = ["0.6", "0.9", "1.05"][random(&mut state, 3) as usize];
        text +=
            &format!("[[tables]]\nname = 't{table}'\nrows = {rows}\nwidth = 128\npooling = {pooling}\nskew = {skew}\n");
    }
    let mut machines = String::from("[network]\nbandwidth_gb_s = 25\nlatency_us = 30\n");
    for host in 0..2 {
        machines +=
            &format!("[[hosts]]\nname = 'h{host}'\ndram_gib = 400\nbandwidth_gb_s = 100\nrow_ns = 1\ncall_us = 2\n");
    }
    for gpu in 0..14 {
        machines += &format!(
            "[[gpus]]\nname = 'g{gpu}'\nhost = 'h{}'\nhbm_gib = 40\nbandwidth_gb_s = 1500\nrow_ns = 0.1\ncall_us = 6\n\
             link_gb_s = 25\nlink_us = 10\n",
            gpu / 7
        );
    }
    let start = Instant::now();
    let planned = plan(&Topology::parse(&machines)?, &Workload::parse(&text)?)?;
    let took = start.elapsed();
    let even = planned.devices.iter().map(|d| d.micros).sum::<f64>() / planned.devices.len() as f64;
    writeln!(
        out,
        "500 tables, {:.2} TB, 16 devices: planned in {:.2} s; {} placements; slowest device {:.0} us, mean {even:.0} us",
        planned.bytes as f64 / 1e12,
        took.as_secs_f64(),
        planned.candidates,
        planned.micros,
    )?;
    Ok(())
}

fn estimates(out: &mut impl std::io::Write) -> Done {
    let cores = std::thread::available_parallelism()?.get();
    let constants = calibrate::measure(cores, 1 << 30)?;
    let mut topology = Topology::detect()?;
    constants.apply(&mut topology.hosts[0]);
    writeln!(
        out,
        "calibrated, {cores} cores: {:.2} GB/s, {:.2} ns a row, {:.2} us a call",
        constants.bandwidth_gb_s, constants.row_ns, constants.call_us
    )?;
    writeln!(
        out,
        "{:>6} {:>6} {:>8} {:>12} {:>12} {:>8}",
        "format", "width", "pooling", "estimate us", "measured us", "ratio"
    )?;
    for (format, width) in [(RowFormat::F32, 32), (RowFormat::F32, 128), (RowFormat::F16, 64), (RowFormat::Int8, 64)] {
        for pooling in [5, 20, 100] {
            let (estimate, measured) = compare(&topology, cores, format, width, pooling)?;
            writeln!(
                out,
                "{:>6} {width:>6} {pooling:>8} {estimate:>12.1} {measured:>12.1} {:>8.2}",
                format.name(),
                estimate / measured
            )?;
        }
    }
    Ok(())
}

fn shards(out: &mut impl std::io::Write) -> Done {
    const ROWS: usize = 2_000_000;
    const WIDTH: usize = 64;
    const POOLING: usize = 20;
    let values: Vec<f32> = (0..ROWS * WIDTH).map(|i| (i % 251) as f32).collect();
    let table = Table::from_f32("t", WIDTH, &values, RowFormat::F32, Unseen::Zero)?;
    drop(values);
    let bag = [BagConfig { feature: "t".into(), table: "t".into(), pooling: Pooling::Sum }];
    let lengths = vec![POOLING as i64; BATCH];
    let mut state = 7;
    let mut batches = Vec::new();
    for _ in 0..BATCHES {
        let ids = (0..BATCH * POOLING).map(|_| random(&mut state, ROWS as u64) as i64).collect();
        batches.push(KeyedJaggedTensor::from_lengths(["t"], ids, &lengths, None)?);
    }
    let mut report = |name: &str, lookup: &dyn Fn(&KeyedJaggedTensor)| {
        let mut fastest = Duration::MAX;
        for _ in 0..ROUNDS {
            let start = Instant::now();
            batches.iter().for_each(lookup);
            fastest = fastest.min(start.elapsed());
        }
        let micros = fastest.as_secs_f64() * 1e6 / BATCHES as f64;
        writeln!(out, "{name:>16} {micros:>10.1} us a batch of {BATCH} bags of {POOLING} ids")
    };
    let complete = EmbeddingBagCollection::new(vec![Arc::new(table.clone())], &bag)?;
    report("whole", &|batch| drop(std::hint::black_box(complete.lookup(batch, &Lookup::default()))))?;
    for (sharding, rows, columns) in [
        (Sharding::TableWise, 1, 1),
        (Sharding::ColumnWise, 1, 2),
        (Sharding::ColumnWise, 1, 4),
        (Sharding::RowWise, 2, 1),
        (Sharding::RowWise, 4, 1),
        (Sharding::Grid, 2, 2),
    ] {
        let edge = |complete: usize, parts: usize, part: usize| complete * part / parts;
        let mut cuts = Vec::new();
        for (row, column) in (0..rows).flat_map(|r| (0..columns).map(move |c| (r, c))) {
            cuts.push(Cut {
                rows: edge(ROWS, rows, row) as u64..edge(ROWS, rows, row + 1) as u64,
                columns: edge(WIDTH, columns, column)..edge(WIDTH, columns, column + 1),
                copy: 0,
                device: "here".into(),
            });
        }
        let cut = Arc::new(table.cut(sharding, &cuts)?);
        let collection = EmbeddingBagCollection::new(vec![cut], &bag)?;
        let name = format!("{} {}", sharding.name(), rows * columns);
        report(&name, &|batch| drop(std::hint::black_box(collection.lookup(batch, &Lookup::default()))))?;
    }
    Ok(())
}

fn compare(
    topology: &Topology,
    cores: usize,
    format: RowFormat,
    width: usize,
    pooling: usize,
) -> Result<(f64, f64), Box<dyn std::error::Error>> {
    let rows = TABLE_BYTES / format.row_bytes(width)?;
    let text = format!(
        "batch = {BATCH}\n[[tables]]\nname = 't'\nrows = {rows}\nwidth = {width}\nformat = '{}'\npooling = {pooling}\n\
         skew = 'uniform'\ntiers = ['host']\n",
        format.name()
    );
    let estimate = plan(topology, &Workload::parse(&text)?)?.micros;

    let values: Vec<f32> = (0..rows * width).map(|i| (i % 251) as f32).collect();
    let table = Arc::new(Table::from_f32("t", width, &values, format, Unseen::Zero)?);
    drop(values);
    let bag = BagConfig { feature: "t".into(), table: "t".into(), pooling: Pooling::Sum };
    let collection = EmbeddingBagCollection::new(vec![table], &[bag])?;
    let lengths = vec![pooling as i64; BATCH];
    let mut fastest = Duration::MAX;
    for round in 0..ROUNDS {
        let mut batches = Vec::new();
        for core in 0..cores {
            let mut state = 1 + (round * cores + core) as u64 * 0x9e37_79b9;
            let of_core = (0..BATCHES).map(|_| {
                let ids = (0..BATCH * pooling).map(|_| random(&mut state, rows as u64) as i64).collect();
                KeyedJaggedTensor::from_lengths(["t"], ids, &lengths, None)
            });
            batches.push(of_core.collect::<Result<Vec<_>, _>>()?);
        }
        let start = Instant::now();
        std::thread::scope(|scope| {
            for of_core in &batches {
                let collection = &collection;
                scope.spawn(move || {
                    for batch in of_core {
                        let _ = std::hint::black_box(collection.lookup(batch, &Lookup::default()));
                    }
                });
            }
        });
        fastest = fastest.min(start.elapsed());
    }
    Ok((estimate, fastest.as_secs_f64() * 1e6 / (BATCHES * cores) as f64))
}
