//! Map between slots and item ids.
//!
//! The map from slot to id is an array. The map from id to slot is an open-addressing hash table of slots with linear probing. The
//! table is at most half full, so that an exclude list of ten thousand ids costs about two cache misses per id. The map is stored
//! as two tensors: `ids` i64 `[S]` and `id_table` u32 `[2^b]`, [`NO_ITEM`] in free cells.

use sterling_core::error::{Error, Result};
use sterling_core::units::{ItemId, NO_ITEM, Slot};
use sterling_kernels::buffer::Buffer;
use sterling_storage::files::{TensorFile, Tensors};

/// Item ids of a snapshot.
#[derive(Clone, Debug, Default)]
pub struct Ids {
    ids: Buffer<i64>,
    table: Buffer<u32>,
    items: usize,
}

fn place(id: i64, mask: usize) -> usize {
    // Fibonacci hashing spreads consecutive ids, the usual case, evenly.
    ((id as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize & mask
}

/// Adds the id tensors of a snapshot in which slot `s` has the item `ids[order[s]]`, or no item if `order[s]` is [`NO_ITEM`].
///
/// # Errors
/// As [`TensorFile::add`].
pub fn encode(ids: &[i64], order: &[u32], file: &mut TensorFile<'_>) -> Result<()> {
    let by_slot: Vec<i64> = order.iter().map(|&row| if row == NO_ITEM { 0 } else { ids[row as usize] }).collect();
    // At most 2^32 cells, because `place` uses 32 bits of the hash.
    let items = order.iter().filter(|&&row| row != NO_ITEM).count();
    let mask = (2 * items.max(1)).next_power_of_two() - 1;
    let mut table = vec![NO_ITEM; mask + 1];
    for (slot, _) in order.iter().enumerate().filter(|(_, row)| **row != NO_ITEM) {
        let mut at = place(by_slot[slot], mask);
        while table[at] != NO_ITEM {
            at = (at + 1) & mask;
        }
        table[at] = slot as u32;
    }
    file.add_owned("ids", &[by_slot.len()], by_slot)?;
    file.add_owned("id_table", &[table.len()], table)
}

impl Ids {
    /// Opens the tensors written by `encode` for a snapshot with `slots` slots and `items` items.
    ///
    /// # Errors
    /// `Corrupt` if the table does not lead to the slot of each item.
    pub fn open(tensors: &Tensors, slots: usize, items: usize) -> Result<Self> {
        let ids = tensors.vector::<i64>("ids", slots)?;
        let (table, shape) = tensors.get::<u32>("id_table", 1)?;
        let filled = table.iter().filter(|&&slot| slot != NO_ITEM);
        let outside = filled.clone().any(|&slot| slot as usize >= slots);
        if !shape[0].is_power_of_two() || outside || filled.count() != items || items >= shape[0] {
            return Err(Error::corrupt(format!(
                "tensor `id_table`: {} entries do not map {items} items to {slots} slots",
                shape[0]
            )));
        }
        Ok(Ids { ids, table, items })
    }

    /// Returns the number of items, N.
    pub fn items(&self) -> usize {
        self.items
    }

    /// Returns the item in an occupied slot.
    pub fn item(&self, slot: Slot) -> ItemId {
        ItemId(self.ids[slot.index()])
    }

    /// Returns the item of each slot, `[S]`; 0 for an empty slot.
    pub fn of_slots(&self) -> &Buffer<i64> {
        &self.ids
    }

    /// Returns the slot of an item, or `None` if the snapshot does not have the item.
    pub fn slot(&self, item: ItemId) -> Option<Slot> {
        let mask = self.table.len() - 1;
        let mut at = place(item.0, mask);
        loop {
            match self.table[at] {
                NO_ITEM => return None,
                slot if self.ids[slot as usize] == item.0 => return Some(Slot(slot)),
                _ => at = (at + 1) & mask,
            }
        }
    }

    /// Iterates over the occupied slots, unordered.
    pub fn slots(&self) -> impl Iterator<Item = Slot> + '_ {
        self.table.iter().filter(|&&slot| slot != NO_ITEM).map(|&slot| Slot(slot))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn opened(ids: &[i64], order: &[u32]) -> Ids {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ids.safetensors");
        let mut file = TensorFile::new();
        encode(ids, order, &mut file).unwrap();
        file.write(&path).unwrap();
        Ids::open(&Tensors::open(&path).unwrap(), order.len(), ids.len()).unwrap()
    }

    proptest! {
        #[test]
        fn every_item_is_found_in_its_slot_and_no_other_is(known: BTreeSet<i64>, others: Vec<i64>) {
            let ids: Vec<i64> = known.iter().copied().collect();
            let order: Vec<u32> = (0..ids.len() as u32).rev().flat_map(|row| [row, NO_ITEM]).collect();
            let opened = opened(&ids, &order);
            for (slot, row) in order.iter().enumerate().filter(|(_, row)| **row != NO_ITEM) {
                prop_assert_eq!(opened.slot(ItemId(ids[*row as usize])), Some(Slot(slot as u32)));
                prop_assert_eq!(opened.item(Slot(slot as u32)), ItemId(ids[*row as usize]));
            }
            for id in others.into_iter().filter(|id| !known.contains(id)) {
                prop_assert_eq!(opened.slot(ItemId(id)), None);
            }
        }
    }

    #[test]
    fn out_of_range_tables_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ids.safetensors");
        for table in
            [vec![0u32, 9, NO_ITEM, NO_ITEM], vec![0, 1, NO_ITEM], vec![0, NO_ITEM, NO_ITEM, NO_ITEM], vec![0, 1]]
        {
            let mut file = TensorFile::new();
            file.add_owned("ids", &[2], vec![5i64, 6]).unwrap();
            file.add_owned("id_table", &[table.len()], table).unwrap();
            file.write(&path).unwrap();
            assert!(Ids::open(&Tensors::open(&path).unwrap(), 2, 2).is_err());
        }
    }
}
