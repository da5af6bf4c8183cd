//! Memory budget of all versions, reserved before a version is loaded.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Share of the memory that is free at startup for versions; requests, the system and the page cache use the rest.
const SHARE: (u64, u64) = (7, 8);

/// Budget in bytes.
#[derive(Debug)]
pub(super) struct Memory {
    limit: u64,
    taken: Arc<AtomicU64>,
}

/// Reserved bytes, returned on drop.
#[derive(Debug)]
pub(super) struct Room {
    bytes: u64,
    taken: Arc<AtomicU64>,
}

impl Memory {
    /// Creates a budget of `limit` bytes, or of most of the free memory of this machine or container.
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

    /// Reserves bytes; `None` if the budget is exceeded.
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
