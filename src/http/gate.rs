//! The gate in front of the router. Under overload most requests are refused, and what a refusal costs is taken from those
//! that are not: so a call that would wait in vain for a worker is refused by its header alone, before routes, layers,
//! spans and the body. What goes out, what is counted and what is logged is the same as behind the gate.

use std::time::Instant;

use axum::http::{Method, Request};
use axum::response::{IntoResponse as _, Response};

use super::answer::Refusal;
use super::app::App;
use super::calls::VERBS;
use super::layers::{id_of, sign, verb_of};

/// The answer to a call that could not be in time; `None` where it is to be looked at.
pub(super) fn refusal<B>(app: &App, request: &Request<B>) -> Option<Response> {
    let start = Instant::now();
    let path = request.uri().path();
    let call = verb_of(path).filter(|verb| VERBS.contains(verb) && path.starts_with("/v1/models/"))?;
    if request.method() != Method::POST {
        return None;
    }
    let error = app.engine.admits(None).err()?;
    let id = id_of(request.headers());
    let mut response = Refusal::from(error).into_response();
    let took = start.elapsed();
    tracing::debug!(id = id.to_str().unwrap_or_default(), call, status = response.status().as_u16(), "refused unread");
    app.meters.answered(call, response.status(), took);
    sign(app, &mut response, id, took);
    Some(response)
}
