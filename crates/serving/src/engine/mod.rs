//! Request scheduler: admission control, queueing, and the worker threads.
//!
//! 1. [`Engine::submit`] gets a cost estimate from the [`Backend`], reserves memory, and rejects requests that would most likely
//!    miss their deadline: load shedding (`queue`, `service_rate`).
//! 2. A request that needs rows from a cluster goes to a fetcher thread, together with all other requests of its group. The
//!    request queues for a worker afterwards.
//! 3. An idle worker takes a batch of one group and priority (`fair`). A batch holds the worker's share of the queue, is a few
//!    milliseconds long, and prefers the callers that were served least. If a worker is idle and the queue is empty,
//!    [`Engine::answer`] runs a short request on the caller's thread with the worker's state (`caller_runs`).
//! 4. [`Backend::run`] completes each [`Ticket`] as soon as its answer is ready. The backend may poll [`Ticket::is_wanted`] at
//!    any time, and stop.
//! 5. A caller cancels by dropping the future. A cancelled request that still waits costs no worker time.
//!
//! The engine knows nothing about passes; its tests use a fake backend.

mod backend;
mod caller_runs;
#[expect(
    clippy::module_inception,
    reason = "the folder is named after its main module; the other modules are its parts"
)]
mod engine;
mod fair;
mod lane;
mod meters;
mod options;
mod passes;
mod queue;
mod request_future;
mod service_rate;
mod shared;
#[cfg(test)]
mod tests;
mod ticket;
mod worker;

pub use backend::{Backend, Estimate, Job};
pub use engine::Engine;
pub use options::Options;
pub use passes::Passes;
pub use ticket::Ticket;
