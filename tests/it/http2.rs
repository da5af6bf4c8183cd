//! HTTP/2 with prior knowledge: the client speaks it from the first byte.

use std::future::poll_fn;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use axum::body::{Body, to_bytes};
use axum::http::{Request, Version};
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::edge::metric;
use crate::support::{Server, catalogue, ids, serve, until};

const VECTORS: &str = "/v1/models/vectors:retrieve";

async fn connect(server: &Server, window: u32) -> SendRequest<Body> {
    let stream = tokio::net::TcpStream::connect(&server.address).await.unwrap();
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder.initial_stream_window_size(window);
    let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    sender
}

fn post(server: &Server, path: &str, body: &Value) -> Request<Body> {
    let uri = format!("http://{}{path}", server.address);
    Request::builder().method("POST").uri(uri).body(Body::from(body.to_string())).unwrap()
}

async fn ask(sender: &mut SendRequest<Body>, request: Request<Body>) -> (u16, Value) {
    let response = sender.send_request(request).await.unwrap();
    assert_eq!(response.version(), Version::HTTP_2);
    let status = response.status().as_u16();
    let bytes = to_bytes(Body::new(response.into_body()), 1 << 28).await.unwrap();
    (status, serde_json::from_slice(&bytes).unwrap())
}

#[test]
fn many_requests_side_by_side_are_answered_as_those_of_http1() {
    let store = catalogue(3000, 50);
    let server = serve(store.path(), "drain_ms = 0");
    let bodies: Vec<Value> = (0..200)
        .map(|n| json!({"vector": [1, n], "k": 1 + n * 3, "columns": ["title"], "timeout_ms": 30_000}))
        .collect();
    let wanted: Vec<Value> = bodies.iter().map(|body| server.ask(VECTORS, body)).collect();
    Runtime::new().unwrap().block_on(async {
        let sender = connect(&server, 64 << 10).await;
        // As many at a time as two slow workers answer before any deadline.
        for (bodies, wanted) in bodies.chunks(16).zip(wanted.chunks(16)) {
            let calls = bodies.iter().map(|body| {
                let (mut sender, request) = (sender.clone(), post(&server, VECTORS, body));
                async move { ask(&mut sender, request).await }
            });
            for (answer, wanted) in futures_util::future::join_all(calls).await.into_iter().zip(wanted) {
                assert_eq!(answer.0, 200, "{}", answer.1["detail"]);
                assert!(answer.1 == *wanted);
            }
        }
        let mut sender = sender;
        let large = json!({"vector": [1, 0], "exclude": (0..90_000).collect::<Vec<_>>()});
        let (status, answer) = ask(&mut sender, post(&server, VECTORS, &large)).await;
        assert_eq!((status, ids(&answer).len()), (200, 0), "a body larger than a window");
        let (status, problem) = ask(&mut sender, post(&server, VECTORS, &json!({"kk": 1}))).await;
        assert_eq!((status, problem["code"].as_str()), (400, Some("invalid")));
        let site = |origin: &str| {
            let mut request = post(&server, VECTORS, &bodies[0]);
            request.headers_mut().insert("origin", format!("http://{origin}").parse().unwrap());
            request
        };
        assert_eq!(ask(&mut sender, site(&server.address)).await.0, 200, "its own page may call it");
        assert_eq!(ask(&mut sender, site("elsewhere")).await.0, 403);
        let long = Request::builder().uri(format!("http://{}/livez", server.address)).header("x", "y".repeat(100_000));
        match sender.send_request(long.body(Body::empty()).unwrap()).await {
            Ok(refused) => assert_eq!(refused.status().as_u16(), 431),
            Err(error) => assert!(!error.is_user(), "{error}"),
        }
    });
    assert_eq!(server.get("/livez").0, 200);
    assert_eq!(server.stop(), Some(0));
}

#[test]
fn running_requests_are_answered_when_the_server_ends() {
    let store = catalogue(3000, 2000);
    let server = serve(store.path(), "drain_ms = 0\nstop_ms = 20000");
    let body = json!({"vector": [1, 0], "k": 3000, "candidates": 3000, "columns": ["title"]});
    Runtime::new().unwrap().block_on(async {
        let mut sender = connect(&server, 64 << 10).await;
        let response = sender.send_request(post(&server, VECTORS, &body)).await.unwrap();
        server.signal("TERM");
        until("a closed socket", || TcpStream::connect(&server.address).is_err());
        let bytes = to_bytes(Body::new(response.into_body()), 1 << 28).await.unwrap();
        assert_eq!(ids(&serde_json::from_slice(&bytes).unwrap()).len(), 3000);
        drop(sender);
    });
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn an_unread_answer_ends_alone() {
    let store = catalogue(3000, 2000);
    let server = serve(store.path(), "stall_ms = 1000\nidle_ms = 600000");
    // Larger than a window, the last one by so little that HTTP/2 buffers all of it at once.
    for k in [3000, 35] {
        let body = json!({"vector": [1, 0], "k": k, "candidates": 3000, "columns": ["title"]});
        let ended = metric(&server, "sterling_streams_cut_total");
        Runtime::new().unwrap().block_on(async {
            let mut sender = connect(&server, 64 << 10).await;
            let unread = sender.send_request(post(&server, VECTORS, &body)).await.unwrap();
            assert_eq!(unread.status().as_u16(), 200);
            let (start, mut neighbours) = (Instant::now(), 0);
            while metric(&server, "sterling_streams_cut_total") == ended {
                let (status, answer) =
                    ask(&mut sender, post(&server, VECTORS, &json!({"vector": [1, 0], "k": 3}))).await;
                assert_eq!((status, ids(&answer).len()), (200, 3), "{k}: a neighbour");
                neighbours += 1;
                assert!(start.elapsed() < Duration::from_secs(30), "{k}: it is still open");
            }
            assert!(neighbours > 1 && !sender.is_closed());
            let read = to_bytes(Body::new(unread.into_body()), 1 << 28).await;
            assert!(read.is_err(), "{k}: its end is reported");
            let large = json!({"vector": [1, 0], "k": 3000, "candidates": 3000, "columns": ["title"]});
            let (status, answer) = ask(&mut sender, post(&server, VECTORS, &large)).await;
            assert_eq!((status, ids(&answer).len()), (200, 3000), "{k}: the connection goes on");
        });
    }
    assert_eq!(metric(&server, "sterling_connections_cut_total{reason=\"stalled\"}"), 0.0);
}

#[test]
fn clients_that_reset_repeatedly_are_closed() {
    let store = catalogue(1000, 10);
    let server = serve(store.path(), "");
    let body = json!({"vector": [1, 0], "k": 1000, "exact": true});
    Runtime::new().unwrap().block_on(async {
        let sender = connect(&server, 64 << 10).await;
        let start = Instant::now();
        while !sender.is_closed() && start.elapsed() < Duration::from_secs(30) {
            let mut sender = sender.clone();
            let mut call = pin!(sender.send_request(post(&server, VECTORS, &body)));
            poll_fn(|cx| {
                let _ = call.as_mut().poll(cx);
                Poll::Ready(())
            })
            .await;
            tokio::task::yield_now().await;
        }
        assert!(sender.is_closed());
    });
    assert_eq!(server.get("/livez").0, 200);
}

#[test]
fn a_prefix_of_the_http2_preface_is_not_http2() {
    let store = catalogue(10, 1);
    let server = serve(store.path(), "header_ms = 1500\nidle_ms = 1500");
    let send = |text: &str| {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        let mut answer = Vec::new();
        match stream.read_to_end(&mut answer) {
            Err(e) if e.kind() != ErrorKind::ConnectionReset => panic!("{text:?}: {e}"),
            _ => String::from_utf8_lossy(&answer).into_owned(),
        }
    };
    for text in ["P", "PR", "PRI * HTTP", "PRI * HTTP/1.1\r\n\r\n", "PRI / HTTP/2.0\r\n\r\n"] {
        let answer = send(text);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{text:?}: {answer}");
    }
    // The start of the preface, without its rest.
    send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nGET / HTTP/1.1\r\n\r\n");
    let answer = send("POST /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 405"), "{answer}");
}
