//! Steps 4 to 11 for a group on several devices, each with a part of every list: the host merges their candidates, and each
//! device reranks its own.
//!
//! All devices have the centroids and so choose the same lists. Each device selects as many candidates by code scores as are
//! needed in total, and scores them by their most precise rows. The host selects the best candidates by codes, then the best of
//! those by rows, as a single device would, and returns to each device its own candidates. After reranking, the host merges the
//! results. Searches that scan lists until enough candidates are found synchronize after every round: each device checks the
//! candidates of all devices, so all devices continue or end together.

use std::cmp::Reverse;

use super::answers::{SubmittedGroup, SubmittedWork};
use super::candidates::{Candidate, Counters, Found, HostFound, LaterFound, QueryCounters, candidates_of};
use super::embedded::{HostUsers, Users};
use super::groups::{CandidateMethod, Group, OneQuery, SeenView};
use super::rerank::{self, LaterColumns};
use super::search::{self, Filtering, GroupQueries};
use super::select;
use crate::pass::work::{Prepared, Task};
use sterling_core::error::Result;
use sterling_core::units::ItemId;
use sterling_cuda::ops::scan::SearchResults;
use sterling_cuda::ops::top::bucket;
use sterling_cuda::{Array, Device, Later};

/// Searches and reranks for a group: waits for the candidates of the devices, but not for the reranking.
pub(super) fn send(
    lanes: &[Device],
    seen: &[SeenView<'_>],
    (requests, users): (&[&Prepared], &HostUsers),
    group: Group,
) -> Result<SubmittedGroup> {
    let tasks: Vec<&Task> = requests.iter().map(|prepared| &prepared.task).collect();
    let queries = OneQuery::all(&tasks, seen[0].resident.queries());
    let users = lanes.iter().map(|device| users.some(device, &group.requests)).collect::<Result<Vec<Users>>>()?;
    let asking = lanes.iter().zip(seen).zip(users);
    let asking =
        asking.map(|((device, &seen), users)| GroupQueries { device, seen, queries: &queries, users, is_part: true });
    let found = match group.way {
        CandidateMethod::Enough => search_in_rounds(asking, &group, queries.len())?,
        _ => asking.map(|asking| search::search(asking, &group)).collect::<Result<Vec<Found>>>()?,
    };
    let later = select::send(lanes, &found)?;
    if group.is_selection {
        return Ok(SubmittedGroup::new(lanes, group, SubmittedWork::Found(later)));
    }
    let users: Vec<Users> = found.into_iter().map(|found| found.users).collect();
    let found = later.into_iter().map(LaterFound::get).collect::<Result<Vec<HostFound>>>()?;
    let chosen = queries.iter().enumerate().map(|query| choose(&found, seen, query));
    let chosen: Vec<Vec<Vec<(u32, u32)>>> = chosen.collect();
    let mut columns: Vec<LaterColumns> = Vec::new();
    for (at, (device, users)) in lanes.iter().zip(users).enumerate() {
        let of_device: Vec<&[(u32, u32)]> = chosen.iter().map(|of_query| &of_query[at][..]).collect();
        let (best, counters) = (search::given(device, &of_device)?, Counters::default());
        let found = Found { users, best, wide: None, counters };
        columns.push(rerank::rerank(device, seen[at].resident, (requests, group.reranked), found)?);
    }
    let mut looked_at = vec![QueryCounters::default(); queries.len()];
    for of_device in &found {
        looked_at.iter_mut().zip(&of_device.looked_at).for_each(|(sum, of_device)| sum.add(of_device));
    }
    Ok(SubmittedGroup::new(lanes, group, SubmittedWork::Columns(columns, looked_at)))
}

/// Returns the best candidates of query `n` of a group, per owning device: their ordered keys and slots.
fn choose(found: &[HostFound], seen: &[SeenView<'_>], (n, query): (usize, &OneQuery<'_>)) -> Vec<Vec<(u32, u32)>> {
    let mut all = candidates_of(found, n);
    let searched = query.searched(seen[0].view.main());
    if let Some(searched) = searched.filter(|_| found.iter().any(|found| found.wide.is_some())) {
        keep(&mut all, searched.selected, seen, |candidate| candidate.keys[0]);
    }
    let most = searched.map_or(all.len(), |searched| searched.query.k0);
    keep(&mut all, most, seen, |candidate| candidate.keys[1]);
    let of_device = |device: usize| all.iter().filter(move |candidate| candidate.device == device);
    let own = |device: usize| of_device(device).map(|candidate| (candidate.keys[1], candidate.slot)).collect();
    (0..found.len()).map(own).collect()
}

/// Retains the best candidates; ties are broken by the lower id.
fn keep(all: &mut Vec<Candidate>, most: usize, seen: &[SeenView<'_>], key: impl Fn(&Candidate) -> u32) {
    if most >= all.len() {
        return;
    }
    let id = |of: &Candidate| -> ItemId { seen[of.device].view.id(seen[of.device].beside.of_device(of.slot)) };
    let before = |a: &Candidate, b: &Candidate| Reverse(key(a)).cmp(&Reverse(key(b))).then_with(|| id(a).cmp(&id(b)));
    all.select_nth_unstable_by(most, before);
    all.truncate(most);
}

/// Runs searches that scan lists until enough candidates are found. After each round, every device checks termination with the
/// candidates of all devices.
fn search_in_rounds<'a>(
    asking: impl Iterator<Item = GroupQueries<'a>>,
    group: &Group,
    queries: usize,
) -> Result<Vec<Found>> {
    let asking: Vec<GroupQueries<'_>> = asking.collect();
    let lanes: Vec<&Device> = asking.iter().map(|asking| asking.device).collect();
    let begin = |asking| Filtering::begin(asking, group);
    let searches = asking.into_iter().map(begin).collect::<Result<Vec<Filtering<'_>>>>()?;
    let rounds = searches.first().map_or(0, Filtering::rounds);
    let mut kept = AllDeviceCandidates::new(queries, searches.len());
    for round in 0..rounds {
        let mut later = Vec::new();
        for (device, search) in lanes.iter().zip(&searches) {
            search.scan(round)?;
            later.push(LaterRound::of(search, queries)?);
            device.flush()?;
        }
        let of_devices = later.into_iter().map(LaterRound::get).collect::<Result<Vec<Round>>>()?;
        if of_devices[0].is_over {
            break;
        }
        kept.take(&of_devices);
        for (device, search) in lanes.iter().zip(&searches) {
            let on_device = kept.copy(device)?;
            search.look(round, &on_device.kept())?;
        }
    }
    searches.into_iter().map(Filtering::end).collect()
}

/// Candidates of a device after a round, while they are copied to the host.
struct LaterRound {
    stride: usize,
    keys: Later<u32>,
    counts: Later<u32>,
    survivors: Later<u32>,
    last: [Later<u32>; 2],
}

/// Candidates of a device after a round.
struct Round {
    /// Ordered keys of the best candidates of each search, best first.
    best: Vec<Vec<u32>>,
    survivors: Vec<u32>,
    /// True if no search had lists in this round.
    is_over: bool,
}

impl LaterRound {
    fn of(search: &Filtering<'_>, queries: usize) -> Result<Self> {
        let (best, survivors) = search.best()?;
        let [begins, ends] = search.last_round();
        Ok(LaterRound {
            stride: best.stride,
            keys: best.keys.later(best.keys.len())?,
            counts: best.counts.later(queries)?,
            survivors: survivors.later(queries)?,
            last: [begins.later(queries)?, ends.later(queries)?],
        })
    }

    fn get(self) -> Result<Round> {
        let (keys, counts, [begins, ends]) = (self.keys.get()?, self.counts.get()?, self.last);
        let of_search = |(n, &count): (usize, &u32)| {
            let mut keys = keys[n * self.stride..][..count as usize].to_vec();
            keys.sort_unstable_by_key(|&key| Reverse(key));
            keys
        };
        let best = counts.iter().enumerate().map(of_search).collect();
        Ok(Round { best, survivors: self.survivors.get()?, is_over: begins.get()? == ends.get()? })
    }
}

/// Candidates of all devices per search so far.
struct AllDeviceCandidates {
    /// Scores of candidates per search, later ones appended.
    rows: Vec<Vec<u32>>,
    /// Best candidates at the last check, per device and search.
    before: Vec<Vec<Vec<u32>>>,
    survivors: Vec<u32>,
}

/// Candidates of one device per search so far.
struct OneDeviceCandidates {
    keys: Array<u32>,
    counts: Array<u32>,
    survivors: Array<u32>,
    room: usize,
}

impl OneDeviceCandidates {
    fn kept(&self) -> SearchResults<'_> {
        let OneDeviceCandidates { keys, counts, survivors, room } = self;
        SearchResults { keys, counts, survivors, room: *room, bytes: keys.bytes() }
    }
}

impl AllDeviceCandidates {
    fn new(searches: usize, devices: usize) -> Self {
        AllDeviceCandidates {
            rows: vec![Vec::new(); searches],
            before: vec![vec![Vec::new(); searches]; devices],
            survivors: Vec::new(),
        }
    }

    /// Adds the candidates of a round.
    fn take(&mut self, of_devices: &[Round]) {
        let survivors = |n: usize| of_devices.iter().map(|round| round.survivors[n]).sum();
        self.survivors = (0..self.rows.len()).map(survivors).collect();
        for (before, round) in self.before.iter_mut().zip(of_devices) {
            for ((row, before), best) in self.rows.iter_mut().zip(before).zip(&round.best) {
                row.extend(beyond(before, best));
                before.clone_from(best);
            }
        }
    }

    fn copy(&self, device: &Device) -> Result<OneDeviceCandidates> {
        let room = bucket(self.rows.iter().map(Vec::len).max().unwrap_or(0));
        let mut keys = vec![0; self.rows.len() * room];
        self.rows.iter().enumerate().for_each(|(n, row)| keys[n * room..][..row.len()].copy_from_slice(row));
        let counts: Vec<u32> = self.rows.iter().map(|row| row.len() as u32).collect();
        let (keys, counts, survivors) = (device.copy(&keys)?, device.copy(&counts)?, device.copy(&self.survivors)?);
        Ok(OneDeviceCandidates { keys, counts, survivors, room })
    }
}

/// Returns the values of `now` that are not in `before`, both in descending order and counted with multiplicity.
fn beyond(before: &[u32], now: &[u32]) -> Vec<u32> {
    let mut before = before.iter().copied().peekable();
    let is_new = |&key: &u32| {
        while before.next_if(|&known| known > key).is_some() {}
        before.next_if_eq(&key).is_none()
    };
    now.iter().copied().filter(is_new).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_missing_entries_are_uploaded() {
        assert_eq!(beyond(&[], &[3, 1]), [3, 1]);
        assert_eq!(beyond(&[9, 7, 7, 4], &[9, 8, 7, 7, 7]), [8, 7]);
        assert!(beyond(&[5, 5], &[5, 5]).is_empty());
        assert_eq!(beyond(&[5, 4, 3], &[9, 9, 5]), [9, 9]);
    }
}
