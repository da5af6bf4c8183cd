//! Sorted parts to one sorted whole, and whether it is proven.

use std::cmp::Ordering;

use sterling_core::error::{Error, Result};
use sterling_core::request::{RankedAhead, Selected};
use sterling_core::units::{ItemId, by_score};

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
    /// Which of them may be among the best, where not all may: the others say only what the rest of the shard is worse than.
    pub counts: Option<&'a [bool]>,
    /// True where the shard has no more.
    pub is_all: bool,
}

impl OfShard<'_> {
    fn at(&self, place: usize) -> (ItemId, f32) {
        (self.ids[place], self.scores[place])
    }

    /// Those that may be among the best.
    fn places(&self) -> impl Iterator<Item = usize> {
        (0..self.ids.len()).filter(|&place| self.counts.is_none_or(|counts| counts[place]))
    }
}

/// The order of items: by score, equal ones by id.
fn order_of((id, score): (ItemId, f32), (other, other_score): (ItemId, f32)) -> Ordering {
    by_score(score, other_score).then_with(|| id.cmp(&other))
}

/// The best `k` of all parts, as places: the part, and the item in it.
pub fn best(parts: &[OfShard<'_>], k: usize) -> Next<Vec<(usize, usize)>> {
    let mut order: Vec<(usize, usize)> =
        parts.iter().enumerate().flat_map(|(n, part)| part.places().map(move |at| (n, at))).collect();
    let item = |&(n, at): &(usize, usize)| parts[n].at(at);
    let before = |a: &(usize, usize), b: &(usize, usize)| order_of(item(a), item(b));
    // Each part is in order: what sorts stably merges them.
    order.sort_by(before);
    order.truncate(k);
    // What a shard did not send is worse than its last: nothing of it is missing where that last one is no better than the worst of
    // the best, and these are complete.
    let worst = k.checked_sub(1).map(|last| order.get(last).map(item));
    let is_proven = |part: &OfShard<'_>| match (worst, part.ids.len().checked_sub(1)) {
        (None, _) => true,
        (Some(Some(worst)), Some(last)) => part.is_all || order_of(part.at(last), worst).is_ge(),
        (Some(_), _) => part.is_all,
    };
    let again: Vec<usize> = (0..parts.len()).filter(|&n| !is_proven(&parts[n])).collect();
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
        let of_codes: Vec<OfShard<'_>> = selected
            .iter()
            .map(|s| OfShard { ids: &s.ids, scores: &s.codes, counts: None, is_all: s.is_all })
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

/// Which of the results that a shard ranked ahead are of the candidates that were chosen there; none where some of these were not
/// valued.
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
        fn what_is_proven_is_what_one_would_find(
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
                    OfShard { ids: &ids[n], scores: &scores[n], counts, is_all }
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
                    // Those that are named send enough for any K, the others what they did.
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
    fn of_what_is_ranked_ahead_candidates_count_where_all_of_them_were_valued() {
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
