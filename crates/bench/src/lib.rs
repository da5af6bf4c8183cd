//! Open-loop load generator for a running server: a slow answer delays no later request.
//!
//! 1. `requests` are the request bodies, `sweep` varies their fields, `recording` reads requests with their original times.
//! 2. `schedule` fixes the time of each request in advance.
//! 3. `load` sends each request at its time on a free connection of `client`. The latency of an answer counts from the
//!    *scheduled* time, so that the wait for a connection counts too (coordinated omission).
//! 4. `report` counts the answers by outcome, and `latency` keeps their times in a histogram. `bound` compares these
//!    times with a latency bound, in the terms of MLPerf's Server scenario.
//! 5. `sample` keeps a sample of the timed answers; `quality` repeats these requests with exact search, and checks every item
//!    against its filter (`eligible`).
//! 6. `peak` raises the rate until the server falls behind. `interleaved` measures several servers or settings in interleaved rounds
//!    and compares them, with confidence intervals of `bootstrap`. `charts` draws the results, with `plot`.
//!
//! The generator uses one thread, and a second one for timing. If the generator did not keep its schedule or had no
//! free connection, the load differed from the requested one; the run is then void and reports that.
//!
//! ```
//! use sterling_bench::{Sweep, grid};
//!
//! let sweeps = [Sweep::parse("k=10,100")?, Sweep::parse("recall=0.9,0.98")?];
//! assert_eq!(grid(&sweeps)?.len(), 4);
//! assert!(Sweep::parse("k=ten").is_err());
//! # Ok::<(), sterling_core::error::Error>(())
//! ```

#![cfg_attr(not(test), deny(unreachable_pub))]

mod answer;
mod bootstrap;
mod bound;
mod charts;
mod client;
mod eligible;
mod interleaved;
mod latency;
mod load;
mod peak;
mod plot;
mod quality;
mod recording;
mod report;
mod requests;
mod sample;
mod schedule;
mod sweep;

pub use bootstrap::Interval;
pub use bound::{Bound, ServerResult};
pub use charts::{Measured, charts};
pub use client::{get, post};
pub use interleaved::{Contender, FigureRatio, compare, counted, in_turns};
pub use latency::{Latencies, Latency};
pub use load::{Class, Load, run};
pub use peak::{Peak, find_peak};
pub use plot::{Axis, Chart, Curve};
pub use quality::{Quality, accepts, check, selectivity};
pub use recording::read_recording;
pub use report::{ClassReport, Generator, Report};
pub use requests::{Body, Target, random_vectors, read_bodies};
pub use sample::TimedAnswer;
pub use schedule::{Arrivals, SendTimes};
pub use sweep::{Setting, Sweep, grid, read_filters};
