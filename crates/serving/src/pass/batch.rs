//! Interface between the scheduler and the devices: a batch of requests in, its answers out.

use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use super::work::Prepared;
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use sterling_core::request::Answer;

/// Device with the buffers of one worker, which runs complete passes.
pub trait Pass: Send {
    /// Runs the eleven steps for requests of one view, and answers each as soon as it is done. Skips requests that are no longer
    /// wanted.
    fn run(&mut self, batch: &dyn Batch);

    /// Releases memory that is rarely needed. Called about once per second while idle.
    fn rest(&mut self);
}

/// Requests that run together, all prepared for one view.
pub trait Batch: Sync {
    /// Returns the number of requests.
    fn len(&self) -> usize;

    /// Returns whether the batch is empty.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns request `n`.
    fn prepared(&self, n: usize) -> &Prepared;

    /// Returns the deadline of request `n`.
    fn deadline(&self, n: usize) -> Option<Instant>;

    /// Returns whether the caller still waits for the answer to request `n`.
    fn is_wanted(&self, n: usize) -> bool;

    /// Answers request `n`; called once per request.
    fn answer(&self, n: usize, answer: Result<Answer>);
}

/// Returns an error of a request whose deadline passed before a step.
pub(super) fn late(before: &str) -> Error {
    Error::deadline(format!("the deadline passed before step `{before}`"))
}

/// Batch that collects its answers in the order of the requests.
struct Collected<'a> {
    requests: &'a [Prepared],
    deadline: Option<Instant>,
    answers: Mutex<Vec<Option<Result<Answer>>>>,
}

impl Collected<'_> {
    fn collected(&self) -> MutexGuard<'_, Vec<Option<Result<Answer>>>> {
        // The lock only guards storing an answer.
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

/// Runs prepared requests of one view and returns their answers in the same order.
pub fn run(pass: &mut dyn Pass, requests: &[Prepared], deadline: Option<Instant>) -> Vec<Result<Answer>> {
    let batch = Collected { requests, deadline, answers: Mutex::new(requests.iter().map(|_| None).collect()) };
    pass.run(&batch);
    let unanswered = || Err(Error::internal("the pass did not answer a request"));
    let answers = std::mem::take(&mut *batch.collected());
    answers.into_iter().map(|answer| answer.unwrap_or_else(unanswered)).collect()
}
