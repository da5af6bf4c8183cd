//! Decisions at publication: the part of the reranker that is precomputed per item, and its precision.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use sterling::kernels::cpu::Kernels;
use sterling::request::Ranked;
use sterling::serving::fresh::{Fresh, Put, Update};
use sterling::serving::view::{Attribute, View};
use sterling::snapshot::{PARTS_FILE, PartFormat};

use crate::onnx::Onnx;
use crate::packages::{Made, view};
use crate::support::{json as read, put, retrieve, run, text};

const D: usize = 8;
const HIDDEN: usize = 64;
const ITEMS: i64 = 300;

fn number(seed: usize) -> f32 {
    ((seed * 37 + 11) % 101) as f32 / 50.0 - 1.0
}

fn numbers(count: usize, seed: usize, scale: f32) -> Vec<f32> {
    (0..count).map(|n| number(n * 7 + seed * 13) * scale).collect()
}

fn brand(id: i64) -> &'static str {
    ["a", "b"][(id % 2) as usize]
}

fn item(id: i64) -> Value {
    let (embedding, price) = (numbers(D, id as usize, 1.0), (id % 17) as f64 / 4.0);
    json!({"id": id, "embedding": embedding, "attributes": {"price": price, "brand": brand(id)}})
}

/// Returns a network over the item and its price, whose product with the query is the logit beside the retrieval score;
/// `precision` is a line of `model.toml`.
fn package(precision: &str) -> Made {
    let model = format!(
        r#"
name = "parts"
dimension = {D}
{precision}

[[tasks]]
name = "click"

[overarch]
graph = "overarch.onnx"

[value]
expression = "click"
"#
    );
    let items: Vec<Value> = (0..ITEMS).map(item).collect();
    Made::new(&model, &items).graph("overarch.onnx", overarch())
}

fn overarch() -> Onnx {
    let (d, hidden) = (D as i64, HIDDEN as i64);
    Onnx::default()
        .input("query", &[-1, d])
        .input("item", &[-1, -1, d])
        .input("price", &[-1, -1])
        .input("similarity", &[-1, -1])
        .output("logits", &[-1, -1, 1])
        .numbers("w1", &[d + 1, hidden], &numbers((D + 1) * HIDDEN, 1, 0.4))
        .numbers("w2", &[hidden, hidden], &numbers(HIDDEN * HIDDEN, 2, 0.2))
        .numbers("w3", &[hidden, d], &numbers(HIDDEN * D, 3, 0.2))
        .integers("last", &[-1])
        .integers("second", &[1])
        .node("Unsqueeze", &["price", "last"], "one_price")
        .node_with("Concat", &["item", "one_price"], "of_item", &[("axis", &[-1])])
        .node("MatMul", &["of_item", "w1"], "h1")
        .node("Relu", &["h1"], "r1")
        .node("MatMul", &["r1", "w2"], "h2")
        .node("Relu", &["h2"], "r2")
        .node("MatMul", &["r2", "w3"], "out")
        .node("Unsqueeze", &["query", "second"], "one_query")
        .node("Mul", &["out", "one_query"], "product")
        .node_with("ReduceSum", &["product", "last"], "sum", &[("keepdims", &[1])])
        .node("Unsqueeze", &["similarity", "last"], "one_similarity")
        .node("Add", &["sum", "one_similarity"], "logits")
}

fn published(made: &Made, store: &Path, format: PartFormat) -> std::path::PathBuf {
    let mut what = made.publication();
    what.recipe.reranking.item_part = format;
    let version = put(store, &what).unwrap();
    store.join("parts").join(version.to_string())
}

fn bodies() -> Vec<Value> {
    let body = |n: usize| json!({"vector": numbers(D, n * 5 + 1, 1.0), "k": 50, "candidates": 120 + n, "exact": true});
    (0..4).map(body).collect()
}

fn answers(view: &Arc<View>) -> Vec<Ranked> {
    retrieve(view, &bodies()).into_iter().map(|answer| answer.unwrap().0).collect()
}

/// Returns whether both rank the same items alike, except those with nearly equal scores.
fn alike(got: &[Ranked], want: &[Ranked], tolerance: f32) {
    for (got, want) in got.iter().zip(want) {
        assert_eq!(got.ids.len(), want.ids.len());
        for (n, (a, b)) in got.scores.iter().zip(&want.scores).enumerate() {
            assert!((a - b).abs() <= tolerance, "place {n}: {a} is not {b}");
            let same = want.ids.iter().position(|id| *id == got.ids[n]);
            let is_near = same.map_or((b - want.scores[want.scores.len() - 1]).abs() <= tolerance, |at| {
                (want.scores[at] - a).abs() <= tolerance
            });
            assert!(is_near, "place {n}: item {}", got.ids[n]);
        }
    }
}

#[test]
fn item_side_values_change_no_answer() {
    let (made, store) = (package(""), tempfile::tempdir().unwrap());
    let whole = published(&made, store.path(), PartFormat::None);
    assert!(!whole.join(PARTS_FILE).exists());
    let want = answers(&view(&whole));
    let work = |view: &View| view.overarch().unwrap().work(1000);
    let all = work(&view(&whole));
    for (format, name, tolerance) in
        [(PartFormat::F32, "f32", 1e-6), (PartFormat::F16, "f16", 1e-3), (PartFormat::Int8, "int8", 1e-2)]
    {
        let folder = published(&made, store.path(), format);
        let retained = view(&folder);
        let part = retained.overarch().unwrap().part().expect("a part");
        assert_eq!(part.width(), D);
        assert!(work(&retained) * 10 < all, "{} of {all}", work(&retained));
        alike(&answers(&retained), &want, tolerance);
        let decided = &read(folder.join("manifest.json"))["decisions"]["item_part"];
        assert_eq!((&decided["format"], &decided["width"]), (&json!(name), &json!(D)));
        // Columns that only the precomputed part reads are not stored.
        assert_eq!(retained.numbers().count(), 0);
        let (code, reported, _) = run(&["inspect", folder.to_str().unwrap()]);
        assert_eq!(code, 0);
        assert!(reported.contains(&format!("item-side values: {D} numbers of the reranker in {name}")), "{reported}");
        assert!(reported.contains("item-side values"), "{reported}");
    }
}

#[test]
fn updated_items_have_item_side_values() {
    let store = tempfile::tempdir().unwrap();
    let some: Vec<Value> = (0..200).map(item).collect();
    let all = package("");
    let fewer = package("");
    let lines: Vec<String> = some.iter().map(ToString::to_string).collect();
    std::fs::write(fewer.path("items.jsonl"), lines.join("\n")).unwrap();
    let want = answers(&view(&published(&all, store.path(), PartFormat::F32)));
    let main = view(&published(&fewer, store.path(), PartFormat::F32)).main().clone();
    let attributes = |id: i64| {
        let price = Attribute::Number((id % 17) as f64 / 4.0);
        vec![("price".into(), price), ("brand".into(), Attribute::Texts(vec![brand(id).into()]))]
    };
    let given = |id: i64| {
        let vector = Some(numbers(D, id as usize, 1.0));
        Update::Put(Put { id, vector, attributes: attributes(id), dense: Vec::new() })
    };
    // Some are new, some are put again unchanged, one after its price had changed.
    let mut updates: Vec<Update> = (190..ITEMS).map(given).collect();
    updates.insert(0, Update::Set { id: 7, attributes: vec![("price".into(), Attribute::Number(99.0))] });
    updates.push(Update::Set { id: 7, attributes: attributes(7) });
    let mut fresh = Fresh::new(main, 0).in_place();
    assert!(fresh.apply(&updates).unwrap().is_empty());
    let fresh = Arc::new(fresh.view().unwrap());
    assert_eq!(fresh.items(), ITEMS as usize);
    alike(&answers(&fresh), &want, 1e-5);
}

#[test]
fn unusable_item_side_values_are_rejected_or_ignored() {
    let (made, store) = (package(""), tempfile::tempdir().unwrap());
    let whole = published(&made, store.path(), PartFormat::F32);
    let want = answers(&view(&whole));
    let copy = tempfile::tempdir().unwrap();
    let changed = |from: &str, to: &str| {
        let folder = copy.path().to_owned();
        for file in std::fs::read_dir(&whole).unwrap().map(Result::unwrap) {
            std::fs::copy(file.path(), folder.join(file.file_name())).unwrap();
        }
        let manifest = text(folder.join("manifest.json"));
        let other = manifest.replacen(from, to, 1);
        assert_ne!(other, manifest, "{from}");
        std::fs::write(folder.join("manifest.json"), other).unwrap();
        folder
    };
    let load = |folder: &Path| sterling::snapshot::Snapshot::load(folder, &sterling::snapshot::Placement::whole());
    // A cut that is not in this graph, or parts of another program: the complete graph runs per candidate.
    let digest = |manifest: &Value| manifest["decisions"]["item_part"]["digest"].as_str().unwrap().to_owned();
    let sample = digest(&read(whole.join("manifest.json")));
    assert_eq!(sample.len(), 32);
    // Older versions have a digest of the program's text.
    let before = view(&whole).overarch().unwrap().part().unwrap().program().digest();
    let of_before = view(&changed(&sample, &before));
    assert!(of_before.overarch().unwrap().part().is_some());
    alike(&answers(&of_before), &want, 1e-6);
    for (from, to) in
        [("\"cut\": [", "\"cut\": [9999999, "), (sample.as_str(), "0123456789abcdef"), ("\"width\": 8", "\"width\": 9")]
    {
        let view = view(&changed(from, to));
        assert!(view.overarch().unwrap().part().is_none(), "{from}");
        alike(&answers(&view), &want, 1e-6);
    }
    let error = load(&changed("\"format\": \"f32\"", "\"format\": \"f16\"")).unwrap_err().to_string();
    assert!(error.contains("parts.safetensors"), "{error}");
    let error = load(&changed("\"parts.safetensors\"", "\"parks.safetensors\"")).unwrap_err().to_string();
    assert!(error.contains("parks.safetensors") || error.contains("names no `parts.safetensors`"), "{error}");
}

#[test]
fn a_precision_that_is_left_open_is_measured_or_f32() {
    let made = package("precision = \"auto\"");
    let store = tempfile::tempdir().unwrap();
    let folder = published(&made, store.path(), PartFormat::None);
    let decided = read(folder.join("manifest.json"))["decisions"]["precision"].clone();
    let reason = decided["reason"].as_str().unwrap();
    match Kernels::best().has_bf16() {
        true => {
            assert_eq!(decided["chosen"], "bf16");
            assert!(reason.contains("64 sample requests keep "), "{reason}");
        }
        false => {
            assert_eq!(decided["chosen"], "f32");
            assert!(reason.contains("no products of bf16"), "{reason}");
        }
    }
    let (code, reported, _) = run(&["inspect", folder.to_str().unwrap()]);
    assert_eq!(code, 0);
    assert!(reported.contains(&format!("precision {}: {reason}", decided["chosen"].as_str().unwrap())), "{reported}");
    let plain = answers(&view(&published(&package(""), store.path(), PartFormat::None)));
    alike(&answers(&view(&folder)), &plain, 2e-2);
}

#[test]
fn a_golden_answer_that_bf16_does_not_give_keeps_f32() {
    let made = package("precision = \"auto\"");
    let store = tempfile::tempdir().unwrap();
    let view = view(&published(&package(""), store.path(), PartFormat::None));
    let answer = &answers(&view)[0];
    let line = json!({"request": bodies()[0], "ids": answer.ids.iter().map(|id| id.0).collect::<Vec<_>>(),
        "scores": answer.scores, "tolerance": 1e-5});
    std::fs::write(made.path("warmup.jsonl"), line.to_string()).unwrap();
    let folder = published(&made, store.path(), PartFormat::None);
    let decided = read(folder.join("manifest.json"))["decisions"]["precision"].clone();
    assert_eq!(decided["chosen"], "f32", "{decided}");
    let expected = if Kernels::best().has_bf16() { "a golden answer differs in bf16" } else { "no products of bf16" };
    assert!(decided["reason"].as_str().unwrap().contains(expected), "{decided}");
}

#[test]
fn the_reranker_of_a_package_in_int8_stays_in_f32() {
    let store = tempfile::tempdir().unwrap();
    let served = |precision| view(&published(&package(precision), store.path(), PartFormat::F32));
    let [in_int8, in_f32] = [served("precision = \"int8\""), served("")];
    let program = |view: &View| view.overarch().unwrap().graph().1.program().unwrap().to_string();
    assert_eq!(program(&in_int8), program(&in_f32));
    for (made, exact) in answers(&in_int8).iter().zip(&answers(&in_f32)) {
        assert_eq!((&made.ids, &made.scores), (&exact.ids, &exact.scores));
    }
}

/// Returns a package with a user tower of three layers over one vector; `w2` are the weights of the second one.
fn tower_package(precision: &str, w1: &[f32], w2: &[f32]) -> Made {
    let (d, hidden) = (D as i64, HIDDEN as i64);
    let model = format!(
        r#"
name = "parts"
dimension = {D}
{precision}

[user]
tower = "user.onnx"

[[user.features]]
name = "x"
kind = "dense"
width = {D}
"#
    );
    let tower = Onnx::default()
        .input("x", &[-1, d])
        .output("query", &[-1, d])
        .numbers("w1", &[d, hidden], w1)
        .numbers("w2", &[hidden, hidden], w2)
        .numbers("w3", &[hidden, d], &numbers(HIDDEN * D, 3, 0.2))
        .node("MatMul", &["x", "w1"], "h1")
        .node("Relu", &["h1"], "r1")
        .node("MatMul", &["r1", "w2"], "h2")
        .node("Relu", &["h2"], "r2")
        .node("MatMul", &["r2", "w3"], "query");
    let items: Vec<Value> = (0..ITEMS).map(item).collect();
    Made::new(&model, &items).graph("user.onnx", tower)
}

#[test]
fn a_tower_in_int8_answers_nearly_as_in_f32() {
    let store = tempfile::tempdir().unwrap();
    let (w1, w2) = (numbers(D * HIDDEN, 1, 0.4), numbers(HIDDEN * HIDDEN, 2, 0.2));
    let served = |precision| published(&tower_package(precision, &w1, &w2), store.path(), PartFormat::None);
    let [folder, in_f32] = [served("precision = \"int8\""), served("")];
    assert!(read(folder.join("manifest.json"))["decisions"]["precision"].is_null());
    let [in_int8, in_f32] = [&folder, &in_f32].map(|folder| view(folder));
    let program = in_int8.main().package.user.as_ref().unwrap().graph().1.program().unwrap().to_string();
    assert!(program.starts_with("products marked int8 in int8, on GPUs in f32"), "{program}");
    assert_eq!(program.matches("int8 product").count(), 1, "{program}");
    let answers = |view: &Arc<View>| -> Vec<Ranked> {
        let body = |n: usize| json!({"features": {"x": numbers(D, n * 5 + 1, 1.0)}, "k": 50, "exact": true});
        let bodies: Vec<Value> = (0..4).map(body).collect();
        retrieve(view, &bodies).into_iter().map(|answer| answer.unwrap().0).collect()
    };
    let (made, plain) = (answers(&in_int8), answers(&in_f32));
    alike(&made, &plain, 3e-2 * plain[0].scores[0].abs().max(1.0));
    assert!(made.iter().zip(&plain).any(|(a, b)| a.scores != b.scores), "int8 changes no score");
}

/// A hidden unit that is large and has no effect takes the resolution of the others.
#[test]
fn a_package_that_int8_changes_is_rejected_with_its_error() {
    let (mut w1, mut w2) = (numbers(D * HIDDEN, 1, 0.4), numbers(HIDDEN * HIDDEN, 2, 2.0));
    w1.iter_mut().step_by(HIDDEN).for_each(|w| *w = 1e5);
    w2[..HIDDEN].fill(0.0);
    let store = tempfile::tempdir().unwrap();
    put(store.path(), &tower_package("", &w1, &w2).publication()).unwrap();
    let rejected = put(store.path(), &tower_package("precision = \"int8\"", &w1, &w2).publication());
    let error = rejected.unwrap_err().to_string();
    assert!(error.contains("user.onnx: outputs in int8 differ from f32 by "), "{error}");
    assert!(error.contains("expected at most 10.00 %: use `precision = \"bf16\"` or f32"), "{error}");
}
