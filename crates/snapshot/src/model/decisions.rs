//! What a publication found out about how a model is best served, and every load keeps to.

use serde::{Deserialize, Serialize};

use sterling_embedding::RowFormat;
use sterling_graph::dense::{ItemCut, Precision};

/// What a publication decided; kept in the manifest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decisions {
    /// Where the model leaves its precision open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub precision: Option<DecidedPrecision>,
    /// Where some of the OverArch is worked out once an item.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub item_part: Option<DecidedPart>,
}

impl Decisions {
    /// True where nothing was to be decided.
    pub fn is_empty(&self) -> bool {
        *self == Decisions::default()
    }
}

/// In which precision the graphs of a request compute.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecidedPrecision {
    /// The precision.
    pub chosen: Precision,
    /// What was measured, or why nothing was.
    pub reason: String,
}

/// What is kept of each item of what the OverArch says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecidedPart {
    /// Where the graph is cut.
    pub cut: ItemCut,
    /// Numbers that are kept of an item.
    pub width: usize,
    /// How they are stored.
    pub format: RowFormat,
    /// The digest of what made them: the cut, operations and weights; of older versions, of the program's text.
    pub digest: String,
}
