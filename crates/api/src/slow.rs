//! JSON types of the slow call log.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::response::Explain;

/// A call that was among the slowest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SlowCall {
    /// Time of the answer, in UTC.
    pub time: String,
    /// Request id, as in the answer and in the log.
    pub id: String,
    /// Trace id from the caller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<String>,
    /// Name of the API key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Name of the call, such as `retrieve`.
    pub call: String,
    /// HTTP status.
    pub status: u16,
    /// Milliseconds from the end of the request header to the end of the answer.
    pub ms: f64,
    /// Statistics of the pass, if the call reached it.
    #[serde(flatten, default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = SlowPass)]
    pub pass: Option<SlowPass>,
}

/// Statistics of the pass of a slow call; absent for a call that did not reach the pass.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SlowPass {
    /// Name of the model.
    #[schema(required = false)]
    pub model: String,
    /// Version that answered.
    #[schema(required = false)]
    pub version: u64,
    /// Number of requests in the body.
    #[schema(required = false)]
    pub requests: usize,
    /// Milliseconds from admission by the engine to the answer; time not covered by steps was spent waiting for a worker.
    #[schema(required = false)]
    pub engine_ms: f64,
    /// Statistics of the steps, if the body had one request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub explain: Option<Explain>,
}

/// The slowest calls of the last minutes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SlowResponse {
    /// Length of a window; calls of the current and of the previous window are listed.
    pub window_seconds: u64,
    /// Calls, slowest first.
    pub calls: Vec<SlowCall>,
}
