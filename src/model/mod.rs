//! The model package: what `models/NAME/` declares, and the parts that a snapshot loads from it.
//!
//! `spec` reads `model.toml`; `package` checks that the files exist and fit together; `features` turns the values that a
//! request or an item brings into what a tower takes.

mod features;
mod package;
mod spec;

pub use features::{FeatureValues, Features, Pooled, Tower};
pub use package::{MODEL_FILE, Package};
pub use spec::{
    ColumnSpec, FeatureKind, FeatureSpec, ItemSpec, ModelSpec, OverArchSpec, Pooling, SIMILARITY, TableSpec, TaskSpec,
    UserSpec, ValueSpec,
};
