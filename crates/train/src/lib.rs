//! Training from events: a package in, a package out.
//!
//! A [`Trainer`] goes through events in their order. Of each batch
//!
//! 1. `events` reads and checks lines and rows; what is wrong is refused alone, and kept in a quarantine;
//! 2. `judge` ranks each event before it is trained on, by the model that learns, by the model as it was, and by popularity;
//! 3. `loss` makes the gradients of a softmax over the items of the batch and uniformly drawn ones, corrected by `frequency`;
//! 4. `model` takes them through both towers (`side`) to the tables, which learn in the same pass;
//! 5. now and then `checkpoint` writes all of it (`state`): a run that is killed goes on to the same bits.
//!
//! `package` writes what was learned as a package, which `publish` takes and which can be trained on.

#![cfg_attr(not(test), deny(unreachable_pub))]

mod catalogue;
mod checkpoint;
mod draws;
mod events;
mod frequency;
mod judge;
mod loss;
mod model;
mod package;
mod products;
mod quarantine;
mod report;
mod side;
mod state;
#[cfg(test)]
mod tests;
mod trainer;

pub use report::{Ranked, Report, Window};
pub use trainer::{Progress, TrainOptions, Trainer};
