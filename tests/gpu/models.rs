//! Published models on the GPU compared with the CPU: sequences, item vectors, columns through tables, precomputed item parts.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use sterling::cuda::Device;
use sterling::embedding::Table;
use sterling::error::Kind;
use sterling::graph::tower::Threads;
use sterling::index::ivf::Rescore;
use sterling::publish::{Plan, Source, publish, published};
use sterling::request::{Answer, Content};
use sterling::serving::pass::{self, Cpu, Cuda, Pass, Residents};
use sterling::serving::view::View;
use sterling::snapshot::{PartFormat, Placement, PlacementOptions, Recipe, Snapshot, Store};
use sterling::units::ItemId;

use crate::emulation::{Random, device, emulated};
use crate::onnx::{Onnx, floats, integers, value};
use crate::whole_pass::{agree, both, gpu, heldout, prepare, request, root, view_of};

/// Models that `python/make_zoo.py` writes.
pub const ZOO: [&str; 6] = ["dcn", "deepfm", "din", "hstu", "mol", "sasrec"];

pub fn zoo(store: &Path, name: &str) -> Arc<View> {
    let package = root().join("models").join(name);
    let mut recipe = Recipe::default();
    recipe.index.rescore = Rescore::F32;
    let store = Store::new(store);
    let items = Some(package.join("items.jsonl"));
    let what = Plan { recipe, ..Plan::new(Source::Package { folder: package, items, vectors: None }) };
    let (name, version) = publish(&store, &what, &|_, _, _| {}).unwrap();
    view_of(&store, &name, version)
}

#[test]
fn whole_pass_of_the_zoo_answers_as_on_the_cpu() {
    let store = tempfile::tempdir().unwrap();
    let mut with_sequences = 0;
    for name in ZOO {
        let text = std::fs::read_to_string(root().join("models").join(name).join("golden.json")).unwrap();
        let golden: Value = serde_json::from_str(&text).unwrap();
        let view = Arc::new(View::new(zoo(store.path(), name).main().clone()).recording(64));
        let user = view.main().package.user.as_ref();
        with_sequences += usize::from(user.is_some_and(|user| user.features().iter().any(|f| f.is_sequence())));
        let more = [json!({"k": 400, "candidates": 400, "exact": true}), json!({"k": 7, "candidates": 40})];
        let cases = golden["requests"].as_array().unwrap().iter();
        // Users with their histories, and one without features.
        let users = cases.map(|case| case["features"].clone()).chain([json!({})]);
        let bodies: Vec<Value> = users
            .enumerate()
            .map(|(n, features)| request(&json!({"features": features, "exclude": []}), &more[n % 2]))
            .collect();
        for ([cpu, gpu], body) in both(&view, &mut gpu(64 << 20), &bodies).iter().zip(&bodies) {
            agree(cpu, gpu, &format!("{name}: {body}"));
        }
        let recorded = view.recorded().unwrap();
        let (of_cpu, of_card) = recorded.split_at(bodies.len() * view.main().package.spec.queries().len().max(1));
        assert_eq!(of_cpu.len(), of_card.len(), "{name}: both take note of the queries");
        for (cpu, card) in of_cpu.iter().flatten().zip(of_card.iter().flatten()) {
            assert!((cpu - card).abs() <= 1e-3 * cpu.abs().max(1.0), "{name}: {cpu} {card}");
        }
    }
    assert_eq!(with_sequences, 3);
}

#[test]
fn whole_pass_omits_candidates_whose_task_scores_are_nan() {
    let store = tempfile::tempdir().unwrap();
    let package = root().join("models/dcn");
    let mut recipe = Recipe::default();
    recipe.index.rescore = Rescore::F32;
    recipe.reranking.item_part = PartFormat::None;
    let items = Some(package.join("items.jsonl"));
    let what = Plan { recipe, ..Plan::new(Source::Package { folder: package, items, vectors: None }) };
    let (name, version) = publish(&Store::new(store.path()), &what, &|_, _, _| {}).unwrap();
    let folder = Store::new(store.path()).folder(&name, version);
    let view_without = |spoilt: &dyn Fn(usize) -> bool| {
        let mut snapshot = Snapshot::load(&folder, &Placement::whole()).unwrap();
        let price = snapshot.numbers.iter_mut().find(|(name, _)| name == "price").unwrap();
        // The model reads the logarithm.
        price.1.iter_mut().enumerate().filter(|(slot, _)| spoilt(*slot)).for_each(|(_, price)| *price = -1.0);
        Arc::new(View::new(Arc::new(snapshot)))
    };
    let user = json!({"history": [1, 2, 3], "segment": "s1"});
    let body = |k: usize| json!({"features": user, "k": k, "candidates": 400, "exact": true});
    let ids = |answer: &Answer| {
        let Content::Items(ranked) = &answer.content else { panic!("{answer:?}") };
        assert!(ranked.scores.iter().chain(&ranked.tasks).all(|score| score.is_finite()));
        ranked.ids.clone()
    };
    let whole = both(&view_without(&|_| false), &mut gpu(64 << 20), &[body(400)]);
    let all = ids(&whole[0][0]);
    assert_eq!(all.len(), 400);
    let is_spoilt = |slot: usize| slot.is_multiple_of(3);
    let view = view_without(&is_spoilt);
    let left: Vec<ItemId> = all.into_iter().filter(|id| !is_spoilt(view.slot(*id).unwrap().index())).collect();
    for k in [400, 7] {
        let [[cpu, gpu]] = &both(&view, &mut gpu(64 << 20), &[body(k)])[..] else { panic!("one request") };
        agree(cpu, gpu, "a third of the items has no score");
        assert_eq!(ids(cpu), left[..k.min(left.len())]);
    }
    // A request fails if no candidate has a score, like a request whose own numbers cause the error.
    let view = view_without(&|_| true);
    let prepared = prepare(&view, &[body(7)]);
    let passes: [&mut dyn Pass; 2] = [&mut Cpu::new(Threads::new(1)), &mut gpu(64 << 20)];
    for pass in passes {
        let error = pass::run(pass, &prepared, None).remove(0).unwrap_err();
        assert!(error.to_string().contains("`logits` holds NaN"), "{error}");
    }
}

/// Returns a model whose user tower overflows for a number of 300, and whose reranker makes NaN for one of 30.
fn overflowing(folder: &Path) -> Arc<View> {
    let package = folder.join("package");
    std::fs::create_dir_all(&package).unwrap();
    let model = "name = \"exp\"\ndimension = 4\n[user]\ntower = \"user.onnx\"\n\
                 [[user.features]]\nname = \"x\"\nkind = \"dense\"\nwidth = 4\n[[tasks]]\nname = \"t\"\n\
                 [overarch]\ngraph = \"overarch.onnx\"\n[value]\nexpression = \"t\"\n";
    let user = Onnx::new(&[value("x", &[0, 4])], &[value("query", &[0, 4])], &["query = Exp(x)"]);
    let overarch = Onnx::new(
        &[value("query", &[0, 4]), value("item", &[0, 0, 4])],
        &[value("logits", &[0, 0, 1])],
        &["e = Exp(query)"],
    )
    .and("same = Div(e, e)")
    .and("one_same = Unsqueeze(same, middle)")
    .and("product = Mul(item, one_same)")
    .and("logits = ReduceSum(product, last)")
    .attribute("keepdims", 1)
    .with(&[integers("middle", &[1]), integers("last", &[-1])]);
    let lines = (0..90).map(|id| json!({"id": id, "embedding": [id % 7, 1, id % 5, 0.5]}).to_string());
    std::fs::write(package.join("model.toml"), model).unwrap();
    std::fs::write(package.join("user.onnx"), user.bytes()).unwrap();
    std::fs::write(package.join("overarch.onnx"), overarch.bytes()).unwrap();
    std::fs::write(package.join("items.jsonl"), lines.collect::<Vec<_>>().join("\n")).unwrap();
    let store = Store::new(folder.join("store"));
    let items = Some(package.join("items.jsonl"));
    let what = Plan::new(Source::Package { folder: package, items, vectors: None });
    let (name, version) = publish(&store, &what, &|_, _, _| {}).unwrap();
    view_of(&store, &name, version)
}

#[test]
fn whole_pass_rejects_only_the_request_whose_number_overflows() {
    let folder = tempfile::tempdir().unwrap();
    let view = overflowing(folder.path());
    let body = |first: f32| json!({"features": {"x": [first, 0.5, 0, 0.25]}, "k": 9, "candidates": 60, "exact": true});
    let numbers = [0.5, 300.0, -0.75, 30.0, 1.0, -400.0];
    let prepared = prepare(&view, &numbers.map(body));
    let mut card = gpu(64 << 20);
    let alone = both(&view, &mut card, &[body(0.5), body(-0.75), body(1.0), body(-400.0)]);
    let passes: [&mut dyn Pass; 2] = [&mut Cpu::new(Threads::new(1)), &mut card];
    for pass in passes {
        let mut alone = alone.iter();
        for (answer, number) in pass::run(pass, &prepared, None).into_iter().zip(numbers) {
            if ![300.0, 30.0].contains(&number) {
                let [expected, _] = alone.next().unwrap();
                agree(expected, &answer.unwrap(), &format!("x = {number}"));
                continue;
            }
            let error = answer.unwrap_err();
            assert_eq!(error.kind(), Kind::Invalid, "{error}");
            let start = format!("feature `x`: got the number {number:e}: ");
            assert!(error.to_string().starts_with(&start), "{error}");
        }
    }
}

#[test]
fn whole_pass_over_sequences_of_candidates_is_left_to_the_cpu_with_the_reason() {
    let store = tempfile::tempdir().unwrap();
    let view = zoo(store.path(), "tags");
    let error = Residents::new(device()).bytes_of(view.main()).unwrap_err().to_string();
    assert!(error.contains("GPUs do not run a reranker that reads sequences of item values"), "{error}");
}

/// Tables that a plan places in GPU memory, completely or with room for a few rows.
#[test]
fn whole_pass_answers_alike_wherever_a_plan_has_the_tables() {
    let store = tempfile::tempdir().unwrap();
    let view = zoo(store.path(), "sasrec");
    let golden = std::fs::read_to_string(root().join("models/sasrec/golden.json")).unwrap();
    let golden: Value = serde_json::from_str(&golden).unwrap();
    let cases = golden["requests"].as_array().unwrap().iter();
    let bodies: Vec<Value> = cases
        .map(|case| request(&json!({"features": case["features"], "exclude": []}), &json!({"k": 9, "candidates": 30})))
        .collect();
    let folder = Store::new(store.path()).folder("sasrec", 1);
    let placement = |parts: &[Value]| {
        let tables = view.main().package.tables.iter();
        let table = |table: &Arc<Table>| {
            let all = json!({"rows": [0, table.rows()], "columns": [0, table.width()], "bytes": 0, "micros": 0.0,
                             "device": "gpu0", "backing": "host0", "cache_bytes": 0});
            let shard = |part: &Value| {
                let mut shard = all.clone();
                part.as_object().unwrap().iter().for_each(|(key, value)| shard[key] = value.clone());
                shard
            };
            json!({"table": table.name(), "format": table.spec().format.name(), "sharding": "table_wise",
                   "shards": parts.iter().map(shard).collect::<Vec<_>>(), "bytes": 0, "micros": 0.0, "hit_share": 1.0,
                   "why": "a test"})
        };
        let plan = json!({"batch": 1, "micros": 0.0, "slowest": "gpu0", "bytes": 0, "candidates": 1, "devices": [],
                          "notes": [], "tables": tables.map(table).collect::<Vec<_>>()});
        let path = store.path().join("plan.json");
        std::fs::write(&path, plan.to_string()).unwrap();
        let placement = Placement::open(&PlacementOptions { plan: Some(path), ..PlacementOptions::default() }).unwrap();
        Snapshot::load(&folder, &placement)
    };
    let cached = |bytes: u64| json!({"tier": "hbm_cached", "cache_bytes": bytes});
    let in_host = json!({"tier": "host", "device": "host0"});
    for part in [json!({"tier": "hbm"}), in_host, cached(1), cached(600), cached(1 << 30)] {
        let placed = Arc::new(View::new(Arc::new(placement(std::slice::from_ref(&part)).unwrap())));
        let card = emulated();
        let mut gpu = Cuda::new(Arc::new(Residents::new(Device::over(card.clone()))), Threads::new(1));
        for turn in 0..3 {
            for ([cpu, gpu], body) in both(&placed, &mut gpu, &bodies).iter().zip(&bodies) {
                agree(cpu, gpu, &format!("{part}, turn {turn}: {body}"));
            }
        }
        // Tables that are not completely on the GPU are registered for the lifetime of their version.
        assert_eq!(card.registered_bytes() > 0, part["tier"] != "hbm", "{part}");
        drop(gpu);
        assert_eq!(card.registered_bytes(), 0, "{part}");
    }
    let halves = [json!({"tier": "hbm"}), json!({"tier": "hbm"})];
    let error = placement(&halves).unwrap_err().to_string();
    assert!(error.contains("is planned in 2 shards"), "{error}");
}

/// Returns a network over the item and its price; its product with the query is the logit beside the retrieval score.
fn reranker() -> Onnx {
    let mut random = Random::new(21);
    let mut matrix = |name: &str, rows: i64, columns: i64| {
        let numbers = random.numbers((rows * columns) as usize);
        floats(name, &[rows, columns], &numbers.iter().map(|x| x * 0.3).collect::<Vec<f32>>())
    };
    let inputs =
        [value("query", &[0, 8]), value("item", &[0, 0, 8]), value("price", &[0, 0]), value("similarity", &[0, 0])];
    Onnx::new(&inputs, &[value("logits", &[0, 0, 1])], &["one_price = Unsqueeze(price, last)"])
        .and("of_item = Concat(item, one_price)")
        .attribute("axis", -1)
        .and("first = MatMul(of_item, w1)")
        .and("rectified = Relu(first)")
        .and("second = MatMul(rectified, w2)")
        .and("both = Relu(second)")
        .and("out = MatMul(both, w3)")
        .and("one_query = Unsqueeze(query, middle)")
        .and("product = Mul(out, one_query)")
        .and("sum = ReduceSum(product, last)")
        .attribute("keepdims", 1)
        .and("one_similarity = Unsqueeze(similarity, last)")
        .and("logits = Add(sum, one_similarity)")
        .with(&[matrix("w1", 9, 64), matrix("w2", 64, 64), matrix("w3", 64, 8)])
        .with(&[integers("last", &[-1]), integers("middle", &[1])])
}

/// The item-side part of a reranker is precomputed per item, in every format, or computed per candidate.
#[test]
fn whole_pass_reads_item_side_values() {
    let folder = tempfile::tempdir().unwrap();
    let package = folder.path().join("package");
    std::fs::create_dir(&package).unwrap();
    let model = "name = \"parts\"\ndimension = 8\n[[tasks]]\nname = \"click\"\n[overarch]\ngraph = \"overarch.onnx\"\n\
                 [value]\nexpression = \"click\"\n";
    std::fs::write(package.join("model.toml"), model).unwrap();
    std::fs::write(package.join("overarch.onnx"), reranker().bytes()).unwrap();
    let mut random = Random::new(22);
    let items = (0..400).map(|id| {
        json!({"id": id, "embedding": random.numbers(8), "attributes": {"price": f64::from(id % 17) / 4.0}}).to_string()
    });
    std::fs::write(package.join("items.jsonl"), items.collect::<Vec<String>>().join("\n")).unwrap();
    for format in [PartFormat::None, PartFormat::F32, PartFormat::F16, PartFormat::Int8] {
        let store = Store::new(folder.path().join(format!("{format:?}")));
        let items = Some(package.join("items.jsonl"));
        let mut what = Plan::new(Source::Package { folder: package.clone(), items, vectors: None });
        what.recipe.reranking.item_part = format;
        let (name, version) = publish(&store, &what, &|_, _, _| {}).unwrap();
        let view = view_of(&store, &name, version);
        let has_part = view.main().package.overarch.as_ref().unwrap().part().is_some();
        assert_eq!(has_part, format != PartFormat::None);
        let body = |n: usize| json!({"vector": random.numbers(8), "k": 50, "candidates": 120 + n, "exact": n.is_multiple_of(2)});
        let bodies: Vec<Value> = (0..4).map(body).collect();
        for ([cpu, gpu], body) in both(&view, &mut gpu(64 << 20), &bodies).iter().zip(&bodies) {
            agree(cpu, gpu, &format!("{format:?}: {body}"));
        }
    }
}

/// The demo as `sterling demo` publishes it.
#[test]
fn whole_pass_of_the_demo_answers_as_on_the_cpu() {
    let store = Store::new(Path::new(env!("CARGO_TARGET_TMPDIR")).join("card-demo"));
    std::fs::create_dir_all(store.root()).unwrap();
    let package = root().join("models/debian");
    let (name, version) = published(&store, &package)
        .unwrap()
        .unwrap_or_else(|| publish(&store, &Plan::of_package(package), &|_, _, _| {}).unwrap());
    let view = view_of(&store, &name, version);
    let reranker = view.main().package.overarch.as_ref().unwrap();
    assert!(reranker.user().len() > 1 && reranker.rows().len() > 1, "it reads the history, and rows looked up by id");
    let lists = view.main().index.lists();
    let requested = [
        json!({"k": 20, "candidates": 100}),
        json!({"k": 1, "candidates": 1}),
        json!({"k": 30, "probes": lists, "candidates": 60}),
        json!({"k": 30, "exact": true, "candidates": 50, "filter": "section:python AND NOT priority:optional"}),
        json!({"k": 40, "candidates": 80, "filter": "priority:required"}),
        json!({"k": 15, "candidates": 40, "constants": {"w_depends": 1.5, "w_similarity": 2.0}}),
    ];
    let bodies: Vec<Value> =
        requested.iter().zip(heldout(97).iter().cycle()).map(|(more, user)| request(user, more)).collect();
    for ([cpu, gpu], body) in both(&view, &mut gpu(256 << 20), &bodies).iter().zip(&bodies) {
        agree(cpu, gpu, &body.to_string());
    }
}
