//! Columns of items as sequences of the OverArch, `[K0, S, D]` with a mask, compared with answers computed by hand.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::{Value, json};
use sterling::graph::tower::Runs;
use sterling::items::{GivenItem, GivenValues};
use sterling::request::Ranked;
use sterling::server::describe::model_info;
use sterling::serving::fresh::{Fresh, update_of};
use sterling::serving::view::View;
use sterling::snapshot::{PartFormat, Store};

use crate::contract::answers;
use crate::onnx::Onnx;
use crate::packages::{Made, view};
use crate::support::put;

const TAGS: usize = 90;
const WIDTH: usize = 3;
/// Logits of masked positions.
const FAR: f32 = -1e4;
/// Factor of a sum over many rows, small enough that the sigmoid does not saturate.
const SHARE: f32 = 0.0625;

fn tag(n: usize) -> String {
    format!("t{n:02}")
}

fn tag_row(n: usize) -> [f32; WIDTH] {
    let at = |k: usize| ((n * 37 + k * 53 + 11) % 101) as f32 / 50.0 - 1.0;
    [at(0), at(1), at(2)]
}

fn own_row(id: i64) -> [f32; 2] {
    if id < 4 { [id as f32 * 0.5 - 0.75, 0.25] } else { [0.0; 2] }
}

/// `[3, 2]`
const TO_HIDDEN: [f32; 6] = [0.5, -1.0, 1.0, 0.25, -0.75, 0.5];

/// Returns the tags of each item, as they are sent; tags from `TAGS` on are unknown.
fn tags() -> Vec<Vec<usize>> {
    vec![vec![5], vec![], vec![7, 3, 3, 40], vec![99], (0..80).rev().collect(), vec![2, 95, 1, 60, 44], vec![0, 1]]
}

fn vector(id: usize) -> [f32; WIDTH] {
    [0.25 * id as f32 - 0.5, 1.0 - 0.125 * id as f32, (id % 2) as f32]
}

fn line(id: usize, tags: &[usize]) -> Value {
    let mut line = json!({"id": id, "embedding": vector(id), "attributes": {"shelf": format!("s{}", id % 2)}});
    if !tags.is_empty() {
        line["attributes"]["tags"] = json!(tags.iter().map(|&n| tag(n)).collect::<Vec<_>>());
    }
    line
}

fn model(length: usize, keep: &str) -> String {
    format!(
        r#"
name = "tagged"
dimension = {WIDTH}

[[tables]]
name = "tags"
file = "tables.safetensors"
vocabulary = "tags.txt"

[[tables]]
name = "own"
file = "tables.safetensors"

[[tasks]]
name = "watch"

[[tasks]]
name = "buy"

[overarch]
graph = "overarch.onnx"

[[overarch.features]]
name = "item_tags"
kind = "category"
table = "tags"
pooling = "none"
length = {length}
keep = "{keep}"
column = "tags"

[[overarch.features]]
name = "item_own"
kind = "ids"
table = "own"
pooling = "none"
length = 2
column = "id"

[value]
expression = "watch + 2 * buy"
"#
    )
}

/// `watch`: attention of the query over the tags. `buy`: a layer over each tag, summed, the number of tags, and rows of the id.
fn overarch(length: i64, is_program: bool) -> Onnx {
    let last = if is_program { "both" } else { "almost" };
    let graph = Onnx::default()
        .input("query", &[-1, 3])
        .input("item", &[-1, -1, 3])
        .input("item_tags", &[-1, -1, length, 3])
        .input("item_tags_mask", &[-1, -1, length])
        .input("item_own", &[-1, -1, 2, 2])
        .input("item_own_mask", &[-1, -1, 2])
        .numbers("to_hidden", &[3, 2], &TO_HIDDEN)
        .numbers("one", &[], &[1.0])
        .numbers("far", &[], &[FAR])
        .integers("middle", &[1, 2])
        .integers("second_last", &[-2])
        .integers("last", &[-1])
        .integers("last_two", &[-2, -1])
        .node("Unsqueeze", &["query", "middle"], "asked")
        .node("Mul", &["item_tags", "asked"], "products")
        .node_with("ReduceSum", &["products", "last"], "scores", &[("keepdims", &[0])])
        .node("Sub", &["one", "item_tags_mask"], "missing")
        .node("Mul", &["missing", "far"], "less")
        .node("Add", &["scores", "less"], "masked")
        .node_with("Softmax", &["masked"], "weights", &[("axis", &[-1])])
        .node("Unsqueeze", &["weights", "second_last"], "row")
        .node("MatMul", &["row", "item_tags"], "attended")
        .node("Squeeze", &["attended", "second_last"], "interest")
        .node("Mul", &["interest", "item"], "met")
        .node_with("ReduceSum", &["met", "last"], "watch", &[("keepdims", &[1])])
        .node("MatMul", &["item_tags", "to_hidden"], "layer")
        .node("Relu", &["layer"], "hidden")
        .node_with("ReduceSum", &["hidden", "last_two"], "of_tags", &[("keepdims", &[0])])
        .node_with("ReduceSum", &["item_tags_mask", "last"], "tags_there", &[("keepdims", &[0])])
        .node_with("ReduceSum", &["item_own", "last_two"], "of_own", &[("keepdims", &[0])])
        .node_with("ReduceSum", &["item_own_mask", "last"], "own_there", &[("keepdims", &[0])])
        .node("Add", &["of_tags", "tags_there"], "sum1")
        .node("Add", &["sum1", "of_own"], "sum2")
        .node("Add", &["sum2", "own_there"], "sum3")
        .numbers("share", &[], &[SHARE])
        .node("Mul", &["sum3", "share"], "sum4")
        .node("Unsqueeze", &["sum4", "last"], "buy")
        .node_with("Concat", &["watch", "buy"], last, &[("axis", &[2])]);
    let graph = match is_program {
        true => graph.node("Identity", &["both"], "logits"),
        // An operator that programs do not support.
        false => graph.numbers("nothing", &[1, 1, 1], &[0.0]).node("LpNormalization", &["nothing"], "zero").node(
            "Add",
            &["almost", "zero"],
            "logits",
        ),
    };
    graph.output("logits", &[-1, -1, 2])
}

fn package(length: usize, keep: &str, is_program: bool, lines: &[Value]) -> Made {
    let tags: Vec<f32> = (0..TAGS).flat_map(tag_row).collect();
    let own: Vec<f32> = (0..4).flat_map(own_row).collect();
    Made::new(&model(length, keep), lines)
        .tables(&[("tags", WIDTH, &tags), ("own", 2, &own)])
        .text("tags.txt", &(0..TAGS).map(tag).collect::<Vec<_>>().join("\n"))
        .graph("overarch.onnx", overarch(length as i64, is_program))
}

fn lines() -> Vec<Value> {
    tags().iter().enumerate().map(|(id, tags)| line(id, tags)).collect()
}

/// Returns the task scores, computed by hand.
fn expected(query: [f32; WIDTH], id: usize, tags: &[usize], (length, keep): (usize, &str)) -> [f32; 2] {
    let set: Vec<usize> = tags.iter().copied().collect::<BTreeSet<_>>().into_iter().collect();
    let cut = set.len().saturating_sub(length);
    let retained = if keep == "last" { &set[cut..] } else { &set[..set.len() - cut] };
    let row = |n: &usize| if *n < TAGS { tag_row(*n) } else { [0.0; WIDTH] };
    let mut rows: Vec<[f32; WIDTH]> = retained.iter().map(row).collect();
    rows.resize(length, [0.0; WIDTH]);
    let product = |a: &[f32; WIDTH], b: &[f32; WIDTH]| -> f32 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
    let far = |n: usize| if n < retained.len() { 0.0 } else { FAR };
    let scores: Vec<f32> = rows.iter().enumerate().map(|(n, row)| product(row, &query) + far(n)).collect();
    let most = scores.iter().copied().fold(f32::MIN, f32::max);
    let weights: Vec<f32> = scores.iter().map(|score| (score - most).exp()).collect();
    let total: f32 = weights.iter().sum();
    let watch: f32 = rows.iter().zip(&weights).map(|(row, weight)| product(row, &vector(id)) * weight / total).sum();
    let hidden = |row: &[f32; WIDTH]| -> f32 {
        (0..2).map(|column| (0..3).map(|n| row[n] * TO_HIDDEN[n * 2 + column]).sum::<f32>().max(0.0)).sum()
    };
    let of_tags: f32 = rows.iter().map(hidden).sum();
    let buy = (of_tags + retained.len() as f32 + own_row(id as i64).iter().sum::<f32>() + 1.0) * SHARE;
    [watch, buy].map(|logit| 1.0 / (1.0 + (-logit).exp()))
}

const QUERIES: [[f32; WIDTH]; 3] = [[1.0, -0.5, 0.25], [0.0, 0.0, 0.0], [-2.0, 3.0, 1.5]];

fn bodies() -> Vec<Value> {
    QUERIES.iter().map(|query| json!({"vector": query, "k": 7, "candidates": 7, "exact": true})).collect()
}

fn holds(found: &[Ranked], tags: &[Vec<usize>], retained: (usize, &str), place: &str) {
    for (query, ranked) in QUERIES.iter().zip(found) {
        assert_eq!(ranked.ids.len(), tags.len(), "{place}");
        for (n, id) in ranked.ids.iter().enumerate() {
            let id = id.0 as usize;
            let wanted = expected(*query, id, &tags[id], retained);
            for (task, want) in wanted.into_iter().enumerate() {
                let got = ranked.tasks[task * tags.len() + n];
                assert!((got - want).abs() <= 1e-5, "{place}, item {id}, task {task}: {got} is not {want}");
            }
        }
    }
}

#[test]
fn a_reranker_reads_sequences_of_candidate_values() {
    for (length, keep, is_program) in [
        (3, "last", true),
        (3, "first", true),
        (1, "last", true),
        (4, "first", false),
        (70, "last", true),
        (70, "first", false),
        (128, "last", true),
    ] {
        let view = package(length, keep, is_program, &lines()).view().unwrap();
        assert_eq!(matches!(view.overarch().unwrap().graph().1, Runs::Program(_)), is_program);
        let together = answers(&view, &bodies());
        holds(&together, &tags(), (length, keep), &format!("{length}, {keep}, program {is_program}"));
        for (body, together) in bodies().iter().zip(&together) {
            let alone = answers(&view, std::slice::from_ref(body)).remove(0);
            assert_eq!((&alone.ids, &alone.tasks), (&together.ids, &together.tasks));
        }
    }
}

/// The same without attention: the part over tags depends on the item alone.
fn layer_alone() -> Onnx {
    Onnx::default()
        .input("query", &[-1, 3])
        .input("item", &[-1, -1, 3])
        .input("item_tags", &[-1, -1, 70, 3])
        .input("item_tags_mask", &[-1, -1, 70])
        .input("item_own", &[-1, -1, 2, 2])
        .numbers("to_hidden", &[3, 2], &TO_HIDDEN)
        .numbers("share", &[], &[SHARE])
        .numbers("one", &[], &[1.0])
        .integers("middle", &[1])
        .integers("last", &[-1])
        .integers("last_two", &[-2, -1])
        .node("Unsqueeze", &["query", "middle"], "asked")
        .node("Mul", &["item", "asked"], "met")
        .node_with("ReduceSum", &["met", "last"], "watch", &[("keepdims", &[1])])
        .node("MatMul", &["item_tags", "to_hidden"], "layer")
        .node("Relu", &["layer"], "hidden")
        .node_with("ReduceSum", &["hidden", "last_two"], "of_tags", &[("keepdims", &[0])])
        .node_with("ReduceSum", &["item_tags_mask", "last"], "tags_there", &[("keepdims", &[0])])
        .node_with("ReduceSum", &["item_own", "last_two"], "of_own", &[("keepdims", &[0])])
        .node("Add", &["of_tags", "tags_there"], "sum1")
        .node("Add", &["sum1", "of_own"], "sum2")
        .node("Add", &["sum2", "one"], "sum3")
        .node("Mul", &["sum3", "share"], "sum4")
        .node("Unsqueeze", &["sum4", "last"], "buy")
        .node_with("Concat", &["watch", "buy"], "logits", &[("axis", &[2])])
        .output("logits", &[-1, -1, 2])
}

#[test]
fn item_side_sequences_change_no_answer() {
    let made = package(70, "last", true, &lines()).graph("overarch.onnx", layer_alone());
    for (format, is_kept) in [(PartFormat::F32, true), (PartFormat::None, false)] {
        let mut publication = made.publication();
        publication.recipe.reranking.item_part = format;
        let store = tempfile::tempdir().unwrap();
        let version = put(store.path(), &publication).unwrap();
        let view = view(&Store::new(store.path()).folder("tagged", version));
        assert_eq!(
            view.overarch().unwrap().part().is_some(),
            is_kept,
            "70 rows are more to read than what they come to"
        );
        for (query, ranked) in QUERIES.iter().zip(answers(&view, &bodies())) {
            for (n, id) in ranked.ids.iter().enumerate() {
                let id = id.0 as usize;
                let [_, want] = expected(*query, id, &tags()[id], (70, "last"));
                let got = ranked.tasks[tags().len() + n];
                assert!((got - want).abs() <= 1e-5, "kept {is_kept}, item {id}: {got} is not {want}");
            }
        }
    }
}

fn given(id: usize, tags: &[usize]) -> GivenItem {
    let texts = GivenValues::Texts(tags.iter().map(|&n| tag(n)).collect());
    let shelf = ("shelf".to_owned(), GivenValues::Texts(vec![format!("s{}", id % 2)]));
    let attributes = std::iter::once(shelf).chain((!tags.is_empty()).then(|| ("tags".to_owned(), texts)));
    GivenItem { id: id as i64, embedding: Some(vector(id).to_vec()), attributes: attributes.collect(), whole: true }
}

#[test]
fn updated_items_have_sequence_values() {
    let main = package(3, "last", true, &lines()[..4]).view().unwrap();
    let mut fresh = Fresh::new(main.main().clone(), 0).in_place();
    // Existing items with other tags, and all further items.
    let mut later = tags();
    later[0] = vec![30, 8, 2, 61];
    later[2] = Vec::new();
    let came: Vec<_> = [0, 2, 4, 5, 6]
        .map(|id: usize| update_of(&given(id, &later[id]), &main, &mut BTreeSet::new()).unwrap())
        .into_iter()
        .collect();
    assert!(fresh.apply(&came).unwrap().is_empty());
    let now: Arc<View> = Arc::new(fresh.view().unwrap());
    holds(&answers(&now, &bodies()), &later, (3, "last"), "after updates");
}

#[test]
fn models_report_sequences_of_candidates() {
    let view = package(3, "first", true, &lines()).view().unwrap();
    let info = serde_json::to_value(model_info(view.main())).unwrap();
    let inputs = info["inputs"].as_array().unwrap();
    for (name, shape) in [("item_tags", json!([3, 3])), ("item_tags_mask", json!([3])), ("item_own", json!([2, 2]))] {
        let input = json!({"name": name, "whose": "candidate", "shape": shape});
        assert!(inputs.contains(&input), "{name}: {inputs:?}");
    }
    // Rows of sequences are looked up per candidate, and their cost is counted.
    let work = |length| package(length, "last", true, &lines()).view().unwrap().overarch().unwrap().work(1000);
    assert!(work(64) > 10 * work(2), "{} and {}", work(64), work(2));
}

#[test]
fn invalid_sequences_are_rejected_with_the_feature() {
    let changed = |from: &str, to: &str| {
        let text = model(3, "last");
        assert!(text.contains(from), "{from}");
        let made = package(3, "last", true, &lines()).text("model.toml", &text.replacen(from, to, 1));
        made.view().map(|_| "published".to_owned()).unwrap_or_else(|error| error.to_string())
    };
    for (from, to, expected) in [
        ("length = 3\n", "", "overarch.features `item_tags`: length is missing"),
        ("length = 3", "length = 0", "overarch.features `item_tags`: length: got 0, expected 1 to 4096"),
        ("length = 3", "length = 5000", "overarch.features `item_tags`: length: got 5000, expected 1 to 4096"),
        ("length = 3", "length = 16385\nmax_ids = 100000", "length: got 16385, expected 1 to 16384"),
        ("length = 3", "length = 4", "overarch.onnx: `item_tags` has shape [?, ?, 3, 3], expected [?, ?, 4, 3]"),
        ("keep = \"last\"", "keep = \"middle\"", "unknown variant `middle`"),
        ("pooling = \"none\"\nlength = 3", "pooling = \"sum\"\nlength = 3", "length is only valid for sequences"),
        (
            "name = \"item_own\"",
            "name = \"item_tags_mask\"",
            "overarch.features: name `item_tags_mask` is empty or given twice",
        ),
        (
            "[[overarch.features]]",
            "[[item.vectors]]\nname = \"item_tags_mask\"\nwidth = 3\ncolumn = \"v\"\n\n[[overarch.features]]",
            "input `item_tags_mask` is the mask of one of overarch.features and one of item.vectors",
        ),
        (
            "column = \"tags\"",
            "column = \"colour\"",
            "overarch.features `item_tags`: the snapshot has no column `colour`",
        ),
        ("kind = \"category\"", "kind = \"ids\"", "overarch.features `item_tags`: column `tags` holds texts"),
        ("table = \"tags\"\npooling", "table = \"own\"\npooling", "table `own` has no vocabulary"),
    ] {
        let error = changed(from, to);
        assert!(error.contains(expected), "{to}: got `{error}`, expected `{expected}`");
    }
    // Too many numbers per candidate for any request.
    let wide = vec![0.5; 1024];
    let own = [0.5; 8];
    let made = package(3, "last", true, &lines()).tables(&[("tags", 1024, &wide), ("own", 2, &own)]);
    let text = model(3, "last").replacen("length = 3", "length = 1025", 1);
    let error =
        made.text("tags.txt", "t00").text("model.toml", &text).view().expect_err("a mebi of numbers").to_string();
    assert!(error.contains("overarch.features `item_tags`: a tensor of shape [1025, 1024], expected 1 to"), "{error}");
}
