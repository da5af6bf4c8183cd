//! Calls about models, versions and the server, one function each.

use std::str::FromStr;
use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::Uri;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};

use super::access::Caller;
use super::answer::{Outcome, Rejection, json, whole};
use super::app::App;
use super::flow::flow_of;
use super::local::version_list;
use super::parameters::parameter;
use super::paths::{Names, Target};
use super::retriever::Retriever;
use super::worst::WINDOW;
use sterling_api::{LabelList, LabelRequest, ModelInfo, ModelList, Problem, SlowResponse, VersionList};
use sterling_core::error::{Error, Result};
use sterling_core::logging::printable;
use sterling_core::request::VersionSelector;
use sterling_core::tasks;
use sterling_serving::registry::Registry;

/// Bytes per number of a vector as text with its comma, in a buffer that grows by doubling.
const NUMBER_BYTES: usize = 32;

/// Scope of an activation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Scope {
    /// Activation at this server, until the desired state changes or a version is published.
    #[default]
    Server,
    /// Activation at all servers of the store.
    Store,
}

impl FromStr for Scope {
    type Err = ();

    fn from_str(text: &str) -> std::result::Result<Self, ()> {
        match text {
            "server" => Ok(Scope::Server),
            "store" => Ok(Scope::Store),
            _ => Err(()),
        }
    }
}

/// Activate a published version at this server or at all servers of the store; loads it if necessary.
#[utoipa::path(post, path = "/v1/models/{model}/versions/{version}:activate", tag = "models",
    params(("model" = String, Path, description = "The model's name"), ("version" = u64, Path),
        ("scope" = Option<String>, Query, description = "`server` (the default), or `store` for all servers of the \
                                                         store, as `sterling activate`")),
    responses((status = 200, body = ModelInfo), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn activate(State(app): State<Arc<App>>, Names((model, version)): Names<(String, u64)>, uri: Uri) -> Outcome {
    let scope = parameter(&uri, "scope", "`server` or `store`")?.unwrap_or_default();
    let activate = move |registry: &Registry| match scope {
        Scope::Server => registry.activate(&model, version),
        Scope::Store => registry.activate_in_store(&model, version),
    };
    let loaded = manage(&app, activate).await?;
    Ok(json(&app.described(&loaded)))
}

/// Load a published version and keep it in memory, for pins, labels and a quick activation.
#[utoipa::path(post, path = "/v1/models/{model}/versions/{version}:load", tag = "models",
    params(("model" = String, Path, description = "The model's name"), ("version" = u64, Path)),
    responses((status = 200, body = ModelInfo), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn load(State(app): State<Arc<App>>, Names((model, version)): Names<(String, u64)>) -> Outcome {
    let loaded = manage(&app, move |registry| registry.load(&model, version)).await?;
    Ok(json(&app.described(&loaded)))
}

/// Unload a version that is neither active nor labelled.
#[utoipa::path(post, path = "/v1/models/{model}/versions/{version}:unload", tag = "models",
    params(("model" = String, Path, description = "The model's name"), ("version" = u64, Path)),
    responses((status = 200, body = VersionList), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn unload(State(app): State<Arc<App>>, Names((model, version)): Names<(String, u64)>) -> Outcome {
    let list = manage(&app, move |registry| {
        registry.unload(&model, version)?;
        version_list(registry, model)
    });
    Ok(json(&list.await?))
}

/// Point a label to a loaded version.
#[utoipa::path(put, path = "/v1/models/{model}/labels/{label}", tag = "models", params(("model" = String, Path, description = "The model's name"),
        ("label" = String, Path, description = "1 to 128 letters, digits, `_`, `-` or `.`, not starting with `.`")),
    request_body = LabelRequest,
    responses((status = 200, body = LabelList), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn put_label(
    State(app): State<Arc<App>>,
    Names((model, label)): Names<(String, String)>,
    request: Request,
) -> Outcome {
    let body = app.bodies.read(request).await?;
    let LabelRequest { version } = sterling_api::object(&body)?;
    let labels = manage(&app, move |registry| {
        registry.label(&model, &label, version)?;
        Ok(LabelList { labels: registry.labels(&model)?, model })
    });
    Ok(json(&labels.await?))
}

/// Delete a label.
#[utoipa::path(delete, path = "/v1/models/{model}/labels/{label}", tag = "models",
    params(("model" = String, Path, description = "The model's name"), ("label" = String, Path)),
    responses((status = 200, body = LabelList), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn delete_label(State(app): State<Arc<App>>, Names((model, label)): Names<(String, String)>) -> Outcome {
    let labels = manage(&app, move |registry| {
        registry.unlabel(&model, &label)?;
        Ok(LabelList { labels: registry.labels(&model)?, model })
    });
    Ok(json(&labels.await?))
}

/// Changes the loaded versions on a blocking thread: a load reads a complete snapshot, and freeing its memory takes time too.
pub(super) async fn manage<T: Send + 'static>(
    app: &Arc<App>,
    change: impl FnOnce(&Registry) -> Result<T> + Send + 'static,
) -> Result<T> {
    let (span, registry) = (tracing::Span::current(), app.registry.clone());
    tasks::blocking(move || span.in_scope(|| change(&registry))).await
}

/// The models that are served.
#[utoipa::path(get, path = "/v1/models", tag = "models", responses((status = 200, body = ModelList)))]
pub async fn models<R: Retriever>(State(app): State<Arc<R>>, Extension(caller): Extension<Caller>) -> Response {
    json(&app.models(caller).await)
}

/// The active version of a model.
#[utoipa::path(get, path = "/v1/models/{model}", tag = "models", params(("model" = String, Path, description = "The model's name")),
    responses((status = 200, body = ModelInfo), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn model<R: Retriever>(State(app): State<Arc<R>>, target: Target) -> Outcome {
    Ok(json(&app.info(&target.model, target.selected_version()).await?))
}

/// A loaded version of a model.
#[utoipa::path(get, path = "/v1/models/{model}/versions/{version}", tag = "models",
    params(("model" = String, Path, description = "The model's name"), ("version" = u64, Path)),
    responses((status = 200, body = ModelInfo), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn version<R: Retriever>(State(app): State<Arc<R>>, target: Target) -> Outcome {
    Ok(json(&app.info(&target.model, target.selected_version()).await?))
}

/// The published versions of a model.
#[utoipa::path(get, path = "/v1/models/{model}/versions", tag = "models", params(("model" = String, Path, description = "The model's name")),
    responses((status = 200, body = VersionList), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn versions<R: Retriever>(State(app): State<Arc<R>>, Names(model): Names<String>) -> Outcome {
    Ok(json(&app.versions(model).await?))
}

/// The labels of a model.
#[utoipa::path(get, path = "/v1/models/{model}/labels", tag = "models", params(("model" = String, Path, description = "The model's name")),
    responses((status = 200, body = LabelList), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn labels<R: Retriever>(State(app): State<Arc<R>>, Names(model): Names<String>) -> Outcome {
    Ok(json(&app.labels(model)?))
}

/// The version that a label points to.
#[utoipa::path(get, path = "/v1/models/{model}/labels/{label}", tag = "models",
    params(("model" = String, Path, description = "The model's name"), ("label" = String, Path)),
    responses((status = 200, body = ModelInfo), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn label<R: Retriever>(State(app): State<Arc<R>>, target: Target) -> Outcome {
    Ok(json(&app.info(&target.model, target.selected_version()).await?))
}

/// Recorded query embeddings of the active version, one `:retrieve` body per line, as `sterling calibrate --queries` reads.
#[utoipa::path(get, path = "/v1/models/{model}/queries", tag = "models", params(("model" = String, Path, description = "The model's name")),
    responses((status = 200, body = String, content_type = "application/x-ndjson"), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn queries(State(app): State<Arc<App>>, Names(model): Names<String>, request: Request) -> Outcome {
    let flow = flow_of(request.extensions());
    let loaded = app.registry.get(&model, VersionSelector::Active)?;
    let queries = loaded.view().recorded().ok_or_else(|| {
        Error::not_found("this server records no queries; set `recorded_queries` in its configuration")
    })?;
    let share = app.bodies.hold_answer(flow, queries.len() * loaded.view().dimension() * NUMBER_BYTES)?;
    let written = app.asides.run(move || {
        let mut lines = Vec::new();
        for vector in &queries {
            serde_json::to_writer(&mut lines, &sterling_api::QueryLine { vector })
                .map_err(|e| Error::internal(format!("cannot encode the recorded queries: {e}")))?;
            lines.push(b'\n');
        }
        Ok(whole(lines, share))
    });
    Ok(([(CONTENT_TYPE, "application/x-ndjson")], written.await?).into_response())
}

/// The slowest retrievals, rankings and embeddings of the last minutes, with the work of their steps.
#[utoipa::path(get, path = "/v1/debug/slow", tag = "health", responses((status = 200, body = SlowResponse)))]
pub async fn slow<R: Retriever>(State(app): State<Arc<R>>) -> Response {
    json(&SlowResponse { window_seconds: WINDOW.as_secs(), calls: app.entrance().slow.list() })
}

/// Liveness: the process answers.
#[utoipa::path(get, path = "/livez", tag = "health", responses((status = 200, body = String)))]
pub async fn live() -> &'static str {
    "ok\n"
}

/// Readiness: a model is loaded and the server is not shutting down. Lines that begin with `warning:` report problems. A server
/// with keys reports reasons and warnings only to keys for all models.
#[utoipa::path(get, path = "/readyz", tag = "health", responses((status = 200, body = String), (status = 503, body = Problem, content_type = "application/problem+json")))]
pub async fn ready<R: Retriever>(
    State(app): State<Arc<R>>,
    Extension(caller): Extension<Caller>,
) -> Result<String, Rejection> {
    let ready = app.ready();
    if !caller.may_see_all() {
        return ready
            .map(|()| "ok\n".to_owned())
            .map_err(|_| Error::not_ready(format!("the {} is not ready yet", R::NAME)).into());
    }
    ready?;
    Ok(app.report().iter().fold("ok\n".to_owned(), |text, line| text + &printable(line) + "\n"))
}

/// Metrics in Prometheus' text format.
#[utoipa::path(get, path = "/metrics", tag = "health", responses((status = 200, body = String)))]
pub async fn metrics() -> Response {
    let text = sterling_telemetry::metrics().render() + &sterling_telemetry::process();
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}
