//! Sends one query to the replicas of a shard or a host: replica selection, hedged requests, timeouts and retries.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwap;
use axum::body::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::choice::{Group, Micros, Outcome};
use super::client::{Client, Outgoing};
use crate::gather::is_absence;
use sterling_core::error::{Error, Kind, Result};
use sterling_core::locks::locked;

/// Share of the remaining time after which an unanswered call is also sent to another replica, regardless of the hedge budget;
/// and its upper limit.
const SECOND_CALL_SHARE: f64 = 0.4;
const SECOND_CALL_AFTER_MAX: Duration = Duration::from_secs(2);

/// Replicas of one shard or host, by their addresses.
pub(super) type Replicas = Mutex<Group<SocketAddr>>;

/// Number of failed polls in a row after which a shard without servers, or a server without answers, counts as lost.
pub(super) const FAILED_POLLS_MAX: u32 = 3;

/// Replicas with the same content: their servers at the last poll, and their response statistics.
#[derive(Clone)]
pub(super) struct ReplicaGroup {
    servers: Arc<ArcSwap<Vec<Arc<Client>>>>,
    /// Number of polls in a row that none of the servers answered.
    vacant: Arc<AtomicU32>,
    pub(super) group: Arc<Replicas>,
}

impl ReplicaGroup {
    pub(super) fn new(servers: Vec<Arc<Client>>, group: Arc<Replicas>) -> Self {
        ReplicaGroup { servers: Arc::new(ArcSwap::from_pointee(servers)), vacant: Arc::default(), group }
    }

    pub(super) fn servers(&self) -> Arc<Vec<Arc<Client>>> {
        self.servers.load_full()
    }

    /// Records the servers that a poll found, and whether one of them answered; queries in progress use them too.
    pub(super) fn found(&self, servers: Vec<Arc<Client>>, is_answered: bool) {
        self.servers.store(Arc::new(servers));
        let vacant = if is_answered { 0 } else { self.vacant.load(Ordering::Relaxed).saturating_add(1) };
        self.vacant.store(vacant, Ordering::Relaxed);
    }

    /// Returns whether a server answers, or did so recently: the only server may be restarting.
    pub(super) fn may_answer(&self) -> bool {
        !self.servers.load().is_empty() || self.vacant.load(Ordering::Relaxed) < FAILED_POLLS_MAX
    }
}

/// Query that any replica may answer.
pub(super) struct Inquiry<'a> {
    pub(super) home: &'a ReplicaGroup,
    pub(super) out: &'a Outgoing,
    /// Kind of the call in the group's statistics.
    pub(super) kind: usize,
    /// Time origin of the clock of the replica group.
    pub(super) origin: Instant,
    /// Timeout of the query.
    pub(super) wait: Duration,
    /// Notification of finished polls, to wait for a returning server; `None` if the answer needs no server of this group.
    pub(super) looked: Option<&'a Notify>,
}

/// Error of a query, and the outcome of its last call.
struct Failure {
    error: Error,
    outcome: Outcome,
}

/// Answer, its server and its latency.
pub(super) type TimedAnswer<T> = (T, Arc<Client>, Duration);

impl Inquiry<'_> {
    fn now(&self) -> Micros {
        self.origin.elapsed().as_micros() as Micros
    }

    /// Queries one replica, and another if that one fails or is late. If no replica is reachable or ready, retries after the next
    /// poll of the servers until the timeout, or until all of them count as lost. `receive` decodes answers; a body that it finds
    /// `Corrupt` counts as no answer.
    ///
    /// # Errors
    /// The error of the last queried replica; `Unavailable` if there is none.
    pub(super) async fn ask<T>(&self, receive: impl Fn(Result<Bytes>) -> Result<T>) -> Result<TimedAnswer<T>> {
        let deadline = Instant::now() + self.wait;
        loop {
            let looked = self.looked.map(Notify::notified);
            let Failure { error, outcome } = match self.round(deadline, &receive).await {
                Ok(received) => return Ok(received),
                Err(failure) => failure,
            };
            let Some(looked) = looked.filter(|_| outcome == Outcome::Failed) else { return Err(error) };
            if timeout_at(deadline, looked).await.is_err() || !self.home.may_answer() {
                return Err(error);
            }
        }
    }

    /// Queries each replica once at most.
    async fn round<T>(
        &self,
        deadline: Instant,
        receive: &impl Fn(Result<Bytes>) -> Result<T>,
    ) -> std::result::Result<TimedAnswer<T>, Failure> {
        let start = Instant::now();
        let left = deadline.saturating_duration_since(start);
        let patience = start + left.mul_f64(SECOND_CALL_SHARE).min(SECOND_CALL_AFTER_MAX);
        let home = self.home;
        let mut attempts = FuturesUnordered::new();
        let mut requested: Vec<SocketAddr> = Vec::new();
        let mut failed: Vec<String> = Vec::new();
        let mut next = |is_first: bool| {
            let servers = home.servers();
            let addresses = servers.iter().map(|server| server.address());
            let among: Vec<SocketAddr> = addresses.filter(|address| !requested.contains(address)).collect();
            let mut group = locked(&home.group);
            let chosen = group.choose(&among, self.now())?;
            group.begin(chosen, is_first, self.now());
            drop(group);
            requested.push(chosen);
            let server = servers.iter().find(|server| server.address() == chosen)?.clone();
            let under_way = CallInFlight { inquiry: self, server, kind: self.kind, start: Instant::now(), patience };
            Some(self.attempt(under_way, receive, deadline))
        };
        attempts.push(next(true).ok_or_else(|| Failure {
            error: Error::unavailable("no known server has the version"),
            outcome: Outcome::Failed,
        })?);
        let has_others = home.servers().len() > 1;
        let hedge_after = has_others.then(|| locked(&home.group).hedge_after(self.kind)).flatten();
        let hedge_at = hedge_after.map(|after| start + Duration::from_micros(after));
        let mut hedge_at = hedge_at.filter(|at| *at < patience);
        let mut patience_at = has_others.then_some(patience);
        loop {
            let at = hedge_at.or(patience_at);
            let last = tokio::select! {
                Some(done) = attempts.next() => match done {
                    Err(failure) if is_absence(failure.error.kind()) => Some(failure),
                    answered => return answered,
                },
                () = sleep_until(at.unwrap_or(deadline)), if at.is_some() => None,
                // Another replica may be reachable again.
                () = self.looked(), if at.is_none() => match Instant::now() < patience {
                    true => continue,
                    false => None,
                },
            };
            let may = match (&last, hedge_at.take()) {
                // A rejection by one replica suggests that the others are busy too.
                (Some(failure), hedge) => {
                    hedge_at = hedge;
                    failure.outcome != Outcome::Refused || locked(&home.group).spend()
                }
                (None, Some(_)) => locked(&home.group).hedge(self.now()),
                (None, None) => {
                    patience_at = None;
                    locked(&home.group).has_room(self.now())
                }
            };
            let another = if may { next(false) } else { None };
            match (another, last) {
                (Some(attempt), last) => {
                    let why = if last.is_some() { "failed" } else { "late" };
                    failed.extend(last.map(|failure| failure.error.to_string()));
                    metrics::counter!("sterling_route_second_calls_total", "why" => why).increment(1);
                    attempts.push(attempt);
                }
                (None, Some(Failure { error, outcome })) if attempts.is_empty() => {
                    let error = if failed.is_empty() { error } else { error.within(failed.join("; ") + "; then") };
                    return Err(Failure { error, outcome });
                }
                (None, last) => failed.extend(last.map(|failure| failure.error.to_string())),
            }
        }
    }

    /// Waits for the next poll of the servers; forever if waiting is not worthwhile.
    async fn looked(&self) {
        match self.looked {
            Some(looked) => looked.notified().await,
            None => std::future::pending().await,
        }
    }

    async fn attempt<T>(
        &self,
        mut under_way: CallInFlight<'_>,
        receive: &impl Fn(Result<Bytes>) -> Result<T>,
        deadline: Instant,
    ) -> std::result::Result<TimedAnswer<T>, Failure> {
        let server = under_way.server.clone();
        let body = match server.call(self.out, deadline).await {
            Ok(body) => body,
            Err(error) => {
                tracing::debug!(server = %server.address(), %error, "server did not answer");
                let outcome = match error.kind() {
                    Kind::Overloaded => Outcome::Refused,
                    // A starting or ended server reports that it is not ready.
                    Kind::Unavailable | Kind::NotReady => Outcome::Failed,
                    Kind::DeadlineExceeded => Outcome::Late,
                    _ => Outcome::Answered,
                };
                under_way.end(outcome);
                let received = receive(Err(error)).err();
                let error = received.unwrap_or_else(|| Error::internal("a call ended without an answer or an error"));
                return Err(Failure { error, outcome });
            }
        };
        match receive(Ok(body)) {
            Err(error) if error.kind() == Kind::Corrupt => {
                under_way.end(Outcome::Failed);
                let error = Error::unavailable(format!("server {}: {error}", server.address()));
                Err(Failure { error, outcome: Outcome::Failed })
            }
            received => {
                let took = under_way.end(Outcome::Answered);
                let failure = |error| Failure { error, outcome: Outcome::Answered };
                received.map(|answer| (answer, server, took)).map_err(failure)
            }
        }
    }
}

/// Call in progress; its outcome is always reported to the group, also on drop.
struct CallInFlight<'a> {
    inquiry: &'a Inquiry<'a>,
    server: Arc<Client>,
    kind: usize,
    start: Instant,
    patience: Instant,
}

impl CallInFlight<'_> {
    fn end(&mut self, outcome: Outcome) -> Duration {
        let took = self.start.elapsed();
        let (id, now) = (self.server.address(), self.inquiry.now());
        locked(&self.inquiry.home.group).end(id, self.kind, (outcome, took.as_micros() as Micros), now);
        self.kind = usize::MAX;
        took
    }
}

impl Drop for CallInFlight<'_> {
    fn drop(&mut self) {
        if self.kind != usize::MAX {
            // A call that lasts longer than `patience` is late: another replica had to be queried.
            let is_late = Instant::now() >= self.patience;
            self.end(if is_late { Outcome::Late } else { Outcome::Left });
        }
    }
}
