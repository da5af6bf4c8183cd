//! The JSON of answers as types: what `/openapi.json` describes and what a client reads. `reply` writes the same shapes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::problem::Problem;
use sterling_core::request;

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

/// How the number of lists came about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ProbesInfo {
    /// Lists to probe; more where a filter goes against their order.
    pub probes: usize,
    /// The recall that was asked for, where one was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<f64>,
    /// The recall that was measured there when the version was published, where it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub estimate: Option<f64>,
}

/// How an answer came about.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Explain {
    /// The steps in their order.
    pub steps: Vec<Step>,
    /// How eligible items were found: `all`, `none`, `few`, `words` or `exact`.
    pub route: String,
    /// The filter in canonical form.
    pub filter: String,
    /// Estimated share of items that pass the filter.
    pub pass_rate: f64,
    /// Of a search by lists: how many were to be probed, and why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probes: Option<ProbesInfo>,
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
    /// What a card did otherwise than it was asked, and why: nothing at all, for the CPU answered, or a scan of other rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Where the model has several queries a user, what each of them found; the numbers above are their sums.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub queries: Vec<QueryFound>,
    /// Of a router: what each shard was asked, in turn; the numbers above are their sums.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shards: Vec<ShardSteps>,
}

/// What a shard did of a request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ShardSteps {
    /// Its number.
    pub shard: u32,
    /// What it was asked for: `embed`, `select`, `rerank`, `rank`, or `all` where there is no other.
    pub round: String,
    /// Time in microseconds until its answer was there.
    pub micros: u64,
    /// The steps that it ran.
    pub steps: Vec<Step>,
}

/// What one of several queries of a user found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct QueryFound {
    /// Its name in the model.
    pub name: String,
    /// Lists that were probed.
    pub probed: u64,
    /// Items in the probed lists.
    pub scanned: u64,
    /// Items of them that passed the filter's words.
    pub survivors: u64,
    /// Candidates that were left after verification.
    pub candidates: u64,
}

/// The answer to one retrieval.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Retrieved {
    /// Best first.
    #[serde(default)]
    pub items: Vec<Item>,
    /// In their place, where columns were asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<Box<ItemTable>>,
    /// Given where it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub explain: Option<Explain>,
    /// Ids of remote tables that were answered with default rows.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub degraded_rows: u64,
    /// Of a `:rank` request: items that the snapshot does not hold.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unknown: Vec<i64>,
    /// Where pages were asked for and there is another one: where it begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
}

/// Items column by column, the best first: place `n` of each list belongs to the same item.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ItemTable {
    /// The ids.
    pub id: Vec<i64>,
    /// The value model's scores.
    pub score: Vec<f32>,
    /// The retrieval scores.
    pub similarity: Vec<f32>,
    /// Task scores by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tasks: BTreeMap<String, Vec<f32>>,
    /// The columns that were asked for.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    #[schema(value_type = Object)]
    pub columns: Map<String, Value>,
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
    /// The position of the updates that the answer saw: all up to it, and none after it.
    #[serde(default)]
    pub position: u64,
    /// Of a router over several shards: the position of each, in their order, as `min_position` takes them with commas; 0 of one that did
    /// not answer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub positions: Vec<u64>,
    /// Of a router: the shards that could not answer, where it was told that their items may be missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<MissingShard>,
}

/// A shard that could not answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MissingShard {
    /// Its number.
    pub shard: u32,
    /// Why it could not.
    pub reason: String,
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
    Answer(Box<Retrieved>),
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

fn is_zero(n: &u64) -> bool {
    *n == 0
}

impl From<&request::Explain> for Explain {
    fn from(explain: &request::Explain) -> Self {
        let step =
            |s: &request::StepReport| Step { name: s.name.into(), micros: s.micros, bytes: s.bytes, items: s.items };
        let probes = |p: request::Probes| ProbesInfo { probes: p.probes, target: p.target, estimate: p.estimate };
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
