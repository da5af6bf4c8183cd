//! `sterling bench` against real servers: what it sends, what it counts, what it says when its run is worth nothing.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};

use serde_json::Value;

use crate::support::{Server, put, run, sterling, tiny, tiny_package};

/// A server of the tiny model and the folder of its store.
fn served() -> (Server, tempfile::TempDir) {
    let store = tempfile::tempdir().unwrap();
    put(store.path(), &tiny()).unwrap();
    (Server::start(store.path()), store)
}

/// Runs the generator with JSON out: the exit code, the lines, what it said of errors.
fn bench(url: &str, arguments: &[&str]) -> (i32, Vec<Value>, String) {
    let (code, said, errors) = run(&[&["bench", url, "--json", "--seconds", "0.5"], arguments].concat());
    (code, said.lines().map(|line| serde_json::from_str(line).unwrap()).collect(), errors)
}

/// A file of requests in the folder.
fn requests(folder: &tempfile::TempDir, name: &str, lines: &[&str]) -> String {
    let path = folder.path().join(name);
    std::fs::write(&path, lines.join("\n")).unwrap();
    path.display().to_string()
}

#[test]
fn every_request_is_sent_and_counted_by_its_answer() {
    let (server, folder) = served();
    let url = format!("http://{}", server.address);
    let good =
        requests(&folder, "good.jsonl", &["{\"user\": \"x\", \"features\": {}, \"k\": 3, \"timeout_ms\": 60000}"]);
    let bad = requests(&folder, "bad.jsonl", &["{\"k\": 0}", "{\"features\": {}, \"filter\": \"(\"}"]);
    let mixed =
        ["--requests", &good, "--beside", &bad, "--beside-rate", "40", "--rate", "60", "--arrivals", "constant"];
    let (_, lines, errors) = bench(&url, &[&mixed[..], &["--idle-connections", "5", "--slow-readers", "2"]].concat());
    assert_eq!(lines.len(), 1, "{errors}");
    let [main, beside] = [0, 1].map(|n| &lines[0]["classes"][n]);
    assert_eq!((&main["class"], &main["requests"], &main["ok"]), (&"main".into(), &30.into(), &30.into()), "{main}");
    assert_eq!((&beside["class"], &beside["requests"], &beside["other"]), (&"beside".into(), &20.into(), &20.into()));
    assert!(main["answered_ms"]["p50"].as_f64().unwrap() > 0.0 && main["refused_ms"].is_null(), "{main}");
    assert!(lines[0]["generator"]["late_ms_p99"].as_f64().unwrap() >= 0.0, "{}", lines[0]);
    // The server counted the same.
    let metrics = server.get("/metrics").1;
    let answered = |status: &str| {
        let wanted = format!("status=\"{status}\"");
        let lines = metrics.lines().filter(|l| l.starts_with("sterling_requests_total") && l.contains("retrieve"));
        lines.filter(|l| l.contains(&wanted)).filter_map(|l| l.rsplit(' ').next()?.parse::<u64>().ok()).sum::<u64>()
    };
    assert_eq!((answered("200"), answered("400")), (32, 20), "the slow readers asked too: {metrics}");
}

#[test]
fn random_vectors_need_no_file_and_a_peer_is_measured_in_turns() {
    let (server, _folder) = served();
    let url = format!("http://{}", server.address);
    let (_, lines, errors) =
        bench(&url, &["--rate", "20", "--timeout-ms", "60000", "--peer", &url, "--rounds", "2", "--model", "tiny"]);
    // Debug builds on a busy machine may be late, and a void run is said to be void.
    if lines.iter().all(|line| line["void"].is_null()) {
        let rounds: Vec<i64> = lines.iter().filter_map(|line| line["round"].as_i64()).collect();
        assert_eq!(rounds, [1, 1, 2, 2], "{errors}");
        let compared: Vec<&str> = lines.iter().filter_map(|line| line["median_of"].as_str()).collect();
        assert_eq!(compared, ["goodput", "answered p50 ms", "answered p99 ms"]);
        assert_eq!(lines[0]["classes"][0]["ok"], lines[0]["classes"][0]["requests"]);
    } else {
        assert!(errors.contains("the run is void"), "{errors}");
    }
}

#[test]
fn the_peak_is_looked_for_and_told() {
    let (server, _folder) = served();
    let url = format!("http://{}", server.address);
    let (code, lines, errors) = bench(&url, &["--find-peak", "--rate", "20000", "--timeout-ms", "50"]);
    assert_eq!(code, 0, "{errors}");
    let peak = &lines.last().unwrap()["peak"];
    assert!(lines.len() >= 5 && peak["rate"].as_f64().is_some() && peak["goodput"].as_f64().is_some(), "{lines:?}");
    assert!(lines[..lines.len() - 1].iter().all(|line| line["tried_rate"].as_f64().is_some()), "{lines:?}");
}

/// A server that says which model it has, and leaves all else that it is asked to somebody.
fn tell_a_model(listener: &TcpListener, otherwise: &mut dyn FnMut(TcpStream)) {
    for stream in listener.incoming() {
        let mut stream = stream.unwrap();
        let mut head = [0; 4096];
        let read = stream.read(&mut head).unwrap_or(0);
        if head[..read].starts_with(b"GET") {
            let body = "{\"models\": [{\"name\": \"m\", \"dimension\": 2}]}";
            let length = body.len();
            write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}").unwrap();
        } else {
            otherwise(stream);
        }
    }
}

#[test]
fn a_server_that_hangs_up_or_never_answers_is_counted_as_such() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    // It tells its model, and hangs up on every retrieval.
    std::thread::spawn(move || tell_a_model(&listener, &mut drop));
    let (_, lines, errors) = bench(&url, &["--rate", "40", "--arrivals", "constant"]);
    assert_eq!(lines[0]["classes"][0]["errors"], 20, "{lines:?} {errors}");

    // Time-outs of the client end what has no answer, and one connection cannot carry the others.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    std::thread::spawn(move || {
        let mut kept = Vec::new();
        tell_a_model(&silent, &mut |stream| kept.push(stream));
    });
    let few = ["--rate", "20", "--arrivals", "constant", "--connections", "1", "--timeout-ms", "100"];
    let (code, lines, errors) = bench(&url, &few);
    let class = &lines[0]["classes"][0];
    assert_eq!((code, &class["no_answer"], &class["unsent"]), (1, &1.into(), &9.into()), "{lines:?}");
    assert!(errors.contains("the run is void"), "{errors}");
}

#[test]
fn what_cannot_be_measured_is_said_in_one_line() {
    let (server, folder) = served();
    let url = format!("http://{}", server.address);
    let items = tiny_package().join("items.jsonl").display().to_string();
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let nobody = format!("http://{nobody}");
    let empty = requests(&folder, "empty.jsonl", &[]);
    for (code, arguments, reason) in [
        (1, vec![nobody.as_str()], nobody.as_str()),
        (2, vec![&url, "--model", "absent"], "serves [\"tiny\"]"),
        (2, vec![&url, "--requests", "none.jsonl"], "none.jsonl"),
        (2, vec![&url, "--requests", &empty], "no requests"),
        (2, vec![&url, "--call", "embed"], "needs --requests"),
        (2, vec!["https://127.0.0.1:1"], "expected http://HOST:PORT"),
    ] {
        let (found, said, errors) = run(&[&["bench"], &arguments[..]].concat());
        assert_eq!((found, said.as_str()), (code, ""), "{arguments:?}: {errors}");
        assert!(errors.contains(reason) && errors.lines().count() == 1, "{arguments:?}: {errors}");
    }
    // People read a table.
    let output = sterling().args(["bench", &url, "--requests", &items, "--rate", "10", "--seconds", "0.3"]).output();
    let said = String::from_utf8(output.unwrap().stdout).unwrap();
    assert!(said.contains("other status") && said.contains("generator: "), "{said}");
}
