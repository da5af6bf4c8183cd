//! Steps 4 to 8 for a group: the best K0 candidates of each request.

use std::collections::HashMap;

use super::beside::live_items;
use super::embedded::{Embedded, Users};
use super::groups::{Group, SeenView, Way, items_of, most_lists, plans_of, search_of, selected_of};
use crate::device::cuda::ops::rows::SlotRows;
use crate::device::cuda::ops::scan::{Collection, Eligible, Order};
use crate::device::cuda::ops::top::{self, Best, Scored, Ties};
use crate::device::cuda::ops::words::Passing;
use crate::device::cuda::{Array, Device};
use crate::error::{Error, Result};
use crate::filter::index::{DeviceLiveItems, DevicePlanes};
use crate::filter::{Plan, Route};
use crate::ivf::{EligibleParts, FilteredSearch, LiveParts, Pace, Probing};
use crate::pass::work::{Search, Task};
use crate::units::Slot;

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
    /// Those of each part.
    pub(super) items: Vec<Array<u64>>,
    pub(super) survivors: Option<Array<u32>>,
}

/// What of a part is eligible for each search, and what holds it.
struct EligibleItems {
    /// The addresses of words.
    words: Array<u64>,
    _passing: Vec<Passing>,
}

/// The searches of a group and what they share.
struct Searches<'a> {
    device: &'a Device,
    seen: SeenView<'a>,
    /// None for a request that names its slots itself.
    searches: Vec<Option<&'a Search>>,
    users: Users,
}

/// Finds the candidates of a group.
pub(super) fn search(device: &Device, seen: SeenView<'_>, embedded: &Embedded<'_>, group: &Group) -> Result<Found> {
    let tasks: Vec<&Task> = group.requests.iter().map(|&n| &embedded.requests[n].1.task).collect();
    let users = embedded.users.some(device, embedded.requests.len(), &group.requests)?;
    let searches = tasks.iter().map(|task| search_of(task)).collect();
    let of = Searches { device, seen, searches, users };
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
        Ties { ids: Some(&self.seen.resident.ids), map: None }
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

    /// The slots that posting lists tell of, as the view counts them.
    fn told(&self, search: &Search) -> Vec<Slot> {
        let firsts = std::iter::once(0).chain(self.seen.view.segments().map(|(first, ..)| first));
        let of_part = |(plan, first): (&Plan, u32)| match plan.route() {
            Route::Slots(slots) => slots.iter().map(|slot| Slot(first + slot.0)).collect(),
            _ => Vec::new(),
        };
        let told: Vec<Slot> = plans_of(search).into_iter().zip(firsts).flat_map(of_part).collect();
        let is_eligible = |slot: &Slot| search.excluded.binary_search(slot).is_err() && self.seen.view.is_live(*slot);
        told.into_iter().filter(is_eligible).collect()
    }

    /// Slots that are known, by their widest rows.
    fn named(&self, tasks: &[&Task], group: &Group) -> Result<(Best, Counters)> {
        let slots_of = |task: &Task| -> Vec<u32> {
            let slots = match task {
                Task::Rank { slots, .. } => slots.clone(),
                Task::Retrieve(search) => self.told(search),
                Task::Embed { .. } | Task::Select { .. } | Task::Rerank { .. } => Vec::new(),
            };
            slots.into_iter().map(|slot| self.seen.beside.to_device(slot)).collect()
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
        Ok((best, Counters { lists: None, items: vec![items], survivors: Some(survivors) }))
    }

    /// The best of slots by their widest rows.
    fn rescore(&self, slots: &Array<u32>, counts: &Array<u32>, stride: usize, wanted: &[u32]) -> Result<Best> {
        let keys = self.device.room(counts.len() * stride)?;
        let of = SlotRows { slots, counts, stride };
        self.seen.resident.index.rows().products(self.device, &self.users.vectors, &of, &keys)?;
        let most = wanted.iter().copied().max().unwrap_or(0) as usize;
        let scored = Scored { keys: &keys, slots: Some(slots), counts: Some(counts), stride };
        top::select(self.device, &scored, &self.ties(), &self.device.copy(wanted)?, most)
    }

    /// Room for candidates, with the queries' codes in it.
    fn collection(&self, room: usize, wanted: &[u32]) -> Result<Collection> {
        let excluded: Vec<Vec<u32>> = self.each(|search| {
            let slots = search.excluded.iter().map(|&slot| self.seen.beside.to_device(slot));
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

    /// The best of what int8 scores chose, by the widest rows where there are such.
    fn settle(&self, collected: &Collection) -> Result<Best> {
        let most = self.each(|search| selected_of(self.seen.view.main(), search))?.into_iter().max().unwrap_or(0);
        let scored = Scored {
            keys: &collected.keys,
            slots: Some(&collected.slots),
            counts: Some(&collected.counts),
            stride: collected.room(),
        };
        let most = most.min(collected.room());
        let best = top::select(self.device, &scored, &self.ties(), &collected.wanted, most)?;
        if !self.seen.resident.index.has_wide_rows() {
            return Ok(best);
        }
        let wanted = self.each(|search| search.k0_alone() as u32)?;
        self.rescore(&best.slots, &best.counts, best.stride, &wanted)
    }

    fn best(&self, group: &Group) -> Result<(Best, Counters)> {
        let (device, resident, beside) = (self.device, self.seen.resident, self.seen.beside);
        let lists = resident.index.lists.lists();
        let wanted = self.each(|search| selected_of(self.seen.view.main(), search) as u32)?;
        let collected = self.collection(group.room, &wanted)?;
        let probes = self.each(|search| search.probes.probes.clamp(1, lists) as u32)?;
        let (order, _) = resident.index.best_lists(device, &collected, &probes)?;
        let of = Order::first(&order.slots, &order.counts, order.stride);
        let all: usize = probes.iter().map(|&p| p as usize).sum();
        let pieces = beside.pieces.iter();
        let parts = LiveParts {
            main: live_items(beside.live(), &resident.planes),
            beside: pieces.map(|p| (&p.segment.lists, live_items(p.live(), &p.segment.planes))).collect(),
        };
        let shared = all >= PROBES_PER_LIST_MIN * lists;
        let items = resident.index.scan_best(device, &collected, &of, (&parts, shared))?;
        let best = self.settle(&collected)?;
        let survivors = Some(collected.survivors);
        Ok((best, Counters { lists: Some(order.counts), items, survivors }))
    }

    /// What is eligible for each search, of every part; words of equal plans are evaluated once.
    fn words(&self) -> Result<Vec<EligibleItems>> {
        let (resident, beside) = (self.seen.resident, self.seen.beside);
        let pieces = beside.pieces.iter().map(|piece| (&piece.segment.planes, piece.live()));
        let parts = std::iter::once((&resident.planes, beside.live())).chain(pieces);
        parts.enumerate().map(|(n, of)| self.words_of(n, of)).collect()
    }

    /// The same of one part.
    fn words_of(
        &self,
        part: usize,
        (planes, live): (&DevicePlanes, Option<&DeviceLiveItems>),
    ) -> Result<EligibleItems> {
        let (mut words, mut passing) = (Vec::new(), Vec::new());
        let mut known: HashMap<*const Plan, u64> = HashMap::new();
        let every = live.map_or(&planes.index().every, DeviceLiveItems::words);
        for search in self.searches.iter().flatten() {
            let plan = plans_of(search)[part];
            let address = match (known.get(&std::ptr::from_ref(plan)), plan.route()) {
                (Some(&evaluated), _) => evaluated,
                (None, Route::All) => every.address(),
                (None, _) => {
                    let made = planes.evaluate(self.device, plan.lower(), live)?;
                    let address = made.words.address();
                    passing.push(made);
                    known.insert(std::ptr::from_ref(plan), address);
                    address
                }
            };
            words.push(address);
        }
        Ok(EligibleItems { words: self.device.copy(&words)?, _passing: passing })
    }

    /// The estimated share of all items that pass.
    fn pass_rate(&self, search: &Search) -> f64 {
        let rates = plans_of(search).into_iter().map(Plan::pass_rate).zip(items_of(self.seen.view));
        let (passing, items) =
            rates.fold((0.0, 0), |(sum, all), (rate, items)| (sum + rate * items as f64, all + items));
        passing / items.max(1) as f64
    }

    fn enough(&self, group: &Group) -> Result<(Best, Counters)> {
        let (device, index, view) = (self.device, &self.seen.resident.index, self.seen.view);
        let main = view.main();
        let wanted = self.each(|search| selected_of(main, search) as u32)?;
        let collected = self.collection(group.room, &wanted)?;
        let searches = self.each(|search| {
            let (plan, ending) = (&search.planned.plan, search.ending(view));
            let probes_max = most_lists(main, search);
            // Without a filter the first lists do, unless they hold too few.
            let suffices = matches!(plan.route(), Route::All).then_some((search.probes.probes, search.k));
            // What an exact plan lets through stays.
            let is_sure = ending.is_some() && plans_of(search).iter().all(|plan| plan.is_exact());
            let enough = if is_sure { search.k0_alone() } else { selected_of(main, search) };
            let of = Probing::of(search.probes.probes, probes_max);
            let probing = Probing { pass_rate: self.pass_rate(search), ending, ..of };
            FilteredSearch { probing, enough, suffices }
        })?;
        let items = self.words()?;
        let pieces = self.seen.beside.pieces.iter().enumerate();
        let parts = EligibleParts {
            main: eligible_of(&self.seen.resident.planes, &items[0]),
            beside: pieces.map(|(n, p)| (&p.segment.lists, eligible_of(&p.segment.planes, &items[n + 1]))).collect(),
        };
        let of = (&searches[..], Pace::Rare);
        let (counts, scanned) = index.scan_until(device, &collected, &self.users.vectors, &parts, of)?;
        let best = self.settle(&collected)?;
        Ok((best, Counters { lists: Some(counts), items: scanned, survivors: Some(collected.survivors) }))
    }

    fn exact(&self, group: &Group) -> Result<(Best, Counters)> {
        let (device, resident, view) = (self.device, self.seen.resident, self.seen.view);
        let wanted = self.each(|search| search.k0_alone() as u32)?;
        let collected = self.collection(group.room, &wanted)?;
        let pieces = self.seen.beside.pieces.iter().map(|piece| &piece.segment.word_slots);
        let word_slots = std::iter::once(&resident.planes.index().word_slots).chain(pieces);
        for (of_part, slots) in self.words()?.iter().zip(word_slots) {
            resident.index.rows().scan(device, &collected, &self.users.vectors, &of_part.words, slots)?;
        }
        let stride = collected.room();
        let scored =
            Scored { keys: &collected.keys, slots: Some(&collected.slots), counts: Some(&collected.counts), stride };
        let best = top::select(device, &scored, &self.ties(), &collected.wanted, group.candidates)?;
        let count = wanted.len();
        let lists = device.copy(&vec![view.main().index.lists() as u32; count])?;
        let items = device.copy(&vec![items_of(view).sum::<usize>() as u64; count])?;
        Ok((best, Counters { lists: Some(lists), items: vec![items], survivors: Some(collected.survivors) }))
    }
}

/// What of a part is eligible, as scans take it.
fn eligible_of<'a>(planes: &'a DevicePlanes, items: &'a EligibleItems) -> Eligible<'a> {
    Eligible { words: &items.words, firsts: &planes.index().firsts }
}
