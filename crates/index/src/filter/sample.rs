//! Sample of a filter: estimates how many items pass the filter bitmap, and how many of those pass the filter.
//!
//! Counts of terms do not show correlations: two terms with half of the items each may have all items in common or none. The
//! cost of a search depends on correlations, so planning evaluates a few evenly spaced lists. The sample never affects
//! results.

use std::ops::RangeInclusive;

use super::index::Index;
use super::program::Program;
use crate::columns::{Columns, bits};
use sterling_core::units::{ListId, Slot};

/// Minimum and maximum number of sampled lists; between them, `ITEMS_ENOUGH` items or `NS_ENOUGH` nanoseconds suffice.
const LISTS: RangeInclusive<usize> = 4..=64;
const ITEMS_ENOUGH: f64 = 4096.0;
const NS_ENOUGH: f64 = 5000.0;
/// Minimum and maximum number of items from the bitmaps that are verified; between them, `NS_ENOUGH` limits the cost.
const VERIFIED_ITEMS: RangeInclusive<usize> = 4..=32;
/// If at least this number was expected to pass and none does, the tests of the filter are taken to exclude each other.
const EXPECTED_MIN: f64 = 8.0;

/// Estimated shares that pass a filter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PassingShares {
    /// Share of the items that pass.
    pub items: f64,
    /// Share of the lists that hold passing items.
    pub lists: f64,
}

/// Counts over the sampled lists.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sample {
    lists: usize,
    lists_passing: usize,
    items: usize,
    passing: usize,
    requested: usize,
    holding: usize,
}

impl Sample {
    /// Evaluates a program on some lists and verifies some of the passing items. `passes` is the test and its cost in
    /// nanoseconds; `None` if bitmaps are exact.
    pub(super) fn of(
        program: &Program,
        columns: &Columns,
        index: &Index,
        passes: Option<(&dyn Fn(Slot) -> bool, f64)>,
    ) -> Self {
        let items_a_list = (index.items() as f64 / index.lists().max(1) as f64).max(1.0);
        let items = ITEMS_ENOUGH.min(NS_ENOUGH / program.item_ns().max(f64::MIN_POSITIVE));
        let lists = ((items / items_a_list) as usize).clamp(*LISTS.start(), *LISTS.end()).min(index.lists());
        let (mut sample, mut stack, mut maybes) = (Sample::default(), Vec::new(), Vec::new());
        for n in 0..lists {
            // The sampled list is in the middle of one of `lists` equal intervals.
            let list = (2 * n + 1) * index.lists() / (2 * lists);
            program.run(columns, index, list..list + 1, &mut stack);
            let list = ListId(list as u32);
            let words = &stack[..index.words(list)];
            let passing = words.iter().map(|word| word.count_ones() as usize).sum::<usize>();
            sample.lists += 1;
            sample.lists_passing += usize::from(passing > 0);
            sample.items += index.length(list);
            sample.passing += passing;
            if passes.is_some() {
                let bits = words.iter().zip(0..).flat_map(|(word, n)| bits(*word).map(move |bit| n * 64 + bit));
                let room = (ITEMS_ENOUGH as usize).saturating_sub(maybes.len());
                maybes.extend(bits.take(room).map(|bit| Slot(index.first_slot(list) + bit)));
            }
        }
        if let Some((passes, ns)) = passes {
            let most = ((NS_ENOUGH / ns.max(1.0)) as usize).clamp(*VERIFIED_ITEMS.start(), *VERIFIED_ITEMS.end());
            for slot in maybes.iter().step_by(maybes.len().div_ceil(most).max(1)) {
                sample.requested += 1;
                sample.holding += usize::from(passes(*slot));
            }
        }
        sample
    }

    /// Returns the shares that pass; `expected`, from term counts, is used if the sample is too small.
    pub(super) fn passing(&self, expected: f64, items_a_list: f64) -> PassingShares {
        if self.passing == 0 && expected * (self.items as f64) < EXPECTED_MIN {
            return PassingShares { items: expected, lists: 1.0 - (1.0 - expected).powf(items_a_list) };
        }
        let share = |part: usize, of: usize| part as f64 / of.max(1) as f64;
        PassingShares { items: share(self.passing, self.items), lists: share(self.lists_passing, self.lists) }
    }

    /// Returns the share of the items in the bitmaps that satisfy the filter; 1 if no item was verified.
    pub(super) fn holding(&self) -> f64 {
        if self.requested == 0 { 1.0 } else { self.holding as f64 / self.requested as f64 }
    }

    /// Returns the number of items verified one by one.
    pub(super) fn requested(&self) -> usize {
        self.requested
    }

    /// Returns the number of items whose bitmaps were evaluated.
    pub(super) fn items(&self) -> usize {
        self.items
    }
}
