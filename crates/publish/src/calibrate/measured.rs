//! What is measured: an index, or a shard of one that lies on another machine. Which items are drawn is a matter of their slots in
//! the whole, so that shards draw together what the whole would.

use sterling_core::units::{ListId, Slot};
use sterling_index::ivf;

/// Where the lists of an index lie.
#[derive(Clone, Copy)]
pub(super) struct Layout<'a> {
    /// `[C + 1]`: the first slot of each list, and one past the last.
    pub(super) offsets: &'a [u32],
    /// `[C]`: the items of each list.
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

    /// The list of a slot.
    pub(super) fn list_of(&self, slot: u32) -> ListId {
        ListId(self.offsets.partition_point(|&first| first <= slot).saturating_sub(1) as u32)
    }

    /// The slots that hold items.
    pub(super) fn filled(self) -> Filled<'a> {
        let end = self.lengths.iter().scan(0, |end, &length| {
            *end += length as usize;
            Some(*end)
        });
        Filled { layout: self, ends: end.collect() }
    }
}

/// The slots that hold items, list by list.
pub(super) struct Filled<'a> {
    layout: Layout<'a>,
    /// `[C]`: the items of each list and those before it.
    ends: Vec<usize>,
}

impl Filled<'_> {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The `n`-th of them.
    pub(super) fn nth(&self, n: usize) -> u32 {
        let list = self.ends.partition_point(|&end| end <= n);
        let before = self.ends[list] - self.layout.lengths[list] as usize;
        self.layout.offsets[list] + (n - before) as u32
    }
}

/// An index that is measured.
#[derive(Clone, Copy)]
pub(super) struct Measured<'a> {
    pub(super) index: &'a ivf::Index,
    /// The lists of the whole.
    pub(super) whole: Layout<'a>,
    /// `[S]`: the slot in the whole of each slot that holds an item, where the index is a shard of it.
    places: Option<&'a [u32]>,
}

impl<'a> Measured<'a> {
    /// One that is the whole.
    pub(super) fn whole(index: &'a ivf::Index) -> Self {
        Measured { index, whole: Layout::of(index), places: None }
    }

    /// A shard of a whole, whose items lie at these `places` of it, list by list in the same order.
    pub(super) fn shard(index: &'a ivf::Index, whole: Layout<'a>, places: &'a [u32]) -> Self {
        Measured { index, whole, places: Some(places) }
    }

    /// Where an item of the index lies in the whole.
    pub(super) fn place(&self, slot: u32) -> u32 {
        self.places.map_or(slot, |places| places[slot as usize])
    }

    /// The slot of an item of the whole, where the index holds it.
    pub(super) fn own(&self, place: u32) -> Option<Slot> {
        let Some(places) = self.places else { return Some(Slot(place)) };
        let list = self.whole.list_of(place).index();
        let first = self.index.list_offsets()[list];
        let of_list = &places[first as usize..][..self.index.list_lengths()[list] as usize];
        of_list.binary_search(&place).ok().map(|at| Slot(first + at as u32))
    }
}
