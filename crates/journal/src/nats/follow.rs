//! Follower of a stream: reads its records from a position on.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;

use super::message::Commit;
use super::remote::{AHEAD, ANSWER, Remote, discontinuity_message, wait};
use super::state::State;
use crate::shared::Shared;
use crate::{Follower, Record};
use sterling_core::error::{Error, Result};
use sterling_core::tasks::Runtime;

/// Follower of a [`super::StreamJournal`].
pub(super) struct StreamFollower {
    shared: Arc<Shared<State>>,
    remote: Remote,
    threads: Arc<Runtime>,
    /// Incarnation of the stream to which the sequence numbers belong.
    beginning: u64,
    /// Sequence number of the next message to consume.
    sequence: u64,
    /// Messages from `sequence` on that are already read; `None` for a skipped message.
    read: VecDeque<Option<Arc<Commit>>>,
    /// Commit number of the previous message, if that message was consumed.
    before: Option<u128>,
    /// Next position to return.
    next: u64,
    records: VecDeque<Record>,
}

impl StreamFollower {
    pub(super) fn new(shared: Arc<Shared<State>>, remote: Remote, threads: Arc<Runtime>, after: u64) -> Result<Self> {
        // A version published by another server may include updates that have not arrived here yet, or that were missed.
        shared.change(|state| state.wants(after));
        drop(shared.wait(|state| state.position >= after, ANSWER));
        let (first, last, may_come) = {
            let state = shared.lock();
            let may_come = state.lost.is_some() || state.away.is_some() || state.broken.is_some();
            (state.first, state.position, may_come)
        };
        let name = remote.name.clone();
        if after + 1 < first {
            let next = after + 1;
            return Err(Error::not_found(format!(
                "stream `{name}`: position {next} was released, the stream begins at {first}"
            )));
        }
        if after > last {
            let why = format!("stream `{name}`: no position {after}, the stream ends at {last}");
            // The first position of an unreadable stream is unknown.
            return Err(if may_come { Error::unavailable(why) } else { Error::not_found(why) });
        }
        let mut follower = StreamFollower {
            shared,
            remote,
            threads,
            beginning: 0,
            sequence: 0,
            read: VecDeque::new(),
            before: None,
            next: after + 1,
            records: VecDeque::new(),
        };
        follower.seek()?;
        Ok(follower)
    }

    /// Seeks to the message that contains the next position, or that will contain it.
    fn seek(&mut self) -> Result<()> {
        let (beginning, first, last) = {
            let state = self.shared.lock();
            let first = if state.position < self.next { state.sequence + 1 } else { state.first_sequence };
            (state.beginning, first, state.sequence)
        };
        self.sequence = if first > last { first } else { self.last_message_before(first, last)? };
        (self.beginning, self.before) = (beginning, None);
        self.read.clear();
        Ok(())
    }

    /// Returns the last message of `first` to `last` whose first position is at most the next position.
    fn last_message_before(&self, first: u64, last: u64) -> Result<u64> {
        let (mut found, mut low, mut high) = (first, first, last);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            // A skipped message has no position, so the message before it is used. Within the stream, deleted messages
            // precede all remaining messages.
            let (mut at, mut reported) = (middle, self.read(middle..middle + 1)?.pop());
            while at > low && matches!(reported, Some(None)) {
                at -= 1;
                reported = self.read(at..at + 1)?.pop();
            }
            match reported {
                Some(Some(commit)) if commit.first > self.next => high = at - 1,
                Some(None) => low = middle,
                _ => (found, low) = (at, middle),
            }
        }
        Ok(found)
    }

    /// Reads messages of the stream: `None` for a skipped message; fewer messages if some were deleted.
    fn read(&self, messages: std::ops::Range<u64>) -> Result<Vec<Option<Commit>>> {
        let remote = self.remote.clone();
        let all = async move {
            let read = join_all(messages.map(|sequence| remote.read(sequence))).await;
            read.into_iter().filter_map(|read| Some(read.transpose()?.map(std::result::Result::ok))).collect()
        };
        wait(&self.threads, all).map_err(|e| e.within(format!("stream `{}`", self.remote.name)))
    }

    /// Returns the commit of the next message, which must exist; `None` if the message is skipped.
    fn commit(&mut self) -> Result<Option<Arc<Commit>>> {
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
        self.read.extend(read.into_iter().map(|commit| commit.map(Arc::new)));
        let (name, next) = (&self.remote.name, self.next);
        let removed = || Error::not_found(format!("stream `{name}`: position {next} was released before it was read"));
        self.read.pop_front().ok_or_else(removed)
    }
}

impl Follower for StreamFollower {
    fn next(&mut self, wait: Duration) -> Result<Option<Record>> {
        while self.records.is_empty() {
            let (sequence, beginning) = (self.sequence, self.beginning);
            let is_there = |state: &State| state.sequence >= sequence || state.beginning != beginning;
            let there = self.shared.wait(|state| is_there(state) || state.broken.is_some(), wait);
            let Some((is_there, is_same, missed, broken)) =
                there.map(|state| (is_there(&state), state.beginning == beginning, state.missed, state.broken.clone()))
            else {
                return Ok(None);
            };
            // Messages that were read before the stream became unreadable are valid.
            if let Some(why) = broken.filter(|_| !is_there) {
                return Err(Error::corrupt(why));
            }
            if !is_same {
                if self.next <= missed {
                    let (name, next) = (&self.remote.name, self.next);
                    return Err(Error::corrupt(format!(
                        "stream `{name}`: positions {next} to {missed} were deleted before they were read; a version \
                         that includes these updates is followed from its own position on"
                    )));
                }
                self.seek()?;
                continue;
            }
            let Some(commit) = self.commit()? else {
                self.sequence = sequence + 1;
                continue;
            };
            let first = commit.first;
            if first > self.next {
                let (name, next) = (&self.remote.name, self.next);
                return Err(Error::not_found(format!(
                    "stream `{name}`: position {next} was released before it was read, message {} begins at {first}",
                    self.sequence
                )));
            }
            if self.before.is_some_and(|before| before != commit.before) {
                return Err(Error::corrupt(format!(
                    "stream `{}`: {}",
                    self.remote.name,
                    discontinuity_message(sequence)
                )));
            }
            (self.sequence, self.before) = (sequence + 1, Some(commit.number));
            let numbered = commit.records.iter().zip(first..).filter(|(_, position)| *position >= self.next);
            self.records.extend(numbered.map(|(payload, position)| Record { position, payload: payload.clone() }));
            self.next = self.next.max(commit.last() + 1);
        }
        Ok(self.records.pop_front())
    }
}
