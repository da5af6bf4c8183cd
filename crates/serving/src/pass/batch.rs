//! The seam between those who run passes and the devices that do: a batch in, its answers out.

use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use super::work::Prepared;
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use sterling_core::request::Answer;

/// A device with the memory of one worker: runs whole passes.
pub trait Pass: Send {
    /// Runs the eleven steps for requests of one view and answers each as soon as it is done. Requests that are not wanted any
    /// more are left unanswered.
    fn run(&mut self, batch: &dyn Batch);

    /// Gives memory back that is not needed for long; called about each second while there is nothing to do.
    fn rest(&mut self);
}

/// Requests that run together, all prepared for one view.
pub trait Batch: Sync {
    /// How many there are.
    fn len(&self) -> usize;

    /// True where there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What request `n` asks.
    fn prepared(&self, n: usize) -> &Prepared;

    /// When the answer to request `n` stops being worth anything.
    fn deadline(&self, n: usize) -> Option<Instant>;

    /// True while somebody waits for the answer to request `n`.
    fn is_wanted(&self, n: usize) -> bool;

    /// Answers request `n`; called once for each.
    fn answer(&self, n: usize, answer: Result<Answer>);
}

/// What a request is told whose deadline has passed before a step.
pub(super) fn late(before: &str) -> Error {
    Error::deadline(format!("the deadline passed before step `{before}`"))
}

/// A batch whose answers are collected, in the order of the requests.
struct Collected<'a> {
    requests: &'a [Prepared],
    deadline: Option<Instant>,
    answers: Mutex<Vec<Option<Result<Answer>>>>,
}

impl Collected<'_> {
    fn collected(&self) -> MutexGuard<'_, Vec<Option<Result<Answer>>>> {
        // Nothing but an answer is put in under the lock.
        locked(&self.answers)
    }
}

impl Batch for Collected<'_> {
    fn len(&self) -> usize {
        self.requests.len()
    }

    fn prepared(&self, n: usize) -> &Prepared {
        &self.requests[n]
    }

    fn deadline(&self, _: usize) -> Option<Instant> {
        self.deadline
    }

    fn is_wanted(&self, _: usize) -> bool {
        true
    }

    fn answer(&self, n: usize, answer: Result<Answer>) {
        self.collected()[n] = Some(answer);
    }
}

/// Runs prepared requests of one view and returns their answers in their order.
pub fn run(pass: &mut dyn Pass, requests: &[Prepared], deadline: Option<Instant>) -> Vec<Result<Answer>> {
    let batch = Collected { requests, deadline, answers: Mutex::new(requests.iter().map(|_| None).collect()) };
    pass.run(&batch);
    let unanswered = || Err(Error::internal("the pass left a request unanswered"));
    let answers = std::mem::take(&mut *batch.collected());
    answers.into_iter().map(|answer| answer.unwrap_or_else(unanswered)).collect()
}
