//! What the keeper of a stream and those who follow it share.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::jetstream::stream::Info;

use super::message::{Commit, LENGTH_BYTES};
use crate::shared::Progress;

/// Bytes of the newest messages that are kept for those who follow.
const RECENT_BYTES: usize = 16 << 20;
/// How long an operator is told of a message that was skipped.
const TOLD: Duration = Duration::from_secs(3600);

/// How far a stream is.
#[derive(Debug, Default)]
pub(super) struct State {
    /// How often the stream was begun anew while this server followed it: sequences of one beginning mean nothing in another.
    pub(super) beginning: u64,
    /// The first message that is kept, and the position that it begins at.
    pub(super) first_sequence: u64,
    pub(super) first: u64,
    /// The last message, and the position that the journal ends at.
    pub(super) sequence: u64,
    pub(super) position: u64,
    /// The number of the last commit, and its message.
    pub(super) number: u128,
    pub(super) last_commit: u64,
    /// The newest messages, without those that were skipped; the last one is that of `sequence`.
    recent: VecDeque<Option<Arc<Commit>>>,
    recent_bytes: usize,
    /// Bytes of the stream at the last look.
    pub(super) bytes: u64,
    /// Bytes that a message of the stream may have, where the stream limits them.
    pub(super) message_bytes_max: Option<usize>,
    /// Messages that were skipped, as no journal wrote them.
    pub(super) skipped: Skipped,
    /// Since when the broker does not answer, and what it came to.
    pub(super) lost: Option<(Instant, String)>,
    /// When the last append was refused that nothing was wrong with, and why; none once a commit was written after it.
    pub(super) refused: Option<(Instant, String)>,
    /// Why the stream is not the one that was followed; it goes on once it is again.
    pub(super) away: Option<String>,
    /// Why nothing can be read any more, until a version holds what was missed.
    pub(super) broken: Option<String>,
    /// The position beyond the end, as far as it was read, from which a version was to be followed last.
    pub(super) held: u64,
    /// Updates up to this position were missed by who followed before the stream was joined again.
    pub(super) missed: u64,
    /// Why the position cannot be noted outside of the stream.
    pub(super) unnoted: Option<String>,
}

/// Messages that were skipped.
#[derive(Debug, Default)]
pub(super) struct Skipped {
    count: u64,
    last: Option<(Instant, u64, String)>,
}

impl Skipped {
    /// Counts a message, which is this.
    fn take(&mut self, sequence: u64, what: String) {
        self.count += 1;
        self.last = Some((Instant::now(), sequence, what));
    }

    /// Whether the last one came within a second.
    pub(super) fn is_recent(&self) -> bool {
        self.last.as_ref().is_some_and(|(at, ..)| at.elapsed() < Duration::from_secs(1))
    }

    /// What an operator should know of those that came lately.
    pub(super) fn warning(&self) -> Option<String> {
        let (_, sequence, what) = self.last.as_ref().filter(|(at, ..)| at.elapsed() < TOLD)?;
        Some(format!(
            "{} messages were skipped, the last one is message {sequence}: {what}; no update is lost, but somebody else publishes there",
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
    /// That of a stream of which the first commit that is kept and the last one are known, each with its sequence. Messages up to
    /// `last_sequence` are no commits.
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

    /// Goes on with the stream that was begun anew by a commit, the message of a sequence.
    pub(super) fn begin_anew(&mut self, sequence: u64, commit: &Commit) {
        self.beginning += 1;
        (self.first_sequence, self.first) = (sequence, commit.first);
        (self.sequence, self.position) = (sequence, commit.last());
        (self.last_commit, self.number) = (sequence, commit.number);
        (self.recent, self.recent_bytes) = (VecDeque::new(), 0);
        self.away = None;
    }

    /// Takes note of the position from which a version is to be followed.
    pub(super) fn wants(&mut self, after: u64) {
        if after > self.position {
            self.held = after;
        }
    }

    /// Goes on with the stream as it is now, which is this: all that was missed up to a position is in a version.
    pub(super) fn join(&mut self, now: State, missed: u64) {
        let (beginning, held) = (self.beginning + 1, self.held);
        let (skipped, unnoted) = (std::mem::take(&mut self.skipped), self.unnoted.take());
        *self = State { beginning, held, missed, skipped, unnoted, ..now };
    }

    /// Takes note of what the broker tells of the stream.
    pub(super) fn look_at(&mut self, told: &Info) {
        self.bytes = told.state.bytes;
        // None is limited by -1.
        self.message_bytes_max = usize::try_from(told.config.max_message_size).ok().filter(|bytes| *bytes > 0);
    }

    /// Takes the next message.
    pub(super) fn take(&mut self, commit: Arc<Commit>) {
        self.position = commit.last();
        self.number = commit.number;
        self.refused = None;
        self.push(Some(commit));
        self.last_commit = self.sequence;
    }

    /// Skips the next message, which is this.
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

    /// Whether a commit is one of the newest.
    pub(super) fn has(&self, number: u128) -> bool {
        self.number == number || self.recent.iter().rev().flatten().any(|commit| commit.number == number)
    }

    /// A message, where it is one of the newest: its commit, or `None` within for one that is skipped.
    pub(super) fn recent(&self, sequence: u64) -> Option<Option<Arc<Commit>>> {
        let first = self.sequence + 1 - self.recent.len() as u64;
        self.recent.get(sequence.checked_sub(first)? as usize).cloned()
    }
}

fn bytes(commit: &Option<Arc<Commit>>) -> usize {
    let records = commit.iter().flat_map(|commit| &commit.records);
    size_of::<Commit>() + records.map(|record| record.len() + LENGTH_BYTES + size_of::<Vec<u8>>()).sum::<usize>()
}
