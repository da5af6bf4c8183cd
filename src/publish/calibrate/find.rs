//! What queries find in an index, or in a shard of one: the true best of every share of the items, by each of their scores. All of a
//! calibration follows from it and from the lists.

use super::depth::{PASS_RATE_MIN, SELECTED_MAX};
use super::measured::Measured;
use super::share::{PASS_RATES, Share, random};
use crate::device::priority::breathe;
use crate::ivf::{self, Probing, WideRows, Words};
use crate::topk::{Selector, key, unkey};
use crate::units::{ListId, Slot};

/// Items of which a query tells how far they score above their lists.
const MARGINS: usize = 4096;
/// How many the first pass's codes are asked for: one of them may be the item that the query was made of.
pub(super) const CODED: usize = SELECTED_MAX + 1;

/// How many int8 rows select for the best `k`.
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
    /// Its score by int8 rows or codes, and by rows.
    pub(super) code: f32,
    pub(super) row: f32,
    /// Its slot in the whole.
    pub(super) place: u32,
}

impl Scored {
    /// What ranks it among others that were selected, the best first.
    fn rank(&self) -> std::cmp::Reverse<u64> {
        std::cmp::Reverse(key(self.code, Slot(self.place)))
    }
}

/// What a query found among the items of a share.
#[derive(Clone, Debug, Default)]
pub(super) struct FoundIn {
    /// The best by int8 rows, best first.
    pub(super) best: Vec<Scored>,
    /// The best by codes, best first, without scores by rows; none where there are no codes, or few items pass.
    pub(super) coded: Vec<Scored>,
}

impl FoundIn {
    pub(super) fn clear(&mut self) {
        self.best.clear();
        self.coded.clear();
    }

    /// Keeps of what several shards found what the whole finds: so many by int8 rows.
    pub(super) fn keep_best(&mut self, by_rows: usize) {
        for (found, most) in [(&mut self.best, by_rows), (&mut self.coded, CODED)] {
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
            self.search(measured, query, (share, probing, selected(k[n])), &mut found.best);
            self.score(index, query, &mut found.best);
            // What was found told slots of the index until here.
            found.best.iter_mut().for_each(|scored| scored.place = measured.place(scored.place));
            breathe();
            if is_coded(n) && index.has_first_pass() {
                let by_codes = Probing { by_codes: true, ..probing };
                self.search(measured, query, (share, by_codes, CODED), &mut found.coded);
                found.coded.iter_mut().for_each(|scored| scored.place = measured.place(scored.place));
            }
        }
    }

    /// Selects so many of a share, by their slots in the index.
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
        let keys = self.selector.finish().iter().map(|&key| unkey(key));
        found.extend(keys.map(|(code, slot)| Scored { code, row: code, place: slot.0 }));
    }

    /// Scores by rows what was selected, where there are any.
    fn score(&mut self, index: &ivf::Index, query: &[f32], found: &mut [Scored]) {
        if matches!(index.rows(), WideRows::None) {
            return;
        }
        self.slots.clear();
        self.slots.extend(found.iter().map(|scored| scored.place));
        self.products.resize(self.slots.len(), 0.0);
        index.products(query, &self.slots, &mut self.products);
        found.iter_mut().zip(&self.products).for_each(|(scored, product)| scored.row = *product);
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
