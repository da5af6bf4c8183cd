//! Journal in local files.
//!
//! One writer thread (`writer`) takes all waiting appends, writes them together, syncs once and then calls their callbacks (group
//! commit). A sync takes milliseconds for any number of bytes, so a thousand writers wait no longer than one.
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

mod writer;

use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, TrySendError, bounded};

use super::disk::{Disk, RealDisk, Tail};
use super::follow::{LogFollower, State};
use super::format::HEADER_BYTES;
use super::scan::{Cursor, Segment, segments};
use super::shared::Shared;
use super::watermark::{MARKS, Mark};
use super::{Append, Done, Follower, Journal, Journals, Topic};
use sterling_core::blocking::may_block;
use sterling_core::error::{Error, Kind, Result};
use sterling_core::tasks;
use writer::{Writer, create};

/// File that is locked while a log is open.
const LOCK: &str = ".lock";
/// Interval between two attempts to lock a log.
const LOCK_WAIT: Duration = Duration::from_millis(50);
/// Maximum number of waiting appends; a server limits its requests to far fewer.
const WAITING_MAX: usize = 4096;

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

/// Returns the estimated bytes of the records after a position, if records `first` to `last` take `bytes`, assuming equal
/// lengths.
pub(super) fn share_after(position: u64, (first, last): (u64, u64), bytes: u64) -> u64 {
    let all = (last + 1).saturating_sub(first);
    let after = last.saturating_sub(position).min(all);
    (u128::from(bytes) * u128::from(after) / u128::from(all.max(1))) as u64
}
