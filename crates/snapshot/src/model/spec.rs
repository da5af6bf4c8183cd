//! `model.toml`: features, tables, towers, item columns, tasks and the value model of a package.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::train::{LossKind, TrainSpec};
use sterling_core::error::{Error, Result};
use sterling_embedding::{RowFormat, Unseen};
use sterling_graph::dense::Precision;
use sterling_graph::tower::{FeatureSpec, OverArch};

/// Contents of `model.toml`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// Name under which the model is published and served.
    pub name: String,
    /// Description for people.
    #[serde(default)]
    pub description: String,
    /// Dimension D of query and item vectors.
    pub dimension: usize,
    /// Precision of the graphs.
    #[serde(default, skip_serializing_if = "AskedPrecision::is_f32")]
    pub precision: AskedPrecision,
    /// Sparse embedding tables.
    #[serde(default)]
    pub tables: Vec<DeclaredTable>,
    /// User tower; without it requests contain a `vector`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<UserSpec>,
    /// Item tower and stored columns.
    #[serde(default)]
    pub item: ItemSpec,
    /// The tasks of the OverArch, in the order of its last dimension.
    #[serde(default)]
    pub tasks: Vec<TaskSpec>,
    /// The reranker; without it the candidates keep the order of their similarity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overarch: Option<OverArchSpec>,
    /// The value model; without it the value is the similarity.
    #[serde(default)]
    pub value: ValueSpec,
    /// Training settings: how events update tables and towers; without them the model cannot be trained by `sterling
    /// train`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub train: Option<TrainSpec>,
}

/// Configured precision: in `int8` that of the towers, otherwise that of the graphs that run per request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AskedPrecision {
    /// Products of f32 values.
    #[default]
    F32,
    /// Factors of wide products are rounded to bf16, if the processor multiplies bf16 in hardware.
    Bf16,
    /// Factors of wide products with constant matrices of the towers are quantized to int8.
    Int8,
    /// bf16 if a measurement at publish time shows that it hardly changes answers, else f32.
    Auto,
}

impl AskedPrecision {
    /// Returns whether the precision is f32, the default.
    pub fn is_f32(&self) -> bool {
        *self == AskedPrecision::F32
    }
}

/// A sparse embedding table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeclaredTable {
    /// Name of the table and of its tensor `[rows, width]`.
    pub name: String,
    /// `.safetensors` file with the tensor.
    pub file: String,
    /// Format of rows that are stored as u8: `int8`, `int4` or `int2`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// Treatment of ids outside the table: `zero`, `hash` or `row:N`.
    #[serde(default = "zero")]
    pub unseen: String,
    /// Text file whose line `n` is the value of row `n`; required for `category` features, unless ids are managed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocabulary: Option<String>,
    /// `tokenizer.json` of Hugging Face's `tokenizers` whose ids are rows; required for `text` features.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    /// True if ids are not row numbers: the tensor `ids.NAME` in the same file has the id of each row.
    #[serde(default, skip_serializing_if = "is_false")]
    pub managed: bool,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

fn zero() -> String {
    "zero".into()
}

impl DeclaredTable {
    /// Parses the treatment of ids outside the table.
    ///
    /// # Errors
    /// `Invalid` with the received value.
    pub fn unseen(&self) -> Result<Unseen> {
        Unseen::parse(&self.unseen)
    }

    /// Parses the format of rows that are stored as u8.
    ///
    /// # Errors
    /// `Invalid` with the received value.
    pub fn row_format(&self) -> Result<Option<RowFormat>> {
        self.format.as_deref().map(RowFormat::named).transpose()
    }
}

/// The user tower.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UserSpec {
    /// ONNX file with the output `query` and further outputs that the OverArch reads.
    pub tower: String,
    /// Merge of the candidates of several queries; `union` by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merge: Option<Merge>,
    /// Queries per user, in the order of the axis Tq of `query`. If empty, there is one query, and no such axis.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub queries: Vec<QuerySpec>,
    /// Inputs of the tower, and user inputs of the OverArch.
    pub features: Vec<FeatureSpec>,
}

/// One of several queries of a user.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuerySpec {
    /// Name in explanations of answers.
    pub name: String,
    /// Number of candidates of the query, K0; by default that of the recipe.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub candidates: Option<usize>,
    /// Factor of the query's scores before the merge.
    #[serde(default = "one")]
    pub weight: f32,
}

fn one() -> f32 {
    1.0
}

/// Merge of the candidates of several queries, and their retrieval scores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Merge {
    /// Candidates of any query, with their maximum weighted score.
    #[default]
    Union,
    /// Candidates of every query, with the sum of their weighted scores.
    Intersection,
    /// Candidates of any query, with the sum of the weighted scores of all queries.
    Weighted,
}

/// Item tower, if any, and stored columns.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ItemSpec {
    /// ONNX file with the output `item`. Without it the item file has a column `embedding`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tower: Option<String>,
    /// Inputs of the tower.
    #[serde(default)]
    pub features: Vec<FeatureSpec>,
    /// Tensors that are stored per item, for the OverArch.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vectors: Vec<VectorSpec>,
    /// Item columns to store; empty means all columns of the item file.
    #[serde(default)]
    pub columns: Vec<ColumnSpec>,
}

/// Tensor that is stored per item.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VectorSpec {
    /// Name of the OverArch's input, and of the item tower's output if `column` is unset.
    pub name: String,
    /// Number of values per item.
    pub width: usize,
    /// Vector column of the item file from which the tensor is read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub column: Option<String>,
    /// Storage format: `f32`, `f16`, `bf16` or `int8`.
    #[serde(default = "half")]
    pub format: RowFormat,
}

fn half() -> RowFormat {
    RowFormat::F16
}

/// Stored item column.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ColumnSpec {
    /// The name in the item file.
    pub name: String,
    /// True if filters may use the column.
    #[serde(default = "yes")]
    pub filter: bool,
}

fn yes() -> bool {
    true
}

/// A task that the OverArch predicts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskSpec {
    /// The name that the value model and replies use.
    pub name: String,
}

/// The reranker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OverArchSpec {
    /// ONNX file with the output `logits`.
    pub graph: String,
    /// Item columns that are looked up in tables; each is an input of the graph.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub features: Vec<FeatureSpec>,
}

/// The value model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ValueSpec {
    /// The expression over tasks, numeric columns, `similarity` and constants.
    #[serde(default = "similarity")]
    pub expression: String,
    /// Named constants, which a request may override.
    #[serde(default)]
    pub constants: BTreeMap<String, f32>,
}

/// The name of the retrieval score in value models.
pub const SIMILARITY: &str = OverArch::SIMILARITY;

fn similarity() -> String {
    SIMILARITY.into()
}

impl Default for ValueSpec {
    fn default() -> Self {
        ValueSpec { expression: similarity(), constants: BTreeMap::new() }
    }
}

impl ModelSpec {
    /// Returns the precision of a graph. The item tower, which runs once per item, is in f32 or int8; the OverArch is
    /// never in int8. For other graphs, `decided` applies if the setting is `auto`.
    pub fn precision_of(&self, file: &str, decided: Precision) -> Precision {
        match self.precision {
            AskedPrecision::Int8 if self.overarch.as_ref().is_some_and(|o| o.graph == file) => Precision::F32,
            AskedPrecision::Int8 => Precision::Int8,
            _ if self.item.tower.as_deref() == Some(file) => Precision::F32,
            AskedPrecision::F32 => Precision::F32,
            AskedPrecision::Bf16 => Precision::Bf16,
            AskedPrecision::Auto => decided,
        }
    }

    /// Returns the names and loss weights of the tasks that are trained; none for another loss than that of tasks.
    pub fn trained_tasks(&self) -> impl Iterator<Item = (&str, f32)> {
        let train = self.train.iter().filter(|train| train.loss == LossKind::Tasks);
        let weight = |train: &TrainSpec, task: &str| train.tasks.get(task).copied().unwrap_or(1.0);
        train.flat_map(move |train| self.tasks.iter().map(move |task| (task.name.as_str(), weight(train, &task.name))))
    }

    /// Returns the request features that read a table.
    pub fn readers<'a>(&'a self, table: &'a str) -> impl Iterator<Item = &'a FeatureSpec> {
        let features: &[FeatureSpec] = self.user.as_ref().map_or(&[], |user| &user.features);
        features.iter().filter(move |f| f.table.as_deref() == Some(table))
    }

    /// Returns whether candidates are looked up in a table, which must then be completely in memory.
    pub fn serves_candidates(&self, table: &str) -> bool {
        self.overarch.iter().flat_map(|o| &o.features).any(|f| f.table.as_deref() == Some(table))
    }

    /// Returns the named queries of a user; empty if there is a single one without a name.
    pub fn queries(&self) -> &[QuerySpec] {
        self.user.as_ref().map_or(&[], |user| &user.queries)
    }

    /// Returns the number of queries per user, Tq, at least one.
    pub fn query_count(&self) -> usize {
        self.queries().len().max(1)
    }

    /// Returns the text of the file.
    ///
    /// # Errors
    /// `Internal` if the specification cannot be serialized.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self).map_err(|e| Error::internal(format!("model.toml: {e}")))
    }

    /// Creates a model without towers: requests and items contain vectors.
    pub fn embedding_only(name: &str, dimension: usize) -> Self {
        ModelSpec {
            name: name.into(),
            description: String::new(),
            dimension,
            precision: AskedPrecision::F32,
            tables: Vec::new(),
            user: None,
            item: ItemSpec::default(),
            tasks: Vec::new(),
            overarch: None,
            value: ValueSpec::default(),
            train: None,
        }
    }
}
