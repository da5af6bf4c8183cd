//! The edge of a router: the calls of a server, answered by the shards of a catalogue together.
//!
//! What is read and written is what a server reads and writes; between the two stands [`Fleet`](crate::route::Fleet) in place of registry and engine.
//! Of a server's calls there are those that ask (`:retrieve`, `:rank`, `:embed`, an item, models and versions). What changes a
//! server is asked of the server.

mod app;
mod calls;
mod explain;

use std::sync::Arc;

use axum::Router;
use axum::routing::{any, get};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

pub use self::app::RouterApp;
use super::app::Host;
use super::calls::{live, metrics, no_route, wrong_method};
use super::options::Options;
use super::routes::observed;
use super::server::{Stop, answer_all};
use crate::error::Result;

/// Answers requests by asking shards until `stops` says so, as [`serve`](super::serve) does.
///
/// # Errors
/// As [`serve`](super::serve).
pub async fn route(
    listener: TcpListener,
    app: Arc<RouterApp>,
    options: &Options,
    stops: mpsc::UnboundedReceiver<Stop>,
) -> Result<bool> {
    let host: Arc<dyn Host> = app.clone();
    let routes = observed(routes(app.clone()), host.clone());
    let fleet = app.fleet().clone();
    tokio::select! {
        ended = answer_all(listener, (host, routes), options, stops) => ended,
        never = fleet.watch() => match never {},
    }
}

fn routes(app: Arc<RouterApp>) -> Router {
    let only_get = || wrong_method("GET, HEAD");
    Router::new()
        .route("/v1/models", get(calls::models).fallback(only_get()))
        .route("/v1/models/{model}", any(calls::model_call))
        .route("/v1/models/{model}/versions", get(calls::versions).fallback(only_get()))
        .route("/v1/models/{model}/versions/{version}", any(calls::version_call))
        .route("/v1/models/{model}/labels", get(calls::labels).fallback(only_get()))
        .route("/v1/models/{model}/labels/{label}", any(calls::label_call))
        .route("/v1/models/{model}/items/{id}", get(calls::item).fallback(only_get()))
        .route("/livez", get(live).fallback(only_get()))
        .route("/readyz", get(calls::ready).fallback(only_get()))
        .route("/metrics", get(metrics).fallback(only_get()))
        .fallback(no_route)
        .with_state(app)
}
