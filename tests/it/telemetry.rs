//! What a server tells of itself: slow calls, traces, metrics from the start.

use serde_json::{Value, json};

use crate::support::{Server, agent, put, run, sterling, tiny, vectors};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

#[test]
fn slow_calls_are_told_with_what_their_steps_did() {
    let store = tempfile::tempdir().unwrap();
    let line = |n| format!("{{\"id\": {n}, \"embedding\": [1, {n}]}}\n");
    put(store.path(), &vectors(store.path(), &(1..2000).map(line).collect::<String>())).unwrap();
    put(store.path(), &tiny()).unwrap();
    let server = Server::start(store.path());
    let path = "/v1/models/vectors:retrieve";
    let plain = server.ask(path, json!({"vector": [1, 0]}));
    assert!(plain.get("explain").is_none(), "it was not asked for");
    assert_eq!(server.post(path, json!({"vector": [1]})).0, 400);
    let asked = server.ask(path, json!({"vector": [1, 0], "explain": true, "filter": ""}));
    server.ask(path, json!({"requests": [{"vector": [1, 0]}, {"vector": [0, 1]}]}));
    server.ask("/v1/models/vectors:rank", json!({"vector": [1, 0], "items": [1, 2]}));
    for _ in 0..100 {
        server.get("/livez");
    }
    let slow = server.get_json("/v1/debug/slow");
    let calls = slow["calls"].as_array().unwrap();
    assert_eq!((slow["window_seconds"].as_u64(), calls.len()), (Some(300), 5), "passes alone: {slow}");
    let times: Vec<f64> = calls.iter().map(|call| call["ms"].as_f64().unwrap()).collect();
    assert!(times.is_sorted_by(|a, b| a >= b), "{times:?}");
    let of = |holds: &dyn Fn(&Value) -> bool| calls.iter().filter(|call| holds(call)).count();
    assert_eq!(of(&|call| call["status"] == 400 && call.get("model").is_none()), 1);
    assert_eq!(of(&|call| call["requests"] == 2 && call.get("explain").is_none()), 1);
    assert_eq!(of(&|call| call["call"] == "rank" && call["explain"]["steps"].is_array()), 1);
    let told: Vec<&Value> =
        calls.iter().filter(|call| call["call"] == "retrieve" && call["explain"].is_object()).collect();
    assert_eq!(told.len(), 2);
    for call in told {
        assert_eq!((&call["model"], &call["version"], &call["requests"]), (&json!("vectors"), &json!(1), &json!(1)));
        assert_eq!(call["explain"]["returned"], asked["explain"]["returned"]);
        assert!(call["engine_ms"].as_f64().unwrap() <= call["ms"].as_f64().unwrap());
        assert!(call["time"].as_str().unwrap().ends_with('Z') && call["id"].as_str().unwrap().len() == 16);
    }
}

#[test]
fn a_trace_goes_through_answers_log_and_slow_calls() {
    let store = tempfile::tempdir().unwrap();
    put(store.path(), &vectors(store.path(), "{\"id\": 7, \"embedding\": [1, 0]}\n")).unwrap();
    let log = store.path().join("log");
    let mut command = sterling();
    command.env("STERLING_LOG", "sterling=debug").env("STERLING_HTTP__DRAIN_MS", "0");
    command.args(["serve", "--log-json", "--listen", "127.0.0.1:0", "--store"]).arg(store.path());
    command.stderr(std::fs::File::create(&log).unwrap());
    let server = Server::spawn_logged(&mut command);
    server.wait_ready();
    let ask = |traceparent: &str| {
        let url = format!("http://{}/v1/models/vectors:retrieve", server.address);
        let request = agent().post(url).header("traceparent", traceparent).header("content-type", "application/json");
        let response = request.send("{\"vector\": [1, 0]}").unwrap();
        assert_eq!(response.status().as_u16(), 200);
        response.headers().get("traceparent").map(|value| value.to_str().unwrap().to_owned())
    };
    let sent = format!("00-{TRACE}-00f067aa0ba902b7-01");
    let (first, second) = (ask(&sent).unwrap(), ask(&sent).unwrap());
    for answer in [&first, &second] {
        assert!(answer.starts_with(&format!("00-{TRACE}-")) && answer.ends_with("-01") && *answer != sent, "{answer}");
    }
    assert_ne!(first, second);
    assert_eq!(ask("00-what"), None);
    let slow = server.get_json("/v1/debug/slow");
    let traced = slow["calls"].as_array().unwrap().iter().filter(|call| call["trace"] == TRACE).count();
    assert_eq!(traced, 2);
    let log = std::fs::read_to_string(&log).unwrap();
    let answered: Vec<&str> = log.lines().filter(|line| line.contains(TRACE) && line.contains("answered")).collect();
    assert_eq!(answered.len(), 2, "{log}");
    assert!(answered.iter().all(|line| serde_json::from_str::<Value>(line).is_ok()));
}

#[test]
fn failures_are_counted_from_nought() {
    let store = tempfile::tempdir().unwrap();
    put(store.path(), &vectors(store.path(), "{\"id\": 7, \"embedding\": [1, 0]}\n")).unwrap();
    let server = Server::start(store.path());
    let text = server.get("/metrics").1;
    for line in [
        "sterling_lost_workers_total 0",
        "sterling_refused_total{reason=\"deadline\"} 0",
        "sterling_denied_total{reason=\"no_key\"} 0",
        "sterling_loads_total{model=\"vectors\",outcome=\"refused\"} 0",
        "sterling_loads_total{model=\"vectors\",outcome=\"loaded\"} 1",
        "sterling_merges_total{model=\"vectors\",outcome=\"failed\"} 0",
        "sterling_updates_refused_total{model=\"vectors\"} 0",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
    }
    assert!(text.contains("# HELP sterling_pace "), "{text}");
}

#[test]
fn a_check_says_what_would_be_served_and_starts_nothing() {
    let store = tempfile::tempdir().unwrap();
    put(store.path(), &tiny()).unwrap();
    let path = store.path().to_str().unwrap();
    let (code, out, err) = run(&["serve", "--check", "--store", path]);
    assert_eq!(code, 0, "{err}");
    for expected in ["would listen on http://127.0.0.1:8080", "calls take no key", "tiny version 1: ", "memory: "] {
        assert!(out.contains(expected), "{out}");
    }
    std::fs::write(store.path().join("tiny/1/manifest.json"), "{").unwrap();
    let config = store.path().join("sterling.toml");
    std::fs::write(&config, "stroe = 1").unwrap();
    for (arguments, expected) in [
        (vec!["--store", path], "manifest.json"),
        (vec!["--store", "/nowhere"], "nowhere"),
        (vec!["--store", path, "--config", config.to_str().unwrap()], "stroe"),
        (vec!["--store", path, "--device", "tpu"], "tpu"),
    ] {
        let (code, _, err) = run(&[&["serve", "--check"], &arguments[..]].concat());
        assert!(code == 2 && err.contains(expected), "{arguments:?}: {code} {err}");
    }
}
