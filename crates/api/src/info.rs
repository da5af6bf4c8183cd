//! What is said of models, versions and their parts.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::response::MissingShard;
use sterling_index::columns::{Column, ColumnKind};

use sterling_core::error::Result;
use sterling_core::request::Retrieve;
use sterling_embedding::Table;
use sterling_graph::tower::{FeatureKind, FeatureSpec, Readable, Whose};
use sterling_snapshot::model::{Merge, QuerySpec, VectorSpec};
use sterling_snapshot::{Calibration, CodedCurve, RecallCurve, Snapshot, Wanted, placed};

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
    /// Values of a sequence that are kept; of more than these the last ones, or the first ones, as the model says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length: Option<usize>,
}

/// One of several queries of a user.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct QueryInfo {
    /// The name.
    pub name: String,
    /// Default number of its candidates, K0.
    pub candidates: usize,
    /// What its scores are multiplied with before they are merged.
    pub weight: f32,
}

/// An input of the reranker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct InputInfo {
    /// The name.
    pub name: String,
    /// `user`: the same for all candidates; `candidate`: each has its own.
    pub whose: String,
    /// Its dimensions after those of users and candidates.
    pub shape: Vec<usize>,
}

/// A tensor that is kept for each item.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VectorInfo {
    /// The name.
    pub name: String,
    /// Numbers of an item.
    pub width: usize,
    /// How they are stored.
    pub format: String,
}

/// Which part of a version a server has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ShardInfo {
    /// Its number, from 0 up.
    pub shard: u32,
    /// How many there are.
    pub shards: u32,
    /// Items of all of them together.
    pub items: usize,
    /// One name for the bytes of all of them.
    pub digest: String,
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
    /// Which part of the version this is, where it was cut into shards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard: Option<ShardInfo>,
    /// Features of requests; none means that they bring a vector.
    pub features: Vec<FeatureInfo>,
    /// The queries of a user, where there are several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub queries: Vec<QueryInfo>,
    /// How their candidates become one list: `union`, `intersection` or `weighted`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merge: Option<String>,
    /// Embedding tables.
    pub tables: Vec<TableInfo>,
    /// Tensors that are kept for each item beside its row of the index.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vectors: Vec<VectorInfo>,
    /// What the reranker reads.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inputs: Vec<InputInfo>,
    /// Item columns.
    pub columns: Vec<ColumnInfo>,
    /// Tasks of the reranker.
    pub tasks: Vec<String>,
    /// The value model.
    pub value: String,
    /// Its constants.
    pub constants: BTreeMap<String, f32>,
    /// Default number of candidates, K0; a request for more items takes as many.
    pub candidates: usize,
    /// Default number of candidates where pages are asked for: as many results have all of them together.
    pub page_candidates: usize,
    /// Default recall.
    pub recall: f64,
    /// Default number of probed lists, P, of a request without a filter.
    pub probes: usize,
    /// How many lists a recall takes, where that was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<CalibrationInfo>,
    /// Bytes of the snapshot.
    pub bytes: u64,
    /// Bytes of memory that are planned for it.
    pub memory_bytes: u64,
    /// The labels that point to this version.
    pub labels: Vec<String>,
    /// At a router: the shards that could not say what they have. Bytes are those of the others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<MissingShard>,
}

/// How many lists a recall takes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CalibrationInfo {
    /// One name for what was measured; it changes where a version is calibrated again.
    pub digest: String,
    /// Where the queries came from that it was measured with.
    pub source: String,
    /// How many there were.
    pub queries: usize,
    /// The recalls that probes are told for.
    pub targets: Vec<f64>,
    /// A curve for each number of candidates and pass rate.
    pub curves: Vec<CurveInfo>,
}

/// How many lists a recall takes for one number of candidates and one share of eligible items.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CurveInfo {
    /// Candidates, K0.
    pub k: usize,
    /// The share of items that pass the filter.
    pub pass_rate: f64,
    /// The lists for each target; under a filter those that hold survivors.
    pub probes: Vec<usize>,
    /// The mean recall that was measured there.
    pub recall: Vec<f64>,
    /// What that mean is above with 95 % confidence.
    pub low: Vec<f64>,
    /// The same by the codes of a first pass; left out where there are none. All else is that of int8 rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub codes: Option<CodedCurveInfo>,
}

/// What a search by the codes of a first pass takes for each target; zeros where int8 rows take less time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CodedCurveInfo {
    /// How many the codes select.
    pub selected: Vec<usize>,
    /// The lists; under a filter those that hold survivors.
    pub probes: Vec<usize>,
    /// The mean recall, less what is lost to codes.
    pub recall: Vec<f64>,
    /// What that is above, a bound of both together.
    pub low: Vec<f64>,
}

/// A query that was recorded, as a body of `:retrieve`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct QueryLine<'a> {
    /// The query embedding, `[D]`.
    pub vector: &'a [f32],
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
    /// Bytes of all of them.
    pub bytes: u64,
    /// Bytes of those that lie in this server's memory, caches apart.
    pub bytes_here: u64,
    /// Where they lie on this server.
    pub placed: String,
}

/// The loaded models.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ModelList {
    /// One entry a model.
    pub models: Vec<ModelInfo>,
    /// Of a router: the models of which it cannot tell now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unavailable: Vec<UnavailableModel>,
}

/// A model that is there and of which nothing can be told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UnavailableModel {
    /// Its name.
    pub name: String,
    /// The code of what is wrong, as problems have it.
    pub code: String,
    /// What is wrong.
    pub reason: String,
}

/// The labels of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LabelList {
    /// The model.
    pub model: String,
    /// The version that each label points to.
    pub labels: BTreeMap<String, u64>,
}

/// Where a label is to point.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LabelRequest {
    /// A version in memory.
    pub version: u64,
}

/// The state of one version, published or in memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VersionInfo {
    /// The version.
    pub version: u64,
    /// True where the store has it.
    pub published: bool,
    /// True for the one that answers unpinned requests.
    pub active: bool,
    /// True where it is in memory.
    pub loaded: bool,
    /// The labels that point to it.
    pub labels: Vec<String>,
    /// The digest of the bytes in memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Why what the store has of it was refused, where it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// Loads that have failed since its folder changed last, where it was refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempts: Option<u32>,
    /// When it is tried again though its folder does not change; left out where it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_in_ms: Option<u64>,
}

/// The versions of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VersionList {
    /// The model.
    pub model: String,
    /// Ascending.
    pub versions: Vec<VersionInfo>,
    /// The desired state in the store; left out by servers that do not follow it, and by routers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub desired: Option<DesiredState>,
}

/// The desired state of a model, which all servers of its store follow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DesiredState {
    /// How often it was changed.
    pub revision: u64,
    /// The version that is to answer; the newest where it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u64>,
    /// Whether the version that answers at this server stands for that one: it is that one, or was merged from it and later updates.
    pub stands: bool,
    /// The version that each label is to point to.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, u64>,
}

fn shard(snapshot: &Snapshot) -> Option<ShardInfo> {
    let (part, all) = (snapshot.manifest.shard?, snapshot.shards.as_ref()?);
    Some(ShardInfo { shard: part.shard, shards: part.shards, items: part.items, digest: all.digest() })
}

/// What a snapshot is, for people and programs.
pub fn model_info(snapshot: &Snapshot) -> ModelInfo {
    let spec = &snapshot.package.spec;
    let mut features: Vec<FeatureInfo> = spec.user.iter().flat_map(|u| &u.features).map(feature).collect();
    features.sort_by(|a, b| a.name.cmp(&b.name));
    features.dedup_by(|a, b| a.name == b.name);
    let (serving, lists, calibration) =
        (&snapshot.recipe.serving, snapshot.index.lists(), snapshot.calibration.as_ref());
    let candidates = snapshot.candidates(Retrieve::K_DEFAULT);
    let wanted = Wanted { candidates, pass_rate: 1.0, recall: serving.recall };
    ModelInfo {
        name: spec.name.clone(),
        version: snapshot.manifest.version,
        digest: snapshot.digest().into(),
        description: spec.description.clone(),
        dimension: spec.dimension,
        items: snapshot.manifest.items,
        lists: snapshot.manifest.lists,
        shard: shard(snapshot),
        features,
        queries: spec.queries().iter().map(|q| query(q, snapshot)).collect(),
        merge: spec.user.as_ref().filter(|u| !u.queries.is_empty()).map(|u| merge(u.merge.unwrap_or_default()).into()),
        tables: snapshot.package.tables.iter().map(|t| table(t)).collect(),
        vectors: spec.item.vectors.iter().map(vector).collect(),
        inputs: snapshot.package.overarch.iter().flat_map(|o| o.declared().all()).map(input).collect(),
        columns: snapshot.columns.list().map(column_info).collect(),
        tasks: spec.tasks.iter().map(|t| t.name.clone()).collect(),
        value: spec.value.expression.clone(),
        constants: spec.value.constants.clone(),
        candidates,
        page_candidates: serving.candidates,
        recall: serving.recall,
        probes: match calibration.filter(|_| serving.probes == 0) {
            Some(calibration) => calibration.choose(wanted, snapshot.index.items(), lists).probes,
            None => serving.probes_of(lists),
        },
        missing: Vec::new(),
        // Numbers have a text always.
        calibration: calibration.and_then(|c| calibration_info(c).ok()),
        bytes: snapshot.manifest.bytes(),
        memory_bytes: 0,
        labels: Vec::new(),
    }
}

/// What a calibration is, for people and programs.
///
/// # Errors
/// As [`Calibration::digest`].
pub fn calibration_info(calibration: &Calibration) -> Result<CalibrationInfo> {
    let coded = |c: &CodedCurve| CodedCurveInfo {
        selected: c.selected.clone(),
        probes: c.probes.clone(),
        recall: c.recall.clone(),
        low: c.low.clone(),
    };
    let curve = |c: &RecallCurve| CurveInfo {
        k: c.k,
        pass_rate: c.pass_rate,
        probes: c.probes.clone(),
        recall: c.recall.clone(),
        low: c.low.clone(),
        codes: c.codes.as_ref().map(coded),
    };
    Ok(CalibrationInfo {
        digest: calibration.digest()?,
        source: calibration.source.clone(),
        queries: calibration.queries,
        targets: calibration.targets.clone(),
        curves: calibration.curves.iter().map(curve).collect(),
    })
}

fn feature(spec: &FeatureSpec) -> FeatureInfo {
    let kind = match spec.kind {
        FeatureKind::Ids => "ids",
        FeatureKind::Category => "category",
        FeatureKind::Dense => "dense",
    };
    FeatureInfo { name: spec.source().into(), kind: kind.into(), width: spec.width, length: spec.length }
}

fn query(spec: &QuerySpec, snapshot: &Snapshot) -> QueryInfo {
    let candidates = spec.candidates.unwrap_or(snapshot.recipe.serving.candidates);
    QueryInfo { name: spec.name.clone(), candidates, weight: spec.weight }
}

fn merge(how: Merge) -> &'static str {
    match how {
        Merge::Union => "union",
        Merge::Intersection => "intersection",
        Merge::Weighted => "weighted",
    }
}

fn vector(spec: &VectorSpec) -> VectorInfo {
    VectorInfo { name: spec.name.clone(), width: spec.width, format: spec.format.name().into() }
}

fn input(readable: &Readable) -> InputInfo {
    let whose = match readable.whose {
        Whose::User => "user",
        Whose::Candidate => "candidate",
    };
    InputInfo { name: readable.name.clone(), whose: whose.into(), shape: readable.shape.clone() }
}

/// What a column is.
pub fn column_info(column: &Column) -> ColumnInfo {
    let kind = match column.kind() {
        ColumnKind::Integers => "integers",
        ColumnKind::Texts => "texts",
        ColumnKind::Floats => "floats",
    };
    ColumnInfo {
        name: column.name().into(),
        kind: kind.into(),
        filter: column.is_filterable(),
        distinct: column.dictionary_len(),
    }
}

fn table(table: &Table) -> TableInfo {
    TableInfo {
        name: table.name().into(),
        rows: table.rows(),
        width: table.width(),
        format: table.spec().format.name().into(),
        bytes: table.rows() * table.spec().row_bytes().unwrap_or_default() as u64,
        bytes_here: table.bytes_here(),
        placed: placed(table),
    }
}
