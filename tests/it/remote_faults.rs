//! Behaviour of a server whose tables lie in a faulty Redis Cluster, as a table of faults. For each it states whether requests
//! are served or degraded, and the warning of `/readyz`. After the fault, the server recovers without a restart.

// Prints the number of cases.
#![allow(clippy::print_stdout)]

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterling::embedding::place::{Sharding, Tier};
use sterling::embedding::tiers::remote::{
    Cluster, ClusterOptions, RemoteOptions, RemoteTable, RowSet, TableShape, find, load, sample, verify,
};
use sterling::embedding::tiers::{RowSource as _, RowState};
use sterling::embedding::{Lookup, Table};
use sterling::snapshot::model::Package;
use tempfile::TempDir;

use crate::placement::{plan_file, planned};
use crate::redis_cluster::RedisCluster;
use crate::remote::alone;
use crate::support::{Server, run, sterling, text, tiny_package, until};

/// Results of requests during a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Requests {
    /// They get all rows, from a replica if necessary.
    Served,
    /// They get 503, or default rows if they allow them.
    Degraded,
}
use Requests::{Degraded, Served};

/// A fault, its effect and its end.
struct Fault {
    name: &'static str,
    requests: Requests,
    /// Text of a line of `/readyz`; None if rows are not in danger.
    warning: Option<&'static str>,
    begin: fn(&mut Bed),
    end: fn(&mut Bed),
}

/// A cluster, a store whose tables lie there, and a server that reads every row from it.
pub struct Bed {
    pub redis: RedisCluster,
    /// Another cluster, whose node the server was given by mistake.
    pub stranger: RedisCluster,
    pub store: TempDir,
    pub server: Server,
    seed: String,
    /// Nodes with the rows of the first table, the primary first.
    shard: Vec<usize>,
    /// The other primaries.
    others: Vec<usize>,
    chunk: String,
}

const USER: &str = "rows";
/// User of the server with the permissions of docs/guide/remote-tables.md.
const ACL: [&str; 14] = [
    "ACL",
    "SETUSER",
    USER,
    "on",
    ">secret",
    "~sterling:*",
    "+getrange",
    "+get",
    "+smembers",
    "+readonly",
    "+asking",
    "+ping",
    "+cluster|slots",
    "+info",
];

impl Bed {
    fn new() -> Self {
        let (redis, stranger) = (RedisCluster::start(60_000), RedisCluster::start_one());
        let store = tempfile::tempdir().unwrap();
        redis.nodes().for_each(|node| drop(redis.ask(node, &ACL)));
        stranger.ask(0, &ACL);
        let seed = redis.seeds()[0].clone();
        let (package, at) = (tiny_package(), store.path().display().to_string());
        let items = package.join("items.jsonl").display().to_string();
        let package = package.display().to_string();
        let (code, out, reported) = run(&["publish", &package, "--items", &items, "--remote", &seed, "--store", &at]);
        assert_eq!(code, 0, "{out}{reported}");
        let package = Package::open(&tiny_package()).unwrap();
        let server = serve(store.path(), &package.tables, &redis, &stranger);
        let keys = redis.keys("sterling:{tiny/packages/*/0.*}:0");
        let [chunk] = keys.as_slice() else { panic!("{keys:?}") };
        let mut bed =
            Bed { redis, stranger, store, server, seed, shard: Vec::new(), others: Vec::new(), chunk: chunk.clone() };
        bed.find_shard();
        bed
    }

    fn find_shard(&mut self) {
        let primary = self.redis.primary_of(&self.chunk);
        let number = self.redis.primaries().iter().position(|node| *node == primary).unwrap();
        self.shard = self.redis.shard(number);
        self.others = self.redis.primaries().into_iter().filter(|node| *node != primary).collect();
        assert_eq!(self.shard.len(), 2);
    }

    /// Returns the status of a request and the number of missing rows.
    fn ask(&self, on_degraded: &str) -> (u16, u64) {
        let (status, answer) = self.server.post("/v1/models/tiny:retrieve", request(on_degraded));
        (status, answer["degraded_rows"].as_u64().unwrap_or(0))
    }

    /// Returns the warnings of `/readyz`, except the permanent one about the other cluster.
    fn warnings(&self) -> Vec<String> {
        let warnings = self.server.warnings().into_iter();
        warnings.filter(|line| !line.contains("is a node of another cluster")).collect()
    }

    fn unreadable(&self) -> f64 {
        let metrics = self.server.get("/metrics").1;
        let line = metrics
            .lines()
            .find_map(|line| line.strip_prefix("sterling_remote_unreadable_ratio{remote_table=\"tiny/packages\"} "));
        line.unwrap_or_else(|| panic!("{metrics}")).parse().unwrap()
    }

    /// Restores lost rows, as an operator does.
    fn bring_back(&self) {
        let (code, out, reported) = run(&["remote", &self.seed, "--verify"]);
        let is_reported = code == 1 && reported.contains("cannot be read");
        // A set whose manifest is lost too does not exist any more.
        assert!(is_reported || !out.contains("tiny/packages"), "{code}: {out}{reported}");
        let version = format!("{}/tiny/1", self.store.path().display());
        let (code, out, reported) = run(&["remote", &self.seed, "--load", &version]);
        assert!(code == 0 && out.contains("loaded the rows of tiny version 1"), "{code}: {out}{reported}");
        let (code, out, reported) = run(&["remote", &self.seed, "--verify"]);
        assert_eq!(code, 0, "{out}{reported}");
    }

    fn on_all(&self, words: &[&str]) {
        self.redis.nodes().for_each(|node| drop(self.redis.ask(node, words)));
    }

    /// Changes a setting of all nodes.
    fn set(&self, name: &str, value: &str) {
        self.on_all(&["CONFIG", "SET", name, value]);
    }

    /// Checks that a load is rejected with this text.
    fn load_is_rejected(&self, words: &str) {
        let version = format!("{}/tiny/1", self.store.path().display());
        let (code, out, reported) = run(&["remote", &self.seed, "--load", &version]);
        assert!(code == 1 && reported.contains(words), "{code}: {out}{reported}");
    }

    fn check(&mut self, fault: &Fault) {
        let Fault { name, requests, warning, begin, end } = fault;
        begin(self);
        match requests {
            Served => {
                let wait = Instant::now();
                while warning.is_some_and(|warning| !self.warnings().iter().any(|line| line.contains(warning))) {
                    assert_eq!(self.ask("fail"), (200, 0), "{name}");
                    assert!(wait.elapsed() < Duration::from_secs(60), "{name}: {:?}", self.warnings());
                }
                assert_eq!(self.ask("fail"), (200, 0), "{name}");
            }
            Degraded => {
                until(name, || self.ask("fail").0 == 503);
                let (status, rows) = self.ask("default_rows");
                assert!(status == 200 && rows > 0, "{name}: {status}, {rows} rows");
                let wait = Instant::now();
                while !self.warnings().iter().any(|line| warning.is_some_and(|warning| line.contains(warning))) {
                    assert!(wait.elapsed() < Duration::from_secs(60), "{name}: {:?}", self.warnings());
                    std::thread::sleep(Duration::from_millis(20));
                }
                until("the gauge that alerts look at", || self.unreadable() > 0.0);
                let (code, out, _) = run(&["doctor", "--server", &self.server.address]);
                assert!(code == 1 && out.contains(warning.unwrap_or_default()), "{name}: {out}");
            }
        }
        end(self);
        until(&format!("{name}: rows come again"), || self.ask("fail") == (200, 0));
        until(&format!("{name}: the warnings go"), || self.warnings().is_empty());
        assert_eq!(self.unreadable(), 0.0, "{name}");
    }
}

/// Returns a request that needs rows.
pub fn request(on_degraded: &str) -> Value {
    json!({"features": {"installed": [1, 2, 3], "section": "games", "size": [1, 2, 3]}, "k": 3, "on_degraded": on_degraded,
           "timeout_ms": 2000})
}

/// Starts a cluster and its server, and injects a fault.
pub fn faulty_cluster(fault: &str) -> Bed {
    let mut bed = Bed::new();
    let fault = FAULTS.iter().find(|known| known.name == fault).unwrap();
    (fault.begin)(&mut bed);
    bed
}

/// Starts a server that has no row of its tables itself, and its log beside the store.
fn serve(store: &Path, tables: &[Arc<Table>], redis: &RedisCluster, stranger: &RedisCluster) -> Server {
    let all = |table: &Arc<Table>| {
        let mut plan =
            planned(table, Sharding::TableWise, &[([0, table.rows()], [0, table.width() as u32], Tier::Remote)]);
        plan.shards[0].cache_bytes = 0;
        plan
    };
    let plan = plan_file(store, tables.iter().map(all).collect());
    let mut command = sterling();
    command.env("STERLING_HTTP__DRAIN_MS", "0").env("STERLING_TABLES__TIMEOUT_MS", "1000");
    command.args(["serve", "--listen", "127.0.0.1:0", "--store"]).arg(store).arg("--plan").arg(plan);
    for seed in redis.seeds().iter().chain(&stranger.seeds()) {
        command.args(["--remote", &seed.replace("redis://", &format!("redis://{USER}:secret@"))]);
    }
    let server = Server::spawn_logged(command.stderr(File::create(store.join("log")).unwrap()));
    server.wait_ready();
    server
}

const FAULTS: [Fault; 13] = [
    Fault {
        name: "a primary that hangs",
        requests: Served,
        warning: Some(" does not answer: "),
        begin: |bed| bed.redis.stop(bed.shard[0]),
        end: |bed| bed.redis.resume(bed.shard[0]),
    },
    Fault {
        name: "a shard that hangs",
        requests: Degraded,
        warning: Some("sampled rows cannot be read"),
        begin: |bed| bed.shard.iter().for_each(|node| bed.redis.stop(*node)),
        end: |bed| bed.shard.iter().for_each(|node| bed.redis.resume(*node)),
    },
    Fault {
        name: "a primary that loads",
        requests: Served,
        warning: None,
        begin: |bed| {
            begin_to_load(&bed.redis, bed.shard[0]);
            (0..20).for_each(|_| assert_eq!(bed.ask("fail"), (200, 0)));
            assert!(is_loading(&bed.redis, bed.shard[0]), "it loads still");
        },
        end: |bed| end_to_load(&bed.redis, bed.shard[0]),
    },
    Fault {
        name: "a primary that takes no writes",
        requests: Served,
        warning: None,
        begin: |bed| {
            bed.set("min-replicas-to-write", "5");
            bed.load_is_rejected("NOREPLICAS");
        },
        end: |bed| bed.set("min-replicas-to-write", "0"),
    },
    Fault {
        name: "full nodes",
        requests: Served,
        warning: None,
        begin: |bed| {
            bed.set("maxmemory", "1");
            bed.load_is_rejected("the cluster is full");
        },
        end: |bed| bed.set("maxmemory", "0"),
    },
    Fault {
        name: "nodes that may evict",
        requests: Served,
        warning: Some("maxmemory-policy allkeys-lru, expected noeviction"),
        begin: |bed| {
            bed.set("maxmemory", "1gb");
            bed.set("maxmemory-policy", "allkeys-lru");
        },
        end: |bed| {
            bed.set("maxmemory-policy", "noeviction");
            bed.set("maxmemory", "0");
        },
    },
    Fault {
        name: "a slot that moves",
        requests: Served,
        warning: None,
        begin: |bed| move_slot(bed, bed.shard[0], bed.others[0]),
        end: |bed| move_slot(bed, bed.others[0], bed.shard[0]),
    },
    Fault {
        name: "all nodes hang, and the stranger alone answers",
        requests: Degraded,
        warning: Some("a node of another cluster"),
        begin: |bed| bed.redis.nodes().for_each(|node| bed.redis.stop(node)),
        end: |bed| bed.redis.nodes().for_each(|node| bed.redis.resume(node)),
    },
    Fault {
        name: "a shard that comes back empty",
        requests: Degraded,
        warning: Some("missing"),
        begin: |bed| {
            let shard = bed.shard.clone();
            shard.iter().for_each(|node| bed.redis.kill(*node));
            shard.iter().for_each(|node| bed.redis.start_node(*node));
            bed.redis.wait_until_whole();
            // Its users are lost as well.
            shard.iter().for_each(|node| drop(bed.redis.ask(*node, &ACL)));
        },
        end: |bed| {
            bed.find_shard();
            bed.bring_back();
        },
    },
    Fault {
        name: "flushed chunks, and a log that stays short",
        requests: Degraded,
        warning: Some("; `sterling remote --load` restores lost rows"),
        begin: |bed| {
            bed.redis.ask(bed.shard[0], &["DEL", &bed.chunk]);
            until("rows are missing", || bed.ask("fail").0 == 503);
            let lines = || text(bed.store.path().join("log")).matches(" WARN ").count();
            let (before, start) = (lines(), Instant::now());
            (0..300).for_each(|_| assert_eq!(bed.ask("fail").0, 503));
            let (more, seconds) = (lines() - before, start.elapsed().as_secs() as usize);
            assert!(more <= 2 * seconds + 4, "{more} lines in {seconds} s");
        },
        end: |bed| bed.bring_back(),
    },
    Fault {
        name: "flushed nodes, manifests included",
        requests: Degraded,
        warning: Some("not in the cluster any more"),
        begin: |bed| bed.redis.primaries().into_iter().for_each(|node| drop(bed.redis.ask(node, &["FLUSHALL"]))),
        end: |bed| {
            let version = format!("{}/tiny/1", bed.store.path().display());
            let (code, out, reported) = run(&["remote", &bed.seed, "--load", &version]);
            assert_eq!(code, 0, "{out}{reported}");
        },
    },
    Fault {
        name: "a password that is wrong",
        requests: Degraded,
        warning: Some("authentication failed"),
        begin: |bed| {
            bed.on_all(&["ACL", "SETUSER", USER, "resetpass", ">other"]);
            bed.on_all(&["CLIENT", "KILL", "USER", USER]);
        },
        end: |bed| bed.on_all(&["ACL", "SETUSER", USER, "resetpass", ">secret"]),
    },
    Fault {
        name: "a user who may not read",
        requests: Degraded,
        warning: Some("NOPERM"),
        begin: |bed| bed.on_all(&["ACL", "SETUSER", USER, "-getrange"]),
        end: |bed| bed.on_all(&["ACL", "SETUSER", USER, "+getrange"]),
    },
];

/// Makes a node load its dump, which takes long, with LOADING as answer in the meantime.
fn begin_to_load(redis: &RedisCluster, node: usize) {
    redis.ask(node, &["DEBUG", "POPULATE", "40000", "junk", "100"]);
    redis.ask(node, &["CONFIG", "SET", "loading-process-events-interval-bytes", "1024"]);
    redis.ask(node, &["CONFIG", "SET", "key-load-delay", "500"]);
    let mut connection = redis.connection(node);
    connection.set_read_timeout(None).unwrap();
    // Returns when the load is complete.
    std::thread::spawn(move || redis::cmd("DEBUG").arg("RELOAD").query::<redis::Value>(&mut connection));
    until("the node loads", || is_loading(redis, node));
}

fn is_loading(redis: &RedisCluster, node: usize) -> bool {
    redis.try_ask(node, &["PING"]).is_err_and(|error| error.to_string().to_lowercase().contains("loading"))
}

fn end_to_load(redis: &RedisCluster, node: usize) {
    redis.ask(node, &["CONFIG", "SET", "key-load-delay", "0"]);
    until("the node has loaded", || redis.try_ask(node, &["PING"]).is_ok());
    // The dump that it wrote for the load, and would load again after a restart.
    let config: Vec<String> = redis::cmd("CONFIG").arg("GET").arg("dir").query(&mut redis.connection(node)).unwrap();
    std::fs::remove_file(Path::new(&config[1]).join("dump.rdb")).unwrap();
}

/// Moves the slot of the first table from one primary to another.
fn move_slot(bed: &Bed, from: usize, to: usize) {
    assert_eq!(bed.redis.primary_of(&bed.chunk), from);
    let (redis, slot) = (&bed.redis, bed.redis.slot_of(&bed.chunk));
    redis.ask(to, &["CLUSTER", "SETSLOT", &slot, "IMPORTING", &redis.id(from)]);
    redis.ask(from, &["CLUSTER", "SETSLOT", &slot, "MIGRATING", &redis.id(to)]);
    assert_eq!(bed.ask("fail"), (200, 0));
    redis.ask(from, &["MIGRATE", "127.0.0.1", &redis.port(to).to_string(), &bed.chunk, "0", "5000"]);
    assert_eq!(bed.ask("fail"), (200, 0));
    for node in [to, from, bed.others[0], bed.others[1]] {
        redis.ask(node, &["CLUSTER", "SETSLOT", &slot, "NODE", &redis.id(to)]);
    }
    until("the owner is known", || redis.primary_of(&bed.chunk) == to);
}

#[test]
#[ignore = "long: table of faults"]
fn faults_of_a_cluster_degrade_as_stated_warn_and_end() {
    let _alone = alone();
    let mut bed = Bed::new();
    until("the stranger is reported", || bed.server.get("/readyz").1.contains("is a node of another cluster"));
    for fault in &FAULTS {
        bed.check(fault);
    }
    println!("{} faults of a cluster", FAULTS.len());
}

const SHAPE: TableShape = TableShape { rows: 40_000, row_bytes: 60, format: String::new() };

fn rows_of(rows: std::ops::Range<u64>, out: &mut [u8]) -> sterling::error::Result<()> {
    rows.zip(out.chunks_exact_mut(SHAPE.row_bytes)).for_each(|(row, out)| out.fill((row % 251) as u8));
    Ok(())
}

/// Reads continue with rows that were loaded again after their manifest was lost, and with a recreated cluster.
#[test]
fn reloaded_rows_are_used_without_reopening() {
    let _alone = alone();
    let redis = RedisCluster::start(5000);
    let cluster = Cluster::connect(ClusterOptions::new(redis.seeds())).unwrap();
    let named = RowSet::new("tests", "again", 7).unwrap();
    load(&cluster, &named, &SHAPE, rows_of, |_| {}).unwrap();
    let options = RemoteOptions { cache_bytes: 0, timeout: Duration::from_secs(2) };
    let table = RemoteTable::open(&cluster, &named, &SHAPE, &options).unwrap();
    let rows: Vec<u64> = (0..500).map(|n| n * 79).collect();
    let all_hit = || {
        table.begin(rows.clone(), &Lookup::default()).wait().unwrap().states.iter().all(|state| *state == RowState::Hit)
    };
    assert!(all_hit() && cluster.troubles().is_empty());
    let before = find(&cluster, &named).unwrap().unwrap();

    redis.primaries().into_iter().for_each(|node| drop(redis.ask(node, &["FLUSHALL"])));
    assert!(!all_hit());
    until("the loss is reported", || {
        cluster.troubles().iter().any(|line| line.contains("not in the cluster any more"))
    });
    load(&cluster, &named, &SHAPE, rows_of, |_| {}).unwrap();
    let after = find(&cluster, &named).unwrap().unwrap();
    assert_eq!((after.checksum, after.rows), (before.checksum, before.rows));
    until("rows are read again", &all_hit);
    until("all is well", || cluster.troubles().is_empty());

    // Other rows under the name are not followed.
    redis.primaries().into_iter().for_each(|node| drop(redis.ask(node, &["FLUSHALL"])));
    let others = |rows: std::ops::Range<u64>, out: &mut [u8]| rows_of(rows.start + 1..rows.end + 1, out);
    load(&cluster, &named, &SHAPE, others, |_| {}).unwrap();
    until("the other rows are reported", || {
        cluster.troubles().iter().any(|line| line.contains("the cluster has rows with another checksum")) && !all_hit()
    });
    drop(table);
    until("tables that are not open are no trouble", || cluster.troubles().is_empty());
}

/// A single lost chunk of many is detected, and reported until it is restored; a table without any row is not opened.
#[test]
fn lost_chunks_are_counted_and_stay_reported() {
    let _alone = alone();
    let redis = RedisCluster::start_one();
    let cluster = Cluster::connect(ClusterOptions::new(redis.seeds())).unwrap();
    let named = RowSet::new("tests", "chunks", 7).unwrap();
    load(&cluster, &named, &SHAPE, rows_of, |_| {}).unwrap();
    assert_eq!(verify(&cluster, &named).unwrap().trouble(), None);
    assert_eq!(verify(&cluster, &named).unwrap().rows, SHAPE.rows);
    let options = RemoteOptions { cache_bytes: 0, timeout: Duration::from_secs(2) };
    let table = RemoteTable::open(&cluster, &named, &SHAPE, &options).unwrap();
    let mut keys = redis.keys("sterling:{tests/chunks/*/*}:0");
    keys.sort();
    assert!(keys.len() > 8, "{keys:?}");
    redis.ask(0, &["DEL", &keys[1]]);
    let lost = verify(&cluster, &named).unwrap();
    let share = lost.unreadable_rows() as f64 / SHAPE.rows as f64 * keys.len() as f64;
    assert!((0.5..2.0).contains(&share) && lost.unreadable.keys().eq(&["missing"]), "{lost:?}");
    let rows: Vec<u64> = (0..2000).collect();
    table.begin(rows, &Lookup::default()).wait().unwrap();
    until("the loss is reported", || cluster.troubles().iter().any(|line| line.contains(" missing)")));
    redis.ask(0, &["FLUSHALL"]);
    let (code, out, _) = run(&["remote", &redis.seeds()[0]]);
    assert!(code == 0 && !out.contains("tests/chunks"), "{out}");

    load(&cluster, &named, &SHAPE, rows_of, |_| {}).unwrap();
    redis.keys("sterling:{tests/chunks/*/*}:0").iter().for_each(|key| drop(redis.ask(0, &["DEL", key])));
    let refused = RemoteTable::open(&cluster, &named, &SHAPE, &options).unwrap_err().to_string();
    assert!(refused.contains("40000 of 40000 sampled rows cannot be read (40000 missing)"), "{refused}");
    assert!(sample(&cluster, &named).unwrap().unreadable_rows() > 0);
    let (code, out, _) = run(&["remote", &redis.seeds()[0]]);
    assert!(code == 0 && out.contains("damaged: 40000 of 40000 sampled rows"), "{out}");
}

/// A shard without a serving node is retried until the deadline, not only a few times.
#[test]
fn rows_of_a_shard_that_loads_come_once_it_has_loaded() {
    let _alone = alone();
    let redis = RedisCluster::start_one();
    let cluster = Cluster::connect(ClusterOptions::new(redis.seeds())).unwrap();
    let named = RowSet::new("tests", "loading", 7).unwrap();
    load(&cluster, &named, &SHAPE, rows_of, |_| {}).unwrap();
    let options = RemoteOptions { cache_bytes: 0, timeout: Duration::from_secs(60) };
    let table = RemoteTable::open(&cluster, &named, &SHAPE, &options).unwrap();
    begin_to_load(&redis, 0);
    let before = cluster.counters().pipelines;
    let rows = table.begin((0..100).collect(), &Lookup::default());
    until("it is queried again and again", || cluster.counters().pipelines > before + 8);
    end_to_load(&redis, 0);
    assert_eq!(rows.wait().unwrap().states, [RowState::Hit; 100]);
}

/// A full cluster can be emptied, and a set that an earlier release named by its version can be read and deleted.
#[test]
fn full_nodes_are_emptied_and_earlier_names_are_read() {
    let _alone = alone();
    let redis = RedisCluster::start_one();
    let cluster = Cluster::connect(ClusterOptions::new(redis.seeds())).unwrap();
    let named = RowSet::new("tests", "full", 7).unwrap();
    load(&cluster, &named, &SHAPE, rows_of, |_| {}).unwrap();
    redis.ask(0, &["CONFIG", "SET", "maxmemory", "1"]);
    let (code, out, reported) = run(&["remote", &redis.seeds()[0], "--delete", "tests/0000000000000007"]);
    assert!(code == 0 && out.contains("deleted tests/full rows 0000000000000007"), "{out}{reported}");
    assert_eq!(redis.keys("sterling:*"), Vec::<String>::new());
    redis.ask(0, &["CONFIG", "SET", "maxmemory", "0"]);

    // The name is part of the keys, and of nothing else.
    load(&cluster, &named, &SHAPE, rows_of, |_| {}).unwrap();
    let earlier = earlier_names(&redis);
    assert_eq!(find(&cluster, &named).unwrap(), None);
    let options = RemoteOptions { cache_bytes: 0, timeout: Duration::from_secs(2) };
    let table = RemoteTable::open(&cluster, &named, &SHAPE, &options).unwrap();
    let states = table.begin((0..100).collect(), &Lookup::default()).wait().unwrap().states;
    assert_eq!(states, [RowState::Hit; 100]);
    assert_eq!(load(&cluster, &named, &SHAPE, rows_of, |_| {}).unwrap().progress.bytes_written, 0, "once is enough");
    let (code, out, _) = run(&["remote", &redis.seeds()[0], "--delete", &format!("tests/{earlier}")]);
    assert!(code == 0 && out.contains(&format!("deleted tests/full rows {earlier}")), "{out}");
    assert_eq!(redis.keys("sterling:*"), Vec::<String>::new());
}

/// Renames the rows of the only set to the form `VERSION-CONTENT`, and returns that name.
fn earlier_names(redis: &RedisCluster) -> String {
    let (now, earlier) = ("0000000000000007", "3-0000000000000007");
    let get = |key: &str| -> Vec<u8> { redis::cmd("GET").arg(key).query(&mut redis.connection(0)).unwrap() };
    let set = |key: &str, value: &[u8]| {
        let _: () = redis::cmd("SET").arg(key).arg(value).query(&mut redis.connection(0)).unwrap();
    };
    let manifest: Value = serde_json::from_slice(&get(&format!("sterling:{{tests/full/{now}}}:manifest"))).unwrap();
    let partitions = manifest["partitions"].as_u64().unwrap();
    let mut chunks = Vec::new();
    for key in redis.keys("sterling:{tests/full/*/*}:*") {
        let (head, group) = key.rsplit_once(':').unwrap();
        let partition: u64 = head.rsplit_once('/').unwrap().1.split('.').next().unwrap().parse().unwrap();
        chunks.push((partition, group.to_owned(), get(&key)));
    }
    redis.ask(0, &["FLUSHALL"]);
    for (partition, group, bytes) in chunks {
        let slots = partition * 16_384 / partitions..(partition + 1) * 16_384 / partitions;
        let key = (0..)
            .map(|salt| format!("sterling:{{tests/full/{earlier}/{partition}.{salt}}}:{group}"))
            .find(|key| slots.contains(&redis.slot_of(key).parse().unwrap()))
            .unwrap();
        set(&key, &bytes);
    }
    let mut old = manifest;
    old.as_object_mut().unwrap().remove("loaded");
    set(&format!("sterling:{{tests/full/{earlier}}}:manifest"), old.to_string().as_bytes());
    redis.ask(0, &["SADD", "sterling:{tests/full}:versions", earlier]);
    earlier.to_owned()
}
