//! Backlog: updates that a start must replay from a journal.
//!
//! The number of changed items triggers a merge. Repeated updates of a few items change few items, but a start replays
//! every update, so the number of updates and their bytes trigger a merge too.

use super::ModelUpdates;
use crate::view::View;

/// Number and bytes of updates that trigger a merge of a snapshot with at most [`ITEMS`] items. For larger snapshots,
/// both limits grow in proportion to the items.
const UPDATES: u64 = 1_000_000;
const BYTES: u64 = 128 << 20;
const ITEMS: u64 = 10_000_000;

/// Updates that a start replays on top of a view's snapshot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backlog {
    /// Number of updates.
    pub updates: u64,
    /// Approximate size in bytes.
    pub bytes: u64,
    /// Ratio to the size that triggers a merge.
    pub share: f64,
}

impl Backlog {
    /// Backlog of a snapshot with `items` items.
    fn of(items: u64, updates: u64, bytes: u64) -> Self {
        let by_size = (items as f64 / ITEMS as f64).max(1.0);
        let share = (updates as f64 / UPDATES as f64).max(bytes as f64 / BYTES as f64) / by_size;
        Backlog { updates, bytes, share }
    }
}

impl ModelUpdates {
    /// Returns the backlog of a view's snapshot.
    pub fn backlog(&self, view: &View) -> Backlog {
        let (items, after) = (view.main().index.items() as u64, view.main().manifest.position);
        Backlog::of(items, self.last().saturating_sub(after), self.bytes_after(after))
    }

    /// Returns the position of the first update after the snapshot if the journal no longer has it, so that a restart could
    /// not replay it.
    pub fn lacks(&self, view: &View) -> Option<u64> {
        let next = view.main().manifest.position + 1;
        (self.first() > next).then_some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_updates_and_their_bytes_count_and_large_snapshots_wait_for_more() {
        assert_eq!(Backlog::of(5_000, UPDATES / 2, 0).share, 0.5);
        assert_eq!(Backlog::of(5_000, 10, 3 * BYTES).share, 3.0);
        assert_eq!(Backlog::of(4 * ITEMS, UPDATES, BYTES / 2).share, 0.25);
        assert_eq!(Backlog::of(0, 0, 0).share, 0.0);
    }
}
