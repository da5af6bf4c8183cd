//! A version over all of its shards, asked for one request: which replica, how long, and which one instead.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, sleep_until};

use super::choice::{Group, Micros, Outcome};
use super::client::{Client, Outgoing};
use super::editions::Edition;
use super::protocol::{Asked, PassCall, PassReply, Replied, Written, read, write};
use crate::error::{Error, Kind, Result};
use crate::gather::{Said, Sharded, is_absence};
use crate::request::{Priority, Request};
use crate::snapshot::shard_of;
use crate::units::ItemId;

/// The share of the time that is left after which a call that has no answer is sent to another replica, whatever the budget of hedges,
/// and how long that is at most.
const PATIENCE: f64 = 0.4;
const PATIENCE_MAX: Duration = Duration::from_secs(2);
/// Where an answer may do without some shards, the share of the time that is left for their candidates: the rest is for the results.
const SELECT_SHARE: f64 = 0.6;

/// The replicas of one shard, by their addresses.
pub(super) type Replicas = Mutex<Group<std::net::SocketAddr>>;

/// A shard of an edition: its servers, and what is known of how they answer.
#[derive(Clone)]
pub(super) struct Home {
    pub(super) servers: Vec<Arc<Client>>,
    pub(super) group: Arc<Replicas>,
}

/// What came with an answer of a shard.
#[derive(Clone, Debug)]
pub struct Beside {
    /// The tasks and columns of its items.
    pub rest: Written,
    /// How it came about, in JSON.
    pub explain: Option<String>,
    /// The position of the server's updates that the answer saw.
    pub position: u64,
    /// The server.
    pub server: std::net::SocketAddr,
    /// How long it took, from here.
    pub took: Duration,
}

/// Under which terms a request is asked.
#[derive(Clone, Debug)]
pub struct Conditions {
    /// When its answer is worth nothing any more.
    pub deadline: Instant,
    /// Who goes first where requests wait.
    pub priority: Priority,
    /// The share of the items that the answer must cover.
    pub min_coverage: f64,
    /// The position of its updates that each shard must see, where some are to be seen.
    pub positions: Option<Arc<[u64]>>,
}

/// One request's way to the shards of an edition.
pub(super) struct Asking<'a> {
    pub(super) edition: &'a Edition<Arc<Client>>,
    pub(super) homes: &'a [Home],
    pub(super) terms: Conditions,
    /// What clocks of groups count from.
    pub(super) origin: Instant,
    /// The shard that is asked first for what any can do.
    pub(super) turn: usize,
    /// Whether some shard had the version no more.
    pub(super) is_gone: AtomicBool,
}

/// What a group calls a request.
fn kind(request: &Asked) -> usize {
    match request {
        Asked::Item(_) | Asked::Model => 3,
        Asked::Pass(request) => match &**request {
            Request::Select(_) | Request::Retrieve(_) => 0,
            Request::Rerank(_) | Request::Rank(_) => 1,
            Request::Embed(_) => 2,
        },
    }
}

/// A call as it goes to any replica.
#[derive(Clone, Debug)]
pub(super) struct Call {
    /// Why there is none, where there is none.
    out: std::result::Result<Outgoing, Arc<str>>,
    kind: usize,
    may_be_missing: bool,
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Asking<'_> {
    pub(super) fn write(&self, asked: Asked) -> Call {
        let (kind, may_be_missing) =
            (kind(&asked), matches!(&asked, Asked::Pass(request) if matches!(**request, Request::Select(_))));
        let path = format!("/v1/models/{}/versions/{}:pass", self.edition.model, self.edition.version);
        let body = write(&PassCall { priority: self.terms.priority, asked });
        let out = body.map(|body| Outgoing::pass(path, Some(Bytes::from(body))));
        Call { out: out.map_err(|e| e.to_string().into()), kind, may_be_missing }
    }

    fn now(&self) -> Micros {
        self.origin.elapsed().as_micros() as Micros
    }

    /// Asks one shard for anything: one replica, another where that one fails or is late.
    pub(super) async fn reply(&self, shard: usize, call: &Call) -> Result<(PassReply, Arc<Client>, Duration)> {
        let home = &self.homes[shard];
        let out = call.out.as_ref().map_err(|why| Error::internal(why.to_string()))?;
        let position = self.terms.positions.as_ref().and_then(|positions| positions.get(shard).copied());
        let seeing = position.filter(|position| *position > 0).map(|_| Outgoing { position, ..out.clone() });
        let out = seeing.as_ref().unwrap_or(out);
        let start = Instant::now();
        let left = self.terms.deadline.saturating_duration_since(start);
        let is_partial = call.may_be_missing && self.terms.min_coverage < 1.0;
        let left = if is_partial { left.mul_f64(SELECT_SHARE) } else { left };
        let (deadline, patience) = (start + left, start + left.mul_f64(PATIENCE).min(PATIENCE_MAX));
        let mut rest: Vec<Arc<Client>> = home.servers.clone();
        let mut attempts = FuturesUnordered::new();
        let mut next = |is_first: bool| {
            let among: Vec<_> = rest.iter().map(|server| server.address()).collect();
            let mut group = locked(&home.group);
            let chosen = group.choose(&among, self.now())?;
            group.begin(chosen, is_first, self.now());
            drop(group);
            let server = rest.swap_remove(among.iter().position(|address| *address == chosen)?);
            let under_way =
                UnderWay { asking: self, group: &home.group, server, kind: call.kind, start: Instant::now(), patience };
            Some(self.attempt(under_way, shard, out, deadline))
        };
        let none = || Error::unavailable(format!("shard {shard} of model `{}` has no server", self.edition.model));
        attempts.push(next(true).ok_or_else(none)?);
        let hedge_after = locked(&home.group).hedge_after(call.kind).map(Duration::from_micros);
        let mut hedge_at = hedge_after.map(|after| start + after).filter(|at| *at < patience);
        let mut patience_at = Some(patience);
        loop {
            let at = hedge_at.or(patience_at);
            let last = tokio::select! {
                Some(done) = attempts.next() => match done {
                    Err(error) if is_absence(error.kind()) => Some(error),
                    answered => return answered,
                },
                () = sleep_until(at.unwrap_or(deadline)), if at.is_some() => None,
            };
            let may = match (&last, hedge_at.take()) {
                // A refusal by one is a sign that the others have much to do as well.
                (Some(error), hedge) => {
                    hedge_at = hedge;
                    error.kind() != Kind::Overloaded || locked(&home.group).spend()
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
                    metrics::counter!("sterling_route_second_calls_total", "why" => why).increment(1);
                    attempts.push(attempt);
                }
                (None, Some(error)) if attempts.is_empty() => return Err(error),
                (None, _) => {}
            }
        }
    }

    async fn attempt(
        &self,
        mut under_way: UnderWay<'_>,
        shard: usize,
        out: &Outgoing,
        deadline: Instant,
    ) -> Result<(PassReply, Arc<Client>, Duration)> {
        let server = under_way.server.clone();
        let body = match server.call(out, deadline).await {
            Ok(body) => body,
            Err(error) => {
                under_way.end(match error.kind() {
                    Kind::Overloaded => Outcome::Refused,
                    Kind::Unavailable => Outcome::Failed,
                    Kind::DeadlineExceeded => Outcome::Late,
                    _ => Outcome::Answered,
                });
                // It had the version when it was looked at last; nothing else in a call may be missing.
                return Err(match error.kind() {
                    Kind::NotFound | Kind::NotReady => self.gone(shard, &error.to_string()),
                    _ => error,
                });
            }
        };
        let reply: PassReply = read(&body).map_err(|e| {
            under_way.end(Outcome::Failed);
            Error::unavailable(format!("server {}: {e}", server.address()))
        })?;
        let took = under_way.end(Outcome::Answered);
        let said = (reply.version, &*reply.digest, reply.shard as usize);
        if said != (self.edition.version, &*self.edition.digest, shard) {
            let (version, digest) = (self.edition.version, &self.edition.digest);
            return Err(
                self.gone(shard, &format!("it answered of {said:?}, expected ({version}, {digest:?}, {shard})"))
            );
        }
        Ok((reply, server, took))
    }

    /// A replica that has the version no more: another one may.
    fn gone(&self, shard: usize, what: &str) -> Error {
        self.is_gone.store(true, Ordering::Relaxed);
        let (model, version) = (&self.edition.model, self.edition.version);
        Error::unavailable(format!(
            "version {version} of model `{model}` is gone from a server of shard {shard}: {what}"
        ))
    }
}

/// A call under way, which its group is told the end of, whatever that is.
struct UnderWay<'a> {
    asking: &'a Asking<'a>,
    group: &'a Replicas,
    server: Arc<Client>,
    kind: usize,
    start: Instant,
    patience: Instant,
}

impl UnderWay<'_> {
    fn end(&mut self, outcome: Outcome) -> Duration {
        let took = self.start.elapsed();
        let (id, now) = (self.server.address(), self.asking.now());
        locked(self.group).end(id, self.kind, (outcome, took.as_micros() as Micros), now);
        self.kind = usize::MAX;
        took
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if self.kind != usize::MAX {
            // Another had to be asked, for this one did not answer.
            let is_late = Instant::now() >= self.patience;
            self.end(if is_late { Outcome::Late } else { Outcome::Left });
        }
    }
}

impl Sharded for Asking<'_> {
    type Call = Call;
    type Beside = Beside;

    fn items(&self) -> &[usize] {
        &self.edition.items
    }

    fn home(&self, item: ItemId) -> usize {
        shard_of(item, self.edition.items.len() as u32) as usize
    }

    fn turn(&self) -> usize {
        self.turn
    }

    fn call(&self, request: Request) -> Call {
        self.write(Asked::Pass(Box::new(request)))
    }

    async fn ask(&self, shard: usize, call: Call) -> Result<Said<Beside>> {
        let (reply, server, took) = self.reply(shard, &call).await?;
        let (position, server) = (reply.position, server.address());
        match reply.given {
            Replied::Pass { content, degraded_rows, rest, explain } => {
                Ok(Said { content, degraded_rows, beside: Beside { rest, explain, position, server, took } })
            }
            Replied::Text(_) => Err(Error::internal("a text came in place of an answer")),
        }
    }
}
