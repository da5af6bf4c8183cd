//! Schema of vectors in the OpenAPI document.

use utoipa::openapi::schema::{ArrayBuilder, KnownFormat, ObjectBuilder, OneOfBuilder, SchemaFormat, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use sterling_core::limits::DIMENSION_MAX;

/// A vector: a list of numbers, or little-endian 32-bit numbers in base64. `values::Vector` parses both.
pub(crate) struct VectorForm;

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
