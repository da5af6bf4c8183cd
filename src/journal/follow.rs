//! Following the records of a log, from the files that it is written to.

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::scan::{Cursor, Segment};
use super::{Follower, Record};
use crate::error::{Error, Result};

/// What writer and followers of a log share.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) segments: Vec<Segment>,
    /// The last durable position.
    pub(super) last: u64,
    /// How often the end of the last segment was cut: what was read of it before may not be there any more.
    pub(super) cuts: u64,
}

/// The state, and a bell that rings when it changes.
#[derive(Debug, Default)]
pub(super) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    pub(super) fn new(state: State) -> Self {
        Shared { state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // Each change under the lock is one assignment: a panic leaves nothing half done.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Waits until the record of a position is durable, and tells how often the log was cut until then.
    fn wait(&self, position: u64, most: Duration) -> Option<u64> {
        let until = Instant::now() + most;
        let mut state = self.lock();
        while state.last < position {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        Some(state.cuts)
    }
}

/// Follows a [`super::Log`].
pub(super) struct LogFollower {
    shared: Arc<Shared>,
    folder: PathBuf,
    next: u64,
    cursor: Option<Cursor>,
    cuts: u64,
}

impl LogFollower {
    pub(super) fn new(shared: Arc<Shared>, folder: PathBuf, after: u64) -> Result<Self> {
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
            follower.seek()?;
        }
        Ok(follower)
    }

    fn released(&self, first: u64) -> Error {
        let (folder, next) = (self.folder.display(), self.next);
        Error::not_found(format!("{folder}: position {next} was released, the journal begins at {first}"))
    }

    /// Opens the segment that holds the next record, and goes there.
    fn seek(&mut self) -> Result<&mut Cursor> {
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
        Ok(self.cursor.insert(cursor))
    }
}

impl Follower for LogFollower {
    fn next(&mut self, wait: Duration) -> Result<Option<Record>> {
        let Some(cuts) = self.shared.wait(self.next, wait) else { return Ok(None) };
        if self.cuts != cuts {
            (self.cuts, self.cursor) = (cuts, None);
        }
        let record = match &mut self.cursor {
            Some(cursor) => cursor.record()?,
            None => None,
        };
        let record = match record {
            Some(record) => record,
            // A segment is at its end: the record is the first of another one.
            None => {
                let cursor = self.seek()?;
                cursor.record()?.ok_or_else(|| cursor.damaged("cannot be read any more"))?
            }
        };
        self.next += 1;
        Ok(Some(record))
    }
}
