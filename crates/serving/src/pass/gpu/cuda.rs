//! The pass on devices: embeds, groups, searches and reranks; the CPU does the rest.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::answers::{SubmittedGroup, SubmittedWork};
use super::embedded::{Embedded, HostUsers};
use super::groups::{Group, OneQuery, SeenView};
use super::resident::Resident;
use super::residents::{ResidentView, Residents};
use super::search::GroupQueries;
use super::{rerank, search, select, shared};
use crate::pass::batch::{Batch, Pass, late};
use crate::pass::cpu::Cpu;
use crate::pass::embed;
use crate::pass::scratch::Scratch;
use crate::pass::work::{Prepared, Query, Task, not_finite};
use sterling_core::error::{Error, Kind, Result};
use sterling_core::limits::COMPONENT_MAX;
use sterling_core::request::{Answer, Content, EmbeddedUser};
use sterling_cuda::{Device, Devices};
use sterling_embedding::{HotCounters, HotTurn};
use sterling_graph::tower::{DeviceTower, Threads};

/// Pass on a device, with a CPU pass for everything that the device does not do.
pub struct Cuda {
    residents: Arc<Residents>,
    cpu: Cpu,
    threads: Threads,
    scratch: Scratch,
    lanes: Option<Lanes>,
}

/// Streams of a worker: one for embedding, and two per device for groups of requests, so that the host submits one group while
/// the other runs.
#[derive(Clone)]
struct Lanes {
    embed: Device,
    groups: [Vec<Device>; 2],
}

impl Lanes {
    fn of(devices: &Devices) -> Result<Self> {
        let on_each = || devices.all().iter().map(Device::lane).collect::<Result<_>>();
        Ok(Lanes { embed: devices.first().lane()?, groups: [on_each()?, on_each()?] })
    }
}

/// Waits for all streams of a worker at the end of a batch, also after an error or a panic: the memory that they read must stay
/// valid until then.
struct Finishing(Lanes);

impl Drop for Finishing {
    fn drop(&mut self) {
        for device in self.0.groups.iter().flatten().chain([&self.0.embed]) {
            // An error means that the device failed, and nothing runs on a failed device.
            let _ = device.finish();
        }
    }
}

impl Cuda {
    /// Creates a pass over `residents`; graphs on the host use `threads`.
    pub fn new(residents: Arc<Residents>, threads: Threads) -> Self {
        residents.join();
        Cuda { residents, cpu: Cpu::new(threads.clone()), threads, scratch: Scratch::default(), lanes: None }
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        self.residents.leave();
    }
}

impl Pass for Cuda {
    fn run(&mut self, batch: &dyn Batch) {
        let mut left = UnansweredRequests {
            batch,
            answered: (0..batch.len()).map(|_| AtomicBool::new(false)).collect(),
            reasons: (0..batch.len()).map(|_| OnceLock::new()).collect(),
            failed: None,
        };
        let residents = self.residents.clone();
        let ran = match residents.health().pause() {
            Some(reason) => Err(Error::unavailable(reason)),
            None => self.run_here(&left).inspect_err(|e| match e.kind() {
                // Logged once for all batches on a lost device.
                Kind::Unavailable | Kind::Internal if residents.health().failed(e) => {
                    tracing::warn!(reason = %e, "the device failed, the CPU answers");
                }
                _ => tracing::debug!(reason = %e, "the CPU answers"),
            }),
        };
        match &ran {
            Ok(true) if residents.health().record_success() => tracing::info!("the device works again"),
            Ok(_) => {}
            // After an error the streams are dropped: their work is no longer needed.
            Err(_) => self.lanes = None,
        }
        let fallback =
            |kind: Kind| metrics::counter!("sterling_device_fallbacks_total", "kind" => kind.name()).increment(1);
        if let Err(e) = ran {
            fallback(e.kind());
            left.failed = Some(e.to_string());
            self.cpu.run(&left);
        } else if let Some(reason) = left.reasons.iter().find_map(OnceLock::get) {
            fallback(reason.kind());
            self.cpu.run(&left);
        }
    }

    fn rest(&mut self) {
        self.cpu.rest();
        if self.residents.requests_take_more() {
            self.lanes = None;
        }
    }
}

/// Returns whether the request is for all user tensors that later steps read.
fn is_whole(prepared: &Prepared) -> bool {
    matches!(prepared.task, Task::Embed { whole: true })
}

/// Returns whether another server has embedded the user.
fn is_embedded(prepared: &Prepared) -> bool {
    matches!(prepared.query, Query::Embedded(_))
}

impl Cuda {
    /// Answers requests with embedded users first, then those with features or a vector. Returns whether devices answered any.
    fn run_here(&mut self, batch: &UnansweredRequests<'_>) -> Result<bool> {
        let wanted = (0..batch.len()).filter(|&place| batch.is_wanted(place));
        let (given, others): (Vec<usize>, Vec<usize>) = wanted.partition(|&place| is_embedded(batch.prepared(place)));
        Ok(self.run_some(batch, &given)? | self.run_some(batch, &others)?)
    }

    /// Answers the requests that the devices can execute, and leaves the others to the CPU. Returns whether devices answered any.
    fn run_some(&mut self, batch: &UnansweredRequests<'_>, wanted: &[usize]) -> Result<bool> {
        let Some(&first) = wanted.first() else { return Ok(false) };
        let view = batch.prepared(first).view();
        let residents = self.residents.clone();
        let ResidentView { snapshot: on_devices, beside } = residents.request_view(view, wanted.len())?;
        let seen_by = |(n, (resident, beside))| SeenView { view, resident, beside, is_first: n == 0 };
        let on_each = on_devices.iter().zip(beside.iter().map(Arc::as_ref));
        let seen: Vec<SeenView<'_>> = on_each.enumerate().map(seen_by).collect();
        let bytes_max = residents.request_bytes_max();
        let can_be_done = |place: &usize| match Group::check(&seen, &batch.prepared(*place).task, bytes_max) {
            Ok(()) => true,
            Err(reason) => {
                tracing::debug!(%reason, "the CPU answers");
                batch.reasons[*place].set(reason).is_ok_and(|()| false)
            }
        };
        let wanted: Vec<usize> = wanted.iter().copied().filter(can_be_done).collect();
        if wanted.is_empty() {
            return Ok(false);
        }
        // Users are embedded on the first device.
        let resident = &on_devices[0];
        let start = Instant::now();
        let lanes = match self.lanes.take() {
            Some(lanes) => lanes,
            None => Lanes::of(residents.devices())?,
        };
        let lanes = self.lanes.insert(lanes).clone();
        let Lanes { embed, groups: by_turns } = lanes.clone();
        embed.begin()?;
        let mut turn = resident.tower.as_ref().and_then(DeviceTower::turn);
        // Declared after the memory that the streams read, so that it is dropped first and waits for the streams.
        let _finishing = Finishing(lanes);
        let embedded = self.embed(&embed, batch, &wanted, (resident, &mut turn))?;
        let is_several = on_devices.len() > 1;
        let reads_all = is_several || wanted.iter().any(|&place| is_whole(batch.prepared(place)));
        let users = embedded.users.read(embedded.requests.len(), reads_all)?;
        let invalid = answer_embeddings(batch, &embedded, &users);
        // The host has waited for the user embeddings, and so for all writes to cached rows.
        end(turn, resident);
        let users = is_several.then_some(&users);
        let ranked = |n: &usize| !invalid[*n] && !matches!(embedded.requests[*n].1.task, Task::Embed { .. });
        let ranked: Vec<usize> = (0..embedded.requests.len()).filter(ranked).collect();
        let mut groups = Group::all(&seen, &embedded, ranked, residents.group_bytes());
        groups.sort_by_key(|group| std::cmp::Reverse(group.requests.len()));
        let mut under_way: Option<SubmittedGroup> = None;
        // Groups alternate between the two streams of a device; a group whose requests are all late uses no stream.
        let mut sent = 0;
        for group in groups {
            let is_late = |n: &usize| batch.deadline(embedded.requests[*n].0).is_some_and(|by| Instant::now() >= by);
            let (too_late, group) = group.split(is_late);
            for n in too_late {
                batch.answer(embedded.requests[n].0, Err(late("probe")));
            }
            if group.requests.is_empty() {
                continue;
            }
            let lanes = &by_turns[sent % by_turns.len()];
            sent += 1;
            lanes.iter().try_for_each(Device::begin)?;
            let next = send(lanes, &seen, (&embedded, users), group)?;
            if let Some(before) = under_way.replace(next) {
                before.answer(&seen, batch, &embedded, start)?;
            }
        }
        under_way.map_or(Ok(()), |last| last.answer(&seen, batch, &embedded, start)).map(|()| true)
    }

    /// Runs the embedding lookups and the user tower, steps 1 and 2 of the pass.
    fn embed<'a>(
        &mut self,
        device: &Device,
        batch: &'a dyn Batch,
        wanted: &[usize],
        (resident, turn): (&Resident, &mut Option<HotTurn<'_>>),
    ) -> Result<Embedded<'a>> {
        let is_from_host = |place: &usize| {
            matches!(batch.prepared(*place).query, Query::Features { fetched: Some(_), .. } | Query::Embedded(_))
        };
        let view = batch.prepared(wanted[0]).view();
        let package = &view.main().package;
        match (&resident.tower, &package.user) {
            (Some(copied), Some(tower)) if !wanted.iter().any(is_from_host) => {
                let requests = wanted.iter().map(|place| (*place, batch.prepared(*place))).collect();
                Embedded::of_device(device, package, (resident, (copied, tower)), requests, turn)
            }
            _ => {
                let requested = embed::embed(batch, view, wanted, &self.threads, &mut self.scratch.graphs);
                Embedded::of_host(device, &package.user_inputs, &requested)
            }
        }
    }
}

/// Answers requests for embeddings, and requests whose tower output is invalid. Returns, per request, whether its
/// output is invalid. Records the queries that will be searched.
fn answer_embeddings(batch: &dyn Batch, embedded: &Embedded<'_>, users: &HostUsers) -> Vec<bool> {
    let answer = |(n, &(place, prepared)): (usize, &(usize, &Prepared))| {
        let reads_more = prepared.view().main().package.needs_features();
        let user = users.whole(n, reads_more && is_whole(prepared));
        let is_wrong = !user.query.iter().all(|x| x.abs() <= COMPONENT_MAX);
        match &prepared.task {
            _ if is_wrong => batch.answer(place, Err(not_finite(embed::NOT_FINITE, prepared.largest()))),
            Task::Embed { .. } => {
                let user = EmbeddedUser { largest: prepared.largest(), ..user };
                let (content, degraded_rows) = (Content::Embedding(user), embedded.degraded_rows[n]);
                batch.answer(place, Ok(Answer { content, degraded_rows, explain: None }));
            }
            Task::Retrieve(_) | Task::Select { .. } => prepared.view().record(&user.query),
            Task::Rank { .. } | Task::Rerank { .. } => {}
        }
        is_wrong
    };
    embedded.requests.iter().enumerate().map(answer).collect()
}

/// Searches and reranks for a group, without waiting for the results. `users` is set if several devices share the items.
fn send(
    lanes: &[Device],
    seen: &[SeenView<'_>],
    (embedded, users): (&Embedded<'_>, Option<&HostUsers>),
    group: Group,
) -> Result<SubmittedGroup> {
    let requests: Vec<&Prepared> = group.requests.iter().map(|&n| embedded.requests[n].1).collect();
    if let Some(users) = users {
        return shared::send(lanes, seen, (&requests, users), group);
    }
    let (device, seen) = (&lanes[0], seen[0]);
    let tasks: Vec<&Task> = requests.iter().map(|prepared| &prepared.task).collect();
    let queries = OneQuery::all(&tasks, seen.resident.queries());
    let users = embedded.users.some(device, embedded.requests.len(), &group.requests)?;
    let found = search::search(GroupQueries { device, seen, queries: &queries, users, is_part: false }, &group)?;
    let sent = match group.is_selection {
        true => SubmittedWork::Found(select::send(lanes, &[found])?),
        false => {
            let columns = rerank::rerank(device, seen.resident, (&requests, group.reranked), found)?;
            SubmittedWork::Columns(vec![columns], Vec::new())
        }
    };
    Ok(SubmittedGroup::new(&lanes[..1], group, sent))
}

/// Ends a batch's use of the tables that are partly cached on the device, and reports measured and planned hit rates.
fn end(turn: Option<HotTurn<'_>>, resident: &Resident) {
    let (Some(turn), Some(tower)) = (turn, &resident.tower) else { return };
    turn.end();
    for HotCounters { table, cache, planned } in tower.counters() {
        metrics::gauge!("sterling_device_table_hit_rate", "table" => table.clone()).set(cache.hit_rate());
        metrics::gauge!("sterling_device_table_planned_hit_rate", "table" => table).set(planned);
    }
}

/// Unanswered requests of a batch.
struct UnansweredRequests<'a> {
    batch: &'a dyn Batch,
    answered: Vec<AtomicBool>,
    /// Reason why the CPU answers each request.
    reasons: Vec<OnceLock<Error>>,
    /// Reason why the CPU answers all requests.
    failed: Option<String>,
}

impl Batch for UnansweredRequests<'_> {
    fn len(&self) -> usize {
        self.batch.len()
    }

    fn prepared(&self, n: usize) -> &Prepared {
        self.batch.prepared(n)
    }

    fn deadline(&self, n: usize) -> Option<Instant> {
        self.batch.deadline(n)
    }

    fn is_wanted(&self, n: usize) -> bool {
        !self.answered[n].load(Ordering::Relaxed) && self.batch.is_wanted(n)
    }

    fn answer(&self, n: usize, answer: Result<Answer>) {
        self.answered[n].store(true, Ordering::Relaxed);
        let answer = answer.map(|mut answer| {
            let reason = self.failed.clone().or_else(|| Some(self.reasons[n].get()?.to_string()));
            if let (Some(explain), Some(reason)) = (&mut answer.explain, reason) {
                explain.note = Some(format!("the CPU answered: {reason}"));
            }
            answer
        });
        self.batch.answer(n, answer);
    }
}
