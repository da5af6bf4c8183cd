//! `sterling train`: turns a package and events into a package that serves, also if it is interrupted.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

const TRAIN: &str = "\n[train]\nlabel = \"click\"\nbatch = 16\nuniform = 8\ntemperature = 0.2\n";

/// A trainable package, and events of users who take the package after the one they have.
pub(super) struct TestFolder {
    folder: tempfile::TempDir,
}

impl TestFolder {
    fn new(events: u64) -> Self {
        TestFolder::with(TRAIN, events)
    }

    /// Creates a package whose `[train]` is `train`.
    pub(super) fn with(train: &str, events: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tiny");
        let package = folder.path().join("package");
        fs::create_dir(&package).unwrap();
        for entry in fs::read_dir(golden).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, package.join(path.file_name().unwrap())).unwrap();
        }
        let model = fs::read_to_string(package.join("model.toml")).unwrap();
        fs::write(package.join("model.toml"), model + train).unwrap();
        let event = |n: u64| {
            let has = (n * 7 + n / 11) % 11;
            let user = json!({"installed": [has], "section": "games", "size": [0.5, 0.25, 0.125]});
            format!("{}\n", json!({"id": n, "user": user, "item": has + 1, "labels": {"click": 1}}))
        };
        fs::write(folder.path().join("events.jsonl"), (0..events).map(event).collect::<String>()).unwrap();
        TestFolder { folder }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(super) fn command(&self, flags: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sterling"));
        command.current_dir(self.folder.path()).args(["train", "package", "--events", "events.jsonl"]).args(flags);
        command
    }

    /// Runs to the end; returns the report.
    fn report(&self, flags: &[&str]) -> Value {
        let done = self.command(flags).output().unwrap();
        assert!(done.status.success(), "{flags:?}: {}", String::from_utf8_lossy(&done.stderr));
        let said = String::from_utf8(done.stdout).unwrap();
        serde_json::from_str(said.lines().last().unwrap()).unwrap()
    }

    fn refused(&self, flags: &[&str], code: i32) -> String {
        let done = self.command(flags).output().unwrap();
        let said = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(code), "{flags:?}: {said}");
        said
    }
}

pub(super) fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap())).collect()
}

#[test]
fn trained_packages_are_published_and_the_report_is_the_last_line() {
    let place = TestFolder::new(3000);
    let report = place.report(&["--out", "learned"]);
    assert_eq!((report["events"].as_u64(), report["judged"].as_u64()), (Some(3000), Some(3000)));
    assert!(report["events_per_second"].as_f64().unwrap() > 0.0);
    let figure = |who: &str, what: &str| report[who][what].as_f64().unwrap();
    for what in ["ndcg@10", "hr@10"] {
        for who in ["learned", "frozen", "popularity"] {
            assert!((0.0..=1.0).contains(&figure(who, what)), "{who} {what}");
        }
        assert!(figure("learned", what) >= figure("frozen", what), "{report}");
    }
    assert!(place.refused(&["--out", "learned"], 2).contains("--out learned: it exists"));
    assert!(place.refused(&["--out", "o", "--device", "gpu"], 2).contains("device: got `gpu`"));
    // Fails for lack of the feature, the driver or the GPU, before anything is written.
    let done = place.command(&["--out", "o", "--device", "cuda:99"]).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(!done.status.success() && said.contains("--device") && said.contains("cuda"), "{said}");
    assert!(!place.path("o.train").exists());
    // The same with --publish, and from standard input.
    let piped = Command::new(env!("CARGO_BIN_EXE_sterling"))
        .current_dir(place.folder.path())
        .args(["train", "package", "--events", "-", "--publish", "--store", "store"])
        .stdin(fs::File::open(place.path("events.jsonl")).unwrap())
        .output()
        .unwrap();
    let said = String::from_utf8(piped.stdout).unwrap();
    assert!(piped.status.success(), "{}", String::from_utf8_lossy(&piped.stderr));
    assert!(said.starts_with("published tiny version 1\n"), "{said}");
    assert!(place.path("store/tiny/1/queries.jsonl").exists());
    let version = files(&place.path("store/tiny/1"));
    let learned = files(&place.path("learned"));
    for name in ["user.onnx", "item.onnx", "tables.safetensors"] {
        assert!(version[name] == learned[name], "{name}");
        assert!(learned[name] != fs::read(place.path("package").join(name)).unwrap(), "{name} learned nothing");
    }
    // A run that was killed after it had published finds its version; one that was killed before publishes.
    for (newest_before, expected) in [("0", 1), ("1", 2)] {
        fs::create_dir_all(place.path("work")).unwrap();
        fs::write(place.path("work/publishing"), newest_before).unwrap();
        let done = place.command(&["--publish", "--store", "store", "--work", "work"]).output().unwrap();
        let said = String::from_utf8(done.stdout).unwrap();
        assert!(said.starts_with(&format!("published tiny version {expected}\n")), "{said}");
        assert!(!place.path("work").exists(), "{said}");
        assert_eq!(place.path("store/tiny/2").exists(), expected == 2);
    }
    // The trained package can be published without changes, and requests of its events calibrate the recall.
    fs::write(place.path("recipe.toml"), "[index]\nlists = 4\n").unwrap();
    let published = Command::new(env!("CARGO_BIN_EXE_sterling"))
        .current_dir(place.folder.path())
        .args(["publish", "learned", "--store", "store", "--index", "recipe.toml"])
        .output()
        .unwrap();
    assert!(published.status.success(), "{}", String::from_utf8_lossy(&published.stderr));
    let said = String::from_utf8(published.stdout).unwrap();
    assert!(said.contains("recall calibrated by 13 queries: queries.jsonl\n"), "{said}");
    assert!(files(&place.path("store/tiny/3"))["tables.safetensors"] == learned["tables.safetensors"]);
}

#[test]
fn a_file_size_limit_is_reported() {
    let place = TestFolder::new(100);
    let limited = Command::new("sh")
        .current_dir(place.folder.path())
        .args(["-c", "ulimit -f 1; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_sterling")])
        .args(["train", "package", "--events", "events.jsonl", "--out", "out"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&limited.stderr);
    assert!(limited.status.code().is_some_and(|code| code > 0), "{:?}: {said}", limited.status);
    assert!(said.contains("File too large"), "{said}");
    assert!(!place.path("out").exists());
}

#[test]
fn impossible_commands_are_rejected() {
    let place = TestFolder::new(10);
    assert!(place.refused(&["--out", "out", "--epochs", "0"], 2).contains("epochs: got 0"));
    assert!(place.refused(&["--out", "out", "--items", "none.jsonl"], 2).contains("none.jsonl"));
    assert!(place.refused(&["--out", "out", "--max-refused", "many"], 2).contains("expected a number of rows"));
    assert!(place.refused(&[], 2).contains("--out"));
    fs::write(place.path("events.jsonl"), "{}\n".repeat(20)).unwrap();
    let said = place.refused(&["--out", "out"], 2);
    assert!(said.contains("20 of 20 events were rejected") && said.contains("out.train/quarantine.jsonl"), "{said}");
    assert!(!place.path("out").exists());
}

/// Starts a run that writes checkpoints all the time.
fn started(place: &TestFolder, out: &str) -> Child {
    let flags = ["--out", out, "--checkpoint-steps", "7", "--epochs", "2", "--shuffle", "500"];
    place.command(&flags).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// Kills runs at `kills` moments, resumes each as often as necessary, and compares the output with that of an uninterrupted run.
fn killed(kills: u64) {
    let place = TestFolder::new(4000);
    let start = Instant::now();
    assert!(started(&place, "expected").wait().unwrap().success());
    let complete = start.elapsed();
    let expected = files(&place.path("expected"));
    let (mut done, mut run, mut resumed, mut tries) = (0, 0, 0, 0u64);
    while done < kills {
        let out = format!("out{run}");
        while !place.path(&out).exists() {
            let mut child = started(&place, &out);
            // A pseudo-random moment of the run: 61 is coprime to its 100 parts.
            let moment = complete.mul_f64(((tries * 61 + 13) % 100) as f64 / 100.0);
            tries += 1;
            let started = Instant::now();
            while started.elapsed() < moment && child.try_wait().unwrap().is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            if child.try_wait().unwrap().is_none() && done < kills {
                child.kill().unwrap();
                child.wait().unwrap();
                done += 1;
                resumed += u64::from(
                    fs::read_dir(place.path(&format!("{out}.train"))).is_ok_and(|mut at| at.next().is_some()),
                );
            } else {
                assert!(child.wait().unwrap().success());
            }
        }
        assert!(files(&place.path(&out)) == expected, "{done} kills: other bits");
        fs::remove_dir_all(place.path(&out)).unwrap();
        run += 1;
    }
    assert!(resumed > 0, "no run was killed between two checkpoints");
}

#[test]
fn a_process_killed_at_any_moment_resumes_to_the_same_bits() {
    killed(5);
}

#[test]
#[ignore = "long: 200 kills"]
fn a_process_killed_at_200_moments_resumes_to_the_same_bits() {
    killed(200);
}
