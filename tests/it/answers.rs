//! Answers of every form with columns of every size: the memory that a server and a router use for them stays within their
//! options, and the columns equal the published ones.

use std::collections::BTreeMap;
use std::io::{Cursor, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use arrow_array::Array as _;
use arrow_array::cast::AsArray as _;
use arrow_ipc::reader::StreamReader;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{Server, agent, put, run, sterling, until, vectors};

const ITEMS: usize = 150;
const RETRIEVE: &str = "/v1/models/vectors:retrieve";
const INFER: &str = "/v2/models/vectors/infer";
/// Memory options of server and router, in MiB.
const MEMORY_MB: u64 = 64;
const BODIES_MB: u64 = 8;
/// Allowed memory beyond the options, in MiB: pages of the snapshot that were read, working memory of threads, connections.
const OTHER_MB: u64 = 96;

/// Returns numbers that look random and are the same in each run.
fn dice(n: usize) -> usize {
    (xxhash_rust::xxh3::xxh3_64(&n.to_le_bytes()) >> 8) as usize
}

/// Returns the text of an item: 0 to 64 KiB, with characters that JSON escapes.
fn text(id: usize) -> String {
    let length = if id == 0 { 64 << 10 } else { dice(id) % (64 << 10) };
    let start = format!("{id} \u{7}\"\u{fc} ");
    start.chars().chain("lorem ipsum ".chars().cycle()).take(length).collect()
}

/// Returns the value of an item in a column.
fn attribute(id: usize, name: &str) -> Value {
    match name {
        "long" => text(id).into(),
        "short" => format!("s{id}").into(),
        "years" => (0..id % 9).collect(),
        _ => (id as f64 + 0.5).into(),
    }
}

const COLUMNS: [&str; 4] = ["long", "short", "years", "price"];

fn published() -> TempDir {
    let store = tempfile::tempdir().unwrap();
    let attributes =
        |id: usize| COLUMNS.map(|name| (name, attribute(id, name))).into_iter().collect::<BTreeMap<_, _>>();
    let line = |id: usize| json!({"id": id, "embedding": [1, id + 1], "attributes": attributes(id)}).to_string() + "\n";
    put(store.path(), &vectors(store.path(), &(0..ITEMS).map(line).collect::<String>())).unwrap();
    store
}

fn spawn(arguments: &[&str]) -> Server {
    let mut command = sterling();
    command.env("STERLING_HTTP__DRAIN_MS", "0").env("STERLING_HTTP__BODIES_MB", BODIES_MB.to_string());
    command.env("STERLING_ROUTE__REFRESH_MS", "50").env("STERLING_ENGINE__MEMORY_MB", MEMORY_MB.to_string());
    let server = Server::spawn(command.args(arguments).args(["--listen", "127.0.0.1:0"]));
    server.wait_ready();
    server
}

/// Returns the peak memory of a process, in MiB.
fn peak_mb(server: &Server) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() >> 10
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Items,
    Table,
    Arrow,
    Page,
    Many,
    Tensors,
    Bytes,
}

const FORMS: [Form; 7] = [Form::Items, Form::Table, Form::Arrow, Form::Page, Form::Many, Form::Tensors, Form::Bytes];

struct Ask {
    form: Form,
    k: usize,
    columns: Vec<&'static str>,
}

impl Ask {
    fn path(&self) -> &'static str {
        if matches!(self.form, Form::Tensors | Form::Bytes) { INFER } else { RETRIEVE }
    }

    fn accept(&self) -> &'static str {
        if self.form == Form::Arrow { "application/vnd.apache.arrow.stream" } else { "application/json" }
    }

    fn body(&self) -> String {
        let Ask { form, k, columns } = self;
        let one = json!({"vector": [0, 1], "k": k, "exact": true, "columns": columns, "timeout_ms": 60_000});
        let with = |name: &str, value: Value| {
            let mut one = one.clone();
            one[name] = value;
            one
        };
        match form {
            Form::Items | Form::Arrow => one,
            Form::Table => with("format", "columns".into()),
            Form::Page => with("cursor", "".into()),
            Form::Many => json!({"requests": [one, one]}),
            Form::Tensors | Form::Bytes => {
                let names = columns.iter().map(|name| format!("columns.{name}"));
                let binary = json!({"binary_data": *form == Form::Bytes});
                let outputs = ["ids".to_owned()].into_iter().chain(names);
                let outputs: Vec<Value> = outputs.map(|name| json!({"name": name, "parameters": binary})).collect();
                json!({
                    "parameters": {"k": k, "exact": true, "timeout_ms": 60_000},
                    "inputs": [{"name": "vector", "shape": [2, 2], "datatype": "FP32", "data": [0, 1, 0, 1]}],
                    "outputs": outputs,
                })
            }
        }
        .to_string()
    }

    fn send(&self, server: &Server) -> (u16, Option<usize>, Vec<u8>) {
        let request = agent().post(format!("http://{}{}", server.address, self.path()));
        let request = request.header("content-type", "application/json").header("accept", self.accept());
        let mut response = request.send(self.body()).unwrap();
        let header = response.headers().get("inference-header-content-length");
        let header = header.map(|length| length.to_str().unwrap().parse().unwrap());
        (response.status().as_u16(), header, response.body_mut().with_config().limit(1 << 30).read_to_vec().unwrap())
    }

    /// Checks that an answer has the best items with their published columns.
    fn check(&self, header: Option<usize>, bytes: &[u8]) {
        let Ask { form, k, columns } = self;
        let k = (*k).min(ITEMS);
        // The norm of a vector grows with the id.
        let ids: Vec<usize> = (0..ITEMS).rev().take(k).collect();
        let as_column = |name: &str, value: &Value| match value {
            Value::Array(list) if list.is_empty() => Value::Null,
            Value::Array(list) if name == "years" && list.len() == 1 => list[0].clone(),
            other => other.clone(),
        };
        let expected = |id: usize, name: &str| as_column(name, &attribute(id, name));
        let check_items = |items: &Value| {
            let items = items.as_array().unwrap();
            assert_eq!(items.len(), k);
            for (item, &id) in items.iter().zip(&ids) {
                assert_eq!(item["id"], id);
                columns.iter().for_each(|name| assert_eq!(item["columns"][*name], expected(id, name), "{id} {name}"));
            }
        };
        match form {
            Form::Items | Form::Page => check_items(&serde_json::from_slice::<Value>(bytes).unwrap()["items"]),
            Form::Many => {
                let answer: Value = serde_json::from_slice(bytes).unwrap();
                let results = answer["results"].as_array().unwrap();
                assert_eq!(results.len(), 2);
                for result in results {
                    match &result["problem"] {
                        Value::Null => check_items(&result["items"]),
                        problem => check_rejection(problem["status"].as_u64().unwrap() as u16, problem),
                    }
                }
            }
            Form::Table => {
                let answer: Value = serde_json::from_slice(bytes).unwrap();
                assert_eq!(answer["table"]["id"], json!(ids));
                for name in columns {
                    let values = answer["table"]["columns"][*name].as_array().unwrap();
                    assert_eq!(values.len(), k);
                    values.iter().zip(&ids).for_each(|(value, &id)| assert_eq!(*value, expected(id, name)));
                }
            }
            Form::Arrow => {
                let mut row = 0;
                for batch in StreamReader::try_new(Cursor::new(bytes), None).unwrap() {
                    let batch = batch.unwrap();
                    if columns.contains(&"long") {
                        let texts = batch.column_by_name("columns.long").unwrap().as_string::<i32>();
                        assert!(texts.value_data().len() <= (256 + 64) << 10, "a batch is cut by its bytes");
                        for at in 0..batch.num_rows() {
                            let text = text(ids[row + at]);
                            let reported = if texts.is_valid(at) { texts.value(at) } else { "" };
                            assert_eq!(reported, text);
                        }
                    }
                    row += batch.num_rows();
                }
                assert_eq!(row, k);
            }
            Form::Tensors | Form::Bytes => {
                let answer: Value = serde_json::from_slice(&bytes[..header.unwrap_or(bytes.len())]).unwrap();
                let mut rest = &bytes[header.unwrap_or(bytes.len())..];
                for output in answer["outputs"].as_array().unwrap() {
                    assert_eq!(output["shape"], json!([2, k]));
                    let Some(name) = output["name"].as_str().unwrap().strip_prefix("columns.") else {
                        if *form == Form::Tensors {
                            assert_eq!(output["data"], json!([&ids[..], &ids[..]].concat()));
                        }
                        let size = output["parameters"]["binary_data_size"].as_u64().unwrap_or(0);
                        rest = &rest[size as usize..];
                        continue;
                    };
                    let wanted = |n: usize| match expected(ids[n % k], name) {
                        Value::Null => String::new(),
                        Value::String(text) => text,
                        other => other.to_string(),
                    };
                    if *form == Form::Tensors {
                        let data = output["data"].as_array().unwrap();
                        assert_eq!(data.len(), 2 * k);
                        data.iter().enumerate().for_each(|(n, text)| assert_eq!(text.as_str().unwrap(), wanted(n)));
                        continue;
                    }
                    let size = output["parameters"]["binary_data_size"].as_u64().unwrap() as usize;
                    let (mut texts, behind) = rest.split_at(size);
                    for n in 0..2 * k {
                        let length = u32::from_le_bytes(texts[..4].try_into().unwrap()) as usize;
                        assert_eq!(&texts[4..4 + length], wanted(n).as_bytes());
                        texts = &texts[4 + length..];
                    }
                    assert!(texts.is_empty());
                    rest = behind;
                }
                assert!(rest.is_empty());
            }
        }
    }
}

/// Checks that a rejection names the object, its bytes and the limit.
fn check_rejection(status: u16, problem: &Value) {
    assert!([422, 503].contains(&status), "{problem}");
    let said = problem["detail"].as_str().or(problem["error"].as_str()).unwrap();
    assert!(said.contains("the answer takes ") && said.contains(" bytes"), "{said}");
    assert!(said.contains(&(BODIES_MB << 20).to_string()), "{said}");
}

#[test]
fn answers_of_every_form_and_size_are_correct_or_rejected() {
    let store = published();
    let server = spawn(&["serve", "--store", store.path().to_str().unwrap()]);
    let router = spawn(&["route", "--server", &server.address]);
    let (mut answered, mut refused) = (0, 0);
    for n in 0..42 {
        let form = FORMS[n % FORMS.len()];
        let is_routed = n / FORMS.len() % 2 == 1 && !matches!(form, Form::Tensors | Form::Bytes);
        let k = [1, 2, 9, 40, 90, ITEMS, ITEMS + 7][dice(n) % 7];
        let columns = COLUMNS.into_iter().enumerate().filter(|(at, _)| dice(n + 1000) >> at & 1 == 1);
        let ask = Ask { form, k, columns: columns.map(|(_, name)| name).collect() };
        let (status, header, body) = ask.send(if is_routed { &router } else { &server });
        if status == 200 {
            ask.check(header, &body);
            answered += 1;
        } else {
            // Only a router holds these completely.
            assert!(is_routed, "{form:?} {k}: {}", String::from_utf8_lossy(&body));
            check_rejection(status, &serde_json::from_slice(&body).unwrap());
            refused += 1;
        }
    }
    assert!(answered > 30 && refused > 0, "{answered} answered, {refused} rejected");
    for (name, process) in [("server", &server), ("router", &router)] {
        let (peak, most) = (peak_mb(process), MEMORY_MB + 2 * BODIES_MB + OTHER_MB);
        assert!(peak <= most, "the {name} took {peak} MiB, expected at most {most}");
    }
}

#[test]
fn unread_answers_stay_within_the_memory_of_a_server() {
    let store = published();
    let server = spawn(&["serve", "--store", store.path().to_str().unwrap()]);
    let router = spawn(&["route", "--server", &server.address]);
    for (target, forms) in [(&server, &FORMS[..]), (&router, &FORMS[..5])] {
        for &form in forms {
            let ask = Ask { form, k: ITEMS, columns: vec!["long", "short"] };
            let (path, accept, body) = (ask.path(), ask.accept(), ask.body());
            let begin = |_| {
                let mut stream = TcpStream::connect(&target.address).unwrap();
                stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
                let length = body.len();
                write!(
                    stream,
                    "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\naccept: {accept}\r\n\
                     content-length: {length}\r\n\r\n{body}"
                )
                .unwrap();
                stream
            };
            let mut streams: Vec<TcpStream> = (0..12).map(begin).collect();
            let mut statuses = Vec::new();
            for stream in &mut streams {
                // Only the beginning of an answer.
                let mut start = [0; 12];
                stream.read_exact(&mut start).unwrap();
                statuses.push(std::str::from_utf8(&start[9..]).unwrap().parse::<u16>().unwrap());
            }
            // On busy cores a request may time out; this test is about memory.
            let is_known = |status: &u16| [200, 422, 503, 504].contains(status);
            assert!(statuses.iter().all(is_known), "{form:?}: {statuses:?}");
        }
    }
    for (name, process) in [("server", &server), ("router", &router)] {
        let (peak, most) = (peak_mb(process), MEMORY_MB + 2 * BODIES_MB + OTHER_MB);
        assert!(peak <= most, "the {name} took {peak} MiB, expected at most {most}");
        // All memory is released: the same requests are answered again.
        let ask = Ask { form: Form::Items, k: 9, columns: vec!["long"] };
        until("room again", || ask.send(process).0 == 200);
    }
}

#[test]
#[ignore = "long: soak"]
fn a_caller_is_answered_while_another_floods_the_server() {
    let store = published();
    let file = store.path().join("keys.toml").to_str().unwrap().to_owned();
    let key = |name: &str| {
        let (code, said, wrong) = run(&["key", name, "--file", &file]);
        assert_eq!(code, 0, "{wrong}");
        said.trim().to_owned()
    };
    let (noisy, calm) = (key("noisy"), key("calm"));
    let mut command = sterling();
    command.env("STERLING_HTTP__DRAIN_MS", "0").env("STERLING_ACCESS__KEYS", &file);
    command.env("STERLING_ENGINE__QUEUE", "64").env("STERLING_ENGINE__WORKERS", "2");
    let server = Server::spawn(command.args(["serve", "--listen", "127.0.0.1:0", "--store"]).arg(store.path()));
    until("the server", || server.get("/readyz").0 == 200);
    let ask = |key: &str, body: &str| {
        let request = agent().post(format!("http://{}{RETRIEVE}", server.address));
        let request = request.header("content-type", "application/json");
        request.header("authorization", format!("Bearer {key}")).send(body).unwrap().status().as_u16()
    };
    let dear = json!({"requests": vec![json!({"vector": [0, 1], "k": ITEMS, "candidates": 300, "exact": true}); 64]});
    let (dear, cheap) = (dear.to_string(), json!({"vector": [0, 1], "k": 3}).to_string());
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let refused = std::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|scope| {
        use std::sync::atomic::Ordering::Relaxed;
        for _ in 0..16 {
            scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    refused.fetch_add(u64::from(ask(&noisy, &dear) == 503), Relaxed);
                }
            });
        }
        // The load exceeds the capacity of the server.
        until("the storm", || refused.load(Relaxed) > 20);
        let answered = (0..100).filter(|_| ask(&calm, &cheap) == 200).count();
        is_over.store(true, Relaxed);
        assert!(answered >= 99, "{answered} of 100");
    });
}
