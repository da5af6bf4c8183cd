//! The terms of a lookup, and what became of its ids.

use std::time::Instant;

use sterling_core::request::Origin;

pub use sterling_core::request::OnDegraded;

/// The terms of one lookup. Examples that differ in what a degraded row means to them are looked up together with default rows, and
/// told apart by [`TableCounts::degraded_of`].
#[derive(Clone, Debug, Default)]
pub struct Lookup {
    /// Rows not there by then are degraded.
    pub deadline: Option<Instant>,
    /// What that means: the lookup fails, or goes on with zeros in the row's place and counts it.
    pub on_degraded: OnDegraded,
    /// The request that it is made for.
    pub origin: Origin,
}

/// What became of the ids of one table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TableCounts {
    /// The table's name.
    pub table: String,
    /// Ids looked up.
    pub ids: u64,
    /// Those that are no row of the table and met its policy.
    pub unseen: u64,
    /// Those whose row is missing at its source.
    pub unknown: u64,
    /// Those whose row did not come in time.
    pub degraded: u64,
    /// Of each example, those whose row did not come in time; empty where all came.
    pub degraded_of: Vec<u64>,
}

impl TableCounts {
    /// The ids of one example whose row did not come in time.
    pub fn degraded_in(&self, example: usize) -> u64 {
        self.degraded_of.get(example).copied().unwrap_or(0)
    }
}

/// What became of the ids of a lookup, one entry a table.
pub type LookupReport = Vec<TableCounts>;
