//! Count-min sketch with conservative updates: counts of ids that have no row, in a fixed amount of memory.
//!
//! Cormode and Muthukrishnan 2005, *An improved data stream summary*; Estan and Varghese 2002 for the conservative update. An
//! estimate is at least the count, so no id is admitted later than its occurrences allow.

use super::extended;
use sterling_core::error::Result;
use sterling_core::random::splitmix64;

/// Counters per id.
const DEPTH: usize = 4;
/// Smallest number of counters per hash.
const WIDTH_MIN: u64 = 4096;

/// Counts of ids.
#[derive(Debug)]
pub(super) struct Sketch {
    /// Counters, `[DEPTH, width]`; a counter does not exceed 255.
    counters: Vec<u8>,
}

impl Sketch {
    /// Creates a sketch for the ids of a table of `rows` rows: 4 to 8 bytes per row.
    ///
    /// # Errors
    /// `Overloaded` if memory cannot be allocated.
    pub(super) fn new(rows: u64) -> Result<Self> {
        let width = rows.max(WIDTH_MIN).next_power_of_two() as usize;
        Ok(Sketch { counters: extended(&[], DEPTH * width, 0)? })
    }

    /// Counts an id once; returns the estimate of its count.
    pub(super) fn add(&mut self, id: i64) -> u8 {
        let width = self.counters.len() / DEPTH;
        let hash = splitmix64(id as u64);
        // All hashes are combined from the two halves of one hash (Kirsch and Mitzenmacher 2006).
        let (first, step) = (hash as u32, (hash >> 32) as u32 | 1);
        let at = |n: usize| n * width + first.wrapping_add(step.wrapping_mul(n as u32)) as usize % width;
        let least = (0..DEPTH).map(|n| self.counters[at(n)]).min().unwrap_or(0);
        let count = least.saturating_add(1);
        for n in 0..DEPTH {
            let counter = &mut self.counters[at(n)];
            *counter = (*counter).max(count);
        }
        count
    }

    /// Sets all counters to 0.
    pub(super) fn clear(&mut self) {
        self.counters.fill(0);
    }

    pub(super) fn counters(&self) -> &[u8] {
        &self.counters
    }

    pub(super) fn counters_mut(&mut self) -> &mut [u8] {
        &mut self.counters
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_are_at_least_the_counts_and_mostly_equal() {
        let mut sketch = Sketch::new(1000).expect("16 KiB");
        let mut over = 0;
        for round in 1..=3u8 {
            for id in 0..1000 {
                let estimate = sketch.add(id * 7919);
                assert!(estimate >= round);
                over += u32::from(estimate > round);
            }
        }
        assert!(over < 30, "{over}");
        (0..300).for_each(|_| assert!(sketch.add(5) > 0));
        assert_eq!(sketch.add(5), 255);
        sketch.clear();
        assert_eq!(sketch.add(5), 1);
    }
}
