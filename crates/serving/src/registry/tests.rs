//! Tests of the registry with a scripted loader: slow, failing, panicking.

#![allow(clippy::unwrap_used)]

mod desired;
mod traffic;
mod troubles;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use sterling_core::error::{Error, Kind, Result};
use sterling_core::locks::locked;
use sterling_core::request::VersionSelector;
use sterling_kernels::priority::Background;
use sterling_snapshot::Store;

type Behaviour = dyn Fn(&str, u64, usize) -> Result<()> + Send + Sync;

/// Loader that returns the content of the `text` file, after running the test's script. The text identifies a version.
#[derive(Clone)]
struct TestLoader {
    before: Arc<Behaviour>,
    /// Attempted loads, by model and version.
    tried: Arc<Mutex<Vec<(String, u64)>>>,
    running: Arc<AtomicUsize>,
    most_running: Arc<AtomicUsize>,
}

impl TestLoader {
    fn to(before: impl Fn(&str, u64, usize) -> Result<()> + Send + Sync + 'static) -> Self {
        TestLoader {
            before: Arc::new(before),
            tried: Arc::default(),
            running: Arc::default(),
            most_running: Arc::default(),
        }
    }

    fn tried(&self, name: &str, version: u64) -> usize {
        locked(&self.tried).iter().filter(|(n, v)| (n.as_str(), *v) == (name, version)).count()
    }

    fn tried_in_all(&self) -> usize {
        locked(&self.tried).len()
    }
}

impl Loader<String> for TestLoader {
    fn declared(&self, folder: &Path) -> Result<Declared> {
        let text = fs::read_to_string(folder.join("manifest.json")).map_err(|e| Error::io(folder.display(), e))?;
        let words: Vec<&str> = text.split(' ').collect();
        let [name, version, digest, bytes] = words[..] else { return Err(Error::corrupt("not four words")) };
        Ok(Declared {
            name: name.into(),
            version: version.parse().unwrap(),
            digest: digest.into(),
            memory_bytes: bytes.parse().unwrap(),
        })
    }

    fn load(&self, folder: &Path, _: Background) -> Result<String> {
        let Declared { name, version, .. } = self.declared(folder)?;
        locked(&self.tried).push((name.clone(), version));
        let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_running.fetch_max(running, Ordering::SeqCst);
        let before = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            (self.before)(&name, version, self.tried(&name, version))
        }));
        self.running.fetch_sub(1, Ordering::SeqCst);
        before.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        fs::read_to_string(folder.join("text")).map_err(|_| Error::corrupt("file `text` is missing"))
    }
}

struct Bed {
    folder: tempfile::TempDir,
    reported: TestLoader,
    registry: Arc<Registry<String>>,
}

impl Bed {
    fn new(before: impl Fn(&str, u64, usize) -> Result<()> + Send + Sync + 'static) -> Self {
        Bed::with(before, Options::default())
    }

    fn with(before: impl Fn(&str, u64, usize) -> Result<()> + Send + Sync + 'static, options: Options) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let reported = TestLoader::to(before);
        let retry = (Duration::from_millis(40), Duration::from_millis(160));
        let options = Options { retry, ..options };
        let registry = Arc::new(Registry::new(Store::new(folder.path().join("store")), reported.clone(), options));
        Bed { folder, reported, registry }
    }

    fn obedient() -> Self {
        Bed::new(|_, _, _| Ok(()))
    }

    fn path(&self, name: &str, version: u64) -> PathBuf {
        self.folder.path().join(format!("store/{name}/{version}"))
    }

    /// Publishes as a store does: writes to a staging folder, then renames it.
    fn publish(&self, name: &str, version: u64, text: &str, bytes: u64) {
        let staging = self.folder.path().join("staging");
        fs::create_dir_all(&staging).unwrap();
        fs::write(staging.join("text"), text).unwrap();
        fs::write(staging.join("manifest.json"), format!("{name} {version} {text} {bytes}")).unwrap();
        fs::create_dir_all(self.path(name, version).parent().unwrap()).unwrap();
        fs::rename(staging, self.path(name, version)).unwrap();
    }

    fn put(&self, name: &str, version: u64, text: &str) {
        self.publish(name, version, text, 0);
        self.registry.refresh();
    }

    fn remove(&self, name: &str, version: u64) {
        fs::remove_dir_all(self.path(name, version)).unwrap();
        self.registry.refresh();
    }

    /// Returns the answering version and its text.
    fn answer(&self, name: &str, which: VersionSelector<'_>) -> Option<(u64, String)> {
        self.registry.get(name, which).ok().map(|l| (l.version(), String::clone(l.content())))
    }

    fn active(&self, name: &str) -> (u64, String) {
        self.answer(name, VersionSelector::Active).unwrap()
    }

    fn in_memory(&self, name: &str) -> Vec<u64> {
        self.registry.versions(name).unwrap().iter().filter(|v| v.loaded).map(|v| v.version).collect()
    }

    fn refused(&self, name: &str, version: u64) -> Option<VersionRejection> {
        self.registry.versions(name).unwrap().into_iter().find(|v| v.version == version)?.refused
    }
}

fn is(version: u64, text: &str) -> (u64, String) {
    (version, text.to_owned())
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what} did not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn model_names_never_leave_the_store() {
    let bed = Bed::obedient();
    bed.put("m", 1, "a");
    let walking = ["../outside/private", "m/../m", "m/.", "/absolute", "..", ".", "", "x\0y", "x\ny", &"x".repeat(300)];
    for name in walking {
        // Writes a version outside of the store, under the name that a path traversal leads to.
        let elsewhere = bed.folder.path().join("store").join(name).join("1");
        if !name.contains(['\0', '\n']) && name.len() < 256 && name.contains("outside") {
            fs::create_dir_all(bed.folder.path().join("store")).unwrap();
            fs::create_dir_all(&elsewhere).unwrap();
            fs::write(elsewhere.join("text"), "theirs").unwrap();
            fs::write(elsewhere.join("manifest.json"), format!("{name} 1 theirs 0")).unwrap();
        }
        for outcome in [bed.registry.load(name, 1).map(drop), bed.registry.activate(name, 1).map(drop)] {
            assert_eq!(outcome.unwrap_err().kind(), Kind::NotFound, "{name:?}");
        }
        assert_eq!(bed.registry.versions(name).unwrap_err().kind(), Kind::NotFound, "{name:?}");
        assert_eq!(
            bed.registry.get(name, VersionSelector::Active).map(drop).unwrap_err().kind(),
            Kind::NotFound,
            "{name:?}"
        );
    }
    assert_eq!(bed.reported.tried_in_all(), 1, "nothing but the published version was read");
    assert_eq!(bed.registry.list().len(), 1);
    assert_eq!(
        bed.registry.entries.load().keys().collect::<Vec<_>>(),
        ["m"],
        "no entry is kept of a name that leads nowhere"
    );
}

#[test]
fn a_model_is_not_found_only_after_the_first_listing() {
    let (go, wait) = channel::<()>();
    let wait = Mutex::new(wait);
    let bed = Bed::new(move |_, _, _| locked(&wait).recv().map_err(|e| Error::internal(e.to_string())));
    bed.publish("shop", 3, "text", 1);
    let kind = |name: &str, which| bed.registry.get(name, which).map(drop).map_err(|e| e.kind());
    let all = [VersionSelector::Active, VersionSelector::Version(3), VersionSelector::Label("old")];
    for name in ["shop", "other"] {
        assert_eq!(all.map(|which| kind(name, which)), [Err(Kind::NotReady); 3], "{name}: the store was not read");
    }
    bed.registry.watch(Duration::from_secs(600)).unwrap();
    let start = Instant::now();
    while kind("other", VersionSelector::Active) == Err(Kind::NotReady) && start.elapsed() < Duration::from_secs(60) {
        assert_eq!(kind("shop", VersionSelector::Active), Err(Kind::NotReady));
    }
    assert_eq!(kind("other", VersionSelector::Active), Err(Kind::NotFound));
    assert_eq!(all.map(|which| kind("shop", which)), [Err(Kind::NotReady); 3], "it is being loaded");
    go.send(()).unwrap();
    while kind("shop", VersionSelector::Active).is_err() && start.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(all.map(|which| kind("shop", which)), [Ok(()), Ok(()), Err(Kind::NotFound)]);
}

#[test]
fn the_newest_version_answers_and_a_rollback_lasts_until_a_newer_one() {
    let bed = Bed::obedient();
    for version in 1..=3 {
        bed.put("m", version, &format!("t{version}"));
    }
    assert_eq!((bed.active("m"), bed.in_memory("m")), (is(3, "t3"), vec![2, 3]));
    assert_eq!(bed.registry.activate("m", 1).unwrap().version(), 1);
    bed.registry.refresh();
    assert_eq!((bed.active("m"), bed.in_memory("m")), (is(1, "t1"), vec![1, 3]));
    let tried = bed.reported.tried_in_all();
    bed.registry.activate("m", 3).unwrap();
    bed.registry.activate("m", 1).unwrap();
    assert_eq!(bed.reported.tried_in_all(), tried, "both were in memory");
    bed.remove("m", 3);
    assert_eq!(bed.active("m"), is(1, "t1"));
    bed.put("m", 4, "t4");
    assert_eq!((bed.active("m"), bed.in_memory("m")), (is(4, "t4"), vec![1, 4]));
    // An older version that is published late changes nothing.
    bed.put("m", 3, "late");
    assert_eq!((bed.active("m"), bed.reported.tried("m", 3)), (is(4, "t4"), 1));
}

#[test]
fn the_first_poll_loads_the_newest_loadable_version() {
    let bed = Bed::new(|_, version, _| if version > 2 { Err(Error::corrupt("no")) } else { Ok(()) });
    for version in 1..=4 {
        bed.publish("m", version, "t", 0);
    }
    bed.registry.refresh();
    assert_eq!(bed.active("m").0, 2);
    assert_eq!(bed.reported.tried("m", 1), 0);
    bed.registry.refresh();
    assert_eq!(bed.reported.tried_in_all(), 3, "a corrupt version stays rejected while its folder does not change");
}

#[test]
fn a_version_is_its_bytes_and_not_only_its_number() {
    let bed = Bed::obedient();
    bed.put("m", 1, "one");
    bed.put("m", 2, "two");
    bed.remove("m", 2);
    assert_eq!(bed.active("m"), is(2, "two"), "the version in memory keeps serving");
    bed.put("m", 2, "three");
    assert_eq!(bed.active("m"), is(2, "three"));
    // A call by an operator sees it too, before any poll.
    bed.publish("m", 3, "four", 0);
    bed.registry.refresh();
    fs::remove_dir_all(bed.path("m", 3)).unwrap();
    bed.publish("m", 3, "five", 0);
    assert_eq!(**bed.registry.activate("m", 3).unwrap().content(), "five");
    // Pins, labels and rollbacks use the new bytes too.
    bed.registry.activate("m", 2).unwrap();
    bed.registry.label("m", "stable", 2).unwrap();
    fs::remove_dir_all(bed.path("m", 2)).unwrap();
    bed.put("m", 2, "six");
    for which in [VersionSelector::Active, VersionSelector::Version(2), VersionSelector::Label("stable")] {
        assert_eq!(bed.answer("m", which), Some(is(2, "six")), "{which:?}");
    }
}

#[test]
fn a_recreated_store_is_loaded_and_a_returning_one_changes_nothing() {
    let bed = Bed::obedient();
    for version in 1..=3 {
        bed.put("m", version, &format!("t{version}"));
    }
    let (store, away) = (bed.folder.path().join("store"), bed.folder.path().join("away"));
    let tried = bed.reported.tried_in_all();
    fs::rename(&store, &away).unwrap();
    bed.registry.refresh();
    assert_eq!((bed.active("m"), bed.registry.ready().is_ok()), (is(3, "t3"), true));
    assert_eq!(bed.registry.activate("m", 2).unwrap().version(), 2, "rolling back needs no store");
    fs::rename(&away, &store).unwrap();
    bed.registry.refresh();
    assert_eq!((bed.active("m"), bed.reported.tried_in_all()), (is(2, "t2"), tried));
    // The versions are copied back with other inodes: their bytes identify them.
    fs::rename(&store, &away).unwrap();
    for version in 1..=3 {
        let text = fs::read_to_string(away.join(format!("m/{version}/text"))).unwrap();
        bed.put("m", version, &text);
        assert_eq!(bed.active("m"), is(2, "t2"), "version {version} is back");
    }
    assert_eq!(bed.reported.tried("m", 1), 1);
    // Another store in its place starts again at version 1.
    fs::remove_dir_all(&store).unwrap();
    bed.put("m", 1, "anew");
    assert_eq!(bed.active("m"), is(1, "anew"));
}

#[test]
fn a_copied_folder_is_rejected_once() {
    let bed = Bed::obedient();
    bed.put("shop", 1, "one");
    bed.put("shop", 2, "two");
    for (from, name, version) in [(2, "shop-old", 2), (1, "shop", 3)] {
        fs::create_dir_all(bed.path(name, version)).unwrap();
        for file in ["text", "manifest.json"] {
            fs::copy(bed.path("shop", from).join(file), bed.path(name, version).join(file)).unwrap();
        }
        for _ in 0..3 {
            bed.registry.refresh();
        }
        let refused = bed.refused(name, version).unwrap();
        assert_eq!((refused.kind, refused.attempts, refused.retry_in), (Kind::Corrupt, 1, None));
        assert!(refused.reason.contains(&format!("expected `{name}` version {version}")), "{}", refused.reason);
    }
    assert_eq!((bed.active("shop"), bed.reported.tried_in_all()), (is(2, "two"), 2));
    assert_eq!(bed.registry.get("shop-old", VersionSelector::Active).unwrap_err().kind(), Kind::NotReady);
    fs::remove_dir_all(bed.folder.path().join("store/shop-old")).unwrap();
    bed.registry.refresh();
    assert_eq!(bed.registry.get("shop-old", VersionSelector::Active).unwrap_err().kind(), Kind::NotFound);
}

#[test]
fn transient_failures_are_retried_with_growing_delay() {
    let bed = Bed::new(|_, version, attempt| match (version, attempt) {
        (2, 1..=3) => Err(Error::unavailable("the cluster is away")),
        _ => Ok(()),
    });
    bed.put("m", 1, "one");
    bed.put("m", 2, "two");
    bed.registry.refresh();
    assert_eq!((bed.active("m").0, bed.reported.tried("m", 2)), (1, 1), "not again at once");
    let first = bed.refused("m", 2).unwrap();
    assert!(first.retry_in.unwrap() <= Duration::from_millis(40), "{first:?}");
    let start = Instant::now();
    eventually("version 2", || {
        bed.registry.refresh();
        bed.active("m").0 == 2
    });
    // Delays of 40, 80 and 160 ms, each reduced by up to a fifth.
    assert!(start.elapsed() >= Duration::from_millis(200), "{:?}", start.elapsed());
    assert_eq!((bed.reported.tried("m", 2), bed.refused("m", 2)), (4, None));
    assert_eq!(bed.reported.tried("m", 1), 1);
}

#[test]
fn rejected_versions_are_retried_when_their_folder_changes() {
    let bed = Bed::new(|_, _, attempt| if attempt == 1 { Err(Error::unavailable("away")) } else { Ok(()) });
    bed.publish("m", 1, "one", 0);
    bed.registry.refresh();
    fs::write(bed.path("m", 1).join("more"), "x").unwrap();
    bed.registry.refresh();
    assert_eq!(bed.active("m").0, 1);
    // Copies the folder file by file, the manifest first.
    fs::create_dir_all(bed.path("m", 2)).unwrap();
    fs::write(bed.path("m", 2).join("manifest.json"), "m 2 two 0").unwrap();
    for _ in 0..3 {
        bed.registry.refresh();
    }
    assert_eq!((bed.active("m").0, bed.refused("m", 2).unwrap().kind), (1, Kind::Unavailable));
    fs::write(bed.path("m", 2).join("text"), "two").unwrap();
    bed.registry.refresh();
    assert_eq!(bed.active("m"), is(2, "two"));
}

#[test]
fn a_folder_that_changes_during_its_load_is_rejected_and_loaded_again() {
    let folder = Arc::new(Mutex::new(PathBuf::new()));
    let written = folder.clone();
    let bed = Bed::new(move |_, _, attempt| {
        if attempt == 1 {
            fs::write(locked(&written).join("text"), "changed").unwrap();
        }
        Ok(())
    });
    *locked(&folder) = bed.path("m", 1);
    bed.publish("m", 1, "one", 0);
    bed.registry.refresh();
    assert!(bed.refused("m", 1).unwrap().reason.contains("changed while it was loaded"));
    bed.registry.refresh();
    assert_eq!(bed.active("m"), is(1, "changed"));
}

/// Blocks the load of this version until the returned sender is used.
fn held(name: &'static str, version: u64) -> (Sender<()>, impl Fn(&str, u64, usize) -> Result<()> + Send + Sync) {
    let (go, wait): (Sender<()>, Receiver<()>) = channel();
    let wait = Mutex::new(wait);
    let hold = move |n: &str, v: u64, _: usize| {
        if (n, v) == (name, version) {
            locked(&wait).recv_timeout(Duration::from_secs(20)).unwrap();
        }
        Ok(())
    };
    (go, hold)
}

#[test]
fn a_slow_load_delays_no_other_and_overrides_no_operator() {
    let (go, hold) = held("slow", 3);
    let bed = Bed::new(hold);
    bed.put("slow", 1, "one");
    bed.put("slow", 2, "two");
    bed.publish("slow", 3, "three", 0);
    bed.registry.watch(Duration::from_millis(5)).unwrap();
    eventually("the slow load", || bed.reported.tried("slow", 3) == 1);
    bed.publish("quick", 1, "q", 0);
    eventually("the other model", || bed.answer("quick", VersionSelector::Active).is_some());
    assert_eq!(bed.registry.activate("slow", 1).unwrap().version(), 1);
    assert_eq!(bed.active("slow"), is(1, "one"));
    go.send(()).unwrap();
    eventually("the end of the load", || {
        bed.in_memory("slow").contains(&3) || bed.reported.running.load(Ordering::SeqCst) == 0
    });
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(bed.active("slow"), is(1, "one"), "the operator decided after it was published");
    assert_eq!(bed.reported.tried("slow", 3), 1);
}

#[test]
fn loads_that_run_side_by_side_are_bounded() {
    let bed = Bed::new(|_, _, _| {
        std::thread::sleep(Duration::from_millis(30));
        Ok(())
    });
    for model in 0..6 {
        bed.publish(&format!("m{model}"), 1, "t", 0);
    }
    bed.registry.refresh();
    assert_eq!(bed.registry.list().len(), 6);
    assert_eq!(bed.reported.most_running.load(Ordering::SeqCst), Options::default().loads);
}

#[test]
fn a_panic_in_a_load_is_a_rejection() {
    let bed = Bed::new(|_, version, _| if version == 2 { panic!("a broken graph") } else { Ok(()) });
    bed.put("m", 1, "one");
    bed.publish("m", 2, "two", 0);
    bed.registry.watch(Duration::from_millis(5)).unwrap();
    eventually("the rejection", || bed.refused("m", 2).is_some_and(|refused| refused.retry_in.is_none()));
    let refused = bed.refused("m", 2).unwrap();
    assert_eq!((refused.kind, refused.attempts), (Kind::Internal, 3));
    assert!(refused.reason.contains("a broken graph"), "{}", refused.reason);
    bed.publish("m", 3, "three", 0);
    eventually("the next version", || bed.active("m").0 == 3);
    assert_eq!(bed.reported.tried("m", 2), 3);
}

#[test]
fn a_load_that_panics_once_is_tried_again() {
    // Transient failures do not count as panics, however often they occur.
    let bed = Bed::new(|_, _, nth| match nth {
        1..=3 => Err(Error::unavailable("not yet")),
        4 => panic!("for a moment"),
        _ => Ok(()),
    });
    bed.publish("m", 1, "one", 0);
    bed.registry.watch(Duration::from_millis(5)).unwrap();
    eventually("the version", || bed.answer("m", VersionSelector::Active).is_some());
    assert_eq!((bed.reported.tried("m", 1), bed.refused("m", 1)), (5, None));
}

#[test]
fn memory_is_planned_before_a_load() {
    let bed = Bed::with(|_, _, _| Ok(()), Options { memory_bytes: Some(100 << 20), ..Options::default() });
    for (version, megabytes) in [(1, 30), (2, 40), (3, 60)] {
        bed.publish("m", version, "t", megabytes << 20);
        bed.registry.refresh();
        assert_eq!(bed.active("m").0, version);
    }
    assert_eq!(bed.in_memory("m"), [2, 3], "100 MB are full");
    let running = bed.registry.get("m", VersionSelector::Version(2)).unwrap();
    bed.publish("m", 4, "t", 40 << 20);
    bed.registry.refresh();
    let refused = bed.refused("m", 4).unwrap();
    assert_eq!((refused.kind, bed.reported.tried("m", 4)), (Kind::NoSpace, 0), "nothing was loaded");
    assert_eq!(bed.in_memory("m"), [3], "the one before made room, which a request still holds");
    for part in ["m version 4: needs 40 MB", "0 of 100 MB are free", "m version 3 (60 MB)"] {
        assert!(refused.reason.contains(part), "{part}: {}", refused.reason);
    }
    drop(running);
    eventually("version 4", || {
        bed.registry.refresh();
        bed.active("m").0 == 4
    });
    bed.publish("m", 5, "t", u64::MAX);
    assert_eq!(bed.registry.activate("m", 5).unwrap_err().kind(), Kind::NoSpace);
    assert_eq!(bed.active("m").0, 4);
}

#[test]
fn labels_and_versions_loaded_by_hand_stay() {
    let bed = Bed::with(|_, _, _| Ok(()), Options { follow: false, ..Options::default() });
    for version in 1..=5 {
        bed.publish("m", version, &format!("t{version}"), 0);
    }
    bed.registry.refresh();
    assert_eq!(bed.in_memory("m"), [5], "without an active version the newest is activated");
    bed.put("m", 6, "t6");
    assert_eq!(bed.active("m").0, 5, "version 6 was not activated by an operator");
    for version in 1..=3 {
        bed.registry.load("m", version).unwrap();
    }
    bed.registry.label("m", "stable", 2).unwrap();
    assert_eq!(bed.answer("m", VersionSelector::Label("stable")), Some(is(2, "t2")));
    assert_eq!((bed.active("m").0, bed.in_memory("m")), (5, vec![1, 2, 3, 5]));
    assert_eq!(bed.registry.label("m", "canary", 4).unwrap_err().kind(), Kind::NotFound);
    assert_eq!(bed.registry.label("m", "a/b", 2).unwrap_err().kind(), Kind::Invalid);
    assert_eq!(bed.registry.get("m", VersionSelector::Label("canary")).unwrap_err().kind(), Kind::NotFound);
    for (version, expected) in [(2, Kind::Conflict), (5, Kind::Conflict), (4, Kind::NotFound)] {
        assert_eq!(bed.registry.unload("m", version).unwrap_err().kind(), expected, "{version}");
    }
    bed.registry.unload("m", 1).unwrap();
    bed.registry.activate("m", 3).unwrap();
    bed.registry.activate("m", 2).unwrap();
    assert_eq!(bed.in_memory("m"), [2, 3], "5 was neither active nor the one before");
    bed.registry.unlabel("m", "stable").unwrap();
    assert_eq!(bed.registry.unlabel("m", "stable").unwrap_err().kind(), Kind::NotFound);
    bed.registry.unload("m", 3).unwrap();
    assert_eq!(bed.in_memory("m"), [2]);
    for name in ["none", ""] {
        assert_eq!(bed.registry.unload(name, 1).unwrap_err().kind(), Kind::NotFound);
        assert_eq!(bed.registry.activate(name, 1).unwrap_err().kind(), Kind::NotFound);
        assert_eq!(bed.registry.versions(name).unwrap_err().kind(), Kind::NotFound);
    }
}

#[test]
fn versions_that_fail_their_warm_up_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let warm: Warm<String> = Arc::new(|loaded| match loaded.content().as_str() {
        "bad" => Err(Error::corrupt("golden request 3: another answer")),
        _ => Ok(()),
    });
    let registry =
        Registry::new(Store::new(folder.path().join("store")), TestLoader::to(|_, _, _| Ok(())), Options::default());
    let registry = Arc::new(registry.with_warm_up(warm));
    let bed = Bed { registry, folder, reported: TestLoader::to(|_, _, _| Ok(())) };
    bed.put("m", 1, "good");
    bed.put("m", 2, "bad");
    assert_eq!(bed.active("m"), is(1, "good"));
    let reason = bed.refused("m", 2).unwrap().reason;
    assert!(reason.contains("warm-up: golden request 3"), "{reason}");
}

#[derive(Clone, Debug)]
enum Step {
    Publish(u64, u8),
    Remove(u64),
    Look,
    Load(u64),
    Activate(u64),
    Unload(u64),
    Label(bool, u64),
    Unlabel(bool),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let version = || 1..6u64;
    let step = prop_oneof![
        4 => (version(), 0..4u8).prop_map(|(v, text)| Step::Publish(v, text)),
        2 => version().prop_map(Step::Remove),
        4 => Just(Step::Look),
        1 => version().prop_map(Step::Load),
        2 => version().prop_map(Step::Activate),
        1 => version().prop_map(Step::Unload),
        1 => (any::<bool>(), version()).prop_map(|(label, v)| Step::Label(label, v)),
        1 => any::<bool>().prop_map(Step::Unlabel),
    ];
    prop::collection::vec(step, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn invariants_hold_under_random_operations(steps in steps()) {
        let bed = Bed::obedient();
        let name = |label: bool| if label { "stable" } else { "canary" };
        let mut published: BTreeMap<u64, String> = BTreeMap::new();
        let mut was_active = false;
        for step in steps {
            let looked = matches!(step, Step::Look);
            match step {
                Step::Publish(version, text) => {
                    if published.remove(&version).is_some() {
                        fs::remove_dir_all(bed.path("m", version)).unwrap();
                    }
                    bed.publish("m", version, &format!("t{text}"), 0);
                    published.insert(version, format!("t{text}"));
                }
                Step::Remove(version) => {
                    if published.remove(&version).is_some() {
                        fs::remove_dir_all(bed.path("m", version)).unwrap();
                    }
                }
                Step::Look => bed.registry.refresh(),
                Step::Load(version) => drop(bed.registry.load("m", version)),
                Step::Activate(version) => {
                    if let Ok(loaded) = bed.registry.activate("m", version) {
                        prop_assert_eq!(bed.active("m").0, version);
                        if let Some(text) = published.get(&version) {
                            prop_assert_eq!(&**loaded.content(), text, "never bytes that are published no more");
                        }
                    } else {
                        prop_assert!(!published.contains_key(&version) || bed.registry.versions("m").is_err());
                    }
                }
                Step::Unload(version) => drop(bed.registry.unload("m", version)),
                Step::Label(label, version) => drop(bed.registry.label("m", name(label), version)),
                Step::Unlabel(label) => drop(bed.registry.unlabel("m", name(label))),
            }
            let Ok(states) = bed.registry.versions("m") else { continue };
            let active: Vec<u64> = states.iter().filter(|v| v.active).map(|v| v.version).collect();
            prop_assert!(active.len() <= 1 && (!was_active || active.len() == 1), "{states:?}");
            was_active = !active.is_empty();
            for state in &states {
                prop_assert!(state.loaded || (!state.active && state.labels.is_empty()), "{states:?}");
                prop_assert!(state.published || state.loaded);
                prop_assert_eq!(&state.refused, &None);
                let found = bed.answer("m", VersionSelector::Version(state.version));
                prop_assert_eq!(found.is_some(), state.loaded);
                if let (true, Some((_, text)), Some(now)) = (looked, found, published.get(&state.version)) {
                    prop_assert_eq!(&text, now, "after a poll the published versions are in memory");
                }
            }
            prop_assert!(!looked || published.is_empty() || was_active, "something answers once something was seen");
        }
    }
}
