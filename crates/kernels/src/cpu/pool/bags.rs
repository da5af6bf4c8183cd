//! Bags of ids, the output for their sums, and prefetches of rows.

use std::ops::Range;

use super::rows::{RowFormat, Rows};
use crate::memory::prefetch_range;

/// Prefetch distance in ids.
pub const PREFETCH_ROWS: usize = 32;

/// Bags of ids: bag `b` holds `ids[offsets[b] - offsets[0]..offsets[b + 1] - offsets[0]]`, so a slice of longer arrays needs no
/// rewritten offsets. A negative id adds nothing.
#[derive(Clone, Copy, Debug)]
pub struct Bags<'a> {
    /// Row indices of all bags.
    pub ids: &'a [i64],
    /// `[bags + 1]`, nondecreasing; the first offset is that of the start of `ids`.
    pub offsets: &'a [usize],
    /// One weight per id; `None` means 1.
    pub weights: Option<&'a [f32]>,
    /// Divides each sum by the length of its bag (negative ids count), like TorchRec's mean pooling.
    pub mean: bool,
}

/// Output of the sums: bag `b` is written to `data[b * stride + column ..]`.
#[derive(Debug)]
pub struct BagSums<'a> {
    /// `[bags, stride]`; the columns from `column` on are written.
    pub data: &'a mut [f32],
    /// Distance in numbers between the sums of two bags.
    pub stride: usize,
    /// First column written.
    pub column: usize,
}

/// Columns that one iteration over the ids sums.
#[derive(Clone, Copy)]
pub(super) struct ColumnRun {
    pub(super) first: usize,
    pub(super) columns: usize,
}

impl ColumnRun {
    /// Returns the byte range of the columns in a row.
    pub(super) fn span(self, format: RowFormat) -> Range<usize> {
        let at = |column: usize| format.head_bytes() + column * format.bits() / 8;
        let start = if self.first == 0 { 0 } else { at(self.first) };
        start..at(self.first + self.columns)
    }
}

impl Bags<'_> {
    /// Returns the range of bag `b` in `ids`.
    #[inline]
    pub(super) fn range(&self, bag: usize) -> Range<usize> {
        self.offsets[bag] - self.offsets[0]..self.offsets[bag + 1] - self.offsets[0]
    }

    /// Returns the weight of the id with index `at`.
    ///
    /// # Safety
    /// `at` is below the number of ids, and there is one weight per id.
    #[inline]
    pub(super) unsafe fn weight_unchecked(&self, at: usize) -> f32 {
        match self.weights {
            // SAFETY: this function's `# Safety` conditions hold.
            Some(weights) => unsafe { *weights.get_unchecked(at) },
            None => 1.0,
        }
    }
}

/// Prefetches the bytes `span` of the row of the id with index `at`, if it exists.
#[inline]
pub(super) fn prefetch_row(rows: &Rows<'_>, ids: &[i64], at: usize, span: &Range<usize>) {
    let Some(&id) = ids.get(at) else { return };
    let row = rows.bytes.as_ptr().wrapping_add((id as usize).wrapping_mul(rows.row_bytes));
    prefetch_range(row.wrapping_add(span.start), span.len());
}

/// Prefetches the rows of the first ids; the loop over all ids prefetches only rows from the prefetch distance on.
pub(super) fn prefetch_first(rows: &Rows<'_>, bags: &Bags<'_>, span: &Range<usize>) {
    (0..PREFETCH_ROWS).for_each(|at| prefetch_row(rows, bags.ids, at, span));
}

/// Returns the factor of a bag's sum: 1, or for means 1 / length.
pub(super) fn bag_factor(bags: &Bags<'_>, bag: usize) -> f32 {
    let len = bags.range(bag).len();
    if bags.mean && len > 0 { 1.0 / len as f32 } else { 1.0 }
}
