//! Int8 scores of all items of a list, for callers that use a score in several top-k selections.

use super::quantize::Quantized;
use super::view::Index;
use sterling_core::units::ListId;
use sterling_kernels::cpu::kernels::{BLOCK, Staging};

/// Scores the items of lists by their int8 rows, with the same results as a search.
#[derive(Debug, Default)]
pub struct Int8Scores {
    query: Quantized,
    scores: Vec<f32>,
    slots: Vec<u32>,
}

impl Int8Scores {
    /// Sets a query `[D]` for an index.
    pub fn set(&mut self, index: &Index, query: &[f32]) {
        index.quantize(query, &mut self.query);
    }

    /// Returns the scores of the items of a list in slot order, for the query set for this index.
    pub fn of_list(&mut self, index: &Index, list: ListId) -> &[f32] {
        let items = index.list_lengths[list.index()] as usize;
        let room = items.next_multiple_of(BLOCK) + BLOCK;
        if self.scores.len() < room {
            self.scores.resize(room, 0.0);
            self.slots.resize(room, 0);
        }
        let mut staging = Staging { scores: &mut self.scores, slots: &mut self.slots, len: 0 };
        index.kernels.scan(&index.blocks_before(list, None), &self.query.view(), f32::NEG_INFINITY, 0, &mut staging);
        debug_assert_eq!(staging.len, items);
        &self.scores[..items]
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::ivf::tests::{build, vectors};
    use crate::ivf::{Options, Probing, Scratch};
    use crate::topk::{Selector, unkey};
    use sterling_core::tensor::Matrix;

    #[test]
    fn scores_equal_those_that_a_search_ranks_by() {
        let values = vectors(1000, 24, 5);
        let rows = Matrix::new(&values, 24).unwrap();
        let built = build(rows, &Options { lists: 30, iterations: 3, ..Options::default() }, &|_| ()).unwrap();
        let index = Index::open(&built.in_memory(&rows.into(), "index").unwrap()).unwrap();
        let mut scores = Int8Scores::default();
        for query in vectors(20, 24, 6).chunks(24) {
            let (mut selector, mut found) = (Selector::new(), Vec::new());
            selector.reset(1000);
            let all = Probing::of(index.lists(), index.lists());
            index.search(query, all, None, &mut selector, 1000, &mut Scratch::default());
            found.extend(selector.finish().iter().map(|&key| unkey(key)).map(|(score, slot)| (slot.0, score)));
            found.sort_unstable_by_key(|(slot, _)| *slot);
            scores.set(&index, query);
            let mut expected = Vec::new();
            for list in (0..index.lists() as u32).map(ListId) {
                let of_list = scores.of_list(&index, list);
                expected.extend((index.list_offsets()[list.index()]..).zip(of_list.iter().copied()));
            }
            assert_eq!(found, expected);
        }
    }
}
