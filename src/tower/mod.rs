//! Towers: from the values that a request, an item or a candidate brings to what an ONNX graph says of them.
//!
//! `graph` runs ONNX files; `spec` is how `model.toml` declares the inputs of a tower; `features` turns values into these
//! inputs ([`Tower`]); `overarch` runs the reranker over candidates ([`OverArch`]).

mod features;
mod graph;
mod overarch;
mod spec;

pub use features::{FeatureValues, Features, Pooled, Tower};
pub use graph::{Graph, Input, Port, shown};
pub use overarch::{Candidates, OverArch, RUN_CANDIDATES};
pub use spec::{FeatureKind, FeatureSpec};
