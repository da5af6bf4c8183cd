//! The language of the HTTP API: every public JSON shape, and nothing else is one.
//!
//! Requests refuse unknown fields. A field that is wrong is named by its path, with what came and what was expected.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::error::{Error, Kind, Result};
use crate::limits;

/// What to do where rows of a remote table cannot be had in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnDegraded {
    /// Answer with a problem.
    #[default]
    Fail,
    /// Go on with each table's default row and say so in the reply.
    DefaultRows,
}

/// One retrieval. Exactly one of `features` and `vector` is given; all else has a default.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RetrieveRequest {
    /// Values of the user's features by name: a list of ids, `{"values": [..], "weights": [..]}`, a text or integer or a list
    /// of them, or a list of numbers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub features: Option<Map<String, Value>>,
    /// The query itself, in place of features, `[D]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vector: Option<Vec<f32>>,
    /// Which items are eligible; see `docs/FILTERS.md`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub filter: String,
    /// Items that are not to be returned.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exclude: Vec<i64>,
    /// Results, K.
    #[serde(default = "default_k")]
    pub k: usize,
    /// Candidates that are reranked, K0; the model's default where it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub candidates: Option<usize>,
    /// Lists that are probed, P; the model's default where it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probes: Option<usize>,
    /// Looks at every item in f32 in place of probing.
    #[serde(default)]
    pub exact: bool,
    /// Item columns to return.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub columns: Vec<String>,
    /// Constants of the value model to override.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub constants: BTreeMap<String, f32>,
    /// How long the answer is worth waiting for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// Tells what each step did.
    #[serde(default)]
    pub explain: bool,
    /// What to do where rows of a remote table cannot be had in time.
    #[serde(default)]
    pub on_degraded: OnDegraded,
}

fn default_k() -> usize {
    20
}

/// Scores for items that the caller names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RankRequest {
    /// As in a retrieval.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub features: Option<Map<String, Value>>,
    /// As in a retrieval.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vector: Option<Vec<f32>>,
    /// The items to score.
    pub items: Vec<i64>,
    /// As in a retrieval.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub columns: Vec<String>,
    /// As in a retrieval.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub constants: BTreeMap<String, f32>,
    /// As in a retrieval.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// As in a retrieval.
    #[serde(default)]
    pub explain: bool,
    /// As in a retrieval.
    #[serde(default)]
    pub on_degraded: OnDegraded,
}

/// A query embedding for features.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EmbedRequest {
    /// As in a retrieval.
    #[schema(value_type = Object)]
    pub features: Map<String, Value>,
    /// As in a retrieval.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// As in a retrieval.
    #[serde(default)]
    pub on_degraded: OnDegraded,
}

/// One returned item.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Item {
    /// The item's id.
    pub id: i64,
    /// The value model's score, by which items are ordered.
    pub score: f32,
    /// The retrieval score.
    pub similarity: f32,
    /// Task scores by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tasks: BTreeMap<String, f32>,
    /// The columns that were asked for.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    #[schema(value_type = Object)]
    pub columns: Map<String, Value>,
}

/// What a step of the pass did.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Step {
    /// The step's name.
    pub name: String,
    /// Time in microseconds.
    pub micros: u64,
    /// Bytes that it read.
    pub bytes: u64,
    /// Items (or ids, or lists) that it handled.
    pub items: u64,
}

/// How an answer came about.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Explain {
    /// The steps in their order.
    pub steps: Vec<Step>,
    /// How eligible items were found: `all`, `none`, `postings`, `words` or `exact`.
    pub route: String,
    /// The filter in canonical form.
    pub filter: String,
    /// Estimated share of items that pass the filter.
    pub pass_rate: f64,
    /// Lists that were probed.
    pub probed: u64,
    /// Items in the probed lists.
    pub scanned: u64,
    /// Items of them that passed the filter's words.
    pub survivors: u64,
    /// Candidates that were left after verification.
    pub candidates: u64,
    /// Items returned.
    pub returned: u64,
    /// The kernels in use.
    pub kernel: String,
}

/// The answer to one retrieval.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Retrieved {
    /// Best first.
    pub items: Vec<Item>,
    /// Given where it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub explain: Option<Explain>,
    /// Ids of remote tables that were answered with default rows.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub degraded_rows: u64,
    /// Of a `:rank` request: items that the snapshot does not hold.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unknown: Vec<i64>,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// Which snapshot answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Served {
    /// The model's name.
    pub model: String,
    /// The version that answered; one answer never mixes two.
    pub version: u64,
    /// The digest of the snapshot's bytes.
    pub digest: String,
    /// The share of the items that was there to be searched, 0 to 1.
    pub coverage: f64,
}

/// The answer to a single retrieval or ranking.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RetrieveResponse {
    /// Which snapshot answered.
    #[serde(flatten)]
    pub served: Served,
    /// The answer.
    #[serde(flatten)]
    pub result: Retrieved,
}

/// One entry of a batch: an answer, or the problem of this one request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum BatchEntry {
    /// The request failed; the others did not.
    Problem {
        /// What was wrong with it.
        problem: Problem,
    },
    /// The request's answer.
    Answer(Retrieved),
}

/// The answers to a list of retrievals, in its order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BatchResponse {
    /// Which snapshot answered.
    #[serde(flatten)]
    pub served: Served,
    /// An entry a request.
    pub results: Vec<BatchEntry>,
}

/// A query embedding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EmbedResponse {
    /// Which snapshot answered.
    #[serde(flatten)]
    pub served: Served,
    /// `[D]`
    pub embedding: Vec<f32>,
    /// Ids of remote tables that were answered with default rows.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub degraded_rows: u64,
}

/// An item column of a snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ColumnInfo {
    /// The name.
    pub name: String,
    /// `integers`, `texts` or `floats`.
    pub kind: String,
    /// True where filters may ask about it.
    pub filter: bool,
    /// Distinct values of a category.
    pub distinct: usize,
}

/// A feature that requests may bring.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FeatureInfo {
    /// The name in requests.
    pub name: String,
    /// `ids`, `category` or `dense`.
    pub kind: String,
    /// Numbers of a dense feature.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub width: Option<usize>,
}

/// A loaded version of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ModelInfo {
    /// The name.
    pub name: String,
    /// The version that answers unpinned requests.
    pub version: u64,
    /// The digest of the snapshot's bytes.
    pub digest: String,
    /// What it answers.
    pub description: String,
    /// Width of queries and items, D.
    pub dimension: usize,
    /// Items, N.
    pub items: usize,
    /// Lists, C.
    pub lists: usize,
    /// Features of requests; none means that they bring a vector.
    pub features: Vec<FeatureInfo>,
    /// Embedding tables.
    pub tables: Vec<TableInfo>,
    /// Item columns.
    pub columns: Vec<ColumnInfo>,
    /// Tasks of the reranker.
    pub tasks: Vec<String>,
    /// The value model.
    pub value: String,
    /// Its constants.
    pub constants: BTreeMap<String, f32>,
    /// Default number of candidates, K0.
    pub candidates: usize,
    /// Default number of probed lists, P.
    pub probes: usize,
    /// Bytes of the snapshot.
    pub bytes: u64,
}

/// An embedding table of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TableInfo {
    /// Its name.
    pub name: String,
    /// Its rows.
    pub rows: u64,
    /// Numbers of a row.
    pub width: usize,
    /// How they are stored.
    pub format: String,
    /// Where they lie on this server.
    pub placed: String,
}

/// The loaded models.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ModelList {
    /// One entry a model.
    pub models: Vec<ModelInfo>,
}

/// The state of one published version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VersionInfo {
    /// The version.
    pub version: u64,
    /// True for the one that answers unpinned requests.
    pub active: bool,
    /// True where it is in memory.
    pub loaded: bool,
    /// Why it was refused, where it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

/// The published versions of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VersionList {
    /// The model.
    pub model: String,
    /// Ascending.
    pub versions: Vec<VersionInfo>,
}

/// An error as RFC 9457 has it, sent as `application/problem+json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// A name for the sort of problem: `about:blank#` and the code.
    #[serde(rename = "type")]
    pub kind: String,
    /// The HTTP status in words.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// What came and what was expected.
    pub detail: String,
    /// A stable code for programs.
    pub code: String,
    /// True where the same request may succeed later.
    pub retryable: bool,
    /// Byte offset in the text that is wrong, such as a filter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<usize>,
}

/// The one table from kinds of errors to HTTP statuses.
pub fn status(kind: Kind) -> (u16, &'static str) {
    match kind {
        Kind::Invalid => (400, "Bad Request"),
        Kind::NotFound => (404, "Not Found"),
        Kind::Conflict => (409, "Conflict"),
        Kind::Unsupported | Kind::TooCostly => (422, "Unprocessable Content"),
        Kind::NoSpace => (507, "Insufficient Storage"),
        Kind::Corrupt | Kind::Io | Kind::Internal => (500, "Internal Server Error"),
        Kind::Overloaded | Kind::NotReady | Kind::Unavailable => (503, "Service Unavailable"),
        Kind::DeadlineExceeded => (504, "Gateway Timeout"),
    }
}

impl From<&Error> for Problem {
    fn from(error: &Error) -> Self {
        let (status, title) = status(error.kind());
        let code = error.kind().name();
        Problem {
            kind: format!("about:blank#{code}"),
            title: title.into(),
            status,
            detail: error.to_string(),
            code: code.into(),
            retryable: error.kind().is_retryable(),
            offset: error.offset(),
        }
    }
}

/// The body of a retrieval: one request, or a list of them.
#[derive(Clone, Debug)]
pub enum RetrieveBody {
    /// One request.
    One(Box<RetrieveRequest>),
    /// The requests of `{"requests": [...]}`, each parsed by itself.
    Many(Vec<Result<RetrieveRequest, Problem>>),
}

/// Reads the body of a retrieval.
///
/// # Errors
/// `Invalid` with the place in the text or the path of the field. A wrong entry of a list fails that entry only.
pub fn parse_retrieve(body: &[u8]) -> Result<RetrieveBody> {
    let Value::Object(mut fields) = parse_json(body)? else {
        return Err(Error::invalid("body: expected a JSON object"));
    };
    let Some(requests) = fields.remove("requests") else {
        return read(Value::Object(fields), "").map(|r| RetrieveBody::One(Box::new(r)));
    };
    if let Some(other) = fields.keys().next() {
        return Err(Error::invalid(format!("field `{other}` beside `requests`: expected it inside each request")));
    }
    let Value::Array(requests) = requests else {
        return Err(Error::invalid("field `requests`: expected a list of requests"));
    };
    if requests.is_empty() || requests.len() > limits::BATCH_REQUESTS_MAX {
        return Err(Error::invalid(format!(
            "field `requests`: got {} requests, expected 1 to {}",
            requests.len(),
            limits::BATCH_REQUESTS_MAX
        )));
    }
    let entry = |(n, value)| read(value, &format!("requests[{n}].")).map_err(|e| Problem::from(&e));
    Ok(RetrieveBody::Many(requests.into_iter().enumerate().map(entry).collect()))
}

/// Reads the body of any other request.
///
/// # Errors
/// `Invalid` with the place in the text or the path of the field.
pub fn parse<T: serde::de::DeserializeOwned>(body: &[u8]) -> Result<T> {
    read(parse_json(body)?, "")
}

fn parse_json(body: &[u8]) -> Result<Value> {
    serde_json::from_slice(body).map_err(|e| Error::invalid(format!("body: not JSON: {e}")))
}

fn read<T: serde::de::DeserializeOwned>(value: Value, place: &str) -> Result<T> {
    serde_path_to_error::deserialize(value).map_err(|e| {
        let path = e.path().to_string();
        let field = if path == "." { place.trim_end_matches('.').to_owned() } else { format!("{place}{path}") };
        match field.as_str() {
            "" => Error::invalid(format!("body: {}", e.inner())),
            field => Error::invalid(format!("field `{field}`: {}", e.inner())),
        }
    })
}

impl RetrieveRequest {
    /// A request for features with every default.
    pub fn for_features(features: Map<String, Value>) -> Self {
        RetrieveRequest {
            features: Some(features),
            vector: None,
            filter: String::new(),
            exclude: Vec::new(),
            k: default_k(),
            candidates: None,
            probes: None,
            exact: false,
            columns: Vec::new(),
            constants: BTreeMap::new(),
            timeout_ms: None,
            explain: false,
            on_degraded: OnDegraded::Fail,
        }
    }

    /// Refuses numbers that are out of their range.
    ///
    /// # Errors
    /// `Invalid` with the field, what came and what was expected.
    pub fn check(&self) -> Result<()> {
        between("k", Some(self.k), limits::RESULTS_MAX)?;
        between("candidates", self.candidates, limits::CANDIDATES_MAX)?;
        between("probes", self.probes, limits::LISTS_MAX)?;
        at_most("exclude", self.exclude.len(), limits::EXCLUDE_MAX)?;
        check_timeout(self.timeout_ms)?;
        match self.candidates {
            Some(candidates) if candidates < self.k => {
                Err(Error::invalid(format!("field `candidates`: got {candidates}, expected at least k = {}", self.k)))
            }
            _ => Ok(()),
        }
    }
}

impl RankRequest {
    /// Refuses numbers that are out of their range.
    ///
    /// # Errors
    /// `Invalid` with the field, what came and what was expected.
    pub fn check(&self) -> Result<()> {
        between("items", Some(self.items.len()), limits::CANDIDATES_MAX)?;
        check_timeout(self.timeout_ms)
    }
}

fn between(field: &str, value: Option<usize>, most: usize) -> Result<()> {
    match value {
        Some(value) if value == 0 || value > most => {
            Err(Error::invalid(format!("field `{field}`: got {value}, expected 1 to {most}")))
        }
        _ => Ok(()),
    }
}

fn at_most(field: &str, value: usize, most: usize) -> Result<()> {
    if value > most {
        Err(Error::invalid(format!("field `{field}`: got {value} entries, expected at most {most}")))
    } else {
        Ok(())
    }
}

/// Refuses a time-out of 0 or beyond the limit.
///
/// # Errors
/// `Invalid` with the field, what came and what was expected.
pub fn check_timeout(timeout_ms: Option<u64>) -> Result<()> {
    between("timeout_ms", timeout_ms.map(|t| t as usize), limits::TIMEOUT_MS_MAX as usize)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn wrong_bodies_name_the_field() {
        for (body, expected) in [
            ("", "body: not JSON: EOF"),
            ("{\"k\": 3", "body: not JSON: EOF while parsing an object at line 1 column 7"),
            ("[]", "body: expected a JSON object"),
            ("{\"k\": \"ten\"}", "field `k`: invalid type: string \"ten\", expected usize"),
            ("{\"k\": -1}", "field `k`: invalid value: integer `-1`"),
            ("{\"kk\": 1}", "unknown field `kk`, expected one of `features`, `vector`"),
            ("{\"vector\": [1, \"a\"]}", "field `vector[1]`: invalid type: string"),
            ("{\"vector\": [1e999]}", "number out of range"),
            ("{\"requests\": 3}", "field `requests`: expected a list"),
            ("{\"requests\": []}", "field `requests`: got 0 requests"),
            ("{\"requests\": [{}], \"k\": 3}", "field `k` beside `requests`"),
        ] {
            let error = parse_retrieve(body.as_bytes()).expect_err(body).to_string();
            assert!(error.contains(expected), "{body}: {error}");
        }
        let RetrieveBody::Many(entries) = parse_retrieve(b"{\"requests\": [{\"k\": 1}, {\"k\": []}]}").unwrap() else {
            panic!()
        };
        assert!(entries[0].is_ok());
        assert!(entries[1].as_ref().unwrap_err().detail.contains("field `requests[1].k`"));
    }

    #[test]
    fn numbers_out_of_range_name_the_range() {
        let request = |text: &str| match parse_retrieve(text.as_bytes()).unwrap() {
            RetrieveBody::One(request) => *request,
            RetrieveBody::Many(_) => panic!(),
        };
        assert!(request("{\"vector\": [1.0]}").check().is_ok());
        for (text, expected) in [
            ("{\"k\": 0}", "field `k`: got 0, expected 1 to 100000"),
            ("{\"k\": 100001}", "field `k`: got 100001"),
            ("{\"candidates\": 0}", "field `candidates`: got 0"),
            ("{\"candidates\": 10, \"k\": 11}", "expected at least k = 11"),
            ("{\"probes\": 0}", "field `probes`: got 0"),
            ("{\"timeout_ms\": 0}", "field `timeout_ms`: got 0"),
        ] {
            let error = request(text).check().expect_err(text).to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
