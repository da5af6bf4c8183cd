//! Columns of several segments with consecutive slots.

use std::sync::Arc;

use super::cell::Cell;
use super::overlay::Overlay;
use super::view::Columns;
use sterling_core::units::Slot;

/// Columns of the snapshot's segment and of the segments that follow it.
#[derive(Clone, Debug)]
pub struct Stacked {
    first: Columns,
    /// Updated values of the first segment.
    overlay: Arc<Overlay>,
    /// Further segments, each with its first slot over all segments; ascending.
    others: Vec<(u32, Columns)>,
}

impl Stacked {
    /// Stacks a first segment with its overlay and further segments with their first slots, ascending.
    pub fn new(first: Columns, overlay: Arc<Overlay>, others: Vec<(u32, Columns)>) -> Self {
        Stacked { first, overlay, others }
    }

    /// Returns the columns of the first segment, which define the names of all.
    pub fn first(&self) -> &Columns {
        &self.first
    }

    /// Returns true if no slot of any segment has two values in the column.
    pub fn is_single(&self, column: usize) -> bool {
        let is_single = self.first.at(column).is_single() && self.overlay.is_single(column);
        is_single && self.others.iter().all(|(_, columns)| columns.at(column).is_single())
    }

    /// Returns the maximum size of the values of a slot in the column over all segments, in bytes of an answer.
    pub fn cell_bytes(&self, column: usize) -> usize {
        let first = self.first.at(column).cell_bytes().max(self.overlay.cell_bytes(column));
        self.others.iter().map(|(_, columns)| columns.at(column).cell_bytes()).fold(first, usize::max)
    }

    /// Returns the values of a slot of any segment in the column.
    pub fn cell(&self, column: usize, slot: Slot) -> Cell<'_> {
        match self.others.partition_point(|(first, _)| *first <= slot.0).checked_sub(1) {
            Some(at) => self.others[at].1.at(column).cell(Slot(slot.0 - self.others[at].0)),
            None => match self.overlay.get(column, slot) {
                Some(value) => value.cell(),
                None => self.first.at(column).cell(slot),
            },
        }
    }
}

impl From<&Columns> for Stacked {
    fn from(columns: &Columns) -> Self {
        Stacked::new(columns.clone(), Arc::default(), Vec::new())
    }
}
