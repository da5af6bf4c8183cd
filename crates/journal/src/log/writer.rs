//! Writer of a log: commits waiting appends in groups, starts new segments and checks the files of the log.

use std::io::{Error as IoError, ErrorKind};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};

use super::super::disk::Tail;
use super::super::follow::State;
use super::super::format::{HEADER_BYTES, PAYLOAD_BYTES_MAX, header, write_record};
use super::super::scan::Segment;
use super::super::shared::Shared;
use super::super::watermark::Mark;
use super::super::{Append, Done};
use super::LogOptions;
use sterling_core::error::{Error, Kind, Result};

/// Interval of the writer's file checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Size of a commit in bytes, beyond which further appends wait for the next sync.
const COMMIT_BYTES: usize = 8 << 20;

/// Creates an empty segment.
pub(super) fn create(options: &LogOptions, folder: &Path, segment: &Segment) -> std::io::Result<Box<dyn Tail>> {
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

pub(super) struct Writer {
    pub(super) folder: PathBuf,
    pub(super) options: LogOptions,
    pub(super) shared: Arc<Shared<State>>,
    pub(super) tail: Box<dyn Tail>,
    /// Size of the last segment in bytes.
    pub(super) bytes: u64,
    pub(super) last: u64,
    pub(super) mark: Option<Mark>,
    /// Reason of a fatal state in which every append is rejected.
    pub(super) fatal: Option<String>,
}

impl Writer {
    pub(super) fn run(&mut self, arrivals: &Receiver<(Append, Done)>) {
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
