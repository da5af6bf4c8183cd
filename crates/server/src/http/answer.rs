//! Answers of calls: JSON bodies, and errors as problems of RFC 9457.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::header::{
    ACCEPT, ACCEPT_ENCODING, ALLOW, CONTENT_TYPE, HeaderValue, RETRY_AFTER, VARY, WWW_AUTHENTICATE,
};
use axum::http::{HeaderName, StatusCode};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use hyper::body::{Frame, SizeHint};
use serde::Serialize;

use super::form::Form;
use crate::route::protocol::UNAPPLIED_HEADER;
use sterling_api::{ARROW_STREAM, ArrowReply, Problem, Reply, Step};
use sterling_core::error::{Error, Kind, Result};
use sterling_core::logging::RateLimitedLog;
use sterling_core::quota::Memory;
use sterling_kernels::heap;

/// Memory reservation of an answer, released with its last chunk.
pub(super) type Share = Arc<Memory>;

/// Answer bytes with their memory reservation, until they are sent.
struct ReservedBytes {
    lines: Vec<u8>,
    _share: Share,
}

impl AsRef<[u8]> for ReservedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.lines
    }
}

/// Result of a call.
pub(super) type Outcome = std::result::Result<Response, Rejection>;

/// Content type of problems.
pub(super) const PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const ARROW: HeaderValue = HeaderValue::from_static(ARROW_STREAM);

/// Interval between log lines about requests that fail for lack of a dependency.
const UNAVAILABLE_LOG_INTERVAL: Duration = Duration::from_secs(1);

/// Supported content codings of bodies.
pub(super) const CODINGS: &str = "gzip, zstd";
/// Problem code for a body in an unsupported coding.
const UNREAD_CODING: &str = "unsupported_content_encoding";

/// Text and code of a problem, for protocols with other error bodies and for metrics.
#[derive(Clone)]
pub(super) struct ProblemText {
    pub(super) detail: String,
    pub(super) code: String,
}

/// Problem that is being returned. Boxed, to keep `Result`s small.
pub struct Rejection {
    problem: Box<Problem>,
    /// Accepted alternatives: methods, or codings of a body.
    allow: Option<Cow<'static, str>>,
    /// Seconds after which the request may be repeated.
    retry_after: Option<u64>,
    /// True if the call has certainly changed nothing.
    is_unapplied: bool,
}

impl From<Error> for Rejection {
    fn from(error: Error) -> Self {
        // One second by default: a full queue drains in far less than a second.
        let seconds = || error.retry_wait().map_or(1, whole_seconds);
        let problem = Box::new(problem(&error));
        Rejection {
            retry_after: (problem.status == 503).then(seconds),
            is_unapplied: error.is_unapplied(),
            problem,
            allow: None,
        }
    }
}

/// Rounds a wait up to full seconds, at least 1.
fn whole_seconds(wait: Duration) -> u64 {
    wait.as_millis().div_ceil(1000).max(1) as u64
}

/// Converts an error to a problem for the client; errors that the server's operator must examine are logged in full. While a
/// dependency is unavailable, all requests fail alike: per kind, one line per second is logged, with the number of the others.
pub fn problem(error: &Error) -> Problem {
    static AWAY: [RateLimitedLog; 4] = [const { RateLimitedLog::new() }; 4];
    match error.kind() {
        Kind::Internal | Kind::Io | Kind::Corrupt => {
            tracing::error!(%error, kind = error.kind().name(), "request failed")
        }
        kind @ (Kind::NotReady | Kind::Unavailable | Kind::NoSpace | Kind::Partial) => {
            let line = match kind {
                Kind::NotReady => &AWAY[0],
                Kind::Unavailable => &AWAY[1],
                Kind::NoSpace => &AWAY[2],
                _ => &AWAY[3],
            };
            match line.pass(UNAVAILABLE_LOG_INTERVAL) {
                Some(more) => tracing::warn!(%error, kind = kind.name(), more, "request failed"),
                None => tracing::debug!(%error, kind = kind.name(), "request failed"),
            }
        }
        _ => tracing::debug!(%error, kind = error.kind().name(), "request rejected"),
    }
    Problem::from(error)
}

impl Rejection {
    /// Creates a problem of HTTP itself, without a matching [`Kind`].
    pub fn http(status: StatusCode, code: &str, detail: impl Into<String>) -> Self {
        let problem = Problem {
            kind: format!("about:blank#{code}"),
            title: status.canonical_reason().unwrap_or_default().into(),
            status: status.as_u16(),
            detail: detail.into(),
            code: code.into(),
            retryable: [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS].contains(&status),
            offset: None,
        };
        Rejection { problem: Box::new(problem), allow: None, retry_after: None, is_unapplied: false }
    }

    /// Renders the answer. The response passes the layers of the handlers, or is sent without them as the bytes of [`http1`].
    pub(super) fn render(&self) -> axum::http::Response<String> {
        // Cannot fail: the value consists of strings and numbers.
        let mut response = axum::http::Response::new(serde_json::to_string(&*self.problem).unwrap_or_default());
        *response.status_mut() = self.status();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, PROBLEM_JSON);
        if let Some(seconds) = self.retry_after {
            headers.insert(RETRY_AFTER, seconds.into());
        }
        if let Some(allow) = self.allow.as_deref().and_then(|allow| HeaderValue::from_str(allow).ok()) {
            headers.insert(if self.problem.code == UNREAD_CODING { ACCEPT_ENCODING } else { ALLOW }, allow);
        }
        if self.is_unapplied {
            headers.insert(UNAPPLIED_HEADER, HeaderValue::from_static("1"));
        }
        // RFC 9110 requires `WWW-Authenticate` with status 401.
        if self.problem.status == 401 {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"sterling\""));
        }
        response
    }

    /// 401: missing or invalid key, without details.
    pub(super) fn unauthorized() -> Self {
        Rejection::http(
            StatusCode::UNAUTHORIZED,
            "unauthorized",
            "expected a key of this server: `Authorization: Bearer KEY`",
        )
    }

    /// 403: the key lacks permission.
    pub(super) fn forbidden(detail: String) -> Self {
        Rejection::http(StatusCode::FORBIDDEN, "forbidden", detail)
    }

    /// 429: the rate is exceeded; includes the time to wait.
    pub(super) fn too_early(detail: String, wait: Duration) -> Self {
        let refusal = Rejection::http(StatusCode::TOO_MANY_REQUESTS, "rate_limited", detail);
        Rejection { retry_after: Some(whole_seconds(wait)), ..refusal }
    }

    /// Returns the code of the problem.
    pub(super) fn code(&self) -> &str {
        &self.problem.code
    }

    /// Returns the HTTP status.
    pub(super) fn status(&self) -> StatusCode {
        StatusCode::from_u16(self.problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    /// 415: unsupported coding of a body.
    pub(super) fn coding(detail: String) -> Self {
        let refusal = Rejection::http(StatusCode::UNSUPPORTED_MEDIA_TYPE, UNREAD_CODING, detail);
        Rejection { allow: Some(CODINGS.into()), ..refusal }
    }

    /// 405 with the allowed methods.
    pub fn method(got: &axum::http::Method, allow: impl Into<Cow<'static, str>>) -> Self {
        let allow = allow.into();
        let detail = format!("method {got} is not allowed here, expected {allow}");
        Rejection {
            allow: Some(allow),
            ..Rejection::http(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", detail)
        }
    }
}

impl IntoResponse for Rejection {
    fn into_response(self) -> Response {
        let mut response = self.render().map(Body::from);
        let Problem { detail, code, .. } = *self.problem;
        response.extensions_mut().insert(ProblemText { detail, code });
        response
    }
}

/// Returns the bytes of an answer in HTTP/1.1, formatted as hyper does, for requests that are answered before any handler.
pub(super) fn http1(response: &axum::http::Response<String>) -> Vec<u8> {
    let mut bytes = format!("HTTP/1.1 {}\r\n", response.status()).into_bytes();
    bytes.reserve(512);
    for (name, value) in response.headers() {
        bytes.extend_from_slice(name.as_str().as_bytes());
        bytes.extend_from_slice(b": ");
        bytes.extend_from_slice(value.as_bytes());
        bytes.extend_from_slice(b"\r\n");
    }
    let body = response.body();
    bytes.extend_from_slice(format!("content-length: {}\r\n\r\n", body.len()).as_bytes());
    bytes.extend_from_slice(body.as_bytes());
    bytes
}

/// Times of a pass, for `Server-Timing`; `layers` adds the total.
#[derive(Clone, Default)]
pub struct Timing(pub Vec<(String, f64)>);

impl Timing {
    /// Reads the steps of an explained answer.
    pub fn of(steps: &[Step]) -> Self {
        Timing(steps.iter().map(|s| (s.name.clone(), s.micros as f64 / 1000.0)).collect())
    }

    /// Formats the header, with times in milliseconds.
    pub fn header(&self, total_ms: f64) -> Option<(HeaderName, HeaderValue)> {
        let mut text = format!("total;dur={total_ms:.3}");
        for (name, ms) in &self.0 {
            text.push_str(&format!(", {name};dur={ms:.3}"));
        }
        Some((HeaderName::from_static("server-timing"), HeaderValue::from_str(&text).ok()?))
    }
}

/// 200 with a JSON body.
pub fn json(body: &impl Serialize) -> Response {
    axum::Json(body).into_response()
}

/// 200 with a JSON body that is charged to the memory budget of answers until it is sent.
///
/// # Errors
/// As [`Memory::add`].
pub(super) fn held_json(body: &impl Serialize, share: Share) -> Outcome {
    let text = serde_json::to_vec(body).map_err(|e| Error::internal(format!("cannot encode an answer: {e}")))?;
    share.add(text.len() as u64)?;
    Ok(([(CONTENT_TYPE, JSON)], whole(text, share)).into_response())
}

/// Number of items above which a reply is large; its memory is returned to the system afterwards.
pub(super) const LARGE_REPLY_ITEMS: usize = 20_000;

/// 200 with a reply of items, in the requested format. Small replies are written at once, others in chunks as the client reads.
/// `share` is released when the complete reply is written.
///
/// # Errors
/// Fails if the reply cannot be written in that format.
pub fn reply(mut reply: Reply, timing: Timing, share: Share, form: Form) -> Result<Response> {
    let is_large = reply.len() > LARGE_REPLY_ITEMS;
    let (kind, body) = match form {
        Form::Json => {
            let first = reply.next().unwrap_or_default();
            (JSON, if reply.is_done() { whole(first, share) } else { pieces(first, reply.map(Ok), share, is_large) })
        }
        Form::Arrow(id) => {
            let mut reply = ArrowReply::new(reply, &id, &share)?;
            let first = reply.next().unwrap_or_else(|| Ok(Vec::new()))?;
            (ARROW, if reply.is_done() { whole(first, share) } else { pieces(first, reply, share, is_large) })
        }
    };
    let mut response = ([(CONTENT_TYPE, kind), (VARY, HeaderValue::from(ACCEPT))], body).into_response();
    response.extensions_mut().insert(timing);
    Ok(response)
}

/// Returns a body that holds its memory reservation until it is sent.
pub(super) fn whole(lines: Vec<u8>, share: Share) -> Body {
    Body::from(Bytes::from_owner(ReservedBytes { lines, _share: share }))
}

/// Returns a body of several complete chunks, which share the memory reservation until the last one is sent.
pub(super) fn body_of_chunks(pieces: impl IntoIterator<Item = Vec<u8>>, share: &Share) -> Body {
    let held = |lines| Bytes::from_owner(ReservedBytes { lines, _share: share.clone() });
    Body::new(CompleteChunks(pieces.into_iter().filter(|piece| !piece.is_empty()).map(held).collect()))
}

/// Complete chunks: the length of the body is known.
struct CompleteChunks(VecDeque<Bytes>);

impl HttpBody for CompleteChunks {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(|piece| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.iter().map(|piece| piece.len() as u64).sum())
    }
}

/// Returns a body in chunks, which hold the memory reservation until the last one is sent.
pub(super) fn pieces(
    first: Vec<u8>,
    rest: impl Iterator<Item = Result<Vec<u8>>> + Send + 'static,
    share: Share,
    is_large: bool,
) -> Body {
    let pieces = std::iter::once(Ok(first)).chain(rest).map(move |piece| {
        let held = |lines| Bytes::from_owner(ReservedBytes { lines, _share: share.clone() });
        piece.map(held).inspect_err(|error| tracing::error!(%error, "an answer was cut off before its end"))
    });
    let end = std::iter::from_fn(move || {
        is_large.then(heap::announce);
        None
    });
    Body::from_stream(stream::iter(pieces.chain(end)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use axum::http::{HeaderMap, Method};
    use hyper::server::conn::http1 as server;
    use hyper::service::service_fn;
    use hyper_util::rt::TokioIo;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::http::layers::Signature;

    /// Returns the bytes that a client receives for a handler's answer.
    async fn served(response: Response) -> Vec<u8> {
        let (mut client, socket) = tokio::io::duplex(1 << 16);
        let response = std::sync::Mutex::new(Some(response));
        let answer = service_fn(|_| {
            let response = response.lock().unwrap().take().unwrap();
            async { Ok::<_, Infallible>(response) }
        });
        let serving = server::Builder::new().half_close(true).serve_connection(TokioIo::new(socket), answer);
        let asking = async {
            client.write_all(b"POST / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
            client.shutdown().await.unwrap();
            let mut bytes = Vec::new();
            client.read_to_end(&mut bytes).await.unwrap();
            bytes
        };
        let (bytes, served) = tokio::join!(asking, serving);
        served.unwrap();
        bytes
    }

    #[tokio::test]
    async fn a_rejection_has_the_same_bytes_with_and_without_a_handler() {
        let retry = Error::overloaded("the queue is \"full\", é").retry_after(Duration::from_millis(2500));
        let refusals: [Rejection; 8] = [
            retry.into(),
            Error::deadline("late").into(),
            Error::invalid("field `k`: got 0").at(7).into(),
            Rejection::unauthorized(),
            Rejection::forbidden("key `a` is not for model `b`".into()),
            Rejection::too_early("key `a` is limited to 3 requests per second".into(), Duration::from_secs(1)),
            Rejection::coding("coding `br`".into()),
            Rejection::method(&Method::PUT, "GET, POST"),
        ];
        for refusal in refusals {
            let mut headers = HeaderMap::new();
            let trace = Some(HeaderValue::from_static("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"));
            let (timing, took) = (Timing::default(), Duration::from_micros(1234));
            Signature { timing, took, id: HeaderValue::from_static("7"), trace }.sign(&mut headers);
            let mut rendered = refusal.render();
            rendered.headers_mut().extend(headers.clone());
            let mut response = refusal.into_response();
            response.headers_mut().extend(headers);
            let (reported, expected) = (http1(&rendered), served(response).await);
            assert_eq!(String::from_utf8(reported).unwrap(), String::from_utf8(expected).unwrap());
        }
    }
}
