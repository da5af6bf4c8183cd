//! Queued requests, by the kind of queue that they wait in.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use sterling_core::quota::Flow;
use sterling_core::request::Priority;

/// Share of a request's timeout. If the oldest request of a queue is older than this, predictions have failed and the newest are
/// served first: the oldest would each take a worker and be late. The share is far enough above the admitted waiting time that a
/// sudden doubling of run times is still absorbed in order.
const BACKLOG_SHARE: f64 = 0.75;
/// Longest request that runs on its caller's thread, which cannot cancel it meanwhile, and for which a worker is reserved.
pub(super) const INLINE_TIME_MAX: Duration = Duration::from_millis(5);

/// Properties of a request that the queue needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueuedRequest {
    pub(super) priority: Priority,
    pub(super) flow: Flow,
    pub(super) is_background: bool,
    pub(super) group: usize,
    pub(super) needs_fetch: bool,
    pub(super) cost_estimate: Duration,
    pub(super) arrived: Instant,
    pub(super) deadline: Instant,
}

impl QueuedRequest {
    /// Timeout of the request, from its arrival.
    pub(super) fn time(&self) -> Duration {
        self.deadline.saturating_duration_since(self.arrived)
    }

    /// Creates an interactive request of one group and caller that needs no rows and has this timeout.
    #[cfg(test)]
    pub(super) fn plain(cost_estimate: Duration, arrived: Instant, time: Duration) -> Self {
        QueuedRequest {
            priority: Priority::Interactive,
            flow: Flow(0),
            is_background: false,
            group: 0,
            needs_fetch: false,
            cost_estimate,
            arrived,
            deadline: arrived + time,
        }
    }
}

/// Queued request.
#[derive(Debug)]
pub(super) struct Entry<J> {
    pub(super) job: J,
    pub(super) ask: QueuedRequest,
    pub(super) id: u64,
    /// Latest start of a worker that will most likely meet the deadline.
    pub(super) latest_start: Instant,
    /// Time at which the request first became ready to be served.
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

/// Kinds of requests within a priority. Each kind has its own queue, because some requests must not wait for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Ready on arrival.
    Direct,
    /// Ready after rows were fetched. Requests whose rows were fetched arrive in bursts, which must not be served
    /// before requests that arrived meanwhile.
    Fetched,
    /// Longer than [`INLINE_TIME_MAX`]: together they leave a worker to the kinds above.
    Long,
    /// Expensive: together they leave two.
    Dear,
}

pub(super) const KINDS: [Kind; 4] = [Kind::Direct, Kind::Fetched, Kind::Long, Kind::Dear];

/// One queue, in order of arrival.
#[derive(Debug)]
pub(super) struct Lane<J> {
    pub(super) entries: BTreeMap<u64, Entry<J>>,
    /// Sum of the cost estimates.
    pub(super) cost_estimate: Duration,
}

impl<J> Default for Lane<J> {
    fn default() -> Self {
        Lane { entries: BTreeMap::new(), cost_estimate: Duration::ZERO }
    }
}

impl<J> Lane<J> {
    pub(super) fn insert(&mut self, entry: Entry<J>) {
        self.cost_estimate += entry.ask.cost_estimate;
        self.entries.insert(entry.id, entry);
    }

    pub(super) fn remove(&mut self, id: u64) -> Option<Entry<J>> {
        let entry = self.entries.remove(&id)?;
        self.cost_estimate -= entry.ask.cost_estimate;
        Some(entry)
    }

    pub(super) fn oldest(&self) -> Option<&Entry<J>> {
        self.entries.first_key_value().map(|(_, entry)| entry)
    }

    pub(super) fn is_behind(&self, now: Instant) -> bool {
        self.oldest().is_some_and(|entry| {
            now.saturating_duration_since(entry.ask.arrived) > entry.ask.time().mul_f64(BACKLOG_SHARE)
        })
    }
}
