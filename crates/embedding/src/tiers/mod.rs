//! Where the rows of a table come from: memory of this host, another server of the same model, or a cluster.
//!
//! A lookup asks every source once, with each row named once ([`RowSource::begin`], [`RowSource::send`]), then pools what lies in
//! memory while the answers travel, then waits ([`Pending::wait`]). Each row asked for ends in exactly one [`RowState`].

pub mod breaker;
pub mod cache;
pub(super) mod places;
#[cfg(feature = "redis")]
pub mod remote;
pub mod slices;

use std::fmt::Debug;
use std::sync::Arc;

use super::report::Lookup;
use sterling_core::error::Result;
use sterling_kernels::buffer::Buffer;

/// Where the rows of a shard are.
#[derive(Clone, Debug)]
pub enum Source {
    /// In this process's memory, mapped or owned: `[rows, row_bytes]`.
    Host(Buffer<u8>),
    /// Asked for.
    Fetched(Arc<dyn RowSource>),
}

/// What became of a row that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowState {
    /// The row's bytes are there.
    Hit,
    /// The source answered that it has no such row.
    Unknown,
    /// The source did not answer in time or is down: the row may exist.
    Degraded,
}

/// The answer of a source.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fetched {
    /// `[rows asked for, row_bytes]`; the bytes of a row that is no [`RowState::Hit`] mean nothing.
    pub bytes: Vec<u8>,
    /// One a row asked for.
    pub states: Vec<RowState>,
}

/// A question on its way.
pub trait Pending: Send {
    /// The answer, at the latest at the deadline of the lookup that [`RowSource::begin`] was called for: rows without one by then are
    /// [`RowState::Degraded`].
    ///
    /// # Errors
    /// Where the source answers and the answer cannot be trusted or used, such as rows of another width. A source that is
    /// slow or down is not an error here; the lookup's policy decides what it means.
    fn wait(self: Box<Self>) -> Result<Fetched>;
}

/// Rows of one shard of a table that are fetched rather than mapped. Every row is `row_bytes` bytes in the table's format.
pub trait RowSource: Send + Sync + Debug {
    /// Bytes of a row.
    fn row_bytes(&self) -> usize;

    /// Number of rows; asked for are `0..rows`.
    fn rows(&self) -> u64;

    /// Asks for `rows`, sorted and each once, under the terms of a lookup, and returns at once.
    fn begin(&self, rows: Vec<u64>, terms: &Lookup) -> Box<dyn Pending + '_>;

    /// Everything that a lookup asks for has begun: questions that were kept to go together go now.
    fn send(&self) {}
}
