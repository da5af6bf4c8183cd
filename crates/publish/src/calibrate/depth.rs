//! Selection depth: the number of candidates that int8 rows or first-pass codes must select to include the true best items, and the
//! cost of that number.
//!
//! Each calibration query scans all rows and codes, for all items and for sampled fractions of the items. These scans give the rank
//! of each true best item by int8 rows and by codes. The ranks are over all lists; a search of fewer lists has fewer items ahead of
//! the true best, so it loses no more of them. Selecting too few candidates therefore costs at most this loss, in addition to the
//! loss from lists that are not probed.
//!
//! The cheapest choice is estimated from the bytes to read: the bytes of the probed lists, and of the rows that score the selected
//! candidates.

use super::confidence::bounded;
use sterling_index::ivf::{self, Rates};

/// Measured numbers of int8 candidates, as multiples of the usual number.
const INT8_FACTORS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
/// Measured numbers of candidates by codes, as multiples of K.
const FACTORS: [f64; 15] = [1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 11.0, 16.0, 22.0, 32.0, 48.0, 64.0, 96.0];
/// Maximum number of candidates selected by codes. Beyond it codes do not pay off, since int8 rows need only 1.25 K candidates.
pub(super) const SELECTED_MAX: usize = 8192;
/// Number of items per block of a list.
const BLOCK: f64 = 16.0;

/// Minimum pass rate at which codes are measured; at lower pass rates rows are read individually.
pub(super) const PASS_RATE_MIN: f64 = 0.1;

/// Recall of candidate selection by int8 rows or by codes, per number of selected candidates: hits among the true best K of the
/// items at one pass rate.
pub(super) struct Depths {
    /// Index of the pass rate.
    pub(super) share: usize,
    pub(super) k: usize,
    /// Numbers of candidates at which recall is measured, ascending.
    selected: Vec<usize>,
    /// Hits per number of candidates, summed over queries; the next field sums their squares.
    hits: Vec<u64>,
    squares: Vec<u64>,
}

impl Depths {
    /// Starts a measurement of codes at the pass rate with this index.
    pub(super) fn by_codes(share: usize, k: usize) -> Self {
        let selected = FACTORS.into_iter().map(|factor| (k as f64 * factor) as usize);
        Depths::of(share, k, selected.take_while(|n| *n <= SELECTED_MAX).collect())
    }

    /// Starts a measurement of int8 rows at the pass rate with this index; int8 rows usually select `usual` candidates, and ranks
    /// are known up to `known`.
    pub(super) fn by_int8(share: usize, k: usize, (usual, known): (usize, usize)) -> Self {
        let selected = INT8_FACTORS.into_iter().map(|factor| usual * factor);
        Depths::of(share, k, selected.take_while(|n| *n <= known.max(usual)).collect())
    }

    fn of(share: usize, k: usize, selected: Vec<usize>) -> Self {
        let none = vec![0; selected.len()];
        Depths { share, k, selected, hits: none.clone(), squares: none }
    }

    /// Adds a query, given the ranks of its true best items; the rank is `None` for an item that was not selected.
    pub(super) fn place(&mut self, places: &[Option<u32>]) {
        let best = &places[..self.k.min(places.len())];
        for (n, &selected) in self.selected.iter().enumerate() {
            let hits = best.iter().flatten().filter(|place| (**place as usize) < selected).count() as u64;
            self.hits[n] += hits;
            self.squares[n] += hits * hits;
        }
    }

    pub(super) fn add(&mut self, other: &Depths) {
        self.hits.iter_mut().zip(&other.hits).for_each(|(sum, n)| *sum += n);
        self.squares.iter_mut().zip(&other.squares).for_each(|(sum, n)| *sum += n);
    }

    /// Returns the loss for each number of candidates: the mean over queries, and the mean's upper bound with 95 % confidence.
    pub(super) fn lost(&self, queries: usize) -> impl Iterator<Item = (usize, f64, f64)> {
        self.selected.iter().enumerate().map(move |(n, &selected)| {
            let (mean, low) = bounded(self.hits[n], self.squares[n], queries, self.k);
            (selected, 1.0 - mean, 1.0 - low)
        })
    }
}

/// Recall of selection by int8 rows and by codes, per pass rate and K.
#[derive(Default)]
pub(super) struct AllDepths {
    /// Measurements of int8 rows; empty if int8 rows are the most precise rows.
    pub(super) int8: Vec<Depths>,
    /// Measurements of codes, at high pass rates only; empty without codes.
    pub(super) coded: Vec<Depths>,
}

impl AllDepths {
    pub(super) fn add(&mut self, other: &AllDepths) {
        self.int8.iter_mut().zip(&other.int8).for_each(|(sum, part)| sum.add(part));
        self.coded.iter_mut().zip(&other.coded).for_each(|(sum, part)| sum.add(part));
    }
}

/// Estimated search times in nanoseconds.
#[derive(Clone, Copy)]
pub(super) struct ScanTimes {
    /// Time to scan an average list by int8 rows; the next field is the time by codes.
    int8_list: f64,
    codes_list: f64,
    row: f64,
}

impl ScanTimes {
    /// Estimates the times for a pass rate and an index with the given number of slots.
    pub(super) fn of(index: &ivf::Index, slots: usize, pass_rate: f64) -> Self {
        let items = slots as f64 / index.lists() as f64;
        // Number of blocks with at least one item that passes the filter.
        let blocks = items / BLOCK * (1.0 - (1.0 - pass_rate).powf(BLOCK));
        let row_bytes = items * pass_rate * index.row_bytes() as f64;
        let int8_bytes = index.survivor_bytes(row_bytes as u64, (blocks * index.block_bytes() as f64) as u64);
        ScanTimes {
            int8_list: int8_bytes as f64 * Rates::INT8_BYTE_NS,
            codes_list: blocks * index.first_pass_block_bytes() as f64 * Rates::CODES_BYTE_NS,
            row: Rates::row_ns(index.row_bytes() as f64),
        }
    }

    /// Returns the time of a search with int8 rows, by numbers of probed lists and selected candidates.
    pub(super) fn by_rows(&self, probes: usize, selected: usize) -> f64 {
        probes as f64 * self.int8_list + selected as f64 * self.row
    }

    /// Returns the time of a search with first-pass codes, by numbers of probed lists and selected candidates.
    pub(super) fn by_codes(&self, probes: usize, selected: usize) -> f64 {
        probes as f64 * self.codes_list + selected as f64 * self.row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_give_the_loss_of_each_selection_size() {
        let mut depths = Depths::by_codes(0, 10);
        // One query has its best in the first ranks; the other has them at every tenth rank, of which the last was not selected.
        let first: Vec<Option<u32>> = (0..10).map(Some).collect();
        let tenth: Vec<Option<u32>> = (0..10).map(|n| (n < 9).then_some(n * 10)).collect();
        let mut other = Depths::by_codes(0, 10);
        depths.place(&first);
        other.place(&tenth);
        depths.add(&other);
        let lost: Vec<(usize, f64)> =
            depths.lost(2).map(|(selected, mean, _)| (selected, (mean * 20.0).round())).collect();
        let numbers = [15, 20, 25, 30, 40, 50, 60, 80, 110, 160, 220, 320, 480, 640, 960];
        let expected = [8.0, 8.0, 7.0, 7.0, 6.0, 5.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
        assert_eq!(lost, numbers.into_iter().zip(expected).collect::<Vec<_>>());
        assert!(depths.lost(2).all(|(_, mean, most)| mean <= most && most <= 1.0));
        // Numbers of candidates that do not pay off are not measured.
        assert!(Depths::by_codes(0, 1000).lost(1).all(|(selected, ..)| selected <= SELECTED_MAX));
        assert_eq!(Depths::by_codes(0, 10_000).lost(1).count(), 0);
        let by_int8 = |known| Depths::by_int8(0, 10, (76, known)).lost(1).map(|lost| lost.0).collect::<Vec<_>>();
        assert_eq!([by_int8(10), by_int8(400)], [vec![76], vec![76, 152, 304]], "as far as the order is known");
    }
}
