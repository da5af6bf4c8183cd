//! A set of rows that is open for reading: what it is, and what is known of how it can be read.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use arc_swap::ArcSwap;
use tokio::sync::Notify;

use super::layout::{ChunkLayout, RowPlace, RowSet, checked};
use super::manifest::TableManifest;
use sterling_core::locks::locked;

/// Chunks that are looked at again and again until they can be read; more than these are found by chance.
const SUSPECTS_MAX: usize = 4096;

/// Why a row cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Cause {
    /// The deadline came first.
    Timeout,
    /// No node of the shard takes requests.
    Down,
    /// The node refuses the command.
    Refused,
    /// Its chunk is not there.
    Missing,
    /// Its bytes are not what was loaded: short, changed, or of another load.
    Corrupt,
}

impl Cause {
    /// As metrics and messages have it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Cause::Timeout => "late",
            Cause::Down => "down",
            Cause::Refused => "refused",
            Cause::Missing => "missing",
            Cause::Corrupt => "corrupt",
        }
    }

    /// True where the cluster answered and the row is lost.
    pub(super) fn is_lost(self) -> bool {
        matches!(self, Cause::Missing | Cause::Corrupt)
    }
}

/// The place of a chunk: its group and its partition.
pub(super) type ChunkPlace = (u64, u32);

/// A set of rows that is open for reading.
#[derive(Debug)]
pub(super) struct OpenSet {
    pub(super) named: RowSet,
    pub(super) layout: ChunkLayout,
    format: String,
    /// XXH3 of all rows.
    checksum: u64,
    /// The number of the load that seeds the checks of its rows.
    load: AtomicU64,
    /// Chunks of which a row was missing or corrupt when it was read last.
    suspects: Mutex<BTreeSet<ChunkPlace>>,
    /// What is wrong with it, a line each.
    pub(super) troubles: ArcSwap<Vec<String>>,
    /// Rows that requests asked for since the last look, and those that they did not get.
    asked: AtomicU64,
    degraded: AtomicU64,
    /// Share of the rows looked at last that could not be read, as the bits of an f64.
    unreadable: AtomicU64,
    /// Wakes who looks at it.
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
            asked: AtomicU64::new(0),
            degraded: AtomicU64::new(0),
            unreadable: AtomicU64::new(0),
            wake: Arc::default(),
        }
    }

    /// The number of the load whose rows are taken.
    pub(super) fn load(&self) -> u64 {
        self.load.load(Ordering::Relaxed)
    }

    /// The row's bytes, where an answer is that row.
    pub(super) fn accept<'a>(&self, row: u64, answer: &'a Result<Vec<u8>, Cause>) -> Result<&'a [u8], Cause> {
        let came = answer.as_ref().map_err(|cause| *cause)?;
        if came.is_empty() {
            return Err(Cause::Missing);
        }
        checked(self.load(), row, self.layout.row_bytes, came).ok_or(Cause::Corrupt)
    }

    /// Takes the rows of another load from now on: the same rows, which were loaded again after the manifest was lost.
    pub(super) fn follow(&self, manifest: &TableManifest) {
        self.load.store(manifest.load, Ordering::Relaxed);
    }

    /// Whether a manifest speaks of the same rows in the same places.
    pub(super) fn has_rows_of(&self, manifest: &TableManifest) -> bool {
        let layout = &self.layout;
        (manifest.rows, manifest.row_bytes, manifest.rows_per_chunk, manifest.partitions)
            == (layout.rows, layout.row_bytes, layout.rows_per_chunk, layout.partitions())
            && manifest.format == self.format
            && manifest.checksum == self.checksum
    }

    /// A request asked for rows and did not get some of them.
    pub(super) fn served(&self, asked: u64, degraded: u64) {
        self.asked.fetch_add(asked, Ordering::Relaxed);
        self.degraded.fetch_add(degraded, Ordering::Relaxed);
    }

    /// Rows that requests asked for since this was called last, and those that they did not get.
    pub(super) fn take_served(&self) -> (u64, u64) {
        let degraded = self.degraded.swap(0, Ordering::Relaxed);
        (self.asked.swap(0, Ordering::Relaxed), degraded)
    }

    /// Rows could not be read; `damaged` are the places of those that are missing or corrupt.
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

    /// The chunks that a look reads a row of: one of each partition, in turns, so that every node is asked, and those that were
    /// damaged.
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

    /// What a look found: `damaged` of the chunks that it read, and the share of the rows that could not be read.
    pub(super) fn looked(&self, read: &[ChunkPlace], damaged: &BTreeSet<ChunkPlace>, unreadable: f64) {
        let mut suspects = locked(&self.suspects);
        read.iter().for_each(|chunk| {
            suspects.remove(chunk);
        });
        suspects.extend(damaged.iter().take(SUSPECTS_MAX));
        drop(suspects);
        self.unreadable.store(unreadable.to_bits(), Ordering::Relaxed);
    }

    /// Share of the rows looked at last that could not be read.
    pub(super) fn unreadable(&self) -> f64 {
        f64::from_bits(self.unreadable.load(Ordering::Relaxed))
    }
}

impl Drop for OpenSet {
    fn drop(&mut self) {
        // Who looks at it finds that it is gone.
        self.wake.notify_one();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::layout::TableShape;
    use super::*;

    /// Two groups of four chunks of four rows, the second with rows in two of them.
    fn set() -> OpenSet {
        let named = RowSet::new("m", "t", 1).unwrap();
        let shape = TableShape { rows: 18, row_bytes: 2, format: "f16".into() };
        let cut = TableManifest::begin(&shape, 9).unwrap();
        OpenSet::new(named, &TableManifest { rows_per_chunk: 4, partitions: 4, checksum: 5, ..cut })
    }

    #[test]
    fn looks_ask_every_partition_and_come_back_to_damaged_chunks() {
        let set = set();
        let due = |turn| set.due(turn);
        assert_eq!(due(0), [(0, 0), (0, 1), (0, 2), (0, 3)]);
        assert_eq!(due(1), [(0, 2), (0, 3), (1, 0), (1, 1)], "where the second group has no rows the first is read");
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
    fn requests_are_counted_from_look_to_look() {
        let set = set();
        set.served(10, 0);
        set.served(5, 2);
        assert_eq!((set.take_served(), set.take_served()), ((15, 2), (0, 0)));
    }

    #[test]
    fn rows_are_accepted_and_followed_by_what_they_are() {
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
