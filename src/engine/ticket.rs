//! The way back to a caller, and the memory held on its behalf.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::error::{Error, Result};
use crate::locks::locked;

/// Memory of all requests that were taken in and not yet answered.
#[derive(Debug)]
pub(super) struct Ledger {
    held_bytes: AtomicU64,
    budget_bytes: u64,
    closed: AtomicBool,
}

impl Ledger {
    pub(super) fn new(budget_bytes: u64) -> Arc<Self> {
        Arc::new(Ledger { held_bytes: AtomicU64::new(0), budget_bytes, closed: AtomicBool::new(false) })
    }

    pub(super) fn held_bytes(&self) -> u64 {
        self.held_bytes.load(Ordering::Relaxed)
    }

    /// From here on nothing is wanted any more.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    /// Sets memory aside until the returned [`Held`] is dropped; of half the budget only, where `of_half`.
    ///
    /// # Errors
    /// `TooCostly` where the whole budget would not hold it, `Overloaded` where others hold too much of it now.
    pub(super) fn hold(self: &Arc<Self>, bytes: u64, of_half: bool) -> Result<Held> {
        let budget = self.budget_bytes;
        if bytes > budget {
            return Err(Error::too_costly(format!(
                "the request needs {bytes} bytes of memory, all requests together may hold {budget}"
            )));
        }
        let most = if of_half { (budget / 2).max(bytes) } else { budget };
        let add = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= most);
        match self.held_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add) {
            Ok(_) => Ok(Held { ledger: self.clone(), bytes }),
            Err(held) => Err(Error::overloaded(format!(
                "the request needs {bytes} bytes of memory, others hold {held} of {most}, try again later"
            ))
            .retry_after(Duration::from_millis(100))),
        }
    }
}

/// Memory set aside.
#[derive(Debug)]
pub(super) struct Held {
    ledger: Arc<Ledger>,
    bytes: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.ledger.held_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// The way back to the caller of one request. One that is dropped without an answer says so to the caller.
#[derive(Debug)]
pub struct Ticket<A> {
    open: Mutex<Option<Open<A>>>,
    ledger: Arc<Ledger>,
    arrived: Instant,
    deadline: Instant,
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
                span: tracing::Span::current(),
            },
            answer,
        )
    }

    /// When the answer is of no use any more.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// False once it was answered, the caller has left, the deadline has passed, or the engine ends: whatever is done
    /// from then on, nobody reads. Costs less than a tenth of a microsecond.
    pub fn is_wanted(&self) -> bool {
        let is_heard = self.lock().as_ref().is_some_and(|open| !open.reply.is_closed());
        is_heard && !self.ledger.closed.load(Ordering::Relaxed) && Instant::now() < self.deadline
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
