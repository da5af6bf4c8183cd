//! Rows of the next batches on their way, while earlier batches still change them.
//!
//! Stretches that lie elsewhere are asked for when a batch is prepared, and may come as they were before the updates of the batches in
//! between. Those updates are kept as long as a batch waits that was prepared before them, and take precedence over what came: a batch
//! sees all updates that were done before it, as if batches ran one after the other.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;

use crate::train::parts::{Asked, Remote};
use sterling_core::error::{Error, Result};

/// The number of updates of a table that a batch's rows are sure to have.
type Version = u64;

/// The latest updates of a table in parts.
#[derive(Debug, Default)]
pub(super) struct Recent {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    version: Version,
    /// The batches that have been prepared and not yet updated.
    waiting: Vec<Weak<Version>>,
    written: VecDeque<Written>,
}

/// Stretches that an update wrote.
#[derive(Debug)]
struct Written {
    version: Version,
    rows: Arc<[u32]>,
    stretches: Arc<[f32]>,
}

impl Recent {
    /// Rows that are read from now on have all updates up to this one.
    fn enter(&self) -> Arc<Version> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let ticket = Arc::new(state.version);
        state.waiting.retain(|ticket| ticket.strong_count() > 0);
        state.waiting.push(Arc::downgrade(&ticket));
        ticket
    }

    /// Keeps what an update has written to all parts, if a batch waits that may have read the rows before.
    pub(super) fn keep(&self, rows: &[u32], stretches: &[f32]) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.version += 1;
        let version = state.version;
        let oldest = state.waiting.iter().filter_map(|ticket| ticket.upgrade().map(|version| *version)).min();
        if oldest.is_some() {
            state.written.push_back(Written { version, rows: rows.into(), stretches: stretches.into() });
        }
        state.written.retain(|written| oldest.is_some_and(|oldest| written.version > oldest));
    }

    /// Overwrites stretches `[rows, stride]` that were read at `ticket` by all updates since.
    fn overwrite(&self, ticket: Version, rows: &[u32], stretches: &mut [f32], stride: usize) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        for written in state.written.iter().filter(|written| written.version > ticket) {
            let mut at = 0;
            for (row, from) in written.rows.iter().zip(written.stretches.chunks_exact(stride)) {
                at += rows[at..].partition_point(|r| r < row);
                if rows.get(at) == Some(row) {
                    stretches[at * stride..][..stride].copy_from_slice(from);
                }
            }
        }
    }
}

/// The rows of one batch in one table in parts, on their way.
#[derive(Debug)]
pub(super) struct Travelling {
    ticket: Arc<Version>,
    /// Joined by the first who needs the rows.
    answers: Mutex<Answers>,
}

#[derive(Debug)]
enum Answers {
    Awaited(Vec<JoinHandle<Option<Result<Asked>>>>),
    Came(Vec<Asked>),
    Failed,
}

impl Travelling {
    /// Asks every part that is elsewhere for its rows, each on a thread of its own.
    ///
    /// # Errors
    /// `Overloaded` where a thread cannot be had.
    pub(super) fn begin(recent: &Recent, remotes: &[Remote], rows: &Arc<[u32]>) -> Result<Self> {
        let ticket = recent.enter();
        let ask = |remote: &Remote| {
            let (remote, rows) = (remote.clone(), rows.clone());
            let thread = std::thread::Builder::new().name("learn-fetch".into());
            thread
                .spawn(move || remote.ask(&rows))
                .map_err(|e| Error::overloaded(format!("no thread to fetch rows: {e}")))
        };
        let answers = Answers::Awaited(remotes.iter().map(ask).collect::<Result<_>>()?);
        Ok(Travelling { ticket, answers: Mutex::new(answers) })
    }

    /// Whole stretches of the batch's rows as they are after all updates so far, put together by `assemble` of what came.
    ///
    /// # Errors
    /// What a source says; the rows are asked for once, so that a second call fails as well.
    pub(super) fn stretches(
        &self,
        recent: &Recent,
        rows: &[u32],
        stride: usize,
        assemble: impl FnOnce(&[Asked]) -> Vec<f32>,
    ) -> Result<Vec<f32>> {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Answers::Awaited(threads) = &mut *answers {
            let threads = std::mem::take(threads);
            *answers = Answers::Failed;
            let join = |thread: JoinHandle<Option<Result<Asked>>>| {
                thread.join().unwrap_or_else(|_| Some(Err(Error::internal("a source of rows panicked"))))
            };
            *answers = Answers::Came(threads.into_iter().filter_map(join).collect::<Result<_>>()?);
        }
        let Answers::Came(came) = &*answers else { return Err(Error::unavailable("rows of this batch did not come")) };
        let mut stretches = assemble(came);
        recent.overwrite(*self.ticket, rows, &mut stretches, stride);
        Ok(stretches)
    }
}
