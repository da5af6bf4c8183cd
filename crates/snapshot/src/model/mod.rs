//! The model package: what `models/NAME/` declares, and the parts that a snapshot loads from it.
//!
//! `spec` is what `model.toml` says and `check` what it must hold to; `contract` says what the graphs read of one another;
//! `train` is how events change it; `package` checks that the files exist and fit together, and `decisions` are what a publication adds to it.

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
