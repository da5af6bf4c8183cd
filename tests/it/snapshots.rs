//! Publication and loading: a version is complete or absent, and the server keeps serving the versions that it has.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterling::error::Kind;
use sterling::publish::Plan;
use sterling::snapshot::{Manifest, Placement, Snapshot, Store};
use sterling::storage::files::{TensorFile, Tensors};

use crate::support::{Server, ids, put, run, sterling, text, tiny, tiny_package, until, vectors};

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn a_flipped_byte_in_any_file_is_rejected_by_name() {
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
            // A changed byte of the manifest may give another valid name or number, which is then compared with the files.
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
fn other_formats_are_rejected() {
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

#[test]
fn new_versions_are_loaded_broken_ones_rejected_and_rollback_works() {
    let store = tempfile::tempdir().unwrap();
    let path = "/v1/models/vectors:retrieve";
    let request = json!({"vector": [1, 0], "k": 1});
    put(store.path(), &vectors(store.path(), &catalogue(0))).unwrap();
    let server = Server::start(store.path());
    assert_eq!(ids(&server.ask(path, &request)), [39]);

    // A half-written version has no manifest, and is ignored.
    std::fs::create_dir(store.path().join("vectors/7")).unwrap();
    std::fs::write(store.path().join("vectors/7/index.safetensors"), b"half").unwrap();

    put(store.path(), &vectors(store.path(), &catalogue(100))).unwrap();
    until("version 2", || server.ask(path, &request)["version"] == 2);
    assert_eq!(ids(&server.ask(path, &request)), [139]);
    assert_eq!(ids(&server.ask("/v1/models/vectors/versions/1:retrieve", &request)), [39]);

    // Version 3 loses a byte between two polls of the server.
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
    until("the rejection", || refused().is_string());
    assert!(refused().as_str().unwrap().contains("index.safetensors"), "{}", refused());
    assert_eq!(ids(&server.ask(path, &request)), [139]);
    let (status, problem) = server.post("/v1/models/vectors/versions/3:activate", "");
    assert_eq!((status, problem["code"].as_str()), (500, Some("corrupt")));

    let back = server.ask("/v1/models/vectors/versions/1:activate", "");
    assert_eq!(back["version"], 1);
    assert_eq!(ids(&server.ask(path, &request)), [39]);
    // Another poll of the store does not undo the decision of an operator.
    server.wait_for_polls("store");
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
    // A killed publication leaves a folder; the next one removes it.
    let abandoned = store.path().join("vectors/.publishing-999999999");
    std::fs::create_dir_all(&abandoned).unwrap();
    assert_eq!(put(store.path(), &vectors(store.path(), &catalogue(0))).unwrap(), 1);
    assert!(!abandoned.exists());
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for file in files(from) {
        std::fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
    }
}

fn states(server: &Server) -> Vec<Value> {
    server.get_json("/v1/models/vectors/versions")["versions"].as_array().unwrap().clone()
}

#[test]
fn copied_versions_are_loaded_once_complete() {
    let (store, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let path = "/v1/models/vectors:retrieve";
    let request = json!({"vector": [1, 0], "k": 1});
    for offset in [0, 100, 200] {
        put(other.path(), &vectors(other.path(), &catalogue(offset))).unwrap();
    }
    copy(&other.path().join("vectors/1"), &store.path().join("vectors/1"));
    let server = Server::start(store.path());
    copy(&other.path().join("vectors/1"), &store.path().join("vectors-old/1"));
    copy(&other.path().join("vectors/1"), &store.path().join("vectors/7"));
    for odd in ["01", "+2", "0", "2x", "18446744073709551616"] {
        copy(&other.path().join("vectors/2"), &store.path().join("vectors").join(odd));
    }
    until("the rejection", || states(&server).last().unwrap()["refused"].is_string());
    let refused = states(&server).last().unwrap()["refused"].as_str().unwrap().to_owned();
    assert!(refused.contains("model `vectors` version 1, expected `vectors` version 7"), "{refused}");
    assert_eq!(states(&server).len(), 2, "{:?}", states(&server));
    assert_eq!(server.get("/v1/models/vectors-old").0, 503);
    assert_eq!(server.ask(path, &request)["version"], 1);
    std::fs::remove_dir_all(store.path().join("vectors/7")).unwrap();

    // In the order of names, the manifest long before the largest files.
    let (from, to) = (other.path().join("vectors/2"), store.path().join("vectors/2"));
    std::fs::create_dir(&to).unwrap();
    for file in files(&from) {
        let name = file.file_name().unwrap().to_owned();
        let bytes = std::fs::read(&file).unwrap();
        std::fs::write(to.join(&name), &bytes[..bytes.len() / 2]).unwrap();
        server.wait_for_polls("store");
        std::fs::write(to.join(&name), bytes).unwrap();
        if name == "manifest.json" {
            server.wait_for_polls("store");
        }
    }
    until("version 2", || server.ask(path, &request)["version"] == 2);
    assert_eq!(ids(&server.ask(path, &request)), [139]);
    assert!(states(&server).iter().all(|v| v["refused"].is_null()));
}

#[test]
fn a_version_number_with_new_bytes_is_reloaded() {
    let store = tempfile::tempdir().unwrap();
    let path = "/v1/models/vectors:retrieve";
    let request = json!({"vector": [1, 0], "k": 1});
    for offset in [0, 100] {
        put(store.path(), &vectors(store.path(), &catalogue(offset))).unwrap();
    }
    let server = Server::start(store.path());
    assert_eq!(ids(&server.ask(path, &request)), [139]);
    let before = server.ask(path, &request)["digest"].clone();

    // Numbers are not reused: the next one is 3.
    std::fs::remove_dir_all(store.path().join("vectors/2")).unwrap();
    assert_eq!(put(store.path(), &vectors(store.path(), &catalogue(200))).unwrap(), 3);
    until("version 3", || server.ask(path, &request)["version"] == 3);

    // A store that was deleted and recreated counts from one.
    std::fs::remove_dir_all(store.path().join("vectors")).unwrap();
    server.wait_for_polls("store");
    assert_eq!(ids(&server.ask(path, &request)), [239], "a store that vanishes takes nothing away");
    assert_eq!(put(store.path(), &vectors(store.path(), &catalogue(300))).unwrap(), 1);
    until("the new store", || ids(&server.ask(path, &request)) == [339]);
    let active = server.ask("/v1/models/vectors/versions/1:activate", "");
    assert_ne!(active["digest"], before);
    assert_eq!(ids(&server.ask(path, &request)), [339]);
}

#[test]
fn a_store_that_vanishes_and_returns_changes_nothing() {
    let store = tempfile::tempdir().unwrap();
    let path = "/v1/models/vectors:retrieve";
    let request = json!({"vector": [1, 0], "k": 1});
    for offset in [0, 100] {
        put(&store.path().join("here"), &vectors(store.path(), &catalogue(offset))).unwrap();
    }
    let server = Server::start(&store.path().join("here"));
    std::fs::rename(store.path().join("here"), store.path().join("away")).unwrap();
    server.wait_for_polls("store");
    assert_eq!((ids(&server.ask(path, &request)), server.get("/readyz").0), (vec![139], 200));
    assert_eq!(server.ask("/v1/models/vectors/versions/2:activate", "")["version"], 2);
    std::fs::rename(store.path().join("away"), store.path().join("here")).unwrap();
    put(&store.path().join("here"), &vectors(store.path(), &catalogue(200))).unwrap();
    until("version 3", || server.ask(path, &request)["version"] == 3);
}

#[test]
fn files_cut_off_or_overwritten_while_they_are_served_change_no_answer() {
    let store = tempfile::tempdir().unwrap();
    put(store.path(), &tiny()).unwrap();
    let mut server = Server::start(store.path());
    let request = json!({"features": {"installed": [1, 2, 3]}, "k": 10});
    let before = server.ask("/v1/models/tiny:retrieve", &request);
    for (n, file) in files(&store.path().join("tiny/1")).into_iter().enumerate() {
        let length = std::fs::metadata(&file).unwrap().len();
        let open = std::fs::File::options().write(true).open(&file).unwrap();
        open.set_len(0).unwrap();
        if n % 2 == 0 {
            open.set_len(length).unwrap();
        }
    }
    for _ in 0..20 {
        assert_eq!(server.ask("/v1/models/tiny:retrieve", &request)["items"], before["items"]);
    }
    until("the rejection", || {
        server.get_json("/v1/models/tiny/versions")["versions"][0]["refused"].is_string() && server.is_running()
    });
    assert_eq!(server.ask("/v1/models/tiny:retrieve", &request)["items"], before["items"]);
}

/// Writes the tiny package to `folder`, with an item tower that reads a table that nothing else reads, in its own file of several
/// pages.
fn with_a_table_of_items(folder: &Path) -> PathBuf {
    let package = folder.join("package");
    std::fs::create_dir(&package).unwrap();
    files(&tiny_package()).iter().filter(|file| file.is_file()).for_each(|file| {
        std::fs::copy(file, package.join(file.file_name().unwrap())).unwrap();
    });
    let (rows, shape) = Tensors::read(&package.join("tables.safetensors")).unwrap().get::<f32>("packages", 2).unwrap();
    let mut tables = TensorFile::new();
    tables.add("goods", &shape, &rows).unwrap();
    tables.add_owned("padding", &[1 << 16], vec![0.0_f32; 1 << 16]).unwrap();
    tables.write(&package.join("goods.safetensors")).unwrap();
    let spec = text(package.join("model.toml"));
    let (before, item) = spec.split_once("[item]").unwrap();
    let table = "[[tables]]\nname = \"goods\"\nfile = \"goods.safetensors\"\nunseen = \"zero\"\n\n";
    let item = item.replace("table = \"packages\"", "table = \"goods\"");
    std::fs::write(package.join("model.toml"), format!("{before}{table}[item]{item}")).unwrap();
    package
}

#[test]
fn updates_are_embedded_as_before_when_a_table_of_items_is_cut_off_or_overwritten() {
    for cut in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let package = with_a_table_of_items(folder.path());
        let (store, updates) = (folder.path().join("store"), folder.path().join("updates"));
        put(&store, &Plan { source: Plan::of_package(package).source, ..tiny() }).unwrap();
        let mut server = Server::start_with(&store, &["--updates", updates.to_str().unwrap()]);
        let similarity = |server: &Server, id: i64| {
            let item = json!({"id": id, "attributes": {"section": "games", "popularity": 1.0, "title": "t"}});
            let position = server.ask("/v1/models/tiny/items:upsert", json!({"items": [item]}))["position"].clone();
            let path = format!("/v1/models/tiny:rank?min_position={position}");
            let answer = server.ask(&path, json!({"features": {"installed": [1, 2, 3]}, "items": [id]}));
            answer["items"][0]["similarity"].as_f64().unwrap()
        };
        let before = similarity(&server, 3);
        let file = store.join("tiny/1/goods.safetensors");
        let length = std::fs::metadata(&file).unwrap().len();
        let open = std::fs::File::options().write(true).open(&file).unwrap();
        open.set_len(0).unwrap();
        if !cut {
            open.set_len(length).unwrap();
        }
        assert_ne!(similarity(&server, 5), before, "another item has another vector");
        assert_eq!(similarity(&server, 3), before, "cut: {cut}");
        assert!(server.is_running());
    }
}

/// Checks every published version against its manifest; returns their numbers.
fn whole(store: &Path) -> BTreeSet<u64> {
    let store = Store::new(store);
    let versions = store.versions("vectors").unwrap();
    for version in &versions {
        let folder = store.folder("vectors", *version);
        let manifest = Manifest::read(&folder).unwrap();
        assert_eq!((manifest.name.as_str(), manifest.version), ("vectors", *version));
        manifest.verify(&folder).unwrap();
        let held: BTreeSet<String> =
            files(&folder).iter().map(|f| f.file_name().unwrap().to_str().unwrap().to_owned()).collect();
        assert_eq!(held.len(), manifest.files.len() + 1, "{held:?}");
    }
    versions.into_iter().collect()
}

/// Returns the files and folders other than versions.
fn leftovers(store: &Path) -> Vec<String> {
    let names = files(&store.join("vectors")).into_iter().map(|p| p.file_name().unwrap().to_str().unwrap().to_owned());
    names.filter(|name| name.starts_with(".publishing-")).collect()
}

/// Returns a catalogue whose publication takes a moment, and the arguments that publish it.
fn many(folder: &Path, store: &Path) -> Vec<String> {
    let items = folder.join("many.jsonl");
    let line = |n: i64| format!("{{\"id\": {n}, \"embedding\": [{}, {}, 1]}}\n", n % 97, n % 89);
    std::fs::write(&items, (0..3000).map(line).collect::<String>()).unwrap();
    let path = |p: &Path| p.to_str().unwrap().to_owned();
    ["publish", "--name", "vectors", "--items", &path(&items), "--store", &path(store)].map(str::to_owned).to_vec()
}

#[test]
#[ignore = "long: soak"]
fn publishers_side_by_side_get_a_version_each() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let arguments = many(folder.path(), &store);
    // In two containers they have the same process id; without permission for namespaces, they are two processes.
    let apart = ["--pid", "--fork", "--mount-proc"];
    let can = Command::new("unshare").args(apart).arg("true").output().is_ok_and(|o| o.status.success());
    let program = sterling().get_program().to_owned();
    let mut published = BTreeSet::new();
    for round in 0..4 {
        let start = |_| {
            let mut command = if can { Command::new("unshare") } else { sterling() };
            if can {
                command.args(apart).arg(&program);
            }
            std::thread::sleep(Duration::from_millis(17 * round));
            command.args(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let publishers: Vec<_> = (0..3).map(start).collect();
        for publisher in publishers {
            let output = publisher.wait_with_output().unwrap();
            let reported = String::from_utf8(output.stdout).unwrap();
            assert!(output.status.success(), "{reported}{}", String::from_utf8_lossy(&output.stderr));
            let version =
                reported.split("version ").nth(1).and_then(|t| t.split([' ', ':', ',']).next()?.trim().parse().ok());
            assert!(published.insert(version.unwrap_or_else(|| panic!("{reported}"))), "given twice: {reported}");
        }
    }
    assert_eq!(whole(&store), published);
    assert_eq!(published, (1..=12).collect());
    assert_eq!(leftovers(&store), [""; 0]);
}

#[test]
#[ignore = "long: kills publishers again and again"]
fn a_publication_killed_at_any_moment_leaves_the_old_or_the_new_version() {
    let kills = std::env::var("KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(10);
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let arguments = many(folder.path(), &store);
    let start = Instant::now();
    assert!(sterling().args(&arguments).output().unwrap().status.success());
    let takes = start.elapsed();
    let (mut seed, mut killed, mut before) = (0x2545_F491_4F6C_DD1D_u64, 0, whole(&store));
    for _ in 0..kills {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut publisher = sterling().args(&arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(takes.mul_f64((seed >> 33) as f64 / f64::from(1u32 << 31)));
        publisher.kill().unwrap();
        killed += u32::from(!publisher.wait().unwrap().success());
        let after = whole(&store);
        assert!(after.is_superset(&before) && after.len() <= before.len() + 1, "{before:?} {after:?}");
        before = after;
    }
    assert!(killed > 0, "none was killed in time");
    let (code, reported, wrong) = run(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(code, 0, "{reported}{wrong}");
    assert_eq!(whole(&store).len(), before.len() + 1);
    assert_eq!(leftovers(&store), [""; 0]);
}

#[test]
fn a_live_publication_is_not_removed_as_a_leftover() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::new(folder.path());
    let put_one = |at: &Path, _: u64| std::fs::write(at.join("manifest.json"), "{}").map_err(|e| panic!("{e}"));
    let outer = store.publish("m", |staging, version| {
        assert_eq!(store.publish("m", put_one).unwrap(), version + 1);
        assert!(staging.exists());
        put_one(staging, version)
    });
    assert_eq!((outer.unwrap(), store.versions("m").unwrap()), (1, vec![1, 2]));
}

#[test]
fn a_full_disk_leaves_the_store_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    std::fs::create_dir(&store).unwrap();
    let mount = |arguments: &[&str]| Command::new(arguments[0]).args(&arguments[1..]).arg(&store).output();
    let mounted = mount(&["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs"]);
    if !mounted.is_ok_and(|o| o.status.success()) {
        // A disk of a known size needs permission to mount.
        return;
    }
    put(&store, &vectors(folder.path(), &catalogue(0))).unwrap();
    let arguments = many(folder.path(), &store);
    let free = std::fs::OpenOptions::new().append(true).create(true).open(store.join("ballast")).unwrap();
    while (&free).write_all(&[0; 4096]).is_ok() {}
    free.set_len(free.metadata().unwrap().len() - (64 << 10)).unwrap();
    let (code, _, wrong) = run(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    let (versions, left) = (whole(&store), leftovers(&store));
    drop(free);
    std::fs::remove_file(store.join("ballast")).unwrap();
    let again = put(&store, &vectors(folder.path(), &catalogue(100)));
    assert!(mount(&["umount"]).unwrap().status.success());
    assert!(code != 0 && wrong.contains("No space left"), "{code}: {wrong}");
    assert_eq!((versions, left), (BTreeSet::from([1]), Vec::new()));
    assert!(again.unwrap() > 1);
}

#[test]
#[ignore = "long: soak"]
fn a_thousand_activations_leave_nothing_behind() {
    let activations: usize = std::env::var("ACTIVATIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(600);
    let store = tempfile::tempdir().unwrap();
    for offset in [0, 100, 200] {
        put(store.path(), &vectors(store.path(), &catalogue(offset))).unwrap();
    }
    let server = Server::start(store.path());
    let count = |what: &str| {
        let path = format!("/proc/{}/{what}", server.id());
        match what {
            "fd" => std::fs::read_dir(path).unwrap().count(),
            "maps" => text(path).lines().count(),
            _ => text(path)
                .lines()
                .find_map(|l| l.strip_prefix("VmRSS:")?.split_whitespace().next()?.parse().ok())
                .unwrap(),
        }
    };
    let mut before = [0; 3];
    for n in 0..activations {
        // Two of three versions stay in memory: each activation loads one and drops one.
        let version = n % 3 + 1;
        assert_eq!(server.ask(&format!("/v1/models/vectors/versions/{version}:activate"), "")["version"], version);
        if n == 60 {
            before = ["fd", "maps", "status"].map(count);
        }
    }
    let after = ["fd", "maps", "status"].map(count);
    assert!(after[0] <= before[0] + 4, "descriptors: {before:?} {after:?}");
    // Threads and their arenas come and go, with up to 40 mappings and 25 MB: enough activations that a leak of each would exceed
    // that.
    let others = activations - 61;
    assert!(after[1] <= before[1] + others / 8, "mappings: {before:?} {after:?}");
    assert!(after[2] <= before[2] + 75 * others, "resident kB: {before:?} {after:?}");
}
