//! The inputs of a graph as `model.toml` declares them.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use sterling_embedding::Pooling;

/// What a feature's values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FeatureKind {
    /// 64-bit ids, looked up in a table.
    Ids,
    /// Texts or integers that a table's vocabulary turns into rows.
    Category,
    /// Numbers, taken as they are.
    Dense,
}

/// Which values of a sequence stay where there are more than it is long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// Those at the end.
    #[default]
    Last,
    /// Those at the start.
    First,
}

impl Keep {
    /// Which of so many values a sequence of this length takes.
    pub fn of(self, values: usize, length: usize) -> Range<usize> {
        let left_out = values.saturating_sub(length);
        match self {
            Keep::First => 0..values - left_out,
            Keep::Last => left_out..values,
        }
    }
}

/// One input of a graph.
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
    /// How several rows become one; with `none` the feature is a sequence.
    #[serde(default)]
    pub pooling: Pooling,
    /// Rows of a sequence, S: longer ones are cut, shorter ones are padded with zeros.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length: Option<usize>,
    /// What is left of a sequence that is cut; `last` where it does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<Keep>,
    /// Most ids of one request or item.
    #[serde(default = "most_ids")]
    pub max_ids: usize,
    /// Whether weights of the ids multiply their rows; with `false` weights that a request brings are dropped, as TorchRec's
    /// unweighted collections do.
    #[serde(default = "takes_weights", skip_serializing_if = "Clone::clone")]
    pub weights: bool,
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

fn takes_weights() -> bool {
    true
}

impl FeatureSpec {
    /// The request field or item column that brings the values.
    pub fn source(&self) -> &str {
        self.column.as_deref().unwrap_or(&self.name)
    }

    /// True where every value keeps a row of its own.
    pub fn is_sequence(&self) -> bool {
        self.kind != FeatureKind::Dense && self.pooling == Pooling::None
    }

    /// The name of the input that says where a sequence has values.
    pub fn mask(&self) -> String {
        format!("{}_mask", self.name)
    }
}
