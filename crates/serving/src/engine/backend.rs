//! Interface between the engine and the code that executes requests.

use std::time::Duration;

use super::ticket::Ticket;

/// Code that the workers run.
///
/// The engine calls most methods on its own threads. Exceptions are [`cost`](Backend::cost), [`group`](Backend::group),
/// [`needs_fetch`](Backend::needs_fetch) and [`runs_anywhere`](Backend::runs_anywhere), which run once per request on the
/// submitting thread and must be quick, and [`run`](Backend::run) of a request that its caller executes. A panic in
/// [`run`](Backend::run) or [`fetch`](Backend::fetch) fails only the request that caused it: the unanswered rest of the batch is
/// run again, one request at a time.
pub trait Backend: Send + Sync + 'static {
    /// Validated request with its cost estimate, bound to the version that answers it.
    type Work: Send + 'static;
    /// Answer to a request.
    type Answer: Send + 'static;
    /// State that a worker retains between batches.
    type Worker: Send;

    /// Runs the loop of a worker thread, on the calling thread or on one of the backend's own, to avoid a thread switch per
    /// request.
    fn host(&self, work: &(dyn Fn() + Sync)) {
        work();
    }

    /// Creates the state of a worker on its thread, at the start and after a panic.
    fn worker(&self) -> Self::Worker;

    /// Estimates the cost of a request.
    fn cost(&self, work: &Self::Work) -> Estimate;

    /// Returns the group of a request, for example its model version. Requests of one group may share a batch.
    fn group(&self, work: &Self::Work) -> usize;

    /// Returns whether rows must be fetched before a worker can run the request.
    fn needs_fetch(&self, work: &Self::Work) -> bool;

    /// Returns whether the request can run on any thread, not only on a worker thread. If it can, a caller whose
    /// request would go to an idle worker runs the request itself.
    fn runs_anywhere(&self, work: &Self::Work) -> bool;

    /// Fetches the rows that requests of one group need, and stores them in the requests. May block until the latest of their
    /// deadlines. A job that is answered here needs no worker.
    fn fetch(&self, jobs: &mut [Job<Self::Work, Self::Answer>]);

    /// Answers requests of one group in any order, each as soon as it is done. Requests that are no longer wanted may be skipped.
    fn run(&self, worker: &mut Self::Worker, jobs: &mut [Job<Self::Work, Self::Answer>]);

    /// Runs about once per second while a worker is idle.
    fn rest(&self, worker: &mut Self::Worker);
}

/// Request with the ticket that answers its caller.
#[derive(Debug)]
pub struct Job<W, A> {
    /// Request to execute.
    pub work: W,
    /// Ticket of the caller.
    pub ticket: Ticket<A>,
}

pub(super) type JobOf<B> = Job<<B as Backend>::Work, <B as Backend>::Answer>;

/// Cost estimate of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Estimate {
    /// Estimated run time on one worker. Only the proportions between requests must be right: the engine measures the speed of
    /// this machine relative to the estimates.
    pub time: Duration,
    /// Memory that the request occupies from here until it is answered, including its answer.
    pub memory_bytes: u64,
}
