//! Sets of rows of a table: which rows a checkpoint holds, and which item vectors are stale.

use sterling_core::error::{Error, Result};

/// Rows of one table, one bit per row.
#[derive(Debug)]
pub(crate) struct RowSet {
    words: Vec<u64>,
    count: usize,
}

impl RowSet {
    /// Creates an empty set of rows of a table of `rows` rows.
    ///
    /// # Errors
    /// `Overloaded` if memory cannot be allocated.
    pub(crate) fn new(rows: u64) -> Result<Self> {
        let (mut words, len) = (Vec::new(), rows.div_ceil(64) as usize);
        words.try_reserve_exact(len).map_err(|e| {
            Error::overloaded(format!("changed rows: cannot allocate {} bytes: {e}", len * 8)).caused_by(e)
        })?;
        words.resize(len, 0);
        Ok(RowSet { words, count: 0 })
    }

    /// Adds a row of the table.
    pub(crate) fn insert(&mut self, row: u32) {
        let (word, bit) = (&mut self.words[row as usize / 64], 1 << (row % 64));
        self.count += usize::from(*word & bit == 0);
        *word |= bit;
    }

    /// Returns whether the set has a row.
    pub(crate) fn contains(&self, row: u32) -> bool {
        self.words.get(row as usize / 64).is_some_and(|word| word & (1 << (row % 64)) != 0)
    }

    /// Returns the number of rows in the set.
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Returns the rows, ascending.
    pub(crate) fn rows(&self) -> Vec<u32> {
        let mut rows = Vec::with_capacity(self.count);
        for (first, word) in (0..).step_by(64).zip(&self.words) {
            let mut left = *word;
            while left != 0 {
                rows.push(first + left.trailing_zeros());
                left &= left - 1;
            }
        }
        rows
    }

    /// Removes all rows.
    pub(crate) fn clear(&mut self) {
        self.words.fill(0);
        self.count = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_what_was_inserted_once_and_in_order() {
        let mut set = RowSet::new(130).expect("three words");
        [129, 0, 64, 63, 64, 0].iter().for_each(|row| set.insert(*row));
        assert_eq!((set.rows(), set.len()), (vec![0, 63, 64, 129], 4));
        assert!(set.contains(129) && !set.contains(128) && !set.contains(1000));
        set.clear();
        assert_eq!((set.rows(), set.len()), (vec![], 0));
    }

    #[test]
    fn more_rows_than_memory_holds_are_an_error() {
        let error = RowSet::new(u64::MAX).expect_err("2^61 bytes");
        assert_eq!(error.kind(), sterling_core::error::Kind::Overloaded, "{error}");
    }
}
