//! `model.toml`: features, tables, towers, item columns, tasks and the value model of a package.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::train::TrainSpec;
use sterling_core::error::{Error, Result};
use sterling_embedding::{RowFormat, Unseen};
use sterling_graph::dense::Precision;
use sterling_graph::tower::{FeatureSpec, OverArch};

/// Everything that `model.toml` says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// The name it is published and served under.
    pub name: String,
    /// What it answers, for people.
    #[serde(default)]
    pub description: String,
    /// Width of queries and items, D.
    pub dimension: usize,
    /// In which precision the graphs of a request compute.
    #[serde(default, skip_serializing_if = "AskedPrecision::is_f32")]
    pub precision: AskedPrecision,
    /// Sparse embedding tables.
    #[serde(default)]
    pub tables: Vec<DeclaredTable>,
    /// The user side; without it requests bring a `vector`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<UserSpec>,
    /// The item side.
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
    /// How events change tables and towers; without it the model is not trained here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub train: Option<TrainSpec>,
}

/// In which precision the graphs of a request are to compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AskedPrecision {
    /// Factors as they are.
    #[default]
    F32,
    /// Factors of wide products rounded to bf16, where the processor has products of them.
    Bf16,
    /// In bf16 where a publication finds that this hardly changes answers, else in f32.
    Auto,
}

impl AskedPrecision {
    /// Whether it is the one of models that name none.
    pub fn is_f32(&self) -> bool {
        *self == AskedPrecision::F32
    }
}

/// A sparse embedding table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeclaredTable {
    /// The name, also of the tensor `[rows, width]`.
    pub name: String,
    /// The `.safetensors` file that holds the tensor.
    pub file: String,
    /// The format of rows that are stored as u8: `int8`, `int4` or `int2`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// What an id outside the table becomes: `zero`, `hash` or `row:N`.
    #[serde(default = "zero")]
    pub unseen: String,
    /// A text file whose line `n` is the value of row `n`; `category` features need one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocabulary: Option<String>,
}

fn zero() -> String {
    "zero".into()
}

impl DeclaredTable {
    /// What an id outside the table becomes.
    ///
    /// # Errors
    /// `Invalid` with what was given.
    pub fn unseen(&self) -> Result<Unseen> {
        Unseen::parse(&self.unseen)
    }

    /// The format of rows stored as u8.
    ///
    /// # Errors
    /// `Invalid` with what was given.
    pub fn row_format(&self) -> Result<Option<RowFormat>> {
        self.format.as_deref().map(RowFormat::named).transpose()
    }
}

/// The user tower.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UserSpec {
    /// The ONNX file; its output is `query`, and what else the OverArch reads of it.
    pub tower: String,
    /// How the candidates of several queries become one list; `union` where it does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merge: Option<Merge>,
    /// The queries of a user, in the order of the axis Tq of `query`; none means one, without that axis.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub queries: Vec<QuerySpec>,
    /// Its inputs, and those of the OverArch that tell of the user.
    pub features: Vec<FeatureSpec>,
}

/// One of several queries of a user.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuerySpec {
    /// The name that explanations use.
    pub name: String,
    /// Its candidates, K0; what the recipe says where it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub candidates: Option<usize>,
    /// What its scores are multiplied with before they are merged.
    #[serde(default = "one")]
    pub weight: f32,
}

fn one() -> f32 {
    1.0
}

/// How the candidates of several queries become one list, and what their retrieval score is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Merge {
    /// Those that any query found, with the largest weighted score.
    #[default]
    Union,
    /// Those that every query found, with the sum of the weighted scores.
    Intersection,
    /// Those that any query found, with the sum of the weighted scores of all queries.
    Weighted,
}

/// The item tower, if any, and the columns that are kept.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ItemSpec {
    /// The ONNX file; its output is `item`. Without it items bring a column `embedding`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tower: Option<String>,
    /// Its inputs.
    #[serde(default)]
    pub features: Vec<FeatureSpec>,
    /// Tensors that are kept for each item, for the OverArch.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vectors: Vec<VectorSpec>,
    /// Item columns to keep; none means all of the item file.
    #[serde(default)]
    pub columns: Vec<ColumnSpec>,
}

/// A tensor that is kept for each item.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VectorSpec {
    /// The name of the OverArch's input, and of the item tower's output where no column brings it.
    pub name: String,
    /// Numbers of an item.
    pub width: usize,
    /// The column of vectors of the item file that brings it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub column: Option<String>,
    /// How it is kept: `f32`, `f16`, `bf16` or `int8`.
    #[serde(default = "half")]
    pub format: RowFormat,
}

fn half() -> RowFormat {
    RowFormat::F16
}

/// An item column that is kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ColumnSpec {
    /// The name in the item file.
    pub name: String,
    /// True where filters may ask about it.
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
    /// The ONNX file; its output is `logits`.
    pub graph: String,
    /// Item columns that are looked up in tables, each an input.
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
    /// In which precision a graph computes: that of items, which run once, in f32, the others as it was `decided` where that is
    /// left open.
    pub fn precision_of(&self, file: &str, decided: Precision) -> Precision {
        match self.precision {
            _ if self.item.tower.as_deref() == Some(file) => Precision::F32,
            AskedPrecision::F32 => Precision::F32,
            AskedPrecision::Bf16 => Precision::Bf16,
            AskedPrecision::Auto => decided,
        }
    }

    /// The features of requests that read a table.
    pub fn readers<'a>(&'a self, table: &'a str) -> impl Iterator<Item = &'a FeatureSpec> {
        let features: &[FeatureSpec] = self.user.as_ref().map_or(&[], |user| &user.features);
        features.iter().filter(move |f| f.table.as_deref() == Some(table))
    }

    /// True where candidates are looked up in a table, which must lie whole in memory then.
    pub fn serves_candidates(&self, table: &str) -> bool {
        self.overarch.iter().flat_map(|o| &o.features).any(|f| f.table.as_deref() == Some(table))
    }

    /// The queries of a user by their names; none where there is one without a name.
    pub fn queries(&self) -> &[QuerySpec] {
        self.user.as_ref().map_or(&[], |user| &user.queries)
    }

    /// Queries that each user has, Tq: one where none is named.
    pub fn query_count(&self) -> usize {
        self.queries().len().max(1)
    }

    /// The file's text.
    ///
    /// # Errors
    /// `Internal` where it cannot be written.
    pub fn to_toml(&self) -> Result<String> {
        toml::to_string(self).map_err(|e| Error::internal(format!("model.toml: {e}")))
    }

    /// A model without towers: requests bring a vector, items bring theirs.
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
