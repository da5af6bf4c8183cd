//! Requests of one priority that wait for a worker, shared among callers by start-time fair queueing (Goyal, Vin and Cheng,
//! 1996). Each request is due at a virtual time, the caller's next request is due later by its cost estimate, and the earliest
//! due request is served first.
//!
//! Two callers that always have queued requests get equal shares of the workers by cost, regardless of the size and number of
//! their requests. A caller with little demand is served before callers with much. Requests of one caller stay in order. Virtual
//! time advances by the cost of served requests divided by the number of waiting callers, so one-time callers delay no other
//! caller permanently.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::lane::{Entry, KINDS, Kind, Lane, QueuedRequest};
use sterling_core::quota::Flow;

/// Maximum number of idle callers whose recent usage is remembered; further ones are forgotten.
pub(super) const CALLERS_MAX: usize = 4096;
/// Maximum virtual time by which a waiting caller is behind others: more than any but an expensive request takes. Without a bound,
/// a caller with more requests than workers would precede another's second request by all the time that the reserved worker gave
/// to its first ones.
const CREDIT_MAX: Duration = Duration::from_millis(40);
/// Factor on the predicted work of a caller whose queue is behind. Without this factor, the queue would not recover
/// while the load exceeds the capacity: the newest requests would run, as many new ones would follow, and the ones in
/// between would grow old.
const BACKLOG_FACTOR: f64 = 2.0;

/// Queued requests of a caller.
#[derive(Debug)]
struct Caller<J> {
    /// Virtual time at which its next request is due.
    due: Duration,
    /// Queues by kind.
    lanes: [Lane<J>; 4],
}

impl<J> Caller<J> {
    fn is_empty(&self) -> bool {
        self.lanes.iter().all(|lane| lane.entries.is_empty())
    }

    /// Returns the first request of the given kinds and its kind, by the time since which it could have been served.
    fn first(&self, kinds: &[Kind]) -> Option<(Kind, &Entry<J>)> {
        let heads = kinds.iter().filter_map(|&kind| Some((kind, self.lanes[kind as usize].oldest()?)));
        heads.min_by_key(|(_, entry)| (entry.ready, entry.id))
    }

    /// Returns the sort key of the caller in the service order.
    fn place(&self, flow: Flow) -> Option<(Duration, u64, Flow)> {
        self.first(&KINDS).map(|(_, entry)| (self.due, entry.id, flow))
    }
}

/// Predicted work that is served before a request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct QueuedWork {
    pub(super) cheap: Duration,
    pub(super) expensive: Duration,
}

/// Queue of one priority.
#[derive(Debug)]
pub(super) struct Fair<J> {
    clock: Duration,
    callers: BTreeMap<Flow, Caller<J>>,
    /// Callers with queued requests, by service order.
    order: BTreeSet<(Duration, u64, Flow)>,
    /// Number of requests by kind.
    counts: [usize; 4],
}

impl<J> Default for Fair<J> {
    fn default() -> Self {
        Fair { clock: Duration::ZERO, callers: BTreeMap::new(), order: BTreeSet::new(), counts: [0; 4] }
    }
}

impl<J> Fair<J> {
    /// Returns the number of queued requests.
    pub(super) fn len(&self) -> usize {
        self.counts.iter().sum()
    }

    /// Returns the number of queued requests of one kind.
    pub(super) fn len_of(&self, kind: Kind) -> usize {
        self.counts[kind as usize]
    }

    /// Returns the number of queued requests of one caller.
    pub(super) fn len_of_caller(&self, flow: Flow) -> usize {
        let lanes = self.callers.get(&flow).into_iter().flat_map(|caller| &caller.lanes);
        lanes.map(|lane| lane.entries.len()).sum()
    }

    /// Changes a caller, and updates its place in the service order.
    fn change<T>(&mut self, flow: Flow, change: impl FnOnce(&mut Caller<J>) -> T) -> T {
        let clock = self.clock;
        let caller = self.callers.entry(flow).or_insert_with(|| Caller { due: clock, lanes: Default::default() });
        let before = caller.place(flow);
        let changed = change(caller);
        let after = caller.place(flow);
        if before != after {
            before.map(|place| self.order.remove(&place));
            self.order.extend(after);
        }
        changed
    }

    /// Adds a request.
    pub(super) fn insert(&mut self, kind: Kind, entry: Entry<J>) {
        let clock = self.clock;
        self.counts[kind as usize] += 1;
        self.change(entry.ask.flow, |caller| {
            if caller.is_empty() {
                // An idle caller does not accumulate credit.
                caller.due = caller.due.max(clock);
            }
            caller.lanes[kind as usize].insert(entry);
        });
        if self.callers.len() > CALLERS_MAX + self.order.len() {
            self.forget();
        }
    }

    /// Returns a request to the queue that was taken but not charged.
    pub(super) fn requeue(&mut self, kind: Kind, entry: Entry<J>) {
        self.counts[kind as usize] += 1;
        self.change(entry.ask.flow, |caller| caller.lanes[kind as usize].insert(entry));
    }

    /// Forgets idle callers: first those that owe nothing, then, if that is not enough, all of them.
    fn forget(&mut self) {
        let clock = self.clock;
        self.callers.retain(|_, caller| !caller.is_empty() || caller.due > clock);
        if self.callers.len() > CALLERS_MAX / 2 + self.order.len() {
            self.callers.retain(|_, caller| !caller.is_empty());
        }
    }

    /// Removes the request with this id; `None` if it is not queued here.
    pub(super) fn remove(&mut self, flow: Flow, id: u64) -> Option<Entry<J>> {
        if !self.callers.contains_key(&flow) {
            return None;
        }
        let removed = self.change(flow, |caller| {
            KINDS.into_iter().find_map(|kind| Some((kind, caller.lanes[kind as usize].remove(id)?)))
        });
        let (kind, entry) = removed?;
        self.counts[kind as usize] -= 1;
        Some(entry)
    }

    /// Returns the next request of the given kinds that `may` allows.
    pub(super) fn next(&self, kinds: &[Kind], may: impl Fn(&QueuedRequest) -> bool) -> Option<(Kind, &Entry<J>)> {
        if kinds.iter().all(|&kind| self.len_of(kind) == 0) {
            return None;
        }
        let firsts = self.order.iter().filter_map(|(_, _, flow)| self.callers[flow].first(kinds));
        firsts.into_iter().find(|(_, entry)| may(&entry.ask))
    }

    /// Removes the next request of a kind that `may` allows. If the caller is behind, that is its newest if that one is allowed too.
    pub(super) fn take(&mut self, kind: Kind, may: impl Fn(&QueuedRequest) -> bool, now: Instant) -> Option<Entry<J>> {
        let is_next =
            |flow: &Flow| self.callers[flow].lanes[kind as usize].oldest().is_some_and(|entry| may(&entry.ask));
        let flow = self.order.iter().map(|(_, _, flow)| *flow).find(is_next)?;
        let entry = self.change(flow, |caller| {
            let lane = &mut caller.lanes[kind as usize];
            let newest = lane.entries.last_key_value().filter(|(_, entry)| may(&entry.ask) && lane.is_behind(now));
            let id = newest.or(lane.entries.first_key_value()).map(|(id, _)| *id)?;
            lane.remove(id)
        })?;
        self.counts[kind as usize] -= 1;
        Some(entry)
    }

    /// Charges a caller for a request that was taken.
    pub(super) fn charge(&mut self, flow: Flow, cost_estimate: Duration) {
        let (waiting, least) = (self.order.len().max(1) as u32, self.least_due());
        let start = self.change(flow, |caller| {
            let start = caller.due.max(least);
            caller.due = start + cost_estimate;
            start
        });
        self.clock = start.max(self.clock + cost_estimate / waiting);
    }

    /// Returns the least virtual time at which a request counts as due: a caller whose requests had to leave a worker to those of
    /// others accumulates no more credit than this.
    fn least_due(&self) -> Duration {
        self.clock.saturating_sub(CREDIT_MAX)
    }

    /// Returns the work before the next request of a caller; without a caller, before a request of one that has none queued and
    /// owes nothing.
    pub(super) fn ahead(&self, flow: Option<Flow>, now: Instant) -> QueuedWork {
        let own = flow.and_then(|flow| Some((flow, self.callers.get(&flow)?)));
        let due = own.map_or(self.clock, |(_, caller)| {
            caller.due.max(self.clock) + caller.lanes.iter().map(|lane| lane.cost_estimate).sum::<Duration>()
        });
        let before = self.order.iter().take_while(|(of, ..)| *of <= due);
        before.fold(QueuedWork::default(), |ahead, &(of, _, flow)| {
            let caller = &self.callers[&flow];
            let is_own = own.is_some_and(|(own, _)| own == flow);
            // Counts the caller's requests that start by virtual time `due`; the last of these requests may end later.
            let of = of.max(self.least_due()).min(due);
            let room = if is_own { Duration::MAX } else { (due - of).saturating_add(caller.longest()) };
            ahead.plus(caller, room, now)
        })
    }

    /// Returns all queued work.
    pub(super) fn all(&self, now: Instant) -> QueuedWork {
        let waiting = self.order.iter().map(|(_, _, flow)| &self.callers[flow]);
        waiting.fold(QueuedWork::default(), |ahead, caller| ahead.plus(caller, Duration::MAX, now))
    }

    /// Removes all requests.
    pub(super) fn clear(&mut self) -> Vec<Entry<J>> {
        let callers = std::mem::take(self).callers.into_values();
        callers.flat_map(|caller| caller.lanes).flat_map(|lane| lane.entries.into_values()).collect()
    }
}

impl<J> Caller<J> {
    /// Returns the largest cost estimate among the heads of its queues.
    fn longest(&self) -> Duration {
        self.lanes.iter().filter_map(|lane| Some(lane.oldest()?.ask.cost_estimate)).max().unwrap_or_default()
    }
}

impl QueuedWork {
    /// Adds the work of a caller, at most `most` per kind.
    fn plus<J>(self, caller: &Caller<J>, most: Duration, now: Instant) -> QueuedWork {
        let cost_estimate = |kind: Kind| {
            let lane = &caller.lanes[kind as usize];
            let cost_estimate = lane.cost_estimate.min(most);
            if lane.is_behind(now) { cost_estimate.mul_f64(BACKLOG_FACTOR) } else { cost_estimate }
        };
        QueuedWork {
            cheap: self.cheap + [Kind::Direct, Kind::Fetched, Kind::Long].map(cost_estimate).iter().sum::<Duration>(),
            expensive: self.expensive + cost_estimate(Kind::Dear),
        }
    }
}

#[cfg(test)]
mod tests;
