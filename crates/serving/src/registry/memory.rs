//! The memory that versions may take together, planned before anything of a version is loaded.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Of the memory that is there when the server starts, the share that versions may take; requests, the system and files
/// that are being read have the rest.
const SHARE: (u64, u64) = (7, 8);

/// A budget of bytes.
#[derive(Debug)]
pub(super) struct Memory {
    limit: u64,
    taken: Arc<AtomicU64>,
}

/// Bytes of the budget, which come back when it is dropped.
#[derive(Debug)]
pub(super) struct Room {
    bytes: u64,
    taken: Arc<AtomicU64>,
}

impl Memory {
    /// A budget of `limit` bytes, or of most of what this machine or container has free.
    pub(super) fn new(limit: Option<u64>) -> Self {
        let available = || sterling_kernels::memory::available_bytes().map_or(u64::MAX, |b| b / SHARE.1 * SHARE.0);
        Memory { limit: limit.unwrap_or_else(available), taken: Arc::default() }
    }

    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    pub(super) fn free(&self) -> u64 {
        self.limit.saturating_sub(self.taken.load(Ordering::Acquire))
    }

    /// Takes bytes of the budget, or none where it has not as many.
    pub(super) fn take(&self, bytes: u64) -> Option<Room> {
        let more = |taken: u64| taken.checked_add(bytes).filter(|sum| *sum <= self.limit);
        self.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).ok()?;
        Some(Room { bytes, taken: self.taken.clone() })
    }
}

impl Room {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.taken.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}
