//! Requests that run on their caller's thread, which saves two thread wake-ups.

use std::sync::Arc;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::oneshot;
use tokio::task::block_in_place;

use super::backend::{Backend, JobOf};
use super::shared::{HeldSlot, Shared};
use super::worker;
use sterling_core::error::{Error, Result};

/// Request that occupies the slot of a worker.
pub(super) struct InlineRequest<B: Backend> {
    pub(super) shared: Arc<Shared<B>>,
    pub(super) lent: HeldSlot<B::Worker>,
    pub(super) cost_estimate: Duration,
    /// True if the request finishes before another thread could be of much use.
    pub(super) is_brief: bool,
    pub(super) job: JobOf<B>,
    pub(super) answer: oneshot::Receiver<Result<B::Answer>>,
}

impl<B: Backend> InlineRequest<B> {
    /// Runs the request on this thread.
    pub(super) fn run(self) -> Result<B::Answer> {
        let InlineRequest { shared, mut lent, cost_estimate, is_brief, job, mut answer } = self;
        let run = || {
            let (mut jobs, began) = ([job], core_time());
            worker::run(&shared, &mut lent.kept, &mut jobs);
            let ran = core_time().saturating_sub(began);
            let done = if jobs[0].ticket.is_answered() { cost_estimate } else { Duration::ZERO };
            drop(jobs);
            shared.finish(lent, done, Some(ran));
        };
        let is_alone = || Handle::try_current().map_or(true, |h| h.runtime_flavor() != RuntimeFlavor::MultiThread);
        // Lets another thread of the runtime serve this thread's connections meanwhile, if there are several.
        match is_brief || is_alone() {
            true => run(),
            false => block_in_place(run),
        }
        answer.try_recv().unwrap_or_else(|_| Err(Error::internal("the request ended without an answer")))
    }
}

/// Returns the CPU time of this thread.
fn core_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}
