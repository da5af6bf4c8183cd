//! The HTTP edge: bytes in, JSON out, every error a problem of RFC 9457.
//!
//! Handlers read a request into the types of [`wire`], hand it to the engine and write the answer; nothing here
//! knows how a pass works. A call is named by a verb after a colon (`/v1/models/debian:retrieve`), which routers do not
//! split, so `calls` does. `layers` holds what every call shares: limits on the body, metrics, `Server-Timing`.

mod answer;
mod calls;
mod layers;
mod openapi;
pub mod wire;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::response::Html;
use axum::routing::{any, get};
use tokio::net::TcpListener;

use crate::engine::{Engine, Passes};
use crate::error::{Error, Result};
use crate::limits;
use crate::registry::Registry;

pub use openapi::document as openapi;

/// What handlers share.
pub struct App {
    /// The models.
    pub registry: Arc<Registry>,
    /// The workers.
    pub engine: Engine<Passes>,
    draining: AtomicBool,
}

impl App {
    /// Models and workers behind one edge.
    pub fn new(registry: Registry, engine: Engine<Passes>) -> Self {
        App { registry: Arc::new(registry), engine, draining: AtomicBool::new(false) }
    }

    fn is_ready(&self) -> bool {
        self.registry.is_ready() && !self.draining.load(Ordering::Relaxed)
    }
}

/// All routes over `app`.
pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/models", get(calls::models).fallback(calls::wrong_method("GET")))
        .route(
            "/v1/models/{model}",
            get(calls::model).post(calls::model_call).fallback(calls::wrong_method("GET, POST")),
        )
        .route("/v1/models/{model}/versions", get(calls::versions).fallback(calls::wrong_method("GET")))
        .route("/v1/models/{model}/versions/{version}", any(calls::version_call))
        .route("/livez", get(calls::live).fallback(calls::wrong_method("GET")))
        .route("/readyz", get(calls::ready).fallback(calls::wrong_method("GET")))
        .route("/metrics", get(calls::metrics).fallback(calls::wrong_method("GET")))
        .route("/openapi.json", get(calls::openapi).fallback(calls::wrong_method("GET")))
        .route("/", get(async || Html(include_str!("console.html"))).fallback(calls::wrong_method("GET")))
        .fallback(calls::no_route)
        .layer(axum::middleware::from_fn(layers::observe))
        .layer(tower_http::catch_panic::CatchPanicLayer::custom(layers::panicked))
        .layer(DefaultBodyLimit::max(limits::BODY_BYTES_MAX))
        .with_state(app)
}

/// Serves until `stop` is ready, then answers what has begun and returns. `/readyz` says 503 from then on.
///
/// # Errors
/// `Io` where the socket fails.
pub async fn serve(
    listener: TcpListener,
    app: Arc<App>,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<()> {
    let draining = app.clone();
    let stop = async move {
        stop.await;
        draining.draining.store(true, Ordering::Relaxed);
    };
    axum::serve(listener, router(app)).with_graceful_shutdown(stop).await.map_err(|e| Error::io("the HTTP socket", e))
}
