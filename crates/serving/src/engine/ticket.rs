//! The way back to a caller, and the memory held on its behalf.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::quota::{Flow, Memory, Quota};
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;

/// Memory of all requests that were taken in and not yet answered.
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

    /// From here on nothing is wanted any more.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    /// Sets memory aside until the returned [`Held`] is dropped; of half the budget only, where `of_half`.
    ///
    /// # Errors
    /// `TooCostly` where the whole budget would not hold it, `Overloaded` where others, or the same caller, hold too much of it now.
    pub(super) fn hold(self: &Arc<Self>, flow: Flow, bytes: u64, of_half: bool) -> Result<Held> {
        let budget = self.quota.most_bytes();
        let most = if of_half { (budget / 2).max(bytes) } else { budget };
        let memory = self.quota.hold_within(flow, bytes, most)?;
        Ok(Held { ledger: self.clone(), _memory: memory })
    }
}

/// Memory set aside.
#[derive(Debug)]
pub(super) struct Held {
    ledger: Arc<Ledger>,
    _memory: Memory,
}

/// The way back to the caller of one request. One that is dropped without an answer says so to the caller.
#[derive(Debug)]
pub struct Ticket<A> {
    open: Mutex<Option<Open<A>>>,
    ledger: Arc<Ledger>,
    arrived: Instant,
    deadline: Instant,
    /// Of what nobody waits for: how often callers overtake such, and how often they had when it came.
    overtaken: Option<(Arc<AtomicU64>, u64)>,
    /// Where the request came in, so that lines of a worker name it.
    span: tracing::Span,
}

#[derive(Debug)]
struct Open<A> {
    reply: oneshot::Sender<Result<A>>,
    _held: Held,
}

impl<A> Ticket<A> {
    pub(super) fn new(held: Held, arrived: Instant, deadline: Instant) -> (Self, oneshot::Receiver<Result<A>>) {
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

    /// The same, which is not wanted any more once callers overtake it.
    pub(super) fn until_overtaken(mut self, overtaken: &Arc<AtomicU64>) -> Self {
        self.overtaken = Some((overtaken.clone(), overtaken.load(Ordering::Relaxed)));
        self
    }

    fn is_overtaken(&self) -> bool {
        self.overtaken.as_ref().is_some_and(|(now, then)| now.load(Ordering::Relaxed) != *then)
    }

    /// When the answer is of no use any more.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// False once it was answered, the caller has left, the deadline has passed, callers have overtaken it, or the engine ends: whatever is done
    /// from then on, nobody reads. Costs less than a tenth of a microsecond.
    pub fn is_wanted(&self) -> bool {
        let is_heard = self.lock().as_ref().is_some_and(|open| !open.reply.is_closed());
        let is_of_use = is_heard && !self.ledger.closed.load(Ordering::Relaxed) && !self.is_overtaken();
        is_of_use && Instant::now() < self.deadline
    }

    /// Answers the caller. Only the first answer counts.
    pub fn answer(&self, result: Result<A>) {
        let open = self.lock().take();
        if let Some(open) = open {
            // A closed channel means that the caller has left; nobody is there to tell.
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
        // Taking the sender out is all that ever happens under the lock.
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
        } else if self.is_overtaken() {
            Error::overloaded("requests of callers go before it")
        } else {
            Error::internal("the request was put away without an answer; this is a defect, the log holds more")
        }));
    }
}

/// Work had begun, and came late.
pub(super) fn late(timeout: Duration) -> Error {
    Error::deadline(format!("no answer within {} ms", timeout.as_millis()))
}

/// The engine takes nothing in any more.
pub(super) fn closing() -> Error {
    Error::not_ready("the server is shutting down").retry_after(Duration::from_secs(1))
}
