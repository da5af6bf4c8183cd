//! Fault injection: one failure at each call of the disk, the journals and the store, over a script of publications, updates,
//! merges, swaps, labels and restarts. Afterwards all acknowledged updates exist, no rejected one does, and the server behaves
//! like one that never failed.

// The number of cases is printed.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::{Compactor, Options};
use crate::Plan;
use sterling_core::error::{Error, Result};
use sterling_core::request::VersionSelector;
use sterling_index::ivf::Rescore;
use sterling_journal::{
    Append, Disk, Done, Follower, Journal, Journals, LogOptions, Logs, RealDisk, Record, Tail, Topic,
};
use sterling_serving::fresh::{MergeWanted, ModelUpdates, Put, Update, UpdateFeeds, Updating};
use sterling_serving::registry::{self, Registry, Snapshots};
use sterling_serving::view::Attribute;
use sterling_snapshot::{Desired, Manifest, Store, failing};

const MODEL: &str = "m";
/// Number of published items.
const ITEMS: i64 = 40;
/// Timeout of automatic recovery.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit of the cases in the ordinary suite. `STERLING_TEST_FAULTS=1` runs all of them, `K/N` the K-th of N parts.
const TIME: Duration = Duration::from_secs(5);
/// Maximum wait between polls; each wait doubles the previous one. A server polls once per second, and faults
/// in polls in quick succession test the same case.
const POLL_WAIT_MAX: Duration = Duration::from_millis(64);
/// Number of concurrent cases, in the ordinary suite and in a run of all cases. A case mostly waits until the thread
/// that tails its journal has ended.
const TOGETHER: [usize; 2] = [8, 48];
/// Minimum number of cases.
const CASES_MIN: usize = 16;

/// Failure of a call, injected once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    Code(Errno),
    /// The store or the stream does not respond.
    Away,
    Panic,
}

const FAILURES: [Failure; 6] = [
    Failure::Code(Errno::MFILE),
    Failure::Code(Errno::IO),
    Failure::Code(Errno::NOSPC),
    Failure::Code(Errno::INTR),
    Failure::Away,
    Failure::Panic,
];

/// Records calls, and makes one of them fail.
struct Faults {
    at: AtomicUsize,
    failure: Failure,
    requested: Mutex<Vec<&'static str>>,
}

impl Faults {
    fn new(at: usize, failure: Failure) -> Arc<Self> {
        Arc::new(Faults { at: AtomicUsize::new(at), failure, requested: Mutex::default() })
    }

    fn requested(&self) -> usize {
        self.requested.lock().unwrap().len()
    }

    fn call(&self, name: &'static str) -> std::result::Result<(), Failure> {
        let number = {
            let mut requested = self.requested.lock().unwrap();
            requested.push(name);
            requested.len() - 1
        };
        if number != self.at.load(SeqCst) {
            return Ok(());
        }
        match self.failure {
            // A panic without its message on the terminal.
            Failure::Panic => resume_unwind(Box::new("broken")),
            failure => Err(failure),
        }
    }

    fn on_disk(&self, name: &'static str) -> std::io::Result<()> {
        self.call(name).map_err(|failure| match failure {
            Failure::Code(code) => code.into(),
            _ => Errno::IO.into(),
        })
    }

    fn on_call(&self, name: &'static str) -> Result<()> {
        self.call(name).map_err(|failure| match failure {
            Failure::Code(Errno::NOSPC) => Error::no_space(name),
            Failure::Code(code) => Error::io(name, code.into()),
            _ => Error::unavailable(format!("{name}: it is away")),
        })
    }
}

struct FailingDisk(Arc<Faults>);

struct FailingTail(Box<dyn Tail>, Arc<Faults>);

impl FailingDisk {
    fn tail(&self, tail: Box<dyn Tail>) -> Box<dyn Tail> {
        Box::new(FailingTail(tail, self.0.clone()))
    }
}

impl Disk for FailingDisk {
    fn create(&self, path: &Path) -> std::io::Result<Box<dyn Tail>> {
        self.0.on_disk("Disk::create")?;
        RealDisk.create(path).map(|tail| self.tail(tail))
    }
    fn open(&self, path: &Path) -> std::io::Result<Box<dyn Tail>> {
        self.0.on_disk("Disk::open")?;
        RealDisk.open(path).map(|tail| self.tail(tail))
    }
    fn sync_folder(&self, folder: &Path) -> std::io::Result<()> {
        self.0.on_disk("Disk::sync_folder")?;
        RealDisk.sync_folder(folder)
    }
}

impl Tail for FailingTail {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.1.on_disk("Tail::write")?;
        self.0.write(bytes)
    }
    fn sync(&mut self) -> std::io::Result<()> {
        self.1.on_disk("Tail::sync")?;
        self.0.sync()
    }
    fn cut(&mut self, bytes: u64) -> std::io::Result<()> {
        self.1.on_disk("Tail::cut")?;
        self.0.cut(bytes)
    }
    fn check(&self) -> std::io::Result<()> {
        // The writer's own calls are not counted, because their number varies.
        self.0.check()
    }
}

struct FailingJournals(Logs, Arc<Faults>);

struct FailingJournal(Box<dyn Journal>, Arc<Faults>);

/// Fails instead of returning a record, which the next call returns.
struct FailingFollower(Box<dyn Follower>, Option<Record>, Arc<Faults>);

impl Journals for FailingJournals {
    fn open(&self, topic: &Topic, after: u64) -> Result<Box<dyn Journal>> {
        self.1.on_call("Journals::open")?;
        Ok(Box::new(FailingJournal(self.0.open(topic, after)?, self.1.clone())))
    }
    fn folder(&self, topic: &Topic) -> Option<PathBuf> {
        self.0.folder(topic)
    }
}

impl Journal for FailingJournal {
    fn append(&self, append: Append, done: Done) {
        match self.1.on_call("Journal::append") {
            Ok(()) => self.0.append(append, done),
            Err(e) => done(Err(e)),
        }
    }
    fn last(&self) -> u64 {
        self.0.last()
    }
    fn first(&self) -> u64 {
        self.0.first()
    }
    fn follow(&self, after: u64) -> Result<Box<dyn Follower>> {
        self.1.on_call("Journal::follow")?;
        Ok(Box::new(FailingFollower(self.0.follow(after)?, None, self.1.clone())))
    }
    fn release(&self, position: u64) -> Result<()> {
        self.1.on_call("Journal::release")?;
        self.0.release(position)
    }
    fn trouble(&self) -> Option<String> {
        self.0.trouble()
    }
}

impl Follower for FailingFollower {
    fn next(&mut self, wait: Duration) -> Result<Option<Record>> {
        if self.1.is_none() {
            self.1 = self.0.next(wait)?;
        }
        if self.1.is_some() {
            self.2.on_call("Follower::next")?;
        }
        Ok(self.1.take())
    }
}

/// Runs a call; `None` if it panics.
fn caught<R>(call: impl FnOnce() -> R) -> Option<R> {
    catch_unwind(AssertUnwindSafe(call)).ok()
}

/// Temporary folder, in memory if possible.
fn folder() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap()
}

/// Returns the published version, from which all publications are copied.
fn published() -> PathBuf {
    static PUBLISHED: OnceLock<tempfile::TempDir> = OnceLock::new();
    let folder = PUBLISHED.get_or_init(|| {
        let folder = folder();
        let items = folder.path().join("items.jsonl");
        let line = |id: i64| format!("{{\"id\": {id}, \"embedding\": [{id}, 1], \"attributes\": {{\"n\": {id}}}}}\n");
        std::fs::write(&items, (0..ITEMS).map(line).collect::<String>()).unwrap();
        let mut what = Plan::of_vectors(MODEL, items);
        what.recipe.index.rescore = Rescore::F32;
        crate::publish(&Store::new(folder.path().join("store")), &what, &|_, _, _| {}).unwrap();
        folder
    });
    folder.path().join("store/m/1")
}

/// Server without HTTP.
struct Server {
    registry: Arc<Registry>,
    feeds: Arc<UpdateFeeds>,
    compactor: Compactor,
}

struct Script<'a> {
    root: &'a Path,
    faults: Arc<Faults>,
    store: Store,
    server: Option<Server>,
    /// Expected items, each with the first number of its vector.
    items: BTreeMap<i64, f32>,
    position: u64,
    /// Version that must become active.
    active: Cell<u64>,
    /// Last number used in a vector.
    given: f32,
    starts: usize,
}

impl<'a> Script<'a> {
    fn new(root: &'a Path, faults: Arc<Faults>) -> Self {
        let reported = faults.clone();
        let store = failing(Store::new(root.join("store")), Arc::new(move |name| reported.on_call(name)));
        let items = BTreeMap::new();
        Script { root, faults, store, server: None, items, position: 0, active: Cell::new(0), given: 1000.0, starts: 0 }
    }

    fn server(&self) -> &Server {
        self.server.as_ref().unwrap()
    }

    fn feed(&self) -> Arc<ModelUpdates> {
        let topic = Topic { model: MODEL.into(), shard: None };
        self.until("the updates", || self.server().feeds.of(&topic))
    }

    /// Repeats an action until it returns a value, polling the store as a server does.
    fn until<R>(&self, what: &str, mut done: impl FnMut() -> Option<R>) -> R {
        let (start, mut wait) = (Instant::now(), Duration::from_millis(1));
        loop {
            // A poll on a busy machine may take longer than the limit, and succeed.
            let is_last = start.elapsed() >= RECOVERY_TIMEOUT;
            if let Some(Some(result)) = caught(&mut done) {
                return result;
            }
            let reported = self.server.as_ref().map(|server| {
                let _ = caught(|| server.registry.refresh());
                caught(|| (server.registry.troubles(), server.registry.versions(MODEL)))
            });
            assert!(!is_last, "{what} did not come: {reported:?}");
            std::thread::sleep(wait);
            wait = (wait * 2).min(POLL_WAIT_MAX);
        }
    }

    /// Starts or restarts the server.
    fn start(&mut self) {
        drop(self.server.take());
        self.starts += 1;
        let log = LogOptions {
            segment_bytes: 300,
            disk: Arc::new(FailingDisk(self.faults.clone())),
            ..LogOptions::default()
        };
        let logs = Logs { root: self.root.join("updates"), options: log };
        let feeds = Arc::new(UpdateFeeds::new(FailingJournals(logs, self.faults.clone())));
        let loader = Updating { snapshots: Snapshots::default(), feeds: Some(feeds.clone()), in_place: true };
        let retry = (Duration::from_millis(1), Duration::from_millis(5));
        let options = registry::Options { memory_bytes: Some(1 << 30), retry, ..registry::Options::default() };
        let registry = Arc::new(Registry::new(self.store.clone(), loader, options));
        // A tiny share makes each merge overdue, so that none waits for an idle core.
        let options = Options { share: 1e-6, cores: 0.01 };
        let compactor = Compactor::new(self.store.clone(), &registry, feeds.clone(), options);
        self.server = Some(Server { registry, feeds, compactor });
        self.until("a version", || self.server().registry.get(MODEL, VersionSelector::Active).ok());
    }

    /// Publishes the original version again, with the updates so far.
    fn publish(&mut self) -> u64 {
        let publish = || {
            self.store.publish(MODEL, |folder, version| {
                for file in std::fs::read_dir(published()).unwrap() {
                    let file = file.unwrap();
                    std::fs::copy(file.path(), folder.join(file.file_name())).unwrap();
                }
                let manifest = Manifest::read(&published())?;
                Manifest { version, position: self.position, ..manifest }.write(folder)
            })
        };
        let known = || Store::new(self.root.join("store")).versions(MODEL).unwrap();
        let before = known();
        let version = caught(publish).and_then(Result::ok).unwrap_or_else(|| {
            assert_eq!(known(), before, "a publication that failed has published nothing");
            publish().unwrap()
        });
        self.items = (0..ITEMS).map(|id| (id, id as f32)).collect();
        if self.active.get() == 0 {
            self.active.set(version);
        }
        version
    }

    /// Appends upserts and deletions until they are acknowledged.
    fn update(&mut self, put: &[i64], delete: &[i64]) {
        let put = put.iter().map(|id| {
            self.given += 1.0;
            let vector = Some(vec![self.given, 2.0]);
            let attributes = vec![("n".into(), Attribute::Integers(vec![7]))];
            Update::Put(Put { id: *id, vector, attributes, dense: Vec::new() })
        });
        let updates: Vec<Update> = put.chain(delete.iter().map(|id| Update::Delete { id: *id })).collect();
        for attempt in 0.. {
            assert!(attempt < 5, "nothing is acknowledged: {:?}", self.feed().trouble());
            let (tell, reported) = mpsc::channel();
            let feed = self.feed();
            let _ = caught(|| feed.append(&updates, None, Box::new(move |result| drop(tell.send(result)))));
            let reported = reported.recv_timeout(RECOVERY_TIMEOUT);
            if feed.trouble().is_some_and(|why| why.contains("until the server is restarted")) {
                drop(feed);
                self.start();
            }
            let last = self.feed().last();
            match reported {
                Ok(Ok(range)) => assert_eq!((range.start, range.end), (self.position + 1, last + 1)),
                Ok(Err(e)) if last > self.position => {
                    assert!(e.to_string().contains("may or may not be durable"), "{e}")
                }
                // The update was acknowledged, or the call panicked before it returned.
                _ => assert_eq!(last, self.position),
            }
            if last > self.position {
                assert_eq!(last, self.position + updates.len() as u64);
                self.position = last;
                break;
            }
        }
        for update in updates {
            match update {
                Update::Put(put) => self.items.insert(put.id, put.vector.unwrap()[0]),
                Update::Delete { id } => self.items.remove(&id),
                other => panic!("{other:?}"),
            };
        }
        self.see();
    }

    /// Waits until the expected version is active and shows all acknowledged updates, and compares. After a start at which
    /// the store fails, another version may answer first.
    fn see(&self) {
        let seen = self.until("acknowledged updates", || {
            let loaded = self.server().registry.get(MODEL, VersionSelector::Active).ok()?;
            if loaded.version() != self.active.get() {
                return None;
            }
            assert_eq!(loaded.content().stalled(), None);
            let view = loaded.view();
            if view.position() < self.position {
                std::thread::sleep(Duration::from_millis(1));
                return None;
            }
            let item = |slot| {
                let mut row = vec![0.0; view.dimension()];
                view.row(slot, &mut row);
                (view.id(slot).0, row[0])
            };
            let items: BTreeMap<i64, f32> = view.filled_slots().filter(|slot| view.is_live(*slot)).map(item).collect();
            Some((view.position(), items))
        });
        assert_eq!(seen, (self.position, self.items.clone()));
    }

    /// Merges, with at most two retries, and waits until the merged version is active.
    fn merge(&self) -> u64 {
        let Server { compactor, registry, .. } = self.server();
        let merged = || {
            let merged = compactor.merge(registry, MODEL);
            merged.inspect_err(|_| registry.refresh()).ok()
        };
        let merged = caught(merged).flatten().or_else(|| caught(merged).flatten()).or_else(merged).unwrap();
        assert_eq!((merged.position, merged.items), (self.position, self.items.len()));
        self.active.set(merged.version);
        self.until("merged version", || self.is_active(merged.version).then_some(()));
        self.see();
        merged.version
    }

    fn is_active(&self, version: u64) -> bool {
        self.server().registry.get(MODEL, VersionSelector::Active).is_ok_and(|loaded| loaded.version() == version)
    }

    /// Changes the desired state, and waits until the server has applied it.
    fn desired_state(&self, what: &str, change: impl Fn(&mut Desired), is_so: impl Fn(&Registry) -> bool) {
        self.until(what, || {
            let before = self.store.desired_state(MODEL).ok()?;
            let mut wanted = before.clone();
            change(&mut wanted);
            (wanted == before || self.store.change_desired(MODEL, &before, &change).is_ok()).then_some(())
        });
        self.until(what, || is_so(&self.server().registry).then_some(()));
    }

    fn label(&self, version: u64) {
        let change = |desired_state: &mut Desired| {
            desired_state.labels.insert("stable".into(), version);
        };
        self.desired_state("the label", change, |registry| {
            registry.labels(MODEL).is_ok_and(|labels| labels.get("stable") == Some(&version))
        });
    }

    fn activate(&self, version: u64) {
        self.active.set(version);
        self.desired_state(
            "the version",
            |desired_state| desired_state.answer(Some(version)),
            |_| self.is_active(version),
        );
        self.see();
    }

    fn run(&mut self) {
        self.publish();
        self.start();
        self.see();
        self.update(&[3, 100, 101], &[5]);
        self.update(&[4], &[]);
        let second = self.merge();
        self.label(second);
        self.update(&[102, 3], &[100]);
        let third = self.merge();
        self.update(&[], &[101, 7]);
        self.activate(second);
        self.start();
        self.see();
        self.update(&[103, 8], &[9]);
        self.activate(third);
        let fourth = self.publish();
        self.activate(fourth);
        self.update(&[104], &[1, 2]);
        self.start();
        self.see();
        let fifth = self.merge();
        self.label(fifth);
        self.update(&[105], &[104]);
        self.merge();
        self.start();
        self.update(&[106], &[]);
        self.check();
    }

    /// Compares the server with one that never failed.
    fn check(&self) {
        let Server { registry, .. } = self.server();
        self.until("a server without troubles", || {
            let versions = registry.versions(MODEL).ok()?;
            let loaded = registry.get(MODEL, VersionSelector::Active).ok()?;
            let is_well = registry.troubles().is_empty()
                // A rejected version whose retry was pending when another version became desired stays listed.
                && versions.iter().flat_map(|version| &version.refused).all(|refused| refused.retry_in.is_some())
                && self.feed().trouble().is_none()
                && loaded.content().warning().is_none();
            is_well.then_some(())
        });
        assert_eq!(registry.labels(MODEL).unwrap().len(), 1);
        // Retained are one of the first publications, the second one, and the merged ones that are needed.
        let retained = Store::new(self.root.join("store")).versions(MODEL).unwrap();
        assert!(retained.len() <= 7, "{retained:?}");
        let names = std::fs::read_dir(self.root.join("store/m")).unwrap();
        let names: Vec<String> = names.map(|name| name.unwrap().file_name().into_string().unwrap()).collect();
        assert!(names.iter().filter(|name| name.starts_with(".publishing-")).count() <= 1, "{names:?}");
    }
}

/// Runs the script. Returns the calls, and the number of server starts.
fn run(at: usize, failure: Failure) -> (Vec<&'static str>, usize) {
    let faults = Faults::new(at, failure);
    let folder = folder();
    let starts = caught(|| {
        let mut script = Script::new(folder.path(), faults.clone());
        script.run();
        script.starts
    });
    let requested = faults.requested.lock().unwrap().clone();
    (requested.clone(), starts.unwrap_or_else(|| panic!("{failure:?} at call {at}, {:?}", requested.get(at))))
}

/// Returns every call with every failure, alternating between kinds of calls: a run that ends early has then covered
/// all kinds of calls, in all parts of the script.
fn cases(calls: &[&'static str]) -> Vec<(usize, Failure)> {
    let mut places: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    calls.iter().enumerate().for_each(|(n, call)| places.entry(call).or_default().push(n));
    let mut cases = Vec::new();
    for n in 0..calls.len() * FAILURES.len() {
        for places in places.values().filter(|places| n < places.len() * FAILURES.len()) {
            let count = places.len();
            let stride = (count * 3 / 8 + 1..).find(|stride| gcd(count, *stride) == 1).unwrap();
            cases.push((places[n * stride % count], FAILURES[(n % count + n / count) % FAILURES.len()]));
        }
    }
    cases
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[test]
fn recovers_from_one_failure_at_any_call() {
    let started = Instant::now();
    let (calls, starts) = run(usize::MAX, Failure::Panic);
    let cases = cases(&calls);
    let distinct: BTreeSet<(usize, usize)> = cases.iter().map(|(at, f)| (*at, place(*f))).collect();
    assert_eq!(distinct.len(), calls.len() * FAILURES.len());
    let complete = std::env::var("STERLING_TEST_FAULTS").ok();
    let (part, parts) = complete.as_deref().and_then(|complete| complete.split_once('/')).unwrap_or(("1", "1"));
    let (part, parts): (usize, usize) = (part.parse().unwrap(), parts.parse().unwrap());
    let cases: Vec<(usize, Failure)> = cases.into_iter().skip(part - 1).step_by(parts).collect();
    let next = AtomicUsize::new(0);
    let met = Mutex::new(BTreeMap::<&str, usize>::new());
    let work = || {
        while let Some(&(at, failure)) = cases.get(next.fetch_add(1, SeqCst)) {
            let (requested, begins) = run(at, failure);
            // The number of calls varies between runs, for example with the number of polls.
            let Some(call) = requested.get(at) else { continue };
            assert!(begins <= starts + 1, "{failure:?} at call {at}, {call}: {begins} starts");
            let mut met = met.lock().unwrap();
            *met.entry(call).or_default() += 1;
            if complete.is_none() && met.values().sum::<usize>() >= CASES_MIN && started.elapsed() > TIME {
                return;
            }
        }
    };
    std::thread::scope(|scope| {
        let together = TOGETHER[usize::from(complete.is_some())];
        let workers: Vec<_> = (0..together).map(|_| scope.spawn(work)).collect();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
    });
    let met = met.into_inner().unwrap();
    let done: usize = met.values().sum();
    eprintln!("{done} failures of {}, at {} calls, in {:?}: {met:?}", cases.len(), calls.len(), started.elapsed());
    assert!(done >= CASES_MIN, "{done}");
}

#[test]
fn a_failed_poll_at_the_start_leaves_no_rejection() {
    let folder = folder();
    let faults = Faults::new(usize::MAX, Failure::Code(Errno::IO));
    let mut script = Script::new(folder.path(), faults.clone());
    let first = script.publish();
    script.start();
    script.update(&[100], &[]);
    script.activate(first);
    // The journal's updates after the first version are truncated: the first version can no longer be loaded, and its
    // latest merge takes its place.
    for id in 101..105 {
        script.update(&[id, 1, 2, 3], &[]);
        script.merge();
    }
    for call in 0..12 {
        let at = faults.requested() + call;
        faults.at.store(at, SeqCst);
        script.start();
        script.see();
        let versions = script.server().registry.versions(MODEL).unwrap();
        let refused: Vec<_> = versions.iter().flat_map(|version| &version.refused).collect();
        let failed = faults.requested.lock().unwrap().get(at).copied();
        assert!(refused.iter().all(|refused| refused.retry_in.is_some()), "{failed:?} at call {call}: {refused:?}");
    }
}

#[test]
fn a_panic_in_a_poll_does_not_end_merging() {
    let folder = folder();
    let faults = Faults::new(usize::MAX, Failure::Panic);
    let mut script = Script::new(folder.path(), faults.clone());
    script.publish();
    script.start();
    script.update(&[100], &[]);
    let Server { registry, compactor, feeds: _feeds } = script.server.take().unwrap();
    let before = faults.requested();
    faults.at.store(before, SeqCst);
    let (ask, requested) = crossbeam_channel::bounded(1);
    compactor.start(requested).unwrap();
    script.until("a look", || (faults.requested() > before).then_some(()));
    let (tell, reported) = mpsc::channel();
    let told_to = Box::new(move |merged| drop(tell.send(merged)));
    ask.send(MergeWanted { model: MODEL.into(), reported: told_to }).unwrap();
    let merged = reported.recv_timeout(RECOVERY_TIMEOUT).unwrap().unwrap();
    assert_eq!((merged.position, merged.items), (1, ITEMS as usize + 1));
    drop(registry);
}

fn place(failure: Failure) -> usize {
    FAILURES.iter().position(|one| *one == failure).unwrap()
}
