//! Following the records of a log, from the files that it is written to.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::scan::{Cursor, Segment};
use super::shared::{Progress, Shared};
use super::{Follower, Record};
use sterling_core::error::{Error, Result};

/// What writer and followers of a log share.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) segments: Vec<Segment>,
    /// The last durable position.
    pub(super) last: u64,
    /// Bytes of the last segment.
    pub(super) tail_bytes: u64,
    /// How often the end of the last segment was cut: what was read of it before may not be there any more.
    pub(super) cuts: u64,
    /// Segments that begin before this position are being removed.
    pub(super) releasing: u64,
    /// What is wrong with the log's files, where something is.
    pub(super) trouble: Option<String>,
}

impl Progress for State {
    fn last(&self) -> u64 {
        self.last
    }
}

/// Follows a [`super::Log`].
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

    /// Opens the segment that holds the next record, and goes there.
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
        // Until the record is durable; how often the log was cut until then tells whether what was read is still there.
        let durable = self.shared.wait(|state| state.last >= self.next, wait);
        let Some(cuts) = durable.map(|state| state.cuts) else { return Ok(None) };
        if self.cuts != cuts {
            (self.cuts, self.cursor) = (cuts, None);
        }
        // Where reading fails the cursor is dropped: it stands somewhere within the record.
        let mut cursor = self.cursor.take();
        let mut record = cursor.as_mut().map(Cursor::record).transpose()?.flatten();
        if record.is_none() {
            // A segment is at its end: the record is the first of another one.
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
