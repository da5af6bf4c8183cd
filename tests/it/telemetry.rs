//! Telemetry of a server: slow calls, traces, metrics from the start.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpListener;
use std::time::Duration;

use serde_json::{Value, json};
use sterling::Config;
use sterling::publish::{Output, Plan};
use sterling::server::http::{AccessOptions, TraceOptions};

use crate::in_process::{Callee, InProcess};
use crate::support::{Server, agent, put, run, sterling, tiny, vectors};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

#[test]
fn slow_calls_are_reported_with_their_steps() {
    let store = tempfile::tempdir().unwrap();
    let line = |n| format!("{{\"id\": {n}, \"embedding\": [1, {n}]}}\n");
    put(store.path(), &vectors(store.path(), &(1..2000).map(line).collect::<String>())).unwrap();
    put(store.path(), &tiny()).unwrap();
    let server = InProcess::start(store.path());
    let path = "/v1/models/vectors:retrieve";
    let plain = server.ask(path, json!({"vector": [1, 0]}));
    assert!(plain.get("explain").is_none(), "it was not requested");
    assert_eq!(server.post(path, json!({"vector": [1]})).0, 400);
    let requested = server.ask(path, json!({"vector": [1, 0], "explain": true, "filter": ""}));
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
    let reported: Vec<&Value> =
        calls.iter().filter(|call| call["call"] == "retrieve" && call["explain"].is_object()).collect();
    assert_eq!(reported.len(), 2);
    for call in reported {
        assert_eq!((&call["model"], &call["version"], &call["requests"]), (&json!("vectors"), &json!(1), &json!(1)));
        assert_eq!(call["explain"]["returned"], requested["explain"]["returned"]);
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
    let said: Value = serde_json::from_str(&server.said[0]).unwrap();
    assert_eq!(said["fields"]["message"], format!("listening on http://{}", server.address), "one format for both");
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
    assert!(log.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()), "{log}");
}

/// Starts a collector: returns the spans of each received message.
pub(crate) fn collector() -> (String, std::sync::mpsc::Receiver<Vec<Value>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (tell, reported) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, tell) = (BufReader::new(stream.unwrap()), tell.clone());
            std::thread::spawn(move || {
                loop {
                    let (mut line, mut length) = (String::new(), 0);
                    while stream.read_line(&mut line).unwrap() > 2 {
                        let header = line.to_ascii_lowercase();
                        if let Some(value) = header.strip_prefix("content-length:") {
                            length = value.trim().parse().unwrap();
                        }
                        assert!(!header.starts_with("post ") || header.starts_with("post /v1/traces "), "{header}");
                        line.clear();
                    }
                    if length == 0 {
                        return;
                    }
                    let mut body = vec![0; length];
                    stream.read_exact(&mut body).unwrap();
                    stream.get_mut().write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").unwrap();
                    let message: Value = serde_json::from_slice(&body).unwrap();
                    let spans = message["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().unwrap().clone();
                    if tell.send(spans).is_err() {
                        return;
                    }
                }
            });
        }
    });
    (format!("http://{address}"), reported)
}

#[test]
fn a_collector_gets_the_calls_that_are_recorded_with_their_steps() {
    let store = tempfile::tempdir().unwrap();
    put(store.path(), &vectors(store.path(), "{\"id\": 7, \"embedding\": [1, 0]}\n")).unwrap();
    let (url, reported) = collector();
    let serve = |share: f64| {
        let traces = TraceOptions { collector: Some(url.clone()), share };
        Server::here(Config { store: store.path().into(), traces, ..Config::default() })
    };
    let server = serve(0.0);
    let ask = |flags: &str| {
        let url = format!("http://{}/v1/models/vectors:retrieve", server.address);
        let request = agent().post(url).header("traceparent", format!("00-{TRACE}-00f067aa0ba902b7-{flags}"));
        let response = request.header("content-type", "application/json").send("{\"vector\": [1, 0]}").unwrap();
        response.headers()["traceparent"].to_str().unwrap().split('-').nth(2).unwrap().to_owned()
    };
    ask("00");
    let own = ask("01");
    let spans = reported.recv_timeout(Duration::from_secs(30)).unwrap();
    let (call, steps) = spans.split_first().unwrap();
    assert_eq!((&call["name"], &call["kind"], &call["spanId"]), (&json!("retrieve"), &json!(2), &json!(own)));
    assert_eq!((&call["traceId"], &call["parentSpanId"]), (&json!(TRACE), &json!("00f067aa0ba902b7")));
    let time = |span: &Value, end: &str| span[format!("{end}TimeUnixNano")].as_str().unwrap().parse::<u64>().unwrap();
    let names: Vec<&str> = steps.iter().map(|step| step["name"].as_str().unwrap()).collect();
    assert!(
        names.contains(&"scan") && steps.iter().all(|s| s["parentSpanId"] == own && s["traceId"] == TRACE),
        "{names:?}"
    );
    let mut at = time(call, "start");
    for step in steps {
        assert!(at <= time(step, "start") && time(step, "start") <= time(step, "end"), "{step}");
        at = time(step, "end");
    }
    assert!(at <= time(call, "end"));
    // The other call was not recorded: the next span is that of the next call.
    let next = ask("01");
    let spans = reported.recv_timeout(Duration::from_secs(30)).unwrap();
    assert_eq!((&spans[0]["name"], &spans[0]["spanId"]), (&json!("retrieve"), &json!(next)));
    drop(server);
    // A share of the calls without a trace id, each with a new one.
    let server = serve(1.0);
    server.wait_ready();
    server.ask("/v1/models/vectors:retrieve", json!({"vector": [1, 0]}));
    let mut seen = Vec::new();
    while !seen.iter().any(|span: &Value| span["name"] == "retrieve") {
        seen.extend(reported.recv_timeout(Duration::from_secs(30)).unwrap());
    }
    assert!(seen.iter().all(|span| span["traceId"].as_str().unwrap().len() == 32));
    assert!(seen.iter().any(|span| span["name"] == "health" && span["parentSpanId"] == ""));
}

#[test]
fn a_trace_and_an_id_go_through_the_router_to_its_shards() {
    let store = tempfile::tempdir().unwrap();
    let lines: String = (0..20).map(|n| format!("{{\"id\": {n}, \"embedding\": [1, {n}]}}\n")).collect();
    put(store.path(), &Plan { output: Output::shards(2), ..vectors(store.path(), &lines) }).unwrap();
    let (url, reported) = collector();
    let start = |arguments: &[&str]| {
        let mut command = sterling();
        command.env("STERLING_TRACES__COLLECTOR", &url).env("STERLING_HTTP__DRAIN_MS", "0");
        command.env("STERLING_ROUTE__REFRESH_MS", "100");
        let server = Server::spawn(command.args(arguments).args(["--listen", "127.0.0.1:0"]));
        server.wait_ready();
        server
    };
    let path = store.path().to_str().unwrap();
    let shards = ["0", "1"].map(|shard| start(&["serve", "--store", path, "--shard", shard]));
    let router = start(&["route", "--server", &shards[0].address, "--server", &shards[1].address]);
    let parent = format!("00-{TRACE}-00f067aa0ba902b7-01");
    let headers = [("traceparent", parent.as_str()), ("x-request-id", "order-7")];
    let body = "{\"vector\": [1, 0], \"k\": 3}";
    let answer = router.send("POST", "/v1/models/vectors:retrieve", &headers, body);
    assert_eq!((answer.status().as_u16(), &answer.headers()["x-request-id"]), (200, &"order-7".parse().unwrap()));
    let mut spans: Vec<Value> = Vec::new();
    let of = |spans: &[Value], name: &str| -> Vec<Value> {
        spans.iter().filter(|span| span["traceId"] == TRACE && span["name"] == name).cloned().collect()
    };
    while of(&spans, "retrieve").is_empty() || of(&spans, "pass").len() < 2 {
        spans.extend(reported.recv_timeout(Duration::from_secs(30)).unwrap());
    }
    let own = &of(&spans, "retrieve")[0];
    assert_eq!(own["parentSpanId"], "00f067aa0ba902b7");
    assert!(of(&spans, "pass").iter().all(|span| span["parentSpanId"] == own["spanId"]), "{spans:#?}");
    for shard in &shards {
        let slow = shard.get_json("/v1/debug/slow");
        let of_call = |call: &Value| call["call"] == "pass" && call["id"] == "order-7" && call["trace"] == TRACE;
        assert!(slow["calls"].as_array().unwrap().iter().any(of_call), "{slow}");
    }
}

#[test]
fn calls_without_a_key_are_not_recorded_where_calls_take_one() {
    let store = tempfile::tempdir().unwrap();
    put(store.path(), &vectors(store.path(), "{\"id\": 7, \"embedding\": [1, 0]}\n")).unwrap();
    let (url, reported) = collector();
    let file = store.path().join("keys.toml");
    let (code, key, error) = run(&["key", "shop", "--file", file.to_str().unwrap()]);
    assert_eq!(code, 0, "{error}");
    let traces = TraceOptions { collector: Some(url), share: 1.0 };
    let access = AccessOptions { keys: Some(file), ..AccessOptions::default() };
    let server = Server::here(Config { store: store.path().into(), traces, access, ..Config::default() });
    let ask = |path: &str, key: &str, trace: &str| {
        let url = format!("http://{}{path}", server.address);
        let request = agent().get(url).header("traceparent", format!("00-{trace}-00f067aa0ba902b7-01"));
        let response = request.header("authorization", format!("Bearer {key}")).call().unwrap();
        assert!(response.headers()["traceparent"].to_str().unwrap().starts_with(&format!("00-{trace}-")));
        response.status().as_u16()
    };
    for _ in 0..20 {
        assert_eq!(ask("/v1/models", "stk_none", &"a".repeat(32)), 401);
        assert_eq!(ask("/livez", "", &"b".repeat(32)), 200);
    }
    assert_eq!(ask("/v1/models", key.trim(), TRACE), 200);
    let mut seen = Vec::new();
    while !seen.iter().any(|span: &Value| span["traceId"] == TRACE) {
        seen.extend(reported.recv_timeout(Duration::from_secs(30)).unwrap());
    }
    assert_eq!(seen.len(), 1, "{seen:?}");
}

#[test]
fn a_collector_that_is_not_there_costs_no_answer() {
    let store = tempfile::tempdir().unwrap();
    put(store.path(), &vectors(store.path(), "{\"id\": 7, \"embedding\": [1, 0]}\n")).unwrap();
    let mut command = sterling();
    command.env("STERLING_TRACES__COLLECTOR", "http://127.0.0.1:1").env("STERLING_TRACES__SHARE", "1");
    command.args(["serve", "--listen", "127.0.0.1:0", "--store"]).arg(store.path());
    let server = Server::spawn(&mut command);
    server.wait_ready();
    server.ask("/v1/models/vectors:retrieve", json!({"vector": [1, 0]}));
    let is_lost = || {
        let text = server.get("/metrics").1;
        text.lines().any(|l| l.strip_prefix("sterling_traces_lost_total ").is_some_and(|n| n != "0"))
    };
    let start = std::time::Instant::now();
    while !is_lost() {
        assert!(start.elapsed() < Duration::from_secs(30));
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn failure_counters_start_at_zero() {
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
fn a_check_reports_the_configuration_and_starts_nothing() {
    let store = tempfile::tempdir().unwrap();
    put(store.path(), &tiny()).unwrap();
    let path = store.path().to_str().unwrap();
    let (code, out, err) = run(&["serve", "--check", "--store", path]);
    assert_eq!(code, 0, "{err}");
    for expected in ["would listen on http://127.0.0.1:8080", "calls need no key", "tiny version 1: ", "memory: "] {
        assert!(out.contains(expected), "{out}");
    }
    let config = store.path().join("sterling.toml");
    std::fs::write(&config, "[engine]\nmemory_mb = 1000000000").unwrap();
    let (code, out, err) = run(&["serve", "--check", "--store", path, "--config", config.to_str().unwrap()]);
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("warning: this machine, or the limit of its cgroup, has "), "{out}");
    std::fs::write(store.path().join("tiny/1/manifest.json"), "{").unwrap();
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
