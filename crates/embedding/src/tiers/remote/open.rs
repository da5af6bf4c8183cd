//! State of a set of rows that is open for reading: its identity, and the readability of its rows.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use arc_swap::ArcSwap;
use tokio::sync::Notify;

use super::layout::{ChunkLayout, RowPlace, RowSet, checked};
use super::manifest::TableManifest;
use sterling_core::locks::locked;

/// Maximum number of damaged chunks that are checked in every round; the rotation checks further damaged chunks.
const SUSPECTS_MAX: usize = 4096;

/// Reason why a row is unreadable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Cause {
    /// The deadline passed.
    Timeout,
    /// No node of the shard is available.
    Down,
    /// The node rejects the command.
    Refused,
    /// The chunk does not exist.
    Missing,
    /// The bytes differ from the loaded bytes: too short, changed, or of another load.
    Corrupt,
}

impl Cause {
    /// Returns the name in metrics and messages.
    pub(super) fn name(self) -> &'static str {
        match self {
            Cause::Timeout => "late",
            Cause::Down => "down",
            Cause::Refused => "refused",
            Cause::Missing => "missing",
            Cause::Corrupt => "corrupt",
        }
    }

    /// Returns true if the cluster answered and the row is lost.
    pub(super) fn is_lost(self) -> bool {
        matches!(self, Cause::Missing | Cause::Corrupt)
    }
}

/// Group and partition of a chunk.
pub(super) type ChunkPlace = (u64, u32);

/// A set of rows that is open for reading.
#[derive(Debug)]
pub(super) struct OpenSet {
    pub(super) named: RowSet,
    pub(super) layout: ChunkLayout,
    format: String,
    /// XXH3 of all rows.
    checksum: u64,
    /// Random number of the load, which seeds the checksums of the rows.
    load: AtomicU64,
    /// Chunks of which a row was missing or corrupt at the last read.
    suspects: Mutex<BTreeSet<ChunkPlace>>,
    /// Problems of the set, one per line.
    pub(super) troubles: ArcSwap<Vec<String>>,
    /// Number of rows that requests needed since the last check, and number of rows that requests did not get.
    requested: AtomicU64,
    degraded: AtomicU64,
    /// Unreadable fraction of the rows checked last, as the bits of an f64.
    unreadable: AtomicU64,
    /// Wakes the task that checks the set.
    pub(super) wake: Arc<Notify>,
}

impl OpenSet {
    pub(super) fn new(named: RowSet, manifest: &TableManifest) -> Self {
        OpenSet {
            layout: manifest.layout(&named),
            named,
            format: manifest.format.clone(),
            checksum: manifest.checksum,
            load: AtomicU64::new(manifest.load),
            suspects: Mutex::default(),
            troubles: ArcSwap::default(),
            requested: AtomicU64::new(0),
            degraded: AtomicU64::new(0),
            unreadable: AtomicU64::new(0),
            wake: Arc::default(),
        }
    }

    /// Returns the number of the load whose rows are accepted.
    pub(super) fn load(&self) -> u64 {
        self.load.load(Ordering::Relaxed)
    }

    /// Returns the bytes of row `row` if the answer holds this row undamaged.
    pub(super) fn accept<'a>(&self, row: u64, answer: &'a Result<Vec<u8>, Cause>) -> Result<&'a [u8], Cause> {
        let came = answer.as_ref().map_err(|cause| *cause)?;
        if came.is_empty() {
            return Err(Cause::Missing);
        }
        checked(self.load(), row, self.layout.row_bytes, came).ok_or(Cause::Corrupt)
    }

    /// Switches to another load of the same rows, made after the manifest was lost.
    pub(super) fn follow(&self, manifest: &TableManifest) {
        self.load.store(manifest.load, Ordering::Relaxed);
    }

    /// Returns whether a manifest describes the same rows at the same locations.
    pub(super) fn has_rows_of(&self, manifest: &TableManifest) -> bool {
        let layout = &self.layout;
        (manifest.rows, manifest.row_bytes, manifest.rows_per_chunk, manifest.partitions)
            == (layout.rows, layout.row_bytes, layout.rows_per_chunk, layout.partitions())
            && manifest.format == self.format
            && manifest.checksum == self.checksum
    }

    /// Records how many rows a request needed, and how many of these rows the request did not get.
    pub(super) fn served(&self, requested: u64, degraded: u64) {
        self.requested.fetch_add(requested, Ordering::Relaxed);
        self.degraded.fetch_add(degraded, Ordering::Relaxed);
    }

    /// Returns and resets the numbers of rows that requests needed and did not get.
    pub(super) fn take_served(&self) -> (u64, u64) {
        let degraded = self.degraded.swap(0, Ordering::Relaxed);
        (self.requested.swap(0, Ordering::Relaxed), degraded)
    }

    /// Records unreadable rows; `damaged` are the locations of missing or corrupt rows.
    pub(super) fn suspect(&self, damaged: impl Iterator<Item = RowPlace>) {
        let mut suspects = locked(&self.suspects);
        for place in damaged {
            if suspects.len() >= SUSPECTS_MAX {
                break;
            }
            suspects.insert((place.group, place.partition));
        }
        drop(suspects);
        self.wake.notify_one();
    }

    /// Returns the chunks to check in round `turn`: one per partition in rotation, so that every node is read, and the damaged
    /// chunks.
    pub(super) fn due(&self, turn: u64) -> Vec<ChunkPlace> {
        let layout = &self.layout;
        let mut due = locked(&self.suspects).clone();
        for partition in 0..layout.partitions() {
            let last = layout.groups() - 1;
            let groups = last + u64::from(layout.chunk_rows(last, partition) > 0);
            due.extend((groups > 0).then(|| (turn % groups, partition as u32)));
        }
        due.into_iter().collect()
    }

    /// Records the result of a check: the damaged chunks among the chunks `read`, and the unreadable fraction of the rows.
    pub(super) fn looked(&self, read: &[ChunkPlace], damaged: &BTreeSet<ChunkPlace>, unreadable: f64) {
        let mut suspects = locked(&self.suspects);
        read.iter().for_each(|chunk| {
            suspects.remove(chunk);
        });
        suspects.extend(damaged.iter().take(SUSPECTS_MAX));
        drop(suspects);
        self.unreadable.store(unreadable.to_bits(), Ordering::Relaxed);
    }

    /// Returns the unreadable fraction of the rows checked last.
    pub(super) fn unreadable(&self) -> f64 {
        f64::from_bits(self.unreadable.load(Ordering::Relaxed))
    }
}

impl Drop for OpenSet {
    fn drop(&mut self) {
        // Wakes the watch task so that it ends.
        self.wake.notify_one();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::layout::TableShape;
    use super::*;

    /// Two groups of four chunks of four rows; in the second group, two chunks have rows.
    fn set() -> OpenSet {
        let named = RowSet::new("m", "t", 1).unwrap();
        let shape = TableShape { rows: 18, row_bytes: 2, format: "f16".into() };
        let cut = TableManifest::begin(&shape, 9).unwrap();
        OpenSet::new(named, &TableManifest { rows_per_chunk: 4, partitions: 4, checksum: 5, ..cut })
    }

    #[test]
    fn polls_check_every_partition_and_recheck_damaged_chunks() {
        let set = set();
        let due = |turn| set.due(turn);
        assert_eq!(due(0), [(0, 0), (0, 1), (0, 2), (0, 3)]);
        assert_eq!(due(1), [(0, 2), (0, 3), (1, 0), (1, 1)], "reads the first group if the second has no rows");
        let place = set.layout.place(17);
        assert_eq!((place.group, place.partition), (1, 1));
        set.suspect([place].into_iter());
        assert_eq!(due(2), [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1)]);
        set.looked(&due(2), &[(1, 1), (0, 3)].into(), 0.25);
        assert_eq!((due(4).len(), set.unreadable()), (5, 0.25));
        assert_eq!(due(5), [(0, 2), (0, 3), (1, 0), (1, 1)], "each once");
        set.looked(&due(5), &BTreeSet::new(), 0.0);
        assert_eq!(due(6), due(0));
    }

    #[test]
    fn requests_are_counted_from_poll_to_poll() {
        let set = set();
        set.served(10, 0);
        set.served(5, 2);
        assert_eq!((set.take_served(), set.take_served()), ((15, 2), (0, 0)));
    }

    #[test]
    fn rows_are_accepted_by_load_number_and_failures_have_a_cause() {
        let set = set();
        let rows: Vec<u8> = (0..32).collect();
        let place = set.layout.place(6);
        let of = |load| -> Result<Vec<u8>, Cause> {
            let chunk = set.layout.encode(load, 0, place.partition as usize, &rows);
            Ok(chunk[place.offset..][..set.layout.stride()].to_vec())
        };
        assert_eq!(set.accept(6, &of(9)), Ok(&rows[12..14]));
        assert_eq!(set.accept(6, &of(8)), Err(Cause::Corrupt));
        assert_eq!(set.accept(6, &Ok(Vec::new())), Err(Cause::Missing));
        assert_eq!(set.accept(6, &Err(Cause::Refused)), Err(Cause::Refused));
        let shape = TableShape { rows: 18, row_bytes: 2, format: "f16".into() };
        let again =
            TableManifest { rows_per_chunk: 4, partitions: 4, checksum: 5, ..TableManifest::begin(&shape, 8).unwrap() };
        assert!(set.has_rows_of(&again) && !set.has_rows_of(&TableManifest { checksum: 6, ..again.clone() }));
        set.follow(&again);
        assert_eq!(set.accept(6, &of(8)), Ok(&rows[12..14]));
    }
}
