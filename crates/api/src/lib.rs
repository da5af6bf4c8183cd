//! JSON of the HTTP API: every public type, parsed into the types of [`sterling_core::request`] and written from them. No other
//! crate handles JSON of requests or answers.
//!
//! Modules: `values` parses feature values and bounded lists; `body` parses complete bodies into `request` types; `entry` holds
//! the contents of an answer, which `reply` writes in chunks in the types of `response`; `arrow` reads and writes Arrow streams;
//! `items` has updates; `browse` describes catalogues, `info` models and versions, `traffic` rollouts, `problem` errors; `client_body`
//! writes bodies for clients.
//!
//! ```
//! use sterling_api::{Retrievals, retrievals, retrieve_body};
//! use sterling_core::request::{Retrieve, User};
//!
//! let request = Retrieve { k: 3, filter: "lang:en".into(), ..Retrieve::of(User::Vector(vec![0.5, -1.0])) };
//! let body = retrieve_body(&request)?.to_string();
//! let Retrievals::One(read, ..) = retrievals(body.as_bytes())? else { unreachable!("one request was written") };
//! assert_eq!(*read, request);
//!
//! let invalid = retrievals(br#"{"vector": [1, 2], "k": 0}"#).unwrap_err();
//! assert!(invalid.to_string().contains("`k`: got 0, expected 1 to 100000"), "{invalid}");
//! # Ok::<(), sterling_core::error::Error>(())
//! ```

#![cfg_attr(not(test), deny(unreachable_pub))]

mod arrow;
mod body;
mod browse;
mod client_body;
mod entry;
mod inference;
mod info;
mod items;
mod problem;
mod reply;
mod request;
mod response;
mod schemas;
mod sizes;
mod slow;
mod stepwise;
mod traffic;
mod values;
mod vector_form;
mod written;

pub use arrow::{ARROW_STREAM, ArrowReply, arrow_divided, arrow_retrievals, arrow_upserts};
pub use body::{Misread, Retrievals, embed, object, rank, read_object, retrievals};
pub use browse::{
    ColumnResponse, ColumnValue, FileInfo, FindRequest, FindResponse, FoundItem, HeldShard, IndexResponse,
    ShardsResponse, ValuesRequest,
};
pub use client_body::{WrittenValues, rank_body, retrieve_body};
pub use entry::{Entry, WrittenRows};
pub use inference::{
    Inference, InferenceError, InferenceModel, InferenceReady, InferenceReply, InferenceRequest, InferenceResponse,
    InferenceServer, InferenceSizer, inference, inference_model,
};
pub use info::{
    CalibrationInfo, CodedCurveInfo, ColumnInfo, CurveInfo, DesiredState, FeatureInfo, InputInfo, LabelList,
    LabelRequest, ModelInfo, ModelList, QueryInfo, QueryLine, ShardInfo, TableInfo, UnavailableModel, VectorInfo,
    VersionInfo, VersionList,
};
pub use items::{
    DeleteRequest, DeleteResponse, FailedShard, ItemResponse, ItemUpsert, MergeResponse, PositionResponse, RefusedItem,
    ShardPosition, UpdateResponse, attributes, cell, deletion, divided, upserts,
};
pub use problem::{Problem, status};
pub use problem::{without_folders, without_places};
pub use reply::{Reply, embedding};
pub use request::{EmbedRequest, RankRequest, RetrieveRequest, Shape};
pub use response::{
    BatchEntry, BatchResponse, EmbedResponse, Explain, Item, ItemTable, MissingShard, ProbesInfo, RetrieveResponse,
    Retrieved, Served, ShardSteps, Step,
};
pub use schemas::{RetrieveOneOrMany, RetrievedOneOrMany, UpsertRequest};
pub use sizes::Widths;
pub use slow::{SlowCall, SlowPass, SlowResponse};
pub use stepwise::{ColumnReader, RowWriter};
pub use traffic::{
    CanaryInfo, SeenInfo, ShadowDiff, ShadowInfo, ShadowResponse, TrafficRequest, TrafficResponse, traffic_info,
};
pub use values::{FeatureValue, Named};
pub use written::ItemJson;
