//! JSON types that describe models, versions and their parts.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::response::MissingShard;

/// An item column of a snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ColumnInfo {
    /// Name of the column.
    pub name: String,
    /// `integers`, `texts` or `floats`.
    pub kind: String,
    /// True if filters may refer to this column.
    pub filter: bool,
    /// Distinct values of a column of integers or texts; omitted for floats, whose values are not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub distinct: Option<usize>,
}

/// A feature that requests may contain.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FeatureInfo {
    /// Name of the feature in requests.
    pub name: String,
    /// `ids`, `category`, `dense` or `text`.
    pub kind: String,
    /// Numbers of a dense feature.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub width: Option<usize>,
    /// Maximum values of a sequence, or tokens of a text; of more, the last or the first remain, as the model declares.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length: Option<usize>,
}

/// One of several queries of a user.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct QueryInfo {
    /// Name of the query.
    pub name: String,
    /// Default number of candidates of the query, K0.
    pub candidates: usize,
    /// Factor on the scores of the query before the merge.
    pub weight: f32,
}

/// An input of the reranker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct InputInfo {
    /// Name of the input.
    pub name: String,
    /// `user`: shared by all candidates; `candidate`: one per candidate.
    pub whose: String,
    /// Dimensions without those of users and candidates.
    pub shape: Vec<usize>,
}

/// A tensor stored per item.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VectorInfo {
    /// Name of the tensor.
    pub name: String,
    /// Number of values per item.
    pub width: usize,
    /// Storage format.
    pub format: String,
}

/// Shard of a version that a server has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ShardInfo {
    /// Shard number, from 0.
    pub shard: u32,
    /// Number of shards.
    pub shards: u32,
    /// Items of all shards together.
    pub items: usize,
    /// Digest of all shards.
    pub digest: String,
}

/// A loaded version of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ModelInfo {
    /// Name of the model.
    pub name: String,
    /// Version that answers unpinned requests.
    pub version: u64,
    /// Digest of the snapshot's files.
    pub digest: String,
    /// Description of the model.
    pub description: String,
    /// Width of queries and items, D.
    pub dimension: usize,
    /// Items, N.
    pub items: usize,
    /// Inverted lists, C.
    pub lists: usize,
    /// Shard of the version, if it is partitioned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard: Option<ShardInfo>,
    /// Features of requests; if there are none, requests contain a vector.
    pub features: Vec<FeatureInfo>,
    /// Queries of a user, if there are several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub queries: Vec<QueryInfo>,
    /// Merge of the candidates of several queries: `union`, `intersection` or `weighted`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merge: Option<String>,
    /// Embedding tables.
    pub tables: Vec<TableInfo>,
    /// Tensors stored per item in addition to its row of the index.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vectors: Vec<VectorInfo>,
    /// Inputs of the reranker.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inputs: Vec<InputInfo>,
    /// Item columns.
    pub columns: Vec<ColumnInfo>,
    /// Tasks of the reranker.
    pub tasks: Vec<String>,
    /// Expression of the value model.
    pub value: String,
    /// Constants of the value model.
    pub constants: BTreeMap<String, f32>,
    /// Default number of candidates, K0; a request for more items uses their number.
    pub candidates: usize,
    /// Default number of candidates for requests with pages; all pages together have at most that number of results.
    pub page_candidates: usize,
    /// Default recall.
    pub recall: f64,
    /// Default number of probed lists, nprobe, of a request without a filter.
    pub probes: usize,
    /// Number of probed lists by recall, if it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<CalibrationInfo>,
    /// Bytes of the snapshot.
    pub bytes: u64,
    /// Memory that is planned for the version, in bytes.
    pub memory_bytes: u64,
    /// Labels that point to this version.
    pub labels: Vec<String>,
    /// From a router: shards whose state is unknown. The numbers of bytes exclude these shards.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<MissingShard>,
}

/// Number of probed lists by recall.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CalibrationInfo {
    /// Digest of the measurement; it changes if a version is calibrated again.
    pub digest: String,
    /// Source of the queries.
    pub source: String,
    /// Number of queries.
    pub queries: usize,
    /// Recall targets of the curves' points.
    pub targets: Vec<f64>,
    /// Recall curves: one per number of candidates and share of items that pass the filter.
    pub curves: Vec<CurveInfo>,
}

/// Number of probed lists by recall, for one number of candidates and one share of eligible items.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CurveInfo {
    /// Candidates, K0.
    pub k: usize,
    /// Share of items that pass the filter.
    pub pass_rate: f64,
    /// Probed lists for each target; under a filter, only lists with eligible items count.
    pub probes: Vec<usize>,
    /// Mean measured recall with this number of probed lists.
    pub recall: Vec<f64>,
    /// Lower 95 % confidence bound of the mean recall.
    pub low: Vec<f64>,
    /// Curve of searches by first-pass codes; omitted if there are none. The other fields of a curve describe int8
    /// rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub codes: Option<CodedCurveInfo>,
}

/// Settings of a search by first-pass codes for each target; zeros if int8 rows are faster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CodedCurveInfo {
    /// Number of items that the first pass over quantized codes selected.
    pub selected: Vec<usize>,
    /// Probed lists; under a filter, only lists with eligible items count.
    pub probes: Vec<usize>,
    /// Mean recall, including the loss by quantized codes.
    pub recall: Vec<f64>,
    /// Lower confidence bound of the recall, including the losses by both probes and codes.
    pub low: Vec<f64>,
}

/// A recorded query, as a body of `:retrieve`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryLine<'a> {
    /// Query embedding, `[D]`.
    pub vector: &'a [f32],
}

/// An embedding table of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TableInfo {
    /// Name of the table.
    pub name: String,
    /// Number of rows.
    pub rows: u64,
    /// Width of a row, in numbers.
    pub width: usize,
    /// Storage format.
    pub format: String,
    /// Bytes of all rows.
    pub bytes: u64,
    /// Bytes of the rows in this server's memory, without caches.
    pub bytes_here: u64,
    /// Location of the rows for this server.
    pub placed: String,
}

/// Loaded models.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ModelList {
    /// One entry per model.
    pub models: Vec<ModelInfo>,
    /// From a router: models whose state is unknown at the moment.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unavailable: Vec<UnavailableModel>,
}

/// A model that exists but cannot be described.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UnavailableModel {
    /// Name of the model.
    pub name: String,
    /// Error code, as in problems.
    pub code: String,
    /// Error message.
    pub reason: String,
}

/// Labels of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LabelList {
    /// Name of the model.
    pub model: String,
    /// Version that each label points to.
    pub labels: BTreeMap<String, u64>,
}

/// New target of a label.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LabelRequest {
    /// Version in memory that the label will point to.
    pub version: u64,
}

/// State of one version, published or in memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VersionInfo {
    /// Version number.
    pub version: u64,
    /// True if the store has this version.
    pub published: bool,
    /// True if this version answers unpinned requests.
    pub active: bool,
    /// True if this version is in memory.
    pub loaded: bool,
    /// Labels that point to the version.
    pub labels: Vec<String>,
    /// Digest of the files in memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Reason why the store's version was rejected, if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// Number of failed loads since the folder last changed, if the version was rejected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempts: Option<u32>,
    /// Time until the load is retried although the folder has not changed; omitted if no retry is planned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_in_ms: Option<u64>,
}

/// Versions of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VersionList {
    /// Name of the model.
    pub model: String,
    /// Versions in ascending order.
    pub versions: Vec<VersionInfo>,
    /// Desired state in the store; omitted by servers that do not apply it, and by routers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub desired: Option<DesiredState>,
}

/// Desired state of a model, which all servers of its store apply.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DesiredState {
    /// Number of changes of the desired state so far.
    pub revision: u64,
    /// Version that should answer; omitted if it is the newest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u64>,
    /// True if the active version of this server satisfies the desired state: it is the desired version, or a merge of
    /// it with later updates.
    pub stands: bool,
    /// Version that each label should point to.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, u64>,
}
