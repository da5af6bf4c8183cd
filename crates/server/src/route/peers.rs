//! Requests table rows from the servers of other hosts of a placement plan, and provides this server's rows to them.
//!
//! A lookup sends one call per host and version for all tables. Queries are queued until the lookup has started all of them
//! ([`RowSource::send`]), and then share a call over a persistent connection. Replica selection, hedging and ejection work as in
//! a router (`inquiry`). If no server of a host answers for a while, the host's circuit breaker opens: rows are degraded without
//! delay until a poll finds a server that answers.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};
use utoipa::ToSchema;

use super::peer::{POLL_INTERVAL, Peer, Question, ROWS_EVERY, Shared};
use super::rows::ROWS_BYTES_MAX;
use super::tls::{Connector, ServersTls};
use sterling_core::blocking::may_block;
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use sterling_core::tasks::{self, Runtime};
use sterling_embedding::Lookup;
use sterling_embedding::tiers::slices::{Neighbours, PeerHost, PeerSlice, Slices};
use sterling_embedding::tiers::{Fetched, Pending, RowSource, RowState};

/// Number of network threads.
const THREADS: usize = 2;

/// Requests for table rows to the servers of other hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PeerOptions {
    /// Access key for those servers, with the role `read`; empty if they need none.
    pub key: String,
    /// Time that a version waits for the other hosts to load it too, in milliseconds; then the load is rejected
    /// and retried.
    pub wait_ms: u64,
    /// TLS to those servers: `ca`, `certificate` and `key`, as in `route.tls`.
    #[schema(value_type = Object)]
    pub tls: ServersTls,
}

impl Default for PeerOptions {
    fn default() -> Self {
        PeerOptions { key: String::new(), wait_ms: 30_000, tls: ServersTls::default() }
    }
}

/// Servers of other hosts.
#[derive(Debug)]
pub struct Peers {
    shared: Arc<Shared>,
    slices: Slices,
    hosts: Mutex<Vec<Arc<Peer>>>,
    runtime: Runtime,
}

impl Peers {
    /// Creates an empty set: placement plans add hosts.
    ///
    /// # Errors
    /// Fails if the configured key or certificates are invalid.
    pub fn open(options: &PeerOptions) -> Result<Self> {
        if !options.key.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(Error::invalid(
                "peers.key: expected visible characters without spaces, as `sterling key` prints them",
            ));
        }
        let connector = Connector::open(&options.tls).map_err(|e| e.within("peers"))?.map(Arc::new);
        let runtime = tasks::PEER_ROWS.runtime(|builder| builder.worker_threads(THREADS).enable_all())?;
        let (key, wait) = (options.key.clone(), Duration::from_millis(options.wait_ms));
        let shared = Arc::new(Shared { key, wait, connector, origin: Instant::now() });
        Ok(Peers { shared, slices: Slices::default(), hosts: Mutex::default(), runtime })
    }

    /// Returns the servers of a host; polling starts with the first call.
    fn of(&self, host: &PeerHost) -> Arc<Peer> {
        let mut hosts = locked(&self.hosts);
        if let Some(known) = hosts.iter().find(|peer| peer.host == *host) {
            return known.clone();
        }
        let seed = self.shared.origin.elapsed().as_nanos() as u64 ^ (hosts.len() as u64) << 48;
        let peer = Arc::new(Peer::new(host.clone(), seed, self.shared.clone()));
        hosts.push(peer.clone());
        let watched = Arc::downgrade(&peer);
        self.runtime.spawn(async move {
            let mut looks = 0;
            while let Some(peer) = watched.upgrade() {
                peer.look().await;
                looks += 1;
                if looks > ROWS_EVERY {
                    peer.check_held_rows().await;
                    looks = 1;
                }
                drop(peer);
                sleep(POLL_INTERVAL).await;
            }
        });
        peer
    }

    /// Problems of other hosts, one line each.
    pub fn troubles(&self) -> Vec<String> {
        locked(&self.hosts).iter().flat_map(|peer| peer.troubles()).collect()
    }
}

impl Neighbours for Peers {
    fn slices(&self) -> &Slices {
        &self.slices
    }

    fn open(&self, slice: &PeerSlice) -> Arc<dyn RowSource> {
        let (peer, slice) = (self.of(&slice.host), Arc::new(slice.clone()));
        peer.want(&slice);
        Arc::new(PeerRows { peer, slice, runtime: self.runtime.handle().clone() })
    }

    fn wait_for(&self, slices: &[PeerSlice]) -> Result<()> {
        let requested = slices.iter().map(|slice| (self.of(&slice.host), slice.clone()));
        let mut by_host: Vec<(Arc<Peer>, Vec<Arc<PeerSlice>>)> = Vec::new();
        for (peer, slice) in requested {
            let slice = Arc::new(slice);
            match by_host.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &peer)) {
                Some((_, slices)) => slices.push(slice),
                None => by_host.push((peer, vec![slice])),
            }
        }
        may_block();
        let (reported, receive) = crossbeam_channel::bounded(1);
        self.runtime.spawn(async move {
            let held = join_all(by_host.iter().map(|(peer, slices)| peer.wait_for(slices))).await;
            // The receiver waits below.
            let _ = reported.send(held.into_iter().collect::<Result<()>>());
        });
        receive.recv().unwrap_or_else(|_| Err(Error::internal("a call to other hosts ended without an answer")))
    }
}

/// Rows of a slice that the servers of another host hold.
#[derive(Debug)]
struct PeerRows {
    peer: Arc<Peer>,
    slice: Arc<PeerSlice>,
    runtime: Handle,
}

impl RowSource for PeerRows {
    fn row_bytes(&self) -> usize {
        self.slice.row_bytes
    }

    fn rows(&self) -> u64 {
        self.slice.name.len()
    }

    fn begin(&self, rows: Vec<u64>, terms: &Lookup) -> Box<dyn Pending + '_> {
        let latest = Instant::now() + self.slice.timeout;
        let deadline = terms.deadline.map_or(latest, |deadline| Instant::from_std(deadline).min(latest));
        let (tell, receive) = crossbeam_channel::unbounded();
        let count = rows.len();
        if Instant::now() < deadline && !self.peer.breaker.is_open() {
            let most = (ROWS_BYTES_MAX / self.slice.row_bytes.max(1)).max(1);
            let questions = rows.chunks(most).enumerate().map(|(part, rows)| Question {
                slice: self.slice.clone(),
                rows: rows.to_vec(),
                first: part * most,
                deadline,
                origin: terms.origin.clone(),
                tell: tell.clone(),
            });
            locked(&self.peer.outbox).extend(questions);
        }
        Box::new(RequestedRows { source: self, count, deadline, receive })
    }

    fn send(&self) {
        self.peer.send(&self.runtime);
    }
}

/// Requested rows of another host.
struct RequestedRows<'a> {
    source: &'a PeerRows,
    count: usize,
    deadline: Instant,
    receive: crossbeam_channel::Receiver<(usize, Vec<u8>)>,
}

impl Pending for RequestedRows<'_> {
    fn wait(self: Box<Self>) -> Result<Fetched> {
        let (count, row_bytes) = (self.count, self.source.slice.row_bytes);
        let mut fetched = Fetched { bytes: vec![0; count * row_bytes], states: vec![RowState::Degraded; count] };
        // Ends when all senders have answered or were dropped.
        while let Ok((first, bytes)) = self.receive.recv_deadline(self.deadline.into_std()) {
            let rows = first..first + bytes.len() / row_bytes;
            fetched.bytes[first * row_bytes..][..bytes.len()].copy_from_slice(&bytes);
            fetched.states[rows].fill(RowState::Hit);
        }
        let came = fetched.states.iter().filter(|state| **state == RowState::Hit).count() as u64;
        for (outcome, rows) in [("remote", came), ("degraded", count as u64 - came)] {
            let labels = [("host", self.source.peer.host.name.clone()), ("outcome", outcome.to_owned())];
            metrics::counter!("sterling_peer_rows_total", &labels).increment(rows);
        }
        Ok(fetched)
    }
}

#[cfg(test)]
mod tests;
