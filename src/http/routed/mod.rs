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
use axum::extract::{Request, State};
use axum::handler::Handler;
use axum::response::{IntoResponse as _, Response};
use tokio::sync::mpsc;

pub use self::app::RouterApp;
use super::answer::Refusal;
use super::app::Host;
use super::options::Options;
use super::routes::{guarded, missing};
use super::server::{Sockets, Stop, answer_all};
use super::table::Matched;
use crate::error::{Error, Result};

/// Answers requests by asking shards until `stops` says so, as [`serve`](super::serve) does.
///
/// # Errors
/// As [`serve`](super::serve).
pub async fn route(
    sockets: Sockets,
    app: Arc<RouterApp>,
    options: &Options,
    stops: mpsc::UnboundedReceiver<Stop>,
) -> Result<bool> {
    let host: Arc<dyn Host> = app.clone();
    let routes = guarded(Router::new().fallback(answer).with_state(app.clone()), host.clone());
    let fleet = app.fleet().clone();
    tokio::select! {
        ended = answer_all(sockets, (host, routes), options, stops) => ended,
        never = fleet.watch() => match never {},
    }
}

/// The calls of the table that a router answers.
async fn answer(State(app): State<Arc<RouterApp>>, mut request: Request) -> Response {
    let (route, names) = match request.extensions_mut().remove::<Matched>().unwrap_or(Matched::Nowhere) {
        Matched::Call(route, names) => (route, names),
        other => return missing(other, &request).into_response(),
    };
    request.extensions_mut().insert(names);
    match route.path {
        "/v1/models/{model}:retrieve" | "/v1/models/{model}:rank" | "/v1/models/{model}:embed" => {
            calls::of_active.call(request, app).await
        }
        "/v1/models/{model}/versions/{version}:retrieve"
        | "/v1/models/{model}/versions/{version}:rank"
        | "/v1/models/{model}/versions/{version}:embed" => calls::of_version.call(request, app).await,
        "/v1/models/{model}/labels/{label}:retrieve"
        | "/v1/models/{model}/labels/{label}:rank"
        | "/v1/models/{model}/labels/{label}:embed" => calls::of_label.call(request, app).await,
        "/v1/models" => calls::models.call(request, app).await,
        "/v1/models/{model}" => calls::model.call(request, app).await,
        "/v1/models/{model}/versions" => calls::versions.call(request, app).await,
        "/v1/models/{model}/versions/{version}" => calls::version.call(request, app).await,
        "/v1/models/{model}/labels" => calls::labels.call(request, app).await,
        "/v1/models/{model}/items/{id}" => calls::item.call(request, app).await,
        "/v1/debug/slow" => calls::slow.call(request, app).await,
        "/livez" => super::calls::live.call(request, app).await,
        "/readyz" => calls::ready.call(request, app).await,
        "/metrics" => super::calls::metrics.call(request, app).await,
        path => {
            let what = format!("a router does not answer {} {path}: ask the servers of the shards", route.method);
            Refusal::from(Error::unsupported(what)).into_response()
        }
    }
}
