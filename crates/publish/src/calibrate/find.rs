//! What queries find in an index, or in a shard of one: the true best of every share of the items by their widest rows, and the best by
//! int8 rows and by codes, which lose some of them. All of a calibration follows from it and from the lists.

use super::depth::{PASS_RATE_MIN, SELECTED_MAX};
use super::measured::Measured;
use super::share::{PASS_RATES, Share, random};
use sterling_core::units::{ListId, Slot};
use sterling_index::ivf::{self, Probing, WideRows, Words};
use sterling_index::topk::{Selector, key, unkey};
use sterling_kernels::priority::breathe;

/// Items of which a query tells how far they score above their lists.
const MARGINS: usize = 4096;
/// How many the first pass's codes are asked for: one of them may be the item that the query was made of.
pub(super) const CODED: usize = SELECTED_MAX + 1;

/// Slots whose rows are scored together.
const ROWS_AT_ONCE: usize = 1024;
/// How many of these pass between two looks at whether others need the processor.
const BREATH_ROWS: usize = 64 * ROWS_AT_ONCE;

/// How many int8 rows are asked for of the best `k`, one of which may be the item that the query was made of.
pub(super) fn selected(k: usize) -> usize {
    k + 1 + k / 4 + 64
}

/// True for shares in which codes are measured.
pub(super) fn is_coded(share: usize) -> bool {
    PASS_RATES[share] >= PASS_RATE_MIN
}

/// An item that a query found.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scored {
    /// Its score by the widest rows, by int8 rows or by codes.
    pub(super) score: f32,
    /// Its slot in the whole.
    pub(super) place: u32,
}

impl Scored {
    /// What ranks it among others by the same scores, the best first.
    fn rank(&self) -> std::cmp::Reverse<u64> {
        std::cmp::Reverse(key(self.score, Slot(self.place)))
    }
}

/// What a query found among the items of a share.
#[derive(Clone, Debug, Default)]
pub(super) struct FoundIn {
    /// The best by the widest rows that are kept, best first.
    pub(super) best: Vec<Scored>,
    /// The best by int8 rows, best first; none where these are the widest.
    pub(super) int8: Vec<Scored>,
    /// The best by codes, best first; none where there are no codes, or few items pass.
    pub(super) coded: Vec<Scored>,
}

impl FoundIn {
    pub(super) fn clear(&mut self) {
        self.best.clear();
        self.int8.clear();
        self.coded.clear();
    }

    /// Keeps of what several shards found what the whole finds for the best `k`.
    pub(super) fn keep_best(&mut self, k: usize) {
        for (found, most) in [(&mut self.best, k + 1), (&mut self.int8, selected(k)), (&mut self.coded, CODED)] {
            found.sort_unstable_by_key(Scored::rank);
            found.truncate(most);
        }
    }
}

/// The memory of one thread.
#[derive(Default)]
pub(super) struct Finder {
    scratch: ivf::Scratch,
    selector: Selector,
    slots: Vec<u32>,
    products: Vec<f32>,
}

impl Finder {
    /// Finds the best `k` of each share for a query; nothing of shares of which none are wanted.
    pub(super) fn find(
        &mut self,
        measured: &Measured<'_>,
        query: &[f32],
        (shares, k): (&[&Share], &[usize]),
        found: &mut [FoundIn],
    ) {
        let index = measured.index;
        for (n, (share, found)) in shares.iter().zip(found).enumerate() {
            found.clear();
            if k[n] == 0 {
                continue;
            }
            let probing = Probing { may_read_rows: false, ..Probing::of(index.lists(), index.lists()) };
            match index.rows() {
                WideRows::None => self.search(measured, query, (share, probing, k[n] + 1), &mut found.best),
                _ => {
                    self.search_rows(measured, query, (share, k[n] + 1), &mut found.best);
                    self.search(measured, query, (share, probing, selected(k[n])), &mut found.int8);
                }
            }
            breathe();
            if is_coded(n) && index.has_first_pass() {
                let by_codes = Probing { by_codes: true, ..probing };
                self.search(measured, query, (share, by_codes, CODED), &mut found.coded);
            }
        }
    }

    /// Selects so many of a share by their widest rows, all of which are read.
    fn search_rows(
        &mut self,
        measured: &Measured<'_>,
        query: &[f32],
        (share, most): (&Share, usize),
        found: &mut Vec<Scored>,
    ) {
        let Finder { selector, slots, products, .. } = self;
        let index = measured.index;
        selector.reset(most);
        let mut score = |slots: &mut Vec<u32>| {
            products.resize(slots.len(), 0.0);
            index.products(query, slots, products);
            selector.offer(products, slots, 0);
            slots.clear();
        };
        slots.clear();
        let mut read = 0;
        for list in (0..index.lists()).map(|list| ListId(list as u32)) {
            let (first, length) = (index.list_offsets()[list.index()], index.list_lengths()[list.index()]);
            let passes = |n: &u32| share.passes(list, *n);
            slots.extend((0..length).filter(passes).map(|n| first + n));
            if slots.len() >= ROWS_AT_ONCE {
                read += slots.len();
                score(slots);
            }
            if read >= BREATH_ROWS {
                read = 0;
                breathe();
            }
        }
        score(slots);
        self.take(measured, found);
    }

    /// Takes what was selected, by slots in the whole.
    fn take(&mut self, measured: &Measured<'_>, found: &mut Vec<Scored>) {
        let keys = self.selector.finish().iter().map(|&key| unkey(key));
        found.extend(keys.map(|(score, slot)| Scored { score, place: measured.place(slot.0) }));
    }

    /// Selects so many of a share by int8 rows or codes.
    fn search(
        &mut self,
        measured: &Measured<'_>,
        query: &[f32],
        (share, probing, most): (&Share, Probing<'_>, usize),
        found: &mut Vec<Scored>,
    ) {
        self.selector.reset(most);
        let mut fill = |list: ListId, out: &mut [u64]| out.copy_from_slice(share.words_of(list));
        let words: Option<Words<'_>> = if share.words.is_empty() { None } else { Some(&mut fill) };
        measured.index.search(query, probing, words, &mut self.selector, most, &mut self.scratch);
        self.take(measured, found);
    }
}

/// A sample of the items of the whole for the `n`-th query, those that the index holds: slots in the whole, rising, each with the item's
/// score.
pub(super) fn sample(measured: &Measured<'_>, drawn: &[u32], query: &[f32]) -> Vec<(u32, f32)> {
    let own = drawn.iter().filter_map(|&place| Some((place, measured.own(place)?.0)));
    let (places, slots): (Vec<u32>, Vec<u32>) = own.unzip();
    let mut products = vec![0.0; slots.len()];
    measured.index.products(query, &slots, &mut products);
    breathe();
    places.into_iter().zip(products).collect()
}

/// The slots of a sample of the items for the `n`-th query, rising.
pub(super) fn drawn(filled: &super::measured::Filled<'_>, seed: u64, n: usize) -> Vec<u32> {
    let draw = |m| filled.nth(random(seed, n as u64 * MARGINS as u64 + m) as usize % filled.len());
    let mut drawn: Vec<u32> = (0..MARGINS as u64).map(draw).collect();
    drawn.sort_unstable();
    drawn
}
