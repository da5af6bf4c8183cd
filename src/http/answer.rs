//! Answers: JSON with the headers that every call carries, and problems.

use axum::http::header::{ALLOW, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use axum::http::{HeaderName, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use super::wire::{Problem, Step};
use crate::error::Error;

/// Seconds after which a refused request may be tried again; a queue of bounded length drains well within it.
const RETRY_AFTER_SECONDS: HeaderValue = HeaderValue::from_static("1");

/// A problem on its way out. Boxed, for answers carry it in `Result`s.
pub struct Refusal {
    problem: Box<Problem>,
    allow: Option<&'static str>,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        if error.kind() == crate::error::Kind::Internal {
            tracing::error!(%error, "internal error");
        }
        Refusal { problem: Box::new(Problem::from(&error)), allow: None }
    }
}

impl From<Problem> for Refusal {
    fn from(problem: Problem) -> Self {
        Refusal { problem: Box::new(problem), allow: None }
    }
}

impl Refusal {
    /// A problem of HTTP itself, which no [`crate::error::Kind`] stands for.
    pub fn http(status: StatusCode, code: &str, detail: impl Into<String>) -> Self {
        let problem = Problem {
            kind: format!("about:blank#{code}"),
            title: status.canonical_reason().unwrap_or_default().into(),
            status: status.as_u16(),
            detail: detail.into(),
            code: code.into(),
            retryable: false,
            offset: None,
        };
        Refusal::from(problem)
    }

    /// 405, naming what is allowed.
    pub fn method(got: &axum::http::Method, allow: &'static str) -> Self {
        let detail = format!("method {got} is not allowed here, expected {allow}");
        Refusal { allow: Some(allow), ..Refusal::http(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", detail) }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, axum::Json(&*self.problem)).into_response();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(RETRY_AFTER, RETRY_AFTER_SECONDS);
        }
        if let Some(allow) = self.allow {
            headers.insert(ALLOW, HeaderValue::from_static(allow));
        }
        response
    }
}

/// The times of a pass, for `Server-Timing`; `layers` adds the total.
#[derive(Clone, Default)]
pub struct Timing(pub Vec<(String, f64)>);

impl Timing {
    /// The steps of an explained answer.
    pub fn of(steps: &[Step]) -> Self {
        Timing(steps.iter().map(|s| (s.name.clone(), s.micros as f64 / 1000.0)).collect())
    }

    /// The header's name and value, in milliseconds.
    pub fn header(&self, total_ms: f64) -> Option<(HeaderName, HeaderValue)> {
        let mut text = format!("total;dur={total_ms:.3}");
        for (name, ms) in &self.0 {
            text.push_str(&format!(", {name};dur={ms:.3}"));
        }
        Some((HeaderName::from_static("server-timing"), HeaderValue::from_str(&text).ok()?))
    }
}

/// 200 with a JSON body and the times of the steps.
pub fn json(body: &impl Serialize, timing: Timing) -> Response {
    let mut response = axum::Json(body).into_response();
    response.extensions_mut().insert(timing);
    response
}
