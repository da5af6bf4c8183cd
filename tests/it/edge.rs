//! The HTTP server with clients that are slow, invalid or disconnected, and its shutdown.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};

use crate::support::{Server, agent, catalogue, ids, put, serve, serve_by, sterling, tiny, until, vectors};

/// Returns a connection on which `text` was sent.
pub fn send(server: &Server, text: &str) -> TcpStream {
    let mut stream = TcpStream::connect(&server.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(text.as_bytes()).unwrap();
    stream
}

/// Reads one answer: its status, its header in lower case, its body.
pub fn answer(stream: &mut BufReader<TcpStream>) -> (u16, String, Vec<u8>) {
    let mut header = String::new();
    while !header.ends_with("\r\n\r\n") {
        assert!(stream.read_line(&mut header).unwrap() > 0, "closed after {header:?}");
    }
    let header = header.to_ascii_lowercase();
    let status = header.split(' ').nth(1).unwrap().parse().unwrap();
    let mut body = Vec::new();
    match header.split("content-length: ").nth(1) {
        Some(rest) => {
            body.resize(rest.lines().next().unwrap().parse().unwrap(), 0);
            stream.read_exact(&mut body).unwrap();
        }
        None => loop {
            let mut line = String::new();
            stream.read_line(&mut line).unwrap();
            let length = usize::from_str_radix(line.trim(), 16).unwrap();
            let before = body.len();
            body.resize(before + length + 2, 0);
            stream.read_exact(&mut body[before..]).unwrap();
            body.truncate(before + length);
            if length == 0 {
                break;
            }
        },
    }
    (status, header, body)
}

/// Returns whether the other side has closed; waits for it up to the read timeout.
pub fn is_closed(stream: &mut TcpStream) -> bool {
    match stream.read(&mut [0; 64]) {
        Ok(bytes) => bytes == 0,
        Err(e) => matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe),
    }
}

pub fn metric(server: &Server, line: &str) -> f64 {
    server.metric(line).unwrap_or(0.0)
}

pub const VECTORS: &str = "/v1/models/vectors:retrieve";

pub fn post(path: &str, body: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

#[test]
fn draining_is_gradual_and_exits_successfully() {
    let store = catalogue(10, 1);
    let mut server = serve(store.path(), "drain_ms = 1500\nstop_ms = 20000");
    let request = post(VECTORS, "{\"vector\": [1, 0]}");
    let mut retained = BufReader::new(send(&server, &request));
    let (status, header, _) = answer(&mut retained);
    assert!(status == 200 && !header.contains("connection: close"), "{header}");
    // A request whose body arrives during the shutdown.
    let (first, second) = request.split_at(request.len() - 9);
    let mut started = send(&server, first);
    let idle = send(&server, "");
    server.signal("TERM");
    until("503", || server.get("/readyz").0 == 503);
    assert_eq!(server.get("/livez").0, 200, "new connections are still answered");
    retained.get_mut().write_all(request.as_bytes()).unwrap();
    let (status, header, _) = answer(&mut retained);
    assert!(status == 200 && header.contains("connection: close"), "{header}");
    until("a closed socket", || TcpStream::connect(&server.address).is_err());
    assert!(server.is_running(), "a request is not answered yet");
    started.write_all(second.as_bytes()).unwrap();
    let (status, _, body) = answer(&mut BufReader::new(started));
    assert_eq!((status, ids(&serde_json::from_slice(&body).unwrap()).len()), (200, 10));
    assert_eq!(server.wait(), Some(0));
    drop(idle);
}

#[test]
fn connections_opened_before_the_socket_closed_are_answered() {
    let store = catalogue(10, 1);
    let server = serve(store.path(), "drain_ms = 0\nstop_ms = 20000");
    let request = post(VECTORS, "{\"vector\": [1, 0]}");
    let mut silent = send(&server, "");
    assert_eq!(server.get("/livez").0, 200, "it was accepted, as the one after it");
    // A connection that the system has accepted while the server was stopped.
    server.signal("STOP");
    let waiting = send(&server, &request);
    server.signal("TERM");
    server.signal("CONT");
    until("a closed socket", || TcpStream::connect(&server.address).is_err());
    silent.write_all(request.as_bytes()).unwrap();
    // The server may have accepted and answered it before it heard the signal: then it closes the idle connection.
    let mut waiting = BufReader::new(waiting);
    let (status, header, _) = answer(&mut waiting);
    assert!(status == 200 && (header.contains("connection: close") || is_closed(waiting.get_mut())), "{header}");
    let (status, header, _) = answer(&mut BufReader::new(silent));
    assert!(status == 200 && header.contains("connection: close"), "{header}");
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn endless_connections_are_closed_at_the_limit() {
    let store = catalogue(5000, 2000);
    let server = serve(store.path(), "drain_ms = 0\nstop_ms = 300\nstall_ms = 600000\nheader_ms = 600000");
    let silent = send(&server, "");
    let header = send(&server, "GET /livez HTT");
    let body = send(&server, "POST /v1/models/vectors:retrieve HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{");
    let reader = send(&server, &post(VECTORS, "{\"vector\": [1, 0], \"k\": 5000, \"columns\": [\"title\"]}"));
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(server.stop(), Some(0));
    for mut stream in [silent, header, body] {
        assert!(is_closed(&mut stream));
    }
    drop(reader);
}

/// Returns the program with the default action of SIGHUP. Under `nohup`, as some CI starts tests, processes inherit that it is
/// ignored, and a server then ignores it on purpose.
fn hearing_hangups() -> Command {
    let mut command = Command::new("env");
    command.args(["--default-signal=HUP", env!("CARGO_BIN_EXE_sterling")]).env_remove("STERLING_LOG");
    command
}

#[test]
fn a_second_signal_ends_at_once_and_a_hangup_drains() {
    let store = catalogue(10, 1);
    for first in ["TERM", "INT", "HUP"] {
        let options = "drain_ms = 600000\nstop_ms = 600000\nstall_ms = 600000\nbody_ms = 600000";
        let mut server = serve_by(hearing_hangups(), store.path(), options);
        let half = send(
            &server,
            "POST /v1/models/vectors:retrieve HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n",
        );
        // `100 Continue` shows that the request is being read; a connection that sent nothing does not delay the shutdown.
        let mut reported = String::new();
        BufReader::new(&half).read_line(&mut reported).unwrap();
        assert!(reported.starts_with("HTTP/1.1 100"), "{reported}");
        server.signal(first);
        let readyz = format!("http://{}/readyz", server.address);
        until("it takes no new calls", || agent().get(&readyz).call().map_or(true, |answer| answer.status() == 503));
        assert!(server.is_running(), "{first}: it waits for the body");
        server.signal("TERM");
        assert_eq!(server.wait(), Some(1), "{first}");
        drop(half);
    }
}

#[test]
fn slow_clients_are_cut_and_others_are_answered() {
    let store = catalogue(5000, 2000);
    let server = serve(store.path(), "header_ms = 300\nidle_ms = 900\nstall_ms = 400\nbody_ms = 1000");
    let mut idle = send(&server, "");
    let mut header = send(&server, "GET /livez HTTP/1.1\r\nhost:");
    let mut head = BufReader::new(send(
        &server,
        "POST /v1/models/vectors:retrieve HTTP/1.1\r\ncontent-length: 9\r\nhost: x\r\n\r\n{",
    ));
    let reader = send(&server, &post(VECTORS, "{\"vector\": [1, 0], \"k\": 5000, \"columns\": [\"title\"]}"));
    assert!(is_closed(&mut header), "half a header");
    let (status, _, body) = answer(&mut head);
    let problem: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!((status, problem["code"].as_str()), (408, Some("request_timeout")));
    assert!(problem["detail"].as_str().unwrap().contains("no byte arrived for 400 ms"), "{problem}");
    assert!(is_closed(&mut idle));
    until("a slow reader", || metric(&server, "sterling_connections_cut_total{reason=\"stalled\"}") == 1.0);
    // A body that trickles in is complete or is rejected in the end.
    let mut trickle =
        send(&server, "POST /v1/models/vectors:retrieve HTTP/1.1\r\ncontent-length: 900\r\nhost: x\r\n\r\n");
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(1500) && trickle.write_all(b" ").is_ok() {
        std::thread::sleep(Duration::from_millis(100));
    }
    let (status, ..) = answer(&mut BufReader::new(trickle));
    assert_eq!(status, 408);
    assert_eq!(ids(&server.ask(VECTORS, json!({"vector": [1, 0], "k": 3}))).len(), 3);
    drop(reader);
}

#[test]
fn idle_connections_exclude_no_client() {
    let store = catalogue(10, 1);
    let mut command = Command::new("sh");
    let script = "ulimit -n 64; exec \"$0\" serve --listen 127.0.0.1:0 --store \"$1\"";
    command.args(["-c", script, env!("CARGO_BIN_EXE_sterling")]).arg(store.path()).env_remove("STERLING_LOG");
    let server = Server::spawn(&mut command);
    server.wait_ready();
    let mut idle: Vec<TcpStream> = (0..200).map(|_| send(&server, "")).collect();
    assert_eq!(server.get("/livez"), (200, "ok\n".into()));
    let halves: Vec<TcpStream> = (0..200).map(|_| send(&server, "GET /livez HT")).collect();
    assert_eq!(server.get("/livez").0, 200);
    assert!(is_closed(&mut idle[0]), "the one that was idle for longest");
    put(store.path(), &vectors(store.path(), "{\"id\": 7, \"embedding\": [1, 0]}\n")).unwrap();
    until("version 2", || server.ask(VECTORS, json!({"vector": [1, 0]}))["version"] == 2);
    drop(halves);
}

#[test]
fn connections_wait_for_a_busy_server() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let allowed: usize = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap().trim().parse().unwrap();
    // More connections than the runtime's default listen backlog, and fewer than the system's limit.
    let count = allowed.min(1500) - 8;
    let store = catalogue(3, 1);
    let server = serve(store.path(), "");
    server.signal("STOP");
    // The server accepts nothing now: new connections wait in the backlog, for a second if it is full.
    let address = server.address.parse().unwrap();
    let connect = |_| TcpStream::connect_timeout(&address, Duration::from_millis(900));
    let connected: Result<Vec<TcpStream>, _> = (0..count).map(connect).collect();
    server.signal("CONT");
    let mut connected = connected.unwrap();
    for stream in connected.iter_mut().step_by(count / 4) {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.write_all(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        assert_eq!(answer(&mut BufReader::new(stream.try_clone().unwrap())).0, 200);
    }
}

#[test]
fn bodies_share_a_budget() {
    let store = catalogue(10, 1);
    let server = serve(store.path(), "bodies_mb = 1");
    // A quarter of the budget each, because parsed bodies take more memory than their text.
    let half = |()| {
        let head = "POST /v1/models/vectors:retrieve HTTP/1.1\r\nhost: x\r\ncontent-length: 70000\r\n\r\n";
        send(&server, &format!("{head}{}", " ".repeat(60_000)))
    };
    let mut held: Vec<TcpStream> = Vec::new();
    let large = format!("{{\"vector\": [1, 0], \"filter\": \"\"{}}}", " ".repeat(50_000));
    let refused = || agent().post(format!("http://{}{VECTORS}", server.address)).send(&large).unwrap();
    until("a full budget", || {
        // A body that arrived while another one was read was rejected itself.
        held.push(half(()));
        refused().status() == 503
    });
    let mut response = refused();
    assert_eq!(response.headers()["retry-after"], "1");
    let problem: Value = serde_json::from_str(&response.body_mut().read_to_string().unwrap()).unwrap();
    assert!(problem["detail"].as_str().unwrap().contains("1 MiB"), "{problem}");
    assert_eq!((problem["code"].as_str(), problem["retryable"].as_bool()), (Some("overloaded"), Some(true)));
    drop(held);
    until("room again", || refused().status() == 200);
    // Announced bodies that have not arrived take no memory.
    let announced: Vec<TcpStream> = (0..50)
        .map(|_| {
            send(&server, "POST /v1/models/vectors:retrieve HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n{")
        })
        .collect();
    assert_eq!(refused().status(), 200);
    drop(announced);
}

#[test]
fn large_replies_are_chunked_and_small_ones_are_not() {
    let store = catalogue(3000, 100);
    let server = serve(store.path(), "");
    for (k, pieces) in [(3, false), (3000, true)] {
        let body = format!("{{\"vector\": [1, 0], \"k\": {k}, \"columns\": [\"title\"], \"exact\": true}}");
        let mut stream = BufReader::new(send(&server, &post(VECTORS, &body)));
        let (status, header, body) = answer(&mut stream);
        assert_eq!(status, 200);
        assert_eq!(header.contains("transfer-encoding: chunked"), pieces, "{header}");
        let reply: Value = serde_json::from_slice(&body).unwrap();
        let items = reply["items"].as_array().unwrap();
        assert_eq!(items.len(), k);
        assert!(items.iter().all(|i| i["columns"]["title"].as_str().unwrap().len() == 100));
        // The connection stays open after both.
        stream.get_mut().write_all(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        assert_eq!(answer(&mut stream).2, b"ok\n");
    }
    let many = json!({"requests": vec![json!({"vector": [1, 0], "k": 1000, "timeout_ms": 60_000}); 20]});
    let results = server.ask(VECTORS, many);
    assert!(results["results"].as_array().unwrap().iter().all(|r| r["items"].as_array().unwrap().len() == 1000));
}

#[test]
fn every_answer_has_an_id_and_every_path_a_problem() {
    let store = tempfile::tempdir().unwrap();
    put(store.path(), &tiny()).unwrap();
    let server = serve(store.path(), "");
    let ask = |head: &str, id: &str| {
        let text = format!("{head} HTTP/1.1\r\nhost: x\r\n{id}content-length: 0\r\nconnection: close\r\n\r\n");
        let mut stream = BufReader::new(send(&server, &text));
        if head.starts_with("HEAD") {
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            let (header, body) = text.split_once("\r\n\r\n").unwrap();
            assert_eq!(body, "");
            return (header[9..12].parse().unwrap(), header.to_ascii_lowercase(), Vec::new());
        }
        answer(&mut stream)
    };
    let id_of = |header: &str| header.split("x-request-id: ").nth(1).unwrap().lines().next().unwrap().to_owned();
    assert_eq!(id_of(&ask("GET /livez", "x-request-id: 7f3a-b\r\n").1), "7f3a-b");
    let made = id_of(&ask("GET /livez", "").1);
    assert!(made.len() == 16 && made.bytes().all(|b| b.is_ascii_hexdigit()), "{made}");
    assert_ne!(made, id_of(&ask("GET /livez", "x-request-id: a b\r\n").1), "an id with a space is not taken over");
    for (head, status, allow) in [
        ("GET /v1/models/%ff", 400, None),
        ("POST /v1/models/%ff:retrieve", 400, None),
        ("GET /v1/models/%ff/versions", 400, None),
        ("GET /v1/models/tiny/versions/%ff", 400, None),
        ("GET /v1/models/tiny/versions/01", 400, None),
        ("GET /v1/models/tiny/versions/+1", 400, None),
        ("GET /v1/models/tiny/versions/-1", 400, None),
        ("GET /v1/models/tiny/versions/99999999999999999999", 400, None),
        ("POST /v1/models/tiny/versions/01:retrieve", 400, None),
        ("POST /v1/models/tiny/versions/1:recall", 404, None),
        ("POST /v1/models/tiny/versions/1:", 404, None),
        ("GET /v1/models/tiny:", 404, None),
        ("GET /v1/models/tiny:recall", 404, None),
        ("GET /v1/models/tiny:retrieve", 405, Some("post")),
        ("PUT /v1/models/tiny:retrieve", 405, Some("post")),
        ("GET /v1/models/tiny/versions/1:rank", 405, Some("post")),
        ("GET /v1/models/tiny/versions/1:activate", 405, Some("post")),
        ("DELETE /v1/models/tiny", 405, Some("get, head")),
        ("POST /v1/models/tiny/versions/1", 405, Some("get, head")),
        ("POST /v1/models/tiny/versions", 405, Some("get, head")),
        ("POST /v1/models", 405, Some("get, head")),
        ("PATCH /metrics", 405, Some("get, head")),
        ("GET /v3", 404, None),
    ] {
        let (got, header, body) = ask(head, "");
        assert_eq!(got, status, "{head}: {header}");
        assert!(header.contains("content-type: application/problem+json"), "{head}: {header}");
        assert_eq!(header.split("allow: ").nth(1).map(|rest| rest.lines().next().unwrap()), allow, "{head}: {header}");
        assert_eq!(serde_json::from_slice::<Value>(&body).unwrap()["status"], status);
        id_of(&header);
    }
    for path in
        ["/livez", "/v1/models", "/v1/models/tiny", "/v1/models/tiny/versions/1", "/metrics", "/openapi.json", "/"]
    {
        let (status, header, _) = ask(&format!("HEAD {path}"), "");
        assert!(status == 200 && header.contains("content-length: "), "{path}: {header}");
    }
}

#[test]
fn the_log_names_requests_and_answers_name_no_folder() {
    let store = catalogue(10, 1);
    put(store.path(), &vectors(store.path(), "{\"id\": 7, \"embedding\": [1, 0]}\n")).unwrap();
    let log = store.path().join("log");
    let mut command = sterling();
    command.args(["serve", "--listen", "127.0.0.1:0", "--store"]).arg(store.path());
    command.stderr(std::fs::File::create(&log).unwrap());
    let index = store.path().join("vectors/1/index.safetensors");
    let bytes = std::fs::read(&index).unwrap();
    std::fs::write(&index, &bytes[..bytes.len() - 1]).unwrap();
    let server = Server::spawn_logged(&mut command);
    server.wait_ready();
    let mut response = agent()
        .post(format!("http://{}/v1/models/vectors/versions/1:activate", server.address))
        .header("x-request-id", "find-me")
        .send("")
        .unwrap();
    assert_eq!((response.status().as_u16(), &response.headers()["x-request-id"]), (500, &"find-me".parse().unwrap()));
    let text = response.body_mut().read_to_string().unwrap();
    let folder = store.path().to_str().unwrap();
    assert!(text.contains("index.safetensors") && !text.contains(folder), "{text}");
    let versions = server.get("/v1/models/vectors/versions").1;
    assert!(versions.contains("index.safetensors") && !versions.contains(folder), "{versions}");
    std::fs::write(store.path().join("vectors/wish.json"), "x").unwrap();
    until("a warning", || server.get("/readyz").1.contains("wish.json"));
    assert!(!server.get("/readyz").1.contains(folder), "{}", server.get("/readyz").1);
    let log = std::fs::read_to_string(&log).unwrap();
    let line = log.lines().find(|l| l.contains("find-me")).unwrap();
    assert!(line.contains("ERROR") && line.contains(folder), "{line}");
}

#[test]
fn a_long_body_is_answered_as_a_short_one() {
    let store = catalogue(10, 1);
    let server = serve(store.path(), "");
    for (verb, body) in [
        ("retrieve", json!({"vector": [1, 0], "k": 3})),
        ("retrieve", json!({"requests": [{"vector": [1, 0], "k": 3}, {"vector": [1]}, {"k": 0}]})),
        ("retrieve", json!({"vector": [1, 0], "filter": "nope:1"})),
        ("rank", json!({"vector": [1, 0], "items": [3, 4, 99]})),
        ("embed", json!({"features": {"a": 1}})),
        ("rank", json!({"vector": [1, 0]})),
    ] {
        let path = format!("/v1/models/vectors:{verb}");
        let (short, long) = (body.to_string(), format!("{body}{}", " ".repeat(100_000)));
        assert_eq!(server.post(&path, &short), server.post(&path, &long), "{short}");
    }
}

#[test]
fn work_of_filters_is_counted_and_bounded() {
    let store = tempfile::tempdir().unwrap();
    let line = |n: usize| {
        let codes = [n * 4, n * 4 + 1, n * 4 + 2];
        format!("{{\"id\": {n}, \"embedding\": [1, {n}], \"attributes\": {{\"code\": {codes:?}}}}}\n")
    };
    put(store.path(), &vectors(store.path(), &(0..3000).map(line).collect::<String>())).unwrap();
    let server = serve(store.path(), "");
    // Ranges: equalities would be planned as one cheap list of values.
    let range = |n: usize| format!("(code > {} AND code < {})", n * 3, n * 3 + 3);
    let leaves = |n: usize| (0..n / 2).map(range).collect::<Vec<_>>().join(" OR ");
    let asks = |filter: &str| json!({"vector": [1, 0], "exact": true, "k": 1, "filter": filter, "timeout_ms": 60_000});
    let many = |filter: &str| json!({"requests": vec![asks(filter); 1000]});
    let long = leaves(1000);
    assert_eq!(server.ask(VECTORS, asks(&long))["items"].as_array().unwrap().len(), 1);
    let (status, problem) = server.post(VECTORS, many(&long));
    assert_eq!((status, problem["code"].as_str()), (422, Some("too_costly")));
    assert!(problem["detail"].as_str().unwrap().contains("filter"), "{problem}");
    assert_eq!(server.post(VECTORS, many(&leaves(2))).0, 200);
}

#[test]
fn a_rejection_reaches_clients_that_send_first() {
    let store = catalogue(10, 1);
    let server = serve(store.path(), "");
    let body = " ".repeat(900_000);
    for (path, status) in [("/v1/models/nope:retrieve", 404), ("/nope", 404), ("/v1/models", 405)] {
        let mut stream = BufReader::new(send(&server, &post(path, &body)));
        assert_eq!(answer(&mut stream).0, status, "{path}");
        // The complete body was read, so the connection stays open.
        stream.get_mut().write_all(post(VECTORS, "{\"vector\": [1, 0]}").as_bytes()).unwrap();
        assert_eq!(answer(&mut stream).0, 200, "{path}");
    }
}

#[test]
fn unread_rejected_requests_are_answered_and_counted() {
    let store = catalogue(3000, 1);
    let server = serve(store.path(), "[engine]\nworkers = 1\ntimeout_ms = 5");
    let busy =
        json!({"requests": vec![json!({"vector": [1, 0], "exact": true, "k": 1000, "timeout_ms": 60_000}); 400]});
    let cheap = "{\"vector\": [1, 0], \"k\": 1}";
    let ask = |body: &str| {
        let length = body.len();
        format!("POST {VECTORS} HTTP/1.1\r\nhost: x\r\nx-request-id: mine-7\r\ncontent-length: {length}\r\n\r\n{body}")
    };
    // The text in pieces, and its number of requests: the second piece of the third is a request in a body.
    let cheap = ask(cheap);
    let nested = ask(&format!("{{}} {cheap}"));
    let split = nested.len() - cheap.len();
    let sendings = [
        (vec![cheap.clone()], 1),
        (vec![cheap.clone(), cheap.clone()], 2),
        (vec![nested[..split].to_owned(), nested[split..].to_owned()], 1),
        (vec![cheap[..cheap.len() - 5].to_owned(), cheap[cheap.len() - 5..].to_owned()], 1),
        (vec![format!("{cheap}{cheap}{cheap}")], 3),
        (vec!["GET /livez HTTP/1.1\r\nhost: x\r\n\r\n".to_owned(), cheap.clone()], 2),
    ];
    let mut refused = 0;
    std::thread::scope(|scope| {
        let work = scope.spawn(|| server.post(VECTORS, busy.clone()).0);
        let mut counted = |status: u16, header: &str, body: &[u8]| {
            if status != 503 {
                return false;
            }
            for expected in [
                "retry-after: ",
                "content-type: application/problem+json\r\n",
                "date: ",
                "x-request-id: mine-7\r\n",
                "server-timing: total;dur=",
            ] {
                assert!(header.contains(expected), "{expected}: {header}");
            }
            let problem: Value = serde_json::from_slice(body).unwrap();
            assert_eq!((problem["code"].as_str(), problem["status"].as_u64()), (Some("overloaded"), Some(503)));
            assert_eq!(
                (problem["title"].as_str(), problem["retryable"].as_bool()),
                (Some("Service Unavailable"), Some(true))
            );
            assert!(problem["detail"].as_str().unwrap().contains("in time"), "{problem}");
            refused += 1;
            true
        };
        until("refusals", || {
            let mut stream = BufReader::new(send(&server, &cheap));
            let (status, header, body) = answer(&mut stream);
            counted(status, &header, &body)
        });
        for (pieces, answers) in sendings {
            let mut stream = BufReader::new(send(&server, ""));
            for _ in 0..3 {
                for piece in &pieces {
                    stream.get_mut().write_all(piece.as_bytes()).unwrap();
                    std::thread::sleep(Duration::from_millis(2));
                }
                for _ in 0..answers {
                    let (status, header, body) = answer(&mut stream);
                    counted(status, &header, &body);
                }
            }
            // As many answers as requests arrived, and no more.
            stream.get_mut().set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            assert!(stream.read(&mut [0]).is_err(), "{pieces:?}");
        }
        // Requests that may wait are accepted despite the server's default timeout: a body that names its timeout, complete or in
        // pieces, alone or in a list.
        let patient = ask("{\"vector\": [1, 0], \"k\": 1, \"timeout_ms\": 60000}");
        let list = ask("{\"requests\": [{\"vector\": [1, 0], \"timeout_ms\" : 60000}]}");
        let split = patient.len() - 30;
        for pieces in [vec![&patient[..]], vec![&patient[..split], &patient[split..]], vec![&list[..]]] {
            let mut stream = BufReader::new(send(&server, ""));
            for piece in &pieces {
                stream.get_mut().write_all(piece.as_bytes()).unwrap();
                std::thread::sleep(Duration::from_millis(2));
            }
            let (status, _, body) = answer(&mut stream);
            let reported: Value = serde_json::from_slice(&body).unwrap();
            assert!(status == 200 && reported["results"][0]["problem"].is_null(), "{pieces:?}: {reported}");
        }
        assert_eq!(work.join().unwrap(), 200);
    });
    let reported = metric(&server, "sterling_requests_total{call=\"retrieve\",status=\"503\",model=\"vectors\"}");
    assert!(reported as usize == refused && refused > 10, "{reported} reported, {refused} seen");
    assert_eq!(server.post(VECTORS, json!({"vector": [1, 0], "timeout_ms": 60_000})).0, 200);
}
