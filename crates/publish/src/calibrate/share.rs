//! Random items that simulate a filter that is independent of the embedding: sampled by a hash of their slots.

use super::measured::Measured;
use sterling_core::random::{GAMMA, splitmix64};
use sterling_core::units::{ListId, Slot};
use sterling_index::topk::Selector;

/// Pass rates at which the index is measured: fractions of the items that are sampled.
pub(super) const PASS_RATES: [f64; 5] = [1.0, 0.5, 0.1, 0.01, 0.001];

/// Random items that pass at one pass rate.
pub(super) struct Share {
    /// Bitmap of the items, list after list; empty if all items pass.
    pub(super) words: Vec<u64>,
    /// Index of each list's first word in the bitmap, and the number of words, `[C + 1]`.
    pub(super) offsets: Vec<usize>,
    pub(super) passing: Passing,
}

/// Number of random items that pass.
#[derive(Clone)]
pub(super) struct Passing {
    /// Number of passing items per list, `[C]`.
    pub(super) of_lists: Vec<u32>,
    /// Total number of passing items.
    pub(super) items: usize,
}

impl Passing {
    /// Creates the counts from the number of passing items per list.
    pub(super) fn of(of_lists: Vec<u32>) -> Self {
        let items = of_lists.iter().map(|&n| n as usize).sum();
        Passing { of_lists, items }
    }
}

impl Share {
    /// Returns the bitmap of a list's items.
    pub(super) fn words_of(&self, list: ListId) -> &[u64] {
        &self.words[self.offsets[list.index()]..self.offsets[list.index() + 1]]
    }

    /// Offers the passing items of a list to a selector, given the scores and slots of all its items.
    pub(super) fn offer(&self, list: ListId, scores: &[f32], slots: &[u32], selector: &mut Selector) {
        if self.words.is_empty() {
            selector.offer(scores, slots, 0);
            return;
        }
        for (word, (scores, slots)) in self.words_of(list).iter().zip(scores.chunks(64).zip(slots.chunks(64))) {
            let mut left = *word;
            while left != 0 {
                let n = left.trailing_zeros() as usize;
                selector.push(scores[n], Slot(slots[n]));
                left &= left - 1;
            }
        }
    }

    /// Samples items of an index at a pass rate, by a hash of their slots in the complete index.
    pub(super) fn draw(measured: &Measured<'_>, pass_rate: f64, seed: u64) -> Self {
        let index = measured.index;
        if pass_rate >= 1.0 {
            let passing = Passing::of(index.list_lengths().to_vec());
            return Share { words: Vec::new(), offsets: vec![0], passing };
        }
        let (mut words, mut offsets) = (Vec::new(), vec![0]);
        let mut of_lists = vec![0; index.lists()];
        for (list, survivors) in of_lists.iter_mut().enumerate() {
            let (first, end) = (index.list_offsets()[list], index.list_offsets()[list + 1]);
            let at = words.len();
            words.resize(at + ((end - first) as usize).div_ceil(64), 0);
            for n in 0..index.list_lengths()[list] {
                if (random(seed, u64::from(measured.place(first + n))) as f64) < pass_rate * u64::MAX as f64 {
                    words[at + n as usize / 64] |= 1 << (n % 64);
                    *survivors += 1;
                }
            }
            offsets.push(words.len());
        }
        Share { words, offsets, passing: Passing::of(of_lists) }
    }
}

/// Selects the random item set of each pass rate for the `n`-th query.
pub(super) fn of_query<T>(draws: &[Vec<T>], n: usize) -> Vec<&T> {
    draws.iter().map(|draws| &draws[n % draws.len()]).collect()
}

/// Returns the `n`-th pseudorandom number of a seed.
pub(super) fn random(seed: u64, n: u64) -> u64 {
    splitmix64(seed.wrapping_add(n.wrapping_mul(GAMMA)))
}
