//! The model package: what `models/NAME/` declares, and the parts that a snapshot loads from it.
//!
//! `spec` reads `model.toml`; `package` checks that the files exist and fit together; `workload` says what requests ask of
//! the tables.

mod package;
mod spec;
mod workload;

pub use package::{MODEL_FILE, Package};
pub use spec::{ColumnSpec, ItemSpec, ModelSpec, OverArchSpec, SIMILARITY, TableSpec, TaskSpec, UserSpec, ValueSpec};
