//! Client of the HTTP API.

use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use ureq::http::Response;
use ureq::{Agent, Body, RequestBuilder};

use sterling_api::{ModelList, Problem, RetrieveResponse, rank_body, retrieve_body};
use sterling_core::error::{Error, Kind, Result};
use sterling_core::request::{Rank, Retrieve};

/// Maximum size of an answer in bytes.
const ANSWER_BYTES_MAX: u64 = 1 << 30;
/// Default timeout of a call, see [`Client::timeout`].
const TIMEOUT: Duration = Duration::from_secs(30);
/// Default number of retries of a call, see [`Client::retries`].
const RETRIES: u32 = 3;
/// Wait before a retry if the answer names none.
const RETRY_WAIT: Duration = Duration::from_secs(1);

/// A blocking client of a server or router. Clones share connections.
///
/// Problems that the server reports come back as errors of the same [`Kind`]. A request that exceeds the rate of its key (429), or
/// that an overloaded server rejects (503), is sent again after the seconds of `Retry-After`: up to [`Client::retries`] times, and
/// only within [`Client::timeout`]. Calls of [`Client::call`] may write, so they are sent again after 429 alone.
///
/// ```no_run
/// use sterling::{Client, Retrieve, User};
///
/// let client = Client::new("http://127.0.0.1:8080");
/// let answer = client.retrieve("catalogue", &Retrieve::of(User::Vector(vec![0.5; 16])))?;
/// println!("version {}: {:?}", answer.served.version, answer.result.items);
/// # Ok::<(), sterling::error::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Client {
    agent: Agent,
    url: String,
    authorization: Option<String>,
    timeout: Duration,
    retries: u32,
}

/// Effect of a call, which decides when it may be repeated.
#[derive(Clone, Copy, PartialEq)]
enum Effect {
    Reads,
    MayWrite,
}

impl Client {
    /// Creates a client of the server at this URL. `https` needs a proxy in front of this client, which only speaks HTTP.
    pub fn new(url: impl Into<String>) -> Self {
        let url = url.into().trim_end_matches('/').to_owned();
        Client { agent: agent(), url, authorization: None, timeout: TIMEOUT, retries: RETRIES }
    }

    /// Sets the API key (`sterling key`).
    pub fn key(self, key: &str) -> Self {
        Client { authorization: Some(format!("Bearer {key}")), ..self }
    }

    /// Sets the timeout of a call with its retries, 30 seconds by default.
    pub fn timeout(self, timeout: Duration) -> Self {
        Client { timeout, ..self }
    }

    /// Sets the maximum number of retries of a call, 3 by default.
    pub fn retries(self, retries: u32) -> Self {
        Client { retries, ..self }
    }

    /// Returns the loaded models.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn models(&self) -> Result<ModelList> {
        let url = format!("{}/v1/models", self.url);
        self.send(Effect::Reads, |timeout| self.prepared(self.agent.get(&url), timeout).call())
    }

    /// Returns the best items of a user.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn retrieve(&self, model: &str, request: &Retrieve) -> Result<RetrieveResponse> {
        self.post(Effect::Reads, &format!("/v1/models/{model}:retrieve"), &retrieve_body(request)?)
    }

    /// Returns the scores of items that the caller names.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn rank(&self, model: &str, request: &Rank) -> Result<RetrieveResponse> {
        self.post(Effect::Reads, &format!("/v1/models/{model}:rank"), &rank_body(request)?)
    }

    /// Posts any other call (`docs/reference/http.md`) and returns its decoded answer; the types are in [`crate::api`].
    ///
    /// # Errors
    /// The problem that the server reports; `Unavailable` if the server cannot be reached; `Corrupt` for an answer that is not of
    /// type `T`.
    pub fn call<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T> {
        self.post(Effect::MayWrite, path, body)
    }

    fn post<T: DeserializeOwned>(&self, effect: Effect, path: &str, body: &impl Serialize) -> Result<T> {
        let body = serde_json::to_vec(body).map_err(|e| Error::invalid(format!("the body is not JSON: {e}")))?;
        let url = format!("{}{path}", self.url);
        self.send(effect, |timeout| {
            let request = self.agent.post(&url).header("content-type", "application/json");
            self.prepared(request, timeout).send(&body[..])
        })
    }

    /// Adds the authorization and the timeout of a request.
    fn prepared<B>(&self, request: RequestBuilder<B>, timeout: Duration) -> RequestBuilder<B> {
        let request = request.config().timeout_global(Some(timeout)).build();
        match &self.authorization {
            Some(authorization) => request.header("authorization", authorization),
            None => request,
        }
    }

    /// Sends a request until it is answered or may not be repeated. `send` sends it with a timeout.
    fn send<T: DeserializeOwned>(
        &self,
        effect: Effect,
        send: impl Fn(Duration) -> std::result::Result<Response<Body>, ureq::Error>,
    ) -> Result<T> {
        let failed = |e: ureq::Error| Error::unavailable(format!("{}: {e}", self.url));
        let (start, mut left) = (Instant::now(), self.retries);
        loop {
            let remaining = self.timeout.saturating_sub(start.elapsed()).max(Duration::from_millis(1));
            let mut answer = send(remaining).map_err(failed)?;
            let bytes = answer.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_vec().map_err(failed)?;
            let status = answer.status();
            if status.is_success() {
                let read = serde_json::from_slice(&bytes);
                return read.map_err(|e| Error::corrupt(format!("{}: the answer cannot be read: {e}", self.url)));
            }
            let named = answer.headers().get("retry-after");
            let named = named.and_then(|seconds| Some(Duration::from_secs(seconds.to_str().ok()?.parse().ok()?)));
            let wait = named.unwrap_or(RETRY_WAIT);
            let is_repeatable = status == 429 || (status == 503 && effect == Effect::Reads);
            if !is_repeatable || left == 0 || start.elapsed().saturating_add(wait) >= self.timeout {
                let problem = self.problem(status.as_u16(), &bytes);
                return Err(named.into_iter().fold(problem, Error::retry_after));
            }
            left -= 1;
            std::thread::sleep(wait);
        }
    }

    fn problem(&self, status: u16, bytes: &[u8]) -> Error {
        let Ok(problem) = serde_json::from_slice::<Problem>(bytes) else {
            return Error::unavailable(format!("{}: status {status}: {}", self.url, String::from_utf8_lossy(bytes)));
        };
        let kind = Kind::named(&problem.code).unwrap_or(Kind::Internal);
        Error::new(kind, problem.detail)
    }
}

fn agent() -> Agent {
    Agent::config_builder().http_status_as_error(false).build().into()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpListener;

    use super::*;
    use sterling_core::request::User;

    /// A server that answers the first requests with these status lines and headers, and counts them.
    fn server(answers: Vec<&'static str>) -> (String, std::thread::JoinHandle<usize>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let serve = move || {
            let mut count = 0;
            for answer in answers {
                let (stream, _) = listener.accept().unwrap();
                let mut reader = BufReader::new(stream.try_clone().unwrap());
                let mut length = 0;
                loop {
                    let mut line = String::new();
                    reader.read_line(&mut line).unwrap();
                    match line.to_ascii_lowercase().strip_prefix("content-length:") {
                        Some(bytes) => length = bytes.trim().parse().unwrap(),
                        None if line == "\r\n" => break,
                        None => {}
                    }
                }
                reader.read_exact(&mut vec![0; length]).unwrap();
                count += 1;
                let body = "{\"models\": []}";
                let head = format!("HTTP/1.1 {answer}\r\nconnection: close\r\ncontent-length: {}", body.len());
                write!(&stream, "{head}\r\n\r\n{body}").unwrap();
            }
            count
        };
        (url, std::thread::spawn(serve))
    }

    #[test]
    fn rejected_requests_are_sent_again_in_time() {
        const RATE: &str = "429 Too Many Requests\r\nretry-after: 0";
        const BUSY: &str = "503 Service Unavailable\r\nretry-after: 0";
        const LATER: &str = "503 Service Unavailable\r\nretry-after: 30";
        const INVALID: &str = "400 Bad Request\r\nretry-after: 0";
        const FOUND: &str = "200 OK";
        let request = Retrieve::of(User::Vector(vec![1.0]));
        for (answers, reads, writes) in [
            (vec![RATE, BUSY, RATE, FOUND], (4, true), (2, false)),
            (vec![RATE, RATE, FOUND], (3, true), (3, true)),
            (vec![BUSY, FOUND], (2, true), (1, false)),
            (vec![BUSY; 5], (4, false), (1, false)),
            (vec![LATER, FOUND], (1, false), (1, false)),
            (vec![INVALID, FOUND], (1, false), (1, false)),
        ] {
            for (effect, expected) in [(Effect::Reads, reads), (Effect::MayWrite, writes)] {
                // The server answers no further request than those that are expected.
                let (url, served) = server(answers[..expected.0].to_vec());
                let client = Client::new(url);
                let answer = match effect {
                    Effect::Reads => client.post::<serde_json::Value>(effect, "/x", &()),
                    Effect::MayWrite => client.call::<serde_json::Value>("/x", &()),
                };
                assert_eq!(answer.is_ok(), expected.1, "{answers:?}: {answer:?}");
                assert_eq!(served.join().unwrap(), expected.0, "{answers:?}");
            }
        }
        let (url, _) = server(vec![BUSY]);
        let error = Client::new(url).retries(0).retrieve("m", &request).unwrap_err();
        assert_eq!(error.retry_wait(), Some(Duration::ZERO), "{error}");
        let (url, served) = server(vec![RATE, FOUND]);
        assert!(Client::new(url).models().unwrap().models.is_empty());
        assert_eq!(served.join().unwrap(), 2);
    }
}
