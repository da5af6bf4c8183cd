//! Towers: from the values that a request, an item or a candidate brings to what an ONNX graph says of them.
//!
//! `onnx` looks at files before anything runs them, `graph` runs them; `spec` is how `model.toml` declares the inputs of a tower; `row` reads values as these
//! inputs, `tensors` says what they become, `features` looks them up and runs the graph ([`Tower`]); `overarch` runs the
//! reranker over candidates ([`OverArch`]), which bring what `reads` finds that it reads; `part` is what it says of an item whoever
//! asks ([`ItemPart`]).

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
pub use features::{RUN_ROWS, Tower, TowerOutput};
pub use graph::{Graph, Input, Runs, shown};
pub use onnx::Port;
pub use overarch::{OverArch, RUN_CANDIDATES};
pub use part::ItemPart;
pub use reads::{Candidates, Readable, Reads, Whose};
pub use row::FeatureRow;
pub use scratch::Scratch;
pub use spec::{FeatureKind, FeatureSpec, Keep};
pub use tensors::{FeatureTensor, Pooled};
pub use threads::Threads;
