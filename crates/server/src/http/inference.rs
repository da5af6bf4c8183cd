//! KServe's Open Inference Protocol, version 2, which existing platforms probe and call. An inference is a list of retrievals at
//! one version.
//!
//! Errors of the call are `{"error": ".."}`, with the status that the same problem has in other calls.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::{IntoResponse as _, Response};

use super::answer::{LARGE_REPLY_ITEMS, Outcome, ProblemText, json, pieces, whole};
use super::app::{App, Host as _};
use super::call::{Call, charge};
use super::choice::{CallUser, Choice, Chosen, Version, has_texts};
use super::content_type::BodyType;
use super::local::{Ready, prepared_each, side_by_side};
use super::paths::Names;
use super::retriever::Retriever;
use super::watched;
use sterling_api::{
    InferenceError, InferenceModel, InferenceReady, InferenceRequest, InferenceResponse, InferenceServer,
    InferenceSizer, Shape,
};
use sterling_core::error::{Error, Result};
use sterling_core::request::VersionSelector;

/// Prefix of the protocol's paths.
pub(super) const PREFIX: &str = "/v2";
/// Number of JSON bytes of a body; binary tensors follow them.
const HEADER_LENGTH: HeaderName = HeaderName::from_static("inference-header-content-length");

/// Returns whether a path belongs to the protocol.
pub(super) fn is_of_protocol(path: &str) -> bool {
    path.strip_prefix(PREFIX).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Rewrites a problem to the protocol's form; other answers stay unchanged.
pub(super) fn with_error(mut response: Response) -> Response {
    let Some(ProblemText { detail: error, .. }) = response.extensions().get::<ProblemText>().cloned() else {
        return response;
    };
    *response.body_mut() = Body::from(serde_json::json!({ "error": error }).to_string());
    let headers = response.headers_mut();
    headers.remove(CONTENT_LENGTH);
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Metadata of the server.
#[utoipa::path(get, path = "/v2", tag = "inference", responses((status = 200, body = InferenceServer)))]
pub async fn server() -> Response {
    json(&InferenceServer::this())
}

/// Metadata of the server under a second path: the text of the protocol has no slash at its end, its OpenAPI document
/// has one.
#[utoipa::path(get, path = "/v2/", operation_id = "inference_server_too", tag = "inference", responses((status = 200, body = InferenceServer)))]
pub async fn server_too() -> Response {
    server().await
}

/// Liveness: the process answers.
#[utoipa::path(get, path = "/v2/health/live", operation_id = "inference_live", tag = "inference", responses((status = 200, body = InferenceReady)))]
pub async fn live() -> Response {
    json(&InferenceReady { live: Some(true), ..InferenceReady::default() })
}

/// Readiness: a model is loaded and the server is not shutting down.
#[utoipa::path(get, path = "/v2/health/ready", operation_id = "inference_ready", tag = "inference",
    responses((status = 200, body = InferenceReady), (status = "default", body = InferenceError)))]
pub async fn ready<R: Retriever>(State(app): State<Arc<R>>) -> Outcome {
    app.ready().map_err(|_| Error::not_ready(format!("the {} is not ready yet", R::NAME)))?;
    Ok(json(&InferenceReady::server()))
}

/// The tensors of the active version.
#[utoipa::path(get, path = "/v2/models/{model}", operation_id = "inference_model", tag = "inference", params(("model" = String, Path, description = "The model's name")),
    responses((status = 200, body = InferenceModel), (status = "default", body = InferenceError)))]
pub async fn model(State(app): State<Arc<App>>, Names(model): Names<String>) -> Outcome {
    reported(&app, &model, VersionSelector::Active)
}

/// The tensors of a loaded version.
#[utoipa::path(get, path = "/v2/models/{model}/versions/{version}", operation_id = "inference_version", tag = "inference",
    params(("model" = String, Path, description = "The model's name"), ("version" = u64, Path)),
    responses((status = 200, body = InferenceModel), (status = "default", body = InferenceError)))]
pub async fn version(State(app): State<Arc<App>>, Names((model, version)): Names<(String, u64)>) -> Outcome {
    reported(&app, &model, VersionSelector::Version(version))
}

fn reported(app: &App, model: &str, which: VersionSelector<'_>) -> Outcome {
    let info = app.described(&*app.registry.get(model, which)?);
    let versions = app.registry.all_in_memory(model).into_iter().map(|loaded| loaded.version());
    Ok(json(&sterling_api::inference_model(&info, versions.collect())))
}

/// Readiness of a model: one of its versions is active.
#[utoipa::path(get, path = "/v2/models/{model}/ready", operation_id = "inference_model_ready", tag = "inference", params(("model" = String, Path, description = "The model's name")),
    responses((status = 200, body = InferenceReady), (status = "default", body = InferenceError)))]
pub async fn model_ready(State(app): State<Arc<App>>, Names(model): Names<String>) -> Outcome {
    is_ready(&app, model, VersionSelector::Active)
}

/// Readiness of a version: it is loaded.
#[utoipa::path(get, path = "/v2/models/{model}/versions/{version}/ready", operation_id = "inference_version_ready", tag = "inference",
    params(("model" = String, Path, description = "The model's name"), ("version" = u64, Path)),
    responses((status = 200, body = InferenceReady), (status = "default", body = InferenceError)))]
pub async fn version_ready(State(app): State<Arc<App>>, Names((model, version)): Names<(String, u64)>) -> Outcome {
    is_ready(&app, model, VersionSelector::Version(version))
}

fn is_ready(app: &App, model: String, which: VersionSelector<'_>) -> Outcome {
    app.registry.get(&model, which)?;
    Ok(json(&InferenceReady { name: Some(model), ready: Some(true), live: None }))
}

/// The best items of each of a list of users, as tensors.
#[utoipa::path(post, path = "/v2/models/{model}/infer", operation_id = "infer", tag = "inference", params(("model" = String, Path, description = "The model's name"),
        ("min_position" = Option<u64>, Query, description = "Waits until the updates up to this position are visible; \
                                                             a router takes one position per shard, separated by \
                                                             commas."),
        ("min_coverage" = Option<f64>, Query, minimum = 0, maximum = 1,
            description = "Share of the items that an answer must cover; with less, the status is 503. The default of \
                           a router is its `route.min_coverage`, a server has none.")),
    request_body = InferenceRequest,
    responses((status = 200, body = InferenceResponse), (status = "default", body = InferenceError)))]
pub async fn infer(State(app): State<Arc<App>>, Names(model): Names<String>, request: Request) -> Outcome {
    let (head, body) = request.into_parts();
    let choice = Choice::unpinned(&app, app.registry.unpinned(&model)?, &head).await?;
    inferred(&app, choice, head, body).await
}

/// The best items of each of a list of users at a loaded version, as tensors.
#[utoipa::path(post, path = "/v2/models/{model}/versions/{version}/infer", operation_id = "infer_version", tag = "inference",
    params(("model" = String, Path, description = "The model's name"), ("version" = u64, Path),
        ("min_position" = Option<u64>, Query, description = "Waits until the updates up to this position are visible; \
                                                             a router takes one position per shard, separated by \
                                                             commas."),
        ("min_coverage" = Option<f64>, Query, minimum = 0, maximum = 1,
            description = "Share of the items that an answer must cover; with less, the status is 503. The default of \
                           a router is its `route.min_coverage`, a server has none.")),
    request_body = InferenceRequest,
    responses((status = 200, body = InferenceResponse), (status = "default", body = InferenceError)))]
pub async fn infer_version(
    State(app): State<Arc<App>>,
    Names((model, version)): Names<(String, u64)>,
    request: Request,
) -> Outcome {
    let (head, body) = request.into_parts();
    let choice = Choice::pinned(&app, app.registry.get(&model, VersionSelector::Version(version))?, &head.uri).await?;
    inferred(&app, choice, head, body).await
}

async fn inferred(app: &Arc<App>, choice: Choice, head: Parts, body: Body) -> Outcome {
    let by = Call::of(&head).answered_in_json();
    app.admits(&|| by.flow, None)?;
    let header = header_length(&head.headers)?;
    if header.is_none() {
        BodyType::of(&head.headers, &[])?;
    }
    let body = app.bodies.read_any(Request::from_parts(head, body)).await?;
    app.admits(&|| by.flow, Some(&body))?;
    let Chosen { version, watched, .. } = choice.of(&CallUser::Several);
    version.check_coverage(app)?;
    let Version { model, view, .. } = version;
    let reported = app.served(&model, &view);
    let caller = by.caller.clone();
    let (has_texts, timeout) = (has_texts(&view), app.engine.timeout());
    let prepare = move |body: &[u8]| {
        let spec = &view.main().package.spec;
        let features: BTreeSet<&str> =
            spec.user.iter().flat_map(|user| &user.features).map(|feature| feature.source()).collect();
        let mut call = sterling_api::inference(model.name(), body, header, &features)?;
        charge(caller.as_ref(), call.requests.len());
        let requests = std::mem::take(&mut call.requests).into_iter();
        let ready =
            prepared_each(&view, requests.map(|(retrieve, terms)| Ok((retrieve, terms, Shape::default()))), timeout)?;
        // A tensor cannot represent the error of one row, so such an error fails the whole call.
        let row = |(n, ready): (usize, Ready)| match ready {
            Err(error) => Err(error.within(format!("row {n}"))),
            ready => Ok(ready),
        };
        Ok((call, ready.into_iter().enumerate().map(row).collect::<Result<Vec<_>>>()?))
    };
    let (call, ready) = app.asides.prepare(body, has_texts, prepare).await?;
    let (results, share, passed) = side_by_side(app, &reported, ready, (&by, watched.as_ref())).await?;
    let entries = results.into_iter().enumerate().map(|(n, result)| result.map_err(|e| e.within(format!("row {n}"))));
    let mut sizer = InferenceSizer::new(&call, &reported, entries.collect::<Result<Vec<_>>>()?)?;
    let mut reply = app.writers.work(by.flow, &share, move |_| Ok(sizer.step())).await?;
    let (header, is_large) = (reply.header_bytes(), reply.len() > LARGE_REPLY_ITEMS);
    let first = reply.next().unwrap_or_default();
    let body = if reply.is_done() { whole(first, share) } else { pieces(first, reply.map(Ok), share, is_large) };
    let mut response = (Extension(passed), body).into_response();
    let kind = if header.is_some() { "application/octet-stream" } else { "application/json" };
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().extend(header.map(|length| (HEADER_LENGTH, length.into())));
    watched::set_role_header(watched.as_ref(), &mut response);
    Ok(response)
}

/// Returns the number of JSON bytes of a body, if the client states it.
fn header_length(headers: &HeaderMap) -> Result<Option<usize>> {
    let Some(value) = headers.get(HEADER_LENGTH) else { return Ok(None) };
    let length = value.to_str().ok().and_then(|text| text.parse().ok());
    length
        .map(Some)
        .ok_or_else(|| Error::invalid(format!("{HEADER_LENGTH}: got {value:?}, expected a number of bytes")))
}
