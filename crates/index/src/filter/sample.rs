//! What some lists say of a filter: how many items its words let through, and how many of these it holds for.
//!
//! Counts of terms tell nothing of how they go together: two halves may share all of their items or none. What a search will
//! look at depends on it, so a few lists, spread over all, are evaluated when the filter is planned. They rule no answer.

use std::ops::RangeInclusive;

use super::index::Index;
use super::program::Program;
use crate::columns::{Columns, bits};
use sterling_core::units::{ListId, Slot};

/// Lists that are looked at; no more of them than hold so many items, or take so many nanoseconds.
const LISTS: RangeInclusive<usize> = 4..=64;
const ITEMS_ENOUGH: f64 = 4096.0;
const NS_ENOUGH: f64 = 5000.0;
/// Items that seem to pass of which each is asked, and the nanoseconds after which fewer do.
const ASKED: RangeInclusive<usize> = 4..=32;
/// Where so many were expected to pass and none does, the filter contradicts itself.
const EXPECTED_MIN: f64 = 8.0;

/// What passes, as shares of a catalogue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PassingShares {
    /// Of the items.
    pub items: f64,
    /// Of the lists: those that hold such items.
    pub lists: f64,
}

/// Counts over some lists.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sample {
    lists: usize,
    lists_passing: usize,
    items: usize,
    passing: usize,
    asked: usize,
    holding: usize,
}

impl Sample {
    /// Evaluates a program on some lists, and asks some of the items that seem to pass whether they do; `None` where words are
    /// the truth. To ask one takes so many nanoseconds.
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
            // The middle of each of so many equal parts.
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
            let most = ((NS_ENOUGH / ns.max(1.0)) as usize).clamp(*ASKED.start(), *ASKED.end());
            for slot in maybes.iter().step_by(maybes.len().div_ceil(most).max(1)) {
                sample.asked += 1;
                sample.holding += usize::from(passes(*slot));
            }
        }
        sample
    }

    /// What passes, where counts of terms let such a share of all items expect, and lists hold so many.
    pub(super) fn passing(&self, expected: f64, items_a_list: f64) -> PassingShares {
        if self.passing == 0 && expected * (self.items as f64) < EXPECTED_MIN {
            return PassingShares { items: expected, lists: 1.0 - (1.0 - expected).powf(items_a_list) };
        }
        let share = |part: usize, of: usize| part as f64 / of.max(1) as f64;
        PassingShares { items: share(self.passing, self.items), lists: share(self.lists_passing, self.lists) }
    }

    /// The share of these that the filter holds for; all of them, where none was asked.
    pub(super) fn holding(&self) -> f64 {
        if self.asked == 0 { 1.0 } else { self.holding as f64 / self.asked as f64 }
    }

    /// Items that were asked one by one.
    pub(super) fn asked(&self) -> usize {
        self.asked
    }

    /// Items whose words were evaluated.
    pub(super) fn items(&self) -> usize {
        self.items
    }
}
