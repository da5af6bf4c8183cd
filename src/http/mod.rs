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
use tokio::sync::Semaphore;

use crate::engine::{Engine, Passes};
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
    /// Long bodies that may be prepared at once.
    long_bodies: Arc<Semaphore>,
    draining: AtomicBool,
}

impl App {
    /// Models and workers behind one edge.
    pub fn new(registry: Registry, engine: Engine<Passes>, options: &Options) -> Self {
        // Half of the cores that passes use at most: those that wait for answers to short requests come first.
        let long_bodies = Arc::new(Semaphore::new((engine.workers() / 2).max(1)));
        App {
            registry: Arc::new(registry),
            engine,
            bodies: bodies::Bodies::new(options),
            long_bodies,
            draining: AtomicBool::new(false),
        }
    }

    fn is_ready(&self) -> bool {
        self.registry.is_ready() && !self.draining.load(Ordering::Relaxed)
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
