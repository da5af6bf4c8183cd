//! Offline scoring: files of users become files of recommendations, through the pass that serves, without HTTP in between.
//!
//! 1. A version and the defaults of its requests ([`JobTerms`]) are asked of each of a list of files, the units of a job
//!    (`crate::jobs`).
//! 2. A unit makes one output file; one whose output is there is done. An output says in its metadata what it follows from.
//! 3. Within a unit one thread reads, others run passes over chunks of rows, and one writes their answers in the order of the
//!    rows. So many chunks are under way at most, which bounds the memory.
//! 4. A row that is wrong is a problem with its reason in a file of its own; it stops nobody. Rows in are rows out and problems.
//! 5. When all units are done and no more rows have a problem than the job allows, `_SUCCESS.json` has the counts.
//!
//! ```
//! use sterling_batch::{Questions, Task};
//!
//! // What all rows of a job share; a row says who asks.
//! let questions = Questions::parse(Task::Retrieve, r#"{"k": 50, "filter": "lang:en"}"#)?;
//! assert_eq!(questions.canonical(), r#"{"filter":"lang:en","k":50}"#);
//! assert!(Questions::parse(Task::Retrieve, r#"{"vector": [1, 2]}"#).is_err());
//! # Ok::<(), sterling_core::error::Error>(())
//! ```

#![cfg_attr(not(test), deny(unreachable_pub))]

mod counts;
mod job;
pub mod jobs;
mod lines;
mod output;
mod questions;
mod rows;
mod run;
mod table;
mod worker;

pub use counts::{Counts, ProblemLimit};
pub use job::JobTerms;
pub use lines::Lines;
pub use questions::{Questions, Task};
pub use run::Scorer;
