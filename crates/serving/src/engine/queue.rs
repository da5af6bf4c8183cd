//! Who waits, who goes next, and who is refused: a state machine without a clock, a thread or a lock of its own.
//!
//! 1. [`Queue::admit`] predicts when a worker would take a request and refuses what would most likely come late.
//! 2. [`Queue::push`] puts it in a lane, or first among those whose rows must be fetched ([`Queue::take_fetch`],
//!    [`Queue::fetched`]).
//! 3. [`Queue::take`] gives an idle worker a batch: of one lane and one group, no more than its share of what waits, and
//!    no longer than [`BATCH_TIME`]. What could not be done in time any more comes back apart, to be refused.
//!    Where nobody waits, [`Queue::lend`] gives an idle worker's place to a caller in its stead.
//! 4. [`Queue::finish`] frees the worker and teaches the [`Pace`]. Whom to wake is [`Queue::call`]'s to say.
//!
//! What decides *who* goes (lanes, batches, shares) rests on prices alone; what is compared with a deadline is the price
//! times the pace. So a slow minute refuses more, and changes nothing else: it cannot feed on itself.

use std::time::{Duration, Instant};

use super::fair::{Ahead, Fair};
use super::lane::{Ask, Entry, KINDS, Kind, Lane};
use super::pace::Pace;
use crate::quota::{FREE_FACTOR, Flow};
use sterling_core::request::Priority;

/// Longest batch of more than one request, by price. Whoever comes while all workers run waits that long at least.
pub(super) const BATCH_TIME: Duration = Duration::from_millis(10);
/// Longest request that its caller runs: no caller can leave it meanwhile.
pub(super) const LENT_TIME: Duration = Duration::from_millis(5);
/// Longest request during which nobody else looks after the connections of its caller's thread: to wake another thread for
/// them takes a good part of that.
pub(super) const BRIEF_TIME: Duration = Duration::from_micros(100);
/// A request is taken in where its predicted wait is at most this share of the time it has to spare. What the rest is
/// for: predictions err, and whoever is taken in ought to be answered.
pub(super) const WAIT_SHARE: f64 = 0.4;
/// A request is thought to need this much more than predicted.
const MARGIN: f64 = 1.25;
/// And so is a batch: its first answer may come with its last.
const BATCH_MARGIN: f64 = 2.0;
/// Of the time that interactive requests get while batch requests wait, these get one part in so many.
const BATCH_PART: u64 = 16;
/// Waiting requests that are looked at for one batch.
const LOOKED_AT: usize = 256;
/// A cheap request is no more what is usual after some times so many dearer ones.
const USUAL_GROWTH: u32 = 64;
/// A batch that runs longer than predicted is thought to run on for this share of what it took so far.
const OVERRUN_SHARE: f64 = 0.25;

/// Why a request is not taken in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Refused {
    /// Nothing is taken in any more.
    Closed,
    /// As many wait as may.
    Full(usize),
    /// A worker would take it after `wait`, at most `allowed` would do; it would run for `own`.
    Late { wait: Duration, allowed: Duration, own: Duration },
}

/// Where another caller has asked so lately, no caller holds the last worker with requests longer than [`LENT_TIME`], or any with several that are.
const LATELY: Duration = Duration::from_millis(250);

/// What a worker gets.
#[derive(Debug)]
pub(super) struct Taken<J> {
    /// To be run, of one group.
    pub(super) batch: Vec<Entry<J>>,
    /// To be refused.
    pub(super) expired: Vec<Entry<J>>,
}

/// Bounds of a queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) waiting: usize,
    pub(super) batch: usize,
    pub(super) workers: usize,
    pub(super) dear: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Running {
    began: Instant,
    /// The latest of the batch.
    deadline: Instant,
    price: Duration,
    is_dear: bool,
    /// Whose it is, where it is of one caller alone.
    flow: Option<Flow>,
    /// True where no caller waits for it.
    is_background: bool,
    /// True where it is to end, because a caller overtook it.
    is_overtaken: bool,
}

/// Who waits and who runs.
#[derive(Debug)]
pub(super) struct Queue<J> {
    bounds: Bounds,
    pace: Pace,
    /// Of requests that their callers run, by the time that a core was theirs.
    own_pace: Pace,
    /// By priority.
    waiting: [Fair<J>; 2],
    to_fetch: Lane<J>,
    in_fetch: usize,
    running: Vec<Option<Running>>,
    /// The workers whose threads wait to be woken.
    asleep: Vec<bool>,
    /// The caller that asked last, and the last one that was another, each with when.
    callers: [Option<(Flow, Instant)>; 2],
    /// Time that batch requests are owed.
    owed: Duration,
    /// What the cheaper of the last interactive requests cost.
    usual: Option<Duration>,
    next_id: u64,
    is_closed: bool,
}

impl<J> Queue<J> {
    pub(super) fn new(bounds: Bounds, now: Instant) -> Self {
        Queue {
            bounds,
            pace: Pace::new(now),
            own_pace: Pace::new(now),
            waiting: Default::default(),
            to_fetch: Lane::default(),
            in_fetch: 0,
            running: vec![None; bounds.workers],
            asleep: vec![false; bounds.workers],
            callers: [None; 2],
            owed: Duration::ZERO,
            usual: None,
            next_id: 0,
            is_closed: false,
        }
    }

    /// Requests that wait for a worker.
    pub(super) fn waiting(&self) -> usize {
        self.waiting_before(Priority::Batch)
    }

    /// Requests that wait for a worker and have this priority or a higher one.
    pub(super) fn waiting_before(&self, priority: Priority) -> usize {
        self.waiting[..=priority as usize].iter().map(Fair::len).sum()
    }

    /// Requests whose rows are fetched, or wait for that.
    pub(super) fn fetching(&self) -> usize {
        self.to_fetch.entries.len() + self.in_fetch
    }

    pub(super) fn pace(&self) -> &Pace {
        &self.pace
    }

    /// How long the cheaper of the last interactive requests are thought to take; nothing before the first.
    pub(super) fn usual(&self) -> Duration {
        self.usual.map_or(Duration::ZERO, |price| self.pace.predict(price).mul_f64(MARGIN))
    }

    /// True where nothing waits and nothing runs.
    pub(super) fn is_idle(&self) -> bool {
        self.waiting() == 0 && self.fetching() == 0 && self.running.iter().all(Option::is_none)
    }

    /// Workers that requests of a high price may hold at once.
    fn dear_slots(&self) -> usize {
        self.bounds.workers.saturating_sub(1).max(1)
    }

    fn dear_running(&self) -> usize {
        self.running.iter().flatten().filter(|running| running.is_dear && !running.is_overtaken).count()
    }

    fn is_dear(&self, price: Duration) -> bool {
        price > self.bounds.dear
    }

    /// Takes note of who asks.
    fn heard(&mut self, ask: &Ask, now: Instant) {
        if ask.is_background {
            return;
        }
        if self.callers[0].is_some_and(|(last, _)| last != ask.flow) {
            self.callers[1] = self.callers[0];
        }
        self.callers[0] = Some((ask.flow, now));
    }

    /// Whether other callers have asked lately.
    fn is_shared(&self, caller: Flow, now: Instant) -> bool {
        let is_other = |(flow, at): (Flow, Instant)| flow != caller && now.saturating_duration_since(at) < LATELY;
        self.callers.iter().flatten().copied().any(is_other)
    }

    /// Whether a request is long and other callers have asked lately, so that its caller may not hold the last worker with it.
    fn leaves_one(&self, ask: &Ask, now: Instant) -> bool {
        self.running.len() > 1 && ask.price > LENT_TIME && self.is_shared(ask.flow, now)
    }

    fn held_by(&self, flow: Flow) -> impl Iterator<Item = &Running> {
        self.running.iter().flatten().filter(move |running| running.flow == Some(flow) && !running.is_overtaken)
    }

    /// Whether a request may take a worker, of those that are left to its caller.
    fn may_take(&self, ask: &Ask, now: Instant) -> bool {
        !self.leaves_one(ask, now) || self.leaves_a_worker(ask)
    }

    fn leaves_a_worker(&self, ask: &Ask) -> bool {
        self.held_by(ask.flow).count() + 1 < self.running.len()
    }

    /// How long a worker is still thought to run, in seconds; 0 for an idle one.
    fn left_s(&self, running: Option<Running>, now: Instant) -> f64 {
        running.filter(|running| !running.is_overtaken).map_or(0.0, |running| {
            let ran_s = now.saturating_duration_since(running.began).as_secs_f64();
            let left_s = self.pace.predict(running.price).as_secs_f64() - ran_s;
            if left_s > 0.0 { left_s } else { ran_s * OVERRUN_SHARE }
        })
    }

    /// How long a request of a caller that comes now would wait for a worker; without a caller, that of one who has asked for nothing
    /// lately, if what no caller waits for ends (as [`Queue::overtake`] has it).
    pub(super) fn wait(&self, priority: Priority, is_dear: bool, flow: Option<Flow>, now: Instant) -> Duration {
        let ahead = match priority {
            Priority::Interactive => self.waiting[0].ahead(flow, now),
            Priority::Batch => {
                let (interactive, batch) = (self.waiting[0].all(now), self.waiting[1].ahead(flow, now));
                Ahead { cheap: interactive.cheap + batch.cheap, dear: interactive.dear + batch.dear }
            }
        };
        let cheap_s = self.pace.predict(ahead.cheap).as_secs_f64();
        let dear_s = self.pace.predict(ahead.dear).as_secs_f64();
        let counts = |running: &Running| flow.is_some() || !running.is_background;
        let mut free_s: Vec<f64> = self.running.iter().map(|run| self.left_s(run.filter(counts), now)).collect();
        free_s.sort_unstable_by(f64::total_cmp);
        // Those of a high price go where those of a high price run, which are the workers that are free last.
        let slots = self.dear_slots();
        let dear_each_s = dear_s / slots as f64;
        let first = free_s.len() - slots;
        for free in &mut free_s[first..] {
            *free += dear_each_s;
        }
        free_s.sort_unstable_by(f64::total_cmp);
        let mut wait_s = level(&free_s, cheap_s);
        let dear_running = self.dear_running();
        if is_dear && (dear_s > 0.0 || dear_running >= slots) {
            let dear_left_s: f64 =
                self.running.iter().filter(|r| r.is_some_and(|r| r.is_dear)).map(|r| self.left_s(*r, now)).sum();
            wait_s = wait_s.max((dear_left_s + dear_s) / slots as f64);
        }
        Duration::try_from_secs_f64(wait_s).unwrap_or(Duration::MAX)
    }

    /// How long this request would wait for a worker.
    fn wait_of(&self, ask: &Ask, now: Instant) -> Duration {
        let wait = self.wait(ask.priority, self.is_dear(ask.price), Some(ask.flow), now);
        if !self.leaves_one(ask, now) {
            return wait;
        }
        let own = self.waiting[..=ask.priority as usize].iter().map(|fair| fair.price_for(ask.flow)).sum();
        if own == Duration::ZERO && self.leaves_a_worker(ask) {
            return wait;
        }
        let left_s: f64 = self.held_by(ask.flow).map(|running| self.left_s(Some(*running), now)).sum();
        let all_s = left_s + self.pace.predict(own).as_secs_f64();
        wait.max(Duration::try_from_secs_f64(all_s / (self.running.len() - 1) as f64).unwrap_or(Duration::MAX))
    }

    /// Whether a request would be done in time; says when a worker must have taken it.
    ///
    /// # Errors
    /// Why it is not to be pushed.
    pub(super) fn admit(&self, ask: &Ask, now: Instant) -> Result<Instant, Refused> {
        if self.is_closed {
            return Err(Refused::Closed);
        }
        // A node that hangs fills the room of the requests that need it, batch requests fill their own.
        let before = if ask.needs_fetch { self.fetching() } else { self.waiting_before(ask.priority) };
        let free = self.bounds.waiting.saturating_sub(before);
        // As with memory: one caller leaves room to others.
        let most = free.saturating_mul(FREE_FACTOR as usize);
        if free == 0 || before >= most && self.waiting_for(ask) >= most {
            return Err(Refused::Full(before));
        }
        let own = self.pace.predict(ask.price).mul_f64(MARGIN);
        let timeout = ask.deadline.saturating_duration_since(now);
        let wait = self.wait_of(ask, now);
        let Some(spare) = timeout.checked_sub(own) else {
            // Where nothing else tells whether the pace is still right, this request will.
            let is_trial = self.pace.is_stale(now) && wait.is_zero();
            return if is_trial { Ok(ask.deadline) } else { Err(Refused::Late { wait, allowed: Duration::ZERO, own }) };
        };
        let allowed = spare.mul_f64(WAIT_SHARE);
        if wait > allowed {
            return Err(Refused::Late { wait, allowed, own });
        }
        Ok(ask.deadline - own)
    }

    /// Whether what no caller waits for must end, so that a caller's request is not refused: it would have to wait too long for that, or
    /// for what runs longer than predicted, which nobody knows the end of. From here on it counts as ended.
    pub(super) fn overtake(&mut self, ask: &Ask, now: Instant) -> bool {
        let is_behind = |running: &Running| running.is_background && !running.is_overtaken;
        if ask.is_background || !self.running.iter().flatten().any(is_behind) {
            return false;
        }
        let ran_over =
            |running: &Running| now.saturating_duration_since(running.began) > self.pace.predict(running.price);
        let is_over = self.running.iter().flatten().any(|running| is_behind(running) && ran_over(running));
        let own = self.pace.predict(ask.price).mul_f64(MARGIN);
        let spare = ask.deadline.saturating_duration_since(now).saturating_sub(own);
        let allowed = spare.mul_f64(WAIT_SHARE);
        let with = self.wait_of(ask, now);
        if with.is_zero() || with <= allowed && !is_over {
            return false;
        }
        let before = self.running.clone();
        self.running.iter_mut().flatten().for_each(|running| running.is_overtaken |= running.is_background);
        let helps = self.wait_of(ask, now) <= allowed;
        if !helps {
            self.running = before;
        }
        helps
    }

    /// Requests of the same caller that wait for the same.
    fn waiting_for(&self, ask: &Ask) -> usize {
        if ask.needs_fetch {
            return self.to_fetch.entries.values().filter(|entry| entry.ask.flow == ask.flow).count();
        }
        self.waiting[..=ask.priority as usize].iter().map(|fair| fair.len_for(ask.flow)).sum()
    }

    /// Takes in a request that [`Queue::admit`] let pass; returns its number.
    pub(super) fn push(&mut self, job: J, ask: Ask, latest_start: Instant, now: Instant) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.heard(&ask, now);
        let entry = Entry { job, ask, id, latest_start, ready: now };
        if ask.needs_fetch {
            self.to_fetch.insert(entry);
        } else {
            if ask.priority == Priority::Interactive {
                let grown = self.usual.map_or(ask.price, |usual| usual + usual / USUAL_GROWTH);
                self.usual = Some(grown.min(ask.price));
            }
            self.insert(Kind::Direct, entry);
        }
        id
    }

    fn insert(&mut self, kind: Kind, entry: Entry<J>) {
        let kind = if self.is_dear(entry.ask.price) { Kind::Dear } else { kind };
        self.waiting[entry.ask.priority as usize].insert(kind, entry);
    }

    /// All requests of one group whose rows are to be fetched, the oldest one's; empty where none wait.
    pub(super) fn take_fetch(&mut self) -> Vec<Entry<J>> {
        let Some(group) = self.to_fetch.oldest().map(|entry| entry.ask.group) else { return Vec::new() };
        let same = self.to_fetch.entries.values().filter(|entry| entry.ask.group == group);
        let ids: Vec<u64> = same.map(|entry| entry.id).collect();
        let entries: Vec<_> = ids.into_iter().filter_map(|id| self.to_fetch.remove(id)).collect();
        self.in_fetch += entries.len();
        entries
    }

    /// Takes back what [`Queue::take_fetch`] gave: those that a worker may take now, and the number of all others.
    pub(super) fn fetched(&mut self, ready: Vec<Entry<J>>, gone: usize, now: Instant) {
        self.in_fetch -= ready.len() + gone;
        for entry in ready {
            self.insert(Kind::Fetched, Entry { ready: now, ..entry });
        }
    }

    /// The place of an idle worker, of those that are `ready`, for a request whose caller runs it at once; `None`
    /// where somebody waits already, or it takes too long.
    pub(super) fn lend(&mut self, ask: &Ask, ready: impl Fn(usize) -> bool, now: Instant) -> Option<usize> {
        let is_short = !ask.needs_fetch && self.pace.predict(ask.price) <= LENT_TIME && !self.is_dear(ask.price);
        if !is_short || self.waiting() > 0 {
            return None;
        }
        self.heard(ask, now);
        let worker = (0..self.running.len()).find(|&worker| self.running[worker].is_none() && ready(worker))?;
        self.running[worker] = Some(Running {
            began: now,
            deadline: ask.deadline,
            price: ask.price,
            is_dear: false,
            flow: Some(ask.flow),
            is_background: ask.is_background,
            is_overtaken: false,
        });
        Some(worker)
    }

    /// Whether a request whose caller runs it is done before another thread could be of much use. Time that others took of the core
    /// does not count: where they do, more threads would take more of it, and every request would seem long from then on.
    pub(super) fn is_brief(&self, ask: &Ask) -> bool {
        self.own_pace.predict(ask.price) <= BRIEF_TIME
    }

    /// An idle worker whose thread is to be woken for what waits, each once until it sleeps again.
    pub(super) fn call(&mut self) -> Option<usize> {
        let is_called = |worker: &usize| self.asleep[*worker] && self.running[*worker].is_none();
        let worker = (0..self.running.len()).find(is_called)?;
        self.asleep[worker] = false;
        Some(worker)
    }

    /// The thread of this worker sleeps from here on, or has woken up.
    pub(super) fn sleeps(&mut self, worker: usize, is_asleep: bool) {
        self.asleep[worker] = is_asleep;
    }

    /// A batch for a worker; empty where none is to be had now, or its place was lent.
    pub(super) fn take(&mut self, worker: usize, now: Instant) -> Taken<J> {
        let mut expired = Vec::new();
        if self.running[worker].is_some() {
            return Taken { batch: Vec::new(), expired };
        }
        while let Some((priority, kind)) = self.choose(now) {
            let batch = self.gather(priority, kind, now, &mut expired);
            if batch.is_empty() {
                continue;
            }
            let price = batch.iter().map(|entry| entry.ask.price).sum();
            self.settle(priority, price);
            let deadline = batch.iter().map(|entry| entry.ask.deadline).max().unwrap_or(now);
            let (is_dear, is_background) = (kind == Kind::Dear, batch.iter().all(|entry| entry.ask.is_background));
            let flow = batch.first().map(|entry| entry.ask.flow);
            let flow = flow.filter(|flow| batch.iter().all(|entry| entry.ask.flow == *flow));
            let is_overtaken = false;
            self.running[worker] =
                Some(Running { began: now, deadline, price, is_dear, flow, is_background, is_overtaken });
            return Taken { batch, expired };
        }
        Taken { batch: Vec::new(), expired }
    }

    /// The lane that goes next.
    fn choose(&self, now: Instant) -> Option<(Priority, Kind)> {
        let may_be_dear = self.dear_running() < self.dear_slots();
        let kinds = if may_be_dear { &KINDS[..] } else { &KINDS[..Kind::Dear as usize] };
        let may = |ask: &Ask| self.may_take(ask, now);
        match (self.waiting[0].next(kinds, may), self.waiting[1].next(kinds, may)) {
            (Some(_), Some((kind, next))) if self.owed >= next.ask.price => Some((Priority::Batch, kind)),
            (Some((kind, _)), _) => Some((Priority::Interactive, kind)),
            (None, Some((kind, _))) => Some((Priority::Batch, kind)),
            (None, None) => None,
        }
    }

    /// Keeps account of what batch requests are owed.
    fn settle(&mut self, priority: Priority, price: Duration) {
        let batch_waits = self.waiting[Priority::Batch as usize].len() > 0;
        self.owed = match priority {
            _ if !batch_waits => Duration::ZERO,
            Priority::Interactive => self.owed + price / BATCH_PART as u32,
            Priority::Batch => self.owed.saturating_sub(price),
        };
    }

    fn gather(&mut self, priority: Priority, kind: Kind, now: Instant, expired: &mut Vec<Entry<J>>) -> Vec<Entry<J>> {
        let mut fair = std::mem::take(&mut self.waiting[priority as usize]);
        let share = fair.len_of(kind).div_ceil(self.bounds.workers).min(self.bounds.batch);
        let (mut batch, mut others): (Vec<Entry<J>>, Vec<Entry<J>>) = (Vec::new(), Vec::new());
        let mut price = Duration::ZERO;
        let mut tightest: Option<Instant> = None;
        for _ in 0..LOOKED_AT {
            let Some(entry) = fair.take(kind, |ask| self.may_take(ask, now), now) else { break };
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
            let together = price + entry.ask.price;
            let deadline = tightest.map_or(entry.ask.deadline, |tightest| tightest.min(entry.ask.deadline));
            let is_late = now + self.pace.predict(together).mul_f64(BATCH_MARGIN) > deadline;
            // Several requests of one caller hold a worker no longer than a long one of it may, while others ask.
            let is_of_one = batch.iter().all(|other| other.ask.flow == entry.ask.flow);
            let most = if is_of_one && self.is_shared(entry.ask.flow, now) { LENT_TIME } else { BATCH_TIME };
            if !batch.is_empty() && (together > most || is_late) {
                others.push(entry);
                break;
            }
            fair.charge(entry.ask.flow, entry.ask.price);
            batch.push(entry);
            (price, tightest) = (together, Some(deadline));
            if batch.len() >= share {
                break;
            }
        }
        others.into_iter().for_each(|entry| fair.put_back(kind, entry));
        self.waiting[priority as usize] = fair;
        batch
    }

    /// The worker is idle again; `done` is the price of what it answered of its batch. `ran` is how long its caller had a core for
    /// it, where its place was lent.
    pub(super) fn finish(&mut self, worker: usize, done: Duration, ran: Option<Duration>, now: Instant) {
        if let Some(running) = self.running[worker].take() {
            self.pace.learn(done, now.saturating_duration_since(running.began), now);
            if let Some(ran) = ran {
                self.own_pace.learn(done, ran, now);
            }
        }
    }

    /// Whether a worker runs what nobody has waited for since `since`.
    pub(super) fn hangs(&self, worker: usize, since: Instant) -> bool {
        self.running[worker].is_some_and(|running| running.deadline < since)
    }

    /// The workers that run what nobody has waited for since `since`, each idle from here on.
    pub(super) fn lose(&mut self, since: Instant) -> Vec<usize> {
        let is_lost = |running: &mut Option<Running>| running.take_if(|running| running.deadline < since).is_some();
        self.running.iter_mut().enumerate().filter_map(|(worker, running)| is_lost(running).then_some(worker)).collect()
    }

    /// Takes out a request that nothing has begun; `None` where it is not here any more.
    pub(super) fn withdraw(&mut self, id: u64, ask: &Ask) -> Option<Entry<J>> {
        let entry = self.waiting[ask.priority as usize].remove(ask.flow, id);
        entry.or_else(|| self.to_fetch.remove(id))
    }

    /// Takes nothing in from here on; what waits still gets its worker.
    pub(super) fn close(&mut self) {
        self.is_closed = true;
    }

    /// Takes out all that nothing has begun.
    pub(super) fn clear(&mut self) -> Vec<Entry<J>> {
        let to_fetch = std::mem::take(&mut self.to_fetch).entries.into_values();
        self.waiting.iter_mut().flat_map(Fair::clear).chain(to_fetch).collect()
    }
}

/// When the earliest of some workers is free after work was shared out among them: each is busy until the time in
/// `free_s`, ascending, and the work fills them up from below to one level.
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
