//! A snapshot: one published version of a model, with everything that answers a request.
//!
//! `STORE/NAME/VERSION/` holds the model package's files as they were and, beside them:
//!
//! | file | holds |
//! |---|---|
//! | `index.safetensors` | the item index ([`crate::ivf`]) |
//! | `filter.safetensors` | planes and posting lists ([`crate::bloom`]) |
//! | `columns.safetensors` | item columns ([`crate::columns`]) and ids |
//! | `recipe.toml` | how it was built and the serving defaults |
//! | `manifest.json` | written last: shapes, provenance, length and hash of every other file |
//!
//! The format is described for other readers in `docs/FORMAT.md`.

mod ids;
mod load;
mod manifest;
mod placement;
mod publish;
mod recipe;
mod tables;
mod workload;

pub use ids::Ids;
pub use load::Snapshot;
pub use manifest::{FORMAT, MANIFEST, Manifest, Provenance, Store, check_name};
pub use placement::{Placement, PlacementOptions, rows_on_cluster};
pub use publish::{Publish, Stage, Vectors, publish, published};
pub use recipe::{Recipe, Serving};
pub use tables::Remote;
pub use workload::workload;

const INDEX_FILE: &str = "index.safetensors";
const FILTER_FILE: &str = "filter.safetensors";
const COLUMNS_FILE: &str = "columns.safetensors";
const RECIPE_FILE: &str = "recipe.toml";
