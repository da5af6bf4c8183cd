//! Client of the HTTP API.

use std::time::Duration;

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

/// A blocking client of a server or router. Clones share connections.
///
/// Problems that the server reports come back as errors of the same [`Kind`].
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
}

impl Client {
    /// Creates a client of the server at this URL. `https` needs a proxy in front of this client, which only speaks HTTP.
    pub fn new(url: impl Into<String>) -> Self {
        let url = url.into().trim_end_matches('/').to_owned();
        Client { agent: agent(TIMEOUT), url, authorization: None }
    }

    /// Sets the API key (`sterling key`).
    pub fn key(self, key: &str) -> Self {
        Client { authorization: Some(format!("Bearer {key}")), ..self }
    }

    /// Sets the timeout of a call, 30 seconds by default.
    pub fn timeout(self, timeout: Duration) -> Self {
        Client { agent: agent(timeout), ..self }
    }

    /// Returns the loaded models.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn models(&self) -> Result<ModelList> {
        self.read(self.authorized(self.agent.get(format!("{}/v1/models", self.url))).call())
    }

    /// Returns the best items of a user.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn retrieve(&self, model: &str, request: &Retrieve) -> Result<RetrieveResponse> {
        self.call(&format!("/v1/models/{model}:retrieve"), &retrieve_body(request)?)
    }

    /// Returns the scores of items that the caller names.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn rank(&self, model: &str, request: &Rank) -> Result<RetrieveResponse> {
        self.call(&format!("/v1/models/{model}:rank"), &rank_body(request)?)
    }

    /// Posts any other call (`docs/reference/http.md`) and reads its answer, whose types are in [`crate::api`].
    ///
    /// # Errors
    /// The problem that the server reports; `Unavailable` if it cannot be reached; `Corrupt` for an answer of another shape.
    pub fn call<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T> {
        let body = serde_json::to_vec(body).map_err(|e| Error::invalid(format!("the body is not JSON: {e}")))?;
        let request = self.agent.post(format!("{}{path}", self.url)).header("content-type", "application/json");
        self.read(self.authorized(request).send(&body[..]))
    }

    fn authorized<B>(&self, request: RequestBuilder<B>) -> RequestBuilder<B> {
        match &self.authorization {
            Some(authorization) => request.header("authorization", authorization),
            None => request,
        }
    }

    fn read<T: DeserializeOwned>(&self, answer: std::result::Result<Response<Body>, ureq::Error>) -> Result<T> {
        let failed = |e: ureq::Error| Error::unavailable(format!("{}: {e}", self.url));
        let mut answer = answer.map_err(failed)?;
        let bytes = answer.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_vec().map_err(failed)?;
        if !answer.status().is_success() {
            return Err(self.problem(answer.status().as_u16(), &bytes));
        }
        serde_json::from_slice(&bytes)
            .map_err(|e| Error::corrupt(format!("{}: the answer cannot be read: {e}", self.url)))
    }

    fn problem(&self, status: u16, bytes: &[u8]) -> Error {
        let Ok(problem) = serde_json::from_slice::<Problem>(bytes) else {
            return Error::unavailable(format!("{}: status {status}: {}", self.url, String::from_utf8_lossy(bytes)));
        };
        let kind = Kind::named(&problem.code).unwrap_or(Kind::Internal);
        Error::new(kind, problem.detail)
    }
}

fn agent(timeout: Duration) -> Agent {
    Agent::config_builder().http_status_as_error(false).timeout_global(Some(timeout)).build().into()
}
