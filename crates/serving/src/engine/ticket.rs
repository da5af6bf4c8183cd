//! Tickets that answer callers, and the memory reserved for requests.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use sterling_core::quota::{Flow, Memory, Quota};

/// Memory of all accepted requests that are not answered yet.
#[derive(Debug)]
pub(super) struct Ledger {
    quota: Arc<Quota>,
    closed: AtomicBool,
}

impl Ledger {
    pub(super) fn new(budget_bytes: u64) -> Arc<Self> {
        Arc::new(Ledger { quota: Quota::new("request", budget_bytes), closed: AtomicBool::new(false) })
    }

    pub(super) fn held_bytes(&self) -> u64 {
        self.quota.held_bytes()
    }

    /// Cancels all requests.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    /// Reserves memory until the returned [`ReservedMemory`] is dropped; with `of_half`, from half of the budget only.
    ///
    /// # Errors
    /// `TooCostly` if the request exceeds the entire budget, `Overloaded` if other requests or the same caller occupy too much of
    /// it now.
    pub(super) fn hold(self: &Arc<Self>, flow: Flow, bytes: u64, of_half: bool) -> Result<ReservedMemory> {
        let budget = self.quota.most_bytes();
        let most = if of_half { (budget / 2).max(bytes) } else { budget };
        let memory = self.quota.hold_within(flow, bytes, most)?;
        Ok(ReservedMemory { ledger: self.clone(), _memory: memory })
    }
}

/// Reserved memory.
#[derive(Debug)]
pub(super) struct ReservedMemory {
    ledger: Arc<Ledger>,
    _memory: Memory,
}

/// Sends the answer to the caller of one request. Dropping it without an answer sends an error.
#[derive(Debug)]
pub struct Ticket<A> {
    open: Mutex<Option<Open<A>>>,
    ledger: Arc<Ledger>,
    arrived: Instant,
    deadline: Instant,
    /// For background work: the counter of preemptions, and its value at the start.
    overtaken: Option<(Arc<AtomicU64>, u64)>,
    /// Span of the request, so that log lines of a worker name it.
    span: tracing::Span,
}

#[derive(Debug)]
struct Open<A> {
    reply: oneshot::Sender<Result<A>>,
    _held: ReservedMemory,
}

impl<A> Ticket<A> {
    pub(super) fn new(
        held: ReservedMemory,
        arrived: Instant,
        deadline: Instant,
    ) -> (Self, oneshot::Receiver<Result<A>>) {
        let (reply, answer) = oneshot::channel();
        let ledger = held.ledger.clone();
        (
            Ticket {
                open: Mutex::new(Some(Open { reply, _held: held })),
                ledger,
                arrived,
                deadline,
                overtaken: None,
                span: tracing::Span::current(),
            },
            answer,
        )
    }

    /// Makes the ticket unwanted once a caller preempts background work.
    pub(super) fn until_preempted(mut self, overtaken: &Arc<AtomicU64>) -> Self {
        self.overtaken = Some((overtaken.clone(), overtaken.load(Ordering::Relaxed)));
        self
    }

    fn is_preempted(&self) -> bool {
        self.overtaken.as_ref().is_some_and(|(now, then)| now.load(Ordering::Relaxed) != *then)
    }

    /// Returns the time after which the answer is useless.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Returns false if the request is answered, cancelled, past its deadline or preempted, or if the engine is ending. Work from
    /// then on is wasted. Costs less than 0.1 µs.
    pub fn is_wanted(&self) -> bool {
        let is_heard = self.lock().as_ref().is_some_and(|open| !open.reply.is_closed());
        let is_of_use = is_heard && !self.ledger.closed.load(Ordering::Relaxed) && !self.is_preempted();
        is_of_use && Instant::now() < self.deadline
    }

    /// Answers the caller. Only the first answer counts.
    pub fn answer(&self, result: Result<A>) {
        let open = self.lock().take();
        if let Some(open) = open {
            // A closed channel means that the caller has cancelled.
            let _ = open.reply.send(result);
        }
    }

    pub(super) fn is_answered(&self) -> bool {
        self.lock().is_none()
    }

    pub(super) fn span(&self) -> &tracing::Span {
        &self.span
    }

    pub(super) fn arrived(&self) -> Instant {
        self.arrived
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Open<A>>> {
        // The lock only guards taking the sender out, so a panic leaves nothing inconsistent.
        locked(&self.open)
    }
}

impl<A> Drop for Ticket<A> {
    fn drop(&mut self) {
        if self.is_answered() {
            return;
        }
        self.answer(Err(if self.ledger.closed.load(Ordering::Relaxed) {
            closing()
        } else if Instant::now() >= self.deadline {
            late(self.deadline.duration_since(self.arrived))
        } else if self.is_preempted() {
            Error::overloaded("a background request was dropped, because requests of callers take precedence")
        } else {
            Error::internal("the request was dropped without an answer; this is a defect, the log holds more")
        }));
    }
}

/// Returns an error for work that began but finished late.
pub(super) fn late(timeout: Duration) -> Error {
    Error::deadline(format!("no answer within {} ms", timeout.as_millis()))
}

/// Returns an error for requests after the engine was closed.
pub(super) fn closing() -> Error {
    Error::not_ready("the server is shutting down").retry_after(Duration::from_secs(1))
}
