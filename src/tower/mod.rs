//! Towers: from the values that a request, an item or a candidate brings to what an ONNX graph says of them.
//!
//! `onnx` looks at files before anything runs them, `graph` runs them; `spec` is how `model.toml` declares the inputs of a tower; `row` reads values as these
//! inputs, `features` looks them up and runs the graph ([`Tower`]); `overarch` runs the reranker over candidates ([`OverArch`]).

mod features;
mod graph;
mod onnx;
mod overarch;
mod row;
mod scratch;
mod spec;
mod threads;

pub use features::{Pooled, RUN_ROWS, Tower};
pub use graph::{Graph, Input, Runs, shown};
pub use onnx::Port;
pub use overarch::{Candidates, OverArch, RUN_CANDIDATES};
pub use row::FeatureRow;
pub use scratch::Scratch;
pub use spec::{FeatureKind, FeatureSpec};
pub use threads::Threads;
