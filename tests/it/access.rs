//! API keys, listeners and the audit log of a real server.

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use sterling::server::config::{Config, Flags};
use tempfile::TempDir;

use crate::support::{Server, agent, put, run, tiny, until, vectors};

const VECTORS: &str = "/v1/models/vectors:retrieve";

/// Returns a store with two models, and a file of keys.
fn guarded() -> (TempDir, String) {
    let store = tempfile::tempdir().unwrap();
    let line = |n| format!("{{\"id\": {n}, \"embedding\": [1, {n}]}}\n");
    put(store.path(), &vectors(store.path(), &(1..2000).map(line).collect::<String>())).unwrap();
    put(store.path(), &tiny()).unwrap();
    let keys = store.path().join("keys.toml").to_str().unwrap().to_owned();
    (store, keys)
}

/// Creates a key as an operator does and returns it.
fn key(file: &str, arguments: &[&str]) -> String {
    let (code, out, err) = run(&[&["key"], arguments, &["--file", file]].concat());
    assert_eq!(code, 0, "{err}");
    out.trim().to_owned()
}

fn serve(store: &Path, options: &str) -> Server {
    let file = store.join("sterling.toml");
    std::fs::write(&file, options).unwrap();
    let config = Config::read(Some(&file), &Flags::default()).unwrap();
    Server::here(Config { store: store.into(), ..config })
}

/// Returns the status, the header `Retry-After` and the body of a call with this key.
fn ask(address: &str, key: &str, method: &str, path: &str, body: &str) -> (u16, Option<String>, Value) {
    let request = ureq::http::Request::builder().method(method).uri(format!("http://{address}{path}"));
    let request = request.header("authorization", format!("Bearer {key}")).header("content-type", "application/json");
    let mut response = agent().run(request.body(body.to_owned()).unwrap()).unwrap();
    let wait = response.headers().get("retry-after").map(|value| value.to_str().unwrap().to_owned());
    let text = response.body_mut().with_config().limit(1 << 30).read_to_string().unwrap();
    (response.status().as_u16(), wait, serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

#[test]
fn keys_are_created_used_rotated_and_revoked_without_a_restart() {
    let (store, file) = guarded();
    let (reader, watcher) = (key(&file, &["reader", "--model", "vectors"]), key(&file, &["watcher"]));
    let server = serve(store.path(), &format!("[access]\nkeys = {file:?}"));
    let query = json!({"vector": [1, 0], "k": 3}).to_string();
    let retrieve = |key: &str| ask(&server.address, key, "POST", VECTORS, &query).0;
    assert_eq!((retrieve(&reader), retrieve("stk_0"), server.get("/livez").0), (200, 401, 200));
    assert_eq!(server.get("/v1/models").0, 401);
    // The server lists only the models that the key may read.
    let (status, _, models) = ask(&server.address, &reader, "GET", "/v1/models", "");
    let names: Vec<&str> = models["models"].as_array().unwrap().iter().map(|m| m["name"].as_str().unwrap()).collect();
    assert_eq!((status, names), (200, vec!["vectors"]));
    assert_eq!(ask(&server.address, &reader, "GET", "/v1/models/tiny", "").0, 403);
    assert_eq!(ask(&server.address, &reader, "GET", "/metrics", "").0, 403);
    // A key for a model that is not served learns no other names.
    let early = key(&file, &["early", "--model", "later"]);
    until("the early key", || ask(&server.address, &early, "GET", "/v1/models", "").0 == 200);
    for (method, path) in [("GET", "/v1/models/later"), ("POST", "/v1/models/later:retrieve")] {
        let (status, _, problem) = ask(&server.address, &early, method, path, &query);
        assert_eq!((status, problem["detail"].as_str()), (404, Some("model `later` is not served here")), "{path}");
    }
    // A second key beside the first, then without it.
    let second = key(&file, &["reader-2", "--model", "vectors"]);
    until("the new key", || retrieve(&second) == 200);
    assert_eq!(retrieve(&reader), 200);
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, "[[key]]\nname = \"broken").unwrap();
    until("the broken file is read", || {
        let (_, _, metrics) = ask(&server.address, &watcher, "GET", "/metrics", "");
        metrics.as_str().is_some_and(|text| text.contains("sterling_key_reloads_total{outcome=\"failed\"} 1"))
    });
    assert_eq!((retrieve(&reader), retrieve(&second)), (200, 200), "a broken file changes nothing");
    let warned = || {
        let (status, _, ready) = ask(&server.address, &watcher, "GET", "/readyz", "");
        assert_eq!(status, 200, "{ready}");
        let ready = ready.to_string();
        assert!(!ready.contains(store.path().to_str().unwrap()), "{ready}");
        ready.contains("the access keys of keys.toml were not reloaded") && ready.contains("previous keys stay valid")
    };
    assert!(warned());
    let entries: Vec<&str> = text.split("[[key]]").collect();
    std::fs::write(&file, format!("[[key]]{}", entries[4])).unwrap();
    until("the old key is invalid", || retrieve(&reader) == 401);
    std::fs::write(&file, &text).unwrap();
    until("all keys are valid", || retrieve(&reader) == 200);
    assert!(!warned());
    std::fs::remove_file(&file).unwrap();
    until("a missing file is a warning", warned);
    std::fs::write(&file, format!("[[key]]{}", entries[4])).unwrap();
    until("the old key is invalid again", || retrieve(&reader) == 401);
    assert_eq!(retrieve(&second), 200);
    assert!(!text.contains(&reader) && !text.contains(&second));
}

#[test]
fn a_key_has_its_rate() {
    let (store, file) = guarded();
    let slow = key(&file, &["slow"]);
    let fast = key(&file, &["fast"]);
    let text = std::fs::read_to_string(&file).unwrap().replacen("role", "rate = 0.01\nburst = 3\nrole", 1);
    std::fs::write(&file, text).unwrap();
    let server = serve(store.path(), &format!("[access]\nkeys = {file:?}"));
    let models = |key: &str| ask(&server.address, key, "GET", "/v1/models", "");
    let statuses: Vec<u16> = (0..4).map(|_| models(&slow).0).collect();
    assert_eq!(statuses, [200, 200, 200, 429]);
    let (_, wait, problem) = models(&slow);
    assert_eq!((problem["code"].as_str(), problem["retryable"].as_bool()), (Some("rate_limited"), Some(true)));
    let wait: u64 = wait.unwrap().parse().unwrap();
    assert!((90..=100).contains(&wait), "{wait}");
    assert!((0..20).all(|_| models(&fast).0 == 200), "one key's rate is no other's");
    // A list counts as the number of its requests.
    let apart = store.path().join("apart.toml");
    let many = key(apart.to_str().unwrap(), &["many"]);
    let texts = [&file, apart.to_str().unwrap()].map(|path| std::fs::read_to_string(path).unwrap());
    std::fs::write(&file, format!("{}rate = 0.1\nburst = 5\n", texts.concat())).unwrap();
    until("the new key", || models(&many).0 == 200);
    let list = json!({"requests": vec![json!({"vector": [1, 0], "k": 1}); 9]}).to_string();
    assert_eq!(ask(&server.address, &many, "POST", VECTORS, &list).0, 200);
    let (status, wait, _) = models(&many);
    assert!(status == 429 && wait.unwrap().parse::<u64>().unwrap() > 30);
    // So does a rejected list: one invalid row rejects a complete tensor.
    let last = key(apart.to_str().unwrap(), &["last"]);
    let text = std::fs::read_to_string(apart.to_str().unwrap()).unwrap();
    std::fs::write(&file, format!("{text}rate = 0.1\nburst = 5\n")).unwrap();
    until("the last key", || models(&last).0 == 200);
    let vectors = json!({"name": "vector", "shape": [9, 3], "datatype": "FP32", "data": vec![1; 27]});
    let wrong = json!({"inputs": [vectors]}).to_string();
    assert_eq!(ask(&server.address, &last, "POST", "/v2/models/vectors/infer", &wrong).0, 400);
    let (status, wait, _) = models(&last);
    assert!(status == 429 && wait.unwrap().parse::<u64>().unwrap() > 30);
}

#[test]
fn changes_are_audited_with_their_caller() {
    let (store, file) = guarded();
    let (admin, reader) = (key(&file, &["ops", "--role", "admin"]), key(&file, &["reader"]));
    let log = store.path().join("audit.jsonl");
    let options = format!("updates = {:?}\n[access]\nkeys = {file:?}\naudit_log = {log:?}", store.path().join("u"));
    let server = serve(store.path(), &options);
    let call = |key: &str, method: &str, path: &str, body: &str| ask(&server.address, key, method, path, body).0;
    let models = "/v1/models/vectors";
    assert_eq!(call(&admin, "PUT", &format!("{models}/labels/a"), "{\"version\": 1}"), 200);
    assert_eq!(call(&admin, "POST", &format!("{models}/versions/9:load"), ""), 404);
    assert_eq!(call(&admin, "POST", &format!("{models}/items:delete"), "{\"ids\": [1]}"), 200);
    assert_eq!(call(&reader, "POST", &format!("{models}/items:delete"), "{\"ids\": [2]}"), 403);
    assert_eq!(call("stk_0", "POST", &format!("{models}/items:delete"), "{\"ids\": [2]}"), 401);
    assert_eq!(call(&reader, "POST", VECTORS, "{\"vector\": [1, 0]}"), 200);
    let text = std::fs::read_to_string(&log).unwrap();
    let reported = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        assert!(line["peer"].as_str().unwrap().starts_with("127.0.0.1:") && line["id"].as_str().unwrap().len() == 16);
        assert_eq!(line["key"], "ops");
        (line["call"].as_str().unwrap().to_owned(), line["status"].as_u64().unwrap())
    };
    let lines: Vec<_> = text.lines().map(reported).collect();
    assert_eq!(lines, [("label".into(), 200), ("load".into(), 404), ("delete".into(), 200)]);
    assert!(!text.contains(&admin));
}

#[test]
fn administrators_come_in_by_their_own_address() {
    let (store, file) = guarded();
    let admin = key(&file, &["ops", "--role", "admin"]);
    // A port that was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let options = format!("[access]\nkeys = {file:?}\nadmin_listen = \"127.0.0.1:{port}\"");
    let server = serve(store.path(), &options);
    let path = "/v1/models/vectors/versions/1:activate";
    let other = format!("127.0.0.1:{port}");
    assert_eq!(ask(&server.address, &admin, "POST", path, "").0, 404);
    assert_eq!(ask(&other, &admin, "POST", path, "").0, 200);
    assert_eq!(ask(&other, "stk_0", "POST", path, "").0, 401);
    assert_eq!(ask(&other, &admin, "POST", VECTORS, "{\"vector\": [1, 0]}").0, 200);
    drop(server);
    assert!(std::net::TcpStream::connect(other).is_err());
}

#[test]
fn a_full_main_address_does_not_exclude_administrators() {
    let (store, _) = guarded();
    // A port that was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let options = format!("[http]\nconnections = 4\n[access]\nadmin_listen = \"127.0.0.1:{port}\"");
    let server = serve(store.path(), &options);
    // Requests with unfinished bodies: no connection is idle between requests.
    let busy = || {
        let mut stream = std::net::TcpStream::connect(&server.address).unwrap();
        let head = format!("POST {VECTORS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n");
        stream.write_all(format!("{head}content-length: 100\r\n\r\n{{").as_bytes()).unwrap();
        stream
    };
    let mut crowd = Vec::new();
    until("a full house", || {
        crowd.push(busy());
        let mut one_more = busy();
        one_more.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let mut start = [0; 12];
        let is_refused = one_more.read_exact(&mut start).is_ok() && start.ends_with(b"503");
        crowd.push(one_more);
        is_refused
    });
    let other = format!("127.0.0.1:{port}");
    for _ in 0..20 {
        assert_eq!(ask(&other, "", "GET", "/v1/debug/slow", "").0, 200);
    }
    // Connections of the other listener do not count towards the limit of the main one.
    drop(crowd);
    until("room again", || {
        agent().get(format!("http://{}/readyz", server.address)).call().is_ok_and(|r| r.status() == 200)
    });
}

#[test]
fn wrong_keys_are_reported_under_load_too() {
    let (store, file) = guarded();
    let reader = key(&file, &["reader"]);
    let options = format!("[engine]\nworkers = 1\ntimeout_ms = 5\n[access]\nkeys = {file:?}");
    let server = serve(store.path(), &options);
    let one = json!({"vector": [1, 0], "exact": true, "k": 1000, "timeout_ms": 60_000});
    let busy = json!({"requests": vec![one; 40]}).to_string();
    let cheap = json!({"vector": [1, 0], "k": 1}).to_string();
    let (address, enough) = (&server.address, AtomicBool::new(false));
    std::thread::scope(|scope| {
        let work = || {
            (0..100)
                .filter(|_| !enough.load(Ordering::Relaxed))
                .all(|_| ask(address, &reader, "POST", VECTORS, &busy).0 == 200)
        };
        let work = scope.spawn(work);
        // Each wrong key follows a request that the load made the server reject.
        for _ in 0..10 {
            until("refusals", || ask(address, &reader, "POST", VECTORS, &cheap).0 == 503);
            let (status, wait, problem) = ask(address, "stk_0", "POST", VECTORS, &cheap);
            assert_eq!((status, wait, problem["code"].as_str()), (401, None, Some("unauthorized")));
        }
        enough.store(true, Ordering::Relaxed);
        assert!(work.join().unwrap());
    });
    assert_eq!(ask(address, &reader, "POST", "/v1/models/none:retrieve", &cheap).0, 404);
}

#[test]
fn invalid_key_files_end_the_start() {
    let (store, file) = guarded();
    let made = key(&file, &["a"]);
    for (text, expected) in [
        (format!("{made}\n"), "line 1"),
        ("[[key]]\nname = \"a\"\nsha256 = \"00\"\nrole = \"read\"".into(), "key `a`: sha256"),
    ] {
        std::fs::write(&file, text).unwrap();
        let config = store.path().join("sterling.toml");
        std::fs::write(&config, format!("[access]\nkeys = {file:?}")).unwrap();
        let arguments = ["serve", "--store", store.path().to_str().unwrap(), "--config", config.to_str().unwrap()];
        let (code, _, err) = run(&arguments);
        assert!(code == 2 && err.contains(expected) && !err.contains(&made), "{err}");
    }
    assert_eq!(run(&["key", "../x"]).0, 2);
    assert_eq!(run(&["key", "x", "--role", "root"]).0, 2);
}
