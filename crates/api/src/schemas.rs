//! Bodies and values that have two forms, as the OpenAPI document shows them.

use super::items::ItemUpsert;
use super::request::RetrieveRequest;
use super::response::{BatchResponse, RetrieveResponse};

/// The body of a retrieval.
#[derive(utoipa::ToSchema, serde::Deserialize)]
#[serde(untagged)]
#[allow(clippy::large_enum_variant)]
pub enum RetrieveOneOrMany {
    /// One request.
    One(Box<RetrieveRequest>),
    /// A list of them.
    Many {
        /// Each answered by itself, in this order.
        #[schema(min_items = 1, max_items = 1024)]
        requests: Vec<RetrieveRequest>,
    },
}

/// Items that are put, or whose attributes change; or, as `application/x-ndjson`, one of them a line.
#[derive(utoipa::ToSchema, serde::Deserialize)]
pub struct UpsertRequest {
    /// Each taken or refused by itself.
    #[schema(min_items = 1, max_items = 10000)]
    #[expect(dead_code, reason = "a schema of the document, never a value")]
    items: Vec<ItemUpsert>,
}

/// The answer to a retrieval.
#[derive(utoipa::ToSchema, serde::Serialize)]
#[serde(untagged)]
pub enum RetrievedOneOrMany {
    /// To one request.
    One(Box<RetrieveResponse>),
    /// To a list of them.
    Many(BatchResponse),
}

/// A value of a column.
#[derive(utoipa::ToSchema, serde::Serialize)]
#[serde(untagged)]
#[expect(dead_code, reason = "a schema of the document, never a value")]
pub(crate) enum TextOrInteger {
    /// Of a column of texts.
    Text(String),
    /// Of a column of integers.
    Integer(i64),
}
