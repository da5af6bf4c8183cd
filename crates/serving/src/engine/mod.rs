//! Who is answered next, by whom, and what is refused.
//!
//! 1. [`Engine::submit`] asks the [`Backend`] what a request costs, sets its memory aside and refuses at once what would
//!    most likely come late (`queue`, `pace`).
//! 2. A request that needs rows of a cluster goes to a thread that fetches them, together with all others that wait for
//!    the same; only then does it wait for a worker.
//! 3. An idle worker takes a batch: of one group and priority, its share of what waits, a few milliseconds long, from the callers that
//!    have had least (`fair`). Where it is
//!    idle and nobody waits, [`Engine::answer`] has the caller run a short request in the worker's place, with what it keeps (`own`).
//! 4. [`Backend::run`] answers each [`Ticket`] as soon as its answer is made. It may look at [`Ticket::is_wanted`] at any
//!    time, and stop.
//! 5. A caller who leaves drops the future: what waits then goes without costing a worker anything.
//!
//! The engine knows nothing of passes; tests run it with fakes.

mod backend;
#[expect(clippy::module_inception, reason = "the engine is what the folder is about; beside it stand its parts")]
mod engine;
mod fair;
mod lane;
mod meters;
mod options;
mod own;
mod pace;
mod passes;
mod place;
mod queue;
mod shared;
#[cfg(test)]
mod tests;
mod ticket;
mod worker;

pub use backend::{Backend, Estimate, Job, Terms};
pub use engine::Engine;
pub use options::Options;
pub use passes::Passes;
pub use ticket::Ticket;
