//! Accepted request as its caller holds it: a future that can be dropped.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use tokio::sync::oneshot;
use tokio::time::Sleep;

use super::backend::Backend;
use super::lane::QueuedRequest;
use super::shared::Shared;
use super::ticket::late;
use sterling_core::error::{Error, Result};

/// Accepted request as its caller holds it.
pub(super) struct PendingAnswer<B: Backend> {
    pub(super) shared: Arc<Shared<B>>,
    pub(super) id: u64,
    pub(super) ask: QueuedRequest,
    pub(super) answer: oneshot::Receiver<Result<B::Answer>>,
    pub(super) latest_start: Instant,
    pub(super) timer: Option<Pin<Box<Sleep>>>,
    pub(super) is_settled: bool,
}

impl<B: Backend> PendingAnswer<B> {
    /// Polls the answer, and otherwise the timer.
    fn poll_answer(&mut self, context: &mut Context<'_>) -> Poll<Result<B::Answer>> {
        if let Poll::Ready(answer) = Pin::new(&mut self.answer).poll(context) {
            return Poll::Ready(answer.unwrap_or_else(|_| Err(Error::internal("the worker ended without an answer"))));
        }
        let latest_start = self.latest_start;
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(latest_start.into())));
        while timer.as_mut().poll(context).is_ready() {
            // Too late for a worker to begin. If one has begun, it has until the deadline.
            if let Some(entry) = self.shared.withdraw(self.id, &self.ask) {
                return Poll::Ready(Err(self.shared.meters.expired(&entry.ask)));
            }
            if timer.deadline() >= self.ask.deadline.into() {
                return Poll::Ready(Err(late(self.ask.deadline.duration_since(self.ask.arrived))));
            }
            timer.as_mut().reset(self.ask.deadline.into());
        }
        Poll::Pending
    }
}

impl<B: Backend> Future for PendingAnswer<B> {
    type Output = Result<B::Answer>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let polled = self.poll_answer(context);
        self.is_settled = polled.is_ready();
        polled
    }
}

impl<B: Backend> Drop for PendingAnswer<B> {
    fn drop(&mut self) {
        if !self.is_settled {
            self.shared.meters.left();
            drop(self.shared.withdraw(self.id, &self.ask));
        }
    }
}
