//! Publications of more vectors than the memory limit: the limit holds, the version is the same, and a kill leaves no partial
//! version.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use sterling::snapshot::{Manifest, Store};
use tempfile::TempDir;

use crate::support::{run, sterling};

const ITEMS: usize = 70_000;
const DIMENSION: usize = 128;
const MEMORY: &str = "128MiB";
const MEMORY_BYTES: u64 = 128 << 20;

/// Returns half-precision vectors that take 36 MB in memory, and a store.
fn items() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let number = |n: usize| half::f16::from_f32((n.wrapping_mul(0x9E37_79B9) >> 9 & 0xff) as f32 / 256.0 - 0.4);
    let numbers: Vec<half::f16> = (0..ITEMS * DIMENSION).map(number).collect();
    let mut text = format!("{{'descr': '<f2', 'fortran_order': False, 'shape': ({ITEMS}, {DIMENSION}), }}");
    text.push_str(&" ".repeat(117 - text.len()));
    let header = [b"\x93NUMPY\x01\x00\x76\x00", text.as_bytes(), b"\n"].concat();
    let bytes = [&header, bytemuck::cast_slice::<_, u8>(&numbers)].concat();
    std::fs::write(folder.path().join("vectors.npy"), bytes).unwrap();
    let ids: String =
        (0..ITEMS).map(|id| format!("{{\"id\": {}, \"attributes\": {{\"n\": {}}}}}\n", id * 3, id % 9)).collect();
    std::fs::write(folder.path().join("items.jsonl"), ids).unwrap();
    std::fs::write(folder.path().join("recipe.toml"), "[index]\nlists = 1\nsample_per_list = 1000\niterations = 1\n")
        .unwrap();
    folder
}

fn publish(folder: &Path, arguments: &[&str]) -> Child {
    let at = |name: &str| folder.join(name);
    let mut command = sterling();
    command.args(["publish", "--name", "m", "--items"]).arg(at("items.jsonl"));
    command.arg("--vectors").arg(at("vectors.npy")).arg("--index").arg(at("recipe.toml"));
    command.arg("--store").arg(at("store")).args(arguments);
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Reads the reported memory plan of a publication, which precedes training.
fn planned(process: &mut Child) -> (String, BufReader<std::process::ChildStderr>) {
    let mut reported = BufReader::new(process.stderr.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("memory: ") {
        line.clear();
        assert!(reported.read_line(&mut line).unwrap() > 0, "it ended without a plan");
    }
    (line, reported)
}

/// Returns the current anonymous memory of a process in bytes.
#[cfg(target_os = "linux")]
fn own_bytes(process: &Child) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.id())).ok()?;
    let line = status.lines().find(|line| line.starts_with("RssAnon:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kilobytes| kilobytes << 10)
}

/// Waits for a publication of vectors on disk, which must stay within its limit.
#[cfg(target_os = "linux")]
fn check_bound(mut process: Child) {
    let mut samples = Vec::new();
    let mut reported = process.stderr.take().unwrap();
    let ended = loop {
        samples.extend(own_bytes(&process));
        if let Some(ended) = process.try_wait().unwrap() {
            break ended;
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let mut text = String::new();
    std::io::Read::read_to_string(&mut reported, &mut text).unwrap();
    assert!(ended.success() && text.contains("memory: vectors on the disk, written in "), "{text}");
    let most = samples.iter().max().unwrap();
    assert!(samples.len() > 50 && *most < MEMORY_BYTES, "{most} bytes at most in {} samples", samples.len());
}

#[cfg(target_os = "linux")]
#[test]
fn the_bound_is_kept_and_the_version_is_that_of_memory() {
    let folder = items();
    check_bound(publish(folder.path(), &["--memory", MEMORY]));
    let mut complete = publish(folder.path(), &[]);
    assert!(planned(&mut complete).0.contains("vectors in memory") && complete.wait().unwrap().success());
    let files = |version: &str| Manifest::read(&folder.path().join("store/m").join(version)).unwrap().files;
    assert_eq!(files("1"), files("2"));
    // The same as two parts in files, assembled within the limit.
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::create_dir(at("items")).unwrap();
    let lines = std::fs::read_to_string(at("items.jsonl")).unwrap();
    let (first, second) = lines.split_at(lines.match_indices('\n').nth(ITEMS / 3).unwrap().0 + 1);
    std::fs::write(at("items/a.jsonl"), first).unwrap();
    std::fs::write(at("items/b.jsonl"), second).unwrap();
    let (items, vectors, recipe, parts) = (at("items"), at("vectors.npy"), at("recipe.toml"), at("parts"));
    let given = ["--name", "m", "--items", &items, "--vectors", &vectors, "--index", &recipe, "--out", &parts];
    for step in [
        &[&["parts", "embed", "--memory", MEMORY], &given[..]].concat()[..],
        &["parts", "train", &parts],
        &["parts", "assign", &parts],
    ] {
        let (code, _, log) = run(step);
        assert_eq!(code, 0, "{log}");
    }
    let mut command = sterling();
    command.args(["publish", "--parts", &parts, "--store", &at("store"), "--memory", MEMORY]);
    check_bound(command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap());
    assert_eq!(files("3"), files("1"));
}

#[test]
fn a_killed_publication_leaves_no_partial_version() {
    let folder = items();
    let store = Store::new(folder.path().join("store"));
    let mut killed = 0;
    for wait in [0, 100, 400, 900, 1600] {
        let mut process = publish(folder.path(), &["--memory", MEMORY]);
        let (plan, _said) = planned(&mut process);
        assert!(plan.contains("vectors on the disk"), "{plan}");
        std::thread::sleep(Duration::from_millis(wait));
        process.kill().unwrap();
        killed += usize::from(!process.wait().unwrap().success());
        for version in store.versions("m").unwrap() {
            let folder = store.folder("m", version);
            Manifest::read(&folder).unwrap().verify(&folder).unwrap();
        }
        // Other files in the store have no reader, and there are no leftover vectors.
        for entry in std::fs::read_dir(folder.path().join("store")).into_iter().flatten() {
            assert_eq!(entry.unwrap().file_name(), "m");
        }
    }
    assert!(killed >= 2, "{killed} were killed before they were done");
    let mut last = publish(folder.path(), &["--memory", MEMORY]);
    let (plan, mut reported) = planned(&mut last);
    let mut text = String::new();
    std::io::Read::read_to_string(&mut reported, &mut text).unwrap();
    assert!(plan.contains("vectors on the disk") && last.wait().unwrap().success(), "{plan}{text}");
    let names = std::fs::read_dir(folder.path().join("store/m")).unwrap().map(|e| e.unwrap().file_name());
    let names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
    assert!(names.iter().all(|name| !name.starts_with(".publishing")), "{names:?}");
    assert!(!store.versions("m").unwrap().is_empty());
}
