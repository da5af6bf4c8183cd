//! Compaction of delta segments while updates continue.
//!
//! Joining segments takes time proportional to their rows, and a caller that waits for an update would wait for the
//! join too. A join therefore runs on its own thread, at lower priority than requests. Updates and deletions that
//! arrive during a join set tombstones in the source segments, which the resulting segment inherits.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crossbeam_channel::{Receiver, bounded};
use rayon::ThreadPool;

use crate::view::{Row, Segment};
use sterling_core::error::{Error, Result};
use sterling_core::tasks;
use sterling_core::units::Slot;
use sterling_index::ivf::Assigner;
use sterling_index::search::Tombstones;
use sterling_kernels::priority::Background;
use sterling_snapshot::{Snapshot, VectorRows};

const BROKE: &str = "the task that joins segments panicked; this is a defect";

/// Segment with its tombstones.
pub(super) type Part = (Arc<Segment>, Tombstones);

/// Returns the number of items of a segment that are not deleted.
pub(super) fn live((segment, removed): &Part) -> usize {
    segment.index().items() - removed.len()
}

/// Returns a pool of one thread that joins segments, one join after the other. The thread is retained, because it keeps the
/// memory of the last join for the next.
///
/// # Errors
/// `Overloaded` if the thread cannot be started.
pub(super) fn joiner() -> Result<ThreadPool> {
    // Requests have priority: a slow join means more segments to search until it ends, which slows requests less than a
    // fast join would. A pool of one thread runs the join without splitting it.
    Background::Steady.pool(&tasks::JOIN, 1).map_err(|e| Error::overloaded(e.to_string()).caused_by(e))
}

/// Running join.
pub(super) struct Joining {
    /// Index of the first source segment.
    first: usize,
    /// Source segments, as they were at the start.
    parts: Vec<Part>,
    /// Receives the resulting segment.
    made: Receiver<Result<Segment>>,
}

impl Joining {
    /// Starts a join of segments, the first of which has index `first`; at least one of their items is live.
    pub(super) fn begin(
        joiner: &ThreadPool,
        main: &Arc<Snapshot>,
        assigner: &Arc<Assigner>,
        (first, parts): (usize, Vec<Part>),
    ) -> Self {
        let (main, assigner, sources) = (main.clone(), assigner.clone(), parts.clone());
        let (reported, made) = bounded(1);
        let run = move || {
            let made = catch_unwind(AssertUnwindSafe(|| joined(&main, &assigner, &sources)));
            // The receiver may have been dropped.
            let _ = reported.send(made.unwrap_or_else(|_| Err(Error::internal(BROKE))));
        };
        joiner.spawn(run);
        Joining { first, parts, made }
    }

    /// Returns the index range of the source segments.
    pub(super) fn places(&self) -> Range<usize> {
        self.first..self.first + self.parts.len()
    }

    pub(super) fn is_done(&self) -> bool {
        !self.made.is_empty()
    }

    /// Waits for the result. `now` are the source segments in their present state: items deleted from them meanwhile are deleted
    /// in the result.
    ///
    /// # Errors
    /// As [`Segment::build`]; after an error the source segments are unchanged.
    pub(super) fn end(self, now: &[Part]) -> Result<Part> {
        let segment = self.made.recv().map_err(|_| Error::internal(BROKE))??;
        let mut removed = Tombstones::default();
        for ((source, gone_now), (_, gone_before)) in now.iter().zip(&self.parts) {
            if gone_now.len() == gone_before.len() {
                continue;
            }
            let lately = |slot: &Slot| gone_now.contains(*slot) && !gone_before.contains(*slot);
            for slot in source.index().filled_slots().filter(lately) {
                let slot = segment.ids().slot(source.ids().item(slot));
                removed.insert(slot.ok_or_else(|| Error::internal("a joined segment lacks an item of its sources"))?);
            }
        }
        Ok((Arc::new(segment), removed))
    }
}

/// Returns the live items of several segments as one segment.
///
/// # Errors
/// As [`Segment::build`].
pub(super) fn joined(main: &Snapshot, assigner: &Assigner, parts: &[Part]) -> Result<Segment> {
    let (mut rows, of_vectors) = (Vec::new(), VectorRows::of(&main.package.spec.item.vectors)?);
    for (segment, removed) in parts {
        let live = segment.index().filled_slots().filter(|slot: &Slot| !removed.contains(*slot));
        rows.extend(live.map(|slot| segment.item(assigner, &of_vectors, slot)));
    }
    rows.sort_unstable_by_key(|row: &Row| row.id);
    Segment::build(main, assigner, &rows.iter().collect::<Vec<&Row>>())
}
