//! Tables over several hosts: servers with a partition of the rows answer as one that holds all of them, bit for bit.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterling::embedding::place::{ShardPlan, Sharding, TablePlan, Tier};
use sterling::embedding::planner::PlacementPlan;
use sterling::embedding::planner::plan::{DeviceKind, DevicePlan};
use sterling::embedding::{
    BagConfig, EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor, Lookup, OnDegraded, Pooling,
    SequenceConfig, Table,
};
use sterling::error::Kind;
use sterling::kernels::cpu::pool::RowFormat;
use sterling::publish::Plan;
use sterling::server::route::{PeerOptions, Peers};
use sterling::snapshot::{Placement, PlacementOptions, Snapshot};

use crate::support::{Server, agent, put, sterling, tiny, tiny_package, until};
use crate::telemetry::collector;

/// Name of a host and the addresses of its servers.
type Hosts = Vec<(String, Vec<String>)>;

/// Returns hosts with these numbers of servers, at unused addresses.
fn hosts(servers: &[usize]) -> Hosts {
    let listeners: Vec<Vec<TcpListener>> =
        servers.iter().map(|n| (0..*n).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect()).collect();
    let address = |listener: &TcpListener| listener.local_addr().unwrap().to_string();
    let named = |(n, of_host): (usize, &Vec<TcpListener>)| (format!("h{n}"), of_host.iter().map(address).collect());
    listeners.iter().enumerate().map(named).collect()
}

/// Splits the rows of a table into one range per host.
fn by_rows(table: &Table, hosts: &[&str]) -> TablePlan {
    let (rows, width, row_bytes) = (table.rows(), table.width() as u32, table.spec().row_bytes().unwrap() as u64);
    let edge = |n: usize| rows * n as u64 / hosts.len() as u64;
    let shard = |(n, host): (usize, &&str)| ShardPlan {
        copy: 0,
        rows: [edge(n), edge(n + 1)],
        columns: [0, width],
        tier: Tier::Host,
        device: (*host).into(),
        backing: None,
        cache_bytes: 0,
        bytes: (edge(n + 1) - edge(n)) * row_bytes,
        micros: 0.0,
    };
    TablePlan {
        table: table.name().into(),
        format: table.spec().format,
        sharding: Sharding::RowWise,
        shards: hosts.iter().enumerate().map(shard).collect(),
        bytes: rows * row_bytes,
        micros: 0.0,
        hit_share: 1.0,
        why: "a test".into(),
        ways: Vec::new(),
    }
}

/// Writes a plan over hosts to a file.
fn plan_file(folder: &Path, hosts: &Hosts, tables: Vec<TablePlan>) -> PathBuf {
    let device = |(name, servers): &(String, Vec<String>)| DevicePlan {
        host: None,
        device: name.clone(),
        kind: DeviceKind::Host,
        bytes: 0,
        capacity_bytes: 1 << 30,
        micros: 0.0,
        load: None,
        shards: 1,
        servers: servers.clone(),
    };
    let plan = PlacementPlan {
        batch: 1,
        micros: 0.0,
        slowest: "h0".into(),
        bytes: 0,
        candidates: 1,
        tables,
        devices: hosts.iter().map(device).collect(),
        notes: Vec::new(),
    };
    let path = folder.join("plan.json");
    std::fs::write(&path, serde_json::to_string(&plan).unwrap()).unwrap();
    path
}

/// Starts the server of a host; it is ready once the others are running.
fn spawn(store: &Path, plan: &Path, host: &str, address: &str) -> Server {
    let mut command = sterling();
    command.arg("serve").stderr(Stdio::null());
    spawn_by(command, store, plan, (host, address))
}

fn spawn_by(mut command: Command, store: &Path, plan: &Path, (host, address): (&str, &str)) -> Server {
    command
        .env("STERLING_HTTP__DRAIN_MS", "0")
        .env("STERLING_REFRESH_MS", "100")
        .env("STERLING_PEERS__WAIT_MS", "3000")
        .env("STERLING_TABLES__TIMEOUT_MS", "1500");
    command.args(["--listen", address, "--host", host, "--plan"]).arg(plan).arg("--store").arg(store);
    Server::spawn_logged(&mut command)
}

/// Starts one server per host.
fn spawn_all(store: &Path, plan: &Path, hosts: &Hosts) -> Vec<Server> {
    let servers: Vec<Server> =
        hosts.iter().flat_map(|(host, at)| at.iter().map(|at| spawn(store, plan, host, at))).collect();
    servers.iter().for_each(Server::wait_ready);
    servers
}

/// Returns the placement of this process as a server of a host.
fn placement_of(plan: &Path, host: &str) -> Placement {
    let options = PlacementOptions {
        plan: Some(plan.into()),
        host: Some(host.into()),
        timeout_ms: 10_000,
        ..PlacementOptions::default()
    };
    Placement::open(&options).unwrap().beside(Arc::new(Peers::open(&PeerOptions::default()).unwrap()))
}

/// Returns the tables of the tiny model as they are published.
fn tables_of(store: &Path) -> Vec<Arc<Table>> {
    Snapshot::load(&store.join("tiny/1"), &Placement::whole()).unwrap().package.tables.clone()
}

/// Returns retrievals of users of every kind.
fn bodies() -> Vec<Value> {
    let users = [
        json!({"installed": [1, 5, 7], "section": "games", "size": [1, 2, 3]}),
        json!({"installed": [0, 12, 11, 12, 3], "section": "nowhere", "size": [0, 0, 1]}),
        json!({"installed": [], "size": [1, 0, 0]}),
        json!({"installed": [-4, 900, 2, 9], "section": "web"}),
        json!({"installed": {"values": [4, 8, 6], "weights": [0.5, -2.0, 0.25]}, "section": "games"}),
    ];
    users.iter().map(|user| json!({"features": user, "k": 13, "exact": true, "on_degraded": "fail"})).collect()
}

fn response(server: &Server, body: &Value) -> (u16, Value) {
    server.post("/v1/models/tiny:retrieve", body)
}

/// Returns a fixed sequence of numbers.
fn random(state: &mut u64, below: u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state >> 11) % below
}

/// Returns two features of every table: bags of different length, some empty, some ids out of range.
fn ids(tables: &[Arc<Table>], seed: u64, weighted: bool) -> KeyedJaggedTensor {
    let mut state = seed;
    let lengths: Vec<i64> = (0..2 * tables.len() * 9).map(|_| random(&mut state, 7) as i64).collect();
    let rows = tables.iter().map(|t| t.rows()).max().unwrap();
    let count = lengths.iter().sum::<i64>();
    let ids: Vec<i64> = (0..count).map(|_| random(&mut state, rows + 4) as i64 - 2).collect();
    let weights = weighted.then(|| (0..count).map(|_| random(&mut state, 100) as f32 / 25.0 - 2.0).collect());
    let keys = (0..2 * tables.len()).map(|n| format!("f{n}"));
    KeyedJaggedTensor::from_lengths(keys, ids, &lengths, weights).unwrap()
}

/// Returns the results of pooled and sequential lookups, as bits.
fn looked_up(tables: &[Arc<Table>], ids: &KeyedJaggedTensor, means: bool) -> (Vec<u32>, Vec<u32>) {
    let table = |n: usize| tables[n / 2].name().to_owned();
    let pooling = |n: usize| if means == n.is_multiple_of(2) { Pooling::Mean } else { Pooling::Sum };
    let every = 0..2 * tables.len();
    let bag = |n: usize| BagConfig { feature: format!("f{n}"), table: table(n), pooling: pooling(n) };
    let bags = EmbeddingBagCollection::new(tables.to_vec(), &every.clone().map(bag).collect::<Vec<_>>()).unwrap();
    let sequence = |n: usize| SequenceConfig { feature: format!("f{n}"), table: table(n) };
    let sequences = EmbeddingCollection::new(tables.to_vec(), &every.map(sequence).collect::<Vec<_>>()).unwrap();
    let strict = Lookup { on_degraded: OnDegraded::Fail, ..Lookup::default() };
    let (pooled, _) = bags.lookup(ids, &strict).unwrap();
    let (retained, _) = sequences.lookup(ids, &strict).unwrap();
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    (bits(pooled.values()), retained.iter().flat_map(|(_, rows)| bits(rows.values())).collect())
}

#[test]
fn servers_with_a_part_of_the_rows_each_answer_as_one_with_all_of_them() {
    let formats = [
        (RowFormat::F32, RowFormat::F16, 3),
        (RowFormat::Int8, RowFormat::Bf16, 2),
        (RowFormat::Int4, RowFormat::Int8, 2),
        (RowFormat::Int2, RowFormat::F32, 2),
    ];
    for (packages, sections, count) in formats {
        let store = tempfile::tempdir().unwrap();
        let mut what = tiny();
        what.recipe.tables = [("packages".to_owned(), packages), ("sections".to_owned(), sections)].into();
        put(store.path(), &what).unwrap();
        let whole = tables_of(store.path());
        // One more host, without rows, which is this process.
        let mut at = hosts(&vec![1; count]);
        let names: Vec<String> = at.iter().map(|(name, _)| name.clone()).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        at.push(("here".into(), Vec::new()));
        let tables = whole.iter().map(|table| by_rows(table, &names)).collect();
        let plan = plan_file(store.path(), &at, tables);
        let one = Server::start(store.path());
        let servers = spawn_all(store.path(), &plan, &at);
        assert_eq!(servers.len(), count);
        for body in bodies() {
            let expected = response(&one, &body);
            assert_eq!(expected.0, 200, "{body}: {}", expected.1);
            for server in &servers {
                assert_eq!(response(server, &body), expected, "{body} of {packages:?} and {sections:?}");
            }
        }
        // Each has only its partition in memory.
        for (n, server) in servers.iter().enumerate() {
            let reported = server.get_json("/v1/models/tiny")["tables"].clone();
            for (table, reported) in whole.iter().zip(reported.as_array().unwrap()) {
                let (rows, part) = (table.rows(), (n as u64, count as u64));
                let held = rows * (part.0 + 1) / part.1 - rows * part.0 / part.1;
                let expected = held * table.spec().row_bytes().unwrap() as u64;
                assert_eq!(reported["bytes_here"], expected, "{reported}");
                assert_eq!(reported["placed"], format!("row_wise on {}", names.join(", ")));
            }
            let metrics = server.get("/metrics").1;
            let other = names[(n + 1) % count];
            assert!(
                metrics.contains(&format!("sterling_peer_rows_total{{host=\"{other}\",outcome=\"remote\"}}")),
                "{metrics}"
            );
            assert!(metrics.contains("call=\"rows\",status=\"200\""), "{metrics}");
        }
        let placement = placement_of(&plan, "here");
        let here = Snapshot::load(&store.path().join("tiny/1"), &placement).unwrap();
        assert!(here.package.tables.iter().all(|table| table.bytes_here() == 0));
        for seed in 1..8 {
            for (weighted, means) in [(false, false), (true, true)] {
                let ids = ids(&whole, seed * 0x9e37_79b9, weighted);
                assert_eq!(looked_up(&here.package.tables, &ids, means), looked_up(&whole, &ids, means));
            }
        }
    }
}

#[test]
fn trace_and_request_id_are_passed_to_hosts() {
    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    let store = tempfile::tempdir().unwrap();
    put(store.path(), &tiny()).unwrap();
    // Before the ports of the hosts are chosen, so that it takes none of them.
    let (url, reported) = collector();
    let at = hosts(&[1, 1]);
    let tables = tables_of(store.path()).iter().map(|table| by_rows(table, &["h0", "h1"])).collect();
    let plan = plan_file(store.path(), &at, tables);
    let log = store.path().join("log");
    let servers = [0, 1].map(|n: usize| {
        let mut command = sterling();
        command.env("STERLING_TRACES__COLLECTOR", &url).env("STERLING_LOG", "sterling=debug");
        command.arg("serve").stderr(std::fs::File::create(log.with_extension(n.to_string())).unwrap());
        spawn_by(command, store.path(), &plan, (&at[n].0, &at[n].1[0]))
    });
    servers.iter().for_each(Server::wait_ready);
    let ask = |call: &str, body: &Value, headers: &[(&str, &str)]| {
        let answer = servers[0].send("POST", &format!("/v1/models/tiny:{call}"), headers, &body.to_string());
        assert_eq!(answer.status().as_u16(), 200, "{body}");
    };
    let of_rows = |id: &str| {
        let log = std::fs::read_to_string(log.with_extension("1")).unwrap();
        log.lines().any(|line| line.contains("rows") && line.contains(id) && line.contains(TRACE))
    };
    let [split, _] = split_and_near("fail");
    let embed = json!({"features": split["features"]});
    let list = json!({"requests": [split]});
    for (n, (call, body)) in [("retrieve", &split), ("embed", &embed), ("retrieve", &list)].into_iter().enumerate() {
        let (id, caller) = (format!("order-{n}"), format!("00f067aa0ba902b{n}"));
        ask(call, body, &[("traceparent", &format!("00-{TRACE}-{caller}-01")), ("x-request-id", &id)]);
        let mut spans: Vec<Value> = Vec::new();
        let one = |spans: &[Value], key: &str, value: &str| spans.iter().find(|span| span[key] == value).cloned();
        while one(&spans, "parentSpanId", &caller).is_none() || one(&spans, "name", "rows").is_none() {
            spans.extend(reported.recv_timeout(Duration::from_secs(30)).unwrap());
        }
        let (own, rows) = (one(&spans, "parentSpanId", &caller).unwrap(), one(&spans, "name", "rows").unwrap());
        assert_eq!((&own["name"], &own["traceId"]), (&json!(call), &json!(TRACE)));
        assert_eq!((&rows["parentSpanId"], &rows["traceId"]), (&own["spanId"], &json!(TRACE)), "{spans:#?}");
        assert!(of_rows(&id), "the host's log names the request");
    }
    // A call without tracing forwards its ids unchanged, and creates no span.
    ask(
        "retrieve",
        &split,
        &[("traceparent", &format!("00-{TRACE}-00f067aa0ba902b9-00")), ("x-request-id", "order-9")],
    );
    assert!(of_rows("order-9"));
    assert!(reported.recv_timeout(Duration::from_millis(1500)).is_err(), "nothing was to be recorded");
}

/// Two hosts, the second with two servers, over their own stores, and one server with all rows.
pub struct Pair {
    stores: [tempfile::TempDir; 2],
    plan: PathBuf,
    hosts: Hosts,
    one: Server,
}

impl Pair {
    pub fn new() -> Self {
        let stores = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        for store in &stores {
            put(store.path(), &tiny()).unwrap();
        }
        let (whole, hosts) = (tables_of(stores[0].path()), hosts(&[1, 2]));
        let tables = whole.iter().map(|table| by_rows(table, &["h0", "h1"])).collect();
        let plan = plan_file(stores[0].path(), &hosts, tables);
        let one = Server::start(stores[0].path());
        Pair { stores, plan, hosts, one }
    }

    pub fn spawn(&self, host: usize, server: usize) -> Server {
        let (name, at) = &self.hosts[host];
        spawn(self.stores[host].path(), &self.plan, name, &at[server])
    }

    /// Compares the answers of a server with those of the complete one.
    pub fn check(&self, server: &Server) {
        for body in bodies() {
            assert_eq!(response(server, &body), response(&self.one, &body), "{body}");
        }
    }
}

/// Returns the number of failed calls for rows of the second host.
fn failed_calls(server: &Server) -> String {
    let metrics = server.get("/metrics").1;
    let line =
        metrics.lines().find(|line| line.starts_with("sterling_peer_calls_total{host=\"h1\",outcome=\"failed\"}"));
    line.unwrap_or_default().to_owned()
}

/// Returns a user whose rows lie on both hosts, and one whose rows lie on the first.
pub fn split_and_near(policy: &str) -> [Value; 2] {
    let features = |ids: [i64; 3]| json!({"installed": ids, "size": [1, 2, 3]});
    [[0, 10, 11], [0, 1, 2]].map(
        |ids| json!({"features": features(ids), "k": 5, "exact": true, "on_degraded": policy, "timeout_ms": 10_000}),
    )
}

#[test]
fn a_lost_host_degrades_answers_like_a_lost_cluster() {
    let pair = Pair::new();
    let near = pair.spawn(0, 0);
    let mut away = vec![pair.spawn(1, 0), pair.spawn(1, 1)];
    near.wait_ready();
    away.iter().for_each(Server::wait_ready);
    pair.check(&near);
    // One of two servers is killed: the other answers.
    assert!(away[0].is_running());
    away[0].signal("KILL");
    away.remove(0).wait();
    pair.check(&near);
    // The other one is stopped: local rows are answered, missing ones are reported, both in time.
    away[0].signal("STOP");
    let start = Instant::now();
    let [split, close] = split_and_near("fail");
    let (status, problem) = response(&near, &split);
    assert_eq!(status, 503, "{problem}");
    assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
    assert_eq!(response(&near, &close), response(&pair.one, &close));
    let [split, _] = split_and_near("default_rows");
    let answer = near.ask("/v1/models/tiny:retrieve", &split);
    assert_eq!(answer["degraded_rows"], 2, "{answer}");
    // After a few failures no request waits any more.
    until("no server of the host is queried", || {
        let before = failed_calls(&near);
        near.ask("/v1/models/tiny:retrieve", &split);
        failed_calls(&near) == before
    });
    until("the warning", || near.get("/readyz").1.contains("host `h1`"));
    assert_eq!(near.get("/readyz").0, 200, "a server whose neighbours are lost is ready");
    let metrics = near.get("/metrics").1;
    assert!(metrics.contains("sterling_peer_rows_total{host=\"h1\",outcome=\"degraded\"}"), "{metrics}");
    // It continues, and receives requests again.
    away[0].signal("CONT");
    let [split, _] = split_and_near("fail");
    until("rows come again", || response(&near, &split).0 == 200);
    pair.check(&near);
    // A server that comes back at its address.
    away[0].signal("KILL");
    away.remove(0).wait();
    until("they come no more", || response(&near, &split).0 == 503);
    let back = pair.spawn(1, 1);
    back.wait_ready();
    until("rows come again", || response(&near, &split).0 == 200);
    pair.check(&near);
    pair.check(&back);
    // A running server with other rows, by another plan.
    back.signal("KILL");
    back.wait();
    let folder = tempfile::tempdir().unwrap();
    let tables = tables_of(pair.stores[1].path());
    let tables = tables.iter().map(|table| by_rows(table, &["h0", "h0", "h1"])).collect();
    let other = plan_file(folder.path(), &pair.hosts, tables);
    let unlike = spawn(pair.stores[1].path(), &other, "h1", &pair.hosts[1].1[1]);
    until("the warning", || near.get("/readyz").1.contains("warning: host `h1`: no server of the host returns tiny/"));
    assert_eq!(response(&near, &split).0, 503);
    unlike.signal("KILL");
    unlike.wait();
    let back = pair.spawn(1, 1);
    back.wait_ready();
    until("rows come again", || response(&near, &split).0 == 200);
    until("the warning goes", || !near.get("/readyz").1.contains("no server of the host returns"));
    pair.check(&near);
}

/// The tiny package with negated values in its first table.
fn turned_package(folder: &Path) -> PathBuf {
    for entry in std::fs::read_dir(tiny_package()).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
    let file = folder.join("tables.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..data]).unwrap();
    let packages = &header["packages"];
    assert_eq!(packages["dtype"], "F32");
    let at = |n: usize| data + packages["data_offsets"][n].as_u64().unwrap() as usize;
    bytes[at(0)..at(1)].chunks_exact_mut(4).for_each(|number| number[3] ^= 0x80);
    std::fs::write(&file, bytes).unwrap();
    folder.to_owned()
}

#[test]
fn rows_of_another_version_are_never_taken() {
    let pair = Pair::new();
    let servers = [pair.spawn(0, 0), pair.spawn(1, 0)];
    servers.iter().for_each(Server::wait_ready);
    servers.iter().for_each(|server| pair.check(server));
    let before = bodies().iter().map(|body| response(&pair.one, body)).collect::<Vec<_>>();
    // The same rows under another version number: both hosts find each other's at once.
    put(pair.stores[0].path(), &tiny()).unwrap();
    until("the first host has the second version", || servers[0].get_json("/v1/models/tiny")["version"] == 2);
    assert_eq!(servers[1].get_json("/v1/models/tiny")["version"], 1);
    let pinned = |server: &Server, version: u64, body: &Value| {
        server.post(&format!("/v1/models/tiny/versions/{version}:retrieve"), body)
    };
    for (body, before) in bodies().iter().zip(&before) {
        assert_eq!(pinned(&servers[0], 1, body), *before);
        assert_eq!(pinned(&servers[1], 1, body), *before);
        let (status, answer) = pinned(&servers[0], 2, body);
        assert_eq!((status, answer["version"].as_u64()), (200, Some(2)));
        assert_eq!(answer["items"], before.1["items"]);
    }
    // Other rows: rejected until the other host has them too; the previous version keeps serving.
    let mut changed = tiny();
    let package = tempfile::tempdir().unwrap();
    changed.source = Plan::of_package(turned_package(package.path())).source;
    put(pair.stores[0].path(), &changed).unwrap();
    let third = |server: &Server| {
        let versions = server.get_json("/v1/models/tiny/versions");
        versions["versions"].as_array().unwrap().iter().find(|v| v["version"] == 3).cloned().unwrap_or_default()
    };
    until("the third version is rejected", || third(&servers[0])["refused"].is_string());
    let why = third(&servers[0])["refused"].as_str().unwrap().to_owned();
    assert!(why.contains("host `h1` does not have the rows"), "{why}");
    for (body, before) in bodies().iter().zip(&before) {
        assert_eq!(pinned(&servers[1], 1, body), *before);
        assert_eq!(response(&servers[0], body).1["items"], before.1["items"]);
    }
    // Once both have it, both answer with it.
    put(pair.stores[1].path(), &tiny()).unwrap();
    put(pair.stores[1].path(), &changed).unwrap();
    for server in &servers {
        until("both have it", || server.get_json("/v1/models/tiny")["version"] == 3);
    }
    let fresh = Server::start(pair.stores[0].path());
    for body in bodies() {
        let (_, expected) = response(&fresh, &body);
        assert_eq!(expected["version"], 3);
        servers.iter().for_each(|server| assert_eq!(response(server, &body).1["items"], expected["items"]));
    }
}

#[test]
fn invalid_calls_for_rows_are_rejected() {
    let pair = Pair::new();
    let servers = [pair.spawn(0, 0), pair.spawn(1, 0)];
    servers.iter().for_each(Server::wait_ready);
    let ask = |server: &Server, kind: &str, body: &[u8]| {
        let url = format!("http://{}/v1/models/tiny:rows", server.address);
        agent().post(url).header("content-type", kind).send(body).unwrap().status().as_u16()
    };
    let protocol = sterling::server::route::protocol::MEDIA_TYPE;
    assert_eq!(ask(&servers[0], "application/json", b"{}"), 415);
    for body in [&[][..], &[0xff; 40], &[1], &[1, 1, b't'], &[0xff, 0xff, 0xff, 0xff, 0x7f], b"{\"questions\": []}"] {
        assert_eq!(ask(&servers[0], protocol, body), 400, "{body:?}");
    }
    // An empty request, and a server that holds no rows for others.
    assert_eq!(ask(&servers[0], protocol, &[0]), 200);
    assert_eq!(ask(&pair.one, protocol, &[0]), 404);
    pair.check(&servers[0]);
}

#[test]
fn impossible_plans_over_hosts_are_rejected_with_the_reason() {
    let store = tempfile::tempdir().unwrap();
    put(store.path(), &tiny()).unwrap();
    let (folder, whole) = (store.path().join("tiny/1"), tables_of(store.path()));
    let packages = || by_rows(&whole[0], &["h0", "h1"]);
    let at: Hosts = vec![("h0".into(), Vec::new()), ("h1".into(), vec!["127.0.0.1:1".into()])];
    let load = |plan: &Path, host: Option<&str>| {
        let host = host.map(str::to_owned);
        let options = PlacementOptions { plan: Some(plan.into()), host, ..PlacementOptions::default() };
        let peers = Peers::open(&PeerOptions { wait_ms: 100, ..PeerOptions::default() }).unwrap();
        let placement = Placement::open(&options)?.beside(Arc::new(peers));
        Snapshot::load(&folder, &placement).map(|snapshot| snapshot.package.tables[0].bytes_here())
    };
    let plan = plan_file(store.path(), &at, vec![packages()]);
    for (host, kind, words) in [
        (None, Kind::Unsupported, "{\"h0\", \"h1\"}, expected one host, or the name of this server's host"),
        (Some("h9"), Kind::Invalid, "this server is host `h9`, expected one of the plan's: [\"h0\", \"h1\"]"),
        (Some("h1"), Kind::Invalid, "table `packages` has rows on host `h0`, of which no server is named"),
        (Some("h0"), Kind::NotReady, "host `h1` does not have the rows tiny/packages"),
    ] {
        let error = load(&plan, host).unwrap_err();
        assert!(error.to_string().contains(words), "{error}: expected `{words}` in it");
        assert_eq!(error.kind(), kind, "{error}");
    }
    // Copies are local to each host: there are no requests between hosts.
    let mut copies = packages();
    copies.sharding = Sharding::DataParallel;
    copies.shards.iter_mut().for_each(|shard| shard.rows = [0, whole[0].rows()]);
    let plan = plan_file(store.path(), &at, vec![copies.clone()]);
    let bytes = whole[0].rows() * whole[0].spec().row_bytes().unwrap() as u64;
    assert_eq!(load(&plan, Some("h1")).unwrap(), bytes);
    // The same if each copy is partitioned within its host.
    let mut cut = copies.clone();
    let rows = whole[0].rows();
    cut.sharding = Sharding::RowWise;
    cut.shards = (copies.shards.iter().enumerate())
        .flat_map(|(copy, shard)| {
            [[0, rows / 2], [rows / 2, rows]].map(|rows| ShardPlan { copy, rows, ..shard.clone() })
        })
        .collect();
    let plan = plan_file(store.path(), &at, vec![cut]);
    assert_eq!(load(&plan, Some("h1")).unwrap(), bytes);
    // The copy of each host may be on its GPU.
    let mut on_cards = copies.clone();
    for (n, shard) in on_cards.shards.iter_mut().enumerate() {
        (shard.tier, shard.device) = (Tier::Hbm, format!("g{n}"));
    }
    let on_two = |table: TablePlan| {
        let path = plan_file(store.path(), &at, vec![table]);
        let mut plan: PlacementPlan = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        for n in 0..2 {
            let (name, host) = (format!("g{n}"), format!("h{n}"));
            let device =
                DevicePlan { device: name, kind: DeviceKind::Gpu, host: Some(host), ..plan.devices[n].clone() };
            plan.devices.push(device);
        }
        std::fs::write(&path, serde_json::to_string(&plan).unwrap()).unwrap();
        path
    };
    assert_eq!(load(&on_two(on_cards.clone()), Some("h1")).unwrap(), bytes);
    let error = load(&on_two(on_cards), None).unwrap_err().to_string();
    assert!(error.contains("the plan has the hosts {\"h0\", \"h1\"}"), "{error}");
    copies.shards.truncate(1);
    let plan = plan_file(store.path(), &at, vec![copies]);
    let error = load(&plan, Some("h1")).unwrap_err().to_string();
    assert!(error.contains("no replica of the table is planned on host `h1`"), "{error}");
    // Partitions over hosts cannot be on a GPU.
    let mut cards = packages();
    cards.shards[1].tier = Tier::Hbm;
    let plan = plan_file(store.path(), &at, vec![cards]);
    assert!(load(&plan, Some("h0")).unwrap_err().to_string().contains("is planned in 2 shards"));
}
