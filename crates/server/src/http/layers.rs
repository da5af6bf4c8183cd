//! Layers common to all calls: request id, metrics, `Server-Timing`, log line, and conversion of panics to answers.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{CONNECTION, DATE, HeaderName, HeaderValue};
use axum::http::{HeaderMap, Version};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tracing::Instrument as _;
use tracing::field::Empty;

use super::access::Caller;
use super::answer::{ProblemText, Rejection, Timing};
use super::app::Host;
use super::call_id::CallId;
use super::date::date;
use super::inference;
use super::slow::{PassWork, millis};
use super::table;
use super::trace_context::{TraceContext, new_id};
use super::traces::{Recorded, Traced};
use crate::route::protocol;
use sterling_api::{SlowCall, SlowPass};
use sterling_core::error::{Error, panic_message};
use sterling_core::request::Origin;

const REQUEST_ID: HeaderName = HeaderName::from_static(protocol::REQUEST_ID);
const TRACEPARENT: HeaderName = HeaderName::from_static(protocol::TRACEPARENT);
/// Header with the number that a router gives a call.
const CALL: HeaderName = HeaderName::from_static(protocol::CALL_HEADER);
/// Longest request id that is accepted from a client, in bytes.
const REQUEST_ID_BYTES_MAX: usize = 128;

/// Matches a request with the table of calls, counts and times it, assigns the id for its log lines, and reports times in
/// `Server-Timing`.
pub async fn observe(State(host): State<Arc<dyn Host>>, mut request: Request, next: Next) -> Response {
    let start = Instant::now();
    let matched = table::find(request.method(), request.uri().path());
    let (verb, version) = (matched.verb(), request.version());
    let call = verb.name();
    let model = matched.needs().model.map(str::to_owned);
    let id = id_of(request.headers().get(&REQUEST_ID).map(HeaderValue::as_bytes));
    let header = request.headers().get(protocol::TRACEPARENT).cloned();
    let context = header.as_ref().and_then(|header| TraceContext::of(header.as_bytes()));
    let (traced, begun) = (host.entrance().traces.begin(context.as_ref()), SystemTime::now());
    let named = context.as_ref().map(|context| context.trace);
    let trace = named.or(traced.as_ref().map(|traced| traced.trace.as_str())).map(str::to_owned);
    let span = tracing::info_span!("request", id = id.to_str().unwrap_or_default(), call, key = Empty, trace);
    // If this process records no trace, the caller's span stays the parent.
    let parent = traced.as_ref().map_or_else(|| context.as_ref().and(header.clone()), Traced::header);
    let number = request.headers().get(CALL).cloned();
    request.extensions_mut().insert(matched);
    let text = |value: &HeaderValue| value.to_str().ok().map(Arc::from);
    let origin = Origin { id: text(&id), trace: parent.as_ref().and_then(text) };
    request.extensions_mut().insert(CallId(origin));
    let is_inference = inference::is_of_protocol(request.uri().path());
    let mut response = next.run(request).instrument(span.clone()).await;
    if is_inference {
        response = inference::with_error(response);
    }
    let took = start.elapsed();
    span.in_scope(|| tracing::debug!(status = response.status().as_u16(), ms = millis(took), "request answered"));
    host.entrance().meters.answered(verb, model.as_deref(), response.status(), took);
    let code = response.extensions().get::<ProblemText>().map(|reported| reported.code.as_str());
    host.entrance().failures.answered(verb, response.status(), code);
    let (status, extensions) = (response.status().as_u16(), response.extensions_mut());
    let timing = extensions.remove::<Timing>().unwrap_or_default();
    let (passed, caller) = (extensions.remove::<PassWork>(), extensions.remove::<Caller>());
    let key = caller.as_ref().and_then(Caller::name).map(str::to_owned);
    // If calls require a key, callers without one cannot influence which calls are recorded.
    let traced = traced.filter(|_| key.is_some() || !host.entrance().access.is_guarded());
    let answer = match (&traced, context) {
        (Some(traced), _) => traced.header(),
        (None, Some(context)) => context.answer(&new_id()),
        (None, None) => None,
    };
    if let Some(traced) = traced {
        host.entrance().traces.end(Recorded {
            traced,
            begun,
            took,
            call,
            status,
            key: key.clone(),
            passed: passed.clone(),
        });
    }
    if verb.is_pass() {
        host.entrance().slow.note(took.as_micros() as u64, || SlowCall {
            time: sterling_telemetry::now(),
            id: id.to_str().unwrap_or_default().to_owned(),
            trace,
            key,
            call: call.to_owned(),
            status,
            ms: millis(took),
            pass: passed.map(SlowPass::from),
        });
    }
    let headers = response.headers_mut();
    Signature { timing, took, id, trace: answer }.sign(headers);
    headers.extend(number.map(|number| (CALL, number)));
    // HTTP/2 uses a GOAWAY frame instead.
    if host.entrance().draining.load(Ordering::Relaxed) && version < Version::HTTP_2 {
        // Makes clients with persistent connections send their next request elsewhere.
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// Values of the headers that every answer carries.
pub(super) struct Signature {
    pub(super) timing: Timing,
    pub(super) took: Duration,
    /// Id of the request.
    pub(super) id: HeaderValue,
    /// The header `traceparent`.
    pub(super) trace: Option<HeaderValue>,
}

impl Signature {
    pub(super) fn sign(self, headers: &mut HeaderMap) {
        headers.extend(self.timing.header(self.took.as_secs_f64() * 1000.0));
        headers.insert(REQUEST_ID, self.id);
        headers.insert(DATE, date());
        headers.extend(self.trace.map(|trace| (TRACEPARENT, trace)));
    }
}

/// Returns the client's request id if it is valid, or a new one.
pub(super) fn id_of(own: Option<&[u8]>) -> HeaderValue {
    let own = own.filter(|id| is_loggable(id)).and_then(|id| HeaderValue::from_bytes(id).ok());
    own.unwrap_or_else(|| HeaderValue::from_str(&new_id()).unwrap_or(HeaderValue::from_static("0")))
}

/// Returns whether an id is safe to log: ASCII letters, digits and some punctuation, without quotes.
fn is_loggable(id: &[u8]) -> bool {
    let is_plain = |c: &u8| c.is_ascii_alphanumeric() || b"-_.:/+=@".contains(c);
    !id.is_empty() && id.len() <= REQUEST_ID_BYTES_MAX && id.iter().all(is_plain)
}

/// Answer to a request whose handler panicked; the server continues.
pub fn panicked(panic: Box<dyn Any + Send>) -> Response<Body> {
    Rejection::from(Error::internal(format!("the handler panicked: {}", panic_message(&*panic)))).into_response()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn only_plain_ids_are_taken_over() {
        let long = "a".repeat(129);
        for (id, sane) in [
            ("7f3a", true),
            ("01J9Z-b_c.d:e/f+g=@", true),
            ("", false),
            ("a b", false),
            ("a\"b", false),
            ("a\tb", false),
            (&long[..128], true),
            (&long[..], false),
        ] {
            assert_eq!(is_loggable(id.as_bytes()), sane, "{id}");
        }
        assert!(!is_loggable(b"\xff"));
        assert_ne!(new_id(), new_id());
        assert_eq!(new_id().len(), 16);
    }
}
