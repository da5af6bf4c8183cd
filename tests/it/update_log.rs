//! Versions that follow a journal with temporary read errors or invalid records.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use sterling::error::{Error, Kind, Result};
use sterling::journal::{Append, Done, Follower, Journal, Journals, Logs, Record, Topic};
use sterling::kernels::priority::Background;
use sterling::serving::fresh::{ModelUpdates, Put, Update, UpdateFeeds, Updating};
use sterling::serving::registry::{Loader as _, Snapshots};
use sterling::serving::view::Live;
use sterling::snapshot::Store;
use sterling::units::ItemId;

use crate::support::{put, vectors};

/// Faults of followers, by the position of the record that they read.
#[derive(Default)]
struct Faults {
    /// The next call fails, and the one after it returns the record.
    fails: BTreeSet<u64>,
    /// The next call panics, and the one after it returns the record.
    panics: BTreeSet<u64>,
    /// Each call panics.
    broken: Option<u64>,
    /// The record after it is returned instead.
    skipped: Option<u64>,
    /// The record is returned with other bytes.
    damaged: Option<u64>,
    /// Every call fails.
    is_away: bool,
}

/// File journals with these faults.
struct Faulty(Logs, Arc<Mutex<Faults>>);

struct FaultyJournal(Box<dyn Journal>, Arc<Mutex<Faults>>);

struct FaultyFollower {
    records: Box<dyn Follower>,
    faults: Arc<Mutex<Faults>>,
    held: Option<Record>,
}

impl Journals for Faulty {
    fn open(&self, topic: &Topic, after: u64) -> Result<Box<dyn Journal>> {
        Ok(Box::new(FaultyJournal(self.0.open(topic, after)?, self.1.clone())))
    }

    fn folder(&self, topic: &Topic) -> Option<PathBuf> {
        self.0.folder(topic)
    }
}

impl Journal for FaultyJournal {
    fn append(&self, append: Append, done: Done) {
        self.0.append(append, done);
    }

    fn last(&self) -> u64 {
        self.0.last()
    }

    fn first(&self) -> u64 {
        self.0.first()
    }

    fn follow(&self, after: u64) -> Result<Box<dyn Follower>> {
        let (records, faults) = (self.0.follow(after)?, self.1.clone());
        Ok(Box::new(FaultyFollower { records, faults, held: None }))
    }

    fn release(&self, position: u64) -> Result<()> {
        self.0.release(position)
    }
}

impl Follower for FaultyFollower {
    fn next(&mut self, wait: Duration) -> Result<Option<Record>> {
        let next = match self.held.take() {
            Some(record) => Some(record),
            None => self.records.next(wait)?,
        };
        let Some(mut record) = next else { return Ok(None) };
        let mut faults = self.faults.lock().unwrap();
        if faults.is_away {
            self.held = Some(record);
            return Err(Error::unavailable("it is away"));
        }
        if faults.panics.remove(&record.position) || faults.broken == Some(record.position) {
            drop(faults);
            self.held = Some(record);
            // Like a panic, but without the message on the terminal.
            std::panic::resume_unwind(Box::new("broken"));
        }
        if faults.fails.remove(&record.position) {
            let error = Error::unavailable(format!("position {} cannot be read", record.position));
            self.held = Some(record);
            return Err(error);
        }
        if faults.skipped == Some(record.position) {
            return self.records.next(wait);
        }
        if faults.damaged == Some(record.position) {
            record.payload = vec![255];
        }
        Ok(Some(record))
    }
}

struct Served {
    _folder: tempfile::TempDir,
    version: PathBuf,
    loader: Updating,
    faults: Arc<Mutex<Faults>>,
    feed: Arc<ModelUpdates>,
    live: Live,
}

fn served() -> Served {
    let folder = tempfile::tempdir().unwrap();
    let lines: String = (0..40)
        .map(|id| format!("{{\"id\": {id}, \"embedding\": [{id}, 1], \"attributes\": {{\"n\": 0}}}}\n"))
        .collect();
    put(&folder.path().join("store"), &vectors(folder.path(), &lines)).unwrap();
    let faults: Arc<Mutex<Faults>> = Arc::default();
    let feeds = Arc::new(UpdateFeeds::new(Faulty(Logs::below(folder.path().join("updates")), faults.clone())));
    let loader = Updating { snapshots: Snapshots::default(), feeds: Some(feeds.clone()), in_place: true };
    let version = Store::new(folder.path().join("store")).folder("vectors", 1);
    let live = load(&loader, &version).unwrap();
    let feed = feeds.of(&Topic::whole("vectors")).unwrap();
    Served { _folder: folder, version, loader, faults, feed, live }
}

fn load(loader: &Updating, version: &Path) -> Result<Live> {
    loader.load(version, Background::Steady)
}

/// Puts items whose ids are 1000 plus the position of the update; returns the last position.
fn write(feed: &ModelUpdates, positions: std::ops::RangeInclusive<u64>) -> u64 {
    let (tell, reported) = mpsc::channel();
    let item = |position| {
        let id = 1000 + position as i64;
        Update::Put(Put { id, vector: Some(vec![id as f32 % 97.0, 1.0]), attributes: Vec::new(), dense: Vec::new() })
    };
    let updates: Vec<Update> = positions.map(item).collect();
    feed.append(&updates, None, Box::new(move |range| tell.send(range).unwrap()));
    reported.recv().unwrap().unwrap().end - 1
}

fn wait(what: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Checks that the view shows all updates up to a position, and none after it.
fn check(live: &Live, position: u64, last: u64) {
    let view = live.view();
    assert_eq!(view.position(), position);
    let seen = |position: &u64| view.slot(ItemId(1000 + *position as i64)).is_some();
    assert_eq!((1..=last).filter(seen).collect::<Vec<u64>>(), (1..=position).collect::<Vec<u64>>());
}

#[test]
fn reads_that_fail_for_a_moment_lose_no_update() {
    let served = served();
    let fails = [1, 2, 500, 501, 1025, 2048, 3000, 3599, 3600];
    served.faults.lock().unwrap().fails.extend(fails);
    for first in (1..=3600).step_by(600) {
        write(&served.feed, first..=first + 599);
    }
    wait("the last update", || served.live.view().position() >= 3600 || served.live.stalled().is_some());
    assert_eq!(served.live.stalled(), None);
    assert!(served.faults.lock().unwrap().fails.is_empty());
    check(&served.live, 3600, 3600);
    // A load that cannot read the records fails, and the next one has all of them.
    served.faults.lock().unwrap().fails.extend([700, 3600]);
    for _ in 0..2 {
        assert_eq!(load(&served.loader, &served.version).err().unwrap().kind(), Kind::Unavailable);
    }
    check(&load(&served.loader, &served.version).unwrap(), 3600, 3600);
}

#[test]
fn panics_while_applying_updates_lose_none_and_repeated_ones_are_reported() {
    let served = served();
    served.faults.lock().unwrap().panics.extend([1, 2, 700, 1025, 2048, 3000, 3600]);
    for first in (1..=3600).step_by(600) {
        let last = write(&served.feed, first..=first + 599);
        wait("the updates", || served.live.view().position() >= last || served.live.stalled().is_some());
    }
    assert_eq!(served.live.stalled(), None);
    assert!(served.faults.lock().unwrap().panics.is_empty());
    check(&served.live, 3600, 3600);
    served.faults.lock().unwrap().broken = Some(3605);
    write(&served.feed, 3601..=3610);
    wait("the end", || served.live.stalled().is_some());
    assert!(served.live.stalled().unwrap().contains("this is a defect"));
    check(&served.live, 3600, 3610);
    served.faults.lock().unwrap().broken = None;
    check(&load(&served.loader, &served.version).unwrap(), 3610, 3610);
}

#[test]
fn a_misplaced_or_damaged_record_ends_the_tail_after_earlier_records() {
    for (is_skipped, why) in [(true, "position 501, expected 500"), (false, "position 500")] {
        let served = served();
        {
            let mut faults = served.faults.lock().unwrap();
            *(if is_skipped { &mut faults.skipped } else { &mut faults.damaged }) = Some(500);
        }
        write(&served.feed, 1..=1000);
        wait("the end", || served.live.stalled().is_some());
        let reported = served.live.stalled().unwrap();
        assert!(reported.contains(why), "{reported}");
        check(&served.live, 499, 1000);
        let refused = load(&served.loader, &served.version).err().unwrap();
        assert!(refused.kind() == Kind::Corrupt && refused.to_string().contains(why), "{refused}");
    }
}

#[test]
fn stalled_updates_are_reported_and_end_with_their_version() {
    let served = served();
    write(&served.feed, 1..=10);
    wait("the updates", || served.live.view().position() == 10);
    served.faults.lock().unwrap().is_away = true;
    write(&served.feed, 11..=20);
    let warning = || served.live.warning().map_or(String::new(), |warning| warning.to_string());
    wait("that they wait", || warning().contains("updates cannot be applied: it is away"));
    check(&served.live, 10, 20);
    served.faults.lock().unwrap().is_away = false;
    wait("the rest", || served.live.view().position() == 20);
    wait("that they do not", || warning().is_empty());
    // The version has no owner any more: its thread ends although its updates wait, and its snapshot is dropped.
    served.faults.lock().unwrap().is_away = true;
    write(&served.feed, 21..=30);
    wait("that they wait again", || warning().contains("updates cannot be applied"));
    let Served { _folder, live, .. } = served;
    let main = Arc::downgrade(live.view().main());
    drop(live);
    wait("the end of its thread", || main.strong_count() == 0);
}

/// Journals of which one is opened only after a signal.
struct Slow(Logs, Mutex<mpsc::Receiver<()>>);

impl Journals for Slow {
    fn open(&self, topic: &Topic, after: u64) -> Result<Box<dyn Journal>> {
        if topic.model == "slow" {
            let _ = self.1.lock().unwrap().recv();
        }
        self.0.open(topic, after)
    }

    fn folder(&self, topic: &Topic) -> Option<PathBuf> {
        self.0.folder(topic)
    }
}

#[test]
fn opening_a_journal_delays_no_other_model() {
    let folder = tempfile::tempdir().unwrap();
    let (go, reported) = mpsc::channel();
    let feeds = Arc::new(UpdateFeeds::new(Slow(Logs::below(folder.path()), Mutex::new(reported))));
    let [slow, quick, late] = ["slow", "quick", "late"].map(Topic::whole);
    feeds.open(&quick, 0).unwrap();
    let opening: Vec<_> = (0..2)
        .map(|_| {
            let (feeds, slow) = (feeds.clone(), slow.clone());
            std::thread::spawn(move || feeds.open(&slow, 0).map(|feed| feed.last()))
        })
        .collect();
    // On its own thread, so that a deadlock fails the test instead of blocking it.
    let (tell, done) = mpsc::channel();
    let others = feeds.clone();
    std::thread::spawn(move || {
        for _ in 0..1000 {
            assert_eq!(others.of(&quick).unwrap().last(), 0);
            assert!(others.of(&Topic::whole("slow")).is_none());
        }
        assert_eq!(others.open(&late, 0).unwrap().last(), 0);
        tell.send(()).unwrap();
    });
    done.recv_timeout(Duration::from_secs(30)).expect("others wait for a journal that is not theirs");
    drop(go);
    // Of several threads that open the same journal, one opens it.
    opening.into_iter().for_each(|one| assert_eq!(one.join().unwrap().unwrap(), 0));
    assert!(feeds.of(&slow).is_some());
}
