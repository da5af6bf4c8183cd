//! A rolling restart under load: every server, then every router, then the broker, each stopped and restarted at its address
//! while callers retrieve and write. No retrieval fails, and no acknowledged update is lost.
//!
//! Callers follow `docs/guide/operate.md` and `docs/guide/router.md`: a load balancer uses `/readyz`, a refused connection goes
//! to the next router, and an update with answer 503 or 504 is sent again. One caller has no load balancer and relies on refused
//! connections only.

// Prints the number of requests.
#![allow(clippy::print_stdout)]

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::process::Stdio;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterling::publish::{Output, Plan};
use tempfile::TempDir;

use super::{Broker, Stop};
use crate::routed_updates::token;
use crate::support::{Server, agent, ids, put, sterling, until, vectors};

const SHARDS: usize = 2;
const REPLICAS: usize = 2;
const ROUTERS: usize = 2;
/// Number of published items; written items have higher ids.
const COUNT: i64 = 60;
const RETRIEVE: &str = "/v1/models/vectors:retrieve";
const UPSERT: &str = "/v1/models/vectors/items:upsert";
/// Interval between two health checks of the load balancer, far less than the drain time of routers.
const BALANCER_EVERY: Duration = Duration::from_millis(50);

/// Servers of shards that share a stream, and routers over all of them.
struct Fleet {
    store: TempDir,
    broker: Broker,
    servers: Vec<Server>,
    routers: Vec<Server>,
}

impl Fleet {
    fn start() -> Self {
        let (store, broker) = (tempfile::tempdir().unwrap(), Broker::start());
        let lines: String = (0..COUNT)
            .map(|id| format!("{{\"id\": {id}, \"embedding\": [{id}, 1], \"attributes\": {{\"n\": 0}}}}\n"))
            .collect();
        put(store.path(), &Plan { output: Output::shards(SHARDS as u32), ..vectors(store.path(), &lines) }).unwrap();
        let mut fleet = Fleet { store, broker, servers: Vec::new(), routers: Vec::new() };
        for n in 0..SHARDS * REPLICAS {
            let server = fleet.start_server(n, "127.0.0.1:0");
            fleet.servers.push(server);
        }
        for _ in 0..ROUTERS {
            let router = fleet.start_router("127.0.0.1:0");
            fleet.routers.push(router);
        }
        fleet
    }

    fn start_server(&self, n: usize, listen: &str) -> Server {
        let mut command = sterling();
        command.env("STERLING_HTTP__DRAIN_MS", "500").env("STERLING_ENGINE__WORKERS", "1");
        command.args(["serve", "--shard", &(n / REPLICAS).to_string(), "--listen", listen, "--updates"]);
        command.arg(self.broker.url()).arg("--store").arg(self.store.path());
        let server = Server::spawn(&mut command);
        server.wait_ready();
        server
    }

    fn start_router(&self, listen: &str) -> Server {
        let mut command = sterling();
        command.env("STERLING_HTTP__DRAIN_MS", "1500").env("STERLING_ROUTE__REFRESH_MS", "100");
        command.args(["route", "--listen", listen]).stderr(Stdio::null());
        for server in &self.servers {
            command.args(["--server", &server.address]);
        }
        let router = Server::spawn(&mut command);
        router.wait_ready();
        router
    }

    fn restart_server(&mut self, n: usize) {
        let address = end(self.servers.remove(n));
        let server = self.start_server(n, &address);
        self.servers.insert(n, server);
    }

    fn restart_router(&mut self, n: usize) {
        let address = end(self.routers.remove(n));
        let router = self.start_router(&address);
        self.routers.insert(n, router);
    }

    /// Returns whether every router knows all replicas of every shard; an orchestrator waits for that.
    fn is_whole(&self) -> bool {
        self.routers.iter().all(|router| {
            let shards = router.get_json("/v1/models/vectors/shards");
            let shards = shards["shards"].as_array().unwrap();
            shards.len() == SHARDS && shards.iter().all(|shard| shard["servers"] == REPLICAS)
        })
    }
}

/// Ends a process as an orchestrator does, and returns its address.
fn end(server: Server) -> String {
    let address = server.address.clone();
    assert_eq!(server.stop(), Some(0), "it drains and ends well");
    address
}

/// The callers and the results of their calls.
struct Callers {
    addresses: Vec<String>,
    /// Routers that the load balancer sends to.
    ready: Vec<AtomicBool>,
    turn: AtomicU64,
    answered: AtomicU64,
    acknowledged: Mutex<BTreeSet<i64>>,
    /// Last answer to an update.
    last: Mutex<Value>,
    /// Number of repeated updates.
    repeated: AtomicU64,
    failed: Mutex<Vec<String>>,
    ends: AtomicBool,
}

impl Callers {
    fn of(fleet: &Fleet) -> Self {
        Callers {
            addresses: fleet.routers.iter().map(|router| router.address.clone()).collect(),
            ready: fleet.routers.iter().map(|_| AtomicBool::new(true)).collect(),
            turn: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            acknowledged: Mutex::default(),
            last: Mutex::default(),
            repeated: AtomicU64::new(0),
            failed: Mutex::default(),
            ends: AtomicBool::new(false),
        }
    }

    fn go_on(&self) -> bool {
        !self.ends.load(Ordering::Relaxed)
    }

    fn balance(&self) {
        let agent = agent();
        while self.go_on() {
            for (address, ready) in self.addresses.iter().zip(&self.ready) {
                let looked = agent.get(format!("http://{address}/readyz")).call();
                ready.store(looked.is_ok_and(|answer| answer.status() == 200), Ordering::Relaxed);
            }
            sleep(BALANCER_EVERY);
        }
    }

    /// Sends a call to a router over its own connection; if that is refused, to the next one. With a load balancer, uses only
    /// ready routers.
    fn call(&self, is_balanced: bool, path: &str, body: &Value) -> Result<(u16, Value), String> {
        let first = self.turn.fetch_add(1, Ordering::Relaxed) as usize;
        let mut routers: Vec<usize> = (first..first + ROUTERS).map(|n| n % ROUTERS).collect();
        routers.retain(|n| !is_balanced || self.ready[*n].load(Ordering::Relaxed));
        for n in routers {
            match agent().post(format!("http://{}{path}", self.addresses[n])).send(body.to_string()) {
                Err(ureq::Error::Io(error)) if error.kind() == ErrorKind::ConnectionRefused => {}
                Err(error) => return Err(error.to_string()),
                Ok(mut answer) => {
                    let text = answer.body_mut().read_to_string().map_err(|error| error.to_string())?;
                    return Ok((answer.status().as_u16(), serde_json::from_str(&text).unwrap()));
                }
            }
        }
        Err("no router is ready".into())
    }

    /// Retrieves all published items repeatedly, without retries.
    fn retrieve(&self, is_balanced: bool) {
        let body = json!({"vector": [1, 1], "k": COUNT, "filter": "n < 1", "exact": true, "timeout_ms": 20_000});
        while self.go_on() {
            let start = Instant::now();
            match self.call(is_balanced, RETRIEVE, &body) {
                Ok((200, answer)) if answer["coverage"] == 1.0 && ids(&answer).len() == COUNT as usize => {
                    self.answered.fetch_add(1, Ordering::Relaxed);
                }
                other => self.failed.lock().unwrap().push(format!("after {:?}: {other:?}", start.elapsed())),
            }
        }
    }

    /// Puts new items in all shards, one call after the other.
    fn write(&self) {
        for first in (COUNT..).step_by(4) {
            let put = first..first + 4;
            let item = |id| json!({"id": id, "embedding": [id, 2], "attributes": {"n": id}});
            let body = json!({"items": put.clone().map(item).collect::<Vec<Value>>()});
            loop {
                if !self.go_on() {
                    return;
                }
                match self.call(true, UPSERT, &body) {
                    Ok((200, answer)) => {
                        self.acknowledged.lock().unwrap().extend(put);
                        *self.last.lock().unwrap() = answer;
                        break;
                    }
                    Ok((503 | 504, _)) | Err(_) => drop(self.repeated.fetch_add(1, Ordering::Relaxed)),
                    Ok(other) => {
                        self.failed.lock().unwrap().push(format!("an update: {other:?}"));
                        return;
                    }
                }
            }
        }
    }

    fn counts(&self) -> (u64, usize) {
        (self.answered.load(Ordering::Relaxed), self.acknowledged.lock().unwrap().len())
    }

    /// Waits for more answers and acknowledgements, and checks that no call has failed.
    fn are_healthy(&self, fleet: &Fleet, after: &str) {
        let (start, (answered, written)) = (Instant::now(), self.counts());
        loop {
            let failed = self.failed.lock().unwrap();
            assert!(failed.is_empty(), "{after}: {failed:#?}");
            drop(failed);
            let now = self.counts();
            if now.0 > answered + 20 && now.1 > written + 8 && fleet.is_whole() {
                return;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "{after}: {now:?} after {answered} and {written}");
            sleep(Duration::from_millis(20));
        }
    }
}

#[test]
#[ignore = "long: restarts a fleet under load"]
fn a_rolling_restart_of_servers_routers_and_broker_loses_no_request() {
    let mut fleet = Fleet::start();
    let callers = Callers::of(&fleet);
    std::thread::scope(|scope| {
        let _stop = Stop(&callers.ends);
        scope.spawn(|| callers.balance());
        for is_balanced in [true, true, false] {
            let callers = &callers;
            scope.spawn(move || callers.retrieve(is_balanced));
        }
        scope.spawn(|| callers.write());
        callers.are_healthy(&fleet, "before anything");
        for n in 0..SHARDS * REPLICAS {
            fleet.restart_server(n);
            callers.are_healthy(&fleet, &format!("server {n} was restarted"));
        }
        for n in 0..ROUTERS {
            fleet.restart_router(n);
            callers.are_healthy(&fleet, &format!("router {n} was restarted"));
        }
        fleet.broker.kill();
        fleet.broker.restart();
        callers.are_healthy(&fleet, "the broker was restarted");
    });
    let failed = callers.failed.into_inner().unwrap();
    assert!(failed.is_empty(), "{failed:#?}");
    let (acknowledged, last) = (callers.acknowledged.into_inner().unwrap(), callers.last.into_inner().unwrap());
    let written = |server: &Server, position: &str| -> BTreeSet<i64> {
        let body = json!({"vector": [1, 1], "k": 100_000, "filter": "n > 0", "exact": true, "timeout_ms": 20_000});
        ids(&server.ask(&format!("{RETRIEVE}?min_position={position}"), body)).into_iter().collect()
    };
    for router in &fleet.routers {
        let lost: Vec<i64> = acknowledged.difference(&written(router, &token(&last))).copied().collect();
        assert!(lost.is_empty(), "acknowledged and lost: {lost:?}");
    }
    for (shard, replicas) in fleet.servers.chunks(REPLICAS).enumerate() {
        let position = last["positions"][shard].to_string();
        // The last update may have been applied without an answer, and replicas show it one by one.
        until(&format!("replicas of shard {shard} agree"), || {
            let found: Vec<BTreeSet<i64>> = replicas.iter().map(|server| written(server, &position)).collect();
            found.windows(2).all(|pair| pair[0] == pair[1])
        });
    }
    println!(
        "{} retrievals and {} items written, none lost; {} calls of updates sent again",
        callers.answered.load(Ordering::Relaxed),
        acknowledged.len(),
        callers.repeated.load(Ordering::Relaxed)
    );
}
