//! How many candidates the codes of a first pass must select so that the true best are among them, and whether that pays.
//!
//! For every query of the calibration all codes are scanned, which tells the place of each of the true best in their order: of all
//! items, so that a search of fewer lists, in which fewer come before it, loses no more. What of the true best is not among so
//! many selected is lost to a search besides what lies in lists that it does not probe, at most.
//!
//! Which of the numbers, or int8 rows, takes the least time is reckoned from bytes: those of the lists that the recall takes, and
//! those of the rows that score what was selected.

use super::confidence::bounded;
use crate::ivf;

/// How many are selected for each of K.
const FACTORS: [f64; 12] = [1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 11.0, 16.0, 22.0, 32.0];
/// Beyond so many codes do not pay: by int8 rows a quarter more than K are selected.
pub(super) const SELECTED_MAX: usize = 8192;
/// Nanoseconds of a byte that a scan reads, of int8 rows and of codes, and of a row that is read by itself: measured
/// (`docs/INDEX.md`).
const INT8_NS_A_BYTE: f64 = 0.045;
const CODES_NS_A_BYTE: f64 = 0.06;
const ROW_NS: f64 = 24.0;
const ROW_NS_A_BYTE: f64 = 0.06;

/// Codes are taken where they take at most this share of the time of int8 rows: machines differ in their rates.
pub(super) const CLEARLY: f64 = 0.8;

/// Of the true best K of queries, those that are found among so many of the best by codes.
pub(super) struct Depths {
    pub(super) k: usize,
    /// Of each number that may be selected; and the squares.
    hits: Vec<u64>,
    squares: Vec<u64>,
}

impl Depths {
    /// Of so many candidates; nothing was measured yet.
    pub(super) fn of(k: usize) -> Self {
        let mut empty = Depths { k, hits: Vec::new(), squares: Vec::new() };
        let count = empty.selected().count();
        (empty.hits, empty.squares) = (vec![0; count], vec![0; count]);
        empty
    }

    /// The numbers that may be selected, rising.
    fn selected(&self) -> impl Iterator<Item = usize> + use<> {
        let k = self.k;
        FACTORS.into_iter().map(move |factor| (k as f64 * factor) as usize).take_while(|n| *n <= SELECTED_MAX)
    }

    /// Adds a query, of which the places of the true best are known in the order by codes, none where they were not selected.
    pub(super) fn place(&mut self, places: &[Option<u32>]) {
        let best = &places[..self.k.min(places.len())];
        for (n, selected) in self.selected().enumerate() {
            let hits = best.iter().flatten().filter(|place| (**place as usize) < selected).count() as u64;
            self.hits[n] += hits;
            self.squares[n] += hits * hits;
        }
    }

    pub(super) fn add(&mut self, other: &Depths) {
        self.hits.iter_mut().zip(&other.hits).for_each(|(sum, n)| *sum += n);
        self.squares.iter_mut().zip(&other.squares).for_each(|(sum, n)| *sum += n);
    }

    /// What is lost by each number that may be selected: the mean, and what that is below with 95 % confidence.
    pub(super) fn lost(&self, queries: usize) -> impl Iterator<Item = (usize, f64, f64)> {
        self.selected().enumerate().map(move |(n, selected)| {
            let (mean, low) = bounded(self.hits[n], self.squares[n], queries, self.k);
            (selected, 1.0 - mean, 1.0 - low)
        })
    }
}

/// What searches take, in nanoseconds.
#[derive(Clone, Copy)]
pub(super) struct ScanTimes {
    /// Of the items of a list on average, by int8 rows and by codes.
    int8_list: f64,
    codes_list: f64,
    row: f64,
}

impl ScanTimes {
    pub(super) fn of(index: &ivf::Index) -> Self {
        let blocks = index.slots() as f64 / 16.0 / index.lists() as f64;
        ScanTimes {
            int8_list: blocks * index.block_bytes() as f64 * INT8_NS_A_BYTE,
            codes_list: blocks * index.first_pass_block_bytes() as f64 * CODES_NS_A_BYTE,
            row: ROW_NS + index.row_bytes() as f64 * ROW_NS_A_BYTE,
        }
    }

    /// Of a search of so many lists by int8 rows, which selects so many.
    pub(super) fn by_rows(&self, probes: usize, selected: usize) -> f64 {
        probes as f64 * self.int8_list + selected as f64 * self.row
    }

    /// Of one by codes, which selects so many.
    pub(super) fn by_codes(&self, probes: usize, selected: usize) -> f64 {
        probes as f64 * self.codes_list + selected as f64 * self.row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_tell_what_each_number_loses() {
        let mut depths = Depths::of(10);
        // Of two queries one has its best in the first places and the other every tenth, of which the last was not selected.
        let first: Vec<Option<u32>> = (0..10).map(Some).collect();
        let tenth: Vec<Option<u32>> = (0..10).map(|n| (n < 9).then_some(n * 10)).collect();
        let mut other = Depths::of(10);
        depths.place(&first);
        other.place(&tenth);
        depths.add(&other);
        let lost: Vec<(usize, f64)> =
            depths.lost(2).map(|(selected, mean, _)| (selected, (mean * 20.0).round())).collect();
        let numbers = [15, 20, 25, 30, 40, 50, 60, 80, 110, 160, 220, 320];
        let expected = [8.0, 8.0, 7.0, 7.0, 6.0, 5.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0];
        assert_eq!(lost, numbers.into_iter().zip(expected).collect::<Vec<_>>());
        assert!(depths.lost(2).all(|(_, mean, most)| mean <= most && most <= 1.0));
        // No more are selected than pays.
        assert!(Depths::of(1000).lost(1).all(|(selected, ..)| selected <= SELECTED_MAX));
        assert_eq!(Depths::of(10_000).lost(1).count(), 0);
    }
}
