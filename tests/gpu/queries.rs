//! Several queries per user on a GPU compared with the CPU: separate searches with separate candidates, merged by the rule of the
//! model.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use sterling::graph::tower::Threads;
use sterling::index::ivf::Rescore;
use sterling::publish::{Plan, Source, publish};
use sterling::request::{Answer, Content, QueryReport, Rank, Reading, Request, Rerank, User};
use sterling::serving::pass::{self, Cpu, Cuda, Pass, Prepared, Residents};
use sterling::serving::view::View;
use sterling::snapshot::{Recipe, Store};
use sterling::units::ItemId;

use crate::emulation::{Random, sharing};
use crate::onnx::{Onnx, integers, value};
use crate::parts::{read, select_alike, selections};
use crate::whole_pass::{agree, both, gpu, view_of};

const D: usize = 8;
const TQ: usize = 3;
const ITEMS: i64 = 700;
const MERGES: [&str; 3] = ["union", "intersection", "weighted"];

/// Returns a model whose logits are products of an item with one of the queries, which the user tower reads from one feature.
fn several(folder: &Path, merge: &str, rescore: Rescore) -> Arc<View> {
    let package = folder.join(format!("{merge}-{rescore:?}"));
    std::fs::create_dir_all(&package).unwrap();
    let names = ["click", "like", "buy"];
    let weights = [1.0, 1.5, 0.25];
    let query = |n: usize| {
        let candidates = if n == 0 { "candidates = 30\n" } else { "" };
        format!("[[user.queries]]\nname = \"{}\"\nweight = {:?}\n{candidates}", names[n], weights[n])
    };
    let queries: String = (0..TQ).map(query).collect();
    let tasks: String = names.iter().map(|name| format!("[[tasks]]\nname = \"{name}\"\n")).collect();
    let model = format!(
        "name = \"tastes\"\ndimension = {D}\n[user]\ntower = \"user.onnx\"\nmerge = \"{merge}\"\n{queries}\
         [[user.features]]\nname = \"taste\"\nkind = \"dense\"\nwidth = {}\n{tasks}\
         [overarch]\ngraph = \"overarch.onnx\"\n[value]\nexpression = \"similarity + 0.1 * like\"\n",
        TQ * D
    );
    let user = Onnx::new(
        &[value("taste", &[0, (TQ * D) as i64])],
        &[value("query", &[0, TQ as i64, D as i64])],
        &["query = Reshape(taste, shape)"],
    )
    .with(&[integers("shape", &[-1, TQ as i64, D as i64])]);
    let overarch = Onnx::new(
        &[value("query", &[0, TQ as i64, D as i64]), value("item", &[0, 0, D as i64])],
        &[value("logits", &[0, 0, TQ as i64])],
        &["one_item = Unsqueeze(item, middle)"],
    )
    .and("all_queries = Unsqueeze(query, first)")
    .and("products = Mul(one_item, all_queries)")
    .and("logits = ReduceSum(products, last)")
    .attribute("keepdims", 0)
    .with(&[integers("middle", &[2]), integers("first", &[1]), integers("last", &[-1])]);
    let mut random = Random::new(31);
    let lines: Vec<String> = (0..ITEMS)
        .map(|id| {
            let attributes = json!({"shelf": format!("s{}", id % 7), "price": id % 100});
            json!({"id": id * 3 - 500, "embedding": random.numbers(D), "attributes": attributes}).to_string()
        })
        .collect();
    std::fs::write(package.join("model.toml"), model).unwrap();
    std::fs::write(package.join("user.onnx"), user.bytes()).unwrap();
    std::fs::write(package.join("overarch.onnx"), overarch.bytes()).unwrap();
    std::fs::write(package.join("items.jsonl"), lines.join("\n")).unwrap();
    let mut recipe = Recipe::default();
    (recipe.index.rescore, recipe.index.lists) = (rescore, 20);
    let store = Store::new(package.join("store"));
    let items = Some(package.join("items.jsonl"));
    let what = Plan { recipe, ..Plan::new(Source::Package { folder: package, items, vectors: None }) };
    let (name, version) = publish(&store, &what, &|_, _, _| {}).unwrap();
    view_of(&store, &name, version)
}

/// Returns requests for every route of candidate search, including queries of zeros, whose scores are all equal.
fn asked(random: &mut Random) -> Vec<Value> {
    let more = [
        json!({"k": 20, "probes": 20}),
        json!({"k": 5, "probes": 3}),
        json!({"k": 1, "candidates": 1, "probes": 20}),
        json!({"k": 10, "query_candidates": {"click": 10, "like": 400, "buy": 55}, "probes": 20}),
        json!({"k": 30, "candidates": 80, "exact": true}),
        json!({"k": 30, "probes": 20, "filter": "NOT shelf:s3 AND price < 80"}),
        json!({"k": 12, "filter": "shelf:s1"}),
        json!({"k": 12, "exact": true, "filter": "shelf:s1 OR price < 10", "exclude": [-500, -497, 100, 103]}),
        json!({"k": 12, "filter": "shelf:nowhere"}),
        json!({"k": 700, "candidates": 700, "probes": 20}),
    ];
    let mut bodies: Vec<Value> = Vec::new();
    for (n, more) in more.iter().enumerate() {
        let mut taste = random.numbers(TQ * D);
        match n % 4 {
            // Two equal queries, or an empty one.
            1 => taste.copy_within(..D, D),
            2 => taste.fill(0.0),
            _ => {}
        }
        let mut body = more.clone();
        let by = if n % 3 == 0 { ("vector", json!(taste)) } else { ("features", json!({"taste": taste})) };
        body[by.0] = by.1;
        bodies.push(body);
    }
    bodies
}

fn reports(answer: &Answer) -> &[QueryReport] {
    &answer.explain.as_ref().unwrap().queries
}

#[test]
fn whole_pass_of_several_queries_answers_as_on_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let kinds = [Rescore::F16, Rescore::None, Rescore::F32];
    for (merge, rescore) in MERGES.into_iter().zip(kinds) {
        let view = several(folder.path(), merge, rescore);
        let bodies = asked(&mut Random::new(17));
        // One group of all requests, and groups of one request.
        for budget in [64 << 20, 1] {
            for ([cpu, gpu], body) in both(&view, &mut gpu(budget), &bodies).iter().zip(&bodies) {
                let what = format!("{merge} {rescore:?} {budget}: {body}");
                agree(cpu, gpu, &what);
                let names: Vec<&str> = reports(gpu).iter().map(|query| query.name.as_str()).collect();
                assert_eq!(names, ["click", "like", "buy"], "{what}");
                let found = |answer: &Answer| -> Vec<u64> { reports(answer).iter().map(|q| q.candidates).collect() };
                assert_eq!(found(cpu), found(gpu), "{what}");
                let [all, of_gpu] = [cpu, gpu].map(|answer| answer.explain.as_ref().unwrap());
                assert_eq!(all.probes, of_gpu.probes, "{what}");
                let is_alike = body.get("filter").is_none() || body["probes"] == 20 || body.get("exact").is_some();
                if is_alike {
                    assert_eq!((all.probed, all.scanned), (of_gpu.probed, of_gpu.scanned), "{what}");
                    let queries = |answer: &Answer| -> Vec<[u64; 2]> {
                        reports(answer).iter().map(|q| [q.probed, q.scanned]).collect()
                    };
                    assert_eq!(queries(cpu), queries(gpu), "{what}");
                }
                if merge != "intersection" {
                    assert_eq!(all.candidates, of_gpu.candidates, "{what}");
                }
            }
        }
    }
}

/// Returns requests for given items, and for candidates that a router has chosen, with separate ones per query.
fn given(view: &Arc<View>) -> Vec<Prepared> {
    let mut random = Random::new(5);
    let reading = || Reading { explain: true, ..Reading::default() };
    let mut requests = Vec::new();
    for count in [0, 1, 40, 300] {
        let items: Vec<ItemId> = (0..count).map(|n| ItemId(n * 5 - 500)).collect();
        let user = User::Vector(random.numbers(TQ * D));
        let of_query = |n: i64, random: &mut Random| -> Vec<(ItemId, f32)> {
            let own = (0..count * (n + 1) / 2).map(|at| ItemId(((at * (n + 2)) % ITEMS) * 3 - 500));
            own.map(|id| (id, random.number())).collect()
        };
        let candidates = (0..TQ as i64).map(|n| of_query(n, &mut random)).collect();
        requests.push(Request::Rerank(Rerank { user: user.clone(), candidates, k: 25, reading: reading() }));
        if count > 0 {
            requests.push(Request::Rank(Rank { user, items, reading: reading() }));
        }
    }
    requests.into_iter().map(|request| pass::prepare(view, request).unwrap()).collect()
}

#[test]
fn whole_pass_of_several_queries_over_given_items_answers_as_on_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    for merge in MERGES {
        let view = several(folder.path(), merge, Rescore::F32);
        let prepared = given(&view);
        let answers = |pass: &mut dyn Pass| -> Vec<Answer> {
            pass::run(pass, &prepared, None).into_iter().map(|answer| answer.unwrap()).collect()
        };
        let (of_cpu, of_gpu) = (answers(&mut Cpu::new(Threads::new(1))), answers(&mut gpu(64 << 20)));
        for (n, (cpu, gpu)) in of_cpu.iter().zip(&of_gpu).enumerate() {
            let kernel = gpu.explain.as_ref().unwrap().kernel;
            assert!(["emulated", "cuda"].contains(&kernel), "{merge}, {n}: {kernel}");
            agree(cpu, gpu, &format!("{merge}, {n}"));
            assert_eq!(reports(cpu), reports(gpu), "{merge}, {n}");
        }
    }
}

#[test]
fn whole_pass_of_several_queries_on_several_gpus_answers_as_on_one() {
    let folder = tempfile::tempdir().unwrap();
    for merge in MERGES {
        let view = several(folder.path(), merge, Rescore::F16);
        let bodies = asked(&mut Random::new(18));
        let shared = Residents::new(sharing(&[1 << 30, 1 << 30])).with_budget(64 << 20);
        let mut shared = Cuda::new(Arc::new(shared), Threads::new(1));
        let one = both(&view, &mut gpu(64 << 20), &bodies);
        for (([_, one], [_, shared]), body) in one.iter().zip(&both(&view, &mut shared, &bodies)).zip(&bodies) {
            let (Content::Items(a), Content::Items(b)) = (&one.content, &shared.content) else { panic!("{body}") };
            let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
            assert_eq!((&a.ids, bits(&a.scores)), (&b.ids, bits(&b.scores)), "{merge}: {body}");
            assert_eq!(bits(&a.similarities), bits(&b.similarities), "{merge}: {body}");
            assert_eq!(reports(one), reports(shared), "{merge}: {body}");
        }
    }
}

#[test]
fn whole_pass_of_several_queries_of_a_shard_selects_as_on_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let view = several(folder.path(), "union", Rescore::F16);
    let prepared = selections(&view, &read(&asked(&mut Random::new(19))));
    let answers = |pass: &mut dyn Pass| -> Vec<Answer> {
        pass::run(pass, &prepared, None).into_iter().map(|answer| answer.unwrap()).collect()
    };
    let (of_cpu, of_gpu) = (answers(&mut Cpu::new(Threads::new(1))), answers(&mut gpu(64 << 20)));
    for (n, (cpu, gpu)) in of_cpu.iter().zip(&of_gpu).enumerate() {
        let kernel = gpu.explain.as_ref().unwrap().kernel;
        assert!(["emulated", "cuda"].contains(&kernel), "{n}: {kernel}");
        select_alike(cpu, gpu, &n.to_string());
    }
}
