//! Features of kind `text`: tokenized at the server, for every kind of request with features.
//! `python/make_text_golden.py` computes the expected vectors.

use std::path::PathBuf;
use std::sync::LazyLock;

use serde_json::{Value, json};
use sterling::index::ivf::Rescore;
use sterling::publish::Plan;
use sterling::snapshot::Recipe;
use tempfile::TempDir;

use crate::in_process::{Callee as _, InProcess};
use crate::support::{Server, ids, json as read, put, root, text as file};

const TOLERANCE: f64 = 1e-5;

fn package() -> PathBuf {
    root().join("tests/golden/text")
}

fn answers() -> &'static Value {
    static ANSWERS: LazyLock<Value> = LazyLock::new(|| read(package().join("answers.json")));
    &ANSWERS
}

fn plan(folder: PathBuf) -> Plan {
    let mut recipe = Recipe::default();
    recipe.index.rescore = Rescore::F32;
    Plan { recipe, ..Plan::of_package(folder) }
}

fn server() -> &'static InProcess {
    static SERVER: LazyLock<(TempDir, InProcess)> = LazyLock::new(|| {
        let store = tempfile::tempdir().unwrap();
        put(store.path(), &plan(package())).unwrap();
        let server = InProcess::start(store.path());
        (store, server)
    });
    &SERVER.1
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Compares the similarities of an answer of all items with dot products of golden vectors.
fn check_answer(answer: &Value, query: &[f64]) {
    let items = answer["items"].as_array().unwrap();
    assert_eq!(items.len(), 40);
    for item in items {
        let vector = numbers(&answers()["items"][item["id"].to_string()]);
        let (found, wanted) = (item["similarity"].as_f64().unwrap(), dot(query, &vector));
        assert!((found - wanted).abs() < 1e-4, "item {}: {found}, expected {wanted}", item["id"]);
    }
}

#[test]
fn texts_are_embedded_and_retrieved_as_python_does() {
    let server = server();
    let mut requests = Vec::new();
    for case in answers()["requests"].as_array().unwrap() {
        let query = numbers(&case["query"]);
        let body = json!({"features": case["features"]});
        let found = numbers(&server.ask("/v1/models/text:embed", &body)["embedding"]);
        assert_eq!(found.len(), query.len());
        for (found, wanted) in found.iter().zip(&query) {
            assert!((found - wanted).abs() < TOLERANCE, "{body}: {found}, expected {wanted}");
        }
        let body = json!({"features": case["features"], "exact": true, "k": 40, "candidates": 40});
        check_answer(&server.ask("/v1/models/text:retrieve", &body), &query);
        requests.push((body, query));
    }
    let bodies: Vec<&Value> = requests.iter().map(|(body, _)| body).collect();
    let batch = server.ask("/v1/models/text:retrieve", json!({"requests": bodies}));
    for (answer, (_, query)) in batch["results"].as_array().unwrap().iter().zip(&requests) {
        check_answer(answer, query);
    }
}

#[test]
fn models_state_text_features() {
    let info = server().get_json("/v1/models/text");
    let wanted = json!([
        {"name": "text", "kind": "text", "length": 12},
        {"name": "title", "kind": "text", "length": 6},
    ]);
    assert_eq!(info["features"], wanted);
}

#[test]
fn tensors_of_bytes_are_texts() {
    let server = server();
    let inputs = json!([
        {"name": "text", "datatype": "BYTES", "shape": [-1, 1]},
        {"name": "title", "datatype": "BYTES", "shape": [-1, 1]},
    ]);
    assert_eq!(server.get_json("/v2/models/text")["inputs"], inputs);
    let input = |name: &str, data: Value| json!({"name": name, "datatype": "BYTES", "shape": [2, 1], "data": data});
    let body = json!({
        "parameters": {"k": 5},
        "inputs": [input("text", json!(["a model package", "Zürich"])), input("title", json!(["", "serve"]))],
    });
    let answer = server.ask("/v2/models/text/infer", body);
    let found = answer["outputs"].as_array().unwrap().iter().find(|output| output["name"] == "ids").unwrap();
    let plain = |text: &str, title: &str| {
        let body = json!({"features": {"text": text, "title": title}, "k": 5});
        ids(&server.ask("/v1/models/text:retrieve", body))
    };
    assert_eq!(found["data"], json!([plain("a model package", ""), plain("Zürich", "serve")].concat()));
}

#[test]
fn rejects_other_values_than_one_text() {
    for (value, expected) in [
        (json!(["a", "b"]), "feature `text`: got 2 texts, expected one text"),
        (json!(7), "feature `text`: got integers such as 7, expected a text"),
        (json!([0.5]), "feature `text`: got numbers such as 0.5, expected a text"),
        (json!({"values": [1], "weights": [1]}), "feature `text`: got values with weights, expected a text"),
    ] {
        let (status, problem) = server().post("/v1/models/text:embed", json!({"features": {"text": value}}));
        assert!(status == 400 && problem.to_string().contains(expected), "{status}: {problem}");
    }
}

#[test]
fn a_long_text_is_truncated_to_its_tokens() {
    let embed =
        |text: String| server().ask("/v1/models/text:embed", json!({"features": {"text": text}}))["embedding"].take();
    assert_eq!(embed("model ".repeat(170_000)), embed("model ".repeat(20)));
}

/// The item tower reads the text of an update, although no column stores it.
#[test]
fn updated_items_are_tokenized() {
    let folder = tempfile::tempdir().unwrap();
    let (store, updates) = (folder.path().join("store"), folder.path().join("updates"));
    put(&store, &plan(package())).unwrap();
    let server = Server::start_with(&store, &["--updates", updates.to_str().unwrap()]);
    let line = file(package().join("items.jsonl")).lines().nth(3).unwrap().to_owned();
    let mut item: Value = serde_json::from_str(&line).unwrap();
    item["id"] = json!(1000);
    let upserted = server.ask("/v1/models/text/items:upsert", json!({"items": [item]}));
    assert_eq!(upserted["accepted"], 1, "{upserted}");
    let path = format!("/v1/models/text:retrieve?min_position={}", upserted["position"]);
    let body = json!({"features": {"text": "publish"}, "exact": true, "k": 41, "candidates": 41});
    let answer = server.ask(&path, body);
    let similarity = |id: i64| {
        let items = answer["items"].as_array().unwrap();
        items.iter().find(|item| item["id"] == id).unwrap()["similarity"].as_f64().unwrap()
    };
    assert!((similarity(3) - similarity(1000)).abs() < 1e-3, "{answer}");
}

#[test]
fn rejects_packages_whose_tokenizers_do_not_fit() {
    let rejected = |from: &str, to: &str| {
        let folder = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(package()).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
        let spec = file(package().join("model.toml"));
        assert!(spec.contains(from));
        std::fs::write(folder.path().join("model.toml"), spec.replacen(from, to, 1)).unwrap();
        std::fs::write(folder.path().join("broken.json"), "{}").unwrap();
        let store = tempfile::tempdir().unwrap();
        put(store.path(), &plan(folder.path().into())).unwrap_err().to_string()
    };
    for (from, to, expected) in [
        ("tokenizer = \"wordpiece.json\"", "", "table `words` has no tokenizer, which a text feature needs"),
        ("\"wordpiece.json\"", "\"absent.json\"", "file `absent.json` is missing"),
        ("\"wordpiece.json\"", "\"../wordpiece.json\"", "expected a plain name inside the package"),
        ("\"wordpiece.json\"", "\"broken.json\"", "broken.json: not a tokenizer.json"),
        ("length = 6\n", "length = 2\n", "length: got 2, expected more than the 2 special tokens"),
        ("length = 6\n", "", "length is missing"),
        ("length = 6\n", "length = 6\nweights = false\n", "weights = false is only valid for pooled `ids`"),
        ("name = \"words\"", "name = \"pieces2\"", "table `words` is not declared"),
    ] {
        let error = rejected(from, to);
        assert!(error.contains(expected), "{to}: {error}");
    }
}
