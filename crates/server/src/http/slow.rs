//! What is told of the slowest calls: what their steps did, which an operator looks at when a request was slow.

use std::time::Duration;

use sterling_api::{Served, SlowPass};
use sterling_core::request::Explain;

/// Longest filter that is kept, in bytes.
const FILTER_BYTES_MAX: usize = 2048;

/// What a pass did for a call, on its way to those who note it.
#[derive(Clone)]
pub(super) struct Passed {
    pub(super) model: String,
    pub(super) version: u64,
    pub(super) requests: usize,
    /// From when the engine took it in to its answer.
    pub(super) engine: Duration,
    pub(super) explain: Option<Box<Explain>>,
}

impl Passed {
    /// That of one request, answered by this snapshot.
    pub(super) fn of(served: &Served) -> Self {
        let (model, version) = (served.model.clone(), served.version);
        Passed { model, version, requests: 1, engine: Duration::ZERO, explain: None }
    }
}

impl From<Passed> for SlowPass {
    fn from(passed: Passed) -> Self {
        let Passed { model, version, requests, engine, explain } = passed;
        let explain = explain.map(|explain| {
            let mut explain = sterling_api::Explain::from(&*explain);
            explain.filter.truncate(explain.filter.floor_char_boundary(FILTER_BYTES_MAX));
            explain
        });
        SlowPass { model, version, requests, engine_ms: millis(engine), explain }
    }
}

/// A time in milliseconds, to the microsecond.
pub(super) fn millis(time: Duration) -> f64 {
    time.as_micros() as f64 / 1000.0
}
