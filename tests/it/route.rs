//! `sterling route`: routers and shard servers as real processes answer like one server of the complete catalogue.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterling::items::shard_of;
use sterling::publish::{Output, Plan};
use sterling::units::ItemId;

use crate::network::Wire;
use crate::support::{Server, agent, put, sterling};
use crate::{contract, queries, shards};

/// Starts a server of one shard at a free address.
pub fn serve_shard(store: &Path, shard: u32) -> Server {
    serve_at(store, &shard.to_string(), "127.0.0.1:0")
}

/// Starts a server of one shard at an address.
pub fn serve_at(store: &Path, shard: &str, listen: &str) -> Server {
    let mut command = sterling();
    command.env("STERLING_HTTP__DRAIN_MS", "0").env("STERLING_REFRESH_MS", "100").env("STERLING_ENGINE__WORKERS", "1");
    let server = Server::spawn(command.args(["serve", "--shard", shard, "--listen", listen, "--store"]).arg(store));
    server.wait_ready();
    server
}

/// Starts a router over servers.
pub fn route<'a>(servers: impl IntoIterator<Item = &'a str>) -> Server {
    let router = route_polling_every(100, servers);
    router.wait_ready();
    router
}

/// Starts a router that polls its servers at this interval in milliseconds.
pub fn route_polling_every<'a>(refresh_ms: u32, servers: impl IntoIterator<Item = &'a str>) -> Server {
    route_with(&[("STERLING_ROUTE__REFRESH_MS", &refresh_ms.to_string())], servers)
}

/// Starts a router with these variables.
fn route_with<'a>(variables: &[(&str, &str)], servers: impl IntoIterator<Item = &'a str>) -> Server {
    let mut command = sterling();
    command.env("STERLING_HTTP__DRAIN_MS", "0").envs(variables.iter().copied());
    command.args(["route", "--listen", "127.0.0.1:0"]).stderr(Stdio::null());
    for server in servers {
        command.args(["--server", server]);
    }
    Server::spawn(&mut command)
}

/// Returns a store with a catalogue in shards, and a server of each.
fn serve_shards(shards: u32) -> (tempfile::TempDir, Vec<Server>) {
    let store = tempfile::tempdir().unwrap();
    let whole = shards::catalogue(store.path(), sterling::index::ivf::Rescore::F16);
    put(store.path(), &Plan { output: Output::shards(shards), ..whole }).unwrap();
    let servers = (0..shards).map(|shard| serve_shard(store.path(), shard)).collect();
    (store, servers)
}

/// The complete catalogue on one server, and its shards on several servers behind a router.
struct Both {
    _folder: tempfile::TempDir,
    one: Server,
    shards: Vec<Server>,
    router: Server,
    model: String,
}

impl Both {
    fn new(what: &Plan, shards: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        put(folder.path(), what).unwrap();
        let one = Server::start(folder.path());
        let model = one.get_json("/v1/models")["models"][0]["name"].as_str().unwrap().to_owned();
        put(folder.path(), &Plan { output: Output::shards(shards), ..what.clone() }).unwrap();
        let shards: Vec<Server> = (0..shards).map(|shard| serve_shard(folder.path(), shard)).collect();
        let router = route(shards.iter().map(|server| server.address.as_str()));
        Both { _folder: folder, one, shards, router, model }
    }

    /// Compares the answer of the router with that of the server, except the version.
    fn check(&self, verb: &str, body: &Value) -> Value {
        let path = format!("/v1/models/{}:{verb}", self.model);
        let (expected_status, mut expected) = self.one.post(&path, body);
        let (status, mut found) = self.router.post(&path, body);
        let answer = found.clone();
        for said in [&mut expected, &mut found] {
            let said = said.as_object_mut().unwrap();
            ["version", "digest", "explain"].iter().for_each(|key| drop(said.remove(*key)));
        }
        assert_eq!((status, &found), (expected_status, &expected), "{} shards, {verb} {body}", self.shards.len());
        answer
    }
}

/// Returns the items of each page of a request. Page sizes and servers rotate.
pub fn pages(servers: &[&Server], path: &str, body: &Value, sizes: &[u64]) -> Vec<Value> {
    let (mut body, mut pages) = (body.clone(), Vec::new());
    body["cursor"] = "".into();
    loop {
        body["k"] = sizes[pages.len() % sizes.len()].into();
        let mut answer = servers[pages.len() % servers.len()].ask(path, &body);
        pages.push(answer["items"].take());
        match answer.get("cursor") {
            Some(next) => body["cursor"] = next.clone(),
            None => return pages,
        }
    }
}

/// Returns the ids of items.
fn ids(items: &[Value]) -> Vec<i64> {
    items.iter().map(|item| item["id"].as_i64().unwrap()).collect()
}

#[test]
fn pages_are_slices_of_one_ranking_if_the_first_lists_hold_fewer_items() {
    let folder = tempfile::tempdir().unwrap();
    let what = shards::catalogue(folder.path(), sterling::index::ivf::Rescore::F16);
    const PATH: &str = "/v1/models/vectors:retrieve";
    let both = Both::new(&what, 3);
    for server in [&both.one, &both.router] {
        for filter in ["", "colour:red"] {
            let vector = [1.0, 0.5, -0.25, 0.1];
            let body = json!({"vector": vector, "candidates": 200, "probes": 1, "filter": filter});
            let found: Vec<Value> = pages(&[server], PATH, &body, &[3, 20])
                .into_iter()
                .flat_map(|page| page.as_array().unwrap().clone())
                .collect();
            let mut whole = body.clone();
            whole["k"] = 200.into();
            assert_eq!(ids(&found), ids(server.ask(PATH, &whole)["items"].as_array().unwrap()), "{filter}");
        }
    }
}

#[test]
fn pages_of_routers_are_those_of_one_server() {
    let folder = tempfile::tempdir().unwrap();
    let what = shards::catalogue(folder.path(), sterling::index::ivf::Rescore::F16);
    const PATH: &str = "/v1/models/vectors:retrieve";
    for count in [1, 3] {
        let both = Both::new(&what, count);
        let other = route(both.shards.iter().map(|server| server.address.as_str()));
        let vector = [1.0, 0.5, -0.25, 0.1];
        for (body, sizes) in [
            (json!({"vector": vector, "columns": ["colour", "price"]}), &[300, 150][..]),
            (json!({"vector": vector, "candidates": 90, "probes": 4, "columns": ["maker"]}), &[7, 1, 40]),
            (json!({"vector": vector, "candidates": 60, "filter": "colour:red", "exclude": [-9000, 5]}), &[25]),
            (json!({"vector": vector, "exact": true, "candidates": 100, "filter": "maker:m7"}), &[30, 9]),
            (json!({"vector": vector, "filter": "maker:nobody"}), &[5]),
            (json!({"vector": [0, 0, 0, 0], "candidates": 200, "probes": 12}), &[64]),
        ] {
            let expected = pages(&[&both.one], PATH, &body, sizes);
            let found = pages(&[&both.router, &other], PATH, &body, sizes);
            assert_eq!(found, expected, "{count} shards, {body}");
            let all: Vec<Value> = found.into_iter().flat_map(|page| page.as_array().unwrap().clone()).collect();
            let mut whole = body.clone();
            whole["k"] = all.len().max(1).into();
            whole["candidates"] = body.get("candidates").cloned().unwrap_or(json!(1000));
            assert_eq!(json!(all), both.router.ask(PATH, &whole)["items"], "{count} shards, {body}");
        }
        let begin = json!({"vector": vector, "k": 5, "cursor": ""});
        let cursor = both.router.ask(PATH, &begin)["cursor"].clone();
        let with = |field: &str, value: Value| {
            let mut body = json!({"vector": vector, "k": 5, "cursor": cursor});
            body[field] = value;
            body
        };
        for (body, status, said) in [
            (with("candidates", 4.into()), 400, "field `candidates`: got 4, expected at least k = 5"),
            (with("cursor", "x".into()), 400, "not a cursor of an answer"),
            (with("filter", "colour:red".into()), 400, "of another request"),
            (with("cursor", both.one.ask(PATH, &begin)["cursor"].clone()), 410, "begin with the first page"),
        ] {
            let (found, problem) = both.router.post(PATH, &body);
            assert!(
                found == status && problem["detail"].as_str().unwrap().contains(said),
                "{count} shards, {body}: {problem}"
            );
        }
        let list = both.router.ask(PATH, json!({"requests": [begin, {"vector": vector, "k": 1}]}));
        assert!(list["results"][0]["problem"]["detail"].as_str().unwrap().contains("one by one"), "{list}");
        assert_eq!(list["results"][1]["items"].as_array().unwrap().len(), 1);
        if let Some(lost) = both.shards.last().filter(|_| count > 1) {
            lost.signal("KILL");
            let body = with("k", 6.into());
            let (status, problem) = other.post(&format!("{PATH}?min_coverage=0.1"), &body);
            assert_eq!(
                (status, problem["code"].as_str()),
                (503, Some("partial")),
                "a page is of all shards: {problem}"
            );
        }
    }
}

#[test]
fn shards_behind_a_router_answer_as_one_server() {
    let folder = tempfile::tempdir().unwrap();
    let what = shards::catalogue(folder.path(), sterling::index::ivf::Rescore::F16);
    let vectors = [[1.0, 0.5, -0.25, 0.1], [0.0, -1.0, 0.5, 0.0], [0.0; 4]];
    for count in [1, 2, 3] {
        let both = Both::new(&what, count);
        let mut bodies = Vec::new();
        for vector in vectors {
            for (k, candidates, probes) in [(1, 1, 1), (37, 37, 5), (100, 400, 12), (700, 700, 12)] {
                bodies.push(json!({"vector": vector, "k": k, "candidates": candidates, "probes": probes, "columns": ["colour", "price"]}));
            }
            bodies.push(json!({"vector": vector, "k": 20, "exact": true, "filter": "colour:red AND NOT price < 9", "exclude": [-9000, 5, 5]}));
            bodies.push(json!({"vector": vector, "exact": true, "filter": "maker:nobody"}));
        }
        for body in &bodies {
            let answer = both.check("retrieve", body);
            assert_eq!(
                (answer["coverage"].as_f64(), answer["version"].as_u64()),
                (Some(1.0), Some(1 + u64::from(count > 0)))
            );
        }
        both.check("retrieve", &json!({"requests": [bodies[0], {"vector": [1]}, bodies[4], bodies[1]]}));
        let table =
            json!({"vector": vectors[0], "k": 50, "columns": ["colour", "price", "maker"], "format": "columns"});
        both.check("retrieve", &table);
        both.check("retrieve", &json!({"requests": [bodies[0], table, {"vector": [1]}]}));
        let rank = |items: Value| json!({"vector": vectors[0], "items": items, "columns": ["maker"]});
        both.check("rank", &rank(json!([-9000, -8993, 1, 2, 1, -8986, -9000])));
        both.check("rank", &rank(json!([1])));
        // Errors equal those of a single server.
        for (verb, body) in [
            ("retrieve", json!({"vector": [1, 2]})),
            ("retrieve", json!({"vector": vectors[0], "filter": "colour = red"})),
            ("retrieve", json!({"vector": vectors[0], "filter": "price:"})),
            ("retrieve", json!({"vector": vectors[0], "k": 0})),
            ("retrieve", json!({"vector": vectors[0], "probes": 13})),
            ("retrieve", json!({"vector": vectors[0], "columns": ["size"]})),
            ("retrieve", json!({"features": {"a": 1}})),
            ("embed", json!({"features": {"a": 1}})),
            ("rank", rank(json!([]))),
            ("score", json!({})),
        ] {
            both.check(verb, &body);
        }
        let item = |server: &Server, id: i64| server.get(&format!("/v1/models/vectors/items/{id}"));
        let ((status, found), (_, expected)) = (item(&both.router, -8993), item(&both.one, -8993));
        let attributes = |text: &str| serde_json::from_str::<Value>(text).unwrap()["attributes"].clone();
        assert_eq!((status, attributes(&found)), (200, attributes(&expected)));
        assert_eq!(item(&both.router, 3).0, 404);
        // The description of the model is that of the complete catalogue.
        let (of_router, of_one) = (both.router.get_json("/v1/models/vectors"), both.one.get_json("/v1/models/vectors"));
        for key in ["name", "items", "lists", "dimension", "columns", "candidates"] {
            assert_eq!(of_router[key], of_one[key], "{key}");
        }
        assert!(of_router.get("shard").is_none());
        let explained = both.check("retrieve", &json!({"vector": vectors[0], "k": 50, "probes": 6, "explain": true}));
        let explain = &explained["explain"];
        assert_eq!(explain["returned"], 50);
        let requested = explain["shards"].as_array().unwrap();
        assert_eq!(requested.len() as u32, count, "candidates that shards rank early are enough: {explain}");
        assert_eq!(explain["candidates"], 50, "{explain}");
        assert!(requested.iter().all(|shard| !shard["steps"].as_array().unwrap().is_empty()));
        let (pinned, unknown) = ("/v1/models/vectors/versions/2:retrieve", "/v1/models/vectors/versions/9:retrieve");
        assert_eq!(
            both.router.ask(pinned, &bodies[0])["items"],
            both.one.ask("/v1/models/vectors:retrieve", &bodies[0])["items"]
        );
        assert_eq!(both.router.post(unknown, &bodies[0]).0, 404);
        assert_eq!(both.router.post("/v1/models/other:retrieve", &bodies[0]).0, 404);
        let metrics = both.router.get("/metrics").1;
        assert!(
            metrics.contains("sterling_requests_total{call=\"retrieve\",status=\"200\",model=\"vectors\"}"),
            "{metrics}"
        );
    }
}

#[test]
fn user_towers_run_once_and_rerankers_where_the_items_are() {
    let made = contract::package("last", "f32", true);
    let both = Both::new(&made.publication(), 2);
    for features in [
        json!({"history": [1, 4, 2], "age": [0.5], "likes": ["acme", "bolt"]}),
        json!({"history": [], "age": [1.5]}),
        json!({"history": [5, 5, 0, 1, 2, 3], "age": [-2.0], "likes": "zürich"}),
    ] {
        for k in [1, 3, 9] {
            both.check("retrieve", &json!({"features": features, "k": k, "exact": true}));
            both.check("retrieve", &json!({"features": features, "k": k, "exact": true, "format": "columns"}));
        }
        both.check("embed", &json!({"features": features}));
        let every: Vec<i64> = (0..30).collect();
        both.check("rank", &json!({"features": features, "items": every}));
    }
    both.check("retrieve", &json!({"features": {"history": "x"}}));
    // Both shards run the tower, alternating.
    for shard in &both.shards {
        let metrics = shard.get("/metrics").1;
        assert!(metrics.contains("call=\"pass\",status=\"200\""), "{metrics}");
    }
    let made = queries::package("weighted");
    let both = Both::new(&made.publication(), 3);
    let lists = both.one.get_json(&format!("/v1/models/{}", both.model))["lists"].clone();
    for taste in [[1.0, 0.5, 0.75, 0.5], [0.3, -0.9, 0.3, -0.9]] {
        both.check("retrieve", &json!({"features": {"taste": taste}, "k": 20, "candidates": 25, "probes": lists}));
        both.check("retrieve", &json!({"vector": taste, "k": 20, "filter": "colour:red", "exact": true}));
    }
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::sleep(Duration::from_millis(30));
    }
}

#[test]
fn a_router_listens_after_its_first_poll_and_does_not_wait_for_hung_servers() {
    let (_store, servers) = serve_shards(2);
    let addresses = || servers.iter().map(|server| server.address.as_str());
    let body = json!({"vector": [1, 0.5, -0.25, 0.1], "k": 5, "timeout_ms": 20_000});
    for _ in 0..5 {
        let router = route_polling_every(60_000, addresses());
        let answer = router.ask("/v1/models/vectors:retrieve", &body);
        assert_eq!((&answer["coverage"], crate::support::ids(&answer).len()), (&json!(1.0), 5));
    }
    // The system accepts its connections, and no process reads their requests.
    let hangs = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let hanging = hangs.local_addr().unwrap().to_string();
    let start = Instant::now();
    let router = route_polling_every(60_000, addresses().chain([hanging.as_str()]));
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    assert_eq!(router.ask("/v1/models/vectors:retrieve", &body)["coverage"], 1.0);
    // The address is bound before the first poll.
    let taken = crate::support::run(&["route", "--listen", &router.address, "--server", &hanging]);
    assert!(taken.0 != 0 && taken.2.contains(&router.address), "{taken:?}");
}

#[test]
fn unknown_shards_are_not_reported_missing() {
    let unused = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let router = route_polling_every(50, [unused.as_str()]);
    for _ in 0..20 {
        for call in ["vectors:retrieve", "vectors/versions/1:retrieve", "vectors/labels/old:retrieve"] {
            let (status, problem) = router.post(&format!("/v1/models/{call}"), json!({"vector": [1, 1]}));
            assert_eq!((status, &problem["code"]), (503, &json!("not_ready")), "{call} {problem}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn requests_lower_the_coverage_down_to_the_least_of_the_router() {
    let (_store, servers) = serve_shards(2);
    let variables = [("STERLING_ROUTE__REFRESH_MS", "100"), ("STERLING_ROUTE__LEAST_COVERAGE", "0.75")];
    let router = route_with(&variables, servers.iter().map(|server| server.address.as_str()));
    router.wait_ready();
    let body = json!({"vector": [1, 0.5, -0.25, 0.1], "k": 5, "timeout_ms": 60_000});
    for (requested, status) in
        [("", 200), ("?min_coverage=1", 200), ("?min_coverage=0.75", 200), ("?min_coverage=0.5", 400)]
    {
        let (got, said) = router.post(&format!("/v1/models/vectors:retrieve{requested}"), &body);
        assert_eq!(got, status, "{requested}: {said}");
        assert!(status == 200 || said["detail"].as_str().unwrap().contains("the router's `least_coverage`"), "{said}");
    }
}

#[test]
fn a_lost_shard_is_reported() {
    let (store, mut servers) = serve_shards(3);
    let router = route(servers.iter().map(|server| server.address.as_str()));
    let held: Vec<u64> = servers.iter().map(|s| s.get_json("/v1/models/vectors")["items"].as_u64().unwrap()).collect();
    let body = json!({"vector": [1, 0.5, -0.25, 0.1], "k": 700, "probes": 12, "timeout_ms": 2000});
    let whole = "/v1/models/vectors:retrieve";
    let part = "/v1/models/vectors:retrieve?min_coverage=0.5";
    assert_eq!(router.ask(part, &body)["coverage"], 1.0);
    let reported = |server: &Server| server.get_json("/v1/models/vectors/shards");
    let all: Vec<Value> = (0..3).map(|n| json!({"shard": n, "items": held[n], "servers": 1})).collect();
    assert_eq!((&reported(&router)["coverage"], &reported(&router)["shards"]), (&json!(1.0), &json!(all)));
    for (shard, server) in servers.iter().enumerate() {
        assert_eq!(reported(server)["shards"], json!([all[shard]]));
        // Each server covers its own shard, and reports an error for requests beyond it.
        let (status, problem) = server.post(part, &body);
        assert_eq!((status, &problem["code"]), (503, &json!("partial")), "{problem}");
        let covered = held[shard] as f64 / 700.0;
        assert_eq!(server.ask(&format!("{whole}?min_coverage={covered}"), &body)["coverage"], covered);
    }
    let wait = |shard: &Server, signal: &str| shard.signal(signal);
    // Killed, and stopped: it accepts and never answers.
    for signal in ["STOP", "KILL"] {
        wait(&servers[1], signal);
        let mut response = agent().post(format!("http://{}{part}", router.address)).send(body.to_string()).unwrap();
        let covered = (700 - held[1]) as f64 / 700.0;
        let header = response.headers().get("sterling-coverage").map(|value| value.to_str().unwrap().to_owned());
        let answer: Value = response.body_mut().read_json().unwrap();
        assert_eq!(
            (answer["coverage"].as_f64(), header),
            (Some(covered), Some(covered.to_string())),
            "{signal} {answer}"
        );
        assert_eq!(answer["missing"][0]["shard"], 1);
        let ids: Vec<i64> = answer["items"].as_array().unwrap().iter().map(|i| i["id"].as_i64().unwrap()).collect();
        assert_eq!(ids.len() as u64, 700 - held[1]);
        assert!(ids.iter().all(|id| shard_of(ItemId(*id), 3) != 1));
        let start = Instant::now();
        let (status, problem) = router.post(whole, &body);
        assert_eq!(
            (status, &problem["code"], &problem["retryable"]),
            (503, &json!("partial"), &json!(true)),
            "{problem}"
        );
        assert!(start.elapsed() < Duration::from_secs(4), "within the deadline");
        assert_eq!(router.post("/v1/models/vectors:retrieve?min_coverage=0.9", &body).0, 503);
        assert_eq!(router.post("/v1/models/vectors:retrieve?min_coverage=2", &body).0, 400);
        if signal == "STOP" {
            wait(&servers[1], "CONT");
            until("it answers again", || router.post(whole, &body).0 == 200);
        }
    }
    until("it is reported as lost", || reported(&router)["shards"][1]["servers"] == 0);
    assert_eq!(reported(&router)["coverage"], (700 - held[1]) as f64 / 700.0);
    assert_eq!(reported(&router)["shards"][2], all[2]);
    // Readiness, metrics and the model report it: the only model cannot answer requests that need all shards.
    let (status, problem) = router.get("/readyz");
    let said = "model `vectors`: shard 1 of 3 of version 1 has no server that is ready";
    assert!(status == 503 && problem.contains(said), "{problem}");
    let metrics = router.get("/metrics").1;
    for line in ["sterling_route_servers{state=\"silent\"} 1", "sterling_route_servers{state=\"ready\"} 2"] {
        assert!(metrics.lines().any(|l| l == line), "{line} is not in\n{metrics}");
    }
    let value = |name: &str| {
        let line =
            metrics.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{name}: {metrics}"));
        line.trim().parse::<f64>().unwrap()
    };
    assert!((value("sterling_route_coverage_ratio{model=\"vectors\"}") - (700 - held[1]) as f64 / 700.0).abs() < 1e-9);
    assert!(value("sterling_failed_total{call=\"retrieve\",reason=\"partial\"}") >= 4.0);
    let info = router.get_json("/v1/models/vectors");
    assert_eq!((&info["items"], &info["missing"][0]["shard"]), (&json!(700), &json!(1)), "{info}");
    assert!(info["missing"][0]["reason"].as_str().unwrap().contains("no server"), "{info}");
    let models = router.get_json("/v1/models");
    let untold = &models["unavailable"][0];
    assert_eq!(
        (&models["models"], &untold["name"], &untold["code"]),
        (&json!([]), &json!("vectors"), &json!("unavailable")),
        "{models}"
    );
    let (status, page) = router.get("/");
    assert!(status == 200 && page.contains("page-shards"), "the console is there");
    assert_eq!(router.get("/openapi.json").0, 200);
    // Long after the loss was detected, the others still answer, and report their coverage.
    until("it is known to be lost", || router.metric("sterling_route_servers{state=\"silent\"}") == Some(1.0));
    router.wait_for_polls("servers");
    assert_eq!(router.ask(part, &body)["missing"][0]["shard"], 1);
    let address = servers[1].address.clone();
    servers[1] = serve_at(store.path(), "1", &address);
    until("the new one is queried", || router.post(whole, &body).0 == 200);
    assert_eq!(router.get("/readyz").0, 200);
    assert!(router.get_json("/v1/models/vectors").get("missing").is_none());
}

#[test]
fn a_broken_network_costs_its_shard_only() {
    let (_store, servers) = serve_shards(2);
    let wire = Wire::to(servers[1].address.rsplit(':').next().unwrap().parse().unwrap());
    let far = wire.address();
    let router = route([servers[0].address.as_str(), &far]);
    let body = json!({"vector": [1, 0.5, -0.25, 0.1], "k": 700, "exact": true, "timeout_ms": 1500});
    let (whole, part) = ("/v1/models/vectors:retrieve", "/v1/models/vectors:retrieve?min_coverage=0.1");
    let own = servers[0].get_json("/v1/models/vectors")["items"].as_u64().unwrap();
    let expected = router.ask(whole, &body);
    assert_eq!((expected["coverage"].as_f64(), expected["items"].as_array().map(Vec::len)), (Some(1.0), Some(700)));
    // Dropped data: connections stay open without data; cut: they end, and new ones end at once. Both right after the fault and
    // long after it was detected.
    for fault in [Wire::swallow, Wire::cut] {
        fault(&wire);
        for is_known in [false, true] {
            if is_known {
                until("it is known", || router.metric("sterling_route_servers{state=\"silent\"}") == Some(1.0));
                router.wait_for_polls("servers");
            }
            let start = Instant::now();
            let answer = router.ask(part, &body);
            assert_eq!(answer["coverage"].as_f64(), Some(own as f64 / 700.0), "{answer}");
            assert_eq!(
                (&answer["missing"][0]["shard"], answer["items"].as_array().map(Vec::len)),
                (&json!(1), Some(own as usize))
            );
            let (status, problem) = router.post(whole, &body);
            assert_eq!((status, &problem["code"]), (503, &json!("partial")), "{problem}");
            assert!(start.elapsed() < Duration::from_secs(5), "within the deadlines of both: {:?}", start.elapsed());
        }
        wire.mend();
        until("it answers again", || router.post(whole, &body).0 == 200);
        assert_eq!(router.ask(whole, &body)["items"], expected["items"]);
    }
}

#[test]
fn a_request_waits_for_a_shard_that_comes_back() {
    let (store, mut servers) = serve_shards(2);
    let router = route_polling_every(3000, servers.iter().map(|server| server.address.as_str()));
    router.wait_ready();
    let body = json!({"vector": [1, 0.5, -0.25, 0.1], "k": 700, "exact": true, "timeout_ms": 30_000});
    let (whole, part) = ("/v1/models/vectors:retrieve", "/v1/models/vectors:retrieve?min_coverage=0.1");
    let expected = router.ask(whole, &body);
    let address = servers[1].address.clone();
    servers[1].signal("KILL");
    until("it is missed", || router.ask(part, &body)["missing"][0]["shard"] == 1);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| router.ask(whole, &body));
        // Requests that accept a partial answer do not wait.
        assert_eq!(router.ask(part, &body)["missing"][0]["shard"], 1);
        servers[1] = serve_at(store.path(), "1", &address);
        assert_eq!(waiting.join().unwrap()["items"], expected["items"]);
    });
}

#[test]
#[ignore = "long: kills servers under load"]
fn the_only_server_of_a_shard_is_restarted_and_no_request_is_lost() {
    let (store, mut servers) = serve_shards(2);
    // Requests wait for three polls, which is long enough for a start on a busy machine.
    let router = route_polling_every(3000, servers.iter().map(|server| server.address.as_str()));
    router.wait_ready();
    let body = json!({"vector": [1, 0.5, -0.25, 0.1], "k": 700, "exact": true, "timeout_ms": 60_000});
    let expected = router.ask("/v1/models/vectors:retrieve", &body);
    let (stops, requested) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let ask = || {
            while !stops.load(Ordering::Relaxed) {
                assert_eq!(router.ask("/v1/models/vectors:retrieve", &body)["items"], expected["items"]);
                requested.fetch_add(1, Ordering::Relaxed);
            }
        };
        let asking: Vec<_> = (0..3).map(|_| scope.spawn(ask)).collect();
        // A server that shuts down reports it while it still answers; a killed one does not.
        for (how, drain_ms) in [("TERM", "1500"), ("TERM", "0"), ("KILL", "0")] {
            let address = servers[1].address.clone();
            servers[1].signal(how);
            servers.pop().unwrap().wait();
            let mut command = sterling();
            command.env("STERLING_HTTP__DRAIN_MS", drain_ms).env("STERLING_REFRESH_MS", "100");
            command.args(["serve", "--shard", "1", "--listen", &address, "--store"]).arg(store.path());
            servers.push(Server::spawn(&mut command));
            servers[1].wait_ready();
            let before = requested.load(Ordering::Relaxed);
            until("requests are answered again", || {
                requested.load(Ordering::Relaxed) > before + 5 || asking.iter().any(|one| one.is_finished())
            });
        }
        stops.store(true, Ordering::Relaxed);
        asking.into_iter().for_each(|one| one.join().unwrap());
    });
}

#[test]
fn a_returning_replica_replaces_a_hung_one() {
    let folder = tempfile::tempdir().unwrap();
    put(folder.path(), &shards::catalogue(folder.path(), sterling::index::ivf::Rescore::F16)).unwrap();
    let servers = [Server::start(folder.path()), Server::start(folder.path())];
    let wire = Wire::to(servers[1].address.rsplit(':').next().unwrap().parse().unwrap());
    let router = route([servers[0].address.as_str(), &wire.address()]);
    let body = json!({"vector": [1, 0.5, -0.25, 0.1], "k": 5, "timeout_ms": 20_000});
    let expected = router.ask("/v1/models/vectors:retrieve", &body);
    let known = || router.get_json("/v1/models/vectors/shards")["shards"][0]["servers"].clone();
    until("both are known", || known() == 2);
    wire.cut();
    until("one is left out", || known() == 1);
    servers[0].signal("STOP");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| router.post("/v1/models/vectors:retrieve", &body));
        std::thread::sleep(Duration::from_millis(300));
        assert!(!waiting.is_finished(), "the hung one is queried");
        wire.mend();
        let (status, answer) = waiting.join().unwrap();
        assert_eq!((status, &answer["items"]), (200, &expected["items"]), "{answer}");
    });
    servers[0].signal("CONT");
}

#[test]
fn a_version_answers_when_every_shard_has_it() {
    let folder = tempfile::tempdir().unwrap();
    let what =
        Plan { output: Output::shards(2), ..shards::catalogue(folder.path(), sterling::index::ivf::Rescore::None) };
    assert_eq!(put(folder.path(), &what).unwrap(), 1);
    // The second shard lies in its own store, which receives versions later.
    let other = tempfile::tempdir().unwrap();
    let copy = |version: &str| {
        let from = folder.path().join("vectors").join(version);
        let to = other.path().join("vectors");
        std::fs::create_dir_all(&to).unwrap();
        assert!(std::process::Command::new("cp").arg("-r").args([&from, &to]).status().unwrap().success());
    };
    copy("1");
    let servers = [serve_shard(folder.path(), 0), serve_shard(other.path(), 1)];
    let router = route(servers.iter().map(|server| server.address.as_str()));
    let body = json!({"vector": [1, 0, 0, 0], "k": 3});
    let version = || router.ask("/v1/models/vectors:retrieve", &body)["version"].as_u64().unwrap();
    assert_eq!(version(), 1);
    assert_eq!(put(folder.path(), &what).unwrap(), 2);
    until("one shard has the second", || servers[0].get_json("/v1/models/vectors")["version"] == 2);
    router.wait_for_polls("servers");
    assert_eq!(version(), 1, "one shard of two has the second");
    assert_eq!(router.post("/v1/models/vectors/versions/2:retrieve", &body).0, 503);
    copy("2");
    until("both have it", || version() == 2);
    let listed = router.get_json("/v1/models/vectors/versions");
    assert!(
        listed["versions"].as_array().unwrap().iter().any(|v| v["version"] == 2 && v["active"] == true),
        "{listed}"
    );
    // Back to the first version, and a label for the second, at the servers.
    for server in &servers {
        let (status, _) = server.post("/v1/models/vectors/versions/1:activate", "");
        assert_eq!(status, 200);
        let url = format!("http://{}/v1/models/vectors/labels/canary", server.address);
        assert_eq!(agent().put(url).send(json!({"version": 2}).to_string()).unwrap().status(), 200);
    }
    until("the first answers again", || version() == 1);
    until("the label points", || router.get_json("/v1/models/vectors/labels")["labels"]["canary"] == 2);
    assert_eq!(router.ask("/v1/models/vectors/labels/canary:retrieve", &body)["version"], 2);
}

#[test]
#[ignore = "long: stops servers under load"]
fn a_hung_replica_costs_no_request_and_is_used_again() {
    let folder = tempfile::tempdir().unwrap();
    put(folder.path(), &shards::catalogue(folder.path(), sterling::index::ivf::Rescore::F16)).unwrap();
    let servers = [Server::start(folder.path()), Server::start(folder.path())];
    // By a host name, some of whose addresses may have no listener.
    let names = servers.each_ref().map(|server| server.address.replace("127.0.0.1", "localhost"));
    // Requests detect that one hangs, not polls: it is used again once its latency estimate has expired.
    let router = route_polling_every(5000, names.iter().map(String::as_str));
    router.wait_ready();
    let body = json!({"vector": [1, 0.5, -0.25, 0.1], "k": 5, "timeout_ms": 20_000});
    let ask = || router.ask("/v1/models/vectors:retrieve", &body)["items"].clone();
    let count = |server: &Server, name: &str| server.metric(name).unwrap_or(0.0) as u64;
    let passes =
        |server: &Server| count(server, "sterling_requests_total{call=\"pass\",status=\"200\",model=\"vectors\"}");
    until("both replicas are known and queried", || {
        ask();
        servers.iter().all(|server| passes(server) > 40)
    });
    let expected = ask();
    servers[0].signal("STOP");
    let late = || count(&router, "sterling_route_second_calls_total{why=\"late\"}");
    // One request waits for it, and is answered by the other ...
    until("it is waited for", || {
        assert_eq!(ask(), expected);
        late() > 0
    });
    // ... and later requests do not wait for it.
    let before = late();
    for _ in 0..40 {
        assert_eq!(ask(), expected);
    }
    assert!(late() - before < 20, "{}", late() - before);
    servers[0].signal("CONT");
    let before = passes(&servers[0]);
    until("it is queried again", || {
        ask();
        passes(&servers[0]) > before + 10
    });
}

#[test]
fn a_router_names_its_clients_to_its_servers() {
    let store = tempfile::tempdir().unwrap();
    put(store.path(), &shards::catalogue(store.path(), sterling::index::ivf::Rescore::F16)).unwrap();
    let keys = store.path().join("keys.toml").to_str().unwrap().to_owned();
    let key = |arguments: &[&str]| {
        let (code, out, err) = crate::support::run(&[&["key", "--file", &keys], arguments].concat());
        assert_eq!(code, 0, "{err}");
        out.trim().to_owned()
    };
    let names = [&["shop", "--role", "write"][..], &["books"], &["router", "--router", "--role", "write"]];
    let [shop, books, own] = names.map(key);
    assert_eq!(std::fs::read_to_string(&keys).unwrap().matches("router = true").count(), 1);
    let mut command = sterling();
    command.env("STERLING_HTTP__DRAIN_MS", "0").env("STERLING_ACCESS__KEYS", &keys);
    command.args(["serve", "--listen", "127.0.0.1:0", "--store"]).arg(store.path());
    let server = Server::spawn(command.arg("--updates").arg(store.path().join("updates")));
    server.wait_ready();
    let wire = Wire::to(server.address.rsplit_once(':').unwrap().1.parse().unwrap());
    let variables = [("STERLING_ACCESS__KEYS", keys.as_str()), ("STERLING_ROUTE__KEY", &own)];
    let router = route_with(&variables, [&*wire.address()]);
    router.wait_ready();
    // Returns the client that the calls to the server named.
    let client = |key: &str, (call, body): (&str, Value)| {
        wire.take_sent();
        let url = format!("http://{}/v1/models/vectors{call}", router.address);
        let bearer = format!("Bearer {key}");
        // A client cannot choose its number.
        let own = [("authorization", &*bearer), ("sterling-client", "7")];
        let answer = if body.is_null() {
            own.iter().fold(agent().get(&url), |call, (name, value)| call.header(*name, *value)).call()
        } else {
            own.iter().fold(agent().post(&url), |call, (name, value)| call.header(*name, *value)).send_json(body)
        };
        assert_eq!(answer.unwrap().status().as_u16(), 200);
        let sent = String::from_utf8_lossy(&wire.take_sent()).into_owned();
        let named: BTreeSet<_> = sent.lines().filter_map(|line| line.strip_prefix("sterling-client: ")).collect();
        assert_eq!(named.len(), 1, "{sent}");
        named.first().unwrap().parse::<u64>().unwrap()
    };
    let retrieval = || (":retrieve", json!({"vector": [1, 0, 0, 0], "k": 3}));
    let clients = [&shop, &books, &shop].map(|key| client(key, retrieval()));
    assert!(clients[0] == clients[2] && clients[0] != clients[1] && !clients.contains(&7), "{clients:?}");
    for call in [("/items:delete", json!({"ids": [1]})), ("/items:position", Value::Null)] {
        assert_eq!(client(&shop, call.clone()), clients[0], "{call:?}");
    }
}

#[test]
fn calls_of_routers_are_validated() {
    let folder = tempfile::tempdir().unwrap();
    put(folder.path(), &shards::catalogue(folder.path(), sterling::index::ivf::Rescore::F16)).unwrap();
    let server = Server::start(folder.path());
    let url = format!("http://{}/v1/models/vectors/versions/1:pass", server.address);
    let kind = sterling::server::route::protocol::MEDIA_TYPE;
    let post = |url: &str, kind: &str, timeout: &str, body: &[u8]| {
        let call = agent().post(url).header("content-type", kind).header("sterling-timeout-us", timeout);
        call.send(body).unwrap().status().as_u16()
    };
    assert_eq!(post(&url, "application/json", "1000", b"{}"), 415);
    assert_eq!(post(&url, kind, "soon", b""), 400);
    for body in [&b""[..], b"\0", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", &[0; 5000], &[1; 40_000]] {
        assert_eq!(post(&url, kind, "1000000", body), 400);
    }
    assert_eq!(post(&url.replace("versions/1", "versions/7"), kind, "1000", b""), 404);
    assert_eq!(post(&url.replace("/versions/1", ""), kind, "1000", b""), 404, "a version is always named");
    assert!(agent().get(&url).call().unwrap().status() == 405);
    assert_eq!(server.get("/readyz").0, 200);
    // A router over addresses that are no servers is not ready, and reports the reason.
    let mut command = sterling();
    command.args(["route", "--listen", "127.0.0.1:0", "--server", "127.0.0.1:1"]).stderr(Stdio::null());
    let router = Server::spawn(&mut command);
    until("it has looked", || router.get("/readyz").1.contains("0 of 1 servers are ready"));
    assert_eq!(router.get("/readyz").0, 503);
    let (code, _, log) = crate::support::run(&["route", "--server", "here"]);
    assert!(code == 2 && log.contains("route: servers: got `here`, expected HOST:PORT"), "{log}");
}
