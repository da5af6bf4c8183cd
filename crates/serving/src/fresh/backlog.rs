//! What a start has to read of a journal.
//!
//! Merges are due by the items that have changed. Updates of a few hot items change few, however many they are, and all that came
//! since the snapshot is read and applied at every start. So their number and bytes count too.

use super::Feed;
use crate::view::View;

/// Updates, and bytes of them, that make a merge due of a snapshot of up to [`ITEMS`] items; in larger ones as many more.
const UPDATES: u64 = 1_000_000;
const BYTES: u64 = 128 << 20;
const ITEMS: u64 = 10_000_000;

/// Updates that a start applies to the snapshot of a view.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backlog {
    /// How many they are.
    pub updates: u64,
    /// Their bytes, about.
    pub bytes: u64,
    /// The share of what makes a merge due.
    pub share: f64,
}

impl Backlog {
    /// That of a snapshot with so many items.
    fn of(items: u64, updates: u64, bytes: u64) -> Self {
        let by_size = (items as f64 / ITEMS as f64).max(1.0);
        let share = (updates as f64 / UPDATES as f64).max(bytes as f64 / BYTES as f64) / by_size;
        Backlog { updates, bytes, share }
    }
}

impl Feed {
    /// What a start would apply to the snapshot of a view.
    pub fn backlog(&self, view: &View) -> Backlog {
        let (items, after) = (view.main().index.items() as u64, view.main().manifest.position);
        Backlog::of(items, self.last().saturating_sub(after), self.bytes_after(after))
    }

    /// The first position that a start would need for the snapshot of a view, where the journal has let go of it.
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
