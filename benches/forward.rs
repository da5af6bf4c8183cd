//! The complete pass on the Debian model: latency of a request in the process and over HTTP, by step.
//!
//! `cargo bench --bench forward` prints the tables of docs/benchmarks/pass.md. Requests are the held-out users of the package,
//! sequentially from one client; every user is requested once to warm up and then `ROUNDS` times.
//!
//! `--turns FOLDER` opens a published version. Each line of input is then the index of a user; the output is the time of the
//! reranker for that user's candidates, in microseconds: the step alone, repeated on one thread; then within retrievals by that
//! thread, back to back and after pauses (`scripts/bench_step.py` compares the server's times with them).
//!
//! The lower bound of the scan: P lists of N / C items, D bytes each (defaults: 126 x 63 x 64 bytes = 0.5 MB, 0.02 ms at 25
//! GB/s). The rest of a request is arithmetic of the reranker: K0 x its weights.

#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use sterling::api::{Retrievals, retrievals};
use sterling::graph::tower::Threads;
use sterling::publish::{Plan, publish};
use sterling::request::VersionSelector;
use sterling::request::{Answer, Content, Explain, Request, Rerank, Retrieve};
use sterling::server::http::App;
use sterling::serving::engine::{Engine, Options, Passes};
use sterling::serving::pass::{self, Cpu, Prepared};
use sterling::serving::registry::{self, Loaded, Registry};
use sterling::serving::view::View;
use sterling::snapshot::{Placement, Snapshot, Store};

const ROUNDS: usize = 3;
/// Number of runs of the reranker alone.
const ALONE: usize = 21;
/// Pause of the thread before a run, as in a server, and bytes of other memory read then: more than the L1 and L2
/// caches hold.
const PAUSE: Duration = Duration::from_millis(2);
const OTHER_BYTES: usize = 8 << 20;

fn request(case: &Value, user: &Value) -> Retrieve {
    let mut body: Map<String, Value> = case.as_object().unwrap().clone();
    body.insert("features".into(), user["features"].clone());
    body.insert("exclude".into(), user["exclude"].clone());
    match retrievals(Value::Object(body).to_string().as_bytes()).unwrap() {
        Retrievals::One(request, ..) => *request,
        Retrievals::Many(_) => unreachable!("the body holds one request"),
    }
}

/// Prepares and runs requests together, as the server does; returns their answers.
fn answer(view: &Arc<View>, cpu: &mut Cpu, requests: &[Retrieve]) -> Vec<Answer> {
    let prepare = |request: &Retrieve| pass::prepare(view, Request::Retrieve(request.clone())).unwrap();
    let prepared: Vec<Prepared> = requests.iter().map(prepare).collect();
    pass::run(cpu, &prepared, None).into_iter().map(Result::unwrap).collect()
}

/// Returns the median and the 99th percentile, in milliseconds.
fn percentiles(times: &mut [f64]) -> (f64, f64) {
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], times[times.len() * 99 / 100])
}

/// Returns the median times of the reranker over one user's candidates at defaults, in microseconds: in requests that only
/// rerank; in retrievals, whose other steps change the caches; and in retrievals after a pause in which other memory was read.
fn reranker_alone(view: &Arc<View>, cpu: &mut Cpu, user: &Value) -> [u64; 3] {
    let retrieve = |case: &Value| request(case, user);
    let mut requested = retrieve(&json!({}));
    requested.reading.explain = true;
    let of_defaults = answer(view, cpu, &[requested.clone()]).remove(0).explain.unwrap().candidates;
    let all = answer(view, cpu, &[retrieve(&json!({"k": of_defaults, "candidates": of_defaults}))]).remove(0);
    let Content::Items(ranked) = all.content else { unreachable!("a retrieval ranks") };
    let candidates = vec![ranked.ids.iter().copied().zip(ranked.similarities.iter().copied()).collect()];
    let Retrieve { user, k, mut reading, .. } = retrieve(&json!({}));
    reading.explain = true;
    let rerank = Request::Rerank(Rerank { user, candidates, k, reading });
    let others = vec![1u64; OTHER_BYTES / 8];
    let whole = Request::Retrieve(requested);
    [(&rerank, false), (&whole, false), (&whole, true)].map(|(request, after_pause)| {
        let once = |_| {
            if after_pause {
                std::thread::sleep(PAUSE);
                assert_eq!(black_box(&others).iter().sum::<u64>(), others.len() as u64);
            }
            let prepared = [pass::prepare(view, request.clone()).unwrap()];
            let explain = pass::run(cpu, &prepared, None).remove(0).unwrap().explain.unwrap();
            let step = explain.steps.iter().find(|step| step.name == "overarch").unwrap();
            assert_eq!(step.items, of_defaults);
            step.micros
        };
        let mut times: Vec<u64> = (0..ALONE).map(once).collect();
        times.sort_unstable();
        times[ALONE / 2]
    })
}

fn in_turns(version: &Path, users: &[Value]) {
    let view = Arc::new(View::new(Arc::new(Snapshot::load(version, &Placement::whole()).unwrap())));
    let mut cpu = Cpu::new(Threads::new(1));
    println!("{}", view.main().index.kernel());
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let [alone, in_pass, paused] = reranker_alone(&view, &mut cpu, &users[line.parse::<usize>().unwrap()]);
        println!("{alone} {in_pass} {paused}");
    }
}

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let package = root.join("models/debian");
    let users: Vec<Value> = std::fs::read_to_string(package.join("heldout.jsonl"))
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let mut arguments = std::env::args().skip_while(|argument| argument != "--turns").skip(1);
    if let Some(version) = arguments.next() {
        return in_turns(Path::new(&version), &users);
    }
    let folder = tempfile::tempdir().unwrap();
    let store = Store::new(folder.path());
    let what = Plan::of_package(package);
    let start = Instant::now();
    publish(&store, &what, &|_, _, _| {}).unwrap();
    println!("publish: {:.2} s", start.elapsed().as_secs_f64());
    let start = Instant::now();
    let snapshot = Snapshot::load(&store.folder("debian", 1), &Placement::whole()).unwrap();
    println!("load:    {:.3} s, kernel {}\n", start.elapsed().as_secs_f64(), snapshot.index.kernel());
    let view = Arc::new(View::new(Arc::new(snapshot)));
    let mut cpu = Cpu::new(Threads::new(1));

    let cases = [
        ("defaults (K = 20, K0 = 1000)", json!({})),
        ("filter section:python", json!({"filter": "section:python"})),
        (
            "filter NOT section:libs AND installed_kb < 100",
            json!({"filter": "NOT section:libs AND installed_kb < 100"}),
        ),
        ("K0 = 100", json!({"candidates": 100})),
        ("K = 1000, K0 = 10,000", json!({"k": 1000, "candidates": 10_000})),
        ("exact", json!({"exact": true})),
    ];
    println!("| request | p50 ms | p99 ms |\n|---|---|---|");
    let mut of_defaults = Vec::new();
    for (name, case) in &cases {
        let requests: Vec<Retrieve> = users.iter().step_by(4).map(|user| request(case, user)).collect();
        let mut times = Vec::new();
        for round in 0..=ROUNDS {
            for request in &requests {
                let mut requested = request.clone();
                requested.reading.explain = round == ROUNDS;
                let start = Instant::now();
                let answer = answer(&view, &mut cpu, &[requested]).remove(0);
                if round > 0 {
                    times.push(start.elapsed().as_secs_f64() * 1e3);
                }
                if of_defaults.len() < requests.len() {
                    of_defaults.extend(answer.explain);
                }
            }
        }
        let (p50, p99) = percentiles(&mut times);
        println!("| {name} | {p50:.2} | {p99:.2} |");
    }
    over_http(&store, &users);
    steps(&of_defaults);
    in_batches(&view, &users);
}

/// Measures the time per request in batches of several sizes. K0 = 100 makes the reranker, which batches do not change, a small
/// part.
fn in_batches(view: &Arc<View>, users: &[Value]) {
    let mut cpu = Cpu::new(Threads::new(1));
    const FILTER: &str = "NOT section:libs AND installed_kb < 100 AND NOT architecture:any";
    let cases = [
        ("K0 = 100", json!({"k": 20, "candidates": 100})),
        ("K0 = 100, equal filters", json!({"k": 20, "candidates": 100, "filter": FILTER})),
        ("defaults", json!({})),
    ];
    println!("\n| requests | batch | median µs a request |\n|---|---|---|");
    for (name, case) in &cases {
        let requests: Vec<Retrieve> = users.iter().map(|user| request(case, user)).collect();
        for size in [1, 8, 32] {
            let mut times = Vec::new();
            for _ in 0..ROUNDS {
                for batch in requests.chunks_exact(size) {
                    let start = Instant::now();
                    answer(view, &mut cpu, batch);
                    times.push(start.elapsed().as_secs_f64() * 1e6 / size as f64);
                }
            }
            println!("| {name} | {size} | {:.0} |", percentiles(&mut times).0);
        }
    }
}

fn over_http(store: &Store, users: &[Value]) {
    let registry = Registry::new(store.clone(), registry::Snapshots::default(), registry::Options::default());
    registry.refresh();
    let loaded: Arc<Loaded> = registry.get("debian", VersionSelector::Active).unwrap();
    assert_eq!(loaded.name(), "debian");
    let options = sterling::server::http::Options::default();
    let app =
        Arc::new(App::new(registry, Engine::start(Passes::default(), &Options::default()).unwrap(), &options).unwrap());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let url = format!("http://{}/v1/models/debian:retrieve", listener.local_addr().unwrap());
    let (_never, stops) = tokio::sync::mpsc::unbounded_channel();
    runtime.spawn(async move { sterling::server::http::serve(listener.into(), app, &options, stops).await });
    let agent = ureq::Agent::new_with_defaults();
    let mut times = Vec::new();
    for round in 0..=ROUNDS {
        for user in users.iter().step_by(4) {
            let body = json!({"features": user["features"], "exclude": user["exclude"]}).to_string();
            let start = Instant::now();
            let mut answer = agent.post(&url).header("content-type", "application/json").send(body).unwrap();
            answer.body_mut().read_to_vec().unwrap();
            if round > 0 {
                times.push(start.elapsed().as_secs_f64() * 1e3);
            }
        }
    }
    let (p50, p99) = percentiles(&mut times);
    println!("| defaults, over HTTP on one connection | {p50:.2} | {p99:.2} |");
}

/// Prints the median of each step.
fn steps(explained: &[Explain]) {
    let mut micros: BTreeMap<usize, (String, Vec<f64>, u64, u64)> = BTreeMap::new();
    for explain in explained {
        for (n, step) in explain.steps.iter().enumerate() {
            let entry = micros.entry(n).or_insert_with(|| (step.name.to_owned(), Vec::new(), 0, 0));
            entry.1.push(step.micros as f64);
            entry.2 += step.bytes;
            entry.3 += step.items;
        }
    }
    println!("\n| step | median µs | bytes | items |\n|---|---|---|---|");
    for (name, times, bytes, items) in micros.values_mut() {
        let count = times.len() as u64;
        println!("| {name} | {:.0} | {} | {} |", percentiles(times).0, *bytes / count, *items / count);
    }
}
