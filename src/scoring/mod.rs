//! Offline scoring: files of users become files of recommendations, through the pass that serves, without HTTP in between.
//!
//! 1. A *job* ([`JobFolder`]) is a version, the defaults of its requests and a list of input files; it is written once, as
//!    `_job.json`, and a run that asks for anything else is refused.
//! 2. Each input file is a *unit*: one output file, whose name follows from the input. It is written under another name, synced
//!    and renamed: it is there whole or not at all, and a unit whose output is there is done. So a run that was killed goes on where
//!    it was, and two that do the same unit write the same bytes. An output says in its metadata what it follows from.
//! 3. Within a unit one thread reads, others run passes over chunks of rows, and one writes their answers in the order of the
//!    rows. So many chunks are under way at most, which bounds the memory.
//! 4. A row that is wrong is a problem with its reason in a file of its own; it stops nobody. Rows in are rows out and problems.
//! 5. When all units are done `_SUCCESS.json` tells the counts.

mod counts;
mod job;
mod lines;
mod orders;
mod output;
mod questions;
mod rows;
mod run;
mod table;
mod worker;

pub use counts::Counts;
pub use job::{JobFolder, JobTerms, Unit};
pub use orders::serve;
pub use questions::{Questions, Task};
pub use run::Scorer;
