//! Shared helpers of the tests: stores, servers as real processes, requests.

use std::fs::File;
use std::io::{BufRead, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{self, Child, Command, Stdio};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterling::Config;
use sterling::api::{Retrievals, Shape, retrievals};
use sterling::embedding::RowFormat;
use sterling::graph::tower::Threads;
use sterling::index::ivf::Rescore;
use sterling::publish::{Output, Plan, Source, publish};
use sterling::request::CallOptions;
use sterling::request::{Answer, Content, Explain, Ranked, Request, Retrieve};
use sterling::server::http::Options;
use sterling::serving::pass::{self, Cpu};
use sterling::serving::view::View;
use sterling::snapshot::{Recipe, Store};
use tempfile::TempDir;

pub use crate::redis_cluster::until;

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

pub fn tiny_package() -> PathBuf {
    root().join("tests/golden/tiny")
}

pub fn text(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(path.as_ref()).unwrap_or_else(|e| panic!("{}: {e}", path.as_ref().display()))
}

pub fn json(path: impl AsRef<Path>) -> Value {
    serde_json::from_str(&text(path)).unwrap()
}

/// Plan of a publication of the tiny package, with f32 rows, as in the Python code that computed its answers.
pub fn tiny() -> Plan {
    let mut recipe = Recipe::default();
    recipe.index.rescore = Rescore::F32;
    Plan { recipe, ..Plan::of_package(tiny_package()) }
}

/// Returns the same plan for an embedding-only model of another name.
pub fn renamed(plan: Plan, name: &str) -> Plan {
    let Source::Vectors { items, vectors, .. } = plan.source else { panic!("{plan:?} has no name") };
    Plan { source: Source::Vectors { name: name.into(), items, vectors }, ..plan }
}

/// Output of a version of all items, or of a version in shards.
pub fn output(shards: Option<u32>) -> Output {
    shards.map_or_else(Output::default, Output::shards)
}

/// Publishes without progress and returns the version.
pub fn put(store: &Path, what: &Plan) -> sterling::error::Result<u64> {
    publish(&Store::new(store), what, &|_, _, _| {}).map(|(_, version)| version)
}

/// An embedding-only publication of a JSON lines text, whose file lies in `folder`.
pub fn vectors(folder: &Path, lines: &str) -> Plan {
    let path = folder.join("items.jsonl");
    std::fs::write(&path, lines).unwrap();
    Plan::of_vectors("vectors", path)
}

/// Eight numbers between -1 and 1 that have nothing to do with one another: the same for the same `n`.
pub fn scattered(n: u32) -> Vec<f64> {
    let number = |d: u32| {
        let hash = xxhash_rust::xxh3::xxh3_64(&[n.to_le_bytes(), d.to_le_bytes()].concat());
        (hash >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    };
    (0..8).map(number).collect()
}

/// Creates a store with two versions of the same items, in `shards` shards. The first is active; the second scans one list of 32,
/// so that its recall is far lower.
pub fn two_recalls(shards: Option<u32>) -> TempDir {
    let store = tempfile::tempdir().unwrap();
    let lines: String = (0..1000).map(|n| format!("{{\"id\": {n}, \"embedding\": {:?}}}\n", scattered(n))).collect();
    let mut publication = Plan { output: output(shards), ..vectors(store.path(), &lines) };
    publication.recipe.index.rescore = Rescore::F32;
    publication.recipe.index.lists = 32;
    put(store.path(), &publication).unwrap();
    let (code, _, error) = run(&["activate", "vectors", "1", "--store", store.path().to_str().unwrap()]);
    assert_eq!(code, 0, "{error}");
    publication.recipe.serving.probes = 1;
    put(store.path(), &publication).unwrap();
    store
}

/// Creates a store of `count` items with vectors of two numbers, each with a title of `title` letters.
pub fn catalogue(count: usize, title: usize) -> TempDir {
    let store = tempfile::tempdir().unwrap();
    let title = "x".repeat(title);
    let line =
        |n| format!("{{\"id\": {n}, \"embedding\": [1, {}], \"attributes\": {{\"title\": \"{title}\"}}}}\n", n + 1);
    put(store.path(), &vectors(store.path(), &(0..count).map(line).collect::<String>())).unwrap();
    store
}

/// A server with these options of `[http]`.
pub fn serve(store: &Path, options: &str) -> Server {
    serve_by(sterling(), store, options)
}

/// The same, started by a command.
pub fn serve_by(mut command: Command, store: &Path, options: &str) -> Server {
    let config = store.join("sterling.toml");
    std::fs::write(&config, format!("[http]\n{options}\n")).unwrap();
    command.args(["serve", "--listen", "127.0.0.1:0", "--store"]).arg(store).arg("--config").arg(config);
    let server = Server::spawn(&mut command);
    server.wait_ready();
    server
}

pub fn sterling() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterling"));
    command.env_remove("STERLING_LOG").stdin(Stdio::null());
    command
}

/// Runs the program to its end: exit code, stdout, stderr.
pub fn run(arguments: &[&str]) -> (i32, String, String) {
    let process::Output { status, stdout, stderr } = sterling().args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code().unwrap_or(-1), text(stdout), text(stderr))
}

/// A server process that is killed when the value is dropped.
pub struct Server {
    /// None for a server in this process.
    process: Option<Child>,
    _here: Option<sterling::Server>,
    pub address: String,
    /// Lines that the server printed before it listened.
    pub said: Vec<String>,
}

impl Server {
    /// Starts a server in this process at a free port. Its metrics are those of all servers in this process.
    pub fn here(config: Config) -> Self {
        let http = Options { drain_ms: 0, ..config.http };
        let config = Config { listen: ([127, 0, 0, 1], 0).into(), refresh_ms: 50, http, ..config };
        let server = sterling::Server::start(&config).unwrap();
        let address = server.address().to_string();
        Server { process: None, _here: Some(server), address, said: Vec::new() }
    }

    pub fn start(store: &Path) -> Self {
        Self::start_with(store, &[])
    }

    /// Starts a server with more arguments.
    pub fn start_with(store: &Path, arguments: &[&str]) -> Self {
        let mut command = sterling();
        command.env("STERLING_HTTP__DRAIN_MS", "0").env("STERLING_REFRESH_MS", "100");
        let server =
            Self::spawn(command.args(["serve", "--listen", "127.0.0.1:0", "--store"]).arg(store).args(arguments));
        server.wait_ready();
        server
    }

    /// Starts a command that prints where it listens.
    pub fn spawn(command: &mut Command) -> Self {
        Self::spawn_logged(command.stderr(Stdio::null()))
    }

    /// The same, with the log at the destination that the command sets.
    pub fn spawn_logged(command: &mut Command) -> Self {
        let process = Some(command.stdout(Stdio::piped()).spawn().unwrap());
        let mut server = Server { process, _here: None, address: String::new(), said: Vec::new() };
        for line in BufReader::new(server.process().stdout.take().unwrap()).lines() {
            let line = line.unwrap();
            server.said.push(line.clone());
            if let Some((_, rest)) = line.split_once("http://").or(line.split_once("https://")) {
                server.address = rest.split(['/', ' ', '"']).next().unwrap().to_owned();
                return server;
            }
        }
        panic!("the server ended before it listened: {:?}", server.said);
    }

    pub fn wait_ready(&self) {
        let start = Instant::now();
        while self.get("/readyz").0 != 200 {
            assert!(start.elapsed() < Duration::from_secs(60), "not ready");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn get(&self, path: &str) -> (u16, String) {
        let mut response = agent().get(format!("http://{}{path}", self.address)).call().unwrap();
        let (status, text) = (response.status().as_u16(), response.body_mut().read_to_string().unwrap());
        note_exchange(("GET", path, ""), (status, response.headers()), &text);
        (status, text)
    }

    /// Returns the value of a metric, named with its labels as `/metrics` writes them.
    pub fn metric(&self, series: &str) -> Option<f64> {
        let metrics = self.get("/metrics").1;
        metrics.lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok())
    }

    /// Waits until the server has polled the store, or the router its servers, after this call: the first counted poll
    /// may have begun before, and work that a poll starts may end after it.
    pub fn wait_for_polls(&self, source: &str) {
        let polls = || self.metric(&format!("sterling_polls_total{{source=\"{source}\"}}")).unwrap_or(0.0);
        let before = polls();
        until("three polls", || polls() >= before + 3.0);
    }

    /// Returns the warnings of `/readyz`, except for the one about requests that failed in the last two minutes, which persists
    /// after a recovery.
    pub fn warnings(&self) -> Vec<String> {
        let (status, text) = self.get("/readyz");
        assert_eq!(status, 200, "{text}");
        let warnings = text.lines().filter_map(|line| line.strip_prefix("warning: "));
        warnings.filter(|line| !line.contains("requests of the last two minutes failed")).map(str::to_owned).collect()
    }

    /// Waits until each of these models answers: a server is ready with the first of them.
    pub fn wait_for<const N: usize>(&self, models: [&str; N]) {
        for model in models {
            until(model, || self.get(&format!("/v1/models/{model}")).0 == 200);
        }
    }

    pub fn get_json(&self, path: &str) -> Value {
        let (status, body) = self.get(path);
        assert_eq!(status, 200, "{path}: {body}");
        serde_json::from_str(&body).unwrap()
    }

    /// Posts a body and returns the status and the JSON of the answer.
    pub fn post(&self, path: &str, body: impl ToString) -> (u16, Value) {
        let url = format!("http://{}{path}", self.address);
        let body = body.to_string();
        let mut response = agent().post(url).header("content-type", "application/json").send(&body).unwrap();
        let status = response.status().as_u16();
        let text = response.body_mut().with_config().limit(1 << 30).read_to_string().unwrap();
        note_exchange(("POST", path, &body), (status, response.headers()), &text);
        (status, serde_json::from_str(&text).unwrap_or_else(|e| panic!("{path}: {e}: {text}")))
    }

    /// Sends a request with headers of its own; the answer with its JSON.
    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> ureq::http::Response<Value> {
        let request = ureq::http::Request::builder().method(method).uri(format!("http://{}{path}", self.address));
        let request = request.header("content-type", "application/json");
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        let agent = agent();
        let request =
            agent.configure_request(request.body(body.to_owned()).unwrap()).allow_non_standard_methods(true).build();
        let (head, mut answer) = agent.run(request).unwrap().into_parts();
        let text = answer.read_to_string().unwrap();
        note_exchange((method, path, body), (head.status.as_u16(), &head.headers), &text);
        ureq::http::Response::from_parts(head, ())
            .map(|()| serde_json::from_str(&text).unwrap_or_else(|e| panic!("{path}: {e}: {text}")))
    }

    /// Posts a body that must be answered.
    pub fn ask(&self, path: &str, body: impl ToString) -> Value {
        let (status, answer) = self.post(path, body);
        assert_eq!(status, 200, "{path}: {answer}");
        answer
    }

    fn process(&mut self) -> &mut Child {
        self.process.as_mut().expect("a process of its own")
    }

    /// Stops the process with the signal of an orchestrator, and returns its exit code.
    pub fn stop(self) -> Option<i32> {
        self.signal("TERM");
        self.wait()
    }

    /// Sends a signal.
    pub fn signal(&self, name: &str) {
        let id = self.id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &id]).status().unwrap().success());
    }

    /// Waits for the end of the process and returns its exit code.
    pub fn wait(mut self) -> Option<i32> {
        self.process().wait().unwrap().code()
    }

    /// The number of the process.
    pub fn id(&self) -> u32 {
        self.process.as_ref().expect("a process of its own").id()
    }

    pub fn is_running(&mut self) -> bool {
        self.process().try_wait().unwrap().is_none()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// Longest body that is noted, in bytes.
const NOTED_BYTES_MAX: usize = 64 << 10;

/// Records the request and the answer if `TEST_EXCHANGES` names a folder: `python/tests/test_exchanges.py` validates them against
/// `/openapi.json`.
pub fn note_exchange(
    (method, path, body): (&str, &str, &str),
    (status, headers): (u16, &ureq::http::HeaderMap),
    answer: &str,
) {
    static NOTES: LazyLock<Option<Mutex<File>>> = LazyLock::new(|| {
        let folder = PathBuf::from(std::env::var_os("TEST_EXCHANGES")?);
        std::fs::create_dir_all(&folder).unwrap();
        Some(Mutex::new(File::create(folder.join(format!("{}.jsonl", std::process::id()))).unwrap()))
    });
    let Some(notes) = &*NOTES else { return };
    if body.len().max(answer.len()) > NOTED_BYTES_MAX {
        return;
    }
    let media_type = headers.get("content-type").map_or("", |value| value.to_str().unwrap());
    let note =
        json!({"method": method, "path": path, "body": body, "status": status, "type": media_type, "answer": answer});
    writeln!(notes.lock().unwrap(), "{note}").unwrap();
}

pub fn agent() -> ureq::Agent {
    let config =
        ureq::Agent::config_builder().http_status_as_error(false).timeout_global(Some(Duration::from_secs(120)));
    config.build().into()
}

/// Runs retrievals, given as JSON bodies, in one batch in this process; returns the items and the explanations.
pub fn retrieve(view: &Arc<View>, bodies: &[Value]) -> Vec<sterling::error::Result<(Ranked, Option<Explain>)>> {
    let body = serde_json::json!({"requests": bodies}).to_string();
    let Retrievals::Many(requests) = retrievals(body.as_bytes()).unwrap() else { panic!("{body}") };
    let prepare = |request: sterling::error::Result<(Retrieve, CallOptions, Shape)>| {
        pass::prepare(view, Request::Retrieve(request?.0))
    };
    let mut prepared = Vec::new();
    let failed: Vec<Option<sterling::error::Error>> =
        requests.into_iter().map(|request| prepare(request).map(|one| prepared.push(one)).err()).collect();
    let mut answers = pass::run(&mut Cpu::new(Threads::new(1)), &prepared, None).into_iter();
    let items = |answer: Answer| match answer.content {
        Content::Items(ranked) => (ranked, answer.explain),
        other => panic!("{other:?}"),
    };
    failed.into_iter().map(|failed| failed.map_or_else(|| answers.next().unwrap().map(items), Err)).collect()
}

/// Returns the ids of an answer, in their order.
pub fn ids(answer: &Value) -> Vec<i64> {
    answer["items"].as_array().unwrap().iter().map(|i| i["id"].as_i64().unwrap()).collect()
}

/// Returns the maximum rounding error of a number of a row, as docs/reference/formats.md states it; `stored` is the row in the
/// format.
pub fn loses(format: RowFormat, x: f32, row: &[f32], stored: &[u8]) -> f32 {
    let (least, most) = row.iter().fold((f32::MAX, f32::MIN), |(lo, hi), &x| (lo.min(x), hi.max(x)));
    let scale = half::f16::from_le_bytes([stored[0], stored[1]]).to_f32();
    match format {
        RowFormat::F32 => 0.0,
        RowFormat::F16 => x.abs() * (-11f32).exp2() + (-25f32).exp2(),
        RowFormat::Bf16 => x.abs() * (-8f32).exp2(),
        _ if scale == 1.0 && most - least < 1.0 => most - least + least.abs() * (-11f32).exp2() + (-17f32).exp2(),
        _ => scale / 2.0 + (least.abs() + most - least) * (-11f32).exp2() + (-17f32).exp2(),
    }
}
