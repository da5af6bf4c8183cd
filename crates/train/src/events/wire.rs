//! Events as JSON lines.

use serde::Deserialize;

use super::raw::{RawEvent, RejectionReason};
use sterling_api::{FeatureValue, Misread, Named, read_object};
use sterling_core::limits::FEATURES_MAX;

/// Maximum number of labels per event.
const LABELS_MAX: usize = 256;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WireEvent {
    #[serde(default)]
    id: Option<Id>,
    user: Named<FeatureValue, FEATURES_MAX>,
    item: i64,
    #[serde(default)]
    time: Option<f64>,
    #[serde(default, rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    value: Option<f64>,
    #[serde(default)]
    labels: Option<Named<f64, LABELS_MAX>>,
    #[serde(default)]
    weight: Option<f64>,
    #[serde(default)]
    context: Option<Context>,
}

/// Event ids may be strings or integers.
#[derive(Deserialize)]
#[serde(untagged)]
enum Id {
    Text(String),
    Number(i64),
}

/// Other fields of the request; only those that training uses are parsed.
#[derive(Default, Deserialize)]
struct Context {
    #[serde(default)]
    exclude: Vec<i64>,
}

/// Parses an event from a line.
pub(super) fn read(line: &str) -> Result<RawEvent, RejectionReason> {
    let event: WireEvent = read_object(line.as_bytes()).map_err(|Misread { field, reason }| RejectionReason {
        // A truncated or malformed JSON text has no field.
        field: if field == "?" { String::new() } else { field },
        reason,
    })?;
    Ok(RawEvent {
        id: event.id.map(|id| match id {
            Id::Text(text) => text,
            Id::Number(number) => number.to_string(),
        }),
        user: event.user.0.into_iter().map(|(name, value)| (name, value.0)).collect(),
        item: event.item,
        time: event.time,
        kind: event.kind,
        value: event.value,
        labels: event.labels.unwrap_or_default().0,
        weight: event.weight,
        exclude: event.context.unwrap_or_default().exclude,
    })
}
