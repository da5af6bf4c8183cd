//! Several queries per user: separate searches, merged by the rule of the model, compared with a naive search of all items.

use std::sync::Arc;

use serde_json::{Value, json};
use sterling::api;
use sterling::graph::tower::Threads;
use sterling::request::{Content, Ranked, Request};
use sterling::serving::pass::{self, Cpu};
use sterling::serving::view::View;
use sterling::units::ItemId;

use crate::onnx::Onnx;
use crate::packages::Made;
use crate::support::{Server, ids, retrieve};

const ITEMS: i64 = 400;
const CLICK_CANDIDATES: usize = 30;
const WEIGHTS: [f32; 2] = [1.0, 1.5];

fn vector(id: i64) -> [f32; 2] {
    let angle = (id * id % 97) as f32 + id as f32 * 0.37;
    [angle.sin(), (angle * 1.7).cos() * 0.8]
}

fn colour(id: i64) -> &'static str {
    ["red", "green", "blue"][(id % 3) as usize]
}

pub fn package(merge: &str) -> Made {
    let model = format!(
        r#"
name = "tastes"
dimension = 2

[user]
tower = "user.onnx"
merge = "{merge}"

[[user.queries]]
name = "click"
candidates = {CLICK_CANDIDATES}

[[user.queries]]
name = "like"
weight = 1.5

[[user.features]]
name = "taste"
kind = "dense"
width = 4

[[item.columns]]
name = "colour"

[[tasks]]
name = "click"

[[tasks]]
name = "like"

[overarch]
graph = "overarch.onnx"

[value]
expression = "similarity + 0 * click"
"#
    );
    let line = |id: i64| json!({"id": id, "embedding": vector(id), "attributes": {"colour": colour(id)}});
    let user = Onnx::default()
        .input("taste", &[-1, 4])
        .integers("shape", &[-1, 2, 2])
        .node("Reshape", &["taste", "shape"], "query")
        .output("query", &[-1, 2, 2]);
    // One logit per query: its product with the item.
    let overarch = Onnx::default()
        .input("query", &[-1, 2, 2])
        .input("item", &[-1, -1, 2])
        .node_with("Transpose", &["query"], "queries", &[("perm", &[0, 2, 1])])
        .node("MatMul", &["item", "queries"], "logits")
        .output("logits", &[-1, -1, 2]);
    let lines: Vec<Value> = (0..ITEMS).map(line).collect();
    Made::new(&model, &lines).graph("user.onnx", user).graph("overarch.onnx", overarch)
}

fn product(query: &[f32], id: i64) -> f32 {
    query.iter().zip(vector(id)).map(|(a, b)| a * b).sum::<f32>() + 0.0
}

/// Returns ids with their retrieval scores, best first, by the definition of each merge rule.
fn naive(merge: &str, taste: &[f32; 4], k0: [usize; 2], passes: &dyn Fn(i64) -> bool) -> Vec<(i64, f32)> {
    let found = [0, 1].map(|n| {
        let mut all: Vec<(i64, f32)> =
            (0..ITEMS).filter(|&id| passes(id)).map(|id| (id, product(&taste[2 * n..2 * n + 2], id))).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        all.truncate(k0[n]);
        all
    });
    let score = |n: usize, id: i64| {
        let found = found[n].iter().find(|(other, _)| *other == id);
        found.map(|(_, score)| score * WEIGHTS[n])
    };
    let merged = (0..ITEMS).filter_map(|id| match (merge, score(0, id), score(1, id)) {
        (_, None, None) => None,
        ("union", a, b) => Some((id, a.unwrap_or(f32::MIN).max(b.unwrap_or(f32::MIN)))),
        ("intersection", a, b) => a.zip(b).map(|(a, b)| (id, a + b)),
        _ => Some((id, (0..2).map(|n| WEIGHTS[n] * product(&taste[2 * n..2 * n + 2], id)).sum())),
    });
    let mut merged: Vec<(i64, f32)> = merged.collect();
    merged.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    merged
}

const TASTES: [[f32; 4]; 4] = [[1.0, 0.5, 0.75, 0.5], [1.0, 0.0, -1.0, 0.25], [0.0; 4], [0.3, -0.9, 0.3, -0.9]];

fn answers(view: &Arc<View>, bodies: &[Value]) -> Vec<Ranked> {
    retrieve(view, bodies).into_iter().map(|answer| answer.unwrap().0).collect()
}

fn run(view: &Arc<View>, request: Request) -> Content {
    let prepared = pass::prepare(view, request).unwrap();
    pass::run(&mut Cpu::new(Threads::new(1)), &[prepared], None).remove(0).unwrap().content
}

#[test]
fn several_queries_are_searched_each_and_merged() {
    for merge in ["union", "intersection", "weighted"] {
        let view = package(merge).view().unwrap();
        let lists = view.main().index.lists();
        for (taste, (filter, requested)) in TASTES.iter().flat_map(|taste| {
            [("", None), ("colour:red", Some(25)), ("NOT colour:green", None)].map(|more| (taste, more))
        }) {
            let passes = |id: i64| match filter {
                "colour:red" => colour(id) == "red",
                "" => true,
                _ => colour(id) != "green",
            };
            // The number of candidates of a request takes precedence over that of the model, which takes precedence over that of
            // the recipe.
            let k0 = requested.map_or([CLICK_CANDIDATES, 1000], |k0| [k0, k0]);
            let mut expected = naive(merge, taste, k0, &passes);
            expected.truncate(20);
            let mut body = json!({"features": {"taste": taste}, "filter": filter, "probes": lists, "explain": true});
            if let Some(candidates) = requested {
                body["candidates"] = json!(candidates);
            }
            let mut by_vector = body.clone();
            by_vector.as_object_mut().unwrap().remove("features");
            by_vector["vector"] = json!(taste);
            let mut exact = body.clone();
            exact["exact"] = json!(true);
            for body in [&body, &by_vector, &exact] {
                let (ranked, explain) = retrieve(&view, std::slice::from_ref(body)).remove(0).unwrap();
                let got: Vec<i64> = ranked.ids.iter().map(|id| id.0).collect();
                let want: Vec<i64> = expected.iter().map(|(id, _)| *id).collect();
                // The query of zeros has many equal scores: each search finds its lowest ids.
                assert_eq!(got, want, "{merge}: {body}");
                for (n, (id, want)) in expected.iter().enumerate() {
                    let got = ranked.similarities[n];
                    assert!((got - want).abs() <= 1e-5, "{merge}, item {id}: {got} is not {want}");
                    for (task, query) in taste.chunks_exact(2).enumerate() {
                        let want = 1.0 / (1.0 + (-product(query, *id)).exp());
                        assert!((ranked.tasks[task * got_len(&ranked) + n] - want).abs() <= 1e-5);
                    }
                }
                let explain = explain.unwrap();
                let names: Vec<&str> = explain.queries.iter().map(|q| q.name.as_str()).collect();
                assert_eq!(names, ["click", "like"]);
                let eligible = (0..ITEMS).filter(|&id| passes(id)).count();
                let found: Vec<u64> = explain.queries.iter().map(|q| q.candidates).collect();
                assert_eq!(found, k0.map(|k0| k0.min(eligible) as u64));
                assert_eq!(explain.scanned, explain.queries.iter().map(|q| q.scanned).sum::<u64>());
                assert_eq!(explain.candidates, naive(merge, taste, k0, &passes).len() as u64);
            }
        }
    }
}

fn got_len(ranked: &Ranked) -> usize {
    ranked.ids.len()
}

#[test]
fn requests_set_candidates_per_query_by_name() {
    let view = package("union").view().unwrap();
    let ask = |named: Value| {
        let body = json!({"features": {"taste": TASTES[0]}, "k": 5, "candidates": 12, "query_candidates": named,
            "exact": true, "explain": true});
        retrieve(&view, &[body]).remove(0)
    };
    let found = |named: Value| -> Vec<u64> {
        let (_, explain) = ask(named).unwrap();
        explain.unwrap().queries.iter().map(|query| query.candidates).collect()
    };
    assert_eq!(found(json!({})), [12, 12]);
    assert_eq!(found(json!({"like": 40})), [12, 40]);
    assert_eq!(found(json!({"click": 7, "like": 100_000})), [7, ITEMS as u64]);
    for (named, expected) in [
        (json!({"love": 9}), "field `query_candidates.love`: no such query, expected some of: click, like"),
        (json!({"like": 4}), "field `query_candidates.like`: got 4, expected k = 5 to 200000"),
        (json!({"like": 200_001}), "field `query_candidates.like`: got 200001"),
        (json!({"like": -1}), "query_candidates"),
        (json!([7]), "query_candidates"),
    ] {
        let error = ask(named.clone()).unwrap_err().to_string();
        assert!(error.contains(expected), "{named}: {error}");
    }
}

/// Like a page, which needs all results up to its end.
#[test]
fn more_results_than_one_query_has_candidates_are_those_of_all_queries() {
    let view = package("union").view().unwrap();
    let body = json!({"features": {"taste": TASTES[0]}, "k": 7, "candidates": 60, "query_candidates": {"click": 7},
        "exact": true});
    let ask = |k: usize| {
        let api::Retrievals::One(mut request, ..) = api::retrievals(body.to_string().as_bytes()).unwrap() else {
            panic!("a list")
        };
        request.k = k;
        let Content::Items(ranked) = run(&view, Request::Retrieve(*request)) else { panic!("no items") };
        ranked.ids
    };
    let all = ask(60);
    assert!(all.len() >= 60 && ask(7) == all[..7] && ask(20) == all[..20] && ask(40) == all[..40]);
}

#[test]
fn a_batch_of_several_queries_answers_as_each_alone_bit_for_bit() {
    for merge in ["union", "intersection", "weighted"] {
        let view = package(merge).view().unwrap();
        let bodies: Vec<Value> = (0..24)
            .map(|n| {
                let filter = ["", "colour:blue", "NOT colour:red"][n % 3];
                json!({"features": {"taste": TASTES[n % 4]}, "filter": filter, "k": 1 + n, "exclude": [n, 2 * n], "probes": 3})
            })
            .collect();
        for (body, together) in bodies.iter().zip(answers(&view, &bodies)) {
            let alone = answers(&view, std::slice::from_ref(body)).remove(0);
            let bits = |of: &[f32]| of.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
            assert_eq!(alone.ids, together.ids, "{merge}: {body}");
            assert_eq!(bits(&alone.scores), bits(&together.scores), "{merge}: {body}");
        }
    }
}

#[test]
fn ranking_and_embedding_know_all_queries() {
    for merge in ["union", "intersection", "weighted"] {
        let view = package(merge).view().unwrap();
        let taste = TASTES[0];
        let body = json!({"features": {"taste": taste}, "items": [3, 77, 250, 9999]}).to_string();
        let Content::Items(ranked) = run(&view, Request::Rank(api::rank(body.as_bytes()).unwrap().0)) else {
            panic!("no items")
        };
        assert_eq!((ranked.ids.len(), ranked.unknown.as_slice()), (3, &[ItemId(9999)][..]));
        for (n, id) in ranked.ids.iter().enumerate() {
            let [click, like] = [0, 1].map(|q| WEIGHTS[q] * product(&taste[2 * q..2 * q + 2], id.0));
            let want = if merge == "union" { click.max(like) } else { click + like };
            assert!((ranked.similarities[n] - want).abs() <= 1e-5);
        }
        let body = json!({"features": {"taste": taste}}).to_string();
        let content = run(&view, Request::Embed(api::embed(body.as_bytes()).unwrap().0));
        let Content::Embedding(user) = content else { panic!("{content:?}") };
        assert_eq!(user.query, taste);
    }
    let view = package("union").view().unwrap();
    for (vector, expected) in [
        (json!([1.0, 2.0]), "field `vector`: got 2 numbers, expected 4: 2 queries of 2"),
        (json!([1.0, 2.0, 3.0, 4.0, 5.0]), "field `vector`: got 5 numbers, expected 4"),
        (json!([1.0, 2.0, 3.0, 1e30]), "expected finite numbers"),
    ] {
        let error = retrieve(&view, &[json!({"vector": vector})]).remove(0).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let info = serde_json::to_value(sterling::server::describe::model_info(view.main())).unwrap();
    assert_eq!(info["merge"], "union");
    assert_eq!(info["queries"][0], json!({"name": "click", "candidates": CLICK_CANDIDATES, "weight": 1.0}));
}

#[test]
fn a_server_loads_a_version_of_several_queries_and_answers() {
    let store = tempfile::tempdir().unwrap();
    package("union").publish(store.path()).unwrap();
    let server = Server::start(store.path());
    let by_features =
        server.ask("/v1/models/tastes:retrieve", json!({"features": {"taste": TASTES[0]}, "exact": true}));
    let by_vector = server.ask("/v1/models/tastes:retrieve", json!({"vector": TASTES[0], "exact": true}));
    assert_eq!(ids(&by_features).len(), 20);
    assert_eq!(ids(&by_features), ids(&by_vector));
}
