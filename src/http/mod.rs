//! The HTTP edge: bytes in, JSON out, every error a problem of RFC 9457.
//!
//! `server` lets connections in and ends them, `connections` knows what each is at; `bodies` reads bodies within a budget.
//! Handlers read a request with [`wire`], hand it to the engine and write the answer; nothing here knows how a pass
//! works. A call is named by a verb after a colon (`/v1/models/debian:retrieve`), which routers do not split, so `calls`
//! does. `layers` holds what every call shares: ids, metrics, `Server-Timing`.

mod answer;
mod bodies;
mod calls;
mod connections;
mod layers;
mod openapi;
mod options;
mod server;
pub mod wire;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::routing::{any, get};

use crate::engine::{Engine, Passes};
use crate::error::{Error, Result};
use crate::registry::Registry;

pub use openapi::document as openapi;
pub use options::Options;
pub use server::{Stop, serve};

/// What handlers share.
pub struct App {
    /// The models.
    pub registry: Arc<Registry>,
    /// The workers.
    pub engine: Engine<Passes>,
    bodies: bodies::Bodies,
    draining: AtomicBool,
}

impl App {
    /// Models and workers behind one edge.
    pub fn new(registry: Registry, engine: Engine<Passes>, options: &Options) -> Self {
        App {
            registry: Arc::new(registry),
            engine,
            bodies: bodies::Bodies::new(options),
            draining: AtomicBool::new(false),
        }
    }

    fn ready(&self) -> Result<()> {
        if self.draining.load(Ordering::Relaxed) {
            return Err(Error::not_ready("the server is shutting down"));
        }
        self.registry.ready()
    }
}

/// All routes over `app`.
pub fn router(app: Arc<App>) -> Router {
    let only_get = || calls::wrong_method("GET, HEAD");
    Router::new()
        .route("/v1/models", get(calls::models).fallback(only_get()))
        .route("/v1/models/{model}", any(calls::model_call))
        .route("/v1/models/{model}/versions", get(calls::versions).fallback(only_get()))
        .route("/v1/models/{model}/versions/{version}", any(calls::version_call))
        .route("/v1/models/{model}/labels", get(calls::labels).fallback(only_get()))
        .route("/v1/models/{model}/labels/{label}", any(calls::label_call))
        .route("/livez", get(calls::live).fallback(only_get()))
        .route("/readyz", get(calls::ready).fallback(only_get()))
        .route("/metrics", get(calls::metrics).fallback(only_get()))
        .route("/openapi.json", get(calls::openapi).fallback(only_get()))
        .route("/", get(calls::console).fallback(only_get()))
        .fallback(calls::no_route)
        .layer(tower_http::catch_panic::CatchPanicLayer::custom(layers::panicked))
        .layer(axum::middleware::from_fn_with_state(app.clone(), layers::observe))
        .with_state(app)
}
