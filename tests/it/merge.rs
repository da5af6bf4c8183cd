//! Merges: updates become part of a version while requests continue, and resources of old versions are released.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use axum::body::{Body, to_bytes};
use axum::http::Request;
use serde_json::{Value, json};
use sterling::error::Kind;
use sterling::items::InvalidItem;
use sterling::journal::{Journal, Log, LogOptions, Logs, Topic};
use sterling::publish::compact::{Compactor, release};
use sterling::publish::{Output, Plan, merge};
use sterling::request::VersionSelector;
use sterling::server::http;
use sterling::serving::engine::{self, Engine, Passes};
use sterling::serving::fresh::{CallAnswer, Put, Update, UpdateRejection};
use sterling::serving::fresh::{MergeWanted, Merged, Merges, ModelUpdates, UpdateFeeds, Updating};
use sterling::serving::registry::{Options, Registry, Snapshots};
use sterling::serving::view::Attribute;
use sterling::snapshot::{Manifest, Snapshot, Store};
use tower::ServiceExt as _;

use crate::support::{Server, ids, put, run, until, vectors};

const ITEMS: &str = "/v1/models/vectors/items";
const RETRIEVE: &str = "/v1/models/vectors:retrieve";

fn line(id: i64, n: i64) -> String {
    format!("{{\"id\": {id}, \"embedding\": [{id}, 1], \"attributes\": {{\"n\": {n}, \"lang\": [\"en\"]}}}}\n")
}

fn published(folder: &Path, count: i64) {
    let lines: String = (0..count).map(|id| line(id, 0)).collect();
    put(&folder.join("store"), &vectors(folder, &lines)).unwrap();
}

fn serve(folder: &Path, share: &str) -> Server {
    let mut command = crate::support::sterling();
    let command = command.env("STERLING_HTTP__DRAIN_MS", "0").env("STERLING_MERGE__SHARE", share);
    let (store, updates) = (folder.join("store"), folder.join("updates"));
    let server = Server::spawn(
        command.args(["serve", "--listen", "127.0.0.1:0", "--store"]).arg(store).arg("--updates").arg(updates),
    );
    server.wait_ready();
    server
}

/// Returns all items by id, at a position or later.
fn state(server: &Server, position: u64) -> (Value, Vec<(i64, i64)>) {
    let body = json!({"vector": [0, 1], "k": 5000, "exact": true, "columns": ["n"]});
    let answer = server.ask(&format!("{RETRIEVE}?min_position={position}"), body);
    let n = |item: &Value| (item["id"].as_i64().unwrap(), item["columns"]["n"].as_i64().unwrap_or(-1));
    let mut items: Vec<(i64, i64)> = answer["items"].as_array().unwrap().iter().map(n).collect();
    items.sort_unstable();
    (answer, items)
}

fn position(server: &Server) -> Value {
    server.get_json(&format!("{ITEMS}:position"))
}

#[test]
fn a_requested_merge_replaces_the_version_under_load() {
    let folder = tempfile::tempdir().unwrap();
    published(folder.path(), 50);
    let server = Arc::new(serve(folder.path(), "0"));
    server.ask(&format!("{ITEMS}:delete"), json!({"ids": [3, 4]}));
    let new: Vec<Value> = (60..70).map(|id| json!({"id": id, "embedding": [id, 1], "attributes": {"n": 7}})).collect();
    server.ask(&format!("{ITEMS}:upsert"), json!({"items": new}));
    server.ask(&format!("{ITEMS}:upsert"), json!({"items": [{"id": 5, "set": {"lang": "xx"}}]}));
    let (_, before) = state(&server, 13);
    assert_eq!(before.len(), 58);
    // Requests during the merge: none fails, all see the same items, and positions never decrease.
    let (stop, asker) = (Arc::new(AtomicBool::new(false)), server.clone());
    let (stopped, expected) = (stop.clone(), before.clone());
    let asking = std::thread::spawn(move || {
        let (mut requested, mut last) = (0, 0);
        while !stopped.load(Ordering::Relaxed) {
            let (answer, items) = state(&asker, 0);
            assert_eq!(items, expected);
            let position = answer["position"].as_u64().unwrap();
            assert!(position >= last);
            (requested, last) = (requested + 1, position);
        }
        requested
    });
    let merged = server.ask(&format!("{ITEMS}:merge"), "");
    assert_eq!(merged, json!({"model": "vectors", "version": 2, "position": 13, "items": 58}));
    stop.store(true, Ordering::Relaxed);
    assert!(asking.join().unwrap() > 0);
    let now = position(&server);
    let reported = |name: &str| now[name].as_u64().unwrap();
    assert_eq!((reported("version"), reported("position"), reported("fresh_items"), reported("items")), (2, 13, 0, 58));
    let of_xx = server.ask(RETRIEVE, json!({"vector": [0, 1], "filter": "lang:xx"}));
    assert_eq!(ids(&of_xx), [5]);
    // Updates continue, and the previous version still applies them.
    server.ask(&format!("{ITEMS}:upsert"), json!({"items": [{"id": 70, "embedding": [70, 1]}]}));
    assert_eq!(state(&server, 14).1.len(), 59);
    server.ask("/v1/models/vectors/versions/1:activate", json!({}));
    let (answer, items) = state(&server, 14);
    assert_eq!((answer["version"].as_u64(), items.len()), (Some(1), 59));
    // Merges the active version by the command line.
    let (code, out, err) = run(&["compact", "vectors", "--server", &format!("http://{}", server.address)]);
    assert_eq!((code, out.trim()), (0, "merged vectors version 3: 59 items, updates up to position 14"), "{err}");
    let (_, last) = state(&server, 14);
    // Reloaded, the merged version has the same items; later updates are replayed.
    server.ask(&format!("{ITEMS}:delete"), json!({"ids": [70]}));
    let Ok(server) = Arc::try_unwrap(server) else { panic!("requests continue") };
    assert_eq!(server.stop(), Some(0));
    let server = serve(folder.path(), "0");
    let (answer, items) = state(&server, 15);
    assert_eq!((answer["version"].as_u64(), &items[..]), (Some(3), &last[..58]));
    // Without a server the command line merges; with one, it reports that another process has the journal.
    let updates = folder.path().join("updates").display().to_string();
    let store = folder.path().join("store").display().to_string();
    let alone = ["compact", "vectors", "--updates", &updates, "--store", &store];
    let (code, _, err) = run(&alone);
    assert!(code != 0 && err.contains("another process writes this journal"), "{err}");
    // The command waits for a server that is shutting down.
    server.signal("TERM");
    let (code, out, err) = run(&alone);
    server.wait();
    assert_eq!((code, out.trim()), (0, "merged vectors version 4: 58 items, updates up to position 15"), "{err}");
    assert!(!folder.path().join("store/vectors/2").exists(), "an unused merged version is deleted");
    assert!(folder.path().join("store/vectors/1").exists(), "published versions stay");
    let server = serve(folder.path(), "0");
    assert_eq!(state(&server, 15).1, last[..58]);
}

#[test]
fn a_merged_version_satisfies_the_desired_version_of_the_store() {
    let folder = tempfile::tempdir().unwrap();
    published(folder.path(), 50);
    let server = serve(folder.path(), "0");
    let desired = || {
        let reported = server.get_json("/v1/models/vectors/versions");
        let active = reported["versions"].as_array().unwrap().iter().find(|version| version["active"] == true).cloned();
        (
            active.unwrap()["version"].as_u64().unwrap(),
            reported["desired"]["version"].as_u64(),
            reported["desired"]["stands"].clone(),
        )
    };
    assert_eq!(desired(), (1, None, json!(true)), "the newest");
    server.ask("/v1/models/vectors/versions/1:activate?scope=store", json!({}));
    assert_eq!(desired(), (1, Some(1), json!(true)));
    for version in [2, 3] {
        server.ask(&format!("{ITEMS}:upsert"), json!({"items": [{"id": version, "set": {"n": version}}]}));
        server.ask(&format!("{ITEMS}:merge"), "");
        assert_eq!(desired(), (version, Some(1), json!(true)));
    }
    // A version that is published from outside and activated at this server alone deviates from the desired state.
    published(folder.path(), 40);
    server.ask("/v1/models/vectors/versions/4:activate", json!({}));
    assert_eq!(desired(), (4, Some(1), json!(false)));
    server.ask("/v1/models/vectors/versions/1:activate", json!({}));
    assert_eq!(desired(), (1, Some(1), json!(true)));
    let store = folder.path().join("store");
    assert_eq!(run(&["activate", "vectors", "newest", "--store", store.to_str().unwrap()]).0, 0);
    until("the newest answers", || desired() == (4, None, json!(true)));
    server.ask("/v1/models/vectors/versions/1:activate", json!({}));
    assert_eq!(desired(), (1, None, json!(false)));
}

#[test]
fn updates_are_merged_automatically_and_readyz_warns_of_many() {
    let folder = tempfile::tempdir().unwrap();
    published(folder.path(), 1000);
    let server = serve(folder.path(), "0");
    let many = |from: i64| {
        let item = |id| json!({"id": id, "embedding": [id, 1], "attributes": {"n": id}});
        json!({"items": (from..from + 1100).map(item).collect::<Vec<Value>>()})
    };
    assert!(!server.get("/readyz").1.contains("warning"));
    server.ask(&format!("{ITEMS}:upsert"), many(2000));
    let (_, before) = state(&server, 1100);
    let (status, text) = server.get("/readyz");
    assert!(status == 200 && text.contains("warning: model `vectors`: 110 % of its snapshot"), "{text}");
    assert_eq!(server.stop(), Some(0));
    let server = serve(folder.path(), "0.5");
    let start = Instant::now();
    while position(&server)["fresh_items"] != 0 {
        assert!(start.elapsed() < Duration::from_secs(60), "never merged: {}", position(&server));
        assert_eq!(state(&server, 1100).1, before);
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!((state(&server, 1100).1, position(&server)["version"].as_u64()), (before, Some(2)));
    assert!(!server.get("/readyz").1.contains("warning"));
    let metrics = server.get("/metrics").1;
    assert!(metrics.contains("sterling_merges_total{model=\"vectors\",outcome=\"merged\"} 1"), "{metrics}");
}

#[test]
fn a_few_hot_items_are_merged_once_their_updates_have_many_bytes() {
    let folder = tempfile::tempdir().unwrap();
    published(folder.path(), 2000);
    let server = serve(folder.path(), "0.1");
    // The same hundred items each time, complete: a twentieth of the catalogue, fewer than the number of changes that
    // triggers a merge.
    let text = "x".repeat(60_000);
    let mut last = 0;
    for round in 0..30 {
        let item = |id: i64| json!({"id": id, "embedding": [id, 1], "attributes": {"n": round, "lang": [text]}});
        let items: Vec<Value> = (0..100).map(item).collect();
        let reported = server.ask(&format!("{ITEMS}:upsert"), json!({"items": items}));
        assert_eq!(reported["accepted"], 100, "{reported}");
        last = reported["position"].as_u64().unwrap();
        if server.get_json("/v1/models/vectors")["version"] != 1 {
            break;
        }
    }
    until("they are merged", || server.get_json("/v1/models/vectors")["version"].as_u64() > Some(1));
    let (_, items) = state(&server, last);
    assert_eq!(items.len(), 2000);
    let metrics = server.get("/metrics").1;
    assert!(metrics.contains("sterling_merges_total{model=\"vectors\",outcome=\"merged\"} 1"), "{metrics}");
    for name in ["ratio", "bytes", "updates"] {
        assert!(metrics.contains(&format!("sterling_journal_backlog_{name}{{model=\"vectors\"}}")), "{metrics}");
    }
}

#[test]
fn impossible_merges_report_the_reason_and_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    published(folder.path(), 3);
    let server = serve(folder.path(), "0");
    let merge = format!("{ITEMS}:merge");
    assert_eq!(server.post("/v1/models/none/items:merge", "").0, 404);
    assert_eq!(server.get(&merge).0, 405);
    let alone = Server::start(&folder.path().join("store"));
    assert_eq!(alone.post(&merge, "").0, 422, "a server without updates");
    for arguments in [&["compact", "vectors"][..], &["compact", "vectors", "--updates", "nowhere"], &["compact", "a/b"]]
    {
        assert_eq!(run(arguments).0, 2, "{arguments:?}");
    }
}

#[test]
fn a_catalogue_that_was_emptied_is_merged_stays_empty_and_takes_items_again() {
    let folder = tempfile::tempdir().unwrap();
    published(folder.path(), 3);
    let server = serve(folder.path(), "0");
    let merge = |server: &Server| server.ask(&format!("{ITEMS}:merge"), "");
    let delete = |server: &Server, ids: &[i64]| drop(server.ask(&format!("{ITEMS}:delete"), json!({"ids": ids})));
    let put = |server: &Server, ids: &[i64]| {
        let item = |id: &i64| json!({"id": id, "embedding": [id, 1], "attributes": {"n": 7}});
        server.ask(&format!("{ITEMS}:upsert"), json!({"items": ids.iter().map(item).collect::<Vec<_>>()}));
    };
    let is_empty = |server: &Server, version: u64| {
        let (answer, items) = state(server, 0);
        let total = server.get_json("/v1/models/vectors")["items"].clone();
        assert_eq!((&answer["version"], items, total), (&json!(version), Vec::new(), json!(0)));
        assert_eq!((0..6).filter(|id| server.get(&format!("{ITEMS}/{id}")).0 != 404).count(), 0);
    };
    delete(&server, &[0, 1, 2]);
    assert_eq!(merge(&server), json!({"model": "vectors", "version": 2, "position": 3, "items": 0}));
    is_empty(&server, 2);
    put(&server, &[5]);
    delete(&server, &[5]);
    assert_eq!(merge(&server), json!({"model": "vectors", "version": 3, "position": 5, "items": 0}));
    // The deleted items do not return after a restart, nor at a server without the updates.
    assert_eq!(server.stop(), Some(0));
    is_empty(&Server::start(&folder.path().join("store")), 3);
    let server = serve(folder.path(), "0");
    is_empty(&server, 3);
    // An item that a file of the version may hold is one like all others.
    put(&server, &[0, 1, 2, 5, 9]);
    delete(&server, &[1]);
    let items = [(0, 7), (2, 7), (5, 7), (9, 7)];
    assert_eq!(state(&server, 11).1, items);
    assert_eq!(merge(&server), json!({"model": "vectors", "version": 4, "position": 11, "items": 4}));
    assert_eq!(server.stop(), Some(0));
    assert_eq!(state(&serve(folder.path(), "0"), 11).1, items);
}

#[test]
fn an_emptied_catalogue_truncates_its_journal() {
    let folder = tempfile::tempdir().unwrap();
    published(folder.path(), 40);
    let (store, feed, registry, compactor) = merging(folder.path(), None);
    let merged = |from: i64| {
        let updates: Vec<Update> = (from..from + 40).map(|id| Update::Delete { id }).collect();
        for updates in updates.chunks(4) {
            append(&feed, updates);
        }
        let active = || registry.get("vectors", VersionSelector::Active).unwrap().view();
        until("they are deleted", || active().position() == feed.last() && active().items() == 0);
        compactor.merge(&registry, "vectors").unwrap()
    };
    assert_eq!((merged(0).items, feed.first()), (0, 1));
    for round in 1..4 {
        more(&feed, &registry, 1000 * round, 40);
        let before = store.manifest("vectors", round as u64 + 1).unwrap();
        assert_eq!((before.items, merged(1000 * round).items), (0, 0));
        assert!(
            (before.position - 30..=before.position + 1).contains(&feed.first()),
            "round {round}: {}",
            feed.first()
        );
    }
    drop((registry, compactor, feed));
    let journal = folder.path().join("updates/vectors");
    until("the journal is truncated", || Log::open(&journal, small()).is_ok());
    let (_, feed, registry, _) = merging(folder.path(), None);
    let view = registry.get("vectors", VersionSelector::Active).unwrap().view();
    assert_eq!((view.items(), view.position()), (0, feed.last()));
}

#[test]
fn a_publication_takes_over_from_merges_and_loses_no_update() {
    let folder = tempfile::tempdir().unwrap();
    published(folder.path(), 20);
    let server = serve(folder.path(), "0");
    let set = |id: i64, n: i64| {
        server.ask(&format!("{ITEMS}:upsert"), json!({"items": [{"id": id, "set": {"n": n}}]}));
    };
    set(1, 1);
    state(&server, 1);
    // The catalogue is exported at position 1; more updates and a merge come before it is published.
    set(2, 2);
    state(&server, 2);
    assert_eq!(server.ask(&format!("{ITEMS}:merge"), "")["version"], 2);
    set(3, 3);
    let lines: String = (0..20).map(|id| line(id, i64::from(id == 1))).collect();
    let what = Plan { output: Output::at(1), ..vectors(folder.path(), &lines) };
    assert_eq!(put(&folder.path().join("store"), &what).unwrap(), 3);
    server.ask("/v1/models/vectors/versions/3:activate", json!({}));
    let (answer, items) = state(&server, 3);
    assert_eq!((answer["version"].as_u64(), &items[..4]), (Some(3), &[(0, 0), (1, 1), (2, 2), (3, 3)][..]));
    assert_eq!(server.ask(&format!("{ITEMS}:merge"), "")["version"], 4);
    assert_eq!(state(&server, 3).1, items);
}

#[test]
fn a_merged_version_has_the_package_the_tower_and_its_warm_up() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::new(folder.path().join("store"));
    put(store.root(), &crate::support::tiny()).unwrap();
    let load = |version| Snapshot::load(&store.folder("tiny", version), &Default::default()).unwrap();
    let main = Arc::new(load(1));
    let made = merge(&store, &sterling::serving::view::View::new(main.clone()), &|_| ()).unwrap();
    let merged = load(made.version);
    assert_eq!(made.items, main.index.items());
    assert_eq!(merged.manifest.merged.as_ref().map(|from| from.origin), Some(1));
    let files = |snapshot: &Snapshot| snapshot.manifest.files.keys().cloned().collect::<Vec<_>>();
    assert_eq!(files(&merged), files(&main));
    for file in main.package.files() {
        assert_eq!(merged.manifest.files[&file], main.manifest.files[&file], "{file}");
    }
    // Merged again, the version still names the version that its package came from.
    let again = merge(&store, &sterling::serving::view::View::new(Arc::new(merged)), &|_| ()).unwrap();
    let manifest = Manifest::read(&store.folder("tiny", again.version)).unwrap();
    assert_eq!((manifest.merged.map(|from| from.origin), manifest.items), (Some(1), main.index.items()));
}

fn update(id: i64) -> Update {
    let attributes =
        vec![("n".into(), Attribute::Integers(vec![id])), ("lang".into(), Attribute::Texts(vec!["en".into()]))];
    Update::Put(Put { id, vector: Some(vec![id as f32, 1.0]), attributes, dense: Vec::new() })
}

fn append(feed: &ModelUpdates, updates: &[Update]) -> u64 {
    let (tell, reported) = std::sync::mpsc::channel();
    feed.append(updates, None, Box::new(move |range| tell.send(range).unwrap()));
    reported.recv().unwrap().unwrap().end - 1
}

fn small() -> LogOptions {
    LogOptions { segment_bytes: 1000, ..LogOptions::default() }
}

#[test]
fn the_journal_is_truncated_to_the_oldest_needed_record() {
    let folder = tempfile::tempdir().unwrap();
    published(folder.path(), 40);
    let store = Store::new(folder.path().join("store"));
    let feeds = Arc::new(UpdateFeeds::new(Logs { root: folder.path().join("updates"), options: small() }));
    let loader = Updating { snapshots: Snapshots::default(), feeds: Some(feeds.clone()), in_place: true };
    let registry = Arc::new(Registry::new(store.clone(), loader, Options::default()));
    registry.refresh();
    let feed = feeds.of(&Topic::whole("vectors")).unwrap();
    let compactor =
        sterling::publish::compact::Compactor::new(store.clone(), &registry, feeds.clone(), Default::default());
    let first = || Log::open(&folder.path().join("updates/vectors"), small()).err().map(|_| ());
    assert!(first().is_some(), "the feed has the journal");
    let mut version = 1;
    let mut firsts = Vec::new();
    for round in 0..5 {
        let updates: Vec<Update> = (0..40).map(|n| update(1000 * round + n)).collect();
        let last = updates.chunks(4).fold(0, |_, updates| append(&feed, updates));
        let loaded = registry.get("vectors", VersionSelector::Active).unwrap();
        let start = Instant::now();
        while loaded.view().position() < last {
            assert!(start.elapsed() < Duration::from_secs(20));
            std::thread::sleep(Duration::from_millis(5));
        }
        let Merged { version: made, position, .. } = compactor.merge(&registry, "vectors").unwrap();
        assert_eq!(position, last);
        // All updates after the previous version are retained.
        let before = Manifest::read(&store.folder("vectors", version)).unwrap().position;
        let retained = feed.first();
        assert!(
            retained <= before + 1 && before + 1 - retained < 12,
            "round {round}: {retained} is the first, {before} is held"
        );
        firsts.push(retained);
        version = made;
    }
    assert!(firsts[0] == 1 && firsts[4] > 100, "{firsts:?}");
    // A version that needs released updates is rejected with the reason; one that does not is loaded.
    put(store.root(), &vectors(folder.path(), &line(1, 1))).unwrap();
    let refused = registry.load("vectors", version + 1).unwrap_err().to_string();
    assert!(refused.contains("was released"), "{refused}");
    let late = Plan { output: Output::at(200), ..vectors(folder.path(), &line(1, 1)) };
    put(store.root(), &late).unwrap();
    registry.load("vectors", version + 2).unwrap();
    release(&registry, &store, &feeds, "vectors").unwrap();
}

/// Returns the parts of a server that merge updates of a store in `folder`, with `memory_bytes` for versions.
fn merging(folder: &Path, memory_bytes: Option<u64>) -> (Store, Arc<ModelUpdates>, Arc<Registry>, Compactor) {
    let store = Store::new(folder.join("store"));
    let feeds = Arc::new(UpdateFeeds::new(Logs { root: folder.join("updates"), options: small() }));
    let loader = Updating { snapshots: Snapshots::default(), feeds: Some(feeds.clone()), in_place: true };
    let registry = Arc::new(Registry::new(store.clone(), loader, Options { memory_bytes, ..Options::default() }));
    registry.refresh();
    let feed = feeds.of(&Topic::whole("vectors")).unwrap();
    let compactor = Compactor::new(store.clone(), &registry, feeds, Default::default());
    (store, feed, registry, compactor)
}

/// Appends updates of further items, and waits until they are seen.
fn more(feed: &ModelUpdates, registry: &Registry, from: i64, count: i64) {
    let updates: Vec<Update> = (from..from + count).map(update).collect();
    let last = updates.chunks(updates.len() / 10).fold(0, |_, updates| append(feed, updates));
    let loaded = registry.get("vectors", VersionSelector::Active).unwrap();
    let start = Instant::now();
    while loaded.view().position() < last {
        assert!(start.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_unreadable_version_does_not_prevent_journal_truncation() {
    let folder = tempfile::tempdir().unwrap();
    published(folder.path(), 40);
    let (store, feed, registry, compactor) = merging(folder.path(), None);
    let damaged = store.folder("vectors", 2);
    std::fs::create_dir_all(&damaged).unwrap();
    std::fs::write(damaged.join("manifest.json"), "{").unwrap();
    for round in 1..5 {
        more(&feed, &registry, 1000 * round, 40);
        compactor.merge(&registry, "vectors").unwrap();
    }
    assert!(feed.first() > 100, "the journal begins at {} of {}", feed.first(), feed.last());
    let versions = store.versions("vectors").unwrap();
    assert!(
        versions.contains(&2) && versions.len() <= 4,
        "unreadable versions stay, merged versions are deleted: {versions:?}"
    );
}

#[test]
fn a_merge_that_memory_cannot_hold_leaves_no_version() {
    let started = |memory: Option<u64>| {
        let folder = tempfile::tempdir().unwrap();
        published(folder.path(), 400);
        let parts = merging(folder.path(), memory);
        (folder, parts)
    };
    let (_folder, (_, feed, registry, compactor)) = started(None);
    let need = registry.get("vectors", VersionSelector::Active).unwrap().memory_bytes();
    more(&feed, &registry, 1000, 2000);
    compactor.merge(&registry, "vectors").unwrap();
    assert_eq!(feed.unmerged(), None);
    // With memory for one version no merge is made. With memory for two of its size, the larger merged version is
    // deleted again.
    for memory in [need * 3 / 2, need * 5 / 2] {
        let (_folder, (store, feed, registry, compactor)) = started(Some(memory));
        more(&feed, &registry, 1000, 2000);
        for _ in 0..2 {
            let kind = compactor.merge(&registry, "vectors").unwrap_err().kind();
            assert_eq!((kind, feed.unmerged()), (Kind::NoSpace, Some(Kind::NoSpace)));
            assert_eq!(store.versions("vectors").unwrap(), [1]);
        }
    }
}

#[test]
fn calls_are_known_though_their_records_were_released() {
    let folder = tempfile::tempdir().unwrap();
    let wrong = InvalidItem { id: Some(4), field: "set.year".into(), reason: "got 1.5, expected integers".into() };
    let answer = CallAnswer { matched: 3, refused: vec![UpdateRejection { place: 1, wrong }] };
    let call = |key: &str| Update::AnsweredCall { key: key.into(), digest: 5, count: 1, answer: answer.clone() };
    // A process that another test starts has the lock of a closed log until it runs its program.
    let log = || {
        let mut log = None;
        until("the journal is closed", || {
            log = Log::open(folder.path(), small()).map_err(|e| assert_eq!(e.kind(), Kind::Conflict, "{e}")).ok();
            log.is_some()
        });
        log.unwrap()
    };
    let open = |after| ModelUpdates::open(Box::new(log()), Some(folder.path().into()), after).unwrap();
    {
        let feed = open(0);
        for n in 0..60 {
            append(&feed, &[update(n), call(&format!("key {n}"))]);
            feed.begin(&format!("key {n}"), 5).unwrap();
            let answer = answer.clone();
            let made = sterling::serving::fresh::Call { digest: 5, count: 1, position: 2 * n as u64 + 2, answer };
            feed.end(&format!("key {n}"), Some(made));
        }
        feed.release(80).unwrap();
        assert!(feed.first() > 50, "{}", feed.first());
    }
    for after in [120, 80] {
        let feed = open(after);
        for n in 0..(after / 2) {
            let known = feed.begin(&format!("key {n}"), 5).unwrap().unwrap();
            assert_eq!((known.position, known.count, &known.answer), (2 * n + 2, 1, &answer), "key {n}");
            assert!(feed.begin(&format!("key {n}"), 6).is_err(), "another call");
        }
        assert!(feed.begin("new", 5).unwrap().is_none());
    }
    std::fs::write(folder.path().join("calls.json"), "[[").unwrap();
    let log = log();
    assert!(log.first() > 50);
    assert!(ModelUpdates::open(Box::new(log), Some(folder.path().into()), 80).is_err());
}

#[test]
fn a_share_of_the_answers_is_compared_with_exact_ones() {
    let folder = tempfile::tempdir().unwrap();
    let lines: String =
        (0..600).map(|id| format!("{{\"id\": {id}, \"embedding\": [{}, {}]}}\n", id % 31 - 15, id % 23 - 11)).collect();
    put(&folder.path().join("store"), &vectors(folder.path(), &lines)).unwrap();
    let start = |share: &str| {
        let mut command = crate::support::sterling();
        command.env("STERLING_AUDIT_SHARE", share).args(["serve", "--listen", "127.0.0.1:0", "--store"]);
        let server = Server::spawn(command.arg(folder.path().join("store")));
        server.wait_ready();
        server
    };
    let reported = |server: &Server, name: &str| -> Option<f64> {
        let text = server.get("/metrics").1;
        text.lines().find(|line| line.starts_with(name))?.rsplit_once(' ')?.1.parse().ok()
    };
    let server = start("1");
    let audited = "sterling_audits_total{model=\"vectors\",outcome=\"audited\"}";
    for (probes, count) in [(1, 1.0), (30, 2.0)] {
        let body = json!({"vector": [1, 2], "k": 100, "probes": probes, "filter": ""});
        let found = ids(&server.ask(RETRIEVE, body));
        let exact = ids(&server.ask(RETRIEVE, json!({"vector": [1, 2], "k": 100, "exact": true})));
        let started = Instant::now();
        while reported(&server, audited) != Some(count) {
            assert!(started.elapsed() < Duration::from_secs(20), "{}", server.get("/metrics").1);
            std::thread::sleep(Duration::from_millis(20));
        }
        let same = exact.iter().filter(|id| found.contains(id)).count() as f64;
        if count == 1.0 {
            assert_eq!(reported(&server, "sterling_audit_wanted_total"), Some(100.0));
            assert_eq!(reported(&server, "sterling_audit_found_total"), Some(same));
            assert!(reported(&server, "sterling_longest_list_ratio").unwrap() >= 1.0);
        } else {
            assert_eq!(reported(&server, "sterling_audit_wanted_total"), Some(200.0));
        }
    }
    drop(server);
    let server = start("0");
    server.ask(RETRIEVE, json!({"vector": [1, 2], "probes": 1}));
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(reported(&server, "sterling_audits_total").unwrap_or(0.0), 0.0);
}

#[test]
fn every_metric_of_an_alert_is_recorded() {
    let rules = crate::support::text(crate::support::root().join("deploy/alerts.yml"));
    let named: std::collections::BTreeSet<&str> = rules
        .split(|c: char| !(c.is_alphanumeric() || c == '_'))
        .filter(|word| word.starts_with("sterling_"))
        .collect();
    assert!(named.len() > 5);
    let mut grep = std::process::Command::new("grep");
    let output = grep
        .args(["-rhoE", "\"sterling_[a-z_]+\"", "crates", "src"])
        .current_dir(crate::support::root())
        .output()
        .unwrap();
    let recorded = String::from_utf8(output.stdout).unwrap();
    for name in named {
        // A histogram is queried by its buckets.
        let name = name.trim_end_matches("_bucket");
        assert!(recorded.contains(&format!("\"{name}\"")), "{name} is not recorded");
    }
}

#[test]
fn a_merge_includes_all_updates_acknowledged_before() {
    let folder = tempfile::tempdir().unwrap();
    published(folder.path(), 100);
    let feeds = UpdateFeeds::new(Logs { root: folder.path().join("updates"), options: LogOptions::default() });
    let feeds = Arc::new(feeds);
    let loader = Updating { snapshots: Snapshots::default(), feeds: Some(feeds.clone()), in_place: true };
    let registry = Registry::new(Store::new(folder.path().join("store")), loader, Options::default());
    let engine = engine::Options { workers: 1, ..engine::Options::default() };
    let engine = Engine::start(Passes::default(), &engine).unwrap();
    let (merges, wanted) = Merges::new();
    let app = http::App::new(registry, engine, &http::Options::default()).unwrap();
    let app = Arc::new(app.with_updates(Some(feeds), Duration::from_secs(60)).with_merges(Some(merges)));
    app.registry.refresh();
    // Replaces real merges, which only run while workers are idle: merges the updates that are visible when it begins.
    let registry = app.registry.clone();
    std::thread::spawn(move || {
        while let Ok(MergeWanted { model, reported }) = wanted.recv() {
            let view = registry.get(&model, VersionSelector::Active).unwrap().view();
            reported(Ok(Merged { version: 1, position: view.position(), items: view.items() }));
        }
    });
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let post = |path: &str, body: Value| -> (u16, Value) {
        let request = Request::post(path).header("content-type", "application/json");
        let request = request.body(Body::from(body.to_string())).unwrap();
        runtime.block_on(async {
            let (parts, body) = http::router(app.clone()).oneshot(request).await.unwrap().into_parts();
            (parts.status.as_u16(), serde_json::from_slice(&to_bytes(body, 1 << 20).await.unwrap()).unwrap())
        })
    };
    let merge = format!("{ITEMS}:merge");
    let mut durable = 0;
    for (round, requested) in [merge.clone(), merge.clone(), format!("{merge}?min_position=6000")].iter().enumerate() {
        // This number of updates becomes visible only some time after they are durable.
        let ids = 1000 + 2000 * round..3000 + 2000 * round;
        let items: Vec<Value> = ids.map(|id| json!({"id": id, "embedding": [id, 1]})).collect();
        let (_, put) = post(&format!("{ITEMS}:upsert"), json!({"items": items}));
        durable = put["position"].as_u64().unwrap();
        let (status, merged) = post(requested, json!({}));
        assert_eq!((status, &merged["position"]), (200, &put["position"]), "{merged}");
        assert_eq!(merged["items"], 100 + 2000 * (round + 1));
    }
    assert_eq!(durable, 6000);
    for (query, said) in
        [("min_position=6001", "the last update has position 6000"), ("position=6", "unknown parameter `position`")]
    {
        let (status, problem) = post(&format!("{merge}?{query}"), json!({}));
        assert!(status == 400 && problem["detail"].as_str().unwrap().contains(said), "{problem}");
    }
}

#[test]
fn a_journal_that_ends_before_a_published_version_accepts_no_updates() {
    let folder = tempfile::tempdir().unwrap();
    published(folder.path(), 10);
    let store = Store::new(folder.path().join("store"));
    let opened = |logs: &str| {
        let feeds = Arc::new(UpdateFeeds::new(Logs { root: folder.path().join(logs), options: LogOptions::default() }));
        let loader = Updating { snapshots: Snapshots::default(), feeds: Some(feeds.clone()), in_place: true };
        let registry = Arc::new(Registry::new(store.clone(), loader, Options::default()));
        registry.refresh();
        (registry, feeds)
    };
    let topic = Topic::whole("vectors");
    {
        let (registry, feeds) = opened("updates");
        let feed = feeds.of(&topic).unwrap();
        assert_eq!(append(&feed, &(0..6).map(update).collect::<Vec<_>>()), 6);
        let (from, to) = (folder.path().join("updates/vectors"), folder.path().join("older/vectors"));
        std::fs::create_dir_all(&to).unwrap();
        for file in std::fs::read_dir(from).unwrap().map(Result::unwrap).filter(|file| file.path().is_file()) {
            std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
        assert_eq!(append(&feed, &[update(6)]), 7);
        let active = || registry.get("vectors", VersionSelector::Active).unwrap();
        until("the update is applied", || active().view().position() == 7);
        let compactor = Compactor::new(store.clone(), &registry, feeds, Default::default());
        let Merged { version, position, .. } = compactor.merge(&registry, "vectors").unwrap();
        assert_eq!((version, position), (2, 7));
    }
    let append_to = |feeds: &UpdateFeeds| {
        let (tell, reported) = std::sync::mpsc::channel();
        feeds.of(&topic).unwrap().append(&[update(100)], None, Box::new(move |range| tell.send(range).unwrap()));
        reported.recv().unwrap()
    };
    {
        let (registry, feeds) = opened("older");
        assert_eq!(registry.get("vectors", VersionSelector::Active).unwrap().version(), 1);
        let refused = append_to(&feeds).unwrap_err();
        assert_eq!(refused.kind(), Kind::Unavailable);
        let expected = "the journal ends at position 6, but a published version contains updates up to position 7";
        assert!(refused.to_string().contains(expected), "{refused}");
        assert!(feeds.of(&topic).unwrap().trouble().unwrap().contains(expected));
    }
    std::fs::remove_dir_all(store.folder("vectors", 2)).unwrap();
    // The threads of previous versions keep the log open for a moment.
    let mut reopened = None;
    until("the log is opened again", || {
        let (registry, feeds) = opened("older");
        let is_open = feeds.of(&topic).is_some();
        reopened = Some((registry, feeds));
        is_open
    });
    let (_registry, feeds) = reopened.unwrap();
    assert_eq!(append_to(&feeds).unwrap(), 7..8);
}
