//! Calls about a model's canary and shadow.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use super::answer::{Outcome, json};
use super::app::App;
use super::calls::manage;
use super::parameters::number;
use super::paths::Names;
use super::retriever::Retriever;
use super::worst::WINDOW;
use sterling_api::{Problem, ShadowResponse, TrafficRequest, TrafficResponse, traffic_info};
use sterling_core::error::{Error, Result};
use sterling_rollout::{StopRequest, Traffic};

/// Canary and shadow of a model's unpinned requests, and what this server has observed of them.
#[utoipa::path(get, path = "/v1/models/{model}/traffic", tag = "models", params(("model" = String, Path, description = "The model's name")),
    responses((status = 200, body = TrafficResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn traffic<R: Retriever>(State(app): State<Arc<R>>, Names(model): Names<String>) -> Outcome {
    Ok(json(&app.traffic(model)?))
}

/// Longest reason of a rollback, in bytes.
const REASON_BYTES_MAX: usize = 4096;

/// Set the share of a canary to zero at all servers of the store, if its desired state still equals the body. Routers call this
/// for a canary that is worse.
#[utoipa::path(post, path = "/v1/models/{model}/traffic:stop", tag = "models", params(("model" = String, Path, description = "The model's name")),
    request_body = StopRequest,
    responses((status = 200, body = TrafficResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn stop(State(app): State<Arc<App>>, Names(model): Names<String>, request: Request) -> Outcome {
    let body = app.bodies.read(request).await?;
    let StopRequest { canary, reason } = sterling_api::object(&body)?;
    if reason.is_empty() || reason.len() > REASON_BYTES_MAX {
        let length = reason.len();
        return Err(
            Error::invalid(format!("field `reason`: got {length} bytes, expected 1 to {REASON_BYTES_MAX}")).into()
        );
    }
    if let Some(control) = reason.chars().find(|character| character.is_control()) {
        return Err(Error::invalid(format!(
            "field `reason`: got the control character {control:?}, expected one line of text"
        ))
        .into());
    }
    let stopped = manage(&app, move |registry| {
        registry.stop_canary(&model, &canary, &reason)?;
        Ok(traffic_info(model.clone(), registry.traffic(&model)?))
    });
    Ok(json(&stopped.await?))
}

/// Set the canary and the shadow of a model's unpinned requests, at all servers of the store.
#[utoipa::path(put, path = "/v1/models/{model}/traffic", tag = "models", params(("model" = String, Path, description = "The model's name")),
    request_body = TrafficRequest,
    responses((status = 200, body = TrafficResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn put_traffic(State(app): State<Arc<App>>, Names(model): Names<String>, request: Request) -> Outcome {
    let body = app.bodies.read(request).await?;
    let asked: TrafficRequest = sterling_api::object(&body)?;
    let revision = asked.revision;
    Ok(json(&changed(&app, model, revision, asked.into()).await?))
}

/// Remove the canary and the shadow of a model, so that the active version answers all unpinned requests.
#[utoipa::path(delete, path = "/v1/models/{model}/traffic", tag = "models", params(("model" = String, Path, description = "The model's name"),
        ("revision" = Option<u64>, Query, description = "Changes the traffic only if the desired state of the model \
                                                         has this revision")),
    responses((status = 200, body = TrafficResponse), (status = "default", body = Problem, content_type = "application/problem+json")))]
pub async fn delete_traffic(State(app): State<Arc<App>>, Names(model): Names<String>, request: Request) -> Outcome {
    let revision = number(request.uri(), "revision")?;
    Ok(json(&changed(&app, model, revision, Traffic::default()).await?))
}

async fn changed(app: &Arc<App>, model: String, revision: Option<u64>, traffic: Traffic) -> Result<TrafficResponse> {
    let reported = manage(app, move |registry| {
        registry.set_traffic(&model, revision, traffic)?;
        Ok(traffic_info(model.clone(), registry.traffic(&model)?))
    });
    reported.await
}

/// The shadow answers of the last minutes that differed most from the served ones.
#[utoipa::path(get, path = "/v1/debug/shadow", tag = "health", responses((status = 200, body = ShadowResponse)))]
pub async fn shadow<R: Retriever>(State(app): State<Arc<R>>) -> Response {
    json(&ShadowResponse { window_seconds: WINDOW.as_secs(), diffs: app.shadow_diffs().list() })
}
