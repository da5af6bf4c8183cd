//! Index that is measured, or one shard of it on its own machine. Items are sampled by their slots in the complete index, so that
//! all shards together sample the same items as the complete index.

use sterling_core::units::{ListId, Slot};
use sterling_index::ivf;

/// Slot layout of the lists of an index.
#[derive(Clone, Copy)]
pub(super) struct Layout<'a> {
    /// First slot of each list, and one past the last, `[C + 1]`.
    pub(super) offsets: &'a [u32],
    /// Number of items per list, `[C]`.
    pub(super) lengths: &'a [u32],
}

impl<'a> Layout<'a> {
    pub(super) fn of(index: &'a ivf::Index) -> Self {
        Layout { offsets: index.list_offsets(), lengths: index.list_lengths() }
    }

    pub(super) fn lists(&self) -> usize {
        self.lengths.len()
    }

    pub(super) fn slots(&self) -> usize {
        self.offsets[self.lists()] as usize
    }

    /// Returns the list of a slot.
    pub(super) fn list_of(&self, slot: u32) -> ListId {
        ListId(list_at(self.offsets, slot) as u32)
    }

    /// Looks up the lists of ascending slots.
    pub(super) fn lists_of(self) -> impl FnMut(u32) -> ListId + 'a {
        let mut list_at = lists_at(self.offsets);
        move |slot| ListId(list_at(slot) as u32)
    }

    /// Returns the occupied slots.
    pub(super) fn filled(self) -> Filled<'a> {
        let mut starts = vec![0];
        starts.extend(self.lengths.iter().scan(0, |end, &length| {
            *end += length;
            Some(*end)
        }));
        Filled { layout: self, starts }
    }
}

/// Occupied slots, list by list.
pub(super) struct Filled<'a> {
    layout: Layout<'a>,
    /// Number of items in the lists before each list, and in all lists, `[C + 1]`.
    starts: Vec<u32>,
}

impl Filled<'_> {
    /// Returns the number of occupied slots.
    pub(super) fn len(&self) -> usize {
        self.starts[self.layout.lists()] as usize
    }

    /// Returns the `n`-th occupied slot.
    pub(super) fn nth(&self, n: u32) -> u32 {
        self.slot(list_at(&self.starts, n), n)
    }

    /// Looks up the occupied slots of ascending numbers.
    pub(super) fn nths(&self) -> impl FnMut(u32) -> u32 {
        let mut list_at = lists_at(&self.starts);
        move |n| self.slot(list_at(n), n)
    }

    fn slot(&self, list: usize, n: u32) -> u32 {
        self.layout.offsets[list] + (n - self.starts[list])
    }
}

/// Returns the last list that starts at or before a number.
fn list_at(starts: &[u32], number: u32) -> usize {
    starts.partition_point(|&start| start <= number).saturating_sub(1)
}

/// Looks up ascending numbers as [`list_at`], each from the list before: the thousands of numbers of a sample pass as many lists.
fn lists_at(starts: &[u32]) -> impl FnMut(u32) -> usize {
    let mut list = 0;
    move |number| {
        while starts.get(list + 1).is_some_and(|&start| start <= number) {
            list += 1;
        }
        list
    }
}

/// Index to measure.
#[derive(Clone, Copy)]
pub(super) struct Measured<'a> {
    pub(super) index: &'a ivf::Index,
    /// Lists of the complete index.
    pub(super) whole: Layout<'a>,
    /// For a shard: the slot in the complete index that corresponds to each occupied slot, `[S]`.
    places: Option<&'a [u32]>,
}

impl<'a> Measured<'a> {
    /// Measures a complete index.
    pub(super) fn whole(index: &'a ivf::Index) -> Self {
        Measured { index, whole: Layout::of(index), places: None }
    }

    /// Measures a shard whose items have these slots in the complete index, list by list in the same order as in the complete
    /// index.
    pub(super) fn shard(index: &'a ivf::Index, whole: Layout<'a>, places: &'a [u32]) -> Self {
        Measured { index, whole, places: Some(places) }
    }

    /// Returns the slot in the complete index for a slot of this index.
    pub(super) fn place(&self, slot: u32) -> u32 {
        self.places.map_or(slot, |places| places[slot as usize])
    }

    /// Looks up ascending slots of the complete index in this index; `None` if this index does not hold the item.
    pub(super) fn own(&self) -> impl FnMut(u32) -> Option<Slot> {
        let mut list_of = self.whole.lists_of();
        move |place| {
            let Some(places) = self.places else { return Some(Slot(place)) };
            let list = list_of(place).index();
            let first = self.index.list_offsets()[list];
            let of_list = &places[first as usize..][..self.index.list_lengths()[list] as usize];
            of_list.binary_search(&place).ok().map(|at| Slot(first + at as u32))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ascending_slots_are_looked_up_as_single_ones() {
        // Lists without items, with padding behind them, and a long run of empty ones.
        let lengths: Vec<u32> = [0, 3, 1, 0, 0, 7].into_iter().chain([0; 40]).chain([2, 0, 130, 1, 0]).collect();
        let offsets: Vec<u32> = lengths
            .iter()
            .scan(0, |end, &length| {
                *end += u32::div_ceil(length, 4) * 4;
                Some(*end)
            })
            .collect();
        let offsets = [&[0], offsets.as_slice()].concat();
        let layout = Layout { offsets: &offsets, lengths: &lengths };
        let filled = layout.filled();
        let count = filled.len() as u32;
        let every: Vec<u32> = (0..count).map(|n| filled.nth(n)).collect();
        let of_lists = offsets.iter().zip(&lengths).flat_map(|(&first, &length)| first..first + length);
        assert_eq!(every, of_lists.collect::<Vec<_>>());
        for step in [1, 2, 5, 60, 143] {
            let numbers = || (0..count).step_by(step).flat_map(|n| [n, n]);
            let slots: Vec<u32> = numbers().map(filled.nths()).collect();
            assert_eq!(slots, numbers().map(|n| every[n as usize]).collect::<Vec<_>>(), "every {step}th");
            let lists: Vec<ListId> = slots.iter().copied().map(layout.lists_of()).collect();
            assert_eq!(lists, slots.iter().map(|&slot| layout.list_of(slot)).collect::<Vec<_>>(), "every {step}th");
        }
    }
}
