//! Queries the shards of a version for one request.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use axum::body::Bytes;
use axum::http::HeaderValue;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::client::{Client, Outgoing};
use super::editions::Edition;
use super::inquiry::{Inquiry, ReplicaGroup, TimedAnswer};
use super::protocol::{
    ANY_VIEW, BACKGROUND_HEADER, Operation, POSITION_HEADER, PassCall, PassReply, Replied, VIEW_HEADER, ViewPosition,
    client_header, read_reply, write,
};
use crate::gather::{ShardAnswer, Sharded};
use sterling_api::ItemJson;
use sterling_core::error::{Error, Kind, Result};
use sterling_core::items::shard_of;
use sterling_core::locks::locked;
use sterling_core::quota::{Flow, Memory};
use sterling_core::request::{Origin, Priority, Request};
use sterling_core::units::ItemId;

/// Share of the remaining time for selecting candidates if an answer may omit shards; the rest is for reranking.
const SELECT_SHARE: f64 = 0.6;

/// Accompanying data of a shard's answer.
#[derive(Clone, Debug)]
pub struct Extra {
    /// Tasks and columns of the shard's items.
    pub rest: ItemJson,
    /// Explanation in JSON.
    pub explain: Option<String>,
    /// View that answered.
    pub view: ViewPosition,
    /// Address of the server.
    pub server: std::net::SocketAddr,
    /// Latency, measured at the router.
    pub took: Duration,
}

/// Conditions of a request.
#[derive(Clone, Debug)]
pub struct Conditions {
    /// Deadline of the answer.
    pub deadline: Instant,
    /// Priority class in queues.
    pub priority: Priority,
    /// True if no caller waits for the answer, so that it is preempted by requests of callers.
    pub is_background: bool,
    /// Least share of the items that the answer must cover.
    pub min_coverage: f64,
    /// Update position per shard that must be visible, if required.
    pub positions: Option<Arc<[u64]>>,
    /// View of each shard for a page; empty for a first page. Shards keep the views that they answer with.
    pub views: Option<Arc<[ViewPosition]>>,
    /// Memory reservation of the answer, charged for what shards send; `None` for small answers.
    pub memory: Option<Arc<Memory>>,
    /// Id and trace for the calls to shards.
    pub origin: Origin,
    /// Client for whose share of the shards the request counts; the default counts for the router itself.
    pub flow: Flow,
}

impl Conditions {
    /// Conditions of an interactive call over all items, at any position.
    pub fn until(deadline: Instant) -> Self {
        Conditions {
            deadline,
            priority: Priority::default(),
            is_background: false,
            min_coverage: 1.0,
            positions: None,
            views: None,
            memory: None,
            origin: Origin::default(),
            flow: Flow::default(),
        }
    }
}

/// Request in progress at the shards of an edition.
pub(super) struct ShardedRequest<'a> {
    pub(super) edition: &'a Edition<Arc<Client>>,
    pub(super) homes: &'a [ReplicaGroup],
    pub(super) terms: Conditions,
    /// Time origin of the clocks of the replica groups.
    pub(super) origin: Instant,
    /// Notification of finished polls of the servers.
    pub(super) looked: &'a Notify,
    /// Shard to try first for work that any shard can do.
    pub(super) turn: usize,
    /// True if some shard no longer had the version.
    pub(super) is_gone: AtomicBool,
    /// View per shard that all rounds of a page use: the view of the shard's first answer.
    pub(super) views: Option<Mutex<BTreeMap<usize, ViewPosition>>>,
    /// Reason why a replica could not answer with the view of the page.
    pub(super) past: OnceLock<String>,
}

/// Kind of user embeddings in the group's statistics.
const EMBED: usize = 2;

/// Returns the kind of a request in the group's statistics.
fn kind(request: &Operation) -> usize {
    match request {
        Operation::Item(_) | Operation::Model => 3,
        Operation::Pass(request) => match &**request {
            Request::Select(_) | Request::Retrieve(_) => 0,
            Request::Rerank(_) | Request::Rank(_) => 1,
            Request::Embed(_) => EMBED,
        },
    }
}

/// Encoded call, for any replica.
#[derive(Clone, Debug)]
pub(super) struct Call {
    /// The encoded call, or why it could not be encoded.
    out: std::result::Result<Outgoing, Arc<str>>,
    kind: usize,
    may_be_missing: bool,
}

impl ShardedRequest<'_> {
    pub(super) fn write(&self, asked: Operation) -> Call {
        let (kind, may_be_missing) =
            (kind(&asked), matches!(&asked, Operation::Pass(request) if matches!(**request, Request::Select(_))));
        let path = format!("/v1/models/{}/versions/{}:pass", self.edition.model, self.edition.version);
        let body = write(&PassCall { priority: self.terms.priority, asked });
        let out = body.map(|body| Outgoing::pass(path, Some(Bytes::from(body))));
        Call { out: out.map_err(|e| e.to_string().into()), kind, may_be_missing }
    }

    /// Queries one shard: one replica, and another if that one fails or is late.
    pub(super) async fn reply(&self, shard: usize, call: &Call) -> Result<TimedAnswer<PassReply>> {
        let home = &self.homes[shard];
        let is_partial = self.terms.min_coverage < 1.0;
        // Any shard can embed a user.
        let looked = Some(self.looked).filter(|_| !is_partial && (call.kind != EMBED || self.homes.len() == 1));
        if home.servers().is_empty() && !(looked.is_some() && home.may_answer()) {
            return Err(Error::unavailable(format!("shard {shard} of model `{}` has no server", self.edition.model)));
        }
        let out = call.out.as_ref().map_err(|why| Error::internal(why.to_string()))?;
        let (memory, origin) = (self.terms.memory.clone(), self.terms.origin.clone());
        let out = &Outgoing { headers: self.headers(shard)?, memory, origin, ..out.clone() };
        let left = self.terms.deadline.saturating_duration_since(Instant::now());
        let wait = if is_partial && call.may_be_missing { left.mul_f64(SELECT_SHARE) } else { left };
        Inquiry { home, out, kind: call.kind, origin: self.origin, wait, looked }
            .ask(|reported| self.received(shard, reported))
            .await
    }

    /// Returns the headers of a call to a shard.
    fn headers(&self, shard: usize) -> Result<Vec<(&'static str, HeaderValue)>> {
        let background = self.terms.is_background.then(|| (BACKGROUND_HEADER, HeaderValue::from_static("1")));
        Ok(self.sees(shard)?.into_iter().chain(background).chain(client_header(self.terms.flow)).collect())
    }

    /// Returns the headers with the updates that the answer must include.
    fn sees(&self, shard: usize) -> Result<Vec<(&'static str, HeaderValue)>> {
        let position = self.terms.positions.as_ref().and_then(|positions| positions.get(shard).copied());
        let position = position.filter(|position| *position > 0).map(|position| (POSITION_HEADER, position.into()));
        let Some(views) = &self.views else { return Ok(position.into_iter().collect()) };
        let view = locked(views).get(&shard).copied();
        Ok(match view {
            Some(view) => {
                let value = HeaderValue::try_from(view.to_string());
                vec![(VIEW_HEADER, value.map_err(|e| Error::internal(format!("view {view}: {e}")))?)]
            }
            None => position.into_iter().chain([(VIEW_HEADER, HeaderValue::from_static(ANY_VIEW))]).collect(),
        })
    }

    /// Decodes an answer, and checks that it is of the requested version.
    fn received(&self, shard: usize, reported: Result<Bytes>) -> Result<PassReply> {
        let body = reported.map_err(|error| match error.kind() {
            // The version is no longer at the server, which had it at the last poll; nothing else that a call names can be
            // missing.
            Kind::NotFound | Kind::NotReady => self.gone(shard, &error.to_string()),
            // Another replica may still have the view.
            Kind::Gone => {
                let why = self.past.get_or_init(|| error.to_string());
                Error::unavailable(why.clone())
            }
            _ => error,
        })?;
        let reply = read_reply(body).map_err(|e| Error::corrupt(e.to_string()))?;
        let reported = (reply.version, &*reply.digest, reply.shard as usize);
        if reported != (self.edition.version, &*self.edition.digest, shard) {
            let (version, digest) = (self.edition.version, &self.edition.digest);
            return Err(self.gone(
                shard,
                &format!(
                    "got an answer of (version, digest, shard) {reported:?}, expected ({version}, {digest:?}, {shard})"
                ),
            ));
        }
        Ok(reply)
    }

    /// Records that a replica no longer has the version; another replica may have it.
    fn gone(&self, shard: usize, what: &str) -> Error {
        self.is_gone.store(true, Ordering::Relaxed);
        let (model, version) = (&self.edition.model, self.edition.version);
        Error::unavailable(format!(
            "version {version} of model `{model}` is no longer at a server of shard {shard}: {what}"
        ))
    }
}

impl Sharded for ShardedRequest<'_> {
    type Call = Call;
    type Extra = Extra;

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
        self.write(Operation::Pass(Box::new(request)))
    }

    async fn ask(&self, shard: usize, call: Call) -> Result<ShardAnswer<Extra>> {
        let (reply, server, took) = self.reply(shard, &call).await?;
        let (view, server) = (reply.view, server.address());
        if let Some(views) = &self.views {
            locked(views).entry(shard).or_insert(view);
        }
        match reply.given {
            Replied::Pass { content, degraded_rows, rest, explain } => {
                Ok(ShardAnswer { content, degraded_rows, beside: Extra { rest, explain, view, server, took } })
            }
            Replied::Text(_) => Err(Error::internal("a shard sent a text, expected results")),
        }
    }
}
