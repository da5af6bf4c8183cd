//! Metrics of the engine, and the messages of its rejections.

use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

use super::backend::Job;
use super::lane::QueuedRequest;
use super::queue::{Queue, RejectionReason};
use super::ticket::{Ledger, closing};
use sterling_core::error::{Error, Kind};

/// Shortest retry delay of a rejection: little changes in less time.
const RETRY_MIN: Duration = Duration::from_millis(10);

/// Handles of the engine's metrics: looking one up by name costs more than a rejection may.
pub(super) struct Meters {
    queue_seconds: Histogram,
    batch_requests: Histogram,
    waiting: Gauge,
    in_flight: Gauge,
    pace: Gauge,
    left: Counter,
    lost: Counter,
    refused_queue: Counter,
    refused_deadline: Counter,
    refused_memory: Counter,
    refused_expired: Counter,
    refused_closing: Counter,
}

impl Meters {
    pub(super) fn new() -> Self {
        Meters {
            queue_seconds: histogram!("sterling_queue_seconds"),
            batch_requests: histogram!("sterling_batch_requests"),
            waiting: gauge!("sterling_waiting_requests"),
            in_flight: gauge!("sterling_in_flight_bytes"),
            pace: gauge!("sterling_pace"),
            left: counter!("sterling_dropped_total"),
            lost: counter!("sterling_lost_workers_total"),
            refused_queue: counter!("sterling_refused_total", "reason" => "queue"),
            refused_deadline: counter!("sterling_refused_total", "reason" => "deadline"),
            refused_memory: counter!("sterling_refused_total", "reason" => "memory"),
            refused_expired: counter!("sterling_refused_total", "reason" => "expired"),
            refused_closing: counter!("sterling_refused_total", "reason" => "closing"),
        }
    }

    /// Counts a lost worker.
    pub(super) fn lost(&self) {
        self.lost.increment(1);
    }

    /// Records a batch of a worker.
    pub(super) fn took<W, A>(&self, jobs: &[Job<W, A>]) {
        if !jobs.is_empty() {
            self.batch_requests.record(jobs.len() as f64);
        }
        for job in jobs {
            self.queue_seconds.record(job.ticket.arrived().elapsed().as_secs_f64());
        }
    }

    pub(super) fn state<J>(&self, queue: &Queue<J>, ledger: &Ledger) {
        self.waiting.set((queue.waiting() + queue.fetching()) as f64);
        self.in_flight.set(ledger.held_bytes() as f64);
        self.pace.set(queue.pace().factor());
    }

    /// Counts a caller that cancelled before its answer.
    pub(super) fn left(&self) {
        self.left.increment(1);
    }

    /// Counts rejections by the memory budget.
    pub(super) fn memory(&self, error: Error) -> Error {
        if error.kind() == Kind::Overloaded {
            self.refused_memory.increment(1);
        }
        error
    }

    /// Counts a rejected request and returns its error.
    pub(super) fn refused(&self, refused: RejectionReason) -> Error {
        match refused {
            RejectionReason::Closed => {
                self.refused_closing.increment(1);
                closing()
            }
            RejectionReason::Full(waiting) => {
                self.refused_queue.increment(1);
                overloaded(format!("{waiting} requests wait already, try again later"), Duration::from_millis(100))
            }
            RejectionReason::Late { wait, allowed, own } => {
                self.refused_deadline.increment(1);
                let (wait_ms, own_ms) = (wait.as_millis(), own.as_millis());
                let message = format!(
                    "no answer in time: a worker would be free in {wait_ms} ms and take up to {own_ms} ms; the request has time to wait {} ms",
                    allowed.as_millis()
                );
                overloaded(message, wait.saturating_sub(allowed))
            }
        }
    }

    /// Counts a request that waited until no worker could meet its deadline.
    pub(super) fn expired(&self, ask: &QueuedRequest) -> Error {
        self.refused_expired.increment(1);
        let timeout = ask.time();
        let message = format!("no worker was free in time for an answer within {} ms", timeout.as_millis());
        overloaded(message, timeout / 2)
    }
}

fn overloaded(message: String, wait: Duration) -> Error {
    Error::overloaded(message).retry_after(wait.max(RETRY_MIN))
}
