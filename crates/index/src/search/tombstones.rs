//! Tombstones of deleted items: a bitmap in chunks with copy-on-write. A copy costs one pointer per chunk.

use std::sync::Arc;

use sterling_core::units::Slot;

/// Words per chunk. A chunk has 4 KiB; a change of a shared chunk copies the chunk.
const WORDS: usize = 512;
const SLOTS: usize = WORDS * 64;

type Piece = Option<Arc<[u64; WORDS]>>;

/// Set of slots. Copies share unchanged chunks, so readers keep their version while a writer makes changes.
#[derive(Clone, Debug, Default)]
pub struct Tombstones {
    pieces: Vec<Piece>,
    len: usize,
}

impl Tombstones {
    /// Returns the number of slots in the set.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the set is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns true if the slot is in the set.
    pub fn contains(&self, slot: Slot) -> bool {
        self.word(slot.index() / 64) >> (slot.index() % 64) & 1 == 1
    }

    /// Adds a slot; returns false if it was present.
    pub fn insert(&mut self, slot: Slot) -> bool {
        if self.contains(slot) {
            return false;
        }
        let (piece, bit) = (slot.index() / SLOTS, slot.index() % SLOTS);
        if self.pieces.len() <= piece {
            self.pieces.resize(piece + 1, None);
        }
        let words = self.pieces[piece].get_or_insert_with(|| Arc::new([0; WORDS]));
        Arc::make_mut(words)[bit / 64] |= 1 << (bit % 64);
        self.len += 1;
        true
    }

    /// Returns the symmetric difference of both sets, ascending. Shared chunks are skipped.
    pub fn differing(&self, other: &Tombstones) -> Vec<Slot> {
        let mut slots = Vec::new();
        let at = |pieces: &[Piece], n: usize| pieces.get(n).cloned().flatten();
        for piece in 0..self.pieces.len().max(other.pieces.len()) {
            let (mine, others) = (at(&self.pieces, piece), at(&other.pieces, piece));
            if mine.as_ref().map(Arc::as_ptr) == others.as_ref().map(Arc::as_ptr) {
                continue;
            }
            for word in 0..WORDS {
                let of = |piece: &Piece| piece.as_ref().map_or(0, |words| words[word]);
                let differing = of(&mine) ^ of(&others);
                let first = ((piece * WORDS + word) * 64) as u32;
                slots.extend((0..64).filter(|bit| differing >> bit & 1 == 1).map(|bit| Slot(first + bit)));
            }
        }
        slots
    }

    /// Clears the bits of the deleted slots in a bitmap of the slots from `first` on.
    pub fn clear(&self, first: u32, words: &mut [u64]) {
        if self.is_empty() {
            return;
        }
        let (start, shift) = (first as usize / 64, first % 64);
        for (n, word) in words.iter_mut().enumerate() {
            let low = self.word(start + n) >> shift;
            let high = if shift == 0 { 0 } else { self.word(start + n + 1) << (64 - shift) };
            *word &= !(low | high);
        }
    }

    fn word(&self, word: usize) -> u64 {
        self.pieces.get(word / WORDS).and_then(Option::as_ref).map_or(0, |piece| piece[word % WORDS])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn behaves_as_a_set(slots in proptest::collection::vec(0u32..100_000, 0..300), first in 0u32..100_000, count in 0usize..40) {
            let (mut tombstones, mut expected) = (Tombstones::default(), BTreeSet::new());
            let before = tombstones.clone();
            for &slot in &slots {
                prop_assert_eq!(tombstones.insert(Slot(slot)), expected.insert(slot));
            }
            prop_assert!(before.is_empty() && slots.iter().all(|&slot| !before.contains(Slot(slot))), "a copy stays");
            prop_assert_eq!(tombstones.len(), expected.len());
            let mut fewer = before;
            for &slot in slots.iter().step_by(3) {
                fewer.insert(Slot(slot));
            }
            let missing = expected.iter().copied().map(Slot).filter(|slot| !fewer.contains(*slot));
            prop_assert_eq!(tombstones.differing(&fewer), missing.collect::<Vec<Slot>>());
            prop_assert_eq!(fewer.differing(&tombstones), tombstones.differing(&fewer));
            prop_assert!(tombstones.differing(&tombstones.clone()).is_empty());
            let mut words = vec![u64::MAX; count];
            tombstones.clear(first, &mut words);
            for at in 0..count as u32 * 64 {
                let is_set = words[at as usize / 64] >> (at % 64) & 1 == 1;
                prop_assert_eq!(is_set, !expected.contains(&(first + at)));
                prop_assert_eq!(tombstones.contains(Slot(first + at)), expected.contains(&(first + at)));
            }
        }
    }
}
