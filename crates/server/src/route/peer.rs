//! Servers of one host, which other hosts request table rows from.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use axum::body::Bytes;
use futures_util::future::join_all;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};

use super::choice::Group;
use super::client::{Client, Outgoing};
use super::inquiry::{Inquiry, ReplicaGroup, Replicas};
use super::names::Names;
use super::protocol::{Holdings, PARTS_PATH, read, write};
use super::rows::{QUESTIONS_MAX, ROWS_BYTES_MAX, RowsCall, RowsQuestion, RowsReply};
use super::tls::Connector;
use sterling_core::error::{Error, Kind, Result};
use sterling_core::locks::locked;
use sterling_core::request::Origin;
use sterling_embedding::tiers::breaker::Breaker;
use sterling_embedding::tiers::slices::{PeerHost, PeerSlice, SliceName};

/// Interval between two polls of the servers, and timeout of each.
pub(super) const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Number of polls between two checks whether the host holds the rows.
pub(super) const ROWS_EVERY: u32 = 2;
/// Failed calls in a row after which a host's circuit breaker opens.
pub(super) const FAILURES_MAX: u32 = 5;
/// Minimum timeout of calls that count as failures when unanswered.
const COUNTED_TIMEOUT_MIN: Duration = Duration::from_millis(20);
/// Interval between two checks whether other hosts have loaded a version.
const WAIT_STEP: Duration = Duration::from_millis(200);
/// Index of the only kind of query in the host's group.
const ROWS: usize = 0;

/// Settings of queries to all hosts.
pub(super) struct Shared {
    pub(super) key: String,
    pub(super) wait: Duration,
    pub(super) connector: Option<Arc<Connector>>,
    pub(super) origin: Instant,
}

pub(super) struct Peer {
    pub(super) host: PeerHost,
    names: Names,
    known: Mutex<BTreeMap<SocketAddr, Seen>>,
    /// Slices requested from the host, by model and edition.
    wanted: Mutex<BTreeMap<(String, Arc<str>), RequestedSlices>>,
    /// Rows that the host held earlier and no longer holds.
    lacking: Mutex<Vec<String>>,
    group: Arc<Replicas>,
    pub(super) outbox: Mutex<Vec<Question>>,
    pub(super) breaker: Breaker,
    shared: Arc<Shared>,
}

/// Server, with its problem at the last poll.
struct Seen {
    client: Arc<Client>,
    trouble: Option<String>,
}

/// Slices of a version that are requested from a host.
#[derive(Default)]
struct RequestedSlices {
    slices: Vec<Weak<PeerSlice>>,
    /// True once the host held all slices of the version; opening the version waits for that.
    was_held: bool,
}

/// Query for rows of a slice; queries of one version share a call.
pub(super) struct Question {
    pub(super) slice: Arc<PeerSlice>,
    pub(super) rows: Vec<u64>,
    /// Index of the slice's first row in the answer of the lookup.
    pub(super) first: usize,
    pub(super) deadline: Instant,
    pub(super) origin: Origin,
    pub(super) tell: crossbeam_channel::Sender<(usize, Vec<u8>)>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peer").field("host", &self.host).finish_non_exhaustive()
    }
}

impl Peer {
    /// Creates a host without known servers.
    pub(super) fn new(host: PeerHost, seed: u64, shared: Arc<Shared>) -> Self {
        Peer {
            host,
            names: Names::default(),
            known: Mutex::default(),
            wanted: Mutex::default(),
            lacking: Mutex::default(),
            group: Arc::new(Mutex::new(Group::new(seed))),
            outbox: Mutex::default(),
            breaker: Breaker::default(),
            shared,
        }
    }

    /// Registers a slice; it stays registered as long as it has an owner.
    pub(super) fn want(&self, slice: &Arc<PeerSlice>) {
        let mut wanted = locked(&self.wanted);
        let of_version = wanted.entry((slice.name.model.clone(), slice.edition.clone())).or_default();
        of_version.slices.push(Arc::downgrade(slice));
        // A version that is opened again waits for its rows again.
        of_version.was_held = false;
    }

    /// Checks whether servers of the host hold the registered slices, and logs if they do not.
    pub(super) async fn check_held_rows(&self) {
        let lacking = self.lacking().await;
        let mut before = locked(&self.lacking);
        if let Some(what) = lacking.first().filter(|_| before.is_empty()) {
            tracing::warn!(host = self.host.name, what, "a host answers, but returns no rows of embedding tables");
        }
        *before = lacking;
    }

    /// Lists rows that no server of the host holds any more, by the name of one slice per version.
    async fn lacking(&self) -> Vec<String> {
        let is_reached = locked(&self.known).values().any(|seen| seen.trouble.is_none());
        let mut lacking = Vec::new();
        if !is_reached || self.breaker.is_open() {
            return lacking;
        }
        let mut by_version = Vec::new();
        locked(&self.wanted).retain(|version, wanted| {
            let slices: Vec<Arc<PeerSlice>> = wanted.slices.iter().filter_map(Weak::upgrade).collect();
            wanted.slices.retain(|slice| slice.strong_count() > 0);
            // A version that still waits for its rows checks them on its own.
            if wanted.was_held {
                by_version.push((version.clone(), slices));
            }
            !wanted.slices.is_empty()
        });
        for (version, slices) in by_version {
            let trouble = self.first_missing(&slices).await;
            let trouble = trouble.map(|(name, error)| format!("no server of the host returns {name}: {error}"));
            let wanted = locked(&self.wanted);
            let known = wanted.get(&version).filter(|known| known.was_held && known.slices.len() == slices.len());
            lacking.extend(trouble.filter(|_| known.is_some()));
        }
        lacking
    }

    /// Returns the first slice of a version that no server holds, and the error; slices are checked in groups.
    async fn first_missing<'a>(&self, slices: &'a [Arc<PeerSlice>]) -> Option<(&'a SliceName, Error)> {
        let mut lacking = None;
        for slices in slices.chunks(QUESTIONS_MAX) {
            let requested = self.query_holdings(slices).await;
            lacking = lacking.or(requested.err().map(|error| (&slices[0].name, error)));
        }
        lacking
    }

    /// Requests zero rows of up to [`QUESTIONS_MAX`] slices of one version; fails if no server holds all of them.
    async fn query_holdings(&self, slices: &[Arc<PeerSlice>]) -> Result<()> {
        let questions = slices.iter().map(|slice| RowsQuestion::of(&slice.name, Vec::new())).collect();
        let row_bytes: Vec<usize> = slices.iter().map(|slice| slice.row_bytes).collect();
        let call = RowsCall { questions };
        let deadline = Instant::now() + POLL_INTERVAL;
        self.ask(&slices[0].name.model, &call, &row_bytes, deadline, Origin::default()).await.map(drop)
    }

    /// Resolves the host's servers, and polls each.
    pub(super) async fn look(&self) {
        let there = self.names.resolve(&self.host.servers).await;
        let clients: Vec<Arc<Client>> = {
            let mut known = locked(&self.known);
            known.retain(|address, _| there.contains_key(address));
            for (address, host) in &there {
                let Shared { key, connector, .. } = &*self.shared;
                let client = || Arc::new(Client::new(*address, host, key, connector.clone()));
                known.entry(*address).or_insert_with(|| Seen { client: client(), trouble: None });
            }
            known.values().map(|seen| seen.client.clone()).collect()
        };
        locked(&self.group).keep(|address| there.contains_key(address));
        let parts = Outgoing::pass(PARTS_PATH.into(), None);
        let looks = clients.iter().map(|client| async {
            let reported = client.call(&parts, Instant::now() + POLL_INTERVAL).await;
            reported.and_then(|body| read::<Holdings>(&body)).err().map(|e| e.to_string())
        });
        let troubles = join_all(looks).await;
        if troubles.iter().any(Option::is_none) && self.breaker.is_open() {
            tracing::info!(host = self.host.name, "host answers again");
            self.breaker.close();
        }
        let mut known = locked(&self.known);
        for (client, trouble) in clients.iter().zip(troubles) {
            if let Some(seen) = known.get_mut(&client.address()) {
                seen.trouble = trouble;
            }
        }
        let silent = known.values().filter(|seen| seen.trouble.is_some()).count();
        for (state, count) in [("ready", known.len() - silent), ("silent", silent)] {
            let labels = [("host", self.host.name.clone()), ("state", state.to_owned())];
            metrics::gauge!("sterling_peer_servers", &labels).set(count as f64);
        }
    }

    pub(super) fn troubles(&self) -> Vec<String> {
        let name = &self.host.name;
        let known = locked(&self.known);
        let silent = known.iter().filter_map(|(address, seen)| Some((address, seen.trouble.as_ref()?)));
        let mut troubles: Vec<String> =
            silent.map(|(address, why)| format!("host `{name}`: {address} returns no rows: {why}")).collect();
        if known.is_empty() {
            troubles.push(format!("host `{name}`: none of {:?} resolves to a server", self.host.servers));
        }
        drop(known);
        troubles.extend(locked(&self.lacking).iter().map(|what| format!("host `{name}`: {what}")));
        troubles
    }

    fn home(&self) -> ReplicaGroup {
        let servers = locked(&self.known).values().map(|seen| seen.client.clone()).collect();
        ReplicaGroup::new(servers, self.group.clone())
    }

    /// Sends one call; if a server does not hold the slices, the next one is queried.
    async fn ask(
        &self,
        model: &str,
        call: &RowsCall,
        row_bytes: &[usize],
        deadline: Instant,
        origin: Origin,
    ) -> Result<RowsReply> {
        let out = Outgoing::pass(format!("/v1/models/{model}:rows"), Some(Bytes::from(write(call)?)));
        let out = Outgoing { origin, ..out };
        let wait = deadline.saturating_duration_since(Instant::now());
        let (home, is_missing) = (self.home(), AtomicBool::new(false));
        let missing = || {
            is_missing.store(true, Ordering::Relaxed);
            Error::unavailable("a server lacks rows that the plan assigns to it")
        };
        let receive = |reported: Result<Bytes>| {
            let body = reported.map_err(|e| if e.kind() == Kind::NotFound { missing() } else { e })?;
            let reply: RowsReply = read(&body).map_err(|e| Error::corrupt(e.to_string()))?;
            is_whole(&reply, call, row_bytes)?.then_some(reply).ok_or_else(missing)
        };
        let inquiry = Inquiry { home: &home, out: &out, kind: ROWS, origin: self.shared.origin, wait, looked: None };
        let reported = inquiry.ask(receive).await.map(|(reply, ..)| reply);
        match &reported {
            Ok(_) if self.breaker.is_open() => self.breaker.close(),
            Ok(_) => self.breaker.success(),
            // A server that answers without holding the rows is alive.
            Err(_) if is_missing.load(Ordering::Relaxed) => {}
            Err(e)
                if e.kind() == Kind::Unavailable
                    || e.kind() == Kind::DeadlineExceeded && wait >= COUNTED_TIMEOUT_MIN =>
            {
                if self.breaker.failure(FAILURES_MAX) {
                    tracing::warn!(host = self.host.name, error = %e, "host returns no rows; it gets no calls until it answers a poll");
                }
            }
            Err(_) => {}
        }
        reported
    }

    /// Waits until the host's servers hold these slices.
    pub(super) async fn wait_for(&self, slices: &[Arc<PeerSlice>]) -> Result<()> {
        let until = Instant::now() + self.shared.wait;
        self.look().await;
        loop {
            let Some((name, error)) = self.first_missing(slices).await else {
                let mut wanted = locked(&self.wanted);
                for slice in slices {
                    if let Some(known) = wanted.get_mut(&(slice.name.model.clone(), slice.edition.clone())) {
                        known.was_held = true;
                    }
                }
                return Ok(());
            };
            if Instant::now() + WAIT_STEP > until {
                let host = &self.host.name;
                return Err(Error::not_ready(format!(
                    "host `{host}` does not have the rows {name}, or further ones: {error}"
                )));
            }
            sleep(WAIT_STEP).await;
        }
    }

    /// Sends queued queries: one call per version, of limited size.
    pub(super) fn send(self: &Arc<Self>, runtime: &Handle) {
        let retained = std::mem::take(&mut *locked(&self.outbox));
        let mut calls: HashMap<(String, Arc<str>), Vec<Vec<Question>>> = HashMap::new();
        for question in retained {
            let of_version =
                calls.entry((question.slice.name.model.clone(), question.slice.edition.clone())).or_default();
            let bytes = |question: &Question| question.rows.len() * question.slice.row_bytes;
            let has_room = |call: &&mut Vec<Question>| {
                call.len() < QUESTIONS_MAX && call.iter().map(bytes).sum::<usize>() + bytes(&question) <= ROWS_BYTES_MAX
            };
            match of_version.last_mut().filter(has_room) {
                Some(call) => call.push(question),
                None => of_version.push(vec![question]),
            }
        }
        for ((model, _), calls) in calls {
            for questions in calls {
                let (peer, model) = (self.clone(), model.clone());
                runtime.spawn(async move { peer.call(&model, questions).await });
            }
        }
    }

    /// Sends one call. If the call fails, the senders of its queries are dropped, which ends the wait of the receivers.
    async fn call(&self, model: &str, mut questions: Vec<Question>) {
        if self.breaker.is_open() {
            return;
        }
        let deadline = questions.iter().map(|question| question.deadline).max().unwrap_or_else(Instant::now);
        let row_bytes: Vec<usize> = questions.iter().map(|question| question.slice.row_bytes).collect();
        let requested =
            |question: &mut Question| RowsQuestion::of(&question.slice.name, std::mem::take(&mut question.rows));
        let call = RowsCall { questions: questions.iter_mut().map(requested).collect() };
        let start = Instant::now();
        let origin = Origin::of_several(questions.iter().map(|question| &question.origin));
        let reported = self.ask(model, &call, &row_bytes, deadline, origin).await;
        let outcome = if reported.is_ok() { "answered" } else { "failed" };
        let labels = [("host", self.host.name.clone()), ("outcome", outcome.to_owned())];
        metrics::counter!("sterling_peer_calls_total", &labels).increment(1);
        metrics::histogram!("sterling_peer_call_seconds", &labels[..1]).record(start.elapsed().as_secs_f64());
        match reported {
            Ok(reply) => {
                for (question, given) in questions.into_iter().zip(reply.given.into_iter().flatten()) {
                    // The receiver may have stopped waiting.
                    let _ = question.tell.send((question.first, given.bytes));
                }
            }
            Err(error) => tracing::debug!(host = self.host.name, %error, "host returns no rows"),
        }
    }
}

/// Returns whether a reply answers all queries of a call; `Corrupt` if it answers something else.
fn is_whole(reply: &RowsReply, call: &RowsCall, row_bytes: &[usize]) -> Result<bool> {
    if reply.given.len() != call.questions.len() {
        let (came, requested) = (reply.given.len(), call.questions.len());
        return Err(Error::corrupt(format!("got answers to {came} queries of a call, expected {requested}")));
    }
    for ((given, question), row_bytes) in reply.given.iter().zip(&call.questions).zip(row_bytes) {
        let Some(given) = given else { return Ok(false) };
        if given.content != question.content || given.bytes.len() != question.rows.len() * row_bytes {
            return Err(Error::corrupt(format!(
                "table `{}`: got {} bytes of file {}, expected {} rows of {row_bytes} bytes of file {}",
                question.table,
                given.bytes.len(),
                given.content,
                question.rows.len(),
                question.content
            )));
        }
    }
    Ok(true)
}
