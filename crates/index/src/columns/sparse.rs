//! Persistent sparse map from slots to values. Each page covers 64 slots and stores a bitmap with only the present
//! values, in slot order (Bagwell, "Ideal Hash Trees", 2001). Clones share pages until one of them changes
//! (copy-on-write), so readers keep their version while a writer makes changes. A change copies one page and its node.

use std::sync::Arc;

use sterling_core::units::Slot;

/// Slots per page: one bitmap word.
const SLOTS: usize = u64::BITS as usize;
/// Pages per node. A node has 1 KiB; a change of a shared node copies the node.
const PAGES: usize = 128;

#[derive(Clone, Debug)]
struct Page<T> {
    /// Bitmap of the slots that have a value.
    filled: u64,
    /// Values of these slots, in slot order.
    values: Vec<T>,
}

type Node<T> = [Option<Arc<Page<T>>>; PAGES];

/// Sparse map from slots to values.
#[derive(Clone, Debug)]
pub(super) struct Sparse<T> {
    nodes: Vec<Option<Arc<Node<T>>>>,
    len: usize,
}

impl<T> Default for Sparse<T> {
    fn default() -> Self {
        Sparse { nodes: Vec::new(), len: 0 }
    }
}

impl<T> Sparse<T> {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns which of the 64 slots from `word * 64` on have a value, as a bitmap, and these values.
    pub(super) fn word(&self, word: usize) -> (u64, &[T]) {
        let node = self.nodes.get(word / PAGES).and_then(Option::as_ref);
        let page = node.and_then(|node| node[word % PAGES].as_ref());
        page.map_or((0, &[]), |page| (page.filled, &page.values))
    }

    /// Returns the indexes of the non-empty 64-slot words, ascending.
    pub(super) fn words(&self) -> impl Iterator<Item = usize> + '_ {
        let nodes = self.nodes.iter().enumerate().filter_map(|(n, node)| Some((n, node.as_ref()?)));
        nodes.flat_map(|(n, node)| (0..PAGES).filter(|&page| node[page].is_some()).map(move |page| n * PAGES + page))
    }

    pub(super) fn get(&self, slot: Slot) -> Option<&T> {
        let (filled, values) = self.word(slot.index() / SLOTS);
        let bit = slot.index() % SLOTS;
        (filled >> bit & 1 == 1).then(|| &values[place(filled, bit)])
    }
}

impl<T: Clone> Sparse<T> {
    /// Sets the value of a slot. Returns the previous value.
    pub(super) fn insert(&mut self, slot: Slot, value: T) -> Option<T> {
        let (word, bit) = (slot.index() / SLOTS, slot.index() % SLOTS);
        if self.nodes.len() <= word / PAGES {
            self.nodes.resize(word / PAGES + 1, None);
        }
        let node = self.nodes[word / PAGES].get_or_insert_with(|| Arc::new([const { None }; PAGES]));
        let page =
            Arc::make_mut(node)[word % PAGES].get_or_insert_with(|| Arc::new(Page { filled: 0, values: Vec::new() }));
        let page = Arc::make_mut(page);
        let at = place(page.filled, bit);
        if page.filled >> bit & 1 == 1 {
            return Some(std::mem::replace(&mut page.values[at], value));
        }
        page.values.insert(at, value);
        page.filled |= 1 << bit;
        self.len += 1;
        None
    }

    pub(super) fn remove(&mut self, slot: Slot) -> Option<T> {
        // The slot is checked first, because `make_mut` copies shared nodes even if there is nothing to remove.
        self.get(slot)?;
        let (word, bit) = (slot.index() / SLOTS, slot.index() % SLOTS);
        let page = &mut Arc::make_mut(self.nodes[word / PAGES].as_mut()?)[word % PAGES];
        let retained = Arc::make_mut(page.as_mut()?);
        let removed = retained.values.remove(place(retained.filled, bit));
        retained.filled &= !(1 << bit);
        if retained.filled == 0 {
            *page = None;
        }
        self.len -= 1;
        Some(removed)
    }
}

/// Returns the set bits of a word, ascending.
pub(crate) fn bits(mut word: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let bit = (word != 0).then(|| word.trailing_zeros())?;
        word &= word - 1;
        Some(bit)
    })
}

/// Returns the index of a slot's value within its page.
fn place(filled: u64, bit: usize) -> usize {
    (filled & ((1 << bit) - 1)).count_ones() as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn behaves_as_a_map_and_clones_stay_unchanged(changes in proptest::collection::vec((0u32..20_000, any::<Option<i16>>()), 0..400)) {
            let (mut sparse, mut expected) = (Sparse::default(), BTreeMap::new());
            let mut copies = Vec::new();
            for (n, &(slot, value)) in changes.iter().enumerate() {
                // A small range of slots, so that many are changed repeatedly.
                let slot = if n % 2 == 0 { slot } else { slot % 100 };
                match value {
                    Some(value) => prop_assert_eq!(sparse.insert(Slot(slot), value), expected.insert(slot, value)),
                    None => prop_assert_eq!(sparse.remove(Slot(slot)), expected.remove(&slot)),
                }
                if n % 50 == 0 {
                    copies.push((sparse.clone(), expected.clone()));
                }
            }
            copies.push((sparse, expected));
            for (sparse, expected) in &copies {
                prop_assert_eq!(sparse.len(), expected.len());
                for slot in (0..100).chain(changes.iter().map(|(slot, _)| *slot)) {
                    prop_assert_eq!(sparse.get(Slot(slot)), expected.get(&slot));
                }
                let words: Vec<usize> = sparse.words().collect();
                prop_assert!(words.is_sorted_by(|a, b| a < b));
                let of_word = |&word: &usize| {
                    let (filled, values) = sparse.word(word);
                    let bits = (0..64u32).filter(move |bit| filled >> bit & 1 == 1);
                    bits.map(move |bit| word as u32 * 64 + bit).zip(values.iter().copied()).collect::<Vec<_>>()
                };
                let all: BTreeMap<u32, i16> = words.iter().flat_map(of_word).collect();
                prop_assert_eq!(&all, expected);
            }
        }
    }
}
