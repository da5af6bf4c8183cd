//! Shards that merge their updates independently (checkpoints): the version stays the same over all shards, and no answer
//! differs.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterling::items::shard_of;
use sterling::journal::{Logs, Topic};
use sterling::publish::{Output, Plan, Source, merge};
use sterling::request::VersionSelector;
use sterling::serving::fresh::{Update, UpdateFeeds, Updating};
use sterling::serving::registry::{Options, Registry, Snapshots};
use sterling::snapshot::Store;
use sterling::units::ItemId;

use crate::routed_updates::{Cut, home, item, serve, token};
use crate::shards;
use crate::support::{Server, ids, put, run, until};

const ITEMS: &str = "/v1/models/vectors/items";
const RETRIEVE: &str = "/v1/models/vectors:retrieve";

/// Requests whose answers do not depend on the storage of the items.
fn bodies() -> Vec<Value> {
    let columns = ["colour", "price", "maker"];
    vec![
        json!({"vector": [1, 3, 0.5, -0.25], "k": 300, "exact": true, "columns": columns}),
        json!({"vector": [-1, 0.5, 0.25, 2], "k": 40, "exact": true, "filter": "colour:violet OR price > 30", "columns": columns}),
        json!({"vector": [0.5, -1, 2, 0], "k": 40, "exact": true, "filter": "NOT colour:red AND maker:new"}),
        json!({"vector": [0, 0, 0, 0], "k": 30, "exact": true}),
        json!({"vector": [1, 0, -0.5, 0.25], "k": 50, "candidates": 2000, "probes": 12}),
    ]
}

/// Returns the answers of a server from a position on, without versions and positions.
fn answers(server: &Server, position: &str) -> Vec<Value> {
    let ask = |body: Value| server.ask(&format!("{RETRIEVE}?min_position={position}"), body)["items"].clone();
    bodies().into_iter().map(ask).collect()
}

/// Puts, changes and deletes items of all shards, in both deployments; returns the positions of the shards and that of the
/// complete catalogue.
fn write(cut: &Cut, from: i64) -> (String, String) {
    let mut items: Vec<Value> = (from..from + 60).map(item).collect();
    items.extend(
        (0..60).map(|n| json!({"id": (n * 5 + from % 5) * 7 - 9000, "set": {"price": 40 + n, "colour": "grey"}})),
    );
    let removed: Vec<i64> = (from..from + 9).chain((0..20).map(|n| (n * 11 + from % 11) * 7 - 9000)).collect();
    let both = |call: &str, body: Value| {
        let (reported, complete) =
            (cut.router.ask(&format!("{ITEMS}:{call}"), &body), cut.one.ask(&format!("{ITEMS}:{call}"), &body));
        (token(&reported), complete["position"].to_string())
    };
    let (seen, complete) = both("upsert", json!({"items": items}));
    // Delete by filter covers visible items only.
    answers(&cut.router, &seen);
    answers(&cut.one, &complete);
    // A shard without any update has position 0, which is always visible.
    both("delete", json!({"ids": removed}))
}

fn folds(cut: &Cut, shard: u32) -> Vec<PathBuf> {
    let parent = Path::new(&cut.updates(shard)).join(format!(".folded/vectors/shard-{shard}/2"));
    let of = |folder: &Path| -> Vec<PathBuf> {
        let found = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
        found.filter(|path| path.is_dir()).collect()
    };
    let mut found: Vec<PathBuf> = of(&parent).iter().flat_map(|digest| of(digest)).collect();
    found.sort();
    found
}

fn name(folder: &Path) -> String {
    folder.file_name().unwrap().to_string_lossy().into_owned()
}

#[test]
fn shards_merge_independently_and_no_answer_differs() {
    let mut cut = Cut::new();
    let (seen, complete) = write(&cut, 5000);
    let before = answers(&cut.router, &seen);
    assert_eq!(before, answers(&cut.one, &complete));
    let digest = cut.router.ask(RETRIEVE, &bodies()[0])["digest"].clone();
    let own = cut.shards[1].ask(RETRIEVE, &bodies()[0])["digest"].clone();
    let state = |server: &Server| server.get_json(&format!("{ITEMS}:position"));
    // Pages of one ranking, some before the merge and some after it.
    let paged = |cursor: &Value, k: u64| {
        let body = json!({"vector": [1, 0, -0.5, 0.25], "k": k, "candidates": 60, "probes": 3, "cursor": cursor});
        cut.shards[1].ask(RETRIEVE, body)
    };
    let (all, first) = (paged(&json!(""), 20), paged(&json!(""), 8));
    // Requests to a router while one shard merges and the others do not: none fails, and all see the same data.
    let (stop, address) = (Arc::new(AtomicBool::new(false)), cut.router.address.clone());
    let (stopped, expected) = (stop.clone(), before.clone());
    let asking = std::thread::spawn(move || {
        let (mut requested, mut last) = (0, vec![0; 3]);
        let agent = crate::support::agent();
        while !stopped.load(Ordering::Relaxed) {
            let body = bodies()[requested % 5].to_string();
            let mut answer = agent.post(format!("http://{address}{RETRIEVE}")).send(body).unwrap();
            let text = answer.body_mut().read_to_string().unwrap();
            assert_eq!(answer.status().as_u16(), 200, "{text}");
            let answer: Value = serde_json::from_str(&text).unwrap();
            assert_eq!((&answer["items"], answer["coverage"].as_f64()), (&expected[requested % 5], Some(1.0)));
            let positions: Vec<u64> =
                answer["positions"].as_array().unwrap().iter().map(|p| p.as_u64().unwrap()).collect();
            assert!(positions.iter().zip(&last).all(|(now, before)| now >= before), "{positions:?} after {last:?}");
            (requested, last) = (requested + 1, positions);
        }
        requested
    });
    until("it queries", || state(&cut.shards[1])["fresh_items"] != 0);
    let items = state(&cut.shards[1])["items"].clone();
    let made = cut.shards[1].ask(&format!("{ITEMS}:merge"), "");
    let position = state(&cut.shards[1])["durable"].clone();
    assert_eq!(made, json!({"model": "vectors", "version": 2, "position": position, "items": items}));
    assert_eq!(
        (state(&cut.shards[1])["fresh_items"].as_u64(), state(&cut.shards[1])["items"].clone()),
        (Some(0), items)
    );
    assert!(state(&cut.shards[0])["fresh_items"].as_u64() > Some(0), "the others have not merged");
    assert_eq!(answers(&cut.router, &seen), before);
    std::thread::sleep(Duration::from_millis(300));
    stop.store(true, Ordering::Relaxed);
    assert!(asking.join().unwrap() > 0);
    // The version is unchanged, at the server and at the router.
    assert_eq!(cut.router.ask(RETRIEVE, &bodies()[0])["digest"], digest);
    assert_eq!(cut.shards[1].ask(RETRIEVE, &bodies()[0])["digest"], own);
    let info = cut.shards[1].get_json("/v1/models/vectors");
    assert_eq!((info["shard"]["items"].as_u64(), info["lists"].as_u64()), (Some(700), Some(12)));
    let rest = paged(&first["cursor"], 12);
    let both: Vec<i64> = ids(&first).into_iter().chain(ids(&rest)).collect();
    assert_eq!(both, ids(&all), "pages are slices of one ranking");
    // Without later updates there is nothing to do.
    assert_eq!(cut.shards[1].ask(&format!("{ITEMS}:merge"), "")["position"], position);
    // All shards merge twice: two checkpoints of each are kept.
    for round in 0..3 {
        let (seen, complete) = write(&cut, 6000 + 100 * round);
        for server in cut.shards.iter().skip(usize::from(round == 1)) {
            server.ask(&format!("{ITEMS}:merge"), "");
        }
        assert_eq!(answers(&cut.router, &seen), answers(&cut.one, &complete), "round {round}");
    }
    assert_eq!((folds(&cut, 0).len(), folds(&cut, 1).len()), (2, 2));
    // A killed server restores everything: the newest checkpoint and the later updates. If that one is damaged, it uses the one
    // before.
    let (seen, complete) = write(&cut, 7000);
    let expected = answers(&cut.one, &complete);
    for damage in [false, true] {
        let address = cut.shards[1].address.clone();
        let server = cut.shards.remove(1);
        server.signal("KILL");
        server.wait();
        let newest = folds(&cut, 1).pop().unwrap();
        if damage {
            let path = newest.join("index.safetensors");
            let mut bytes = std::fs::read(&path).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            std::fs::remove_file(&path).unwrap();
            std::fs::write(&path, bytes).unwrap();
        }
        cut.shards.insert(1, serve(cut.folder.path(), 1, &cut.updates(1), &address));
        until("the shard is back", || cut.router.post(RETRIEVE, json!({"vector": [0, 0, 0, 0]})).0 == 200);
        assert_eq!(answers(&cut.router, &seen), expected, "damage {damage}");
        assert_eq!(!newest.exists(), damage);
        assert_eq!(folds(&cut, 1).iter().any(|folder| name(folder).starts_with(".damaged-")), damage);
    }
}

#[test]
fn a_publication_takes_over_from_merged_shards_and_a_roll_back_goes_back_to_them() {
    let cut = Cut::new();
    let (seen, complete) = write(&cut, 5000);
    let before = answers(&cut.one, &complete);
    cut.shards.iter().for_each(|server| drop(server.ask(&format!("{ITEMS}:merge"), "")));
    assert_eq!(answers(&cut.router, &seen), before);
    // The content of the merged shards is exported and republished; updates written meanwhile are applied to it.
    let positions: Vec<u64> = cut
        .shards
        .iter()
        .map(|server| server.get_json(&format!("{ITEMS}:position"))["durable"].as_u64().unwrap())
        .collect();
    let (seen, complete) = write(&cut, 6000);
    let mut what = shards::catalogue(cut.folder.path(), sterling::index::ivf::Rescore::F16);
    what.output = Output::Shards { count: 3, positions };
    // No item of the first catalogue: only the published items, and updates after the positions.
    let path = cut.folder.path().join("again.jsonl");
    std::fs::write(&path, (5000..5700).map(|id| format!("{}\n", item(id))).collect::<String>()).unwrap();
    what.source = Source::Vectors { name: "vectors".into(), items: path, vectors: None };
    assert_eq!(put(cut.folder.path(), &what).unwrap(), 3);
    // A router returns at most the number of items that the version was published with: a fifth of them at a time.
    let of_price = |price: i64| {
        cut.router.ask(
            &format!("{RETRIEVE}?min_position={seen}"),
            json!({"vector": [1, 1, 1, 1], "k": 300, "exact": true, "filter": format!("colour:violet AND price:{price}")}),
        )
    };
    let requested = || of_price(0);
    until("it answers", || requested()["version"] == 3);
    let mut found: Vec<i64> = (0..5).flat_map(|price| ids(&of_price(price))).collect();
    found.sort_unstable();
    assert_eq!(found, (5000..5700).chain(6009..6060).collect::<Vec<i64>>());
    // It is merged like any version, and the one before it has continued under it.
    for server in &cut.shards {
        assert_eq!(server.ask(&format!("{ITEMS}:merge"), "")["version"], 3);
    }
    cut.shards.iter().for_each(|server| drop(server.ask("/v1/models/vectors/versions/2:activate", json!({}))));
    until("it is rolled back", || requested()["version"] == 2);
    assert_eq!(answers(&cut.router, &seen), answers(&cut.one, &complete));
}

#[test]
fn shards_are_merged_without_a_server_or_rejected_with_a_reason() {
    let mut cut = Cut::new();
    let (seen, complete) = write(&cut, 5000);
    let (store, updates) = (cut.folder.path().display().to_string(), cut.updates(2));
    let alone = ["compact", "vectors", "--updates", &updates, "--store", &store, "--shard", "2"];
    let (code, _, err) = run(&alone);
    assert!(code != 0 && err.contains("another process writes this journal"), "{err}");
    let state = cut.shards[2].get_json(&format!("{ITEMS}:position"));
    let address = cut.shards[2].address.clone();
    assert_eq!(cut.shards.remove(2).stop(), Some(0));
    let (code, out, err) = run(&alone);
    let said =
        format!("merged vectors version 2: {} items, updates up to position {}", state["items"], state["durable"]);
    assert_eq!((code, out.trim()), (0, &*said), "{err}");
    cut.shards.push(serve(cut.folder.path(), 2, &updates, &address));
    until("the shard is back", || cut.router.post(RETRIEVE, json!({"vector": [0, 0, 0, 0]})).0 == 200);
    assert_eq!(cut.shards[2].get_json(&format!("{ITEMS}:position"))["fresh_items"], 0);
    assert_eq!(answers(&cut.router, &seen), answers(&cut.one, &complete));
    for wrong in [
        &["compact", "vectors", "--updates", &updates, "--store", &store, "--shard", "7"][..],
        &["compact", "vectors", "--updates", &updates, "--store", &store],
        &["compact", "vectors", "--server", "http://127.0.0.1:1", "--shard", "2"],
    ] {
        assert_ne!(run(wrong).0, 0, "{wrong:?}");
    }
    // A router does not merge.
    assert_eq!(cut.router.post(&format!("{ITEMS}:merge"), json!({})).0, 422);
}

#[test]
fn merging_an_emptied_shard_keeps_it_empty() {
    let mut cut = Cut::new();
    let (seen, complete) = write(&cut, 5000);
    assert_eq!(answers(&cut.router, &seen), answers(&cut.one, &complete));
    let state = |cut: &Cut| cut.shards[0].get_json(&format!("{ITEMS}:position"));
    // Emptied, and again after it had an item: the data after the newest checkpoint is empty too.
    let again = (8000..).find(|id| home(*id) == 0).unwrap();
    for round in 0..2 {
        let removed: Vec<i64> = match round {
            0 => (0..700).map(|n| n * 7 - 9000).chain(5000..5060).filter(|id| home(*id) == 0).collect(),
            _ => vec![again],
        };
        let delete = |server: &Server| server.ask(&format!("{ITEMS}:delete"), json!({"ids": removed}));
        let (seen, complete) = (token(&delete(&cut.router)), delete(&cut.one)["position"].to_string());
        let expected = answers(&cut.one, &complete);
        assert_eq!(answers(&cut.router, &seen), expected);
        let position = state(&cut)["durable"].clone();
        let merged = cut.shards[0].ask(&format!("{ITEMS}:merge"), "");
        assert_eq!(merged, json!({"model": "vectors", "version": 2, "position": position, "items": 0}));
        assert_eq!(answers(&cut.router, &seen), expected);
        let address = cut.shards[0].address.clone();
        assert_eq!(cut.shards.remove(0).stop(), Some(0));
        cut.shards.insert(0, serve(cut.folder.path(), 0, &cut.updates(0), &address));
        until("the shard is back", || cut.router.post(RETRIEVE, json!({"vector": [0, 0, 0, 0]})).0 == 200);
        assert_eq!((&state(&cut)["items"], &state(&cut)["durable"]), (&json!(0), &position));
        assert_eq!(answers(&cut.router, &seen), expected);
        let put = |server: &Server| server.ask(&format!("{ITEMS}:upsert"), json!({"items": [item(again)]}));
        let (seen, complete) = (token(&put(&cut.router)), put(&cut.one)["position"].to_string());
        assert_eq!(answers(&cut.router, &seen), answers(&cut.one, &complete));
        assert_eq!(state(&cut)["items"], 1);
    }
    assert_eq!(folds(&cut, 0).len(), 2);
}

/// A registry of the first of two shards of a catalogue that is published twice, and its updates.
struct ShardRegistry {
    folder: tempfile::TempDir,
    store: Store,
    registry: Arc<Registry>,
    feeds: Arc<UpdateFeeds>,
}

impl ShardRegistry {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        ShardRegistry::publish(folder.path());
        let root = folder.path().join("updates");
        let store = Store::new(folder.path()).of_shard(0).with_checkpoints(root.join(".folded"));
        let feeds = Arc::new(UpdateFeeds::new(Logs::below(root)));
        let loader = Updating { snapshots: Snapshots::default(), feeds: Some(feeds.clone()), in_place: true };
        let registry = Arc::new(Registry::new(store.clone(), loader, Options::default()));
        registry.refresh();
        ShardRegistry { folder, store, registry, feeds }
    }

    fn publish(folder: &Path) {
        let what = Plan { output: Output::shards(2), ..shards::catalogue(folder, sterling::index::ivf::Rescore::F16) };
        put(folder, &what).unwrap();
    }

    /// Deletes `count` items, and waits until all loaded versions show it.
    fn delete(&self, count: usize) {
        let feed = self.feeds.of(&Topic { model: "vectors".into(), shard: Some((0, 2)) }).unwrap();
        let first = feed.last();
        let own = (0..700).map(|n| n * 7 - 9000).filter(|id| shard_of(ItemId(*id), 2) == 0);
        let updates: Vec<Update> = own.skip(first as usize).take(count).map(|id| Update::Delete { id }).collect();
        let (tell, reported) = std::sync::mpsc::channel();
        feed.append(&updates, None, Box::new(move |range| tell.send(range).unwrap()));
        reported.recv().unwrap().unwrap();
        let start = Instant::now();
        while self.registry.all_in_memory("vectors").iter().any(|loaded| loaded.view().position() < feed.last()) {
            assert!(start.elapsed() < Duration::from_secs(20));
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn base(&self, which: VersionSelector<'_>) -> (u64, u64) {
        let loaded = self.registry.get("vectors", which).unwrap();
        (loaded.version(), loaded.view().main().manifest.position)
    }
}

#[test]
fn a_merged_shard_is_no_new_version_and_replaces_only_the_bytes_of_its_source() {
    let held = ShardRegistry::new();
    ShardRegistry::publish(held.folder.path());
    held.registry.refresh();
    held.delete(30);
    let view = held.registry.get("vectors", VersionSelector::Active).unwrap().view();
    // An operator rolls back during a merge: the result of the merge does not change that.
    held.registry.activate("vectors", 1).unwrap();
    let made = merge(&held.store, &view, &|_| ()).unwrap();
    assert_eq!((made.version, made.position, made.items), (2, 30, view.items()));
    held.registry.refresh();
    assert_eq!((held.base(VersionSelector::Active), held.base(VersionSelector::Version(2))), ((1, 0), (2, 30)));
    let (of_shard, digest) = (held.registry.get("vectors", VersionSelector::Version(2)).unwrap(), view.main().digest());
    assert_eq!((of_shard.digest(), of_shard.view().items()), (digest, view.items()));
    assert_eq!(of_shard.view().coverage(), view.coverage());
    // A repeated merge finds the checkpoint, and returns the same.
    assert_eq!(merge(&held.store, &view, &|_| ()).unwrap().position, 30);
    assert_eq!(held.store.folded("vectors", 2).unwrap(), Some(30));
    // Another catalogue under the same number, as in a recreated store, does not use it.
    std::fs::remove_dir_all(held.folder.path().join("vectors")).unwrap();
    let mut what = shards::catalogue(held.folder.path(), sterling::index::ivf::Rescore::F32);
    what.output = Output::shards(2);
    put(held.folder.path(), &what).unwrap();
    put(held.folder.path(), &what).unwrap();
    assert_eq!(held.store.folded("vectors", 2).unwrap(), None);
    held.registry.refresh();
    assert_eq!(held.base(VersionSelector::Version(2)), (2, 0));
    assert_eq!(held.registry.get("vectors", VersionSelector::Version(2)).unwrap().view().items(), view.items());
}

#[test]
fn the_journal_of_a_shard_keeps_records_after_a_merge() {
    let held = ShardRegistry::new();
    let feeds = held.feeds.clone();
    let compactor =
        sterling::publish::compact::Compactor::new(held.store.clone(), &held.registry, feeds, Default::default());
    let behind = || held.store.position_after_checkpoint("vectors", 1).unwrap();
    assert_eq!(behind(), None);
    for (position, expected) in [(10, 0), (20, 10), (30, 20)] {
        held.delete(10);
        let made = compactor.merge(&held.registry, "vectors").unwrap();
        assert_eq!((made.version, made.position, behind()), (1, position, Some(expected)));
        assert_eq!(held.base(VersionSelector::Active), (1, position));
    }
    let parent = held.folder.path().join("updates/.folded/vectors/shard-0/1");
    let digest = std::fs::read_dir(&parent).unwrap().flatten().next().unwrap().path();
    let there = |name: &str| digest.join(name).exists();
    assert_eq!((there("10"), there("20"), there("30")), (false, true, true));
    // The next merge removes the files of a killed one; a checkpoint with an unreadable manifest is ignored.
    std::fs::create_dir(digest.join(".publishing-0")).unwrap();
    std::fs::create_dir(digest.join("99")).unwrap();
    std::fs::write(digest.join("99/manifest.json"), "{").unwrap();
    assert_eq!(held.store.folded("vectors", 1).unwrap(), Some(30));
    held.delete(5);
    compactor.merge(&held.registry, "vectors").unwrap();
    assert_eq!((there(".publishing-0"), there("20"), there("35"), behind()), (false, false, true, Some(30)));
    // Once no version of that number is loaded, its checkpoints are removed.
    ShardRegistry::publish(held.folder.path());
    held.registry.refresh();
    held.registry.unload("vectors", 1).unwrap();
    sterling::publish::compact::release(&held.registry, &held.store, &held.feeds, "vectors").unwrap();
    assert!(!parent.exists());
}
