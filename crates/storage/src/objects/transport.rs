//! HTTP transport for buckets: a connection may be slow, but not stalled.
//!
//! The crate `object_store` limits the duration of a request, so that a large file never arrives over a slow link. This client
//! limits the time without progress in either direction instead. The client also corrects two kinds of answers that
//! `object_store` cannot handle: listings with invalid keys, and conflicts that mean "try again".

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use hyper::body::{Body, Bytes, Frame, SizeHint};
use hyper::{Method, StatusCode};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse, HttpResponseBody,
    HttpService,
};
use object_store::{ClientConfigKey, ClientOptions};
use tokio::time::{Sleep, sleep};

use super::strays::without_strays;
use sterling_core::locks::locked;

/// Default stall timeout, if the provider's variables (`AWS_READ_TIMEOUT`, ...) do not set one.
const SILENCE: Duration = Duration::from_secs(20);
/// Maximum size of the socket send buffer: bytes that the system accepted but may not have sent.
const UNSENT: u64 = 4 << 20;
/// Minimum rate in bytes per second at which the send buffer is assumed to drain.
const FLOOR: u64 = 32 << 10;
/// S3 error codes for concurrent requests that may simply be retried.
const RETRYABLE_CODES: [&str; 2] = ["ConditionalRequestConflict", "OperationAborted"];

/// Factory of the HTTP clients of a store.
#[derive(Debug)]
pub(super) struct Transport;

impl HttpConnector for Transport {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = client(options).map_err(|e| object_store::Error::Generic { store: "HTTP", source: e.into() })?;
        let silence = options.get_config_value(&ClientConfigKey::ReadTimeout).and_then(|text| duration(&text));
        Ok(HttpClient::new(Wire { client, silence: silence.unwrap_or(SILENCE) }))
    }
}

/// Creates a client with the options from the environment, except the limits on complete requests.
fn client(options: &ClientOptions) -> reqwest::Result<reqwest::Client> {
    let set = |key: ClientConfigKey| options.get_config_value(&key);
    let is = |key| set(key).is_some_and(|text| ["1", "true", "on", "yes", "y"].contains(&&*text.to_lowercase()));
    let mut builder = reqwest::Client::builder().https_only(!is(ClientConfigKey::AllowHttp));
    let connect = set(ClientConfigKey::ConnectTimeout).and_then(|text| duration(&text));
    builder = builder.connect_timeout(connect.unwrap_or(Duration::from_secs(5)));
    if let Some(idle) = set(ClientConfigKey::PoolIdleTimeout).and_then(|text| duration(&text)) {
        builder = builder.pool_idle_timeout(idle);
    }
    if let Some(most) = set(ClientConfigKey::PoolMaxIdlePerHost).and_then(|text| text.parse().ok()) {
        builder = builder.pool_max_idle_per_host(most);
    }
    if let Some(agent) = set(ClientConfigKey::UserAgent) {
        builder = builder.user_agent(agent);
    }
    if let Some(proxy) = set(ClientConfigKey::ProxyUrl) {
        let excluded = set(ClientConfigKey::ProxyExcludes).and_then(|text| reqwest::NoProxy::from_string(&text));
        builder = builder.proxy(reqwest::Proxy::all(proxy)?.no_proxy(excluded));
        if let Some(certificate) = set(ClientConfigKey::ProxyCaCertificate) {
            builder = builder.tls_certs_merge([reqwest::tls::Certificate::from_pem(certificate.as_bytes())?]);
        }
    }
    if is(ClientConfigKey::Http1Only) {
        builder = builder.http1_only();
    }
    if is(ClientConfigKey::Http2Only) {
        builder = builder.http2_prior_knowledge();
    }
    if is(ClientConfigKey::AllowInvalidCertificates) {
        builder = builder.danger_accept_invalid_certs(true);
    }
    builder.build()
}

/// Parses a duration of an environment variable: `500ms`, `30s`, `30 seconds`, `2m`.
fn duration(text: &str) -> Option<Duration> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (count, unit) = text.split_at(end);
    let count = count.parse().ok()?;
    match unit.trim() {
        "ms" | "millis" => Some(Duration::from_millis(count)),
        "" | "s" | "sec" | "secs" | "second" | "seconds" => Some(Duration::from_secs(count)),
        "m" | "min" | "mins" | "minute" | "minutes" => Some(Duration::from_secs(60 * count)),
        _ => None,
    }
}

/// HTTP client that aborts stalled requests.
#[derive(Debug)]
struct Wire {
    client: reqwest::Client,
    silence: Duration,
}

impl HttpService for Wire {
    fn call<'a, 'b>(
        &'a self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(self.send(request))
    }
}

impl Wire {
    async fn send(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let query = request.uri().query().unwrap_or_default();
        let is_listing = request.method() == Method::GET
            && query.split('&').any(|part| ["list-type=2", "comp=list"].contains(&part));
        let (parts, body) = request.into_parts();
        let url = parts.uri.to_string().parse::<reqwest::Url>();
        let url = url.map_err(|e| HttpError::new(HttpErrorKind::Unknown, e))?;
        let clock = Arc::new(Clock::new(body.content_length() as u64));
        let mut requested = reqwest::Request::new(parts.method, url);
        *requested.headers_mut() = parts.headers;
        *requested.body_mut() = Some(match body.content_length() {
            0 => Bytes::new().into(),
            _ => reqwest::Body::wrap(ProgressBody { body, clock: clock.clone() }),
        });
        let answer = tokio::select! {
            answer = self.client.execute(requested) => answer.map_err(failed)?,
            () = clock.silent(self.silence) => return Err(silent(self.silence)),
        };
        let (mut parts, body) = hyper::Response::<reqwest::Body>::from(answer).into_parts();
        let body = HttpResponseBody::new(WatchedBody { body, silence: self.silence, waits: None });
        let body = match parts.status {
            status if is_listing && status.is_success() => without_strays(body.bytes().await?).into(),
            StatusCode::CONFLICT => {
                let reported = body.bytes().await?;
                let text = String::from_utf8_lossy(&reported);
                if RETRYABLE_CODES.iter().any(|code| text.contains(code)) {
                    parts.status = StatusCode::SERVICE_UNAVAILABLE;
                }
                reported.into()
            }
            _ => body,
        };
        Ok(HttpResponse::from_parts(parts, body))
    }
}

#[derive(Debug)]
struct Text(String);

impl std::fmt::Display for Text {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Text {}

fn silent(silence: Duration) -> HttpError {
    HttpError::new(HttpErrorKind::Timeout, Text(format!("no byte was transferred for {silence:?}")))
}

fn failed(error: reqwest::Error) -> HttpError {
    let kind = match () {
        () if error.is_timeout() => HttpErrorKind::Timeout,
        () if error.is_connect() => HttpErrorKind::Connect,
        () => HttpErrorKind::Interrupted,
    };
    // The message of the store contains the URL already; the causes describe the failure.
    let error = error.without_url();
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(inner) = cause {
        text.push_str(&format!(": {inner}"));
        cause = inner.source();
    }
    HttpError::new(kind, Text(text))
}

/// Time of the last progress of a request body, and number of bytes sent so far.
struct Clock {
    state: Mutex<(Instant, u64)>,
    length: u64,
}

impl Clock {
    fn new(length: u64) -> Self {
        Clock { state: Mutex::new((Instant::now(), 0)), length }
    }

    fn tick(&self, bytes: usize) {
        let mut state = locked(&self.state);
        *state = (Instant::now(), state.1 + bytes as u64);
    }

    /// Returns once no byte was accepted for `silence`. After the last byte, allows extra time for the send buffer to drain.
    async fn silent(&self, silence: Duration) {
        loop {
            let (last, sent) = *locked(&self.state);
            let on_its_way = if sent < self.length { 0 } else { self.length.min(UNSENT) };
            let most = silence + Duration::from_secs(on_its_way / FLOOR);
            match most.checked_sub(last.elapsed()) {
                Some(rest) if !rest.is_zero() => sleep(rest).await,
                _ => return,
            }
        }
    }
}

/// Request body that records its progress.
struct ProgressBody {
    body: HttpRequestBody,
    clock: Arc<Clock>,
}

impl Body for ProgressBody {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        let bytes =
            frame.as_ref().and_then(|frame| frame.as_ref().ok()).and_then(Frame::data_ref).map_or(0, Bytes::len);
        self.clock.tick(bytes);
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Response body that fails if it stalls.
struct WatchedBody {
    body: reqwest::Body,
    silence: Duration,
    /// Stall timeout that runs while the reader waits for the next bytes.
    waits: Option<Pin<Box<Sleep>>>,
}

impl Body for WatchedBody {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            self.waits = None;
            return Poll::Ready(frame.map(|frame| frame.map_err(failed)));
        }
        let silence = self.silence;
        ready!(self.waits.get_or_insert_with(|| Box::pin(sleep(silence))).as_mut().poll(context));
        Poll::Ready(Some(Err(silent(silence))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_durations_of_the_environment() {
        let read = ["500ms", "30s", "30 seconds", "2m", "7"].map(duration);
        assert_eq!(
            read.map(|duration| duration.map(|d| d.as_millis())),
            [500, 30_000, 30_000, 120_000, 7000].map(Some)
        );
        assert_eq!(["", "s", "1 day"].map(duration), [None; 3]);
    }
}
