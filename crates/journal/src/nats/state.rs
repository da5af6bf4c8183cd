//! State shared by the followers of a stream and the task that maintains the stream.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::jetstream::stream::Info;

use super::message::{Commit, LENGTH_BYTES};
use crate::shared::Progress;

/// Bytes of the newest messages that are cached for followers.
const RECENT_BYTES: usize = 16 << 20;
/// Time for which a skipped message is reported to operators.
const REPORT_TIME: Duration = Duration::from_secs(3600);

/// Progress of a stream.
#[derive(Debug, Default)]
pub(super) struct State {
    /// Number of times the stream was recreated or rejoined; sequence numbers are valid only within one incarnation.
    pub(super) beginning: u64,
    /// Sequence number of the first retained message, and the message's first position.
    pub(super) first_sequence: u64,
    pub(super) first: u64,
    /// Sequence number of the last message, and the last position of the journal.
    pub(super) sequence: u64,
    pub(super) position: u64,
    /// Unique number of the last commit, and the sequence number of its message.
    pub(super) number: u128,
    pub(super) last_commit: u64,
    /// Newest messages, `None` for a skipped message; the last entry is message `sequence`.
    recent: VecDeque<Option<Arc<Commit>>>,
    recent_bytes: usize,
    /// Bytes of the stream at the last poll.
    pub(super) bytes: u64,
    /// Maximum bytes of a message, if the stream limits them.
    pub(super) message_bytes_max: Option<usize>,
    /// Record of skipped messages.
    pub(super) skipped: Skipped,
    /// Time since which the broker does not answer, and the error.
    pub(super) lost: Option<(Instant, String)>,
    /// Time and reason of the last valid append that was rejected; cleared by the next commit.
    pub(super) refused: Option<(Instant, String)>,
    /// Reason why the stream is not the one that was followed; cleared when that stream is back.
    pub(super) away: Option<String>,
    /// Reason why the stream cannot be read, until a version includes the missed updates.
    pub(super) broken: Option<String>,
    /// Last start position of a follower that was beyond the known end of the stream.
    pub(super) held: u64,
    /// Position up to which followers missed updates, because the stream was rejoined after them.
    pub(super) missed: u64,
    /// Reason why the position cannot be recorded outside of the stream.
    pub(super) unnoted: Option<String>,
}

/// Skipped messages.
#[derive(Debug, Default)]
pub(super) struct Skipped {
    count: u64,
    last: Option<(Instant, u64, String)>,
}

impl Skipped {
    /// Counts a skipped message, described by `what`.
    fn take(&mut self, sequence: u64, what: String) {
        self.count += 1;
        self.last = Some((Instant::now(), sequence, what));
    }

    /// Returns whether a message was skipped within the last second.
    pub(super) fn is_recent(&self) -> bool {
        self.last.as_ref().is_some_and(|(at, ..)| at.elapsed() < Duration::from_secs(1))
    }

    /// Returns the warning for operators about recently skipped messages.
    pub(super) fn warning(&self) -> Option<String> {
        let (_, sequence, what) = self.last.as_ref().filter(|(at, ..)| at.elapsed() < REPORT_TIME)?;
        Some(format!(
            "{} messages were skipped, the last one is message {sequence}: {what}; no update is lost, but another \
             program publishes there",
            self.count
        ))
    }
}

impl Progress for State {
    fn last(&self) -> u64 {
        self.position
    }
}

impl State {
    /// Returns the state of a stream from its first and last retained commits with their sequence numbers. Messages after the
    /// last commit, up to `last_sequence`, are not commits.
    pub(super) fn of(first: (u64, &Commit), last: (u64, &Commit), last_sequence: u64) -> Self {
        State {
            first_sequence: first.0,
            first: first.1.first,
            sequence: last_sequence,
            position: last.1.last(),
            number: last.1.number,
            last_commit: last.0,
            ..State::default()
        }
    }

    /// Continues with a recreated stream, from the commit with this sequence number.
    pub(super) fn restart(&mut self, sequence: u64, commit: &Commit) {
        self.beginning += 1;
        (self.first_sequence, self.first) = (sequence, commit.first);
        (self.sequence, self.position) = (sequence, commit.last());
        (self.last_commit, self.number) = (sequence, commit.number);
        (self.recent, self.recent_bytes) = (VecDeque::new(), 0);
        self.away = None;
    }

    /// Records the start position of a follower, if that position is beyond the known end of the stream.
    pub(super) fn wants(&mut self, after: u64) {
        if after > self.position {
            self.held = after;
        }
    }

    /// Continues with the stream whose state is `now`; a version includes all updates missed up to position `missed`.
    pub(super) fn join(&mut self, now: State, missed: u64) {
        let (beginning, held) = (self.beginning + 1, self.held);
        let (skipped, unnoted) = (std::mem::take(&mut self.skipped), self.unnoted.take());
        *self = State { beginning, held, missed, skipped, unnoted, ..now };
    }

    /// Updates the limits and the size from the broker's information.
    pub(super) fn update_from_info(&mut self, reported: &Info) {
        self.bytes = reported.state.bytes;
        // A `max_message_size` of -1 means no limit.
        self.message_bytes_max = usize::try_from(reported.config.max_message_size).ok().filter(|bytes| *bytes > 0);
    }

    /// Accepts the next message.
    pub(super) fn take(&mut self, commit: Arc<Commit>) {
        self.position = commit.last();
        self.number = commit.number;
        self.refused = None;
        self.push(Some(commit));
        self.last_commit = self.sequence;
    }

    /// Skips the next message, described by `what`.
    pub(super) fn skip(&mut self, what: String) {
        self.push(None);
        self.skipped.take(self.sequence, what);
    }

    fn push(&mut self, commit: Option<Arc<Commit>>) {
        self.sequence += 1;
        self.recent_bytes += bytes(&commit);
        self.recent.push_back(commit);
        while self.recent_bytes > RECENT_BYTES
            && let Some(oldest) = self.recent.pop_front()
        {
            self.recent_bytes -= bytes(&oldest);
        }
    }

    /// Returns whether a commit is among the cached newest messages.
    pub(super) fn has(&self, number: u128) -> bool {
        self.number == number || self.recent.iter().rev().flatten().any(|commit| commit.number == number)
    }

    /// Returns a message if it is cached: its commit, or an inner `None` if the message was skipped.
    pub(super) fn recent(&self, sequence: u64) -> Option<Option<Arc<Commit>>> {
        let first = self.sequence + 1 - self.recent.len() as u64;
        self.recent.get(sequence.checked_sub(first)? as usize).cloned()
    }
}

fn bytes(commit: &Option<Arc<Commit>>) -> usize {
    let records = commit.iter().flat_map(|commit| &commit.records);
    size_of::<Commit>() + records.map(|record| record.len() + LENGTH_BYTES + size_of::<Vec<u8>>()).sum::<usize>()
}
