//! Following the records of a stream from a position on.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;

use super::message::Commit;
use super::remote::{AHEAD, ANSWER, Remote, Threads, does_not_follow, wait};
use super::state::State;
use crate::error::{Error, Result};
use crate::journal::shared::Shared;
use crate::journal::{Follower, Record};

/// Follows a [`super::StreamJournal`].
pub(super) struct StreamFollower {
    shared: Arc<Shared<State>>,
    remote: Remote,
    threads: Arc<Threads>,
    /// The message that is read next ...
    sequence: u64,
    /// ... those from it on that are here ...
    read: VecDeque<Arc<Commit>>,
    /// The number of the one before it, where that was taken.
    before: Option<u128>,
    /// ... and the position that is taken next, with the records of it and after it that are here.
    next: u64,
    records: VecDeque<Record>,
}

impl StreamFollower {
    pub(super) fn new(shared: Arc<Shared<State>>, remote: Remote, threads: Arc<Threads>, after: u64) -> Result<Self> {
        // A version that another server has made may hold updates that are still on their way here.
        drop(shared.wait(|state| state.position >= after || state.broken.is_some(), ANSWER));
        let (first, last) = {
            let state = shared.lock();
            (state.first, state.position)
        };
        let name = remote.name.clone();
        if after + 1 < first {
            let next = after + 1;
            return Err(Error::not_found(format!(
                "stream `{name}`: position {next} was released, the stream begins at {first}"
            )));
        }
        if after > last {
            return Err(Error::not_found(format!("stream `{name}`: no position {after}, the stream ends at {last}")));
        }
        let (read, records) = (VecDeque::new(), VecDeque::new());
        let mut follower =
            StreamFollower { shared, remote, threads, sequence: 0, read, before: None, next: after + 1, records };
        follower.sequence = follower.seek()?;
        Ok(follower)
    }

    /// The message that holds the next position, or will.
    fn seek(&self) -> Result<u64> {
        let (mut low, mut high) = {
            let state = self.shared.lock();
            if state.position < self.next {
                return Ok(state.sequence + 1);
            }
            (state.first_sequence, state.sequence)
        };
        // The last one that begins at the position or before it.
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            match self.read(middle..middle + 1)?.pop() {
                Some(commit) if commit.first > self.next => high = middle - 1,
                // Those that are gone lay before all others.
                _ => low = middle,
            }
        }
        Ok(low)
    }

    /// Messages of the stream; fewer where some are gone.
    fn read(&self, messages: std::ops::Range<u64>) -> Result<Vec<Commit>> {
        let remote = self.remote.clone();
        let all = async move {
            let read = join_all(messages.map(|sequence| remote.read(sequence))).await;
            read.into_iter().filter_map(Result::transpose).collect()
        };
        wait(&self.threads, all).map_err(|e| e.within(format!("stream `{}`", self.remote.name)))
    }

    /// The next message, which is there.
    fn commit(&mut self) -> Result<Arc<Commit>> {
        if let Some(commit) = self.read.pop_front() {
            return Ok(commit);
        }
        let (recent, last) = {
            let state = self.shared.lock();
            (state.recent(self.sequence), state.sequence)
        };
        if let Some(commit) = recent {
            return Ok(commit);
        }
        let read = self.read(self.sequence..(self.sequence + AHEAD).min(last + 1))?;
        self.read.extend(read.into_iter().map(Arc::new));
        let (name, next) = (&self.remote.name, self.next);
        let gone = || Error::not_found(format!("stream `{name}`: position {next} was released before it was read"));
        self.read.pop_front().ok_or_else(gone)
    }
}

impl Follower for StreamFollower {
    fn next(&mut self, wait: Duration) -> Result<Option<Record>> {
        while self.records.is_empty() {
            let sequence = self.sequence;
            let there = self.shared.wait(|state| state.sequence >= sequence || state.broken.is_some(), wait);
            let Some((last, broken)) = there.map(|state| (state.sequence, state.broken.clone())) else {
                return Ok(None);
            };
            // What was read before is good.
            if let Some(why) = broken.filter(|_| last < sequence) {
                return Err(Error::corrupt(why));
            }
            let commit = self.commit()?;
            let first = commit.first;
            if first > self.next {
                let (name, next) = (&self.remote.name, self.next);
                return Err(Error::not_found(format!(
                    "stream `{name}`: position {next} was released before it was read, message {} begins at {first}",
                    self.sequence
                )));
            }
            if self.before.is_some_and(|before| before != commit.before) {
                return Err(Error::corrupt(format!("stream `{}`: {}", self.remote.name, does_not_follow(sequence))));
            }
            (self.sequence, self.before) = (sequence + 1, Some(commit.number));
            let numbered = commit.records.iter().zip(first..).filter(|(_, position)| *position >= self.next);
            self.records.extend(numbered.map(|(payload, position)| Record { position, payload: payload.clone() }));
            self.next = self.next.max(commit.last() + 1);
        }
        Ok(self.records.pop_front())
    }
}
