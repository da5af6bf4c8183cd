//! Estimates how often each item is among the positives of a batch, while events stream by.
//!
//! The mean gap `A` between an item's occurrences is a moving average; its probability in a batch of `B` events is
//! `B / A` (Yi et al. 2019, *Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations*, RecSys,
//! algorithm 2). The paper counts gaps in steps. Here they are counted in events, so that they stay valid if the batch
//! size changes. An item that never occurred is assumed to occur once in [`FIRST_GAP`] batches, so that its first
//! occurrence is not taken for a frequency of one per batch.

use sterling_core::error::{Error, Result};

/// Weight of the newest gap in the moving average, α in algorithm 2.
const NEWEST: f32 = 0.05;
/// Assumed mean gap of an item that has not occurred yet, in batches.
const FIRST_GAP: usize = 1000;

/// Mean gaps of all items, by item index.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Frequency {
    gaps: Vec<f32>,
    /// Number of events up to the item's last occurrence; 0 before the first.
    last: Vec<u64>,
    events: u64,
    first_gap: f32,
}

impl Frequency {
    /// Creates the estimate for `items` items that never occurred, in batches of `batch` events.
    pub(crate) fn new(items: usize, batch: usize) -> Self {
        let first_gap = (FIRST_GAP * batch) as f32;
        Frequency { gaps: vec![first_gap; items], last: vec![0; items], events: 0, first_gap }
    }

    /// Restores the mean gap and the last occurrence of an item.
    ///
    /// # Errors
    /// `Corrupt` if the values are impossible.
    pub(crate) fn restore(&mut self, item: u32, gap: f32, last: u64) -> Result<()> {
        if !(gap >= 1.0 && last <= self.events) {
            let what = format!(
                "frequency of an item: got gap {gap} and last event {last}, expected at least 1 and at most {}",
                self.events
            );
            return Err(Error::corrupt(what));
        }
        (self.gaps[item as usize], self.last[item as usize]) = (gap, last);
        Ok(())
    }

    /// Sets the number of counted events.
    pub(crate) fn set_events(&mut self, events: u64) {
        self.events = events;
    }

    pub(crate) fn gaps(&self) -> &[f32] {
        &self.gaps
    }

    pub(crate) fn last(&self) -> &[u64] {
        &self.last
    }

    pub(crate) fn events(&self) -> u64 {
        self.events
    }

    /// Counts the distinct items of a batch of `events` events.
    pub(crate) fn count(&mut self, distinct: &[u32], events: usize) {
        self.events += events as u64;
        for &item in distinct {
            let item = item as usize;
            let gap = match self.last[item] {
                0 => self.first_gap.min(self.events as f32),
                last => (self.events - last) as f32,
            };
            self.gaps[item] = (1.0 - NEWEST) * self.gaps[item] + NEWEST * gap;
            self.last[item] = self.events;
        }
    }

    /// Returns the log of the probability that an item is among the positives of a batch of `events` events.
    pub(crate) fn log_q(&self, item: u32, events: usize) -> f32 {
        (events as f32 / self.gaps[item as usize]).min(1.0).ln()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn estimated_gaps_converge_at_any_batch_size() {
        for batch in [1, 64, 256] {
            let mut frequency = Frequency::new(3, batch);
            for step in 0..2000u32 {
                let items = [(0, 1), (1, 7)].iter().filter(|(_, n)| step.is_multiple_of(*n));
                frequency.count(&items.map(|(item, _)| *item).collect::<Vec<_>>(), batch);
            }
            let q = |events: usize| [0, 1, 2].map(|item| frequency.log_q(item, events).exp());
            for (q, expected) in q(batch).into_iter().zip([1.0, 1.0 / 7.0, 0.001]) {
                assert!((q / expected - 1.0).abs() < 0.01, "{q}, expected {expected}");
            }
            assert!((q(2 * batch)[1] / q(batch)[1] - 2.0).abs() < 0.01);
            let mut again = Frequency::new(3, batch);
            again.set_events(frequency.events());
            for item in 0..3u32 {
                again.restore(item, frequency.gaps()[item as usize], frequency.last()[item as usize]).unwrap();
            }
            assert_eq!(again, frequency);
            assert!(again.restore(0, 0.5, 3).is_err() && again.restore(0, 2.0, again.events() + 1).is_err());
        }
    }
}
