//! Two routers over three shards of two servers each, as processes, while versions are switched and servers are killed, stopped
//! and restarted. Every answer is of one version and reports its coverage, and none fails while a server of each shard runs.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterling::publish::{Output, Plan};

use crate::route::{route, serve_at};
use crate::support::{Server, agent, put, vectors};

const SHARDS: usize = 3;
const REPLICAS: usize = 2;
/// Ids of the first version are lower, those of the second at least this.
const SECOND: i64 = 100_000;
const COUNT: i64 = 240;
const RETRIEVE: &str = "/v1/models/vectors:retrieve";

/// Counts of all requests so far.
#[derive(Default)]
struct Seen {
    of_version: [AtomicU64; 3],
    mismatches: Mutex<Vec<String>>,
    ends: AtomicBool,
}

impl Seen {
    fn answers(&self) -> u64 {
        self.of_version.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    fn print_figures(&self, what: String) {
        self.mismatches.lock().unwrap_or_else(PoisonError::into_inner).push(what);
    }
}

fn publication(folder: &Path, first: i64) -> Plan {
    let line = |n: i64| {
        let x = ((n * 37) % 101) as f64 * 0.06;
        json!({"id": first + n, "embedding": [x.sin(), x.cos(), (n % 7) as f64 - 3.0, 1], "attributes": {"n": n}})
            .to_string()
    };
    let mut what = vectors(folder, &(0..COUNT).map(line).collect::<Vec<_>>().join("\n"));
    what.recipe.index.lists = 6;
    Plan { output: Output::shards(SHARDS as u32), ..what }
}

/// Sends requests in a loop, and compares each answer with its version.
fn ask(address: &str, seen: &Seen) {
    // Requests for the complete version, so that missing items are detected; some by codes, some reranked in two rounds.
    let bodies = [
        json!({"vector": [0.3, 0.5, 0.1, 1], "k": COUNT, "probes": 6, "timeout_ms": 20_000}),
        json!({"vector": [0.3, -0.5, 0.1, 1], "k": COUNT, "exact": true, "columns": ["n"], "timeout_ms": 20_000}),
        json!({"vector": [0.3, 0.5, 0.1, 1], "k": 20, "probes": 6, "timeout_ms": 20_000}),
    ];
    let agent = agent();
    for body in bodies.iter().cycle().take_while(|_| !seen.ends.load(Ordering::Relaxed)) {
        let start = Instant::now();
        let requested = agent.post(format!("http://{address}{RETRIEVE}")).send(body.to_string());
        let mut response = match requested {
            Ok(response) => response,
            Err(error) => {
                seen.print_figures(format!("a router does not answer: {error}"));
                continue;
            }
        };
        let status = response.status().as_u16();
        let answer: Value = serde_json::from_str(&response.body_mut().read_to_string().unwrap()).unwrap();
        if status != 200 {
            seen.print_figures(format!("lost after {:?}: {status} {answer}", start.elapsed()));
            continue;
        }
        let version = answer["version"].as_u64().unwrap();
        let ids: Vec<i64> =
            answer["items"].as_array().unwrap().iter().map(|item| item["id"].as_i64().unwrap()).collect();
        let is_of_it = |id: &i64| (*id >= SECOND) == (version == 2);
        let expected = body["k"].as_u64().unwrap() as usize;
        if answer["coverage"] != 1.0 || ids.len() != expected || !ids.iter().all(is_of_it) {
            seen.print_figures(format!(
                "version {version}, {} items of {expected}, coverage {}: {ids:?}",
                ids.len(),
                answer["coverage"]
            ));
        }
        seen.of_version[version as usize].fetch_add(1, Ordering::Relaxed);
    }
}

fn until(what: &str, seen: &Seen, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        let mismatches = seen.mismatches.lock().unwrap();
        assert!(start.elapsed() < Duration::from_secs(90), "never: {what}; {mismatches:#?}");
        drop(mismatches);
        std::thread::sleep(Duration::from_millis(25));
    }
}

/// The servers, each at a fixed address.
struct Fleet<'a> {
    folder: &'a Path,
    addresses: Vec<String>,
    servers: Vec<Option<Server>>,
    stopped: Option<usize>,
    active: u64,
}

impl Fleet<'_> {
    fn shard(n: usize) -> String {
        (n / REPLICAS).to_string()
    }

    fn living(&self) -> impl Iterator<Item = &Server> {
        self.servers
            .iter()
            .enumerate()
            .filter(|(n, _)| self.stopped != Some(*n))
            .filter_map(|(_, server)| server.as_ref())
    }

    /// Loads both versions and activates the right one.
    fn settle(&self, server: &Server) {
        for version in [1, 2] {
            let (status, reported) = server.post(&format!("/v1/models/vectors/versions/{version}:load"), "");
            assert_eq!(status, 200, "{reported}");
        }
        let (status, reported) = server.post(&format!("/v1/models/vectors/versions/{}:activate", self.active), "");
        assert_eq!(status, 200, "{reported}");
    }

    /// Activates the other version at every running server.
    fn flip(&mut self) {
        self.active = 3 - self.active;
        for server in self.living() {
            let (status, reported) = server.post(&format!("/v1/models/vectors/versions/{}:activate", self.active), "");
            assert_eq!(status, 200, "{reported}");
        }
    }

    fn strike(&mut self, n: usize, how: &str) {
        let server = self.servers[n].as_mut().unwrap();
        assert!(server.is_running(), "the target process runs");
        server.signal(how);
        match how {
            "STOP" => self.stopped = Some(n),
            _ => {
                let ended = self.servers[n].take().unwrap().wait();
                assert!(how == "TERM" || ended.is_none(), "killed, and not ended: {ended:?}");
            }
        }
    }

    fn mend(&mut self, n: usize) {
        if self.stopped.take().is_some() {
            self.servers[n].as_ref().unwrap().signal("CONT");
        } else {
            self.servers[n] = Some(serve_at(self.folder, &Self::shard(n), &self.addresses[n]));
        }
        self.settle(self.servers[n].as_ref().unwrap());
    }
}

fn metric(router: &Server, name: &str) -> f64 {
    let text = router.get("/metrics").1;
    let values = text
        .lines()
        .filter(|line| line.starts_with(name))
        .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    values.sum()
}

fn flip_and_strike(rounds: usize) {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(put(folder.path(), &publication(folder.path(), 0)).unwrap(), 1);
    assert_eq!(put(folder.path(), &publication(folder.path(), SECOND)).unwrap(), 2);
    let start = |n: usize| serve_at(folder.path(), &Fleet::shard(n), "127.0.0.1:0");
    let servers: Vec<Server> = (0..SHARDS * REPLICAS).map(start).collect();
    let addresses: Vec<String> = servers.iter().map(|server| server.address.clone()).collect();
    let servers = servers.into_iter().map(Some).collect();
    let mut fleet = Fleet { folder: folder.path(), addresses, servers, stopped: None, active: 2 };
    fleet.living().for_each(|server| fleet.settle(server));
    let routers: Vec<Server> = (0..2).map(|_| route(fleet.addresses.iter().map(String::as_str))).collect();
    let seen = Seen::default();
    let mut strikes: BTreeMap<&str, usize> = BTreeMap::new();
    std::thread::scope(|scope| {
        for router in routers.iter().chain(&routers) {
            scope.spawn(|| ask(&router.address, &seen));
        }
        // The clients have sent requests before the first fault.
        until("answers", &seen, || seen.answers() > 40);
        for round in 0..rounds {
            let how = ["KILL", "STOP", "TERM"][round % 3];
            // Each server in turn, and never two of one shard at once.
            let struck = (round * 5) % (SHARDS * REPLICAS);
            fleet.strike(struck, how);
            *strikes.entry(how).or_default() += 1;
            let before = seen.answers();
            until("answers with a server less", &seen, || seen.answers() > before + 8);
            fleet.flip();
            let active = fleet.active as usize;
            for router in &routers {
                until("the other version", &seen, || {
                    router.post(RETRIEVE, json!({"vector": [1, 0, 0, 0], "k": 1, "timeout_ms": 20_000})).1["version"]
                        == active
                });
            }
            fleet.mend(struck);
            routers.iter().for_each(|router| router.wait_for_polls("servers"));
            let mismatches = seen.mismatches.lock().unwrap();
            assert!(mismatches.is_empty(), "round {round}, {how} of server {struck}: {mismatches:#?}");
        }
        seen.ends.store(true, Ordering::Relaxed);
    });
    let mismatches = seen.mismatches.lock().unwrap();
    assert!(mismatches.is_empty(), "{mismatches:#?}");
    let second: f64 = routers.iter().map(|router| metric(router, "sterling_route_second_calls_total")).sum();
    assert!(second > 0.0, "servers were struck, and no other server was queried instead");
    let _ = writeln!(
        std::io::stderr(),
        "{rounds} flips, {strikes:?}: {:?} answers of the versions, all whole; {second} calls to a second server",
        [1, 2].map(|version: usize| seen.of_version[version].load(Ordering::Relaxed))
    );
}

#[test]
#[ignore = "long: kills servers again and again"]
fn every_answer_is_of_one_version_while_versions_flip_and_servers_are_killed_and_stopped() {
    // Two hundred rounds, with network partitions: `scripts/chaos_shards.py`.
    flip_and_strike(6);
}
