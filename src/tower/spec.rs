//! The inputs of a tower as `model.toml` declares them.

use serde::{Deserialize, Serialize};

use crate::embedding::Pooling;

/// What a feature's values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FeatureKind {
    /// 64-bit ids, pooled from a table.
    Ids,
    /// Texts or integers that a table's vocabulary turns into rows, pooled.
    Category,
    /// Numbers, taken as they are.
    Dense,
}

/// One input of a tower.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeatureSpec {
    /// The name of the graph's input.
    pub name: String,
    /// What the values are.
    pub kind: FeatureKind,
    /// The table of an `ids` or `category` feature.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<String>,
    /// How several rows become one.
    #[serde(default)]
    pub pooling: Pooling,
    /// Most ids of one request or item.
    #[serde(default = "most_ids")]
    pub max_ids: usize,
    /// Numbers of a `dense` feature.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub width: Option<usize>,
    /// The request field or item column that brings the values, where it is not called like the feature.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub column: Option<String>,
}

fn most_ids() -> usize {
    4096
}

impl FeatureSpec {
    /// The request field or item column that brings the values.
    pub fn source(&self) -> &str {
        self.column.as_deref().unwrap_or(&self.name)
    }
}
