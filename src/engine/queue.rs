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

use super::lane::{Ask, Entry, KINDS, Kind, Lane};
use super::pace::Pace;
use crate::request::Priority;

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
/// Where a lane is behind, its work is thought to take this much longer than predicted. Without that it would stay behind
/// for as long as more comes than can be done: the newest are run, as many come after them, and those between grow old.
const DOUBT: f64 = 2.0;
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
}

/// Who waits and who runs.
#[derive(Debug)]
pub(super) struct Queue<J> {
    bounds: Bounds,
    pace: Pace,
    /// Of requests that their callers run, by the time that a core was theirs.
    own_pace: Pace,
    /// By priority, then kind.
    lanes: [[Lane<J>; 3]; 2],
    to_fetch: Lane<J>,
    in_fetch: usize,
    running: Vec<Option<Running>>,
    /// The workers whose threads wait to be woken.
    asleep: Vec<bool>,
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
            lanes: Default::default(),
            to_fetch: Lane::default(),
            in_fetch: 0,
            running: vec![None; bounds.workers],
            asleep: vec![false; bounds.workers],
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
        self.lanes[..=priority as usize].iter().flatten().map(|lane| lane.entries.len()).sum()
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
        self.running.iter().flatten().filter(|running| running.is_dear).count()
    }

    fn is_dear(&self, price: Duration) -> bool {
        price > self.bounds.dear
    }

    /// How long a worker is still thought to run, in seconds; 0 for an idle one.
    fn left_s(&self, running: Option<Running>, now: Instant) -> f64 {
        running.map_or(0.0, |running| {
            let ran_s = now.saturating_duration_since(running.began).as_secs_f64();
            let left_s = self.pace.predict(running.price).as_secs_f64() - ran_s;
            if left_s > 0.0 { left_s } else { ran_s * OVERRUN_SHARE }
        })
    }

    /// How long a request that comes now would wait for a worker.
    pub(super) fn wait(&self, priority: Priority, is_dear: bool, now: Instant) -> Duration {
        let ahead = |kinds: &[Kind]| -> f64 {
            let lanes = self.lanes[..=priority as usize].iter().flatten().zip(KINDS.iter().cycle());
            let lanes = lanes.filter(|(_, kind)| kinds.contains(kind)).map(|(lane, _)| lane);
            let doubt = |lane: &Lane<J>| if lane.is_behind(now) { DOUBT } else { 1.0 };
            lanes.map(|lane| self.pace.predict(lane.price).as_secs_f64() * doubt(lane)).sum()
        };
        let (cheap_s, dear_s) = (ahead(&[Kind::Direct, Kind::Fetched]), ahead(&[Kind::Dear]));
        let mut free_s: Vec<f64> = self.running.iter().map(|running| self.left_s(*running, now)).collect();
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
        if before >= self.bounds.waiting {
            return Err(Refused::Full(before));
        }
        let own = self.pace.predict(ask.price).mul_f64(MARGIN);
        let timeout = ask.deadline.saturating_duration_since(now);
        let wait = self.wait(ask.priority, self.is_dear(ask.price), now);
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

    /// Takes in a request that [`Queue::admit`] let pass; returns its number.
    pub(super) fn push(&mut self, job: J, ask: Ask, latest_start: Instant, now: Instant) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        let entry = Entry { job, ask, id, latest_start, ready: now };
        if ask.needs_fetch {
            self.to_fetch.insert(entry);
        } else {
            if ask.priority == Priority::Interactive {
                let grown = self.usual.map_or(ask.price, |usual| usual + usual / USUAL_GROWTH);
                self.usual = Some(grown.min(ask.price));
            }
            self.lane_of(&ask, Kind::Direct).insert(entry);
        }
        id
    }

    fn lane_of(&mut self, ask: &Ask, kind: Kind) -> &mut Lane<J> {
        let kind = if self.is_dear(ask.price) { Kind::Dear } else { kind };
        &mut self.lanes[ask.priority as usize][kind as usize]
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
            let entry = Entry { ready: now, ..entry };
            self.lane_of(&entry.ask, Kind::Fetched).insert(entry);
        }
    }

    /// The place of an idle worker, of those that are `ready`, for a request whose caller runs it at once; `None`
    /// where somebody waits already, or it takes too long.
    pub(super) fn lend(&mut self, ask: &Ask, ready: impl Fn(usize) -> bool, now: Instant) -> Option<usize> {
        let is_short = !ask.needs_fetch && self.pace.predict(ask.price) <= LENT_TIME && !self.is_dear(ask.price);
        if !is_short || self.waiting() > 0 {
            return None;
        }
        let worker = (0..self.running.len()).find(|&worker| self.running[worker].is_none() && ready(worker))?;
        self.running[worker] = Some(Running { began: now, deadline: ask.deadline, price: ask.price, is_dear: false });
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
        while let Some((priority, kind)) = self.choose() {
            let batch = self.gather(priority, kind, now, &mut expired);
            if batch.is_empty() {
                continue;
            }
            let price = batch.iter().map(|entry| entry.ask.price).sum();
            self.settle(priority, price);
            let deadline = batch.iter().map(|entry| entry.ask.deadline).max().unwrap_or(now);
            self.running[worker] = Some(Running { began: now, deadline, price, is_dear: kind == Kind::Dear });
            return Taken { batch, expired };
        }
        Taken { batch: Vec::new(), expired }
    }

    /// The lane that goes next.
    fn choose(&self) -> Option<(Priority, Kind)> {
        let may_be_dear = self.dear_running() < self.dear_slots();
        let first_of = |priority: Priority| {
            let lanes = KINDS.into_iter().zip(&self.lanes[priority as usize]);
            lanes
                .filter(|(kind, _)| *kind != Kind::Dear || may_be_dear)
                .filter_map(|(kind, lane)| Some((lane.oldest()?, kind)))
                .min_by_key(|(oldest, _)| (oldest.ready, oldest.id))
        };
        match (first_of(Priority::Interactive), first_of(Priority::Batch)) {
            (Some(_), Some((oldest, kind))) if self.owed >= oldest.ask.price => Some((Priority::Batch, kind)),
            (Some((_, kind)), _) => Some((Priority::Interactive, kind)),
            (None, Some((_, kind))) => Some((Priority::Batch, kind)),
            (None, None) => None,
        }
    }

    /// Keeps account of what batch requests are owed.
    fn settle(&mut self, priority: Priority, price: Duration) {
        let batch_waits = self.lanes[Priority::Batch as usize].iter().any(|lane| !lane.entries.is_empty());
        self.owed = match priority {
            _ if !batch_waits => Duration::ZERO,
            Priority::Interactive => self.owed + price / BATCH_PART as u32,
            Priority::Batch => self.owed.saturating_sub(price),
        };
    }

    fn gather(&mut self, priority: Priority, kind: Kind, now: Instant, expired: &mut Vec<Entry<J>>) -> Vec<Entry<J>> {
        let lane = &self.lanes[priority as usize][kind as usize];
        let share = lane.entries.len().div_ceil(self.bounds.workers).min(self.bounds.batch);
        let (mut ids, mut expired_ids) = (Vec::new(), Vec::new());
        let mut group = None;
        let mut price = Duration::ZERO;
        let mut tightest: Option<Instant> = None;
        let mut look = |entry: &Entry<J>| {
            if now > entry.latest_start {
                expired_ids.push(entry.id);
                return true;
            }
            if *group.get_or_insert(entry.ask.group) != entry.ask.group {
                return true;
            }
            let together = price + entry.ask.price;
            let deadline = tightest.map_or(entry.ask.deadline, |tightest| tightest.min(entry.ask.deadline));
            let is_late = now + self.pace.predict(together).mul_f64(BATCH_MARGIN) > deadline;
            if !ids.is_empty() && (together > BATCH_TIME || is_late) {
                return false;
            }
            ids.push(entry.id);
            (price, tightest) = (together, Some(deadline));
            ids.len() < share
        };
        let entries = lane.entries.values();
        // Stops at the first that ends the batch.
        let _ = if lane.is_behind(now) {
            entries.rev().take(LOOKED_AT).all(&mut look)
        } else {
            entries.take(LOOKED_AT).all(&mut look)
        };
        let lane = &mut self.lanes[priority as usize][kind as usize];
        expired.extend(expired_ids.into_iter().filter_map(|id| lane.remove(id)));
        ids.into_iter().filter_map(|id| lane.remove(id)).collect()
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

    /// The workers that run what nobody has waited for since `since`, each idle from here on.
    pub(super) fn lose(&mut self, since: Instant) -> Vec<usize> {
        let is_lost = |running: &mut Option<Running>| running.take_if(|running| running.deadline < since).is_some();
        self.running.iter_mut().enumerate().filter_map(|(worker, running)| is_lost(running).then_some(worker)).collect()
    }

    /// Takes out a request that nothing has begun; `None` where it is not here any more.
    pub(super) fn withdraw(&mut self, id: u64) -> Option<Entry<J>> {
        self.lanes.iter_mut().flatten().chain([&mut self.to_fetch]).find_map(|lane| lane.remove(id))
    }

    /// Takes nothing in from here on; what waits still gets its worker.
    pub(super) fn close(&mut self) {
        self.is_closed = true;
    }

    /// Takes out all that nothing has begun.
    pub(super) fn clear(&mut self) -> Vec<Entry<J>> {
        let lanes = self.lanes.iter_mut().flatten().chain([&mut self.to_fetch]);
        lanes.flat_map(|lane| std::mem::take(lane).entries.into_values()).collect()
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
