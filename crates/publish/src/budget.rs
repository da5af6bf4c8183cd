//! Memory and disk space of a publication, planned before it begins: `publish --memory`.
//!
//! Vectors are by far the largest part of a catalogue. If the vectors fit, they stay in memory. Otherwise vectors stay in their
//! `.npy` file, or in an unnamed file next to the store's models, and are read in chunks: once for statistics, once for the
//! training sample, once for the assignment to lists, and once per bucket of slots that fits in memory (`sterling_index::ivf`). All
//! other steps are the same and produce the same bytes. Ids and columns are always in memory.
//!
//! The budget covers the program's own memory. Pages of files that the program has written and reads again (columns for the filter,
//! the index for the calibration) are mapped, and the system may reclaim them at any time.

use std::fmt;
use std::path::Path;

use sterling_core::error::{Error, Result};
use sterling_index::ivf::Sizes;
use sterling_kernels::memory;
use sterling_snapshot::model::{AskedPrecision, Package, WARMUP_FILE};
use sterling_storage::rows::Spill;

/// Bytes reserved for the program, its threads, and buffers of files.
const PROGRAM_BYTES: u64 = 96 << 20;
/// The safety margin of a bucket is its size divided by this number.
const SLACK: u64 = 64;
/// See [`Budget::bucket_bytes_min`].
const BUCKET_BYTES_MIN: u64 = 16 << 20;
/// Fraction of the free memory that a publication uses by default.
const FREE_SHARE: f64 = 0.75;
/// The budget divided by this number bounds vectors while they are read, since their buffer grows by doubling and copying.
const READING_SHARE: u64 = 4;
/// Minimum size of a version for which the free disk space is checked before it is written: if the disk is full,
/// writing a smaller version fails early enough.
const DISK_CHECKED_MIN: u64 = 64 << 20;
/// Usual maximum of bytes that the filter's planes and signatures take per value of an item.
const FILTER_BYTES_PER_VALUE: u64 = 14;
/// Bytes per value in a posting list.
const POSTING_BYTES: u64 = 4;

/// Memory budget of a publication.
#[derive(Clone, Copy, Debug)]
pub(super) struct Budget {
    pub(super) bytes: u64,
    /// True if the budget was configured, so that a publication that needs more memory is rejected.
    pub(super) is_bound: bool,
    /// Minimum bucket size: reading all vectors again for a smaller bucket does not pay off.
    pub(super) bucket_bytes_min: u64,
}

/// Memory plan of a publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Memory budget in bytes.
    pub memory_bytes: u64,
    /// Expected peak memory in bytes.
    pub peak_bytes: u64,
    /// Memory for vectors while they are sorted by slot; `None` if all vectors stay in memory.
    pub bucket_bytes: Option<u64>,
    /// Number of passes over the vectors.
    pub passes: u64,
    /// Bytes of the version's files.
    pub disk_bytes: u64,
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bucket_bytes {
            None => write!(f, "vectors in memory")?,
            Some(bytes) => {
                write!(f, "vectors on the disk, written in {} passes of {:.2} GiB", self.passes, gib(bytes))?;
            }
        }
        let (peak, memory, disk) = (gib(self.peak_bytes), gib(self.memory_bytes), gib(self.disk_bytes));
        write!(f, "; at most {peak:.2} GiB of {memory:.2}, and {disk:.2} GiB of disk for the version")
    }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

impl Budget {
    /// Returns the configured budget, or by default most of the free memory.
    pub(super) fn of(asked_bytes: Option<u64>) -> Self {
        let free = || (memory::available_bytes().unwrap_or(u64::MAX) as f64 * FREE_SHARE) as u64;
        Budget {
            bytes: asked_bytes.unwrap_or_else(free),
            is_bound: asked_bytes.is_some(),
            bucket_bytes_min: BUCKET_BYTES_MIN,
        }
    }

    /// Returns the spill settings for reading vectors: vectors beyond the budget go to a file in `folder`. Ids and columns may take
    /// half of a configured budget, since two copies exist while they are written.
    pub(super) fn spill(self, folder: &Path) -> Spill {
        let others = if self.is_bound { self.bytes / 2 } else { u64::MAX };
        Spill::new(self.bytes / READING_SHARE, folder).with_others(others)
    }

    /// Plans the steps after reading the items, for a catalogue and an index of these sizes.
    ///
    /// # Errors
    /// `NoSpace` if the configured budget does not suffice.
    pub(super) fn plan(self, package: Option<&Package>, of: CatalogueSizes, sizes: &Sizes) -> Result<MemoryPlan> {
        let need = Need::of(package, of, sizes);
        let in_memory = need.peak(0) + need.vectors;
        let fits = in_memory <= self.bytes;
        let room = self.bytes.saturating_sub(need.resident + need.writing).max(self.bucket_bytes_min);
        let passes = need.bucket.div_ceil(room).max(1);
        // Buckets have equal size plus a margin, since the number of slots is an estimate.
        let even = need.bucket.div_ceil(passes);
        let bucket_bytes = (even + even / SLACK).min(room);
        let plan = MemoryPlan {
            memory_bytes: self.bytes,
            peak_bytes: if fits { in_memory } else { need.peak(bucket_bytes) },
            bucket_bytes: (!fits).then_some(bucket_bytes),
            passes,
            disk_bytes: need.disk,
        };
        if self.is_bound && plan.peak_bytes > self.bytes {
            let (items, least, got) = (sizes.items, gib(need.peak(self.bucket_bytes_min)), gib(self.bytes));
            return Err(Error::no_space(format!(
                "memory: {items} items take at least {least:.3} GiB with their vectors on the disk, got {got:.3} GiB"
            )));
        }
        Ok(plan)
    }
}

/// Sizes of a catalogue, except those of its vectors.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CatalogueSizes {
    /// Number of columns.
    pub(super) columns: u64,
    /// Number of values in all columns.
    pub(super) values: u64,
    /// Bits of the filter's signature per item, for a list with average items.
    pub(super) bloom_bits: u64,
    /// Bytes of the columns.
    pub(super) column_bytes: u64,
    /// Bytes of the stored tensors per item.
    pub(super) kept_bytes: u64,
}

/// Needed bytes of memory, by purpose, and of the disk.
struct Need {
    /// Memory needed during the entire publication.
    resident: u64,
    /// All vectors.
    vectors: u64,
    /// Memory of all vectors in slot order.
    bucket: u64,
    /// Training sample with its training data; after training, the list of each item.
    training: u64,
    /// Slot order while the index is written, in addition to a bucket.
    writing: u64,
    /// Memory of columns, ids and filter in slot order.
    columns: u64,
    /// Memory of the last phase: the loaded version, if it answers requests before its publication (warm-up, choice of
    /// the precision), otherwise the calibration.
    answering: u64,
    disk: u64,
}

impl Need {
    fn of(package: Option<&Package>, held: CatalogueSizes, sizes: &Sizes) -> Self {
        let CatalogueSizes { columns, values, bloom_bits, column_bytes, kept_bytes } = held;
        let (items, lists, width) = (sizes.items as u64, sizes.lists as u64, sizes.dimension as u64);
        let (slots, row) = (sizes.slots() as u64, 4 * width);
        // A sampled row takes 32 more bytes for its number, order, list, list membership and the random quarter. Lists
        // count twice.
        let trained = sizes.sample as u64 * (row + 32) + lists * (3 * row + 64);
        let likeness = 8 * items + 16 * values;
        let table = 4 * (2 * items.max(1)).next_power_of_two();
        let written = 8 * slots + table + 8 * values + 4 * slots * columns + column_bytes;
        // If few items have many values, signatures are wider than the values suggest.
        let filter = (FILTER_BYTES_PER_VALUE * values).max(slots * bloom_bits / 8 + POSTING_BYTES * values);
        let disk = sizes.bytes() + written + filter + kept_bytes;
        let is_asked = package.is_some_and(|package| {
            package.spec.precision == AskedPrecision::Auto || package.folder().join(WARMUP_FILE).exists()
        });
        Need {
            resident: PROGRAM_BYTES + 8 * items + column_bytes + kept_bytes,
            vectors: items * row,
            bucket: slots * row,
            training: trained.max(lists * 3 * row + 8 * items + 4 * slots) + likeness,
            writing: 4 * (slots + items),
            columns: 4 * slots + written.max(filter + 16 * values) + kept_bytes,
            answering: 4 * slots + if is_asked { disk } else { 12 * slots },
            disk,
        }
    }

    /// Returns the peak memory if a bucket takes `bucket` bytes.
    fn peak(&self, bucket: u64) -> u64 {
        let phases = [self.training, self.writing + bucket, self.columns, self.answering];
        self.resident + phases.into_iter().max().unwrap_or(0)
    }
}

/// Rejects a large version before training if the disk of `folder` has too little space.
///
/// # Errors
/// `NoSpace` with the required and the free bytes.
pub(super) fn check_disk(folder: &Path, bytes: u64) -> Result<()> {
    let Some(there) = folder.ancestors().find(|folder| folder.exists()) else { return Ok(()) };
    let Ok(disk) = rustix::fs::statvfs(there) else { return Ok(()) };
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if bytes > free.max(DISK_CHECKED_MIN) {
        let (need, free) = (gib(bytes), gib(free));
        let at = folder.display();
        return Err(Error::no_space(format!("{at}: the version takes about {need:.3} GiB, {free:.3} are free")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use sterling_core::error::Kind;
    use sterling_index::ivf::{Options, RowSurvey};
    use sterling_storage::rows::RowStore;

    fn sizes(items: usize, dimension: usize) -> Sizes {
        let rows = RowStore::owned(vec![1.0; items * dimension], dimension).unwrap();
        Sizes::of(&RowSurvey::of(&rows).unwrap(), &Options::default()).unwrap()
    }

    fn plan(megabytes: u64, of: CatalogueSizes, sizes: &Sizes) -> Result<MemoryPlan> {
        let budget = Budget { bytes: megabytes << 20, is_bound: true, bucket_bytes_min: BUCKET_BYTES_MIN };
        budget.plan(None, of, sizes)
    }

    #[test]
    fn less_memory_takes_more_passes_down_to_a_minimum() {
        let sizes = sizes(1 << 18, 64);
        let held =
            CatalogueSizes { columns: 2, values: 1 << 19, bloom_bits: 24, column_bytes: 6 << 20, kept_bytes: 1 << 20 };
        let mut passes = 0;
        let mut refused = false;
        for megabytes in (1..400).rev() {
            match plan(megabytes, held, &sizes) {
                Ok(plan) => {
                    assert!(!refused && plan.peak_bytes <= megabytes << 20, "{plan}");
                    assert!(plan.bucket_bytes.is_none() || plan.passes >= passes, "{megabytes} MiB: {plan}");
                    assert!(plan.bucket_bytes.is_some() || passes == 0, "{megabytes} MiB: {plan}");
                    passes = if plan.bucket_bytes.is_some() { plan.passes } else { 0 };
                }
                Err(e) => {
                    refused = true;
                    assert_eq!(e.kind(), Kind::NoSpace);
                    assert!(e.to_string().contains("262144 items take at least 0."), "{e}");
                }
            }
        }
        assert!(refused && passes >= 2, "{passes}");
        // Without a configured budget this is a plan, and no limit.
        let budget = Budget { bytes: 1, is_bound: false, bucket_bytes_min: BUCKET_BYTES_MIN };
        assert!(budget.plan(None, held, &sizes).unwrap().peak_bytes > 1);
    }

    #[test]
    fn wide_signatures_are_planned_for() {
        let sizes = sizes(1 << 16, 4);
        let held = CatalogueSizes { columns: 1, values: 1 << 17, ..CatalogueSizes::default() };
        let bytes = |held| plan(400, held, &sizes).unwrap().disk_bytes;
        let more = bytes(CatalogueSizes { bloom_bits: 4000, ..held }) - bytes(held);
        // There are somewhat more slots than items.
        assert!(((500 - 28) << 16..560 << 16).contains(&more), "{more}");
        assert_eq!(bytes(CatalogueSizes { bloom_bits: 24, ..held }), bytes(held));
    }

    #[test]
    fn a_full_disk_is_reported_before_the_work() {
        let folder = tempfile::tempdir().unwrap();
        let there = folder.path().join("no/such/store");
        check_disk(&there, 1).unwrap();
        let error = check_disk(&there, u64::MAX).unwrap_err();
        assert_eq!(error.kind(), Kind::NoSpace);
        assert!(error.to_string().contains("no/such/store: the version takes about"), "{error}");
    }
}
