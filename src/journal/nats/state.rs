//! What the keeper of a stream and those who follow it share.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::message::{Commit, LENGTH_BYTES};

/// Bytes of the newest messages that are kept for those who follow.
const RECENT_BYTES: usize = 16 << 20;

/// How far a stream is.
#[derive(Debug, Default)]
pub(super) struct State {
    /// The first message that is kept, and the position that it begins at.
    pub(super) first_sequence: u64,
    pub(super) first: u64,
    /// The last message, and the position that it ends at.
    pub(super) sequence: u64,
    pub(super) position: u64,
    /// The number of its commit.
    pub(super) number: u128,
    /// The newest messages; the last one is that of `sequence`.
    recent: VecDeque<Arc<Commit>>,
    recent_bytes: usize,
    /// Since when the broker does not answer, and what it came to.
    pub(super) lost: Option<(Instant, String)>,
    /// Why nothing can be read any more.
    pub(super) broken: Option<String>,
}

impl State {
    /// That of a stream whose first and last message are known, each with its sequence.
    pub(super) fn of(first: (u64, &Commit), last: (u64, &Commit)) -> Self {
        State {
            first_sequence: first.0,
            first: first.1.first,
            sequence: last.0,
            position: last.1.last(),
            number: last.1.number,
            ..State::default()
        }
    }

    /// Takes the next message.
    pub(super) fn take(&mut self, commit: Arc<Commit>) {
        self.sequence += 1;
        self.position = commit.last();
        self.number = commit.number;
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
        self.number == number || self.recent.iter().rev().any(|commit| commit.number == number)
    }

    /// A message, where it is one of the newest.
    pub(super) fn recent(&self, sequence: u64) -> Option<Arc<Commit>> {
        let first = self.sequence + 1 - self.recent.len() as u64;
        self.recent.get(sequence.checked_sub(first)? as usize).cloned()
    }
}

fn bytes(commit: &Commit) -> usize {
    commit.records.iter().map(|record| record.len() + LENGTH_BYTES + size_of::<Vec<u8>>()).sum()
}
