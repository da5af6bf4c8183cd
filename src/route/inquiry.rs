//! One question to the replicas of a shard or of a host: which of them is asked, how long, and which one instead.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, sleep_until};

use super::choice::{Group, Micros, Outcome};
use super::client::{Client, Outgoing};
use crate::error::{Error, Kind, Result};
use crate::gather::is_absence;
use crate::locks::locked;

/// The share of the time that is left after which a call that has no answer is sent to another replica, whatever the budget of hedges,
/// and how long that is at most.
const PATIENCE: f64 = 0.4;
const PATIENCE_MAX: Duration = Duration::from_secs(2);

/// The replicas of one shard or host, by their addresses.
pub(super) type Replicas = Mutex<Group<SocketAddr>>;

/// Those who hold the same: their servers, and what is known of how they answer.
#[derive(Clone)]
pub(super) struct Home {
    pub(super) servers: Vec<Arc<Client>>,
    pub(super) group: Arc<Replicas>,
}

/// A question, as it goes to any replica.
pub(super) struct Inquiry<'a> {
    pub(super) home: &'a Home,
    pub(super) out: &'a Outgoing,
    /// What the group calls it.
    pub(super) kind: usize,
    /// What clocks of groups count from.
    pub(super) origin: Instant,
    /// How long an answer is worth waiting for.
    pub(super) wait: Duration,
}

/// An answer, who gave it, and how long that took.
pub(super) type Heard<T> = (T, Arc<Client>, Duration);

impl Inquiry<'_> {
    fn now(&self) -> Micros {
        self.origin.elapsed().as_micros() as Micros
    }

    /// Asks one replica, and another where that one fails or is late. `hear` makes an answer of what a replica said; a body that it finds
    /// `Corrupt` counts as none.
    ///
    /// # Errors
    /// Those of the last replica that was asked; `Unavailable` where there is none.
    pub(super) async fn ask<T>(&self, hear: impl Fn(Result<Bytes>) -> Result<T>) -> Result<Heard<T>> {
        let start = Instant::now();
        let (deadline, patience) = (start + self.wait, start + self.wait.mul_f64(PATIENCE).min(PATIENCE_MAX));
        let home = self.home;
        let mut rest: Vec<Arc<Client>> = home.servers.clone();
        let mut attempts = FuturesUnordered::new();
        let mut next = |is_first: bool| {
            let among: Vec<_> = rest.iter().map(|server| server.address()).collect();
            let mut group = locked(&home.group);
            let chosen = group.choose(&among, self.now())?;
            group.begin(chosen, is_first, self.now());
            drop(group);
            let server = rest.swap_remove(among.iter().position(|address| *address == chosen)?);
            let under_way = UnderWay { inquiry: self, server, kind: self.kind, start: Instant::now(), patience };
            Some(self.attempt(under_way, &hear, deadline))
        };
        attempts.push(next(true).ok_or_else(|| Error::unavailable("no server is known to have it"))?);
        let has_others = home.servers.len() > 1;
        let hedge_after = has_others.then(|| locked(&home.group).hedge_after(self.kind)).flatten();
        let hedge_at = hedge_after.map(|after| start + Duration::from_micros(after));
        let mut hedge_at = hedge_at.filter(|at| *at < patience);
        let mut patience_at = has_others.then_some(patience);
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

    async fn attempt<T>(
        &self,
        mut under_way: UnderWay<'_>,
        hear: &impl Fn(Result<Bytes>) -> Result<T>,
        deadline: Instant,
    ) -> Result<Heard<T>> {
        let server = under_way.server.clone();
        let body = match server.call(self.out, deadline).await {
            Ok(body) => body,
            Err(error) => {
                under_way.end(match error.kind() {
                    Kind::Overloaded => Outcome::Refused,
                    Kind::Unavailable => Outcome::Failed,
                    Kind::DeadlineExceeded => Outcome::Late,
                    _ => Outcome::Answered,
                });
                return Err(match hear(Err(error)) {
                    Err(error) => error,
                    Ok(_) => Error::internal("an answer was made of none"),
                });
            }
        };
        match hear(Ok(body)) {
            Err(error) if error.kind() == Kind::Corrupt => {
                under_way.end(Outcome::Failed);
                Err(Error::unavailable(format!("server {}: {error}", server.address())))
            }
            heard => {
                let took = under_way.end(Outcome::Answered);
                heard.map(|answer| (answer, server, took))
            }
        }
    }
}

/// A call under way, which its group is told the end of, whatever that is.
struct UnderWay<'a> {
    inquiry: &'a Inquiry<'a>,
    server: Arc<Client>,
    kind: usize,
    start: Instant,
    patience: Instant,
}

impl UnderWay<'_> {
    fn end(&mut self, outcome: Outcome) -> Duration {
        let took = self.start.elapsed();
        let (id, now) = (self.server.address(), self.inquiry.now());
        locked(&self.inquiry.home.group).end(id, self.kind, (outcome, took.as_micros() as Micros), now);
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
