//! Rollouts over HTTP: the share of a canary, its rollback, shadow traffic.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterling::Config;
use tempfile::TempDir;

use crate::support::{Server, catalogue, ids, put, run, scattered, sterling, two_recalls, vectors};

const MODEL: &str = "/v1/models/vectors";
const TRAFFIC: &str = "/v1/models/vectors/traffic";

/// Returns the name of a store's folder.
fn name(store: &TempDir) -> &str {
    store.path().to_str().unwrap()
}

/// Sets the desired version of all servers of the store, so that other versions may be published without being activated.
fn desired_state(store: &TempDir, version: &str) {
    let (code, _, error) = run(&["activate", "vectors", version, "--store", name(store)]);
    assert_eq!(code, 0, "{error}");
}

/// Returns a store of two versions of ten items each, with different ids; the first one is active. Items of the first have a
/// title.
fn two_versions() -> TempDir {
    let store = catalogue(10, 3);
    desired_state(&store, "1");
    let line = |n: u32| format!("{{\"id\": {}, \"embedding\": [1, {}]}}\n", 100 + n, n + 1);
    put(store.path(), &vectors(store.path(), &(0..10).map(line).collect::<String>())).unwrap();
    store
}

/// A server in this process: for tests that count nothing.
fn here(store: &Path) -> Server {
    Server::here(Config { store: store.into(), audit_share: 1.0, ..Config::default() })
}

fn start(store: &Path) -> Server {
    let mut command = sterling();
    command.args(["serve", "--listen", "127.0.0.1:0", "--store"]).arg(store);
    let settings = [("REFRESH_MS", "50"), ("AUDIT_SHARE", "1"), ("HTTP__DRAIN_MS", "0")];
    command.envs(settings.map(|(name, value)| (format!("STERLING_{name}"), value)));
    let server = Server::spawn(&mut command);
    server.wait_ready();
    server
}

fn eventually<T>(what: &str, seconds: u64, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < Duration::from_secs(seconds), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Sets the rollout, and waits until it is in effect.
fn set(server: &Server, setting: &Value) -> Value {
    let reply = server.send("PUT", TRAFFIC, &[], &setting.to_string());
    assert_eq!(reply.status(), 200, "{}", reply.body());
    let is_there = |reported: &Value, part: &str| setting.get(part).is_none() || reported[part]["serving"].is_number();
    eventually("versions in memory", 60, || {
        let reported = server.get_json(TRAFFIC);
        (is_there(&reported, "canary") && is_there(&reported, "shadow")).then_some(reported)
    })
}

/// Returns the version that answers a user, from the answer and its header.
fn version_of(server: &Server, user: &str) -> u64 {
    let reply = server.send(
        "POST",
        &format!("{MODEL}:retrieve"),
        &[("x-sterling-sticky", user)],
        "{\"vector\": [1, 2], \"k\": 1}",
    );
    assert_eq!(reply.status(), 200, "{}", reply.body());
    let version = reply.body()["version"].as_u64().unwrap();
    let role = reply.headers().get("x-sterling-role").map(|role| role.to_str().unwrap());
    assert_eq!(role, Some(if version == 2 { "canary" } else { "active" }));
    version
}

/// Returns the sum of a counter over the series whose labels contain these texts.
fn counted(server: &Server, metric: &str, labels: &[&str]) -> u64 {
    let (_, text) = server.get("/metrics");
    let lines = text.lines().filter(|line| line.starts_with(&format!("{metric}{{")));
    let lines = lines.filter(|line| labels.iter().all(|label| line.contains(label)));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap() as u64).sum()
}

#[test]
fn a_share_of_the_keys_is_the_canarys_and_stays_so() {
    let store = two_versions();
    let server = start(store.path());
    let users: Vec<String> = (0..300).map(|n| format!("user-{n}")).collect();
    let versions = |server: &Server| users.iter().map(|user| version_of(server, user)).collect::<Vec<u64>>();
    let canary = |versions: &[u64]| versions.iter().filter(|version| **version == 2).count();
    set(&server, &json!({"canary": {"version": 2, "share": 0.3}}));
    let first = versions(&server);
    // 300 samples with probability 0.3: 90, and five standard deviations of 7.9.
    assert!((50..=130).contains(&canary(&first)), "{}", canary(&first));
    assert_eq!(versions(&server), first);
    let other = here(store.path());
    set(&other, &json!({"canary": {"version": 2, "share": 0.3}}));
    assert_eq!(versions(&other), first);
    // A key has one version for all kinds of requests, including lists, which have the key in their header.
    for (user, expected) in users.iter().zip(&first).take(30) {
        let headers = [("x-sterling-sticky", user.as_str())];
        for (call, body) in [
            ("rank", json!({"vector": [1, 0], "items": [1]})),
            ("retrieve", json!({"requests": [{"vector": [1, 0]}, {"vector": [2, 0]}]})),
        ] {
            let reply = server.send("POST", &format!("{MODEL}:{call}"), &headers, &body.to_string());
            assert_eq!(reply.body()["version"], *expected, "{call}");
            assert!(reply.headers().contains_key("x-sterling-role"));
        }
        let tensor = json!({"inputs": [{"name": "vector", "shape": [1, 2], "datatype": "FP32", "data": [1, 0]}]});
        let reply = server.send("POST", "/v2/models/vectors/infer", &headers, &tensor.to_string());
        assert_eq!(reply.body()["model_version"], expected.to_string(), "{}", reply.body());
    }
    // Pinned requests are not part of the rollout.
    let (in_canary, _) = users.iter().zip(&first).find(|(_, version)| **version == 2).unwrap();
    let headers = [("x-sterling-sticky", in_canary.as_str())];
    let reply = server.send("POST", &format!("{MODEL}/versions/1:retrieve"), &headers, "{\"vector\": [1, 2]}");
    assert_eq!((&reply.body()["version"], reply.headers().get("x-sterling-role")), (&json!(1), None));
    let page = |cursor: &Value| {
        let body = json!({"vector": [1, 2], "k": 3, "candidates": 9, "cursor": cursor}).to_string();
        server.send("POST", &format!("{MODEL}:retrieve"), &headers, &body).into_body()
    };
    let begin = page(&json!(""));
    assert_eq!(begin["version"], 2);
    set(&server, &json!({"canary": {"version": 2, "share": 0}}));
    let next = page(&begin["cursor"]);
    assert_eq!((&next["version"], ids(&next).len()), (&json!(2), 3), "a page is of the version of the first");
    assert_eq!(server.ask(&format!("{MODEL}:retrieve"), json!({"vector": [1, 2]}))["version"], 1);
    // A growing share keeps the keys that were in it, and a new process computes the same.
    set(&server, &json!({"canary": {"version": 2, "share": 0.6}}));
    let more = versions(&server);
    assert!(canary(&more) > canary(&first) && first.iter().zip(&more).all(|(before, now)| before <= now));
    assert_eq!(server.stop(), Some(0));
    let server = start(store.path());
    eventually("the canary", 60, || server.get_json(TRAFFIC)["canary"]["serving"].as_u64());
    assert_eq!(versions(&server), more);
    let reported = server.send("DELETE", TRAFFIC, &[], "");
    assert!(reported.status() == 200 && reported.body().get("canary").is_none());
    let reply = server.send("POST", &format!("{MODEL}:retrieve"), &headers, "{\"vector\": [1, 2]}");
    assert_eq!((&reply.body()["version"], reply.headers().get("x-sterling-role")), (&json!(1), None));
}

#[test]
fn keys_lie_where_the_setting_says() {
    let store = two_versions();
    let server = here(store.path());
    let requested = |headers: &[(&str, &str)], n: usize| {
        let body = json!({"vector": [1, n], "k": 1}).to_string();
        server.send("POST", &format!("{MODEL}:retrieve"), headers, &body).into_body()["version"].as_u64().unwrap()
    };
    let several = |ask: &dyn Fn(usize) -> u64| (0..60).map(ask).filter(|version| *version == 2).count();
    // Without a header the user's vector is the key; a list of requests has none.
    set(&server, &json!({"canary": {"version": 2, "share": 0.5}}));
    assert!((5..=55).contains(&several(&|n| requested(&[], n))));
    assert!((0..20).all(|n| requested(&[], n) == requested(&[], n)));
    let list = |n: usize| json!({"requests": [{"vector": [1, n]}]}).to_string();
    let listed = |n: usize| server.ask(&format!("{MODEL}:retrieve"), list(n))["version"].as_u64().unwrap();
    assert_eq!(several(&listed), 0);
    set(&server, &json!({"canary": {"version": 2, "share": 0.5, "sticky": "header:X-User"}}));
    let users: Vec<String> = (0..60).map(|n| format!("u{n}")).collect();
    assert!((5..=55).contains(&several(&|n| requested(&[("X-USER", &users[n])], 1))));
    assert!((0..20).all(|n| requested(&[("x-user", &users[n])], n) == requested(&[("x-user", &users[n])], n + 1)));
    // By request: each one is assigned independently.
    set(&server, &json!({"canary": {"version": 2, "share": 0.5, "sticky": "request"}}));
    assert!((5..=55).contains(&several(&|_| requested(&[("x-sterling-sticky", "one")], 1))));
    assert!((5..=55).contains(&several(&listed)));
}

/// Sends requests until the canary is rolled back, and returns the reason.
fn until_rolled_back(server: &Server, mut ask: impl FnMut(usize)) -> Value {
    let mut requested = 0;
    let setting = eventually("no roll-back", 120, || {
        (0..20).for_each(|n| ask(requested + n));
        requested += 20;
        let setting = server.get_json(TRAFFIC)["canary"]["setting"].clone();
        setting["stopped"].is_object().then_some(setting)
    });
    assert_eq!(setting["share"], 0.0);
    assert!(server.get("/readyz").1.contains("warning: model `vectors`: its canary was rolled back"));
    setting["stopped"].clone()
}

#[test]
fn a_canary_that_fails_is_rolled_back_for_good() {
    let store = two_versions();
    let server = start(store.path());
    set(&server, &json!({"canary": {"version": 2, "share": 0.4}}));
    // The second version has no such column.
    let ask = |n: usize| server.post(&format!("{MODEL}:retrieve"), json!({"vector": [1, n], "filter": "title:xxx"})).0;
    let mut statuses = [0; 2];
    let stopped = until_rolled_back(&server, |n| statuses[usize::from(ask(n) == 200)] += 1);
    assert!(statuses[0] > 0 && statuses[1] > 0, "{statuses:?}");
    assert!(stopped["reason"].as_str().unwrap().contains("failed requests"), "{stopped}");
    assert_eq!(stopped["share"], 0.4);
    assert!((0..100).all(|n| ask(n) == 200));
    assert_eq!(counted(&server, "sterling_canary_rollbacks_total", &["outcome=\"errors\""]), 1);
    assert_eq!(counted(&server, "sterling_canary_rollbacks_total", &["outcome=\"latency\""]), 0);
    assert_eq!(counted(&server, "sterling_traffic_requests_total", &["role=\"active\"", "outcome=\"failed\""]), 0);
    let (_, reported, _) = run(&["canary", "vectors", "--store", name(&store)]);
    assert!(reported.contains("canary version 2 with 0 % by user (rolled back at"), "{reported}");
    drop(server);
    let server = start(store.path());
    let setting = server.get_json(TRAFFIC)["canary"]["setting"].clone();
    assert_eq!((&setting["share"], &setting["stopped"]), (&json!(0.0), &stopped));
    // To let it answer all requests is a separate decision, which ends the canary.
    desired_state(&store, "2");
    eventually("version 2", 60, || (server.get_json(MODEL)["version"] == 2).then_some(()));
    assert!(server.get_json(TRAFFIC).get("canary").is_none());
}

#[test]
#[ignore = "long: requests until statistics decide"]
fn a_canary_that_is_slow_is_rolled_back() {
    let store = catalogue(10, 3);
    desired_state(&store, "1");
    let line = |n: u32| format!("{{\"id\": {n}, \"embedding\": [{}, {}]}}\n", n % 173, n % 211 + 1);
    let mut publication = vectors(store.path(), &(0..40_000).map(line).collect::<String>());
    publication.recipe.index.lists = 4;
    put(store.path(), &publication).unwrap();
    let server = start(store.path());
    set(&server, &json!({"canary": {"version": 2, "share": 0.5}}));
    // All items are scanned, ten or forty thousand, and up to 5,000 of them are returned.
    let body = |n: usize| json!({"vector": [1, n], "exact": true, "k": 5000});
    let stopped = until_rolled_back(&server, |n| drop(server.ask(&format!("{MODEL}:retrieve"), body(n))));
    assert!(stopped["reason"].as_str().unwrap().contains("ms on the canary, of at least"), "{stopped}");
}

#[test]
#[ignore = "long: requests until statistics decide"]
fn a_canary_with_lower_recall_is_rolled_back() {
    let store = two_recalls(None);
    let server = start(store.path());
    // Latency is not the subject of this test.
    let margins = json!({"latency": 100});
    set(&server, &json!({"canary": {"version": 2, "share": 0.5, "sticky": "request", "margins": margins}}));
    let body = |n: usize| json!({"vector": scattered(1_000_000 + n as u32), "k": 10});
    let stopped = until_rolled_back(&server, |n| drop(server.ask(&format!("{MODEL}:retrieve"), body(n))));
    assert!(stopped["reason"].as_str().unwrap().contains("exact items that were not served"), "{stopped}");
    let (_, metrics) = server.get("/metrics");
    assert!(metrics.contains("sterling_traffic_recall{model=\"vectors\",role=\"canary\"}"), "{metrics}");
}

#[test]
fn a_shadow_changes_no_answer_and_reports_differences() {
    let store = two_versions();
    let server = start(store.path());
    let ask = |n: usize| server.ask(&format!("{MODEL}:retrieve"), json!({"vector": [1, n], "k": 5, "filter": ""}));
    let rank = |n: usize| server.ask(&format!("{MODEL}:rank"), json!({"vector": [1, n], "items": [1, 2, n]}));
    let plain: Vec<Value> = (3..33).flat_map(|n| [ask(n), rank(n)]).collect();
    set(&server, &json!({"shadow": {"version": 2, "share": 1, "per_second": 10000}}));
    let shadowed: Vec<Value> = (3..33).flat_map(|n| [ask(n), rank(n)]).collect();
    assert_eq!(plain, shadowed);
    let outcome = |name: &str| counted(&server, "sterling_shadows_total", &[&format!("outcome=\"{name}\"")]);
    eventually("comparisons", 60, || {
        ask(3);
        (outcome("compared") >= 20).then_some(())
    });
    let reported = server.get_json("/v1/debug/shadow");
    let diff = reported["diffs"].as_array().unwrap().iter().find(|diff| diff["k"] == 5).unwrap();
    assert_eq!((&diff["model"], &diff["version"], &diff["shadow_version"]), (&json!("vectors"), &json!(1), &json!(2)));
    // No item of one is in the other.
    assert_eq!((&diff["overlap"], diff["lost"].as_array().unwrap().len()), (&json!(0.0), 5));
    assert!(diff["gained"].as_array().unwrap().iter().all(|id| id.as_i64().unwrap() >= 100));
    assert!(diff["shadow_ms"].is_number() && !diff["id"].as_str().unwrap().is_empty());
    assert!(counted(&server, "sterling_shadow_wanted_total", &[]) >= 100);
    assert_eq!(counted(&server, "sterling_shadow_found_total", &[]), 0);
    // A shadow that cannot answer does not affect answers.
    let filtered =
        |n: usize| server.ask(&format!("{MODEL}:retrieve"), json!({"vector": [1, n], "filter": "title:xxx"}));
    eventually("a failure", 60, || {
        assert_eq!(ids(&filtered(1)).len(), 10);
        (outcome("failed") > 0).then_some(())
    });
    let is_told = |diff: &Value| diff["error"].as_str().is_some_and(|error| error.contains("title"));
    let diffs = server.get_json("/v1/debug/shadow")["diffs"].clone();
    assert!(diffs.as_array().unwrap().iter().any(is_told), "{diffs}");
    // Beyond the rate, or without a free slot, a shadow request is dropped.
    set(&server, &json!({"shadow": {"version": 2, "share": 1, "per_second": 0.001}}));
    let rated = outcome("rate");
    (0..20).for_each(|n| drop(ask(n)));
    assert!(outcome("rate") >= rated + 18, "one may be queried");
    // Pinned requests are not shadowed, so none of them exceeds the rate.
    let rated = outcome("rate");
    for n in 0..20 {
        server.ask(&format!("{MODEL}/versions/1:retrieve"), json!({"vector": [1, n]}));
    }
    assert_eq!(outcome("rate"), rated);
    set(&server, &json!({"shadow": {"version": 2, "share": 1, "per_second": 10000}}));
    eventually("no place", 60, || {
        std::thread::scope(|scope| (0..16).for_each(|n| drop(scope.spawn(move || drop(ask(n))))));
        (outcome("busy") > 0).then_some(())
    });
}

#[test]
fn invalid_traffic_is_rejected_and_changes_nothing() {
    let store = two_versions();
    let server = here(store.path());
    let reported = set(&server, &json!({"canary": {"version": 2, "share": 0.25}}));
    let revision = reported["revision"].as_u64().unwrap();
    for (method, path, body, status, expected) in [
        ("PUT", TRAFFIC, "", 400, "not JSON"),
        ("PUT", TRAFFIC, "[]", 400, "expected a JSON object"),
        ("PUT", TRAFFIC, "{\"canaries\": {}}", 400, "unknown field `canaries`"),
        ("PUT", TRAFFIC, "{\"canary\": 2}", 400, "canary"),
        ("PUT", TRAFFIC, "{\"canary\": {\"version\": 2}}", 400, "missing field `share`"),
        ("PUT", TRAFFIC, "{\"canary\": {\"share\": 0.5}}", 400, "got no version"),
        ("PUT", TRAFFIC, "{\"canary\": {\"version\": 2, \"share\": 1.5}}", 400, "canary.share: got 1.5"),
        ("PUT", TRAFFIC, "{\"canary\": {\"version\": 2, \"share\": 1e400}}", 400, "number out of range"),
        ("PUT", TRAFFIC, "{\"canary\": {\"version\": \"2\", \"share\": 0.5}}", 400, "version"),
        ("PUT", TRAFFIC, "{\"canary\": {\"version\": 2, \"label\": \"x\", \"share\": 0.5}}", 400, "one of them"),
        ("PUT", TRAFFIC, "{\"canary\": {\"version\": 2, \"share\": 0.5, \"sticky\": \"cookie:x\"}}", 400, "sticky"),
        (
            "PUT",
            TRAFFIC,
            "{\"canary\": {\"version\": 2, \"share\": 0.5, \"window_seconds\": 1}}",
            400,
            "window_seconds",
        ),
        ("PUT", TRAFFIC, "{\"canary\": {\"version\": 1, \"share\": 0.5}}", 409, "version 1 is the active version"),
        ("PUT", TRAFFIC, "{\"canary\": {\"version\": 7, \"share\": 0.5}}", 404, "version 7"),
        ("PUT", TRAFFIC, "{\"canary\": {\"label\": \"next\", \"share\": 0.5}}", 404, "label `next`"),
        ("PUT", TRAFFIC, "{\"canary\": {\"label\": \"../x\", \"share\": 0.5}}", 404, "label `../x`"),
        ("PUT", TRAFFIC, "{\"shadow\": {\"version\": 2, \"share\": 0.5, \"per_second\": 0}}", 400, "per_second"),
        ("PUT", TRAFFIC, "{\"shadow\": {\"version\": 2, \"share\": 0.5, \"sticky\": \"user\"}}", 400, "unknown field"),
        ("PUT", TRAFFIC, "{\"revision\": 99}", 409, "expected revision 99"),
        ("PUT", TRAFFIC, "{\"revision\": -1}", 400, "revision"),
        ("DELETE", "/v1/models/vectors/traffic?revision=99", "", 409, "expected revision 99"),
        ("DELETE", "/v1/models/vectors/traffic?revision=x", "", 400, "revision"),
        ("PUT", "/v1/models/none/traffic", "{}", 404, "model `none`"),
        ("GET", "/v1/models/none/traffic", "", 404, "model `none`"),
        ("DELETE", "/v1/models/none/traffic", "", 404, "model `none`"),
        ("POST", TRAFFIC, "{}", 405, "method POST"),
        ("POST", "/v1/debug/shadow", "{}", 405, "method POST"),
    ] {
        let reply = server.send(method, path, &[], body);
        let detail = reply.body()["detail"].as_str().unwrap_or_default();
        assert!(reply.status() == status && detail.contains(expected), "{method} {path} {body}: {}", reply.body());
    }
    let now = server.get_json(TRAFFIC);
    assert_eq!((&now["revision"], &now["canary"]["setting"]), (&json!(revision), &reported["canary"]["setting"]));
    // Of two writers with the same revision one wins, and the other receives the current state.
    let share = |share: f64| json!({"canary": {"version": 2, "share": share}, "revision": revision}).to_string();
    assert_eq!(server.send("PUT", TRAFFIC, &[], &share(0.5)).status(), 200);
    let late = server.send("PUT", TRAFFIC, &[], &share(0.1));
    assert_eq!(late.status(), 409);
    assert!(late.body()["detail"].as_str().unwrap().contains("canary version 2 with 50 %"), "{}", late.body());

    for (arguments, code, expected) in [
        (&["canary", "vectors", "2", "--share", "0.1", "--sticky", "feature:user"][..], 0, "with 10 % by feature:user"),
        (&["canary", "vectors", "2"], 2, "expected --share"),
        (&["canary", "vectors", "2", "--share", "11"], 2, "canary.share: got 11"),
        (&["canary", "vectors", "1", "--share", "0.1"], 2, "version 1 is the active version"),
        (&["canary", "vectors", "9", "--share", "0.1"], 2, "version 9"),
        (&["canary", "vector", "2", "--share", "0.1"], 2, "model `vector` is not in the store; there are: vectors"),
        (&["activate", "vector", "2"], 2, "model `vector` is not in the store; there are: vectors"),
        (&["canary", "vectors", "next", "--share", "0.1"], 2, "label `next`"),
        (&["canary", "vectors", "2", "--share", "0.1", "--sticky", "x"], 2, "sticky: got `x`"),
        (&["canary", "vectors", "2", "--share", "0.1", "--latency", "0"], 2, "canary.margins.latency"),
        (&["canary", "vectors", "2", "--remove"], 2, "--remove"),
        (&["shadow", "vectors", "2", "--share", "0.1", "--per-second", "3"], 0, "at most 3 per second"),
        (&["canary", "vectors"], 0, "canary version 2 with 10 % by feature:user, shadow version 2"),
        (&["canary", "vectors", "--remove"], 0, "vectors: version 1, shadow version 2"),
        (&["shadow", "vectors", "--remove"], 0, "vectors: version 1, revision"),
        (&["canary", "none"], 2, "model `none` is not in the store; there are: vectors"),
    ] {
        let (got, out, error) = run(&[arguments, &["--store", name(&store)]].concat());
        assert!(
            got == code && (out.contains(expected) || error.contains(expected)),
            "{arguments:?}: {got} {out}{error}"
        );
    }
}
