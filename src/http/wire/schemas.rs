//! Bodies that have two forms, as the OpenAPI document shows them.

use utoipa::openapi::schema::{ArrayBuilder, KnownFormat, ObjectBuilder, OneOfBuilder, SchemaFormat, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use super::items::ItemUpsert;
use super::request::RetrieveRequest;
use super::response::{BatchResponse, RetrieveResponse};
use crate::limits::DIMENSION_MAX;

/// A vector: its numbers, or these as little-endian 32-bit numbers in base64. `values::Vector` reads both.
pub struct VectorForm;

impl PartialSchema for VectorForm {
    fn schema() -> RefOr<Schema> {
        let float = SchemaFormat::KnownFormat(KnownFormat::Float);
        let number = ObjectBuilder::new().schema_type(Type::Number).format(Some(float));
        let numbers = ArrayBuilder::new().items(number).max_items(Some(DIMENSION_MAX));
        let text = ObjectBuilder::new().schema_type(Type::String).content_encoding("base64");
        let both = OneOfBuilder::new().item(numbers).item(text);
        both.description(Some("A vector: a list of numbers, or little-endian 32-bit ones in base64.")).into()
    }
}

impl ToSchema for VectorForm {}

/// The body of a retrieval.
#[derive(utoipa::ToSchema, serde::Deserialize)]
#[serde(untagged)]
#[allow(clippy::large_enum_variant)]
#[expect(dead_code, reason = "a schema of the document, never a value: `wire::retrievals` reads both forms")]
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
#[expect(dead_code, reason = "a schema of the document, never a value: `wire::upserts` reads both forms")]
pub struct UpsertRequest {
    /// Each taken or refused by itself.
    #[schema(min_items = 1, max_items = 10000)]
    items: Vec<ItemUpsert>,
}

/// The answer to a retrieval.
#[derive(utoipa::ToSchema, serde::Serialize)]
#[serde(untagged)]
#[expect(dead_code, reason = "a schema of the document, never a value")]
pub enum RetrievedOneOrMany {
    /// To one request.
    One(Box<RetrieveResponse>),
    /// To a list of them.
    Many(BatchResponse),
}
