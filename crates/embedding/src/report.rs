//! Options of a lookup, and its counts of ids by outcome.

use std::fmt;
use std::time::Instant;

use sterling_core::error::Error;
use sterling_core::request::Origin;

pub use sterling_core::request::OnDegraded;

/// Options of one lookup. Examples of one batch may treat degraded rows differently: such a batch is looked up with
/// default rows, and [`TableCounts::degraded_of`] counts the degraded rows per example.
#[derive(Clone, Debug, Default)]
pub struct Lookup {
    /// Deadline: rows that are missing at this time are degraded.
    pub deadline: Option<Instant>,
    /// Effect of a degraded row: the lookup fails, or uses zeros instead and counts the row.
    pub on_degraded: OnDegraded,
    /// Request that caused the lookup.
    pub origin: Origin,
}

impl Lookup {
    /// Returns the error of a lookup whose `rows` are missing: they were late if the deadline has passed; otherwise their source
    /// has lost them or does not answer.
    pub fn unavailable(&self, rows: impl fmt::Display) -> Error {
        match self.deadline {
            Some(deadline) if Instant::now() >= deadline => Error::deadline(format!("{rows} did not arrive in time")),
            _ => Error::unavailable(format!("{rows} are unavailable: their source lost them or does not answer")),
        }
    }
}

/// Counts of the ids of one table, by outcome.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TableCounts {
    /// Name of the table.
    pub table: String,
    /// Number of ids looked up.
    pub ids: u64,
    /// Ids outside of the table's rows, to which its policy for unseen ids applied.
    pub unseen: u64,
    /// Ids whose row is missing at its source.
    pub unknown: u64,
    /// Ids whose row did not arrive in time.
    pub degraded: u64,
    /// Per example, number of ids whose row did not arrive in time; empty if all rows arrived.
    pub degraded_of: Vec<u64>,
}

impl TableCounts {
    /// Returns the number of ids of one example whose row did not arrive in time.
    pub fn degraded_in(&self, example: usize) -> u64 {
        self.degraded_of.get(example).copied().unwrap_or(0)
    }
}

/// Counts of the ids of a lookup, one entry per table.
pub type LookupReport = Vec<TableCounts>;
