//! Training from events: a package in, a package out.
//!
//! A [`Trainer`] processes events in their order, in batches:
//!
//! 1. `events` reads and validates lines and rows; an invalid event is rejected, and written to a quarantine file;
//! 2. `judge` ranks each event before it is trained on, by the learning model, the model at the start, and popularity;
//! 3. `loss` computes the gradients of a softmax over the batch's items and sampled items, corrected by `frequency`, or
//!    `tasks` computes the gradients of the cross-entropy of the `reranker`'s logits;
//! 4. `model` propagates the gradients through both towers (`side`) to the tables, which are updated in the same backward pass;
//! 5. every n steps `checkpoint` writes the complete state (`state`): a killed run resumes with bit-identical results.
//!
//! Several `hosts` may share a run: each host has a part of the rows and of every batch.
//!
//! `package` writes the result as a package, which `publish` accepts and which can be trained further, with a sample of the events'
//! `requests`.
//!
//! ```
//! use std::path::Path;
//! use sterling_train::{TrainOptions, Trainer};
//!
//! let package = Path::new("models/books");
//! let work = TrainOptions::work_folder_for(package);
//! assert_eq!(work, Path::new("models/books.train"));
//! let options = TrainOptions { epochs: 2, shuffle: 10_000, ..TrainOptions::new(vec!["events.jsonl".into()], work) };
//! // This folder holds no package.
//! assert!(Trainer::open(package, options).is_err());
//! ```

#![cfg_attr(not(test), deny(unreachable_pub))]

mod catalogue;
mod checkpoint;
mod events;
mod frequency;
mod hosts;
mod judge;
mod lock;
mod loss;
mod managed;
mod model;
mod package;
mod products;
mod quarantine;
mod report;
mod requests;
mod reranker;
mod row_set;
mod side;
mod state;
mod step_random;
mod tasks;
#[cfg(test)]
mod tests;
mod trainer;
mod weights;

pub use hosts::Hosts;
pub use managed::ManagedReport;
pub use report::{Predicted, Ranked, Report, TaskReport, Window};
pub use trainer::{Progress, TrainOptions, Trainer};
