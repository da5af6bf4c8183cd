//! Sources of the rows of a table: this host's memory, another server of the same model, or a cluster.
//!
//! A lookup sends one request to every source, with each row at most once ([`RowSource::begin`], [`RowSource::send`]). The lookup
//! pools rows in memory while requests are in progress, and then waits ([`Pending::wait`]). Each requested row ends in exactly one
//! [`RowState`].

pub mod breaker;
pub mod cache;
pub(super) mod cache_slots;
#[cfg(feature = "redis")]
pub mod remote;
pub mod slices;

use std::fmt::Debug;
use std::sync::Arc;

use super::report::Lookup;
use sterling_core::error::Result;
use sterling_kernels::buffer::Buffer;

/// Location of a shard's rows.
#[derive(Clone, Debug)]
pub enum Source {
    /// Rows in this process's memory, mapped or owned: `[rows, row_bytes]`.
    Host(Buffer<u8>),
    /// Rows that are fetched from a source.
    Fetched(Arc<dyn RowSource>),
}

/// Outcome of a requested row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowState {
    /// The row's bytes are present.
    Hit,
    /// The source answered that it has no such row.
    Unknown,
    /// The source did not answer in time or is down; the row may exist.
    Degraded,
}

/// Answer of a source.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fetched {
    /// Bytes of the rows, `[requested rows, row_bytes]`; only the bytes of [`RowState::Hit`] rows are valid.
    pub bytes: Vec<u8>,
    /// One state per requested row.
    pub states: Vec<RowState>,
}

/// A request in progress.
pub trait Pending: Send {
    /// Waits for the answer, at most until the deadline of the lookup that was passed to [`RowSource::begin`]. Rows without an
    /// answer at that time are [`RowState::Degraded`].
    ///
    /// # Errors
    /// If the answer cannot be trusted or used, such as rows of another width. A slow or unavailable source is not an error: its
    /// rows are degraded, and the lookup's policy decides about them.
    fn wait(self: Box<Self>) -> Result<Fetched>;
}

/// Source of the rows of one shard that are not in this process's memory. Every row is `row_bytes` bytes in the table's format.
pub trait RowSource: Send + Sync + Debug {
    /// Returns the bytes per row.
    fn row_bytes(&self) -> usize;

    /// Returns the number of rows; requests are for `0..rows`.
    fn rows(&self) -> u64;

    /// Starts a request for `rows`, sorted and distinct, with the options of a lookup, and returns immediately.
    fn begin(&self, rows: Vec<u64>, terms: &Lookup) -> Box<dyn Pending + '_>;

    /// Sends requests that were held back for batching. Called after all requests of a lookup have begun.
    fn send(&self) {}
}
