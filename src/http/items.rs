//! The calls that change items, and those that tell of them.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::Uri;
use tokio::sync::oneshot;
use xxhash_rust::xxh3::xxh3_64;

use super::answer::{Outcome, Refusal, json};
use super::app::App;
use super::parameters::number;
use super::paths::Names;
use super::position::{reached, seen};
use super::sent::Sent;
use super::wire::{
    self, DeleteRequest, DeleteResponse, ItemResponse, MergeResponse, PositionResponse, Problem, RefusedItem,
    UpdateResponse, UpsertRequest,
};
use crate::error::{Error, Result};
use crate::fresh::{Call, Feed, Update};
use crate::limits::{EXCLUDE_MAX, FRESH_BYTES, FRESH_ITEMS};
use crate::registry::Which;
use crate::units::ItemId;
use crate::view::View;

/// Longest idempotency key, in bytes.
const KEY_BYTES_MAX: usize = 128;
/// How long a merge waits until what it is to hold is seen: it takes long itself.
const MERGE_WAIT: Duration = Duration::from_secs(60);
const KEY: &str = "idempotency-key";
/// What items may be written in beside JSON.
pub(super) const ITEMS_SENT: [Sent; 2] = [Sent::Lines, Sent::Arrow];

/// What a call says beside its body.
pub(super) struct Said {
    /// Its idempotency key.
    pub(super) key: Option<String>,
    /// What its body is written in.
    pub(super) sent: Sent,
}

impl Said {
    /// What a call says whose body is JSON or one of `others`.
    pub(super) fn of(request: &Request, others: &[Sent]) -> Result<Self, Refusal> {
        let key = request.headers().get(KEY).map(|key| key.to_str().unwrap_or_default().to_owned());
        if key.as_ref().is_some_and(|key| key.is_empty() || key.len() > KEY_BYTES_MAX) {
            return Err(Error::invalid(format!("{KEY}: expected 1 to {KEY_BYTES_MAX} visible characters")).into());
        }
        Ok(Said { key, sent: Sent::of(request.headers(), others)? })
    }
}

/// Put items, or change some of their attributes.
#[utoipa::path(post, path = "/v1/models/{model}/items:upsert", tag = "items",
    params(("model" = String, Path, description = "The model's name"),
        ("if_position" = Option<u64>, Query, description = "Refuses the call where the last update has another position."),
        ("min_position" = Option<u64>, Query, description = "Items are looked up for changes once the updates up to this position are seen."),
        ("idempotency-key" = Option<String>, Header, description = "A repeated call with one key happens once.")),
    request_body(content((inline(UpsertRequest) = "application/json"), (String = "application/x-ndjson"), (Vec<u8> = "application/vnd.apache.arrow.stream"))),
    responses((status = 200, body = UpdateResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn upsert(State(app): State<Arc<App>>, Names(model): Names<String>, request: Request) -> Outcome {
    let loaded = app.registry.get(&model, Which::Active)?;
    let (feed, said) = (app.feed(&loaded)?, Said::of(&request, &ITEMS_SENT)?);
    let expected = number(request.uri(), "if_position")?;
    let view = seen(&app, &loaded, request.uri()).await?;
    let body = app.bodies.read_any(request).await?;
    let (sent, mut memory) = (said.sent, app.bodies.memory());
    if view.fullness() >= 1.0 {
        let (items, bytes) = (view.fresh_items(), view.bytes_beside(|_| false));
        return Err(Error::no_space(format!(
            "model `{model}`: {items} items and {bytes} bytes lie beside the snapshot, expected fewer than {FRESH_ITEMS} and {FRESH_BYTES}, or than it has itself: merge them, or publish a version with them in it"
        ))
        .into());
    }
    let checked = move |body: &[u8]| {
        let (mut updates, mut refused, mut ids) = (Vec::new(), Vec::new(), BTreeSet::new());
        let items = match sent {
            Sent::Arrow => wire::arrow_upserts(body, &mut |bytes| memory.hold(bytes))?,
            text => wire::upserts(body, text == Sent::Lines)?,
        };
        for (place, item) in items.into_iter().enumerate() {
            match item.and_then(|item| item.checked(&view, &mut ids)) {
                Ok(update) => updates.push(update),
                Err(wrong) => {
                    refused.push(RefusedItem { place, id: wrong.id, field: wrong.field, reason: wrong.reason })
                }
            }
        }
        Ok((updates, refused, xxh3_64(body)))
    };
    let (updates, refused, digest) = app.asides.prepare(body, checked).await?;
    let (made, repeated) = write(&feed, updates, digest, (said.key, expected)).await?;
    let accepted = made.count as usize;
    Ok(json(&UpdateResponse {
        model,
        position: made.position,
        accepted,
        refused,
        repeated,
        ..UpdateResponse::default()
    }))
}

/// Delete items.
#[utoipa::path(post, path = "/v1/models/{model}/items:delete", tag = "items",
    params(("model" = String, Path, description = "The model's name"),
        ("if_position" = Option<u64>, Query, description = "Refuses the call where the last update has another position."),
        ("min_position" = Option<u64>, Query, description = "What passes the filter is judged once the updates up to this position are seen."),
        ("idempotency-key" = Option<String>, Header, description = "A repeated call with one key happens once.")),
    request_body = DeleteRequest,
    responses((status = 200, body = DeleteResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn delete(State(app): State<Arc<App>>, Names(model): Names<String>, request: Request) -> Outcome {
    let loaded = app.registry.get(&model, Which::Active)?;
    let (feed, said) = (app.feed(&loaded)?, Said::of(&request, &[])?);
    let expected = number(request.uri(), "if_position")?;
    let view = seen(&app, &loaded, request.uri()).await?;
    let body = app.bodies.read(request).await?;
    let digest = xxh3_64(&body);
    let request = wire::deletion(&body)?;
    let (dry_run, position) = (request.dry_run, view.position());
    let ids = app.asides.run(move || named(&view, request)).await?;
    if dry_run {
        return Ok(json(&DeleteResponse { model, position, deleted: ids.len(), dry_run, ..DeleteResponse::default() }));
    }
    let updates = ids.into_iter().map(|id| Update::Delete { id: id.0 }).collect();
    let (made, _) = write(&feed, updates, digest, (said.key, expected)).await?;
    Ok(json(&DeleteResponse {
        model,
        position: made.position,
        deleted: made.count as usize,
        dry_run,
        ..DeleteResponse::default()
    }))
}

/// The items that a deletion means and that are there.
fn named(view: &View, request: DeleteRequest) -> Result<Vec<ItemId>> {
    match (request.ids, request.filter) {
        (Some(ids), _) => {
            let ids: BTreeSet<i64> = ids.into_iter().collect();
            Ok(ids.into_iter().map(ItemId).filter(|&id| view.slot(id).is_some()).collect())
        }
        (None, filter) => {
            let found = view.matching(&filter.unwrap_or_default())?;
            match found.len() {
                0..=EXCLUDE_MAX => Ok(found),
                many => Err(Error::too_costly(format!("filter: {many} items, expected at most {EXCLUDE_MAX} a call"))),
            }
        }
    }
}

/// Makes updates durable. Returns what came of the call, and whether it had been made before.
async fn write(
    feed: &Arc<Feed>,
    mut updates: Vec<Update>,
    digest: u64,
    (key, expected): (Option<String>, Option<u64>),
) -> Result<(Call, bool)> {
    let count = updates.len() as u32;
    if let Some(key) = &key {
        if let Some(made) = feed.begin(key, digest)? {
            return Ok((made, true));
        }
        updates.push(Update::Call { key: key.clone(), digest, count });
    }
    let (tell, told) = oneshot::channel();
    // The journal tells the feed even where the client has left meanwhile.
    let weak: Weak<Feed> = Arc::downgrade(feed);
    let done = Box::new(move |result: Result<std::ops::Range<u64>>| {
        let made = result.map(|range| Call { digest, count, position: range.end - 1 });
        if let (Some(key), Some(feed)) = (key, weak.upgrade()) {
            feed.end(&key, made.as_ref().ok().cloned());
        }
        // Nobody may wait any more.
        let _ = tell.send(made);
    });
    feed.append(&updates, expected, done);
    let made = told.await.map_err(|_| Error::internal("the journal ended without an answer"))??;
    Ok((made, false))
}

/// Merge the updates into a version that answers in the place of the active one: those that were durable when it was asked for at least.
#[utoipa::path(post, path = "/v1/models/{model}/items:merge", tag = "items",
    params(("model" = String, Path, description = "The model's name"),
        ("min_position" = Option<u64>, Query, description = "Merges the updates up to this position at least, in place of those that are durable.")),
    responses((status = 200, body = MergeResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn merge(State(app): State<Arc<App>>, Names(model): Names<String>, uri: Uri) -> Outcome {
    let loaded = app.registry.get(&model, Which::Active)?;
    let feed = app.feed(&loaded)?;
    let merges = app.merges.as_ref().ok_or_else(|| Error::unsupported("this server merges no updates"))?;
    // What is merged is what is seen, and an update is seen a moment after it was acknowledged.
    let position = number(&uri, "min_position")?.unwrap_or_else(|| feed.last());
    reached(&app, &loaded, position, MERGE_WAIT).await?;
    let (tell, told) = oneshot::channel();
    merges.ask(
        &model,
        Box::new(move |made| {
            // Nobody may wait any more.
            let _ = tell.send(made);
        }),
    );
    let made = told.await.map_err(|_| Error::internal("the merge ended without an answer"))??;
    Ok(json(&MergeResponse { model, version: made.version, position: made.position, items: made.items }))
}

/// An item as it is.
#[utoipa::path(get, path = "/v1/models/{model}/items/{id}", tag = "items",
    params(("model" = String, Path, description = "The model's name"), ("id" = i64, Path),
        ("min_position" = Option<u64>, Query, description = "Waits until the updates up to this position are seen.")),
    responses((status = 200, body = ItemResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn item(State(app): State<Arc<App>>, Names((model, id)): Names<(String, i64)>, uri: Uri) -> Outcome {
    let loaded = app.registry.get(&model, Which::Active)?;
    let view = seen(&app, &loaded, &uri).await?;
    let slot = view.slot(ItemId(id)).ok_or_else(|| {
        Error::not_found(format!("model `{model}` holds no item {id} at position {}", view.position()))
    })?;
    Ok(json(&ItemResponse { served: app.served(&loaded, &view), id, attributes: wire::attributes(&view, slot) }))
}

/// How far updates are seen.
#[utoipa::path(get, path = "/v1/models/{model}/items:position", tag = "items",
    params(("model" = String, Path, description = "The model's name"),
        ("min_position" = Option<u64>, Query, description = "Waits until the updates up to this position are seen.")),
    responses((status = 200, body = PositionResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn position(State(app): State<Arc<App>>, Names(model): Names<String>, uri: Uri) -> Outcome {
    let loaded = app.registry.get(&model, Which::Active)?;
    let durable = app.feed(&loaded)?.last();
    let view = seen(&app, &loaded, &uri).await?;
    let (items, fresh_items) = (view.items(), view.fresh_items());
    Ok(json(&PositionResponse { served: app.served(&loaded, &view), durable, items, fresh_items, shards: Vec::new() }))
}
