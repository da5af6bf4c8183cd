//! Items that a filter lets pass which knows nothing of the embedding: drawn by a hash of their slots.

use crate::ivf;
use crate::units::ListId;

/// Shares of the items that are drawn.
pub(super) const PASS_RATES: [f64; 5] = [1.0, 0.5, 0.1, 0.01, 0.001];

/// Items of a pass rate.
pub(super) struct Share {
    /// Bits of the items, list after list; empty where all pass.
    pub(super) words: Vec<u64>,
    /// `[C + 1]`: where the words of each list begin.
    pub(super) offsets: Vec<usize>,
    /// Those in each list, `[C]`.
    pub(super) survivors: Vec<u32>,
    pub(super) items: usize,
}

impl Share {
    /// The bits of a list's items.
    pub(super) fn words_of(&self, list: ListId) -> &[u64] {
        &self.words[self.offsets[list.index()]..self.offsets[list.index() + 1]]
    }

    /// Draws a share of the items of an index.
    pub(super) fn draw(index: &ivf::Index, pass_rate: f64, seed: u64) -> Self {
        let survivors = index.list_lengths().to_vec();
        let mut share = Share { words: Vec::new(), offsets: vec![0], survivors, items: index.items() };
        if pass_rate >= 1.0 {
            return share;
        }
        share.items = 0;
        for list in 0..index.lists() {
            let (first, end) = (index.list_offsets()[list], index.list_offsets()[list + 1]);
            let at = share.words.len();
            share.words.resize(at + ((end - first) as usize).div_ceil(64), 0);
            let before = share.items;
            for n in 0..index.list_lengths()[list] {
                if (random(seed, u64::from(first + n)) as f64) < pass_rate * u64::MAX as f64 {
                    share.words[at + n as usize / 64] |= 1 << (n % 64);
                    share.items += 1;
                }
            }
            share.survivors[list] = (share.items - before) as u32;
            share.offsets.push(share.words.len());
        }
        share
    }
}

/// A number that looks random, of a seed and another number (splitmix64).
pub(super) fn random(seed: u64, n: u64) -> u64 {
    let mut x = seed.wrapping_add(n.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}
