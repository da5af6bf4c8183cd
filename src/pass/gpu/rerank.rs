//! Steps 9 to 11 for a group, and its answers.

use std::time::Instant;

use super::embedded::Embedded;
use super::groups::{Group, SeenView, search_of};
use super::resident::Resident;
use super::search::Found;
use crate::device::cuda::ops::rows::SlotRows;
use crate::device::cuda::ops::steps::RowsOf;
use crate::device::cuda::ops::top::{self, Scored, Ties};
use crate::device::cuda::ops::worth::{Rated, tell};
use crate::device::cuda::{Array, Device, Later};
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
    /// Candidates, lists, items and survivors of each request.
    looked_at: Vec<[u64; 4]>,
}

/// A group whose work is sent off.
pub(super) struct UnderWay {
    kind: &'static str,
    group: Group,
    columns: LaterColumns,
}

/// Reranks what a group found, sends its work off, and does not wait.
pub(super) fn begin(
    device: &Device,
    resident: &Resident,
    embedded: &Embedded<'_>,
    (group, found): (Group, Found),
) -> Result<UnderWay> {
    let requests: Vec<&Prepared> = group.requests.iter().map(|&n| embedded.requests[n].1).collect();
    let columns = rerank(device, resident, &requests, found)?;
    device.flush()?;
    Ok(UnderWay { kind: device.kind(), group, columns })
}

impl UnderWay {
    /// Waits for what the device made, and answers the requests of the group.
    pub(super) fn answer(
        self,
        seen: &SeenView<'_>,
        batch: &dyn Batch,
        embedded: &Embedded<'_>,
        start: Instant,
    ) -> Result<()> {
        let columns = self.columns.get()?;
        let took = start.elapsed();
        for (n, &request) in self.group.requests.iter().enumerate() {
            let (place, prepared) = embedded.requests[request];
            if columns.bad[n] != 0 {
                batch.answer(place, Err(Error::internal("overarch.onnx: `logits` holds NaN")));
                continue;
            }
            let ranked = columns.ranked(n, seen, &prepared.task);
            let mut trace = prepared.trace.clone();
            let (items, bytes) = (columns.looked_at[n][2], 0);
            trace.add([Step { name: "device", took, items, bytes }]);
            let explain = prepared.reading.explain.then(|| Explain {
                steps: trace.reports(),
                kernel: self.kind,
                ..columns.explain(n, prepared, &ranked)
            });
            let degraded_rows = embedded.degraded_rows[request];
            batch.answer(place, Ok(Answer { content: Content::Items(ranked), degraded_rows, explain }));
        }
        Ok(())
    }
}

fn rerank(device: &Device, resident: &Resident, requests: &[&Prepared], found: Found) -> Result<LaterColumns> {
    let Found { users, best, counters } = found;
    let (count, stride) = (requests.len(), best.stride);
    let of = SlotRows { slots: &best.slots, counts: &best.counts, stride };
    let logits = match &resident.reranker {
        Some(reranker) if stride > 0 => {
            let given = reranker.program.given(device, count, stride)?;
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
    let counted = |counts: &Option<Array<u32>>| counts.as_ref().map(|counts| counts.later(count)).transpose();
    Ok(LaterColumns {
        stride: most,
        tasks,
        counts: chosen.counts.later(count)?,
        slots: told.slots.later(told.slots.len())?,
        values: chosen.keys.later(chosen.keys.len())?,
        similarities: told.similarity.later(told.similarity.len())?,
        task_scores: told.tasks.later(told.tasks.len())?,
        bad: valued.bad.later(count)?,
        candidates: best.counts.later(count)?,
        lists: counted(&counters.lists)?,
        items: counters.items.iter().map(|items| items.later(count)).collect::<Result<_>>()?,
        survivors: counted(&counters.survivors)?,
    })
}

/// [`Columns`] that are on their way.
struct LaterColumns {
    stride: usize,
    tasks: usize,
    counts: Later<u32>,
    slots: Later<u32>,
    values: Later<u32>,
    similarities: Later<u32>,
    task_scores: Later<f32>,
    bad: Later<u32>,
    candidates: Later<u32>,
    lists: Option<Later<u32>>,
    /// Those of each part.
    items: Vec<Later<u64>>,
    survivors: Option<Later<u32>>,
}

impl LaterColumns {
    fn get(self) -> Result<Columns> {
        let candidates = self.candidates.get()?;
        let count = candidates.len();
        let counted = |counts: Option<Later<u32>>| counts.map_or(Ok(vec![0; count]), Later::get);
        let (lists, survivors) = (counted(self.lists)?, counted(self.survivors)?);
        let mut items = vec![0; count];
        for part in self.items {
            items.iter_mut().zip(part.get()?).for_each(|(sum, of_part)| *sum += of_part);
        }
        let looked_at = |n: usize| [u64::from(candidates[n]), u64::from(lists[n]), items[n], u64::from(survivors[n])];
        Ok(Columns {
            stride: self.stride,
            tasks: self.tasks,
            counts: self.counts.get()?,
            slots: self.slots.get()?,
            values: self.values.get()?,
            similarities: self.similarities.get()?,
            task_scores: self.task_scores.get()?,
            bad: self.bad.get()?,
            looked_at: (0..count).map(looked_at).collect(),
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
        Task::Embed { .. } | Task::Select { .. } | Task::Rerank { .. } => 0,
    }
}

/// The number that a kernel wrote as an ordered one.
fn number(key: u32) -> f32 {
    unkey(u64::from(key) << 32).0
}

impl Columns {
    fn ranked(&self, n: usize, seen: &SeenView<'_>, task: &Task) -> Ranked {
        let places = n * self.stride..n * self.stride + self.counts[n] as usize;
        let slots: Vec<Slot> = self.slots[places.clone()].iter().map(|&slot| seen.beside.of_device(slot)).collect();
        let of_task = |task: usize| places.clone().map(move |place| self.task_scores[place * self.tasks + task]);
        Ranked {
            ids: slots.iter().map(|&slot| seen.view.id(slot)).collect(),
            slots,
            scores: self.values[places.clone()].iter().map(|&key| number(key)).collect(),
            similarities: self.similarities[places.clone()].iter().map(|&key| number(key)).collect(),
            tasks: (0..self.tasks).flat_map(of_task).collect(),
            unknown: if let Task::Rank { unknown, .. } = task { unknown.clone() } else { Vec::new() },
        }
    }

    fn explain(&self, n: usize, prepared: &Prepared, ranked: &Ranked) -> Explain {
        let returned = ranked.ids.len() as u64;
        let Some(search) = search_of(&prepared.task) else { return Explain { returned, ..Explain::default() } };
        let [candidates, probed, scanned, survivors] = self.looked_at[n];
        Explain {
            route: route_of(search),
            filter: search.planned.canonical.clone(),
            pass_rate: search.planned.plan.pass_rate(),
            probed,
            scanned,
            survivors,
            candidates,
            returned,
            note: search.by_codes.map(|_| INT8_FOR_CODES.into()),
            ..Explain::default()
        }
    }
}
