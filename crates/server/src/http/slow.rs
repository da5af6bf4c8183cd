//! Records the slowest calls with the work of their steps, for operators.

use std::time::Duration;

use sterling_api::{Served, SlowPass};
use sterling_core::request::Explain;

/// Longest recorded filter, in bytes.
const FILTER_BYTES_MAX: usize = 2048;

/// Work of a pass for a call, for logs and traces.
#[derive(Clone)]
pub(super) struct PassWork {
    pub(super) model: String,
    pub(super) version: u64,
    pub(super) requests: usize,
    /// Time from admission by the engine to the answer.
    pub(super) engine: Duration,
    pub(super) explain: Option<Box<Explain>>,
}

impl PassWork {
    /// Creates the record of one request, answered by this version.
    pub(super) fn of(served: &Served) -> Self {
        let (model, version) = (served.model.clone(), served.version);
        PassWork { model, version, requests: 1, engine: Duration::ZERO, explain: None }
    }
}

impl From<PassWork> for SlowPass {
    fn from(passed: PassWork) -> Self {
        let PassWork { model, version, requests, engine, explain } = passed;
        let explain = explain.map(|explain| {
            let mut explain = sterling_api::Explain::from(&*explain);
            explain.filter.truncate(explain.filter.floor_char_boundary(FILTER_BYTES_MAX));
            explain
        });
        SlowPass { model, version, requests, engine_ms: millis(engine), explain }
    }
}

/// Returns the time in milliseconds, at a resolution of 1 µs.
pub(super) fn millis(time: Duration) -> f64 {
    time.as_micros() as f64 / 1000.0
}
