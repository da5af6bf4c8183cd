//! The log: records in files of this machine.
//!
//! One thread writes. It takes all that waits, writes it in one piece, syncs once and tells everybody: a sync takes
//! milliseconds however much it covers, so that a thousand writers wait no longer than one.
//!
//! - **No room.** What was written of the piece is cut off again, its writers are told, and the next ones may succeed.
//! - **A failed sync**, or any other failed write, leaves it uncertain what is durable: the kernel forgets such pages, and a
//!   second sync would succeed without them (Rebello et al., "Can Applications Recover from fsync Failures?", ATC 2020). Nothing
//!   is appended any more until the log is opened anew, which reads what is really there.

use std::fs::File;
use std::io::{Error as IoError, ErrorKind};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};

use super::disk::{Disk, RealDisk, Tail};
use super::follow::{LogFollower, State};
use super::format::{HEADER_BYTES, PAYLOAD_BYTES_MAX, header, write_record};
use super::scan::{Cursor, Segment, path_of, segments};
use super::shared::Shared;
use super::{Append, Done, Follower, Journal, Journals, Topic};
use crate::error::{Error, Kind, Result};

/// The file that is locked as long as a log is open.
const LOCK: &str = ".lock";
/// Appends that may wait; a server's requests for bodies are bounded long before.
const WAITING_MAX: usize = 4096;
/// Bytes after which those that still wait are left to the next sync.
const COMMIT_BYTES: usize = 8 << 20;

/// How a log is kept.
#[derive(Clone)]
pub struct LogOptions {
    /// The position after which a new log begins: that of the snapshot whose updates it takes.
    pub after: u64,
    /// Bytes after which a segment is full.
    pub segment_bytes: u64,
    /// Where the files lie.
    pub disk: Arc<dyn Disk>,
}

impl Default for LogOptions {
    fn default() -> Self {
        LogOptions { after: 0, segment_bytes: 64 << 20, disk: Arc::new(RealDisk) }
    }
}

/// Logs below a folder, each in one of its own.
pub struct Logs {
    /// The folder.
    pub root: PathBuf,
    /// How each is kept.
    pub options: LogOptions,
}

impl Logs {
    /// Logs below a folder, kept as usual.
    pub fn below(root: impl Into<PathBuf>) -> Self {
        Logs { root: root.into(), options: LogOptions::default() }
    }
}

impl Journals for Logs {
    fn open(&self, topic: &Topic, after: u64) -> Result<Box<dyn Journal>> {
        let log = Log::open(&self.root.join(topic.to_string()), LogOptions { after, ..self.options.clone() });
        // A process that is about to end lets go of it.
        let log = log.map_err(|e| match e.kind() {
            Kind::Conflict => Error::not_ready(e.to_string()),
            _ => e,
        })?;
        Ok(Box::new(log))
    }

    fn folder(&self, topic: &Topic) -> Option<PathBuf> {
        Some(self.root.join(topic.to_string()))
    }
}

/// A journal in files of this machine.
pub struct Log {
    folder: PathBuf,
    disk: Arc<dyn Disk>,
    shared: Arc<Shared<State>>,
    waiting: Option<Sender<(Append, Done)>>,
    writer: Option<JoinHandle<()>>,
    _lock: File,
}

impl Log {
    /// Opens the log in `folder`, or makes one. All its records are read: what a crash has torn at the end is cut off.
    ///
    /// # Errors
    /// `Conflict` where another has it open; `Corrupt` with file, position and byte where a record is damaged or one is
    /// missing; `Io` with the path.
    pub fn open(folder: &Path, options: LogOptions) -> Result<Self> {
        let io = |e| Error::io(folder.display(), e);
        std::fs::create_dir_all(folder).map_err(io)?;
        let lock = File::options().write(true).create(true).truncate(false).open(folder.join(LOCK)).map_err(io)?;
        lock.try_lock().map_err(|e| match e {
            std::fs::TryLockError::WouldBlock => {
                Error::conflict(format!("{}: another process writes this journal", folder.display()))
            }
            std::fs::TryLockError::Error(e) => io(e),
        })?;
        let (state, tail, bytes) = recover(folder, &options)?;
        let (last, disk) = (state.last, options.disk.clone());
        let shared = Arc::new(Shared::new(state));
        let (waiting, arrivals) = bounded(WAITING_MAX);
        let mut writer =
            Writer { folder: folder.to_owned(), options, shared: shared.clone(), tail, bytes, last, poison: None };
        let run = move || writer.run(&arrivals);
        let writer = std::thread::Builder::new().name("journal".into()).spawn(run).map_err(io)?;
        Ok(Log { folder: folder.to_owned(), disk, shared, waiting: Some(waiting), writer: Some(writer), _lock: lock })
    }

    /// Bytes of the log's segments.
    pub fn bytes(&self) -> u64 {
        let segments = self.shared.lock().segments.clone();
        segments.iter().filter_map(|segment| Some(segment.path.metadata().ok()?.len())).sum()
    }
}

impl Journal for Log {
    fn append(&self, append: Append, done: Done) {
        let Some(waiting) = &self.waiting else { return done(Err(Error::internal("the journal is closed"))) };
        if let Err(TrySendError::Full((_, done)) | TrySendError::Disconnected((_, done))) =
            waiting.try_send((append, done))
        {
            done(Err(Error::overloaded("journal: too many updates wait to be written, try again later")));
        }
    }

    fn last(&self) -> u64 {
        self.shared.lock().last
    }

    fn first(&self) -> u64 {
        self.shared.lock().segments.first().map_or(1, |segment| segment.first)
    }

    fn follow(&self, after: u64) -> Result<Box<dyn Follower>> {
        Ok(Box::new(LogFollower::new(self.shared.clone(), self.folder.clone(), after)?))
    }

    fn release(&self, position: u64) -> Result<()> {
        let mut released = Vec::new();
        self.shared.change(|state| {
            // A segment ends where the next one begins; the last one is being written.
            let ends = state.segments.iter().skip(1).map(|next| next.first);
            let count = ends.take_while(|end| *end <= position.saturating_add(1)).count();
            released = state.segments.drain(..count).collect();
        });
        // The oldest first, each for good: wherever this ends, those that stay follow one another.
        for segment in &released {
            let removed = std::fs::remove_file(&segment.path).and_then(|()| self.disk.sync_folder(&self.folder));
            removed.map_err(|e| Error::io(segment.path.display(), e))?;
        }
        Ok(())
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.waiting = None;
        if let Some(writer) = self.writer.take() {
            // Who is told last may let go of the log, on the writer's own thread. A panic was told by the panic itself.
            if writer.thread().id() != std::thread::current().id() {
                let _ = writer.join();
            }
        }
    }
}

/// Reads a folder's segments from end to end, cuts what a crash has torn, and opens the last one.
fn recover(folder: &Path, options: &LogOptions) -> Result<(State, Box<dyn Tail>, u64)> {
    let io = |path: &Path| {
        let path = path.display().to_string();
        move |e| Error::io(path, e)
    };
    let mut found = segments(folder)?;
    if let Some(unborn) = found.pop_if(|last| is_unborn(&last.path)) {
        std::fs::remove_file(&unborn.path).map_err(io(&unborn.path))?;
    }
    let Some(last) = found.last().cloned() else {
        let segment = Segment { first: options.after + 1, path: path_of(folder, options.after + 1) };
        let tail = create(options, folder, &segment).map_err(io(&segment.path))?;
        let state = State { segments: vec![segment], last: options.after, ..State::default() };
        return Ok((state, tail, HEADER_BYTES as u64));
    };
    let (mut next, mut end, mut torn) = (found[0].first, 0, 0);
    for segment in &found {
        if segment.first != next {
            let (path, first) = (segment.path.display(), segment.first);
            return Err(Error::corrupt(format!(
                "{path}: it begins at position {first}, expected {next}: a segment is missing"
            )));
        }
        let mut cursor = Cursor::open(segment)?;
        while cursor.record()?.is_some() {}
        (next, end) = (cursor.next_position(), cursor.offset());
        torn = match *segment == last {
            true => cursor.check_end()?,
            false if segment.path.metadata().map_err(io(&segment.path))?.len() == end => 0,
            false => return Err(cursor.damaged("is damaged")),
        };
    }
    if torn > 0 {
        tracing::warn!(folder = %folder.display(), bytes = torn, "a crash tore the end of the journal; nobody was told of it");
    }
    let mut tail = options.disk.open(&last.path).map_err(io(&last.path))?;
    // What a crash left in memory of the kernel alone must not be built upon.
    tail.cut(end).and_then(|()| tail.sync()).map_err(io(&last.path))?;
    options.disk.sync_folder(folder).map_err(io(folder))?;
    Ok((State { segments: found, last: next - 1, ..State::default() }, tail, end))
}

/// True for a segment that a crash kept from getting its header: nothing was ever written behind it.
fn is_unborn(path: &Path) -> bool {
    let is_short = path.metadata().is_ok_and(|about| about.len() <= HEADER_BYTES as u64);
    let bytes = if is_short { std::fs::read(path).unwrap_or_default() } else { Vec::new() };
    is_short && (bytes.len() < HEADER_BYTES || bytes.iter().all(|&byte| byte == 0))
}

/// Makes a segment that holds no record yet.
fn create(options: &LogOptions, folder: &Path, segment: &Segment) -> std::io::Result<Box<dyn Tail>> {
    let mut tail = options.disk.create(&segment.path)?;
    let made = write_all(&mut *tail, &header(segment.first))
        .and_then(|()| tail.sync())
        .and_then(|()| options.disk.sync_folder(folder));
    match made {
        Ok(()) => Ok(tail),
        Err(e) => {
            // Where it cannot be removed, it is unborn and goes when the log is opened.
            let _ = std::fs::remove_file(&segment.path);
            Err(e)
        }
    }
}

fn write_all(tail: &mut dyn Tail, mut bytes: &[u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        match tail.write(bytes) {
            Ok(0) => return Err(IoError::new(ErrorKind::WriteZero, "the file takes no more bytes")),
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn is_no_room(e: &IoError) -> bool {
    matches!(e.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge)
}

/// The thread that writes.
struct Writer {
    folder: PathBuf,
    options: LogOptions,
    shared: Arc<Shared<State>>,
    tail: Box<dyn Tail>,
    /// Bytes of the last segment.
    bytes: u64,
    last: u64,
    /// Why nothing can be appended any more.
    poison: Option<String>,
}

impl Writer {
    fn run(&mut self, arrivals: &Receiver<(Append, Done)>) {
        while let Ok(first) = arrivals.recv() {
            let size = |(append, _): &(Append, Done)| append.records.iter().map(Vec::len).sum::<usize>();
            let mut bytes = size(&first);
            let mut taken = vec![first];
            while bytes < COMMIT_BYTES
                && let Ok(more) = arrivals.try_recv()
            {
                bytes += size(&more);
                taken.push(more);
            }
            self.commit(taken);
        }
    }

    /// Appends what was taken together, and tells everybody.
    fn commit(&mut self, taken: Vec<(Append, Done)>) {
        let mut bytes = Vec::new();
        let mut next = self.last + 1;
        let mut told: Vec<(Result<Range<u64>>, Done)> = Vec::with_capacity(taken.len());
        for (append, done) in taken {
            let range = check(&append, next).map(|()| next..next + append.records.len() as u64);
            if let Ok(range) = &range {
                for (position, payload) in range.clone().zip(&append.records) {
                    write_record(position, self.last, payload, &mut bytes);
                }
                next = range.end;
            }
            told.push((range, done));
        }
        match self.write(&bytes, next - 1) {
            Ok(()) => told.into_iter().for_each(|(range, done)| done(range)),
            Err(e) => told.into_iter().for_each(|(range, done)| done(range.and(Err(e.again())))),
        }
    }

    /// Makes bytes durable that hold the records up to a position.
    fn write(&mut self, bytes: &[u8], last: u64) -> Result<()> {
        if let Some(why) = &self.poison {
            return Err(Error::unavailable(format!(
                "journal: takes no more updates until the server is started anew: {why}"
            )));
        }
        if bytes.is_empty() {
            return Ok(());
        }
        if self.bytes >= self.options.segment_bytes {
            self.rotate()?;
        }
        let start = std::time::Instant::now();
        write_all(&mut *self.tail, bytes).map_err(|e| self.failed_write(e))?;
        if let Err(e) = self.tail.sync() {
            return Err(self.poisoned("a sync", &e));
        }
        metrics::histogram!("sterling_journal_commit_seconds").record(start.elapsed().as_secs_f64());
        self.bytes += bytes.len() as u64;
        self.last = last;
        self.shared.change(|state| state.last = last);
        Ok(())
    }

    fn failed_write(&mut self, e: IoError) -> Error {
        if !is_no_room(&e) {
            return self.poisoned("a write", &e);
        }
        // Followers may have read ahead: what they have goes with what is cut.
        self.shared.change(|state| state.cuts += 1);
        match self.tail.cut(self.bytes) {
            Ok(()) => no_room(e),
            Err(e) => self.poisoned("a cut", &e),
        }
    }

    fn poisoned(&mut self, what: &str, e: &IoError) -> Error {
        let why = format!("{what} failed: {e}");
        tracing::error!(folder = %self.folder.display(), "journal: {why}; nothing is appended until it is opened anew");
        let kind = if is_no_room(e) { Kind::NoSpace } else { Kind::Unavailable };
        let error = Error::new(kind, format!("journal: {why}; the update may be lost or kept"));
        self.poison = Some(why);
        error
    }

    /// Goes on in a new segment.
    fn rotate(&mut self) -> Result<()> {
        let segment = Segment { first: self.last + 1, path: path_of(&self.folder, self.last + 1) };
        let made = create(&self.options, &self.folder, &segment);
        self.tail = made.map_err(|e| match is_no_room(&e) && !segment.path.exists() {
            true => no_room(e),
            false => self.poisoned("a new segment", &e),
        })?;
        self.bytes = HEADER_BYTES as u64;
        self.shared.change(|state| state.segments.push(segment));
        Ok(())
    }
}

fn no_room(e: IoError) -> Error {
    Error::no_space(format!("journal: no room for the update: {e}")).caused_by(e)
}

fn check(append: &Append, next: u64) -> Result<()> {
    if let Some(expected) = append.expected.filter(|expected| *expected != next - 1) {
        return Err(Error::conflict(format!("position {}, expected {expected}: updates came in between", next - 1)));
    }
    match append.records.iter().map(Vec::len).find(|bytes| !(1..=PAYLOAD_BYTES_MAX).contains(bytes)) {
        Some(bytes) => {
            Err(Error::invalid(format!("journal: a record of {bytes} bytes, expected 1 to {PAYLOAD_BYTES_MAX}")))
        }
        None => Ok(()),
    }
}
