//! Publication and loading: whole or absent, and the server goes on with what it has.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::json;
use sterling::error::Kind;
use sterling::snapshot::{Placement, Snapshot};

use crate::support::{Server, ids, put, text, tiny, vectors};

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn a_flipped_byte_in_any_file_is_refused_by_name() {
    let store = tempfile::tempdir().unwrap();
    let version = put(store.path(), &tiny()).unwrap();
    let folder = store.path().join("tiny").join(version.to_string());
    let all = files(&folder);
    assert!(all.len() >= 9, "{all:?}");
    Snapshot::load(&folder, &Placement::whole()).unwrap();
    for path in all {
        let whole = std::fs::read(&path).unwrap();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        for at in [0, whole.len() / 2, whole.len() - 1] {
            let mut broken = whole.clone();
            broken[at] ^= 0x10;
            std::fs::write(&path, &broken).unwrap();
            // A byte of the manifest may turn one name or number into another one: what it says is then held against the files.
            match Snapshot::load(&folder, &Placement::whole()) {
                Err(e) => assert!(e.to_string().contains(&name) || name == "manifest.json", "{name} at {at}: {e}"),
                Ok(_) => panic!("{name}: a flipped byte at {at} was not seen"),
            }
        }
        std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        assert!(Snapshot::load(&folder, &Placement::whole()).is_err(), "{name}: half of it was taken");
        std::fs::remove_file(&path).unwrap();
        let error = Snapshot::load(&folder, &Placement::whole()).unwrap_err();
        assert!(error.to_string().contains(&name), "{name} is missing: {error}");
        std::fs::write(&path, &whole).unwrap();
    }
    Snapshot::load(&folder, &Placement::whole()).unwrap();
}

#[test]
fn other_formats_are_refused_as_such() {
    let store = tempfile::tempdir().unwrap();
    put(store.path(), &tiny()).unwrap();
    let folder = store.path().join("tiny/1");
    let manifest = text(folder.join("manifest.json"));
    for (from, to, expected) in [
        ("\"format\": 1", "\"format\": 99", "format 99, expected 1 to 1"),
        ("\"format\": 1", "\"format\": 0", "format 0, expected 1 to 1"),
        ("index.safetensors", "../index.safetensors", "leaves the snapshot's folder"),
        ("\"items\": 13", "\"items\": 14", "the manifest says"),
    ] {
        let changed = manifest.replace(from, to);
        assert_ne!(changed, manifest, "{from}");
        std::fs::write(folder.join("manifest.json"), changed).unwrap();
        let error = Snapshot::load(&folder, &Placement::whole()).unwrap_err().to_string();
        assert!(error.contains(expected), "{to}: {error}");
    }
}

fn catalogue(offset: i64) -> String {
    (0..40).map(|n| format!("{{\"id\": {}, \"embedding\": [{}, 1]}}\n", n + offset, n as f32 / 40.0)).collect()
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(30), "{what} did not come");
        std::thread::sleep(Duration::from_millis(30));
    }
}

#[test]
fn a_new_version_is_taken_in_a_broken_one_is_refused_and_rolling_back_works() {
    let store = tempfile::tempdir().unwrap();
    let path = "/v1/models/vectors:retrieve";
    let request = json!({"vector": [1, 0], "k": 1});
    put(store.path(), &vectors(store.path(), &catalogue(0))).unwrap();
    let server = Server::start(store.path());
    assert_eq!(ids(&server.ask(path, &request)), [39]);

    // A half-written version has no manifest; nobody looks at it.
    std::fs::create_dir(store.path().join("vectors/7")).unwrap();
    std::fs::write(store.path().join("vectors/7/index.safetensors"), b"half").unwrap();

    put(store.path(), &vectors(store.path(), &catalogue(100))).unwrap();
    until("version 2", || server.ask(path, &request)["version"] == 2);
    assert_eq!(ids(&server.ask(path, &request)), [139]);
    assert_eq!(ids(&server.ask("/v1/models/vectors/versions/1:retrieve", &request)), [39]);

    // Version 3 loses a byte while the server looks elsewhere.
    let staging = tempfile::tempdir().unwrap();
    for _ in 0..3 {
        put(staging.path(), &vectors(staging.path(), &catalogue(200))).unwrap();
    }
    let broken = staging.path().join("vectors/3");
    let index = broken.join("index.safetensors");
    let mut bytes = std::fs::read(&index).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&index, bytes).unwrap();
    for entry in files(&broken) {
        std::fs::create_dir_all(store.path().join("vectors/.copy")).unwrap();
        std::fs::copy(&entry, store.path().join("vectors/.copy").join(entry.file_name().unwrap())).unwrap();
    }
    std::fs::rename(store.path().join("vectors/.copy"), store.path().join("vectors/3")).unwrap();
    let refused = || server.get_json("/v1/models/vectors/versions")["versions"][2]["refused"].clone();
    until("the refusal", || refused().is_string());
    assert!(refused().as_str().unwrap().contains("index.safetensors"), "{}", refused());
    assert_eq!(ids(&server.ask(path, &request)), [139]);
    let (status, problem) = server.post("/v1/models/vectors/versions/3:activate", "");
    assert_eq!((status, problem["code"].as_str()), (500, Some("corrupt")));

    let back = server.ask("/v1/models/vectors/versions/1:activate", "");
    assert_eq!(back["version"], 1);
    assert_eq!(ids(&server.ask(path, &request)), [39]);
    // Looking at the store again does not undo what an operator decided.
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(ids(&server.ask(path, &request)), [39]);
}

#[test]
fn a_failed_publication_leaves_the_store_as_it_was() {
    let store = tempfile::tempdir().unwrap();
    for lines in ["", "{\"id\": 1, \"embedding\": [1, 2]}\n{\"id\": 1, \"embedding\": [1, 2]}\n"] {
        let error = put(store.path(), &vectors(store.path(), lines)).unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid);
    }
    let left: Vec<PathBuf> = files(store.path()).into_iter().filter(|p| p.is_dir()).collect();
    assert!(left.iter().all(|folder| files(folder).is_empty()), "{left:?}");
    // A publication that was killed leaves a folder; the next one removes it.
    let abandoned = store.path().join("vectors/.publishing-999999999");
    std::fs::create_dir_all(&abandoned).unwrap();
    assert_eq!(put(store.path(), &vectors(store.path(), &catalogue(0))).unwrap(), 1);
    assert!(!abandoned.exists());
}
