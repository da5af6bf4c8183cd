//! The model package: what `models/NAME/` declares, and the parts that a snapshot loads from it.
//!
//! `spec` has the types of `model.toml`, and `check` validates them; `contract` defines the tensors that the graphs
//! exchange; `train` has the settings of training; `package` checks that the files exist and match, and `decisions` has
//! the choices that a publication stores with the package.

mod check;
mod contract;
mod decisions;
mod package;
mod spec;
mod train;

pub use contract::{CandidateInput, UserInput};
pub use decisions::{DecidedPart, DecidedPrecision, Decisions};
pub(crate) use package::read_graph;
pub use package::{MODEL_FILE, Package, WARMUP_FILE};
pub use spec::{
    AskedPrecision, ColumnSpec, DeclaredTable, ItemSpec, Merge, ModelSpec, OverArchSpec, QuerySpec, SIMILARITY,
    TaskSpec, UserSpec, ValueSpec, VectorSpec,
};
pub use train::{LossKind, TowerSide, TrainSpec, TrainTable};
