//! Segments that become one while updates go on.
//!
//! A join takes as long as its rows are many, and whoever waits for an update would wait for it. So it runs on a thread of its
//! own, behind all requests; what is put, changed or deleted meanwhile marks the segments that go in, and the one that comes
//! out once it is there.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crossbeam_channel::{Receiver, bounded};
use rayon::ThreadPool;

use crate::view::{Row, Segment};
use sterling_core::error::{Error, Result};
use sterling_core::units::Slot;
use sterling_index::ivf::Assigner;
use sterling_index::search::Tombstones;
use sterling_kernels::priority::Background;
use sterling_snapshot::{Snapshot, VectorRows};

const BROKE: &str = "what joins segments broke; this is a defect";

/// A segment and what is gone of it.
pub(super) type Part = (Arc<Segment>, Tombstones);

/// Items of a part that are there.
pub(super) fn live((segment, gone): &Part) -> usize {
    segment.index().items() - gone.len()
}

/// Where joins are made, one after the other: a thread that stays keeps the memory that the last one took.
///
/// # Errors
/// `Overloaded` where no thread can be had.
pub(super) fn joiner() -> Result<ThreadPool> {
    // Requests go first: a join that takes longer leaves more segments to search, which costs them less. A pool of one thread
    // divides nothing among threads that would be in their way.
    Background::Steady.pool("join", 1).map_err(|e| Error::overloaded(e.to_string()).caused_by(e))
}

/// A join under way.
pub(super) struct Joining {
    /// The place of the first part that goes in.
    first: usize,
    /// Those that go in, as they were when it began.
    parts: Vec<Part>,
    /// The one segment, once it is there.
    made: Receiver<Result<Segment>>,
}

impl Joining {
    /// Begins to join parts, the first of which has a place; at least one item of them is there.
    pub(super) fn begin(
        joiner: &ThreadPool,
        main: &Arc<Snapshot>,
        assigner: &Arc<Assigner>,
        (first, parts): (usize, Vec<Part>),
    ) -> Self {
        let (main, assigner, sources) = (main.clone(), assigner.clone(), parts.clone());
        let (told, made) = bounded(1);
        let run = move || {
            let made = catch_unwind(AssertUnwindSafe(|| joined(&main, &assigner, &sources)));
            // Whoever began it may be gone.
            let _ = told.send(made.unwrap_or_else(|_| Err(Error::internal(BROKE))));
        };
        joiner.spawn(run);
        Joining { first, parts, made }
    }

    /// The places of the parts that go in.
    pub(super) fn places(&self) -> Range<usize> {
        self.first..self.first + self.parts.len()
    }

    pub(super) fn is_done(&self) -> bool {
        !self.made.is_empty()
    }

    /// Waits for the one segment. `now` are the parts as they are now: what has gone of them meanwhile is gone of it.
    ///
    /// # Errors
    /// As [`Segment::build`]; the parts are then as they were.
    pub(super) fn end(self, now: &[Part]) -> Result<Part> {
        let segment = self.made.recv().map_err(|_| Error::internal(BROKE))??;
        let mut gone = Tombstones::default();
        for ((source, gone_now), (_, gone_before)) in now.iter().zip(&self.parts) {
            if gone_now.len() == gone_before.len() {
                continue;
            }
            let lately = |slot: &Slot| gone_now.contains(*slot) && !gone_before.contains(*slot);
            for slot in source.index().filled_slots().filter(lately) {
                let slot = segment.ids().slot(source.ids().item(slot));
                gone.insert(slot.ok_or_else(|| Error::internal("an item was lost in a join"))?);
            }
        }
        Ok((Arc::new(segment), gone))
    }
}

/// The items of parts that are there, in one segment.
///
/// # Errors
/// As [`Segment::build`].
pub(super) fn joined(main: &Snapshot, assigner: &Assigner, parts: &[Part]) -> Result<Segment> {
    let (mut rows, of_vectors) = (Vec::new(), VectorRows::of(&main.package.spec.item.vectors)?);
    for (segment, gone) in parts {
        let live = segment.index().filled_slots().filter(|slot: &Slot| !gone.contains(*slot));
        rows.extend(live.map(|slot| segment.item(assigner, &of_vectors, slot)));
    }
    rows.sort_unstable_by_key(|row: &Row| row.id);
    Segment::build(main, assigner, &rows.iter().collect::<Vec<&Row>>())
}
