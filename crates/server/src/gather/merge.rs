//! Merges sorted results of shards, and determines whether the merged results are proven complete.

use std::cmp::Ordering;

use sterling_core::error::{Error, Result};
use sterling_core::request::{RankedAhead, Selected};
use sterling_core::units::{ItemId, by_score};

/// Next step after a round of shard answers.
#[derive(Clone, Debug, PartialEq)]
pub enum Next<T> {
    /// The answer is complete.
    Done(T),
    /// Shards, by index, that must send all of their possible results.
    Again(Vec<usize>),
    /// All shards must probe more lists: those probed so far hold fewer items than results.
    Further,
}

/// Candidates of one shard: per query of the user, item ids with retrieval scores, best first.
pub type Chosen = Vec<Vec<(ItemId, f32)>>;

/// Results of one shard, best first; equal scores by id.
#[derive(Clone, Copy, Debug)]
pub struct ShardResults<'a> {
    /// Ids of the items.
    pub ids: &'a [ItemId],
    /// Scores that order the items.
    pub scores: &'a [f32],
    /// Marks the items that may be returned; `None`: all may. The scores of the other items only bound the scores of
    /// the items that the shard did not send.
    pub counts: Option<&'a [bool]>,
    /// True if the shard has no further results.
    pub is_all: bool,
}

impl ShardResults<'_> {
    fn at(&self, place: usize) -> (ItemId, f32) {
        (self.ids[place], self.scores[place])
    }

    /// Indices of the items that may be among the best.
    fn places(&self) -> impl Iterator<Item = usize> {
        (0..self.ids.len()).filter(|&place| self.counts.is_none_or(|counts| counts[place]))
    }
}

/// Orders items by score, equal scores by id.
fn order_of((id, score): (ItemId, f32), (other, other_score): (ItemId, f32)) -> Ordering {
    by_score(score, other_score).then_with(|| id.cmp(&other))
}

/// Merges the best `k` of all shards; each result is an index of the shard and of the item in it.
pub fn best(parts: &[ShardResults<'_>], k: usize) -> Next<Vec<(usize, usize)>> {
    let mut order: Vec<(usize, usize)> =
        parts.iter().enumerate().flat_map(|(n, part)| part.places().map(move |at| (n, at))).collect();
    let item = |&(n, at): &(usize, usize)| parts[n].at(at);
    let before = |a: &(usize, usize), b: &(usize, usize)| order_of(item(a), item(b));
    // Each shard's results are sorted, so a stable sort merges them.
    order.sort_by(before);
    order.truncate(k);
    // Items that a shard withheld rank below the last item that it sent. The result is thus complete if the last item of each
    // shard ranks no better than the worst of the best `k`.
    let worst = k.checked_sub(1).map(|last| order.get(last).map(item));
    let is_proven = |part: &ShardResults<'_>| match (worst, part.ids.len().checked_sub(1)) {
        (None, _) => true,
        (Some(Some(worst)), Some(last)) => part.is_all || order_of(part.at(last), worst).is_ge(),
        (Some(_), _) => part.is_all,
    };
    let again: Vec<usize> = (0..parts.len()).filter(|&n| !is_proven(&parts[n])).collect();
    if again.is_empty() { Next::Done(order) } else { Next::Again(again) }
}

/// Merges the candidates of each shard. `of_shards` are the answers of all shards, with the same number of queries each; `k` is
/// the number of requested results.
///
/// # Errors
/// `Internal` if the shards answered different numbers of queries, or if scores are missing.
pub fn candidates(of_shards: &[&[Selected]], k: usize) -> Result<Next<Vec<Chosen>>> {
    let queries = of_shards.first().map_or(0, |first| first.len());
    let is_whole =
        |selected: &Selected| selected.ids.len() == selected.codes.len() && selected.ids.len() == selected.scores.len();
    if of_shards.iter().any(|shard| shard.len() != queries || !shard.iter().all(is_whole)) {
        return Err(Error::internal(
            "shards sent incomplete candidates, expected the same number of queries and one score per id",
        ));
    }
    let mut chosen = vec![vec![Vec::new(); queries]; of_shards.len()];
    let mut again: Vec<usize> = Vec::new();
    for query in 0..queries {
        let selected: Vec<&Selected> = of_shards.iter().map(|shard| &shard[query]).collect();
        let most = |wanted: fn(&Selected) -> usize| selected.iter().map(|s| wanted(s)).max().unwrap_or(0);
        let of_codes: Vec<ShardResults<'_>> = selected
            .iter()
            .map(|s| ShardResults { ids: &s.ids, scores: &s.codes, counts: None, is_all: s.is_all })
            .collect();
        let mut order = match best(&of_codes, most(|s| s.selected)) {
            Next::Done(order) => order,
            Next::Again(shards) => {
                again.extend(shards);
                continue;
            }
            Next::Further => return Ok(Next::Further),
        };
        if order.len() < k && selected.iter().any(|s| s.may_go_further) {
            return Ok(Next::Further);
        }
        let scored = |&(shard, at): &(usize, usize)| (selected[shard].ids[at], selected[shard].scores[at]);
        order.sort_unstable_by(|a, b| order_of(scored(a), scored(b)));
        for &(shard, at) in order.iter().take(most(|s| s.candidates)) {
            chosen[shard][query].push(scored(&(shard, at)));
        }
    }
    again.sort_unstable();
    again.dedup();
    Ok(if again.is_empty() { Next::Done(chosen) } else { Next::Again(again) })
}

/// Marks the results of a shard's early reranking that are among the candidates chosen there; `None` if the shard did not rerank
/// all chosen candidates.
pub fn counting(ahead: &RankedAhead, chosen: &Chosen) -> Option<Vec<bool>> {
    let [chosen] = &chosen[..] else { return None };
    if order_of(*chosen.last()?, ahead.last).is_gt() {
        return None;
    }
    let ids = &ahead.ranked.ids;
    let mut places: Vec<usize> = (0..ids.len()).collect();
    places.sort_unstable_by_key(|&place| ids[place]);
    let mut counts = vec![false; ids.len()];
    for (id, _) in chosen {
        if let Ok(at) = places.binary_search_by_key(id, |&place| ids[place]) {
            counts[places[at]] = true;
        }
    }
    Some(counts)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;
    use sterling_core::request::Ranked;

    type Scored = (i64, i8);

    /// Generates items with few distinct scores, so that many items have equal scores.
    fn catalogue() -> impl Strategy<Value = Vec<Scored>> {
        proptest::collection::btree_map(-40i64..40, -3i8..4, 0..60).prop_map(|items| items.into_iter().collect())
    }

    fn sorted(mut items: Vec<Scored>) -> Vec<Scored> {
        items.sort_by_key(|(id, score)| (-score, *id));
        items
    }

    proptest! {
        #[test]
        fn merged_answers_equal_those_of_one_index(
            items in catalogue(), shards in 1usize..6, k in 0usize..30, cut in 0usize..12, one_of in 1i64..4,
        ) {
            let mut parts = vec![Vec::new(); shards];
            for item in &items {
                parts[item.0.rem_euclid(shards as i64) as usize].push(*item);
            }
            let parts: Vec<Vec<Scored>> = parts.into_iter().map(sorted).collect();
            let counts = |item: &Scored| item.0 % one_of == 0;
            let counting = |items: &[Scored]| -> Vec<Scored> { items.iter().copied().filter(counts).collect() };
            let sent = |most: usize| parts.iter().map(|part| part[..part.len().min(most)].to_vec()).collect::<Vec<_>>();
            let merge = |sent: &[Vec<Scored>]| {
                let ids: Vec<Vec<ItemId>> = sent.iter().map(|p| p.iter().map(|(id, _)| ItemId(*id)).collect()).collect();
                let scores: Vec<Vec<f32>> =
                    sent.iter().map(|p| p.iter().map(|(_, s)| if *s == 0 { -0.0 } else { f32::from(*s) }).collect()).collect();
                let masks: Vec<Vec<bool>> = sent.iter().map(|part| part.iter().map(counts).collect()).collect();
                let of = |n: usize| {
                    let is_all = counting(&sent[n]).len() == counting(&parts[n]).len();
                    let counts = (one_of > 1).then_some(&masks[n][..]);
                    ShardResults { ids: &ids[n], scores: &scores[n], counts, is_all }
                };
                best(&(0..shards).map(of).collect::<Vec<_>>(), k)
            };
            let mut expected = sorted(counting(&items));
            expected.truncate(k);
            let found = |order: Vec<(usize, usize)>, sent: &[Vec<Scored>]| {
                order.into_iter().map(|(shard, at)| sent[shard][at]).collect::<Vec<_>>()
            };
            let few = sent(cut);
            match merge(&few) {
                Next::Done(order) => prop_assert_eq!(found(order, &few), expected.clone()),
                Next::Again(again) => {
                    prop_assert!(again.iter().all(|&n| few[n].len() < parts[n].len()));
                    // The shards of `again` send enough results for any `k`, the others repeat their answers.
                    let full: Vec<Vec<Scored>> = parts.iter().map(|part| counting(part).into_iter().take(k).collect()).collect();
                    let more: Vec<Vec<Scored>> =
                        (0..shards).map(|n| if again.contains(&n) { full[n].clone() } else { few[n].clone() }).collect();
                    match merge(&more) {
                        Next::Done(order) => prop_assert_eq!(found(order, &more), expected.clone()),
                        other => prop_assert!(false, "{other:?}"),
                    }
                }
                Next::Further => prop_assert!(false),
            }
        }
    }

    #[test]
    fn early_reranked_candidates_count_if_all_were_scored() {
        let ids = |ids: &[i64]| ids.iter().map(|id| ItemId(*id)).collect();
        let ranked = Ranked { ids: ids(&[7, 2, 9]), scores: vec![3.0, 2.0, 1.0], ..Ranked::default() };
        let ahead = RankedAhead { ranked, is_all: false, last: (ItemId(5), 0.5) };
        let counts =
            |chosen: &[(i64, f32)]| counting(&ahead, &vec![chosen.iter().map(|(id, s)| (ItemId(*id), *s)).collect()]);
        assert_eq!(counts(&[(2, 0.9), (9, 0.7)]), Some(vec![false, true, true]));
        assert_eq!(counts(&[(9, 0.7), (5, 0.5)]), Some(vec![false, false, true]));
        assert_eq!(counts(&[(9, 0.7), (4, 0.5)]), Some(vec![false, false, true]));
        assert_eq!(counts(&[(9, 0.7), (6, 0.5)]), None);
        assert_eq!(counts(&[(9, 0.7), (1, 0.25)]), None);
        assert_eq!(counting(&ahead, &vec![vec![(ItemId(2), 0.9)]; 2]), None, "of several queries");
    }

    #[test]
    fn candidates_are_selected_by_codes_then_by_scores() {
        let of = |items: &[(i64, f32, f32)], is_all| Selected {
            ids: items.iter().map(|(id, ..)| ItemId(*id)).collect(),
            codes: items.iter().map(|(_, code, _)| *code).collect(),
            scores: items.iter().map(|(.., score)| *score).collect(),
            is_all,
            may_go_further: false,
            selected: 3,
            candidates: 2,
        };
        // Item 4 has the best score and is not selected; 2 and 3 have equal scores, so the lower id ranks first.
        let (one, two) = (of(&[(1, 9.0, 5.0), (3, 7.0, 6.0)], false), of(&[(2, 8.0, 6.0), (4, 6.0, 9.0)], true));
        let one_shard = |selected: &Selected| vec![selected.clone()];
        let parts = [one_shard(&one), one_shard(&two)];
        let parts: Vec<&[Selected]> = parts.iter().map(Vec::as_slice).collect();
        let expected = vec![vec![vec![(ItemId(3), 6.0)]], vec![vec![(ItemId(2), 6.0)]]];
        assert_eq!(candidates(&parts, 2).unwrap(), Next::Done(expected));
        // With one more item to select, the first shard may have more candidates than it sent.
        let more = |s: &Selected| vec![Selected { selected: 4, ..s.clone() }];
        let parts = [more(&one), more(&two)];
        let parts: Vec<&[Selected]> = parts.iter().map(Vec::as_slice).collect();
        assert_eq!(candidates(&parts, 2).unwrap(), Next::Again(vec![0]));
        let further = |s: &Selected| vec![Selected { may_go_further: true, is_all: true, selected: 9, ..s.clone() }];
        let parts = [further(&one), further(&two)];
        let parts: Vec<&[Selected]> = parts.iter().map(Vec::as_slice).collect();
        assert_eq!(candidates(&parts, 5).unwrap(), Next::Further);
        assert!(matches!(candidates(&parts, 4).unwrap(), Next::Done(_)));
        assert!(candidates(&[parts[0], &[]], 1).is_err());
    }
}
