//! Serving decisions that a publication makes by measurement, and every load applies.

use serde::{Deserialize, Serialize};

use sterling_embedding::RowFormat;
use sterling_graph::dense::{ItemCut, Precision};

/// Serving decisions of a publication, stored in the manifest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decisions {
    /// Precision, if the model leaves it open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub precision: Option<DecidedPrecision>,
    /// Item-side precomputation of the reranker, if the precomputation is used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub item_part: Option<DecidedPart>,
}

impl Decisions {
    /// Returns whether the publication made no decision.
    pub fn is_empty(&self) -> bool {
        *self == Decisions::default()
    }
}

/// Precision of the graphs that run per request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecidedPrecision {
    /// Chosen precision.
    pub chosen: Precision,
    /// Measurements, or the reason why nothing was measured.
    pub reason: String,
}

/// Stored item-side precomputation of the reranker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecidedPart {
    /// Tensors at which the graph is split.
    pub cut: ItemCut,
    /// Number of stored values per item.
    pub width: usize,
    /// Storage format of the values.
    pub format: RowFormat,
    /// Digest of the computation: cut, operations and weights; in older versions, of the text of the compiled graph.
    pub digest: String,
}
