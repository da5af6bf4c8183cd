//! JSON types of answers, described in `/openapi.json` and parsed by clients. `reply` writes the same JSON.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::problem::Problem;
use sterling_core::request;

/// A returned item.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Item {
    /// Item id.
    pub id: i64,
    /// Score of the value model, by which items are ordered.
    pub score: f32,
    /// Retrieval score.
    pub similarity: f32,
    /// Task scores by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tasks: BTreeMap<String, f32>,
    /// Requested columns.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    #[schema(value_type = Object)]
    pub columns: Map<String, Value>,
}

/// Statistics of a step of the pass.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Step {
    /// Name of the step.
    pub name: String,
    /// Time in microseconds.
    pub micros: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Items (or ids, or lists) processed.
    pub items: u64,
}

/// Number of probes and its reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ProbesInfo {
    /// Lists to probe; a search probes more if eligible items are concentrated in later lists.
    pub probes: usize,
    /// Requested recall, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<f64>,
    /// Recall measured with this nprobe when the version was published; absent without a calibration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub estimate: Option<f64>,
    /// Number of lists to probe instead if the query is out of distribution; absent if it is not larger.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ood_probes: Option<usize>,
}

/// Explanation of an answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Explain {
    /// Steps in order.
    pub steps: Vec<Step>,
    /// Search strategy for eligible items: `all`, `none`, `few`, `words` or `exact`.
    pub route: String,
    /// Filter in canonical form.
    pub filter: String,
    /// Estimated share of items that pass the filter.
    pub pass_rate: f64,
    /// For a search by lists: number of probes, and its reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probes: Option<ProbesInfo>,
    /// Probed lists.
    pub probed: u64,
    /// Items in the probed lists.
    pub scanned: u64,
    /// Items of the probed lists that passed the filter bitmap.
    pub survivors: u64,
    /// Candidates that remained after verification.
    pub candidates: u64,
    /// Returned items.
    pub returned: u64,
    /// Kernels in use.
    pub kernel: String,
    /// Deviation of a GPU from the request and its reason: the CPU answered, or other rows were scanned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Results of each query, if the model has several per user; the other counts are sums over the queries.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub queries: Vec<QueryFound>,
    /// From a router: calls to shards in order; the other counts are sums over the shards.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shards: Vec<ShardSteps>,
}

/// Statistics of a call to a shard.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ShardSteps {
    /// Shard number.
    pub shard: u32,
    /// Kind of call: `embed`, `select`, `rerank`, `rank`, or `all` if it is the only shard.
    pub round: String,
    /// Time in microseconds until the shard's answer arrived.
    pub micros: u64,
    /// Steps that the shard ran.
    pub steps: Vec<Step>,
}

/// Results of one of several queries of a user.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct QueryFound {
    /// Name of the query in the model.
    pub name: String,
    /// Probed lists.
    pub probed: u64,
    /// Items in the probed lists.
    pub scanned: u64,
    /// Items of the probed lists that passed the filter bitmap.
    pub survivors: u64,
    /// Candidates that remained after verification.
    pub candidates: u64,
}

/// The answer to one retrieval.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Retrieved {
    /// Items, best first.
    #[serde(default)]
    pub items: Vec<Item>,
    /// Items by column, in place of `items`, if that format was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<Box<ItemTable>>,
    /// Explanation, if it was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub explain: Option<Explain>,
    /// Ids of remote tables for which default rows were used.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub degraded_rows: u64,
    /// For a `:rank` request: items that the snapshot does not have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unknown: Vec<i64>,
    /// Cursor of the next page, if pages were requested and there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
}

/// Items column by column, best first: index `n` of each list belongs to the same item.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ItemTable {
    /// Item ids.
    pub id: Vec<i64>,
    /// Scores of the value model.
    pub score: Vec<f32>,
    /// Retrieval scores.
    pub similarity: Vec<f32>,
    /// Task scores by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tasks: BTreeMap<String, Vec<f32>>,
    /// Requested columns.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    #[schema(value_type = Object)]
    pub columns: Map<String, Value>,
}

/// Snapshot that answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Served {
    /// Name of the model.
    pub model: String,
    /// Version that answered; one answer never mixes two.
    pub version: u64,
    /// Digest of the snapshot's files.
    pub digest: String,
    /// Share of the items that could be searched, 0 to 1.
    pub coverage: f64,
    /// Position of the updates that are visible in the answer: all up to it, and none after it.
    #[serde(default)]
    pub position: u64,
    /// From a router over several shards: position of each shard in order, as `min_position` accepts them, separated by commas; 0
    /// for a shard without an answer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub positions: Vec<u64>,
    /// From a router: shards without an answer, if the request permits missing items.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<MissingShard>,
}

/// A shard that could not answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MissingShard {
    /// Shard number.
    pub shard: u32,
    /// Reason of the failure.
    pub reason: String,
}

/// The answer to a single retrieval or ranking.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RetrieveResponse {
    /// Snapshot that answered.
    #[serde(flatten)]
    pub served: Served,
    /// Items and explanation.
    #[serde(flatten)]
    pub result: Retrieved,
}

/// One entry of a batch: the answer to a request, or its problem.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum BatchEntry {
    /// Problem of a failed request; the other requests of the batch are answered independently.
    Problem {
        /// Error of the request.
        problem: Problem,
    },
    /// Answer to the request.
    Answer(Box<Retrieved>),
}

/// Answers to a list of retrievals, in order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BatchResponse {
    /// Snapshot that answered.
    #[serde(flatten)]
    pub served: Served,
    /// One entry per request.
    pub results: Vec<BatchEntry>,
}

/// A query embedding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EmbedResponse {
    /// Snapshot that answered.
    #[serde(flatten)]
    pub served: Served,
    /// Embedding, `[D]`.
    pub embedding: Vec<f32>,
    /// Ids of remote tables for which default rows were used.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub degraded_rows: u64,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl From<&request::Explain> for Explain {
    fn from(explain: &request::Explain) -> Self {
        let step =
            |s: &request::StepReport| Step { name: s.name.into(), micros: s.micros, bytes: s.bytes, items: s.items };
        let probes = |p: request::Probes| ProbesInfo {
            probes: p.probes,
            target: p.target,
            estimate: p.estimate,
            ood_probes: p.ood_probes,
        };
        Explain {
            steps: explain.steps.iter().map(step).collect(),
            route: explain.route.into(),
            filter: explain.filter.clone(),
            pass_rate: explain.pass_rate,
            probes: explain.probes.map(probes),
            probed: explain.probed,
            scanned: explain.scanned,
            survivors: explain.survivors,
            candidates: explain.candidates,
            returned: explain.returned,
            kernel: explain.kernel.into(),
            note: explain.note.clone(),
            queries: explain.queries.iter().map(found).collect(),
            shards: Vec::new(),
        }
    }
}

fn found(query: &request::QueryReport) -> QueryFound {
    QueryFound {
        name: query.name.clone(),
        probed: query.probed,
        scanned: query.scanned,
        survivors: query.survivors,
        candidates: query.candidates,
    }
}
