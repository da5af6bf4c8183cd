//! Step 8 of the pass: the scores that candidates are ranked by.

use std::time::Instant;

use super::{Catalogue, Found, Query, Scratch, Times, taken};
use crate::ivf::{Counters, WideRows};
use sterling_core::units::{ItemId, Slot, by_score};

impl Catalogue<'_> {
    /// Scores candidates again by their rescoring rows, and retains the best K0 among these and the candidates already scored.
    /// Returns the number of rescored candidates.
    pub(super) fn rescore(&self, query: &Query<'_>, scratch: &mut Scratch, times: &mut Times) -> u64 {
        let Scratch { candidates, scored, selected, .. } = &mut *scratch;
        selected.clear();
        if let Some(most) = query.search.selected {
            selected.extend(candidates.iter().chain(&*scored));
            if !candidates.is_empty() && !scored.is_empty() {
                self.retain_best(most, selected);
            }
        }
        let rescored = match (candidates.is_empty(), self.main().index.rows()) {
            (true, _) => 0,
            (false, WideRows::None) => {
                candidates.truncate(query.kept());
                0
            }
            (false, _) => {
                let start = Instant::now();
                let rescored = self.rescore_by_rows(query.vector, query.kept(), scratch);
                times.rescore += start.elapsed();
                rescored
            }
        };
        let Scratch { candidates, scored, .. } = scratch;
        if candidates.is_empty() {
            std::mem::swap(candidates, scored);
        } else if !scored.is_empty() {
            candidates.append(scored);
            // With `selected`, other scores decided which candidates to retain.
            let kept = if query.search.selected.is_some() { candidates.len() } else { query.search.k0 };
            self.retain_best(kept, candidates);
        }
        rescored
    }

    /// Returns true if the order by int8 scores is irrelevant: rows decide, and the selection is not returned.
    pub(super) fn ranks_by_rows(&self, query: &Query<'_>) -> bool {
        query.search.selected.is_none() && !matches!(self.main().index.rows(), WideRows::None)
    }

    /// Retains the best `k` candidates, best first; ties by id.
    fn retain_best(&self, k: usize, candidates: &mut Vec<(f32, Slot)>) {
        let better =
            |a: &(f32, Slot), b: &(f32, Slot)| by_score(a.0, b.0).then_with(|| self.rank(a.1).cmp(&self.rank(b.1)));
        if k < candidates.len() {
            candidates.select_nth_unstable_by(k, better);
            candidates.truncate(k);
        }
        candidates.sort_unstable_by(better);
    }

    /// Returns the order of ties: the item id, or the slot without ids.
    fn rank(&self, slot: Slot) -> (ItemId, Slot) {
        let (segment, own) = self.segment_of(slot);
        (self.segments[segment].ids.map_or(ItemId(0), |ids| ItemId(ids[own.index()])), slot)
    }

    /// Scores ascending `slots` by their most precise rows; the candidates of the result are sorted, best first.
    pub fn score(&self, vector: &[f32], slots: &[Slot], scratch: &mut Scratch, sink: &mut dyn FnMut(Found<'_>)) {
        let start = Instant::now();
        scratch.candidates.clear();
        scratch.candidates.extend(slots.iter().map(|&slot| (0.0, slot)));
        let rescored = self.rescore_by_rows(vector, slots.len(), scratch);
        let times = Times { rescore: start.elapsed(), ..Times::default() };
        let candidates = &mut scratch.candidates;
        sink(Found { candidates, selected: &[], counters: Counters::default(), rescored, times });
    }

    /// Scores the candidates by their most precise rows, segment by segment, and retains the best K0, best first.
    fn rescore_by_rows(&self, vector: &[f32], k0: usize, scratch: &mut Scratch) -> u64 {
        let Scratch { candidates, selector, slots, own, products, .. } = scratch;
        slots.clear();
        slots.extend(candidates.iter().map(|(_, slot)| slot.0));
        if self.segments.len() > 1 {
            slots.sort_unstable();
        }
        products.resize(slots.len(), 0.0);
        let mut done = 0;
        for (segment, next) in self.segments.iter().zip(self.segments.iter().skip(1).map(Some).chain([None])) {
            let end = next.map_or(slots.len(), |next| slots.partition_point(|&slot| slot < next.first_slot));
            own.clear();
            own.extend(slots[done..end].iter().map(|slot| slot - segment.first_slot));
            segment.index.products(vector, own, &mut products[done..end]);
            done = end;
        }
        self.begin(selector, k0);
        selector.offer(products, slots, 0);
        candidates.clear();
        candidates.extend(taken(selector));
        slots.len() as u64
    }
}
