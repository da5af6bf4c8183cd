//! Request bodies, and the server to which they are sent.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::time::Duration;

use hyper::body::Bytes;
use serde_json::{Map, Value, json};

use super::schedule::Random;
use sterling_core::error::{Error, Result};

/// Fields of a line of a package's `heldout.jsonl` that describe the user and are not fields of a request.
const DESCRIPTIVE: [&str; 2] = ["user", "held"];

/// Number of results that a slow reader requests: a few hundred kilobytes.
const SLOW_RESULTS: usize = 1000;

/// Body of a request.
#[derive(Clone, Debug)]
pub struct Body {
    pub(super) bytes: Bytes,
    /// Timeout of the request.
    pub(super) timeout: Duration,
}

impl Body {
    /// Creates a body with a timeout: `timeout`, unless the fields set one. In a list, each request gets a timeout, and
    /// the longest of these applies to the body.
    pub(super) fn new(mut fields: Map<String, Value>, timeout: Duration) -> Self {
        let limit = |fields: &mut Map<String, Value>| {
            let millis = timeout.as_millis() as u64;
            let named = fields.entry("timeout_ms").or_insert_with(|| json!(millis));
            Duration::from_millis(named.as_u64().unwrap_or(millis))
        };
        DESCRIPTIVE.iter().for_each(|name| drop(fields.shift_remove(*name)));
        let timeout = match fields.get_mut("requests").and_then(Value::as_array_mut) {
            Some(list) => list.iter_mut().filter_map(Value::as_object_mut).map(limit).max().unwrap_or(timeout),
            None => limit(&mut fields),
        };
        Body { bytes: Value::Object(fields).to_string().into(), timeout }
    }
}

impl Body {
    fn fields(&self) -> Map<String, Value> {
        serde_json::from_slice(&self.bytes).unwrap_or_default()
    }

    /// Returns the same request with other values of some fields; for a list, each of its requests is changed.
    pub(super) fn with(&self, others: &[(String, Value)]) -> Self {
        let mut fields = self.fields();
        let set = |request: &mut Map<String, Value>| request.extend(others.iter().cloned());
        match fields.get_mut("requests").and_then(Value::as_array_mut) {
            Some(list) => list.iter_mut().filter_map(Value::as_object_mut).for_each(set),
            None => set(&mut fields),
        }
        Body::new(fields, self.timeout)
    }

    /// Combines requests to a list in one call.
    pub(super) fn list(bodies: &[&Body]) -> Self {
        let requests: Vec<Value> = bodies.iter().map(|body| Value::Object(body.fields())).collect();
        let longest = bodies.iter().map(|body| body.timeout).max().unwrap_or_default();
        Body::new([("requests".to_owned(), Value::Array(requests))].into_iter().collect(), longest)
    }

    /// Returns the request with a `k` so large that the answer fills the buffers of a connection; a list is returned
    /// unchanged.
    pub(super) fn for_many_results(&self) -> Bytes {
        let mut fields = self.fields();
        if fields.is_empty() || fields.contains_key("requests") {
            return self.bytes.clone();
        }
        fields.insert("k".into(), json!(SLOW_RESULTS));
        Value::Object(fields).to_string().into()
    }

    /// Returns whether the body is a list of requests.
    pub(super) fn is_list(&self) -> bool {
        self.fields().contains_key("requests")
    }
}

/// Reads the requests of a JSON lines file.
///
/// # Errors
/// An unreadable or empty file; a line that is not a JSON object, with its number.
pub fn read_bodies(path: &Path, timeout: Duration) -> Result<Vec<Body>> {
    read_lines(path, |line| match serde_json::from_str(line).map_err(|e| e.to_string())? {
        Value::Object(fields) => Ok(Body::new(fields, timeout)),
        other => Err(format!("got {other}, expected the body of a request, a JSON object")),
    })
}

/// Converts each non-blank line of a file; a file without such lines is an error.
pub(super) fn read_lines<T>(path: &Path, read: impl Fn(&str) -> std::result::Result<T, String>) -> Result<Vec<T>> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::io(path.display(), e))?;
    let invalid = |line: usize, what: String| Error::invalid(format!("{}: line {line}: {what}", path.display()));
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let found: Vec<T> =
        lines.map(|(number, line)| read(line).map_err(|what| invalid(number + 1, what))).collect::<Result<_>>()?;
    if found.is_empty() {
        return Err(Error::invalid(format!("{}: no requests, expected one per line", path.display())));
    }
    Ok(found)
}

/// Returns retrieval requests with random query vectors.
pub fn random_vectors(dimension: usize, count: usize, seed: u64, timeout: Duration) -> Vec<Body> {
    let mut random = Random::new(seed);
    let mut body = || {
        let vector: Vec<f64> = (0..dimension).map(|_| (random.share() * 2000.0).round() / 1000.0 - 1.0).collect();
        Body::new([("vector".to_owned(), json!(vector))].into_iter().collect(), timeout)
    };
    (0..count).map(|_| body()).collect()
}

/// A server that is measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// `HOST:PORT` of the URL.
    pub(super) authority: String,
    pub(super) address: SocketAddr,
    /// API key, if the server requires one.
    pub(super) key: Option<String>,
}

impl Target {
    /// Parses a server URL such as `http://127.0.0.1:8080`.
    ///
    /// # Errors
    /// `Invalid` for an invalid URL or an unknown host.
    pub fn parse(url: &str) -> Result<Self> {
        let invalid = |why: &str| Error::invalid(format!("url `{url}`: {why}, expected http://HOST:PORT"));
        let rest = url.strip_prefix("http://").ok_or_else(|| invalid("no http URL"))?;
        let authority = rest.strip_suffix('/').unwrap_or(rest);
        let mut found = authority.to_socket_addrs().map_err(|e| invalid(&e.to_string()))?;
        let address = found.next().ok_or_else(|| invalid("the host has no address"))?;
        Ok(Target { authority: authority.to_owned(), address, key: None })
    }

    /// Returns the URL of the server.
    pub fn url(&self) -> String {
        format!("http://{}", self.authority)
    }

    /// Returns the server with an API key for requests.
    pub fn with_key(self, key: Option<String>) -> Self {
        Target { key, ..self }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn read(text: &str) -> Result<Vec<Body>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("requests.jsonl");
        std::fs::write(&path, text).unwrap();
        read_bodies(&path, SECOND)
    }

    #[test]
    fn each_request_gets_a_time_out_and_keeps_its_own() {
        let lines = [
            ("{\"vector\":[1],\"user\":\"x\",\"held\":[3]}\n\n", "{\"vector\":[1],\"timeout_ms\":1000}", 1000),
            ("{\"vector\":[1],\"timeout_ms\":30}", "{\"vector\":[1],\"timeout_ms\":30}", 30),
            (
                "{\"requests\":[{\"timeout_ms\":5000},{}]}",
                "{\"requests\":[{\"timeout_ms\":5000},{\"timeout_ms\":1000}]}",
                5000,
            ),
        ];
        for (line, body, millis) in lines {
            let found = read(line).unwrap();
            assert_eq!((found.len(), found[0].bytes.as_ref()), (1, body.as_bytes()));
            assert_eq!(found[0].timeout, Duration::from_millis(millis));
        }
    }

    #[test]
    fn fields_are_set_in_one_request_and_in_each_of_a_list() {
        let bodies = read("{\"k\":1,\"vector\":[1]}\n{\"requests\":[{\"k\":1},{}],\"timeout_ms\":5}\n{}").unwrap();
        let set = [("k".to_owned(), json!(7)), ("timeout_ms".to_owned(), json!(20))];
        let reported = |body: &Body| (String::from_utf8(body.bytes.to_vec()).unwrap(), body.timeout.as_millis());
        let expected = [
            ("{\"k\":7,\"vector\":[1],\"timeout_ms\":20}", 20),
            ("{\"requests\":[{\"k\":7,\"timeout_ms\":20},{\"timeout_ms\":20,\"k\":7}],\"timeout_ms\":5}", 20),
            ("{\"timeout_ms\":20,\"k\":7}", 20),
        ];
        for (body, (text, millis)) in bodies.iter().zip(expected) {
            assert_eq!(reported(&body.with(&set)), (text.to_owned(), millis));
        }
        let list = Body::list(&[&bodies[0], &bodies[2]]);
        assert_eq!(
            reported(&list).0,
            "{\"requests\":[{\"k\":1,\"vector\":[1],\"timeout_ms\":1000},{\"timeout_ms\":1000}]}"
        );
        assert_eq!([bodies[0].is_list(), bodies[1].is_list(), list.is_list()], [false, true, true]);
    }

    #[test]
    fn files_and_addresses_that_cannot_be_used_are_named() {
        for (text, reason) in [("", "no requests"), ("{}\n[1]", "line 2: got [1]"), ("{}\n{", "line 2: EOF")] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains("requests.jsonl") && error.contains(reason), "{error}");
        }
        for url in ["127.0.0.1:80", "https://127.0.0.1:80", "http://127.0.0.1", "http://127.0.0.1:80/v1", "http://"] {
            let error = Target::parse(url).unwrap_err().to_string();
            assert!(error.contains(url) && error.contains("http://HOST:PORT"), "{error}");
        }
        assert_eq!(Target::parse("http://127.0.0.1:80/").unwrap().authority, "127.0.0.1:80");
    }

    #[test]
    fn random_vectors_have_the_dimension_and_differ() {
        let bodies = random_vectors(3, 2, 1, SECOND);
        let vectors: Vec<Value> =
            bodies.iter().map(|b| serde_json::from_slice::<Value>(&b.bytes).unwrap()["vector"].clone()).collect();
        assert!(vectors.iter().all(|v| v.as_array().unwrap().len() == 3) && vectors[0] != vectors[1], "{vectors:?}");
    }
}
