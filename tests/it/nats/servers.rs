//! Servers that share a stream, as processes.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Broker, Stop, ask};
use crate::network::Wire;
use crate::support::{Server, agent, ids, put, sterling, until, vectors};

/// Returns a new store with thirty items.
fn published() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let lines: String = (0..30)
        .map(|id| format!("{{\"id\": {id}, \"embedding\": [{id}, 1], \"attributes\": {{\"n\": 0}}}}\n"))
        .collect();
    put(&folder.path().join("store"), &vectors(folder.path(), &lines)).unwrap();
    folder
}

fn serve(folder: &tempfile::TempDir, broker: &str) -> Server {
    Server::start_with(&folder.path().join("store"), &["--updates", broker])
}

#[test]
fn servers_of_one_stream_answer_alike_also_when_one_was_killed() {
    let broker = Broker::start();
    let folders = [(); 2].map(|()| published());
    let mut servers: Vec<Server> = folders.iter().map(|folder| serve(folder, &broker.url())).collect();
    let upsert = |server: &Server, n: i64| {
        let items = json!([{"id": 100 + n, "embedding": [n, 2], "attributes": {"n": n}}, {"id": n, "set": {"n": n}}]);
        server.ask("/v1/models/vectors/items:upsert", json!({"items": items}))["position"].as_u64().unwrap()
    };
    let found = |server: &Server, position: u64| {
        let path = format!("/v1/models/vectors:retrieve?min_position={position}");
        let answer = server.ask(&path, json!({"vector": [1, 3], "k": 100, "columns": ["n"], "filter": "n > 0"}));
        (ids(&answer), answer["position"].as_u64().unwrap())
    };
    let mut position = 0;
    for n in 1..10 {
        position = upsert(&servers[n as usize % 2], n);
        assert_eq!(position, 2 * n as u64);
        // Updates that one server acknowledged are read from the other.
        let answers: Vec<_> = servers.iter().map(|server| found(server, position)).collect();
        assert_eq!(answers[0], answers[1]);
        assert_eq!(answers[0].0.len(), 2 * n as usize);
    }
    let killed = servers.remove(0);
    killed.signal("KILL");
    killed.wait();
    position = upsert(&servers[0], 10).max(position);
    servers.insert(0, serve(&folders[0], &broker.url()));
    assert_eq!(found(&servers[0], position), found(&servers[1], position));
    // A merge on one server does not affect the others.
    let merged = servers[0].ask("/v1/models/vectors/items:merge", json!({}));
    assert_eq!(merged["position"].as_u64(), Some(position));
    position = upsert(&servers[1], 11);
    assert_eq!(found(&servers[0], position), found(&servers[1], position));
}

#[test]
fn calls_see_updates_acknowledged_by_another_server() {
    let broker = Broker::start();
    let folders = [(); 2].map(|()| published());
    let servers: Vec<Server> = folders.iter().map(|folder| serve(folder, &broker.url())).collect();
    let call = |server: usize, verb: &str, body: Value| {
        let answer = servers[server].ask(&format!("/v1/models/vectors/items:{verb}"), body);
        answer["position"].as_u64().unwrap()
    };
    let mut position = 0;
    for id in 100..140 {
        let (one, other) = (id as usize % 2, (id as usize + 1) % 2);
        call(one, "upsert", json!({"items": [{"id": id, "embedding": [1, 1], "attributes": {"n": 1}}]}));
        call(other, "upsert", json!({"items": [{"id": id, "set": {"n": id}}]}));
        position = if id % 4 < 2 {
            call(one, "delete", json!({"ids": [id]}))
        } else {
            call(other, "upsert", json!({"items": [{"id": id + 1000, "set": {"n": 7}}]}))
        };
    }
    for server in &servers {
        let path = format!("/v1/models/vectors:retrieve?min_position={position}");
        let body = json!({"vector": [0, 1], "k": 100, "columns": ["n"], "filter": "n >= 100", "exact": true});
        let answer = server.ask(&path, body);
        let found: Vec<(i64, i64)> = answer["items"]
            .as_array()
            .unwrap()
            .iter()
            .map(|item| (item["id"].as_i64().unwrap(), item["columns"]["n"].as_i64().unwrap()))
            .collect();
        let expected: Vec<(i64, i64)> = (100..140).filter(|id| id % 4 >= 2).map(|id| (id, id)).collect();
        assert_eq!(found, expected);
    }
}

/// Servers that receive writes while they, their broker and the network between them fail.
struct Cluster {
    broker: Broker,
    wire: Wire,
    folders: [tempfile::TempDir; 2],
    servers: Vec<Server>,
}

/// Progress of writers: ids of acknowledged items, of those that may exist, and the address of each server.
struct WriteProgress {
    acknowledged: [Mutex<BTreeSet<i64>>; 2],
    perhaps: Mutex<BTreeSet<i64>>,
    addresses: [Mutex<String>; 2],
}

impl Cluster {
    fn start() -> Self {
        let broker = Broker::start();
        let wire = broker.behind_a_wire();
        let folders = [(); 2].map(|()| published());
        let servers = vec![serve(&folders[0], &wire.url()), serve(&folders[1], &broker.url())];
        Cluster { broker, wire, folders, servers }
    }

    fn kill_server(&mut self, n: usize, written: &WriteProgress) {
        let killed = self.servers.remove(n);
        killed.signal("KILL");
        killed.wait();
        let broker = if n == 0 { self.wire.url() } else { self.broker.url() };
        self.servers.insert(n, serve(&self.folders[n], &broker));
        *written.addresses[n].lock().unwrap() = self.servers[n].address.clone();
    }

    fn fail(&mut self, fault: usize, written: &WriteProgress) {
        match fault % 5 {
            0 => self.kill_server(0, written),
            1 => {
                self.broker.kill();
                sleep(Duration::from_millis(200));
                self.broker.restart();
            }
            2 => {
                self.wire.cut();
                sleep(Duration::from_millis(700));
                self.wire.mend();
            }
            3 => self.kill_server(1, written),
            _ => {
                self.wire.swallow();
                sleep(Duration::from_millis(1500));
                self.wire.mend();
            }
        }
    }
}

/// Puts one new item after the other at a server, at its current address.
fn write(server: usize, written: &WriteProgress, is_over: &AtomicBool) {
    for n in 1.. {
        if is_over.load(Ordering::Relaxed) {
            return;
        }
        let id = n * 2 + server as i64 + 100;
        let url = format!("http://{}/v1/models/vectors/items:upsert", written.addresses[server].lock().unwrap());
        let body = json!({"items": [{"id": id, "embedding": [id, 3], "attributes": {"n": id}}]}).to_string();
        let reported = agent().post(url).header("content-type", "application/json").send(body);
        match reported.map(|answer| answer.status().as_u16()) {
            Ok(200) => drop(written.acknowledged[server].lock().unwrap().insert(id)),
            Ok(500..) | Err(_) => {
                written.perhaps.lock().unwrap().insert(id);
                sleep(Duration::from_millis(20));
            }
            Ok(status) => panic!("{status}"),
        }
    }
}

#[test]
#[ignore = "long: kills servers and brokers again and again"]
fn nothing_is_lost_or_twice_when_servers_and_brokers_are_killed_and_networks_are_cut() {
    let faults: usize = std::env::var("STERLING_TEST_STREAM_FAULTS").map_or(5, |faults| faults.parse().unwrap());
    let mut cluster = Cluster::start();
    let addresses = [0, 1].map(|n| Mutex::new(cluster.servers[n].address.clone()));
    let written = WriteProgress { acknowledged: Default::default(), perhaps: Default::default(), addresses };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (written, is_over) = (&written, &is_over);
        let writers = [0, 1].map(|server| scope.spawn(move || write(server, written, is_over)));
        let _stop = Stop(is_over);
        let counts = || [0, 1].map(|n| written.acknowledged[n].lock().unwrap().len());
        for fault in 0..=faults {
            // Both were writing at that moment.
            let (before, start) = (counts(), Instant::now());
            while counts().iter().zip(before).any(|(now, before)| *now < before + 3) {
                assert!(
                    start.elapsed() < Duration::from_secs(60),
                    "nothing is acknowledged: {before:?} {:?}",
                    counts()
                );
                assert!(writers.iter().all(|writer| !writer.is_finished()));
                sleep(Duration::from_millis(5));
            }
            if fault < faults {
                cluster.fail(fault, written);
            }
        }
    });
    let position = "/v1/models/vectors/items:position";
    let durable = cluster.servers.iter().map(|server| server.get_json(position)["durable"].as_u64().unwrap()).max();
    let durable = durable.unwrap();
    let acknowledged: BTreeSet<i64> = written.acknowledged.iter().flat_map(|ids| ids.lock().unwrap().clone()).collect();
    let perhaps = written.perhaps.into_inner().unwrap();
    for server in &cluster.servers {
        let path = format!("/v1/models/vectors:retrieve?min_position={durable}");
        let answer = server.ask(&path, json!({"vector": [1, 1], "k": 100_000, "filter": "n > 0", "exact": true}));
        let there: BTreeSet<i64> = ids(&answer).into_iter().collect();
        let lost: Vec<&i64> = acknowledged.difference(&there).collect();
        assert!(lost.is_empty(), "acknowledged and missing: {lost:?}");
        assert!(there.iter().all(|id| acknowledged.contains(id) || perhaps.contains(id)));
        // Each update puts another item: equal counts show that none was applied twice.
        assert_eq!((answer["position"].as_u64(), there.len() as u64), (Some(durable), durable));
    }
}

#[test]
fn a_server_that_is_cut_off_warns_and_one_that_has_missed_updates_is_not_ready() {
    let broker = Broker::start();
    let wire = broker.behind_a_wire();
    let folders = [(); 2].map(|()| published());
    let (cut_off, other) = (serve(&folders[0], &wire.url()), serve(&folders[1], &broker.url()));
    let upsert = |n: i64| {
        let items = json!({"items": [{"id": 100 + n, "embedding": [n, 2], "attributes": {"n": n}}]});
        other.ask("/v1/models/vectors/items:upsert", items)["position"].as_u64().unwrap()
    };
    let first = upsert(1);
    let seen = cut_off.get_json(&format!("/v1/models/vectors/items:position?min_position={first}"));
    assert_eq!(seen["position"], first);
    wire.cut();
    until("it warns", || {
        let (status, said) = cut_off.get("/readyz");
        assert_eq!(status, 200, "{said}");
        said.contains("warning: ") && said.contains("stream `sterling-vectors` has not answered for")
    });
    for n in 2..30 {
        upsert(n);
    }
    assert!(ask(broker.port, "$JS.API.STREAM.PURGE.sterling-vectors", "{\"seq\": 20}").is_some());
    wire.mend();
    until("it says what it has missed", || {
        let (status, said) = cut_off.get("/readyz");
        status == 503 && said.contains("applies no more updates") && said.contains("the stream has messages 20 to 30")
    });
    // Its answers stay the same.
    let answer = cut_off.ask("/v1/models/vectors:retrieve", json!({"vector": [1, 1], "k": 100, "filter": "n > 0"}));
    assert_eq!((ids(&answer), &answer["position"]), (vec![101], &Value::from(first)));
    let (status, refused) = cut_off.post("/v1/models/vectors/items:delete", json!({"ids": [1]}));
    assert_eq!(status, 500, "{refused}");
    // It does not restart from a position that the stream has deleted either.
    drop(cut_off);
    let mut command = sterling();
    command.args(["serve", "--listen", "127.0.0.1:0", "--updates", &broker.url(), "--store"]);
    let again = Server::spawn(command.arg(folders[0].path().join("store")));
    until("it says why it does not", || {
        let (status, said) = again.get("/readyz");
        status == 503 && said.contains("position 1 was released, the stream begins at 19")
    });
    assert_eq!(upsert(30), 30, "the other one goes on");
}
