//! Inputs that the graphs of a package may read, compared with answers computed by hand: tensors of the user, sequences, item
//! vectors, columns looked up in tables, the retrieval score.

use std::sync::Arc;

use serde_json::{Value, json};
use sterling::graph::tower::{Runs, Threads};
use sterling::request::{Answer, Content, Ranked, Request};
use sterling::server::describe::model_info;
use sterling::serving::pass::{self, Cpu};
use sterling::serving::view::View;

use crate::onnx::Onnx;
use crate::packages::{Made, view};
use crate::support::retrieve;

/// Rows of `items`, of width 3; higher ids have none.
const ITEM_ROWS: usize = 6;
const BRANDS: [&str; 3] = ["acme", "bolt", "zürich"];

fn item_row(id: i64) -> [f32; 3] {
    match usize::try_from(id) {
        Ok(row) if row < ITEM_ROWS => [row as f32 * 0.25 - 0.5, 0.75 - row as f32 * 0.125, (row % 2) as f32],
        _ => [0.0; 3],
    }
}

fn brand_row(brand: &str) -> [f32; 2] {
    match BRANDS.iter().position(|known| *known == brand) {
        Some(row) => [row as f32 + 0.5, -0.25 * row as f32],
        None => [0.0; 2],
    }
}

/// `[3, 2]`
const TO_QUERY: [f32; 6] = [1.0, 0.5, -0.5, 0.25, 0.125, 1.0];
const TO_ENCODED: [f32; 6] = [0.5, -1.0, 0.25, 0.5, 1.0, 0.125];
const TO_ITEM: [f32; 6] = [1.0, 0.25, 0.5, -0.5, 0.25, 1.0];
const TO_PARTS: [f32; 6] = [0.5, 1.0, -0.25, 0.25, 1.0, 0.5];

fn times(row: &[f32; 3], matrix: &[f32; 6]) -> [f32; 2] {
    [0, 1].map(|column| (0..3).map(|n| row[n] * matrix[n * 2 + column]).sum())
}

/// An item: its id, brands, price and image.
struct Item {
    id: i64,
    brands: Vec<&'static str>,
    price: Option<f32>,
    image: [f32; 3],
}

fn items() -> Vec<Item> {
    let brands: [&[&str]; 5] = [&["acme"], &["zürich", "acme"], &[], &["unheard of"], &["bolt", "zürich", "acme"]];
    let item = |id: i64| Item {
        id,
        brands: brands[id as usize % 5].to_vec(),
        price: (id % 3 != 1).then_some(id as f32 * 0.5 - 1.0),
        image: [0.5 * (id % 4) as f32, -0.25, 0.125 * id as f32],
    };
    (0..9).map(item).collect()
}

pub fn lines() -> Vec<Value> {
    let line = |item: Item| {
        let mut attributes = json!({"image": item.image, "shelf": format!("s{}", item.id % 2)});
        if !item.brands.is_empty() {
            attributes["brand"] = json!(item.brands);
        }
        if let Some(price) = item.price {
            attributes["price"] = json!(price);
        }
        json!({"id": item.id, "attributes": attributes})
    };
    items().into_iter().map(line).collect()
}

fn model(keep: &str, format: &str) -> String {
    format!(
        r#"
name = "seen"
dimension = 2

[[tables]]
name = "items"
file = "tables.safetensors"

[[tables]]
name = "brands"
file = "tables.safetensors"
vocabulary = "brands.txt"

[user]
tower = "user.onnx"

[[user.features]]
name = "history"
kind = "ids"
table = "items"
pooling = "none"
length = 4
keep = "{keep}"
max_ids = 8

[[user.features]]
name = "age"
kind = "dense"
width = 1

[[user.features]]
name = "likes"
kind = "category"
table = "brands"

[item]
tower = "item.onnx"

[[item.features]]
name = "own"
kind = "ids"
table = "items"
column = "id"

[[item.vectors]]
name = "parts"
width = 2
format = "{format}"

[[item.vectors]]
name = "picture"
column = "image"
width = 3
format = "f32"

[[item.columns]]
name = "brand"

[[item.columns]]
name = "price"

[[item.columns]]
name = "shelf"

[[tasks]]
name = "watch"

[[tasks]]
name = "buy"

[overarch]
graph = "overarch.onnx"

[[overarch.features]]
name = "item_brand"
kind = "category"
table = "brands"
pooling = "mean"
column = "brand"

[[overarch.features]]
name = "item_row"
kind = "ids"
table = "items"
column = "id"

[value]
expression = "watch + 2 * buy"
"#
    )
}

fn user_tower() -> Onnx {
    Onnx::default()
        .input("history", &[-1, 4, 3])
        .input("history_mask", &[-1, 4])
        .numbers("to_query", &[3, 2], &TO_QUERY)
        .numbers("to_encoded", &[3, 2], &TO_ENCODED)
        .integers("last", &[2])
        .integers("middle", &[1])
        .node("Unsqueeze", &["history_mask", "last"], "mask")
        .node("Mul", &["history", "mask"], "present")
        .node_with("ReduceSum", &["present", "middle"], "sum", &[("keepdims", &[0])])
        .node("MatMul", &["sum", "to_query"], "query")
        .node("MatMul", &["history", "to_encoded"], "encoded")
        .node("Neg", &["query"], "unread")
        .output("query", &[-1, 2])
        .output("encoded", &[-1, 4, 2])
        .output("unread", &[-1, 2])
}

fn item_tower() -> Onnx {
    Onnx::default()
        .input("own", &[-1, 3])
        .numbers("to_item", &[3, 2], &TO_ITEM)
        .numbers("to_parts", &[3, 2], &TO_PARTS)
        .node("MatMul", &["own", "to_item"], "item")
        .node("MatMul", &["own", "to_parts"], "parts")
        .output("parts", &[-1, 2])
        .output("item", &[-1, 2])
}

/// `watch`: target attention over the history. `buy`: the sum of all other inputs.
fn overarch(is_program: bool) -> Onnx {
    let sums = ["picture", "parts", "item_brand", "item_row", "likes", "query"];
    let mut graph = Onnx::default()
        .input("encoded", &[-1, 4, 2])
        .input("history_mask", &[-1, 4])
        .input("age", &[-1, 1])
        .input("likes", &[-1, 2])
        .input("query", &[-1, 2])
        .input("item", &[-1, -1, 2])
        .input("picture", &[-1, -1, 3])
        .input("parts", &[-1, -1, 2])
        .input("item_brand", &[-1, -1, 2])
        .input("item_row", &[-1, -1, 3])
        .input("similarity", &[-1, -1])
        .input("price", &[-1, -1])
        .integers("last", &[-1])
        .integers("one", &[1])
        .integers("two", &[2])
        .node_with("Transpose", &["encoded"], "keys", &[("perm", &[0, 2, 1])])
        .node("MatMul", &["item", "keys"], "attention")
        .node("Unsqueeze", &["history_mask", "one"], "mask")
        .node("Mul", &["attention", "mask"], "attended")
        .node_with("ReduceSum", &["attended", "last"], "watch", &[("keepdims", &[1])])
        .node("Mul", &["price", "age"], "aged")
        .node("Add", &["similarity", "aged"], "buy0");
    for (n, name) in sums.iter().enumerate() {
        let (sum, before, after) = (format!("sum_{name}"), format!("buy{n}"), format!("buy{}", n + 1));
        graph = graph.node_with("ReduceSum", &[name, "last"], &sum, &[("keepdims", &[i64::from(n >= 4)])]).node(
            "Add",
            &[&before, &sum],
            &after,
        );
    }
    graph = graph.node("Unsqueeze", &["buy6", "two"], "buy");
    graph = match is_program {
        true => graph.node_with("Concat", &["watch", "buy"], "logits", &[("axis", &[2])]),
        // An operator that programs do not support.
        false => graph
            .node_with("Concat", &["watch", "buy"], "both", &[("axis", &[2])])
            .numbers("nothing", &[1, 1, 1], &[0.0])
            .node("LpNormalization", &["nothing"], "zero")
            .node("Add", &["both", "zero"], "logits"),
    };
    graph.output("logits", &[-1, -1, 2])
}

pub fn package(keep: &str, format: &str, is_program: bool) -> Made {
    let rows: Vec<f32> = (0..ITEM_ROWS as i64).flat_map(item_row).collect();
    let brands: Vec<f32> = BRANDS.iter().flat_map(|brand| brand_row(brand)).collect();
    Made::new(&model(keep, format), &lines())
        .tables(&[("items", 3, &rows), ("brands", 2, &brands)])
        .text("brands.txt", &BRANDS.join("\n"))
        .graph("user.onnx", user_tower())
        .graph("item.onnx", item_tower())
        .graph("overarch.onnx", overarch(is_program))
}

/// A user of the tests.
pub struct User {
    history: Vec<i64>,
    age: f32,
    likes: Vec<&'static str>,
}

pub fn users() -> Vec<User> {
    let user =
        |history: &[i64], age, likes: &[&'static str]| User { history: history.to_vec(), age, likes: likes.to_vec() };
    vec![
        user(&[1, 2], 0.5, &["acme"]),
        user(&[], -1.0, &[]),
        user(&[5, 4, 3, 2, 1, 0], 0.25, &["bolt", "zürich"]),
        user(&[3, 77, -1, 3], 2.0, &["unheard of"]),
        user(&[1, 1, 1, 1], 0.0, &["bolt"]),
        user(&[99; 8], 1.0, &[]),
    ]
}

pub fn features(user: &User) -> Value {
    json!({"history": user.history, "age": [user.age], "likes": user.likes})
}

/// Returns the retrieval score and the task scores, computed by hand.
fn expected(user: &User, item: &Item, keeps_last: bool) -> [f32; 3] {
    let cut = user.history.len().saturating_sub(4);
    let retained = if keeps_last { &user.history[cut..] } else { &user.history[..user.history.len() - cut] };
    let rows: Vec<[f32; 3]> = retained.iter().map(|&id| item_row(id)).collect();
    let sum = rows.iter().fold([0.0; 3], |sum, row| [0, 1, 2].map(|n| sum[n] + row[n]));
    let query = times(&sum, &TO_QUERY);
    let vector = times(&item_row(item.id), &TO_ITEM);
    let product = |a: [f32; 2], b: [f32; 2]| a[0] * b[0] + a[1] * b[1];
    let similarity = product(query, vector);
    let watch: f32 = rows.iter().map(|row| product(times(row, &TO_ENCODED), vector)).sum();
    let total = |row: &[f32]| row.iter().sum::<f32>();
    let brands: f32 = item.brands.iter().map(|brand| total(&brand_row(brand))).sum();
    let buy = similarity
        + item.price.unwrap_or(0.0) * user.age
        + total(&item.image)
        + total(&times(&item_row(item.id), &TO_PARTS))
        + brands / item.brands.len().max(1) as f32
        + total(&item_row(item.id))
        + user.likes.iter().map(|brand| total(&brand_row(brand))).sum::<f32>()
        + total(&query);
    let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
    [similarity, sigmoid(watch), sigmoid(buy)]
}

pub fn bodies(users: &[User]) -> Vec<Value> {
    users.iter().map(|user| json!({"features": features(user), "k": 9, "exact": true})).collect()
}

pub fn answers(view: &Arc<View>, bodies: &[Value]) -> Vec<Ranked> {
    retrieve(view, bodies).into_iter().map(|answer| answer.unwrap().0).collect()
}

#[test]
fn an_overarch_reads_the_inputs_of_its_package() {
    for (keep, format, is_program, tolerance) in [
        ("last", "f32", true, 1e-5),
        ("first", "f16", true, 1e-3),
        ("last", "bf16", false, 5e-3),
        ("first", "int8", false, 5e-3),
        ("last", "int8", true, 5e-3),
    ] {
        let view = package(keep, format, is_program).view().unwrap();
        let overarch = view.overarch().unwrap();
        assert_eq!(matches!(overarch.graph().1, Runs::Program(_)), is_program);
        assert!(matches!(view.main().package.user.as_ref().unwrap().graph().1, Runs::Program(_)));
        for (user, ranked) in users().iter().zip(answers(&view, &bodies(&users()))) {
            assert_eq!(ranked.ids.len(), 9);
            for (n, id) in ranked.ids.iter().enumerate() {
                let item = items().into_iter().find(|item| item.id == id.0).unwrap();
                let [similarity, watch, buy] = expected(user, &item, keep == "last");
                let got = [ranked.similarities[n], ranked.tasks[n], ranked.tasks[9 + n]];
                for (got, want) in got.iter().zip([similarity, watch, buy]) {
                    let place = format!("{format}, {keep}, {:?}, item {}", user.history, id.0);
                    assert!((got - want).abs() <= tolerance, "{place}: {got} is not {want}");
                }
                assert_eq!(ranked.scores[n], got[1] + 2.0 * got[2]);
            }
        }
    }
}

#[test]
fn a_batch_answers_as_each_alone_bit_for_bit() {
    let view = package("last", "int8", true).view().unwrap();
    let mut bodies = bodies(&users());
    for (n, body) in bodies.clone().into_iter().enumerate() {
        let filter = if n % 2 == 0 { "shelf:s1" } else { "NOT brand:acme" };
        bodies.push(json!({"features": body["features"], "k": 3, "filter": filter, "exclude": [n, 7]}));
    }
    let together = answers(&view, &bodies);
    for (body, together) in bodies.iter().zip(together) {
        let alone = answers(&view, std::slice::from_ref(body)).remove(0);
        let bits = |of: &Ranked| -> Vec<u32> {
            [&of.scores, &of.similarities, &of.tasks].into_iter().flatten().map(|x| x.to_bits()).collect()
        };
        assert_eq!((&alone.ids, bits(&alone)), (&together.ids, bits(&together)), "{body}");
    }
}

#[test]
fn ranking_and_retrieval_read_the_same_inputs() {
    let view = package("last", "f32", true).view().unwrap();
    for (user, retrieved) in users().iter().zip(answers(&view, &bodies(&users()))) {
        let body = json!({"features": features(user), "items": [8, 3, 0, 4242]}).to_string();
        let request = sterling::api::rank(body.as_bytes()).unwrap().0;
        let prepared = pass::prepare(&view, Request::Rank(request)).unwrap();
        let answer = pass::run(&mut Cpu::new(Threads::new(1)), &[prepared], None).remove(0).unwrap();
        let Answer { content: Content::Items(ranked), .. } = answer else { panic!("no items") };
        assert_eq!((ranked.ids.len(), ranked.unknown.len()), (3, 1));
        for (n, id) in ranked.ids.iter().enumerate() {
            let there = retrieved.ids.iter().position(|other| other == id).unwrap();
            assert_eq!(ranked.tasks[n].to_bits(), retrieved.tasks[there].to_bits());
        }
    }
}

#[test]
fn requests_without_required_inputs_are_rejected() {
    let view = package("last", "f16", true).view().unwrap();
    for (body, expected) in [
        (json!({"vector": [1.0, 2.0]}), "field `vector`: the reranker of this model reads features of the user"),
        (json!({"features": {"history": vec![0; 9]}}), "feature `history`: got 9 values, expected at most 8"),
        (json!({"features": {"history": ["a"]}}), "feature `history`: got texts such as \"a\""),
        (json!({"features": {"history": {"values": [1], "weights": [2.0]}}}), "a sequence has no weights"),
        (json!({"features": {"history_mask": [1.0]}}), "unknown feature `history_mask`"),
        (json!({"features": {"encoded": [1.0]}}), "unknown feature `encoded`"),
        (json!({"features": {"age": [1.0, 2.0]}}), "feature `age`: got 2 numbers, expected 1"),
    ] {
        let error = retrieve(&view, std::slice::from_ref(&body)).remove(0).expect_err(expected).to_string();
        assert!(error.contains(expected), "{body}: {error}");
    }
    // Without features, all inputs are missing: an empty history, zeros.
    let nobody = User { history: Vec::new(), age: 0.0, likes: Vec::new() };
    let got = answers(&view, &[json!({"features": {}, "k": 9}), bodies(&[nobody]).remove(0)]);
    assert_eq!(got[0].scores, got[1].scores);
}

#[test]
fn models_report_the_inputs_of_their_graphs() {
    let view = package("last", "int8", true).view().unwrap();
    let info = serde_json::to_value(model_info(view.main())).unwrap();
    assert_eq!(info["features"][1], json!({"name": "history", "kind": "ids", "length": 4}));
    assert_eq!(info["vectors"][0], json!({"name": "parts", "width": 2, "format": "int8"}));
    let inputs = info["inputs"].as_array().unwrap();
    assert_eq!(inputs.len(), 12);
    assert!(inputs.contains(&json!({"name": "encoded", "whose": "user", "shape": [4, 2]})));
    assert!(inputs.contains(&json!({"name": "item_brand", "whose": "candidate", "shape": [2]})));
    assert!(inputs.contains(&json!({"name": "similarity", "whose": "candidate", "shape": []})));
}

#[test]
fn item_vectors_lie_by_slot_and_must_fit() {
    let store = tempfile::tempdir().unwrap();
    let made = package("last", "int8", true);
    let folder = made.publish(store.path()).unwrap();
    let tensors = sterling::storage::files::Tensors::open(&folder.join("vectors.safetensors")).unwrap();
    let slots = view(&folder).main().index.slots();
    assert_eq!(tensors.info("parts").unwrap().1, [slots, 4 + 2], "scale, bias and two codes");
    assert_eq!(tensors.info("picture").unwrap().1, [slots, 3]);
    // The same with one row less.
    let mut file = sterling::storage::files::TensorFile::new();
    file.add_owned("parts", &[slots - 1, 6], vec![0u8; (slots - 1) * 6]).unwrap();
    file.add_owned("picture", &[slots, 3], vec![0f32; slots * 3]).unwrap();
    let sum = file.write(&folder.join("vectors.safetensors")).unwrap();
    let mut manifest = sterling::snapshot::Manifest::read(&folder).unwrap();
    manifest.files.insert("vectors.safetensors".into(), sum);
    manifest.write(&folder).unwrap();
    let load = || sterling::snapshot::Snapshot::load(&folder, &sterling::snapshot::Placement::whole());
    let error = load().unwrap_err().to_string();
    assert!(
        error.contains("item vectors `parts`") && error.contains(&format!("expected {slots} rows of 2 numbers")),
        "{error}"
    );
    manifest.files.remove("vectors.safetensors");
    manifest.write(&folder).unwrap();
    assert!(load().unwrap_err().to_string().contains("the manifest names no `vectors.safetensors`"));
}

/// Publishes the package with one change to `model.toml`.
fn changed(from: &str, to: &str) -> String {
    let text = model("last", "f16");
    assert!(text.contains(from), "{from}");
    let made = package("last", "f16", true).text("model.toml", &text.replacen(from, to, 1));
    match made.view() {
        Ok(_) => "published".into(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn inconsistent_packages_are_rejected_with_the_field() {
    for (from, to, expected) in [
        ("length = 4\n", "", "user.features `history`: length is missing"),
        ("length = 4", "length = 0", "user.features `history`: length: got 0, expected 1 to 8"),
        ("length = 4", "length = 9", "user.features `history`: length: got 9, expected 1 to 8"),
        (
            "length = 4",
            "length = 5",
            "user.onnx: input `history` has shape [?, 4, 3], but the feature has shape [?, 5, 3]",
        ),
        ("keep = \"last\"", "keep = \"middle\"", "unknown variant `middle`"),
        ("pooling = \"none\"", "pooling = \"sum\"", "length is only valid for sequences"),
        ("pooling = \"none\"\nlength = 4\n", "", "keep is only valid for sequences"),
        ("width = 1\n", "width = 1\npooling = \"none\"\n", "user.features `age`: pooling: a dense feature has no rows"),
        ("name = \"age\"", "name = \"history_mask\"", "user.features: name `history_mask` is empty or given twice"),
        ("name = \"likes\"", "name = \"dislikes\"", "user.features `dislikes`: user.onnx: no input `dislikes`"),
        ("name = \"parts\"", "name = \"item\"", "input `item` is one of item.vectors and the candidate's row"),
        ("name = \"parts\"", "name = \"picture\"", "input `picture` is one of item.vectors and one of item.vectors"),
        ("name = \"parts\"", "name = \"likes\"", "input `likes` is one of item.vectors and one of user.features"),
        ("name = \"parts\"", "name = \"pieces\"", "item.onnx: no output `pieces`"),
        ("name = \"parts\"", "name = \"\"", "item.vectors ``: name: missing"),
        ("width = 2\nformat", "width = 3\nformat", "item.onnx: output `parts` has shape [?, 2], expected [?, 3]"),
        ("width = 2\nformat", "width = 0\nformat", "item.vectors `parts`: width: got 0"),
        ("width = 2\nformat", "format", "missing field `width`"),
        (
            "format = \"f16\"",
            "format = \"int4\"",
            "item.vectors `parts`: format: got int4, expected f32, f16, bf16 or int8",
        ),
        ("format = \"f16\"", "format = \"f8\"", "unknown variant `f8`"),
        ("column = \"image\"", "column = \"photo\"", "item.vectors `picture`: items: no column `photo` of vectors"),
        ("width = 3\nformat", "width = 4\nformat", "overarch.onnx: `picture` has shape [?, ?, 3], expected [?, ?, 4]"),
        (
            "name = \"item_brand\"",
            "name = \"similarity\"",
            "input `similarity` is one of overarch.features and the retrieval",
        ),
        (
            "name = \"item_brand\"",
            "name = \"picture\"",
            "input `picture` is one of overarch.features and one of item.vectors",
        ),
        (
            "name = \"item_brand\"",
            "name = \"other\"",
            "overarch.onnx: input `item_brand` of shape [?, ?, 2] is none of: query, item, parts, picture, other",
        ),
        (
            "column = \"brand\"",
            "column = \"colour\"",
            "overarch.features `item_brand`: the snapshot has no column `colour`",
        ),
        ("column = \"brand\"", "column = \"price\"", "overarch.features `item_brand`: column `price` holds numbers"),
        (
            "kind = \"ids\"\ntable = \"items\"\ncolumn = \"id\"\n\n[value]",
            "kind = \"ids\"\ntable = \"items\"\ncolumn = \"shelf\"\n\n[value]",
            "overarch.features `item_row`: column `shelf` holds texts",
        ),
        (
            "pooling = \"mean\"",
            "pooling = \"none\"\nlength = 3",
            "overarch.onnx: `item_brand` has shape [?, ?, 2], expected [?, ?, 3, 2]",
        ),
        (
            "kind = \"category\"\ntable = \"brands\"\npooling",
            "kind = \"dense\"\nwidth = 2\npooling",
            "overarch.features `item_brand`: a dense feature",
        ),
        ("table = \"brands\"\npooling", "table = \"items\"\npooling", "table `items` has no vocabulary"),
        ("name = \"buy\"", "name = \"bought\"", "value.expression"),
        ("[[item.columns]]\nname = \"price\"\n", "", "overarch: input `price` is not a numeric item column"),
        ("graph = \"overarch.onnx\"", "graph = \"user.onnx\"", "user.onnx: no output `logits`"),
        (
            "width = 2\nformat",
            "width = 2\ncolumn = \"image\"\nformat",
            "item.vectors `parts`: column `image`: vectors of 3 numbers, expected 2",
        ),
        ("tower = \"user.onnx\"", "tower = \"user.onnx\"\nmerge = \"union\"", "user.merge is set without user.queries"),
        ("tower = \"user.onnx\"", "tower = \"user.onnx\"\nmerge = \"best\"", "unknown variant `best`"),
        (
            "tower = \"user.onnx\"",
            "tower = \"user.onnx\"\nqueries = [{ name = \"a\" }]",
            "user.onnx: output `query` has shape [?, 2], expected [?, 1, 2]",
        ),
        (
            "tower = \"user.onnx\"",
            "tower = \"user.onnx\"\nqueries = [{ name = \"a\" }, { name = \"a\" }]",
            "user.queries: name `a` is empty or given twice",
        ),
        (
            "tower = \"user.onnx\"",
            "tower = \"user.onnx\"\nqueries = [{ name = \"a\", candidates = 0 }]",
            "user.queries `a`: candidates: got 0",
        ),
        (
            "tower = \"user.onnx\"",
            "tower = \"user.onnx\"\nqueries = [{ name = \"a\", weight = nan }]",
            "user.queries `a`: weight: got NaN",
        ),
        (
            "tower = \"user.onnx\"",
            "tower = \"user.onnx\"\nqueries = [{ name = \"a\", weight = -1.0 }]",
            "user.queries `a`: weight: got -1",
        ),
        (
            "tower = \"user.onnx\"",
            "tower = \"user.onnx\"\nqueries = [{ name = \"a\", share = 1 }]",
            "unknown field `share`",
        ),
    ] {
        let error = changed(from, to);
        assert!(error.contains(expected), "{to}: got `{error}`, expected `{expected}`");
    }
    let tables = std::fs::read(package("last", "f16", true).path("tables.safetensors")).unwrap();
    for file in ["vectors.safetensors", "index.safetensors", "columns.safetensors"] {
        let made = package("last", "f16", true);
        std::fs::write(made.path(file), &tables).unwrap();
        let made = made.text("model.toml", &model("last", "f16").replace("tables.safetensors", file));
        let error = made.view().map(|_| "published").unwrap_err().to_string();
        assert!(error.contains(&format!("file `{file}`: this name is reserved")), "{error}");
    }
    assert_eq!(changed("name = \"seen\"", "name = \"seen2\""), "published");
}

#[test]
fn inconsistent_graphs_are_rejected_with_the_input() {
    let with = |file: &str, graph: Onnx| match package("last", "f16", true).graph(file, graph).view() {
        Ok(_) => "published".into(),
        Err(error) => error.to_string(),
    };
    let small = |inputs: &[(&str, &[i64])]| {
        // The graph reads the other features of the user too, because every feature must be read by a graph.
        let of_user: [(&str, &[i64]); 2] = [("age", &[-1, 1]), ("likes", &[-1, 2])];
        let inputs = [inputs, &of_user[..]].concat();
        let graph = inputs.iter().fold(Onnx::default(), |graph, (name, shape)| graph.input(name, shape));
        graph
            .numbers("weights", &[2, 2], &[1.0; 4])
            .node("MatMul", &[inputs[0].0, "weights"], "logits")
            .output("logits", &[-1, -1, 2])
    };
    for (graph, expected) in [
        (small(&[("item", &[-1, -1, 3])]), "overarch.onnx: `item` has shape [?, ?, 3], expected [?, ?, 2]"),
        (small(&[("item", &[-1, 2])]), "overarch.onnx: `item` has shape [?, 2], expected [?, ?, 2]"),
        (small(&[("query", &[-1, 2])]), "overarch.onnx: no input depends on candidates"),
        (
            small(&[("item", &[-1, -1, 2]), ("nowhere", &[-1, -1])]),
            "overarch: input `nowhere` is not a numeric item column",
        ),
        (
            small(&[("item", &[-1, -1, 2]), ("brand", &[-1, -1])]),
            "overarch: input `brand` is not a numeric item column",
        ),
        (small(&[("parts", &[-1, -1, 5])]), "overarch.onnx: `parts` has shape [?, ?, 5], expected [?, ?, 2]"),
        (
            small(&[("item", &[-1, -1, 2]), ("encoded", &[-1, 9, 2])]),
            "`encoded` has shape [?, 9, 2], expected [?, 4, 2]",
        ),
        (
            small(&[("item", &[-1, -1, 2]), ("similarity", &[-1, -1, 1])]),
            "input `similarity` of shape [?, ?, 1] is none of",
        ),
    ] {
        let error = with("overarch.onnx", graph);
        assert!(error.contains(expected), "got `{error}`, expected `{expected}`");
    }
    let open = user_tower().output("encoded_open", &[-1, -1, 2]).node("Neg", &["encoded"], "encoded_open");
    let reads = small(&[("item", &[-1, -1, 2]), ("encoded_open", &[-1, -1, 2])]);
    let made = package("last", "f16", true).graph("user.onnx", open).graph("overarch.onnx", reads);
    let error = made.view().expect_err("an open dimension").to_string();
    assert!(error.contains("output `encoded_open` has shape [?, ?, 2], expected fixed dimensions"), "{error}");
    // A feature of the user with the name of a numeric item column.
    let reads = Onnx::default()
        .input("item", &[-1, -1, 2])
        .input("price", &[-1, 1])
        .input("likes", &[-1, 2])
        .numbers("weights", &[2, 2], &[1.0; 4])
        .node("MatMul", &["item", "weights"], "logits")
        .output("logits", &[-1, -1, 2]);
    let model = model("last", "f16").replace("name = \"age\"", "name = \"price\"");
    let made = package("last", "f16", true).text("model.toml", &model).graph("overarch.onnx", reads);
    let error = made.view().expect_err("two meanings").to_string();
    assert!(error.contains("overarch: input `price` is a numeric item column and something else"), "{error}");
    let unknown = user_tower().input("mood", &[-1, 1]);
    assert!(with("user.onnx", unknown).contains("user.onnx: input `mood` has no feature in user.features"));
}
