//! Towers: compute the outputs of an ONNX graph from the values of a request, an item or a candidate.
//!
//! `onnx` checks files before they run, and `graph` runs them. `spec` declares the inputs of a tower in `model.toml`;
//! `row` reads values as these inputs, `tensors` defines the tensors that are computed from the inputs, and `features`
//! looks up ids and runs the graph ([`Tower`]). `overarch` runs the reranker over candidates ([`OverArch`]); `reads`
//! defines the reranker's inputs; `part` is the item-side precomputation ([`ItemPart`]).

#[cfg(feature = "cuda")]
mod device;
mod features;
mod graph;
mod onnx;
mod overarch;
mod part;
mod reads;
mod row;
mod scratch;
mod spec;
mod tensors;
mod threads;

#[cfg(feature = "cuda")]
pub use device::{DeviceMade, DeviceTower};
pub use features::{Tower, TowerOutput};
pub use graph::{Graph, Input, Runs, shown};
pub use onnx::{BYTES_MAX, Port, inlined};
pub use overarch::{OverArch, RUN_CANDIDATES};
pub use part::ItemPart;
pub use reads::{Candidates, Readable, Reads, TensorOwner};
pub use row::FeatureRow;
pub use scratch::Scratch;
pub use spec::{FeatureKind, FeatureSpec, Keep};
pub use tensors::{FeatureTensor, Pooled};
pub use threads::Threads;
