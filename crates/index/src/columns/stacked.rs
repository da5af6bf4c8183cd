//! Columns of several parts whose slots follow one another.

use std::sync::Arc;

use super::cell::Cell;
use super::overlay::Overlay;
use super::view::Columns;
use sterling_core::units::Slot;

/// The same columns of a first part and of those behind it.
#[derive(Clone, Debug)]
pub struct Stacked {
    first: Columns,
    /// What has changed of these since.
    overlay: Arc<Overlay>,
    /// With the slot, counted over all parts, that each begins at; ascending.
    others: Vec<(u32, Columns)>,
}

impl Stacked {
    /// The columns of a part with what has changed of them since, and of others with the slots that these begin at, ascending.
    pub fn new(first: Columns, overlay: Arc<Overlay>, others: Vec<(u32, Columns)>) -> Self {
        Stacked { first, overlay, others }
    }

    /// The columns of the first part, which says what all are called.
    pub fn first(&self) -> &Columns {
        &self.first
    }

    /// True where no slot of any part has two values in the column of a number.
    pub fn is_single(&self, column: usize) -> bool {
        let is_single = self.first.at(column).is_single() && self.overlay.is_single(column);
        is_single && self.others.iter().all(|(_, columns)| columns.at(column).is_single())
    }

    /// Bytes that an answer takes for the values of a slot, of any part, in the column of a number at most.
    pub fn cell_bytes(&self, column: usize) -> usize {
        let first = self.first.at(column).cell_bytes().max(self.overlay.cell_bytes(column));
        self.others.iter().map(|(_, columns)| columns.at(column).cell_bytes()).fold(first, usize::max)
    }

    /// The values of a slot, of any part, in the column of a number.
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
