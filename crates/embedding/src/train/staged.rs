//! Prefetched rows of the next batches, while earlier batches still update these rows.
//!
//! Remote rows with their optimizer state are requested when a batch is prepared, so they may lack the updates of batches that
//! finish in between. Those updates are retained until every batch that was prepared before them has finished, and overwrite the
//! received values. So a batch sees all updates that precede it, as if batches ran one after the other.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;

use crate::train::parts::{Remote, RequestedStretches};
use sterling_core::error::{Error, Result};
use sterling_core::tasks;

/// Number of updates of a table that a batch's rows are guaranteed to include.
type Version = u64;

/// Latest updates of a partitioned table.
#[derive(Debug, Default)]
pub(super) struct Recent {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    version: Version,
    /// Versions of the batches that are prepared but have not updated rows yet.
    waiting: Vec<Weak<Version>>,
    written: VecDeque<WrittenStretches>,
}

/// Rows with their optimizer state that one update has written.
#[derive(Debug)]
struct WrittenStretches {
    version: Version,
    rows: Arc<[u32]>,
    stretches: Arc<[f32]>,
}

impl Recent {
    /// Registers a batch: rows that are read after this call include all updates up to the returned version.
    fn enter(&self) -> Arc<Version> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let ticket = Arc::new(state.version);
        state.waiting.retain(|ticket| ticket.strong_count() > 0);
        state.waiting.push(Arc::downgrade(&ticket));
        ticket
    }

    /// Retains an update that was written to all partitions, if a waiting batch may have read the rows before the update.
    pub(super) fn keep(&self, rows: &[u32], stretches: &[f32]) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.version += 1;
        let version = state.version;
        let oldest = state.waiting.iter().filter_map(|ticket| ticket.upgrade().map(|version| *version)).min();
        if oldest.is_some() {
            state.written.push_back(WrittenStretches { version, rows: rows.into(), stretches: stretches.into() });
        }
        state.written.retain(|written| oldest.is_some_and(|oldest| written.version > oldest));
    }

    /// Applies the updates after version `ticket` to rows that were read at that version: replaces the changed rows in
    /// `stretches`, the rows with their optimizer state, `[rows, stride]`.
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

/// Requested rows of one batch in one partitioned table.
#[derive(Debug)]
pub(super) struct Travelling {
    ticket: Arc<Version>,
    /// Answers of the remote partitions; the first caller that needs the rows joins the threads.
    answers: Mutex<Answers>,
}

#[derive(Debug)]
enum Answers {
    RequestedRows(Vec<JoinHandle<Option<Result<RequestedStretches>>>>),
    Came(Vec<RequestedStretches>),
    Failed,
}

impl Travelling {
    /// Requests the rows of every remote partition, each on its own thread.
    ///
    /// # Errors
    /// `Overloaded` if a thread cannot be started.
    pub(super) fn begin(recent: &Recent, remotes: &[Remote], rows: &Arc<[u32]>) -> Result<Self> {
        let ticket = recent.enter();
        let ask = |remote: &Remote| {
            let (remote, rows) = (remote.clone(), rows.clone());
            let thread = tasks::LEARN_FETCH.start(move || remote.ask(&rows));
            thread.map_err(|e| Error::overloaded(format!("cannot start the thread that fetches rows: {e}")))
        };
        let answers = Answers::RequestedRows(remotes.iter().map(ask).collect::<Result<_>>()?);
        Ok(Travelling { ticket, answers: Mutex::new(answers) })
    }

    /// Returns the batch's rows with their state after all updates so far; `assemble` merges received and local rows.
    ///
    /// # Errors
    /// Errors of a source. The rows are requested once, so a second call fails as well.
    pub(super) fn stretches(
        &self,
        recent: &Recent,
        rows: &[u32],
        stride: usize,
        assemble: impl FnOnce(&[RequestedStretches]) -> Vec<f32>,
    ) -> Result<Vec<f32>> {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Answers::RequestedRows(threads) = &mut *answers {
            let threads = std::mem::take(threads);
            *answers = Answers::Failed;
            let join = |thread: JoinHandle<Option<Result<RequestedStretches>>>| {
                thread.join().unwrap_or_else(|_| Some(Err(Error::internal("a source of rows panicked"))))
            };
            *answers = Answers::Came(threads.into_iter().filter_map(join).collect::<Result<_>>()?);
        }
        let Answers::Came(came) = &*answers else {
            return Err(Error::unavailable("rows of this batch did not arrive in an earlier call"));
        };
        let mut stretches = assemble(came);
        recent.overwrite(*self.ticket, rows, &mut stretches, stride);
        Ok(stretches)
    }
}
