//! The registry over HTTP: several versions in memory, labels, and rejected operations.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{Server, ids, put, sterling, vectors};

/// Sends a request; returns the status, the `Allow` header and the JSON of the answer.
fn send(server: &Server, method: &str, path: &str, body: &str) -> (u16, Option<String>, Value) {
    let response = server.send(method, path, &[], body);
    let allow = response.headers().get("allow").map(|value| value.to_str().unwrap().to_owned());
    (response.status().as_u16(), allow, response.into_body())
}

/// Starts a server of four versions of a model, each with one item that identifies it; the last one is active.
fn server() -> (tempfile::TempDir, Server) {
    let store = tempfile::tempdir().unwrap();
    for version in 1..=4 {
        put(store.path(), &vectors(store.path(), &format!("{{\"id\": {version}, \"embedding\": [1, 0]}}\n"))).unwrap();
    }
    let server = Server::start(store.path());
    (store, server)
}

fn in_memory(server: &Server) -> Vec<u64> {
    let list = server.get_json("/v1/models/vectors/versions");
    let loaded = list["versions"].as_array().unwrap().iter().filter(|v| v["loaded"] == true);
    loaded.map(|v| v["version"].as_u64().unwrap()).collect()
}

const ASK: &str = "{\"vector\": [1, 0], \"k\": 1}";

#[test]
fn labels_pin_versions_while_another_is_active() {
    let (_store, server) = server();
    let version = |number: u64, verb: &str| server.ask(&format!("/v1/models/vectors/versions/{number}:{verb}"), "");
    let label = |name: &str, number: u64| {
        let path = format!("/v1/models/vectors/labels/{name}");
        let (status, _, labels) = send(&server, "PUT", &path, &json!({"version": number}).to_string());
        assert_eq!(status, 200, "{labels}");
        labels["labels"].clone()
    };
    assert_eq!(server.get_json("/v1/models/vectors/labels"), json!({"model": "vectors", "labels": {}}));
    let one = version(1, "load");
    assert_eq!((&one["version"], &one["labels"]), (&json!(1), &json!([])));
    assert!(one["memory_bytes"].as_u64().unwrap() > 0);
    version(2, "load");
    assert_eq!(in_memory(&server), [1, 2, 4]);
    assert_eq!(label("stable", 1), json!({"stable": 1}));
    assert_eq!(label("canary", 2), json!({"canary": 2, "stable": 1}));
    assert_eq!(label("canary", 2), json!({"canary": 2, "stable": 1}), "to put a label twice changes nothing");

    for (call, expected) in [("stable", 1), ("canary", 2)] {
        let path = format!("/v1/models/vectors/labels/{call}");
        let answer = server.ask(&format!("{path}:retrieve"), ASK);
        assert_eq!((&answer["version"], ids(&answer)), (&json!(expected), vec![expected]));
        let answer = server.ask(&format!("{path}:rank"), json!({"vector": [1, 0], "items": [expected]}));
        assert_eq!((&answer["version"], ids(&answer)), (&json!(expected), vec![expected]));
    }
    assert_eq!(server.ask("/v1/models/vectors:retrieve", ASK)["version"], 4);

    let list = server.get_json("/v1/models/vectors/versions");
    let states = list["versions"].as_array().unwrap();
    assert_eq!(states[0]["labels"], json!(["stable"]));
    assert_eq!(states[0]["digest"], one["digest"]);
    assert_eq!((&states[2]["labels"], &states[2]["digest"]), (&json!([]), &Value::Null));
    assert!(states.iter().all(|v| v["published"] == true && v.get("refused").is_none()));
    assert_eq!(server.get_json("/v1/models/vectors/versions/2")["labels"], json!(["canary"]));
    assert_eq!(server.get_json("/v1/models/vectors/labels/canary")["version"], 2);

    // A label moves; the previous version stays loaded until it is unloaded, because it was loaded explicitly.
    assert_eq!(label("stable", 2), json!({"canary": 2, "stable": 2}));
    assert_eq!(ids(&server.ask("/v1/models/vectors/labels/stable:retrieve", ASK)), [2]);
    let list = version(1, "unload");
    assert_eq!(list["versions"][0]["loaded"], false);
    assert_eq!(in_memory(&server), [2, 4]);
    let (status, _, labels) = send(&server, "DELETE", "/v1/models/vectors/labels/canary", "");
    assert_eq!((status, &labels["labels"]), (200, &json!({"stable": 2})));
    version(2, "activate");
    assert_eq!(ids(&server.ask("/v1/models/vectors:retrieve", ASK)), [2]);
}

#[test]
fn forbidden_changes_are_rejected_with_a_reason() {
    let (_store, server) = server();
    server.ask("/v1/models/vectors/versions/1:load", "");
    send(&server, "PUT", "/v1/models/vectors/labels/stable", "{\"version\": 1}");
    let label = "/v1/models/vectors/labels/stable";
    let versions = "/v1/models/vectors/versions";
    for (method, path, body, status, expected) in [
        ("POST", format!("{versions}/4:unload"), "", 409, "version 4 is active, activate another version first"),
        ("POST", format!("{versions}/1:unload"), "", 409, "has the label `stable`"),
        ("POST", format!("{versions}/3:unload"), "", 404, "version 3 is not in memory; there are: 1, 4"),
        ("POST", format!("{versions}/9:load"), "", 404, "version 9 of model `vectors` is not published"),
        ("POST", format!("{versions}/9:activate"), "", 404, "version 9 of model `vectors` is not published"),
        ("POST", format!("{versions}/01:load"), "", 400, "version `01`"),
        ("POST", "/v1/models/none/versions/1:load".into(), "", 404, "model `none`"),
        ("POST", "/v1/models/none/versions/1:unload".into(), "", 404, "model `none`"),
        ("GET", "/v1/models/none/labels".into(), "", 404, "model `none`"),
        ("GET", "/v1/models/vectors/labels/canary".into(), "", 404, "label `canary`; there are: stable"),
        ("PUT", "/v1/models/none/labels/stable".into(), "{\"version\": 1}", 404, "model `none`"),
        ("DELETE", "/v1/models/none/labels/stable".into(), "", 404, "model `none`"),
        ("DELETE", "/v1/models/vectors/labels/canary".into(), "", 404, "label `canary`; there are: stable"),
        ("POST", "/v1/models/vectors/labels/canary:retrieve".into(), ASK, 404, "label `canary`; there are: stable"),
        ("POST", format!("{label}:recall"), ASK, 404, "call `:recall`"),
        ("POST", format!("{label}:load"), "", 404, "call `:load`"),
        ("POST", format!("{label}:retrieve"), "{\"k\": 1}", 400, "`features`"),
        ("PUT", label.into(), "{\"version\": 3}", 404, "version 3 is not in memory; there are: 1, 4"),
        ("PUT", label.into(), "{\"version\": 9}", 404, "version 9 is not in memory"),
        ("PUT", label.into(), "{\"version\": -1}", 400, "field `version`"),
        ("PUT", label.into(), "{\"version\": \"4\"}", 400, "field `version`"),
        ("PUT", label.into(), "{\"version\": 4, \"force\": true}", 400, "unknown field `force`"),
        ("PUT", label.into(), "{\"version\": 4, \"version\": 4}", 400, "duplicate field `version`"),
        ("PUT", label.into(), "{}", 400, "missing field `version`"),
        ("PUT", label.into(), "[4]", 400, "expected a JSON object"),
        ("PUT", label.into(), "4", 400, "expected a JSON object"),
        ("PUT", label.into(), "", 400, "not JSON"),
        ("PUT", "/v1/models/vectors/labels/.hidden".into(), "{\"version\": 4}", 400, "label `.hidden`"),
        ("PUT", "/v1/models/vectors/labels/a%20b".into(), "{\"version\": 4}", 400, "label `a b`"),
        ("PUT", format!("/v1/models/vectors/labels/{}", "x".repeat(129)), "{\"version\": 4}", 400, "1 to 128"),
        ("PUT", "/v1/models/vectors/labels/%ff".into(), "{\"version\": 4}", 400, "path"),
    ] {
        let (got, _, problem) = send(&server, method, &path, body);
        let detail = problem["detail"].as_str().unwrap_or_default();
        assert!(got == status && detail.contains(expected), "{method} {path} {body}: {got}: {problem}");
    }
    for (method, path, expected) in [
        ("POST", label.to_owned(), "GET, HEAD, PUT, DELETE"),
        ("PUT", format!("{label}:retrieve"), "POST"),
        ("POST", "/v1/models/vectors/labels".into(), "GET, HEAD"),
        ("PUT", format!("{versions}/1:load"), "POST"),
        ("GET", format!("{versions}/1:unload"), "POST"),
        ("DELETE", format!("{versions}/1"), "GET, HEAD"),
    ] {
        let (status, allow, _) = send(&server, method, &path, "");
        assert_eq!((status, allow.as_deref()), (405, Some(expected)), "{method} {path}");
    }
    assert_eq!(in_memory(&server), [1, 4]);
    assert_eq!(server.get_json("/v1/models/vectors/labels")["labels"], json!({"stable": 1}));
}

#[test]
fn versions_without_memory_are_rejected_and_retried() {
    let store = tempfile::tempdir().unwrap();
    let line = |id: usize| format!("{{\"id\": {id}, \"embedding\": [{id}{}]}}\n", ", 1".repeat(8191));
    put(store.path(), &vectors(store.path(), &(1..=40).map(line).collect::<String>())).unwrap();
    let mut command = sterling();
    command.env("STERLING_MEMORY_MB", "1").env("STERLING_HTTP__DRAIN_MS", "0");
    let server = Server::spawn(command.args(["serve", "--listen", "127.0.0.1:0", "--store"]).arg(store.path()));
    let (status, problem) = server.post("/v1/models/vectors/versions/1:load", "");
    assert_eq!((status, &problem["code"]), (507, &json!("insufficient_storage")), "{problem}");
    let state = server.get_json("/v1/models/vectors/versions")["versions"][0].clone();
    assert!(state["attempts"].as_u64() >= Some(1) && state["retry_in_ms"].is_u64(), "{state}");
    let (status, text) = server.get("/readyz");
    assert!(status == 503 && text.contains("model `vectors`") && text.contains("memory"), "{text}");
}

#[test]
fn an_unready_server_reports_the_reason() {
    let store = tempfile::tempdir().unwrap();
    let ready = |server: &Server| -> (u16, String) {
        let (status, text) = server.get("/readyz");
        let problem: Value = serde_json::from_str(&text).unwrap_or_else(|_| json!({"detail": text}));
        (status, problem["detail"].as_str().unwrap().to_owned())
    };
    let spawn = |arguments: &[&str]| {
        let mut command = sterling();
        command.args(["serve", "--listen", "127.0.0.1:0", "--store"]).arg(store.path()).args(arguments);
        Server::spawn(&mut command)
    };
    assert_eq!(ready(&spawn(&[])), (503, "no model was found in the store yet".into()));
    put(store.path(), &vectors(store.path(), "{\"id\": 1, \"embedding\": [1, 0]}\n")).unwrap();
    let (status, detail) = ready(&spawn(&["--model", "shop"]));
    assert!(status == 503 && detail.contains("model `shop`"), "{detail}");

    let index = store.path().join("vectors/1/index.safetensors");
    let bytes = std::fs::read(&index).unwrap();
    std::fs::write(&index, &bytes[1..]).unwrap();
    let server = spawn(&[]);
    let start = Instant::now();
    while !ready(&server).1.contains("model `vectors`: no version could be loaded: 1: file `index.safetensors`") {
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", ready(&server));
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(!ready(&server).1.contains(store.path().to_str().unwrap()));
}
