//! Steps 4 to 8 for a group: the best K0 candidates of each request.

use std::collections::HashMap;

use super::embedded::{Embedded, Users};
use super::groups::{Group, Way, most_lists, search_of, selected_of};
use super::resident::Resident;
use crate::device::cuda::ops::rows::SlotRows;
use crate::device::cuda::ops::scan::{Collection, Eligible, Order};
use crate::device::cuda::ops::top::{self, Best, Scored, Ties};
use crate::device::cuda::ops::words::Passing;
use crate::device::cuda::{Array, Device};
use crate::error::{Error, Result};
use crate::filter::{Plan, Route};
use crate::ivf::{FilteredSearch, Pace, Probing};
use crate::pass::work::{Search, Task};
use crate::snapshot::Snapshot;
use crate::units::Slot;
use crate::view::View;

/// Probes of all queries for each list from which on lists are scanned for all their queries together: about where tensor
/// cores and the one reading of a list pay for turning the lists around.
const PROBES_PER_LIST_MIN: usize = 4;

/// What a group found.
pub(super) struct Found {
    pub(super) users: Users,
    /// Candidates with their ordered scores, in no order.
    pub(super) best: Best,
    pub(super) counters: Counters,
}

/// What the search looked at, `[requests]` each; empty where it did not look at lists.
#[derive(Default)]
pub(super) struct Counters {
    pub(super) lists: Option<Array<u32>>,
    pub(super) items: Option<Array<u64>>,
    pub(super) survivors: Option<Array<u32>>,
}

/// What is eligible for each search, and what holds it.
#[derive(Default)]
struct EligibleItems {
    /// The addresses of words.
    words: Vec<u64>,
    _passing: Vec<Passing>,
}

/// The searches of a group and what they share.
struct Searches<'a> {
    device: &'a Device,
    view: &'a View,
    snapshot: &'a Snapshot,
    resident: &'a Resident,
    /// None for a request that names its slots itself.
    searches: Vec<Option<&'a Search>>,
    users: Users,
}

/// Finds the candidates of a group.
pub(super) fn search(
    device: &Device,
    (view, resident): (&View, &Resident),
    embedded: &Embedded<'_>,
    group: &Group,
) -> Result<Found> {
    let tasks: Vec<&Task> = group.requests.iter().map(|&n| &embedded.requests[n].1.task).collect();
    let users = embedded.users.some(device, embedded.requests.len(), &group.requests)?;
    let searches = tasks.iter().map(|task| search_of(task)).collect();
    let of = Searches { device, view, snapshot: view.main(), resident, searches, users };
    let (best, counters) = match group.way {
        Way::Nothing => of.nothing()?,
        Way::Named => of.named(&tasks, group)?,
        Way::Best => of.best(group)?,
        Way::Enough => of.enough(group)?,
        Way::Exact => of.exact(group)?,
    };
    Ok(Found { users: of.users, best, counters })
}

impl Searches<'_> {
    fn ties(&self) -> Ties<'_> {
        Ties { ids: Some(&self.resident.ids), map: None }
    }

    /// A number of each search.
    fn each<T>(&self, of: impl Fn(&Search) -> T) -> Result<Vec<T>> {
        let missing = || Error::internal("a search without what it searches for");
        self.searches.iter().map(|search| search.map(&of).ok_or_else(missing)).collect()
    }

    fn nothing(&self) -> Result<(Best, Counters)> {
        let rows = self.searches.len();
        let best = Best {
            keys: self.device.room(0)?,
            slots: self.device.room(0)?,
            counts: self.device.zeros(rows)?,
            stride: 0,
        };
        Ok((best, Counters::default()))
    }

    /// Slots that are known, by their widest rows.
    fn named(&self, tasks: &[&Task], group: &Group) -> Result<(Best, Counters)> {
        let slots_of = |task: &Task| -> Vec<u32> {
            match task {
                Task::Rank { slots, .. } => slots.iter().map(|slot| slot.0).collect(),
                Task::Retrieve(search) => match search.planned.plan.route() {
                    Route::Slots(slots) => {
                        let is_excluded = |slot: &Slot| search.excluded.binary_search(slot).is_ok();
                        slots.iter().filter(|slot| !is_excluded(slot)).map(|slot| slot.0).collect()
                    }
                    _ => Vec::new(),
                },
                Task::Embed { .. } | Task::Select { .. } | Task::Rerank { .. } => Vec::new(),
            }
        };
        let stride = group.room.max(1);
        let (mut all, mut counts, mut wanted) = (vec![0u32; tasks.len() * stride], Vec::new(), Vec::new());
        for (n, task) in tasks.iter().enumerate() {
            let slots = slots_of(task);
            all[n * stride..][..slots.len()].copy_from_slice(&slots);
            wanted.push(self.searches[n].map_or(slots.len(), |search| search.k0_alone().min(slots.len())) as u32);
            counts.push(slots.len() as u32);
        }
        let slots = self.device.copy(&all)?;
        let survivors = self.device.copy(&counts)?;
        let best = self.rescore(&slots, &survivors, stride, &wanted)?;
        let items = self.device.copy(&counts.iter().map(|&n| u64::from(n)).collect::<Vec<u64>>())?;
        Ok((best, Counters { lists: None, items: Some(items), survivors: Some(survivors) }))
    }

    /// The best of slots by their widest rows.
    fn rescore(&self, slots: &Array<u32>, counts: &Array<u32>, stride: usize, wanted: &[u32]) -> Result<Best> {
        let keys = self.device.room(counts.len() * stride)?;
        let of = SlotRows { slots, counts, stride };
        self.resident.index.rows().products(self.device, &self.users.vectors, &of, &keys)?;
        let most = wanted.iter().copied().max().unwrap_or(0) as usize;
        let scored = Scored { keys: &keys, slots: Some(slots), counts: Some(counts), stride };
        top::select(self.device, &scored, &self.ties(), &self.device.copy(wanted)?, most)
    }

    /// Room for candidates, with the queries' codes in it.
    fn collection(&self, room: usize, wanted: &[u32]) -> Result<Collection> {
        let excluded: Vec<Vec<u32>> = self.each(|search| search.excluded.iter().map(|slot| slot.0).collect())?;
        let excluded: Vec<&[u32]> = excluded.iter().map(Vec::as_slice).collect();
        let index = &self.resident.index;
        let collection = Collection::new(self.device, index.dimension(), room, wanted, &excluded)?;
        collection.quantize(self.device, &self.users.vectors, index.dimension(), index.norm_max())?;
        Ok(collection)
    }

    /// The best of what int8 scores chose, by the widest rows where there are such.
    fn settle(&self, collected: &Collection) -> Result<Best> {
        let most = self.each(|search| selected_of(self.snapshot, search))?.into_iter().max().unwrap_or(0);
        let scored = Scored {
            keys: &collected.keys,
            slots: Some(&collected.slots),
            counts: Some(&collected.counts),
            stride: collected.room(),
        };
        let most = most.min(collected.room());
        let best = top::select(self.device, &scored, &self.ties(), &collected.wanted, most)?;
        if !self.resident.index.has_wide_rows() {
            return Ok(best);
        }
        let wanted = self.each(|search| search.k0_alone() as u32)?;
        self.rescore(&best.slots, &best.counts, best.stride, &wanted)
    }

    fn best(&self, group: &Group) -> Result<(Best, Counters)> {
        let (device, lists) = (self.device, &self.resident.index.lists);
        let wanted = self.each(|search| selected_of(self.snapshot, search) as u32)?;
        let collected = self.collection(group.room, &wanted)?;
        let probes = self.each(|search| search.probes.probes.clamp(1, lists.lists()) as u32)?;
        let (order, _) = self.resident.index.best_lists(device, &collected, &probes)?;
        let of = Order::first(&order.slots, &order.counts, order.stride);
        let all: usize = probes.iter().map(|&p| p as usize).sum();
        if all >= PROBES_PER_LIST_MIN * lists.lists() {
            lists.scan_shared(device, &collected, &of)?;
        } else {
            lists.scan(device, &collected, &of, None)?;
        }
        let items = lists.items(device, &of)?;
        let best = self.settle(&collected)?;
        let survivors = Some(collected.survivors);
        Ok((best, Counters { lists: Some(order.counts), items: Some(items), survivors }))
    }

    /// What is eligible for each search; words of equal plans are evaluated once.
    fn words(&self) -> Result<EligibleItems> {
        let planes = &self.resident.planes;
        let mut items = EligibleItems::default();
        let mut known: HashMap<*const Plan, u64> = HashMap::new();
        for search in self.searches.iter().flatten() {
            let plan = &search.planned.plan;
            let address = match (known.get(&std::ptr::from_ref(plan)), plan.route()) {
                (Some(&evaluated), _) => evaluated,
                (None, Route::All) => planes.index().every.address(),
                (None, _) => {
                    let made = planes.evaluate(self.device, plan.lower())?;
                    let address = made.words.address();
                    items._passing.push(made);
                    known.insert(std::ptr::from_ref(plan), address);
                    address
                }
            };
            items.words.push(address);
        }
        Ok(items)
    }

    fn enough(&self, group: &Group) -> Result<(Best, Counters)> {
        let (device, index) = (self.device, &self.resident.index);
        let wanted = self.each(|search| selected_of(self.snapshot, search) as u32)?;
        let collected = self.collection(group.room, &wanted)?;
        let searches = self.each(|search| {
            let (plan, ending) = (&search.planned.plan, search.ending(self.view));
            let probes_max = most_lists(self.snapshot, search);
            // Without a filter the first lists do, unless they hold too few.
            let suffices = matches!(plan.route(), Route::All).then_some((search.probes.probes, search.k));
            // What an exact plan lets through stays.
            let is_sure = ending.is_some() && plan.is_exact();
            let enough = if is_sure { search.k0_alone() } else { selected_of(self.snapshot, search) };
            let of = Probing::of(search.probes.probes, probes_max);
            let probing = Probing { pass_rate: plan.pass_rate(), ending, ..of };
            FilteredSearch { probing, enough, suffices }
        })?;
        let items = self.words()?;
        let words = device.copy(&items.words)?;
        let eligible = Eligible { words: &words, firsts: &self.resident.planes.index().firsts };
        let of = (&searches[..], Pace::Rare);
        let (counts, scanned) = index.scan_until(device, &collected, &self.users.vectors, &eligible, of)?;
        let best = self.settle(&collected)?;
        Ok((best, Counters { lists: Some(counts), items: Some(scanned), survivors: Some(collected.survivors) }))
    }

    fn exact(&self, group: &Group) -> Result<(Best, Counters)> {
        let device = self.device;
        let wanted = self.each(|search| search.k0_alone() as u32)?;
        let collected = self.collection(group.room, &wanted)?;
        let eligible = self.words()?;
        let (words, slots) = (device.copy(&eligible.words)?, &self.resident.planes.index().word_slots);
        self.resident.index.rows().scan(device, &collected, &self.users.vectors, &words, slots)?;
        let stride = collected.room();
        let scored =
            Scored { keys: &collected.keys, slots: Some(&collected.slots), counts: Some(&collected.counts), stride };
        let best = top::select(device, &scored, &self.ties(), &collected.wanted, group.candidates)?;
        let count = wanted.len();
        let lists = device.copy(&vec![self.snapshot.index.lists() as u32; count])?;
        let items = device.copy(&vec![self.snapshot.index.items() as u64; count])?;
        Ok((best, Counters { lists: Some(lists), items: Some(items), survivors: Some(collected.survivors) }))
    }
}
