//! Merges the candidates of a user's queries into one list, between rescoring and the reranker (steps 8 and 9 of the
//! pass).

use sterling_core::units::{ItemId, Slot};
use sterling_index::ivf::Counters;
use sterling_index::search::{Found, Times};
use sterling_snapshot::model::{Merge, QuerySpec};

/// Results of the queries of one user.
#[derive(Debug)]
pub(super) struct Parts {
    /// Results in the order of the queries.
    found: Vec<Option<Part>>,
}

/// Result of one query, stored until the others are complete.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) candidates: Vec<(f32, Slot)>,
    pub(super) counters: Counters,
    pub(super) rescored: u64,
    pub(super) times: Times,
}

impl Parts {
    /// Creates the results of `queries` queries, none of which is complete.
    pub(super) fn new(queries: usize) -> Self {
        Parts { found: (0..queries).map(|_| None).collect() }
    }

    /// Accepts the result of query `n`; returns all results after the last query.
    pub(super) fn take(&mut self, n: usize, found: &Found<'_>) -> Option<Vec<Part>> {
        let Found { candidates, counters, rescored, times, .. } = found;
        let candidates = candidates.to_vec();
        self.found[n] = Some(Part { candidates, counters: *counters, rescored: *rescored, times: *times });
        match self.found.iter().all(Option::is_some) {
            true => Some(std::mem::take(&mut self.found).into_iter().flatten().collect()),
            false => None,
        }
    }
}

/// Sums the counters and step times of the queries.
pub(super) fn totals(parts: &[Part]) -> (Counters, u64, Times) {
    let (mut counters, mut rescored, mut times) = (Counters::default(), 0, Times::default());
    for part in parts {
        counters.add(&part.counters);
        rescored += part.rescored;
        times.add(&part.times);
    }
    (counters, rescored, times)
}

/// Computes the dot products of a query with the rows of ascending slots.
type Products<'a> = dyn Fn(&[f32], &[Slot], &mut [f32]) + 'a;

/// Merges the candidates of all queries into one list, best first, with distinct items and the retrieval score that `merge`
/// defines. `vector` is the concatenation of the queries.
pub(super) fn merge(
    (how, specs): (Merge, &[QuerySpec]),
    parts: &[Part],
    vector: &[f32],
    products: &Products<'_>,
    id: &dyn Fn(Slot) -> ItemId,
) -> Vec<(f32, Slot)> {
    let weighted = parts
        .iter()
        .zip(specs)
        .flat_map(|(part, spec)| part.candidates.iter().map(|&(score, slot)| (slot, weighted(score, spec))));
    let mut all: Vec<(Slot, f32)> = weighted.collect();
    // The stable sort keeps an item's queries in order, which is the order of summation.
    all.sort_by_key(|(slot, _)| *slot);
    let of_items = all.chunk_by(|a, b| a.0 == b.0);
    let mut merged: Vec<(f32, Slot)> = match how {
        Merge::Union => of_items
            .map(|found| (found.iter().map(|(_, score)| *score).fold(f32::NEG_INFINITY, f32::max), found[0].0))
            .collect(),
        Merge::Intersection => of_items
            .filter(|found| found.len() == parts.len())
            .map(|found| (found.iter().map(|(_, score)| score).sum(), found[0].0))
            .collect(),
        Merge::Weighted => sums(&of_items.map(|found| found[0].0).collect::<Vec<_>>(), specs, vector, products),
    };
    // Clamps sums that overflow f32; adding 0 makes -0 and 0 equal in the total order.
    merged.iter_mut().for_each(|(score, _)| *score = score.clamp(f32::MIN, f32::MAX) + 0.0);
    merged.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then_with(|| id(a.1).cmp(&id(b.1))));
    merged
}

/// Weights a score by its query; the result is finite, so sums are never NaN.
fn weighted(score: f32, spec: &QuerySpec) -> f32 {
    (score * spec.weight).clamp(f32::MIN, f32::MAX)
}

/// Computes the weighted sum of the products of all queries with each slot.
fn sums(slots: &[Slot], specs: &[QuerySpec], vector: &[f32], products: &Products<'_>) -> Vec<(f32, Slot)> {
    let (mut sums, mut of_query) = (vec![0.0; slots.len()], vec![0.0; slots.len()]);
    for (query, spec) in vector.chunks_exact(vector.len() / specs.len().max(1)).zip(specs) {
        products(query, slots, &mut of_query);
        sums.iter_mut().zip(&of_query).for_each(|(sum, product)| *sum += weighted(*product, spec));
    }
    sums.into_iter().zip(slots.iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterling_core::limits::QUERY_WEIGHT_MAX;

    /// The largest possible products, under the largest weights, with opposite signs.
    #[test]
    fn scores_that_leave_f32_are_merged_to_numbers() {
        let spec = |name: &str| QuerySpec { name: name.into(), candidates: None, weight: QUERY_WEIGHT_MAX };
        let part = |score: f32| Part {
            candidates: vec![(score, Slot(3))],
            counters: Counters::default(),
            rescored: 0,
            times: Times::default(),
        };
        let largest = f32::MAX / 8.0;
        let products = |query: &[f32], slots: &[Slot], out: &mut [f32]| {
            assert_eq!(slots, [Slot(3)]);
            out[0] = query[0] * largest;
        };
        for (how, expected) in [(Merge::Union, f32::MAX), (Merge::Intersection, 0.0), (Merge::Weighted, 0.0)] {
            let specs = [spec("up"), spec("down")];
            let parts = [part(largest), part(-largest)];
            let merged = merge((how, &specs), &parts, &[1.0, -1.0], &products, &|slot| ItemId(i64::from(slot.0)));
            assert_eq!(merged, [(expected, Slot(3))], "{how:?}");
        }
    }
}
