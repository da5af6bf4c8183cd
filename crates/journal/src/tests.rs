//! Tests of a log's guarantees: order, durability, and clear errors when the disk violates its own guarantees.

#![allow(clippy::unwrap_used)]

mod faults;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Error as IoError, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::*;
use sterling_core::error::{Error, Kind};

const NOW: Duration = Duration::ZERO;

fn open(folder: &Path) -> Result<Log> {
    Log::open(folder, LogOptions::default())
}

/// Options with small segments on a disk, usually one with fault injection.
fn options(disk: impl Disk + 'static) -> LogOptions {
    LogOptions { segment_bytes: 300, disk: Arc::new(disk), ..LogOptions::default() }
}

fn append(log: &Log, records: &[&[u8]]) -> Result<Range<u64>> {
    append_at(log, records, None)
}

fn append_at(log: &Log, records: &[&[u8]], expected: Option<u64>) -> Result<Range<u64>> {
    let (tell, reported) = mpsc::channel();
    let records = records.iter().map(|record| record.to_vec()).collect();
    log.append(Append { records, expected }, Box::new(move |result| tell.send(result).unwrap()));
    reported.recv().unwrap()
}

/// Reads all records after a position.
fn read(log: &Log, after: u64) -> Result<Vec<(u64, Vec<u8>)>> {
    let mut follower = log.follow(after)?;
    let mut found = Vec::new();
    while let Some(record) = follower.next(NOW)? {
        found.push((record.position, record.payload));
    }
    Ok(found)
}

fn payload(n: u64) -> Vec<u8> {
    format!("update {n} {}", "x".repeat(n as usize % 50)).into_bytes()
}

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let named =
        entries.map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(path).unwrap()));
    named.filter(|(name, _)| name.ends_with(".log")).collect()
}

fn put(folder: &Path, files: &BTreeMap<String, Vec<u8>>) {
    let _ = std::fs::remove_dir_all(folder);
    std::fs::create_dir_all(folder).unwrap();
    files.iter().for_each(|(name, bytes)| std::fs::write(folder.join(name), bytes).unwrap());
}

#[test]
fn records_come_back_in_order_after_every_restart() {
    let folder = tempfile::tempdir().unwrap();
    let mut expected = Vec::new();
    for round in 0..5u64 {
        let log = Log::open(folder.path(), options(RealDisk)).unwrap();
        assert_eq!(log.last(), round * 7);
        for n in round * 7 + 1..round * 7 + 8 {
            assert_eq!(append(&log, &[&payload(n)]).unwrap(), n..n + 1);
            expected.push((n, payload(n)));
        }
        for after in 0..=expected.len() {
            assert_eq!(read(&log, after as u64).unwrap(), expected[after..]);
        }
    }
    assert!(files(folder.path()).len() > 3, "several segments");
}

#[test]
fn records_of_one_append_are_consecutive() {
    let folder = tempfile::tempdir().unwrap();
    let log = open(folder.path()).unwrap();
    std::thread::scope(|scope| {
        for writer in 0..8u64 {
            let log = &log;
            scope.spawn(move || {
                for n in 0..50 {
                    let records = [format!("{writer} {n} a"), format!("{writer} {n} b")];
                    let range = append(log, &[records[0].as_bytes(), records[1].as_bytes()]).unwrap();
                    let read = read(log, range.start - 1).unwrap();
                    assert_eq!(read[0], (range.start, records[0].clone().into_bytes()));
                    assert_eq!(read[1], (range.start + 1, records[1].clone().into_bytes()));
                }
            });
        }
    });
    assert_eq!(log.last(), 800);
    let mut last = BTreeMap::new();
    for (_, payload) in read(&log, 0).unwrap() {
        let text = String::from_utf8(payload).unwrap();
        let mut parts = text.split(' ').map(str::to_owned);
        let (writer, n) = (parts.next().unwrap(), parts.next().unwrap().parse::<u64>().unwrap());
        let before = last.insert(writer, n).unwrap_or(0);
        assert!(n == before || n == before + 1, "each writer's updates keep their order");
    }
}

/// Counts syncs, each as slow as on a slow disk.
#[derive(Clone, Default)]
struct SlowDisk(Arc<AtomicUsize>);

struct SlowTail(Box<dyn Tail>, Arc<AtomicUsize>);

impl Disk for SlowDisk {
    fn create(&self, path: &Path) -> std::io::Result<Box<dyn Tail>> {
        Ok(Box::new(SlowTail(RealDisk.create(path)?, self.0.clone())))
    }
    fn open(&self, path: &Path) -> std::io::Result<Box<dyn Tail>> {
        Ok(Box::new(SlowTail(RealDisk.open(path)?, self.0.clone())))
    }
    fn sync_folder(&self, folder: &Path) -> std::io::Result<()> {
        RealDisk.sync_folder(folder)
    }
}

impl Tail for SlowTail {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.write(bytes)
    }
    fn sync(&mut self) -> std::io::Result<()> {
        self.1.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(20));
        Ok(())
    }
    fn cut(&mut self, bytes: u64) -> std::io::Result<()> {
        self.0.cut(bytes)
    }
}

#[test]
fn one_sync_serves_all_waiting_appends() {
    let folder = tempfile::tempdir().unwrap();
    let disk = SlowDisk::default();
    let log = Log::open(folder.path(), LogOptions { disk: Arc::new(disk.clone()), ..LogOptions::default() }).unwrap();
    let (tell, reported) = mpsc::channel();
    for n in 0..1000 {
        let tell = tell.clone();
        let append = Append { records: vec![payload(n)], expected: None };
        log.append(append, Box::new(move |result| tell.send(result.unwrap()).unwrap()));
    }
    drop(tell);
    let positions: Vec<u64> = reported.iter().map(|range| range.start).collect();
    assert!(positions.iter().copied().eq(1..=1000), "callbacks in order");
    let syncs = disk.0.load(Ordering::Relaxed);
    assert!(syncs < 100, "{syncs} syncs for a thousand appends");
}

#[test]
fn an_append_may_depend_on_the_position() {
    let folder = tempfile::tempdir().unwrap();
    let log = open(folder.path()).unwrap();
    assert_eq!(append_at(&log, &[b"a"], Some(0)).unwrap(), 1..2);
    let error = append_at(&log, &[b"b"], Some(0)).unwrap_err();
    assert_eq!((error.kind(), log.last()), (Kind::Conflict, 1));
    assert!(error.to_string().contains("position 1, expected 0"), "{error}");
    assert_eq!(append_at(&log, &[], Some(1)).unwrap(), 2..2);
    assert_eq!(append_at(&log, &[b"c"], Some(1)).unwrap(), 2..3);
    for invalid in [Vec::new(), vec![0; PAYLOAD_BYTES_MAX + 1]] {
        assert_eq!(append(&log, &[b"d", &invalid]).unwrap_err().kind(), Kind::Invalid);
    }
    assert_eq!(read(&log, 1).unwrap(), [(2, b"c".to_vec())]);
}

#[test]
fn a_log_has_one_writer() {
    let folder = tempfile::tempdir().unwrap();
    let log = open(folder.path()).unwrap();
    let error = open(folder.path()).err().unwrap();
    assert_eq!(error.kind(), Kind::Conflict);
    assert!(error.to_string().contains("another process writes this journal"), "{error}");
    drop(log);
    open(folder.path()).unwrap();
}

#[test]
fn released_records_are_deleted_and_others_stay() {
    let folder = tempfile::tempdir().unwrap();
    let log = Log::open(folder.path(), options(RealDisk)).unwrap();
    (1..=40).for_each(|n| assert!(append(&log, &[&payload(n)]).is_ok()));
    let mut slow = log.follow(0).unwrap();
    assert_eq!(slow.next(NOW).unwrap().unwrap().position, 1);
    let before = log.bytes();
    log.release(20).unwrap();
    let first = log.first();
    assert!((2..=21).contains(&first) && log.bytes() < before, "{first}");
    assert_eq!(log.follow(first - 2).err().unwrap().kind(), Kind::NotFound);
    assert_eq!(read(&log, first - 1).unwrap().len() as u64, 41 - first);
    // A slow follower reads the rest of its open file, and then gets an error.
    let reported = std::iter::repeat_with(|| slow.next(NOW)).find_map(Result::err).unwrap();
    assert!(reported.to_string().contains("was released"), "{reported}");
    log.release(u64::MAX).unwrap();
    assert_eq!(append(&log, &[b"next"]).unwrap(), 41..42);
    drop(log);
    let log = open(folder.path()).unwrap();
    assert_eq!(read(&log, 40).unwrap(), [(41, b"next".to_vec())]);
    assert_eq!(log.follow(42).err().unwrap().kind(), Kind::NotFound);
}

#[test]
fn a_log_begins_where_its_snapshot_ends() {
    let folder = tempfile::tempdir().unwrap();
    let log = Log::open(folder.path(), LogOptions { after: 500, ..LogOptions::default() }).unwrap();
    assert_eq!((log.last(), append(&log, &[b"a"]).unwrap()), (500, 501..502));
    assert_eq!(log.follow(499).err().unwrap().kind(), Kind::NotFound);
    drop(log);
    assert_eq!(open(folder.path()).unwrap().last(), 501, "existing records count");
}

#[test]
fn a_follower_waits_for_new_records() {
    let folder = tempfile::tempdir().unwrap();
    let log = open(folder.path()).unwrap();
    let mut follower = log.follow(0).unwrap();
    assert_eq!(follower.next(NOW).unwrap(), None);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| follower.next(Duration::from_secs(30)).unwrap().unwrap().position);
        std::thread::sleep(Duration::from_millis(20));
        append(&log, &[b"a"]).unwrap();
        assert_eq!(waits.join().unwrap(), 1);
    });
}

/// Writes two segments, the last of which ends in a separate commit.
fn written(folder: &Path) -> (BTreeMap<String, Vec<u8>>, String) {
    let log = Log::open(folder, options(RealDisk)).unwrap();
    (1..=12).for_each(|n| assert!(append(&log, &[&payload(n)]).is_ok()));
    drop(log);
    let files = files(folder);
    let last = files.keys().next_back().unwrap().clone();
    assert!(files.len() >= 2);
    (files, last)
}

#[test]
fn a_log_cut_at_any_byte_keeps_the_records_before() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, last) = written(&folder.path().join("whole"));
    let first: u64 = last.trim_end_matches(".log").parse().unwrap();
    let torn = folder.path().join("torn");
    for length in 0..whole[&last].len() {
        let mut files = whole.clone();
        files.get_mut(&last).unwrap().truncate(length);
        put(&torn, &files);
        let log = open(&torn).unwrap_or_else(|e| panic!("{length}: {e}"));
        let kept = log.last();
        assert!(kept + 1 >= first, "{length}: {kept}");
        let expected: Vec<_> = (1..=kept).map(|n| (n, payload(n))).collect();
        assert_eq!(read(&log, 0).unwrap(), expected, "{length}");
        // The log accepts appends after that.
        assert_eq!(append(&log, &[b"more"]).unwrap(), kept + 1..kept + 2);
        drop(log);
        assert_eq!(read(&open(&torn).unwrap(), kept).unwrap(), [(kept + 1, b"more".to_vec())], "{length}");
    }
}

#[test]
fn unwritten_sectors_are_truncated_at_the_end_and_rejected_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let log = open(folder.path()).unwrap();
    let records: Vec<Vec<u8>> = (0..40).map(|n| vec![n + 1; 200]).collect();
    let of = |range: Range<usize>| records[range].iter().map(Vec::as_slice).collect::<Vec<_>>();
    append(&log, &of(0..10)).unwrap();
    let durable = files(folder.path()).values().next().unwrap().len();
    append(&log, &of(10..40)).unwrap();
    drop(log);
    let whole = files(folder.path());
    let name = whole.keys().next().unwrap();
    let torn = tempfile::tempdir().unwrap();
    for sector in (0..whole[name].len() / 512).map(|sector| sector * 512) {
        let mut files = whole.clone();
        files.get_mut(name).unwrap()[sector..sector + 512].fill(0);
        put(torn.path(), &files);
        match open(torn.path()) {
            Ok(log) => {
                assert!(sector + 512 > durable, "a hole at {sector} in durable records was not detected");
                assert!((10..40).contains(&log.last()), "{sector}: {}", log.last());
                assert_eq!(read(&log, 0).unwrap().len() as u64, log.last());
            }
            Err(e) => assert!(sector < durable && e.kind() == Kind::Corrupt, "a hole at {sector}: {e}"),
        }
    }
}

#[test]
fn flipped_bits_are_rejected_with_the_offset() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, _) = written(&folder.path().join("whole"));
    let flipped = folder.path().join("flipped");
    for (name, bytes) in &whole {
        for at in 0..bytes.len() {
            let mut files = whole.clone();
            files.get_mut(name).unwrap()[at] ^= 1 << (at % 8);
            put(&flipped, &files);
            let error = open(&flipped).map(|log| log.last()).expect_err(&format!("byte {at} of {name}"));
            assert_eq!(error.kind(), Kind::Corrupt, "{error}");
            assert!(error.to_string().contains(name.as_str()), "{error}");
            assert!(at < 32 || error.to_string().contains("at byte"), "{error}");
        }
    }
}

#[test]
fn missing_segments_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let log = Log::open(folder.path(), options(RealDisk)).unwrap();
    (1..=30).for_each(|n| assert!(append(&log, &[&payload(n)]).is_ok()));
    drop(log);
    let whole = files(folder.path());
    let middle = whole.keys().nth(1).unwrap();
    std::fs::remove_file(folder.path().join(middle)).unwrap();
    let error = open(folder.path()).err().unwrap();
    assert!(error.to_string().contains("a segment is missing"), "{error}");
}

/// Fault of one operation.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The write stores half of its bytes and fails.
    Write(ErrorKind),
    Sync(ErrorKind),
}

/// Fails at one operation, counted from 0 over all files; a full disk stays full.
#[derive(Clone)]
struct FailingDisk {
    fault: Fault,
    at: usize,
    done: Arc<AtomicUsize>,
    mended: Arc<AtomicUsize>,
}

struct FailingTail(Box<dyn Tail>, FailingDisk);

impl FailingDisk {
    fn new(fault: Fault, at: usize) -> Self {
        FailingDisk { fault, at, done: Arc::default(), mended: Arc::default() }
    }

    fn fails(&self) -> bool {
        let now = self.done.fetch_add(1, Ordering::Relaxed);
        let is_full = matches!(self.fault, Fault::Write(ErrorKind::StorageFull)) && now > self.at;
        (now == self.at || is_full) && self.mended.load(Ordering::Relaxed) == 0
    }
}

impl Disk for FailingDisk {
    fn create(&self, path: &Path) -> std::io::Result<Box<dyn Tail>> {
        Ok(Box::new(FailingTail(RealDisk.create(path)?, self.clone())))
    }
    fn open(&self, path: &Path) -> std::io::Result<Box<dyn Tail>> {
        Ok(Box::new(FailingTail(RealDisk.open(path)?, self.clone())))
    }
    fn sync_folder(&self, folder: &Path) -> std::io::Result<()> {
        RealDisk.sync_folder(folder)
    }
}

impl Tail for FailingTail {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match self.1.fault {
            Fault::Write(kind) if self.1.fails() => {
                let _ = self.0.write(&bytes[..bytes.len() / 2])?;
                Err(IoError::from(kind))
            }
            _ => self.0.write(bytes),
        }
    }
    fn sync(&mut self) -> std::io::Result<()> {
        match self.1.fault {
            Fault::Sync(kind) if self.1.fails() => Err(IoError::from(kind)),
            _ => self.0.sync(),
        }
    }
    fn cut(&mut self, bytes: u64) -> std::io::Result<()> {
        self.0.cut(bytes)
    }
}

#[test]
fn every_failed_write_or_sync_loses_nothing_that_was_acknowledged() {
    let faults = [
        Fault::Write(ErrorKind::StorageFull),
        Fault::Write(ErrorKind::Other),
        Fault::Sync(ErrorKind::Other),
        Fault::Sync(ErrorKind::StorageFull),
    ];
    for (fault, at) in faults.into_iter().flat_map(|fault| (0..25).map(move |at| (fault, at))) {
        let folder = tempfile::tempdir().unwrap();
        let disk = FailingDisk::new(fault, at);
        let Ok(log) = Log::open(folder.path(), options(disk.clone())) else { continue };
        let (mut acknowledged, mut refused) = (Vec::new(), Vec::<Error>::new());
        for n in 1..=20u64 {
            match append(&log, &[&payload(n)]) {
                Ok(range) => acknowledged.push((range.start, payload(n))),
                Err(e) => refused.push(e),
            }
            // Reading works after any failure of a write.
            assert_eq!(read(&log, 0).unwrap(), acknowledged, "{fault:?} at {at}");
        }
        let is_full = matches!(fault, Fault::Write(ErrorKind::StorageFull));
        for (nth, error) in refused.iter().enumerate() {
            let expected = match fault {
                _ if is_full => Kind::NoSpace,
                Fault::Sync(ErrorKind::StorageFull) if nth == 0 => Kind::NoSpace,
                _ => Kind::Unavailable,
            };
            assert_eq!(error.kind(), expected, "{fault:?} at {at}: {error}");
        }
        if !refused.is_empty() {
            assert_eq!(refused.len() + acknowledged.len(), 20, "the fatal state persists");
        }
        disk.mended.store(1, Ordering::Relaxed);
        let next = append(&log, &[b"mended"]);
        // If there is no space for a new segment, or the segment could not be created, the log recovers: nothing was
        // written that could be lost.
        let may_mend = refused
            .iter()
            .all(|e| e.kind() == Kind::NoSpace || e.to_string().contains("a new segment cannot be created"));
        let must_mend = is_full || refused.is_empty();
        assert!(if next.is_ok() { may_mend } else { !must_mend }, "{fault:?} at {at}: only a full disk is recoverable");
        if next.is_ok() {
            acknowledged.push((acknowledged.len() as u64 + 1, b"mended".to_vec()));
        }
        drop(log);
        let found = read(&open(folder.path()).unwrap(), 0).unwrap();
        assert_eq!(found[..acknowledged.len()], acknowledged, "{fault:?} at {at}");
        assert!(found.len() <= acknowledged.len() + 1, "at most the record whose sync failed is present as well");
    }
}

#[test]
fn writes_to_a_removed_file_are_not_acknowledged() {
    let folder = tempfile::tempdir().unwrap();
    let log = open(folder.path()).unwrap();
    append(&log, &[b"kept"]).unwrap();
    std::fs::remove_dir_all(folder.path()).unwrap();
    for expected in ["the segment's file was removed", "rejects updates"] {
        let error = append(&log, &[b"lost"]).unwrap_err();
        assert!(error.kind() == Kind::Unavailable && error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn a_follower_never_reads_truncated_records() {
    // The failed write leaves a complete first record in the file, which a follower may have read.
    let folder = tempfile::tempdir().unwrap();
    let disk = FailingDisk::new(Fault::Write(ErrorKind::StorageFull), 2);
    let log = Log::open(folder.path(), LogOptions { disk: Arc::new(disk.clone()), ..LogOptions::default() }).unwrap();
    append(&log, &[b"first"]).unwrap();
    let mut follower = log.follow(0).unwrap();
    std::thread::scope(|scope| {
        let failed = scope.spawn(|| append(&log, &[b"never", &[7; 100]]).unwrap_err().kind());
        assert_eq!(failed.join().unwrap(), Kind::NoSpace);
    });
    assert_eq!(follower.next(NOW).unwrap().unwrap().payload, b"first");
    disk.mended.store(1, Ordering::Relaxed);
    append(&log, &[b"other"]).unwrap();
    assert_eq!(follower.next(NOW).unwrap().unwrap(), Record { position: 2, payload: b"other".to_vec() });
}

type Hook = Arc<Mutex<Option<Box<dyn FnMut() + Send>>>>;

/// A disk that fails once on demand.
#[derive(Clone, Default)]
struct Faulty {
    no_descriptor: Arc<AtomicBool>,
    no_folder_sync: Arc<AtomicBool>,
    /// The next write stores half and finds no space.
    is_full: Arc<AtomicBool>,
    /// Called before the end is truncated.
    before_cut: Hook,
}

struct FaultyTail(Box<dyn Tail>, Faulty);

const NO_DESCRIPTOR: i32 = rustix::io::Errno::MFILE.raw_os_error();

impl Disk for Faulty {
    fn create(&self, path: &Path) -> std::io::Result<Box<dyn Tail>> {
        match self.no_descriptor.swap(false, Ordering::SeqCst) {
            true => Err(IoError::from_raw_os_error(NO_DESCRIPTOR)),
            false => Ok(Box::new(FaultyTail(RealDisk.create(path)?, self.clone()))),
        }
    }
    fn open(&self, path: &Path) -> std::io::Result<Box<dyn Tail>> {
        Ok(Box::new(FaultyTail(RealDisk.open(path)?, self.clone())))
    }
    fn sync_folder(&self, folder: &Path) -> std::io::Result<()> {
        match self.no_folder_sync.swap(false, Ordering::SeqCst) {
            true => Err(IoError::from_raw_os_error(NO_DESCRIPTOR)),
            false => RealDisk.sync_folder(folder),
        }
    }
}

impl Tail for FaultyTail {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.1.is_full.swap(false, Ordering::SeqCst) {
            let _ = self.0.write(&bytes[..bytes.len() / 2])?;
            return Err(IoError::from(ErrorKind::StorageFull));
        }
        self.0.write(bytes)
    }
    fn sync(&mut self) -> std::io::Result<()> {
        self.0.sync()
    }
    fn cut(&mut self, bytes: u64) -> std::io::Result<()> {
        if let Some(hook) = &mut *self.1.before_cut.lock().unwrap() {
            hook();
        }
        self.0.cut(bytes)
    }
}

#[test]
fn a_follower_that_reads_during_a_truncation_never_reads_truncated_records() {
    let folder = tempfile::tempdir().unwrap();
    let disk = Faulty::default();
    let log = Log::open(folder.path(), LogOptions { disk: Arc::new(disk.clone()), ..LogOptions::default() }).unwrap();
    append(&log, &[b"first"]).unwrap();
    let follower = Arc::new(Mutex::new(log.follow(0).unwrap()));
    let reads = follower.clone();
    // The follower reads a complete record of the failed write.
    let hook = move || assert_eq!(reads.lock().unwrap().next(NOW).unwrap().unwrap().payload, b"first");
    *disk.before_cut.lock().unwrap() = Some(Box::new(hook));
    disk.is_full.store(true, Ordering::SeqCst);
    assert_eq!(append(&log, &[b"never", &[7; 100]]).unwrap_err().kind(), Kind::NoSpace);
    append(&log, &[b"other"]).unwrap();
    let next = follower.lock().unwrap().next(NOW).unwrap().unwrap();
    assert_eq!(next, Record { position: 2, payload: b"other".to_vec() });
}

#[test]
fn a_failed_release_is_resumed_and_leaves_no_gap() {
    let folder = tempfile::tempdir().unwrap();
    let disk = Faulty::default();
    let log = Log::open(folder.path(), options(disk.clone())).unwrap();
    (0..60u8).for_each(|n| assert!(append(&log, &[&[n; 40]]).is_ok()));
    let names: Vec<String> = files(folder.path()).into_keys().collect();
    disk.no_folder_sync.store(true, Ordering::SeqCst);
    assert_eq!(log.release(30).unwrap_err().kind(), Kind::Io);
    assert_eq!(log.first(), 1, "a segment is forgotten only after its durable removal");
    log.release(30).unwrap();
    let first = log.first();
    assert!((20..=31).contains(&first), "{first}");
    // A segment that cannot be removed, so that the segments after it are not removed either.
    let path = folder.path().join(names.iter().find(|name| name.starts_with(&format!("{first:020}"))).unwrap());
    let aside = folder.path().join("aside");
    std::fs::rename(&path, &aside).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert_eq!(log.release(50).unwrap_err().kind(), Kind::Io);
    assert_eq!(log.first(), first);
    std::fs::remove_dir(&path).unwrap();
    std::fs::rename(&aside, &path).unwrap();
    assert_eq!(read(&log, first - 1).unwrap().len() as u64, 61 - first);
    drop(log);
    let log = Log::open(folder.path(), options(disk)).unwrap();
    assert_eq!((log.first(), log.last()), (first, 60));
    log.release(50).unwrap();
    assert!(log.first() > first);
}

#[test]
fn segments_are_created_once_file_descriptors_are_available() {
    for fails in [|disk: &Faulty| disk.no_descriptor.clone(), |disk: &Faulty| disk.no_folder_sync.clone()] {
        let folder = tempfile::tempdir().unwrap();
        let disk = Faulty::default();
        let log = Log::open(folder.path(), LogOptions { segment_bytes: 40, ..options(disk.clone()) }).unwrap();
        append(&log, &[b"a"]).unwrap();
        fails(&disk).store(true, Ordering::SeqCst);
        let error = append(&log, &[b"b"]).unwrap_err();
        assert!(error.kind() == Kind::Unavailable && error.to_string().contains("try again later"), "{error}");
        assert_eq!((append(&log, &[b"c"]).unwrap(), log.trouble()), (2..3, None));
        drop(log);
        assert_eq!(read(&open(folder.path()).unwrap(), 0).unwrap(), [(1, b"a".to_vec()), (2, b"c".to_vec())]);
    }
}

/// Opens a log in `root` that records its position outside of its folder.
fn marked(root: &Path, after: u64) -> Result<Log> {
    let mark = Some(root.join("positions/log"));
    Log::open(&root.join("log"), LogOptions { after, mark, ..options(RealDisk) })
}

#[test]
fn a_flipped_bit_is_no_torn_write_though_the_record_holds_an_empty_sector() {
    let root = tempfile::tempdir().unwrap();
    let log = marked(root.path(), 0).unwrap();
    append(&log, &[&payload(1)]).unwrap();
    let mut vector = vec![0; 2048];
    vector[..4].copy_from_slice(&[1, 2, 3, 4]);
    append(&log, &[&vector, &vector]).unwrap();
    drop(log);
    let path = root.path().join("log").join(files(&root.path().join("log")).into_keys().next().unwrap());
    let whole = std::fs::read(&path).unwrap();
    // Damages the first record of the last commit, and then its last record.
    for at in [32 + (32 + payload(1).len()) + 32 + 2, whole.len() - 2048 + 2] {
        let mut flipped = whole.clone();
        flipped[at] ^= 4;
        std::fs::write(&path, &flipped).unwrap();
        let error = marked(root.path(), 0).err().unwrap();
        assert!(error.kind() == Kind::Corrupt && error.to_string().contains("position 3 was durable"), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), flipped, "it stays as it is");
    }
    // A crash before the acknowledgement leaves unwritten sectors and the previously recorded position.
    let earlier = tempfile::tempdir().unwrap();
    assert!(append(&marked(earlier.path(), 0).unwrap(), &[b"a"]).is_ok());
    std::fs::copy(earlier.path().join("positions/log"), root.path().join("positions/log")).unwrap();
    let mut torn = whole;
    torn[512..1024].fill(0);
    torn[32 + (32 + payload(1).len()) + 32 + 2] = 0;
    std::fs::write(&path, &torn).unwrap();
    assert_eq!(marked(root.path(), 0).unwrap().last(), 1);
}

#[test]
fn a_log_without_its_end_is_rejected() {
    let root = tempfile::tempdir().unwrap();
    let (folder, mark) = (root.path().join("log"), root.path().join("positions/log"));
    let log = marked(root.path(), 0).unwrap();
    (1..=12).for_each(|n| assert!(append(&log, &[&payload(n)]).is_ok()));
    drop(log);
    let (whole, reported) = (files(&folder), std::fs::read(&mark).unwrap());
    let last = whole.keys().next_back().unwrap().clone();
    let first: u64 = last.trim_end_matches(".log").parse().unwrap();
    let end = |name: &str| 32 + 32 + payload(name.trim_end_matches(".log").parse().unwrap()).len();
    type Files = BTreeMap<String, Vec<u8>>;
    let without = |change: &dyn Fn(&mut Files)| {
        let mut files = whole.clone();
        change(&mut files);
        put(&folder, &files);
        std::fs::write(&mark, &reported).unwrap();
    };
    let emptied = |files: &mut BTreeMap<String, Vec<u8>>| files.get_mut(&last).unwrap().clear();
    let header = |files: &mut BTreeMap<String, Vec<u8>>| files.get_mut(&last).unwrap().truncate(32);
    let record = |files: &mut BTreeMap<String, Vec<u8>>| files.get_mut(&last).unwrap().truncate(end(&last));
    let within = |files: &mut BTreeMap<String, Vec<u8>>| files.get_mut(&last).unwrap().truncate(end(&last) + 5);
    let removed = |files: &mut BTreeMap<String, Vec<u8>>| drop(files.remove(&last));
    type Change<'a> = &'a dyn Fn(&mut BTreeMap<String, Vec<u8>>);
    let changes: [(Change<'_>, u64); 5] =
        [(&emptied, first - 1), (&header, first - 1), (&record, first), (&within, first), (&removed, first - 1)];
    for (nth, (change, kept)) in changes.into_iter().enumerate() {
        without(change);
        let before = files(&folder);
        let error = marked(root.path(), 0).err().unwrap_or_else(|| panic!("change {nth}"));
        assert_eq!(error.kind(), Kind::Corrupt, "change {nth}: {error}");
        assert!(
            nth == 3 || error.to_string().contains(&format!("ends at position {kept}, expected at least 12")),
            "{error}"
        );
        assert_eq!(files(&folder), before, "change {nth}: it stays as it is");
        // Without the recorded position, the log continues with the remaining records.
        std::fs::remove_file(&mark).unwrap();
        let log = marked(root.path(), 0).unwrap();
        assert_eq!((log.last(), append(&log, &[b"more"]).unwrap()), (kept, kept + 1..kept + 2), "change {nth}");
    }
    // All records are missing: those that a version includes are not needed.
    without(&|files| files.clear());
    let error = marked(root.path(), 11).err().unwrap().to_string();
    assert!(error.contains("ends at position 0, expected at least 12") && error.contains("remove"), "{error}");
    assert_eq!(append(&marked(root.path(), 12).unwrap(), &[b"more"]).unwrap(), 13..14);
    assert_eq!(marked(root.path(), 12).unwrap().last(), 13);
}

#[test]
fn an_unwritable_position_file_is_reported_and_rejects_no_update() {
    let root = tempfile::tempdir().unwrap();
    let (mark, away) = (root.path().join("positions/log"), root.path().join("away"));
    std::fs::create_dir(root.path().join("positions")).unwrap();
    std::os::unix::fs::symlink(away.join("log"), &mark).unwrap();
    let log = marked(root.path(), 0).unwrap();
    append(&log, &[b"a"]).unwrap();
    let reported = trouble(&log);
    assert!(reported.contains("the durable position cannot be written"), "{reported}");
    append(&log, &[b"b"]).unwrap();
    std::fs::create_dir(&away).unwrap();
    ends(&log);
    assert!(std::fs::read(&mark).unwrap().starts_with(b"00000000000000000002"));
}

#[test]
fn a_stale_or_torn_position_file_rejects_no_update() {
    let root = tempfile::tempdir().unwrap();
    let mark = root.path().join("positions/log");
    let log = marked(root.path(), 5).unwrap();
    let begun = std::fs::read(&mark).unwrap();
    append(&log, &[b"a"]).unwrap();
    drop(log);
    let reported = std::fs::read(&mark).unwrap();
    assert_eq!(reported[..20], *b"00000000000000000006");
    let mut damaged = reported.clone();
    damaged[3] = b'9';
    for left in [
        begun,
        Vec::new(),
        vec![0; 38],
        reported[..30].to_vec(),
        b"other words, which are too long for it".to_vec(),
        damaged,
    ] {
        std::fs::write(&mark, &left).unwrap();
        assert_eq!(marked(root.path(), 0).unwrap().last(), 6);
        assert_eq!(std::fs::read(&mark).unwrap(), reported);
    }
}

/// Waits for the log to detect a fault, and returns it.
fn trouble(log: &Log) -> String {
    let start = Instant::now();
    loop {
        match log.trouble() {
            Some(why) => return why,
            None => assert!(start.elapsed() < Duration::from_secs(60), "the fault was not detected"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until a fault is resolved.
fn ends(log: &Log) {
    let start = Instant::now();
    while log.trouble().is_some() {
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", log.trouble());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn removed_files_of_an_open_log_are_reported_and_no_append_is_acknowledged() {
    type Change = fn(&Path, &Path);
    let changes: [(Change, &str); 5] = [
        (|root, _| std::fs::rename(root.join("log"), root.join("elsewhere")).unwrap(), "removed or renamed"),
        (|_, last| std::fs::remove_file(last).unwrap(), "removed or renamed"),
        (|_, last| std::fs::write(last, "").unwrap(), "has 0 bytes, expected"),
        (|_, last| drop(File::options().write(true).open(last).unwrap().set_len(33)), "has 33 bytes, expected"),
        (
            |root, last| {
                std::fs::copy(last, root.join("copy")).unwrap();
                std::fs::rename(root.join("copy"), last).unwrap();
            },
            "another file",
        ),
    ];
    for (change, why) in changes {
        for is_first_told in [true, false] {
            let root = tempfile::tempdir().unwrap();
            let log = marked(root.path(), 0).unwrap();
            (1..=12).for_each(|n| assert!(append(&log, &[&payload(n)]).is_ok()));
            assert_eq!(log.trouble(), None);
            let last = files(&root.path().join("log")).into_keys().next_back().unwrap();
            change(root.path(), &root.path().join("log").join(last));
            if is_first_told {
                assert!(trouble(&log).contains(why), "{:?}, expected {why}", log.trouble());
            }
            let error = append(&log, &[b"lost"]).unwrap_err();
            assert!(error.kind() == Kind::Unavailable && error.to_string().contains(why), "{error}");
            assert!(trouble(&log).contains("rejects updates"), "{:?}", log.trouble());
            assert_eq!(log.last(), 12);
            drop(log);
            assert!(marked(root.path(), 0).is_err() || why == "another file");
        }
    }
}

#[test]
fn appends_resume_once_a_missing_folder_is_back() {
    let root = tempfile::tempdir().unwrap();
    let log = marked(root.path(), 0).unwrap();
    append(&log, &[b"a"]).unwrap();
    std::fs::rename(root.path().join("log"), root.path().join("elsewhere")).unwrap();
    assert_eq!(append(&log, &[b"refused"]).unwrap_err().kind(), Kind::Unavailable);
    std::fs::rename(root.path().join("elsewhere"), root.path().join("log")).unwrap();
    assert_eq!(append(&log, &[b"b"]).unwrap(), 2..3);
    drop(log);
    assert_eq!(read(&marked(root.path(), 0).unwrap(), 0).unwrap(), [(1, b"a".to_vec()), (2, b"b".to_vec())]);
}

#[test]
fn a_removed_full_segment_is_reported_until_restored_or_released() {
    let root = tempfile::tempdir().unwrap();
    let log = marked(root.path(), 0).unwrap();
    (1..=30).for_each(|n| assert!(append(&log, &[&payload(n)]).is_ok()));
    let folder = root.path().join("log");
    let names: Vec<PathBuf> = files(&folder).into_keys().map(|name| folder.join(name)).collect();
    assert!(names.len() > 3);
    let first: u64 = names[1].file_stem().unwrap().to_str().unwrap().parse().unwrap();
    let whole = std::fs::read(&names[1]).unwrap();
    std::fs::write(&names[1], &whole[..whole.len() - 1]).unwrap();
    let reported = trouble(&log);
    assert!(reported.contains(&format!("position {first} on")) && reported.contains("expected"), "{reported}");
    std::fs::write(&names[1], &whole).unwrap();
    ends(&log);
    std::fs::remove_file(&names[1]).unwrap();
    assert!(trouble(&log).contains("removed or renamed"));
    append(&log, &[b"taken all the same"]).unwrap();
    // Records that a version includes are not missed.
    log.release(u64::MAX).unwrap();
    ends(&log);
    drop(log);
    assert_eq!(marked(root.path(), 0).unwrap().last(), 31);
}

/// Golden file of format 1, which must stay readable.
#[test]
fn the_format_is_that_of_the_golden_file() {
    let golden = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
        .join("tests/golden/journal/00000000000000000001.log");
    let folder = tempfile::tempdir().unwrap();
    let log = open(folder.path()).unwrap();
    append(&log, &[b"a"]).unwrap();
    append(&log, &["zw\u{f6}lf".as_bytes(), &[0, 255]]).unwrap();
    drop(log);
    let written = files(folder.path()).into_values().next().unwrap();
    if std::env::var_os("STERLING_BLESS").is_some() {
        std::fs::create_dir_all(golden.parent().unwrap()).unwrap();
        std::fs::write(&golden, &written).unwrap();
    }
    assert_eq!(written, std::fs::read(&golden).unwrap());
}

#[test]
fn the_bytes_after_a_position_are_about_those_of_its_records() {
    let folder = tempfile::tempdir().unwrap();
    let log = Log::open(folder.path(), options(RealDisk)).unwrap();
    for n in 0..60u8 {
        append(&log, &[&[n; 40]]).unwrap();
    }
    assert!(files(folder.path()).len() > 5, "it has several segments");
    let all = log.bytes_after(0);
    assert_eq!(all, log.bytes());
    for after in 0..=60 {
        let exact = (60 - after) * (40 + 32);
        assert!(
            log.bytes_after(after).abs_diff(exact) <= all - 60 * 72,
            "{after}: {} of {exact}",
            log.bytes_after(after)
        );
    }
    assert_eq!((log.bytes_after(60), log.bytes_after(u64::MAX)), (0, 0));
    // Sizes are known after a restart as well.
    drop(log);
    let log = Log::open(folder.path(), options(RealDisk)).unwrap();
    assert_eq!((log.bytes_after(0), log.bytes_after(60)), (all, 0));
}
