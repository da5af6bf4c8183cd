//! Filtered search: scans all lists, or the best lists while these yield enough candidates, or lists until a calibrated
//! recall is reached.
//!
//! A block is read entirely even for one passing item. If few items pass and rescoring rows are available, the rows are
//! read instead. Example with 128 dimensions: if a tenth of the items passes, four fifths of the blocks are read, which
//! is 1 KB per passing item, whereas a row in half precision has 256 bytes.
//!
//! With first-pass codes, passing items are always scored by codes, regardless of their number. So an item has the
//! same score in a shard, whose lists are shorter, as in the complete index. Codes are inexact: the items with the best
//! code scores include those whose code score is too high by chance. Before a search stops by its results, the results
//! are therefore scored by rows.

use std::ops::Range;
use std::time::Instant;

use super::check_interval::CheckInterval;
use super::first_pass::Tables;
use super::own_lists::OwnQuery;
use super::probing::{Counters, Probing, RemainingItems, Scratch};
use super::termination::{Ending, Seen};
use super::union::Union;
use super::view::{Index, WideRows};
use crate::topk::{Selector, key, unkey};
use sterling_core::units::{ListId, Slot};
use sterling_kernels::cpu::kernels::{BLOCK, Pick};

/// Callback that fills the filter bitmap of a list, one bit per item.
pub type Words<'a> = &'a mut dyn FnMut(ListId, &mut [u64]);
/// Callback that fills the filter bitmap of a list of one of several segments; its first argument is the number of the segment.
pub type MemberWords<'a> = &'a mut dyn FnMut(usize, ListId, &mut [u64]);

/// Cost of a byte of scattered rows, relative to a byte of sequentially read blocks.
const ROW_COST: u64 = 2;
/// Passing items that are collected before their rows are scored, so that enough memory loads are in flight.
const ROWS_AT_ONCE: usize = 1024;
/// Blocks with passing items that are collected before they are scored.
const PICKS_AT_ONCE: usize = 512;

/// Lists whose bitmaps are filled at a time, so that two clock readings serve all these lists.
const LISTS_AT_ONCE: usize = 16;

/// Query of a filtered search.
#[derive(Clone, Copy)]
pub(super) struct FilteredQuery<'a> {
    /// Query vector, `[D]`.
    pub(super) vector: &'a [f32],
    /// Query tables, if first-pass codes are scanned.
    pub(super) tables: Option<&'a Tables>,
    /// Number of candidates, K0.
    pub(super) k0: usize,
    /// True if passing items may be scored by their rows, as [`Probing::may_read_rows`].
    pub(super) may_read_rows: bool,
}

/// Filtered search in progress.
pub(super) struct Filtered<'a, 'w> {
    union: Union<'a>,
    query: FilteredQuery<'a>,
    words: MemberWords<'w>,
    selector: &'a mut Selector,
    scratch: &'a mut Scratch,
    counters: Counters,
    /// Excess of the threshold of the results in code scores over the threshold in row scores, at the last check.
    above_rows: f32,
    /// Score that unscanned lists had to beat at the last check, and the number of selected items that reached it at that
    /// check.
    reached: Option<(f32, usize)>,
}

impl<'a, 'w> Filtered<'a, 'w> {
    /// Creates a search.
    pub(super) fn of(
        union: Union<'a>,
        query: FilteredQuery<'a>,
        words: MemberWords<'w>,
        selector: &'a mut Selector,
        scratch: &'a mut Scratch,
    ) -> Self {
        Filtered {
            union,
            query,
            words,
            selector,
            scratch,
            counters: Counters::default(),
            above_rows: 0.0,
            reached: None,
        }
    }

    /// Runs the search until the criterion of `probing`, whose numbers fit the index, is met.
    pub(super) fn run(mut self, probing: Probing<'_>) -> Counters {
        let members = self.union.members;
        self.scratch.left.resize_with(members.len().max(self.scratch.left.len()), RemainingItems::default);
        let has_lists = members.iter().any(|member| self.union.has_lists(member));
        if !has_lists || probing.takes_all(self.lists()) {
            self.every(has_lists);
        } else {
            let probing = Probing { probes_max: self.union.extend_to_own_lists(probing.probes_max), ..probing };
            match probing.ending {
                None => self.on(probing),
                Some(ending) => self.until(probing, ending),
            }
            self.scan_whole_lists();
        }
        self.score_left();
        self.counters
    }

    fn lists(&self) -> usize {
        self.union.lists.lists()
    }

    /// Scans the passing items of every list; `has_lists` is true if segments use the lists of the index.
    fn every(&mut self, has_lists: bool) {
        let union = self.union;
        union.lists.quantize(self.query.vector, &mut self.scratch.query);
        self.counters.lists = if has_lists { union.extend_to_own_lists(self.lists()) as u64 } else { 0 };
        for (number, member) in union.members.iter().enumerate() {
            self.scratch.requested.extend(member.filled_lists().map(|list| (number, list)));
            self.scan_asked();
        }
    }

    /// Scans the passing items of the lists that every search scans.
    fn scan_whole_lists(&mut self) {
        let union = self.union;
        for (number, member) in union.members.iter().enumerate() {
            let lists = member.filled_of(union.always_scanned_lists(member));
            self.scratch.requested.extend(lists.map(|list| (number, list)));
            self.scan_asked();
        }
    }

    /// Scans the passing items of the best lists, and continues with further lists while these yield enough candidates.
    fn on(&mut self, probing: Probing<'_>) {
        self.score_lists();
        let mut done = 0;
        for look in probing.looks(self.lists(), CheckInterval::Often) {
            let end = look.min(probing.probes_max);
            let before = self.selector.accepted();
            self.scan_ordered(done..end);
            let gained = self.selector.accepted() - before;
            let enough = self.counters.survivors >= self.query.k0 as u64;
            let brings_little = done > 0 && (gained as f64) < probing.gain_min(self.query.k0, look - done);
            if end == probing.probes_max || enough && brings_little {
                break;
            }
            done = end;
            if enough {
                // Later lists must beat the score of the K0-th best item so far.
                self.selector.shrink();
            }
        }
    }

    /// Scans lists, best score first, until the rest is expected to hold at most the fraction `ending.left` of the best K0 items.
    /// Lists without passing items cost only their bitmaps.
    fn until(&mut self, probing: Probing<'_>, ending: Ending<'_>) {
        self.score_lists();
        let Filtered { union, query, scratch, .. } = self;
        let probing = probing.for_query(&scratch.scores[..union.lists.lists()], &scratch.query);
        let Scratch { ahead, scores, lengths, .. } = &mut **scratch;
        union.list_lengths(lengths);
        ahead.begin(query.vector, scores.iter().copied().zip(lengths.iter().copied()));
        let mut done = 0;
        let mut before = self.counters;
        for look in probing.looks(self.lists(), CheckInterval::Often) {
            let range = done..look.min(probing.probes_max);
            self.scan_ordered(range.clone());
            let Scratch { ahead, lists, lengths, .. } = &mut *self.scratch;
            for (score, list) in lists[range].iter().map(|&key| unkey(key)) {
                ahead.take(score, lengths[list.index()]);
            }
            if look >= probing.probes_max || self.expects_no_more_than(&before, &probing, ending) {
                return;
            }
            (before, done) = (self.counters, look);
        }
    }

    /// Termination check: true if enough items were found, the last lists contributed little, and the unscanned ones are
    /// expected to hold at most what `ending` allows. `before` are the counters at the last check.
    fn expects_no_more_than(&mut self, before: &Counters, probing: &Probing<'_>, ending: Ending<'_>) -> bool {
        let lately =
            (self.counters.survivors - before.survivors) as f64 / (self.counters.items - before.items).max(1) as f64;
        self.scratch.ahead.passed(lately);
        let found = ending.found(self.query.k0);
        let Some(threshold) = self.selector.kth(found) else { return false };
        let gained = self.gained(threshold);
        let passing = probing.pass_rate * self.union.items_in_lists() as f64;
        let seen = Seen { passing, survivors: self.counters.survivors, above: found as u64, lately };
        let (ahead, left) = (&mut self.scratch.ahead, ending.left * self.query.k0 as f64);
        let brought_much = gained.is_some_and(|gained| gained >= ending.gain_max(self.query.k0));
        // The recall target may be reached with fewer items than the request wants.
        let is_short = self.counters.survivors < probing.least as u64;
        if is_short || brought_much || ahead.expected(threshold - self.above_rows, seen, ending.margins) > left {
            return false;
        }
        if self.query.tables.is_none() {
            return true;
        }
        let by_rows = self.kth_by_rows(found);
        self.above_rows = threshold - by_rows;
        self.scratch.ahead.expected(by_rows, seen, ending.margins) <= left
    }

    /// Returns the number of selected items found since the last check that beat the threshold of that check; `None` at
    /// the first check. `threshold` is the threshold of this check.
    fn gained(&mut self, threshold: f32) -> Option<usize> {
        let gained = self.reached.map(|(before, reached)| match self.selector.threshold() > before {
            // All selected items count, because it is unknown how many reached the score and were removed again.
            true => self.query.k0,
            false => self.selector.reaching(before).saturating_sub(reached),
        });
        self.reached = Some((threshold, self.selector.reaching(threshold)));
        gained
    }

    /// Returns the `k`-th best row score among the selected items, of which there must be at least `k`.
    fn kth_by_rows(&mut self, k: usize) -> f32 {
        let Filtered { union, query, selector, scratch, .. } = self;
        let Scratch { row_slots, products, .. } = &mut **scratch;
        selector.shrink();
        let mut scores = Vec::with_capacity(selector.len());
        for (number, member) in union.members.iter().enumerate() {
            let next = union.members.get(number + 1).map_or(u32::MAX, |next| next.first_slot);
            row_slots.clear();
            let own = selector.slots().iter().filter(|slot| (member.first_slot..next).contains(slot));
            row_slots.extend(own.map(|slot| slot - member.first_slot));
            products.resize(row_slots.len(), 0.0);
            member.index.products(query.vector, row_slots, products);
            scores.extend_from_slice(products);
        }
        *scores.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1
    }

    fn score_lists(&mut self) {
        let start = Instant::now();
        self.union.lists.score_lists(self.query.vector, self.scratch);
        self.score_own_lists();
        self.counters.probe_time = start.elapsed();
    }

    /// Scores the lists that only one segment has, if they are selected by score. They are numbered after those of the
    /// index.
    fn score_own_lists(&mut self) {
        let lists = self.lists();
        let Filtered { union, query, scratch, .. } = self;
        let Scratch { query: int8, own: scored, scores, lists: keys, .. } = &mut **scratch;
        scores.truncate(lists);
        for (_, member, own, ranked) in union.ranked() {
            member.score_own(own, ranked, OwnQuery::of(query.vector, int8), scored);
            let first = scores.len();
            keys.extend(scored.scores.iter().enumerate().map(|(n, &score)| key(score, Slot((first + n) as u32))));
            scores.extend_from_slice(&scored.scores);
        }
    }

    /// Scans the passing items of the lists at these ranks, for all segments that have them.
    fn scan_ordered(&mut self, range: Range<usize>) {
        self.scratch.order(range.end);
        self.counters.lists += range.len() as u64;
        let (union, Scratch { lists, requested, .. }) = (self.union, &mut *self.scratch);
        for &key in &lists[range] {
            let list = ListId(unkey(key).1.0);
            if let Some((number, own)) = union.owner(list) {
                requested.extend(union.members[number].filled_of(std::iter::once(own)).map(|own| (number, own)));
                continue;
            }
            for (number, member) in union.members.iter().enumerate() {
                if union.has_lists(member) && member.index.list_lengths[list.index()] > 0 {
                    requested.push((number, list));
                }
            }
        }
        self.scan_asked();
        self.score_left();
    }

    /// Collects the passing items of the queued lists for [`Filtered::score_left`].
    fn scan_asked(&mut self) {
        let mut requested = std::mem::take(&mut self.scratch.requested);
        for lists in requested.chunks(LISTS_AT_ONCE) {
            self.fill_words(lists);
            let mut from = 0;
            for (n, &(number, list)) in lists.iter().enumerate() {
                let words = from..from + self.union.members[number].index.words_of(list);
                from = words.end;
                let next = lists.get(n + 1).filter(|(other, _)| *other == number).map(|(_, list)| *list);
                self.take_survivors(number, (list, next), words);
            }
        }
        requested.clear();
        self.scratch.requested = requested;
    }

    /// Fills the bitmaps of lists, one after the other.
    fn fill_words(&mut self, lists: &[(usize, ListId)]) {
        let start = Instant::now();
        let Filtered { union, scratch, words, .. } = self;
        let mut from = 0;
        for &(number, list) in lists {
            let end = from + union.members[number].index.words_of(list);
            if end > scratch.words.len() {
                scratch.words.resize(end, 0);
            }
            words(number, list, &mut scratch.words[from..end]);
            from = end;
        }
        self.counters.words_time += start.elapsed();
    }

    /// Scores the passing items of a list of one segment by codes, or collects them for later scoring.
    fn take_survivors(&mut self, number: usize, (list, next): (ListId, Option<ListId>), words: Range<usize>) {
        let Filtered { union, query, selector, scratch, counters, .. } = self;
        let member = &union.members[number];
        let index = member.index;
        let words = &scratch.words[words];
        let first = index.list_offsets[list.index()];
        counters.items += u64::from(index.list_lengths[list.index()]);
        counters.bytes += words.len() as u64 * 8;
        let survivors: u64 = words.iter().map(|w| u64::from(w.count_ones())).sum();
        if survivors == 0 {
            return;
        }
        counters.survivors += survivors;
        let blocks = words.iter().map(|&w| u64::from(blocks_of(w))).sum::<u64>();
        if let Some((codes, tables)) = member.codes_for(query.tables) {
            counters.bytes += blocks * codes.block_bytes();
            member.scan_codes((codes, words), (list, next), (query.vector, tables), selector);
            return;
        }
        let RemainingItems { pending, picks } = &mut scratch.left[number];
        let blocks = blocks * index.block_bytes();
        let rows = survivors * index.row_bytes();
        if !query.may_read_rows || !index.reads_rows(rows, blocks) {
            counters.bytes += blocks;
            for (n, &word) in words.iter().enumerate() {
                let mut left = word;
                while left != 0 {
                    let quarter = left.trailing_zeros() / BLOCK as u32;
                    let block = first / BLOCK as u32 + n as u32 * 4 + quarter;
                    picks.push(Pick { block, mask: (left >> (quarter * BLOCK as u32)) as u16 });
                    left &= !(u64::from(u16::MAX) << (quarter * BLOCK as u32));
                }
            }
        } else {
            counters.bytes += rows;
            for (n, &word) in words.iter().enumerate() {
                let mut left = word;
                while left != 0 {
                    pending.push(first + n as u32 * 64 + left.trailing_zeros());
                    left &= left - 1;
                }
            }
        }
        if pending.len() >= ROWS_AT_ONCE || picks.len() >= PICKS_AT_ONCE {
            self.score_left_of(number);
        }
    }

    /// Scores the collected items.
    fn score_left(&mut self) {
        (0..self.union.members.len()).for_each(|number| self.score_left_of(number));
    }

    /// Scores the collected items of one segment, by blocks or by rows.
    fn score_left_of(&mut self, number: usize) {
        let Filtered { union, query: requested, selector, scratch, .. } = self;
        let member = &union.members[number];
        let Scratch { query, left, products, .. } = &mut **scratch;
        let RemainingItems { pending, picks } = &mut left[number];
        selector.scan_picks(member.index.kernels, &member.all_blocks(), picks, &query.view());
        picks.clear();
        products.resize(pending.len(), 0.0);
        member.index.products(requested.vector, pending, products);
        selector.offer(products, pending, member.first_slot);
        pending.clear();
    }
}

impl Index {
    /// Returns the number of bitmap words of a list.
    fn words_of(&self, list: ListId) -> usize {
        ((self.list_offsets[list.index() + 1] - self.list_offsets[list.index()]) as usize).div_ceil(64)
    }

    /// Returns true if reading the rows of the passing items is cheaper than reading their blocks, given the bytes of both.
    pub fn reads_rows(&self, rows: u64, blocks: u64) -> bool {
        !matches!(self.rows, WideRows::None) && rows * ROW_COST <= blocks
    }

    /// Returns the cost of the passing items as an equivalent of block bytes, given the bytes of their rows and of their blocks.
    pub fn survivor_bytes(&self, rows: u64, blocks: u64) -> u64 {
        if self.reads_rows(rows, blocks) { rows * ROW_COST } else { blocks }
    }
}

/// Returns the number of 16-item blocks in which a word has bits.
fn blocks_of(word: u64) -> u32 {
    const FIRSTS: u64 = 0x0001_0001_0001_0001;
    let halves = word | word >> 8;
    let quarters = halves | halves >> 4;
    let pairs = quarters | quarters >> 2;
    ((pairs | pairs >> 1) & FIRSTS).count_ones()
}
