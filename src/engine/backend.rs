//! What an engine runs, as the engine sees it.

use std::time::Duration;

use super::ticket::Ticket;
use crate::request::Priority;

/// What the workers run.
///
/// All of it is called on threads of the engine but [`cost`](Backend::cost), [`group`](Backend::group) and
/// [`needs_fetch`](Backend::needs_fetch), which are called once a request where it is submitted, and must be quick.
/// A panic in [`run`](Backend::run) or [`fetch`](Backend::fetch) fails the request that brings it about and no other:
/// the others of its batch that have no answer yet are run again, each alone.
pub trait Backend: Send + Sync + 'static {
    /// A request that was checked, priced and bound to the version that answers it.
    type Work: Send + 'static;
    /// What it is answered with.
    type Answer: Send + 'static;
    /// What a worker thread keeps from batch to batch.
    type Worker;

    /// What a worker thread keeps; called on the thread itself, and again after a panic.
    fn worker(&self) -> Self::Worker;

    /// What a request will cost.
    fn cost(&self, work: &Self::Work) -> Estimate;

    /// Requests of one group may be run together; those of one version of a model, say.
    fn group(&self, work: &Self::Work) -> usize;

    /// Whether rows must be fetched before a worker can run it.
    fn needs_fetch(&self, work: &Self::Work) -> bool;

    /// Fetches what requests of one group need, and keeps it in them. May block until the last of their deadlines. A job
    /// that is answered here takes no worker.
    fn fetch(&self, jobs: &mut [Job<Self::Work, Self::Answer>]);

    /// Answers requests of one group, in any order, each as soon as it is done. One that is not wanted any more may be
    /// left without an answer.
    fn run(&self, worker: &mut Self::Worker, jobs: &mut [Job<Self::Work, Self::Answer>]);

    /// Called once when a worker has had nothing to do for a while.
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
}
