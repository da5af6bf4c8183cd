//! Steps 4 to 8 for a group: the best K0 candidates of each request.

use std::collections::HashMap;

use super::embedded::{Embedded, rows_of};
use super::groups::{Group, Way, bounds_of, search_of, selected_of};
use super::resident::Resident;
use crate::device::cuda::ops::rows::SlotRows;
use crate::device::cuda::ops::scan::{Collection, Eligible, Order};
use crate::device::cuda::ops::top::{self, Best, Scored, Ties};
use crate::device::cuda::ops::words::{CutBounds, Passing, cut};
use crate::device::cuda::{Array, Device};
use crate::error::{Error, Result};
use crate::filter::{Plan, Route};
use crate::pass::work::{Search, Task};
use crate::snapshot::Snapshot;
use crate::units::Slot;

/// Probes of all queries for each list from which on lists are scanned for all their queries together: about where tensor
/// cores and the one reading of a list pay for turning the lists around.
const PROBES_PER_LIST_MIN: usize = 4;
/// Eligible items that a filtered search goes through for each candidate that it selects. The CPU probes on while that brings
/// better candidates; a device decides before it has seen any.
const SEEN_PER_SELECTED: usize = 16;

/// What a group found.
pub(super) struct Found {
    /// The query embeddings, `[requests, D]`.
    pub(super) vectors: Array<f32>,
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
    /// The addresses of words, and of how many items are eligible in each list.
    words: Vec<u64>,
    survivors: Vec<u64>,
    passing: Vec<Passing>,
    lengths: Vec<Array<u32>>,
}

/// The searches of a group and what they share.
struct Searches<'a> {
    device: &'a Device,
    snapshot: &'a Snapshot,
    resident: &'a Resident,
    /// None for a request that names its slots itself.
    searches: Vec<Option<&'a Search>>,
    vectors: Array<f32>,
}

/// Finds the candidates of a group.
pub(super) fn search(
    device: &Device,
    (snapshot, resident): (&Snapshot, &Resident),
    embedded: &Embedded<'_>,
    group: &Group,
) -> Result<Found> {
    let tasks: Vec<&Task> = group.requests.iter().map(|&n| &embedded.requests[n].1.task).collect();
    let vectors = rows_of(device, &embedded.vectors, resident.index.dimension(), &group.requests)?;
    let searches = tasks.iter().map(|task| search_of(task)).collect();
    let of = Searches { device, snapshot, resident, searches, vectors };
    let (best, counters) = match group.way {
        Way::Nothing => of.nothing()?,
        Way::Named => of.named(&tasks, group)?,
        Way::Best => of.best(group)?,
        Way::Enough => of.enough(group)?,
        Way::Exact => of.exact(group)?,
    };
    Ok(Found { vectors: of.vectors, best, counters })
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
        self.resident.index.rows().products(self.device, &self.vectors, &of, &keys)?;
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
        collection.quantize(self.device, &self.vectors, index.dimension(), index.norm_max())?;
        Ok(collection)
    }

    /// The lists of each query by their scores: `wanted[q]` of them, the best first where they are to be `sorted`.
    fn order(&self, queries: &Collection, wanted: &[u32], sorted: bool) -> Result<Best> {
        let (device, lists) = (self.device, self.resident.index.centroids.lists);
        let keys = device.room(queries.queries() * lists)?;
        self.resident.index.centroids.score(device, queries, &keys)?;
        let most = wanted.iter().copied().max().unwrap_or(0) as usize;
        let scored = Scored { keys: &keys, slots: None, counts: None, stride: lists };
        let best = top::select(device, &scored, &Ties::default(), &device.copy(wanted)?, most)?;
        if sorted { top::sort(device, best, &Ties::default()) } else { Ok(best) }
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
        let order = self.order(&collected, &probes, false)?;
        let of = Order { order: &order.slots, counts: &order.counts, stride: order.stride };
        let all: usize = probes.iter().map(|&p| p as usize).sum();
        if all >= PROBES_PER_LIST_MIN * lists.lists() {
            lists.scan_shared(device, &collected, &of)?;
        } else {
            lists.scan(device, &collected, &of, None)?;
        }
        let bounds: Vec<CutBounds> =
            probes.iter().map(|&p| CutBounds { least: p, most: p, needed: 0, suffices: 0 }).collect();
        let addresses = device.copy(&vec![lists.lengths.address(); probes.len()])?;
        let (_, items) = cut(device, (&order.slots, order.stride), &addresses, &lists.lengths, &bounds)?;
        let best = self.settle(&collected)?;
        let survivors = Some(collected.survivors);
        Ok((best, Counters { lists: Some(order.counts), items: Some(items), survivors }))
    }

    /// What is eligible for each search; words of equal plans are evaluated once.
    fn words(&self) -> Result<EligibleItems> {
        let planes = &self.resident.planes;
        let mut items = EligibleItems::default();
        let mut known: HashMap<*const Plan, (u64, u64)> = HashMap::new();
        for search in self.searches.iter().flatten() {
            let plan = &search.planned.plan;
            let addresses = match (known.get(&std::ptr::from_ref(plan)), plan.route()) {
                (Some(&evaluated), _) => evaluated,
                (None, Route::All) => {
                    let lengths = self.device.copy(&self.lengths_without(&search.excluded))?;
                    let addresses = (planes.index().every.address(), lengths.address());
                    items.lengths.push(lengths);
                    addresses
                }
                (None, _) => {
                    let made = planes.evaluate(self.device, plan.lower())?;
                    let addresses = (made.words.address(), made.survivors.address());
                    items.passing.push(made);
                    known.insert(std::ptr::from_ref(plan), addresses);
                    addresses
                }
            };
            items.words.push(addresses.0);
            items.survivors.push(addresses.1);
        }
        Ok(items)
    }

    /// The items of each list that are not excluded.
    fn lengths_without(&self, excluded: &[Slot]) -> Vec<u32> {
        let index = &self.snapshot.index;
        let mut lengths = index.list_lengths().to_vec();
        for slot in excluded {
            let length = &mut lengths[index.list_of(*slot).index()];
            *length = length.saturating_sub(1);
        }
        lengths
    }

    fn enough(&self, group: &Group) -> Result<(Best, Counters)> {
        let (device, lists) = (self.device, &self.resident.index.lists);
        let wanted = self.each(|search| selected_of(self.snapshot, search) as u32)?;
        let collected = self.collection(group.room, &wanted)?;
        let bounds = self.each(|search| {
            let (least, most) = bounds_of(self.snapshot, search);
            let selected = selected_of(self.snapshot, search) * SEEN_PER_SELECTED + search.excluded.len();
            // Without a filter the first lists do, unless they hold too few.
            let suffices = if matches!(search.planned.plan.route(), Route::All) { search.k } else { selected };
            CutBounds { least: least as u32, most: most as u32, needed: selected as u32, suffices: suffices as u32 }
        })?;
        let most: Vec<u32> = bounds.iter().map(|b| b.most).collect();
        let order = self.order(&collected, &most, true)?;
        let items = self.words()?;
        let (words, survivors) = (device.copy(&items.words)?, device.copy(&items.survivors)?);
        let (counts, scanned) = cut(device, (&order.slots, order.stride), &survivors, &lists.lengths, &bounds)?;
        let of = Order { order: &order.slots, counts: &counts, stride: order.stride };
        let eligible = Eligible { words: &words, firsts: &self.resident.planes.index().firsts };
        lists.scan(device, &collected, &of, Some(&eligible))?;
        let best = self.settle(&collected)?;
        Ok((best, Counters { lists: Some(counts), items: Some(scanned), survivors: Some(collected.survivors) }))
    }

    fn exact(&self, group: &Group) -> Result<(Best, Counters)> {
        let device = self.device;
        let wanted = self.each(|search| search.k0_alone() as u32)?;
        let collected = self.collection(group.room, &wanted)?;
        let eligible = self.words()?;
        let (words, slots) = (device.copy(&eligible.words)?, &self.resident.planes.index().word_slots);
        self.resident.index.rows().scan(device, &collected, &self.vectors, &words, slots)?;
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
