//! The edge of a router: the calls of a server, answered by the shards of a catalogue together.
//!
//! What is read and written is what a server reads and writes; between the two stands [`Fleet`](crate::route::Fleet) in place of registry and engine.
//! Of a server's calls there are those that ask (`:retrieve`, `:rank`, `:embed`, an item, models, versions and shards), the console, and those that change
//! items, which go to the shards that they belong to (`items`). What changes a server is asked of the server. `choice` is which version answers, `following`
//! holds answers against others, `pages` is what a cursor means here.

mod app;
mod calls;
mod choice;
mod explain;
mod following;
mod info;
mod items;
mod pages;
mod sizes;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::Method;
use axum::response::{IntoResponse as _, Response};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::timeout;

pub use self::app::RouterApp;
use super::answer::Refusal;
use super::options::Options;
use super::routes::{guarded, missing};
use super::server::{BACKLOG, Sockets, Stop, answer_all, bind};
use super::table::{Matched, run};
use sterling_core::error::{Error, Result};

/// How long a router that starts may look at its servers before it listens.
const FIRST_LOOK_MAX: Duration = Duration::from_secs(3);

/// Opens the socket of a router once it has looked at its servers, in a runtime. Clients that go by refused connections ask another router
/// meanwhile; a router that listened before would answer them 503. If the servers do not answer in time, it listens all the same.
///
/// # Errors
/// `Io` with what the system says of the address, which is taken before the look.
pub async fn listen_once_looked(address: SocketAddr, app: &RouterApp) -> Result<TcpListener> {
    let error = |e| Error::io(format!("address {address}"), e);
    let socket = bind(address).map_err(error)?;
    // A look that is cut short here is one that the router makes again.
    let _ = timeout(FIRST_LOOK_MAX, app.fleet().look()).await;
    socket.listen(BACKLOG).map_err(error)
}

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
    let fleet = app.fleet().clone();
    tokio::select! {
        ended = answer_all(sockets, (app.clone(), routes(app)), options, stops) => ended,
        never = fleet.watch() => match never {},
        never = fleet.judge() => match never {},
    }
}

/// The calls of a router, behind their layers.
pub(super) fn routes(app: Arc<RouterApp>) -> Router {
    guarded(Router::new().fallback(answer).with_state(app.clone()), app)
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
            run(calls::of_active, app, request).await
        }
        "/v1/models/{model}/versions/{version}:retrieve"
        | "/v1/models/{model}/versions/{version}:rank"
        | "/v1/models/{model}/versions/{version}:embed" => run(calls::of_version, app, request).await,
        "/v1/models/{model}/labels/{label}:retrieve"
        | "/v1/models/{model}/labels/{label}:rank"
        | "/v1/models/{model}/labels/{label}:embed" => run(calls::of_label, app, request).await,
        "/v1/models" => run(calls::models, app, request).await,
        "/v1/models/{model}" => run(calls::model, app, request).await,
        "/v1/models/{model}/versions" => run(calls::versions, app, request).await,
        "/v1/models/{model}/versions/{version}" => run(calls::version, app, request).await,
        "/v1/models/{model}/labels" => run(calls::labels, app, request).await,
        "/v1/models/{model}/shards" => run(calls::shards, app, request).await,
        "/v1/models/{model}/items/{id}" => run(calls::item, app, request).await,
        "/v1/models/{model}/items:position" => run(items::position, app, request).await,
        "/v1/models/{model}/items:upsert" => run(items::upsert, app, request).await,
        "/v1/models/{model}/items:delete" => run(items::delete, app, request).await,
        "/v1/models/{model}/traffic" if route.method == Method::GET => run(calls::traffic, app, request).await,
        "/v1/debug/slow" => run(calls::slow, app, request).await,
        "/v1/debug/shadow" => run(calls::shadow, app, request).await,
        "/v2" | "/v2/" => run(super::inference::server, app, request).await,
        "/v2/health/live" => run(super::inference::live, app, request).await,
        "/v2/health/ready" => run(calls::inference_ready, app, request).await,
        "/livez" => run(super::calls::live, app, request).await,
        "/readyz" => run(calls::ready, app, request).await,
        "/metrics" => run(super::calls::metrics, app, request).await,
        "/openapi.json" => run(super::openapi::openapi, app, request).await,
        "/" => run(super::console::console, app, request).await,
        path => {
            let what = format!("a router does not answer {} {path}: ask the servers of the shards", route.method);
            Refusal::from(Error::unsupported(what)).into_response()
        }
    }
}
