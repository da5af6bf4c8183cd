//! Follower of a log: reads its records from the segment files.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::scan::{Cursor, Segment};
use super::shared::{Progress, Shared};
use super::{Follower, Record};
use sterling_core::error::{Error, Result};

/// State shared by the writer and the followers of a log.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) segments: Vec<Segment>,
    /// Last durable position.
    pub(super) last: u64,
    /// Size of the last segment in bytes.
    pub(super) tail_bytes: u64,
    /// Number of truncations of the last segment; bytes read before a truncation may be obsolete.
    pub(super) cuts: u64,
    /// Segments that begin before this position are being removed.
    pub(super) releasing: u64,
    /// Current fault of the log's files, if there is one.
    pub(super) trouble: Option<String>,
}

impl Progress for State {
    fn last(&self) -> u64 {
        self.last
    }
}

/// Follower of a [`super::Log`].
pub(super) struct LogFollower {
    shared: Arc<Shared<State>>,
    folder: PathBuf,
    next: u64,
    cursor: Option<Cursor>,
    cuts: u64,
}

impl LogFollower {
    pub(super) fn new(shared: Arc<Shared<State>>, folder: PathBuf, after: u64) -> Result<Self> {
        let mut follower = LogFollower { shared, folder, next: after + 1, cursor: None, cuts: 0 };
        let (first, last) = {
            let state = follower.shared.lock();
            (state.segments.first().map_or(1, |segment| segment.first), state.last)
        };
        if follower.next < first {
            return Err(follower.released(first));
        }
        if after > last {
            let folder = follower.folder.display();
            return Err(Error::not_found(format!("{folder}: no position {after}, the journal ends at {last}")));
        }
        if after < last {
            follower.cursor = Some(follower.seek()?);
        }
        Ok(follower)
    }

    fn released(&self, first: u64) -> Error {
        let (folder, next) = (self.folder.display(), self.next);
        Error::not_found(format!("{folder}: position {next} was released, the journal begins at {first}"))
    }

    /// Opens the segment with the next record and seeks to it.
    fn seek(&self) -> Result<Cursor> {
        let segment = {
            let state = self.shared.lock();
            let at = state.segments.partition_point(|segment| segment.first <= self.next);
            at.checked_sub(1)
                .map(|at| state.segments[at].clone())
                .ok_or(state.segments.first().map_or(1, |segment| segment.first))
        };
        let segment = segment.map_err(|first| self.released(first))?;
        let mut cursor = Cursor::open(&segment)?;
        while cursor.next_position() < self.next {
            if cursor.record()?.is_none() {
                return Err(cursor.damaged("cannot be read any more"));
            }
        }
        Ok(cursor)
    }
}

impl Follower for LogFollower {
    fn next(&mut self, wait: Duration) -> Result<Option<Record>> {
        // Waits until the record is durable; a changed number of truncations invalidates the bytes read so far.
        let durable = self.shared.wait(|state| state.last >= self.next, wait);
        let Some(cuts) = durable.map(|state| state.cuts) else { return Ok(None) };
        if self.cuts != cuts {
            (self.cuts, self.cursor) = (cuts, None);
        }
        // After a read error the cursor is dropped, because it is somewhere within the record.
        let mut cursor = self.cursor.take();
        let mut record = cursor.as_mut().map(Cursor::record).transpose()?.flatten();
        if record.is_none() {
            // The segment has ended: the record is the first of the next segment.
            let mut next = self.seek()?;
            record = next.record()?;
            if record.is_none() {
                return Err(next.damaged("cannot be read any more"));
            }
            cursor = Some(next);
        }
        self.cursor = cursor;
        self.next += 1;
        Ok(record)
    }
}
