//! Items that a reranker cannot score: the zoo's model `dcn` reads the logarithm of the column `price`.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use sterling::publish::{Plan, Source};
use sterling::serving::fresh::{Fresh, Put, Update};
use sterling::serving::view::Attribute;
use sterling::snapshot::model::Package;
use sterling::snapshot::sandbox::ColumnCheck;
use sterling::snapshot::{Placement, Snapshot, Store};
use sterling::units::ItemId;

use crate::support::{Server, ids, put, root, text};

const ITEMS: &str = "/v1/models/dcn/items";
/// Candidates of the package.
const COUNT: usize = 400;

fn publish(store: &Path) {
    let package = root().join("models/dcn");
    let items = Some(package.join("items.jsonl"));
    put(store, &Plan::new(Source::Package { folder: package, items, vectors: None })).unwrap();
}

fn serve(folder: &Path) -> Server {
    Server::start_with(&folder.join("store"), &["--updates", folder.join("updates").to_str().unwrap()])
}

/// Returns the ids of all items at this position or later, best first.
fn all(server: &Server, position: u64) -> Vec<i64> {
    let user = json!({"history": [1, 2, 3], "segment": "s1"});
    let body =
        json!({"features": user, "k": COUNT + 50, "candidates": COUNT + 50, "exact": true, "timeout_ms": 60_000});
    ids(&server.ask(&format!("/v1/models/dcn:retrieve?min_position={position}"), body))
}

fn upsert(server: &Server, item: Value) -> Value {
    server.ask(&format!("{ITEMS}:upsert"), json!({"items": [item]}))
}

#[test]
fn an_item_without_finite_scores_is_rejected_and_others_are_answered() {
    let folder = tempfile::tempdir().unwrap();
    publish(&folder.path().join("store"));
    let server = serve(folder.path());
    let before = all(&server, 0);
    let whole = json!({"category": "c1", "brand": "b2", "price": 3.5, "popularity": 5});
    let without = |name: &str| {
        let mut attributes = whole.clone();
        attributes.as_object_mut().unwrap().remove(name);
        attributes
    };
    let with = |name: &str, value: Value| {
        let mut attributes = whole.clone();
        attributes[name] = value;
        attributes
    };
    let price = "attributes.price";
    for (attributes, field) in [
        (without("price"), price),
        (with("price", Value::Null), price),
        (with("price", json!(0)), price),
        (with("price", json!(-1.5)), price),
        (json!({}), price),
    ] {
        let answer = upsert(&server, json!({"id": 9000, "attributes": attributes}));
        assert_eq!((&answer["accepted"], &answer["refused"][0]["field"]), (&json!(0), &json!(field)), "{answer}");
        let reason = answer["refused"][0]["reason"].as_str().unwrap();
        assert!(reason.contains("makes `logits` of overarch.onnx NaN or infinite"), "{reason}");
    }
    // Columns that are 0 without harm may be missing, and a column that the reranker does not read is no matter.
    for attributes in [without("popularity"), without("category"), with("brand", Value::Null), whole.clone()] {
        let answer = upsert(&server, json!({"id": 9001, "attributes": attributes}));
        assert_eq!((&answer["accepted"], &answer["refused"]), (&json!(1), &json!([])), "{answer}");
    }
    let put = upsert(&server, json!({"id": 9002, "attributes": whole}));
    let found = all(&server, put["position"].as_u64().unwrap());
    assert_eq!(found.len(), before.len() + 2);
    // Changes of an item of the snapshot, and of one that was added, keep their other columns.
    for id in [before[0], 9002] {
        for value in [Value::Null, json!(0), json!(-3)] {
            let answer = upsert(&server, json!({"id": id, "set": {"price": value, "popularity": 1}}));
            assert_eq!(
                (&answer["accepted"], &answer["refused"][0]["field"]),
                (&json!(0), &json!("set.price")),
                "{answer}"
            );
        }
        let answer = upsert(&server, json!({"id": id, "set": {"popularity": null}}));
        assert_eq!((&answer["accepted"], &answer["refused"]), (&json!(1), &json!([])), "{answer}");
        let found = all(&server, answer["position"].as_u64().unwrap());
        assert_eq!(found.len(), before.len() + 2);
    }
    // A change that precedes the item's visibility is not checked; it is dropped when it is applied.
    let calls: Vec<Value> = (0..40)
        .map(|n| {
            upsert(&server, json!({"id": 9100 + n, "attributes": whole}));
            upsert(&server, json!({"id": 9100 + n, "set": {"price": null}}))
        })
        .collect();
    let last = calls.iter().filter_map(|answer| answer["position"].as_u64()).max().unwrap();
    let served = all(&server, last);
    assert!((0..40).all(|n| served.contains(&(9100 + n))), "{served:?}");
    let mut sorted = served;
    sorted.sort_unstable();
    drop(server);
    let server = serve(folder.path());
    let mut after = all(&server, last);
    after.sort_unstable();
    assert_eq!(after, sorted, "a restart reads the same items from the journal");
}

#[test]
fn publishing_such_an_item_names_the_column() {
    let folder = tempfile::tempdir().unwrap();
    let package = root().join("models/dcn");
    let items = folder.path().join("items.jsonl");
    let lines = text(package.join("items.jsonl")).replacen("\"price\":17.88,", "", 1);
    std::fs::write(&items, lines).unwrap();
    let plan = Plan::new(Source::Package { folder: package, items: Some(items), vectors: None });
    let error = put(&folder.path().join("store"), &plan).unwrap_err().to_string();
    assert!(error.contains("column `price` is 0 (a missing value counts as 0)"), "{error}");
}

#[test]
fn all_unscorable_items_of_a_call_are_found_together() {
    let package = Package::open(&root().join("models/dcn")).unwrap();
    let check = ColumnCheck::of(&package).unwrap().unwrap();
    let price = check.columns().iter().position(|column| column == "price").unwrap();
    let of_price = |number: f32| -> Vec<f32> {
        (0..check.columns().len()).map(|column| if column == price { number } else { 1.0 }).collect()
    };
    let numbers = [2.0, 0.0, 7.5, -1.0, f32::NAN, 3.0, f32::INFINITY];
    let items: Vec<Vec<f32>> = (0..700).map(|n| of_price(numbers[n % numbers.len()])).collect();
    let found = check.invalid(&package, &items);
    let alone = |item: &usize| !check.invalid(&package, &items[*item..*item + 1]).is_empty();
    let expected: Vec<usize> = (0..items.len()).filter(alone).collect();
    assert!(expected.len() > 200 && expected.len() < items.len());
    assert_eq!(found.iter().map(|invalid| invalid.item).collect::<Vec<_>>(), expected);
    // The columns of a few are named.
    assert!(found[..64].iter().all(|invalid| invalid.column == Some(price)), "{found:?}");
    assert!(found[64..].iter().all(|invalid| invalid.column.is_none()), "{found:?}");
}

/// A journal of an earlier release may hold such updates.
#[test]
fn acknowledged_updates_without_finite_scores_are_dropped_and_reported() {
    let store = tempfile::tempdir().unwrap();
    publish(store.path());
    let folder = Store::new(store.path()).folder("dcn", 1);
    let mut fresh = Fresh::new(Arc::new(Snapshot::load(&folder, &Placement::whole()).unwrap()), 0);
    let attributes = |price: Option<f64>| -> Vec<(String, Attribute)> {
        let price = price.map(|price| ("price".to_owned(), Attribute::Number(price)));
        price.into_iter().chain([("popularity".to_owned(), Attribute::Number(4.0))]).collect()
    };
    let put = |id, price| Update::Put(Put { id, attributes: attributes(price), ..Put::default() });
    let set = |id, price| Update::Set { id, attributes: vec![("price".into(), price)] };
    let known = fresh.view().unwrap().id(fresh.view().unwrap().filled_slots().next().unwrap()).0;
    let misfits = fresh.apply(&[
        put(9000, None),
        put(9001, Some(2.0)),
        set(9001, Attribute::Missing),
        set(known, Attribute::Number(0.0)),
        set(9000, Attribute::Missing),
        set(known, Attribute::Number(7.0)),
        put(9001, Some(-1.0)),
    ]);
    let misfits = misfits.unwrap();
    let reported: Vec<(u64, bool)> = misfits.iter().map(|misfit| (misfit.position, misfit.is_whole)).collect();
    assert_eq!(reported, [(1, true), (3, true), (4, true), (7, true)]);
    assert!(misfits.iter().all(|misfit| misfit.error.to_string().contains("attribute `price`")), "{misfits:?}");
    let view = fresh.view().unwrap();
    assert!(view.slot(ItemId(9000)).is_none());
    let price = view.main().columns.number("price").unwrap();
    let number = |id| view.value_of(price, view.slot(ItemId(id)).unwrap()).number();
    assert_eq!((number(9001), number(known)), (2.0, 7.0));
}
