//! Progressive validation: every event is ranked before it is trained on, so that the whole stream is a test set.
//!
//! Ranks the event's item among all items that the request could have returned, by three rankings: the model that learns, the
//! model at the start of the run (the frozen twin), and popularity so far. Blum, Kalai and Langford 1999 show that such figures
//! are as good as the figures of a held-out set of the same size.
//!
//! Items with the score of the event's item are in random order: NDCG and HR are the means over all of their orders
//! (McSherry and Najork 2008, *Computing information retrieval performance measures efficiently in the presence of tied
//! scores*). A model that gives all items the same score therefore has the metrics of a random ranking.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use crate::products::Packed;
use sterling_kernels::cpu::Kernels;

/// Cutoff `k` of NDCG@k and HR@k.
const K: usize = 10;
/// Maximum number of scores in memory at once.
const SCORES_MAX: usize = 1 << 24;

/// Figures of one ranking over a number of events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Figures {
    events: u64,
    gain: f64,
    hits: f64,
}

impl Figures {
    /// Adds an event whose item has each of these ranks with the same probability.
    pub(crate) fn add(&mut self, ranks: &RangeInclusive<usize>) {
        self.events += 1;
        let (first, end) = (*ranks.start(), K.min(ranks.end() + 1));
        if first < end {
            let count = (ranks.end() - first + 1) as f64;
            self.gain += (first..end).map(|rank| 1.0 / (rank as f64 + 2.0).log2()).sum::<f64>() / count;
            self.hits += (end - first) as f64 / count;
        }
    }

    /// Returns the number of events.
    pub(crate) fn events(&self) -> u64 {
        self.events
    }

    /// Returns the mean NDCG@10.
    pub(crate) fn ndcg(&self) -> f64 {
        self.gain / self.events.max(1) as f64
    }

    /// Returns the mean HR@10.
    pub(crate) fn hit_rate(&self) -> f64 {
        self.hits / self.events.max(1) as f64
    }

    /// Returns the figures of the events since `before`.
    pub(crate) fn since(&self, before: &Figures) -> Figures {
        Figures { events: self.events - before.events, gain: self.gain - before.gain, hits: self.hits - before.hits }
    }
}

/// Figures of the three rankings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct RankingMetrics {
    pub(crate) learned: Figures,
    pub(crate) frozen: Figures,
    pub(crate) popularity: Figures,
}

/// An event to rank: its item, and the excluded items, ascending.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RankedEvent<'a> {
    pub(crate) item: u32,
    pub(crate) exclude: &'a [u32],
}

impl RankedEvent<'_> {
    /// Returns the possible ranks of the item, from 0: the number of other items with a larger score, and up to as many more as
    /// have the same score. Returns only the last rank if the item's score is NaN.
    fn ranks<T: PartialOrd + Copy>(&self, scores: &[T]) -> RangeInclusive<usize> {
        let own = scores[self.item as usize];
        if own.partial_cmp(&own).is_none() {
            return scores.len()..=scores.len();
        }
        let (mut larger, mut same) = (0usize, 0usize);
        for score in scores {
            larger += usize::from(*score > own);
            same += usize::from(*score == own);
        }
        for item in self.exclude.iter().filter(|item| **item != self.item) {
            let score = scores[*item as usize];
            larger -= usize::from(score > own);
            same -= usize::from(score == own);
        }
        larger..=larger + same - 1
    }
}

/// Returns the ranks of the events' items among `items`, by the scores of queries `[B, D]`.
pub(crate) fn rank(
    kernels: Kernels,
    queries: &[f32],
    items: &Packed,
    wanted: &[RankedEvent<'_>],
) -> Vec<RangeInclusive<usize>> {
    let (count, width) = (items.columns(), queries.len() / wanted.len().max(1));
    let together = (SCORES_MAX / count.max(1)).max(1);
    let (mut scores, mut all) = (Vec::new(), Vec::with_capacity(wanted.len()));
    if wanted.is_empty() {
        return all;
    }
    for (queries, wanted) in queries.chunks(together * width).zip(wanted.chunks(together)) {
        scores.resize(wanted.len() * count, 0.0f32);
        items.times(kernels, queries, &mut scores);
        all.extend(wanted.iter().zip(scores.chunks_exact(count)).map(|(wanted, scores)| wanted.ranks(scores)));
    }
    all
}

/// Returns the ranks of the events' items by popularity.
pub(crate) fn rank_by_count(counts: &[u64], wanted: &[RankedEvent<'_>]) -> Vec<RangeInclusive<usize>> {
    wanted.iter().map(|wanted| wanted.ranks(counts)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_count_items_above_and_leave_out_what_was_excluded() {
        // Scores 3, 1, 2, 0 for a query of one dimension.
        let items = Packed::transposed(&[3.0, 1.0, 2.0, 0.0], 1, 4);
        let wanted = [(3, &[][..]), (3, &[0, 1][..]), (0, &[][..]), (1, &[2][..])];
        let wanted = wanted.map(|(item, exclude)| RankedEvent { item, exclude });
        let mut figures = Figures::default();
        rank(Kernels::best(), &[1.0; 4], &items, &wanted).iter().for_each(|ranks| figures.add(ranks));
        let gains = [3.0f64, 1.0, 0.0, 1.0].map(|rank| 1.0 / (rank + 2.0).log2());
        assert_eq!((figures.events(), figures.hit_rate()), (4, 1.0));
        assert!((figures.ndcg() - gains.iter().sum::<f64>() / 4.0).abs() < 1e-12);
        assert_eq!(wanted[2].ranks(&[f32::NAN, 1.0, 2.0, 0.0]), 4..=4);
        let before = figures;
        rank_by_count(&[5, 5, 1, 0], &wanted[..1]).iter().for_each(|ranks| figures.add(ranks));
        assert!((figures.since(&before).ndcg() - 1.0 / 5.0f64.log2()).abs() < 1e-12);
    }

    #[test]
    fn equal_scores_have_the_figures_of_chance() {
        let gain = |rank: usize| if rank < 10 { 1.0 / (rank as f64 + 2.0).log2() } else { 0.0 };
        for count in [1, 2, 9, 10, 11, 400] {
            let items = Packed::transposed(&vec![0.0; count], 1, count);
            let mut figures = Figures::default();
            let wanted: Vec<RankedEvent<'_>> =
                (0..count as u32).map(|item| RankedEvent { item, exclude: &[] }).collect();
            let ranks = rank(Kernels::best(), &vec![1.0; count], &items, &wanted);
            ranks.iter().for_each(|ranks| figures.add(ranks));
            let chance = (0..count).map(gain).sum::<f64>() / count as f64;
            assert!((figures.ndcg() - chance).abs() < 1e-12, "{count} items");
            assert!((figures.hit_rate() - 10.0f64.min(count as f64) / count as f64).abs() < 1e-12, "{count} items");
        }
        // Against all orders of the ties: item 5 is below one item, and equals three others, one of which is excluded.
        let scores = [7, 7, 9, 7, 1, 7u64];
        let wanted = RankedEvent { item: 5, exclude: &[0] };
        assert_eq!(wanted.ranks(&scores), 1..=3);
        let mut figures = Figures::default();
        rank_by_count(&scores, &[wanted]).iter().for_each(|ranks| figures.add(ranks));
        assert!((figures.ndcg() - (gain(1) + gain(2) + gain(3)) / 3.0).abs() < 1e-12 && figures.hit_rate() == 1.0);
    }
}
