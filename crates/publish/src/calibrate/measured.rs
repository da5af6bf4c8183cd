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
        ListId(self.offsets.partition_point(|&first| first <= slot).saturating_sub(1) as u32)
    }

    /// Looks up the lists of ascending slots, each from the one before: thousands of slots of a sample pass as many lists.
    pub(super) fn lists_of(self) -> impl FnMut(u32) -> ListId + 'a {
        let mut list = 0;
        move |slot| {
            while list + 1 < self.offsets.len() && self.offsets[list + 1] <= slot {
                list += 1;
            }
            ListId(list as u32)
        }
    }

    /// Returns the occupied slots.
    pub(super) fn filled(self) -> Filled<'a> {
        let end = self.lengths.iter().scan(0, |end, &length| {
            *end += length as usize;
            Some(*end)
        });
        Filled { layout: self, ends: end.collect() }
    }
}

/// Occupied slots, list by list.
pub(super) struct Filled<'a> {
    layout: Layout<'a>,
    /// Cumulative number of items per list, `[C]`.
    ends: Vec<usize>,
}

impl Filled<'_> {
    /// Returns the number of occupied slots.
    pub(super) fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Returns the `n`-th occupied slot.
    pub(super) fn nth(&self, n: usize) -> u32 {
        let list = self.ends.partition_point(|&end| end <= n);
        let before = self.ends[list] - self.layout.lengths[list] as usize;
        self.layout.offsets[list] + (n - before) as u32
    }

    /// Returns the occupied slots of ascending numbers.
    pub(super) fn at(&self, numbers: impl IntoIterator<Item = u32>) -> Vec<u32> {
        let mut list = 0;
        let slot = |n: u32| {
            let n = n as usize;
            while self.ends[list] <= n {
                list += 1;
            }
            let before = self.ends[list] - self.layout.lengths[list] as usize;
            self.layout.offsets[list] + (n - before) as u32
        };
        numbers.into_iter().map(slot).collect()
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

    /// Returns those of ascending slots of the complete index whose items this index holds, with their slots in this index.
    pub(super) fn own(&self, ascending: &[u32]) -> Vec<(u32, Slot)> {
        let Some(places) = self.places else { return ascending.iter().map(|&place| (place, Slot(place))).collect() };
        let mut list_of = self.whole.lists_of();
        let own = |place| {
            let list = list_of(place).index();
            let first = self.index.list_offsets()[list];
            let of_list = &places[first as usize..][..self.index.list_lengths()[list] as usize];
            of_list.binary_search(&place).ok().map(|at| (place, Slot(first + at as u32)))
        };
        ascending.iter().copied().filter_map(own).collect()
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
        let every: Vec<u32> = (0..filled.len()).map(|n| filled.nth(n)).collect();
        for step in [1, 2, 5, 60, 143] {
            let numbers = || (0..filled.len()).step_by(step).flat_map(|n| [n, n]);
            let slots = filled.at(numbers().map(|n| n as u32));
            assert_eq!(slots, numbers().map(|n| every[n]).collect::<Vec<_>>(), "every {step}th");
            let lists: Vec<ListId> = slots.iter().copied().map(layout.lists_of()).collect();
            assert_eq!(lists, slots.iter().map(|&slot| layout.list_of(slot)).collect::<Vec<_>>(), "every {step}th");
        }
    }
}
