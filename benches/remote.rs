//! Batches of rows from a real cluster on loopback, at given hit rates of the cache in front, and during the failure of a
//! primary.
//!
//! A batch is `ids` distinct rows. A given share of them is hot: rows that were requested before and are cached. The
//! others have never been requested, so each is a miss. One thread requests batch after batch; the time of a batch is measured
//! from the call until all its rows are in memory. A batch without hits must transfer `ids` GETRANGE commands of about 75 bytes
//! each and as many replies of `row_bytes + 14` bytes, in one write and one read per node.
//!
//! `cargo bench --bench remote -- --rows 10000000`

use std::io::Write;
use std::ops::Range;
use std::sync::Arc;
use std::thread::scope;
use std::time::{Duration, Instant};

use clap::Parser;
use sterling::embedding::Lookup;
use sterling::embedding::tiers::remote::{
    Cluster, ClusterOptions, ReadFrom, RemoteOptions, RemoteTable, RowSet, TableShape, load,
};
use sterling::embedding::tiers::{RowSource, RowState};
use sterling::error::Result;

#[allow(dead_code, clippy::unwrap_used, reason = "the tests use all of it, and end where it fails")]
#[path = "../tests/it/redis_cluster.rs"]
mod redis_cluster;
use redis_cluster::RedisCluster;

#[derive(Parser)]
struct Settings {
    /// Number of rows in the cluster.
    #[arg(long, default_value_t = 1_000_000)]
    rows: u64,
    /// Bytes per row; 68 are 64 numbers in int8.
    #[arg(long, default_value_t = 68)]
    row_bytes: usize,
    /// Number of rows per batch.
    #[arg(long, default_value_t = 512)]
    ids: usize,
    /// Number of batches per hit rate.
    #[arg(long, default_value_t = 4000)]
    batches: usize,
    /// Number of concurrent callers.
    #[arg(long, default_value_t = 1)]
    callers: usize,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

const HIT_RATES: [f64; 4] = [0.0, 0.5, 0.9, 0.99];
const WARM_BATCHES: usize = 200;
const HOT_ROWS: u64 = 50_000;
const FAIL_OVER: Duration = Duration::from_secs(20);

fn say(line: &str) {
    // A closed pipe is not an error.
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

fn fill(rows: Range<u64>, out: &mut [u8], row_bytes: usize) -> Result<()> {
    for (row, out) in rows.zip(out.chunks_exact_mut(row_bytes)) {
        let mut state = row.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        for word in out.chunks_mut(8) {
            state = (state ^ state >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
        }
    }
    Ok(())
}

/// Every row once, in pseudo-random order.
struct Rows {
    next: u64,
    rows: u64,
}

impl Rows {
    /// Returns the row at `place`. Places `0..HOT_ROWS` are the hot rows.
    fn at(&self, place: u64) -> u64 {
        // The multiplier is a prime larger than any number of rows, hence coprime to it.
        ((u128::from(place) * 11_400_714_819_323_198_549) % u128::from(self.rows)) as u64
    }

    /// Returns a batch of `hot` hot rows and otherwise rows that were never requested.
    fn batch(&mut self, ids: usize, hot: usize) -> Vec<u64> {
        let first = self.next.wrapping_mul(7919);
        let mut batch: Vec<u64> = (0..hot as u64).map(|i| self.at(first.wrapping_add(i) % HOT_ROWS)).collect();
        for _ in hot..ids {
            batch.push(self.at(self.next % (self.rows - HOT_ROWS) + HOT_ROWS));
            self.next += 1;
        }
        self.next += u64::from(hot == ids);
        batch.sort_unstable();
        batch
    }
}

fn main() {
    let settings = Settings::parse();
    let Settings { rows, row_bytes, ids, .. } = settings;
    assert!(rows > 2 * HOT_ROWS, "--rows: expected more than {}", 2 * HOT_ROWS);
    let mut redis = RedisCluster::start(5000);
    let cluster = Cluster::connect(ClusterOptions::new(redis.seeds())).expect("the cluster has just been started");
    let named = RowSet::new("bench", "rows", 1).expect("plain names");
    let shape = TableShape { rows, row_bytes, format: "bytes".into() };
    let start = Instant::now();
    let report = load(&cluster, &named, &shape, |r, out| fill(r, out, row_bytes), |_| {}).expect("the table loads");
    let (took, used) = (start.elapsed().as_secs_f64(), used_bytes(&redis));
    say(&format!(
        "{rows} rows of {row_bytes} bytes, {ids} a batch, {} callers; loaded in {took:.1} s ({:.0} MB/s, replicated: {}), {:.1} \
         bytes a row in the primaries",
        settings.callers,
        report.progress.bytes_written as f64 / took / 1e6,
        report.is_replicated,
        used as f64 / rows as f64
    ));
    say(&format!("one PING to one node: p50 {:.0} us, p99 {:.0} us", ping(&redis, 0.5), ping(&redis, 0.99)));
    say("hit rate set | measured | p50 us | p99 us | mean us | rows/s | pipelines a batch | degraded rows");
    HIT_RATES.iter().for_each(|&rate| at_hit_rate(&cluster, &named, &shape, &settings, rate));
    for read_from in [ReadFrom::PrimaryThenReplicas, ReadFrom::Primary] {
        fail_over(&mut redis, &named, &shape, &settings, read_from);
    }
}

fn used_bytes(redis: &RedisCluster) -> u64 {
    redis.primaries().into_iter().map(|node| redis.used_memory(node)).sum()
}

fn ping(redis: &RedisCluster, quantile: f64) -> f64 {
    let mut connection = redis.connection(0);
    let mut once = || {
        let start = Instant::now();
        let _: String = redis::cmd("PING").query(&mut connection).expect("the node runs");
        start.elapsed()
    };
    let mut times: Vec<Duration> = (0..2000).map(|_| once()).collect();
    micros(&mut times, quantile)
}

fn micros(times: &mut [Duration], quantile: f64) -> f64 {
    times.sort_unstable();
    times[((times.len() - 1) as f64 * quantile) as usize].as_secs_f64() * 1e6
}

fn open(cluster: &Arc<Cluster>, named: &RowSet, shape: &TableShape, cache_bytes: usize) -> RemoteTable {
    let options = RemoteOptions { cache_bytes, timeout: Duration::from_millis(200) };
    RemoteTable::open(cluster, named, shape, &options).expect("the table has just been loaded")
}

fn at_hit_rate(cluster: &Arc<Cluster>, named: &RowSet, shape: &TableShape, settings: &Settings, rate: f64) {
    let Settings { rows, ids, batches, callers, .. } = *settings;
    let table = open(cluster, named, shape, 64 << 20);
    let order = Rows { next: 0, rows };
    let mut hot_rows: Vec<u64> = (0..HOT_ROWS).map(|place| order.at(place)).collect();
    hot_rows.sort_unstable();
    // Three times: the cache only retains rows that are requested again.
    for part in (0..3).flat_map(|_| hot_rows.chunks(ids)) {
        table.begin(part.to_vec(), &Lookup::default()).wait().expect("the lookup succeeds");
    }
    let hot = (ids as f64 * rate).round() as usize;
    let ask = |caller: usize, batches: usize, first: u64| {
        let mut order = Rows { next: first + caller as u64 * (rows / callers as u64), rows };
        let mut times = Vec::with_capacity(batches);
        for _ in 0..batches {
            let batch = order.batch(ids, hot);
            let start = Instant::now();
            let fetched = table.begin(batch, &Lookup::default()).wait().expect("the lookup succeeds");
            times.push(start.elapsed());
            std::hint::black_box(fetched);
        }
        times
    };
    ask(0, WARM_BATCHES, rows / 2);
    let (before, sent) = (table.counters(), cluster.counters().pipelines);
    let start = Instant::now();
    let mut times: Vec<Duration> = scope(|s| {
        let callers: Vec<_> = (0..callers).map(|c| s.spawn(move || ask(c, batches, 0))).collect();
        callers.into_iter().flat_map(|c| c.join().expect("no caller panics")).collect()
    });
    let took = start.elapsed().as_secs_f64();
    let after = table.counters();
    let requested = (after.rows - before.rows) as f64;
    say(&format!(
        "{rate:12.2} | {:8.3} | {:6.0} | {:6.0} | {:7.0} | {:6.0} | {:17.2} | {}",
        (after.cache.hits - before.cache.hits) as f64 / requested,
        micros(&mut times, 0.5),
        micros(&mut times, 0.99),
        times.iter().sum::<Duration>().as_secs_f64() * 1e6 / times.len() as f64,
        requested / took,
        (cluster.counters().pipelines - sent) as f64 / times.len() as f64,
        after.degraded - before.degraded
    ));
}

/// Kills a primary while one caller sends requests without a cache, restarts it, and prints the effect on the calls.
fn fail_over(redis: &mut RedisCluster, named: &RowSet, shape: &TableShape, settings: &Settings, read_from: ReadFrom) {
    let options = ClusterOptions { read_from, ..ClusterOptions::new(redis.seeds()) };
    let cluster = Cluster::connect(options).expect("the cluster runs");
    let table = open(&cluster, named, shape, 0);
    let mut order = Rows { next: 0, rows: settings.rows };
    let victim = redis.primaries()[0];
    let mut killed = None;
    let (mut calls, mut degraded_calls, mut degraded_rows) = (0u64, 0u64, 0usize);
    let (mut longest, mut last_degraded) = (Duration::ZERO, Duration::ZERO);
    let start = Instant::now();
    while start.elapsed() < FAIL_OVER {
        if killed.is_none() && start.elapsed() > Duration::from_secs(1) {
            redis.kill(victim);
            killed = Some(Instant::now());
        }
        let batch = order.batch(settings.ids, 0);
        let requested = Instant::now();
        let fetched = table.begin(batch, &Lookup::default()).wait().expect("the lookup succeeds");
        longest = longest.max(requested.elapsed());
        let degraded = fetched.states.iter().filter(|s| **s == RowState::Degraded).count();
        calls += 1;
        degraded_calls += u64::from(degraded > 0);
        degraded_rows += degraded;
        if let Some(killed) = killed.filter(|_| degraded > 0) {
            last_degraded = killed.elapsed();
        }
    }
    say(&format!(
        "a primary killed, {read_from:?}: {calls} calls, none lost, {degraded_calls} with default rows ({degraded_rows} rows), the \
         last {:.0} ms after the kill; longest call {:.0} ms",
        last_degraded.as_secs_f64() * 1e3,
        longest.as_secs_f64() * 1e3
    ));
    redis.start_node(victim);
    redis.wait_until_whole();
}
