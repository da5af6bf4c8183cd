//! Models of the zoo, exported from PyTorch: published, served and compared with PyTorch.

use std::collections::HashMap;

use serde_json::{Value, json};
use sterling::index::ivf::Rescore;
use sterling::publish::{Plan, Source};
use sterling::snapshot::Recipe;

use crate::support::{Server, json as read, put, root};

/// Largest allowed difference to PyTorch of a query's number, a similarity or a task's score.
const TOLERANCE: f64 = 2e-4;

/// Models that `python/make_zoo.py` writes.
const ZOO: [&str; 12] =
    ["bert4rec", "dcn", "deepfm", "din", "dlrm", "gru4rec", "hstu", "llm", "mol", "sasrec", "tags", "xdeepfm"];

fn near(found: &Value, wanted: &Value, place: &str) {
    let (found, wanted) = (found.as_f64().unwrap(), wanted.as_f64().unwrap());
    assert!((found - wanted).abs() <= TOLERANCE, "{place}: {found}, PyTorch says {wanted}");
}

#[test]
fn the_zoo_answers_as_pytorch_does() {
    let store = tempfile::tempdir().unwrap();
    let packages = ZOO.map(|name| (name, root().join("models").join(name)));
    let mut recipe = Recipe::default();
    recipe.index.rescore = Rescore::F32;
    for (_, package) in &packages {
        let items = Some(package.join("items.jsonl"));
        let what = Plan {
            recipe: recipe.clone(),
            ..Plan::new(Source::Package { folder: package.clone(), items, vectors: None })
        };
        put(store.path(), &what).unwrap_or_else(|e| panic!("{}: {e}", package.display()));
    }
    for (name, package) in &packages {
        let server = Server::start_with(store.path(), &["--model", name]);
        let call = |verb: &str, body: Value| server.ask(&format!("/v1/models/{name}:{verb}"), body);
        for (n, case) in read(package.join("golden.json"))["requests"].as_array().unwrap().iter().enumerate() {
            let place = format!("{name}, request {n}");
            let embedding = call("embed", json!({"features": case["features"]}));
            let query = case["query"].as_array().unwrap();
            assert_eq!(embedding["embedding"].as_array().unwrap().len(), query.len(), "{place}");
            for (found, wanted) in embedding["embedding"].as_array().unwrap().iter().zip(query) {
                near(found, wanted, &place);
            }
            let request =
                json!({"features": case["features"], "exact": true, "k": 400, "candidates": 400, "timeout_ms": 60000});
            let answer = call("retrieve", request);
            let found: HashMap<i64, &Value> =
                answer["items"].as_array().unwrap().iter().map(|item| (item["id"].as_i64().unwrap(), item)).collect();
            for wanted in case["items"].as_array().unwrap() {
                let item = found[&wanted["id"].as_i64().unwrap()];
                near(&item["similarity"], &wanted["similarity"], &format!("{place}, similarity of {}", wanted["id"]));
                for (task, score) in wanted["tasks"].as_object().unwrap() {
                    near(&item["tasks"][task], score, &format!("{place}, {task} of {}", wanted["id"]));
                }
            }
        }
    }
}
