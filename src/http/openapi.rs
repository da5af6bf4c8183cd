//! The OpenAPI document, made from the types of [`super::wire`]. A golden file holds it, so that a change is seen.

use axum::response::Response;
use utoipa::OpenApi as _;
use utoipa::openapi::path::{Operation, ParameterBuilder, ParameterIn};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{KnownFormat, ObjectBuilder, Required, SchemaFormat, Type};

use super::answer::json;
use super::{browse, calls, console, inference, items, parts, passes, rows, traffic};

#[derive(utoipa::OpenApi)]
#[openapi(
    info(title = "Sterling", description = "Index-as-model retrieval: one forward pass answers a request."),
    paths(
        passes::retrieve,
        passes::rank,
        passes::embed,
        calls::models,
        calls::model,
        calls::versions,
        calls::version,
        calls::load,
        calls::activate,
        calls::unload,
        items::upsert,
        items::delete,
        items::item,
        items::position,
        items::merge,
        calls::labels,
        calls::put_label,
        calls::delete_label,
        calls::label,
        traffic::traffic,
        traffic::put_traffic,
        traffic::delete_traffic,
        traffic::stop,
        traffic::shadow,
        browse::find,
        browse::column,
        browse::index,
        browse::shards,
        calls::queries,
        parts::pass,
        parts::parts,
        rows::rows,
        calls::slow,
        inference::server,
        inference::server_too,
        inference::live,
        inference::ready,
        inference::model,
        inference::version,
        inference::model_ready,
        inference::version_ready,
        inference::infer,
        inference::infer_version,
        calls::live,
        calls::ready,
        calls::metrics,
        openapi,
        console::console
    )
)]
struct Document;

/// This API as OpenAPI 3.1.
#[utoipa::path(get, path = "/openapi.json", tag = "health", responses((status = 200, body = Object)))]
pub async fn openapi() -> Response {
    json(&document())
}

/// The document.
pub fn document() -> utoipa::openapi::OpenApi {
    let mut document = Document::openapi();
    let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some("A key of a server that has any."));
    let components = document.components.get_or_insert_default();
    components.add_security_scheme("key", SecurityScheme::Http(scheme.build()));
    document.security = Some(vec![SecurityRequirement::default(), SecurityRequirement::new("key", [""; 0])]);
    for verb in ["retrieve", "rank", "embed"] {
        let item = document.paths.paths.get(&format!("/v1/models/{{model}}:{verb}"));
        let Some(item) = item.cloned() else { continue };
        let number = ObjectBuilder::new()
            .schema_type(Type::Integer)
            .format(Some(SchemaFormat::KnownFormat(KnownFormat::Int64)))
            .minimum(Some(0));
        let text = ObjectBuilder::new().schema_type(Type::String);
        for (folder, pin, schema, said) in [
            ("versions", "version", number, "This version of the model answers."),
            ("labels", "label", text, "The version that the label points to answers."),
        ] {
            let mut item = item.clone();
            item.post = item.post.map(|call| pinned(call, verb, pin, schema, said));
            document.paths.paths.insert(format!("/v1/models/{{model}}/{folder}/{{{pin}}}:{verb}"), item);
        }
    }
    document
}

/// The same call to a version that is in memory, whichever answers other requests.
fn pinned(mut call: Operation, verb: &str, pin: &str, schema: ObjectBuilder, said: &str) -> Operation {
    let pin_in_path =
        ParameterBuilder::new().name(pin).parameter_in(ParameterIn::Path).required(Required::True).schema(Some(schema));
    call.parameters.get_or_insert_default().push(pin_in_path.build().into());
    call.operation_id = Some(format!("{verb}_{pin}"));
    call.summary = call.summary.map(|summary| format!("{summary} {said}"));
    call
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
