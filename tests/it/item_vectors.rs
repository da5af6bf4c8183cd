//! Items that updates add to a model with stored item tensors: they are ranked as if they had been published.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::Value;
use sterling::items::{GivenItem, GivenValues};
use sterling::publish::merge;
use sterling::request::Ranked;
use sterling::serving::fresh::{Fresh, Update, update_of};
use sterling::serving::view::View;
use sterling::snapshot::{Placement, Snapshot, Store, VectorRows};

use crate::contract::{answers, bodies, lines, package, users};
use crate::packages::view;

/// Converts a line of an item file to the input of the API.
fn given(line: &Value) -> GivenItem {
    let values = |value: &Value| match value {
        Value::Number(one) => GivenValues::Numbers(vec![one.as_f64().unwrap()]),
        Value::String(text) => GivenValues::Texts(vec![text.clone()]),
        Value::Array(all) if all.iter().all(Value::is_string) => {
            GivenValues::Texts(all.iter().map(|text| text.as_str().unwrap().to_owned()).collect())
        }
        Value::Array(all) => GivenValues::Numbers(all.iter().map(|number| number.as_f64().unwrap()).collect()),
        other => panic!("{other}"),
    };
    let attributes = line["attributes"].as_object().unwrap().iter();
    let attributes = attributes.map(|(name, value)| (name.clone(), values(value))).collect();
    GivenItem { id: line["id"].as_i64().unwrap(), embedding: None, attributes, whole: true }
}

fn updates(view: &View, items: impl IntoIterator<Item = GivenItem>) -> Vec<Update> {
    items.into_iter().map(|item| update_of(&item, view, &mut BTreeSet::new()).unwrap()).collect()
}

fn same(got: &[Ranked], want: &[Ranked]) {
    for (got, want) in got.iter().zip(want) {
        assert_eq!(got.ids, want.ids);
        assert_eq!((&got.similarities, &got.scores, &got.tasks), (&want.similarities, &want.scores, &want.tasks));
    }
}

#[test]
fn updated_items_are_ranked_like_published_ones() {
    let bodies = bodies(&users());
    for format in ["f32", "f16", "bf16", "int8"] {
        let store = tempfile::tempdir().unwrap();
        let whole = view(&package("last", format, true).publish(store.path()).unwrap());
        let want = answers(&whole, &bodies);
        let store = tempfile::tempdir().unwrap();
        let fewer: Vec<String> = lines().iter().take(5).map(ToString::to_string).collect();
        let fewer = package("last", format, true).text("items.jsonl", &fewer.join("\n"));
        let main = view(&fewer.publish(store.path()).unwrap());
        let mut fresh = Fresh::new(main.main().clone(), 0).in_place();
        // One existing item had another picture for a while, and one another brand.
        let mut other = lines()[2].clone();
        other["attributes"]["image"] = serde_json::json!([9.0, 9.0, 9.5]);
        let brand = |brand: &[&str]| GivenItem {
            id: 1,
            embedding: None,
            attributes: vec![("brand".into(), GivenValues::Texts(brand.iter().map(|b| (*b).to_owned()).collect()))],
            whole: false,
        };
        let mut all = vec![given(&other), brand(&["bolt"])];
        all.extend(lines().iter().skip(5).map(given));
        assert!(fresh.apply(&updates(&main, all)).unwrap().is_empty());
        assert_ne!(answers(&Arc::new(fresh.view().unwrap()), &bodies)[0].scores, want[0].scores);
        let back = [given(&lines()[2]), brand(&["zürich", "acme"])];
        assert!(fresh.apply(&updates(&main, back)).unwrap().is_empty());
        let now = Arc::new(fresh.view().unwrap());
        same(&answers(&now, &bodies), &want);
        // Enough other items that all of them lie in one segment; then they are deleted.
        let mut others: Vec<GivenItem> = (100..2200).map(|id| GivenItem { id, ..given(&lines()[3]) }).collect();
        let put = updates(&main, others.drain(..));
        put.chunks(500).for_each(|updates| assert!(fresh.apply(updates).unwrap().is_empty()));
        let deleted: Vec<Update> = (100..2200).map(|id| Update::Delete { id }).collect();
        assert!(fresh.apply(&deleted).unwrap().is_empty());
        let later = Arc::new(fresh.view().unwrap());
        same(&answers(&later, &bodies), &want);
        // The same after a merge, with the same stored data as at a publication.
        let made = merge(&Store::new(store.path()), &later, &|_| ()).unwrap();
        let folder = Store::new(store.path()).folder("seen", made.version);
        let merged = Arc::new(View::new(Arc::new(Snapshot::load(&folder, &Placement::whole()).unwrap())));
        same(&answers(&merged, &bodies), &want);
        let rows = VectorRows::of(&whole.main().package.spec.item.vectors).unwrap();
        for id in (0..9).map(sterling::units::ItemId) {
            let stored = |view: &View| {
                let mut out = Vec::new();
                view.read_vectors(&rows, view.slot(id).unwrap(), &mut out);
                out
            };
            let published = stored(&whole);
            assert_eq!(published.len(), rows.bytes());
            assert!([&now, &later, &merged].iter().all(|view| stored(view) == published), "item {}", id.0);
        }
        // A start with the complete journal has the same result.
        let mut again = Fresh::new(merged.main().clone(), made.position).in_place();
        let all: Vec<Update> = updates(&merged, lines().iter().map(given));
        assert!(again.catch_up(&all).unwrap().is_empty());
        again.caught_up().unwrap();
        same(&answers(&Arc::new(again.view().unwrap()), &bodies), &want);
    }
}

#[test]
fn rows_that_cannot_be_stored_are_rejected_by_item() {
    let main = package("last", "int8", true).view().unwrap();
    let image = |image: Option<Vec<f64>>| {
        let mut item = given(&lines()[4]);
        item.attributes.retain(|(name, _)| name != "image");
        item.attributes.extend(image.map(|row| ("image".to_owned(), GivenValues::Numbers(row))));
        item
    };
    let texts =
        GivenItem { attributes: vec![("image".into(), GivenValues::Texts(vec!["a".into()]))], ..given(&lines()[4]) };
    let missing = GivenItem { attributes: vec![("image".into(), GivenValues::Missing)], ..given(&lines()[4]) };
    let part = GivenItem { whole: false, ..image(Some(vec![1.0, 2.0, 3.0])) };
    for (item, reason) in [
        (image(None), "missing, expected 3 numbers"),
        (missing, "missing, expected 3 numbers"),
        (image(Some(vec![1.0, 2.0])), "2 numbers, expected 3"),
        (image(Some(vec![1.0, 2.0, 1e300])), "column 2 is inf"),
        (texts, "got texts, expected numbers"),
        (part, "expected the whole item"),
    ] {
        let field = if item.whole { "attributes.image" } else { "set.image" };
        let wrong = update_of(&item, &main, &mut BTreeSet::new()).unwrap_err();
        assert_eq!((wrong.id, wrong.field.as_str()), (Some(4), field));
        assert!(wrong.reason.contains(reason), "{}", wrong.reason);
    }
    assert!(update_of(&image(Some(vec![1.0, 2.0, 3.0])), &main, &mut BTreeSet::new()).is_ok());
}
