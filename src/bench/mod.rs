//! Load on a running server: an open loop, in which a slow answer delays no later request.
//!
//! 1. `schedule` fixes when each request is to be sent, before the run begins.
//! 2. `load` sends each at its time on a free connection of `client`. An answer's latency counts from the time at which
//!    the request *should* have gone out, so that nothing hides that requests had to wait (coordinated omission).
//! 3. `report` counts the answers by what they were, and takes exact percentiles of all latencies.
//! 4. `peak` raises the rate until the server no longer follows.
//!
//! The generator is one thread, and one more that keeps the time. Where it could not keep its schedule, or had no
//! connection to send on, the load was another than the one asked for: the run is void and says so.

mod answer;
mod client;
mod load;
mod peak;
mod report;
mod requests;
mod schedule;

pub use load::{Class, Load, get, post, run};
pub use peak::{Peak, find_peak};
pub use report::{ClassReport, Generator, Latency, Report, median};
pub use requests::{Body, Target, random_vectors, read_bodies};
pub use schedule::Arrivals;
