//! The OpenAPI document, generated from the types of [`sterling_api`]. A golden file makes changes visible.

use std::sync::LazyLock;

use axum::body::Bytes;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json as value};
use utoipa::OpenApi as _;
use utoipa::openapi::path::{Operation, ParameterBuilder, ParameterIn};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{KnownFormat, ObjectBuilder, Required, SchemaFormat, Type};

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

/// The OpenAPI 3.1 document of this API.
#[utoipa::path(get, path = "/openapi.json", tag = "health", responses((status = 200, body = Object)))]
pub async fn openapi() -> Response {
    // The document is generated once: the call needs no key, and generating it takes longer than a request.
    static TEXT: LazyLock<Bytes> = LazyLock::new(|| document().to_string().into());
    ([(CONTENT_TYPE, "application/json")], TEXT.clone()).into_response()
}

/// Completes the derived document: utoipa does not know of bodies that are not JSON, of routers, and that a value may fit several
/// untagged forms.
pub fn document() -> Value {
    // Cannot fail: the document consists of texts and numbers.
    let mut document = serde_json::to_value(derived()).unwrap_or_default();
    for (path, item) in document["paths"].as_object_mut().into_iter().flatten() {
        for (method, call) in item.as_object_mut().into_iter().flatten() {
            complete(call, &format!("{} {path}", method.to_uppercase()));
        }
    }
    any_of(document)
}

fn complete(call: &mut Value, name: &str) {
    for parameter in call.get_mut("parameters").and_then(Value::as_array_mut).into_iter().flatten() {
        if ["min_position", "if_position"].iter().any(|position| parameter["name"] == *position) {
            // A router accepts one position per shard, separated by commas.
            parameter["schema"] =
                value!({"type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9]+(,[0-9]+)*$"});
        }
    }
    call.get_mut("requestBody").into_iter().for_each(binary);
    for (status, answer) in call.get_mut("responses").and_then(Value::as_object_mut).into_iter().flatten() {
        let reported = match status.as_str() {
            "200" => format!("The answer of {name}."),
            _ => "The problem, and whether the same request may succeed later.".to_owned(),
        };
        binary(answer);
        let description = &mut answer["description"];
        if description.as_str().is_none_or(str::is_empty) {
            *description = reported.into();
        }
    }
}

/// Describes bodies that are neither JSON nor text as bytes instead of lists of numbers.
fn binary(body: &mut Value) {
    for (media_type, content) in body.get_mut("content").and_then(Value::as_object_mut).into_iter().flatten() {
        if !media_type.starts_with("text/") && !media_type.contains("json") {
            content["schema"] = value!({"type": "string", "format": "binary"});
        }
    }
}

/// Replaces `oneOf` by `anyOf`, because a value may fit several forms.
fn any_of(schema: Value) -> Value {
    match schema {
        Value::Object(fields) => {
            let renamed = |(name, value): (String, Value)| {
                let is_choice = name == "oneOf" && value.is_array();
                (if is_choice { "anyOf".to_owned() } else { name }, any_of(value))
            };
            fields.into_iter().map(renamed).collect()
        }
        Value::Array(values) => values.into_iter().map(any_of).collect(),
        other => other,
    }
}

fn derived() -> utoipa::openapi::OpenApi {
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
        for (folder, pin, schema, reported) in [
            ("versions", "version", number, "This version of the model answers."),
            ("labels", "label", text, "The version that the label points to answers."),
        ] {
            let mut item = item.clone();
            item.post = item.post.map(|call| pinned(call, verb, pin, schema, reported));
            document.paths.paths.insert(format!("/v1/models/{{model}}/{folder}/{{{pin}}}:{verb}"), item);
        }
    }
    document
}

/// Derives the call that pins a loaded version from the unpinned call.
fn pinned(mut call: Operation, verb: &str, pin: &str, schema: ObjectBuilder, reported: &str) -> Operation {
    let pin_in_path =
        ParameterBuilder::new().name(pin).parameter_in(ParameterIn::Path).required(Required::True).schema(Some(schema));
    call.parameters.get_or_insert_default().push(pin_in_path.build().into());
    call.operation_id = Some(format!("{verb}_{pin}"));
    call.summary = call.summary.map(|summary| format!("{summary} {reported}"));
    call
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    #[test]
    fn the_document_is_the_golden_one() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/openapi.json");
        let made = serde_json::to_string_pretty(&super::document()).unwrap() + "\n";
        if std::env::var_os("STERLING_BLESS").is_some() {
            std::fs::write(path, &made).unwrap();
        }
        let golden = std::fs::read_to_string(path).unwrap();
        assert!(made == golden, "the API changed: read the difference, then run with STERLING_BLESS=1");
    }
}
