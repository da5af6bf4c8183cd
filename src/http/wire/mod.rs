//! The JSON of the HTTP API: every public shape, read into the types of [`crate::request`] and written from them. No
//! other module knows JSON of requests or answers.
//!
//! `values` reads feature values and bounded lists, `request` whole requests; `reply` writes answers, a piece at a time;
//! `info` tells of models and versions; `problem` of errors.

mod info;
mod problem;
mod reply;
mod request;
mod values;

pub use info::{
    CalibrationInfo, ColumnInfo, CurveInfo, FeatureInfo, ModelInfo, ModelList, TableInfo, VersionInfo, VersionList,
    model_info,
};
pub(super) use problem::without_places;
pub use problem::{Problem, status};
pub use reply::{
    BatchEntry, BatchResponse, EmbedResponse, Entry, Explain, Item, Probes, Reply, RetrieveResponse, Retrieved, Served,
    Step, embedding,
};
pub use request::{EmbedRequest, RankRequest, Retrievals, RetrieveRequest, Terms, embed, object, rank, retrievals};
pub use values::FeatureValue;
