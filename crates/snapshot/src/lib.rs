//! Snapshots: published versions of a model, with everything that is needed to answer requests.
//!
//! `STORE/NAME/VERSION/` has the unchanged files of the model package and these:
//!
//! | file | holds |
//! |---|---|
//! | `index.safetensors` | item index ([`sterling_index::ivf`]) |
//! | `filter.safetensors` | Bloom planes and posting lists ([`sterling_index::filter::index`]) |
//! | `columns.safetensors` | item columns ([`sterling_index::columns`]) and ids |
//! | `vectors.safetensors` | per-item tensors that the reranker reads ([`vectors`]), if the package declares any |
//! | `parts.safetensors` | item-side precomputation of the reranker ([`ItemParts`]), if it is stored |
//! | `recipe.toml` | build options of the index, and serving defaults |
//! | `calibration.json` | nprobe by recall; absent if there is only one list |
//! | `queries.safetensors` | queries of the calibration, if they came from a file |
//! | `strata.safetensors` | queries near new kinds of items added by merges, if the calibration queries are items |
//! | `recalibration.json` | a later calibration; not listed in the manifest, with its own digest |
//! | `manifest.json` | written last: shapes, provenance, length and hash of every other file |
//!
//! A version partitioned into shards has one folder with these files per shard, and `shards.json`, which lists them (`shards`).
//!
//! `docs/reference/formats.md` specifies the format for other readers.
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
pub mod sandbox;
mod shards;
mod store;
pub mod vectors;
mod workload;

pub use calibration::{
    Calibration, Chosen, CodedCurve, ExcludingCurve, RECALIBRATION_FILE, Recalibration, RecallCurve, SearchGoal,
    TARGETS,
};
pub use candidates::{CandidateRows, DeviceCandidates, RowSources};
pub use ids::Ids;
pub use load::Snapshot;
pub use manifest::{FORMAT, FoldedFrom, GraphRecord, MANIFEST, Manifest, MergedFrom, PROGRAM, Provenance, ShardOf};
pub use part::ItemParts;
pub use placement::{Placement, PlacementOptions, content_of, placed, rows_on_cluster};
pub use recipe::{PartFormat, Recipe, Reranking, Serving};
pub use shards::{SHARDS_FILE, ShardEntry, Shards, shard_folder};
#[cfg(any(test, feature = "testing"))]
pub use store::failing;
pub use store::{CacheOptions, DESIRED_FILE, Desired, PinnedVersion, Stamp, Store, check_name};
pub use vectors::VectorRows;
pub use workload::workload;

/// File of the item index.
pub const INDEX_FILE: &str = "index.safetensors";
/// File of the filter's Bloom planes and posting lists.
pub const FILTER_FILE: &str = "filter.safetensors";
/// File of item columns and ids.
pub const COLUMNS_FILE: &str = "columns.safetensors";
/// File of the calibration.
pub const CALIBRATION_FILE: &str = "calibration.json";
/// File of per-item tensors, if the package declares any.
pub const VECTORS_FILE: &str = "vectors.safetensors";
/// File of the reranker's item-side precomputation, if it is stored.
pub const PARTS_FILE: &str = "parts.safetensors";
/// File of the calibration queries, if they are not items of the version.
pub const QUERIES_FILE: &str = "queries.safetensors";
/// File of queries near new kinds of items added by merges, if the calibration queries are items.
pub const STRATA_FILE: &str = "strata.safetensors";
/// File of a package's sample requests, one `:retrieve` body per line; a version keeps the requests that were used for calibration.
pub const REQUESTS_FILE: &str = "queries.jsonl";
/// File of the recipe.
pub const RECIPE_FILE: &str = "recipe.toml";
