//! Outages as an operator sees them: `/readyz`, `sterling doctor`, a metric, and the alert that looks at it. None is silent, and none is "ok".
//!
//! That the alerts fire is for `tests/deploy/alerts_test.yml`. Outages of rows, streams and journals stand beside what they are of.

use std::process::Command;
use std::sync::LazyLock;

use serde_json::json;
use sterling::publish::Publish;

use crate::route::{route, serve_at, serve_shard};
use crate::support::{Server, agent, catalogue, put, root, run, sterling, text, until, vectors};

const RETRIEVE: &str = "/v1/models/vectors:retrieve";

static ALERTS: LazyLock<String> = LazyLock::new(|| text(root().join("deploy/alerts.yml")));

/// What is to be seen of an outage.
struct Outage<'a> {
    /// Who is asked, and what doctor calls that.
    at: &'a Server,
    kind: &'a str,
    /// The status of `/readyz`, and what its text says.
    status: u16,
    said: &'a str,
    /// A metric with its labels, and the values that it has meanwhile.
    metric: &'a str,
    is_bad: fn(f64) -> bool,
    /// The alert that looks at it.
    alert: &'a str,
}

impl Outage<'_> {
    fn check(&self) {
        until(self.said, || {
            let (status, text) = self.at.get("/readyz");
            status == self.status && text.contains(self.said)
        });
        let (code, out, _) = run(&["doctor", &format!("--{}", self.kind), &self.at.address]);
        assert!(code != 0 && out.contains(self.said), "{}: {out}", self.said);
        until(self.metric, || self.at.metric(self.metric).is_some_and(self.is_bad));
        let rule = ALERTS.split("- alert: ").find(|rule| rule.starts_with(&format!("{}\n", self.alert))).unwrap();
        let name = self.metric.split('{').next().unwrap();
        assert!(rule.contains(name), "{rule}");
    }
}

fn body(k: usize) -> serde_json::Value {
    json!({"vector": [1, 0], "k": k, "timeout_ms": 5000})
}

/// A store of a catalogue in two shards, with a server of each.
fn two_shards() -> (tempfile::TempDir, [Server; 2]) {
    let store = tempfile::tempdir().unwrap();
    let lines: String = (0..60).map(|n| format!("{{\"id\": {n}, \"embedding\": [1, {n}]}}\n")).collect();
    put(store.path(), &Publish { shards: Some(2), ..vectors(store.path(), &lines) }).unwrap();
    let servers = [0, 1].map(|shard| serve_shard(store.path(), shard));
    (store, servers)
}

#[test]
fn a_shard_is_gone() {
    let (store, [first, second]) = two_shards();
    let router = route([first.address.as_str(), &second.address]);
    router.ask(RETRIEVE, body(5));
    let address = second.address.clone();
    second.signal("KILL");
    second.wait();
    let outage = |metric, alert| {
        let is_bad: fn(f64) -> bool = |value| value > 0.0;
        Outage { at: &router, kind: "router", status: 503, said: "shard 1 of 2", metric, is_bad, alert }
    };
    let coverage = "sterling_route_coverage_ratio{model=\"vectors\"}";
    Outage { is_bad: |value| value < 1.0, ..outage(coverage, "SterlingShardIsLost") }.check();
    assert_eq!(router.post(RETRIEVE, body(5)).0, 503);
    outage("sterling_failed_total{call=\"retrieve\",reason=\"partial\"}", "SterlingAnswersFail").check();
    outage("sterling_route_servers{state=\"silent\"}", "SterlingServersAreLeftOut").check();
    let _second = serve_at(store.path(), "1", &address);
    until("all is well again", || router.get("/readyz").0 == 200);
}

#[test]
fn a_model_is_gone_while_another_one_answers() {
    let (_store, [first, second]) = two_shards();
    let other = tempfile::tempdir().unwrap();
    let what = vectors(other.path(), "{\"id\": 1, \"embedding\": [1, 0]}\n");
    put(other.path(), &Publish { name: Some("other".into()), ..what }).unwrap();
    let third = Server::start(other.path());
    let router = route([&first, &second, &third].map(|server| server.address.as_str()));
    until("both answer", || {
        let models = router.get_json("/v1/models");
        models["models"].as_array().is_some_and(|models| models.len() == 2)
    });
    third.signal("KILL");
    third.wait();
    let said = "model `other`: requests of it fail: shard 0 of 1";
    let coverage = "sterling_route_coverage_ratio{model=\"other\"}";
    let is_bad: fn(f64) -> bool = |value| value == 0.0;
    let alert = "SterlingShardIsLost";
    Outage { at: &router, kind: "router", status: 200, said, metric: coverage, is_bad, alert }.check();
    let (status, problem) = router.post("/v1/models/other:retrieve", body(1));
    assert_eq!((status, &problem["code"]), (503, &json!("unavailable")), "it is lost, not gone: {problem}");
    assert_eq!(router.get_json("/v1/models")["unavailable"][0]["name"], "other");
    assert_eq!(router.post(RETRIEVE, body(5)).0, 200);
}

#[test]
fn the_store_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    std::fs::create_dir(&store).unwrap();
    put(&store, &vectors(folder.path(), "{\"id\": 7, \"embedding\": [1, 0]}\n")).unwrap();
    let mut command = sterling();
    command.env("STERLING_HTTP__DRAIN_MS", "0").env("STERLING_REFRESH_MS", "100");
    let server = Server::spawn(command.args(["serve", "--listen", "127.0.0.1:0", "--store"]).arg(&store));
    server.wait_ready();
    std::fs::rename(&store, folder.path().join("away")).unwrap();
    let (metric, alert) = ("sterling_store_available", "SterlingStoreIsAway");
    let is_bad: fn(f64) -> bool = |value| value == 0.0;
    Outage {
        at: &server,
        kind: "server",
        status: 200,
        said: "the store's folder cannot be read",
        metric,
        is_bad,
        alert,
    }
    .check();
    assert_eq!(server.post(RETRIEVE, body(1)).0, 200);
}

#[test]
fn the_disk_is_full() {
    let folder = tempfile::tempdir().unwrap();
    put(folder.path(), &vectors(folder.path(), "{\"id\": 7, \"embedding\": [1, 0], \"attributes\": {\"n\": 1}}\n"))
        .unwrap();
    // The largest file that the server may write: a bound that needs no rights, and is told as a full disk is.
    let mut command = Command::new("sh");
    let script = "trap '' XFSZ; ulimit -f 96; exec \"$@\"";
    command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_sterling"), "serve", "--listen", "127.0.0.1:0", "--updates"]);
    command.arg(folder.path().join("updates")).arg("--store").arg(folder.path()).env_remove("STERLING_LOG");
    let server = Server::spawn(command.env("STERLING_MERGE__SHARE", "0"));
    server.wait_ready();
    let items: Vec<_> = (0..500).map(|id| json!({"id": id, "embedding": [1, id], "attributes": {"n": id}})).collect();
    until("no room is left", || server.post("/v1/models/vectors/items:upsert", json!({"items": items})).0 == 507);
    Outage {
        at: &server,
        kind: "server",
        status: 200,
        said: "insufficient_storage",
        metric: "sterling_failed_total{call=\"upsert\",reason=\"insufficient_storage\"}",
        is_bad: |value| value > 0.0,
        alert: "SterlingAnswersFail",
    }
    .check();
    assert_eq!(server.post(RETRIEVE, body(1)).0, 200);
}

#[test]
fn a_version_is_rejected() {
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
    Outage {
        at: &server,
        kind: "server",
        status: 200,
        said: "version 2 is refused (corrupt), version 1 answers",
        metric: "sterling_loads_total{model=\"vectors\",outcome=\"refused\"}",
        is_bad: |value| value > 0.0,
        alert: "SterlingLoadsFail",
    }
    .check();
}

#[test]
fn a_canary_fails() {
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
    Outage {
        at: &server,
        kind: "server",
        status: 200,
        said: "its canary was rolled back",
        metric: "sterling_canary_rollbacks_total{model=\"vectors\",outcome=\"errors\"}",
        is_bad: |value| value == 1.0,
        alert: "SterlingCanaryWasRolledBack",
    }
    .check();
}

#[test]
fn a_router_has_too_much_to_do() {
    let store = catalogue(200, 3);
    let server = Server::start(store.path());
    let mut command = sterling();
    command.env("STERLING_HTTP__DRAIN_MS", "0").env("STERLING_ROUTE__REQUESTS", "1");
    let router = Server::spawn(command.args(["route", "--listen", "127.0.0.1:0", "--server", &server.address]));
    router.wait_ready();
    router.ask(RETRIEVE, body(5));
    server.signal("STOP");
    std::thread::scope(|scope| {
        // One of two finds the only place taken.
        let asked =
            [scope.spawn(|| router.post(RETRIEVE, body(5)).1), scope.spawn(|| router.post(RETRIEVE, body(5)).1)];
        let codes = asked.map(|one| one.join().unwrap()["code"].clone());
        assert!(codes.contains(&json!("overloaded")), "{codes:?}");
    });
    server.signal("CONT");
    Outage {
        at: &router,
        kind: "router",
        status: 200,
        said: "overloaded 1",
        metric: "sterling_failed_total{call=\"retrieve\",reason=\"overloaded\"}",
        is_bad: |value| value > 0.0,
        alert: "SterlingAnswersFail",
    }
    .check();
}
