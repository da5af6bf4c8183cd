//! Calls that change and read items.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::Uri;
use tokio::sync::oneshot;
use xxhash_rust::xxh3::xxh3_64;

use super::answer::{Outcome, Rejection, json};
use super::app::App;
use super::bodies::BodyMemory;
use super::content_type::BodyType;
use super::parameters::number;
use super::paths::Names;
use super::position::{reached, seen};
use super::retriever::Retriever;
use sterling_api::{
    DeleteRequest, DeleteResponse, ItemResponse, MergeResponse, PositionResponse, Problem, RefusedItem, UpdateResponse,
    UpsertRequest,
};
use sterling_core::error::{Error, Result};
use sterling_core::items::InvalidItem;
use sterling_core::limits::{EXCLUDE_MAX, FRESH_BYTES, FRESH_ITEMS};
use sterling_core::request::VersionSelector;
use sterling_core::units::ItemId;
use sterling_serving::fresh::{Call, CallAnswer, ModelUpdates, Update, UpdateRejection, unscorable, update_of};
use sterling_serving::registry::Loaded;
use sterling_serving::view::View;

/// Longest idempotency key, in bytes.
const KEY_BYTES_MAX: usize = 128;
/// Longest wait until the updates to be merged are visible; a merge itself takes long.
const MERGE_WAIT: Duration = Duration::from_secs(60);
const KEY: &str = "idempotency-key";
/// Reason for a rejected item whose own reason was not stored.
const REASON_NOT_KEPT: &str = "rejected by the first call with this key, whose reason is not stored";
/// Content types of items besides JSON.
pub(super) const ITEMS_SENT: [BodyType; 2] = [BodyType::Lines, BodyType::Arrow];

/// Headers of a call that changes items.
pub(super) struct CallHeaders {
    /// Idempotency key.
    pub(super) key: Option<String>,
    /// Content type of the body.
    pub(super) sent: BodyType,
}

impl CallHeaders {
    /// Reads the headers of a call whose body is JSON or a type of `others`.
    pub(super) fn of(request: &Request, others: &[BodyType]) -> Result<Self, Rejection> {
        let key = request.headers().get(KEY).map(|key| key.to_str().unwrap_or_default().to_owned());
        if key.as_ref().is_some_and(|key| key.is_empty() || key.len() > KEY_BYTES_MAX) {
            return Err(Error::invalid(format!("{KEY}: expected 1 to {KEY_BYTES_MAX} visible characters")).into());
        }
        Ok(CallHeaders { key, sent: BodyType::of(request.headers(), others)? })
    }
}

/// Upsert items, or change some of their attributes.
#[utoipa::path(post, path = "/v1/models/{model}/items:upsert", tag = "items",
    params(("model" = String, Path, description = "The model's name"),
        ("if_position" = Option<u64>, Query, description = "Rejects the call if the last update has another position."),
        ("min_position" = Option<u64>, Query, description = "Looks up the items to change once the updates up to this \
                                                             position are visible."),
        ("idempotency-key" = Option<String>, Header, description = "Repeated calls with one key take effect once.")),
    request_body(content((inline(UpsertRequest) = "application/json"), (String = "application/x-ndjson"), (Vec<u8> = "application/vnd.apache.arrow.stream"))),
    responses((status = 200, body = UpdateResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn upsert<R: Retriever>(State(app): State<Arc<R>>, Names(model): Names<String>, request: Request) -> Outcome {
    app.upsert(model, request).await
}

/// Upserts items of a model in this process.
pub(super) async fn upsert_locally(app: &Arc<App>, model: String, request: Request) -> Outcome {
    let loaded = app.registry.get(&model, VersionSelector::Active)?;
    let (feed, said) = (app.feed(&loaded)?, CallHeaders::of(&request, &ITEMS_SENT)?);
    let expected = number(request.uri(), "if_position")?;
    let view = seen(app, &loaded, request.uri()).await?;
    let body = app.bodies.read_any(request).await?;
    let (sent, memory) = (said.sent, app.bodies.memory());
    let runs_graph = view.main().package.item.is_some() || view.main().column_check.is_some();
    let started = (feed.clone(), said.key);
    let judge = move |body: &[u8]| Upsert::judged(&view, body, (sent, memory), started);
    let judged = match runs_graph {
        // A graph takes time, and rows of an item tower's tables may come from other machines.
        true => app.asides.run(move || judge(&body)).await?,
        false => app.asides.prepare(body, false, judge).await?,
    };
    let mut upsert = match judged {
        ParsedBody::New(upsert) => upsert,
        ParsedBody::Repeated(made) => return Ok(json(&upserted(model, made, true))),
    };
    upsert.find_absent(app, &loaded, &feed).await;
    let Upsert { call, updates, refused, .. } = upsert;
    let updates = updates.into_iter().map(|(_, update)| update).collect();
    let made = call.write(updates, CallAnswer { matched: 0, refused }, expected).await?;
    Ok(json(&upserted(model, made, false)))
}

/// Returns the answer to an upsert that was executed now or, if `repeated`, by an earlier call with the same key.
fn upserted(model: String, Call { count, position, answer, .. }: Call, repeated: bool) -> UpdateResponse {
    let refused =
        answer.refused.into_iter().map(|UpdateRejection { place, wrong: InvalidItem { id, field, reason } }| {
            let reason = if reason.is_empty() { REASON_NOT_KEPT.into() } else { reason };
            RefusedItem { place: place as usize, id, field, reason }
        });
    let (accepted, refused) = (count as usize, refused.collect());
    UpdateResponse { model, position, accepted, refused, repeated, ..UpdateResponse::default() }
}

struct Upsert {
    call: KeyedCall,
    /// Accepted updates with their indices in the call.
    updates: Vec<(u32, Update)>,
    refused: Vec<UpdateRejection>,
    /// Items that updates change but the view does not show.
    absent: Vec<ItemId>,
}

/// Result of reading a call's body.
enum ParsedBody {
    New(Upsert),
    /// The call was executed before.
    Repeated(Call),
}

impl Upsert {
    /// Validates the items of a body against a view.
    fn judged(
        view: &Arc<View>,
        body: &[u8],
        (sent, mut memory): (BodyType, BodyMemory),
        (feed, key): (Arc<ModelUpdates>, Option<String>),
    ) -> Result<ParsedBody> {
        let call = match KeyedCall::begin(feed, key, xxh3_64(body))? {
            Begun::New(call) => call,
            Begun::Repeated(made) => return Ok(ParsedBody::Repeated(made)),
        };
        if view.fullness() >= 1.0 {
            let (items, bytes) = (view.fresh_items(), view.extra_bytes(|_| false));
            return Err(Error::no_space(format!(
                "model `{}`: the delta is full: it has {items} items and {bytes} bytes, expected fewer than {FRESH_ITEMS} \
                 items and {FRESH_BYTES} bytes, or than the snapshot has if that is more; merge the updates, or publish \
                 a version that includes them",
                view.main().manifest.name
            )));
        }
        let items = match sent {
            BodyType::Arrow => sterling_api::arrow_upserts(body, &mut |bytes| memory.hold(bytes))?,
            text => sterling_api::upserts(body, text == BodyType::Lines)?,
        };
        let mut upsert =
            Upsert { call, updates: Vec::with_capacity(items.len()), refused: Vec::new(), absent: Vec::new() };
        let mut ids = BTreeSet::new();
        for (place, item) in (0..).zip(items) {
            match item.and_then(|item| update_of(&item, view, &mut ids)) {
                Ok(update) => upsert.updates.push((place, update)),
                Err(wrong) => upsert.refused.push(UpdateRejection { place, wrong }),
            }
        }
        upsert.check_columns(view);
        upsert.embed(view)?;
        let absent = |(_, update): &(u32, Update)| match update {
            Update::Set { id, .. } => Some(ItemId(*id)).filter(|id| view.slot(*id).is_none()),
            _ => None,
        };
        upsert.absent = upsert.updates.iter().filter_map(absent).collect();
        Ok(ParsedBody::New(upsert))
    }

    /// Rejects items that the reranker could not score.
    fn check_columns(&mut self, view: &View) {
        let wrong = unscorable(view, self.updates.iter().map(|(_, update)| update));
        let wrong: BTreeMap<u32, InvalidItem> =
            wrong.into_iter().map(|(n, wrong)| (self.updates[n].0, wrong)).collect();
        self.refuse(|place, _| wrong.get(&place).cloned());
    }

    /// Rejects items for which the item tower returns no usable embedding.
    fn embed(&mut self, view: &View) -> Result<()> {
        if view.main().package.item.is_none() {
            return Ok(());
        }
        let puts = self.updates.iter().map(|(_, update)| update);
        let failed: BTreeMap<u32, Error> =
            self.call.feed.embed(view, puts)?.into_iter().map(|(n, e)| (self.updates[n].0, e)).collect();
        self.refuse(|place, update| {
            let error = failed.get(&place)?;
            Some(InvalidItem { id: update.id(), field: "attributes".into(), reason: error.to_string() })
        });
        Ok(())
    }

    /// Rejects changes of items that do not exist. Acknowledged updates that are not visible yet may have added the items, so
    /// the call waits for those updates. If the wait takes too long, or if other servers may have written the items, the
    /// changes are accepted; a change without its item has no effect.
    async fn find_absent(&mut self, app: &App, loaded: &Loaded, feed: &ModelUpdates) {
        if self.absent.is_empty() || feed.has_others() {
            return;
        }
        let Ok(view) = reached(app, loaded, feed.last(), app.updates_wait).await else { return };
        let absent: BTreeSet<ItemId> = self.absent.drain(..).filter(|id| view.slot(*id).is_none()).collect();
        self.refuse(|_, update| match update {
            Update::Set { id, .. } if absent.contains(&ItemId(*id)) => Some(InvalidItem {
                id: Some(*id),
                field: "id".into(),
                reason: "no such item, expected an existing one".into(),
            }),
            _ => None,
        });
    }

    /// Moves updates for which `wrong` returns an error to the rejected items.
    fn refuse(&mut self, wrong: impl Fn(u32, &Update) -> Option<InvalidItem>) {
        let refused = &mut self.refused;
        self.updates.retain(|&(place, ref update)| {
            let wrong = wrong(place, update);
            let is_right = wrong.is_none();
            refused.extend(wrong.map(|wrong| UpdateRejection { place, wrong }));
            is_right
        });
        refused.sort_by_key(|refused| refused.place);
    }
}

/// Delete items.
#[utoipa::path(post, path = "/v1/models/{model}/items:delete", tag = "items",
    params(("model" = String, Path, description = "The model's name"),
        ("if_position" = Option<u64>, Query, description = "Rejects the call if the last update has another position."),
        ("min_position" = Option<u64>, Query, description = "Evaluates the filter once the updates up to this \
                                                             position are visible."),
        ("idempotency-key" = Option<String>, Header, description = "Repeated calls with one key take effect once.")),
    request_body = DeleteRequest,
    responses((status = 200, body = DeleteResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn delete<R: Retriever>(State(app): State<Arc<R>>, Names(model): Names<String>, request: Request) -> Outcome {
    app.delete(model, request).await
}

/// Deletes items of a model in this process.
pub(super) async fn delete_locally(app: &Arc<App>, model: String, request: Request) -> Outcome {
    let loaded = app.registry.get(&model, VersionSelector::Active)?;
    let (feed, said) = (app.feed(&loaded)?, CallHeaders::of(&request, &[])?);
    let expected = number(request.uri(), "if_position")?;
    let mut view = seen(app, &loaded, request.uri()).await?;
    let body = app.bodies.read(request).await?;
    let digest = xxh3_64(&body);
    let request = sterling_api::deletion(&body)?;
    let deleted = |model, Call { count, position, answer, .. }: Call, (dry_run, repeated): (bool, bool)| {
        let (deleted, matched) = (count as usize, answer.matched as usize);
        json(&DeleteResponse { model, position, deleted, matched, dry_run, repeated, ..DeleteResponse::default() })
    };
    let call = match request.dry_run {
        true => None,
        false => match KeyedCall::begin(feed.clone(), said.key, digest)? {
            Begun::New(call) => Some(call),
            Begun::Repeated(made) => return Ok(deleted(model, made, (false, true))),
        },
    };
    if request.ids.is_none() {
        // Updates acknowledged before the call must be visible to its filter.
        let position = feed.last().max(view.position());
        view = reached(app, &loaded, position, app.updates_wait).await?;
    }
    let position = view.position();
    let Named { ids, matched } = app.asides.run(move || named(&view, request)).await?;
    let answer = CallAnswer { matched: matched as u64, refused: Vec::new() };
    let Some(call) = call else {
        let counted = Call { digest, count: 0, position, answer };
        return Ok(deleted(model, counted, (true, false)));
    };
    let updates = ids.into_iter().map(|id| Update::Delete { id: id.0 }).collect();
    let made = call.write(updates, answer, expected).await?;
    Ok(deleted(model, made, (false, false)))
}

/// Items of a deletion, and how many of them exist.
struct Named {
    ids: Vec<ItemId>,
    matched: usize,
}

/// Determines the items of a deletion. Explicit ids are deleted even if the view does not show them: an earlier acknowledged
/// update may have added them.
fn named(view: &View, request: DeleteRequest) -> Result<Named> {
    match (request.ids, request.filter) {
        (Some(ids), _) => {
            let ids: BTreeSet<i64> = ids.into_iter().collect();
            let ids: Vec<ItemId> = ids.into_iter().map(ItemId).collect();
            let matched = ids.iter().filter(|id| view.slot(**id).is_some()).count();
            Ok(Named { ids, matched })
        }
        (None, filter) => {
            let ids = view.matching(&filter.unwrap_or_default())?;
            match ids.len() {
                matched @ 0..=EXCLUDE_MAX => Ok(Named { ids, matched }),
                many => {
                    Err(Error::too_costly(format!("filter: got {many} items, expected at most {EXCLUDE_MAX} per call")))
                }
            }
        }
    }
}

/// Call with an optional idempotency key. Until this guard is dropped, no other call with the key can run.
struct KeyedCall {
    feed: Arc<ModelUpdates>,
    key: Option<String>,
    digest: u64,
}

/// Outcome of beginning a call.
enum Begun {
    New(KeyedCall),
    /// The call was executed before.
    Repeated(Call),
}

impl KeyedCall {
    /// Registers the key of a call.
    ///
    /// # Errors
    /// As [`ModelUpdates::begin`].
    fn begin(feed: Arc<ModelUpdates>, key: Option<String>, digest: u64) -> Result<Begun> {
        let made = key.as_deref().map(|key| feed.begin(key, digest)).transpose()?.flatten();
        Ok(made.map_or_else(|| Begun::New(KeyedCall { feed, key, digest }), Begun::Repeated))
    }

    /// Writes updates durably. Returns the result of the call.
    async fn write(mut self, mut updates: Vec<Update>, answer: CallAnswer, expected: Option<u64>) -> Result<Call> {
        let (count, digest, key) = (updates.len() as u32, self.digest, self.key.take());
        if let Some(key) = &key {
            let answer = answer.clone().bounded();
            updates.push(Update::AnsweredCall { key: key.clone(), digest, count, answer });
        }
        let (tell, reported) = oneshot::channel();
        // The journal notifies the feed even if the client has disconnected.
        let weak: Weak<ModelUpdates> = Arc::downgrade(&self.feed);
        let done = Box::new(move |result: Result<Range<u64>>| {
            let made = result.map(|range| Call { digest, count, position: range.end - 1, answer });
            if let (Some(key), Some(feed)) = (key, weak.upgrade()) {
                let remembered = |made: &Call| Call { answer: made.answer.clone().bounded(), ..made.clone() };
                feed.end(&key, made.as_ref().ok().map(remembered));
            }
            // The receiver may have been dropped.
            let _ = tell.send(made);
        });
        self.feed.append(&updates, expected, done);
        reported.await.map_err(|_| Error::internal("the journal ended without an answer"))?
    }
}

impl Drop for KeyedCall {
    fn drop(&mut self) {
        // Nothing was written, so the call may be repeated.
        if let Some(key) = self.key.take() {
            self.feed.end(&key, None);
        }
    }
}

/// Merge the updates into a new version that becomes active: at least those that were durable at the time of the call.
#[utoipa::path(post, path = "/v1/models/{model}/items:merge", tag = "items",
    params(("model" = String, Path, description = "The model's name"),
        ("min_position" = Option<u64>, Query, description = "Merges at least the updates up to this position, instead \
                                                             of all durable ones.")),
    responses((status = 200, body = MergeResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn merge(State(app): State<Arc<App>>, Names(model): Names<String>, uri: Uri) -> Outcome {
    let loaded = app.registry.get(&model, VersionSelector::Active)?;
    let feed = app.feed(&loaded)?;
    let merges = app.merges.as_ref().ok_or_else(|| Error::unsupported("this server merges no updates"))?;
    // A merge contains the visible updates, and an update becomes visible shortly after its acknowledgement.
    let position = number(&uri, "min_position")?.unwrap_or_else(|| feed.last());
    reached(&app, &loaded, position, MERGE_WAIT).await?;
    let (tell, reported) = oneshot::channel();
    merges.ask(
        &model,
        Box::new(move |made| {
            // The receiver may have been dropped.
            let _ = tell.send(made);
        }),
    );
    let made = reported.await.map_err(|_| Error::internal("the merge ended without an answer"))??;
    Ok(json(&MergeResponse { model, version: made.version, position: made.position, items: made.items }))
}

/// The current state of an item.
#[utoipa::path(get, path = "/v1/models/{model}/items/{id}", tag = "items",
    params(("model" = String, Path, description = "The model's name"), ("id" = i64, Path),
        ("min_position" = Option<u64>, Query, description = "Waits until the updates up to this position are visible.")),
    responses((status = 200, body = ItemResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn item<R: Retriever>(
    State(app): State<Arc<R>>,
    Names((model, id)): Names<(String, i64)>,
    request: Request,
) -> Outcome {
    let (head, _) = request.into_parts();
    Ok(json(&app.item(&model, ItemId(id), &head).await?))
}

/// The positions of visible and durable updates.
#[utoipa::path(get, path = "/v1/models/{model}/items:position", tag = "items",
    params(("model" = String, Path, description = "The model's name"),
        ("min_position" = Option<u64>, Query, description = "Waits until the updates up to this position are visible.")),
    responses((status = 200, body = PositionResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn position<R: Retriever>(
    State(app): State<Arc<R>>,
    Names(model): Names<String>,
    request: Request,
) -> Outcome {
    let (head, _) = request.into_parts();
    Ok(json(&app.position(&model, &head).await?))
}
