//! Steps 9 to 11 for a group, and its answers.

use std::time::Instant;

use super::embedded::Embedded;
use super::groups::{Group, SeenView, search_of};
use super::resident::Resident;
use super::search::{Found, LaterCounters, LookedAt};
use crate::device::cuda::ops::rows::SlotRows;
use crate::device::cuda::ops::steps::RowsOf;
use crate::device::cuda::ops::top::{self, Scored, Ties};
use crate::device::cuda::ops::worth::{Rated, tell};
use crate::device::cuda::{Device, Later};
use crate::error::{Error, Result};
use crate::pass::batch::Batch;
use crate::pass::cpu::route_of;
use crate::pass::trace::Step;
use crate::pass::work::{Prepared, Task};
use crate::request::{Answer, Content, Explain, Ranked};
use crate::topk::unkey;
use crate::units::Slot;

/// What came back from the device for a group.
struct Columns {
    stride: usize,
    tasks: usize,
    counts: Vec<u32>,
    slots: Vec<u32>,
    values: Vec<u32>,
    similarities: Vec<u32>,
    /// `[requests, stride, T]`
    task_scores: Vec<f32>,
    bad: Vec<u32>,
    /// What each request looked at.
    looked_at: Vec<LookedAt>,
}

/// A group whose work is sent off to one device or several.
pub(super) struct UnderWay {
    kind: &'static str,
    group: Group,
    /// What each device was sent.
    columns: Vec<LaterColumns>,
    /// What they looked at before, where that is known.
    looked_at: Vec<LookedAt>,
    /// The devices that share the items.
    shared_by: Option<String>,
}

impl UnderWay {
    /// What one device was sent.
    pub(super) fn on_one(kind: &'static str, group: Group, columns: LaterColumns) -> Self {
        let looked_at = vec![LookedAt::default(); group.requests.len()];
        UnderWay { kind, group, columns: vec![columns], looked_at, shared_by: None }
    }

    /// What several were, whose names are given.
    pub(super) fn on_several(
        (kind, names): (&'static str, String),
        group: Group,
        columns: Vec<LaterColumns>,
        looked_at: Vec<LookedAt>,
    ) -> Self {
        UnderWay { kind, group, columns, looked_at, shared_by: Some(names) }
    }

    /// Waits for what the devices made, and answers the requests of the group.
    pub(super) fn answer(
        self,
        seen: &[SeenView<'_>],
        batch: &dyn Batch,
        embedded: &Embedded<'_>,
        start: Instant,
    ) -> Result<()> {
        let columns = self.columns.into_iter().map(LaterColumns::get).collect::<Result<Vec<Columns>>>()?;
        let took = start.elapsed();
        for (n, &request) in self.group.requests.iter().enumerate() {
            let (place, prepared) = embedded.requests[request];
            if columns.iter().any(|columns| columns.bad[n] != 0) {
                batch.answer(place, Err(Error::internal("overarch.onnx: `logits` holds NaN")));
                continue;
            }
            let ranked = ranked(&columns, n, seen, &prepared.task);
            let mut looked_at = self.looked_at[n];
            columns.iter().for_each(|columns| looked_at.add(&columns.looked_at[n]));
            let mut trace = prepared.trace.clone();
            trace.add([Step { name: "device", took, items: looked_at.items, bytes: 0 }]);
            let explain = prepared.reading.explain.then(|| {
                let mut explain = explain(&looked_at, prepared, &ranked);
                let shared = self.shared_by.as_ref().map(|names| format!("the items are shared by {names}"));
                explain.note = match (explain.note, shared) {
                    (Some(note), Some(shared)) => Some(format!("{note}; {shared}")),
                    (note, shared) => note.or(shared),
                };
                Explain { steps: trace.reports(), kernel: self.kind, ..explain }
            });
            let degraded_rows = embedded.degraded_rows[request];
            batch.answer(place, Ok(Answer { content: Content::Items(ranked), degraded_rows, explain }));
        }
        Ok(())
    }
}

/// Reranks what a group found, sends its work off, and does not wait. All devices together rerank so many candidates of a request at most.
pub(super) fn rerank(
    device: &Device,
    resident: &Resident,
    (requests, candidates): (&[&Prepared], usize),
    found: Found,
) -> Result<LaterColumns> {
    let Found { users, best, counters, .. } = found;
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
    let told = tell(device, places, &rated, (&valued.tasks, tasks))?;
    let columns = LaterColumns {
        stride: most,
        tasks,
        counts: chosen.counts.later(count)?,
        slots: told.slots.later(told.slots.len())?,
        values: chosen.keys.later(chosen.keys.len())?,
        similarities: told.similarity.later(told.similarity.len())?,
        task_scores: told.tasks.later(told.tasks.len())?,
        bad: valued.bad.later(count)?,
        candidates: best.counts.later(count)?,
        counted: counters.later(count)?,
    };
    device.flush()?;
    Ok(columns)
}

/// [`Columns`] that are on their way.
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
    counted: LaterCounters,
}

impl LaterColumns {
    fn get(self) -> Result<Columns> {
        let candidates = self.candidates.get()?;
        let mut looked_at = self.counted.get(candidates.len())?;
        looked_at.iter_mut().zip(&candidates).for_each(|(looked_at, &n)| looked_at.candidates = u64::from(n));
        Ok(Columns {
            stride: self.stride,
            tasks: self.tasks,
            counts: self.counts.get()?,
            slots: self.slots.get()?,
            values: self.values.get()?,
            similarities: self.similarities.get()?,
            task_scores: self.task_scores.get()?,
            bad: self.bad.get()?,
            looked_at,
        })
    }
}

/// What is told of a search that would scan codes on the CPU.
const INT8_FOR_CODES: &str = "the card scanned int8 rows in place of the first pass's codes, which stay on the host";

/// How many results a request gets.
fn results_of(task: &Task) -> usize {
    match task {
        Task::Retrieve(search) => search.k,
        Task::Rank { slots, .. } => slots.len(),
        Task::Rerank { k, .. } => *k,
        Task::Embed { .. } | Task::Select { .. } => 0,
    }
}

/// The number that a kernel wrote as an ordered one.
fn number(key: u32) -> f32 {
    unkey(u64::from(key) << 32).0
}

impl Columns {
    /// The places of the results of request `n`.
    fn places(&self, n: usize) -> std::ops::Range<usize> {
        n * self.stride..n * self.stride + self.counts[n] as usize
    }
}

/// The results of request `n`: of what each device has ranked of its own the best, equal values by the lower id.
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
    }
}

fn explain(looked_at: &LookedAt, prepared: &Prepared, ranked: &Ranked) -> Explain {
    let returned = ranked.ids.len() as u64;
    let Some(search) = search_of(&prepared.task) else { return Explain { returned, ..Explain::default() } };
    let LookedAt { candidates, lists, items, survivors } = *looked_at;
    Explain {
        route: route_of(search),
        filter: search.planned.canonical.clone(),
        pass_rate: search.planned.plan.pass_rate(),
        probed: lists,
        scanned: items,
        survivors,
        candidates,
        returned,
        note: search.by_codes.map(|_| INT8_FOR_CODES.into()),
        ..Explain::default()
    }
}
