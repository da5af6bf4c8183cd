//! Search of an index and its delta segments as one.
//!
//! Lists are scored and selected once, by the index. Segments that share these lists are scanned in the selected lists.
//! A segment may have own lists, which it does not share (`own_lists`). A single own list is scanned by every search.
//! Of several own lists, which are called ranked, those are scanned that score at least as high as the last selected
//! list. All segments add their items to one top-k selector, under slots that are numbered over all segments. The
//! result is therefore that of one index of all items over the same lists, and a segment costs no more than its blocks.

use super::first_pass::{ItemCodes, Tables};
use super::own_lists::{OwnLists, OwnQuery, OwnScratch, RankedLists};
use super::probing::{Counters, Probing};
use super::quantize::Quantized;
use super::view::Index;
use crate::topk::Selector;
use sterling_core::units::{ListId, Slot};
use sterling_kernels::cpu::kernels::{BLOCK, Blocks, CodeBlocks};
use sterling_kernels::memory::prefetch;

/// Slots whose rows are scored at a time, so that enough memory loads are in flight.
const ROWS_AT_ONCE: usize = 1024;

/// Segment of a union: an index with the offset of its slots.
#[derive(Clone, Copy, Debug)]
pub struct Member<'a> {
    /// Index of the items: in the lists that all segments share, in own lists of this segment, or in both.
    pub index: &'a Index,
    /// Index of the segment's slot 0 in the union.
    pub first_slot: u32,
}

/// Query in all forms that scans read: f32, int8, and lookup tables.
#[derive(Clone, Copy)]
pub(super) struct Forms<'a> {
    /// Query vector, `[D]`.
    pub(super) vector: &'a [f32],
    pub(super) int8: &'a Quantized,
    /// Query tables, if first-pass codes are scanned.
    pub(super) tables: Option<&'a Tables>,
}

/// Indexes that are searched as one.
#[derive(Clone, Copy, Debug)]
pub struct Union<'a> {
    /// Index whose lists are probed.
    pub lists: &'a Index,
    /// Segments to scan, in ascending order of their slots. Only the index of the lists may have first-pass codes.
    pub members: &'a [Member<'a>],
}

impl Union<'_> {
    /// Returns true if a segment uses the lists that are probed.
    pub(super) fn has_lists(&self, member: &Member<'_>) -> bool {
        member.index.shared_lists() == self.lists.lists()
    }

    /// Returns the lists of a segment that every search scans.
    pub(super) fn always_scanned_lists(&self, member: &Member<'_>) -> impl Iterator<Item = ListId> + use<> {
        let lists = member.index.lists();
        let first = match &member.index.own {
            Some(OwnLists { ranked: Some(_), .. }) => lists,
            Some(OwnLists { first, .. }) => *first,
            None if self.has_lists(member) => lists,
            None => 0,
        };
        (first as u32..lists as u32).map(ListId)
    }

    /// Returns the length of each shared list, summed over the segments that use it. The lengths of the lists that only
    /// one segment has follow, if searches select among these by score.
    pub(super) fn list_lengths(&self, lengths: &mut Vec<u32>) {
        lengths.clear();
        lengths.resize(self.lists.lists(), 0);
        for member in self.members.iter().filter(|member| self.has_lists(member)) {
            lengths.iter_mut().zip(member.index.list_lengths.iter()).for_each(|(sum, length)| *sum += length);
        }
        for (_, member, own, _) in self.ranked() {
            lengths.extend_from_slice(&member.index.list_lengths[own.first..]);
        }
    }

    /// Returns the maximum number of lists that a filtered search scans.
    pub fn most_lists(&self, probing: &Probing<'_>) -> usize {
        let has_lists = self.members.iter().any(|member| self.has_lists(member));
        if has_lists { self.extend_to_own_lists(probing.most(self.lists.lists())) } else { 0 }
    }

    /// Adds the number of ranked own lists to a maximum number of lists that covers all lists of the index.
    pub(super) fn extend_to_own_lists(&self, most: usize) -> usize {
        let own: usize = self.ranked().map(|(.., ranked)| ranked.count()).sum();
        most + if most == self.lists.lists() { own } else { 0 }
    }

    /// Returns the number of items outside of the lists that every search scans.
    pub(super) fn items_in_lists(&self) -> usize {
        self.members.iter().map(|member| member.index.items() - member.index.items_scanned(self.lists.lists())).sum()
    }

    /// Returns the segments with ranked own lists, each with its number. In the numbering of all lists, own lists
    /// follow the lists of the index, segment by segment.
    pub(super) fn ranked(&self) -> impl Iterator<Item = (usize, &Member<'_>, &OwnLists, &RankedLists)> {
        let members = self.members.iter().enumerate();
        members.filter_map(|(number, member)| {
            let own = member.index.own.as_ref()?;
            Some((number, member, own, own.ranked.as_ref()?))
        })
    }

    /// Returns the segment that owns a list of the union, and the number of the list in that segment.
    pub(super) fn owner(&self, list: ListId) -> Option<(usize, ListId)> {
        let mut number = list.index().checked_sub(self.lists.lists())?;
        self.ranked().find_map(|(member, _, own, ranked)| match number.checked_sub(ranked.count()) {
            Some(left) => {
                number = left;
                None
            }
            None => Some((member, ListId((own.first + number) as u32))),
        })
    }
}

impl Index {
    /// Returns the number of items of a delta index that every search scans; `lists` is the number of lists of its snapshot.
    pub fn items_scanned(&self, lists: usize) -> usize {
        match &self.own {
            Some(OwnLists { ranked: Some(_), .. }) => 0,
            Some(OwnLists { items, .. }) => *items,
            None if self.lists() == lists => 0,
            None => self.items(),
        }
    }
}

impl<'a> Member<'a> {
    /// Converts a slot of this segment to a slot of the union.
    pub fn name(&self, slot: Slot) -> Slot {
        Slot(self.first_slot + slot.0)
    }

    pub(super) fn score_own(
        &self,
        own: &OwnLists,
        ranked: &RankedLists,
        query: OwnQuery<'_>,
        scratch: &mut OwnScratch,
    ) {
        let penalties = self.index.penalties.get(own.first..).unwrap_or_default();
        ranked.score(self.index.kernels, query, penalties, scratch);
    }

    /// Returns the lists that hold items.
    pub(super) fn filled_lists(&self) -> impl Iterator<Item = ListId> + use<'a> {
        self.filled_of((0..self.index.lists() as u32).map(ListId))
    }

    /// Retains the lists that hold items.
    pub(super) fn filled_of<L: Iterator<Item = ListId>>(&self, lists: L) -> impl Iterator<Item = ListId> + use<'a, L> {
        let index = self.index;
        lists.filter(move |list| index.list_lengths[list.index()] > 0)
    }

    /// Returns the blocks of a list, with the blocks of `next` to prefetch.
    pub(super) fn blocks_before(&self, list: ListId, next: Option<ListId>) -> Blocks<'a> {
        self.named(self.index.blocks_before(list, next))
    }

    /// Returns the blocks of all lists as one range; callers must not pick the padding slots between lists.
    pub(super) fn all_blocks(&self) -> Blocks<'a> {
        self.named(self.index.all_blocks())
    }

    fn named(&self, blocks: Blocks<'a>) -> Blocks<'a> {
        Blocks { first_slot: blocks.first_slot + self.first_slot, ..blocks }
    }

    /// Scans all items of lists, one list after the other.
    pub(super) fn scan_whole(
        &self,
        lists: impl Iterator<Item = ListId>,
        query: Forms<'_>,
        selector: &mut Selector,
        counters: &mut Counters,
    ) {
        let mut lists = lists.peekable();
        while let Some(list) = lists.next() {
            let next = lists.peek().copied();
            match self.codes_for(query.tables) {
                Some((codes, tables)) => {
                    self.scan_codes((codes, &[]), (list, next), (query.vector, tables), selector);
                    self.count_codes(codes, list, counters);
                }
                None => {
                    selector.scan(self.index.kernels, &self.blocks_before(list, next), &query.int8.view());
                    self.count_whole(list, counters);
                }
            }
        }
    }

    /// Returns the first-pass codes if the segment has them and the query has tables.
    pub(super) fn codes_for<'t>(&self, tables: Option<&'t Tables>) -> Option<(&'a ItemCodes, &'t Tables)> {
        self.index.first_pass.as_ref().zip(tables)
    }

    /// Scans the codes of a list, with the codes of `next` to prefetch: of all items, or of those in the filter bitmap `words`.
    pub(super) fn scan_codes(
        &self,
        (codes, words): (&ItemCodes, &[u64]),
        (list, next): (ListId, Option<ListId>),
        (vector, tables): (&[f32], &Tables),
        selector: &mut Selector,
    ) {
        let blocks = self.index.codes_before(codes, list, next);
        let blocks = CodeBlocks { first_slot: blocks.first_slot + self.first_slot, words, ..blocks };
        let query = tables.of_list(self.index.centroid_product(vector, list));
        next.into_iter().for_each(|next| prefetch(self.index.centroid(next)));
        selector.scan_codes(self.index.kernels, &blocks, &query);
    }

    /// Counts a list whose items were all scored by codes.
    pub(super) fn count_codes(&self, codes: &ItemCodes, list: ListId, counters: &mut Counters) {
        self.count(list, codes.block_bytes(), counters);
    }

    /// Counts a list whose items were all scored by int8 rows.
    pub(super) fn count_whole(&self, list: ListId, counters: &mut Counters) {
        self.count(list, self.index.block_bytes(), counters);
    }

    fn count(&self, list: ListId, block_bytes: u64, counters: &mut Counters) {
        let length = self.index.list_lengths[list.index()] as usize;
        counters.items += length as u64;
        counters.survivors += length as u64;
        counters.bytes += length.div_ceil(BLOCK) as u64 * block_bytes;
    }

    /// Scores slots of this segment as [`Index::product`] and offers them to the selector; used for items from posting lists.
    pub fn search_slots(&self, vector: &[f32], slots: &[Slot], selector: &mut Selector) -> Counters {
        for slots in slots.chunks(ROWS_AT_ONCE) {
            let (mut numbers, mut products) = ([0u32; ROWS_AT_ONCE], [0f32; ROWS_AT_ONCE]);
            let (numbers, products) = (&mut numbers[..slots.len()], &mut products[..slots.len()]);
            numbers.iter_mut().zip(slots).for_each(|(number, slot)| *number = slot.0);
            self.index.products(vector, numbers, products);
            selector.offer(products, numbers, self.first_slot);
        }
        let (n, width) = (slots.len() as u64, self.index.row_bytes());
        Counters { items: n, survivors: n, bytes: n * width, ..Counters::default() }
    }

    /// Exact search: scores every item of this segment for whose slot `eligible` returns true, as [`Index::product`].
    pub fn search_exact(
        &self,
        vector: &[f32],
        mut eligible: impl FnMut(Slot) -> bool,
        selector: &mut Selector,
    ) -> Counters {
        let mut counters = Counters::default();
        for slot in self.index.filled_slots() {
            counters.items += 1;
            if eligible(slot) {
                counters.survivors += 1;
                selector.push(self.index.product(vector, slot), self.name(slot));
            }
        }
        counters.bytes = counters.survivors * self.index.row_bytes();
        counters
    }
}
