//! The OpenAPI document, made from the types of [`super::wire`]. A golden file holds it, so that a change is seen.

use utoipa::OpenApi as _;

use super::calls;
use super::wire::{BatchResponse, RetrieveRequest, RetrieveResponse};

/// The body of a retrieval.
#[derive(utoipa::ToSchema, serde::Deserialize)]
#[serde(untagged)]
#[expect(dead_code, reason = "a schema of the document, never a value: `wire::retrievals` reads both forms")]
pub enum RetrieveOneOrMany {
    /// One request.
    One(Box<RetrieveRequest>),
    /// A list of them.
    Many {
        /// Each answered by itself, in this order.
        requests: Vec<RetrieveRequest>,
    },
}

/// The answer to a retrieval.
#[derive(utoipa::ToSchema, serde::Serialize)]
#[serde(untagged)]
#[expect(dead_code, reason = "a schema of the document, never a value")]
pub enum RetrievedOneOrMany {
    /// To one request.
    One(RetrieveResponse),
    /// To a list of them.
    Many(BatchResponse),
}

#[derive(utoipa::OpenApi)]
#[openapi(
    info(title = "Sterling", description = "Index-as-model retrieval: one forward pass answers a request."),
    paths(
        calls::retrieve,
        calls::rank,
        calls::embed,
        calls::models,
        calls::model,
        calls::versions,
        calls::activate,
        calls::live,
        calls::ready,
        calls::metrics
    )
)]
struct Document;

/// The document.
pub fn document() -> utoipa::openapi::OpenApi {
    Document::openapi()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    #[test]
    fn the_document_is_the_golden_one() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/openapi.json");
        let made = super::document().to_pretty_json().unwrap() + "\n";
        if std::env::var_os("STERLING_BLESS").is_some() {
            std::fs::write(path, &made).unwrap();
        }
        let golden = std::fs::read_to_string(path).unwrap();
        assert!(made == golden, "the API changed: read the difference, then run with STERLING_BLESS=1");
    }
}
