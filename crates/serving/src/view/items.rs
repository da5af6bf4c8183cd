//! Data of the items of a view, by their slots.

use std::cmp::Ordering;

use super::segment::stored_value;
use super::{View, ViewSegment};
use sterling_core::units::{ItemId, Slot, by_score};
use sterling_graph::dense::InputRows;
use sterling_index::columns::Value;
use sterling_snapshot::VectorRows;

impl View {
    /// Returns the slot of an item, or `None` if the view does not hold it.
    pub fn slot(&self, id: ItemId) -> Option<Slot> {
        let of_main = || self.main.ids.slot(id).filter(|&slot| !self.tombstones.contains(slot));
        let of_segment = |delta: &ViewSegment| {
            let slot = delta.segment.ids().slot(id).filter(|&slot| !delta.tombstones.contains(slot))?;
            Some(Slot(delta.first_slot + slot.0))
        };
        self.deltas.iter().find_map(of_segment).or_else(of_main)
    }

    /// Returns the item id of an occupied slot.
    pub fn id(&self, slot: Slot) -> ItemId {
        match self.delta_segment(slot) {
            Some((delta, slot)) => delta.segment.ids().item(slot),
            None => self.main.ids.item(slot),
        }
    }

    /// Returns the present value of the item in a slot, in the column with this index.
    pub fn value_of(&self, column: usize, slot: Slot) -> Value {
        match (self.delta_segment(slot), self.overlay.get(column, slot)) {
            (Some((delta, slot)), _) => stored_value(delta.segment.columns(), column, slot),
            (None, Some(value)) => value.clone(),
            (None, None) => stored_value(&self.main.columns, column, slot),
        }
    }

    /// Compares items by descending score, then by id.
    pub fn best_first(&self, (score, slot): &(f32, Slot), (other, other_slot): &(f32, Slot)) -> Ordering {
        by_score(*score, *other).then_with(|| self.id(*slot).cmp(&self.id(*other_slot)))
    }

    /// Returns whether the item of an occupied slot is not deleted.
    pub fn is_live(&self, slot: Slot) -> bool {
        match self.delta_segment(slot) {
            Some((delta, own)) => !delta.tombstones.contains(own),
            None => !self.tombstones.contains(slot),
        }
    }

    /// Returns the inverted list of the main snapshot that a slot belongs to.
    pub fn list_of(&self, slot: Slot) -> u32 {
        match self.delta_segment(slot) {
            Some((delta, slot)) => delta.segment.list_of(slot),
            None => self.main.index.list_of(slot).0,
        }
    }

    /// Returns whether the item of a slot is unlike those that the main snapshot's lists were trained for.
    pub fn is_stray(&self, slot: Slot) -> bool {
        self.delta_segment(slot).is_some_and(|(delta, slot)| delta.segment.is_stray(slot))
    }

    /// Decodes the most precise stored row of a slot to f32, `[D]`.
    pub fn row(&self, slot: Slot, out: &mut [f32]) {
        match self.delta_segment(slot) {
            Some((delta, slot)) => delta.segment.index().row(slot, out),
            None => self.main.index.row(slot, out),
        }
    }

    /// Appends the rows of `[[item.vectors]]` of the item in a slot, in storage format.
    pub fn read_vectors(&self, rows: &VectorRows<'_>, slot: Slot, out: &mut Vec<u8>) {
        match self.delta_segment(slot) {
            Some((delta, slot)) => rows.read(delta.segment.vectors(), slot, out),
            None => rows.read(&self.main.vectors, slot, out),
        }
    }

    /// Computes the dot products of a vector with the rows of ascending slots.
    ///
    /// # Panics
    /// If `out` is not as long as `slots`.
    pub fn products(&self, vector: &[f32], slots: &[Slot], out: &mut [f32]) {
        let mut from = 0;
        for part in slots.chunk_by(|a, b| self.first_slot_of(*a) == self.first_slot_of(*b)) {
            let out = &mut out[from..from + part.len()];
            let first = self.first_slot_of(part[0]);
            let index = self.delta_segment(part[0]).map_or(&self.main.index, |(delta, _)| delta.segment.index());
            let own: Vec<u32> = part.iter().map(|slot| slot.0 - first).collect();
            index.products(vector, &own, out);
            from += part.len();
        }
    }

    /// Returns the first slot of the segment that holds a slot.
    fn first_slot_of(&self, slot: Slot) -> u32 {
        self.delta_segment(slot).map_or(0, |(delta, _)| delta.first_slot)
    }

    /// Writes the candidate features that the reranker reads as rows.
    ///
    /// # Panics
    /// If `given` has fewer rows than `slots`.
    pub fn write_candidates(&self, slots: &[Slot], mut given: InputRows<'_>) {
        let mut first = 0;
        for run in slots.chunk_by(|a, b| self.delta_segment(*a).is_none() && self.delta_segment(*b).is_none()) {
            let given = given.some(first..first + run.len());
            match self.delta_segment(run[0]) {
                Some((delta, slot)) => delta.segment.candidates().write(delta.segment.index(), &[slot], given),
                None => self.main.candidates.write(&self.main.index, run, given),
            }
            first += run.len();
        }
    }

    /// Names of the columns that the reranker and the value model read.
    pub fn numbers(&self) -> impl ExactSizeIterator<Item = &str> {
        self.main.numbers.iter().map(|(name, _)| name.as_str())
    }

    /// Appends the values of one of [`View::numbers`] at several slots to `out`.
    pub fn read_numbers(&self, column: usize, slots: impl Iterator<Item = Slot>, out: &mut Vec<f32>) {
        let (name, of_main) = &self.main.numbers[column];
        let number = (!self.overlay.is_empty()).then(|| self.main.columns.number(name).ok()).flatten();
        let changed = number.filter(|&number| self.overlay.has_column(number));
        if self.deltas.is_empty() && changed.is_none() {
            return out.extend(slots.map(|slot| of_main[slot.index()]));
        }
        out.extend(slots.map(|slot| match self.delta_segment(slot) {
            Some((delta, slot)) => delta.segment.numbers()[column][slot.index()],
            None => match changed.and_then(|number| self.overlay.get(number, slot)) {
                Some(value) => value.number(),
                None => of_main[slot.index()],
            },
        }));
    }
}
