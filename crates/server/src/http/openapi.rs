//! The OpenAPI document, made from the types of [`sterling_api`]. A golden file holds it, so that a change is seen.

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

/// This API as OpenAPI 3.1.
#[utoipa::path(get, path = "/openapi.json", tag = "health", responses((status = 200, body = Object)))]
pub async fn openapi() -> Response {
    // Whoever asks takes no key, and making it takes longer than a request.
    static TEXT: LazyLock<Bytes> = LazyLock::new(|| document().to_string().into());
    ([(CONTENT_TYPE, "application/json")], TEXT.clone()).into_response()
}

/// The document, as the calls are: what the library derives of types does not know of bodies that are no JSON, of routers, nor that forms which are told
/// apart by trying them may fit both.
pub fn document() -> Value {
    // Texts and numbers: nothing of it can fail.
    let mut document = serde_json::to_value(derived()).unwrap_or_default();
    for (path, item) in document["paths"].as_object_mut().into_iter().flatten() {
        for (method, call) in item.as_object_mut().into_iter().flatten() {
            complete(call, &format!("{} {path}", method.to_uppercase()));
        }
    }
    any_of(document)
}

/// Completes one call.
fn complete(call: &mut Value, name: &str) {
    for parameter in call.get_mut("parameters").and_then(Value::as_array_mut).into_iter().flatten() {
        if ["min_position", "if_position"].iter().any(|position| parameter["name"] == *position) {
            // Through a router one a shard, with commas.
            parameter["schema"] =
                value!({"type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9]+(,[0-9]+)*$"});
        }
    }
    call.get_mut("requestBody").into_iter().for_each(binary);
    for (status, answer) in call.get_mut("responses").and_then(Value::as_object_mut).into_iter().flatten() {
        let said = match status.as_str() {
            "200" => format!("The answer of {name}."),
            _ => "What is wrong, and whether the same request may succeed later.".to_owned(),
        };
        binary(answer);
        let description = &mut answer["description"];
        if description.as_str().is_none_or(str::is_empty) {
            *description = said.into();
        }
    }
}

/// Has bodies that are neither JSON nor text be bytes in place of lists of numbers.
fn binary(body: &mut Value) {
    for (media_type, content) in body.get_mut("content").and_then(Value::as_object_mut).into_iter().flatten() {
        if !media_type.starts_with("text/") && !media_type.contains("json") {
            content["schema"] = value!({"type": "string", "format": "binary"});
        }
    }
}

/// The same schemas, of which a value may fit several forms.
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
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/openapi.json");
        let made = serde_json::to_string_pretty(&super::document()).unwrap() + "\n";
        if std::env::var_os("STERLING_BLESS").is_some() {
            std::fs::write(path, &made).unwrap();
        }
        let golden = std::fs::read_to_string(path).unwrap();
        assert!(made == golden, "the API changed: read the difference, then run with STERLING_BLESS=1");
    }
}
