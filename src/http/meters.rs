//! Handles of the metrics of calls: to ask for one by its name and labels costs as much as all else of a refusal.

use std::sync::OnceLock;
use std::time::Duration;

use axum::http::StatusCode;
use metrics::{Counter, Histogram, counter, histogram};

/// The labels of calls; whatever has none of them is the last.
const CALLS: [&str; 35] = [
    "retrieve",
    "rank",
    "embed",
    "pass",
    "rows",
    "parts",
    "activate",
    "load",
    "unload",
    "models",
    "model",
    "versions",
    "version",
    "labels",
    "label",
    "index",
    "shards",
    "column",
    "find",
    "item",
    "position",
    "upsert",
    "delete",
    "merge",
    "queries",
    "slow",
    "traffic",
    "shadow",
    "metrics",
    "health",
    "openapi",
    "console",
    "inference",
    "infer",
    "other",
];
/// The statuses with their labels; whatever has none of them is the last.
const STATUSES: [(u16, &str); 18] = [
    (200, "200"),
    (400, "400"),
    (401, "401"),
    (403, "403"),
    (404, "404"),
    (405, "405"),
    (408, "408"),
    (409, "409"),
    (410, "410"),
    (413, "413"),
    (415, "415"),
    (422, "422"),
    (429, "429"),
    (500, "500"),
    (503, "503"),
    (504, "504"),
    (507, "507"),
    (0, "other"),
];

/// The metrics of one call, made when they are needed first: what nobody calls is not shown.
#[derive(Default)]
struct CallMeters {
    seconds: OnceLock<Histogram>,
    answers: [OnceLock<Counter>; STATUSES.len()],
}

/// The metrics of all calls.
pub(super) struct AnswerMeters {
    calls: [CallMeters; CALLS.len()],
}

impl Default for AnswerMeters {
    fn default() -> Self {
        AnswerMeters { calls: std::array::from_fn(|_| CallMeters::default()) }
    }
}

impl AnswerMeters {
    /// Counts an answer.
    pub(super) fn answered(&self, call: &'static str, status: StatusCode, took: Duration) {
        let which = CALLS.iter().position(|known| *known == call).unwrap_or(CALLS.len() - 1);
        let (meters, call) = (&self.calls[which], CALLS[which]);
        let status = STATUSES.iter().position(|(code, _)| *code == status.as_u16()).unwrap_or(STATUSES.len() - 1);
        let count = || counter!("sterling_requests_total", "call" => call, "status" => STATUSES[status].1);
        meters.answers[status].get_or_init(count).increment(1);
        let seconds = || histogram!("sterling_request_seconds", "call" => call);
        meters.seconds.get_or_init(seconds).record(took.as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::table::TABLE;

    #[test]
    fn every_call_has_its_label() {
        let unknown: Vec<_> = TABLE.iter().map(|route| route.call).filter(|call| !CALLS.contains(call)).collect();
        assert!(unknown.is_empty(), "{unknown:?}");
    }
}
