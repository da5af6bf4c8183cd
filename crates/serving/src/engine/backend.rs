//! What an engine runs, as the engine sees it.

use std::time::Duration;

use super::ticket::Ticket;
use crate::quota::Flow;
use sterling_core::request::Priority;

/// What the workers run.
///
/// All of it is called on threads of the engine but [`cost`](Backend::cost), [`group`](Backend::group),
/// [`needs_fetch`](Backend::needs_fetch) and [`runs_anywhere`](Backend::runs_anywhere), which are called once a request where it is
/// submitted, and must be quick, and [`run`](Backend::run) of a request that its caller runs.
/// A panic in [`run`](Backend::run) or [`fetch`](Backend::fetch) fails the request that brings it about and no other:
/// the others of its batch that have no answer yet are run again, each alone.
pub trait Backend: Send + Sync + 'static {
    /// A request that was checked, priced and bound to the version that answers it.
    type Work: Send + 'static;
    /// What it is answered with.
    type Answer: Send + 'static;
    /// What a worker keeps from batch to batch.
    type Worker: Send;

    /// Runs all that a worker thread does, on the thread that it is to be done on: the calling one, or one of the backend's
    /// own, where each change of thread would cost a request.
    fn host(&self, work: &(dyn Fn() + Sync)) {
        work();
    }

    /// What a worker keeps; called on its thread, and again after a panic.
    fn worker(&self) -> Self::Worker;

    /// What a request will cost.
    fn cost(&self, work: &Self::Work) -> Estimate;

    /// Requests of one group may be run together; those of one version of a model, say.
    fn group(&self, work: &Self::Work) -> usize;

    /// Whether rows must be fetched before a worker can run it.
    fn needs_fetch(&self, work: &Self::Work) -> bool;

    /// Whether any thread can run it as well as the worker's own: a caller who would wait for an idle worker runs it then.
    fn runs_anywhere(&self, work: &Self::Work) -> bool;

    /// Fetches what requests of one group need, and keeps it in them. May block until the last of their deadlines. A job
    /// that is answered here takes no worker.
    fn fetch(&self, jobs: &mut [Job<Self::Work, Self::Answer>]);

    /// Answers requests of one group, in any order, each as soon as it is done. One that is not wanted any more may be
    /// left without an answer.
    fn run(&self, worker: &mut Self::Worker, jobs: &mut [Job<Self::Work, Self::Answer>]);

    /// Called again and again, about each second, while a worker has nothing to do.
    fn rest(&self, worker: &mut Self::Worker);
}

/// A request and the way back to its caller.
#[derive(Debug)]
pub struct Job<W, A> {
    /// The request.
    pub work: W,
    /// The way back.
    pub ticket: Ticket<A>,
}

pub(super) type JobOf<B> = Job<<B as Backend>::Work, <B as Backend>::Answer>;

/// What a request is thought to cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Estimate {
    /// How long one worker is thought to run. Only the proportions must be right: the engine measures by which factor
    /// work takes longer here.
    pub time: Duration,
    /// Memory that the request holds from here on until it is answered, its answer included.
    pub memory_bytes: u64,
}

/// Under which terms a request is submitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// How long the answer is worth waiting for; the engine's default where it is not given.
    pub timeout: Option<Duration>,
    /// Who goes first where requests wait.
    pub priority: Priority,
    /// Whose request it is: callers that wait share the workers, and the memory, evenly.
    pub flow: Flow,
    /// True for what no caller waits for: it ends unanswered where a caller's request would be refused because of it.
    pub is_background: bool,
}
