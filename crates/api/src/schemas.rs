//! Bodies and values with two forms, as described in the OpenAPI document.

use super::items::ItemUpsert;
use super::request::RetrieveRequest;
use super::response::{BatchResponse, RetrieveResponse};

/// Body of a retrieval.
#[derive(utoipa::ToSchema, serde::Deserialize)]
#[serde(untagged)]
#[allow(clippy::large_enum_variant)]
pub enum RetrieveOneOrMany {
    /// A single request.
    One(Box<RetrieveRequest>),
    /// A list of requests.
    Many {
        /// Requests, answered independently and in this order.
        #[schema(min_items = 1, max_items = 1024)]
        requests: Vec<RetrieveRequest>,
    },
}

/// Items to put or change; as `application/x-ndjson`, one per line.
#[derive(utoipa::ToSchema, serde::Deserialize)]
pub struct UpsertRequest {
    /// Items, each accepted or rejected independently.
    #[schema(min_items = 1, max_items = 10000)]
    #[expect(dead_code, reason = "a schema of the document, never a value")]
    items: Vec<ItemUpsert>,
}

/// Answer to a retrieval.
#[derive(utoipa::ToSchema, serde::Serialize)]
#[serde(untagged)]
pub enum RetrievedOneOrMany {
    /// Answer to a single request.
    One(Box<RetrieveResponse>),
    /// Answers to a list of requests.
    Many(BatchResponse),
}

/// A value of a column.
#[derive(utoipa::ToSchema, serde::Serialize)]
#[serde(untagged)]
#[expect(dead_code, reason = "a schema of the document, never a value")]
pub(crate) enum TextOrInteger {
    /// Value of a text column.
    Text(String),
    /// Value of an integer column.
    Integer(i64),
}
