//! The HTTP server as a real process: its answers, and its errors for invalid requests.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{Server, agent, ids, json as read, put, tiny, tiny_package, vectors};

fn close(a: &Value, b: &Value) -> bool {
    (a.as_f64().unwrap() - b.as_f64().unwrap()).abs() < 2e-5
}

#[test]
fn the_tiny_model_answers_as_python_does() {
    let store = tempfile::tempdir().unwrap();
    put(store.path(), &tiny()).unwrap();
    let server = Server::start(store.path());
    for case in read(tiny_package().join("answers.json")).as_array().unwrap() {
        let wanted = case["items"].as_array().unwrap();
        for exact in [true, false] {
            let request = json!({"features": case["features"], "constants": case["constants"], "k": 100, "exact": exact,
                                 "columns": ["title"], "explain": true});
            let answer = server.ask("/v1/models/tiny:retrieve", request);
            let items = answer["items"].as_array().unwrap();
            assert_eq!(items.len(), wanted.len());
            for (item, want) in items.iter().zip(wanted) {
                assert_eq!(item["id"], want["id"]);
                assert!(close(&item["score"], &want["score"]), "{item} {want}");
                assert!(close(&item["similarity"], &want["similarity"]), "{item} {want}");
                for (task, score) in want["tasks"].as_object().unwrap() {
                    assert!(close(&item["tasks"][task], score), "{item} {want}");
                }
            }
            assert_eq!(answer["explain"]["returned"], wanted.len());
        }
        let answer = server.ask("/v1/models/tiny:embed", json!({"features": case["features"]}));
        for (a, b) in answer["embedding"].as_array().unwrap().iter().zip(case["query"].as_array().unwrap()) {
            assert!(close(a, b));
        }
        let few = [wanted[2]["id"].clone(), wanted[0]["id"].clone(), json!(-5)];
        let answer = server.ask(
            "/v1/models/tiny:rank",
            json!({"features": case["features"], "constants": case["constants"], "items": few}),
        );
        assert_eq!(answer["unknown"], json!([-5]));
        assert_eq!(answer["items"][0]["id"], wanted[0]["id"]);
        assert!(close(&answer["items"][1]["score"], &wanted[2]["score"]));
    }
}

#[test]
fn a_batch_answers_each_request_by_itself() {
    let store = tempfile::tempdir().unwrap();
    put(store.path(), &tiny()).unwrap();
    let server = Server::start(store.path());
    let good = json!({"features": {"installed": [1, 5]}, "k": 3});
    let alone = server.ask("/v1/models/tiny:retrieve", &good);
    let bad = json!({"features": {"installed": [1, 5]}, "filter": "section:"});
    let answer = server.ask("/v1/models/tiny:retrieve", json!({"requests": [good, bad, good, {"kk": 1}]}));
    let results = answer["results"].as_array().unwrap();
    assert_eq!(results.len(), 4);
    assert_eq!(results[0]["items"], alone["items"]);
    assert_eq!(results[2]["items"], alone["items"]);
    assert_eq!(results[1]["problem"]["offset"], 8, "{}", results[1]);
    assert!(results[3]["problem"]["detail"].as_str().unwrap().contains("unknown field `kk`"));
}

#[test]
fn bad_requests_are_named_and_the_server_goes_on() {
    let store = tempfile::tempdir().unwrap();
    put(store.path(), &tiny()).unwrap();
    let lines = "{\"id\": 1, \"embedding\": [1, 0]}\n{\"id\": 2, \"embedding\": [0, 1]}\n";
    put(store.path(), &vectors(store.path(), lines)).unwrap();
    let mut server = Server::start(store.path());
    // The server is ready with the first of its models.
    server.wait_for(["tiny", "vectors"]);
    let user = "\"features\": {\"installed\": [1]}";
    let with = |rest: &str| format!("{{{user}, {rest}}}");
    let tiny = "/v1/models/tiny:retrieve";
    let cases: Vec<(&str, String, u16, &str)> = vec![
        // The body.
        (tiny, String::new(), 400, "not JSON"),
        (tiny, "{\"features\": {\"insta".into(), 400, "not JSON: EOF"),
        (tiny, "[1]".into(), 400, "expected a JSON object"),
        (tiny, with("\"kk\": 3"), 400, "unknown field `kk`"),
        (tiny, "\u{0}".into(), 400, "not JSON"),
        (tiny, "{}".into(), 400, "`features`"),
        (tiny, format!("{{{user}, \"vector\": [1]}}"), 400, "`vector`"),
        (tiny, format!("\u{feff}{{{user}}}"), 400, "not JSON"),
        (tiny, "[".repeat(1 << 20), 400, "body"),
        (tiny, "{\"features\":".repeat(1 << 16), 400, "unknown field `features`, expected one of `values`"),
        (tiny, with("\"k\": 1, \"k\": 2"), 400, "duplicate field `k`"),
        (tiny, with(user), 400, "duplicate field `features`"),
        (tiny, with("\"filter\": \"\\ud800\""), 400, "not JSON"),
        (tiny, with("\"k\": 1e999"), 400, "not JSON: number out of range"),
        (tiny, with(&format!("\"k\": 1{}", "0".repeat(1 << 20))), 400, "not JSON: number out of range"),
        (tiny, with("\"k\": 018"), 400, "not JSON"),
        (tiny, with("\"exact\": 1"), 400, "field `exact`: invalid type: integer `1`"),
        (tiny, format!("{{\"requests\": [{}{{}}]}}", "{},".repeat(1024)), 400, "more than 1024"),
        (tiny, format!("{{\"k\":[{}0]}}", "{\"\":0},".repeat(1 << 20)), 400, "field `k`: invalid type: sequence"),
        (tiny, with("\"columns\": [\"title\", \"title\"]"), 400, "got `title` twice"),
        // Numbers out of range.
        (tiny, with("\"k\": 0"), 400, "field `k`: got 0, expected 1 to 100000"),
        (tiny, with("\"k\": 100001"), 400, "field `k`: got 100001"),
        (tiny, with("\"k\": -1"), 400, "field `k`"),
        (tiny, with("\"k\": 1.5"), 400, "field `k`"),
        (tiny, with("\"k\": \"ten\""), 400, "field `k`"),
        (tiny, with("\"candidates\": 0"), 400, "field `candidates`: got 0"),
        (tiny, with("\"candidates\": 200001"), 400, "field `candidates`: got 200001"),
        (tiny, with("\"k\": 9, \"candidates\": 3"), 400, "expected at least k = 9"),
        (tiny, with("\"recall\": 1"), 400, "field `recall`: got 1, expected 0.5 to 0.999"),
        (tiny, with("\"probes\": 0"), 400, "field `probes`: got 0"),
        (tiny, with("\"probes\": 99999"), 400, "field `probes`: got 99999"),
        (tiny, with("\"timeout_ms\": 0"), 400, "field `timeout_ms`: got 0"),
        (tiny, with("\"timeout_ms\": 600001"), 400, "field `timeout_ms`"),
        // Features.
        (tiny, "{\"features\": {\"instaled\": [1]}}".into(), 400, "feature `instaled`"),
        (tiny, "{\"features\": {\"installed\": \"one\"}}".into(), 400, "installed"),
        (tiny, "{\"features\": {\"installed\": [1.5]}}".into(), 400, "installed"),
        (tiny, "{\"features\": {\"installed\": [1,2,3,4,5,6,7,8,9]}}".into(), 400, "installed"),
        (tiny, "{\"features\": {\"size\": [1, 2]}}".into(), 400, "size"),
        (tiny, "{\"features\": {\"size\": [1, 2, \"x\"]}}".into(), 400, "size"),
        (tiny, "{\"features\": {\"size\": [1, 2, 1e300]}}".into(), 400, "size"),
        (tiny, "{\"features\": 3}".into(), 400, "features"),
        // Vectors.
        ("/v1/models/vectors:retrieve", "{\"vector\": [1]}".into(), 400, "1 numbers, expected 2"),
        ("/v1/models/vectors:retrieve", "{\"vector\": []}".into(), 400, "0 numbers, expected 2"),
        ("/v1/models/vectors:retrieve", "{\"vector\": [NaN, 1]}".into(), 400, "not JSON"),
        ("/v1/models/vectors:retrieve", "{\"vector\": [null, 1]}".into(), 400, "vector[0]"),
        ("/v1/models/vectors:retrieve", "{\"vector\": [1e39, 1]}".into(), 400, "vector"),
        (
            "/v1/models/vectors:retrieve",
            format!("{{{user}}}"),
            400,
            "model `vectors` has no user tower, expected `vector`",
        ),
        ("/v1/models/vectors:embed", format!("{{{user}}}"), 422, "model `vectors` has no user tower (`[user]` of its"),
        // Filters, columns, constants.
        (tiny, with("\"filter\": \"section:\""), 400, "filter"),
        (tiny, with("\"filter\": \"(section:python\""), 400, "filter"),
        (tiny, with("\"filter\": \"colour:red\""), 400, "colour"),
        (tiny, with("\"filter\": \"section:python AND\""), 400, "filter"),
        (tiny, with("\"filter\": \"title:x\""), 400, "title"),
        (tiny, with("\"filter\": \"section < 3\""), 400, "section"),
        (tiny, with("\"columns\": [\"colour\"]"), 400, "colour"),
        (tiny, with("\"constants\": {\"w\": 1}"), 400, "`w`"),
        (tiny, with("\"exclude\": [\"x\"]"), 400, "exclude[0]"),
        ("/v1/models/tiny:rank", format!("{{{user}, \"items\": []}}"), 400, "field `items`"),
        ("/v1/models/tiny:rank", format!("{{{user}}}"), 400, "items"),
        ("/v1/models/tiny:embed", "{}".into(), 400, "features"),
        // Models, versions and calls.
        (
            "/v1/models/huge:retrieve",
            with("\"k\": 1"),
            404,
            "model `huge` is not served here; there are: tiny, vectors",
        ),
        ("/v1/models/tiny:recall", with("\"k\": 1"), 404, "`:recall`"),
        ("/v1/models/tiny/versions/9:retrieve", with("\"k\": 1"), 404, "version 9"),
        ("/v1/models/tiny/versions/x:retrieve", with("\"k\": 1"), 400, "version `x`"),
        ("/v1/models/tiny/versions/9:activate", String::new(), 404, "version 9"),
        ("/v1/nothing", String::new(), 404, "/v1/nothing"),
        ("/v1/models/tiny", String::new(), 405, "expected GET"),
        ("/livez", String::new(), 405, "expected GET"),
    ];
    for (path, body, status, expected) in &cases {
        let (got, problem) = server.post(path, body);
        assert_eq!(got, *status, "{path} {body:.200}: {problem}");
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.contains(expected), "{path} {body:.200}: {detail}");
        assert_eq!(problem["status"], *status);
        assert!(problem["code"].is_string() && problem["retryable"].is_boolean() && problem["title"].is_string());
    }
    assert_eq!(server.get("/v1/models/tiny:retrieve").0, 405);
    assert!(server.is_running());
    assert_eq!(ids(&server.ask(tiny, with("\"k\": 4"))).len(), 4);
}

#[test]
fn broken_connections_and_wrong_headers_are_answered_or_dropped() {
    let store = tempfile::tempdir().unwrap();
    put(store.path(), &tiny()).unwrap();
    let server = Server::start(store.path());
    let ask = |bytes: &str, end: bool| {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        stream.write_all(bytes.as_bytes()).unwrap();
        if end {
            stream.shutdown(std::net::Shutdown::Write).unwrap();
        }
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let head = "POST /v1/models/tiny:retrieve HTTP/1.1\r\nhost: x\r\nconnection: close\r\n";
    // No HTTP at all, an endless header, a body shorter than its length: closed, or answered with the reason.
    assert!(ask("\0\u{1}\u{2}\r\n\r\n", false).starts_with("HTTP/1.1 400"));
    assert!(ask(&format!("GET / HTTP/1.1\r\nx: {}", "y".repeat(1 << 20)), false).starts_with("HTTP/1.1 431"));
    assert!(ask(&format!("{head}content-length: 500\r\n\r\n{{\"features\""), true).starts_with("HTTP/1.1 400"));
    assert!(ask(&format!("{head}content-length: 34603008\r\n\r\n{{"), false).starts_with("HTTP/1.1 413"));
    let url = format!("http://{}/v1/models/tiny:retrieve", server.address);
    let wrong = agent().post(&url).header("content-type", "text/csv").send("a,b").unwrap();
    assert_eq!(wrong.status(), 415);
    assert_eq!(wrong.headers()["content-type"], "application/problem+json");
    let good = agent().post(&url).send("{\"features\": {\"installed\": [1]}, \"explain\": true}").unwrap();
    assert_eq!(good.status(), 200);
    let timing = good.headers()["server-timing"].to_str().unwrap();
    assert!(timing.starts_with("total;dur=") && timing.contains("tower;dur="), "{timing}");
}

#[test]
fn the_pages_of_an_operator_are_there() {
    let store = tempfile::tempdir().unwrap();
    put(store.path(), &tiny()).unwrap();
    let server = Server::start(store.path());
    let scans = || {
        let metrics = server.get("/metrics").1;
        let line = metrics.lines().find_map(|line| line.strip_prefix("sterling_step_seconds_count{step=\"scan\"} "));
        line.map_or(0, |count| count.parse::<u64>().unwrap())
    };
    let before = scans();
    server.ask("/v1/models/tiny:retrieve", json!({"features": {"installed": [1]}}));
    assert_eq!(scans(), before + 1, "those of the warm-up come before");
    assert_eq!(server.get("/livez"), (200, "ok\n".into()));
    let metrics = server.get("/metrics").1;
    for line in [
        "sterling_requests_total{call=\"retrieve\",status=\"200\",model=\"tiny\"} 1",
        "# TYPE sterling_step_seconds histogram",
        "sterling_request_seconds_bucket{call=\"retrieve\",model=\"tiny\",le=\"+Inf\"} 1",
        "sterling_build_info{version=\"",
        "# TYPE process_cpu_seconds_total counter",
        "sterling_model_version{model=\"tiny\"} 1",
        "sterling_loads_total{model=\"tiny\",outcome=\"loaded\"} 1",
    ] {
        assert!(metrics.contains(line), "{line} in\n{metrics}");
    }
    let document = server.get_json("/openapi.json");
    for path in ["/v1/models/{model}:retrieve", "/v1/models/{model}:rank", "/v1/models/{model}:embed"] {
        assert!(document["paths"][path]["post"].is_object(), "{path}");
    }
    assert!(document["openapi"].as_str().unwrap().starts_with("3.1"));
    assert!(server.get("/").1.contains("<title>Sterling</title>"));
    let info = server.get_json("/v1/models/tiny");
    assert_eq!((info["items"].as_u64(), info["tasks"][1].as_str()), (Some(13), Some("buy")));
    assert_eq!(server.get_json("/v1/models")["models"][0], info);
    assert_eq!(server.get_json("/v1/models/tiny/versions/1"), info);
    let versions = server.get_json("/v1/models/tiny/versions");
    assert_eq!(
        versions["versions"],
        json!([{"version": 1, "published": true, "active": true, "loaded": true, "labels": [], "digest": info["digest"]}])
    );
    assert_eq!(server.stop(), Some(0));
}
