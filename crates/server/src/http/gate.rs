//! Load shedding: admission control in front of HTTP. Under overload most requests are rejected, and rejections cost
//! time that accepted requests need. So a call that could not be in time, regardless of its body, is rejected at the
//! socket as soon as its bytes arrive, before routes, layers and spans. The answer and metrics are the same as those of
//! a rejection behind the layers.
//!
//! Only requests with unambiguous boundaries are examined: one complete request and nothing else in one read
//! ([`PlainRequest::of`]). In other reads, bytes of a body could be mistaken for a request.

use std::sync::atomic::Ordering;
use std::time::Instant;

use axum::http::Method;
use httparse::{EMPTY_HEADER, Request, Status};

use super::access::secret_of;
use super::answer::{Timing, http1};
use super::app::Host;
use super::connections::Connection;
use super::flow::{ConnectionFlow, flows};
use super::layers::{Signature, id_of};
use super::table;
use super::trace_context::{TraceContext, new_id};
use super::verb::Verb;
use crate::route::protocol::{CLIENT_HEADER, TRACEPARENT};

/// Maximum number of headers of an examined request.
const HEADERS_MAX: usize = 32;

/// Single complete request.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PlainRequest<'a> {
    /// Verb and path, if workers answer the call.
    call: Option<(Verb, &'a str)>,
    id: Option<&'a [u8]>,
    /// The header `Authorization`.
    authorization: Option<&'a [u8]>,
    traceparent: Option<&'a [u8]>,
    /// Client of a router.
    client: Option<&'a [u8]>,
    body: &'a [u8],
}

impl<'a> PlainRequest<'a> {
    /// Parses bytes; `None` unless they are exactly one complete, plain request.
    pub(super) fn of(bytes: &'a [u8]) -> Option<Self> {
        let mut headers = [EMPTY_HEADER; HEADERS_MAX];
        let mut request = Request::new(&mut headers);
        let Ok(Status::Complete(head)) = request.parse(bytes) else { return None };
        let (mut id, mut length, mut authorization, mut traceparent, mut client) = (None, None, None, None, None);
        let mut hosts = 0;
        for header in request.headers.iter() {
            let is = |name: &str| header.name.eq_ignore_ascii_case(name);
            if is("content-length") {
                let digits =
                    std::str::from_utf8(header.value).ok().filter(|text| text.bytes().all(|b| b.is_ascii_digit()))?;
                if length.replace(digits.parse::<usize>().ok()?).is_some() {
                    return None;
                }
            } else if is("host") {
                hosts += 1;
            } else if is("x-request-id") {
                id = id.or(Some(header.value));
            } else if is(TRACEPARENT) {
                traceparent = traceparent.or(Some(header.value));
            } else if is(CLIENT_HEADER) {
                client = client.or(Some(header.value));
            } else if is("authorization") {
                if authorization.replace(header.value).is_some() {
                    return None;
                }
            } else if is("connection") && !header.value.eq_ignore_ascii_case(b"keep-alive")
                || ["transfer-encoding", "expect", "upgrade"].into_iter().any(is)
            {
                return None;
            }
        }
        let is_whole = head.checked_add(length.unwrap_or(0)) == Some(bytes.len());
        if request.version != Some(1) || hosts != 1 || !is_whole {
            return None;
        }
        let call = request.path.filter(|path| request.method == Some("POST") && path.starts_with("/v1/models/"));
        let call = call.and_then(|path| Some((verb_of(path)?, path)));
        Some(PlainRequest { call, id, authorization, traceparent, client, body: bytes.get(head..)? })
    }
}

/// Returns the verb at the end of a path, if workers answer it.
fn verb_of(path: &str) -> Option<Verb> {
    let (_, last) = path.rsplit_once(':')?;
    Verb::parse_worker_verb(last)
}

/// Returns the model in the path of a call that workers answer.
fn model_in(path: &str) -> Option<&str> {
    let rest = path.strip_prefix("/v1/models/")?;
    match rest.split_once('/') {
        Some((model, _)) => Some(model),
        None => rest.rsplit_once(':').map(|(model, _)| model),
    }
}

/// Returns the answer to a call that could not be in time, also if it lacks a valid key; `None` if the request must be processed
/// normally.
pub(super) fn refusal(host: &dyn Host, connection: &Connection, request: &PlainRequest<'_>) -> Option<Vec<u8>> {
    let start = Instant::now();
    let (verb, path) = request.call.filter(|_| !host.entrance().draining.load(Ordering::Relaxed))?;
    let secret = request.authorization.and_then(secret_of);
    let flow = || {
        let caller = host.entrance().access.caller(secret);
        let (flow, ConnectionFlow(caller)) = flows(&caller, Some(connection.peer.address.ip()), request.client);
        connection.caller.called_by(caller);
        flow
    };
    let overloaded = host.admits(&flow, Some(request.body)).err()?;
    let is_let_in = || host.entrance().access.look(table::find(&Method::POST, path).needs(), secret);
    // Callers without permission learn nothing about the load.
    let denied = if host.entrance().access.is_guarded() { is_let_in().err() } else { None };
    let refusal = denied.unwrap_or_else(|| overloaded.into());
    let id = id_of(request.id);
    let took = start.elapsed();
    let status = refusal.status();
    let context = request.traceparent.and_then(TraceContext::of);
    let trace = context.as_ref().map(|context| context.trace);
    tracing::debug!(
        id = id.to_str().unwrap_or_default(),
        call = verb.name(),
        status = status.as_u16(),
        trace,
        "call rejected before HTTP handling, because it could not be in time"
    );
    host.entrance().meters.answered(verb, model_in(path), status, took);
    host.entrance().failures.answered(verb, status, Some(refusal.code()));
    let trace = context.as_ref().and_then(|context| context.answer(&new_id()));
    let mut answer = refusal.render();
    Signature { timing: Timing::default(), took, id, trace }.sign(answer.headers_mut());
    Some(http1(&answer))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "POST /v1/models/a:retrieve HTTP/1.1\r\nhost: x\r\n";

    #[test]
    fn the_client_of_a_router_is_seen() {
        let text = format!("{HEAD}Sterling-Client: 7\r\n\r\n");
        assert_eq!(PlainRequest::of(text.as_bytes()).and_then(|complete| complete.client), Some(&b"7"[..]));
    }

    #[test]
    fn whole_plain_requests_are_seen_and_nothing_else() {
        let call =
            |text: &str| PlainRequest::of(text.as_bytes()).map(|complete| complete.call.map(|(verb, _)| verb.name()));
        for (rest, expected) in [
            ("\r\n", Some(Some("retrieve"))),
            ("content-length: 2\r\n\r\n{}", Some(Some("retrieve"))),
            ("Content-Length: 2\r\nConnection: Keep-Alive\r\nx: y\r\n\r\n{}", Some(Some("retrieve"))),
            // A partial request, several requests, and ambiguous ones.
            ("content-length: 3\r\n\r\n{}", None),
            ("content-length: 1\r\n\r\n{}", None),
            ("content-length: 2\r\n", None),
            ("content-length: 2\r\ncontent-length: 2\r\n\r\n{}", None),
            ("content-length: 2, 2\r\n\r\n{}", None),
            ("content-length: +2\r\n\r\n{}", None),
            ("content-length: -2\r\n\r\n{}", None),
            ("content-length: \r\n\r\n", None),
            ("content-length: 18446744073709551615\r\n\r\n", None),
            ("content-length: 99999999999999999999\r\n\r\n", None),
            ("content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}", None),
            ("transfer-encoding: identity\r\n\r\n", None),
            ("expect: 100-continue\r\ncontent-length: 2\r\n\r\n{}", None),
            ("connection: close\r\n\r\n", None),
            ("connection: keep-alive, upgrade\r\n\r\n", None),
            ("upgrade: h2c\r\n\r\n", None),
            (" folded: x\r\n\r\n", None),
            ("host: x\r\n\r\n", None),
        ] {
            assert_eq!(call(&format!("{HEAD}{rest}")), expected, "{rest:?}");
        }
        for (first, expected) in [
            ("POST /v1/models/a/versions/3:rank HTTP/1.1", Some(Some("rank"))),
            ("POST /v1/models/a/labels/b:embed HTTP/1.1", Some(Some("embed"))),
            ("GET /v1/models/a:retrieve HTTP/1.1", Some(None)),
            ("POST /v1/models/a/versions/3:load HTTP/1.1", Some(None)),
            ("POST /v1/models/a/items:upsert HTTP/1.1", Some(None)),
            ("POST /other:retrieve HTTP/1.1", Some(None)),
            ("GET /readyz HTTP/1.1", Some(None)),
            ("POST /v1/models/a:retrieve HTTP/1.0", None),
            ("POST /v1/models/a:retrieve", None),
            ("PRI * HTTP/2.0", None),
        ] {
            assert_eq!(call(&format!("{first}\r\nhost: x\r\n\r\n")), expected, "{first}");
        }
        assert_eq!(call("GET /livez HTTP/1.1\r\n\r\n"), None, "names no host");
        for (path, model) in [
            ("/v1/models/a:retrieve", Some("a")),
            ("/v1/models/a/versions/3:rank", Some("a")),
            ("/v1/models/a", None),
            ("/v1", None),
        ] {
            assert_eq!(model_in(path), model, "{path}");
        }
        let many = "a: b\r\n".repeat(HEADERS_MAX);
        assert_eq!(call(&format!("{HEAD}{many}\r\n")), None);
        let named = format!("{HEAD}X-Request-Id: 7\r\nx-request-id: 8\r\n\r\n");
        assert_eq!(PlainRequest::of(named.as_bytes()).and_then(|complete| complete.id), Some(&b"7"[..]));
    }
}
