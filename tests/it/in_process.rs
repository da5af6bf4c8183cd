//! Server in the test's process, called without a socket: for tests of the calls' answers. Tests of processes, sockets,
//! configurations and updates use [`Server`].

use std::path::Path;
use std::sync::Arc;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request};
use serde_json::Value;
use sterling::server::http::{App, Options, router};
use sterling::serving::engine::{self, Engine, Passes};
use sterling::serving::registry::{self, Registry, Snapshots};
use sterling::snapshot::Store;
use tokio::runtime::Runtime;
use tower::ServiceExt as _;

use crate::support::{Server, agent, note_exchange};

/// Server that answers calls.
pub trait Callee {
    /// Sends a call and returns the status, headers and body of the answer.
    fn call(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> (u16, HeaderMap, Vec<u8>);

    /// Sends a call with a JSON body; returns the status and the answer as text.
    fn exchange(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let (status, headers, answer) =
            self.call(method, path, &[("content-type", "application/json")], body.as_bytes());
        let answer = String::from_utf8(answer).unwrap();
        note_exchange((method, path, body), (status, &headers), &answer);
        (status, answer)
    }

    fn get(&self, path: &str) -> (u16, String) {
        self.exchange("GET", path, "")
    }

    fn get_json(&self, path: &str) -> Value {
        let (status, body) = self.get(path);
        assert_eq!(status, 200, "{path}: {body}");
        serde_json::from_str(&body).unwrap()
    }

    /// Posts a body and returns the status and the JSON of the answer.
    fn post(&self, path: &str, body: impl ToString) -> (u16, Value) {
        let (status, text) = self.exchange("POST", path, &body.to_string());
        (status, serde_json::from_str(&text).unwrap_or_else(|e| panic!("{path}: {e}: {text}")))
    }

    /// Posts a body that must be answered.
    fn ask(&self, path: &str, body: impl ToString) -> Value {
        let (status, answer) = self.post(path, body);
        assert_eq!(status, 200, "{path}: {answer}");
        answer
    }
}

impl Callee for Server {
    fn call(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> (u16, HeaderMap, Vec<u8>) {
        let request = Request::builder().method(method).uri(format!("http://{}{path}", self.address));
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        let mut response = agent().run(request.body(body).unwrap()).unwrap();
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        (status, headers, response.body_mut().with_config().limit(1 << 30).read_to_vec().unwrap())
    }
}

/// Server of the newest version of each model of a store.
pub struct InProcess {
    runtime: Runtime,
    router: Router,
}

impl InProcess {
    pub fn start(store: &Path) -> Self {
        InProcess::with(store, &Options::default())
    }

    /// Starts a server with these HTTP options.
    pub fn with(store: &Path, options: &Options) -> Self {
        let registry = Registry::new(Store::new(store), Snapshots::default(), registry::Options::default());
        let engine = engine::Options { workers: 1, ..engine::Options::default() };
        let engine = Engine::start(Passes::default(), &engine).unwrap();
        let app = Arc::new(App::new(registry, engine, options).unwrap());
        app.registry.refresh();
        InProcess { runtime: Runtime::new().unwrap(), router: router(app) }
    }
}

impl Callee for InProcess {
    fn call(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> (u16, HeaderMap, Vec<u8>) {
        let request = Request::builder().method(method).uri(path).header("host", "localhost");
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        let request = request.body(Body::from(body.to_vec())).unwrap();
        self.runtime.block_on(async {
            let (head, body) = self.router.clone().oneshot(request).await.unwrap().into_parts();
            (head.status.as_u16(), head.headers, to_bytes(body, 1 << 30).await.unwrap().to_vec())
        })
    }
}
