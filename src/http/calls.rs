//! The calls, one function each.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, Path, Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use futures_util::future::join_all;
use futures_util::stream;

use super::App;
use super::answer::{Refusal, Timing, json};
use super::openapi::{RetrieveOneOrMany, RetrievedOneOrMany};
use super::wire::{
    self, EmbedRequest, EmbedResponse, Entry, ModelInfo, ModelList, Problem, RankRequest, Reply, Retrievals,
    RetrieveResponse, Served, VersionInfo, VersionList, model_info,
};
use crate::engine::Terms;
use crate::error::{Error, Kind, Result};
use crate::limits;
use crate::pass::{self, Prepared};
use crate::registry::{Loaded, VersionState, Which};
use crate::request::{Request as Ask, Retrieve};

/// How long a client may take to send its body.
const BODY_TIME: Duration = Duration::from_secs(30);

type Answer = Result<Response, Refusal>;

/// `POST /v1/models/{model}:{verb}`
pub async fn model_call(State(app): State<Arc<App>>, Path(call): Path<String>, request: Request) -> Answer {
    let Some((model, verb)) = call.rsplit_once(':') else {
        return Err(Refusal::method(request.method(), "GET"));
    };
    dispatch(&app, app.registry.get(model, Which::Active)?, verb, request).await
}

/// `POST /v1/models/{model}/versions/{version}:{verb}`
pub async fn version_call(
    State(app): State<Arc<App>>,
    Path((model, call)): Path<(String, String)>,
    request: Request,
) -> Answer {
    let (version, verb) = call.rsplit_once(':').unwrap_or((&call, ""));
    let version: u64 = version.parse().map_err(|_| {
        Error::invalid(format!(
            "version `{version}`: expected a whole number, as `GET /v1/models/{model}/versions` lists"
        ))
    })?;
    match (verb, request.method()) {
        ("", &Method::GET) => Ok(json(&info(&*app.registry.get(&model, Which::Version(version))?), Timing::default())),
        ("", other) => Err(Refusal::method(other, "GET")),
        ("activate", &Method::POST) => activate(app, model, version).await,
        (_, &Method::POST) => dispatch(&app, app.registry.get(&model, Which::Version(version))?, verb, request).await,
        (_, other) => Err(Refusal::method(other, "POST")),
    }
}

async fn dispatch(app: &App, model: Arc<Loaded>, verb: &str, request: Request) -> Answer {
    match verb {
        "retrieve" => retrieve(app, model, &body(request).await?).await,
        "rank" => rank(app, model, &body(request).await?).await,
        "embed" => embed(app, model, &body(request).await?).await,
        other => Err(Error::not_found(format!("call `:{other}`: expected `:retrieve`, `:rank` or `:embed`")).into()),
    }
}

/// The whole body of a JSON request.
async fn body(request: Request) -> Result<Bytes, Refusal> {
    is_json(request.headers())?;
    match tokio::time::timeout(BODY_TIME, Bytes::from_request(request, &())).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(e)) if e.status() == StatusCode::PAYLOAD_TOO_LARGE => Err(Refusal::http(
            e.status(),
            "too_large",
            format!("body: larger than {} bytes, split it into several requests", limits::BODY_BYTES_MAX),
        )),
        Ok(Err(e)) => Err(Error::invalid(format!("body: {}", e.body_text())).into()),
        Err(_) => Err(Refusal::http(
            StatusCode::REQUEST_TIMEOUT,
            "request_timeout",
            format!("body: not complete after {} s", BODY_TIME.as_secs()),
        )),
    }
}

fn is_json(headers: &HeaderMap) -> Result<(), Refusal> {
    let Some(kind) = headers.get(CONTENT_TYPE) else { return Ok(()) };
    let essence = kind.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    // curl's `-d` says the form type when nothing else is asked for.
    if ["application/json", "application/x-www-form-urlencoded"].contains(&essence.as_str()) {
        return Ok(());
    }
    let detail = format!("content type {kind:?}: expected application/json");
    Err(Refusal::http(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", detail))
}

/// Retrieve items for one request, or for each of a list of requests.
#[utoipa::path(post, path = "/v1/models/{model}:retrieve", tag = "pass",
    params(("model" = String, Path, description = "The model's name; `{model}/versions/{version}` pins a version")),
    request_body(content = inline(RetrieveOneOrMany)),
    responses((status = 200, body = inline(RetrievedOneOrMany)), (status = "default", body = Problem, content_type = "application/problem+json")))]
async fn retrieve(app: &App, model: Arc<Loaded>, body: &[u8]) -> Answer {
    match wire::retrievals(body)? {
        Retrievals::One(request, terms) => {
            let prepared = pass::prepare(model.view(), Ask::Retrieve(*request))?;
            let entry = items(app, &model, prepared, terms).await?;
            Ok(reply(Reply::one(served(&model), entry)))
        }
        Retrievals::Many(requests) => {
            let prepare = |request: Result<(Retrieve, wire::Terms)>| {
                let (request, terms) = request?;
                Ok((pass::prepare(model.view(), Ask::Retrieve(request))?, terms))
            };
            let prepared: Vec<Result<(Prepared, wire::Terms)>> = requests.into_iter().map(prepare).collect();
            let costs = prepared.iter().flatten().map(|(prepared, _)| prepared.cost());
            costs.fold(pass::Cost::default(), pass::Cost::plus).check("the requests of the body")?;
            let calls = prepared.into_iter().map(|prepared| async {
                let (prepared, terms) = prepared?;
                items(app, &model, prepared, terms).await
            });
            let results = join_all(calls).await;
            // Where nothing was taken in, the whole call was refused, and load balancers must see it.
            let is_refused = |r: &Result<Entry>| r.as_ref().is_err_and(|e| e.kind() == Kind::Overloaded);
            if results.iter().all(is_refused) {
                return Err(results
                    .into_iter()
                    .find_map(Result::err)
                    .unwrap_or_else(|| Error::internal("no result"))
                    .into());
            }
            let entry = |result: Result<Entry>| result.unwrap_or_else(|e| Problem::from(&e).into());
            Ok(reply(Reply::many(served(&model), results.into_iter().map(entry).collect())))
        }
    }
}

/// Runs what was prepared, and makes its items ready to be written.
async fn items(app: &App, model: &Loaded, prepared: Prepared, terms: wire::Terms) -> Result<Entry> {
    let columns = prepared.columns().to_vec();
    let answer = app.engine.submit(prepared, engine_terms(terms)).await?;
    let main = model.view().main();
    let tasks: Vec<String> = main.package.spec.tasks.iter().map(|task| task.name.clone()).collect();
    Entry::items(answer, &tasks, &main.columns, &columns)
}

fn engine_terms(terms: wire::Terms) -> Terms {
    Terms { timeout: terms.timeout, priority: terms.priority }
}

/// What an answer says of the version that made it.
fn served(model: &Loaded) -> Served {
    Served { model: model.name().into(), version: model.version(), digest: model.digest().into(), coverage: 1.0 }
}

/// A reply of items: one piece with its length, or as a stream where there are more.
fn reply(mut reply: Reply) -> Response {
    let timing = Timing::of(reply.steps());
    let first = reply.next().unwrap_or_default();
    let body = match reply.is_done() {
        true => Body::from(first),
        false => Body::from_stream(stream::iter(std::iter::once(first).chain(reply).map(Ok::<_, Infallible>))),
    };
    let mut response = ([(CONTENT_TYPE, "application/json")], body).into_response();
    response.extensions_mut().insert(timing);
    response
}

/// Score the items that the request names.
#[utoipa::path(post, path = "/v1/models/{model}:rank", tag = "pass", params(("model" = String, Path)),
    request_body = RankRequest,
    responses((status = 200, body = RetrieveResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
async fn rank(app: &App, model: Arc<Loaded>, body: &[u8]) -> Answer {
    let (request, terms) = wire::rank(body)?;
    let prepared = pass::prepare(model.view(), Ask::Rank(request))?;
    let entry = items(app, &model, prepared, terms).await?;
    Ok(reply(Reply::one(served(&model), entry)))
}

/// The query embedding of a user's features.
#[utoipa::path(post, path = "/v1/models/{model}:embed", tag = "pass", params(("model" = String, Path)),
    request_body = EmbedRequest,
    responses((status = 200, body = EmbedResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
async fn embed(app: &App, model: Arc<Loaded>, body: &[u8]) -> Answer {
    let (request, terms) = wire::embed(body)?;
    let prepared = pass::prepare(model.view(), Ask::Embed(request))?;
    let answer = app.engine.submit(prepared, engine_terms(terms)).await?;
    Ok(json(&wire::embedding(served(&model), answer)?, Timing::default()))
}

/// Let a published version answer unpinned requests; loads it where it is not in memory.
#[utoipa::path(post, path = "/v1/models/{model}/versions/{version}:activate", tag = "models",
    params(("model" = String, Path), ("version" = u64, Path)),
    responses((status = 200, body = ModelInfo), (status = "default", body = Problem, content_type = "application/problem+json")))]
async fn activate(app: Arc<App>, model: String, version: u64) -> Answer {
    // Loading reads a whole snapshot: not on a thread that answers others.
    let loaded = tokio::task::spawn_blocking(move || app.registry.activate(&model, version))
        .await
        .map_err(|e| Error::internal(format!("activation: {e}")))??;
    Ok(json(&info(&loaded), Timing::default()))
}

fn info(model: &Loaded) -> ModelInfo {
    model_info(model.view().main())
}

/// The models that are served.
#[utoipa::path(get, path = "/v1/models", tag = "models", responses((status = 200, body = ModelList)))]
pub async fn models(State(app): State<Arc<App>>) -> Response {
    json(&ModelList { models: app.registry.list().iter().map(|l| info(l)).collect() }, Timing::default())
}

/// The version of a model that answers.
#[utoipa::path(get, path = "/v1/models/{model}", tag = "models", params(("model" = String, Path)),
    responses((status = 200, body = ModelInfo), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn model(State(app): State<Arc<App>>, Path(model): Path<String>, method: Method) -> Answer {
    if model.rsplit_once(':').is_some_and(|(_, verb)| ["retrieve", "rank", "embed"].contains(&verb)) {
        return Err(Refusal::method(&method, "POST"));
    }
    Ok(json(&info(&*app.registry.get(&model, Which::Active)?), Timing::default()))
}

/// The published versions of a model.
#[utoipa::path(get, path = "/v1/models/{model}/versions", tag = "models", params(("model" = String, Path)),
    responses((status = 200, body = VersionList), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn versions(State(app): State<Arc<App>>, Path(model): Path<String>) -> Answer {
    let state = |v: VersionState| VersionInfo {
        version: v.version,
        active: v.active,
        loaded: v.loaded,
        refused: v.refused.map(|r| r.reason),
    };
    let versions = app.registry.versions(&model)?.into_iter().map(state).collect();
    Ok(json(&VersionList { model, versions }, Timing::default()))
}

/// The process answers.
#[utoipa::path(get, path = "/livez", tag = "health", responses((status = 200, body = String)))]
pub async fn live() -> &'static str {
    "ok\n"
}

/// A model is loaded and the server is not shutting down.
#[utoipa::path(get, path = "/readyz", tag = "health", responses((status = 200, body = String), (status = 503, body = Problem, content_type = "application/problem+json")))]
pub async fn ready(State(app): State<Arc<App>>) -> Result<&'static str, Refusal> {
    if app.is_ready() {
        Ok("ok\n")
    } else {
        Err(Error::not_ready("no model is loaded, or the server is shutting down").into())
    }
}

/// Metrics in Prometheus' text format.
#[utoipa::path(get, path = "/metrics", tag = "health", responses((status = 200, body = String)))]
pub async fn metrics() -> Response {
    let handle = crate::telemetry::metrics();
    handle.run_upkeep();
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], handle.render()).into_response()
}

/// This API as OpenAPI 3.1.
pub async fn openapi() -> Response {
    json(&super::openapi(), Timing::default())
}

/// Answers methods that a route does not have.
pub fn wrong_method(
    allow: &'static str,
) -> impl Fn(Method) -> std::future::Ready<Refusal> + Clone + Send + Sync + 'static {
    move |method| std::future::ready(Refusal::method(&method, allow))
}

/// Answers paths that no route has.
pub async fn no_route(uri: Uri) -> Refusal {
    Error::not_found(format!("nothing lies at {}; `/openapi.json` lists the calls", uri.path())).into()
}
