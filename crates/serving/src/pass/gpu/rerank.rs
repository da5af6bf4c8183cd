//! Steps 9 to 11 of the pass (task scores, value model, top K) on a device, for a group of requests.

use super::candidates::{DeviceAnswer, Found, LaterCounters, QueryCounters, number};
use super::embedded::Users;
use super::groups::SeenView;
use super::resident::{Merging, Resident};
use crate::pass::work::{Prepared, Task};
use sterling_core::error::Result;
use sterling_core::request::{Content, Ranked};
use sterling_core::units::Slot;
use sterling_cuda::ops::merge::{self, FoundBy};
use sterling_cuda::ops::rows::SlotRows;
use sterling_cuda::ops::steps::RowsOf;
use sterling_cuda::ops::top::{self, Best, Scored, Ties};
use sterling_cuda::ops::value_model::{Rated, gather_columns};
use sterling_cuda::{Device, Later};
use sterling_snapshot::model::Merge;

/// Results of a device for a group.
struct Columns {
    stride: usize,
    tasks: usize,
    counts: Vec<u32>,
    slots: Vec<u32>,
    values: Vec<u32>,
    similarities: Vec<u32>,
    /// Task scores, `[requests, stride, T]`.
    task_scores: Vec<f32>,
    bad: Vec<u32>,
    /// Number of candidates per request.
    candidates: Vec<u32>,
    /// Search counters per query of each request.
    looked_at: Vec<QueryCounters>,
}

/// Submits the reranking of a group's candidates, without waiting. `candidates` limits the number per request over all devices.
pub(super) fn rerank(
    device: &Device,
    resident: &Resident,
    (requests, candidates): (&[&Prepared], usize),
    found: Found,
) -> Result<LaterColumns> {
    let Found { users, best: found, counters, .. } = found;
    let queries = found.counts.len();
    let (found_counts, counted) = (found.counts.later(queries)?, counters.later(queries)?);
    let best = merged(device, resident, &users, (found, candidates))?;
    let (count, stride) = (requests.len(), best.stride);
    let of = SlotRows { slots: &best.slots, counts: &best.counts, stride };
    let logits = match &resident.reranker {
        Some(reranker) if stride > 0 => {
            let mut given = reranker.program.given(device, count, stride)?;
            given.of_all = candidates;
            let out = (&given.numbers, given.stride);
            let numbers = (&reranker.columns, &best.keys);
            reranker.rows.gather(device, resident.index.rows(), &of, numbers, out)?;
            let rows = RowsOf { counts: &best.counts, most: stride };
            Some(reranker.program.run(device, rows, &users.tensors(), given)?)
        }
        _ => None,
    };
    let constants: Vec<f32> = requests.iter().flat_map(|p| p.constants.iter().copied()).collect();
    let constants = device.copy(&constants)?;
    let logits = logits.as_ref().map(|made| made.output(0));
    let rated = Rated { of, similarity: &best.keys, logits };
    let valued = resident.value.evaluate(device, &rated, &constants)?;
    let wanted: Vec<u32> = requests.iter().map(|prepared| results_of(&prepared.task) as u32).collect();
    let most = (wanted.iter().copied().max().unwrap_or(0) as usize).min(stride);
    let ties = Ties { ids: Some(&resident.ids), map: Some((&best.slots, stride)) };
    let scored = Scored { keys: &valued.keys, slots: None, counts: Some(&best.counts), stride };
    let chosen = top::select(device, &scored, &ties, &device.copy(&wanted)?, most)?;
    let chosen = top::sort(device, chosen, &ties)?;
    let tasks = if logits.is_some() { resident.value.tasks } else { 0 };
    let most = chosen.stride;
    let places = SlotRows { slots: &chosen.slots, counts: &chosen.counts, stride: most };
    let reported = gather_columns(device, places, &rated, (&valued.tasks, tasks))?;
    let columns = LaterColumns {
        stride: most,
        tasks,
        counts: chosen.counts.later(count)?,
        slots: reported.slots.later(reported.slots.len())?,
        values: chosen.keys.later(chosen.keys.len())?,
        similarities: reported.similarity.later(reported.similarity.len())?,
        task_scores: reported.tasks.later(reported.tasks.len())?,
        bad: valued.bad.later(count)?,
        candidates: best.counts.later(count)?,
        found: found_counts,
        counted,
    };
    device.flush()?;
    Ok(columns)
}

/// Merges the candidates of a request's queries, at most `most`.
fn merged(device: &Device, resident: &Resident, users: &Users, (found, most): (Best, usize)) -> Result<Best> {
    let Some(Merging { how, weights }) = &resident.merging else { return Ok(found) };
    let by = if *how == Merge::Intersection { FoundBy::All } else { FoundBy::Any };
    let best = merge::merge(device, found, by, weights, most)?;
    if *how == Merge::Weighted {
        let of = SlotRows { slots: &best.slots, counts: &best.counts, stride: best.stride };
        resident.index.rows().products(device, (&users.vectors, Some(weights)), &of, &best.keys)?;
    }
    Ok(best)
}

/// [`Columns`] that are being copied to the host.
pub(super) struct LaterColumns {
    stride: usize,
    tasks: usize,
    counts: Later<u32>,
    slots: Later<u32>,
    values: Later<u32>,
    similarities: Later<u32>,
    task_scores: Later<f32>,
    bad: Later<u32>,
    candidates: Later<u32>,
    /// Number of candidates per query.
    found: Later<u32>,
    counted: LaterCounters,
}

impl LaterColumns {
    fn get(self) -> Result<Columns> {
        let found = self.found.get()?;
        let mut looked_at = self.counted.get(found.len())?;
        looked_at.iter_mut().zip(&found).for_each(|(looked_at, &n)| looked_at.candidates = u64::from(n));
        Ok(Columns {
            stride: self.stride,
            tasks: self.tasks,
            counts: self.counts.get()?,
            slots: self.slots.get()?,
            values: self.values.get()?,
            similarities: self.similarities.get()?,
            task_scores: self.task_scores.get()?,
            bad: self.bad.get()?,
            candidates: self.candidates.get()?,
            looked_at,
        })
    }
}

/// Reads the devices' results of the requests of a group. `before` holds the search counters of earlier steps, if they are known.
pub(super) fn read(
    columns: Vec<LaterColumns>,
    before: &[QueryCounters],
    seen: &[SeenView<'_>],
    requests: &[&Prepared],
) -> Result<Vec<DeviceAnswer>> {
    let columns = columns.into_iter().map(LaterColumns::get).collect::<Result<Vec<Columns>>>()?;
    let queries = seen[0].resident.queries();
    let made = |(n, prepared): (usize, &&Prepared)| {
        let of_request = |of: fn(&Columns) -> &[u32]| columns.iter().map(|columns| of(columns)[n] as usize).sum();
        let undefined = of_request(|c| &c.bad);
        let checked = prepared.check_undefined(undefined, of_request(|c| &c.candidates));
        let content =
            checked.map(|()| Content::Items(Ranked { undefined, ..ranked(&columns, n, seen, &prepared.task) }));
        let reported = |query: usize| {
            let of_devices = columns.iter().map(|columns| &columns.looked_at[..]).chain([before]);
            QueryCounters::sum(of_devices.filter_map(|of_queries| of_queries.get(query)))
        };
        let of_queries = (n * queries..(n + 1) * queries).map(reported).collect();
        let candidates = columns.iter().map(|columns| u64::from(columns.candidates[n])).sum();
        DeviceAnswer { content, candidates, of_queries }
    };
    Ok(requests.iter().enumerate().map(made).collect())
}

/// Returns the maximum number of results of a request.
fn results_of(task: &Task) -> usize {
    match task {
        Task::Retrieve(search) => search.k,
        Task::Rank { slots, .. } => slots.len(),
        Task::Rerank { k, .. } => *k,
        Task::Embed { .. } | Task::Select { .. } => 0,
    }
}

impl Columns {
    /// Returns the index range of the results of request `n`.
    fn places(&self, n: usize) -> std::ops::Range<usize> {
        n * self.stride..n * self.stride + self.counts[n] as usize
    }

    /// Returns whether result `at` of request `n` has task scores; results without task scores rank last.
    fn has_scores(&self, n: usize, at: usize) -> bool {
        let place = self.places(n).start + at;
        self.bad[n] == 0 || !self.task_scores[place * self.tasks..][..self.tasks].iter().any(|score| score.is_nan())
    }
}

/// Returns the results of request `n`: the best of all devices' rankings, ties broken by the lower id.
fn ranked(columns: &[Columns], n: usize, seen: &[SeenView<'_>], task: &Task) -> Ranked {
    let view = seen[0].view;
    let of_device = |(columns, seen): (&Columns, &SeenView<'_>)| -> Vec<(u32, Slot)> {
        columns.places(n).map(|place| (columns.values[place], seen.beside.of_device(columns.slots[place]))).collect()
    };
    let on_devices: Vec<Vec<(u32, Slot)>> = columns.iter().zip(seen).map(of_device).collect();
    let mut order: Vec<(usize, usize)> = on_devices
        .iter()
        .enumerate()
        .flat_map(|(device, found)| (0..found.len()).map(move |at| (device, at)))
        .filter(|&(device, at)| columns[device].has_scores(n, at))
        .collect();
    if columns.len() > 1 {
        let at = |&(device, at): &(usize, usize)| on_devices[device][at];
        order.sort_by_cached_key(|place| (std::cmp::Reverse(at(place).0), view.id(at(place).1)));
        order.truncate(results_of(task));
    }
    let place = |&(device, at): &(usize, usize)| (&columns[device], columns[device].places(n).start + at);
    let slots: Vec<Slot> = order.iter().map(|&(device, at)| on_devices[device][at].1).collect();
    let numbers = |of: &dyn Fn(&Columns, usize) -> f32| -> Vec<f32> {
        order.iter().map(place).map(|(columns, at)| of(columns, at)).collect()
    };
    let tasks = columns.iter().map(|columns| columns.tasks).max().unwrap_or(0);
    Ranked {
        ids: slots.iter().map(|&slot| view.id(slot)).collect(),
        slots,
        scores: numbers(&|columns, at| number(columns.values[at])),
        similarities: numbers(&|columns, at| number(columns.similarities[at])),
        tasks: (0..tasks).flat_map(|t| numbers(&|columns, at| columns.task_scores[at * columns.tasks + t])).collect(),
        unknown: if let Task::Rank { unknown, .. } = task { unknown.clone() } else { Vec::new() },
        undefined: 0,
    }
}
