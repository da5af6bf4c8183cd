//! Top-k selection: a threshold that rises, and a buffer that is partitioned when it is full, instead of a heap.
//!
//! Kernels write scores that reach the threshold, with their slots, directly into a buffer somewhat larger than K. When the
//! buffer is full, the K-th best score becomes the threshold and lower scores are removed. Each scored item costs one
//! comparison, and each accepted item O(1) on average, independently of K.
//!
//! A result is one 64-bit key: the bits of the score in an order-preserving form, then the inverted slot, so that a larger key is
//! a better result. Ties rank by the lower item id if the selector has ids, else by the lower slot. Ids are looked up only for
//! ties, which are rare.

mod sort;

use sterling_core::units::Slot;
use sterling_kernels::buffer::Buffer;
use sterling_kernels::cpu::Kernels;
use sterling_kernels::cpu::kernels::{BLOCK, Blocks, CodeBlocks, CodeQuery, Int8Query, Lane, Pick, Staging};

/// Buffer space beyond K before a partition, in addition to a share of K.
const ROOM_MIN: usize = 256;

/// Packs a score and a slot into a number that sorts in rank order.
pub fn key(score: f32, slot: Slot) -> u64 {
    // Adding +0 turns -0 into +0, so that keys order as scores compare.
    let bits = (score + 0.0).to_bits();
    let ordered = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(ordered) << 32 | u64::from(!slot.0)
}

/// Unpacks the score and the slot of a key.
pub fn unkey(key: u64) -> (f32, Slot) {
    let ordered = (key >> 32) as u32;
    let bits = if ordered >> 31 == 1 { ordered & !(1 << 31) } else { !ordered };
    (f32::from_bits(bits), Slot(!(key as u32)))
}

/// First slot of a segment, and the item ids from that slot on.
type IdsFrom = (u32, Buffer<i64>);

/// Returns the number by which an item ranks among items of equal score, lowest first.
fn rank(ids: &[IdsFrom], slot: u32) -> u64 {
    match ids.iter().rev().find(|(first, _)| *first <= slot) {
        // Flipping the sign bit maps the order of signed numbers to that of unsigned ones.
        Some((first, ids)) => ids[(slot - first) as usize] as u64 ^ 1 << 63,
        None => u64::from(slot),
    }
}

/// Collects the K best scored slots.
#[derive(Clone, Debug)]
pub struct Selector {
    kernels: Kernels,
    k: usize,
    scores: Vec<f32>,
    slots: Vec<u32>,
    len: usize,
    room: usize,
    threshold: f32,
    accepted: u64,
    /// Item ids by ascending first slots, until the result is taken.
    ids: Vec<IdsFrom>,
    spare: Vec<f32>,
    keys: Vec<u64>,
    sorting: Vec<u64>,
}

impl Default for Selector {
    fn default() -> Self {
        Selector::new()
    }
}

impl Selector {
    /// Creates a selector that selects nothing; call [`Selector::reset`] before use.
    pub fn new() -> Self {
        Selector {
            kernels: Kernels::best(),
            k: 0,
            scores: Vec::new(),
            slots: Vec::new(),
            len: 0,
            room: 0,
            threshold: f32::INFINITY,
            accepted: 0,
            ids: Vec::new(),
            spare: Vec::new(),
            keys: Vec::new(),
            sorting: Vec::new(),
        }
    }

    /// Clears the selector to select the `k` best, with ties by slot. Reuses its buffers.
    pub fn reset(&mut self, k: usize) {
        self.ids.clear();
        self.k = k;
        self.len = 0;
        self.accepted = 0;
        self.threshold = if k == 0 { f32::INFINITY } else { f32::NEG_INFINITY };
        self.set_room(k + k / 2 + ROOM_MIN + BLOCK);
    }

    /// Like [`Selector::reset`], but with ties by id: each of `ids` has the items from a first slot on, in ascending order.
    pub fn reset_by_id<'a>(&mut self, k: usize, ids: impl Iterator<Item = (u32, &'a Buffer<i64>)>) {
        self.reset(k);
        self.ids.extend(ids.map(|(first, ids)| (first, ids.clone())));
    }

    fn set_room(&mut self, room: usize) {
        self.room = room;
        if self.scores.len() < room {
            self.scores.resize(room, 0.0);
            self.slots.resize(room, 0);
        }
    }

    /// Returns the requested number of results, K.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Returns the minimum score for an item to be accepted; it only rises.
    pub fn threshold(&self) -> f32 {
        self.threshold
    }

    /// Returns the number of items that reached the threshold when they were offered.
    pub fn accepted(&self) -> u64 {
        self.accepted
    }

    /// Returns the number of collected slots, at most K after [`Selector::finish`].
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if nothing was collected.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the buffer that a kernel may fill before the next partition.
    fn staging(&mut self) -> Staging<'_> {
        Staging { scores: &mut self.scores[..self.room], slots: &mut self.slots[..self.room], len: self.len }
    }

    fn staged(&mut self, len: usize) {
        self.accepted += (len - self.len) as u64;
        self.len = len;
        if self.len + BLOCK > self.room {
            self.shrink();
        }
    }

    /// Collects the items that `scan` stages from `count` blocks or picks. `scan` gets the number of the next block or pick
    /// and the threshold, and returns where it stopped.
    #[inline]
    fn keep_staged(&mut self, count: usize, scan: impl Fn(usize, f32, &mut Staging<'_>) -> usize) {
        let mut next = 0;
        while next < count {
            let threshold = self.threshold;
            let mut staging = self.staging();
            next = scan(next, threshold, &mut staging);
            let len = staging.len;
            self.staged(len);
        }
    }

    /// Scans blocks and collects the items that reach the threshold.
    pub fn scan(&mut self, kernels: Kernels, blocks: &Blocks<'_>, query: &Int8Query<'_>) {
        self.keep_staged(blocks.items.div_ceil(BLOCK), |next, threshold, staging| {
            kernels.scan(blocks, query, threshold, next, staging)
        });
    }

    /// Scans blocks of first-pass codes and collects the items that reach the threshold.
    pub fn scan_codes(&mut self, kernels: Kernels, blocks: &CodeBlocks<'_>, query: &CodeQuery<'_>) {
        self.keep_staged(blocks.items.div_ceil(BLOCK), |next, threshold, staging| {
            kernels.scan_codes(blocks, query, threshold, next, staging)
        });
    }

    /// Scans the picked blocks and collects the items that reach the threshold.
    pub fn scan_picks(&mut self, kernels: Kernels, blocks: &Blocks<'_>, picks: &[Pick], query: &Int8Query<'_>) {
        self.keep_staged(picks.len(), |next, threshold, staging| {
            kernels.scan_picks(blocks, picks, query, threshold, next, staging)
        });
    }

    /// Returns the selector's state for a scan of several queries, with room for `items` more items.
    pub fn lane<'a>(&'a mut self, query: Int8Query<'a>, items: usize) -> Lane<'a> {
        let room = self.len + items.next_multiple_of(BLOCK);
        if self.scores.len() < room {
            self.scores.resize(room, 0.0);
            self.slots.resize(room, 0);
        }
        Lane {
            query,
            threshold: self.threshold,
            staging: Staging { scores: &mut self.scores, slots: &mut self.slots, len: self.len },
        }
    }

    /// Accepts the new length of the buffer after a scan with [`Selector::lane`].
    pub fn take(&mut self, held: usize) {
        self.staged(held);
    }

    /// Collects the slots whose scores reach the threshold; `scores` belong to consecutive slots, a multiple of 16.
    pub fn keep(&mut self, kernels: Kernels, scores: &[f32], first_slot: Slot) {
        self.keep_staged(scores.len() / BLOCK, |next, threshold, staging| {
            kernels.keep(scores, first_slot.0, threshold, next, staging)
        });
    }

    /// Offers one scored slot.
    pub fn push(&mut self, score: f32, slot: Slot) {
        if score >= self.threshold && self.k > 0 {
            (self.scores[self.len], self.slots[self.len]) = (score, slot.0);
            self.staged(self.len + 1);
        }
    }

    /// Offers scored `slots`, each relative to `first_slot`.
    pub fn offer(&mut self, scores: &[f32], slots: &[u32], first_slot: u32) {
        for (scores, slots) in scores.chunks(BLOCK).zip(slots.chunks(BLOCK)) {
            let mut len = self.len;
            for (&score, &slot) in scores.iter().zip(slots) {
                (self.scores[len], self.slots[len]) = (score, first_slot + slot);
                len += usize::from(score >= self.threshold);
            }
            self.staged(len);
        }
    }

    /// Reduces the buffer to the K best; the threshold becomes the K-th best score.
    pub fn shrink(&mut self) {
        if self.k == 0 {
            self.len = 0;
        } else if self.len >= self.k {
            self.spare.clear();
            self.spare.extend_from_slice(&self.scores[..self.len]);
            self.threshold = self.kernels.kth(&mut self.spare, self.k);
            self.len = self.kernels.retain(&mut self.scores[..self.len], &mut self.slots[..self.len], self.threshold);
            if self.len > self.k {
                self.drop_ties();
            }
        }
    }

    /// Returns the `k`-th best score so far, for any `k` up to K; `None` if fewer are collected.
    pub fn kth(&mut self, k: usize) -> Option<f32> {
        if k == 0 || k > self.len {
            return None;
        }
        self.spare.clear();
        self.spare.extend_from_slice(&self.scores[..self.len]);
        Some(self.kernels.kth(&mut self.spare, k))
    }

    /// Returns the number of collected items with at least this score.
    pub fn reaching(&self, score: f32) -> usize {
        self.scores[..self.len].iter().filter(|held| **held >= score).count()
    }

    /// Returns the collected slots, unordered.
    pub fn slots(&self) -> &[u32] {
        &self.slots[..self.len]
    }

    /// Removes items tied at the threshold, those that rank last first, until K remain.
    fn drop_ties(&mut self) {
        let Selector { k, scores, slots, len, threshold, ids, sorting, .. } = self;
        sorting.clear();
        let tied = scores[..*len].iter().zip(&*slots).filter(|(score, _)| **score == *threshold);
        sorting.extend(tied.map(|(_, &slot)| rank(ids, slot)));
        let stay = sorting.len() - (*len - *k);
        let last = *sorting.select_nth_unstable(stay - 1).1;
        let mut kept = 0;
        for n in 0..*len {
            if scores[n] > *threshold || rank(ids, slots[n]) <= last {
                (scores[kept], slots[kept]) = (scores[n], slots[n]);
                kept += 1;
            }
        }
        *len = kept;
    }

    /// Returns the K best in the order of arrival. Releases the ids.
    pub fn kept(&mut self) -> impl Iterator<Item = (f32, Slot)> {
        self.shrink();
        self.ids.clear();
        self.scores[..self.len].iter().zip(&self.slots[..self.len]).map(|(&score, &slot)| (score, Slot(slot)))
    }

    /// Returns the keys of the K best, best first. Releases the ids.
    pub fn finish(&mut self) -> &[u64] {
        self.shrink();
        self.keys.clear();
        let held = self.scores[..self.len].iter().zip(&self.slots[..self.len]);
        self.keys.extend(held.map(|(&score, &slot)| key(score, Slot(slot))));
        let Selector { keys, sorting, ids, .. } = self;
        sort::descending(keys, sorting, |key| rank(ids, unkey(key).1.0));
        ids.clear();
        keys
    }

    /// Returns the result of the last [`Selector::finish`].
    pub(crate) fn finished(&self) -> &[u64] {
        &self.keys
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn keys_order_as_scores_and_then_slots(a in -1e30f32..1e30, b in -1e30f32..1e30, s: u32, t: u32) {
            prop_assert_eq!(unkey(key(a, Slot(s))), (a, Slot(s)));
            prop_assert_eq!(key(a, Slot(s)) > key(b, Slot(t)), a > b || (a == b && s < t));
        }

        #[test]
        fn the_best_k_equal_a_full_sort(scores in proptest::collection::vec(-20i32..20, 0..6000), k in 0usize..900, offered in 0..3) {
            let mut scores: Vec<f32> = scores.iter().map(|&s| s as f32 / 4.0).collect();
            let kernels = Kernels::detect().unwrap();
            let mut selector = Selector::new();
            selector.reset(k);
            let count = scores.len();
            if offered == 0 {
                scores.iter().enumerate().for_each(|(slot, &score)| selector.push(score, Slot(slot as u32)));
            } else if offered == 1 {
                let (first, rest) = scores.split_at(count / 3);
                let slots: Vec<u32> = (0..count as u32).collect();
                selector.offer(first, &slots[..first.len()], 0);
                selector.offer(rest, &slots[..rest.len()], first.len() as u32);
            } else {
                scores.resize(count.next_multiple_of(BLOCK), f32::NAN);
                selector.keep(kernels, &scores, Slot(0));
            }
            let mut expected: Vec<u64> = (0..count).map(|s| key(scores[s], Slot(s as u32))).collect();
            expected.sort_unstable_by(|a, b| b.cmp(a));
            expected.truncate(k);
            let mut shrunk = selector.clone();
            shrunk.shrink();
            for score in [-5.0, -0.25, 0.0, 4.75] {
                let reaching = expected.iter().filter(|&&key| unkey(key).0 >= score).count();
                prop_assert_eq!(shrunk.reaching(score), reaching);
            }
            let kept: Vec<u64> = selector.clone().kept().map(|(score, slot)| key(score, slot)).collect();
            prop_assert_eq!(selector.finish(), &expected);
            expected.sort_unstable_by_key(|&key| unkey(key).1.0);
            prop_assert_eq!(kept, expected);
        }

        #[test]
        fn equal_scores_rank_by_id(scored in proptest::collection::vec((-3i8..3, 0u16..), 1..3000), k in 1usize..400, parts in 1usize..4) {
            // Both zeros, ids of both signs in random order, and slots in random order.
            let score = |n: i8| if n == -1 { -0.0 } else { f32::from(n) };
            let count = scored.len();
            let ids: Vec<i64> = (0..count).map(|slot| ((slot * 7919 + 13) % count) as i64).collect();
            let distinct = ids.iter().collect::<std::collections::BTreeSet<_>>().len() == count;
            let ids: Vec<i64> = if distinct { ids } else { (0..count as i64).rev().collect() };
            let ids: Vec<i64> = ids.iter().map(|id| id - count as i64 / 2).collect();
            // In one range or in two.
            let (low, high) = ids.split_at(if parts % 2 == 0 { count / 3 } else { 0 });
            let runs = [(0, Buffer::copied(low).unwrap()), (low.len() as u32, Buffer::copied(high).unwrap())];
            let mut slots: Vec<usize> = (0..count).collect();
            slots.sort_by_key(|&slot| scored[slot].1);
            let new = || {
                let mut selector = Selector::new();
                selector.reset_by_id(k, runs.iter().map(|(first, ids)| (*first, ids)));
                selector
            };
            let mut selector = new();
            for part in slots.chunks(count.div_ceil(parts)) {
                let mut of_part = new();
                part.iter().for_each(|&slot| of_part.push(score(scored[slot].0), Slot(slot as u32)));
                for &key in of_part.finish() {
                    let (score, slot) = unkey(key);
                    selector.push(score, slot);
                }
            }
            slots.sort_by(|&a, &b| score(scored[b].0).partial_cmp(&score(scored[a].0)).unwrap().then(ids[a].cmp(&ids[b])));
            slots.truncate(k);
            let got: Vec<usize> = selector.finish().iter().map(|&key| unkey(key).1.index()).collect();
            prop_assert_eq!(got, slots);
        }
    }

    #[test]
    fn nan_is_never_a_result() {
        let mut selector = Selector::new();
        selector.reset(3);
        selector.push(f32::NAN, Slot(1));
        selector.push(f32::NEG_INFINITY, Slot(2));
        assert_eq!(selector.finish(), [key(f32::NEG_INFINITY, Slot(2))]);
    }
}
