//! Queue and admission control: a state machine without clock, threads or locks.
//!
//! 1. [`Queue::admit`] predicts when a worker would take a request, and rejects it if it would most likely be late.
//! 2. [`Queue::push`] enqueues it, or first puts it among those whose rows must be fetched ([`Queue::take_fetch`],
//!    [`Queue::fetched`]).
//! 3. [`Queue::take`] returns a batch of one kind and group for an idle worker: at most its share of the queue, and at most
//!    [`BATCH_TIME`] long. Requests that can no longer meet their deadline are returned separately, to be rejected. If no queued
//!    request may take it, [`Queue::assign_idle_worker`] lets a caller use an idle worker's slot.
//! 4. [`Queue::finish`] frees the worker and updates the service rate ([`ServiceRate`]). [`Queue::call`] selects the worker to wake.
//!
//! There is one worker more than cores to use. Long requests together and each caller leave one worker idle
//! ([`Queue::may_occupy_worker`]), so a short request of another caller never waits for them: the system shares the cores.
//!
//! The *order* of service (kinds, batches, shares) depends on cost estimates alone; deadlines are compared with the estimate
//! times the service rate. A slow minute therefore causes more rejections, but does not amplify itself.

use std::time::{Duration, Instant};

use super::fair::{Fair, QueuedWork};
use super::lane::{Entry, INLINE_TIME_MAX, KINDS, Kind, Lane, QueuedRequest};
use super::service_rate::ServiceRate;
use sterling_core::quota::{FREE_FACTOR, Flow};
use sterling_core::request::Priority;

/// Longest batch of several requests, by cost estimate. A request that arrives while all workers run waits at least that long.
pub(super) const BATCH_TIME: Duration = Duration::from_millis(10);
/// Longest request for which no other thread takes over the connections of its caller's thread: waking one takes a good part
/// of this time.
pub(super) const BRIEF_TIME: Duration = Duration::from_micros(100);
/// Longest request that runs on its caller's thread although all cores are busy: it takes the core from a worker.
const BESIDE_TIME: Duration = Duration::from_millis(1);
/// Maximum predicted wait of an accepted request, as a share of its spare time. The rest absorbs prediction errors, since
/// accepted requests should be answered.
pub(super) const WAIT_SHARE: f64 = 0.4;
/// Safety factor on the predicted time of a request.
const MARGIN: f64 = 1.25;
/// Safety factor on the predicted time of a batch, whose first answer may come with its last.
const BATCH_MARGIN: f64 = 2.0;
/// Batch requests get one in `BATCH_PART` of the time of interactive requests while they wait.
const BATCH_PART: u64 = 16;
/// Maximum number of queued requests that are considered for one batch.
const BATCH_SCAN_MAX: usize = 256;
/// Divisor: the usual cost estimate grows by at most 1/64 per request, so it follows the cheaper ones.
const USUAL_GROWTH: u32 = 64;
/// Predicted remaining time of a batch that overran its prediction, as a share of the time so far.
const OVERRUN_SHARE: f64 = 0.25;

/// Reason for a rejection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum RejectionReason {
    /// The queue is closed.
    Closed,
    /// The maximum number of requests is queued.
    Full(usize),
    /// A worker would take it after `wait`, but at most `allowed` meets the deadline; it would run for `own`.
    Late { wait: Duration, allowed: Duration, own: Duration },
}

/// Window in which another caller counts as active. If one is, no batch of several requests is longer than [`INLINE_TIME_MAX`],
/// and no caller occupies threads of connections with several requests at a time.
const ACTIVE_WINDOW: Duration = Duration::from_millis(250);

/// Batch for a worker, and requests to reject.
#[derive(Debug)]
pub(super) struct NextWork<J> {
    /// Requests to run, of one group.
    pub(super) batch: Vec<Entry<J>>,
    /// Requests to reject.
    pub(super) expired: Vec<Entry<J>>,
}

/// Limits of a queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) waiting: usize,
    pub(super) batch: usize,
    /// Number of cores to use; there is one worker more ([`Bounds::slots`]).
    pub(super) cores: usize,
    pub(super) expensive: Duration,
}

impl Bounds {
    /// Returns the number of workers.
    pub(super) fn slots(&self) -> usize {
        self.cores + 1
    }
}

#[derive(Clone, Copy, Debug)]
struct Running {
    began: Instant,
    /// Latest deadline of the batch.
    deadline: Instant,
    cost_estimate: Duration,
    is_expensive: bool,
    /// Caller, if the batch belongs to a single one.
    flow: Option<Flow>,
    /// True if no caller waits for the batch.
    is_background: bool,
    /// True if the background batch must end, because a caller's request preempts it.
    is_preempted: bool,
}

/// Queued and running requests.
#[derive(Debug)]
pub(super) struct Queue<J> {
    bounds: Bounds,
    pace: ServiceRate,
    /// Service rate of requests on their callers' threads, by CPU time.
    own_pace: ServiceRate,
    /// Queues by priority.
    waiting: [Fair<J>; 2],
    to_fetch: Lane<J>,
    in_fetch: usize,
    running: Vec<Option<Running>>,
    /// Workers whose threads sleep until they are notified.
    asleep: Vec<bool>,
    /// The two most recent distinct callers, with the time of their last request.
    callers: [Option<(Flow, Instant)>; 2],
    /// Time that batch requests are owed.
    owed: Duration,
    /// Cost estimate of the cheaper ones of recent interactive requests.
    usual: Option<Duration>,
    next_id: u64,
    is_closed: bool,
}

impl<J> Queue<J> {
    pub(super) fn new(bounds: Bounds, now: Instant) -> Self {
        Queue {
            bounds,
            pace: ServiceRate::new(now),
            own_pace: ServiceRate::new(now),
            waiting: Default::default(),
            to_fetch: Lane::default(),
            in_fetch: 0,
            running: vec![None; bounds.slots()],
            asleep: vec![false; bounds.slots()],
            callers: [None; 2],
            owed: Duration::ZERO,
            usual: None,
            next_id: 0,
            is_closed: false,
        }
    }

    /// Returns the number of requests that wait for a worker.
    pub(super) fn waiting(&self) -> usize {
        self.waiting_before(Priority::Batch)
    }

    /// Returns the number of requests that wait for a worker and have this priority or a higher one.
    pub(super) fn waiting_before(&self, priority: Priority) -> usize {
        self.waiting[..=priority as usize].iter().map(Fair::len).sum()
    }

    /// Returns the number of requests whose rows are being fetched or wait for that.
    pub(super) fn fetching(&self) -> usize {
        self.to_fetch.entries.len() + self.in_fetch
    }

    pub(super) fn pace(&self) -> &ServiceRate {
        &self.pace
    }

    /// Returns the predicted run time of the cheaper ones of recent interactive requests; zero before the first.
    pub(super) fn usual(&self) -> Duration {
        self.usual.map_or(Duration::ZERO, |cost_estimate| self.pace.predict(cost_estimate).mul_f64(MARGIN))
    }

    /// Returns whether nothing is queued or running.
    pub(super) fn is_idle(&self) -> bool {
        self.waiting() == 0 && self.fetching() == 0 && self.running.iter().all(Option::is_none)
    }

    /// Returns the maximum number of workers for expensive requests.
    fn expensive_slots(&self) -> usize {
        self.bounds.cores.saturating_sub(1).max(1)
    }

    fn expensive_running(&self) -> usize {
        self.running().filter(|running| running.is_expensive).count()
    }

    fn is_expensive(&self, cost_estimate: Duration) -> bool {
        cost_estimate > self.bounds.expensive
    }

    /// Records the caller of a request.
    fn received(&mut self, ask: &QueuedRequest, now: Instant) {
        if ask.is_background {
            return;
        }
        if self.callers[0].is_some_and(|(last, _)| last != ask.flow) {
            self.callers[1] = self.callers[0];
        }
        self.callers[0] = Some((ask.flow, now));
    }

    /// Returns whether other callers are active.
    fn is_shared(&self, caller: Flow, now: Instant) -> bool {
        let is_other =
            |(flow, at): (Flow, Instant)| flow != caller && now.saturating_duration_since(at) < ACTIVE_WINDOW;
        self.callers.iter().flatten().copied().any(is_other)
    }

    fn running_of(&self, flow: Flow) -> impl Iterator<Item = &Running> {
        self.running.iter().flatten().filter(move |running| running.flow == Some(flow) && !running.is_background)
    }

    /// Returns whether a caller must leave the last worker to others.
    fn is_limited(&self, flow: Flow) -> bool {
        self.running_of(flow).count() >= self.bounds.cores
    }

    /// Returns whether a request may occupy one of the idle workers. One is left idle by long requests together, for short ones,
    /// by the requests of each caller, for those of others, and by background work, for those of callers.
    fn may_occupy_worker(&self, ask: &QueuedRequest) -> bool {
        let is_limited =
            if ask.is_background { self.running().count() >= self.bounds.cores } else { self.is_limited(ask.flow) };
        !is_limited && (ask.cost_estimate <= INLINE_TIME_MAX || self.may_run_long())
    }

    /// Returns the batches that run, without background work that must end.
    fn running(&self) -> impl Iterator<Item = &Running> {
        self.running.iter().flatten().filter(|running| !running.is_preempted)
    }

    /// Returns whether fewer workers than cores run longer than [`INLINE_TIME_MAX`].
    fn may_run_long(&self) -> bool {
        self.running().filter(|running| running.cost_estimate > INLINE_TIME_MAX).count() < self.bounds.cores
    }

    /// Returns the predicted remaining run time of a worker in seconds; 0 if it is idle.
    fn remaining_seconds(&self, running: Option<Running>, now: Instant) -> f64 {
        running.filter(|running| !running.is_preempted).map_or(0.0, |running| {
            let ran_s = now.saturating_duration_since(running.began).as_secs_f64();
            let left_s = self.pace.predict(running.cost_estimate).as_secs_f64() - ran_s;
            if left_s > 0.0 { left_s } else { ran_s * OVERRUN_SHARE }
        })
    }

    /// Predicts the wait for a worker of a request that a caller sends now; without a caller, for a short one of a caller that was
    /// not served lately. Assumes that preempted background work ends (see [`Queue::must_preempt_background`]).
    pub(super) fn wait(&self, priority: Priority, is_expensive: bool, flow: Option<Flow>, now: Instant) -> Duration {
        if flow.is_none() && self.has_spare_worker() {
            return Duration::ZERO;
        }
        let ahead = match priority {
            Priority::Interactive => self.waiting[0].ahead(flow, now),
            Priority::Batch => {
                let (interactive, batch) = (self.waiting[0].all(now), self.waiting[1].ahead(flow, now));
                QueuedWork {
                    cheap: interactive.cheap + batch.cheap,
                    expensive: interactive.expensive + batch.expensive,
                }
            }
        };
        let cheap_s = self.pace.predict(ahead.cheap).as_secs_f64();
        let expensive_s = self.pace.predict(ahead.expensive).as_secs_f64();
        let counts = |running: &Running| flow.is_some() || !running.is_background;
        let mut free_s: Vec<f64> =
            self.running.iter().map(|run| self.remaining_seconds(run.filter(counts), now)).collect();
        free_s.sort_unstable_by(f64::total_cmp);
        // The additional worker has no core of its own; while all run, the service rate reflects how slow each is.
        if free_s[0] == 0.0 {
            free_s.remove(0);
        }
        // Expensive requests follow expensive requests, on the workers that become free last.
        let slots = self.expensive_slots();
        let expensive_each_s = expensive_s / slots as f64;
        let first = free_s.len() - slots;
        for free in &mut free_s[first..] {
            *free += expensive_each_s;
        }
        free_s.sort_unstable_by(f64::total_cmp);
        let mut wait_s = level(&free_s, cheap_s);
        let expensive_running = self.expensive_running();
        if is_expensive && (expensive_s > 0.0 || expensive_running >= slots) {
            let expensive_left_s: f64 = self
                .running
                .iter()
                .filter(|r| r.is_some_and(|r| r.is_expensive))
                .map(|r| self.remaining_seconds(*r, now))
                .sum();
            wait_s = wait_s.max((expensive_left_s + expensive_s) / slots as f64);
        }
        Duration::try_from_secs_f64(wait_s).unwrap_or(Duration::MAX)
    }

    /// Predicts the wait of this request for a worker.
    fn wait_estimate(&self, ask: &QueuedRequest, now: Instant) -> Duration {
        let is_expensive = self.is_expensive(ask.cost_estimate);
        if !is_expensive && self.has_worker_for(ask) {
            return Duration::ZERO;
        }
        self.wait(ask.priority, is_expensive, Some(ask.flow), now)
    }

    /// Returns whether any caller must leave the last worker to others.
    pub(super) fn is_caller_limited(&self) -> bool {
        self.running.iter().flatten().filter_map(|running| running.flow).any(|flow| self.is_limited(flow))
    }

    /// Predicts the wait for a worker of the next short interactive request of a caller that just sent one.
    pub(super) fn wait_of(&self, flow: Flow, now: Instant) -> Duration {
        if self.has_spare_worker() && !self.is_limited(flow) {
            return Duration::ZERO;
        }
        self.wait(Priority::Interactive, false, Some(flow), now)
    }

    /// Returns whether a worker is idle that no queued request may occupy.
    fn has_spare_worker(&self) -> bool {
        self.running.iter().any(Option::is_none) && self.choose().is_none()
    }

    /// Returns whether a worker is idle that this request may occupy, and no queued one.
    fn has_worker_for(&self, ask: &QueuedRequest) -> bool {
        self.has_spare_worker() && self.may_occupy_worker(ask)
    }

    /// Decides whether a request would meet its deadline; returns the latest start of a worker.
    ///
    /// # Errors
    /// The reason for the rejection.
    pub(super) fn admit(&self, ask: &QueuedRequest, now: Instant) -> Result<Instant, RejectionReason> {
        if self.is_closed {
            return Err(RejectionReason::Closed);
        }
        // A hanging node fills only the room of requests that need it; batch requests fill only their own.
        let before = if ask.needs_fetch { self.fetching() } else { self.waiting_before(ask.priority) };
        let free = self.bounds.waiting.saturating_sub(before);
        // One caller may not fill the queue alone; the memory budget has the same rule.
        let most = free.saturating_mul(FREE_FACTOR as usize);
        if free == 0 || before >= most && self.waiting_for(ask) >= most {
            return Err(RejectionReason::Full(before));
        }
        let own = self.pace.predict(ask.cost_estimate).mul_f64(MARGIN);
        let timeout = ask.deadline.saturating_duration_since(now);
        let wait = self.wait_estimate(ask, now);
        let Some(spare) = timeout.checked_sub(own) else {
            // If the service rate is stale, this request measures it again.
            let is_trial = self.pace.is_stale(now) && wait.is_zero();
            return if is_trial {
                Ok(ask.deadline)
            } else {
                Err(RejectionReason::Late { wait, allowed: Duration::ZERO, own })
            };
        };
        let allowed = spare.mul_f64(WAIT_SHARE);
        if wait > allowed {
            return Err(RejectionReason::Late { wait, allowed, own });
        }
        Ok(ask.deadline - own)
    }

    /// Returns whether background work must end so that a caller's request is not rejected: the request would wait too
    /// long for it, or it overran its prediction and its end is unknown. From then on the background work counts as
    /// ended.
    pub(super) fn must_preempt_background(&mut self, ask: &QueuedRequest, now: Instant) -> bool {
        let is_behind = |running: &Running| running.is_background && !running.is_preempted;
        if ask.is_background || !self.running.iter().flatten().any(is_behind) {
            return false;
        }
        let ran_over =
            |running: &Running| now.saturating_duration_since(running.began) > self.pace.predict(running.cost_estimate);
        let is_over = self.running.iter().flatten().any(|running| is_behind(running) && ran_over(running));
        let own = self.pace.predict(ask.cost_estimate).mul_f64(MARGIN);
        let spare = ask.deadline.saturating_duration_since(now).saturating_sub(own);
        let allowed = spare.mul_f64(WAIT_SHARE);
        let with = self.wait_estimate(ask, now);
        if with.is_zero() || with <= allowed && !is_over {
            return false;
        }
        let before = self.running.clone();
        self.running.iter_mut().flatten().for_each(|running| running.is_preempted |= running.is_background);
        let helps = self.wait_estimate(ask, now) <= allowed;
        if !helps {
            self.running = before;
        }
        helps
    }

    /// Returns the number of queued requests of the same caller that wait for the same resource.
    fn waiting_for(&self, ask: &QueuedRequest) -> usize {
        if ask.needs_fetch {
            return self.to_fetch.entries.values().filter(|entry| entry.ask.flow == ask.flow).count();
        }
        self.waiting[..=ask.priority as usize].iter().map(|fair| fair.len_of_caller(ask.flow)).sum()
    }

    /// Enqueues a request that [`Queue::admit`] accepted; returns its number.
    pub(super) fn push(&mut self, job: J, ask: QueuedRequest, latest_start: Instant, now: Instant) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.received(&ask, now);
        let entry = Entry { job, ask, id, latest_start, ready: now };
        if ask.needs_fetch {
            self.to_fetch.insert(entry);
        } else {
            if ask.priority == Priority::Interactive {
                let grown = self.usual.map_or(ask.cost_estimate, |usual| usual + usual / USUAL_GROWTH);
                self.usual = Some(grown.min(ask.cost_estimate));
            }
            self.insert(Kind::Direct, entry);
        }
        id
    }

    fn insert(&mut self, kind: Kind, entry: Entry<J>) {
        let kind = match entry.ask.cost_estimate {
            cost_estimate if self.is_expensive(cost_estimate) => Kind::Dear,
            cost_estimate if cost_estimate > INLINE_TIME_MAX => Kind::Long,
            _ => kind,
        };
        self.waiting[entry.ask.priority as usize].insert(kind, entry);
    }

    /// Removes all requests of the oldest group whose rows must be fetched; empty if there are none.
    pub(super) fn take_fetch(&mut self) -> Vec<Entry<J>> {
        let Some(group) = self.to_fetch.oldest().map(|entry| entry.ask.group) else { return Vec::new() };
        let same = self.to_fetch.entries.values().filter(|entry| entry.ask.group == group);
        let ids: Vec<u64> = same.map(|entry| entry.id).collect();
        let entries: Vec<_> = ids.into_iter().filter_map(|id| self.to_fetch.remove(id)).collect();
        self.in_fetch += entries.len();
        entries
    }

    /// Completes [`Queue::take_fetch`]: enqueues the requests that are ready for a worker and subtracts the number of others.
    pub(super) fn fetched(&mut self, ready: Vec<Entry<J>>, removed: usize, now: Instant) {
        self.in_fetch -= ready.len() + removed;
        for entry in ready {
            self.insert(Kind::Fetched, Entry { ready: now, ..entry });
        }
    }

    /// Assigns the slot of an idle worker among the `ready` ones to a request that its caller runs; `None` if it would take too
    /// long, or if the slot is for a queued request or another caller's.
    pub(super) fn assign_idle_worker(
        &mut self,
        ask: &QueuedRequest,
        ready: impl Fn(usize) -> bool,
        now: Instant,
    ) -> Option<usize> {
        let is_short = !ask.needs_fetch
            && self.pace.predict(ask.cost_estimate) <= INLINE_TIME_MAX
            && !self.is_expensive(ask.cost_estimate);
        // The threads of connections have a higher priority than workers. If that delays others, a caller runs one request at a
        // time there, and only a brief one if no core is idle.
        let delays_others = || self.is_shared(ask.flow, now) && self.running_of(ask.flow).next().is_some();
        let has_core =
            || self.running().count() < self.bounds.cores || self.pace.predict(ask.cost_estimate) <= BESIDE_TIME;
        if !is_short || !self.has_worker_for(ask) || delays_others() || !has_core() {
            return None;
        }
        let worker = (0..self.running.len()).find(|&worker| self.running[worker].is_none() && ready(worker))?;
        self.received(ask, now);
        if self.waiting() > 0 {
            self.waiting[ask.priority as usize].charge(ask.flow, ask.cost_estimate);
        }
        self.running[worker] = Some(Running {
            began: now,
            deadline: ask.deadline,
            cost_estimate: ask.cost_estimate,
            is_expensive: false,
            flow: Some(ask.flow),
            is_background: ask.is_background,
            is_preempted: false,
        });
        Some(worker)
    }

    /// Returns whether a request on its caller's thread finishes before another thread could be of much use. Measures CPU time:
    /// under CPU contention more threads would only add to it, and every request would appear long.
    pub(super) fn is_brief(&self, ask: &QueuedRequest) -> bool {
        self.own_pace.predict(ask.cost_estimate) <= BRIEF_TIME
    }

    /// Selects an idle worker to wake for a queued request that may occupy it, each once until it sleeps again. `None` if as many
    /// workers as cores run or are awake, which then take the next request themselves, unless all of these run.
    pub(super) fn call(&mut self) -> Option<usize> {
        let running = self.running().count();
        let awake =
            (0..self.running.len()).filter(|&worker| self.running[worker].is_none() && !self.asleep[worker]).count();
        if running + awake >= self.bounds.cores && (running < self.bounds.cores || awake > 0) {
            return None;
        }
        let is_called = |worker: &usize| self.asleep[*worker] && self.running[*worker].is_none();
        let worker = (0..self.running.len()).find(is_called)?;
        self.choose()?;
        self.asleep[worker] = false;
        Some(worker)
    }

    /// Records that the thread of a worker goes to sleep or woke up.
    pub(super) fn sleeps(&mut self, worker: usize, is_asleep: bool) {
        self.asleep[worker] = is_asleep;
    }

    /// Returns a batch for a worker; empty if there is none now or a caller uses the worker's slot.
    pub(super) fn take(&mut self, worker: usize, now: Instant) -> NextWork<J> {
        let mut expired = Vec::new();
        if self.running[worker].is_some() {
            return NextWork { batch: Vec::new(), expired };
        }
        while let Some((priority, kind)) = self.choose() {
            let batch = self.gather(priority, kind, now, &mut expired);
            if batch.is_empty() {
                continue;
            }
            let cost_estimate = batch.iter().map(|entry| entry.ask.cost_estimate).sum();
            self.settle(priority, cost_estimate);
            let deadline = batch.iter().map(|entry| entry.ask.deadline).max().unwrap_or(now);
            let (is_expensive, is_background) = (kind == Kind::Dear, batch.iter().all(|entry| entry.ask.is_background));
            let flow = batch.first().map(|entry| entry.ask.flow);
            let flow = flow.filter(|flow| batch.iter().all(|entry| entry.ask.flow == *flow));
            let is_preempted = false;
            self.running[worker] =
                Some(Running { began: now, deadline, cost_estimate, is_expensive, flow, is_background, is_preempted });
            return NextWork { batch, expired };
        }
        NextWork { batch: Vec::new(), expired }
    }

    /// Selects the queue that is served next.
    fn choose(&self) -> Option<(Priority, Kind)> {
        let kinds = match self.may_run_long() {
            false => &KINDS[..Kind::Long as usize],
            true if self.expensive_running() == self.expensive_slots() => &KINDS[..Kind::Dear as usize],
            true => &KINDS[..],
        };
        let may = |ask: &QueuedRequest| self.may_occupy_worker(ask);
        match (self.waiting[0].next(kinds, may), self.waiting[1].next(kinds, may)) {
            (Some(_), Some((kind, next))) if self.owed >= next.ask.cost_estimate => Some((Priority::Batch, kind)),
            (Some((kind, _)), _) => Some((Priority::Interactive, kind)),
            (None, Some((kind, _))) => Some((Priority::Batch, kind)),
            (None, None) => None,
        }
    }

    /// Updates the time that batch requests are owed.
    fn settle(&mut self, priority: Priority, cost_estimate: Duration) {
        let batch_waits = self.waiting[Priority::Batch as usize].len() > 0;
        self.owed = match priority {
            _ if !batch_waits => Duration::ZERO,
            Priority::Interactive => self.owed + cost_estimate / BATCH_PART as u32,
            Priority::Batch => self.owed.saturating_sub(cost_estimate),
        };
    }

    fn gather(&mut self, priority: Priority, kind: Kind, now: Instant, expired: &mut Vec<Entry<J>>) -> Vec<Entry<J>> {
        let mut fair = std::mem::take(&mut self.waiting[priority as usize]);
        let share = fair.len_of(kind).div_ceil(self.bounds.cores).min(self.bounds.batch);
        let (mut batch, mut others): (Vec<Entry<J>>, Vec<Entry<J>>) = (Vec::new(), Vec::new());
        let mut cost_estimate = Duration::ZERO;
        let mut tightest: Option<Instant> = None;
        for _ in 0..BATCH_SCAN_MAX {
            let Some(entry) = fair.take(kind, |ask| self.may_occupy_worker(ask), now) else { break };
            if now > entry.latest_start {
                expired.push(entry);
                continue;
            }
            let is_apart = |first: &Entry<J>| {
                first.ask.group != entry.ask.group || first.ask.is_background || entry.ask.is_background
            };
            if batch.first().is_some_and(is_apart) {
                others.push(entry);
                continue;
            }
            let together = cost_estimate + entry.ask.cost_estimate;
            let deadline = tightest.map_or(entry.ask.deadline, |tightest| tightest.min(entry.ask.deadline));
            let is_late = now + self.pace.predict(together).mul_f64(BATCH_MARGIN) > deadline;
            let most = if self.is_shared(entry.ask.flow, now) { INLINE_TIME_MAX } else { BATCH_TIME };
            if !batch.is_empty() && (together > most || is_late) {
                others.push(entry);
                break;
            }
            fair.charge(entry.ask.flow, entry.ask.cost_estimate);
            batch.push(entry);
            (cost_estimate, tightest) = (together, Some(deadline));
            if batch.len() >= share {
                break;
            }
        }
        others.into_iter().for_each(|entry| fair.requeue(kind, entry));
        self.waiting[priority as usize] = fair;
        batch
    }

    /// Marks a worker as idle. `done` is the cost estimate of its answered requests; `ran` is the CPU time of the caller's
    /// thread, if a caller used its slot.
    pub(super) fn finish(&mut self, worker: usize, done: Duration, ran: Option<Duration>, now: Instant) {
        if let Some(running) = self.running[worker].take() {
            self.pace.learn(done, now.saturating_duration_since(running.began), now);
            if let Some(ran) = ran {
                self.own_pace.learn(done, ran, now);
            }
        }
    }

    /// Returns whether a worker runs a batch that was abandoned before `since`.
    pub(super) fn hangs(&self, worker: usize, since: Instant) -> bool {
        self.running[worker].is_some_and(|running| running.deadline < since)
    }

    /// Frees the workers whose batches were abandoned before `since`, and returns their numbers.
    pub(super) fn lose(&mut self, since: Instant) -> Vec<usize> {
        let is_lost = |running: &mut Option<Running>| running.take_if(|running| running.deadline < since).is_some();
        let workers = self.running.iter_mut().enumerate();
        let lost: Vec<usize> = workers.filter_map(|(worker, running)| is_lost(running).then_some(worker)).collect();
        lost.iter().for_each(|&worker| self.asleep[worker] = false);
        lost
    }

    /// Removes a request that has not begun; `None` if it is no longer queued.
    pub(super) fn withdraw(&mut self, id: u64, ask: &QueuedRequest) -> Option<Entry<J>> {
        let entry = self.waiting[ask.priority as usize].remove(ask.flow, id);
        entry.or_else(|| self.to_fetch.remove(id))
    }

    /// Closes the queue to new requests; queued ones still get a worker.
    pub(super) fn close(&mut self) {
        self.is_closed = true;
    }

    /// Removes all requests that have not begun.
    pub(super) fn clear(&mut self) -> Vec<Entry<J>> {
        let to_fetch = std::mem::take(&mut self.to_fetch).entries.into_values();
        self.waiting.iter_mut().flat_map(Fair::clear).chain(to_fetch).collect()
    }
}

/// Returns when the first worker is free after `work_s` was distributed: workers are busy until the times in `free_s`, ascending,
/// and the work fills them up to a common level.
fn level(free_s: &[f64], work_s: f64) -> f64 {
    let mut sum_s = 0.0;
    let mut level_s = 0.0;
    for (n, free) in free_s.iter().enumerate() {
        if n > 0 && level_s <= *free {
            break;
        }
        sum_s += free;
        level_s = (sum_s + work_s) / (n + 1) as f64;
    }
    level_s
}

#[cfg(test)]
mod tests;
