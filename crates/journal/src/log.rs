//! Journal in local files.
//!
//! One writer thread takes all waiting appends, writes them together, syncs once and then calls their callbacks (group commit). A
//! sync takes milliseconds for any number of bytes, so a thousand writers wait no longer than one.
//!
//! - **Full disk**: the partial write is truncated, its writers get an error, and later writes may succeed.
//! - **Failed sync**: after a failed sync or write it is uncertain which records are durable. The kernel drops the
//!   unwritten pages, and a second sync would succeed without them (Rebello et al., "Can Applications Recover from
//!   fsync Failures?", ATC 2020). The log rejects appends until the log is reopened; reopening reads the actual
//!   contents of the files.
//! - **Files changed by others**: at each commit, and once per second, the writer checks that a restart would find the
//!   files that it has written. If the last file is missing, appends are rejected until that file is back. The last
//!   position is recorded outside of the log's folder (`mark`), so that a restart can distinguish a missing end from
//!   records that were never written.

use std::fs::File;
use std::io::{Error as IoError, ErrorKind};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TrySendError, bounded};

use super::disk::{Disk, RealDisk, Tail};
use super::follow::{LogFollower, State};
use super::format::{HEADER_BYTES, PAYLOAD_BYTES_MAX, header, write_record};
use super::scan::{Cursor, Segment, segments};
use super::shared::Shared;
use super::watermark::{MARKS, Mark};
use super::{Append, Done, Follower, Journal, Journals, Topic};
use sterling_core::blocking::may_block;
use sterling_core::error::{Error, Kind, Result};
use sterling_core::tasks;

/// File that is locked while a log is open.
const LOCK: &str = ".lock";
/// Interval between two attempts to lock a log.
const LOCK_WAIT: Duration = Duration::from_millis(50);
/// Interval of the writer's file checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of waiting appends; a server limits its requests to far fewer.
const WAITING_MAX: usize = 4096;
/// Size of a commit in bytes, beyond which further appends wait for the next sync.
const COMMIT_BYTES: usize = 8 << 20;

/// Options of a log.
#[derive(Clone)]
pub struct LogOptions {
    /// Position after which a new log begins: the position of the snapshot to which the log's updates apply.
    pub after: u64,
    /// Bytes after which a new segment is started.
    pub segment_bytes: u64,
    /// Storage of the log's files.
    pub disk: Arc<dyn Disk>,
    /// File outside of the log's folder that records the last position; without it, the records alone determine the end of the
    /// log.
    pub mark: Option<PathBuf>,
}

impl Default for LogOptions {
    fn default() -> Self {
        LogOptions { after: 0, segment_bytes: 64 << 20, disk: Arc::new(RealDisk), mark: None }
    }
}

/// Logs below a folder, each in its own subfolder.
pub struct Logs {
    /// Folder of the logs.
    pub root: PathBuf,
    /// Options of each log.
    pub options: LogOptions,
}

impl Logs {
    /// Returns logs below a folder with default options.
    pub fn below(root: impl Into<PathBuf>) -> Self {
        Logs { root: root.into(), options: LogOptions::default() }
    }
}

impl Journals for Logs {
    fn open(&self, topic: &Topic, after: u64) -> Result<Box<dyn Journal>> {
        let mark = Some(self.root.join(MARKS).join(topic.to_string()));
        let log = Log::open(&self.root.join(topic.to_string()), LogOptions { after, mark, ..self.options.clone() });
        // A process that is shutting down releases the lock soon.
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

/// A journal in local files.
pub struct Log {
    folder: PathBuf,
    disk: Arc<dyn Disk>,
    shared: Arc<Shared<State>>,
    waiting: Option<Sender<(Append, Done)>>,
    writer: Option<JoinHandle<()>>,
    _lock: File,
}

/// Locks the log in a folder for this process.
fn lock(folder: &Path) -> Result<File> {
    let io = |e| Error::io(folder.display(), e);
    let lock = File::options().write(true).create(true).truncate(false).open(folder.join(LOCK)).map_err(io)?;
    lock.try_lock().map_err(|e| match e {
        std::fs::TryLockError::WouldBlock => {
            Error::conflict(format!("{}: another process writes this journal", folder.display()))
        }
        std::fs::TryLockError::Error(e) => io(e),
    })?;
    Ok(lock)
}

/// Waits until no process has the log in `folder` open, for example until a server has finished its requests and ended.
///
/// # Errors
/// `Conflict` if a process still has the log open after `patience`; `Io` with the path.
pub fn wait_until_closed(folder: &Path, patience: Duration) -> Result<()> {
    let start = Instant::now();
    loop {
        match lock(folder) {
            Err(e) if e.kind() == Kind::Conflict && start.elapsed() < patience => std::thread::sleep(LOCK_WAIT),
            other => return other.map(drop),
        }
    }
}

impl Log {
    /// Opens or creates the log in `folder`. Reads all records, and truncates a torn write that a crash left at the end.
    ///
    /// # Errors
    /// `Conflict` if another process has the log open; `Corrupt` with file, position and byte offset if a record is damaged or
    /// missing, including at the end; `Io` with the path.
    pub fn open(folder: &Path, options: LogOptions) -> Result<Self> {
        let io = |e| Error::io(folder.display(), e);
        std::fs::create_dir_all(folder).map_err(io)?;
        let lock = lock(folder)?;
        let mut mark = options.mark.as_deref().map(Mark::open).transpose()?;
        let (state, tail, bytes) = recover(folder, &options, mark.as_ref())?;
        // If recording the position fails here, the writer reports the error and tries again.
        mark.iter_mut().for_each(|mark| drop(mark.set(state.last)));
        let (last, disk) = (state.last, options.disk.clone());
        let shared = Arc::new(Shared::new(state));
        let (waiting, arrivals) = bounded(WAITING_MAX);
        let mut writer =
            Writer { folder: folder.to_owned(), options, shared: shared.clone(), tail, bytes, last, mark, fatal: None };
        let run = move || writer.run(&arrivals);
        let writer = tasks::JOURNAL.start(run)?;
        Ok(Log { folder: folder.to_owned(), disk, shared, waiting: Some(waiting), writer: Some(writer), _lock: lock })
    }

    /// Returns the bytes of the log's segments.
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
        self.shared.last()
    }

    fn first(&self) -> u64 {
        self.shared.lock().segments.first().map_or(1, |segment| segment.first)
    }

    fn follow(&self, after: u64) -> Result<Box<dyn Follower>> {
        Ok(Box::new(LogFollower::new(self.shared.clone(), self.folder.clone(), after)?))
    }

    fn release(&self, position: u64) -> Result<()> {
        may_block();
        // Removes the oldest segment first, and forgets a segment only after its removal is durable. After an error the
        // known segments are therefore still consecutive, and the next call continues.
        loop {
            let segment = {
                let mut state = self.shared.lock();
                // A segment ends at the start of the next one; the last one is being written.
                let end = state.segments.get(1).map(|next| next.first).filter(|end| *end <= position.saturating_add(1));
                let Some(end) = end else { return Ok(()) };
                state.releasing = end;
                state.segments[0].clone()
            };
            let removed = match std::fs::remove_file(&segment.path) {
                // An earlier call removed the file and failed afterwards.
                Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
                removed => removed,
            };
            let removed = removed.and_then(|()| self.disk.sync_folder(&self.folder));
            removed.map_err(|e| Error::io(segment.path.display(), e))?;
            self.shared.change(|state| state.segments.retain(|one| *one != segment));
        }
    }

    fn trouble(&self) -> Option<String> {
        self.shared.lock().trouble.clone()
    }

    fn bytes_after(&self, position: u64) -> u64 {
        let state = self.shared.lock();
        let Some((_, full)) = state.segments.split_last() else { return 0 };
        let ends = state.segments.iter().skip(1).map(|next| next.first - 1).chain([state.last]);
        let bytes = full.iter().map(|segment| segment.bytes).chain([state.tail_bytes]);
        let firsts = state.segments.iter().map(|segment| segment.first);
        firsts.zip(ends).zip(bytes).map(|((first, end), bytes)| share_after(position, (first, end), bytes)).sum()
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.waiting = None;
        if let Some(writer) = self.writer.take() {
            // The last callback may drop the log on the writer's own thread. A panic of the writer was reported when it occurred.
            if writer.thread().id() != std::thread::current().id() {
                let _ = writer.join();
            }
        }
    }
}

/// Reads all segments of a folder, truncates a torn write, and opens the last segment.
fn recover(folder: &Path, options: &LogOptions, mark: Option<&Mark>) -> Result<(State, Box<dyn Tail>, u64)> {
    let io = |path: &Path| {
        let path = path.display().to_string();
        move |e| Error::io(path, e)
    };
    let durable = mark.map_or(0, Mark::position);
    let missing = |at: &Path, last: u64| {
        let (at, mark) = (at.display(), mark.map(|mark| mark.path().display().to_string()).unwrap_or_default());
        Error::corrupt(format!(
            "{at}: the journal ends at position {last}, expected at least {durable}, which was durable: restore the \
             missing records, or remove the position file ({mark}) to continue without them"
        ))
    };
    let mut found = segments(folder)?;
    if let Some(unborn) = found.pop_if(|last| has_no_header(&last.path)) {
        if unborn.first <= durable {
            return Err(missing(&unborn.path, unborn.first - 1));
        }
        std::fs::remove_file(&unborn.path).map_err(io(&unborn.path))?;
    }
    let Some(last) = found.last().cloned() else {
        // A missing log is no error if the version includes all durable records.
        if options.after < durable {
            return Err(missing(folder, 0));
        }
        let segment = Segment::new(folder, options.after + 1);
        let tail = create(options, folder, &segment).map_err(io(&segment.path))?;
        let tail_bytes = HEADER_BYTES as u64;
        let state = State { segments: vec![segment], last: options.after, tail_bytes, ..State::default() };
        return Ok((state, tail, tail_bytes));
    };
    let (mut next, mut end, mut torn) = (found[0].first, 0, 0);
    for segment in &mut found {
        if segment.first != next {
            let (path, first) = (segment.path.display(), segment.first);
            return Err(Error::corrupt(format!(
                "{path}: begins at position {first}, expected {next}: a segment is missing"
            )));
        }
        let mut cursor = Cursor::open(segment)?;
        while cursor.record()?.is_some() {}
        (next, end) = (cursor.next_position(), cursor.offset());
        torn = match *segment == last {
            true => cursor.check_end(durable)?,
            false if segment.path.metadata().map_err(io(&segment.path))?.len() == end => 0,
            false => return Err(cursor.damaged("is damaged")),
        };
        segment.bytes = end;
    }
    if next <= durable {
        return Err(missing(&last.path, next - 1));
    }
    if torn > 0 {
        tracing::warn!(folder = %folder.display(), bytes = torn, "truncated a torn record at the end of the journal (it was never acknowledged)");
    }
    let mut tail = options.disk.open(&last.path).map_err(io(&last.path))?;
    // Records that are only in the kernel's page cache after a crash must be synced before new ones follow.
    tail.cut(end).and_then(|()| tail.sync()).map_err(io(&last.path))?;
    options.disk.sync_folder(folder).map_err(io(folder))?;
    Ok((State { segments: found, last: next - 1, tail_bytes: end, ..State::default() }, tail, end))
}

/// Returns whether a segment has no header because of a crash; such a segment never held a record.
fn has_no_header(path: &Path) -> bool {
    let is_short = path.metadata().is_ok_and(|about| about.len() <= HEADER_BYTES as u64);
    let bytes = if is_short { std::fs::read(path).unwrap_or_default() } else { Vec::new() };
    is_short && (bytes.len() < HEADER_BYTES || bytes.iter().all(|&byte| byte == 0))
}

/// Creates an empty segment.
fn create(options: &LogOptions, folder: &Path, segment: &Segment) -> std::io::Result<Box<dyn Tail>> {
    let mut tail = options.disk.create(&segment.path)?;
    let made = write_all(&mut *tail, &header(segment.first))
        .and_then(|()| tail.sync())
        .and_then(|()| options.disk.sync_folder(folder));
    match made {
        Ok(()) => Ok(tail),
        Err(e) => {
            // If the removal fails, the segment has no header and is removed when the log is next opened.
            let _ = std::fs::remove_file(&segment.path);
            Err(e)
        }
    }
}

fn write_all(tail: &mut dyn Tail, mut bytes: &[u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        match tail.write(bytes) {
            Ok(0) => {
                return Err(IoError::new(
                    ErrorKind::WriteZero,
                    "the operating system wrote 0 bytes to the journal file",
                ));
            }
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

struct Writer {
    folder: PathBuf,
    options: LogOptions,
    shared: Arc<Shared<State>>,
    tail: Box<dyn Tail>,
    /// Size of the last segment in bytes.
    bytes: u64,
    last: u64,
    mark: Option<Mark>,
    /// Reason of a fatal state in which every append is rejected.
    fatal: Option<String>,
}

impl Writer {
    fn run(&mut self, arrivals: &Receiver<(Append, Done)>) {
        let mut looked = Instant::now();
        loop {
            match arrivals.recv_timeout(CHECK_INTERVAL) {
                Ok(first) => self.take(first, arrivals),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if looked.elapsed() >= CHECK_INTERVAL {
                // If the check panics, only this check fails; the next one runs as usual.
                let _ = catch_unwind(AssertUnwindSafe(|| self.look()));
                looked = Instant::now();
            }
        }
    }

    /// Commits an append together with all appends that are waiting.
    fn take(&mut self, first: (Append, Done), arrivals: &Receiver<(Append, Done)>) {
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

    /// Checks that a restart would find everything that was written, so that a missing file is reported before a
    /// restart.
    fn look(&mut self) {
        if self.fatal.is_some() {
            return;
        }
        let lost = self.tail.check().err().map(|e| lost(&e));
        let (segments, before) = {
            let state = self.shared.lock();
            (state.segments.clone(), state.trouble.clone())
        };
        let full = segments.split_last().map_or(&[][..], |(_, full)| full);
        let changed = full.iter().find_map(|segment| Some((segment.first, changed(segment)?)));
        let unmarked = self.mark.as_mut().and_then(|mark| mark.set(self.last).err());
        let unmarked = unmarked.map(|e| format!("journal: the durable position cannot be written: {e}"));
        let mut state = self.shared.lock();
        // A segment that is being released may be missing.
        let changed = changed.filter(|(first, _)| *first >= state.releasing).map(|(_, why)| why);
        let trouble = lost.or(changed).or(unmarked);
        state.trouble.clone_from(&trouble);
        drop(state);
        if trouble != before {
            match trouble {
                Some(why) => tracing::error!(folder = %self.folder.display(), "{why}"),
                None => {
                    tracing::info!(folder = %self.folder.display(), "journal: all segment files are complete again")
                }
            }
        }
    }

    /// Writes a group of appends and calls their callbacks.
    fn commit(&mut self, taken: Vec<(Append, Done)>) {
        let mut bytes = Vec::new();
        let mut next = self.last + 1;
        let mut reported: Vec<(Result<Range<u64>>, Done)> = Vec::with_capacity(taken.len());
        for (append, done) in taken {
            let range = check(&append, next).map(|()| next..next + append.records.len() as u64);
            if let Ok(range) = &range {
                for (position, payload) in range.clone().zip(&append.records) {
                    write_record(position, self.last, payload, &mut bytes);
                }
                next = range.end;
            }
            reported.push((range, done));
        }
        // A panic of the write fails the appends too: like a failed write, a panic makes the last durable position uncertain.
        let written = catch_unwind(AssertUnwindSafe(|| self.write(&bytes, next - 1)));
        match written.unwrap_or_else(|_| Err(self.poisoned("a write", &IoError::other("a panic")))) {
            Ok(()) => reported.into_iter().for_each(|(range, done)| done(range)),
            Err(e) => reported.into_iter().for_each(|(range, done)| done(range.and(Err(e.again())))),
        }
    }

    /// Writes and syncs the bytes of the records up to a position.
    fn write(&mut self, bytes: &[u8], last: u64) -> Result<()> {
        if let Some(why) = &self.fatal {
            return Err(Error::unavailable(stopped(why)));
        }
        if bytes.is_empty() {
            return Ok(());
        }
        // Checks the file before the write, because a write would extend a truncated file to its expected length again.
        self.tail.check().map_err(|e| Error::unavailable(lost(&e)).caused_by(e))?;
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
        // Durable records are acknowledged even if recording the position fails; the next check reports the failure and tries
        // again.
        self.mark.iter_mut().for_each(|mark| drop(mark.set(last)));
        self.shared.change(|state| (state.last, state.tail_bytes) = (last, self.bytes));
        Ok(())
    }

    fn failed_write(&mut self, e: IoError) -> Error {
        if !is_no_room(&e) {
            return self.poisoned("a write", &e);
        }
        let cut = self.tail.cut(self.bytes);
        // Followers may have read the bytes that are truncated; counting truncations makes them read again.
        self.shared.change(|state| state.cuts += 1);
        match cut {
            Ok(()) => no_room(e),
            Err(e) => self.poisoned("a truncation", &e),
        }
    }

    fn poisoned(&mut self, what: &str, e: &IoError) -> Error {
        let why = format!("{what} failed: {e}");
        tracing::error!(folder = %self.folder.display(), "journal: {why}; appends are rejected until the journal is reopened");
        let kind = if is_no_room(e) { Kind::NoSpace } else { Kind::Unavailable };
        let error = Error::new(kind, format!("journal: {why}; the update may or may not be durable"));
        self.shared.change(|state| state.trouble = Some(stopped(&why)));
        self.fatal = Some(why);
        error
    }

    /// Starts a new segment.
    fn rotate(&mut self) -> Result<()> {
        let segment = Segment::new(&self.folder, self.last + 1);
        let made = create(&self.options, &self.folder, &segment);
        self.tail = made.map_err(|e| match segment.path.exists() {
            // No record was written; the next append tries again.
            false if is_no_room(&e) => no_room(e),
            false => Error::unavailable(format!("journal: a new segment cannot be created, try again later: {e}"))
                .caused_by(e),
            true => self.poisoned("a new segment", &e),
        })?;
        let full = std::mem::replace(&mut self.bytes, HEADER_BYTES as u64);
        self.shared.change(|state| {
            state.segments.last_mut().into_iter().for_each(|last| last.bytes = full);
            state.segments.push(segment);
            state.tail_bytes = HEADER_BYTES as u64;
        });
        Ok(())
    }
}

/// Returns the estimated bytes of the records after a position, if records `first` to `last` take `bytes`, assuming equal
/// lengths.
pub(super) fn share_after(position: u64, (first, last): (u64, u64), bytes: u64) -> u64 {
    let all = (last + 1).saturating_sub(first);
    let after = last.saturating_sub(position).min(all);
    (u128::from(bytes) * u128::from(after) / u128::from(all.max(1))) as u64
}

/// Returns the message with which appends are rejected in the fatal state.
fn stopped(why: &str) -> String {
    format!("journal: rejects updates until the server is restarted: {why}")
}

/// Returns the message of a missing last segment, after which appends are rejected.
fn lost(e: &IoError) -> String {
    format!(
        "journal: rejects updates until the file of its last segment is moved back; otherwise save the updates \
         in a version by `items:merge` before a restart: {e}"
    )
}

/// Returns the change of a full segment's file, if there is one.
fn changed(segment: &Segment) -> Option<String> {
    let what = match std::fs::metadata(&segment.path) {
        Ok(file) if file.len() == segment.bytes => return None,
        Ok(file) => format!("the segment's file has {} bytes, expected {}", file.len(), segment.bytes),
        Err(e) if e.kind() == ErrorKind::NotFound => "the segment's file was removed or renamed".into(),
        Err(e) => e.to_string(),
    };
    let first = segment.first;
    Some(format!(
        "journal: updates from position {first} on would be missing after a restart, save them in a version by \
         `items:merge` first: {what}"
    ))
}

fn no_room(e: IoError) -> Error {
    Error::no_space(format!("journal: no space for the update: {e}")).caused_by(e)
}

fn check(append: &Append, next: u64) -> Result<()> {
    if let Some(expected) = append.expected.filter(|expected| *expected != next - 1) {
        return Err(Error::conflict(format!(
            "the journal is at position {}, expected {expected}: other updates were appended meanwhile",
            next - 1
        )));
    }
    match append.records.iter().map(Vec::len).find(|bytes| !(1..=PAYLOAD_BYTES_MAX).contains(bytes)) {
        Some(bytes) => {
            Err(Error::invalid(format!("journal: a record of {bytes} bytes, expected 1 to {PAYLOAD_BYTES_MAX}")))
        }
        None => Ok(()),
    }
}
