//! Clients that pipeline requests, stop within a header, omit the host, or send bodies that are not read.

use std::io::{BufReader, ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::edge::{VECTORS, answer, is_closed, metric, post, send};
use crate::support::{Server, catalogue, serve, sterling};

const CUT: &str = "sterling_connections_cut_total{reason=\"header\"}";
const LIVEZ: &str = "GET /livez HTTP/1.1\r\nhost: x\r\n\r\n";

fn chunked(body: &str) -> String {
    let head = format!("POST {VECTORS} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n");
    format!("{head}{:x}\r\n{body}\r\n0\r\n\r\n", body.len())
}

#[test]
fn partial_headers_are_timed_from_their_first_byte() {
    let store = catalogue(10, 1);
    let server = serve(store.path(), "header_ms = 300\nidle_ms = 600000");
    let query = "{\"vector\": [1, 0], \"k\": 1}";
    let (with_length, coded) = (post(VECTORS, query), chunked(query));
    let (head, body) = with_length.split_at(with_length.len() - query.len());
    let pair = format!("{LIVEZ}{with_length}");
    let half = "GET /livez HTTP/1.1\r\nhost:";
    let sendings: [(&[&str], usize); 8] = [
        (&[], 0),
        (&[LIVEZ], 1),
        (&[&with_length], 1),
        (&[&coded], 1),
        (&[head, body], 1),
        (&[&pair], 2),
        (&[&pair, &coded, LIVEZ], 4),
        (&["GET /livez HTTP/1.1\r\n", "host: x\r\n\r\n"], 1),
    ];
    for (n, (pieces, answers)) in sendings.into_iter().enumerate() {
        // Half a header with the last piece, and the same without it: that connection is merely idle.
        for ends_half in [true, false] {
            let mut stream = BufReader::new(send(&server, ""));
            for (at, piece) in pieces.iter().enumerate() {
                let is_last = at + 1 == pieces.len();
                let text = if is_last && ends_half { format!("{piece}{half}") } else { (*piece).to_owned() };
                stream.get_mut().write_all(text.as_bytes()).unwrap();
                std::thread::sleep(Duration::from_millis(20));
            }
            if pieces.is_empty() && ends_half {
                stream.get_mut().write_all(half.as_bytes()).unwrap();
            }
            for _ in 0..answers {
                assert_eq!(answer(&mut stream).0, 200, "{pieces:?}");
            }
            if ends_half {
                assert!(is_closed(stream.get_mut()), "{pieces:?}");
                assert_eq!(metric(&server, CUT), (n + 1) as f64, "{pieces:?}");
            } else {
                std::thread::sleep(Duration::from_millis(900));
                stream.get_mut().write_all(LIVEZ.as_bytes()).unwrap();
                assert_eq!(answer(&mut stream).0, 200, "{pieces:?}: it was only idle");
            }
        }
    }
}

#[test]
fn pipelined_requests_are_answered_in_their_order_however_they_are_split() {
    let store = catalogue(10, 1);
    let server = serve(store.path(), "header_ms = 20000");
    let query = |k: usize| format!("{{\"vector\": [1, 0], \"k\": {k}}}");
    let mut all = String::new();
    let mut wanted = Vec::new();
    for k in 1..=4 {
        all += &post(VECTORS, &query(k));
        all += LIVEZ;
        all += &chunked(&query(k));
        all += &post("/nope", &query(k));
        wanted.extend([k, 0, k, 404]);
    }
    let mut state = 7_u64;
    for most in [1, 3, 20, 100, 400, 100_000] {
        let mut stream = BufReader::new(send(&server, ""));
        let mut rest = all.as_bytes();
        while !rest.is_empty() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let count = (1 + (state >> 33) as usize % most).min(rest.len());
            let (piece, left) = rest.split_at(count);
            stream.get_mut().write_all(piece).unwrap();
            rest = left;
            if state >> 60 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        for wanted in &wanted {
            let (status, _, body) = answer(&mut stream);
            let items = serde_json::from_slice(&body)
                .map_or(0, |reported: Value| reported["items"].as_array().map_or(0, Vec::len));
            assert_eq!(if status == 200 { items } else { usize::from(status) }, *wanted, "{most}");
        }
    }
}

#[test]
fn an_early_rejection_reaches_clients_that_send_more() {
    let store = catalogue(10, 1);
    let server = serve(store.path(), "");
    let head = |path: &str, more: &str| format!("POST {path} HTTP/1.1\r\nhost: x\r\n{more}\r\n");
    let length = |bytes: usize| format!("content-length: {bytes}\r\n");
    let coded = "transfer-encoding: chunked\r\n".to_owned();
    let expecting = format!("expect: 100-continue\r\n{}", length(40 << 20));
    for (path, more, bytes, status) in [
        ("/v1/models/nope:retrieve", length(8 << 20), 8 << 20, 404),
        (VECTORS, length(40 << 20), 40 << 20, 413),
        ("/v1/models/nope:retrieve", coded.clone(), 8 << 20, 404),
        (VECTORS, coded, 40 << 20, 413),
        (VECTORS, expecting, 0, 413),
    ] {
        for _ in 0..3 {
            let mut stream = send(&server, &head(path, &more));
            let piece = match more.contains("chunked") {
                true => format!("10000\r\n{}\r\n", " ".repeat(0x10000)),
                false => " ".repeat(0x10000),
            };
            for _ in 0..bytes / 0x10000 {
                stream.write_all(piece.as_bytes()).expect("the server reads on");
            }
            if more.contains("chunked") {
                stream.write_all(b"0\r\n\r\n").unwrap();
            }
            let mut stream = BufReader::new(stream);
            let (got, header, body) = answer(&mut stream);
            assert_eq!(got, status, "{path} {more}");
            assert!(header.contains("connection: close"), "{path} {more}: {header}");
            assert_eq!(serde_json::from_slice::<Value>(&body).unwrap()["status"], status);
            assert!(is_closed(stream.get_mut()), "{path} {more}");
        }
    }
    // A small rest of a body is read to its end, and the connection stays open.
    let mut stream = BufReader::new(send(&server, &post("/v1/models/nope:retrieve", &" ".repeat(500_000))));
    let (status, header, _) = answer(&mut stream);
    assert!(status == 404 && !header.contains("connection: close"), "{header}");
    stream.get_mut().write_all(LIVEZ.as_bytes()).unwrap();
    assert_eq!(answer(&mut stream).0, 200);
}

#[test]
fn a_header_names_one_host_and_no_coding_but_chunked() {
    let store = catalogue(10, 1);
    let server = serve(store.path(), "");
    for (text, status) in [
        ("GET /livez HTTP/1.1\r\nhost: x\r\n\r\n", 200),
        ("GET /livez HTTP/1.1\r\n\r\n", 400),
        ("GET /livez HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n", 400),
        ("GET /livez HTTP/1.1\r\nhost: a b\r\n\r\n", 400),
        ("GET /livez HTTP/1.0\r\n\r\n", 200),
        ("POST /v1/models/vectors:retrieve HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}", 400),
        ("POST /livez HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        ("POST /livez HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 405),
    ] {
        assert_eq!(answer(&mut BufReader::new(send(&server, text))).0, status, "{text:?}");
    }
    // The explicit default port of a scheme is the same origin: RFC 9110, 4.2.3.
    for (origin, host, status) in [
        ("http://a.example", "a.example:80", 200),
        ("http://a.example:80", "a.example", 200),
        ("https://a.example", "a.example:443", 200),
        ("http://a.example", "a.example:81", 403),
        ("http://b.example", "a.example", 403),
    ] {
        let request =
            post(VECTORS, "{\"vector\": [1, 0]}").replace("host: x", &format!("host: {host}\r\norigin: {origin}"));
        let (got, header, _) = answer(&mut BufReader::new(send(&server, &request)));
        assert_eq!(got, status, "{origin} {host}");
        assert_eq!(header.contains("vary: accept\r\n"), status == 200, "{header}");
    }
}

/// Returns an HTTP/2 frame.
fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags, 0, 0, 0, stream][..], payload].concat()
}

fn connect(server: &Server) -> TcpStream {
    let mut stream = TcpStream::connect(&server.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
    stream.write_all(&frame(4, 0, 0, &[])).unwrap();
    stream
}

/// Reads until the other side closes.
fn read_to_end(stream: &mut TcpStream) {
    match stream.read_to_end(&mut Vec::new()) {
        Err(e) if e.kind() != ErrorKind::ConnectionReset => panic!("{e}"),
        _ => {}
    }
}

#[test]
fn headers_of_http2_have_the_time_of_a_header() {
    let store = catalogue(10, 1);
    let server = serve(store.path(), "header_ms = 300\nidle_ms = 600000");
    let halves: [Vec<u8>; 3] = [
        frame(1, 1, 1, b"\x82\x84\x86"),
        frame(1, 5, 1, b"\x82\x84\x86")[..10].to_vec(),
        [frame(1, 1, 1, b"\x82\x84\x86"), frame(9, 0, 1, b"\0\x01a\x01b")].concat(),
    ];
    for (n, half) in halves.iter().enumerate() {
        let mut stream = connect(&server);
        let start = Instant::now();
        stream.write_all(half).unwrap();
        read_to_end(&mut stream);
        assert!(start.elapsed() >= Duration::from_millis(300) && start.elapsed() < Duration::from_secs(20));
        assert_eq!(metric(&server, CUT), (n + 1) as f64, "{half:?}");
    }
    let mut idle = connect(&server);
    std::thread::sleep(Duration::from_millis(900));
    idle.write_all(&frame(6, 0, 0, &[7; 8])).unwrap();
    let mut answer = vec![0; 1 << 10];
    let mut come = Vec::new();
    while !come.windows(8).any(|some| some == [7; 8]) {
        let count = idle.read(&mut answer).unwrap();
        assert!(count > 0, "idle connections stay open");
        come.extend_from_slice(&answer[..count]);
    }
}

#[test]
fn a_flood_of_frames_that_ask_for_nothing_ends() {
    let store = catalogue(10, 1);
    let server = serve(store.path(), "");
    let cut = "sterling_connections_cut_total{reason=\"frames\"}";
    for (n, flood) in [frame(6, 0, 0, &[0; 8]), frame(4, 0, 0, &[]), frame(8, 0, 0, &[0, 0, 0, 1])].iter().enumerate() {
        let mut stream = connect(&server);
        let mut reader = stream.try_clone().unwrap();
        let read = std::thread::spawn(move || read_to_end(&mut reader));
        let many = flood.repeat(500);
        let start = Instant::now();
        while stream.write_all(&many).is_ok() {
            assert!(start.elapsed() < Duration::from_secs(30), "it goes on");
        }
        read.join().unwrap();
        assert_eq!(metric(&server, cut), (n + 1) as f64, "{flood:?}");
    }
}

#[test]
fn a_server_listens_at_a_name() {
    let store = catalogue(3, 1);
    let mut command = sterling();
    command.args(["serve", "--listen", "localhost:0", "--store"]).arg(store.path());
    let server = Server::spawn(&mut command);
    server.wait_ready();
    assert_eq!(
        server.ask(VECTORS, json!({"vector": [1, 0], "k": null, "filter": null}))["items"].as_array().unwrap().len(),
        3
    );
}
