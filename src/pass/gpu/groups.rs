//! Requests that find their candidates alike, as many together as the device has memory for.

use super::embedded::Embedded;
use super::resident::Resident;
use crate::device::cuda::ops::ROWS_MAX;
use crate::device::cuda::ops::scan::Collection;
use crate::device::cuda::ops::top::bucket;
use crate::filter::Route;
use crate::pass::work::{Search, Task};
use crate::snapshot::Snapshot;

/// How candidates are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Way {
    /// There are none.
    Nothing,
    /// These slots: those of posting lists, or those that a request names.
    Named,
    /// The best lists, all items of them.
    Best,
    /// As many lists, best first, as hold enough eligible items.
    Enough,
    /// Every eligible item by its widest row.
    Exact,
}

/// Requests that go through the device together, by their places among the embedded ones.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) way: Way,
    pub(super) requests: Vec<usize>,
    /// Candidates that are collected of each request at most.
    pub(super) room: usize,
    /// Candidates that are reranked of each at most, K0.
    pub(super) candidates: usize,
}

/// What a search is by its request, its snapshot apart.
pub(super) fn search_of(task: &Task) -> Option<&Search> {
    match task {
        Task::Retrieve(search) => Some(search),
        _ => None,
    }
}

/// How many lists a filtered search takes at most.
pub(super) fn most_lists(snapshot: &Snapshot, search: &Search) -> usize {
    let lists = snapshot.index.lists();
    snapshot.recipe.serving.probes_max_of(lists).clamp(search.probes.probes.clamp(1, lists), lists)
}

/// Candidates that are selected by int8 scores.
pub(super) fn selected_of(snapshot: &Snapshot, search: &Search) -> usize {
    snapshot.index.rows().selected(search.k0_alone())
}

impl Group {
    /// The requests in groups, none of which takes more memory than the budget, but for those of one request.
    pub(super) fn all(
        snapshot: &Snapshot,
        resident: &Resident,
        embedded: &Embedded<'_>,
        requests: Vec<usize>,
        budget_bytes: usize,
    ) -> Vec<Group> {
        let mut alone: Vec<Group> =
            requests.into_iter().map(|n| Group::of(snapshot, resident, &embedded.requests[n].1.task, n)).collect();
        // Those of one size together: each takes the room of the largest.
        alone.sort_by_key(|group| (group.way, group.room, group.candidates));
        let mut groups: Vec<Group> = Vec::new();
        for one in alone {
            if let Some(last) = groups.last_mut().filter(|last| last.way == one.way) {
                let (room, candidates) = (last.room.max(one.room), last.candidates.max(one.candidates));
                let count = last.requests.len() + 1;
                let bytes = count.saturating_mul(bytes_a_request(resident, room, candidates));
                if bytes <= budget_bytes && count <= ROWS_MAX.min(1 << 14) {
                    last.requests.extend(one.requests);
                    (last.room, last.candidates) = (room, candidates);
                    continue;
                }
            }
            groups.push(one);
        }
        groups
    }

    fn of(snapshot: &Snapshot, resident: &Resident, task: &Task, n: usize) -> Group {
        let (index, items) = (&resident.index, snapshot.index.items());
        let (way, room, candidates) = match task {
            Task::Embed { .. } | Task::Select { .. } | Task::Rerank { .. } => (Way::Nothing, 0, 0),
            Task::Rank { slots, .. } => (Way::Named, slots.len(), slots.len()),
            Task::Retrieve(search) => match search.planned.plan.route() {
                Route::Nothing => (Way::Nothing, 0, 0),
                Route::Slots(slots) => (Way::Named, slots.len(), search.k0_alone().min(slots.len())),
                _ if search.exact => (Way::Exact, items, search.k0_alone()),
                Route::All if index.items_at_least(search.probes.probes) >= search.k + search.excluded.len() => {
                    (Way::Best, index.items_at_most(search.probes.probes), search.k0_alone())
                }
                _ => (Way::Enough, index.items_at_most(most_lists(snapshot, search)), search.k0_alone()),
            },
        };
        Group { way, requests: vec![n], room: bucket(room), candidates: bucket(candidates) }
    }

    /// The requests of which something holds, and the group of the others.
    pub(super) fn split(self, holds: impl Fn(&usize) -> bool) -> (Vec<usize>, Group) {
        let (those, others) = self.requests.iter().copied().partition(|n| holds(n));
        (those, Group { requests: others, ..self })
    }
}

/// Bytes that a request takes on the device while its group goes through.
fn bytes_a_request(resident: &Resident, room: usize, candidates: usize) -> usize {
    let lists = resident.index.lists.lists();
    let program = resident.reranker.as_ref().map_or(0, |reranker| reranker.program.run_bytes(candidates));
    let rated = candidates.saturating_mul(48 + 8 * resident.value.tasks);
    let collected = Collection::bytes_a_query(resident.index.dimension());
    let of_user = 4 * (resident.index.dimension() + resident.user_numbers);
    room.saturating_mul(12).saturating_add(program).saturating_add(rated) + collected + lists * 32 + of_user
}
