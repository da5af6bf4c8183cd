//! An event before it is checked against a model.

use std::collections::BTreeMap;

use serde::Serialize;

use sterling_core::request::Features;

/// An event as parsed from a file.
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

/// Reason why an event is rejected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct RejectionReason {
    /// Invalid field; empty if the event as a whole is invalid.
    pub(crate) field: String,
    /// Received and expected value.
    pub(crate) reason: String,
}

impl RejectionReason {
    pub(crate) fn of(field: impl Into<String>, reason: impl Into<String>) -> Self {
        RejectionReason { field: field.into(), reason: reason.into() }
    }
}
