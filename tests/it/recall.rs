//! Requests get the recall that they ask for, at every size, width and pass rate, and the answer reports it.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use sterling::publish::{Plan, Source, merge};
use sterling::serving::fresh::{Fresh, Put, Update};
use sterling::serving::view::{Attribute, View};
use sterling::snapshot::{Calibration, Manifest, Placement, Recipe, Snapshot, Store};
use sterling::units::ItemId;

use crate::support::{Server, output, put, retrieve, run, sterling, until};

/// Filters that are independent of the embedding, by approximate pass rate.
pub const FILTERS: [(f64, &[&str]); 4] = [
    (1.0, &[""]),
    (0.5, &["half:1", "half:0"]),
    (0.1, &["tenth:1", "tenth:2", "tenth:3", "tenth:4", "tenth:5"]),
    (0.01, &["hundredth:1", "hundredth:2", "hundredth:3", "hundredth:4", "hundredth:5", "hundredth:6"]),
];
const HELD_OUT: u64 = 90;

/// splitmix64
fn random(seed: u64) -> u64 {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// Returns an approximately normal number.
fn bell(seed: u64) -> f32 {
    (0..4).map(|n| random(seed ^ n << 60) as f32 / u64::MAX as f32).sum::<f32>() * 1.7 - 3.4
}

/// Distribution of vectors: around this number of centres, or around none.
#[derive(Clone, Copy, Debug)]
pub struct Distribution {
    pub items: usize,
    pub width: usize,
    pub clusters: u64,
}

impl Distribution {
    pub fn vector(self, n: u64) -> Vec<f32> {
        let number = |d: u64| {
            let centre = match self.clusters {
                0 => 0.0,
                clusters => 2.0 * bell(random(n ^ 0xabc) % clusters * 1000 + d + (1 << 50)),
            };
            centre + bell(n * 1000 + d)
        };
        let vector: Vec<f32> = (0..self.width as u64).map(number).collect();
        let length = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
        vector.iter().map(|x| x / length).collect()
    }

    pub fn queries(self) -> Vec<Vec<f32>> {
        (0..HELD_OUT).map(|n| self.vector((1 << 40) + n)).collect()
    }

    /// Publishes it in `store` and returns the version's view.
    fn publish(self, store: &Path) -> Arc<View> {
        self.publish_by(store, Recipe::default())
    }

    /// The same by a recipe.
    pub fn publish_by(self, store: &Path, recipe: Recipe) -> Arc<View> {
        let rows: Vec<Vec<f32>> = (0..self.items as u64).map(|n| self.vector(n)).collect();
        published(store, &rows, recipe)
    }
}

/// Returns the attributes of an item that filters use.
fn attributes(n: u64) -> [(&'static str, u64); 3] {
    [("half", random(n + 7) % 2), ("tenth", random(n + 8) % 10), ("hundredth", random(n + 9) % 100)]
}

/// Publishes rows in `store` and returns the version's view.
fn published(store: &Path, rows: &[Vec<f32>], recipe: Recipe) -> Arc<View> {
    let line = |n: u64| json!({"id": n, "attributes": serde_json::Map::from_iter(attributes(n).map(|(k, v)| (k.into(), v.into())))});
    let lines: String = (0..rows.len() as u64).map(|n| format!("{}\n", line(n))).collect();
    let items = store.join("items.jsonl");
    std::fs::write(&items, lines).unwrap();
    let vectors = store.join("vectors.npy");
    std::fs::write(&vectors, npy(rows)).unwrap();
    let source = Source::Vectors { name: "drawn".into(), items, vectors: Some(vectors) };
    let version = put(&store.join("store"), &Plan { recipe, ..Plan::new(source) }).unwrap();
    view(&store.join(format!("store/drawn/{version}")))
}

/// Loads the version in a folder.
pub fn view(folder: &Path) -> Arc<View> {
    Arc::new(View::new(Arc::new(Snapshot::load(folder, &Placement::whole()).unwrap())))
}

fn npy(rows: &[Vec<f32>]) -> Vec<u8> {
    let shape = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({}, {}), }}", rows.len(), rows[0].len());
    let header = format!("{shape:<117}\n");
    let mut bytes = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend(rows.iter().flatten().flat_map(|x| x.to_le_bytes()));
    bytes
}

/// Returns the recall of requests with `more` fields, and the number of probes that they report.
pub fn recall(view: &Arc<View>, queries: &[Vec<f32>], k: usize, filters: &[&str], more: &Value) -> (f64, usize) {
    let body = |(n, query): (usize, &Vec<f32>), exact: bool| {
        let mut body =
            json!({"vector": query, "k": k, "filter": filters[n % filters.len()], "exact": exact, "explain": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let ask = |exact| retrieve(view, &queries.iter().enumerate().map(|query| body(query, exact)).collect::<Vec<_>>());
    let (mut hits, mut wanted, mut probes) = (0, 0, 0);
    for (found, exact) in ask(false).into_iter().zip(ask(true)) {
        let (found, explain) = found.unwrap();
        let exact: HashSet<ItemId> = exact.unwrap().0.ids.into_iter().collect();
        hits += found.ids.iter().filter(|id| exact.contains(id)).count();
        wanted += exact.len();
        probes = explain.unwrap().probes.map_or(0, |p| p.probes);
    }
    (hits as f64 / wanted as f64, probes)
}

#[test]
fn catalogues_too_small_to_calibrate_probe_all_lists() {
    for items in [2, 3, 5, 9, 10, 11, 25] {
        let folder = tempfile::tempdir().unwrap();
        let drawn = Distribution { items, width: 4, clusters: 0 };
        let recipe = Recipe::parse("[index]\nlists = 2").unwrap();
        let view = drawn.publish_by(folder.path(), recipe);
        for k in [1, 2, 9] {
            let (found, probes) = recall(&view, &drawn.queries(), k, &[""], &json!({}));
            assert!(items > 9 || (found == 1.0 && probes == 2), "{k} of {items}: {found} by {probes}");
            assert!(found >= 0.9, "{k} of {items}: {found} by {probes}");
        }
    }
}

#[test]
fn requests_reach_their_recall_on_unseen_queries() {
    for drawn in [
        Distribution { items: 5_000, width: 8, clusters: 0 },
        Distribution { items: 5_000, width: 48, clusters: 40 },
        Distribution { items: 20_000, width: 16, clusters: 300 },
    ] {
        let folder = tempfile::tempdir().unwrap();
        let view = drawn.publish(folder.path());
        let lists = view.main().index.lists();
        for (pass_rate, filters) in FILTERS {
            for k in [10, 100] {
                let mut before = 0;
                for (target, more) in [(0.9, json!({"recall": 0.9})), (0.98, json!({}))] {
                    let (found, probes) = recall(&view, &drawn.queries(), k, filters, &more);
                    let place =
                        format!("{drawn:?}, {pass_rate} pass, k = {k}, {target}: {found} by {probes} of {lists}");
                    assert!(found >= target - 0.02, "{place}");
                    assert!(probes >= before && probes <= lists, "{place}");
                    before = probes;
                }
            }
        }
    }
}

#[test]
fn filters_anticorrelated_with_the_list_order_lose_little_recall() {
    let drawn = Distribution { items: 10_000, width: 16, clusters: 100 };
    let folder = tempfile::tempdir().unwrap();
    let rows: Vec<Vec<f32>> = (0..drawn.items as u64).map(|n| drawn.vector(n)).collect();
    let region = |row: &[f32]| i32::from(row[0] > 0.2) - i32::from(row[0] < -0.2);
    let line = |(n, row): (usize, &Vec<f32>)| {
        format!("{}\n", json!({"id": n, "attributes": {"region": region(row)}, "embedding": row}))
    };
    let items = folder.path().join("items.jsonl");
    std::fs::write(&items, rows.iter().enumerate().map(line).collect::<String>()).unwrap();
    let what = Plan::of_vectors("drawn", items);
    let version = put(folder.path(), &what).unwrap();
    let view = view(&folder.path().join(format!("drawn/{version}")));
    for (requested, from) in [(1, -1), (-1, 1), (1, 1)] {
        let queries: Vec<Vec<f32>> = drawn.queries().into_iter().filter(|q| region(q) == from).collect();
        assert!(queries.len() > 5);
        for query in queries.chunks(1) {
            let (found, _) = recall(&view, query, 20, &[format!("region:{requested}").as_str()], &json!({}));
            assert!(found >= 0.9, "region {requested} from {from}: {found}");
        }
        let (found, _) = recall(&view, &queries, 20, &[format!("region:{requested}").as_str()], &json!({}));
        assert!(found >= 0.96, "region {requested} from {from}: {found}");
    }
}

#[test]
fn curves_rise_with_target_candidates_and_rarity() {
    let drawn = Distribution { items: 3_000, width: 8, clusters: 20 };
    let folder = tempfile::tempdir().unwrap();
    let view = drawn.publish(folder.path());
    let Calibration { source, queries, targets, curves, .. } = view.main().calibration.as_ref().unwrap();
    assert_eq!((source.as_str(), *queries), ("perturbed items", 256));
    assert!(curves.iter().any(|c| c.k == 1000 && c.pass_rate == 0.5) && curves.iter().all(|c| c.k <= 1000));
    for (n, target) in targets.iter().enumerate() {
        for a in curves {
            assert!(a.low[n] <= a.recall[n] && a.low[n] >= target - 1e-5, "{a:?}");
            assert!(n == 0 || a.probes[n - 1] <= a.probes[n], "{a:?}");
            for b in curves.iter().filter(|b| b.k >= a.k && b.pass_rate <= a.pass_rate) {
                assert!(a.probes[n] <= b.probes[n], "{a:?}, {b:?}");
            }
        }
    }
    // The same items and recipe give the same bytes.
    let other = tempfile::tempdir().unwrap();
    assert_eq!(view.main().digest(), drawn.publish(other.path()).main().digest());
}

#[test]
fn a_version_without_a_calibration_serves_as_before() {
    let drawn = Distribution { items: 2_000, width: 8, clusters: 20 };
    let folder = tempfile::tempdir().unwrap();
    drop(drawn.publish(folder.path()));
    let version = folder.path().join("store/drawn/1");
    let mut manifest = Manifest::read(&version).unwrap();
    assert!(manifest.files.remove("calibration.json").is_some());
    manifest.write(&version).unwrap();
    std::fs::remove_file(version.join("calibration.json")).unwrap();
    let view = view(&version);
    let lists = view.main().index.lists();
    for (more, probes, target) in [
        (json!({}), lists.div_ceil(8), Some(0.98)),
        (json!({"recall": 0.7}), lists.div_ceil(8), Some(0.7)),
        (json!({"probes": 3}), 3, None),
    ] {
        let mut body = json!({"vector": drawn.vector(1 << 40), "explain": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let reported = retrieve(&view, &[body]).remove(0).unwrap().1.unwrap().probes.unwrap();
        assert_eq!((reported.probes, reported.target, reported.estimate), (probes, target, None), "{more}");
    }
}

#[test]
fn explain_names_the_target_and_probes_given_come_first() {
    let drawn = Distribution { items: 2_000, width: 8, clusters: 20 };
    let folder = tempfile::tempdir().unwrap();
    let view = drawn.publish(folder.path());
    let reported = |more: Value| {
        let mut body = json!({"vector": drawn.vector(1 << 40), "explain": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        retrieve(&view, &[body]).remove(0).map(|found| found.1.unwrap().probes)
    };
    let default = reported(json!({})).unwrap().unwrap();
    assert_eq!(default.target, Some(0.98));
    assert!(default.estimate.unwrap() >= 0.98);
    let low = reported(json!({"recall": 0.5})).unwrap().unwrap();
    assert!(low.probes < default.probes && low.estimate.unwrap() >= 0.5);
    let given = reported(json!({"recall": 0.5, "probes": 7})).unwrap().unwrap();
    assert_eq!((given.probes, given.target, given.estimate), (7, None, None));
    assert_eq!(reported(json!({"exact": true})).unwrap(), None);
    for wrong in [0.0, 0.49, 0.9991, 1.0, -1.0, 98.0] {
        let error = reported(json!({"recall": wrong})).unwrap_err().to_string();
        assert!(error.contains(&format!("field `recall`: got {wrong}, expected 0.5 to 0.999")), "{error}");
    }
}

#[test]
fn queries_of_a_file_are_read_or_rejected_with_the_line() {
    let drawn = Distribution { items: 600, width: 4, clusters: 0 };
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let rows: Vec<Vec<f32>> = (0..drawn.items as u64).map(|n| drawn.vector(n)).collect();
    std::fs::write(path("vectors.npy"), npy(&rows)).unwrap();
    std::fs::write(path("queries.npy"), npy(&drawn.queries())).unwrap();
    let lines: String = (0..600).map(|n| format!("{{\"id\": {n}}}\n")).collect();
    std::fs::write(path("items.jsonl"), lines).unwrap();
    let source =
        Source::Vectors { name: "drawn".into(), items: path("items.jsonl"), vectors: Some(path("vectors.npy")) };
    let what = |queries: &str| Plan { queries: Some(path(queries)), ..Plan::new(source.clone()) };
    let version = put(folder.path(), &what("queries.npy")).unwrap();
    let view = view(&folder.path().join(format!("drawn/{version}")));
    let calibration = view.main().calibration.as_ref().unwrap();
    assert_eq!((calibration.source.as_str(), calibration.queries), ("queries.npy", HELD_OUT as usize));
    for (text, expected) in [
        ("{\"vector\": [1, 2, 3, 4]}\n", ""),
        ("{\"vector\": [1, 2, 3, 4]}\n{\"vector\": [1, 2]}\n", "line 2: got 2 numbers, expected 4"),
        ("{\"vector\": [1, 2, 3, 4]}\nno\n", "line 2: body: not JSON"),
        ("{\"features\": {}}\n", "line 1: field `features`: this model has no user tower"),
        ("{\"requests\": [{\"vector\": [1, 2, 3, 4]}]}\n", "line 1: got a list of requests"),
        ("", "no queries"),
    ] {
        std::fs::write(path("queries.jsonl"), text).unwrap();
        match put(folder.path(), &what("queries.jsonl")) {
            Ok(_) => assert_eq!(expected, "", "{text}"),
            Err(e) => assert!(!expected.is_empty() && e.to_string().contains(expected), "{text}: {e}"),
        }
    }
    assert!(put(folder.path(), &what("none.npy")).is_err());
    // Of the many rows of a file some are used; the message has the row in the file.
    let mut rows = vec![vec![1.0; 4]; 600];
    rows[300][2] = f32::NAN;
    std::fs::write(path("odd.npy"), npy(&rows)).unwrap();
    let error = put(folder.path(), &what("odd.npy")).unwrap_err().to_string();
    assert!(error.contains("odd.npy: row 301: number 3: got NaN"), "{error}");
}

#[test]
fn a_version_without_queries_inherits_those_of_the_version_before() {
    let drawn = Distribution { items: 600, width: 4, clusters: 0 };
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let rows: Vec<Vec<f32>> = (0..drawn.items as u64).map(|n| drawn.vector(n)).collect();
    std::fs::write(path("vectors.npy"), npy(&rows)).unwrap();
    std::fs::write(path("queries.npy"), npy(&drawn.queries())).unwrap();
    let lines = |count| (0..count).map(|n| format!("{{\"vector\": [{n}, 1, 2, 3]}}\n")).collect::<String>();
    std::fs::write(path("queries.jsonl"), lines(40)).unwrap();
    let items: String = (0..600).map(|n| format!("{{\"id\": {n}}}\n")).collect();
    std::fs::write(path("items.jsonl"), items).unwrap();
    let calibrated = |queries: Option<&str>, shards| {
        let source =
            Source::Vectors { name: "drawn".into(), items: path("items.jsonl"), vectors: Some(path("vectors.npy")) };
        let what = Plan { queries: queries.map(path), output: output(shards), ..Plan::new(source) };
        let version = put(folder.path(), &what).unwrap();
        let whole = folder.path().join(format!("drawn/{version}"));
        let of_version = if shards.is_some() { sterling::snapshot::shard_folder(&whole, 0) } else { whole };
        let calibration = view(&of_version).main().calibration.clone().unwrap();
        (calibration.source, calibration.queries)
    };
    let reported = |source: &str, queries: usize| (source.to_owned(), queries);
    let held_out = HELD_OUT as usize;
    assert_eq!(calibrated(None, None).0, "perturbed items");
    assert_eq!(calibrated(Some("queries.npy"), None), reported("queries.npy", held_out));
    assert_eq!(calibrated(None, None), reported("queries.safetensors of version 2", held_out));
    assert_eq!(calibrated(None, Some(2)), reported("queries.safetensors of version 3", held_out));
    assert_eq!(calibrated(Some("queries.jsonl"), Some(2)), reported("queries.jsonl", 40));
    assert_eq!(calibrated(None, None), reported("queries.jsonl of version 5", 40));
    assert_eq!(calibrated(None, None), reported("queries.jsonl of version 6", 40));
}

#[test]
fn requests_of_users_with_several_queries_calibrate_and_are_inherited_through_a_new_tower() {
    let store = tempfile::tempdir().unwrap();
    let calibrated = |made: &crate::packages::Made| {
        let version = put(store.path(), &made.publication()).map_err(|e| e.to_string())?;
        let calibration = view(&store.path().join(format!("tastes/{version}"))).main().calibration.clone().unwrap();
        Ok::<_, String>((calibration.source, calibration.queries))
    };
    let made = crate::queries::package("union");
    let line = "{\"vector\": [1, 0.5, 0.75, 0.5]}\n{\"features\": {\"taste\": [0.3, -0.9, 0.3, -0.9]}}\n";
    let made = made.text("queries.jsonl", line);
    assert_eq!(calibrated(&made).unwrap(), ("queries.jsonl".to_owned(), 4), "two queries of each line");
    std::fs::remove_file(made.path("queries.jsonl")).unwrap();
    assert_eq!(calibrated(&made).unwrap(), ("queries.jsonl of version 1".to_owned(), 4));
    // Features that the requests do not have.
    let model = std::fs::read_to_string(made.path("model.toml")).unwrap();
    let renamed = crate::queries::package("union");
    let other = model.replacen("name = \"taste\"\n", "name = \"taste\"\ncolumn = \"liking\"\n", 1);
    assert_ne!(other, model);
    let renamed = renamed.text("model.toml", &other);
    assert_eq!(calibrated(&renamed).unwrap().0, "perturbed items");
    let made = made.text("queries.jsonl", "{\"vector\": [1, 0.5, 0.75]}\n");
    let refused = calibrated(&made).unwrap_err();
    assert!(refused.contains("line 1: field `vector`: got 3 numbers, expected 4: 2 queries of 2"), "{refused}");
}

#[test]
fn a_version_is_calibrated_again_and_keeps_its_digest() {
    let drawn = Distribution { items: 2_000, width: 8, clusters: 20 };
    let folder = tempfile::tempdir().unwrap();
    let before = drawn.publish(folder.path());
    let (store, queries) = (folder.path().join("store"), folder.path().join("queries.npy"));
    // Uniform directions instead of clusters: such queries need more lists.
    let from_all_sides = Distribution { clusters: 0, ..drawn };
    std::fs::write(&queries, npy(&from_all_sides.queries())).unwrap();
    let (store_path, queries) = (store.to_str().unwrap(), queries.to_str().unwrap());
    let (code, said, errors) = run(&["calibrate", "drawn", "--store", store_path, "--queries", queries]);
    assert_eq!(code, 0, "{errors}");
    let folder = store.join("drawn/1");
    let after = view(&folder);
    let (old, new) = (before.main().calibration.as_ref().unwrap(), after.main().calibration.as_ref().unwrap());
    assert_eq!(after.main().digest(), before.main().digest());
    assert_eq!((new.source.as_str(), new.queries), ("queries.npy", HELD_OUT as usize));
    assert!(said.contains(&new.digest().unwrap()) && new.digest().unwrap() != old.digest().unwrap(), "{said}");
    for (a, b) in old.curves.iter().zip(&new.curves) {
        assert!(b.probes.iter().sum::<usize>() > a.probes.iter().sum(), "{a:?}, {b:?}");
    }
    // A recalibration that is damaged, or belongs to another version, is rejected with the reason.
    let path = folder.join("recalibration.json");
    let good = std::fs::read_to_string(&path).unwrap();
    let digest = before.main().digest().to_owned();
    for (from, to, expected) in [
        (digest.as_str(), "0123456789abcdef", "it belongs to version digest 0123456789abcdef"),
        ("\"queries\":90", "\"queries\":91", "expected"),
        ("\"probes\":[", "\"probes\":[0,", "expected"),
        ("{", "", "recalibration.json"),
    ] {
        let broken = good.replacen(from, to, 1);
        assert_ne!(broken, good);
        std::fs::write(&path, broken).unwrap();
        let error = Snapshot::load(&folder, &Placement::whole()).expect_err(to).to_string();
        assert!(error.contains("recalibration.json") && error.contains(expected), "{to}: {error}");
    }
    std::fs::remove_file(&path).unwrap();
    assert_eq!(view(&folder).main().calibration.as_ref().unwrap(), old);
    for (arguments, expected) in [
        (["calibrate", "other", "--store", store_path], "model `other`"),
        (["calibrate", "drawn", "--version=2", "--store"], "value is required"),
    ] {
        let (code, _, errors) = run(&arguments);
        assert!(code == 2 && errors.contains(expected), "{errors}");
    }
}

#[test]
fn merges_calibrate_with_the_queries_of_the_last_recalibration_alone() {
    let drawn = Distribution { items: 1_000, width: 8, clusters: 20 };
    let folder = tempfile::tempdir().unwrap();
    drawn.publish(folder.path());
    let (store, queries) = (folder.path().join("store"), folder.path().join("queries.npy"));
    std::fs::write(&queries, npy(&drawn.queries())).unwrap();
    let again = ["calibrate", "drawn", "--version=1", "--store", store.to_str().unwrap()];
    let with_queries = [&again[..], &["--queries", queries.to_str().unwrap()]].concat();
    for (arguments, source) in [(&with_queries[..], "queries.npy"), (&again[..], "perturbed items")] {
        let (code, _, errors) = run(arguments);
        assert_eq!(code, 0, "{errors}");
        let before = view(&store.join("drawn/1"));
        let merged = merge(&Store::new(&store), &before, &|_| ()).unwrap();
        let merged = view(&store.join(format!("drawn/{}", merged.version)));
        assert_eq!(merged.main().calibration.as_ref().unwrap().source, source);
    }
}

/// Returns an item of one of a few kinds; those of a new kind vary in dimensions where others hardly do.
fn of_kind(n: u64, is_new: bool, is_unit: bool) -> Vec<f32> {
    const WIDTH: u64 = 16;
    let (kinds, of_kinds) = if is_new { (5, 1 << 51) } else { (60, 1 << 52) };
    let number = |d: u64| {
        let number = bell(random(n ^ 0xdef) % kinds * 1000 + d + of_kinds) + 0.3 * bell(n * 1000 + d + of_kinds);
        if (d < WIDTH / 2) == is_new { number * 0.1 } else { number }
    };
    let vector: Vec<f32> = (0..WIDTH).map(number).collect();
    let length = if is_unit { vector.iter().map(|x| x * x).sum::<f32>().sqrt() } else { 1.0 };
    vector.iter().map(|x| x / length).collect()
}

#[test]
fn items_of_a_new_kind_are_found_before_and_after_a_merge() {
    for (is_unit, recipe) in [(false, ""), (true, ""), (false, "[index]\nfirst_pass = { codes = \"pq4\" }")] {
        let folder = tempfile::tempdir().unwrap();
        let rows: Vec<Vec<f32>> = (0..4_000).map(|n| of_kind(n, false, is_unit)).collect();
        let main = published(folder.path(), &rows, Recipe::parse(recipe).unwrap());
        let queries = |is_new| (0..60).map(|n| of_kind((1 << 40) + n, is_new, is_unit)).collect::<Vec<_>>();
        let found = |view: &Arc<View>, is_new: bool, filters: &[&str]| {
            recall(view, &queries(is_new), 20, filters, &json!({})).0
        };
        let (old, old_filtered) = (found(&main, false, &[""]), found(&main, false, &["half:1", "half:0"]));
        let mut fresh = Fresh::new(main.main().clone(), 0);
        let mut put = 0;
        for until in [60, 300, 1500, 4500] {
            // One in three is like the existing items.
            let update = |n: u64| {
                let attributes =
                    attributes(n).map(|(name, value)| (name.into(), Attribute::Integers(vec![value as i64])));
                let vector = Some(of_kind(10_000 + n, !n.is_multiple_of(3), is_unit));
                Update::Put(Put { id: 10_000 + n as i64, vector, attributes: attributes.into(), dense: Vec::new() })
            };
            let updates: Vec<Update> = (put..until).map(update).collect();
            assert!(fresh.apply(&updates).unwrap().is_empty());
            put = until;
            // As they arrive, and after segments were merged.
            for is_joined in [false, true] {
                if is_joined {
                    fresh.caught_up().unwrap();
                }
                let view = Arc::new(fresh.view().unwrap());
                let reported = format!("unit {is_unit}, `{recipe}`, {until} items, joined {is_joined}");
                let (strays, new) = (view.strays() as u64, until * 2 / 3);
                assert!(
                    strays * 20 >= new * 19 && strays < new + until / 20,
                    "{reported}: {strays} strays of {new} new"
                );
                for filters in [&[""][..], &["half:1", "half:0"]] {
                    let of_new = found(&view, true, filters);
                    assert!(of_new >= 0.96, "{reported}: {of_new} of the new kind, {filters:?}");
                }
                let now = found(&view, false, &[""]);
                assert!(now >= old - 0.01, "{reported}: {now} of those before, {old} then");
                let now = found(&view, false, &["half:1", "half:0"]);
                assert!(now >= old_filtered - 0.02, "{reported}: {now} of those before, {old_filtered} then");
            }
        }
        let store = Store::new(folder.path().join("store"));
        let merged = merge(&store, &fresh.view().unwrap(), &|_| ()).unwrap();
        let merged = view(&folder.path().join(format!("store/drawn/{}", merged.version)));
        for filters in [&[""][..], &["half:1", "half:0"]] {
            let of_new = found(&merged, true, filters);
            assert!(of_new >= 0.96, "unit {is_unit}, `{recipe}`, merged: {of_new} of the new kind, {filters:?}");
        }
        assert!(found(&merged, false, &[""]) >= old - 0.02, "unit {is_unit}, `{recipe}`, merged");
    }
}

/// A kind of few items with lower recall than all others: these lie in tight clusters, it lies in none.
#[test]
fn a_kind_of_few_items_is_found_in_each_version_that_merges_make() {
    let of_few = |n: u64| -> Vec<f32> {
        let number = |d: u64| if d < 8 { 0.1 * bell(n * 1000 + d + (1 << 53)) } else { bell(n * 1000 + d + (1 << 53)) };
        (0..16).map(number).collect()
    };
    let folder = tempfile::tempdir().unwrap();
    let rows: Vec<Vec<f32>> = (0..6_000).map(|n| of_kind(n, false, false)).collect();
    let mut now = published(folder.path(), &rows, Recipe::default());
    let requested: Vec<Vec<f32>> = (0..100).map(|n| of_few((1 << 40) + n)).collect();
    let store = Store::new(folder.path().join("store"));
    let put = |id: u64, vector: Vec<f32>| {
        let attributes = attributes(id).map(|(name, value)| (name.into(), Attribute::Integers(vec![value as i64])));
        Update::Put(Put { id: id as i64, vector: Some(vector), attributes: attributes.into(), dense: Vec::new() })
    };
    // First few of that kind, then others like the existing ones, which form no stratum.
    let merges: [Vec<Update>; 3] = [
        (10_000..10_250).map(|n| put(n, of_few(n))).collect(),
        (20_000..20_100).map(|n| put(n, of_kind(n, false, false))).collect(),
        (20_100..20_200).map(|n| put(n, of_kind(n, false, false))).collect(),
    ];
    for (n, updates) in merges.iter().enumerate() {
        let mut fresh = Fresh::new(now.main().clone(), 0);
        assert!(fresh.apply(updates).unwrap().is_empty());
        let merged = merge(&store, &fresh.view().unwrap(), &|_| ()).unwrap();
        now = view(&folder.path().join(format!("store/drawn/{}", merged.version)));
        assert!(now.main().manifest.files.contains_key("strata.safetensors"), "merge {n}");
        let (found, probes) = recall(&now, &requested, 20, &[""], &json!({}));
        assert!(found >= 0.96, "merge {n}: {found} of the kind of few items in {probes} lists of {}", merged.lists);
    }
    // A calibration without queries keeps them too.
    let version = store.versions("drawn").unwrap().into_iter().max().unwrap();
    let again = sterling::publish::calibrate::again(&store, "drawn", version, None, &|_, _| ()).unwrap();
    assert_eq!(again.calibration, *now.main().calibration.as_ref().unwrap());
}

#[test]
fn recorded_queries_calibrate() {
    let drawn = Distribution { items: 600, width: 4, clusters: 0 };
    let folder = tempfile::tempdir().unwrap();
    drop(drawn.publish(folder.path()));
    let store = folder.path().join("store");
    let store = store.to_str().unwrap();
    let ask = |server: &Server| {
        for vector in drawn.queries() {
            server.ask("/v1/models/drawn:retrieve", json!({"vector": vector}));
        }
        server.get("/v1/models/drawn/queries")
    };
    let start = |recorded: &str| {
        let arguments = ["serve", "--listen", "127.0.0.1:0", "--store", store];
        let server = Server::spawn(sterling().args(arguments).env("STERLING_RECORDED_QUERIES", recorded));
        server.wait_ready();
        server
    };
    let (code, said) = ask(&start("0"));
    assert!(code == 404 && said.contains("recorded_queries"), "{code}: {said}");
    let server = start("32");
    let (code, lines) = ask(&server);
    assert_eq!((code, lines.lines().count()), (200, 32));
    let requested = drawn.queries();
    let numbers = |line: &str| -> Vec<f32> {
        let line: Value = serde_json::from_str(line).unwrap();
        line["vector"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
    };
    let recorded: Vec<Vec<f32>> = lines.lines().map(numbers).collect();
    let known = recorded.iter().filter(|query| requested.contains(query)).count();
    // Before it was ready, the version answered with one of its own items.
    assert!(known >= 31, "{known} of the recorded queries were sent");
    assert!(recorded.iter().skip(1).any(|query| !requested[..32].contains(query)), "none of the later ones was kept");
    let path = folder.path().join("recorded.jsonl");
    std::fs::write(&path, lines).unwrap();
    let before = server.get_json("/v1/models/drawn");
    let (code, said, errors) =
        run(&["calibrate", "drawn", "--store", store, "--queries", path.to_str().unwrap(), "--version", "1"]);
    assert_eq!(code, 0, "{errors}");
    // The server adopts it automatically, and the version keeps its digest.
    let current = || server.get_json("/v1/models/drawn");
    until("the calibration", || current()["calibration"]["digest"] != before["calibration"]["digest"]);
    let now = current();
    assert_eq!(now["digest"], before["digest"]);
    assert_eq!(now["calibration"]["source"], "recorded.jsonl");
    assert!(said.contains(now["calibration"]["digest"].as_str().unwrap()), "{said}");
}
