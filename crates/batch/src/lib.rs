//! Offline scoring: files of users become files of recommendations, through the same pass that serves requests, without HTTP.
//!
//! 1. A job applies one version and its default request fields ([`JobSettings`]) to a list of input files, the units of the job
//!    (`crate::jobs`).
//! 2. A unit writes one output file; a unit whose output exists is done. The metadata of an output identify the job and the
//!    input.
//! 3. Within a unit, one thread reads, others run passes over chunks of rows, and one writes the answers in row order. The number
//!    of chunks in flight is limited, which bounds memory.
//! 4. An invalid row becomes a problem, written with its reason to a separate file; it does not stop the job. Input rows are
//!    output rows plus problems.
//! 5. When all units are done and problems are within the job's limit, `_SUCCESS.json` is written with the counts.
//!
//! ```
//! use sterling_batch::{Questions, Task};
//!
//! // Fields that all rows of the job share; a row names the user.
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
pub use job::JobSettings;
pub use lines::Lines;
pub use questions::{Questions, Task};
pub use run::Scorer;
