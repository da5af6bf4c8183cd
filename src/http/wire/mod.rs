//! The JSON of the HTTP API: every public shape, read into the types of [`crate::request`] and written from them. No
//! other module knows JSON of requests or answers.
//!
//! `values` reads feature values and bounded lists, `body` whole bodies, of the types of `request`; `reply` writes the types
//! of `response`, a piece at a time; `items` is of updates; `browse` tells of what a catalogue holds, `info` of models and versions; `problem` of errors.

mod body;
mod browse;
mod info;
mod items;
mod problem;
mod reply;
mod request;
mod response;
mod schemas;
mod slow;
mod values;

pub use body::{Retrievals, embed, object, rank, retrievals};
pub use browse::{
    ColumnResponse, ColumnValue, FileInfo, FindRequest, FindResponse, FoundItem, IndexResponse, ValuesRequest, files,
    percentiles,
};
pub use info::{
    CalibrationInfo, ColumnInfo, CurveInfo, FeatureInfo, LabelList, LabelRequest, ModelInfo, ModelList, QueryLine,
    ShardInfo, TableInfo, VersionInfo, VersionList, calibration_info, column_info, model_info,
};
pub use items::{
    DeleteRequest, DeleteResponse, FailedShard, ItemResponse, ItemUpsert, MergeResponse, PositionResponse, RefusedItem,
    ShardPosition, UpdateResponse, attributes, cell, deletion, divided, upserts,
};
pub(super) use problem::without_places;
pub use problem::{Problem, status};
pub use reply::{Entry, Reply, embedding};
pub use request::{EmbedRequest, RankRequest, RetrieveRequest};
pub use response::{
    BatchEntry, BatchResponse, EmbedResponse, Explain, Item, MissingShard, ProbesInfo, RetrieveResponse, Retrieved,
    Served, ShardSteps, Step,
};
pub(super) use schemas::{RetrieveOneOrMany, RetrievedOneOrMany, UpsertRequest};
pub use slow::{SlowCall, SlowPass, SlowResponse};
pub use values::FeatureValue;
