//! Imported Faiss indexes compared with the answers of Faiss (`python/make_faiss_golden.py`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};
use sterling::error::Kind;
use sterling::index::ivf::{Rescore, Scratch};
use sterling::publish::{Plan, Source};
use sterling::serving::view::View;
use sterling::snapshot::items::faiss::IndexFile;
use sterling::snapshot::{Manifest, Placement, Recipe, Snapshot};

use crate::support::{Server, ids, put, retrieve, root, run};

const D: usize = 24;

pub fn golden(name: &str) -> PathBuf {
    root().join("tests/golden/faiss").join(name)
}

fn floats(hex: &Value) -> Vec<f32> {
    let hex = hex.as_str().unwrap();
    let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    (0..hex.len()).step_by(8).map(|at| f32::from_le_bytes([0, 2, 4, 6].map(|b| byte(at + b)))).collect()
}

fn whole(list: &Value) -> Vec<i64> {
    list.as_array().unwrap().iter().map(|v| v.as_i64().unwrap()).collect()
}

fn product(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// Returns the largest error of the product if both vectors are rounded to int8: half a code in every number.
fn rounding(a: &[f32], b: &[f32]) -> f64 {
    let half = |v: &[f32]| f64::from(v.iter().fold(0f32, |m, x| m.max(x.abs()))) / 254.0;
    let sum = |v: &[f32]| v.iter().map(|x| f64::from(x.abs())).sum::<f64>();
    half(a) * sum(b) + half(b) * sum(a) + a.len() as f64 * half(a) * half(b) + 1e-5
}

pub fn import(index: &Path, recipe: Recipe) -> Plan {
    with_items(index, None, recipe)
}

fn with_items(index: &Path, items: Option<PathBuf>, recipe: Recipe) -> Plan {
    let source = Source::Faiss { name: "imported".into(), index: index.to_owned(), items };
    Plan { recipe, ..Plan::new(source) }
}

fn loaded(index: &Path, rescore: Rescore) -> Snapshot {
    let store = tempfile::tempdir().unwrap();
    let mut recipe = Recipe::default();
    recipe.index.rescore = rescore;
    put(store.path(), &import(index, recipe)).unwrap();
    // The folder may be deleted, because the files stay mapped.
    Snapshot::load(&store.path().join("imported/1"), &Placement::whole()).unwrap()
}

/// An index file and the answers of Faiss.
struct Case {
    name: String,
    path: PathBuf,
    answers: Value,
    vectors: BTreeMap<i64, Vec<f32>>,
    centroids: Vec<f32>,
}

impl Case {
    fn all() -> Vec<Case> {
        let answers: BTreeMap<String, Value> =
            serde_json::from_str(&std::fs::read_to_string(golden("answers.json")).unwrap()).unwrap();
        let case = |(name, answers): (String, Value)| {
            let path = golden(&format!("{name}.index"));
            let file = IndexFile::open(&path).unwrap();
            let entries: Vec<u32> = (0..file.ids().len() as u32).collect();
            let values = file.vectors(&entries).unwrap();
            let vectors = file.ids().iter().copied().zip(values.chunks_exact(D).map(<[f32]>::to_vec)).collect();
            Case { name, path, answers, vectors, centroids: file.lists(&entries).centroids }
        };
        answers.into_iter().map(case).collect()
    }

    /// Returns whether Faiss orders lists by distance, so that the longer centroid is worse.
    fn probes_by_distance(&self) -> bool {
        let first = &floats(&self.answers["list_distances"])[..];
        first[0] < first[1]
    }

    /// Returns the score by which Faiss orders a list, the larger the better.
    fn list_score(&self, query: &[f32], list: i64) -> f64 {
        let centroid = &self.centroids[list as usize * D..][..D];
        product(query, centroid) - if self.probes_by_distance() { product(centroid, centroid) / 2.0 } else { 0.0 }
    }
}

#[test]
fn ids_and_vectors_are_those_that_faiss_reads() {
    let cases = Case::all();
    assert!(cases.len() >= 7);
    for case in cases {
        assert_eq!(case.vectors.len() as i64, case.answers["items"].as_i64().unwrap(), "{}", case.name);
        let (sampled, expected) = (whole(&case.answers["sampled"]), floats(&case.answers["vectors"]));
        for (id, expected) in sampled.iter().zip(expected.chunks_exact(D)) {
            let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-6 * b.abs().max(1.0);
            assert!(case.vectors[id].iter().zip(expected).all(close), "{} id {id}", case.name);
        }
    }
}

#[test]
fn equal_probes_find_the_results_of_faiss() {
    for case in Case::all() {
        for rescore in [Rescore::F32, Rescore::None] {
            let view = Arc::new(View::new(Arc::new(loaded(&case.path, rescore))));
            let snapshot = view.main();
            let (mut same, mut requested) = (0, 0);
            for (n, query) in floats(&case.answers["queries"]).chunks_exact(D).enumerate() {
                for search in case.answers["searches"].as_array().unwrap() {
                    requested += 1;
                    let probes = search["probes"].as_u64().unwrap() as usize;
                    if lists_are_those_of_faiss(&case, snapshot, query, n, probes) {
                        same += 1;
                        items_are_those_of_faiss(&case, &view, query, n, search);
                    }
                }
            }
            assert!(
                same * 10 >= requested * 9,
                "{}: only {same} of {requested} searches probed the same lists",
                case.name
            );
        }
    }
}

/// Returns whether the probed lists are the same; different ones must be equally good up to the rounding to int8.
fn lists_are_those_of_faiss(case: &Case, snapshot: &Snapshot, query: &[f32], n: usize, probes: usize) -> bool {
    let mut scratch = Scratch::default();
    let ours: BTreeSet<i64> =
        snapshot.index.probe(query, probes, &mut scratch).map(|(list, _)| i64::from(list.0)).collect();
    let theirs: BTreeSet<i64> = whole(&case.answers["lists"][n])[..probes].iter().copied().collect();
    for (a, b) in ours.difference(&theirs).zip(theirs.difference(&ours)) {
        let most = |list: i64| rounding(query, &case.centroids[list as usize * D..][..D]);
        let apart = (case.list_score(query, *a) - case.list_score(query, *b)).abs();
        assert!(apart <= most(*a) + most(*b), "{} query {n}: list {a} for {b}, {apart} apart", case.name);
    }
    ours == theirs
}

/// Checks the items and scores of one search: rows in f32 may differ by the rounding of sums, int8 rows by that of codes.
fn items_are_those_of_faiss(case: &Case, view: &Arc<View>, query: &[f32], n: usize, search: &Value) {
    let snapshot = view.main();
    let k = search["k"].as_u64().unwrap() as usize;
    let place =
        format!("{} query {n}, {} probes, rows {:?}", case.name, search["probes"], snapshot.recipe.index.rescore);
    let request = json!({"vector": query, "k": k, "candidates": 1500, "probes": search["probes"]});
    let (found, _) = retrieve(view, &[request]).pop().unwrap().unwrap();
    assert_eq!(found.ids.len(), k, "{place}");

    let exact = |id: i64| product(query, &case.vectors[&id]);
    let size = (product(query, query) * case.vectors.values().map(|v| product(v, v)).fold(0.0, f64::max)).sqrt();
    let tolerance = |id: i64| match snapshot.recipe.index.rescore {
        Rescore::F32 => 1e-5 * size,
        _ => rounding(query, &case.vectors[&id]),
    };
    // The numbers of Faiss are these products, or the corresponding distances.
    let theirs = whole(&search["ids"][n]);
    let distances = floats(&search["distances"]);
    for (&id, &distance) in theirs.iter().zip(&distances[n * k..]) {
        let vector = &case.vectors[&id];
        let expected = match case.answers["metric"].as_str().unwrap() {
            "l2" => product(query, query) + product(vector, vector) - 2.0 * exact(id),
            _ => exact(id),
        };
        assert!((expected - f64::from(distance)).abs() <= 1e-5 * size, "{place}: {id}: {distance} for {expected}");
    }
    for (id, score) in found.ids.iter().zip(&found.scores) {
        let apart = (f64::from(*score) - exact(id.0)).abs();
        assert!(apart <= tolerance(id.0), "{place}: item {id} is {apart} off");
    }
    // Under L2, the scores of Faiss include the rounding error of a vector's length; the orders agree up to that error.
    let lengths = case.vectors.values().map(|v| product(v, v));
    let spread = match case.answers["metric"].as_str().unwrap() {
        "l2" => lengths.clone().fold(0.0, f64::max) - lengths.fold(f64::INFINITY, f64::min),
        _ => 0.0,
    };
    let ours: BTreeSet<i64> = found.ids.iter().map(|id| id.0).collect();
    let theirs: BTreeSet<i64> = theirs.into_iter().collect();
    for (a, b) in ours.difference(&theirs).zip(theirs.difference(&ours)) {
        let apart = (exact(*a) - exact(*b)).abs();
        assert!(apart <= tolerance(*a) + tolerance(*b) + spread / 2.0, "{place}: item {a} for {b}, {apart} apart");
    }
}

#[test]
fn an_imported_index_is_served_with_its_attributes() {
    let folder = tempfile::tempdir().unwrap();
    let case = Case::all().into_iter().find(|c| c.name == "idmap2").unwrap();
    let (items, store) = (folder.path().join("items.jsonl"), folder.path().join("store"));
    // In another order than the index: attributes are joined by id.
    let line = |id: &i64| json!({"id": id, "attributes": {"odd": id % 2, "id text": id.to_string()}}).to_string();
    std::fs::write(&items, case.vectors.keys().rev().map(line).collect::<Vec<_>>().join("\n")).unwrap();
    let [index, items, store_text] = [&case.path, &items, &store].map(|p| p.to_str().unwrap());
    let publish = ["publish", "--name", "imported", "--faiss", index, "--items", items, "--store", store_text];
    let (code, reported, errors) = run(&publish);
    assert!(
        code == 0 && reported.starts_with("published imported version 1: 1500 items in 16 lists"),
        "{reported} {errors}"
    );
    let (_, reported, _) = run(&["inspect", store.join("imported/1").to_str().unwrap()]);
    assert!(reported.contains("items.jsonl with the vectors of idmap2.index"), "{reported}");

    let server = Server::start(&store);
    let queries = floats(&case.answers["queries"]);
    let search = &case.answers["searches"][2];
    for (n, query) in queries.chunks_exact(D).enumerate() {
        let ask = |filter: &str| {
            let body = json!({"vector": query, "k": 100, "probes": 16, "filter": filter, "columns": ["id text"]});
            server.ask("/v1/models/imported:retrieve", body)
        };
        let (all, theirs) = (ask(""), whole(&search["ids"][n]));
        let ours = ids(&all);
        let missed = theirs.iter().filter(|id| !ours.contains(id)).count();
        // The rows are stored in f16: a tie at the end may be resolved differently.
        assert!(missed <= 1 && ours[..50].iter().all(|id| theirs.contains(id)), "query {n}: {missed} missed");
        for item in all["items"].as_array().unwrap() {
            assert_eq!(item["columns"]["id text"], json!(item["id"].to_string()), "{item}");
        }
        let odd = ids(&ask("odd:1"));
        assert!(odd.len() == 100 && odd.iter().all(|id| id % 2 == 1), "query {n}: {odd:?}");
    }
}

#[test]
fn the_manifest_names_the_index() {
    let store = tempfile::tempdir().unwrap();
    put(store.path(), &import(&golden("sparse_direct.index"), Recipe::default())).unwrap();
    let manifest = Manifest::read(&store.path().join("imported/1")).unwrap();
    assert_eq!((manifest.items, manifest.lists, manifest.dimension), (60, 16, D));
    assert_eq!(manifest.provenance.items_file, "sparse_direct.index");
}

#[test]
fn inconsistent_indexes_are_rejected_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let (items, store) = (folder.path().join("items.jsonl"), folder.path().join("store"));
    let index = golden("sparse_direct.index");
    let known: Vec<i64> = IndexFile::open(&index).unwrap().ids().to_vec();
    let lines = |ids: &[i64]| ids.iter().map(|id| format!("{{\"id\": {id}}}\n")).collect::<String>();
    let least = known.iter().min().unwrap();
    let without: Vec<i64> = known.iter().copied().filter(|id| id != least).collect();
    for (ids, expected) in [
        (without, format!("items.jsonl: no id {least}, which is in ")),
        ([&known[..], &[99_999]].concat(), "items.jsonl: id 99999 is not in ".to_owned()),
    ] {
        std::fs::write(&items, lines(&ids)).unwrap();
        let what = with_items(&index, Some(items.clone()), Recipe::default());
        let error = put(&store, &what).unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid);
        assert!(error.to_string().contains(&expected) && error.to_string().contains("sparse_direct.index"), "{error}");
    }
    // The file ends with the ids of the last list that has some.
    let mut bytes = std::fs::read(&index).unwrap();
    let end = bytes.len();
    bytes.copy_within(end - 16..end - 8, end - 8);
    let twice = folder.path().join("twice.index");
    std::fs::write(&twice, bytes).unwrap();
    let error = put(&store, &import(&twice, Recipe::default())).unwrap_err().to_string();
    assert!(error.contains("twice.index: id ") && error.contains("occurs twice"), "{error}");

    let recipe = Recipe::parse("[index]\nlists = 5").unwrap();
    let error = put(&store, &import(&index, recipe)).unwrap_err().to_string();
    assert!(error.contains("index.lists: got 5, expected none: the lists are those of "), "{error}");
    assert!(!store.exists(), "something was published");

    let [index, items, store] = [&index, &items, &store].map(|p| p.to_str().unwrap());
    for (arguments, expected) in [
        (vec!["--faiss", index], "--name"),
        (vec!["--name", "x", "--faiss", index, "--vectors", index, "--items", items], "cannot be used with"),
        (vec!["--name", "x", "--faiss", items], "supported are IwFl"),
        (vec!["--name", "x", "--faiss", "none.index"], "none.index"),
        (vec!["--name", "x"], "expected an item file or an index of Faiss"),
    ] {
        let (code, reported, errors) = run(&[&["publish", "--store", store][..], &arguments].concat());
        assert_eq!((code, reported.as_str()), (2, ""), "{arguments:?}: {errors}");
        assert!(errors.contains(expected), "{arguments:?}: {errors}");
    }
}
