//! What is told of slow calls.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::response::Explain;

/// A call that was among the slowest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SlowCall {
    /// When it was answered, in UTC.
    pub time: String,
    /// The request's id, as its answer had it and the log has it.
    pub id: String,
    /// The trace that its caller named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<String>,
    /// The name of its key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The call, such as `retrieve`.
    pub call: String,
    /// The HTTP status.
    pub status: u16,
    /// Milliseconds from the end of its header to that of the answer.
    pub ms: f64,
    /// What answered it, where anything did.
    #[serde(flatten, default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = SlowPass)]
    pub pass: Option<SlowPass>,
}

/// What a pass did for a slow call; of a call that nothing answered there is nothing of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SlowPass {
    /// The model.
    #[schema(required = false)]
    pub model: String,
    /// The version that answered.
    #[schema(required = false)]
    pub version: u64,
    /// Requests in its body.
    #[schema(required = false)]
    pub requests: usize,
    /// Milliseconds from when the engine took it in to its answer: what the steps do not account for, it waited for a worker.
    #[schema(required = false)]
    pub engine_ms: f64,
    /// What the steps did, where its body had one request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub explain: Option<Explain>,
}

/// The slowest calls of the last minutes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SlowResponse {
    /// Calls of this window and of the one before are told.
    pub window_seconds: u64,
    /// Slowest first.
    pub calls: Vec<SlowCall>,
}
