//! What every call shares: metrics, `Server-Timing`, and a panic that becomes an answer.

use std::any::Any;
use std::time::Instant;

use axum::body::Body;
use axum::extract::{MatchedPath, Request};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::answer::{Refusal, Timing};
use crate::error::Error;

/// Counts and times the call, and says in `Server-Timing` where the time went.
pub async fn observe(request: Request, next: Next) -> Response {
    let start = Instant::now();
    let call = call_of(&request);
    let mut response = next.run(request).await;
    let took = start.elapsed();
    let status = response.status().as_u16().to_string();
    metrics::counter!("sterling_requests_total", "call" => call, "status" => status).increment(1);
    metrics::histogram!("sterling_request_seconds", "call" => call).record(took.as_secs_f64());
    let timing = response.extensions_mut().remove::<Timing>().unwrap_or_default();
    response.headers_mut().extend(timing.header(took.as_secs_f64() * 1000.0));
    response
}

/// The label of a call: from a fixed list, so that no caller can make metrics grow.
fn call_of(request: &Request) -> &'static str {
    let path = request.uri().path();
    for verb in ["retrieve", "rank", "embed", "activate"] {
        if path.strip_suffix(verb).is_some_and(|rest| rest.ends_with(':')) {
            return verb;
        }
    }
    match request.extensions().get::<MatchedPath>().map(MatchedPath::as_str) {
        Some("/v1/models") => "models",
        Some("/v1/models/{model}") => "model",
        Some("/v1/models/{model}/versions") => "versions",
        Some("/metrics") => "metrics",
        Some("/livez" | "/readyz") => "health",
        _ => "other",
    }
}

/// The answer to a request whose handler panicked; the server goes on.
pub fn panicked(_: Box<dyn Any + Send>) -> Response<Body> {
    Refusal::from(Error::internal("the request broke its handler; this is a defect, the log holds more"))
        .into_response()
}
