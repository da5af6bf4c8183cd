//! The remote tier with a real cluster: lookups return the loaded rows and no others, under all faults.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterling::embedding::place::Sharding;
use sterling::embedding::shard::Cut;
use sterling::embedding::tiers::remote::{
    Cluster, ClusterCounters, ClusterOptions, LoadProgress, LoadReport, ReadFrom, RemoteOptions, RemoteTable, RowSet,
    TableShape, TableState, delete, find, load, sets,
};
use sterling::embedding::tiers::{Fetched, RowSource, RowState};
use sterling::embedding::{
    BagConfig, EmbeddingBagCollection, KeyedJaggedTensor, Lookup, OnDegraded, Pooling, RowFormat, Table, TableSpec,
    Unseen,
};
use sterling::error::{Error, Kind, Result};
use sterling::kernels::buffer::Buffer;

use crate::redis_cluster::RedisCluster;
use crate::support::until;

const ROW_BYTES: usize = 72;
/// Two groups of chunks, so that one partition has two keys.
const ROWS: u64 = 230_000;

/// Serializes the tests: six processes of one cluster are enough for a small machine.
pub fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes the bytes of a row, different for each row and seed.
fn write_row(seed: u64, row: u64, out: &mut [u8]) {
    let mut state = (row ^ seed << 48).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for word in out.chunks_mut(8) {
        state = (state ^ state >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
    }
}

fn rows_of(seed: u64) -> impl FnMut(Range<u64>, &mut [u8]) -> Result<()> {
    move |rows, out| {
        rows.zip(out.chunks_exact_mut(ROW_BYTES)).for_each(|(row, out)| write_row(seed, row, out));
        Ok(())
    }
}

fn shape(rows: u64) -> TableShape {
    TableShape { rows, row_bytes: ROW_BYTES, format: "int8".into() }
}

fn named(content: u64) -> RowSet {
    RowSet::new("tests", "items", content).unwrap()
}

fn options(redis: &RedisCluster) -> ClusterOptions {
    ClusterOptions { refresh_interval: Duration::from_secs(60), ..ClusterOptions::new(redis.seeds()) }
}

fn uncached(timeout_ms: u64) -> RemoteOptions {
    RemoteOptions { cache_bytes: 0, timeout: Duration::from_millis(timeout_ms) }
}

fn fill(cluster: &Arc<Cluster>, version: u64, rows: u64) -> LoadReport {
    load(cluster, &named(version), &shape(rows), rows_of(version), |_| {}).unwrap()
}

fn open(cluster: &Arc<Cluster>, version: u64, rows: u64, options: &RemoteOptions) -> RemoteTable {
    RemoteTable::open(cluster, &named(version), &shape(rows), options).unwrap()
}

/// Returns `count` rows all over the table, sorted and distinct.
fn sample(rows: u64, count: usize, seed: u64) -> Vec<u64> {
    let mut found = std::collections::BTreeSet::new();
    let mut state = seed;
    while found.len() < count {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        found.insert((state >> 20) % rows);
    }
    found.into_iter().collect()
}

fn fetch(table: &RemoteTable, rows: &[u64]) -> Fetched {
    table.begin(rows.to_vec(), &Lookup::default()).wait().unwrap()
}

/// Checks that every hit has the right bytes, and counts the hits.
fn hits(fetched: &Fetched, rows: &[u64], seed: u64) -> usize {
    let mut expected = [0; ROW_BYTES];
    let mut found = 0;
    for ((row, state), bytes) in rows.iter().zip(&fetched.states).zip(fetched.bytes.chunks_exact(ROW_BYTES)) {
        if *state == RowState::Hit {
            write_row(seed, *row, &mut expected);
            assert_eq!(bytes, expected, "row {row}");
            found += 1;
        }
    }
    found
}

fn all_hit(table: &RemoteTable, rows: &[u64], seed: u64) -> bool {
    hits(&fetch(table, rows), rows, seed) == rows.len()
}

fn refused<T: std::fmt::Debug>(result: Result<T>, kind: Kind, words: &[&str]) {
    let error = result.unwrap_err();
    let text = error.to_string();
    assert_eq!(error.kind(), kind, "{text}");
    words.iter().for_each(|word| assert!(text.contains(word), "{text}: expected `{word}` in it"));
}

#[test]
fn loaded_rows_are_read_back_exactly() {
    let _alone = alone();
    let redis = RedisCluster::start(5000);
    let cluster = Cluster::connect(options(&redis)).unwrap();
    interrupted_loads_resume(&cluster);
    assert!(redis.calls("wait") > 0, "replicas are waited for where there are some");
    other_tables_are_rejected(&cluster);
    batches_cost_one_pipeline_per_node(&cluster);
    equal_misses_are_fetched_once(&redis, &cluster);
    lost_and_changed_rows_are_degraded(&redis, &cluster);
    tables_round_trip(&cluster);
    half_remote_answers_as_whole(&redis, &cluster);
    loads_of_one_table_coexist(&cluster);
    rejected_removals_can_be_repeated(&redis, &cluster);
    deleted_versions_leave_no_rows(&redis, &cluster);
}

fn interrupted_loads_resume(cluster: &Arc<Cluster>) {
    let mut complete = rows_of(1);
    let mut calls = 0;
    let interrupted = |rows: Range<u64>, out: &mut [u8]| {
        calls += 1;
        if calls == 2 { Err(Error::unavailable("the source broke off")) } else { complete(rows, out) }
    };
    refused(
        load(cluster, &named(1), &shape(ROWS), interrupted, |_| {}),
        Kind::Unavailable,
        &["tests/items rows 0000000000000001", "broke off"],
    );
    refused(RemoteTable::open(cluster, &named(1), &shape(ROWS), &uncached(500)), Kind::NotReady, &["not finished"]);

    let mut seen: Vec<LoadProgress> = Vec::new();
    let report = load(cluster, &named(1), &shape(ROWS), rows_of(1), |p| seen.push(p)).unwrap();
    assert!(report.is_replicated);
    assert!(seen.is_sorted_by_key(|p| p.rows_done) && seen.iter().all(|p| p.rows_total == ROWS));
    assert_eq!(seen.last(), Some(&report.progress));
    assert_eq!(report.progress.rows_done, ROWS);
    let retained = report.progress.chunks_kept;
    assert!(retained > 0 && retained < report.chunks, "{retained} of {} chunks were there", report.chunks);

    let again = load(cluster, &named(1), &shape(ROWS), rows_of(1), |_| {}).unwrap();
    assert_eq!((again.progress.bytes_written, again.progress.chunks_kept), (0, again.chunks));
    assert_eq!(again.checksum, report.checksum);
    refused(load(cluster, &named(1), &shape(ROWS), rows_of(2), |_| {}), Kind::Conflict, &["other rows"]);
    refused(load(cluster, &named(1), &shape(ROWS + 1), rows_of(1), |_| {}), Kind::Conflict, &["230000 rows"]);
    assert_eq!(sets(cluster, &named(9)).unwrap(), [named(1)]);
}

fn other_tables_are_rejected(cluster: &Arc<Cluster>) {
    let open = |version, shape: &TableShape| RemoteTable::open(cluster, &named(version), shape, &uncached(500));
    let wide = TableShape { row_bytes: 68, ..shape(ROWS) };
    refused(open(1, &wide), Kind::Corrupt, &["tests/items rows 0000000000000001", "rows of 72 bytes, expected 68"]);
    refused(open(1, &shape(ROWS - 1)), Kind::Corrupt, &["230000 rows, expected 229999"]);
    let other = TableShape { format: "f32".into(), ..shape(ROWS) };
    refused(open(1, &other), Kind::Corrupt, &["format `int8`, expected `f32`"]);
    refused(open(2, &shape(ROWS)), Kind::NotReady, &["rows 0000000000000002", "sets of this table: 0000000000000001"]);
}

fn batches_cost_one_pipeline_per_node(cluster: &Arc<Cluster>) {
    let table = open(cluster, 1, ROWS, &RemoteOptions { cache_bytes: 4 << 20, timeout: Duration::from_secs(5) });
    let rows = sample(ROWS, 512, 1);
    let before = cluster.counters();
    assert!(all_hit(&table, &rows, 1));
    let after = cluster.counters();
    // A slow first node causes a hedged request, which can happen on a busy machine.
    let others = |c: ClusterCounters| c.hedges + c.failures + c.redirections;
    let most = 3 + others(after) - others(before);
    assert!((3..=most).contains(&(after.pipelines - before.pipelines)), "{before:?} {after:?}");
    assert!(all_hit(&table, &rows, 1));
    assert_eq!(cluster.counters().pipelines, after.pipelines, "the second time all rows are in the cache");
    let counters = table.counters();
    // A row enters the cache after the call has its bytes; concurrent lookups join the request, or find the cached row.
    assert_eq!((counters.rows, counters.remote, counters.cache.hits + counters.joined), (1024, 512, 512));
    assert!(counters.cache.hit_rate() <= 0.5);

    let outside = fetch(&table, &[3, ROWS - 1, ROWS, u64::MAX]);
    assert_eq!(outside.states, [RowState::Hit, RowState::Hit, RowState::Unknown, RowState::Unknown]);
    assert!(fetch(&table, &[]).states.is_empty());
    let late = table.begin(vec![4, 5], &by(Instant::now())).wait().unwrap();
    assert_eq!(late.states, [RowState::Degraded; 2], "the deadline had come before");

    for seed in 0..200 {
        fetch(&table, &sample(ROWS, 512, 100 + seed));
    }
    let cache = table.counters().cache;
    assert!(cache.evicted > 0 && cache.entries <= cache.entries_max, "{cache:?}");
    assert!(all_hit(&table, &sample(ROWS, 512, 150), 1));
}

/// Returns lookup options with a deadline.
fn by(deadline: Instant) -> Lookup {
    Lookup { deadline: Some(deadline), ..Lookup::default() }
}

fn equal_misses_are_fetched_once(redis: &RedisCluster, cluster: &Arc<Cluster>) {
    let table = open(cluster, 1, ROWS, &RemoteOptions { timeout: Duration::from_secs(10), ..Default::default() });
    let short = RemoteOptions { timeout: Duration::from_millis(20), ..Default::default() };
    let impatient = open(cluster, 1, ROWS, &short);
    let rows = sample(ROWS, 300, 2);
    let stopped = 0..6;
    stopped.clone().for_each(|node| redis.stop(node));
    let calls: Vec<_> = (0..5).map(|_| table.begin(rows.clone(), &Lookup::default())).collect();
    let hasty = table.begin(rows[..10].to_vec(), &by(Instant::now() + Duration::from_millis(20))).wait().unwrap();
    assert_eq!(hasty.states, [RowState::Degraded; 10], "a joined read does not wait longer than it wants to");
    let start = Instant::now();
    let waited = impatient.begin(vec![7], &by(start + Duration::from_secs(60))).wait().unwrap();
    assert_eq!(waited.states, [RowState::Degraded]);
    assert!(start.elapsed() < Duration::from_secs(30), "the table's time-out comes before the caller's deadline");
    stopped.for_each(|node| redis.resume(node));
    for call in calls {
        assert_eq!(hits(&call.wait().unwrap(), &rows, 1), 300);
    }
    let counters = table.counters();
    assert_eq!((counters.remote, counters.joined), (300, 4 * 300 + 10));
    until("all nodes take requests", || cluster.nodes().iter().all(|n| !n.is_open));

    // The first caller has less time than the second, which then sends its own request.
    let rows = sample(ROWS, 20, 3);
    (0..6).for_each(|node| redis.stop(node));
    let first = table.begin(rows.clone(), &by(Instant::now() + Duration::from_millis(30)));
    let second = table.begin(rows.clone(), &Lookup::default());
    assert_eq!(hits(&first.wait().unwrap(), &rows, 1), 0);
    (0..6).for_each(|node| redis.resume(node));
    assert_eq!(hits(&second.wait().unwrap(), &rows, 1), 20);
    until("all nodes take requests", || cluster.nodes().iter().all(|n| !n.is_open));
}

fn lost_and_changed_rows_are_degraded(redis: &RedisCluster, cluster: &Arc<Cluster>) {
    let table = open(cluster, 1, ROWS, &RemoteOptions { timeout: Duration::from_secs(5), ..Default::default() });
    let rows: Vec<u64> = (0..2000).collect();
    let of_partition_0 = redis.keys("sterling:{tests/items/0000000000000001/0.*}:0");
    let [key] = of_partition_0.as_slice() else { panic!("{of_partition_0:?}") };
    let node = redis.primary_of(key);

    // The first row of a chunk is changed, then the chunk is removed: its rows are every 256th.
    redis.ask(node, &["SETRANGE", key, "5", "?"]);
    let changed = fetch(&table, &rows);
    assert_eq!(hits(&changed, &rows, 1), 1999);
    assert_eq!((changed.states[0], table.counters().corrupt), (RowState::Degraded, 1));
    redis.ask(node, &["DEL", key]);
    let fresh = open(cluster, 1, ROWS, &uncached(5000));
    let lost = fetch(&fresh, &rows);
    assert_eq!(hits(&lost, &rows, 1), 2000 - 8);
    assert!(lost.states.iter().enumerate().all(|(row, s)| (*s == RowState::Degraded) == (row % 256 == 0)));
    assert_eq!(fresh.counters().missing, 8);

    // Bytes of another position of the same table are rejected too.
    let other = redis.keys("sterling:{tests/items/0000000000000001/1.*}:0").remove(0);
    let foreign: Vec<u8> =
        redis::cmd("GET").arg(&other).query(&mut redis.connection(redis.primary_of(&other))).unwrap();
    let _: () = redis::cmd("SET").arg(key).arg(foreign).query(&mut redis.connection(node)).unwrap();
    assert_eq!(hits(&fetch(&fresh, &rows), &rows, 1), 2000 - 8);
    assert_eq!(fresh.counters().corrupt, 8);

    let repaired = load(cluster, &named(1), &shape(ROWS), rows_of(1), |_| {}).unwrap();
    assert_eq!(repaired.chunks - repaired.progress.chunks_kept, 1);
    assert!(all_hit(&fresh, &rows, 1));
    assert!(all_hit(&table, &rows, 1), "a degraded row is not remembered as one");
}

fn tables_round_trip(cluster: &Arc<Cluster>) {
    let (rows, width) = (500u64, 16);
    let values: Vec<f32> = (0..rows * width as u64).map(|i| i as f32 * 0.25).collect();
    let host = Table::from_f32("items", width, &values, RowFormat::F16, Unseen::Zero).unwrap();
    let small = RowSet::new("tests", "small", 1).unwrap();
    host.load(cluster, &small, |_| {}).unwrap();
    let spec = TableSpec { name: "items".into(), rows, width, format: RowFormat::F16, unseen: Unseen::Zero };
    let remote = Table::on_cluster(cluster, &small, spec.clone(), &RemoteOptions::default()).unwrap();
    assert_eq!(remote.spec(), host.spec());
    refused(
        remote.load(cluster, &RowSet::new("tests", "small", 2).unwrap(), |_| {}),
        Kind::Unsupported,
        &["not in this host's memory"],
    );
    let narrow = TableSpec { width: 15, ..spec };
    let opened = Table::on_cluster(cluster, &small, narrow, &RemoteOptions::default());
    refused(opened, Kind::Corrupt, &["rows of 32 bytes, expected 30"]);
    let bytes = Buffer::copied(&[0u8; 32]).unwrap();
    let one = Table::host(TableSpec { rows: 1, ..host.spec().clone() }, bytes).unwrap();
    refused(one.load(cluster, &small, |_| {}), Kind::Conflict, &["500 rows, expected 1"]);
    assert!(delete(cluster, &small).unwrap());
}

fn half_remote_answers_as_whole(redis: &RedisCluster, cluster: &Arc<Cluster>) {
    let (rows, width) = (3000u64, 8);
    let values: Vec<f32> = (0..rows * width as u64).map(|i| (i % 97) as f32 * 0.125).collect();
    let host = Table::from_f32("items", width, &values, RowFormat::Int8, Unseen::Zero).unwrap();
    let half = RowSet::new("tests", "half", 1).unwrap();
    host.load(cluster, &half, |_| {}).unwrap();
    let options = RemoteOptions { cache_bytes: 0, timeout: Duration::from_secs(5) };
    let remote = Table::on_cluster(cluster, &half, host.spec().clone(), &options).unwrap();
    let shard = |rows: Range<u64>, table: &Table, device: &str| {
        Cut { rows, columns: 0..width, copy: 0, device: device.into() }.take(table).unwrap()
    };
    let shards = vec![shard(0..rows / 2, &host, "host"), shard(rows / 2..rows, &remote, "cluster")];
    let halves = Table::of_shards(host.spec().clone(), Sharding::RowWise, shards).unwrap();
    let bags = [BagConfig { feature: "ids".into(), table: "items".into(), pooling: Pooling::Mean }];
    let complete = EmbeddingBagCollection::new(vec![Arc::new(host)], &bags).unwrap();
    let halves = EmbeddingBagCollection::new(vec![Arc::new(halves)], &bags).unwrap();
    let drawn: Vec<i64> = sample(rows, 200, 11).into_iter().chain([5, 2999, 2999, 7000]).map(|id| id as i64).collect();
    let ids = KeyedJaggedTensor::from_lengths(["ids"], drawn, &[100, 0, 104], None).unwrap();
    let strict = Lookup { on_degraded: OnDegraded::Fail, ..Lookup::default() };
    let (expected, _) = complete.lookup(&ids, &strict).unwrap();
    let (got, report) = halves.lookup(&ids, &strict).unwrap();
    let near = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-4);
    assert!(near(got.values(), expected.values()));
    assert_eq!((report[0].ids, report[0].unseen, report[0].degraded), (204, 1, 0));

    (0..6).for_each(|node| redis.stop(node));
    let soon = |on_degraded| Lookup {
        deadline: Some(Instant::now() + Duration::from_millis(30)),
        on_degraded,
        ..Lookup::default()
    };
    let failed = halves.lookup(&ids, &soon(OnDegraded::Fail)).map(|_| ());
    let defaults = halves.lookup(&ids, &soon(OnDegraded::DefaultRows));
    (0..6).for_each(|node| redis.resume(node));
    refused(failed, Kind::DeadlineExceeded, &["table `items`, shard on `cluster`", "did not arrive in time"]);
    let away = sample(rows, 200, 11).iter().filter(|row| **row >= rows / 2).count() as u64 + 2;
    assert_eq!(defaults.unwrap().1[0].degraded, away, "ids whose rows are remote, counted in the reply");
    until("all rows come again", || halves.lookup(&ids, &strict).is_ok());
    assert!(near(halves.lookup(&ids, &strict).unwrap().0.values(), expected.values()));
    assert!(delete(cluster, &half).unwrap());
}

/// Rows that a killed publication has left do not block the next one.
fn loads_of_one_table_coexist(cluster: &Arc<Cluster>) {
    let of_rows = |rows| RowSet::new("tests", "beside", rows).unwrap();
    for rows in [3, 4] {
        load(cluster, &of_rows(rows), &shape(2000), rows_of(rows), |_| {}).unwrap();
    }
    assert_eq!(sets(cluster, &of_rows(0)).unwrap(), [of_rows(3), of_rows(4)]);
    let sampled = sample(2000, 100, 1);
    for rows in [3, 4] {
        let table = RemoteTable::open(cluster, &of_rows(rows), &shape(2000), &uncached(5000)).unwrap();
        assert!(all_hit(&table, &sampled, rows));
        assert!(delete(cluster, &of_rows(rows)).unwrap());
    }
    assert_eq!(sets(cluster, &of_rows(0)).unwrap(), []);
}

fn rejected_removals_can_be_repeated(redis: &RedisCluster, cluster: &Arc<Cluster>) {
    let retained = RowSet::new("tests", "kept", 1).unwrap();
    load(cluster, &retained, &shape(5000), rows_of(1), |_| {}).unwrap();
    for command in ["unlink", "srem", "del"] {
        let user = |allow: &str| {
            let rule = format!("{allow}{command}");
            redis.primaries().into_iter().for_each(|node| drop(redis.ask(node, &["ACL", "SETUSER", "default", &rule])));
        };
        user("-");
        let refusal = delete(cluster, &retained);
        user("+");
        refused(refusal, Kind::Unavailable, &["tests/kept rows 0000000000000001", "no permissions", command]);
        let state = find(cluster, &retained).unwrap().map(|m| m.state);
        assert_eq!(state, Some(TableState::Deleting), "still there to be deleted after {command} was rejected");
    }
    assert!(delete(cluster, &retained).unwrap());
    assert!(find(cluster, &retained).unwrap().is_none() && sets(cluster, &retained).unwrap().is_empty());
    assert_eq!(redis.keys("sterling:{tests/kept/*"), Vec::<String>::new());
}

fn deleted_versions_leave_no_rows(redis: &RedisCluster, cluster: &Arc<Cluster>) {
    let before = open(cluster, 1, ROWS, &uncached(5000));
    fill(cluster, 2, 5000);
    let second = open(cluster, 2, 5000, &uncached(5000));
    assert!(delete(cluster, &named(1)).unwrap());
    assert!(!delete(cluster, &named(1)).unwrap());
    refused(
        RemoteTable::open(cluster, &named(1), &shape(ROWS), &uncached(500)),
        Kind::NotReady,
        &["sets of this table: 0000000000000002"],
    );
    let rows = sample(5000, 100, 5);
    assert_eq!(hits(&fetch(&before, &rows), &rows, 1), 0);
    assert!(all_hit(&second, &rows, 2));

    // The same number with other rows: readers of the old load get none of them.
    load(cluster, &named(1), &shape(ROWS), rows_of(7), |_| {}).unwrap();
    assert_eq!(hits(&fetch(&before, &rows), &rows, 1), 0);
    assert!(all_hit(&open(cluster, 1, ROWS, &uncached(5000)), &rows, 7));
    delete(cluster, &named(1)).unwrap();
    delete(cluster, &named(2)).unwrap();
    assert_eq!(redis.keys("sterling:*"), Vec::<String>::new());
}

#[test]
fn full_and_evicting_nodes_are_named() {
    let _alone = alone();
    let redis = RedisCluster::start(5000);
    let cluster = Cluster::connect(options(&redis)).unwrap();
    let config = |node, policy: &str, maxmemory: u64| {
        redis.ask(node, &["CONFIG", "SET", "maxmemory-policy", policy]);
        redis.ask(node, &["CONFIG", "SET", "maxmemory", &maxmemory.to_string()]);
    };
    let full = redis.primaries()[1];
    config(full, "noeviction", redis.used_memory(full) + (1 << 20));
    let address = format!("127.0.0.1:{}", redis.port(full));
    let outcome = load(&cluster, &named(1), &shape(ROWS), rows_of(1), |_| {});
    refused(outcome, Kind::Overloaded, &["tests/items rows 0000000000000001", "full", &address, "maxmemory"]);
    refused(RemoteTable::open(&cluster, &named(1), &shape(ROWS), &uncached(500)), Kind::NotReady, &["not finished"]);
    config(full, "noeviction", 0);
    assert!(fill(&cluster, 1, ROWS).progress.chunks_kept > 0, "stored chunks are not written again");
    assert!(all_hit(&open(&cluster, 1, ROWS, &uncached(5000)), &sample(ROWS, 500, 1), 1));
    delete(&cluster, &named(1)).unwrap();

    config(full, "allkeys-lru", redis.used_memory(full) + (1 << 20));
    let outcome = load(&cluster, &named(2), &shape(ROWS), rows_of(2), |_| {});
    refused(outcome, Kind::Unavailable, &["written and is missing now", "noeviction"]);
    refused(RemoteTable::open(&cluster, &named(2), &shape(ROWS), &uncached(500)), Kind::NotReady, &["not finished"]);
}

/// Calls in a loop until stopped: the number of calls and of degraded rows.
#[derive(Default)]
struct Load {
    stop: AtomicBool,
    calls: AtomicU64,
    degraded: AtomicU64,
}

impl Load {
    fn run(&self, table: &RemoteTable, seed: u64) {
        let mut round = seed << 32;
        while !self.stop.load(Ordering::Relaxed) {
            round += 1;
            let rows = sample(ROWS, 64, round);
            let found = hits(&fetch(table, &rows), &rows, 1);
            self.calls.fetch_add(1, Ordering::Relaxed);
            self.degraded.fetch_add((rows.len() - found) as u64, Ordering::Relaxed);
        }
    }

    fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Waits for `calls` more calls, and returns the number of degraded rows in them.
    fn degraded_in(&self, calls: u64) -> u64 {
        let (start, before) = (self.calls(), self.degraded.load(Ordering::Relaxed));
        until("calls are answered", || self.calls() >= start + calls);
        self.degraded.load(Ordering::Relaxed) - before
    }
}

#[test]
#[ignore = "long: kills nodes of a cluster"]
fn killed_primaries_lose_no_call_and_recover() {
    let _alone = alone();
    let mut redis = RedisCluster::start(1000);
    let with_replicas = Cluster::connect(options(&redis)).unwrap();
    let primaries_only = Cluster::connect(ClusterOptions { read_from: ReadFrom::Primary, ..options(&redis) }).unwrap();
    fill(&with_replicas, 1, ROWS);
    let patient = open(&with_replicas, 1, ROWS, &uncached(3000));
    let strict = open(&primaries_only, 1, ROWS, &uncached(100));
    let (patient_load, strict_load) = (Load::default(), Load::default());
    let stop = || [&patient_load, &strict_load].iter().for_each(|l| l.stop.store(true, Ordering::Relaxed));
    std::thread::scope(|scope| {
        // A failed check must not leave the threads running.
        let _stop = StopOnDrop(&stop);
        scope.spawn(|| patient_load.run(&patient, 1));
        scope.spawn(|| strict_load.run(&strict, 2));
        assert_eq!(patient_load.degraded_in(50), 0);
        let victim = redis.primaries()[0];
        redis.kill(victim);
        assert_eq!(patient_load.degraded_in(200), 0, "a replica answers at once");
        assert!(strict_load.degraded_in(5) > 0, "no other node is queried, and the call is answered all the same");
        until("a replica has taken over", || redis.primaries().len() == 3 && !redis.primaries().contains(&victim));
        until("all rows are read again, automatically", || strict_load.degraded_in(20) == 0);
        assert_eq!(patient_load.degraded_in(20), 0);
        redis.start_node(victim);
        redis.wait_until_whole();
        assert_eq!(patient_load.degraded_in(100), 0);
    });
    // One degraded row fails the lookup or becomes a default row; the request chooses, not the source.
    assert_eq!(patient.counters().degraded, patient_load.degraded.load(Ordering::Relaxed));
    let sterling::embedding::tiers::remote::RemoteCounters { late, down, refused, missing, corrupt, .. } =
        strict.counters();
    let degraded = strict_load.degraded.load(Ordering::Relaxed);
    assert!(late + down + refused >= degraded, "each has its cause: {degraded} of {:?}", strict.counters());
    assert_eq!((missing, corrupt), (0, 0), "nothing is lost");
    a_shard_without_nodes_is_skipped(&mut redis, &with_replicas, &patient);
}

struct StopOnDrop<'a>(&'a dyn Fn());

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        (self.0)();
    }
}

fn a_shard_without_nodes_is_skipped(redis: &mut RedisCluster, cluster: &Arc<Cluster>, table: &RemoteTable) {
    let rows = sample(ROWS, 600, 77);
    // Not the primary with the manifest: without it, a load uses another random number, and the table must be reopened.
    let manifest = redis.primary_of(&format!("sterling:{{tests/items/{}}}:manifest", named(1).tag()));
    let lost = redis.shard(redis.primaries().iter().position(|node| *node != manifest).unwrap());
    lost.iter().for_each(|&node| redis.kill(node));
    let of_both = || {
        let health = cluster.nodes();
        let is_open = |node| health.iter().filter(|n| n.address.port == redis.port(node)).all(|n| n.is_open);
        lost.iter().all(|&node| is_open(node))
    };
    until("the breakers of both are open", || {
        let found = hits(&fetch(table, &rows), &rows, 1);
        assert!((300..600).contains(&found), "two of three shards answer, got {found} of 600 rows");
        of_both()
    });
    let before = (cluster.counters().pipelines, table.counters().down);
    hits(&fetch(table, &rows), &rows, 1);
    let after = (cluster.counters().pipelines, table.counters().down);
    assert!(after.0 - before.0 <= 4 && after.1 > before.1, "dead nodes get no calls: {before:?} {after:?}");
    lost.iter().for_each(|&node| redis.start_node(node));
    redis.wait_until_whole();
    // The nodes stored nothing on disk, and their rows are lost: still no wrong row, and another load restores them.
    until("they are queried again", || {
        fetch(table, &rows);
        table.counters().missing > 0
    });
    let report = fill(cluster, 1, ROWS);
    assert!(report.progress.chunks_kept > 0 && report.progress.chunks_kept < report.chunks);
    until("every row is back", || all_hit(table, &rows, 1));
}

#[test]
#[ignore = "long: moves rows of a cluster"]
fn rows_on_the_move_and_slow_nodes_are_found() {
    let _alone = alone();
    let redis = RedisCluster::start(15_000);
    let cluster = Cluster::connect(options(&redis)).unwrap();
    fill(&cluster, 1, ROWS);
    moved_slots_are_followed(&redis, &cluster);
    slow_nodes_are_skipped(&redis, &cluster);
}

fn moved_slots_are_followed(redis: &RedisCluster, cluster: &Arc<Cluster>) {
    let table = open(cluster, 1, ROWS, &uncached(5000));
    // Rows of both groups of one partition.
    let rows: Vec<u64> = (0..ROWS).step_by(256).collect();
    let mut keys = redis.keys("sterling:{tests/items/0000000000000001/0.*}:*");
    keys.sort();
    let [first, second] = keys.as_slice() else { panic!("{keys:?}") };
    let [from, to, third] = redis.primaries()[..] else { panic!("three primaries") };
    assert_eq!(redis.primary_of(first), from);
    let slot = redis.slot_of(first);
    let before = cluster.counters();
    redis.ask(to, &["CLUSTER", "SETSLOT", &slot, "IMPORTING", &redis.id(from)]);
    redis.ask(from, &["CLUSTER", "SETSLOT", &slot, "MIGRATING", &redis.id(to)]);
    assert!(all_hit(&table, &rows, 1));
    let migrate = |key: &str| redis.ask(from, &["MIGRATE", "127.0.0.1", &redis.port(to).to_string(), key, "0", "5000"]);
    migrate(first);
    assert!(all_hit(&table, &rows, 1), "one chunk has moved, one has not");
    let requested = cluster.counters();
    assert!(requested.redirections > before.redirections, "{requested:?}");
    migrate(second);
    assert!(all_hit(&table, &rows, 1));
    for node in [to, from, third] {
        redis.ask(node, &["CLUSTER", "SETSLOT", &slot, "NODE", &redis.id(to)]);
    }
    assert!(all_hit(&table, &rows, 1));
    until("the new owner is known", || {
        let redirections = cluster.counters().redirections;
        assert!(all_hit(&table, &rows, 1));
        cluster.counters().redirections == redirections
    });
    // A load follows the move too: all chunks are found at their new place.
    assert_eq!(fill(cluster, 1, ROWS).progress.bytes_written, 0);
}

fn slow_nodes_are_skipped(redis: &RedisCluster, cluster: &Arc<Cluster>) {
    let slow = redis.primaries()[2];
    let rows = sample(ROWS, 300, 9);
    let on_replicas = open(cluster, 1, ROWS, &uncached(5000));
    let strict = Cluster::connect(ClusterOptions { read_from: ReadFrom::Primary, ..options(redis) }).unwrap();
    let on_primaries = open(&strict, 1, ROWS, &uncached(100));
    let turns =
        Cluster::connect(ClusterOptions { read_from: ReadFrom::ReplicasThenPrimary, ..options(redis) }).unwrap();
    assert!(all_hit(&open(&turns, 1, ROWS, &uncached(5000)), &rows, 1));
    redis.stop(slow);
    assert!(all_hit(&on_replicas, &rows, 1));
    assert!(cluster.counters().hedges > 0);
    let of_it = |cluster: &Cluster| {
        let nodes = cluster.nodes();
        nodes.into_iter().find(|n| n.address.port == redis.port(slow)).unwrap()
    };
    until("the breaker opens", || {
        let found = hits(&fetch(&on_primaries, &rows), &rows, 1);
        assert!(found < 300, "the slow node's rows are degraded");
        of_it(&strict).is_open
    });
    assert!(on_primaries.counters().late > 0);
    let down = on_primaries.counters().down;
    hits(&fetch(&on_primaries, &rows), &rows, 1);
    assert!(on_primaries.counters().down > down);
    redis.resume(slow);
    until("the node is queried again, automatically", || all_hit(&on_primaries, &rows, 1));
    assert!(!of_it(&strict).is_open && of_it(&strict).openings > 0);
}

#[test]
fn invalid_cluster_addresses_are_rejected() {
    let refuse = |seeds: &[&str], kind, words: &[&str]| {
        let options = ClusterOptions::new(seeds.iter().copied());
        refused(Cluster::connect(options).map(|_| ()), kind, words);
    };
    refuse(&[], Kind::Invalid, &["no address"]);
    refuse(&["redis://user:secret@"], Kind::Invalid, &["cluster address"]);
    refuse(&["http://127.0.0.1:1"], Kind::Invalid, &["cluster address http://127.0.0.1:1"]);
    refuse(&["redis://127.0.0.1:1"], Kind::Unavailable, &["127.0.0.1:1"]);
    for secret in ["rediss://user:secret@10.0.0.1:6379", "valkeys://10.0.0.1:6379"] {
        refuse(
            &[secret],
            Kind::Unsupported,
            &["cluster address", "10.0.0.1:6379", "TLS to a cluster is not supported"],
        );
        let error = Cluster::connect(ClusterOptions::new([secret])).unwrap_err().to_string();
        assert!(!error.contains("secret"), "{error}");
    }
}
