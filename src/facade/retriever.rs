//! Retrieval within this process, without a server.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

use super::Snapshot;
use sterling_api::{Explain, Item, Retrieved, cell};
use sterling_core::error::{Error, Result};
use sterling_core::request::{Content, Rank, Request, Retrieve};
use sterling_graph::tower::Threads;
use sterling_serving::pass::{self, Cpu};

/// Answers requests over a snapshot on the CPU, without a server.
///
/// Calls from several threads run one after another: a multi-threaded program creates one retriever per thread; all of them share
/// the snapshot.
pub struct Retriever {
    snapshot: Snapshot,
    cpu: Mutex<Cpu>,
}

impl Retriever {
    /// Creates a retriever over a snapshot, whose graphs run on one thread.
    pub fn new(snapshot: &Snapshot) -> Self {
        Retriever { snapshot: snapshot.clone(), cpu: Mutex::new(cpu()) }
    }

    /// Returns the best items of a user, as `:retrieve` answers.
    ///
    /// # Errors
    /// `Invalid` with the field; `TooCostly` for more work than one request may ask for.
    pub fn retrieve(&self, request: &Retrieve) -> Result<Retrieved> {
        self.run(Request::Retrieve(request.clone()), &request.reading.columns)
    }

    /// Returns the scores of items that the caller names, as `:rank` answers.
    ///
    /// # Errors
    /// As [`Retriever::retrieve`].
    pub fn rank(&self, request: &Rank) -> Result<Retrieved> {
        self.run(Request::Rank(request.clone()), &request.reading.columns)
    }

    /// Locks the buffers of the forward pass, and replaces them if the last call panicked.
    fn cpu(&self) -> MutexGuard<'_, Cpu> {
        self.cpu.lock().unwrap_or_else(|poisoned| {
            self.cpu.clear_poison();
            let mut held = poisoned.into_inner();
            *held = cpu();
            held
        })
    }

    fn run(&self, request: Request, columns: &[String]) -> Result<Retrieved> {
        let view = self.snapshot.view();
        let prepared = pass::prepare(view, request)?;
        let mut answers = pass::run(&mut *self.cpu(), &[prepared], None);
        let answer = answers.pop().unwrap_or_else(|| Err(Error::internal("the pass returned no answer")))?;
        let Content::Items(ranked) = answer.content else {
            return Err(Error::internal("the pass returned no items"));
        };
        let tasks = &view.main().package.spec.tasks;
        let stacked = view.columns();
        let picked: Vec<usize> = columns.iter().map(|name| stacked.first().number(name)).collect::<Result<_>>()?;
        let count = ranked.ids.len();
        let item = |n: usize| Item {
            id: ranked.ids[n].0,
            score: ranked.scores[n],
            similarity: ranked.similarities[n],
            tasks: BTreeMap::from_iter(
                tasks.iter().enumerate().map(|(task, spec)| (spec.name.clone(), ranked.tasks[task * count + n])),
            ),
            columns: columns
                .iter()
                .zip(&picked)
                .map(|(name, &column)| (name.clone(), cell(stacked.cell(column, ranked.slots[n]))))
                .collect(),
        };
        Ok(Retrieved {
            items: (0..count).map(item).collect(),
            explain: answer.explain.as_ref().map(Explain::from),
            degraded_rows: answer.degraded_rows,
            unknown: ranked.unknown.iter().map(|id| id.0).collect(),
            ..Retrieved::default()
        })
    }
}

/// Creates the buffers of a forward pass whose graphs run on one thread.
fn cpu() -> Cpu {
    Cpu::new(Threads::new(1))
}
