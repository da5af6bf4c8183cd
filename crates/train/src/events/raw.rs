//! An event before it is checked against a model.

use std::collections::BTreeMap;

use serde::Serialize;

use sterling_core::request::Features;

/// An event as a file has it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RawEvent {
    pub(crate) id: Option<String>,
    pub(crate) user: Features,
    pub(crate) item: i64,
    pub(crate) time: Option<f64>,
    pub(crate) kind: Option<String>,
    pub(crate) value: Option<f64>,
    pub(crate) labels: BTreeMap<String, f64>,
    pub(crate) weight: Option<f64>,
    pub(crate) exclude: Vec<i64>,
}

/// Why an event is not taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Refusal {
    /// The field that is wrong, empty where it is the event as a whole.
    pub(crate) field: String,
    /// What came and what was expected.
    pub(crate) reason: String,
}

impl Refusal {
    pub(crate) fn of(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Refusal { field: field.into(), reason: reason.into() }
    }
}
