//! Outages as an operator sees them: `/readyz`, `sterling doctor`, a metric, and the alert on it. None is silent, and none is
//! "ok".
//!
//! `tests/deploy/alerts_test.yml` tests that the alerts fire. `docs/guide/runbook.md` has the table for operators; it is compared
//! with this one.

// Prints the number of outages.
#![allow(clippy::print_stdout)]

use std::any::Any;
use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterling::publish::{Output, Plan};

use crate::network::Wire;
use crate::route::{route, route_polling_every, serve_at, serve_shard};
use crate::support::{Server, agent, catalogue, put, renamed, root, run, sterling, text, until, vectors};
use crate::{hosts, remote, remote_faults};

const RETRIEVE: &str = "/v1/models/vectors:retrieve";

static ALERTS: LazyLock<String> = LazyLock::new(|| text(root().join("deploy/alerts.yml")));
static FIRED: LazyLock<String> = LazyLock::new(|| text(root().join("tests/deploy/alerts_test.yml")));

/// An outage and its expected symptoms.
struct Outage {
    /// Name in `docs/guide/runbook.md`.
    name: &'static str,
    begin: fn() -> Scene,
    /// Status of `/readyz`.
    status: u16,
    /// Expected text of `/readyz` and doctor.
    said: &'static str,
    /// Metrics that show it in Prometheus.
    metrics: &'static [Shown],
}

/// A metric with its labels, its expected values during the outage, and its alert.
type Shown = (&'static str, fn(f64) -> bool, &'static str);

const OUTAGES: &[Outage] = &[
    Outage {
        name: "shard down",
        begin: shard_gone,
        status: 503,
        said: "shard 1 of 2",
        metrics: &[
            ("sterling_route_coverage_ratio{model=\"vectors\"}", is_below_one, "SterlingShardIsLost"),
            ("sterling_failed_total{call=\"retrieve\",reason=\"partial\"}", is_some, "SterlingAnswersFail"),
            ("sterling_route_servers{state=\"silent\"}", is_some, "SterlingServersAreLeftOut"),
        ],
    },
    Outage {
        name: "model down, others answer",
        begin: model_gone,
        status: 200,
        said: "requests fail: shard 0 of 1",
        metrics: &[("sterling_route_coverage_ratio{model=\"other\"}", is_zero, "SterlingShardIsLost")],
    },
    Outage {
        name: "replica slow",
        begin: replica_slow,
        status: 200,
        said: "times slower than other servers of the same shard",
        metrics: &[("sterling_route_servers{state=\"slow\"}", is_some, "SterlingServersAreLeftOut")],
    },
    Outage {
        name: "Redis node down",
        begin: redis_node_down,
        status: 200,
        said: "does not answer: ",
        metrics: &[("sterling_remote_nodes{state=\"silent\"}", is_some, "SterlingServersAreLeftOut")],
    },
    Outage {
        name: "Redis node empty",
        begin: redis_node_empty,
        status: 200,
        said: "restores lost rows",
        metrics: &[(
            "sterling_remote_unreadable_ratio{remote_table=\"tiny/packages\"}",
            is_some,
            "SterlingRemoteRowsAreUnreadable",
        )],
    },
    Outage {
        name: "peer host down",
        begin: peer_host_gone,
        status: 200,
        said: "returns no rows: ",
        metrics: &[
            ("sterling_peer_servers{host=\"h1\",state=\"ready\"}", is_zero, "SterlingHostIsLost"),
            ("sterling_peer_servers{host=\"h1\",state=\"silent\"}", is_some, "SterlingServersAreLeftOut"),
            ("sterling_degraded_rows_total{table=\"packages\"}", is_some, "SterlingRowsAreMissing"),
        ],
    },
    Outage {
        name: "store unavailable",
        begin: store_gone,
        status: 200,
        said: "the store's folder cannot be read",
        metrics: &[("sterling_store_available", is_zero, "SterlingStoreIsAway")],
    },
    #[cfg(feature = "nats")]
    Outage {
        name: "broker down",
        begin: broker_gone,
        status: 200,
        said: "has not answered for",
        metrics: &[("sterling_journal_available{model=\"vectors\"}", is_zero, "SterlingJournalIsInTrouble")],
    },
    Outage {
        name: "disk full",
        begin: disk_full,
        status: 200,
        said: "requests of the last two minutes failed: insufficient_storage",
        metrics: &[(
            "sterling_failed_total{call=\"upsert\",reason=\"insufficient_storage\"}",
            is_some,
            "SterlingAnswersFail",
        )],
    },
    Outage {
        name: "version rejected",
        begin: version_rejected,
        status: 200,
        said: "version 2 was rejected (corrupt), version 1 answers",
        metrics: &[("sterling_loads_total{model=\"vectors\",outcome=\"refused\"}", is_some, "SterlingLoadsFail")],
    },
    Outage {
        name: "canary failing",
        begin: canary_failing,
        status: 200,
        said: "its canary was rolled back",
        metrics: &[(
            "sterling_canary_rollbacks_total{model=\"vectors\",outcome=\"errors\"}",
            is_some,
            "SterlingCanaryWasRolledBack",
        )],
    },
    Outage {
        name: "overload",
        begin: overload,
        status: 200,
        said: "requests of the last two minutes failed: overloaded",
        metrics: &[("sterling_failed_total{call=\"retrieve\",reason=\"overloaded\"}", is_some, "SterlingAnswersFail")],
    },
    #[cfg(feature = "tls")]
    Outage {
        name: "certificate expired",
        begin: certificate_expired,
        status: 200,
        said: "the certificate of this server expired",
        metrics: &[("sterling_certificate_life_ratio", is_negative, "SterlingCertificateExpires")],
    },
    #[cfg(target_os = "linux")]
    Outage {
        name: "clock jump",
        begin: clock_jump,
        status: 200,
        said: "the clock of this machine was set forward by 3600 s",
        metrics: &[("sterling_clock_jumps_total{direction=\"forward\"}", is_some, "SterlingClockWasSet")],
    },
];

fn is_some(value: f64) -> bool {
    value > 0.0
}

fn is_zero(value: f64) -> bool {
    value == 0.0
}

fn is_below_one(value: f64) -> bool {
    value < 1.0
}

#[cfg(feature = "tls")]
fn is_negative(value: f64) -> bool {
    value < 0.0
}

/// A running outage.
struct Scene {
    /// Server under observation.
    at: Server,
    get: fn(&Server, &str) -> (u16, String),
    /// Option for the server's address in doctor, and its text if that differs from `/readyz`.
    kind: &'static str,
    named: Vec<String>,
    diagnosis: Option<&'static str>,
    /// Calls during the outage.
    stir: Box<dyn Fn(&Server)>,
    /// Checks after all symptoms were seen.
    after: Box<dyn FnOnce(&Server)>,
    /// Values that live as long as the outage.
    _kept: Box<dyn Any>,
}

impl Scene {
    fn new(kind: &'static str, at: Server, retained: impl Any) -> Self {
        Scene {
            named: vec![at.address.clone()],
            at,
            get: Server::get,
            kind,
            diagnosis: None,
            stir: Box::new(|_| ()),
            after: Box::new(|_| ()),
            _kept: Box::new(retained),
        }
    }

    fn stirred(self, stir: impl Fn(&Server) + 'static) -> Self {
        Scene { stir: Box::new(stir), ..self }
    }

    fn then(self, after: impl FnOnce(&Server) + 'static) -> Self {
        Scene { after: Box::new(after), ..self }
    }

    fn check(self, outage: &Outage) {
        let Outage { name, status: expected, said, metrics, .. } = outage;
        let start = Instant::now();
        loop {
            (self.stir)(&self.at);
            let (status, text) = (self.get)(&self.at, "/readyz");
            if status == *expected && text.contains(said) {
                break;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "{name}: `/readyz` says {status} {text}");
            std::thread::sleep(Duration::from_millis(20));
        }
        let mut doctor = vec!["doctor", self.kind];
        doctor.extend(self.named.iter().map(String::as_str));
        let (code, out, _) = run(&doctor);
        let diagnosis = self.diagnosis.unwrap_or(said);
        assert!(code != 0 && out.to_lowercase().contains(&diagnosis.to_lowercase()), "{name}: {out}");
        for (metric, is_bad, alert) in *metrics {
            until(&format!("{name}: {metric}"), || {
                (self.stir)(&self.at);
                self.value(metric).is_some_and(is_bad)
            });
            let family = metric.split('{').next().unwrap();
            assert!(expression(alert).contains(family), "{name}: {alert} does not look at {family}");
            assert!(FIRED.contains(&format!("alertname=\"{alert}\"")), "{name}: no test fires {alert}");
        }
        (self.after)(&self.at);
    }

    fn value(&self, metric: &str) -> Option<f64> {
        let metrics = (self.get)(&self.at, "/metrics").1;
        metrics.lines().find_map(|line| line.strip_prefix(metric)?.trim().parse().ok())
    }
}

/// Returns the expression of an alert.
fn expression(alert: &str) -> &'static str {
    let rule = ALERTS.split("- alert: ").find(|rule| rule.starts_with(&format!("{alert}\n")));
    let rule = rule.unwrap_or_else(|| panic!("no alert {alert}"));
    rule.split_once("expr:").unwrap().1.split("labels:").next().unwrap()
}

#[test]
#[ignore = "long: table of outages"]
fn every_outage_is_shown_by_readyz_doctor_a_metric_and_an_alert() {
    let only = std::env::var("STERLING_TEST_OUTAGE").unwrap_or_default();
    for outage in OUTAGES.iter().filter(|outage| outage.name.contains(&only)) {
        println!("{}", outage.name);
        (outage.begin)().check(outage);
    }
    println!("{} outages", OUTAGES.len());
}

#[test]
fn the_runbook_has_a_line_for_each_outage() {
    let page = text(root().join("docs/guide/runbook.md"));
    let table = page.split("## Outages and how they show").nth(1).unwrap().split("\n## ").next().unwrap();
    let lines: Vec<&str> = table.lines().filter(|line| line.starts_with("| ")).skip(1).collect();
    for Outage { name, said, metrics, .. } in OUTAGES {
        let line = lines.iter().find(|line| line.starts_with(&format!("| {name} | ")));
        let line = line.unwrap_or_else(|| panic!("no line of `{name}`"));
        let cells: Vec<&str> = line.split(" | ").collect();
        let [_, says, shown, alerts, advice] = cells.as_slice() else { panic!("{line}") };
        assert!(says.contains(&format!("`{}`", said.trim_end_matches([':', ' ']))), "{name}: {says}");
        for (metric, _, alert) in *metrics {
            let family = metric.split('{').next().unwrap();
            assert!(shown.contains(&format!("`{family}")), "{name}: {shown} lacks {family}");
            assert!(
                alerts.contains(&format!("[{alert}](#{})", alert.to_lowercase())),
                "{name}: {alerts} lacks {alert}"
            );
        }
        assert!(advice.trim_end_matches(" |").len() > 10, "{name}: {advice}");
    }
    if cfg!(all(feature = "nats", feature = "tls", target_os = "linux")) {
        assert_eq!(lines.len(), OUTAGES.len(), "{lines:#?}");
    }
}

fn body(k: usize) -> Value {
    json!({"vector": [1, 0], "k": k, "timeout_ms": 5000})
}

/// Checks that requests are still answered.
fn answers(server: &Server) {
    assert_eq!(server.post(RETRIEVE, body(1)).0, 200);
}

/// Returns a store of a catalogue in two shards, with one server each.
fn two_shards() -> (tempfile::TempDir, [Server; 2]) {
    let store = tempfile::tempdir().unwrap();
    let lines: String = (0..60).map(|n| format!("{{\"id\": {n}, \"embedding\": [1, {n}]}}\n")).collect();
    put(store.path(), &Plan { output: Output::shards(2), ..vectors(store.path(), &lines) }).unwrap();
    let servers = [0, 1].map(|shard| serve_shard(store.path(), shard));
    (store, servers)
}

fn kill(server: Server) {
    server.signal("KILL");
    server.wait();
}

fn shard_gone() -> Scene {
    let (store, [first, second]) = two_shards();
    let router = route([first.address.as_str(), &second.address]);
    router.ask(RETRIEVE, body(5));
    let (address, folder) = (second.address.clone(), store.path().to_owned());
    kill(second);
    Scene::new("--router", router, (first, store))
        .stirred(|router| assert_eq!(router.post(RETRIEVE, body(5)).0, 503))
        .then(move |router| {
            let _second = serve_at(&folder, "1", &address);
            until("all is well again", || router.get("/readyz").0 == 200);
        })
}

fn model_gone() -> Scene {
    let (store, [first, second]) = two_shards();
    let other = tempfile::tempdir().unwrap();
    let what = vectors(other.path(), "{\"id\": 1, \"embedding\": [1, 0]}\n");
    put(other.path(), &renamed(what, "other")).unwrap();
    let third = Server::start(other.path());
    let router = route([&first, &second, &third].map(|server| server.address.as_str()));
    until("both answer", || {
        let models = router.get_json("/v1/models");
        models["models"].as_array().is_some_and(|models| models.len() == 2)
    });
    kill(third);
    Scene::new("--router", router, (first, second, store)).then(|router| {
        assert!(router.get("/readyz").1.contains("model `other`: requests fail: shard 0 of 1"));
        let (status, problem) = router.post("/v1/models/other:retrieve", body(1));
        assert_eq!((status, &problem["code"]), (503, &json!("unavailable")), "it is lost, not deleted: {problem}");
        assert_eq!(router.get_json("/v1/models")["unavailable"][0]["name"], "other");
        assert_eq!(router.post(RETRIEVE, body(5)).0, 200);
    })
}

fn replica_slow() -> Scene {
    let store = catalogue(200, 3);
    let servers = [(); 2].map(|()| Server::start(store.path()));
    let wire = Wire::to(servers[1].address.rsplit(':').next().unwrap().parse().unwrap());
    let router = route_polling_every(500, [servers[0].address.as_str(), &wire.address()]);
    let known = || router.get("/v1/models/vectors/shards").1.contains("\"servers\":2");
    until("both are known", known);
    // Answer times are measured before one of them becomes slow.
    (0..100).for_each(|_| drop(router.ask(RETRIEVE, body(5))));
    wire.delay(Duration::from_millis(150));
    Scene::new("--router", router, (servers, wire, store)).stirred(|router| {
        // The slow one receives requests too while the other is busy.
        std::thread::scope(|scope| {
            (0..4).for_each(|_| drop(scope.spawn(|| (0..5).for_each(|_| drop(router.ask(RETRIEVE, body(5)))))));
        });
    })
}

fn redis_node_down() -> Scene {
    remote_scene("a primary that hangs").stirred(|server| {
        let (status, answer) = server.post(TINY, remote_faults::request("fail"));
        assert_eq!(status, 200, "the replica has the rows: {answer}");
    })
}

fn redis_node_empty() -> Scene {
    remote_scene("a shard that comes back empty")
        .stirred(|server| drop(server.post(TINY, remote_faults::request("default_rows"))))
}

const TINY: &str = "/v1/models/tiny:retrieve";

/// Starts a server whose rows lie in a cluster with a fault.
fn remote_scene(fault: &str) -> Scene {
    let alone = remote::alone();
    let remote_faults::Bed { server, redis, store, stranger, .. } = remote_faults::faulty_cluster(fault);
    Scene::new("--server", server, (redis, stranger, store, alone))
}

fn peer_host_gone() -> Scene {
    let pair = hosts::Pair::new();
    let (near, away) = (pair.spawn(0, 0), [pair.spawn(1, 0), pair.spawn(1, 1)]);
    near.wait_ready();
    away.iter().for_each(Server::wait_ready);
    pair.check(&near);
    away.into_iter().for_each(kill);
    let [split, close] = hosts::split_and_near("default_rows");
    Scene::new("--server", near, pair)
        .stirred(move |near| drop(near.ask(TINY, &split)))
        .then(move |near| assert_eq!(near.ask(TINY, close).get("degraded_rows"), None))
}

fn store_gone() -> Scene {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    std::fs::create_dir(&store).unwrap();
    put(&store, &vectors(folder.path(), "{\"id\": 7, \"embedding\": [1, 0]}\n")).unwrap();
    let mut command = sterling();
    command.env("STERLING_HTTP__DRAIN_MS", "0").env("STERLING_REFRESH_MS", "100");
    let server = Server::spawn(command.args(["serve", "--listen", "127.0.0.1:0", "--store"]).arg(&store));
    server.wait_ready();
    std::fs::rename(&store, folder.path().join("away")).unwrap();
    Scene::new("--server", server, folder).then(answers)
}

#[cfg(feature = "nats")]
fn broker_gone() -> Scene {
    use crate::nats::faults::World;

    let World { server, mut broker, wire, folder, .. } = World::start();
    broker.kill();
    Scene::new("--server", server, (broker, wire, folder)).then(answers)
}

fn disk_full() -> Scene {
    let folder = tempfile::tempdir().unwrap();
    put(folder.path(), &vectors(folder.path(), "{\"id\": 7, \"embedding\": [1, 0], \"attributes\": {\"n\": 1}}\n"))
        .unwrap();
    // Limits the size of files that the server writes. The limit needs no privileges, and is reported like a full disk.
    let mut command = Command::new("sh");
    let script = "trap '' XFSZ; ulimit -f 96; exec \"$@\"";
    command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_sterling"), "serve", "--listen", "127.0.0.1:0", "--updates"]);
    command.arg(folder.path().join("updates")).arg("--store").arg(folder.path()).env_remove("STERLING_LOG");
    let server = Server::spawn(command.env("STERLING_MERGE__SHARE", "0"));
    server.wait_ready();
    let items: Vec<_> = (0..500).map(|id| json!({"id": id, "embedding": [1, id], "attributes": {"n": id}})).collect();
    until("no room is left", || server.post("/v1/models/vectors/items:upsert", json!({"items": items})).0 == 507);
    Scene::new("--server", server, folder).then(answers)
}

fn version_rejected() -> Scene {
    let store = tempfile::tempdir().unwrap();
    let what = vectors(store.path(), "{\"id\": 7, \"embedding\": [1, 0]}\n");
    put(store.path(), &what).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        put(elsewhere.path(), &what).unwrap();
    }
    let server = Server::start(store.path());
    let broken = elsewhere.path().join("vectors/2/index.safetensors");
    let mut bytes = std::fs::read(&broken).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&broken, bytes).unwrap();
    std::fs::rename(elsewhere.path().join("vectors/2"), store.path().join("vectors/2")).unwrap();
    Scene::new("--server", server, store).then(answers)
}

fn canary_failing() -> Scene {
    let store = catalogue(10, 3);
    let path = store.path().to_str().unwrap();
    assert_eq!(run(&["activate", "vectors", "1", "--store", path]).0, 0);
    // The second version has no titles.
    put(store.path(), &vectors(store.path(), "{\"id\": 7, \"embedding\": [1, 0]}\n")).unwrap();
    let mut command = sterling();
    command.env("STERLING_HTTP__DRAIN_MS", "0").env("STERLING_REFRESH_MS", "50");
    let server = Server::spawn(command.args(["serve", "--listen", "127.0.0.1:0", "--store", path]));
    server.wait_ready();
    let canary = json!({"canary": {"version": 2, "share": 0.4}});
    until("the canary is there", || {
        let url = format!("http://{}/v1/models/vectors/traffic", server.address);
        agent().put(url).send(canary.to_string()).unwrap().status() == 200
    });
    let mut asked = 0;
    until("the canary is rolled back", || {
        for n in asked..asked + 20 {
            server.post(RETRIEVE, json!({"vector": [1, n], "filter": "title:xxx"}));
        }
        asked += 20;
        server.get("/readyz").1.contains("rolled back")
    });
    Scene::new("--server", server, store)
}

/// A router with room for one request at a time, and two requests.
fn overload() -> Scene {
    let store = catalogue(200, 3);
    let server = Server::start(store.path());
    let mut command = sterling();
    command.env("STERLING_HTTP__DRAIN_MS", "0").env("STERLING_ROUTE__REQUESTS", "1");
    let router = Server::spawn(command.args(["route", "--listen", "127.0.0.1:0", "--server", &server.address]));
    router.wait_ready();
    router.ask(RETRIEVE, body(5));
    server.signal("STOP");
    std::thread::scope(|scope| {
        // One of two requests is rejected.
        let asked =
            [scope.spawn(|| router.post(RETRIEVE, body(5)).1), scope.spawn(|| router.post(RETRIEVE, body(5)).1)];
        let codes = asked.map(|one| one.join().unwrap()["code"].clone());
        assert!(codes.contains(&json!("overloaded")), "{codes:?}");
    });
    server.signal("CONT");
    Scene::new("--router", router, (server, store))
}

/// A server with an expired certificate: clients reject it, except one with a fixed clock.
#[cfg(feature = "tls")]
fn certificate_expired() -> Scene {
    use crate::tls;

    let folder = tls::folder();
    tls::show(folder.path(), "expired");
    let server = tls::serve(folder.path(), "");
    let name = server.address.replace("127.0.0.1", "localhost");
    let named = [&name, "--ca", tls::golden("expired-ca.pem").to_str().unwrap()].map(str::to_owned).to_vec();
    let scene = Scene::new("--server", server, folder);
    Scene { get: tls::get_before_it_expired, diagnosis: Some("expired"), named, ..scene }
}

/// A server whose clock jumps once a file exists.
#[cfg(target_os = "linux")]
fn clock_jump() -> Scene {
    let store = catalogue(10, 3);
    let (library, ahead) = (clock_that_jumps(store.path()), store.path().join("an hour ahead"));
    let mut command = sterling();
    command.env("LD_PRELOAD", library).env("CLOCK_AHEAD", &ahead);
    let server = Server::spawn(command.args(["serve", "--listen", "127.0.0.1:0", "--store"]).arg(store.path()));
    server.wait_ready();
    assert_eq!(server.warnings(), [""; 0]);
    std::fs::write(ahead, "").unwrap();
    Scene::new("--server", server, store).then(answers)
}

/// Builds a library that sets the wall clock one hour ahead while the file `CLOCK_AHEAD` exists.
#[cfg(target_os = "linux")]
fn clock_that_jumps(folder: &Path) -> std::path::PathBuf {
    const SOURCE: &str = r#"
        #define _GNU_SOURCE
        #include <stdlib.h>
        #include <sys/syscall.h>
        #include <time.h>
        #include <unistd.h>
        int clock_gettime(clockid_t clock, struct timespec *now) {
            int failed = syscall(SYS_clock_gettime, clock, now);
            if (!failed && clock == CLOCK_REALTIME && !access(getenv("CLOCK_AHEAD"), F_OK)) now->tv_sec += 3600;
            return failed;
        }
    "#;
    let (source, library) = (folder.join("clock.c"), folder.join("clock.so"));
    std::fs::write(&source, SOURCE).unwrap();
    let made = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status().unwrap();
    assert!(made.success());
    library
}
