//! Searching an index and others over its lists as one.
//!
//! Lists are scored and chosen once, by the index; each member that has these lists is scanned in the chosen ones, and a member
//! of a single list of its own is scanned whole. Of a member that has several lists of its own (`own`) those are scanned that score as
//! high as the last one that was chosen. All of them offer their items to one selector, under slots that are counted
//! over all: so what is selected is what an index of all items over the same lists would select, and a member costs no more
//! than its blocks.

use super::first_pass::{ItemCodes, Tables};
use super::own::{OwnLists, OwnQuery, OwnScratch, RankedLists};
use super::probing::{Counters, Probing};
use super::quantize::Quantized;
use super::view::Index;
use crate::topk::Selector;
use sterling_core::units::{ListId, Slot};
use sterling_kernels::cpu::kernels::{BLOCK, Blocks, CodeBlocks};
use sterling_kernels::memory::prefetch;

/// Slots whose rows are scored together, so that the memory always has some to bring.
const ROWS_AT_ONCE: usize = 1024;

/// An index of a union, and what its slots are called there.
#[derive(Clone, Copy, Debug)]
pub struct Member<'a> {
    /// Items in the lists of the union, in lists of its own, or in either.
    pub index: &'a Index,
    /// What its slot 0 is called.
    pub first_slot: u32,
}

/// A query in the forms that scans take.
#[derive(Clone, Copy)]
pub(super) struct Forms<'a> {
    /// `[D]`
    pub(super) vector: &'a [f32],
    pub(super) int8: &'a Quantized,
    /// Where codes of a first pass are to be scanned.
    pub(super) tables: Option<&'a Tables>,
}

/// Indexes that are searched as one.
#[derive(Clone, Copy, Debug)]
pub struct Union<'a> {
    /// Whose lists are probed.
    pub lists: &'a Index,
    /// What is scanned, in ascending order of their slots. Codes for a first pass has none but the index of the lists.
    pub members: &'a [Member<'a>],
}

impl Union<'_> {
    /// Whether a member lies in the lists that are probed.
    pub(super) fn has_lists(&self, member: &Member<'_>) -> bool {
        member.index.shared_lists() == self.lists.lists()
    }

    /// The lists of a member that every search scans.
    pub(super) fn whole_lists(&self, member: &Member<'_>) -> impl Iterator<Item = ListId> + use<> {
        let lists = member.index.lists();
        let first = match &member.index.own {
            Some(OwnLists { ranked: Some(_), .. }) => lists,
            Some(OwnLists { first, .. }) => *first,
            None if self.has_lists(member) => lists,
            None => 0,
        };
        (first as u32..lists as u32).map(ListId)
    }

    /// The items of each list, over the members that have it, then those of each ranked list of the members' own.
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

    /// Number of lists that a filtered search looks into at most.
    pub fn most_lists(&self, probing: &Probing<'_>) -> usize {
        let has_lists = self.members.iter().any(|member| self.has_lists(member));
        if has_lists { self.over_all_lists(probing.most(self.lists.lists())) } else { 0 }
    }

    /// A number of lists at most, where the members' own ranked lists are probed with those of the index: all, if it was all of the index.
    pub(super) fn over_all_lists(&self, most: usize) -> usize {
        let own: usize = self.ranked().map(|(.., ranked)| ranked.count()).sum();
        most + if most == self.lists.lists() { own } else { 0 }
    }

    /// The items that do not lie in lists which every search scans.
    pub(super) fn items_in_lists(&self) -> usize {
        self.members.iter().map(|member| member.index.items() - member.index.items_scanned(self.lists.lists())).sum()
    }

    /// Members with ranked lists of their own, each with its number. Where all lists of a union are counted, these come behind those of
    /// the index, member by member.
    pub(super) fn ranked(&self) -> impl Iterator<Item = (usize, &Member<'_>, &OwnLists, &RankedLists)> {
        let members = self.members.iter().enumerate();
        members.filter_map(|(number, member)| {
            let own = member.index.own.as_ref()?;
            Some((number, member, own, own.ranked.as_ref()?))
        })
    }

    /// The member that has a list, as all lists of a union are counted, for its own, and what the list is called there.
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
    /// Items that every search scans of a delta index of a snapshot with so many lists.
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
    /// What a slot of its own is called.
    pub fn name(&self, slot: Slot) -> Slot {
        Slot(self.first_slot + slot.0)
    }

    /// Scores the ranked lists of its own.
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

    /// The lists that hold items.
    pub(super) fn filled_lists(&self) -> impl Iterator<Item = ListId> + use<'a> {
        self.filled_of((0..self.index.lists() as u32).map(ListId))
    }

    /// Those of some lists that hold items.
    pub(super) fn filled_of<L: Iterator<Item = ListId>>(&self, lists: L) -> impl Iterator<Item = ListId> + use<'a, L> {
        let index = self.index;
        lists.filter(move |list| index.list_lengths[list.index()] > 0)
    }

    /// The blocks of a list, before those of the `next` one.
    pub(super) fn blocks_before(&self, list: ListId, next: Option<ListId>) -> Blocks<'a> {
        self.named(self.index.blocks_before(list, next))
    }

    /// The blocks of all lists; their pads are items that nobody picks.
    pub(super) fn all_blocks(&self) -> Blocks<'a> {
        self.named(self.index.all_blocks())
    }

    fn named(&self, blocks: Blocks<'a>) -> Blocks<'a> {
        Blocks { first_slot: blocks.first_slot + self.first_slot, ..blocks }
    }

    /// Scans all items of lists, one after the other.
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

    /// The first pass's codes, where it has some and a query comes with tables.
    pub(super) fn codes_for<'t>(&self, tables: Option<&'t Tables>) -> Option<(&'a ItemCodes, &'t Tables)> {
        self.index.first_pass.as_ref().zip(tables)
    }

    /// Scans the codes of a list, before those of the next one: of all items, or, where there are words, of those that they name.
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

    /// Counts a list all items of which were scored by their codes.
    pub(super) fn count_codes(&self, codes: &ItemCodes, list: ListId, counters: &mut Counters) {
        self.count(list, codes.block_bytes(), counters);
    }

    /// Counts a list all items of which were scored.
    pub(super) fn count_whole(&self, list: ListId, counters: &mut Counters) {
        self.count(list, self.index.block_bytes(), counters);
    }

    fn count(&self, list: ListId, block_bytes: u64, counters: &mut Counters) {
        let length = self.index.list_lengths[list.index()] as usize;
        counters.items += length as u64;
        counters.survivors += length as u64;
        counters.bytes += length.div_ceil(BLOCK) as u64 * block_bytes;
    }

    /// Offers slots of its own, scored as [`Index::product`] does: the way of posting lists.
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

    /// Offers every item whose own slot `eligible` lets pass, scored as [`Index::product`] does: exact search.
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
