//! Rows in the memory of other machines: a Redis or Valkey Cluster, behind a bounded cache of this host.
//!
//! The cluster replicates, fails over and moves slots. This module defines the layout of rows (`layout`), loads and deletes them
//! ([`load()`], [`delete`]) and reads them ([`RemoteTable`]). A read takes these steps:
//!
//! 1. Rows outside of the table are [`RowState::Unknown`] immediately; rows in the [cache](super::cache) are copied.
//! 2. Rows that another call is fetching are awaited with that call (single flight). All other rows are requested, one pipeline per
//!    shard, while the caller continues.
//! 3. Each answer is verified by the row's own 32-bit hash, seeded with the load and the row's number. A verified row
//!    is a hit and is offered to the cache. Any other row, including one that misses the deadline, is
//!    [`RowState::Degraded`], is counted by its cause, and is never cached.
//!
//! The caller's policy decides about degraded rows: the request fails, or continues with default rows and reports it.

mod cluster;
mod flight;
mod layout;
mod load;
mod manifest;
mod memory;
mod node;
mod open;
mod read;
mod sets;
mod slots;
mod survey;
mod watch;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub use cluster::{Cluster, ClusterCounters, ClusterOptions, NodeHealth, ReadFrom};
pub use layout::{RowSet, TableShape};
pub use load::{LoadProgress, LoadReport, delete, load};
pub use manifest::{TableManifest, TableState};
pub use sets::{find, sets, stored};
pub use slots::Address;
pub use survey::ClusterStatistics;
pub use watch::{Verified, sample, verify};

use super::cache::{CacheCounters, RowCache};
use super::{Fetched, Pending, RowSource, RowState};
use crate::report::Lookup;
use flight::{Flight, InFlight};
use layout::RowPlace;
use open::{Cause, OpenSet};
use read::{Reader, read};
use sets::complete;
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use watch::{look, watch};

/// Minimum time before the deadline at which rows are requested once more.
const RETRY_TIME_MIN: Duration = Duration::from_millis(2);

/// Read options of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteOptions {
    /// Cache memory for rows of this table on this host, overhead included; 0 for no cache.
    pub cache_bytes: usize,
    /// Maximum time that a call waits for rows; the deadline of the call may be earlier.
    pub timeout: Duration,
}

impl Default for RemoteOptions {
    fn default() -> Self {
        RemoteOptions { cache_bytes: 256 << 20, timeout: Duration::from_millis(200) }
    }
}

/// Counters of requested rows by outcome, and of degraded rows by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteCounters {
    /// Number of requested rows.
    pub rows: u64,
    /// Rows received from the cluster by the call that requested them.
    pub remote: u64,
    /// Rows that another call had already requested.
    pub joined: u64,
    /// Rows that are outside of the table.
    pub unknown: u64,
    /// Degraded rows: the sum of the causes below and of joined rows that were not received.
    pub degraded: u64,
    /// Rows whose node did not answer in time.
    pub late: u64,
    /// Rows whose shard has no available node.
    pub down: u64,
    /// Rows whose read the node rejects.
    pub refused: u64,
    /// Rows whose chunk does not exist.
    pub missing: u64,
    /// Rows whose bytes differ from the loaded bytes: too short, changed, or of another load.
    pub corrupt: u64,
    /// Counters of the cache in front of the cluster; its hits are the remaining rows of `rows`.
    pub cache: CacheCounters,
}

#[derive(Debug, Default)]
struct RemoteTally {
    rows: AtomicU64,
    remote: AtomicU64,
    joined: AtomicU64,
    unknown: AtomicU64,
    degraded: AtomicU64,
    late: AtomicU64,
    down: AtomicU64,
    refused: AtomicU64,
    missing: AtomicU64,
    corrupt: AtomicU64,
}

/// A set of rows in the cluster, open for reading.
#[derive(Debug)]
pub struct RemoteTable {
    cluster: Arc<Cluster>,
    inner: Arc<Inner>,
    timeout: Duration,
}

#[derive(Debug)]
struct Inner {
    set: Arc<OpenSet>,
    cache: Option<RowCache>,
    in_flight: InFlight,
    counters: RemoteTally,
    /// Value of the metric label `table`.
    label: metrics::SharedString,
}

impl RemoteTable {
    /// Opens a set of rows that was loaded completely. While the set is open, a background task checks whether its rows are
    /// readable ([`Cluster::troubles`]).
    ///
    /// # Errors
    /// `NotReady` if the set does not exist or is incomplete, because a load may follow; `Corrupt` with each difference if the
    /// shape of the set differs from `expected`. `Unavailable` if the cluster does not answer, or none of the sampled rows is
    /// readable.
    pub fn open(
        cluster: &Arc<Cluster>,
        named: &RowSet,
        expected: &TableShape,
        options: &RemoteOptions,
    ) -> Result<Self> {
        let (named, manifest) = complete(cluster, named)?;
        manifest.expect(&named, expected)?;
        let cache = match options.cache_bytes {
            0 => None,
            bytes => Some(RowCache::new(manifest.row_bytes, bytes)?),
        };
        let label = named.label();
        let set = Arc::new(OpenSet::new(named, &manifest));
        let shared = cluster.shared.clone();
        locked(&shared.open).push(Arc::downgrade(&set));
        let first = (shared.clone(), set.clone());
        let (found, _) = cluster.run(async move { look(&first.0, &first.1, 0).await })?;
        // The watch task is started for a rejected set too: the task then clears the problems that the check reported, and ends.
        cluster.spawn(watch(shared, Arc::downgrade(&set), set.wake.clone(), label.clone()));
        if let Some(why) = found.trouble().filter(|_| found.unreadable_rows() == found.rows) {
            return Err(Error::unavailable(format!("{}: {why}", set.named)));
        }
        let (in_flight, counters) = (InFlight::default(), RemoteTally::default());
        let inner = Inner { set, cache, in_flight, counters, label: label.into() };
        Ok(RemoteTable { cluster: cluster.clone(), inner: Arc::new(inner), timeout: options.timeout })
    }

    /// Returns the counters of rows since the set was opened.
    pub fn counters(&self) -> RemoteCounters {
        let RemoteTally { rows, remote, joined, unknown, degraded, late, down, refused, missing, corrupt } =
            &self.inner.counters;
        let [rows, remote, joined, unknown, degraded, late, down, refused, missing, corrupt] =
            [rows, remote, joined, unknown, degraded, late, down, refused, missing, corrupt]
                .map(|c| c.load(Ordering::Relaxed));
        let cache = self.inner.cache.as_ref().map(RowCache::counters).unwrap_or_default();
        RemoteCounters { rows, remote, joined, unknown, degraded, late, down, refused, missing, corrupt, cache }
    }

    /// Returns the cluster that holds these rows.
    pub fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }

    /// Requests rows of a flight, given by their indices `led`, with one task per shard.
    fn send(&self, flight: &Arc<Flight>, led: Vec<usize>) {
        let layout = &self.inner.set.layout;
        let view = self.cluster.shared.view.load();
        let mut shards: Vec<Vec<usize>> = vec![Vec::new(); view.shards.len() + 1];
        for index in led {
            let slot = layout.slot(layout.place(flight.rows()[index]).partition as usize);
            shards[view.slots.owner(slot).unwrap_or(view.shards.len())].push(index);
        }
        for indices in shards.into_iter().filter(|i| !i.is_empty()) {
            let shared = self.cluster.shared.clone();
            let mut leg = ShardFetch { inner: self.inner.clone(), flight: flight.clone(), indices };
            self.cluster.spawn(async move {
                let layout = &leg.inner.set.layout;
                let places: Vec<RowPlace> = leg.indices.iter().map(|&i| layout.place(leg.flight.rows()[i])).collect();
                let came = read(&shared, layout, &places, leg.flight.deadline, Reader::Request).await;
                leg.settle(&places, &came.answers);
            });
        }
    }

    /// Requests rows once more that other calls with earlier deadlines gave up, without joining other flights.
    fn retry(&self, degraded: Vec<u64>, deadline: Instant) -> Arc<Flight> {
        let led = (0..degraded.len()).collect();
        let flight = Arc::new(Flight::new(degraded, self.inner.set.layout.row_bytes, deadline));
        self.send(&flight, led);
        flight
    }
}

impl Inner {
    /// Adds the outcomes of the rows of one call to the process's metrics.
    fn export(&self, outcomes: &[(&'static str, u64)]) {
        for &(outcome, rows) in outcomes.iter().filter(|(_, rows)| *rows > 0) {
            let labels = [("remote_table", self.label.clone()), ("outcome", outcome.into())];
            metrics::counter!("sterling_remote_rows_total", &labels).increment(rows);
        }
        if let Some(cache) = &self.cache {
            let labels = [("remote_table", self.label.clone())];
            metrics::gauge!("sterling_remote_cache_hit_rate", &labels).set(cache.hit_rate());
        }
    }

    /// Counts unreadable rows by cause.
    fn count(&self, causes: impl Iterator<Item = Cause>) {
        let RemoteTally { late, down, refused, missing, corrupt, .. } = &self.counters;
        let mut by_cause: BTreeMap<Cause, u64> = BTreeMap::new();
        causes.for_each(|cause| *by_cause.entry(cause).or_default() += 1);
        for (cause, rows) in by_cause {
            let counter = match cause {
                Cause::Timeout => late,
                Cause::Down => down,
                Cause::Refused => refused,
                Cause::Missing => missing,
                Cause::Corrupt => corrupt,
            };
            counter.fetch_add(rows, Ordering::Relaxed);
            let labels = [("remote_table", self.label.clone()), ("cause", cause.name().into())];
            metrics::counter!("sterling_remote_unread_total", &labels).increment(rows);
        }
    }
}

/// Request for the rows of a flight that one shard holds. If dropped before the answers arrive, the rows become degraded.
struct ShardFetch {
    inner: Arc<Inner>,
    flight: Arc<Flight>,
    indices: Vec<usize>,
}

impl ShardFetch {
    fn settle(&mut self, places: &[RowPlace], answers: &[Result<Vec<u8>, Cause>]) {
        let ShardFetch { inner, flight, indices } = self;
        let rows = indices.iter().zip(answers).map(|(&index, answer)| inner.set.accept(flight.rows()[index], answer));
        let rows: Vec<Result<&[u8], Cause>> = rows.collect();
        if rows.iter().any(Result::is_err) {
            let failed = rows.iter().zip(places).filter_map(|(row, place)| Some((row.err()?, *place)));
            inner.set.suspect(failed.filter(|(cause, _)| cause.is_lost()).map(|(_, place)| place));
            // Rows whose flight was abandoned were counted at that time.
            let unsettled = flight.unsettled(indices);
            let causes = rows.iter().zip(&unsettled).filter(|(_, is_unsettled)| **is_unsettled);
            inner.count(causes.filter_map(|(row, _)| row.err()));
        }
        let accepted: Vec<Option<&[u8]>> = rows.iter().map(|row| row.ok()).collect();
        flight.settle(indices.iter().copied().zip(accepted.iter().copied()));
        for (&index, bytes) in indices.iter().zip(&accepted) {
            let row = flight.rows()[index];
            if let (Some(cache), Some(bytes)) = (&inner.cache, bytes) {
                cache.insert(row, bytes);
            }
            inner.in_flight.unregister(row, flight);
        }
        indices.clear();
    }
}

impl Drop for ShardFetch {
    fn drop(&mut self) {
        self.flight.settle(self.indices.iter().map(|&i| (i, None)));
        self.indices.iter().for_each(|&i| self.inner.in_flight.unregister(self.flight.rows()[i], &self.flight));
    }
}

impl RowSource for RemoteTable {
    fn row_bytes(&self) -> usize {
        self.inner.set.layout.row_bytes
    }

    fn rows(&self) -> u64 {
        self.inner.set.layout.rows
    }

    fn begin(&self, rows: Vec<u64>, terms: &Lookup) -> Box<dyn Pending + '_> {
        let latest = Instant::now() + self.timeout;
        let deadline = terms.deadline.map_or(latest, |deadline| deadline.min(latest));
        let Inner { set, cache, in_flight, counters, .. } = &*self.inner;
        let layout = &set.layout;
        let row_bytes = layout.row_bytes;
        counters.rows.fetch_add(rows.len() as u64, Ordering::Relaxed);
        let mut fetched =
            Fetched { bytes: vec![0; rows.len() * row_bytes], states: vec![RowState::Degraded; rows.len()] };
        let (mut missed, mut places) = (Vec::new(), Vec::new());
        for (place, (&row, out)) in rows.iter().zip(fetched.bytes.chunks_exact_mut(row_bytes)).enumerate() {
            if row >= layout.rows {
                fetched.states[place] = RowState::Unknown;
            } else if cache.as_ref().is_some_and(|c| c.get(row, out)) {
                fetched.states[place] = RowState::Hit;
            } else {
                missed.push(row);
                places.push(place);
            }
        }
        let flight = Arc::new(Flight::new(missed, row_bytes, deadline));
        let (mut led, mut joined, mut landed) = (Vec::new(), Vec::new(), 0);
        if Instant::now() < deadline {
            for (index, (&row, &place)) in flight.rows().iter().zip(&places).enumerate() {
                let out = &mut fetched.bytes[place * row_bytes..][..row_bytes];
                match in_flight.join_or_lead(row, &flight) {
                    Some(other) => joined.push((index, other)),
                    // The row's flight has ended since the cache lookup: rows enter the cache before their registration is
                    // removed.
                    None if cache.as_ref().is_some_and(|c| c.peek(row, out)) => {
                        flight.settle([(index, Some(&*out))].into_iter());
                        in_flight.unregister(row, &flight);
                        landed += 1;
                    }
                    None => led.push(index),
                }
            }
            counters.joined.fetch_add(joined.len() as u64 + landed, Ordering::Relaxed);
            flight.settle(joined.iter().map(|(index, _)| (*index, None)));
            self.send(&flight, led);
        }
        Box::new(Fetching { table: self, fetched, flight, places, joined, landed, deadline })
    }
}

/// A lookup of remote rows in progress.
struct Fetching<'a> {
    table: &'a RemoteTable,
    fetched: Fetched,
    /// Rows that were not cached; the rows that are also in `joined` are settled by other flights.
    flight: Arc<Flight>,
    /// Index in the answer of each row of the flight.
    places: Vec<usize>,
    joined: Vec<(usize, Arc<Flight>)>,
    /// Number of rows of the flight that another call has put into the cache in the meantime.
    landed: u64,
    deadline: Instant,
}

impl Fetching<'_> {
    /// Waits for a row of a flight, and copies it into the answer.
    fn take(&mut self, place: usize, from: &Flight, row: u64, until: Instant) -> RowState {
        let row_bytes = self.table.inner.set.layout.row_bytes;
        let out = &mut self.fetched.bytes[place * row_bytes..][..row_bytes];
        let index = from.index_of(row).expect("a flight is joined for its own rows");
        let state = from.copy(&from.wait(until), index, out);
        self.fetched.states[place] = state;
        state
    }
}

impl Pending for Fetching<'_> {
    fn wait(mut self: Box<Self>) -> Result<Fetched> {
        let (table, deadline, flight) = (self.table, self.deadline, self.flight.clone());
        let row_bytes = table.inner.set.layout.row_bytes;
        let counters = &table.inner.counters;
        drop(flight.wait(deadline));
        let mut late = flight.give_up();
        let answers = flight.wait(deadline);
        let mut brought = 0;
        for (index, &place) in self.places.iter().enumerate() {
            let state = flight.copy(&answers, index, &mut self.fetched.bytes[place * row_bytes..][..row_bytes]);
            self.fetched.states[place] = state;
            brought += u64::from(state == RowState::Hit);
        }
        drop(answers);
        counters.remote.fetch_add(brought - self.landed, Ordering::Relaxed);

        let mut given_up = Vec::new();
        for (index, other) in std::mem::take(&mut self.joined) {
            let (place, row) = (self.places[index], flight.rows()[index]);
            let state = self.take(place, &other, row, deadline.min(other.deadline));
            if state == RowState::Degraded && other.deadline < deadline {
                given_up.push((place, row));
            }
        }
        if !given_up.is_empty() && Instant::now() + RETRY_TIME_MIN < deadline {
            let again = table.retry(given_up.iter().map(|(_, row)| *row).collect(), deadline);
            for (place, row) in given_up {
                self.take(place, &again, row, deadline);
            }
            late += again.give_up();
        }
        table.inner.count((0..late).map(|_| Cause::Timeout));
        let count = |state| self.fetched.states.iter().filter(|s| **s == state).count() as u64;
        let (unknown, degraded) = (count(RowState::Unknown), count(RowState::Degraded));
        counters.unknown.fetch_add(unknown, Ordering::Relaxed);
        counters.degraded.fetch_add(degraded, Ordering::Relaxed);
        table.inner.set.served(self.fetched.states.len() as u64, degraded);
        let cached = (self.fetched.states.len() - self.places.len()) as u64 - unknown;
        let remote = count(RowState::Hit) - cached;
        table.inner.export(&[("cache", cached), ("remote", remote), ("unknown", unknown), ("degraded", degraded)]);
        Ok(self.fetched)
    }
}
