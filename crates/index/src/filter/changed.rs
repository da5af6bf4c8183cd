//! Filter evaluation for items whose values were updated after the index was built.
//!
//! The bit planes still hold the old values of an updated item, so the item is evaluated again with its current values
//! when the filter bitmap of its list is computed. Only lists that a search probes are evaluated. If the filter
//! resolves to a list of slots, all updated items are evaluated at once.

use std::sync::Arc;

use super::language::{Canonical, Test};
use super::question::{Question, question};
use crate::columns::{Columns, Overlay, Predicate, bits};
use sterling_core::error::Result;
use sterling_core::units::Slot;

const SLOTS: u32 = u64::BITS;
/// Maximum number of sampled words for the estimate of how many updated items pass.
const SAMPLED_MAX: usize = 256;

/// Updated values of the columns that one filter reads.
#[derive(Clone, Debug)]
pub(super) struct Changed {
    root: Node,
    overlay: Arc<Overlay>,
    /// Columns that the filter reads and that have updated values.
    columns: Vec<usize>,
}

/// Filter tree that, unlike the plan's tree, keeps leaves that match no item of the snapshot.
#[derive(Clone, Debug, PartialEq)]
enum Node {
    All,
    Nothing,
    Literal { column: usize, of_columns: Question, of_changed: Predicate, negated: bool },
    And(Vec<Node>),
    Or(Vec<Node>),
}

impl Changed {
    /// Prepares the updates that affect a filter; `None` if no update does.
    ///
    /// # Errors
    /// As [`super::Plan::new`].
    pub(super) fn of(filter: &Canonical, columns: &Columns, overlay: &Arc<Overlay>) -> Result<Option<Self>> {
        if overlay.is_empty() {
            return Ok(None);
        }
        let mut requested = Vec::new();
        let root = node(filter, columns, &mut requested)?;
        requested.sort_unstable();
        requested.dedup();
        requested.retain(|&column| overlay.has_column(column));
        Ok((!requested.is_empty()).then(|| Changed { root, overlay: overlay.clone(), columns: requested }))
    }

    /// Returns whether an updated item passes; `None` if the item was not updated.
    pub(super) fn passes(&self, slot: Slot, columns: &Columns) -> Option<bool> {
        let (word, bit) = (slot.index() / SLOTS as usize, slot.0 % SLOTS);
        let requested = self.filled(word) & 1 << bit;
        (requested != 0).then(|| self.holding(&self.root, columns, word, requested) != 0)
    }

    /// Corrects the filter bitmap of the slots `first..end` for updated items.
    pub(super) fn correct_bitmap(&self, columns: &Columns, first: u32, end: u32, words: &mut [u64]) {
        for word in first / SLOTS..end.div_ceil(SLOTS) {
            let start = word * SLOTS;
            let before = first.saturating_sub(start);
            let behind = (start + SLOTS).saturating_sub(end);
            let own = u64::MAX << before & u64::MAX >> behind;
            let changed = self.filled(word as usize) & own;
            if changed == 0 {
                continue;
            }
            let passing = self.holding(&self.root, columns, word as usize, changed);
            for bit in bits(changed) {
                let at = (start + bit - first) as usize;
                let (out, place) = (&mut words[at / 64], at % 64);
                *out = *out & !(1 << place) | (passing >> bit & 1) << place;
            }
        }
    }

    pub(super) fn contains(&self, slot: Slot) -> bool {
        self.filled(slot.index() / SLOTS as usize) >> (slot.0 % SLOTS) & 1 == 1
    }

    /// Returns the updated items that pass, ascending.
    pub(super) fn passing(&self, columns: &Columns) -> Vec<Slot> {
        let mut words: Vec<usize> = self.columns.iter().flat_map(|&column| self.overlay.words(column)).collect();
        words.sort_unstable();
        words.dedup();
        let of_word = |word: usize| {
            let passing = self.holding(&self.root, columns, word, self.filled(word));
            bits(passing).map(move |bit| Slot(word as u32 * SLOTS + bit))
        };
        words.into_iter().flat_map(of_word).collect()
    }

    /// Estimates the number of updated items among `slots`, and of the passing ones, from an evenly spaced sample.
    pub(super) fn counts(&self, columns: &Columns, slots: u32) -> (f64, f64) {
        let words = slots.div_ceil(SLOTS).max(1) as usize;
        let sampled = words.min(SAMPLED_MAX);
        let (mut changed, mut passing) = (0, 0);
        for word in (0..sampled).map(|n| n * words / sampled) {
            let filled = self.filled(word);
            changed += filled.count_ones();
            passing += self.holding(&self.root, columns, word, filled).count_ones();
        }
        let of_all = |slots: u32| f64::from(slots) * words as f64 / sampled as f64;
        (of_all(changed), of_all(passing))
    }

    /// Returns the bitmap of the updated items among 64 slots.
    fn filled(&self, word: usize) -> u64 {
        self.columns.iter().fold(0, |filled, &column| filled | self.overlay.word(column, word).0)
    }

    /// Evaluates a node on the `requested` bits of 64 slots.
    fn holding(&self, node: &Node, columns: &Columns, word: usize, requested: u64) -> u64 {
        match node {
            Node::All => requested,
            Node::Nothing => 0,
            Node::And(parts) => parts.iter().fold(requested, |left, part| self.holding(part, columns, word, left)),
            Node::Or(parts) => {
                parts.iter().fold(0, |held, part| held | self.holding(part, columns, word, requested & !held))
            }
            Node::Literal { column, of_columns, of_changed, negated } => {
                let (filled, values) = self.overlay.word(*column, word);
                let mut holding = of_columns.holding(columns, Slot(word as u32 * SLOTS), requested & !filled);
                for (bit, value) in bits(filled).zip(values).filter(|(bit, _)| requested >> bit & 1 == 1) {
                    holding |= u64::from(of_changed.holds(value)) << bit;
                }
                if *negated { requested & !holding } else { holding }
            }
        }
    }
}

/// Updates are equal if they have the same overlay and the same filter tree.
impl PartialEq for Changed {
    fn eq(&self, other: &Self) -> bool {
        self.root == other.root && Arc::ptr_eq(&self.overlay, &other.overlay)
    }
}

/// Builds the tree of a filter and collects the columns that it reads.
fn node(filter: &Canonical, columns: &Columns, requested: &mut Vec<usize>) -> Result<Node> {
    let mut all =
        |parts: &[Canonical]| parts.iter().map(|part| node(part, columns, requested)).collect::<Result<Vec<_>>>();
    Ok(match filter {
        Canonical::All => Node::All,
        Canonical::Nothing => Node::Nothing,
        Canonical::And(parts) => Node::And(all(parts)?),
        Canonical::Or(parts) => Node::Or(all(parts)?),
        Canonical::Literal { leaf, negated } => {
            let number = columns.number(&leaf.feature)?;
            let column = columns.at(number);
            let of_changed = match &leaf.test {
                Test::Has(values) => column.term_test(values)?,
                Test::Compares(operator, text) => column.comparison_test(*operator, text)?,
                Test::IsPresent => Predicate::Present,
            };
            requested.push(number);
            Node::Literal { column: number, of_columns: question(leaf, columns)?, of_changed, negated: *negated }
        }
    })
}
