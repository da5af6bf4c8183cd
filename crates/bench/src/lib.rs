//! Load on a running server: an open loop, in which a slow answer delays no later request.
//!
//! 1. `requests` are what is sent, `sweep` is which of their fields vary, `recording` reads requests with the times at which
//!    they once came.
//! 2. `schedule` fixes when each request is to be sent, whatever becomes of those before.
//! 3. `load` sends each at its time on a free connection of `client`. An answer's latency counts from the time at which
//!    the request *should* have gone out, so that nothing hides that requests had to wait (coordinated omission).
//! 4. `report` counts the answers by what they were, and `latency` keeps their times in a histogram. `bound` holds these against
//!    a bound, in the terms of MLPerf's Server scenario.
//! 5. `sample` keeps some of the answers that were timed; `quality` asks for them again, exactly, and holds every item against
//!    its filter (`eligible`).
//! 6. `peak` raises the rate until the server no longer follows. `turns` measures several servers or settings in turns and
//!    compares them, with intervals of `bootstrap`. `charts` draws all of it, with `plot`.
//!
//! The generator is one thread, and one more that keeps the time. Where it could not keep its schedule, or had no
//! connection to send on, the load was another than the one asked for: the run is void and says so.
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
mod turns;

pub use bootstrap::Interval;
pub use bound::{Bound, ServerResult};
pub use charts::{Measured, charts};
pub use client::{get, post};
pub use latency::{Latencies, Latency};
pub use load::{Class, Load, run};
pub use peak::{Peak, find_peak};
pub use plot::{Axis, Chart, Curve};
pub use quality::{Quality, check, selectivity};
pub use recording::read_recording;
pub use report::{ClassReport, Generator, Report};
pub use requests::{Body, Target, random_vectors, read_bodies};
pub use sample::TimedAnswer;
pub use schedule::{Arrivals, SendTimes};
pub use sweep::{Setting, Sweep, grid, read_filters};
pub use turns::{Contender, FigureRatio, compare, counted, in_turns};
