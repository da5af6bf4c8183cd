//! Builds the axum router: the table of calls behind their common layers.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::HeaderValue;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};

use super::access::{EntryPoint, LoggedCall, Role, check_site, secret_in};
use super::answer::Rejection;
use super::app::{App, Host};
use super::call_id::CallId;
use super::coding::{self, Encoders};
use super::connections::Peer;
use super::flow::flows;
use super::head::check_head;
use super::layers;
use super::parameters::check_known;
use super::routed::RouterApp;
use super::table::{AnswerFuture, Matched, Route};
use crate::route::protocol::CLIENT_HEADER;
use sterling_core::error::Error;

/// Calls of a server, behind the layers common to all calls.
pub fn router(app: Arc<App>) -> Router {
    guarded(Router::new().fallback(at_server).with_state(app.clone()), app)
}

/// Calls of a router, behind the same layers as those of a server.
pub(super) fn of_router(app: Arc<RouterApp>) -> Router {
    guarded(Router::new().fallback(at_router).with_state(app.clone()), app)
}

/// Adds the middleware layers (such as access control and limits) in front of the handlers.
fn guarded(answers: Router, host: Arc<dyn Host>) -> Router {
    answers
        .layer(tower_http::catch_panic::CatchPanicLayer::custom(layers::panicked))
        .layer(from_fn_with_state(host.clone(), guard))
        .layer(from_fn_with_state(host, layers::observe))
        .layer(from_fn_with_state(Encoders::default(), coding::choose))
        .layer(coding::layer())
}

/// Checks access and query parameters of a call, and records changes in the audit log.
async fn guard(State(host): State<Arc<dyn Host>>, mut request: Request, next: Next) -> Response {
    let matched = request.extensions_mut().remove::<Matched>().unwrap_or(Matched::Nowhere);
    let peer = request.extensions().get::<Peer>().copied();
    // Requests that this process creates itself have no client address and need no check.
    if peer.is_some()
        && let Err(refusal) = check_head(&request)
    {
        return refusal.into_response();
    }
    let needs = matched.needs();
    let admitted = host.entrance().access.admit(needs, secret_in(request.headers()));
    let admitted = admitted.and_then(|caller| {
        check_site(request.method(), request.uri(), request.headers())?;
        Ok(caller)
    });
    let caller = match admitted {
        Ok(caller) => caller,
        Err(refusal) => return refusal.into_response(),
    };
    // Administrators' calls may be answered on a separate socket only.
    if !host.entrance().access.answers(needs.role, peer.map_or(EntryPoint::Main, |peer| peer.door)) {
        return nowhere(request.uri().path()).into_response();
    }
    if let Some(key) = caller.name() {
        tracing::Span::current().record("key", key);
    }
    let change = (needs.role > Role::Read).then(|| {
        host.entrance().access.change(LoggedCall {
            id: CallId::of(request.extensions()),
            key: caller.name().map(str::to_owned),
            peer: peer.map(|peer| peer.address),
            method: request.method().to_string(),
            path: request.uri().path().to_owned(),
            call: matched.verb().name(),
        })
    });
    let known = match &matched {
        Matched::Call(route, _) if route.is_of_api() => check_known(request.uri(), route.parameters),
        _ => Ok(()),
    };
    // The error of a missing model names all models, which a key for some of them must not learn.
    let missing = needs.model.filter(|model| !caller.may_see_all() && host.lacks(model));
    let known = match missing {
        Some(model) => Err(Error::not_found(format!("model `{model}` is not served here"))),
        None => known,
    };
    request.extensions_mut().insert(matched);
    let client = request.headers().get(CLIENT_HEADER).map(HeaderValue::as_bytes);
    let (flow, connection_flow) = flows(&caller, peer.map(|peer| peer.address.ip()), client);
    request.extensions_mut().insert(flow);
    request.extensions_mut().insert(caller.clone());
    let mut response = match known {
        Ok(()) => next.run(request).await,
        Err(unknown) => Rejection::from(unknown).into_response(),
    };
    response.extensions_mut().insert(caller);
    response.extensions_mut().insert(flow);
    response.extensions_mut().insert(connection_flow);
    if let Some(change) = change {
        change.ended(response.status().as_u16()).await;
    }
    response
}

async fn at_server(State(app): State<Arc<App>>, request: Request) -> Response {
    answered(request, |route, request| route.at_server(app, request)).await
}

async fn at_router(State(app): State<Arc<RouterApp>>, request: Request) -> Response {
    answered(request, |route, request| route.at_router(app, request)).await
}

async fn answered(mut request: Request, answer: impl FnOnce(&Route, Request) -> AnswerFuture) -> Response {
    match request.extensions_mut().remove::<Matched>().unwrap_or(Matched::Nowhere) {
        Matched::Call(route, names) => {
            request.extensions_mut().insert(names);
            answer(route, request).await
        }
        other => missing(other, &request).into_response(),
    }
}

/// Answer to a request without a matching call.
fn missing(matched: Matched, request: &Request) -> Rejection {
    match matched {
        Matched::Method(allow) => Rejection::method(request.method(), allow),
        Matched::Verb(verb, known) => {
            let known = known.iter().map(|verb| format!("`:{verb}`")).collect::<Vec<_>>().join(", ");
            Error::not_found(format!("call `:{verb}`: expected one of {known}")).into()
        }
        Matched::NoText => Error::invalid(format!("path: got {}, expected UTF-8", request.uri().path())).into(),
        Matched::Nowhere | Matched::Call(..) => nowhere(request.uri().path()),
    }
}

fn nowhere(path: &str) -> Rejection {
    Error::not_found(format!("no call has the path {path}; `/openapi.json` lists the calls")).into()
}
