//! A request that its caller runs: nobody is woken to run it, and nobody for its answer.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::oneshot;
use tokio::task::block_in_place;

use super::backend::{Backend, JobOf};
use super::shared::{Lent, Shared};
use super::worker;
use crate::error::{Error, Result};

/// A request with the place of a worker.
pub(super) struct Own<B: Backend> {
    pub(super) shared: Arc<Shared<B>>,
    pub(super) lent: Lent<B::Worker>,
    pub(super) price: Duration,
    pub(super) job: JobOf<B>,
    pub(super) answer: oneshot::Receiver<Result<B::Answer>>,
}

impl<B: Backend> Own<B> {
    /// Runs it on this thread.
    pub(super) fn run(self) -> Result<B::Answer> {
        let Own { shared, mut lent, price, job, mut answer } = self;
        let run = || {
            let mut jobs = [job];
            worker::run(&shared, &mut lent.kept, &mut jobs);
            let done = if jobs[0].ticket.is_answered() { price } else { Duration::ZERO };
            drop(jobs);
            shared.finish(lent, done);
        };
        // Another thread looks after the connections of this one meanwhile, where the runtime has several.
        match Handle::try_current().is_ok_and(|runtime| runtime.runtime_flavor() == RuntimeFlavor::MultiThread) {
            true => block_in_place(run),
            false => run(),
        }
        answer.try_recv().unwrap_or_else(|_| Err(Error::internal("the request ended without an answer")))
    }
}
