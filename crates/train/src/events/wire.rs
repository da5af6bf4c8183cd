//! Events as JSON lines.

use std::fmt;

use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};

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

/// Id of an event as a text; integers are written in decimal.
struct Id(String);

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct IdVisitor;
        impl Visitor<'_> for IdVisitor {
            type Value = Id;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text or a whole number of 64 bits")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Id, E> {
                Ok(Id(text.to_owned()))
            }

            fn visit_i64<E: Error>(self, number: i64) -> Result<Id, E> {
                Ok(Id(number.to_string()))
            }

            fn visit_u64<E: Error>(self, number: u64) -> Result<Id, E> {
                let fits = i64::try_from(number).map_err(|_| E::invalid_value(Unexpected::Unsigned(number), &self));
                fits.and_then(|number| self.visit_i64(number))
            }
        }
        from.deserialize_any(IdVisitor)
    }
}

/// Other fields of the request; only fields that training uses are parsed.
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
        id: event.id.map(|id| id.0),
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
