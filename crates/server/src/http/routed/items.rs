//! Updates through a router: sends each item to its shard, and merges the shards' answers.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::HeaderValue;
use axum::http::request::Parts;
use axum::response::{IntoResponse as _, Response};
use futures_util::future::join_all;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use super::super::answer::{Outcome, Rejection, json, problem};
use super::super::call_id::CallId;
use super::super::content_type::BodyType;
use super::super::flow::flow_of;
use super::super::items::{CallHeaders, ITEMS_SENT};
use super::super::position::positions;
use super::app::RouterApp;
use super::passes::{reported, summed};
use crate::route::{ShardCall, ShardFailure, ShardServers};
use sterling_api::{
    DeleteRequest, DeleteResponse, FailedShard, PositionResponse, Problem, ShardPosition, UpdateResponse,
};
use sterling_core::error::{Error, Kind, Result};
use sterling_core::quota::Flow;
use sterling_core::request::Origin;
use sterling_core::units::ItemId;

/// Timeout of durable writes at a shard: slightly more than the timeout of the shard's server.
const WRITTEN: Duration = Duration::from_secs(12);
const JSON: &str = "application/json";

/// Upserts each item at its shard.
pub(super) async fn upsert(app: &RouterApp, model: String, request: Request) -> Outcome {
    let shards = app.fleet().writable(&model)?;
    let calls = Calls::of(&model, "upsert", (&request, &ITEMS_SENT), shards.count())?;
    let (count, sent, mut memory) = (shards.count(), calls.said.sent, app.bodies.memory());
    let body = app.bodies.read_any(request).await?;
    let divided = move |body: &[u8]| match sent {
        BodyType::Arrow => sterling_api::arrow_divided(body, count, &mut |bytes| memory.hold(bytes)),
        text => sterling_api::divided(body, text == BodyType::Lines, count),
    };
    let (parts, refused) = app.asides.prepare(body, false, divided).await?;
    let parts = parts.into_iter().enumerate().filter(|(_, (places, _))| !places.is_empty());
    let parts = parts.map(|(shard, (places, body))| calls.part(shard, places, body.into()));
    let said: Answers<UpdateResponse> = ask(&shards, parts).await;
    let mut made = UpdateResponse { model, refused, repeated: !said.answers.is_empty(), ..UpdateResponse::default() };
    let mut positions = vec![0; count];
    for (shard, places, answer) in &said.answers {
        positions[*shard] = answer.position;
        made.accepted += answer.accepted;
        made.repeated &= answer.repeated;
        for item in &answer.refused {
            let place = places.get(item.place).copied().unwrap_or(item.place);
            made.refused.push(sterling_api::RefusedItem { place, ..item.clone() });
        }
    }
    made.refused.sort_by_key(|item| item.place);
    (made.position, made.positions) = summed(positions);
    Ok(said.reply(|failed| UpdateResponse { failed, ..made }))
}

/// Deletes items at their shards.
pub(super) async fn delete(app: &RouterApp, model: String, request: Request) -> Outcome {
    let shards = app.fleet().writable(&model)?;
    let calls = Calls::of(&model, "delete", (&request, &[]), shards.count())?;
    let body = app.bodies.read(request).await?;
    let DeleteRequest { ids, dry_run, .. } = sterling_api::deletion(&body)?;
    let parts: Vec<Part> = match ids {
        // Each shard evaluates the filter on its own items.
        None => (0..shards.count()).map(|n| calls.part(n, Vec::new(), Bytes::copy_from_slice(&body))).collect(),
        Some(ids) => {
            let mut of_shards = vec![(Vec::new(), Vec::new()); shards.count()];
            for (place, id) in ids.into_iter().enumerate() {
                let (places, its) = &mut of_shards[shards.home(ItemId(id))];
                places.push(place);
                its.push(id);
            }
            let parts = of_shards.into_iter().enumerate().filter(|(_, (places, _))| !places.is_empty());
            let part = |(shard, (places, ids)): (usize, (Vec<usize>, Vec<i64>))| -> Result<Part> {
                let body = serde_json::to_vec(&DeleteRequest { ids: Some(ids), filter: None, dry_run });
                let body = body.map_err(|e| Error::internal(format!("cannot encode ids: {e}")))?;
                Ok(calls.part(shard, places, body.into()))
            };
            parts.map(part).collect::<Result<_>>()?
        }
    };
    let said: Answers<DeleteResponse> = ask(&shards, parts).await;
    let mut positions = vec![0; shards.count()];
    said.answers.iter().for_each(|(shard, _, answer)| positions[*shard] = answer.position);
    let answers = || said.answers.iter().map(|(.., answer)| answer);
    let deleted = answers().map(|answer| answer.deleted).sum();
    let matched = answers().map(|answer| answer.matched).sum();
    let repeated = !said.answers.is_empty() && answers().all(|answer| answer.repeated);
    let (position, positions) = summed(positions);
    let made = DeleteResponse { model, position, positions, deleted, matched, dry_run, repeated, failed: Vec::new() };
    Ok(said.reply(|failed| DeleteResponse { failed, ..made }))
}

/// Returns the positions of visible updates at every shard.
pub(super) async fn position(app: &RouterApp, model: &str, head: &Parts) -> Result<PositionResponse> {
    let shards = app.fleet().shards(model)?;
    let seen = positions(&head.uri, "min_position", shards.count())?;
    let origin = CallId::origin(&head.extensions);
    let part = |shard: usize| {
        let seen = seen.as_ref().map(|seen| format!("?min_position={}", seen[shard])).unwrap_or_default();
        let call = ShardCall {
            path: format!("/v1/models/{model}/items:position{seen}"),
            body: None,
            media_type: JSON,
            key: None,
            origin: origin.clone(),
            flow: flow_of(&head.extensions),
        };
        Part { shard, places: Vec::new(), call }
    };
    let said: Answers<PositionResponse> = ask(&shards, (0..shards.count()).map(part)).await;
    if let Some((failed, error)) = said.failed.into_iter().next() {
        return Err(error.within(format_args!("shard {}", failed.shard)));
    }
    let of_shards: Vec<ShardPosition> =
        said.answers.iter().map(|(shard, _, answer)| of_shard(*shard, answer)).collect();
    let (position, positions) = summed(of_shards.iter().map(|shard| shard.position).collect());
    Ok(PositionResponse {
        served: sterling_api::Served { position, positions, ..reported(model, shards.served()) },
        durable: of_shards.iter().map(|shard| shard.durable).min().unwrap_or(0),
        items: of_shards.iter().map(|shard| shard.items).sum(),
        fresh_items: of_shards.iter().map(|shard| shard.fresh_items).sum(),
        shards: if of_shards.len() > 1 { of_shards } else { Vec::new() },
    })
}

fn of_shard(shard: usize, answer: &PositionResponse) -> ShardPosition {
    let PositionResponse { served, durable, items, fresh_items, .. } = answer;
    ShardPosition {
        shard: shard as u32,
        position: served.position,
        durable: *durable,
        items: *items,
        fresh_items: *fresh_items,
    }
}

/// Parts of a caller's request that the calls to shards repeat.
struct Calls {
    path: String,
    said: CallHeaders,
    origin: Origin,
    flow: Flow,
    /// Positions that the caller expects, and those that must be visible first.
    expected: Option<Vec<u64>>,
    seen: Option<Vec<u64>>,
}

impl Calls {
    fn of(
        model: &str,
        verb: &str,
        (request, others): (&Request, &[BodyType]),
        shards: usize,
    ) -> Result<Self, Rejection> {
        let uri = request.uri();
        Ok(Calls {
            path: format!("/v1/models/{model}/items:{verb}"),
            said: CallHeaders::of(request, others)?,
            origin: CallId::origin(request.extensions()),
            flow: flow_of(request.extensions()),
            expected: positions(uri, "if_position", shards)?,
            seen: positions(uri, "min_position", shards)?,
        })
    }

    fn part(&self, shard: usize, places: Vec<usize>, body: Bytes) -> Part {
        let parameter = |name: &str, positions: &Option<Vec<u64>>| {
            let position = positions.as_ref()?.get(shard)?;
            Some(format!("{name}={position}"))
        };
        let parameters = [parameter("if_position", &self.expected), parameter("min_position", &self.seen)];
        let query: Vec<String> = parameters.into_iter().flatten().collect();
        let path = match query.is_empty() {
            true => self.path.clone(),
            false => format!("{}?{}", self.path, query.join("&")),
        };
        // Cannot fail: the key was read from a header.
        let key = self.said.key.as_deref().and_then(|key| HeaderValue::from_str(key).ok());
        // JSON lines are forwarded as JSON.
        let media_type = if self.said.sent == BodyType::Arrow { sterling_api::ARROW_STREAM } else { JSON };
        let (body, origin, flow) = (Some(body), self.origin.clone(), self.flow);
        Part { shard, places, call: ShardCall { path, body, media_type, key, origin, flow } }
    }
}

/// Call to one shard, with the indices of its items in the caller's body.
struct Part {
    shard: usize,
    places: Vec<usize>,
    call: ShardCall,
}

/// Answers of the shards, each with the indices of the items sent to it.
struct Answers<T> {
    answers: Vec<(usize, Vec<usize>, T)>,
    failed: Vec<(FailedShard, Error)>,
}

/// Sends the calls to all shards concurrently.
async fn ask<T: DeserializeOwned>(shards: &ShardServers<'_>, parts: impl IntoIterator<Item = Part>) -> Answers<T> {
    let deadline = Instant::now() + WRITTEN;
    let requested = parts.into_iter().map(|Part { shard, places, call }| async move {
        let answer = shards.ask(shard, call, deadline).await;
        let read = |body: Bytes| {
            let unread = |e| Error::unavailable(format!("the answer of a shard cannot be decoded by this router: {e}"));
            serde_json::from_slice(&body).map_err(|e| ShardFailure { error: unread(e), may_be_applied: true })
        };
        (shard, places, answer.and_then(read))
    });
    let mut all = Answers { answers: Vec::new(), failed: Vec::new() };
    for (shard, places, said) in join_all(requested).await {
        match said {
            Ok(answer) => all.answers.push((shard, places, answer)),
            Err(ShardFailure { error, may_be_applied }) => {
                let Problem { code, detail: reason, retryable, .. } = problem(&error);
                let shard = shard as u32;
                let failed =
                    FailedShard { shard, places, code, reason, retryable, may_be_applied, may_be_done: may_be_applied };
                all.failed.push((failed, error));
            }
        }
    }
    all
}

/// Problem, with the partial result of the call.
#[derive(Serialize)]
struct Partly<T> {
    #[serde(flatten)]
    problem: Problem,
    #[serde(flatten)]
    made: T,
}

impl<T> Answers<T> {
    /// Builds the reply from the answers and the failed shards; if any shard failed, the reply is a problem that contains both.
    fn reply<M: Serialize>(self, made: impl FnOnce(Vec<FailedShard>) -> M) -> Response {
        let (requested, done) = (self.answers.len() + self.failed.len(), self.answers.len());
        let (failed, errors): (Vec<FailedShard>, Vec<Error>) = self.failed.into_iter().unzip();
        let Some(first) = failed.first() else { return json(&made(failed)) };
        let (count, shard, reason) = (failed.len(), first.shard, &first.reason);
        let why =
            format!("{count} of {requested} shards did not apply their share of the call: shard {shard}: {reason}");
        let kinds: Vec<Kind> = errors.iter().map(Error::kind).collect();
        let is_one = done == 0 && kinds.iter().all(|kind| *kind == kinds[0]);
        let error = Error::new(if is_one { kinds[0] } else { Kind::Partial }, why);
        let partly = Partly { problem: Problem::from(&error), made: made(failed) };
        let mut response = Rejection::from(error).into_response();
        // Cannot fail: the value consists of texts and numbers.
        *response.body_mut() = Body::from(serde_json::to_vec(&partly).unwrap_or_default());
        response
    }
}
