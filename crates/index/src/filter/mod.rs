//! Filters: parsing, planning and evaluation of expressions over items.
//!
//! `language` parses text into a canonical tree. `index` holds bit planes and posting lists of the items, built when a snapshot
//! is published. A [`Plan`] resolves a tree against the columns and the index of one snapshot (`question`) and compiles it into
//! operations on planes (`program`). Items updated after the index was built are evaluated again (`changed`).

mod changed;
pub mod index;
mod language;
mod plan;
mod program;
mod question;
mod sample;

pub use index::{Index, Options, encode};
pub use language::{Canonical, Expr, Leaf, Test, parse};
pub use plan::{Plan, Route, Scratch};
pub use sample::PassingShares;

#[cfg(test)]
mod tests;
