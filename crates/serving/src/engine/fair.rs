//! The requests of one priority that wait for a worker, shared out among their callers by start-time fair queueing (Goyal, Vin and Cheng,
//! 1996): each request is due at a virtual time, its caller's next one later by its price, and the one that is due first goes first.
//!
//! Of two callers that always have requests waiting, each gets the same share of the workers by price, whatever they ask and however
//! many requests they have; one that asks little goes before those that ask much. Requests of one caller go in their order.
//! Virtual time passes by the price of what is taken, divided by the callers that wait, so that callers who come once hold up nobody for good.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::lane::{Ask, Entry, KINDS, Kind, Lane};
use crate::quota::Flow;

/// Callers without a request that are remembered, so that what they had lately counts; beyond it they are forgotten.
pub(super) const CALLERS_MAX: usize = 4096;
/// Where a caller's lane is behind, its work is thought to take this much longer than predicted. Without that it would stay behind
/// for as long as more comes than can be done: the newest are run, as many come after them, and those between grow old.
const DOUBT: f64 = 2.0;

/// What a caller has waiting.
#[derive(Debug)]
struct Caller<J> {
    /// The virtual time at which its next request is due.
    due: Duration,
    /// By kind.
    lanes: [Lane<J>; 3],
}

impl<J> Caller<J> {
    fn is_empty(&self) -> bool {
        self.lanes.iter().all(|lane| lane.entries.is_empty())
    }

    /// The kind of its request that goes first, and since when it could have gone, of some kinds.
    fn first(&self, kinds: &[Kind]) -> Option<(Kind, &Entry<J>)> {
        let heads = kinds.iter().filter_map(|&kind| Some((kind, self.lanes[kind as usize].oldest()?)));
        heads.min_by_key(|(_, entry)| (entry.ready, entry.id))
    }

    /// Where it stands among others that wait.
    fn place(&self, flow: Flow) -> Option<(Duration, u64, Flow)> {
        self.first(&KINDS).map(|(_, entry)| (self.due, entry.id, flow))
    }
}

/// How much goes before a request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Ahead {
    pub(super) cheap: Duration,
    pub(super) dear: Duration,
}

/// The requests of one priority.
#[derive(Debug)]
pub(super) struct Fair<J> {
    clock: Duration,
    callers: BTreeMap<Flow, Caller<J>>,
    /// Those that wait.
    order: BTreeSet<(Duration, u64, Flow)>,
    /// Requests by kind.
    counts: [usize; 3],
}

impl<J> Default for Fair<J> {
    fn default() -> Self {
        Fair { clock: Duration::ZERO, callers: BTreeMap::new(), order: BTreeSet::new(), counts: [0; 3] }
    }
}

impl<J> Fair<J> {
    /// Requests that wait.
    pub(super) fn len(&self) -> usize {
        self.counts.iter().sum()
    }

    /// Those of one kind.
    pub(super) fn len_of(&self, kind: Kind) -> usize {
        self.counts[kind as usize]
    }

    /// The price of all that a caller has waiting.
    pub(super) fn price_for(&self, flow: Flow) -> Duration {
        let lanes = self.callers.get(&flow).into_iter().flat_map(|caller| &caller.lanes);
        lanes.map(|lane| lane.price).sum()
    }

    /// Those of one caller.
    pub(super) fn len_for(&self, flow: Flow) -> usize {
        let lanes = self.callers.get(&flow).into_iter().flat_map(|caller| &caller.lanes);
        lanes.map(|lane| lane.entries.len()).sum()
    }

    /// Changes what a caller has, and where it stands among others.
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

    /// Takes in a request.
    pub(super) fn insert(&mut self, kind: Kind, entry: Entry<J>) {
        let clock = self.clock;
        self.counts[kind as usize] += 1;
        self.change(entry.ask.flow, |caller| {
            if caller.is_empty() {
                // Time in which it asked for nothing is not saved up.
                caller.due = caller.due.max(clock);
            }
            caller.lanes[kind as usize].insert(entry);
        });
        if self.callers.len() > CALLERS_MAX + self.order.len() {
            self.forget();
        }
    }

    /// Takes back a request that was taken out and not charged for.
    pub(super) fn put_back(&mut self, kind: Kind, entry: Entry<J>) {
        self.counts[kind as usize] += 1;
        self.change(entry.ask.flow, |caller| caller.lanes[kind as usize].insert(entry));
    }

    /// Forgets callers that wait for nothing: those who owe nothing, and where that is not enough all of them.
    fn forget(&mut self) {
        let clock = self.clock;
        self.callers.retain(|_, caller| !caller.is_empty() || caller.due > clock);
        if self.callers.len() > CALLERS_MAX / 2 + self.order.len() {
            self.callers.retain(|_, caller| !caller.is_empty());
        }
    }

    /// Takes out a request by its number; none where it is not here.
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

    /// The request that goes next, of some kinds and of those that may go.
    pub(super) fn next(&self, kinds: &[Kind], may: impl Fn(&Ask) -> bool) -> Option<(Kind, &Entry<J>)> {
        let firsts = self.order.iter().filter_map(|(_, _, flow)| self.callers[flow].first(kinds));
        firsts.into_iter().find(|(_, entry)| may(&entry.ask))
    }

    /// Takes out the request of a kind that goes next, of those that may go. Of a caller that is behind it is the newest.
    pub(super) fn take(&mut self, kind: Kind, may: impl Fn(&Ask) -> bool, now: Instant) -> Option<Entry<J>> {
        let may = |flow: &Flow| self.callers[flow].lanes[kind as usize].oldest().is_some_and(|entry| may(&entry.ask));
        let flow = self.order.iter().map(|(_, _, flow)| *flow).find(may)?;
        let entry = self.change(flow, |caller| {
            let lane = &mut caller.lanes[kind as usize];
            let entries = &lane.entries;
            let first = if lane.is_behind(now) { entries.last_key_value() } else { entries.first_key_value() };
            let id = first.map(|(id, _)| *id)?;
            lane.remove(id)
        })?;
        self.counts[kind as usize] -= 1;
        Some(entry)
    }

    /// Counts a request that was taken out as had by its caller.
    pub(super) fn charge(&mut self, flow: Flow, price: Duration) {
        let waiting = self.order.len().max(1) as u32;
        let start = self.change(flow, |caller| {
            let start = caller.due;
            caller.due += price;
            start
        });
        self.clock = start.max(self.clock + price / waiting);
    }

    /// What goes before the next request of a caller, or of one that has none and owes nothing.
    pub(super) fn ahead(&self, flow: Option<Flow>, now: Instant) -> Ahead {
        let own = flow.and_then(|flow| Some((flow, self.callers.get(&flow)?)));
        let due = own.map_or(self.clock, |(_, caller)| {
            caller.due.max(self.clock) + caller.lanes.iter().map(|lane| lane.price).sum::<Duration>()
        });
        let before = self.order.iter().take_while(|(of, ..)| *of <= due);
        before.fold(Ahead::default(), |ahead, &(of, _, flow)| {
            let caller = &self.callers[&flow];
            let is_own = own.is_some_and(|(own, _)| own == flow);
            // Its requests that are due by then, the last of which may end later.
            let room = if is_own { Duration::MAX } else { (due - of).saturating_add(caller.longest()) };
            ahead.plus(caller, room, now)
        })
    }

    /// What waits in all.
    pub(super) fn all(&self, now: Instant) -> Ahead {
        let waiting = self.order.iter().map(|(_, _, flow)| &self.callers[flow]);
        waiting.fold(Ahead::default(), |ahead, caller| ahead.plus(caller, Duration::MAX, now))
    }

    /// Takes out all.
    pub(super) fn clear(&mut self) -> Vec<Entry<J>> {
        let callers = std::mem::take(self).callers.into_values();
        callers.flat_map(|caller| caller.lanes).flat_map(|lane| lane.entries.into_values()).collect()
    }
}

impl<J> Caller<J> {
    /// The price of the dearest of its requests that go first.
    fn longest(&self) -> Duration {
        self.lanes.iter().filter_map(|lane| Some(lane.oldest()?.ask.price)).max().unwrap_or_default()
    }
}

impl Ahead {
    /// With the work of a caller, at most so much of each kind.
    fn plus<J>(self, caller: &Caller<J>, most: Duration, now: Instant) -> Ahead {
        let price = |kind: Kind| {
            let lane = &caller.lanes[kind as usize];
            let price = lane.price.min(most);
            if lane.is_behind(now) { price.mul_f64(DOUBT) } else { price }
        };
        Ahead { cheap: self.cheap + price(Kind::Direct) + price(Kind::Fetched), dear: self.dear + price(Kind::Dear) }
    }
}

#[cfg(test)]
mod tests;
