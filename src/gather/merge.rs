//! Sorted parts to one sorted whole, and whether it is proven.

use std::cmp::Ordering;

use crate::error::{Error, Result};
use crate::request::{Ranked, Selected};
use crate::units::ItemId;

/// What follows from what the shards sent.
#[derive(Clone, Debug, PartialEq)]
pub enum Next<T> {
    /// It is the answer.
    Done(T),
    /// These shards, by their places, must send all that they may have of it.
    Again(Vec<usize>),
    /// All shards must probe on: there are fewer items in the lists that they probed than results.
    Further,
}

/// The candidates of one shard: of each query of the user its items with their retrieval scores, best first.
pub type Chosen = Vec<Vec<(ItemId, f32)>>;

/// What one shard sent, best first; equal scores by id.
#[derive(Clone, Copy, Debug)]
pub struct OfShard<'a> {
    /// The items.
    pub ids: &'a [ItemId],
    /// By which they are ordered.
    pub scores: &'a [f32],
    /// True where the shard has no more.
    pub is_all: bool,
}

impl OfShard<'_> {
    fn before(&self, at: usize, other: &OfShard<'_>, other_at: usize) -> Ordering {
        // Sums with +0 make one zero of two.
        let (score, other_score) = (self.scores[at] + 0.0, other.scores[other_at] + 0.0);
        other_score.total_cmp(&score).then_with(|| self.ids[at].cmp(&other.ids[other_at]))
    }
}

/// The best `k` of all parts, as places: the part, and the item in it.
fn best(parts: &[OfShard<'_>], k: usize) -> Next<Vec<(usize, usize)>> {
    let mut order: Vec<(usize, usize)> =
        parts.iter().enumerate().flat_map(|(n, part)| (0..part.ids.len()).map(move |at| (n, at))).collect();
    let before = |a: &(usize, usize), b: &(usize, usize)| parts[a.0].before(a.1, &parts[b.0], b.1);
    if k < order.len() {
        order.select_nth_unstable_by(k, before);
        order.truncate(k);
    }
    order.sort_unstable_by(before);
    // What a shard did not send is worse than its last: nothing of it is missing where that last one is not among the best, or is
    // the very last of them.
    let is_proven = |n: usize, part: &OfShard<'_>| {
        part.is_all
            || k == 0
            || match part.ids.len().checked_sub(1) {
                None => false,
                Some(last) => match order.iter().position(|place| *place == (n, last)) {
                    None => true,
                    Some(at) => at + 1 == k,
                },
            }
    };
    let again: Vec<usize> = (0..parts.len()).filter(|&n| !is_proven(n, &parts[n])).collect();
    if again.is_empty() { Next::Done(order) } else { Next::Again(again) }
}

/// The candidates of each shard. `of_shards` are the answers of all shards, each with as many queries; `k` are the results that are asked for.
///
/// # Errors
/// `Internal` where the shards do not speak of the same queries.
pub fn candidates(of_shards: &[&[Selected]], k: usize) -> Result<Next<Vec<Chosen>>> {
    let queries = of_shards.first().map_or(0, |first| first.len());
    let is_whole =
        |selected: &Selected| selected.ids.len() == selected.codes.len() && selected.ids.len() == selected.scores.len();
    if of_shards.iter().any(|shard| shard.len() != queries || !shard.iter().all(is_whole)) {
        return Err(Error::internal("shards answered of different queries"));
    }
    let mut chosen = vec![vec![Vec::new(); queries]; of_shards.len()];
    let mut again: Vec<usize> = Vec::new();
    for query in 0..queries {
        let selected: Vec<&Selected> = of_shards.iter().map(|shard| &shard[query]).collect();
        let most = |wanted: fn(&Selected) -> usize| selected.iter().map(|s| wanted(s)).max().unwrap_or(0);
        let of_codes: Vec<OfShard<'_>> =
            selected.iter().map(|s| OfShard { ids: &s.ids, scores: &s.codes, is_all: s.is_all }).collect();
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
        let of_scores: Vec<OfShard<'_>> =
            selected.iter().map(|s| OfShard { ids: &s.ids, scores: &s.scores, is_all: true }).collect();
        order.sort_unstable_by(|a, b| of_scores[a.0].before(a.1, &of_scores[b.0], b.1));
        for &(shard, at) in order.iter().take(most(|s| s.candidates)) {
            chosen[shard][query].push((selected[shard].ids[at], selected[shard].scores[at]));
        }
    }
    again.sort_unstable();
    again.dedup();
    Ok(if again.is_empty() { Next::Done(chosen) } else { Next::Again(again) })
}

/// The best `k` of what shards ranked, as places: the shard, and the item in its answer. `asked` are the results that each was
/// asked for, and the candidates that it had at most: of all queries of the user, some of them perhaps the same.
pub fn results(of_shards: &[&Ranked], asked: &[(usize, usize)], k: usize) -> Next<Vec<(usize, usize)>> {
    let part = |n: usize| {
        let (asked, had) = asked[n];
        let ids = &of_shards[n].ids;
        OfShard { ids, scores: &of_shards[n].scores, is_all: had <= asked || ids.len() < asked }
    };
    let parts: Vec<OfShard<'_>> = (0..of_shards.len()).map(part).collect();
    best(&parts, k)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    type Scored = (i64, i8);

    /// Few scores, so that most are equal.
    fn catalogue() -> impl Strategy<Value = Vec<Scored>> {
        proptest::collection::btree_map(-40i64..40, -3i8..4, 0..60).prop_map(|items| items.into_iter().collect())
    }

    fn sorted(mut items: Vec<Scored>) -> Vec<Scored> {
        items.sort_by_key(|(id, score)| (-score, *id));
        items
    }

    proptest! {
        #[test]
        fn what_is_proven_is_what_one_would_find(items in catalogue(), shards in 1usize..6, k in 0usize..30, cut in 0usize..12) {
            let mut parts = vec![Vec::new(); shards];
            for item in &items {
                parts[item.0.rem_euclid(shards as i64) as usize].push(*item);
            }
            let parts: Vec<Vec<Scored>> = parts.into_iter().map(sorted).collect();
            let sent = |most: usize| parts.iter().map(|part| part[..part.len().min(most)].to_vec()).collect::<Vec<_>>();
            let merge = |sent: &[Vec<Scored>]| {
                let ids: Vec<Vec<ItemId>> = sent.iter().map(|p| p.iter().map(|(id, _)| ItemId(*id)).collect()).collect();
                let scores: Vec<Vec<f32>> =
                    sent.iter().map(|p| p.iter().map(|(_, s)| if *s == 0 { -0.0 } else { f32::from(*s) }).collect()).collect();
                let of = |n: usize| OfShard { ids: &ids[n], scores: &scores[n], is_all: sent[n].len() == parts[n].len() };
                best(&(0..shards).map(of).collect::<Vec<_>>(), k)
            };
            let mut expected = sorted(items.clone());
            expected.truncate(k);
            let found = |order: Vec<(usize, usize)>, sent: &[Vec<Scored>]| {
                order.into_iter().map(|(shard, at)| sent[shard][at]).collect::<Vec<_>>()
            };
            let few = sent(cut);
            match merge(&few) {
                Next::Done(order) => prop_assert_eq!(found(order, &few), expected.clone()),
                Next::Again(again) => {
                    prop_assert!(again.iter().all(|&n| few[n].len() < parts[n].len()));
                    // Those that are named send enough for any K, the others what they did.
                    let full = sent(k);
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
    fn candidates_are_cut_by_codes_first_and_by_scores_then() {
        let of = |items: &[(i64, f32, f32)], is_all| Selected {
            ids: items.iter().map(|(id, ..)| ItemId(*id)).collect(),
            codes: items.iter().map(|(_, code, _)| *code).collect(),
            scores: items.iter().map(|(.., score)| *score).collect(),
            is_all,
            may_go_further: false,
            selected: 3,
            candidates: 2,
        };
        // Item 4 has the best score and is not selected; of 2 and 3, as good, the lower id goes first.
        let (one, two) = (of(&[(1, 9.0, 5.0), (3, 7.0, 6.0)], false), of(&[(2, 8.0, 6.0), (4, 6.0, 9.0)], true));
        let one_shard = |selected: &Selected| vec![selected.clone()];
        let parts = [one_shard(&one), one_shard(&two)];
        let parts: Vec<&[Selected]> = parts.iter().map(Vec::as_slice).collect();
        let expected = vec![vec![vec![(ItemId(3), 6.0)]], vec![vec![(ItemId(2), 6.0)]]];
        assert_eq!(candidates(&parts, 2).unwrap(), Next::Done(expected));
        // With one more to select, the first shard may have missed some.
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
