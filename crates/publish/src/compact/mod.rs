//! Compaction: publishes snapshot and delta as the next version, and truncates the journal.
//!
//! A thread watches the active versions ([`Compactor`]). When updates have changed enough of a version, or on request, the
//! version's view is published as the next version ([`crate::merge`]), on a few threads at the lowest priority. The new version is
//! loaded like any other, and replaces the version that it was made from. A shard keeps its version number: its updates are merged
//! into a checkpoint, another snapshot that replaces it. Journal segments and merged versions that are no longer needed are then
//! deleted (`retention`).

#[cfg(test)]
mod faults;
mod retention;
mod worker;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use sterling_core::error::{Error, Result};
use sterling_kernels::priority::Background;

pub use retention::release;
pub use worker::Compactor;

/// A merge is overdue when the delta reaches this multiple of `merge.share`.
const OVERDUE: f64 = 2.0;
/// Weight of an item of a new kind: searches scan more lists for such an item, and the centroid of its list was trained on few
/// items like it.
const STRAY_COUNTS: f64 = 5.0;

/// Automatic merges of updates into a new version (compaction).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Delta items plus deleted items, as a share of the snapshot, at which updates are merged; also at 1,000,000
    /// updates or 128 MiB of journal to replay. 0: only on request.
    pub share: f64,
    /// Share of the machine's cores that a merge uses at the lowest priority; at least one core.
    pub cores: f64,
}

impl Default for Options {
    fn default() -> Self {
        Options { share: 0.1, cores: 0.25 }
    }
}

impl Options {
    /// Validates the options.
    ///
    /// # Errors
    /// `Invalid` with the option, its value and its range.
    pub fn check(&self) -> Result<()> {
        for (name, value, range) in [("share", self.share, 0.0..=10.0), ("cores", self.cores, 0.0..=1.0)] {
            if !range.contains(&value) {
                let (least, most) = (range.start(), range.end());
                return Err(Error::invalid(format!("merge.{name}: got {value}, expected {least} to {most}")));
            }
        }
        Ok(())
    }

    /// Returns whether to merge, given the size of the delta as a fraction of the snapshot, and the fraction of strays: items
    /// unlike those that the lists were trained on.
    fn is_due(&self, drift: f64, strays: f64) -> bool {
        self.share > 0.0 && (drift >= self.share || STRAY_COUNTS * strays >= self.share)
    }

    /// Returns the CPU priority of a merge, given the size of the delta. An overdue merge no longer waits for idle cores, because
    /// under a constant load updates would be rejected eventually.
    fn background(&self, drift: f64) -> Background {
        let is_overdue = self.share > 0.0 && drift >= OVERDUE * self.share;
        if is_overdue { Background::Raised { much: true } } else { Background::Last }
    }

    /// Returns the number of threads of a merge.
    fn threads(&self) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        ((cores as f64 * self.cores) as usize).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_merge_that_is_overdue_goes_on_under_any_load() {
        let by_share = Options { share: 0.1, cores: 0.25 };
        assert_eq!([0.0, 0.1, 0.19].map(|drift| by_share.background(drift)), [Background::Last; 3]);
        assert_eq!([0.2, 1.5].map(|drift| by_share.background(drift)), [Background::Raised { much: true }; 2]);
        let by_hand = Options { share: 0.0, cores: 0.25 };
        assert_eq!(by_hand.background(3.0), Background::Last);
    }

    #[test]
    fn a_merge_is_due_sooner_for_items_of_a_new_kind() {
        let by_share = Options { share: 0.1, cores: 0.25 };
        assert_eq!([(0.09, 0.01), (0.019, 0.019)].map(|(drift, strays)| by_share.is_due(drift, strays)), [false; 2]);
        assert_eq!([(0.1, 0.0), (0.02, 0.02)].map(|(drift, strays)| by_share.is_due(drift, strays)), [true; 2]);
        assert!(!Options { share: 0.0, cores: 0.25 }.is_due(3.0, 3.0));
    }
}
