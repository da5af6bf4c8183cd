//! Calls made by routers: list the loaded versions or shards, and search or rerank in one of them.

use std::mem::take;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::IntoResponse;
use serde::Serialize;

use super::access::Caller;
use super::answer::{Outcome, Rejection, Share, body_of_chunks, whole};
use super::app::App;
use super::call_id::CallId;
use super::choice::has_texts;
use super::flow::flow_of;
use super::pages::position_of;
use super::paths::Names;
use super::position::reached;
use super::retriever::Retriever as _;
use crate::route::protocol::{
    ANY_VIEW, BACKGROUND_HEADER, DesiredTraffic, Holding, Holdings, MEDIA_TYPE, Operation, POSITION_HEADER, PassReply,
    Replied, TIMEOUT_HEADER, UpdateStorage, VIEW_HEADER, ViewPosition, read_call, write, write_reply,
};
use sterling_api::{Entry, Explain, ItemJson, Problem, RowWriter};
use sterling_core::error::{Error, Result};
use sterling_core::quota::Flow;
use sterling_core::request::{Answer, CallOptions, Content, VersionSelector};
use sterling_core::units::ItemId;
use sterling_serving::pass::{self, Prepared};
use sterling_serving::registry::Loaded;
use sterling_serving::view::View;

/// Versions in memory, for routers of this release.
#[utoipa::path(get, path = "/v1/parts", tag = "routers",
    responses((status = 200, body = Vec<u8>, content_type = "application/vnd.sterling.pass-9")))]
pub async fn parts(State(app): State<Arc<App>>, Extension(caller): Extension<Caller>) -> Outcome {
    let (mut parts, mut wished) = (Vec::new(), Vec::new());
    for model in app.registry.list().iter().filter(|model| caller.may_see(model.name())) {
        // The model may have been removed since it was listed.
        let (Ok(labels), Ok(now)) = (app.registry.labels(model.name()), app.registry.traffic(model.name())) else {
            continue;
        };
        wished.push(DesiredTraffic {
            model: model.name().into(),
            revision: now.revision,
            setting: text(&now.setting)?,
        });
        for loaded in app.registry.all_in_memory(model.name()) {
            let labels = labels.iter().filter(|(_, version)| **version == loaded.version());
            let (digest, shard) = identity(&loaded);
            let main = loaded.view().main().clone();
            let manifest = &main.manifest;
            parts.push(Holding {
                model: loaded.name().into(),
                version: loaded.version(),
                digest,
                shard,
                shards: manifest.shard.map_or(1, |part| part.shards),
                items: manifest.published_items() as u64,
                items_of_all: manifest.shard.map_or(manifest.items, |part| part.items) as u64,
                is_active: loaded.version() == model.version(),
                labels: labels.map(|(label, _)| label.clone()).collect(),
            });
        }
    }
    let updates = match &app.feeds {
        None => UpdateStorage::Nowhere,
        Some(feeds) if feeds.are_shared() => UpdateStorage::Shared,
        Some(_) => UpdateStorage::Alone,
    };
    let holdings = Holdings { is_ready: app.ready().is_ok(), updates, parts, wished };
    packed(&holdings, app.bodies.hold_answer(Flow::default(), 0)?)
}

/// Returns the digest of all shards of a version, and the index of this shard.
fn identity(loaded: &Loaded) -> (String, u32) {
    let view = loaded.view();
    match (view.main().manifest.shard, &view.main().shards) {
        (Some(part), Some(all)) => (all.digest(), part.shard),
        _ => (loaded.digest().to_owned(), 0),
    }
}

/// Encodes an answer of the protocol.
pub(super) fn packed(body: &impl Serialize, share: Share) -> Outcome {
    Ok(([(CONTENT_TYPE, MEDIA_TYPE)], whole(write(body)?, share)).into_response())
}

/// A pass over a version, or over the shard of it that this server has, for routers of this release.
#[utoipa::path(post, path = "/v1/models/{model}/versions/{version}:pass", tag = "routers",
    params(("model" = String, Path, description = "The model's name"), ("version" = u64, Path)),
    request_body(content = Vec<u8>, content_type = "application/vnd.sterling.pass-9"),
    responses((status = 200, body = Vec<u8>, content_type = "application/vnd.sterling.pass-9"), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn pass(
    State(app): State<Arc<App>>,
    Names((model, version)): Names<(String, u64)>,
    request: Request,
) -> Outcome {
    let model = app.registry.get(&model, VersionSelector::Version(version))?;
    let timeout = timeout(request.headers())?;
    let (flow, origin) = (flow_of(request.extensions()), CallId::origin(request.extensions()));
    app.engine.admits(|| flow, timeout)?;
    let position = header(request.headers(), POSITION_HEADER, "a position")?;
    let of_page = request.headers().get(VIEW_HEADER).cloned();
    let is_background = request.headers().contains_key(BACKGROUND_HEADER);
    let body = app.bodies.read_any(request).await?;
    let (model, view) = match of_page.as_ref().filter(|named| *named != ANY_VIEW) {
        Some(named) => app.pages.view(&model, named_view(named)?)?,
        None => {
            let view = match position {
                Some(position) => reached(&app, &model, position, timeout.unwrap_or(app.updates_wait)).await?,
                None => model.view(),
            };
            (model, view)
        }
    };
    if of_page.is_some() {
        app.pages.keep_view(&app.registry, (model.clone(), view.clone()));
    }
    // A version on a GPU does not rerank early: the router requests reranking in a separate call.
    let is_on_card = app.engine.backend().residents().is_some();
    let seen = view.clone();
    let call = app.asides.prepare(body, has_texts(&seen), move |body| {
        let call = read_call(body)?;
        Ok(match call.asked {
            Operation::Pass(request) => {
                let terms = CallOptions { timeout, priority: call.priority, flow, is_background };
                let prepared = pass::prepare(&seen, *request)?.asked_for(origin);
                DecodedCall::Pass(Box::new(if is_on_card { prepared.ranked_apart() } else { prepared }), terms)
            }
            Operation::Item(item) => DecodedCall::Item(item),
            Operation::Model => DecodedCall::Model,
        })
    });
    let (given, share) = match call.await? {
        DecodedCall::Pass(prepared, terms) => {
            let share = app.bodies.hold_answer(flow, prepared.cost().answer_bytes)?;
            (passed(&app, &view, (*prepared, terms), &share).await?, share)
        }
        DecodedCall::Item(item) => {
            let attributes = view.slot(item).map(|slot| text(&sterling_api::attributes(&view.columns(), slot)));
            (Replied::Text(attributes.transpose()?), app.bodies.hold_answer(flow, 0)?)
        }
        DecodedCall::Model => (Replied::Text(Some(text(&app.described(&model))?)), app.bodies.hold_answer(flow, 0)?),
    };
    let (digest, shard) = identity(&model);
    let reply = PassReply { version: model.version(), digest, shard, view: position_of(&view), given };
    Ok(([(CONTENT_TYPE, MEDIA_TYPE)], body_of_chunks(write_reply(reply)?, &share)).into_response())
}

/// Decoded and validated call.
enum DecodedCall {
    Pass(Box<Prepared>, CallOptions),
    Item(ItemId),
    Model,
}

/// Rejects other media types than this protocol's.
pub(super) fn speaks(headers: &HeaderMap) -> Result<(), Rejection> {
    if headers.get(CONTENT_TYPE).is_none_or(|kind| kind != MEDIA_TYPE) {
        let detail = format!("content type: expected {MEDIA_TYPE}, as routers of this release send it");
        return Err(Rejection::http(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", detail));
    }
    Ok(())
}

/// Returns the timeout in the header of a protocol call.
fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, Rejection> {
    speaks(headers)?;
    Ok(header(headers, TIMEOUT_HEADER, "microseconds")?.map(Duration::from_micros))
}

/// Parses an integer header.
fn header(headers: &HeaderMap, name: &str, expected: &str) -> Result<Option<u64>> {
    headers.get(name).map(|value| parsed(value, (name, expected))).transpose()
}

/// Parses the view in a header.
fn named_view(value: &HeaderValue) -> Result<ViewPosition> {
    parsed(value, (VIEW_HEADER, "`any`, or the positions of a view and of its base snapshot with a dot between"))
}

fn parsed<T: FromStr>(value: &HeaderValue, (name, expected): (&str, &str)) -> Result<T> {
    let found = value.to_str().ok().and_then(|text| text.parse().ok());
    found.ok_or_else(|| Error::invalid(format!("{name}: got {value:?}, expected {expected}")))
}

fn text(reported: &impl Serialize) -> Result<String> {
    serde_json::to_string(reported).map_err(|e| Error::internal(format!("cannot encode an answer: {e}")))
}

/// Runs a pass, and encodes the columns of its answer, which only this server has.
async fn passed(app: &App, view: &View, (prepared, terms): (Prepared, CallOptions), share: &Share) -> Result<Replied> {
    let (columns, flow) = (prepared.columns().to_vec(), terms.flow);
    let answer = app.engine.answer(prepared, terms).await?;
    let degraded_rows = answer.degraded_rows;
    let explain = answer.explain.as_ref().map(|explain| text(&Explain::from(explain))).transpose()?;
    let mut content = answer.content;
    let ranked = match &mut content {
        Content::Items(ranked) => Some(ranked),
        Content::Selected(selected) => selected.ahead.as_mut().map(|ahead| &mut ahead.ranked),
        Content::Embedding(_) => None,
    };
    let mut rest = ItemJson::default();
    if let Some(ranked) = ranked {
        let tasks = view.main().package.spec.tasks.iter().map(|task| task.name.as_str());
        let answer = Answer { content: Content::Items(take(ranked)), degraded_rows, explain: None };
        let mut writer = RowWriter::new(Entry::items(answer, tasks, view.columns(), &columns)?);
        (*ranked, rest) = app.writers.work(flow, share, move |share| writer.step(share)).await?;
    }
    Ok(Replied::Pass { content, degraded_rows, rest, explain })
}
