//! Tests with correct and faulty servers of a host.

#![allow(clippy::unwrap_used)]

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::thread::spawn;

use super::super::peer::FAILURES_MAX;
use super::super::protocol::{Holdings, MEDIA_TYPE, write};
use super::super::rows::{RowsCall, RowsQuestion, RowsReply, SliceRows, read_rows_call};
use super::*;
use sterling_core::error::Kind;
use sterling_embedding::tiers::slices::SliceName;

type RecordedCalls = (&'static str, &'static str, Vec<u8>);

/// Reads one request: path, body and the header line that the answer repeats; `None` at the end of the connection.
fn request(stream: &mut TcpStream) -> Option<(String, Vec<u8>, String)> {
    let mut text = Vec::new();
    let mut byte = [0];
    while !text.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).ok()?;
        text.push(byte[0]);
    }
    let head = String::from_utf8(text).unwrap().to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok()).unwrap_or(0);
    let mut body = vec![0; length];
    stream.read_exact(&mut body).ok()?;
    let call = head.lines().find(|line| line.starts_with("sterling-call: "))?.to_owned();
    Some((head.split(' ').nth(1)?.to_owned(), body, call))
}

/// Starts a server that answers calls for rows by `say`.
fn server(say: impl Fn(&RowsCall) -> RecordedCalls + Send + Sync + 'static) -> PeerSlice {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, say) = (listener.local_addr().unwrap(), Arc::new(say));
    spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, say) = (stream.unwrap(), say.clone());
            spawn(move || {
                while let Some((path, body, call)) = request(&mut stream) {
                    let (status, kind, body) = match path.ends_with(":rows") {
                        true => say(&read_rows_call(&body).unwrap()),
                        false => ("200 OK", MEDIA_TYPE, write(&Holdings::default()).unwrap()),
                    };
                    let length = body.len();
                    let head = format!(
                        "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\n{call}\r\ncontent-length: {length}\r\n\r\n"
                    );
                    if stream.write_all(&[head.as_bytes(), &body].concat()).is_err() {
                        return;
                    }
                }
            });
        }
    });
    let name = SliceName { model: "m".into(), table: "t".into(), content: "c".into(), rows: [5, 9], columns: [0, 2] };
    let host = PeerHost { name: "h1".into(), servers: vec![address.to_string()] };
    PeerSlice { host, name, row_bytes: 2, edition: "e".into(), timeout: Duration::from_millis(500) }
}

/// Rows of two bytes, each equal to the row's number.
fn given(question: &RowsQuestion) -> SliceRows {
    let bytes = question.rows.iter().flat_map(|row| [*row as u8; 2]).collect();
    SliceRows { content: question.content.clone(), bytes }
}

fn reply(call: &RowsCall, change: impl Fn(&mut RowsReply)) -> RecordedCalls {
    let mut reply = RowsReply { given: call.questions.iter().map(|question| Some(given(question))).collect() };
    change(&mut reply);
    ("200 OK", MEDIA_TYPE, write(&reply).unwrap())
}

fn asked(peers: &Peers, slice: &PeerSlice, rows: &[u64]) -> Fetched {
    let source = peers.open(slice);
    assert_eq!((source.rows(), source.row_bytes()), (4, 2));
    let pending = source.begin(rows.to_vec(), &Lookup::default());
    source.send();
    pending.wait().unwrap()
}

fn peers() -> Peers {
    Peers::open(&PeerOptions { wait_ms: 0, ..PeerOptions::default() }).unwrap()
}

#[test]
fn rows_of_a_version_travel_in_one_call() {
    let calls = Arc::new(Mutex::new(Vec::new()));
    let seen = calls.clone();
    let slice = server(move |call| {
        seen.lock().unwrap().push(call.questions.len());
        reply(call, |_| ())
    });
    let other = PeerSlice { name: SliceName { table: "u".into(), ..slice.name.clone() }, ..slice.clone() };
    let (peers, later) = (peers(), PeerSlice { edition: "f".into(), ..slice.clone() });
    peers.wait_for(&[slice.clone(), other.clone()]).unwrap();
    let sources = [&slice, &other, &later].map(|slice| peers.open(slice));
    let pending: Vec<_> =
        sources.iter().zip([vec![0, 3], vec![2], vec![1]]).map(|(s, r)| s.begin(r, &Lookup::default())).collect();
    sources.iter().for_each(|source| source.send());
    let came: Vec<Vec<u8>> = pending.into_iter().map(|pending| pending.wait().unwrap().bytes).collect();
    assert_eq!(came, [vec![0, 0, 3, 3], vec![2, 2], vec![1, 1]]);
    let mut calls = calls.lock().unwrap().clone();
    calls[1..].sort_unstable();
    assert_eq!(calls, [2, 1, 2], "one call to wait, one a version");
    assert!(peers.troubles().is_empty(), "{:?}", peers.troubles());
    let late = Lookup { deadline: Some(std::time::Instant::now()), ..Lookup::default() };
    let late = sources[0].begin(vec![0], &late).wait().unwrap();
    assert_eq!(late.states, [RowState::Degraded], "no time is left");
}

#[test]
fn answers_of_other_rows_are_never_accepted() {
    let says: [fn(&RowsCall) -> RecordedCalls; 10] = [
        |call| reply(call, |reply| reply.given[0] = None),
        |call| reply(call, |reply| reply.given[0].as_mut().unwrap().content = "d".into()),
        |call| reply(call, |reply| reply.given[0].as_mut().unwrap().bytes.push(0)),
        |call| reply(call, |reply| reply.given[0].as_mut().unwrap().bytes.clear()),
        |call| reply(call, |reply| reply.given.push(None)),
        |call| reply(call, |reply| reply.given.clear()),
        |_| ("200 OK", MEDIA_TYPE, vec![0xff; 64]),
        |_| ("200 OK", MEDIA_TYPE, Vec::new()),
        |_| ("200 OK", "text/html", b"<html>".to_vec()),
        |_| {
            (
                "503 Service Unavailable",
                "application/problem+json",
                br#"{"code": "overloaded", "detail": "x"}"#.to_vec(),
            )
        },
    ];
    for (number, say) in says.into_iter().enumerate() {
        let (peers, slice) = (peers(), server(say));
        // A query for zero rows gets zero rows from any server.
        let waited = peers.wait_for(std::slice::from_ref(&slice));
        assert!(waited.is_err() || number == 3, "{number}");
        for _ in 0..3 {
            let came = asked(&peers, &slice, &[1, 2]);
            assert_eq!(came.states, [RowState::Degraded; 2], "{number}");
            assert_eq!(came.bytes, [0; 4], "{number}");
        }
    }
    let error = peers().wait_for(&[server(|call| reply(call, |reply| reply.given[0] = None))]).unwrap_err();
    assert!(
        error.kind() == Kind::NotReady && error.to_string().contains("host `h1` does not have the rows m/t-c"),
        "{error}"
    );
}

#[test]
fn a_lost_host_is_skipped_after_some_calls_and_reported() {
    let removed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut slice = server(|call| reply(call, |_| ()));
    slice.host.servers = vec![removed.to_string()];
    let peers = peers();
    assert!(peers.wait_for(std::slice::from_ref(&slice)).is_err());
    for _ in 0..FAILURES_MAX {
        assert_eq!(asked(&peers, &slice, &[0]).states, [RowState::Degraded]);
    }
    assert!(peers.of(&slice.host).breaker.is_open());
    assert!(
        peers.troubles()[0].starts_with(&format!("host `h1`: {removed} returns no rows: ")),
        "{:?}",
        peers.troubles()
    );
}

#[test]
fn a_host_that_answers_and_lacks_the_rows_is_reported_until_it_has_them() {
    use std::sync::atomic::{AtomicBool, Ordering};

    let holds = Arc::new(AtomicBool::new(true));
    let held = holds.clone();
    let slice = server(move |call| match held.load(Ordering::Relaxed) {
        true => reply(call, |_| ()),
        false => reply(call, |reply| reply.given.iter_mut().for_each(|given| *given = None)),
    });
    let peers = peers();
    let source = peers.open(&slice);
    peers.wait_for(std::slice::from_ref(&slice)).unwrap();
    let until = |what: &str, is_so: &dyn Fn() -> bool| {
        let start = Instant::now();
        while !is_so() {
            assert!(start.elapsed() < Duration::from_secs(60), "{what}: {:?}", peers.troubles());
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    let peer = peers.of(&slice.host);
    assert!(peers.troubles().is_empty());
    holds.store(false, Ordering::Relaxed);
    let warning = "host `h1`: no server of the host returns m/t-c, rows [5, 9], columns [0, 2]: ";
    until("the warning", &|| peers.troubles().iter().any(|trouble| trouble.starts_with(warning)));
    assert!(!peer.breaker.is_open(), "it answers");
    holds.store(true, Ordering::Relaxed);
    until("the warning goes", &|| peers.troubles().is_empty());
    holds.store(false, Ordering::Relaxed);
    until("the warning", &|| !peers.troubles().is_empty());
    drop(source);
    until("it gets no calls", &|| peers.troubles().is_empty());
}
