//! Steps 4 to 8 for a group: finds the best K0 candidates of each request.

use std::collections::HashMap;

use super::candidates::{Counters, Found};
use super::delta::live_items;
use super::embedded::Users;
use super::groups::{CandidateMethod, Group, OneQuery, Searched, SeenView, items_of, most_lists, plans_of};
use crate::pass::work::{Search, Task};
use sterling_core::error::{Error, Result};
use sterling_core::units::Slot;
use sterling_cuda::ops::rows::SlotRows;
use sterling_cuda::ops::scan::{Collection, Eligible, Order, SearchResults};
use sterling_cuda::ops::termination::RunningSearches;
use sterling_cuda::ops::top::{self, Best, Scored, Ties, bucket};
use sterling_cuda::ops::words::{Filters, NO_FILTER};
use sterling_cuda::{Array, Device};
use sterling_index::filter::index::{DeviceLiveItems, DevicePlanes};
use sterling_index::filter::{Plan, Route};
use sterling_index::ivf::{CheckInterval, EligibleParts, FilteredSearch, FilteredSearches, LiveParts, Probing};
use sterling_index::topk::key;

/// Mean number of probing queries per list from which a list is scanned for all its queries at once. At about this
/// number, tensor cores and the single read of a list outweigh grouping the probes by list.
const PROBES_PER_LIST_MIN: usize = 4;

/// Eligible items of a part (snapshot or segment) per search.
struct EligibleItems {
    /// Addresses of the filter bitmaps.
    words: Array<u64>,
    filters: Filters,
    /// Index of the bitmap of each search.
    of_queries: Vec<u32>,
}

/// Searches of a group and their shared state.
struct Searches<'a> {
    device: &'a Device,
    seen: SeenView<'a>,
    /// True if other devices or shards search further items.
    is_part: bool,
    /// True if other shards search further items.
    is_selection: bool,
    /// Search per query; `None` for a request that names its slots.
    searches: Vec<Option<Searched<'a>>>,
    users: Users,
}

/// Queries of a group's requests on a device, with their users.
pub(super) struct GroupQueries<'a> {
    pub(super) device: &'a Device,
    pub(super) seen: SeenView<'a>,
    pub(super) queries: &'a [OneQuery<'a>],
    pub(super) users: Users,
    /// True if other devices search further items.
    pub(super) is_part: bool,
}

impl<'a> GroupQueries<'a> {
    fn searches(self) -> (Searches<'a>, &'a [OneQuery<'a>]) {
        let GroupQueries { device, seen, queries, users, is_part } = self;
        let searches = queries.iter().map(|query| query.searched(seen.view.main())).collect();
        let is_selection = queries.iter().any(|query| matches!(query.task, Task::Select { .. }));
        let is_part = is_part || is_selection;
        (Searches { device, seen, is_part, is_selection, searches, users }, queries)
    }
}

/// Finds the candidates of a group.
pub(super) fn search(asking: GroupQueries<'_>, group: &Group) -> Result<Found> {
    if group.way == CandidateMethod::Enough {
        let filtering = Filtering::begin(asking, group)?;
        for round in 0..filtering.rounds() {
            filtering.scan(round)?;
            filtering.look(round, &filtering.collected.kept())?;
        }
        return filtering.end();
    }
    let (of, queries) = asking.searches();
    let (settled, counters) = match group.way {
        CandidateMethod::Nothing => of.nothing()?,
        CandidateMethod::Named => of.named(queries, group)?,
        CandidateMethod::Scored => of.scored(queries)?,
        CandidateMethod::Best => of.best(group)?,
        CandidateMethod::Exact | CandidateMethod::Enough => of.exact(group)?,
    };
    Ok(of.found(settled, counters))
}

/// Searches that scan lists in rounds until enough candidates are found.
pub(super) struct Filtering<'a> {
    of: Searches<'a>,
    collected: Collection,
    items: Vec<EligibleItems>,
    /// Filter of each search, if the snapshot's bitmap is evaluated per list before the scan.
    by_list: Option<Array<u32>>,
    until: FilteredSearches,
}

impl<'a> Filtering<'a> {
    pub(super) fn begin(asking: GroupQueries<'a>, group: &Group) -> Result<Self> {
        let (of, _) = asking.searches();
        let index = &of.seen.resident.index;
        let wanted = of.each(|of_query| of_query.selected as u32)?;
        let collected = of.collection(group.room, &wanted)?;
        let probes = of.probes(&collected)?;
        let searches = of.each(|of_query| *of_query)?;
        let searches: Vec<_> =
            searches.iter().zip(probes).map(|(search, probes)| of.filtered(search, probes)).collect();
        let items = of.eligible()?;
        let until = index.begin_until(of.device, &collected, (&searches, CheckInterval::Rare))?;
        // Evaluates filters only on the scanned lists of the snapshot, unless the bitmaps of all lists take no more
        // memory.
        let (main, lists) = (&items[0], index.lists.lists());
        let is_by_list = main.of_queries.len() * until.most_lists() <= main.filters.len() * lists;
        of.evaluate(&items, usize::from(is_by_list))?;
        let by_list = is_by_list.then(|| of.device.copy(&main.of_queries)).transpose()?;
        Ok(Filtering { of, collected, items, by_list, until })
    }

    /// Returns the maximum number of rounds.
    pub(super) fn rounds(&self) -> usize {
        self.until.rounds()
    }

    fn parts(&self) -> EligibleParts<'_> {
        let seen = &self.of.seen;
        let deltas = seen.beside.deltas.iter().zip(&self.items[1..]);
        EligibleParts {
            main: eligible_of(&seen.resident.planes, &self.items[0]),
            beside: deltas.map(|(p, items)| (&p.segment.lists, eligible_of(&p.segment.planes, items))).collect(),
        }
    }

    /// Scans the lists of a round.
    pub(super) fn scan(&self, round: usize) -> Result<()> {
        let Filtering { of, collected, until, items, by_list } = self;
        if let Some(of_queries) = by_list {
            let planes = of.seen.resident.planes.index();
            planes.evaluate_lists(of.device, (&items[0].filters, of_queries), &until.round(round))?;
        }
        of.seen.resident.index.scan_round(of.device, collected, (until, round), &self.parts())
    }

    /// Checks on the device whether each search continues, based on the candidates of all devices.
    pub(super) fn look(&self, round: usize, kept: &SearchResults<'_>) -> Result<()> {
        let Filtering { of, until, .. } = self;
        of.seen.resident.index.look(of.device, (until, round), &of.users.vectors, kept)
    }

    /// Returns the best candidates so far, and how many items passed the filter.
    pub(super) fn best(&self) -> Result<(Best, &Array<u32>)> {
        let best = self.of.select(&self.collected)?;
        Ok((best, &self.collected.survivors))
    }

    /// Returns start and end of the range of lists of the last round, per search; equal if the search is over.
    pub(super) fn last_round(&self) -> [&Array<u32>; 2] {
        [&self.until.looks.begins, &self.until.looks.ends]
    }

    /// Returns the results, after the last round.
    pub(super) fn end(self) -> Result<Found> {
        let beside = {
            let (index, parts) = (&self.of.seen.resident.index, self.parts());
            index.end_until(self.of.device, &self.collected, &self.until, &parts)?
        };
        let settled = self.of.settle(&self.collected)?;
        let RunningSearches { ends, items, .. } = self.until.looks;
        // All devices know the item counts of the snapshot's lists, so only the first reports them.
        let main = self.of.seen.is_first.then_some(items);
        let items = main.into_iter().chain(beside).collect();
        let counters = Counters { lists: self.of.counts_once(ends), items, survivors: Some(self.collected.survivors) };
        Ok(self.of.found(settled, counters))
    }
}

/// Candidates with their ordered keys; and, if these are keys of codes, also the keys by the most precise rows.
type Settled = (Best, Option<Array<u32>>);

impl<'a> Searches<'a> {
    fn found(self, (best, wide): Settled, counters: Counters) -> Found {
        Found { users: self.users, best, wide, counters }
    }

    /// Returns the counts on the first device only, because they are the same on all devices.
    fn counts_once<T>(&self, counts: Array<T>) -> Option<Array<T>> {
        self.seen.is_first.then_some(counts)
    }

    fn ties(&self) -> Ties<'_> {
        Ties { ids: Some(&self.seen.resident.ids), map: None }
    }

    /// Collects a property of each search.
    fn each<T>(&self, of: impl Fn(&Searched<'a>) -> T) -> Result<Vec<T>> {
        let missing = || Error::internal("a search has no query vector");
        self.searches.iter().map(|of_query| of_query.as_ref().map(&of).ok_or_else(missing)).collect()
    }

    fn nothing(&self) -> Result<(Settled, Counters)> {
        let rows = self.searches.len();
        let best = Best {
            keys: self.device.room(0)?,
            slots: self.device.room(0)?,
            counts: self.device.zeros(rows)?,
            stride: 0,
        };
        Ok(((best, None), Counters::default()))
    }

    /// Returns the slots of posting lists, in the numbering of the view.
    fn reported(&self, search: &Search) -> Vec<Slot> {
        let firsts = std::iter::once(0).chain(self.seen.view.segments().map(|(first, ..)| first));
        let of_part = |(plan, first): (&Plan, u32)| match plan.route() {
            Route::Slots(slots) => slots.iter().map(|slot| Slot(first + slot.0)).collect(),
            _ => Vec::new(),
        };
        let reported: Vec<Slot> = plans_of(search).into_iter().zip(firsts).flat_map(of_part).collect();
        let is_eligible = |slot: &Slot| search.excluded.binary_search(slot).is_err() && self.seen.view.is_live(*slot);
        reported.into_iter().filter(is_eligible).collect()
    }

    /// Scores known slots by their most precise rows.
    fn named(&self, queries: &[OneQuery<'_>], group: &Group) -> Result<(Settled, Counters)> {
        let slots_of = |task: &Task| -> Vec<u32> {
            let slots = match task {
                Task::Rank { slots, .. } => slots.clone(),
                Task::Retrieve(search) | Task::Select { search, .. } => self.reported(search),
                Task::Embed { .. } | Task::Rerank { .. } => Vec::new(),
            };
            slots.into_iter().filter_map(|slot| self.seen.beside.to_device(slot)).collect()
        };
        let stride = group.room.max(1);
        let (mut all, mut counts, mut wanted) = (vec![0u32; queries.len() * stride], Vec::new(), Vec::new());
        for (n, query) in queries.iter().enumerate() {
            let slots = slots_of(query.task);
            all[n * stride..][..slots.len()].copy_from_slice(&slots);
            wanted.push(self.searches[n].map_or(slots.len(), |of_query| of_query.kept.min(slots.len())) as u32);
            counts.push(slots.len() as u32);
        }
        let slots = self.device.copy(&all)?;
        let survivors = self.device.copy(&counts)?;
        let best = self.rescore(&slots, &survivors, stride, &wanted)?;
        let best = self.in_order(best)?;
        let items = self.device.copy(&counts.iter().map(|&n| u64::from(n)).collect::<Vec<u64>>())?;
        Ok(((best, None), Counters { lists: None, items: vec![items], survivors: Some(survivors) }))
    }

    /// Uploads known slots with their scores.
    fn scored(&self, queries: &[OneQuery<'_>]) -> Result<(Settled, Counters)> {
        let of_device = |&(score, slot): &(f32, Slot)| Some((ordered(score), self.seen.beside.to_device(slot)?));
        let candidates_of = |query: &OneQuery<'_>| -> Vec<(u32, u32)> {
            let Task::Rerank { candidates, .. } = query.task else { return Vec::new() };
            candidates[query.n].iter().filter_map(of_device).collect()
        };
        let candidates: Vec<Vec<(u32, u32)>> = queries.iter().map(candidates_of).collect();
        let best = given(self.device, &candidates.iter().map(Vec::as_slice).collect::<Vec<_>>())?;
        Ok(((best, None), Counters::default()))
    }

    /// Computes the ordered keys of slots by their most precise rows.
    fn products(&self, slots: &Array<u32>, counts: &Array<u32>, stride: usize) -> Result<Array<u32>> {
        let keys = self.device.room(counts.len() * stride)?;
        let of = SlotRows { slots, counts, stride };
        self.seen.resident.index.rows().products(self.device, (&self.users.vectors, None), &of, &keys)?;
        Ok(keys)
    }

    /// Selects the best slots by their most precise rows.
    fn rescore(&self, slots: &Array<u32>, counts: &Array<u32>, stride: usize, wanted: &[u32]) -> Result<Best> {
        let keys = self.products(slots, counts, stride)?;
        let most = wanted.iter().copied().max().unwrap_or(0) as usize;
        let scored = Scored { keys: &keys, slots: Some(slots), counts: Some(counts), stride };
        top::select(self.device, &scored, &self.ties(), &self.device.copy(wanted)?, most)
    }

    /// Allocates the buffer for candidates, with the encoded queries.
    fn collection(&self, room: usize, wanted: &[u32]) -> Result<Collection> {
        let excluded: Vec<Vec<u32>> = self.each(|of_query| {
            let slots = of_query.search.excluded.iter().filter_map(|&slot| self.seen.beside.to_device(slot));
            let mut slots: Vec<u32> = slots.collect();
            slots.sort_unstable();
            slots
        })?;
        let excluded: Vec<&[u32]> = excluded.iter().map(Vec::as_slice).collect();
        let index = &self.seen.resident.index;
        let collection = Collection::new(self.device, index.dimension(), room, wanted, &excluded)?;
        collection.quantize(self.device, &self.users.vectors, index.dimension(), index.norm_max())?;
        Ok(collection)
    }

    /// Selects the best collected candidates by int8 scores.
    fn select(&self, collected: &Collection) -> Result<Best> {
        let most = self.each(|of_query| of_query.selected)?.into_iter().max().unwrap_or(0);
        let scored = Scored {
            keys: &collected.keys,
            slots: Some(&collected.slots),
            counts: Some(&collected.counts),
            stride: collected.room(),
        };
        top::select(self.device, &scored, &self.ties(), &collected.wanted, most.min(collected.room()))
    }

    /// Sorts the candidates, if they will be merged with candidates of other shards.
    fn in_order(&self, best: Best) -> Result<Best> {
        if self.is_selection { top::sort(self.device, best, &self.ties()) } else { Ok(best) }
    }

    /// Rescores the candidates that int8 scores selected, by the most precise rows if the index has such rows.
    fn settle(&self, collected: &Collection) -> Result<Settled> {
        let best = self.in_order(self.select(collected)?)?;
        if !self.seen.resident.index.has_wide_rows() {
            return Ok((best, None));
        }
        if self.is_part {
            let keys = self.products(&best.slots, &best.counts, best.stride)?;
            return Ok((best, Some(keys)));
        }
        let wanted = self.each(|of_query| of_query.kept as u32)?;
        Ok((self.rescore(&best.slots, &best.counts, best.stride, &wanted)?, None))
    }

    fn best(&self, group: &Group) -> Result<(Settled, Counters)> {
        let (device, resident, beside) = (self.device, self.seen.resident, self.seen.beside);
        let lists = resident.index.lists.lists();
        let wanted = self.each(|of_query| of_query.selected as u32)?;
        let collected = self.collection(group.room, &wanted)?;
        let probes = self.each(|of_query| of_query.query.probes.clamp(1, lists) as u32)?;
        let ood = self.each(|of_query| of_query.query.ood)?;
        let order = resident.index.probed_lists(device, &collected, &probes, &ood)?;
        // Kernel launches are sized for in-distribution queries.
        let most = probes.iter().copied().max().unwrap_or(0) as usize;
        let of = Order { most, ..Order::first(&order.slots, &order.counts, order.stride) };
        let all: usize = probes.iter().map(|&p| p as usize).sum();
        let deltas = beside.deltas.iter();
        let parts = LiveParts {
            main: live_items(beside.live(), &resident.planes),
            beside: deltas.map(|p| (&p.segment.lists, live_items(p.live(), &p.segment.planes))).collect(),
        };
        let shared = all >= PROBES_PER_LIST_MIN * lists;
        let items = resident.index.scan_best(device, &collected, &of, (&parts, shared))?;
        let settled = self.settle(&collected)?;
        let survivors = Some(collected.survivors);
        Ok((settled, Counters { lists: self.counts_once(order.counts), items, survivors }))
    }

    /// Allocates the filter bitmaps of each search and part, without evaluating them; equal plans share one.
    fn eligible(&self) -> Result<Vec<EligibleItems>> {
        let (resident, beside) = (self.seen.resident, self.seen.beside);
        let deltas = beside.deltas.iter().map(|delta| (&delta.segment.planes, delta.live()));
        let parts = std::iter::once((&resident.planes, beside.live())).chain(deltas);
        parts.enumerate().map(|(n, of)| self.eligible_of(n, of)).collect()
    }

    /// Allocates the filter bitmaps of each search for one part: the main snapshot or a segment.
    fn eligible_of(
        &self,
        part: usize,
        (planes, live): (&DevicePlanes, Option<&DeviceLiveItems>),
    ) -> Result<EligibleItems> {
        let (mut of_queries, mut programs) = (Vec::new(), Vec::new());
        let mut known: HashMap<*const Plan, u32> = HashMap::new();
        for of_query in self.searches.iter().flatten() {
            let plan = plans_of(of_query.search)[part];
            let lowered = || {
                programs.push(plan.lower());
                programs.len() as u32 - 1
            };
            of_queries.push(match plan.route() {
                Route::All => NO_FILTER,
                _ => *known.entry(std::ptr::from_ref(plan)).or_insert_with(lowered),
            });
        }
        let every = live.map_or(&planes.index().every, DeviceLiveItems::words).address();
        let filters = planes.filters(self.device, programs, live)?;
        let address = |&filter: &u32| if filter == NO_FILTER { every } else { filters.address(filter as usize) };
        let words = self.device.copy(&of_queries.iter().map(address).collect::<Vec<u64>>())?;
        Ok(EligibleItems { words, filters, of_queries })
    }

    /// Evaluates the filter bitmaps of all lists, from the given part on.
    fn evaluate(&self, items: &[EligibleItems], from: usize) -> Result<()> {
        let deltas = self.seen.beside.deltas.iter().map(|delta| &delta.segment.planes);
        let parts = std::iter::once(&self.seen.resident.planes).chain(deltas);
        parts.zip(items).skip(from).try_for_each(|(of, items)| of.index().evaluate(self.device, &items.filters))
    }

    /// Returns the estimated pass rate over all items.
    fn pass_rate(&self, search: &Search) -> f64 {
        let rates = plans_of(search).into_iter().map(Plan::pass_rate).zip(items_of(self.seen.view));
        let (passing, items) =
            rates.fold((0.0, 0), |(sum, all), (rate, items)| (sum + rate * items as f64, all + items));
        passing / items.max(1) as f64
    }

    /// Returns nprobe and the minimum number of lists of each search. Waits for the device if some query may be out of
    /// distribution.
    fn probes(&self, collected: &Collection) -> Result<Vec<(usize, usize)>> {
        let index = &self.seen.resident.index;
        let lists = index.lists.lists();
        let probes = self.each(|of_query| of_query.query.probes.clamp(1, lists))?;
        let ood = self.each(|of_query| of_query.query.ood)?;
        if ood.iter().all(Option::is_none) {
            return Ok(probes.into_iter().map(|probes| (probes, 0)).collect());
        }
        // A filtered search keeps its own nprobe, which may be larger. With a base of one list, more returned lists
        // mean that its query is out of distribution.
        let is_unfiltered = self.each(Searched::is_unfiltered)?;
        let base = probes.iter().zip(&is_unfiltered).map(|(&probes, &is)| if is { probes as u32 } else { 1 });
        let base: Vec<u32> = base.collect();
        let counts = index.probed_lists(self.device, collected, &base, &ood)?.counts.to_vec()?;
        let chosen = counts.iter().zip(base).zip(probes.into_iter().zip(is_unfiltered));
        let of_query = |((&count, base), (probes, is_unfiltered)): ((&u32, u32), (usize, bool))| {
            let least = if count > base { count as usize } else { 0 };
            (if is_unfiltered { probes.max(least) } else { probes }, least)
        };
        Ok(chosen.map(of_query).collect())
    }

    /// Returns the termination rule of a search with a filter bitmap, given its nprobe and its minimum number of lists.
    fn filtered(&self, of_query: &Searched<'a>, (probes, least_lists): (usize, usize)) -> FilteredSearch<'_> {
        let (main, Searched { search, query, selected, .. }) = (self.seen.view.main(), *of_query);
        let ending = search.ending(self.seen.view);
        // Without a filter the planned number of lists suffices, unless these lists contain too few items.
        let suffices = of_query.is_unfiltered().then_some((probes, query.k));
        // An exact plan admits no false positives.
        let is_sure = ending.is_some() && plans_of(search).iter().all(|plan| plan.is_exact());
        let enough = if is_sure { query.k0 } else { selected };
        let of = Probing::of(probes, most_lists(main, search).max(probes));
        let least_lists = least_lists.min(of.probes_max);
        let probing = Probing { pass_rate: self.pass_rate(search), ending, least: query.k, least_lists, ..of };
        FilteredSearch { probing, enough, suffices }
    }

    fn exact(&self, group: &Group) -> Result<(Settled, Counters)> {
        let (device, resident, view) = (self.device, self.seen.resident, self.seen.view);
        let wanted = self.each(|of_query| of_query.kept as u32)?;
        let collected = self.collection(group.room, &wanted)?;
        let deltas = self.seen.beside.deltas.iter().map(|delta| &delta.segment.word_slots);
        let word_slots = std::iter::once(&resident.planes.index().word_slots).chain(deltas);
        let items = self.eligible()?;
        self.evaluate(&items, 0)?;
        for (of_part, slots) in items.iter().zip(word_slots) {
            resident.index.rows().scan(device, &collected, &self.users.vectors, &of_part.words, slots)?;
        }
        let stride = collected.room();
        let scored =
            Scored { keys: &collected.keys, slots: Some(&collected.slots), counts: Some(&collected.counts), stride };
        let best = self.in_order(top::select(device, &scored, &self.ties(), &collected.wanted, group.candidates)?)?;
        let count = wanted.len();
        let lists = device.copy(&vec![view.main().index.lists() as u32; count])?;
        let items = device.copy(&vec![items_of(view).sum::<usize>() as u64; count])?;
        let (lists, items) = (self.counts_once(lists), self.counts_once(items).into_iter().collect());
        Ok(((best, None), Counters { lists, items, survivors: Some(collected.survivors) }))
    }
}

/// Uploads the candidates of each request with their ordered keys.
pub(super) fn given(device: &Device, of_requests: &[&[(u32, u32)]]) -> Result<Best> {
    // A compiled graph runs over at least one candidate.
    let stride = bucket(of_requests.iter().map(|chosen| chosen.len()).max().unwrap_or(0).max(1));
    let (mut keys, mut slots) = (vec![0; of_requests.len() * stride], vec![0; of_requests.len() * stride]);
    for (n, chosen) in of_requests.iter().enumerate() {
        for (at, &(key, slot)) in chosen.iter().enumerate() {
            (keys[n * stride + at], slots[n * stride + at]) = (key, slot);
        }
    }
    let counts: Vec<u32> = of_requests.iter().map(|chosen| chosen.len() as u32).collect();
    Ok(Best { keys: device.copy(&keys)?, slots: device.copy(&slots)?, counts: device.copy(&counts)?, stride })
}

/// Encodes a score as the ordered key of a kernel.
fn ordered(score: f32) -> u32 {
    (key(score, Slot::default()) >> 32) as u32
}

/// Returns the eligible items of a part in the form that scans take.
fn eligible_of<'a>(planes: &'a DevicePlanes, items: &'a EligibleItems) -> Eligible<'a> {
    Eligible { words: &items.words, firsts: &planes.index().firsts }
}
