//! Warm-ups: recorded requests of a version that must get the same answers before it may serve.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sterling::error::Kind;
use sterling::publish::Plan;
use sterling::snapshot::Manifest;
use sterling::storage::files::Checksum;
use tempfile::TempDir;

use crate::support::{Server, ids, put, text, tiny, tiny_package, until};

const RETRIEVE: &str = "/v1/models/tiny:retrieve";

fn request(k: usize) -> Value {
    json!({"features": {"installed": [1, 5]}, "k": k})
}

/// Returns the tiny package with a warm-up of these lines.
fn package(lines: &[String]) -> (TempDir, Plan) {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(tiny_package()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    fs::write(folder.path().join("warmup.jsonl"), lines.join("\n")).unwrap();
    let what = Plan { source: Plan::of_package(folder.path()).source, ..tiny() };
    (folder, what)
}

fn publish(store: &Path, lines: &[String]) -> sterling::error::Result<u64> {
    let (_folder, what) = package(lines);
    put(store, &what)
}

fn version(store: &Path, version: u64) -> PathBuf {
    store.join(format!("tiny/{version}"))
}

fn lines(store: &Path, number: u64) -> Vec<Value> {
    let text = text(version(store, number).join("warmup.jsonl"));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn line(request: &Value, ids: &[i64], scores: &[f64]) -> String {
    json!({"request": request, "ids": ids, "scores": scores}).to_string()
}

/// Writes other lines into a published version, and updates its checksums.
fn rewrite(folder: &Path, lines: &[Value]) {
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::write(folder.join("warmup.jsonl"), &text).unwrap();
    let mut manifest = Manifest::read(folder).unwrap();
    manifest.files.insert("warmup.jsonl".into(), Checksum::of(text.as_bytes()));
    manifest.write(folder).unwrap();
}

#[test]
fn publishing_fills_missing_golden_answers_and_checks_the_others() {
    let store = tempfile::tempdir().unwrap();
    let open = json!({"request": request(3)}).to_string();
    assert_eq!(publish(store.path(), &[open.clone(), open.clone()]).unwrap(), 1);
    let golden = lines(store.path(), 1).remove(0);
    let found: Vec<i64> = golden["ids"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect();
    let scores: Vec<f64> = golden["scores"].as_array().unwrap().iter().map(|s| s.as_f64().unwrap()).collect();
    assert_eq!((found.len(), scores.len(), &golden["request"]), (3, 3, &request(3)));
    let server = Server::start(store.path());
    assert_eq!(ids(&server.ask(RETRIEVE, request(3))), found);

    // An answer from a trainer is stored unchanged, including its rounding.
    let near: Vec<f64> = scores.iter().map(|s| s * 1.0001).collect();
    let brought = line(&request(3), &found, &near);
    let number = publish(store.path(), std::slice::from_ref(&brought)).unwrap();
    assert_eq!(text(version(store.path(), number).join("warmup.jsonl")), brought + "\n");

    let far = |by: f64| scores.iter().map(|s| s * by).collect::<Vec<f64>>();
    let mut swapped = found.clone();
    swapped.swap(0, 2);
    let tolerant = json!({"request": request(3), "ids": found, "scores": far(1.01), "tolerance": 0.02}).to_string();
    publish(store.path(), &[tolerant]).unwrap();
    for (bad, kind, expected) in [
        (line(&request(3), &found, &far(1.01)), Kind::Corrupt, "rank 1: got item"),
        (line(&request(3), &swapped, &scores), Kind::Corrupt, "rank 1: got item"),
        (line(&request(2), &found, &scores), Kind::Corrupt, "got 2 items, expected 3"),
        (line(&request(3), &found[..2], &scores), Kind::Invalid, "2 `ids` and 3 `scores`"),
        (json!({"request": request(3), "ids": found}).to_string(), Kind::Invalid, "expected both or none"),
        (json!({"request": request(3), "scores": scores}).to_string(), Kind::Invalid, "expected both or none"),
        (json!({"request": request(0)}).to_string(), Kind::Invalid, "field `k`: got 0"),
        (json!({"request": {"k": 3}}).to_string(), Kind::Invalid, "`features`"),
        (json!({"request": {"requests": [request(3)]}}).to_string(), Kind::Invalid, "got a list of requests"),
        (json!({"request": request(3), "id": [1]}).to_string(), Kind::Invalid, "unknown field `id`"),
        (json!({"ids": found, "scores": scores}).to_string(), Kind::Invalid, "missing field `request`"),
        (
            json!({"request": request(3), "ids": found, "scores": scores, "tolerance": 2}).to_string(),
            Kind::Invalid,
            "`tolerance`",
        ),
        (json!({"request": request(3), "ids": ["a"], "scores": [1]}).to_string(), Kind::Invalid, "field `ids[0]`"),
        ("{\"request\": ".into(), Kind::Invalid, "not JSON"),
        ("[]".into(), Kind::Invalid, "expected a JSON object"),
        (String::new(), Kind::Invalid, "not JSON"),
    ] {
        let error = publish(store.path(), &[open.clone(), bad.clone(), open.clone()]).unwrap_err();
        assert!(error.to_string().contains("warmup.jsonl line 2: "), "{bad}: {error}");
        assert!(error.to_string().contains(expected) && error.kind() == kind, "{bad}: {error}");
    }
    let error = publish(store.path(), &vec![open; 1001]).unwrap_err().to_string();
    assert!(error.contains("warmup.jsonl line 1001: expected up to 1000 lines"), "{error}");
}

#[test]
fn versions_with_other_golden_answers_are_rejected() {
    let store = tempfile::tempdir().unwrap();
    let open = [json!({"request": request(3)}).to_string(), json!({"request": request(2)}).to_string()];
    let aside = tempfile::tempdir().unwrap();
    for _ in 0..4 {
        publish(aside.path(), &open).unwrap();
    }
    let golden = lines(aside.path(), 1);
    fs::create_dir(store.path().join("tiny")).unwrap();
    let release = |number| fs::rename(version(aside.path(), number), version(store.path(), number)).unwrap();
    release(1);
    let server = Server::start(store.path());
    let answer = server.ask(RETRIEVE, request(3));
    assert_eq!(json!(ids(&answer)), golden[0]["ids"]);

    let mut wrong = golden.clone();
    wrong[1]["scores"][0] = json!(wrong[1]["scores"][0].as_f64().unwrap() + 0.5);
    let mut unanswered = golden.clone();
    unanswered[0].as_object_mut().unwrap().remove("scores");
    for (number, lines, expected) in [(2, wrong, "line 2: rank 1"), (3, unanswered, "line 1: no `ids`")] {
        rewrite(&version(aside.path(), number), &lines);
        release(number);
        let state = || server.get_json("/v1/models/tiny/versions")["versions"][number as usize - 1].clone();
        until("the rejection", || state()["refused"].is_string());
        let refused = state();
        let reason = refused["refused"].as_str().unwrap();
        assert!(reason.contains("warm-up: warmup.jsonl") && reason.contains(expected), "{reason}");
        assert_eq!((&refused["attempts"], &refused["retry_in_ms"]), (&json!(1), &Value::Null), "it is not tried again");
        assert_eq!(server.ask(RETRIEVE, request(3))["version"], 1);
    }

    // Ranks that rounding may have swapped are accepted.
    let mut swapped = golden;
    let near = swapped[0]["scores"][0].clone();
    swapped[0]["scores"][1] = near;
    swapped[0]["tolerance"] = json!(1.0);
    swapped[0]["ids"].as_array_mut().unwrap().swap(0, 1);
    rewrite(&version(aside.path(), 4), &swapped);
    release(4);
    until("version 4", || server.ask(RETRIEVE, request(3))["version"] == 4);
}
