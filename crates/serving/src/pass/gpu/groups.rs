//! Groups of requests that find candidates in the same way, as many together as device memory allows.

use super::delta::DeviceView;
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

/// View of the requests of a batch, on the host and on a device.
#[derive(Clone, Copy)]
pub(super) struct SeenView<'a> {
    pub(super) view: &'a View,
    pub(super) resident: &'a Resident,
    pub(super) beside: &'a DeviceView,
    /// True for the first of several devices, which alone reports counts that are the same on all devices.
    pub(super) is_first: bool,
}

/// Method of finding candidates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum CandidateMethod {
    /// No candidates.
    Nothing,
    /// Known slots, from posting lists or from the request.
    Named,
    /// Known slots with known scores.
    Scored,
    /// All items of the best lists.
    Best,
    /// As many lists, best first, as hold enough eligible items.
    Enough,
    /// All eligible items, by their most precise rows.
    Exact,
}

/// Requests that go through the device together, by index among the embedded requests.
#[derive(Clone, Debug)]
pub(super) struct Group {
    /// True if the group selects a shard's candidates, which are not reranked.
    pub(super) is_selection: bool,
    pub(super) way: CandidateMethod,
    pub(super) requests: Vec<usize>,
    /// Maximum number of collected candidates per query.
    pub(super) room: usize,
    /// Maximum number of retained candidates per query, K0.
    pub(super) candidates: usize,
    /// Maximum number of reranked candidates per request, over all its queries.
    pub(super) reranked: usize,
    /// Addresses of the distinct plans whose filter bitmaps are evaluated.
    plans: Vec<usize>,
}

/// One query of a request: each query of a user is searched separately.
#[derive(Clone, Copy)]
pub(super) struct OneQuery<'a> {
    pub(super) task: &'a Task,
    /// Index among the user's queries.
    pub(super) n: usize,
}

/// Search parameters of a query.
#[derive(Clone, Copy)]
pub(super) struct Searched<'a> {
    pub(super) search: &'a Search,
    pub(super) query: &'a SearchPlan,
    /// Number of candidates selected by int8 scores.
    pub(super) selected: usize,
    /// Number of retained candidates: K0, or all selected candidates if other shards may have better ones.
    pub(super) kept: usize,
}

impl Searched<'_> {
    /// Returns true if all items pass the filter of the snapshot.
    pub(super) fn is_unfiltered(&self) -> bool {
        matches!(self.search.planned.plan.route(), Route::All)
    }
}

impl<'a> OneQuery<'a> {
    /// Returns all queries of requests that have `each` queries, request by request.
    pub(super) fn all(tasks: &[&'a Task], each: usize) -> Vec<Self> {
        tasks.iter().flat_map(|&task| (0..each).map(move |n| OneQuery { task, n })).collect()
    }

    /// Returns the search parameters; `None` if the request names its slots.
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

/// Returns the plans for the snapshot and for each segment.
pub(super) fn plans_of(search: &Search) -> Vec<&Plan> {
    std::iter::once(&search.planned.plan).chain(&search.planned.beside).collect()
}

/// Returns the number of items of the snapshot, then of each segment, including deleted ones.
pub(super) fn items_of(view: &View) -> impl Iterator<Item = usize> {
    std::iter::once(view.main().index.items()).chain(view.segments().map(|(_, segment, _)| segment.index().items()))
}

/// Returns the maximum number of lists of a filtered search.
pub(super) fn most_lists(snapshot: &Snapshot, search: &Search) -> usize {
    let lists = snapshot.index.lists();
    snapshot.recipe.serving.probes_max_of(lists).clamp(search.probes.probes.clamp(1, lists), lists)
}

impl Group {
    /// Splits requests into groups within the memory budget of a device; a single request may exceed it. All devices use the same
    /// groups.
    pub(super) fn all(
        seen: &[SeenView<'_>],
        embedded: &Embedded<'_>,
        requests: Vec<usize>,
        budget_bytes: usize,
    ) -> Vec<Group> {
        let mut alone: Vec<Group> =
            requests.into_iter().map(|n| Group::of(seen, &embedded.requests[n].1.task, n)).collect();
        // Groups requests of similar size, since each request of a group takes as much memory as the largest.
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

    /// Merges two groups.
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

    /// Returns the maximum bytes that the group's requests take on each device.
    fn bytes(&self, seen: &[SeenView<'_>]) -> usize {
        let of_filter = |seen: &SeenView<'_>| {
            let deltas = seen.beside.deltas.iter().map(|delta| &delta.segment.planes);
            let words = std::iter::once(&seen.resident.planes).chain(deltas).map(|planes| planes.index().every.len());
            8 * words.sum::<usize>()
        };
        let of_filters = self.plans.len() * seen.iter().map(of_filter).max().unwrap_or(0);
        let of_request = bytes_per_request(seen[0].resident, self.room, self.reranked);
        self.requests.len().saturating_mul(of_request).saturating_add(of_filters)
    }

    /// Checks that a device can execute a task at all, so that the task does not fail the rest of its batch.
    ///
    /// # Errors
    /// `Unsupported` for a filter with too many levels; `Overloaded` for a request that takes more than `bytes_max` of a device's
    /// memory.
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
            Task::Embed { .. } => (CandidateMethod::Nothing, 0, 0, 0),
            Task::Select { search, .. } => {
                let most = search.queries.iter().filter_map(|query| query.selected).max().unwrap_or(0);
                let (way, room, candidates) = Group::plan_of_search(seen, search, most);
                (way, room, candidates, 0)
            }
            Task::Rerank { candidates, .. } => {
                let most = candidates.iter().map(Vec::len).max().unwrap_or(0);
                (CandidateMethod::Scored, most, most, candidates.iter().map(Vec::len).sum())
            }
            Task::Rank { slots, .. } => (CandidateMethod::Named, slots.len(), slots.len(), slots.len()),
            Task::Retrieve(search) => {
                let most = search.queries.iter().map(|query| query.k0).max().unwrap_or(0);
                let (way, room, candidates) = Group::plan_of_search(seen, search, most);
                (way, room, candidates, search.queries.iter().map(|query| query.k0.min(candidates)).sum())
            }
        };
        let [room, candidates, reranked] = [room, candidates, reranked].map(bucket);
        let is_selection = matches!(task, Task::Select { .. });
        let by_words =
            task.search().filter(|_| matches!(way, CandidateMethod::Enough | CandidateMethod::Exact)).map(plans_of);
        let filters = by_words.into_iter().flatten().filter(|plan| !matches!(plan.route(), Route::All)).take(1);
        let plans = filters.map(|plan| std::ptr::from_ref(plan) as usize).collect();
        Group { is_selection, way, requests: vec![n], room, candidates, reranked, plans }
    }

    /// Returns how the candidates of a search are found, how many are collected, and how many of `k0` are retained, per query.
    fn plan_of_search(seen: &[SeenView<'_>], search: &Search, k0: usize) -> (CandidateMethod, usize, usize) {
        let SeenView { view, resident, beside, .. } = seen[0];
        let (index, lists) = (&resident.index, search.probes.probes);
        let probed = search.queries.iter().filter_map(|query| Some(query.ood?.probes)).fold(lists, usize::max);
        let scanned = |seen: &SeenView<'_>, lists: usize| {
            seen.resident.index.items_at_most(lists) + seen.beside.items_at_most(lists)
        };
        let scanned = |lists: usize| seen.iter().map(|seen| scanned(seen, lists)).max().unwrap_or(0);
        let plans = plans_of(search);
        let all_alike = |is_such: fn(&Route) -> bool| plans.iter().all(|plan| is_such(plan.route()));
        // Items in posting lists, plus all items of segments without a posting list.
        let most = |(plan, items): (&&Plan, usize)| match plan.route() {
            Route::Nothing => 0,
            Route::Slots(slots) => slots.len(),
            Route::All | Route::Words => items,
        };
        let named: usize = plans.iter().zip(items_of(view)).map(most).sum();
        if all_alike(|route| matches!(route, Route::Nothing)) {
            (CandidateMethod::Nothing, 0, 0)
        } else if all_alike(|route| matches!(route, Route::Nothing | Route::Slots(_))) {
            (CandidateMethod::Named, named, k0.min(named))
        } else if search.is_exact() || matches!(plans[0].route(), Route::Nothing | Route::Slots(_)) {
            (CandidateMethod::Exact, named.min(scanned(index.lists.lists())), k0)
        } else {
            let at_least = index.items_at_least(lists).saturating_sub(beside.deleted_at_most(lists));
            let is_there = at_least >= search.least() + search.excluded.len();
            if is_there && all_alike(|route| matches!(route, Route::All)) {
                (CandidateMethod::Best, scanned(probed), k0)
            } else {
                (CandidateMethod::Enough, scanned(most_lists(view.main(), search).max(probed)), k0)
            }
        }
    }

    /// Splits off the requests for which a condition holds.
    pub(super) fn split(self, holds: impl Fn(&usize) -> bool) -> (Vec<usize>, Group) {
        let (those, others) = self.requests.iter().copied().partition(|n| holds(n));
        (those, Group { requests: others, ..self })
    }
}

/// Returns the bytes on the device per request while its group is processed.
fn bytes_per_request(resident: &Resident, room: usize, reranked: usize) -> usize {
    let (lists, queries) = (resident.index.lists.lists(), resident.queries());
    let program = resident.reranker.as_ref().map_or(0, |reranker| reranker.program.run_bytes(reranked));
    let rated = reranked.saturating_mul(48 + 8 * resident.value.tasks);
    let collected = Collection::bytes_per_query(resident.index.dimension());
    let of_query = room.saturating_mul(12) + collected + lists * 32 + 4 * resident.index.dimension();
    of_query.saturating_mul(queries).saturating_add(program).saturating_add(rated) + 4 * resident.user_numbers
}
