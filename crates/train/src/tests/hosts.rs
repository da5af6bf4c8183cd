//! Runs of several hosts, each on a thread, compared with those of one host, bit for bit; lost hosts, and hosts of other runs.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use super::*;
use crate::Hosts;
use crate::hosts::{Identity, Kind as MessageKind, Mesh};
use sterling_core::error::{Error, Result};

/// Batches of four micro-batches, with more candidates than fit into two.
const SHARED: &str = "\n[train]\nlabel = \"click\"\nbatch = 200\nuniform = 150\ntemperature = 0.2\n";

/// Addresses of hosts on ports that are free.
pub(super) fn addresses(count: usize) -> Vec<String> {
    let listeners: Vec<TcpListener> = (0..count).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    listeners.iter().map(|listener| listener.local_addr().unwrap().to_string()).collect()
}

fn hosts(addresses: &[String], rank: usize) -> Hosts {
    let timeout = Duration::from_secs(60);
    Hosts { timeout, join_timeout: timeout, key: Some("secret".into()), ..Hosts::new(addresses.to_vec(), rank) }
}

/// Runs all hosts to their end; `reported` is called on host 0 after each step.
fn all(
    place: &TestFolder,
    options: &TrainOptions,
    count: usize,
    out: &Path,
    reported: &(dyn Fn(u64) + Sync),
) -> Vec<Result<Report>> {
    let addresses = addresses(count);
    let run = |rank: usize| {
        let options = TrainOptions { hosts: Some(hosts(&addresses, rank)), ..options.clone() };
        let mut trainer = place.open(options)?;
        let report = trainer.run(&|progress| {
            if rank == 0 {
                reported(progress.events)
            }
        })?;
        trainer.write(out)?;
        trainer.clear()?;
        Ok(report)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A report without what depends on the process.
fn comparable(report: &Report) -> Report {
    Report { events_per_second: 0.0, resumed_from: 0, ..report.clone() }
}

/// Trains with 1 to 3 hosts, and compares package and reports with those of a run without other hosts.
fn ends_as_one_host(train: &str, lines: &[Value]) -> Report {
    let place = TestFolder::new(train);
    let path = place.events("e.jsonl", lines);
    let mut expected = place.open(place.options(&path, "alone")).unwrap();
    let report = expected.run(&|_| ()).unwrap();
    expected.write(&place.path("expected")).unwrap();
    let expected = files(&place.path("expected"));
    for count in 1..=3 {
        let options = TrainOptions { threads: count, ..place.options(&path, &format!("work{count}")) };
        let out = place.path(&format!("out{count}"));
        for (rank, ended) in all(&place, &options, count, &out, &|_| ()).into_iter().enumerate() {
            let ended = ended.unwrap();
            assert_eq!(comparable(&ended), comparable(&report), "host {rank} of {count}");
        }
        for (name, bytes) in files(&out) {
            assert!(bytes == expected[&name], "{count} hosts: {name} has other bytes");
        }
        assert!(!options.work.join("checkpoints").exists() && !options.work.join("host-1").exists());
    }
    report
}

#[test]
fn two_towers_end_with_the_bits_of_one_host() {
    let mut lines = events(1130);
    lines.insert(77, json!({"item": 3}));
    lines.iter_mut().step_by(3).for_each(|line| line["weight"] = json!(0.7));
    let report = ends_as_one_host(SHARED, &lines);
    assert_eq!((report.steps, report.judged, report.refused), (6, 1130, 1));
    // Item vectors that are reused between steps; a frozen tower; Adam on rows.
    let train = SHARED.to_owned() + "dense = [\"user\"]\noptimizer = { kind = \"adam\", rate = 0.02, max_norm = 2 }\n";
    ends_as_one_host(&train, &lines);
    let frozen = SHARED.to_owned() + "dense = []\n[[train.tables]]\nname = \"sections\"\nfrozen = true\n";
    ends_as_one_host(&frozen, &lines);
}

#[test]
fn rerankers_end_with_the_bits_of_one_host() {
    let train = "\n[train]\nlabel = \"click\"\nloss = \"tasks\"\nbatch = 150\nnegatives = 0.5\n\
                 dense_optimizer = { kind = \"adam\", rate = 0.01 }\n";
    let line = |n: u64| {
        let mut line = event(n);
        // Some batches have no positive.
        line["labels"] = json!({"click": if (200..800).contains(&n) { 0 } else { n % 3 / 2 }});
        line.as_object_mut().unwrap().remove("type");
        line
    };
    let report = ends_as_one_host(train, &(0..1000).map(line).collect::<Vec<_>>());
    assert!(report.tasks["click"].learned.auc.is_some() && report.skipped > 100, "{report:?}");
}

#[test]
fn managed_ids_end_with_the_bits_of_one_host() {
    // Rows change hands after each step, so that an id loses its row to another one.
    let train = SHARED.to_owned() + &managed::MANAGED.replace("every = 3, admit = 2", "every = 1");
    let totals = ends_as_one_host(&train, &managed::with_ids(1100)).managed["packages"].totals;
    assert!(totals.admitted > 20 && totals.evicted + totals.expired > 0, "{totals:?}");
}

#[test]
fn batches_that_are_not_finite_are_rejected_on_all_hosts() {
    let train = SHARED.to_owned() + "optimizer = { kind = \"sgd\", rate = 1e30 }\n";
    let report = ends_as_one_host(&train, &events(900));
    assert!(report.rejected_rows + report.rejected_batches > 0, "{report:?}");
}

#[test]
fn other_numbers_of_hosts_resume_with_the_same_bits() {
    let train = SHARED.replace("batch = 200", "batch = 130");
    let place = TestFolder::new(&train);
    let path = place.events("e.jsonl", &events(1000));
    let options = |work: &str| TrainOptions { epochs: 2, shuffle: 260, ..place.options(&path, work) };
    let mut complete = place.open(options("whole")).unwrap();
    let report = complete.run(&|_| ()).unwrap();
    complete.write(&place.path("expected")).unwrap();
    let expected = files(&place.path("expected"));
    // Each run leaves its folder as a kill at that step would.
    let mut work = "first".to_owned();
    for (n, (count, kill_at)) in [(2, 5), (3, 9), (1, 11), (2, u64::MAX)].into_iter().enumerate() {
        let (at, steps) = (format!("at{n}"), std::sync::atomic::AtomicU64::new(0));
        let out = place.path(&format!("out{n}"));
        let copy = |_: u64| {
            if steps.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1 == kill_at {
                copied(&place.path(&work), &place.path(&at));
            }
        };
        let ended = all(&place, &options(&work), count, &out, &copy);
        for ended in ended {
            assert_eq!(comparable(&ended.unwrap()), comparable(&report), "run {n}");
        }
        assert!(files(&out) == expected, "run {n} with {count} hosts: other bytes");
        work = at;
        // Later runs count their own steps.
        let _ = fs::remove_dir_all(place.path(&work).join("host-1"));
    }
}

/// Runs host 0 of two, with host 1 simulated by `other`; returns the error of host 0.
fn beside(place: &TestFolder, path: &Path, other: impl FnOnce(&[String]) + Send) -> Error {
    let addresses = addresses(2);
    let timeout = Duration::from_secs(2);
    let own = Hosts { timeout, join_timeout: 5 * timeout, ..hosts(&addresses, 0) };
    let work = format!("work-{}", addresses[0].replace(':', "-"));
    let options = TrainOptions { hosts: Some(own), ..place.options(path, &work) };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| other(&addresses));
        let ended = place.open(options).and_then(|mut trainer| trainer.run(&|_| ()).map(drop));
        other.join().unwrap();
        ended.unwrap_err()
    })
}

#[test]
fn a_lost_host_ends_the_run_and_is_named() {
    let place = TestFolder::new(SHARED);
    let path = place.events("e.jsonl", &events(1000));
    let error = beside(&place, &path, |addresses| {
        let options = TrainOptions { hosts: Some(hosts(addresses, 1)), ..place.options(&path, "other") };
        let mut trainer = place.open(options).unwrap();
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            trainer.run(&|progress| assert!(progress.events < 400, "killed here"))
        }));
        assert!(ended.is_err());
    });
    assert_eq!(error.kind(), Kind::Unavailable, "{error}");
    assert!(error.to_string().contains("host 1 (127.0.0.1:") && error.to_string().contains("lost"), "{error}");
}

#[test]
fn hosts_of_other_runs_are_rejected_by_the_difference() {
    let place = TestFolder::new(SHARED);
    let path = place.events("e.jsonl", &events(300));
    let others = place.events("f.jsonl", &events(301));
    type Change<'a> = Box<dyn Fn(&mut TrainOptions) + Sync + 'a>;
    let cases: Vec<(&str, Change<'_>)> = vec![
        ("number of epochs is 2, expected 1", Box::new(|options| options.epochs = 2)),
        ("steps between checkpoints is 7, expected 3", Box::new(|options| options.checkpoint_steps = 7)),
        ("events, seed or order of events", Box::new(|options| options.seed = 5)),
        ("events, seed or order of events", Box::new(|options| options.events = vec![others.clone()])),
        // Too many ids for a header.
        ("list of ids to forget is", Box::new(|options| options.forget = vec![("packages".into(), i64::MAX); 3000])),
        ("key is missing or differs", Box::new(|options| options.hosts.as_mut().unwrap().key = None)),
    ];
    let error = beside(&place, &path, |addresses| {
        for (n, (expected, change)) in cases.iter().enumerate() {
            let mut options =
                TrainOptions { hosts: Some(hosts(addresses, 1)), ..place.options(&path, &format!("other{n}")) };
            change(&mut options);
            let error = place.open(options).unwrap_err();
            assert!(error.kind() == Kind::Conflict && error.to_string().contains(expected), "{expected}: {error}");
        }
    });
    let text = error.to_string();
    assert!(text.contains("hosts 1 did not connect within 10 s; the last rejected connection: "), "{text}");
}

/// Presents itself as host 1 with the identity that host 0 expects, as its rejections report it.
fn joined(address: &str) -> TcpStream {
    let mut identity: Vec<(String, String)> = Vec::new();
    for _ in 0..20 {
        let mut stream = connected(address);
        let description = json!({"rank": 1, "identity": identity});
        let request = format!(
            "GET /v1/train HTTP/1.1\r\nHost: x\r\nUpgrade: sterling-train\r\nAuthorization: Bearer secret\r\n\
             Sterling-Host: {description}\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let head = head(&mut stream);
        if head.starts_with("HTTP/1.1 101") {
            // Host 0 sends as soon as it has joined. It would wait for another call of a host that ends before.
            assert_eq!(stream.peek(&mut [0]).unwrap(), 1);
            return stream;
        }
        let difference = head.split_once("host 1: ").unwrap().1.split_once(" as on host 0").unwrap().0;
        let (name, values) = difference.split_once(" is missing, expected ").unwrap();
        identity.push((name.into(), values.into()));
    }
    panic!("no identity that host 0 expects");
}

/// Reads the head of a request or answer.
fn head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        assert_eq!(stream.read(&mut byte).unwrap(), 1, "{}", String::from_utf8_lossy(&head));
        head.push(byte[0]);
    }
    String::from_utf8(head).unwrap()
}

fn connected(address: &str) -> TcpStream {
    loop {
        match TcpStream::connect(address) {
            Ok(stream) => return stream,
            Err(_) => std::thread::yield_now(),
        }
    }
}

#[test]
fn invalid_handshakes_are_rejected_and_the_run_waits_on() {
    let place = TestFolder::new(SHARED);
    let path = place.events("e.jsonl", &events(300));
    let requests: Vec<Vec<u8>> = vec![
        b"\x00\x01\x02\x03\r\n\r\n".to_vec(),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        b"POST /v1/train HTTP/1.1\r\nUpgrade: sterling-train\r\n\r\n".to_vec(),
        b"GET /v1/train HTTP/1.1\r\nUpgrade: sterling-train\r\n\r\n".to_vec(),
        b"GET /v1/train HTTP/1.1\r\nUpgrade: sterling-train\r\nSterling-Host: {\"rank\": -1}\r\n\r\n".to_vec(),
        b"GET /v1/train HTTP/1.1\r\nUpgrade: sterling-train\r\nSterling-Host: {\"rank\": 99999999999999999999}\r\n\r\n"
            .to_vec(),
        b"GET /v1/train HTTP/1.1\r\nUpgrade: sterling-train\r\nAuthorization: Bearer wrong\r\n\
          Sterling-Host: {\"rank\": 1, \"identity\": []}\r\n\r\n"
            .to_vec(),
        b"GET /v1/train HTTP/1.1\r\nUpgrade: sterling-train\r\nAuthorization: Bearer secret\r\n\
          Sterling-Host: {\"rank\": 7, \"identity\": []}\r\n\r\n"
            .to_vec(),
        vec![b'x'; 100_000],
        b"GET /v1/train HTTP/1.1\r\n".to_vec(),
        Vec::new(),
    ];
    let error = beside(&place, &path, |addresses| {
        for request in &requests {
            let mut stream = connected(&addresses[0]);
            // The other side may close before all is written.
            let _ = stream.write_all(request);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            assert!(!answer.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(request));
            assert_eq!(request.len() > 32 << 10, answer.starts_with(b"HTTP/1.1 431"), "{}", request.len());
        }
        drop(joined(&addresses[0]));
    });
    assert!(error.to_string().contains("host 1 (127.0.0.1:"), "{error}");
}

/// The first connection of host 2 ends before host 1 accepts it, as if its call had timed out.
#[test]
fn a_host_that_calls_again_replaces_its_ended_connection() {
    let place = TestFolder::new(SHARED);
    let path = place.events("e.jsonl", &events(300));
    let addresses = addresses(3);
    let first = TcpListener::bind(&addresses[0]).unwrap();
    let own = Hosts { timeout: Duration::from_secs(2), ..hosts(&addresses, 1) };
    let options = TrainOptions { hosts: Some(own), ..place.options(&path, "work") };
    std::thread::scope(|scope| {
        let host = scope.spawn(|| place.open(options).map(drop));
        let (mut to_first, _) = first.accept().unwrap();
        let request = head(&mut to_first).replace("\"rank\":1", "\"rank\":2");
        connected(&addresses[1]).write_all(request.as_bytes()).unwrap();
        let mut again = connected(&addresses[1]);
        to_first.write_all(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: sterling-train\r\n\r\n").unwrap();
        again.write_all(request.as_bytes()).unwrap();
        assert!(head(&mut again).starts_with("HTTP/1.1 101"));
        // A heartbeat: host 1 has joined.
        again.read_exact(&mut [0; 24]).unwrap();
        drop((to_first, again));
        assert_eq!(host.join().unwrap().unwrap_err().kind(), Kind::Unavailable);
    });
}

/// Scanners and load balancers open connections without a request.
#[test]
fn silent_connections_do_not_delay_a_host() {
    let place = TestFolder::new(SHARED);
    let path = place.events("e.jsonl", &events(300));
    let error = beside(&place, &path, |addresses| {
        let silent: Vec<TcpStream> = (0..20).map(|_| connected(&addresses[0])).collect();
        let own = Hosts { join_timeout: Duration::from_secs(10), ..hosts(addresses, 1) };
        let joined = place.open(TrainOptions { hosts: Some(own), ..place.options(&path, "other") });
        assert!(joined.is_ok(), "{}", joined.unwrap_err());
        drop(silent);
    });
    assert!(error.to_string().contains("host 1 (127.0.0.1:"), "{error}");
}

#[test]
fn messages_that_are_not_expected_end_the_run_with_their_difference() {
    let place = TestFolder::new(SHARED);
    let path = place.events("e.jsonl", &events(300));
    // Kind, number and length of the header; the checksum is that of no payload.
    let header = |kind: u8, number: u32, length: u64, sum: u64| {
        [&[kind, 0, 0, 0][..], &number.to_le_bytes(), &length.to_le_bytes(), &sum.to_le_bytes()].concat()
    };
    let sum = xxhash_rust::xxh3::xxh3_64(b"");
    let heartbeat = header(0, 0, 0, sum);
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (vec![255; 24], "got a message header that begins with [255, 255, 255, 255]"),
        (header(9, 0, 0, sum), "message Candidates number 0 of 0 bytes, expected Step number 0"),
        (header(4, 3, 16, sum), "message Step number 3 of 16 bytes, expected Step number 0"),
        (header(4, 0, u64::MAX, sum), "of 18446744073709551615 bytes, expected Step number 0 of 16 to 16 bytes"),
        (header(4, 0, 0, sum), "message Step number 0 of 0 bytes"),
        ([header(4, 0, 16, 1), vec![0; 16]].concat(), "the payload does not match its checksum"),
        (header(0, 0, 1 << 40, sum), "message Heartbeat number 0 of 1099511627776 bytes"),
        ([header(4, 0, 16, 1), vec![0; 3]].concat(), "lost: the connection has ended"),
        (header(4, 0, 16, 1)[..11].to_vec(), "lost: the connection has ended"),
        (heartbeat.clone(), "lost: the connection has ended"),
        ([header(1, 0, 4, sum), b"full".to_vec()].concat(), "failed: full"),
        (header(1, 0, 1 << 30, sum), "message Failure number 0 of 1073741824 bytes"),
        (
            [header(4, 0, 16, xxhash_rust::xxh3::xxh3_64(&[9; 16])), vec![9; 16]].concat(),
            "host 1 has step 651061555542690057, expected step 1 with the events of this host",
        ),
    ];
    for (bytes, expected) in cases {
        let error = beside(&place, &path, |addresses| {
            let mut stream = joined(&addresses[0]);
            stream.write_all(&bytes).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let _ = stream.read_to_end(&mut Vec::new());
        });
        assert!(error.to_string().contains(expected), "{expected}: {error}");
    }
    // Heartbeats keep an idle host connected; without them the host is lost.
    let error = beside(&place, &path, |addresses| {
        let mut stream = joined(&addresses[0]);
        stream.write_all(&heartbeat).unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
    });
    assert!(error.to_string().contains("lost: silent for 2 s"), "{error}");
}

#[test]
fn sending_to_an_ended_host_reports_its_reason() {
    let addresses = addresses(2);
    let joined = |rank| Mesh::join(&hosts(&addresses, rank), Identity::default()).unwrap();
    let error = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mesh = joined(1);
            // Messages that host 0 has not read yet.
            mesh.send(0, MessageKind::Step, vec![7u8; 16]).unwrap();
            mesh.send(0, MessageKind::Rows, vec![7u8; 300]).unwrap();
            mesh.fail(&Error::unavailable("the disk is full"));
        });
        let mesh = joined(0);
        loop {
            if let Err(error) = mesh.send(1, MessageKind::Step, vec![7u8; 16]) {
                break error;
            }
            std::thread::yield_now();
        }
    });
    let text = error.to_string();
    assert!(text.contains("host 1 (127.0.0.1:") && text.contains("failed: the disk is full"), "{text}");
}

#[test]
fn invalid_hosts_are_rejected() {
    let place = TestFolder::new(SHARED);
    let path = place.events("e.jsonl", &events(3));
    let error = |addresses: &[&str], rank: usize, key: Option<&str>| {
        let hosts = Hosts::new(addresses.iter().map(|address| address.to_string()).collect(), rank);
        let hosts = Hosts { key: key.map(str::to_owned), ..hosts };
        place.open(TrainOptions { hosts: Some(hosts), ..place.options(&path, "w") }).unwrap_err().to_string()
    };
    assert!(error(&[], 0, None).contains("hosts: got 0, expected 1 to 64"));
    assert!(error(&["a:1"; 65], 0, None).contains("hosts: got 65"));
    assert!(error(&["a:1", "b:1"], 2, None).contains("rank: got 2, expected less than the number of hosts, 2"));
    assert!(error(&["a:1", "b"], 0, None).contains("hosts: got `b`, expected NAME:PORT"));
    assert!(error(&["a:0"], 0, None).contains("hosts: got `a:0`"));
    assert!(error(&["a:1", "a:1"], 0, None).contains("`a:1` is given twice"));
    assert!(error(&["a:1"], 0, Some("two words")).contains("key of hosts"));
    assert!(!place.path("w").exists());
}
