//! Declarations of a graph's inputs in `model.toml`.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use sterling_embedding::Pooling;

/// Type of a feature's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FeatureKind {
    /// 64-bit ids, looked up in a table.
    Ids,
    /// Strings or integers that a table's vocabulary maps to rows, or their hash if the table's ids are managed.
    Category,
    /// Numbers without a lookup.
    Dense,
    /// A string, of which a table's tokenizer makes ids.
    Text,
}

/// Truncation of a sequence that has more values than its length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// Keeps the last values.
    #[default]
    Last,
    /// Keeps the first values.
    First,
}

impl Keep {
    /// Returns the range of the `values` values that are kept in a sequence of `length` values.
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
    /// Name of the graph's input.
    pub name: String,
    /// Type of the values.
    pub kind: FeatureKind,
    /// Table of an `ids`, `category` or `text` feature.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<String>,
    /// Pooling of several rows; with `none` the feature is a sequence.
    #[serde(default)]
    pub pooling: Pooling,
    /// Number of rows of a sequence, S: longer ones are truncated, shorter ones are padded with zeros. Of a text, pooled or not:
    /// its maximum number of tokens, special tokens included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length: Option<usize>,
    /// Truncation of longer sequences and texts; the default is `last` for sequences and `first` for texts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<Keep>,
    /// Maximum number of ids per request or item.
    #[serde(default = "most_ids")]
    pub max_ids: usize,
    /// True if the rows are multiplied by weights of the ids. With `false`, weights of a request are dropped, as in TorchRec's
    /// unweighted collections.
    #[serde(default = "takes_weights", skip_serializing_if = "Clone::clone")]
    pub weights: bool,
    /// Numbers of a `dense` feature.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub width: Option<usize>,
    /// Request field or item column of the values, if its name differs from the feature's.
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
    /// Returns the request field or item column that has the values.
    pub fn source(&self) -> &str {
        self.column.as_deref().unwrap_or(&self.name)
    }

    /// Returns true if the feature is a sequence without pooling.
    pub fn is_sequence(&self) -> bool {
        self.kind != FeatureKind::Dense && self.pooling == Pooling::None
    }

    /// Returns which values are kept if there are too many.
    pub fn kept(&self) -> Keep {
        self.keep.unwrap_or(if self.kind == FeatureKind::Text { Keep::First } else { Keep::Last })
    }

    /// Returns the name of the mask input, which marks the positions of a sequence that have values.
    pub fn mask(&self) -> String {
        format!("{}_mask", self.name)
    }
}
