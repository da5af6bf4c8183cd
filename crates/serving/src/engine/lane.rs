//! The requests that wait, in the lanes that they wait in.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::quota::Flow;
use sterling_core::request::Priority;

/// Where the oldest of a lane has used this share of its time, predictions have failed, and the newest go first: the
/// oldest would each take a worker and come late. Far enough beyond the share of its time that a request may wait, so that
/// work that takes twice as long from one moment to the next is still done in its order, and in time.
const BEHIND_SHARE: f64 = 0.75;

/// What a queue must know of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ask {
    pub(super) priority: Priority,
    pub(super) flow: Flow,
    pub(super) is_background: bool,
    pub(super) group: usize,
    pub(super) needs_fetch: bool,
    pub(super) price: Duration,
    pub(super) arrived: Instant,
    pub(super) deadline: Instant,
}

impl Ask {
    /// How long its answer was worth waiting for when it came.
    pub(super) fn time(&self) -> Duration {
        self.deadline.saturating_duration_since(self.arrived)
    }

    /// An interactive request of one group and caller that needs no rows, and has this time from when it came.
    #[cfg(test)]
    pub(super) fn plain(price: Duration, arrived: Instant, time: Duration) -> Self {
        Ask {
            priority: Priority::Interactive,
            flow: Flow(0),
            is_background: false,
            group: 0,
            needs_fetch: false,
            price,
            arrived,
            deadline: arrived + time,
        }
    }
}

/// A request in the queue.
#[derive(Debug)]
pub(super) struct Entry<J> {
    pub(super) job: J,
    pub(super) ask: Ask,
    pub(super) id: u64,
    /// A worker that takes it later most likely comes late.
    pub(super) latest_start: Instant,
    /// When it could have been taken first.
    pub(super) ready: Instant,
}

impl<J> Entry<J> {
    pub(super) fn split(self) -> (Entry<()>, J) {
        let Entry { job, ask, id, latest_start, ready } = self;
        (Entry { job: (), ask, id, latest_start, ready }, job)
    }
}

impl Entry<()> {
    pub(super) fn join<J>(self, job: J) -> Entry<J> {
        let Entry { job: (), ask, id, latest_start, ready } = self;
        Entry { job, ask, id, latest_start, ready }
    }
}

/// Why requests of one priority wait apart: some must not wait for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Ready when it came.
    Direct,
    /// Ready after rows were fetched. These come in swarms, which must not go before what came meanwhile.
    Fetched,
    /// Takes long.
    Dear,
}

pub(super) const KINDS: [Kind; 3] = [Kind::Direct, Kind::Fetched, Kind::Dear];

/// One lane, in the order in which they came.
#[derive(Debug)]
pub(super) struct Lane<J> {
    pub(super) entries: BTreeMap<u64, Entry<J>>,
    /// Of all of them together.
    pub(super) price: Duration,
}

impl<J> Default for Lane<J> {
    fn default() -> Self {
        Lane { entries: BTreeMap::new(), price: Duration::ZERO }
    }
}

impl<J> Lane<J> {
    pub(super) fn insert(&mut self, entry: Entry<J>) {
        self.price += entry.ask.price;
        self.entries.insert(entry.id, entry);
    }

    pub(super) fn remove(&mut self, id: u64) -> Option<Entry<J>> {
        let entry = self.entries.remove(&id)?;
        self.price -= entry.ask.price;
        Some(entry)
    }

    pub(super) fn oldest(&self) -> Option<&Entry<J>> {
        self.entries.first_key_value().map(|(_, entry)| entry)
    }

    pub(super) fn is_behind(&self, now: Instant) -> bool {
        self.oldest().is_some_and(|entry| {
            now.saturating_duration_since(entry.ask.arrived) > entry.ask.time().mul_f64(BEHIND_SHARE)
        })
    }
}
