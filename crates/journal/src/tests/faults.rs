//! Fault injection: one failure at every operation of the disk in turn, over a script of appends, rotations, releases and
//! restarts. Afterwards no acknowledged record is missing, no rejected record is present, and the log works as one that never
//! failed.

// The number of cases is printed.
#![allow(clippy::print_stderr)]

use super::*;

/// Failure of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    Code(Errno),
    Panic,
}

/// The operation that fails, and the kind of its failure.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// Index of the failing operation over all files, from 0; with the largest number no operation fails.
    at: usize,
    failure: Failure,
    /// True if the failing operation takes full effect; if false, a failing write stores half of its bytes.
    is_done: bool,
}

/// The disk, with a count of its operations.
#[derive(Clone)]
struct OneFailureDisk {
    case: Case,
    requested: Arc<AtomicUsize>,
    /// Name of the operation that failed.
    failed: Arc<Mutex<Option<&'static str>>>,
}

impl OneFailureDisk {
    fn new(case: Case) -> Self {
        OneFailureDisk { case, requested: Arc::default(), failed: Arc::default() }
    }

    fn run<R>(&self, name: &'static str, run: impl FnOnce() -> std::io::Result<R>) -> std::io::Result<R> {
        if self.requested.fetch_add(1, Ordering::SeqCst) != self.case.at {
            return run();
        }
        *self.failed.lock().unwrap() = Some(name);
        if self.case.is_done {
            run()?;
        }
        match self.case.failure {
            Failure::Code(code) => Err(code.into()),
            // Like a panic, without the message on the terminal.
            Failure::Panic => std::panic::resume_unwind(Box::new("the disk broke")),
        }
    }
}

struct OnceFailingTail(Box<dyn Tail>, OneFailureDisk);

impl Disk for OneFailureDisk {
    fn create(&self, path: &Path) -> std::io::Result<Box<dyn Tail>> {
        let tail = self.run("create", || RealDisk.create(path))?;
        Ok(Box::new(OnceFailingTail(tail, self.clone())))
    }
    fn open(&self, path: &Path) -> std::io::Result<Box<dyn Tail>> {
        let tail = self.run("open", || RealDisk.open(path))?;
        Ok(Box::new(OnceFailingTail(tail, self.clone())))
    }
    fn sync_folder(&self, folder: &Path) -> std::io::Result<()> {
        self.run("sync_folder", || RealDisk.sync_folder(folder))
    }
}

impl Tail for OnceFailingTail {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let OnceFailingTail(tail, disk) = self;
        // An interrupted write stores no bytes.
        let is_interrupted = disk.case.failure == Failure::Code(Errno::INTR);
        if disk.requested.load(Ordering::SeqCst) == disk.case.at && !disk.case.is_done && !is_interrupted {
            let _ = tail.write(&bytes[..bytes.len() / 2])?;
        }
        let is_done = disk.case.is_done && !is_interrupted;
        let disk = OneFailureDisk { case: Case { is_done, ..disk.case }, ..disk.clone() };
        disk.run("write", || tail.write(bytes))
    }
    fn sync(&mut self) -> std::io::Result<()> {
        let OnceFailingTail(tail, disk) = self;
        disk.run("sync", || tail.sync())
    }
    fn cut(&mut self, bytes: u64) -> std::io::Result<()> {
        let OnceFailingTail(tail, disk) = self;
        disk.run("cut", || tail.cut(bytes))
    }
    fn check(&self) -> std::io::Result<()> {
        let OnceFailingTail(tail, disk) = self;
        disk.run("check", || tail.check())
    }
}

/// A log, and the results of its writers.
struct Script<'a> {
    root: &'a Path,
    disk: OneFailureDisk,
    log: Option<Log>,
    /// Number of appends, from 0.
    appends: u64,
    starts: u64,
    acknowledged: BTreeMap<u64, Vec<u8>>,
    /// Records that may be present according to the log's error.
    uncertain: Vec<Vec<u8>>,
    /// Number of errors that writers got.
    refusals: u64,
}

impl<'a> Script<'a> {
    fn new(root: &'a Path, disk: OneFailureDisk) -> Self {
        let (acknowledged, uncertain) = (BTreeMap::new(), Vec::new());
        let mut script = Script { root, disk, log: None, appends: 0, starts: 0, acknowledged, uncertain, refusals: 0 };
        script.start();
        script
    }

    fn log(&self) -> &Log {
        self.log.as_ref().unwrap()
    }

    /// Closes the log if it is open, and opens it; the second attempt must succeed.
    fn start(&mut self) {
        drop(self.log.take());
        self.starts += 1;
        let mark = Some(self.root.join("positions/log"));
        let open = || {
            let options = LogOptions { mark: mark.clone(), ..options(self.disk.clone()) };
            // A process whose start panics is restarted.
            caught(|| Log::open(&self.root.join("log"), options))?.ok()
        };
        self.log = Some(open().or_else(open).expect("a healthy disk opens"));
    }

    /// Appends a record. The second attempt must succeed, or the first attempt after a restart if the log requires a
    /// restart.
    fn append(&mut self) {
        self.appends += 1;
        for attempt in 0..4 {
            let payload = format!("{} {attempt} {}", self.appends, "x".repeat(self.appends as usize % 40)).into_bytes();
            match append(self.log(), &[&payload]) {
                Ok(range) => {
                    assert_eq!(self.acknowledged.insert(range.start, payload), None, "a position is assigned once");
                    return;
                }
                Err(e) => {
                    self.refusals += 1;
                    if e.to_string().contains("may or may not be durable") {
                        self.uncertain.push(payload);
                    }
                    let reported = self.log().trouble();
                    if reported.is_some_and(|why| why.contains("until the server is restarted")) {
                        self.start();
                    }
                }
            }
        }
        panic!("no append succeeds on a healthy disk: {:?}", self.log().trouble());
    }

    fn release(&mut self, position: u64) {
        let release = || caught(|| self.log().release(position));
        if release().is_none_or(|released| released.is_err()) {
            release().unwrap().unwrap();
        }
    }

    /// Compares the readable records with the acknowledged ones.
    fn check(&self) {
        let first = self.log().first();
        let mut found: BTreeMap<u64, Vec<u8>> = read(self.log(), first - 1).unwrap().into_iter().collect();
        for (position, payload) in self.acknowledged.range(first..) {
            assert_eq!(found.remove(position).as_ref(), Some(payload), "position {position} was acknowledged");
        }
        for (position, payload) in found {
            assert!(self.uncertain.contains(&payload), "position {position} was rejected");
        }
    }

    fn run(&mut self) {
        (0..12).for_each(|_| self.append());
        self.check();
        let mut follower = self.log().follow(self.log().last()).unwrap();
        (0..5).for_each(|_| self.append());
        self.release(5);
        self.append();
        // A follower sees exactly the acknowledged records, up to the end of the log that it follows.
        while let Some(record) = follower.next(NOW).unwrap() {
            assert_eq!(self.acknowledged.get(&record.position), Some(&record.payload));
        }
        self.start();
        self.check();
        (0..9).for_each(|_| self.append());
        self.release(14);
        self.append();
        self.start();
        self.append();
        self.check();
    }
}

#[test]
fn recovers_from_one_failure_at_any_disk_operation() {
    let run = |case: Case| {
        let root = tempfile::tempdir_in(memory()).unwrap();
        let disk = OneFailureDisk::new(case);
        let reported = caught(|| {
            let mut script = Script::new(root.path(), disk.clone());
            script.run();
            (script.refusals, script.starts, script.uncertain.len())
        });
        let failed = *disk.failed.lock().unwrap();
        let requested = disk.requested.load(Ordering::SeqCst);
        let reported = reported.unwrap_or_else(|| panic!("{case:?}, at {failed:?}"));
        (reported, failed, requested)
    };
    let none = Case { at: usize::MAX, failure: Failure::Panic, is_done: false };
    let ((refusals, starts, _), _, operations) = run(none);
    assert_eq!((refusals, starts), (0, 3));
    let failures = [Errno::MFILE, Errno::IO, Errno::NOSPC, Errno::INTR].map(Failure::Code);
    let mut cases = 0;
    for (failure, is_done) in failures.into_iter().chain([Failure::Panic]).flat_map(|f| [(f, false), (f, true)]) {
        // The writer also checks its files once per second, so the number of operations varies slightly.
        for at in 0..operations {
            let ((refusals, starts, uncertain), failed, _) = run(Case { at, failure, is_done });
            let Some(operation) = failed else { continue };
            cases += 1;
            let case = format!("{failure:?} at {operation}, operation {at}, done {is_done}");
            assert!(refusals <= 1 && uncertain <= 1 && starts <= 4, "{case}: {refusals}, {uncertain}, {starts}");
            let mends = match (failure, operation) {
                (Failure::Code(Errno::INTR), "write") => refusals == 0 && starts == 3,
                // The segment was not created; a later append creates it.
                (Failure::Code(_), "create") if !is_done => starts == 3 && uncertain == 0,
                (Failure::Code(Errno::NOSPC), "write") => starts == 3 && uncertain == 0,
                (Failure::Code(_), "check") => starts == 3 && uncertain == 0,
                _ => true,
            };
            assert!(mends, "{case}: {refusals} rejected, {uncertain} of them uncertain, {starts} starts");
        }
    }
    eprintln!("{cases} failures, at {operations} operations");
    assert!(cases > 8 * operations, "{cases} of {operations} operations");
}

/// Returns the result of a call, or `None` if it panics.
fn caught<R>(call: impl FnOnce() -> R) -> Option<R> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).ok()
}

/// Returns a folder for files that need not survive a reboot.
fn memory() -> &'static Path {
    Some(Path::new("/dev/shm")).filter(|memory| memory.is_dir()).unwrap_or(Path::new("/tmp"))
}
