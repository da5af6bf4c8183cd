//! What a log promises: order, durability, and a clear word where the disk does not keep its own.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::io::{Error as IoError, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::*;
use crate::error::{Error, Kind};

const NOW: Duration = Duration::ZERO;

fn open(folder: &Path) -> Result<Log> {
    Log::open(folder, LogOptions::default())
}

/// Small segments, on a disk that fails as it is told.
fn options(disk: impl Disk + 'static) -> LogOptions {
    LogOptions { segment_bytes: 300, disk: Arc::new(disk), ..LogOptions::default() }
}

fn append(log: &Log, records: &[&[u8]]) -> Result<Range<u64>> {
    append_at(log, records, None)
}

fn append_at(log: &Log, records: &[&[u8]], expected: Option<u64>) -> Result<Range<u64>> {
    let (tell, told) = mpsc::channel();
    let records = records.iter().map(|record| record.to_vec()).collect();
    log.append(Append { records, expected }, Box::new(move |result| tell.send(result).unwrap()));
    told.recv().unwrap()
}

/// What can be read after a position.
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
fn what_is_appended_together_follows_one_another() {
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

/// Counts syncs; each takes as long as a slow disk's.
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
fn one_sync_serves_all_who_wait() {
    let folder = tempfile::tempdir().unwrap();
    let disk = SlowDisk::default();
    let log = Log::open(folder.path(), LogOptions { disk: Arc::new(disk.clone()), ..LogOptions::default() }).unwrap();
    let (tell, told) = mpsc::channel();
    for n in 0..1000 {
        let tell = tell.clone();
        let append = Append { records: vec![payload(n)], expected: None };
        log.append(append, Box::new(move |result| tell.send(result.unwrap()).unwrap()));
    }
    drop(tell);
    let positions: Vec<u64> = told.iter().map(|range| range.start).collect();
    assert!(positions.iter().copied().eq(1..=1000), "told in order");
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
    for wrong in [Vec::new(), vec![0; PAYLOAD_BYTES_MAX + 1]] {
        assert_eq!(append(&log, &[b"d", &wrong]).unwrap_err().kind(), Kind::Invalid);
    }
    assert_eq!(read(&log, 1).unwrap(), [(2, b"c".to_vec())]);
}

#[test]
fn a_log_is_written_by_one() {
    let folder = tempfile::tempdir().unwrap();
    let log = open(folder.path()).unwrap();
    let error = open(folder.path()).err().unwrap();
    assert_eq!(error.kind(), Kind::Conflict);
    assert!(error.to_string().contains("another process writes this journal"), "{error}");
    drop(log);
    open(folder.path()).unwrap();
}

#[test]
fn released_records_are_gone_and_others_stay() {
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
    // A follower that was left behind reads what its open file holds, and is then told.
    let told = std::iter::repeat_with(|| slow.next(NOW)).find_map(Result::err).unwrap();
    assert!(told.to_string().contains("was released"), "{told}");
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
    assert_eq!(open(folder.path()).unwrap().last(), 501, "what is there counts");
}

#[test]
fn a_follower_waits_for_what_comes() {
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

/// Two segments of which the last one ends in a commit of its own.
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
        // And it goes on from there.
        assert_eq!(append(&log, &[b"more"]).unwrap(), kept + 1..kept + 2);
        drop(log);
        assert_eq!(read(&open(&torn).unwrap(), kept).unwrap(), [(kept + 1, b"more".to_vec())], "{length}");
    }
}

#[test]
fn sectors_that_were_never_written_are_cut_at_the_end_and_refused_within() {
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
                assert!(sector + 512 > durable, "a hole at {sector} in what was durable was not seen");
                assert!((10..40).contains(&log.last()), "{sector}: {}", log.last());
                assert_eq!(read(&log, 0).unwrap().len() as u64, log.last());
            }
            Err(e) => assert!(sector < durable && e.kind() == Kind::Corrupt, "a hole at {sector}: {e}"),
        }
    }
}

#[test]
fn a_flipped_bit_anywhere_is_refused_with_its_place() {
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
fn missing_segments_are_refused() {
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

/// What goes wrong at which operation.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The write stores half of what it was given, and fails.
    Write(ErrorKind),
    Sync(ErrorKind),
}

/// Fails at one operation, counted from 0 over all files, and for ever after where it is a full disk.
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
            // Reading goes on whatever happened to writing.
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
            assert_eq!(refused.len() + acknowledged.len(), 20, "once it has failed it goes on failing");
        }
        disk.mended.store(1, Ordering::Relaxed);
        let next = append(&log, &[b"mended"]);
        // No room for a new segment is no room alone: nothing was written there that might be lost.
        let may_mend = refused.iter().all(|e| e.kind() == Kind::NoSpace);
        let must_mend = is_full || refused.is_empty();
        assert!(if next.is_ok() { may_mend } else { !must_mend }, "{fault:?} at {at}: a full disk alone mends");
        if next.is_ok() {
            acknowledged.push((acknowledged.len() as u64 + 1, b"mended".to_vec()));
        }
        drop(log);
        let found = read(&open(folder.path()).unwrap(), 0).unwrap();
        assert_eq!(found[..acknowledged.len()], acknowledged, "{fault:?} at {at}");
        assert!(found.len() <= acknowledged.len() + 1, "at most the one whose sync failed is there too");
    }
}

#[test]
fn what_goes_to_a_file_that_was_removed_is_not_acknowledged() {
    let folder = tempfile::tempdir().unwrap();
    let log = open(folder.path()).unwrap();
    append(&log, &[b"kept"]).unwrap();
    std::fs::remove_dir_all(folder.path()).unwrap();
    for expected in ["its file was removed", "takes no more updates"] {
        let error = append(&log, &[b"lost"]).unwrap_err();
        assert!(error.kind() == Kind::Unavailable && error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn a_follower_never_reads_what_was_cut() {
    // The write that fails has put a whole first record into the file, which a follower may have read ahead.
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

/// The bytes of format 1 as they were first written; they stay readable.
#[test]
fn the_format_is_that_of_the_golden_file() {
    let golden = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/journal/00000000000000000001.log");
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
