//! Which path leads to which call.

use std::sync::Arc;

use axum::Router;
use axum::routing::{any, get};

use super::app::{App, Host};
use super::{browse, calls, console, items, layers, openapi, parts};
use crate::route::protocol::PARTS_PATH;

/// All routes over `app`.
pub fn router(app: Arc<App>) -> Router {
    let only_get = || calls::wrong_method("GET, HEAD");
    let routes = Router::new()
        .route("/v1/models", get(calls::models).fallback(only_get()))
        .route("/v1/models/{model}", any(calls::model_call))
        .route("/v1/models/{model}/versions", get(calls::versions).fallback(only_get()))
        .route("/v1/models/{model}/versions/{version}", any(calls::version_call))
        .route("/v1/models/{model}/labels", get(calls::labels).fallback(only_get()))
        .route("/v1/models/{model}/labels/{label}", any(calls::label_call))
        .route("/v1/models/{model}/index", get(browse::index).fallback(only_get()))
        .route("/v1/models/{model}/columns/{column}", get(browse::column).fallback(only_get()))
        .route("/v1/models/{model}/items", get(browse::find).fallback(only_get()))
        .route("/v1/models/{model}/items:upsert", any(items::upsert))
        .route("/v1/models/{model}/items:delete", any(items::delete))
        .route("/v1/models/{model}/items:merge", any(items::merge))
        .route("/v1/models/{model}/items:position", get(items::position).fallback(only_get()))
        .route("/v1/models/{model}/items/{id}", get(items::item).fallback(only_get()))
        .route("/v1/models/{model}/queries", get(calls::queries).fallback(only_get()))
        .route(PARTS_PATH, get(parts::parts).fallback(only_get()))
        .route("/livez", get(calls::live).fallback(only_get()))
        .route("/readyz", get(calls::ready).fallback(only_get()))
        .route("/metrics", get(calls::metrics).fallback(only_get()))
        .route("/openapi.json", get(openapi::openapi).fallback(only_get()))
        .route("/", get(console::console).fallback(only_get()))
        .fallback(calls::no_route)
        .with_state(app.clone());
    observed(routes, app)
}

/// Routes with what every call shares.
pub(super) fn observed(routes: Router, host: Arc<dyn Host>) -> Router {
    routes
        .layer(tower_http::catch_panic::CatchPanicLayer::custom(layers::panicked))
        .layer(axum::middleware::from_fn_with_state(host, layers::observe))
}
