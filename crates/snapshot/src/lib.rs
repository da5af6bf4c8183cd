//! A snapshot: one published version of a model, with everything that answers a request.
//!
//! `STORE/NAME/VERSION/` holds the model package's files as they were and, beside them:
//!
//! | file | holds |
//! |---|---|
//! | `index.safetensors` | the item index ([`sterling_index::ivf`]) |
//! | `filter.safetensors` | planes and posting lists ([`sterling_index::filter::index`]) |
//! | `columns.safetensors` | item columns ([`sterling_index::columns`]) and ids |
//! | `vectors.safetensors` | tensors that the OverArch reads of each item ([`vectors`]), where the package declares some |
//! | `parts.safetensors` | what the OverArch says of each item whoever asks ([`ItemParts`]), where that is kept |
//! | `recipe.toml` | how it was built and the serving defaults |
//! | `calibration.json` | how many lists a recall takes; not where there is only one list |
//! | `queries.safetensors` | the queries of the calibration, where they came from a file |
//! | `strata.safetensors` | queries near items of new kinds that merges brought, where they did not |
//! | `recalibration.json` | one that was made again later, named by no manifest: it has its own digest |
//! | `manifest.json` | written last: shapes, provenance, length and hash of every other file |
//!
//! A version that was cut into shards holds a folder of such files for each, and `shards.json` that names them (`shards`).
//!
//! The format is described for other readers in `docs/reference/formats.md`.
//!
//! ```
//! use sterling_snapshot::{Recipe, Store};
//!
//! let recipe = Recipe::parse("[serving]\nrecall = 0.9\n[index]\nlists = 256\n")?;
//! assert_eq!((recipe.serving.recall, recipe.index.lists), (0.9, 256));
//!
//! let folder = tempfile::tempdir()?;
//! let store = Store::new(folder.path());
//! let version = store.publish("catalogue", |folder, version| {
//!     assert_eq!(version, 1);
//!     let path = folder.join("manifest.json");
//!     std::fs::write(&path, "{}").map_err(|e| sterling_core::error::Error::io(path.display(), e))
//! })?;
//! assert_eq!((store.versions("catalogue")?, version), (vec![1], 1));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![cfg_attr(not(test), deny(unreachable_pub))]

mod calibration;
pub mod candidates;
pub mod ids;
pub mod items;
mod load;
mod manifest;
pub mod model;
mod part;
mod placement;
mod recipe;
pub mod rollout;
pub mod sandbox;
mod shards;
mod store;
pub mod vectors;
mod workload;

pub use calibration::{
    Calibration, Chosen, CodedCurve, RECALIBRATION_FILE, Recalibration, RecallCurve, TARGETS, Wanted,
};
pub use candidates::{CandidateRows, DeviceCandidates, RowSources};
pub use ids::Ids;
pub use load::Snapshot;
pub use manifest::{FORMAT, FoldedFrom, GraphRecord, MANIFEST, Manifest, MergedFrom, PROGRAM, Provenance, ShardOf};
pub use part::ItemParts;
pub use placement::{Placement, PlacementOptions, content_of, placed, rows_on_cluster};
pub use recipe::{PartFormat, Recipe, Reranking, Serving};
pub use shards::{SHARDS_FILE, ShardEntry, Shards, shard_folder, shard_of};
#[cfg(any(test, feature = "testing"))]
pub use store::failing;
pub use store::{CacheOptions, Held, Stamp, Store, WISH_FILE, Wish, check_name};
pub use vectors::VectorRows;
pub use workload::workload;

/// The file of the item index.
pub const INDEX_FILE: &str = "index.safetensors";
/// The file of the filter's planes and posting lists.
pub const FILTER_FILE: &str = "filter.safetensors";
/// The file of item columns and ids.
pub const COLUMNS_FILE: &str = "columns.safetensors";
/// The file of the calibration.
pub const CALIBRATION_FILE: &str = "calibration.json";
/// The file of tensors that are kept by item, where the package declares some.
pub const VECTORS_FILE: &str = "vectors.safetensors";
/// The file of what the OverArch says of each item whoever asks, where that is kept.
pub const PARTS_FILE: &str = "parts.safetensors";
/// The file of the queries that it was calibrated with, where they are none of its items.
pub const QUERIES_FILE: &str = "queries.safetensors";
/// The file of queries near items of new kinds that merges brought, where it was calibrated with its items.
pub const STRATA_FILE: &str = "strata.safetensors";
/// The file of sample requests of a package, a `:retrieve` body a line; a version keeps those that calibrated it.
pub const REQUESTS_FILE: &str = "queries.jsonl";
/// The file of the recipe.
pub const RECIPE_FILE: &str = "recipe.toml";
