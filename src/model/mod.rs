//! The model package: what `models/NAME/` declares, and the parts that a snapshot loads from it.
//!
//! `spec` reads `model.toml`; `package` checks that the files exist and fit together.

mod package;
mod spec;

pub use package::{MODEL_FILE, Package, WARMUP_FILE};
pub use spec::{
    ColumnSpec, DeclaredTable, ItemSpec, ModelSpec, OverArchSpec, SIMILARITY, TaskSpec, UserSpec, ValueSpec,
};
