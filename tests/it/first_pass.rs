//! Versions with first-pass codes: same answers as without codes, from fewer bytes, under all operations.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use sterling::index::ivf::{CodeKind, FirstPass, Rescore};
use sterling::publish::merge;
use sterling::serving::view::View;
use sterling::snapshot::{Calibration, Manifest, Placement, RECIPE_FILE, Recipe, Snapshot, Store};
use sterling::storage::files::{Checksum, Tensors};

use crate::recall::{Distribution, FILTERS, recall, view};
use crate::support::{Server, ids, put, retrieve, run, vectors};
use crate::{faiss, shards};

fn coded() -> Recipe {
    coded_by(CodeKind::Pq4)
}

fn coded_by(codes: CodeKind) -> Recipe {
    let mut recipe = Recipe::default();
    recipe.index.first_pass = FirstPass { codes, subspaces: 0 };
    recipe
}

/// Returns a recipe without codes and with the same number of lists.
fn uncoded(coded: &View) -> Recipe {
    let mut recipe = Recipe::default();
    recipe.index.lists = coded.main().index.lists();
    recipe
}

fn calibration(view: &Arc<View>) -> &Calibration {
    view.main().calibration.as_ref().unwrap()
}

/// Returns the number of selected items for a number of candidates, for each recall target.
fn selected(calibration: &Calibration, k: usize) -> &[usize] {
    let curve = calibration.curves.iter().find(|curve| curve.k == k && curve.pass_rate == 1.0).unwrap();
    curve.codes.as_ref().map_or(&[], |codes| &codes.selected)
}

/// Returns the definition of a version's codes: the codebook, or the signs of the rotation.
fn meaning(folder: &Path) -> Vec<u8> {
    let tensors = Tensors::open(&folder.join("index.safetensors")).unwrap();
    match tensors.has("first_pass_values") {
        true => tensors.get::<f32>("first_pass_values", 2).unwrap().0.iter().flat_map(|x| x.to_le_bytes()).collect(),
        false => tensors.get::<u64>("first_pass_signs", 2).unwrap().0.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

/// Returns the results of a request, and the bytes of codes that it read.
fn asked(view: &Arc<View>, mut body: Value) -> (Vec<i64>, u64) {
    body["explain"] = json!(true);
    let (found, explain) = retrieve(view, &[body]).remove(0).unwrap();
    let scan = explain.unwrap().steps.into_iter().find(|step| step.name == "scan").unwrap();
    (found.ids.iter().map(|id| id.0).collect(), scan.bytes)
}

#[test]
fn requests_reach_their_recall_by_codes() {
    for (drawn, codes) in [
        (Distribution { items: 3_000, width: 48, clusters: 40 }, CodeKind::Pq4),
        (Distribution { items: 4_000, width: 20, clusters: 0 }, CodeKind::Pq4),
        (Distribution { items: 3_000, width: 320, clusters: 40 }, CodeKind::Rabitq),
    ] {
        let (with, without) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (of_codes, of_rows) =
            (drawn.publish_by(with.path(), coded_by(codes)), drawn.publish_by(without.path(), Recipe::default()));
        assert!(selected(calibration(&of_codes), 10).iter().any(|n| *n > 0), "{:?}", calibration(&of_codes).curves[0]);
        assert!(selected(calibration(&of_rows), 10).is_empty());
        for (k, target) in [(10, 0.9), (10, 0.98), (100, 0.9), (100, 0.98)] {
            let more = json!({"recall": target});
            let (found, probes) = recall(&of_codes, &drawn.queries(), k, &[""], &more);
            assert!(found >= target - 0.02, "{drawn:?} k = {k}, {target}: {found} by {probes} lists");
        }
        // Filters pass the same items as without codes, and exactly these are searched.
        for (pass_rate, filters) in &FILTERS[1..] {
            for (k, target) in [(10, 0.9), (10, 0.98), (100, 0.95)] {
                let (found, probes) = recall(&of_codes, &drawn.queries(), k, filters, &json!({"recall": target}));
                let reported = format!("{drawn:?} {pass_rate} k = {k}, {target}: {found} by {probes} lists");
                assert!(found >= target - 0.02, "{reported}");
            }
            let query = drawn.vector(1 << 41);
            let of = |view: &Arc<View>, more: Value| {
                let mut body = json!({"vector": query, "k": drawn.items, "filter": filters[0]});
                body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
                retrieve(view, &[body]).remove(0).unwrap().0.ids
            };
            let eligible: HashSet<_> = of(&of_rows, json!({"exact": true})).into_iter().collect();
            for more in [json!({"k": 30, "probes": 20}), json!({"k": 30}), json!({"k": 300, "recall": 0.9})] {
                let found = of(&of_codes, more);
                assert!(!found.is_empty() && found.iter().all(|id| eligible.contains(id)), "{pass_rate}");
            }
        }
    }
}

#[test]
fn codes_are_scanned_if_faster_and_rows_otherwise() {
    let drawn = Distribution { items: 8_000, width: 64, clusters: 60 };
    let folder = tempfile::tempdir().unwrap();
    let view = drawn.publish_by(folder.path(), coded());
    let without = tempfile::tempdir().unwrap();
    let plain = drawn.publish_by(without.path(), uncoded(&view));
    let query = drawn.vector(1 << 40);
    let of = |view: &Arc<View>, k: usize, more: Value| {
        let mut body = json!({"vector": query, "k": k, "probes": 100});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        asked(view, body).1
    };
    // 64 bytes and a scale per item of int8 rows, 16 for its codes, and the f16 rows of the rescored items; plus bitmaps.
    for filter in ["", "NOT hundredth:1", "half:1"] {
        let (by_codes, by_rows) = (of(&view, 10, json!({"filter": filter})), of(&plain, 10, json!({"filter": filter})));
        assert!(by_codes * 2 < by_rows, "`{filter}`: {by_codes} against {by_rows}");
        assert_eq!(of(&view, 10, json!({"filter": filter, "recall": 0.98})), by_codes);
    }
    // If few items pass, their rows are read directly as before.
    let rare = json!({"filter": "hundredth:1"});
    assert_eq!(of(&view, 10, rare.clone()), of(&plain, 10, rare));
    // Beyond the range that the calibration measured with codes, only rows are used.
    assert_eq!(of(&view, 5000, json!({})), of(&plain, 5000, json!({})));
    let explained = retrieve(&view, &[json!({"vector": query, "k": 10, "exact": true})]);
    let exact: HashSet<i64> = explained[0].as_ref().unwrap().0.ids.iter().map(|id| id.0).collect();
    let found = asked(&view, json!({"vector": query, "k": 10})).0;
    assert!(found.iter().filter(|id| exact.contains(id)).count() >= 8);
}

#[test]
fn indexes_without_codes_are_searched_as_before() {
    for (drawn, codes) in [
        (Distribution { items: 6_000, width: 48, clusters: 40 }, CodeKind::Pq4),
        (Distribution { items: 4_000, width: 320, clusters: 0 }, CodeKind::Rabitq),
    ] {
        let (with, without) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let of_codes = drawn.publish_by(with.path(), coded_by(codes));
        let of_rows = drawn.publish_by(without.path(), uncoded(&of_codes));
        let mut curves = calibration(&of_codes).curves.clone();
        let takes_more = |curve: &sterling::snapshot::RecallCurve| {
            let codes = curve.codes.as_ref().map(|codes| codes.probes.iter().zip(&curve.probes));
            codes.into_iter().flatten().all(|(by_codes, by_rows)| *by_codes == 0 || by_codes >= by_rows)
        };
        assert!(curves.iter().all(takes_more), "the loss of codes is compensated by lists");
        curves.iter_mut().for_each(|curve| curve.codes = None);
        assert_eq!(curves, calibration(&of_rows).curves);
        // Nothing else of such a request differs: its lists, their items, the bytes read and the results.
        let of = |view: &Arc<View>, body: &Value| {
            let (found, explain) = retrieve(view, std::slice::from_ref(body)).remove(0).unwrap();
            let explain = explain.unwrap();
            let read: Vec<u64> = explain.steps.iter().map(|step| step.bytes).collect();
            (found.ids, (explain.probed, explain.scanned, explain.survivors, explain.candidates, read))
        };
        let mut took_none = 0;
        for (n, k) in [10, 100, 999, 1000, 2500].into_iter().enumerate() {
            for target in [0.5, 0.8, 0.9, 0.98, 0.999] {
                for filter in ["", "half:1", "tenth:1", "hundredth:1"] {
                    let query = drawn.vector((1 << 42) + n as u64);
                    let body = json!({"vector": query, "k": k, "recall": target, "filter": filter, "explain": true});
                    let (coded, plain) = (of(&of_codes, &body), of(&of_rows, &body));
                    let pass_rate = match filter {
                        "" => 1.0,
                        _ => retrieve(&of_rows, std::slice::from_ref(&body)).remove(0).unwrap().1.unwrap().pass_rate,
                    };
                    let wanted = sterling::snapshot::SearchGoal { candidates: k, pass_rate, recall: target };
                    let index = &of_codes.main().index;
                    let chosen = calibration(&of_codes).choose(wanted, index.items(), index.lists());
                    if chosen.by_codes.is_none() {
                        took_none += 1;
                        assert_eq!(coded, plain, "k = {k}, {target}, `{filter}`");
                    }
                }
            }
        }
        assert!(took_none > 20, "{took_none} took no codes");
    }
}

#[test]
fn shards_of_coded_versions_answer_like_the_complete_version() {
    let store = tempfile::tempdir().unwrap();
    let mut what = shards::catalogue(store.path(), Rescore::F16);
    what.recipe.index.first_pass = coded().index.first_pass;
    let whole = shards::whole(store.path(), &what);
    let chosen = selected(calibration(&whole), 10).to_vec();
    assert!(chosen.iter().any(|n| *n > 0), "{chosen:?}");
    let mut bodies = Vec::new();
    for vector in [[1.0, 0.5, -0.25, 0.1], [0.0, -1.0, 0.5, 0.0], [-0.3, 0.2, 0.9, -0.7]] {
        for (k, candidates, probes) in [(1, 1, 1), (5, 10, 3), (10, 10, 12), (37, 100, 5), (700, 700, 12)] {
            bodies.push(json!({"vector": vector, "k": k, "candidates": candidates, "probes": probes}));
            bodies.push(json!({"vector": vector, "k": k, "candidates": candidates, "recall": 0.9}));
        }
        bodies.push(json!({"vector": vector, "k": 10, "probes": 6, "exclude": [-9000, -8993, -8986]}));
        bodies.push(json!({"vector": vector, "k": 20, "candidates": 90, "probes": 12, "filter": "colour:red"}));
    }
    for count in [1, 2, 5] {
        let views = shards::cut(store.path(), &what, count);
        assert!(views.iter().all(|view| view.main().index.has_first_pass()));
        shards::check(&whole, &views, &bodies);
    }
}

#[test]
fn updates_are_found_with_codes_and_merge_to_the_same_values() {
    updated_and_merged(CodeKind::Pq4, 16);
    updated_and_merged(CodeKind::Rabitq, 256);
}

fn updated_and_merged(codes: CodeKind, width: usize) {
    let drawn = Distribution { items: 3_000, width, clusters: 30 };
    let folder = tempfile::tempdir().unwrap();
    let line =
        |n: u64| json!({"id": n, "embedding": drawn.vector(n), "attributes": {"kind": n % 3}}).to_string() + "\n";
    let mut what = vectors(folder.path(), &(0..3_000).map(line).collect::<String>());
    what.recipe = coded_by(codes);
    let store = folder.path().join("store");
    put(&store, &what).unwrap();
    let updates = folder.path().join("updates").display().to_string();
    let server = Server::start_with(&store, &["--updates", &updates]);
    let of = |first: u64| {
        let item = |n: u64| json!({"id": n, "embedding": drawn.vector(n), "attributes": {"kind": 7}});
        json!({"items": (first..first + 200).map(item).collect::<Vec<Value>>()})
    };
    let call = "/v1/models/vectors/items";
    server.ask(&format!("{call}:upsert"), of(10_000));
    server.ask(&format!("{call}:delete"), json!({"ids": (0..200).collect::<Vec<u64>>()}));
    let check = |version: u64| {
        let (mut hits, mut fresh) = (0, 0);
        for query in
            drawn.queries().iter().take(40).chain((0..20).map(|n| drawn.vector(10_000 + n)).collect::<Vec<_>>().iter())
        {
            let ask = |more: Value| {
                let mut body = json!({"vector": query, "k": 10});
                body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
                let answer = server.ask("/v1/models/vectors:retrieve?min_position=400", body);
                assert_eq!(answer["version"], version);
                ids(&answer)
            };
            let (found, exact) = (ask(json!({})), ask(json!({"exact": true})));
            assert!(found.iter().all(|id| *id >= 200), "a deleted one was found: {found:?}");
            hits += found.iter().filter(|id| exact.contains(id)).count();
            fresh += found.iter().filter(|id| **id >= 10_000).count();
            assert!(ask(json!({"filter": "kind:7"})).iter().all(|id| *id >= 10_000));
        }
        assert!(hits >= 570 && fresh > 30, "version {version}: {hits} of 600, {fresh} of the new ones");
    };
    check(1);
    let merged = server.ask(&format!("{call}:merge"), "");
    assert_eq!((merged["version"].as_u64(), merged["items"].as_u64()), (Some(2), Some(3_000)));
    check(2);
    let folder_of = |version: u64| store.join(format!("vectors/{version}"));
    assert_eq!(meaning(&folder_of(1)), meaning(&folder_of(2)), "lists go on, and so does what the codes mean");
    let merged = view(&folder_of(2));
    assert!(selected(calibration(&merged), 10).iter().any(|n| *n > 0));
    assert_eq!(server.stop(), Some(0));
}

#[test]
fn merges_keep_the_lists_of_versions_that_had_twice_as_many() {
    // Versions with codes of this many items get 141 lists, and got about 283 before.
    let drawn = Distribution { items: 5_030, width: 16, clusters: 40 };
    for (lists, is_trained) in [(300, false), (600, true)] {
        let folder = tempfile::tempdir().unwrap();
        let mut recipe = coded();
        recipe.index.lists = lists;
        drop(drawn.publish_by(folder.path(), recipe.clone()));
        // As if no number of lists had been requested.
        let store = folder.path().join("store");
        let version = store.join("drawn/1");
        recipe.index.lists = 0;
        let text = recipe.to_toml().unwrap();
        std::fs::write(version.join(RECIPE_FILE), &text).unwrap();
        let mut manifest = Manifest::read(&version).unwrap();
        manifest.files.insert(RECIPE_FILE.into(), Checksum::of(text.as_bytes()));
        manifest.write(&version).unwrap();
        let merged = merge(&Store::new(&store), &view(&version), &|_| ()).unwrap();
        // Empty lists are left out.
        let expected = if is_trained { 120..=141 } else { 283..=lists };
        assert!(expected.contains(&merged.lists) && merged.is_trained == is_trained, "from {lists}: {merged:?}");
    }
}

#[test]
fn lists_of_faiss_get_codes_too() {
    for index in ["flat_ip.index", "sq8_residual_l2.index"] {
        let folder = tempfile::tempdir().unwrap();
        put(folder.path(), &faiss::import(&faiss::golden(index), coded())).unwrap();
        let view = view(&folder.path().join("imported/1"));
        assert!(view.main().index.has_first_pass());
        // Queries like those of the calibration: items plus some noise.
        let near = |(n, slot)| {
            let mut row = vec![0.0; 24];
            view.main().index.row(slot, &mut row);
            let other = Distribution { items: 0, width: 24, clusters: 0 }.vector(n);
            row.iter_mut().zip(other).for_each(|(x, other)| *x += 0.1 * other);
            row
        };
        let slots: Vec<_> = view.main().index.filled_slots().step_by(9).collect();
        let queries: Vec<Vec<f32>> = (0..).zip(slots).map(near).collect();
        let (found, _) = recall(&view, &queries, 5, &[""], &json!({}));
        assert!(found >= 0.9, "{index}: {found}");
    }
}

#[test]
fn versions_are_complete_or_rejected() {
    let drawn = Distribution { items: 2_000, width: 16, clusters: 20 };
    let folder = tempfile::tempdir().unwrap();
    let view = drawn.publish_by(folder.path(), coded());
    let version = folder.path().join("store/drawn/1");
    let loaded = || Snapshot::load(&version, &Placement::whole());
    let (_, text, _) = run(&["inspect", version.to_str().unwrap()]);
    assert!(text.contains("first_pass_codes") && text.contains("first_pass_values"), "{text}");
    // A calibration that selects by codes belongs to an index with codes.
    let other = tempfile::tempdir().unwrap();
    drop(drawn.publish_by(other.path(), Recipe::default()));
    let mut manifest = Manifest::read(&version).unwrap();
    let others = Manifest::read(&other.path().join("store/drawn/1")).unwrap();
    std::fs::copy(other.path().join("store/drawn/1/index.safetensors"), version.join("index.safetensors")).unwrap();
    assert!(loaded().unwrap_err().to_string().contains("index.safetensors"), "a file of another version");
    manifest.files.insert("index.safetensors".into(), others.files["index.safetensors"].clone());
    manifest.write(&version).unwrap();
    let error = loaded().unwrap_err().to_string();
    assert!(error.contains("selects by first-pass codes"), "{error}");
    drop(view);
}
