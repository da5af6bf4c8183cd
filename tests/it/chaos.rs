//! Killed servers, full disks and power losses while updates are written, merged and published: afterwards every acknowledged
//! update is present, in order, once and complete.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterling::publish::Plan;

use crate::fresh::Random;
use crate::support::{Server, output, put, sterling, vectors};

const ITEMS: &str = "/v1/models/vectors/items";
/// Items with lower ids are never deleted; only their attributes change.
const STAYING: i64 = 40;
const IDS: usize = 200;
/// Number of updates per call.
const CALL: usize = 12;

/// Effect of one update on an item: its new number, or None for a deletion.
type Change = (i64, Option<i64>);

/// State of the writes: the state at the last acknowledged position, and the call in progress.
#[derive(Clone, Debug, Default)]
struct WriteProgress {
    items: BTreeMap<i64, i64>,
    position: u64,
    open: Vec<Change>,
    calls: u64,
}

impl WriteProgress {
    fn acknowledge(&mut self, count: usize) {
        for (id, n) in self.open.drain(..).take(count) {
            match n {
                Some(n) => drop(self.items.insert(id, n)),
                None => drop(self.items.remove(&id)),
            }
            self.position += 1;
        }
        self.open.clear();
    }
}

fn line(id: i64, n: i64) -> Value {
    json!({"id": id, "embedding": [id % 7, id % 5, 1], "attributes": {"n": n}})
}

fn lines(items: &BTreeMap<i64, i64>) -> String {
    items.iter().fold(String::new(), |mut text, (id, n)| {
        let _ = writeln!(text, "{}", line(*id, *n));
        text
    })
}

/// Publishes a catalogue in `folder`, complete or in shards, and returns its content.
fn begin(folder: &Path, shards: Option<u32>) -> WriteProgress {
    let items: BTreeMap<i64, i64> = (0..STAYING).map(|id| (id, 0)).collect();
    put(&folder.join("store"), &Plan { output: output(shards), ..vectors(folder, &lines(&items)) }).unwrap();
    WriteProgress { items, ..WriteProgress::default() }
}

fn serve(folder: &Path) -> Server {
    serve_with(folder, &[])
}

fn serve_with(folder: &Path, arguments: &[&str]) -> Server {
    let mut command = sterling();
    command.env("STERLING_MERGE__SHARE", "0").env("STERLING_REFRESH_MS", "50");
    command.args(["serve", "--listen", "127.0.0.1:0", "--store"]).arg(folder.join("store"));
    Server::spawn(command.arg("--updates").arg(folder.join("updates")).args(arguments))
}

/// Posts a body; `None` if there is no answer.
fn post(address: &str, path: &str, body: &str) -> Option<(u16, Value)> {
    let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
    let request = agent.post(format!("http://{address}{path}")).header("content-type", "application/json");
    let mut response = request.send(body).ok()?;
    let text = response.body_mut().read_to_string().ok()?;
    Some((response.status().as_u16(), serde_json::from_str(&text).ok()?))
}

/// Writes calls until there is no answer or `stop` is set.
fn write(address: &str, written: &Mutex<WriteProgress>, seed: u64, stop: &AtomicBool) {
    let random = &mut Random::new(seed);
    while !stop.load(Ordering::Relaxed) {
        let (path, body, count) = {
            let mut written = written.lock().unwrap();
            let n = (written.position + 1) as i64;
            let mut ids: Vec<i64> = (0..1 + random.below(CALL)).map(|_| random.below(IDS) as i64).collect();
            ids.sort_unstable();
            ids.dedup();
            let position = written.position;
            if random.below(4) == 0 {
                ids.retain(|id| *id >= STAYING && written.items.contains_key(id));
                written.open = ids.iter().map(|id| (*id, None)).collect();
                (format!("{ITEMS}:delete?min_position={position}"), json!({"ids": ids}), ids.len())
            } else {
                written.open = ids.iter().map(|id| (*id, Some(n))).collect();
                let item = |id: &i64| if *id < STAYING { json!({"id": id, "set": {"n": n}}) } else { line(*id, n) };
                let items: Vec<Value> = ids.iter().map(item).collect();
                (format!("{ITEMS}:upsert"), json!({"items": items}), ids.len())
            }
        };
        if count == 0 {
            continue;
        }
        match post(address, &path, &body.to_string()) {
            Some((200, answer)) => {
                let mut written = written.lock().unwrap();
                assert_eq!(answer["position"].as_u64(), Some(written.position + count as u64), "{path}: {answer}");
                written.acknowledge(count);
                written.calls += 1;
            }
            // Nothing was written: the call is rejected as a whole.
            Some((503 | 504 | 507, _)) => written.lock().unwrap().open.clear(),
            Some((status, answer)) => panic!("{path}: {status} {answer}"),
            None => return,
        }
    }
}

/// Compares the state of a server with the writes, and continues from it.
fn check(server: &Server, written: &mut WriteProgress, what: &str) {
    server.wait_ready();
    let reported = server.get_json(&format!("{ITEMS}:position"));
    let durable = reported["durable"].as_u64().unwrap();
    let (least, most) = (written.position, written.position + written.open.len() as u64);
    assert!((least..=most).contains(&durable), "{what}: {durable} is durable, expected {least} to {most}");
    written.acknowledge((durable - least) as usize);
    let body = json!({"vector": [0, 0, 1], "k": 1000, "exact": true, "columns": ["n"]});
    let answer = server.ask(&format!("/v1/models/vectors:retrieve?min_position={durable}"), body);
    assert_eq!(answer["position"].as_u64(), Some(durable), "{what}");
    let n = |item: &Value| (item["id"].as_i64().unwrap(), item["columns"]["n"].as_i64().unwrap());
    let found: BTreeMap<i64, i64> = answer["items"].as_array().unwrap().iter().map(n).collect();
    assert_eq!(found, written.items, "{what}: version {}", answer["version"]);
}

/// Prints figures for runs with more rounds than the default.
fn print_figures(what: std::fmt::Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{what}").unwrap();
}

/// Returns whether a version is being written anywhere below a folder.
fn is_publishing(folder: &Path) -> bool {
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten();
    names.into_iter().any(|entry| {
        let is_staging = entry.file_name().to_string_lossy().starts_with(".publishing-");
        is_staging || is_publishing(&entry.path())
    })
}

fn publisher(folder: &Path, written: &WriteProgress, arguments: &[&str]) -> Child {
    let items = folder.join("catalogue.jsonl");
    std::fs::write(&items, lines(&written.items)).unwrap();
    let mut command = sterling();
    command.args(arguments);
    command.args(["--name", "vectors", "--position", &written.position.to_string(), "--items"]).arg(items);
    command.arg("--store").arg(folder.join("store")).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

fn merge_repeatedly(address: &str, merged: &AtomicU64) {
    while let Some((status, answer)) = post(address, &format!("{ITEMS}:merge"), "") {
        // Another publication is in progress, or the server is not ready.
        assert!([200, 409, 503].contains(&status), "{status} {answer}");
        merged.fetch_add(u64::from(status == 200), Ordering::Relaxed);
    }
}

fn kill_repeatedly(rounds: u64, shards: Option<u32>) {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let serve = || serve_with(folder.path(), if shards.is_some() { &["--shard", "0"] } else { &[] });
    let publish: &[&str] = if shards.is_some() { &["publish", "--shards", "1"] } else { &["publish"] };
    let written = Arc::new(Mutex::new(begin(folder.path(), shards)));
    let (merged, mut in_merge, mut in_publish, mut calls) = (Arc::new(AtomicU64::new(0)), 0, 0, 0);
    let random = &mut Random::new(77);
    for round in 0..rounds {
        let server = serve();
        check(&server, &mut written.lock().unwrap(), &format!("round {round}"));
        let before = written.lock().unwrap().calls;
        let publishing = (round % 3 == 2).then(|| {
            // Merges of a shard do not wait for a publication: a label keeps the version that updates follow.
            let version = &server.get_json(&format!("{ITEMS}:position"))["version"];
            let label = json!({"version": version}).to_string();
            server.send("PUT", "/v1/models/vectors/labels/export", &[("content-type", "application/json")], &label);
            publisher(folder.path(), &written.lock().unwrap(), publish)
        });
        let (address, shared, stop) = (server.address.clone(), written.clone(), Arc::new(AtomicBool::new(false)));
        let writer = std::thread::spawn(move || write(&address, &shared, round, &stop));
        let (address, counted) = (server.address.clone(), merged.clone());
        let merger = std::thread::spawn(move || merge_repeatedly(&address, &counted));
        // A kill needs activity: calls were answered, and a version is being written.
        let start = Instant::now();
        // In some rounds a merge completes first.
        let enough = merged.load(Ordering::Relaxed) + u64::from(round % 6 == 1);
        let runs = |written: &WriteProgress| written.calls >= before + 2 && merged.load(Ordering::Relaxed) >= enough;
        while !runs(&written.lock().unwrap()) || !is_publishing(folder.path()) {
            assert!(start.elapsed() < Duration::from_secs(120), "round {round}: nothing is written");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(random.below(60_000) as u64));
        server.signal("KILL");
        server.wait();
        if let Some(mut publisher) = publishing {
            let is_under_way = publisher.try_wait().unwrap().is_none();
            in_publish += u64::from(is_under_way);
            publisher.kill().unwrap();
            publisher.wait().unwrap();
        } else {
            in_merge += u64::from(is_publishing(folder.path()));
        }
        writer.join().unwrap();
        merger.join().unwrap();
        calls += written.lock().unwrap().calls - before;
    }
    let server = serve();
    check(&server, &mut written.lock().unwrap(), "at the end");
    let versions = std::fs::read_dir(store.join("vectors")).unwrap().count();
    print_figures(format_args!(
        "{rounds} kills, {in_merge} in a merge, {in_publish} in a publication; {calls} calls, {} merges, {} updates, {versions} \
         files and folders of the model",
        merged.load(Ordering::Relaxed),
        written.lock().unwrap().position
    ));
    assert!(in_merge >= rounds / 20 && merged.load(Ordering::Relaxed) > 0, "{in_merge} kills hit a merge");
}

#[test]
#[ignore = "long: kills servers again and again"]
fn nothing_is_lost_or_twice_when_a_server_is_killed_in_merges_and_publications() {
    // A thousand kills take long: `scripts/kill_journal.sh`.
    let kills = std::env::var("STERLING_TEST_MERGE_KILLS").ok().and_then(|count| count.parse().ok());
    kill_repeatedly(kills.unwrap_or(12), None);
}

#[test]
#[ignore = "long: kills servers again and again"]
fn nothing_is_lost_or_twice_when_the_server_of_a_shard_is_killed_in_merges_and_publications() {
    let kills = std::env::var("STERLING_TEST_MERGE_KILLS").ok().and_then(|count| count.parse().ok());
    kill_repeatedly(kills.unwrap_or(8), Some(1));
}

fn done(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A file system in a file, unmounted when the value is dropped.
struct Mounted {
    at: PathBuf,
}

impl Mounted {
    fn of(image: &Path, at: PathBuf) -> Self {
        std::fs::create_dir_all(&at).unwrap();
        done(Command::new("mount").args(["-o", "loop,noatime,commit=60"]).arg(image).arg(&at));
        Mounted { at }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.at).output();
    }
}

/// Simulates repeated power losses: only the file of a mounted file system is left, without the page cache of the kernel. The
/// server is stopped during the copy, so that the copy is of one instant.
fn lose_power(rounds: u64) {
    let folder = tempfile::tempdir().unwrap();
    let (image, copy) = (folder.path().join("disk"), folder.path().join("copy"));
    std::fs::File::create(&image).unwrap().set_len(96 << 20).unwrap();
    done(Command::new("mkfs.ext4").arg("-Fq").arg(&image));
    let disk = Mounted::of(&image, folder.path().join("mounted"));
    let written = Arc::new(Mutex::new(begin(&disk.at, None)));
    done(&mut Command::new("sync"));
    let (random, merged, mut in_merge) = (&mut Random::new(5), Arc::new(AtomicU64::new(0)), 0);
    let server = serve(&disk.at);
    server.wait_ready();
    let (address, shared, stop) = (server.address.clone(), written.clone(), Arc::new(AtomicBool::new(false)));
    let writer = std::thread::spawn(move || write(&address, &shared, 9, &stop));
    let (address, counted) = (server.address.clone(), merged.clone());
    let merger = std::thread::spawn(move || merge_repeatedly(&address, &counted));
    for round in 0..rounds {
        let before = written.lock().unwrap().calls;
        let start = Instant::now();
        while written.lock().unwrap().calls < before + 3 {
            assert!(start.elapsed() < Duration::from_secs(60), "nothing is written");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(random.below(300_000) as u64));
        server.signal("STOP");
        std::thread::sleep(Duration::from_millis(5));
        let mut expected = written.lock().unwrap().clone();
        std::fs::copy(&image, &copy).unwrap();
        server.signal("CONT");
        let after = Mounted::of(&copy, folder.path().join(format!("after {round}")));
        in_merge += u64::from(is_publishing(&after.at));
        let again = serve(&after.at);
        check(&again, &mut expected, &format!("power loss {round}"));
        // The restored server accepts updates.
        let (path, body) = (format!("{ITEMS}:upsert"), json!({"items": [line(1, 1)]}).to_string());
        assert_eq!(post(&again.address, &path, &body).unwrap().0, 200);
        drop(again);
    }
    server.signal("KILL");
    server.wait();
    writer.join().unwrap();
    merger.join().unwrap();
    let position = written.lock().unwrap().position;
    let merged = merged.load(Ordering::Relaxed);
    print_figures(format_args!("{rounds} losses, {in_merge} in a merge; {merged} merges, {position} updates"));
}

#[test]
#[ignore = "long: needs root and loop devices, `scripts/power_loss.sh`"]
fn nothing_that_was_acknowledged_is_lost_when_the_power_goes() {
    // Needs root and loop devices: `scripts/power_loss.sh`. `crates/journal/src/tests.rs` tests every prefix of a log.
    let Some(rounds) = std::env::var("STERLING_TEST_POWER_LOSSES").ok().and_then(|count| count.parse().ok()) else {
        return;
    };
    lose_power(rounds);
}

#[test]
fn a_merge_on_a_full_disk_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    std::fs::create_dir(&store).unwrap();
    let line =
        |n: usize| format!("{{\"id\": {n}, \"embedding\": [1, {n}], \"attributes\": {{\"title\": \"{n:0500}\"}}}}\n");
    put(&store, &vectors(folder.path(), &(1..2000).map(line).collect::<String>())).unwrap();
    let mut command = Command::new("sh");
    let script = "trap '' XFSZ; ulimit -f $1; shift; exec \"$@\"";
    command.args(["-c", script, "sh", "96", env!("CARGO_BIN_EXE_sterling"), "serve", "--listen", "127.0.0.1:0"]);
    command.arg("--store").arg(&store).arg("--updates").arg(folder.path().join("updates"));
    command.env("STERLING_MERGE__SHARE", "0").env_remove("STERLING_LOG").stdin(Stdio::null());
    let server = Server::spawn(&mut command);
    server.wait_ready();
    let items = json!({"items": [{"id": 5, "embedding": [1, 0], "attributes": {"title": "new"}}]}).to_string();
    assert_eq!(post(&server.address, "/v1/models/vectors/items:upsert", &items).unwrap().0, 200);
    let (status, problem) = post(&server.address, "/v1/models/vectors/items:merge", "").unwrap();
    assert_eq!((status, problem["code"].as_str()), (507, Some("insufficient_storage")), "{problem}");
    assert!(!problem["detail"].as_str().unwrap().contains(folder.path().to_str().unwrap()), "{problem}");
}

#[test]
fn a_full_disk_rejects_updates_only() {
    let folder = tempfile::tempdir().unwrap();
    let mut written = begin(folder.path(), None);
    // Limits the size of files that the server writes. The limit needs no privileges, and is reported like a full disk.
    let mut command = Command::new("sh");
    let script = "trap '' XFSZ; ulimit -f $1; shift; exec \"$@\"";
    command.args(["-c", script, "sh", "96", env!("CARGO_BIN_EXE_sterling"), "serve", "--listen", "127.0.0.1:0"]);
    command.arg("--store").arg(folder.path().join("store")).arg("--updates").arg(folder.path().join("updates"));
    command.env("STERLING_MERGE__SHARE", "0").env_remove("STERLING_LOG").stdin(Stdio::null());
    let server = Server::spawn(&mut command);
    server.wait_ready();
    let mut refused = 0;
    for call in 1..200 {
        let n = written.position as i64 + 1;
        let items: Vec<Value> = (0..CALL as i64).map(|id| json!({"id": id, "set": {"n": n}})).collect();
        written.open = (0..CALL as i64).map(|id| (id, Some(n))).collect();
        let (status, answer) =
            post(&server.address, &format!("{ITEMS}:upsert"), &json!({"items": items}).to_string()).unwrap();
        match status {
            200 => written.acknowledge(CALL),
            _ => {
                assert_eq!(
                    (status, answer["code"].as_str()),
                    (507, Some("insufficient_storage")),
                    "call {call}: {answer}"
                );
                written.open.clear();
                refused += 1;
            }
        }
        if refused == 3 {
            break;
        }
    }
    assert!(refused == 3 && written.position > 0, "{refused} rejected, {} written", written.position);
    // Reads continue, and the server stays ready.
    check(&server, &mut written, "beside a full disk");
    server.signal("KILL");
    server.wait();
    // With free space it continues, and has lost nothing.
    let server = serve(folder.path());
    check(&server, &mut written, "with room again");
    let (path, body) = (format!("{ITEMS}:upsert"), json!({"items": [line(1, 1)]}).to_string());
    assert_eq!(post(&server.address, &path, &body).unwrap().0, 200);
}
