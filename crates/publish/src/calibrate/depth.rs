//! How many candidates int8 rows or the codes of a first pass must select so that the true best are among them, and what that costs.
//!
//! For every query of the calibration all rows and codes are scanned, those of all items and those of shares of them, which tells the place
//! of each of the true best in their order: of all lists, so that a search of fewer, in which fewer come before it, loses no more.
//! What of the true best is not among so many selected is lost to a search besides what lies in lists that it does not probe, at
//! most.
//!
//! Which of the numbers, or int8 rows, takes the least time is reckoned from bytes: those of the lists that the recall takes, and
//! those of the rows that score what was selected.

use super::confidence::bounded;
use sterling_index::ivf::{self, Rates};

/// How many int8 rows select, for each that they usually do.
const INT8_FACTORS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
/// How many codes select for each of K.
const FACTORS: [f64; 15] = [1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 11.0, 16.0, 22.0, 32.0, 48.0, 64.0, 96.0];
/// Beyond so many codes do not pay: by int8 rows a quarter more than K are selected.
pub(super) const SELECTED_MAX: usize = 8192;
/// Items of a block.
const BLOCK: f64 = 16.0;

/// Shares of the items in which codes are measured; of fewer items rows are read one by one.
pub(super) const PASS_RATE_MIN: f64 = 0.1;

/// Of the true best K of queries among a share of the items, those that are found among the first of an order: by int8 rows, or by codes.
pub(super) struct Depths {
    /// Which of the pass rates.
    pub(super) share: usize,
    pub(super) k: usize,
    /// The numbers that may be selected, rising.
    selected: Vec<usize>,
    /// Of each of them; and the squares.
    hits: Vec<u64>,
    squares: Vec<u64>,
}

impl Depths {
    /// Of so many candidates of a share by codes; nothing was measured yet.
    pub(super) fn by_codes(share: usize, k: usize) -> Self {
        let selected = FACTORS.into_iter().map(|factor| (k as f64 * factor) as usize);
        Depths::of(share, k, selected.take_while(|n| *n <= SELECTED_MAX).collect())
    }

    /// Of so many candidates of a share by int8 rows, which usually select `usual`, and whose order is known up to `known`.
    pub(super) fn by_int8(share: usize, k: usize, (usual, known): (usize, usize)) -> Self {
        let selected = INT8_FACTORS.into_iter().map(|factor| usual * factor);
        Depths::of(share, k, selected.take_while(|n| *n <= known.max(usual)).collect())
    }

    fn of(share: usize, k: usize, selected: Vec<usize>) -> Self {
        let none = vec![0; selected.len()];
        Depths { share, k, selected, hits: none.clone(), squares: none }
    }

    /// Adds a query, of which the places of the true best are known in the order, none where they were not selected.
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

    /// What is lost by each number that may be selected: the mean, and what that is below with 95 % confidence.
    pub(super) fn lost(&self, queries: usize) -> impl Iterator<Item = (usize, f64, f64)> {
        self.selected.iter().enumerate().map(move |(n, &selected)| {
            let (mean, low) = bounded(self.hits[n], self.squares[n], queries, self.k);
            (selected, 1.0 - mean, 1.0 - low)
        })
    }
}

/// What was measured of the orders that are not those of the widest rows.
#[derive(Default)]
pub(super) struct AllDepths {
    /// By int8 rows; none where these are the widest.
    pub(super) int8: Vec<Depths>,
    /// By codes, in shares of many items; none without codes.
    pub(super) coded: Vec<Depths>,
}

impl AllDepths {
    pub(super) fn add(&mut self, other: &AllDepths) {
        self.int8.iter_mut().zip(&other.int8).for_each(|(sum, part)| sum.add(part));
        self.coded.iter_mut().zip(&other.coded).for_each(|(sum, part)| sum.add(part));
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
    /// Where so large a share of the items passes, of rows as an index has them in so many slots.
    pub(super) fn of(index: &ivf::Index, slots: usize, pass_rate: f64) -> Self {
        let items = slots as f64 / index.lists() as f64;
        // Blocks that hold any of them.
        let blocks = items / BLOCK * (1.0 - (1.0 - pass_rate).powf(BLOCK));
        let row_bytes = items * pass_rate * index.row_bytes() as f64;
        let int8_bytes = index.survivor_bytes(row_bytes as u64, (blocks * index.block_bytes() as f64) as u64);
        ScanTimes {
            int8_list: int8_bytes as f64 * Rates::INT8_BYTE_NS,
            codes_list: blocks * index.first_pass_block_bytes() as f64 * Rates::CODES_BYTE_NS,
            row: Rates::row_ns(index.row_bytes() as f64),
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
        let mut depths = Depths::by_codes(0, 10);
        // Of two queries one has its best in the first places and the other every tenth, of which the last was not selected.
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
        // No more are selected than pays.
        assert!(Depths::by_codes(0, 1000).lost(1).all(|(selected, ..)| selected <= SELECTED_MAX));
        assert_eq!(Depths::by_codes(0, 10_000).lost(1).count(), 0);
        let by_int8 = |known| Depths::by_int8(0, 10, (76, known)).lost(1).map(|lost| lost.0).collect::<Vec<_>>();
        assert_eq!([by_int8(10), by_int8(400)], [vec![76], vec![76, 152, 304]], "as far as the order is known");
    }
}
