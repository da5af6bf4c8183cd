//! Bags of ids, where their sums go, and the rows that are asked for ahead.

use std::ops::Range;

use super::rows::{RowFormat, Rows};
use crate::memory::prefetch_range;

/// How many ids ahead of the one being summed a row is asked for.
pub const PREFETCH_ROWS: usize = 32;

/// Bags of ids: bag `b` holds `ids[offsets[b] - offsets[0]..offsets[b + 1] - offsets[0]]`, so that a part of longer runs can
/// be given as it is. A negative id adds nothing.
#[derive(Clone, Copy, Debug)]
pub struct Bags<'a> {
    /// Row numbers of all bags.
    pub ids: &'a [i64],
    /// `[bags + 1]`, rising; the first one is where `ids` start.
    pub offsets: &'a [usize],
    /// One weight an id; none means 1.
    pub weights: Option<&'a [f32]>,
    /// Divide each sum by the length of its bag (negative ids count), as TorchRec's mean does.
    pub mean: bool,
}

/// Where the sums of the bags go: bag `b` to `data[b * stride + column ..]`.
#[derive(Debug)]
pub struct BagSums<'a> {
    /// `[bags, stride]`, of which the columns from `column` on are written.
    pub data: &'a mut [f32],
    /// Numbers from one bag's sum to the next bag's.
    pub stride: usize,
    /// The first column written.
    pub column: usize,
}

/// The columns that one run over the ids sums.
#[derive(Clone, Copy)]
pub(super) struct ColumnRun {
    pub(super) first: usize,
    pub(super) columns: usize,
}

impl ColumnRun {
    /// The bytes of these columns in a row.
    pub(super) fn span(self, format: RowFormat) -> Range<usize> {
        let at = |column: usize| format.head_bytes() + column * format.bits() / 8;
        let start = if self.first == 0 { 0 } else { at(self.first) };
        start..at(self.first + self.columns)
    }
}

impl Bags<'_> {
    /// The ids of bag `b`.
    #[inline]
    pub(super) fn range(&self, bag: usize) -> Range<usize> {
        self.offsets[bag] - self.offsets[0]..self.offsets[bag + 1] - self.offsets[0]
    }

    /// The weight of the id at `at`.
    ///
    /// # Safety
    /// `at` is below the number of ids, and weights are one an id.
    #[inline]
    pub(super) unsafe fn weight_unchecked(&self, at: usize) -> f32 {
        match self.weights {
            // SAFETY: the caller's condition.
            Some(weights) => unsafe { *weights.get_unchecked(at) },
            None => 1.0,
        }
    }
}

/// Asks the memory for the bytes `span` of the row of the id at `at`, where there is one.
#[inline]
pub(super) fn prefetch_row(rows: &Rows<'_>, ids: &[i64], at: usize, span: &Range<usize>) {
    let Some(&id) = ids.get(at) else { return };
    let row = rows.bytes.as_ptr().wrapping_add((id as usize).wrapping_mul(rows.row_bytes));
    prefetch_range(row.wrapping_add(span.start), span.len());
}

/// Asks for the rows that come before the look-ahead of the first id reaches anything.
pub(super) fn prefetch_first(rows: &Rows<'_>, bags: &Bags<'_>, span: &Range<usize>) {
    (0..PREFETCH_ROWS).for_each(|at| prefetch_row(rows, bags.ids, at, span));
}

/// What a bag's sum is multiplied by.
pub(super) fn bag_factor(bags: &Bags<'_>, bag: usize) -> f32 {
    let len = bags.range(bag).len();
    if bags.mean && len > 0 { 1.0 / len as f32 } else { 1.0 }
}
