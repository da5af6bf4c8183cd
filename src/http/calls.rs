//! The calls, one function each.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequestParts, Path, Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use axum::http::{Method, Uri};
use axum::response::{IntoResponse, Response};
use futures_util::future::join_all;
use serde::de::DeserializeOwned;

use super::answer::{Held, Outcome, Refusal, Timing, json, problem, reply};
use super::app::App;
use super::audit::{self, Again, Turn};
use super::bodies::Whole;
use super::parts::pass;
use super::position::seen;
use super::wire::{
    self, EmbedRequest, EmbedResponse, Entry, LabelList, LabelRequest, ModelInfo, ModelList, Problem, RankRequest,
    Reply, Retrievals, RetrieveOneOrMany, RetrieveResponse, RetrievedOneOrMany, Served, VersionInfo, VersionList,
};
use crate::engine::Terms;
use crate::error::{Error, Kind, Result};
use crate::pass::{self, Cost, Prepared};
use crate::registry::{Loaded, Registry, VersionState, Which};
use crate::request::{Answer, Request as Ask};
use crate::view::View;

const GET: &str = "GET, HEAD";
/// The verbs of the calls that workers answer.
pub(super) const VERBS: [&str; 4] = ["retrieve", "rank", "embed", "pass"];

/// The names in a path; where they are no text, a problem.
pub struct Names<T>(pub(super) T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Names<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let Path(names) = Path::from_request_parts(parts, state)
            .await
            .map_err(|e: PathRejection| Error::invalid(format!("path: {}", e.body_text())))?;
        Ok(Names(names))
    }
}

/// `/v1/models/{model}` and `/v1/models/{model}:{verb}`
pub async fn model_call(State(app): State<Arc<App>>, Names(call): Names<String>, request: Request) -> Outcome {
    match (call.rsplit_once(':'), request.method()) {
        (None, &Method::GET | &Method::HEAD) => model(&app, &call),
        (None, other) => Err(Refusal::method(other, GET)),
        (Some((model, verb)), _) => {
            check_verb(verb, request.method())?;
            dispatch(&app, app.registry.get(model, Which::Active)?, verb, request).await
        }
    }
}

/// `/v1/models/{model}/versions/{version}` and `/v1/models/{model}/versions/{version}:{verb}`
pub async fn version_call(
    State(app): State<Arc<App>>,
    Names((model, call)): Names<(String, String)>,
    request: Request,
) -> Outcome {
    let (text, verb) = call.rsplit_once(':').unwrap_or((&call, ""));
    let version = version_number(&model, text)?;
    match (verb, request.method()) {
        ("", &Method::GET | &Method::HEAD) if !call.ends_with(':') => self::version(&app, &model, version),
        ("", other) if !call.ends_with(':') => Err(Refusal::method(other, GET)),
        ("load", &Method::POST) => load(&app, model, version).await,
        ("activate", &Method::POST) => activate(&app, model, version).await,
        ("unload", &Method::POST) => unload(&app, model, version).await,
        ("pass", &Method::POST) => pass(&app, app.registry.get(&model, Which::Version(version))?, request).await,
        ("load" | "activate" | "unload" | "pass", other) => Err(Refusal::method(other, "POST")),
        _ => {
            check_verb(verb, request.method())?;
            dispatch(&app, app.registry.get(&model, Which::Version(version))?, verb, request).await
        }
    }
}

/// `/v1/models/{model}/labels/{label}` and `/v1/models/{model}/labels/{label}:{verb}`
pub async fn label_call(
    State(app): State<Arc<App>>,
    Names((model, call)): Names<(String, String)>,
    request: Request,
) -> Outcome {
    match (call.rsplit_once(':'), request.method()) {
        (None, &Method::PUT) => put_label(&app, model, call, request).await,
        (None, &Method::DELETE) => delete_label(&app, model, call).await,
        (None, other) => Err(Refusal::method(other, "PUT, DELETE")),
        (Some((label, verb)), method) => {
            check_verb(verb, method)?;
            dispatch(&app, app.registry.get(&model, Which::Label(label))?, verb, request).await
        }
    }
}

/// A version as it is listed: one number has one text, so that caches and rules for paths are not led around.
pub(super) fn version_number(model: &str, text: &str) -> Result<u64> {
    text.parse().ok().filter(|version: &u64| version.to_string() == text).ok_or_else(|| {
        Error::invalid(format!("version `{text}`: expected a whole number, as `GET /v1/models/{model}/versions` lists"))
    })
}

pub(super) fn check_verb(verb: &str, method: &Method) -> Result<(), Refusal> {
    if !["retrieve", "rank", "embed"].contains(&verb) {
        return Err(Error::not_found(format!("call `:{verb}`: expected `:retrieve`, `:rank` or `:embed`")).into());
    }
    if method == Method::POST { Ok(()) } else { Err(Refusal::method(method, "POST")) }
}

async fn dispatch(app: &Arc<App>, model: Arc<Loaded>, verb: &str, request: Request) -> Outcome {
    // What cannot be in time need not be read; what the gate could not tell ends here.
    app.engine.admits(None)?;
    let view = seen(app, &model, request.uri()).await?;
    let body = app.bodies.read(request).await?;
    match verb {
        "retrieve" => retrieve(app, &model, view, body).await,
        "rank" => rank(app, &model, view, body).await,
        _ => embed(app, &model, view, body).await,
    }
}

/// What a body asks for, ready to run.
enum Asked {
    One(Box<Prepared>, Terms, Option<Box<Again>>),
    Many(Vec<Result<(Prepared, Terms)>>),
}

fn prepare_retrievals(view: &Arc<View>, turn: Option<Turn>, body: &[u8]) -> Result<Asked> {
    let requests = match wire::retrievals(body)? {
        Retrievals::One(request, terms) => {
            let again = Again::of(turn, view, &request).map(Box::new);
            return Ok(Asked::One(Box::new(pass::prepare(view, Ask::Retrieve(*request))?), terms, again));
        }
        Retrievals::Many(requests) => requests,
    };
    let mut cost = Cost::default();
    let mut asked = Vec::with_capacity(requests.len());
    for request in requests {
        let prepared = request.and_then(|(request, terms)| Ok((pass::prepare(view, Ask::Retrieve(request))?, terms)));
        if let Ok((prepared, _)) = &prepared {
            // What is too much already need not be added up to its end.
            cost = cost.plus(prepared.cost());
            cost.check("the requests of the body")?;
        }
        asked.push(prepared);
    }
    Ok(Asked::Many(asked))
}

/// Retrieve items for one request, or for each of a list of requests.
#[utoipa::path(post, path = "/v1/models/{model}:retrieve", tag = "pass", params(("model" = String, Path, description = "The model's name")),
    request_body(content = inline(RetrieveOneOrMany)),
    responses((status = 200, body = inline(RetrievedOneOrMany)), (status = "default", body = Problem, content_type = "application/problem+json")))]
async fn retrieve(app: &Arc<App>, model: &Loaded, view: Arc<View>, body: Whole) -> Outcome {
    let (told, turn) = (served(model, &view), app.audit.turn());
    match app.asides.prepare(body, move |body| prepare_retrievals(&view, turn, body)).await? {
        Asked::One(prepared, terms, again) => one(app, model, *prepared, terms, again).await,
        Asked::Many(prepared) => {
            let costs = prepared.iter().flatten().map(|(prepared, _)| prepared.cost());
            let share = app.bodies.hold_answer(costs.fold(Cost::default(), Cost::plus).answer_bytes)?;
            let calls = prepared.into_iter().map(|prepared| async {
                let (prepared, terms) = prepared?;
                items(app, prepared, terms, None).await
            });
            let mut results = join_all(calls).await;
            // Where nothing was taken in, the whole call was refused, and load balancers must see it.
            let is_refused = |r: &Result<Entry>| r.as_ref().is_err_and(|e| e.kind() == Kind::Overloaded);
            if results.iter().all(is_refused)
                && let Some(Err(error)) = results.pop()
            {
                return Err(error.into());
            }
            let entries = results.into_iter().map(|r| r.unwrap_or_else(|e| problem(&e).into())).collect();
            Ok(reply(Reply::many(told, entries), Timing::default(), share))
        }
    }
}

/// Runs what was prepared, and makes the items of its answer ready to be written; they are audited where they are to be.
async fn items(app: &Arc<App>, prepared: Prepared, terms: Terms, again: Option<Box<Again>>) -> Result<Entry> {
    let columns = prepared.columns().to_vec();
    let view = prepared.view().clone();
    let answer = submit(app, prepared, terms).await?;
    if let Some(again) = again {
        let (app, served) = (app.clone(), audit::ids(&answer));
        tokio::spawn(async move { again.run(&app.engine, &served).await });
    }
    let tasks = view.main().package.spec.tasks.iter().map(|task| task.name.as_str());
    Entry::items(answer, tasks, view.columns(), &columns)
}

async fn submit(app: &App, prepared: Prepared, terms: Terms) -> Result<Answer> {
    app.engine.submit(prepared, terms).await
}

async fn one(app: &Arc<App>, model: &Loaded, prepared: Prepared, terms: Terms, again: Option<Box<Again>>) -> Outcome {
    let share = app.bodies.hold_answer(prepared.cost().answer_bytes)?;
    let told = served(model, prepared.view());
    let entry = items(app, prepared, terms, again).await?;
    let timing = Timing::of(entry.steps());
    Ok(reply(Reply::one(told, entry), timing, share))
}

pub(super) fn served(model: &Loaded, view: &View) -> Served {
    Served {
        model: model.name().into(),
        version: model.version(),
        digest: model.digest().into(),
        coverage: view.coverage(),
        position: view.position(),
        missing: Vec::new(),
    }
}

/// Score the items that the request names.
#[utoipa::path(post, path = "/v1/models/{model}:rank", tag = "pass", params(("model" = String, Path, description = "The model's name")),
    request_body = RankRequest,
    responses((status = 200, body = RetrieveResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
async fn rank(app: &Arc<App>, model: &Loaded, view: Arc<View>, body: Whole) -> Outcome {
    let ranking = move |body: &[u8]| {
        let (request, terms) = wire::rank(body)?;
        Ok((pass::prepare(&view, Ask::Rank(request))?, terms))
    };
    let (prepared, terms) = app.asides.prepare(body, ranking).await?;
    one(app, model, prepared, terms, None).await
}

/// The query embedding of a user's features.
#[utoipa::path(post, path = "/v1/models/{model}:embed", tag = "pass", params(("model" = String, Path, description = "The model's name")),
    request_body = EmbedRequest,
    responses((status = 200, body = EmbedResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
async fn embed(app: &App, model: &Loaded, view: Arc<View>, body: Whole) -> Outcome {
    let embedding = move |body: &[u8]| {
        let (request, terms) = wire::embed(body)?;
        Ok((pass::prepare(&view, Ask::Embed(request))?, terms))
    };
    let (prepared, terms) = app.asides.prepare(body, embedding).await?;
    let told = served(model, prepared.view());
    let answer = submit(app, prepared, terms).await?;
    Ok(json(&wire::embedding(told, answer)?))
}

/// Let a published version answer unpinned requests; loads it where it is not in memory.
#[utoipa::path(post, path = "/v1/models/{model}/versions/{version}:activate", tag = "models",
    params(("model" = String, Path, description = "The model's name"), ("version" = u64, Path)),
    responses((status = 200, body = ModelInfo), (status = "default", body = Problem, content_type = "application/problem+json")))]
async fn activate(app: &Arc<App>, model: String, version: u64) -> Outcome {
    let loaded = manage(app, move |registry| registry.activate(&model, version)).await?;
    Ok(json(&app.info(&loaded)))
}

/// Load a published version beside those in memory, and keep it there: for pins, labels and a quick activation.
#[utoipa::path(post, path = "/v1/models/{model}/versions/{version}:load", tag = "models",
    params(("model" = String, Path, description = "The model's name"), ("version" = u64, Path)),
    responses((status = 200, body = ModelInfo), (status = "default", body = Problem, content_type = "application/problem+json")))]
async fn load(app: &Arc<App>, model: String, version: u64) -> Outcome {
    let loaded = manage(app, move |registry| registry.load(&model, version)).await?;
    Ok(json(&app.info(&loaded)))
}

/// Take a version out of memory that is neither active nor labelled.
#[utoipa::path(post, path = "/v1/models/{model}/versions/{version}:unload", tag = "models",
    params(("model" = String, Path, description = "The model's name"), ("version" = u64, Path)),
    responses((status = 200, body = VersionList), (status = "default", body = Problem, content_type = "application/problem+json")))]
async fn unload(app: &Arc<App>, model: String, version: u64) -> Outcome {
    let states = manage(app, move |registry| {
        registry.unload(&model, version)?;
        Ok((registry.versions(&model)?, model))
    });
    let (states, model) = states.await?;
    Ok(json(&version_list(model, states)))
}

/// Let a label point to a version in memory.
#[utoipa::path(put, path = "/v1/models/{model}/labels/{label}", tag = "models", params(("model" = String, Path, description = "The model's name"),
        ("label" = String, Path, description = "1 to 128 letters, digits, `_`, `-` or `.`, not starting with `.`")),
    request_body = LabelRequest,
    responses((status = 200, body = LabelList), (status = "default", body = Problem, content_type = "application/problem+json")))]
async fn put_label(app: &Arc<App>, model: String, label: String, request: Request) -> Outcome {
    let body = app.bodies.read(request).await?;
    let LabelRequest { version } = wire::object(&body)?;
    let labels = manage(app, move |registry| {
        registry.label(&model, &label, version)?;
        Ok(LabelList { labels: registry.labels(&model)?, model })
    });
    Ok(json(&labels.await?))
}

/// Take a label away.
#[utoipa::path(delete, path = "/v1/models/{model}/labels/{label}", tag = "models",
    params(("model" = String, Path, description = "The model's name"), ("label" = String, Path)),
    responses((status = 200, body = LabelList), (status = "default", body = Problem, content_type = "application/problem+json")))]
async fn delete_label(app: &Arc<App>, model: String, label: String) -> Outcome {
    let labels = manage(app, move |registry| {
        registry.unlabel(&model, &label)?;
        Ok(LabelList { labels: registry.labels(&model)?, model })
    });
    Ok(json(&labels.await?))
}

/// Changes what is in memory on a thread that answers nobody else: a load reads a whole snapshot, and what goes out of memory
/// takes its time too.
async fn manage<T: Send + 'static>(
    app: &Arc<App>,
    change: impl FnOnce(&Registry) -> Result<T> + Send + 'static,
) -> Result<T> {
    let (span, registry) = (tracing::Span::current(), app.registry.clone());
    let changed = tokio::task::spawn_blocking(move || span.in_scope(|| change(&registry)));
    changed.await.map_err(|e| Error::internal(format!("a change of the registry: {e}")))?
}

/// The models that are served.
#[utoipa::path(get, path = "/v1/models", tag = "models", responses((status = 200, body = ModelList)))]
pub async fn models(State(app): State<Arc<App>>) -> Response {
    json(&ModelList { models: app.registry.list().iter().map(|model| app.info(model)).collect() })
}

/// The version of a model that answers.
#[utoipa::path(get, path = "/v1/models/{model}", tag = "models", params(("model" = String, Path, description = "The model's name")),
    responses((status = 200, body = ModelInfo), (status = "default", body = Problem, content_type = "application/problem+json")))]
fn model(app: &App, model: &str) -> Outcome {
    Ok(json(&app.info(&*app.registry.get(model, Which::Active)?)))
}

/// A version of a model that is in memory.
#[utoipa::path(get, path = "/v1/models/{model}/versions/{version}", tag = "models",
    params(("model" = String, Path, description = "The model's name"), ("version" = u64, Path)),
    responses((status = 200, body = ModelInfo), (status = "default", body = Problem, content_type = "application/problem+json")))]
fn version(app: &App, model: &str, version: u64) -> Outcome {
    Ok(json(&app.info(&*app.registry.get(model, Which::Version(version))?)))
}

/// The published versions of a model.
#[utoipa::path(get, path = "/v1/models/{model}/versions", tag = "models", params(("model" = String, Path, description = "The model's name")),
    responses((status = 200, body = VersionList), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn versions(State(app): State<Arc<App>>, Names(model): Names<String>) -> Outcome {
    let states = app.registry.versions(&model)?;
    Ok(json(&version_list(model, states)))
}

fn version_list(model: String, states: Vec<VersionState>) -> VersionList {
    let told = |v: VersionState| VersionInfo {
        version: v.version,
        published: v.published,
        active: v.active,
        loaded: v.loaded,
        labels: v.labels,
        digest: v.digest,
        attempts: v.refused.as_ref().map(|refused| refused.attempts),
        retry_in_ms: v.refused.as_ref().and_then(|refused| Some(refused.retry_in?.as_millis() as u64)),
        refused: v.refused.map(|refused| wire::without_places(&refused.reason)),
    };
    VersionList { model, versions: states.into_iter().map(told).collect() }
}

/// The labels of a model.
#[utoipa::path(get, path = "/v1/models/{model}/labels", tag = "models", params(("model" = String, Path, description = "The model's name")),
    responses((status = 200, body = LabelList), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn labels(State(app): State<Arc<App>>, Names(model): Names<String>) -> Outcome {
    Ok(json(&LabelList { labels: app.registry.labels(&model)?, model }))
}

/// The query embeddings that the server has recorded of the version that answers, each a body of `:retrieve`, one a line: what
/// `sterling calibrate --queries` reads.
#[utoipa::path(get, path = "/v1/models/{model}/queries", tag = "models", params(("model" = String, Path, description = "The model's name")),
    responses((status = 200, body = String, content_type = "application/x-ndjson"), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn queries(State(app): State<Arc<App>>, Names(model): Names<String>) -> Outcome {
    let loaded = app.registry.get(&model, Which::Active)?;
    let queries = loaded.view().recorded().ok_or_else(|| {
        Error::not_found("this server records no queries; `recorded_queries` of its configuration says how many")
    })?;
    // A number of text takes three times its four bytes.
    let share = app.bodies.hold_answer(queries.len() * loaded.view().dimension() * 12)?;
    let mut lines = Vec::new();
    for vector in &queries {
        serde_json::to_writer(&mut lines, &wire::QueryLine { vector })
            .map_err(|e| Error::internal(format!("queries: {e}")))?;
        lines.push(b'\n');
    }
    let body = Bytes::from_owner(Held { lines, _share: share });
    Ok(([(CONTENT_TYPE, "application/x-ndjson")], body).into_response())
}

/// The process answers.
#[utoipa::path(get, path = "/livez", tag = "health", responses((status = 200, body = String)))]
pub async fn live() -> &'static str {
    "ok\n"
}

/// A model is loaded and the server is not shutting down; where not, why. Lines that begin with `warning:` tell what slows it.
#[utoipa::path(get, path = "/readyz", tag = "health", responses((status = 200, body = String), (status = 503, body = Problem, content_type = "application/problem+json")))]
pub async fn ready(State(app): State<Arc<App>>) -> Result<String, Refusal> {
    app.ready()?;
    let warnings: String = app.warnings().iter().map(|warning| format!("warning: {warning}\n")).collect();
    Ok(format!("ok\ndevice: {}\n{warnings}", app.engine.backend().device()))
}

/// Metrics in Prometheus' text format.
#[utoipa::path(get, path = "/metrics", tag = "health", responses((status = 200, body = String)))]
pub async fn metrics() -> Response {
    let text = crate::telemetry::metrics().render();
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
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
