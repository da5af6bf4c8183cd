//! Requests that find their candidates alike, as many together as the device has memory for.

use super::beside::DeviceView;
use super::embedded::Embedded;
use super::resident::Resident;
use crate::pass::work::{Search, Task};
use crate::view::View;
use sterling_core::error::{Error, Result};
use sterling_cuda::ops::ROWS_MAX;
use sterling_cuda::ops::scan::Collection;
use sterling_cuda::ops::top::bucket;
use sterling_index::filter::{Plan, Route};
use sterling_index::search::SearchPlan;
use sterling_snapshot::Snapshot;

/// What requests of a batch see, on the host and on a device.
#[derive(Clone, Copy)]
pub(super) struct SeenView<'a> {
    pub(super) view: &'a View,
    pub(super) resident: &'a Resident,
    pub(super) beside: &'a DeviceView,
    /// True on the first of several devices, which tells what all of them know.
    pub(super) is_first: bool,
}

/// How candidates are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Way {
    /// There are none.
    Nothing,
    /// These slots: those of posting lists, or those that a request names.
    Named,
    /// These, with the scores that they come with.
    Scored,
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
    /// Shards' parts of the candidates of searches, which are not reranked.
    pub(super) is_selection: bool,
    pub(super) way: Way,
    pub(super) requests: Vec<usize>,
    /// Candidates that are collected for each query of a request at most.
    pub(super) room: usize,
    /// Candidates that are kept of each query at most, K0.
    pub(super) candidates: usize,
    /// Candidates that are reranked of each request at most: those of all its queries.
    pub(super) reranked: usize,
    /// The plans whose filter bitmaps are evaluated, each once; by their addresses.
    plans: Vec<usize>,
}

/// One query of a request: where its user has several, each is searched by itself.
#[derive(Clone, Copy)]
pub(super) struct OneQuery<'a> {
    pub(super) task: &'a Task,
    /// Its place among those of the user.
    pub(super) n: usize,
}

/// What a query searches for.
#[derive(Clone, Copy)]
pub(super) struct Searched<'a> {
    pub(super) search: &'a Search,
    pub(super) query: &'a SearchPlan,
    /// Those that are selected by int8 scores.
    pub(super) selected: usize,
    /// Those that are kept: K0, or all that are selected, where those of other shards may be better.
    pub(super) kept: usize,
}

impl<'a> OneQuery<'a> {
    /// The queries of requests, of which each has so many, one request after the other.
    pub(super) fn all(tasks: &[&'a Task], each: usize) -> Vec<Self> {
        tasks.iter().flat_map(|&task| (0..each).map(move |n| OneQuery { task, n })).collect()
    }

    /// What it searches for; none where the request names its slots itself.
    pub(super) fn searched(self, snapshot: &Snapshot) -> Option<Searched<'a>> {
        let search = self.task.search()?;
        let query = &search.queries[self.n];
        let (selected, kept) = match query.selected {
            Some(selected) => (selected, selected),
            None => (snapshot.index.rows().selected(query.k0).max(query.by_int8), query.k0),
        };
        Some(Searched { search, query, selected, kept })
    }
}

/// Which items are eligible: those of the snapshot, then those of each segment.
pub(super) fn plans_of(search: &Search) -> Vec<&Plan> {
    std::iter::once(&search.planned.plan).chain(&search.planned.beside).collect()
}

/// Items of the snapshot, then of each segment, those that are gone with them.
pub(super) fn items_of(view: &View) -> impl Iterator<Item = usize> {
    std::iter::once(view.main().index.items()).chain(view.segments().map(|(_, segment, _)| segment.index().items()))
}

/// How many lists a filtered search takes at most.
pub(super) fn most_lists(snapshot: &Snapshot, search: &Search) -> usize {
    let lists = snapshot.index.lists();
    snapshot.recipe.serving.probes_max_of(lists).clamp(search.probes.probes.clamp(1, lists), lists)
}

impl Group {
    /// The requests in groups, none of which takes more memory of a device than the budget, but for those of one request. All devices
    /// have the same groups.
    pub(super) fn all(
        seen: &[SeenView<'_>],
        embedded: &Embedded<'_>,
        requests: Vec<usize>,
        budget_bytes: usize,
    ) -> Vec<Group> {
        let mut alone: Vec<Group> =
            requests.into_iter().map(|n| Group::of(seen, &embedded.requests[n].1.task, n)).collect();
        // Those of one size together: each takes the room of the largest.
        alone.sort_by_key(|group| (group.is_selection, group.way, group.room, group.candidates, group.reranked));
        let mut groups: Vec<Group> = Vec::new();
        for one in alone {
            if let Some(last) =
                groups.last_mut().filter(|last| (last.is_selection, last.way) == (one.is_selection, one.way))
            {
                let both = last.with(&one);
                let queries = both.requests.len() * seen[0].resident.queries();
                if both.bytes(seen) <= budget_bytes && queries <= ROWS_MAX.min(1 << 14) {
                    *last = both;
                    continue;
                }
            }
            groups.push(one);
        }
        groups
    }

    /// The requests of both.
    fn with(&self, other: &Group) -> Group {
        let new = other.plans.iter().filter(|plan| !self.plans.contains(plan));
        Group {
            requests: self.requests.iter().chain(&other.requests).copied().collect(),
            room: self.room.max(other.room),
            candidates: self.candidates.max(other.candidates),
            reranked: self.reranked.max(other.reranked),
            plans: self.plans.iter().chain(new).copied().collect(),
            ..*self
        }
    }

    /// Bytes that its requests take of each device at most.
    fn bytes(&self, seen: &[SeenView<'_>]) -> usize {
        let of_filter = |seen: &SeenView<'_>| {
            let pieces = seen.beside.pieces.iter().map(|piece| &piece.segment.planes);
            let words = std::iter::once(&seen.resident.planes).chain(pieces).map(|planes| planes.index().every.len());
            8 * words.sum::<usize>()
        };
        let of_filters = self.plans.len() * seen.iter().map(of_filter).max().unwrap_or(0);
        let of_request = bytes_a_request(seen[0].resident, self.room, self.reranked);
        self.requests.len().saturating_mul(of_request).saturating_add(of_filters)
    }

    /// Why a device cannot do a task at all, which the others of its batch are not to know.
    ///
    /// # Errors
    /// `Unsupported` for a filter that nests too deep; `Overloaded` for a request that takes more than `bytes_max` of a device's memory.
    pub(super) fn check(seen: &[SeenView<'_>], task: &Task, bytes_max: u64) -> Result<()> {
        if matches!(task, Task::Embed { .. }) {
            return Ok(());
        }
        let group = Group::of(seen, task, 0);
        if !group.plans.is_empty()
            && let Some(search) = task.search()
        {
            plans_of(search).into_iter().try_for_each(Plan::check_lowered)?;
        }
        let bytes = group.bytes(seen) as u64;
        if bytes > bytes_max {
            let what = format!("the request takes {bytes} bytes of a device's memory, expected at most {bytes_max}");
            return Err(Error::overloaded(what));
        }
        Ok(())
    }

    fn of(seen: &[SeenView<'_>], task: &Task, n: usize) -> Group {
        let (way, room, candidates, reranked) = match task {
            Task::Embed { .. } => (Way::Nothing, 0, 0, 0),
            Task::Select { search, .. } => {
                let most = search.queries.iter().filter_map(|query| query.selected).max().unwrap_or(0);
                let (way, room, candidates) = Group::of_search(seen, search, most);
                (way, room, candidates, 0)
            }
            Task::Rerank { candidates, .. } => {
                let most = candidates.iter().map(Vec::len).max().unwrap_or(0);
                (Way::Scored, most, most, candidates.iter().map(Vec::len).sum())
            }
            Task::Rank { slots, .. } => (Way::Named, slots.len(), slots.len(), slots.len()),
            Task::Retrieve(search) => {
                let most = search.queries.iter().map(|query| query.k0).max().unwrap_or(0);
                let (way, room, candidates) = Group::of_search(seen, search, most);
                (way, room, candidates, search.queries.iter().map(|query| query.k0.min(candidates)).sum())
            }
        };
        let [room, candidates, reranked] = [room, candidates, reranked].map(bucket);
        let is_selection = matches!(task, Task::Select { .. });
        let by_words = task.search().filter(|_| matches!(way, Way::Enough | Way::Exact)).map(plans_of);
        let filters = by_words.into_iter().flatten().filter(|plan| !matches!(plan.route(), Route::All)).take(1);
        let plans = filters.map(|plan| std::ptr::from_ref(plan) as usize).collect();
        Group { is_selection, way, requests: vec![n], room, candidates, reranked, plans }
    }

    /// How the candidates of a search are found, how many are collected, and how many of `k0` are kept, of each query.
    fn of_search(seen: &[SeenView<'_>], search: &Search, k0: usize) -> (Way, usize, usize) {
        let SeenView { view, resident, beside, .. } = seen[0];
        let (index, lists) = (&resident.index, search.probes.probes);
        let scanned = |seen: &SeenView<'_>, lists: usize| {
            seen.resident.index.items_at_most(lists) + seen.beside.items_at_most(lists)
        };
        let scanned = |lists: usize| seen.iter().map(|seen| scanned(seen, lists)).max().unwrap_or(0);
        let plans = plans_of(search);
        let all_alike = |is_such: fn(&Route) -> bool| plans.iter().all(|plan| is_such(plan.route()));
        // What a posting list tells of, and all of a part that it does not.
        let most = |(plan, items): (&&Plan, usize)| match plan.route() {
            Route::Nothing => 0,
            Route::Slots(slots) => slots.len(),
            Route::All | Route::Words => items,
        };
        let named: usize = plans.iter().zip(items_of(view)).map(most).sum();
        if all_alike(|route| matches!(route, Route::Nothing)) {
            (Way::Nothing, 0, 0)
        } else if all_alike(|route| matches!(route, Route::Nothing | Route::Slots(_))) {
            (Way::Named, named, k0.min(named))
        } else if search.is_exact() || matches!(plans[0].route(), Route::Nothing | Route::Slots(_)) {
            (Way::Exact, named.min(scanned(index.lists.lists())), k0)
        } else {
            let at_least = index.items_at_least(lists).saturating_sub(beside.gone_at_most(lists));
            let is_there = at_least >= search.k + search.excluded.len();
            if is_there && all_alike(|route| matches!(route, Route::All)) {
                (Way::Best, scanned(lists), k0)
            } else {
                (Way::Enough, scanned(most_lists(view.main(), search)), k0)
            }
        }
    }

    /// The requests of which something holds, and the group of the others.
    pub(super) fn split(self, holds: impl Fn(&usize) -> bool) -> (Vec<usize>, Group) {
        let (those, others) = self.requests.iter().copied().partition(|n| holds(n));
        (those, Group { requests: others, ..self })
    }
}

/// Bytes that a request takes on the device while its group goes through.
fn bytes_a_request(resident: &Resident, room: usize, reranked: usize) -> usize {
    let (lists, queries) = (resident.index.lists.lists(), resident.queries());
    let program = resident.reranker.as_ref().map_or(0, |reranker| reranker.program.run_bytes(reranked));
    let rated = reranked.saturating_mul(48 + 8 * resident.value.tasks);
    let collected = Collection::bytes_a_query(resident.index.dimension());
    let of_query = room.saturating_mul(12) + collected + lists * 32 + 4 * resident.index.dimension();
    of_query.saturating_mul(queries).saturating_add(program).saturating_add(rated) + 4 * resident.user_numbers
}
